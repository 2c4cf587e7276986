"""Breaks small files in every simple way: each truncation, and each 4-byte word set to 0, 1, 0x7FFFFFFF, 0xFFFFFFFF.

``python fuzz/corpus_campaign.py FOLDER... [--slice N --seed S] [--save FOLDER] [--json FILE]``

All files of those names under the folders that are not larger than ``--max-size`` are taken whole; of larger
ones the first ``--max-size`` bytes are changed, which is where their tables are, and truncations are sampled.
Every case runs in a child process: it must load or raise one of the package's errors, and when it loads it
must run. ``--slice`` takes that many cases, spread by the seed. The exit status tells whether all kept the rule.
"""

from __future__ import annotations

import argparse
import json
import random
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import harness

NAMES = ("model.pte", "payload_inline.xnnpack", "payload_buffers.fb", "seed.fb")
WORDS = (0, 1, 0x7FFFFFFF, 0xFFFFFFFF)


def changes(size: int, max_size: int) -> Iterator[tuple[int, int | None]]:
    """(offset, word) of every change; a word of None cuts the file off there."""
    small = size <= max_size
    for at in range(size) if small else range(0, size, size // max_size + 1):
        yield at, None
    for at in range(0, min(size, max_size) - 3, 4):
        for word in WORDS:
            yield at, word


def broken(data: bytes, at: int, word: int | None) -> bytes:
    return data[:at] if word is None else data[:at] + struct.pack("<I", word) + data[at + 4 :]


class Campaign:
    """All cases of all files, numbered."""

    def __init__(self, paths: list[Path], max_size: int) -> None:
        self.paths = paths
        self.cases = [
            (number, at, word)
            for number, path in enumerate(paths)
            for at, word in changes(path.stat().st_size, max_size)
        ]

    def choose(self, count: int, seed: int) -> None:
        random.Random(seed).shuffle(self.cases)
        del self.cases[count:]
        self.cases.sort(key=lambda case: case[0])

    def __call__(self, start: int) -> Iterator[bytes]:
        held, data = -1, b""
        for number, at, word in self.cases[start:]:
            if number != held:
                held, data = number, self.paths[number].read_bytes()
            yield broken(data, at, word)

    def name(self, case: int) -> str:
        number, at, word = self.cases[case]
        path = self.paths[number]
        what = f"cut at {at}" if word is None else f"{word:#x} at {at}"
        return f"{path.parent.name}/{path.name}, {what}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--max-size", type=int, default=4096)
    parser.add_argument("--slice", type=int, default=0, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--save", type=Path, help="where files that break the rule go")
    parser.add_argument("--json", type=Path, help="where the summary goes")
    parser.add_argument("--hang", type=float, default=20.0)
    given = parser.parse_args(arguments)
    paths = sorted(path for folder in given.folders for name in NAMES for path in folder.rglob(name))
    campaign = Campaign(paths, given.max_size)
    if given.slice:
        campaign.choose(given.slice, given.seed)
    begin = last = time.monotonic()

    saved: list[int] = []

    def show(report: harness.Report) -> None:
        for case, what in report.findings[len(saved) :]:
            saved.append(case)
            print(f"{campaign.name(case)}: {what}", flush=True)
            if given.save is not None:
                given.save.mkdir(parents=True, exist_ok=True)
                number, at, word = campaign.cases[case]
                path = paths[number]
                name = f"{path.parent.name}-{path.stem}-{at}-{'cut' if word is None else f'{word:x}'}{path.suffix}"
                (given.save / name).write_bytes(broken(path.read_bytes(), at, word))

    def tell(report: harness.Report, at: int) -> None:
        nonlocal last
        show(report)
        if time.monotonic() - last > 60:
            last = time.monotonic()
            print(f"{at} of {len(campaign.cases)}, {len(report.findings)} findings, {last - begin:.0f} s", flush=True)

    report = harness.isolated(campaign, start=given.start, hang=given.hang, tell=tell)
    show(report)
    summary = {
        "files": len(paths),
        "cases": len(campaign.cases),
        "seconds": round(time.monotonic() - begin, 1),
        "outcomes": dict(report.outcomes.most_common()),
        "slowest": [round(report.slowest[0], 4), report.slowest[1] >= 0 and campaign.name(report.slowest[1])],
        "largest": [report.largest[0], report.largest[1] >= 0 and campaign.name(report.largest[1])],
        "findings": [[campaign.name(case), what] for case, what in report.findings],
    }
    print(json.dumps({name: value for name, value in summary.items() if name != "findings"}))
    if given.json is not None:
        given.json.write_text(json.dumps(summary, indent=1) + "\n")
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main())
