"""Both searches one after the other for a set time: ``python fuzz/run.py SECONDS [FOLDER...]``.

Each gets half of the time and a seed that is printed. Folders hold more seeds: good files of any container. Where
Atheris can't be had, all the time goes to the search that needs nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def guided(seconds: float, seed: int, corpus: Path, finds: Path, instrumented: Path) -> int:
    """The coverage-guided search; its status."""
    options = [f"-max_total_time={seconds:.0f}", f"-seed={seed}", f"-artifact_prefix={finds}/", "-print_final_stats=1"]
    environment = dict(os.environ)
    built = subprocess.run([sys.executable, FOLDER / "build_reader.py", instrumented], capture_output=True, text=True)
    if built.returncode == 0:
        site = Path(importlib.util.find_spec("atheris").origin).parents[1]  # type: ignore[union-attr,arg-type]
        environment |= {
            "LD_PRELOAD": str(site / "asan_with_fuzzer.so"),
            "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
            "PYTHONMALLOC": "malloc",
            "PYTHONPATH": str(instrumented),
        }
    else:
        print(f"only Python is instrumented: {built.stderr.strip().splitlines()[-1:]}", flush=True)
    command = [sys.executable, FOLDER / "fuzz_reader.py", *options, corpus]
    return subprocess.run(command, env=environment, cwd=finds).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("seconds", type=float)
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--keep", type=Path, help="where corpus and findings are kept")
    given = parser.parse_args()
    keep = given.keep or Path(tempfile.mkdtemp(prefix="xnnfast-fuzz-"))
    corpus, finds = keep.resolve() / "corpus", keep.resolve() / "findings"
    for folder in (corpus, finds):
        folder.mkdir(parents=True, exist_ok=True)
    seed, status, seconds = secrets.randbelow(1 << 31), 0, given.seconds
    print(f"seed {seed}, corpus and findings in {keep}", flush=True)
    if importlib.util.find_spec("atheris") is not None:
        import seeds

        for data in seeds.corpus(*given.folders):
            (corpus / hashlib.sha256(data).hexdigest()[:24]).write_bytes(data)
        seconds /= 2
        status |= guided(seconds, seed, corpus, finds, keep.resolve() / "instrumented") != 0
    else:
        print("no Atheris here: pip install atheris", flush=True)
    command = [sys.executable, FOLDER / "search.py", *given.folders, "--seconds", seconds, "--seed", seed]
    status |= subprocess.run([*map(str, command), "--save", str(finds)]).returncode != 0
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
