"""Less precision than the file's, for speed: what is rewritten, what is refused, and what it costs.

In comes a graph; out goes one that computes with int8 numbers where that pays, or the flag that makes
XNNPACK compute in fp16. An :class:`Accuracy` compares the results with those of the file's own precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from ._graph import Constant, Graph, Node, Value
from .errors import ArgumentError, UnsupportedError
from .ops import OPS, Refusal, check_op
from .ops._rules import TRANSPOSE_WEIGHTS
from .quantization import PerChannel, PerToken

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]

__all__ = ["PRECISIONS", "Accuracy", "OutputAccuracy", "apply"]

PRECISIONS = ("fp16", "int8-dynamic")
#: XNN_FLAG_FORCE_FP16_INFERENCE of xnnpack.h.
FORCE_FP16 = 0x04
#: Instruction sets with arithmetic in fp16; with others XNNPACK converts to fp32 and back, which is slower than fp32.
HALF_ARITHMETIC = ("avx512fp16", "neonfp16arith")
#: Below so many products per result, quantizing the input costs more than the int8 product saves.
MIN_DEPTH = 32


def apply(graph: Graph, precision: str) -> tuple[Graph, int]:
    """The graph to run and the flags to run it with.

    Raises
    ------
    UnsupportedError
        This CPU, or this graph, gains nothing from it.
    """
    if precision == "fp16":
        return graph, _half(graph)
    if precision == "int8-dynamic":
        rewritten = graph.caches.get(precision)
        if rewritten is None:
            rewritten = graph.caches.setdefault(precision, int8_dynamic(graph))
        return rewritten, 0
    raise ArgumentError(f"need a precision of {', '.join(PRECISIONS)} or None, found {precision!r}")


def _half(graph: Graph) -> int:
    from ._runtime import isa

    found = isa()
    if not set(found).intersection(HALF_ARITHMETIC):
        raise UnsupportedError(
            f"precision 'fp16' needs a CPU and a build with {' or '.join(HALF_ARITHMETIC)}, found {' '.join(found)}: "
            "XNNPACK would convert to fp32 for every sum, which is slower than fp32 itself")
    for value in graph.values:
        if value.datatype != "fp32" or value.dq_datatype is not None:
            raise UnsupportedError(f"precision 'fp16' needs a graph of fp32 alone, value {value.id} is "
                                   f"{value.dq_datatype or value.datatype}")
    return FORCE_FP16


# ---------------------------------------------------------------------------------------------------
# int8 with parameters computed at run time


def int8_dynamic(graph: Graph) -> Graph:
    """The graph with int8 filters, one scale per output channel, in fully connected layers and convolutions.

    Their inputs are quantized when they are known: each row of a fully connected layer by itself, each
    image of a convolution. Results are fp32 as before, and so is everything else.
    """
    rewriting = _Rewriting(graph)
    for node in graph.nodes:
        rewriting.node(node)
    if not rewriting.changed:
        raise UnsupportedError("precision 'int8-dynamic' needs a fully connected layer or a convolution of fp32 with a "
                               f"constant filter and {MIN_DEPTH} or more products per result, found none")
    return Graph(rewriting.values, rewriting.nodes, graph.inputs, graph.outputs, dialect="xn01", version=graph.version,
                 source=graph.source, container=graph.container, notes=graph.notes, owner=graph, limits=graph.limits)


class _Rewriting:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.values: list[Value] = list(graph.values)
        self.nodes: list[Node] = []
        self.changed = 0
        self._next = 1 + max(value.id for value in graph.values)
        # (value, axes per row) -> its quantized form; (filter, axis) -> int8 form.
        self._rows: dict[tuple[int, int], int] = {}
        self._filters: dict[tuple[int, int], Value | None] = {}

    def node(self, node: Node) -> None:
        """Take up a node, with an int8 filter where it can have one."""
        axis = 0
        together = 3
        if node.op.name == "fully_connected":
            axis, together = node.flags & TRANSPOSE_WEIGHTS, 1
        elif node.op.name not in ("conv2d", "conv_transpose2d"):
            self.nodes.append(node)
            return
        x, weights, bias = (None if id is None else self.graph.value(id) for id in node.inputs)
        out = self.graph.value(node.outputs[0])
        assert x is not None and weights is not None
        filter = None
        if (x.datatype == weights.datatype == out.datatype == "fp32" and x.constant is None and x.dq_datatype is None
                and weights.constant is not None and (bias is None or bias.constant is not None)
                and prod(weights.shape) // max(1, weights.shape[axis]) >= MIN_DEPTH):
            filter = self._filter(weights, axis)
        if filter is None:
            self.nodes.append(node)
            return
        quantized = Value(self._next, "qdint8", x.shape, quantization=PerToken(together))
        changed = node.replace(inputs=(quantized.id, filter.id, node.inputs[2]))
        try:
            check_op(changed, (quantized, filter, bias), (out,))
        except Refusal:
            # This XNNPACK has no such kernel.
            self.nodes.append(node)
            return
        self.nodes.append(changed.replace(inputs=(self._quantized(node, x, together), filter.id, node.inputs[2])))
        if filter not in self.values:
            self.values.append(filter)
        self.changed += 1

    def _quantized(self, node: Node, x: Value, together: int) -> int:
        """The id of a value's quantized form; one for all layers that read it."""
        id = self._rows.get((x.id, together))
        if id is None:
            id = self._rows[x.id, together] = self._new()
            self.values.append(Value(id, "qdint8", x.shape, quantization=PerToken(together)))
            self.nodes.append(Node(OPS["convert"], (x.id,), (id,), index=node.index, debug_handle=node.debug_handle))
        return id

    def _filter(self, weights: Value, axis: int) -> Value | None:
        """The filter in int8, or None if it holds what int8 can't say."""
        key = weights.id, axis
        if key not in self._filters:
            array = weights.array()
            others = tuple(each for each in range(array.ndim) if each != axis)
            with np.errstate(all="ignore"):
                scales = (np.abs(array).max(axis=others) / np.float32(127)).astype(np.float32)
            # A channel of zeros has no scale, and any will do.
            scales[scales == 0] = 1
            usable = np.isfinite(scales).all() and (scales >= np.finfo(np.float32).tiny).all()
            made = None
            if usable:
                shape = [1] * array.ndim
                shape[axis] = -1
                numbers = np.clip(np.rint(array / scales.reshape(shape)), -127, 127).astype(np.int8)
                made = Value(self._new(), "qcint8", weights.shape, quantization=PerChannel(scales, axis),
                             constant=_constant(numbers))
            self._filters[key] = made
        return self._filters[key]

    def _new(self) -> int:
        self._next += 1
        return self._next - 1


