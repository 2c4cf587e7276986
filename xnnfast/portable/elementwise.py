"""Operators whose result at a place depends on their arguments at that place alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ..errors import OperatorError
from ._erf import erf, in_blocks
from ._row import OutSpec, Portable
from ._types import (
    BOOL,
    FLOAT32,
    FLOAT64,
    exact_number,
    float_type,
    is_float,
    is_integer,
    load,
    math_type,
    number,
    promote,
    promote_number,
    store,
)

Compute = Callable[..., np.ndarray]


def _pair(a: Any, b: Any) -> tuple[Any, Any, np.dtype]:
    """Two operands, one of which may be a number, in the type to compute in."""
    if not isinstance(b, np.ndarray):
        kind = math_type(promote_number(a.dtype, b))
        return load(a, kind), number(b, kind), kind
    if not isinstance(a, np.ndarray):
        kind = math_type(promote_number(b.dtype, a))
        return number(a, kind), load(b, kind), kind
    kind = math_type(promote(a.dtype, b.dtype))
    return load(a, kind), load(b, kind), kind


def _binary(function: Callable[[Any, Any], Any]) -> Compute:
    def compute(out: OutSpec, a: Any, b: Any) -> np.ndarray:
        a, b, _ = _pair(a, b)
        return store(function(a, b), out.dtype)

    return compute


def _add(out: OutSpec, a: np.ndarray, b: Any, alpha: Any) -> np.ndarray:
    a, b, kind = _pair(a, b)
    return store(np.add(a, b if alpha == 1 else b * number(alpha, kind)), out.dtype)


def _subtract(out: OutSpec, a: np.ndarray, b: Any, alpha: Any) -> np.ndarray:
    a, b, kind = _pair(a, b)
    return store(np.subtract(a, b if alpha == 1 else b * number(alpha, kind)), out.dtype)


def _subtract_from(out: OutSpec, a: np.ndarray, b: Any, alpha: Any) -> np.ndarray:
    a, b, kind = _pair(a, b)
    return store(np.subtract(b, a if alpha == 1 else a * number(alpha, kind)), out.dtype)


def _compare(function: Callable[[Any, Any], Any]) -> Compute:
    def compute(out: OutSpec, a: np.ndarray, b: Any) -> np.ndarray:
        if isinstance(b, np.ndarray) and a.dtype != b.dtype and (is_float(a.dtype) or is_float(b.dtype)):
            # Two different types with a float among them meet in float32, even if one is float64.
            return store(function(load(a, FLOAT32), load(b, FLOAT32)), out.dtype)
        a, b, _ = _pair(a, b)
        return store(function(a, b), out.dtype)

    return compute


def _logical(function: Callable[..., Any]) -> Compute:
    def compute(out: OutSpec, *operands: np.ndarray) -> np.ndarray:
        return store(function(*(load(x, BOOL) for x in operands)), out.dtype)

    return compute


def _unary(function: Callable[[np.ndarray], Any]) -> Compute:
    """Operators that keep the type: computed wide, rounded to it."""

    def compute(out: OutSpec, x: np.ndarray) -> np.ndarray:
        return store(function(load(x, math_type(x.dtype))), out.dtype)

    return compute


def _float_unary(function: Callable[[np.ndarray], Any]) -> Compute:
    """Operators that turn whole numbers into floats."""

    def compute(out: OutSpec, x: np.ndarray) -> np.ndarray:
        return store(function(load(x, float_type(x.dtype))), out.dtype)

    return compute


def _keep_integers(function: Callable[[np.ndarray], Any]) -> Compute:
    """ceil, floor and their like: whole numbers are their own result."""

    def compute(out: OutSpec, x: np.ndarray) -> np.ndarray:
        if is_integer(x.dtype):
            return store(x.copy(), out.dtype)
        return store(function(load(x, math_type(x.dtype))), out.dtype)

    return compute


# Division


def _divide(out: OutSpec, a: np.ndarray, b: Any) -> np.ndarray:
    if not isinstance(b, np.ndarray):
        kind = a.dtype if is_float(a.dtype) else FLOAT32
    elif is_float(a.dtype) or is_float(b.dtype):
        kind = promote(a.dtype, b.dtype)
    else:
        kind = FLOAT32
    kind = math_type(kind)
    return store(
        np.true_divide(load(a, kind), load(b, kind) if isinstance(b, np.ndarray) else number(b, kind)), out.dtype
    )


def _nonzero(divisor: Any, kind: np.dtype) -> None:
    if is_integer(kind) and not np.all(divisor):
        raise OperatorError("need a divisor other than 0 for whole numbers")


def _truncated(a: Any, b: Any, kind: np.dtype) -> Any:
    """a / b rounded toward zero."""
    if is_integer(kind):
        return (a - np.fmod(a, b)) // b
    return np.trunc(a / b)


def _floored(a: Any, b: Any, kind: np.dtype) -> Any:
    """a / b rounded down. Division of a float by zero is an infinity, 0 / 0 too."""
    if is_integer(kind):
        return a // b
    remainder = np.fmod(a, b)
    quotient = (a - remainder) / b
    quotient = quotient - ((remainder != 0) & (np.signbit(b) != np.signbit(remainder)))
    return np.where(b == 0, np.copysign(kind.type(np.inf), a), quotient)


def _divide_mode(out: OutSpec, a: np.ndarray, b: Any, mode: str | None) -> np.ndarray:
    if mode is None:
        return _divide(out, a, b)
    if mode not in ("trunc", "floor"):
        raise OperatorError(f"need the rounding mode trunc or floor, found {mode!r}")
    a, b, kind = _pair(a, b)
    _nonzero(b, kind)
    return store((_truncated if mode == "trunc" else _floored)(a, b, kind), out.dtype)


def _floor_divide(out: OutSpec, a: np.ndarray, b: Any) -> np.ndarray:
    return _divide_mode(out, a, b, "floor")


def _remainder(out: OutSpec, a: np.ndarray, b: Any) -> np.ndarray:
    """The sign is the divisor's for floats, the dividend's for whole numbers: so ExecuTorch, unlike PyTorch."""
    a, b, kind = _pair(a, b)
    _nonzero(b, kind)
    rest = np.fmod(a, b)
    if is_float(kind):
        rest = load(np.asarray(rest), FLOAT32)
        rest = rest + np.where(((a < 0) != (b < 0)) & (rest != 0), b, kind.type(0))
    return store(rest, out.dtype)


def _fmod(out: OutSpec, a: np.ndarray, b: Any) -> np.ndarray:
    kind = promote(a.dtype, b.dtype) if isinstance(b, np.ndarray) else promote_number(a.dtype, b)
    _nonzero(b, kind)
    # Whole numbers are taken as float64, which alone explains the result of a negative divisor of uint8.
    wide = FLOAT32 if math_type(kind) == FLOAT32 else FLOAT64
    divisor = load(b, wide) if isinstance(b, np.ndarray) else number(b, wide)
    return store(np.fmod(load(a, wide), divisor), out.dtype)


def _power(out: OutSpec, a: Any, b: Any) -> np.ndarray:
    a, b, kind = _pair(a, b)
    if not isinstance(b, np.ndarray) and is_float(kind):
        if b == 2:
            return store(a * a, out.dtype)
        if b == 0.5:
            # pow, unlike sqrt, makes +0 of -0 and +inf of -inf.
            return store(np.where(np.isneginf(a), kind.type(np.inf), np.sqrt(a + kind.type(0))), out.dtype)
    wide = kind if kind == FLOAT32 else FLOAT64
    return store(np.power(np.asarray(a).astype(wide), np.asarray(b).astype(wide)), out.dtype)


# Limits and activations


def _clamp(out: OutSpec, x: np.ndarray, low: Any, high: Any) -> np.ndarray:
    kind = x.dtype
    for limit in (low, high):
        if limit is not None:
            kind = promote(kind, limit.dtype) if isinstance(limit, np.ndarray) else promote_number(kind, limit)
    for limit in (low, high):
        if limit is not None and not isinstance(limit, np.ndarray):
            exact_number(int(limit) if out.dtype.kind in "iu" and not np.isinf(limit) else limit, out.dtype)
    kind = math_type(kind)
    result: Any = load(x, kind)
    for limit, function in ((low, np.maximum), (high, np.minimum)):
        if limit is not None:
            result = function(result, load(limit, kind) if isinstance(limit, np.ndarray) else number(limit, kind))
    return store(result.copy() if result is x else result, out.dtype)


def _hardtanh(out: OutSpec, x: np.ndarray, low: Any, high: Any) -> np.ndarray:
    kind = math_type(x.dtype)
    low, high = exact_number(low, x.dtype), exact_number(high, x.dtype)
    return store(np.minimum(np.maximum(load(x, kind), number(low, kind)), number(high, kind)), out.dtype)


def _relu(x: np.ndarray) -> Any:
    return np.maximum(x, x.dtype.type(0))


def _leaky_relu(out: OutSpec, x: np.ndarray, slope: Any) -> np.ndarray:
    kind = math_type(x.dtype)
    slope = number(exact_number(slope, x.dtype), kind)
    x = load(x, kind)
    return store(np.where(x >= 0, x, x * slope), out.dtype)


def _elu(out: OutSpec, x: np.ndarray, alpha: Any, scale: Any, input_scale: Any) -> np.ndarray:
    kind = math_type(x.dtype)
    x = load(x, kind)
    negative = number(alpha, kind) * number(scale, kind)
    return store(
        np.where(x <= 0, np.expm1(x * number(input_scale, kind)) * negative, x * number(scale, kind)), out.dtype
    )


def _gelu_exact(x: np.ndarray) -> np.ndarray:
    return _share(erf(x * x.dtype.type(math.sqrt(0.5))), x)


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    inner = x * x
    inner *= x
    inner *= x.dtype.type(0.044715)
    inner += x
    inner *= x.dtype.type(math.sqrt(2 / math.pi))
    return _share(np.tanh(inner, out=inner), x)


def _share(signed: np.ndarray, x: np.ndarray) -> np.ndarray:
    """x times the share (1 + signed) / 2; -inf stays NaN, as in ExecuTorch and PyTorch."""
    signed += x.dtype.type(1)
    signed *= x.dtype.type(0.5)
    signed *= x
    return signed


def _gelu(out: OutSpec, x: np.ndarray, approximate: str) -> np.ndarray:
    functions = {"none": _gelu_exact, "tanh": _gelu_tanh}
    if approximate not in functions:
        raise OperatorError(f"need the approximation none or tanh, found {approximate!r}")
    return store(in_blocks(functions[approximate], load(x, math_type(x.dtype))), out.dtype)


def _sigmoid(x: np.ndarray) -> Any:
    one = x.dtype.type(1)
    return one / (one + np.exp(-x))


def _logit(out: OutSpec, x: np.ndarray, eps: float | None) -> np.ndarray:
    x = load(x, math_type(out.dtype))
    if eps is not None:
        # NaN fails both comparisons and stays.
        x = np.where(x < eps, x.dtype.type(eps), np.where(x > 1 - eps, x.dtype.type(1 - eps), x))
    return store(np.log(x / (x.dtype.type(1) - x)), out.dtype)


def _round(x: np.ndarray) -> Any:
    return np.rint(x)


def _sign(out: OutSpec, x: np.ndarray) -> np.ndarray:
    return store(x.copy() if x.dtype == BOOL else np.sign(load(x, math_type(x.dtype))), out.dtype)


def _glu(out: OutSpec, x: np.ndarray, dim: int) -> np.ndarray:
    from ._types import axis

    dim = axis(dim, x.ndim)
    if x.ndim == 0 or x.shape[dim] % 2:
        raise OperatorError(f"need an even size in dimension {dim}, found shape {x.shape}")
    left, right = np.split(load(x, math_type(x.dtype)), 2, axis=dim)
    return store(left * _sigmoid(right), out.dtype)


# Choice


def _where(out: OutSpec, condition: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if condition.dtype.kind not in "bu":
        raise OperatorError(f"need a condition of bool or uint8, found {condition.dtype}")
    kind = promote(a.dtype, b.dtype)
    condition, a, b = load(condition, BOOL), load(a, kind), load(b, kind)
    if kind != FLOAT32:
        return store(np.where(condition, a, b), out.dtype)
    # On the bits: NumPy's own choice branches on every element.
    mask = np.negative((condition.view(np.int8) != 0).view(np.int8)).astype(np.int32)
    first, second = a.view(np.int32), b.view(np.int32)
    chosen = np.asarray((first ^ second) & mask)
    if chosen.ndim and chosen.shape == np.broadcast_shapes(chosen.shape, second.shape):
        chosen ^= second
    else:
        chosen = np.asarray(chosen ^ second)
    return store(chosen.view(np.float32), out.dtype)


def _masked_fill(out: OutSpec, x: np.ndarray, mask: np.ndarray, value: Any) -> np.ndarray:
    return store(np.where(load(mask, BOOL), number(value, x.dtype), x), out.dtype)


def _bitwise(function: Callable[[Any, Any], Any]) -> Compute:
    def compute(out: OutSpec, a: np.ndarray, b: Any) -> np.ndarray:
        a, b, kind = _pair(a, b)
        if not is_integer(kind):
            raise OperatorError(f"need whole numbers, found {kind}")
        return store(function(a, b), out.dtype)

    return compute


def _invert(x: np.ndarray) -> Any:
    return np.invert(x)


_row = partial(Portable, elementwise=True)


def _tensor_and_number(name: str, compute: Compute, lower: str | None, extra: str = "") -> tuple[Portable, ...]:
    return (
        _row(f"aten::{name}.out", f"T self, T other{extra}", compute, lower=lower),
        _row(f"aten::{name}.Scalar_out", f"T self, S other{extra}", compute, lower=lower and f"{lower}_scalar"),
    )


def _tensor_pairs(name: str, compute: Compute, lower: str | None = None) -> tuple[Portable, ...]:
    return (
        _row(f"aten::{name}.Tensor_out", "T self, T other", compute, lower=lower),
        _row(f"aten::{name}.Scalar_out", "T self, S other", compute, lower=lower and f"{lower}_scalar"),
    )


def _reciprocal(x: np.ndarray) -> Any:
    return x.dtype.type(1) / x


def _rsqrt(x: np.ndarray) -> Any:
    return x.dtype.type(1) / np.sqrt(x)


ROWS: tuple[Portable, ...] = (
    *_tensor_and_number("add", _add, "add", ", S alpha"),
    *_tensor_and_number("sub", _subtract, "subtract", ", S alpha"),
    _row("aten::rsub.Scalar_out", "T self, S other, S alpha", _subtract_from),
    *_tensor_and_number("mul", _binary(np.multiply), "multiply"),
    *_tensor_and_number("div", _divide, "divide"),
    _row("aten::div.out_mode", "T self, T other, s? rounding_mode", _divide_mode),
    _row("aten::div.Scalar_mode_out", "T self, S other, s? rounding_mode", _divide_mode),
    _row("aten::floor_divide.out", "T self, T other", _floor_divide),
    *_tensor_pairs("remainder", _remainder),
    *_tensor_pairs("fmod", _fmod),
    _row("aten::pow.Tensor_Tensor_out", "T self, T exponent", _power),
    _row("aten::pow.Tensor_Scalar_out", "T self, S exponent", _power, lower="power_scalar"),
    _row("aten::pow.Scalar_out", "S self, T exponent", _power),
    _row(
        "aten::atan2.out",
        "T self, T other",
        lambda out, a, b: store(
            np.arctan2(load(a, float_type(promote(a.dtype, b.dtype))), load(b, float_type(promote(a.dtype, b.dtype)))),
            out.dtype,
        ),
    ),
    _row("aten::minimum.out", "T self, T other", _binary(np.minimum), lower="minimum"),
    _row("aten::maximum.out", "T self, T other", _binary(np.maximum), lower="maximum"),
    *_tensor_pairs("eq", _compare(np.equal)),
    *_tensor_pairs("ne", _compare(np.not_equal)),
    *_tensor_pairs("lt", _compare(np.less)),
    *_tensor_pairs("le", _compare(np.less_equal)),
    *_tensor_pairs("gt", _compare(np.greater)),
    *_tensor_pairs("ge", _compare(np.greater_equal)),
    _row("aten::logical_and.out", "T self, T other", _logical(np.logical_and)),
    _row("aten::logical_or.out", "T self, T other", _logical(np.logical_or)),
    _row("aten::logical_xor.out", "T self, T other", _logical(np.logical_xor)),
    _row("aten::logical_not.out", "T self", _logical(np.logical_not)),
    *_tensor_pairs("bitwise_and", _bitwise(np.bitwise_and)),
    *_tensor_pairs("bitwise_or", _bitwise(np.bitwise_or)),
    *_tensor_pairs("bitwise_xor", _bitwise(np.bitwise_xor)),
    _row("aten::bitwise_not.out", "T self", _unary(_invert)),
    _row("aten::bitwise_left_shift.Tensor_out", "T self, T other", _bitwise(np.left_shift)),
    _row("aten::bitwise_left_shift.Tensor_Scalar_out", "T self, S other", _bitwise(np.left_shift)),
    _row("aten::bitwise_right_shift.Tensor_out", "T self, T other", _bitwise(np.right_shift)),
    _row("aten::bitwise_right_shift.Tensor_Scalar_out", "T self, S other", _bitwise(np.right_shift)),
    _row("aten::abs.out", "T self", _unary(np.abs), lower="abs"),
    _row("aten::neg.out", "T self", _unary(np.negative), lower="negate"),
    _row("aten::relu.out", "T self", _unary(_relu), lower="clamp"),
    _row("aten::sign.out", "T self", _sign),
    _row("aten::ceil.out", "T self", _keep_integers(np.ceil), lower="ceiling"),
    _row("aten::floor.out", "T self", _keep_integers(np.floor), lower="floor"),
    _row("aten::trunc.out", "T self", _keep_integers(np.trunc)),
    _row("aten::round.out", "T self", _keep_integers(_round)),
    *(
        _row(f"aten::{name}.out", "T self", _float_unary(function), lower=lower)
        for name, function, lower in (
            ("acos", np.arccos, None),
            ("acosh", np.arccosh, None),
            ("asin", np.arcsin, None),
            ("asinh", np.arcsinh, None),
            ("atan", np.arctan, None),
            ("atanh", np.arctanh, None),
            ("cos", np.cos, "cosine"),
            ("cosh", np.cosh, None),
            ("erf", erf, None),
            ("exp", np.exp, "exp"),
            ("expm1", np.expm1, None),
            ("log", np.log, "log"),
            ("log10", np.log10, None),
            ("log1p", np.log1p, None),
            ("log2", np.log2, None),
            ("reciprocal", _reciprocal, None),
            ("rsqrt", _rsqrt, "reciprocal_square_root"),
            ("sigmoid", _sigmoid, "sigmoid"),
            ("sin", np.sin, "sine"),
            ("sinh", np.sinh, None),
            ("sqrt", np.sqrt, "square_root"),
            ("tan", np.tan, None),
            ("tanh", np.tanh, "tanh"),
        )
    ),
    _row("aten::isinf.out", "T self", _float_unary(np.isinf)),
    _row("aten::isnan.out", "T self", _float_unary(np.isnan)),
    _row("aten::clamp.out", "T self, S? min, S? max", _clamp, lower="clamp"),
    _row("aten::clamp.Tensor_out", "T self, T? min, T? max", _clamp),
    _row("aten::hardtanh.out", "T self, S min_val, S max_val", _hardtanh, lower="clamp"),
    _row("aten::leaky_relu.out", "T self, S negative_slope", _leaky_relu, lower="leaky_relu"),
    _row("aten::elu.out", "T self, S alpha, S scale, S input_scale", _elu, lower="elu"),
    _row("aten::gelu.out", "T self, s approximate", _gelu, lower="gelu"),
    _row("aten::logit.out", "T self, f? eps", _logit),
    Portable("aten::glu.out", "T self, i dim", _glu),
    _row("aten::where.self_out", "T condition, T self, T other", _where),
    _row("aten::masked_fill.Scalar_out", "T self, T mask, S value", _masked_fill),
    _row(
        "aten::masked_fill.Tensor_out",
        "T self, T mask, T value",
        lambda out, x, mask, value: _masked_fill(out, x, mask, value[()]),
    ),
)
