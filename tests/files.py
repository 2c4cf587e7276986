"""Files made by hand for the tests of reading: one small addition in every dialect, wrappers, and a program."""

from __future__ import annotations

import copy
import pathlib
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from xnnfast.writer import encode

#: Programs and models that ExecuTorch wrote, beside the package where they are kept.
SHARED = pathlib.Path(__file__).parents[2] / "shared"
NONE = 0xFFFFFFFF
SEED_VERSION = "ae108ef49aa5623b896fc93d4298c49d1750d9ba"

needs_shared = pytest.mark.skipif(not (SHARED / "conformance").is_dir(), reason=f"no exported programs in {SHARED}")


def shared_files(*names: str) -> list[pathlib.Path]:
    """Files of those names under the folders of exported programs."""
    return sorted(path for name in names for path in SHARED.glob(f"*/*/{name}"))


# ---- graphs: y = x + c over 1x8 fp32


ONES = np.arange(1, 9, dtype=np.float32)


def plain(
    id: int,
    *,
    external: int = NONE,
    flags: int = 0,
    constant: int = 0,
    dims: Sequence[int] = (1, 8),
    datatype: int = 1,
    **more: Any,
) -> dict[str, Any]:
    """Fields of an XNNTensorValue."""
    return {
        "datatype": datatype,
        "num_dims": len(dims),
        "dims": list(dims),
        "constant_buffer_idx": constant,
        "external_id": external,
        "flags": flags,
        "id_out": id,
        **more,
    }


def values(*tables: Mapping[str, Any], field: str = "xvalue_union") -> list[dict[str, Any]]:
    """XValues of plain tables; one with ``tensor_value`` is a quantized value."""
    return [
        {field: ("XNNQuantizedTensorValue" if "tensor_value" in table else "XNNTensorValue", table)} for table in tables
    ]


def node(
    kind: str, *, field: str = "xnode_union", handle: int = 0, clamp: Mapping[str, float] | None = None, **fields: Any
) -> dict[str, Any]:
    made: dict[str, Any] = {field: (kind, fields), "debug_handle": handle}
    if clamp is not None:
        made["output_min_max"] = clamp
    return made


def add(one: int, two: int, out: int, **more: Any) -> dict[str, Any]:
    return node("XNNAdd", input1_id=one, input2_id=two, output_id=out, flags=0, **more)


def tree(**changes: Any) -> dict[str, Any]:
    """The addition as an xnn graph whose constant is in constant_buffer."""
    made: dict[str, Any] = {
        "version": "0",
        "xnodes": [add(0, 1, 2, handle=7)],
        "xvalues": values(plain(0, external=0, flags=1), plain(1, constant=1), plain(2, external=1, flags=2)),
        "num_externs": 2,
        "input_ids": [0],
        "output_ids": [2],
        "constant_buffer": [{}, {"storage": ONES.tobytes()}],
        "mem_buffer_sizes": [0, 32],
    }
    made.update(changes)
    return {name: value for name, value in made.items() if value is not None}


def seed_tree(**changes: Any) -> dict[str, Any]:
    """The same in the seed dialect, whose union fields have other names."""
    made = tree(**{"version": SEED_VERSION, **changes})
    for group, old, new in (("xnodes", "xnode_union", "xnode"), ("xvalues", "xvalue_union", "xvalue")):
        if group in made:
            made[group] = [
                {(new if name == old else name): value for name, value in entry.items()} for entry in made[group]
            ]
    return made


def bare(graph: Mapping[str, Any] | None = None, identifier: bytes | None = b"XN00") -> bytes:
    return encode(tree() if graph is None else graph, identifier=identifier)


def seed(graph: Mapping[str, Any] | None = None) -> bytes:
    return encode(seed_tree() if graph is None else graph, schema_key="seed")


def xh00(flatbuffer: bytes, data: bytes = b"", **changes: int) -> bytes:
    """A payload with header; ``changes`` overrule its fields."""
    start = 32 + len(flatbuffer) + -len(flatbuffer) % 16
    fields = {
        "zero": 0,
        "length": 30,
        "offset": 32,
        "size": len(flatbuffer),
        "area": start,
        "area_size": len(data),
        **changes,
    }
    head = struct.pack(
        "<I4sHIIIQ",
        fields["zero"],
        b"XH00",
        fields["length"],
        fields["offset"],
        fields["size"],
        fields["area"],
        fields["area_size"],
    )
    return head.ljust(32, b"\0") + flatbuffer.ljust(start - 32, b"\0") + data


