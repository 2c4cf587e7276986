"""What a graph must be before anything is computed from it: the meaning that the bytes alone don't guarantee.

In comes a Graph whose fields are filled in; out come its nodes in an order in which they can run, and
notes. XNNPACK checks hardly any of this itself: it crashes, or computes from memory that nobody wrote.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from . import shapes
from ._reader import check_nodes, dead_nodes, screen_nodes, screen_values
from .caps import DEFAULT_LIMITS, Limits
from .datatypes import DATATYPES, nbytes
from .errors import GraphError, LimitError
from .ops import check_op
from .ops._rules import MAX_RANK, text
from .quantization import PerBlock, PerChannel, PerTensor, PerToken, bf16_to_f32

if TYPE_CHECKING:
    from ._graph import Graph, Node, Value

#: Ids are 32 bits in a file, and the highest means none.
MAX_ID = 0xFFFFFFFE
MAX_DIM = shapes.MAX_DIM
MAX_ELEMENTS = shapes.MAX_ELEMENTS

#: Smallest normal float32, and the bits of its exponent.
_TINY = float(np.finfo(np.float32).tiny)


class _Ordered:
    """The part of a graph that shape inference looks at, its nodes in order."""

    def __init__(self, graph: Graph, nodes: list[Node]) -> None:
        self.values = graph.values
        self.nodes = nodes
        self.value = graph.value


def validate(graph: Graph, limits: Limits | None = None) -> tuple[list[Node], list[str]]:
    """The graph's nodes in running order, and what a careful reader would want to know about the graph.

    Raises
    ------
    GraphError
        The graph has no meaning, or none that XNNPACK can compute; it names the node or value.
    ShapeError
        A declared shape is not what the nodes before it give.
    LimitError
        A size is above a cap of ``limits``.
    """
    limits = limits or DEFAULT_LIMITS
    workspace, doubtful, external = screen_values(graph.values)
    for value in doubtful:
        need = check_value(value)
        if value.constant is None:
            workspace += need
    if workspace > limits.max_workspace:
        raise LimitError(
            f"the values of the graph take {workspace} bytes by their declared shapes, above the cap of "
            f"{limits.max_workspace}; max_workspace of Limits raises it"
        )
    _externals(graph, external)
    nodes = list(graph.nodes) if screen_nodes(graph) else _ordered(graph)
    # The rules compare what overflows and what is no number, too: that is their answer, not worth a warning.
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        nodes, agree, failed = check_nodes(graph, nodes, check_op)
    if failed is not None:
        node, refusal = failed
        raise GraphError(f"{node.where}: {refusal}", node=node.index)
    if not agree:
        shapes.check_declared(_Ordered(graph, nodes))
    shapes.check_indirection(nodes, graph.value, lambda id: graph.value(id).shape, limits)
    notes = [
        f"value {value.id} is declared {text(value.shape)}, without any element"
        for value in doubtful
        if 0 in value.shape
    ]
    dead, live = dead_nodes(graph, nodes)
    notes += [f"{node.where} leads to no output and is left out" for node in dead]
    notes += [f"input value {value.id} is not used" for value in graph.inputs if value.id not in live]
    return nodes, notes


def _ordered(graph: Graph) -> list[Node]:
    """Nodes in running order, after every check of ids and producers."""
    producers = _producers(graph)
    nodes = _sorted(graph, producers)
    for value in graph.outputs:
        if value.id not in producers and not value.is_input:
            raise _fault(value, "an external output that no node writes and that is no input")
    return nodes


# ---- values


def check_value(value: Value) -> int:
    """Bytes of a value by its declared shape, after every check that concerns the value alone."""
    if not 0 <= value.id <= MAX_ID:
        raise GraphError(f"need value ids from 0 to {MAX_ID}, found {value.id}", value=value.id)
    entry = DATATYPES.get(value.datatype)
    if entry is None:
        raise _fault(value, f"need a datatype of {', '.join(DATATYPES)}, found {value.datatype!r}")
    shape = value.shape
    if len(shape) > MAX_RANK:
        raise _fault(value, f"rank {len(shape)}, limit {MAX_RANK}")
    count = 1
    for dim in shape:
        if not 0 <= dim <= MAX_DIM:
            raise _fault(value, f"need dims from 0 to {MAX_DIM}, found {dim}")
        count *= dim
    if count > MAX_ELEMENTS:
        raise _fault(value, f"need at most {MAX_ELEMENTS} elements, found {count} ({text(shape)})")
    need = count * (entry.bits >> 3) if entry.bits >= 8 else nbytes(value.datatype, shape)
    if value.quantization is not None or entry.quantization != "none":
        _check_quantization(value)
    constant = value.constant
    if constant is not None:
        if value.is_input or value.is_output:
            raise _fault(value, f"a constant can't be an external {'input' if value.is_input else 'output'}")
        if entry.name == "qdint8":
            raise _fault(value, "qdint8 is computed at run time and can't be constant")
        if constant.nbytes < need:
            raise _fault(
                value,
                f"need {need} bytes for {text(shape)} {entry.name}, constant {constant.index} has {constant.nbytes}",
            )
    elif entry.bits < 8:
        raise _fault(value, f"{entry.name} must be constant")
    if value.is_input or value.is_output:
        if value.external_id is None:
            raise _fault(value, "an external input or output needs an external id, found none")
        if entry.name == "qdint8":
            raise _fault(value, "qdint8 can't be an external value")
    elif value.external_id is not None:
        raise _fault(value, f"external id {value.external_id} needs flag 1 (input) or 2 (output), found neither")
    if value.dq_datatype is not None:
        if value.dq_datatype != "qint8":
            raise _fault(value, f"need dq_datatype qint8, found {value.dq_datatype}")
        if not value.is_input or value.is_output or entry.name not in ("fp32", "fp16"):
            raise _fault(value, "dq_datatype is for external inputs of fp32 or fp16")
    return need


def _fault(value: Value, message: str) -> GraphError:
    where = f" (offset {value.offset:#x})" if value.offset >= 0 else ""
    return GraphError(f"value {value.id}{where}: {message}", value=value.id)


_KINDS = {"tensor": PerTensor, "channel": PerChannel, "block": PerBlock, "token": PerToken}


def _check_quantization(value: Value) -> None:
    entry = DATATYPES[value.datatype]
    quantization = value.quantization
    if entry.quantization == "none":
        raise _fault(value, f"{entry.name} needs no quantization parameters, found {type(quantization).__name__}")
    if type(quantization) is not _KINDS[entry.quantization]:
        found = "none" if quantization is None else type(quantization).__name__
        raise _fault(
            value, f"{entry.name} needs quantization parameters {_KINDS[entry.quantization].__name__}, found {found}"
        )
    shape = value.shape
    if isinstance(quantization, PerTensor):
        if not _TINY <= quantization.scale < float("inf"):
            raise _fault(value, f"need a finite, normal and positive scale, found {quantization.scale!r}")
        low, high = (0, 0) if entry.name == "qint32" else (entry.low, entry.high)
        if not low <= quantization.zero_point <= high:
            raise _fault(
                value, f"need a zero point from {low} to {high} for {entry.name}, found {quantization.zero_point}"
            )
        return
    if isinstance(quantization, PerToken):
        if not 0 < quantization.num_nonbatch_dims <= len(shape):
            raise _fault(
                value, f"need num_nonbatch_dims from 1 to {len(shape)}, found {quantization.num_nonbatch_dims}"
            )
        return
    if entry.bits < 8 and shape and shape[-1] % 2:
        raise _fault(
            value, f"need an even last dimension for {entry.name}, found {shape[-1]}: this XNNPACK misreads odd rows"
        )
    assert isinstance(quantization, (PerChannel, PerBlock))
    axis = quantization.axis
    if not 0 <= axis < len(shape):
        raise _fault(value, f"need a channel axis from 0 to {len(shape) - 1}, found {axis}")
    if isinstance(quantization, PerChannel):
        need = shape[axis]
        bad = bad_scale(quantization.scales)
    else:
        size = quantization.block_size
        if len(shape) != 2 or axis != 0:
            raise _fault(
                value, f"{entry.name} needs rank 2 and channel axis 0, found rank {len(shape)} and axis {axis}"
            )
        if size < 32 or size % 32 or shape[1] % size:
            raise _fault(value, f"need a group size that is a multiple of 32 and divides {shape[1]}, found {size}")
        need = shape[0] * (shape[1] // size)
        bad = bad_scale_bf16(quantization.scales)
    if len(quantization.scales) != need:
        raise _fault(value, f"need {need} scales for {text(shape)} along axis {axis}, found {len(quantization.scales)}")
    if bad >= 0:
        real = (
            quantization.scales[bad] if isinstance(quantization, PerChannel) else bf16_to_f32(quantization.scales[bad])
        )
        raise _fault(value, f"need finite, normal and positive scales, found {float(real):g} at index {bad}")


def bad_scale(scales: np.ndarray[Any, Any]) -> int:
    """Index of the first float32 that is no scale: negative, zero, denormal, infinite or NaN; -1 if all are."""
    good = (scales >= _TINY) & (scales < np.inf)
    return -1 if good.all() else int(np.argmin(good))


def bad_scale_bf16(scales: np.ndarray[Any, Any]) -> int:
    """The same for bit patterns of bfloat16: exponent neither 0 nor 255, sign clear."""
    good = (scales >= 0x0080) & (scales < 0x7F80)
    return -1 if good.all() else int(np.argmin(good))


def _externals(graph: Graph, external: Iterable[Value]) -> None:
    """Inputs and outputs agree with the values' flags, and each external id names one value."""
    seen: dict[int, Value] = {}
    inputs, outputs = set(), set()
    for value in external:
        if value.external_id is None:
            continue
        other = seen.setdefault(value.external_id, value)
        if other is not value:
            raise _fault(value, f"external id {value.external_id} already names value {other.id}")
        if value.is_input:
            inputs.add(value.id)
        if value.is_output:
            outputs.add(value.id)
    for name, group, flagged in (("input", graph.inputs, inputs), ("output", graph.outputs, outputs)):
        listed = [value.id for value in group]
        if len(set(listed)) != len(listed):
            twice = next(id for id in listed if listed.count(id) > 1)
            raise GraphError(f"value {twice} is listed twice among the {name}s", value=twice)
        if set(listed) != flagged:
            id = min(set(listed) ^ flagged)
            raise GraphError(
                f"value {id} is {'listed among' if id in listed else 'missing from'} the {name}s, but is "
                f"{'flagged' if id in flagged else 'not flagged'} as external {name}",
                value=id,
            )


