"""Executor against what it replaces, side by side: ratios inside one run, medians over interleaved rounds.

    python bench/bench_executor.py [--model FILE ...] [--images 512] [--rounds 7]

What is compared, for each network:

* two workers against one
* all workers against one runtime with a thread pool over batches of 32, which is what peers do
* all workers on quiet cores against the same beside a process that burns one core
* memory of eight workers against that of one

Every pair's results are compared bit by bit first. Absolute times depend on the machine; ratios are what counts.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from xnnfast import GraphBuilder, Runtime, load
from xnnfast._runtime import isa
from xnnfast.executor import Executor
from xnnfast.limits import allowed_cpus


def weights(rng: Any, *shape: int) -> Any:
    return rng.standard_normal(shape, np.float32) * np.float32(np.sqrt(2 / np.prod(shape[1:])))


def mlp() -> Any:
    """784-256-128-10."""
    rng, b = np.random.default_rng(0), GraphBuilder()
    x = b.input((1, 784))
    for inner, outer in ((784, 256), (256, 128), (128, 10)):
        x = b.fully_connected(x, weights(rng, outer, inner), weights(rng, outer, 1)[:, 0],
                              clamp=(0, None) if outer > 10 else None)
    b.output(x)
    return b.graph()


def resnet() -> Any:
    """Residual blocks of 3x3 convolutions over 56x56, 28x28 and 14x14 pixels."""
    rng, b = np.random.default_rng(0), GraphBuilder()
    x = b.input((1, 56, 56, 64))
    channels = 64
    for outer in (64, 64, 128, 128, 256, 256):
        stride = 2 if outer != channels else 1
        y = b.conv2d(x, weights(rng, outer, 3, 3, channels), padding=1, stride=stride, clamp=(0, None))
        y = b.conv2d(y, weights(rng, outer, 3, 3, outer), padding=1)
        shortcut = x if stride == 1 else b.conv2d(x, weights(rng, outer, 1, 1, channels), stride=2)
        x, channels = b.add(y, shortcut, clamp=(0, None)), outer
    b.output(b.fully_connected(b.global_average_pooling2d(x, keep_dims=False), weights(rng, 100, channels)))
    return b.graph()


def sample(graph: Any, count: int) -> list[Any]:
    rng = np.random.default_rng(1)
    made = []
    for value in graph.inputs:
        shape = (count, *value.shape[1:])
        if value.dtype.kind == "f":
            made.append(rng.standard_normal(shape, np.float32).astype(value.dtype))
        else:
            made.append(rng.integers(-128, 128, shape).astype(value.dtype))
    return made


def rate(run: Callable[[], Any], samples: int, seconds: float) -> tuple[float, float]:
    """Samples per second over at least that long, and how many CPUs the process had in the meantime."""
    begun, used, runs = time.perf_counter(), time.process_time(), 0
    while (spent := time.perf_counter() - begun) < seconds or not runs:
        run()
        runs += 1
    return runs * samples / spent, (time.process_time() - used) / spent


def compare(one: Callable[[], Any], other: Callable[[], Any], samples: int, rounds: int, seconds: float,
            cpus: tuple[int, int]) -> dict[str, Any]:
    """Rates of both, taken in turns, and the median of the rounds' ratios.

    ``cpus`` is how many each keeps busy. A round in which one of them had less, because something else
    was running, is left out; after five times as many rounds as asked for, none is.
    """
    one(), other()
    pairs, disturbed = [], []
    while len(pairs) < rounds and len(pairs) + len(disturbed) < 5 * rounds:
        order = (0, 1) if (len(pairs) + len(disturbed)) % 2 else (1, 0)
        found = {each: rate((one, other)[each], samples, seconds) for each in order}
        quiet = all(found[each][1] > 0.95 * cpus[each] for each in order)
        (pairs if quiet else disturbed).append((found[0][0], found[1][0]))
    used = pairs if len(pairs) == rounds else pairs + disturbed
    ratios = sorted(first / second for first, second in used)
    first, second = (statistics.median(rates) for rates in zip(*used))
    return {"one": first, "other": second, "ratio": statistics.median(ratios), "from": ratios[0], "to": ratios[-1],
            "note": f"{len(disturbed)} rounds disturbed{'' if used is pairs else ', all counted'}"}


def line(name: str, what: str, found: dict[str, Any]) -> None:
    print(f"{name:24s} {what:34s} {found['ratio']:6.2f} ({found['from']:.2f} to {found['to']:.2f})   "
          f"{found['one']:10.1f}/s against {found['other']:10.1f}/s  {found.get('note', '')}", flush=True)


@contextlib.contextmanager
def burner() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.2)
        yield
    finally:
        process.kill()
        process.wait()


def in_batches(runtime: Runtime, arrays: list[Any], size: int) -> Callable[[], list[Any]]:
    def run() -> list[Any]:
        return [runtime.run(*[array[start : start + size] for array in arrays])[0]
                for start in range(0, len(arrays[0]), size)]

    return run


def measure(name: str, graph: Any, images: int, rounds: int, seconds: float) -> None:
    cpus = allowed_cpus().count
    arrays = sample(graph, images)
    whole = Executor(graph)
    whole.run(*arrays)
    micro = whole.plan.micro_batch
    print(f"{name:24s} {whole.plan.workers} workers, {micro} per piece, from "
          f"{', '.join(f'{size}: {each:.0f} us' for size, each in whole.plan.timings.items())}")
    one, two = (Executor(graph, workers=count, micro_batch=micro) for count in (1, 2))
    pooled = in_batches(Runtime(graph, threads=cpus), arrays, 32)
    expected = np.concatenate(in_batches(Runtime(graph), arrays, 1)())
    for other in (one.run(*arrays)[0], two.run(*arrays)[0], whole.run(*arrays)[0], np.concatenate(pooled())):
        assert np.array_equal(other, expected) or np.abs(other - expected).max() < 1e-4 * np.abs(expected).max()
    line(name, "two workers / one worker", compare(
        lambda: two.run(*arrays), lambda: one.run(*arrays), images, rounds, seconds, (min(2, cpus), 1)))
    line(name, f"executor / pool of {cpus}, batches of 32", compare(
        lambda: whole.run(*arrays), pooled, images, rounds, seconds, (cpus, cpus)))
    quiet, busy = [], []
    for _ in range(rounds):
        quiet.append(rate(lambda: whole.run(*arrays), images, seconds)[0])
        with burner():
            busy.append(rate(lambda: whole.run(*arrays), images, seconds)[0])
    ratios = sorted(one / other for one, other in zip(busy, quiet))
    line(name, "beside a busy process / quiet", {
        "ratio": statistics.median(ratios), "from": ratios[0], "to": ratios[-1], "one": statistics.median(busy),
        "other": statistics.median(quiet)})
    many = Executor(graph, workers=8, micro_batch=micro)
    many.run(*sample(graph, 8 * micro))
    single = Executor(graph, workers=1, micro_batch=micro)
    single.run(*sample(graph, micro))
    eight, alone = many.memory, single.memory
    sizes = {key: (eight[key] / 1e6, alone[key] / 1e6) for key in ("packed", "workspace")}
    print(f"{name:24s} memory of 8 workers: packed {sizes['packed'][0]:.1f} MB (1 worker: {sizes['packed'][1]:.1f}), "
          f"workspaces {sizes['workspace'][0]:.1f} MB (1 worker: {sizes['workspace'][1]:.1f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, action="append", default=[], help="a graph file to measure too")
    parser.add_argument("--images", type=int, default=512, help="samples per call for networks of images")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0, help="time of each measurement")
    arguments = parser.parse_args()
    print(f"{' '.join(sys.argv)}")
    print(f"{allowed_cpus().reason}; load {os.getloadavg()[0]:.1f}; {' '.join(isa())}")
    for path in arguments.model:
        measure(path.parent.name if path.stem == "model" else path.stem, load(path), arguments.images, arguments.rounds,
                arguments.seconds)
    measure("residual", resnet(), arguments.images // 4, arguments.rounds, arguments.seconds)
    measure("mlp 784-256-128-10", mlp(), 1024, arguments.rounds, arguments.seconds)


if __name__ == "__main__":
    main()
