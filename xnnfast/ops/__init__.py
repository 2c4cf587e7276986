"""All operators, one row each, by name and by the schema's name; and what every node must pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import attention, convolution, elementwise, matmul, movement, pooling
from ._quant import limits, operand_type
from ._row import Op, Refusal, Shape
from ._rules import ENGINE

__all__ = ["BY_KIND", "OPS", "Op", "Refusal", "Shape", "check_op", "normalize", "operand_type", "packed"]

#: Our name -> row.
OPS: dict[str, Op] = {
    op.name: op
    for family in (elementwise, attention, matmul, convolution, pooling, movement)
    for op in family.OPS
}

#: Member of the schema's node union -> row.
BY_KIND: dict[str, Op] = {op.kind: op for op in OPS.values() if op.kind is not None}

_MATMULS = frozenset(op.name for family in (matmul, convolution, pooling, attention) for op in family.OPS)


def check_op(node: Any, ins: Sequence[Any], outs: Sequence[Any]) -> None:
    """Raise Refusal unless XNNPACK computes what the node says, as far as shapes are not concerned.

    ``ins`` and ``outs`` are values (None for an absent optional input), ``node.op`` is the row.
    """
    op = node.op
    if len(ins) != len(op.inputs) or len(outs) != len(op.outputs):
        raise Refusal(f"{op.name} has {len(ins)} inputs and {len(outs)} outputs, need {len(op.inputs)} and "
                      f"{len(op.outputs)}")
    for name, value in zip(op.inputs, ins):
        if value is None and name not in op.optional:
            raise Refusal(f"{name} is absent, {op.name} needs it")
    types = (*map(operand_type, ins), *map(operand_type, outs))
    if types not in op.datatypes:
        raise Refusal(_illegal(op, types))
    if node.flags & ~op.flags:
        takes = f"takes {_bits(op.flags)}" if op.flags else "takes none"
        raise Refusal(f"flags are {node.flags:#x}, {op.name} {takes}")
    for name in op.unused:
        # 0 is an absent field and 1 does nothing as a dilation; anything else would be dropped.
        if not name.endswith("_id") and node.attrs.get(name, 0) not in ((0, 1) if "dilation" in name else (0,)):
            raise Refusal(f"{name} is {node.attrs[name]}, {op.name} has no use for it")
    limits(node, outs)
    if op.check is not None:
        op.check(node, ins, outs)


def _bits(mask: int) -> str:
    return " ".join(f"{1 << bit:#x}" for bit in range(mask.bit_length()) if mask >> bit & 1)


def _illegal(op: Op, types: tuple[str, ...]) -> str:
    names = [name.removesuffix("_id") for name in (*op.inputs, *op.outputs)]
    found = ", ".join(f"{name} {each}" for name, each in zip(names, types) if each != "-")
    if "bf16" in types and op.name in _MATMULS:
        return f"{op.name} in bf16 ({found}) needs a newer engine than {ENGINE}"
    if "filter_id" in op.inputs and types[0] == types[1] == "fp16":
        return f"{op.name} of fp16 needs an fp32 filter and bias, found {found}"
    # The combinations that differ in the fewest operands are the ones meant.
    distance = {row: sum(one != two for one, two in zip(row, types)) for row in op.datatypes}
    near = [row for row, count in distance.items() if count == min(distance.values())][:4]
    needed = " or ".join("/".join(each for each in row if each != "-") for row in near)
    return f"{op.name} has {found}; it needs {needed}{', ...' if len(near) < len(op.datatypes) else ''}"


def normalize(node: Any, ins: Sequence[Shape | None], outs: Sequence[Shape]) -> Any:
    """The node with everything spelled out that a file may leave to the declared shapes.

    ``ins`` and ``outs`` are declared shapes. Today: KEEP_DIMS of global_average_pooling2d and a
    size of 0 in static_slice. The shape rules read only what is spelled out.
    """
    return node if node.op.normalize is None else node.op.normalize(node, ins, outs)


def packed(node: Any, ins: Sequence[Any]) -> tuple[int, ...]:
    """Positions of the constant inputs that XNNPACK packs at creation; it reads other constants at every run."""
    op = node.op
    if not op.packed or any(ins[position] is not None and ins[position].constant is None for position in op.packed):
        # One operand that is not constant makes XNNPACK read all of them when it runs.
        return ()
    if op.name == "batch_matrix_multiply" and ins[1].datatype == "fp16":
        return ()
    return tuple(position for position in op.packed if ins[position] is not None)
