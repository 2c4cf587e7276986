"""Writes the files of this folder: ``python tests/hostile/make.py``. README.md tells what each is about."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))

import files  # noqa: E402

from xnnfast._generated import schema  # noqa: E402
from xnnfast.writer import encode  # noqa: E402

#: Numbers of datatypes in the later dialects.
NUMBERS = {name: number for number, name in schema.DATATYPES["xnn"].items()}
QINT8, QCINT8, QCINT32 = (NUMBERS[name] for name in ("qint8", "qcint8", "qcint32"))

MAKERS: dict[str, Callable[[], bytes]] = {}


def file(name: str) -> Callable[[Callable[[], bytes]], Callable[[], bytes]]:
    def register(make: Callable[[], bytes]) -> Callable[[], bytes]:
        MAKERS[name] = make
        return make

    return register


def bare(**changes: Any) -> bytes:
    return files.bare(files.tree(**changes))


def unary(kind: str, x: Any, y: Any, **fields: Any) -> bytes:
    """One node between an input and an output."""
    node = files.node(kind, input_id=0, output_id=1, flags=0, **fields)
    graph = {
        "version": "0",
        "xnodes": [node],
        "xvalues": files.values(
            files.plain(0, external=0, flags=1, dims=x), files.plain(1, external=1, flags=2, dims=y)
        ),
        "num_externs": 2,
    }
    return files.bare(graph)


def method(*instructions: Any, values: Any, operators: Any = (), constants: Any = (), **fields: Any) -> bytes:
    """A program of one method without delegates."""
    plan = files.plan(
        values=values,
        operators=[{"name": name, "overload": overload} for name, overload in operators],
        chains=[{"instructions": list(instructions)}],
        delegates=[],
        **{"inputs": [0], "outputs": [1], **fields},
    )
    return files.program(plan, header=False, constant_buffer=list(constants))


def jump(condition: int, target: int) -> dict[str, Any]:
    return {"instr_args": ("JumpFalseCall", {"cond_value_index": condition, "destination_instruction": target})}


def move(source: int, target: int) -> dict[str, Any]:
    return {"instr_args": ("MoveCall", {"move_from": source, "move_to": target})}


def number(value: int) -> dict[str, Any]:
    return {"val": ("Int", {"int_val": value})}


# ---- programs, found by changing words of exported ones


@file("shape-dynamism.pte")
def _() -> bytes:
    values = [files.tensor(), files.tensor(shape_dynamism=-1)]
    return method(move(0, 1), values=values)


@file("number-as-tensor.pte")
def _() -> bytes:
    # The size of a dimension goes where a tensor is declared.
    values = [files.tensor(), files.tensor(), number(0)]
    return method(files.kernel(0, (0, 2, 1)), values=values, operators=[("aten::sym_size", "int")])


@file("tensor-as-number.pte")
def _() -> bytes:
    values = [files.tensor(), files.tensor(), number(0)]
    return method(move(0, 2), files.kernel(0, (0, 2, 1, 1)), values=values, operators=[("aten::sum", "IntList_out")])


@file("no-result.pte")
def _() -> bytes:
    # The result of a copy is a list without any tensor.
    values = [files.tensor(), files.tensor(), {"val": ("TensorList", {"items": []})}, number(0)]
    return method(files.kernel(0, (0, 3, 2, 2)), values=values, operators=[("aten::clone", "out")])


@file("scalar-of-many.pte")
def _() -> bytes:
    # A tensor without sizes, which a delegate takes as one element, receives eight.
    values = [files.tensor(), files.tensor((), shape_dynamism=2), files.tensor((1,))]
    graph = files.tree(
        xvalues=files.values(
            files.plain(0, external=0, flags=1, dims=(1,)),
            files.plain(1, constant=1, dims=(1,)),
            files.plain(2, external=1, flags=2, dims=(1,)),
        )
    )
    plan = files.plan(
        values=values,
        outputs=[2],
        chains=[{"instructions": [move(0, 1), files.call(0, (1, 2))]}],
        delegates=[files.delegate(0, location=0)],
    )
    return files.program(plan, header=False, backend_delegate_data=[{"data": files.bare(graph)}])


@file("constant-written.pte")
def _() -> bytes:
    # A constant of the program goes into a delegate as an input, and comes out of it.
    values = [files.tensor(), files.tensor(), files.tensor(allocation_info=None, data_buffer_idx=1)]
    plan = files.plan(
        values=values,
        chains=[{"instructions": [files.call(0, (2, 2)), files.call(0, (0, 1))]}],
        delegates=[files.delegate(0, location=0)],
    )
    storage = [{}, {"storage": files.ONES.tobytes()}]
    return files.program(plan, header=False, backend_delegate_data=[{"data": files.bare()}], constant_buffer=storage)


@file("rank-of-a-copy.pte")
def _() -> bytes:
    # A copy between two delegates is declared with another rank than what it copies.
    other = files.tree(
        xvalues=files.values(
            files.plain(0, external=0, flags=1, dims=(2, 2, 2, 1)),
            files.plain(1, constant=1, dims=(1,)),
            files.plain(2, external=1, flags=2, dims=(2, 2, 2, 1)),
        )
    )
    shapes = ((1, 8), (1, 8), (2, 2, 2, 1), (2, 2, 2, 1))
    plan = files.plan(
        values=[*map(files.tensor, shapes), {"val": ("Null", {})}],
        outputs=[3],
        operators=[{"name": "aten::clone", "overload": "out"}],
        chains=[{"instructions": [files.call(0, (0, 1)), files.kernel(0, (1, 4, 2, 2)), files.call(1, (2, 3))]}],
        delegates=[files.delegate(0, location=0), files.delegate(1, location=0)],
    )
    data = [{"data": files.bare()}, {"data": files.bare(other)}]
    return files.program(plan, header=False, backend_delegate_data=data)


@file("rank-of-24.pte")
def _() -> bytes:
    values = [files.tensor(), files.tensor((1,) * 24)]
    return method(move(0, 1), values=values)


@file("nothing-of-huge-sizes.pte")
def _() -> bytes:
    # No element, and more of them than 64 bits can count if one dimension were not 0.
    sizes = (2**31 - 1, 2**31 - 1, 2**31 - 1, 0)
    constant = files.tensor(sizes, allocation_info=None, data_buffer_idx=1)
    return method(move(1, 2), values=[files.tensor(), constant, files.tensor(sizes)], outputs=[2], constants=[{}, {}])


# ---- programs that ask for more time or memory than there is


@file("endless-loop.pte")
def _() -> bytes:
    values = [files.tensor(), files.tensor(), {"val": ("Bool", {"bool_val": False})}]
    return method(move(0, 1), jump(2, 0), values=values)


@file("huge-result.pte")
def _() -> bytes:
    values = [
        files.tensor(),
        files.tensor((2**20, 2**20)),
        {"val": ("IntList", {"items": [3, 3]})},
        number(2**31 - 1),
    ]
    return method(files.kernel(0, (2, 3, 1, 1)), values=values, operators=[("aten::full", "out")])


@file("huge-state.pte")
def _() -> bytes:
    values = [files.tensor(), files.tensor(), files.tensor((2**20, 2**20))]
    return method(move(2, 1), values=values)


@file("list-named-often.pte")
def _() -> bytes:
    # 600 operators that each name a list of 2,000 tensors: a million operands and a half.
    values = [files.tensor(), files.tensor(), {"val": ("TensorList", {"items": [0] * 2000})}, number(0)]
    call = files.kernel(0, (2, 3, 1, 1))
    return method(*[call] * 600, values=values, operators=[("aten::cat", "out")])


@file("plan-referred-to-often.pte")
def _() -> bytes:
    # One method of 4,000 inputs, 1,000 times: 16 million numbers in 20 KB.
    plan = {"name": "forward", "values": [files.tensor()], "inputs": [0] * 4000, "outputs": [0]}
    return repeated(encode({"execution_plan": [plan]}, schema_key="program", identifier=b"ET12"), 1000)


def repeated(data: bytes, count: int) -> bytes:
    """A program whose only method stands in its vector of methods ``count`` times."""
    (root,) = struct.unpack_from("<I", data)
    vtable = root - struct.unpack_from("<i", data, root)[0]
    # Slot 1 is execution_plan.
    (offset,) = struct.unpack_from("<H", data, vtable + 4 + 2)
    field = root + offset
    vector = field + struct.unpack_from("<I", data, field)[0]
    plan = vector + 4 + struct.unpack_from("<I", data, vector + 4)[0]
    # References count forwards, so a root and its vector are put before all that the program has.
    table = struct.pack("<HHHH", 8, 8, 0, 4) + struct.pack("<iI", 8, 4)
    front = bytearray(struct.pack("<I", 16) + b"ET12" + table)
    vector_at = len(front)
    start = vector_at + 4 + 4 * count
    start += -start % 16
    front += struct.pack("<I", count)
    for place in range(count):
        at = vector_at + 4 + 4 * place
        front += struct.pack("<I", start + plan - at)
    return bytes(front).ljust(start, b"\0") + data


# ---- graphs


@file("pooling-window.fb")
def _() -> bytes:
    # 98,304 windows of 32,769 elements each: going over them took 38 seconds.
    fields = dict.fromkeys(("padding_left", "padding_right"), 0) | {
        "padding_top": 65536, "padding_bottom": 65536, "pooling_height": 32769, "pooling_width": 2,
        "stride_height": 2, "stride_width": 1, "dilation_height": 2, "dilation_width": 1,
    }  # fmt: skip
    return unary("XNNMaxPooling2d", (1, 1, 2, 1), (1, 32769, 1, 1), **fields)


@file("window-of-gigabytes.fb")
def _() -> bytes:
    # 60,001 x 60,001 taps over four pixels: XNNPACK makes a pointer for each.
    fields = dict.fromkeys(("padding_top", "padding_bottom", "padding_left", "padding_right"), 60000) | {
        "pooling_height": 60001, "pooling_width": 60001, "stride_height": 60000, "stride_width": 60000,
    }  # fmt: skip
    return unary("XNNAvgPooling2d", (1, 2, 2, 1), (1, 2, 2, 1), **fields)


@file("broadcast-of-terabytes.fb")
def _() -> bytes:
    values = files.values(
        files.plain(0, external=0, flags=1, dims=(2**19, 1)),
        files.plain(1, external=1, flags=1, dims=(1, 2**19)),
        files.plain(2, external=2, flags=2, dims=(2**19, 2**19)),
    )
    return bare(xvalues=values, num_externs=3, input_ids=[0, 1], constant_buffer=None, mem_buffer_sizes=None)


@file("product-of-dims-wraps.fb")
def _() -> bytes:
    return unary("XNNNegate", (2**31 - 1,) * 4, (2**31 - 1,) * 4)


@file("resize-to-gigapixels.fb")
def _() -> bytes:
    size = 2**18
    return unary("XNNStaticResizeBilinear2D", (1, 2, 2, 1), (1, size, size, 1), new_height=size, new_width=size)


@file("many-externs.fb")
def _() -> bytes:
    return bare(num_externs=4_000_000_000)


@file("cycle.fb")
def _() -> bytes:
    nodes = [files.add(0, 3, 2), files.add(2, 1, 3)]
    values = files.values(
        files.plain(0, external=0, flags=1),
        files.plain(1, constant=1),
        files.plain(2, external=1, flags=2),
        files.plain(3),
    )
    return bare(xnodes=nodes, xvalues=values)


@file("dead-chain.fb")
def _() -> bytes:
    nodes = [files.add(0, 1, 2), files.add(0, 1, 3), files.add(3, 1, 4), files.add(4, 3, 5)]
    more = [files.plain(number) for number in (3, 4, 5)]
    values = files.values(
        files.plain(0, external=0, flags=1), files.plain(1, constant=1), files.plain(2, external=1, flags=2), *more
    )
    return bare(xnodes=nodes, xvalues=values)


@file("slice-of-nothing-behind-an-offset.fb")
def _() -> bytes:
    # XNNPACK alone takes a size of 0 for the whole dimension and reads behind the value.
    return unary("XNNStaticSlice", (4, 8), (1, 8), num_dims=2, offsets=[3, 0], sizes=[0, 8])


@file("filter-without-elements.fb")
def _() -> bytes:
    filter = files.plain(1, constant=1, dims=(0, 8))
    values = files.values(files.plain(0, external=0, flags=1), filter, files.plain(2, external=1, flags=2, dims=(1, 0)))
    node = files.node("XNNFullyConnected", input1_id=0, filter_id=1, bias_id=files.NONE, output_id=2, flags=0)
    return bare(xnodes=[node], xvalues=values)


@file("scale-of-zero.fb")
def _() -> bytes:
    quantized = {
        "tensor_value": files.plain(0, external=0, flags=1, datatype=5),
        "quant_params": ("PerTensorQuant", {"scale": 0.0, "zero_point": 0}),
    }
    values = files.values(quantized, files.plain(1, external=1, flags=2))
    return bare(
        xnodes=[files.node("XNNConvert", input_id=0, output_id=1, flags=0)], xvalues=values, constant_buffer=None,
        mem_buffer_sizes=None,
    )  # fmt: skip


@file("scales-of-a-bias.fb")
def _() -> bytes:
    # A bias with more scales than the filter has output channels.
    def quantized(id: int, datatype: int, params: tuple[str, dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {"tensor_value": files.plain(id, datatype=datatype, **more), "quant_params": params}

    def channels(count: int) -> tuple[str, dict[str, Any]]:
        return "PerChannelQuant", {"scale": [0.5] * count, "channel_dim": 0}

    one = ("PerTensorQuant", {"scale": 1.0, "zero_point": 0})
    values = files.values(
        quantized(0, QINT8, one, external=0, flags=1),
        quantized(1, QCINT8, channels(2), constant=1, dims=(2, 8)),
        quantized(2, QCINT32, channels(5), constant=2, dims=(5,)),
        quantized(3, QINT8, one, external=1, flags=2, dims=(1, 2)),
    )
    node = files.node("XNNFullyConnected", input1_id=0, filter_id=1, bias_id=2, output_id=3, flags=0)
    buffers = [{}, {"storage": bytes(16)}, {"storage": bytes(20)}]
    return bare(xnodes=[node], xvalues=values, constant_buffer=buffers, mem_buffer_sizes=None)


@file("constant-behind-the-end.xnnpack")
def _() -> bytes:
    return files.inline(np.ones(8, np.float32).tobytes(), offset=2**64 - 16)


def main() -> None:
    for name, make in MAKERS.items():
        (FOLDER / name).write_bytes(make())
        print(name, (FOLDER / name).stat().st_size)


if __name__ == "__main__":
    main()
