"""From bytes to a Graph: ids, order, flags, ranks, quantization, constants; and what validation refuses."""

from __future__ import annotations

import math
import time

import files
import numpy as np
import pytest
from op_graphs import CASES, built

from xnnfast import validate as validation
from xnnfast._graph import Constant, Graph, Node, Value
from xnnfast.caps import Limits
from xnnfast.errors import FormatError, GraphError, LimitError, ShapeError, XnnfastError
from xnnfast.load import load
from xnnfast.ops import OPS
from xnnfast.quantization import PerBlock, PerChannel, PerTensor, PerToken
from xnnfast.writer import Parts, to_bytes


def xnn(**changes):
    return files.bare(files.tree(**changes))


def refused(match, kind=GraphError, **changes):
    with pytest.raises(kind, match=match) as caught:
        load(xnn(**changes))
    return caught.value


def with_value(index, table, **changes):
    """The addition with one value replaced."""
    tables = [files.plain(0, external=0, flags=1), files.plain(1, constant=1), files.plain(2, external=1, flags=2)]
    tables[index] = table
    return {"xvalues": files.values(*tables), **changes}


# ---- what is read


def test_addition_is_read():
    graph = load(xnn())
    assert (graph.dialect, graph.container, graph.version) == ("xn00", "bare", "0")
    assert [value.id for value in graph.inputs] == [0] and [value.id for value in graph.outputs] == [2]
    x, c, y = graph.values
    assert (x.datatype, x.shape, x.external_id, x.is_input, x.is_output, x.constant) == (
        "fp32",
        (1, 8),
        0,
        True,
        False,
        None,
    )
    assert (c.external_id, c.is_external) == (None, False) and c.array().tolist() == [files.ONES.tolist()]
    assert (y.external_id, y.is_output) == (1, True)
    (node,) = graph.nodes
    assert (node.op.name, node.inputs, node.outputs, node.debug_handle, node.index, node.flags) == (
        "add",
        (0, 1),
        (2,),
        7,
        0,
        0,
    )
    assert node.clamp is None and dict(node.attrs) == {}
    assert graph.producers == {2: node}
    assert graph.mem_buffer_sizes == (0, 32)
    assert all(value.offset > 0 for value in graph.values) and node.offset > 0


@pytest.mark.parametrize(
    ("fields", "clamp"),
    [
        ({"output_min": -1.0, "output_max": 6.0}, (-1.0, 6.0)),
        # A field left out is 0, not infinity.
        ({"output_max": 6.0}, (0.0, 6.0)),
        ({"output_min": -math.inf, "output_max": math.inf}, (-math.inf, math.inf)),
        ({}, (0.0, 0.0)),
    ],
)
def test_limits(fields, clamp):
    assert load(xnn(xnodes=[files.add(0, 1, 2, clamp=fields)])).nodes[0].clamp == clamp


@pytest.mark.parametrize(("low", "high"), [(1.0, 0.0), (math.nan, 1.0), (0.0, math.nan)])
def test_limits_that_are_no_interval(low, high):
    refused("output_min", xnodes=[files.add(0, 1, 2, clamp={"output_min": low, "output_max": high})])


@pytest.mark.parametrize("name", [name for name in CASES if OPS[name].kind])
@pytest.mark.parametrize("dialect", ["xn00", "xn01"])
def test_every_operator_is_read_as_written(name, dialect):
    parts = built(name).parts()
    graph = load(to_bytes(parts, dialect=dialect))
    assert len(graph.nodes) == len(parts.nodes)
    for found, meant in zip(graph.nodes, parts.nodes):
        assert found.op is meant.op
        assert (found.inputs, found.outputs, found.flags, found.debug_handle) == (
            meant.inputs,
            meant.outputs,
            meant.flags,
            meant.debug_handle,
        )
        for attr in meant.op.attrs:
            assert found.attrs[attr] == pytest.approx(meant.attrs[attr]), attr
        assert found.clamp == meant.clamp
    for found, meant in zip(graph.values, parts.values):
        assert (found.id, found.datatype, found.shape, found.is_input, found.is_output) == (
            meant.id,
            meant.datatype,
            meant.shape,
            meant.is_input,
            meant.is_output,
        )
        if meant.constant is not None:
            assert bytes(found.constant.data) == bytes(meant.constant.data)


def test_absent_ids_are_zero():
    # Not "none": that is stored as 0xffffffff.
    node = files.node("XNNAdd", input2_id=1, output_id=2)
    assert load(xnn(xnodes=[node])).nodes[0].inputs == (0, 1)


def test_optional_and_required_ids():
    weights = np.ones((4, 8), np.float32)
    changes = {
        "xvalues": files.values(
            files.plain(0, external=0, flags=1),
            files.plain(1, constant=1, dims=(4, 8)),
            files.plain(2, external=1, flags=2, dims=(1, 4)),
        ),
        "constant_buffer": [{}, {"storage": weights.tobytes()}],
    }

    def layer(**ids):
        return [
            files.node(
                "XNNFullyConnected", **{"input1_id": 0, "filter_id": 1, "bias_id": files.NONE, "output_id": 2, **ids}
            )
        ]

    assert load(xnn(xnodes=layer(), **changes)).nodes[0].inputs == (0, 1, None)
    refused(r"node 0 \(fully_connected\): filter_id is absent", xnodes=layer(filter_id=files.NONE), **changes)
    refused("output_id is absent", xnodes=layer(output_id=files.NONE), **changes)


