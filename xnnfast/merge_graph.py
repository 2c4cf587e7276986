"""A graph that grows: what merging joins into one, before it becomes a Graph.

In come graphs of delegates, nodes one by one and arrays of the program; out comes a Graph whose externals are
values of the program. Values of the program are named by number, as module merge numbers them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from . import datatypes as _datatypes
from . import shapes as _shapes
from ._graph import Constant, Graph, Node, Value
from ._runtime import empty
from .lower import lower
from .ops import OPS, Refusal, check_op, packed
from .ops._rules import MAX_RANK
from .quantization import PerTensor

if TYPE_CHECKING:
    from .caps import Limits
    from .quantization import Quantization

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Shape: TypeAlias = tuple[int, ...]

KEEP_DIMS = 0x40

#: What XNNPACK computes with, by NumPy's name.
DATATYPES = {"float32": "fp32", "float16": "fp16"}


class Conflict(Exception):
    """A graph can't be joined to what is there already: one value would need two types."""


class Form(NamedTuple):
    """How a value of the program lies in a graph."""

    #: Dimensions from outermost to innermost.
    order: tuple[int, ...]
    datatype: str
    quantization: Quantization | None = None


class External(NamedTuple):
    """An input or output of the finished graph."""

    #: Number of the program's value.
    number: int
    order: tuple[int, ...]


