"""Element by element: the binary and unary operators, Convert and Copy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..datatypes import DATATYPES
from ..quantization import quantize, quantize_rows
from . import _fixed
from ._operand import (
    Operand,
    Operands,
    Results,
    Shapes,
    Values,
    limit,
    requantize,
    round_away,
    store,
    store_away,
)

# Exact to the last bit or two of float64, which NumPy has no function for.
_erfc = np.frompyfunc(math.erfc, 1, 1)


def _sigmoid(x: np.ndarray, attrs: Any) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-x)))


def _gelu(x: np.ndarray, attrs: Any) -> np.ndarray:
    return x / 2 * np.asarray(_erfc(x * -math.sqrt(0.5)), np.float64)


def _hardswish(x: np.ndarray, attrs: Any) -> np.ndarray:
    return np.asarray(x / 6 * np.clip(x + 3, 0, 6))


def _leaky_relu(x: np.ndarray, attrs: Any) -> np.ndarray:
    return np.where(x < 0, x * np.float32(attrs["negative_slope"]), x)


def _elu(x: np.ndarray, attrs: Any) -> np.ndarray:
    return np.where(x < 0, np.float32(attrs["alpha"]) * np.expm1(x), x)


#: Real function of each unary operator: name -> function(float64 array, attributes).
UNARY: dict[str, Callable[[np.ndarray, Any], np.ndarray]] = {
    "clamp": lambda x, attrs: x,
    "sigmoid": _sigmoid,
    "floor": lambda x, attrs: np.floor(x),
    "square_root": lambda x, attrs: np.sqrt(x),
    "reciprocal_square_root": lambda x, attrs: 1 / np.sqrt(x),
    "ceiling": lambda x, attrs: np.ceil(x),
    "gelu": _gelu,
    "hardswish": _hardswish,
    "log": lambda x, attrs: np.log(x),
    "negate": lambda x, attrs: -x,
    "square": lambda x, attrs: x * x,
    "abs": lambda x, attrs: np.abs(x),
    "sine": lambda x, attrs: np.sin(x),
    "cosine": lambda x, attrs: np.cos(x),
    "exp": lambda x, attrs: np.exp(x),
    "tanh": lambda x, attrs: np.tanh(x),
    "leaky_relu": _leaky_relu,
    "elu": _elu,
}

#: Conversions to 8 bits for which XNNPACK has vector code; others run its reference code.
VECTOR_QUANTIZED = {("fp32", "qint8"), ("fp32", "quint8"), ("fp16", "qint8")}

#: Real function of each binary operator. minimum and maximum of NaN and a number are NaN.
BINARY: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": np.divide,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "prelu": lambda x, slope: np.where(x < 0, x * slope, x),
}


def _apply(function: Callable[..., np.ndarray], node: Any, out: Any, *real: np.ndarray) -> np.ndarray:
    if DATATYPES[out.datatype].quantization == "tensor":
        # A step's worth hangs on the float32 argument where a function jumps: ceiling of 20 * 0.05.
        single = [each.astype(np.float32).astype(np.float64) for each in real]
        return store_away(function(*single), out, node.clamp)
    return store(function(*real), out, node.clamp)


def _wrapped(whole: np.ndarray, out: Any, clamp: Any) -> np.ndarray:
    """int64 numbers in 32 bits; int32 arithmetic wraps."""
    return limit(whole.astype(np.uint64).astype(np.uint32).view(np.int32).reshape(whole.shape), out, clamp)


def unary(node: Any, operands: Operands, outs: Values, shapes: Shapes) -> Results:
    (x,), (out,) = operands, outs
    function = UNARY[node.op.name]
    if DATATYPES[out.datatype].quantization == "tensor":
        if node.op.name == "leaky_relu":
            return [limit(_fixed.rescale(x, out, node.attrs["negative_slope"]), out, node.clamp)]
        if node.op.name == "clamp":
            if x.value.quantization == out.quantization:
                return [limit(x.raw, out, node.clamp)]
            low, high = node.clamp or (-math.inf, math.inf)
            return [store_away(np.clip(x.real.astype(np.float32), np.float32(low), np.float32(high)), out)]
    if out.datatype == "int32":
        return [_wrapped(function(x.raw.astype(np.int64), node.attrs), out, node.clamp)]
    return [_apply(lambda real: function(real, node.attrs), node, out, x.real)]


def binary(node: Any, operands: Operands, outs: Values, shapes: Shapes) -> Results:
    (a, b), (out,), name = operands, outs, node.op.name
    if out.datatype == "int32":
        return [_wrapped(BINARY[name](a.raw.astype(np.int64), b.raw.astype(np.int64)), out, node.clamp)]
    if DATATYPES[out.datatype].quantization == "tensor":
        if name == "multiply":
            scale = np.float32(a.value.quantization.scale) * np.float32(b.value.quantization.scale)
            scale /= np.float32(out.quantization.scale)
            return [requantize(a.integers * b.integers, scale, out, node.clamp)]
        if name in ("add", "subtract"):
            return [limit(_fixed.add(a, b, out, 1 if name == "add" else -1), out, node.clamp)]
    return [_apply(BINARY[name], node, out, a.real, b.real)]


def convert(node: Any, operands: Operands, outs: Values, shapes: Shapes) -> Results:
    (x,), (out,) = operands, outs
    if out.datatype == "qdint8":
        return [quantized_rows(x, out, out.quantization.num_nonbatch_dims)]
    if out.datatype == "int32" and x.datatype != "int32":
        # XNNPACK's reference code stays below the largest float32 that fits.
        whole = np.clip(round_away(x.real.astype(np.float32)), -(2.0**31), 2.0**31 - 128)
        return [limit(whole.astype(np.int32), out, node.clamp)]
    if (x.datatype, out.datatype) in VECTOR_QUANTIZED:
        return [limit(quantize(x.raw, out), out, node.clamp)]
    if DATATYPES[out.datatype].quantization == "tensor":
        if x.datatype == out.datatype:
            return [limit(_fixed.rescale(x, out), out, node.clamp)]
        return [store_away(x.real, out, node.clamp)]
    if (x.datatype, out.datatype) == ("qint8", "fp16"):
        return [store(x.integers * x.scales.astype(np.float16).astype(np.float64), out, node.clamp)]
    return [store(x.real, out, node.clamp)]


def quantized_rows(x: Operand, value: Any, num_nonbatch_dims: int) -> Operand:
    """A float operand quantized row by row."""
    raw = x.raw if x.datatype in ("fp32", "fp16") else x.real.astype(np.float32)
    return Operand(value, *quantize_rows(raw, num_nonbatch_dims))


def copy(node: Any, operands: Operands, outs: Values, shapes: Shapes) -> Results:
    return [limit(operands[0].raw, outs[0], node.clamp)]


REFERENCES = {**dict.fromkeys(UNARY, unary), **dict.fromkeys(BINARY, binary), "convert": convert, "copy": copy}