def headed_tree(*entries: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """The addition with its constant behind a header: entry 1 of constant_data."""
    return tree(
        constant_buffer=None,
        mem_buffer_sizes=None,
        constant_data=[{"offset": 2**64 - 1, "size": 0, "named_key": ""}, *entries],
        **changes,
    )


def inline(area: bytes | None = None, *, offset: int = 0, size: int = 32, **changes: Any) -> bytes:
    """XN01 behind a header, the constant in its area."""
    area = ONES.tobytes() + bytes(16) if area is None else area
    return xh00(encode(headed_tree({"offset": offset, "size": size}, **changes), identifier=b"XN01"), area)


def named(key: str = "weights", size: int = 32, **changes: Any) -> bytes:
    """XN01 behind a header, the constant under a key."""
    return xh00(
        encode(headed_tree({"offset": 2**64 - 1, "size": size, "named_key": key}, **changes), identifier=b"XN01")
    )


# ---- programs


def insert(flatbuffer: bytes, header: bytes) -> bytes:
    """A finished flatbuffer with a header put behind its first eight bytes."""
    assert len(header) % 16 == 0, "offsets inside must keep their alignment"
    (root,) = struct.unpack_from("<I", flatbuffer)
    return struct.pack("<I", root + len(header)) + flatbuffer[4:8] + header + flatbuffer[8:]


def with_segments(
    segments: Sequence[bytes],
    build: Callable[[list[dict[str, int]]], bytes],
    magic: bytes,
    *,
    length: int = 32,
    alignment: int = 128,
    **changes: int,
) -> bytes:
    """A program or data file: flatbuffer, header and segments."""
    places, at = [], 0
    for each in segments:
        places.append({"offset": at, "size": len(each)})
        at += len(each) + -len(each) % alignment
    flatbuffer = build(places)
    room = 32 if magic == b"eh00" else 48
    size = len(flatbuffer) + room
    base = size + -size % alignment
    data = b"".join(each.ljust(len(each) + -len(each) % alignment, b"\0") for each in segments)
    fields = {"size": size, "base": base, "data": len(data), **changes}
    if magic == b"eh00":
        header = struct.pack("<4sIQQQ", magic, length, fields["size"], fields["base"], fields["data"])[
            : max(24, min(length, 32))
        ]
    else:
        header = struct.pack("<4sIQQQQ", magic, 40, 48, fields["size"] - 48, fields["base"], fields["data"])
    whole = insert(flatbuffer, header.ljust(room, b"\0"))
    return whole.ljust(base, b"\0") + data


def tensor(sizes: Sequence[int] = (1, 8), *, dtype: int = 6, **more: Any) -> dict[str, Any]:
    """A planned tensor of a program."""
    fields: dict[str, Any] = {
        "scalar_type": dtype,
        "sizes": list(sizes),
        "dim_order": bytes(range(len(sizes))),
        "allocation_info": {"memory_id": 1, "memory_offset_low": 0, "memory_offset_high": 0},
    }
    fields.update(more)
    return {"val": ("Tensor", {name: value for name, value in fields.items() if value is not None})}


def call(index: int = 0, args: Sequence[int] = (0, 1)) -> dict[str, Any]:
    return {"instr_args": ("DelegateCall", {"delegate_index": index, "args": list(args)})}


def kernel(index: int = 0, args: Sequence[int] = (0, 1)) -> dict[str, Any]:
    return {"instr_args": ("KernelCall", {"op_index": index, "args": list(args)})}


def delegate(index: int, *, id: str = "XnnpackBackend", location: int = 1) -> dict[str, Any]:
    return {"id": id, "processed": {"location": location, "index": index}}


def plan(**changes: Any) -> dict[str, Any]:
    """A method that calls one delegate: value 0 in, value 1 out."""
    made: dict[str, Any] = {
        "name": "forward",
        "values": [tensor(), tensor()],
        "inputs": [0],
        "outputs": [1],
        "chains": [{"inputs": [], "outputs": [], "instructions": [call()]}],
        "operators": [],
        "delegates": [delegate(1)],
        "non_const_buffer_sizes": [0, 64],
    }
    made.update(changes)
    return made


def program(
    *plans: Mapping[str, Any],
    segments: Iterable[bytes] | None = None,
    header: bool = True,
    length: int = 32,
    alignment: int = 128,
    changes: Mapping[str, int] | None = None,
    **fields: Any,
) -> bytes:
    """A ``.pte``. Segment 0 is empty, 1 is the payload with its constant inside unless others are given."""
    parts = [b"", inline()] if segments is None else list(segments)

    def build(places: list[dict[str, int]]) -> bytes:
        root = {
            "version": 0,
            "execution_plan": [dict(each) for each in plans] or [plan()],
            "segments": places,
            **fields,
        }
        return encode(copy.deepcopy(root), schema_key="program", identifier=b"ET12")

    if not header:
        return build([])
    return with_segments(parts, build, b"eh00", length=length, alignment=alignment, **(changes or {}))


def data_file(blobs: Mapping[str, bytes], *, older: bool = False, **changes: int) -> bytes:
    """A ``.ptd`` of either layout."""

    def build(places: list[dict[str, int]]) -> bytes:
        root: dict[str, Any] = {
            "version": 0,
            "segments": places,
            "named_data": [{"key": key, "segment_index": index} for index, key in enumerate(blobs)],
        }
        if older:
            root |= {"tensor_alignment": 16, "tensors": []}
        return encode(root, schema_key="flat_tensor_v06" if older else "flat_tensor", identifier=b"FT01")

    return with_segments(list(blobs.values()), build, b"FH01", **changes)