# ---- topology


def _producers(graph: Graph) -> dict[int, Node]:
    """Value id -> node that writes it, after checking every id that nodes name."""
    producers: dict[int, Node] = {}
    for node in graph.nodes:
        op = node.op
        if len(node.inputs) != len(op.inputs) or len(node.outputs) != len(op.outputs):
            raise GraphError(
                f"{node.where} has {len(node.inputs)} inputs and {len(node.outputs)} outputs, need "
                f"{len(op.inputs)} and {len(op.outputs)}",
                node=node.index,
            )
        for name, id in zip(node.op.outputs, node.outputs):
            if not graph.has_value(id):
                raise GraphError(f"{node.where}: {name} is {id}, and no value has that id", node=node.index, value=id)
            value = graph.value(id)
            if value.constant is not None or value.is_input:
                what = "a constant" if value.constant is not None else "an external input"
                raise GraphError(
                    f"{node.where}: {name} is value {id}, {what}, which no node may write",
                    node=node.index,
                    value=id,
                )
            other = producers.setdefault(id, node)
            if other is not node:
                raise GraphError(
                    f"{node.where}: {name} is value {id}, which {other.where} writes too", node=node.index, value=id
                )
        if len(set(node.outputs)) != len(node.outputs):
            raise GraphError(
                f"{node.where} writes value {node.outputs[0]} twice", node=node.index, value=node.outputs[0]
            )
        for name, input in zip(node.op.inputs, node.inputs):
            if input is not None and not graph.has_value(input):
                raise GraphError(
                    f"{node.where}: {name} is {input}, and no value has that id", node=node.index, value=input
                )
    return producers


