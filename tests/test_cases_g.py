"""Faults that others had, class G: NaN, infinities and limits.

What the operators really do with NaN is asserted as it is; where that is not what cases.md calls right, the
row's own documentation line has to say so, and ``check_finite=True`` has to find it.
"""

import numpy as np
import pytest
from op_cases import case
from small import built, f32, ran, refused

import xnnfast as xf
from xnnfast import PerTensor, Runtime, writer
from xnnfast.ops import OPS

INF, NAN = np.inf, np.nan


def found_by_check_finite(build, *arrays):
    runtime = Runtime(built(build).graph(), check_finite=True)
    with pytest.raises(xf.NotFiniteError, match="input 0 holds 1 values that are not finite, the first is nan"):
        runtime.run(*arrays)
    runtime.run(*(np.zeros_like(array) for array in arrays))


@pytest.mark.parametrize("name", ["minimum", "maximum"])
def test_G1_of_a_nan_and_a_number_the_second_operand_stays(name):
    a, b = f32(NAN, 1, NAN), f32(1, NAN, NAN)
    got = ran(lambda g: getattr(g, name)(g.input((3,)), g.input((3,))), a, b)
    # PyTorch and NumPy: NaN in all places.
    np.testing.assert_array_equal(got, [1, NAN, NAN])
    assert "the second operand is the result" in OPS[name].nan
    found_by_check_finite(lambda g: getattr(g, name)(g.input((3,)), g.input((3,))), f32(NAN, 1, 1), f32(1, 1, 1))


def test_G2_a_clamp_by_itself_keeps_nan():
    got = ran(lambda b: b.clamp(b.input((5,)), 0, 6), f32(NAN, -INF, INF, -1, .5))
    np.testing.assert_array_equal(got, [NAN, 0, 6, 0, .5])
    assert OPS["clamp"].nan.startswith("NaN stays NaN in fp32")


@pytest.mark.parametrize("name, low, high, build", [
    ("fully_connected", 0, 6, lambda b: b.fully_connected(b.input((1, 2)), f32([[1, 1]]), clamp=(0, 6))),
    ("conv2d", 0, 6, lambda b: b.conv2d(b.input((1, 1, 1, 2)), f32([1, 1]).reshape(1, 1, 1, 2), clamp=(0, 6))),
    ("max_pooling2d", INF, INF, lambda b: b.max_pooling2d(b.input((1, 2, 2, 1)), 2)),
    ("max_pooling2d", 0, 6, lambda b: b.max_pooling2d(b.input((1, 2, 2, 1)), 2, clamp=(0, 6))),
    ("average_pooling2d", -INF, -INF, lambda b: b.average_pooling2d(b.input((1, 2, 2, 1)), 2)),
    ("average_pooling2d", 0, 6, lambda b: b.average_pooling2d(b.input((1, 2, 2, 1)), 2, clamp=(0, 6))),
    ("fully_connected", -INF, INF, lambda b: b.fully_connected(b.input((1, 2)), f32([[1, 1]]))),
    ("fully_connected", -INF, INF, lambda b: b.fully_connected(b.input((1, 2)), np.ones((64, 2), np.float32))),
], ids=["fused", "fused-conv", "max", "max-limited", "average", "average-limited", "fc-narrow", "fc-wide"])
def test_G2_limits_inside_a_producer_hide_nan(name, low, high, build):
    x = np.ones(built(build).graph().inputs[0].shape, np.float32)
    x.flat[0] = NAN
    got = ran(build, x)
    # The right outcome, NaN, is what some CPUs' kernels give; others give a limit. Nothing else may come out.
    assert (np.isnan(got) | (got == low) | (got == high)).all()
    assert "limit" in OPS[name].nan
    found_by_check_finite(build, x)


def test_G3_softmax_of_infinities_and_nan():
    x = f32([1000, 1000, -1000], [-INF, 0, 1], [-INF] * 3, [INF, 0, 0], [0, NAN, 0], [0, 1, 2])
    got = ran(lambda b: b.softmax(b.input((6, 3))), x)
    np.testing.assert_allclose(got[:2], [[.5, .5, 0], [0, .26894142, .73105858]], rtol=1e-6)
    assert np.isnan(got[2:5]).all()
    np.testing.assert_allclose(got[5], [.09003057, .24472847, .66524096], rtol=1e-6)
    assert "or only -inf, is NaN" in OPS["softmax"].nan


def test_G5_square_roots_at_infinity_and_zero():
    x = f32(INF, 0, -0.0, 4, -1)
    root = ran(lambda b: b.square_root(b.input((5,))), x)
    np.testing.assert_array_equal(root[1:], [0, -0.0, 2, NAN])
    assert np.signbit(root[2])
    # Made of 1 / root(x): the vector kernels multiply infinity by 0.
    assert np.isnan(root[0]) or root[0] == INF
    assert OPS["square_root"].nan.startswith("NaN at infinity")
    inverse = ran(lambda b: b.reciprocal_square_root(b.input((5,))), x)
    np.testing.assert_array_equal(inverse[3:], [.5, NAN])
    for got, right in zip(inverse, (0, INF, -INF)):
        assert np.isnan(got) or got == right
    assert OPS["reciprocal_square_root"].nan == "NaN at infinity and at 0 in fp32."


def test_G5_is_found_in_results():
    # 0 is finite, what becomes of it is not.
    runtime = Runtime(built(lambda b: b.reciprocal_square_root(b.input((2,)))).graph(), check_finite=True)
    np.testing.assert_allclose(runtime.run(f32(1, 4))[0], [1, .5], rtol=1e-6)
    with pytest.raises(xf.NotFiniteError, match="output 0 holds 1 values"):
        runtime.run(f32(0, 4))


@pytest.mark.parametrize("datatype, want", [("qint8", [0, 2, 2, 0, 127, -128]), ("quint8", [0, 2, 2, 0, 255, 0])])
def test_G7_quantizing_saturates_and_rounds_to_even(datatype, want):
    x = f32(.5, 1.5, 2.5, -.5, 1e9, -INF, NAN)
    got = ran(lambda b: b.convert(b.input((7,)), datatype, PerTensor(1.0, 0)), x)
    assert got[:6].tolist() == want
    # NaN becomes the highest number, in NumPy's helper too.
    assert got[6] == {"qint8": 127, "quint8": 255}[datatype]
    assert "NaN becomes 127 in qint8" in OPS["convert"].nan


@pytest.mark.parametrize("limits", [(1, 0), (NAN, 1), (0, NAN)])
@pytest.mark.parametrize("name", ["add", "clamp", "fully_connected", "max_pooling2d", "softmax"])
def test_G_limits_that_are_no_interval_are_refused(name, limits):
    # The engine takes them on a lone clamp and on binary operators.
    made = case(name, OPS[name].datatypes[0])
    graph = made.graph
    nodes = [node.replace(clamp=limits) for node in graph.nodes]
    parts = writer.Parts(graph.values, nodes, graph.inputs, graph.outputs)
    refused(writer.to_bytes(parts), "need output_min <= output_max and no NaN", xf.GraphError)
