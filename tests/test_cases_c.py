"""Faults that others had, class C: dynamic shapes, and state left over from the run before."""

import numpy as np
import pytest
from op_cases import case
from small import built, f32, ramp, ran, refused, stored

import xnnfast as xf
from xnnfast import Runtime


def runtime_of(build):
    return Runtime(built(build).graph())


def test_C1_a_first_dimension_declared_1_takes_any_batch():
    weights = (np.arange(256, dtype=np.float32) / 256).reshape(16, 16)
    runtime = runtime_of(lambda b: b.fully_connected(b.input((1, 16)), weights))
    x = ramp(10, 16) / 16
    (y,) = runtime.run(x)
    assert y.shape == (10, 16)
    np.testing.assert_allclose(y, x.astype(np.float64) @ weights.T, rtol=1e-6)
    # And back, and on.
    for batch in (1, 3, 10, 64):
        (y,) = runtime.run(x[:1].repeat(batch, 0))
        assert y.shape == (batch, 16)
        np.testing.assert_array_equal(y, y[:1].repeat(batch, 0))


@pytest.mark.parametrize("new_shape, match", [
    ((0, 0, 2), "more than one inferred dimension"), ((0, 3, 2), "not a multiple of 6"), ((2, 2, 3), "12 elements")])
def test_C5_only_one_dimension_may_be_inferred(new_shape, match):
    def build(b):
        return b.static_reshape(b.input((8,)), (0, 2, 2))

    np.testing.assert_array_equal(ran(build, ramp(8)), ramp(2, 2, 2))
    refused(stored(build, attrs={"new_shape": new_shape}), match)


def test_C_shapes_that_come_and_go_leave_nothing_behind():
    weights = ramp(5, 3, 3, 3) / 64
    runtime = runtime_of(lambda b: b.max_pooling2d(b.conv2d(b.input((1, 8, 8, 3)), weights, padding=1), 2))
    for shape in ((1, 8, 8, 3), (4, 8, 8, 3), (1, 5, 9, 3), (2, 3, 3, 3), (7, 12, 2, 3), (1, 8, 8, 3)):
        x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        np.testing.assert_array_equal(runtime.run(x)[0], Runtime(runtime.graph).run(x)[0])


def test_C_an_operand_that_becomes_stretched():
    # The engine plans the first operand's memory for the result when both are as large, and keeps the plan.
    runtime = runtime_of(lambda b: b.abs(b.subtract(b.negate(b.input((4, 64))), b.input((4, 64)))))
    whole, row = ramp(4, 64), ramp(1, 64)
    for a, b in ((whole, whole), (row, whole), (whole, row), (row, row), (whole, whole)):
        np.testing.assert_array_equal(runtime.run(a, b)[0], np.abs(-a - b))


def test_C_a_shape_that_fails_leaves_the_runtime_usable():
    runtime = runtime_of(lambda b: b.fully_connected(b.input((2, 16)), ramp(3, 16)))
    (want,) = runtime.run(ramp(2, 16))
    for shape in ((2, 15), (2, 17), (16,), (2, 2, 16)):
        with pytest.raises(xf.ShapeError):
            runtime.run(np.zeros(shape, np.float32))
        np.testing.assert_array_equal(runtime.run(ramp(2, 16))[0], want)


def test_C_a_window_that_no_longer_fits_is_refused():
    # The engine saturates the size and reads wild memory.
    runtime = runtime_of(lambda b: b.conv2d(b.input((1, 4, 4, 1)), ramp(1, 3, 3, 1)))
    with pytest.raises(xf.ShapeError, match="the window is 3 high"):
        runtime.run(np.zeros((1, 2, 4, 1), np.float32))
    assert runtime.run(np.zeros((1, 3, 4, 1), np.float32))[0].shape == (1, 1, 2, 1)


def test_C_a_slice_does_not_drop_rows():
    # The engine takes a larger input without a word and gives as many rows as the file says.
    runtime = runtime_of(lambda b: b.static_slice(b.input((2, 5)), (0, 1), (2, 3)))
    x = ramp(4, 5)
    np.testing.assert_array_equal(runtime.run(x)[0], x[:, 1:4])
    part = runtime_of(lambda b: b.static_slice(b.input((4, 5)), (1, 0), (2, 5)))
    np.testing.assert_array_equal(part.run(x)[0], x[1:3])
    with pytest.raises(xf.ShapeError):
        part.run(ramp(2, 5))


def test_C_the_index_of_argmax_pooling_follows_the_batch():
    runtime = runtime_of(lambda b: b.argmax_pooling2d(b.input((1, 2, 2, 1)), 2))
    x = f32([[[1, 2], [3, 4]], [[4, 3], [2, 1]], [[1, 5], [2, 0]]])[..., None]
    value, index = runtime.run(x)
    assert value.shape == index.shape == (3, 1, 1, 1)
    assert index.ravel().tolist() == [3, 0, 2]


@pytest.mark.parametrize("build", [
    lambda b: b.convert(b.input((2, 4)), "fp16"),
    lambda b: b.conv2d(b.input((1, 4, 4, 2)), ramp(3, 3, 3, 2)),
    lambda b: b.fully_connected(b.input((2, 4)), ramp(3, 4)),
    lambda b: b.concatenate2(b.input((2, 4)), b.input((2, 1)), 1),
], ids=["convert", "conv2d", "fully_connected", "concatenate2"])
def test_C_an_empty_batch_never_reaches_the_engine(build):
    runtime = runtime_of(build)
    full = [np.ones(value.shape, value.dtype) for value in runtime.inputs]
    (want,) = runtime.run(*full)
    (empty,) = runtime.run(*(array[:0] for array in full))
    assert empty.shape == (0, *want.shape[1:]) and empty.dtype == want.dtype
    np.testing.assert_array_equal(runtime.run(*full)[0], want)


def test_C_dynamic_convolutions_take_more_images():
    # The engine frees a buffer per image of the new batch, though it had fewer.
    for name in ("conv2d", "conv_transpose2d"):
        made = case(name, ("qdint8", "qcint8", "fp32", "fp32"), batch=1, padding=1)
        runtime = Runtime(made.graph)
        for batch in (1, 9, 2, 30, 1, 30):
            made.check(made.arrays(batch=batch), runtime)
