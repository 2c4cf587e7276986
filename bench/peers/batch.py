"""A pile of samples through xnnfast and its peers, each at its best setting: samples per second, side by side.

    python bench/peers/batch.py --shared DIR [--models NAME ...] [--samples 2048] [--rounds 3] [--json FILE] [--write]

First every setting of every peer is tried on an eighth of the samples: batches of 1, 8 and 32, each with all CPUs as
threads of one process, or with one process of one thread for each CPU. What was best with batches of 32, and what was
best of all, then takes turns with an Executor of xnnfast over the whole pile, forwards and backwards. Results of all
are compared. Processes live as long as the comparison, and start on a signal, so that only the samples are timed.
``--write`` puts the table into docs/benchmarks.md, between its two marks.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import run
from run import FRAGILE, NAMES, ROOT, TOLERANCE, Case, Child, difference

from xnnfast.limits import allowed_cpus

BATCHES = (1, 8, 32)
MODELS = ("MobileNetV2 fp32", "MobileNetV2 int8", "BERT-mini fp32, 128 tokens")
START, END = "<!-- batch: written by bench/peers/batch.py -->", "<!-- end of batch -->"


class Setting(NamedTuple):
    """How a peer is used."""

    batch: int
    threads: int
    processes: int

    def __str__(self) -> str:
        many = f"{self.processes} processes" if self.processes > 1 else f"{self.threads} threads"
        return f"batches of {self.batch}, {many}"


class Team:
    """Processes of one peer that share a pile of samples and start together."""

    def __init__(self, children: list[Child], outputs: list[Path]) -> None:
        self.children, self.outputs = children, outputs
        self._all_say("ready")

    def _all_say(self, word: str) -> None:
        for child in self.children:
            child.hear(word)

    def _tell_all(self, word: str) -> None:
        for child in self.children:
            child.tell(word)

    def seconds(self) -> float:
        """How long all samples take."""
        start = time.perf_counter()
        self._tell_all("go")
        self._all_say("done")
        return time.perf_counter() - start

    def results(self, output: Path) -> Path:
        """One file with the results of all processes."""
        self._tell_all("save")
        self._all_say("saved")
        parts = [np.load(each) for each in self.outputs]
        np.savez(output, **{name: np.concatenate([part[name] for part in parts]) for name in parts[0].files})
        return output


@contextlib.contextmanager
def team(case: Case, peer: str, python: Path, setting: Setting, count: int) -> Iterator[Team]:
    """As many processes as the setting says, with a part of the samples each."""
    edges = np.linspace(0, count, setting.processes + 1).astype(int)
    children, outputs = [], []
    with contextlib.ExitStack() as stack:
        for part, (first, last) in enumerate(itertools.pairwise(edges)):
            outputs.append(case.folder / f"{peer}-{setting.batch}-{setting.processes}-{part}.npz")
            job = {
                "model": str(case.files[peer]),
                "inputs": [str(case.inputs(peer, count))],
                "range": [int(first), int(last)],
                "batch": setting.batch,
                "threads": setting.threads,
                "output": str(outputs[-1]),
            }
            children.append(stack.enter_context(Child(peer, python, job)))
        yield Team(children, outputs)


def settings(case: Case, peer: str, cpus: int) -> list[Setting]:
    """What is tried: programs of ExecuTorch run one sample, whatever the batch."""
    batches: Sequence[int] = (1,) if peer.startswith("executorch") or case.single else BATCHES
    return [Setting(batch, *each) for batch in batches for each in ((cpus, 1), (1, cpus))]


def compare(case: Case, pythons: dict[str, Path], samples: int, rounds: int) -> dict[str, Any]:
    cpus = allowed_cpus().count
    few = max(32 * cpus, samples // 8)
    row: dict[str, Any] = {"model": case.name, "samples": samples, "tried": {}, "missing": dict(case.missing)}
    chosen: dict[str, list[Setting]] = {"xnnfast": [Setting(samples, cpus, 1)]}
    for peer, python in pythons.items():
        if peer == "xnnfast" or peer not in case.files:
            continue
        rates: dict[Setting, float] = {}
        for setting in settings(case, peer, cpus):
            try:
                with team(case, peer, python, setting, few) as tried:
                    rates[setting] = few / min(tried.seconds() for _ in range(2))
            except RuntimeError as reason:
                row["missing"][f"{peer}, {setting}"] = str(reason)
                print(f"{case.name}: {NAMES[peer]}, {setting}: {reason}", file=sys.stderr, flush=True)
        if not rates:
            continue
        row["tried"][peer] = {str(setting): rate for setting, rate in rates.items()}
        best = max(rates, key=lambda each: rates[each])
        largest = max(setting.batch for setting in rates)
        large = max((each for each in rates if each.batch == largest), key=lambda each: rates[each])
        chosen[peer] = list(dict.fromkeys((large, best)))
        print(f"{case.name}: {NAMES[peer]} {rates[best]:.4g}/s at best, {best}", file=sys.stderr, flush=True)
    with contextlib.ExitStack() as stack:
        teams = {}
        for peer, each in chosen.items():
            for setting in each:
                teams[peer, setting] = stack.enter_context(team(case, peer, pythons[peer], setting, samples))
        times: dict[Any, list[float]] = {key: [] for key in teams}
        for turn in range(rounds):
            for key in list(teams) if turn % 2 == 0 else reversed(teams):
                times[key].append(teams[key].seconds())
        ours = next(iter(teams))
        want = teams[ours].results(case.folder / "want.npz")
        row["peers"] = []
        for (peer, setting), taken in times.items():
            gap = 0.0
            if (peer, setting) != ours:
                gap = difference(want, teams[peer, setting].results(case.folder / "got.npz"))
            row["peers"].append({
                "peer": peer, "setting": "Executor" if peer == "xnnfast" else str(setting), "batch": setting.batch,
                "rate": samples / statistics.median(taken), "rates": [samples / each for each in taken],
                "ratio": statistics.median(b / a for a, b in zip(times[ours], taken)), "difference": gap,
                "equal": gap <= FRAGILE.get(case.name, TOLERANCE[case.precision]),
            })  # fmt: skip
    return row


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| network | who | setting | samples/s | xnnfast over it | results differ by |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        for each in row["peers"]:
            rate = f"{each['rate']:,.0f}" if each["rate"] >= 1000 else f"{each['rate']:.3g}"
            lines.append(
                f"| {row['model']} | {NAMES[each['peer']]} | {each['setting']} | {rate} | "
                + ("- | - |" if each["peer"] == "xnnfast" else f"{each['ratio']:.2f} | {each['difference']:.1g}"
                   f"{'' if each['equal'] else ': wrong'} |")
            )  # fmt: skip
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(run.MODELS), metavar="NAME")
    parser.add_argument("--peers", nargs="+", default=[name for name in NAMES if name != "xnnfast"], metavar="NAME")
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shared", type=Path, help="folder with programs exported by ExecuTorch")
    parser.add_argument("--json", type=Path, help="keep what is measured")
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    options = parser.parse_args()
    pythons = run.pythons_of(options.peers)
    load = os.getloadavg()[0]
    site = run.site_of_litert(pythons)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        for number, model in enumerate(options.models):
            case = Case(model, Path(name) / str(number), options.shared, site)
            rows.append(compare(case, pythons, options.samples, options.rounds))
            if options.json is not None:
                options.json.write_text(json.dumps(rows, indent=1))
    text = "\n".join([
        START,
        f"{options.samples} samples, medians of {options.rounds} rounds in turns; machine: {run.machine()}; load "
        f"before the run {load:.1f}.",
        "",
        *table(rows),
        END,
    ])  # fmt: skip
    print(text)
    if options.write:
        page = ROOT / "docs/benchmarks.md"
        before, _, rest = page.read_text().partition(START)
        page.write_text(before + text + rest.partition(END)[2])
    return int(not all(each["equal"] for row in rows for each in row["peers"]))


if __name__ == "__main__":
    sys.exit(main())
