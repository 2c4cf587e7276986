"""Records, verdicts and profiles as tables for a person. The only module of this package that needs rich."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import stats

Facts = Mapping[str, Any]
COLOURS = {
    stats.SAME: "green",
    stats.FASTER: "bold green",
    stats.SLOWER: "bold red",
    stats.AMBIGUOUS: "yellow",
    stats.INVALID: "magenta",
}


class Plain(Console):
    """Shows names as they are: what files and users call things is neither markup nor an order to the terminal."""

    def __init__(self, width: int | None, **options: Any) -> None:
        super().__init__(width=width, highlight=False, markup=False, emoji=False, soft_wrap=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        shown = (c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
        return super().render_str("".join(shown), **options)


def console(width: int | None = None) -> Console:
    """One for stdout; what is not a terminal gets plain text, as wide as it needs."""
    made = Plain(width)
    if width is None and not made.is_terminal:
        made = Plain(200, no_color=True)
    return made


def time(ns: float) -> str:
    """A time in the unit that keeps it above 1."""
    if not math.isfinite(ns):
        return "-"
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if abs(ns) >= size:
            return f"{ns / size:.4g} {unit}"
    return f"{ns:.3g} ns"


def nbytes(count: float) -> str:
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB"):
        if abs(value) < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}"


def amount(value: float, unit: str) -> str:
    return nbytes(value) if unit == "bytes" else time(value)


def rate(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:.3g} M/s"
    return f"{value / 1000:.3g} k/s" if value >= 10_000 else f"{value:.4g} /s"


def table(*columns: str, title: str | None = None) -> Table:
    made = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
    for column in columns:
        left = column.startswith("<")
        made.add_column(column.lstrip("<"), justify="left" if left else "right", no_wrap=not left)
    return made


# ---------------------------------------------------------------------------------------------------
# bench


def print_environment(out: Console, facts: Facts) -> None:
    machine, build = facts["environment"], facts["build"]
    pin = build["pin"].get("xnnpack", "unknown")[:10]
    out.print(
        f"xnnfast {build['xnnfast']} (XNNPACK {pin}, {build['isa'][-1]}), Python {build['python']}; {machine['cpu']}, "
        f"{build['cpus']} CPUs ({build['cpus_reason']}), load {machine['load'][0]:.2f}"
    )
    for note in facts["notes"]:
        out.print(f"note: {note}", style="yellow")


def print_bench(facts: Facts, out: Console | None = None) -> None:
    """The figures of a record."""
    out = out or console()
    print_environment(out, facts)
    for model in facts["models"]:
        nodes = "" if model["nodes"] is None else f", {model['nodes']} nodes"
        out.print(
            f"\n{model['path']}: {model['kind']} ({model['delegation']}{nodes}), {nbytes(model['nbytes'])}",
            style="bold",
        )
        for note in model["notes"]:
            out.print(f"note: {note}", style="yellow")
        rows = table(
            "batch", "threads", "workers", "median", "p90", "p95", "p99", "p99.9", "items", "CPU/item", "spread",
            "processes", title="latency and throughput",
        )  # fmt: skip
        openings = table(
            "batch", "threads", "workers", "load", "pack", "plan", "first run", "total", "resident", "peak", "packed",
            "workspace", "mapped", title="opening and memory",
        )  # fmt: skip
        for result in model["results"]:
            place = [str(result["batch"] or "-"), str(result["threads"]), str(result["workers"])]
            if result.get("summary") is None:
                out.print(f"batch {place[0]}, {place[1]} threads, {place[2]} workers: {result['error']}", style="red")
                continue
            summary = result["summary"]
            latency, medians = summary["latency_ns"], summary["process_medians_ns"]
            rows.add_row(
                *place,
                *(time(latency[name]) for name in ("median", "p90", "p95", "p99", "p99.9")),
                rate(summary["items_per_second"]),
                time(summary["cpu_ns_per_item"]),
                f"{100 * 1.4826 * medians['mad'] / medians['median']:.1f} %",
                f"{summary['undisturbed']}/{summary['processes']}",
            )
            load, memory = summary["load_ns"], summary["memory"]
            openings.add_row(
                *place,
                *(time(load[name]) if name in load else "-" for name in ("load", "pack", "plan", "first", "total")),
                *(
                    nbytes(memory[name]) if name in memory else "-"
                    for name in ("resident", "peak", "packed", "workspace", "mapped")
                ),
            )  # fmt: skip
        out.print(rows)
        out.print(openings)
        for result in model["results"]:
            for line in remarks(result):
                out.print(f"note: {line}", style="yellow")


def remarks(result: Facts) -> list[str]:
    """What a reader of the figures has to know."""
    summary = result.get("summary")
    if summary is None:
        return []
    where = f"batch {result['batch']}, {result['threads']} threads, {result['workers']} workers"
    found = []
    if result["error"] is not None:
        found.append(f"{where}: given up after {summary['processes']} processes: {result['error']}")
    bad = summary["processes"] - summary["undisturbed"]
    if bad:
        causes = sorted({text for each in result["processes"] for text in each["disturbed"].values()})
        used = "figures are from the others" if summary["undisturbed"] else "figures are from these all the same"
        found.append(f"{where}: {bad} of {summary['processes']} processes were disturbed ({causes[0]}, ...); {used}")
    if summary["stable"] < summary["processes"]:
        found.append(
            f"{where}: {summary['processes'] - summary['stable']} processes were not yet stable after warming up"
        )
    if abs(summary["drift"]) > 0.05:
        found.append(f"{where}: the first fifth of samples lies {100 * summary['drift']:+.0f} % from the rest")
    if summary["calls_per_sample"] > 1:
        found.append(f"{where}: a sample is {summary['calls_per_sample']} calls, percentiles are of such means")
    return found


# ---------------------------------------------------------------------------------------------------
# compare


def print_compare(facts: Facts, out: Console | None = None) -> None:
    """The verdicts and what they rest on."""
    out = out or console()
    for reason in facts.get("refused", ()):
        out.print(f"not comparable: {reason}", style="magenta")
    for note in facts.get("notes", ()):
        out.print(f"note: {note}", style="yellow")
    if facts.get("settings", {}).get("clock") == "cpu":
        out.print("times are CPU time of the process: what waiting costs is not seen")
    for result in facts["results"]:
        disturbed = f", {result['disturbed']} disturbed ones thrown away" if result["disturbed"] else ""
        outputs = f"; outputs: {result['outputs']}" if result["outputs"] else ""
        out.print(f"\n{result['label']}: {result['rounds']} rounds{disturbed}{outputs}", style="bold")
        for reason in result["invalid"]:
            out.print(f"invalid: {reason}", style="magenta")
        for note in result["notes"]:
            out.print(f"note: {note}", style="yellow")
        rows = table("<metric", "A", "B", "B / A", "interval (99 %)", "p", "counts beyond", "A/A noise", "<verdict")
        for metric in result["metrics"]:
            verdict = Text(metric["verdict"], COLOURS[metric["verdict"]])
            if "ratio" not in metric:
                rows.add_row(metric["metric"], *["-"] * 7, verdict)
                continue
            low, high = metric["interval"]
            rows.add_row(
                metric["metric"],
                amount(metric["a"], metric["unit"]),
                amount(metric["b"], metric["unit"]),
                f"{metric['ratio']:.3f}",
                f"{low:.3f} to {high:.3f}",
                f"{metric['corrected_p']:.2g}",
                f"{100 * metric['threshold']:.1f} %",
                f"{100 * metric['noise']:.1f} %",
                verdict,
            )
        out.print(rows)
    seconds = f" after {facts['seconds']:.0f} s" if "seconds" in facts else ""
    out.print(Text.assemble((facts["verdict"], COLOURS[facts["verdict"]]), seconds))


# ---------------------------------------------------------------------------------------------------
# profile


def micro(us: float) -> str:
    return "< 1 us" if us < 1 else f"{us:.1f} us"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def print_profile(facts: Facts, out: Console | None = None, *, top: int | None = None) -> None:
    """The nodes of a profile in running order, or those that take longest."""
    out = out or console()
    roof = facts["roofline"]
    out.print(
        f"{facts['model']}: {time(1000 * facts['total_us'])} in {len(facts['nodes'])} nodes, "
        f"{facts['rounds']} invokes, {facts['threads']} thread{'' if facts['threads'] == 1 else 's'}",
        style="bold",
    )
    if roof is not None:
        peaks = ", ".join(f"{name} {value:.0f} GFLOP/s" for name, value in roof["peak"].items())
        out.print(f"roofline of this machine: {peaks}, {roof['bandwidth']:.1f} GB/s")
    nodes = facts["nodes"]
    if top is not None:
        nodes = sorted(nodes, key=lambda node: -node["us"])[:top]
    rows = table(
        "node", "<kind", "<kernel", "handle", "<shapes", "bytes", "time", "share", "GFLOP/s", "GB/s", "of roofline"
    )
    for node in nodes:
        rows.add_row(
            place(node),
            node["kind"],
            node["kernel"],
            str(node["debug_handle"] or "-"),
            shapes(node),
            nbytes(node["bytes"]),
            micro(node["us"]),
            f"{100 * node['us'] / max(facts['total_us'], 1e-9):.1f} %",
            "-" if node["gflops"] is None else f"{node['gflops']:.1f}",
            "-" if node["gbytes"] is None else f"{node['gbytes']:.1f}",
            percent(node["roofline"]),
        )
    out.print(rows)
    kinds = table("<kind", "nodes", "time", "share", title="by kind")
    for kind, (count, us) in by_kind(facts["nodes"]).items():
        kinds.add_row(kind, str(count), micro(us), f"{100 * us / max(facts['total_us'], 1e-9):.1f} %")
    out.print(kinds)
    for note in facts["notes"]:
        out.print(f"note: {note}", style="yellow")


def place(node: Facts) -> str:
    part = "" if node["part"] is None else f"{node['part']}:"
    return part + ("+" if node["index"] < 0 else str(node["index"]))


def shapes(node: Facts) -> str:
    sides = [" ".join("x".join(map(str, shape)) or "scalar" for shape in node[side]) for side in ("inputs", "outputs")]
    return " -> ".join(side for side in sides if side)


def by_kind(nodes: Sequence[Facts]) -> dict[str, tuple[int, float]]:
    found: dict[str, tuple[int, float]] = {}
    for node in nodes:
        count, us = found.get(node["kind"], (0, 0.0))
        found[node["kind"]] = count + 1, us + node["us"]
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def print_diff(facts: Facts, out: Console | None = None) -> None:
    """Two profiles node by node, the largest differences first."""
    out = out or console()
    out.print(
        f"{facts['a']} {time(1000 * facts['total_us'][0])}, {facts['b']} {time(1000 * facts['total_us'][1])}: "
        f"{facts['total_us'][1] / max(facts['total_us'][0], 1e-9):.3f} of it",
        style="bold",
    )
    rows = table("node A", "node B", "<kind", "<kernel", "<shapes", "A", "B", "difference", "B / A")
    for row in facts["rows"]:
        a, b = row["a"], row["b"]
        some = a or b
        kernels = dict.fromkeys(each["kernel"] for each in (a, b) if each is not None)
        rows.add_row(
            "-" if a is None else place(a),
            "-" if b is None else place(b),
            some["kind"],
            " | ".join(kernels),
            shapes(some),
            "-" if a is None else micro(a["us"]),
            "-" if b is None else micro(b["us"]),
            f"{row['difference_us']:+.1f} us",
            "-" if row["ratio"] is None else f"{row['ratio']:.2f}",
        )
    out.print(rows)
    for note in facts["notes"]:
        out.print(f"note: {note}", style="yellow")
