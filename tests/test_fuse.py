"""Fusion: what other nodes can do the work of, and that results stay the same bit by bit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import xnnfast
from xnnfast import Executor, GraphBuilder, PerChannel, PerTensor, Runtime, reference
from xnnfast.describe import describe
from xnnfast.fuse import Fusion, fold_affine
from xnnfast.lower import lower

F = np.float32
Q = {"fp32": None, "fp16": None, "qint8": PerTensor(1 / 16, 3), "quint8": PerTensor(1 / 16, 131)}
RESULT = {"fp32": None, "fp16": None, "qint8": PerTensor(1 / 2, -4), "quint8": PerTensor(1 / 2, 120)}


def numbers(rng, datatype, shape):
    if datatype in ("qint8", "quint8"):
        low = -128 if datatype == "qint8" else 0
        return rng.integers(low, low + 256, shape).astype(np.int8 if low else np.uint8)
    return rng.standard_normal(shape).astype(F if datatype == "fp32" else np.float16)


def layer(b, rng, x, datatype, depthwise, kernel, outer, **options):
    inner = x.shape[3]
    shape = (1, *kernel, inner) if depthwise else (outer, *kernel, inner)
    filter = numbers(rng, "fp32" if datatype == "fp16" else datatype, shape)
    if datatype in ("qint8", "quint8"):
        # One number for the zero point of an unsigned filter, none for a signed.
        filter = b.constant(filter, datatype, PerTensor(1 / 64, 0 if datatype == "qint8" else 127))
        options |= {"datatype": datatype, "quantization": RESULT[datatype]}
        bias = rng.integers(-500, 500, shape[3 if depthwise else 0]).astype(np.int32)
    else:
        bias = numbers(rng, "fp32", shape[3 if depthwise else 0])
        options["datatype"] = datatype
    return (b.depthwise_conv2d if depthwise else b.conv2d)(x, filter, bias, **options)


def both(graph, *arrays, **options):
    """Results with and without fusion, and what was fused."""
    with Runtime(graph, **options) as fused, Runtime(graph, fuse=False, **options) as plain:
        assert plain.fused == ()
        return fused.run(*arrays), plain.run(*arrays), fused.fused


def same_bits(one, two):
    return all(a.tobytes() == b.tobytes() for a, b in zip(one, two, strict=True))


# ---- pads


@st.composite
def padded(draw):
    sides = st.integers(0, 3)
    kernel = draw(st.tuples(st.integers(1, 4), st.integers(2, 4)))
    return {
        "datatype": draw(st.sampled_from(["fp32", "qint8", "quint8"])),
        "depthwise": draw(st.booleans()),
        "kernel": kernel,
        "size": draw(st.tuples(st.integers(kernel[0], 9), st.integers(kernel[1], 9))),
        "channels": draw(st.sampled_from([1, 3, 8, 17])),
        "outer": draw(st.sampled_from([1, 5, 16, 33])),
        "pad": draw(st.tuples(sides, sides, sides, sides)),
        "own": draw(st.tuples(sides, sides, sides, sides)),
        "stride": draw(st.tuples(st.integers(1, 2), st.integers(1, 2))),
        "batch": draw(st.integers(1, 2)),
        "clamp": draw(st.sampled_from([None, (0.0, 6.0), (-1.0, 1.0)])),
        "seed": draw(st.integers(0, 99)),
    }


@settings(max_examples=120, deadline=None)
@given(padded())
def test_padding_moves_into_the_convolution_bit_by_bit(case):
    rng = np.random.default_rng(case["seed"])
    datatype = case["datatype"]
    b = GraphBuilder()
    x = b.input((case["batch"], *case["size"], case["channels"]), datatype, Q[datatype])
    top, right, bottom, left = case["pad"]
    y = b.static_constant_pad(x, (0, top, left, 0), (0, bottom, right, 0))
    y = layer(b, rng, y, datatype, case["depthwise"], case["kernel"], case["outer"], padding=case["own"],
              stride=case["stride"])  # fmt: skip
    if case["clamp"] is not None:
        y = b.clamp(y, *case["clamp"])
    b.output(y)
    graph = b.graph()
    image = numbers(rng, datatype, graph.inputs[0].shape)
    fused, plain, what = both(graph, image)
    assert [each.kind for each in what] == ["pad"] + ["clamp"] * (case["clamp"] is not None)
    assert what[0] == Fusion("pad", 0, 1)
    assert same_bits(fused, plain)
    if datatype != "fp32":
        assert same_bits(fused, reference.run(graph, image))


def pad_graph(pad=None, value=0.0, datatype="fp32", others=0, output=False, kernel=(3, 3), **options):
    rng = np.random.default_rng(0)
    b = GraphBuilder()
    x = b.input((1, 6, 5, 4), datatype, Q[datatype])
    y = b.static_constant_pad(x, *(pad or ((0, 1, 1, 0), (0, 1, 1, 0))), value)
    b.output(layer(b, rng, y, datatype, False, kernel, 8, **options))
    for _ in range(others):
        b.output(layer(b, rng, y, datatype, True, kernel, 8))
    if output:
        b.output(y)
    return b.graph()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"value": 1.0}, id="other than zero"),
        pytest.param({"value": -0.0}, id="negative zero"),
        pytest.param({"value": 0.25, "datatype": "qint8"}, id="another step than the zero point"),
        pytest.param({"pad": ((1, 0, 0, 0), (0, 0, 0, 0))}, id="more images"),
        pytest.param({"pad": ((0, 0, 0, 1), (0, 0, 0, 0))}, id="more channels"),
        pytest.param({"output": True}, id="asked for"),
        pytest.param({"kernel": (1, 1)}, id="window of one pixel"),
        pytest.param({"same_padding": True}, id="SAME padding"),
    ],
)
def test_other_pads_stay(options):
    graph = pad_graph(**options)
    image = numbers(np.random.default_rng(1), graph.inputs[0].datatype, graph.inputs[0].shape)
    fused, plain, what = both(graph, image)
    assert what == () and same_bits(fused, plain)


def test_a_pad_that_several_convolutions_read_moves_into_all():
    graph = pad_graph(others=1)
    image = numbers(np.random.default_rng(1), "fp32", graph.inputs[0].shape)
    fused, plain, what = both(graph, image)
    assert what == (Fusion("pad", 0, 1), Fusion("pad", 0, 2)) and same_bits(fused, plain)
    assert [node.op.name for node in lower(graph).nodes] == ["conv2d", "depthwise_conv2d"]


def test_a_pad_stays_where_one_reader_needs_it():
    b = GraphBuilder()
    x = b.input((1, 6, 5, 4))
    y = b.static_constant_pad(x, (0, 1, 1, 0), (0, 1, 1, 0))
    b.output(layer(b, np.random.default_rng(0), y, "fp32", False, (3, 3), 8))
    b.output(b.abs(y))
    graph = b.graph()
    image = numbers(np.random.default_rng(1), "fp32", (1, 6, 5, 4))
    fused, plain, what = both(graph, image)
    assert what == () and same_bits(fused, plain)


def test_padding_without_numbers_spreads_alike():
    graph = pad_graph()
    image = numbers(np.random.default_rng(1), "fp32", graph.inputs[0].shape)
    image[0, 0, 0, 0], image[0, 3, 3, 1], image[0, 5, 4, 3] = np.nan, np.inf, -np.inf
    fused, plain, _ = both(graph, image)
    np.testing.assert_array_equal(fused, plain)
    assert np.isnan(fused[0]).any()


def test_other_sizes_of_image_run_with_moved_padding():
    graph = pad_graph()
    with Runtime(graph) as fused, Runtime(graph, fuse=False) as plain:
        for shape in ((1, 6, 5, 4), (2, 1, 1, 4), (1, 9, 12, 4), (3, 2, 7, 4)):
            image = numbers(np.random.default_rng(2), "fp32", shape)
            assert same_bits(fused.run(image), plain.run(image))


# ---- limits


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(["fp32", "qint8", "quint8"]), st.sampled_from(["conv2d", "fully_connected", "pool"]),
    st.lists(st.tuples(st.floats(-4, 1, width=32), st.floats(0, 6, width=32)), min_size=1, max_size=3),
    st.integers(0, 99),
)  # fmt: skip
def test_limits_move_into_the_layer_bit_by_bit(datatype, kind, limits, seed):
    rng = np.random.default_rng(seed)
    b = GraphBuilder()
    x = b.input((1, 5, 5, 8), datatype, Q[datatype])
    if kind == "pool":
        y = b.max_pooling2d(x, 2)
    elif kind == "conv2d":
        y = layer(b, rng, x, datatype, False, (2, 2), 9)
    else:
        if datatype == "fp32":
            filter, more = numbers(rng, "fp32", (9, 8)), {}
        else:
            quantization = PerTensor(1 / 64, 0 if datatype == "qint8" else 99)
            filter = b.constant(numbers(rng, datatype, (9, 8)), datatype, quantization)
            more = {"datatype": datatype, "quantization": RESULT[datatype]}
        y = b.fully_connected(x, filter, None, **more)
    for low, high in limits:
        y = b.clamp(y, min(low, high - 1), high)
    b.output(y)
    graph = b.graph()
    array = numbers(rng, datatype, graph.inputs[0].shape)
    fused, plain, what = both(graph, array)
    assert same_bits(fused, plain)
    assert what and all(each.kind == "clamp" and each.into == 0 for each in what)


def test_what_is_no_number_may_become_a_limit():
    # XNNPACK's layers and its Clamp differ there; nothing is promised for either.
    b = GraphBuilder()
    b.output(b.clamp(b.fully_connected(b.input((1, 4)), np.ones((3, 4), F)), 0, 6))
    (fused,), (plain,), _ = both(b.graph(), np.full((1, 4), np.nan, F))
    for result in (fused, plain):
        assert (np.isnan(result) | (result == 6) | (result == 0)).all()


# ---- factors


def affine_graph(kind, seed=0, chain=("multiply", "add"), last=None, scalar=False):
    rng = np.random.default_rng(seed)
    b = GraphBuilder()
    if kind == "fully_connected":
        x = b.input((3, 7))
        y = b.fully_connected(x, numbers(rng, "fp32", (6, 7)), numbers(rng, "fp32", 6))
    elif kind == "transposed weights":
        x = b.input((3, 7))
        y = b.fully_connected(x, numbers(rng, "fp32", (7, 6)), None, transpose_weights=True)
    else:
        x = b.input((2, 5, 6, 6))
        if kind == "conv2d":
            y = b.conv2d(x, numbers(rng, "fp32", (6, 3, 3, 2)), numbers(rng, "fp32", 6), groups=3, padding=1)
        elif kind == "depthwise_conv2d":
            y = b.depthwise_conv2d(x, numbers(rng, "fp32", (1, 3, 3, 6)), None, padding=1)
        else:
            y = b.conv_transpose2d(x, numbers(rng, "fp32", (6, 2, 2, 6)), numbers(rng, "fp32", 6), stride=2)
    for place, name in enumerate(chain):
        shape = () if scalar else (6,) if place % 2 else (1,) * (len(y.shape) - 1) + (6,)
        number = b.constant(np.asarray(rng.uniform(0.5, 2, shape), F), "fp32")
        options = {"clamp": last} if last is not None and place == len(chain) - 1 else {}
        y = getattr(b, name.removesuffix(" from"))(*((number, y) if name.endswith(" from") else (y, number)), **options)
    b.output(y)
    return b.graph()


LAYERS = ("fully_connected", "transposed weights", "conv2d", "depthwise_conv2d", "conv_transpose2d")


@pytest.mark.parametrize("scalar", [False, True])
@pytest.mark.parametrize("chain", [("multiply", "add"), ("subtract", "divide", "multiply", "add"), ("subtract from",)])
@pytest.mark.parametrize("kind", LAYERS)
def test_factors_move_into_filters(kind, chain, scalar):
    graph = affine_graph(kind, chain=chain, last=(-1, 2), scalar=scalar)
    array = numbers(np.random.default_rng(3), "fp32", graph.inputs[0].shape)
    (want,) = reference.run(graph, array)
    with Runtime(graph, fold_affine=True) as runtime:
        (got,) = runtime.run(array)
        assert [each.kind for each in runtime.fused] == [name.removesuffix(" from") for name in chain]
        assert len(runtime.graph.nodes) == 1
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    (unfolded,) = Runtime(graph).run(array)
    np.testing.assert_allclose(unfolded, want, rtol=1e-5, atol=1e-5)
    with Executor(graph, fold_affine=True, workers=1) as executor:
        assert same_bits(executor.run(array), (got,))


def test_folded_filters_are_copies_and_the_file_keeps_its_own():
    graph = affine_graph("conv2d")
    before = [value.array().tobytes() for value in graph.values if value.constant is not None]
    folded = fold_affine(graph)
    assert folded is not graph and fold_affine(graph) is folded
    assert [value.array().tobytes() for value in graph.values if value.constant is not None] == before
    assert all(not constant.in_place and "factors" in constant.reason for constant in folded.constants)


def test_factors_stay_where_folding_would_change_more_than_rounding():
    def made(change):
        rng = np.random.default_rng(0)
        b = GraphBuilder()
        x = b.input((3, 7))
        y = b.fully_connected(x, numbers(rng, "fp32", (6, 7)), clamp=(0, None) if change == "limits between" else None)
        number = numbers(rng, "fp32", (3, 1) if change == "one per row" else 6)
        if change == "no number":
            number[2] = np.inf
        z = b.multiply(y, b.input((6,)) if change == "not constant" else number)
        b.output(z)
        if change == "asked for":
            b.output(y)
        if change == "read twice":
            b.output(b.abs(y))
        return b.graph()

    for change in ("limits between", "one per row", "no number", "not constant", "asked for", "read twice"):
        graph = made(change)
        assert fold_affine(graph) is graph, change
    assert fold_affine(made("nothing")).caches["affine fusions"] == (Fusion("multiply", 1, 0),)


def test_int8_layers_keep_their_factors():
    rng = np.random.default_rng(0)
    b = GraphBuilder()
    q = b.convert(b.input((2, 8)), "qdint8", xnnfast.PerToken(1))
    w = b.constant(numbers(rng, "qint8", (4, 8)), "qcint8", PerChannel(np.full(4, 0.1, F), 0))
    b.output(b.multiply(b.fully_connected(q, w, np.zeros(4, F), datatype="fp32"), np.full(4, 2, F)))
    graph = b.graph()
    assert fold_affine(graph) is graph


# ---- shown


def test_nodes_that_do_not_run_by_themselves_are_shown():
    graph = pad_graph()
    nodes = describe(graph)["nodes"]
    assert nodes[0]["runs_in"] == 1 and "runs_in" not in nodes[1]
    assert "(runs in node 1)" in xnnfast.describe.text(describe(graph))
