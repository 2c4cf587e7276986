"""docs/operators.md is what the rows say, and the rows' ranks are what the shape rules say."""

import subprocess
import sys
from pathlib import Path

import pytest
from op_cases import case

from xnnfast.ops import OPS, Refusal

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "operators.md"


def test_the_document_is_up_to_date():
    done = subprocess.run([sys.executable, ROOT / "schema" / "opdocs.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, f"run python schema/opdocs.py {done.stderr}"


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.kind])
def test_every_operator_has_its_line(name):
    text = DOCUMENT.read_text("utf-8")
    op = OPS[name]
    assert (f"| **{name}** | {op.kind} |" in text) != (f"### {name}\n\n* **kind:** {op.kind}\n" in text)
    assert op.nan.rstrip(".") in text
    for types in op.datatypes:
        assert all(type in text for type in types)


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.kind])
def test_ranks_are_those_of_the_shape_rules(name):
    op = OPS[name]
    made = case(name, next(types for types in op.datatypes if "-" not in types))
    shapes = [made.graph.value(value).shape for value in made.node.inputs]
    assert len(op.ranks) in (1, len(op.inputs))
    for position, shape in enumerate(shapes):
        low, high = op.ranks[min(position, len(op.ranks) - 1)]
        assert low <= len(shape) <= high <= 6
        for rank in {low - 1, *([high + 1] if high < 6 else [])} - {-1}:
            # As many of the last dimensions as there are, ones before.
            other = ((1,) * 6 + shape)[len(shape) + 6 - rank:]
            with pytest.raises(Refusal):
                op.shape(made.node, [*shapes[:position], other, *shapes[position + 1:]])


def test_what_all_weighted_operators_need_is_said_of_each():
    for name in ("fully_connected", "conv2d", "depthwise_conv2d", "conv_transpose2d"):
        assert OPS[name].bounds[0].startswith("8 bits: input scale * filter scale / output scale")
