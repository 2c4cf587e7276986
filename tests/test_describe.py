"""describe.py: a graph as data that JSON can hold, and as text."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from xnnfast import describe as d
from xnnfast._graph import Constant, Graph, Node, Value
from xnnfast.builder import GraphBuilder
from xnnfast.ops import OPS
from xnnfast.quantization import PerBlock, PerChannel, PerTensor, PerToken


def graph_with(*constants: Constant) -> Graph:
    """x + c0 + c1 + ..."""
    values = [Value(0, "fp32", (1, 4), is_input=True, external_id=0)]
    nodes = []
    last = 0
    for i, constant in enumerate(constants):
        values.append(Value(10 + i, "fp32", (1, 4), constant=constant))
        end = i == len(constants) - 1
        values.append(Value(20 + i, "fp32", (1, 4), is_output=end, external_id=1 if end else None))
        nodes.append(Node(OPS["add"], (last, 10 + i), (20 + i,), index=i, debug_handle=i * 7))
        last = 20 + i
    return Graph(values, nodes, [values[0]], [values[-1]], source="made.xnn", notes=("something odd",))


def test_copied_constant_says_why() -> None:
    data = np.zeros(4, np.float32)
    graph = graph_with(Constant(data, index=1, offset=0x40), Constant(data, index=2, offset=0x54, reason="4 bytes off"))
    facts = d.describe(graph)
    assert facts["zero_copy"] == {"constants": 2, "in_place": 1, "bytes": 32, "bytes_in_place": 16}
    assert [constant["reason"] for constant in facts["constants"]] == [None, "4 bytes off"]
    text = d.text(facts)
    assert "constants: 1 of 2 in place (16 bytes of 32 bytes)" in text
    assert "at 0x54" in text and "copied: 4 bytes off" in text
    assert "something odd" in text
    assert "handle 7" in text and "handle 0" not in text


def test_constant_used_twice_is_listed_once() -> None:
    shared = Constant(np.zeros(4, np.float32), index=1)
    (constant,) = d.describe(graph_with(shared, shared))["constants"]
    assert constant["values"] == [10, 11]


def test_constant_by_key_is_named_by_it() -> None:
    text = d.text(d.describe(graph_with(Constant(np.zeros(4, np.float32), key="layer.weight"))))
    assert "layer.weight" in text


def test_graph_without_constants() -> None:
    builder = GraphBuilder()
    builder.output(builder.sigmoid(builder.input((1, 4))))
    assert "constants: none" in d.text(d.describe(builder.graph()))


@pytest.mark.parametrize(
    ("params", "facts"),
    [
        (None, None),
        (PerTensor(0.5, 3), {"per": "tensor", "scale": 0.5, "zero_point": 3}),
        (PerTensor(math.nan, 0), {"per": "tensor", "scale": "nan", "zero_point": 0}),
        (PerToken(1), {"per": "token", "num_nonbatch_dims": 1}),
        (
            PerChannel(np.array([0.5, 2], np.float32), 0),
            {"per": "channel", "axis": 0, "scales": 2, "scale_min": 0.5, "scale_max": 2.0},
        ),
        (PerChannel(np.zeros(0, np.float32), 0), {"per": "channel", "axis": 0, "scales": 0}),
        (
            PerBlock(np.array([0x3F80, 0x4000], np.uint16), 0, 32),
            {"per": "block", "axis": 0, "block_size": 32, "scales": 2, "scale_min": 1.0, "scale_max": 2.0},
        ),
    ],
)
def test_quantization_is_plain_data(params: object, facts: object) -> None:
    assert d._quantization(params) == facts
    json.dumps(d._quantization(params), allow_nan=False)


def test_unknown_quantization_is_not_guessed() -> None:
    with pytest.raises(TypeError, match="unknown quantization"):
        d._quantization("per hour")


def test_limits_without_end_are_written_as_words() -> None:
    builder = GraphBuilder()
    builder.output(builder.clamp(builder.input((1, 4)), 0, None))
    facts = d.describe(builder.graph())
    assert facts["nodes"][0]["clamp"] == [0.0, "inf"]
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    assert "clamp=[0,inf]" in d.text(facts)


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1 kB"),
        (1_234_567, "1.235 MB"),
        (5 * 10**9, "5 GB"),
        (10**13, "10 TB"),
    ],
)
def test_sizes(nbytes: int, words: str) -> None:
    assert d.size(nbytes) == words


def test_summary_adds_up_the_graphs_of_a_file() -> None:
    data = np.zeros(4, np.float32)
    one = d.describe(graph_with(Constant(data), Constant(data, reason="odd")))
    assert d.summary([]) == "no graphs"
    assert d.summary([one]) == (
        "container memory, dialect xn01, 2 nodes, constants: 1 of 2 in place (16 bytes of 32 bytes), 1 note"
    )
    assert d.summary([one, one]) == (
        "container memory, dialect xn01, 2 graphs, 4 nodes, constants: 2 of 4 in place (32 bytes of 64 bytes), 2 notes"
    )
