"""A profile as one page of HTML that needs nothing else: no network, no files beside it.

In comes a profile; out goes text. The drawings are SVG made here, so that the page shows everything without scripts;
a few lines of script only let a node be picked in one drawing and found in the others.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..html_page import COLOURS, document
from .tables import by_kind, micro, nbytes, percent, place, shapes, time

Facts = Mapping[str, Any]
WIDTH = 1100
BARS = 40


def page(facts: Facts) -> str:
    """The whole page."""
    kinds = list(by_kind(facts["nodes"]))
    colour = {kind: COLOURS[min(i, len(COLOURS) - 1)] for i, kind in enumerate(kinds)}
    title = f"Profile of {facts['model']}"
    roof = facts["roofline"]
    facts_line = [
        ("nodes", f"{time(1000 * facts['total_us'])} in {len(facts['nodes'])}"),
        ("whole call", time(1000 * facts["call_us"])),
        ("invokes", str(facts["rounds"])),
        ("threads", str(facts["threads"])),
        ("batch", "as declared" if facts["batch"] is None else str(facts["batch"])),
    ]
    if roof is not None:
        facts_line += [
            ("CPU", roof["cpu"]),
            ("peak", ", ".join(f"{name} {value:.0f} GFLOP/s" for name, value in roof["peak"].items())),
            ("memory", f"{roof['bandwidth']:.1f} GB/s"),
        ]
    notes = "".join(f"<p class=note>{html.escape(note)}</p>" for note in facts["notes"])
    items = "".join(f"<div><dt>{html.escape(a)}</dt><dd>{html.escape(b)}</dd></div>" for a, b in facts_line)
    legend = "".join(
        f'<span><i style="background:{colour[kind]}"></i>{html.escape(kind)} '
        f"{100 * us / max(facts['total_us'], 1e-9):.1f} %</span>"
        for kind, (_, us) in by_kind(facts["nodes"]).items()
    )
    sections = [
        ("Timeline", "one call, nodes end to end at their mean times", _timeline(facts, colour)),
        ("Longest nodes", f"the {min(BARS, len(facts['nodes']))} that take most", _bars(facts, colour)),
        (
            "Roofline",
            "arithmetic per byte against what was reached; the lines are the best that this machine did"
            if roof is not None
            else "the machine's roofline was not measured",
            _roofline(facts, colour),
        ),
        ("All nodes", "in running order", _table(facts, colour)),
    ]
    body = "".join(
        f"<section><h2>{name}</h2><p class=sub>{html.escape(sub)}</p>{content}</section>"
        for name, sub, content in sections
    )
    return document(
        title,
        f"<main><h1>{html.escape(title)}</h1><dl>{items}</dl>{notes}<div class=legend>{legend}</div>{body}</main>"
        "<div id=tip hidden></div>",
        style=_STYLE,
        script=_SCRIPT,
        data=_data(facts),
    )


def _data(facts: Facts) -> list[list[str]]:
    """What the script shows of a node."""
    return [
        [
            f"{place(node)} {node['kind']}",
            node["kernel"],
            shapes(node),
            f"{micro(node['us'])}, {nbytes(node['bytes'])}"
            + (f", {node['gflops']:.1f} GFLOP/s" if node["gflops"] is not None else "")
            + (f", {percent(node['roofline'])} of roofline" if node["roofline"] is not None else ""),
        ]
        for node in facts["nodes"]
    ]


def _svg(height: float, content: Sequence[str], label: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role=img aria-label="{html.escape(label)}">{"".join(content)}</svg>'
    )


def _text(x: float, y: float, text: str, anchor: str = "start", css: str = "") -> str:
    css = f' class="{css}"' if css else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor={anchor}{css}>{html.escape(text)}</text>'


def _timeline(facts: Facts, colour: Mapping[str, str]) -> str:
    total = max(facts["total_us"], 1e-9)
    content, start = [], 0.0
    step = _nice(total / 8)
    tick = 0.0
    while tick <= total:
        x = WIDTH * tick / total
        content.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1=0 y2=66 class=grid />')
        anchor = "end" if x > WIDTH - 40 else "start"
        label = f"{tick / 1000:g} ms" if total >= 1000 else f"{tick:g} us"
        content.append(_text(x + (3 if anchor == "start" else -3), 78, label, anchor, "axis"))
        tick += step
    for number, node in enumerate(facts["nodes"]):
        width = WIDTH * node["us"] / total
        content.append(
            f'<rect data-n={number} x="{WIDTH * start / total:.2f}" y=8 width="{max(width, 0.15):.2f}" height=50 '
            f'fill="{colour[node["kind"]]}" stroke="var(--back)" stroke-width="{0.6 if width > 3 else 0}"/>'
        )
        start += node["us"]
    return _svg(84, content, "timeline of nodes")


def _bars(facts: Facts, colour: Mapping[str, str]) -> str:
    order = sorted(range(len(facts["nodes"])), key=lambda number: -facts["nodes"][number]["us"])[:BARS]
    longest = max((facts["nodes"][number]["us"] for number in order), default=1) or 1
    content = []
    left, right = 330, 170
    for row, number in enumerate(order):
        node, y = facts["nodes"][number], 18 * row
        width = max(1.0, (WIDTH - left - right) * node["us"] / longest)
        out = " ".join("x".join(map(str, shape)) or "scalar" for shape in node["outputs"])
        content.append(f"<g data-n={number}>")
        content.append(f'<rect x=0 y="{y}" width="{WIDTH}" height=18 class=hit />')
        content.append(_text(left - 10, y + 13, f"{place(node)} {node['kind']} {out}"[:52], "end"))
        content.append(
            f'<rect x="{left}" y="{y + 3}" width="{width:.1f}" height=12 rx=2 fill="{colour[node["kind"]]}"/>'
        )
        share = f", {percent(node['roofline'])} of roof" if node["roofline"] is not None else ""
        content.append(_text(left + width + 6, y + 13, micro(node["us"]) + share, css="axis"))
        content.append("</g>")
    return _svg(max(18, 18 * len(order)), content, "longest nodes")


def _roofline(facts: Facts, colour: Mapping[str, str]) -> str:
    points = [(number, node) for number, node in enumerate(facts["nodes"]) if node["gflops"] and node["intensity"]]
    roof = facts["roofline"]
    if roof is None or not points:
        return "<p class=sub>nothing to draw</p>"
    height, left, bottom, top = 420, 64, 40, 16
    peaks = roof["peak"]
    xs = [node["intensity"] for _, node in points]
    ys = [node["gflops"] for _, node in points] + list(peaks.values())
    x0, x1 = math.floor(math.log10(min(0.05, *xs))), math.ceil(math.log10(max(100, *xs)))
    y0, y1 = math.floor(math.log10(min(1.0, *ys))), max(1, math.ceil(math.log10(max(ys))))

    def at_x(value: float) -> float:
        return left + (WIDTH - left - 150) * (math.log10(value) - x0) / (x1 - x0)

    def at_y(value: float) -> float:
        return height - bottom - (height - bottom - top) * (math.log10(value) - y0) / (y1 - y0)

    content = []
    for power in range(x0, x1 + 1):
        x = at_x(10**power)
        content.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{height - bottom}" class=grid />')
        content.append(_text(x, height - bottom + 16, f"{10**power:g}", "middle", "axis"))
    for power in range(y0, y1 + 1):
        y = at_y(10**power)
        content.append(f'<line x1="{left}" x2="{at_x(10**x1):.1f}" y1="{y:.1f}" y2="{y:.1f}" class=grid />')
        content.append(_text(left - 8, y + 4, f"{10**power:g}", "end", "axis"))
    content.append(_text((left + at_x(10**x1)) / 2, height - 4, "operations per byte", "middle", "axis"))
    content.append(_text(left, 11, "GFLOP/s", "end", "axis"))
    best = max(peaks.values())
    names = ["smallest cache", "larger cache", "memory"]
    before = math.inf
    for (_, rate), name in zip(roof["levels"], names):
        if rate > 0.8 * before:
            # As good as the line above it.
            continue
        before = rate
        low, high = max(10**x0, 10**y0 / rate), best / rate
        content.append(
            f'<line x1="{at_x(low):.1f}" y1="{at_y(low * rate):.1f}" x2="{at_x(min(high, 10**x1)):.1f}" '
            f'y2="{at_y(min(high, 10**x1) * rate):.1f}" class=roof />'
        )
        content.append(_text(at_x(low) + 6, at_y(low * rate) - 6, f"{name} {rate:.0f} GB/s", css="axis"))
    for name, value in peaks.items():
        start = max(10**x0, value / roof["levels"][0][1])
        content.append(
            f'<line x1="{at_x(start):.1f}" x2="{at_x(10**x1):.1f}" y1="{at_y(value):.1f}" y2="{at_y(value):.1f}" '
            "class=roof />"
        )
        content.append(_text(at_x(10**x1) + 6, at_y(value) + 4, f"{name} {value:.0f} GFLOP/s", css="axis"))
    for number, node in points:
        size = 3 + 13 * math.sqrt(node["us"] / max(facts["total_us"], 1e-9))
        content.append(
            f'<circle data-n={number} cx="{at_x(node["intensity"]):.1f}" cy="{at_y(max(node["gflops"], 10**y0)):.1f}" '
            f'r="{size:.1f}" fill="{colour[node["kind"]]}" fill-opacity=0.65 />'
        )
    return _svg(height, content, "roofline plot")


def _nice(step: float) -> float:
    power: float = 10 ** math.floor(math.log10(max(step, 1e-9)))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step)


def _table(facts: Facts, colour: Mapping[str, str]) -> str:
    head = "".join(
        f"<th>{name}</th>"
        for name in ("node", "kind", "kernel", "handle", "shapes", "bytes", "time", "share", "GFLOP/s", "of roof")
    )
    rows = []
    for number, node in enumerate(facts["nodes"]):
        cells = [
            place(node),
            node["kind"],
            node["kernel"],
            str(node["debug_handle"] or "-"),
            shapes(node),
            nbytes(node["bytes"]),
            micro(node["us"]),
            f"{100 * node['us'] / max(facts['total_us'], 1e-9):.1f} %",
            "-" if node["gflops"] is None else f"{node['gflops']:.1f}",
            percent(node["roofline"]),
        ]
        text = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
        rows.append(f'<tr data-n={number} style="--c:{colour[node["kind"]]}">{text}</tr>')
    return f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"


_STYLE = """
main{max-width:1160px;margin:0 auto;padding:24px 28px 60px}h1{font-size:20px;margin:0 0 14px;overflow-wrap:anywhere}
h2{font-size:16px;margin:34px 0 0}.sub{color:var(--soft);margin:2px 0 10px}
dl{display:flex;flex-wrap:wrap;gap:10px 26px;margin:0;padding:12px 16px;background:var(--panel);border-radius:8px}
dt{color:var(--soft);font-size:12px}dd{margin:0;font-variant-numeric:tabular-nums}
.note{color:var(--soft);margin:8px 0 0}.legend{display:flex;flex-wrap:wrap;gap:4px 18px;margin-top:14px}
.legend i{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:6px}
svg{width:100%;height:auto;display:block}svg text{font:12px system-ui,sans-serif;fill:var(--text)}
svg text.axis{fill:var(--soft);font-size:11px}.grid{stroke:var(--line)}.roof{stroke:var(--soft);stroke-width:1.4}
.hit{fill:transparent}[data-n]{cursor:pointer}rect.on,circle.on{stroke:var(--text)!important;stroke-width:2!important}
g.on .hit{fill:var(--panel)}.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:12.5px}
th{text-align:left;color:var(--soft);font-weight:500}th,td{padding:4px 10px 4px 0;border-bottom:1px solid var(--line)}
td{font-variant-numeric:tabular-nums;vertical-align:top}td:first-child{border-left:4px solid var(--c);padding-left:8px}
td:nth-child(n+6),th:nth-child(n+6){text-align:right;white-space:nowrap}tr.on td{background:var(--panel)}
#tip{position:fixed;pointer-events:none;background:var(--text);color:var(--back);padding:6px 10px;border-radius:6px;
font-size:12px;max-width:440px;white-space:pre-line;z-index:9}
"""

_SCRIPT = """
const tip=document.getElementById('tip'),all=n=>document.querySelectorAll('[data-n="'+n+'"]');
const find=e=>e.target.closest&&e.target.closest('[data-n]');
document.addEventListener('mousemove',e=>{const t=find(e);tip.hidden=!t||t.tagName=='TR';if(tip.hidden)return;
tip.textContent=DATA[t.dataset.n].join('\\n');const w=tip.offsetWidth;
tip.style.left=Math.min(e.clientX+14,innerWidth-w-8)+'px';tip.style.top=(e.clientY+16)+'px'});
document.addEventListener('click',e=>{const t=find(e);
document.querySelectorAll('.on').forEach(x=>x.classList.remove('on'));
if(t)all(t.dataset.n).forEach(x=>x.classList.add('on'))});
document.documentElement.dataset.ready=DATA.length;
"""
