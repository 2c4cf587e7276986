"""``xnnfast doctor``: the kernels that XNNPACK selects on this CPU, each against NumPy."""

from __future__ import annotations

import platform
from dataclasses import asdict
from typing import Annotated

import typer

from .commands import BAD, CommandError, Json, _print_json, app


@app.command()
def doctor(
    as_json: Json = False,
    only: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Only families whose name has this in it: conv2d, qdint8, ...")
    ] = None,
) -> int:
    """Compare the kernels of this CPU with NumPy, one line per family. Status 0: all agree, 1: some don't."""
    from .._runtime import isa
    from ..doctor import run

    results = run(only)
    if not results:
        raise CommandError(f"no family of kernels has {only!r} in its name")
    failed = [result for result in results if not result.ok]
    checks, seconds = sum(result.checks for result in results), sum(result.seconds for result in results)
    if as_json:
        families = [{**asdict(result), "ok": result.ok, "seconds": round(result.seconds, 4)} for result in results]
        facts = {
            "machine": platform.machine(),
            "isa": isa(),
            "ok": not failed,
            "checks": checks,
            "seconds": round(seconds, 3),
            "families": families,
        }
        _print_json(facts)
        return BAD if failed else 0
    print(f"{platform.machine()}: {' '.join(isa())}")
    width = max(len(result.family) for result in results)
    for result in results:
        mark, found = "ok   ", f"{result.checks} runs"
        if result.missing:
            mark, found = "none ", "this CPU has no kernels for it"
        elif result.failed:
            mark, found = "WRONG", f"{result.failed} of {result.checks} runs differ"
        print(f"{mark} {result.family:{width}s} {found}")
        for failure in result.failures:
            print(f"      {failure}")
    there = sum(not result.missing for result in results)
    verdict = f"{len(failed)} of {there} families are wrong" if failed else f"{there} families agree with NumPy"
    print(f"{verdict} ({checks} runs, {seconds:.1f} s)")
    return BAD if failed else 0
