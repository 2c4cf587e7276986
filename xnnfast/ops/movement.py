"""Moving elements: transpose, reshape, slice, pad, resize, concatenate; and the reduction that lowering needs."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from ._quant import SAME_PAIRS, same_pairs
from ._row import Op, Refusal, Shape, Shapes
from ._rules import (
    ALIGN_CORNERS,
    COPYABLE,
    KEEP_DIMS,
    LEGACY_MODE,
    MAX_PADDING,
    MAX_RANK,
    MOVABLE,
    MOVED,
    TRANSIENT_INDIRECTION_BUFFER,
    rank,
    same,
    text,
)


def _length(name: str, vector: Sequence[int], shape: Shape) -> None:
    if len(vector) != len(shape):
        raise Refusal(f"{name} has {len(vector)} entries, the input has rank {len(shape)} ({text(shape)})")


def _ranked(shape: Shape) -> None:
    if not shape:
        raise Refusal("input needs rank 1 or more, found a scalar")


def transpose_shape(node: Any, ins: Shapes) -> list[Shape]:
    x, perm = ins[0], node.attrs["perm"]
    _ranked(x)
    _length("perm", perm, x)
    if sorted(perm) != list(range(len(x))):
        raise Refusal(f"perm is {list(perm)}, need each of 0 to {len(x) - 1} once")
    return [tuple([x[axis] for axis in perm])]


def reshape_shape(node: Any, ins: Shapes) -> list[Shape]:
    x, new = ins[0], node.attrs["new_shape"]
    if len(new) > MAX_RANK:
        raise Refusal(f"new_shape has {len(new)} entries, the limit is {MAX_RANK}")
    count = prod(x)
    inferred = [axis for axis, dim in enumerate(new) if dim == 0]
    if len(inferred) > 1:
        raise Refusal(f"more than one inferred dimension: new_shape is {list(new)}")
    if inferred:
        rest = prod(dim for dim in new if dim)
        if count % rest:
            raise Refusal(f"new_shape is {list(new)}: the input's {count} elements ({text(x)}) are not a multiple of "
                          f"{rest}")
        return [tuple(dim or count // rest for dim in new)]
    if prod(new) != count:
        raise Refusal(f"new_shape {text(new)} has {prod(new)} elements, the input has {count} ({text(x)})")
    return [tuple(new)]


def reshape_rows_shape(node: Any, ins: Shapes) -> list[Shape]:
    # An inferred dimension alone would let a change of any other axis slide into it.
    x, new = ins[0], node.attrs["new_shape"]
    if "open" in node.attrs:
        declared, may_change = node.attrs["declared"], node.attrs["open"]
        if len(x) != len(declared) or any(dim != need and axis not in may_change
                                          for axis, (dim, need) in enumerate(zip(x, declared))):
            which = f"axis {' and '.join(map(str, may_change))} alone" if may_change else "no axis"
            raise Refusal(f"new_shape is {list(new)}, whose 0 takes up a change of {which}: need {text(declared)} on "
                          f"the others, found {text(x)}")
        return reshape_shape(node, ins)
    axis, outside, unit, inside, out_unit = node.attrs["rows"]
    if len(x) <= axis or prod(x[:axis]) != outside or x[axis] % unit or prod(x[axis + 1:]) != inside:
        raise Refusal(f"new_shape is {list(new)} and its 0 follows axis {axis} of the input: need {outside} elements "
                      f"before, a multiple of {unit} on it and {inside} behind, found {text(x)}")
    return [tuple(dim or x[axis] // unit * out_unit for dim in new)]


def slice_shape(node: Any, ins: Shapes) -> list[Shape]:
    x, offsets, sizes = ins[0], node.attrs["offsets"], node.attrs["sizes"]
    _ranked(x)
    _length("offsets", offsets, x)
    _length("sizes", sizes, x)
    out = []
    for axis, (dim, offset, size) in enumerate(zip(x, offsets, sizes)):
        if size == 0:
            if offset:
                raise Refusal(f"sizes[{axis}] is 0 (the whole dimension) and offsets[{axis}] is {offset}, need 0")
            size = dim
        elif offset + size > dim:
            raise Refusal(f"offsets[{axis}] + sizes[{axis}] is {offset} + {size}, the input's dim {axis} is {dim}")
        out.append(size)
    return [tuple(out)]


def slice_normalize(node: Any, ins: Shapes, outs: Sequence[Shape]) -> Any:
    """Replace a size of 0 after an offset by what is left of the dimension."""
    x, offsets, sizes = ins[0], node.attrs["offsets"], node.attrs["sizes"]
    _length("offsets", offsets, x)
    _length("sizes", sizes, x)
    spelled = tuple(dim - offset if size == 0 and 0 < offset < dim else size
                    for dim, offset, size in zip(x, offsets, sizes))
    return node if spelled == tuple(sizes) else node.replace(attrs={**node.attrs, "sizes": spelled})


def pad_shape(node: Any, ins: Shapes) -> list[Shape]:
    x, before, after = ins[0], node.attrs["pre_paddings"], node.attrs["post_paddings"]
    _length("pre_paddings", before, x)
    _length("post_paddings", after, x)
    for name, vector in (("pre_paddings", before), ("post_paddings", after)):
        for axis, count in enumerate(vector):
            if not 0 <= count <= MAX_PADDING:
                raise Refusal(f"{name}[{axis}] is {count}, need 0 to {MAX_PADDING}")
    return [tuple([dim + pre + post for dim, pre, post in zip(x, before, after)])]


def resize_shape(node: Any, ins: Shapes) -> list[Shape]:
    x, height, width = ins[0], node.attrs["new_height"], node.attrs["new_width"]
    rank("input", x, 4)
    if node.flags & LEGACY_MODE and node.flags & ALIGN_CORNERS:
        raise Refusal("flags 0x4 (legacy mode) and 0x8 (align corners) exclude each other")
    for name, size in (("new_height", height), ("new_width", width)):
        if not 0 < size < 1 << 24:
            raise Refusal(f"{name} is {size}, need 1 to {(1 << 24) - 1}")
    for axis in (1, 2):
        if not 0 < x[axis] < 1 << 24:
            raise Refusal(f"input dim {axis} is {x[axis]}, need 1 to {(1 << 24) - 1}")
    return [(x[0], height, width, x[3])]


def signed_axis(axis: int) -> int:
    """An axis as C reads it: a negative one stands in the file's unsigned field as 2**32 more."""
    return axis - (1 << 32) if axis >= 1 << 31 else axis


