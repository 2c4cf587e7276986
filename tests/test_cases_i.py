"""Faults that others had, class I: dynamic quantization by rows, 4-bit filters, group scales."""

import numpy as np
import pytest
from small import f32, in_child, ran, refused, stored

import xnnfast as xf
from xnnfast import GraphBuilder, PerBlock, PerChannel, PerToken, Runtime
from xnnfast.ops import OPS


def dynamic(weights, quantization, *, rows=1, shape=(3, 2), datatype="qcint8", bias=None):
    """Build function of x -> qdint8 -> fully connected -> fp32."""
    def build(b):
        x = b.convert(b.input(shape), "qdint8", PerToken(rows))
        return b.fully_connected(x, b.constant(weights, datatype, quantization), bias)

    return build


ONES = dynamic(np.int8([[1, 1]]), PerChannel(f32([1]), 0))


def test_I1_rows_are_quantized_by_themselves():
    x = f32([1, 2], [100, 200], [.001, .002])
    got = ran(ONES, x)
    assert got.shape == (3, 1)
    np.testing.assert_allclose(got.ravel(), [3, 300, .003], rtol=1e-2)
    # Whatever the neighbours are.
    for row in range(3):
        alone = Runtime(xf.load(stored(ONES))).run(x[row:row + 1])[0]
        np.testing.assert_array_equal(alone, got[row:row + 1])


@pytest.mark.parametrize("rows, match", [(2, "is quantized over its last 2 axes, fully_connected needs 1"),
                                         (0, "need num_nonbatch_dims from 1 to 2, found 0"),
                                         (3, "need num_nonbatch_dims from 1 to 2, found 3")])
def test_I1_other_numbers_of_axes_are_refused(rows, match):
    refused(stored(ONES, values={1: {"quantization": PerToken(rows)}}), match)


def test_I1_convolutions_quantize_by_images():
    x = f32([1, 2], [100, 200], [.001, .002]).reshape(3, 1, 1, 2)

    def build(b, rows=3):
        ones = b.constant(np.ones((1, 1, 1, 2), np.int8), "qcint8", PerChannel(f32([1]), 0))
        return b.conv2d(b.convert(b.input(x.shape), "qdint8", PerToken(rows)), ones)

    np.testing.assert_allclose(ran(build, x).ravel(), [3, 300, .003], rtol=1e-2)
    refused(stored(build, values={2: {"quantization": PerToken(1)}}), "conv2d needs 3")


def test_I1_a_row_of_zeros_gives_the_bias():
    bias = f32(1.5, -2.25)
    build = dynamic(np.int8([[1, 1], [3, -7]]), PerChannel(f32(1, .5), 0), bias=bias, shape=(2, 2))
    np.testing.assert_array_equal(ran(build, f32([0, 0], [1, 1]))[0], bias)


def test_I1_a_row_with_nan_leaves_the_others_alone():
    x = f32([1, 2], [np.nan, 1], [3, 4])
    got, want = ran(ONES, x), ran(ONES, f32([1, 2], [0, 1], [3, 4]))
    np.testing.assert_array_equal(got[[0, 2]], want[[0, 2]])
    assert "a row that holds a NaN is lost" in OPS["convert"].nan


@pytest.mark.parametrize("byte, want", [(0x98, 10), (0x89, 1)])
def test_I3_the_low_nibble_comes_first(byte, want):
    # Stored numbers are 8 above: 0x98 is 0 and 1. Files have no zero point of their own for 4-bit numbers.
    packed, one = np.uint8([[byte]]), PerChannel(f32([1]), 0)
    for build in (dynamic(packed, one, datatype="qcint4", shape=(1, 2)),
                  lambda b: b.fully_connected(b.input((1, 2)), b.constant(packed, "qcint4", one))):
        np.testing.assert_allclose(ran(build, f32([[1, 10]])), [[want]], atol=.1)


def test_I3_of_group_scales_too():
    # 32 numbers a group: the first two groups hold 1 and -1, with scales of their own.
    numbers = np.repeat(np.int8([[1, -1]]), 32, axis=1)
    build = dynamic(numbers, PerBlock(f32(1, 2), 0, 32), datatype="qbint4", shape=(1, 64))
    x = np.ones((1, 64), np.float32)
    np.testing.assert_allclose(ran(build, x), [[32 - 64]], rtol=1e-2)


def refusals_of_odd_rows():
    numbers = np.int8([[0, 1, 2, 3], [1, 2, 3, 4]])
    build = dynamic(numbers, PerChannel(f32(1, 1), 0), datatype="qcint4", shape=(1, 4))
    ran(build, f32([[1, 10, 100, 1000]]))
    odd = {0: {"shape": (1, 3)}, 1: {"shape": (1, 3)}, 2: {"shape": (2, 3)}}
    refused(stored(build, values=odd), "even .*found 3", xf.GraphError)


def test_I5_odd_rows_of_4_bit_numbers_are_refused():
    in_child("test_cases_i", "refusals_of_odd_rows")


def test_I5_the_builder_says_so_as_well():
    b = GraphBuilder()
    with pytest.raises(xf.ShapeError, match="even number of elements"):
        b.constant(np.zeros((2, 3), np.int8), "qcint4", PerChannel(f32(1, 1), 0))


@pytest.mark.parametrize("size", [16, 0, 48, 64])
def test_I_group_sizes(size):
    quantization = PerBlock(np.ones(6, np.float32), 0, 32)
    build = dynamic(np.ones((2, 96), np.int8), quantization, datatype="qbint4", shape=(1, 96))
    ran(build, np.ones((1, 96), np.float32))
    scales = np.full(2 * 96 // (size or 32), 0x3F80, np.uint16)
    refused(stored(build, values={2: {"quantization": PerBlock(scales, 0, size)}}),
            f"multiple of 32 and divides 96, found {size}")


def test_I_transposed_4_bit_filters_are_refused():
    scales = PerChannel(np.ones(4, np.float32), 0)
    build = dynamic(np.ones((4, 4), np.int8), scales, datatype="qcint4", shape=(1, 4))
    refused(stored(build, node=1, flags=1), "transposed filter|axis 0, need axis 1", xf.GraphError)
