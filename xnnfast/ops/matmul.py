"""Fully connected layers and batched matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from ._quant import WEIGHTED_BOUNDS, channel_axis, constant, tokens, weighted
from ._row import Op, Refusal, Shape, Shapes
from ._rules import (
    CLAMP,
    RESHAPE_2D,
    TRANSPOSE_B,
    TRANSPOSE_WEIGHTS,
    UNPROMISED,
    broadcast,
    rank,
    text,
    with_and_without_bias,
)


def fully_connected_shape(node: Any, ins: Shapes) -> list[Shape]:
    x, weights, bias = ins
    rank("filter", weights, 2)
    inner, outer = weights if node.flags & TRANSPOSE_WEIGHTS else weights[::-1]
    if not inner or not outer:
        raise Refusal(f"filter is {text(weights)}, need dims of 1 or more")
    if not x:
        raise Refusal("input needs rank 1 or more, found a scalar")
    if x[-1] != inner:
        raise Refusal(f"input dim {len(x) - 1} is {x[-1]}, filter dim {0 if node.flags & TRANSPOSE_WEIGHTS else 1} "
                      f"(input channels) is {inner}")
    if bias is not None and bias != (outer,):
        raise Refusal(f"bias is {text(bias)}, need {outer} (output channels)")
    if node.flags & RESHAPE_2D:
        return [(prod(x[:-1]), outer)]
    return [(*x[:-1], outer)]


def batch_matrix_multiply_shape(node: Any, ins: Shapes) -> list[Shape]:
    a, b = ins
    for name, shape in (("input1", a), ("input2", b)):
        if len(shape) < 2:
            raise Refusal(f"{name} needs rank 2 or more, found rank {len(shape)} ({text(shape)})")
    inner, columns = (b[-1], b[-2]) if node.flags & TRANSPOSE_B else (b[-2], b[-1])
    if a[-1] != inner:
        raise Refusal(f"input1 dim {len(a) - 1} is {a[-1]}, input2 dim "
                      f"{len(b) - (1 if node.flags & TRANSPOSE_B else 2)} is {inner}")
    if not inner:
        raise Refusal(f"input1 dim {len(a) - 1} is 0, need 1 or more to sum over")
    return [(*broadcast(a[:-2], b[:-2]), a[-2], columns)]


_FC = (
    ("fp32", "fp32", "fp32", "fp32"),
    ("fp16", "fp16", "fp16", "fp16"),
    ("fp16", "fp32", "fp32", "fp16"),
    # XNNPACK multiplies the bias of these two by the filter's scales: lowering divides it.
    ("fp32", "qcint8", "fp32", "fp32"),
    ("fp32", "qcint4", "fp32", "fp32"),
    *(("qdint8", weights, "fp32", out) for weights in ("qcint8", "qcint4", "qbint4") for out in ("fp32", "fp16")),
    ("qint8", "qint8", "qint32", "qint8"),
    ("qint8", "qcint8", "qcint32", "qint8"),
    ("quint8", "quint8", "qint32", "quint8"),
)


_CHECK = weighted(lambda node: node.flags & TRANSPOSE_WEIGHTS, 1, dynamic=True)


def batch_matrix_multiply_check(node: Any, ins: Sequence[Any], outs: Sequence[Any]) -> None:
    a, b = ins
    if b.datatype != "qcint8":
        return
    constant(node, 1, b)
    tokens(node, a, 1)
    # A row of scales for all matrices of a batch.
    channel_axis("input2", b, len(b.shape) - (2 if node.flags & TRANSPOSE_B else 1))


OPS = (
    Op("fully_connected", "XNNFullyConnected", "xnn_define_fully_connected",
       f"{CLAMP} @input1_id @filter_id @bias_id? @output_id flags", shape=fully_connected_shape,
       check=_CHECK,
       datatypes=with_and_without_bias(*_FC), flags=TRANSPOSE_WEIGHTS | RESHAPE_2D, packed=(1, 2),
       ranks=((1, 6), (2, 2), (1, 1)),
       bounds=(*WEIGHTED_BOUNDS, "only in fp32 throughout may filter and bias be computed",
               "scales of a filter lie along its output channels; qdint8 input is quantized over its last axis",
               "qcint4 needs an even number of input channels, qbint4 groups of a multiple of 32 that divides them; "
               "neither takes flag 0x1",
               "the bias beside a qcint8 or qcint4 filter and fp32 input is divided by the scales beforehand, which "
               "rounds it once more"),
       doc="input @ filter^T + bias over the last axis; filter is [out, in], or [in, out] with flag 0x1",
       nan=UNPROMISED),
    Op("batch_matrix_multiply", "XNNBatchMatrixMultiply", "xnn_define_batch_matrix_multiply",
       "@input1_id @input2_id @output_id flags", shape=batch_matrix_multiply_shape,
       check=batch_matrix_multiply_check,
       datatypes=(("fp32", "fp32", "fp32"), ("fp16", "fp16", "fp16"), ("qdint8", "qcint8", "fp32")),
       flags=TRANSPOSE_B, packed=(1,), ranks=((2, 6),),
       bounds=("qcint8 is constant, with a scale per column that counts for all matrices of a batch",
               "qdint8 is quantized over its last axis"),
       doc="input1 @ input2 over the last two axes, the others broadcast; flag 0x1 transposes input2",
       nan=UNPROMISED),
)
