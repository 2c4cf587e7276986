"""Shapes: what every operator makes of its inputs' shapes, and what it refuses; then whole graphs."""

import itertools
import math
import types

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from xnnfast import shapes
from xnnfast._graph import Constant, Node, Value
from xnnfast.errors import ShapeError
from xnnfast.ops import OPS, Refusal

SAME = 4
NEGATIVE = 2**32  # a negative number in an unsigned field is this much more


def node(name, attrs=None, flags=0):
    op = OPS[name]
    return Node(op, range(len(op.inputs)), range(90, 90 + len(op.outputs)), attrs or {}, flags=flags)


def shape(name, *ins, flags=0, **attrs):
    ins = (*ins, *[None] * (len(OPS[name].inputs) - len(ins)))
    outs = OPS[name].shape(node(name, attrs, flags), list(ins))
    assert all(type(out) is tuple for out in outs) and len(outs) == len(OPS[name].outputs)
    return outs[0]


def refusal(name, *ins, flags=0, **attrs):
    with pytest.raises(Refusal) as caught:
        shape(name, *ins, flags=flags, **attrs)
    return str(caught.value)


# ---- element by element

@pytest.mark.parametrize("a, b, out", [
    ((2, 1), (1, 3), (2, 3)), ((2, 3), (1, 3), (2, 3)), ((2, 3), (3,), (2, 3)), ((3,), (2, 3), (2, 3)),
    ((), (3,), (3,)), ((), (), ()), ((1, 2, 1, 2, 1, 2), (2, 1, 2, 1, 2, 1), (2,) * 6), ((4, 5), (4, 5), (4, 5)),
    ((0, 2), (1, 2), (0, 2)), ((0, 2), (2,), (0, 2)), ((1, 2), (0, 1), (0, 2)), ((0, 2), (0, 2), (0, 2)),
])
@pytest.mark.parametrize("name", ["add", "subtract", "multiply", "divide", "minimum", "maximum", "prelu"])
def test_binary_operators_broadcast_as_numpy_does(name, a, b, out):
    assert shape(name, a, b) == out == np.broadcast_shapes(a, b)


@pytest.mark.parametrize("a, b, part", [
    ((2, 3), (2, 4), "dim 1 of 2x3 is 3, of 2x4 it is 4"), ((2, 3), (2,), "neither equal nor 1"), ((0,), (2,), "is 0")])
def test_shapes_that_do_not_broadcast(a, b, part):
    assert part in refusal("add", a, b)


@given(st.lists(st.integers(0, 4), max_size=6), st.lists(st.integers(0, 4), max_size=6))
def test_broadcasting_agrees_with_numpy(a, b):
    try:
        want = np.broadcast_shapes(a, b)
    except ValueError:
        refusal("maximum", tuple(a), tuple(b))
    else:
        assert shape("maximum", tuple(a), tuple(b)) == want


def test_unary_operators_keep_the_shape():
    for name in ("sigmoid", "clamp", "convert", "copy", "leaky_relu", "softmax"):
        assert shape(name, (2, 0, 3)) == (2, 0, 3)
    assert shape("tanh", ()) == ()
    assert "rank 1 or more, found a scalar" in refusal("softmax", ())


# ---- products of matrices

def test_fully_connected():
    assert shape("fully_connected", (10, 16), (4, 16), (4,)) == (10, 4)
    assert shape("fully_connected", (16,), (4, 16)) == (4,)
    assert shape("fully_connected", (2, 3, 16), (16, 4), (4,), flags=1) == (2, 3, 4)
    assert shape("fully_connected", (2, 3, 16), (4, 16), flags=4) == (6, 4)
    assert shape("fully_connected", (16,), (16, 4), flags=5) == (1, 4)
    assert shape("fully_connected", (0, 16), (4, 16), (4,)) == (0, 4)


@pytest.mark.parametrize("ins, flags, part", [
    (((10, 15), (4, 16)), 0, "input dim 1 is 15, filter dim 1 (input channels) is 16"),
    (((10, 4), (16, 4)), 1, "input dim 1 is 4, filter dim 0 (input channels) is 16"),
    (((10, 16), (4, 16), (3,)), 0, "bias is 3, need 4 (output channels)"),
    (((10, 16), (4, 16), (1, 4)), 0, "bias is 1x4, need 4"),
    (((10, 16), (4, 4, 4)), 0, "filter needs rank 2, found rank 3 (4x4x4)"),
    (((), (4, 16)), 0, "found a scalar"), (((10, 0), (4, 0)), 0, "filter is 4x0"), (((1, 4),
    (0, 4)), 0, "filter is 0x4"),
])
def test_fully_connected_refuses(ins, flags, part):
    assert part in refusal("fully_connected", *ins, flags=flags)


@pytest.mark.parametrize("a, b, flags, out", [
    ((1, 2, 2), (2, 2, 2), 0, (2, 2, 2)), ((2, 2), (2, 2, 2), 0, (2, 2, 2)), ((2, 3), (3, 4), 0, (2, 4)),
    ((2, 3), (4, 3), 1, (2, 4)), ((5, 1, 2, 3), (4, 3, 6), 0, (5, 4, 2, 6)), ((0, 2, 3), (1, 3, 4), 0, (0, 2, 4)),
])
def test_batch_matrix_multiply(a, b, flags, out):
    assert shape("batch_matrix_multiply", a, b, flags=flags) == out


