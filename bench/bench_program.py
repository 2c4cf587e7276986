"""Calls per second of a whole program, merged and as written, and of ExecuTorch's own runtime on the same file.

    python bench/bench_program.py [FILE.pte] [--input X.npy ...] [--executorch PYTHON] [--executorch-numpy PYTHON]

``--executorch`` names the interpreter of an environment with the package ``executorch`` (and torch),
``--executorch-numpy`` one with ``executorch-numpy-runtime``; neither is needed by this package or its tests:

    python -m venv env && env/bin/pip install executorch torch

Each competitor is a process of its own with one thread (but executorch-numpy-runtime, which has no setting for that).
They take turns, forward and backward, and only one of them runs at a time, on one CPU where the machine allows that.
What is printed are ratios of calls per second within a round, their median and range over the rounds; beside wall
time, CPU time of the process, which other load on the machine disturbs less. Results are compared first.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SHARED = Path(__file__).resolve().parents[2] / "shared/models/bert_mini_fp32_b1"


# ---- the competitors, each in its own process


def ours(path: str, merge: bool, threads: int) -> Callable[..., Any]:
    from xnnfast import Program

    program = Program(path, merge=merge, threads=threads)
    print(program.plan().__str__().splitlines()[0], file=sys.stderr)
    return program.run


def executorch(path: str, threads: int) -> Callable[..., Any]:
    import torch
    from executorch.extension.pybindings import portable_lib
    from executorch.runtime import Runtime

    # Before anything is loaded: the pool must not change under a method.
    portable_lib._unsafe_reset_threadpool(threads)
    program = Runtime.get().load_program(path)
    method = program.load_method("forward")

    def run(*arrays: Any) -> Any:
        return method.execute([torch.from_numpy(x) for x in arrays])

    run.keep = program  # type: ignore[attr-defined]
    return run


def executorch_numpy(path: str, threads: int) -> Callable[..., Any]:
    from executorch_numpy_runtime import Runtime

    program = Runtime.get().load_program(path)
    method = program.load_method("forward")

    def run(*arrays: Any) -> Any:
        return method(list(arrays))

    run.keep = program  # type: ignore[attr-defined]
    return run


KINDS: dict[str, Callable[[str, int], Callable[..., Any]]] = {
    "merged": lambda path, threads: ours(path, True, threads),
    "plain": lambda path, threads: ours(path, False, threads),
    "executorch": executorch,
    "executorch-numpy": executorch_numpy,
}


def work(kind: str, path: str, inputs: list[str], threads: int, results: str) -> None:
    """Answer each line, a number of calls, with the wall and CPU seconds that they took."""
    # Libraries print what they like on stdout; the answers have it to themselves.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    run = KINDS[kind](path, threads)
    arrays = [np.load(x) for x in inputs]
    np.savez(results, *[np.asarray(x) for x in run(*arrays)])
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        calls = int(line)
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(calls):
            run(*arrays)
        print(time.perf_counter() - wall, time.process_time() - cpu, file=answers, flush=True)


class Worker:
    def __init__(self, kind: str, python: str, options: argparse.Namespace, folder: Path, cpus: set[int]) -> None:
        self.kind = kind
        self.results = folder / f"{kind}.npz"
        arguments = [
            python,
            __file__,
            options.program,
            "--threads",
            str(options.threads),
            "--work",
            kind,
            "--results",
            str(self.results),
        ]
        for each in options.input:
            arguments += ["--input", each]

        def pin() -> None:
            if kind != "executorch-numpy":
                with contextlib.suppress(OSError, AttributeError):
                    os.sched_setaffinity(0, cpus)

        self.log = (folder / f"{kind}.log").open("w+")
        self.process = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, preexec_fn=pin
        )
        if self.answer() != "ready":
            self.process.wait()
            self.log.seek(0)
            sys.exit(f"{kind} does not start:\n{self.log.read()[-2000:]}")

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def time(self, calls: int) -> tuple[float, float]:
        """Wall and CPU seconds of one call."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{calls}\n")
        self.process.stdin.flush()
        wall, cpu = map(float, self.answer().split())
        return wall / calls, cpu / calls

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        self.log.close()


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", nargs="?", default=str(SHARED / "model.pte"))
    parser.add_argument("--input", action="append", default=[], help=".npy file of an input, in order")
    parser.add_argument("--executorch", metavar="PYTHON")
    parser.add_argument("--executorch-numpy", metavar="PYTHON")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.5, help="of one turn")
    parser.add_argument("--tolerance", type=float, default=1e-5, help="of the largest result")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--results", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, options.program, options.input, options.threads, options.results)
        return 0
    if not Path(options.program).exists():
        parser.error(f"{options.program} is not here; name a program")
    if not options.input:
        options.input = [str(path) for path in sorted(Path(options.program).parent.glob("input_[0-9].npy"))]
    kinds = {"merged": sys.executable, "plain": sys.executable}
    kinds |= {"executorch": options.executorch} if options.executorch else {}
    kinds |= {"executorch-numpy": options.executorch_numpy} if options.executorch_numpy else {}
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    with tempfile.TemporaryDirectory() as name:
        workers = [
            Worker(kind, python, options, Path(name), set(allowed[-options.threads :]))
            for kind, python in kinds.items()
        ]
        try:
            return compare(workers, options)
        finally:
            for worker in workers:
                worker.close()


def compare(workers: list[Worker], options: argparse.Namespace) -> int:
    results = {worker.kind: list(np.load(worker.results).values()) for worker in workers}
    for kind, arrays in results.items():
        for mine, want in zip(arrays, results["plain"]):
            assert mine.shape == want.shape, kind
            error = np.abs(mine.astype(np.float64) - want).max(initial=0) / (np.abs(want).max(initial=0) or 1)
            assert error <= options.tolerance, f"{kind}: results differ by {error:.1e} of the largest"
    # Warm up, and find out how many calls make a turn.
    calls = {}
    for worker in workers:
        worker.time(3)
        calls[worker.kind] = max(3, round(options.seconds / worker.time(5)[0]))
    times: dict[str, list[tuple[float, float]]] = {worker.kind: [] for worker in workers}
    for number in range(options.rounds):
        for worker in workers if number % 2 == 0 else workers[::-1]:
            times[worker.kind].append(worker.time(calls[worker.kind]))
    record: dict[str, Any] = {
        "program": options.program,
        "threads": options.threads,
        "rounds": options.rounds,
        "times": times,
        "ratios": {},
    }
    for kind, pairs in times.items():
        wall, cpu = zip(*pairs)
        line = (
            f"{kind:17} {statistics.median(wall) * 1e3:8.3f} ms, {statistics.median(cpu) * 1e3:8.3f} ms of CPU a call"
        )
        if kind != "merged":
            ratios = [[other[which] / mine[which] for mine, other in zip(times["merged"], pairs)] for which in (0, 1)]
            record["ratios"][kind] = [statistics.median(each) for each in ratios]
            line += f"; merged makes {spread(ratios[0])} times the calls, {spread(ratios[1])} by CPU time"
        if not options.json:
            print(line)
    if options.json:
        print(json.dumps(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
