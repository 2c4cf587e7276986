"""Changes of files that know what they change: field values, ids, dims, offsets, lengths, tables, whole parts.

``Mutator(seeds).case(number)`` is a broken file, always the same one for the same number and seed.
"""

from __future__ import annotations

import contextlib
import copy
import random
import struct
from typing import Any

import forms

from xnnfast import XnnfastError, load_all
from xnnfast._generated import schema

RANGES = {
    "bool": (0, 1), "i8": (-128, 127), "u8": (0, 255), "i16": (-(2**15), 2**15 - 1), "u16": (0, 2**16 - 1),
    "i32": (-(2**31), 2**31 - 1), "u32": (0, 2**32 - 1), "i64": (-(2**63), 2**63 - 1), "u64": (0, 2**64 - 1),
}  # fmt: skip
WHOLE = (
    *range(-2, 20), 31, 32, 33, 63, 64, 65, 127, 128, 255, 256, 257, 4095, 4096, 65535, 65536, 65537, 2**20, 2**24,
    2**27, 2**30, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2, 2**32 - 1, 2**32, 2**33, 2**40, 2**62, 2**63 - 1, 2**63,
    2**64 - 1, -128, -(2**31), -(2**63), -100,
)  # fmt: skip
REAL = (
    0.0, -0.0, 1.0, -1.0, 0.5, 6.0, 1e-45, 1e-38, 1.1754944e-38, 3.4e38, -3.4e38, float("inf"), float("-inf"),
    float("nan"), 2.0**-9, 2.0**-33, 256.0, 65504.0, 65536.0, 127.5, 1e9,
)  # fmt: skip
TEXTS = ("", "a", "XnnpackBackend", "forward", "\0", "é" * 9, "x" * 300, "aten::add", "out", "0" * 40)
#: Spots that are no numbers of the file's own.
STRUCTURE = frozenset(("reference", "table", "vtable", "text"))
FLOATS = {"f32": ("<f", 4), "f64": ("<d", 8)}


def loads(data: bytes) -> bool:
    try:
        load_all(data)
    except XnnfastError:
        return bytes(data[4:8]) == b"FT01"
    return True


