"""Softmax, and scaled dot-product attention as files hold it (lowering replaces it by smaller operators)."""

from __future__ import annotations

from typing import Any

from ._row import Op, Refusal, Shape, Shapes
from ._rules import FLOATS, UNPROMISED, rank, same, text


def softmax_shape(node: Any, ins: Shapes) -> list[Shape]:
    if not ins[0]:
        raise Refusal("input needs rank 1 or more, found a scalar")
    return [ins[0]]


def attention_shape(node: Any, ins: Shapes) -> list[Shape]:
    query, key, value, scale, mask = ins
    rank("query", query, 4)
    if len(key) not in (3, 4):
        raise Refusal(f"key needs rank 3 or 4, found rank {len(key)} ({text(key)})")
    rank("value", value, len(key))
    rank("scale", scale, 1)
    rank("mask", mask, 2)
    batch, heads, tokens, channels = query
    for name, shape in (("key", key), ("value", value)):
        if shape[0] != batch:
            raise Refusal(f"{name} dim 0 is {shape[0]}, query dim 0 is {batch}")
        if len(shape) == 4 and shape[1] != heads:
            raise Refusal(f"{name} dim 1 is {shape[1]}, query dim 1 is {heads}")
    if key[-1] != channels:
        raise Refusal(f"key dim {len(key) - 1} is {key[-1]}, query dim 3 is {channels}")
    if value[-2] != key[-2]:
        raise Refusal(f"value dim {len(value) - 2} is {value[-2]}, key dim {len(key) - 2} is {key[-2]}")
    if scale[0] != channels:
        raise Refusal(f"scale dim 0 is {scale[0]}, query dim 3 is {channels}")
    if mask != (tokens, key[-2]):
        raise Refusal(f"mask is {text(mask)}, need {tokens}x{key[-2]} (query tokens x key tokens)")
    return [(batch, heads, tokens, value[-1])]


OPS = (
    Op("softmax", "XNNSoftmax", "xnn_define_softmax", "@input_id @output_id flags", shape=softmax_shape,
       ranks=((1, 6),), datatypes=same(FLOATS, 2), flags=0, doc="exp(input) / sum of exp(input), along the last axis",
       nan="As in NumPy with the row's maximum subtracted: a row that holds NaN or +inf, or only -inf, is NaN; "
           "other rows are untouched."),
    Op("scaled_dot_product_attention", "XNNScaledDotProductAttention", "",
       "@query_id @key_id @value_id @scale_id @mask_id @output_id flags", shape=attention_shape,
       datatypes=same(FLOATS, 6), flags=0, ranks=((4, 4), (3, 4), (3, 4), (1, 1), (2, 2)),
       bounds=("key and value of rank 3 are shared by all heads",),
       doc="softmax((query * scale) @ key^T + mask) @ value; runs as multiply, batch_matrix_multiply, add, softmax "
           "and batch_matrix_multiply",
       nan=UNPROMISED),
)
