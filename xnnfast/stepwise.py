"""A crew for programs that do not come down to one graph: each worker has the program, and takes sample after sample.

In come arrays whose axis 0 counts samples; out go the same samples' results, written into arrays that exist already.
It does what ``_executor.Crew`` does for graphs, with the same methods, one sample at a time: a program made for a batch
of one can't mix its samples, whatever its steps are.
"""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ._runtime import empty
from .batching import Layout
from .datatypes import DATATYPES
from .errors import ArgumentError, ClosedError, ShapeError, UnsupportedError, XnnfastError
from .ops._rules import text

if TYPE_CHECKING:
    from .program import Port, Program

    Array = np.ndarray[Any, np.dtype[Any]]
    Arrays = tuple[Array, ...]
    Shape = tuple[int, ...]

__all__ = ["StepCrew", "Terminal"]

#: One sample is one row.
ROWS = Layout(0, 1, 1)


class Terminal(NamedTuple):
    """An input or output of a program, in the words of a graph's Value."""

    #: Position among the inputs or the outputs.
    id: int
    name: str | None
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def datatype(self) -> str:
        """The datatype's name, or the dtype's for what no graph has."""
        plain = (each.name for each in DATATYPES.values() if each.quantization == "none" and each.dtype == self.dtype)
        return next(plain, str(self.dtype))


