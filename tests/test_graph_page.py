"""The page of ``inspect --html``: places of boxes, what is said, strangers' names, and the page in a real browser."""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import assert_shows_something, dom, needs_browser, screenshot
from files import SHARED, needs_shared, seed

import xnnfast as xf
from xnnfast import graph_page, html_page
from xnnfast.describe import describe
from xnnfast.errors import LimitError
from xnnfast.layout import GAP, layered

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "images"
EVIL = "</script><img src=x onerror=alert(1)><b>name"


def data(page: str) -> Any:
    """What the page holds for its script."""
    (text,) = re.findall(r"<script type=application/json id=data>(.*?)</script>", page, re.S)
    return json.loads(text)


def rows(item: list[Any]) -> dict[str, str]:
    return {name: text for name, text, _ in item[3]}


def network(nodes: int = 4) -> xf.GraphBuilder:
    """A convolution, then elementwise nodes, every tenth with a shortcut."""
    rng = np.random.default_rng(0)
    b = xf.GraphBuilder()
    x = b.conv2d(b.input((1, 8, 8, 4)), rng.standard_normal((8, 3, 3, 4), np.float32), padding=1, debug_handle=77)
    kept = x
    for number in range(nodes - 1):
        x = b.add(x, kept) if number % 10 == 9 else b.sigmoid(x) if number % 2 else b.multiply(x, np.float32([2]))
        kept = x if number % 10 == 9 else kept
    b.output(x)
    return b


def page_of(b: xf.GraphBuilder) -> str:
    return graph_page.graph_page(describe(xf.load(b.finish())))


# ---- places


def test_boxes_of_a_layer_do_not_overlap_and_edges_go_down() -> None:
    order = random.Random(0)
    edges = [(i, order.randrange(i + 1, min(i + 20, 80))) for i in range(79) for _ in range(2)]
    sizes = [(order.uniform(60, 200), order.uniform(20, 90)) for _ in range(80)]
    found = layered(sizes, edges)
    assert len(found.boxes) == 80 and len(found.edges) == len(edges)
    for (x1, y1), (w1, h1) in zip(found.boxes, sizes):
        assert x1 >= -1e-6 and x1 + w1 <= found.width + 1e-6 and y1 + h1 <= found.height + 1e-6
    for i in range(80):
        for j in range(i):
            (x1, y1), (x2, y2) = found.boxes[i], found.boxes[j]
            apart = x1 + sizes[i][0] + GAP <= x2 + 1e-6 or x2 + sizes[j][0] + GAP <= x1 + 1e-6
            assert apart or y1 + sizes[i][1] <= y2 or y2 + sizes[j][1] <= y1
    for points in found.edges:
        heights = [y for _, y in points]
        assert heights == sorted(heights) and heights[0] < heights[-1]


def test_edges_start_below_their_box_and_end_above_the_other() -> None:
    found = layered([(100.0, 30.0), (50.0, 20.0)], [(0, 1)])
    assert found.boxes[0][1] + 30 == found.edges[0][0][1]
    assert found.edges[0][-1] == (found.boxes[1][0] + 25, found.boxes[1][1])


def test_chains_are_straight_and_sources_stand_above_their_use() -> None:
    # A chain of 50, and a source that only its last box needs.
    found = layered([(100.0, 30.0)] * 51, [*((i, i + 1) for i in range(49)), (50, 49)])
    assert len({round(x, 3) for x, _ in found.boxes[:48]}) == 1
    assert found.boxes[50][1] == found.boxes[48][1]


def test_many_shortcuts_do_not_lean() -> None:
    edges = [*((i, i + 1) for i in range(399)), *((i, i + 2) for i in range(0, 398, 2))]
    found = layered([(160.0, 60.0)] * 400, edges)
    assert found.width < 1000
    for i, (x1, y1) in enumerate(found.boxes):
        assert all(y1 != y2 or x1 + 160 <= x2 or x2 + 160 <= x1 for x2, y2 in found.boxes[:i])


def test_cycles_are_refused() -> None:
    with pytest.raises(ValueError, match="without cycles"):
        layered([(1.0, 1.0)] * 2, [(0, 1), (1, 0)])


