"""Files taken apart and put together again: trees of fields, containers around them, and where each number lies.

``parse(data)`` gives a form whose trees may be changed, ``form.bytes()`` makes a file of it, whatever it means.
``spots(data)`` lists every number of a good file (scalars, counts, references, vtables, headers) by offset, so
that a change of one costs nothing. Every dialect and container: bare, seed, XH00, ``.pte``, ``.ptd``, bundled.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from xnnfast import _flatbuf
from xnnfast._generated import schema
from xnnfast._payload import Payload
from xnnfast.writer import encode

WIDTHS = {"bool": 1, "i8": 1, "u8": 1, "i16": 2, "u16": 2, "i32": 4, "u32": 4, "f32": 4, "i64": 8, "u64": 8, "f64": 8}
KEYS = {b"XN00": "xnn", b"XN01": "xnn", b"ET12": "program", b"FT01": "flat_tensor", b"BP08": "bundled"}
HEADERS = {b"ET12": (b"eh00", 32), b"FT01": (b"FH01", 48)}


# ---- trees


def tree_of(table: _flatbuf.Table, key: str) -> dict[str, Any]:
    """A table and all below it as nested dictionaries, in the words of ``writer.encode``."""
    made: dict[str, Any] = {}
    rows = schema.TABLES[key][table.kind]
    unions = {field for field, _, kind, *_ in rows if kind == "union"}
    for field, _, kind, scalar, _, target in rows:
        if not table.has(field) or (field.removesuffix("_type") in unions and field not in unions):
            continue
        value = table.get(field)
        if kind == "table":
            value = tree_of(value, key)
        elif kind == "union":
            # By its number: several members may be the same table.
            number = table.get(field + "_type")
            member = next(name for ordinal, name, _ in schema.UNIONS[key][target] if ordinal == number)
            value = (member, tree_of(value, key))
        elif kind == "vector_table":
            value = [tree_of(each, key) for each in value]
        elif kind == "vector_scalar" and scalar == "u8":
            value = bytes(value)
        elif kind in ("vector_scalar", "vector_string"):
            value = list(value)
        made[field] = value
    return made


class Flat:
    """One flatbuffer."""

    def __init__(self, key: str, identifier: bytes | None, tree: dict[str, Any]) -> None:
        self.key, self.identifier, self.tree = key, identifier, tree

    def bytes(self) -> bytes:
        return encode(self.tree, schema_key=self.key, identifier=self.identifier)

    def flats(self) -> Iterator[Flat]:
        yield self


class Headed:
    """A graph behind an XH00 header, its constants in an area."""

    def __init__(self, flat: Flat, area: bytes) -> None:
        self.flat, self.area = flat, area

    def bytes(self) -> bytes:
        flat = self.flat.bytes()
        start = 32 + len(flat) + -len(flat) % 16
        head = struct.pack("<4x4sHIIIQ", b"XH00", 30, 32, len(flat), start, len(self.area))
        return head.ljust(32, b"\0") + flat.ljust(start - 32, b"\0") + self.area

    def flats(self) -> Iterator[Flat]:
        yield self.flat


class Segmented:
    """A program or data file: a flatbuffer with segments behind it. Without a header nothing is behind it."""

    def __init__(self, flat: Flat, parts: list[Any], headed: bool) -> None:
        self.flat, self.parts, self.headed = flat, parts, headed

    def bytes(self) -> bytes:
        assert self.flat.identifier is not None
        magic, room = HEADERS[self.flat.identifier]
        if not self.headed:
            return self.flat.bytes()
        segments = [part if isinstance(part, bytes) else part.bytes() for part in self.parts]
        places, at = [], 0
        for number, each in enumerate(segments):
            known = self.flat.tree.get("segments", [])
            old = known[number] if number < len(known) else {}
            # What a mutation put there stays, in its own terms.
            places.append({**old, "offset": old.get("shift", 0) + at, "size": len(each) + old.get("grow", 0)})
            at += len(each) + -len(each) % 16
        for place in places:
            place.pop("shift", None)
            place.pop("grow", None)
            place["offset"] %= 1 << 64
            place["size"] %= 1 << 64
        tree = {**self.flat.tree, "segments": places}
        flat = encode(tree, schema_key=self.flat.key, identifier=self.flat.identifier)
        size = len(flat) + room
        base = size + -size % 16
        if magic == b"eh00":
            header = struct.pack("<4sIQQQ", magic, 32, size, base, at)
        else:
            header = struct.pack("<4sIQQQQ", magic, 40, 48, size - 48, base, at)
        (root,) = struct.unpack_from("<I", flat)
        whole = struct.pack("<I", root + room) + flat[4:8] + header.ljust(room, b"\0") + flat[8:]
        return whole.ljust(base, b"\0") + b"".join(each.ljust(len(each) + -len(each) % 16, b"\0") for each in segments)

    def flats(self) -> Iterator[Flat]:
        yield self.flat
        for part in self.parts:
            if not isinstance(part, bytes):
                yield from part.flats()


class Bundle:
    """A bundled program, which holds a program."""

    def __init__(self, flat: Flat, program: Any) -> None:
        self.flat, self.program = flat, program

    def bytes(self) -> bytes:
        tree = {**self.flat.tree, "program": self.program.bytes()}
        return encode(tree, schema_key="bundled", identifier=b"BP08")

    def flats(self) -> Iterator[Flat]:
        yield self.flat
        yield from self.program.flats()


def parse(data: bytes) -> Any:
    """A good file as a form."""
    magic = bytes(data[4:8])
    if magic == b"XH00":
        _, at, size, area, area_size = struct.unpack_from("<HIIIQ", data, 8)
        return Headed(_flat(data[at : at + size]), bytes(data[area : area + area_size]))
    if magic == b"BP08":
        flat = _flat(data)
        return Bundle(flat, parse(flat.tree.pop("program")))
    if magic in HEADERS:
        size, base, headed = _header(data, magic)
        flat = _flat(data, size)
        parts = []
        for place in flat.tree.get("segments", ()):
            part = data[base + place.get("offset", 0) : base + place.get("offset", 0) + place.get("size", 0)]
            parts.append(parse(part) if part[4:8] in (b"XH00", b"XN00", b"XN01") else part)
        if headed:
            flat.tree["segments"] = [{} for _ in parts]
        return Segmented(flat, parts, headed)
    return _flat(data)


def _header(data: bytes, magic: bytes) -> tuple[int, int, bool]:
    """(bytes of flatbuffer, start of the segments, whether there is a header)."""
    if data[8:12] != HEADERS[magic][0]:
        return len(data), len(data), False
    if magic == b"ET12":
        size, base = struct.unpack_from("<QQ", data, 16)
        return size, base, True
    at, size, base = struct.unpack_from("<QQQ", data, 16)
    return at + size, base, True


def _key(data: bytes) -> str:
    key = KEYS.get(bytes(data[4:8]), "seed")
    if key == "flat_tensor":
        try:
            root = _flatbuf.verify(Payload.open(data), 0, len(data), "flat_tensor_v06").root
            if root.has("segments") or root.has("named_data"):
                return "flat_tensor_v06"
        except ValueError:
            pass
    return key


def _flat(data: bytes, size: int | None = None) -> Flat:
    key = _key(data)
    buffer = _flatbuf.verify(Payload.open(data), 0, len(data) if size is None else size, key)
    identifier = bytes(data[4:8])
    return Flat(key, identifier if identifier in KEYS else None, tree_of(buffer.root, key))


# ---- spots


class Spot(NamedTuple):
    """Where a number is: offset, bytes, and what it is."""

    at: int
    width: int
    #: A scalar type, or ``"count"``, ``"reference"``, ``"table"``, ``"vtable"``, ``"text"``, ``"header"``.
    kind: str
    field: str


def spots(data: bytes, base: int = 0) -> list[Spot]:
    """Every number of a good file."""
    magic = bytes(data[base + 4 : base + 8])
    found = [Spot(base, 4, "reference", "root")]
    if magic == b"XH00":
        found = [Spot(base + at, width, "header", "XH00") for at, width in ((8, 2), (10, 4), (14, 4), (18, 4), (22, 8))]
        (at,) = struct.unpack_from("<I", data, base + 10)
        return found + spots(data, base + at)
    key = _key(data[base:])
    root = base + struct.unpack_from("<I", data, base)[0]
    _walk(data, root, key, schema.ROOTS[key], found, set())
    if magic in HEADERS and data[base + 8 : base + 12] == HEADERS[magic][0]:
        places = ((12, 4), (16, 8), (24, 8), (32, 8), (40, 8))[: 4 if magic == b"ET12" else 5]
        found += [Spot(base + at, width, "header", "segments") for at, width in places]
        size, segments, _ = _header(data[base:], magic)
        buffer = _flatbuf.verify(Payload.open(data), base, size, key)
        for at, length in buffer.root.rows("segments", "offset", "size"):
            start = base + segments + at
            if length > 8 and data[start + 4 : start + 8] in (b"XH00", b"XN00", b"XN01"):
                found += spots(data[: start + length], start)
    if magic == b"BP08":
        span = _flatbuf.verify(Payload.open(data), base, len(data) - base, key).root.span("program")
        if span is not None:
            found += spots(data[: span[0] + span[1]], span[0])
    return found


def _walk(data: bytes, at: int, key: str, table: str, found: list[Spot], seen: set[int]) -> None:
    if at in seen:
        return
    seen.add(at)
    found.append(Spot(at, 4, "table", table))
    vtable = at - struct.unpack_from("<i", data, at)[0]
    (size,) = struct.unpack_from("<H", data, vtable)
    found += [Spot(vtable + place, 2, "vtable", table) for place in range(0, size, 2)]
    members = {}
    for field, slot, kind, scalar, _, target in schema.TABLES[key][table]:
        if 4 + 2 * slot >= size:
            continue
        (offset,) = struct.unpack_from("<H", data, vtable + 4 + 2 * slot)
        if not offset:
            continue
        place, name = at + offset, f"{table}.{field}"
        if kind == "scalar":
            found.append(Spot(place, WIDTHS[scalar], scalar, name))
            members[field] = data[place]
            continue
        found.append(Spot(place, 4, "reference", name))
        there = place + struct.unpack_from("<I", data, place)[0]
        if kind == "table":
            _walk(data, there, key, target, found, seen)
        elif kind == "union":
            number = members.get(field + "_type", 0)
            name = next(name for ordinal, _, name in schema.UNIONS[key][target] if ordinal == number)
            _walk(data, there, key, name, found, seen)
        else:
            _elements(data, there, key, kind, scalar, target, name, found, seen)


def _elements(
    data: bytes, at: int, key: str, kind: str, scalar: str, target: str, name: str, found: list[Spot], seen: set[int]
) -> None:
    (count,) = struct.unpack_from("<I", data, at)
    found.append(Spot(at, 4, "count", name))
    if kind == "string":
        found += [Spot(at + 4 + place, 1, "text", name) for place in range(min(count, 16))]
    elif kind == "vector_scalar":
        width = WIDTHS[scalar]
        found += [Spot(at + 4 + width * place, width, scalar, name) for place in range(min(count, 16))]
    else:
        for place in range(count):
            slot = at + 4 + 4 * place
            found.append(Spot(slot, 4, "reference", name))
            there = slot + struct.unpack_from("<I", data, slot)[0]
            if kind == "vector_table":
                _walk(data, there, key, target, found, seen)
            else:
                _elements(data, there, key, "string", "u8", "", name, found, seen)
