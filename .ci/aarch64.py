"""Builds a wheel for aarch64 Linux on another machine, and tries it under qemu's user emulation.

Compilers and emulator are this machine's (Debian: gcc-aarch64-linux-gnu g++-aarch64-linux-gnu qemu-user); Python for
aarch64 with its headers and the C library come from Debian's packages, fetched by apt into a folder of ours without
root, and NumPy is its own wheel. What has to be there: the build requirements of pyproject.toml, in a Python of the
same minor version as Debian's. The wheel goes to dist/.

The tests take minutes under emulation, so only those that say most about an architecture run by default: kernels of
every operator against NumPy, and the paths that have compiled code of ours.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TRIPLET = "aarch64-linux-gnu"
TOOLS = {
    f"{TRIPLET}-gcc": f"gcc-{TRIPLET}",
    f"{TRIPLET}-g++": f"g++-{TRIPLET}",
    "qemu-aarch64": "qemu-user",
    "apt-get": "apt",
    "dpkg-deb": "dpkg",
}
PACKAGES = ("python3", "libpython3-dev", "libstdc++6")
TESTS = ("tests/test_runtime.py", "tests/test_load.py", "tests/test_payload.py", "tests/test_caps.py")
#: Thousands of calls, to see that memory stays flat: they say nothing about a processor.
SLOW = "memory_stays_flat"
SMOKE = "import xnnfast; c = xnnfast.config(); print(c['machine'], c['families'], c['isa'])"


def load_build() -> Any:
    """vendor/XNNPACK/build.py, which knows Debian's mirrors and where things are kept."""
    spec = importlib.util.spec_from_file_location("xnnpack_build", ROOT / "vendor/XNNPACK/build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def say(text: str) -> None:
    print(f"aarch64: {text}", file=sys.stderr, flush=True)


def run(*command: object, **others: Any) -> None:
    subprocess.run([str(word) for word in command], check=True, **others)


def suite() -> str:
    """The Debian release whose packages are taken: this machine's, if it is a Debian."""
    release = platform.freedesktop_os_release()
    return release["VERSION_CODENAME"] if release.get("ID") == "debian" else "trixie"


def unpack_debian(root: Path, native: Any) -> None:
    """Debian's Python for aarch64 with all it depends on, unpacked into `root`."""
    mirrors = native.debian_mirrors(*native._apt_source_paths())
    keyring = next((path for path in native.KEYRINGS if os.access(path, os.R_OK)), None)
    if not mirrors or keyring is None:
        sys.exit("aarch64: apt of this machine names no mirror of Debian, or debian-archive-keyring is missing")
    root.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root.parent) as scratch:
        state = Path(scratch)
        for part in ("lists/partial", "archives/partial", "empty"):
            (state / part).mkdir(parents=True)
        (state / "status").touch()
        (state / "sources.list").write_text(f"deb [signed-by={keyring}] {mirrors[0]} {suite()} main\n")
        settings = {
            "APT::Architecture": "arm64",
            "APT::Architectures": "arm64",
            "APT::Sandbox::User": "root",
            "Dir::State": state,
            "Dir::State::lists": state / "lists",
            "Dir::State::status": state / "status",
            "Dir::Cache": state,
            "Dir::Cache::archives": state / "archives",
            "Dir::Etc::sourcelist": state / "sources.list",
            "Dir::Etc::sourceparts": state / "empty",
        }
        lines = [f'{name} "{value}";' for name, value in settings.items()]
        # The machine's hooks are about its own package lists.
        lines += [f"#clear {name};" for name in ("APT::Update::Post-Invoke", "APT::Update::Post-Invoke-Success")]
        lines += ["#clear DPkg::Pre-Install-Pkgs;", "#clear APT::Architectures;", 'APT::Architectures {"arm64";};']
        (state / "apt.conf").write_text("\n".join(lines) + "\n")
        apt = ("apt-get", "-c", state / "apt.conf", "-qq", "-o", "Debug::NoLocking=1")
        run(*apt, "update")
        run(*apt, "--yes", "--download-only", "--no-install-recommends", "install", *PACKAGES)
        made = state / "root"
        for package in sorted((state / "archives").glob("*.deb")):
            run("dpkg-deb", "--extract", package, made)
        made.rename(root)


