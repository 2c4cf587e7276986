"""Every operator in every legal combination of datatypes: XNNPACK against the NumPy reference."""

import itertools
import math

import numpy as np
import pytest
from op_cases import ENGINE_ONLY, MAKERS, Q8, Case, agree, case, combinations, told

import xnnfast as xf
from xnnfast import Graph, GraphBuilder, Runtime, writer
from xnnfast._graph import Node
from xnnfast.fuse import FOLDS_CLAMP
from xnnfast.lower import lower
from xnnfast.ops import OPS
from xnnfast.quantization import PerChannel, PerTensor, PerToken

COMBINATIONS = [pytest.param(name, types, id=f"{name}-{'/'.join(types)}") for name, types in combinations()]
INF = math.inf


def one_of_each_kind(name):
    """Combinations that differ in more than a bias or a width: enough where not the numbers are the question."""
    kinds = {}
    for types in OPS[name].datatypes:
        kinds.setdefault((types[0], types[-1]), types)
    return list(kinds.values())


def with_limits(made, clamp):
    """The same graph with limits on its operator, also on operators that have none of their own."""
    graph = made.graph
    nodes = [node.replace(clamp=clamp) if node is made.node else node for node in graph.nodes]
    made.graph = Graph(graph.values, nodes, graph.inputs, graph.outputs)
    return made


# ---- all operators, all datatypes


def test_every_operator_has_a_case():
    assert set(MAKERS) | set(ENGINE_ONLY) == set(OPS)
    assert {name for name, op in OPS.items() if op.kind is None} == set(ENGINE_ONLY)


@pytest.mark.parametrize("name, types", COMBINATIONS)
def test_agrees_with_the_reference(name, types):
    made = case(name, types)
    assert tuple(type for type in types if type != "-") == tuple(
        made.graph.value(value).datatype for value in (*made.node.inputs, *made.node.outputs) if value is not None)
    made.check()


@pytest.mark.parametrize("name", OPS)
def test_other_batches_agree_as_well(name):
    for types in OPS[name].datatypes:
        made = case(name, types, seed=1)
        if not made.has_batch:
            assert name in ("batch_matrix_multiply", "prelu", "static_reshape", "static_slice")
            continue
        runtime = Runtime(made.graph)
        declared = made.feeds[0][0].shape[0]
        for batch in (declared + 3, 1, declared):
            with told(types, batch):
                made.check(made.arrays(seed=batch, batch=batch), runtime)


@pytest.mark.parametrize("datatype", ["fp32", "qint8", "int32"])
def test_reshapes_and_slices_follow_the_batch(datatype):
    for batch in (2, 5, 1):
        for name, options, want in (("static_reshape", {"new_shape": (2, 12)}, lambda x: x.reshape(len(x), 12)),
                                    ("static_slice", {}, lambda x: x[:, 1:4, 2:6])):
            if (datatype, datatype) in OPS[name].datatypes:
                made = case(name, (datatype, datatype), **options)
                x = np.tile(made.arrays()[0], (batch, 1, 1))[:batch]
                np.testing.assert_array_equal(Runtime(made.graph).run(x)[0], want(x))


@pytest.mark.parametrize("name", OPS)
def test_limits_agree_as_well(name):
    for types in OPS[name].datatypes:
        made = case(name, types, seed=2)
        clamp = (-3.0, 20.0) if types[-1] == "int32" else (-0.4, 0.7)
        if types[-1] in ("qdint8", "qint32"):
            with pytest.raises(xf.GraphError, match=f"can't limit {types[-1]}"):
                with_limits(made, clamp)
            continue
        with told(types):
            with_limits(made, clamp).check()


@pytest.mark.parametrize("name", OPS)
def test_two_threads_give_what_one_gives(name):
    larger = {
        "fully_connected": {"lead": (37,), "outer": 130}, "batch_matrix_multiply": {"rows": 19, "columns": 70},
        "conv2d": {"height": 13, "width": 11}, "depthwise_conv2d": {"height": 13, "channels": 40},
        "conv_transpose2d": {"height": 9, "width": 11}, "average_pooling2d": {"height": 14, "channels": 33},
        "max_pooling2d": {"height": 14, "channels": 33}, "argmax_pooling2d": {"height": 14, "channels": 33},
        "softmax": {"shape": (41, 33)}, "static_resize_bilinear2d": {"size": (17, 19)},
    }
    for types in one_of_each_kind(name):
        made = case(name, types, **larger.get(name, {}))
        arrays = made.arrays()
        with told(types):
            for got, want in zip(Runtime(made.graph, threads=2).run(*arrays), Runtime(made.graph).run(*arrays)):
                np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", OPS)
