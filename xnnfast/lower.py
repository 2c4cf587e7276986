"""From a Graph to what the engine is given: dead nodes dropped, limits folded, compound kinds taken apart.

In comes a validated Graph; out goes a :class:`Lowered` graph in which every node is one call of
XNNPACK's subgraph API with no surprise in it. The engine's own rewriting (operator fusion) stays
switched off, because in this version it writes a fused clamp's limits over the producer's padding.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import numpy as np

from ._graph import Constant, Graph, Node, Value
from .batching import Batching, analyze, free_batch
from .errors import GraphError
from .fuse import FOLDS_CLAMP, Fusion, fold_clamps, fold_pads, unlimited
from .ops import OPS
from .ops._rules import RESHAPE_2D
from .quantization import PerChannel, PerToken, Quantization

KEEP_DIMS = 0x40
TRANSPOSE_B = 0x01


class Lowered:
    """Values and nodes as they are defined in an XNNPACK subgraph.

    Attributes
    ----------
    graph : Graph
        Where it came from. Held weakly, since the graph keeps its lowered form: a map must go with its last user, not
        with the collector's next turn. Whoever uses the lowered form holds the graph.
    values : dict of int to Value
        By value id. Ids of values that lowering made are negative.
    nodes : list of Node
        In running order; ``node.index`` is still the index of the file's node it came from.
    inputs, outputs : tuple of int
        Value ids in the order of ``graph.inputs`` and ``graph.outputs``. A value that is input and
        output at once has an extra value and a copy.
    scratch : tuple of int
        Outputs that nobody asked for but the engine must be able to write (argmax indices).
    broadcasts : tuple of (int, int, int)
        Operand, operand and output ids of every binary node: where a change of broadcasting makes the
        engine's in-place plan stale.
    pinned : tuple of int
        Inputs of dynamically quantized convolutions. The engine keeps a buffer per image for them, and when
        it is given another number of images it frees as many as the new number: some twice, or never.
    dropped : tuple of int
        Indices of the nodes that lead to no output.
    fused : tuple of Fusion
        The nodes that others do the work of.
    batching : Batching or None
        Where every value holds the batch.
    batch_error : GraphError or None
        Why the batch can't be changed, where there is no ``batching``.
    follows_batch : bool
        Whether the nodes take any batch.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = weakref.ref(graph)
        self.values: dict[int, Value] = {value.id: value for value in graph.values}
        self.nodes: list[Node] = []
        self.inputs: tuple[int, ...] = tuple(value.id for value in graph.inputs)
        self.outputs: tuple[int, ...] = ()
        self.scratch: tuple[int, ...] = ()
        self.broadcasts: tuple[tuple[int | None, int | None, int], ...] = ()
        self.pinned: tuple[int | None, ...] = ()
        self.dropped: tuple[int, ...] = ()
        self.fused: tuple[Fusion, ...] = ()
        #: Flags -> what a weights cache has to know of the graph.
        self.plans: dict[int, object] = {}
        self._batching: Batching | None = None
        self._batch_error: GraphError | None = None
        self._follows_batch = False
        self._analyzed = True
        self._next = -1

    @property
    def graph(self) -> Graph:
        graph = self._graph()
        assert graph is not None, "whoever uses a lowered graph holds the graph"
        return graph

    @property
    def batching(self) -> Batching | None:
        self._analyze()
        return self._batching

    @property
    def batch_error(self) -> GraphError | None:
        self._analyze()
        return self._batch_error

    @property
    def follows_batch(self) -> bool:
        self._analyze()
        return self._follows_batch

    def _analyze(self) -> None:
        if self._analyzed:
            return
        try:
            self._batching = analyze(self)
        except GraphError as error:
            # An error that is kept must not keep the frames it came through, nor those of an error behind it.
            error.__context__ = None
            self._batch_error = error.with_traceback(None)
        self._follows_batch = free_batch(self, self._batching)
        self._analyzed = True

    @property
    def shapes(self) -> dict[int, tuple[int, ...]]:
        """Value id -> declared shape: what shape inference gives for the declared inputs."""
        return {id: value.shape for id, value in self.values.items()}

    def value(self, id: int | None) -> Value:
        """The value of a node's operand; the caller knows that the operand is not an absent one."""
        return self.values[cast(int, id)]

    def new_value(self, datatype: str, shape: Iterable[int], quantization: Quantization | None = None) -> int:
        """The id of a new internal value."""
        id = self._next
        self._next -= 1
        self.values[id] = Value(id, datatype, tuple(shape), quantization=quantization)
        return id

    def like(self, id: int | None, shape: Iterable[int] | None = None) -> int:
        """The id of a new internal value with the type of another."""
        value = self.value(id)
        return self.new_value(value.datatype, value.shape if shape is None else shape, value.quantization)


