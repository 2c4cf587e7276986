"""Writes ``xnnfast/_generated/`` from the schemas: Cython slot constants and Python field tables.

Nothing it writes is committed. A file is touched only when its text changes, so that a rebuild
recompiles no more than it must. Run it as ``python schema/generate.py [--out DIR]``, or call
``generate``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

# The siblings are not in a package: they are needed before anything is installed.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import fbs
import lowering

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / "xnnfast" / "_generated"


class Source(NamedTuple):
    """One key of the generated tables: where it comes from and how its bytes are recognized."""

    file: str
    identifiers: tuple[str, ...] = ()  # empty = the file's own, or none
    root: str | None = None  # None = the file's own


# Two things a .fbs cannot say: a second identifier, and a second root for the same identifier.
SOURCES = {
    "seed": Source("seed.fbs"),
    "xnn": Source("xnn.fbs", identifiers=("XN00", "XN01")),
    "program": Source("program.fbs"),
    "flat_tensor": Source("flat_tensor.fbs"),
    "flat_tensor_v06": Source("flat_tensor.fbs", root="FlatTensorV06"),
    "bundled": Source("bundled.fbs"),
}

# The seed's tables are a prefix of xnn's under the same names, so it adds no constants.
SLOT_SOURCES = ("xnn", "program", "flat_tensor", "bundled")

DATATYPE_ENUM, DATATYPE_PREFIX = "XNNDatatype", "xnn_datatype_"


class Loaded(NamedTuple):
    schema: fbs.Schema
    identifiers: tuple[str, ...]
    root: str


def load_sources() -> dict[str, Loaded]:
    """Every schema of SOURCES, parsed, with its identifiers and root settled."""
    loaded = {}
    for key, source in SOURCES.items():
        schema = fbs.load(HERE / source.file)
        identifiers = source.identifiers or ((schema.identifier,) if schema.identifier else ())
        root = source.root or schema.root
        if schema.identifier and schema.identifier not in identifiers:
            raise fbs.SchemaError(f"{source.file}: need identifier {schema.identifier} among {identifiers}")
        if root not in schema.tables:
            raise fbs.SchemaError(f"{source.file}: need a table as root of {key}, found {root!r}")
        loaded[key] = Loaded(schema, identifiers, root)
    return loaded


def header(*sources: str) -> str:
    return f"# GENERATED from {', '.join(sources)} by schema/generate.py. DO NOT EDIT.\n"


# ---- part 1: fields

def fields_pxi(loaded: dict[str, Loaded]) -> dict[str, str]:
    """``fields.pxi``: SLOT_<table>_<field>, UNION_<union>_<member> and ENUM_<enum>_<value> as C constants.

    Tables of several schemas share one list of names, hence a name may come twice but must then
    mean the same number.
    """
    files = [SOURCES[key].file for key in SLOT_SOURCES]
    out = [header(*(f"schema/{file}" for file in files))]
    known: dict[str, int] = {}
    for key in SLOT_SOURCES:
        schema = loaded[key].schema
        groups = [[(f"SLOT_{table.name}_{field.name}", field.slot) for field in table.fields]
                  for table in schema.tables.values()]
        groups += [[(f"UNION_{union.name}_{member.name}", member.ordinal) for member in union.members]
                   for union in schema.unions.values()]
        groups += [[(f"ENUM_{enum.name}_{name}", number) for name, number in enum.values.items()]
                   for enum in schema.enums.values()]
        for group in groups:
            new = [(name, number) for name, number in group if name not in known]
            for name, number in group:
                if known.setdefault(name, number) != number:
                    raise fbs.SchemaError(f"{SOURCES[key].file}: {name} is {known[name]} elsewhere and {number} here")
            if new:
                out.append("\ncdef enum:\n" + "".join(f"    {name} = {number}\n" for name, number in new))
    return {"fields.pxi": "".join(out)}


SCHEMA_HELP = '''\
"""Field tables of every schema, as data.

Keys of the outer dictionaries: {keys}.

TABLES[key][table]       a tuple of fields; the field of slot i is at index i. A field is
                         (name, slot, kind, scalar_type, default, target):
    kind                 scalar, string, vector_scalar, vector_table, vector_string, table, union
    scalar_type          of the field or of its elements: bool, i8 ... u64, f32, f64; else None
    default              value of an absent scalar; None for every other kind
    target               the enum, table or union named by the field; else None
                         A union is two fields: <name>_type, a u8 scalar, then <name>; the
                         target of both is the union.
