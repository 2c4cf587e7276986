"""Matrix product kernels of the pinned XNNPACK, one by one against plain loops, corrected or as upstream has them.

    python vendor/XNNPACK/check_kernels.py                    # the corrected kernels; 0 if all are right, 1 if not
    python vendor/XNNPACK/check_kernels.py --unchanged        # upstream's: shows the known faults
    python vendor/XNNPACK/check_kernels.py --production --step 50 --only igemm

In come the checked sources, as for a build, and a C compiler; out comes a line for each kernel. Where the processor has
the instructions, a kernel is compiled for them; AMX and AVX512-FP16 kernels are otherwise compiled with
check/immintrin.h, which does the same in plain C. What can be wrong in a kernel's pointers, masks and stores shows on
any processor; what compilers make of the real instructions shows only where they can run.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import build  # noqa: E402

CHECK = HERE / "check"
# Flags and the names in /proc/cpuinfo of what each family needs. Only the first two have a form in plain C.
_BASE = "-mf16c -mfma -mavx512f -mavx512cd -mavx512bw -mavx512dq -mavx512vl"
FAMILIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "avx512amx": (f"{_BASE} -mavx512vnni -mgfni -mamx-tile -mamx-int8 -DNATIVE_AMX", ("amx_tile", "amx_int8", "gfni")),
    "avx512fp16": (f"{_BASE} -mavx512vnni -mgfni -mavx512fp16", ("avx512_fp16",)),
    "avx512skx": (_BASE, ("avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl")),
    "avx512vnni": (f"{_BASE} -mavx512vnni", ("avx512_vnni", "avx512bw", "avx512vl")),
    "avx512vnnigfni": (f"{_BASE} -mavx512vnni -mgfni", ("avx512_vnni", "gfni", "avx512bw", "avx512vl")),
}
IN_PLAIN_C = ("avx512amx", "avx512fp16")
# What the driver can pack for.
KERNEL = re.compile(
    r"(?P<x>qs8-qc8w|qd8-f32-qc8w|qd8-f16-qc8w|qd8-f32-qc4w|f16)-(?P<i>i?)gemm-(?P<mr>\d+)x(?P<nr>\d+)(c(?P<kr>\d+))?-"
    r"minmax-(fp32-)?(?P<family>\w+?)(-broadcast|-prfm)?\.c"
)
ASSEMBLER = re.compile(r'__asm__ volatile \(\s*((?:"[^"\n]*"\s*)+)[^;]*\);')


class CheckError(RuntimeError):
    """The kernels cannot be checked; the message says what was needed and found."""


@dataclass(frozen=True)
class Kernel:
    """A kernel's source file, and what its name tells of it."""

    path: Path
    family: str
    x: str
    igemm: bool
    mr: int
    nr: int
    kr: int

    @property
    def name(self) -> str:
        return self.path.stem


@dataclass(frozen=True)
class Outcome:
    """What became of one kernel: numbers of shapes that were run and that were wrong, and the driver's own words."""

    kernel: Kernel
    native: bool
    shapes: int
    wrong: int
    words: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return self.shapes > 0 and not self.wrong and not any(line.startswith("fault") for line in self.words)


@dataclass(frozen=True)
class Trees:
    """Where the headers and the kernels are, and which kernels a build takes."""

    headers: tuple[Path, ...]
    kernels: Path
    production: frozenset[str]