def test_num_dims_of_nodes():
    changes = {
        "xvalues": files.values(files.plain(0, external=0, flags=1), files.plain(2, external=1, flags=2, dims=(2, 4)))
    }

    def reshape(count, shape):
        return {
            "xnodes": [files.node("XNNStaticReshape", num_dims=count, new_shape=shape, input_id=0, output_id=2)],
            **changes,
        }

    assert load(xnn(**reshape(2, [2, 4]))).nodes[0].attrs["new_shape"] == (2, 4)
    for count in (0, 1, 3, 0xFFFFFFFF):
        refused(f"need new_shape of num_dims = {count} entries, found 2", FormatError, **reshape(count, [2, 4]))
    refused("need new_shape of num_dims = 2 entries, found 0", FormatError, **reshape(2, None))
    refused("at most 6 entries in new_shape, found 7", FormatError, **reshape(7, [1] * 7))


def test_size_zero_of_a_slice_is_the_rest():
    changes = {
        "xvalues": files.values(files.plain(0, external=0, flags=1), files.plain(2, external=1, flags=2, dims=(1, 5)))
    }
    node = files.node("XNNStaticSlice", num_dims=2, offsets=[0, 3], sizes=[1, 0], input_id=0, output_id=2)
    assert load(xnn(xnodes=[node], **changes)).nodes[0].attrs["sizes"] == (1, 5)


# ---- values


@pytest.mark.parametrize(("count", "dims"), [(4, (1, 8)), (2, None), (0, (1, 8)), (1, ()), (0xFFFFFFFF, (1,))])
def test_num_dims_equals_dims(count, dims):
    table = files.plain(0, external=0, flags=1)
    table["num_dims"] = count
    table["dims"] = dims
    error = refused("need num_dims equal to the length of dims", FormatError, **with_value(0, table))
    assert error.path == "XNNGraph.xvalues[0].num_dims"


def test_rank_zero():
    table = files.plain(1, constant=1, dims=())
    for dims in ((), None):
        table["dims"] = dims
        assert load(xnn(**with_value(1, table))).values[1].shape == ()


def test_rank_limit():
    for rank, fine in ((6, True), (7, False)):
        dims = (1,) * (rank - 1) + (8,)
        changes = {
            "xvalues": files.values(
                files.plain(0, external=0, flags=1, dims=dims),
                files.plain(1, constant=1, dims=dims),
                files.plain(2, external=1, flags=2, dims=dims),
            )
        }
        if fine:
            assert load(xnn(**changes)).values[0].shape == dims
        else:
            refused("rank 7, limit 6", **changes)


def test_products_that_wrap_are_refused():
    for dims in ((2**31, 2**31), (2**16, 2**16, 2**16, 2**16), (2**32 - 1,) * 6):
        changes = {
            "xvalues": files.values(
                files.plain(0, external=0, flags=1, dims=dims), files.plain(2, external=1, flags=2, dims=dims)
            ),
            "xnodes": [files.node("XNNAbs", input_id=0, output_id=2)],
        }
        refused("value 0", **changes)


def test_absent_external_id_is_id_zero():
    table = files.plain(1, constant=1)
    del table["external_id"]
    refused("value 1 has external id 0 but neither flag 1", **with_value(1, table))


@pytest.mark.parametrize(
    ("index", "table", "match"),
    [
        (0, files.plain(0, external=0, flags=5), "flags 0x5"),
        (0, files.plain(0, external=0, flags=0x80000001), "flags 0x80000001"),
        (0, files.plain(0, flags=1), "flags 0x1 but no external id"),
        (0, files.plain(0, external=0), "external id 0 but neither flag"),
        (0, files.plain(0, external=2, flags=1), "external id 2, need one below num_externs = 2"),
        (0, files.plain(0, external=1, flags=1), "both have external id 1"),
        (0, files.plain(files.NONE, external=0, flags=1), "need an id_out below 0xffffffff"),
        (0, files.plain(1, external=0, flags=1), "two values have the id 1"),
        (1, files.plain(1, external=1, flags=2, constant=1), "both have external id 1"),
        (2, files.plain(2, external=1, flags=2, constant=1), "a constant can't be an external output"),
        (0, files.plain(0, external=0, flags=1, constant=1), "a constant can't be an external input"),
    ],
)
def test_flags_and_ids(index, table, match):
    refused(match, **with_value(index, table))


@pytest.mark.parametrize("count", [0, 1, 3, 4096])
def test_num_externs_is_the_number_of_externals(count):
    with pytest.raises(XnnfastError, match="num_externs"):
        load(xnn(num_externs=count))


def test_num_externs_is_capped():
    start = time.perf_counter()
    with pytest.raises(LimitError, match="num_externs is 4000000000, above the cap of 4096"):
        load(xnn(num_externs=4_000_000_000))
    assert time.perf_counter() - start < 1
    with pytest.raises(LimitError, match="above the cap of 1"):
        load(xnn(), limits=Limits(max_externs=1))


@pytest.mark.parametrize("name", ["xnodes", "xvalues"])
def test_vectors_that_must_be_there(name):
    error = refused(f"need {name}, found none", FormatError, **{name: None})
    assert error.path == f"XNNGraph.{name}"


def test_union_absent():
    refused("need an operator, found none", FormatError, xnodes=[{"debug_handle": 3}])
    refused("need a value, found none", FormatError, xvalues=[{}])


