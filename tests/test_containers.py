"""Containers: what bytes 4..8 say, where sections lie, and what a header may not claim."""

from __future__ import annotations

import struct

import files
import numpy as np
import pytest

from xnnfast._payload import Payload
from xnnfast.containers import (
    Blob,
    Chain,
    DataFile,
    DelegateCall,
    FreeCall,
    JumpFalseCall,
    KernelCall,
    ListValue,
    MoveCall,
    NamedData,
    Operator,
    ProgramFile,
    Segments,
    Tensor,
    sections,
    sniff,
)
from xnnfast.errors import ArgumentError, FormatError
from xnnfast.load import load, load_all
from xnnfast.writer import encode


def opened(data, **options):
    return sections(Payload.open(data), **options)


# ---- telling files apart


@pytest.mark.parametrize(
    ("make", "magic", "container", "identifier"),
    [
        (files.bare, b"XN00", "bare", b"XN00"),
        (lambda: files.bare(identifier=b"XN01"), b"XN01", "bare", b"XN01"),
        (files.inline, b"XH00", "XH00", b"XN01"),
        (lambda: files.xh00(files.bare()), b"XH00", "XH00", b"XN00"),
        (files.seed, b"", "bare", None),
        (files.program, b"ET12", "pte", b"XN01"),
    ],
)
def test_sniffing(make, magic, container, identifier):
    payload = Payload.open(make())
    assert sniff(payload) == magic
    (section,) = sections(payload)
    assert section.container == container
    if identifier is not None:
        assert section.identifier == identifier
    assert (section.constants is not None) == (b"XH00" in make())


def test_file_name_does_not_matter(tmp_path):
    path = tmp_path / "model.pte"
    path.write_bytes(files.seed())
    assert load(path).dialect == "seed"


@pytest.mark.parametrize("size", range(1, 8))
def test_short_files(size):
    with pytest.raises(FormatError, match="need 8 bytes or more"):
        opened(files.bare()[:size])


def test_data_file_holds_no_graph():
    with pytest.raises(FormatError, match="holds named data and no graph"):
        opened(files.data_file({"a": b"x"}))


# ---- XH00


def test_header_places_flatbuffer_and_constants():
    flatbuffer = files.bare()
    (section,) = opened(files.xh00(flatbuffer, b"\1" * 48))
    assert (section.offset, section.nbytes) == (32, len(flatbuffer))
    assert section.constants == (32 + len(flatbuffer) + -len(flatbuffer) % 16, 48)


@pytest.mark.parametrize(
    ("changes", "match", "offset"),
    [
        ({"zero": 1}, "four zero bytes", 0),
        ({"length": 29}, "header of 30 bytes, found length 29", 8),
        ({"length": 32}, "header of 30 bytes, found length 32", 8),
        ({"offset": 0}, "need the flatbuffer between", 10),
        ({"offset": 29}, "need the flatbuffer between", 10),
        ({"offset": 0xFFFFFFFF}, "need the flatbuffer between", 10),
        ({"size": 7}, "flatbuffer of 8 bytes or more, found size 7", 14),
        ({"size": 0xFFFFFFFF}, "need the flatbuffer between", 10),
        ({"area": 0}, "need the constant data between", 18),
        ({"area": 40}, "need the constant data between", 18),
        ({"area": 0xFFFFFFFF}, "need the constant data between", 18),
        ({"area_size": 2**64 - 1}, "need the constant data between", 18),
        ({"area_size": 49}, "need the constant data between", 18),
    ],
)
def test_header_fields_are_checked(changes, match, offset):
    with pytest.raises(FormatError, match=match) as caught:
        opened(files.xh00(files.bare(), b"\1" * 48, **changes))
    assert caught.value.offset == offset


def test_header_is_whole():
    for size in range(8, 30):
        with pytest.raises(FormatError, match="need 30 bytes of XH00 header"):
            opened(files.xh00(files.bare())[:size])


@pytest.mark.parametrize("identifier", [b"XN02", b"XH00", b"\0\0\0\0", None])
def test_header_needs_an_identifier_behind_it(identifier):
    with pytest.raises(FormatError, match="need identifier XN00 or XN01 behind an XH00 header"):
        opened(files.xh00(files.bare(identifier=identifier)))


# ---- programs


