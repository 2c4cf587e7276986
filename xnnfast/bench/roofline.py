"""What this machine can do at best: peak arithmetic per datatype, and bandwidth per size of the working set.

Measured with XNNPACK's own kernels, once per machine, build and number of threads, and kept in the user's cache
folder. The best of many short runs counts, so that a moment's noise does not lower the roof.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from . import record
from .environment import cpu_model

Facts = dict[str, Any]
VERSION = 1
#: Working sets of an addition (three arrays), in bytes: the caches' levels, and memory.
WORKING_SETS = (3 << 17, 3 << 21, 3 << 25)
SECONDS = 0.25


def folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "xnnfast"


def roofline(threads: int = 1, *, again: bool = False) -> Facts:
    """Peaks in GFLOP/s (for int8: GOP/s) by datatype, and GB/s by bytes of the working set."""
    from .._generated.build_info import INFO
    from .._runtime import isa

    identity = [VERSION, cpu_model(), isa(), INFO.get("key"), threads]
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    path = folder() / f"roofline-{key}.json"
    if not again:
        try:
            facts: Facts = json.loads(path.read_text("utf-8"))
            if record.misfit(facts, record.ROOFLINE) is None:
                return facts
        except (OSError, ValueError, RecursionError):
            pass
    facts = {"threads": threads, "cpu": cpu_model(), **measure(threads)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        record.save(facts, path)
    except OSError:
        # A cache that can't be written costs a second and a half each time, no more.
        facts["not_kept"] = True
    return facts


def measure(threads: int, seconds: float = SECONDS) -> Facts:
    levels = []
    for size in WORKING_SETS:
        levels.append([size, _best(_addition(size, threads), seconds) * size])
    for i in reversed(range(len(levels) - 1)):
        levels[i][1] = max(levels[i][1], levels[i + 1][1])
    rows, inner, outer = 3136, 64, 64
    operations = 2 * rows * inner * outer
    wide = 2 * 256 * 512 * 512
    peaks = {}
    for name in ("fp32", "int8"):
        small = _best(_product(name, rows, inner, outer, threads), seconds) * operations
        large = _best(_product(name, 256, 512, 512, threads), seconds) * wide
        peaks[name] = max(small, large)
    return {"peak": peaks, "levels": levels, "bandwidth": levels[-1][1]}


def roof(facts: Facts, precision: str, operations: int, nbytes: int) -> float | None:
    """Seconds that a node needs at least."""
    bandwidth = next((rate for size, rate in facts["levels"] if nbytes <= size), facts["bandwidth"])
    # No peak of its own: fp16 runs on fp32 units or faster.
    peak = facts["peak"].get(precision) or facts["peak"]["fp32"]
    seconds = max(operations / (peak * 1e9), nbytes / (bandwidth * 1e9))
    return seconds or None


def _best(call: Callable[[], object], seconds: float) -> float:
    """The highest rate of calls, per nanosecond."""
    call()
    best = float("inf")
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter_ns()
        for _ in range(5):
            call()
        best = min(best, (time.perf_counter_ns() - start) / 5)
    return 1 / best


def _addition(size: int, threads: int) -> Callable[[], object]:
    from .._runtime import Runtime, empty
    from ..builder import GraphBuilder

    count = size // 12
    b = GraphBuilder()
    b.output(b.add(b.input((count,)), b.input((count,))))
    runtime = Runtime(b.graph(), threads=threads)
    arrays = [empty((count,)) for _ in range(3)]
    for array in arrays:
        array.fill(1)
    return lambda: runtime.run(arrays[0], arrays[1], out=arrays[2:])


def _product(name: str, rows: int, inner: int, outer: int, threads: int) -> Callable[[], object]:
    from .._runtime import Runtime, empty
    from ..builder import GraphBuilder
    from ..quantization import PerChannel, PerTensor

    rng = np.random.default_rng(0)
    b = GraphBuilder()
    if name == "int8":
        x = b.input((rows, inner), "qint8", PerTensor(0.05, 0))
        weights = rng.integers(-127, 128, (outer, inner), np.int8)
        filter = b.constant(weights, "qcint8", PerChannel(np.full(outer, 0.01, np.float32), 0))
        b.output(b.fully_connected(x, filter, quantization=PerTensor(1.0, 0)))
        data = rng.integers(-127, 128, (rows, inner), np.int8)
    else:
        x = b.input((rows, inner))
        b.output(b.fully_connected(x, rng.standard_normal((outer, inner), np.float32)))
        data = rng.standard_normal((rows, inner), np.float32)
    runtime = Runtime(b.graph(), threads=threads)
    held = empty(data.shape, data.dtype)
    np.copyto(held, data)
    out = list(runtime.run(held))
    return lambda: runtime.run(held, out=out)