class Mutator:
    """Broken files made of good ones.

    ``seeds`` are good files, larger ones are left out. ``number`` of a case and ``seed`` decide everything.
    """

    #: Cases that are made of one changed tree: the tree costs far more than a change of its bytes.
    BLOCK = 16

    def __init__(self, seeds: list[bytes], seed: int = 0) -> None:
        self.seed = seed
        self.files = list(seeds)
        self.forms = [forms.parse(data) for data in self.files]
        self.known: dict[int, list[forms.Spot]] = {}
        #: Tables of all seeds by schema and name, to put into others.
        self.tables: dict[tuple[str, str], list[Any]] = {}
        for form in self.forms:
            for flat in form.flats():
                for name, table in _tables(flat.tree, flat.key, schema.ROOTS[flat.key]):
                    self.tables.setdefault((flat.key, name), []).append(table)
        for group in self.tables.values():
            # The most different ones would be better; any do.
            del group[64:]

    def case(self, number: int) -> bytes:
        """The broken file of that number."""
        block, place = divmod(number, self.BLOCK)
        data, spots = self._block(block)
        if place == 0:
            return data
        return self.patch(random.Random(f"{self.seed}:{number}"), data, spots)

    def _block(self, block: int) -> tuple[bytes, list[forms.Spot]]:
        held = getattr(self, "_held", None)
        if held is None or held[0] != block:
            self._held = held = (block, *self._made(block))
        return held[1], held[2]

    def _made(self, block: int) -> tuple[bytes, list[forms.Spot]]:
        rng = random.Random(f"{self.seed}/{block}")
        index = rng.randrange(len(self.files))
        if rng.random() < 0.6:
            form = copy.deepcopy(self.forms[index])
            try:
                for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 5))):
                    self.change(rng, form)
                data = form.bytes()
            except Exception:
                # A change may make what can't be written down, such as a vector of tables in place of a number.
                data = self.files[index]
            else:
                if len(data) > 1 << 16 or (rng.random() < 0.8 and not loads(data)):
                    # Changes of what is refused already are mostly refused for the same reason.
                    data = self.files[index]
                try:
                    return data, forms.spots(data)
                except Exception:
                    return data, [forms.Spot(at, 4, "u32", "") for at in range(0, len(data) - 3, 4)]
        if index not in self.known:
            self.known[index] = forms.spots(self.files[index])
        return self.files[index], self.known[index]

    # -- bytes

    def patch(self, rng: random.Random, data: bytes, spots: list[forms.Spot]) -> bytes:
        """Some numbers changed where they lie."""
        made = bytearray(data)
        for _ in range(rng.choice((1, 1, 1, 1, 2, 2, 3, 6))):
            if not made:
                break
            roll = rng.random()
            if roll < 0.75 and spots:
                spot = rng.choice(spots)
                if spot.kind in STRUCTURE and rng.random() < 0.7:
                    # Of these there are many, and a change of one is mostly seen at once.
                    spot = rng.choice(spots)
                self._spot(rng, made, spot, spots)
            elif roll < 0.82:
                made[rng.randrange(len(made))] ^= 1 << rng.randrange(8)
            elif roll < 0.90:
                at = rng.randrange(len(made)) & ~3
                made[at : at + 4] = struct.pack("<I", rng.choice(WHOLE) & 0xFFFFFFFF)[: len(made) - at]
            elif roll < 0.93:
                del made[rng.randrange(len(made)) :]
            elif roll < 0.96:
                at, to = rng.randrange(len(made)), rng.randrange(len(made))
                length = rng.choice((1, 2, 4, 8, 16, 32, 64))
                piece = made[at : at + length]
                made[to : to + len(piece)] = piece
            elif roll < 0.98:
                at = rng.randrange(len(made))
                made[at:at] = bytes(rng.choice((1, 2, 4, 8, 16)))
            else:
                at = rng.randrange(len(made))
                del made[at : at + rng.choice((1, 2, 4, 8, 16))]
        return bytes(made)

    def _spot(self, rng: random.Random, made: bytearray, spot: forms.Spot, spots: list[forms.Spot]) -> None:
        at, width, kind, _ = spot
        if at + width > len(made):
            return
        old = int.from_bytes(made[at : at + width], "little")
        if kind in FLOATS and rng.random() < 0.8:
            code, width = FLOATS[kind]
            with contextlib.suppress(OverflowError):
                made[at : at + width] = struct.pack(code, rng.choice(REAL))
            return
        roll = rng.random()
        if roll < 0.35:
            new = rng.choice(WHOLE)
        elif roll < 0.6:
            new = old + rng.choice((-2, -1, 1, 2, 4, -4, 8, -8))
        elif roll < 0.85:
            # A number from the same kind of place: another id, another reference.
            other = rng.choice(spots)
            for _ in range(8):
                if other.kind == kind and other.width == width:
                    break
                other = rng.choice(spots)
            if kind in ("reference", "table") and other.width == 4:
                # So that both refer to the same place.
                there = other.at + int.from_bytes(made[other.at : other.at + 4], "little")
                new = there - at
            else:
                new = int.from_bytes(made[other.at : other.at + width], "little")
        elif roll < 0.95:
            new = rng.getrandbits(8 * width)
        else:
            new = old ^ 1 << rng.randrange(8 * width)
        made[at : at + width] = (new & (1 << 8 * width) - 1).to_bytes(width, "little")

    # -- trees

    def change(self, rng: random.Random, form: Any) -> None:
        """One change of one tree of a form, or of what lies around it."""
        flats = list(form.flats())
        flat = rng.choice(flats)
        if isinstance(form, (forms.Segmented, forms.Headed)) and rng.random() < 0.15:
            self._around(rng, form)
            return
        tables = list(_tables(flat.tree, flat.key, schema.ROOTS[flat.key]))
        name, table = rng.choice(tables)
        rows = schema.TABLES[flat.key][name]
        # Mostly something that is there.
        there = [row for row in rows if row[0] in table]
        row = rng.choice(there if there and rng.random() < 0.85 else rows)
        self._field(rng, flat, table, row)

    def _around(self, rng: random.Random, form: Any) -> None:
        if isinstance(form, forms.Headed):
            area = bytearray(form.area)
            if rng.random() < 0.5 or not area:
                form.area = bytes(area) + bytes(rng.choice((1, 4, 16, 64)))
            else:
                form.area = bytes(area[: rng.randrange(len(area))])
            return
        places = form.flat.tree.setdefault("segments", [])
        roll = rng.random()
        if places and roll < 0.4:
            rng.choice(places)["shift"] = rng.choice((-16, 1, 16, 64, 2**31, 2**63))
        elif places and roll < 0.7:
            rng.choice(places)["grow"] = rng.choice((-1, 1, 16, -16, 2**31, 2**63))
        elif roll < 0.85:
            form.parts.append(rng.choice(self.files)[:4096])
        elif form.parts:
            del form.parts[rng.randrange(len(form.parts))]

    def _field(self, rng: random.Random, flat: forms.Flat, table: dict[str, Any], row: Any) -> None:
        field, _, kind, scalar, _, target = row
        if field in table and rng.random() < 0.08:
            del table[field]
            return
        old = table.get(field)
        if kind == "scalar":
            table[field] = self.number(rng, scalar, old)
        elif kind == "string":
            table[field] = rng.choice(TEXTS) if rng.random() < 0.7 else self._like(rng, flat, field, old)
        elif kind == "vector_string":
            table[field] = [*list(old or ()), rng.choice(TEXTS)]
        elif kind == "vector_scalar":
            table[field] = self._vector(rng, scalar, old)
        elif kind == "table":
            table[field] = self._other(rng, flat, target)
        elif kind == "union":
            member, _, name = rng.choice([(m, o, t) for o, m, t in schema.UNIONS[flat.key][target]])
            if old is not None and rng.random() < 0.5:
                # Another kind with the fields that it has in common.
                known = {each[0] for each in schema.TABLES[flat.key][name]}
                table[field] = (member, {each: value for each, value in old[1].items() if each in known})
            else:
                table[field] = (member, self._other(rng, flat, name))
        elif kind == "vector_table":
            self._list(rng, flat, table, field, target)

    def _vector(self, rng: random.Random, scalar: str, old: Any) -> Any:
        made = list(old or ())
        roll = rng.random()
        if roll < 0.5 and made:
            made[rng.randrange(len(made))] = self.number(rng, scalar, rng.choice(made))
        elif roll < 0.65:
            made.insert(rng.randint(0, len(made)), self.number(rng, scalar, rng.choice(made) if made else None))
        elif roll < 0.8 and made:
            del made[rng.randrange(len(made))]
        elif roll < 0.88 and len(made) > 1:
            rng.shuffle(made)
        elif roll < 0.94:
            made = []
        else:
            made = made + made
        return bytes(made) if scalar == "u8" else made

    def _list(self, rng: random.Random, flat: forms.Flat, table: dict[str, Any], field: str, target: str) -> None:
        made = list(table.get(field) or ())
        roll = rng.random()
        if roll < 0.25 and made:
            made.insert(rng.randint(0, len(made)), copy.deepcopy(rng.choice(made)))
        elif roll < 0.45 and made:
            del made[rng.randrange(len(made))]
        elif roll < 0.6 and len(made) > 1:
            rng.shuffle(made)
        elif roll < 0.9:
            made.insert(rng.randint(0, len(made)), self._other(rng, flat, target))
        elif roll < 0.95:
            made = []
        else:
            made = made + copy.deepcopy(made)
        table[field] = made

    def _other(self, rng: random.Random, flat: forms.Flat, name: str) -> Any:
        """A table of that name from any seed."""
        known = self.tables.get((flat.key, name))
        return copy.deepcopy(rng.choice(known)) if known and rng.random() < 0.95 else {}

    def _like(self, rng: random.Random, flat: forms.Flat, field: str, old: Any) -> Any:
        return (old or "") + rng.choice(TEXTS)

    def number(self, rng: random.Random, scalar: str, old: Any) -> Any:
        if scalar in FLOATS:
            return (
                rng.choice(REAL) if old is None or rng.random() < 0.7 else old * rng.choice((-1.0, 0.5, 2.0, 1e-3, 1e3))
            )
        low, high = RANGES[scalar]
        roll = rng.random()
        if old is not None and roll < 0.4:
            new = int(old) + rng.choice((-2, -1, 1, 2, 8, -8))
        elif roll < 0.95:
            new = rng.choice(WHOLE)
        else:
            new = rng.getrandbits(64)
        return (new - low) % (high - low + 1) + low


def _tables(tree: Any, key: str, name: str) -> Any:
    """(name, table) of a tree and all below it."""
    yield name, tree
    for field, _, kind, _, _, target in schema.TABLES[key][name]:
        value = tree.get(field)
        if value is None:
            continue
        if kind == "table":
            yield from _tables(value, key, target)
        elif kind == "union":
            member, below = value
            yield from _tables(below, key, next(t for _, m, t in schema.UNIONS[key][target] if m == member))
        elif kind == "vector_table":
            for each in value:
                yield from _tables(each, key, target)
