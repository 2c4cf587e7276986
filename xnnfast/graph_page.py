"""A graph, or a whole program, as a page of HTML to look around in: ``xnnfast inspect FILE --html OUT.html``.

In come the facts of ``describe``, or an open program; out goes the text of one page that needs nothing else. Where
everything lies is computed here, so that the same file gives the same page; the script draws it, searches and moves.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .containers import (
    XNNPACK_BACKEND,
    DelegateCall,
    FreeCall,
    JumpFalseCall,
    KernelCall,
    ListValue,
    MoveCall,
    Plan,
    Tensor,
)
from .describe import _id, _type, _word, describe, shape, size
from .errors import LimitError, XnnfastError
from .html_page import COLOURS, document
from .layout import layered
from .ops import attention, convolution, elementwise, matmul, movement, pooling

if TYPE_CHECKING:
    from .program import Method, Program

    Facts = Mapping[str, Any]
    #: A line of what is said of an item: what, how it is, and the items that it leads to.
    Row = tuple[str, str, list[int]]

#: The style and the script of the page lie beside this module, under its name.
_HERE = Path(__file__)
#: A page of more boxes would keep a browser busy for minutes.
MAX_BOXES = 20_000
#: Estimated, since nothing here knows the fonts of the browser; long texts are cut there.
LETTER, LINE, HEAD, PAD = 6.5, 17.0, 24.0, 12.0
WIDEST = 56

_FAMILIES = (
    ("layers", COLOURS[0], {op.name for family in (matmul, convolution) for op in family.OPS}),
    ("elementwise", COLOURS[2], {op.name for op in elementwise.OPS} - {"convert", "copy"}),
    ("pooling", COLOURS[4], {op.name for op in pooling.OPS}),
    ("moves", COLOURS[6], {op.name for op in movement.OPS} | {"copy"}),
    ("conversions", COLOURS[7], {"convert"}),
    ("attention", COLOURS[3], {op.name for op in attention.OPS}),
)
_OTHER = ("other", COLOURS[9])
_EDGE_OF_GRAPH = ("inputs, outputs", COLOURS[1])
_INSTRUCTIONS = {
    "delegate": ("XNNPACK delegates", COLOURS[0]),
    "operator": ("operators outside", COLOURS[2]),
    "missing": ("not supported", COLOURS[3]),
    "control": ("moves, jumps", COLOURS[9]),
}


@dataclass
class View:
    """One drawing of the page: boxes, edges and what there is to say of each."""

    title: str
    facts: list[tuple[str, str]]
    notes: list[str] = field(default_factory=list)
    #: Kind, name, what a search looks through beside the name, and rows of facts.
    items: list[tuple[str, str, str, list[Row]]] = field(default_factory=list)
    #: Item, colour, title, lines of (text, class, item).
    boxes: list[tuple[int, str, str, list[tuple[str, str, int]]]] = field(default_factory=list)
    #: Upper box, lower box, item.
    edges: list[tuple[int, int, int]] = field(default_factory=list)
    legend: dict[str, str] = field(default_factory=dict)
    #: Item -> number of the view that shows it from inside.
    doors: dict[int, int] = field(default_factory=dict)

    def box(self, item: int, family: tuple[str, str], title: str, lines: list[tuple[str, str, int]]) -> int:
        if len(self.boxes) == MAX_BOXES:
            raise LimitError(
                f"{self.title}: a page can show {MAX_BOXES} nodes and inputs, there are more; "
                "inspect without --html lists them"
            )
        self.legend[family[0]] = family[1]
        self.boxes.append((item, family[1], title, lines))
        return len(self.boxes) - 1


def graph_page(facts: Facts) -> str:
    """The page of one graph, from what :func:`xnnfast.describe.describe` says of it."""
    return _page(os.path.basename(facts["source"]) or facts["source"], [graph_view(facts)])


def program_page(program: Program, dialect: str | None = None) -> str:
    """The page of a program: the flow of each method, and the graph of each of its XNNPACK delegates."""
    views: list[View] = []
    for name in program.methods:
        method = program.method(name)
        flow, inside = _method_views(method, len(views), dialect)
        views += [flow, *inside]
    source = program.file.payload.name
    if not views:
        views.append(View("no methods", [("source", source), ("container", "ExecuTorch program")]))
    return _page(os.path.basename(source) or source, views)


# ---------------------------------------------------------------------------------------------------
# Graphs


def graph_view(facts: Facts, title: str | None = None) -> View:
    """The drawing of a graph."""
    values = {value["id"]: value for value in facts["values"]}
    constants = {constant["index"]: constant for constant in facts["constants"]}
    copied = facts["zero_copy"]
    view = View(
        title or f"graph of {os.path.basename(facts['source']) or facts['source']}",
        [
            ("source", facts["source"]),
            ("container", facts["container"]),
            ("dialect", facts["dialect"]),
            ("version", facts["version"] or "-"),
            ("nodes", str(len(facts["nodes"]))),
            ("values", str(len(values))),
            ("constants", f"{copied['constants']}, {size(copied['bytes'])}"),
            ("in place", f"{copied['in_place']}, {size(copied['bytes_in_place'])}"),
        ],
        list(facts["notes"]),
    )
    makers = {output: node for node in facts["nodes"] for output in node["outputs"]}
    users: dict[int, list[Any]] = {}
    for node in facts["nodes"]:
        for each in dict.fromkeys(node["inputs"]):
            if each is not None:
                users.setdefault(each, []).append(node)
    # Numbers of items first: rows lead to items that come later.
    node_item = {node["index"]: i for i, node in enumerate(facts["nodes"])}
    value_item = {each: len(node_item) + i for i, each in enumerate(values)}
    constant_item = {each: len(node_item) + len(value_item) + i for i, each in enumerate(constants)}
    for node in facts["nodes"]:
        view.items.append(_node_item(node, values, value_item))
    for value in facts["values"]:
        view.items.append(_value_item(value, makers, users, constants, node_item, constant_item))
    for constant in facts["constants"]:
        view.items.append(_constant_item(constant, values, value_item))

    boxes: dict[int, int] = {}
    for place, each in enumerate(facts["inputs"]):
        boxes[each] = view.box(
            value_item[each], _EDGE_OF_GRAPH, f"input {place}", [(_line(values[each]), "", value_item[each])]
        )
    for node in facts["nodes"]:
        lines = []
        for name, each in zip(_operands(node), node["inputs"]):
            if each is not None and values[each]["constant"] is not None:
                constant = constants[values[each]["constant"]]
                text = f"{name} {_line(values[each])}, {size(constant['nbytes'])}"
                lines.append((text, "in" if constant["in_place"] else "copied", value_item[each]))
        lines += [(_line(values[each]), "out", value_item[each]) for each in node["outputs"]]
        handle = f"  @{node['debug_handle']}" if node["debug_handle"] else ""
        number = view.box(
            node_item[node["index"]], _family(node["op"]), f"{node['index']}  {node['op']}{handle}", lines
        )
        for each in dict.fromkeys(node["inputs"]):
            if each is not None and each in boxes:
                view.edges.append((boxes[each], number, value_item[each]))
        boxes.update((each, number) for each in node["outputs"])
    for place, each in enumerate(facts["outputs"]):
        number = view.box(
            value_item[each], _EDGE_OF_GRAPH, f"output {place}", [(_line(values[each]), "", value_item[each])]
        )
        if each in boxes:
            view.edges.append((boxes[each], number, value_item[each]))
    return view


def _family(op: str) -> tuple[str, str]:
    return next(((name, colour) for name, colour, members in _FAMILIES if op in members), _OTHER)


def _operands(node: Facts) -> Sequence[str]:
    from .ops import OPS

    return [name.removesuffix("_id") for name in OPS[node["op"]].inputs]


def _label(value: Facts) -> str:
    return f"{shape(value['shape'])} {value['datatype']}"


def _line(value: Facts) -> str:
    """What a box says of a value: shape, datatype, quantization."""
    params = value["quantization"]
    if params is None:
        return _label(value)
    if params["per"] == "tensor":
        scale = params["scale"]
        detail = f"scale {scale if isinstance(scale, str) else format(scale, '.4g')} zero {params['zero_point']}"
    elif params["per"] == "token":
        detail = "by row"
    else:
        detail = f"{params['scales']} scales"
    return f"{_label(value)}, {detail}"


def _node_item(node: Facts, values: Mapping[int, Facts], value_item: Mapping[int, int]) -> Any:
    rows: list[Row] = [("operator", node["op"], []), ("node", str(node["index"]), [])]
    rows.append(("debug handle", str(node["debug_handle"] or "-"), []))
    for name, each in zip(_operands(node), node["inputs"]):
        if each is None:
            rows.append((name, "absent", []))
        else:
            rows.append((name, f"{_id(each)} {_label(values[each])}", [value_item[each]]))
    for each in node["outputs"]:
        rows.append(("writes", f"{_id(each)} {_label(values[each])}", [value_item[each]]))
    if node["clamp"] is not None:
        rows.append(("limits", " to ".join(map(_word, node["clamp"])), []))
    if node["flags"]:
        rows.append(("flags", f"{node['flags']:#x}", []))
    rows += [(name, _word(value), []) for name, value in node["attrs"].items()]
    shapes = " ".join(_label(values[each]) for each in node["outputs"])
    handle = f"handle {node['debug_handle']}" if node["debug_handle"] else ""
    return "node", f"{node['index']} {node['op']}", f"{shapes} {handle}", rows


def _value_item(
    value: Facts,
    makers: Mapping[int, Facts],
    users: Mapping[int, Sequence[Facts]],
    constants: Mapping[int, Facts],
    node_item: Mapping[int, int],
    constant_item: Mapping[int, int],
) -> Any:
    kind, dims = _type(value)
    rows: list[Row] = [("value", _id(value["id"]), []), ("shape", dims, []), ("datatype", kind, [])]
    rows.append(("array", value["dtype"] or "packed, two elements in a byte", []))
    params = value["quantization"]
    if params is not None:
        rows += [(name.replace("_", " "), _word(each), []) for name, each in params.items() if name != "per"]
        rows.append(("quantized by", params["per"], []))
    if "dq_datatype" in value:
        rows.append(("quantized on its way in", value["dq_datatype"], []))
    if value["external_id"] is not None:
        rows.append(("external id", str(value["external_id"]), []))
    roles = ", ".join(value["roles"]) or "internal"
    rows.append(("role", roles, []))
    if value["id"] in makers:
        maker = makers[value["id"]]
        rows.append(("written by", f"{maker['index']} {maker['op']}", [node_item[maker["index"]]]))
    for user in users.get(value["id"], ()):
        rows.append(("read by", f"{user['index']} {user['op']}", [node_item[user["index"]]]))
    if value["constant"] is not None:
        rows.append(("constant", f"number {value['constant']}", [constant_item[value["constant"]]]))
        constant = constants[value["constant"]]
        rows += _where(constant)
    return "value", f"{_id(value['id'])} {_label(value)}", roles, rows


def _where(constant: Facts) -> list[Row]:
    rows: list[Row] = [("bytes", f"{constant['nbytes']} ({size(constant['nbytes'])})", [])]
    if constant["offset"] is not None:
        rows.append(("lies at", f"{constant['offset']:#x}", []))
    if constant["key"]:
        rows.append(("key", constant["key"], []))
    rows.append(("used", "in place" if constant["in_place"] else f"copied: {constant['reason']}", []))
    return rows


def _constant_item(constant: Facts, values: Mapping[int, Facts], value_item: Mapping[int, int]) -> Any:
    rows: list[Row] = [("constant", f"number {constant['index']}", []), *_where(constant)]
    rows += [("value", f"{_id(each)} {_label(values[each])}", [value_item[each]]) for each in constant["values"]]
    state = "in place" if constant["in_place"] else "copied"
    name = f"constant {constant['index']}, {size(constant['nbytes'])}"
    return "constant", name, f"{state} {constant['key'] or ''}", rows


# ---------------------------------------------------------------------------------------------------
# Programs


def _method_views(method: Method, first: int, dialect: str | None) -> tuple[View, list[View]]:
    """The flow of a method, and the graphs of its delegates; ``first`` is the number of the view of the flow."""
    from . import _reader

    plan = method.plan
    inside: list[View] = []
    doors: dict[int, int] = {}
    problems: dict[int, str] = {}
    for index, delegate in enumerate(plan.delegates):
        if delegate.id != XNNPACK_BACKEND:
            problems[index] = f"of {delegate.id}: not for xnnfast"
            continue
        try:
            graph = _reader.read(method.file.section(plan, index), dialect, limits=method.file.limits).graph()
        except XnnfastError as error:
            # The rest of the program is still worth a look.
            problems[index] = str(error)
            continue
        doors[index] = first + 1 + len(inside)
        inside.append(graph_view(describe(graph), f"{method.name}: delegate {index}"))
    return _flow(method, plan, doors, problems, inside), inside


def _flow(
    method: Method, plan: Plan, doors: Mapping[int, int], problems: Mapping[int, str], inside: Sequence[View]
) -> View:
    work = [
        (chain, place, each)
        for chain, one in enumerate(plan.chains)
        for place, each in enumerate(one.instructions)
        if not isinstance(each, FreeCall)
    ]
    known = {(call.chain, call.instruction): call for call in method.undelegated()}
    nodes = sum(len([item for item in view.items if item[0] == "node"]) for view in inside)
    view = View(
        f"{method.name}: program",
        [
            ("source", method.file.payload.name),
            ("container", "ExecuTorch program"),
            ("method", method.name),
            ("instructions", str(len(work))),
            ("delegates", str(len(plan.delegates))),
            ("nodes in them", str(nodes)),
            ("operators outside", str(len(known))),
        ],
        ["A value is drawn from the instruction that names it first to those that name it later."],
    )
    drawn: dict[int, tuple[int, int]] = {}
    for place, index in enumerate(plan.inputs):
        item = _program_value(view, plan, index)
        text = str(method.inputs[place])
        drawn[index] = view.box(item, _EDGE_OF_GRAPH, f"input {place}", [(text, "", item)]), item
    for chain, place, each in work:
        number = f"{chain}.{place}" if len(plan.chains) > 1 else str(place)
        rows: list[Row] = [("instruction", number, [])]
        item = len(view.items)
        if isinstance(each, DelegateCall):
            kind, name = "delegate", f"delegate {each.delegate_index}"
            delegate = plan.delegates[each.delegate_index]
            rows += [("backend", delegate.id, []), ("payload", size(delegate.blob.nbytes), [])]
            if each.delegate_index in problems:
                kind = "missing"
                rows.append(("problem", problems[each.delegate_index], []))
            else:
                view.doors[item] = doors[each.delegate_index]
        elif isinstance(each, KernelCall):
            call = known[chain, place]
            kind, name = "operator" if call.known else "missing", call.op
            rows.append(("in this package", "yes, by NumPy or joined to a graph" if call.known else "no", []))
            rows += [("from", frame, []) for frame in call.stack]
        elif isinstance(each, MoveCall):
            kind, name = "control", "move"
        else:
            assert isinstance(each, JumpFalseCall)
            kind, name = "control", f"jump to {each.destination_instruction} if false"
        view.items.append((kind if kind != "missing" else "problem", f"{number} {name}", "", rows))
        lines: list[tuple[str, str, int]] = []
        if item in view.doors:
            count = len([one for one in inside[view.doors[item] - min(doors.values())].items if one[0] == "node"])
            lines.append((f"{count} nodes: open", "door", item))
        box = view.box(item, _INSTRUCTIONS[kind], f"{number}  {name}", lines)
        for index in dict.fromkeys(_tensors(plan, each)):
            if index in drawn:
                above, value = drawn[index]
                if above != box:
                    view.edges.append((above, box, value))
                rows.append(("names", view.items[value][1], [value]))
                view.items[value][3].append(("named by", view.items[item][1], [item]))
            else:
                value = _program_value(view, plan, index)
                drawn[index] = box, value
                rows.append(("names first", view.items[value][1], [value]))
                view.items[value][3].append(("first named by", view.items[item][1], [item]))
    for place, index in enumerate(plan.outputs):
        value = drawn[index][1] if index in drawn else _program_value(view, plan, index)
        box = view.box(value, _EDGE_OF_GRAPH, f"output {place}", [(str(method.outputs[place]), "", value)])
        if index in drawn:
            view.edges.append((drawn[index][0], box, value))
    return view


def _tensors(plan: Plan, instruction: Any) -> Iterable[int]:
    """Values of an instruction that flow: tensors that are not constants, also those in lists."""
    if isinstance(instruction, (KernelCall, DelegateCall)):
        named: Iterable[int] = instruction.args
    elif isinstance(instruction, MoveCall):
        named = (instruction.move_from, instruction.move_to)
    else:
        named = (instruction.cond_value_index,)
    for index in named:
        value = plan.values[index]
        if isinstance(value, ListValue) and value.kind in ("TensorList", "OptionalTensorList"):
            for each in value.items:
                if isinstance(each, int) and each >= 0 and _flows(plan, each):
                    yield each
        elif _flows(plan, index):
            yield index


def _flows(plan: Plan, index: int) -> bool:
    value = plan.values[index]
    return isinstance(value, Tensor) and not value.is_constant


def _program_value(view: View, plan: Plan, index: int) -> int:
    value = plan.values[index]
    rows: list[Row] = [("value", str(index), []), ("kind", plan.values.kind(index), [])]
    text = plan.values.kind(index)
    if isinstance(value, Tensor):
        text = f"{shape(value.sizes)} {value.dtype}"
        rows += [("shape", shape(value.sizes), []), ("dtype", str(value.dtype), [])]
        if value.name:
            rows.append(("name", value.name, []))
    view.items.append(("value", f"value {index} {text}", "", rows))
    return len(view.items) - 1


# ---------------------------------------------------------------------------------------------------
# The page


def _page(title: str, views: Sequence[View]) -> str:
    style, script = (_HERE.with_suffix(suffix).read_text("utf-8") for suffix in (".css", ".js"))
    return document(f"{title} - xnnfast", _BODY, style=style, script=script, data=[_drawn(view) for view in views])


def _cut(text: str) -> str:
    return text if len(text) <= WIDEST else text[: WIDEST - 3] + "..."


def _drawn(view: View) -> dict[str, Any]:
    """A view with places, as the script takes it."""
    texts = [[_cut(title), *(_cut(line[0]) for line in lines)] for _, _, title, lines in view.boxes]
    sizes = [(max(max(map(len, text)) * LETTER + 2 * PAD, 90.0), HEAD + LINE * (len(text) - 1)) for text in texts]
    layout = layered(sizes, [edge[:2] for edge in view.edges])
    boxes = [
        {
            "at": [*map(round, place), *map(round, box_size)],
            "item": item,
            "colour": colour,
            "title": text[0],
            "lines": [[short, css, target] for short, (_, css, target) in zip(text[1:], lines)],
        }
        for place, box_size, text, (item, colour, _, lines) in zip(layout.boxes, sizes, texts, view.boxes)
    ]
    return {
        "title": view.title,
        "facts": view.facts,
        "notes": view.notes,
        "legend": list(view.legend.items()),
        "items": view.items,
        "doors": view.doors,
        "size": [round(layout.width), round(layout.height)],
        "boxes": boxes,
        "edges": [
            [item, [round(n) for point in points for n in point]]
            for points, (_, _, item) in zip(layout.edges, view.edges)
        ],
    }


_BODY = """
<header><select id=views aria-label=graph></select><div id=facts></div><div id=legend></div></header>
<main>
<svg id=plan role=img aria-label=graph><g id=world></g></svg>
<canvas id=map width=150 height=260 aria-hidden=true></canvas>
<div id=zoom>
<button id=in title="closer (+)">+</button><button id=out title="farther (-)">&minus;</button>
<button id=fit title="all of it (0)">all</button>
</div>
<aside>
<input id=search type=search placeholder="Search nodes, values, constants ( / )" aria-label=search autocomplete=off>
<div id=count></div><ol id=found></ol>
<section id=detail><h2></h2><table></table></section>
</aside>
</main>
<noscript>This page draws with a script of its own; scripts are off.</noscript>
"""
