"""The subcommands, one function each. The only module that imports Typer.

Results go to stdout, messages to stderr; with ``--json`` stdout holds one JSON document and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from ..errors import ArgumentError, XnnfastError

if TYPE_CHECKING:
    from .._graph import Graph

    Array = np.ndarray[Any, np.dtype[Any]]

BAD = 1
NPY_MAGIC = b"\x93NUMPY"

#: Typer carries a copy of click from some version on; both have this class among BadParameter's bases.
_ClickException: type[Exception] = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)


class CommandError(Exception):
    """What is wrong with the command, or with a file that it was given, in one line."""


class Backend(str, Enum):
    """What computes the answer."""

    xnnpack = "xnnpack"
    reference = "reference"


app = typer.Typer(
    name="xnnfast",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Look into XNNPACK graph files, check them and run them.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

File = Annotated[
    Path, typer.Argument(metavar="FILE", help="Graph file: bare, behind an XH00 header, or a program (.pte).")
]
Dialect = Annotated[
    str | None, typer.Option(metavar="NAME", help="Read the file as seed, xn00 or xn01, whatever it looks like.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Cache = Annotated[
    str | None,
    typer.Option(
        "--weights-cache", metavar="user|FOLDER|FILE", help="Keep packed weights there and map them the next time; "
        "user: the user's cache folder.",
    ),
]  # fmt: skip


def run(arguments: list[str]) -> int:
    """Run one subcommand; the exit status."""
    command = typer.main.get_command(app)
    # Not command.main(): that one has its own ideas of interrupts and broken pipes.
    try:
        with command.make_context("xnnfast", arguments) as context:
            status = command.invoke(context)
    except typer.Exit as exit:
        return exit.exit_code
    except typer.Abort:
        raise KeyboardInterrupt from None
    except _ClickException as error:
        return _usage(error)
    return status if isinstance(status, int) else 0


def _usage(error: Any) -> int:
    from . import fail

    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "xnnfast"
    return fail(f"{error.format_message().rstrip('.')} (see {path} --help)")


# ---------------------------------------------------------------------------------------------------
# inspect


@app.command()
def inspect(
    file: File,
    as_json: Json = False,
    dialect: Dialect = None,
    data: Annotated[
        list[Path] | None, typer.Option("--data", metavar="FILE.ptd", help="Data file of a program; may be repeated.")
    ] = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="Run the graph on zeros and show where its memory is instead.")
    ] = False,
    cache: Cache = None,
    html: Annotated[
        Path | None, typer.Option(metavar="OUT.html", help="Draw the graph on a page to look around in instead.")
    ] = None,
) -> None:
    """Show what a file holds, and which constants are used in place."""
    from ..describe import describe, text

    if html is not None and (memory or as_json):
        raise CommandError("--html writes a page; it goes neither with --json nor with --memory")
    if memory:
        _show_memory(_load(file, dialect), cache, as_json)
        return
    if _program.inspect_program(file, dialect, data, as_json, html):
        return
    facts = describe(_load(file, dialect))
    if html is not None:
        from ..graph_page import graph_page
        from ..html_page import save as save_page

        save_page(graph_page(facts), html)
    elif as_json:
        _print_json(facts)
    else:
        print(text(facts))


def _show_memory(graph: Graph, cache: str | None, as_json: bool) -> None:
    from .. import memory
    from .._runtime import Runtime, empty

    with Runtime(graph, weights_cache=cache_place(cache)) as runtime:
        zeros = []
        for value in graph.inputs:
            assert value.dtype is not None, "inputs are of whole bytes"
            zeros.append(empty(value.shape, value.dtype))
            zeros[-1].fill(0)
        runtime.run(*zeros)
        facts = memory.breakdown(runtime)
        facts["weights_cache"] = runtime.weights_cache
    if as_json:
        _print_json(facts)
        return
    print(memory.text(facts))
    if cache is not None:
        print(f"{'weights cache':34s}{facts['weights_cache']}")


def cache_place(option: str | None) -> bool | str | None:
    """What ``--weights-cache`` means to a Runtime, Executor or Program."""
    return True if option == "user" else option


# ---------------------------------------------------------------------------------------------------
# verify


@app.command()
def verify(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Files to check.")],
    dialect: Dialect = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the files that are not good.")] = False,
) -> int:
    """Check structure and meaning of files. Status 0: all good, 1: some are bad, 2: some can't be read."""
    from ..describe import describe, summary
    from ..load import load_all

    status = 0
    for file in files:
        try:
            graphs = load_all(file, dialect=dialect)
        except OSError as error:
            status = 2
            print(f"{file}: unreadable: {error.strerror or error}")
        except XnnfastError as error:
            status = max(status, BAD)
            print(f"{file}: bad: {type(error).__name__}: {' '.join(str(error).split())}")
        else:
            if not quiet:
                print(f"{file}: good: {summary([describe(graph) for graph in graphs])}")
    return status