class Constants:
    """Constants of one program's graphs: equal bytes are one constant, which lives as long as this.

    So an address stands for its bytes, and graphs may share what XNNPACK has packed from it.
    """

    def __init__(self) -> None:
        self._known: dict[Any, Constant] = {}

    def copy_of(self, array: Array) -> Constant:
        """A constant with the elements of an array, in memory of its own."""
        held = empty(array.shape or (1,), array.dtype)
        held[...] = array
        return self.known(("copy", hashlib.blake2b(held.data.cast("B")).digest()), lambda: Constant(held))

    def known(self, key: Any, make: Callable[[], Constant]) -> Constant:
        """The constant of that key, made at first."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]


class Maker:
    """Values and nodes of a graph in the making. A node may be added once its inputs are there."""

    def __init__(self, source: Source, constants: Constants) -> None:
        self.source = source
        self.constants = constants
        self.values: dict[int, Value] = {}
        self.nodes: list[Node] = []
        #: Value id -> the value of the program that it takes in.
        self.inputs: dict[int, External] = {}
        #: Program's value -> the forms in which it is here.
        self.forms: dict[int, list[tuple[Form, int]]] = {}
        self.made: set[int] = set()
        #: Values somebody looks at, see :func:`narrow`.
        self.watched: list[int] = []
        self._scalars: dict[tuple[float, str], int] = {}

    # -- values

    def add(self, datatype: str, shape: Shape, *, quantization: Any = None, constant: Constant | None = None) -> int:
        """The id of a new value."""
        if len(shape) > MAX_RANK:
            raise Refusal(f"rank {len(shape)}, limit {MAX_RANK}")
        id = len(self.values)
        self.values[id] = Value(id, datatype, shape, quantization=quantization, constant=constant)
        return id

    def shape(self, id: int) -> Shape:
        shape: Shape = self.values[id].shape
        return shape

    def constant(self, array: Array, datatype: str = "fp32") -> int:
        """A constant in memory of its own."""
        dtype = _datatypes.DATATYPES[datatype].dtype
        assert dtype is not None
        return self.add(datatype, array.shape or (1,), constant=self.constants.copy_of(array.astype(dtype, copy=False)))

    def scalar(self, number: float, datatype: str = "fp32") -> int:
        """A constant of one element, made once."""
        known = (number, datatype)
        if known not in self._scalars:
            self._scalars[known] = self.constant(np.asarray([number]), datatype)
        return self._scalars[known]

    def take(self, number: int, form: Form) -> int:
        """A value of the program in the form that a graph needs; Conflict if it is here with another type."""
        forms = self.forms.setdefault(number, [])
        for known, id in forms:
            if known == form:
                return id
        for known, id in forms:
            if known[1:] == form[1:]:
                # Same elements in another order of dimensions.
                if sorted(known.order) != sorted(form.order):
                    raise Conflict
                perm = tuple(known.order.index(axis) for axis in form.order)
                moved = self.node("static_transpose", (id,), attrs={"perm": perm})
                forms.append((form, moved))
                return moved
        if number in self.made:
            raise Conflict
        new = self.source.constant(self, number, form)
        if new is None:
            new = self.add(form.datatype, self.source.shape(number, form.order), quantization=form.quantization)
            self.inputs[new] = External(number, form.order)
        forms.append((form, new))
        return new

    def give(self, number: int, order: tuple[int, ...], id: int) -> None:
        """Value ``id`` is a value of the program."""
        value = self.values[id]
        self.forms.setdefault(number, []).append((Form(order, value.datatype, value.quantization), id))
        self.made.add(number)

    # -- nodes

    def node(
        self,
        name: str,
        inputs: Sequence[int | None],
        *,
        datatype: str | None = None,
        attrs: Mapping[str, Any] | None = None,
        flags: int = 0,
        clamp: tuple[float, float] | None = None,
    ) -> int:
        """Add a node of one output; the id of that. Refusal if XNNPACK would not compute it."""
        op = OPS[name]
        ins = [None if id is None else self.values[id] for id in inputs]
        node = Node(op, inputs, (len(self.values),), attrs, flags=flags, clamp=clamp, index=len(self.nodes))
        (shape,) = op.shape(node, [None if value is None else value.shape for value in ins])
        first = next(value for value in ins if value is not None)
        id = self.add(datatype or first.datatype, shape, quantization=None if datatype else first.quantization)
        check_op(node, ins, [self.values[id]])
        self.nodes.append(node)
        return id

    def inline(
        self,
        graph: Graph,
        takes: Sequence[tuple[int, tuple[int, ...]]],
        gives: Sequence[tuple[int, tuple[int, ...]]],
        swaps: Mapping[int, int],
    ) -> dict[int, int]:
        """Add all of a graph, its externals being values of the program; new id by old.

        It is added as lowering leaves it, which fits any sizes that the graph permits. ``swaps`` puts values of the
        program in the place of constants of the graph.
        """
        lowered = lower(graph)
        if lowered.scratch or any(node.op.name == "argmax_pooling2d" for node in lowered.nodes):
            # Its indices have another type in the program than in the graph.
            raise Conflict
        ids: dict[int, int] = {}
        for (number, order), value in zip(takes, graph.inputs):
            if value.quantization is not None and not isinstance(value.quantization, PerTensor):
                raise Conflict
            ids[value.id] = self.take(number, Form(order, value.datatype, value.quantization))
        for old, number in swaps.items():
            value = lowered.value(old)
            ids[old] = self.take(number, Form(tuple(range(len(value.shape))), value.datatype))
        inferred = _shapes.infer(lowered, {value.id: self.shape(ids[value.id]) for value in graph.inputs})
        for old, value in lowered.values.items():
            if old not in ids:
                ids[old] = self.add(
                    value.datatype, inferred[old], quantization=value.quantization, constant=value.constant
                )
        for node in lowered.nodes:
            inputs = tuple(None if id is None else ids[id] for id in node.inputs)
            outputs = tuple(ids[id] for id in node.outputs)
            self.nodes.append(node.replace(inputs=inputs, outputs=outputs, index=len(self.nodes)))
        for (number, order), id in zip(gives, lowered.outputs):
            self.give(number, order, ids[id])
        return ids

    # -- the end

    def packing(self) -> tuple[Any, ...]:
        """What XNNPACK packs of the constants, and in which order: the same for graphs that may share it."""
        found = []
        for node in self.nodes:
            values = [None if id is None else self.values[id] for id in node.inputs]
            for place in packed(node, values):
                value = values[place]
                assert value is not None and value.constant is not None
                scales = value.quantization
                # Per channel or block they are arrays, which graphs of one delegate have in common.
                scale = scales if scales is None or isinstance(scales, PerTensor) else id(scales.scales)  # type: ignore[union-attr]
                found.append((node.op.name, place, value.constant.address, value.shape, scale))
        return tuple(found)

    def finish(self, outputs: Sequence[int], *, source: str, owner: Any, limits: Limits) -> Graph:
        """The graph with these value ids as its outputs, which must be different and computed here."""
        used = {id for node in self.nodes for id in (*node.inputs, *node.outputs) if id is not None}
        used.update(outputs)
        inputs = [id for id in self.inputs if id in used]
        external = {id: number for number, id in enumerate(dict.fromkeys((*inputs, *outputs)))}
        values = {}
        for id in sorted(used):
            value = self.values[id]
            if id in external:
                value = value.replace(external_id=external[id], is_input=id in self.inputs, is_output=id in outputs)
            values[id] = value
        return Graph(
            values.values(),
            [node.replace(index=index) for index, node in enumerate(self.nodes)],
            [values[id] for id in inputs],
            [values[id] for id in outputs],
            container="memory",
            source=source,
            owner=owner,
            limits=limits,
        )

    def plain_output(self, id: int, others: Iterable[int]) -> int:
        """A value with the same elements that can be an output: computed by a node, and no other output."""
        if id in self.inputs or self.values[id].constant is not None or id in others:
            return self.node("copy", (id,))
        return id


class Source:
    """What a Maker needs to know of the program."""

    def shape(self, number: int, order: tuple[int, ...]) -> Shape:
        """Shape of a value in memory; a scalar is one element of rank 1."""
        raise NotImplementedError

    def constant(self, maker: Maker, number: int, form: Form) -> int | None:
        """A value that never changes as a constant of the graph; None if it does."""
        raise NotImplementedError


# ---------------------------------------------------------------------------------------------------
# Moves that cancel


def simplify(maker: Maker, outputs: Sequence[int]) -> None:
    """Drop moves of elements that others undo, sums with nothing, and what then leads nowhere."""
    producers = {node.outputs[0]: node for node in maker.nodes}
    for place, node in enumerate(maker.nodes):
        node = maker.nodes[place] = _simpler(maker, node, producers)
        producers[node.outputs[0]] = node
    names: dict[int, int] = {}
    readers = _readers(maker.nodes)
    for node in maker.nodes:
        same = _same_as(maker, node, readers.get(node.outputs[0], ()))
        if same is not None and node.outputs[0] not in outputs:
            names[node.outputs[0]] = names.get(same, same)
    maker.nodes = [_renamed(node, names) for node in maker.nodes if node.outputs[0] not in names]
    maker.watched = [names.get(id, id) for id in maker.watched]
    wanted = {*outputs, *maker.watched}
    live = []
    for node in reversed(maker.nodes):
        if node.outputs[0] in wanted:
            live.append(node)
            wanted.update(id for id in node.inputs if id is not None)
    maker.nodes = live[::-1]


def _readers(nodes: Iterable[Node]) -> dict[int, list[Node]]:
    """Value id -> the nodes that read it."""
    readers: dict[int, list[Node]] = {}
    for node in nodes:
        for id in node.inputs:
            if id is not None:
                readers.setdefault(id, []).append(node)
    return readers


def _simpler(maker: Maker, node: Node, producers: Mapping[int, Node]) -> Node:
    """A transpose of a transpose is one, and so is a reshape of a reshape."""
    source = node.inputs[0]
    before = producers.get(source) if source is not None else None
    if before is None:
        return node
    if node.op.name == before.op.name == "static_transpose":
        perm = tuple(before.attrs["perm"][axis] for axis in node.attrs["perm"])
        return node.replace(inputs=before.inputs, attrs={"perm": perm})
    reshapes = ("static_reshape", "static_reshape_rows")
    if node.op.name in reshapes and before.op.name in reshapes:
        attrs = {"new_shape": maker.shape(node.outputs[0])}
        return node.replace(op=OPS["static_reshape"], inputs=before.inputs, attrs=attrs)
    return node


def _same_as(maker: Maker, node: Node, readers: Sequence[Node]) -> int | None:
    """The value that a node's output is anyway."""
    source, output = node.inputs[0], node.outputs[0]
    if node.op.name == "static_transpose":
        return source if tuple(node.attrs["perm"]) == tuple(range(len(maker.shape(output)))) else None
    if node.op.name in ("static_reshape", "static_reshape_rows"):
        return source if source is not None and maker.shape(source) == maker.shape(output) else None
    if node.op.name == "add" and node.clamp is None and all(reader.op.name == "softmax" for reader in readers):
        # Masks that mask nothing. Softmax does not tell -0 from 0.
        for one, other in (node.inputs, node.inputs[::-1]):
            assert one is not None and other is not None
            value = maker.values[one]
            if (
                value.constant is not None
                and value.datatype in ("fp32", "fp16")
                and maker.shape(other) == maker.shape(output)
            ):
                return None if value.array().any() else other
    return None


