"""Which axis of every value is the batch, and a lowered graph that runs any number of samples.

In comes a lowered graph whose batch is baked into its shapes; out goes a :class:`Batching`, and the nodes
with reshapes and slices rewritten so that they follow the batch and nothing else. Where samples would mix,
a GraphError names the node and the reason.

The samples of a value keep their place in memory through every reshape: with ``P`` blocks outside the batch
and ``Q`` elements inside, sample ``s`` of block ``p`` stands at ``(p * batch + s) * Q``. Of the shape,
``P`` picks the axis: the batch lies in the axis before which at most ``P`` blocks are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple

from . import shapes as _shapes
from .errors import ArgumentError, GraphError, ShapeError
from .ops import OPS
from .ops._rules import RESHAPE_2D, TRANSPOSE_B, text
from .ops.movement import signed_axis
from .quantization import PerToken

if TYPE_CHECKING:
    from ._graph import Node, Value
    from .lower import Lowered

__all__ = ["Batching", "Layout", "analyze", "free_batch"]

Shape = tuple[int, ...]

#: How many combinations of readings are tried where a declared batch of 1 leaves open which axis holds it.
MAX_ATTEMPTS = 256


class Layout(NamedTuple):
    """Where a value holds the batch: ``shape[axis] == outer * batch * inner``, in this order."""

    axis: int
    outer: int
    inner: int

    @property
    def unit(self) -> int:
        """Elements of the axis per sample."""
        return self.outer * self.inner

    def blocks(self, shape: Sequence[int]) -> int:
        """How many times all samples come round: 1 where the batch is outermost."""
        return prod(shape[: self.axis]) * self.outer

    def sized(self, shape: Sequence[int], batch: int) -> Shape:
        """The shape with another batch."""
        return (*shape[: self.axis], self.unit * batch, *shape[self.axis + 1 :])


class Batching:
    """The batch of a graph.

    Attributes
    ----------
    batch : int
        The declared one.
    inputs : tuple of int
        Positions of the inputs that carry it, in the order of ``graph.inputs``. The others are shared by
        all samples.
    layouts : dict of int to Layout
        By value id, for every value that depends on the batch.
    """

    def __init__(self, batch: int, inputs: tuple[int, ...], layouts: dict[int, Layout]) -> None:
        self.batch = batch
        self.inputs = inputs
        self.layouts = layouts

    def __repr__(self) -> str:
        return f"Batching(batch={self.batch}, inputs={self.inputs}, values={len(self.layouts)})"


class _Mixed(Exception):
    """A rule's reason why the samples of a node's output can't be told apart."""


class _Operand(NamedTuple):
    name: str
    shape: Shape
    layout: Layout | None


# ---------------------------------------------------------------------------------------------------
# Rules: node, operands and declared output shape -> possible layouts of the outputs, the likeliest first


def _same(node: Node, ins: Sequence[_Operand | None], out: Shape, batch: int) -> list[Layout]:
    return [_only(node, ins)]


def _only(node: Node, ins: Sequence[_Operand | None], position: int = 0) -> Layout:
    """The layout of the operand at that position, which must be the only one that depends on the batch."""
    for place, operand in enumerate(ins):
        if operand is not None and operand.layout is not None and place != position:
            raise _Mixed(f"{operand.name} depends on the batch, need one for all samples")
    layout = ins[position].layout  # type: ignore[union-attr]
    assert layout is not None
    return layout


def _on_axis(layout: Layout, shape: Shape) -> str:
    return f"axis {layout.axis} of {text(shape)}, which holds the batch"


def _aligned(operands: Sequence[tuple[str, Shape, Layout | None]], rank: int) -> Layout:
    """The layout of what operands give that are aligned at the right and broadcast against each other."""
    found: tuple[str, Layout] | None = None
    for name, shape, layout in operands:
        if layout is None:
            continue
        layout = layout._replace(axis=layout.axis + rank - len(shape))
        if found is None:
            found = name, layout
        elif found[1].axis != layout.axis:
            raise _Mixed(f"the batch is axis {found[1].axis} of the output through {found[0]} and axis {layout.axis} "
                         f"through {name}")
        elif found[1] != layout:
            raise _Mixed(f"{found[0]} and {name} hold their samples in different order on axis {layout.axis}")
    assert found is not None
    for name, shape, layout in operands:
        axis = found[1].axis - rank + len(shape)
        if layout is None and axis >= 0 and shape[axis] != 1:
            raise _Mixed(f"{name} is {text(shape)} for all samples, its axis {axis} meets the batch and has "
                         f"{shape[axis]} elements, need 1")
    return found[1]