def _constant(array: Array) -> Constant:
    """A constant of our own, aligned, with bytes behind it that kernels may read."""
    room = np.zeros(array.nbytes + 128, np.uint8)
    start = -room.ctypes.data % 64
    room[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    return Constant(room[start : start + array.nbytes].data, reason="made for precision int8-dynamic")


# ---------------------------------------------------------------------------------------------------
# What it costs


@dataclass(frozen=True)
class OutputAccuracy:
    """How far an output is from what the file's own precision gives."""

    #: Largest and average distance.
    max_error: float
    mean_error: float
    #: Largest distance as a share of the largest number of the output.
    relative: float
    #: Cosine of the angle between the two, over all numbers.
    cosine: float
    #: Share of samples whose largest number stands in the same place; None where an output isn't one row per sample.
    same_largest: float | None
    #: Numbers that are finite in the file's precision and not in this one.
    lost: int

    @staticmethod
    def of(got: Array, want: Array) -> OutputAccuracy:
        rows = want.ndim == 2 and want.shape[1] > 1
        same = float((got.argmax(1) == want.argmax(1)).mean()) if rows and len(want) else None
        usable = np.isfinite(got) & np.isfinite(want)
        lost = int((~np.isfinite(got) & np.isfinite(want)).sum())
        one, two = got[usable].astype(np.float64), want[usable].astype(np.float64)
        if not one.size:
            return OutputAccuracy(0.0, 0.0, 0.0, 1.0, same, lost)
        error = np.abs(one - two)
        largest = float(np.abs(two).max())
        lengths = float(np.sqrt((one**2).sum() * (two**2).sum()))
        return OutputAccuracy(
            max_error=float(error.max()), mean_error=float(error.mean()),
            relative=float(error.max()) / largest if largest else 0.0,
            cosine=float((one * two).sum()) / lengths if lengths else 1.0, same_largest=same, lost=lost)


@dataclass(frozen=True)
class Accuracy:
    """Results in a lower precision against those of the file's own, over some samples of a batch."""

    precision: str
    samples: int
    outputs: tuple[OutputAccuracy, ...]

    @staticmethod
    def of(precision: str, got: Sequence[Array], want: Sequence[Array], samples: int) -> Accuracy:
        return Accuracy(precision, samples, tuple(OutputAccuracy.of(one, two) for one, two in zip(got, want)))

    def as_dict(self) -> dict[str, Any]:
        """The same in JSON's own types."""
        return {"precision": self.precision, "samples": self.samples,
                "outputs": [dict(vars(output)) for output in self.outputs]}

    def __str__(self) -> str:
        lines = [f"{self.precision} against the file's precision, {self.samples} samples:"]
        for position, each in enumerate(self.outputs):
            same = "" if each.same_largest is None else f", largest in the same place in {each.same_largest:.1%}"
            lost = f", {each.lost} numbers lost" if each.lost else ""
            lines.append(f"  output {position}: off by {each.max_error:.3g} at most ({each.relative:.2%} of the "
                         f"largest), {each.mean_error:.3g} on average{same}{lost}")
        return "\n".join(lines)