def test_program_with_and_without_header():
    program = ProgramFile(files.program())
    assert len(program.segments) == 2 and program.segments[0].nbytes == 0
    assert bytes(program.segment(1))[4:8] == b"XH00"
    inside = ProgramFile(
        files.program(
            files.plan(delegates=[files.delegate(0, location=0)]),
            header=False,
            backend_delegate_data=[{"data": files.inline()}],
        )
    )
    assert len(inside.segments) == 0
    assert inside.plans[0].delegates[0].blob.data == files.inline()
    assert (
        load(
            files.program(
                files.plan(delegates=[files.delegate(0, location=0)]),
                header=False,
                backend_delegate_data=[{"data": files.inline()}],
            )
        ).container
        == "pte"
    )


@pytest.mark.parametrize("length", [24, 32])
def test_program_header_lengths(length):
    assert len(load(files.program(length=length)).nodes) == 1


@pytest.mark.parametrize(
    ("at", "form", "number", "match"),
    [
        (12, "I", 23, "eh00 header of 24 bytes or more"),
        (12, "I", 0xFFFFFFFF, "eh00 header of 24 bytes or more"),
        (16, "Q", 39, "need a program that holds its header"),
        (16, "Q", 2**64 - 1, "need a program that holds its header"),
        (24, "Q", 2**63, "need segments inside"),
        (32, "Q", 2**64 - 1, "need segments inside"),
        (32, "Q", 1, "need a segment inside the 1 bytes"),
        (24, "Q", 0, "need segments behind the flatbuffer's end"),
    ],
)
def test_program_header_is_checked(at, form, number, match):
    data = bytearray(files.program())
    struct.pack_into("<" + form, data, at, number)
    with pytest.raises(FormatError, match=match):
        ProgramFile(data)


def test_truncated_segments_are_seen_when_the_file_is_opened():
    data = files.program(segments=[b"", files.inline(), bytes(1000)])
    ProgramFile(data)
    with pytest.raises(FormatError, match="need segments inside"):
        ProgramFile(data[:-500])


def test_segments_without_header():
    root = {
        "version": 0,
        "execution_plan": [files.plan()],
        "segments": [{"offset": 0, "size": 0}, {"offset": 0, "size": 8}],
    }
    with pytest.raises(FormatError, match="need a segment inside the 0 bytes"):
        ProgramFile(encode(root, schema_key="program", identifier=b"ET12"))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"inputs": [2]}, r"inputs\[0\]"),
        ({"inputs": [-1]}, "index of one of 2 values, found -1"),
        ({"outputs": [0, 7]}, r"outputs\[1\]"),
        ({"chains": [{"instructions": [files.call(1)]}]}, "index of one of 1 delegates, found 1"),
        ({"chains": [{"instructions": [files.call(0, [0, 9])]}]}, r"instructions\[0\].args\[1\]"),
        ({"chains": [{"instructions": [files.kernel(0)]}]}, "index of one of 0 operators"),
        ({"chains": [{"instructions": [{}]}]}, "need an instruction"),
        ({"chains": [{"instructions": [{"instr_args": ("MoveCall", {"move_from": 5, "move_to": 0})}]}]}, "move_from"),
        ({"chains": [{"instructions": [{"instr_args": ("FreeCall", {"value_index": 5})}]}]}, "value_index"),
        (
            {
                "chains": [
                    {
                        "instructions": [
                            {"instr_args": ("JumpFalseCall", {"cond_value_index": 0, "destination_instruction": 2})}
                        ]
                    }
                ]
            },
            "destination_instruction",
        ),
        ({"chains": [{"inputs": [4]}]}, r"chains\[0\].inputs"),
        ({"delegates": [files.delegate(2)]}, "place from 0 to 1, found 2"),
        ({"delegates": [files.delegate(0, location=0)]}, "place from 0 to -1, found 0"),
        ({"delegates": [files.delegate(0, location=2)]}, "need location 0 .* found 2"),
        ({"delegates": [{"id": "XnnpackBackend"}]}, "need a reference to the delegate's data"),
    ],
)
def test_indices_of_plans_are_checked(changes, match):
    with pytest.raises(FormatError, match=match):
        _ = ProgramFile(files.program(files.plan(**changes))).plans


