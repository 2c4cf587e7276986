"""The NumPy interpreter against numbers worked out by hand and against loops over single pixels."""

import itertools
import math
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xnnfast import reference
from xnnfast._graph import Constant, Graph, Node, Value
from xnnfast.datatypes import DATATYPES
from xnnfast.errors import ArgumentError, DtypeError, ShapeError
from xnnfast.ops import OPS, Refusal
from xnnfast.quantization import (
    PerBlock,
    PerChannel,
    PerTensor,
    PerToken,
    bf16_to_f32,
    f32_to_bf16,
    pack_int4,
    quantize,
)

F32 = np.float32
INF, NAN = np.inf, np.nan
NAMES = {np.dtype(np.float32): "fp32", np.dtype(np.float16): "fp16", np.dtype(np.int32): "int32"}
SIDES = ("padding_top", "padding_right", "padding_bottom", "padding_left")


@dataclass
class T:
    """A tensor: its stored numbers (4-bit ones unpacked), type and quantization."""

    array: np.ndarray
    datatype: str = ""
    quantization: object = None
    constant: bool = False

    def __post_init__(self):
        self.array = np.asarray(self.array)
        self.datatype = self.datatype or NAMES[self.array.dtype]


def q8(array, scale=1.0, zero_point=0, constant=False):
    array = np.asarray(array)
    return T(array, {"i": "qint8", "u": "quint8"}[array.dtype.kind], PerTensor(scale, zero_point), constant)


def const(array, datatype="", quantization=None):
    return T(array, datatype, quantization, constant=True)


@dataclass
class Program:
    """Values and nodes of a graph in the making."""

    values: list = field(default_factory=list)
    nodes: list = field(default_factory=list)
    fed: list = field(default_factory=list)

    def add(self, tensor):
        number = len(self.values)
        more = {}
        if tensor.constant:
            stored = pack_int4(tensor.array) if DATATYPES[tensor.datatype].bits == 4 else tensor.array
            more = {"constant": Constant(bytes(stored.tobytes()) + bytes(16), index=number)}
        else:
            more = {"is_input": True, "external_id": len(self.fed)}
            self.fed.append(tensor.array)
        self.values.append(Value(number, tensor.datatype, tensor.array.shape, quantization=tensor.quantization, **more))
        return number

    def node(self, name, inputs, outs, attrs=None, **more):
        op = OPS[name]
        shapes = [None if number is None else self.values[number].shape for number in inputs]
        numbers = []
        node = Node(op, inputs, (), attrs, index=len(self.nodes), **more)
        for shape, out in zip(op.shape(node, shapes), outs):
            numbers.append(len(self.values))
            self.values.append(Value(numbers[-1], out.datatype, shape, quantization=out.quantization))
        self.nodes.append(node.replace(outputs=tuple(numbers)))
        return numbers

    def graph(self, *outputs):
        external = len(self.fed)
        values = [value.replace(is_output=True, external_id=external + outputs.index(value.id))
                  if value.id in outputs and not value.is_input else
                  value.replace(is_output=True) if value.id in outputs else value for value in self.values]
        return Graph(values, self.nodes, [value for value in values if value.is_input],
                     [values[number] for number in outputs])


def like(datatype, quantization=None):
    """A tensor of which only the type counts: an output."""
    return T(np.zeros(0), datatype, quantization)


def apply(name, *tensors, out=None, attrs=None, **more):
    """The first output of a graph of one node."""
    program = Program()
    tensors = [None if t is None else t if isinstance(t, T) else T(np.asarray(t)) for t in tensors]
    inputs = tuple(None if t is None else program.add(t) for t in tensors)
    out = out or like(tensors[0].datatype, tensors[0].quantization)
    outs = [out] * len(OPS[name].outputs)
    results = reference.run(program.graph(*program.node(name, inputs, outs, attrs, **more)), *program.fed)
    return results[0] if len(results) == 1 else results


def conv_attrs(kernel, pads=(0, 0, 0, 0), stride=(1, 1), dilation=(1, 1), groups=1, inputs=1, outputs=1, adjust=(0, 0)):
    return {**dict(zip(SIDES, pads)), "kernel_height": kernel[0], "kernel_width": kernel[1],
            "subsampling_height": stride[0],
            "subsampling_width": stride[1], "dilation_height": dilation[0], "dilation_width": dilation[1],
            "groups": groups, "group_input_channels": inputs, "group_output_channels": outputs,
            "adjustment_height": adjust[0], "adjustment_width": adjust[1]}


def pool_attrs(window, pads=(0, 0, 0, 0), stride=(1, 1), dilation=(1, 1)):
    return {**dict(zip(SIDES, pads)), "pooling_height": window[0], "pooling_width": window[1],
            "stride_height": stride[0],
            "stride_width": stride[1], "dilation_height": dilation[0], "dilation_width": dilation[1]}


def argmax_attrs(window, pads=(0, 0, 0, 0)):
    return {**dict(zip(SIDES, pads)), "pooling_height": window[0], "pooling_width": window[1]}


def ramp(*shape, start=1, dtype=F32):
    return (np.arange(math.prod(shape)) + start).reshape(shape).astype(dtype)


# ---- the interpreter


def test_every_operator_has_a_reference():
    assert set(reference.REFERENCES) == set(OPS)


def test_a_value_that_is_input_and_output_is_copied():
    program = Program()
    number = program.add(T(F32([1, 2])))
    x = F32([3, 4])
    (y,) = reference.run(program.graph(number), x)
    assert y.tolist() == [3, 4]
    assert not np.shares_memory(x, y)


def test_an_intermediate_value_may_be_an_output():
    program = Program()
    x = program.add(T(F32([-1, 2, 3])))
    (middle,) = program.node("add", (x, x), [like("fp32")])
    (last,) = program.node("clamp", (middle,), [like("fp32")], clamp=(0, 5))
    first, second = reference.run(program.graph(middle, last), *program.fed)
    assert first.tolist() == [-2, 4, 6]
    assert second.tolist() == [0, 4, 5]


