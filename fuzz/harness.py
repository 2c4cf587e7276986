"""What a file from a stranger may do: load and run, or raise one of the package's errors. Nothing else.

``attempt(data)`` tries one file in this process and tells what became of it. ``isolated(...)`` tries many in
child processes, which may die or hang: then the parent knows at which file and goes on behind it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import resource
import select
import signal
import struct
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import xnnfast
from xnnfast import Program, Runtime, XnnfastError, load, load_all, reference
from xnnfast.caps import Limits
from xnnfast.describe import describe, text
from xnnfast.describe_program import describe_program, program_text
from xnnfast.lower import lower
from xnnfast.whole import whole

#: A file may ask for much, and that is not its fault; a search must not spend its time there.
LIMITS = Limits(max_workspace=1 << 24, max_indirection=1 << 24, max_steps=1 << 12)
PROGRAMS = (b"ET12", b"BP08")
PAGE = mmap.PAGESIZE
#: Seconds of processor time after which a file counts as hanging, bytes from which it counts as greedy.
SLOW, GREEDY = 1.0, 256 << 20


class Guarded:
    """Memory whose end is followed by a page that can't be touched; files in it look read-only to Python."""

    def __init__(self, room: int = 1 << 20) -> None:
        self.end = -(-room // PAGE) * PAGE
        handle = os.memfd_create("guarded")
        try:
            os.ftruncate(handle, self.end + PAGE)
            self.write = mmap.mmap(handle, self.end + PAGE)
            self.read = mmap.mmap(handle, self.end + PAGE, access=mmap.ACCESS_READ)
        finally:
            os.close(handle)
        place = np.frombuffer(self.read, np.uint8).ctypes.data + self.end
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mprotect(ctypes.c_void_p(place), ctypes.c_size_t(PAGE), 0):
            raise OSError(ctypes.get_errno(), "mprotect")

    def file(self, data: bytes) -> Any:
        """The bytes as the last thing before the page. The next call overwrites them."""
        if not 0 < len(data) <= self.end:
            return data
        self.write[self.end - len(data) : self.end] = data
        return memoryview(self.read)[self.end - len(data) : self.end]


_guarded: Guarded | None = None


def guarded(data: bytes) -> Any:
    global _guarded
    if _guarded is None:
        _guarded = Guarded()
    return _guarded.file(data)


#: A program that needs named data, to try data files with.
needs_data: bytes | None = None


def attempt(data: Any, *, sidecars: Sequence[Any] = (), run: bool = True, limits: Limits = LIMITS) -> str:
    """``"refused"`` (the name of the error follows), ``"loaded"`` or ``"ran"``; other exceptions leave."""
    found = "refused"
    if bytes(data[4:8]) == b"FT01" and needs_data is not None:
        return attempt(needs_data, sidecars=[data], run=run, limits=limits)
    for step in (
        lambda: load(data, data=sidecars, limits=limits),
        lambda: load_all(data, data=sidecars, limits=limits),
    ):
        try:
            got = step()
        except XnnfastError as error:
            if found == "refused":
                found = f"refused {type(error).__name__}"
            continue
        for graph in got if isinstance(got, list) else [got]:
            found = _better(found, _graph(graph, run))
        if bytes(data[4:8]) not in PROGRAMS:
            # The same graph again.
            break
    if bytes(data[4:8]) in PROGRAMS:
        found = _better(found, _program(data, sidecars, run, limits))
    return found


def _better(one: str, other: str) -> str:
    order = ("ran", "loaded")
    return next((name for name in order if name in (one, other)), one)


def fill(shape: Sequence[int], dtype: np.dtype[Any], seed: int = 0) -> np.ndarray[Any, Any]:
    """An input: small numbers of both signs."""
    ramp = (np.arange(13) * 7 + seed) % 13 - 6
    return np.resize((ramp * 0.25 if dtype.kind == "f" else ramp).astype(dtype), shape)


def _graph(graph: Any, run: bool) -> str:
    json.dumps(describe(graph), allow_nan=False)
    text(describe(graph))
    with contextlib.suppress(XnnfastError):
        # The analysis of the batch, which an Executor asks for.
        lower(graph).follows_batch  # noqa: B018
    if not run:
        return "loaded"
    try:
        with Runtime(graph) as runtime:
            inputs = [fill(value.shape, value.dtype, value.id) for value in graph.inputs]
            outputs = runtime.run(*inputs)
            for value, array in zip(graph.outputs, outputs):
                if array.shape != value.shape:
                    raise AssertionError(f"output value {value.id} is {array.shape}, declared {value.shape}")
                array.tobytes()
    except XnnfastError:
        return "loaded"
    if comparing:
        _compare(graph, inputs, outputs)
    return "ran"


#: Whether results are compared with the reference: not only no crash, but no lie.
comparing = False


def _compare(graph: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Gross differences only, and only where every number on the way is one: tests look closer."""
    if sum(value.nbytes for value in graph.values) > 1 << 18:
        return
    with np.errstate(all="ignore"):
        wanted = reference.run(graph, *inputs)
        trace = reference.operands(graph, *inputs).values()
        reals = [each.real for each in trace] + [
            value.array() for value in graph.values if value.constant is not None and value.datatype in ("fp32", "fp16")
        ]
        if any(each.size and not np.abs(each).max() < 3e4 for each in reals):
            return
        for value, got, want in zip(graph.outputs, outputs, wanted):
            off = np.abs(got.astype(np.float64) - want.astype(np.float64))
            room = 1.0 if got.dtype.kind in "iu" else 1e-3 + 0.03 * np.abs(want.astype(np.float64)).max(initial=0)
            if got.shape != want.shape or not off.max(initial=0) <= room:
                nodes = [(node.op.name, dict(node.attrs), node.flags, node.clamp) for node in graph.nodes]
                values = [(each.id, each.datatype, each.shape, str(each.quantization)[:80]) for each in graph.values]
                raise AssertionError(f"output {value.id} is {off.max():g} off, room {room:g}: {nodes} {values}")


def _program(data: Any, sidecars: Sequence[Any], run: bool, limits: Limits) -> str:
    found = "refused"
    try:
        program = Program(data, sidecars, limits=limits)
        found = "loaded"
        facts = describe_program(program)
        json.dumps(facts, allow_nan=False)
        program_text(facts)
        for name in program.methods:
            ports = program.inputs(name)
            program.outputs(name)
            if not run or any(port.shape is not None and np.prod(port.shape, dtype=object) > 1 << 20 for port in ports):
                continue
            with contextlib.suppress(XnnfastError):
                whole(program, name)
            given = [fill(port.shape, port.dtype) if port.kind == "Tensor" else port.value for port in ports]
            try:
                for _ in range(2):
                    program.run(*given, method=name)
                found = "ran"
            except XnnfastError:
                continue
    except XnnfastError:
        pass
    return found


# ---------------------------------------------------------------------------------------------------
# In processes that may die


@dataclass
class Report:
    """What became of many files."""

    outcomes: Counter[str] = field(default_factory=Counter)
    #: (case, what is wrong) of each that broke the rule.
    findings: list[tuple[int, str]] = field(default_factory=list)
    #: Longest time of a case and its number; growth of memory likewise.
    slowest: tuple[float, int] = (0.0, -1)
    largest: tuple[int, int] = (0, -1)

    @property
    def executions(self) -> int:
        return sum(self.outcomes.values())


#: What a child writes of each case: number, kind of entry, outcome.
_ENTRY = struct.Struct("<qqdq32s")


def isolated(
    cases: Callable[[int], Iterator[bytes]],
    *,
    run: bool = True,
    start: int = 0,
    stop: int | None = None,
    hang: float = 20.0,
    guard: int = 3,
    tell: Callable[[Report, int], None] | None = None,
    trial: Callable[[bytes], str] | None = None,
) -> Report:
    """Attempt every case; ``cases(start)`` yields them from that number on and must give the same again."""
    report = Report()
    at = start
    while stop is None or at < stop:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            _child(cases, at, stop, writer, run, guard, trial)
        os.close(writer)
        done, at = _watch(pid, reader, at, report, hang, tell)
        os.close(reader)
        if done:
            break
    return report


def _child(cases: Any, at: int, stop: int | None, writer: int, run: bool, guard: int, trial: Any) -> None:
    code = 0
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for data in cases(at):
            if stop is not None and at >= stop:
                break
            begin = time.thread_time()
            try:
                if trial is not None:
                    outcome = trial(data)
                else:
                    # Now and then at the end of readable memory, wherever that makes it begin.
                    outcome = attempt(guarded(data) if guard and at % guard == 0 else data, run=run)
            except BaseException as error:
                lines = "".join(traceback.format_exception(error)).strip()
                outcome = f"!{lines}"
            spent = time.thread_time() - begin
            now = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            text = outcome.encode(errors="replace")
            head = _ENTRY.pack(at, len(text), spent, (now - peak) * 1024, b"")
            _send(writer, head + text)
            peak = max(peak, now)
            at += 1
        _send(writer, _ENTRY.pack(-1, 0, 0, 0, b""))
    except BaseException:
        traceback.print_exc()
        code = 70
    finally:
        os._exit(code)


def _send(writer: int, data: bytes) -> None:
    while data:
        data = data[os.write(writer, data) :]


def _watch(pid: int, reader: int, at: int, report: Report, hang: float, tell: Any) -> tuple[bool, int]:
    """Read what a child tells until it ends; (whether it came to the end, number of the next case)."""
    buffer = b""
    done = False
    while True:
        ready, _, _ = select.select([reader], [], [], hang)
        if not ready:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            report.outcomes["!hang"] += 1
            report.findings.append((at, f"hangs for {hang:g} s"))
            return False, at + 1
        data = os.read(reader, 1 << 16)
        buffer += data
        while len(buffer) >= _ENTRY.size:
            number, length, spent, grown, _ = _ENTRY.unpack_from(buffer)
            if len(buffer) < _ENTRY.size + length:
                break
            text = buffer[_ENTRY.size : _ENTRY.size + length].decode(errors="replace")
            buffer = buffer[_ENTRY.size + length :]
            if number < 0:
                done = True
                continue
            _note(report, number, text, spent, grown)
            at = number + 1
            if tell is not None:
                tell(report, at)
        if not data:
            break
    _, status = os.waitpid(pid, 0)
    if done and status == 0:
        return True, at
    if os.WIFSIGNALED(status):
        what = f"ends by {signal.Signals(os.WTERMSIG(status)).name}"
    else:
        what = f"ends with status {os.waitstatus_to_exitcode(status)}"
    report.outcomes["!died"] += 1
    report.findings.append((at, what))
    return False, at + 1


def _note(report: Report, number: int, outcome: str, spent: float, grown: int) -> None:
    if outcome.startswith("!"):
        report.outcomes["!raised"] += 1
        report.findings.append((number, outcome[1:]))
    else:
        report.outcomes[outcome] += 1
    if spent > SLOW:
        report.findings.append((number, f"takes {spent:.1f} s"))
    if grown > GREEDY:
        report.findings.append((number, f"takes {grown >> 20} MiB"))
    report.slowest = max(report.slowest, (spent, number))
    report.largest = max(report.largest, (grown, number))


def good() -> Iterable[bytes]:
    """Something that must load and run after whatever was refused."""
    builder = xnnfast.GraphBuilder()
    builder.output(builder.add(builder.input((1, 8)), np.ones((1, 8), np.float32)))
    yield builder.finish()
