"""The process that measures: opens a model once, warms up, and tells every sample in order.

Run as a file by any Python that has some xnnfast: ``python worker.py`` prints ``ready`` when everything is
imported, reads one job (a line of JSON) and prints one answer. A job with ``turns`` is done in parts, each when a line
asks for it, so that two processes can take turns: see ``measure``. It uses the public names of xnnfast alone, so that
builds of different age are measured by the same code, and imports next to nothing, since a comparison starts it a
hundred times.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    # The folder of this file, where ``profile`` and others would hide modules of the standard library.
    del sys.path[0]

import contextlib
import gc
import json
import os
import resource
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

import numpy as np

Call = Callable[[], Any]
Facts = dict[str, Any]
WALL = time.perf_counter_ns
#: What samples are taken with: the wall clock, or CPU time of the process where a machine is never quiet.
CLOCK = WALL
#: Medians of two successive groups of samples that differ by less are the same.
STABLE = 0.02
#: Where answers go.
ANSWERS = sys.stdout
#: The process that asked, by its id, where there is one.
PARENT: int | None = None
#: A sample is at least that long: the clock itself takes 50 ns.
MIN_SAMPLE_NS = 10_000


# ---------------------------------------------------------------------------------------------------
# What the machine does meanwhile


def _lines(path: str) -> list[str]:
    try:
        with open(path) as stream:
            return stream.read().splitlines()
    except OSError:
        return []


def throttle_files() -> list[str]:
    """The cpu.stat files of this process's cgroup and its parents."""
    found = []
    for line in _lines("/proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            bases = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"]
        elif "cpu" in controllers.split(","):
            bases = ["/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpu,cpuacct"]
        else:
            continue
        parts = [part for part in path.split("/") if part and part != ".."]
        for base in bases:
            for depth in range(len(parts) + 1):
                name = "/".join([base, *parts[:depth], "cpu.stat"])
                if name not in found and os.path.exists(name):
                    found.append(name)
    return found


def spin(times: int = 100) -> int:
    """Nanoseconds of a fixed piece of work: the speed that this CPU has now. It allocates nothing, because a loop that
    does is as fast as the allocator's mood."""
    best = 0
    for _ in range(times):
        work = repeat(None, 20_000)
        start = CLOCK()
        deque(work, maxlen=0)
        took = CLOCK() - start
        best = took if not best or took < best else best
    return best


def snapshot(files: Any) -> dict[str, int]:
    """Counters of the process, of its CPUs and of its cgroup."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    state = {
        "wall": WALL(),
        "cpu": time.process_time_ns(),
        "involuntary": usage.ru_nivcsw,
        "voluntary": usage.ru_nvcsw,
        "faults": usage.ru_majflt,
        "waited": 0,
        "migrations": 0,
        "steal": 0,
        "busy": 0,
        "throttled": 0,
        "throttled_us": 0,
    }
    try:
        threads = os.listdir("/proc/self/task")
    except OSError:
        threads = []
    for thread in threads:
        for line in _lines(f"/proc/self/task/{thread}/schedstat"):
            state["waited"] += int(line.split()[1])
        for line in _lines(f"/proc/self/task/{thread}/sched"):
            if line.startswith(("se.nr_migrations", "nr_migrations")):
                state["migrations"] += int(line.rpartition(":")[2])
                break
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    tick = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    for line in _lines("/proc/stat"):
        name, *fields = line.split()
        if not name.startswith("cpu"):
            break
        if name != "cpu" and int(name[3:]) in allowed:
            # user nice system idle iowait irq softirq steal; guests are part of user.
            state["busy"] += tick * sum(int(fields[i]) for i in (0, 1, 2, 5, 6))
            state["steal"] += tick * int(fields[7])
    for name in files:
        for line in _lines(name):
            key, _, number = line.partition(" ")
            if key == "nr_throttled":
                state["throttled"] += int(number)
            elif key == "throttled_usec":
                state["throttled_us"] += int(number)
            elif key == "throttled_time":
                state["throttled_us"] += int(number) // 1000
    return state


class Watch:
    """What the counters of ``snapshot`` add up to while it is on."""

    def __init__(self, files: Any) -> None:
        self.files = files
        self.counts: dict[str, int] = {}

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        start = snapshot(self.files)
        yield
        for name, value in snapshot(self.files).items():
            self.counts[name] = self.counts.get(name, 0) + value - start[name]


def stay() -> int | None:
    """Bind this process to the CPU that it is on, and its number; None where that can't be done."""
    try:
        # What follows the command, which may hold blanks, in proc_pid_stat(5): the CPU is number 39 of all.
        with open("/proc/self/stat") as stream:
            cpu = int(stream.read().rpartition(")")[2].split()[36])
        if cpu not in os.sched_getaffinity(0):
            # Some sandboxes say 0 whatever is true.
            return None
        os.sched_setaffinity(0, {cpu})
    except (OSError, ValueError, IndexError, AttributeError):
        return None
    return cpu


