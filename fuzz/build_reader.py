"""The reading half of the package, compiled by clang so that a coverage-guided fuzzer sees into it.

``python fuzz/build_reader.py TARGET`` makes a folder with a copy of the package whose reading modules carry
edge counters and AddressSanitizer. It needs clang with its runtime libraries (Debian: clang, libclang-rt-dev) and
the tables that a build of the package generates. The other modules are left out: they need XNNPACK.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
READERS = ("_payload", "_flatbuf", "_graph", "_reader")
FLAGS = ["-fsanitize=address,fuzzer-no-link", "-fno-omit-frame-pointer", "-O1", "-g", "-Wno-everything"]


def main(target: Path) -> None:
    from Cython.Build import cythonize
    from setuptools import Distribution, Extension

    clang = os.environ.get("CLANG") or next(
        (name for name in ("clang", *(f"clang-{n}" for n in range(22, 13, -1))) if shutil.which(name)), None
    )
    if clang is None:
        sys.exit("need clang and its runtime libraries (Debian: clang, libclang-rt-dev), found no clang")
    if not (ROOT / "xnnfast/_generated/fields.pxi").exists():
        sys.exit("need xnnfast/_generated, which a build of the package makes")
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(ROOT / "xnnfast", target / "xnnfast", ignore=shutil.ignore_patterns("*.so", "*.c", "__pycache__"))
    os.chdir(target)
    # Loading asserts nothing about XNNPACK: what runs a graph is absent.
    os.environ.update(CC=clang, LDSHARED=f"{clang} -shared")
    extensions = [
        Extension(f"xnnfast.{name}", [f"xnnfast/{name}.pyx"], extra_compile_args=FLAGS, include_dirs=[])
        for name in READERS
    ]
    directives = {"language_level": 3, "boundscheck": False, "wraparound": False, "initializedcheck": False}
    modules = cythonize(extensions, compiler_directives=directives, include_path=["."], build_dir="c")
    built = Distribution({"name": "xnnfast", "ext_modules": modules})
    command = built.get_command_obj("build_ext")
    command.inplace = True
    command.build_temp = "o"
    command.ensure_finalized()
    command.run()


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
