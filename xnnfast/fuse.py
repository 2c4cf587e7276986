"""Nodes that need not run: limits into the node before, padding into the window after, factors into filters.

In come the nodes on their way from a graph to XNNPACK, or a graph; out come fewer that compute the same.
XNNPACK's own fusion stays switched off: in this version it writes a clamp's limits over its producer's padding.

Limits and padding change no bit of a result that is a number. A layer with limits compares after its sum as a
Clamp node does, and padding is the same zeros (or zero points) from another place, in the same order of the sum.
What is NaN before a Clamp may become a limit when the limits are the layer's own. Factors change the rounding,
so :func:`fold_affine` is to be asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from ._graph import Constant, Graph, Node, Value
from .ops import Refusal
from .ops._rules import SAME_PADDING, TRANSPOSE_WEIGHTS

if TYPE_CHECKING:
    from .lower import Lowered

    Array = np.ndarray[Any, np.dtype[Any]]
    Limits = tuple[float, float] | None

__all__ = ["Fusion", "fold_affine", "fold_clamps", "fold_pads"]

#: Producers whose own output limits can take over a following Clamp. Binary operators are not among
#: them: in this version of XNNPACK their limits are a separate pass, exactly like a Clamp node.
FOLDS_CLAMP = frozenset(
    ("fully_connected", "conv2d", "depthwise_conv2d", "conv_transpose2d", "average_pooling2d", "max_pooling2d")
)
#: Layers that can take over the padding before them.
FOLDS_PAD = frozenset(("conv2d", "depthwise_conv2d"))
#: Layers whose filter and bias can take over what follows -> the axis of the filter that counts output channels.
FOLDS_AFFINE = {"conv2d": 0, "conv_transpose2d": 0, "depthwise_conv2d": 3, "fully_connected": 0}
SIDES = (("padding_top", "pre_paddings", 1), ("padding_left", "pre_paddings", 2),
         ("padding_bottom", "post_paddings", 1), ("padding_right", "post_paddings", 2))  # fmt: skip
#: Kernels of one pixel and no padding are matrix products of another kind.
WINDOW = ("kernel_height", "kernel_width")


class Fusion(NamedTuple):
    """A node that is gone: ``node`` and ``into`` are indices of the file's nodes, ``kind`` is what it was."""

    kind: str
    node: int
    into: int


def consumers(nodes: Sequence[Node]) -> dict[int, list[tuple[int, int]]]:
    """Value id -> places among the nodes and among their inputs where it is used."""
    found: dict[int, list[tuple[int, int]]] = {}
    for place, node in enumerate(nodes):
        for position, id in enumerate(node.inputs):
            if id is not None:
                found.setdefault(id, []).append((place, position))
    return found


# ---------------------------------------------------------------------------------------------------
# Limits


def unlimited(clamp: Limits) -> bool:
    """Whether these limits keep nothing out."""
    return clamp is None or (clamp[0] == -math.inf and clamp[1] == math.inf)


def _intersect(a: Limits, b: Limits) -> Limits:
    if a is None or b is None:
        return a if b is None else b
    return max(a[0], b[0]), min(a[1], b[1])


def fold_clamps(lowered: Lowered, nodes: Sequence[Node]) -> tuple[list[Node], list[Fusion]]:
    """Give a Clamp's limits to the node before it, where that node can apply them in its own pass."""
    used = consumers(nodes)
    place = {node.outputs[0]: i for i, node in enumerate(nodes)}
    folded: list[Node | None] = list(nodes)
    fusions = []
    for i, node in enumerate(nodes):
        if node.op.name != "clamp":
            continue
        source = lowered.value(node.inputs[0])
        target = lowered.value(node.outputs[0])
        before = place.get(source.id)
        producer = folded[before] if before is not None else None
        if (
            producer is None
            or producer.op.name not in FOLDS_CLAMP
            or len(used[source.id]) != 1
            or source.is_output
            or source.datatype != target.datatype
            or source.quantization != target.quantization
        ):
            continue
        limits = _intersect(producer.clamp, node.clamp)
        # Limits that exclude each other are legal one after the other, not as one interval.
        if limits is not None and not limits[0] < limits[1]:
            continue
        folded[cast(int, before)] = None
        folded[i] = producer.replace(clamp=limits, outputs=node.outputs)
        place[target.id] = i
        fusions.append(Fusion("clamp", node.index, producer.index))
    return [node for node in folded if node is not None], fusions