def test_trace_has_every_value_and_operands_their_meaning():
    program = Program()
    x = program.add(T(F32([[1, 2]])))
    weights = program.add(const(np.array([[1, 1]], np.int8), "qcint8", PerChannel(F32([1]), 0)))
    (rows,) = program.node("convert", (x,), [like("qdint8", PerToken(1))])
    (y,) = program.node("fully_connected", (rows, weights, None), [like("fp32")])
    graph = program.graph(y)
    traced = reference.trace(graph, *program.fed)
    assert set(traced) == {x, rows, y}
    assert traced[rows].dtype == np.int8
    meaning = reference.operands(graph, *program.fed)[rows]
    np.testing.assert_allclose(meaning.real, [[1, 2]], rtol=0.01)
    np.testing.assert_array_equal(traced[y], reference.run(graph, *program.fed)[0])


def test_a_batch_may_differ_from_the_declared_one():
    program = Program()
    x = program.add(T(np.zeros((1, 16), F32)))
    weights = program.add(const(ramp(16, 16, start=0) / 256))
    (y,) = program.node("fully_connected", (x, weights, None), [like("fp32")])
    graph = program.graph(y)
    batch = ramp(10, 16)
    np.testing.assert_array_equal(reference.run(graph, batch)[0], batch @ (ramp(16, 16, start=0) / 256).T)
    assert reference.run(graph, batch[:0])[0].shape == (0, 16)


def test_wrong_arrays_are_refused_by_name():
    program = Program()
    x = program.add(T(np.zeros((2, 3), F32)))
    graph = program.graph(*program.node("negate", (x,), [like("fp32")]))
    with pytest.raises(ArgumentError, match="1 input, found 2"):
        reference.run(graph, np.zeros((2, 3), F32), np.zeros((2, 3), F32))
    for other in (np.float64, np.float16, np.int64, np.bool_, object, np.complex64, ">f4"):
        with pytest.raises(DtypeError, match=r"input 0.*float32"):
            reference.run(graph, np.zeros((2, 3), other))
    with pytest.raises(DtypeError):
        reference.run(graph, [[1.0, 2, 3], [4, 5, 6]])
    with pytest.raises(ShapeError, match="rank 2"):
        reference.run(graph, np.zeros((2, 3, 1), F32))
    # A Fortran array is an array like others.
    other = np.asfortranarray(F32([[1, 2, 3], [4, 5, 6]]))
    assert reference.run(graph, other)[0].tolist() == [[-1, -2, -3], [-4, -5, -6]]


def test_an_int8_array_is_no_quint8():
    program = Program()
    x = program.add(q8(np.zeros(2, np.uint8)))
    graph = program.graph(*program.node("negate", (x,), [like("quint8", PerTensor(1, 0))]))
    with pytest.raises(DtypeError):
        reference.run(graph, np.zeros(2, np.int8))


def test_a_value_of_the_old_dialect_is_quantized_on_its_way_in():
    program = Program()
    x = program.add(T(F32([[1, 2], [100, 200]])))
    weights = program.add(const(np.array([[1, 1]], np.int8), "qcint8", PerChannel(F32([1]), 0)))
    (y,) = program.node("fully_connected", (x, weights, None), [like("fp32")])
    graph = program.graph(y)
    values = [value.replace(dq_datatype="qint8") if value.id == x else value for value in graph.values]
    graph = Graph(values, graph.nodes, [values[x]], [values[y]], dialect="xn00")
    got = reference.run(graph, *program.fed)[0]
    assert got.dtype == F32
    np.testing.assert_allclose(got, [[3], [300]], rtol=0.01)
    assert (got != [[3], [300]]).any()


# ---- element by element


def test_binary_operators_broadcast():
    assert apply("subtract", F32([[1], [2]]), F32([[10, 20, 30]])).tolist() == [[-9, -19, -29], [-8, -18, -28]]
    assert apply("add", F32([[1, 2, 3], [4, 5, 6]]), F32([[10, 20, 30]])).tolist() == [[11, 22, 33], [14, 25, 36]]
    assert apply("divide", F32([4]), F32([1, 2, 4])).tolist() == [4, 2, 1]
    assert apply("minimum", F32([2]), F32([[[1, 2, 3]]])).tolist() == [[[1, 2, 2]]]
    assert apply("prelu", F32([-1]), F32([1, 2, 3])).tolist() == [-1, -2, -3]
    assert apply("multiply", np.ones((1, 2, 1, 2, 1, 2), F32), np.ones((2, 1, 2, 1, 2, 1), F32)).shape == (2,) * 6


def test_scalars_stay_scalars():
    assert apply("add", F32(2), F32([1, 2, 3])).tolist() == [3, 4, 5]
    y = apply("add", F32(2), F32(3))
    assert isinstance(y, np.ndarray)
    assert (y.shape, y.dtype, float(y)) == ((), F32, 5.0)


def test_minimum_and_maximum_keep_nan():
    a, b = F32([NAN, 1, NAN, 2]), F32([1, NAN, NAN, 3])
    for name, last in (("minimum", 2), ("maximum", 3)):
        np.testing.assert_array_equal(apply(name, a, b), [NAN, NAN, NAN, last])


def test_limits_keep_nan():
    x = F32([NAN, -INF, INF, -1, 0.5])
    np.testing.assert_array_equal(apply("clamp", x, clamp=(0.0, 6.0)), [NAN, 0, 6, 0, 0.5])
    x = F32([[NAN, 1]])
    np.testing.assert_array_equal(apply("fully_connected", x, const(F32([[1, 1]])), None, clamp=(0.0, 6.0)), [[NAN]])
    x = np.ones((1, 2, 2, 1), F32)
    x[0, 1, 0, 0] = NAN
    for name in ("max_pooling2d", "average_pooling2d"):
        assert np.isnan(apply(name, x, attrs=pool_attrs((2, 2)))).all()


def test_roots_at_the_edge():
    x = F32([INF, 0, -0.0, 4, -1])
    np.testing.assert_array_equal(apply("square_root", x), [INF, 0, -0.0, 2, NAN])
    np.testing.assert_array_equal(apply("reciprocal_square_root", x), [0, INF, -INF, 0.5, NAN])