@pytest.mark.parametrize("a, b, flags, part", [
    ((2, 2, 2), (3, 2, 2), 0, "neither equal nor 1"), ((1, 2, 3), (1, 2, 2), 0, "input1 dim 2 is 3, input2 dim 1 is 2"),
    ((2, 3), (3, 4), 1, "input1 dim 1 is 3, input2 dim 1 is 4"), ((3,), (3, 4), 0, "input1 needs rank 2 or more"),
    ((2, 3), (3,), 0, "input2 needs rank 2 or more, found rank 1 (3)"), ((2, 0), (0, 3), 0, "1 or more to sum over"),
])
def test_batch_matrix_multiply_refuses(a, b, flags, part):
    assert part in refusal("batch_matrix_multiply", a, b, flags=flags)


@given(st.lists(st.integers(1, 3), max_size=4), st.lists(st.integers(1, 3), max_size=4), st.integers(1, 3),
       st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_batch_matrix_multiply_agrees_with_numpy(left, right, m, k, n, transposed):
    a, b = (*left, m, k), (*right, *((n, k) if transposed else (k, n)))
    matrix = np.zeros(b)
    try:
        want = np.matmul(np.zeros(a), np.swapaxes(matrix, -1, -2) if transposed else matrix).shape
    except ValueError:
        refusal("batch_matrix_multiply", a, b, flags=transposed)
    else:
        assert shape("batch_matrix_multiply", a, b, flags=transposed) == want


def test_attention():
    q, scale = (2, 4, 5, 8), (8,)
    name = "scaled_dot_product_attention"
    assert shape(name, q, (2, 4, 6, 8), (2, 4, 6, 3), scale, (5, 6)) == (2, 4, 5, 3)
    assert shape(name, q, (2, 6, 8), (2, 6, 3), scale, (5, 6)) == (2, 4, 5, 3)
    for ins, part in (
        (((4, 5, 8), (2, 6, 8), (2, 6, 3), scale, (5, 6)), "query needs rank 4"),
        ((q, (6, 8), (2, 6, 3), scale, (5, 6)), "key needs rank 3 or 4, found rank 2"),
        ((q, (2, 6, 8), (2, 4, 6, 3), scale, (5, 6)), "value needs rank 3"),
        ((q, (2, 4, 6, 7), (2, 4, 6, 3), scale, (5, 6)), "key dim 3 is 7, query dim 3 is 8"),
        ((q, (2, 3, 6, 8), (2, 4, 6, 3), scale, (5, 6)), "key dim 1 is 3, query dim 1 is 4"),
        ((q, (1, 6, 8), (2, 6, 3), scale, (5, 6)), "key dim 0 is 1, query dim 0 is 2"),
        ((q, (2, 4, 6, 8), (2, 4, 7, 3), scale, (5, 6)), "value dim 2 is 7, key dim 2 is 6"),
        ((q, (2, 4, 6, 8), (2, 4, 6, 3), (1,), (5, 6)), "scale dim 0 is 1"),
        ((q, (2, 4, 6, 8), (2, 4, 6, 3), scale, (6, 5)), "mask is 6x5, need 5x6"),
    ):
        assert part in refusal(name, *ins)


# ---- windows

def conv(padding=(0, 0, 0, 0), kernel=(3, 3), stride=(1, 1), dilation=(1, 1), groups=1, cin=2, cout=4, **more):
    """Attributes of a convolution; padding is top, right, bottom, left."""
    return {
        **dict(zip(("padding_top", "padding_right", "padding_bottom", "padding_left"), padding)),
        **dict(zip(("kernel_height", "kernel_width"), kernel)),
        **dict(zip(("subsampling_height", "subsampling_width"), stride)),
        **dict(zip(("dilation_height", "dilation_width"), dilation)),
        "groups": groups, "group_input_channels": cin, "group_output_channels": cout, **more,
    }


def pool(padding=(0, 0, 0, 0), window=(2, 2), stride=(1, 1), dilation=(1, 1)):
    return {
        **dict(zip(("padding_top", "padding_right", "padding_bottom", "padding_left"), padding)),
        **dict(zip(("pooling_height", "pooling_width"), window)),
        **dict(zip(("stride_height", "stride_width"), stride)),
        **dict(zip(("dilation_height", "dilation_width"), dilation)),
    }


W = (4, 3, 3, 2)


@pytest.mark.parametrize("x, weights, changes, flags, out", [
    ((1, 5, 6, 2), W, {}, 0, (1, 3, 4, 4)),
    ((1, 5, 6, 2), W, {"padding": (1, 1, 1, 1)}, 0, (1, 5, 6, 4)),
    ((1, 5, 6, 2), W, {"padding": (1, 2, 0, 0), "stride": (2, 3)}, 0, (1, 2, 2, 4)),
    ((1, 5, 6, 2), W, {"dilation": (2, 2)}, 0, (1, 1, 2, 4)),
    ((3, 5, 6, 4), W, {"groups": 2, "cout": 2}, 0, (3, 3, 4, 4)),
    ((1, 5, 6, 2), W, {}, SAME, (1, 5, 6, 4)),
    ((1, 5, 6, 2), W, {"stride": (2, 2)}, SAME, (1, 3, 3, 4)),
    ((1, 2, 2, 2), W, {"padding": (1, 0, 0, 1)}, 0, (1, 1, 1, 4)),
    ((0, 5, 6, 2), W, {}, 0, (0, 3, 4, 4)),
    ((1, 4, 5, 2), (4, 1, 1, 2), {"kernel": (1, 1), "stride": (2, 2)}, SAME, (1, 2, 3, 4)),
    # Padding alone in a window is no fault of a convolution: it gives the bias.
    ((1, 1, 1, 2), (4, 1, 1, 2), {"kernel": (1, 1), "padding": (2, 2, 2, 2)}, 0, (1, 5, 5, 4)),
])
def test_conv2d(x, weights, changes, flags, out):
    assert shape("conv2d", x, weights, (4,), flags=flags, **conv(**changes)) == out


@pytest.mark.parametrize("x, weights, changes, flags, part", [
    ((1, 5, 6, 2), (4, 2, 3, 2), {}, 0, "filter dim 1 is 2, kernel_height is 3"),
    ((1, 5, 6, 2), (4, 3, 2, 2), {}, 0, "filter dim 2 is 2, kernel_width is 3"),
    ((1, 2, 2, 1), (1, 2, 2, 1), {"cin": 1, "cout": 1}, 0, "filter dim 1 is 2, kernel_height is 3"),
    ((1, 5, 6, 2), (4, 3, 3, 1), {}, 0, "filter dim 3 is 1, group_input_channels is 2"),
    ((1, 5, 6, 2), (8, 3, 3, 2), {}, 0, "filter dim 0 is 8, groups * group_output_channels is 4"),
    ((1, 5, 6, 2), (4, 9, 2), {}, 0, "filter needs rank 4"),
    ((5, 6, 2), W, {}, 0, "input needs rank 4, found rank 3 (5x6x2)"),
    # An NCHW array in place of NHWC, and channels that don't make up the groups.
    ((1, 2, 5, 6), W, {}, 0, "input dim 3 is 6, groups * group_input_channels is 2"),
    ((1, 2, 2, 3), (2, 1, 1, 1), {"kernel": (1, 1), "groups": 2, "cin": 1, "cout": 1}, 0, "input dim 3 is 3"),
    ((1, 2, 6, 2), W, {}, 0, "the window is 3 high (kernel_height 3), the padded input is 2 (0 + 2 + 0)"),
    ((1, 5, 6, 2), W, {"dilation": (3, 1)}, 0, "the window is 7 high (kernel_height 3, dilation 3)"),
    ((1, 5, 6, 2), W, {"stride": (0, 1)}, 0, "subsampling_height is 0, need 1 to"),
    ((1, 5, 6, 2), W, {"dilation": (1, 0)}, 0, "dilation_width is 0"),
    ((1, 5, 6, 2), W, {"groups": 0}, 0, "groups is 0, need 1 or more"),
    ((1, 5, 6, 2), W, {"cin": 0}, 0, "group_input_channels is 0"),
    ((1, 5, 6, 2), W, {"padding": (NEGATIVE - 1, 0, 0, 0)}, 0, "padding_top is 4294967295, need 0 to 65536"),
    ((1, 5, 6, 2), W, {"dilation": (2**31, 1)}, 0, "dilation_height is 2147483648"),
    ((1, 5, 6, 2), W, {"padding": (1, 0, 0, 0)}, SAME, "SAME padding (flag 0x4) needs both 0"),
    ((1, 0, 6, 2), W, {}, 0, "the input is 0 high, need 1 or more"),
    ((1, 4, 4, 2), (4, 1, 2, 2), {"kernel": (1, 2), "stride": (2, 1)}, SAME, "leaves 1 behind the last window of 1"),
    ((1, 5, 5, 2), (4, 1, 1, 2), {"kernel": (1, 1), "padding": (0, 0, 0, 1)}, SAME, "needs both 0"),
])
def test_conv2d_refuses(x, weights, changes, flags, part):
    assert part in refusal("conv2d", x, weights, (4,), flags=flags, **conv(**changes))


@pytest.mark.parametrize("bias, part", [((3,), "bias is 3, need 4"), ((1, 4), "bias is 1x4"), ((), "bias is scalar")])
def test_biases_have_an_element_per_output_channel(bias, part):
    for name, weights in (("conv2d", W), ("conv_transpose2d", W)):
        assert part in refusal(name, (1, 5, 6, 2), weights, bias, **conv(adjustment_height=0, adjustment_width=0))
    assert part in refusal("depthwise_conv2d", (1, 5, 6, 2), (1, 3, 3, 4), bias, **conv(groups=2, cin=1, cout=2))
    assert shape("conv2d", (1, 5, 6, 2), W, None, **conv()) == (1, 3, 4, 4)


def test_depthwise_conv2d():
    name = "depthwise_conv2d"
    assert shape(name, (2, 5, 6, 3), (1, 3, 3, 3), (3,), **conv(groups=3, cin=1, cout=1)) == (2, 3, 4, 3)
    assert shape(name, (2, 5, 6, 3), (1, 3, 3, 6), (6,), **conv(groups=3, cin=1, cout=2)) == (2, 3, 4, 6)
    assert shape(name, (2, 5, 6, 3), (1, 3, 3, 6), flags=SAME, **conv(groups=3, cin=2, cout=4)) == (2, 5, 6, 6)
    for weights, changes, part in (
        ((1, 3, 3, 3), {"cin": 2, "cout": 3}, "group_output_channels is 3, need a multiple of group_input_channels 2"),
        ((1, 3, 3, 3), {"cin": 1, "cout": 0}, "group_output_channels is 0"),
        ((1, 3, 3, 3), {"cin": 1, "cout": 2}, "filter dim 3 is 3, groups * depth multiplier is 6"),
        ((3, 3, 3, 1), {"cin": 1, "cout": 1}, "filter dim 0 is 3, what a depthwise filter needs is 1"),
        ((1, 2, 3, 3), {"cin": 1, "cout": 1}, "filter dim 1 is 2, kernel_height is 3"),
    ):
        assert part in refusal(name, (2, 5, 6, 3), weights, **conv(groups=3, **changes))
    assert "input dim 3 is 4, groups is 3" in refusal(name, (2, 5, 6, 4), (1, 3, 3, 3), **conv(groups=3, cin=1, cout=1))


def deconv(adjustment=(0, 0), **changes):
    return conv(**changes, adjustment_height=adjustment[0], adjustment_width=adjustment[1])


@pytest.mark.parametrize("x, changes, out", [
    ((1, 2, 2, 2), {}, (1, 4, 4, 4)), ((1, 2, 2, 2), {"stride": (2, 2)}, (1, 5, 5, 4)),
    ((1, 2, 2, 2), {"stride": (2, 3), "adjustment": (1, 2)}, (1, 6, 8, 4)),
    ((1, 2, 2, 2), {"dilation": (2, 2)}, (1, 6, 6, 4)),
    ((1, 2, 2, 2), {"padding": (1, 1, 0, 0)}, (1, 3, 3, 4)), ((0, 2, 2, 2), {}, (0, 4, 4, 4)),
])
def test_conv_transpose2d(x, changes, out):
    assert shape("conv_transpose2d", x, W, (4,), **deconv(**changes)) == out


@pytest.mark.parametrize("x, changes, part", [
    ((1, 2, 2, 2), {"stride": (2, 2), "adjustment": (2, 0)},
    "adjustment_height is 2, need less than subsampling_height 2"),
    ((1, 2, 2, 2), {"adjustment": (0, 1)}, "adjustment_width is 1, need less than subsampling_width 1"),
    ((1, 2, 2, 2), {"padding": (2, 0, 2, 0)}, "the output would be 0 high"),
    ((1, 0, 2, 2), {}, "the input is 0 high"), ((1, 2, 2, 3), {}, "input dim 3 is 3"),
    # Fewer outputs than offsets within a stride crash XNNPACK; with one less it is fine.
    ((1, 1, 1, 2), {"stride": (1, 3), "padding": (0, 2, 0, 0)},
    "the output would be 1 wide, XNNPACK 4ea82e5 needs 2 or more"),
])
def test_conv_transpose2d_refuses(x, changes, part):
    assert part in refusal("conv_transpose2d", x, W, (4,), **deconv(**changes))
    if "stride" in changes and "padding" in changes:
        assert shape("conv_transpose2d", x, W, (4,), **deconv(**{**changes, "padding": (0, 1, 0, 0)})) == (1, 3, 2, 4)


@pytest.mark.parametrize("padding, window, stride, flags, out", [
    ((1, 1, 1, 1), (3, 3), (1, 1), 0, (4, 4)), ((1, 1, 1, 1), (3, 3), (2, 2), 0, (2, 2)),
    ((0, 0, 0, 0), (2, 2), (2, 2), SAME, (2, 2)), ((0, 0, 0, 0), (1, 1), (2, 2), 0, (2, 2)),
    ((0, 0, 0, 0), (4, 4), (9, 9), 0, (1, 1)), ((0, 1, 1, 0), (2, 2), (2, 2), 0, (2, 2)),
])
def test_average_pooling2d(padding, window, stride, flags, out):
    assert shape("average_pooling2d", (1, 4, 4, 3), flags=flags, **pool(padding, window, stride)) == (1, *out, 3)


@pytest.mark.parametrize("name", ["average_pooling2d", "max_pooling2d"])
def test_pools_refuse_windows_without_a_real_element(name):
    assert shape(name, (1, 4, 4, 1), **pool((1, 1, 1, 1), (2, 2))) == (1, 5, 5, 1)
    for padding in ((2, 0, 0, 0), (0, 2, 0, 0), (0, 0, 2, 0), (0, 0, 0, 2), (3, 3, 3, 3)):
        assert "a window holds padding alone" in refusal(name, (1, 4, 4, 1), **pool(padding, (2, 2)))


def test_a_dilated_window_may_not_step_over_the_input():
    # One element between two taps: both lie in the padding.
    assert "padding alone" in refusal("max_pooling2d", (1, 1, 4, 1), **pool((1, 0, 1, 0), (2, 2), dilation=(2, 1)))


def test_average_pooling_refuses_windows_over_both_paddings():
    assert "both top and bottom padding" in refusal("average_pooling2d", (1, 4, 9, 1), **pool((3, 3, 3, 3), (6, 6)))
    assert "both top and bottom padding" in refusal("average_pooling2d", (1, 2, 9, 1), **pool((0, 0, 3, 0), (4, 4)))
    # Rows that all cover the whole input are alike, and columns don't matter.
    assert shape("average_pooling2d", (1, 3, 9, 1), **pool((2, 2, 2, 2), (5, 5))) == (1, 3, 9, 1)
    assert shape("average_pooling2d", (1, 3, 9, 1), flags=SAME, **pool(window=(5, 5))) == (1, 3, 9, 1)
    assert shape("average_pooling2d", (1, 9, 4, 1), **pool((3, 3, 3, 3), (6, 6))) == (1, 10, 5, 1)


def test_pools_of_common_networks_pass():
    for size, (kernel, stride, padding) in itertools.product(range(3, 40), [(3, 2, 1), (3, 1, 1), (2, 2, 0),
        (3, 2, 0)]):
        same = padding, padding, padding, padding
        for name in ("average_pooling2d", "max_pooling2d"):
            out = (size + 2 * padding - kernel) // stride + 1
            assert shape(name, (1, size, size, 8), **pool(same, (kernel, kernel), (stride, stride))) == (1, out, out, 8)
    for size in range(7, 40):  # torch.nn.MaxPool2d(3, stride=1, padding=1, dilation=2)
        assert shape("max_pooling2d", (1, size, size, 8), **pool((1,) * 4, (3, 3), (1, 1), (2, 2))) == (
            1, size - 2, size - 2, 8)


@pytest.mark.parametrize("changes, part", [
    ({"window": (1, 1)}, "the window is 1x1"),
    ({"stride": (3, 1)}, "stride_height is 3, need pooling_height 2 or less"),
    ({"window": (5, 2)}, "the window is 5 high"), ({"stride": (0, 1)}, "stride_height is 0"),
    ({"dilation": (0, 1)}, "dilation_height is 0"), ({"window": (0, 2)}, "pooling_height is 0"),
])
def test_max_pooling2d_refuses(changes, part):
    assert part in refusal("max_pooling2d", (1, 4, 4, 1), **pool(**changes))


@pytest.mark.parametrize("x, changes", [
    # The substitute is outside the input, outside the window, or shared with a neighbouring window.
    ((1, 8, 6, 1), {"padding": (3, 0, 2, 0), "window": (2, 3), "dilation": (3, 1)}),
    ((1, 1, 9, 1), {"padding": (1, 0, 1, 1), "window": (2, 5), "stride": (1, 4), "dilation": (1, 2)}),
    ((1, 9, 3, 1), {"padding": (2, 1, 1, 3), "window": (2, 5), "stride": (2, 1), "dilation": (3, 1)}),
])
def test_dilated_max_pooling_refuses_what_xnnpack_gets_wrong(x, changes):
    assert "pad with static_constant_pad instead" in refusal("max_pooling2d", x, **pool(**changes))
    shape("max_pooling2d", (1, 20, 20, 1), **pool(**{**changes, "padding": (0, 0, 0, 0)}))
    # Dilation along one axis, padding as usual along the other.
    assert shape("max_pooling2d", (1, 9, 9, 1), **pool((1, 1, 1, 1), (3, 3), dilation=(2, 1))) == (1, 7, 9, 1)


def test_argmax_pooling2d():
    both = OPS["argmax_pooling2d"].shape(node("argmax_pooling2d", pool((1, 0, 0, 0), (2, 3))), [(1, 4, 7, 2)])
    assert both == [(1, 2, 2, 2)] * 2
    assert shape("argmax_pooling2d", (1, 4, 7, 2), flags=SAME, **pool(window=(2, 3))) == (1, 2, 3, 2)
    assert "the window is 1x1" in refusal("argmax_pooling2d", (1, 4, 7, 2), **pool(window=(1, 1)))
    assert "the padded input is 1" in refusal("argmax_pooling2d", (1, 1, 7, 2), **pool(window=(2, 3)))


def test_global_average_pooling2d():
    name = "global_average_pooling2d"
    assert shape(name, (2, 5, 6, 3), flags=0x40) == (2, 1, 1, 3)
    assert shape(name, (2, 5, 6, 3)) == (2, 3)
    assert shape(name, (5, 6, 3), flags=0x40) == (1, 1, 3)
    assert "rank 3 or more, found rank 2 (6x3)" in refusal(name, (6, 3))
    assert "height and width of 1 or more" in refusal(name, (2, 0, 6, 3))
    assert shape(name, (0, 5, 6, 3)) == (0, 3)


def taps(size, before, after, kernel, stride, dilation):
    """The input positions of every window that fits, counted one by one."""
    windows = []
    start = -before
    while start + (kernel - 1) * dilation < size + after:
        windows.append([start + tap * dilation for tap in range(kernel)])
        start += stride
    return windows


GEOMETRY = (st.integers(1, 9), st.integers(0, 4), st.integers(0, 4), st.integers(1, 4), st.integers(1, 4),
            st.integers(1, 3))


@given(*GEOMETRY)
@example(1, 1, 1, 2, 1, 2)
def test_window_sizes_agree_with_counting(size, before, after, kernel, stride, dilation):
    windows = taps(size, before, after, kernel, stride, dilation)
    attrs = conv((before, 0, after, 0), (kernel, 1), (stride, 1), (dilation, 1))
    ins = (1, size, 1, 2), (4, kernel, 1, 2)
    if windows:
        assert shape("conv2d", *ins, **attrs) == (1, len(windows), 1, 4)
    else:
        assert "the padded input is" in refusal("conv2d", *ins, **attrs)


@given(*GEOMETRY)
def test_pooling_windows_agree_with_counting(size, before, after, kernel, stride, dilation):
    windows = taps(size, before, after, kernel, stride, dilation)
    assume(windows)
    attrs = pool((0, after, 0, before), (2, kernel), (1, min(stride, kernel)), (1, dilation))
    windows = taps(size, before, after, kernel, min(stride, kernel), dilation)
    if all(any(0 <= tap < size for tap in window) for window in windows):
        try:
            assert shape("max_pooling2d", (1, 2, size, 3), **attrs) == (1, 1, len(windows), 3)
        except Refusal as refused:
            assert "static_constant_pad" in str(refused)
            assert dilation > 1 and (before or after)
    else:
        assert "padding alone" in refusal("max_pooling2d", (1, 2, size, 3), **attrs)


@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 4), st.integers(1, 3))
def test_same_padding_covers_the_input(size, kernel, stride, dilation):
    out = math.ceil(size / stride)
    extent = (kernel - 1) * dilation + 1
    total = (out - 1) * stride + extent - size
    attrs = conv(kernel=(kernel, 1), stride=(stride, 1), dilation=(dilation, 1))
    ins = (1, size, 1, 2), (4, kernel, 1, 2)
    if kernel == 1:
        assert shape("conv2d", *ins, flags=SAME, **attrs) == (1, out, 1, 4)
    elif total >= 0:
        assert shape("conv2d", *ins, flags=SAME, **attrs) == (1, out, 1, 4)
        explicit = conv((total // 2, 0, total - total // 2, 0), (kernel, 1), (stride, 1), (dilation, 1))
        assert shape("conv2d", *ins, **explicit) == (1, out, 1, 4)
    else:
        assert "behind the last window" in refusal("conv2d", *ins, flags=SAME, **attrs)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(0, 3), st.integers(0, 3),
       st.integers(0, 3))
def test_transposed_sizes_undo_those_of_the_convolution(size, kernel, stride, dilation, before, after, adjustment):
    attrs = deconv(padding=(before, 0, after, 0), kernel=(kernel, 1), stride=(stride, 1), dilation=(dilation, 1),
                   adjustment=(adjustment, 0))
    try:
        out = shape("conv_transpose2d", (1, size, 1, 2), (4, kernel, 1, 2), **attrs)[1]
    except Refusal:
        return
    assert len(taps(out, before, after, kernel, stride, dilation)) == size


# ---- movement

@pytest.mark.parametrize("x, perm, out", [((2, 3, 4), (2, 0, 1), (4, 2, 3)), ((0, 3), (1, 0), (3, 0))])
def test_static_transpose(x, perm, out):
    assert shape("static_transpose", x, perm=perm) == out


@pytest.mark.parametrize("perm, part", [
    ((0, 1), "perm has 2 entries, the input has rank 3 (2x3x4)"), ((0, 1, 1), "need each of 0 to 2 once"),
    ((0, 1, 3), "need each of 0 to 2 once"), ((0, 1, NEGATIVE - 1), "need each of 0 to 2 once")])
def test_static_transpose_refuses(perm, part):
    assert part in refusal("static_transpose", (2, 3, 4), perm=perm)


@pytest.mark.parametrize("x, new, out", [
    ((6,), (0, 2), (3, 2)), ((2, 3), (6,), (6,)), ((2, 3), (3, 0), (3, 2)), ((1,), (), ()), ((), (1, 1), (1, 1)),
    ((0, 4), (0, 2), (0, 2)), ((2, 3), (0,), (6,)),
])
def test_static_reshape(x, new, out):
    assert shape("static_reshape", x, new_shape=new) == out


@pytest.mark.parametrize("x, new, part", [
    ((8,), (0, 0, 2), "more than one inferred dimension"), ((7,), (0, 2), "not a multiple of 2"),
    ((6,), (NEGATIVE - 1, 2), "has 8589934590 elements, the input has 6"), ((6,),
    (4, 2), "has 8 elements, the input has 6"),
    ((6,), (2**32 - 1, 2**32 - 1, 0), "not a multiple of"), ((6,), (1,) * 6 + (6,), "the limit is 6"), ((2, 3),
    (), "has 1 elements"),
])
def test_static_reshape_refuses(x, new, part):
    assert part in refusal("static_reshape", x, new_shape=new)


def test_static_reshape_rows_follows_one_axis_alone():
    name = "static_reshape_rows"
    # rows: the axis, the elements before it, how many of it make how many of the output's, the elements behind.
    assert shape(name, (7, 2, 3), new_shape=(0, 6), rows=(0, 1, 1, 6, 1)) == (7, 6)
    assert shape(name, (0, 2, 3), new_shape=(0, 3, 2), rows=(0, 1, 1, 6, 1)) == (0, 3, 2)
    assert shape(name, (8, 3), new_shape=(0, 4, 3), rows=(0, 1, 4, 3, 1)) == (2, 4, 3)
    for x, part in (((6, 8), "6 behind, found 6x8"), ((), "found scalar")):
        assert part in refusal(name, x, new_shape=(0, 6), rows=(0, 1, 1, 6, 1))
    assert "a multiple of 4 on it" in refusal(name, (7, 3), new_shape=(0, 4, 3), rows=(0, 1, 4, 3, 1))
    # open: the axes of the declared shape whose change the inferred dimension may take up.
    assert shape(name, (5, 4, 6), new_shape=(0, 24), declared=(2, 4, 6), open=(0,)) == (5, 24)
    assert "a change of axis 0 alone: need 2x4x6" in refusal(
        name, (2, 8, 6), new_shape=(0, 24), declared=(2, 4, 6), open=(0,))


@pytest.mark.parametrize("x, offsets, sizes, out", [
    ((4, 5), (1, 2), (2, 3), (2, 3)), ((4, 5), (0, 0), (0, 2), (4, 2)), ((0, 5), (0, 0), (0, 5), (0, 5))])
def test_static_slice(x, offsets, sizes, out):
    assert shape("static_slice", x, offsets=offsets, sizes=sizes) == out


@pytest.mark.parametrize("offsets, sizes, part", [
    ((3, 0), (2, 5), "offsets[0] + sizes[0] is 3 + 2, the input's dim 0 is 4"),
    ((0, NEGATIVE - 1), (4, 2), "offsets[1] + sizes[1] is 4294967295 + 2"),
    ((1, 0), (0, 5), "sizes[0] is 0 (the whole dimension) and offsets[0] is 1"),
    ((0,), (4, 5), "offsets has 1 entries, the input has rank 2"), ((0, 0), (4, 5, 6), "sizes has 3 entries"),
])
def test_static_slice_refuses(offsets, sizes, part):
    assert part in refusal("static_slice", (4, 5), offsets=offsets, sizes=sizes)


def test_scalars_are_neither_transposed_nor_cut():
    # XNNPACK refuses them late, with a bare status.
    for name, attrs in (("static_transpose", {"perm": ()}), ("static_slice", {"offsets": (), "sizes": ()})):
        assert "rank 1 or more, found a scalar" in refusal(name, (), **attrs)


def test_static_constant_pad():
    def pad(x, before, after):
        return shape("static_constant_pad", x, pre_paddings=before, post_paddings=after)

    assert pad((2, 3), (1, 0), (0, 2)) == (3, 5)
    for before, after, part in (((1,), (0, 0), "pre_paddings has 1 entries"), ((0, 0),
        (0, 0, 0), "post_paddings has 3"),
                                ((NEGATIVE - 8, 0), (0, 0), "pre_paddings[0] is 4294967288, need 0 to 65536")):
        with pytest.raises(Refusal) as caught:
            pad((2, 3), before, after)
        assert part in str(caught.value)


@pytest.mark.parametrize("flags", [0, 4, 8, 0x20])
def test_static_resize_bilinear2d(flags):
    assert shape("static_resize_bilinear2d", (2, 3, 4, 5), flags=flags, new_height=7, new_width=1) == (2, 7, 1, 5)


@pytest.mark.parametrize("x, size, flags, part", [
    ((2, 3, 4, 5), (7, 1), 12, "exclude each other"), ((2, 3, 4, 5), (0, 1), 0, "new_height is 0"),
    ((2, 3, 4, 5), (1, 1 << 24), 0, "new_width is 16777216"), ((3, 4, 5), (1, 1), 0, "input needs rank 4"),
    ((2, 0, 4, 5), (1, 1), 0, "input dim 1 is 0"),
])
def test_static_resize_bilinear2d_refuses(x, size, flags, part):
    assert part in refusal("static_resize_bilinear2d", x, flags=flags, new_height=size[0], new_width=size[1])


@pytest.mark.parametrize("ins, axis, out", [
    (((2, 3), (2, 5)), 1, (2, 8)), (((2, 3), (2, 5)), NEGATIVE - 1, (2, 8)), (((0, 2), (2, 2)), 0, (2, 2)),
    (((2, 3), (4, 3)), NEGATIVE - 2, (6, 3)), (((1, 1),) * 5, 0, (5, 1)), (((1, 2), (1, 3), (1, 4),
    (1, 5)), 1, (1, 14)),
])
def test_concatenate(ins, axis, out):
    assert shape(f"concatenate{len(ins)}", *ins, axis=axis) == out


@pytest.mark.parametrize("ins, axis, part", [
    (((2, 3), (2, 5)), 7, "axis is 7, the inputs have rank 2"), (((2, 3), (2, 5)), NEGATIVE - 3, "axis is -3"),
    (((2, 3), (2, 5)), 0, "input2 dim 1 is 5, input1 dim 1 is 3"), (((), ()), 0, "the inputs have rank 0 (scalar)"),
    (((2, 3), (2, 3), (2, 3, 1)), 0, "input3 has rank 3 (2x3x1), input1 has rank 2 (2x3)"),
])
def test_concatenate_refuses(ins, axis, part):
    assert part in refusal(f"concatenate{len(ins)}", *ins, axis=axis)


def test_operators_that_only_lowering_makes():
    assert shape("static_reduce", (2, 3, 4, 5), reduction_axes=(-3, -2)) == (2, 5)
    assert shape("static_reduce", (2, 3, 4, 5), reduction_axes=(1, 2), flags=0x40) == (2, 1, 1, 5)
    for axes in ((4,), (-5,), (1, -3), ()):
        assert "need different axes of rank 4" in refusal("static_reduce", (2, 3, 4, 5), reduction_axes=axes)
    assert shape("static_expand_dims", (2, 3, 4), new_axes=(1,)) == (2, 1, 3, 4)
    assert shape("static_expand_dims", (2,), new_axes=(0, 2)) == (1, 2, 1)
    for axes in ((2, 0), (0, 0), (4,)):
        assert "in ascending order" in refusal("static_expand_dims", (2,), new_axes=axes)
    assert "rank 7, the limit is 6" in refusal("static_expand_dims", (2,) * 6, new_axes=(0,))


SHAPE = st.lists(st.integers(0, 4), min_size=1, max_size=6).map(tuple)


@given(SHAPE, st.data())
def test_movement_agrees_with_numpy(x, data):
    array = np.zeros(x)
    perm = data.draw(st.permutations(range(len(x))))
    assert shape("static_transpose", x, perm=tuple(perm)) == array.transpose(perm).shape
    pads = data.draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=len(x), max_size=len(x)))
    assert shape("static_constant_pad", x, pre_paddings=tuple(a for a, _ in pads),
                 post_paddings=tuple(b for _, b in pads)) == np.pad(array, pads).shape
    offsets = [data.draw(st.integers(0, max(dim - 1, 0))) for dim in x]
    sizes = [data.draw(st.integers(min(1, dim), dim - offset)) for dim, offset in zip(x, offsets)]
    box = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes))
    assert shape("static_slice", x, offsets=tuple(offsets), sizes=tuple(sizes)) == array[box].shape
    axis = data.draw(st.integers(-len(x), len(x) - 1))
    other = [*x]
    other[axis] = data.draw(st.integers(0, 4))
    assert shape("concatenate2", x, tuple(other), axis=axis % NEGATIVE) == np.concatenate(
        [array, np.zeros(other)], axis).shape
    axes = data.draw(st.sets(st.integers(0, len(x) - 1), min_size=1))
    assert shape("static_reduce", x, reduction_axes=tuple(axes)) == array.sum(axis=tuple(axes)).shape