# ---------------------------------------------------------------------------------------------------
# Padding


def fold_pads(lowered: Lowered, nodes: Sequence[Node]) -> tuple[list[Node], list[Fusion]]:
    """Give the zeros that a pad puts around an image to the convolutions that read it, where all can take them."""
    used = consumers(nodes)
    folded: list[Node | None] = list(nodes)
    fusions = []
    for place, pad in enumerate(nodes):
        if pad.op.name != "static_constant_pad" or not _only_zeros(lowered, pad):
            continue
        padded = lowered.value(pad.outputs[0])
        readers = used.get(padded.id, [])
        if padded.is_output or not readers:
            continue
        changed: dict[int, Node] = {}
        for reader, position in readers:
            node = folded[reader]
            taken = _with_pad(lowered, node, pad) if node is not None and position == 0 else None
            if taken is None:
                break
            changed[reader] = taken
        else:
            folded[place] = None
            for reader, taken in changed.items():
                folded[reader] = taken
                fusions.append(Fusion("pad", pad.index, taken.index))
    return [node for node in folded if node is not None], fusions


def _only_zeros(lowered: Lowered, pad: Node) -> bool:
    """Whether it pads height and width of an image alone, with what convolutions pad with."""
    value = pad.attrs["padding_value"]
    before, after = pad.attrs["pre_paddings"], pad.attrs["post_paddings"]
    return (
        len(before) == 4
        and not any((before[0], before[3], after[0], after[3]))
        # Zero of a quantized type is its zero point, with which its convolutions pad. A negative zero would keep its
        # sign in products.
        and value == 0
        and math.copysign(1, value) > 0
        and lowered.value(pad.inputs[0]).datatype == lowered.value(pad.outputs[0]).datatype
        and lowered.value(pad.inputs[0]).quantization == lowered.value(pad.outputs[0]).quantization
    )


def _with_pad(lowered: Lowered, node: Node, pad: Node) -> Node | None:
    """The convolution with the pad's sides as its own, or None where it can't have them."""
    if node.op.name not in FOLDS_PAD or node.flags & SAME_PADDING or all(node.attrs[side] == 1 for side in WINDOW):
        return None
    attrs = dict(node.attrs)
    for side, vector, axis in SIDES:
        attrs[side] += pad.attrs[vector][axis]
    made = node.replace(inputs=(pad.inputs[0], *node.inputs[1:]), attrs=attrs)
    shapes = [None if id is None else lowered.value(id).shape for id in made.inputs]
    try:
        (out,) = made.op.shape(made, shapes)
    except Refusal:
        return None
    return made if tuple(out) == lowered.value(made.outputs[0]).shape else None


# ---------------------------------------------------------------------------------------------------
# Factors and summands


def fold_affine(graph: Graph) -> Graph:
    """The graph with factors and summands per channel that follow a layer computed into its filter and bias.

    What follows may be multiplications, divisions, additions and subtractions by constants with one number, or
    one per output channel, in any order: what a batch normalisation is at inference. Layers are those of fp32.
    Filters and biases that change are copies, also of a mapped file's. Results differ by rounding.

    Returns
    -------
    Graph
        ``graph`` itself where there is nothing to fold. One for all calls, kept with ``graph``;
        ``caches["affine fusions"]`` lists the nodes that are gone.
    """
    kept: Graph | None = graph.caches.get("affine")
    if kept is None:
        made: Graph = graph.caches.setdefault("affine", _fold_affine(graph))
        return made
    return kept


