"""``xnnfast batch``: samples from files through a graph into files, on every allowed core."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from .. import batch_io
from ..errors import ArgumentError, XnnfastError
from ..ops._rules import text
from .commands import Cache, CommandError, Dialect, File, _load, _targets, app, cache_place

if TYPE_CHECKING:
    from concurrent.futures import Future

    from ..executor import Executor

    Array = np.ndarray[Any, np.dtype[Any]]

#: Bytes of input that a step reads at first, and at most; in between, steps grow to this many seconds.
FIRST_BYTES, MOST_BYTES = 4 << 20, 64 << 20
STEP_SECONDS = 0.3
#: How often, in seconds, results are made to survive a loss of power.
SYNC_SECONDS = 10.0

TERMINATED = 143


def batch(
    model: File,
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="[NAME=]INPUT[:KEY]...",
            help="Arrays whose axis 0 counts samples, for the graph's inputs in their order or by position (0=x.npy). "
            "KEY picks one of several arrays in a file, DTYPE:2x3x4 tells what a raw file holds.",
        ),
    ],
    output: Annotated[
        list[str],
        typer.Option(
            "--output",
            "-o",
            metavar="OUT",
            help="Where results go: once per output, one name with {} in it, or one file that can hold several arrays.",
        ),
    ],
    batch: Annotated[int | None, typer.Option(min=1, help="Samples per step, done whole or not at all.")] = None,
    micro_batch: Annotated[int | None, typer.Option(min=1, help="Samples per piece of a worker; default: try.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Default: as many as this process may use CPUs.")] = None,
    precision: Annotated[
        str | None, typer.Option(metavar="fp16|int8-dynamic", help="Compute with less than the file's precision.")
    ] = None,
    normalize: Annotated[
        str | None,
        typer.Option(
            metavar="SCALE[,...]:OFFSET[,...]",
            help="Feed x * SCALE + OFFSET of integer inputs to float ones; several numbers: one per channel.",
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where a run that was cut short stopped.")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Forget what such a run has done.")] = False,
    pin: Annotated[bool, typer.Option("--pin", help="Keep each worker on one CPU.")] = False,
    dialect: Dialect = None,
    cache: Cache = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
) -> int:
    """Run a graph over any number of samples, from files to files. Prints a summary in JSON.

    Files: .npy .raw .safetensors (mapped), .npz, .arrow .parquet. Outputs take their names when they are whole.
    """
    from ..executor import Executor

    if resume and restart:
        raise CommandError("--resume and --restart exclude each other")
    # A program may need more than load can do; the executor finds out.
    source = model if dialect is None else _load(model, dialect)
    try:
        executor = Executor(
            source,
            workers=workers,
            micro_batch=micro_batch,
            precision=precision,
            pin=pin,
            weights_cache=cache_place(cache),
        )
    except ArgumentError:
        raise
    except XnnfastError as error:
        message = str(error)
        raise CommandError(message if message.startswith(str(model)) else f"{model}: {message}") from error
    with executor:
        job = _Job(model, executor, inputs, output, normalize, precision, dialect)
        with _terminable(), batch_io.Journal(job.journal_path) as journal:
            job.open(journal, resume, restart)
            try:
                job.work(journal, batch, quiet)
                job.finish(journal)
            except BaseException as error:
                return _cut_short(job, journal, error)
        print(json.dumps(job.summary(), indent=2, allow_nan=False))
    return 0


def _cut_short(job: _Job, journal: batch_io.Journal, error: BaseException) -> int:
    """What is done is kept; say so, and what to do."""
    from . import INTERRUPTED, fail

    if not job.done:
        job.discard(journal)
        raise error
    kept = f"{job.done} of {job.rows} samples are done and kept, --resume goes on from there"
    if isinstance(error, KeyboardInterrupt):
        fail(f"interrupted: {kept}")
        return INTERRUPTED
    if isinstance(error, SystemExit):
        fail(f"terminated: {kept}")
        return TERMINATED
    if isinstance(error, OSError):
        raise CommandError(f"{error.filename or job.targets[0].path}: {error.strerror or error}; {kept}") from error
    if isinstance(error, MemoryError) and not isinstance(error, XnnfastError):
        raise CommandError(f"out of memory; {kept}") from error
    if isinstance(error, XnnfastError):
        raise CommandError(f"{error}; {kept}") from error
    raise error


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM as an exception, so that it leaves the same state as Ctrl-C."""

    def stop(*_: object) -> None:
        raise SystemExit(TERMINATED)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Job:
    """Inputs, outputs and what stands between them, for one run of the command."""

    def __init__(
        self,
        model: Path,
        executor: Executor,
        inputs: list[str],
        output: list[str],
        normalize: str | None,
        precision: str | None,
        dialect: str | None,
    ) -> None:
        self.executor = executor
        self.done = self.resumed = 0
        self.seconds = 0.0
        crew = executor._crew
        self.layouts = crew.layouts[: len(executor.inputs)]
        specs = [
            batch_io.Spec(value.datatype, dtype, value.shape) for value, dtype in zip(executor.inputs, crew.dtypes)
        ]
        self.sources = batch_io.open_inputs(inputs, specs, [str(position) for position in range(len(specs))])
        self.normalize = [_Normalize.of(normalize, source, spec) for source, spec in zip(self.sources, specs)]
        if normalize is not None and not any(self.normalize):
            raise CommandError("--normalize: every input has the graph's dtype already")
        self.rows = self._count()
        self.variant = tuple(
            source.shape if layout is None else source.shape[1:] for source, layout in zip(self.sources, self.layouts)
        )
        shapes = crew.output_shapes(self.variant, self.rows)
        made = [
            batch_io.Spec(value.datatype, dtype, shape)
            for value, dtype, shape in zip(executor.outputs, crew.dtypes[len(specs) :], shapes)
        ]
        self.placed = crew.layouts[len(specs) : len(specs) + len(made)]
        for position, layout in enumerate(self.placed):
            if layout is not None and layout.outer > 1 and self.rows > 1:
                raise CommandError(
                    f"output {position} holds samples between one another on axis {layout.axis}: it "
                    "can't be written in steps"
                )
        self.targets = _make_targets(output, made)
        for position, (layout, spec) in enumerate(zip(self.placed, made)):
            tabular = layout is not None and layout.axis == 0 and layout.unit == 1
            if not tabular and self.targets[0].suffix in batch_io.TABLES:
                raise CommandError(
                    f"output {position} ({text(spec.shape)}) has no row for each sample, which a table needs"
                )
        for target in self.targets:
            if not target.path.exists():
                continue
            if os.path.samefile(target.path, model):
                raise CommandError(f"{target.path} is the model")
            if any(os.path.samefile(target.path, source.path) for source in self.sources):
                raise CommandError(f"{target.path} is an input")
        self.journal_path = batch_io.journal_path(self.targets[0].path)
        self.identity = {
            "model": _identity(model),
            "dialect": dialect,
            "inputs": [
                [*_identity(Path(source.path)), source.key, source.dtype.str, list(source.shape)]
                for source in self.sources
            ],
            "outputs": [[target.path.name, [list(spec.shape) for spec in target.specs]] for target in self.targets],
            "normalize": normalize,
            "precision": precision,
            "rows": self.rows,
        }

    def _count(self) -> int:
        rows = None
        for position, (source, layout) in enumerate(zip(self.sources, self.layouts)):
            if layout is None:
                continue
            if not source.shape or source.shape[0] % layout.inner:
                raise CommandError(
                    f"{source.where}: need {layout.inner} rows for each sample on axis 0, found shape "
                    f"{text(source.shape)}"
                )
            count = source.shape[0] // layout.inner
            if rows is not None and count != rows:
                raise CommandError(f"{source.where} holds {count} samples, inputs before it hold {rows}")
            rows = count
            declared = self.executor.inputs[position].shape
            if len(declared) != len(source.shape):
                raise CommandError(
                    f"{source.where}: need rank {len(declared)} as in {text(declared)}, found shape "
                    f"{text(source.shape)}"
                )
        assert rows is not None
        return rows

    # ---- state on disk

    def open(self, journal: batch_io.Journal, resume: bool, restart: bool) -> None:
        """Find out what is done, and make room for the rest."""
        before = journal.open(forget=restart)
        if before is not None:
            if not resume:
                done = sum(stop - start for start, stop in journal.done)
                raise CommandError(
                    f"{self.targets[0].path}: a run before did {done} of {before.get('rows')} samples: "
                    "--resume goes on, --restart forgets it"
                )
            for what, value in self.identity.items():
                if before.get(what) != value:
                    raise CommandError(
                        f"{self.targets[0].path}: the run before had other {what}, {before.get(what)}; "
                        f"now {value}: --restart forgets it"
                    )
            if journal.finishing or all(target.is_reserved for target in self.targets):
                self.done = self.resumed = sum(stop - start for start, stop in journal.done)
                return
        try:
            journal.begin(self.identity)
            for target in self.targets:
                target.discard()
                target.reserve()
        except OSError as error:
            self.discard(journal)
            need = sum(target.nbytes for target in self.targets)
            if error.errno == errno.EFBIG:
                raise CommandError(f"{self.targets[0].path}: need {need} bytes: {error.strerror}") from error
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                free = shutil.disk_usage(self.targets[0].path.parent).free
                raise CommandError(f"{self.targets[0].path}: need {need} bytes of space, {free} are free") from error
            raise

    def discard(self, journal: batch_io.Journal) -> None:
        for target in self.targets:
            target.discard()
        journal.discard()

    def finish(self, journal: batch_io.Journal) -> None:
        if not journal.finishing:
            for target in self.targets:
                target.sync()
            journal.finish()
        for target in self.targets:
            # One that has its name already was finished before the run was cut short.
            if target.is_reserved or not target.path.exists():
                target.finish()
        journal.discard()

    # ---- the work

    def work(self, journal: batch_io.Journal, step: int | None, quiet: bool) -> None:
        if journal.finishing:
            return
        begun = time.perf_counter()
        arrays = [array for target in self.targets for array in target.arrays()]
        shared = [self.read(position, 0, 0) if layout is None else None for position, layout in enumerate(self.layouts)]
        direct = all(
            layout is not None and layout.blocks(array.shape) == 1 for array, layout in zip(arrays, self.placed)
        )
        under_way: deque[tuple[Future[Any], int, int, list[Any], float]] = deque()
        size = step or self.first_step()
        synced = begun

        def wait() -> None:
            nonlocal size, synced
            future, start, stop, outs, since = under_way.popleft()
            self.store(future.result(), outs, arrays, start, stop)
            now = time.perf_counter()
            if now - synced > SYNC_SECONDS:
                for target in self.targets:
                    target.sync()
                journal.add(start, stop)
                journal.synced()
                synced = now
            else:
                journal.add(start, stop)
            self.done += stop - start
            show(stop - start)
            if step is None:
                size = self.next_step(stop - start, now - since, size)

        with _progress(self.rows, self.done, quiet) as show:
            for start, stop in batch_io.missing(journal.done, self.rows):
                while start < stop:
                    end = min(stop, start + size)
                    inputs = [
                        self.read(position, start, end) if given is None else given
                        for position, given in enumerate(shared)
                    ]
                    outs = [self.place(array, layout, start, end) for array, layout in zip(arrays, self.placed)]
                    held = () if direct else self.executor._crew.new_outputs(self.variant, end - start)
                    out = [held[position] if each is None else each for position, each in enumerate(outs)]
                    since = time.perf_counter()
                    under_way.append((self.executor._submit(tuple(inputs), None, out), start, end, outs, since))
                    # While one step runs the next is read and normalised.
                    while len(under_way) > 1:
                        wait()
                    start = end
            while under_way:
                wait()
        self.seconds = time.perf_counter() - begun

    def read(self, position: int, start: int, stop: int) -> Array:
        """Some samples of an input, or all of it where all samples share it."""
        source, layout, normalize = self.sources[position], self.layouts[position], self.normalize[position]
        array = (
            source.read(0, source.shape[0])
            if layout is None
            else source.read(start * layout.inner, stop * layout.inner)
        )
        return array if normalize is None else normalize(array)

    def place(self, array: Array, layout: Any, start: int, stop: int) -> Array | None:
        """Where the results of some samples go, if that is in one piece."""
        if layout is None or layout.blocks(array.shape) != 1:
            return None
        row = array.size // self.rows
        shape: tuple[int, ...] = layout.sized(array.shape, stop - start)
        return array.reshape(-1)[start * row : stop * row].reshape(shape)

    def store(self, results: Any, outs: list[Any], arrays: list[Array], start: int, stop: int) -> None:
        for result, out, array, layout in zip(results, outs, arrays, self.placed):
            if out is not None:
                continue
            if layout is None:
                array[...] = result
            else:
                array[(slice(None),) * layout.axis + (slice(start * layout.inner, stop * layout.inner),)] = result

    def first_step(self) -> int:
        return max(16 * self.executor.workers, FIRST_BYTES // self.row_bytes())

    def row_bytes(self) -> int:
        return max(
            1,
            sum(
                source.dtype.itemsize * int(np.prod(source.shape[1:], dtype=np.int64)) * layout.inner
                for source, layout in zip(self.sources, self.layouts)
                if layout is not None
            ),
        )

    def next_step(self, rows: int, seconds: float, size: int) -> int:
        """Steps of about the wanted time; two are under way at once, so that one lasted half of what was measured."""
        if seconds < STEP_SECONDS and rows == size:
            return max(size, min(2 * size, MOST_BYTES // self.row_bytes()))
        if seconds > 6 * STEP_SECONDS and size > self.executor.workers:
            return max(self.executor.workers, size // 2)
        return size

    def summary(self) -> dict[str, Any]:
        plan = self.executor.plan
        computed = self.done - self.resumed
        accuracy = getattr(self.executor, "accuracy", None)
        return {
            "samples": self.rows,
            "resumed": self.resumed,
            "seconds": round(self.seconds, 3),
            "samples_per_second": round(computed / self.seconds, 1) if self.seconds and computed else None,
            "workers": plan.workers,
            "micro_batch": plan.micro_batch,
            "weights_cache": self.executor.weights_cache,
            "precision": self.identity["precision"],
            "accuracy": accuracy.as_dict() if accuracy is not None else None,
            "outputs": [
                {"file": str(target.path), "name": name, "dtype": str(spec.dtype), "shape": list(spec.shape)}
                for target in self.targets
                for name, spec in zip(target.names, target.specs)
            ],
        }


def _make_targets(output: list[str], specs: list[batch_io.Spec]) -> list[batch_io.Target]:
    names = [f"output_{position}" for position in range(len(specs))]
    one = Path(output[0])
    several = len(specs) > 1 or one.suffix.lower() in (".npz", ".safetensors", *batch_io.TABLES)
    if len(output) == 1 and "{}" not in output[0] and several:
        targets = [batch_io.Target(one, names, specs)]
    else:
        paths = _targets(output, len(specs))
        targets = [
            batch_io.Target(path, [name], [spec], batch_io.journal_path(paths[0]) if paths[0].name else None)
            for path, name, spec in zip(paths, names, specs)
        ]
    for target in targets:
        if not target.path.parent.is_dir():
            raise CommandError(f"{target.path}: the folder {target.path.parent} is not there")
    return targets


def _identity(path: Path) -> list[Any]:
    """What tells a file from another: name, size, time of the last change, and of small files the content."""
    status = os.stat(path)
    content = hashlib.sha256(path.read_bytes()).hexdigest() if status.st_size < 1 << 20 else None
    # The content says more than the time, which a copy may change.
    return [path.name, status.st_size, content or status.st_mtime_ns]


class _Normalize:
    """``x * scale + offset`` in the graph's dtype, channel by channel where there are several numbers."""

    def __init__(self, scale: Array, offset: Array, dtype: np.dtype[Any]) -> None:
        self.scale, self.offset, self.dtype = scale, offset, dtype

    @staticmethod
    def of(words: str | None, source: batch_io.Source, spec: batch_io.Spec) -> _Normalize | None:
        """What one input needs; None where its dtype is right as it is."""
        if source.dtype == spec.dtype or source.dtype.newbyteorder("=") == spec.dtype:
            return None
        if spec.dtype.kind != "f" or source.dtype.kind not in "iu":
            raise CommandError(f"{source.where}: need {spec.dtype}, found {source.dtype}")
        if words is None:
            raise CommandError(
                f"{source.where}: need {spec.dtype}, found {source.dtype}; --normalize SCALE:OFFSET "
                "makes floats of integers"
            )
        left, _, right = words.partition(":")
        try:
            scale, offset = (
                np.array([float(number) for number in part.split(",")], np.float32) for part in (left, right or "0")
            )
        except ValueError:
            raise CommandError(
                f"--normalize: need numbers as in 0.00392 or 0.017,0.018,0.017:-2.1,-2.0,-1.8, found {words!r}"
            ) from None
        count = max(len(scale), len(offset))
        if not {len(scale), len(offset)} <= {1, count}:
            raise CommandError(f"--normalize: need as many offsets as scales, found {len(offset)} and {len(scale)}")
        shape = [1] * len(source.shape)
        if count > 1:
            axes = [axis for axis in range(1, len(source.shape)) if source.shape[axis] == count]
            if len(axes) != 1:
                raise CommandError(f"--normalize: need one axis of {count} channels, found {text(source.shape)}")
            shape[axes[0]] = count
        scale, offset = (np.broadcast_to(part, count).reshape(shape).astype(spec.dtype) for part in (scale, offset))
        return _Normalize(scale, offset, spec.dtype)

    def __call__(self, array: Array) -> Array:
        from .._runtime import empty

        made = empty(array.shape, self.dtype)
        np.multiply(array, self.scale, out=made, casting="unsafe", dtype=self.dtype)
        made += self.offset
        return made


@contextmanager
def _progress(total: int, done: int, quiet: bool) -> Iterator[Any]:
    """A function to call with every number of samples that is done; a bar, if somebody is looking."""
    if quiet or not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Any) -> Text:
            return Text(f"{task.speed:,.0f}/s" if task.speed else "")

    with Progress(
        TextColumn("samples"),
        BarColumn(),
        MofNCompleteColumn(),
        Rate(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task("", total=total, completed=done)
        yield lambda count: bar.advance(task, count)


app.command()(batch)