def test_workspace_cap():
    dims = (1 << 19, 1 << 17)
    changes = {
        "xvalues": files.values(
            files.plain(0, external=0, flags=1, dims=dims), files.plain(2, external=1, flags=2, dims=dims)
        ),
        "xnodes": [files.node("XNNAbs", input_id=0, output_id=2)],
    }
    refused(
        "549755813888 bytes by their declared shapes, above the cap of 68719476736; max_workspace",
        LimitError,
        **changes,
    )
    assert len(load(xnn(**changes), limits=Limits(max_workspace=1 << 40)).nodes) == 1


def test_empty_values_are_noted():
    changes = {
        "xvalues": files.values(
            files.plain(0, external=0, flags=1, dims=(0, 8)), files.plain(2, external=1, flags=2, dims=(0, 8))
        ),
        "xnodes": [files.node("XNNAbs", input_id=0, output_id=2)],
    }
    assert load(xnn(**changes)).notes == (
        "value 0 is declared 0x8, without any element",
        "value 2 is declared 0x8, without any element",
    )


# ---- order of inputs and outputs


def two_in_two_out(**more):
    """a (id 5, external 2), b (id 6, external 0) -> a + b (id 7, external 3), b + a (id 8, external 1)."""
    return {
        "xvalues": [
            files.plain(5, external=2, flags=1),
            files.plain(6, external=0, flags=1),
            files.plain(7, external=3, flags=2),
            files.plain(8, external=1, flags=2),
        ],
        "xnodes": [files.add(5, 6, 7), files.add(6, 5, 8)],
        "num_externs": 4,
        "input_ids": [5, 6],
        "output_ids": [7, 8],
        "constant_buffer": [{}],
        "mem_buffer_sizes": [0],
        **more,
    }


def test_order_by_external_id():
    changes = two_in_two_out()
    graph = load(xnn(**changes | {"xvalues": files.values(*changes["xvalues"])}))
    assert [value.id for value in graph.inputs] == [6, 5]
    assert [value.id for value in graph.outputs] == [8, 7]


def seed(**changes):
    if "xvalues" in changes:
        changes["xvalues"] = files.values(*changes["xvalues"])
    return files.seed(files.seed_tree(**changes))


def test_order_of_the_seed_is_that_of_its_lists():
    graph = load(seed(**two_in_two_out()))
    assert [value.id for value in graph.inputs] == [5, 6]
    assert [value.id for value in graph.outputs] == [7, 8]
    other = load(seed(**two_in_two_out(input_ids=[6, 5], output_ids=[8, 7])))
    assert [value.id for value in other.inputs] == [6, 5]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"input_ids": [5]}, r"input_ids is \[5\], the values with that flag are \[5, 6\]"),
        ({"input_ids": [5, 6, 7]}, "input_ids"),
        ({"input_ids": [5, 5]}, "input_ids"),
        ({"input_ids": [5, 9]}, "input_ids"),
        ({"input_ids": None}, "input_ids"),
        ({"output_ids": [7]}, "output_ids"),
        ({"output_ids": [7, 8, 8]}, "output_ids"),
    ],
)
def test_lists_and_flags_of_the_seed_must_agree(changes, match):
    with pytest.raises(GraphError, match=match):
        load(seed(**two_in_two_out(**changes)))


def test_pass_through():
    x = files.plain(0, external=0, flags=3)
    for data in (
        xnn(xvalues=files.values(x), xnodes=[], num_externs=1),
        seed(xvalues=[x], xnodes=[], num_externs=1, input_ids=[0], output_ids=[0]),
    ):
        graph = load(data)
        assert graph.inputs == graph.outputs == (graph.values[0],)


@pytest.mark.parametrize(
    ("sizes", "match"),
    [
        ([0], "need as many entries as constant_buffer has, 2, found 1"),
        ([0, 31], "need 32, the bytes of constant_buffer.1., found 31"),
        ([1, 32], "need 0, the bytes of constant_buffer.0., found 1"),
    ],
)
def test_buffer_sizes_of_the_seed(sizes, match):
    assert load(seed(mem_buffer_sizes=None)).mem_buffer_sizes == ()
    with pytest.raises(FormatError, match=match):
        load(seed(mem_buffer_sizes=sizes))
    # Elsewhere nobody reads the list.
    assert load(xnn(mem_buffer_sizes=sizes)).mem_buffer_sizes == tuple(sizes)


# ---- constants


@pytest.mark.parametrize("index", [2, 100, files.NONE])
def test_constant_index(index):
    error = refused(
        f"need a constant below 2, the length of constant_buffer, found {index}",
        FormatError,
        **with_value(1, files.plain(1, constant=index)),
    )
    assert error.path == "XNNGraph.xvalues[1].constant_buffer_idx"


def test_constant_too_small():
    error = refused(
        "need 32 bytes for 1x8 fp32, constant 1 has 31", FormatError, constant_buffer=[{}, {"storage": bytes(31)}]
    )
    assert error.path == "XNNGraph.xvalues[1].constant_buffer_idx" and "offset 0x" in str(error)
    refused("constant 1 has 0", FormatError, constant_buffer=[{}, {}])


def test_constant_longer_than_needed():
    graph = load(xnn(constant_buffer=[{}, {"storage": files.ONES.tobytes() + bytes(100)}]))
    assert graph.constants[0].nbytes == 132
    assert graph.values[1].array().shape == (1, 8)