FUNCTIONS = {
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "floor": math.floor,
    "ceiling": math.ceil,
    "square_root": lambda x: math.sqrt(x) if x >= 0 else NAN,
    "reciprocal_square_root": lambda x: 1 / math.sqrt(x) if x > 0 else NAN,
    "gelu": lambda x: x * 0.5 * math.erfc(-x / math.sqrt(2)),
    "hardswish": lambda x: x * min(max(x + 3, 0), 6) / 6,
    "log": lambda x: math.log(x) if x > 0 else NAN,
    "negate": lambda x: -x,
    "square": lambda x: x * x,
    "abs": abs,
    "sine": math.sin,
    "cosine": math.cos,
    "exp": math.exp,
    "tanh": math.tanh,
    "leaky_relu": lambda x: x if x >= 0 else x * 0.125,
    "elu": lambda x: x if x >= 0 else 0.75 * math.expm1(x),
    "clamp": lambda x: min(max(x, -1.5), 2.0),
}
EXTRA = {"leaky_relu": {"attrs": {"negative_slope": 0.125}}, "elu": {"attrs": {"alpha": 0.75}},
         "clamp": {"clamp": (-1.5, 2.0)}}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_unary_operators_agree_with_the_standard_library(name):
    x = F32([-7.25, -3, -2.5, -1, -0.5, -1e-3, 1e-3, 0.5, 1, 2.5, 3, 7.25, 20])
    want = [FUNCTIONS[name](float(number)) for number in x]
    got = apply(name, x, **EXTRA.get(name, {}))
    assert got.dtype == F32
    np.testing.assert_allclose(got, np.float64(want), rtol=6e-8, atol=1e-18)
    half = apply(name, x.astype(np.float16), **EXTRA.get(name, {}))
    assert half.dtype == np.float16
    want = [FUNCTIONS[name](float(number)) for number in x.astype(np.float16)]
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(half, np.float64(want).astype(np.float16))


@pytest.mark.parametrize("name", sorted(set(FUNCTIONS) - {"clamp", "leaky_relu"}))
@pytest.mark.parametrize(("dtype", "zero_point"), [(np.int8, 0), (np.int8, -30), (np.uint8, 128)])
def test_8_bit_functions_round_away_from_zero_as_their_tables_do(name, dtype, zero_point):
    stored = np.arange(256, dtype=np.uint8).view(dtype)
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    got = apply(name, q8(stored, 0.0625, zero_point), out=like(q8(stored).datatype, PerTensor(0.03125, 3)),
                **EXTRA.get(name, {}))
    for number, result in zip(stored, got):
        x = (int(number) - zero_point) * 0.0625
        real = {"log": -INF, "reciprocal_square_root": INF}.get(name) if x == 0 else None
        real = FUNCTIONS[name](x) if real is None else real
        moved = F32(real) * F32(32) + F32(3)
        want = 0 if math.isnan(moved) else min(max(moved, low), high)
        want = math.copysign(math.floor(abs(want) + 0.5), want)
        assert result == want, (number, real)


def test_gelu_keeps_its_tail():
    assert apply("gelu", F32([-10])) == pytest.approx(-10 * 0.5 * math.erfc(10 / math.sqrt(2)), rel=1e-7)


def test_softmax_of_infinite_rows():
    x = F32([[1000, 1000, -1000], [-INF, 0, 1], [-INF] * 3, [INF, 0, 0], [NAN, 0, 0], [1, 1, 1]])
    got = apply("softmax", x)
    np.testing.assert_allclose(got[:2], [[0.5, 0.5, 0], [0, 0.26894142, 0.73105858]], rtol=1e-6)
    assert np.isnan(got[2:5]).all()
    np.testing.assert_array_equal(got[5], F32([1, 1, 1]) / F32(3))


def test_int32_wraps():
    top = np.int32([2**31 - 1, -(2**31), 7])
    other = np.int32([1, -1, 2])
    assert apply("add", top, other).tolist() == [-(2**31), 2**31 - 1, 9]
    assert apply("subtract", top, other).tolist() == [2**31 - 2, -(2**31) + 1, 5]
    assert apply("multiply", top, np.int32([2] * 3)).tolist() == [-2, 0, 14]
    assert apply("maximum", top, other).tolist() == [2**31 - 1, -1, 7]
    assert apply("abs", top).tolist() == [2**31 - 1, -(2**31), 7]


def test_bf16_loses_its_low_bits():
    x = T(f32_to_bf16(F32([1, 2, -3])), "bf16")
    y = T(f32_to_bf16(F32([1 / 256, 3 / 128, 1])), "bf16")
    got = apply("add", x, y)
    assert bf16_to_f32(got.view(np.uint16)).tolist() == [1, 2 + 1 / 64, -2]
    assert bf16_to_f32(apply("clamp", x, clamp=(0.0, 1.0)).view(np.uint16)).tolist() == [1, 1, 0]


# ---- quantization


def test_convert_rounds_half_to_even_and_saturates():
    x = F32([0.5, 1.5, 2.5, -0.5, 1e9, -INF, NAN])
    assert apply("convert", x, out=like("qint8", PerTensor(1, 0))).tolist() == [0, 2, 2, 0, 127, -128, 127]


def test_convert_between_all_kinds_of_numbers():
    x = F32([-1.5, 0.25, 3])
    assert apply("convert", x, out=like("fp16")).dtype == np.float16
    assert apply("convert", np.float16(x), out=like("fp32")).tolist() == x.tolist()
    assert apply("convert", q8(np.int8([-128, 0, 127]), 0.5, 1), out=like("fp32")).tolist() == [-64.5, -0.5, 63]
    # Within a type halves go up, else away from zero, with the zero point added before.
    half = like("qint8", PerTensor(2, -10))
    assert apply("convert", q8(np.int8([-3, 0, 3]), 1, 0), out=half).tolist() == [-11, -10, -8]
    assert apply("convert", q8(np.uint8([125, 128, 131]), 1, 128), out=half).tolist() == [-12, -10, -9]
    assert apply("convert", F32([2.5, -2.5, NAN, 1e20]), out=like("int32")).tolist() == [3, -3, 0, 2147483520]
    assert apply("convert", np.int32([3, -4]), out=like("fp32")).tolist() == [3, -4]
    assert apply("convert", np.int32([3, -4]), out=like("qint8", PerTensor(0.5, 1))).tolist() == [7, -7]


