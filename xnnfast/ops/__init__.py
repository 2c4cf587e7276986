"""All operators, one row each, by name and by the schema's name."""

from __future__ import annotations

from . import attention, convolution, elementwise, matmul, movement, pooling
from ._row import Op, Refusal, Shape

__all__ = ["BY_KIND", "OPS", "Op", "Refusal", "Shape"]

#: Our name -> row.
OPS: dict[str, Op] = {
    op.name: op
    for family in (elementwise, attention, matmul, convolution, pooling, movement)
    for op in family.OPS
}

#: Member of the schema's node union -> row.
BY_KIND: dict[str, Op] = {op.kind: op for op in OPS.values() if op.kind is not None}
