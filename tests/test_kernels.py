"""Kernels one by one against plain loops, and the second choice of kernels; vendor/XNNPACK says what they are."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import xnnfast
from xnnfast.errors import ArgumentError

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parent / "vendor" / "XNNPACK"
ISA = xnnfast.config()["isa"]


def _load(name):
    spec = importlib.util.spec_from_file_location(f"vendor_{name}_for_kernels", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


check_kernels = _load("check_kernels")
build = check_kernels.build


# ---- kernels


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Folder with the pinned sources, which a build has left behind or XNNFAST_XNNPACK_SOURCES names."""
    folder = tmp_path_factory.mktemp("kernels")
    ways = build._ways

    def near(cache, scratch):
        return [way for way in ways(cache, scratch) if isinstance(way, (build.FolderWay, build.CacheWay))]

    build._ways = near
    try:
        check_kernels.trees(folder, False)
    except build.BuildError as error:
        pytest.skip(f"the pinned sources are not on this machine: {error}")
    finally:
        build._ways = ways
    return folder


def outcome(folder, name, changed, step):
    where = check_kernels.trees(folder, changed)
    (kernel,) = (each for each in check_kernels.kernels(where) if each.name == name)
    native = check_kernels.is_native(kernel.family)
    if not native and kernel.family not in check_kernels.IN_PLAIN_C:
        pytest.skip(f"this CPU lacks {kernel.family}, whose kernels have no form in plain C")
    compiler = build.find_compiler().c
    return check_kernels.check(kernel, where, folder, compiler, native=native, step=step)


# One kernel for each fault; check_kernels.py goes over all of them.
FAULTS = [
    pytest.param("qs8-qc8w-igemm-16x64c4-minmax-fp32-avx512amx", 397, "wrong mr 1 ", id="AMX convolution, one row"),
    pytest.param("qd8-f16-qc8w-igemm-7x64c4-minmax-avx512amx", 211, "wrong mr 1 ", id="the same, tile of 7 rows"),
    pytest.param("f16-gemm-1x64-minmax-avx512fp16-broadcast", 3, "at row 0 column 1:", id="fp16, second vector"),
    pytest.param("f16-igemm-7x64-minmax-avx512fp16-broadcast", 197, "column 1:", id="fp16 convolution, second vector"),
    pytest.param("qd8-f32-qc8w-gemm-16x64c4-minmax-avx512amx", 211, "fault signal", id="parameters of rows, AMX"),
    pytest.param("qd8-f32-qc4w-gemm-14x16c8-minmax-avx512vnnigfni-prfm", 31, "fault signal", id="the same, 14 rows"),
]


@pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64", reason="kernels of x86-64 Linux")
@pytest.mark.parametrize(("name", "step", "words"), FAULTS)
def test_upstreams_faults_show_and_are_corrected(sources, name, step, words):
    upstream = outcome(sources, name, False, step)
    assert not upstream.ok
    assert any(words in line for line in upstream.words), upstream.words
    corrected = outcome(sources, name, True, step)
    assert corrected.ok and corrected.shapes >= 30, corrected


def test_what_a_kernels_name_says():
    found = check_kernels.KERNEL.fullmatch("qd8-f32-qc4w-gemm-16x64c4-minmax-avx512amx-prfm.c")
    assert found.group("x", "i", "mr", "nr", "kr", "family") == ("qd8-f32-qc4w", "", "16", "64", "4", "avx512amx")
    found = check_kernels.KERNEL.fullmatch("f16-igemm-7x32-minmax-avx512fp16-broadcast.c")
    assert found.group("x", "i", "mr", "nr", "kr", "family") == ("f16", "i", "7", "32", None, "avx512fp16")


# ---- second choice


def python(*words, **environment):
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, env={**os.environ, **environment}, timeout=300
    )


needs_weaker = pytest.mark.skipif("avx2" not in ISA, reason="needs instruction sets to leave out")