def test_entry_of_constant_buffer_stands_behind_no_header():
    # The header decides where constants are, not the identifier.
    with pytest.raises(FormatError, match="need a constant below 0, the length of constant_data, found 1"):
        load(files.xh00(files.bare()))
    with pytest.raises(FormatError, match="need a constant below 0, the length of constant_buffer, found 1"):
        load(files.bare(files.headed_tree({"offset": 0, "size": 32}), identifier=b"XN01"))


@pytest.mark.parametrize(
    ("offset", "size", "match"),
    [
        (0, 31, "need 32 bytes for 1x8 fp32"),
        (17, 32, "need 32 bytes inside the 48 bytes of constant data, found them at 0x11"),
        (2**64 - 1, 32, "need 32 bytes inside"),
        (0, 2**64 - 1, "inside the 48 bytes"),
        (2**63, 2**63, "inside the 48 bytes"),
    ],
)
def test_constants_in_the_area(offset, size, match):
    assert load(files.inline()).values[1].array().tolist() == [files.ONES.tolist()]
    assert load(files.inline(bytes(16) + files.ONES.tobytes(), offset=16)).values[1].array().tolist() == [
        files.ONES.tolist()
    ]
    with pytest.raises(FormatError, match=match):
        load(files.inline(offset=offset, size=size))


def test_named_constants():
    weights = files.data_file({"weights": files.ONES.tobytes()})
    graph = load(files.named(), data=[weights])
    assert graph.constants[0].key == "weights"
    assert graph.values[1].array().tolist() == [files.ONES.tolist()]
    with pytest.raises(FormatError, match="need 31 bytes of named data 'weights', found 32"):
        load(files.named(size=31), data=[weights])
    assert len(load(files.named(size=0), data=[weights]).nodes) == 1
    with pytest.raises(FormatError, match="need 32 bytes for 1x8 fp32, constant 1 has 16"):
        load(files.named(size=0), data=[files.data_file({"weights": bytes(16)})])
    # An empty key is a key, since the field is there.
    with pytest.raises(FormatError, match="named data '' is in none of"):
        load(files.named(key=""), data=[weights])


def test_constant_is_made_once():
    tables = [
        files.plain(0, external=0, flags=1),
        files.plain(1, constant=1),
        files.plain(2, external=1, flags=2),
        files.plain(3, constant=1),
        files.plain(4),
    ]
    graph = load(xnn(xvalues=files.values(*tables), xnodes=[files.add(0, 1, 4), files.add(4, 3, 2)]))
    assert graph.values[1].constant is graph.values[3].constant
    assert len(graph.constants) == 1


# ---- quantization


def quantized(tensor, kind, **fields):
    return {"tensor_value": tensor, "quant_params": (kind, fields)}


def dense(weights, *buffers, dims=(4, 64), input_type=1, out_type=1):
    """A fully connected layer over 1x64 whose filter is the given XNNQuantizedTensorValue."""
    x = files.plain(0, external=0, flags=1, dims=(1, dims[1]), datatype=input_type)
    y = files.plain(2, external=1, flags=2, dims=(1, dims[0]), datatype=out_type)
    return xnn(
        xvalues=files.values(x, weights, y),
        xnodes=[files.node("XNNFullyConnected", input1_id=0, filter_id=1, bias_id=files.NONE, output_id=2)],
        constant_buffer=[{}, *({"storage": data} for data in buffers)],
        mem_buffer_sizes=None,
    )


FILTER8 = files.plain(1, constant=1, dims=(4, 64), datatype=6)
FILTER4 = files.plain(1, constant=1, dims=(4, 64), datatype=8)
SCALES = np.array([0.5, 0.25, 1.0, 2.0], np.float32)


def test_scales_of_channels_inline_and_as_constant():
    for fields in (
        {"scale": SCALES.tolist()},
        {"scale_buffer_idx": 2},
        {"scale_buffer_idx": 2, "num_scales": 4},
        {"scale": [9.0], "scale_buffer_idx": 2},
    ):
        weights = quantized(FILTER8, "PerChannelQuant", channel_dim=0, **fields)
        found = load(dense(weights, bytes(256), SCALES.tobytes() + bytes(9))).values[1].quantization
        assert isinstance(found, PerChannel) and found.axis == 0
        assert found.scales.dtype == np.float32 and found.scales.tolist() == SCALES.tolist()


@pytest.mark.parametrize(
    ("fields", "match", "kind"),
    [
        ({}, "need scales, inline or as a constant, found neither", FormatError),
        ({"scale": [1.0] * 3}, "need 4 scales, found 3", FormatError),
        ({"scale": [1.0] * 5}, "need 4 scales, found 5", FormatError),
        ({"scale": [1.0] * 4, "num_scales": 5}, "need num_scales 0 or 4, found 5", FormatError),
        ({"scale_buffer_idx": 3}, "need a constant below 3", FormatError),
        ({"scale_buffer_idx": 2}, "need 16 bytes for 4 scales, constant 2 has 15", FormatError),
        ({"scale": [1.0] * 4, "channel_dim": 2}, "needs channel_dim from 0 to 1, found 2", GraphError),
        ({"scale": [1.0] * 4, "channel_dim": -1}, "channel_dim from 0 to 1, found -1", GraphError),
        ({"scale": [1.0, 1.0, 0.0, 1.0]}, "finite, normal and positive scales, found 0 at index 2", GraphError),
        ({"scale": [1.0, -1.0, 1.0, 1.0]}, "found -1 at index 1", GraphError),
        ({"scale": [math.nan, 1.0, 1.0, 1.0]}, "found nan at index 0", GraphError),
        ({"scale": [1.0, 1.0, 1.0, math.inf]}, "found inf at index 3", GraphError),
        ({"scale": [1.0, 1.0, 1.0, 1e-40]}, "at index 3", GraphError),
    ],
)
def test_scales_of_channels_are_checked(fields, match, kind):
    with pytest.raises(kind, match=match):
        load(dense(quantized(FILTER8, "PerChannelQuant", **fields), bytes(256), bytes(15)))


