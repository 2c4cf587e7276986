"""Pooling over NHWC inputs: average, maximum with and without index, global average."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ._quant import same_pairs, strict_limits
from ._row import Op, Refusal, Shape, Shapes
from ._rules import (
    CLAMP,
    FLOATS,
    KEEP_DIMS,
    MOVABLE,
    PADDING,
    SAME_PADDING,
    Axis,
    rank,
    same,
    text,
)

WINDOW = "pooling_height pooling_width"
STRIDE = "stride_height stride_width"
DILATION = "dilation_height dilation_width"
_FIELDS = (("high", "padding_top", "padding_bottom", "pooling_height", "stride_height", "dilation_height"),
           ("wide", "padding_left", "padding_right", "pooling_width", "stride_width", "dilation_width"))
MAXIMUM = [Axis(*fields) for fields in _FIELDS]
AVERAGE = [Axis(*fields[:-1], None) for fields in _FIELDS]
# The windows of argmax pooling stand side by side.
ARGMAX = [Axis(*fields[:4], fields[3], None) for fields in _FIELDS]


def _pooled(node: Any, ins: Shapes, axes: Sequence[Axis]) -> Shape:
    rank("input", ins[0], 4)
    n, height, width, channels = ins[0]
    attrs, same_padding = node.attrs, node.flags & SAME_PADDING
    if attrs["pooling_height"] * attrs["pooling_width"] == 1:
        raise Refusal("the window is 1x1, XNNPACK needs 2 or more elements in it")
    return (n, axes[0].size(attrs, height, same_padding, real=True),
            axes[1].size(attrs, width, same_padding, real=True), channels)


def average_shape(node: Any, ins: Shapes) -> list[Shape]:
    return [_pooled(node, ins, AVERAGE)]


def maximum_shape(node: Any, ins: Shapes) -> list[Shape]:
    for axis in MAXIMUM:
        if node.attrs[axis.stride] > node.attrs[axis.kernel]:
            raise Refusal(f"{axis.stride} is {node.attrs[axis.stride]}, need {axis.kernel} "
                          f"{node.attrs[axis.kernel]} or less")
    return [_pooled(node, ins, MAXIMUM)]


def argmax_shape(node: Any, ins: Shapes) -> list[Shape]:
    out = _pooled(node, ins, ARGMAX)
    return [out, out]


def global_shape(node: Any, ins: Shapes) -> list[Shape]:
    x = ins[0]
    if len(x) < 3:
        raise Refusal(f"input needs rank 3 or more, found rank {len(x)} ({text(x)})")
    if not x[-3] * x[-2]:
        raise Refusal(f"input needs a height and width of 1 or more, found {text(x)}")
    if node.flags & KEEP_DIMS:
        return [(*x[:-3], 1, 1, x[-1])]
    return [x[:-3] + x[-1:]]


def global_normalize(node: Any, ins: Shapes, outs: Sequence[Shape]) -> Any:
    """Set KEEP_DIMS where the declared output has the input's rank: old files left the flag out."""
    found, full = len(outs[0]), len(ins[0])
    if found == full:
        return node if node.flags & KEEP_DIMS else node.replace(flags=node.flags | KEEP_DIMS)
    if found != full - 2:
        raise Refusal(f"output needs the input's rank {full}, or {full - 2}, found rank {found} ({text(outs[0])})")
    return node


OPS = (
    Op("average_pooling2d", "XNNAvgPooling2d", "xnn_define_average_pooling_2d",
       f"{PADDING} {WINDOW} {STRIDE} {CLAMP} @input_id @output_id flags", shape=average_shape,
       check=strict_limits,
       datatypes=same(FLOATS, 2), flags=SAME_PADDING | KEEP_DIMS, unused=("dilation_height", "dilation_width"),
       doc="mean of each window; padding is not counted"),
    Op("max_pooling2d", "XNNMaxPooling2d", "xnn_define_max_pooling_2d",
       f"{PADDING} {WINDOW} {STRIDE} {DILATION} {CLAMP} @input_id @output_id flags", shape=maximum_shape,
       check=same_pairs,
       datatypes=same(MOVABLE, 2), flags=SAME_PADDING | KEEP_DIMS, doc="largest element of each window"),
    Op("argmax_pooling2d", "XNNArgMaxPooling2d", "xnn_define_argmax_pooling_2d",
       f"{PADDING} {WINDOW} @input_id @output_value_id @output_index_id flags", shape=argmax_shape,
       datatypes=(("fp32", "fp32", "fp32"),), flags=SAME_PADDING,
       doc="largest element of each window, and its place in the window (row by row, uint32)"),
    Op("global_average_pooling2d", "XNNGlobalAvgPooling2d", "", "@input_id @output_id flags",
       shape=global_shape, normalize=global_normalize, datatypes=same(MOVABLE, 2), flags=KEEP_DIMS,
       doc="mean over height and width (axes -3 and -2); runs as static_reduce"),
)
