"""The project's corrections of the pinned sources: pristine trees come in, corrected trees go out.

What needs more than a few words is a file of our own in own/, put into XNNPACK's tree; corrections compile and call it.
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


OWN = Path(__file__).resolve().parent / "own"
# Where the files of own/ go in XNNPACK's tree, so that they are included as "xnnfast/…".
OWN_FOLDER = "src/xnnfast"


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


# As CMake writes regular expressions. These are kernels whose inner loops, compiled by GCC 12, store fewer sums with
# the options than without.
_SPILLING = (
    "/f32-(qc8w-)?i?gemm-5x16-minmax-(avx|fma3|avx2)-broadcast(-prfm)?[.]c$"
    "|/q[su]8-(qc8w-)?dwconv-(9|25)p(16|32)c-minmax-fp32-(avx2|avx512skx)-mul32[.]c$"
    "|/qs8-(qc8w-)?dwconv-(9|25)p16c-minmax-fp32-avx-mul16-add16[.]c$"
    "|/qs8-rdsum-7p7x-minmax-fp32-avx2"
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
        why="For a one-row tile the AMX indirect GEMM reads at a0 but advances a15 (a6 in kernels of 7 rows), so with "
        "more than 64 input channels the last output pixel is made of the first 64 over and over. Upstream corrected "
        "it in 7a161070f3.",
        glob="src/*-igemm/gen/*avx512amx*.c",
        pattern=r"(if \(mr == 1\)\s*\{\s*while \([^\n]*\{\s*_tile_loadd\(4, a0, 64\);[^\n]*\n\s*)a(?:6|15) \+= 64;",
        replacement=r"\1a0 += 64;",
        files=21,
        places=21,
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
        name="qb4w-unaligned-sums",
        component="xnnpack",
        why="On processors without AVX2, dynamic int8 with blockwise 4-bit weights loads the sums at the start of each "
        "panel as if they lay at a multiple of 16 bytes. Scales take 8 bytes per block, so with an odd number of "
        "blocks every second panel ends the process.",
        glob="src/qd8-f32-qb4w-gemm/gen/*x4c8-minmax-*.c",
        pattern=r"\b_mm_load_ps(\(\(const float\*\) w\);)",
        replacement=r"_mm_loadu_ps\1",
        files=24,
        places=24,
    ),
    Change(
        name="quantization-params-room",
        component="xnnpack",
        why="A kernel of 14 rows that is given 2 or 3 computes the others, too, and the last of them is what stays: by "
        "the parameters behind the last row's, of which 10 are made equal to those, and 12 are needed. So the last of "
        "2 or 3 rows is wrong (blockwise 4-bit filters on Intel's processors with AVX512-VNNI and GFNI). AMX reads 16.",
        glob="include/xnnpack.h",
        pattern=r"^(#define XNN_EXTRA_QUANTIZATION_PARAMS) 10$",
        replacement=r"\1 15",
        files=1,
        places=1,
    ),
    Change(
        name="planner-room-below",
        component="xnnpack",
        why="The memory planner looks for room between the blocks that are in use and behind the last, never below the "
        "first: buffers of a chain of layers climb, and a ResNet-50 takes 44 MB where 10 do.",
        glob="src/memory-planner.c",
        pattern=r"^  if \(num_mem_blocks == 1\) \{\n    return live_mem_blocks\[0\]\.end;\n  \}\n"
        r"([\s\S]*?)^(  size_t smallest_gap_size = SIZE_MAX;\n)",
        replacement=r"\1  if (live_mem_blocks[0].start >= to_alloc_size) {\n    return 0;\n  }\n\2",
        files=1,
        places=1,
    ),
    Change(
        name="fully-connected-hit-size",
        component="xnnpack",
        why="A convolution whose packed weights are found in a weights cache tells their size, so that the cache can "
        "refuse a block of another; a fully connected layer reads what it is given.",
        glob="src/operators/fully-connected-nc.c",
        pattern=r"^    fully_connected_op->packed_weights\.offset = cache_offset;\n",
        replacement=r"    fully_connected_op->packed_weights.offset = xnn_look_up_or_insert_weights_cache(\n"
        r"        fully_connected_op->weights_cache, &cache_key, NULL, aligned_total_weights_size);\n",
        files=1,
        places=1,
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
    Change(
        name="spilled-sums",
        component="xnnpack",
        why="GCC keeps one of the sums of these kernels on the stack, so that each step waits for a store to be read "
        "back: fp32 products with 5 rows take twice as long. Scheduling before registers are chosen avoids it; "
        "other kernels get worse by it, and Clang does well without.",
        glob="CMakeLists.txt",
        pattern=r'^( *SET_PROPERTY\(SOURCE )\$\{ALL_MICROKERNEL_SRCS\}( APPEND_STRING PROPERTY COMPILE_FLAGS )'
        r'" -fno-math-errno "\)\n',
        replacement=r"\g<0>"
        r'  IF(CMAKE_C_COMPILER_ID STREQUAL "GNU" AND XNNPACK_TARGET_PROCESSOR MATCHES "^x86")\n'
        r"    SET(XNNFAST_SPILLING_SRCS ${ALL_MICROKERNEL_SRCS})\n"
        r"    LIST(FILTER XNNFAST_SPILLING_SRCS INCLUDE REGEX "
        rf'"{_SPILLING}")\n'
        r'  \1${XNNFAST_SPILLING_SRCS}\2" -fschedule-insns -fsched-pressure ")\n'
        r"  ENDIF()\n",
        files=1,
        places=1,
    ),
    Change(
        name="loop-order-build",
        component="xnnpack",
        why="own/loop-order.c walks over the rows of matrix products inside blocks of channels, whose filter stays in "
        "the level 2 cache. It is compiled beside the code that runs operators.",
        glob="CMakeLists.txt",
        pattern=r"^( *ADD_LIBRARY\(operator-run OBJECT src/operator-run\.c)\)$",
        replacement=rf"\1 {OWN_FOLDER}/loop-order.c)",
        files=1,
        places=1,
    ),
    Change(
        name="loop-order-cpuinfo",
        component="xnnpack",
        why="It asks cpuinfo for the size of the level 2 cache.",
        glob="CMakeLists.txt",
        pattern=r"^( *TARGET_LINK_LIBRARIES\()hardware-config( PRIVATE cpuinfo\)\n)",
        replacement=r"\g<0>\1operator-run\2",
        files=1,
        places=1,
    ),
    Change(
        name="loop-order-include",
        component="xnnpack",
        why="Declares what the next change calls.",
        glob="src/operator-run.c",
        pattern=r'^#include "pthreadpool\.h"\n',
        replacement=r'\g<0>#include "xnnfast/loop-order.h"\n',
        files=1,
        places=1,
    ),
    Change(
        name="loop-order-call",
        component="xnnpack",
        why="Every step of every operator is shown to own/loop-order.c first; what it does not take runs as before.",
        glob="src/operator-run.c",
        pattern=r"^( +)for \(size_t i = 0; i < XNN_MAX_COMPUTE_INVOCATIONS; i\+\+\) \{\n",
        replacement=r"\g<0>"
        r"\1  void* const step_context = (void*) ((uintptr_t) &op->context + op->compute[i].context_offset);\n"
        r"\1  if (xnnfast_run_turned(&op->compute[i], step_context, threadpool, flags)) {\n"
        r"\1    continue;\n"
        r"\1  }\n",
        files=1,
        places=1,
    ),
    Change(
        name="isa-cap-build",
        component="xnnpack",
        why="own/isa-cap.c takes from the instruction sets found what is above XNNFAST_ISA, so that kernels for lesser "
        "processors can be tested and measured on this one.",
        glob="CMakeLists.txt",
        pattern=r"^( *ADD_LIBRARY\(hardware-config OBJECT src/configs/hardware-config\.c)\)$",
        replacement=rf"\1 {OWN_FOLDER}/isa-cap.c)",
        files=1,
        places=1,
    ),
    Change(
        name="isa-cap-include",
        component="xnnpack",
        why="Declares what the next change calls.",
        glob="src/configs/hardware-config.c",
        pattern=r'^#include "xnnpack/hardware-config\.h"\n',
        replacement=r'\g<0>#include "xnnfast/isa-cap.h"\n',
        files=1,
        places=1,
    ),
    Change(
        name="isa-cap-call",
        component="xnnpack",
        why="All is detected here, and the flags that are made of it follow.",
        glob="src/configs/hardware-config.c",
        pattern=r"^( +)hardware_config\.arch_flags = 0;\n",
        replacement=r"\1xnnfast_cap_isa(&hardware_config);\n\g<0>",
        files=1,
        places=1,
    ),
    Change(
        name="second-isa-build",
        component="xnnpack",
        why="own/second-isa.c chooses other kernels for 8-bit products whose shape AMX would mostly fill with padding, "
        "as a first layer of 3 channels. The choice is per operator, where XNNPACK's is per process.",
        glob="CMakeLists.txt",
        pattern=r"^( *)src/configs/gemm-config\.c\n",
        replacement=rf"\g<0>\1{OWN_FOLDER}/second-gemm-config.c\n\1{OWN_FOLDER}/second-isa.c\n",
        files=1,
        places=1,
    ),
    Change(
        name="second-isa-include",
        component="xnnpack",
        why="Declares what the next changes call, where configurations are declared.",
        glob="src/xnnpack/config.h",
        pattern=r'^#include "xnnpack/microparams\.h"\n',
        replacement=r'\g<0>#include "xnnfast/second-isa.h"\n',
        files=1,
        places=1,
    ),
    Change(
        name="second-isa-convolution",
        component="xnnpack",
        why="Convolutions, also transposed ones, let it choose. A window's elements count alike on both sides.",
        glob="src/operators/*convolution-nhwc.c",
        pattern=r"\bxnn_init_(qs8_qc8w|qd8_f32_qc8w|qd8_f16_qc8w)_gemm_config\(\);",
        replacement=r"xnnfast_choose_gemm_config(\n"
        r"    xnn_init_\1_gemm_config(), xnnfast_second_\1_gemm_config, group_input_channels, group_output_channels);",
        files=2,
        places=6,
    ),
    Change(
        name="second-isa-fully-connected",
        component="xnnpack",
        why="So do fully connected layers.",
        glob="src/operators/fully-connected-nc.c",
        pattern=r"\bxnn_init_(qs8_qc8w|qd8_f32_qc8w|qd8_f16_qc8w|qd8_f32_qc4w)_gemm_config\(\);",
        replacement=r"xnnfast_choose_gemm_config(\n"
        r"    xnn_init_\1_gemm_config(), xnnfast_second_\1_gemm_config, input_channels, output_channels);",
        files=1,
        places=5,
    ),
)


def own_files() -> list[Path]:
    """Our own sources, in a fixed order."""
    return sorted(path for path in OWN.iterdir() if path.suffix in (".c", ".h"))


def content() -> bytes:
    """All that decides what becomes of the pinned sources: this file and our own."""
    parts = [Path(__file__), *own_files()]
    return b"".join(b"%s %d\n" % (path.name.encode(), len(path.read_bytes())) + path.read_bytes() for path in parts)


def add_own(roots: Mapping[str, Path]) -> list[str]:
    """Put our own sources into XNNPACK's tree; their names there."""
    folder = roots["xnnpack"] / OWN_FOLDER
    try:
        folder.mkdir()
    except OSError as error:
        raise ChangeError(f"{folder} must be a folder that XNNPACK does not have: {error.strerror}") from error
    for path in own_files():
        (folder / path.name).write_bytes(path.read_bytes())
    return [f"{OWN_FOLDER}/{path.name}" for path in own_files()]


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