# ---------------------------------------------------------------------------------------------------
# run


@app.command("run")
def run_graph(
    file: File,
    inputs: Annotated[list[Path] | None, typer.Argument(metavar="INPUT.npy...", help="One array per input.")] = None,
    output: Annotated[
        list[str] | None,
        typer.Option(
            "--output", "-o", metavar="OUT.npy", help="Where results go: once per output, or one name with {} in it."
        ),
    ] = None,
    backend: Annotated[
        Backend, typer.Option(help="Compute by XNNPACK, or by NumPy to compare with.")
    ] = Backend.xnnpack,
    threads: Annotated[int, typer.Option(min=0, help="Threads for one run; 0: all that this process may use.")] = 1,
    dialect: Dialect = None,
    cache: Cache = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Don't say what was written.")] = False,
    data: Annotated[
        list[Path] | None, typer.Option("--data", metavar="FILE.ptd", help="Data file of a program; may be repeated.")
    ] = None,
    method: Annotated[str | None, typer.Option(metavar="NAME", help="Method of a program.")] = None,
) -> None:
    """Run a graph once on arrays from files. Inputs are mapped, not read; outputs appear whole or not at all.

    An ExecuTorch program is run as a whole, whatever it consists of.
    """
    if backend is Backend.xnnpack and dialect is None:
        results = _program.run_program(file, inputs or [], data or [], method, threads, cache)
        if results is not None:
            _save(results, _targets(output or [], len(results)), quiet)
            return
    if data or method is not None:
        raise CommandError(f"{file}: --data and --method are for programs, run by XNNPACK and without --dialect")
    graph = _load(file, dialect)
    targets = _targets(output or [], len(graph.outputs))
    given = inputs or []
    if len(given) != len(graph.inputs):
        needed = ", ".join(f"{value.datatype} {_shape(value.shape)}" for value in graph.inputs)
        raise CommandError(f"{file}: need {len(graph.inputs)} inputs ({needed}), got {len(given)}")
    arrays = [_array(path, value) for path, value in zip(given, graph.inputs)]
    results, told = _compute(graph, arrays, backend, threads, cache)
    if cache is not None and not quiet:
        print(f"weights cache: {told}", file=sys.stderr)
    _save(results, targets, quiet)


def _save(results: tuple[Array, ...], targets: list[Path], quiet: bool) -> None:
    for target, result in zip(targets, results):
        with _replacing(target) as stream:
            np.save(stream, result, allow_pickle=False)
        if not quiet:
            print(f"{target}: {result.dtype} {_shape(result.shape)}", file=sys.stderr)


def _compute(
    graph: Graph, arrays: list[Array], backend: Backend, threads: int, cache: str | None
) -> tuple[tuple[Array, ...], str]:
    """Results, and what became of the weights cache."""
    if backend is Backend.reference:
        from .. import reference

        return tuple(reference.run(graph, *arrays)), "not used by the reference"
    from .._runtime import Runtime
    from ..limits import allowed_cpus

    with Runtime(graph, threads=threads or allowed_cpus().count, weights_cache=cache_place(cache)) as runtime:
        return tuple(runtime.run(*arrays)), runtime.weights_cache


