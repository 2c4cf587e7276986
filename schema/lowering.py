"""Writes the lowering of single operators: rows + schema + xnnpack.h -> ``_generated/lower.pxi``.

Every row becomes one Cython function that makes one call; ``define_node`` picks it. Whatever does not
fit together - a field the row forgot, an argument the header has and the row has not, a union member
without a row - stops the build with a LoweringError.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import fbs

HERE = Path(__file__).resolve().parent
OPS_DIR = HERE.parent / "xnnfast" / "ops"
TEMPLATE = HERE / "lower.pxi.in"

#: What a parameter is called in xnnpack.h where the schema has another name for it.
ALIASES = {
    "upsampling_height": "subsampling_height", "upsampling_width": "subsampling_width",
    "depth_multiplier": "group_output_channels/group_input_channels", "input_channels": "groups",
    "output_min": "clamp.min", "output_max": "clamp.max", "input_id": "input1_id",
}
SCALARS = ("uint32_t", "int32_t", "size_t", "float")
#: Element types that arrays are passed in.
ELEMENTS = ("size_t", "int64_t")
#: Parameter block -> (C type, field and Cython expression).
BLOCKS = {
    "&clamp": ("xnn_unary_params", (("clamp.min", "lower_limit(node)"), ("clamp.max", "upper_limit(node)"))),
    "&limits": ("xnn_binary_params", (("output_min", "lower_limit(node)"), ("output_max", "upper_limit(node)"))),
    "&alpha": ("xnn_unary_params", (("elu.alpha", 'attrs["alpha"]'),)),
    "&negative_slope": ("xnn_unary_params", (("leaky_relu.negative_slope", 'attrs["negative_slope"]'),)),
}


class LoweringError(ValueError):
    """Rows, schema and header contradict each other."""


class Parameter(NamedTuple):
    type: str  # without const, struct, enum and the star
    is_pointer: bool
    name: str


# ---- the three sources

def load_ops() -> Mapping[str, Any]:
    """``xnnfast.ops.OPS``, read from its folder: the package around it is not built yet."""
    name = "_xnnfast_rows"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, OPS_DIR / "__init__.py",
                                                      submodule_search_locations=[str(OPS_DIR)])
        if spec is None or spec.loader is None:
            raise LoweringError(f"need the rows in {OPS_DIR}, found nothing to import")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    ops: Mapping[str, Any] = sys.modules[name].OPS
    return ops


def prototypes(header: str) -> dict[str, list[Parameter]]:
    """``xnn_define_*`` -> its parameters after the subgraph."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", " ", header, flags=re.DOTALL)
    found = {}
    for name, body in re.findall(r"\benum\s+xnn_status\s+(xnn_define_\w+)\s*\(([^;{]*?)\)\s*;", text):
        parameters = []
        for part in body.split(","):
            match = re.fullmatch(r"\s*(?:const\s+)?(?:struct\s+|enum\s+|union\s+)?(\w+)\s*(\*?)\s*(\w+)\s*", part)
            if match is None:
                raise LoweringError(f"xnnpack.h: can't read parameter {part.strip()!r} of {name}")
            parameters.append(Parameter(match[1], bool(match[2]), match[3]))
        if not parameters or parameters[0].type != "xnn_subgraph_t":
            raise LoweringError(f"xnnpack.h: need a subgraph as first parameter of {name}, found {body.strip()!r}")
        found[name] = parameters[1:]
    return found


