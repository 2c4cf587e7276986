"""Operators of the quantized_decomposed library: what a quantizer leaves where no delegate took it."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import OperatorError
from ._row import OutSpec, Portable
from ._types import FLOAT32, FLOAT64, INT64, axis, indices, load, math_type, store

_TYPES = {np.dtype(kind) for kind in (np.uint8, np.int8, np.int16, np.uint16, np.int32)}


def _range(dtype: np.dtype, low: int, high: int) -> None:
    if dtype not in _TYPES:
        raise OperatorError(f"need a quantized type of 8, 16 or 32 bits, found {dtype}")
    if low < np.iinfo(dtype).min or high > np.iinfo(dtype).max:
        raise OperatorError(f"need limits that {dtype} can hold, found {low} and {high}")


def _quantized(x: np.ndarray, scale: Any, zero_point: Any, low: int, high: int, dtype: np.dtype) -> np.ndarray:
    """Times the float32 reciprocal of the scale, to the nearest whole number (ties to even), between the limits."""
    inverse = np.float32(1) / np.asarray(scale).astype(np.float32)
    steps = np.rint(load(np.asarray(x * inverse), FLOAT32)).astype(FLOAT64)
    return store(np.clip(steps + zero_point, low, high), dtype)


def _dequantized(q: np.ndarray, scale: Any, zero_point: Any, dtype: np.dtype) -> np.ndarray:
    steps = q.astype(INT64) - zero_point
    return store(steps.astype(FLOAT32) * np.asarray(scale).astype(np.float32), dtype)


def _one(x: Any) -> Any:
    """A parameter that may come as a tensor of one element."""
    if isinstance(x, np.ndarray):
        if x.size != 1:
            raise OperatorError(f"need one scale and one zero point, found shape {x.shape}")
        return x.reshape(())[()]
    return x


def _quantize(out: OutSpec, x: np.ndarray, scale: Any, zero_point: Any, low: int, high: int, dtype: int) -> np.ndarray:
    _range(out.dtype, low, high)
    return _quantized(load(x, math_type(x.dtype)), _one(scale), int(_one(zero_point)), low, high, out.dtype)


def _dequantize(
    out: OutSpec, q: np.ndarray, scale: Any, zero_point: Any, low: int, high: int, dtype: int, out_dtype: int | None
) -> np.ndarray:
    return _dequantized(q, _one(scale), int(_one(zero_point)), out.dtype)


def _along(x: np.ndarray, dim: int, parameter: np.ndarray | None) -> Any:
    """Parameters of a dimension's entries, shaped to broadcast; none means 0."""
    if parameter is None:
        return 0
    dim = axis(dim, x.ndim)
    if x.ndim == 0 or parameter.size != x.shape[dim]:
        raise OperatorError(
            f"need a scale and a zero point for each entry of dimension {dim}, found {parameter.shape} for {x.shape}"
        )
    return parameter.reshape([-1 if place == dim else 1 for place in range(x.ndim)])


def _quantize_channels(
    out: OutSpec, x: np.ndarray, scales: np.ndarray, zero_points: np.ndarray, dim: int, low: int, high: int, dtype: int
) -> np.ndarray:
    _range(out.dtype, low, high)
    x = load(x, math_type(x.dtype))
    return _quantized(x, _along(x, dim, scales), _along(x, dim, zero_points), low, high, out.dtype)


def _dequantize_channels(
    out: OutSpec,
    q: np.ndarray,
    scales: np.ndarray,
    zero_points: np.ndarray | None,
    dim: int,
    low: int,
    high: int,
    dtype: int,
    out_dtype: int | None,
) -> np.ndarray:
    return _dequantized(q, _along(q, dim, scales), _along(q, dim, zero_points), out.dtype)


def _tokens(x: np.ndarray, parameter: np.ndarray) -> np.ndarray:
    """Parameters of the rows, shaped to broadcast over the last dimension."""
    if x.ndim == 0 or parameter.size * x.shape[-1] != x.size:
        raise OperatorError(f"need a scale and a zero point for each row of shape {x.shape}, found {parameter.shape}")
    return parameter.reshape(*x.shape[:-1], 1)


def _quantize_tokens(
    out: OutSpec, x: np.ndarray, scales: np.ndarray, zero_points: np.ndarray, low: int, high: int, dtype: int
) -> np.ndarray:
    _range(out.dtype, low, high)
    x = load(x, math_type(x.dtype))
    return _quantized(x, _tokens(x, scales), _tokens(x, zero_points), low, high, out.dtype)


