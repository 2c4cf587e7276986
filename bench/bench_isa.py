"""The same networks in fp32, int8 and fp16, with all instruction sets and with fewer: one run, interleaved.

    python bench/bench_isa.py [--isa avx512skx avx2 sse4.1] [--rounds 9] [--model resnet50 mobilenet_v2]

A cap on the instruction sets (XNNFAST_ISA) holds for a process, so there is one process for each cap; it makes all
networks ready, and then they take turns: each round times every network once under every cap. One thread; times are the
thread's own processor time, and beside the median stands the lower quartile. Weights are random. fp16 is fp32's network
with arithmetic in fp16 forced, where the processor and the build have it; elsewhere it is told as missing.
Where there is AMX, a further column has its second choice of kernels (XNNFAST_SECOND_ISA) switched off.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from bench_loop_order import F, Net, mobilenet_v2, resnet50

import xnnfast
from xnnfast import Graph, PerChannel, PerTensor, Runtime
from xnnfast._runtime import isa, second_isa

PRECISIONS = ("fp32", "int8", "fp16")


class Int8Net(Net):
    """The same layers with int8 inputs, filters with a scale per channel, and int8 outputs."""

    OUT = PerTensor(1 / 16, 0)

    def _filter(self, shape: tuple[int, ...], axis: int) -> Any:
        terms = int(np.prod(shape)) // shape[axis]
        # Results spread over int8 as inputs do.
        scales = np.full(shape[axis], 1 / (74 * terms**0.5), F)
        return self.b.constant(self.rng.integers(-127, 128, shape, np.int8), "qcint8", PerChannel(scales, axis))

    def _options(self, clamp: Any) -> dict[str, Any]:
        return {"datatype": "qint8", "quantization": self.OUT, "clamp": clamp}

    def input(self, shape: tuple[int, ...]) -> Any:
        return self.b.input(shape, "qint8", self.OUT)

    def conv(self, x: Any, outer: int, kernel: int, stride: int = 1, clamp: Any = None) -> Any:
        w = self._filter((outer, kernel, kernel, x.shape[3]), 0)
        return self.b.conv2d(x, w, None, stride=stride, padding=kernel // 2, **self._options(clamp))

    def depthwise(self, x: Any, stride: int) -> Any:
        w = self._filter((1, 3, 3, x.shape[3]), 3)
        return self.b.depthwise_conv2d(x, w, None, stride=stride, padding=1, **self._options((0, 6)))

    def linear(self, x: Any, outer: int) -> Any:
        return self.b.fully_connected(x, self._filter((outer, x.shape[-1]), 0), None, **self._options(None))

    def add(self, x: Any, y: Any, clamp: Any = None) -> Any:
        return self.b.add(x, y, datatype="qint8", quantization=self.OUT, clamp=clamp)


MODELS: dict[str, Callable[..., Graph]] = {"resnet50": resnet50, "mobilenet_v2": mobilenet_v2}


class Racer:
    """A network ready to run."""

    def __init__(self, model: str, precision: str, batch: int) -> None:
        self.executor: Any = None
        graph = MODELS[model](batch, Int8Net() if precision == "int8" else Net())
        value = graph.inputs[0]
        rng = np.random.default_rng(1)
        if precision == "int8":
            self.array = rng.integers(-128, 128, value.shape).astype(np.int8)
        else:
            self.array = rng.standard_normal(value.shape, F)
        if precision == "fp16":
            self.executor = xnnfast.Executor(graph, workers=1, micro_batch=batch, precision="fp16")
            self.run: Callable[[], Any] = lambda: self.executor.run(self.array)
        else:
            runtime = Runtime(graph)
            self.run = lambda: runtime.run(self.array)
        self.run()


def child(models: list[str], batch: int) -> None:
    """Make ready, say so, then time one network for each line that comes in."""
    racers: dict[str, Racer] = {}
    missing: dict[str, str] = {}
    for model in models:
        for precision in PRECISIONS:
            try:
                racers[f"{model} {precision}"] = Racer(model, precision, batch)
            except xnnfast.UnsupportedError as error:
                missing[f"{model} {precision}"] = str(error)
    second = second_isa()
    facts = {"isa": isa(), "second_isa": second and second[0], "second_uses": second and second[2]}
    print(json.dumps({**facts, "ready": list(racers), "missing": missing}), flush=True)
    for line in sys.stdin:
        racer = racers[line.strip()]
        begin = time.thread_time()
        racer.run()
        print((time.thread_time() - begin) * 1e3, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", nargs="*", default=["avx512skx", "avx2"], metavar="NAME", help="caps beside none")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--model", nargs="*", choices=tuple(MODELS), default=["resnet50"])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all times there")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        child(chosen.model, chosen.batch)
        return
    columns: dict[str, dict[str, str]] = {"all": {}}
    if "avx512amx" in isa():
        columns["all, AMX alone"] = {"XNNFAST_SECOND_ISA": "none"}
    columns |= {cap: {"XNNFAST_ISA": cap} for cap in chosen.isa}
    command = [sys.executable, __file__, "--child", f"--batch={chosen.batch}", "--model", *chosen.model]
    children = {
        name: subprocess.Popen(command, env=os.environ | more, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for name, more in columns.items()
    }
    facts = {}
    for name, process in children.items():
        line = process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            raise SystemExit(f"the process for {name} ended with {process.wait()} before it was ready")
        facts[name] = json.loads(line)
    rows = [f"{model} {precision}" for model in chosen.model for precision in PRECISIONS]
    times: dict[str, dict[str, list[float]]] = {row: {name: [] for name in columns} for row in rows}
    for _ in range(chosen.rounds):
        for row in rows:
            for name, process in children.items():
                if row in facts[name]["ready"]:
                    process.stdin.write(f"{row}\n")  # type: ignore[union-attr]
                    process.stdin.flush()  # type: ignore[union-attr]
                    times[row][name].append(float(process.stdout.readline()))  # type: ignore[union-attr]
    for process in children.values():
        process.stdin.close()  # type: ignore[union-attr]
        process.wait()
    print(f"batch {chosen.batch}, {chosen.rounds} rounds, one thread; median (lower quartile) in ms")
    print("strongest set: " + ", ".join(f"{name}: {(facts[name]['isa'] or ['baseline'])[-1]}" for name in columns))
    print(f"| network | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for row in rows:
        cells = []
        for name in columns:
            found = times[row][name]
            quartile = sorted(found)[len(found) // 4] if found else 0
            cells.append(f"{statistics.median(found):.2f} ({quartile:.2f})" if found else "missing")
        print(f"| {row} | {' | '.join(cells)} |")
    reasons = {reason for name in columns for reason in facts[name]["missing"].values()}
    for reason in sorted(reasons):
        print(f"missing: {reason}")
    if chosen.json:
        chosen.json.write_text(json.dumps({"facts": facts, "times": times}, indent=1), "utf-8")


if __name__ == "__main__":
    main()