def _binary(node: Node, ins: Sequence[_Operand | None], out: Shape, batch: int) -> list[Layout]:
    return [_aligned([operand for operand in ins if operand is not None], len(out))]


def _rows(axes: str) -> Callable[..., list[Layout]]:
    """For operators that work along the last axis."""

    def rule(node: Node, ins: Sequence[_Operand | None], out: Shape, batch: int) -> list[Layout]:
        layout, shape = _only(node, ins), ins[0].shape  # type: ignore[union-attr]
        if layout.axis == len(shape) - 1:
            raise _Mixed(f"it {axes} {_on_axis(layout, shape)}")
        return [layout]

    return rule


def _fully_connected(node: Node, ins: Sequence[_Operand | None], out: Shape, batch: int) -> list[Layout]:
    (layout,) = _rows("sums over")(node, ins, out, batch)
    if not node.flags & RESHAPE_2D:
        return [layout]
    shape = ins[0].shape  # type: ignore[union-attr]
    return [Layout(0, layout.blocks(shape), layout.inner * prod(shape[layout.axis + 1 : -1]))]


def _batch_matrix_multiply(node: Node, ins: Sequence[_Operand | None], out: Shape, batch: int) -> list[Layout]:
    a, b = ins
    assert a is not None and b is not None
    inner = {"input1": len(a.shape) - 1, "input2": len(b.shape) - (1 if node.flags & TRANSPOSE_B else 2)}
    for operand in (a, b):
        if operand.layout is not None and operand.layout.axis == inner[operand.name]:
            raise _Mixed(f"it sums over {_on_axis(operand.layout, operand.shape)}, of {operand.name}")
    # A batch in the rows of the first or the columns of the second operand: the other is for all samples.
    for operand, other, axis in ((a, b, len(out) - 2), (b, a, len(out) - 1)):
        if operand.layout is not None and operand.layout.axis >= len(operand.shape) - 2:
            if other.layout is not None:
                raise _Mixed(f"every sample of {operand.name} meets every sample of {other.name}")
            return [operand.layout._replace(axis=axis)]
    return [_aligned([(each.name, each.shape[:-2], each.layout) for each in (a, b)], len(out) - 2)]


def _images(node: Node, ins: Sequence[_Operand | None], out: Shape, batch: int) -> list[Layout]:
    layout, shape = _only(node, ins), ins[0].shape  # type: ignore[union-attr]
    if layout.axis != 0:
        raise _Mixed(f"it needs the batch on axis 0, found it on {_on_axis(layout, shape)}")
    return [layout]


def _reduce(node: Node, ins: Sequence[_Operand | None], out: Shape, batch: int) -> list[Layout]:
    layout, shape = _only(node, ins), ins[0].shape  # type: ignore[union-attr]
    axes = {axis % len(shape) for axis in node.attrs["reduction_axes"]}
    if layout.axis in axes:
        raise _Mixed(f"it takes the mean over {_on_axis(layout, shape)}")
    if len(out) == len(shape):
        return [layout]
    return [layout._replace(axis=layout.axis - sum(axis < layout.axis for axis in axes))]


def _transpose(node: Node, ins: Sequence[_Operand | None], out: Shape, batch: int) -> list[Layout]:
    layout = _only(node, ins)
    return [layout._replace(axis=tuple(node.attrs["perm"]).index(layout.axis))]


def _reshape(node: Node, ins: Sequence[_Operand | None], out: Shape, batch: int) -> list[Layout]:
    layout, shape = _only(node, ins), ins[0].shape  # type: ignore[union-attr]
    found = layouts_of(out, layout.blocks(shape), batch)
    if not found:
        raise _Mixed(f"it makes {text(out)} of {text(shape)}, whose axis {layout.axis} holds the batch of {batch}: no "
                     "axis of the output holds all of it")
    return found