# ---------------------------------------------------------------------------------------------------
# Computing only what is asked for


def narrow(maker: Maker, outputs: Sequence[int]) -> list[int]:
    """Move slices toward the inputs, so that what they leave out is not computed; the new outputs.

    A value all of whose readers take the same slice need not be computed beyond it. Who looks at ``maker.watched``
    looks at what is left of those values.
    """
    return _Narrowing(maker, outputs).run()


class _Narrowing:
    def __init__(self, maker: Maker, outputs: Sequence[int]) -> None:
        self.maker = maker
        self.outputs = list(outputs)

    def run(self) -> list[int]:
        maker = self.maker
        while self._once():
            pass
        _sort(maker)
        return self.outputs

    def _once(self) -> bool:
        maker = self.maker
        readers = _readers(maker.nodes)
        producers = {node.outputs[0]: node for node in maker.nodes}
        for node in maker.nodes:
            if node.op.name != "static_slice":
                continue
            source = node.inputs[0]
            assert source is not None
            producer = producers.get(source)
            if producer is None or source in self.outputs or len(producer.outputs) != 1:
                continue
            shape = maker.shape(source)
            cut = _cut(node, shape)
            others = readers[source]
            if any(other.op.name != "static_slice" or _cut(other, shape) != cut for other in others):
                continue
            count = len(maker.nodes)
            try:
                sliced = self._sliced(producer, cut)
            except Refusal:
                # Such as rows that are quantized together.
                sliced = None
            if sliced is None:
                del maker.nodes[count:]
                continue
            # All these slices are the producer's new, smaller output.
            replaced = {other.outputs[0]: sliced for other in others}
            drop = (*others, producer)
            maker.nodes = [_renamed(each, replaced) for each in maker.nodes if not any(each is other for other in drop)]
            self.outputs = self._outputs(replaced)
            maker.watched = [sliced if id == source else id for id in maker.watched]
            for forms in maker.forms.values():
                forms[:] = [(form, replaced.get(id, id)) for form, id in forms if id != source]
            return True
        return False

    def _outputs(self, replaced: dict[int, int]) -> list[int]:
        outputs: list[int] = []
        for id in self.outputs:
            new = replaced.get(id, id)
            outputs.append(self.maker.node("copy", (new,)) if new in outputs else new)
        return outputs

    def _sliced(self, node: Node, cut: tuple[Shape, Shape]) -> int | None:
        """The node's output cut, computed from cut inputs; None if that is not possible."""
        maker = self.maker
        name = node.op.name
        out = maker.shape(node.outputs[0])
        offsets, sizes = cut
        axes = [axis for axis, size in enumerate(sizes) if size != out[axis]]
        inputs: list[int | None] = list(node.inputs)
        shapes = [() if id is None else maker.shape(id) for id in inputs]
        attrs = dict(node.attrs)
        rank = len(out)
        if node.op.call == "xnn_define_unary" or name in ("copy", "softmax", "static_reduce", "fully_connected"):
            if maker.values[node.outputs[0]].datatype == "qdint8" or (
                name in ("softmax", "fully_connected") and rank - 1 in axes
            ):
                return None
            if name == "static_reduce":
                reduced = {axis % len(shapes[0]) for axis in attrs["reduction_axes"]}
                if not node.flags & KEEP_DIMS or reduced & set(axes):
                    return None
                offsets = tuple(0 if axis in reduced else offset for axis, offset in enumerate(offsets))
                sizes = tuple(shapes[0][axis] if axis in reduced else size for axis, size in enumerate(sizes))
            if name == "fully_connected":
                if node.flags & ~1 or len(shapes[0]) != rank:
                    return None
                offsets, sizes = (*offsets[:-1], 0), (*sizes[:-1], shapes[0][-1])
            inputs[0] = self._slice(inputs[0], offsets, sizes)
        elif node.op.call == "xnn_define_binary":
            for place, shape in enumerate(shapes):
                inputs[place] = self._aligned(inputs[place], shape, rank, offsets, sizes)
        elif name == "batch_matrix_multiply":
            transposed = bool(node.flags & 1)
            for place, shape in enumerate(shapes):
                part = self._batch(shape, rank, offsets, sizes)
                # The dimension that is summed over stays whole.
                part[-2:] = [(0, dim) for dim in shape[-2:]]
                if place == 0:
                    part[-2] = (offsets[-2], sizes[-2])
                else:
                    part[-2 if transposed else -1] = (offsets[-1], sizes[-1])
                inputs[place] = self._slice(inputs[place], *map(tuple, zip(*part)))
        elif name == "static_transpose":
            perm = attrs["perm"]
            back = [perm.index(axis) for axis in range(rank)]
            inputs[0] = self._slice(
                inputs[0], tuple(offsets[axis] for axis in back), tuple(sizes[axis] for axis in back)
            )
        elif name == "static_slice":
            start = tuple(a + b for a, b in zip(attrs["offsets"], offsets))
            attrs = {"offsets": start, "sizes": sizes}
        elif name in ("static_reshape", "static_reshape_rows"):
            moved = _through_reshape(shapes[0], out, offsets, sizes)
            if moved is None:
                return None
            inputs[0] = self._slice(inputs[0], *moved)
            name, attrs = "static_reshape", {"new_shape": sizes}
        else:
            return None
        before = maker.values[node.outputs[0]]
        op = OPS[name]
        made = node.replace(op=op, inputs=tuple(inputs), outputs=(len(maker.values),), attrs=attrs)
        (shape,) = op.shape(made, [None if id is None else maker.shape(id) for id in inputs])
        id = maker.add(before.datatype, shape, quantization=before.quantization)
        check_op(made, [None if id is None else maker.values[id] for id in inputs], [maker.values[id]])
        maker.nodes.append(made)
        return id

    def _aligned(self, id: int | None, shape: Shape, rank: int, offsets: Shape, sizes: Shape) -> int | None:
        """A broadcast operand cut where it is not stretched."""
        part = self._batch(shape, rank, offsets, sizes)
        return self._slice(id, *map(tuple, zip(*part))) if part else id

    @staticmethod
    def _batch(shape: Shape, rank: int, offsets: Shape, sizes: Shape) -> list[tuple[int, int]]:
        lead = rank - len(shape)
        return [(0, dim) if dim == 1 else (offsets[lead + axis], sizes[lead + axis]) for axis, dim in enumerate(shape)]

    def _slice(self, id: int | None, offsets: Any, sizes: Any) -> int:
        maker = self.maker
        assert id is not None
        value = maker.values[id]
        if tuple(sizes) == value.shape:
            return id
        if value.constant is not None and value.quantization is None:
            part = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes))
            return maker.constant(value.array()[part], value.datatype)
        return maker.node("static_slice", (id,), attrs={"offsets": tuple(offsets), "sizes": tuple(sizes)})


