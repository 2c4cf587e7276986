"""Makes the golden files anew: ``python tests/golden/make.py`` (see README.md for when to)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from xnnfast import writer
from xnnfast.builder import GraphBuilder
from xnnfast.dialects import DIALECTS
from xnnfast.quantization import PerBlock, PerChannel, PerTensor, PerToken

HERE = Path(__file__).resolve().parent


def describe(graph: Any) -> dict[str, Any]:
    """What a file means, in plain JSON: a Graph, or the builder's Parts. Numbers of bytes and places are left out."""
    return {
        "inputs": [value.id for value in graph.inputs],
        "outputs": [value.id for value in graph.outputs],
        "values": [_value(value) for value in graph.values],
        "nodes": [_node(node) for node in graph.nodes],
    }


def _value(value: Any) -> dict[str, Any]:
    return {
        "id": value.id,
        "datatype": value.datatype,
        "shape": list(value.shape),
        "quantization": _quantization(value.quantization),
        "external_id": value.external_id,
        "is_input": value.is_input,
        "is_output": value.is_output,
        "dq_datatype": value.dq_datatype,
        "constant": None if value.constant is None else bytes(value.constant.data[:value.nbytes]).hex(),
    }


def _quantization(params: Any) -> list[Any] | None:
    if params is None:
        return None
    if isinstance(params, PerTensor | PerToken):
        return [type(params).__name__, *params]
    more = [params.block_size] if isinstance(params, PerBlock) else []
    return [type(params).__name__, params.scales.tolist(), params.axis, *more]


def _node(node: Any) -> dict[str, Any]:
    return {
        "op": node.op.name,
        "inputs": list(node.inputs),
        "outputs": list(node.outputs),
        # A reader may also give fields that the kind has no use for.
        "attrs": {name: list(value) if isinstance(value, tuple) else value
                  for name, value in sorted(node.attrs.items()) if name in node.op.attrs},
        "flags": node.flags,
        "clamp": None if node.clamp is None else [str(limit) if math.isinf(limit) else limit for limit in node.clamp],
        "debug_handle": node.debug_handle,
    }


# ---- the graphs


def add() -> GraphBuilder:
    b = GraphBuilder()
    b.output(b.add(b.input((2, 3)), b.input((3,)), debug_handle=7))
    return b


def add_constant() -> GraphBuilder:
    b = GraphBuilder()
    b.output(b.add(b.input((1, 3)), np.array([1, 2, 3], np.float32)))
    return b


def add_constant_clamped() -> GraphBuilder:
    b = GraphBuilder()
    b.output(b.add(b.input((1, 3)), np.array([1, 2, 3], np.float32), clamp=(None, 6)))
    return b


def dynamic_input() -> GraphBuilder:
    b = GraphBuilder()
    x = b.input((2, 4), dq_datatype="qint8")
    weights = b.constant(np.arange(-6, 6, dtype=np.int8).reshape(3, 4), quantization=PerChannel([0.5, 0.25, 2], 0))
    b.output(b.fully_connected(x, weights, np.array([1, 0, -1], np.float32)))
    return b


def convolution() -> GraphBuilder:
    b = GraphBuilder()
    x = b.input((1, 4, 5, 1), "qint8", PerTensor(0.5, -3))
    weights = b.constant(np.arange(-6, 6, dtype=np.int8).reshape(2, 3, 2, 1), quantization=PerChannel([0.5, 0.25], 0))
    y = b.conv2d(x, weights, np.array([4, -4], np.int32), padding=(1, 0, 2, 1), stride=(2, 1),
                 quantization=PerTensor(1.5, 4))
    b.output(b.convert(b.static_transpose(y, (0, 3, 1, 2)), "fp32"))
    return b


def four_bits() -> GraphBuilder:
    b = GraphBuilder()
    rows = b.convert(b.input((1, 32)), "qdint8", PerToken(1))
    weights = b.constant((np.arange(64, dtype=np.int8) % 16 - 8).reshape(2, 32),
                         quantization=PerBlock(np.array([0.5, 2], np.float32), 0, 32))
    b.output(b.fully_connected(rows, weights))
    return b


def misaligned() -> tuple[GraphBuilder, bytes]:
    """As the seed's own writer stored constants: aligned for their length alone, the whole storage of a view."""
    b = add_constant()
    parts = b.parts()
    plan = writer._Plan(parts, DIALECTS["seed"], "bare", None)
    tree = {
        "version": writer.SEED_VERSION, "num_externs": 2, "input_ids": [0], "output_ids": [2],
        "xnodes": [plan.node(parts.nodes[0])],
        "xvalues": [plan.value(value, plan.external_ids(), plan.constant_sizes()) for value in parts.values],
    }
    # Where a vector falls depends on what follows it, here on its own length.
    for more in range(1, 5):
        storage = bytes(parts.values[1].constant.data) + np.arange(9, 9 + more, dtype=np.float32).tobytes()
        encoder = writer._Encoder("seed")
        encoder.aligned = {}
        data = encoder.finish(tree | {"constant_buffer": [{}, {"storage": storage}],
                                      "mem_buffer_sizes": [0, len(storage)]}, "XNNGraph", None)
        if data.find(storage) % 16 == 4:
            return b, data
    raise AssertionError("no length puts the constant where it was wanted")


#: File name without ending -> the graph, and how it is written.
FILES: dict[str, tuple[Callable[[], GraphBuilder], dict[str, Any]]] = {
    "seed-bare-add": (add, {"dialect": "seed"}),
    "xn00-bare-add-constant": (add_constant_clamped, {"dialect": "xn00"}),
    "xn00-XH00-dynamic-input": (dynamic_input, {"dialect": "xn00", "container": "XH00"}),
    "xn01-XH00-convolution": (convolution, {"scales": "constant"}),
    "xn01-XH00-four-bits": (four_bits, {}),
}


def write(name: str, builder: GraphBuilder, data: bytes) -> None:
    (HERE / f"{name}.bin").write_bytes(data)
    # One value or node a line.
    groups = [f" {json.dumps(key)}: [\n  " + ",\n  ".join(map(json.dumps, group)) + "\n ]"
              for key, group in describe(builder.parts()).items()]
    (HERE / f"{name}.json").write_text("{\n" + ",\n".join(groups) + "\n}\n")


if __name__ == "__main__":
    for name, (make, options) in FILES.items():
        builder = make()
        write(name, builder, writer.to_bytes(builder.parts(), **options))
    write("seed-bare-misaligned", *misaligned())