def test_scales_of_blocks():
    bits = np.arange(0x3F80, 0x3F88, dtype=np.uint16)
    weights = quantized(
        files.plain(1, constant=1, dims=(4, 64), datatype=10),
        "PerChannelGroupQuant",
        channel_dim=0,
        group_size=32,
        scale_buffer_idx=2,
        num_scales=8,
    )
    x = files.plain(3, dims=(1, 64), datatype=9)
    token = quantized(x, "PerTokenDynamicQuant", num_nonbatch_dims=1)
    tables = [
        files.plain(0, external=0, flags=1, dims=(1, 64)),
        weights,
        files.plain(2, external=1, flags=2, dims=(1, 4)),
        token,
    ]
    nodes = [
        files.node("XNNConvert", input_id=0, output_id=3),
        files.node("XNNFullyConnected", input1_id=3, filter_id=1, bias_id=files.NONE, output_id=2),
    ]

    def data(**fields):
        tables[1] = quantized(
            files.plain(1, constant=1, dims=(4, 64), datatype=10),
            "PerChannelGroupQuant",
            **{"channel_dim": 0, "group_size": 32, "scale_buffer_idx": 2, "num_scales": 8, **fields},
        )
        return xnn(
            xvalues=files.values(*tables),
            xnodes=nodes,
            mem_buffer_sizes=None,
            constant_buffer=[{}, {"storage": bytes(128)}, {"storage": bits.tobytes()}],
        )

    graph = load(data())
    found = graph.values[1].quantization
    assert isinstance(found, PerBlock) and (found.axis, found.block_size) == (0, 32)
    assert found.scales.tolist() == bits.tolist()
    assert graph.values[3].quantization == PerToken(1)
    # Inline scales are fp32 and become bfloat16 by ExecuTorch's rule.
    inline = np.array([1.0, 1.00390625, 1.0078125, 3.0, 0.1, 2.0**-20, 1.5, 100.0], np.float32)
    found = load(data(scale=inline.tolist(), scale_buffer_idx=0)).values[1].quantization
    assert found.scales.tolist() == ((inline * np.float32(1.00389105)).view(np.uint32) >> 16).tolist()
    assert found.scales[0] == 0x3F80
    for fields, match in (
        ({"group_size": 0}, "group_size that is a multiple of 32 and divides 64, found 0"),
        ({"group_size": 16}, "found 16"),
        ({"group_size": 48}, "found 48"),
        ({"group_size": -32}, "found -32"),
        ({"group_size": 128}, "found 128"),
        ({"channel_dim": 1}, "needs rank 2 and channel_dim 0"),
        ({"num_scales": 7}, "need num_scales 0 or 8, found 7"),
        ({"scale_buffer_idx": 1, "num_scales": 0}, "need finite, normal and positive scales, found .* at index 0"),
        ({"scale_buffer_idx": 0}, "found neither"),
    ):
        with pytest.raises(XnnfastError, match=match):
            load(data(**fields))


def test_odd_rows_of_four_bits_are_refused():
    scales = {"scale": [1.0] * 4}
    assert load(dense(quantized(FILTER4, "PerChannelQuant", **scales), bytes(128))).values[1].datatype == "qcint4"
    with pytest.raises(GraphError, match="need an even last dimension for qcint4, found 63"):
        load(
            dense(
                quantized(files.plain(1, constant=1, dims=(4, 63), datatype=8), "PerChannelQuant", **scales),
                bytes(128),
                dims=(4, 63),
            )
        )
    with pytest.raises(FormatError, match="need 128 bytes for 4x64 qcint4, constant 1 has 127"):
        load(dense(quantized(FILTER4, "PerChannelQuant", **scales), bytes(127)))


@pytest.mark.parametrize(
    ("datatype", "kind", "match"),
    [
        (1, "PerTensorQuant", "of fp32 needs no parameters, found PerTensorQuant"),
        (3, "PerChannelQuant", "of qint8 needs PerTensorQuant, found PerChannelQuant"),
        (6, "PerTensorQuant", "of qcint8 needs PerChannelQuant, found PerTensorQuant"),
        (10, "PerChannelQuant", "of qbint4 needs PerChannelGroupQuant, found PerChannelQuant"),
        (9, "PerTensorQuant", "of qdint8 needs PerTokenDynamicQuant, found PerTensorQuant"),
    ],
)
def test_parameters_of_the_wrong_kind(datatype, kind, match):
    with pytest.raises(GraphError, match=match):
        load(
            dense(
                quantized(
                    files.plain(1, constant=1, dims=(4, 64), datatype=datatype),
                    kind,
                    scale=[1.0] if kind != "PerTensorQuant" else 1.0,
                ),
                bytes(1024),
            )
        )


