"""Measuring, records and comparing: the parts by made-up workers, the whole by real ones."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import xnnfast
from xnnfast.bench import compare, environment, measure, record, stats, worker
from xnnfast.bench.profile import profile
from xnnfast.builder import GraphBuilder
from xnnfast.errors import ArgumentError, FormatError

IDLE = {
    "wall": 200_000_000, "cpu": 190_000_000, "involuntary": 1, "voluntary": 1, "faults": 0, "waited": 100_000,
    "migrations": 0, "steal": 0, "busy": 200_000_000, "throttled": 0, "throttled_us": 0,
}  # fmt: skip


def answer(latency=1000.0, load=2000.0, peak=50 << 20, samples=20, **counts):
    """What a worker says on an idle machine."""
    return {
        "inner": 2, "warm_up": [2 * latency] * 3, "stable": True, "samples": [2 * latency] * samples,
        "load": {"load": load / 2, "pack": load / 4, "first": load / 4, "total": load},
        "memory": {"resident": 1 << 20, "peak": 1 << 20, "process_peak": peak},
        "opening": dict(IDLE), "while": {**IDLE, **counts}, "spin": [100_000, 101_000],
        "cpu": None,
    }  # fmt: skip


def mlp(path: Path, *, extra: int = 0, scale: float = 1.0, rows: int = 2, width: int = 16) -> Path:
    b = GraphBuilder()
    rng = np.random.default_rng(0)
    h = b.input((rows, width))
    h = b.fully_connected(h, np.float32(scale) * rng.standard_normal((width, width), np.float32), clamp=(0, None))
    for _ in range(extra):
        h = b.clamp(h, 0, None)
    b.output(h)
    b.save(path)
    return path


# ---------------------------------------------------------------------------------------------------
# Warming up and sampling


class FakeClock:
    """A clock that calls push forward."""

    def __init__(self, durations):
        self.now, self.durations = 0, iter(durations)

    def __call__(self):
        return self.now

    def call(self):
        self.now += next(self.durations)


def test_warm_up_goes_on_until_groups_agree(monkeypatch):
    # Row P1 of the case list: the first runs take three times as long. All samples are kept, in order.
    slow = [9_000_000 - 100_000 * i for i in range(60)]
    clock = FakeClock([*slow, *[3_000_000] * 1000])
    monkeypatch.setattr(worker, "CLOCK", clock)
    monkeypatch.setattr(worker, "WALL", clock)
    samples, inner, stable = worker.warm_up(clock.call, 10.0, 0.2, 500)
    assert stable and inner == 1
    assert samples[:3] == slow[3:6]
    assert samples[-6:] == [3_000_000] * 6


def test_warm_up_ends_at_its_limit(monkeypatch):
    clock = FakeClock(10_000_000 * (1 + i % 2) for i in range(10_000))
    monkeypatch.setattr(worker, "CLOCK", clock)
    monkeypatch.setattr(worker, "WALL", clock)
    assert worker.warm_up(clock.call, 0.5, 0.2, 500)[2] is False
    assert clock.now < 1_000_000_000


def test_calls_shorter_than_the_clock_are_measured_in_groups(monkeypatch):
    clock = FakeClock(1000 for _ in range(1_000_000))
    monkeypatch.setattr(worker, "CLOCK", clock)
    monkeypatch.setattr(worker, "WALL", clock)
    _, inner, _ = worker.warm_up(clock.call, 1.0, 0.2, 500)
    assert inner * 1000 >= worker.MIN_SAMPLE_NS
    # No more samples than asked for in the window.
    assert 0.2e9 / (inner * 1000) <= 501


def test_sampling_takes_the_least_number_however_slow(monkeypatch):
    clock = FakeClock(1_000_000_000 for _ in range(100))
    monkeypatch.setattr(worker, "CLOCK", clock)
    monkeypatch.setattr(worker, "WALL", clock)
    assert worker.sample(clock.call, 1, 0.15, 5, 500) == [1_000_000_000] * 5


# ---------------------------------------------------------------------------------------------------
# Disturbances


def test_an_idle_machine_disturbs_nothing():
    assert environment.disturbances(answer(), 1, 2) == {}


@pytest.mark.parametrize(
    "counts, word",
    [
        ({"throttled": 1, "throttled_us": 5000}, "throttling"),
        ({"steal": 40_000_000}, "steal"),
        ({"waited": 20_000_000}, "waiting"),
        ({"involuntary": 40}, "switches"),
        ({"migrations": 15}, "migrations"),
        ({"busy": 590_000_000}, "others"),
    ],
)
def test_disturbances_are_found_by_kind(counts, word):
    assert list(environment.disturbances(answer(**counts), 1, 2)) == [word]


def test_work_on_a_cpu_that_is_not_needed_disturbs_nothing():
    assert environment.disturbances(answer(busy=390_000_000), 1, 2) == {}
    assert list(environment.disturbances(answer(busy=390_000_000), 2, 2)) == ["others"]


def test_cpu_time_is_not_disturbed_by_waiting():
    made = answer(waited=100_000_000, involuntary=90, busy=590_000_000)
    assert environment.disturbances(made, 1, 2, "cpu") == {}
    made["spin"] = [100_000, 150_000]
    assert list(environment.disturbances(made, 1, 2, "cpu")) == ["clock"]


def test_a_change_of_the_clock_is_found():
    made = answer()
    made["spin"] = [100_000, 120_000]
    assert list(environment.disturbances(made, 1, 2)) == ["clock"]


def test_a_clock_that_both_sides_had_is_no_disturbance():
    one, other = answer(), answer()
    for each in (one, other):
        # Before opening, and before each slice: the machine slows down midway.
        each.update(turns=True, spin=[100_000, 100_000, 101_000, 150_000, 151_000])
        assert environment.disturbances(each, 1, 2) == {}
    assert environment.unlike_clocks(one, other) is None
    other["spin"] = [100_000, 150_000, 151_000, 150_000, 151_000]
    assert "took 126 us before slices of A and 150 us before those of B" in environment.unlike_clocks(one, other)


def test_disturbed_opening_counts_too():
    made = answer()
    made["opening"]["throttled"] = 1
    (text,) = environment.disturbances(made, 1, 2).values()
    assert text.startswith("while opening")


def test_environment_says_what_changes_times():
    facts = environment.environment()
    assert {
        "cpu",
        "affinity",
        "cgroup_quota",
        "governor",
        "turbo",
        "smt",
        "aslr",
        "huge_pages",
        "kernel",
        "load",
    } <= set(facts)
    json.dumps(facts, allow_nan=False)
    busy = {**facts, "load": [99.0, 0, 0], "governor": "powersave", "cgroup_quota": {"cpus": 1.5, "from": "x"}}
    assert len(environment.advice(busy)) == 3


# ---------------------------------------------------------------------------------------------------
# Inputs


def test_random_inputs_are_seeded_and_of_the_right_dtype():
    for dtype in ("float32", "float16", "int8", "uint8", "int32", "int64", "bool"):
        one, again = (measure.random_array(dtype, (3, 4), (7, 0)) for _ in range(2))
        assert one.dtype == dtype and one.shape == (3, 4)
        assert np.array_equal(one, again)
        assert not np.array_equal(one, measure.random_array(dtype, (3, 4), (8, 0))) or dtype == "bool"
    assert measure.random_array("bfloat16", (3, 4), (7, 0)).dtype == np.dtype("V2")


def test_data_that_changes_times_is_named():
    # Row P3 of the case list.
    assert measure.suspicious(np.random.default_rng(0).standard_normal(100).astype(np.float32)) is None
    assert "all 4 numbers are 0" in measure.suspicious(np.zeros(4, np.float32))
    assert "2 of 3 numbers are denormal" in measure.suspicious(np.array([1e-39, 1, -1e-40], np.float32))
    assert "1 of 2 numbers are not finite" in measure.suspicious(np.array([np.nan, 1], np.float32))
    assert measure.suspicious(np.zeros(4, np.int8)) is None


def test_denormal_and_constant_weights_are_named(tmp_path):
    b = GraphBuilder()
    x = b.input((1, 8))
    x = b.fully_connected(x, np.full((8, 8), 1e-39, np.float32))
    b.output(b.fully_connected(x, np.ones((8, 8), np.float32)))
    b.save(tmp_path / "tiny.xnn")
    notes = measure.constant_notes(measure.subject(tmp_path / "tiny.xnn").facts)
    assert any("64 weights are denormal" in note for note in notes)
    assert any("2 weight arrays hold one and the same number" in note for note in notes)


@pytest.mark.parametrize(
    "array, reason",
    [
        (np.ones((2, 16)), "need dtype float32 for input 0, found float64"),
        (np.ones((2, 16), ">f4"), "need dtype float32 for input 0, found >f4"),
        (np.ones((2, 17), np.float32), r"need shape \(2, 16\) for batch 2, found \(2, 17\)"),
    ],
)
def test_input_files_have_to_fit(tmp_path, array, reason):
    facts = measure.subject(mlp(tmp_path / "a.xnn")).facts
    np.save(tmp_path / "x.npy", array)
    with pytest.raises(ArgumentError, match=reason):
        measure.Inputs(str(tmp_path), facts, 0, [tmp_path / "x.npy"]).at(2)


def test_input_files_have_to_be_arrays(tmp_path):
    (tmp_path / "x.npy").write_bytes(b"PK\3\4 an archive")
    with pytest.raises(ArgumentError, match=r"need a \.npy file, which starts with"):
        measure.read_array(tmp_path / "x.npy")
    np.save(tmp_path / "y.npy", np.zeros(100))
    (tmp_path / "y.npy").write_bytes((tmp_path / "y.npy").read_bytes()[:300])
    with pytest.raises(ArgumentError, match=r"y.npy: need a whole \.npy file"):
        measure.read_array(tmp_path / "y.npy")
    np.save(tmp_path / "z.npy", np.array([{}], object), allow_pickle=True)
    with pytest.raises(ArgumentError, match=r"z.npy: need a whole \.npy file of numbers"):
        measure.read_array(tmp_path / "z.npy")


def test_inputs_that_no_memory_holds_are_refused_before_they_are_made(tmp_path):
    facts = measure.subject(mlp(tmp_path / "a.xnn")).facts
    with pytest.raises(ArgumentError, match="more than a quarter of the"):
        measure.Inputs(str(tmp_path), facts, 0).at(1 << 40)


# ---------------------------------------------------------------------------------------------------
# Workers that don't answer


def build_of(folder: Path, text: str) -> measure.Build:
    """A Python that runs a script in the worker's place."""
    script = folder / "python"
    script.write_text(f"#!/bin/sh\n{text}\n")
    script.chmod(0o755)
    return measure.Build(str(script))


