"""The subcommands that measure: bench, compare and profile.

What they print goes to stdout, progress to stderr and only where that is a terminal. The status of ``compare`` is its
verdict: 0 same or faster, 1 slower, 3 ambiguous, 4 invalid.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from ..bench import stats
from ..errors import XnnfastError
from .commands import Cache, CommandError, Json, _print_json, app, cache_place

Input = Annotated[
    list[Path] | None,
    typer.Option(
        "--input", "-i", metavar="X.npy", help="Input arrays, once per input; without: seeded random numbers."
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of random inputs.")]
Method = Annotated[str | None, typer.Option(metavar="NAME", help="Method of a program.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
Cpus = Annotated[str | None, typer.Option(metavar="0,1", help="Bind what is measured to these CPUs.")]


#: A pool of more threads than any machine has CPUs takes the memory of all of them, and no figure comes of it.
MOST_THREADS = 1024
#: Seconds that anything may be measured: a day.
LONGEST = 86_400.0


def _numbers(text: str | None, what: str, least: int = 1, most: int = 1 << 31) -> list[int]:
    """A list as in ``1,8,32``."""
    if not text:
        return []
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        raise CommandError(f"{what}: need whole numbers with commas between them, got {text!r}") from None
    if min(found) < least:
        raise CommandError(f"{what}: need numbers of at least {least}, got {text!r}")
    if max(found) > most:
        raise CommandError(f"{what}: need numbers of at most {most}, got {text!r}")
    return found


def _check(places: Sequence[Path | None], **numbers: float | None) -> None:
    """Refuse what would fail only after everything was measured: files that can't be written, numbers that are none."""
    from ..bench import record

    for name, number in numbers.items():
        # Typer's own limits let NaN through, depending on its version.
        if number is not None and not math.isfinite(number):
            raise CommandError(f"--{name.replace('_', '-')}: need a finite number, got {number}")
    for place in places:
        if place is not None:
            record.check_writable(place)


def _kept(cache: str | None) -> bool | str | None:
    """The weights cache for processes that run in other folders."""
    place = cache_place(cache)
    return os.path.abspath(place) if isinstance(place, str) else place


def _pool(threads: int, workers: int = 1) -> None:
    if threads * workers > MOST_THREADS:
        raise CommandError(f"need at most {MOST_THREADS} threads in all, got {workers} x {threads}")


