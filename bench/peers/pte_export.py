"""A graph as a program (.pte) of one delegate, for ExecuTorch's runtimes.

The delegate's payload is the graph's own file; around it stands what ExecuTorch needs to call it: tensors of the inputs
and outputs with a place in memory each, and one instruction.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import numpy as np

from xnnfast.writer import encode, to_bytes

#: ScalarType of schema/scalar_type.fbs.
TYPES = {np.dtype(np.uint8): 0, np.dtype(np.int8): 1, np.dtype(np.int32): 3, np.dtype(np.float32): 6}
#: Of the payload and of tensors in their arena.
ALIGNMENT = 128
HEADER_ROOM = 32


class Unknown(ValueError):
    """A graph with something that is not written here."""


def export(graph: Any, path: Path) -> None:
    """Write the program; its method ``forward`` takes and gives what the graph does, in the same order."""
    payload = to_bytes(graph, dialect="xn01")
    ports = [*graph.inputs, *graph.outputs]
    tensors, end = [], 0
    for value in ports:
        if value.dtype not in TYPES:
            raise Unknown(f"value {value.id} of {value.dtype}")
        place = {"memory_id": 1, "memory_offset_low": end & 0xFFFFFFFF, "memory_offset_high": end >> 32}
        tensors.append({"val": ("Tensor", {
            "scalar_type": TYPES[value.dtype], "sizes": list(value.shape), "dim_order": bytes(range(len(value.shape))),
            "allocation_info": place,
        })})  # fmt: skip
        end += -(-math.prod(value.shape) * value.dtype.itemsize // ALIGNMENT) * ALIGNMENT
    # A payload's external ids are places in the call's arguments.
    order = sorted(range(len(ports)), key=lambda i: ports[i].external_id)
    plan = {
        "name": "forward",
        "values": tensors,
        "inputs": list(range(len(graph.inputs))),
        "outputs": list(range(len(graph.inputs), len(ports))),
        "chains": [{"inputs": [], "outputs": [], "instructions": [
            {"instr_args": ("DelegateCall", {"delegate_index": 0, "args": order})}]}],
        "operators": [],
        "delegates": [{"id": "XnnpackBackend", "processed": {"location": 1, "index": 0}, "compile_specs": []}],
        "non_const_buffer_sizes": [0, end],
    }  # fmt: skip
    root = {
        "version": 0,
        "execution_plan": [plan],
        # No constants of the program's own: without this it would count as one of the oldest, which are refused.
        "constant_segment": {"segment_index": 0, "offsets": [0]},
        "segments": [{"offset": 0, "size": len(payload)}],
    }
    flatbuffer = encode(root, schema_key="program", identifier=b"ET12")
    # The header stands behind the first eight bytes, and the offset to the root counts it.
    (first,) = struct.unpack_from("<I", flatbuffer)
    size = len(flatbuffer) + HEADER_ROOM
    base = -(-size // ALIGNMENT) * ALIGNMENT
    header = struct.pack("<4sIQQQ", b"eh00", HEADER_ROOM, size, base, len(payload))
    with path.open("wb") as stream:
        stream.write(struct.pack("<I", first + HEADER_ROOM) + flatbuffer[4:8] + header + flatbuffer[8:])
        stream.write(bytes(base - size))
        stream.write(payload)