# ---- graphs

def value(number, dims, *, is_input=False, constant=False, datatype="fp32"):
    data = Constant(bytes(4 * math.prod(dims) + 16)) if constant else None
    return Value(number, datatype, dims, is_input=is_input, external_id=number if is_input else None, constant=data)


def mlp(*, hidden=(8, 16), output=(8, 4)):
    """x(0) -> fully connected with 1, 2 -> 3 -> clamp -> 4 -> fully connected with 5 -> 6."""
    values = (value(0, (8, 32), is_input=True), value(1, (16, 32), constant=True), value(2, (16,), constant=True),
              value(3, hidden), value(4, (8, 16)), value(5, (4, 16), constant=True), value(6, output))
    layer = OPS["fully_connected"]
    nodes = (Node(layer, (0, 1, 2), (3,), index=0), Node(OPS["clamp"], (3,), (4,), clamp=(0.0, 6.0), index=1),
             Node(layer, (4, 5, None), (6,), index=2, debug_handle=17))
    by_id = {each.id: each for each in values}
    return types.SimpleNamespace(values=values, nodes=nodes, value=by_id.__getitem__)


def test_infer_gives_the_shape_of_every_value():
    assert shapes.infer(mlp()) == {0: (8, 32), 1: (16, 32), 2: (16,), 3: (8, 16), 4: (8, 16), 5: (4, 16), 6: (8, 4)}