def test_nothing_has_no_size() -> None:
    assert layered([], []).width == 0


# ---- what is said


def test_page_says_what_the_file_holds() -> None:
    b = xf.GraphBuilder()
    params = xf.PerTensor(0.5, 3)
    x = b.input((1, 4), "qint8", params)
    filter = b.constant(np.ones((8, 4), np.int8), quantization=xf.PerChannel(np.full(8, 0.25, np.float32), 0))
    b.output(b.fully_connected(x, filter, quantization=xf.PerTensor(0.125, -1), debug_handle=99))
    (view,) = data(page_of(b))
    items = {(item[0], item[1]): rows(item) for item in view["items"]}
    node = items["node", "0 fully_connected"]
    assert node["debug handle"] == "99" and node["bias"] == "absent" and "8x4 qcint8" in node["filter"]
    value = next(each for (kind, name), each in items.items() if kind == "value" and "qcint8" in name)
    assert value["scales"] == "8" and value["quantized by"] == "channel" and value["used"] == "in place"
    assert value["lies at"].startswith("0x") or value["key"]
    constant = next(each for (kind, _), each in items.items() if kind == "constant")
    assert constant["bytes"].startswith("32 ")
    lines = [line for box in view["boxes"] for line in box["lines"]]
    assert any("scale 0.125 zero -1" in text for text, _, _ in lines)
    assert any(css == "in" and "32 bytes" in text for text, css, _ in lines)
    assert len(view["edges"]) == 2 and [box["title"] for box in view["boxes"]] == [
        "input 0",
        "0  fully_connected  @99",
        "output 0",
    ]


def test_copied_constants_say_why() -> None:
    graph = xf.load(network().finish(), copy=True)
    (view,) = data(graph_page.graph_page(describe(graph)))
    copied = [rows(item) for item in view["items"] if item[0] == "constant"]
    assert copied and all(each["used"].startswith("copied: ") for each in copied)


def test_rows_lead_to_items_that_exist() -> None:
    (view,) = data(page_of(network(30)))
    for item in view["items"]:
        for _, _, targets in item[3]:
            assert all(0 <= target < len(view["items"]) for target in targets)
    assert all(0 <= item < len(view["items"]) for item, _ in view["edges"])


def test_same_file_gives_the_same_page() -> None:
    assert page_of(network(40)) == page_of(network(40))


def test_seed_files_are_drawn() -> None:
    (view,) = data(graph_page.graph_page(describe(xf.load(seed()))))
    assert dict(view["facts"])["dialect"] == "seed" and len(view["boxes"]) == 3


def test_pages_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_page, "MAX_BOXES", 12)
    page_of(network(10))
    with pytest.raises(LimitError, match="can show 12"):
        page_of(network(11))


@needs_shared
def test_programs_show_their_flow_and_every_delegate(tmp_path: Path) -> None:
    with xf.Program(SHARED / "models" / "bert_mini_fp32_b1" / "model.pte") as program:
        page = graph_page.program_page(program)
        delegates = len(program.delegates)
    views = data(page)
    assert delegates > 1 and len(views) == 1 + delegates
    flow = views[0]
    assert sorted(flow["doors"].values()) == list(range(1, 1 + delegates))
    for item, door in flow["doors"].items():
        index = int(flow["items"][int(item)][1].rsplit(" ", 1)[1])
        assert views[door]["title"] == f"forward: delegate {index}"
    titles = [box["title"] for box in flow["boxes"]]
    assert sum("aten::native_layer_norm" in title for title in titles) >= 4


# ---- strangers


def hostile_page() -> str:
    facts = describe(xf.load(network().finish()))
    facts["source"] = facts["version"] = EVIL
    facts["notes"] = [EVIL]
    for constant in facts["constants"]:
        constant["key"], constant["in_place"], constant["reason"] = EVIL, False, EVIL
    return graph_page.graph_page(facts)


def test_names_of_strangers_stay_text() -> None:
    page = hostile_page()
    assert "<img" not in page and "<b>name" not in page
    assert page.count("</script>") == 2
    (view,) = data(page)
    assert dict(view["facts"])["version"] == EVIL