@pytest.mark.parametrize(
    "text, reason",
    [
        ("kill -9 $$", "ended without an answer: killed by SIGKILL"),
        ("echo ready; read line; kill -9 $$", "ended without an answer: killed by SIGKILL"),
        ("echo ready; read line; exit 3", "ended without an answer: exit status 3"),
        ("echo ready; read line; echo '{\"inner\": 1,'", "gave no whole answer: exit status 0, its last words were"),
        ("echo no such module >&2; exit 1", "ended without an answer: no such module"),
    ],
)
@pytest.mark.parametrize("greeted", [False, True])
def test_workers_that_die_are_told(tmp_path, text, reason, greeted):
    made = measure.Worker(build_of(tmp_path, text))
    if greeted:
        made.wait_until_ready()
    with pytest.raises(measure.MeasureError, match=reason):
        made.run({})


@pytest.mark.parametrize(
    "text, reason",
    [
        ("echo ready; read line; kill -9 $$", "ended without an answer: killed by SIGKILL"),
        ("echo ready; echo no such module >&2; exit 1", "ended without an answer: no such module"),
        ("echo ready; read line; echo '{\"cpu\": 1}'; exit 3", "ended without an answer: exit status 3"),
        ("echo ready; read line; printf '{\"cpu\": '", "gave no whole answer: exit status 0, its last words were"),
        ("echo ready; read line; echo '{\"error\": \"bad shape\"}'", "^bad shape$"),
        ("echo ready; read line; echo hello; exec sleep 100", "no whole answer: still running, its last words were"),
        ("echo banner; echo ready; read line; yes no | head -c 500000 >&2; exit 1", "ended without an answer: no"),
    ],
)
def test_workers_that_die_between_turns_are_told(tmp_path, text, reason):
    made = measure.Worker(build_of(tmp_path, text))
    made.wait_until_ready()
    with pytest.raises(measure.MeasureError, match=reason):
        for _ in range(2):
            made.turn("{}")
    made.stop()
    assert made.process.returncode is not None


def test_the_last_words_of_a_worker_that_hangs_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "PATIENCE", 0.5)
    made = measure.Worker(build_of(tmp_path, "echo ready; echo waiting for the lock >&2; exec sleep 100"))
    made.wait_until_ready()
    with pytest.raises(measure.MeasureError, match=r"for 0\.5 s, its last words were: waiting for the lock"):
        made.turn("{}")
    made.stop()


@pytest.mark.parametrize("ask", [lambda made: made.run({}), lambda made: made.turn("{}")])
def test_a_worker_that_hangs_is_ended(tmp_path, monkeypatch, ask):
    monkeypatch.setattr(measure, "PATIENCE", 0.1)
    made = measure.Worker(build_of(tmp_path, "exec sleep 100"))
    with pytest.raises(measure.MeasureError, match=r"no answer from a worker of .* for 0\.1 s"):
        ask(made)
    made.stop()
    assert made.process.poll() == -signal.SIGKILL


