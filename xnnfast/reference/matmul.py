"""Matrix products and what attention needs: fully connected, batched product, softmax, attention itself."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..datatypes import DATATYPES
from ..ops._rules import RESHAPE_2D, TRANSPOSE_B, TRANSPOSE_WEIGHTS
from ._operand import (
    Operand,
    Operands,
    Results,
    Shapes,
    Values,
    requantization_scale,
    requantize,
    rounded_to,
    store,
)


def finish(total: np.ndarray, x: Operand, weights: Operand, bias: Operand | None, out: Any, clamp: Any) -> np.ndarray:
    """Sums of products plus bias in the output's datatype; output channels are the last axis."""
    if DATATYPES[out.datatype].quantization == "tensor":
        if bias is not None:
            total = total + bias.raw
        return requantize(total, requantization_scale(x.value, weights.value, out), out, clamp)
    if bias is not None:
        total = total + rounded_to(bias, x.datatype)
    return store(total, out, clamp)


def factors(x: Operand, weights: Operand, out: Any) -> tuple[np.ndarray, np.ndarray]:
    """Both sides of a product in float64: integers where the result is requantized, else real numbers."""
    if DATATYPES[out.datatype].quantization == "tensor":
        return x.integers, weights.integers
    return x.real, rounded_to(weights, x.datatype)


def fully_connected(node: Any, operands: Operands, outs: Values, shapes: Shapes) -> Results:
    (x, weights, bias), (out,) = operands, outs
    left, right = factors(x, weights, out)
    if not node.flags & TRANSPOSE_WEIGHTS:
        right = right.T
    total = left.reshape(-1, left.shape[-1]) @ right if node.flags & RESHAPE_2D else left @ right
    return [finish(total, x, weights, bias, out, node.clamp)]


def batch_matrix_multiply(node: Any, operands: Operands, outs: Values, shapes: Shapes) -> Results:
    left, right = (operand.real for operand in operands)
    if node.flags & TRANSPOSE_B:
        right = right.swapaxes(-1, -2)
    return [store(left @ right, outs[0], node.clamp)]


def _softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(axis=-1, keepdims=True, initial=-np.inf))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


def softmax(node: Any, operands: Operands, outs: Values, shapes: Shapes) -> Results:
    return [store(_softmax(operands[0].real), outs[0], node.clamp)]


def attention(node: Any, operands: Operands, outs: Values, shapes: Shapes) -> Results:
    query, key, value, scale, mask = (operand.real for operand in operands)
    if key.ndim == query.ndim - 1:
        # All heads share one key and value.
        key, value = np.expand_dims(key, -3), np.expand_dims(value, -3)
    weights = _softmax(query * scale @ key.swapaxes(-1, -2) + mask)
    return [store(weights @ value, outs[0], node.clamp)]


REFERENCES = {
    "fully_connected": fully_connected,
    "batch_matrix_multiply": batch_matrix_multiply,
    "softmax": softmax,
    "scaled_dot_product_attention": attention,
}
