"""The verifier: one smallest bad buffer per rule, next to the good one; then every cut and every word replaced."""

from __future__ import annotations

import os
import pathlib
import struct
import time

import files
import pytest

from xnnfast import _flatbuf
from xnnfast._generated import schema as _schema
from xnnfast._payload import Payload
from xnnfast.caps import Limits
from xnnfast.errors import ArgumentError, FormatError, LimitError, XnnfastError
from xnnfast.load import load, load_all
from xnnfast.writer import encode


def verify(data, key="xnn", **options):
    return _flatbuf.verify(Payload.open(data), 0, len(data), key, **options)


# ---- buffers laid out by hand, little words in a list


class Hand:
    """Bytes with a cursor; ``at`` names places so that references can be computed."""

    def __init__(self):
        self.data = bytearray()

    def put(self, form, *numbers):
        at = len(self.data)
        self.data += struct.pack("<" + form, *numbers)
        return at

    def set(self, at, form, *numbers):
        struct.pack_into("<" + form, self.data, at, *numbers)


def graph(fields=(), *, vtable=None, table_size=None):
    """An XNNGraph with raw fields: (slot, format, value). The root table is at 32, its vtable at 8."""
    hand = Hand()
    hand.put("I4s", 32, b"XN01")
    slots = max((slot for slot, _, _ in fields), default=-1) + 1
    offsets, at = [0] * slots, 4
    for slot, form, _ in fields:
        offsets[slot] = at
        at += struct.calcsize(form)
    hand.put(
        "HH" if vtable is None else vtable[0],
        *((4 + 2 * slots, at if table_size is None else table_size) if vtable is None else vtable[1:]),
    )
    for offset in offsets:
        hand.put("H", offset)
    hand.data = hand.data.ljust(32, b"\0")
    hand.put("i", 32 - 8)
    for _, form, value in fields:
        hand.put(form, value)
    return hand


def test_smallest_graph_verifies():
    root = verify(bytes(graph().data)).root
    assert root.kind == "XNNGraph"
    assert root.get("num_externs") == 0
    assert root.get("version") is None
    assert root.get("xvalues") == ()


def test_scalar_is_read():
    data = bytes(graph([(3, "I", 77)]).data)
    root = verify(data).root
    assert root.get("num_externs") == 77
    assert root.has("num_externs") and not root.has("xnodes")


def bad(data, match, path=None, key="xnn", **options):
    with pytest.raises(FormatError, match=match) as caught:
        verify(bytes(data), key, **options)
    assert caught.value.path == path
    assert caught.value.offset is not None
    return caught.value


@pytest.mark.parametrize("size", range(1, 8))
def test_short_buffer(size):
    bad(bytes(size), "need 8 bytes")


@pytest.mark.parametrize("root", [0, 2, 3, 33, 36, 1000, 0x7FFFFFFF, 0xFFFFFFFF, 0xFFFFFFFC])
def test_root_offset(root):
    data = graph().data
    struct.pack_into("<I", data, 0, root)
    bad(data, "need the root table")


def test_vtable_offset_before_the_start():
    data = graph().data
    struct.pack_into("<i", data, 32, 40)
    bad(data, "vtable offset", "XNNGraph")


def test_vtable_offset_behind_the_end():
    data = graph().data
    struct.pack_into("<i", data, 32, -4)
    bad(data, "vtable offset", "XNNGraph")


def test_vtable_offset_odd():
    data = graph().data
    struct.pack_into("<i", data, 32, 23)
    bad(data, "even vtable offset", "XNNGraph")


def test_vtable_offset_at_the_extremes():
    for number in (-(2**31), 2**31 - 1):
        data = graph().data
        struct.pack_into("<i", data, 32, number)
        bad(data, "vtable offset", "XNNGraph")


@pytest.mark.parametrize("size", [0, 2, 3, 5, 100, 0xFFFF])
def test_vtable_size(size):
    bad(graph(vtable=("HH", size, 4)).data, "vtable size", "XNNGraph")