def concatenate_shape(node: Any, ins: Shapes) -> list[Shape]:
    first = ins[0]
    axis = signed_axis(node.attrs["axis"])
    if not -len(first) <= axis < len(first):
        raise Refusal(f"axis is {axis}, the inputs have rank {len(first)} ({text(first)})")
    axis %= len(first)
    total = first[axis]
    for number, other in enumerate(ins[1:], 2):
        if len(other) != len(first):
            raise Refusal(f"input{number} has rank {len(other)} ({text(other)}), input1 has rank {len(first)} "
                          f"({text(first)})")
        for place, (dim, need) in enumerate(zip(other, first)):
            if place != axis and dim != need:
                raise Refusal(f"input{number} dim {place} is {dim}, input1 dim {place} is {need}")
        total += other[axis]
    return [(*first[:axis], total, *first[axis + 1:])]


def reduce_shape(node: Any, ins: Shapes) -> list[Shape]:
    x = ins[0]
    given = node.attrs["reduction_axes"]
    axes = {axis + len(x) if axis < 0 else axis for axis in given}
    if not axes or len(axes) != len(given) or not axes <= set(range(len(x))):
        raise Refusal(f"reduction_axes are {list(given)}, need different axes of rank {len(x)} ({text(x)})")
    keep = node.flags & KEEP_DIMS
    return [tuple(1 if axis in axes else dim for axis, dim in enumerate(x) if keep or axis not in axes)]


def expand_shape(node: Any, ins: Shapes) -> list[Shape]:
    x, axes = ins[0], node.attrs["new_axes"]
    total = len(x) + len(axes)
    if total > MAX_RANK:
        raise Refusal(f"the output would have rank {total}, the limit is {MAX_RANK}")
    if list(axes) != sorted(set(axes)) or any(not 0 <= axis < total for axis in axes):
        raise Refusal(f"new_axes are {list(axes)}, need different axes of rank {total} in ascending order")
    old = iter(x)
    return [tuple(1 if axis in axes else next(old) for axis in range(total))]


