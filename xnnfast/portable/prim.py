"""Operators on numbers, and those between numbers and tensors, that ExecuTorch's runtime itself provides.

Numbers are Python's, bounded as EValue bounds them: int64 and double.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ..errors import OperatorError
from ._row import Portable
from ._types import axis


def _bounded(value: Any) -> Any:
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise OperatorError(f"need a number that int64 can hold, found {value}")
    return value


def _numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    def compute(out: Any, *operands: Any) -> Any:
        return _bounded(function(*operands))

    return compute


def _quotient(a: int, b: int) -> int:
    """Rounded toward zero, as in C."""
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


def _rest(a: int, b: int) -> int:
    """With the dividend's sign, as in C."""
    return a - b * _quotient(a, b)


def _floored(a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        return a // b
    if b == 0:
        return math.copysign(math.inf, a)
    rest = math.fmod(a, b)
    quotient = (a - rest) / b
    return quotient - 1 if rest and math.copysign(1, b) != math.copysign(1, rest) else quotient


def _divided(a: Any, b: Any) -> float:
    return float(np.float64(a) / np.float64(b))


def _size(out: Any, x: Any, dim: int) -> int:
    return int(x.shape[axis(dim, len(x.shape))])


def _numel(out: Any, x: Any) -> int:
    return math.prod(x.shape)


def _item(out: Any, x: np.ndarray) -> Any:
    if not x.size:
        raise OperatorError("need at least one element, found none")
    return x.reshape(-1)[0].item()


def _copy_index(out: Any, target: np.ndarray, source: np.ndarray, index: int) -> np.ndarray:
    """``target`` grown to ``index + 1`` entries, the last of them ``source``."""
    if index < 0 or target.ndim != source.ndim + 1 or target.shape[1:] != source.shape:
        raise OperatorError(f"can't place shape {source.shape} at {index} of shape {target.shape}")
    grown = np.zeros((index + 1, *source.shape), target.dtype)
    kept = min(index, len(target))
    grown[:kept] = target[:kept]
    grown[index] = source
    return grown


_row = partial(Portable, outs=0)
_TWO = "S a, S b"

ROWS: tuple[Portable, ...] = (
    _row("aten::sym_size.int", "T self, i dim", _size, shape_only=True),
    _row("aten::sym_numel", "T self", _numel, shape_only=True),
    _row("aten::_local_scalar_dense", "T self", _item),
    *(
        _row(f"executorch_prim::{name}.Scalar", _TWO, _numbers(function))
        for name, function in (
            ("add", lambda a, b: a + b),
            ("sub", lambda a, b: a - b),
            ("mul", lambda a, b: a * b),
            ("floordiv", _floored),
            ("truediv", _divided),
            ("mod", _rest),
            ("eq", lambda a, b: a == b),
            ("gt", lambda a, b: a > b),
            ("lt", lambda a, b: a < b),
            ("ge", lambda a, b: a >= b),
            ("le", lambda a, b: a <= b),
            ("sym_max", max),
            ("sym_min", min),
        )
    ),
    *(
        _row(f"executorch_prim::{name}.Scalar", "S a", _numbers(function))
        for name, function in (
            ("sym_float", float),
            ("sym_int", int),
            ("neg", lambda a: -a),
            ("sym_not", lambda a: not a),
            ("ceil", math.ceil),
            ("round", round),
            ("trunc", math.trunc),
        )
    ),
    _row(
        "executorch_prim::sym_ite.Scalar",
        "b condition, S t, S f",
        _numbers(lambda condition, t, f: t if condition else f),
    ),
    _row("executorch_prim::floordiv.int", "i a, i b", _numbers(_quotient)),
    _row("executorch_prim::mod.int", "i a, i b", _numbers(_rest)),
    Portable(
        "executorch_prim::et_copy_index.tensor",
        "T copy_to, T copy_from, i index",
        _copy_index,
        outs=0,
        mutates=0,
        returns=False,
        pure=False,
    ),
)
