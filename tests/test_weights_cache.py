"""Packed weights on disk: what a file stands for, when it is used, and that nothing makes a number wrong."""

from __future__ import annotations

import errno
import gc
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import files as f
import numpy as np
import op_cases
import pytest
from hostile_cache import KINDS, Trials, mixed, run

import xnnfast
from xnnfast import ArgumentError, GraphBuilder, PerChannel, PerTensor, Runtime, UnsupportedError
from xnnfast import weights_cache as cache
from xnnfast._executor import Crew
from xnnfast._graph import Constant, Graph, Node, Value
from xnnfast._payload import Payload
from xnnfast._reader import constant_at
from xnnfast.lower import lower, lower_batches
from xnnfast.ops import OPS
from xnnfast.quantization import PerToken
from xnnfast.weights_cache import WeightsCache

F = np.float32
SRC = Path(xnnfast.__file__).parents[1]


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "cache"
    made.mkdir(mode=0o700)
    return made


@pytest.fixture
def settled(monkeypatch):
    """As if all files had been written long ago, in a file system that is known."""
    monkeypatch.setattr(cache, "SETTLED_NS", -(10**12))
    monkeypatch.setattr(cache, "keeps_times", lambda payload: True)


def dense(seed=0, inner=8, outer=4, batch=2):
    rng = np.random.default_rng(seed)
    b = GraphBuilder()
    x = b.input((batch, inner))
    b.output(b.fully_connected(x, rng.standard_normal((outer, inner), F), rng.standard_normal(outer, F)))
    return b


def answer(graph, x, where=None, **options):
    with Runtime(graph, weights_cache=where, **options) as runtime:
        return [y.tobytes() for y in runtime.run(x)], runtime.weights_cache


def inputs(graph, seed=5):
    rng = np.random.default_rng(seed)
    return rng.standard_normal(graph.inputs[0].shape).astype(F)


def agree(graph_or_make, where, outcomes, **options):
    """Every outcome in turn, each time with the result of packing afresh."""
    make = graph_or_make if callable(graph_or_make) else lambda: graph_or_make
    x = inputs(make())
    want = answer(make(), x, **options)[0]
    for outcome in outcomes:
        got, told = answer(make(), x, where, **options)
        assert told == outcome
        assert got == want


def cached(folder):
    return sorted(folder.glob("*.xnnw"))


def python(code, status=0, **environment):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SRC), str(Path(__file__).parent)]), **environment},
    )  # fmt: skip
    assert done.returncode == status, done.stderr


# ---------------------------------------------------------------------------------------------------
# Use


def test_first_use_saves_and_the_next_maps(folder):
    agree(lambda: mixed().graph(), folder, ["saved", "hit", "hit"])
    (path,) = cached(folder)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_nothing_is_written_without_the_option(folder, monkeypatch):
    monkeypatch.setenv(cache.ENV_FOLDER, str(folder))
    for where in (None, False):
        assert answer(dense().graph(), inputs(dense().graph()), where)[1] == "off"
    assert os.listdir(folder) == []


def test_true_is_the_folder_of_the_variable(folder, monkeypatch):
    monkeypatch.setenv(cache.ENV_FOLDER, str(folder))
    agree(lambda: dense().graph(), True, ["saved", "hit"])
    assert len(cached(folder)) == 1


