"""What a file holds, as plain data and as text.

In comes a Graph; out goes a dict of JSON's own types, or the lines that ``xnnfast inspect`` prints.
The text is made from the dict, so that both say the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .quantization import PerBlock, PerChannel, PerTensor, PerToken, bf16_to_f32

if TYPE_CHECKING:
    from ._graph import Constant, Graph, Node, Value

    Facts = dict[str, Any]


def describe(graph: Graph) -> Facts:
    """The facts of a graph: where it comes from, inputs, outputs, nodes, values and constants."""
    used, total = graph.zero_copy
    gone = _fused(graph)
    holders: dict[int, list[int]] = {}
    for value in graph.values:
        if value.constant is not None:
            holders.setdefault(id(value.constant), []).append(value.id)
    return {
        "kind": "graph",
        "source": graph.source,
        "container": graph.container,
        "dialect": graph.dialect,
        "version": graph.version,
        "inputs": [value.id for value in graph.inputs],
        "outputs": [value.id for value in graph.outputs],
        "values": [_value(value) for value in graph.values],
        "nodes": [_node(node) | gone.get(node.index, {}) for node in graph.nodes],
        "constants": [_constant(constant, holders[id(constant)]) for constant in graph.constants],
        "zero_copy": {
            "constants": total,
            "in_place": used,
            "bytes": sum(constant.nbytes for constant in graph.constants),
            "bytes_in_place": sum(constant.nbytes for constant in graph.constants if constant.in_place),
        },
        "notes": list(graph.notes),
    }


def _fused(graph: Graph) -> dict[int, Facts]:
    """Index of a node that does not run by itself -> which node does its work."""
    from .errors import GraphError
    from .lower import lower

    try:
        return {fusion.node: {"runs_in": fusion.into} for fusion in lower(graph).fused}
    except GraphError:
        # A graph that XNNPACK can't run can still be looked at.
        return {}


def _value(value: Value) -> Facts:
    roles = (("input", value.is_input), ("output", value.is_output), ("constant", value.constant is not None))
    facts: Facts = {
        "id": value.id,
        "datatype": value.datatype,
        "dtype": None if value.dtype is None else value.dtype.name,
        "shape": list(value.shape),
        "roles": [role for role, yes in roles if yes],
        "external_id": value.external_id,
        "quantization": _quantization(value.quantization),
        "constant": None if value.constant is None else value.constant.index,
    }
    if value.dq_datatype is not None:
        facts["dq_datatype"] = value.dq_datatype
    return facts


def _quantization(params: Any) -> Facts | None:
    if params is None:
        return None
    if isinstance(params, PerTensor):
        return {"per": "tensor", "scale": _plain(params.scale), "zero_point": params.zero_point}
    if isinstance(params, PerToken):
        return {"per": "token", "num_nonbatch_dims": params.num_nonbatch_dims}
    # A layer has thousands of scales: their range tells what a reader wants to know.
    if isinstance(params, PerChannel):
        return {"per": "channel", "axis": params.axis, **_range(params.scales)}
    if isinstance(params, PerBlock):
        return {
            "per": "block",
            "axis": params.axis,
            "block_size": params.block_size,
            **_range(bf16_to_f32(params.scales)),
        }
    raise TypeError(f"unknown quantization {params!r}")


def _range(scales: Any) -> Facts:
    if len(scales) == 0:
        return {"scales": 0}
    return {"scales": len(scales), "scale_min": _plain(float(scales.min())), "scale_max": _plain(float(scales.max()))}


def _node(node: Node) -> Facts:
    return {
        "index": node.index,
        "op": node.op.name,
        "debug_handle": node.debug_handle,
        "inputs": list(node.inputs),
        "outputs": list(node.outputs),
        "attrs": {name: _plain(value) for name, value in node.attrs.items()},
        "flags": node.flags,
        "clamp": _plain(node.clamp),
    }


def _constant(constant: Constant, values: list[int]) -> Facts:
    return {
        "index": constant.index,
        "values": values,
        "nbytes": constant.nbytes,
        "offset": constant.offset if constant.offset >= 0 else None,
        "key": constant.key,
        "in_place": constant.in_place,
        "reason": constant.reason,
    }


def _plain(value: Any) -> Any:
    """JSON has neither tuples nor infinities; the latter become the strings that ``float()`` reads."""
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


# ---------------------------------------------------------------------------------------------------
# Text


def text(facts: Mapping[str, Any]) -> str:
    """The facts for a person to read."""
    values = {value["id"]: value for value in facts["values"]}
    lines = [
        f"{facts['source']}: container {facts['container']}, dialect {facts['dialect']}"
        + (f", version {facts['version']}" if facts["version"] else "")
    ]
    for title, names in (("inputs", facts["inputs"]), ("outputs", facts["outputs"])):
        lines += ["", f"{title}: {len(names)}"]
        lines += _columns([(_id(name), *_type(values[name]), _external(values[name])) for name in names])
    lines += ["", f"nodes: {len(facts['nodes'])}"]
    lines += _columns([_node_row(node, values) for node in facts["nodes"]])
    zero_copy = facts["zero_copy"]
    lines += ["", f"constants: {_in_place(zero_copy)}"]
    lines += _columns([_constant_row(constant, values) for constant in facts["constants"]])
    if facts["notes"]:
        lines += ["", "notes:", *(f"  {note}" for note in facts["notes"])]
    return "\n".join(lines)


def summary(graphs: Sequence[Mapping[str, Any]]) -> str:
    """One line about the graphs of one file."""
    if not graphs:
        return "no graphs"
    dialects = ", ".join(sorted({facts["dialect"] for facts in graphs}))
    total = {name: sum(facts["zero_copy"][name] for facts in graphs) for name in graphs[0]["zero_copy"]}
    parts = [
        f"container {graphs[0]['container']}, dialect {dialects}",
        _count(len(graphs), "graph") if len(graphs) > 1 else "",
        _count(sum(len(facts["nodes"]) for facts in graphs), "node"),
        f"constants: {_in_place(total)}",
        _count(sum(len(facts["notes"]) for facts in graphs), "note") if any(facts["notes"] for facts in graphs) else "",
    ]
    return ", ".join(part for part in parts if part)


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _in_place(zero_copy: Mapping[str, int]) -> str:
    total, used = zero_copy["constants"], zero_copy["in_place"]
    if not total:
        return "none"
    return f"{used} of {total} in place ({size(zero_copy['bytes_in_place'])} of {size(zero_copy['bytes'])})"


def size(nbytes: int) -> str:
    """A number of bytes in the largest unit that keeps it at least 1."""
    value, unit = float(nbytes), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{nbytes} bytes" if unit == "bytes" else f"{value:.4g} {unit}"


def shape(dims: Sequence[int]) -> str:
    """A shape as messages write it: ``1x224x224x3``."""
    return "x".join(map(str, dims)) or "scalar"


def _id(value: int | None) -> str:
    return "-" if value is None else f"%{value}"


def _type(value: Mapping[str, Any]) -> tuple[str, str]:
    params = value["quantization"]
    kind = value["datatype"]
    if params is not None:
        detail = {
            "tensor": lambda: (
                f"scale {params['scale']:g}, zero point {params['zero_point']}"
                if not isinstance(params["scale"], str)
                else f"scale {params['scale']}, zero point {params['zero_point']}"
            ),
            "token": lambda: f"per row of {params['num_nonbatch_dims']} axes",
            "channel": lambda: f"{params['scales']} scales along axis {params['axis']}",
            "block": lambda: f"{params['scales']} scales, blocks of {params['block_size']}",
        }[params["per"]]()
        kind = f"{kind} ({detail})"
    return kind, shape(value["shape"])


def _external(value: Mapping[str, Any]) -> str:
    quantized = f", quantized to {value['dq_datatype']} on its way in" if "dq_datatype" in value else ""
    return ("" if value["external_id"] is None else f"external id {value['external_id']}") + quantized


def _node_row(node: Mapping[str, Any], values: Mapping[int, Mapping[str, Any]]) -> tuple[str, ...]:
    details = [f"{name}={_word(value)}" for name, value in node["attrs"].items()]
    if node["flags"]:
        details.append(f"flags={node['flags']:#x}")
    if node["clamp"] is not None:
        details.append(f"clamp={_word(node['clamp'])}")
    if "runs_in" in node:
        details.append(f"(runs in node {node['runs_in']})")
    shapes = ", ".join(shape(values[output]["shape"]) for output in node["outputs"])
    return (
        str(node["index"]),
        node["op"],
        f"{' '.join(map(_id, node['inputs']))} -> {' '.join(map(_id, node['outputs']))}",
        shapes,
        f"handle {node['debug_handle']}" if node["debug_handle"] else "",
        " ".join(details),
    )


def _word(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_word, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _constant_row(constant: Mapping[str, Any], values: Mapping[int, Mapping[str, Any]]) -> tuple[str, ...]:
    place = constant["key"] or ("" if constant["offset"] is None else f"at {constant['offset']:#x}")
    users = [" ".join((_id(user), *_type(values[user]))) for user in constant["values"]]
    state = "in place" if constant["in_place"] else f"copied: {constant['reason']}"
    return str(constant["index"]), size(constant["nbytes"]), place, ", ".join(users), state


def _columns(rows: Iterable[Sequence[str]]) -> list[str]:
    """Rows as indented lines with their columns aligned; the last column is as long as it likes."""
    rows = [list(row) for row in rows]
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths) if width).rstrip() for row in rows]