def test_quantized_sums_round_halves_up():
    a, b = q8(np.int8([10, 100, -100]), 0.5, 2), q8(np.int8([1, 100, -100]), 0.25, -3)
    # 4 + 1 = 5, 49 + 25.75, -51 - 24.25; a step of 0.5 from zero point 1
    assert apply("add", a, b, out=like("qint8", PerTensor(0.5, 1))).tolist() == [11, 127, -128]
    assert apply("subtract", a, b, out=like("qint8", PerTensor(0.5, 1))).tolist() == [7, 48, -52]


def test_quantized_leaky_relu_has_multipliers_of_256ths():
    x = q8(np.int8([-100, -1, 0, 1, 100]), 0.5, 0)
    # 26 / 256 stand for 0.1.
    got = apply("leaky_relu", x, attrs={"negative_slope": 0.1}, out=like("qint8", PerTensor(0.5, 0)))
    assert got.tolist() == [-10, 0, 0, 1, 100]
    assert math.floor(-100 * 26 / 256 + 0.5) == -10


def test_quantized_products_round_half_to_even():
    a, b = q8(np.int8([1, 3, 5, -1, 127])), q8(np.int8([1, 1, 1, 1, 127]))
    assert apply("multiply", a, b, out=like("qint8", PerTensor(2, 0))).tolist() == [0, 2, 2, 0, 127]


def test_limits_of_quantized_values_are_rounded():
    x = q8(np.int8([-100, 0, 3, 4, 100]), 0.5, 1)
    # 0.6 is 1.2 steps above zero point 1: 2.2, so 2.
    assert apply("clamp", x, clamp=(-0.6, 0.6)).tolist() == [0, 0, 2, 2, 2]
    assert apply("clamp", x, clamp=(-INF, INF)).tolist() == x.array.tolist()


def test_static_int8_is_exact_with_ties_to_even():
    x = q8(np.int8([[1], [3], [5], [-1], [-3], [127]]), 0.5)
    weights = const(np.int8([[1]]), "qint8", PerTensor(1, 0))
    out = like("qint8", PerTensor(1, 10))
    assert apply("fully_connected", x, weights, None, out=out).ravel().tolist() == [10, 12, 12, 10, 8, 74]


def test_static_int8_uses_a_float32_factor():
    # The exact product 16777217 * 2**-20 is above 16.0000009, float32 sums see 16777216.
    x = q8(np.int8([[1]]), 1)
    weights = const(np.int8([[0]]), "qint8", PerTensor(0.75, 0))
    bias = const(np.int32([2**24 + 1]), "qint32", PerTensor(0.75, 0))
    total = apply("fully_connected", x, weights, bias, out=like("qint8", PerTensor(0.75 * 2**24, 0)))
    assert total.tolist() == [[1]]
    scale = F32(0.1) * F32(0.3) / F32(0.7)
    x, weights = q8(np.int8([[100]]), F32(0.1)), const(np.int8([[3]]), "qint8", PerTensor(F32(0.3), 0))
    got = apply("fully_connected", x, weights, None, out=like("qint8", PerTensor(F32(0.7), 0)))
    assert got.tolist() == [[int(np.rint(F32(300) * scale))]]


def test_int8_layers_saturate_and_are_limited():
    x = q8(np.int8([[127, 127]]), 1)
    weights = const(np.int8([[127, 127], [-128, -128], [1, 0]]), "qcint8", PerChannel(F32([1, 1, 0.5]), 0))
    bias = const(np.int32([0, 0, 1]), "qcint32", PerChannel(F32([1, 1, 0.5]), 0))
    out = like("qint8", PerTensor(1, 0))
    assert apply("fully_connected", x, weights, bias, out=out).tolist() == [[127, -128, 64]]
    assert apply("fully_connected", x, weights, bias, out=out, clamp=(0.0, 6.0)).tolist() == [[6, 0, 6]]


def test_unsigned_layers_subtract_both_zero_points():
    x = q8(np.uint8([[130, 120]]), 1, 128)
    weights = const(np.uint8([[3, 1]]), "quint8", PerTensor(1, 2))
    # 2 * 1 + -8 * -1
    assert apply("fully_connected", x, weights, None, out=like("quint8", PerTensor(1, 5))).tolist() == [[15]]


def test_int8_padding_is_the_zero_point():
    x = q8(np.full((1, 2, 2, 1), 5, np.int8), 0.5, 3)
    weights = const(np.ones((1, 3, 3, 1), np.int8), "qint8", PerTensor(1, 0))
    got = apply("conv2d", x, weights, None, out=like("qint8", PerTensor(1, 0)), attrs=conv_attrs((3, 3), (1, 1, 1, 1)))
    assert got.ravel().tolist() == [4, 4, 4, 4]
    pad = {"pre_paddings": (0, 1, 0, 0), "post_paddings": (0, 0, 0, 0), "padding_value": 1.0}
    assert apply("static_constant_pad", x, attrs=pad).ravel().tolist() == [5] * 6


def test_quantized_means_are_exact():
    x = q8(np.int8([[[[1, 2]], [[2, 3]]]]), 1)
    got = apply("global_average_pooling2d", x, out=like("qint8", PerTensor(1, 7)), flags=0x40)
    assert got.shape == (1, 1, 1, 2)
    # 1.5 and 2.5 go to the even 2.
    assert got.ravel().tolist() == [9, 9]