def test_turns_add_up_to_one_measurement(tmp_path):
    path = mlp(tmp_path / "a.xnn")
    np.save(tmp_path / "x.npy", np.ones((2, 16), np.float32))
    task = {
        "model": str(path), "kind": "graph", "inputs": [str(tmp_path / "x.npy")], "seconds": 0.1, "warm_up": 0.05,
        "most": 40, "turns": True, "stay": True,
    }  # fmt: skip
    made = measure.Worker(measure.Build.own())
    made.wait_until_ready()
    opened = made.turn(json.dumps(task))
    assert opened["cpu"] in os.sched_getaffinity(0)
    assert os.sched_getaffinity(made.process.pid) == {opened["cpu"]}
    assert made.turn("warm up")["sample_ns"] > 0
    for _ in range(4):
        assert made.turn("slice 5") == {}
        time.sleep(0.5)
    found = made.turn("end")
    made.stop()
    assert len(found["samples"]) == 20 and found["cpu"] == opened["cpu"]
    # One before opening, and one before each slice.
    assert len(found["spin"]) == 5
    # What the other side does meanwhile is not counted.
    assert found["while"]["wall"] < 1.4e9


def test_what_libraries_print_is_no_answer(tmp_path):
    (tmp_path / "xnnfast").mkdir()
    text = "Runtime = None\ndef __getattr__(name):\n    print('hello', flush=True)\n    raise AttributeError(name)\n"
    (tmp_path / "xnnfast/__init__.py").write_text(text)
    made = measure.Worker(measure.Build(sys.executable, str(tmp_path)))
    made.wait_until_ready()
    with pytest.raises(measure.MeasureError, match=r"^AttributeError: Program$"):
        made.turn('{"seconds": 0.1}')
    made.stop()


def test_stopping_does_not_wait_for_the_worker_s_children(tmp_path):
    made = measure.Worker(build_of(tmp_path, "echo ready; sleep 60; true"))
    made.wait_until_ready()
    begun = time.monotonic()
    made.stop()
    assert time.monotonic() - begun < 50
    assert made.process.returncode == -signal.SIGKILL


def test_a_worker_that_hangs_at_import_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "PATIENCE", 0.2)
    made = measure.Worker(build_of(tmp_path, "echo banner; exec sleep 100"))
    made.wait_until_ready()
    with pytest.raises(measure.MeasureError, match="ended without an answer: killed by SIGKILL"):
        made.turn("{}")
    made.stop()


@pytest.mark.parametrize("error", [PermissionError, AttributeError, FileNotFoundError])
def test_where_binding_is_forbidden_nothing_is_bound(monkeypatch, error):
    def refuse(*arguments):
        raise error("no")

    monkeypatch.setattr(worker.os, "sched_setaffinity", refuse)
    assert worker.stay() is None
    monkeypatch.setattr(worker.os, "sched_setaffinity", lambda *arguments: None)
    assert worker.stay() in os.sched_getaffinity(0)
    # A system that names a CPU that can't be the one.
    monkeypatch.setattr(worker.os, "sched_getaffinity", lambda process: {10**6})
    assert worker.stay() is None


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_a_worker_whose_asker_is_gone_ends_between_turns(tmp_path, parts):
    path = mlp(tmp_path / "a.xnn")
    np.save(tmp_path / "x.npy", np.ones((2, 16), np.float32))
    task = {"model": str(path), "inputs": [str(tmp_path / "x.npy")], "seconds": 0.1, "warm_up": 0.05, "turns": True}
    made = measure.Worker(measure.Build.own())
    made.wait_until_ready()
    for words in [json.dumps(task), "warm up", "slice 2"][:parts]:
        made.turn(words)
    made.process.stdin.close()
    status = made.process.wait(100)
    made.stop()
    assert status == 1


def test_an_interrupt_ends_the_worker(tmp_path, monkeypatch):
    made = measure.Worker(build_of(tmp_path, "exec sleep 100"))

    def interrupted(*arguments, **options):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(made.process, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.run({})
    assert made.process.poll() == -signal.SIGKILL


def test_being_ended_leaves_nothing_behind(tmp_path):
    with pytest.raises(SystemExit) as caught, measure.workplace() as folder:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
    assert caught.value.code == 128 + signal.SIGTERM
    assert not Path(folder).exists()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_worker_ends_with_the_process_that_asked(tmp_path):
    path = mlp(tmp_path / "a.xnn")
    job = {"model": str(path), "kind": "graph", "inputs": [str(tmp_path / "x.npy")], "seconds": 500.0, "most": 10**6}
    np.save(tmp_path / "x.npy", np.ones((2, 16), np.float32))
    # The child starts a worker, says its id and is killed.
    text = (
        "import json, os, sys; from xnnfast.bench import measure; worker = measure.Worker(measure.Build.own()); "
        "worker.wait_until_ready(); worker.process.stdin.write(sys.argv[1] + chr(10)); worker.process.stdin.flush(); "
        "print(worker.process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", text, json.dumps(job)], env=variables, capture_output=True, text=True, cwd=tmp_path
    )
    worker_id = int(done.stdout)
    for _ in range(600):
        if not Path(f"/proc/{worker_id}").exists() or "\nState:\tZ" in Path(f"/proc/{worker_id}/status").read_text():
            break
        time.sleep(0.05)
    else:
        os.kill(worker_id, 9)
        pytest.fail("the worker goes on though nobody waits for it")


# ---------------------------------------------------------------------------------------------------
# bench


@pytest.fixture(scope="module")
def bench_record(tmp_path_factory):
    path = mlp(tmp_path_factory.mktemp("bench") / "mlp.xnn")
    settings = measure.Settings(processes=2, seconds=0.05, warm_up=0.1, most=200)
    return measure.bench([path], batches=[1, 4], threads=[1], workers=[1, 2], settings=settings)


def test_bench_measures_every_combination(bench_record):
    (model,) = bench_record["models"]
    assert [record.key(result) for result in model["results"]] == [(1, 1, 1), (1, 1, 2), (4, 1, 1), (4, 1, 2)]
    assert model["results"][2]["shapes"] == [[4, 16]]
    for result in model["results"]:
        assert result["error"] is None
        assert len(result["processes"]) == 2


def test_record_holds_what_it_needs_to_be_judged_later(bench_record):
    assert bench_record["format"] == record.FORMAT
    assert set(bench_record["build"]["pin"]) >= {"xnnpack", "pthreadpool"}
    assert (
        bench_record["build"]["isa"] and bench_record["build"]["compiled"] and bench_record["build"]["runtime_sha256"]
    )
    (model,) = bench_record["models"]
    assert model["sha256"] == measure.file_sha256(model["path"])
    result = model["results"][0]
    process = result["processes"][0]
    assert process["samples"] and all(isinstance(each, int) and each > 0 for each in process["samples"])
    assert {"load", "pack", "plan", "first", "total"} <= set(process["load"])
    assert {"peak", "resident", "packed", "workspace", "mapped"} <= set(process["memory"])
    assert {"involuntary", "migrations", "steal", "throttled", "waited"} <= set(process["while"])
    assert {"p50", "p90", "p95", "p99", "p99.9", "mad"} <= set(result["summary"]["latency_ns"])
    json.dumps(bench_record, allow_nan=False)