def test_plan_is_decoded():
    instructions = [
        files.kernel(0, [0, 2]),
        {"instr_args": ("MoveCall", {"move_from": 0, "move_to": 1})},
        {"instr_args": ("JumpFalseCall", {"cond_value_index": 4, "destination_instruction": 0})},
        {"instr_args": ("FreeCall", {"value_index": 1})},
        files.call(0, [0, 1]),
    ]
    values = [
        files.tensor((2, 3), dim_order=b"\1\0", shape_dynamism=1),
        files.tensor(),
        {"val": ("Int", {"int_val": -5})},
        {"val": ("Null", {})},
        {"val": ("Bool", {"bool_val": True})},
        {"val": ("Double", {"double_val": 0.5})},
        {"val": ("String", {"string_val": "mean"})},
        {"val": ("IntList", {"items": [2, 2]})},
        {"val": ("OptionalTensorList", {"items": [-1, 0]})},
        {},
    ]
    plan = ProgramFile(
        files.program(
            files.plan(
                values=values,
                chains=[{"inputs": [0], "outputs": [1], "instructions": instructions}],
                operators=[{"name": "aten::add", "overload": "out"}, {"name": "noop"}],
                delegates=[files.delegate(1) | {"compile_specs": [{"key": "k", "value": b"v"}]}],
            )
        )
    ).plan()
    assert plan.name == "forward" and plan.buffer_sizes == (0, 64)
    assert plan.chains == (
        Chain(
            (0,),
            (1,),
            (KernelCall(0, (0, 2)), MoveCall(0, 1), JumpFalseCall(4, 0), FreeCall(1), DelegateCall(0, (0, 1))),
        ),
    )
    assert list(map(str, plan.operators)) == ["aten::add.out", "noop"] and plan.operators[0] == Operator(
        "aten::add", "out"
    )
    assert plan.delegates[0].compile_specs == (("k", b"v"),)
    found = plan.values[0]
    assert isinstance(found, Tensor)
    assert (found.sizes, found.dim_order, found.shape, found.dtype, found.nbytes) == (
        (2, 3),
        (1, 0),
        (3, 2),
        np.float32,
        24,
    )
    assert found.allocation == (1, 0) and found.dynamism == 1 and not found.is_constant
    assert plan.values[2:7] == (-5, None, True, 0.5, "mean")
    assert plan.values[7] == ListValue("IntList", (2, 2)) and plan.values[8].items == (-1, 0)
    assert [plan.values.kind(index) for index in (0, 2, 9)] == ["Tensor", "Int", "Null"]
    assert len(plan.values) == 10 and plan.values[-1] is None
    with pytest.raises(IndexError):
        plan.values[10]


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"dim_order": b"\0\0"}, "each of 0 to 1 once in dim_order"),
        ({"dim_order": b"\0"}, "dim_order"),
        ({"sizes": [1, -8]}, "need sizes from 0 on"),
    ],
)
def test_tensors_are_checked(fields, match):
    plan = ProgramFile(files.program(files.plan(values=[files.tensor(**fields), files.tensor()]))).plan()
    with pytest.raises(FormatError, match=match):
        plan.values[0]


def test_tensor_without_dim_order_is_contiguous():
    tensor = (
        ProgramFile(files.program(files.plan(values=[files.tensor((2, 3), dim_order=None), files.tensor()])))
        .plan()
        .values[0]
    )
    assert tensor.dim_order == (0, 1) and tensor.shape == (2, 3)


def test_scalar_type_without_dtype():
    tensor = ProgramFile(files.program(files.plan(values=[files.tensor(dtype=15), files.tensor()]))).plan().values[0]
    with pytest.raises(FormatError, match="scalar type that NumPy has, found 15"):
        _ = tensor.dtype


def test_methods_by_name():
    program = ProgramFile(files.program(files.plan(name="encode"), files.plan(name="decode")))
    assert program.plan("decode").name == "decode"
    with pytest.raises(ArgumentError, match="need method=, one of 'encode', 'decode'"):
        program.plan()
    with pytest.raises(ArgumentError, match="need a method of 'encode', 'decode', found 'forward'"):
        program.plan("forward")


def test_sections_are_labelled():
    data = files.program(
        files.plan(name="a", delegates=[files.delegate(1), files.delegate(1, id="Other"), files.delegate(1)])
    )
    labels = [section.label for section in opened(data)]
    assert labels == ["method 'a', delegate 0", "method 'a', delegate 2"]
    assert [graph.container for graph in load_all(data)] == ["pte", "pte"]
    with pytest.raises(FormatError, match="delegate 1 of method 'a' is of Other"):
        load(data, delegate=1)


