"""Writes docs/operators.md from the operators' rows; ``--check`` only tells whether the file is up to date.

In come the rows, read from their folder so that nothing has to be compiled; out goes a line or a section per operator.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import lowering

DOCUMENT = lowering.HERE.parent / "docs" / "operators.md"

#: Title, which rows (what an earlier family took is gone), and whether a table holds them.
FAMILIES = (
    ("Two inputs, element by element", lambda op: op.call == "xnn_define_binary", True),
    ("One input, element by element", lambda op: op.call in ("xnn_define_unary", "xnn_define_copy"), True),
    ("Matrix products and attention", lambda op: op.name in (
        "softmax", "fully_connected", "batch_matrix_multiply", "scaled_dot_product_attention"), False),
    ("Convolutions", lambda op: "conv" in op.name, False),
    ("Pools", lambda op: "pooling" in op.name, True),
    ("Moving elements", lambda op: True, True),
)

HEAD = """\
# Operators

<!-- Made from the rows in xnnfast/ops by schema/opdocs.py. Change them, then run it. -->

What {engine} computes for each node kind, and what xnnfast refuses because it would not. Said once, it goes for all:

* **Ranks** are up to 6. Operators of two inputs stretch dimensions of 1 and missing ones as NumPy does. Declared
  shapes are compared with computed ones when a graph is opened; a new shape of an input goes through the same rules.
* **A batch of 0** is answered without XNNPACK.
* **Constants** are read where they lie in the file at every run, except those that are *packed*: copied once, in the
  order that kernels want, when the first runtime is made.
* **Limits** (`output_min_max`) may stand on every kind. Where they are *inside* the operator they cost nothing, and a
  Clamp node that follows alone is folded in. Elsewhere they are one more pass. An int32 result needs limits that are
  int32, qdint8 and qint32 take none, and limits that fp16 can't tell apart are refused where they are inside.
* **8-bit results** are those of `xnnfast.reference`, number for number, on x86-64; on other CPUs they may differ by a
  step. Layers, multiplication and means sum exactly and round once, ties to even. Addition, subtraction, leaky ReLU,
  resizing and Convert between 8-bit types use fixed-point factors: within a step of the real result. Other functions
  come out of tables that were made in float32.
* **fp16** sums are made in fp16 where the CPU has instructions for it, in fp32 elsewhere.
* **qdint8** is made by Convert at run time: each row of the last n axes gets a scale and zero point of its own, so
  results are within 1 % of the row's largest number.
* **bf16** runs in reference code, which drops the low half of a float32. Matrix products, convolutions and pools in
  bf16 need a newer engine.
* **Denormals** count as zero, and become zero, while XNNPACK runs. The caller's floating-point mode is restored.
* **NaN** survives where the operator says so. `Runtime(..., check_finite=True)` looks for NaN and infinities in float
  inputs before a run and in float outputs after it, and raises NotFiniteError. It does not look at constants.
