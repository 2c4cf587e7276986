"""Graphs of one operator in any of its combinations of datatypes, with arrays to run them on and tolerances.

``case(name, types, **options)`` gives a :class:`Case`; the options are those of the function that is
registered for the operator below, sizes and flags mostly, so that a search can vary them.
"""

from __future__ import annotations

import contextlib
import math
import platform
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from xnnfast import Graph, Runtime, Value, reference
from xnnfast._graph import Node
from xnnfast.builder import GraphBuilder
from xnnfast.datatypes import DATATYPES
from xnnfast.ops import OPS
from xnnfast.ops._rules import KEEP_DIMS
from xnnfast.quantization import PerBlock, PerChannel, PerTensor, PerToken, f32_to_bf16
from xnnfast.reference.elementwise import BINARY, UNARY

Q8 = ("qint8", "quint8")
#: 8-bit results are exact where the reference imitates the kernels: hazards.md speaks of one step elsewhere.
STEPS = 0 if platform.machine() in ("x86_64", "AMD64") else 1

#: name -> function(maker, **options) -> value or values
MAKERS: dict[str, Callable[..., Any]] = {}


def maker(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        MAKERS.update(dict.fromkeys(names, function))
        return function
    return register


class Maker:
    """A graph of one operator in the making."""

    def __init__(self, name: str, types: Sequence[str], seed: int, wild: bool = False) -> None:
        self.name, self.op, self.types = name, OPS[name], tuple(types)
        self.ins, self.outs = types[:len(self.op.inputs)], types[len(self.op.inputs):]
        self.b = GraphBuilder()
        self.rng = np.random.default_rng(seed)
        #: Quantized with scales and zero points that fit nothing.
        self.wild = wild
        #: For each input how to draw it, and whether its first axis may change.
        self.feeds: list[tuple[Value, float, float, bool]] = []
        #: Length of the sums and bounds of their factors, for tolerances.
        self.terms, self.top = 0, (0.0, 0.0)

    def input(self, position: int, shape: Sequence[int], low: float = -2.0, high: float = 2.0, *, rows: int = 1,
              batch: bool = True) -> Value:
        """What comes in at a position; quantized row by row on its way if its type is qdint8."""
        datatype = self.ins[position]
        self.top = (max(abs(low), abs(high)), self.top[1])
        if datatype == "qdint8":
            source = "fp16" if self.outs[0] == "fp16" else "fp32"
            return self.b.convert(self._fed(source, shape, low, high, batch), "qdint8", PerToken(rows))
        return self._fed(datatype, shape, low, high, batch)

    def _fed(self, datatype: str, shape: Sequence[int], low: float, high: float, batch: bool) -> Value:
        value = self.b.input(shape, datatype, self.spread(datatype, low, high))
        self.feeds.append((value, low, high, batch and len(shape) > 0))
        return value

    def constant(self, position: int, shape: Sequence[int], low: float = -2.0, high: float = 2.0) -> Value:
        """The same as a constant, for operands that need not be one."""
        datatype = self.ins[position]
        quantization = self.spread(datatype, low, high)
        return self.b.constant(draw(self.rng, datatype, shape, low, high), datatype, quantization)

    def weights(self, position: int, shape: Sequence[int], axis: int, block: int = 32) -> Value:
        """A filter, whose channels are an axis."""
        datatype, rng = self.ins[position], self.rng
        top = 1.0
        if datatype in ("fp32", "fp16"):
            array = rng.uniform(-1, 1, shape).astype(DATATYPES[datatype].dtype)
            made = self.b.constant(array, datatype)
        elif datatype in Q8:
            entry = DATATYPES[datatype]
            array = rng.integers(entry.low, entry.high + 1, shape).astype(entry.dtype)
            zero_point = 0 if datatype == "qint8" else int(rng.integers(256)) if self.wild else 121
            scale = self.stretched(1 / 127)
            top = scale * 127
            made = self.b.constant(array, datatype, PerTensor(scale, zero_point))
        else:
            entry = DATATYPES[datatype]
            array = rng.integers(entry.low, entry.high + 1, shape).astype(np.int8)
            if datatype == "qbint4":
                scales = rng.uniform(0.5, 1, shape[0] * shape[1] // block).astype(np.float32) / 8
                made = self.b.constant(array, datatype, PerBlock(scales, 0, block))
            else:
                scales = rng.uniform(0.5, 1, shape[axis]) / self.stretched(-entry.low)
                top = float(scales.max()) * -entry.low
                made = self.b.constant(array, datatype, PerChannel(scales.astype(np.float32), axis))
        self.top = (self.top[0], top)
        return made

    def bias(self, position: int, outputs: int) -> Any:
        datatype = self.ins[position]
        if datatype == "-":
            return None
        if datatype in ("qint32", "qcint32"):
            return self.rng.integers(-2000, 2000, outputs).astype(np.int32)
        return self.rng.uniform(-2, 2, outputs).astype(DATATYPES[datatype].dtype)

    def stretched(self, number: float) -> float:
        return float(number * 2 ** self.rng.uniform(-4, 4)) if self.wild else number

    def spread(self, datatype: str, low: float, high: float) -> Any:
        quantization = spread(datatype, low, high)
        if self.wild and datatype in Q8:
            entry = DATATYPES[datatype]
            zero_point = int(self.rng.integers(entry.low, entry.high + 1))
            return PerTensor(float(np.float32(self.stretched(quantization.scale))), zero_point)
        return quantization

    def result(self, real: Any = None, *, like: Value | None = None) -> dict[str, Any]:
        """Type of the result as the builder takes it; 8-bit parameters fit real numbers, most of them."""
        datatype = self.outs[0]
        if datatype not in (*Q8, "qint32"):
            return {"datatype": datatype}
        if like is not None:
            return {"datatype": datatype, "quantization": like.quantization}
        real = np.asarray(real, np.float64)
        real = real[np.isfinite(real)]
        low, high = float(real.min()), float(real.max())
        # A tenth is cut off, so that saturation is seen as well.
        return {"datatype": datatype,
                "quantization": self.spread(datatype, low * 0.9, max(high * 0.9, low * 0.9 + 0.1))}

    def sums(self, inner: int) -> dict[str, Any]:
        """Type of a result of sums of that many products."""
        self.terms = inner
        bound = self.top[0] * self.top[1] * math.sqrt(inner) * 0.8
        return self.result([-bound, bound])


def spread(datatype: str, low: float, high: float) -> Any:
    """Parameters of a plainly quantized type that make its range low..high."""
    if datatype == "qint32":
        return PerTensor(0.25, 0)
    if datatype not in Q8:
        return None
    entry = DATATYPES[datatype]
    scale = float(np.float32((high - low) / 255))
    return PerTensor(scale, int(np.clip(round(entry.low - low / scale), entry.low, entry.high)))


def draw(rng: np.random.Generator, datatype: str, shape: Sequence[int], low: float, high: float) -> np.ndarray:
    """Stored numbers of a plain type."""
    entry = DATATYPES[datatype]
    if entry.quantization == "tensor" and entry.bits == 8:
        return rng.integers(entry.low, entry.high + 1, shape).astype(entry.dtype)
    if datatype in ("int32", "qint32"):
        return rng.integers(-50, 50, shape).astype(np.int32)
    real = rng.uniform(low, high, shape).astype(np.float32)
    return f32_to_bf16(real).view(entry.dtype) if datatype == "bf16" else real.astype(entry.dtype)


class Case:
    """A graph of one operator, ready to be compared with the reference.

    Attributes
    ----------
    graph : Graph
    node : Node
        The operator's own; others quantize its input.
    """

    def __init__(self, made: Maker, graph: Graph, node: Node) -> None:
        self.graph, self.node = graph, node
        self.name, self.op, self.types = made.name, made.op, made.types
        self.terms, self.top, self.feeds = made.terms, made.top, made.feeds

    def arrays(self, seed: int = 1, batch: int | None = None, shapes: Sequence[Any] | None = None) -> list[np.ndarray]:
        """Inputs of the graph: of the declared shapes, with another first axis where it is free, or of given shapes."""
        rng = np.random.default_rng(seed)
        if shapes is None:
            shapes = [value.shape if batch is None or not free else (batch, *value.shape[1:])
                      for value, _, _, free in self.feeds]
        return [draw(rng, value.datatype, shape, low, high)
                for (value, low, high, _), shape in zip(self.feeds, shapes)]

    @property
    def has_batch(self) -> bool:
        return any(free for *_, free in self.feeds)

    def check(self, arrays: Sequence[np.ndarray] | None = None, runtime: Runtime | None = None) -> Any:
        """The engine's results, after comparing them with the reference's."""
        arrays = self.arrays() if arrays is None else arrays
        got = (runtime or Runtime(self.graph)).run(*arrays)
        self.compare(got, reference.run(self.graph, *arrays))
        return got

    def compare(self, got: Sequence[np.ndarray], want: Sequence[np.ndarray]) -> None:
        assert len(got) == len(want)
        for value, one, other in zip(self.graph.outputs, got, want):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            agree(one, other, value.datatype if one.dtype != np.uint32 else "index", self)


def agree(got: np.ndarray, want: np.ndarray, datatype: str, of: Case | None = None) -> None:
    """Fail unless two results agree as far as the operator can promise."""
    if not got.size:
        return
    if datatype in Q8:
        steps = np.abs(got.astype(np.int64) - want.astype(np.int64))
        assert steps.max() <= STEPS, f"{(steps > STEPS).sum()} of {steps.size} differ, by up to {steps.max()} steps"
        return
    if datatype == "bf16":
        steps = np.abs(ordered(got.view(np.uint16)) - ordered(want.view(np.uint16)))
        # Its reference code rounds in between as well (hardswish).
        assert steps.max() <= 2, f"bf16 results differ by up to {steps.max()} in the last place"
        return
    if got.dtype.kind in "iu":
        np.testing.assert_array_equal(got, want)
        return
    exact = want.astype(np.float64)
    relative, absolute = tolerances(exact, datatype, of)
    with np.errstate(invalid="ignore"):
        off = np.abs(got.astype(np.float64) - exact) - (absolute + relative * np.abs(exact))
    off = np.where((got == want) | (np.isnan(got) & np.isnan(want)), -1, off)
    at = np.unravel_index(np.argmax(np.where(np.isnan(off), np.inf, off)), off.shape)
    place = tuple(map(int, at))
    assert off[at] <= 0, f"{(~(off <= 0)).sum()} of {off.size} differ, at {place} {got[at]!r} for {want[at]!r}"


def ordered(bits: np.ndarray) -> np.ndarray:
    """Bit patterns of 16-bit floats as numbers in the order of the floats."""
    whole = bits.astype(np.int64)
    return np.where(whole & 0x8000, 0x8000 - whole, whole)


def tolerances(want: np.ndarray, datatype: str, of: Case | None) -> tuple[float, Any]:
    """(relative, absolute) difference between float results that is no fault."""
    terms = of.terms if of is not None else 0
    if of is not None and "qdint8" in of.types:
        # The quantization of a row is computed once in fp32 and once in float64: a step now and then.
        return 0, 0.01 * np.abs(want).max(axis=-1, keepdims=True)
    if datatype == "fp16":
        # Sums are made in fp16 where the CPU can.
        return 2e-3, 2e-3 * math.sqrt(max(terms, 1)) * (of.top[0] * of.top[1] if terms else 1)
    if terms:
        # Biases are up to 2, which a small filter is not.
        # Each term is rounded by the sum so far, which grows with them.
        return 0, 1e-6 * math.sqrt(terms) * max(math.sqrt(terms) / 8, 1) * max(of.top[0] * of.top[1], 1)
    return 1e-6, 1e-6


# ---- the operators, by families; ``m`` is the maker


@maker("add", "subtract", "multiply", "divide", "minimum", "maximum", "prelu")
def binary(m: Maker, *, first: Sequence[int] = (2, 3, 5), second: Sequence[int] = (2, 3, 5),
           constant: bool | None = None, clamp: Any = None, low: float = -2.0) -> Any:
    """``constant`` makes the second operand one (a slope always is)."""
    constant = m.name == "prelu" if constant is None else constant
    # The batch of a full-sized constant stays what it is.
    free = len(first) >= len(second) and not (constant and len(first) == len(second) and second[:1] != (1,))
    span = (0.5, 2.0) if m.name == "divide" else (-2.0, 2.0)
    a = m.input(0, first, low, 3.0, batch=free)
    b = m.constant(1, second, *span) if constant else m.input(1, second, *span, batch=len(second) >= len(first))
    points = np.linspace(low, 3.0, 31)[:, None], np.linspace(*span, 31)[None]
    with np.errstate(all="ignore"):
        real = BINARY[m.name](*points)
    more = {} if clamp is None else {"clamp": clamp}
    return getattr(m.b, m.name)(a, b, **more, **m.result(real))


@maker(*UNARY)
def unary(m: Maker, *, shape: Sequence[int] = (2, 3, 7), clamp: Any = (-1.0, 1.5), other: bool = True,
          **attrs: Any) -> Any:
    """``other``: 8-bit results get parameters of their own."""
    low, high = (0.0, 4.0) if m.name in ("log", "square_root", "reciprocal_square_root") else (-4.0, 4.0)
    if m.ins[0] not in Q8 and low == 0:
        low = 0.01
    x = m.input(0, shape, low, high)
    with np.errstate(all="ignore"):
        real = UNARY[m.name](np.linspace(low, high, 255), {"negative_slope": 0.1, "alpha": 0.7, **attrs})
    if m.name == "clamp":
        return m.b.clamp(x, *clamp, **(m.result(real, like=None if other else x)))
    arguments = {"leaky_relu": (attrs.get("negative_slope", 0.1),), "elu": (attrs.get("alpha", 0.7),)}.get(m.name, ())
    return getattr(m.b, m.name)(x, *arguments, **m.result(real, like=None if other or m.ins[0] not in Q8 else x))


@maker("convert")
def convert(m: Maker, *, shape: Sequence[int] = (3, 4, 8), rows: int = 1, low: float = -3.0, high: float = 4.0) -> Any:
    # What is quantized row by row can't leave the graph: a layer brings it out.
    if m.outs[0] == "qdint8":
        x = m.input(0, shape, low, high)
        m.outs = ("qdint8",)
        quantized = m.b.convert(x, "qdint8", PerToken(rows))
        count = shape[-1]
        eye = m.b.constant((np.eye(count) * 64).astype(np.int8), "qcint8", PerChannel(np.full(count, 1 / 64), 0))
        return m.b.fully_connected(quantized, eye, datatype="fp16" if m.ins[0] == "fp16" else "fp32")
    x = m.input(0, shape, low, high)
    return m.b.convert(x, m.outs[0], m.spread(m.outs[0], low * 0.8, high * 0.9))


@maker("copy", "softmax")
def plain(m: Maker, *, shape: Sequence[int] = (2, 3, 7)) -> Any:
    x = m.input(0, shape)
    return getattr(m.b, m.name)(x, **m.result(like=x))


@maker("scaled_dot_product_attention")
def attention(m: Maker, *, batch: int = 2, heads: int = 3, tokens: int = 4, keys: int = 5, channels: int = 8,
              values: int = 6, shared: bool = False) -> Any:
    middle = () if shared else (heads,)
    m.top = (2.0, 2.0)
    operands = [m.input(0, (batch, heads, tokens, channels), -1, 1),
                m.input(1, (batch, *middle, keys, channels), -1, 1), m.input(2, (batch, *middle, keys, values), -1, 1),
                m.input(3, (channels,), 0.1, 0.5, batch=False), m.input(4, (tokens, keys), -1, 1, batch=False)]
    m.terms = channels
    return m.b.scaled_dot_product_attention(*operands)


@maker("fully_connected")
def fully_connected(m: Maker, *, lead: Sequence[int] = (3,), inner: int = 64, outer: int = 7, transpose: bool = False,
                    computed: bool = False, block: int = 32, clamp: Any = None) -> Any:
    """``computed``: filter and bias are inputs."""
    x = m.input(0, (*lead, inner), batch=len(lead) > 0)
    shape, axis = ((inner, outer), 1) if transpose else ((outer, inner), 0)
    if computed:
        m.top = (2.0, 1.0)
        weights = m.input(1, shape, -1, 1, batch=False)
        bias = None if m.ins[2] == "-" else m.input(2, (outer,), -1, 1, batch=False)
        m.top = (2.0, 1.0)
    else:
        weights, bias = m.weights(1, shape, axis, block), m.bias(2, outer)
    return m.b.fully_connected(x, weights, bias, transpose_weights=transpose, clamp=clamp, **m.sums(inner))


@maker("batch_matrix_multiply")
def batch_matrix_multiply(m: Maker, *, first: Sequence[int] = (2,), second: Sequence[int] = (2,), rows: int = 3,
                          inner: int = 16, columns: int = 5, transpose: bool = False, constant: bool = False) -> Any:
    x = m.input(0, (*first, rows, inner), batch=False)
    shape = (*second, columns, inner) if transpose else (*second, inner, columns)
    m.top = (2.0, 1.0)
    if m.ins[1] == "qcint8":
        b = m.weights(1, shape, len(shape) - (2 if transpose else 1))
    else:
        b = m.constant(1, shape, -1, 1) if constant else m.input(1, shape, -1, 1, batch=False)
        m.top = (2.0, 1.0)
    m.sums(inner)
    return m.b.batch_matrix_multiply(x, b, transpose_b=transpose)


def _image(m: Maker, batch: int, height: int, width: int, channels: int) -> Value:
    return m.input(0, (batch, height, width, channels), rows=3)


@maker("conv2d")
def conv2d(m: Maker, *, batch: int = 2, height: int = 6, width: int = 5, each_in: int = 4, each_out: int = 3,
           groups: int = 2, kernel: tuple[int, int] = (3, 2), clamp: Any = None, **geometry: Any) -> Any:
    x = _image(m, batch, height, width, each_in * groups)
    weights = m.weights(1, (each_out * groups, *kernel, each_in), 0)
    return m.b.conv2d(x, weights, m.bias(2, each_out * groups), groups=groups, clamp=clamp, **geometry,
                      **m.sums(kernel[0] * kernel[1] * each_in))


@maker("depthwise_conv2d")
def depthwise_conv2d(m: Maker, *, batch: int = 2, height: int = 6, width: int = 5, channels: int = 6,
                     multiplier: int = 2, kernel: tuple[int, int] = (3, 3), clamp: Any = None, **geometry: Any) -> Any:
    x = _image(m, batch, height, width, channels)
    weights = m.weights(1, (1, *kernel, channels * multiplier), 3)
    return m.b.depthwise_conv2d(x, weights, m.bias(2, channels * multiplier), clamp=clamp, **geometry,
                                **m.sums(kernel[0] * kernel[1]))


@maker("conv_transpose2d")
def conv_transpose2d(m: Maker, *, batch: int = 2, height: int = 4, width: int = 5, each_in: int = 4, each_out: int = 3,
                     groups: int = 2, kernel: tuple[int, int] = (3, 3), clamp: Any = None, **geometry: Any) -> Any:
    x = _image(m, batch, height, width, each_in * groups)
    weights = m.weights(1, (each_out * groups, *kernel, each_in), 0)
    return m.b.conv_transpose2d(x, weights, m.bias(2, each_out * groups), groups=groups, clamp=clamp, **geometry,
                                **m.sums(kernel[0] * kernel[1] * each_in))


@maker("average_pooling2d", "max_pooling2d", "argmax_pooling2d")
def pooling(m: Maker, *, batch: int = 2, height: int = 6, width: int = 7, channels: int = 5, pooling: Any = (3, 2),
            **geometry: Any) -> Any:
    x = _image(m, batch, height, width, channels)
    return getattr(m.b, m.name)(x, pooling, **geometry)


@maker("global_average_pooling2d")
def global_pooling(m: Maker, *, shape: Sequence[int] = (2, 5, 6, 7), keep_dims: bool = True, other: bool = True) -> Any:
    x = m.input(0, shape)
    return m.b.global_average_pooling2d(x, keep_dims=keep_dims, **m.result([-0.6, 0.7], like=None if other else x))


@maker("static_transpose")
def transpose(m: Maker, *, shape: Sequence[int] = (2, 3, 4, 5), perm: Sequence[int] = (0, 3, 1, 2)) -> Any:
    return m.b.static_transpose(m.input(0, shape, batch=perm[0] == 0), perm)


@maker("static_reshape")
def reshape(m: Maker, *, shape: Sequence[int] = (2, 3, 4), new_shape: Sequence[int] = (2, -1)) -> Any:
    # The reference takes a file's literal shapes as they are, so only the declared batch compares with it.
    return m.b.static_reshape(m.input(0, shape, batch=False), new_shape)


@maker("static_slice")
def slicing(m: Maker, *, shape: Sequence[int] = (2, 5, 6), offsets: Sequence[int] = (0, 1, 2),
            sizes: Any = (2, 3, 4)) -> Any:
    return m.b.static_slice(m.input(0, shape, batch=False), offsets, sizes)


@maker("static_constant_pad")
def pad(m: Maker, *, shape: Sequence[int] = (2, 3, 4), before: Sequence[int] = (0, 1, 0),
        after: Sequence[int] = (0, 2, 3), value: float = 0.75) -> Any:
    return m.b.static_constant_pad(m.input(0, shape), before, after, value)


@maker("static_resize_bilinear2d")
def resize(m: Maker, *, batch: int = 2, height: int = 4, width: int = 5, channels: int = 3, size: Any = (7, 6),
           **flags: Any) -> Any:
    return m.b.static_resize_bilinear2d(_image(m, batch, height, width, channels), size, **flags)


@maker("concatenate2", "concatenate3", "concatenate4", "concatenate5")
def concatenate(m: Maker, *, shape: Sequence[int] = (2, 3, 4), axis: int = 1, sizes: Sequence[int] = (1, 3, 2, 5, 4),
                constant: Sequence[int] = ()) -> Any:
    """``constant``: positions of operands that are constants."""
    operands = []
    for position in range(len(m.ins)):
        each = (*shape[:axis], sizes[position], *shape[axis + 1:])
        operands.append(m.constant(position, each) if position in constant else
                        m.input(position, each, batch=axis != 0 and not constant))
    return getattr(m.b, m.name)(*operands, axis)


# ---- operators that files can't hold, made without a builder


ENGINE_ONLY: dict[str, tuple[Sequence[int], dict[str, Any], int]] = {
    "static_reduce": ((2, 3, 4, 5), {"reduction_axes": (1, -2)}, KEEP_DIMS),
    "static_reshape_rows": ((2, 3, 4), {"new_shape": (0, 4, 3), "rows": (0, 1, 1, 12, 1)}, 0),
    "static_expand_dims": ((2, 3), {"new_axes": (0, 2)}, 0),
}


def _engine_only(made: Maker) -> tuple[Graph, Node]:
    shape, attrs, flags = ENGINE_ONLY[made.name]
    x = made.input(0, shape)
    node = Node(made.op, (x.id,), (1,), attrs, flags=flags, index=0)
    x = x.replace(external_id=0)
    out = Value(1, made.outs[0], made.op.shape(node, [x.shape])[0], quantization=x.quantization, external_id=1,
                is_output=True)
    return Graph([x, out], [node], [x], [out]), node


def case(name: str, types: Sequence[str], *, seed: int = 0, wild: bool = False, **options: Any) -> Case:
    """A graph of the operator on those datatypes, inputs then outputs as in its row."""
    made = Maker(name, types, seed, wild)
    if name in ENGINE_ONLY:
        return Case(made, *_engine_only(made))
    results = MAKERS[name](made, **options)
    for value in results if isinstance(results, tuple) else (results,):
        made.b.output(value)
    graph = made.b.graph()
    return Case(made, graph, next(node for node in graph.nodes if node.op is made.op))


@contextlib.contextmanager
def told(*what: Any) -> Iterator[None]:
    """Failures inside say what they are about, where one test goes over many cases."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{', '.join(map(str, what))}: {error}") from None


def combinations() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every operator with every combination of datatypes that its row calls legal."""
    for name, op in OPS.items():
        for types in op.datatypes:
            yield name, types