def enumerators(header: str) -> dict[str, str]:
    """Enumerator -> the enum it belongs to."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", " ", header, flags=re.DOTALL)
    return {each: name for name, body in re.findall(r"\benum\s+(\w+)\s*\{([^}]*)\}", text)
            for each in re.findall(r"(\w+)\s*(?:=[^,]*)?(?:,|$)", body.strip())}


# ---- a row against the schema

def check_fields(op: Any, table: fbs.Table) -> None:
    """Every field of the table has a use in the row, and the row uses no others."""
    tokens = op.args.split()
    used = {*op.inputs, *op.outputs, *op.attrs, *op.unused}
    if "flags" in tokens:
        used.add("flags")
    if any(token.endswith("[]") for token in tokens):
        used.add("num_dims")
    fields = {field.name for field in table.fields}
    # The length of a vector serves where the schema has no field for it, so num_dims may be absent.
    for missing in sorted(used - fields - {"num_dims"}):
        raise LoweringError(f"{op.name}: {missing} is in the row, the schema's {table.name} has no such field")
    for forgotten in sorted(fields - used):
        raise LoweringError(f"{op.name}: the schema's {table.name} has {forgotten}, the row leaves it out")


def check_rows(ops: Iterable[Any], schema: fbs.Schema) -> None:
    members = {member.name: member.table for member in schema.unions["XNodeUnion"].members}
    kinds: dict[str, str] = {}
    for op in ops:
        if op.flags < 0:
            raise LoweringError(f"{op.name}: need a mask of the flags it may have, found none")
        if op.kind is None:
            continue
        if op.kind in kinds:
            raise LoweringError(f"{op.kind} has two rows, {kinds[op.kind]} and {op.name}")
        if op.kind not in members:
            raise LoweringError(f"{op.name}: the schema's node union has no member {op.kind}")
        kinds[op.kind] = op.name
        check_fields(op, schema.tables[members[op.kind]])
    for member in members:
        if member not in kinds:
            raise LoweringError(f"{member} of the schema's node union has no row")


# ---- a row against the header, and its function

class Function:
    """The text of one row's function, made token by token along the prototype."""

    def __init__(self, op: Any, parameters: list[Parameter], enums: Mapping[str, str]) -> None:
        self.op, self.enums = op, enums
        self.pending = list(parameters)
        self.total = len(parameters)
        self.before: list[str] = []
        self.arguments: list[str] = []
        for token in op.args.split():
            self.token(token)
        if self.pending:
            rest = ", ".join(parameter.name for parameter in self.pending)
            self.fail(f"{op.call} has {self.total} arguments after the subgraph, the row lacks {rest}")

    def fail(self, text: str) -> NoReturn:
        raise LoweringError(f"{self.op.name}: {text}")

    def take(self, token: str, types: Iterable[str], *, pointer: bool = False, name: str = "") -> Parameter:
        """The next parameter, which must have one of these types and, where a name is given, that name."""
        if not self.pending:
            self.fail(f"{self.op.call} has {self.total} arguments after the subgraph, the row has more: {token}")
        parameter = self.pending.pop(0)
        if parameter.type not in types or parameter.is_pointer != pointer:
            self.fail(f"{token} meets {parameter.type}{'*' * parameter.is_pointer} {parameter.name} of {self.op.call}, "
                      f"need {' or '.join(types)}{'*' * pointer}")
        theirs = parameter.name
        if name and name not in (theirs, theirs.removeprefix("input_"), ALIASES.get(theirs)):
            self.fail(f"{token} meets {theirs} of {self.op.call}: arguments are out of order")
        return parameter

    def token(self, token: str) -> None:
        if token == "flags":
            self.take(token, ("uint32_t",), name=token)
            self.arguments.append("<uint32_t> node.flags")
        elif token.startswith("@"):
            name = token[1:].rstrip("?")
            self.take(token, ("uint32_t",), name=name)
            side = "outputs" if name in self.op.outputs else "inputs"
            place = f"node.{side}[{getattr(self.op, side).index(name)}]"
            self.arguments.append(f"optional_id(ids, {place})" if token.endswith("?") else f"ids[{place}]")
        elif token in ("clamp.min", "clamp.max"):
            self.take(token, ("float",), name=token)
            self.arguments.append("lower_limit(node)" if token.endswith("min") else "upper_limit(node)")
        elif token.startswith("="):
            self.constant(token)
        elif token.startswith("&"):
            self.block(token)
        elif token.endswith("]"):
            self.vector(token)
        elif "/" in token:
            over, under = token.split("/")
            parameter = self.take(token, SCALARS[:3], name=token)
            self.arguments.append(f'<{parameter.type}> (attrs["{over}"] // attrs["{under}"])')
        else:
            self.scalar(token)

    def constant(self, token: str) -> None:
        parameter = self.pending[0] if self.pending else Parameter("nothing", False, "")
        text = token[1:]
        if text == "NULL":
            self.take(token, (parameter.type,), pointer=True)
        else:
            if text not in self.enums:
                self.fail(f"xnnpack.h has no {text}")
            self.take(token, (self.enums[text],))
        self.arguments.append(text)

    def block(self, token: str) -> None:
        if token not in BLOCKS:
            self.fail(f"no parameter block {token}, there are {', '.join(BLOCKS)}")
        kind, fields = BLOCKS[token]
        self.take(token, (kind,), pointer=True)
        self.before.append(f"cdef {kind} params")
        self.before += [f"params.{field} = {expression}" for field, expression in fields]
        self.arguments.append("&params")

    def vector(self, token: str) -> None:
        name, _, padded = token[:-1].partition("[")
        if not padded:
            self.take(token, ("size_t",))
        element = self.take(token, ELEMENTS, pointer=True, name=name).type
        self.before.append(f"cdef {element}[MAX_RANK] {name}")
        count = f'fill_{element}({name}, "{name}", attrs["{name}"])'
        if padded:
            self.before.append(count)
            self.arguments.append(name)
        else:
            self.before.append(f"cdef size_t num_{name} = {count}")
            self.arguments += [f"num_{name}", name]

    def scalar(self, token: str) -> None:
        parameter = self.take(token, SCALARS, name=token)
        # A negative axis stands in the file's unsigned field as 2**32 more.
        value = f'attrs["{token}"]' if parameter.type != "int32_t" else f'<uint32_t> (attrs["{token}"] & 0xFFFFFFFF)'
        self.arguments.append(f"<{parameter.type}> {value}")

    def text(self) -> str:
        before = ["attrs = node.attrs"] if any('attrs["' in line for line in (*self.before, *self.arguments)) else []
        lines = [f"cdef xnn_status define_{self.op.name}(xnn_subgraph_t subgraph, Node node, dict ids) except *:"]
        lines += [f"    {line}" for line in (*before, *self.before)]
        lines += [f"    return {self.op.call}(", "        subgraph,"]
        return "\n".join(lines + [f"        {argument}," for argument in self.arguments]) + "\n    )\n"