def _cut(node: Node, shape: Shape) -> tuple[Shape, Shape]:
    # A size of 0 is the whole dimension.
    return tuple(node.attrs["offsets"]), tuple(size or dim for size, dim in zip(node.attrs["sizes"], shape))


def _renamed(node: Node, names: Mapping[int, int]) -> Node:
    if not any(id in names for id in node.inputs):
        return node
    return node.replace(inputs=tuple(None if id is None else names.get(id, id) for id in node.inputs))


def _through_reshape(before: Shape, after: Shape, offsets: Shape, sizes: Shape) -> tuple[Shape, Shape] | None:
    """A cut behind a reshape as a cut in front of it: each cut dimension must be one there too."""
    start = [0] * len(before)
    extent = list(before)
    for axis, (dim, offset, size) in enumerate(zip(after, offsets, sizes)):
        if size == dim:
            continue
        outer = int(np.prod(after[:axis], dtype=np.int64))
        for place, other in enumerate(before):
            if other == dim and int(np.prod(before[:place], dtype=np.int64)) == outer:
                start[place], extent[place] = offset, size
                break
        else:
            return None
    return tuple(start), tuple(extent)


def _sort(maker: Maker) -> None:
    """Put the nodes in running order: new ones were added at the end."""
    waiting = list(maker.nodes)
    computed = {id for node in waiting for id in node.outputs}
    done: set[int] = set()
    ordered: list[Node] = []
    while waiting:
        rest = []
        for node in waiting:
            if all(id is None or id in done or id not in computed for id in node.inputs):
                ordered.append(node)
                done.update(node.outputs)
            else:
                rest.append(node)
        if len(rest) == len(waiting):
            raise Refusal("nodes in a cycle")
        waiting = rest
    maker.nodes = ordered
