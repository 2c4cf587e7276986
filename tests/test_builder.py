"""GraphBuilder: what the methods make of their arguments, and what they refuse."""

from __future__ import annotations

import inspect
import math
import pickle
import tracemalloc
from typing import Any

import numpy as np
import pytest
from op_graphs import CASES, built

from xnnfast._graph import Value
from xnnfast.builder import ClampOptions, GraphBuilder, Options
from xnnfast.datatypes import DATATYPES
from xnnfast.errors import ArgumentError, DtypeError, GraphError, ShapeError
from xnnfast.ops import OPS
from xnnfast.quantization import PerBlock, PerChannel, PerTensor, PerToken

OPERATORS = [name for name, op in OPS.items() if op.kind is not None]


@pytest.fixture
def b() -> GraphBuilder:
    return GraphBuilder()


# ---- one method for each operator


@pytest.mark.parametrize("name", OPERATORS)
def test_method_of_operator(name: str) -> None:
    method = getattr(GraphBuilder, name)
    row = OPS[name]
    assert method.__doc__.lower().startswith(row.doc.lower())
    # An operator with limits takes them, another does not.
    assert ("ClampOptions" in str(inspect.signature(method))) == (row.takes_clamp and name != "clamp")


@pytest.mark.parametrize("name", OPERATORS)
def test_node_of_operator(name: str) -> None:
    parts = built(name).parts()
    (node,) = parts.nodes
    op = node.op
    assert op is OPS[name]
    assert len(node.inputs) == len(op.inputs) and len(node.outputs) == len(op.outputs)
    assert set(node.attrs) == set(op.attrs)
    assert [parts.values[number] for number in node.outputs] == list(parts.outputs)
    assert [value.shape for value in parts.outputs] == op.shape(
        node, [None if number is None else parts.values[number].shape for number in node.inputs])


def test_options_are_those_of_node() -> None:
    parameters = set(inspect.signature(GraphBuilder.node).parameters)
    assert set(Options.__annotations__) == parameters - {"self", "name", "inputs", "attrs", "flags", "clamp"}
    assert set(ClampOptions.__annotations__) - set(Options.__annotations__) == {"clamp"}


# ---- arguments of operators


def attrs(value: Value | tuple[Value, ...], b: GraphBuilder) -> dict[str, Any]:
    node = b.parts().nodes[-1]
    assert node.outputs == tuple(each.id for each in (value if isinstance(value, tuple) else (value,)))
    return dict(node.attrs)


def test_sizes_as_numbers_or_pairs(b: GraphBuilder) -> None:
    x, w = b.input((1, 9, 9, 2)), b.constant(np.zeros((4, 3, 2, 2), np.float32))
    assert attrs(b.conv2d(x, w), b) == {
        "padding_top": 0, "padding_right": 0, "padding_bottom": 0, "padding_left": 0, "kernel_height": 3,
        "kernel_width": 2, "subsampling_height": 1, "subsampling_width": 1, "dilation_height": 1, "dilation_width": 1,
        "groups": 1, "group_input_channels": 2, "group_output_channels": 4}
    found = attrs(b.conv2d(x, w, padding=1, stride=2, dilation=3), b)
    assert {found[f"padding_{side}"] for side in ("top", "right", "bottom", "left")} == {1}
    assert {found[f"{name}_{axis}"] for name in ("subsampling",) for axis in ("height", "width")} == {2}
    found = attrs(b.conv2d(x, w, padding=(1, 2, 3, 4), stride=(2, 1), dilation=(1, 2)), b)
    assert [found[f"padding_{side}"] for side in ("top", "right", "bottom", "left")] == [1, 2, 3, 4]
    assert [found["subsampling_height"], found["subsampling_width"]] == [2, 1]
    assert [found["dilation_height"], found["dilation_width"]] == [1, 2]
    with pytest.raises(ArgumentError, match=r"\(top, right, bottom, left\) as padding, found \(1, 2\)"):
        b.conv2d(x, w, padding=(1, 2))
    with pytest.raises(ArgumentError, match=r"\(height, width\) as stride, found \(1, 2, 3\)"):
        b.conv2d(x, w, stride=(1, 2, 3))


