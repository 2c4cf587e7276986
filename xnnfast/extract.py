"""The graphs of a program as files of their own.

In comes a program with its data files; out come files that :func:`xnnfast.load` reads without it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from . import _reader, writer
from .caps import DEFAULT_LIMITS, Limits
from .containers import XNNPACK_BACKEND, DataFile, ProgramFile
from .errors import UnsupportedError

if TYPE_CHECKING:
    from ._graph import Graph
    from ._payload import Payload, Source

__all__ = ["Extracted", "extract"]


class Extracted(NamedTuple):
    """A file that was written."""

    path: Path
    method: str
    delegate: int
    graph: Graph
    nbytes: int


def extract(
    source: Source | Payload,
    folder: str | os.PathLike[str],
    *,
    data: Iterable[Source | Payload | DataFile] = (),
    limits: Limits | None = None,
) -> Iterator[Extracted]:
    """Write each XNNPACK delegate of a program to a file of its own, ``METHOD-K.xnn``; one file a step.

    Constants that the program or its data files store by name are folded in. What a delegate gets from the program,
    constants of the program among them, stays its input: the graph is that of ``load(source, delegate=K)``.
    The folder is made if it is missing; files are replaced whole.

    Raises
    ------
    UnsupportedError
        The program has no XNNPACK delegate.
    """
    program = ProgramFile(source, data=data, limits=limits or DEFAULT_LIMITS)
    found = [
        (plan, index)
        for plan in program.plans
        for index, each in enumerate(plan.delegates)
        if each.id == XNNPACK_BACKEND
    ]
    if not found:
        raise UnsupportedError(
            f"{program.payload.name} has no delegate of {XNNPACK_BACKEND}: there is nothing to extract"
        )
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    stems = _stems([plan.name for plan in program.plans])
    for plan, index in found:
        graph = _reader.read(program.section(plan, index), limits=program.limits).graph()
        width = len(str(len(plan.delegates) - 1))
        path = target / f"{stems[plan.name]}-{index:0{width}}.xnn"
        yield Extracted(path, plan.name, index, graph, writer.write(path, graph, dialect=graph.dialect))


def _stems(names: list[str]) -> dict[str, str]:
    """Method name -> a name for files: a program may call its methods anything."""
    made: dict[str, str] = {}
    for name in names:
        stem = re.sub(r"[^A-Za-z0-9_.]+", "_", name).strip(".")[:64] or "method"
        taken = {other.lower() for other in made.values()}
        number = 2
        chosen = stem
        while chosen.lower() in taken:
            chosen, number = f"{stem}_{number}", number + 1
        made.setdefault(name, chosen)
    return made