def resident() -> tuple[int, int]:
    """Resident bytes now, and at most so far."""
    now = peak = 0
    for line in _lines("/proc/self/status"):
        if line.startswith("VmRSS:"):
            now = 1024 * int(line.split()[1])
        elif line.startswith("VmHWM:"):
            peak = 1024 * int(line.split()[1])
    return now, peak


# ---------------------------------------------------------------------------------------------------
# Models


class Opened:
    """A model made ready, and how long each part of that took (ns)."""

    def __init__(self, job: Any) -> None:
        self.engine: Any
        self.program: Any
        self.graph: Any
        self.inputs: Any
        self.times: dict[str, float]
        self.xnnfast = job["xnnfast"]
        path, threads, workers = job["model"], job.get("threads", 1), job.get("workers", 1)
        options = job.get("options") or {}
        self.method = job.get("method")
        self.times = {}
        self.engine = self.program = None
        start = CLOCK()
        if job.get("kind") != "program":
            try:
                self.graph = self.xnnfast.load(path, **({"method": self.method} if self.method else {}))
            except self.xnnfast.UnsupportedError:
                # More than one graph. Its parts may still be refused, by the program's own words.
                self.graph = None
        else:
            self.graph = None
        if self.graph is None:
            self.kind = "program"
            if workers > 1:
                raise self.xnnfast.ArgumentError("need one worker for a program of several parts")
            self.program = self.xnnfast.Program(path, threads=threads, **options)
            self.method = self.method or self.default_method()
            self.times["load"] = CLOCK() - start
            start = CLOCK()
            prepare = getattr(self.program, "prepare", None)
            if prepare is not None:
                prepare(self.method)
            self.times["pack"] = CLOCK() - start
            self.inputs = self.program.inputs(self.method)
            return
        self.kind = "graph"
        self.inputs = self.graph.inputs
        self.times["load"] = CLOCK() - start
        start = CLOCK()
        if workers > 1 or job.get("engine") == "executor":
            from xnnfast.executor import Executor

            self.engine = Executor(self.graph, workers=workers, threads=threads, **options)
        else:
            self.engine = self.xnnfast.Runtime(self.graph, threads=threads, **options)
        self.times["pack"] = CLOCK() - start

    def default_method(self) -> str:
        methods = self.program.methods
        return "forward" if "forward" in methods or not methods else methods[0]

    def caller(self, arrays: Any, reuse: Any) -> Call:
        """A function of no arguments that runs the model once."""
        if self.program is not None:
            run, method = self.program.run, self.method
            return lambda: run(*arrays, method=method)
        run = self.engine.run
        if reuse is None:
            return lambda: run(*arrays)
        return lambda: run(*arrays, out=reuse)


def read_inputs(opened: Opened, files: Any) -> list[Any]:
    """The arrays of a job, in memory that XNNPACK takes as it is."""
    arrays = []
    for value, name in zip(opened.inputs, files):
        if name is None:
            arrays.append(value.value)
            continue
        array = np.load(name, mmap_mode="r", allow_pickle=False)
        if array.dtype.kind == "V" and value.dtype is not None:
            array = array.view(value.dtype)
        held = opened.xnnfast.empty(array.shape, array.dtype)
        np.copyto(held, array)
        arrays.append(held)
    return arrays


# ---------------------------------------------------------------------------------------------------
# Measuring


def timed(call: Call, count: int, inner: int) -> list[int]:
    """Nanoseconds of ``count`` samples of ``inner`` calls each."""
    clock = CLOCK
    found = [0] * count
    if inner == 1:
        for i in range(count):
            start = clock()
            call()
            found[i] = clock() - start
    else:
        repeat = range(inner)
        for i in range(count):
            start = clock()
            for _ in repeat:
                call()
            found[i] = clock() - start
    return found


def rest(**words: Any) -> str:
    """Say that a part is done, and wait for the next one to be asked for."""
    # Threads of a pool may spin for a while after their work, on CPUs that are another's now.
    for _ in range(100):
        before = time.process_time_ns()
        time.sleep(0.002)
        if time.process_time_ns() - before < 500_000:
            break
    say(words)
    line = sys.stdin.readline()
    if not line:
        os._exit(1)
    return line.strip()


def say(words: Facts) -> None:
    """A line to the process that asked. What libraries print goes elsewhere."""
    ANSWERS.write(json.dumps(words, allow_nan=False) + "\n")
    ANSWERS.flush()


def leave_if_alone() -> None:
    """End with the process that asked: it may have been killed, and nobody would read the answer."""
    if PARENT is not None and os.getppid() != PARENT:
        os._exit(1)


