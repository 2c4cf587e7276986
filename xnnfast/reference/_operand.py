"""What the functions of the reference take and how they finish: operands, and real or exact numbers to stored ones."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..datatypes import DATATYPES
from ..quantization import PerTensor, bf16_to_f32, saturate, scales_of, unpack_int4, zero_point_of


class Operand:
    """One value during a run.

    Attributes
    ----------
    value : Value
    raw : ndarray
        The stored numbers; those of 4-bit types unpacked to int8, less their zero point.
    scale, zero_point : ndarray or None
        What dynamic quantization chose, in a shape that broadcasts against ``raw``; qdint8 only.
    """

    __slots__ = ("_real", "raw", "scale", "value", "zero_point")

    def __init__(self, value: Any, raw: np.ndarray, scale: np.ndarray | None = None,
                 zero_point: np.ndarray | None = None) -> None:
        self.value = value
        self.raw = raw
        self.scale = scale
        self.zero_point = zero_point
        self._real: np.ndarray | None = None

    @classmethod
    def constant(cls, value: Any) -> Operand:
        raw = value.array()
        return cls(value, unpack_int4(raw, value.shape[-1]) if value.dtype is None else raw)

    @property
    def datatype(self) -> str:
        # An XN00 value that is quantized on its way in is qdint8 to whoever consumes it.
        return "qdint8" if self.scale is not None else self.value.datatype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.raw.shape

    @property
    def integers(self) -> np.ndarray:
        """Stored numbers less their zero point, exact in float64."""
        zero_point = zero_point_of(self.value.quantization) if self.zero_point is None else self.zero_point
        return self.raw.astype(np.float64) - zero_point

    @property
    def scales(self) -> np.ndarray:
        """float32, in a shape that broadcasts against ``raw``."""
        return scales_of(self.value.quantization, self.raw.shape) if self.scale is None else self.scale

    @property
    def real(self) -> np.ndarray:
        """The numbers that the stored ones mean, float64."""
        if self._real is None:
            if DATATYPES[self.datatype].quantization != "none":
                self._real = self.integers * self.scales
            elif self.datatype == "bf16":
                self._real = bf16_to_f32(self.raw.view(np.uint16)).astype(np.float64)
            else:
                raw = self.raw if self.raw.dtype == self.value.dtype else self.raw.view(self.value.dtype)
                self._real = raw.astype(np.float64)
        return self._real


def clamp_bounds(clamp: tuple[float, float], value: Any) -> tuple[int, int]:
    """The stored numbers between which a quantized value stays under limits, as XNNPACK rounds them."""
    entry = DATATYPES[value.datatype]
    scale, zero_point = np.float32(value.quantization.scale), np.float32(value.quantization.zero_point)
    stored = np.asarray(clamp, np.float32) / scale + zero_point
    low, high = np.rint(np.clip(stored, entry.low, entry.high))
    return int(low), int(high)


def limit(stored: np.ndarray, value: Any, clamp: tuple[float, float] | None) -> np.ndarray:
    """Stored numbers under limits; NaN stays NaN."""
    if clamp is None:
        return stored
    if DATATYPES[value.datatype].quantization != "none":
        low, high = clamp_bounds(clamp, value)
        return np.asarray(np.clip(stored, low, high), stored.dtype)
    if value.datatype == "int32":
        low, high = (int(np.clip(np.trunc(bound), -(2**31), 2**31 - 1)) for bound in clamp)
        return np.asarray(np.clip(stored, low, high), stored.dtype)
    if value.datatype == "bf16":
        return _short(bf16_to_f32(stored.view(np.uint16)), value, clamp)
    low, high = np.asarray(clamp).astype(stored.dtype)
    return np.asarray(np.clip(stored, low, high))


def _short(single: np.ndarray, value: Any, clamp: tuple[float, float] | None) -> np.ndarray:
    """float32 as bfloat16 under limits. XNNPACK drops the low half, where rounding to nearest would be usual."""
    if clamp is not None:
        single = np.clip(single, np.float32(clamp[0]), np.float32(clamp[1]))
    return np.asarray(np.right_shift(single.view(np.uint32), 16), np.uint16).view(value.dtype)


def store(real: np.ndarray, value: Any, clamp: tuple[float, float] | None = None) -> np.ndarray:
    """Real numbers in the dtype of a value: rounded half to even, saturated, and limited.

    NaN becomes 0 in integers (the stored number, as in XNNPACK's reference code); only Convert,
    which has a rule of its own, differs.

    Parameters
    ----------
    real : numpy.ndarray
        In the value's shape.
    value : Value
        Its datatype and quantization count.
    clamp : (float, float), optional
        Lowest and highest result, as real numbers.

    Returns
    -------
    numpy.ndarray
    """
    real = np.asarray(real, np.float64)
    entry = DATATYPES[value.datatype]
    with np.errstate(all="ignore"):
        if entry.quantization == "tensor":
            zero_point = zero_point_of(value.quantization)
            scaled = np.rint(real / np.float64(np.float32(value.quantization.scale)))
            scaled = np.where(np.isnan(scaled), -float(zero_point), scaled)
            return limit(saturate(scaled, zero_point, entry), value, clamp)
        if entry.quantization != "none":
            raise TypeError(f"{value.datatype} can't be stored without the parameters of a run")
        if value.datatype == "bf16":
            return _short(real.astype(np.float32), value, clamp)
        if value.datatype == "int32":
            whole = np.where(np.isnan(real), 0, np.clip(np.rint(real), -(2.0**31), 2.0**31 - 1))
            return limit(whole.astype(np.int32), value, clamp)
        return limit(real.astype(entry.dtype), value, clamp)


def store_away(real: np.ndarray, value: Any, clamp: tuple[float, float] | None = None) -> np.ndarray:
    """Real numbers as XNNPACK's reference code stores them in 8 bits: in float32, ties away from zero, NaN as 0.

    That code fills the 256-entry tables of the 8-bit unary operators and runs the binary ones
    without a vector kernel, on every CPU alike.
    """
    entry = DATATYPES[value.datatype]
    with np.errstate(all="ignore"):
        factor = np.float32(1) / np.float32(value.quantization.scale)
        moved = real.astype(np.float32) * factor + np.float32(value.quantization.zero_point)
        return limit(np.clip(round_away(moved), entry.low, entry.high).astype(entry.dtype), value, clamp)


def round_away(numbers: np.ndarray) -> np.ndarray:
    """Whole numbers next to float32 ones, ties away from zero, NaN as 0."""
    numbers = numbers.astype(np.float64)
    return np.where(np.isnan(numbers), 0, np.copysign(np.floor(np.abs(numbers) + 0.5), numbers))


def requantize(total: np.ndarray, scale: Any, value: Any, clamp: tuple[float, float] | None) -> np.ndarray:
    """Exact 32-bit sums times a float32 factor, rounded half to even: XNNPACK's fp32 requantization, bit for bit."""
    # The sum wraps in 32 bits, then a float32 may round it.
    wrapped = np.asarray(total).astype(np.int64).astype(np.int32).astype(np.float32)
    with np.errstate(all="ignore"):
        rounded = np.rint(wrapped * np.asarray(scale, np.float32))
    return limit(saturate(rounded, value.quantization.zero_point, DATATYPES[value.datatype]), value, clamp)


def requantization_scale(x: Any, weights: Any, out: Any) -> np.ndarray:
    """float32 ``x * weights / out`` of the scales, in XNNPACK's order; one per output channel if weights have many."""
    quantization = weights.quantization
    scales = np.asarray(quantization.scale if isinstance(quantization, PerTensor) else quantization.scales, np.float32)
    return np.asarray(np.float32(x.quantization.scale) * scales / np.float32(out.quantization.scale))


def rounded_to(operand: Operand, datatype: str) -> np.ndarray:
    """Real numbers of an operand that XNNPACK narrows while packing: fp32 weights of an fp16 layer."""
    real = operand.real
    if datatype == "fp16" and operand.datatype == "fp32":
        with np.errstate(all="ignore"):
            return real.astype(np.float32).astype(np.float16).astype(np.float64)
    return real


# What the function of an operator takes and gives.
Operands = list[Any]
Values = list[Any]
Shapes = list[Any]
Results = list[Any]
