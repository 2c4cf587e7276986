"""What an ExecuTorch program holds, as plain data and as text.

In comes an open program; out goes a dict of JSON's own types, or the lines that ``xnnfast inspect`` prints. The
text is made from the dict, so that both say the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from . import _reader
from .containers import XNNPACK_BACKEND, DelegateCall, FreeCall, JumpFalseCall, KernelCall, MoveCall, ProgramFile
from .describe import _columns, _count, _plain, size
from .errors import XnnfastError

if TYPE_CHECKING:
    from .program import Method, Port, Program

    Facts = dict[str, Any]

_KINDS = (
    (KernelCall, "operators"),
    (DelegateCall, "delegates"),
    (MoveCall, "moves"),
    (JumpFalseCall, "jumps"),
    (FreeCall, "frees"),
)


def is_program(magic: bytes) -> bool:
    """Whether bytes 4..8 of a file say that it is a program."""
    return magic in (b"ET12", b"BP08")


def describe_program(program: Program, dialect: str | None = None) -> Facts:
    """The facts of a program: how much of it XNNPACK runs, methods, delegates, data by name, operators outside."""
    file = program.file
    methods = [_method(program.method(name), dialect) for name in program.methods]
    return {
        "kind": "program",
        "source": file.payload.name,
        "version": file.version,
        "nbytes": file.payload.nbytes,
        "coverage": {
            "nodes_inside": sum(delegate["nodes"] or 0 for method in methods for delegate in method["delegates"]),
            "delegates": sum(len(method["delegates"]) for method in methods),
            "instructions_outside": sum(method["instructions_outside"] for method in methods),
        },
        "methods": methods,
        "segments": {"count": len(file.segments), "nbytes": sum(nbytes for _, nbytes in file.segments.places)},
        "named_data": _named(file),
        "data_files": [each.payload.name for each in file.data_files],
    }


def _method(method: Method, dialect: str | None) -> Facts:
    counts = dict.fromkeys((name for _, name in _KINDS), 0)
    for chain in method.plan.chains:
        for instruction in chain.instructions:
            counts[next(name for kind, name in _KINDS if isinstance(instruction, kind))] += 1
    operators: dict[str, Facts] = {}
    for call in method.undelegated():
        entry = operators.setdefault(
            call.op, {"op": call.op, "calls": 0, "known": call.known, "instructions": [], "stack": []}
        )
        entry["calls"] += 1
        entry["instructions"].append(call.instruction)
        entry["stack"] = entry["stack"] or list(call.stack)
    return {
        "name": method.name,
        "inputs": [_port(port) for port in method.inputs],
        "outputs": [_port(port) for port in method.outputs],
        "instructions": counts,
        # What is done outside XNNPACK: giving back memory is not doing anything.
        "instructions_outside": counts["operators"] + counts["moves"] + counts["jumps"],
        "delegates": [_delegate(method, info, dialect) for info in method.delegates()],
        "undelegated": sorted(operators.values(), key=lambda entry: -entry["calls"]),
    }


def _port(port: Port) -> Facts:
    return {
        "name": port.name,
        "kind": port.kind,
        "dtype": None if port.dtype is None else port.dtype.name,
        "shape": None if port.shape is None else list(port.shape),
        "dim_order": None if port.dim_order is None else list(port.dim_order),
        "dynamism": port.dynamism,
        "value": _plain(port.value),
        "text": str(port),
    }


def _delegate(method: Method, info: Any, dialect: str | None) -> Facts:
    facts: Facts = {
        "index": info.index,
        "backend": info.backend,
        "nbytes": info.nbytes,
        "instructions": list(info.instructions),
        "nodes": None,
        "constants": None,
        "constant_nbytes": None,
        "dialect": None,
        "problem": None,
    }
    if info.backend != XNNPACK_BACKEND:
        return facts
    try:
        graph = _reader.read(method.file.section(method.plan, info.index), dialect, limits=method.file.limits).graph()
    except XnnfastError as error:
        # The rest of the program is still worth a look.
        return facts | {"problem": str(error)}
    return facts | {
        "nodes": len(graph.nodes),
        "constants": len(graph.constants),
        "constant_nbytes": sum(constant.nbytes for constant in graph.constants),
        "dialect": graph.dialect,
    }


def _named(file: ProgramFile) -> list[Facts]:
    found = []
    for key in sorted(file.named_data):
        try:
            blob = file.named_data.find(key)
            found.append({"key": key, "nbytes": blob.nbytes, "file": blob.payload.name})
        except XnnfastError as error:
            found.append({"key": key, "nbytes": None, "file": None, "problem": str(error)})
    return found


# ---------------------------------------------------------------------------------------------------
# Text


def program_text(facts: Mapping[str, Any]) -> str:
    """The facts for a person to read; the first line is how much of the program XNNPACK runs."""
    coverage = facts["coverage"]
    inside, outside = coverage["nodes_inside"], coverage["instructions_outside"]
    lines = [
        f"{facts['source']}: {_count(inside, 'node')} in {_count(coverage['delegates'], 'delegate')} of XNNPACK, "
        f"{_count(outside, 'instruction')} outside",
        f"ExecuTorch program, {size(facts['nbytes'])}, {_count(facts['segments']['count'], 'segment')} of "
        f"{size(facts['segments']['nbytes'])}" + "".join(f", data file {name}" for name in facts["data_files"]),
    ]
    for method in facts["methods"]:
        lines += ["", *_method_lines(method)]
    named = facts["named_data"]
    if named:
        lines += ["", f"named data: {len(named)}, {size(sum(entry['nbytes'] or 0 for entry in named))}"]
        lines += _columns([(entry["key"], entry.get("problem") or size(entry["nbytes"])) for entry in named])
    return "\n".join(lines)


def _method_lines(method: Mapping[str, Any]) -> list[str]:
    counts = ", ".join(_count(count, name.removesuffix("s")) for name, count in method["instructions"].items() if count)
    lines = [f"method {method['name']!r}: {counts or 'no instructions'}"]
    for title in ("inputs", "outputs"):
        lines.append(f"  {title}: {len(method[title])}")
        lines += [f"    {port['text']}" for port in method[title]]
    delegates = method["delegates"]
    if delegates:
        lines.append(
            f"  delegates: {len(delegates)}, {size(sum(delegate['nbytes'] for delegate in delegates))} of payloads"
        )
        lines += _indented([_delegate_row(delegate) for delegate in delegates])
    if method["undelegated"]:
        lines.append(f"  undelegated operators: {sum(entry['calls'] for entry in method['undelegated'])}")
        lines += _indented([_operator_row(entry) for entry in method["undelegated"]])
    return lines


def _delegate_row(delegate: Mapping[str, Any]) -> tuple[str, ...]:
    if delegate["problem"] is not None:
        what = f"unreadable: {delegate['problem']}"
    elif delegate["nodes"] is None:
        what = "another backend: xnnfast can't run it"
    else:
        what = (
            f"{_count(delegate['nodes'], 'node')}, {_count(delegate['constants'], 'constant')} of "
            f"{size(delegate['constant_nbytes'])}, dialect {delegate['dialect']}"
        )
    return (
        str(delegate["index"]),
        delegate["backend"],
        size(delegate["nbytes"]),
        _called(delegate["instructions"]),
        what,
    )


def _operator_row(entry: Mapping[str, Any]) -> tuple[str, ...]:
    where = _called(entry["instructions"]) + (f", from {entry['stack'][0]}" if entry["stack"] else "")
    return entry["op"], _count(entry["calls"], "call"), "in NumPy" if entry["known"] else "MISSING in xnnfast", where


def _called(instructions: Sequence[int]) -> str:
    if not instructions:
        return "never called"
    shown = ", ".join(map(str, instructions[:6]))
    return f"at {shown}{', ...' if len(instructions) > 6 else ''}"


def _indented(rows: Sequence[tuple[str, ...]]) -> list[str]:
    return [f"  {line}" for line in _columns(rows)]
