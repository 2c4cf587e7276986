"""What `make wheel` and `make sdist` left in dist/: complete, small, portable, and they work where nothing else is.

`make test-wheel` builds both and runs this; without XNNFAST_TEST_DIST there is nothing to look at.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DIST = os.environ.get("XNNFAST_TEST_DIST")
MEGABYTE = 1_000_000
TOOLS = ("pytest", "pytest-timeout", "hypothesis")
LIBRARIES = ("xnnpack", "pthreadpool", "cpuinfo", "fxdiv", "fp16")

pytestmark = [
    pytest.mark.skipif(not DIST, reason="make test-wheel builds what is examined here"),
    # An installation from the sources compiles XNNPACK.
    pytest.mark.timeout(3600),
]

#: Builds a graph, writes it, maps it, runs it, and compares with NumPy; then every kernel of the processor.
SMOKE = """
import sys, numpy as np, xnnfast as xf
from pathlib import Path
assert Path(xf.__file__).is_relative_to(sys.prefix), xf.__file__
b = xf.GraphBuilder()
x = b.input((1, 4))
b.output(b.add(x, np.float32([[1, 2, 3, 4]]), clamp=(0, 6)))
b.save(sys.argv[1])
with xf.Runtime(xf.load(sys.argv[1])) as runtime:
    (y,) = runtime.run(np.float32([[1, -9, 9, 0.5]]))
assert y.tolist() == [[2, 0, 6, 4.5]], y
assert xf.__version__ == sys.argv[2], xf.__version__
assert {pin["name"] for pin in xf.config()["pin"]} == {"xnnpack", "pthreadpool", "cpuinfo", "fxdiv", "fp16"}
print("works")
"""


def only(pattern: str) -> Path:
    assert DIST is not None
    (found,) = Path(DIST).glob(pattern)
    return found


def version() -> str:
    found = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    assert found is not None
    return found[1]


def run(*command: object, **others: object) -> str:
    result = subprocess.run(
        [str(word) for word in command], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **others
    )
    assert result.returncode == 0, f"{' '.join(map(str, command))}\n{result.stdout[-4000:]}"
    return result.stdout


def empty_environment(folder: Path) -> Path:
    """A new virtual environment; its Python."""
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def surroundings(**more: str) -> dict[str, str]:
    """The environment without what would lead Python or a build to this checkout."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("XNNFAST_", "PYTHON"))}
    return {**kept, **more}


def check_use(python: Path, folder: Path) -> None:
    """The smoke test, the tests of the package itself, and the kernels."""
    assert "works" in run(python, "-c", SMOKE, folder / "smoke.xnn", version(), cwd=folder, env=surroundings())
    tests = [ROOT / "tests" / name for name in ("test_package.py", "test_load.py", "test_runtime.py", "test_cli.py")]
    said = run(
        *(python, "-m", "pytest", "-q", "-c", ROOT / "pyproject.toml", "--rootdir", ROOT, *tests),
        cwd=folder,
        env=surroundings(XNNFAST_TEST_INSTALLED="1"),
    )
    assert re.search(r"\b[1-9]\d* passed", said), said
    run(python.parent / "xnnfast", "doctor", cwd=folder, env=surroundings())


def test_wheel_carries_code_types_and_licences() -> None:
    with zipfile.ZipFile(only("*.whl")) as wheel:
        names = set(wheel.namelist())
        for library in LIBRARIES:
            assert b"opyright" in wheel.read(f"xnnfast/_generated/licenses/{library}.txt")
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert {"xnnfast/py.typed", "xnnfast/_runtime.pyi"} <= names
    compiled = {name.split("/")[1].partition(".")[0] for name in names if name.endswith(".so")}
    assert compiled == {"_payload", "_flatbuf", "_graph", "_reader", "_runtime", "_executor"}
    assert not [name for name in names if name.startswith(("tests/", "build/")) or name.endswith((".c", ".o", ".a"))]


def test_wheel_is_small() -> None:
    size = only("*.whl").stat().st_size
    assert size <= 3 * MEGABYTE, size


