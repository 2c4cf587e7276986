"""How far the verdicts of ``xnnfast compare`` can be trusted on this machine: same against same, and known slowdowns.

    python bench/aa_experiment.py [--same 200] [--slow 20] [--budget 60] [--log FILE] [--kinds KIND ...] [--summary]

* A network against a copy of itself, in half of the comparisons beside a process that works and rests at random.
  What must not be: SLOWER more often than once in 200.
* The network against itself with 5, 10 and 20 % more layers, which change no bit of the result.
  What must be: SLOWER in 80, 95 and 100 % of them, within the budget each.

Comparisons are of all kinds in turn, so that an interrupted run has some of each. Each one is appended to the log as
soon as it is done; a run adds what the log lacks, and ``--summary`` only reads it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import xnnfast
from xnnfast.bench import compare, measure, stats

LAYERS, WIDTH, ROWS = 40, 256, 16
NEEDED = {5: 0.80, 10: 0.95, 20: 1.0}

NOISE = """
import random, sys, time
dice = random.Random(int(sys.argv[1]))
while True:
    end = time.monotonic() + dice.expovariate(1 / 0.4)
    while time.monotonic() < end:
        sum(range(2000))
    time.sleep(dice.expovariate(1 / 0.8))
"""


def network(path: Path, percent: int = 0) -> Path:
    """Products whose results are not negative, and so many percent more of them that multiply by one: as much work as
    the others, whatever the machine does, and the same result."""
    rng = np.random.default_rng(0)
    b = xnnfast.GraphBuilder()
    x = b.input((ROWS, WIDTH))
    for _ in range(LAYERS):
        weights = rng.standard_normal((WIDTH, WIDTH), np.float32) * np.float32(np.sqrt(2 / WIDTH))
        x = b.fully_connected(x, weights, clamp=(0, None))
    for _ in range(LAYERS * percent // 100):
        x = b.fully_connected(x, np.eye(WIDTH, dtype=np.float32), clamp=(0, None))
    b.output(x)
    b.save(path)
    return path


@contextlib.contextmanager
def noise(on: bool, seed: int) -> Iterator[None]:
    """Another process that uses about a third of a CPU, in bursts."""
    if not on:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", NOISE, str(seed)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def plan(same: int, slow: int) -> list[str]:
    """The kinds of all comparisons, mixed evenly."""
    wanted = {
        "same": (same + 1) // 2,
        "same, noise": same // 2,
        **{f"{percent} % slower": slow for percent in NEEDED},
    }
    order = [((i + 0.5) / count, kind) for kind, count in wanted.items() for i in range(count)]
    return [kind for _, kind in sorted(order)]


def one(kind: str, files: dict[str, Path], seed: int, budget: float, clock: str) -> dict[str, Any]:
    settings = compare.Settings(budget=budget, seed=seed, clock=clock)
    if "slower" in kind:
        # More layers take longer to load as well; what has to be found is that they take longer to run.
        settings.metrics = ("latency",)
    begun = time.monotonic()
    a, b = (measure.subject(path) for path in (files["a"], files[kind.removesuffix(", noise")]))
    pair = compare.pair_of(kind, a, b, batch=None, threads=1, workers=1)
    with noise(kind.endswith("noise"), seed):
        facts = compare.compare([pair], settings=settings)
    (result,) = facts["results"]
    return {
        "kind": kind,
        "verdict": facts["verdict"],
        "metrics": {each["metric"]: {key: each.get(key) for key in ("verdict", "ratio", "interval", "noise", "p")}
                    for each in result["metrics"]},
        "rounds": result["rounds"],
        "disturbed": result["disturbed"],
        "disturbances": result["disturbances"],
        "seconds": time.monotonic() - begun,
        "load": os.getloadavg()[0],
    }  # fmt: skip


def summary(rows: list[dict[str, Any]]) -> str:
    """The table of the note."""
    lines = [
        "| comparison | runs | SAME | FASTER | SLOWER | AMBIGUOUS | INVALID | latency slower | its ratio | rounds | "
        "seconds | most |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for kind in dict.fromkeys(["same", "same, noise", *(f"{percent} % slower" for percent in NEEDED)]):
        chosen = [row for row in rows if row["kind"] == kind]
        if not chosen:
            continue
        counts = Counter(row["verdict"] for row in chosen)
        latency = sum(row["metrics"]["latency"]["verdict"] == stats.SLOWER for row in chosen)
        seconds = [row["seconds"] for row in chosen]
        ratios = [row["metrics"]["latency"]["ratio"] for row in chosen]
        ratio = np.median([each for each in ratios if each is not None] or [np.nan])
        lines.append(
            f"| {kind} | {len(chosen)} | "
            + " | ".join(str(counts[verdict]) for verdict in ("SAME", "FASTER", "SLOWER", "AMBIGUOUS", "INVALID"))
            + f" | {latency} | {ratio:.3f} | {np.median([row['rounds'] for row in chosen]):.0f} | "
            f"{np.median(seconds):.0f} | {max(seconds):.0f} |"
        )
    return "\n".join(lines)


def judged(rows: list[dict[str, Any]]) -> list[str]:
    """What of the promises was kept. INVALID is no answer, but not a false one either."""
    same = [row for row in rows if row["kind"].startswith("same")]
    false = sum(row["verdict"] == stats.SLOWER for row in same)
    found = [f"same against same: {false} of {len(same)} called SLOWER (at most 1 in 200 may be)"]
    for percent, share in NEEDED.items():
        chosen = [row for row in rows if row["kind"] == f"{percent} % slower"]
        valid = [row for row in chosen if row["verdict"] != stats.INVALID]
        hits = sum(row["verdict"] == stats.SLOWER for row in chosen)
        if chosen:
            found.append(
                f"{percent} % slower: {hits} of {len(chosen)} found, {hits} of the {len(valid)} that were valid "
                f"(needed: {100 * share:.0f} %)"
            )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--same", type=int, default=200)
    parser.add_argument("--slow", type=int, default=20, help="comparisons of each slowdown")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of one comparison")
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: for machines that are never quiet"
    )
    parser.add_argument("--log", type=Path, default=Path("aa_experiment.jsonl"))
    parser.add_argument("--kinds", nargs="+", metavar="KIND", help="only these, such as 'same, noise' or '5 %% slower'")
    parser.add_argument("--minutes", type=float, help="stop after so many")
    parser.add_argument("--summary", action="store_true", help="only read the log")
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.log.read_text().splitlines()] if options.log.exists() else []
    if not options.summary:
        end = time.monotonic() + 60 * (options.minutes or 1e9)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            files = {"a": network(folder / "a.xnn"), "same": network(folder / "same.xnn")}
            for percent in NEEDED:
                files[f"{percent} % slower"] = network(folder / f"{percent}.xnn", percent)
            kinds = plan(options.same, options.slow)
            done = Counter(row["kind"] for row in rows)
            for seed, kind in enumerate(kinds):
                if time.monotonic() > end:
                    break
                done[kind] -= 1
                if done[kind] >= 0 or kind not in (options.kinds or kinds):
                    continue
                row = one(kind, files, seed, options.budget, options.clock)
                rows.append(row)
                with options.log.open("a") as stream:
                    stream.write(json.dumps(row) + "\n")
                latency = row["metrics"]["latency"]
                ratio = "-" if latency["ratio"] is None else f"{latency['ratio']:.3f}"
                print(
                    f"{len(rows)}/{len(kinds)} {kind}: {row['verdict']} (latency {ratio}) after {row['rounds']} rounds"
                    f", {row['disturbed']} disturbed, {row['seconds']:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )
    print(summary(rows))
    print()
    print("\n".join(judged(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
