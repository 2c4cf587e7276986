"""Profiles: figures of nodes, their differences, the trace, and the page in a real browser."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
from browser import assert_shows_something, dom, needs_browser, screenshot
from sketch import Sketch

from xnnfast.bench import costs, profile, record, roofline
from xnnfast.builder import GraphBuilder
from xnnfast.errors import ArgumentError, FormatError, UnsupportedError
from xnnfast.program import Program

ROOF = {
    "threads": 1,
    "cpu": "a CPU",
    "peak": {"fp32": 100.0, "int8": 400.0},
    "levels": [[1000, 50.0], [100_000, 20.0], [10_000_000, 10.0]],
    "bandwidth": 10.0,
}


@pytest.fixture
def no_measuring(monkeypatch):
    monkeypatch.setattr(profile, "roofline", lambda threads, again=False: ROOF)


def network(path: Path, *, extra: int = 0) -> Path:
    rng = np.random.default_rng(0)
    b = GraphBuilder()
    x = b.input((1, 16, 16, 8))
    x = b.conv2d(x, rng.standard_normal((16, 3, 3, 8), np.float32), padding=1, clamp=(0, None), debug_handle=7)
    for _ in range(extra):
        x = b.sigmoid(x)
    x = b.global_average_pooling2d(x, keep_dims=False)
    b.output(b.fully_connected(x, rng.standard_normal((10, 16), np.float32), debug_handle=9))
    b.save(path)
    return path


@pytest.fixture
def facts(tmp_path, no_measuring):
    return profile.profile(network(tmp_path / "net.xnn"), seconds=0.05)


# ---- costs


def test_operations_of_products_count_multiplication_and_addition():
    conv = {"kernel_height": 3, "kernel_width": 3, "group_input_channels": 8, "group_output_channels": 16, "groups": 1}
    assert costs.operations("conv2d", conv, [(1, 16, 16, 8)], [(1, 16, 16, 16)]) == 2 * 16 * 16 * 16 * 9 * 8
    assert costs.operations("fully_connected", {}, [(4, 8), (3, 8)], [(4, 3)]) == 2 * 4 * 3 * 8
    assert costs.operations("batch_matrix_multiply", {}, [(2, 4, 8), (2, 8, 3)], [(2, 4, 3)]) == 2 * 2 * 4 * 3 * 8
    assert costs.operations("add", {}, [(4, 8), (4, 8)], [(4, 8)]) == 32
    assert costs.operations("static_transpose", {}, [(4, 8)], [(8, 4)]) == 0


def test_every_operator_has_a_count():
    from xnnfast.ops import OPS

    unknown = (costs.MOVES | set(costs.COUNTS)) - set(OPS)
    assert not unknown


# ---- roofline


def test_roof_is_the_higher_of_arithmetic_and_traffic():
    assert roofline.roof(ROOF, "fp32", 10**9, 1000) == pytest.approx(0.01)
    assert roofline.roof(ROOF, "int8", 10**9, 1000) == pytest.approx(0.0025)
    assert roofline.roof(ROOF, "fp32", 1, 10**6) == pytest.approx(1e-4)
    # A working set that fits into a cache is served by it.
    assert roofline.roof(ROOF, "fp32", 1, 1000) == pytest.approx(1000 / 50e9)


def test_roofline_is_measured_once_and_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls = []
    measured = {key: ROOF[key] for key in ("peak", "levels", "bandwidth")}
    monkeypatch.setattr(roofline, "measure", lambda threads: calls.append(threads) or measured)
    first = roofline.roofline(1)
    assert roofline.roofline(1) == first and calls == [1]
    roofline.roofline(2)
    roofline.roofline(1, again=True)
    assert calls == [1, 2, 1]


@pytest.mark.parametrize("text", ["{}", "[", '{"peak": {"fp32": 0}}', "null"])
def test_a_spoilt_roofline_is_measured_again(tmp_path, monkeypatch, text):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured = {key: ROOF[key] for key in ("peak", "levels", "bandwidth")}
    monkeypatch.setattr(roofline, "measure", lambda threads: measured)
    roofline.roofline(1)
    (path,) = (tmp_path / "xnnfast").iterdir()
    path.write_text(text)
    assert roofline.roofline(1)["peak"] == ROOF["peak"]
    assert json.loads(path.read_text())["bandwidth"] == 10.0


def test_measured_roofline_is_plausible():
    found = roofline.measure(1, seconds=0.02)
    assert set(found["peak"]) == {"fp32", "int8"} and min(found["peak"].values()) > 0.1
    rates = [rate for _, rate in found["levels"]]
    assert rates == sorted(rates, reverse=True) and rates[-1] > 0.05


# ---- profiles


def test_nodes_stand_with_kind_kernel_handle_shapes_and_figures(facts):
    conv = facts["nodes"][0]
    assert conv["kind"] == "conv2d" and conv["debug_handle"] == 7 and conv["index"] == 0
    assert "Convolution" in conv["kernel"]
    assert conv["inputs"][0] == [1, 16, 16, 8] and conv["outputs"] == [[1, 16, 16, 16]]
    assert conv["operations"] == 2 * 16 * 16 * 16 * 9 * 8
    assert conv["bytes"] == 4 * (16 * 16 * 8 + 16 * 3 * 3 * 8 + 16 * 16 * 16) + 4 * 16 * (len(conv["inputs"]) - 2)
    assert facts["nodes"][-1]["kind"] == "fully_connected" and facts["nodes"][-1]["debug_handle"] == 9
    assert facts["rounds"] >= 25 and facts["rounds"] % profile.BATCHES == 0


def test_figures_follow_from_the_time(no_measuring):
    node = {"us": 100.0, "index": 0, "operations": 1_000_000, "bytes": 50_000, "precision": "fp32"}
    profile._rate(node, ROOF)
    assert node["gflops"] == pytest.approx(10) and node["gbytes"] == pytest.approx(0.5)
    assert node["intensity"] == 20 and node["roofline"] == pytest.approx(0.1)


def test_nodes_below_the_clock_have_no_rate(no_measuring):
    node = {"us": 0.4, "index": 0, "operations": 1_000_000, "bytes": 50_000, "precision": "fp32"}
    profile._rate(node, ROOF)
    assert node["gflops"] is None and node["roofline"] is None


def test_batch_changes_shapes(tmp_path, no_measuring):
    found = profile.profile(network(tmp_path / "net.xnn"), batch=3, seconds=0.02)
    assert found["nodes"][0]["inputs"][0] == [3, 16, 16, 8]


def test_inputs_are_counted(tmp_path, no_measuring):
    np.save(tmp_path / "x.npy", np.ones((1, 16, 16, 8), np.float32))
    path = network(tmp_path / "net.xnn")
    assert profile.profile(path, seconds=0.02, inputs=[tmp_path / "x.npy"])["nodes"]
    with pytest.raises(ArgumentError, match="need 1 input files, got 2"):
        profile.profile(path, inputs=[tmp_path / "x.npy"] * 2)


def test_inputs_that_are_no_arrays_are_refused(tmp_path):
    (tmp_path / "x.npy").write_bytes(b"no array")
    with pytest.raises(ArgumentError, match=r"need a \.npy file"):
        profile.profile(network(tmp_path / "net.xnn"), inputs=[tmp_path / "x.npy"])


def test_bfloat16_comes_from_files(tmp_path, no_measuring):
    b = GraphBuilder()
    b.output(b.add(b.input((2, 3), "bf16"), b.input((2, 3), "bf16")))
    b.save(tmp_path / "bf16.xnn")
    np.save(tmp_path / "x.npy", np.zeros((2, 3), "V2"))
    try:
        found = profile.profile(tmp_path / "bf16.xnn", seconds=0.01, inputs=[tmp_path / "x.npy"] * 2)
    except UnsupportedError:
        pytest.skip("this build does not compute bf16")
    assert found["nodes"][0]["kind"] == "add"


def two_delegates(path: Path) -> Path:
    """A program that comes down to one graph."""
    sketch = Sketch()
    x, y, z = (sketch.tensor((2, 3)) for _ in range(3))
    sketch.delegate(lambda b, v: b.sigmoid(v), [x], [y])
    sketch.delegate(lambda b, v: b.abs(v), [y], [z])
    path.write_bytes(sketch.program([x], [z]))
    return path


def test_a_program_that_comes_down_to_one_graph(tmp_path, no_measuring):
    found = profile.profile(two_delegates(tmp_path / "two.pte"), seconds=0.01)
    assert [(node["part"], node["kind"]) for node in found["nodes"]] == [(0, "sigmoid"), (0, "abs")]


def test_a_program_with_state_is_walked_as_it_runs(tmp_path):
    sketch = Sketch()
    x, kept = sketch.tensor((2, 3)), sketch.tensor((2, 3))
    total, returned = sketch.tensor((2, 3)), sketch.tensor((2, 3))
    sketch.delegate(lambda b, v, w: b.add(v, w), [x, kept], [total])
    sketch.kernel("aten::copy_", kept, total, sketch.number(False), returned)
    one = np.ones((2, 3), np.float32)
    with Program(sketch.program([x], [returned])) as program:
        routine, taken = profile._routine(program, "forward", [one])
        for _ in range(2):
            profile._walk(routine, taken, [[] for _ in routine.straight], None)
        np.testing.assert_array_equal(program.run(one)[0], 4 * one)


def test_difference_finds_the_nodes_that_are_new(tmp_path, no_measuring):
    a = profile.profile(network(tmp_path / "a.xnn"), seconds=0.02)
    b = profile.profile(network(tmp_path / "b.xnn", extra=2), seconds=0.02)
    found = profile.diff(a, b)
    new = [row["b"]["kind"] for row in found["rows"] if row["a"] is None]
    assert new == ["sigmoid", "sigmoid"]
    assert not [row for row in found["rows"] if row["b"] is None]
    assert sum(row["difference_us"] for row in found["rows"]) == pytest.approx(b["total_us"] - a["total_us"])
    sizes = [abs(row["difference_us"]) for row in found["rows"]]
    assert sizes == sorted(sizes, reverse=True)
    assert profile.diff(a, {**b, "threads": 2})["notes"] == ["threads differ: 1 and 2"]


def test_trace_is_what_chrome_reads(facts):
    found = profile.trace(facts)
    json.dumps(found, allow_nan=False)
    spans = [event for event in found["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == len(facts["nodes"])
    for before, after in itertools.pairwise(spans):
        assert after["ts"] == pytest.approx(before["ts"] + before["dur"], abs=0.01)
    assert spans[0]["args"]["debug_handle"] == 7


def test_profiles_are_read_back(facts, tmp_path):
    record.save(facts, tmp_path / "p.json")
    assert record.load(tmp_path / "p.json", record.PROFILE) == facts


PROFILE_MISFITS = [
    ("need a number of at least 0 in total_us, found -1", lambda facts: facts.update(total_us=-1)),
    ("need kernel in nodes", lambda facts: facts["nodes"][0].pop("kernel")),
    ("need a number of at least 0 in .*us, found null", lambda facts: facts["nodes"][0].update(us=None)),
    ("need a whole number in .*inputs", lambda facts: facts["nodes"][0].update(inputs=[["<b>"]])),
    ("need fp32, int8 in roofline.peak", lambda facts: facts.update(roofline={**ROOF, "peak": {}})),
    ("need a list with something in it in roofline.levels", lambda facts: facts["roofline"].update(levels=[])),
    ("need an object in roofline, found 7", lambda facts: facts.update(roofline=7)),
]


@pytest.mark.parametrize("reason, change", PROFILE_MISFITS, ids=[reason for reason, _ in PROFILE_MISFITS])
def test_profiles_that_were_changed_by_hand_are_refused(facts, tmp_path, reason, change):
    facts["roofline"] = dict(ROOF)
    change(facts)
    (tmp_path / "p.json").write_text(json.dumps(facts))
    with pytest.raises(FormatError, match=reason):
        record.load(tmp_path / "p.json", record.PROFILE)


def test_profiles_without_roofline_are_read_back(facts, tmp_path):
    facts["roofline"] = None
    record.save(facts, tmp_path / "p.json")
    assert record.load(tmp_path / "p.json", record.PROFILE) == facts


# ---- tables and page


@pytest.mark.parametrize("us", [0.0, 1e9])
def test_page_is_made_of_figures_at_the_edge(facts, us):
    page = pytest.importorskip("xnnfast.bench.page")
    facts["roofline"] = {**ROOF, "peak": {"fp32": 1.0, "int8": 1.0}}
    facts["total_us"] = us * len(facts["nodes"])
    for node in facts["nodes"]:
        node["us"] = us
        profile._rate(node, facts["roofline"])
        node["gflops"] = node["gflops"] and 1.0
    assert "nan" not in page.page(facts)
    facts["nodes"], facts["total_us"] = [], 0.0
    assert "nothing to draw" in page.page(facts)


def test_names_stand_in_the_table_as_they_are(facts):
    tables = pytest.importorskip("xnnfast.bench.tables")
    facts["model"] = "[/x].xnn"
    facts["nodes"][0].update(kind="[/kind]", kernel="[bold]kernel")
    out = tables.console(200)
    with out.capture() as captured:
        tables.print_profile(facts, out)
        tables.print_diff(profile.diff(facts, facts), out)
    assert "[/x].xnn: " in captured.get() and captured.get().count("[bold]kernel") == 2


def test_table_says_below_one_microsecond(facts):
    tables = pytest.importorskip("xnnfast.bench.tables")
    facts["nodes"][-1]["us"] = 0.3
    out = tables.console(200)
    with out.capture() as captured:
        tables.print_profile(facts, out)
    assert "< 1 us" in captured.get() and "conv2d" in captured.get()


@pytest.fixture
def html(facts):
    page = pytest.importorskip("xnnfast.bench.page")
    facts["model"] = "</script><b>net</b>.xnn"
    return page.page(facts)


def test_page_needs_nothing_else(html):
    assert not re.search(r"(?:src|href)\s*=|url\(|@import|https?://", html)
    assert "<b>net" not in html


@needs_browser
def test_page_is_drawn_by_a_browser(html, facts, tmp_path):
    (tmp_path / "p.html").write_text(html)
    shown = dom(f"file://{tmp_path}/p.html")
    # The script ran to its end and found every node.
    assert f'data-ready="{len(facts["nodes"])}"' in shown
    for name in ("timeline of nodes", "longest nodes", "roofline plot"):
        assert f'aria-label="{name}"' in shown
    assert shown.count("<tr data-n=") == len(facts["nodes"])
    screenshot(f"file://{tmp_path}/p.html", tmp_path / "p.png", size=(1200, 1400))
    assert_shows_something(tmp_path / "p.png")