def test_batches_of_nothing_give_nothing(name):
    made = case(name, OPS[name].datatypes[0])
    if not made.has_batch:
        return
    arrays = made.arrays(batch=0)
    for got, want in zip(Runtime(made.graph).run(*arrays), xf.reference.run(made.graph, *arrays)):
        assert got.shape == want.shape and got.size == 0 and got.dtype == want.dtype


# ---- flags and geometry, in every combination of datatypes


SQUARE = {"height": 7, "width": 9, "kernel": (3, 3)}
VARIANTS = {
    "add": [{"second": (3, 1)}, {"first": (), "second": (4,)}, {"second": (2, 3, 5), "constant": True},
            {"first": (1, 2, 1, 2, 1, 2), "second": (2, 1, 2, 1, 2, 1)}, {"clamp": (-0.5, None)},
            {"clamp": (None, 1.25)}],
    "subtract": [{"first": (3,), "second": (2, 4, 3)}, {"constant": True}, {"second": (), "constant": True}],
    "multiply": [{"first": (2, 1, 3), "second": (4, 1)}, {"constant": True, "second": (3, 1)}],
    "divide": [{"first": (1,), "second": (3,)}, {"constant": True, "clamp": (-1, 1)}],
    "minimum": [{"second": (1, 3, 1)}, {"constant": True}],
    "maximum": [{"first": (5,), "second": (2, 3, 5)}, {"constant": True}],
    "prelu": [{"first": (1,), "second": (3,)}, {"first": (2, 4, 4, 3), "second": (3,)},
              {"constant": False, "second": (1,)}],
    "clamp": [{"clamp": (0, None)}, {"clamp": (None, 0.5)}, {"other": False}, {"shape": ()}],
    "leaky_relu": [{"negative_slope": 0.5}, {"negative_slope": -0.25}],
    "elu": [{"alpha": 2.0}],
    "sigmoid": [{"shape": (1,)}, {"shape": (1000,)}, {"shape": (1, 1, 2, 1, 3, 7)}],
    "gelu": [{"shape": (1000,)}],
    "convert": [{"shape": (5, 33), "rows": 1}, {"low": 0.5, "high": 9.0}],
    "softmax": [{"shape": (5,)}, {"shape": (2, 1)}, {"shape": (3, 131)}],
    "scaled_dot_product_attention": [{"shared": True}, {"tokens": 1, "keys": 1}, {"channels": 33, "values": 17}],
    "fully_connected": [{"lead": ()}, {"lead": (2, 3, 4)}, {"outer": 1}, {"outer": 67, "inner": 96},
                        {"clamp": (-0.5, 0.25)}],
    "batch_matrix_multiply": [
        {"transpose": True}, {"first": (), "second": ()}, {"first": (2, 3), "second": (3,)},
        {"first": (1,), "second": (4,)}, {"first": (3, 1), "second": (1, 2), "transpose": True},
        {"rows": 1, "columns": 1}, {"inner": 65, "columns": 130}],
    "conv2d": [
        {"padding": (1, 0, 2, 1), "stride": (2, 1), "dilation": (1, 2)},
        {"same_padding": True, "stride": (2, 3), **SQUARE},
        {"kernel": (1, 1), "groups": 1, "each_in": 9, "each_out": 70}, {"clamp": (-0.5, 0.25), "padding": 1},
        {"groups": 4, "each_in": 1, "each_out": 2}, {"kernel": (1, 1), "stride": 2},
        {"groups": 1, "each_in": 3, "each_out": 17, **SQUARE}],
    "depthwise_conv2d": [
        {"padding": (1, 0, 2, 1), "stride": (2, 1), "dilation": (2, 1)}, {"same_padding": True, "stride": 2, **SQUARE},
        {"kernel": (1, 1), "multiplier": 1}, {"kernel": (5, 5), "padding": 2, "multiplier": 1, "channels": 33},
        {"clamp": (-0.5, 0.25)}],
    "conv_transpose2d": [
        {"stride": (2, 3), "padding": (1, 0, 0, 1), "adjustment": (1, 2)}, {"dilation": 2},
        {"stride": 2, "kernel": (2, 2)}, {"groups": 1, "each_in": 3, "each_out": 5, "kernel": (1, 1)},
        {"stride": 3, "kernel": (2, 2)}, {"clamp": (-0.5, 0.25), "padding": 1}],
    "average_pooling2d": [
        {"padding": 1, "stride": (2, 1)}, {"same_padding": True, "stride": 2}, {"pooling": 1}, {"pooling": (6, 7)},
        {"clamp": (-0.25, 0.25)}, {"pooling": 2, "stride": 3}, {"pooling": (5, 5), "stride": 1}],
    "max_pooling2d": [
        {"padding": 1, "stride": (2, 1)}, {"same_padding": True, "stride": 2}, {"dilation": (1, 2), "stride": 1},
        {"pooling": (6, 7)}, {"clamp": (-0.25, 0.25)}, {"pooling": (5, 5), "stride": 1}],
    "argmax_pooling2d": [{"pooling": (2, 2)}, {"pooling": (3, 3)}, {"pooling": (4, 5), "padding": (1, 0, 0, 1)},
                         {"same_padding": True}],
    "global_average_pooling2d": [{"keep_dims": False}, {"shape": (3, 4, 5)}, {"shape": (1, 1, 1, 3)}, {"other": False}],
    "static_transpose": [{"perm": (3, 2, 1, 0)}, {"shape": (2, 3), "perm": (1, 0)},
                         {"shape": (2, 1, 3, 2, 2, 3), "perm": (0, 5, 3, 1, 4, 2)}],
    "static_reshape": [{"new_shape": (24,)}, {"new_shape": (-1, 1, 6, 1)}, {"new_shape": (1, 2, 1, 3, 2, 2)}],
    "static_slice": [{"offsets": (0, 0, 0), "sizes": (2, 5, 6)}, {"offsets": (1, 4, 5), "sizes": (1, 1, 1)},
                     {"shape": (2, 2, 2, 2, 2, 3), "offsets": (0, 1, 0, 1, 0, 1), "sizes": (1, 1, 2, 1, 2, 2)}],
    "static_constant_pad": [{"value": 0.0}, {"value": -9.0}, {"before": (1, 0, 0), "after": (0, 0, 1)},
                            {"before": (0, 0, 0), "after": (0, 0, 0)}],
    "static_resize_bilinear2d": [{"align_corners": True}, {"legacy_mode": True}, {"size": (1, 1)},
                                 {"size": (1, 1), "align_corners": True}, {"size": (4, 5)}, {"size": (2, 3)},
                                 {"height": 1, "width": 1}],
    **{f"concatenate{count}": [{"axis": 2}, {"axis": 0}, {"shape": (7,), "axis": 0}, {"constant": (1,)}]
       for count in (2, 3, 4, 5)},
}


