"""XNNPACK reads up to 16 bytes past any tensor: memory that ends at an unreadable page must not matter."""

import json
import mmap
import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest
from op_cases import case

import xnnfast as xf
from xnnfast import GraphBuilder, Runtime
from xnnfast.ops import OPS

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memfd_create")
CHILD = pathlib.Path(__file__).with_name("guarded.py")
PAGE = mmap.PAGESIZE


def child(*arguments):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONFAULTHANDLER": "1"}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=250, env=environment)


def test_the_page_can_not_be_touched():
    # The tests below are worth nothing otherwise.
    code = "import guarded; g = guarded.Guarded(1); g.bytes[g.end - 1]; print('here', flush=True); g.bytes[g.end]"
    done = child("-c", code)
    assert done.returncode == -signal.SIGSEGV and done.stdout == "here\n"


@pytest.fixture(scope="module")
def verdicts():
    """Operator -> what went wrong with it; all of them run in a process of their own, a new one after each death."""
    found = {name: [] for name in OPS}
    seen = dict.fromkeys(OPS, 0)
    first = 0
    while True:
        done = child(CHILD, str(first))
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        for _, name, title, error in lines:
            seen[name] += error is None
            if error is not None:
                found[name].append(f"{title}: {error}")
        if done.returncode == 0:
            return found, seen
        assert lines, done.stderr
        number, name, title, _ = lines[-1]
        found[name].append(f"{title}: died with {done.returncode}: {done.stderr[-2000:]}")
        first = number + 1


@pytest.mark.parametrize("name", OPS)
def test_B1_inputs_outputs_and_constants_at_the_end_of_a_page(name, verdicts):
    found, seen = verdicts
    assert seen[name] >= 2 * len(OPS[name].datatypes)
    assert not found[name], "\n".join(found[name])


def test_B1_an_array_over_a_file_of_whole_pages(tmp_path):
    # The everyday twin: reading on behind the map is a bus error.
    made = case("max_pooling2d", ("fp32", "fp32"), batch=1, height=32, width=32, channels=PAGE // 4096, pooling=2)
    (x,) = made.arrays()
    assert x.nbytes == PAGE
    path = tmp_path / "x"
    path.write_bytes(x.tobytes())
    mapped = np.memmap(path, np.float32, "r", shape=x.shape)
    runtime = Runtime(made.graph)
    np.testing.assert_array_equal(runtime.run(mapped)[0], runtime.run(x)[0])


@pytest.mark.parametrize("kind", ["add", "fully_connected"])
def test_B1_a_file_whose_last_constant_ends_a_page(kind, tmp_path):
    def built(count):
        b = GraphBuilder()
        if kind == "add":
            b.output(b.add(b.input((1, count)), np.arange(count, dtype=np.float32)))
        else:
            b.output(b.fully_connected(b.input((2, count)), np.arange(count, dtype=np.float32).reshape(1, count)))
        return b.finish()

    # Without the writer's padding the constant is the last thing in the file.
    head = len(built(4)) - 16 - 16
    count = (2 * PAGE - head) // 4
    data = built(count)[:2 * PAGE]
    assert len(data) == 2 * PAGE
    area = 4 * count
    path = tmp_path / "graph.xnn"
    path.write_bytes(data[:22] + area.to_bytes(8, "little") + data[30:])
    graph = xf.load(path)
    (constant,) = graph.constants
    assert constant.offset + constant.nbytes == 2 * PAGE and not constant.in_place
    x = np.ones((2 if kind == "fully_connected" else 1, count), np.float32)
    np.testing.assert_allclose(Runtime(graph).run(x)[0], xf.reference.run(graph, x)[0], rtol=1e-5)