def trees(folder: Path, changed: bool) -> Trees:
    """The sources in `folder`, unpacked there if they are not, with the corrections of kernels applied or not."""
    upstream, pool = folder / "upstream", folder / "pthreadpool"
    if not pool.exists():
        cache = build.cache_folder()
        build._make_folders(cache)
        # XNNPACK's header includes that of pthreadpool.
        pins = {name: pin for name, pin in build.read_pin().items() if name in ("xnnpack", "pthreadpool")}
        sources = build.obtain(pins, build._ways(cache, folder))
        sources["xnnpack"].unpack(upstream)
        sources["pthreadpool"].unpack(pool)
    lists = "".join(path.read_text("utf-8") for path in (upstream / "cmake" / "gen").glob("*_microkernels.cmake"))
    production = frozenset(
        Path(name).name for each in re.findall(r"^SET\(PROD_\w+([^)]*)\)", lists, re.MULTILINE) for name in each.split()
    )
    others = (upstream / "src", pool / "include")
    if not changed:
        return Trees((upstream / "include", *others), upstream / "src", production)
    corrected = folder / "corrected"
    if not corrected.exists():
        for part in ("include", *(str(each.relative_to(upstream)) for each in upstream.glob("src/*gemm/gen"))):
            shutil.copytree(upstream / part, corrected / part)
        changes = build.load_changes()
        chosen = [each for each in changes.CHANGES if "gemm/gen/" in each.glob or each.glob.startswith("include/")]
        changes.apply({"xnnpack": corrected}, chosen)
    return Trees((corrected / "include", *others), corrected / "src", production)


def kernels(where: Trees, families: Sequence[str] = tuple(FAMILIES), production: bool = False) -> Iterator[Kernel]:
    """Those of the families that the driver knows how to call."""
    for path in sorted(where.kernels.glob("*gemm/gen/*.c")):
        found = KERNEL.fullmatch(path.name)
        if not found or found["family"] not in families or (production and path.name not in where.production):
            continue
        packed_alike = "qd8-f32-qc4w" if found["family"] == "avx512vnnigfni" else "qd8-f32-qc8w"
        if found["family"] not in IN_PLAIN_C and found["x"] != packed_alike:
            # Filters of the others are packed in other ways (as for unsigned inputs).
            continue
        mr, nr, kr = (int(found[each] or 1) for each in ("mr", "nr", "kr"))
        yield Kernel(path, found["family"], found["x"], bool(found["i"]), mr, nr, kr)


def processor_flags() -> frozenset[str]:
    """Names of instruction sets as Linux shows them; none where it does not."""
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8")
    except OSError:
        return frozenset()
    found = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return frozenset(found[1].split() if found else ())


def is_native(family: str) -> bool:
    """Whether this processor runs the family's kernels."""
    return processor_flags().issuperset(FAMILIES[family][1])


def check(
    kernel: Kernel, where: Trees, folder: Path, compiler: str, *, native: bool, seed: int = 0, step: int = 1
) -> Outcome:
    """Compile one kernel and run it over every step-th shape."""
    text = kernel.path.read_text("utf-8")
    function = re.search(r"^void (xnn_\w+)\(", text, re.MULTILINE)
    if not function:
        raise CheckError(f"{kernel.name}: no function found")
    work = Path(tempfile.mkdtemp(dir=folder))
    source, program = work / kernel.path.name, work / "check"
    includes = [f"-I{path}" for path in where.headers]
    flags = FAMILIES[kernel.family][0].split()
    if not native:
        statements = text.count("__asm__")
        text, replaced = ASSEMBLER.subn(r"shim_assembler(\1, &tile_data);", text)
        if replaced != statements:
            raise CheckError(f"{kernel.name}: {statements} statements of assembler, {replaced} of them understood")
        includes.insert(0, f"-I{CHECK}")
        # Inlining the header's functions a thousand times takes the compiler ten times as long, and gains nothing here.
        flags = ["-fno-inline", *(["-D__AVX512FP16__"] if kernel.family == "avx512fp16" else [])]
    source.write_text(text, "utf-8")
    out = "b" if kernel.x == "qs8-qc8w" else "f" if kernel.x.startswith("qd8-f32") else "h"
    x = {"qs": "q", "qd": "d", "f1": "h"}[kernel.x[:2]]
    defines = {
        "KERNEL": function[1], "MR": kernel.mr, "NR": kernel.nr, "KR": kernel.kr, "IGEMM": int(kernel.igemm),
        "X": f"'{x}'", "OUT": f"'{out}'", "NIBBLES": int(kernel.x.endswith("qc4w")),
    }  # fmt: skip
    words = [*compiler.split(), "-std=gnu99", "-O1", "-w"]
    driver = [f"-D{name}={value}" for name, value in defines.items()]
    if native and kernel.family == "avx512amx":
        driver.append("-DNATIVE_AMX")
    # The kernel alone gets the other immintrin.h: the driver is ordinary C.
    plain = [f"-I{path}" for path in where.headers]
    commands = (
        [*words, *flags, *includes, "-c", str(source), "-o", str(work / "kernel.o")],
        [*words, *driver, *plain, "-c", str(CHECK / "kernel.c"), "-o", str(work / "driver.o")],
        [*words, str(work / "driver.o"), str(work / "kernel.o"), "-lm", "-o", str(program)],
    )
    for command in commands:
        made = subprocess.run(command, capture_output=True, text=True)
        if made.returncode:
            raise CheckError(f"{kernel.name} cannot be compiled:\n{made.stderr}")
    answer = subprocess.run([str(program), str(seed), str(step)], capture_output=True, text=True)
    shutil.rmtree(work)
    lines = tuple(answer.stdout.splitlines())
    done = re.search(r"^done (\d+) (\d+)$", answer.stdout, re.MULTILINE)
    if not done and not any(line.startswith("fault") for line in lines):
        raise CheckError(f"{kernel.name}: ended with {answer.returncode} and said {answer.stdout or answer.stderr!r}")
    return Outcome(
        kernel,
        native,
        int(done[1]) if done else 0,
        int(done[2]) if done else 0,
        tuple(line for line in lines if not line.startswith("done")),
    )


