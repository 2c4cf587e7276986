"""Convolutions over NHWC inputs: plain and grouped, depthwise, transposed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ._quant import WEIGHTED_BOUNDS, weighted
from ._row import Op, Refusal, Shape, Shapes
from ._rules import (
    CLAMP,
    ENGINE,
    PADDING,
    SAME_PADDING,
    TRANSIENT_INDIRECTION_BUFFER,
    UNPROMISED,
    Axis,
    equal,
    positive,
    rank,
    text,
    with_and_without_bias,
)

KERNEL = "kernel_height kernel_width"
STRIDE = "subsampling_height subsampling_width"
DILATION = "dilation_height dilation_width"
OPERANDS = f"{CLAMP} @input1_id @filter_id @bias_id? @output_id flags"
HEIGHT = Axis("high", "padding_top", "padding_bottom", "kernel_height", "subsampling_height", "dilation_height")
WIDTH = Axis("wide", "padding_left", "padding_right", "kernel_width", "subsampling_width", "dilation_width")


def _operands(ins: Shapes, filter_dims: Sequence[tuple[int, str]], channels_in: tuple[int, str],
              channels_out: int) -> None:
    x, weights, bias = ins
    rank("input", x, 4)
    rank("filter", weights, 4)
    for axis, (need, why) in enumerate(filter_dims):
        equal(f"filter dim {axis}", weights[axis], need, why)
    equal("input dim 3", x[3], channels_in[0], channels_in[1])
    if bias is not None and bias != (channels_out,):
        raise Refusal(f"bias is {text(bias)}, need {channels_out} (output channels)")


def _grouped(node: Any, ins: Shapes) -> int:
    """Operands of a plain or transposed convolution; output channels."""
    attrs = node.attrs
    positive(attrs, "groups", "group_input_channels", "group_output_channels")
    groups: int = attrs["groups"]
    each_in: int = attrs["group_input_channels"]
    each_out: int = attrs["group_output_channels"]
    _operands(
        ins,
        ((groups * each_out, "groups * group_output_channels"), (attrs["kernel_height"], "kernel_height"),
         (attrs["kernel_width"], "kernel_width"), (each_in, "group_input_channels")),
        (groups * each_in, "groups * group_input_channels"), groups * each_out,
    )
    return groups * each_out


def _same_padding(node: Any) -> int:
    attrs = node.attrs
    if attrs["kernel_height"] == attrs["kernel_width"] == 1 and not any(attrs[side] for side in PADDING.split()):
        # XNNPACK takes the flag away from such a convolution; otherwise a stride would make it wrong.
        return 0
    return int(node.flags & SAME_PADDING)


def conv2d_shape(node: Any, ins: Shapes) -> list[Shape]:
    channels = _grouped(node, ins)
    n, height, width, _ = ins[0]
    same_padding = _same_padding(node)
    return [(n, HEIGHT.window(node.attrs, height, same_padding).out,
             WIDTH.window(node.attrs, width, same_padding).out, channels)]


def depthwise_shape(node: Any, ins: Shapes) -> list[Shape]:
    attrs = node.attrs
    positive(attrs, "groups", "group_input_channels", "group_output_channels")
    channels, each_in, each_out = attrs["groups"], attrs["group_input_channels"], attrs["group_output_channels"]
    if each_out % each_in:
        raise Refusal(f"group_output_channels is {each_out}, need a multiple of group_input_channels {each_in}")
    outputs = channels * (each_out // each_in)
    _operands(
        ins,
        ((1, "what a depthwise filter needs"), (attrs["kernel_height"], "kernel_height"),
         (attrs["kernel_width"], "kernel_width"), (outputs, "groups * depth multiplier")),
        (channels, "groups"), outputs,
    )
    n, height, width, _ = ins[0]
    same_padding = _same_padding(node)
    return [(n, HEIGHT.window(attrs, height, same_padding).out,
             WIDTH.window(attrs, width, same_padding).out, outputs)]


def _transposed_size(axis: Axis, attrs: Any, size: int, adjustment: str) -> int:
    _, stride, _, window = axis.extent(attrs)
    before, after = axis.padding(attrs)
    extra = attrs[adjustment]
    if extra >= stride:
        raise Refusal(f"{adjustment} is {extra}, need less than {axis.stride} {stride}")
    if size == 0:
        raise Refusal(f"the input is 0 {axis.axis}, need 1 or more")
    out: int = stride * (size - 1) + extra + window - before - after
    if out <= 0:
        raise Refusal(f"the output would be {out} {axis.axis}: {axis.stride} {stride} * ({size} - 1) + {adjustment} "
                      f"{extra} + window {window} - padding {before} - {after}")
    return out


def conv_transpose2d_shape(node: Any, ins: Shapes) -> list[Shape]:
    attrs = node.attrs
    channels = _grouped(node, ins)
    n, height, width, _ = ins[0]
    sizes = (_transposed_size(HEIGHT, attrs, height, "adjustment_height"),
             _transposed_size(WIDTH, attrs, width, "adjustment_width"))
    strides = [attrs[axis.stride] for axis in (HEIGHT, WIDTH)]
    kernels = [attrs[axis.kernel] for axis in (HEIGHT, WIDTH)]
    undilated = attrs["dilation_height"] == attrs["dilation_width"] == 1
    if undilated and all(stride <= kernel for stride, kernel in zip(strides, kernels)):
        # Here XNNPACK convolves once per offset within the stride, and counts the elements of an
        # offset that lies behind the output's end as a huge number.
        for axis, size, stride in zip((HEIGHT, WIDTH), sizes, strides):
            if size < stride - 1:
                raise Refusal(f"the output would be {size} {axis.axis}, {ENGINE} needs {stride - 1} or more for "
                              f"{axis.stride} {stride}")
    return [(n, *sizes, channels)]


_FIXED = (
    ("fp32", "fp32", "fp32", "fp32"),
    # The filter of an fp16 convolution is fp32: an fp16 one reaches undefined behaviour in XNNPACK.
    ("fp16", "fp32", "fp32", "fp16"),
    ("qint8", "qint8", "qint32", "qint8"),
    ("qint8", "qcint8", "qcint32", "qint8"),
    ("quint8", "quint8", "qint32", "quint8"),
)
_DYNAMIC = ("qdint8", "qcint8", "fp32", "fp32")


_RANKS = ((4, 4), (4, 4), (1, 1))
_BOUNDS = (*WEIGHTED_BOUNDS, "filter and bias are constant; qdint8 input is quantized over its last 3 axes",
           "the padded input is no smaller than the window")
_SAME = "SAME padding needs windows that cover the last rows and columns, and no padding besides"
_CHECK = weighted(lambda node: 0, 3)
_CHECK_DEPTHWISE = weighted(lambda node: 3, 3)

OPS = (
    Op("conv2d", "XNNConv2d", "xnn_define_convolution_2d",
       # The schema's order is in, out, groups; C's is groups, in, out.
       f"{PADDING} {KERNEL} {STRIDE} {DILATION} groups group_input_channels group_output_channels {OPERANDS}",
       shape=conv2d_shape, check=_CHECK,
       datatypes=with_and_without_bias(*_FIXED, _DYNAMIC, ("qdint8", "qcint8", "fp32", "fp16")),
       flags=SAME_PADDING | TRANSIENT_INDIRECTION_BUFFER, packed=(1, 2),
       unused=("adjustment_height", "adjustment_width"), ranks=_RANKS, bounds=(*_BOUNDS, _SAME),
       doc="convolution of NHWC input with an [out, h, w, in / groups] filter", nan=UNPROMISED),
    Op("depthwise_conv2d", "XNNDepthwiseConv2d", "xnn_define_depthwise_convolution_2d",
       f"{PADDING} {KERNEL} {STRIDE} {DILATION} group_output_channels/group_input_channels groups {OPERANDS}",
       shape=depthwise_shape, check=_CHECK_DEPTHWISE, datatypes=with_and_without_bias(*_FIXED),
       flags=SAME_PADDING | TRANSIENT_INDIRECTION_BUFFER, packed=(1, 2),
       unused=("adjustment_height", "adjustment_width"), ranks=_RANKS, bounds=(*_BOUNDS, _SAME),
       doc="convolution of each channel by itself with a [1, h, w, channels * multiplier] filter",
       nan=UNPROMISED),
    Op("conv_transpose2d", "XNNConvTranspose2d", "xnn_define_deconvolution_2d",
       # The adjustment comes before the kernel in C, last in the schema.
       f"{PADDING} adjustment_height adjustment_width {KERNEL} {STRIDE} {DILATION}"
       f" groups group_input_channels group_output_channels {OPERANDS}",
       shape=conv_transpose2d_shape, check=_CHECK, datatypes=with_and_without_bias(*_FIXED, _DYNAMIC), flags=0,
       packed=(1, 2), ranks=_RANKS,
       bounds=(*_BOUNDS[:2], "an adjustment is below the stride; the output is no smaller than stride - 1 where "
               "stride <= kernel and nothing is dilated"),
       doc="transposed convolution (deconvolution) with an [out, h, w, in / groups] filter", nan=UNPROMISED),
)