def test_summary_comes_from_undisturbed_processes():
    quiet, bad = answer(1000.0), answer(9000.0)
    quiet["disturbed"], bad["disturbed"] = {}, {"waiting": "..."}
    facts = measure.summary({"batch": 4, "processes": [quiet, bad]})
    assert facts["process_medians_ns"]["median"] == 1000
    assert facts["items_per_second"] == pytest.approx(4e6)
    assert (facts["processes"], facts["undisturbed"]) == (2, 1)
    # All disturbed: the figures are there, and their number says what they are worth.
    assert measure.summary({"batch": 4, "processes": [bad]})["undisturbed"] == 0


def test_a_row_is_measured_once_however_often_it_is_asked_for(tmp_path):
    facts = measure.subject(mlp(tmp_path / "a.xnn")).facts
    assert len(measure.configs(facts, [4, 4], [1, 1], [1])) == 1


def test_a_missing_model_is_told_before_others_are_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "_measure_once", lambda *rest: pytest.fail("measured"))
    with pytest.raises(FileNotFoundError):
        measure.bench([mlp(tmp_path / "a.xnn"), tmp_path / "none.xnn"])


@pytest.mark.parametrize("workers", [1, 2])
def test_a_weights_cache_is_used_by_every_process(workers, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = mlp(tmp_path / "a.xnn")
    settings = measure.Settings(processes=2, seconds=0.01, warm_up=0.0, weights_cache=str(tmp_path / "kept"))
    found = measure.bench([path], workers=[workers], settings=settings)
    assert found["models"][0]["results"][0]["error"] is None
    runtime = xnnfast.Runtime(xnnfast.load(path), weights_cache=tmp_path / "kept")
    assert runtime.weights_cache == "hit"
    # Starting from packed weights is not like packing them.
    plain = measure.bench([path], workers=[workers], settings=measure.Settings(processes=2, seconds=0.01, warm_up=0.0))
    reasons = record.unlike(found, plain)
    assert any("use of a weights cache differ" in reason for reason in reasons), reasons
    assert not record.unlike(found, plain, frozenset(["weights_cache"]))
    assert profile(path, seconds=0.01, with_roof=False, weights_cache=str(tmp_path / "kept"))["nodes"]


def test_cpus_that_are_not_allowed_are_refused():
    measure.check_cpus(None)
    measure.check_cpus(sorted(os.sched_getaffinity(0)))
    with pytest.raises(ArgumentError, match=r"need CPUs of .*, got 0, 99999"):
        measure.check_cpus([0, 99999])


def test_no_more_samples_than_asked_for(monkeypatch):
    clock = FakeClock(1_000_000 for _ in range(100))
    monkeypatch.setattr(worker, "CLOCK", clock)
    monkeypatch.setattr(worker, "WALL", clock)
    assert len(worker.sample(clock.call, 1, 1.0, 1, 7)) == 7


def test_a_row_that_failed_midway_says_so(bench_record):
    tables = pytest.importorskip("xnnfast.bench.tables")
    result = {**bench_record["models"][0]["results"][0], "error": "killed by SIGKILL"}
    assert "given up after 2 processes: killed by SIGKILL" in tables.remarks(result)[0]


def test_names_are_shown_as_they_are(bench_record):
    tables = pytest.importorskip("xnnfast.bench.tables")
    facts = copy.deepcopy(bench_record)
    facts["models"][0].update(path="[/a][bold]:smile:\x1b[31m.xnn", notes=["of [/x]"])
    out = tables.console(200)
    with out.capture() as captured:
        tables.print_bench(facts, out)
    assert "[/a][bold]:smile:\\x1b[31m.xnn: graph" in captured.get() and "note: of [/x]" in captured.get()
    comparison = compare.compare_records(facts, facts)
    comparison["results"][0]["label"] = "[/b]"
    with out.capture() as captured:
        tables.print_compare(comparison, out)
    assert "[/b]: " in captured.get() and "INVALID" in captured.get()


def test_a_model_that_cannot_be_measured_is_an_error_in_words(tmp_path):
    (tmp_path / "bad.xnn").write_bytes(b"not a graph at all")
    with pytest.raises(measure.MeasureError, match="FormatError"):
        measure.subject(tmp_path / "bad.xnn")
    with pytest.raises(FileNotFoundError):
        measure.subject(tmp_path / "missing.xnn")


def test_batch_of_a_graph_without_one_is_refused(tmp_path):
    b = GraphBuilder()
    b.output(b.static_reshape(b.input((2, 3)), (3, 2)))
    b.save(tmp_path / "reshape.xnn")
    facts = measure.subject(tmp_path / "reshape.xnn").facts
    if not facts["batched"]:
        with pytest.raises(ArgumentError, match="batch"):
            measure.configs(facts, [4], [1], [1])


# ---------------------------------------------------------------------------------------------------
# Records


def test_records_are_read_back(bench_record, tmp_path):
    record.save(bench_record, tmp_path / "r.json")
    assert record.is_record(tmp_path / "r.json")
    assert record.load(tmp_path / "r.json") == bench_record
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    "text, reason",
    [
        ("{", "no JSON"),
        ('{"format": "other"}', "found 'other'"),
        ('{"format": "xnnfast-bench", "version": 99}', "need version 1"),
        ('{"format": "xnnfast-bench", "version": 1}', "need environment"),
    ],
)
def test_what_is_no_record_is_refused(tmp_path, text, reason):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(FormatError, match=reason):
        record.load(tmp_path / "r.json")


def spoil(path, change):
    """A change to a copy of a record, at a path of keys."""

    def made(facts):
        facts = copy.deepcopy(facts)
        place = facts
        for key in path[:-1]:
            place = place[key]
        change(place, path[-1])
        return facts

    return made


RESULT = ("models", 0, "results", 0)
PROCESS = (*RESULT, "processes", 0)
MISFITS = {
    "need cpu in environment": spoil(("environment", "cpu"), lambda place, key: place.pop(key)),
    "need a list with something in it in models": spoil(("models",), lambda place, key: place[key].clear()),
    "need threads in models\\[0\\].results\\[0\\]": spoil((*RESULT, "threads"), lambda place, key: place.pop(key)),
    "need a whole number of at least 1 in .*threads, found -1": spoil(
        (*RESULT, "threads"), lambda place, key: place.update(threads=-1)
    ),
    "need a number above 0 in .*samples\\[0\\], found 0": spoil(
        (*PROCESS, "samples"), lambda place, key: place.update(samples=[0])
    ),
    "need a number above 0 in .*samples\\[0\\], found 1000000": spoil(
        (*PROCESS, "samples"), lambda place, key: place.update(samples=[10**30])
    ),
    "need a list with something in it in .*samples": spoil(
        (*PROCESS, "samples"), lambda place, key: place.update(samples=[])
    ),
    'need a number above 0 in .*total, found "1"': spoil(
        (*PROCESS, "load"), lambda place, key: place[key].update(total="1")
    ),
    "need an object in models\\[0\\], found 7": spoil(("models", 0), lambda place, key: place.__setitem__(key, 7)),
    "need outputs as bench writes them in .*outputs": spoil(
        (*RESULT, "outputs"), lambda place, key: place[key][0].update(dtype="O")
    ),
    "need true or false in settings.cold": spoil(("settings", "cold"), lambda place, key: place.update(cold=1)),
}


