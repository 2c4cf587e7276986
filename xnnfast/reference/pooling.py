"""Pools over NHWC inputs and means over whole axes."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from ..datatypes import DATATYPES
from ..ops._rules import KEEP_DIMS
from ._operand import Operand, Operands, Results, Shapes, Values, limit, requantize, store
from .convolution import padded, windows


def average_pooling2d(node: Any, operands: Operands, outs: Values, shapes: Shapes) -> Results:
    x = operands[0].real
    vertical, horizontal = windows(node, x.shape, "pooling", "stride", None)
    counted = padded(np.ones((1, *x.shape[1:3], 1)), vertical, horizontal, 0)
    x = padded(x, vertical, horizontal, 0)
    total: Any = 0
    count: Any = 0
    for row in range(vertical.kernel):
        for column in range(horizontal.kernel):
            place = (slice(None), vertical.tap(row), horizontal.tap(column))
            total, count = total + x[place], count + counted[place]
    return [store(total / count, outs[0], node.clamp)]


def max_pooling2d(node: Any, operands: Operands, outs: Values, shapes: Shapes) -> Results:
    (x,), (out,) = operands, outs
    vertical, horizontal = windows(node, x.shape, "pooling", "stride", "dilation")
    entry = DATATYPES[x.datatype]
    raw = padded(x.raw, vertical, horizontal, -np.inf if entry.quantization == "none" else entry.low)
    best: Any = None
    for row in range(vertical.kernel):
        for column in range(horizontal.kernel):
            tap = raw[:, vertical.tap(row), horizontal.tap(column)]
            best = tap if best is None else np.maximum(best, tap)
    return [limit(best, out, node.clamp)]


def argmax_pooling2d(node: Any, operands: Operands, outs: Values, shapes: Shapes) -> Results:
    x = operands[0].raw
    vertical, horizontal = windows(node, x.shape, "pooling", None, None)
    # XNNPACK counts a window's places column by column, and padding repeats the edge, so that an index may name it.
    rows = np.clip(np.arange(vertical.reach) - vertical.before, 0, x.shape[1] - 1)
    columns = np.clip(np.arange(horizontal.reach) - horizontal.before, 0, x.shape[2] - 1)
    x = x[:, rows][:, :, columns]
    taps = np.stack([
        x[:, vertical.tap(row), horizontal.tap(column)]
        for column in range(horizontal.kernel) for row in range(vertical.kernel)
    ])
    # The first of equals; a NaN counts as the largest.
    index = taps.argmax(axis=0)
    best = np.take_along_axis(taps, index[None], axis=0)[0]
    return [limit(best, outs[0], node.clamp), index.astype(np.uint32)]


def _mean(x: Operand, axes: tuple[int, ...], keep: bool, out: Any, clamp: Any) -> np.ndarray:
    count = prod(x.shape[axis] for axis in axes)
    if DATATYPES[out.datatype].quantization == "tensor":
        scale = np.float32(x.value.quantization.scale) / np.float32(out.quantization.scale)
        scale *= np.float32(1) / np.float32(count)
        return requantize(x.integers.sum(axis=axes, keepdims=keep), scale, out, clamp)
    return store(x.real.sum(axis=axes, keepdims=keep) / count, out, clamp)


def global_average_pooling2d(node: Any, operands: Operands, outs: Values, shapes: Shapes) -> Results:
    return [_mean(operands[0], (-3, -2), bool(node.flags & KEEP_DIMS), outs[0], node.clamp)]


def static_reduce(node: Any, operands: Operands, outs: Values, shapes: Shapes) -> Results:
    return [_mean(operands[0], tuple(node.attrs["reduction_axes"]), bool(node.flags & KEEP_DIMS), outs[0], node.clamp)]


REFERENCES = {
    "average_pooling2d": average_pooling2d,
    "max_pooling2d": max_pooling2d,
    "argmax_pooling2d": argmax_pooling2d,
    "global_average_pooling2d": global_average_pooling2d,
    "static_reduce": static_reduce,
}