def _targets(output: list[str], count: int) -> list[Path]:
    """A file for every output of the graph."""
    if len(output) == 1 and "{}" in output[0]:
        return [Path(output[0].replace("{}", str(i))) for i in range(count)]
    if len(output) != count:
        hint = "once for each, or once with {} in the name" if count != 1 else "once"
        raise CommandError(
            f"the graph has {count} output{'s' if count != 1 else ''}: give -o {hint}, got it {len(output)} times"
        )
    targets = [Path(name) for name in output]
    if len({os.path.realpath(target) for target in targets}) < count:
        raise CommandError("two outputs would go to the same file")
    return targets


def _array(path: Path, value: Any = None) -> Array:
    """The array of a .npy file, mapped."""
    with open(path, "rb") as stream:
        magic = stream.read(len(NPY_MAGIC))
    if magic != NPY_MAGIC:
        raise CommandError(f"{path}: need a .npy file, which starts with {NPY_MAGIC!r}, found {magic!r}")
    try:
        array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise CommandError(f"{path}: need a whole .npy file: {error}") from error
    # A .npy file can't name bfloat16; NumPy writes such an array as two opaque bytes.
    if value is not None and value.datatype == "bf16" and array.dtype == np.dtype("V2"):
        array = array.view(value.dtype)
    return array


@contextlib.contextmanager
def _replacing(target: Path) -> Iterator[IO[bytes]]:
    """A file that takes its name when all of it is written. A pipe or a device is written to, not replaced."""
    if target.exists() and not target.is_file():
        with open(target, "wb") as stream:
            yield stream
        return
    folder = target.parent
    descriptor, partial = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=folder)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            yield stream
        # mkstemp makes files for the user alone; this one gets what open() would have given it.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(partial, 0o666 & ~mask)
        os.replace(partial, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise


# ---------------------------------------------------------------------------------------------------
# info


@app.command()
def info(as_json: Json = False) -> None:
    """Show versions, the libraries and kernels that were built in, and how many threads are allowed and why."""
    from importlib import metadata

    from ..configuration import config

    facts = dict(config())
    facts["typer"] = metadata.version("typer")
    if as_json:
        _print_json(facts)
        return
    print(f"xnnfast {facts['xnnfast']}, Python {facts['python']}, NumPy {facts['numpy']}, {facts['machine']}")
    print("libraries:")
    for library in facts["pin"]:
        print(f"  {library['name']} {library['version']} ({library['licence']}), commit {library['commit']}")
    print(f"corrections: {', '.join(change['name'] for change in facts['changes']) or 'none'}")
    print(f"kernel families compiled in: {' '.join(facts['families'])}")
    print(f"instruction sets in use: {' '.join(facts['isa'])}")
    if facts["isa_cap"] is not None:
        print(f"capped by XNNFAST_ISA at: {facts['isa_cap']}")
    if facts["second_isa"] is not None:
        second = facts["second_isa"]
        print(f"8-bit products padded {second['ratio']:g} times or more: kernels up to {second['isa']}")
    print(f"threads allowed: {facts['cpus']} ({facts['cpus_reason']})")


# ---------------------------------------------------------------------------------------------------


def _version(show: bool) -> None:
    if show:
        from ..configuration import __version__

        print(f"xnnfast {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def _load(file: Path, dialect: str | None) -> Graph:
    """The graph of a file; what is wrong with it is said with the file's name in front."""
    from ..load import load

    try:
        return load(file, dialect=dialect)
    except ArgumentError:
        raise
    except XnnfastError as error:
        message = str(error)
        raise CommandError(message if message.startswith(str(file)) else f"{file}: {message}") from error


def _shape(dims: tuple[int, ...]) -> str:
    from ..describe import shape

    return shape(dims)


def _print_json(facts: Any) -> None:
    print(json.dumps(facts, indent=2, allow_nan=False))


# Subcommands in modules of their own add themselves to the app.
from . import batch as _batch  # noqa: E402, F401
from . import cache as _cache  # noqa: E402, F401
from . import doctor as _doctor  # noqa: E402, F401
from . import measuring as _measuring  # noqa: E402, F401
from . import program as _program  # noqa: E402