@pytest.mark.parametrize("name, options", [
    pytest.param(name, options, id=f"{name}-{number}")
    for name, several in VARIANTS.items() for number, options in enumerate(several)])
def test_variants_agree(name, options):
    for types in OPS[name].datatypes:
        # Rows are for what is quantized by rows; limits of the floats are none that an int32 can have.
        if ("rows" in options and types[-1] != "qdint8") or ("clamp" in options and types[-1] == "int32"):
            continue
        with told(types):
            made = case(name, types, **options)
            made.check()
            if made.has_batch:
                made.check(made.arrays(seed=3, batch=3))


@pytest.mark.parametrize("types", [types for types in OPS["fully_connected"].datatypes
                                   if types[1] not in ("qcint4", "qbint4")], ids="/".join)
def test_transposed_weights_agree(types):
    case("fully_connected", types, transpose=True).check()


@pytest.mark.parametrize("types", [("fp32", "fp32", "fp32", "fp32"), ("fp32", "fp32", "-", "fp32")], ids="/".join)
@pytest.mark.parametrize("transpose", [False, True])
def test_filters_that_are_computed_agree(types, transpose):
    case("fully_connected", types, computed=True, transpose=transpose).check()


@pytest.mark.parametrize("types", [("fp32", "fp32", "fp32"), ("fp16", "fp16", "fp16")], ids="/".join)
@pytest.mark.parametrize("options", [
    {}, {"transpose": True}, {"first": (2, 3), "second": (3,)}, {"first": (1,), "second": (4,)}])
def test_products_with_a_constant_agree(types, options):
    case("batch_matrix_multiply", types, constant=True, **options).check()


@pytest.mark.parametrize("block", [32, 64, 96])
def test_groups_of_4_bit_numbers_agree(block):
    for types in OPS["fully_connected"].datatypes:
        if types[1] == "qbint4":
            case("fully_connected", types, inner=192, outer=9, block=block).check()


