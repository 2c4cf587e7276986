"""What a node costs in principle: arithmetic and bytes, from its attributes and shapes.

A multiplication with its addition counts as two operations, everything else per element of the result as one;
nodes that only move data do no arithmetic. Bytes are what has to be read and written once, whatever the caches do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..datatypes import nbytes

if TYPE_CHECKING:
    from .._graph import Node, Value

Shape = tuple[int, ...]
Count = Callable[[Mapping[str, Any], Sequence[Shape], Sequence[Shape]], int]


def _kernel(attrs: Mapping[str, Any]) -> int:
    return int(attrs["kernel_height"]) * int(attrs["kernel_width"])


def _pool(attrs: Mapping[str, Any], ins: Sequence[Shape], outs: Sequence[Shape]) -> int:
    return math.prod(outs[0]) * int(attrs["pooling_height"]) * int(attrs["pooling_width"])


#: Operations that are not one per element of the result.
COUNTS: dict[str, Count] = {
    "fully_connected": lambda attrs, ins, outs: 2 * math.prod(outs[0]) * ins[0][-1],
    "batch_matrix_multiply": lambda attrs, ins, outs: 2 * math.prod(outs[0]) * ins[0][-1],
    "conv2d": lambda attrs, ins, outs: 2 * math.prod(outs[0]) * _kernel(attrs) * int(attrs["group_input_channels"]),
    "depthwise_conv2d": lambda attrs, ins, outs: 2 * math.prod(outs[0]) * _kernel(attrs),
    "conv_transpose2d": lambda attrs, ins, outs: (
        2 * math.prod(ins[0]) * _kernel(attrs) * int(attrs["group_output_channels"])
    ),
    "scaled_dot_product_attention": lambda attrs, ins, outs: (
        2 * math.prod(ins[0][:-1]) * ins[1][-2] * (ins[0][-1] + ins[2][-1])
    ),
    "average_pooling2d": _pool,
    "max_pooling2d": _pool,
    "argmax_pooling2d": _pool,
    "global_average_pooling2d": lambda attrs, ins, outs: math.prod(ins[0]),
    "static_reduce": lambda attrs, ins, outs: math.prod(ins[0]),
    "softmax": lambda attrs, ins, outs: 5 * math.prod(outs[0]),
    "static_resize_bilinear2d": lambda attrs, ins, outs: 8 * math.prod(outs[0]),
}
MOVES = frozenset(
    (
        "concatenate2",
        "concatenate3",
        "concatenate4",
        "concatenate5",
        "copy",
        "static_constant_pad",
        "static_expand_dims",
        "static_reshape",
        "static_reshape_rows",
        "static_slice",
        "static_transpose",
    )
)


def operations(name: str, attrs: Mapping[str, Any], ins: Sequence[Shape], outs: Sequence[Shape]) -> int:
    if name in MOVES:
        return 0
    count = COUNTS.get(name)
    return count(attrs, ins, outs) if count is not None else math.prod(outs[0])


def traffic(values: Sequence[Value], shapes: Mapping[int, Shape]) -> int:
    """Bytes of these values at these shapes; of constants those that the file has."""
    return sum(
        value.constant.nbytes if value.constant is not None else nbytes(value.datatype, shapes[value.id])
        for value in values
    )


def precision(node: Node, value: Callable[[int], Value]) -> str:
    """Which peak holds for a node: ``int8``, ``fp16`` or ``fp32``."""
    kinds = {value(id).datatype for id in (*node.inputs[:1], *node.outputs[:1]) if id is not None}
    if kinds & {"qint8", "quint8", "qdint8"}:
        return "int8"
    return "fp16" if kinds & {"fp16", "bf16"} else "fp32"