def test_bundled_program(tmp_path):
    inner = files.program()
    data = encode({"version": 0, "program": inner}, schema_key="bundled", identifier=b"BP08")
    program = ProgramFile(data)
    assert data[program.offset : program.offset + len(inner)] == inner
    assert load(data).zero_copy == load(inner).zero_copy
    path = tmp_path / "model.bpte"
    path.write_bytes(data)
    graph = load(path)
    assert graph.values[1].array().tolist() == [files.ONES.tolist()]
    with pytest.raises(FormatError, match="need a program in the bundle"):
        ProgramFile(encode({"version": 0}, schema_key="bundled", identifier=b"BP08"))


# ---- constants of programs


def _constant_tensor(index=1, sizes=(1, 8), **more):
    return files.tensor(sizes, allocation_info=None, data_buffer_idx=index, **more)


def test_constant_in_a_segment():
    program = ProgramFile(
        files.program(
            files.plan(values=[files.tensor(), _constant_tensor()]),
            segments=[b"", files.inline(), bytes(16) + files.ONES.tobytes()],
            constant_segment={"segment_index": 2, "offsets": [0, 16]},
        )
    )
    tensor = program.plan().values[1]
    assert tensor.is_constant
    assert program.constant(tensor).data == files.ONES.tobytes()
    big = ProgramFile(
        files.program(
            files.plan(values=[files.tensor(), _constant_tensor(sizes=(1, 9))]),
            segments=[b"", files.inline(), bytes(16) + files.ONES.tobytes()],
            constant_segment={"segment_index": 2, "offsets": [0, 16]},
        )
    )
    with pytest.raises(FormatError, match=r"need 36 bytes for a constant of sizes \[1, 9\], found 32"):
        big.constant(big.plan().values[1])


def test_constant_in_the_flatbuffer():
    program = ProgramFile(
        files.program(
            files.plan(values=[files.tensor(), _constant_tensor()]),
            constant_buffer=[{}, {"storage": files.ONES.tobytes()}],
        )
    )
    assert program.constant(program.plan().values[1]).data == files.ONES.tobytes()
    wrong = ProgramFile(
        files.program(
            files.plan(values=[files.tensor(), _constant_tensor(2)]),
            constant_buffer=[{}, {"storage": files.ONES.tobytes()}],
        )
    )
    with pytest.raises(FormatError, match="need a constant from 1 to 1, found 2"):
        wrong.constant(wrong.plan().values[1])


def test_constant_segment_is_checked_when_the_file_is_opened():
    for segment, match in (
        ({"segment_index": 2, "offsets": [0]}, "segment from 0 to 1, found 2"),
        ({"segment_index": 1, "offsets": [0, 2**63]}, "offset inside the segment"),
    ):
        with pytest.raises(FormatError, match=match):
            ProgramFile(files.program(constant_segment=segment))
    ProgramFile(files.program(constant_segment={}))


def test_constant_in_a_data_file():
    tensor = files.tensor(allocation_info=None, extra_tensor_info={"fully_qualified_name": "w", "location": 1})
    data = files.program(files.plan(values=[files.tensor(), tensor]))
    program = ProgramFile(data, data=[files.data_file({"w": files.ONES.tobytes()})])
    found = program.plan().values[1]
    assert found.is_constant and found.external
    assert program.constant(found).data == files.ONES.tobytes()
    with pytest.raises(FormatError, match="named data 'w' is in none of"):
        ProgramFile(data).constant(found)


def test_content_of_a_mutable_tensor():
    tensor = files.tensor(extra_tensor_info={"mutable_data_segments_idx": 1})
    program = ProgramFile(
        files.program(
            files.plan(values=[files.tensor(), tensor]),
            segments=[b"", files.inline(), files.ONES.tobytes()],
            mutable_data_segments=[{}, {"segment_index": 2, "offsets": [0, 0]}],
        )
    )
    assert program.initial(program.plan().values[1]).data == files.ONES.tobytes()
    assert program.initial(program.plan().values[0]) is None


# ---- named data


def test_named_data_is_found_in_program_and_data_files():
    data = files.program(segments=[b"", files.named(), b"abc"], named_data=[{"key": "here", "segment_index": 2}])
    program = ProgramFile(data, data=[files.data_file({"there": b"defg"})])
    assert bytes(program.named("here")) == b"abc" and bytes(program.named("there")) == b"defg"
    assert (
        list(program.named_data) == ["here", "there"] and "here" in program.named_data and len(program.named_data) == 2
    )
    with pytest.raises(FormatError, match="'nowhere' is in none of"):
        program.named("nowhere")