def test_parts_of_quantized_values():
    refused("need tensor_value, found none", FormatError, xvalues=[{"xvalue_union": ("XNNQuantizedTensorValue", {})}])
    refused(
        "need quantization parameters, found none",
        FormatError,
        xvalues=[
            {
                "xvalue_union": (
                    "XNNQuantizedTensorValue",
                    {"tensor_value": files.plain(0, external=0, flags=1, datatype=3)},
                )
            }
        ],
    )


@pytest.mark.parametrize(
    ("datatype", "scale", "zero", "match"),
    [
        (3, 0.5, -128, None),
        (3, 0.5, 127, None),
        (4, 0.5, 0, None),
        (4, 0.5, 255, None),
        (3, 0.5, 128, "zero point from -128 to 127 for qint8, found 128"),
        (3, 0.5, -129, "found -129"),
        (4, 0.5, -1, "zero point from 0 to 255 for quint8, found -1"),
        (4, 0.5, 256, "found 256"),
        (3, 0.0, 0, "finite, normal and positive scale, found 0.0"),
        (3, -0.5, 0, "found -0.5"),
        (3, math.nan, 0, "found nan"),
        (3, math.inf, 0, "found inf"),
        (3, 1e-40, 0, "finite, normal and positive scale"),
    ],
)
def test_scale_and_zero_point(datatype, scale, zero, match):
    tables = [
        quantized(
            files.plain(id, external=id, flags=id + 1, datatype=datatype),
            "PerTensorQuant",
            scale=scale,
            zero_point=zero,
        )
        for id in (0, 1)
    ]
    data = xnn(xvalues=files.values(*tables), xnodes=[files.node("XNNCopy", input_id=0, output_id=1)], num_externs=2)
    if match is None:
        assert load(data).values[0].quantization == PerTensor(scale, zero)
    else:
        with pytest.raises(GraphError, match=match):
            load(data)


@pytest.mark.filterwarnings("error")
def test_scales_that_overflow_are_refused_without_a_warning():
    x = quantized(files.plain(0, external=0, flags=1, dims=(1, 64), datatype=3), "PerTensorQuant", scale=3e38)
    y = quantized(files.plain(2, external=1, flags=2, dims=(1, 4), datatype=3), "PerTensorQuant", scale=1e-37)
    weights = quantized(FILTER8, "PerChannelQuant", scale=[1e3] * 4)
    layer = files.node("XNNFullyConnected", input1_id=0, filter_id=1, bias_id=files.NONE, output_id=2)
    with pytest.raises(GraphError, match="output scale is inf"):
        load(
            xnn(
                xvalues=files.values(x, weights, y),
                xnodes=[layer],
                constant_buffer=[{}, {"storage": bytes(256)}],
                mem_buffer_sizes=None,
            )
        )


# ---- dynamically quantized inputs of XN00


def test_dq_datatype():
    weights = quantized(FILTER8, "PerChannelQuant", scale=[1.0] * 4)

    def data(number=3, identifier=b"XN00", **x):
        made = files.plain(0, **{"external": 0, "flags": 1, "dims": (1, 64), "dq_datatype": number, **x})
        return files.bare(
            files.tree(
                xvalues=files.values(made, weights, files.plain(2, external=1, flags=2, dims=(1, 4))),
                mem_buffer_sizes=None,
                xnodes=[files.node("XNNFullyConnected", input1_id=0, filter_id=1, bias_id=files.NONE, output_id=2)],
                constant_buffer=[{}, {"storage": bytes(256)}],
            ),
            identifier,
        )

    value = load(data()).values[0]
    assert (value.datatype, value.dq_datatype) == ("fp32", "qint8")
    assert load(data(0)).values[0].dq_datatype is None
    with pytest.raises(GraphError, match="dq_datatype 3, which only XN00 files may use"):
        load(data(identifier=b"XN01"))
    for number in (1, 4, 9):
        with pytest.raises(GraphError, match="need dq_datatype qint8"):
            load(data(number))
    with pytest.raises(FormatError, match="found number 77"):
        load(data(77))
    with pytest.raises(GraphError, match="dq_datatype is for external inputs of fp32 or fp16"):
        load(data(flags=3))


def test_dq_datatype_of_others():
    inner = files.plain(1, constant=1, dq_datatype=3)
    refused("dq_datatype is for external inputs", **with_value(1, inner))
    twice = quantized(files.plain(0, external=0, flags=1, datatype=3, dq_datatype=3), "PerTensorQuant", scale=1.0)
    refused("quantized and has a dq_datatype too", **with_value(0, twice))


# ---- topology


def chain(*nodes, internal=(), **more):
    """x (0) and c (1) in, y (2) out, internal values, nodes as (in, in, out)."""
    tables = [
        files.plain(0, external=0, flags=1),
        files.plain(1, constant=1),
        files.plain(2, external=1, flags=2),
        *(files.plain(id) for id in internal),
    ]
    return {
        "xvalues": files.values(*tables),
        "xnodes": [files.add(*each, handle=index + 10) for index, each in enumerate(nodes)],
        **more,
    }


def test_nodes_are_sorted_and_keep_their_index():
    graph = load(xnn(**chain((4, 1, 2), (3, 1, 4), (0, 1, 3), internal=(3, 4))))
    assert [node.index for node in graph.nodes] == [2, 1, 0]
    assert [node.debug_handle for node in graph.nodes] == [12, 11, 10]


