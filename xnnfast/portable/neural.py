"""Matrix products, convolutions, pooling and resizing. Planes are the last dimensions: N, C, then the space."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import OperatorError
from ._row import OutSpec, Portable, room
from ._types import FLOAT32, INT64, is_float, load, math_type, number, store

# Matrix products


def _matmul(out: OutSpec, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    kind = math_type(out.dtype)
    return store(np.matmul(load(a, kind), load(b, kind)), out.dtype)


def _product(rank: int) -> Any:
    def compute(out: OutSpec, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        if a.ndim != rank or b.ndim != rank or a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[-2]:
            raise OperatorError(f"need matrices of rank {rank} that fit, found shapes {a.shape} and {b.shape}")
        return _matmul(out, a, b)

    return compute


def _addmm(out: OutSpec, x: np.ndarray, a: np.ndarray, b: np.ndarray, beta: Any, alpha: Any) -> np.ndarray:
    kind = math_type(out.dtype)
    product = np.matmul(load(a, kind), load(b, kind))
    if a.ndim != 2 or b.ndim != 2 or np.broadcast_shapes(product.shape, x.shape) != product.shape:
        raise OperatorError(f"need matrices that fit, found shapes {x.shape}, {a.shape} and {b.shape}")
    if alpha != 1:
        product *= number(alpha, kind)
    addend = load(x, kind)
    product += addend if beta == 1 else addend * number(beta, kind)
    return store(product, out.dtype)


def _linear(out: OutSpec, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    if weight.ndim != 2 or x.ndim == 0 or x.shape[-1] != weight.shape[1]:
        raise OperatorError(f"need a weight of shape (outputs, {x.shape[-1:]}), found {weight.shape}")
    kind = math_type(out.dtype)
    y = np.matmul(load(x, kind), load(weight, kind).T)
    if bias is not None:
        y += load(bias, kind)
    return store(y, out.dtype)


# Convolution


def _numbers(values: Sequence[int], count: int, default: int, least: int) -> list[int]:
    """One number for each dimension of space: one given stands for all, none for ``default``."""
    numbers = list(values) or [default]
    numbers = numbers * count if len(numbers) == 1 else numbers
    if len(numbers) != count or min(numbers) < least:
        raise OperatorError(f"need {count} numbers of {least} or more, found {list(values)}")
    return numbers


def _inner(starts: Sequence[int], stops: Sequence[int], steps: Sequence[int] | None = None) -> tuple[Any, ...]:
    """A NumPy index of a part of the last dimensions."""
    return (Ellipsis, *map(slice, starts, stops, steps or [1] * len(starts)))


def _windows(x: np.ndarray, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> np.ndarray:
    """All windows of the last dimensions, as a view: N, C, the places, then the window."""
    rank = len(kernel)
    reach = [(size - 1) * step + 1 for size, step in zip(kernel, dilation, strict=True)]
    if any(size > have for size, have in zip(reach, x.shape[-rank:], strict=True)):
        raise OperatorError(f"need a padded space no smaller than the window {reach}, found {x.shape[-rank:]}")
    windows = np.lib.stride_tricks.sliding_window_view(x, reach, axis=tuple(range(-rank, 0)))
    steps = tuple(slice(None, None, step) for step in stride)
    inner = tuple(slice(None, None, step) for step in dilation)
    return windows[(slice(None),) * (x.ndim - rank) + steps + inner]


def _correlate(
    x: np.ndarray, weight: np.ndarray, stride: Sequence[int], dilation: Sequence[int], groups: int
) -> np.ndarray:
    """Convolution of a padded input; the weight is outputs, inputs of one group, kernel."""
    windows = _windows(x, weight.shape[2:], stride, dilation)
    batch, rank = x.shape[0], weight.ndim - 2
    places = windows.shape[2 : 2 + rank]
    inputs, outputs = x.shape[1] // groups, weight.shape[0] // groups
    # Group, batch and place, inputs and window: one matrix product for each group.
    columns = windows.reshape(batch, groups, inputs, *windows.shape[2:])
    order = (1, 0, *range(3, 3 + rank), 2, *range(3 + rank, 3 + 2 * rank))
    columns = columns.transpose(order).reshape(groups, batch * math.prod(places), -1 if columns.size else 0)
    filters = weight.reshape(groups, outputs, math.prod(weight.shape[1:]))
    if not columns.size:
        columns = np.zeros((groups, batch * math.prod(places), filters.shape[2]), x.dtype)
    y = np.matmul(columns, filters.transpose(0, 2, 1)).reshape(groups, batch, *places, outputs)
    order = (1, 0, 2 + rank, *range(2, 2 + rank))
    result: np.ndarray = y.transpose(order).reshape(batch, groups * outputs, *places)
    return result


def _convolution(
    out: OutSpec,
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> np.ndarray:
    rank = weight.ndim - 2
    if rank < 1 or x.ndim != weight.ndim:
        raise OperatorError(f"need an input and a weight of one rank of 3 or more, found {x.shape} and {weight.shape}")
    stride = _numbers(stride, rank, 1, 1)
    padding = _numbers(padding, rank, 0, 0)
    dilation = _numbers(dilation, rank, 1, 1)
    channels, own = x.shape[1], weight.shape[0 if transposed else 1]
    if (
        groups < 1
        or channels % groups
        or own != (channels if transposed else channels // groups)
        or weight.shape[0] % groups
    ):
        raise OperatorError(f"need a weight for {channels} channels in {groups} groups, found shape {weight.shape}")
    kind = math_type(x.dtype)
    x, weight = load(x, kind), load(weight, kind)
    kernel = weight.shape[2:]
    if transposed:
        extra = _numbers(output_padding, rank, 0, 0)
        # Spread the input by the stride, then correlate with the mirrored weight, inputs and outputs swapped.
        spread = [(size - 1) * step + 1 if size else 0 for size, step in zip(x.shape[2:], stride, strict=True)]
        widths = [
            (step * (size - 1) - pad, step * (size - 1) - pad + more)
            for size, step, pad, more in zip(kernel, dilation, padding, extra, strict=True)
        ]
        shape = [size + before + after for size, (before, after) in zip(spread, widths, strict=True)]
        places = [size - step * (width - 1) for size, step, width in zip(shape, dilation, kernel, strict=True)]
        if min(places) < 0:
            raise OperatorError(f"need an output of 0 or more, found {places}")
        room(out, (x.shape[0], weight.shape[1] * groups, *places))
        canvas = np.zeros(
            (*x.shape[:2], *(size + sum(max(w, 0) for w in pair) for size, pair in zip(spread, widths))), kind
        )
        starts = [max(before, 0) for before, _ in widths]
        canvas[_inner(starts, [start + size for start, size in zip(starts, spread)], stride)] = x
        # A width below zero cuts.
        starts = [max(-before, 0) for before, _ in widths]
        canvas = canvas[_inner(starts, [start + size for start, size in zip(starts, shape)])]
        swapped = weight.reshape(groups, channels // groups, *weight.shape[1:]).swapaxes(1, 2)
        weight = np.flip(swapped, tuple(range(3, 3 + rank))).reshape(-1, channels // groups, *kernel)
        y = _correlate(canvas, weight, [1] * rank, dilation, groups)
    else:
        if any(padding):
            x = np.pad(x, [(0, 0), (0, 0), *((pad, pad) for pad in padding)])
        y = _correlate(x, weight, stride, dilation, groups)
    if bias is not None:
        y = y + load(bias, kind).reshape(-1, *(1,) * rank)
    return store(np.ascontiguousarray(y), out.dtype)


# Pooling


def _pooled(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> int:
    """Number of windows along one dimension; the last one must start inside the image or its left padding."""
    padded = size + 2 * padding
    span = padded - dilation * (kernel - 1) - 1
    if span < 0 and not ceil_mode:
        raise OperatorError(f"need a window within the padded size {padded}, found {kernel} with dilation {dilation}")
    count = (span + (stride - 1 if ceil_mode else 0)) // stride + 1
    if ceil_mode and (count - 1) * stride >= size + padding:
        count -= 1
    if count < 1:
        raise OperatorError(f"need a window within the padded size {padded}, found {kernel} with dilation {dilation}")
    return count


def _pool(
    x: np.ndarray,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    fill: Any,
) -> tuple[np.ndarray, list[list[int]]]:
    """The windows of both space dimensions, ``fill`` outside the image, and kernel, stride, padding, dilation."""
    if x.ndim not in (3, 4):
        raise OperatorError(f"need an input of rank 3 or 4, found shape {x.shape}")
    kernel = _numbers(kernel, 2, 1, 1)
    stride = _numbers(stride, 2, 1, 1) if stride else kernel
    padding = _numbers(padding, 2, 0, 0)
    dilation = _numbers(dilation, 2, 1, 1)
    if any(2 * pad > size for pad, size in zip(padding, kernel, strict=True)):
        raise OperatorError(f"need a padding of at most half the window {kernel}, found {padding}")
    counts = [_pooled(*both, ceil_mode) for both in zip(x.shape[-2:], kernel, stride, padding, dilation, strict=True)]
    ends = [
        (count - 1) * step + (size - 1) * spread + 1
        for count, step, size, spread in zip(counts, stride, kernel, dilation, strict=True)
    ]
    canvas = np.full(
        (*x.shape[:-2], *(max(end, pad + size) for end, pad, size in zip(ends, padding, x.shape[-2:], strict=True))),
        fill,
        x.dtype,
    )
    canvas[_inner(padding, [pad + size for pad, size in zip(padding, x.shape[-2:])])] = x
    windows = _windows(canvas, kernel, stride, dilation)[..., : counts[0], : counts[1], :, :]
    return windows, [kernel, stride, padding, dilation]


def _max_pool(
    outs: list[OutSpec],
    x: np.ndarray,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> tuple[np.ndarray, ...]:
    wide = load(x, math_type(x.dtype))
    lowest = -np.inf if is_float(x.dtype) else np.iinfo(x.dtype).min
    windows, (kernel, stride, padding, dilation) = _pool(wide, kernel, stride, padding, dilation, ceil_mode, lowest)
    rows, columns = (
        (np.arange(windows.shape[dim])[:, np.newaxis] * step - pad) + np.arange(size) * spread
        for dim, step, pad, size, spread in zip((-4, -3), stride, padding, kernel, dilation, strict=True)
    )
    inside = (
        ((rows >= 0) & (rows < x.shape[-2]))[:, np.newaxis, :, np.newaxis]
        & ((columns >= 0) & (columns < x.shape[-1]))[np.newaxis, :, np.newaxis, :]
    ).reshape(*windows.shape[-4:-2], -1)
    place = (rows[:, np.newaxis, :, np.newaxis] * x.shape[-1] + columns[np.newaxis, :, np.newaxis, :]).reshape(
        inside.shape
    )
    flat = windows.reshape(*windows.shape[:-2], -1)
    first = np.argmax(inside, axis=-1)
    if is_float(x.dtype) and np.isnan(wide).any():
        # NaN is passed over, but stays where it is the first element of its window.
        start = np.take_along_axis(flat, np.broadcast_to(first, flat.shape[:-1])[..., np.newaxis], axis=-1)
        flat = np.where(np.isnan(flat), -np.inf, flat)
        best = np.where(np.isnan(start)[..., 0], first, np.argmax(flat, axis=-1))
        values = np.where(np.isnan(start), start, np.take_along_axis(flat, best[..., np.newaxis], axis=-1))[..., 0]
    else:
        best = np.argmax(flat, axis=-1)
        values = np.take_along_axis(flat, best[..., np.newaxis], axis=-1)[..., 0]
    # Where every element is the lowest number of all, the padding must not win.
    best = np.where(
        np.take_along_axis(np.broadcast_to(inside, flat.shape), best[..., np.newaxis], axis=-1)[..., 0], best, first
    )
    index = np.take_along_axis(np.broadcast_to(place, flat.shape), best[..., np.newaxis], axis=-1)[..., 0]
    return store(values, outs[0].dtype), store(index, outs[1].dtype)


def _avg_pool(
    out: OutSpec,
    x: np.ndarray,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor: int | None,
) -> np.ndarray:
    kind = math_type(x.dtype)
    windows, (kernel, stride, padding, _) = _pool(load(x, kind), kernel, stride, padding, [], ceil_mode, 0)
    total = np.add.reduce(windows, axis=(-2, -1), dtype=kind)
    if divisor is not None:
        if divisor == 0:
            raise OperatorError("need a divisor other than 0")
        count: Any = divisor
    else:
        lengths = []
        for places, size, step, pad, image in zip(
            windows.shape[-4:-2], kernel, stride, padding, x.shape[-2:], strict=True
        ):
            start = np.arange(places) * step - pad
            if count_include_pad:
                lengths.append(np.minimum(start + size, image + pad) - start)
            else:
                lengths.append(np.minimum(start + size, image) - np.maximum(start, 0))
        count = lengths[0][:, np.newaxis] * lengths[1]
    if not is_float(kind):
        # Whole numbers are divided as C does: toward zero.
        return store(np.trunc(total / count), out.dtype)
    return store(total / np.asarray(count).astype(kind), out.dtype)


def _adaptive_avg_pool(out: OutSpec, x: np.ndarray, size: Sequence[int]) -> np.ndarray:
    if x.ndim not in (3, 4) or len(size) != 2:
        raise OperatorError(f"need an input of rank 3 or 4 and two sizes, found {x.shape} and {list(size)}")
    room(out, (*x.shape[:-2], *size))
    y = load(x, math_type(x.dtype) if is_float(x.dtype) else FLOAT32)
    counts = []
    for dim, places in zip((-2, -1), size, strict=True):
        image = x.shape[dim]
        bounds = [(place * image // places, -(-(place + 1) * image // places)) for place in range(places)]
        parts = [
            np.add.reduce(y[(..., slice(*ends)) + (slice(None),) * (-1 - dim)], axis=dim, keepdims=True)
            for ends in bounds
        ]
        y = np.concatenate(parts, axis=dim) if parts else y[(..., slice(0)) + (slice(None),) * (-1 - dim)]
        counts.append(np.array([end - start for start, end in bounds], y.dtype))
    return store(y / (counts[0][:, np.newaxis] * counts[1]), out.dtype)


# Resizing


def _resized(
    x: np.ndarray, output_size: Sequence[int] | None, scale_factors: Sequence[float] | None
) -> tuple[list[int], list[float]]:
    """The new height and width, and the factors."""
    if x.ndim != 4 or (output_size is None) == (scale_factors is None):
        raise OperatorError(
            f"need rank 4 and either sizes or factors, found shape {x.shape}, {output_size} and {scale_factors}"
        )
    given = output_size if output_size is not None else scale_factors
    if given is None or len(given) != 2 or min(given) <= 0:
        raise OperatorError(f"need two sizes or factors above 0, found {given}")
    if scale_factors is not None:
        sizes = [int(old * factor) for old, factor in zip(x.shape[2:], scale_factors, strict=True)]
        factors = [float(factor) for factor in scale_factors]
    else:
        sizes = [int(size) for size in given]
        factors = [size / old if old else 1.0 for size, old in zip(sizes, x.shape[2:], strict=True)]
    if min(sizes) < 1 or 0 in x.shape[2:]:
        raise OperatorError(f"need an image to resize from and to, found {x.shape[2:]} and {sizes}")
    return sizes, factors


def _line(old: int, new: int, factor: float, align_corners: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each new place the two old ones beside it, and the share of the second, in float32 as in C."""
    if old == new:
        place = np.arange(new)
        return place, place, np.zeros(new, np.float32)
    place = np.arange(new, dtype=np.float32)
    if align_corners:
        source = place * np.float32((old - 1) / (new - 1) if new > 1 else 0)
    else:
        source = np.maximum(np.float32(1 / factor) * (place + np.float32(0.5)) - np.float32(0.5), np.float32(0))
    first = np.minimum(np.floor(source).astype(INT64), old - 1)
    share = np.clip(source - first.astype(np.float32), 0, 1).astype(np.float32)
    return first, np.minimum(first + 1, old - 1), share