@pytest.mark.skipif(sys.platform != "linux", reason="manylinux")
def test_wheel_runs_on_other_linuxes() -> None:
    said = " ".join(run(sys.executable, "-m", "auditwheel", "show", only("*.whl")).split())
    found = re.search(r'following platform tag: "(manylinux_\d+_\d+_\w+)"', said)
    assert found, said
    assert found[1] in only("*.whl").name
    # Nothing but the C library, and no other copied in.
    assert set(re.findall(r"(\S+\.so\S*) with versions", said)) <= {"libc.so.6", "libm.so.6"}, said
    with zipfile.ZipFile(only("*.whl")) as wheel:
        assert not [name for name in wheel.namelist() if ".libs/" in name]


@pytest.mark.skipif(not shutil.which("readelf"), reason="needs binutils")
def test_wheel_names_no_folder_to_search(tmp_path: Path) -> None:
    with zipfile.ZipFile(only("*.whl")) as wheel:
        wheel.extractall(tmp_path)
    modules = list(tmp_path.glob("xnnfast/*.so"))
    assert modules
    for module in modules:
        dynamic = run("readelf", "-d", module)
        assert "NEEDED" in dynamic
        assert "RPATH" not in dynamic and "RUNPATH" not in dynamic, dynamic
        assert os.fsencode(ROOT) not in module.read_bytes()


def test_sources_hold_the_checked_archives() -> None:
    with tarfile.open(only("*.tar.gz")) as sources:
        names = {name.partition("/")[2] for name in sources.getnames()}
    # Trees instead of archives where git provided them.
    held = {re.split("[-_]", name.split("/")[3])[0] for name in names if name.startswith("vendor/XNNPACK/sources/")}
    assert held == set(LIBRARIES)
    assert {"setup.py", "pyproject.toml", "vendor/XNNPACK/own/loop-order.c", "xnnfast/_runtime.pyx"} <= names
    assert not [name for name in names if name.startswith("xnnfast/") and name.endswith((".c", ".so"))]


def test_wheel_works_in_an_empty_environment(tmp_path: Path) -> None:
    python = empty_environment(tmp_path / "venv")
    run(python, "-m", "pip", "install", only("*.whl"), env=surroundings())
    # Nothing but the package and its dependencies so far.
    assert "works" in run(python, "-c", SMOKE, tmp_path / "smoke.xnn", version(), cwd=tmp_path, env=surroundings())
    run(python, "-m", "pip", "install", f"{only('*.whl')}[cli]", *TOOLS, env=surroundings())
    check_use(python, tmp_path)


def test_sources_install_without_network(tmp_path: Path) -> None:
    python = empty_environment(tmp_path / "venv")
    requirements = run(sys.executable, ROOT / ".ci" / "requires.py").splitlines()
    run(python, "-m", "pip", "install", *requirements, env=surroundings())
    # From a wheel: pip takes no extras' requirements without the package, and they need the network.
    run(python, "-m", "pip", "install", f"{only('*.whl')}[cli]", *TOOLS, env=surroundings())
    run(python, "-m", "pip", "uninstall", "--yes", "xnnfast", env=surroundings())
    cut = ["unshare", "--map-root-user", "--net"]
    offline = shutil.which("unshare") and subprocess.run([*cut, "true"], capture_output=True).returncode == 0
    cache = tmp_path / "cache"
    install = [python, "-m", "pip", "install", "--no-build-isolation", "--no-index", only("*.tar.gz")]
    # Where the network can't be cut, a home without mirrors comes close: what isn't bundled would be in the log below.
    run(*(cut if offline else []), *install, cwd=tmp_path, env=surroundings(XNNFAST_BUILD_CACHE=str(cache)))
    ways = run(
        python,
        "-c",
        "import xnnfast; print({p['way'] for p in xnnfast.config()['pin']})",
        cwd=tmp_path,
        env=surroundings(),
    )
    assert ways.strip() == "{'bundled'}"
    check_use(python, tmp_path)
