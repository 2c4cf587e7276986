"""The shape of every value of a graph, computed from the shapes of its inputs.

It runs when a graph is opened, with the declared shapes, and again for every new shape of an input:
XNNPACK itself checks hardly any geometry. The rules of the single operators are in their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from .caps import Limits
from .datatypes import nbytes
from .errors import LimitError, ShapeError
from .ops import Refusal
from .ops._rules import text

#: Above these no shape is taken, inferred or given: sizes in bytes stay far from where 64 bits end.
MAX_DIM = 2**31 - 1
MAX_ELEMENTS = 2**38

Shape = tuple[int, ...]


def infer(graph: Any, overrides: Mapping[int, Sequence[int]] | None = None) -> dict[int, Shape]:
    """Value id -> shape, for inputs, constants and whatever the nodes compute.

    ``graph`` has ``values`` (a sequence, or a dict by id) and ``nodes``, the nodes in an order in which
    they can run. ``overrides`` gives inputs another shape than the declared one, of the same rank.
    """
    computed = {output for node in graph.nodes for output in node.outputs}
    values = graph.values.values() if isinstance(graph.values, dict) else graph.values
    shapes = {value.id: value.shape for value in values if value.id not in computed}
    if overrides:
        for number, shape in overrides.items():
            shapes[number] = _override(graph, number, shape)
    for node in graph.nodes:
        try:
            ins = [None if number is None else shapes[number] for number in node.inputs]
        except KeyError as missing:
            raise ShapeError(f"{node.where}: value {missing} is used before a node has computed it") from None
        try:
            outs = node.op.shape(node, ins)
            for number, shape in zip(node.outputs, outs):
                shapes[number] = shape
                if prod(shape) > MAX_ELEMENTS or (shape and max(shape) > MAX_DIM):
                    raise Refusal(f"the output would be {text(shape)}, more than {MAX_ELEMENTS} elements"
                                  if max(shape) <= MAX_DIM else
                                  f"the output would be {text(shape)}, with a dimension above {MAX_DIM}")
        except Refusal as refusal:
            raise ShapeError(f"{node.where}: {refusal}") from None
    return shapes


#: Bytes of indirection for each byte that a node reads or writes that are nothing unusual. A 7x7 convolution of one
#: channel has 49.
USUAL_INDIRECTION = 64


def check_indirection(nodes: Sequence[Any], value: Callable[[int], Any], shape: Callable[[int], Shape],
                      limits: Limits) -> None:
    """Refuse windows whose table of pointers is out of proportion: XNNPACK makes one for each tap of each place.

    A window as large as its padding permits, over an image of four pixels, would take gigabytes.
    """
    for node in nodes:
        attrs = node.attrs
        if "pooling_height" in attrs:
            taps = attrs["pooling_height"] * attrs["pooling_width"]
        elif "kernel_height" in attrs:
            taps = attrs["kernel_height"] * attrs["kernel_width"]
        else:
            continue
        _, height, width, _ = shape(node.outputs[0])
        need = 8 * taps * height * width
        if need <= limits.max_indirection:
            continue
        beside = sum(nbytes(value(number).datatype, shape(number)) for number in (node.inputs[0], node.outputs[0]))
        if need > USUAL_INDIRECTION * beside:
            raise LimitError(f"{node.where}: XNNPACK would make {need} bytes of pointers for {taps} taps at "
                             f"{height}x{width} places, out of proportion to the {beside} bytes that the node reads "
                             f"and writes, and above the cap of {limits.max_indirection}; max_indirection of Limits "
                             "raises it")


def check_sizes(graph: Any, shapes: Mapping[int, Shape], limits: Limits) -> None:
    """Refuse shapes that take more memory than the caps allow: values, constants apart, and XNNPACK's tables."""
    cap = limits.max_workspace
    values = graph.values.values() if isinstance(graph.values, dict) else graph.values
    total = sum([nbytes(value.datatype, shapes[value.id]) for value in values if value.constant is None])
    if total > cap:
        largest = max((value for value in values if value.constant is None),
                      key=lambda value: nbytes(value.datatype, shapes[value.id]))
        raise LimitError(f"the values of the graph would take {total} bytes, the largest of them "
                         f"{text(shapes[largest.id])} {largest.datatype}, above the cap of {cap}; max_workspace of "
                         "Limits raises it")
    check_indirection(graph.nodes, graph.value, shapes.__getitem__, limits)


def _override(graph: Any, number: int, given: Sequence[int]) -> Shape:
    value = graph.value(number)
    shape = tuple([int(dim) for dim in given])
    if not value.is_input:
        raise ShapeError(f"value {number} is not an input, its shape can't be given", got=shape)
    if len(shape) != len(value.shape):
        raise ShapeError(f"input (value {number}) needs rank {len(value.shape)} ({text(value.shape)} is declared), "
                         f"found rank {len(shape)} ({text(shape)})", expected=value.shape, got=shape)
    if shape and (min(shape) < 0 or max(shape) > MAX_DIM or prod(shape) > MAX_ELEMENTS):
        raise ShapeError(f"input (value {number}) needs dims of 0 to {MAX_DIM} and at most {MAX_ELEMENTS} elements, "
                         f"found {text(shape)}", expected=value.shape, got=shape)
    return shape


def check_declared(graph: Any) -> dict[int, Shape]:
    """The inferred shapes, after comparing every one with the declared shape.

    XNNPACK ignores what is declared and allocates by what it infers; a file in which the two differ
    was not written for the graph it holds.
    """
    shapes = infer(graph)
    for node in graph.nodes:
        for position, number in enumerate(node.outputs):
            declared = graph.value(number).shape
            if shapes[number] != declared:
                raise ShapeError(f"{node.where}: {node.op.outputs[position]} (value {number}) is declared "
                                 f"{text(declared)}, the operator gives {text(shapes[number])}",
                                 expected=shapes[number], got=declared)
    return shapes
