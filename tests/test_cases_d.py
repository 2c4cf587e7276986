"""Faults that others had, class D: rank, broadcasting and shape inference; declared shapes against real ones."""

import numpy as np
import pytest
from small import f32, ramp, ran, refused, stored

import xnnfast as xf
from xnnfast._graph import Constant


def test_D1_a_stretched_axis_keeps_its_size():
    got = ran(lambda b: b.subtract(b.input((2, 1)), b.input((1, 3))), f32([[1], [2]]), f32([[10, 20, 30]]))
    np.testing.assert_array_equal(got, [[-9, -19, -29], [-8, -18, -28]])


def test_D2_a_stretched_operand_goes_to_every_row():
    got = ran(lambda b: b.add(b.input((2, 3)), b.input((1, 3))), f32([[1, 2, 3], [4, 5, 6]]), f32([[10, 20, 30]]))
    np.testing.assert_array_equal(got, [[11, 22, 33], [14, 25, 36]])


@pytest.mark.parametrize("name, one, many, want", [
    ("divide", [4], [1, 2, 4], [4, 2, 1]), ("prelu", [-1], [1, 2, 3], [-1, -2, -3]),
    ("subtract", [4], [1, 2, 4], [3, 2, 0]), ("minimum", [2], [1, 2, 4], [1, 2, 2]),
    ("divide", [1, 2, 4], [4], [.25, .5, 1]), ("prelu", [-1, -2, -3], [2], [-2, -4, -6]),
    ("subtract", [1, 2, 4], [4], [-3, -2, 0]), ("minimum", [1, 2, 4], [2], [1, 2, 2])])
@pytest.mark.parametrize("rank", [1, 3])
def test_D2_in_both_orders_and_ranks(name, one, many, want, rank):
    a, b = f32(one), f32(many)
    # The operand of three elements may have a higher rank: 1x1x3 beside 1.
    if rank == 3:
        a, b = (array.reshape(1, 1, 3) if array.size == 3 else array for array in (a, b))
    got = ran(lambda g: getattr(g, name)(g.input(a.shape), g.input(b.shape)), a, b)
    assert got.shape == np.broadcast_shapes(a.shape, b.shape)
    np.testing.assert_array_equal(got.ravel(), want)


def test_D3_rank_6_is_the_limit():
    first, second = (1, 2, 1, 2, 1, 2), (2, 1, 2, 1, 2, 1)

    def build(b):
        return b.add(b.input(first), b.input(second))

    a, b = ramp(*first), ramp(*second)
    np.testing.assert_array_equal(ran(build, a, b), a + b)
    seven = {"shape": (1, *first)}
    refused(stored(build, values={0: seven, 1: seven, 2: seven}), "rank 7, limit 6", xf.GraphError)


def test_D3_rank_7_of_a_constant():
    def build(b):
        return b.add(b.input((2, 2)), ramp(2, 2))

    np.testing.assert_array_equal(ran(build, ramp(2, 2)), 2 * ramp(2, 2))
    refused(stored(build, values={1: {"shape": (1, 1, 1, 1, 1, 2, 2)}}), "value 1 .*rank 7, limit 6", xf.GraphError)


IDENTITIES = np.stack([np.eye(2), 2 * np.eye(2)]).astype(np.float32)


@pytest.mark.parametrize("shape", [(1, 2, 2), (2, 2)])
def test_D7_batches_of_a_product_are_stretched(shape):
    x = f32(0, 1, 2, 3).reshape(shape)
    got = ran(lambda b: b.batch_matrix_multiply(b.input(shape), b.input((2, 2, 2))), x, IDENTITIES)
    np.testing.assert_array_equal(got, [[[0, 1], [2, 3]], [[0, 2], [4, 6]]])


@pytest.mark.parametrize("first, second, match", [
    ((2, 2, 2), (3, 2, 2), "dim 0 of 2 is 2, of 3 it is 3"),
    ((1, 2, 3), (1, 2, 2), "input1 dim 2 is 3, input2 dim 1 is 2")])
def test_D7_other_batches_and_inner_sizes_are_refused(first, second, match):
    def build(b):
        return b.batch_matrix_multiply(b.input((2, 2, 2)), b.input((2, 2, 2)))

    refused(stored(build, values={0: {"shape": first}, 1: {"shape": second}}), match)


@pytest.mark.parametrize("kind", ["output", "inside"])
def test_D_declared_shapes_are_compared_with_computed_ones(kind):
    # XNNPACK ignores what a file declares.
    def build(b):
        return b.negate(b.abs(b.input((2, 3))))

    assert ran(build, ramp(2, 3)).shape == (2, 3)
    wrong = {2 if kind == "output" else 1: {"shape": (2, 4)}}
    refused(stored(build, values=wrong), "is declared 2x4, the operator gives", xf.ShapeError)


@pytest.mark.parametrize("build, value, shape, match", [
    (lambda b: b.fully_connected(b.input((2, 3)), ramp(4, 3), ramp(4)), 2, (3,), "bias is 3, need 4"),
    (lambda b: b.fully_connected(b.input((2, 3)), ramp(4, 3), ramp(4)), 1, (3, 4),
     "input dim 1 is 3, filter dim 1 .* is 4"),
    (lambda b: b.conv2d(b.input((1, 2, 2, 1)), ramp(4, 1, 1, 1), ramp(4)), 2, (3,), "bias is 3, need 4"),
    (lambda b: b.concatenate2(b.input((2, 3)), b.input((2, 3)), 0), 1, (2, 2), "input2 dim 1 is 2, input1 dim 1 is 3"),
    (lambda b: b.concatenate2(b.input((2, 3)), b.input((2, 3)), 0), 1, (2, 3, 1), "input2 has rank 3"),
    (lambda b: b.static_transpose(b.input((2, 3)), (1, 0)), 0, (2, 3, 1), "perm has 2 entries, the input has rank 3"),
    (lambda b: b.static_slice(b.input((2, 3)), (0, 0), (1, 1)), 0, (2, 3, 1), "offsets has 2 entries"),
    (lambda b: b.static_constant_pad(b.input((2, 3)), (0, 0), (1, 1)), 0, (2, 3, 1), "pre_paddings has 2 entries"),
    (lambda b: b.static_resize_bilinear2d(b.input((1, 2, 2, 1)), 3), 0, (2, 2, 1), "input needs rank 4"),
    (lambda b: b.max_pooling2d(b.input((1, 2, 2, 1)), 2), 0, (2, 2, 1), "input needs rank 4"),
    (lambda b: b.softmax(b.input((2, 3))), 0, (), "input needs rank 1 or more, found a scalar"),
], ids=["fc-bias", "fc-filter", "conv-bias", "concat-dim", "concat-rank", "transpose", "slice", "pad", "resize", "pool",
        "softmax"])
def test_D_ranks_and_sizes_are_checked_at_load(build, value, shape, match):
    refused(stored(build, values={value: {"shape": shape}}), match)


def test_D_a_constant_shorter_than_its_shape():
    def build(b):
        return b.add(b.input((2, 3)), ramp(2, 3))

    refused(stored(build, values={1: {"constant": Constant(bytes(20))}}), "need 24 bytes .* has 20")
