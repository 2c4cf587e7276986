"""Operators that make, view, join, cut and pick tensors without arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..errors import OperatorError
from ._row import OutSpec, Portable, room
from ._types import BOOL, axes, axis, exact_number, indices, load, number, store

# Copies and views: what comes back may share memory with the argument.


def _copy(out: OutSpec, x: np.ndarray, *ignored: Any) -> np.ndarray:
    """clone, alias and the conversions: layout is the caller's matter, only the type may change."""
    return store(x, out.dtype)


def _copy_from(out: Any, x: np.ndarray, source: np.ndarray, non_blocking: bool) -> np.ndarray:
    dtype = out[0].dtype if isinstance(out, list) else out.dtype
    result: np.ndarray = store(np.broadcast_to(source, x.shape), dtype).copy()
    return result


def view_shape(shape: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """The shape that ``sizes``, with at most one -1, gives a tensor of ``shape``."""
    count, known = math.prod(shape), math.prod(size for size in sizes if size != -1)
    free = [place for place, size in enumerate(sizes) if size == -1]
    if len(free) > 1 or any(size < -1 for size in sizes):
        raise OperatorError(f"need sizes of 0 or more and at most one -1, found {list(sizes)}")
    if free and (known == 0 or count % known):
        raise OperatorError(f"need sizes that divide the {count} elements of shape {tuple(shape)}, found {list(sizes)}")
    wanted = tuple(count // known if size == -1 else size for size in sizes)
    if math.prod(wanted) != count:
        raise OperatorError(f"need sizes with the {count} elements of shape {tuple(shape)}, found {list(sizes)}")
    return wanted


def _view(out: OutSpec, x: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    return x.reshape(view_shape(x.shape, sizes))


def expand_shape(shape: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """The shape that expanding a tensor of ``shape`` to ``sizes`` gives; -1 keeps a dimension."""
    extra = len(sizes) - len(shape)
    if extra < 0:
        raise OperatorError(f"need at least {len(shape)} sizes for shape {tuple(shape)}, found {list(sizes)}")
    wanted = []
    for place, size in enumerate(sizes):
        own = None if place < extra else shape[place - extra]
        if size == -1 and own is not None:
            size = own
        if size < 0 or (own is not None and own not in (1, size)):
            raise OperatorError(f"can't expand shape {tuple(shape)} to {list(sizes)}")
        wanted.append(size)
    return tuple(wanted)


def _expand(out: OutSpec, x: np.ndarray, sizes: Sequence[int], implicit: bool) -> np.ndarray:
    return np.broadcast_to(x, room(out, expand_shape(x.shape, sizes)))


def _unsqueeze(out: OutSpec, x: np.ndarray, dim: int) -> np.ndarray:
    return np.expand_dims(x, axis(dim, x.ndim + 1))


def _squeeze(out: OutSpec, x: np.ndarray, dims: Any) -> np.ndarray:
    named = axes([dims] if isinstance(dims, int) else dims, x.ndim)
    return x.reshape([size for place, size in enumerate(x.shape) if size != 1 or place not in named])


def _permute(out: OutSpec, x: np.ndarray, dims: Sequence[int]) -> np.ndarray:
    if len(dims) != x.ndim:
        raise OperatorError(f"need {x.ndim} dimensions, found {list(dims)}")
    result: np.ndarray = x.transpose(axes(dims, x.ndim))
    return result


def _transpose(out: OutSpec, x: np.ndarray, first: int, second: int) -> np.ndarray:
    first, second = axis(first, x.ndim), axis(second, x.ndim)
    return x.swapaxes(first, second) if x.ndim else x


def _t(out: OutSpec, x: np.ndarray) -> np.ndarray:
    if x.ndim > 2:
        raise OperatorError(f"need rank 2 or less, found shape {x.shape}")
    result: np.ndarray = x.T
    return result


def _along(x: np.ndarray, dim: int, part: Any) -> tuple[Any, ...]:
    """A NumPy index that takes ``part`` of one dimension and all of the others."""
    if x.ndim == 0:
        raise OperatorError("need rank 1 or more, found rank 0")
    return (slice(None),) * axis(dim, x.ndim) + (part,)


def _position(x: np.ndarray, dim: int, index: int) -> int:
    size = x.shape[axis(dim, x.ndim)] if x.ndim else 1
    if not -size <= index < size:
        raise OperatorError(f"need an index in {-size}..{size - 1} of dimension {dim}, found {index}")
    return index


def _select(out: OutSpec, x: np.ndarray, dim: int, index: int) -> np.ndarray:
    result: np.ndarray = x[_along(x, dim, _position(x, dim, index))]
    return result


def _stretch(start: int | None, end: int | None, step: int) -> slice:
    if step < 1:
        raise OperatorError(f"need a step of 1 or more, found {step}")
    return slice(start, end, step)


def _slice(out: OutSpec, x: np.ndarray, dim: int, start: int | None, end: int | None, step: int) -> np.ndarray:
    # Python's slices count from the end and stop at the borders by the same rule.
    result: np.ndarray = x[_along(x, dim, _stretch(start, end, step))]
    return result


def _narrow(out: OutSpec, x: np.ndarray, dim: int, start: int, length: int) -> np.ndarray:
    size = x.shape[axis(dim, x.ndim)] if x.ndim else 0
    start = start + size if start < 0 else start
    if not 0 <= start <= start + length <= size:
        raise OperatorError(f"need a stretch inside 0..{size}, found {start} and length {length}")
    result: np.ndarray = x[_along(x, dim, slice(start, start + length))]
    return result


def _diagonal(out: OutSpec, x: np.ndarray, offset: int, first: int, second: int) -> np.ndarray:
    return np.diagonal(x, offset, axis(first, x.ndim), axis(second, x.ndim))


def _unfold(out: OutSpec, x: np.ndarray, dim: int, size: int, step: int) -> np.ndarray:
    dim = axis(dim, x.ndim)
    if size < 0 or step < 1 or size > (x.shape[dim] if x.ndim else 1):
        raise OperatorError(f"need a size inside shape {x.shape} and a step of 1 or more, found {size} and {step}")
    if x.ndim == 0:
        return np.broadcast_to(x, (size,))
    if size == 0:
        return np.empty((*x.shape[:dim], x.shape[dim] // step + 1, *x.shape[dim + 1 :], 0), x.dtype)
    windows = np.lib.stride_tricks.sliding_window_view(x, size, axis=dim)
    return windows[(slice(None),) * dim + (slice(None, None, step),)]


def _strided(
    out: OutSpec, x: np.ndarray, sizes: Sequence[int], strides: Sequence[int], offset: int | None
) -> np.ndarray:
    if len(sizes) != len(strides):
        raise OperatorError(f"need as many strides as sizes, found {list(sizes)} and {list(strides)}")
    shape = room(out, sizes)
    place = np.full(shape, offset or 0, np.int64)
    for dim, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        place += (np.arange(size) * stride).reshape((size,) + (1,) * (len(shape) - 1 - dim))
    result: np.ndarray = np.ravel(x)[indices(place, x.size)]
    return result


# Pieces


def _pieces(x: np.ndarray, dim: int, sizes: Sequence[int], outs: list[OutSpec]) -> tuple[np.ndarray, ...]:
    if len(sizes) != len(outs):
        raise OperatorError(f"need {len(sizes)} outs, the call has {len(outs)}")
    ends = np.cumsum([0, *sizes])
    return tuple(
        store(x[_along(x, dim, slice(start, end))], out.dtype)
        for start, end, out in zip(ends[:-1], ends[1:], outs, strict=True)
    )


def _split(outs: list[OutSpec], x: np.ndarray, size: int, dim: int) -> tuple[np.ndarray, ...]:
    total = x.shape[axis(dim, x.ndim)] if x.ndim else 0
    if size < 1:
        if size < 0 or total:
            raise OperatorError(f"need pieces of 1 or more, found {size}")
        return _pieces(x, dim, [0], outs)
    return _pieces(x, dim, [min(size, total - start) for start in range(0, total, size)] or [0], outs)


def _split_sizes(outs: list[OutSpec], x: np.ndarray, sizes: Sequence[int], dim: int) -> tuple[np.ndarray, ...]:
    total = x.shape[axis(dim, x.ndim)] if x.ndim else 0
    if sum(sizes) != total or any(size < 0 for size in sizes):
        raise OperatorError(f"need sizes that add up to {total}, found {list(sizes)}")
    return _pieces(x, dim, sizes, outs)


def _unbind(outs: list[OutSpec], x: np.ndarray, dim: int) -> tuple[np.ndarray, ...]:
    dim = axis(dim, x.ndim)
    if x.ndim == 0 or x.shape[dim] != len(outs):
        raise OperatorError(f"need size {len(outs)} in dimension {dim}, found shape {x.shape}")
    return tuple(store(x[_along(x, dim, place)], out.dtype) for place, out in enumerate(outs))


# Joining and repeating


def _cat(out: OutSpec, tensors: Sequence[np.ndarray], dim: int) -> np.ndarray:
    # A tensor of shape (0,) joins with any other: old programs start their lists with one.
    parts = [x for x in tensors if x.shape != (0,)] or list(tensors[:1])
    if not parts:
        raise OperatorError("need at least one tensor")
    return np.concatenate([load(x, out.dtype) for x in parts], axis=axis(dim, parts[0].ndim))


def _stack(out: OutSpec, tensors: Sequence[np.ndarray], dim: int) -> np.ndarray:
    if not tensors:
        raise OperatorError("need at least one tensor")
    return np.stack([load(x, out.dtype) for x in tensors], axis=axis(dim, tensors[0].ndim + 1))


def _repeat(out: OutSpec, x: np.ndarray, repeats: Sequence[int]) -> np.ndarray:
    if len(repeats) < x.ndim:
        raise OperatorError(f"need at least {x.ndim} repeats, found {list(repeats)}")
    shape = (1,) * (len(repeats) - x.ndim) + x.shape
    room(out, [size * times for size, times in zip(shape, repeats, strict=True)])
    return np.tile(x, repeats)


def _repeat_interleave(out: OutSpec, repeats: np.ndarray, output_size: int | None) -> np.ndarray:
    if repeats.ndim != 1 or repeats.dtype.kind != "i" or (repeats.size and repeats.min() < 0):
        raise OperatorError("need repeats of rank 1, whole and 0 or more")
    total = sum(repeats.tolist())
    if output_size is not None and output_size != total:
        raise OperatorError(f"need output_size to be {total}, the sum of the repeats, found {output_size}")
    room(out, (total,))
    return store(np.repeat(np.arange(len(repeats)), repeats), out.dtype)


def _roll(out: OutSpec, x: np.ndarray, shifts: Sequence[int], dims: Sequence[int]) -> np.ndarray:
    if not dims and len(shifts) == 1:
        return np.roll(x, shifts[0])
    if len(shifts) != len(dims):
        raise OperatorError(f"need as many shifts as dimensions, found {list(shifts)} and {list(dims)}")
    return np.roll(x, shifts, [axis(dim, x.ndim) for dim in dims])


def _flip(out: OutSpec, x: np.ndarray, dims: Sequence[int]) -> np.ndarray:
    named = axes(dims, x.ndim)
    return np.flip(x, named) if x.ndim else x


def _triangle(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    def compute(out: OutSpec, x: np.ndarray, diagonal: int) -> np.ndarray:
        if x.ndim < 2:
            raise OperatorError(f"need rank 2 or more, found shape {x.shape}")
        return function(x, diagonal)

    return compute


# Padding


def _pad_widths(x: np.ndarray, pad: Sequence[int]) -> list[tuple[int, int]]:
    """The widths of each dimension; ``pad`` starts with the last one."""
    if len(pad) % 2 or len(pad) > 2 * x.ndim:
        raise OperatorError(f"need at most {x.ndim} pairs of widths, found {list(pad)}")
    pairs = [(pad[place], pad[place + 1]) for place in range(0, len(pad), 2)][::-1]
    widths = [(0, 0)] * (x.ndim - len(pairs)) + pairs
    for size, (before, after) in zip(x.shape, widths, strict=True):
        if size + before + after < 0 or size + min(before, 0) + min(after, 0) < 0:
            raise OperatorError(f"can't pad shape {x.shape} by {list(pad)}")
    return widths


def _constant_pad(out: OutSpec, x: np.ndarray, pad: Sequence[int], value: Any) -> np.ndarray:
    widths = _pad_widths(x, pad)
    shape = room(out, [size + before + after for size, (before, after) in zip(x.shape, widths, strict=True)])
    y = np.full(shape, exact_number(value, x.dtype), x.dtype)
    # A negative width cuts.
    inner = tuple(
        slice(max(before, 0), size - max(after, 0)) for size, (before, after) in zip(shape, widths, strict=True)
    )
    kept = tuple(
        slice(max(-before, 0), size - max(-after, 0)) for size, (before, after) in zip(x.shape, widths, strict=True)
    )
    y[inner] = x[kept]
    return store(y, out.dtype)


def _pad_by(rank: int, place: Callable[[np.ndarray, int], np.ndarray]) -> Callable[..., np.ndarray]:
    def compute(out: OutSpec, x: np.ndarray, pad: Sequence[int]) -> np.ndarray:
        if len(pad) != 2 * rank or x.ndim not in (rank + 1, rank + 2):
            raise OperatorError(
                f"need {rank} pairs of widths and rank {rank + 1} or {rank + 2}, found {list(pad)} and {x.shape}"
            )
        widths = _pad_widths(x, pad)
        room(out, [size + before + after for size, (before, after) in zip(x.shape, widths, strict=True)])
        for dim, (before, after) in enumerate(widths):
            if before or after:
                size = x.shape[dim]
                x = np.take(x, indices(place(np.arange(-before, size + after), size), size), axis=dim)
        return x if any(map(any, widths)) else x.copy()

    return compute


def _reflect(place: np.ndarray, size: int) -> np.ndarray:
    place = np.abs(place)
    return np.where(place >= size, 2 * (size - 1) - place, place)


def _replicate(place: np.ndarray, size: int) -> np.ndarray:
    result: np.ndarray = np.clip(place, 0, size - 1)
    return result


# Pixels


def _pixel_shuffle(out: OutSpec, x: np.ndarray, factor: int) -> np.ndarray:
    if x.ndim < 3 or factor < 1 or x.shape[-3] % (factor * factor):
        raise OperatorError(f"need channels that {factor} * {factor} divides, found shape {x.shape}")
    *lead, channels, height, width = x.shape
    y = x.reshape(-1 if x.size else 0, channels // factor**2, factor, factor, height, width)
    result: np.ndarray = y.transpose(0, 1, 4, 2, 5, 3).reshape(
        *lead, channels // factor**2, height * factor, width * factor
    )
    return result


def _pixel_unshuffle(out: OutSpec, x: np.ndarray, factor: int) -> np.ndarray:
    if x.ndim < 3 or factor < 1 or x.shape[-1] % factor or x.shape[-2] % factor:
        raise OperatorError(f"need a height and a width that {factor} divides, found shape {x.shape}")
    *lead, channels, height, width = x.shape
    y = x.reshape(-1 if x.size else 0, channels, height // factor, factor, width // factor, factor)
    result: np.ndarray = y.transpose(0, 1, 3, 5, 2, 4).reshape(
        *lead, channels * factor**2, height // factor, width // factor
    )
    return result


# Picking by index


def _index_select(out: OutSpec, x: np.ndarray, dim: int, index: np.ndarray) -> np.ndarray:
    if index.ndim > 1:
        raise OperatorError(f"need an index of rank 1 or less, found shape {index.shape}")
    line = np.atleast_1d(x)
    dim = axis(dim, x.ndim)
    y = np.take(line, indices(np.atleast_1d(index), line.shape[dim]), axis=dim)
    return y if x.ndim else y.reshape(())


def _embedding(
    out: OutSpec, weight: np.ndarray, index: np.ndarray, padding_idx: int, scale_grad_by_freq: bool, sparse: bool
) -> np.ndarray:
    if weight.ndim != 2:
        raise OperatorError(f"need a weight of rank 2, found shape {weight.shape}")
    return np.take(weight, indices(index, len(weight)), axis=0)


def _smaller(index: np.ndarray, x: np.ndarray, dim: int) -> None:
    for place, (own, size) in enumerate(zip(index.shape, x.shape, strict=True)):
        if place != dim and own > size:
            raise OperatorError(
                f"need an index no larger than shape {x.shape} beside dimension {dim}, found {index.shape}"
            )


def _gather(out: OutSpec, x: np.ndarray, dim: int, index: np.ndarray, sparse_grad: bool) -> np.ndarray:
    dim = axis(dim, x.ndim)
    line, lines = np.atleast_1d(x), np.atleast_1d(index)
    if line.ndim != lines.ndim:
        raise OperatorError(f"need an index of rank {x.ndim}, found shape {index.shape}")
    _smaller(lines, line, dim)
    kept = tuple(slice(None) if place == dim else slice(size) for place, size in enumerate(lines.shape))
    return np.take_along_axis(line[kept], indices(lines, line.shape[dim]), axis=dim).reshape(index.shape)


def _targets(x: np.ndarray, dim: int, index: np.ndarray) -> tuple[np.ndarray, ...]:
    """A NumPy index of the places of ``x`` that ``index`` names along ``dim``."""
    if index.ndim != x.ndim:
        raise OperatorError(f"need an index of rank {x.ndim}, found shape {index.shape}")
    _smaller(index, x, dim)
    grid = list(np.ogrid[tuple(slice(size) for size in index.shape)])
    grid[dim] = indices(index, x.shape[dim])
    return tuple(grid)


def _scatter(out: OutSpec, x: np.ndarray, dim: int, index: np.ndarray, source: Any) -> np.ndarray:
    dim = axis(dim, x.ndim)
    y, lines = np.atleast_1d(x.copy()), np.atleast_1d(index)
    if isinstance(source, np.ndarray):
        source = np.atleast_1d(source)
        _smaller(lines, source, -1)
        source = source[tuple(slice(size) for size in lines.shape)]
    else:
        source = exact_number(source, x.dtype)
    if lines.size:
        y[_targets(y, dim, lines)] = source
    return store(y.reshape(x.shape), out.dtype)


def _scatter_add(out: OutSpec, x: np.ndarray, dim: int, index: np.ndarray, source: np.ndarray) -> np.ndarray:
    dim = axis(dim, x.ndim)
    y, lines, source = np.atleast_1d(x.copy()), np.atleast_1d(index), np.atleast_1d(source)
    _smaller(lines, source, -1)
    if lines.size:
        np.add.at(y, _targets(y, dim, lines), source[tuple(slice(size) for size in lines.shape)])
    return store(y.reshape(x.shape), out.dtype)


def _places(x: np.ndarray, index: Sequence[np.ndarray | None]) -> tuple[Any, ...]:
    """A list of index tensors as a NumPy index; the rules of both for where the result's dimensions go agree."""
    places: list[Any] = []
    rank = 0
    for entry in index:
        if entry is None:
            places.append(slice(None))
            rank += 1
        elif entry.dtype.kind in "bu" and entry.dtype.itemsize == 1:
            places.append(load(entry, BOOL))
            rank += entry.ndim
        else:
            if rank >= x.ndim:
                break
            places.append(indices(entry, x.shape[rank], low=-x.shape[rank]))
            rank += 1
    if rank > x.ndim or len(places) < len(index):
        raise OperatorError(f"need at most {x.ndim} indices, found {len(index)}")
    return tuple(places)


def _index(out: OutSpec, x: np.ndarray, index: Sequence[np.ndarray | None]) -> np.ndarray:
    picked = np.asarray(x[_places(x, index)])
    return picked.copy() if all(entry is None for entry in index) else picked


def _index_put(
    out: Any, x: np.ndarray, index: Sequence[np.ndarray | None], values: np.ndarray, accumulate: bool
) -> np.ndarray:
    y: np.ndarray = x.copy()
    places = _places(x, index)
    if accumulate:
        np.add.at(y, places, load(values, x.dtype))
    else:
        y[places] = load(values, x.dtype)
    return y


def _select_scatter(out: OutSpec, x: np.ndarray, source: np.ndarray, dim: int, index: int) -> np.ndarray:
    y = x.copy()
    part = _along(x, dim, _position(x, dim, index))
    if y[part].shape != source.shape:
        raise OperatorError(f"need a source of shape {y[part].shape}, found {source.shape}")
    y[part] = load(source, x.dtype)
    return store(y, out.dtype)


def _slice_scatter(
    out: OutSpec, x: np.ndarray, source: np.ndarray, dim: int, start: int | None, end: int | None, step: int
) -> np.ndarray:
    y = x.copy()
    part = _along(x, dim, _stretch(start, end, step))
    if y[part].shape != source.shape:
        raise OperatorError(f"need a source of shape {y[part].shape}, found {source.shape}")
    y[part] = load(source, x.dtype)
    return store(y, out.dtype)


def _masked_select(out: OutSpec, x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    x, mask = np.broadcast_arrays(x, load(mask, BOOL))
    result: np.ndarray = x[mask]
    return result


def _masked_scatter(out: OutSpec, x: np.ndarray, mask: np.ndarray, source: np.ndarray) -> np.ndarray:
    x, mask = np.broadcast_arrays(x, load(mask, BOOL))
    needed = int(np.count_nonzero(mask))
    if source.size < needed:
        raise OperatorError(f"need {needed} elements for the mask, found {source.size}")
    y = x.copy()
    y[mask] = np.ravel(source)[:needed]
    return store(y, out.dtype)


def _nonzero(out: OutSpec, x: np.ndarray) -> np.ndarray:
    return store(np.argwhere(x), out.dtype)


# Making


def _full(out: OutSpec, sizes: Sequence[int], value: Any) -> np.ndarray:
    return np.full(room(out, sizes), exact_number(value, out.dtype), out.dtype)


def _full_like(out: OutSpec, x: np.ndarray, value: Any, memory_format: Any = None) -> np.ndarray:
    return np.full(room(out, x.shape), exact_number(value, out.dtype), out.dtype)


def _zeros(out: OutSpec, sizes: Sequence[int], *ignored: Any) -> np.ndarray:
    """zeros, and empty: what is promised to be anything may as well be always the same."""
    return np.zeros(room(out, sizes), out.dtype)


def _ones(out: OutSpec, sizes: Sequence[int]) -> np.ndarray:
    return np.ones(room(out, sizes), out.dtype)


def _fill_from(out: OutSpec, x: np.ndarray, value: np.ndarray) -> np.ndarray:
    if value.size != 1:
        raise OperatorError(f"need one element to fill with, found shape {value.shape}")
    return np.full(room(out, x.shape), number(value.reshape(())[()], x.dtype), out.dtype)


def _scalar_tensor(out: OutSpec, value: Any) -> np.ndarray:
    return np.asarray(number(value, out.dtype))


def _arange(out: OutSpec, start: Any, end: Any, step: Any) -> np.ndarray:
    if step == 0:
        raise OperatorError("need a step other than 0")
    start, end, step = float(start), float(end), float(step)
    (count,) = room(out, (math.ceil((end - start) / step),))
    return store(start + np.arange(count) * step, out.dtype)


_view_row = partial(Portable, view=True)
_from_shape = partial(Portable, shape_only=True)

ROWS: tuple[Portable, ...] = (
    *(
        _view_row(name, args, _copy, lower="copy")
        for name, args in (
            ("aten::clone.out", "T self, m? memory_format"),
            ("aten::alias_copy.out", "T self"),
            ("aten::detach_copy.out", "T self"),
            ("aten::lift_fresh_copy.out", "T self"),
            ("dim_order_ops::_clone_dim_order.out", "T self, b non_blocking, i[]? dim_order"),
            ("aten::_to_copy.out", "T self, b non_blocking, m? memory_format"),
            ("dim_order_ops::_to_dim_order_copy.out", "T self, b non_blocking, i[]? dim_order"),
        )
    ),
    Portable("aten::copy.out", "T self, T src, b non_blocking", _copy_from),
    Portable("aten::copy_", "T self, T src, b non_blocking", _copy_from, outs=0, mutates=0, pure=False),
    _view_row("aten::view_copy.out", "T self, i[] size", _view, lower="view"),
    _view_row("executorch_prim::et_view.default", "T self, i[] size", _view, outs=0, lower="view"),
    _view_row("aten::expand_copy.out", "T self, i[] size, b implicit", _expand, lower="expand"),
    _view_row("aten::unsqueeze_copy.out", "T self, i dim", _unsqueeze, lower="unsqueeze"),
    _view_row("aten::squeeze_copy.dim_out", "T self, i dim", _squeeze, lower="squeeze"),
    _view_row("aten::squeeze_copy.dims_out", "T self, i[] dim", _squeeze, lower="squeeze"),
    _view_row("aten::permute_copy.out", "T self, i[] dims", _permute, lower="permute"),
    _view_row("aten::transpose_copy.int_out", "T self, i dim0, i dim1", _transpose, lower="transpose"),
    _view_row("aten::t_copy.out", "T self", _t, lower="transpose"),
    _view_row("aten::select_copy.int_out", "T self, i dim, i index", _select, lower="select"),
    _view_row("aten::slice_copy.Tensor_out", "T self, i dim, i? start, i? end, i step", _slice, lower="slice"),
    _view_row("aten::narrow_copy.out", "T self, i dim, i start, i length", _narrow, lower="slice"),
    _view_row("aten::diagonal_copy.out", "T self, i offset, i dim1, i dim2", _diagonal),
    _view_row("aten::unfold_copy.out", "T self, i dimension, i size, i step", _unfold),
    Portable("aten::as_strided_copy.out", "T self, i[] size, i[] stride, i? storage_offset", _strided),
    _view_row("aten::split_copy.Tensor_out", "T self, i split_size, i dim", _split, out_list=True, lower="split"),
    _view_row(
        "aten::split_with_sizes_copy.out", "T self, i[] split_sizes, i dim", _split_sizes, out_list=True, lower="split"
    ),
    _view_row("aten::unbind_copy.int_out", "T self, i dim", _unbind, out_list=True),
    Portable("aten::cat.out", "T[] tensors, i dim", _cat, lower="concatenate"),
    Portable("aten::stack.out", "T[] tensors, i dim", _stack, lower="stack"),
    Portable("aten::repeat.out", "T self, i[] repeats", _repeat),
    Portable("aten::repeat_interleave.Tensor_out", "T repeats, i? output_size", _repeat_interleave),
    Portable("aten::roll.out", "T self, i[] shifts, i[] dims", _roll),
    _view_row("aten::flip.out", "T self, i[] dims", _flip),
    Portable("aten::tril.out", "T self, i diagonal", _triangle(np.tril)),
    Portable("aten::triu.out", "T self, i diagonal", _triangle(np.triu)),
    Portable("aten::constant_pad_nd.out", "T self, i[] pad, S value", _constant_pad, lower="pad"),
    *(
        Portable(f"aten::{word}_pad{rank}d.out", "T self, i[] padding", _pad_by(rank, place))
        for word, place in (("reflection", _reflect), ("replication", _replicate))
        for rank in (1, 2, 3)
    ),
    _view_row("aten::pixel_shuffle.out", "T self, i upscale_factor", _pixel_shuffle),
    _view_row("aten::pixel_unshuffle.out", "T self, i downscale_factor", _pixel_unshuffle),
    Portable("aten::index_select.out", "T self, i dim, T index", _index_select),
    Portable("aten::embedding.out", "T weight, T indices, i padding_idx, b scale_grad_by_freq, b sparse", _embedding),
    Portable("aten::gather.out", "T self, i dim, T index, b sparse_grad", _gather),
    Portable("aten::scatter.src_out", "T self, i dim, T index, T src", _scatter),
    Portable("aten::scatter.value_out", "T self, i dim, T index, S value", _scatter),
    Portable("aten::scatter_add.out", "T self, i dim, T index, T src", _scatter_add),
    Portable("aten::index.Tensor_out", "T self, T?[] indices", _index),
    Portable("aten::index_put.out", "T self, T?[] indices, T values, b accumulate", _index_put),
    Portable(
        "aten::index_put_", "T self, T?[] indices, T values, b accumulate", _index_put, outs=0, mutates=0, pure=False
    ),
    Portable("aten::select_scatter.out", "T self, T src, i dim, i index", _select_scatter),
    Portable("aten::slice_scatter.out", "T self, T src, i dim, i? start, i? end, i step", _slice_scatter),
    Portable("aten::masked_select.out", "T self, T mask", _masked_select),
    Portable("aten::masked_scatter.out", "T self, T mask, T source", _masked_scatter),
    Portable("aten::nonzero.out", "T self", _nonzero),
    _from_shape("aten::full.out", "i[] size, S fill_value", _full),
    _from_shape("aten::full_like.out", "T self, S fill_value, m? memory_format", _full_like),
    _from_shape("aten::zeros.out", "i[] size", _zeros),
    _from_shape("aten::ones.out", "i[] size", _ones),
    _from_shape("aten::empty.out", "i[] size, m? memory_format", _zeros),
    _from_shape("dim_order_ops::_empty_dim_order.out", "i[] size, i[]? dim_order", _zeros),
    _from_shape("aten::fill.Scalar_out", "T self, S value", _full_like),
    Portable("aten::fill.Tensor_out", "T self, T value", _fill_from),
    _from_shape("aten::scalar_tensor.out", "S s", _scalar_tensor),
    _from_shape("aten::arange.out", "S end", lambda out, end: _arange(out, 0, end, 1)),
    _from_shape("aten::arange.start_out", "S start, S end, S step", _arange),
)