def test_sorting_is_stable():
    graph = load(xnn(**chain((0, 1, 3), (5, 1, 4), (0, 0, 5), (3, 4, 2), internal=(3, 4, 5))))
    assert [node.index for node in graph.nodes] == [0, 2, 1, 3]
    in_order = load(xnn(**chain((0, 1, 3), (0, 0, 4), (3, 4, 2), internal=(3, 4))))
    assert [node.index for node in in_order.nodes] == [0, 1, 2]


@pytest.mark.parametrize(
    ("nodes", "internal", "match"),
    [
        (
            [(0, 1, 3), (3, 1, 3)],
            (3,),
            r"node 1 \(add, debug handle 11\): output_id is value 3, which node 0 .* writes too",
        ),
        ([(0, 1, 1)], (), "output_id is value 1, a constant, which no node may write"),
        ([(0, 1, 0)], (), "output_id is value 0, an external input, which no node may write"),
        ([(0, 9, 2)], (), "input2_id is 9, and no value has that id"),
        ([(0, 1, 9)], (), "output_id is 9, and no value has that id"),
        (
            [(0, 3, 2)],
            (3,),
            "input2_id is value 3, which is neither constant nor external input and written by no node",
        ),
        ([(2, 1, 2)], (), r"nodes in a cycle.*: node 0 \(add, debug handle 10\)"),
        (
            [(4, 1, 3), (3, 1, 4), (0, 1, 2)],
            (3, 4),
            "nodes in a cycle, each needs the one before: node [01] .*, node [01]",
        ),
        ([(0, 5, 3), (3, 1, 4), (4, 1, 5), (5, 0, 2)], (3, 4, 5), "nodes in a cycle"),
        ([(0, 1, 3)], (3,), "value 2 .*: an external output that no node writes"),
    ],
)
def test_topology(nodes, internal, match):
    refused(match, **chain(*nodes, internal=internal))


def test_cycle_names_only_its_nodes():
    error = refused("cycle", **chain((0, 1, 3), (3, 5, 4), (4, 1, 5), (5, 1, 2), internal=(3, 4, 5)))
    text = str(error)
    assert "node 1 " in text and "node 2 " in text and "node 0 " not in text and "node 3 " not in text


def test_dead_nodes_are_noted():
    graph = load(xnn(**chain((0, 1, 2), (0, 1, 3), (3, 1, 4), internal=(3, 4))))
    assert len(graph.nodes) == 3
    assert graph.notes == (
        "node 1 (add, debug handle 11) leads to no output and is left out",
        "node 2 (add, debug handle 12) leads to no output and is left out",
    )


def test_unused_input_is_noted():
    tables = [
        files.plain(0, external=0, flags=1),
        files.plain(1, constant=1),
        files.plain(2, external=1, flags=2),
        files.plain(3, external=2, flags=1),
    ]
    graph = load(xnn(xvalues=files.values(*tables), num_externs=3))
    assert graph.notes == ("input value 3 is not used",)
    assert [value.id for value in graph.inputs] == [0, 3]


def test_long_chain_is_sorted_in_linear_time():
    count = 3000
    nodes = [(id - 1 if id > 10 else 0, 1, id if id < 10 + count - 1 else 2) for id in range(10, 10 + count)]
    graph = load(xnn(**chain(*reversed(nodes), internal=range(10, 10 + count - 1))))
    assert [node.index for node in graph.nodes] == list(range(count - 1, -1, -1))


def test_declared_shape_must_be_the_inferred():
    with pytest.raises(
        ShapeError,
        match=r"node 0 \(add, debug handle 7\): output_id \(value 2\) is declared 1x7, the operator gives 1x8",
    ):
        load(xnn(**with_value(2, files.plain(2, external=1, flags=2, dims=(1, 7)))))


def test_operator_rules_are_asked():
    refused(
        r"node 0 \(add\): flags are 0x2", xnodes=[files.node("XNNAdd", input1_id=0, input2_id=1, output_id=2, flags=2)]
    )
    refused("flags", xnodes=[files.node("XNNAdd", input1_id=0, input2_id=1, output_id=2, flags=0xFFFFFFFF)])
    refused("add has", **with_value(1, files.plain(1, constant=1, datatype=2)))


def test_dynamic_quantization_may_be_declared_in_the_models_order():
    """ExecuTorch's exporter does so where a shuffle to NHWC precedes; XNNPACK goes by what it infers."""
    weights = quantized(files.plain(1, constant=1, dims=(2, 1, 1, 4), datatype=6), "PerChannelQuant", scale=[1.0, 1.0])

    def data(dims):
        tables = [
            files.plain(0, external=0, flags=1, dims=(1, 3, 5, 4)),
            weights,
            files.plain(2, external=1, flags=2, dims=(1, 3, 5, 2)),
            quantized(files.plain(3, dims=dims, datatype=9), "PerTokenDynamicQuant", num_nonbatch_dims=3),
        ]
        nodes = [
            files.node("XNNConvert", input_id=0, output_id=3),
            files.node(
                "XNNConv2d",
                kernel_height=1,
                kernel_width=1,
                subsampling_height=1,
                subsampling_width=1,
                dilation_height=1,
                dilation_width=1,
                group_input_channels=4,
                group_output_channels=2,
                groups=1,
                input1_id=3,
                filter_id=1,
                bias_id=files.NONE,
                output_id=2,
            ),
        ]
        return xnn(
            xvalues=files.values(*tables),
            xnodes=nodes,
            constant_buffer=[{}, {"storage": bytes(8)}],
            mem_buffer_sizes=None,
        )

    assert load(data((1, 3, 5, 4))).notes == ()
    graph = load(data((1, 4, 3, 5)))
    assert graph.values[3].shape == (1, 3, 5, 4)
    assert graph.notes == (
        "value 3 is declared 1x4x3x5 and taken for 1x3x5x4, the shape of what node 0 (convert) quantizes",
    )
    with pytest.raises(ShapeError, match="declared 1x4x3x6"):
        load(data((1, 4, 3, 6)))