class _Progress:
    """One line on a terminal, written over again and again."""

    def __init__(self, quiet: bool) -> None:
        self.on = not quiet and sys.stderr.isatty()

    def __call__(self, line: str) -> None:
        if self.on:
            print(f"\r\x1b[K{line[-100:]}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self.on:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


@app.command()
def bench(
    models: Annotated[list[Path], typer.Argument(metavar="MODEL...", help="Graph files or programs (.pte).")],
    batch: Annotated[str | None, typer.Option(metavar="1,8,32", help="Samples per call; without: as declared.")] = None,
    threads: Annotated[str, typer.Option(metavar="1,2", help="Threads of a runtime.")] = "1",
    workers: Annotated[str, typer.Option(metavar="1,2", help="Runtimes side by side, each with its threads.")] = "1",
    processes: Annotated[int, typer.Option(min=1, help="Fresh processes for each row.")] = 9,
    seconds: Annotated[float, typer.Option(min=0.0, max=LONGEST, help="Seconds of samples in each process.")] = 0.5,
    warm_up: Annotated[float, typer.Option(min=0.0, max=LONGEST, help="Most seconds of warming up.")] = 1.0,
    samples: Annotated[int, typer.Option(min=1, help="Most samples of a process.")] = 5000,
    inputs: Input = None,
    seed: Seed = 0,
    method: Method = None,
    cold: Annotated[bool, typer.Option(help="Drop the file from the page cache before each opening.")] = False,
    cpus: Cpus = None,
    cache: Cache = None,
    nodes: Annotated[bool, typer.Option("--nodes", help="Profile the nodes as well (see profile).")] = False,
    save: Annotated[
        Path | None, typer.Option("--save", "-s", metavar="FILE.json", help="Keep the record for compare.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure latency, throughput, opening and memory of models in fresh processes."""
    from ..bench import measure, record

    _check([save], seconds=seconds, warm_up=warm_up)
    pools, sides = _numbers(threads, "--threads"), _numbers(workers, "--workers")
    _pool(max(pools, default=1), max(sides, default=1))
    progress = _Progress(quiet)
    try:
        facts = measure.bench(
            models,
            batches=_numbers(batch, "--batch"),
            threads=pools,
            workers=sides,
            settings=measure.Settings(
                processes=processes,
                seconds=seconds,
                warm_up=warm_up,
                most=samples,
                seed=seed,
                cold=cold,
                cpus=_numbers(cpus, "--cpus", 0) or None,
                weights_cache=_kept(cache),
            ),
            inputs=inputs or (),
            method=method,
            say=progress,
        )
    finally:
        progress.end()
    if nodes:
        from ..bench.profile import profile as profile_model

        for path, model in zip(models, facts["models"]):
            try:
                model["profile"] = profile_model(
                    path, seed=seed, inputs=inputs or (), method=method, weights_cache=_kept(cache)
                )
            except XnnfastError as error:
                # What was measured is there all the same.
                model["profile"] = None
                model["notes"].append(f"its nodes can't be profiled: {error}")
    if as_json:
        _print_json(facts)
    else:
        from ..bench.tables import print_bench, print_profile

        print_bench(facts)
        for model in facts["models"] if nodes else ():
            if model["profile"] is not None:
                print_profile(model["profile"], top=15)
    # Afterwards: what can't be kept has been shown.
    if save is not None:
        record.save(facts, save)
    if all("summary" not in result for model in facts["models"] for result in model["results"]):
        raise CommandError("nothing could be measured")


class Clock(str, Enum):
    """What times are taken with."""

    wall = "wall"
    cpu = "cpu"


class Metric(str, Enum):
    """What is compared."""

    latency = "latency"
    load = "load"
    memory = "memory"


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="What was there before: a record, a model, or a build.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="What is new, of the same sort.")],
    models: Annotated[
        list[Path] | None,
        typer.Option(
            "--model", "-m", metavar="MODEL", help="Measure this model in the builds A and B; may be repeated."
        ),
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Samples per call.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of a runtime.")] = 1,
    workers: Annotated[int, typer.Option(min=1, help="Runtimes side by side.")] = 1,
    metrics: Annotated[
        list[Metric] | None, typer.Option("--metric", help="Judge only this; may be repeated. Without: all.")
    ] = None,
    budget: Annotated[float, typer.Option(min=1.0, max=LONGEST, help="Most seconds.")] = 60.0,
    seconds: Annotated[float, typer.Option(min=0.0, max=LONGEST, help="Seconds of samples in each process.")] = 0.15,
    clock: Annotated[
        Clock, typer.Option(help="Wall time, or CPU time of the process where the machine is never quiet.")
    ] = Clock.wall,
    tolerance: Annotated[
        float | None, typer.Option(min=0.0, help="Allowed difference of outputs, as a share of the largest number.")
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="WORD", help="Compare though this differs: cpu, isa, pin, graph, precision, inputs, ..."),
    ] = None,
    inputs: Input = None,
    seed: Seed = 0,
    method: Method = None,
    cpus: Cpus = None,
    cache: Cache = None,
    save: Annotated[
        Path | None, typer.Option("--save", "-s", metavar="FILE.json", help="Keep verdicts and samples.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Decide whether B is slower than A. Status 0: same or faster, 1: slower, 3: ambiguous, 4: invalid.

    A and B are two records of bench, two models, or, with --model, two builds: a Python that has xnnfast, its
    environment, or a folder with the built package.
    """
    from ..bench import compare as comparing
    from ..bench import measure, record

    words = frozenset(allow or ())
    known = {*record.LIKENESS, *record.MODEL_LIKENESS, "shapes", "inputs"}
    if words - known:
        raise CommandError(f"--allow: need words of {', '.join(sorted(known))}, got {', '.join(sorted(words - known))}")
    _check([save], seconds=seconds, budget=budget, tolerance=tolerance)
    _pool(threads, workers)
    folder = next((each for each in (a, b) if each.is_dir()), None)
    if not models and folder is not None:
        raise CommandError(f"{folder}: is a folder; to compare two builds, name a model by --model")
    if not models and record.is_record(a) != record.is_record(b):
        raise CommandError("need two records or two models, got one of each")
    facts: dict[str, Any]
    if not models and record.is_record(a):
        facts = comparing.compare_records(record.load(a), record.load(b), words, tolerance)
    else:
        progress = _Progress(quiet)
        try:
            if models:
                builds = [measure.Build.at(str(each)) for each in (a, b)]
                sides = [[measure.subject(model, build, method, _kept(cache)) for build in builds] for model in models]
                labels = [str(model) for model in models]
            else:
                sides = [[measure.subject(each, None, method, _kept(cache)) for each in (a, b)]]
                labels = [f"{a} against {b}"]
            pairs = [
                comparing.pair_of(label, *side, batch=batch, threads=threads, workers=workers)
                for label, side in zip(labels, sides)
            ]
            settings = comparing.Settings(
                budget=budget,
                seconds=seconds,
                seed=seed,
                tolerance=tolerance,
                clock=clock.value,
                cpus=_numbers(cpus, "--cpus", 0) or None,
                metrics=tuple(dict.fromkeys(each.value for each in metrics or list(Metric))),
            )
            facts = comparing.compare(pairs, settings=settings, inputs=inputs or (), allow=words, say=progress)
        finally:
            progress.end()
    if as_json:
        _print_json(facts)
    else:
        from ..bench.tables import print_compare

        print_compare(facts)
    if save is not None:
        record.save(facts, save)
    return stats.STATUS[facts["verdict"]]


@app.command()
def profile(
    models: Annotated[
        list[Path],
        typer.Argument(metavar="MODEL", help="A graph file or program; two of them or of profiles with --diff."),
    ],
    threads: Annotated[int, typer.Option(min=1, help="Threads of a runtime.")] = 1,
    batch: Annotated[int | None, typer.Option(min=1, help="Samples per call.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Invokes; without: as many as fit into --seconds.")] = None,
    seconds: Annotated[float, typer.Option(min=0.0, max=LONGEST, help="Seconds of invokes.")] = 1.0,
    top: Annotated[int | None, typer.Option(min=1, help="Show only the nodes that take longest.")] = None,
    diff: Annotated[bool, typer.Option("--diff", help="Compare two models, or two profiles kept by --save.")] = False,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Write a trace for chrome://tracing or Perfetto.")
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE.html", help="Write a page with drawings.")] = None,
    roofline: Annotated[bool, typer.Option("--measure-roofline", help="Measure the machine's roofline again.")] = False,
    no_roofline: Annotated[bool, typer.Option("--no-roofline", help="Don't relate the nodes to the machine.")] = False,
    inputs: Input = None,
    seed: Seed = 0,
    method: Method = None,
    cache: Cache = None,
    save: Annotated[Path | None, typer.Option("--save", "-s", metavar="FILE.json", help="Keep the profile.")] = None,
    as_json: Json = False,
) -> None:
    """Show the time of every node, and how near it comes to what the machine can do."""
    import json

    from ..bench import profile as profiling
    from ..bench import record

    def one(path: Path) -> dict[str, Any]:
        if record.is_record(path):
            return record.load(path, record.PROFILE)
        return profiling.profile(
            path,
            threads=threads,
            batch=batch,
            rounds=rounds,
            seconds=seconds,
            seed=seed,
            inputs=inputs or (),
            method=method,
            weights_cache=_kept(cache),
            roof_again=roofline,
            with_roof=not no_roofline,
        )

    if len(models) != (2 if diff else 1):
        raise CommandError(f"need {'two models with --diff' if diff else 'one model'}, got {len(models)}")
    if diff and (trace is not None or html is not None):
        raise CommandError("--trace and --html show one profile; they don't go with --diff")
    _check([save, trace, html], seconds=seconds)
    _pool(threads)
    found = [one(path) for path in models]
    if diff:
        facts = profiling.diff(*found)
    else:
        (facts,) = found
        if trace is not None:
            record.write(json.dumps(profiling.trace(facts), allow_nan=False), trace)
        if html is not None:
            from ..bench.page import page

            record.write(page(facts), html)
    if as_json:
        _print_json(facts)
    else:
        from ..bench import tables

        if diff:
            tables.print_diff(facts)
        else:
            tables.print_profile(facts, top=top)
    if save is not None:
        record.save(facts, save)
