"""Who keeps what alive: every order of letting go, cycles, files that change under a map, the end of the process."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import weakref

import files
import numpy as np
import pytest

import xnnfast
from xnnfast import GraphBuilder, Program, Runtime, load
from xnnfast._payload import Payload

F = np.float32
X = np.arange(8, dtype=F).reshape(1, 8)


@pytest.fixture
def path(tmp_path):
    """y = x + c, c at the end of a file of its own, larger than a page."""
    target = tmp_path / "graph.xnn"
    b = GraphBuilder()
    b.output(b.add(b.input((1, 8)), files.ONES.reshape(1, 8)))
    b.save(target)
    return target


def mapped(path):
    """Whether a file is mapped into this process."""
    name = os.path.realpath(path)
    with open("/proc/self/maps") as stream:
        return any(line.rstrip().removesuffix(" (deleted)").endswith(name) for line in stream)


# ---- orders of letting go


def things(path):
    """Everything that may hold the map, by name; ``use`` says how each is used afterwards."""
    payload = Payload.open(path)
    graph = load(payload)
    runtime = Runtime(graph)
    (result,) = runtime.run(X)
    constant = graph.constants[0]
    return {
        "payload": (payload, lambda it: bytes(it)[-16:]),
        "graph": (graph, lambda it: np.testing.assert_array_equal(Runtime(it).run(X)[0], X + files.ONES)),
        "runtime": (runtime, lambda it: np.testing.assert_array_equal(it.run(X)[0], X + files.ONES)),
        "constant": (constant, lambda it: np.testing.assert_array_equal(
            np.frombuffer(it.data, F, 8), files.ONES)),
        "result": (result, lambda it: np.testing.assert_array_equal(it, X + files.ONES)),
    }  # fmt: skip


NAMES = ("payload", "graph", "runtime", "constant", "result")


@pytest.mark.parametrize("order", list(itertools.permutations(NAMES)), ids="-".join)
def test_whatever_is_left_still_works(path, order):
    held = things(path)
    for name in order:
        del held[name]
        for thing, use in held.values():
            use(thing)
        thing = use = None
    assert not mapped(path)


def test_the_map_goes_with_its_last_user(path):
    for last in ("payload", "graph", "runtime", "constant"):
        held = things(path)
        for name in NAMES:
            if name != last:
                del held[name]
        assert mapped(path), last
        held.clear()
        assert not mapped(path), last


def test_results_hold_nothing(path):
    (result,) = Runtime(load(path)).run(X)
    gc.collect()
    assert not mapped(path)
    np.testing.assert_array_equal(result, X + files.ONES)


def test_inputs_and_out_are_let_go_of(path):
    runtime = Runtime(load(path))
    x, y = xnnfast.empty((1, 8)), xnnfast.empty((1, 8))
    watched = weakref.ref(x), weakref.ref(y)
    x[...] = 1
    runtime.run(x, out=[y])
    del x, y
    assert [each() for each in watched] == [None, None]
    # The engine still has their addresses, and must not use them.
    np.testing.assert_array_equal(runtime.run(X)[0], X + files.ONES)


def test_a_program_holds_its_file(tmp_path):
    target = tmp_path / "model.pte"
    target.write_bytes(files.program(alignment=16))
    program = Program(target)
    np.testing.assert_array_equal(program.run(X)[0], X + files.ONES)
    assert mapped(target)
    del program
    assert not mapped(target)


def test_a_closed_program_lets_go_of_its_file(tmp_path):
    target = tmp_path / "model.pte"
    target.write_bytes(files.program(alignment=16))
    program = Program(target)
    program.run(X)
    method = program.method("forward")
    program.close()
    del program
    # A method by itself goes on working.
    np.testing.assert_array_equal(method.run((X,))[0], X + files.ONES)
    del method
    assert not mapped(target)


# ---- cycles


class Holder:
    """Something that may be part of a cycle."""


@pytest.mark.parametrize("first", NAMES)
def test_cycles_are_collected(path, first):
    holder = Holder()
    held = things(path)
    # The collector finds them in one cycle, and must not free the map before those that use it.
    holder.things = [held.pop(first)[0], *(thing for thing, _ in held.values())]
    holder.itself = holder
    gone = weakref.ref(holder)
    del held, holder
    gc.collect()
    assert gone() is None
    assert not mapped(path)


def test_a_cycle_through_the_source_is_collected():
    class Bytes(bytearray):
        pass

    source = Bytes(files.bare())
    source.graph = load(source)
    source.runtime = Runtime(source.graph)
    gone = weakref.ref(source)
    del source
    gc.collect()
    assert gone() is None


# ---- sources that change


def test_a_bytearray_can_not_be_resized_under_a_graph():
    source = bytearray(files.bare())
    graph = load(source)
    for change in (lambda: source.append(1), source.clear, lambda: source.__delitem__(slice(0, 8))):
        with pytest.raises(BufferError):
            change()
    # Overwriting is not stopped, so the constants were copied.
    source[:] = bytes(len(source))
    np.testing.assert_array_equal(Runtime(graph).run(X)[0], X + files.ONES)
    del graph
    gc.collect()
    source.append(1)


def test_B3_a_released_view_or_closed_map_is_refused_or_harmless(path):
    import mmap

    with open(path, "rb") as stream:
        source = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    runtime = Runtime(load(source))
    with pytest.raises(BufferError):
        source.close()
    view = memoryview(path.read_bytes())
    other = Runtime(load(view))
    view.release()
    for each in (runtime, other):
        np.testing.assert_array_equal(each.run(X)[0], X + files.ONES)


def test_a_file_may_be_replaced_by_renaming(path, tmp_path):
    graph = load(path)
    runtime = Runtime(graph)
    b = GraphBuilder()
    b.output(b.add(b.input((1, 8)), np.zeros((1, 8), F)))
    b.save(path)
    # The map is of the old file, which lives on without a name.
    np.testing.assert_array_equal(runtime.run(X)[0], X + files.ONES)
    np.testing.assert_array_equal(Runtime(graph).run(X)[0], X + files.ONES)
    np.testing.assert_array_equal(Runtime(load(path)).run(X)[0], X)


def test_a_file_may_be_deleted(path):
    runtime = Runtime(load(path))
    path.unlink()
    np.testing.assert_array_equal(runtime.run(X)[0], X + files.ONES)


TRUNCATED = """
    import os, sys
    import numpy as np
    import xnnfast

    path, copy = sys.argv[1], {"None": None, "True": True}[sys.argv[2]]
    graph = xnnfast.load(path, copy=copy)
    runtime = xnnfast.Runtime(graph)
    x = np.zeros((1, 8), np.float32)
    want = runtime.run(x)[0]
    os.truncate(path, 0)
    assert np.array_equal(runtime.run(x)[0], want)
    assert np.array_equal(xnnfast.Runtime(graph).run(x)[0], want)
    print(repr(graph), "survived")
