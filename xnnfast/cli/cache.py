"""``xnnfast cache``: what a folder of packed weights holds, and getting rid of it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import weights_cache
from ..describe import size
from .commands import BAD, CommandError, Json, _print_json, app

DAY = 86400

cache = typer.Typer(
    help="Look after the folder in which weights_cache=True keeps packed weights.",
    no_args_is_help=False,
    rich_markup_mode=None,
)
app.add_typer(cache, name="cache")

Folder = Annotated[Path | None, typer.Option("--folder", metavar="FOLDER", help="Another folder than the user's own.")]


def _folder(given: Path | None) -> str:
    if given is None:
        return weights_cache.default_folder()
    if not given.is_dir():
        raise CommandError(f"{given}: need a folder")
    return str(given)


def _facts(file: weights_cache.CacheFile) -> dict[str, Any]:
    facts: dict[str, Any] = {"path": file.path, "bytes": file.nbytes, "last_used": _time(file.last_used)}
    facts.update(weights_cache.described(file.path) or {"entries": None})
    return facts


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _row(facts: dict[str, Any]) -> str:
    weights = "unreadable" if facts["entries"] is None else f"{facts['entries']} weights"
    source = f" of {facts['source']}" if facts.get("source") else ""
    return f"{size(facts['bytes']):>12s}  {facts['last_used']}  {os.path.basename(facts['path'])}  {weights}{source}"


def _print(folder: str, files: list[weights_cache.CacheFile], as_json: bool, done: str) -> None:
    rows = [_facts(file) if not done else {"path": file.path, "bytes": file.nbytes} for file in files]
    total = sum(file.nbytes for file in files)
    if as_json:
        _print_json({"folder": folder, "bytes": total, "files": rows})
        return
    count = f"{len(files)} file{'' if len(files) == 1 else 's'}"
    if done:
        print(f"{folder}: {done} {count}, {size(total)}")
    else:
        print(f"{folder}: {count}, {size(total)} of at most {size(weights_cache.limit())}")
        for row in rows:
            print(_row(row))


@cache.command("list")
def list_files(folder: Folder = None, as_json: Json = False) -> None:
    """Show the files, least recently used first."""
    place = _folder(folder)
    _print(place, weights_cache.files(place), as_json, "")


@cache.command()
def prune(
    folder: Folder = None,
    limit: Annotated[
        int | None,
        typer.Option(min=0, metavar="BYTES", help="Bytes that may stay. Default: XNNFAST_CACHE_LIMIT, or 8 GiB."),
    ] = None,
    unused: Annotated[
        float | None, typer.Option(min=0, metavar="DAYS", help="Remove also what was not used for so many days.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Remove the least recently used files until the rest fits, and what killed processes left."""
    place = _folder(folder)
    since = None if unused is None else time.time() - unused * DAY
    gone = weights_cache.evict(place, weights_cache.limit() if limit is None else limit, unused_since=since)
    _print(place, gone, as_json, "removed")


@cache.command()
def clear(folder: Folder = None, as_json: Json = False) -> None:
    """Remove all files. Processes that have one mapped keep it until they end."""
    place = _folder(folder)
    _print(place, weights_cache.clear(place), as_json, "removed")


@cache.command()
def verify(
    folder: Folder = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the files that are not good.")] = False,
    as_json: Json = False,
) -> int:
    """Read every file in full and compare it with its checksums. Status 0: all good, 1: some are bad."""
    place = _folder(folder)
    status = 0
    rows = []
    for file in weights_cache.files(place):
        try:
            wrong = weights_cache.verify(file.path)
        except FileNotFoundError:
            continue
        except OSError as error:
            wrong = error.strerror or str(error)
        rows.append({"path": file.path, "wrong": wrong})
        if wrong is not None:
            status = BAD
            if remove:
                weights_cache.remove(file)
        if not as_json:
            words = "good" if wrong is None else f"bad: {wrong}{', removed' if remove else ''}"
            print(f"{file.path}: {words}")
    if as_json:
        _print_json({"folder": place, "files": rows})
    return status