def test_named_data_in_two_places_is_refused():
    data = files.program(
        segments=[b"", files.named(), files.ONES.tobytes()], named_data=[{"key": "weights", "segment_index": 2}]
    )
    other = files.data_file({"weights": files.ONES.tobytes()})
    with pytest.raises(FormatError, match="in more than one place"):
        load(data, data=[other])
    twice = files.program(
        segments=[b"", files.named(), files.ONES.tobytes(), files.ONES.tobytes()],
        named_data=[{"key": "weights", "segment_index": 2}, {"key": "weights", "segment_index": 3}],
    )
    with pytest.raises(FormatError, match="in more than one place"):
        load(twice)
    # Twice the same place is one place.
    same = files.program(
        segments=[b"", files.named(), files.ONES.tobytes()], named_data=[{"key": "weights", "segment_index": 2}] * 2
    )
    assert len(load(same).nodes) == 1


def test_named_data_is_checked_when_the_file_is_opened():
    with pytest.raises(FormatError, match="segment from 0 to 1, found 2"):
        ProgramFile(files.program(named_data=[{"key": "a", "segment_index": 2}]))
    with pytest.raises(FormatError, match="need a key"):
        ProgramFile(files.program(named_data=[{"segment_index": 1}]))


def test_named_data_alone():
    payload = Payload.open(bytes(100))
    named = NamedData((Segments(payload, 10, [(0, 5), (20, 3)]), {"a": 0, "b": 1}, {}))
    assert named.find("b") == Blob(payload, 30, 3)
    assert named.merged([]).find("a").nbytes == 5
    with pytest.raises(FormatError, match="in none of: no files"):
        NamedData().find("a")


# ---- data files


@pytest.mark.parametrize("older", [False, True])
def test_data_file_layouts(older):
    made = DataFile(files.data_file({"a": b"123", "b": b"45"}, older=older))
    assert bytes(made.named_data.find("b").data) == b"45"
    assert load(files.named(), data=files.data_file({"weights": files.ONES.tobytes()}, older=older)).zero_copy == (1, 1)


def test_data_file_without_content():
    flatbuffer = encode({"version": 0}, schema_key="flat_tensor", identifier=b"FT01")
    header = struct.pack("<4sIQQQQ", b"FH01", 40, 48, len(flatbuffer), 0, 0)
    assert len(DataFile(files.insert(flatbuffer, header.ljust(48, b"\0"))).named_data) == 0


@pytest.mark.parametrize(
    ("at", "form", "number", "match"),
    [
        (8, "4s", b"FH02", "need an FH01 header"),
        (12, "I", 39, "FH01 header of 40 bytes or more"),
        (24, "Q", 2**63, "need a flatbuffer that ends inside"),
        (32, "Q", 2**63, "need segments inside"),
        (40, "Q", 2**63, "need segments inside"),
        (40, "Q", 1, "need a segment inside the 1 bytes"),
    ],
)
def test_data_file_header_is_checked(at, form, number, match):
    data = bytearray(files.data_file({"a": b"123"}))
    struct.pack_into("<" + form, data, at, number)
    with pytest.raises(FormatError, match=match):
        DataFile(data)


def test_data_argument_takes_one_or_many(tmp_path):
    path = tmp_path / "weights.ptd"
    path.write_bytes(files.data_file({"weights": files.ONES.tobytes()}))
    for given in (path, str(path), [path], (DataFile(path),), path.read_bytes()):
        assert len(load(files.named(), data=given).nodes) == 1
    with pytest.raises(FormatError, match=r"need a data file \(FT01 at byte 4\).*is an XNNPACK payload"):
        load(files.named(), data=[files.inline()])


def test_every_truncation_of_a_data_file():
    for older in (False, True):
        data = files.data_file({"a": b"123", "b": b"45"}, older=older, alignment=16)
        for size in range(1, len(data)):
            with pytest.raises(FormatError):
                DataFile(data[:size])


# ---- what ExecuTorch wrote


@files.needs_shared
def test_exported_programs_open():
    paths = files.shared_files("model.pte")
    assert len(paths) >= 160
    for path in paths:
        program = ProgramFile(path)
        assert [plan.name for plan in program.plans] == ["forward"]
        for section in program.sections():
            assert section.identifier == b"XN01"
            assert section.constants is not None