# ---- graphs that were made, not read


def made(values, nodes, inputs, outputs, **more):
    by_id = {value.id: value for value in values}
    return Graph(values, nodes, [by_id[id] for id in inputs], [by_id[id] for id in outputs], **more)


X = Value(0, "fp32", (2, 3), external_id=0, is_input=True)
Y = Value(1, "fp32", (2, 3), external_id=1, is_output=True)
ABS = Node(OPS["abs"], (0,), (1,), index=0)


def test_made_graph():
    graph = made([X, Y], [ABS], [0], [1])
    assert graph.container == "memory" and graph.notes == () and graph.value(1) is Y


@pytest.mark.parametrize(
    ("values", "nodes", "inputs", "outputs", "match"),
    [
        ([X, Y], [Node(OPS["abs"], (0, 0), (1,), index=0)], [0], [1], "has 2 inputs and 1 outputs, need 1 and 1"),
        ([X, Y], [Node(OPS["abs"], (None,), (1,), index=0)], [0], [1], "input_id is absent"),
        ([X, Y], [ABS], [], [1], "value 0 is missing from the inputs, but is flagged as external input"),
        ([X, Y], [ABS], [0, 1], [1], "value 1 is listed among the inputs, but is not flagged"),
        ([X, Y], [ABS], [0, 0], [1], "value 0 is listed twice among the inputs"),
        ([X, Y.replace(external_id=None)], [ABS], [0], [1], "needs an external id"),
        ([X, Y.replace(external_id=0)], [ABS], [0], [1], "external id 0 already names value 0"),
        ([X.replace(datatype="fp64"), Y], [ABS], [0], [1], "need a datatype of fp32"),
        ([X.replace(shape=(1,) * 7), Y], [ABS], [0], [1], "rank 7, limit 6"),
        ([X.replace(shape=(-1, 3)), Y], [ABS], [0], [1], "need dims from 0 to"),
        ([X.replace(id=-1), Y], [ABS], [-1], [1], "need value ids from 0"),
        ([X.replace(quantization=PerTensor(1.0, 0)), Y], [ABS], [0], [1], "fp32 needs no quantization parameters"),
        (
            [X.replace(datatype="qint8"), Y],
            [ABS],
            [0],
            [1],
            "qint8 needs quantization parameters PerTensor, found none",
        ),
        (
            [X.replace(datatype="qdint8", quantization=PerToken(1)), Y],
            [ABS],
            [0],
            [1],
            "qdint8 can't be an external value",
        ),
        (
            [X, Y, Value(2, "qdint8", (2, 3), quantization=PerToken(3))],
            [ABS],
            [0],
            [1],
            "num_nonbatch_dims from 1 to 2, found 3",
        ),
        (
            [X, Y, Value(2, "qcint4", (2, 4), quantization=PerChannel(np.ones(2, np.float32), 0))],
            [ABS],
            [0],
            [1],
            "qcint4 must be constant",
        ),
        (
            [X, Y, Value(2, "fp32", (2,), constant=Constant(bytes(7)))],
            [ABS],
            [0],
            [1],
            "need 8 bytes for 2 fp32, constant 0 has 7",
        ),
        ([X, Y, Value(2, "fp32", (2,), external_id=5)], [ABS], [0], [1], "external id 5 needs flag"),
        (
            [X, Y, Value(2, "qint32", (2,), quantization=PerTensor(1.0, 1), constant=Constant(bytes(8)))],
            [ABS],
            [0],
            [1],
            "zero point from 0 to 0 for qint32",
        ),
    ],
)
def test_made_graphs_are_validated(values, nodes, inputs, outputs, match):
    with pytest.raises(GraphError, match=match):
        made(values, nodes, inputs, outputs)


@pytest.mark.parametrize("name", [name for name in CASES if OPS[name].kind])
def test_quick_checks_agree_with_the_slow_ones(name, monkeypatch):
    """What is screened in C passes the rules in Python, with the same order and notes."""
    parts = built(name).parts()
    quick = Graph(*parts)
    monkeypatch.setattr(
        validation,
        "screen_values",
        lambda values: (0, list(values), [value for value in values if value.external_id is not None]),
    )
    monkeypatch.setattr(validation, "screen_nodes", lambda graph: False)
    original = validation.check_nodes
    monkeypatch.setattr(validation, "check_nodes", lambda *args: (original(*args)[0], False, original(*args)[2]))
    slow = Graph(*parts)
    assert [node.index for node in quick.nodes] == [node.index for node in slow.nodes]
    assert quick.notes == slow.notes


def test_parts_of_a_graph_round_trip():
    graph = load(xnn())
    again = load(to_bytes(Parts(graph.values, graph.nodes, graph.inputs, graph.outputs), dialect="seed"))
    assert again.dialect == "seed" and [value.shape for value in again.values] == [
        value.shape for value in graph.values
    ]
