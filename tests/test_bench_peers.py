"""The models of bench/, against the reference; and their forms for peers, against the peers that are installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import xnnfast

BENCH = Path(__file__).resolve().parent.parent / "bench"
SMALL = {"encoder_mini": 8, "mlp": None, "mobilenet_v1": 32, "mobilenet_v2": 32, "resnet18": 32}


@pytest.fixture(autouse=True)
def bench_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH / "peers"))
    monkeypatch.syspath_prepend(str(BENCH))


@pytest.fixture
def cases():
    import cases

    return cases


def made(cases, name, precision):
    size = SMALL[name]
    graph = cases.build(name, size=size, precision=precision).graph()
    return graph, cases.example(name, size=size, precision=precision)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("name", SMALL)
def test_models_give_the_reference_s_answer(cases, name, precision):
    graph, x = made(cases, name, precision)
    (got,), (want,) = xnnfast.Runtime(graph).run(x), xnnfast.reference.run(graph, x)
    if got.dtype == np.int8:
        assert np.abs(got.astype(int) - want).max() <= 1
        assert len(np.unique(got)) > 5
    else:
        assert np.abs(got - want).max() <= (1e-4 if precision == "fp32" else 0.03) * np.abs(want).max()


def test_every_list_is_read(cases):
    assert {"encoder_base", "mlp_wide", "resnet50", *SMALL} <= set(cases.names())
    for name in cases.names():
        layers = cases.rows(name)
        known = {"input"}
        for label, _, sources, *rest in layers:
            assert len(rest) == 5
            assert set(sources.split(",")) <= known, f"{name}, layer {label}"
            known.add(label)


CONVERTED = [(name, precision) for name in SMALL for precision in ("fp32", "int8") if name != "encoder_mini"]


@pytest.mark.parametrize("name, precision", [*CONVERTED, ("encoder_mini", "fp32")])
def test_onnx_form_gives_the_same(cases, name, precision, tmp_path):
    ort = pytest.importorskip("onnxruntime")
    import onnx_export

    graph, x = made(cases, name, precision)
    for fold in (True, False):
        onnx_export.export(graph, tmp_path / "m.onnx", fold=fold)
        session = ort.InferenceSession(str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"])
        turned = np.ascontiguousarray(x.transpose(0, 3, 1, 2)) if onnx_export.image_inputs(graph)[0] else x
        (got,) = session.run(None, {"input_0": turned})
        (want,) = xnnfast.Runtime(graph).run(x)
        scale = 127 if got.dtype == np.int8 else np.abs(want).max()
        assert got.dtype == want.dtype
        assert np.abs(got.astype(float) - want).max() <= (1e-4 if precision == "fp32" else 0.05) * scale


@pytest.mark.parametrize("name, precision", CONVERTED)
def test_tflite_form_gives_the_same(cases, name, precision, tmp_path):
    litert = pytest.importorskip("ai_edge_litert")
    import tflite_export
    from ai_edge_litert.interpreter import Interpreter

    graph, x = made(cases, name, precision)
    tflite_export.export(graph, tmp_path / "m.tflite", Path(litert.__path__[0]).parent)
    interpreter = Interpreter(str(tmp_path / "m.tflite"), num_threads=1)
    interpreter.allocate_tensors()
    interpreter.set_tensor(interpreter.get_input_details()[0]["index"], x)
    interpreter.invoke()
    got = interpreter.get_tensor(interpreter.get_output_details()[0]["index"])
    (want,) = xnnfast.Runtime(graph).run(x)
    assert np.abs(got.astype(float) - want).max() <= (1 if got.dtype == np.int8 else 1e-4 * np.abs(want).max())


@pytest.mark.parametrize("name, precision", CONVERTED)
def test_program_form_gives_the_same(cases, name, precision, tmp_path):
    import pte_export

    graph, x = made(cases, name, precision)
    pte_export.export(graph, tmp_path / "m.pte")
    (want,) = xnnfast.Runtime(graph).run(x)
    program = xnnfast.Program(tmp_path / "m.pte")
    np.testing.assert_array_equal(program.run(x)[0], want)
    assert program.file.payload.name == str(tmp_path / "m.pte") and program.methods == ("forward",)
    peer = environments_python("executorch_numpy")
    if peer is None:
        pytest.skip("equal here; no environment of executorch_numpy to run the program in as well")
    np.save(tmp_path / "x.npy", x)
    code = (
        "import sys, numpy; from executorch_numpy_runtime import Runtime; m, x, y = sys.argv[1:];"
        "p = Runtime.get().load_program(m); numpy.save(y, p.load_method('forward')([numpy.load(x)])[0])"
    )
    names = [str(tmp_path / each) for each in ("m.pte", "x.npy", "y.npy")]
    subprocess.run([str(peer), "-c", code, *names], check=True, capture_output=True)
    got = np.load(tmp_path / "y.npy")
    assert np.abs(got.astype(float) - want).max() <= (0 if got.dtype == np.int8 else 1e-5 * np.abs(want).max())


def environments_python(name):
    import environments

    return environments.python_of(name)


def test_what_has_no_form_is_named(cases):
    import onnx_export
    import tflite_export

    graph, _ = made(cases, "encoder_mini", "int8")
    with pytest.raises(onnx_export.Unknown, match=r"node 0 .convert"):
        onnx_export.Writer(graph).model()
    assert issubclass(tflite_export.Unknown, ValueError)


def test_environments_are_named_and_found(monkeypatch, tmp_path):
    import environments

    monkeypatch.setenv("XNNFAST_PEERS", str(tmp_path))
    assert environments.python_of("onnxruntime") is None
    monkeypatch.setenv("XNNFAST_PEER_ONNXRUNTIME", sys.executable)
    assert environments.make("onnxruntime") == Path(sys.executable)


@pytest.mark.parametrize(
    "one, other, expected",
    [
        ([[1, 2]], [[1, 2]], 0.0),
        ([[1, 2]], [[1, 3]], 0.5),
        ([[0, 0]], [[0, 0]], 0.0),
        ([[1, 2], [4]], [[1, 2], [3]], 0.25),
        ([[1, 2], [1]], [[1.5, 2], [np.nan]], np.inf),
        ([[np.nan]], [[np.nan]], 0.0),
        ([[np.inf]], [[-np.inf]], np.inf),
        ([[1, 2]], [[1, 2], [3]], np.inf),
        ([[1, 2]], [[1, 2, 3]], np.inf),
    ],
)
def test_results_of_peers_are_compared(tmp_path, one, other, expected):
    import run

    for name, arrays in (("a", one), ("b", other)):
        np.savez(tmp_path / name, *[np.float32(array) for array in arrays])
    assert run.difference(tmp_path / "a.npz", tmp_path / "b.npz") == expected


class SmallCase:
    """What a round needs of a case, with a graph of its own."""

    def __init__(self, folder):
        b = xnnfast.GraphBuilder()
        b.output(b.add(b.input((1, 4)), 1.0))
        b.save(folder / "model.xnn")
        self.folder = folder
        self.files = dict.fromkeys(("xnnfast", "openvino", "litert"), folder / "model.xnn")

    def inputs(self, peer, batch):
        path = self.folder / "input.npy"
        np.save(path, np.ones((batch, 4), np.float32))
        return path


@pytest.mark.parametrize("threads", [1, 2])
def test_peers_take_turns_and_failures_are_told(tmp_path, monkeypatch, threads):
    import run

    monkeypatch.setattr(run, "SPINNING", 0.0)
    case = SmallCase(tmp_path)
    wordy = tmp_path / "wordy"
    # More than a pipe holds, and then an end.
    wordy.write_text("#!/bin/sh\nhead -c 200000 /dev/zero | tr '\\0' '\\n' >&2\necho no such module >&2\nexit 1\n")
    midway = tmp_path / "midway"
    midway.write_text("#!/bin/sh\necho ready\nread line\necho out of memory >&2\n")
    for each in (wordy, midway):
        each.chmod(0o755)
    pythons = {"xnnfast": Path(sys.executable), "openvino": wordy, "litert": midway}
    allowed = os.sched_getaffinity(0)
    heard = []
    hear = run.Child.hear
    monkeypatch.setattr(run.Child, "hear", lambda self, word=None: heard.append(word) or hear(self, word))
    found = dict(run.in_turns(case, pythons, list(pythons), 1, threads, 0.04, 0))
    assert found["openvino"] == "no such module" and found["litert"] == "out of memory"
    assert len(found["xnnfast"]["samples_ns"]) >= run.SLICES
    # Three are heard ready, the one that is left after its slices, and the one that fails in the first of them.
    assert heard.count("ready") == 3 and heard.count("done") == run.SLICES + 1 and heard.count(None) == 1
    with np.load(tmp_path / "xnnfast.npz") as results:
        np.testing.assert_array_equal(results["arr_0"], np.full((1, 4), 2, np.float32))
    assert os.sched_getaffinity(0) == allowed


def test_a_pile_is_shared_by_processes(tmp_path):
    import batch

    case = SmallCase(tmp_path)
    with batch.team(case, "xnnfast", Path(sys.executable), batch.Setting(4, 1, 2), 8) as made:
        assert made.seconds() > 0
        with np.load(made.results(tmp_path / "all.npz")) as results:
            np.testing.assert_array_equal(results["arr_0"], np.full((8, 4), 2, np.float32))
        children = [child.process for child in made.children]
    assert [child.poll() for child in children] == [-9, -9]


def test_a_figure_of_the_gate_that_fails_leaves_the_others(monkeypatch, capsys):
    import gate

    def fails(folder):
        raise AssertionError("('saved', 'saved')")

    bounds = [
        gate.Bound("bad", "one that can't be measured", 2.0, False, 1, fails),
        gate.Bound("low", "a ratio that is low enough", 2.0, False, 1, lambda folder: ([1.0], [1.0])),
    ]
    monkeypatch.setattr(gate, "BOUNDS", bounds)
    monkeypatch.setattr(sys, "argv", ["gate.py"])
    assert gate.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "not measured one that can't be measured: AssertionError: ('saved', 'saved')"
    assert lines[1].startswith("good ")
    monkeypatch.setattr(sys, "argv", ["gate.py", "--strict"])
    assert gate.main() == 1


def test_bounds_of_the_gate_are_told_apart(monkeypatch):
    import gate

    bounds = [
        gate.Bound("low", "a ratio that is low enough", 2.0, False, 1, lambda folder: ([1.0], [1.0])),
        gate.Bound("high", "a ratio that is too low", 2.0, True, 1, lambda folder: ([1.0], [1.0])),
        gate.Bound("cpus", "one for more CPUs", 2.0, True, 10_000, lambda folder: ([1.0], [1.0])),
    ]
    monkeypatch.setattr(gate, "BOUNDS", bounds)
    rows = list(gate.figures())
    assert [row.get("short") for row in rows] == [False, True, None]
    assert "10000 CPUs" in rows[2]["skipped"]


def test_experiment_mixes_its_kinds(monkeypatch):
    import aa_experiment

    kinds = aa_experiment.plan(8, 2)
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "same": 4, "same, noise": 4, "5 % slower": 2, "10 % slower": 2, "20 % slower": 2,
    }  # fmt: skip
    assert len(set(kinds[:7])) == 5