UNIONS[key][union]       a tuple of (ordinal, member, table); members may share a table
ENUMS[key][enum]         value name -> number
FORCE_ALIGN[key]         (table, field) -> bytes, for vectors a writer must align
IDENTIFIERS[key]         identifiers at bytes 4..8; empty = the format has none
ROOTS[key]               name of the root table
DATATYPES[key]           seed and xnn only: number -> datatype name; invalid is left out
"""
'''


def schema_py(loaded: dict[str, Loaded]) -> dict[str, str]:
    """``schema.py``: the same facts and more as Python data, for reading and building at run time."""
    files = sorted({f"schema/{source.file}" for source in SOURCES.values()})
    out = [header(*files), SCHEMA_HELP.format(keys=", ".join(loaded))]
    out.append(literal("IDENTIFIERS", {key: item.identifiers for key, item in loaded.items()}))
    out.append(literal("ROOTS", {key: item.root for key, item in loaded.items()}))
    out.append(literal("TABLES", {key: {table.name: tuple(
        (field.name, field.slot, field.kind, field.scalar.name if field.scalar else None, field.default, field.target)
        for field in table.fields) for table in reachable(item)} for key, item in loaded.items()}))
    out.append(literal("UNIONS", {key: {union.name: tuple(
        (member.ordinal, member.name, member.table) for member in union.members)
        for union in item.schema.unions.values()} for key, item in loaded.items()}))
    out.append(literal("ENUMS", {key: {enum.name: enum.values for enum in item.schema.enums.values()}
                                 for key, item in loaded.items()}))
    out.append(literal("FORCE_ALIGN", {key: {(table.name, field.name): field.force_align
                                             for table in reachable(item) for field in table.fields
                                             if field.force_align} for key, item in loaded.items()}))
    out.append(literal("DATATYPES", {key: datatypes(item.schema.enums[DATATYPE_ENUM])
                                     for key, item in loaded.items() if DATATYPE_ENUM in item.schema.enums}))
    return {"schema.py": "\n".join(out), "__init__.py": header(*files)}


def reachable(item: Loaded) -> list[fbs.Table]:
    """The tables a walk from the root can meet, in the order the file declares them."""
    met, todo = set(), [item.root]
    while todo:
        name = todo.pop()
        if name in met:
            continue
        met.add(name)
        for field in item.schema.tables[name].fields:
            if field.kind in ("table", "vector_table"):
                todo.append(str(field.target))
            elif field.kind == "union":
                todo += [member.table for member in item.schema.unions[str(field.target)].members]
    return [table for table in item.schema.tables.values() if table.name in met]


def datatypes(enum: fbs.Enum) -> dict[int, str]:
    """Number to short name. Zero means "invalid" and stays out, so that looking it up fails."""
    short = {}
    for name, number in enum.values.items():
        if not name.startswith(DATATYPE_PREFIX):
            raise fbs.SchemaError(f"need values of {enum.name} to start with {DATATYPE_PREFIX}, found {name}")
        if number != 0:
            short[number] = name.removeprefix(DATATYPE_PREFIX)
    return short


def literal(name: str, value: object) -> str:
    """An assignment whose nested containers stand one item a line, to keep differences readable."""
    return f"{name} = {_literal(value, 0)}\n"


def _literal(value: object, depth: int) -> str:
    pad = "    " * (depth + 1)
    end = "    " * depth
    if isinstance(value, dict):
        if not value:
            return "{}"
        body = "".join(f"{pad}{key!r}: {_literal(item, depth + 1)},\n" for key, item in value.items())
        return f"{{\n{body}{end}}}"
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):
        body = "".join(f"{pad}{item!r},\n" for item in value)
        return f"(\n{body}{end})"
    return repr(value)


# ---- part 2: operator lowering

def lower_pxi(loaded: dict[str, Loaded], xnnpack_h: Path) -> dict[str, str]:
    """``lower.pxi``: one call of XNNPACK per operator, from the rows; checked against schema and header."""
    text = lowering.emit(lowering.load_ops(), xnnpack_h.read_text(encoding="utf-8"), loaded["xnn"].schema)
    return {"lower.pxi": header(f"schema/{SOURCES['xnn'].file}", "schema/lower.pxi.in", "xnnfast/ops") + text}


# Each part returns file name -> text.
PARTS: tuple[Callable[[dict[str, Loaded]], dict[str, str]], ...] = (fields_pxi, schema_py)


def generate(out_dir: Path | str = OUT, header: Path | str | None = None) -> list[Path]:
    """The generated files, up to date. Only those whose text changed are written.

    Without the path of an ``xnnpack.h`` the lowering is left out: nothing but the runtime needs it.
    """
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    loaded = load_sources()
    parts = [part(loaded) for part in PARTS]
    if header is not None:
        parts.append(lower_pxi(loaded, Path(header)))
    paths = []
    for part in parts:
        for name, text in part.items():
            path = out_dir / name
            paths.append(path)
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                # Two builds may run at once; neither may read half a file.
                partial = path.with_name(f".{name}.{os.getpid()}")
                partial.write_text(text, encoding="utf-8")
                partial.replace(path)
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description="write xnnfast/_generated from the schemas")
    parser.add_argument("--out", type=Path, default=OUT, help="folder to write into (default: %(default)s)")
    parser.add_argument("--header", type=Path, help="xnnpack.h to check the lowering against; none = no lower.pxi")
    options = parser.parse_args()
    for path in generate(options.out, options.header):
        print(path)


if __name__ == "__main__":
    main()
