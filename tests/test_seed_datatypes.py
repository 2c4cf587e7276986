"""The seed schema names four datatypes and stores no quantization: what becomes of each."""

import files
import numpy as np
import pytest
from small import refused

import xnnfast as xf
from xnnfast import Runtime

CODES = {"fp32": (1, np.float32), "fp16": (2, np.float16), "qint8": (3, np.int8), "qint32": (4, np.int32)}


def addition(datatype):
    """Bytes of y = x + (0, 1, ..., 7)."""
    code, dtype = CODES[datatype]
    numbers = np.arange(8, dtype=dtype)
    tables = (files.plain(0, external=0, flags=1, datatype=code), files.plain(1, constant=1, datatype=code),
              files.plain(2, external=1, flags=2, datatype=code))
    return files.seed(files.seed_tree(xvalues=files.values(*tables, field="xvalue"),
                                      constant_buffer=[{}, {"storage": numbers.tobytes()}],
                                      mem_buffer_sizes=[0, numbers.nbytes]))


@pytest.mark.parametrize("datatype", ["fp32", "fp16"])
def test_floats_run_as_they_are(datatype):
    graph = xf.load(addition(datatype))
    assert (graph.dialect, graph.inputs[0].datatype) == ("seed", datatype)
    for batch in (1, 3):
        x = np.ones((batch, 8), CODES[datatype][1])
        (y,) = Runtime(graph).run(x)
        np.testing.assert_array_equal(y, x + np.arange(8, dtype=x.dtype))


def test_qint8_runs_with_parameters_of_the_caller():
    graph = xf.load(addition("qint8"), quantization={0: (.5, 0), 1: (.25, 2), 2: (1.0, -3)})
    assert [value.quantization for value in graph.values] == [(.5, 0), (.25, 2), (1.0, -3)]
    x = np.full((1, 8), 8, np.int8)
    (y,) = Runtime(graph).run(x)
    (want,) = xf.reference.run(graph, x)
    np.testing.assert_array_equal(y, want)
    real = 4 + (np.arange(8) - 2) / 4
    np.testing.assert_allclose(xf.dequantize(y, graph.outputs[0]), [real], atol=.5)


def test_qint8_without_parameters_says_what_is_missing():
    message = (r"value {0} is qint8 and the file stores no scale and zero point for it: give them as "
               r"quantization=\{{{0}: \(scale, zero_point\)\}}")
    refused(addition("qint8"), message.format(0), xf.GraphError)
    with pytest.raises(xf.GraphError, match=message.format(1)):
        xf.load(addition("qint8"), quantization={0: (.5, 0)})


@pytest.mark.parametrize("quantization, match", [
    ({0: (.5, 300)}, "value 0 .*need a zero point from -128 to 127 for qint8, found 300"),
    ({0: (0.0, 0)}, "value 0 .*scale, found 0.0"),
    ({0: (.5, 0), 9: (.5, 0)}, "value 9, which does not exist"),
])
def test_parameters_of_the_caller_are_checked(quantization, match):
    with pytest.raises(xf.XnnfastError, match=match):
        xf.load(addition("qint8"), quantization={1: (.25, 2), 2: (1.0, -3), **quantization})


def test_parameters_for_floats_are_refused():
    with pytest.raises(xf.ArgumentError, match="parameters for value 0, which stores its own or needs none"):
        xf.load(addition("fp32"), quantization={0: (.5, 0)})


@pytest.mark.parametrize("quantization", [None, {0: (.5, 0), 1: (.5, 0), 2: (.5, 0)}])
def test_qint32_is_what_the_engine_can_not_add(quantization):
    # 4 is qint32 in the seed's own numbering, and something else in every other.
    with pytest.raises(xf.GraphError, match="value 0 is qint32, and XNNPACK has no addition of that type"):
        xf.load(addition("qint32"), quantization=quantization)