def test_groups(b: GraphBuilder) -> None:
    x = b.input((1, 5, 5, 4))
    found = attrs(b.conv2d(x, np.zeros((6, 3, 3, 2), np.float32), groups=2), b)
    assert (found["groups"], found["group_input_channels"], found["group_output_channels"]) == (2, 2, 3)
    with pytest.raises(ShapeError, match="need output channels that 4 groups divide, found 6"):
        b.conv2d(x, np.zeros((6, 3, 3, 1), np.float32), groups=4)
    found = attrs(b.depthwise_conv2d(x, np.zeros((1, 3, 3, 8), np.float32)), b)
    assert (found["groups"], found["group_input_channels"], found["group_output_channels"]) == (4, 1, 2)


def test_flags(b: GraphBuilder) -> None:
    x, square = b.input((1, 4, 4, 2)), np.zeros((3, 2), np.float32)
    for value, flags in (
        (b.fully_connected(x, square), 0),
        (b.fully_connected(x, square.T.copy(), transpose_weights=True), 1),
        (b.batch_matrix_multiply(x, x, transpose_b=True), 1),
        (b.conv2d(x, np.zeros((1, 3, 3, 2), np.float32), same_padding=True), 4),
        (b.max_pooling2d(x, 2, same_padding=True), 4),
        (b.global_average_pooling2d(x), 0x40),
        (b.global_average_pooling2d(x, keep_dims=False), 0),
        (b.static_resize_bilinear2d(x, 3, legacy_mode=True), 4),
        (b.static_resize_bilinear2d(x, 3, align_corners=True), 8),
    ):
        node = next(node for node in b.parts().nodes if node.outputs == (value.id,))
        assert node.flags == flags, node


def test_pooling_stride_defaults_to_the_window(b: GraphBuilder) -> None:
    x = b.input((1, 9, 9, 2))
    for value in (b.average_pooling2d(x, (3, 2)), b.max_pooling2d(x, (3, 2))):
        assert value.shape == (1, 3, 4, 2)
    assert b.max_pooling2d(x, (3, 2), stride=1).shape == (1, 7, 8, 2)


def test_axes_and_sizes_count_from_the_end(b: GraphBuilder) -> None:
    x = b.input((2, 3, 4))
    assert attrs(b.static_transpose(x, (-1, 0, 1)), b) == {"perm": (2, 0, 1)}
    assert attrs(b.static_reshape(x, (-1, 6)), b) == {"new_shape": (0, 6)}
    assert attrs(b.static_slice(x, (0, 1, 1), (2, None, 2)), b) == {"offsets": (0, 1, 1), "sizes": (2, 2, 2)}
    assert attrs(b.concatenate2(x, x, -1), b) == {"axis": 2}
    for axis in (3, -4):
        with pytest.raises((ShapeError, ArgumentError), match="axis"):
            b.concatenate2(x, x, axis)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6, 7, 25, 26, 60])