@pytest.mark.parametrize("size", [0, 3, 5, 0xFFFF])
def test_table_size(size):
    bad(graph(table_size=size).data, "table size", "XNNGraph")


def test_field_outside_its_table():
    hand = graph([(3, "I", 1)], table_size=7)
    hand.put("I", 0)
    bad(hand.data, "inside the 7 bytes of its table, found byte 4", "XNNGraph.num_externs")


def test_field_over_the_table_offset():
    hand = graph([(3, "I", 1)])
    hand.set(8 + 4 + 6, "H", 2)
    bad(hand.data, "field from byte 4", "XNNGraph.num_externs")


def test_scalar_alignment():
    hand = graph([(3, "I", 1)], table_size=12)
    hand.set(8 + 4 + 6, "H", 6)
    hand.put("I", 0)
    bad(hand.data, "multiple of 4, found 0x26", "XNNGraph.num_externs")


def test_reference_alignment():
    hand = graph([(4, "I", 2)], table_size=8)
    hand.put("II", 0, 0)
    bad(hand.data, "multiple of 4", "XNNGraph.input_ids")


def test_reference_of_zero():
    bad(graph([(4, "I", 0)]).data, "need a reference, found 0", "XNNGraph.input_ids")


@pytest.mark.parametrize("reference", [4, 8, 0x7FFFFFFC, 0xFFFFFFFC])
def test_reference_outside(reference):
    bad(graph([(4, "I", reference)]).data, "reference into", "XNNGraph.input_ids")


def test_vector_counts():
    for count, fine in ((0, True), (1, True), (2, True), (3, False), (0x3FFFFFFF, False), (0xFFFFFFFF, False)):
        hand = graph([(4, "I", 4)])
        hand.put("III", count, 1, 2)
        if fine:
            assert verify(bytes(hand.data)).root.get("input_ids") == (1, 2)[:count]
        else:
            bad(hand.data, f"need {4 * count} bytes of elements, found 8", "XNNGraph.input_ids")


def test_vector_elements_are_aligned():
    # u64 offsets in a program: the elements, not the count, must stand at a multiple of 8.
    for shift in (0, 4):
        hand = Hand()
        hand.put("I4s", 24, b"ET12")
        hand.put("HHHHHHHH", 16, 8, 0, 0, 0, 0, 0, 4)
        hand.put("iII", 24 - 8, 4 + 16, 0)
        hand.data = hand.data.ljust(40 if not shift else 36, b"\0")
        vtable = hand.put("HHHH", 8, 12, 4, 8)
        table = hand.put("iII", 0, 0, 4)
        hand.set(table, "i", table - vtable)
        hand.set(28, "I", table - 28)
        vector = hand.put("I", 1)
        if (vector + 4) % 8 != shift:
            hand.data[vector:vector] = bytes(4)
            hand.set(table + 8, "I", 8)
            vector += 4
        hand.put("Q", 5)
        if shift:
            bad(hand.data, "multiple of 8", "Program.constant_segment.offsets", key="program")
        else:
            segment = verify(bytes(hand.data), "program").root.get("constant_segment")
            assert segment.get("offsets") == (5,)


def test_string_needs_its_zero_byte():
    hand = graph([(0, "I", 4)])
    hand.put("I4s", 3, b"abc\0")
    assert verify(bytes(hand.data)).root.get("version") == "abc"
    hand.data[-1] = 0x64
    bad(hand.data, "zero byte after the string, found 0x64", "XNNGraph.version")
    del hand.data[-1]
    bad(hand.data, "need 4 bytes of elements, found 3", "XNNGraph.version")


def test_string_must_be_utf8():
    hand = graph([(0, "I", 4)])
    hand.put("I4s", 3, b"a\xffc\0")
    root = verify(bytes(hand.data)).root
    with pytest.raises(FormatError, match="UTF-8"):
        root.get("version")


def test_null_element_of_a_vector_of_tables():
    data = bytearray(files.bare())
    values = _place(data, "xvalues")
    struct.pack_into("<I", data, values + 4 + 4 * 2, 0)
    bad(data, "need a reference, found 0", "XNNGraph.xvalues[2]")