class StepCrew:
    """Workers with a program each.

    Parameters
    ----------
    program : Program
        What the first worker runs; the others open its file again.
    workers : int
    batched : sequence of int, optional
        Positions of the inputs whose axis 0 counts samples; by default those of size 1 there.

    Raises
    ------
    UnsupportedError
        The program keeps state between calls, takes something else than tensors, or was made for another batch than 1.
    """

    threads = 1

    def __init__(self, program: Program, *, workers: int, batched: Sequence[int] | None = None) -> None:
        method = program.method("forward")
        name = f"{program.file.payload.name}, method 'forward'"
        for position, port in enumerate(method.inputs):
            if port.kind != "Tensor":
                raise UnsupportedError(f"{name}: input {position} is {port}, a batch needs tensors")
        if method.states:
            raise UnsupportedError(f"{name} keeps tensors from call to call, which samples of a batch would share")
        self.program = program
        self.workers = workers
        self.batched = _batched(name, method.inputs, batched)
        self.inputs = tuple(_terminal(position, port) for position, port in enumerate(method.inputs))
        self.variants: dict[tuple[Any, ...], list[Any]] = {}
        # The declared sizes, as far as there are any: what the outputs are has to be known at once.
        declared = tuple(each.shape[1:] if position in self.batched else each.shape
                         for position, each in enumerate(self.inputs))
        self.outputs = tuple(
            Terminal(position, port.name, array.dtype, array.shape)
            for position, (port, array) in enumerate(zip(method.outputs, self._trial(declared)))
        )
        self.layouts = tuple(
            ROWS if position in self.batched else None for position in range(len(self.inputs))
        ) + (ROWS,) * len(self.outputs)  # fmt: skip
        self.dtypes = tuple(each.dtype for each in (*self.inputs, *self.outputs))
        self.programs = [program]
        self.pid = os.getpid()
        self.closed = False
        self.pool: ThreadPoolExecutor | None = None

    @property
    def stale(self) -> bool:
        """Whether the process was forked since: the threads stayed behind."""
        return self.pid != os.getpid()

    @property
    def weights_cache(self) -> str:
        """What became of the cache of packed weights, where there is only one graph to ask."""
        return "off" if self.program.weights_cache in (None, False) else "several"

    @property
    def memory(self) -> dict[str, int]:
        """Of workspaces and packed weights of several graphs nobody keeps a sum."""
        return {"packed": 0, "workspace": 0, "staging": 0}

    # ---- shapes

    def _trial(self, variant: tuple[Any, ...]) -> list[Array]:
        """Results for one sample of zeros: what shapes come out for what goes in."""
        found = self.variants.get(variant)
        if found is None:
            zeros = [np.zeros((1, *shape) if position in self.batched else shape, each.dtype)
                     for position, (shape, each) in enumerate(zip(variant, self.inputs))]
            found = []
            for position, result in enumerate(self.program.run(*zeros)):
                if not isinstance(result, np.ndarray):
                    raise UnsupportedError(f"output {position} is no tensor but {result!r}, a batch needs tensors")
                if not result.ndim or result.shape[0] != 1:
                    raise UnsupportedError(f"output {position} is {text(result.shape) or 'a scalar'} for one sample, a "
                                           "batch needs axis 0 to be of size 1")
                found.append(result)
            if len(self.variants) >= 64:
                self.variants.pop(next(iter(self.variants)))
            self.variants[variant] = found
        return found

    def has_zero(self, variant: tuple[Any, ...]) -> bool:
        """Whether samples without elements must not be run; a program looks after them itself."""
        return False

    def output_shapes(self, variant: tuple[Any, ...], count: int) -> list[Shape]:
        """Shapes of the outputs for that many samples."""
        return [(count, *result.shape[1:]) for result in self._trial(variant)]

    def new_outputs(self, variant: tuple[Any, ...], count: int) -> Arrays:
        """Arrays for the results of that many samples."""
        return tuple(empty(shape, result.dtype)
                     for shape, result in zip(self.output_shapes(variant, count), self._trial(variant)))

    # ---- work

    def run(self, requests: list[Any], variant: tuple[Any, ...], micro: int, start: int, stop: int, *,
            members: int = 0, pooled: bool = False) -> tuple[int, ...]:
        """Process samples ``start`` to ``stop`` of all requests, numbered one after the other."""
        if self.closed:
            raise ClosedError("the crew was dismissed")
        everyone = min(members or self.workers, self.workers, stop - start)
        samples = iter(range(start, stop))
        firsts = [0, *itertools.accumulate(rows for _, _, rows in requests)]
        failures: list[tuple[int, BaseException]] = []

        def work(program: Program) -> None:
            for sample in samples:
                if failures:
                    return
                place = next(i for i in range(len(requests)) if sample < firsts[i + 1])
                inputs, outputs, _ = requests[place]
                row = sample - firsts[place]
                try:
                    results = program.run(*[array[row : row + 1] if position in self.batched else array
                                            for position, array in enumerate(inputs)])
                    for position, (output, result) in enumerate(zip(outputs, results)):
                        if result.shape != (1, *output.shape[1:]):
                            raise ShapeError(f"output {position} is {text(result.shape)}, for other samples "
                                             f"{text((1, *output.shape[1:]))}: a batch needs one shape",
                                             expected=(1, *output.shape[1:]), got=result.shape)
                        output[row] = result[0]
                except BaseException as error:
                    failures.append((sample, error))
                    return

        while len(self.programs) < everyone:
            # The same files with the same options, opened again.
            self.programs.append(copy.copy(self.program))
        if everyone > 1 and self.pool is None:
            self.pool = ThreadPoolExecutor(self.workers - 1, "xnnfast-stepwise")
        helpers = [self.pool.submit(work, program) for program in self.programs[1:everyone]] if self.pool else []
        try:
            work(self.programs[0])
        finally:
            for helper in helpers:
                helper.result()
        if failures:
            sample, error = min(failures, key=lambda failure: failure[0])
            if isinstance(error, XnnfastError):
                error.sample = sample  # type: ignore[attr-defined]
            raise error
        return ()

    def trim(self) -> None:
        """Drop the programs of all workers but the first."""
        del self.programs[1:]

    def close(self) -> None:
        """Stop the threads; the first program belongs to whoever made it."""
        self.closed = True
        if self.pool is not None:
            self.pool.shutdown()
            self.pool = None
        self.trim()


def _terminal(position: int, port: Port) -> Terminal:
    assert port.dtype is not None and port.shape is not None
    return Terminal(position, port.name, port.dtype, port.shape)


def _batched(name: str, ports: Sequence[Port], batched: Sequence[int] | None) -> frozenset[int]:
    """Which inputs hold samples on axis 0."""

    def single(port: Port) -> bool:
        return bool(port.shape) and (port.shape[0] == 1 or port.dynamism != "static")  # type: ignore[index]

    if batched is None:
        chosen = frozenset(position for position, port in enumerate(ports) if single(port))
        if not chosen:
            raise UnsupportedError(f"{name}: no input has a batch of 1 on axis 0 ({', '.join(map(str, ports))}), and a "
                                   "program of several parts runs sample by sample")
        return chosen
    for position in batched:
        if not 0 <= position < len(ports):
            raise ArgumentError(f"batched: need positions of {len(ports)} inputs, got {position}")
        if not single(ports[position]):
            raise UnsupportedError(f"{name}: input {position} is {ports[position]}, made for another batch than 1; a "
                                   "program of several parts runs sample by sample")
    return frozenset(batched)
