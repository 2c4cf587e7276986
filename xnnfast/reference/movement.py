"""Moving stored numbers about, and bilinear resizing."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..datatypes import DATATYPES
from ..ops._rules import ALIGN_CORNERS, LEGACY_MODE
from . import _fixed
from ._operand import Operands, Results, Shapes, Values, clamp_bounds, limit, store


def static_transpose(node: Any, operands: Operands, outs: Values, shapes: Shapes) -> Results:
    return [limit(operands[0].raw.transpose(node.attrs["perm"]), outs[0], node.clamp)]


def static_reshape(node: Any, operands: Operands, outs: Values, shapes: Shapes) -> Results:
    raw, new = operands[0].raw, node.attrs["new_shape"]
    # NumPy won't infer a dimension of an empty array.
    shape = tuple(dim or -1 for dim in new) if raw.size else shapes[0]
    return [limit(raw.reshape(shape), outs[0], node.clamp)]


def static_slice(node: Any, operands: Operands, outs: Values, shapes: Shapes) -> Results:
    box = tuple(slice(offset, offset + size if size else None)
                for offset, size in zip(node.attrs["offsets"], node.attrs["sizes"]))
    return [limit(operands[0].raw[box], outs[0], node.clamp)]


def static_constant_pad(node: Any, operands: Operands, outs: Values, shapes: Shapes) -> Results:
    raw, out, border = operands[0].raw, outs[0], node.attrs["padding_value"]
    if DATATYPES[out.datatype].quantization == "tensor":
        border = clamp_bounds((border, border), out)[0]
    widths = list(zip(node.attrs["pre_paddings"], node.attrs["post_paddings"]))
    if not widths:
        return [limit(raw, out, node.clamp)]
    return [limit(np.pad(raw, widths, constant_values=np.asarray(border).astype(raw.dtype)), out, node.clamp)]


def static_expand_dims(node: Any, operands: Operands, outs: Values, shapes: Shapes) -> Results:
    return [limit(np.expand_dims(operands[0].raw, tuple(node.attrs["new_axes"])), outs[0], node.clamp)]


def concatenate(node: Any, operands: Operands, outs: Values, shapes: Shapes) -> Results:
    axis = node.attrs["axis"]
    # The file's field is unsigned.
    axis = axis - 2**32 if axis >= 2**31 else axis
    return [limit(np.concatenate([operand.raw for operand in operands], axis=axis), outs[0], node.clamp)]


def _real_between(low: np.ndarray, high: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return np.asarray(low + (high - low) * weight)


def _places(size: int, new_size: int, flags: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(lower index, upper index, weight of the upper) for each new place, in float32 as XNNPACK computes them."""
    less = 1 if flags & ALIGN_CORNERS and new_size != 1 else 0
    step = np.float32(size - less) / np.float32(new_size - less)
    place = np.arange(new_size, dtype=np.float32) * step
    if not flags & (ALIGN_CORNERS | LEGACY_MODE):
        place = place + (np.float32(0.5) * step - np.float32(0.5))
    place = np.clip(place, np.float32(0), np.float32(size - 1) if not flags & LEGACY_MODE else None)
    low = np.minimum(place.astype(np.int64), size - 1)
    return low, np.minimum(low + 1, size - 1), place.astype(np.float64) - low


def static_resize_bilinear2d(node: Any, operands: Operands, outs: Values, shapes: Shapes) -> Results:
    (x,), (out,) = operands, outs
    exact = DATATYPES[out.datatype].quantization == "tensor"
    pixels = x.raw.astype(np.int64) if exact else x.real
    between = _fixed.between if exact else _real_between
    low, high, weight = _places(x.shape[2], node.attrs["new_width"], node.flags)
    pixels = between(pixels[:, :, low], pixels[:, :, high], weight[:, None])
    low, high, weight = _places(x.shape[1], node.attrs["new_height"], node.flags)
    pixels = between(pixels[:, low], pixels[:, high], weight[:, None, None])
    return [limit(_fixed.back_from_weights(pixels, out), out, node.clamp) if exact else store(pixels, out, node.clamp)]


REFERENCES = {
    "static_transpose": static_transpose,
    "static_reshape": static_reshape,
    "static_reshape_rows": static_reshape,
    "static_slice": static_slice,
    "static_constant_pad": static_constant_pad,
    "static_expand_dims": static_expand_dims,
    "static_resize_bilinear2d": static_resize_bilinear2d,
    **{f"concatenate{count}": concatenate for count in (2, 3, 4, 5)},
}