def _concatenate(count: int) -> Op:
    inputs = " ".join(f"@input{number}_id" for number in range(1, count + 1))
    return Op(f"concatenate{count}", f"XNNConcatenate{count}", f"xnn_define_concatenate{count}",
              f"axis {inputs} @output_id flags", shape=concatenate_shape, check=same_pairs,
              datatypes=same(MOVABLE, count + 1), flags=0, ranks=((1, 6),), bounds=(SAME_PAIRS,),
              unused=tuple(f"input{number}_id" for number in range(count + 1, 6)),
              doc=f"{count} inputs one after the other along an axis; a negative one counts from the end", nan=MOVED)


OPS = (
    Op("static_transpose", "XNNStaticTranspose", "xnn_define_static_transpose", "perm[] @input_id @output_id flags",
       shape=transpose_shape, check=same_pairs, datatypes=same(MOVABLE, 2), flags=0, ranks=((1, 6),),
       bounds=(SAME_PAIRS,),
       doc="axes in another order", nan=MOVED),
    Op("static_reshape", "XNNStaticReshape", "xnn_define_static_reshape", "new_shape[] @input_id @output_id flags",
       shape=reshape_shape, check=same_pairs, datatypes=same(COPYABLE, 2), flags=0, bounds=(SAME_PAIRS,),
       doc="same elements, other dimensions; one 0 is inferred", nan=MOVED),
    Op("static_slice", "XNNStaticSlice", "xnn_define_static_slice", "offsets[] sizes[6] @input_id @output_id flags",
       shape=slice_shape, check=same_pairs, normalize=slice_normalize, datatypes=same(MOVABLE, 2), flags=0,
       ranks=((1, 6),), bounds=(SAME_PAIRS,),
       doc="a box out of the input", nan=MOVED),
    Op("static_constant_pad", "XNNStaticConstantPad", "xnn_define_static_constant_pad",
       # XNNPACK copies as many entries as the input has dimensions.
       "pre_paddings[6] post_paddings[6] padding_value @input_id @output_id flags",
       shape=pad_shape, check=same_pairs, datatypes=same(MOVABLE, 2), flags=0,
       bounds=(f"up to {MAX_PADDING} elements on a side", SAME_PAIRS),
       doc="input with a border of padding_value", nan=MOVED),
    Op("static_resize_bilinear2d", "XNNStaticResizeBilinear2D", "xnn_define_static_resize_bilinear_2d",
       "new_height new_width @input_id @output_id flags", shape=resize_shape, check=same_pairs,
       datatypes=same(MOVABLE, 2), ranks=((4, 4),),
       bounds=("heights and widths below 2**24; flags 0x4 and 0x8 exclude each other", SAME_PAIRS),
       flags=LEGACY_MODE | ALIGN_CORNERS | TRANSIENT_INDIRECTION_BUFFER,
       doc="bilinear interpolation to another height and width", nan="NaN spreads to whatever it is mixed into."),
    *(_concatenate(count) for count in (2, 3, 4, 5)),
    Op("static_reduce", None, "xnn_define_static_reduce_v2",
       "=xnn_reduce_mean reduction_axes[] @input_id @output_id flags",
       shape=reduce_shape, datatypes=same(MOVABLE, 2), flags=KEEP_DIMS, doc="mean over axes", nan="NaN stays NaN."),
    Op("static_reshape_rows", None, "xnn_define_static_reshape", "new_shape[] @input_id @output_id flags",
       shape=reshape_rows_shape, check=same_pairs, datatypes=same(COPYABLE, 2), flags=0,
       doc="static_reshape that leaves axis 0 as it is, whatever its size", nan=MOVED),
    Op("static_expand_dims", None, "xnn_define_static_expand_dims", "new_axes[] @input_id @output_id flags",
       shape=expand_shape, check=same_pairs, datatypes=same(COPYABLE, 2), flags=0,
       doc="input with new dimensions of 1", nan=MOVED),
)