def test_concatenate_any_number(count: int, b: GraphBuilder) -> None:
    inputs = [b.input((2, 1 + number % 3)) for number in range(count)]
    result = b.concatenate(inputs, 1)
    assert result.shape == (2, sum(value.shape[1] for value in inputs))
    # The order, by following the nodes back.
    made = {node.outputs[0]: node.inputs for node in b.parts().nodes}

    def leaves(number: int) -> list[int]:
        return [leaf for each in made[number] for leaf in leaves(each)] if number in made else [number]

    assert leaves(result.id) == [value.id for value in inputs]
    assert len(made) == -(-(count - 1) // 4)


def test_concatenate_of_one(b: GraphBuilder) -> None:
    with pytest.raises(ArgumentError, match="need 2 values or more to concatenate, found 1"):
        b.concatenate([b.input((2,))], 0)


def test_limits(b: GraphBuilder) -> None:
    x = b.input((2,))
    for clamp, expected in (((0, 6), (0.0, 6.0)), ((None, 0.1), (-math.inf, float(np.float32(0.1)))),
                            ((-1, None), (-1.0, math.inf)), (None, None)):
        b.add(x, x, clamp=clamp)
        assert b.parts().nodes[-1].clamp == expected
    with pytest.raises(ArgumentError, match=r"the first is not above the second, found \(2, 1\)"):
        b.add(x, x, clamp=(2, 1))
    with pytest.raises(ArgumentError, match=r"found \(nan, 1\)"):
        b.clamp(x, math.nan, 1)
    with pytest.raises(ArgumentError, match="softmax has no limits; use clamp"):
        b.node("softmax", [x], clamp=(0, 1))


def test_attention_defaults(b: GraphBuilder) -> None:
    b.scaled_dot_product_attention(b.input((1, 2, 3, 4)), b.input((1, 5, 4)), b.input((1, 5, 6)))
    parts = b.parts()
    _, _, _, scale, mask = (parts.values[number] for number in parts.nodes[0].inputs)
    assert scale.array().tolist() == [0.5] * 4
    assert mask.array().tolist() == [[0.0] * 5] * 3


def test_attributes_when_given_by_name(b: GraphBuilder) -> None:
    x = b.input((2, 3))
    for given, text in (({}, "needs attributes perm, found none"),
                        ({"perm": 3}, "needs a sequence of whole numbers as perm"),
                        ({"perm": (0, 1.5)}, "needs a sequence of whole numbers as perm"),
                        ({"perm": (0, -1)}, "needs perm of 0 to 4294967295"),
                        ({"perm": (0, 1), "axis": 1}, "needs attributes perm, found perm, axis")):
        with pytest.raises(ArgumentError, match=text):
            b.node("static_transpose", [x], given)
    with pytest.raises(ArgumentError, match="an operator that files can hold, found 'static_reduce'"):
        b.node("static_reduce", [x])
    with pytest.raises(ArgumentError, match="add needs 2 inputs"):
        b.node("add", [x])
    with pytest.raises(ArgumentError, match="add can't go without input2_id"):
        b.node("add", [x, None])
    with pytest.raises(ArgumentError, match="add knows flags 0x0, found 0x4"):
        b.node("add", [x, x], flags=4)


# ---- shapes and datatypes of results


def test_shapes_are_checked_where_they_are_given(b: GraphBuilder) -> None:
    with pytest.raises(ShapeError, match=r"node 0 \(add\): dim 1 of 2x3 is 3, of 2x4 it is 4"):
        b.add(b.input((2, 3)), b.input((2, 4)))
    with pytest.raises(ShapeError, match="need rank 6 or less, found rank 7"):
        b.input((1,) * 7)
    with pytest.raises(ShapeError, match="need dimensions of 0 to 4294967295, found -1x2"):
        b.input((-1, 2))
    with pytest.raises(ArgumentError, match="need a shape of whole numbers"):
        b.input((1.5,))


def test_datatypes_follow(b: GraphBuilder) -> None:
    half, full = b.input((2, 4), "fp16"), b.input((2, 4))
    assert b.add(half, half).datatype == "fp16"
    assert b.fully_connected(half, np.zeros((3, 4), np.float16)).datatype == "fp16"
    assert b.convert(full, "fp16").datatype == "fp16"
    rows = b.convert(full, "qdint8", PerToken(1))
    assert (rows.datatype, rows.quantization) == ("qdint8", PerToken(1))
    weights = b.constant(np.zeros((3, 4), np.int8), quantization=PerChannel(np.ones(3), 0))
    assert b.fully_connected(rows, weights).datatype == "fp32"
    assert b.fully_connected(rows, weights, datatype="fp16").datatype == "fp16"
    with pytest.raises(GraphError, match=r"node \d+ \(add\)"):
        b.add(half, full)
    with pytest.raises(GraphError, match=r"softmax has input qint8"):
        b.softmax(b.input((2,), "qint8", PerTensor(1, 0)))
    with pytest.raises(GraphError, match=r"\(add\)"):
        b.add(full, full, datatype="fp16")


def test_quantization_of_results(b: GraphBuilder) -> None:
    x = b.input((1, 4, 4, 2), "qint8", PerTensor(0.1, 3))
    # What moves numbers keeps their meaning.
    for value in (b.max_pooling2d(x, 2), b.static_reshape(x, (-1,)), b.concatenate2(x, x, 0), b.copy(x),
                  b.clamp(x, 0, None), b.static_constant_pad(x, (0, 1, 1, 0), (0, 1, 1, 0))):
        assert value.quantization == x.quantization
    # What computes new ones is told.
    with pytest.raises(GraphError, match=r"node 6 \(add\) needs quantization= or like= for its qint8 result"):
        b.add(x, x)
    assert b.add(x, x, quantization=PerTensor(0.2, 0)).quantization == PerTensor(float(np.float32(0.2)), 0)
    assert b.add(x, x, like=x).quantization == x.quantization
    assert b.convert(x, "fp32").quantization is None
    with pytest.raises(GraphError, match="fp32 needs None as its quantization, found PerTensor"):
        b.convert(x, "fp32", PerTensor(1, 0))
    with pytest.raises(ArgumentError, match="need like, or datatype and quantization, found both"):
        b.add(x, x, like=x, datatype="qint8")
    with pytest.raises(GraphError, match=r"\(add\): input1 scale"):
        b.add(x, x, quantization=PerTensor(1e-9, 0))


def test_parameters_as_a_file_holds_them(b: GraphBuilder) -> None:
    tensor = b.input((2,), "quint8", PerTensor(0.1, 255)).quantization
    assert tensor == PerTensor(float(np.float32(0.1)), 255)
    channel = b.value((2, 4), "qcint8", PerChannel([0.5, 0.25, 1, 2], -1)).quantization
    assert channel.axis == 1 and channel.scales.dtype == np.float32 and channel.scales.tolist() == [0.5, 0.25, 1, 2]
    block = b.value((2, 64), "qbint4", PerBlock(np.array([[1, 2], [0.5, 1.001]]), 0, 32)).quantization
    assert block.scales.dtype == np.uint16 and block.scales.tolist() == [0x3F80, 0x4000, 0x3F00, 0x3F80]


@pytest.mark.parametrize("datatype, shape, quantization, text", [
    ("qint8", (2,), None, "qint8 needs PerTensor as its quantization, found None"),
    ("qcint8", (2,), PerTensor(1, 0), "qcint8 needs PerChannel as its quantization, found PerTensor"),
    ("qint8", (2,), PerTensor(1, 128), "need a zero point of -128 to 127 for qint8, found 128"),
    ("quint8", (2,), PerTensor(1, -1), "need a zero point of 0 to 255 for quint8, found -1"),
    ("qint32", (2,), PerTensor(1, 1), "need a zero point of 0 to 0 for qint32, found 1"),
    ("qint8", (2,), PerTensor(0, 1), "scales that are finite, normal and positive, found 0"),
    ("qint8", (2,), PerTensor(math.inf, 1), "scales that are finite, normal and positive, found inf"),
    ("qcint8", (2,), PerChannel([1, 1e-40], 0), "scales that are finite, normal and positive, found 9.99995e-41"),
    ("qcint8", (2,), PerChannel([1], 0), "need 2 scales for 2, found 1"),
    ("qcint8", (2,), PerChannel([1, 1], 1), "need a channel axis of 2, found 1"),
    ("qbint4", (2, 64), PerBlock(np.ones(3), 0, 32), "need 4 scales for 2x64, found 3"),
    ("qbint4", (2, 64), PerBlock(np.ones(3), 0, 48), "need rows that blocks of 48 divide, found 2x64"),
    ("qbint4", (2, 64), PerBlock(np.array([1, 0, 1, 1], np.uint16), 0, 32), "finite, normal and positive"),
])
def test_parameters_that_do_not_fit(datatype: str, shape: tuple[int, ...], quantization: Any, text: str,
                                    b: GraphBuilder) -> None:
    with pytest.raises(GraphError, match=text):
        b.value(shape, datatype, quantization)


def test_bias_of_a_quantized_layer_gets_its_parameters(b: GraphBuilder) -> None:
    x, bias = b.input((1, 4), "qint8", PerTensor(0.5, 3)), np.arange(2, dtype=np.int32)
    tensor = b.constant(np.ones((2, 4), np.int8), quantization=PerTensor(0.25, 0))
    channel = b.constant(np.ones((2, 4), np.int8), quantization=PerChannel([0.25, 0.5], 0))
    for weights, datatype, scales in ((tensor, "qint32", [0.125]), (channel, "qcint32", [0.125, 0.25])):
        b.fully_connected(x, weights, bias, like=x)
        parts = b.parts()
        found = parts.values[parts.nodes[-1].inputs[2]]
        assert found.datatype == datatype
        assert np.atleast_1d(getattr(found.quantization, "scales", None) if datatype == "qcint32"
                             else found.quantization.scale).tolist() == scales
    with pytest.raises(GraphError, match="bias fp32"):
        b.fully_connected(x, tensor, np.zeros(2, np.float32), like=x)


def test_input_quantized_on_its_way_in(b: GraphBuilder) -> None:
    x = b.input((1, 4), dq_datatype="qint8")
    weights = b.constant(np.ones((2, 4), np.int8), quantization=PerChannel([0.25, 0.5], 0))
    assert b.fully_connected(x, weights).datatype == "fp32"


# ---- constants


@pytest.mark.parametrize("dtype, quantization, datatype", [
    (np.float32, None, "fp32"), (np.float16, None, "fp16"), (np.int32, None, "int32"),
    (np.int8, PerTensor(1, 0), "qint8"), (np.uint8, PerTensor(1, 0), "quint8"), (np.int32, PerTensor(1, 0), "qint32"),
    (np.int8, PerChannel([1, 1], 0), "qcint8"), (np.int32, PerChannel([1, 1], 0), "qcint32"),
    (np.int8, PerBlock(np.ones(4), 0, 32), "qbint4"),
])
def test_datatype_of_constants(dtype: Any, quantization: Any, datatype: str, b: GraphBuilder) -> None:
    value = b.constant(np.ones((2, 64), dtype), quantization=quantization)
    assert (value.datatype, value.shape) == (datatype, (2, 64))
    if DATATYPES[datatype].dtype is not None:
        assert np.array_equal(value.array(), np.ones((2, 64)))


@pytest.mark.parametrize("array, datatype, quantization, error, text", [
    (np.ones(2), None, None, DtypeError, "need an array of float32, float16, .*, found float64"),
    (np.ones(2, np.int64), None, None, DtypeError, "found int64"),
    (np.ones(2, bool), None, None, DtypeError, "found bool"),
    (np.ones(2, np.int8), None, None, DtypeError,
     "need PerTensor, PerChannel or PerBlock as the quantization of an array of int8, found None"),
    (np.ones(2, np.float32), None, PerTensor(1, 0), DtypeError, "need None as the quantization of an array of float32"),
    (np.ones(2, np.float32), "fp16", None, DtypeError, "need an array of float16 for fp16, found float32"),
    (np.ones(2, np.int8), "qdint8", PerToken(1), DtypeError, "found 'qdint8'"),
    (np.ones(2, np.int8), "int3", None, DtypeError, "found 'int3'"),
    (np.ones((2, 3), np.int8), "qcint4", PerChannel([1, 1], 0), ShapeError, "even number of elements in a row"),
    (np.full((2, 4), 8, np.int8), "qcint4", PerChannel([1, 1], 0), GraphError, "-8..7"),
    (np.ones((1,) * 7, np.float32), None, None, ShapeError, "rank 6 or less"),
])
def test_constants_that_are_refused(array: Any, datatype: str | None, quantization: Any, error: type[Exception],
                                    text: str, b: GraphBuilder) -> None:
    with pytest.raises(error, match=text):
        b.constant(array, datatype, quantization)
    assert b.parts().values == ()


def test_nibbles(b: GraphBuilder) -> None:
    numbers = np.array([[-8, 7, 0, 1], [2, -3, 4, -5]], np.int8)
    value = b.constant(numbers, "qcint4", PerChannel([1, 1], 0))
    # The even element is the low nibble, stored numbers are 8 above.
    assert value.shape == (2, 4)
    assert bytes(value.constant.data) == bytes([0xF0, 0x98, 0x5A, 0x3C])
    packed = b.constant(value.array(), "qcint4", PerChannel([1, 1], 0))
    assert packed.shape == (2, 4) and bytes(packed.constant.data) == bytes(value.constant.data)


def test_bfloat16(b: GraphBuilder) -> None:
    assert bytes(b.constant(np.array([0x3F80], np.uint16), "bf16").constant.data) == b"\x80\x3f"
    ml_dtypes = pytest.importorskip("ml_dtypes")
    value = b.constant(np.ones(1, ml_dtypes.bfloat16))
    assert value.datatype == "bf16" and bytes(value.constant.data) == b"\x80\x3f"


def test_constants_are_copies_with_room_behind(b: GraphBuilder) -> None:
    array = np.arange(5, dtype=np.float32)
    value = b.constant(array)
    array[:] = 9
    assert value.array().tolist() == [0, 1, 2, 3, 4]
    assert value.constant.address % 64 == 0
    assert value.constant.data.readonly
    room = value.constant.data.obj
    while getattr(room, "base", None) is not None:
        room = room.base
    assert room.ctypes.data + room.nbytes >= value.constant.address + value.constant.nbytes + 16


def test_arrays_of_any_order(b: GraphBuilder) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    for other in (np.asfortranarray(array), array.astype(">f4"), np.repeat(array, 2, axis=1)[:, ::2]):
        assert bytes(b.constant(other).constant.data) == array.tobytes()
    assert b.constant(np.zeros((0, 3), np.float32)).constant.nbytes == 0


def test_operands(b: GraphBuilder) -> None:
    x = b.input((2, 3), "fp16")
    for operand, shape in ((np.ones(3, np.float16), (3,)), (np.float16(2), (1,)), (2.5, (1,)), (2, (1,))):
        b.add(x, operand)
        parts = b.parts()
        value = parts.values[parts.nodes[-1].inputs[1]]
        assert (value.datatype, value.shape, value.constant is not None) == ("fp16", shape, True)
    # A number on either side.
    b.subtract(1.0, x)
    with pytest.raises(ArgumentError, match="where no fp32 or fp16 value stands beside it, found the number 1"):
        b.add(b.input((2,), "qint8", PerTensor(1, 0)), 1.0)
    for operand in ([1.0, 2.0], True, None, "x"):
        with pytest.raises(ArgumentError, match=r"need a Value, a NumPy array or a number|can't go without"):
            b.add(x, operand)


# ---- values and their builder


def test_values_belong_to_their_builder(b: GraphBuilder) -> None:
    other = GraphBuilder()
    mine, foreign = b.input((2,)), other.input((2,))
    for call in (lambda: b.add(mine, foreign), lambda: b.output(foreign), lambda: b.copy(mine, output=foreign),
                 lambda: b.copy(mine, like=foreign)):
        with pytest.raises(GraphError, match="was not made by this builder"):
            call()
    with pytest.raises(ArgumentError, match="need a Value of this builder, found int"):
        b.output(0)


def test_a_refused_node_leaves_nothing_behind(b: GraphBuilder) -> None:
    x = b.input((2, 3))
    with pytest.raises(ShapeError):
        b.add(x, np.ones((2, 4), np.float32))
    with pytest.raises(GraphError):
        b.add(x, np.ones((2, 3), np.float16))
    assert len(b.parts().values) == 1 and b.parts().nodes == ()
    assert b.add(x, x).id == 1


def test_output_by_hand(b: GraphBuilder) -> None:
    x, y = b.input((2, 3)), b.value((2, 3))
    assert b.copy(x, output=y) is y
    for taken, text in ((y, "written by another node"), (x, "an input"),
                        (b.constant(np.ones((2, 3), np.float32)), "a constant")):
        with pytest.raises(GraphError, match=text):
            b.copy(x, output=taken)
    with pytest.raises(ShapeError, match="the output given is 3, the operator gives 2x3"):
        b.copy(x, output=b.value((3,)))
    with pytest.raises(GraphError, match="copy has input fp32, output fp16"):
        b.copy(x, output=b.value((2, 3), "fp16"))
    with pytest.raises(ArgumentError, match="need output, or what a new one is to be like, found both"):
        b.copy(x, output=b.value((2, 3)), datatype="fp32")


def test_declaring_outputs(b: GraphBuilder) -> None:
    x = b.input((2,))
    y = b.copy(x)
    assert b.output(y) is y
    with pytest.raises(GraphError, match="value 1 is an output already"):
        b.output(y)
    with pytest.raises(GraphError, match="value 2 is constant"):
        b.output(b.constant(np.ones(2, np.float32)))


# ---- external ids


def externals(b: GraphBuilder) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    parts = b.parts()
    return tuple([(value.id, value.external_id) for value in group] for group in (parts.inputs, parts.outputs))


def test_external_ids_count_inputs_then_outputs(b: GraphBuilder) -> None:
    x = b.input((2,))
    y = b.output(b.copy(x))
    z = b.input((2,))
    assert externals(b) == ([(x.id, 0), (z.id, 1)], [(y.id, 2)])


def test_external_ids_when_given(b: GraphBuilder) -> None:
    x, y, z = b.input((2,), external_id=2), b.input((2,)), b.input((2,), external_id=0)
    out = b.output(b.copy(x), external_id=3)
    # Their order is the order of the calls' arguments.
    assert externals(b) == ([(z.id, 0), (y.id, 1), (x.id, 2)], [(out.id, 3)])


def test_external_ids_that_clash(b: GraphBuilder) -> None:
    x = b.input((2,), external_id=1)
    b.output(b.copy(x), external_id=1)
    with pytest.raises(GraphError, match="values 0 and 1 both have the external id 1"):
        b.parts()


def test_input_that_is_an_output_too(b: GraphBuilder) -> None:
    x = b.input((2,), external_id=1)
    b.output(x)
    b.input((3,))
    (other, mine), (out,) = b.parts()[2:]
    assert mine is out and (mine.external_id, other.external_id) == (1, 0)
    assert mine.is_input and mine.is_output


# ---- size


def test_constants_are_copied_once_and_once_more(b: GraphBuilder, tmp_path: Any) -> None:
    # What is imported on first use is no part of the matter.
    built("add").finish()
    array = np.zeros((4, 1 << 20), np.float32)
    tracemalloc.start()
    try:
        b.output(b.fully_connected(b.input((1, 1 << 20)), array))
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        b.save(tmp_path / "graph.xnn")
        _, saved = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        b.finish()
        _, finished = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    spare = 1 << 20
    assert held < array.nbytes + spare
    # Into a file they go without another copy.
    assert saved < held + spare
    assert finished < held + array.nbytes + spare


def test_rows_pickle_by_name() -> None:
    for node in built("conv2d").parts().nodes:
        assert pickle.loads(pickle.dumps(node.op)) is node.op


def test_every_operator_has_a_case() -> None:
    assert set(CASES) == set(OPERATORS)