def lower(graph: Graph, fuse: bool = True) -> Lowered:
    """The lowered form of a graph, made once and kept with it. Without ``fuse``, all its nodes run by themselves."""
    key = "lowered" if fuse else ("lowered", "unfused")
    lowered: Lowered | None = graph.caches.get(key)
    if lowered is None:
        lowered = _lower(graph, fuse)
        lowered._analyzed = False
        if any(_bakes_in_batch(node) for node in lowered.nodes):
            lowered._analyze()
        # Otherwise no node is rewritten, and who runs the declared batch need not know where it is.
        # The first of several threads has made it for all: weights are packed once for a lowered graph.
        kept: Lowered = graph.caches.setdefault(key, _finish(lowered))
        return kept
    return lowered


def lower_batches(
    graph: Graph, inputs: Sequence[int] | None = None, batch: int | None = None, fuse: bool = True
) -> Lowered:
    """The lowered form that takes any batch; GraphError where there is none. Arguments are those of ``analyze``."""
    if inputs is None and batch is None:
        lowered = lower(graph, fuse)
        if lowered.batch_error is not None:
            raise lowered.batch_error.with_traceback(None)
        if lowered.follows_batch:
            return lowered
    key = ("lowered", None if inputs is None else tuple(inputs), batch, fuse)
    kept: Lowered | None = graph.caches.get(key)
    if kept is None:
        lowered = _lower(graph, fuse)
        lowered._batching = analyze(lowered, inputs=inputs, batch=batch)
        lowered._follows_batch = free_batch(lowered, lowered._batching, strict=True)
        made: Lowered = graph.caches.setdefault(key, _finish(lowered))
        return made
    return kept


def _bakes_in_batch(node: Node) -> bool:
    name = node.op.name
    return name == "static_reshape" or (name == "fully_connected" and bool(node.flags & RESHAPE_2D))


def _lower(graph: Graph, fuse: bool) -> Lowered:
    result = Lowered(graph)
    live = _live_nodes(graph)
    result.dropped = tuple(sorted(node.index for node in graph.nodes if node not in live))
    nodes = [node for node in graph.nodes if node in live]
    nodes = _expand_dynamic_inputs(result, nodes)
    nodes = [made for node in nodes for made in _expand(result, node)]
    result.fused = tuple(graph.caches.get("affine fusions", ()))
    if fuse:
        nodes, pads = fold_pads(result, nodes)
        nodes, clamps = fold_clamps(result, nodes)
        result.fused += (*pads, *clamps)
    nodes = _split_limits(result, nodes)
    result.nodes = nodes
    _pass_through(result)
    _argmax_indices(result)
    return result


def _finish(result: Lowered) -> Lowered:
    result.broadcasts = tuple(
        (node.inputs[0], node.inputs[1], node.outputs[0])
        for node in result.nodes
        if len(node.inputs) == 2 and node.op.call == "xnn_define_binary"
    )
    result.pinned = tuple(
        node.inputs[0]
        for node in result.nodes
        if node.op.name in ("conv2d", "conv_transpose2d") and result.value(node.inputs[0]).datatype == "qdint8"
    )
    used = {id for node in result.nodes for id in (*node.inputs, *node.outputs) if id is not None}
    used.update(result.inputs, result.outputs)
    result.values = {id: value for id, value in result.values.items() if id in used}
    return result


