"""Time of every operator in every combination of datatypes, beside the time of copying its bytes.

    python bench/bench_ops.py [--only NAME ...] [--rounds 21] [--threads 1]

One line per combination: median and lower quartile of one call in microseconds, and the median divided by that of
``numpy.copyto`` over as many bytes as the operator's inputs, outputs and constants have, measured in the same rounds.
What moves or changes elements one by one can't be faster than about 1; products are worth many copies. Every result is
compared with the reference before anything is timed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from op_cases import Case, case, combinations

from xnnfast import Runtime, empty
from xnnfast.ops import OPS

#: Large enough for the kernel to count more than the call, small enough for the second level cache.
IMAGE = {"batch": 1, "height": 28, "width": 28}
SIZES: dict[str, dict[str, Any]] = {
    **{name: {"first": (64, 1024), "second": (64, 1024)} for name, op in OPS.items() if op.call == "xnn_define_binary"},
    **{name: {"shape": (64, 1024)} for name, op in OPS.items() if op.call in ("xnn_define_unary", "xnn_define_copy")},
    "prelu": {"first": (64, 1024), "second": (1024,)},
    "softmax": {"shape": (64, 1024)},
    "scaled_dot_product_attention": {"batch": 1, "heads": 4, "tokens": 64, "keys": 64, "channels": 64, "values": 64},
    "fully_connected": {"lead": (64,), "inner": 256, "outer": 256},
    "batch_matrix_multiply": {"first": (4,), "second": (4,), "rows": 64, "inner": 64, "columns": 64},
    "conv2d": {**IMAGE, "each_in": 32, "each_out": 32, "groups": 1, "kernel": (3, 3), "padding": 1},
    "depthwise_conv2d": {**IMAGE, "channels": 64, "multiplier": 1, "kernel": (3, 3), "padding": 1},
    "conv_transpose2d": {**IMAGE, "each_in": 32, "each_out": 32, "groups": 1, "kernel": (2, 2), "stride": 2},
    "average_pooling2d": {**IMAGE, "channels": 64, "pooling": 3, "stride": 1},
    "max_pooling2d": {**IMAGE, "channels": 64, "pooling": 3, "stride": 1},
    "argmax_pooling2d": {**IMAGE, "channels": 64, "pooling": 2},
    "global_average_pooling2d": {"shape": (1, 28, 28, 64)},
    "static_transpose": {"shape": (1, 28, 28, 64), "perm": (0, 3, 1, 2)},
    "static_reshape": {"shape": (28, 28, 64), "new_shape": (28, 1792)},
    "static_slice": {"shape": (64, 1024), "offsets": (0, 3), "sizes": (64, 1000)},
    "static_constant_pad": {"shape": (64, 1000), "before": (0, 3), "after": (0, 21)},
    "static_resize_bilinear2d": {"batch": 1, "height": 14, "width": 14, "channels": 64, "size": (28, 28)},
    **{f"concatenate{count}": {"shape": (64, 256), "axis": 1, "sizes": (256,) * 5} for count in (2, 3, 4, 5)},
}


def copied(made: Case, arrays: list[np.ndarray], outs: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Two arrays of as many bytes as the operator touches."""
    count = sum(array.nbytes for array in (*arrays, *outs)) + sum(each.nbytes for each in made.graph.constants)
    # A copy reads and writes each of its bytes.
    return np.zeros(count // 2 + 1, np.uint8), np.zeros(count // 2 + 1, np.uint8)


def measure(made: Case, threads: int, rounds: int) -> tuple[float, float, float]:
    """(median, lower quartile) of a call in seconds, median of a copy."""
    runtime = Runtime(made.graph, threads=threads)
    arrays = [np.copyto(place, array) or place for array in made.arrays()
              for place in [empty(array.shape, array.dtype)]]
    outs = [empty(array.shape, array.dtype) for array in made.check(arrays, runtime)]
    source, target = copied(made, arrays, outs)
    calls = 1
    while True:
        start = time.perf_counter()
        for _ in range(calls):
            runtime.run(*arrays, out=outs)
        if time.perf_counter() - start > 1e-3:
            break
        calls *= 2
    times: list[float] = []
    copies: list[float] = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            runtime.run(*arrays, out=outs)
        middle = time.perf_counter()
        for _ in range(calls):
            np.copyto(target, source)
        times.append((middle - start) / calls)
        copies.append((time.perf_counter() - middle) / calls)
    return statistics.median(times), statistics.quantiles(times)[0], statistics.median(copies)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="names of operators")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    unknown = set(options.only) - set(OPS)
    if unknown:
        parser.error(f"no operator is called {', '.join(sorted(unknown))}")
    print(f"{'operator':30} {'datatypes':34} {'median us':>10} {'quartile':>10} {'copies':>8}")
    for name, types in combinations():
        if options.only and name not in options.only:
            continue
        median, quartile, copy = measure(case(name, types, **SIZES.get(name, {})), options.threads,
                                         max(2, options.rounds))
        print(f"{name:30} {'/'.join(types):34} {1e6 * median:10.2f} {1e6 * quartile:10.2f} {median / copy:8.2f}",
              flush=True)


if __name__ == "__main__":
    main()