"""


def render(ops: Iterable[Any], engine: str, packed: Any) -> str:
    rest = [op for op in ops if op.kind is not None]
    parts = [HEAD.format(engine=engine)]
    for title, belongs, tabular in FAMILIES:
        members = [op for op in rest if belongs(op)]
        rest = [op for op in rest if op not in members]
        parts.append(f"\n## {title}\n")
        properties = {op: facts(op, packed) for op in members}
        parts += table(properties) if tabular else [section(op, known) for op, known in properties.items()]
    return "".join(parts)


def facts(op: Any, packed: Any) -> dict[str, str]:
    return {
        "kind": op.kind, "computes": plain(op.doc), "call": f"`{op.call}`" if op.call else "made of other calls",
        "inputs": inputs(op), "datatypes": datatypes(op),
        "constants": constants(op, packed), "limits": limits(op), "flags": flags(op) or "none",
        "NaN": plain(op.nan.rstrip(".")),
    }


def plain(text: str) -> str:
    """Text in which Markdown finds no emphasis, and no column."""
    return re.sub(r"\d+\*\*-?\d+", lambda power: f"`{power[0]}`", text).replace("|", "\\|")


def table(properties: Mapping[Any, dict[str, str]]) -> list[str]:
    """What all have in common, a table of what differs, and what single ones need."""
    columns = list(next(iter(properties.values())))
    common = [name for name in columns if name not in ("kind", "computes")
              and len({known[name] for known in properties.values()}) == 1]
    own = [name for name in columns if name not in common]
    first = next(iter(properties.values()))
    parts = [f"\n* **{name}:** {first[name]}\n" if not number else f"* **{name}:** {first[name]}\n"
             for number, name in enumerate(common)]
    parts.append(f"\n| operator | {' | '.join(own)} |\n|{'---|' * (len(own) + 1)}\n")
    parts += [f"| **{op.name}** | {' | '.join(known[name] for name in own)} |\n" for op, known in properties.items()]
    needs: dict[str, list[str]] = {}
    for op in properties:
        for bound in op.bounds:
            needs.setdefault(bound, []).append(op.name)
    if needs:
        parts.append("\nBesides:\n\n")
        parts += [f"* {', '.join(names)}: {plain(bound)}\n" for bound, names in needs.items()]
    return parts


def section(op: Any, known: Mapping[str, str]) -> str:
    lines = [f"* **{name}:** {text}\n" for name, text in known.items()]
    return f"\n### {op.name}\n\n{''.join(lines)}{''.join(f'* {plain(bound)}{chr(10)}' for bound in op.bounds)}"


def name_of(field: str) -> str:
    return field.removesuffix("_id")


def inputs(op: Any) -> str:
    if len(op.ranks) == 1:
        return f"{ranks(op.ranks[0])}{' each' if len(op.inputs) > 1 else ''}"
    return "; ".join(f"{name_of(field)} {ranks(pair)}{' (optional)' if field in op.optional else ''}"
                     for field, pair in zip(op.inputs, op.ranks))


def ranks(pair: tuple[int, int]) -> str:
    low, high = pair
    return f"rank {low}" if low == high else f"rank {low} to {high}"


def datatypes(op: Any) -> str:
    if all(len(set(row)) == 1 for row in op.datatypes):
        return ", ".join(row[0] for row in op.datatypes)
    if all(len(row) == 2 for row in op.datatypes):
        # Convert: by what comes in.
        targets: dict[tuple[str, ...], list[str]] = {}
        for source in dict.fromkeys(row[0] for row in op.datatypes):
            targets.setdefault(tuple(row[1] for row in op.datatypes if row[0] == source), []).append(source)
        return "; ".join(f"{', '.join(sources)} to {', '.join(made)}" for made, sources in targets.items())
    rows = [row for row in op.datatypes if "-" not in row]
    assert len({"-" in row for row in op.datatypes}) == 1 or len(op.datatypes) == 2 * len(rows)
    title = "/".join(name_of(field) for field in (*op.inputs, *op.outputs))
    return f"{title}: {', '.join('/'.join(row) for row in rows)}"


def constants(op: Any, packed: Any) -> str:
    """Which constant operands are packed: a constant for every operand that can be one, type by type."""
    by_type: dict[tuple[int, ...], list[str]] = {}
    for row in op.datatypes:
        ins = [None if datatype == "-" else SimpleNamespace(datatype=datatype, constant=True)
               for datatype in row[:len(op.inputs)]]
        if None not in ins:
            by_type.setdefault(packed(SimpleNamespace(op=op), ins), []).append("/".join(row[:len(op.inputs)]))
    if set(by_type) == {()}:
        return "read in place"
    told = []
    for positions, types in by_type.items():
        where = f" ({', '.join(types)})" if len(by_type) > 1 else ""
        if positions:
            told.append(f"{' and '.join(name_of(op.inputs[position]) for position in positions)} packed{where}")
        else:
            told.append(f"read in place{where}")
    if len(by_type) == 1 and len(next(iter(by_type))) < len(op.inputs):
        told.append("others read in place")
    return "; ".join(told)


def limits(op: Any) -> str:
    if op.name == "clamp":
        return "what the operator is"
    return "inside" if "clamp.min" in op.args else "one more pass"


#: Bit -> name, by the operators that give it that meaning.
FLAGS = (
    (0x01, "transpose weights", ("fully_connected",)), (0x01, "transpose input2", ("batch_matrix_multiply",)),
    (0x04, "reshape to rank 2", ("fully_connected",)), (0x04, "legacy mode", ("static_resize_bilinear2d",)),
    (0x04, "SAME padding", ("conv2d", "depthwise_conv2d", "average_pooling2d", "max_pooling2d", "argmax_pooling2d")),
    (0x08, "align corners", ("static_resize_bilinear2d",)),
    (0x20, "transient indirection buffer", ("conv2d", "depthwise_conv2d", "static_resize_bilinear2d")),
    (0x40, "keep dims", ("average_pooling2d", "max_pooling2d", "global_average_pooling2d")),
)


def flags(op: Any) -> str:
    found = {bit: name for bit, name, members in FLAGS if op.name in members}
    assert sum(found) == op.flags, f"{op.name} has flags {op.flags:#x}, known are {found}"
    return ", ".join(f"{bit:#x} {name}" for bit, name in found.items())


def main(arguments: Sequence[str]) -> int:
    ops = lowering.load_ops()
    package = sys.modules["_xnnfast_rows"]
    text = render(ops.values(), package.ENGINE, package.packed)
    if "--check" in arguments:
        return int(not DOCUMENT.exists() or DOCUMENT.read_text("utf-8") != text)
    DOCUMENT.parent.mkdir(exist_ok=True)
    DOCUMENT.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