def _live_nodes(graph: Graph) -> set[Node]:
    # A chain of dead nodes makes the engine abort() the process.
    wanted = [value.id for value in graph.outputs]
    live: set[Node] = set()
    while wanted:
        node = graph.producers.get(wanted.pop())
        if node is not None and node not in live:
            live.add(node)
            wanted.extend(id for id in node.inputs if id is not None)
    return live


def _expand_dynamic_inputs(result: Lowered, nodes: list[Node]) -> list[Node]:
    """XN00's dq_datatype: the external float value is quantized per row before any consumer sees it."""
    quantized: dict[int, int] = {}
    converts = []
    for value in result.graph.values:
        if value.dq_datatype is None:
            continue
        new = result.new_value("qdint8", value.shape, PerToken(1))
        quantized[value.id] = new
        consumer = next((node.index for node in nodes if value.id in node.inputs), -1)
        converts.append(Node(OPS["convert"], (value.id,), (new,), index=consumer))
    if not quantized:
        return nodes
    renamed = [
        node.replace(inputs=tuple(id if id is None else quantized.get(id, id) for id in node.inputs)) for node in nodes
    ]
    return converts + renamed


def _expand(result: Lowered, node: Node) -> list[Node]:
    name = node.op.name
    if name == "scaled_dot_product_attention":
        return _expand_attention(result, node)
    if name == "global_average_pooling2d":
        return _expand_global_pooling(result, node)
    if name == "static_slice":
        return [_free_full_slices(result, node)]
    if name == "fully_connected":
        return [_divide_bias(result, node)]
    if name == "batch_matrix_multiply":
        return [_repeat_scales(result, node)]
    return [node]


def _divide_bias(result: Lowered, node: Node) -> Node:
    # With fp32 input and an integer filter the engine computes (x @ filter + bias) * scale: it would
    # multiply the bias too. One more rounding to float32 is what the division costs.
    x, weights, bias = node.inputs
    if bias is None or result.value(x).datatype != "fp32" or result.value(weights).datatype not in ("qcint8", "qcint4"):
        return node
    wanted = result.value(bias).array()
    scales = cast(PerChannel, result.value(weights).quantization).scales
    with np.errstate(all="ignore"):
        divided = wanted / scales
    far = np.isinf(divided) & np.isfinite(wanted)
    if far.any():
        channel = int(far.argmax())
        raise GraphError(
            f"{node.where}: bias {wanted[channel]:g} of output channel {channel} is no float32 any more when divided "
            f"by the filter's scale {scales[channel]:g}, as XNNPACK needs it",
            node=node.index,
            value=bias,
        )
    id = result.like(bias)
    # One for all lowered forms of the graph: packed weights are known by the addresses of constants.
    constant = result.graph.caches.setdefault(("divided", weights, bias), _constant(divided))
    result.values[id] = result.values[id].replace(constant=constant)
    return node.replace(inputs=(x, weights, id))


def _repeat_scales(result: Lowered, node: Node) -> Node:
    # The engine reads a row of scales for each matrix of a batch; a file holds one row for all.
    a, b = node.inputs
    value = result.value(b)
    matrices = math.prod(value.shape[:-2])
    if value.datatype != "qcint8" or matrices == 1:
        return node
    id = result.like(b)
    one = cast(PerChannel, value.quantization)
    repeated = PerChannel(np.tile(one.scales, matrices), one.axis)
    result.values[id] = value.replace(id=id, quantization=repeated)
    return node.replace(inputs=(a, id))


def _constant(array: np.ndarray) -> Constant:
    """A constant that lowering made, with the bytes behind it that kernels may read."""
    room = np.zeros(array.nbytes + 16, np.uint8)
    room[: array.nbytes] = np.frombuffer(array.tobytes(), np.uint8)
    return Constant(room.data[: array.nbytes], reason="made by lowering")