def test_true_is_a_folder_of_the_user(tmp_path, monkeypatch):
    pytest.importorskip("platformdirs")
    monkeypatch.delenv(cache.ENV_FOLDER, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    agree(lambda: dense().graph(), True, ["saved", "hit"])
    made = tmp_path / "xnnfast" / "weights"
    assert len(cached(made)) == 1
    assert stat.S_IMODE(made.stat().st_mode) == 0o700


def test_true_needs_platformdirs_or_the_variable(monkeypatch):
    monkeypatch.delenv(cache.ENV_FOLDER, raising=False)
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    with pytest.raises(UnsupportedError, match=r"xnnfast\[cache\].*XNNFAST_CACHE_DIR"):
        Runtime(dense().graph(), weights_cache=True)


def test_a_file_may_be_named(tmp_path):
    path = tmp_path / "one.weights"
    agree(lambda: dense().graph(), path, ["saved", "hit"])
    agree(lambda: dense().graph(), str(path), ["hit"])
    agree(lambda: dense().graph(), WeightsCache(path), ["hit"])
    # Another graph takes its place.
    agree(lambda: dense(1).graph(), path, ["saved", "hit"])
    agree(lambda: dense().graph(), path, ["saved"])
    assert [name for name in os.listdir(tmp_path) if not name.startswith("one.weights")] == []


def test_a_file_that_is_no_cache_is_left_alone(tmp_path):
    model = tmp_path / "model.pte"
    dense().save(model)
    before = model.read_bytes()
    got, told = answer(dense().graph(), inputs(dense().graph()), model)
    assert "is no cache file" in told
    assert got == answer(dense().graph(), inputs(dense().graph()))[0]
    assert model.read_bytes() == before


@pytest.mark.parametrize("where", ["", 3, b"folder", "a\0b", [], 1.5])
def test_what_is_no_place_is_refused(where):
    with pytest.raises(ArgumentError, match="weights_cache"):
        Runtime(dense().graph(), weights_cache=where)


def test_a_limit_that_is_no_number_is_refused(folder, monkeypatch):
    monkeypatch.setenv(cache.ENV_LIMIT, "2GB")
    with pytest.raises(ArgumentError, match="XNNFAST_CACHE_LIMIT must be a number of bytes, found '2GB'"):
        Runtime(dense().graph(), weights_cache=folder)


def test_a_graph_without_weights_saves_nothing(folder):
    b = GraphBuilder()
    b.output(b.negate(b.input((2, 3))))
    told = answer(b.graph(), inputs(b.graph()), folder)[1]
    assert told == "not saved: the graph has no weights to pack"
    assert os.listdir(folder) == []


def test_the_first_engine_opens_the_cache(folder):
    b = GraphBuilder()
    x = b.input((0, 8))
    b.output(b.fully_connected(x, np.ones((4, 8), F)))
    with Runtime(b.graph(), weights_cache=folder) as runtime:
        assert runtime.weights_cache == "unused"
        runtime.run(np.ones((2, 8), F))
        assert runtime.weights_cache == "saved"


@pytest.mark.parametrize("name", sorted(cache.PACKING))
def test_every_combination_of_datatypes_is_saved_and_mapped(folder, name):
    for types in OPS[name].datatypes:
        with op_cases.told(name, types):
            first, second = (op_cases.case(name, types) for _ in range(2))
            arrays = first.arrays()
            want = [y.tobytes() for y in Runtime(first.graph, weights_cache=folder).run(*arrays)]
            with Runtime(second.graph, weights_cache=folder) as runtime:
                assert runtime.weights_cache == "hit"
                memory = runtime.memory
                assert memory["packed_mapped"] == memory["packed"] > 0
                assert [y.tobytes() for y in runtime.run(*arrays)] == want


def test_operators_that_never_pack_through_the_cache_do_not_disturb_it(folder):
    for name in ("depthwise_conv2d", "batch_matrix_multiply"):
        for types in OPS[name].datatypes:
            case = op_cases.case(name, types)
            with Runtime(case.graph, weights_cache=folder) as runtime:
                assert runtime.weights_cache.endswith("no weights to pack"), (name, types)
    assert os.listdir(folder) == []


def test_mapped_weights_serve_every_shape(folder):
    graph = dense(batch=1).graph()
    answer(graph, inputs(graph), folder)
    with Runtime(dense(batch=1).graph(), weights_cache=folder) as cached, Runtime(dense(batch=1).graph()) as plain:
        for rows in (1, 7, 0, 64):
            x = np.random.default_rng(rows).standard_normal((rows, 8)).astype(F)
            assert cached.run(x)[0].tobytes() == plain.run(x)[0].tobytes()
        assert cached.memory["packed_mapped"] == cached.memory["packed"]


# ---------------------------------------------------------------------------------------------------
# Sharing in one process


def test_runtimes_of_a_graph_share_one_copy():
    graph = mixed().graph()
    first = Runtime(graph)
    packed = first.memory["packed"]
    others = [Runtime(graph) for _ in range(3)]
    assert packed > 0
    assert {each.memory["packed"] for each in others} == {packed}
    del first, others
    gc.collect()
    assert Runtime(graph).memory["packed"] == packed


def test_runtimes_share_what_is_mapped(folder):
    graph = mixed().graph()
    answer(graph, inputs(graph), folder)
    graph = mixed().graph()
    one = Runtime(graph, weights_cache=folder)
    two = Runtime(graph, weights_cache=folder)
    three = Runtime(graph)
    assert [each.weights_cache for each in (one, two, three)] == ["hit", "shared", "off"]
    assert one.memory["packed_mapped"] == three.memory["packed_mapped"] == three.memory["packed"] > 0


def test_what_was_packed_without_a_cache_is_saved_by_who_has_one(tmp_path, folder, settled):
    dense().save(tmp_path / "model.xnn")
    graph = xnnfast.load(tmp_path / "model.xnn")
    plain = Runtime(graph)
    second = Runtime(graph, weights_cache=folder)
    assert second.weights_cache == "saved"
    # Into another folder, from the copy that both share.
    assert Runtime(graph, weights_cache=folder).weights_cache == "shared"
    assert Runtime(graph, weights_cache=tmp_path / "other").weights_cache == "saved"
    del plain, second
    agree(lambda: xnnfast.load(tmp_path / "model.xnn"), folder, ["hit"])
    agree(lambda: xnnfast.load(tmp_path / "model.xnn"), tmp_path / "other", ["hit"])


def test_what_was_packed_at_an_unknown_time_is_not_saved(folder):
    # The graph's bytes lie in memory that its maker may have changed since.
    graph = dense().graph()
    plain = Runtime(graph)
    assert Runtime(graph, weights_cache=folder).weights_cache == "shared"
    assert os.listdir(folder) == []
    del plain


def test_flags_have_files_of_their_own(folder):
    agree(lambda: mixed().graph(), folder, ["saved", "hit"])
    agree(lambda: mixed().graph(), folder, ["saved", "hit"], low_memory=True)
    assert len(cached(folder)) == 2
    # Both alive, in one graph.
    graph = mixed().graph()
    one, two = Runtime(graph, weights_cache=folder), Runtime(graph, weights_cache=folder, low_memory=True)
    assert (one.weights_cache, two.weights_cache) == ("hit", "hit")
    x = inputs(graph)
    assert [a.tobytes() for a in one.run(x)] == [a.tobytes() for a in two.run(x)]


def test_profiling_changes_nothing(folder):
    graph = mixed().graph()
    x = inputs(graph)
    want = answer(mixed().graph(), x)[0]
    for outcome in ("saved", "hit"):
        with Runtime(mixed().graph(), weights_cache=folder) as runtime:
            runtime.profile(x, rounds=1)
            assert [y.tobytes() for y in runtime.run(x)] == want
            assert runtime.weights_cache == outcome


@pytest.mark.parametrize("where", [False, True])
def test_threads_that_start_at_once(folder, where):
    x = inputs(mixed().graph())
    want = answer(mixed().graph(), x)[0]
    for _ in range(6):
        graph = mixed().graph()
        barrier = threading.Barrier(4)
        results, kept = [], []

        def work(graph=graph, barrier=barrier, results=results, kept=kept):
            barrier.wait()
            runtime = Runtime(graph, weights_cache=folder if where else None)
            kept.append(runtime)
            results.append([y.tobytes() for y in runtime.run(x)])

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [want] * 4
        assert len({each.memory["packed"] for each in kept}) == 1
        told = sorted(each.weights_cache for each in kept)
        if where:
            assert told[:1] in (["hit"], ["saved"], ["shared"])
            assert not [each for each in told if each.startswith("not saved")]
        else:
            assert told == ["off"] * 4


def test_forced_fp16_has_a_file_of_its_own(folder):
    # XNNPACK packs it from the fp32 constants, whose addresses stay in its key.
    def make():
        b = dense(outer=16, batch=1)
        return b.graph()

    def run(flags, where):
        graph = make()
        crew = Crew(graph, lower_batches(graph), workers=2, flags=flags, weights_cache=where)
        x = inputs(graph).repeat(8, axis=0)
        (out,) = crew.new_outputs(((8,),), 8)
        crew.run([((x,), (out,), 8)], ((8,),), 1, 0, 8)
        return out.tobytes(), crew.weights_cache, crew.memory["packed"]

    full, half = run(0, None), run(4, None)
    assert full[0] != half[0]
    # Once for both workers.
    assert half[2] < full[2]
    for outcome in ("saved", "hit"):
        for flags, want in ((0, full), (4, half)):
            assert run(flags, folder) == (want[0], outcome, want[2])
    assert len(cached(folder)) == 2


# ---------------------------------------------------------------------------------------------------
# What a naive key would take for the same


def graph_over(memory, nodes, ins, outs, values):
    return Graph(values, nodes, ins, outs, owner=memory)


def conv(kernel, zero_point, memory, *, channels=(4, 4), scale=0.1, scales=None, bias=None):
    """One quantized convolution whose filter starts where the memory does."""
    each_in, each_out = channels
    shape = (each_out, kernel, kernel, each_in)
    x = Value(0, "qint8", (1, 6, 6, each_in), quantization=PerTensor(scale, zero_point), is_input=True, external_id=0)
    size = int(np.prod(shape))
    constant = Constant(memory[:size].data)
    if scales is None:
        w = Value(1, "qint8", shape, quantization=PerTensor(0.02, 0), constant=constant)
    else:
        w = Value(1, "qcint8", shape, quantization=PerChannel(np.asarray(scales, F), 0), constant=constant)
    pad = kernel // 2
    attrs = {
        "padding_top": pad, "padding_right": pad, "padding_bottom": pad, "padding_left": pad, "kernel_height": kernel,
        "kernel_width": kernel, "subsampling_height": 1, "subsampling_width": 1, "dilation_height": 1,
        "dilation_width": 1, "groups": 1, "group_input_channels": each_in, "group_output_channels": each_out,
    }  # fmt: skip
    y = Value(2, "qint8", (1, 6, 6, each_out), quantization=PerTensor(0.5, 0), is_output=True, external_id=1)
    node = Node(OPS["conv2d"], (0, 1, None), (2,), attrs, index=0)
    return Graph([x, w, y], [node], [x], [y], owner=memory)


def pairs():
    memory = np.random.default_rng(3).integers(-100, 100, 4096).astype(np.int8)
    yield "input zero point", conv(3, 5, memory), conv(3, -60, memory)
    yield "3x3 and 5x5", conv(3, 0, memory), conv(5, 0, memory)
    yield "5x5 and 3x3", conv(5, 0, memory), conv(3, 0, memory)
    yield "channels swapped", conv(3, 0, memory, channels=(4, 8)), conv(3, 0, memory, channels=(8, 4))
    yield "input scale", conv(3, 0, memory, scale=0.1), conv(3, 0, memory, scale=0.4)
    scales = [0.1, 0.2, 0.3, 0.4]
    yield "filter scales", conv(3, 0, memory, scales=scales), conv(3, 0, memory, scales=scales[::-1])


@pytest.mark.parametrize("name", [name for name, *_ in pairs()])
def test_the_same_filter_in_another_role_is_another_file(tmp_path, folder, name):
    one, two = next(each[1:] for each in pairs() if each[0] == name)
    assert one.constants[0].address == two.constants[0].address
    rng = np.random.default_rng(4)
    for where in (folder, tmp_path / "one.xnnw"):
        wanted = {}
        for graph in (one, two):
            x = rng.integers(-128, 128, graph.inputs[0].shape).astype(np.int8)
            wanted[graph] = x, Runtime(graph).run(x)[0].tobytes()
        gc.collect()
        for outcome in ("saved", "hit") if where is folder else ("saved", "saved"):
            for graph, (x, want) in wanted.items():
                with Runtime(graph, weights_cache=where) as runtime:
                    assert runtime.weights_cache == outcome
                    assert runtime.run(x)[0].tobytes() == want
    assert len(cached(folder)) == 2


def test_one_filter_in_two_roles_of_one_graph(folder):
    # XNNPACK's key is the same for both layers; only their places in the graph tell them apart.
    def make():
        rng = np.random.default_rng(6)
        b = GraphBuilder()
        x = b.input((1, 6, 6, 4))
        w = b.constant(rng.integers(-100, 100, (4, 3, 3, 4)).astype(np.int8), "qint8", PerTensor(0.02, 0))
        for zero_point in (5, -60):
            q = b.convert(x, "qint8", PerTensor(0.1, zero_point))
            y = b.conv2d(q, w, padding=1, datatype="qint8", quantization=PerTensor(0.5, 0))
            b.output(b.convert(y, "fp32"))
        dynamic = b.convert(b.static_reshape(x, (36, 4)), "qdint8", PerToken(1))
        scales = PerChannel(np.full(4, 0.1, F), 0)
        square = b.constant(rng.integers(-100, 100, (4, 4)).astype(np.int8), "qcint8", scales)
        # The bias of a dynamically quantized layer is not in the key at all.
        for bias in (1.0, -20.0):
            b.output(b.fully_connected(dynamic, square, np.full(4, bias, F), datatype="fp32"))
        return b.graph()

    graph = make()
    x = inputs(graph)
    want = [y.tobytes() for y in xnnfast.reference.run(graph, x)]
    # Zero points are taken off again, so the two convolutions agree: one with the other's sums would not.
    assert len(set(want)) == 3
    for outcome in ("saved", "hit"):
        got, told = answer(make(), x, folder)
        assert told == outcome
        np.testing.assert_allclose(
            [np.frombuffer(one, F) for one in got], [np.frombuffer(one, F) for one in want], rtol=1e-5, atol=0.51
        )
        assert len(set(got)) == 3
    assert answer(graph, x)[0] == got


def test_equal_weights_with_other_scales(folder):
    def make(scale):
        b = GraphBuilder()
        q = b.convert(b.input((2, 8)), "qdint8", PerToken(1))
        w = b.constant(np.arange(32, dtype=np.int8).reshape(4, 8), "qcint8", PerChannel(np.full(4, scale, F), 0))
        b.output(b.fully_connected(q, w, datatype="fp32"))
        return b.graph()

    agree(lambda: make(0.5), folder, ["saved", "hit"])
    agree(lambda: make(0.25), folder, ["saved", "hit"])
    assert len(cached(folder)) == 2


def test_everything_but_the_bytes_is_in_the_structure():
    rng = np.random.default_rng(8)
    w, bias = rng.standard_normal((4, 3, 3, 4), F), rng.standard_normal(4, F)

    def make(clamp=(0, 6), stride=1, padding=1, bias=bias, size=6, weights=w):
        b = GraphBuilder()
        x = b.input((1, size, size, 4))
        b.output(b.conv2d(x, weights, bias, padding=padding, stride=stride, clamp=clamp))
        graph = b.graph()
        return cache.Plan(lower(graph), 0).structure

    same = make()
    assert make() == same
    assert make(weights=w + 1) == same
    changed = [make(clamp=(0, 5)), make(stride=2), make(padding=0), make(bias=None), make(size=7)]
    assert len({same, *changed}) == 6


# ---------------------------------------------------------------------------------------------------
# Sources


def test_every_source_of_a_graph_finds_the_same_file(tmp_path, folder):
    data = dense().finish()
    path = tmp_path / "model.xnn"
    path.write_bytes(data)
    agree(lambda: dense().graph(), folder, ["saved"])
    for make in (
        lambda: xnnfast.load(data),
        lambda: xnnfast.load(bytearray(data)),
        lambda: xnnfast.load(memoryview(bytearray(data)).toreadonly()),
        lambda: xnnfast.load(path),
        lambda: xnnfast.load(path, copy=True),
        lambda: xnnfast.load(dense().finish(dialect="xn00")),
    ):
        agree(make, folder, ["hit"])
    assert len(cached(folder)) == 1


def test_a_writable_source_is_digested_as_it_was_copied(folder):
    data = bytearray(dense().finish())
    graph = xnnfast.load(data)
    x = inputs(graph)
    want = answer(dense().graph(), x)[0]
    at = bytes(data).index(graph.constants[0].data.tobytes())
    data[at : at + 16] = bytes(16)
    for outcome in ("saved", "hit"):
        assert answer(graph, x, folder) == (want, outcome)


def test_bytes_that_change_during_packing_are_not_saved(folder, monkeypatch):
    # Nothing but the maker of a graph can do this; a file under the wrong digest would outlive it.
    memory = np.random.default_rng(3).integers(-100, 100, 4096).astype(np.int8)
    graph = conv(3, 0, memory)
    real = WeightsCache.open

    def opened(self, identity):
        result = real(self, identity)
        memory[:] = 1
        return result

    monkeypatch.setattr(WeightsCache, "open", opened)
    x = np.random.default_rng(4).integers(-128, 128, graph.inputs[0].shape).astype(np.int8)
    with Runtime(graph, weights_cache=folder) as runtime:
        assert runtime.weights_cache == "not saved: the constants changed while they were packed"
        assert runtime.run(x)[0].tobytes() == Runtime(conv(3, 0, np.ones(4096, np.int8))).run(x)[0].tobytes()
    assert cached(folder) == []


def test_two_delegates_of_one_shape_have_files_of_their_own(tmp_path, folder, settled):
    # Everything but the place in the file is the same.
    delegates = [f.delegate(0), f.delegate(1, location=1)]
    delegates[1]["processed"] = {"index": 2, "location": 1}
    delegates[0]["processed"] = {"index": 1, "location": 1}
    path = tmp_path / "two.pte"
    path.write_bytes(f.program(f.plan(delegates=delegates), segments=[b"", dense(0).finish(), dense(1).finish()]))
    wanted = {}
    for place in range(2):
        graph = xnnfast.load(path, delegate=place)
        wanted[place] = answer(graph, inputs(graph))[0]
    assert wanted[0] != wanted[1]
    for outcome in ("saved", "hit", "hit"):
        for place in range(2):
            graph = xnnfast.load(path, delegate=place)
            assert answer(graph, inputs(graph), folder) == (wanted[place], outcome)
    assert len(cached(folder)) == 2
    assert len(os.listdir(folder / "known")) == 2


def two_payloads(tmp_path, seeds=(0, 1)):
    """A graph with constants in two data files, as a program with .ptd files has."""
    constants = []
    for place, seed in enumerate(seeds):
        path = tmp_path / f"{place}.ptd"
        data = np.random.default_rng(seed).standard_normal((8, 8)).astype(F).tobytes() + bytes(64)
        if not path.exists() or path.read_bytes() != data:
            path.write_bytes(data)
        constants.append(constant_at(Payload.open(path), 0, 256))
    x = Value(0, "fp32", (2, 8), is_input=True, external_id=0)
    filters = [Value(1 + place, "fp32", (8, 8), constant=constant) for place, constant in enumerate(constants)]
    y, z = Value(3, "fp32", (2, 8)), Value(4, "fp32", (2, 8), is_output=True, external_id=1)
    nodes = [
        Node(OPS["fully_connected"], (0, 1, None), (3,), index=0),
        Node(OPS["fully_connected"], (3, 2, None), (4,), index=1),
    ]
    return Graph([x, *filters, y, z], nodes, [x], [z])


def test_constants_of_several_files(tmp_path, folder, settled):
    agree(lambda: two_payloads(tmp_path), folder, ["saved", "hit", "hit"])
    assert len(os.listdir(folder / "known")) == 1
    agree(lambda: two_payloads(tmp_path, (1, 0)), folder, ["saved", "hit"])
    assert len(cached(folder)) == 2
    agree(lambda: two_payloads(tmp_path), folder, ["hit"])


# ---------------------------------------------------------------------------------------------------
# The model file changes


def model(tmp_path, seed=0):
    path = tmp_path / "model.xnn"
    dense(seed).save(path)
    return path


def rewrite(path, seed):
    """Other weights, in place: the same inode and size."""
    data = dense(seed).finish()
    assert len(data) == path.stat().st_size
    with open(path, "r+b") as file:
        file.write(data)


def test_what_is_known_of_a_model_spares_reading_it(tmp_path, folder, settled, monkeypatch):
    path = model(tmp_path)
    agree(lambda: xnnfast.load(path), folder, ["saved"])
    reads = []
    real = cache.content_digest
    monkeypatch.setattr(cache, "content_digest", lambda constants: reads.append(1) or real(constants))
    agree(lambda: xnnfast.load(path), folder, ["hit", "hit"])
    assert reads == []


def test_a_model_that_is_replaced(tmp_path, folder, settled):
    path = model(tmp_path)
    agree(lambda: xnnfast.load(path), folder, ["saved", "hit"])
    old = xnnfast.load(path)
    want = answer(dense(0).graph(), inputs(old))[0]
    model(tmp_path, 1)
    agree(lambda: xnnfast.load(path), folder, ["saved", "hit"])
    assert answer(xnnfast.load(path), inputs(old))[0] == answer(dense(1).graph(), inputs(old))[0]
    # The one that is still mapped is what it was.
    assert answer(old, inputs(old), folder) == (want, "hit")


def test_a_model_that_is_written_to_while_it_is_mapped(tmp_path, folder, settled):
    path = model(tmp_path)
    agree(lambda: xnnfast.load(path), folder, ["saved", "hit"])
    old = xnnfast.load(path)
    rewrite(path, 1)
    want = answer(dense(1).graph(), inputs(old))[0]
    # The pages show the new bytes, whatever was known of the old ones.
    for outcome in ("saved", "hit"):
        assert answer(old, inputs(old), folder) == (want, outcome)
    agree(lambda: xnnfast.load(path), folder, ["hit"])
    rewrite(path, 0)
    agree(lambda: xnnfast.load(path), folder, ["hit"])


def test_a_change_with_the_old_times_put_back_shows(tmp_path, folder, settled):
    path = model(tmp_path)
    agree(lambda: xnnfast.load(path), folder, ["saved", "hit"])
    before = path.stat()
    time.sleep(0.02)
    rewrite(path, 1)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    agree(lambda: xnnfast.load(path), folder, ["saved", "hit"])


def test_a_young_model_is_read_every_time(tmp_path, folder, monkeypatch):
    # Two changes within the clock's tick can't be told apart: nothing is remembered of a file so young.
    monkeypatch.setattr(cache, "keeps_times", lambda payload: True)
    path = model(tmp_path)
    agree(lambda: xnnfast.load(path), folder, ["saved", "hit"])
    assert not (folder / "known").exists()
    assert not list(folder.glob("*.seal"))
    for seed in (1, 0, 1, 0):
        rewrite(path, seed)
        x = inputs(dense().graph())
        assert answer(xnnfast.load(path), x, folder)[0] == answer(dense(seed).graph(), x)[0]


def test_a_time_is_taken_before_reading(tmp_path, folder, monkeypatch):
    # A file that gets old while it is read may have changed since it was young.
    monkeypatch.setattr(cache, "keeps_times", lambda payload: True)
    path = model(tmp_path)
    real = cache.content_digest

    def slow(constants):
        digest = real(constants)
        now = time.time_ns()
        monkeypatch.setattr(cache.time, "time_ns", lambda: now + 10**10)
        return digest

    monkeypatch.setattr(cache, "content_digest", slow)
    graph = xnnfast.load(path)
    WeightsCache(folder).identify(lower(graph), 0)
    monkeypatch.undo()
    assert not (folder / "known").exists()


def test_file_systems_without_times_to_rely_on(tmp_path, folder, settled, monkeypatch):
    monkeypatch.setattr(cache, "keeps_times", lambda payload: False)
    path = model(tmp_path)
    agree(lambda: xnnfast.load(path), folder, ["saved", "hit", "hit"])
    assert sorted(each.suffix for each in folder.iterdir()) == [".xnnw"]


def test_the_file_system_is_found(monkeypatch, tmp_path):
    lines = [
        "1 0 8:1 / / rw - ext4 /dev/a rw",
        "2 1 0:5 / /home rw shared:1 - nfs4 server:/ rw",
        "3 1 8:2 / /home/local\\040disk rw - xfs /dev/b rw",
        "4 1 8:3 / /over rw - vfat /dev/c rw",
        "5 1 8:4 / /over rw - tmpfs none rw",
        "broken line",
    ]
    table = tmp_path / "mountinfo"
    table.write_text("\n".join(lines))
    real = open
    monkeypatch.setattr("builtins.open", lambda name, *a, **k: real(table, *a, **k))
    folders = ("/", "/etc", "/home/x", "/homes", "/home/local disk/m", "/over/a")
    kinds = [cache.file_system(each) for each in folders]
    assert kinds == ["ext4", "ext4", "nfs4", "ext4", "xfs", "tmpfs"]
    monkeypatch.setattr("builtins.open", lambda *a, **k: (_ for _ in ()).throw(OSError("no /proc")))
    assert cache.file_system("/") is None


def test_what_is_known_is_not_believed_of_another_model(tmp_path, folder, settled):
    paths = []
    for seed in range(2):
        place = tmp_path / str(seed)
        place.mkdir()
        paths.append(model(place, seed))
    for path in paths:
        agree(lambda path=path: xnnfast.load(path), folder, ["saved", "hit"])
    one, two = sorted((folder / "known").iterdir())
    swapped = one.read_bytes(), two.read_bytes()
    one.write_bytes(swapped[1])
    two.write_bytes(swapped[0])
    for path in paths:
        agree(lambda path=path: xnnfast.load(path), folder, ["hit"])
    for junk in (b"", b"\0" * 200, b"x" * 5000, b"\xff\xfe", one.read_bytes()[:-2]):
        one.write_bytes(junk)
        for path in paths:
            agree(lambda path=path: xnnfast.load(path), folder, ["hit"])


# ---------------------------------------------------------------------------------------------------
# The cache file changes


def test_a_seal_spares_the_checksums(folder, settled, monkeypatch):
    agree(lambda: dense().graph(), folder, ["saved", "hit"])
    reads = []
    real = cache.bad_entry
    monkeypatch.setattr(cache, "bad_entry", lambda *a: reads.append(1) or real(*a))
    agree(lambda: dense().graph(), folder, ["hit"])
    assert reads == []
    (path,) = cached(folder)
    seal = Path(cache.seal_path(path))
    good = seal.read_bytes()
    for bad in (b"", b"None", b"(1, 2)", b"9" * 600, good[:-1], good + b" "):
        seal.write_bytes(bad)
        agree(lambda: dense().graph(), folder, ["hit"])
    seal.unlink()
    os.chmod(path, 0o600)
    agree(lambda: dense().graph(), folder, ["hit"])


def test_any_writing_breaks_the_seal(folder, settled):
    agree(lambda: dense().graph(), folder, ["saved", "hit"])
    (path,) = cached(folder)
    before = path.stat()
    # Later than the clock's tick, at which the file was sealed here.
    time.sleep(0.02)
    with open(path, "r+b") as file:
        file.seek(before.st_size - 200)
        file.write(b"\xff")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    agree(lambda: dense().graph(), folder, ["saved", "hit"])


def test_a_cache_that_is_replaced_or_removed_while_it_is_mapped(folder):
    graph = dense().graph()
    x = inputs(graph)
    want = answer(dense().graph(), x)[0]
    answer(graph, x, folder)
    with Runtime(dense().graph(), weights_cache=folder) as runtime:
        assert runtime.weights_cache == "hit"
        (path,) = cached(folder)
        for step in (
            lambda: os.replace(folder / "noise", path),
            lambda: path.unlink(),
            lambda: cache.clear(folder),
        ):
            (folder / "noise").write_bytes(os.urandom(path.stat().st_size if path.exists() else 9))
            step()
            assert [y.tobytes() for y in runtime.run(x)] == want
            assert [y.tobytes() for y in Runtime(runtime.graph).run(x)] == want


@pytest.mark.parametrize("damage", ["cut", "written"])
def test_a_cache_that_is_changed_in_place_is_not_mapped_again(folder, damage):
    # The runtime that has it mapped can't be helped; the next one notices.
    graph = dense().graph()
    x = inputs(graph)
    want = answer(dense().graph(), x)[0]
    answer(graph, x, folder)
    graph = dense().graph()
    first = Runtime(graph, weights_cache=folder)
    assert first.weights_cache == "hit"
    (path,) = cached(folder)
    with open(path, "r+b") as file:
        if damage == "cut":
            file.truncate(4096)
        else:
            file.seek(4096)
            file.write(bytes(file.seek(0, 2) - 4096))
    for where, outcome in ((None, "off"), (folder, "shared")):
        assert answer(graph, x, where) == (want, "off" if where is None else "saved"), outcome
    agree(lambda: dense().graph(), folder, ["hit"])
    assert first.memory["packed_mapped"] > 0


@pytest.mark.parametrize("what", ["folder", "fifo", "link", "dangling"])
def test_something_else_in_the_files_place(tmp_path, folder, what):
    graph = dense().graph()
    answer(graph, inputs(graph), folder)
    (path,) = cached(folder)
    aside = tmp_path / "aside"
    path.rename(aside)
    if what == "folder":
        path.mkdir()
    elif what == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(aside if what == "link" else tmp_path / "nowhere")
    x = inputs(graph)
    got, told = answer(dense().graph(), x, folder)
    assert got == answer(dense().graph(), x)[0]
    assert told == "saved" if what != "folder" else told.startswith("not saved: ")
    assert aside.exists()
    assert cache.files(folder) == ([] if what == "folder" else [cache.files(folder)[0]])


# ---------------------------------------------------------------------------------------------------
# Whose files


def test_a_foreign_file_is_not_used(folder, monkeypatch):
    graph = dense().graph()
    answer(graph, inputs(graph), folder)
    real = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: real + 1)
    told = answer(dense().graph(), inputs(graph), folder)[1]
    assert told == f"not saved: need a cache folder that only its owner can write: {folder}"