def _sorted(graph: Graph, producers: Mapping[int, Node]) -> list[Node]:
    """Nodes in running order: the file's, as far as producers stand before consumers."""
    waiting: dict[int, int] = {}
    done: set[int] = set()
    in_order = True
    for position, node in enumerate(graph.nodes):
        count = 0
        for name, id in zip(node.op.inputs, node.inputs):
            if id is None or id in done:
                continue
            if id not in producers:
                value = graph.value(id)
                if value.constant is None and not value.is_input:
                    raise GraphError(
                        f"{node.where}: {name} is value {id}, which is neither constant nor external input "
                        "and written by no node",
                        node=node.index,
                        value=id,
                    )
                done.add(id)
                continue
            count += 1
        if count:
            in_order = False
        waiting[position] = count
        done.update(node.outputs)
    if in_order:
        return list(graph.nodes)
    return _topological(graph.nodes, producers)


def _topological(nodes: Iterable[Node], producers: Mapping[int, Node]) -> list[Node]:
    nodes = tuple(nodes)
    place = {id(node): position for position, node in enumerate(nodes)}
    needs = [
        {place[id(producers[each])] for each in node.inputs if each is not None and each in producers} for node in nodes
    ]
    users: list[list[int]] = [[] for _ in nodes]
    for position, needed in enumerate(needs):
        for each in needed:
            users[each].append(position)
    missing = [len(needed) for needed in needs]
    ready = [position for position, count in enumerate(missing) if not count]
    order: list[Node] = []
    heapq.heapify(ready)
    while ready:
        position = heapq.heappop(ready)
        order.append(nodes[position])
        for user in users[position]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, user)
    if len(order) == len(nodes):
        return order
    # Walk back over unfinished producers until a node comes again: that is a cycle.
    position = next(position for position, count in enumerate(missing) if count)
    path: list[int] = []
    while position not in path:
        path.append(position)
        position = min(each for each in needs[position] if missing[each])
    cycle = [nodes[each] for each in reversed(path[path.index(position) :])]
    named = ", ".join(node.where for node in cycle[:8])
    more = f", ... ({len(cycle)} nodes)" if len(cycle) > 8 else ""
    raise GraphError(f"nodes in a cycle, each needs the one before: {named}{more}", node=cycle[0].index)
