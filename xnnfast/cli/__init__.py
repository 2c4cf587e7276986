"""The command ``xnnfast``: from words on a command line to an exit status.

In come the arguments; out go a result on stdout, one line on stderr if something is wrong, and a
status. Typer and rich are imported by ``commands`` and nowhere else in the package.

======= ===========================================================
status  meaning
======= ===========================================================
0       all is well
1       ``verify`` found a file that is bad
2       wrong usage, or something that could not be done or read
130     interrupted (Ctrl-C)
141     whoever read our output has gone (``xnnfast inspect F | head``)
======= ===========================================================
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

#: Set to 1 to see where an error was raised.
ENV_TRACEBACK = "XNNFAST_TRACEBACK"

FAILED = 2
INTERRUPTED = 130
BROKEN_PIPE = 141


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit; never returns."""
    try:
        status = _run(sys.argv[1:] if arguments is None else list(arguments))
        # Here and not at the interpreter's end, where a broken pipe would be reported. A closed one is None.
        if sys.stdout is not None:
            sys.stdout.flush()
    except KeyboardInterrupt:
        status = INTERRUPTED
    except BrokenPipeError:
        status = BROKEN_PIPE
        # What is still buffered has nowhere to go; without this the interpreter would try once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)


def _run(arguments: list[str]) -> int:
    try:
        from . import commands
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("typer", "click", "rich", "shellingham"):
            raise
        return fail(f"the command needs {error.name}, which is not installed: install xnnfast[cli]")
    for stream in (sys.stdout, sys.stderr):
        # A file name or a note need not be in the terminal's encoding.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        return commands.run(arguments)
    except (KeyboardInterrupt, BrokenPipeError):
        raise
    except Exception as error:
        if os.environ.get(ENV_TRACEBACK) == "1":
            raise
        return fail(_message(error))


def fail(message: str) -> int:
    """Print the one line that says what is wrong; the status to exit with."""
    # Where stderr is closed, print would take stdout, which holds results.
    if sys.stderr is not None:
        print(f"xnnfast: {' '.join(message.split())}", file=sys.stderr)
    return FAILED


def _message(error: Exception) -> str:
    from ..errors import XnnfastError
    from .commands import CommandError

    if isinstance(error, (XnnfastError, CommandError)):
        return str(error)
    if isinstance(error, OSError):
        # The file, if there is one, comes first: it is what the user knows.
        reason = error.strerror or str(error)
        return f"{os.fsdecode(error.filename)}: {reason}" if error.filename is not None else reason
    if isinstance(error, MemoryError):
        return f"out of memory{f': {error}' if str(error) else ''}"
    return (
        f"a fault of xnnfast itself, {type(error).__name__}: {error} "
        f"(please report it with the output that {ENV_TRACEBACK}=1 gives)"
    )