def _bilinear(
    out: OutSpec,
    x: np.ndarray,
    output_size: Sequence[int] | None,
    align_corners: bool,
    scale_factors: Sequence[float] | None,
) -> np.ndarray:
    sizes, factors = _resized(x, output_size, scale_factors)
    room(out, (*x.shape[:2], *sizes))
    kind = math_type(x.dtype) if is_float(x.dtype) else FLOAT32
    y = load(x, kind)
    # Columns first, as the sums are then those of the four neighbours in C's order.
    for dim in (3, 2):
        first, second, share = _line(x.shape[dim], sizes[dim - 2], factors[dim - 2], align_corners)
        share = share.astype(kind).reshape(-1, *(1,) * (3 - dim))
        y = np.take(y, first, axis=dim) * (kind.type(1) - share) + np.take(y, second, axis=dim) * share
    return store(y, out.dtype)


def _nearest(
    out: OutSpec, x: np.ndarray, output_size: Sequence[int] | None, scale_factors: Sequence[float] | None
) -> np.ndarray:
    sizes, factors = _resized(x, output_size, scale_factors)
    room(out, (*x.shape[:2], *sizes))
    rows, columns = (
        np.minimum(np.floor(np.arange(new, dtype=np.float32) * np.float32(1 / factor)).astype(INT64), old - 1)
        for old, new, factor in zip(x.shape[2:], sizes, factors, strict=True)
    )
    return store(np.take(np.take(x, rows, axis=2), columns, axis=3), out.dtype)


