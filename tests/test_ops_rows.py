"""The rows of the operators: against the schema, against xnnpack.h, and what they refuse apart from shapes."""

import copy
import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest

from xnnfast._graph import Constant, Node, Value
from xnnfast.datatypes import DATATYPES
from xnnfast.ops import BY_KIND, OPS, Op, Refusal, check_op, normalize, operand_type, packed
from xnnfast.quantization import PerBlock, PerChannel, PerTensor, PerToken

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "schema"))

import fbs  # noqa: E402
import lowering  # noqa: E402

SCHEMA = fbs.load(ROOT / "schema" / "xnn.fbs")
INF = float("inf")

# ---- rows, schema and header


def header():
    """The text of a real xnnpack.h, from the last build on this machine."""
    cache = Path(os.environ.get("XNNFAST_CACHE") or Path("~/.cache/xnnfast").expanduser())
    found = sorted(cache.glob("built/*/include/xnnpack.h"), key=lambda path: path.stat().st_mtime)
    if not found:
        pytest.skip("no built XNNPACK on this machine")
    return found[-1].read_text(encoding="utf-8")


def test_every_member_of_the_node_union_has_one_row():
    assert [op.kind for op in OPS.values() if op.kind] == list(BY_KIND)
    assert set(BY_KIND) == {member.name for member in SCHEMA.unions["XNodeUnion"].members}
    assert [name for name, op in OPS.items() if op.kind is None] == [
        "static_reduce", "static_reshape_rows", "static_expand_dims"]


@pytest.mark.parametrize("op", OPS.values(), ids=str)
def test_a_row_is_complete(op):
    assert op.datatypes and op.flags >= 0 and op.doc and op.nan
    assert op.nan.endswith(".") and not op.doc.endswith(".")
    assert len(set(op.datatypes)) == len(op.datatypes)
    for row in op.datatypes:
        assert len(row) == len(op.inputs) + len(op.outputs)
        for name, datatype in zip((*op.inputs, *op.outputs), row):
            assert datatype in DATATYPES or (datatype == "-" and name in op.optional)


def test_takes_clamp_is_for_the_calls_that_have_limits():
    assert {name for name, op in OPS.items() if op.takes_clamp} == {
        "add", "subtract", "multiply", "divide", "clamp", "fully_connected", "conv2d", "depthwise_conv2d",
        "conv_transpose2d", "average_pooling2d", "max_pooling2d"}


def test_rows_can_be_read_without_the_package():
    assert list(lowering.load_ops()) == list(OPS)
    assert not [name for name in sys.modules if name.startswith("_xnnfast_rows.") and name.endswith("_graph")]


def test_lowering_fits_the_header():
    text = lowering.emit(OPS, header(), SCHEMA)
    assert text.count("cdef xnn_status define_") == len([op for op in OPS.values() if op.call]) + 1
    # C's order is groups, in, out; the schema's is in, out, groups.
    conv = text[text.index("define_conv2d("):]
    places = [conv.index(f'attrs["{name}"]') for name in ("groups", "group_input_channels", "group_output_channels")]
    assert places == sorted(places)
    deconv = text[text.index("define_conv_transpose2d("):]
    assert deconv.index("adjustment_height") < deconv.index("kernel_height")


SMALL_HEADER = """
enum xnn_binary_operator { xnn_binary_invalid = -1, xnn_binary_add, };
/* enum xnn_status xnn_define_gone(xnn_subgraph_t subgraph, uint32_t input_id); */
enum xnn_status xnn_define_binary(
  xnn_subgraph_t subgraph, enum xnn_binary_operator type, const struct xnn_binary_params* params,
  uint32_t input1_id, uint32_t input2_id, uint32_t output_id, uint32_t flags);
enum xnn_status xnn_define_static_slice(     //
    xnn_subgraph_t subgraph, size_t num_dims, const size_t* offsets, const size_t* sizes,
    uint32_t input_id, uint32_t output_id, uint32_t flags);
"""


def rebuilt(op, **changes):
    fields = {name: getattr(op, name) for name in (
        "name", "kind", "call", "args", "shape", "datatypes", "check", "flags", "doc", "nan", "packed", "unused",
        "normalize")}
    return Op(**{**fields, **changes})


def emit_with(changed, text=None):
    return lowering.emit({**OPS, changed.name: changed}, text or header(), SCHEMA)