def test_a_foreign_file_in_ones_own_folder_is_not_used(folder, monkeypatch):
    agree(lambda: dense().graph(), folder, ["saved", "hit"])
    real = cache.own_file
    (path,) = cached(folder)
    inode = path.stat().st_ino
    monkeypatch.setattr(cache, "own_file", lambda status: status.st_ino != inode and real(status))
    agree(lambda: dense().graph(), folder, ["saved", "hit"])


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_is_not_used(folder, mode):
    agree(lambda: dense().graph(), folder, ["saved", "hit"])
    (path,) = cached(folder)
    path.chmod(mode)
    agree(lambda: dense().graph(), folder, ["saved", "hit"])
    (path,) = cached(folder)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_folder_that_others_may_write_is_not_used(folder, mode):
    agree(lambda: dense().graph(), folder, ["saved", "hit"])
    folder.chmod(mode)
    graph = dense().graph()
    x = inputs(graph)
    for _ in range(2):
        got, told = answer(dense().graph(), x, folder)
        assert told.startswith("not saved: need a cache folder that only its owner can write")
        assert got == answer(dense().graph(), x)[0]


def test_a_file_may_lie_in_a_sticky_folder(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    agree(lambda: dense().graph(), shared / "mine.xnnw", ["saved", "hit"])
    shared.chmod(0o777)
    told = answer(dense().graph(), inputs(dense().graph()), shared / "mine.xnnw")[1]
    assert told.startswith("not saved: need a cache folder")


def test_a_new_folder_is_for_its_owner_alone(tmp_path):
    before = os.umask(0)
    try:
        agree(lambda: dense().graph(), tmp_path / "a" / "b", ["saved", "hit"])
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700


def test_a_folder_may_be_a_link_to_ones_own(tmp_path, folder):
    (tmp_path / "link").symlink_to(folder)
    agree(lambda: dense().graph(), tmp_path / "link", ["saved", "hit"])


# ---------------------------------------------------------------------------------------------------
# Disks that fail


def test_a_read_only_folder_is_read(folder, settled, monkeypatch):
    agree(lambda: dense().graph(), folder, ["saved"])

    def refuse(*args, **options):
        raise PermissionError(errno.EROFS, os.strerror(errno.EROFS), str(folder))

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    monkeypatch.setattr(os, "utime", refuse)
    agree(lambda: dense().graph(), folder, ["hit", "hit"])
    told = answer(dense(1).graph(), inputs(dense().graph()), folder)[1]
    assert told == f"not saved: Read-only file system: {folder}"


@pytest.mark.parametrize("step", ["posix_fallocate", "fsync", "replace"])
def test_a_full_disk_leaves_nothing_behind(folder, monkeypatch, step):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, step, full)
    x = inputs(dense().graph())
    got, told = answer(dense().graph(), x, folder)
    assert told.startswith("not saved: No space left on device")
    assert got == answer(dense().graph(), x)[0]
    assert os.listdir(folder) == []


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_file_systems_that_set_nothing_aside(folder, monkeypatch, number):
    def unable(*args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", unable)
    agree(lambda: dense().graph(), folder, ["saved", "hit"])


def test_a_file_size_limit_leaves_nothing_behind(folder):
    python(
        """
        import os, resource
        from hostile_cache import mixed
        from xnnfast import Runtime
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        told = Runtime(mixed().graph(), weights_cache=os.environ["F"]).weights_cache
        assert told.startswith("not saved: File too large"), told
        """,
        F=str(folder),
    )
    assert os.listdir(folder) == []


def test_an_interrupt_leaves_nothing_behind(folder, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Runtime(dense().graph(), weights_cache=folder)
    assert os.listdir(folder) == []
    monkeypatch.undo()
    agree(lambda: dense().graph(), folder, ["saved", "hit"])


def test_a_killed_writer_leaves_only_what_is_swept(folder):
    python(
        """
        import os, signal
        from hostile_cache import mixed
        from xnnfast import Runtime
        os.replace = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
        Runtime(mixed().graph(), weights_cache=os.environ["F"])
        """,
        -signal.SIGKILL,
        F=str(folder),
    )
    (left,) = folder.iterdir()
    assert left.name.startswith(".")
    assert cache.files(folder) == []
    agree(lambda: mixed().graph(), folder, ["saved", "hit"])
    assert left.exists()
    os.utime(left, (0, 0))
    agree(lambda: dense().graph(), folder, ["saved"])
    assert not left.exists()


# ---------------------------------------------------------------------------------------------------
# Several processes, several machines


def test_processes_that_start_at_once(folder):
    code = """
        import hashlib, os, sys, time
        import numpy as np
        from hostile_cache import mixed
        from xnnfast import Runtime
        graph = mixed().graph()
        x = np.random.default_rng(5).standard_normal(graph.inputs[0].shape).astype(np.float32)
        print("ready", flush=True)
        sys.stdin.readline()
        runtime = Runtime(graph, weights_cache=os.environ["F"])
        print(runtime.weights_cache, hashlib.sha256(b"".join(y.tobytes() for y in runtime.run(x))).hexdigest())
    """
    path = os.pathsep.join([str(SRC), str(Path(__file__).parent)])
    environment = {**os.environ, "F": str(folder), "PYTHONPATH": path}
    started = [
        subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                         text=True, env=environment)
        for _ in range(3)
    ]  # fmt: skip
    for each in started:
        assert each.stdout.readline() == "ready\n"
    for each in started:
        each.stdin.write("\n")
        each.stdin.flush()
    told = [each.communicate(timeout=60)[0].split() for each in started]
    assert {outcome for outcome, _ in told} <= {"saved", "hit"}
    assert len({digest for _, digest in told}) == 1
    assert [each.name for each in folder.iterdir() if each.name.startswith(".")] == []
    agree(lambda: mixed().graph(), folder, ["hit"])


@pytest.mark.skipif("avx2" not in xnnfast._runtime.isa(), reason="needs instruction sets to leave out")
def test_other_instruction_sets_have_files_of_their_own(tmp_path, folder):
    code = """
        import os
        import numpy as np
        from hostile_cache import mixed
        from xnnfast import Runtime
        graph = mixed().graph()
        x = np.random.default_rng(5).standard_normal(graph.inputs[0].shape).astype(np.float32)
        runtime = Runtime(graph, weights_cache=os.environ["F"])
        assert runtime.weights_cache == os.environ["TOLD"], runtime.weights_cache
        np.testing.assert_array_equal(runtime.run(x)[2], Runtime(mixed().graph()).run(x)[2])
    """
    for where in (folder, tmp_path / "one.xnnw"):
        for isa, told in (("avx2", "saved"), ("avx2", "hit"), ("sse4.1", "saved"), ("sse4.1", "hit")):
            python(code, F=str(where), TOLD=told, XNNFAST_ISA=isa)
        # In a folder the first file is still there; a single file has gone through all of them.
        python(code, F=str(where), TOLD="hit" if where is folder else "saved", XNNFAST_ISA="avx2")
    assert len(cached(folder)) == 2


# ---------------------------------------------------------------------------------------------------
# Care


def test_the_least_recently_used_goes_first(folder, monkeypatch, settled):
    graphs = [lambda seed=seed: dense(seed).graph() for seed in range(4)]
    ages = {}
    for place, make in enumerate(graphs[:3]):
        agree(make, folder, ["saved", "hit"])
        (new,) = set(cached(folder)) - set(ages)
        ages[new] = place
        for path in (new, cache.seal_path(new)):
            os.utime(path, (1000 + place, 1000 + place))
    size = max(each.stat().st_size for each in ages)
    # Used again: the time is kept on the seal. New times of the file itself cost one reading of it.
    agree(graphs[0], folder, ["hit"])
    agree(graphs[0], folder, ["hit"])
    monkeypatch.setenv(cache.ENV_LIMIT, str(3 * size))
    agree(graphs[3], folder, ["saved"])
    left = set(cached(folder)) & set(ages)
    assert sorted(ages[each] for each in left) == [0, 2]
    monkeypatch.setenv(cache.ENV_LIMIT, "0")
    agree(graphs[1], folder, ["saved", "hit"])
    assert len(cached(folder)) == 1
    assert len(list(folder.glob("*.seal"))) == 1


def test_sweep_removes_what_nobody_needs(folder):
    agree(lambda: dense().graph(), folder, ["saved"])
    (path,) = cached(folder)
    old = [folder / ".abc.xnnw.x1", folder / "gone.xnnw.seal", folder / "known" / "old", folder / "known" / ".tmp"]
    kept = [path, folder / "notes.txt", folder / ".other", folder / "known" / "new", folder / ".fresh.xnnw.x2"]
    (folder / "known").mkdir()
    for each in (*old, *kept[1:]):
        each.write_bytes(b"x")
    for each in old:
        os.utime(each, (0, 0))
    cache.sweep(folder)
    assert [each for each in old if each.exists()] == []
    assert [each for each in kept if not each.exists()] == []
    assert [each.path for each in cache.clear(folder)] == [str(path)]
    assert sorted(each.name for each in folder.iterdir()) == [".other", "known", "notes.txt"]


def test_verify_tells_what_is_wrong(folder):
    agree(lambda: mixed().graph(), folder, ["saved"])
    (path,) = cached(folder)
    assert cache.verify(path) is None
    data = path.read_bytes()
    front = cache.parse(memoryview(data))
    bad = bytearray(data)
    bad[front.entries[3].offset + 5] ^= 1
    path.write_bytes(bad)
    assert cache.verify(path) == "the packed bytes of entry 3 are damaged"
    bad = bytearray(data)
    bad[40] ^= 1
    path.write_bytes(bad)
    assert cache.verify(path) == "header or table are damaged, or of another version"
    path.write_bytes(b"")
    assert "is empty" in cache.verify(path)
    path.chmod(0o666)
    assert "its owner alone" in cache.verify(path)


def test_a_file_says_where_it_comes_from(tmp_path, folder):
    path = model(tmp_path)
    agree(lambda: xnnfast.load(path), folder, ["saved"])
    (made,) = cached(folder)
    facts = cache.described(made)
    assert facts["source"] == str(path)
    assert facts["entries"] == 1
    assert facts["isa"] == xnnfast._runtime.isa()
    assert json.dumps(facts)
    made.write_bytes(b"XNNFASTW")
    assert cache.described(made) is None


def test_entries_are_aligned_and_followed_by_readable_bytes(folder):
    agree(lambda: mixed().graph(), folder, ["saved"])
    data = cached(folder)[0].read_bytes()
    front = cache.parse(memoryview(data))
    assert len(front.entries) == 13
    for entry, after in zip(front.entries, [each.offset for each in front.entries[1:]] + [len(data)]):
        assert entry.offset % 128 == 0
        assert entry.offset + entry.size + 64 <= after
        assert not any(data[entry.offset + entry.size : after])


# ---------------------------------------------------------------------------------------------------
# Lowering, as far as the cache leans on it


def test_declared_shapes_are_the_inferred_ones():
    from xnnfast import shapes

    for name, types in op_cases.combinations():
        if OPS[name].kind is not None:
            graph = op_cases.case(name, types).graph
            assert lower(graph).shapes == shapes.infer(lower(graph)), (name, types)


def test_lowering_at_once_in_threads_gives_one_graph():
    graph = mixed().graph()
    made = []
    threads = [threading.Thread(target=lambda: made.append(lower(graph))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(each) for each in made}) == 1


# ---------------------------------------------------------------------------------------------------
# Damage


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("mapped", [False, True])
def test_hostile_files(tmp_path, mapped, single):
    seed = 10 + 2 * mapped + single
    rng = np.random.default_rng(seed)
    trials = Trials(tmp_path, mapped=mapped, single=single)
    outcomes = run(trials, 120, rng)
    print(f"seed {seed}: {dict(outcomes)}")
    assert sum(outcomes.values()) == 120


def test_every_kind_of_damage(tmp_path):
    rng = np.random.default_rng(0)
    trials = Trials(tmp_path)
    for name in KINDS:
        trials.trial(getattr(trials, name)(rng), rng)
    for name, data in trials.foreign.items():
        assert trials.trial(data, rng) == "saved", name
    # Under a seal that was once right.
    (seal,) = [Path(cache.seal_path(path)) for path in cached(trials.folder)]
    for data in (trials.swap_data(rng), trials.flip_packed(rng)):
        trials.trial(trials.own, rng)
        stamp = cache.file_stamp(os.stat(trials.path))
        seal.write_text(repr(stamp))
        time.sleep(0.02)
        with open(trials.path, "r+b") as file:
            file.write(data)
        assert trials.answer(trials.graph, trials.where) == (trials.want, "saved")