def test_dynamic_rows_do_not_see_each_other():
    rows = F32([[1, 2], [100, 200], [0.001, 0.002], [0, 0]])

    def layer(x, bias=None):
        program = Program()
        number = program.add(T(x))
        weights = program.add(const(np.int8([[1, 1]]), "qcint8", PerChannel(F32([1]), 0)))
        bias = None if bias is None else program.add(const(F32([bias])))
        (quantized,) = program.node("convert", (number,), [like("qdint8", PerToken(1))])
        (y,) = program.node("fully_connected", (quantized, weights, bias), [like("fp32")])
        return reference.run(program.graph(y), x)[0]

    got = layer(rows)
    np.testing.assert_allclose(got[:3], [[3], [300], [0.003]], rtol=0.01)
    np.testing.assert_allclose(got[:3], [[2.996], [300.39], [0.003004]], rtol=2e-3)
    for index in range(len(rows)):
        np.testing.assert_array_equal(layer(rows[index:index + 1]), got[index:index + 1])
    assert layer(rows, 7.5)[3] == 7.5
    spoiled = layer(np.concatenate([F32([[NAN, 1]]), rows]))
    assert np.isnan(spoiled[0]).all()
    np.testing.assert_array_equal(spoiled[1:], got)


@pytest.mark.parametrize(("byte", "want"), [(0x98, 10), (0x89, 1)])
def test_4_bit_weights_have_the_even_element_in_the_low_nibble(byte, want):
    weights = np.int8([[(byte & 15) - 8, (byte >> 4) - 8]])
    got = apply("fully_connected", F32([[1, 10]]), const(weights, "qcint4", PerChannel(F32([1]), 0)), None)
    assert got.tolist() == [[want]]


def test_block_scales_belong_to_blocks_of_inputs():
    weights = np.ones((2, 64), np.int8)
    scales = f32_to_bf16(F32([1, 2, 4, 8]))
    x = np.ones((1, 64), F32)
    program = Program()
    number = program.add(T(x))
    filters = program.add(const(weights, "qbint4", PerBlock(scales, 0, 32)))
    (rows,) = program.node("convert", (number,), [like("qdint8", PerToken(1))])
    (y,) = program.node("fully_connected", (rows, filters, None), [like("fp32")])
    np.testing.assert_allclose(reference.run(program.graph(y), x)[0], [[96, 384]], rtol=0.005)


def test_half_layers_round_their_float_weights():
    third = F32(1) / F32(3)
    got = apply("fully_connected", np.float16([[1024]]), const(F32([[third]])), const(F32([third])), out=like("fp16"))
    half = np.float64(np.float16(third))
    assert got == np.float16(1024 * half + half)


# ---- matrix products


def test_fully_connected_flags():
    x, weights = ramp(2, 3, 4), ramp(4, 5)
    want = x @ weights
    np.testing.assert_array_equal(apply("fully_connected", x, const(weights), None, flags=1), want)
    np.testing.assert_array_equal(apply("fully_connected", x, const(weights.T.copy()), None), want)
    flat = apply("fully_connected", x, const(weights), const(F32([1, 2, 3, 4, 5])), flags=5)
    np.testing.assert_array_equal(flat, want.reshape(6, 5) + F32([1, 2, 3, 4, 5]))


def test_batched_products_broadcast():
    eye = np.stack([np.eye(2), 2 * np.eye(2)]).astype(F32)
    x = F32([[[0, 1], [2, 3]]])
    want = [[[0, 1], [2, 3]], [[0, 2], [4, 6]]]
    assert apply("batch_matrix_multiply", x, eye).tolist() == want
    assert apply("batch_matrix_multiply", x[0], eye).tolist() == want
    a, b = ramp(2, 3, 4), ramp(2, 5, 4)
    np.testing.assert_array_equal(apply("batch_matrix_multiply", a, b, flags=1), a @ b.transpose(0, 2, 1))


@pytest.mark.parametrize("shared", [False, True])
def test_attention_is_softmax_of_scores_times_values(shared):
    rng = np.random.default_rng(7)
    n, h, t, u, c, d = 2, 3, 4, 5, 6, 7
    query = rng.normal(size=(n, h, t, c)).astype(F32)
    key = rng.normal(size=(n, u, c) if shared else (n, h, u, c)).astype(F32)
    value = rng.normal(size=(n, u, d) if shared else (n, h, u, d)).astype(F32)
    scale, mask = rng.normal(size=c).astype(F32), rng.normal(size=(t, u)).astype(F32)
    got = apply("scaled_dot_product_attention", query, key, value, scale, mask)
    want = np.zeros((n, h, t, d))
    for i, j, k in itertools.product(range(n), range(h), range(t)):
        keys, values = (key[i], value[i]) if shared else (key[i, j], value[i, j])
        scores = [float(mask[k, o]) + sum(float(query[i, j, k, m]) * float(scale[m]) * float(keys[o, m])
                                          for m in range(c)) for o in range(u)]
        weights = np.exp(np.array(scores) - max(scores))
        want[i, j, k] = weights / weights.sum() @ values.astype(np.float64)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)


# ---- convolutions


def naive_conv(x, weights, bias, attrs, same=False):
    """Grouped convolution, pixel by pixel."""
    n, height, width, _ = x.shape
    outputs, kh, kw, inputs = weights.shape
    sh, sw = attrs["subsampling_height"], attrs["subsampling_width"]
    dh, dw = attrs["dilation_height"], attrs["dilation_width"]
    top, left = attrs["padding_top"], attrs["padding_left"]
    if same:
        oh, ow = math.ceil(height / sh), math.ceil(width / sw)
        top = max(0, (oh - 1) * sh + (kh - 1) * dh + 1 - height) // 2
        left = max(0, (ow - 1) * sw + (kw - 1) * dw + 1 - width) // 2
    else:
        oh = (top + height + attrs["padding_bottom"] - (kh - 1) * dh - 1) // sh + 1
        ow = (left + width + attrs["padding_right"] - (kw - 1) * dw - 1) // sw + 1
    y = np.zeros((n, oh, ow, outputs), x.dtype)
    each_out = outputs // attrs["groups"]
    for b, i, j, o in np.ndindex(y.shape):
        first = o // each_out * inputs
        total = 0 if bias is None else bias[o]
        for ki, kj, c in np.ndindex(kh, kw, inputs):
            row, column = i * sh - top + ki * dh, j * sw - left + kj * dw
            if 0 <= row < height and 0 <= column < width:
                total += x[b, row, column, first + c] * weights[o, ki, kj, c]
        y[b, i, j, o] = total
    return y


