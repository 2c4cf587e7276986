"""Faults that others had, class E: geometry of pools and SAME padding."""

import numpy as np
import pytest
from small import f32, in_child, ramp, ran, refused, stored

from xnnfast.ops import OPS

NAN = np.nan


def image(array):
    """One image of one channel."""
    return f32(array)[None, ..., None]


def pooled(name, x, pooling, **options):
    return ran(lambda b: getattr(b, name)(b.input(x.shape), pooling, **options), x)


def test_E2_padding_does_not_count_in_a_mean():
    ones = pooled("average_pooling2d", np.ones((1, 4, 4, 1), np.float32), 3, stride=1, padding=1)
    np.testing.assert_array_equal(ones, np.ones((1, 4, 4, 1)))
    got = pooled("average_pooling2d", ramp(1, 4, 4, 1), 3, stride=2, padding=1)
    np.testing.assert_allclose(got[0, ..., 0], [[3.5, 5], [9.5, 11]], rtol=1e-6)


def test_E3_places_that_exist_by_rounding_do_not_count():
    got = pooled("average_pooling2d", ramp(1, 5, 5, 1), 2, stride=2, same_padding=True)
    np.testing.assert_allclose(got[0, ..., 0], [[4, 6, 7.5], [14, 16, 17.5], [21.5, 23.5, 25]], rtol=1e-6)


def refusals_of_windows_of_padding():
    for name, padding in (("average_pooling2d", 3), ("max_pooling2d", 2)):
        def build(b, name=name):
            return getattr(b, name)(b.input((1, 4, 4, 1)), 2, stride=1, padding=1)

        assert ran(build, ramp(1, 4, 4, 1)).shape == (1, 5, 5, 1)
        sides = {f"padding_{side}": padding for side in ("top", "right", "bottom", "left")}
        size = 4 + 2 * padding - 1
        # With the shape that the engine would give.
        refused(stored(build, attrs=sides, values={1: {"shape": (1, size, size, 1)}}), "holds padding alone")


def test_E5_windows_of_padding_alone_are_refused():
    in_child("test_cases_e", "refusals_of_windows_of_padding")


def test_E7_argmax_counts_the_places_of_a_window():
    value, index = pooled("argmax_pooling2d", ramp(1, 4, 4, 1), 2)
    assert value.ravel().tolist() == [6, 8, 14, 16]
    assert index.ravel().tolist() == [3, 3, 3, 3]
    assert index.dtype == np.uint32


def test_E7_the_first_of_equals_wins():
    value, index = pooled("argmax_pooling2d", image([[3, 3], [3, 3]]), 2)
    assert (value.item(), index.item()) == (3, 0)


@pytest.mark.parametrize("place", [(row, column) for row in range(2) for column in range(3)])
def test_E7_places_are_counted_column_by_column(place):
    # Row by row would be the usual order, and is what cases.md and lowering.md expect; but this XNNPACK lays the
    # pointers of a window out as x * pooling_height + y, and the kernels number those. Documented in the row.
    x = np.zeros((2, 3))
    x[place] = 1
    value, index = pooled("argmax_pooling2d", image(x), (2, 3))
    assert (value.item(), index.item()) == (1, place[1] * 2 + place[0])
    assert "x * pooling_height + y" in OPS["argmax_pooling2d"].doc


def test_E7_padding_repeats_the_edge_and_may_be_named():
    # The window's column 0 is padding; its place 0 stands for the input's first element, and comes first.
    value, index = pooled("argmax_pooling2d", image([[5, 1], [2, 3]]), 2, padding=(0, 0, 0, 1))
    assert value.shape == (1, 1, 1, 1)
    assert (value.item(), index.item()) == (5, 0)


def test_E7_nan_counts_in_first_place_only():
    value, index = pooled("argmax_pooling2d", image([[NAN, 1], [2, 3]]), 2)
    assert np.isnan(value.item()) and index.item() == 0
    value, index = pooled("argmax_pooling2d", image([[1, 2], [NAN, 0]]), 2)
    assert (value.item(), index.item()) == (2, 2)
    assert "NaN as the first element of a window gives NaN and 0" in OPS["argmax_pooling2d"].nan


@pytest.mark.parametrize("name", ["argmax_pooling2d", "max_pooling2d"])
def test_E7_a_window_of_one_element_is_refused(name):
    def build(b):
        return getattr(b, name)(b.input((1, 4, 4, 1)), (1, 2))

    assert ran(build, ramp(1, 4, 4, 1)) is not None
    refused(stored(build, attrs={"pooling_width": 1}), "the window is 1x1")


@pytest.mark.parametrize("name, attrs, match", [
    ("max_pooling2d", {"stride_height": 3}, "stride_height is 3, need pooling_height 2 or less"),
    ("max_pooling2d", {"stride_width": 0}, "stride_width is 0"),
    ("average_pooling2d", {"pooling_height": 5}, "the window is 5 high"),
    ("average_pooling2d", {"pooling_height": 0}, "pooling_height is 0"),
    ("average_pooling2d", {"padding_left": 2**32 - 1}, "padding_left is 4294967295"),
    ("average_pooling2d", {"dilation_height": 2}, "dilation_height is 2"),
    ("max_pooling2d", {"dilation_width": 4}, "the window is 5 wide"),
])
def test_E_windows_are_checked_at_load(name, attrs, match):
    def build(b):
        return getattr(b, name)(b.input((1, 4, 4, 1)), 2)

    refused(stored(build, attrs=attrs), match)


@pytest.mark.parametrize("name", ["average_pooling2d", "max_pooling2d", "argmax_pooling2d"])
def test_E_same_padding_excludes_padding_of_ones_own(name):
    def build(b):
        return getattr(b, name)(b.input((1, 4, 4, 1)), 2, same_padding=True)

    refused(stored(build, attrs={"padding_top": 1}), "SAME padding .* needs both 0")


def test_E_global_average_pooling_keeps_dims_as_declared():
    x = ramp(2, 3, 4, 5)
    for keep, shape in ((True, (2, 1, 1, 5)), (False, (2, 5))):
        got = ran(lambda b, keep=keep: b.global_average_pooling2d(b.input(x.shape), keep_dims=keep), x)
        np.testing.assert_allclose(got, x.mean((1, 2)).reshape(shape), rtol=1e-6)