def median(values: Any) -> float:
    ordered: list[float] = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def warm_up(call: Call, seconds: float, window: float, most: int) -> tuple[list[int], int, bool]:
    """Samples until two groups agree: (samples, calls per sample, whether they did)."""
    deadline = WALL() + int(1e9 * seconds)
    one = min(timed(call, 3, 1))
    inner = max(1, -(-MIN_SAMPLE_NS // max(one, 1)), int(1e9 * window / most / max(one, 1)) if one < 1e6 else 1)
    size = max(3, min(50, int(1e7 / (one * inner))))
    samples: list[int] = []
    groups: list[float] = []
    while True:
        leave_if_alone()
        group = timed(call, size, inner)
        samples += group
        groups.append(median(group))
        if len(groups) >= 3:
            last, before = groups[-1], groups[-2]
            if abs(last - before) <= STABLE * before and abs(last - groups[-3]) <= 2 * STABLE * before:
                return samples, inner, True
        if WALL() >= deadline:
            return samples, inner, False


def sample(call: Call, inner: int, seconds: float, least: int, most: int) -> list[int]:
    """Samples in order, for so many seconds."""
    deadline = WALL() + int(1e9 * seconds)
    found: list[int] = []
    while len(found) < least or (WALL() < deadline and len(found) < most):
        leave_if_alone()
        found += timed(call, min(5, max(most - len(found), 1)) if found and found[-1] < 2e7 else 1, inner)
    return found


def measure(job: Any) -> Facts:
    """One measurement of a model from its file to steady calls.

    With ``turns`` in the job it rests between its parts: when the model is open, when calls are warm, and after each
    slice of the samples. ``slice N`` asks for N samples, any other line for the answer.
    """
    global CLOCK
    if job.get("clock") == "cpu":
        CLOCK = time.process_time_ns
    xnnfast, turns = job["xnnfast"], job.get("turns", False)
    window, most = job["seconds"], job.get("most", 5000)
    if job.get("cpus"):
        os.sched_setaffinity(0, job["cpus"])
    cpu = stay() if job.get("stay") else None
    if job.get("cold"):
        descriptor = os.open(job["model"], os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    files = throttle_files()
    # Import on first use is not the model's doing.
    xnnfast.Program, xnnfast.empty  # noqa: B018
    before, _ = resident()
    gc.disable()
    opening, sampling = Watch(files), Watch(files)
    spins = [spin()]
    with opening.on():
        opened = Opened(job)
        arrays = read_inputs(opened, job["inputs"])
        plan = getattr(opened.engine, "plan", None)
        planned = callable(plan) and all(a.shape == tuple(v.shape) for a, v in zip(arrays, opened.inputs))
        if planned:
            began = CLOCK()
            opened.engine.plan()
            opened.times["plan"] = CLOCK() - began
        began = CLOCK()
        first = opened.caller(arrays, None)()
        opened.times["first"] = CLOCK() - began
    opened.times["total"] = sum(opened.times.values())
    if job.get("outputs"):
        for number, array in enumerate(first):
            array = np.asarray(array)
            np.save(os.path.join(job["outputs"], f"{number}.npy"), array, allow_pickle=False)
    reuse = None
    if opened.engine is not None and not job.get("new_outputs"):
        reuse = [xnnfast.empty(array.shape, array.dtype) for array in first]
    call = opened.caller(arrays, reuse)
    if turns:
        rest(cpu=cpu)
    with opening.on():
        warm, inner, stable = warm_up(call, job.get("warm_up", 1.0), window, most)
    one = median(warm) / inner
    samples: list[int] = []
    if turns:
        words = rest(sample_ns=one * inner)
        while words.startswith("slice "):
            count = int(words.split()[1])
            spins.append(spin(20))
            with sampling.on():
                # What the other process left in the caches is not this one's to pay for, unless there is time for
                # no more than that, on both sides.
                if count > 1:
                    call()
                samples += timed(call, count, inner)
            words = rest()
    else:
        with sampling.on():
            samples = sample(call, inner, window, min(job.get("least", 5), most), most)
        spins.append(spin())
    now, peak = resident()
    answer: Facts = {
        "inner": inner,
        "warm_up": [round(t) for t in warm] if len(warm) <= 2000 else warm[:1000] + warm[-1000:],
        "stable": stable,
        "samples": samples,
        "load": opened.times,
        "memory": {"resident": now - before, "peak": max(0, peak - before), "process_peak": peak},
        "opening": opening.counts,
        "while": sampling.counts,
        "spin": spins,
        "turns": turns,
        "cpu": cpu,
    }
    if opened.engine is not None:
        answer["memory"].update(opened.engine.memory)
        if plan is not None and not callable(plan):
            answer["plan"] = str(opened.engine.plan)
        answer["staged"] = opened.engine.staged
    if job.get("split") and not planned and type(opened.engine).__name__ == "Runtime":
        # The first call plans the engine's memory: so does the first one after trim().
        opened.engine.trim()
        began = CLOCK()
        call()
        answer["load"]["plan"] = min(max(0, CLOCK() - began - median(samples) / inner), answer["load"]["first"])
        answer["load"]["first"] -= answer["load"]["plan"]
    return answer


# ---------------------------------------------------------------------------------------------------
# Looking


def probe(job: Any) -> Facts:
    """What the build is, and what a job for the model would have to give."""
    xnnfast = job["xnnfast"]
    answer: Facts = {"build": build(xnnfast)}
    if job.get("model") is None:
        return answer
    opened = Opened({**job, "threads": 1, "workers": 1})
    answer["kind"] = opened.kind
    answer["method"] = opened.method
    answer["inputs"] = [describe(value) for value in opened.inputs]
    answer["constants"] = constants(opened.graph)
    if opened.graph is not None:
        answer["nodes"] = len(opened.graph.nodes)
        answer["datatypes"] = sorted({value.datatype for value in opened.graph.values})
        answer["batched"] = batched(opened.graph)
        answer["delegation"] = "the whole file is one graph"
    else:
        program = opened.program
        undelegated = [call for call in program.undelegated if call.method == opened.method]
        delegates = [each for each in program.delegates if each.method == opened.method]
        answer["nodes"] = None
        answer["datatypes"] = sorted({str(value.dtype) for value in opened.inputs if value.dtype is not None})
        answer["batched"] = []
        answer["delegation"] = f"{len(delegates)} delegates, {len(undelegated)} operators outside them"
    return answer


def describe(value: Any) -> Facts:
    if getattr(value, "kind", "Tensor") != "Tensor":
        return {"dtype": None, "kind": value.kind, "value": value.value}
    return {
        "dtype": str(value.dtype),
        "shape": list(value.shape),
        "datatype": getattr(value, "datatype", None),
        "name": getattr(value, "name", None),
        "dynamism": getattr(value, "dynamism", None),
    }


def batched(graph: Any) -> list[int]:
    """The inputs whose first axis is the batch."""
    first = [value.shape[0] if value.shape else None for value in graph.inputs]
    try:
        from xnnfast.lower import lower

        layouts = lower(graph).batching
        if layouts is not None:
            return list(layouts.inputs)
    except (ImportError, AttributeError):
        pass
    return [i for i, size in enumerate(first) if size is not None and size == first[0]]


def constants(graph: Any, limit: int = 64 << 20) -> Facts:
    """How many float constants hold denormals or nothing but one number; of large files the first part."""
    found: Facts = {"scanned": 0, "denormal": 0, "constant": 0}
    if graph is None:
        return found
    for value in graph.values:
        if value.constant is None or value.datatype not in ("fp32", "fp16") or found["scanned"] > limit:
            continue
        array = np.frombuffer(value.constant.data, value.dtype)
        found["scanned"] += array.nbytes
        size = np.abs(array)
        found["denormal"] += int(np.count_nonzero((size > 0) & (size < np.finfo(array.dtype).smallest_normal)))
        found["constant"] += bool(array.size >= 64 and (array == array[0]).all())
    return found


def build(xnnfast: Any) -> Facts:
    """What the build of xnnfast is."""
    import hashlib

    import xnnfast._runtime as runtime

    config = xnnfast.config()
    with open(runtime.__file__, "rb") as stream:
        digest = hashlib.sha256(stream.read()).hexdigest()
    return {
        "xnnfast": config["xnnfast"],
        "python": config["python"],
        "numpy": config["numpy"],
        "machine": config["machine"],
        "runtime_sha256": digest,
        "folder": os.path.dirname(os.path.abspath(xnnfast.__file__)),
        "pin": {each["name"]: each["commit"] for each in config.get("pin", ())},
        "changes": [each["name"] for each in config.get("changes", ())],
        "compiled": sorted(config.get("families", ())),
        "isa": config["isa"],
        "isa_cap": config.get("isa_cap"),
        "second_isa": config.get("second_isa"),
        "compiler": config.get("compiler"),
        "cpus": config["cpus"],
        "cpus_reason": config["cpus_reason"],
    }


def main() -> None:
    global PARENT, ANSWERS
    PARENT = os.getppid()
    ANSWERS = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import xnnfast

    # What a measurement needs: on first use it would be a part of the model's own time.
    getattr(xnnfast, "Runtime")  # noqa: B009
    ANSWERS.write("ready\n")
    ANSWERS.flush()
    line = sys.stdin.readline()
    if not line.strip():
        return
    job = json.loads(line)
    job["xnnfast"] = xnnfast
    try:
        answer = (probe if job.get("probe") else measure)(job)
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    say(answer)


if __name__ == "__main__":
    main()
