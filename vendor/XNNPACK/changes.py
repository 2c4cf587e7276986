"""The project's corrections of the pinned sources: pristine trees come in, corrected trees go out.

Each correction is a row of CHANGES and says how many files and places it must hit. A row that hits any other number
stops the build, because then the sources are not the ones the correction was written for and its effect is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


class ChangeError(RuntimeError):
    """A correction did not fit the sources it was given."""


@dataclass(frozen=True)
class Change:
    """One correction. `pattern` is replaced in every file that matches `glob` inside the tree of `component`."""

    name: str
    component: str
    why: str
    glob: str
    pattern: str
    replacement: str
    files: int
    places: int


@dataclass(frozen=True)
class Applied:
    """What a correction did, as it is written into build-info.json."""

    name: str
    component: str
    why: str
    files: int
    places: int


# The kernels' own flags (CMakeLists.txt sets them per file), so that the question asked is the one the build will ask.
_AVX512 = "-mf16c -mfma -mavx512f -mavx512cd -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mgfni"

# The AMX kernels write tile instructions through the assembler, which is a program of its own and may be older than the
# compiler: the question is whether this compiles and assembles, not whether a flag is known.
_AMX_PROBE = """\
#include <immintrin.h>
static char tiles[3][1024];
int main(void) {
  static const char config[64] = {1};
  __asm__ volatile ("ldtilecfg %0" :: "m" (config));
  _tile_loadd(4, tiles[0], 64);
  _tile_loadd(5, tiles[1], 64);
  _tile_dpbssd(0, 4, 5);
  _tile_stored(0, tiles[2], 64);
  return 0;
}
"""

_FP16_PROBE = """\
#include <immintrin.h>
int main(int argc, char** argv) {
  unsigned short in[32] = {0}, out[32];
  const __m512h a = _mm512_loadu_ph(in);
  _mm512_storeu_ph(out, _mm512_sqrt_ph(_mm512_fmadd_ph(a, a, _mm512_max_ph(a, a))));
  return out[argc & 31];
}
"""


def _gate(option: str) -> str:
    """The version test that switches `option` off, from its GNU branch to the ENDIF in the first column."""
    return (
        r'^IF\(CMAKE_C_COMPILER_ID STREQUAL "GNU"\)\n'
        r'\s+IF\(CMAKE_C_COMPILER_VERSION VERSION_LESS "13"\)\n'
        rf"\s+SET\({option} OFF\)\n"
        r"(?:.*\n)*?ENDIF\(\)\n"
    )


def _probe(option: str, flags: str, source: str) -> str:
    """CMake text that keeps `option` on exactly when `source` compiles, assembles and links with `flags`."""
    answer = option.replace("ENABLE", "COMPILER_HAS")
    return (
        "INCLUDE(CheckCSourceCompiles)\n"
        f'SET(CMAKE_REQUIRED_FLAGS "{flags}")\n'
        f"CHECK_C_SOURCE_COMPILES([==[\n{source}]==] {answer})\n"
        "UNSET(CMAKE_REQUIRED_FLAGS)\n"
        f"IF(NOT {answer})\n"
        f"  SET({option} OFF)\n"
        "ENDIF()\n"
    )


CHANGES: tuple[Change, ...] = (
    Change(
        name="amx-gate",
        component="xnnpack",
        why="The AMX kernels are left out for gcc before 13 and clang before 15 without a word, though gcc 12 compiles "
        "them. The compiler is asked instead of its version.",
        glob="CMakeLists.txt",
        pattern=_gate("XNNPACK_ENABLE_AVX512AMX"),
        replacement=_probe("XNNPACK_ENABLE_AVX512AMX", f"{_AVX512} -mamx-tile -mamx-int8", _AMX_PROBE),
        files=1,
        places=1,
    ),
    Change(
        name="avx512fp16-gate",
        component="xnnpack",
        why="The same test on the version leaves the AVX512-FP16 kernels out. The compiler is asked instead.",
        glob="CMakeLists.txt",
        pattern=_gate("XNNPACK_ENABLE_AVX512FP16"),
        replacement=_probe("XNNPACK_ENABLE_AVX512FP16", f"{_AVX512} -mavx512fp16", _FP16_PROBE),
        files=1,
        places=1,
    ),
    Change(
        name="amx-igemm-single-row",
        component="xnnpack",
        why="For a one-row tile the AMX indirect GEMM reads at a0 but advances a15, so with more than 64 input "
        "channels the last output pixel is made of the first 64 over and over. Upstream corrected it in 7a161070f3.",
        glob="src/*-igemm/gen/*avx512amx*.c",
        pattern=r"(if \(mr == 1\)\s*\{\s*while \([^\n]*\{\s*_tile_loadd\(4, a0, 64\);[^\n]*\n\s*)a15 \+= 64;",
        replacement=r"\1a0 += 64;",
        files=14,
        places=14,
    ),
    Change(
        name="fp16-second-vector-store",
        component="xnnpack",
        why="Tiles of 64 columns store their second vector of 32 numbers one number after the first instead of 32, so "
        "63 of every 64 columns are wrong. Upstream corrected it in 7bdbcd67fb.",
        glob="src/f16-*gemm/gen/*x64-minmax-avx512fp16-broadcast.c",
        pattern=r"(_mm512_storeu_ph\(\(uint16_t\*\) c(\d+) \+ )1(, vacc\2x1\);)",
        replacement=r"\g<1>32\3",
        files=12,
        places=62,
    ),
    Change(
        name="spin-wait",
        component="pthreadpool",
        why="Workers turn a million times round a pause before they sleep. When another process holds one of the "
        "cores, every parallel step waits for that: hundreds of milliseconds, not three. The number has no #ifndef.",
        glob="src/threadpool-common.h",
        pattern=r"^(#define PTHREADPOOL_SPIN_WAIT_ITERATIONS) 1000000$",
        replacement=r"\1 2000",
        files=1,
        places=1,
    ),
)


def apply(roots: Mapping[str, Path], changes: Sequence[Change] = CHANGES) -> list[Applied]:
    """What was changed in the trees `roots` (component → top folder); raises ChangeError at the first misfit."""
    return [_apply_one(change, roots[change.component]) for change in changes]


def _apply_one(change: Change, root: Path) -> Applied:
    pattern = re.compile(change.pattern, re.MULTILINE)
    rewritten: dict[Path, str] = {}
    places = 0
    for path in sorted(root.glob(change.glob)):
        # Bytes, since reading as text would turn line ends and with them the rest of the file.
        text = path.read_bytes().decode("utf-8")
        text, hits = pattern.subn(change.replacement, text)
        if hits:
            rewritten[path] = text
            places += hits
    if (len(rewritten), places) != (change.files, change.places):
        raise ChangeError(
            f"change {change.name!r} must hit {change.places} places in {change.files} files of {change.component} "
            f"({change.glob}), it hit {places} in {len(rewritten)}: these are not the sources it was written for"
        )
    # Written only after the count is right: a refused change leaves the tree as it was.
    for path, text in rewritten.items():
        path.write_bytes(text.encode("utf-8"))
    return Applied(change.name, change.component, change.why, change.files, change.places)
