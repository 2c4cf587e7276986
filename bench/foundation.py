"""What opening a file and calling a runtime cost; prints the figures, asserts the results.

    python bench/foundation.py

* load: time and anonymous memory for files that differ only in the size of their constants. Should be flat.
* call: ``rt.run(x, y, out=[z])`` on an add of [1, 4], against a loop in C that does setup and invoke on the same
  runtime, in one process, interleaved.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import xnnfast


def anonymous() -> int:
    """Bytes of anonymous memory of this process."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no Anonymous line in smaps_rollup")


def write_model(path: Path, megabytes: int, layers: int = 8) -> None:
    inner = 1024
    outer = megabytes * 2**20 // (layers * inner * 4)
    b = xnnfast.GraphBuilder()
    x = b.input((1, inner))
    for _ in range(layers):
        b.output(b.fully_connected(x, np.full((outer, inner), 0.5, np.float32)))
    b.save(path)


def load_figures(folder: Path) -> list[dict[str, float]]:
    sizes = (1, 100, 500)
    paths = {size: folder / f"{size}.xnn" for size in sizes}
    for size, path in paths.items():
        write_model(path, size)
    times: dict[int, list[float]] = {size: [] for size in sizes}
    grown: dict[int, int] = {}
    xnnfast.load(paths[1])
    for _ in range(21):
        for size, path in paths.items():
            before = anonymous()
            start = time.perf_counter()
            graph = xnnfast.load(path)
            times[size].append(time.perf_counter() - start)
            grown[size] = anonymous() - before
            assert graph.zero_copy == (8, 8)
            del graph
    return [
        {"MB": size, "load_us": 1e6 * statistics.median(times[size]), "anonymous_KB": grown[size] / 1024}
        for size in sizes
    ]


def call_figures() -> dict[str, float]:
    b = xnnfast.GraphBuilder()
    b.output(b.add(b.input((1, 4)), b.input((1, 4))))
    rt = xnnfast.Runtime(b.graph())
    x, y = np.arange(4, dtype=np.float32)[None], np.ones((1, 4), np.float32)
    z = xnnfast.empty((1, 4))
    out, run, rounds = [z], rt.run, 20000
    calls, floors, news = [], [], []
    for _ in range(41):
        start = time.perf_counter()
        for _ in range(rounds):
            run(x, y, out=out)
        calls.append((time.perf_counter() - start) / rounds)
        floors.append(rt._c_loop(x, y, rounds=rounds) / rounds)
        start = time.perf_counter()
        for _ in range(rounds):
            run(x, y)
        news.append((time.perf_counter() - start) / rounds)
    np.testing.assert_array_equal(z, x + y)
    call, floor, new = (1e6 * statistics.median(t) for t in (calls, floors, news))
    return {"run_out_us": call, "run_new_us": new, "c_loop_us": floor, "python_cost_us": call - floor}


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        figures = {"load": load_figures(Path(folder)), "call": call_figures(), "isa": xnnfast.config()["isa"][-1]}
    for row in figures["load"]:
        print(
            f"load {row['MB']:4d} MB of constants: {row['load_us']:7.0f} us, {row['anonymous_KB']:5.0f} KB anonymous",
            file=sys.stderr,
        )
    call = figures["call"]
    print(
        f"run(x, y, out=[z]) {call['run_out_us']:.3f} us, new arrays {call['run_new_us']:.3f} us, "
        f"C loop {call['c_loop_us']:.3f} us: Python adds {call['python_cost_us']:.3f} us",
        file=sys.stderr,
    )
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