@pytest.mark.parametrize("batch", [0, 1, 3, 1000])
def test_infer_follows_a_new_shape_of_an_input(batch):
    found = shapes.infer(mlp(), {0: (batch, 32)})
    assert (found[3], found[4], found[6]) == ((batch, 16), (batch, 16), (batch, 4))
    assert shapes.infer(mlp(), {0: np.array([batch, 32])}) == found
    assert all(type(dim) is int for dims in found.values() for dim in dims)


def test_infer_takes_values_as_a_dict():
    graph = mlp()
    graph.values = {each.id: each for each in graph.values}
    assert shapes.infer(graph) == shapes.infer(mlp())


@pytest.mark.parametrize("override, part, expected", [
    ({0: (8,)}, "input (value 0) needs rank 2 (8x32 is declared), found rank 1 (8)", (8, 32)),
    ({0: (8, 32, 1)}, "found rank 3 (8x32x1)", (8, 32)), ({0: (-1, 32)}, "needs dims of 0 to", (8, 32)),
    ({0: (2**31, 32)}, "needs dims of 0 to 2147483647", (8, 32)), ({0: (2**30, 2**30)}, "at most", (8, 32)),
    ({1: (16, 32)}, "value 1 is not an input, its shape can't be given", None),
    ({3: (8, 16)}, "value 3 is not an input", None),
])
def test_infer_refuses_overrides(override, part, expected):
    with pytest.raises(ShapeError) as caught:
        shapes.infer(mlp(), override)
    assert part in str(caught.value) and caught.value.expected == expected
    assert caught.value.got == tuple(next(iter(override.values())))


