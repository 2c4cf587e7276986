"""Order of the loops of matrix products: XNNPACK's against the one chosen, in one process and interleaved.

    python bench/bench_loop_order.py [--rounds 15] [--threads 1] [--only NAME] [--blocks 262144 …] [--model FILE …]
                                     [--executorch]

Every row runs one and the same runtime under each setting in turn, and outputs are compared bit by bit. With one thread
the times are the thread's own processor time, which others on the machine disturb least; with several, wall time.
Beside the median stands the lower quartile. ``--executorch`` gives every row to ExecuTorch as well, whose XNNPACK is a
newer one: the same graph in a program, in a process of its own that takes its turns; all times are wall times then.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import xnnfast
from xnnfast import Graph, GraphBuilder, PerChannel, PerToken, Runtime
from xnnfast._runtime import loop_order

F = np.float32


class Net:
    """A builder with random weights."""

    def __init__(self) -> None:
        self.b = GraphBuilder()
        self.rng = np.random.default_rng(0)

    def weights(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape, F) * F(np.prod(shape[1:]) ** -0.5)

    def conv(self, x: Any, outer: int, kernel: int, stride: int = 1, clamp: Any = None) -> Any:
        w = self.weights(outer, kernel, kernel, x.shape[3])
        return self.b.conv2d(x, w, np.zeros(outer, F), stride=stride, padding=kernel // 2, clamp=clamp)

    def depthwise(self, x: Any, stride: int) -> Any:
        channels = x.shape[3]
        w = self.weights(1, 3, 3, channels)
        return self.b.depthwise_conv2d(x, w, np.zeros(channels, F), stride=stride, padding=1, clamp=(0, 6))

    def linear(self, x: Any, outer: int) -> Any:
        return self.b.fully_connected(x, self.weights(outer, x.shape[-1]), np.zeros(outer, F))

    def linear_int8(self, x: Any, outer: int) -> Any:
        q = self.b.convert(x, "qdint8", PerToken(1))
        w = self.rng.integers(-127, 128, (outer, x.shape[-1]), np.int8)
        w = self.b.constant(w, "qcint8", PerChannel(np.full(outer, 1 / 999, F), 0))
        return self.b.fully_connected(q, w, np.zeros(outer, F), datatype="fp32")

    def input(self, shape: tuple[int, ...]) -> Any:
        return self.b.input(shape)

    def add(self, x: Any, y: Any, clamp: Any = None) -> Any:
        return self.b.add(x, y, clamp=clamp)

    def graph(self, y: Any) -> Graph:
        self.b.output(y)
        return self.b.graph()


def layers(count: int, rows: int, inner: int, outer: int, kind: str = "linear") -> Graph:
    net = Net()
    x = net.b.input((rows, inner))
    for _ in range(count):
        x = getattr(net, kind)(getattr(net, kind)(x, outer), inner)
    return net.graph(x)


def resnet50(batch: int, net: Net | None = None) -> Graph:
    net = net or Net()
    x = net.conv(net.input((batch, 224, 224, 3)), 64, 7, 2, (0, None))
    x = net.b.max_pooling2d(x, 3, stride=2, padding=1)
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            y = net.conv(x, width, 1, 1, (0, None))
            y = net.conv(net.conv(y, width, 3, stride, (0, None)), 4 * width, 1)
            x = net.add(y, x if block else net.conv(x, 4 * width, 1, stride), clamp=(0, None))
    return net.graph(net.linear(net.b.global_average_pooling2d(x, keep_dims=False), 1000))


def mobilenet_v2(batch: int, net: Net | None = None) -> Graph:
    net = net or Net()
    x = net.conv(net.input((batch, 224, 224, 3)), 32, 3, 2, (0, 6))
    plan = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    for expansion, width, blocks, first_stride in plan:
        for block in range(blocks):
            stride = 1 if block else first_stride
            y = x if expansion == 1 else net.conv(x, expansion * x.shape[3], 1, 1, (0, 6))
            y = net.conv(net.depthwise(y, stride), width, 1)
            x = net.add(y, x) if block else y
    x = net.b.global_average_pooling2d(net.conv(x, 1280, 1, 1, (0, 6)), keep_dims=False)
    return net.graph(net.linear(x, 1000))


CASES: dict[str, Callable[[], Graph]] = {
    "4 x (FC 768 -> 3072 -> 768), 197 rows": lambda: layers(4, 197, 768, 3072),
    "6 x (FC 384 -> 1536 -> 384), 197 rows": lambda: layers(6, 197, 384, 1536),
    "2 x (FC 1024 -> 4096 -> 1024), 64 rows": lambda: layers(2, 64, 1024, 4096),
    "4 x (FC 768 -> 3072 -> 768), 8 rows": lambda: layers(4, 8, 768, 3072),
    "the same, 197 rows, dynamic int8": lambda: layers(4, 197, 768, 3072, "linear_int8"),
    "ResNet-50, batch 1": lambda: resnet50(1),
    "ResNet-50, batch 8": lambda: resnet50(8),
    "MobileNetV2, batch 1": lambda: mobilenet_v2(1),
}


class ExecuTorch:
    """A process that runs a graph as a program whenever it is told to."""

    def __init__(self, graph: Graph, array: np.ndarray, threads: int) -> None:
        peers = Path(__file__).resolve().parent / "peers"
        sys.path.insert(0, str(peers))
        import environments
        import pte_export

        self.folder = tempfile.TemporaryDirectory()
        place = Path(self.folder.name)
        pte_export.export(graph, place / "model.pte")
        np.save(place / "x.npy", array)
        self.output = place / "y.npz"
        rows = len(array)
        job = {"peer": "executorch", "model": str(place / "model.pte"), "inputs": [str(place / "x.npy")],
               "range": [0, rows], "batch": rows, "threads": threads, "output": str(self.output)}  # fmt: skip
        self.child = subprocess.Popen(
            [str(environments.make("executorch")), str(peers / "peer.py"), json.dumps(job)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)  # fmt: skip
        self.hear("ready")

    def hear(self, word: str) -> None:
        assert self.child.stdout is not None
        if self.child.stdout.readline().strip() != word:
            raise ChildProcessError("ExecuTorch gave up")

    def say(self, word: str, answer: str) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(word + "\n")
        self.child.stdin.flush()
        self.hear(answer)

    def result(self) -> np.ndarray:
        self.say("save", "saved")
        with np.load(self.output) as file:
            return np.array(file["arr_0"])

    def close(self) -> None:
        self.child.kill()
        self.child.communicate()
        self.folder.cleanup()


def measure(
    graph: Graph, settings: list[int], rounds: int, threads: int, beside: bool
) -> tuple[list[list[float]], bool]:
    """Milliseconds per setting, those of ExecuTorch behind them if it is asked for, and whether all of ours gave the
    same bits."""
    rng = np.random.default_rng(1)
    arrays = []
    for value in graph.inputs:
        if value.datatype not in ("fp32", "fp16"):
            raise SystemExit(f"need a graph of fp32 or fp16 inputs, found {value.datatype}")
        arrays.append(rng.standard_normal(value.shape, F).astype(value.dtype))
    times: list[list[float]] = [[] for _ in range(len(settings) + beside)]
    results = []
    clock = time.thread_time if threads == 1 and not beside else time.perf_counter
    with Runtime(graph, threads=threads) as runtime, contextlib.ExitStack() as stack:
        other = None
        if beside:
            try:
                other = ExecuTorch(graph, arrays[0], threads)
                stack.callback(other.close)
            except ChildProcessError:
                # It can't run every graph.
                times[-1] = [float("nan")]
        for setting in settings:
            loop_order(setting)
            results.append([y.tobytes() for y in runtime.run(*arrays)])
        for _ in range(rounds):
            for setting, column in zip(settings, times):
                loop_order(setting)
                start = clock()
                runtime.run(*arrays)
                column.append((clock() - start) * 1e3)
            if other is not None:
                start = clock()
                other.say("go", "done")
                times[-1].append((clock() - start) * 1e3)
        if other is not None:
            # Dynamic quantization may round to another number there.
            want = runtime.run(*arrays)[0]
            assert np.abs(other.result() - want).max() <= 0.01 * np.abs(want).max()
    return times, all(result == results[0] for result in results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="", metavar="NAME", help="rows whose name contains this")
    parser.add_argument("--blocks", type=int, nargs="*", default=[], metavar="BYTES", help="fixed block sizes, too")
    parser.add_argument("--model", nargs="*", default=[], metavar="FILE", help="graph files as further rows")
    parser.add_argument("--executorch", action="store_true", help="beside ExecuTorch (see bench/peers)")
    chosen = parser.parse_args()
    settings = [0, 1, *chosen.blocks]
    cases = {name: make for name, make in CASES.items() if chosen.only in name}
    cases |= {path: lambda path=path: xnnfast.load(path) for path in chosen.model}
    facts = xnnfast.config()
    print(f"isa {facts['isa'][-1]}, cache {facts['l2_bytes'] >> 10} KiB, {chosen.threads} thread(s), "
          f"{chosen.rounds} rounds; median (lower quartile) in ms")  # fmt: skip
    print("| work | XNNPACK's order | chosen order | gain |" + "".join(f" {b >> 10} KiB |" for b in chosen.blocks)
          + " ExecuTorch | it over us |" * chosen.executorch)  # fmt: skip
    print("|---|---|---|---|" + "---|" * (len(chosen.blocks) + 2 * chosen.executorch))
    for name, make in cases.items():
        times, same = measure(make(), settings, chosen.rounds, chosen.threads, chosen.executorch)
        medians = [statistics.median(column) for column in times]
        quartiles = [sorted(column)[len(column) // 4] for column in times]
        cells = [f"{m:.2f} ({q:.2f})" for m, q in zip(medians, quartiles, strict=True)]
        if chosen.executorch:
            cells.append(f"{medians[-1] / medians[1]:.2f} ({quartiles[-1] / quartiles[1]:.2f})")
        gain = f"{medians[0] / medians[1]:.2f} ({quartiles[0] / quartiles[1]:.2f})"
        print(
            f"| {name} | {' | '.join([*cells[:2], gain, *cells[2:]])} |{'' if same else ' OUTPUTS DIFFER'}", flush=True
        )


if __name__ == "__main__":
    main()
