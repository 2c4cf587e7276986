"""Files that were made to do harm: the verdicts of tests/hostile/README.md, and short searches of fixed seeds."""

from __future__ import annotations

import pathlib
import re
import runpy
import subprocess
import sys

import files
import pytest

ROOT = pathlib.Path(__file__).parents[1]
FOLDER = ROOT / "tests/hostile"
sys.path.insert(0, str(ROOT / "fuzz"))

VERDICTS = dict(re.findall(r"^\| `([^`]+)` \| (\w+) \|", (FOLDER / "README.md").read_text(), re.MULTILINE))

JUDGE = """
    import resource, sys, time
    import numpy as np
    import xnnfast
    from xnnfast import Program, Runtime, XnnfastError, load

    room = 1 << 30

    def limit():
        # Address space: what the process has now, and a gigabyte.
        with open("/proc/self/statm") as stream:
            now = int(stream.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + room, now + room))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def fill(shape, dtype):
        return np.ones(shape, dtype)

    def judge(path):
        if path.endswith(".pte"):
            program = Program(path)
            ports = program.inputs()
            program.run(*[fill(port.shape, port.dtype) if port.kind == "Tensor" else port.value for port in ports])
        else:
            graph = load(path)
            Runtime(graph).run(*[fill(value.shape, value.dtype) for value in graph.inputs])
        return "runs"

    # Everything is imported and set up, so that what follows is the file's doing.
    good, path = sys.argv[1:]
    judge(good)
    limit()
    begin, before = time.thread_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        verdict = judge(path)
    except XnnfastError as error:
        verdict = type(error).__name__
    seconds = time.thread_time() - begin
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert judge(good) == "runs"
    print(verdict, seconds, grown)
"""


@pytest.mark.parametrize("name", sorted(VERDICTS))
def test_verdict(name, tmp_path):
    import textwrap

    good = tmp_path / "good.pte"
    good.write_bytes(files.program(alignment=16))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(JUDGE), str(good), str(FOLDER / name)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    verdict, seconds, grown = done.stdout.split()
    assert verdict == VERDICTS[name]
    assert float(seconds) < 1
    assert int(grown) < 256 << 10


def test_every_file_has_a_verdict_and_is_what_its_maker_makes():
    made = {name: make() for name, make in runpy.run_path(str(FOLDER / "make.py"))["MAKERS"].items()}
    there = {path.name: path.read_bytes() for path in FOLDER.iterdir() if path.suffix not in (".py", ".md", "")}
    assert set(there) == set(VERDICTS) == set(made)
    for name, data in there.items():
        assert data == made[name], name
        assert len(data) < 1 << 16


# ---- short searches; `make fuzz` runs longer ones


def searched(script, *arguments):
    """What a script of fuzz/ prints; it must find nothing."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "fuzz" / script), *map(str, arguments)], capture_output=True, text=True, timeout=250
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


def test_changed_files_load_or_are_refused():
    """Fields, ids, dims, offsets, lengths, tables and bytes of files of every operator, dialect and container."""
    told = searched("search.py", "--cases", 24000, "--seed", 11)
    assert '"executions": 24000' in told and '"ran"' in told


@files.needs_shared
def test_cut_and_overwritten_programs_load_or_are_refused():
    """A part of what fuzz/corpus_campaign.py does with every exported file."""
    told = searched("corpus_campaign.py", files.SHARED / "conformance", "--slice", 8000, "--seed", 7)
    assert '"cases": 8000' in told


def test_a_finding_is_told(tmp_path):
    """The searches themselves: what dies, hangs, raises or eats memory is noticed, and the next case still runs."""
    script = tmp_path / "faulty.py"
    script.write_text(
        "import ctypes, sys, time\n"
        f"sys.path.insert(0, {str(ROOT / 'fuzz')!r})\n"
        "import harness\n"
        "def trial(data):\n"
        "    what = data[0]\n"
        "    if what == 1: ctypes.string_at(8)\n"
        "    if what == 2: time.sleep(60)\n"
        "    if what == 3: raise KeyError('three')\n"
        "    if what == 4: bytearray(300 << 20)\n"
        "    if what == 5: sys.exit(5)\n"
        "    if what == 6: __import__('os')._exit(6)\n"
        "    return 'fine'\n"
        "def cases(start):\n"
        "    yield from [bytes([n]) for n in range(8)][start:]\n"
        "report = harness.isolated(cases, trial=trial, hang=3)\n"
        "assert report.executions == 8 and report.outcomes['fine'] == 3, report.outcomes\n"
        "told = {case: what.strip().splitlines()[-1] for case, what in report.findings}\n"
        "assert sorted(told) == [1, 2, 3, 4, 5, 6], told\n"
        "assert 'SIGSEGV' in told[1] and 'hangs' in told[2] and 'three' in told[3] and 'MiB' in told[4], told\n"
        "assert 'SystemExit' in told[5] and 'status 6' in told[6], told\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