def test_page_needs_nothing_else() -> None:
    page = page_of(network())
    outside = re.sub(r"http://www\.w3\.org/2000/svg", "", page)
    assert not re.search(
        r"\b(?:src|href)\s*=|url\(|@import|https?://|fetch\(|XMLHttpRequest|WebSocket|\beval\b", outside
    )
    assert "default-src 'none'" in page


def test_names_that_are_no_text_can_be_saved(tmp_path: Path) -> None:
    html_page.save(html_page.document(os.fsdecode(b"a\xffb"), "", style="", script="", data=[]), tmp_path / "p.html")
    assert rb"<title>a\udcffb</title>" in (tmp_path / "p.html").read_bytes()


@needs_browser
def test_browser_runs_nothing_that_a_name_brings(tmp_path: Path) -> None:
    # Even past the escaping: a page into which an element was put does not run it.
    page = hostile_page()
    (tmp_path / "p.html").write_text(page.replace("<main>", "<img src=x onerror=\"document.title='run'\"><main>"))
    shown = dom(f"file://{tmp_path}/p.html")
    assert "<title>run" not in shown and 'data-ready="' in shown
    assert "&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;" in shown


# ---- in a browser


@needs_browser
@pytest.mark.parametrize("nodes", [5, 500])
def test_page_is_drawn_by_a_browser(nodes: int, tmp_path: Path) -> None:
    (tmp_path / "p.html").write_text(page_of(network(nodes)))
    shown = dom(f"file://{tmp_path}/p.html")
    assert f'data-ready="{nodes + 2}"' in shown
    assert shown.count('<g class="b"') == nodes + 2
    assert shown.count('class="e"') >= nodes + 1
    screenshot(f"file://{tmp_path}/p.html", tmp_path / "p.png")
    assert_shows_something(tmp_path / "p.png", ink=0.05)


@needs_browser
def test_search_and_links_to_places_work(tmp_path: Path) -> None:
    # A script of the test's own, allowed for this copy of the page only.
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page_of(network(60)))
    driver = (
        "<script>search.value='conv2d 77';search.dispatchEvent(new Event('input'));"
        "search.dispatchEvent(new KeyboardEvent('keydown',{key:'Enter'}));"
        "document.body.dataset.hits=hits.length;document.body.dataset.name=document.querySelector('#detail h2')."
        "textContent;document.body.dataset.lit=document.querySelectorAll('.b.on').length</script>"
    )
    (tmp_path / "p.html").write_text(page.replace("</body>", driver + "</body>"))
    shown = dom(f"file://{tmp_path}/p.html")
    assert 'data-name="node 0 conv2d"' in shown and 'data-lit="1"' in shown
    (hits,) = re.findall(r'data-hits="(\d+)"', shown)
    assert int(hits) >= 1
    # The place in the address is the item that opens.
    (tmp_path / "p.html").write_text(page)
    (view,) = data(page)
    item = next(i for i, each in enumerate(view["items"]) if each[:2] == ["node", "32 sigmoid"])
    shown = dom(f"file://{tmp_path}/p.html#0.{item}")
    assert "<h2>node 32 sigmoid</h2>" in shown


def test_empty_pictures_are_noticed(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (100, 80), "white").save(tmp_path / "white.png")
    with pytest.raises(AssertionError, match="not background"):
        assert_shows_something(tmp_path / "white.png")


# ---- the command


def test_command_writes_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    commands = pytest.importorskip("xnnfast.cli.commands", reason="the command needs the extra cli")
    monkeypatch.chdir(tmp_path)
    network().save("net.xnn")
    assert commands.run(["inspect", "net.xnn", "--html", "net.html"]) == 0
    assert capsys.readouterr().out == ""
    assert dict(data((tmp_path / "net.html").read_text())[0]["facts"])["source"] == "net.xnn"
    with pytest.raises(commands.CommandError, match="--html"):
        commands.run(["inspect", "net.xnn", "--html", "net.html", "--json"])


def test_pictures_in_the_documents_show_something() -> None:
    pictures = sorted(PICTURES.glob("*.png"))
    assert pictures
    for picture in pictures:
        assert picture.stat().st_size <= 150_000, picture
        assert_shows_something(picture)