def _dequantize_tokens(
    out: OutSpec,
    q: np.ndarray,
    scales: np.ndarray,
    zero_points: np.ndarray,
    low: int,
    high: int,
    dtype: int,
    out_dtype: int,
) -> np.ndarray:
    return _dequantized(q, _tokens(q, scales), _tokens(q, zero_points), out.dtype)


def _parameters(least: np.ndarray, most: np.ndarray, low: int, high: int) -> tuple[np.ndarray, np.ndarray]:
    """Scales and zero points for values between ``least`` and ``most``, 0 always among them."""
    smallest = np.float32(6.1e-5)
    least = np.minimum(least, np.float32(0))
    most = np.maximum(most, np.float32(0))
    scale = (most.astype(FLOAT64) - least) / (high - low)
    single = scale.astype(FLOAT32)
    scale = np.where((single == 0) | np.isinf(np.float32(1) / single), 0.1, scale)
    tiny = scale < smallest
    if tiny.any():
        # The range grows with the scale, so that the zero point keeps its place.
        amplifier = smallest / scale.astype(FLOAT32)
        span = smallest * np.float32(high - low)
        from_zero, to_zero = least == 0, most == 0
        grown = np.where(from_zero, span, np.where(to_zero, most, most * amplifier))
        shrunk = np.where(from_zero, least, np.where(to_zero, -span, least * amplifier))
        least, most = np.where(tiny, shrunk, least), np.where(tiny, grown, most)
        scale = np.where(tiny, FLOAT64.type(smallest), scale)
    below, above = least / scale, most / scale
    start = np.where(abs(low) - np.abs(below) < abs(high) - np.abs(above), low - below, high - above)
    return scale, np.rint(np.clip(start, low, high).astype(FLOAT32)).astype(INT64)


def _choose(outs: list[OutSpec], x: np.ndarray, low: int, high: int, eps: float, dtype: int) -> tuple[np.ndarray, ...]:
    if not x.size or low >= high:
        raise OperatorError(f"need elements and limits in order, found shape {x.shape}, {low} and {high}")
    found = _parameters(np.min(x), np.max(x), low, high)
    return tuple(store(part.reshape(out.sizes or ()), out.dtype) for part, out in zip(found, outs, strict=True))


def _choose_tokens(outs: list[OutSpec], x: np.ndarray, dtype: int) -> tuple[np.ndarray, ...]:
    if x.ndim == 0 or not x.shape[-1]:
        raise OperatorError(f"need rows with elements, found shape {x.shape}")
    found = _parameters(np.min(x, axis=-1, keepdims=True), np.max(x, axis=-1, keepdims=True), -128, 127)
    return tuple(store(part, out.dtype) for part, out in zip(found, outs, strict=True))


def _add(
    out: OutSpec,
    a: np.ndarray,
    a_scale: float,
    a_zero_point: int,
    a_low: int,
    a_high: int,
    b: np.ndarray,
    b_scale: float,
    b_zero_point: int,
    b_low: int,
    b_high: int,
    scale: float,
    zero_point: int,
    low: int,
    high: int,
) -> np.ndarray:
    total = _dequantized(a, a_scale, a_zero_point, FLOAT32) + _dequantized(b, b_scale, b_zero_point, FLOAT32)
    return _quantized(total, scale, zero_point, low, high, out.dtype)


