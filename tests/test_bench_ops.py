"""The bench of the operators has a case for each of them, and runs."""

import os
import subprocess
import sys
from pathlib import Path

from xnnfast.ops import OPS

BENCH = Path(__file__).resolve().parent.parent / "bench" / "bench_ops.py"


def run(*arguments):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(
        [sys.executable, BENCH, *arguments], capture_output=True, text=True, timeout=120, env=environment
    )


def test_each_combination_gets_a_line():
    done = run("--only", "add", "conv_transpose2d", "argmax_pooling2d", "--rounds", "2")
    assert done.returncode == 0, done.stderr
    found = [tuple(line.split()[:2]) for line in done.stdout.splitlines()[1:]]
    assert found == [
        (name, "/".join(types))
        for name in ("add", "conv_transpose2d", "argmax_pooling2d")
        for types in OPS[name].datatypes
    ]


def test_unknown_names_are_refused():
    done = run("--only", "addition")
    assert done.returncode == 2 and "no operator is called addition" in done.stderr