@pytest.mark.parametrize("name, change, complaint", [
    ("add", {"args": "=xnn_binary_add &limits @input1_id @input2_id @output_id"}, "add: the schema's NodeBinary has "
                                                                                "flags, the row leaves it out"),
    ("add", {"args": "=xnn_binary_nothing &limits @input1_id @input2_id @output_id flags"},
     "add: xnnpack.h has no xnn_binary_nothing"),
    ("add", {"args": "=xnn_unary_abs &limits @input1_id @input2_id @output_id flags"},
     "=xnn_unary_abs meets xnn_binary_operator type of xnn_define_binary, need xnn_unary_operator"),
    ("add", {"args": "=xnn_binary_add &clamp @input1_id @input2_id @output_id flags"}, "need xnn_unary_params"),
    ("add", {"args": "=xnn_binary_add &limits @input2_id @input1_id @output_id flags"}, "arguments are out of order"),
    ("add", {"call": "xnn_define_sum2"}, "add: xnnpack.h has no xnn_define_sum2"),
    ("add", {"flags": -1}, "add: need a mask of the flags it may have"),
    ("add", {"kind": None}, "XNNAdd of the schema's node union has no row"),
    ("add", {"kind": "XNNAddAll"}, "the schema's node union has no member XNNAddAll"),
    ("add", {"kind": "XNNSubtract"}, "XNNSubtract has two rows"),
    ("conv2d", {"unused": ("adjustment_width",)}, "NodeConvolution has adjustment_height, the row leaves it out"),
    ("softmax", {"unused": ("beta",)}, "softmax: beta is in the row, the schema's NodeUnary has no such field"),
    ("static_slice", {"args": "offsets[] sizes[] @input_id @output_id flags"}, "sizes[] meets size_t* sizes"),
    ("static_slice", {"args": "offsets[6] sizes[6] @input_id @output_id flags"}, "has num_dims, the row leaves it out"),
    ("softmax", {"args": "@input_id @output_id flags =NULL"}, "the row has more: =NULL"),
])
def test_lowering_stops_when_row_schema_and_header_disagree(name, change, complaint):
    with pytest.raises(lowering.LoweringError) as caught:
        emit_with(rebuilt(OPS[name], **change))
    assert complaint in str(caught.value)


def test_lowering_stops_when_the_header_has_more_arguments():
    text = header().replace("uint32_t input1_id,\n  uint32_t input2_id,\n  uint32_t output_id,\n  uint32_t flags);",
                            "uint32_t input1_id,\n  uint32_t input2_id,\n  uint32_t output_id,\n  uint32_t flags,\n"
                            "  uint32_t more);")
    with pytest.raises(lowering.LoweringError, match=r"the row lacks more"):
        lowering.emit(OPS, text, SCHEMA)


def test_prototypes_are_read_through_comments():
    calls = lowering.prototypes(SMALL_HEADER)
    assert list(calls) == ["xnn_define_binary", "xnn_define_static_slice"]
    assert [parameter.name for parameter in calls["xnn_define_static_slice"]] == [
        "num_dims", "offsets", "sizes", "input_id", "output_id", "flags"]
    assert calls["xnn_define_static_slice"][1] == ("size_t", True, "offsets")
    assert lowering.enumerators(SMALL_HEADER)["xnn_binary_add"] == "xnn_binary_operator"


# ---- check_op

X, FILTER, BIAS, OUT = 1, 2, 3, 9