def test_infer_names_the_node():
    with pytest.raises(ShapeError) as caught:
        shapes.infer(mlp(), {0: (8, 31)})
    assert str(caught.value) == ("node 0 (fully_connected): input dim 1 is 31, filter dim 1 (input channels) is 32")
    graph = mlp()
    graph.values = (*graph.values[:5], value(5, (4, 15), constant=True), graph.values[6])
    with pytest.raises(ShapeError, match=r"node 2 \(fully_connected, debug handle 17\): input dim 1 is 16"):
        shapes.infer(graph)


def test_infer_refuses_a_value_that_nothing_has_computed():
    graph = mlp()
    graph.nodes = graph.nodes[::-1]
    with pytest.raises(ShapeError, match=r"node 2 .*: value 4 is used before a node has computed it"):
        shapes.infer(graph)


def two(a, b, name="add", attrs=None):
    values = value(0, a, is_input=True), value(1, b, is_input=True), value(2, ())
    return types.SimpleNamespace(values=values, nodes=(Node(OPS[name], (0, 1), (2,), attrs or {}, index=0),))


def test_infer_refuses_sizes_beyond_reason():
    assert shapes.infer(two((2**19, 1), (1, 2**19)))[2] == (2**19, 2**19)
    with pytest.raises(ShapeError, match=r"the output would be 1048576x1048576, more than"):
        shapes.infer(two((2**20, 1), (1, 2**20)))
    with pytest.raises(ShapeError, match="with a dimension above 2147483647"):
        shapes.infer(two((2**31 - 1, 1), (1, 1), "concatenate2", {"axis": 0}))
    # XNNPACK's product of 2**33 * 2**33 wraps to 0.
    with pytest.raises(ShapeError, match="above 2147483647"):
        shapes.infer(two((2**33, 1), (1, 2**33)))


def test_check_declared_compares_every_output():
    assert shapes.check_declared(mlp()) == shapes.infer(mlp())
    for changes, where, declared, inferred in (
        ({"hidden": (8, 15)}, "node 0 (fully_connected): output_id (value 3)", (8, 15), (8, 16)),
        ({"output": (8, 4, 1)}, "node 2 (fully_connected, debug handle 17): output_id (value 6)", (8, 4, 1), (8, 4)),
    ):
        with pytest.raises(ShapeError) as caught:
            shapes.check_declared(mlp(**changes))
        assert where in str(caught.value)
        assert (caught.value.got, caught.value.expected) == (declared, inferred)
