"""Loads broken files by the million: ``python fuzz/search.py [--seconds N | --cases N] [--seed S] [FOLDER...]``.

The files are those of mutate.py; the rule is that of harness.py. Cases run in a child process that begins
again behind one that killed it. The exit status tells whether all kept the rule; ``--save`` keeps the others.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import harness
import seeds
from mutate import Mutator


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--seconds", type=float, default=0)
    parser.add_argument("--cases", type=int, default=0)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-run", action="store_true", help="load only")
    parser.add_argument("--compare", action="store_true", help="compare results of graphs with the reference")
    parser.add_argument("--hang", type=float, default=20.0)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    mutator = Mutator(seeds.corpus(*given.folders), given.seed)
    harness.comparing = given.compare
    begin = last = time.monotonic()
    stop = given.start + given.cases if given.cases else None
    print(f"{len(mutator.files)} seeds, {sum(map(len, mutator.files))} bytes", flush=True)

    def cases(start: int) -> Iterator[bytes]:
        number = start
        while not (given.seconds and time.monotonic() - begin > given.seconds):
            yield mutator.case(number)
            number += 1

    shown: set[str] = set()

    def show(report: harness.Report) -> None:
        for case, what in report.findings[len(saved) :]:
            saved.append(case)
            if given.save is not None:
                given.save.mkdir(parents=True, exist_ok=True)
                (given.save / f"{given.seed}-{case}").write_bytes(mutator.case(case))
            kind = what.strip().split("\n")[-1]
            if kind not in shown:
                print(f"case {case}: {what}", flush=True)
            shown.add(kind)

    saved: list[int] = []

    def tell(report: harness.Report, at: int) -> None:
        nonlocal last
        show(report)
        if time.monotonic() - last > 60:
            last = time.monotonic()
            print(f"{report.executions} executions, {len(report.findings)} findings, {last - begin:.0f} s", flush=True)

    report = harness.isolated(cases, run=not given.no_run, start=given.start, stop=stop, hang=given.hang, tell=tell)
    show(report)
    summary = {
        "executions": report.executions,
        "seed": given.seed,
        "seeds": len(mutator.files),
        "seconds": round(time.monotonic() - begin, 1),
        "outcomes": dict(report.outcomes.most_common()),
        "slowest": [round(report.slowest[0], 3), report.slowest[1]],
        "largest": [report.largest[0], report.largest[1]],
        "findings": [[case, what.strip().split("\n")[-1]] for case, what in report.findings],
    }
    print(json.dumps({name: value for name, value in summary.items() if name != "findings"}))
    if given.json is not None:
        given.json.write_text(json.dumps(summary, indent=1) + "\n")
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main())