def _grid_place(grid: np.ndarray, size: int, padding: int, align_corners: bool) -> np.ndarray:
    """Coordinates in -1..1 as places in 0..size-1; ``padding`` is 0 zeros, 1 border, 2 reflection."""
    kind = grid.dtype.type
    place = (
        (grid + kind(1)) / kind(2) * kind(size - 1)
        if align_corners
        else ((grid + kind(1)) * kind(size) - kind(1)) / kind(2)
    )
    if padding == 2:
        low, span = (kind(0), kind(size - 1)) if align_corners else (kind(-0.5), kind(size))
        if span == 0:
            place = np.zeros_like(place)
        else:
            distance = np.abs(place - low)
            rest = np.fmod(distance, span)
            place = np.where(np.floor(distance / span) % 2 == 0, rest + low, span - rest + low)
    if padding:
        place = np.clip(place, kind(0), kind(size - 1))
    result: np.ndarray = place
    return result


def _grid_sample(
    out: OutSpec, x: np.ndarray, grid: np.ndarray, mode: int, padding: int, align_corners: bool
) -> np.ndarray:
    if x.ndim != 4 or grid.ndim != 4 or grid.shape[3] != 2 or len(grid) != len(x) or 0 in x.shape[2:]:
        raise OperatorError(f"need an image and a grid of places for each, found shapes {x.shape} and {grid.shape}")
    if mode not in (0, 1) or padding not in (0, 1, 2):
        raise OperatorError(f"need mode 0 (bilinear) or 1 (nearest) and padding 0, 1 or 2, found {mode} and {padding}")
    kind = math_type(x.dtype)
    image, grid = load(x, kind), load(grid, kind)
    height, width = x.shape[2:]
    column = _grid_place(grid[..., 0], width, padding, align_corners)
    row = _grid_place(grid[..., 1], height, padding, align_corners)
    batch = np.arange(len(x)).reshape(-1, 1, 1)

    def at(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """The pixels at whole places, zero outside: N, C, height, width."""
        # NaN compares false and so lies outside.
        inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
        picked = image[batch, :, np.where(inside, rows, 0).astype(INT64), np.where(inside, columns, 0).astype(INT64)]
        return np.where(inside[..., np.newaxis], picked, kind.type(0))

    if mode == 1:
        y = at(np.rint(row), np.rint(column))
    else:
        top, left = np.floor(row), np.floor(column)
        down, right = (row - top)[..., np.newaxis], (column - left)[..., np.newaxis]
        one = kind.type(1)
        y = at(top, left) * ((one - down) * (one - right))
        y += at(top, left + 1) * ((one - down) * right)
        y += at(top + 1, left) * (down * (one - right))
        y += at(top + 1, left + 1) * (down * right)
    return store(np.ascontiguousarray(np.moveaxis(y, 3, 1)), out.dtype)


# Distances


def _distance(out: OutSpec, a: np.ndarray, b: np.ndarray, p: float) -> np.ndarray:
    kind = math_type(out.dtype)
    apart = np.abs(load(a, kind) - load(b, kind))
    if p == 0:
        y: Any = np.count_nonzero(apart, axis=-1)
    elif p == np.inf:
        y = np.maximum.reduce(apart, axis=-1, initial=0)
    elif p == 1:
        y = np.add.reduce(apart, axis=-1)
    else:
        y = np.power(
            np.add.reduce(apart * apart if p == 2 else np.power(apart, kind.type(p)), axis=-1), kind.type(1 / p)
        )
    return store(y, out.dtype)


def _cdist(out: OutSpec, a: np.ndarray, b: np.ndarray, p: float, compute_mode: int | None) -> np.ndarray:
    if a.ndim < 2 or b.ndim < 2 or a.shape[-1] != b.shape[-1]:
        raise OperatorError(f"need points of one length, found shapes {a.shape} and {b.shape}")
    return _distance(out, a[..., :, np.newaxis, :], b[..., np.newaxis, :, :], p)


def _pdist(out: OutSpec, x: np.ndarray, p: float) -> np.ndarray:
    if x.ndim != 2:
        raise OperatorError(f"need rank 2, found shape {x.shape}")
    first, second = np.triu_indices(len(x), 1)
    return _distance(out, x[first], x[second], p)


_POOL = "T self, i[] kernel_size, i[] stride, i[] padding"

ROWS: tuple[Portable, ...] = (
    Portable("aten::mm.out", "T self, T mat2", _product(2), lower="matmul"),
    Portable("aten::bmm.out", "T self, T mat2", _product(3), lower="matmul"),
    Portable("aten::addmm.out", "T self, T mat1, T mat2, S beta, S alpha", _addmm, lower="fully_connected"),
    Portable("aten::linear.out", "T input, T weight, T? bias", _linear, lower="fully_connected"),
    Portable(
        "aten::convolution.out",
        "T input, T weight, T? bias, i[] stride, i[] padding, i[] dilation, b transposed, i[] output_padding, i groups",
        _convolution,
    ),
    Portable("aten::max_pool2d_with_indices.out", f"{_POOL}, i[] dilation, b ceil_mode", _max_pool, outs=2),
    Portable("aten::avg_pool2d.out", f"{_POOL}, b ceil_mode, b count_include_pad, i? divisor_override", _avg_pool),
    Portable("aten::_adaptive_avg_pool2d.out", "T self, i[] output_size", _adaptive_avg_pool),
    Portable(
        "aten::upsample_bilinear2d.vec_out", "T input, i[]? output_size, b align_corners, f[]? scale_factors", _bilinear
    ),
    Portable("aten::upsample_nearest2d.vec_out", "T input, i[]? output_size, f[]? scale_factors", _nearest),
    Portable(
        "aten::grid_sampler_2d.out",
        "T input, T grid, i interpolation_mode, i padding_mode, b align_corners",
        _grid_sample,
    ),
    Portable("aten::_cdist_forward.out", "T x1, T x2, f p, i? compute_mode", _cdist),
    Portable("aten::_pdist_forward.out", "T self, f p", _pdist),
)