@needs_weaker
@pytest.mark.parametrize("only", ["qcint8", "qcint4"])
def test_products_are_right_by_the_second_choice(only):
    sweep = str(HERE / "sweep.py")
    answer = python(sweep, "--shapes=150", f"--only={only}", XNNFAST_SECOND_ISA="sse4.1", XNNFAST_SECOND_RATIO="1")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    *_, counts, second = answer.stdout.splitlines()
    assert counts.startswith("150 shapes, 0 wrong")
    words = second.split()
    assert words[:5] == ["kernels", "up", "to", "sse4.1", "taken"] and int(words[6]) > 20, second


CHOICE = """
import numpy as np, xnnfast
from xnnfast import GraphBuilder, PerChannel, PerTensor, Runtime
from xnnfast._runtime import second_isa
rng = np.random.default_rng(0)
for channels, outer in ((3, 4), (64, 64)):
    b = GraphBuilder()
    x = b.input((1, 9, 9, channels), "qint8", PerTensor(1 / 16, 3))
    w = b.constant(rng.integers(-128, 128, (outer, 3, 3, channels), np.int8), "qcint8",
                   PerChannel(rng.uniform(0.001, 0.01, outer).astype(np.float32), 0))
    b.output(b.conv2d(x, w, None, padding=1, stride=2, datatype="qint8", quantization=PerTensor(1 / 2, -7)))
    graph = b.graph()
    runtime = Runtime(graph)
    (y,) = runtime.run(rng.integers(-128, 128, graph.inputs[0].shape, np.int8))
    print(y.tobytes().hex())
print(second_isa() and second_isa()[2], xnnfast.config()["second_isa"])
"""


@needs_weaker
def test_only_padded_products_take_the_second_choice_and_results_are_the_same():
    none = python("-c", CHOICE, XNNFAST_SECOND_ISA="none").stdout.splitlines()
    assert none[2] == "None None"
    # Kernels of sse4.1 have tiles of 4 channels; those of any stronger set have 8 or more.
    some = python("-c", CHOICE, XNNFAST_SECOND_ISA="sse4.1", XNNFAST_SECOND_RATIO="2").stdout.splitlines()
    assert some[2] == "1 {'isa': 'sse4.1', 'ratio': 2.0}"
    every = python("-c", CHOICE, XNNFAST_SECOND_ISA="sse4.1", XNNFAST_SECOND_RATIO="0.5").stdout.splitlines()
    assert every[2].startswith("2 ")
    assert none[:2] == some[:2] == every[:2]


def test_second_choice_is_for_amx_alone_by_default():
    second = xnnfast.config()["second_isa"]
    assert second == ({"isa": "avx512fp16", "ratio": 4.0} if "avx512amx" in ISA else None)


@pytest.mark.parametrize(("variable", "text"), [("ISA", "avx99"), ("RATIO", "0"), ("RATIO", "four"), ("RATIO", "-2")])
def test_bad_variables_are_refused(variable, text):
    answer = python("-c", "from xnnfast._runtime import isa; isa()", **{f"XNNFAST_SECOND_{variable}": text})
    assert answer.returncode == 1 and ArgumentError.__name__ in answer.stderr
    assert f"XNNFAST_SECOND_{variable}, found {text!r}" in answer.stderr


@needs_weaker
def test_packed_weights_of_the_second_choice_have_files_of_their_own(tmp_path):
    code = """
import os, sys
sys.path.insert(0, os.environ["TESTS"])
from hostile_cache import mixed
from xnnfast import Runtime
runtime = Runtime(mixed().graph(), weights_cache=os.environ["F"])
print(runtime.weights_cache)
"""
    told = []
    for ratio in ("1", "1", "2", "1"):
        environment = {"XNNFAST_SECOND_ISA": "sse4.1", "XNNFAST_SECOND_RATIO": ratio, "F": str(tmp_path) + os.sep}
        answer = python("-c", code, TESTS=str(HERE), **environment)
        assert answer.returncode == 0, answer.stderr
        told.append(answer.stdout.strip())
    assert told == ["saved", "hit", "saved", "hit"]