"""


@pytest.mark.parametrize(("copy", "survives"), [("True", True), ("None", False)])
def test_a_file_cut_short_under_the_map(path, copy, survives):
    """No library can catch this for a map (docs/safety.md): the system ends the process. Copies are not concerned."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(TRUNCATED), str(path), copy], capture_output=True,
                          text=True, timeout=60)  # fmt: skip
    if survives:
        assert (done.returncode, done.stderr) == (0, "")
        assert "survived" in done.stdout
    else:
        assert done.returncode == -signal.SIGBUS


# ---- the end of the process


ENDS = {
    "graph": "keep = xnnfast.load(path)",
    "runtime": "keep = xnnfast.Runtime(xnnfast.load(path)); keep.run(x)",
    "pool": "keep = xnnfast.Runtime(xnnfast.load(path), threads=2); keep.run(x)",
    "profiled": "keep = xnnfast.Runtime(xnnfast.load(path)); keep.profile(x)",
    "outputs": "keep = xnnfast.Runtime(xnnfast.load(path)).run(x)",
    "empty": "keep = xnnfast.empty((3, 4))",
    "constant": "keep = xnnfast.load(path).constants[0].data",
    "cycle": "r = xnnfast.Runtime(xnnfast.load(path)); keep = [r]; keep.append(keep)",
    "executor": "from xnnfast.executor import Executor; keep = Executor(xnnfast.load(path), workers=2); keep.run(x)",
    "future": "from xnnfast.executor import Executor; e = Executor(xnnfast.load(path)); keep = e.submit(x)",
    "module": "import sys; sys.keep = xnnfast.Runtime(xnnfast.load(path), threads=2)",
    "exit": "import atexit; r = xnnfast.Runtime(xnnfast.load(path)); atexit.register(lambda: r.run(x))",
    "thread": (
        "import threading; r = xnnfast.Runtime(xnnfast.load(path), threads=2)\n"
        "def work():\n"
        "    while True:\n"
        "        r.run(x)\n"
        "threading.Thread(target=work, daemon=True).start(); import time; time.sleep(0.05)"
    ),
    "error": (
        "r = xnnfast.Runtime(xnnfast.load(path))\n"
        "try:\n"
        "    r.run(x, x)\n"
        "except xnnfast.ArgumentError as e:\n"
        "    keep = e"
    ),
}


@pytest.mark.parametrize("what", ENDS)
def test_the_interpreter_ends_quietly_with(what, path):
    script = f"import sys, numpy as np, xnnfast\npath = sys.argv[1]\nx = np.zeros((1, 8), np.float32)\n{ENDS[what]}\n"
    done = subprocess.run([sys.executable, "-X", "dev", "-W", "error", "-c", script, str(path)], capture_output=True,
                          text=True, timeout=60)  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_interpreter_ends_quietly_after_a_fork(path):
    script = (
        "import os, sys, numpy as np, xnnfast\n"
        "r = xnnfast.Runtime(xnnfast.load(sys.argv[1]), threads=2)\n"
        "x = np.zeros((1, 8), np.float32)\n"
        "r.run(x)\n"
        "pid = os.fork()\n"
        "if pid:\n"
        "    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
        "r.run(x)\n"
    )
    # Python 3.12 and later warn of forks in processes with threads, and a pool has some.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# ---- memory that is gone is not touched


def test_nothing_reads_the_source_after_the_graph_is_gone(path):
    """The pages of a freed map are unreadable: whoever still used them would end this process."""
    held = things(path)
    base = held["payload"][0].address
    result = held["result"][0]
    held.clear()
    gc.collect()
    libc = ctypes.CDLL(None)
    # mincore() fails for what is not mapped.
    page = base & ~4095
    seen = (ctypes.c_ubyte * 1)()
    assert libc.mincore(ctypes.c_void_p(page), ctypes.c_size_t(4096), seen) != 0 or not mapped(path)
    np.testing.assert_array_equal(result, X + files.ONES)