def _spread(parameter: np.ndarray, columns: int) -> np.ndarray:
    """One number per column from one per row or per group of a row."""
    if parameter.ndim == 1:
        return parameter[:, np.newaxis]
    groups = parameter.shape[1]
    if parameter.ndim != 2 or not groups:
        raise OperatorError(f"need scales and zero points of rank 1 or 2, found shape {parameter.shape}")
    return np.repeat(parameter, -(-columns // groups), axis=1)[:, :columns]


def _embedding(bits: int) -> Any:
    def compute(
        out: OutSpec,
        weight: np.ndarray,
        scales: np.ndarray,
        zero_points: np.ndarray | None,
        low: int,
        high: int,
        index: np.ndarray,
        dtype: int | None = None,
    ) -> np.ndarray:
        if weight.ndim != 2 or len(scales) != len(weight):
            raise OperatorError(f"need a scale for each row of the weight, found {scales.shape} for {weight.shape}")
        rows = np.take(weight, indices(index, len(weight)), axis=0)
        if bits == 8:
            steps = rows.astype(FLOAT32)
        else:
            # Two bits lie in the byte from the low end, four bits from the high end.
            shifts = np.array([0, 2, 4, 6] if bits == 2 else [4, 0], np.uint8)
            fields = (rows[..., np.newaxis] >> shifts) & np.uint8(2**bits - 1)
            steps = fields.reshape(*rows.shape[:-1], -1).astype(FLOAT32) - np.float32(2 ** (bits - 1))
        columns = steps.shape[-1]
        if zero_points is not None:
            steps = steps - np.take(_spread(load(zero_points, FLOAT32), columns), index, axis=0)
        return store(steps * np.take(_spread(load(scales, FLOAT32), columns), index, axis=0), out.dtype)

    return compute


def _mixed_linear(
    out: OutSpec,
    x: np.ndarray,
    weight: np.ndarray,
    scales: np.ndarray,
    zero_points: np.ndarray | None,
    dtype: int | None,
) -> np.ndarray:
    if zero_points is not None:
        raise OperatorError("need symmetric weights, found zero points")
    if weight.ndim != 2 or len(scales) != len(weight):
        raise OperatorError(f"need a scale for each row of the weight, found {scales.shape} for {weight.shape}")
    rows = load(weight, FLOAT32) * _spread(load(scales, FLOAT32), weight.shape[1])
    return store(np.matmul(load(x, FLOAT32), rows.T), out.dtype)


def _mixed_mm(
    out: OutSpec, x: np.ndarray, weight: np.ndarray, scales: np.ndarray, zero_points: np.ndarray | None
) -> np.ndarray:
    if zero_points is not None:
        raise OperatorError("need symmetric weights, found zero points")
    if weight.ndim != 2 or scales.shape != weight.shape[:1]:
        raise OperatorError(f"need a scale for each row of the weight, found {scales.shape} for {weight.shape}")
    return store(np.matmul(load(x, FLOAT32), load(weight, FLOAT32) * load(scales, FLOAT32)[:, np.newaxis]), out.dtype)


def _row(name: str, args: str, compute: Any, **facts: Any) -> Portable:
    return Portable(f"quantized_decomposed::{name}", args, compute, **facts)


_LIMITS = "i quant_min, i quant_max, d dtype"
_TABLE = "T weight, T weight_scales, T? weight_zero_points, i weight_quant_min, i weight_quant_max, T indices"

ROWS: tuple[Portable, ...] = (
    _row("quantize_per_tensor.out", f"T input, f scale, i zero_point, {_LIMITS}", _quantize, elementwise=True),
    _row("quantize_per_tensor.Tensor_out", f"T input, T scale, T zero_point, {_LIMITS}", _quantize),
    _row(
        "dequantize_per_tensor.out",
        f"T input, f scale, i zero_point, {_LIMITS}, d? out_dtype",
        _dequantize,
        elementwise=True,
    ),
    _row("dequantize_per_tensor.Tensor_out", f"T input, T scale, T zero_point, {_LIMITS}, d? out_dtype", _dequantize),
    _row("quantize_per_channel.out", f"T input, T scales, T zero_points, i axis, {_LIMITS}", _quantize_channels),
    _row(
        "dequantize_per_channel.out",
        f"T input, T scales, T? zero_points, i axis, {_LIMITS}, d? out_dtype",
        _dequantize_channels,
    ),
    _row("quantize_per_token.out", f"T input, T scales, T zero_points, {_LIMITS}", _quantize_tokens),
    _row(
        "dequantize_per_token.out", f"T input, T scales, T zero_points, {_LIMITS}, d output_dtype", _dequantize_tokens
    ),
    _row("choose_qparams.Tensor_out", "T input, i quant_min, i quant_max, f eps, d dtype", _choose, outs=2),
    _row("choose_qparams_per_token_asymmetric.out", "T input, d dtype", _choose_tokens, outs=2),
    _row(
        "add.out",
        "T a, f a_scale, i a_zero_point, i a_quant_min, i a_quant_max,"
        "T b, f b_scale, i b_zero_point, i b_quant_min, i b_quant_max,"
        "f out_scale, i out_zero_point, i out_quant_min, i out_quant_max",
        _add,
        elementwise=True,
    ),
    *(
        row
        for name, bits in (("byte", 8), ("4bit", 4), ("2bit", 2))
        for row in (
            _row(f"embedding_{name}.out", _TABLE, _embedding(bits)),
            _row(f"embedding_{name}.dtype_out", f"{_TABLE}, d? dtype", _embedding(bits)),
        )
    ),
    _row("mixed_linear.out", "T input, T weight, T weight_scales, T? weight_zero_points, d? dtype", _mixed_linear),
    _row("mixed_mm.out", "T input, T weight, T weight_scales, T? weight_zero_points", _mixed_mm),
)
