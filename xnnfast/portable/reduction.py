"""Reductions, normalisations and the other operators that work along dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..errors import OperatorError
from ._row import OutSpec, Portable
from ._types import BOOL, axes, axis, load, math_type, store

# Their types in NumPy's stubs leave out what is passed here.
_add: Any = np.add.reduce
_multiply: Any = np.multiply.reduce


def _over(dims: Sequence[int] | None, x: np.ndarray) -> tuple[int, ...]:
    """The axes that ``dims`` names; none named means all of them."""
    return axes(dims, x.ndim) if dims and x.ndim else tuple(range(x.ndim))


def _count(x: np.ndarray, over: Sequence[int]) -> int:
    return math.prod(x.shape[dim] for dim in over)


def _sum(out: OutSpec, x: np.ndarray, dims: Sequence[int] | None, keepdim: bool, dtype: int | None) -> np.ndarray:
    # The sum is taken in the out tensor's type.
    x = load(x, math_type(out.dtype))
    return store(_add(x, axis=_over(dims, x), dtype=x.dtype, keepdims=keepdim), out.dtype)


def _mean(out: OutSpec, x: np.ndarray, dims: Sequence[int] | None, keepdim: bool, dtype: int | None) -> np.ndarray:
    x = load(x, math_type(out.dtype))
    over = _over(dims, x)
    total = _add(x, axis=over, dtype=x.dtype, keepdims=keepdim)
    return store(total / x.dtype.type(_count(x, over)), out.dtype)


def _moments(
    x: np.ndarray, dims: Sequence[int] | None, correction: float | None, keepdim: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Variance and mean."""
    over = _over(dims, x)
    count = _count(x, over)
    mean = _add(x, axis=over, dtype=x.dtype, keepdims=True) / x.dtype.type(count)
    centred = x - mean
    squares = _add(centred * centred, axis=over, dtype=x.dtype, keepdims=keepdim)
    freedom = count - (1 if correction is None else correction)
    variance = squares / x.dtype.type(freedom) if freedom > 0 else np.full_like(squares, np.nan)
    return variance, mean if keepdim else np.squeeze(mean, axis=over)


def _var_correction(
    out: OutSpec, x: np.ndarray, dims: Sequence[int] | None, correction: float | None, keepdim: bool
) -> np.ndarray:
    return store(_moments(load(x, math_type(out.dtype)), dims, correction, keepdim)[0], out.dtype)


def _var(out: OutSpec, x: np.ndarray, dims: Sequence[int] | None, unbiased: bool, keepdim: bool) -> np.ndarray:
    return _var_correction(out, x, dims, 1 if unbiased else 0, keepdim)


def _var_mean(
    outs: list[OutSpec], x: np.ndarray, dims: Sequence[int] | None, correction: float | None, keepdim: bool
) -> tuple[np.ndarray, ...]:
    moments = _moments(load(x, math_type(outs[0].dtype)), dims, correction, keepdim)
    return tuple(store(moment, out.dtype) for moment, out in zip(moments, outs, strict=True))


def _extreme(function: np.ufunc) -> Callable[..., np.ndarray]:
    # NaN wins, as in NumPy.
    def compute(out: OutSpec, x: np.ndarray, dims: Sequence[int] | None = None, keepdim: bool = False) -> np.ndarray:
        return store(function.reduce(load(x, math_type(x.dtype)), axis=_over(dims, x), keepdims=keepdim), out.dtype)

    return compute


def _extreme_with_index(arg: Callable[..., Any]) -> Callable[..., tuple[np.ndarray, ...]]:
    def compute(outs: list[OutSpec], x: np.ndarray, dim: int, keepdim: bool) -> tuple[np.ndarray, ...]:
        dim = axis(dim, x.ndim)
        line = np.atleast_1d(x)
        index = np.expand_dims(arg(load(line, math_type(x.dtype)), axis=dim), dim)
        value = np.take_along_axis(line, index, axis=dim)
        if not keepdim or x.ndim == 0:
            value, index = value.squeeze(dim), index.squeeze(dim)
        return store(value, outs[0].dtype), store(index, outs[1].dtype)

    return compute


def _arg(function: Callable[..., Any]) -> Callable[..., np.ndarray]:
    # The first of equals, and NaN before everything, as in NumPy.
    def compute(out: OutSpec, x: np.ndarray, dim: int | None, keepdim: bool) -> np.ndarray:
        x = load(x, math_type(x.dtype))
        if dim is None or x.ndim == 0:
            index = np.asarray(function(x))
            return store(index.reshape((1,) * x.ndim) if keepdim else index, out.dtype)
        dim = axis(dim, x.ndim)
        index = function(x, axis=dim)
        return store(np.expand_dims(index, dim) if keepdim else index, out.dtype)

    return compute


