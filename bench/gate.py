"""Ratios inside one run against recorded bounds: information, never a test that fails.

    python bench/gate.py [--strict] [--json]          (make bench-gate)

Both sides of a ratio are measured in turns in one process, so that the machine's speed cancels and a bound holds on
any machine. What fell short or could not be measured is said; the status is 0 all the same, or 1 with ``--strict``.
"""

from __future__ import annotations

import argparse
import json
import mmap
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import cases
import numpy as np

import xnnfast
from xnnfast.executor import Executor
from xnnfast.limits import allowed_cpus
from xnnfast.weights_cache import SETTLED_NS

ROUNDS = 15


class Bound(NamedTuple):
    """What a ratio must be."""

    name: str
    what: str
    #: At most, or at least where ``higher`` is better.
    bound: float
    higher: bool
    #: CPUs without which the ratio says nothing.
    cpus: int
    #: Gives the numbers whose medians are divided.
    measure: Callable[[Path], tuple[list[float], list[float]]]


def seconds(call: Callable[[], Any], repeat: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(repeat):
        call()
    return (time.perf_counter() - start) / repeat


def in_turns(
    one: Callable[[], float], other: Callable[[], float], rounds: int = ROUNDS
) -> tuple[list[float], list[float]]:
    one(), other()
    found: tuple[list[float], list[float]] = ([], [])
    for i in range(rounds):
        for side, call in ((0, one), (1, other)) if i % 2 == 0 else ((1, other), (0, one)):
            found[side].append(call())
    return found


def call_over_floor(folder: Path) -> tuple[list[float], list[float]]:
    b = xnnfast.GraphBuilder()
    b.output(b.add(b.input((1, 4)), b.input((1, 4))))
    runtime = xnnfast.Runtime(b.graph())
    x, y, z = (xnnfast.empty((1, 4)) for _ in range(3))
    x[:], y[:] = 1, 2
    out, run = [z], runtime.run

    def calls() -> float:
        start = time.perf_counter()
        for _ in range(20_000):
            run(x, y, out=out)
        return (time.perf_counter() - start) / 20_000

    found = in_turns(calls, lambda: runtime._c_loop(x, y, rounds=20_000) / 20_000)
    np.testing.assert_array_equal(z, x + y)
    return found


def open_over_map(folder: Path) -> tuple[list[float], list[float]]:
    path = folder / "resnet50.xnn"
    cases.build("resnet50").save(path)

    def look() -> None:
        with open(path, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as held:
            view = np.frombuffer(held, np.uint8)
            int(view[::4096].sum(dtype=np.int64))
            del view

    used, total = xnnfast.load(path).zero_copy
    assert used == total
    return in_turns(lambda: seconds(lambda: xnnfast.load(path)), lambda: seconds(look))


def workers(folder: Path) -> tuple[list[float], list[float]]:
    path = folder / "mobilenet_v2.xnn"
    cases.build("mobilenet_v2").save(path)
    x = cases.example("mobilenet_v2", batch=32)
    with Executor(path, workers=1) as one, Executor(path, workers=2) as two:
        np.testing.assert_array_equal(one.run(x)[0], two.run(x)[0])
        return in_turns(lambda: 1 / seconds(lambda: two.run(x)), lambda: 1 / seconds(lambda: one.run(x)), 9)


def cached_create(folder: Path) -> tuple[list[float], list[float]]:
    path, cache = folder / "resnet50.xnn", folder / "cache"
    if not path.exists():
        cases.build("resnet50").save(path)
    cache.mkdir()
    x = cases.example("resnet50")
    first = xnnfast.Runtime(xnnfast.load(path), weights_cache=cache)
    # Files that have just been written are read in full, because a change that follows at once would not show.
    time.sleep(1.2e-9 * SETTLED_NS)
    second = xnnfast.Runtime(xnnfast.load(path), weights_cache=cache)
    assert (first.weights_cache, second.weights_cache) == ("saved", "hit")
    np.testing.assert_array_equal(first.run(x)[0], second.run(x)[0])
    del first, second

    def create(**options: Any) -> float:
        graph = xnnfast.load(path)
        return seconds(lambda: xnnfast.Runtime(graph, **options))

    return in_turns(lambda: create(weights_cache=cache), create, 9)


def micro_batch(folder: Path) -> tuple[list[float], list[float]]:
    graph = cases.build("mobilenet_v2").graph()
    x = cases.example("mobilenet_v2", batch=32)
    whole = xnnfast.Runtime(graph)
    with Executor(graph, workers=1) as pieces:
        np.testing.assert_allclose(pieces.run(x)[0], whole.run(x)[0], atol=1e-4)
        return in_turns(lambda: seconds(lambda: pieces.run(x)), lambda: seconds(lambda: whole.run(x)), 9)


#: From two runs on a quiet machine (AMD Zen 4, 2 CPUs): 6.9 to 7.0, 0.68 to 0.70, 1.98 to 2.02, 0.013 and 0.76. The
#: room is for other machines and for noise; what falls short has got worse.
BOUNDS = (
    Bound("call", "a call with out= over setup and invoke in C, add of [1, 4]", 9.0, False, 1, call_over_floor),
    Bound("open", "load of 102 MB over mapping it and reading a byte per page", 0.9, False, 1, open_over_map),
    Bound("workers", "images/s of two workers over one, MobileNetV2, batch 32", 1.8, True, 2, workers),
    Bound("cache", "creating from the weights cache over packing, ResNet-50", 0.03, False, 1, cached_create),
    Bound("micro", "pieces over the whole batch, one worker, MobileNetV2, batch 32", 0.85, False, 1, micro_batch),
)


def figures() -> Iterator[dict[str, Any]]:
    cpus = allowed_cpus().count
    with tempfile.TemporaryDirectory() as name:
        for bound in BOUNDS:
            row: dict[str, Any] = {"name": bound.name, "what": bound.what, "bound": bound.bound, "higher": bound.higher}
            if cpus < bound.cpus:
                yield {**row, "skipped": f"needs {bound.cpus} CPUs, {cpus} are allowed"}
                continue
            try:
                one, other = bound.measure(Path(name))
            except Exception as error:
                # The others can be measured all the same.
                yield {**row, "failed": f"{type(error).__name__}: {' '.join(str(error).split())}"}
                continue
            ratio = statistics.median(one) / statistics.median(other)
            spread = [a / b for a, b in zip(one, other)]
            yield {
                **row,
                "ratio": ratio,
                "low": min(spread),
                "high": max(spread),
                "short": ratio < bound.bound if bound.higher else ratio > bound.bound,
            }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strict", action="store_true", help="status 1 if something fell short or failed")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for row in figures():
        rows.append(row)
        if options.json:
            continue
        if "skipped" in row:
            print(f"skipped      {row['what']}: {row['skipped']}")
            continue
        if "failed" in row:
            print(f"not measured {row['what']}: {row['failed']}", flush=True)
            continue
        verdict, sign = "fell short" if row["short"] else "good", ">=" if row["higher"] else "<="
        rounds = f"rounds {row['low']:.3g} to {row['high']:.3g}"
        print(f"{verdict:12} {row['what']}: {row['ratio']:.3g} ({rounds}; bound {sign} {row['bound']:g})", flush=True)
    if options.json:
        print(json.dumps(rows, indent=2))
    return int(options.strict and any(row.get("short") or "failed" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