def check_all(
    chosen: Sequence[Kernel], where: Trees, folder: Path, *, plain: bool, seed: int, step: int, jobs: int
) -> Iterator[Outcome]:
    """Outcomes in the order of `chosen`."""
    compiler = build.find_compiler().c

    def one(kernel: Kernel) -> Outcome:
        native = is_native(kernel.family) and not (plain and kernel.family in IN_PLAIN_C)
        return check(kernel, where, folder, compiler, native=native, seed=seed, step=step)

    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(one, chosen)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unchanged", action="store_true", help="check upstream's kernels, without corrections")
    parser.add_argument("--production", action="store_true", help="only kernels that a build takes")
    parser.add_argument("--plain", action="store_true", help="use the plain C form also where the processor needs none")
    parser.add_argument("--family", nargs="*", choices=tuple(FAMILIES), default=list(FAMILIES), help="default: all")
    parser.add_argument("--only", default="", metavar="TEXT", help="kernels whose name contains this")
    parser.add_argument("--step", type=int, default=7, metavar="N", help="run every N-th shape of the grid (default 7)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=build._cores(), metavar="N")
    parser.add_argument("--sources", type=Path, metavar="DIR", help="keep the unpacked sources there")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        folder = chosen.sources or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            where = trees(folder, not chosen.unchanged)
            todo, left = [], 0
            for kernel in kernels(where, chosen.family, chosen.production):
                if chosen.only not in kernel.name:
                    continue
                if kernel.family in IN_PLAIN_C or is_native(kernel.family):
                    todo.append(kernel)
                else:
                    left += 1
            shapes = bad = 0
            for outcome in check_all(
                todo, where, Path(scratch), plain=chosen.plain, seed=chosen.seed, step=chosen.step, jobs=chosen.jobs
            ):
                shapes += outcome.shapes
                bad += not outcome.ok
                form = "on this CPU" if outcome.native else "in plain C"
                verdict = "right" if outcome.ok else f"WRONG in {outcome.wrong}" if outcome.shapes else "FAULT"
                print(f"{outcome.kernel.name}: {verdict} of {outcome.shapes} shapes, {form}", flush=True)
                for line in outcome.words:
                    print(f"    {line}")
        except (build.BuildError, CheckError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    print(f"{len(todo)} kernels, {shapes} shapes, seed {chosen.seed}, {bad} kernels wrong")
    if left:
        print(f"{left} kernels left out: this CPU lacks their instructions, and they have no form in plain C")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
