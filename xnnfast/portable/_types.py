"""Datatypes as ExecuTorch's portable kernels treat them: promotion, the type that a kernel computes in, casts.

bfloat16 exists here if ml_dtypes is installed; nothing imports it, the dtype is known by its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import OperatorError

FLOAT32 = np.dtype(np.float32)
FLOAT64 = np.dtype(np.float64)
INT64 = np.dtype(np.int64)
BOOL = np.dtype(np.bool_)


def is_float(dtype: np.dtype) -> bool:
    return dtype.kind == "f" or dtype.name == "bfloat16"


def is_integer(dtype: np.dtype) -> bool:
    """Whole numbers, bool among them."""
    return dtype.kind in "iub"


def promote(a: np.dtype, b: np.dtype) -> np.dtype:
    """The common type of two tensors. A rank of 0 makes no difference, unlike in PyTorch itself."""
    if a == b:
        return a
    if is_float(a):
        if not is_float(b):
            return a
        if a.itemsize == b.itemsize == 2:
            return FLOAT32
        return a if a.itemsize > b.itemsize else b
    if is_float(b):
        return b
    return np.promote_types(a, b)


def promote_number(a: np.dtype, number: Any) -> np.dtype:
    """The common type of a tensor and a number: only the number's category counts."""
    if isinstance(number, bool):
        return a
    if isinstance(number, int):
        return INT64 if a == BOOL else a
    return a if is_float(a) else FLOAT32


def math_type(dtype: np.dtype) -> np.dtype:
    """The type that kernels compute in: 16-bit floats are widened, and only the result is rounded."""
    return FLOAT32 if dtype.itemsize == 2 and is_float(dtype) else dtype


def float_type(dtype: np.dtype) -> np.dtype:
    """The type that exp, sigmoid and their like compute in."""
    return FLOAT64 if dtype == FLOAT64 else FLOAT32


def load(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return x if x.dtype == dtype else x.astype(dtype)


def store(x: Any, dtype: np.dtype) -> np.ndarray:
    """``x`` as an array of ``dtype``; a ufunc's scalar becomes an array of rank 0."""
    array: np.ndarray = np.asarray(x)
    return array if array.dtype == dtype else array.astype(dtype)


def number(value: Any, dtype: np.dtype) -> Any:
    """A number in ``dtype``, converted as C does: whole numbers wrap."""
    return np.asarray(value).astype(dtype)[()]


def exact_number(value: Any, dtype: np.dtype) -> Any:
    """A number in ``dtype``; refuses one outside the type's range, as full and fill do."""
    cast = number(value, dtype)
    if is_integer(dtype) and dtype != BOOL:
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        if not low <= value <= high:
            raise OperatorError(f"need a number that {dtype} can hold, found {value!r}")
    elif np.isinf(cast) and not np.isinf(value):
        raise OperatorError(f"need a number that {dtype} can hold, found {value!r}")
    return cast


def axis(dim: int, rank: int) -> int:
    """A dimension counted from the front. Rank 0 counts as rank 1."""
    rank = max(rank, 1)
    if not -rank <= dim < rank:
        raise OperatorError(f"need a dimension in {-rank}..{rank - 1}, found {dim}")
    return dim + rank if dim < 0 else dim


def axes(dims: Sequence[int], rank: int) -> tuple[int, ...]:
    found = tuple(axis(dim, rank) for dim in dims)
    if len(set(found)) != len(found):
        raise OperatorError(f"need each dimension once, found {list(dims)}")
    return found


def indices(index: np.ndarray, size: int, *, low: int = 0) -> np.ndarray:
    """``index`` as a NumPy index, every entry proven to lie in ``low`` .. ``size - 1``."""
    if index.dtype.kind not in "iu":
        raise OperatorError(f"need whole numbers as indices, found {index.dtype}")
    if index.size:
        least, most = index.min(), index.max()
        if least < low or most >= size:
            raise OperatorError(f"need indices in {low}..{size - 1}, found {int(least if least < low else most)}")
    return index