def _expand_attention(result: Lowered, node: Node) -> list[Node]:
    # The engine's own operator is gone from newer versions; its parts are not.
    query, key, value, scale, mask = node.inputs
    output = node.outputs[0]
    made: list[Node] = []

    def emit(
        name: str,
        inputs: tuple[int | None, ...],
        shape: tuple[int, ...],
        output: int | None = None,
        attrs: Mapping[str, Any] = MappingProxyType({}),
        flags: int = 0,
    ) -> int:
        out = result.like(query, shape) if output is None else output
        made.append(
            node.replace(op=OPS[name], inputs=inputs, outputs=(out,), attrs=dict(attrs), clamp=None, flags=flags)
        )
        return out

    q_shape = result.value(query).shape
    rank = len(q_shape)
    for_keys: list[int | None] = []
    for id in (key, value):
        shape = result.value(id).shape
        if len(shape) == rank - 1:
            # Without this axis, a three-dimensional key would broadcast its batch against the heads.
            axis = rank - 3
            id = emit("static_expand_dims", (id,), (*shape[:axis], 1, *shape[axis:]), attrs={"new_axes": (axis,)})
        for_keys.append(id)
    key, value = for_keys
    scores = (*q_shape[:-1], result.value(key).shape[-2])
    scaled = emit("multiply", (query, scale), q_shape)
    logits = emit("batch_matrix_multiply", (scaled, key), scores, flags=TRANSPOSE_B)
    masked = emit("add", (logits, mask), scores)
    weights = emit("softmax", (masked,), scores)
    emit("batch_matrix_multiply", (weights, value), result.value(output).shape, output=output)
    if node.clamp is not None:
        made[-1] = made[-1].replace(clamp=node.clamp)
    return made


def _expand_global_pooling(result: Lowered, node: Node) -> list[Node]:
    source, output = node.inputs[0], node.outputs[0]
    keep = len(result.value(output).shape) == len(result.value(source).shape)
    # Older files leave the flag out; the declared rank tells what they meant.
    return [
        node.replace(
            op=OPS["static_reduce"], attrs={"reduction_axes": (-3, -2)}, flags=KEEP_DIMS if keep else 0
        )
    ]


def _free_full_slices(result: Lowered, node: Node) -> Node:
    # A slice that takes a whole axis follows that axis; the engine would silently drop the rows beyond.
    shape = result.value(node.inputs[0]).shape
    offsets, sizes = node.attrs["offsets"], node.attrs["sizes"]
    freed = tuple(0 if o == 0 and s == dim else s for o, s, dim in zip(offsets, sizes, shape))
    return node if freed == sizes else node.replace(attrs={"offsets": offsets, "sizes": freed})


def _split_limits(result: Lowered, nodes: list[Node]) -> list[Node]:
    """A Clamp node after every node with limits that the call itself can't apply."""
    made = []
    for node in nodes:
        if unlimited(node.clamp) or node.op.name == "clamp" or node.op.name in FOLDS_CLAMP:
            made.append(node)
            continue
        output = node.outputs[0]
        free = result.like(output)
        made.append(node.replace(outputs=(free, *node.outputs[1:]), clamp=None))
        made.append(
            Node(OPS["clamp"], (free,), (output,), clamp=node.clamp, index=node.index, debug_handle=node.debug_handle)
        )
    return made


def _pass_through(result: Lowered) -> None:
    """An input that is an output too is copied: the engine would leave the output's memory unwritten."""
    outputs = []
    for value in result.graph.outputs:
        if value.is_input or value.id in outputs:
            copy = result.like(value.id)
            result.nodes.append(Node(OPS["copy"], (value.id,), (copy,)))
            outputs.append(copy)
        else:
            outputs.append(value.id)
    result.outputs = tuple(outputs)


def _argmax_indices(result: Lowered) -> None:
    # An internal index that nobody reads crashes the engine: it gets memory of its own, as an output.
    consumed = {id for node in result.nodes for id in node.inputs}
    scratch = []
    for node in result.nodes:
        if node.op.name == "argmax_pooling2d":
            index = node.outputs[1]
            if index not in result.outputs:
                if index in consumed:
                    raise GraphError(
                        f"{node.where}: its index output (value {index}) feeds another node; XNNPACK writes it as "
                        "uint32 into a value declared as float, which no other operator can read",
                        node=node.index,
                        value=index,
                    )
                scratch.append(index)
    result.scratch = tuple(scratch)