@pytest.mark.parametrize("reason", MISFITS)
def test_records_that_were_changed_by_hand_are_refused(bench_record, tmp_path, reason):
    (tmp_path / "r.json").write_text(json.dumps(MISFITS[reason](bench_record)))
    with pytest.raises(FormatError, match=reason):
        record.load(tmp_path / "r.json")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"format": NaN}', '{"version": -Infinity}'])
def test_json_that_is_none_is_refused(tmp_path, text):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(FormatError, match="no JSON"):
        record.load(tmp_path / "r.json")


def test_cut_records_are_refused(bench_record, tmp_path):
    text = json.dumps(bench_record)
    for end in (1, len(text) // 2, len(text) - 1):
        (tmp_path / "r.json").write_text(text[:end])
        with pytest.raises(FormatError, match="no JSON"):
            record.load(tmp_path / "r.json")


def test_saving_writes_to_a_pipe_and_leaves_it_there(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["cat", tmp_path / "pipe"], stdout=subprocess.PIPE, text=True) as reader:
        record.save({"a": 1}, tmp_path / "pipe")
        assert reader.communicate()[0] == '{"a": 1}'
    assert (tmp_path / "pipe").is_fifo()


def test_saving_through_a_link_keeps_the_link(tmp_path):
    (tmp_path / "link.json").symlink_to("real.json")
    record.save({"a": 1}, tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink() and (tmp_path / "real.json").read_text() == '{"a": 1}'


def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(path, data):
        path.touch()
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(record.Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space") as caught:
        record.save({"a": 1}, tmp_path / "r.json")
    assert caught.value.filename == str(tmp_path / "r.json")
    assert list(tmp_path.iterdir()) == []


def test_places_that_can_t_be_written_are_told_beforehand(tmp_path):
    record.check_writable(tmp_path / "new.json")
    record.check_writable("/dev/null")
    with pytest.raises(IsADirectoryError):
        record.check_writable(tmp_path)
    with pytest.raises(FileNotFoundError):
        record.check_writable(tmp_path / "none" / "r.json")


def test_like_records_are_comparable(bench_record):
    assert record.unlike(bench_record, copy.deepcopy(bench_record)) == []


def change_threads(r):
    for result in r["models"][0]["results"]:
        result["threads"] = 2


UNLIKE = {
    "threads differ: 1 and 2": change_threads,
    "CPU differ": lambda r: r["environment"].update(cpu="another"),
    "instruction sets in use differ: .* and sme": lambda r: r["build"]["isa"].append("sme"),
    "sets in use differ: nothing more and avx2 for products padded 4 times": lambda r: r["build"].update(
        second_isa={"isa": "avx2", "ratio": 4.0}
    ),
    "pinned libraries differ: xnnpack .* and xnnpack 0000": lambda r: r["build"]["pin"].update(xnnpack="0000"),
    "the graph .* differ": lambda r: r["models"][0].update(sha256="0" * 64),
    "datatypes differ": lambda r: r["models"][0].update(datatypes=["fp16"]),
    "input shapes differ": lambda r: r["models"][0]["results"][0].update(shapes=[[1, 17]]),
    "methods differ: .* and backward": lambda r: r["models"][0].update(method="backward"),
    "inputs differ": lambda r: r["models"][0]["results"][0].update(inputs_sha256="0" * 64),
    "no model is in both": lambda r: (
        r["models"].append({**r["models"][0], "name": "b"}) or r["models"][0].update(name="c")
    ),
}


@pytest.mark.parametrize("reason", UNLIKE)
def test_unlike_records_are_refused_saying_why(bench_record, reason):
    # Row P5 of the case list.
    one, other = copy.deepcopy(bench_record), copy.deepcopy(bench_record)
    for each in (one, other):
        # Where there is AMX, it has one.
        each["build"]["second_isa"] = None
    UNLIKE[reason](other)
    facts = compare.compare_records(one, other)
    assert facts["verdict"] == stats.INVALID
    assert any(__import__("re").search(reason, each) for each in facts["refused"]), facts["refused"]


def test_a_difference_may_be_allowed(bench_record):
    other = copy.deepcopy(bench_record)
    other["build"]["pin"]["xnnpack"] = "0000"
    assert record.unlike(bench_record, other, frozenset(["pin"])) == []


def with_processes(r, latencies, disturbed=0):
    made = copy.deepcopy(r)
    for result in made["models"][0]["results"]:
        result["processes"] = [{**answer(each), "disturbed": {}} for each in latencies]
        for process in result["processes"][:disturbed]:
            process["disturbed"] = {"waiting": "..."}
    return made


def test_records_give_verdicts(bench_record):
    base = np.linspace(990, 1010, 10)
    one, slower = with_processes(bench_record, base), with_processes(bench_record, 1.2 * base)
    same = compare.compare_records(one, with_processes(bench_record, base[::-1]))
    assert same["verdict"] == stats.SAME
    facts = compare.compare_records(one, slower)
    assert facts["verdict"] == stats.SLOWER
    verdicts = {metric["metric"]: metric["verdict"] for metric in facts["results"][0]["metrics"]}
    assert verdicts == {"latency": stats.SLOWER, "load": stats.SAME, "memory": stats.SAME}
    assert compare.compare_records(slower, one)["verdict"] == stats.FASTER


def test_what_failed_in_a_record_is_not_the_same(bench_record):
    base = np.linspace(990, 1010, 10)
    one, other = with_processes(bench_record, base), with_processes(bench_record, base)
    other["models"][0]["results"][1].update(error="RuntimeError: no", processes=[])
    facts = compare.compare_records(one, other)
    assert facts["verdict"] == stats.INVALID
    assert [row["invalid"] for row in facts["results"]] == [[], ["B failed: RuntimeError: no"], [], []]


def test_what_only_one_record_has_is_told(bench_record):
    base = np.linspace(990, 1010, 10)
    one, other = with_processes(bench_record, base), with_processes(bench_record, base)
    del other["models"][0]["results"][2:]
    facts = compare.compare_records(one, other)
    assert facts["verdict"] == stats.SAME and len(facts["results"]) == 2
    assert "mlp.xnn: only in A, so not compared: batch 4, 1 thread; batch 4, 1 thread, 2 workers" in facts["notes"]
    other["models"] += [{**other["models"][0], "name": "more.xnn"}]
    one["models"] += [{**one["models"][0], "name": "less.xnn"}]
    notes = compare.compare_records(one, other)["notes"]
    assert "only in A, so not compared: less.xnn" in notes and "only in B, so not compared: more.xnn" in notes


def test_wrong_answers_show_in_records(bench_record):
    base = np.linspace(990, 1010, 10)
    one, other = with_processes(bench_record, base), with_processes(bench_record, base / 2)
    facts = compare.compare_records(one, other)
    assert facts["verdict"] == stats.FASTER
    assert facts["results"][0]["outputs"] == "the same bit for bit"
    result = other["models"][0]["results"][0]
    kept = result["outputs"][0]
    assert (kept["shape"], len(record.sample_of(kept))) == ([1, 16], 16)
    result["outputs"] = [record.output(np.float32(1.01) * record.sample_of(kept).reshape(kept["shape"]))]
    facts = compare.compare_records(one, other)
    assert facts["verdict"] == stats.INVALID
    assert facts["results"][0]["invalid"] == ["outputs differ: output 0 differs by up to 0.01 of its largest number"]
    facts = compare.compare_records(one, other, tolerance=0.02)
    assert facts["verdict"] == stats.FASTER
    assert facts["results"][0]["outputs"] == "the same within 0.01 of the largest number, as far as records tell"
    result["outputs"] = []
    assert compare.compare_records(one, other)["results"][0]["invalid"] == ["outputs differ: 1 outputs against 0"]
    del result["outputs"]
    assert compare.compare_records(one, other)["results"][0]["outputs"] == "not known from records"


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((0, 3), np.float32), np.float32(7), np.arange(5000, dtype=np.int64), np.array([True, False]),
        np.array([np.nan, np.inf, 1], np.float16), np.zeros(3, "V2"),
    ],
    ids=lambda array: str(np.asarray(array).dtype),
)  # fmt: skip
def test_outputs_are_kept_in_records(array):
    kept = json.loads(json.dumps(record.output(np.asarray(array)), allow_nan=False))
    sample = record.sample_of(kept)
    assert sample.dtype == np.asarray(array).dtype and sample.size == min(np.asarray(array).size, record.SAMPLE)
    if sample.size:
        flat = np.asarray(array).reshape(-1)
        assert (sample[:1].tobytes(), sample[-1:].tobytes()) == (flat[:1].tobytes(), flat[-1:].tobytes())


def test_models_of_one_name_are_paired_in_their_order(bench_record):
    base = np.linspace(990, 1010, 10)
    fast, slow = with_processes(bench_record, base)["models"][0], with_processes(bench_record, 2 * base)["models"][0]
    both = {**bench_record, "models": [fast, slow]}
    facts = compare.compare_records(both, copy.deepcopy(both))
    assert facts["verdict"] == stats.SAME
    medians = [row["metrics"][0]["a"] for row in facts["results"]]
    assert medians == pytest.approx([1000] * 4 + [2000] * 4, rel=0.01)


def test_disturbed_processes_of_records_don_t_count(bench_record):
    base = np.linspace(990, 1010, 10)
    facts = compare.compare_records(with_processes(bench_record, base), with_processes(bench_record, base, disturbed=4))
    assert facts["verdict"] == stats.INVALID
    assert "undisturbed processes: 10 of 10 and 6 of 10" in facts["results"][0]["invalid"][0]


# ---------------------------------------------------------------------------------------------------
# Rounds, with workers that are made up


@pytest.fixture
def pair(tmp_path, monkeypatch):
    """A model with itself, by workers that say what ``script(side, turn)`` gives; and the order of their jobs."""
    subject = measure.subject(mlp(tmp_path / "a.xnn"))
    other = copy.copy(subject)
    made = compare.Pair("mlp", subject, other, measure.Config(2))
    order: list[str] = []
    slices, jobs, stopped = made.slices, made.jobs, made.stopped = [], [], []

    class Fake:
        def __init__(self, build):
            self.side = "?"

        def wait_until_ready(self):
            pass

        def turn(self, words, seconds):
            if words.startswith("{"):
                self.job = json.loads(words)
                self.side = self.job["options"]["side"]
                order.append(self.side)
                self.answer = {**made.script(self.side, len(order)), "cpu": 1 if self.job["stay"] else None}
                jobs.append(self.job)
            else:
                slices.append((self.side, words))
            return self.answer if words == "end" else {**self.answer, "sample_ns": self.answer["samples"][0]}

        def stop(self):
            stopped.append(self.side)

    subject.options, other.options = {"side": "a"}, {"side": "b"}
    monkeypatch.setattr(compare, "Worker", Fake)
    monkeypatch.setattr(compare, "_prepare", lambda pair, *rest: None)
    monkeypatch.setattr(compare.time, "sleep", lambda seconds: None)
    return made, order


def run(pair, **settings):
    return compare.compare([pair], settings=compare.Settings(**settings))


def noisy(factor, spread=0.005):
    rng = np.random.default_rng(5)

    def script(side, turn):
        return answer(1000.0 * float(np.exp(rng.normal(0, spread))) * (factor if side == "b" else 1))

    return script


def test_rounds_alternate_in_order(pair):
    made, order = pair
    made.script = noisy(1.0)
    facts = run(made)
    assert facts["verdict"] == stats.SAME
    assert "".join(order[:8]) == "abbaabba"
    assert facts["results"][0]["rounds"] == stats.MIN_ROUNDS


def sides(made, words):
    return "".join(side for side, each in made.slices if each == words)


def test_processes_of_a_round_take_turns_by_slices(pair):
    made, _ = pair
    made.script = lambda side, turn: answer(1e6 if side == "a" else 0.8e6)
    compare.compare([made], settings=compare.Settings(seconds=0.1, metrics=("latency",)))
    # Samples of 2 ms on the slower side: five in each of nine slices, on both sides. A begins the first round, B the
    # second.
    assert made.slices[:2] == [("a", "warm up"), ("b", "warm up")]
    assert {words for _, words in made.slices} == {"warm up", "slice 5", "end"}
    first = sides(made, "slice 5")[:18]
    assert first == 4 * "abba" + "ab" and sides(made, "slice 5")[18:36] == 4 * "baab" + "ba"
    # The same share of both follows a slice of the other.
    after_other = [now for before, now in zip("-" + first, first) if before != now]
    assert after_other.count("a") == after_other.count("b") == 5


def test_slow_calls_get_few_slices_of_one(pair):
    made, _ = pair
    # 100 ms on one side are longer than a slice.
    made.script = lambda side, turn: answer(50e6 if side == "b" else 1e6)
    compare.compare([made], settings=compare.Settings(seconds=0.15, metrics=("latency",)))
    assert sides(made, "slice 1")[:10] == "abbaabbaab"
    assert {words for _, words in made.slices} == {"warm up", "slice 1", "end"}


def test_no_more_samples_than_asked_for_in_all_slices(pair):
    made, _ = pair
    made.script = lambda side, turn: answer(1000.0)
    compare.compare([made], settings=compare.Settings(most=44, metrics=("latency",)))
    assert {words for _, words in made.slices} == {"warm up", "slice 4", "end"}


def test_both_sides_share_a_cpu_and_leave_one_where_they_were_disturbed(pair):
    made, _ = pair
    calm = noisy(1.0)
    made.script = lambda side, turn: answer(waited=150_000_000) if turn == 6 else calm(side, turn)
    compare.compare([made], settings=compare.Settings(cpus=None))
    assert all(job["stay"] for job in made.jobs)
    # The scheduler's choice for the first process, that one for the second; anew after the third round.
    assert [job["cpus"] for job in made.jobs[:8]] == [None, [1], [1], [1], [1], [1], None, [1]]


def test_sides_that_need_more_cpus_are_not_bound(pair):
    made, _ = pair
    made.config = measure.Config(2, threads=2)
    made.script = noisy(1.0)
    allowed = sorted(os.sched_getaffinity(0))
    compare.compare([made], settings=compare.Settings(cpus=allowed))
    assert [(job["stay"], job["cpus"]) for job in made.jobs] == [(False, allowed)] * len(made.jobs)


def test_others_on_the_cpu_that_both_are_bound_to_are_seen(pair, monkeypatch):
    made, _ = pair
    # Half of the CPU's time: of two CPUs that were allowed, it would be spare.
    made.script = lambda side, turn: answer(busy=IDLE["cpu"] + 200_000_000)
    clock = iter(range(10_000))
    monkeypatch.setattr(compare.time, "monotonic", lambda: float(next(clock)))
    facts = compare.compare([made], settings=compare.Settings(budget=60.0))
    assert facts["results"][0]["disturbances"] == {"others": facts["results"][0]["disturbed"]}


def test_clocks_of_both_sides_are_compared(pair, monkeypatch):
    made, _ = pair
    made.script = lambda side, turn: {**answer(), "turns": True, "spin": [99_000, 120_000 if side == "b" else 100_000]}
    clock = iter(range(10_000))
    monkeypatch.setattr(compare.time, "monotonic", lambda: float(next(clock)))
    facts = compare.compare([made], settings=compare.Settings(budget=60.0))
    assert facts["verdict"] == stats.INVALID
    assert "took 100 us before slices of A and 120 us before those of B" in facts["results"][0]["invalid"][0]


@pytest.mark.parametrize("when", ["warm up", "slice", "end"])
def test_workers_are_stopped_whatever_happens(pair, monkeypatch, when):
    made, _ = pair
    made.script = noisy(1.0)
    turn = compare.Worker.turn

    def interrupted(self, words, seconds):
        if words.startswith(when) and self.side == "b":
            raise KeyboardInterrupt
        return turn(self, words, seconds)

    monkeypatch.setattr(compare.Worker, "turn", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compare.compare([made])
    assert sorted(made.stopped) == ["a", "b"]


def test_a_slowdown_ends_the_comparison(pair):
    made, _ = pair
    made.script = noisy(1.2)
    facts = run(made)
    assert facts["verdict"] == stats.SLOWER
    latency = facts["results"][0]["metrics"][0]
    assert latency["ratio"] == pytest.approx(1.2, rel=0.02)
    assert latency["interval"][0] < latency["ratio"] < latency["interval"][1]
    assert len(facts["results"][0]["processes"]) == stats.MIN_ROUNDS
    assert stats.STATUS[facts["verdict"]] == 1


def test_a_speedup_is_told(pair):
    made, _ = pair
    made.script = noisy(0.8)
    assert run(made)["verdict"] == stats.FASTER


def test_what_is_ambiguous_goes_on_to_the_end_of_the_budget(pair, monkeypatch):
    made, order = pair
    made.script = noisy(1.035, 0.02)
    clock = iter(range(10_000))
    monkeypatch.setattr(compare.time, "monotonic", lambda: float(next(clock)))
    facts = run(made, budget=150.0)
    assert facts["verdict"] == stats.AMBIGUOUS
    assert facts["results"][0]["rounds"] > 3 * stats.MIN_ROUNDS


def test_disturbed_rounds_are_repeated_not_averaged_in(pair):
    made, _ = pair
    calm = noisy(1.0)

    def script(side, turn):
        # Every fifth process is disturbed, and ten times slower.
        return answer(10_000.0, waited=150_000_000) if turn % 5 == 0 else calm(side, turn)

    made.script = script
    facts = run(made)
    assert facts["verdict"] == stats.SAME
    (result,) = facts["results"]
    assert result["rounds"] == stats.MIN_ROUNDS and result["disturbed"] > 0
    assert result["disturbances"] == {"waiting": result["disturbed"]}
    assert max(measure.process_median(each["a"]) for each in result["processes"]) < 1100


def test_too_many_disturbed_rounds_are_invalid(pair, monkeypatch):
    made, _ = pair
    made.script = lambda side, turn: answer(throttled=3)
    clock = iter(range(10_000))
    monkeypatch.setattr(compare.time, "monotonic", lambda: float(next(clock)))
    facts = run(made, budget=60.0)
    assert facts["verdict"] == stats.INVALID
    assert "were disturbed, the last one: the cgroup was throttled 3 times" in facts["results"][0]["invalid"][0]
    assert stats.STATUS[facts["verdict"]] == 4


def test_a_metric_that_got_worse_alone_is_seen(pair):
    made, _ = pair
    rng = np.random.default_rng(0)
    made.script = lambda side, turn: answer(
        1000 + rng.normal(0, 5),
        2000 + rng.normal(0, 10),
        (80 << 20 if side == "b" else 50 << 20) + int(rng.integers(9999)),
    )
    facts = run(made)
    verdicts = {metric["metric"]: metric["verdict"] for metric in facts["results"][0]["metrics"]}
    assert verdicts == {"latency": stats.SAME, "load": stats.SAME, "memory": stats.SLOWER}


def test_a_side_that_fails_midway_is_invalid(pair):
    made, _ = pair
    calm = noisy(1.0)

    def script(side, turn):
        if side == "b" and turn > 6:
            raise measure.MeasureError("killed by SIGKILL")
        return calm(side, turn)

    made.script = script
    facts = run(made)
    assert facts["verdict"] == stats.INVALID
    assert facts["results"][0]["invalid"] == ["B failed in round 4: killed by SIGKILL"]


def test_pairs_of_one_label_have_verdicts_of_their_own(pair):
    made, _ = pair
    made.script = noisy(1.0)
    other = copy.copy(made)
    other.sides, other.disturbed = ([], []), []
    other.a, other.b = copy.copy(made.a), copy.copy(made.b)
    other.b.options = {"side": "a"}
    made.script = noisy(1.3)
    facts = compare.compare([made, other])
    assert [row["metrics"][0]["verdict"] for row in facts["results"]] == [stats.SLOWER, stats.SAME]


# ---------------------------------------------------------------------------------------------------
# Outputs


def outputs(folder: Path, *arrays) -> str:
    folder.mkdir()
    for number, array in enumerate(arrays):
        np.save(folder / f"{number}.npy", array)
    return str(folder)


@pytest.mark.parametrize(
    "a, b, reason",
    [
        (np.float32([1, 2]), np.float32([1, 2]), None),
        (np.float32([1, 2]), np.float32([1, 2.00001]), None),
        (np.float32([1, 2]), np.float32([1, 2.01]), "differs by up to 0.005 of its largest number"),
        (np.float16([1, 2]), np.float16([1, 2.01]), None),
        (np.float32([1, np.nan]), np.float32([1, 2]), "NaN or infinity in other places"),
        (np.float32([1, np.inf]), np.float32([1, -np.inf]), "NaN or infinity in other places"),
        (np.float32([1, np.inf]), np.float32([1, np.nan]), "NaN or infinity in other places"),
        (np.float32([1, np.nan, -np.inf]), np.float32([1, -np.nan, -np.inf]), None),
        (np.int64([2**60]), np.int64([2**60 + 1]), "differs by up to 1 steps"),
        (np.uint64([0]), np.uint64([2**64 - 1]), "differs by up to 18446744073709551615 steps"),
        (np.int8([1, 2]), np.int8([1, 3]), None),
        (np.int8([1, 2]), np.int8([1, 4]), "differs by up to 2 steps"),
        (np.int32([1, 2]), np.int32([1, 3]), "differs by up to 1 steps"),
        (np.float32([1, 2]), np.float32([[1, 2]]), r"is float32 \(2,\) against float32 \(1, 2\)"),
        (np.float32([1, 2]), np.float64([1, 2]), "against float64"),
    ],
)
def test_outputs_are_compared(tmp_path, a, b, reason):
    found, _ = compare.differing_outputs(outputs(tmp_path / "a", a), outputs(tmp_path / "b", b), None)
    if reason is None:
        assert found is None
    else:
        assert __import__("re").search(reason, found)


def test_one_step_of_whole_numbers_is_named(tmp_path):
    a, b = outputs(tmp_path / "a", np.int8([1, 2])), outputs(tmp_path / "b", np.int8([1, 3]))
    assert compare.differing_outputs(a, b, None) == (None, "the same within one step")


def test_number_of_outputs_is_compared(tmp_path):
    one = np.zeros(1)
    reason, _ = compare.differing_outputs(outputs(tmp_path / "a", one), outputs(tmp_path / "b", one, one), None)
    assert reason == "1 outputs against 2"


# ---------------------------------------------------------------------------------------------------
# The whole, by real processes. How busy the machine is decides what verdict comes; that there is one does not.


def command(*arguments, folder):
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-m", "xnnfast", *map(str, arguments)],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
    )


def test_compare_command_gives_a_verdict_and_its_status(tmp_path):
    pytest.importorskip("typer")
    mlp(tmp_path / "a.xnn")
    done = command(
        "compare", "a.xnn", "a.xnn", "--budget", 6, "--seconds", 0.02, "--json", "--save", "v.json", folder=tmp_path
    )
    facts = json.loads(done.stdout)
    assert done.stderr == ""
    assert done.returncode == stats.STATUS[facts["verdict"]]
    assert facts["results"][0]["outputs"] == "the same bit for bit"
    assert json.loads((tmp_path / "v.json").read_text()) == facts


def test_compare_command_fails_a_wrong_answer_without_timing_it(tmp_path):
    pytest.importorskip("typer")
    mlp(tmp_path / "a.xnn")
    mlp(tmp_path / "b.xnn", scale=1.01)
    done = command("compare", "a.xnn", "b.xnn", folder=tmp_path)
    assert done.returncode == 4
    assert "outputs differ: output 0 differs by up to 0.01 of its largest number" in done.stdout


def test_compare_command_refuses_other_shapes_and_precision(tmp_path):
    pytest.importorskip("typer")
    mlp(tmp_path / "a.xnn")
    mlp(tmp_path / "b.xnn", width=32)
    done = command("compare", "a.xnn", "b.xnn", folder=tmp_path)
    assert done.returncode == 4 and "input shapes differ: [(2, 16)] and [(2, 32)]" in done.stdout
    b = GraphBuilder()
    b.output(b.clamp(b.input((2, 16), "fp16"), 0, None))
    b.save(tmp_path / "half.xnn")
    done = command("compare", "a.xnn", "half.xnn", folder=tmp_path)
    assert done.returncode == 4 and "datatypes differ: fp32 and fp16" in done.stdout


def test_bench_and_compare_commands_work_on_records(tmp_path):
    pytest.importorskip("typer")
    mlp(tmp_path / "a.xnn")
    few = ["--processes", 1, "--seconds", 0.02, "--warm-up", 0.05]
    one = command("bench", "a.xnn", "--save", "1.json", *few, folder=tmp_path)
    assert one.returncode == 0 and one.stderr == ""
    assert "latency and throughput" in one.stdout and "opening and memory" in one.stdout
    two = command("bench", "a.xnn", "--threads", 2, "--save", "2.json", "--json", *few, folder=tmp_path)
    assert json.loads(two.stdout) == json.loads((tmp_path / "2.json").read_text())
    done = command("compare", "1.json", "2.json", folder=tmp_path)
    assert done.returncode == 4
    assert "not comparable: threads differ: 1 and 2" in done.stdout


def test_builds_of_another_age_are_described():
    # What config() has told since there is bench at all.
    names = ("xnnfast", "python", "numpy", "machine", "isa", "cpus", "cpus_reason")
    known = {name: xnnfast.config()[name] for name in names}
    old = type("Old", (), {"__file__": xnnfast.__file__, "config": lambda: known})
    found = worker.build(old)
    assert found["isa"] == known["isa"] and found["pin"] == {} and found["second_isa"] is None


def test_two_builds_are_compared(tmp_path):
    pytest.importorskip("typer")
    mlp(tmp_path / "a.xnn")
    here = Path(measure.__file__).resolve().parents[2]
    done = command(
        "compare", here, here, "--model", "a.xnn", "--budget", 3, "--seconds", 0.02, "--json", folder=tmp_path
    )
    facts = json.loads(done.stdout)
    (result,) = facts["results"]
    assert result["a"]["build"]["folder"] == str(here / "xnnfast")
    assert done.returncode == stats.STATUS[facts["verdict"]]
    (tmp_path / "broken/xnnfast").mkdir(parents=True)
    (tmp_path / "broken/xnnfast/__init__.py").write_text("raise RuntimeError('half built')")
    bad = command("compare", here, "broken", "--model", "a.xnn", folder=tmp_path)
    assert bad.returncode == 2 and bad.stdout == ""
    assert f"a worker of {tmp_path}/broken ended without an answer: RuntimeError: half built" in bad.stderr
    bad = command("compare", tmp_path, here, "--model", "a.xnn", folder=tmp_path)
    assert bad.returncode == 2 and "need a Python executable" in bad.stderr


def test_wrong_usage_is_told_in_a_line(tmp_path):
    pytest.importorskip("typer")
    mlp(tmp_path / "a.xnn")
    for arguments, reason in [
        (("bench", "a.xnn", "--batch", "1,x"), "--batch: need whole numbers"),
        (("bench", "none.xnn"), "none.xnn: No such file"),
        (("compare", "a.xnn", "a.xnn", "--allow", "everything"), "--allow: need words of"),
        (("compare", ".", "."), ".: is a folder; to compare two builds, name a model"),
        (("bench", "a.xnn", "--threads", "100000"), "need at most 1024 threads in all"),
        (("bench", "a.xnn", "--save", "none/r.json"), "none/r.json: No such file"),
        (("compare", "a.xnn", "a.xnn", "--tolerance", "inf"), "--tolerance: need a finite number"),
        (("profile", "a.xnn", "a.xnn"), "need one model, got 2"),
        (("profile", "a.xnn", "a.xnn", "--diff", "--html", "p.html"), "--trace and --html show one profile"),
    ]:
        done = command(*arguments, folder=tmp_path)
        assert done.returncode == 2 and reason in done.stderr, done.stderr
        assert done.stderr.count("\n") == 1 and done.stdout == ""