def value(number, datatype, shape=(4, 64), quantization=None, *, constant=False, dq=None):
    entry = DATATYPES[datatype]
    if quantization is None:
        quantization = {
            "none": None, "tensor": PerTensor(0.5, 0), "token": PerToken(1),
            "channel": PerChannel(np.full(shape[0], 0.25, np.float32), 0),
            "block": PerBlock(np.full(shape[0] * shape[-1] // 32, 0x3E80, np.uint16), 0, 32),
        }[entry.quantization]
    data = Constant(bytes(4096 * 16)) if constant else None
    return Value(number, datatype, shape, quantization=quantization, constant=data, is_input=dq is not None,
                 dq_datatype=dq)


def check(name, ins, outs, *, attrs=None, flags=0, clamp=None):
    """check_op of a node with these values; a message names values by their ids."""
    ins = [ins] if isinstance(ins, Value) else ins
    outs = [outs] if isinstance(outs, Value) else outs
    node = Node(OPS[name], [each and each.id for each in ins], [each.id for each in outs], attrs or {}, flags=flags,
                clamp=clamp)
    check_op(node, ins, outs)


def refusal(*args, **kwargs):
    with pytest.raises(Refusal) as caught:
        check(*args, **kwargs)
    return str(caught.value)


def q8(number, scale=0.5, zero_point=0, datatype="qint8", **kwargs):
    return value(number, datatype, quantization=PerTensor(scale, zero_point), **kwargs)


def per_channel(number, scales, datatype="qcint8", axis=0, shape=(4, 64)):
    return value(number, datatype, shape, PerChannel(np.asarray(scales, np.float32), axis), constant=True)


def fully_connected(*types, flags=0, clamp=None, constant=(FILTER, BIAS), **changes):
    """Values of a layer 64 -> 4 of these datatypes, as (ins, outs)."""
    x, weights, bias, out = types
    ins = [value(X, x, (2, 64)), value(FILTER, weights, (4, 64), constant=FILTER in constant),
           None if bias == "-" else value(BIAS, bias, (4,), constant=BIAS in constant)]
    if ins[2] is not None and bias == "qcint32":
        ins[2] = per_channel(BIAS, [0.125] * 4, "qcint32", shape=(4,))
    if ins[2] is not None and bias == "qint32":
        ins[2] = value(BIAS, "qint32", (4,), PerTensor(0.25, 0), constant=True)
    return ins, [value(OUT, out, (2, 4))]


MOVERS = {
    "static_transpose": {"perm": (1, 0)}, "static_reshape": {"new_shape": (8, 0)}, "copy": {},
    "static_slice": {"offsets": (0, 0), "sizes": (2, 2)}, "static_resize_bilinear2d": {"new_height": 2, "new_width": 2},
    "static_constant_pad": {"pre_paddings": (0, 0), "post_paddings": (1, 1), "padding_value": 0.0},
    "max_pooling2d": {}, "static_expand_dims": {"new_axes": (0,)},
}


@pytest.mark.parametrize("name", MOVERS)
@pytest.mark.parametrize("datatype", ["qint8", "quint8"])
def test_movers_need_equal_scale_and_zero_point(name, datatype):
    check(name, q8(X, 1.0, 0, datatype), q8(OUT, 1.0, 0, datatype), attrs=MOVERS[name])
    for scale, zero_point in ((0.5, 0), (1.0, 1)):
        text = refusal(name, q8(X, 1.0, 0, datatype), q8(OUT, scale, zero_point, datatype), attrs=MOVERS[name])
        assert "input (value 1) has scale 1, zero point 0" in text
        assert f"output (value 9) has scale {scale:g}, zero point {zero_point}" in text


def test_concatenate_needs_equal_pairs_of_all_inputs():
    check("concatenate3", [q8(1), q8(2), q8(3)], q8(OUT), attrs={"axis": 0})
    assert "input (value 3) has scale 0.5, zero point 7" in refusal(
        "concatenate3", [q8(1), q8(2), q8(3, zero_point=7)], q8(OUT), attrs={"axis": 0})


def test_scales_are_compared_as_xnnpack_holds_them():
    check("copy", q8(X, 0.1), q8(OUT, float(np.float32(0.1))))


@pytest.mark.parametrize("name, ins, out, good, bad", [
    ("add", (1.0, 1.0), "output", 1 / 255, 1 / 256),
    ("add", (1.0, 1.0), "output", 1024.0, 1025.0),
    ("subtract", (1.0, 1.0), "output", 1024.0, 1025.0),
    ("multiply", (1.0, 1.0), "output", 1 / 255, 1 / 256),
    ("multiply", (1.0, 1.0), "output", 65536.0, 65537.0),
])
def test_ratios_of_scales_of_binary_operators(name, ins, out, good, bad):
    check(name, [q8(1, ins[0]), q8(2, ins[1])], q8(OUT, good))
    assert f"/ {out} scale" in refusal(name, [q8(1, ins[0]), q8(2, ins[1])], q8(OUT, bad))


def test_operators_with_a_table_have_no_limits_of_scale():
    for name in ("divide", "minimum", "maximum", "prelu"):
        check(name, [q8(1, 1.0), q8(2, 1.0)], q8(OUT, 1e-6))
    check("sigmoid", q8(X, 1.0), q8(OUT, 1e-6))


@pytest.mark.parametrize("low, high", [(2.0**-7, 256.0)])
def test_ratio_of_scales_of_convert_and_leaky_relu(low, high):
    for name, attrs in (("convert", {}), ("leaky_relu", {"negative_slope": 1.0})):
        for datatype in ("qint8", "quint8"):
            for scale in (low, high):
                check(name, q8(X, 1.0, 0, datatype), q8(OUT, scale, 0, datatype), attrs=attrs)
            for scale in (low / 1.01, high * 1.01):
                assert "input scale / output scale" in refusal(
                    name, q8(X, 1.0, 0, datatype), q8(OUT, scale, 0, datatype), attrs=attrs)
    # Between different types there is a table.
    check("convert", q8(X, 1.0), q8(OUT, 1e-6, 0, "quint8"))


def test_slope_of_a_quantized_leaky_relu():
    for slope in (-127.0, 128.0, 1 / 256, -1 / 256):
        check("leaky_relu", q8(X), q8(OUT), attrs={"negative_slope": slope})
    for slope in (0.0, 1 / 300, 129.0, -128.0):
        assert "negative_slope" in refusal("leaky_relu", q8(X), q8(OUT), attrs={"negative_slope": slope})
    check("leaky_relu", value(X, "fp32"), value(OUT, "fp32"), attrs={"negative_slope": 0.0})
    assert "finite" in refusal("leaky_relu", value(X, "fp32"), value(OUT, "fp32"), attrs={"negative_slope": INF})
    assert "finite" in refusal("elu", value(X, "fp32"), value(OUT, "fp32"), attrs={"alpha": float("nan")})


# ---- filters and biases


@pytest.mark.parametrize("types", OPS["fully_connected"].datatypes, ids="/".join)
def test_fully_connected_takes_every_combination_it_lists(types):
    check("fully_connected", *fully_connected(*types))


@pytest.mark.parametrize("types, part", [
    (("fp32", "fp16", "fp32", "fp32"), "filter fp16"),
    (("fp16", "fp16", "fp32", "fp16"), "bias fp32"),
    (("bf16", "bf16", "fp32", "bf16"), "bf16 (input1 bf16, filter bf16, bias fp32, output bf16) needs a newer engine"),
    (("qint8", "qcint8", "qint32", "qint8"), "it needs qint8/qint8/qint32/qint8 or qint8/qcint8/qcint32/qint8"),
    (("qint8", "qint8", "fp32", "qint8"), "bias fp32"),
])
def test_other_combinations_of_a_layer_are_named(types, part):
    assert part in refusal("fully_connected", *fully_connected(*types))


def test_the_bias_scale_is_input_times_filter():
    ins, outs = fully_connected("qint8", "qint8", "qint32", "qint8")
    check("fully_connected", ins, outs)
    ins[2] = value(BIAS, "qint32", (4,), PerTensor(7.0, 0), constant=True)
    text = refusal("fully_connected", ins, outs)
    assert "bias (value 3) has scale 7, need input scale * filter scale = 0.25" in text
    ins[2] = value(BIAS, "qint32", (4,), PerTensor(0.25 * (1 + 2e-7), 0), constant=True)
    check("fully_connected", ins, outs)


def test_the_bias_scale_of_each_channel_is_checked():
    ins, outs = fully_connected("qint8", "qcint8", "qcint32", "qint8")
    ins[1] = per_channel(FILTER, [0.25, 0.5, 0.25, 0.25])
    ins[2] = per_channel(BIAS, [0.125, 0.25, 0.125, 0.125], "qcint32", shape=(4,))
    check("fully_connected", ins, outs)
    ins[2] = per_channel(BIAS, [0.125, 0.25, 0.126, 0.125], "qcint32", shape=(4,))
    assert "bias (value 3) has scale 0.126 for output channel 2, need" in refusal("fully_connected", ins, outs)
    ins[2] = per_channel(BIAS, [0.125, 0.25, float("nan"), 0.125], "qcint32", shape=(4,))
    assert "for output channel 2" in refusal("fully_connected", ins, outs)


def test_requantization_stays_in_its_range():
    ins, outs = fully_connected("qint8", "qcint8", "-", "qint8")
    for bad in (256.0, 2.0**-33):
        ins[1] = per_channel(FILTER, [1.0, bad, 1.0, 1.0])
        assert "input scale * filter scale of output channel 1 / output scale" in refusal(
            "fully_connected", ins, outs)
    ins[1] = per_channel(FILTER, [1.0, 255.0, 2.0**-32, 1.0])
    check("fully_connected", ins, outs)
    ins, outs = fully_connected("quint8", "quint8", "-", "quint8")
    ins[1] = value(FILTER, "quint8", (4, 64), PerTensor(256.0, 7), constant=True)
    assert "need 2**-32 to below 2**8" in refusal("fully_connected", ins, outs)


def test_a_zero_point_on_an_int8_filter_is_refused():
    ins, outs = fully_connected("qint8", "qint8", "-", "qint8")
    ins[1] = value(FILTER, "qint8", (4, 64), PerTensor(0.5, 1), constant=True)
    assert "filter (value 2) has zero point 1, need 0" in refusal("fully_connected", ins, outs)


def test_the_channel_axis_follows_the_transpose_flag():
    ins, outs = fully_connected("qdint8", "qcint8", "-", "fp32")
    assert "axis 0, need axis 1" in refusal("fully_connected", ins, outs, flags=1)
    ins[1] = per_channel(FILTER, [1.0] * 4, axis=1, shape=(64, 4))
    check("fully_connected", ins, outs, flags=1)
    assert "need axis 0" in refusal("fully_connected", ins, outs)


def test_the_bias_has_its_scales_along_axis_0():
    ins, outs = fully_connected("qint8", "qcint8", "qcint32", "qint8")
    ins[2] = value(BIAS, "qcint32", (1, 4), PerChannel(np.full(4, 0.125, np.float32), 1), constant=True)
    assert "bias (value 3) has one scale per index of axis 1, need axis 0" in refusal("fully_connected", ins, outs)


@pytest.mark.parametrize("datatype", ["qcint4", "qbint4"])
def test_rules_of_4_bit_filters(datatype):
    ins, outs = fully_connected("qdint8", datatype, "-", "fp32")
    check("fully_connected", ins, outs)
    odd = PerChannel(np.ones(4, np.float32), 0) if datatype == "qcint4" else PerBlock(np.ones(4, np.uint16), 0, 32)
    ins[1] = value(FILTER, datatype, (4, 33), odd, constant=True)
    assert "33 input channels" in refusal("fully_connected", ins, outs)
    axis1 = PerChannel(np.ones(4, np.float32), 1) if datatype == "qcint4" else PerBlock(np.ones(8, np.uint16), 1, 32)
    ins[1] = value(FILTER, datatype, (64, 4), axis1, constant=True)
    assert "transposed filter" in refusal("fully_connected", ins, outs, flags=1)


@pytest.mark.parametrize("block, part", [(0, "multiple of 32"), (16, "multiple of 32"), (48, "multiple of 32"),
                                         (96, "group size 96"), (32, ""), (64, "")])
def test_group_sizes(block, part):
    ins, outs = fully_connected("qdint8", "qbint4", "-", "fp32")
    ins[1] = value(FILTER, "qbint4", (4, 64), PerBlock(np.ones(8, np.uint16), 0, block), constant=True)
    if part:
        assert part in refusal("fully_connected", ins, outs)
    else:
        check("fully_connected", ins, outs)


def test_only_fp32_takes_operands_that_are_computed():
    for constant in ((), (FILTER,), (BIAS,)):
        check("fully_connected", *fully_connected("fp32", "fp32", "fp32", "fp32", constant=constant))
    for types in (("fp16", "fp16", "fp16", "fp16"), ("fp16", "fp32", "fp32", "fp16"),
                  ("qdint8", "qcint8", "fp32", "fp32"), ("qint8", "qint8", "-", "qint8")):
        assert "filter (value 2) needs to be constant" in refusal(
            "fully_connected", *fully_connected(*types, constant=(BIAS,)))
    assert "bias (value 3) needs to be constant" in refusal(
        "fully_connected", *fully_connected("qdint8", "qcint8", "fp32", "fp32", constant=(FILTER,)))


@pytest.mark.parametrize("name, rank, rows", [("fully_connected", 2, 1), ("conv2d", 4, 3), ("conv_transpose2d", 4, 3)])
def test_rows_of_dynamic_quantization(name, rank, rows):
    dims = (4, 1, 1, 64)[:1] + (1,) * (rank - 2) + (64,)
    for found in (1, 2, 3):
        x = value(X, "qdint8", (2, 5, 5, 64)[-rank:], PerToken(found))
        ins = [x, per_channel(FILTER, [1.0] * 4, shape=dims), None]
        out = value(OUT, "fp32", (2, 4))
        if found == rows:
            check(name, ins, out)
        else:
            assert f"quantized over its last {found} axes, {name} needs {rows}" in refusal(name, ins, out)


def test_an_xn00_input_counts_as_dynamically_quantized():
    x = value(X, "fp32", (2, 64), dq="qint8")
    assert operand_type(x) == "qdint8" and operand_type(None) == "-"
    check("fully_connected", [x, per_channel(FILTER, [1.0] * 4), None], value(OUT, "fp32", (2, 4)))
    assert "input1 qdint8" in refusal(
        "fully_connected", [x, value(FILTER, "fp32", constant=True), None], value(OUT, "fp32", (2, 4)))
    image = value(X, "fp32", (1, 5, 5, 64), dq="qint8")
    assert "needs 3" in refusal(
        "conv2d", [image, per_channel(FILTER, [1.0] * 4, shape=(4, 1, 1, 64)), None], value(OUT, "fp32", (1, 5, 5, 4)))


def test_rows_of_a_convert_to_dynamic_quantization():
    for rows, good in ((0, False), (1, True), (2, True), (3, False)):
        ins, outs = value(X, "fp32"), value(OUT, "qdint8", (4, 64), PerToken(rows))
        if good:
            check("convert", ins, outs)
        else:
            assert f"last {rows} axes, need 1 to its rank 2" in refusal("convert", ins, outs)
    assert "bf16" in refusal("convert", value(X, "bf16"), value(OUT, "qdint8"))


@pytest.mark.parametrize("name", ["conv2d", "depthwise_conv2d", "conv_transpose2d"])
def test_convolutions_want_fp32_filters_and_constants(name):
    x, out = value(X, "fp16", (1, 5, 5, 4)), value(OUT, "fp16", (1, 5, 5, 4))
    weights = value(FILTER, "fp32", (4, 1, 1, 4), constant=True)
    check(name, [x, weights, None], out)
    assert "needs an fp32 filter and bias" in refusal(
        name, [x, value(FILTER, "fp16", (4, 1, 1, 4), constant=True), None], out)
    assert "filter (value 2) needs to be constant" in refusal(name, [x, value(FILTER, "fp32", (4, 1, 1, 4)), None], out)
    assert "bias (value 3) needs to be constant" in refusal(
        name, [x, weights, value(BIAS, "fp32", (4,))], out)
    assert "newer engine than XNNPACK 4ea82e5" in refusal(
        name, [value(X, "bf16", (1, 5, 5, 4)), weights, None], value(OUT, "bf16", (1, 5, 5, 4)))


def test_the_channel_axis_of_convolutions():
    x, out = q8(X), q8(OUT)
    for name, good, bad in (("conv2d", 0, 3), ("conv_transpose2d", 0, 3), ("depthwise_conv2d", 3, 0)):
        check(name, [x, per_channel(FILTER, [1.0] * 4, axis=good, shape=(4, 1, 1, 4)), None], out)
        assert f"axis {bad}, need axis {good}" in refusal(
            name, [x, per_channel(FILTER, [1.0] * 4, axis=bad, shape=(4, 1, 1, 4)), None], out)


def test_rules_of_batch_matrix_multiply_with_int8():
    x, out = value(X, "qdint8", (2, 3, 4)), value(OUT, "fp32", (2, 3, 5))
    good = per_channel(2, [1.0] * 5, axis=1, shape=(4, 5))
    check("batch_matrix_multiply", [x, good], out)
    check("batch_matrix_multiply", [x, per_channel(2, [1.0] * 5, axis=0, shape=(5, 4))], out, flags=1)
    assert "axis 0, need axis 1" in refusal(
        "batch_matrix_multiply", [x, per_channel(2, [1.0] * 4, axis=0, shape=(4, 5))], out)
    check("batch_matrix_multiply", [x, per_channel(2, [1.0] * 5, axis=2, shape=(2, 4, 5))], out)
    assert "axis 1, need axis 2" in refusal(
        "batch_matrix_multiply", [x, per_channel(2, [1.0] * 4, axis=1, shape=(2, 4, 5))], out)
    loose = Value(2, "qcint8", (4, 5), quantization=good.quantization)
    assert "input2 (value 2) needs to be constant" in refusal("batch_matrix_multiply", [x, loose], out)
    assert "bf16" in refusal("batch_matrix_multiply", [value(1, "bf16"), value(2, "bf16")], value(OUT, "bf16"))


# ---- datatypes in general


@pytest.mark.parametrize("name", ["static_transpose", "concatenate2"])
@pytest.mark.parametrize("datatype", ["int32", "bf16", "qint32"])
def test_types_whose_width_would_be_lost_are_not_moved(name, datatype):
    ins = [value(number, datatype) for number, _ in enumerate(OPS[name].inputs, 1)]
    attrs = {"perm": (1, 0)} if name == "static_transpose" else {"axis": 0}
    text = refusal(name, ins, value(OUT, datatype), attrs=attrs)
    assert datatype in text and "it needs fp32/" in text
    check("static_reshape", value(X, datatype), value(OUT, datatype), attrs={"new_shape": (0, 8)})


def test_operands_need_one_type():
    assert "add has input1 fp32, input2 fp16, output fp32; it needs fp32/fp32/fp32" in refusal(
        "add", [value(1, "fp32"), value(2, "fp16")], value(OUT, "fp32"))
    assert "average_pooling2d has input qint8" in refusal("average_pooling2d", q8(X), q8(OUT))
    assert "sigmoid has input int32" in refusal("sigmoid", value(X, "int32"), value(OUT, "int32"))
    assert "divide has input1 int32" in refusal("divide", [value(1, "int32"), value(2, "int32")], value(OUT, "int32"))


def test_a_required_input_may_not_be_absent():
    ins, outs = fully_connected("fp32", "fp32", "-", "fp32")
    assert "filter_id is absent" in refusal("fully_connected", [ins[0], None, None], outs)
    assert "has 1 inputs and 1 outputs, need 2 and 1" in refusal("add", [value(1, "fp32")], value(OUT, "fp32"))


@pytest.mark.parametrize("name, good, bad", [
    ("fully_connected", (0, 1, 4, 5), (2, 8)), ("conv2d", (0, 4, 0x20, 0x24), (1, 8, 0x40)),
    ("depthwise_conv2d", (0, 4, 0x20), (1,)), ("conv_transpose2d", (0,), (4, 0x20)),
    ("batch_matrix_multiply", (0, 1), (4,)), ("average_pooling2d", (0, 4, 0x40), (1, 8)),
    ("max_pooling2d", (0, 4, 0x40), (1,)),
    ("argmax_pooling2d", (0, 4), (0x40,)), ("global_average_pooling2d", (0, 0x40), (4,)),
    ("static_resize_bilinear2d", (0, 4, 8, 0x20), (1, 0x40)),
    ("add", (0,), (1,)), ("convert", (0,), (0x80, 0x100)), ("softmax", (0,), (4,)), ("static_slice", (0,), (1,)),
])
def test_flags(name, good, bad):
    op = OPS[name]
    for flags in good:
        assert not flags & ~op.flags
    types = op.datatypes[0]
    ins = [value(i, t, (4, 64), constant=bool(i)) for i, t in enumerate(types[:len(op.inputs)])]
    outs = [value(90 + i, t) for i, t in enumerate(types[len(op.inputs):])]
    for flags in bad:
        assert f"flags are {flags:#x}, {name} takes" in refusal(name, ins, outs, flags=flags)


# ---- limits


@pytest.mark.parametrize("clamp, good", [
    (None, True), ((0.0, 6.0), True), ((-INF, INF), True), ((0.0, 0.0), True), ((1.0, 0.0), False),
    ((float("nan"), 1.0), False), ((0.0, float("nan")), False),
])
@pytest.mark.parametrize("name", ["clamp", "sigmoid", "floor"])
def test_limits_are_an_interval(name, clamp, good):
    if good:
        check(name, value(X, "fp32"), value(OUT, "fp32"), clamp=clamp)
    else:
        assert "need output_min <= output_max and no NaN" in refusal(
            name, value(X, "fp32"), value(OUT, "fp32"), clamp=clamp)


def test_limits_of_int32_are_int32():
    ins, out = value(X, "int32"), value(OUT, "int32")
    check("clamp", ins, out, clamp=(-5.0, 100.0))
    check("negate", ins, out)
    for clamp in (None, (0.0, INF), (-INF, 0.0), (0.0, 2.0**31), (0.0, 1e300)):
        assert "an int32 needs both" in refusal("clamp", ins, out, clamp=clamp)


def test_limits_that_fp16_can_not_tell_apart():
    ins, outs = fully_connected("fp16", "fp16", "-", "fp16")
    check("fully_connected", ins, outs, clamp=(0.0, 6.0))
    check("fully_connected", ins, outs, clamp=(0.0, INF))
    check("fully_connected", ins, outs, clamp=(-1e6, 1e6))
    assert "the same number in fp16" in refusal("fully_connected", ins, outs, clamp=(1.0, 1.0001))
    x, out = value(X, "fp16", (1, 4, 4, 2)), value(OUT, "fp16", (1, 2, 2, 2))
    assert "the same number in fp16" in refusal("average_pooling2d", x, out, clamp=(0.0, 1e-9))


@pytest.mark.parametrize("name, field, good, bad", [
    ("conv2d", "adjustment_height", (0,), (1,)), ("average_pooling2d", "dilation_width", (0, 1), (2,))])
def test_fields_without_a_use_are_not_dropped_silently(name, field, good, bad):
    op = OPS[name]
    ins = [value(i, t, (4, 1, 1, 4), constant=bool(i)) for i, t in enumerate(op.datatypes[0][:len(op.inputs)])]
    for number in good:
        check(name, ins, value(OUT, "fp32"), attrs={field: number})
    for number in bad:
        assert f"{field} is {number}, {name} has no use for it" in refusal(
            name, ins, value(OUT, "fp32"), attrs={field: number})


# ---- normalize and packed


def test_keep_dims_follows_the_declared_rank():
    node = Node(OPS["global_average_pooling2d"], (X,), (OUT,))
    assert normalize(node, [(1, 2, 3, 4)], [(1, 1, 1, 4)]).flags == 0x40
    assert normalize(node, [(1, 2, 3, 4)], [(1, 4)]) is node
    kept = node.replace(flags=0x40)
    assert normalize(kept, [(1, 2, 3, 4)], [(1, 1, 1, 4)]) is kept
    with pytest.raises(Refusal, match="rank 4, or 2, found rank 3"):
        normalize(node, [(1, 2, 3, 4)], [(1, 1, 4)])


def test_a_slice_size_of_0_becomes_the_rest_of_the_dimension():
    node = Node(OPS["static_slice"], (X,), (OUT,), {"offsets": (0, 2, 0), "sizes": (0, 0, 3)})
    assert normalize(node, [(4, 5, 6)], [(4, 3, 3)]).attrs["sizes"] == (0, 3, 3)
    plain = node.replace(attrs={"offsets": (0, 2, 0), "sizes": (4, 3, 3)})
    assert normalize(plain, [(4, 5, 6)], [(4, 3, 3)]) is plain


def test_other_operators_need_no_normalizing():
    node = Node(OPS["add"], (1, 2), (OUT,))
    assert normalize(node, [(1,), (1,)], [(1,)]) is node


def test_which_constants_are_packed():
    def positions(name, ins):
        return packed(Node(OPS[name], [each and each.id for each in ins], (OUT,)), ins)

    ins, _ = fully_connected("fp32", "fp32", "fp32", "fp32")
    assert positions("fully_connected", ins) == (1, 2)
    assert positions("fully_connected", [*ins[:2], None]) == (1,)
    for constant in ((FILTER,), (BIAS,), ()):
        ins, _ = fully_connected("fp32", "fp32", "fp32", "fp32", constant=constant)
        assert positions("fully_connected", ins) == ()
    assert positions("batch_matrix_multiply", [value(1, "fp32"), value(2, "fp32", constant=True)]) == (1,)
    assert positions("batch_matrix_multiply", [value(1, "fp16"), value(2, "fp16", constant=True)]) == ()
    assert positions("prelu", [value(1, "fp32"), value(2, "fp32", constant=True)]) == ()


def test_rows_are_pickled_by_name():
    op = OPS["conv2d"]
    assert pickle.loads(pickle.dumps(op)) is op and copy.deepcopy(op) is op
    assert repr(op) == "Op(conv2d)"
