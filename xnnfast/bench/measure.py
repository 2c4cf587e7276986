"""Measuring in fresh processes: from models and settings to a record.

In come a model's path and lists of batches, threads and workers; out goes a record with the raw samples of every
process, in order.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ArgumentError, XnnfastError
from . import record, stats
from .environment import advice, disturbances, environment, free_memory

Facts = dict[str, Any]
Say = Callable[[str], None]
WORKER = Path(__file__).with_name("worker.py")
#: Seconds that a worker may take beyond those that it was asked to sample and to warm up for.
PATIENCE = 600.0
NPY_MAGIC = b"\x93NUMPY"
#: Random inputs may take that share of the memory that is free.
INPUT_SHARE = 0.25


class MeasureError(XnnfastError):
    """A worker could not measure; its words say why."""


# ---------------------------------------------------------------------------------------------------
# Builds and workers


@dataclass(frozen=True)
class Build:
    """An installed xnnfast: a Python that imports it, or a folder that holds the package."""

    python: str
    #: Prepended to PYTHONPATH; None leaves the Python alone with what it has.
    path: str | None = None

    @classmethod
    def own(cls) -> Build:
        """The one that is running."""
        return cls(sys.executable, str(Path(__file__).resolve().parents[2]))

    @classmethod
    def at(cls, place: str) -> Build:
        """A Python executable, an environment, or a folder that holds a built ``xnnfast``."""
        path = Path(place)
        if path.is_file() and os.access(path, os.X_OK):
            return cls(str(path.absolute()))
        if (path / "bin/python").is_file():
            return cls(str((path / "bin/python").absolute()))
        if (path / "xnnfast").is_dir():
            return cls(sys.executable, str(path.resolve()))
        raise ArgumentError(f"{place}: need a Python executable, its environment, or a folder with a built xnnfast")

    def __str__(self) -> str:
        return self.path or self.python

    def environment(self) -> dict[str, str]:
        variables = dict(os.environ)
        # Two builds must not both be what this variable names.
        variables.pop("PYTHONPATH", None)
        if self.path is not None:
            variables["PYTHONPATH"] = self.path
        # NumPy's own threads have no part in this, but would be started.
        variables.setdefault("OPENBLAS_NUM_THREADS", "1")
        return variables


class LineProcess:
    """A process that is told what to do in lines and answers each in one; what it complains of goes to a file, since a
    pipe that nobody reads between lines would stop those who have much to say."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], folder: str | None = None) -> None:
        self._complaints = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._complaints,
                text=True,
                env=environment,
                cwd=folder,
            )
        except OSError:
            self._complaints.close()
            raise

    def tell(self, words: str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(words + "\n")
            self.process.stdin.flush()

    def next_line(self, seconds: float) -> str | None:
        """The next line with its end, "" after the last one, None if none came for so long."""
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            # No more than one line is due at a time, so that none waits in a buffer where nobody looks.
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(seconds):
                return None
        return self.process.stdout.readline()

    def last_words(self) -> str:
        """The last line of its complaints, "" if it had none."""
        self._complaints.seek(0, os.SEEK_END)
        self._complaints.seek(max(0, self._complaints.tell() - 4096))
        return (self._complaints.read().strip().splitlines() or [""])[-1]

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self.process.kill()
        for stream in (self.process.stdin, self.process.stdout, self._complaints):
            assert stream is not None
            # Not read to its end: a child of the process may hold it open.
            with contextlib.suppress(OSError):
                stream.close()
        self.process.wait()


class Worker(LineProcess):
    """A process that has imported everything and waits for its job."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self._greeted = False
        try:
            super().__init__([build.python, str(WORKER)], build.environment(), tempfile.gettempdir())
        except OSError as error:
            raise MeasureError(f"{build.python} can't be started: {error}") from error

    def run(self, job: Facts) -> Facts:
        """The answer to the job. The process ends, whatever happens here."""
        timeout = PATIENCE + job.get("seconds", 0.0) + job.get("warm_up", 0.0)
        try:
            out, _ = self.process.communicate(json.dumps(job) + "\n", timeout=timeout)
            lines = out.splitlines()
            return self._understood(lines[-1] if len(lines) + self._greeted >= 2 else "")
        except subprocess.TimeoutExpired:
            raise self._too_late(timeout) from None
        finally:
            # An interrupt, say: nobody would wait for the answer.
            self.stop()

    def turn(self, words: str, seconds: float = 0.0) -> Facts:
        """Ask for the next part of a job with ``turns``, and what the worker says when that is done; ``seconds``: how
        long that is meant to take. The process goes on, until ``stop``."""
        self.tell(words)
        line = self.next_line(PATIENCE + seconds)
        if line is None:
            raise self._too_late(PATIENCE + seconds)
        if not line.endswith("\n"):
            self.process.wait()
        return self._understood(line)

    def _too_late(self, timeout: float) -> MeasureError:
        words = self.last_words()
        return MeasureError(
            f"no answer from a worker of {self.build} for {timeout:g} s{words and f', its last words were: {words}'}"
        )

    def _understood(self, line: str) -> Facts:
        """What the line says, or the reason why there is none."""
        ended = _ended(self.process.returncode)
        if not line:
            raise MeasureError(f"a worker of {self.build} ended without an answer: {self.last_words() or ended}")
        try:
            answer: Facts = json.loads(line)
        except ValueError:
            reason = f"{ended}, its last words were {line[:80]!r}"
            raise MeasureError(f"a worker of {self.build} gave no whole answer: {reason}") from None
        if "error" in answer:
            raise MeasureError(answer["error"])
        return answer

    def wait_until_ready(self) -> None:
        assert self.process.stdout is not None
        # What hangs at import is ended, and told by whoever asks for a measurement.
        timer = threading.Timer(PATIENCE, self.process.kill)
        timer.start()
        try:
            # Wrappers may have words of their own before. Nothing follows until the job is given.
            while line := self.process.stdout.readline():
                if line == "ready\n":
                    self._greeted = True
                    break
        finally:
            timer.cancel()


def _ended(status: int | None) -> str:
    if status is None:
        return "still running"
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


def ask(build: Build, job: Facts) -> Facts:
    return Worker(build).run(job)


# ---------------------------------------------------------------------------------------------------
# Models and inputs


@dataclass
class Subject:
    """A model in a build, and the inputs that it gets."""

    model: str
    build: Build
    #: What the probe said.
    facts: Facts
    method: str | None = None
    options: Facts = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return str(self.facts["kind"])


def subject(
    model: str | os.PathLike[str],
    build: Build | None = None,
    method: str | None = None,
    weights_cache: bool | str | None = None,
) -> Subject:
    build = build or Build.own()
    path = os.path.abspath(os.fspath(model))
    # Named by the caller's own words where it can't be opened.
    with open(model, "rb"):
        pass
    facts = ask(build, {"probe": True, "model": path, "method": method})
    options = {} if weights_cache is None else {"weights_cache": weights_cache}
    return Subject(path, build, facts, facts["method"], options)


def file_sha256(path: str | os.PathLike[str]) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while piece := stream.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()


def shapes(facts: Facts, batch: int | None) -> list[tuple[int, ...] | None]:
    """The input shapes at that batch; None for inputs that are no arrays."""
    found: list[tuple[int, ...] | None] = []
    for place, each in enumerate(facts["inputs"]):
        if each["dtype"] is None:
            found.append(None)
            continue
        shape = tuple(each["shape"])
        if batch is not None and place in facts["batched"]:
            shape = (batch, *shape[1:])
        found.append(shape)
    return found


def declared_batch(facts: Facts) -> int | None:
    return int(facts["inputs"][facts["batched"][0]]["shape"][0]) if facts["batched"] else None


def random_array(dtype: str, shape: tuple[int, ...], seed: Sequence[int]) -> np.ndarray[Any, Any]:
    """Numbers of that dtype: standard normal ones, all integers of 8 bits, small ones of wider types."""
    rng = np.random.default_rng(list(seed))
    if dtype == "bfloat16":
        bits = rng.standard_normal(shape, np.float32).view(np.uint32) >> 16
        return bits.astype(np.uint16).view("V2")
    kind = np.dtype(dtype)
    if kind.kind == "f":
        return rng.standard_normal(shape, np.float32).astype(kind)
    if kind.kind == "b":
        return rng.integers(0, 2, shape).astype(kind)
    if kind.itemsize == 1:
        limits = np.iinfo(kind)
        return rng.integers(limits.min, limits.max, shape, kind, endpoint=True)
    # Mostly indices: every table that is looked into has so many rows.
    return rng.integers(0, 8, shape).astype(kind)


def suspicious(array: np.ndarray[Any, Any]) -> str | None:
    """What of the data makes a time unusual."""
    if array.dtype.kind != "f" or not array.size:
        return None
    if array.size > 1 and bool((array == array.flat[0]).all()):
        return f"all {array.size} numbers are {array.flat[0]:g}"
    size = np.abs(array.astype(np.float64))
    tiny = int(np.count_nonzero((size > 0) & (size < float(np.finfo(array.dtype).smallest_normal))))
    if tiny:
        return f"{tiny} of {array.size} numbers are denormal, which some kernels take long over"
    bad = int(np.count_nonzero(~np.isfinite(array)))
    return f"{bad} of {array.size} numbers are not finite" if bad else None


def read_array(name: str | os.PathLike[str]) -> np.ndarray[Any, Any]:
    """The array of a .npy file, mapped."""
    with open(name, "rb") as stream:
        magic = stream.read(len(NPY_MAGIC))
    if magic != NPY_MAGIC:
        raise ArgumentError(f"{os.fspath(name)}: need a .npy file, which starts with {NPY_MAGIC!r}, found {magic!r}")
    try:
        array: np.ndarray[Any, Any] = np.load(name, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ArgumentError(f"{os.fspath(name)}: need a whole .npy file of numbers: {error}") from None
    return array


def _check_room(dtype: str, shape: tuple[int, ...], place: int) -> None:
    """Refuse inputs that this machine can't hold several times over, before they take its memory."""
    need = math.prod(shape) * (2 if dtype == "bfloat16" else np.dtype(dtype).itemsize)
    free = free_memory()
    if need > INPUT_SHARE * free:
        raise ArgumentError(
            f"input {place} of shape {shape} takes {need:,} bytes, more than a quarter of the {free:,} that are free"
        )


class Inputs:
    """Input files of one model in a folder of its own, made once per batch."""

    def __init__(self, folder: str, facts: Facts, seed: int, given: Sequence[str | os.PathLike[str]] = ()) -> None:
        self.folder, self.facts, self.seed = folder, facts, seed
        self.given = [os.path.abspath(os.fspath(name)) for name in given]
        self.notes: list[str] = []
        self._made: dict[int | None, tuple[list[str | None], str]] = {}
        if self.given and len(self.given) != len(facts["inputs"]):
            raise ArgumentError(f"need {len(facts['inputs'])} input files, got {len(self.given)}")

    def at(self, batch: int | None) -> tuple[list[str | None], str]:
        """File names and the sha256 of all their content."""
        if batch not in self._made:
            self._made[batch] = self._make(batch)
        return self._made[batch]

    def _make(self, batch: int | None) -> tuple[list[str | None], str]:
        names: list[str | None] = []
        digest = hashlib.sha256()
        for place, (each, shape) in enumerate(zip(self.facts["inputs"], shapes(self.facts, batch))):
            if shape is None:
                names.append(None)
                continue
            if self.given:
                array = read_array(self.given[place])
                if array.shape != shape:
                    at = "" if batch is None else f" for batch {batch}"
                    raise ArgumentError(f"{self.given[place]}: need shape {shape}{at}, found {array.shape}")
                need = "V2" if each["dtype"] == "bfloat16" else each["dtype"]
                if array.dtype != np.dtype(need):
                    raise ArgumentError(
                        f"{self.given[place]}: need dtype {each['dtype']} for input {place}, found {array.dtype}"
                    )
                names.append(self.given[place])
            else:
                _check_room(each["dtype"], shape, place)
                array = random_array(each["dtype"], shape, (self.seed, place))
                name = os.path.join(self.folder, f"input-{place}-{batch}.npy")
                np.save(name, array, allow_pickle=False)
                names.append(name)
            digest.update(f"{array.dtype.str}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data if array.size else b"")
            note = suspicious(array)
            if note is not None:
                self.notes.append(f"input {place}: {note}")
        return names, digest.hexdigest()


def constant_notes(facts: Facts) -> list[str]:
    found = facts["constants"]
    notes = []
    if found["denormal"]:
        notes.append(f"{found['denormal']} weights are denormal, which some kernels take long over")
    if found["constant"]:
        notes.append(f"{found['constant']} weight arrays hold one and the same number: unlike real weights")
    return notes


# ---------------------------------------------------------------------------------------------------
# bench


@dataclass(frozen=True)
class Config:
    """What one row of figures was measured with."""

    #: Samples of a call; None: as declared, where the graph has no batch.
    batch: int | None = None
    threads: int = 1
    workers: int = 1

    @property
    def cpus(self) -> int:
        return self.threads * self.workers

    def __str__(self) -> str:
        batch = "" if self.batch is None else f"batch {self.batch}, "
        workers = "" if self.workers == 1 else f", {self.workers} workers"
        return f"{batch}{self.threads} thread{'' if self.threads == 1 else 's'}{workers}"


def job(target: Subject, config: Config, files: Sequence[str | None], **more: Any) -> Facts:
    return {
        "model": target.model,
        "kind": target.kind,
        "method": target.method if target.kind == "program" else None,
        "inputs": list(files),
        "threads": config.threads,
        "workers": config.workers,
        "options": target.options,
        **more,
    }


@dataclass
class Settings:
    """How much is measured."""

    processes: int = 9
    seconds: float = 0.5
    warm_up: float = 1.0
    most: int = 5000
    seed: int = 0
    cold: bool = False
    #: CPUs that workers are bound to.
    cpus: list[int] | None = None
    #: As for Runtime; processes run in folders of their own, so that a path has to be absolute.
    weights_cache: bool | str | None = None


def configs(facts: Facts, batches: Sequence[int], threads: Sequence[int], workers: Sequence[int]) -> list[Config]:
    declared = declared_batch(facts)
    if batches and declared is None:
        raise ArgumentError(
            "the batch of a program can't be chosen; leave it out"
            if facts["kind"] == "program"
            else "the graph has no input whose batch can be chosen; leave it out"
        )
    chosen: Sequence[int | None] = batches or [declared]
    # Twice the same row would be told apart by nobody.
    return list(dict.fromkeys(Config(*each) for each in itertools.product(chosen, threads or [1], workers or [1])))


def check_cpus(cpus: Sequence[int] | None) -> None:
    """Refuse CPUs that this process may not use: the system binds to the others without a word."""
    allowed = sorted(os.sched_getaffinity(0))
    if cpus and not set(cpus) <= set(allowed):
        raise ArgumentError(f"need CPUs of {', '.join(map(str, allowed))}, got {', '.join(map(str, cpus))}")


@contextlib.contextmanager
def workplace() -> Iterator[str]:
    with _ended_in_order(), tempfile.TemporaryDirectory(prefix="xnnfast-bench-") as folder:
        yield folder


@contextlib.contextmanager
def _ended_in_order() -> Iterator[None]:
    """SIGTERM, as time limits send it, leaves neither files nor workers behind."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def bench(
    models: Sequence[str | os.PathLike[str]],
    *,
    batches: Sequence[int] = (),
    threads: Sequence[int] = (1,),
    workers: Sequence[int] = (1,),
    settings: Settings | None = None,
    inputs: Sequence[str | os.PathLike[str]] = (),
    method: str | None = None,
    build: Build | None = None,
    say: Say = lambda line: None,
) -> Facts:
    """The record of measuring models in every combination of batches, threads and workers.

    Processes of the configurations take turns, so that a bad moment of the machine hits all of them.
    """
    settings = settings or Settings()
    check_cpus(settings.cpus)
    machine = environment()
    allowed = len(settings.cpus or machine["affinity"]) or machine["cpus"] or 1
    made: list[Facts] = []
    with workplace() as folder:
        prepared: list[tuple[Subject, Inputs, list[Facts]]] = []
        # What is wrong with a model or a file is said before anything takes time.
        for number, model in enumerate(models):
            target = subject(model, build, method, settings.weights_cache)
            place = os.path.join(folder, str(number))
            os.mkdir(place)
            data = Inputs(place, target.facts, settings.seed, inputs)
            chosen = configs(target.facts, batches, threads, workers)
            for config in chosen:
                data.at(config.batch)
            prepared.append((target, data, [{"config": config, "processes": [], "error": None} for config in chosen]))
        for target, data, rows in prepared:
            for turn in range(settings.processes):
                for row in rows:
                    if row["error"] is not None:
                        continue
                    say(f"{target.model}, {row['config']}: process {turn + 1} of {settings.processes}")
                    _measure_once(row, target, data, settings, allowed)
            notes = [*constant_notes(target.facts), *dict.fromkeys(data.notes)]
            made.append(_model_record(target, rows, data, notes, settings, batches))
            build_facts = target.facts["build"]
    return {
        "format": record.FORMAT,
        "version": record.VERSION,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "environment": machine,
        "build": build_facts,
        "settings": asdict(settings),
        "models": made,
        "notes": advice(machine),
    }


def _measure_once(row: Facts, target: Subject, data: Inputs, settings: Settings, allowed: int) -> None:
    config: Config = row["config"]
    try:
        files, row["inputs_sha256"] = data.at(config.batch)
        outputs = None
        if "outputs" not in row:
            # Once: what it costs to write them is no part of what is measured, but peaks of memory might show it.
            outputs = tempfile.mkdtemp(dir=data.folder)
        answer = ask(
            target.build,
            job(
                target,
                config,
                files,
                seconds=settings.seconds,
                warm_up=settings.warm_up,
                most=settings.most,
                cold=settings.cold,
                cpus=settings.cpus,
                split=True,
                outputs=outputs,
            ),
        )
        if outputs is not None:
            count = len(os.listdir(outputs))
            arrays = (np.load(os.path.join(outputs, f"{number}.npy"), allow_pickle=False) for number in range(count))
            row["outputs"] = [record.output(array) for array in arrays]
            shutil.rmtree(outputs)
    except MeasureError as error:
        row["error"] = str(error)
        return
    answer["disturbed"] = disturbances(answer, config.cpus, allowed)
    row["processes"].append(answer)


def _model_record(
    target: Subject, rows: list[Facts], data: Inputs, notes: list[str], settings: Settings, batches: Sequence[int]
) -> Facts:
    facts = target.facts
    return {
        "name": os.path.basename(os.path.dirname(target.model))
        if os.path.basename(target.model).startswith("model.")
        else os.path.basename(target.model),
        "path": target.model,
        "sha256": file_sha256(target.model),
        "nbytes": os.path.getsize(target.model),
        "kind": facts["kind"],
        "method": facts["method"],
        "delegation": facts["delegation"],
        "nodes": facts["nodes"],
        "datatypes": facts["datatypes"],
        "inputs": facts["inputs"],
        "notes": notes,
        "results": [_result(facts, row, settings) for row in rows],
    }


def _result(facts: Facts, row: Facts, settings: Settings) -> Facts:
    config: Config = row["config"]
    result = {
        "batch": config.batch,
        "threads": config.threads,
        "workers": config.workers,
        "shapes": [None if shape is None else list(shape) for shape in shapes(facts, config.batch)],
        "inputs_sha256": row.get("inputs_sha256"),
        "error": row["error"],
        "processes": row["processes"],
    }
    if "outputs" in row:
        result["outputs"] = row["outputs"]
    if row["processes"]:
        result["summary"] = summary(result)
    return result


def summary(result: Facts) -> Facts:
    """The figures of one configuration: over all samples, and over the medians of processes."""
    processes = result["processes"]
    quiet = [each for each in processes if not each["disturbed"]]
    used = quiet or processes
    per_call = np.concatenate([np.asarray(each["samples"], np.float64) / each["inner"] for each in used])
    medians = [process_median(each) for each in used]
    items = result["batch"] or 1
    calls = [max(1, len(each["samples"]) * each["inner"]) for each in used]
    parts = {name for each in processes for name in each["load"]}
    return {
        "processes": len(processes),
        "undisturbed": len(quiet),
        "stable": sum(each["stable"] for each in processes),
        "latency_ns": stats.summarize(per_call),
        "process_medians_ns": stats.summarize(medians),
        "drift": float(np.median([stats.drift(each["samples"]) for each in used])),
        "items_per_second": items * 1e9 / float(np.median(medians)),
        "cpu_ns_per_item": float(np.median([each["while"]["cpu"] / n / items for each, n in zip(used, calls)])),
        "load_ns": {name: float(np.median([each["load"].get(name, 0) for each in used])) for name in sorted(parts)},
        "memory": {name: int(np.median([each["memory"][name] for each in used])) for name in used[0]["memory"]},
        "calls_per_sample": max(each["inner"] for each in used),
    }


def process_median(answer: Facts) -> float:
    return float(np.median(answer["samples"])) / float(answer["inner"])
