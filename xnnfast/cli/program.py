"""``xnnfast extract``, and what ``inspect`` says of ExecuTorch programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from .._payload import Payload
from ..describe_program import describe_program, is_program, program_text
from ..errors import UnsupportedError, XnnfastError
from .commands import CommandError, Json, _array, _print_json, app, cache_place

ProgramArgument = Annotated[Path, typer.Argument(metavar="FILE.pte", help="ExecuTorch program, bundled or not.")]
Data = Annotated[
    list[Path] | None,
    typer.Option("--data", metavar="FILE.ptd", help="Data file that the program refers to; may be repeated."),
]


def inspect_program(
    file: Path, dialect: str | None, data: list[Path] | None, as_json: bool, html: Path | None = None
) -> bool:
    """Print what is in a program, or draw it; False if the file is none."""
    payload = Payload.open(file)
    if payload.nbytes < 8 or not is_program(bytes(memoryview(payload)[4:8])):
        return False
    from ..describe import describe, text
    from ..graph_page import program_page
    from ..html_page import save as save_page
    from ..load import load
    from ..program import Program

    try:
        with Program(payload, data or ()) as program:
            if html is not None:
                save_page(program_page(program, dialect), html)
                return True
            facts = describe_program(program, dialect)
    except XnnfastError as error:
        raise CommandError(f"{file}: {error}") from error
    graph = None
    try:
        if len(facts["methods"]) == 1:
            graph = describe(load(payload, dialect=dialect, data=data or ()))
    except UnsupportedError:
        # More than one graph: there is no such view of it.
        pass
    except XnnfastError as error:
        raise CommandError(f"{file}: {error}") from error
    if as_json:
        _print_json({**facts, "graph": graph})
    else:
        print(program_text(facts))
        if graph is not None:
            print(f"\nthe program is one graph\n{text(graph)}")
    return True


def run_program(
    file: Path, inputs: list[Path], data: list[Path], method: str | None, threads: int, cache: str | None
) -> tuple[np.ndarray[Any, np.dtype[Any]], ...] | None:
    """What a program gives for arrays from files; None if the file is no program."""
    payload = Payload.open(file)
    if payload.nbytes < 8 or not is_program(bytes(memoryview(payload)[4:8])):
        return None
    from ..limits import allowed_cpus
    from ..program import Program

    try:
        count = threads or allowed_cpus().count
        with Program(payload, data, threads=count, weights_cache=cache_place(cache)) as program:
            name = method or (program.methods[0] if len(program.methods) == 1 else "forward")
            ports = [port for port in program.inputs(name) if port.kind == "Tensor"]
            if len(inputs) != len(ports):
                needed = ", ".join(map(str, ports))
                raise CommandError(f"{file}: need {len(ports)} inputs ({needed}), got {len(inputs)}")
            arrays = iter([_array(path) for path in inputs])
            # An input that is no tensor has one value that it may have.
            given = [next(arrays) if port.kind == "Tensor" else port.value for port in program.inputs(name)]
            return tuple(np.asarray(result) for result in program.run(*given, method=name))
    except XnnfastError as error:
        message = str(error)
        raise CommandError(message if message.startswith(str(file)) else f"{file}: {message}") from error


@app.command()
def extract(
    file: ProgramArgument,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Folder for the graph files.")],
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Write each delegate of a program to a graph file of its own, with the data it refers to."""
    from ..extract import extract as write_delegates

    written = []
    try:
        for each in write_delegates(file, output, data=data or ()):
            nodes = len(each.graph.nodes)
            facts = {"path": str(each.path), "method": each.method, "delegate": each.delegate, "nodes": nodes}
            written.append({**facts, "nbytes": each.nbytes})
            if not as_json:
                print(
                    f"{each.path}: method {each.method!r}, delegate {each.delegate}, {nodes} nodes, {each.nbytes} bytes"
                )
    except XnnfastError as error:
        message = str(error)
        raise CommandError(message if message.startswith(str(file)) else f"{file}: {message}") from error
    if as_json:
        _print_json(written)