def target_python(root: Path) -> Path:
    """The interpreter in `root`, which this one must be the same version of."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    python = root / "usr/bin" / name
    if not python.exists():
        found = sorted(path.name for path in python.parent.glob("python3.*"))
        sys.exit(f"aarch64: Debian {suite()} has {' '.join(found)}; run this script by that version, not by {name}")
    return python


def build_wheel(root: Path, python: Path, work: Path) -> Path:
    """The wheel, built from a copy of the sources: in the tree stand the facts of this machine."""
    tree = work / "tree"
    skip = shutil.ignore_patterns(
        "build", "dist", "out", "_generated", "*.so", "__pycache__", ".git", ".venv*", "*.egg-info"
    )
    shutil.copytree(ROOT, tree, symlinks=True, ignore=skip)
    headers = root / "usr/include"
    environment = {
        **os.environ,
        "CC": f"{TRIPLET}-gcc",
        "CXX": f"{TRIPLET}-g++",
        # Before those of this machine's Python, which setuptools adds.
        "CFLAGS": f"-I{headers / python.name} -I{headers} -I{headers / TRIPLET / python.name}",
        # What CPython's own cross build sets: facts and platform of the Python that the modules are for.
        "_PYTHON_SYSCONFIGDATA_NAME": f"_sysconfigdata__{TRIPLET}",
        "_PYTHON_HOST_PLATFORM": "linux-aarch64",
        "PYTHONPATH": str(work / "sysconfig"),
    }
    data = f"_sysconfigdata__{TRIPLET}.py"
    (work / "sysconfig").mkdir()
    shutil.copyfile(root / "usr/lib" / python.name / data, work / "sysconfig" / data)
    # Two steps, because packages are looked for before the first has generated one.
    run(sys.executable, "setup.py", "--quiet", "build_ext", cwd=tree, env=environment)
    run(sys.executable, "setup.py", "--quiet", "bdist_wheel", "--dist-dir", work, cwd=tree, env=environment)
    (wheel,) = work.glob("*.whl")
    return wheel


def install(wheel: Path, site: Path, more: list[str]) -> None:
    """The wheel and its dependencies, for the foreign machine."""
    glibc = [f"manylinux_2_{minor}_aarch64" for minor in (17, 27, 28, 34, 35, 36)]
    platforms = [word for name in ("linux_aarch64", "manylinux2014_aarch64", *glibc) for word in ("--platform", name)]
    run(
        *(sys.executable, "-m", "pip", "--quiet", "install", "--target", site, "--only-binary", ":all:"),
        *(*platforms, "--python-version", f"{sys.version_info.major}.{sys.version_info.minor}"),
        *(wheel, *more),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the aarch64 wheel here and try it under emulation.")
    parser.add_argument("tests", nargs="*", default=TESTS, help=f"default: {' '.join(TESTS)}")
    parser.add_argument("--no-doctor", action="store_true", help="leave out the comparison of every kernel")
    parser.add_argument("--cpu", default="max", help="the processor that qemu imitates")
    chosen = parser.parse_args()
    if missing := [package for tool, package in TOOLS.items() if not shutil.which(tool)]:
        sys.exit(f"aarch64: install {' '.join(missing)} (names of Debian)")
    native = load_build()
    started = time.monotonic()
    root = native.cache_folder() / f"aarch64-{suite()}"
    if not root.exists():
        say(f"unpacking Debian {suite()} for arm64 into {root}")
        unpack_debian(root, native)
    python = target_python(root)
    with tempfile.TemporaryDirectory(prefix="xnnfast-aarch64-") as scratch:
        work = Path(scratch)
        wheel = build_wheel(root, python, work)
        (ROOT / "dist").mkdir(exist_ok=True)
        kept = ROOT / "dist" / wheel.name
        shutil.copyfile(wheel, kept)
        say(f"{kept.name}, {kept.stat().st_size} bytes, after {time.monotonic() - started:.0f} s")
        site = work / "site"
        install(wheel, site, ["pytest", "pytest-timeout", "hypothesis", "typer", "rich", "platformdirs"])
        emulated = ["qemu-aarch64", "-cpu", chosen.cpu, "-L", root, python]
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "XNNFAST_"))},
            "PYTHONPATH": str(site),
        }
        run(*emulated, "-c", SMOKE, cwd=work, env=environment)
        if not chosen.no_doctor:
            run(*emulated, "-m", "xnnfast", "doctor", cwd=work, env=environment)
        say(f"tests under emulation, after {time.monotonic() - started:.0f} s")
        # Emulation is some ten times slower than the machine.
        flags = ["-q", "-p", "no:cacheprovider", "-o", "timeout=1800", "-k", f"not {SLOW}"]
        flags += ["-c", ROOT / "pyproject.toml", "--rootdir", ROOT]
        result = subprocess.run(
            [str(word) for word in (*emulated, "-m", "pytest", *flags, *(ROOT / test for test in chosen.tests))],
            cwd=work,
            env=environment,
        )
        say(f"done after {time.monotonic() - started:.0f} s")
        return result.returncode


if __name__ == "__main__":
    sys.exit(main())