def layouts_of(shape: Shape, blocks: int, batch: int) -> list[Layout]:
    """All layouts with that many blocks outside the batch; an axis that is the batch and nothing else comes first."""
    found = []
    outside = 1
    for axis, dim in enumerate(shape):
        outer, rest = divmod(blocks, outside)
        if not rest and outer and dim % (outer * batch) == 0:
            found.append(Layout(axis, outer, dim // (outer * batch)))
        outside *= dim
    return sorted(found, key=lambda layout: (layout.unit != 1, layout.outer != 1, layout.inner != 1, layout.axis))


def _expand(node: Node, ins: Sequence[_Operand | None], out: Shape, batch: int) -> list[Layout]:
    layout = _only(node, ins)
    kept = [axis for axis in range(len(out)) if axis not in node.attrs["new_axes"]]
    return [layout._replace(axis=kept[layout.axis])]


def _slice(node: Node, ins: Sequence[_Operand | None], out: Shape, batch: int) -> list[Layout]:
    layout, shape = _only(node, ins), ins[0].shape  # type: ignore[union-attr]
    if out[layout.axis] != shape[layout.axis]:
        raise _Mixed(f"it takes {out[layout.axis]} of {shape[layout.axis]} from {_on_axis(layout, shape)}, need all of "
                     "it")
    return [layout]


def _pad(node: Node, ins: Sequence[_Operand | None], out: Shape, batch: int) -> list[Layout]:
    layout, shape = _only(node, ins), ins[0].shape  # type: ignore[union-attr]
    before, after = (node.attrs[name][layout.axis] for name in ("pre_paddings", "post_paddings"))
    if before or after:
        raise _Mixed(f"it adds {before} before and {after} after {_on_axis(layout, shape)}, need 0")
    return [layout]


def _concatenate(node: Node, ins: Sequence[_Operand | None], out: Shape, batch: int) -> list[Layout]:
    parts = [operand for operand in ins if operand is not None]
    first = next(part for part in parts if part.layout is not None)
    layout = first.layout
    assert layout is not None
    for part in parts:
        if part.layout is None:
            raise _Mixed(f"{part.name} is {text(part.shape)} for all samples and would have to be repeated for each")
        if part.layout.axis != layout.axis:
            raise _Mixed(f"{first.name} holds the batch on axis {layout.axis} and {part.name} on axis "
                         f"{part.layout.axis}")
        if part.layout != layout:
            raise _Mixed(f"{first.name} and {part.name} hold their samples in different order on axis {layout.axis}")
    if layout.axis == signed_axis(node.attrs["axis"]) % len(out):
        raise _Mixed(f"it puts its parts one after the other on {_on_axis(layout, first.shape)}")
    return [layout]


RULES: dict[str, Callable[[Any, Sequence[_Operand | None], Shape, int], list[Layout]]] = {
    **{name: _same for name, op in OPS.items() if op.call in ("xnn_define_unary", "xnn_define_copy")},
    **{name: _binary for name, op in OPS.items() if op.call == "xnn_define_binary"},
    "softmax": _rows("normalises"),
    "fully_connected": _fully_connected,
    "batch_matrix_multiply": _batch_matrix_multiply,
    **dict.fromkeys(("conv2d", "depthwise_conv2d", "conv_transpose2d", "average_pooling2d", "max_pooling2d",
                     "argmax_pooling2d", "static_resize_bilinear2d"), _images),
    "static_reduce": _reduce,
    "static_transpose": _transpose,
    "static_reshape": _reshape,
    "static_reshape_rows": _reshape,
    "static_expand_dims": _expand,
    "static_slice": _slice,
    "static_constant_pad": _pad,
    **{f"concatenate{count}": _concatenate for count in (2, 3, 4, 5)},
}


def _outputs(node: Node, ins: Sequence[_Operand | None], values: Sequence[Value], batch: int) -> list[Layout]:
    out = values[0]
    found = RULES[node.op.name](node, ins, out.shape, batch)
    if isinstance(out.quantization, PerToken):
        together, axis = out.quantization.num_nonbatch_dims, found[0].axis
        if axis >= len(out.shape) - together:
            raise _Mixed(f"it quantizes the last {together} axes of {text(out.shape)} together, and axis {axis} holds "
                         "the batch")
    return found


# ---------------------------------------------------------------------------------------------------
# Analysis


def analyze(lowered: Lowered, *, inputs: Sequence[int] | None = None, batch: int | None = None) -> Batching:
    """Where every value of a lowered graph holds the batch.

    Parameters
    ----------
    lowered : Lowered
    inputs : sequence of int, optional
        Positions of the inputs that carry the batch on axis 0. By default those whose axis 0 has the
        size that most inputs (of equals, the first input) have there.
    batch : int, optional
        The declared batch; axis 0 of every input that carries it must be a multiple. By default the size
        of that axis.

    Raises
    ------
    GraphError
        The samples of some node can't be told apart; it names the node and the reason.
    """
    first: GraphError | None = None
    for size, carriers in _seeds(lowered, inputs, batch):
        try:
            return Batching(size, carriers, _search(lowered, size, carriers))
        except GraphError as error:
            first = first or error
    assert first is not None
    raise first


def _seeds(lowered: Lowered, inputs: Sequence[int] | None, batch: int | None) -> list[tuple[int, tuple[int, ...]]]:
    """Declared batch and positions of the inputs that carry it, the likeliest reading first."""
    shapes = [value.shape for value in lowered.graph.inputs]
    given = range(len(shapes)) if inputs is None else tuple(inputs)
    for position in given if inputs is not None else ():
        if not isinstance(position, Integral) or not 0 <= position < len(shapes):
            raise ArgumentError(f"need positions of inputs from 0 to {len(shapes) - 1}, found {position!r}")
        if not shapes[position]:
            raise GraphError(f"input {position} is a scalar and has no axis for the batch")
    if batch is not None and batch < 1:
        raise ArgumentError(f"need a declared batch of at least 1, found {batch}")
    sizes: dict[int, list[int]] = {}
    for position in given:
        if shapes[position] and shapes[position][0]:
            sizes.setdefault(shapes[position][0], []).append(position)
    if not sizes:
        raise GraphError("no input has an axis 0 of at least 1, on which a batch could be")
    if inputs is not None or batch is not None:
        if batch is None:
            if len(sizes) > 1:
                raise ArgumentError(f"the inputs that carry the batch are declared with {_listed(sizes)} on axis 0: "
                                    "say what the declared batch is")
            batch = next(iter(sizes))
        carriers = tuple(position for position in given if shapes[position] and shapes[position][0] % batch == 0)
        odd = [position for position in given if position not in carriers]
        if inputs is not None and odd:
            raise ArgumentError(f"input {odd[0]} is declared {text(shapes[odd[0]])}, axis 0 is no multiple of the "
                                f"batch {batch}")
        return [(batch, carriers)] if inputs is not None else _readings(batch, carriers, shapes)
    ordered = sorted(sizes.items(), key=lambda item: (-len(item[1]), item[1][0]))
    return [reading for size, carriers in ordered for reading in _readings(size, tuple(carriers), shapes)]


def _readings(size: int, carriers: tuple[int, ...], shapes: list[Shape]) -> list[tuple[int, tuple[int, ...]]]:
    # A vector of one element is rather a number for all samples than one for each.
    readings = [carriers, tuple(each for each in carriers if len(shapes[each]) > 1), carriers[:1]]
    return [(size, reading) for reading in dict.fromkeys(readings) if reading]


def _listed(sizes: dict[int, list[int]]) -> str:
    return " and ".join(f"{size} (input {', '.join(map(str, positions))})" for size, positions in sizes.items())


def _search(lowered: Lowered, batch: int, carriers: tuple[int, ...]) -> dict[int, Layout]:
    """Layouts of all values that depend on the batch, over all readings of shapes that leave it open."""
    choices: dict[int, int] = {}
    first: GraphError | None = None
    for _ in range(MAX_ATTEMPTS):
        pass_ = _Pass(lowered, batch, carriers, choices)
        try:
            return pass_.run()
        except GraphError as error:
            first = first or error
        # Of the open readings that led to the refusal, the latest that has an alternative left.
        place = max((each for each in pass_.blamed if choices.get(each, 0) + 1 < pass_.options[each]), default=None)
        if place is None:
            break
        taken = choices.get(place, 0) + 1
        choices = {each: choice for each, choice in choices.items() if each < place} | {place: taken}
    assert first is not None
    raise first


class _Pass:
    """One walk over the nodes, with a choice made wherever a shape can be read in several ways."""

    def __init__(self, lowered: Lowered, batch: int, carriers: tuple[int, ...], choices: dict[int, int]) -> None:
        self.lowered = lowered
        self.batch = batch
        self.choices = choices
        #: Place of a node with several readings -> how many.
        self.options: dict[int, int] = {}
        #: The open readings before the node that refused.
        self.blamed: frozenset[int] = frozenset()
        self.layouts: dict[int, Layout] = {}
        # Value id -> open readings that it rests on.
        self.open: dict[int, frozenset[int]] = {}
        for position in carriers:
            id = lowered.inputs[position]
            self.layouts[id] = Layout(0, 1, lowered.value(id).shape[0] // batch)
            self.open[id] = frozenset()

    def run(self) -> dict[int, Layout]:
        for place, node in enumerate(self.lowered.nodes):
            if any(id in self.layouts for id in node.inputs):
                self.node(place, node)
        return self.layouts

    def node(self, place: int, node: Node) -> None:
        values = [self.lowered.value(id) for id in node.outputs]
        ins = [None if id is None else
               _Operand(name.removesuffix("_id"), self.lowered.value(id).shape, self.layouts.get(id))
               for name, id in zip(node.op.inputs, node.inputs)]
        rests: frozenset[int] = frozenset().union(*(self.open.get(id, ()) for id in node.inputs if id is not None))
        try:
            if any(0 in each.shape for each in (*ins, *values) if each is not None):
                raise _Mixed("it has a dimension of 0, which tells nothing about the batch")
            found = _outputs(node, ins, values, self.batch)
        except _Mixed as mixed:
            self.blamed = rests
            raise GraphError(f"the batch can't be changed: {node.where}: {mixed}", node=node.index) from None
        if len(found) > 1:
            self.options[place] = len(found)
            rests |= {place}
        for value in values:
            self.layouts[value.id] = found[self.choices.get(place, 0)]
            self.open[value.id] = rests


# ---------------------------------------------------------------------------------------------------
# Rewriting


def free_batch(lowered: Lowered, batching: Batching | None, *, strict: bool = False) -> bool:
    """Rewrite the nodes of a lowered graph so that baked-in batch sizes follow the batch; whether they all do.

    A reshape can leave one dimension open. Where the file leaves another one open than that of the batch,
    and that one can really change, the batch stays as declared unless ``strict``.
    """
    nodes = lowered.nodes
    if batching is not None and (strict or not _changes_otherwise(lowered, batching)):
        lowered.nodes = [made for node in nodes for made in _freed(lowered, node, batching.layouts)]
        return True
    layouts = batching.layouts if batching is not None else {}
    lowered.nodes = [_as_the_file_says(lowered, node, layouts) for node in nodes]
    return False


def _freed(lowered: Lowered, node: Node, layouts: dict[int, Layout]) -> list[Node]:
    layout = layouts.get(node.outputs[0])
    if layout is None:
        return [_as_the_file_says(lowered, node, layouts)]
    if node.op.name == "static_reshape":
        return [_follow(lowered, node, layouts[node.inputs[0]], layout)]  # type: ignore[index]
    if node.op.name == "fully_connected" and node.flags & RESHAPE_2D:
        # The engine would merge the rows whatever their number; the reshape of its own looks at them.
        source = lowered.value(node.inputs[0]).shape
        out = node.outputs[0]
        if len(source) != 2:
            rows = lowered.like(out, (*source[:-1], lowered.value(out).shape[-1]))
            layouts[rows] = layouts[node.inputs[0]]  # type: ignore[index]
            merge = node.replace(op=OPS["static_reshape"], inputs=(rows,), flags=0, clamp=None,
                                 attrs={"new_shape": lowered.value(out).shape})
            return [node.replace(outputs=(rows,), flags=node.flags & ~RESHAPE_2D),
                    _follow(lowered, merge, layouts[rows], layout)]
    return [node]


def _follow(lowered: Lowered, node: Node, source: Layout, target: Layout) -> Node:
    """A reshape whose dimension ``target.axis`` follows the batch and nothing else."""
    shape = lowered.value(node.inputs[0]).shape
    out = lowered.value(node.outputs[0]).shape
    return node.replace(op=OPS["static_reshape_rows"], attrs={
        "new_shape": (*out[: target.axis], 0, *out[target.axis + 1 :]),
        "rows": (source.axis, prod(shape[: source.axis]), source.unit, prod(shape[source.axis + 1 :]), target.unit)})


def _as_the_file_says(lowered: Lowered, node: Node, layouts: dict[int, Layout]) -> Node:
    """A reshape that takes up the changes which its file lets it, each in its place."""
    if node.op.name != "static_reshape":
        return node
    new = node.attrs["new_shape"]
    shape = lowered.value(node.inputs[0]).shape
    out = lowered.value(node.outputs[0]).shape
    if 0 in shape or 0 in out:
        return node
    if 0 in new:
        place = new.index(0)
        open_axes = _open_axes(shape, out, place)
        source, target = layouts.get(node.inputs[0]), layouts.get(node.outputs[0])  # type: ignore[arg-type]
        if source is not None and target is not None and target.axis != place:
            open_axes = tuple(axis for axis in open_axes if axis != source.axis)
        return node.replace(op=OPS["static_reshape_rows"],
                            attrs={"new_shape": new, "declared": shape, "open": open_axes})
    if not shape or not out or shape[0] != out[0]:
        return node
    # The first axis stays what it is.
    return _follow(lowered, node, Layout(0, 1, 1), Layout(0, 1, 1))


def _open_axes(shape: Shape, out: Shape, place: int) -> tuple[int, ...]:
    """The axes whose elements are all in the inferred dimension: a change of another one would slide into it."""
    before, behind = prod(out[:place]), prod(out[place + 1 :])
    kept = 0
    while kept < min(place, len(shape)) and shape[kept] == out[kept]:
        kept += 1
    last = len(shape)
    while last > kept and len(shape) - last < len(out) - 1 - place and shape[last - 1] == out[last - 1 - len(shape)]:
        last -= 1
    return tuple(axis for axis in range(kept, last)
                 if prod(shape[:axis]) % before == 0 and prod(shape[axis + 1 :]) % behind == 0)


def _changes_otherwise(lowered: Lowered, batching: Batching) -> bool:
    """Whether a reshape takes up a change of another input dimension than the batch, by the one that it infers."""
    inferring = []
    for node in lowered.nodes:
        target = batching.layouts.get(node.outputs[0])
        if node.op.name == "static_reshape" and target is not None and 0 in node.attrs["new_shape"]:
            source = batching.layouts[node.inputs[0]]  # type: ignore[index]
            if node.attrs["new_shape"][target.axis] != 0 or source.unit != 1 or target.unit != 1:
                inferring.append(node.outputs[0])
    if not inferring:
        return False
    trial = _Trial(lowered, [_as_the_file_says(lowered, node, batching.layouts) for node in lowered.nodes])
    declared = {id: lowered.value(id).shape for id in lowered.inputs}
    places: dict[int, list[tuple[int, int]]] = {}
    for position, id in enumerate(lowered.inputs):
        for axis, dim in enumerate(declared[id]):
            if dim and not (axis == 0 and position in batching.inputs):
                places.setdefault(dim, []).append((id, axis))
    # All dimensions of one size together, since inputs may have to agree, and one by itself.
    for dim, all_places in places.items():
        for group in [all_places, *([place] for place in all_places if len(all_places) > 1)]:
            for changed in dict.fromkeys((dim - 1, dim + 1, 2 * dim, dim // 2)):
                if changed < 1 or changed == dim:
                    continue
                tried = {id: list(shape) for id, shape in declared.items()}
                for id, axis in group:
                    tried[id][axis] = changed
                try:
                    shapes = _shapes.infer(trial, tried)
                except ShapeError:
                    continue
                if any(shapes[id] != lowered.value(id).shape for id in inferring):
                    return True
    return False


class _Trial:
    """A lowered graph with other nodes, for shape inference."""

    def __init__(self, lowered: Lowered, nodes: list[Node]) -> None:
        self.values = lowered.values
        self.value = lowered.value
        self.nodes = nodes
