"""Executor: batches of any size, on every allowed core, from one process.

In come a graph and arrays whose axis 0 counts samples; out come the results of all samples. What runs is
in ``_executor``; here is what happens once per call: arrays are checked, the size of a piece is chosen.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ._executor import Crew, is_ready
from ._graph import Graph, Value
from ._runtime import empty
from .batching import Layout
from .errors import (
    ArgumentError,
    ClosedError,
    DtypeError,
    LimitError,
    OverlapError,
    ShapeError,
    UnsupportedError,
    XnnfastError,
)
from .fuse import fold_affine as _fold_affine
from .limits import allowed_cpus
from .lower import lower_batches
from .ops._rules import text
from .precision import Accuracy, apply
from .stepwise import StepCrew, Terminal

if TYPE_CHECKING:
    from .program import Program

    Array = np.ndarray[Any, np.dtype[Any]]
    Arrays = tuple[Array, ...]

__all__ = ["Executor", "Plan"]

#: More threads than any machine has CPUs are a mistake that takes the system's threads from everybody else.
MAX_THREADS = 4096
#: Largest piece that is tried.
MAX_MICRO_BATCH = 1024
#: Below this much work, in seconds, waking other threads costs more than they can do.
ALONE = 40e-6
#: Shorter pieces, in seconds, don't tell whether larger ones would be better.
TELLING = 500e-6
#: A probe may take this long, or that share of the work at hand.
PROBE_SECONDS, PROBE_SHARE = 0.3, 0.02
#: The reason for a number of workers that the caller chose.
GIVEN = "given"
#: How many samples are computed in the file's own precision too, where another one was asked for.
COMPARED = 32


@dataclass(frozen=True)
class Plan:
    """How an executor divides its work, and why.

    Attributes
    ----------
    micro_batch : int
        Samples per piece.
    source : str
        ``"given"``, ``"probe"``, ``"cache"`` (a probe of another executor on this graph) or ``"default"``
        (no batch was large enough for a probe so far).
    timings : dict of int to float
        Microseconds per sample on one worker, all workers running, for every size of piece that was tried.
    complete : bool
        Whether larger batches would not make the executor try larger pieces.
    workers : int
    reason : str
        Why there are so many workers.
    threads : int
        Threads of the pool for batches smaller than the number of workers; 1 means none.
    """

    micro_batch: int
    source: str
    timings: dict[int, float]
    complete: bool
    workers: int
    reason: str
    threads: int

    def __str__(self) -> str:
        lines = [f"{self.workers} worker{'s' * (self.workers != 1)}: {self.reason}",
                 f"{self.micro_batch} sample{'s' * (self.micro_batch != 1)} per piece: {self.source}"]
        lines += [f"  {size:5d} per piece: {each:.3g} us per sample" for size, each in sorted(self.timings.items())]
        return "\n".join(lines)


@dataclass
class _Tuner:
    """The search for the size of a piece, for inputs of one shape."""

    timings: dict[int, float] = field(default_factory=dict)
    complete: bool = False
    source: str = "default"

    def candidate(self) -> int:
        """The next size to try."""
        return max(self.timings) * 2 if self.timings else 1

    def add(self, size: int, seconds: float) -> None:
        """Take up the time per sample; decides whether larger pieces are worth a try."""
        self.timings[size] = seconds
        self.source = "probe"
        best = min(self.timings.values())
        latest = [self.timings[each] for each in sorted(self.timings)[-2:]]
        worse = sum(each > 1.05 * best for each in latest)
        # Kernels work on tiles of several rows: two rows may take longer than one each, and eight no longer than two.
        tells = seconds * size >= TELLING
        self.complete = size >= MAX_MICRO_BATCH or (tells and (worse == 2 or latest[-1] > 1.25 * best))

    @property
    def micro_batch(self) -> int:
        """The smallest size that is as good as any: less memory, and work that divides evenly."""
        if not self.timings:
            return 1
        best = min(self.timings.values())
        return min(size for size, each in self.timings.items() if each <= 1.02 * best)


@dataclass
class _Request:
    #: What is submitted keeps its executor until it is answered.
    owner: Executor
    inputs: Arrays
    outputs: Arrays
    rows: int
    variant: tuple[Any, ...]
    future: Future[Arrays] | None = None
    index: int | None = None


class Executor:
    """Runs batches of any size, on all allowed cores.

    Parameters
    ----------
    source : Graph, Program, path or buffer
        A program that comes down to one graph (:meth:`Program.plan` tells) is run as that. Of others every worker
        gets a copy, packed weights included, and takes one sample after the other; they have to be made for a
        batch of 1.
    workers : int, optional
        Threads that work on a batch, the calling one included; by default as many as CPUs are allowed.
    threads : int, default 1
        Threads that share the work on a batch smaller than the number of workers, where dividing it among
        workers would leave some idle. 1: such a batch leaves some idle.
    micro_batch : int, optional
        Samples per piece. By default a probe on the first batches chooses it.
    precision : {None, "fp16", "int8-dynamic"}
        Less than the file's precision. ``"fp16"``: sums in fp16, where the CPU has such arithmetic.
        ``"int8-dynamic"``: filters of fully connected layers and convolutions in int8, their inputs
        quantized row by row. :attr:`accuracy` tells what it costs.
    weights_cache : bool, path or WeightsCache, optional
        Keep packed weights on disk and map them the next time, as for :class:`Runtime`.
    batched : sequence of int, optional
        Positions of the inputs whose axis 0 counts samples. By default those that have the same size
        there; the others are for all samples.
    batch : int, optional
        The batch that the graph was exported for, where axis 0 of an input holds several rows per sample.
    pin : bool, default False
        Keep each of the other workers on one CPU. The calling thread stays free.
    fuse : bool, default True
        Let layers do the work of a Clamp behind them and of a pad of zeros before them, as for :class:`Runtime`.
    fold_affine : bool, default False
        Compute factors and summands behind fp32 layers into copies of their filters and biases, as for
        :class:`Runtime`. Results change by rounding.

    Attributes
    ----------
    graph : Graph or None
        None for a program that is not one graph.
    inputs, outputs : tuple of Value
        Or of what has ``id``, ``dtype`` and ``shape`` likewise.
    workers, threads : int
    precision : str or None
    accuracy : Accuracy or None
        What the precision costs, compared over the first samples of the first batch.
    staged : int
        How many arrays had to be copied as a whole so far.

    Raises
    ------
    GraphError
        Samples would mix; the message names the node and the reason.
    UnsupportedError
        This CPU can't compute in that precision, or not faster.

    Notes
    -----
    Calls from several threads are answered one after the other. After a fork the child starts threads of
    its own; what had been submitted before stays with the parent.
    """

    def __init__(self, source: Any, *, workers: int | None = None, threads: int = 1, micro_batch: int | None = None,
                 precision: str | None = None, weights_cache: Any = None, batched: Sequence[int] | None = None,
                 batch: int | None = None, pin: bool = False, fuse: bool = True, fold_affine: bool = False) -> None:
        self._closed = True
        for name, number in (("workers", workers), ("threads", threads), ("micro_batch", micro_batch)):
            if number is not None and (not isinstance(number, (int, np.integer)) or number < 1):
                raise ArgumentError(f"need {name} of at least 1, got {number!r}")
            if number is not None and number > MAX_THREADS and name != "micro_batch":
                raise ArgumentError(f"need {name} from 1 to {MAX_THREADS}, got {number}")
        graph, self._watched, self._program = _opened(source, weights_cache)
        self.precision = precision
        self.accuracy: Accuracy | None = None
        self._as_filed: dict[str, Any] = {"batched": batched, "batch": batch}
        allowed = allowed_cpus() if workers is None else None
        self.workers = allowed.count if allowed is not None else int(workers)  # type: ignore[arg-type]
        self._reason = allowed.reason if allowed is not None else GIVEN
        self.threads = int(threads)
        self._micro_batch = None if micro_batch is None else int(micro_batch)
        self._pin = bool(pin)
        self._cache = weights_cache
        self.graph = graph
        self._steps: StepCrew | None = None
        if graph is None:
            if fold_affine or not fuse:
                raise UnsupportedError("fuse and fold_affine need a graph, this program is several parts:\n"
                                       f"{self._program.plan()}")  # type: ignore[union-attr]
            self._take_steps()
        else:
            run = _fold_affine(graph) if fold_affine else graph
            self._run, self._flags = (run, 0) if precision is None else apply(run, precision)
            self._lowered = lower_batches(self._run, batched, batch, fuse)
            self.inputs: tuple[Value | Terminal, ...] = graph.inputs
            self.outputs: tuple[Value | Terminal, ...] = graph.outputs[: len(graph.outputs) - self._watched]
        self.staged = 0
        self._closed = False
        self._tuners: dict[tuple[Any, ...], _Tuner] = {}
        self._tuner = _Tuner()
        # Seconds per sample on one worker, lately.
        self._pace = math.inf
        self._start()

    def _take_steps(self) -> None:
        """Become an executor of a program that is not one graph: sample by sample."""
        if self.precision is not None:
            raise UnsupportedError(f"precision {self.precision!r} needs a graph, this program is several parts:\n"
                                   f"{self._program.plan()}")  # type: ignore[union-attr]
        if self._as_filed["batch"] not in (None, 1) or self._micro_batch not in (None, 1) or self.threads > 1:
            raise ArgumentError("need batch, micro_batch and threads of 1 for a program of several parts, which runs "
                                f"sample by sample:\n{self._program.plan()}")  # type: ignore[union-attr]
        self._micro_batch = 1
        self._steps = StepCrew(self._program, workers=self.workers,  # type: ignore[arg-type]
                               batched=self._as_filed["batched"])
        self.inputs, self.outputs = self._steps.inputs, self._steps.outputs

    def _start(self) -> None:
        """What belongs to this process: made anew in a forked child."""
        self._lock = threading.Lock()
        # Held where a request is put in the queue, and where the queue's end is: nothing comes behind the end.
        self._gate = threading.Lock()
        self._pending: set[Future[Arrays]] = set()
        self._queue: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._dispatcher: threading.Thread | None = None
        if self._steps is not None:
            if self._steps.stale:
                self._steps = StepCrew(self._steps.program, workers=self.workers, batched=self._as_filed["batched"])
            self._crew: Crew | StepCrew = self._steps
            _living.add(self)
            return
        self._crew = Crew(self._run, self._lowered, workers=self.workers, threads=self.threads, flags=self._flags,
                          cpus=self._cpus(), weights_cache=self._cache)
        _living.add(self)

    def _cpus(self) -> list[int] | None:
        if not self._pin or not hasattr(os, "sched_getaffinity"):
            return None
        # The last ones, since whatever else runs tends to be on the first.
        return sorted(os.sched_getaffinity(0), reverse=True)

    def _alive(self) -> Crew | StepCrew:
        if self._closed:
            raise ClosedError("this executor was closed")
        if self._crew.stale:
            with _starting:
                if self._crew.stale:
                    self._start()
        return self._crew

    # ---- running

    def run(self, *arrays: Any, out: Sequence[Array] | None = None) -> Arrays:
        """The results for a batch of samples.

        Parameters
        ----------
        *arrays : array_like
            One for each of :attr:`inputs`, of exactly that dtype. Axis 0 counts samples, as many as there
            are; inputs that all samples share have their own shape.
        out : sequence of numpy.ndarray, optional
            Contiguous arrays that receive the outputs and overlap neither an input nor one another.

        Returns
        -------
        tuple of numpy.ndarray
            New arrays that belong to the caller, or those of ``out``.

        Raises
        ------
        ArgumentError, DtypeError, ShapeError, OverlapError
            Something about the arrays, before any kernel runs.
        XnnpackError
            XNNPACK failed; ``error.sample`` is the first sample of the piece.
        """
        crew = self._alive()
        request = self._request(crew, arrays, out)
        with self._lock:
            self._process([request])
        return request.outputs[: len(self.outputs)]

    def _process(self, requests: list[_Request]) -> None:
        """Run requests of one variant; the lock is held."""
        crew = self._crew
        variant = requests[0].variant
        total = sum(request.rows for request in requests)
        if not total:
            return
        if crew.has_zero(variant):
            # Kernels index before they look at a dimension of 0: such samples never reach the engine.
            from . import reference

            for request in requests:
                for output, result in zip(request.outputs, reference.run(self._run, *request.inputs)):
                    np.copyto(output, result)
            return
        jobs = [(request.inputs, request.outputs, request.rows) for request in requests if request.rows]
        if self.threads > 1 and total < self.workers:
            crew.run(jobs, variant, total, 0, total, pooled=True)
        else:
            done = 0
            if self._micro_batch is None:
                self._tuner = self._tuner_of(variant)
                if not self._tuner.complete:
                    done = self._probe(crew, jobs, variant, total)
            if done < total:
                micro = self._divide(self._micro_batch or self._tuner.micro_batch, total - done)
                members = 1 if self._pace * (total - done) < ALONE else self.workers
                times = crew.run(jobs, variant, micro, done, total, members=members)
                if times:
                    self._pace = min(times) / micro / 1e9
        if len(requests) > 1:
            self._spread_shared(requests)
        if self._watched:
            for request in requests:
                self._recompute(request)
        if self.precision is not None and self.accuracy is None:
            self.accuracy = self._compare(jobs[0])

    def _recompute(self, request: _Request) -> None:
        """Samples of a program for which its graph is not enough, once more by the program itself."""
        layouts = self._crew.layouts
        odd: set[int] = set()
        for array, layout in zip(request.outputs[len(self.outputs):], layouts[len(self.inputs) + len(self.outputs):]):
            if np.isfinite(array).all():
                continue
            if layout is None:
                odd.update(range(request.rows))
            else:
                blocks = layout.blocks(layout.sized(array.shape, 1))
                finite = np.isfinite(array.reshape(blocks, request.rows, -1)).all(axis=(0, 2))
                odd.update(np.flatnonzero(~finite).tolist())
        batching = self._lowered.batching
        assert batching is not None and self._program is not None
        for sample in sorted(odd):
            # A program runs the batch that it was made for: all its samples are the one that is wanted.
            inputs = [array if layout is None else np.concatenate(
                [array[sample * layout.inner : (sample + 1) * layout.inner]] * batching.batch)
                for array, layout in zip(request.inputs, layouts)]
            results = self._program.run(*inputs)
            for array, layout, result in zip(request.outputs, layouts[len(self.inputs):], results):
                if layout is None:
                    array[...] = result
                else:
                    blocks = layout.blocks(layout.sized(array.shape, 1))
                    one = result.reshape(blocks, batching.batch, -1)[:, 0]
                    array.reshape(blocks, request.rows, -1)[:, sample] = one

    def _compare(self, job: tuple[Arrays, Arrays, int]) -> Accuracy:
        """The first samples of the first batch once more, in the file's own precision."""
        inputs, outputs, rows = job
        count = min(rows, COMPARED)
        layouts = self._crew.layouts
        few = [array if layout is None else array[: count * layout.inner] for array, layout in zip(inputs, layouts)]
        with Executor(self.graph, workers=self.workers, micro_batch=1, **self._as_filed) as executor:
            want = executor.run(*few)[: len(self.outputs)]
        got = [array if layout is None else _first(array, layout, rows, count)
               for array, layout in zip(outputs, layouts[len(inputs):])]
        return Accuracy.of(str(self.precision), got, want, count)

    def _divide(self, micro: int, rows: int) -> int:
        """Samples per piece: a little less than the best where that makes the workers' shares equal."""
        rounds = -(-rows // (micro * self.workers))
        if rounds > 4 or micro == 1 or self._lowered.pinned:
            return min(micro, rows)
        return min(micro, -(-rows // (rounds * self.workers)))

    def _spread_shared(self, requests: list[_Request]) -> None:
        """Outputs that don't depend on the batch were written for one request alone."""
        for position in range(len(requests[0].outputs)):
            if self._crew.layouts[len(self.inputs) + position] is None:
                for request in requests[1:]:
                    np.copyto(request.outputs[position], requests[0].outputs[position])

    # ---- the size of a piece

    def _tuner_of(self, variant: tuple[Any, ...]) -> _Tuner:
        if self._steps is not None:
            return self._tuner
        tuner = self._tuners.get(variant)
        if tuner is None:
            known = self._run.caches.setdefault("micro_batch", {}).get(self._key(variant))
            tuner = _Tuner(dict(known.timings), known.complete, "cache") if known is not None else _Tuner()
            if len(self._tuners) >= 64:
                # Several threads may come here at once.
                self._tuners.pop(list(self._tuners)[0], None)  # noqa: RUF015
            self._tuners[variant] = tuner
        return tuner

    def _window(self, tuner: _Tuner) -> int:
        """How many samples of small batches are worth running together: enough for the next try too."""
        return 4 * self.workers * (
            self._micro_batch or (tuner.micro_batch if tuner.complete else max(tuner.micro_batch, tuner.candidate())))

    def _key(self, variant: tuple[Any, ...]) -> tuple[Any, ...]:
        return self._flags, self.workers, variant

    def _probe(self, crew: Crew | StepCrew, jobs: list[Any], variant: tuple[Any, ...], total: int) -> int:
        """Try sizes on the batch at hand, whose results count; how many samples that took."""
        self._run.caches.setdefault("micro_batch", {})[self._key(variant)] = self._tuner
        tuner, done, begun = self._tuner, 0, time.perf_counter()
        while not tuner.complete:
            size = tuner.candidate()
            room = (total - done) // (self.workers * size)
            if room < 2:
                # A later, larger batch goes on from here.
                return done
            seconds, rounds = math.inf, 3
            for _ in range(2):
                stop = done + self.workers * size * min(rounds, room)
                try:
                    times = crew.run(jobs, variant, size, done, stop)
                except MemoryError:
                    # Of LimitError and XnnpackMemoryError this is the base. Nothing has run: memory comes before.
                    if size == 1:
                        raise
                    tuner.complete = True
                    crew.trim()
                    return done
                done, room = stop, (total - stop) // (self.workers * size)
                if times:
                    seconds = min(seconds, sum(times) / len(times) / size / 1e9)
                # Three short pieces say little; a millisecond of them says more.
                rounds = min(64, math.ceil(1e-3 / (seconds * size)))
                if rounds <= 3 or room < 2:
                    break
            if seconds == math.inf:
                return done
            tuner.add(size, seconds)
            best = min(tuner.timings.values())
            allowed = max(PROBE_SECONDS, PROBE_SHARE * best * total / self.workers)
            tuner.complete = tuner.complete or time.perf_counter() - begun > allowed
        if tuner.micro_batch < max(tuner.timings):
            # Engines don't give memory back when they go down to a smaller size.
            crew.trim()
        return done

    @property
    def plan(self) -> Plan:
        """How the latest batch was divided."""
        tuner = self._tuner
        timings = {size: seconds * 1e6 for size, seconds in sorted(tuner.timings.items())}
        if self._micro_batch is not None:
            return Plan(self._micro_batch, "given", timings, True, self.workers, self._reason, self.threads)
        return Plan(tuner.micro_batch, tuner.source, timings, tuner.complete, self.workers, self._reason, self.threads)

    # ---- arrays

    def _request(self, crew: Crew | StepCrew, arrays: tuple[Any, ...], out: Sequence[Array] | None = None,
                 index: int | None = None) -> _Request:
        """The arrays of a call, checked, with arrays for its results."""
        if len(arrays) != len(self.inputs):
            raise ArgumentError(f"need {len(self.inputs)} input{'s' * (len(self.inputs) != 1)}, got {len(arrays)}")
        rows: int | None = None
        inputs, variant = [], []
        for position, (given, layout) in enumerate(zip(arrays, crew.layouts)):
            array = self._array(position, given, crew.dtypes[position])
            if layout is None:
                variant.append(array.shape)
            else:
                count, odd = divmod(array.shape[0], layout.inner)
                if odd:
                    raise ShapeError(f"input {position}: need a multiple of {layout.inner} rows, {layout.inner} for "
                                     f"each sample, got shape {array.shape}", expected=layout.inner, got=array.shape)
                if rows is None:
                    rows = count
                elif count != rows:
                    raise ShapeError(f"input {position} holds {count} samples, inputs before it hold {rows}",
                                     expected=rows, got=count)
                variant.append(array.shape[1:])
            inputs.append(array)
        assert rows is not None
        key = tuple(variant)
        # What all samples share, and what lies scattered in a sample, has to be in one piece.
        for position, (array, layout) in enumerate(zip(inputs, crew.layouts)):
            if not _usable(array, layout):
                held = empty(array.shape, crew.dtypes[position])
                np.copyto(held, array)
                inputs[position] = held
                self.staged += 1
        outputs = crew.new_outputs(key, rows) if out is None else self._checked_out(crew, out, key, rows, inputs)
        return _Request(self, tuple(inputs), outputs, rows, key, index=index)

    def _array(self, position: int, given: Any, want: np.dtype[Any]) -> Array:
        """The input as an array of the right dtype and rank, in whatever layout; never a change of value."""
        where = f"input {position} (value {self.inputs[position].id})"
        if isinstance(given, np.ndarray):
            array = given
        elif hasattr(given, "__dlpack__") and not isinstance(given, np.generic):
            try:
                array = np.from_dlpack(given)
            except (BufferError, RuntimeError, TypeError) as error:
                raise DtypeError(f"{where}: NumPy can't take it through DLPack: {error}", expected=want) from error
        else:
            try:
                array = np.asarray(given)
            except (TypeError, ValueError) as error:
                kind = type(given).__name__
                raise DtypeError(f"{where}: need an array of {want}, got {kind}: {error}", expected=want,
                                 got=kind) from error
        if array.dtype != want and array.dtype.newbyteorder("=") != want:
            raise DtypeError(f"{where}: need dtype {want}, got {array.dtype}", expected=want, got=array.dtype)
        declared = self.inputs[position].shape
        if array.ndim != len(declared):
            raise ShapeError(f"{where}: need rank {len(declared)} as in {text(declared)}, got shape {array.shape}",
                             expected=declared, got=array.shape)
        return array

    def _checked_out(self, crew: Crew | StepCrew, out: Sequence[Array], variant: tuple[Any, ...], rows: int,
                     inputs: list[Array]) -> Arrays:
        if not isinstance(out, (list, tuple)) or len(out) != len(self.outputs):
            found = f"{len(out)} of them" if isinstance(out, (list, tuple)) else type(out).__name__
            raise ArgumentError(f"out: need a list or tuple of {len(self.outputs)} arrays, got {found}")
        for j, (array, shape, want) in enumerate(zip(out, crew.output_shapes(variant, rows),
                                                     crew.dtypes[len(self.inputs):])):
            if not isinstance(array, np.ndarray):
                raise ArgumentError(f"out[{j}]: need a numpy.ndarray, got {type(array).__name__}")
            if array.dtype != want:
                raise DtypeError(f"out[{j}]: need dtype {want}, got {array.dtype}", expected=want, got=array.dtype)
            if array.shape != shape:
                raise ShapeError(f"out[{j}]: need shape {shape}, got {array.shape}", expected=shape, got=array.shape)
            if not array.flags.carray:
                flags = array.flags
                raise ArgumentError(f"out[{j}]: need a C-contiguous, aligned, writeable array, got strides "
                                    f"{array.strides}, writeable={flags.writeable}, aligned={flags.aligned}")
            for name, others in (("input ", inputs), ("out", out[:j])):
                for k, other in enumerate(others):
                    if np.may_share_memory(array, other):
                        raise OverlapError(f"out[{j}] shares memory with {name}{k if name != 'out' else f'[{k}]'}")
        return (*out, *crew.new_outputs(variant, rows)[len(out):]) if self._watched else tuple(out)

    # ---- many calls

    def submit(self, *arrays: Any) -> Future[Arrays]:
        """A future of what :meth:`run` gives. Small batches that wait together are run together.

        Parameters
        ----------
        *arrays : array_like
            As for :meth:`run`. They are read until the result is there, and kept alive so long.

        Returns
        -------
        concurrent.futures.Future
            Its result is a tuple of new arrays.

        Raises
        ------
        ArgumentError, DtypeError, ShapeError
            At once, if something about the arrays is wrong.
        ClosedError
            The executor was closed.
        """
        return self._submit(arrays, None)

    def _submit(self, arrays: tuple[Any, ...], index: int | None, out: Sequence[Array] | None = None) -> Future[Arrays]:
        crew = self._alive()
        request = self._request(crew, arrays, out, index)
        future: Future[Arrays] = Future()
        request.future = future
        with self._gate:
            if self._closed:
                raise ClosedError("this executor was closed")
            if self._dispatcher is None:
                # A daemon, and with no reference to the executor while it waits: neither keeps the other.
                dispatcher = threading.Thread(target=_dispatch, args=(self._queue,), name="xnnfast-executor",
                                              daemon=True)
                try:
                    dispatcher.start()
                except RuntimeError as error:
                    raise LimitError(f"need a thread for what is submitted: {error}") from error
                self._dispatcher = dispatcher
            self._pending.add(future)
            future.add_done_callback(self._pending.discard)
            self._queue.put(request)
        return future

    def _serve(self, first: _Request) -> _Request | None:
        """Answer a request and those that wait behind it and can run with it; the one that can't, if any."""
        together, following, rows = [first], None, first.rows
        limit = self._window(self._tuner_of(first.variant))
        while rows < limit:
            try:
                following = self._queue.get_nowait()
            except queue.Empty:
                break
            if following is None:
                # The end: what stands here is answered first.
                self._queue.put(None)
                break
            if not self._joins(first, following):
                break
            together.append(following)
            rows += following.rows
            following = None
        requests = [request for request in together
                    if request.future is not None and request.future.set_running_or_notify_cancel()]
        if requests:
            self._answer(requests)
        return following

    def _answer(self, requests: list[_Request]) -> None:
        """Run requests together; where that fails, each by itself, so that none fails for another's sake."""
        failure: BaseException | None = None
        try:
            with self._lock:
                self._process(requests)
        except BaseException as error:
            failure = error
        if failure is not None and len(requests) > 1:
            for request in requests:
                self._answer([request])
            return
        for request in requests:
            assert request.future is not None
            if failure is None:
                request.future.set_result(request.outputs[: len(self.outputs)])
                continue
            if isinstance(failure, XnnfastError):
                failure.item = request.index  # type: ignore[attr-defined]
            request.future.set_exception(failure)

    def _joins(self, first: _Request, other: _Request) -> bool:
        """Whether two requests can run together: shapes agree, and what all samples share is the same array."""
        return first.variant == other.variant and all(
            one is two for one, two, layout in zip(first.inputs, other.inputs, self._crew.layouts) if layout is None)

    def map(self, iterable: Iterable[Any], *, ordered: bool = True, prefetch: int | None = None) -> Iterator[Any]:
        """Results of a stream of batches, in a bounded amount of memory.

        Parameters
        ----------
        iterable
            Arrays, or tuples of arrays for graphs with several inputs, each a batch as :meth:`run` takes it.
            It is read in the calling thread, ahead of the results.
        ordered : bool, default True
            Give results in the order of the batches; if not, pairs ``(position, results)`` as they come.
        prefetch : int, optional
            How many batches may be under way. By default at least 2, and so many that all workers
            have work.

        Yields
        ------
        tuple of numpy.ndarray
            What :meth:`run` gives.

        Raises
        ------
        ArgumentError
            ``prefetch`` is not positive.
        XnnfastError
            What :meth:`run` raises for a batch, when its turn comes, after the results of the batches before it;
            ``error.item`` is the batch's position.
        """
        if prefetch is not None and (not isinstance(prefetch, (int, np.integer)) or prefetch < 1):
            raise ArgumentError(f"need prefetch of at least 1, got {prefetch!r}")
        self._alive()
        return self._map(iter(iterable), ordered, prefetch)

    def _map(self, batches: Iterator[Any], ordered: bool, prefetch: int | None) -> Iterator[Any]:
        waiting: deque[tuple[int, Future[Arrays], int]] = deque()
        finished: queue.SimpleQueue[tuple[int, Future[Arrays]]] = queue.SimpleQueue()
        unfinished: dict[int, Future[Arrays]] = {}
        rows = 0

        def full() -> bool:
            under_way = len(waiting) if ordered else len(unfinished)
            if prefetch is not None:
                return under_way >= prefetch
            return under_way >= 2 and rows >= self._window(self._tuner)

        def next_result() -> Any:
            nonlocal rows
            if ordered:
                _, future, size = waiting.popleft()
                rows -= size
                return future.result()
            position, future = finished.get()
            del unfinished[position]
            rows -= sizes.pop(position)
            return position, future.result()

        sizes: dict[int, int] = {}
        failure: Exception | None = None
        try:
            for position in itertools.count():
                try:
                    item = next(batches)
                except StopIteration:
                    break
                except Exception as error:
                    failure = error
                    break
                arrays = item if isinstance(item, (tuple, list)) else (item,)
                try:
                    future = self._submit(tuple(arrays), position)
                except Exception as error:
                    if isinstance(error, XnnfastError):
                        error.item = position  # type: ignore[attr-defined]
                    failure = error
                    break
                size = max((len(array) for array in arrays if hasattr(array, "__len__") and np.ndim(array)), default=1)
                rows += size
                if ordered:
                    waiting.append((position, future, size))
                else:
                    unfinished[position] = future
                    sizes[position] = size
                    future.add_done_callback(functools.partial(_put, finished, position))
                while full():
                    yield next_result()
            while waiting or unfinished:
                yield next_result()
            if failure is not None:
                raise failure
        finally:
            for _, future, _ in waiting:
                future.cancel()
            for future in unfinished.values():
                future.cancel()

    # ---- the rest

    @property
    def layouts(self) -> tuple[Layout | None, ...]:
        """Where inputs, then outputs, hold the samples; None for what all samples share."""
        return self._crew.layouts[: len(self.inputs) + len(self.outputs)]

    @property
    def dtypes(self) -> tuple[np.dtype[Any], ...]:
        """Of the arrays of inputs, then outputs."""
        return self._crew.dtypes[: len(self.inputs) + len(self.outputs)]

    @property
    def weights_cache(self) -> str:
        """What became of the cache of packed weights: see :attr:`Runtime.weights_cache`."""
        return self._crew.weights_cache

    @property
    def memory(self) -> dict[str, int]:
        """Bytes: ``mapped`` constants used in place, ``copied`` constants, ``packed`` weights (once for all workers),
        ``workspace`` of all workers, ``staging`` buffers."""
        constants = self.graph.constants if self.graph is not None else ()
        return {
            "mapped": sum(constant.nbytes for constant in constants if constant.in_place),
            "copied": sum(constant.nbytes for constant in constants if not constant.in_place),
            **self._crew.memory,
        }

    def trim(self) -> None:
        """Give back workspaces and buffers; the next call plans anew."""
        crew = self._alive()
        with self._lock:
            crew.trim()

    def close(self) -> None:
        """Answer what was submitted, stop the threads, free everything; later calls raise ClosedError."""
        if self._closed:
            return
        if self._crew.stale:
            self._closed = True
            return
        with self._gate:
            if self._closed:
                return
            self._closed = True
            dispatcher = self._dispatcher
            if dispatcher is not None:
                self._queue.put(None)
        if dispatcher is not None and dispatcher is not threading.current_thread():
            dispatcher.join()
        with self._lock:
            self._crew.close()

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and self._dispatcher is not None:
            self._queue.put(None)

    def __reduce__(self) -> Any:
        from .pickling import again, weights_cache_option

        if self._closed:
            raise ClosedError("this executor was closed")
        source = self.graph if self._program is None else self._program
        return again, (type(self), (source,), {
            # The number that was given: None counts CPUs where the executor will run.
            "workers": self.workers if self._reason == GIVEN else None, "threads": self.threads,
            "micro_batch": self._micro_batch, "precision": self.precision, **self._as_filed, "pin": self._pin,
            "weights_cache": weights_cache_option(self._cache)})

    def __repr__(self) -> str:
        return f"Executor({self.graph or self._program!r}, workers={self.workers}, threads={self.threads})"


def model_of(source: Any, weights_cache: Any = None) -> Graph | Program:
    """The graph in a path or buffer, or the program where it is more than one graph; one that is opened as it is."""
    from .load import load
    from .program import Program

    if isinstance(source, (Graph, Program)):
        return source
    try:
        return load(source)
    except UnsupportedError:
        return Program(source, weights_cache=weights_cache)


def _opened(source: Any, weights_cache: Any) -> tuple[Graph | None, int, Program | None]:
    """A graph, how many of its last outputs are watched values, and the program that it stands for. Without a graph the
    program runs in steps."""
    model = model_of(source, weights_cache)
    if isinstance(model, Graph):
        return model, 0, None
    from .whole import whole

    try:
        return *whole(model), model
    except UnsupportedError:
        model.method("forward").require_operators()
        return None, 0, model


def _first(array: Array, layout: Layout, rows: int, count: int) -> Array:
    """The first of so many samples of an output."""
    blocks = layout.blocks(layout.sized(array.shape, 1))
    first = array.reshape(blocks, rows, -1)[:, :count]
    return first.reshape(layout.sized(array.shape, count))


def _usable(array: Array, layout: Any) -> bool:
    """Whether the samples of an input can be taken from where they are."""
    flags = array.flags
    if not flags.aligned or not array.dtype.isnative:
        return False
    if layout is None:
        return bool(flags.c_contiguous and is_ready(array))
    if flags.c_contiguous:
        return True
    # Samples may lie apart from one another, in either direction, but each has to be in one piece.
    return bool(layout.inner == 1 and (array.shape[0] == 0 or array[0].flags.c_contiguous))


def _put(finished: queue.SimpleQueue[tuple[int, Future[Arrays]]], position: int, future: Future[Arrays]) -> None:
    finished.put((position, future))


def _dispatch(requests: queue.SimpleQueue[_Request | None]) -> None:
    """Main loop of the thread behind submit."""
    request: _Request | None = None
    while True:
        if request is None:
            request = requests.get()
        if request is None:
            return
        request = request.owner._serve(request)


#: Executors of this process, for its forked children.
_living: weakref.WeakSet[Executor] = weakref.WeakSet()
#: Held while an executor starts anew in a forked child.
_starting = threading.Lock()


def _after_fork() -> None:
    """In a child: whoever waits for a future of the parent would wait for ever."""
    global _starting
    _starting = threading.Lock()
    for executor in list(_living):
        for future in list(executor._pending):
            if not future.done():
                # Its lock may be held by a thread that does not exist here.
                Future.__init__(future)
                future.set_exception(ClosedError("submitted before a fork: the parent process has the answer"))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