def test_reshape_to_rank_2_in_a_fully_connected_layer():
    made = case("fully_connected", ("fp32", "fp32", "fp32", "fp32"), lead=(2, 3))
    graph = made.graph
    out = graph.outputs[0].replace(shape=(6, 7))
    values = [out if value.id == out.id else value for value in graph.values]
    flat = Graph(values, [graph.nodes[0].replace(flags=4)], graph.inputs, [out])
    arrays = made.arrays()
    (got,), (want,) = Runtime(flat).run(*arrays), xf.reference.run(graph, *arrays)
    agree(got, want.reshape(6, 7), "fp32", made)


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.flags & 0x20])
@pytest.mark.parametrize("low_memory", [False, True])
def test_transient_indirection_buffers_change_nothing(name, low_memory):
    made = case(name, OPS[name].datatypes[0])
    node = made.node if low_memory else made.node.replace(flags=made.node.flags | 0x20)
    graph = Graph(made.graph.values, [node], made.graph.inputs, made.graph.outputs)
    made.check(runtime=Runtime(graph, low_memory=low_memory))


@pytest.mark.parametrize("name", ["average_pooling2d", "max_pooling2d"])
def test_keep_dims_is_harmless_on_pools(name):
    made = case(name, ("fp32", "fp32"))
    graph = Graph(made.graph.values, [made.node.replace(flags=0x40)], made.graph.inputs, made.graph.outputs)
    made.check(runtime=Runtime(graph))


@pytest.mark.parametrize("shape", [(2, 5, 6, 7), (3, 4, 5)])
def test_global_pooling_of_old_files_keeps_its_dims(shape):
    # They leave the flag out; the declared rank tells.
    made = case("global_average_pooling2d", ("fp32", "fp32"), shape=shape)
    graph = Graph(made.graph.values, [made.node.replace(flags=0)], made.graph.inputs, made.graph.outputs)
    (got,) = made.check(runtime=Runtime(graph))
    assert got.ndim == len(shape)


def test_an_xn00_input_is_quantized_on_its_way_in():
    rng = np.random.default_rng(0)
    weights = rng.integers(-127, 128, (5, 16)).astype(np.int8)
    b = GraphBuilder()
    x = b.input((3, 16), dq_datatype="qint8")
    filter = b.constant(weights, "qcint8", PerChannel(np.full(5, 0.01), 0))
    b.output(b.fully_connected(x, filter, rng.normal(size=5).astype(np.float32)))
    graph = xf.load(b.finish(dialect="xn00"))
    assert [node.op.name for node in lower(graph).nodes] == ["convert", "fully_connected"]
    for batch in (3, 1, 8):
        array = rng.normal(size=(batch, 16)).astype(np.float32)
        (got,), (want,) = Runtime(graph).run(array), xf.reference.run(graph, array)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


# ---- constants


@pytest.mark.parametrize("name, types", [
    pytest.param(name, types, id=f"{name}-{types[0]}")
    for name, op in OPS.items() if op.call == "xnn_define_binary" for types in op.datatypes])
def test_a_constant_operand_is_read_in_place(name, types, tmp_path):
    made = case(name, types, constant=True)
    path = tmp_path / "graph.xnn"
    writer.write(path, made.graph)
    graph = xf.load(path)
    assert graph.zero_copy == (1, 1)
    made.check(runtime=Runtime(graph))


def test_int8_filters_of_float_layers_take_a_bias():
    # XNNPACK computes (x @ filter + bias) * scale there; lowering divides the bias.
    made = case("fully_connected", ("fp32", "qcint8", "fp32", "fp32"), lead=(2,), inner=8, outer=3)
    graph = made.graph
    bias = graph.value(made.node.inputs[2]).array()
    (got,) = Runtime(graph).run(np.zeros((2, 8), np.float32))
    np.testing.assert_allclose(got, [bias, bias], rtol=3e-7)
    lowered = lower(graph)
    assert lowered.values[lowered.nodes[0].inputs[2]].constant is not graph.value(made.node.inputs[2]).constant


def test_a_bias_that_the_division_takes_out_of_range_is_named():
    for scale, good in ((1e-30, False), (1e-3, True)):
        b = GraphBuilder()
        filter = b.constant(np.ones((2, 8), np.int8), "qcint8", PerChannel(np.array([1.0, scale]), 0))
        b.output(b.fully_connected(b.input((1, 8)), filter, np.array([1e30, 1e30], np.float32)))
        graph = b.graph()
        if good:
            Runtime(graph)
        else:
            with pytest.raises(xf.GraphError, match="bias 1e\\+30 of output channel 1"):
                Runtime(graph)


