"""The form of an operator's row. What an operator is stands in its row, or beside it in the same file.

The rows are read when the package is built (the lowering is generated from them) and when it
runs, so this package imports nothing that is compiled.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Shape = tuple[int, ...]
#: An input's shape is None where it is absent. Rules that read an optional input test for that.
Shapes = Sequence[Any]
#: check(node, input values, output values)
Check = Callable[[Any, Sequence[Any], Sequence[Any]], None]


class Refusal(Exception):
    """What a rule of an operator has against a node; the caller adds which node and raises its own error."""


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """One operator: how it stands in the schema, how it reaches XNNPACK, and its rules.

    ``args`` lists the arguments of the C call between the subgraph and the end, in C order:

    ================ =====================================================================
    ``@name``        a value id; ``@name?`` may be absent. Names that start with
                     ``output`` are outputs, the others inputs, in this order
    ``name``         a scalar attribute (a field of the schema's table)
    ``name[]``       a vector attribute, passed as its length and an array of the element
                     type that the header's prototype names
    ``name[6]``      a vector attribute, passed as an array of six padded with zeros
    ``name/other``   the quotient of two scalar attributes
    ``clamp.min``    the lower limit of the node's output, ``clamp.max`` the upper
    ``&block``       a parameter block: ``&clamp``, ``&limits``, ``&alpha``, ...
    ``=text``        the C text itself
    ``flags``        the node's flags
    ================ =====================================================================
    """

    #: Our name, from XNNPACK's call: ``fully_connected``.
    name: str
    #: Member of the schema's node union, or None for an operator that only lowering makes.
    kind: str | None
    call: str
    args: str
    #: shape(node, input shapes) -> output shapes; raises Refusal. All geometry rules live there.
    shape: Callable[[Any, Shapes], list[Shape]]
    #: Legal combinations of datatypes: inputs then outputs, "-" for an absent optional input.
    datatypes: tuple[tuple[str, ...], ...] = ()
    #: check(node, input values, output values): rules of quantization beyond the combination.
    check: Check | None = None
    #: Bits that the node's flags may have; -1 = forgotten, which stops the build.
    flags: int = -1
    #: One line for the documentation: what it computes.
    doc: str = ""
    #: What this XNNPACK does with NaN and infinities, one line.
    nan: str = ""
    #: Lowest and highest rank of each input; the last entry goes on for the inputs that follow.
    ranks: tuple[tuple[int, int], ...] = ((0, 6),)
    #: For the documentation: what is refused, or differs, although shapes and datatypes fit.
    bounds: tuple[str, ...] = ()
    #: Constant operands at these input positions are packed at creation, the others read in place.
    packed: tuple[int, ...] = ()
    #: Fields of the schema's table that this kind has no use for (the table serves several kinds).
    unused: tuple[str, ...] = ()
    #: normalize(node, input shapes, declared output shapes) -> node: spells out what a file may leave open.
    normalize: Callable[[Any, Shapes, Sequence[Shape]], Any] | None = None
    # Derived from args.
    inputs: tuple[str, ...] = field(init=False)
    optional: frozenset[str] = field(init=False)
    outputs: tuple[str, ...] = field(init=False)
    attrs: tuple[str, ...] = field(init=False)
    takes_clamp: bool = field(init=False)

    def __post_init__(self) -> None:
        inputs: list[str] = []
        outputs: list[str] = []
        attrs: list[str] = []
        optional = set()
        for token in self.args.split():
            if token.startswith("@"):
                name = token[1:].rstrip("?")
                (outputs if name.startswith("output") else inputs).append(name)
                if token.endswith("?"):
                    optional.add(name)
            elif re.fullmatch(r"\w+(\[6?\])?(/\w+)?", token) and token != "flags":
                for name in re.sub(r"\[6?\]", "", token).split("/"):
                    if name not in attrs:
                        attrs.append(name)
        for token in self.args.split():
            if token == "&alpha":
                attrs.append("alpha")
            elif token == "&negative_slope":
                attrs.append("negative_slope")
        setattr_ = object.__setattr__
        setattr_(self, "inputs", tuple(inputs))
        setattr_(self, "optional", frozenset(optional))
        setattr_(self, "outputs", tuple(outputs))
        setattr_(self, "attrs", tuple(attrs))
        setattr_(self, "takes_clamp", "clamp.min" in self.args or "&clamp" in self.args or "&limits" in self.args)

    def __repr__(self) -> str:
        return f"Op({self.name})"

    def __reduce__(self) -> Any:
        return (_by_name, (self.name,))


def _by_name(name: str) -> Op:
    from . import OPS

    return OPS[name]
