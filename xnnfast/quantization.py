"""Quantization parameters of a Value, and helpers between real numbers and stored integers.

A quantized external value crosses the boundary as raw integers: ``real = (stored - zero_point) *
scale``. :func:`quantize` and :func:`dequantize` do that arithmetic for a Value's parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Union

import numpy as np


class PerTensor(NamedTuple):
    """One scale and zero point for the whole value (qint8, quint8, qint32)."""

    scale: float
    zero_point: int


@dataclass(frozen=True, slots=True, eq=False)
class PerChannel:
    """One scale per index of ``axis`` (qcint8, qcint4, qcint32); the zero point is 0, 8 for qcint4."""

    #: float32, length ``shape[axis]``.
    scales: np.ndarray
    axis: int


@dataclass(frozen=True, slots=True, eq=False)
class PerBlock:
    """One bfloat16 scale per row and block of ``block_size`` inner elements (qbint4)."""

    #: uint16 bit patterns of bfloat16, length ``rows * inner / block_size``, row by row.
    scales: np.ndarray
    axis: int
    block_size: int


class PerToken(NamedTuple):
    """Parameters computed at run time, one per row; the last ``num_nonbatch_dims`` axes make a row (qdint8)."""

    num_nonbatch_dims: int


Quantization = Union[PerTensor, PerChannel, PerBlock, PerToken]


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    """float32 values of bfloat16 bit patterns (uint16)."""
    return (np.asarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)