def test_a_batch_of_int8_matrices_shares_its_scales():
    # XNNPACK reads a row of scales for each matrix, a file holds one: lowering repeats it.
    scales = np.array([1, 2, 4], np.float32)
    b = GraphBuilder()
    x = b.convert(b.input((4, 1, 2)), "qdint8", PerToken(1))
    ones = b.constant(np.ones((4, 2, 3), np.int8), "qcint8", PerChannel(scales, 2))
    b.output(b.batch_matrix_multiply(x, ones))
    (got,) = Runtime(b.graph()).run(np.ones((4, 1, 2), np.float32))
    np.testing.assert_allclose(got, np.broadcast_to(2 * scales, (4, 1, 3)), rtol=1e-2)


# ---- limits: inside the producer where it can apply them, as a pass of their own elsewhere


def followed_by_clamp(name, types, clamp, *, own=None, export=False, twice=False, quantization=None, **options):
    """The operator with a Clamp node behind it."""
    made = case(name, types, **options)
    graph = made.graph
    result = graph.outputs[0]
    source = result if export else result.replace(is_output=False, external_id=None)
    limited = result.replace(id=1000, external_id=100, quantization=quantization or result.quantization)
    nodes = [node.replace(clamp=own) if node is made.node and own else node for node in graph.nodes]
    nodes.append(Node(OPS["clamp"], (source.id,), (1000,), clamp=clamp, index=len(nodes)))
    outputs = [source, limited] if export else [limited]
    values = [source if value.id == source.id else value for value in graph.values] + [limited]
    if twice:
        again = limited.replace(id=1001, external_id=101)
        values.append(again)
        outputs.append(again)
        nodes.append(Node(OPS["clamp"], (source.id,), (1001,), clamp=(-INF, 0.25), index=len(nodes)))
    made.graph = Graph(values, nodes, graph.inputs, outputs)
    return made


FOLDING = [pytest.param(name, types, id=f"{name}-{types[0]}-{types[-1]}") for name in sorted(FOLDS_CLAMP)
           for types in one_of_each_kind(name)]


def lowered_names(made):
    return [node.op.name for node in lower(made.graph).nodes if node.op.name != "convert"]


@pytest.mark.parametrize("name, types", FOLDING)
def test_a_clamp_goes_into_its_producer(name, types):
    geometry = {} if name == "fully_connected" else {"padding": 1}
    # XNNPACK's own folding would write these limits over the padding.
    for clamp in ((0.5, 1.0), (-1.0, -0.5), (0, 6)):
        made = followed_by_clamp(name, types, clamp, **geometry)
        assert lowered_names(made) == [name]
        made.check()


@pytest.mark.parametrize("name, types", FOLDING)
def test_limits_before_and_behind_intersect(name, types):
    made = followed_by_clamp(name, types, (-0.5, INF), own=(-1.0, 0.75))
    assert lowered_names(made) == [name]
    assert lower(made.graph).nodes[-1].clamp == (-0.5, 0.75)
    made.check()


def test_a_chain_of_clamps_goes_into_one_producer():
    made = followed_by_clamp("conv2d", ("fp32",) * 4, (-0.5, INF))
    graph = made.graph
    inner = graph.outputs[0].replace(is_output=False, external_id=None)
    outer = graph.outputs[0].replace(id=2000)
    last = Node(OPS["clamp"], (inner.id,), (2000,), clamp=(-INF, 0.25), index=7)
    made.graph = Graph([*(inner if value.id == inner.id else value for value in graph.values), outer],
                       [*graph.nodes, last], graph.inputs, [outer])
    assert lowered_names(made) == ["conv2d"]
    made.check()


@pytest.mark.parametrize("why, options", [
    ("limits that exclude each other", {"own": (0.5, 1.0), "clamp": (-1.0, 0.0)}),
    ("the unlimited result is an output", {"export": True, "clamp": (-0.5, 0.5)}),
    ("another consumer", {"twice": True, "clamp": (-0.5, 0.5)}),
])
def test_a_clamp_stays_a_node_because_of(why, options):
    made = followed_by_clamp("conv2d", ("fp32",) * 4, **options)
    assert "clamp" in lowered_names(made)
    made.check()


