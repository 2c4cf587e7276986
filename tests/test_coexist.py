"""The package beside others that carry an XNNPACK of their own, and what its extension shows to the loader."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import xnnfast._runtime

EXTENSION = Path(xnnfast._runtime.__file__)
OTHERS = ["ai_edge_litert", "onnxruntime", "torch", "executorch"]


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm of binutils")
def test_the_extension_exports_its_init_function_and_nothing_else():
    listed = subprocess.run(["nm", "-D", "--defined-only", EXTENSION], capture_output=True, text=True, check=True)
    names = [line.split()[-1] for line in listed.stdout.splitlines()]
    assert [name for name in names if not name.startswith(("_init", "_fini", "__bss", "_edata", "_end"))] == [
        "PyInit__runtime"
    ]


@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf of binutils")
def test_only_one_extension_carries_xnnpack():
    for path in EXTENSION.parent.glob("*.so"):
        assert (b"xnn_create" in path.read_bytes() or path.stat().st_size > 1_500_000) == (path == EXTENSION), path


WORK = """
import numpy as np
{first}
import xnnfast
{last}
b = xnnfast.GraphBuilder()
w = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
b.output(b.fully_connected(b.input((8, 256)), w, clamp=(0, 6)))
rt = xnnfast.Runtime(b.graph(), threads=2)
x = np.random.default_rng(1).standard_normal((8, 256)).astype(np.float32)
(y,) = rt.run(x)
{between}
(z,) = rt.run(x)
np.testing.assert_allclose(y, np.clip(x @ w.T, 0, 6), rtol=1e-4, atol=1e-4)
np.testing.assert_array_equal(y, z)
print("right")
"""

USE = {
    # Running something in the other engine, not just importing it.
    "ai_edge_litert": "from ai_edge_litert.interpreter import Interpreter",
    "onnxruntime": "import onnxruntime; onnxruntime.get_available_providers()",
    "torch": "import torch; torch.mm(torch.ones(64, 64), torch.ones(64, 64))",
    "executorch": "import executorch.extension.pybindings.portable_lib",
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("order", ["before", "after"])
def test_beside_another_library_with_xnnpack_inside(other, order):
    if importlib.util.find_spec(other) is None:
        pytest.skip(f"{other} is not installed")
    use = USE[other]
    text = WORK.format(first=use if order == "before" else "", last=use if order == "after" else "", between=use)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "right"


def test_at_least_one_such_library_is_there():
    # The test extra brings one: without it the tests above would all be skipped and prove nothing.
    assert any(importlib.util.find_spec(name) for name in OTHERS)
    assert np.__version__