def _truth(function: np.ufunc) -> Callable[..., np.ndarray]:
    def compute(out: OutSpec, x: np.ndarray, dims: Any = None, keepdim: bool = False) -> np.ndarray:
        x = load(x, BOOL)
        if isinstance(dims, int):
            over: tuple[int, ...] = (axis(dims, x.ndim),) if x.ndim else ()
        elif dims is None:
            over = tuple(range(x.ndim))
        else:
            # An empty list reduces nothing here, unlike in sum and mean.
            over = axes(dims, x.ndim) if x.ndim else ()
        return store(function.reduce(x, axis=over, keepdims=keepdim), out.dtype)

    return compute


def _product(
    out: OutSpec, x: np.ndarray, dim: int | None = None, keepdim: bool = False, dtype: int | None = None
) -> np.ndarray:
    x = load(x, math_type(out.dtype))
    over = tuple(range(x.ndim)) if dim is None or x.ndim == 0 else (axis(dim, x.ndim),)
    return store(_multiply(x, axis=over, dtype=x.dtype, keepdims=keepdim), out.dtype)


def _cumsum(out: OutSpec, x: np.ndarray, dim: int, dtype: int | None) -> np.ndarray:
    if x.ndim == 0:
        return store(x.copy(), out.dtype)
    # Every partial sum is rounded to the out tensor's type.
    return np.add.accumulate(load(x, out.dtype), axis=axis(dim, x.ndim), dtype=out.dtype)


def _topk(outs: list[OutSpec], x: np.ndarray, k: int, dim: int, largest: bool, sort: bool) -> tuple[np.ndarray, ...]:
    dim = axis(dim, x.ndim)
    line = np.atleast_1d(x)
    if not 0 <= k <= line.shape[dim]:
        raise OperatorError(f"need k in 0..{line.shape[dim]}, found {k}")
    keys = load(line, math_type(x.dtype))
    if largest:
        # Sorting the reversed line upward and reading it backward keeps the first of equals first.
        order = line.shape[dim] - 1 - np.flip(np.argsort(np.flip(keys, dim), axis=dim, kind="stable"), dim)
    else:
        order = np.argsort(keys, axis=dim, kind="stable")
    order = np.take(order, range(k), axis=dim)
    values = np.take_along_axis(line, order, axis=dim)
    if x.ndim == 0 and k:
        values, order = values[0], order[0]
    return store(values, outs[0].dtype), store(order, outs[1].dtype)


# Softmax


def _softmax(out: OutSpec, x: np.ndarray, dim: int, half_to_float: bool) -> np.ndarray:
    dim = axis(dim, x.ndim)
    line = np.atleast_1d(load(x, math_type(x.dtype)))
    if line.size == 0:
        return store(x.copy(), out.dtype)
    powers = line - np.maximum.reduce(line, axis=dim, keepdims=True)
    np.exp(powers, out=powers)
    powers /= _add(powers, axis=dim, keepdims=True)
    return store(powers.reshape(x.shape), out.dtype)


def _log_softmax(out: OutSpec, x: np.ndarray, dim: int, half_to_float: bool) -> np.ndarray:
    dim = axis(dim, x.ndim)
    line = np.atleast_1d(load(x, math_type(x.dtype)))
    if line.size == 0:
        return store(x.copy(), out.dtype)
    shifted = line - np.maximum.reduce(line, axis=dim, keepdims=True)
    shifted -= np.log(_add(np.exp(shifted), axis=dim, keepdims=True))
    return store(shifted.reshape(x.shape), out.dtype)


# Normalisation


