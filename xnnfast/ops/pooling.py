"""Pooling over NHWC inputs: average, maximum with and without index, global average."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ._quant import SAME_PAIRS, same_pairs, strict_limits
from ._row import Op, Refusal, Shape, Shapes
from ._rules import (
    CLAMP,
    ENGINE,
    FLOATS,
    KEEP_DIMS,
    MOVABLE,
    PADDING,
    SAME_PADDING,
    Axis,
    Window,
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


def _windows(node: Any, ins: Shapes, axes: Sequence[Axis]) -> tuple[Window, Window]:
    rank("input", ins[0], 4)
    _, height, width, _ = ins[0]
    same_padding = node.flags & SAME_PADDING
    vertical = axes[0].window(node.attrs, height, same_padding)
    horizontal = axes[1].window(node.attrs, width, same_padding)
    for window in (vertical, horizontal):
        if not window.touches():
            raise Refusal(f"a window holds padding alone: {window}")
    return vertical, horizontal


def _pooled(x: Shape, vertical: Window, horizontal: Window) -> Shape:
    return x[0], vertical.out, horizontal.out, x[3]


def _larger_than_one(attrs: Any) -> None:
    if attrs["pooling_height"] * attrs["pooling_width"] == 1:
        raise Refusal("the window is 1x1, XNNPACK needs 2 or more elements in it")


def average_shape(node: Any, ins: Shapes) -> list[Shape]:
    vertical, horizontal = _windows(node, ins, AVERAGE)
    if _mixes_rows(vertical):
        raise Refusal(f"{ENGINE} mixes up the rows of windows that reach into both top and bottom padding: {vertical}")
    return [_pooled(ins[0], vertical, horizontal)]


def _mixes_rows(window: Window) -> bool:
    """Whether average pooling takes one row of windows for another.

    XNNPACK keeps pointers for the rows that reach into the padding at the top, for those at the bottom
    and for one row between, and counts on the first two not to overlap.
    """
    _, size, out, before, after, kernel, stride, _ = window
    top, bottom = -(-before // stride), -(-after // stride)
    if bottom > out:
        # The first row of the bottom becomes a huge number: all rows are taken for those of the top.
        return out - 1 > top
    if out - bottom >= min(top, out - 1):
        return False
    # Which row it is does not matter where each covers the whole input.
    return kernel - before < size or (out - 1) * stride > before


def maximum_shape(node: Any, ins: Shapes) -> list[Shape]:
    _larger_than_one(node.attrs)
    vertical, horizontal = _windows(node, ins, MAXIMUM)
    for window in (vertical, horizontal):
        if window.stride > window.kernel:
            raise Refusal(f"{window.axis.stride} is {window.stride}, need {window.axis.kernel} {window.kernel} or less")
        if vertical.dilation > 1 or horizontal.dilation > 1:
            _check_dilated(window)
    return [_pooled(ins[0], vertical, horizontal)]


def _check_dilated(window: Window) -> None:
    """XNNPACK puts a tap of the same window in place of one in the padding.

    With dilation it takes number ``before // dilation`` or the next one, without looking whether the
    window has so many taps and whether that one is inside the input.
    """
    _, size, out, before, _, kernel, stride, dilation = window
    if window.axis is MAXIMUM[1] and dilation == 1 and stride < kernel:
        wrong = _shares_substitutes(window)
    else:
        skipped, rest = divmod(before, dilation)
        reach = (kernel - 1) * dilation
        first_whole = min(out, -(-before // stride))
        last_whole = (size - 1 - reach + before) // stride
        starts = np.r_[:first_whole, max(first_whole, last_whole + 1):out] * stride
        tap = skipped + (starts < rest)
        wrong = bool(((tap >= kernel) | (starts - before + tap * dilation >= size)).any())
    if wrong:
        raise Refusal(f"{ENGINE} takes elements from outside a window for its padding when there is dilation: "
                      f"{window}; pad with static_constant_pad instead")


def _shares_substitutes(window: Window) -> bool:
    """Whether windows side by side, which share their columns, share a substitute that fits only one of them."""
    _, size, out, before, _, kernel, stride, _ = window
    columns = np.r_[:before, before + size:max(before + size, (out - 1) * stride + kernel)]
    first = np.maximum(-(-(columns - kernel + 1) // stride), 0)
    last = np.minimum(columns // stride, out - 1)
    # The last window to write has its say: the substitute is at last * stride.
    wrong = (first <= last) & (last * stride > np.minimum(first * stride - before + kernel - 1, size - 1))
    return bool(wrong.any())


def argmax_shape(node: Any, ins: Shapes) -> list[Shape]:
    _larger_than_one(node.attrs)
    out = _pooled(ins[0], *_windows(node, ins, ARGMAX))
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


_TOUCHES = "every window touches the input; the padded input is no smaller than the window"

OPS = (
    Op("average_pooling2d", "XNNAvgPooling2d", "xnn_define_average_pooling_2d",
       f"{PADDING} {WINDOW} {STRIDE} {CLAMP} @input_id @output_id flags", shape=average_shape,
       check=strict_limits, ranks=((4, 4),),
       bounds=(_TOUCHES, "windows that reach into both top and bottom padding only where this XNNPACK does not mix up "
               "their rows"),
       datatypes=same(FLOATS, 2), flags=SAME_PADDING | KEEP_DIMS, unused=("dilation_height", "dilation_width"),
       doc="mean of each window; padding is not counted",
       nan="A window that holds NaN gives -infinity or the lower limit."),
    Op("max_pooling2d", "XNNMaxPooling2d", "xnn_define_max_pooling_2d",
       f"{PADDING} {WINDOW} {STRIDE} {DILATION} {CLAMP} @input_id @output_id flags", shape=maximum_shape,
       check=same_pairs,
       datatypes=same(MOVABLE, 2), flags=SAME_PADDING | KEEP_DIMS, ranks=((4, 4),),
       doc="largest element of each window",
       bounds=(_TOUCHES, "windows have 2 elements or more, and strides no longer than the window",
               "dilation with padding only where this XNNPACK takes no element from outside a window", SAME_PAIRS),
       nan="A window that holds NaN gives +infinity or the upper limit."),
    Op("argmax_pooling2d", "XNNArgMaxPooling2d", "xnn_define_argmax_pooling_2d",
       f"{PADDING} {WINDOW} @input_id @output_value_id @output_index_id flags", shape=argmax_shape,
       datatypes=(("fp32", "fp32", "fp32"),), flags=SAME_PADDING, ranks=((4, 4),),
       bounds=(_TOUCHES, "windows have 2 elements or more and stand side by side",
               "files declare the index fp32; no other operator can read it"),
       doc="largest element of each window, and the number of its place in the window (uint32; column by column: "
           "x * pooling_height + y; a place in the padding stands for the input's nearest element)",
       nan="NaN as the first element of a window gives NaN and 0; later ones are passed over."),
    Op("global_average_pooling2d", "XNNGlobalAvgPooling2d", "", "@input_id @output_id flags",
       shape=global_shape, normalize=global_normalize, datatypes=same(MOVABLE, 2), flags=KEEP_DIMS,
       ranks=((3, 6),),
       doc="mean over height and width (axes -3 and -2); runs as static_reduce", nan="NaN stays NaN."),
)