def _fold_affine(graph: Graph) -> Graph:
    nodes: list[Node | None] = list(graph.nodes)
    used = consumers(graph.nodes)
    values: dict[int, Value] = {value.id: value for value in graph.values}
    fusions: list[Fusion] = []
    following = 1 + max(values)
    for place, layer in enumerate(graph.nodes):
        if layer.op.name not in FOLDS_AFFINE or not unlimited(layer.clamp) or not _is_plain(layer, values):
            continue
        axis = FOLDS_AFFINE[layer.op.name]
        if layer.op.name == "fully_connected":
            axis = layer.flags & TRANSPOSE_WEIGHTS
        x, weights, bias = layer.inputs
        filter = values[cast(int, weights)].array().astype(np.float32)
        channels = filter.shape[axis]
        sums = np.zeros(channels, np.float32) if bias is None else values[bias].array().astype(np.float32)
        gone: list[int] = []
        made = layer
        while unlimited(made.clamp) and not values[made.outputs[0]].is_output:
            readers = used.get(made.outputs[0], [])
            if len(readers) != 1 or readers[0][0] == place:
                break
            reader = graph.nodes[readers[0][0]]
            change = _affine(reader, readers[0][1], values, channels, values[made.outputs[0]].shape)
            if change is None:
                break
            shape = [1] * filter.ndim
            shape[axis] = channels
            with np.errstate(all="ignore"):
                factor, summand = change
                new_filter, new_sums = filter * factor.reshape(shape), sums * factor + summand
            if not (np.isfinite(new_filter).all() and np.isfinite(new_sums).all()):
                break
            filter, sums = new_filter, new_sums
            made = made.replace(outputs=reader.outputs, clamp=reader.clamp)
            gone.append(readers[0][0])
        if not gone:
            continue
        kept_shapes = values[cast(int, weights)].shape
        values[following] = Value(following, "fp32", kept_shapes, constant=_constant(filter))
        values[following + 1] = Value(following + 1, "fp32", (channels,), constant=_constant(sums))
        # Where the last of the chain stood: its other inputs are constants, so all is known there.
        for index in gone:
            nodes[index] = None
            fusions.append(Fusion(graph.nodes[index].op.name, graph.nodes[index].index, layer.index))
        nodes[place] = made.replace(inputs=(x, following, following + 1))
        following += 2
    if not fusions:
        return graph
    left = [node for node in nodes if node is not None]
    named = {id for node in left for id in (*node.inputs, *node.outputs) if id is not None}
    named.update(value.id for value in (*graph.inputs, *graph.outputs))
    folded = Graph([value for value in values.values() if value.id in named], left, graph.inputs, graph.outputs,
                   dialect=graph.dialect, version=graph.version, source=graph.source, container=graph.container,
                   notes=graph.notes, owner=graph, limits=graph.limits)  # fmt: skip
    folded.caches["affine fusions"] = tuple(fusions)
    return folded


def _is_plain(layer: Node, values: dict[int, Value]) -> bool:
    """Whether a layer computes in fp32 with a constant filter."""
    x, weights, bias = (None if id is None else values[id] for id in layer.inputs)
    assert x is not None and weights is not None
    return (
        all(each.datatype == "fp32" for each in (x, weights, values[layer.outputs[0]]))
        and x.dq_datatype is None
        and weights.constant is not None
        and (bias is None or (bias.datatype == "fp32" and bias.constant is not None))
    )


#: Operator -> (factor, summand) of x in ``op(x, c)``, and in ``op(c, x)`` where that is of the form.
_LEFT: dict[str, Callable[[Array, Array], tuple[Array, Array]]] = {
    "multiply": lambda c, one: (c, 0 * one),
    "divide": lambda c, one: (one / c, 0 * one),
    "add": lambda c, one: (one, c),
    "subtract": lambda c, one: (one, -c),
}
_RIGHT: dict[str, Callable[[Array, Array], tuple[Array, Array]]] = {
    "multiply": _LEFT["multiply"],
    "add": _LEFT["add"],
    "subtract": lambda c, one: (-one, c),
}


def _affine(
    node: Node, position: int, values: dict[int, Value], channels: int, shape: tuple[int, ...]
) -> tuple[Array, Array] | None:
    """Factor and summand per channel by which a node changes its input, or None where it is no such node."""
    form = (_LEFT, _RIGHT)[position].get(node.op.name) if position < 2 else None
    if form is None or len(node.inputs) != 2:
        return None
    other, out = values[cast(int, node.inputs[1 - position])], values[node.outputs[0]]
    if other.constant is None or other.datatype != "fp32" or out.datatype != "fp32" or out.shape != shape:
        return None
    if math.prod(other.shape) not in (1, channels) or len(other.shape) > len(shape):
        return None
    if math.prod(other.shape) == channels != 1 and other.shape[-1] != channels:
        return None
    number = np.broadcast_to(other.array().astype(np.float32).reshape(-1), (channels,))
    with np.errstate(all="ignore"):
        return form(number, np.ones(channels, np.float32))


def _constant(array: Array) -> Constant:
    """A constant of our own, aligned, with bytes behind it that kernels may read."""
    room = np.zeros(array.nbytes + 128, np.uint8)
    start = -room.ctypes.data % 64
    room[start : start + array.nbytes] = np.ascontiguousarray(array, np.float32).reshape(-1).view(np.uint8)
    return Constant(room[start : start + array.nbytes].data, reason="made by folding factors into it")