def _standardise(rows: np.ndarray, eps: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each row less its mean over its deviation, the means, and the deviations' reciprocals."""
    length = rows.shape[1]
    if length == 0:
        return rows.copy(), np.zeros((len(rows), 1), rows.dtype), np.full((len(rows), 1), np.nan, rows.dtype)
    mean = _add(rows, axis=1, keepdims=True)
    mean /= rows.dtype.type(length)
    centred = rows - mean
    squares = np.einsum("ij,ij->i", centred, centred)[:, np.newaxis]
    deviation = rows.dtype.type(1) / np.sqrt(squares / rows.dtype.type(length) + rows.dtype.type(eps))
    centred *= deviation
    return centred, mean, deviation


def _layer_norm(
    outs: list[OutSpec],
    x: np.ndarray,
    normalized_shape: Sequence[int],
    weight: np.ndarray | None,
    bias: np.ndarray | None,
    eps: float,
) -> tuple[np.ndarray, ...]:
    shape, lead = tuple(normalized_shape), x.ndim - len(normalized_shape)
    if not shape or lead < 0 or x.shape[lead:] != shape:
        raise OperatorError(f"need an input that ends in {shape}, found shape {x.shape}")
    kind = math_type(x.dtype)
    length = math.prod(shape)
    rows = load(x, kind).reshape(math.prod(x.shape[:lead]), length)
    y, mean, deviation = _standardise(rows, eps)
    for parameter, function in ((weight, np.multiply), (bias, np.add)):
        if parameter is not None:
            if parameter.shape != shape:
                raise OperatorError(f"need a weight and a bias of shape {shape}, found {parameter.shape}")
            function(y, load(parameter, kind).reshape(length), out=y)
    moments = x.shape[:lead] + (1,) * len(shape)
    return (
        store(y.reshape(x.shape), outs[0].dtype),
        store(mean.reshape(moments), outs[1].dtype),
        store(deviation.reshape(moments), outs[2].dtype),
    )


def _channels(parameter: np.ndarray, count: int, kind: np.dtype) -> np.ndarray:
    if parameter.shape != (count,):
        raise OperatorError(f"need one number for each of {count} channels, found shape {parameter.shape}")
    return load(parameter, kind)[:, np.newaxis]


def _group_norm(
    outs: list[OutSpec],
    x: np.ndarray,
    weight: np.ndarray | None,
    bias: np.ndarray | None,
    batch: int,
    channels: int,
    pixels: int,
    groups: int,
    eps: float,
) -> tuple[np.ndarray, ...]:
    if x.ndim < 2 or x.shape[:2] != (batch, channels) or x.size != batch * channels * pixels:
        raise OperatorError(f"need an input of {batch} x {channels} x {pixels} elements, found shape {x.shape}")
    if groups <= 0 or channels % groups:
        raise OperatorError(f"need a number of groups that divides {channels} channels, found {groups}")
    kind = math_type(x.dtype)
    rows = load(x, kind).reshape(batch * groups, channels // groups * pixels)
    y, mean, deviation = _standardise(rows, eps)
    y = y.reshape(batch, channels, pixels)
    if weight is not None:
        y *= _channels(weight, channels, kind)
    if bias is not None:
        y += _channels(bias, channels, kind)
    return (
        store(y.reshape(x.shape), outs[0].dtype),
        store(mean.reshape(batch, groups), outs[1].dtype),
        store(deviation.reshape(batch, groups), outs[2].dtype),
    )


def _batch_norm(
    outs: list[OutSpec],
    x: np.ndarray,
    weight: np.ndarray | None,
    bias: np.ndarray | None,
    mean: np.ndarray,
    variance: np.ndarray,
    momentum: float,
    eps: float,
) -> tuple[np.ndarray, ...]:
    kind = math_type(x.dtype)
    channels = x.shape[1 if x.ndim > 1 else 0]
    scale = kind.type(1) / np.sqrt(_channels(variance, channels, kind) + kind.type(eps))
    if weight is not None:
        scale = scale * _channels(weight, channels, kind)
    planes = load(x, kind).reshape((len(x) if x.ndim > 1 else 1, channels, -1) if x.size else (0, channels, 0))
    y = planes - _channels(mean, channels, kind)
    y *= scale
    if bias is not None:
        y += _channels(bias, channels, kind)
    # The two statistics are not computed; the tensors planned for them are usually empty.
    return (
        store(y.reshape(x.shape), outs[0].dtype),
        *(np.zeros(out.sizes or (0,), out.dtype) for out in outs[1:]),
    )


def _batch_norm_legit(
    outs: list[OutSpec],
    x: np.ndarray,
    weight: np.ndarray | None,
    bias: np.ndarray | None,
    mean: np.ndarray,
    variance: np.ndarray,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[np.ndarray, ...]:
    if training:
        raise OperatorError("need training=False: nothing here trains")
    return _batch_norm(outs, x, weight, bias, mean, variance, momentum, eps)


def _batch_norm_no_stats(
    outs: list[OutSpec],
    x: np.ndarray,
    weight: np.ndarray | None,
    bias: np.ndarray | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[np.ndarray, ...]:
    kind = math_type(x.dtype)
    channels = x.shape[1]
    rows = np.moveaxis(load(x, kind), 1, 0).reshape(channels, x.size // max(channels, 1))
    y, mean, deviation = _standardise(rows, eps)
    if weight is not None:
        y = y * _channels(weight, channels, kind)
    if bias is not None:
        y = y + _channels(bias, channels, kind)
    shape = (channels, x.shape[0], *x.shape[2:])
    return (
        store(np.ascontiguousarray(np.moveaxis(y.reshape(shape), 0, 1)), outs[0].dtype),
        store(mean[:, 0], outs[1].dtype),
        store(deviation[:, 0], outs[2].dtype),
    )


_DIMS = "T self, i[]? dim, b keepdim"
_any, _all = _truth(np.logical_or), _truth(np.logical_and)
_argmax, _argmin = _arg(np.argmax), _arg(np.argmin)
_three = partial(Portable, outs=3)

ROWS: tuple[Portable, ...] = (
    Portable("aten::sum.IntList_out", f"{_DIMS}, d? dtype", _sum, lower="sum"),
    Portable("aten::mean.out", f"{_DIMS}, d? dtype", _mean, lower="mean"),
    Portable("aten::mean.dtype_out", "T self, d? dtype", lambda out, x, dtype: _mean(out, x, None, False, dtype)),
    Portable("aten::var.out", "T self, i[]? dim, b unbiased, b keepdim", _var),
    Portable(
        "aten::var.correction_out", "T self, i[]? dim, S? correction, b keepdim", _var_correction, lower="variance"
    ),
    Portable("aten::var_mean.correction_out", "T self, i[]? dim, S? correction, b keepdim", _var_mean, outs=2),
    Portable("aten::amax.out", "T self, i[] dim, b keepdim", _extreme(np.maximum)),
    Portable("aten::amin.out", "T self, i[] dim, b keepdim", _extreme(np.minimum)),
    Portable("aten::max.unary_out", "T self", _extreme(np.maximum)),
    Portable("aten::min.unary_out", "T self", _extreme(np.minimum)),
    Portable("aten::max.dim_max", "T self, i dim, b keepdim", _extreme_with_index(np.argmax), outs=2),
    Portable("aten::min.dim_min", "T self, i dim, b keepdim", _extreme_with_index(np.argmin), outs=2),
    Portable("aten::argmax.out", "T self, i? dim, b keepdim", _argmax),
    Portable("aten::argmin.out", "T self, i? dim, b keepdim", _argmin),
    Portable("aten::any.out", "T self, i dim, b keepdim", _any),
    Portable("aten::any.dims_out", _DIMS, _any),
    Portable("aten::any.all_out", "T self", _any),
    Portable("aten::all.out", "T self, i dim, b keepdim", _all),
    Portable("aten::all.dims_out", _DIMS, _all),
    Portable("aten::all.all_out", "T self", _all),
    Portable("aten::prod.out", "T self, d? dtype", lambda out, x, dtype: _product(out, x)),
    Portable("aten::prod.int_out", "T self, i dim, b keepdim, d? dtype", _product),
    Portable("aten::cumsum.out", "T self, i dim, d? dtype", _cumsum),
    Portable("aten::topk.values", "T self, i k, i dim, b largest, b sorted", _topk, outs=2),
    Portable("aten::_softmax.out", "T self, i dim, b half_to_float", _softmax, lower="softmax"),
    Portable("aten::_log_softmax.out", "T self, i dim, b half_to_float", _log_softmax),
    _three(
        "aten::native_layer_norm.out",
        "T input, i[] normalized_shape, T? weight, T? bias, f eps",
        _layer_norm,
        lower="layer_norm",
    ),
    _three(
        "aten::native_group_norm.out",
        "T input, T? weight, T? bias, i N, i C, i HxW, i group, f eps",
        _group_norm,
        lower="group_norm",
    ),
    _three(
        "aten::_native_batch_norm_legit_no_training.out",
        "T input, T? weight, T? bias, T running_mean, T running_var, f momentum, f eps",
        _batch_norm,
        lower="batch_norm",
    ),
    _three(
        "aten::_native_batch_norm_legit.out",
        "T input, T? weight, T? bias, T running_mean, T running_var, b training, f momentum, f eps",
        _batch_norm_legit,
        lower="batch_norm",
    ),
    _three(
        "aten::_native_batch_norm_legit.no_stats_out",
        "T input, T? weight, T? bias, b training, f momentum, f eps",
        _batch_norm_no_stats,
    ),
)