def test_a_clamp_with_other_parameters_stays_a_node():
    types = ("qint8", "qint8", "qint32", "qint8")
    made = followed_by_clamp("conv2d", types, (-0.5, 0.5), quantization=PerTensor(0.01, 3))
    assert lowered_names(made) == ["conv2d", "clamp"]
    made.check()
    same = followed_by_clamp("conv2d", types, (-0.5, 0.5))
    assert lowered_names(same) == ["conv2d"]
    same.check()


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.kind and name not in FOLDS_CLAMP | {"clamp"}])
def test_limits_elsewhere_are_one_more_node(name):
    types = OPS[name].datatypes[0]
    unlimited = case(name, types)
    limited = with_limits(case(name, types), (-0.4, 0.7))
    assert lowered_names(limited) == [*lowered_names(unlimited), "clamp"]
    open_ended = with_limits(case(name, types), (-INF, INF))
    assert lowered_names(open_ended) == lowered_names(unlimited)


@pytest.mark.parametrize("datatype", Q8)
@pytest.mark.parametrize("clamp", [(-0.5, 0.5), (0.013, 0.021), (-INF, -1e9), (1e9, INF), (-1e-9, 1e-9)])
def test_quantized_limits_round_as_in_the_reference(datatype, clamp):
    for name, types in (("clamp", (datatype,) * 2), ("max_pooling2d", (datatype,) * 2),
                        ("fully_connected", (datatype, datatype, "-", datatype)), ("add", (datatype,) * 3)):
        with_limits(case(name, types), clamp).check()


# ---- padding of quantized operators


@pytest.mark.parametrize("datatype", Q8)
@pytest.mark.parametrize("value", [0.0, 0.75, -0.3, 1e9, -1e9])
def test_a_border_is_stored_with_the_zero_point(datatype, value):
    made = case("static_constant_pad", (datatype, datatype), value=value)
    (got,) = made.check()
    low, high = xf.datatypes.DATATYPES[datatype].low, xf.datatypes.DATATYPES[datatype].high
    scale, zero_point = made.graph.outputs[0].quantization
    assert got[0, 0, 0] == np.clip(np.rint(value / scale) + zero_point, low, high)


@pytest.mark.parametrize("name, types", [
    (name, types) for name in ("conv2d", "depthwise_conv2d", "conv_transpose2d") for types in OPS[name].datatypes
    if types[0] in (*Q8, "qdint8")])
def test_padding_of_a_convolution_counts_as_zero(name, types):
    # A window that lies in the padding with all but one place: the rest must add nothing.
    made = case(name, types, height=3, width=3, kernel=(3, 3), padding=1)
    made.check()


# ---- kernels that upstream corrected later: hazards.md, chapter 6


@pytest.mark.parametrize("columns", [32, 63, 64, 65, 100, 128, 130])
def test_fp16_layers_of_64_columns_and_more_are_exact(columns):
    rng = np.random.default_rng(columns)
    weights = rng.integers(-3, 4, (columns, 24)).astype(np.float16)
    for rows, convolved in itertools.product((1, 5, 8), (False, True)):
        x = rng.integers(-4, 5, (1, rows, 1, 24)).astype(np.float16)
        b = GraphBuilder()
        source = b.input(x.shape, "fp16")
        b.output(b.conv2d(source, weights.reshape(columns, 1, 1, 24).astype(np.float32)) if convolved else
                 b.fully_connected(source, weights))
        (got,) = Runtime(b.graph()).run(x)
        want = x.reshape(rows, 24).astype(np.float32) @ weights.T.astype(np.float32)
        np.testing.assert_array_equal(got.reshape(rows, columns), want)


@pytest.mark.parametrize("channels", [64, 65, 128, 130])
@pytest.mark.parametrize(
    "types", [("qint8", "qcint8", "qcint32", "qint8"), ("qdint8", "qcint8", "fp32", "fp32")], ids="/".join)
def test_int8_convolutions_of_many_channels_and_odd_pixels(channels, types):
    for height, width in ((1, 1), (4, 4), (1, 17), (3, 11)):
        made = case("conv2d", types, batch=1, groups=1, each_in=channels, each_out=20, height=height, width=width,
                    kernel=(3, 3), padding=1)
        made.check()


def test_cases_find_a_wrong_result():
    # A check that can't fail is none.
    made = case("add", ("qint8",) * 3)
    arrays = made.arrays()
    want = [result + np.int8(1) for result in Runtime(made.graph).run(*arrays)]
    with pytest.raises(AssertionError, match="by up to"):
        made.compare(want, xf.reference.run(made.graph, *arrays))
    assert isinstance(made, Case)