def naive_transposed(x, weights, bias, attrs):
    """Transposed convolution, by letting each input element add its share."""
    n, height, width, _ = x.shape
    outputs, kh, kw, inputs = weights.shape
    sh, sw = attrs["subsampling_height"], attrs["subsampling_width"]
    dh, dw = attrs["dilation_height"], attrs["dilation_width"]
    top, right, bottom, left = (attrs[side] for side in SIDES)
    oh = sh * (height - 1) + attrs["adjustment_height"] + (kh - 1) * dh + 1 - top - bottom
    ow = sw * (width - 1) + attrs["adjustment_width"] + (kw - 1) * dw + 1 - left - right
    y = np.zeros((n, oh, ow, outputs), x.dtype)
    if bias is not None:
        y += bias
    each_out = outputs // attrs["groups"]
    for b, i, j, o, ki, kj, c in np.ndindex(n, height, width, outputs, kh, kw, inputs):
        row, column = i * sh + ki * dh - top, j * sw + kj * dw - left
        if 0 <= row < oh and 0 <= column < ow:
            y[b, row, column, o] += x[b, i, j, o // each_out * inputs + c] * weights[o, ki, kj, c]
    return y


@st.composite
def geometries(draw, transposed=False):
    small = st.integers(1, 3)
    kernel, stride, dilation = (draw(st.tuples(small, small)) for _ in range(3))
    pads = draw(st.tuples(*[st.integers(0, 2)] * 4))
    size = draw(st.tuples(st.integers(1, 7), st.integers(1, 7)))
    groups, inputs, outputs = draw(small), draw(small), draw(small)
    adjust = (0, 0)
    if transposed:
        adjust = tuple(draw(st.integers(0, s - 1)) for s in stride)
    attrs = conv_attrs(kernel, pads, stride, dilation, groups, inputs, outputs, adjust)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    x = rng.integers(-9, 10, (draw(small), *size, groups * inputs))
    weights = rng.integers(-9, 10, (groups * outputs, *kernel, inputs))
    bias = draw(st.sampled_from([None, rng.integers(-9, 10, groups * outputs)]))
    return attrs, x, weights, bias


def refused(name, attrs, flags, *arrays):
    """Whether the operator's shape rule has something against a geometry, such as a window larger than the input."""
    node = Node(OPS[name], (0,), (1,), attrs, flags=flags)
    try:
        return not OPS[name].shape(node, [None if array is None else array.shape for array in arrays])
    except Refusal:
        return True


def as_float(array, constant=True):
    return None if array is None else T(array.astype(F32), constant=constant)


@settings(deadline=None)
@given(geometries(), st.booleans())
def test_conv2d_agrees_with_loops(case, same):
    attrs, x, weights, bias = case
    if same:
        attrs = {**attrs, **dict.fromkeys(SIDES, 0)}
    if refused("conv2d", attrs, 4 * same, x, weights, bias):
        return
    got = apply("conv2d", as_float(x, False), as_float(weights), as_float(bias), attrs=attrs, flags=4 * same)
    np.testing.assert_array_equal(got, naive_conv(x, weights, bias, attrs, same))


@settings(deadline=None)
@given(geometries(), st.integers(-128, 127), st.integers(-128, 127), st.sampled_from([0.25, 0.02]))
def test_int8_conv2d_is_exact(case, zero_in, zero_out, out_scale):
    attrs, x, weights, bias = case
    if refused("conv2d", attrs, 0, x, weights, bias):
        return
    stored = np.clip(x + zero_in, -128, 127).astype(np.int8)
    scales = F32(np.arange(1, len(weights) + 1) / 64)
    sums = naive_conv(stored.astype(np.int64) - zero_in, weights, bias, attrs)
    want = np.rint(sums.astype(F32) * (F32(0.5) * scales / F32(out_scale))).astype(np.int64) + zero_out
    got = apply(
        "conv2d", q8(stored, 0.5, zero_in), const(weights.astype(np.int8), "qcint8", PerChannel(scales, 0)),
        None if bias is None else const(bias.astype(np.int32), "qcint32", PerChannel(scales * F32(0.5), 0)),
        out=like("qint8", PerTensor(out_scale, zero_out)), attrs=attrs)
    np.testing.assert_array_equal(got, np.clip(want, -128, 127))


@settings(deadline=None)
@given(geometries())
def test_depthwise_agrees_with_grouped_convolution(case):
    attrs, x, weights, bias = case
    # One input channel per group, as many outputs as the multiplier says.
    x, weights = x[..., :attrs["groups"]], weights[..., :1]
    attrs = {**attrs, "group_input_channels": 1}
    if refused("conv2d", attrs, 0, x, weights, bias):
        return
    turned = weights.transpose(3, 1, 2, 0)
    got = apply("depthwise_conv2d", as_float(x, False), as_float(turned), as_float(bias), attrs=attrs)
    np.testing.assert_array_equal(got, naive_conv(x, weights, bias, attrs))


@settings(deadline=None)
@given(geometries(transposed=True))
def test_conv_transpose2d_agrees_with_loops(case):
    attrs, x, weights, bias = case
    if refused("conv_transpose2d", attrs, 0, x, weights, bias):
        return
    got = apply("conv_transpose2d", as_float(x, False), as_float(weights), as_float(bias), attrs=attrs)
    np.testing.assert_array_equal(got, naive_transposed(x, weights, bias, attrs))


def test_grouped_transposed_convolution_of_the_issue():
    x = F32([1, 5, 2, 6, 3, 7, 4, 8]).reshape(1, 2, 2, 2)
    got = apply("conv_transpose2d", x, const(ramp(2, 3, 3, 1)), None, attrs=conv_attrs((3, 3), groups=2))
    assert got[0, :, :, 0].tolist() == [[1, 4, 7, 6], [7, 23, 33, 24], [19, 53, 63, 42], [21, 52, 59, 36]]
    assert got[0, :, :, 1].tolist() == [
        [50, 115, 126, 72], [135, 305, 331, 186], [171, 383, 409, 228], [112, 247, 262, 144]]


def test_dilated_transposed_convolution():
    got = apply("conv_transpose2d", ramp(1, 2, 2, 1), const(ramp(1, 2, 2, 1)), None,
                attrs=conv_attrs((2, 2), dilation=(2, 2)))
    assert got[0, :, :, 0].tolist() == [[1, 2, 2, 4], [3, 4, 6, 8], [3, 6, 4, 8], [9, 12, 12, 16]]


def test_same_padding_puts_the_smaller_half_first():
    x = ramp(1, 1, 4, 1)
    weights = const(F32([1, 10]).reshape(1, 1, 2, 1))
    got = apply("conv2d", x, weights, None, attrs=conv_attrs((1, 2)), flags=4)
    assert got.ravel().tolist() == [21, 32, 43, 4]


def test_dynamic_convolution_pads_with_zero():
    x = F32([[[[1], [2]], [[3], [4]]]])
    program = Program()
    number = program.add(T(x))
    weights = program.add(const(np.ones((1, 3, 3, 1), np.int8), "qcint8", PerChannel(F32([1]), 0)))
    (rows,) = program.node("convert", (number,), [like("qdint8", PerToken(3))])
    (y,) = program.node("conv2d", (rows, weights, None), [like("fp32")], conv_attrs((3, 3), (1, 1, 1, 1)))
    np.testing.assert_allclose(reference.run(program.graph(y), x)[0].ravel(), [10] * 4, rtol=0.01)


# ---- pools


def naive_windows(x, attrs, same=False):
    """Yield (output index, the window's elements with their place in it), pixel by pixel."""
    n, height, width, channels = x.shape
    kh, kw, sh, sw = (attrs[f"{word}_{axis}"] for word in ("pooling", "stride") for axis in ("height", "width"))
    dh, dw = attrs.get("dilation_height", 1), attrs.get("dilation_width", 1)
    top, left = attrs["padding_top"], attrs["padding_left"]
    if same:
        oh, ow = math.ceil(height / sh), math.ceil(width / sw)
        top = max(0, (oh - 1) * sh + (kh - 1) * dh + 1 - height) // 2
        left = max(0, (ow - 1) * sw + (kw - 1) * dw + 1 - width) // 2
    else:
        oh = (top + height + attrs["padding_bottom"] - (kh - 1) * dh - 1) // sh + 1
        ow = (left + width + attrs["padding_right"] - (kw - 1) * dw - 1) // sw + 1
    for place in np.ndindex(n, oh, ow, channels):
        b, i, j, c = place
        found = []
        for ki, kj in np.ndindex(kh, kw):
            row, column = i * sh - top + ki * dh, j * sw - left + kj * dw
            if 0 <= row < height and 0 <= column < width:
                found.append((ki * kw + kj, x[b, row, column, c]))
        yield place, found


@st.composite
def pools(draw):
    small = st.integers(1, 3)
    window, dilation = draw(st.tuples(small, small)), draw(st.tuples(small, small))
    stride = tuple(draw(st.integers(1, k)) for k in window)
    pads = draw(st.tuples(*[st.integers(0, 1)] * 4))
    x = np.random.default_rng(draw(st.integers(0, 2**32 - 1))).integers(-99, 100, (
        draw(small), draw(st.integers(1, 7)), draw(st.integers(1, 7)), draw(small)))
    return pool_attrs(window, pads, stride, dilation), x, draw(st.booleans())


@settings(deadline=None)
@given(pools(), st.sampled_from(["max_pooling2d", "average_pooling2d"]), st.booleans())
def test_pools_agree_with_loops(case, name, quantized):
    attrs, x, same = case
    if name == "average_pooling2d":
        attrs = {**attrs, "dilation_height": 1, "dilation_width": 1}
    if same:
        attrs = {**attrs, **dict.fromkeys(SIDES, 0)}
    if refused(name, attrs, 4 * same, x):
        return
    quantized = quantized and name == "max_pooling2d"
    x = x.astype(np.int8 if quantized else F32)
    got = apply(name, q8(x, 0.5, -100) if quantized else x, attrs=attrs, flags=4 * same)
    count = 0
    for place, found in naive_windows(x, attrs, same):
        elements = [element for _, element in found]
        want = max(elements) if name == "max_pooling2d" else F32(sum(map(float, elements)) / len(elements))
        assert got[place] == want
        count += 1
    assert count == got.size


@settings(deadline=None)
@given(pools())
def test_argmax_agrees_with_loops(case):
    attrs, x, same = case
    pads = (0,) * 4 if same else tuple(attrs[side] for side in SIDES)
    kh, kw = attrs["pooling_height"], attrs["pooling_width"]
    attrs = argmax_attrs((kh, kw), pads)
    if refused("argmax_pooling2d", attrs, 4 * same, x):
        return
    x = (x // 25).astype(F32)
    values, places = apply("argmax_pooling2d", x, attrs=attrs, flags=4 * same)
    assert places.dtype == np.uint32
    _, height, width, _ = x.shape
    top, left = pads[0], pads[3]
    if same:
        top, left = (values.shape[1] * kh - height) // 2, (values.shape[2] * kw - width) // 2
    for b, i, j, c in np.ndindex(values.shape):
        best = None
        for kj, ki in np.ndindex(kw, kh):
            # Outside the image the edge goes on.
            row, column = min(max(i * kh + ki - top, 0), height - 1), min(max(j * kw + kj - left, 0), width - 1)
            if best is None or x[b, row, column, c] > best[0]:
                best = x[b, row, column, c], kj * kh + ki
        assert (values[b, i, j, c], places[b, i, j, c]) == best


def test_padding_is_not_counted_in_a_mean():
    around = (1, 1, 1, 1)
    assert (apply("average_pooling2d", np.ones((1, 4, 4, 1), F32), attrs=pool_attrs((3, 3), around)) == 1).all()
    got = apply("average_pooling2d", ramp(1, 4, 4, 1), attrs=pool_attrs((3, 3), around, (2, 2)))
    assert got[0, :, :, 0].tolist() == [[3.5, 5], [9.5, 11]]
    got = apply("average_pooling2d", ramp(1, 5, 5, 1), attrs=pool_attrs((2, 2), stride=(2, 2)), flags=4)
    assert got[0, :, :, 0].tolist() == [[4, 6, 7.5], [14, 16, 17.5], [21.5, 23.5, 25]]


def test_argmax_is_local_to_the_window_and_counts_by_columns():
    values, places = apply("argmax_pooling2d", ramp(1, 4, 4, 1), attrs=argmax_attrs((2, 2)))
    assert values.ravel().tolist() == [6, 8, 14, 16]
    assert places.ravel().tolist() == [3, 3, 3, 3]
    for place, want in enumerate([0, 2, 4, 1, 3, 5]):
        x = np.eye(6, dtype=F32)[place].reshape(1, 2, 3, 1)
        assert apply("argmax_pooling2d", x, attrs=argmax_attrs((2, 3)))[1].item() == want
    assert apply("argmax_pooling2d", np.full((1, 2, 2, 1), 3, F32), attrs=argmax_attrs((2, 2)))[1].tolist() == [[[[0]]]]


@pytest.mark.parametrize(("flags", "shape"), [(0, (2, 5)), (0x40, (2, 1, 1, 5))])
def test_global_average_with_and_without_dims(flags, shape):
    x = ramp(2, 3, 4, 5)
    got = apply("global_average_pooling2d", x, flags=flags)
    assert got.shape == shape
    np.testing.assert_allclose(got.reshape(2, 5), x.mean(axis=(1, 2)))


# ---- moving elements


def test_concatenation_takes_a_negative_axis():
    a, b = ramp(2, 3), ramp(2, 5)
    got = apply("concatenate2", a, b, attrs={"axis": 4294967295})
    np.testing.assert_array_equal(got, np.concatenate([a, b], axis=1))
    assert apply("concatenate2", a, b, attrs={"axis": 1}).shape == (2, 8)


def test_concatenation_of_many_and_of_nothing():
    assert apply("concatenate5", *[F32([[i]]) for i in range(5)], attrs={"axis": 0}).ravel().tolist() == [0, 1, 2, 3, 4]
    got = apply("concatenate2", np.zeros((0, 2), F32), ramp(2, 2), attrs={"axis": 0})
    assert got.tolist() == [[1, 2], [3, 4]]


def test_slice_offsets_and_whole_dimensions():
    x = ramp(3, 4, 5)
    got = apply("static_slice", x, attrs={"offsets": (1, 0, 2), "sizes": (2, 0, 3)})
    np.testing.assert_array_equal(got, x[1:3, :, 2:5])


def test_reshape_infers_one_dimension():
    assert apply("static_reshape", ramp(6), attrs={"new_shape": (0, 2)}).tolist() == [[1, 2], [3, 4], [5, 6]]
    assert apply("static_reshape", ramp(2, 3), attrs={"new_shape": (6,)}).tolist() == [1, 2, 3, 4, 5, 6]


def test_transpose_and_new_dims():
    x = ramp(2, 3, 4)
    np.testing.assert_array_equal(apply("static_transpose", x, attrs={"perm": (2, 0, 1)}), x.transpose(2, 0, 1))
    assert apply("static_expand_dims", x, attrs={"new_axes": (0, 2)}).shape == (1, 2, 1, 3, 4)
    np.testing.assert_array_equal(apply("static_reduce", x, attrs={"reduction_axes": (0, -1)}), x.mean(axis=(0, 2)))


def test_pad_in_every_type():
    attrs = {"pre_paddings": (1, 0), "post_paddings": (0, 2), "padding_value": 0.1}
    got = apply("static_constant_pad", ramp(1, 2), attrs=attrs)
    assert got.tolist() == F32([[0.1] * 4, [1, 2, 0.1, 0.1]]).tolist()
    assert apply("static_constant_pad", ramp(1, 2, dtype=np.float16), attrs=attrs)[0, 0] == np.float16(0.1)
    # 0.1 is 0.4 steps of 0.25.
    x = q8(np.uint8([[1, 2]]), 0.25, 7)
    assert apply("static_constant_pad", x, attrs=attrs).tolist() == [[7] * 4, [1, 2, 7, 7]]


@pytest.mark.parametrize(("flags", "row", "one"), [
    (0, [0, 0.25, 0.75, 1], 8.5), (8, [0, 1 / 3, 2 / 3, 1], 1), (4, [0, 0.5, 1, 1], 1)])
def test_three_conventions_of_resizing(flags, row, one):
    attrs = {"new_height": 4, "new_width": 4}
    got = apply("static_resize_bilinear2d", ramp(1, 2, 2, 1, start=0), attrs=attrs, flags=flags)
    np.testing.assert_allclose(got[0, 0, :, 0], row, rtol=1e-6)
    np.testing.assert_allclose(got[0, :, 0, 0], 2 * np.array(row), rtol=1e-6)
    got = apply("static_resize_bilinear2d", ramp(1, 4, 4, 1), attrs={"new_height": 1, "new_width": 1}, flags=flags)
    assert got.ravel().tolist() == [one]


def test_resizing_8_bits_rounds():
    # The mean of 3, 4, 5 and 7 steps is 4.75.
    x = q8(np.int8([0, 1, 2, 4]).reshape(1, 2, 2, 1), 0.5, -3)
    got = apply("static_resize_bilinear2d", x, attrs={"new_height": 1, "new_width": 1})
    assert got.ravel().tolist() == [2]


# ---- whole nets


def test_a_quantized_layer_reads_what_convert_wrote():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(4, 8)).astype(F32)
    stored = rng.integers(-128, 128, (5, 8)).astype(np.int8)
    program = Program()
    number = program.add(T(x))
    weights = program.add(const(stored, "qint8", PerTensor(0.01, 0)))
    (quantized,) = program.node("convert", (number,), [like("qint8", PerTensor(0.02, 5))])
    (y,) = program.node("fully_connected", (quantized, weights, None), [like("qint8", PerTensor(0.1, -7))])
    (z,) = program.node("convert", (y,), [like("fp32")])
    graph = program.graph(z)
    whole = quantize(x, graph.value(quantized)).astype(int) - 5
    factor = F32(0.02) * F32(0.01) / F32(0.1)
    want = np.clip(np.rint((whole @ stored.T.astype(int)).astype(F32) * factor) - 7, -128, 127)
    np.testing.assert_array_equal(reference.run(graph, x)[0], ((want + 7) * np.float64(F32(0.1))).astype(F32))