def declarations(calls: Mapping[str, list[Parameter]], constants: Iterable[tuple[str, str]]) -> str:
    """The extern block: just the calls and enumerators that the functions use."""
    enums: dict[str, list[str]] = {}
    for name, enum in constants:
        enums.setdefault(enum, []).append(name)
    out = ['cdef extern from "xnnpack.h" nogil:']
    for enum, names in sorted(enums.items()):
        out += [f'    ctypedef enum {enum} "enum {enum}":', *(f"        {name}" for name in sorted(names))]
    for call, parameters in sorted(calls.items()):
        listed = ", ".join(f"{'const ' * each.is_pointer}{each.type}{'*' * each.is_pointer} {each.name}"
                           for each in parameters)
        out.append(f"    xnn_status {call}(xnn_subgraph_t subgraph, {listed})")
    return "\n".join(out) + "\n"


def emit(ops: Mapping[str, Any], header: str, schema: fbs.Schema) -> str:
    """The text of ``lower.pxi``; the module that includes it has cimported xnnpack.pxd and Node."""
    check_rows(ops.values(), schema)
    known, enums = prototypes(header), enumerators(header)
    functions, calls, constants = [], {}, set()
    for op in ops.values():
        if not op.call:
            # Taken apart by lower.py before it could come here.
            continue
        if op.call not in known:
            raise LoweringError(f"{op.name}: xnnpack.h has no {op.call}")
        functions.append((op.name, Function(op, known[op.call], enums).text()))
        calls[op.call] = known[op.call]
        constants |= {(text, enums[text]) for text in re.findall(r"=(\w+)", op.args) if text != "NULL"}
    names = [name for name, _ in functions]
    filled = {
        "EXTERNS": declarations(calls, constants),
        "FUNCTIONS": "\n\n".join(text for _, text in functions),
        "COUNT": str(len(names)),
        "CASES": "".join(f'    "{name}": {number},\n' for number, name in enumerate(names)),
        "POINTERS": "".join(f"DEFINE[{number}] = define_{name}\n" for number, name in enumerate(names)),
    }
    return re.sub(r"@([A-Z]+)@\n?", lambda match: filled[match[1]], TEMPLATE.read_text(encoding="utf-8"))
