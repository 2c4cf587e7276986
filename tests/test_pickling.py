"""Graphs, runtimes, programs and executors in other processes."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import files
import numpy as np
import pickling_child
import pytest

import xnnfast as xf
from xnnfast import (
    ChangedError,
    ClosedError,
    Executor,
    FormatError,
    GraphBuilder,
    GraphError,
    Program,
    Runtime,
    ShapeError,
    WeightsCache,
    load,
    pickling,
)
from xnnfast._payload import Payload
from xnnfast.errors import XnnpackError, xnnpack_error

X = np.random.default_rng(0).standard_normal((3, 64), np.float32)
METHODS = ("fork", "spawn", "forkserver")


def network(seed: int = 0) -> GraphBuilder:
    rng, b = np.random.default_rng(seed), GraphBuilder()
    x = b.input((1, 64))
    x = b.fully_connected(x, rng.standard_normal((48, 64), np.float32), clamp=(0, None))
    b.output(b.softmax(b.fully_connected(x, rng.standard_normal((10, 48), np.float32))))
    return b


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "network.xnn"
    network().save(path)
    return path


@pytest.fixture
def aged(path: Path) -> Path:
    """The same file, long since written: its times are old enough to vouch for it."""
    # Change times can't be set.
    time.sleep(2.2)
    return path


@pytest.fixture(params=METHODS)
def pool(request: pytest.FixtureRequest) -> Iterator[Any]:
    with multiprocessing.get_context(request.param).Pool(1) as pool:
        yield pool


def again(thing: Any, protocol: int = pickle.HIGHEST_PROTOCOL) -> Any:
    return pickle.loads(pickle.dumps(thing, protocol))


def want(graph: Any) -> np.ndarray:
    return Executor(graph, workers=1).run(X)[0]


# ---- what comes back


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_mapped_graph_travels_without_its_constants(path: Path, protocol: int) -> None:
    graph = load(path)
    data = pickle.dumps(graph, protocol)
    assert len(data) < 3000 < path.stat().st_size
    made = pickle.loads(data)
    assert made.zero_copy == graph.zero_copy == (2, 2)
    assert repr(made) == repr(graph)
    np.testing.assert_array_equal(want(made), want(graph))


def test_constants_of_both_graphs_lie_in_one_file_at_the_same_places(path: Path) -> None:
    graph = load(path)
    made = again(graph)
    assert [c.offset for c in made.constants] == [c.offset for c in graph.constants]
    assert all(c.owner.mapped and c.owner.path == str(path) for c in made.constants)


@pytest.mark.parametrize("protocol", (4, 5))
def test_a_built_graph_travels_as_bytes(protocol: int) -> None:
    graph = network().graph()
    made = again(graph, protocol)
    assert [bytes(c.data) for c in made.constants] == [bytes(c.data) for c in graph.constants]
    np.testing.assert_array_equal(want(made), want(graph))


@pytest.mark.parametrize("kind", (bytes, bytearray))
def test_a_graph_from_memory_travels_as_bytes(kind: type) -> None:
    source = kind(network().finish())
    graph = load(source)
    data = pickle.dumps(graph)
    expected = want(graph)
    if kind is bytearray:
        # Its constants were copied when it was loaded; what the buffer holds now is another thing.
        source[:] = bytes(len(source))
    del graph, source
    np.testing.assert_array_equal(want(pickle.loads(data)), expected)


def test_bytes_may_travel_beside_the_pickle() -> None:
    graph, buffers = network().graph(), []
    data = pickle.dumps(graph, 5, buffer_callback=buffers.append)
    assert len(data) < 3000 and sum(len(each.raw()) for each in buffers) >= 64 * 48 * 4
    np.testing.assert_array_equal(want(pickle.loads(data, buffers=buffers)), want(graph))


def test_every_copied_constant_is_copied_again(path: Path) -> None:
    made = again(load(path, copy=True))
    assert made.zero_copy == (0, 2) and {c.reason for c in made.constants} == {"copy=True"}


def test_notes_do_not_pile_up() -> None:
    b = network()
    b.abs(b.input((1, 3)))
    graph = b.graph()
    made = again(again(graph))
    assert made.notes == graph.notes and graph.notes


def test_values_shared_by_a_pickle_stay_shared(path: Path) -> None:
    graph = load(path)
    one, two = again((Runtime(graph), Runtime(graph)))
    assert one.graph is two.graph
    assert one.graph.inputs[0] is one.graph.value(one.graph.inputs[0].id)


def test_options_of_a_runtime_travel(path: Path, tmp_path: Path) -> None:
    made = again(Runtime(load(path), threads=2, check_finite=True, weights_cache=tmp_path / "cache"))
    assert made.threads == 2 and made.check_finite and made.weights_cache == "hit"
    assert again(Runtime(load(path), low_memory=True)).__reduce__()[1][2]["low_memory"]


def test_a_relative_cache_means_the_same_folder_elsewhere(path: Path, tmp_path: Path,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = pickle.dumps([Runtime(load("network.xnn"), weights_cache="cache"), WeightsCache("one.xnnw")])
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    runtime, one = pickle.loads(data)
    assert runtime.weights_cache == "hit" and one.file == str(tmp_path / "one.xnnw")


def test_the_own_cache_folder_is_the_receivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XNNFAST_CACHE_DIR", str(tmp_path / "mine"))
    data = pickle.dumps(WeightsCache(True))
    monkeypatch.setenv("XNNFAST_CACHE_DIR", str(tmp_path / "yours"))
    assert pickle.loads(data).folder == str(tmp_path / "yours")


def test_options_of_an_executor_travel(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = again(Executor(path, workers=3, threads=2, micro_batch=5, precision="int8-dynamic", pin=True))
    assert (made.workers, made.threads, made.plan.micro_batch, made.precision) == (3, 2, 5, "int8-dynamic")
    data = pickle.dumps(Executor(path))
    monkeypatch.setenv("XNNFAST_CPUS", "7")
    assert pickle.loads(data).workers == 7


def test_which_inputs_are_batched_travels() -> None:
    b = GraphBuilder()
    b.output(b.add(b.input((8, 4)), b.input((8, 4))))
    executor = Executor(b.graph(), workers=1, batch=4, batched=[0, 1])
    x = np.ones((6, 4), np.float32)
    np.testing.assert_array_equal(again(executor).run(x, x)[0], executor.run(x, x)[0])


def test_limits_travel() -> None:
    b = GraphBuilder()
    b.output(b.add(b.input((1, 4)), b.input((4, 1))))
    made = again(load(b.finish(), limits=xf.Limits(max_workspace=1 << 20)))
    with pytest.raises(xf.LimitError, match="max_workspace"):
        Runtime(made).run(np.ones((1, 600), np.float32), np.ones((600, 1), np.float32))


@pytest.mark.parametrize("name", sorted(p.name for p in Path(files.__file__).parent.glob("golden/*.bin")))
def test_graphs_of_every_dialect_and_container_travel(name: str) -> None:
    file = Path(files.__file__).parent / "golden" / name
    for graph in xf.load_all(file):
        made = again(graph)
        assert repr(made) == repr(graph)
        for one, two in zip(graph.values, made.values):
            assert (one.id, one.datatype, one.shape, one.is_input, one.is_output, one.external_id, one.dq_datatype) == (
                two.id, two.datatype, two.shape, two.is_input, two.is_output, two.external_id, two.dq_datatype)
            assert type(one.quantization) is type(two.quantization)
            if one.constant is not None:
                assert bytes(one.constant.data) == bytes(two.constant.data)
                assert one.constant.reason == two.constant.reason
        for one, two in zip(graph.nodes, made.nodes):
            assert one.op is two.op and dict(one.attrs) == dict(two.attrs)
            assert (one.inputs, one.outputs, one.flags, one.clamp) == (two.inputs, two.outputs, two.flags, two.clamp)


def test_a_pickled_graph_is_validated_like_any_other(path: Path) -> None:
    make, (values, nodes, inputs, outputs, fields) = load(path).__reduce__()
    with pytest.raises(GraphError):
        make(values, nodes, inputs, [values[1].replace(id=999, is_output=True)], fields)


# ---- programs

MODELS = Path(files.__file__).parents[2] / "shared" / "conformance"


@pytest.mark.skipif(not MODELS.is_dir(), reason="the conformance programs are not here")
@pytest.mark.parametrize("merge", (True, False))
def test_programs_travel(merge: bool) -> None:
    folder = next(f for f in sorted(MODELS.iterdir()) if (f / "model.pte").is_file() and (f / "input_0.npy").is_file()
                  and not list(f.glob("*.ptd")))
    program = Program(folder / "model.pte", merge=merge)
    inputs = [np.load(f) for f in sorted(folder.glob("input_*.npy"))]
    made = again(program)
    assert made.merge is merge
    for one, two in zip(made.run(*inputs), program.run(*inputs)):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("on_disk", (True, False))
def test_data_files_travel_with_their_program(tmp_path: Path, on_disk: bool) -> None:
    program = files.program(segments=[b"", files.named()])
    data = files.data_file({"weights": np.arange(8, dtype=np.float32).tobytes()})
    sources: list[Any] = [program, data]
    if on_disk:
        sources = [tmp_path / "model.pte", tmp_path / "model.ptd"]
        for source, content in zip(sources, (program, data)):
            source.write_bytes(content)
    made = again(Program(sources[0], data=[sources[1]]))
    assert bytes(made.file.named("weights")) == np.arange(8, dtype=np.float32).tobytes()
    if on_disk:
        assert made.file.data_files[0].payload.path == str(sources[1])
        pickled = pickle.dumps(made)
        sources[1].write_bytes(files.data_file({"weights": bytes(32)}))
        with pytest.raises(ChangedError, match=r"model\.ptd"):
            pickle.loads(pickled)


# ---- files that changed


def test_the_path_is_absolute(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    graph = load("network.xnn")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    np.testing.assert_array_equal(want(again(graph)), want(graph))


@pytest.mark.parametrize("how", ("renamed over", "shorter", "gone", "a folder", "empty"))
@pytest.mark.parametrize("kind", (load, lambda p: Runtime(load(p)), Executor), ids=("graph", "runtime", "executor"))
def test_a_file_that_changed_is_refused(path: Path, how: str, kind: Any) -> None:
    data = pickle.dumps(kind(path))
    other = path.with_name("other")
    other.write_bytes({"renamed over": network(1).finish(), "shorter": path.read_bytes()[:-16]}.get(how, b""))
    if how == "gone":
        path.unlink()
    elif how == "a folder":
        path.unlink()
        path.mkdir()
    else:
        other.replace(path)
    with pytest.raises(ChangedError, match="where this was pickled") as caught:
        pickle.loads(data)
    assert caught.value.path == str(path) and str(path) in str(caught.value)
    assert isinstance(caught.value, OSError) and isinstance(caught.value, xf.XnnfastError)
    if how == "renamed over":
        assert caught.value.expected != caught.value.got


def test_one_changed_byte_is_refused_though_size_and_time_are_the_same(aged: Path) -> None:
    data = pickle.dumps(load(aged))
    status, content = aged.stat(), bytearray(aged.read_bytes())
    content[-1] ^= 1
    with aged.open("r+b") as file:
        file.write(content)
    os.utime(aged, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(ChangedError, match="other bytes"):
        pickle.loads(data)


def test_the_same_bytes_in_another_file_are_accepted(path: Path) -> None:
    data = pickle.dumps(load(path))
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    other.replace(path)
    assert isinstance(pickle.loads(data), xf.Graph)


def test_a_file_overwritten_after_it_was_mapped_is_not_pickled(path: Path) -> None:
    graph = load(path, copy=True)
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.truncate(100)
    with pytest.raises(ChangedError, match="overwritten"):
        pickle.dumps(graph)
    path.write_bytes(content)


# ---- what it costs


def test_a_file_is_digested_once(aged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0
    original = pickling.hashlib.blake2b

    def counting(*args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        return original(*args, **options)

    monkeypatch.setattr(pickling.hashlib, "blake2b", counting)
    graph = load(aged)
    assert count == 0
    for _ in range(3):
        pickle.dumps(graph)
    pickle.dumps(Executor(load(aged)))
    again(again(graph))
    assert count == 1


def test_the_same_machine_does_not_read_an_old_file_again(aged: Path, pool: Any) -> None:
    text, count = pool.apply(pickling_child.digested, [pickle.dumps(load(aged))])
    assert text == repr(load(aged)) and count == 0


def test_a_young_file_is_read_by_the_receiver(path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(pickling_child.digested, [pickle.dumps(load(path))])[1] == 1


def test_digesting_leaves_no_pages_behind(tmp_path: Path) -> None:
    path = tmp_path / "large.bin"
    path.write_bytes(bytes(40 << 20))
    payload = Payload.open(path)

    def resident() -> int:
        with open("/proc/self/smaps") as file:
            lines = iter(file)
            for line in lines:
                if line.endswith(f" {path}\n"):
                    return next(int(each.split()[1]) for each in lines if each.startswith("Rss:"))
        raise AssertionError("the file is not mapped")

    assert pickling.digest(payload) == pickling.hashlib.blake2b(bytes(40 << 20), digest_size=32).digest()
    assert resident() < 1024


# ---- other processes


def test_everything_runs_in_another_process(path: Path, pool: Any) -> None:
    graph = load(path)
    for thing in (graph, Executor(graph, workers=1), network().graph()):
        pid, (result,) = pool.apply(pickling_child.run, [thing, X[:1]])
        assert pid != os.getpid()
        np.testing.assert_array_equal(result, Runtime(graph).run(X[:1])[0])


def test_a_refusal_comes_back_from_another_process(path: Path, pool: Any) -> None:
    data = pickle.dumps(load(path))
    path.unlink()
    error = pool.apply(pickling_child.refusal, [data])
    assert isinstance(error, ChangedError) and error.path == str(path)


def test_joblib(path: Path) -> None:
    joblib = pytest.importorskip("joblib")
    executor = Executor(path, workers=1)
    found = joblib.Parallel(n_jobs=2)(joblib.delayed(pickling_child.run)(executor, X[i : i + 1]) for i in range(3))
    assert os.getpid() not in {pid for pid, _ in found}
    np.testing.assert_allclose(np.concatenate([result for _, (result,) in found]), executor.run(X)[0], rtol=1e-6)


def test_cloudpickle(path: Path) -> None:
    cloudpickle = pytest.importorskip("cloudpickle")
    executor = Executor(path, workers=1)
    function = pickle.loads(cloudpickle.dumps(lambda x: executor.run(x)[0]))
    np.testing.assert_array_equal(function(X), executor.run(X)[0])


# ---- copies, and what is closed


def test_copies_of_what_does_not_change_are_the_same_object(path: Path) -> None:
    graph = load(path)
    for thing in (graph, graph.values[0], graph.nodes[0], graph.constants[0], graph.owner):
        assert copy.copy(thing) is thing and copy.deepcopy(thing) is thing


@pytest.mark.parametrize("function", (copy.copy, copy.deepcopy))
def test_copies_of_what_runs_share_the_graph(path: Path, function: Any) -> None:
    runtime, executor = Runtime(load(path)), Executor(path, workers=1)
    assert function(runtime).graph is runtime.graph and function(runtime) is not runtime
    path.unlink()
    np.testing.assert_array_equal(function(executor).run(X)[0], executor.run(X)[0])


def test_what_is_closed_is_not_pickled(path: Path) -> None:
    program = Program(files.program(segments=[b"", files.named()]), data=[files.data_file({"weights": bytes(32)})])
    for thing in (Runtime(load(path)), Executor(path), program):
        thing.close()
        with pytest.raises(ClosedError):
            pickle.dumps(thing)


# ---- exceptions


@pytest.mark.parametrize("error", [
    FormatError("bad", offset=16, path="XNNGraph.xvalues[5]"),
    ShapeError("bad", expected=(1, 2), got=(3,)),
    ChangedError("bad", path="/somewhere", expected="aa", got="bb"),
    xnnpack_error("xnn_invoke_runtime", 3, node=4, detail="more"),
    xnnpack_error("xnn_create_runtime", 6),
], ids=lambda error: type(error).__name__)
def test_exceptions_cross_processes_as_they_are(error: Any) -> None:
    made = again(error)
    assert type(made) is type(error) and str(made) == str(error) and made.__dict__ == error.__dict__


def test_an_exception_of_xnnpack_comes_out_of_a_pool() -> None:
    with multiprocessing.get_context("fork").Pool(1) as pool, pytest.raises(XnnpackError, match="invalid_state"):
        pool.apply_async(pickling_child.fails, [xnnpack_error("xnn_invoke_runtime", 3)]).get(30)


def test_importing_the_package_does_not_import_pickling() -> None:
    import subprocess

    code = "import sys, xnnfast; xnnfast.Graph; print('xnnfast.pickling' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
