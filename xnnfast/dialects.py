"""Which revision of the schema a section's flatbuffer is written in, and what its numbers mean.

In comes a Section; out come its Dialect and a verified FlatBuffer. Number 4 is a 32-bit type in the
seed and an 8-bit one later, so a datatype is read with its own dialect's table and travels by name.
"""

from __future__ import annotations

from dataclasses import dataclass

from ._flatbuf import FlatBuffer
from ._flatbuf import verify as verify_flatbuffer
from ._generated import schema
from .caps import DEFAULT_LIMITS, Limits
from .containers import GRAPH_IDENTIFIERS, Section
from .errors import ArgumentError, FormatError


@dataclass(frozen=True, eq=False)
class Dialect:
    """A revision of the graph schema."""

    #: ``"seed"``, ``"xn00"`` or ``"xn01"``.
    name: str
    #: Which of the schema's field tables it is read by.
    key: str
    #: Bytes 4..8 of the flatbuffer, None for the seed.
    identifier: bytes | None

    @property
    def datatypes(self) -> dict[int, str]:
        """Number in the file -> name."""
        return schema.DATATYPES[self.key]


DIALECTS: dict[str, Dialect] = {
    dialect.name: dialect
    for dialect in (Dialect("seed", "seed", None), Dialect("xn00", "xnn", b"XN00"), Dialect("xn01", "xnn", b"XN01"))
}


def verify(section: Section, dialect: str | None = None, limits: Limits = DEFAULT_LIMITS) -> tuple[Dialect, FlatBuffer]:
    """The dialect of a section and its flatbuffer, every offset of which has been checked.

    An identifier decides. Without one only the seed is left, and it must fit: every node an add, every
    value a plain tensor, nothing in a slot that later dialects added. ``dialect`` names one outright.
    """
    identifier = section.identifier if section.nbytes >= 8 else b""
    if dialect is not None:
        if dialect not in DIALECTS:
            raise ArgumentError(f"need a dialect of {', '.join(DIALECTS)}, found {dialect!r}")
        chosen = DIALECTS[dialect]
    elif identifier in GRAPH_IDENTIFIERS:
        chosen = DIALECTS[identifier.decode().lower()]
    elif len(identifier) == 4 and all(0x20 < byte < 0x7F for byte in identifier):
        # No seed file has text there: a vtable, a table or padding follows the root offset.
        raise FormatError(
            f"need identifier XN00 or XN01, or none, found {identifier.decode()}", offset=section.offset + 4
        )
    else:
        chosen = DIALECTS["seed"]
    if chosen.key == "seed" and section.constants is not None:
        raise FormatError("need no XH00 header around the seed dialect, found one", offset=section.offset)
    try:
        buffer = verify_flatbuffer(
            section.payload,
            section.offset,
            section.nbytes,
            chosen.key,
            closed=chosen.key == "seed",
            max_depth=limits.max_depth,
            max_tables=limits.max_tables,
            max_shared=limits.max_shared,
        )
    except FormatError as error:
        if chosen.key != "seed" or dialect is not None:
            raise
        told = FormatError(
            f"no identifier XN00 or XN01, so only the seed dialect is left, and that does not fit: {error}"
        )
        told.offset, told.path = error.offset, error.path
        raise told from None
    return chosen, buffer


def of(section: Section, dialect: str | None = None) -> Dialect:
    """The dialect of a section."""
    return verify(section, dialect)[0]
