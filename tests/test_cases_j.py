"""Faults that others had, class J: concatenating, slicing, reshaping, transposing, padding, resizing."""

import numpy as np
import pytest
from op_cases import case
from small import f32, ramp, ran, refused, stored

import xnnfast as xf
from xnnfast import PerTensor, Runtime, writer
from xnnfast.ops import OPS


def test_J1_a_negative_axis_in_an_unsigned_field():
    def build(b):
        return b.concatenate2(b.input((2, 3)), b.input((2, 5)), 1)

    arrays = ramp(2, 3), ramp(2, 5)
    want = np.concatenate(arrays, 1)
    np.testing.assert_array_equal(ran(build, *arrays), want)
    minus_one = xf.load(stored(build, attrs={"axis": 2**32 - 1}))
    np.testing.assert_array_equal(Runtime(minus_one).run(*arrays)[0], want)
    refused(stored(build, attrs={"axis": 7}), "axis is 7, the inputs have rank 2")
    refused(stored(build, attrs={"axis": 2**32 - 3}), "axis is -3, the inputs have rank 2")


def test_J2_an_empty_first_input():
    got = ran(lambda b: b.concatenate2(b.input((0, 2)), b.input((2, 2)), 0), np.zeros((0, 2), np.float32), ramp(2, 2))
    np.testing.assert_array_equal(got, ramp(2, 2))


def test_J2_eight_inputs_as_a_chain_of_nodes():
    def chain(b):
        inputs = [b.input((1, 1)) for _ in range(8)]
        return b.concatenate4(b.concatenate5(*inputs[:5], 0), *inputs[5:], 0)

    ones = [f32([[number]]) for number in range(1, 9)]
    np.testing.assert_array_equal(ran(chain, *ones), ramp(8, 1))
    by_builder = ran(lambda b: b.concatenate([b.input((1, 1)) for _ in range(8)], 0), *ones)
    np.testing.assert_array_equal(by_builder, ramp(8, 1))


@pytest.mark.parametrize("count", [2, 3, 6, 17, 40])
def test_J2_any_number_of_inputs(count):
    arrays = [ramp(2, 1 + number % 3) + 100 * number for number in range(count)]
    got = ran(lambda b: b.concatenate([b.input(array.shape) for array in arrays], 1), *arrays)
    np.testing.assert_array_equal(got, np.concatenate(arrays, 1))


def test_J5_an_inferred_dimension_is_0_in_files():
    def build(b):
        return b.static_reshape(b.input((6,)), (0, 2))

    np.testing.assert_array_equal(ran(build, ramp(6)), ramp(3, 2))


@pytest.mark.parametrize("values, attrs, match", [
    ({0: {"shape": (7,)}}, {}, "the input's 7 elements"),
    ({}, {"new_shape": (2**32 - 1, 2)}, "new_shape 4294967295x2 has 8589934590 elements, the input has 6"),
    ({}, {"new_shape": (4, 2)}, "new_shape 4x2 has 8 elements, the input has 6"),
    # A product of 2**64 is 0 to the engine, which divides by it.
    ({}, {"new_shape": (0, 2**31, 2**31, 4)}, "not a multiple of"),
    ({}, {"new_shape": (0, 1, 1, 1, 1, 1, 2)}, "6 entries in new_shape, found 7"),
])
def test_J5_counts_that_do_not_agree(values, attrs, match):
    refused(stored(lambda b: b.static_reshape(b.input((6,)), (0, 2)), values=values, attrs=attrs), match)


THIRD = 1 / 3


@pytest.mark.parametrize("flags, first_row, one", [
    ({}, [0, .25, .75, 1], 8.5), ({"align_corners": True}, [0, THIRD, 2 * THIRD, 1], 1),
    ({"legacy_mode": True}, [0, .5, 1, 1], 1)])
def test_J7_three_conventions_of_resizing(flags, first_row, one):
    x = f32([[0, 1], [2, 3]]).reshape(1, 2, 2, 1)
    got = ran(lambda b: b.static_resize_bilinear2d(b.input(x.shape), 4, **flags), x)
    np.testing.assert_allclose(got[0, 0, :, 0], first_row, atol=1e-6)
    large = ramp(1, 4, 4, 1)
    assert ran(lambda b: b.static_resize_bilinear2d(b.input(large.shape), 1, **flags), large).item() == one


def test_J7_both_conventions_at_once_are_refused():
    def build(b):
        return b.static_resize_bilinear2d(b.input((1, 2, 2, 1)), 4)

    refused(stored(build, flags=0xC), "exclude each other")
    refused(stored(build, flags=0x10), "flags are 0x10, static_resize_bilinear2d takes 0x4 0x8 0x20")
    refused(stored(build, attrs={"new_height": 0}), "new_height is 0")


@pytest.mark.parametrize("attrs, match", [
    ({"sizes": (2, 5)}, r"offsets\[1\] \+ sizes\[1\] is 1 \+ 5, the input's dim 1 is 4"),
    ({"offsets": (0, 4)}, r"offsets\[1\] \+ sizes\[1\] is 4 \+ 3"),
    ({"offsets": (2**32 - 1, 1)}, "offsets"),
    ({"sizes": (2,)}, "need sizes of num_dims = 2 entries, found 1"),
])
def test_J_slices_are_checked(attrs, match):
    def build(b):
        return b.static_slice(b.input((2, 4)), (0, 1), (2, 3))

    np.testing.assert_array_equal(ran(build, ramp(2, 4)), ramp(2, 4)[:, 1:])
    refused(stored(build, attrs=attrs), match)


def test_J_a_size_of_0_is_what_is_left():
    # The engine gives it the whole dimension as shape, and wrong numbers.
    def build(b):
        return b.static_slice(b.input((2, 4)), (0, 1), (2, 3))

    graph = xf.load(stored(build, attrs={"sizes": (0, 0)}))
    np.testing.assert_array_equal(Runtime(graph).run(ramp(2, 4))[0], ramp(2, 4)[:, 1:])


@pytest.mark.parametrize("perm, match", [((0, 0), "need each of 0 to 1 once"), ((0, 2), "need each of 0 to 1 once"),
                                         ((0,), "perm has 1 entries"), ((0, 1, 2), "perm has 3 entries")])
def test_J_permutations_are_checked(perm, match):
    refused(stored(lambda b: b.static_transpose(b.input((2, 4)), (1, 0)), attrs={"perm": perm}), match)


def test_J_a_negative_pad_is_refused():
    def build(b):
        return b.static_constant_pad(b.input((2, 4)), (1, 0), (0, 0), 9)

    np.testing.assert_array_equal(ran(build, ramp(2, 4))[0], [9] * 4)
    refused(stored(build, attrs={"pre_paddings": (2**32 - 1, 0)}), r"pre_paddings\[0\] is 4294967295")


@pytest.mark.parametrize("datatype", ["int32", "bf16", "qint32"])
@pytest.mark.parametrize("name", ["static_transpose", "concatenate2", "static_slice", "static_constant_pad"])
def test_J_types_that_would_be_moved_at_the_wrong_width_are_refused(name, datatype):
    graph = case(name, OPS[name].datatypes[0]).graph
    quantization = PerTensor(1.0, 0) if datatype == "qint32" else None
    values = [value.replace(datatype=datatype, quantization=quantization) for value in graph.values]
    ids = {value.id: value for value in values}
    inputs, outputs = ([ids[each.id] for each in group] for group in (graph.inputs, graph.outputs))
    parts = writer.Parts(values, graph.nodes, inputs, outputs)
    refused(writer.to_bytes(parts), f"{name} has .*{datatype}; it needs fp32", xf.GraphError)

