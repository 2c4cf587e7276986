"""XNNPACK's fixed-point arithmetic of 8-bit operators, number for number; each is within one step of the real result.

The constants are those that XNNPACK derives from the scales in float32 when it creates an operator.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..datatypes import DATATYPES
from ._operand import Operand


def _ratio(x: Operand, out: Any) -> np.float32:
    ratio: np.float32 = np.float32(np.float32(x.value.quantization.scale) / np.float32(out.quantization.scale))
    return ratio


def _stored(numbers: np.ndarray, out: Any) -> np.ndarray:
    entry = DATATYPES[out.datatype]
    moved = np.clip(numbers + out.quantization.zero_point, entry.low, entry.high)
    return np.asarray(moved, entry.dtype)


def _whole(x: Operand) -> np.ndarray:
    return np.asarray(x.raw.astype(np.int64) - x.value.quantization.zero_point)


def _shifted(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Divided by a power of two, halves rounded up."""
    return np.asarray(np.right_shift(numbers + (1 << (bits - 1)), bits))


def add(a: Operand, b: Operand, out: Any, sign: int = 1) -> np.ndarray:
    """``a + b`` or ``a - b``: the ratio of the larger scale gets a multiplier of 21 bits, the other the same shift."""
    ratios = _ratio(a, out), _ratio(b, out)
    shift = 20 - (int(np.frexp(max(ratios))[1]) - 1)
    first, second = (int(np.rint(np.ldexp(ratio, shift))) for ratio in ratios)
    return _stored(_shifted(first * _whole(a) + sign * second * _whole(b), shift), out)


def rescale(x: Operand, out: Any, negative_slope: float = 1.0) -> np.ndarray:
    """``x`` in another scale, what is negative times a slope first: multipliers of 256ths."""
    positive = _ratio(x, out)
    negative = np.float32(positive * np.float32(negative_slope))
    whole = _whole(x)
    down, up = (int(np.rint(np.float32(256) * factor)) for factor in (negative, positive))
    return _stored(_shifted(whole * np.where(whole < 0, down, up), 8), out)


def between(low: np.ndarray, high: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """``low * (1 - weight) + high * weight`` in 2048ths of what came in."""
    return np.asarray((low << 11) + (high - low) * np.rint(weight * 2048).astype(np.int64))


def back_from_weights(numbers: np.ndarray, out: Any) -> np.ndarray:
    """What two steps of :func:`between` made, as stored numbers."""
    return np.asarray(_shifted(numbers, 22), DATATYPES[out.datatype].dtype)
