"""Faults that others had, class H: quantization parameters, requantization, padding with the zero point."""

import numpy as np
import pytest
from op_cases import case
from small import built, f32, ran, refused, stored

import xnnfast as xf
from xnnfast import PerChannel, PerTensor, writer

INF, NAN = np.inf, np.nan
Q = PerTensor(1.0, 0)
MOVERS = {
    "static_slice": lambda b: b.static_slice(b.input((2, 2), "qint8", Q), (0, 0), (2, 1)),
    "static_transpose": lambda b: b.static_transpose(b.input((2, 2), "qint8", Q), (1, 0)),
    "static_reshape": lambda b: b.static_reshape(b.input((2, 2), "qint8", Q), (4,)),
    "concatenate2": lambda b: b.concatenate2(b.input((2, 2), "qint8", Q), b.input((2, 2), "qint8", Q), 0),
    "static_constant_pad": lambda b: b.static_constant_pad(b.input((2, 2), "qint8", Q), (1, 0), (0, 0), 2.0),
    "copy": lambda b: b.copy(b.input((2, 2), "qint8", Q)),
    "max_pooling2d": lambda b: b.max_pooling2d(b.input((1, 2, 2, 1), "qint8", Q), 2),
    "static_resize_bilinear2d": lambda b: b.static_resize_bilinear2d(b.input((1, 2, 2, 1), "qint8", Q), 3),
}


@pytest.mark.parametrize("name", MOVERS)
@pytest.mark.parametrize("other", [PerTensor(.5, 0), PerTensor(1.0, 1)], ids=["scale", "zero-point"])
def test_H1_operators_that_move_numbers_need_equal_parameters(name, other):
    build = MOVERS[name]
    graph = built(build).graph()
    assert xf.Runtime(graph).run(*(np.ones(value.shape, np.int8) for value in graph.inputs))
    out = graph.outputs[0].id
    message = (rf"node 0 \({name}\): input \(value 0\) has scale 1, zero point 0, output \(value {out}\) has scale "
               rf"{other.scale:g}, zero point {other.zero_point}: they need to be equal")
    refused(stored(build, values={out: {"quantization": other}}), message, xf.GraphError)


def quantized(datatype, quantization):
    def build(b):
        return b.convert(b.input((2, 3)), datatype, PerTensor(1.0, 0))

    return stored(build, values={1: {"quantization": quantization}})


@pytest.mark.parametrize("scale", [0.0, -1.0, NAN, INF, 1e-40])
def test_H3_bad_scales_are_named(scale):
    xf.load(quantized("qint8", PerTensor(2.0, 0)))
    refused(quantized("qint8", PerTensor(scale, 0)), r"value 1 .*need a finite, normal and positive scale, found")


@pytest.mark.parametrize("datatype, good, bad", [("qint8", 127, 128), ("qint8", -128, -129), ("quint8", 255, 256),
                                                 ("quint8", 0, -1)])
def test_H3_bad_zero_points_are_named(datatype, good, bad):
    xf.load(quantized(datatype, PerTensor(1.0, good)))
    refused(quantized(datatype, PerTensor(1.0, bad)), f"value 1 .*zero point from .* for {datatype}, found {bad}")


@pytest.mark.parametrize("scale", [0.0, -1.0, NAN, INF, 1e-40])
def test_H3_one_bad_channel_among_many_is_named(scale):
    scales = np.ones(40, np.float32)

    def build(b):
        filter = b.constant(np.ones((40, 4), np.int8), "qcint8", PerChannel(scales, 0))
        return b.fully_connected(b.convert(b.input((1, 4)), "qdint8", xf.PerToken(1)), filter)

    xf.load(stored(build))
    bad = scales.copy()
    bad[37] = scale
    # The filter is made before the value that is converted.
    refused(stored(build, values={0: {"quantization": PerChannel(bad, 0)}}),
            "value 0 .*positive scales, found .* at index 37")


def test_H5_a_convolution_pads_with_the_zero_point():
    q = PerTensor(.5, 3)

    def build(b):
        ones = b.constant(np.ones((1, 3, 3, 1), np.int8), "qint8", PerTensor(1.0, 0))
        return b.conv2d(b.input((1, 2, 2, 1), "qint8", q), ones, padding=1, quantization=PerTensor(1.0, 0))

    np.testing.assert_array_equal(ran(build, np.full((1, 2, 2, 1), 5, np.int8)).ravel(), [4, 4, 4, 4])
    padded = ran(lambda b: b.static_constant_pad(b.input((1,), "qint8", q), (1,), (0,), 1.0), np.int8([7]))
    assert padded.tolist() == [5, 7]


def test_H7_a_bias_with_a_scale_of_its_own_is_refused():
    def build(b):
        filter = b.constant(np.int8([[2]]), "qint8", PerTensor(1.0, 0))
        bias = b.constant(np.int32([4]), "qint32", PerTensor(.5, 0))
        return b.fully_connected(b.input((1, 1), "qint8", PerTensor(.5, 0)), filter, bias, datatype="qint8",
                                 quantization=PerTensor(1.0, 0))

    # 10 * .5 * 2 + 4 * .5
    assert ran(build, np.int8([[10]])).tolist() == [[12]]
    message = r"bias \(value 1\) has scale 7, need input scale \* filter scale = 0.5"
    refused(stored(build, values={1: {"quantization": PerTensor(7.0, 0)}}), message, xf.GraphError)


@pytest.mark.parametrize("name", ["conv2d", "depthwise_conv2d", "conv_transpose2d"])
def test_H7_of_convolutions_each_channel_is_compared(name):
    made = case(name, ("qint8", "qcint8", "qcint32", "qint8"))
    bias = made.graph.value(made.node.inputs[2])
    scales = bias.quantization.scales.copy()
    scales[3] *= 2
    values = [value.replace(quantization=PerChannel(scales, 0)) if value.id == bias.id else value
              for value in made.graph.values]
    parts = writer.Parts(values, made.graph.nodes, made.graph.inputs, made.graph.outputs)
    refused(writer.to_bytes(parts), "has scale .* for output channel 3", xf.GraphError)


def test_H_ratios_that_requantization_can_not_hold_are_refused():
    def build(b):
        filter = b.constant(np.int8([[2]]), "qint8", PerTensor(1.0, 0))
        return b.fully_connected(b.input((1, 1), "qint8", PerTensor(1.0, 0)), filter, datatype="qint8",
                                 quantization=PerTensor(1.0, 0))

    xf.load(stored(build, values={2: {"quantization": PerTensor(1 / 255, 0)}}))
    refused(stored(build, values={2: {"quantization": PerTensor(1 / 256, 0)}}),
            r"input scale \* filter scale / output scale is 256, need 2\*\*-32 to below 2\*\*8", xf.GraphError)


def test_H_raw_integers_cross_the_boundary():
    # Helpers translate; nothing is quantized behind the caller's back.
    def build(b):
        return b.negate(b.input((3,), "quint8", PerTensor(.5, 100)), quantization=PerTensor(.25, 50))

    graph = xf.load(stored(build))
    real = f32(-1, 0, 3)
    raw = xf.quantize(real, graph.inputs[0])
    assert raw.tolist() == [98, 100, 106]
    (got,) = xf.Runtime(graph).run(raw)
    assert got.dtype == np.uint8
    np.testing.assert_array_equal(xf.dequantize(got, graph.outputs[0]), -real)