def test_element_reference_outside():
    data = bytearray(files.bare())
    values = _place(data, "xvalues")
    struct.pack_into("<I", data, values + 4 + 4, 0xFFFFFFF0)
    bad(data, "reference into", "XNNGraph.xvalues[1]")


def _field(data, table, slot):
    """Offset of a table's field in well-formed bytes."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    return table + struct.unpack_from("<H", data, vtable + 4 + 2 * slot)[0]


def _place(data, name):
    """Offset of the vector in a field of the root."""
    slot = next(field[1] for field in _schema.TABLES["xnn"]["XNNGraph"] if field[0] == name)
    at = _field(data, struct.unpack_from("<I", data)[0], slot)
    return at + struct.unpack_from("<I", data, at)[0]


def _element(data, name, index):
    at = _place(data, name) + 4 + 4 * index
    return at + struct.unpack_from("<I", data, at)[0]


def test_union_type_without_value():
    bad(
        encode(files.tree(xnodes=[{"xnode_union_type": 1}]), identifier=b"XN01"),
        "type 1 but no value",
        "XNNGraph.xnodes[0].xnode_union",
    )


def test_union_value_without_type():
    data = bytearray(files.bare())
    struct.pack_into("<B", data, _field(data, _element(data, "xnodes", 0), 0), 0)
    bad(data, "a value but no type", "XNNGraph.xnodes[0].xnode_union")


@pytest.mark.parametrize("number", [48, 100, 255])
def test_union_member_unknown(number):
    data = bytearray(files.bare())
    struct.pack_into("<B", data, _field(data, _element(data, "xnodes", 0), 0), number)
    bad(
        data,
        f"unsupported: union XNodeUnion has no member {number}, known are 1 to 47",
        "XNNGraph.xnodes[0].xnode_union",
    )


def test_path_leaves_union_fields_out():
    data = bytearray(files.bare())
    value = _element(data, "xvalues", 1)
    at = _field(data, value, 1)
    table = at + struct.unpack_from("<I", data, at)[0]
    struct.pack_into("<I", data, _field(data, table, 2), 0x7FFFFFFC)
    error = bad(data, "reference into", "XNNGraph.xvalues[1].dims")
    assert "offset 0x" in str(error)


def test_unknown_slots_of_newer_schemas_are_tolerated():
    hand = graph([(9, "I", 5)])
    assert verify(bytes(hand.data)).root.get("num_externs") == 0


def test_closed_schema_refuses_slots_of_later_dialects():
    hand = graph([(8, "I", 4)])
    hand.put("I", 0)
    assert verify(bytes(hand.data), "seed").root.kind == "XNNGraph"
    bad(hand.data, "slot 8 of XNNGraph is set, the seed dialect has slots 0 to 7", "XNNGraph", key="seed", closed=True)


# ---- limits


def test_depth_limit():
    data = files.bare()
    # XNNGraph, XValue, XNNTensorValue
    verify(data, max_depth=3)
    with pytest.raises(LimitError, match=r"nest deeper than 2 .*XNNGraph.xnodes.*max_depth"):
        verify(data, max_depth=2)
    for depth in (0, 257):
        with pytest.raises(ArgumentError, match="max_depth"):
            verify(data, max_depth=depth)


def test_table_limit_counts_each_reference():
    data = files.bare()
    # Root, node and its operator, three values of two tables each, two buffers.
    verify(data, max_tables=11)
    with pytest.raises(LimitError, match=r"at most 10 tables.*max_tables"):
        verify(data, max_tables=10)


def test_shared_tables_are_legal_but_counted():
    data = bytearray(files.bare())
    values = _place(data, "xvalues")
    # All three entries name the first value.
    first = values + 4 + struct.unpack_from("<I", data, values + 4)[0]
    for index in (1, 2):
        at = values + 4 + 4 * index
        struct.pack_into("<I", data, at, first - at)
    verify(bytes(data), max_tables=11)
    with pytest.raises(LimitError):
        verify(bytes(data), max_tables=10)


def test_blow_up_by_sharing_stops_at_the_limit():
    # A thousand plans that share one vector of ten thousand values would be ten million tables.
    tree = {"version": 0, "execution_plan": [{"values": [{"val": ("Null", {})}] * 3000}] * 3}
    data = bytearray(encode(tree, schema_key="program", identifier=b"ET12"))
    root = struct.unpack_from("<I", data)[0]
    at = _field(data, root, 1)
    plans = at + struct.unpack_from("<I", data, at)[0]
    first = plans + 4 + struct.unpack_from("<I", data, plans + 4)[0]
    data += bytes(-len(data) % 4)
    struct.pack_into("<I", data, at, len(data) - at)
    # A vector may only refer forward, so the plan is repeated by copying its table behind the vector.
    count = 1000
    vector = len(data)
    plan_vtable = first - struct.unpack_from("<i", data, first)[0]
    size = struct.unpack_from("<H", data, plan_vtable + 2)[0]
    target = _field(data, first, 2)
    table = vector + 4 + 4 * count
    data += struct.pack("<I", count) + b"".join(
        struct.pack("<I", table - (vector + 4 + 4 * number)) for number in range(count)
    )
    data += data[first : first + size]
    struct.pack_into("<i", data, table, table - plan_vtable)
    place = table + (target - first)
    values = target + struct.unpack_from("<I", data, target)[0]
    data += bytes(-len(data) % 4)
    moved = len(data)
    struct.pack_into("<I", data, place, moved - place)
    inner = struct.unpack_from("<I", data, values)[0]
    entry = values + 4 + struct.unpack_from("<I", data, values + 4)[0]
    entry_vtable = entry - struct.unpack_from("<i", data, entry)[0]
    entry_size = struct.unpack_from("<H", data, entry_vtable + 2)[0]
    copy = moved + 4 + 4 * inner
    data += struct.pack("<I", inner) + b"".join(
        struct.pack("<I", copy - (moved + 4 + 4 * number)) for number in range(inner)
    )
    data += data[entry : entry + entry_size]
    struct.pack_into("<i", data, copy, copy - entry_vtable)
    union = _field(data, copy, 1)
    null = len(data)
    struct.pack_into("<I", data, union, null - union)
    data += struct.pack("<i", -4) + struct.pack("<HH", 4, 4)
    assert len(data) < 200_000
    start = time.perf_counter()
    with pytest.raises(LimitError, match=r"referred to, found more - at Program\.execution_plan\[\d+\].*max_shared"):
        verify(bytes(data), "program")
    with pytest.raises(LimitError, match="at most 1000000 tables"):
        verify(bytes(data), "program", max_shared=1 << 40)
    assert time.perf_counter() - start < 1


def test_bytes_count_as_often_as_they_are_referred_to():
    data = (pathlib.Path(__file__).parent / "hostile/plan-referred-to-often.pte").read_bytes()
    # A thousand times 16 KB.
    with pytest.raises(LimitError, match=r"need at most 1089056 bytes .* in 20240 bytes of flatbuffer.*max_shared"):
        verify(data, "program")
    assert len(verify(data, "program", max_shared=1 << 25).root.get("execution_plan")) == 1000
    with pytest.raises(LimitError, match="max_shared"):
        load(data)


@pytest.mark.parametrize("make", [files.bare, files.seed, files.inline, files.program])
def test_files_that_share_nothing_need_no_room_for_it(make):
    assert len(load(make(), limits=Limits(max_shared=0)).nodes) == 1


def test_flatbuffer_of_two_gibibytes_is_refused(tmp_path):
    path = tmp_path / "huge"
    with open(path, "wb") as file:
        file.write(files.bare())
        file.truncate(2**31)
    with pytest.raises(FormatError, match="at most 2147483647 bytes, found 2147483648"):
        load(path)
    os.truncate(path, 2**31 - 1)
    assert len(load(path).nodes) == 1


def test_range_must_be_inside_the_payload():
    payload = Payload.open(files.bare())
    for offset, size in ((-1, 8), (0, payload.nbytes + 1), (payload.nbytes, 8), (8, -1)):
        with pytest.raises(ArgumentError, match="need a range"):
            _flatbuf.verify(payload, offset, size, "xnn")


# ---- where the bytes lie


@pytest.mark.parametrize("shift", range(1, 9))
def test_misaligned_memory(shift):
    data = files.bare()
    source = memoryview(bytes(shift) + data)[shift:]
    assert Payload.open(source).address % 16 != Payload.open(data).address % 16 or shift == 16
    result = load(source)
    assert result.values[1].array().tolist() == [files.ONES.tolist()]


def test_writable_bytes_are_read_from_a_copy():
    source = bytearray(files.bare())
    buffer = verify(source)
    assert buffer.copy is not None
    source[:] = b"\xff" * len(source)
    assert buffer.root.get("version") == "0"
    assert verify(files.bare()).copy is None


# ---- the cursor


def test_cursor_reads_every_kind():
    root = verify(
        files.program(
            plan := files.plan(name="run", operators=[{"name": "aten::add", "overload": "out"}]), header=False
        ),
        "program",
    ).root
    method = root.get("execution_plan")[0]
    assert method.get("name") == "run"
    assert method.get("inputs") == (0,) and method.get("non_const_buffer_sizes") == (0, 64)
    assert method.rows("operators", "name", "overload") == [("aten::add", "out")]
    assert method.count("values") == len(plan["values"])
    value = method.item("values", 1).get("val")
    assert value.kind == "Tensor" and value.get("dim_order") == (0, 1) and value.get("requires_grad") is False
    assert method.item("values", 0).at == method.item("values", 0).offset
    for wrong in (
        lambda: method.get("nothing"),
        lambda: method.rows("name"),
        lambda: method.span("values"),
        lambda: method.item("name", 0),
    ):
        with pytest.raises(AttributeError):
            wrong()
    for index in (-1, 2):
        with pytest.raises(IndexError):
            method.item("values", index)


def test_span_is_where_the_bytes_are():
    data = files.bare()
    root = verify(data).root
    offset, nbytes = root.get("constant_buffer")[1].span("storage")
    assert data[offset : offset + nbytes] == files.ONES.tobytes()
    assert root.get("constant_buffer")[0].span("storage") is None


def test_constructors_name_the_factory():
    for kind, name in ((_flatbuf.FlatBuffer, "verify"), (_flatbuf.Table, "FlatBuffer")):
        with pytest.raises(TypeError, match=name):
            kind()


# ---- broken in every way


SMALL = {
    "bare": files.bare,
    "seed": files.seed,
    "inline": files.inline,
    "named": lambda: files.program(
        segments=[b"", files.named(), files.ONES.tobytes()],
        named_data=[{"key": "weights", "segment_index": 2}],
        alignment=16,
    ),
    "program": lambda: files.program(alignment=16),
}


def attempt(data):
    """Whether the bytes load; nothing but our own exceptions may come out."""
    try:
        load_all(data)
        load(data)
    except XnnfastError:
        return False
    return True


@pytest.mark.parametrize("name", SMALL)
def test_every_truncation(name):
    data = SMALL[name]()
    assert attempt(data)
    for size in range(len(data)):
        attempt(data[:size])
    assert attempt(data)


@pytest.mark.parametrize("name", SMALL)
def test_every_word_replaced(name):
    data = SMALL[name]()
    for at in range(0, len(data) - 3, 4):
        for word in (0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF):
            attempt(data[:at] + struct.pack("<I", word) + data[at + 4 :])
    assert attempt(data)


@pytest.mark.parametrize("name", SMALL)
def test_every_byte_flipped(name):
    data = bytearray(SMALL[name]())
    for at in range(len(data)):
        for bit in (0x01, 0x80, 0xFF):
            data[at] ^= bit
            attempt(bytes(data))
            data[at] ^= bit
    assert attempt(bytes(data))


def test_limits_reach_the_verifier():
    with pytest.raises(LimitError, match="max_tables"):
        load(files.bare(), limits=Limits(max_tables=5))
    with pytest.raises(LimitError, match="max_depth"):
        load(files.program(), limits=Limits(max_depth=3))
