"""Quantization parameters of a Value, and helpers between real numbers and stored integers.

A quantized external value crosses the boundary as raw integers: ``real = (stored - zero_point) *
scale``. :func:`quantize` and :func:`dequantize` do that arithmetic for a Value's parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .datatypes import DATATYPES, Datatype


class PerTensor(NamedTuple):
    """One scale and zero point for the whole value (qint8, quint8, qint32).

    Parameters
    ----------
    scale : float
        Size of one step, a normal and positive float32.
    zero_point : int
        The stored number that means 0.
    """

    scale: float
    zero_point: int


@dataclass(frozen=True, slots=True, eq=False)
class PerChannel:
    """One scale per index of ``axis`` (qcint8, qcint4, qcint32); the zero point is 0, 8 for qcint4.

    Parameters
    ----------
    scales : numpy.ndarray
        float32, one for each index of the axis.
    axis : int
        The axis of the output channels: 0 for filters, the last for those of depthwise convolutions.
    """

    #: float32, length ``shape[axis]``.
    scales: np.ndarray
    axis: int


@dataclass(frozen=True, slots=True, eq=False)
class PerBlock:
    """One bfloat16 scale per row and block of ``block_size`` inner elements (qbint4).

    Parameters
    ----------
    scales : numpy.ndarray
        uint16 bit patterns of bfloat16, or float32 numbers which :class:`GraphBuilder` rounds; ``rows * inner /
        block_size`` of them, row by row.
    axis : int
        The axis of the rows, 0.
    block_size : int
        A multiple of 32 that divides the inner size.
    """

    #: uint16 bit patterns of bfloat16, length ``rows * inner / block_size``, row by row.
    scales: np.ndarray
    axis: int
    block_size: int


class PerToken(NamedTuple):
    """Parameters computed at run time, one per row; the last ``num_nonbatch_dims`` axes make a row (qdint8).

    Parameters
    ----------
    num_nonbatch_dims : int
        1 for rows of a matrix, 3 for whole images.
    """

    num_nonbatch_dims: int


Quantization = PerTensor | PerChannel | PerBlock | PerToken


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    """float32 values of bfloat16 bit patterns (uint16)."""
    return (np.asarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(values: Any) -> np.ndarray:
    """bfloat16 bit patterns (uint16) of real numbers, rounded to nearest, ties to even; a NaN stays one."""
    values = np.asarray(values, np.float32)
    bits = np.atleast_1d(values).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16
    # Rounding may carry a NaN's payload away; set its quiet bit instead.
    rounded = np.where(np.isnan(np.atleast_1d(values)), (bits >> 16) | np.uint32(0x40), rounded)
    stored: np.ndarray = rounded.astype(np.uint16).reshape(values.shape)
    return stored


def unpack_int4(packed: np.ndarray, inner: int) -> np.ndarray:
    """int8 numbers -8..7 of 4-bit rows: the low nibble is the even element, stored numbers are 8 above.

    ``packed`` is uint8 of ``ceil(inner / 2)`` bytes per row, as :meth:`Value.array` gives it.
    """
    packed = np.asarray(packed, np.uint8)
    both = np.stack([packed & 15, packed >> 4], axis=-1).astype(np.int8) - np.int8(8)
    rows: np.ndarray = both.reshape((*packed.shape[:-1], -1))
    return rows[..., :inner]


def pack_int4(numbers: Any) -> np.ndarray:
    """The inverse of :func:`unpack_int4`: uint8 rows, the last nibble of an odd row being 0 + 8."""
    numbers = np.asarray(numbers)
    if numbers.size and (numbers.min() < -8 or numbers.max() > 7):
        raise ValueError(f"4-bit numbers must be in -8..7, found {numbers.min()}..{numbers.max()}")
    stored = (numbers + 8).astype(np.uint8)
    if stored.shape[-1] % 2:
        stored = np.concatenate([stored, np.full((*stored.shape[:-1], 1), 8, np.uint8)], axis=-1)
    return np.asarray(stored[..., 0::2] | (stored[..., 1::2] << 4))


def scales_of(quantization: Quantization, shape: Sequence[int]) -> np.ndarray:
    """float32 scales in a shape that broadcasts against ``shape``."""
    if isinstance(quantization, PerTensor):
        return np.full((1,) * len(shape), quantization.scale, np.float32)
    if isinstance(quantization, PerChannel):
        kept = [1] * len(shape)
        kept[quantization.axis] = shape[quantization.axis]
        return np.asarray(quantization.scales, np.float32)[: shape[quantization.axis]].reshape(kept)
    if isinstance(quantization, PerBlock):
        rows, inner = shape
        blocks = inner // quantization.block_size
        scales = bf16_to_f32(quantization.scales)[: rows * blocks].reshape(rows, blocks)
        return np.repeat(scales, quantization.block_size, axis=1)
    raise TypeError(f"a value quantized {quantization!r} stores no scales")


def zero_point_of(quantization: Quantization) -> int:
    """The zero point; 0 for the types that have none (4-bit numbers come unpacked, without theirs)."""
    return quantization.zero_point if isinstance(quantization, PerTensor) else 0


def dequantize(stored: Any, value: Any) -> np.ndarray:
    """The real numbers of a value's stored ones: ``(stored - zero_point) * scale``.

    Parameters
    ----------
    stored : array_like
        Whole numbers, in the value's shape or one that its parameters fit. 4-bit types are given packed, as
        :meth:`Value.array` has them, or as int8 numbers -8..7.
    value : Value
        Or anything with its ``datatype``, ``shape`` and ``quantization``.

    Returns
    -------
    numpy.ndarray
        float32, of the shape of the (unpacked) numbers.

    Raises
    ------
    TypeError
        The value is not quantized, or by parameters that only a run makes (qdint8).
    """
    stored = np.asarray(stored)
    entry = _quantized(value)
    if entry.bits == 4 and stored.dtype == np.uint8:
        stored = unpack_int4(stored, value.shape[-1])
    difference = stored.astype(np.int64) - zero_point_of(value.quantization)
    return np.asarray(difference.astype(np.float32) * scales_of(value.quantization, stored.shape))


def quantize(real: Any, value: Any) -> np.ndarray:
    """The numbers that a value stores for real ones, as XNNPACK's Convert computes them.

    The float32 product with the reciprocal of the scale (a float16 reciprocal for float16 arrays)
    is rounded to nearest, ties to even, and saturates; NaN gives the highest number.

    Parameters
    ----------
    real : array_like
        float32 or float16 numbers, in the value's shape or one that its parameters fit.
    value : Value
        Or anything with its ``datatype`` and ``quantization``.

    Returns
    -------
    numpy.ndarray
        Of the value's dtype; 4-bit types come back as int8 numbers -8..7, not packed.

    Raises
    ------
    TypeError
        The value is not quantized, or by parameters that only a run makes (qdint8).
    """
    entry = _quantized(value)
    real = np.asarray(real)
    zero_point = zero_point_of(value.quantization)
    with np.errstate(all="ignore"):
        scales = scales_of(value.quantization, real.shape)
        if entry.bits == 32:
            # A float32 product can't tell neighbouring numbers of 32 bits apart.
            scaled = real.astype(np.float64) / scales
        else:
            factor = np.asarray(np.float32(1) / scales)
            if real.dtype == np.float16:
                factor = factor.astype(np.float16).astype(np.float32)
            scaled = real.astype(np.float32) * factor
        return saturate(np.rint(np.fmin(scaled, entry.high - zero_point)), zero_point, entry)


def saturate(rounded: np.ndarray, zero_point: int, entry: Datatype) -> np.ndarray:
    """Stored numbers of rounded ones: plus the zero point, then cut to the range of the type."""
    moved = np.clip(rounded.astype(np.float64) + zero_point, entry.low, entry.high)
    return moved.astype(np.int8 if entry.bits == 4 else entry.dtype)


def quantize_rows(real: Any, num_nonbatch_dims: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(stored int8, float32 scales, int32 zero points) of dynamic quantization, as XNNPACK chooses them.

    The last ``num_nonbatch_dims`` axes make a row; scales and zero points broadcast against the
    array. float16 rows are quantized with a float16 factor, as in the engine.
    """
    real = np.asarray(real)
    half = real.dtype == np.float16
    real = real.astype(np.float32)
    axes = tuple(range(max(real.ndim - num_nonbatch_dims, 0), real.ndim))
    one = np.float32(1)
    with np.errstate(all="ignore"):
        # A row always spans 0, so that 0 (and padding) is exact.
        low = real.min(axis=axes, keepdims=True, initial=0)
        high = real.max(axis=axes, keepdims=True, initial=0)
        factor = np.where(low == high, one, np.float32(255) / (high - low))
        low, high = low * factor, high * factor
        # The end of the range that the factor represents with the smaller error fixes the zero point.
        nearer_low = (np.float32(-128) + low) + (np.float32(127) + high) > 0
        zero_point = np.rint(np.clip(np.where(nearer_low, np.float32(-128) - low, np.float32(127) - high), -128, 127))
        scale = one / factor
        factor = factor.astype(np.float16).astype(np.float32) if half else one / scale
        # A row that holds NaN or spans more than a float can say keeps its scale, NaN or infinite.
        zero_point = np.nan_to_num(zero_point)
        stored = np.clip(np.rint(np.fmin(real * factor, 127 - zero_point)) + zero_point, -128, 127)
        return stored.astype(np.int8), scale, zero_point.astype(np.int32)


def _quantized(value: Any) -> Datatype:
    entry = DATATYPES[value.datatype]
    if entry.quantization in ("none", "token"):
        raise TypeError(f"{value.datatype} has no quantization parameters before a run")
    return entry
