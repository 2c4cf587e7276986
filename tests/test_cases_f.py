"""Faults that others had, class F: geometry of convolutions, plain, depthwise and transposed; groups."""

import numpy as np
import pytest
from small import f32, in_child, ramp, ran, refused, stored


def test_F1_a_grouped_transposed_convolution():
    x = f32(1, 5, 2, 6, 3, 7, 4, 8).reshape(1, 2, 2, 2)
    got = ran(lambda b: b.conv_transpose2d(b.input(x.shape), ramp(2, 3, 3, 1), groups=2), x)
    assert got.shape == (1, 4, 4, 2)
    np.testing.assert_array_equal(got[0, ..., 0], [[1, 4, 7, 6], [7, 23, 33, 24], [19, 53, 63, 42], [21, 52, 59, 36]])
    np.testing.assert_array_equal(
        got[0, ..., 1], [[50, 115, 126, 72], [135, 305, 331, 186], [171, 383, 409, 228], [112, 247, 262, 144]])


def test_F7_a_dilated_transposed_convolution():
    x = f32([[1, 2], [3, 4]]).reshape(1, 2, 2, 1)
    got = ran(lambda b: b.conv_transpose2d(b.input(x.shape), ramp(1, 2, 2, 1), dilation=2), x)
    np.testing.assert_array_equal(got[0, ..., 0], [[1, 2, 2, 4], [3, 4, 6, 8], [3, 6, 4, 8], [9, 12, 12, 16]])


BUILDS = {
    "conv2d": (lambda b: b.conv2d(b.input((1, 4, 4, 1)), ramp(1, 3, 3, 1)), (1, 2, 2, 1)),
    "conv_transpose2d": (lambda b: b.conv_transpose2d(b.input((1, 4, 4, 1)), ramp(1, 3, 3, 1)), (1, 2, 2, 1)),
    "depthwise_conv2d": (lambda b: b.depthwise_conv2d(b.input((1, 4, 4, 2)), ramp(1, 3, 3, 2)), (1, 2, 2, 2)),
}


def refusals_of_small_filters():
    for build, small in BUILDS.values():
        shape = (1, 4, 4, small[3])
        ran(build, ramp(*shape))
        refused(stored(build, values={1: {"shape": small}}), "filter dim 1 is 2, kernel_height is 3")


def test_F3_a_filter_smaller_than_the_kernel_is_refused():
    in_child("test_cases_f", "refusals_of_small_filters")


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("axis", range(4))
def test_F3_every_dimension_of_a_filter_is_compared(name, axis):
    build, _ = BUILDS[name]
    shape = [1, 3, 3, 2 if name == "depthwise_conv2d" else 1]
    shape[axis] += 1
    refused(stored(build, values={1: {"shape": tuple(shape)}}), f"filter dim {axis} is {shape[axis]}|need .* bytes")


@pytest.mark.parametrize("name", ["conv2d", "conv_transpose2d"])
def test_F5_input_channels_are_groups_times_those_of_one(name):
    def build(b):
        return getattr(b, name)(b.input((1, 2, 2, 2)), ramp(2, 1, 1, 1), groups=2)

    np.testing.assert_array_equal(ran(build, ramp(1, 2, 2, 2)), ramp(1, 2, 2, 2) * [1, 2])
    refused(stored(build, values={0: {"shape": (1, 2, 2, 3)}}), r"dim 3 is 3, groups \* group_input_channels is 2")


def test_F5_of_a_depthwise_convolution():
    def build(b):
        return b.depthwise_conv2d(b.input((1, 2, 2, 2)), ramp(1, 1, 1, 2))

    refused(stored(build, values={0: {"shape": (1, 2, 2, 3)}}), "input dim 3 is 3, groups is 2")
    refused(stored(build, attrs={"group_output_channels": 3, "group_input_channels": 2}), "need a multiple of")
    refused(stored(build, attrs={"group_input_channels": 0}), "group_input_channels is 0")


@pytest.mark.parametrize("attrs, match", [
    ({"subsampling_height": 0}, "subsampling_height is 0"), ({"dilation_width": 0}, "dilation_width is 0"),
    ({"dilation_width": 2}, "the window is 5 wide"), ({"groups": 0}, "groups is 0"),
    ({"padding_top": 2**32 - 1}, "padding_top is 4294967295"), ({"kernel_height": 2**31}, "kernel_height"),
    ({"groups": 2**16, "group_input_channels": 2**16}, "filter dim 0"),
    ({"adjustment_height": 1}, "adjustment_height is 1, conv2d has no use for it"),
])
def test_F_geometry_is_checked_at_load(attrs, match):
    refused(stored(BUILDS["conv2d"][0], attrs=attrs), match)


@pytest.mark.parametrize("attrs, match", [
    ({"adjustment_height": 1}, "adjustment_height is 1, need less than subsampling_height 1"),
    ({"padding_top": 3, "padding_bottom": 3}, "the output would be 0 high"),
    ({"padding_top": 9, "padding_bottom": 9}, "the output would be -12 high"),
])
def test_F_geometry_of_a_transposed_convolution(attrs, match):
    refused(stored(BUILDS["conv_transpose2d"][0], attrs=attrs), match)


def test_F_flags_of_a_transposed_convolution():
    refused(stored(BUILDS["conv_transpose2d"][0], flags=4), "flags are 0x4, conv_transpose2d takes none")


def test_F_pads_are_top_right_bottom_left():
    x = ramp(1, 1, 1, 1)
    for place, sides in enumerate([(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]):
        got = ran(lambda b, sides=sides: b.conv2d(b.input(x.shape), ramp(1, 1, 1, 1), padding=sides), x)
        want = [[[0], [1]], [[1, 0]], [[1], [0]], [[0, 1]]][place]
        np.testing.assert_array_equal(got[0, ..., 0], want)
