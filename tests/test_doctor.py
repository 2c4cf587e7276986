"""The kernel self-test: all of this CPU's kernels agree with NumPy, and known faults would be found."""

import json
import os
import subprocess
import sys
import time
from typing import ClassVar

import numpy as np
import pytest

import xnnfast
from xnnfast import Runtime, doctor
from xnnfast._runtime import isa
from xnnfast.cli import main
from xnnfast.ops import OPS


def command(*arguments):
    """Status of the command."""
    with pytest.raises(SystemExit) as exit:
        main(["doctor", *arguments])
    return exit.value.code


LAYERS = ("fully_connected", "conv2d", "depthwise_conv2d", "conv_transpose2d", "batch_matrix_multiply")


class Seen:
    """A Runtime that notes what it is given, and may spoil what comes out."""

    runs: ClassVar[list] = []
    kernels: ClassVar[set] = set()

    def __init__(self, graph):
        self.graph, self.runtime = graph, Runtime(graph)
        node = graph.nodes[-1]
        self.node = node
        self.types = tuple(graph.value(id).datatype for id in node.inputs if id is not None)
        self.shapes = [graph.value(id).shape for id in node.inputs if id is not None]
        zeros = [np.zeros(value.shape, value.dtype) for value in graph.inputs]
        Seen.kernels.update(name for _, name, _ in self.runtime.profile(*zeros, rounds=1))

    def run(self, *inputs):
        Seen.runs.append((self.node.op.name, self.types, [array.shape for array in inputs], self.shapes))
        return tuple(self.spoil(inputs, array) for array in self.runtime.run(*inputs))

    def spoil(self, inputs, array):
        return array


@pytest.fixture
def seen(monkeypatch):
    monkeypatch.setattr(doctor, "Runtime", Seen)
    Seen.runs, Seen.kernels = [], set()
    return Seen


def test_every_kernel_of_this_cpu_agrees_with_numpy():
    begin = time.thread_time()
    results = xnnfast.doctor.run()
    assert time.thread_time() - begin < 20
    wrong = {result.family: result.failures for result in results if not result.ok}
    assert not wrong
    assert len(results) > 60 and sum(result.checks for result in results) > 10_000


def test_every_kind_of_kernel_is_reached(seen):
    doctor.run()
    kernels = "\n".join(sorted(seen.kernels))
    for types in ("F32", "F16", "QS8", "QS8, QC8W", "QU8", "QD8, F32, QC8W", "QD8, F16, QC8W", "QD8, F32, QC4W",
                  "QD8, F16, QC4W", "QD8, F32, QB4W", "QD8, F16, QB4W", "F32, QC8W", "F32, QC4W"):  # fmt: skip
        assert f"Fully Connected (NC, {types}) GEMM" in kernels
    for types in ("F32", "F16", "QS8", "QC8", "QU8"):
        assert f"Convolution (NHWC, {types}) IGEMM" in kernels
        assert f"Convolution (NHWC, {types}) DWConv" in kernels
    for types in ("QD8, F32, QC8W", "QD8, F16, QC8W"):
        assert f"Convolution (NHWC, {types}) IGEMM" in kernels
    assert "VMulCAddC" in kernels and "Subconv2D" in kernels and "Batch Matrix Multiply" in kernels


def test_every_combination_of_datatypes_of_a_layer_is_reached(seen):
    for name in LAYERS:
        doctor.run(name)
        found = {types for op, types, _, _ in seen.runs if op == name}
        for row in OPS[name].datatypes:
            wanted = tuple(each for each in row[:-1])
            if "-" not in row and "bf16" not in row:
                assert wanted in found, (name, row)


def test_shapes_of_the_known_faults_are_among_those_that_run(seen):
    doctor.run("fully_connected fp16")
    half = {(given[0][0], operands[1][0]) for _, _, given, operands in seen.runs}
    assert {(rows, columns) for rows in (1, 5, 8) for columns in (32, 63, 64, 65, 100, 128, 130)} <= half
    doctor.run("conv2d 3x3 q")
    for types in (("qint8", "qcint8", "qcint32"), ("qint8", "qint8", "qint32"), ("qdint8", "qcint8", "fp32")):
        found = {
            (given[0][3], given[0][1] * given[0][2])
            for name, each, given, _ in seen.runs
            if name == "conv2d" and each == types
        }
        assert {(channels, pixels) for channels in (64, 65, 128, 130) for pixels in (1, 16, 17, 33, 49)} <= found


# ---- what the pinned sources had wrong, done to the results


class SecondVector(Seen):
    """Full blocks of 64 fp16 columns: the second vector of 32 is stored one column after the first."""

    def spoil(self, inputs, array):
        if array.dtype == np.float16 and self.node.op.name in ("fully_connected", "conv2d"):
            array = array.copy()
            for start in range(0, array.shape[-1] - 63, 64):
                array[..., start + 1 : start + 33] = array[..., start + 32 : start + 64]
        return array


class SingleRow(Seen):
    """8-bit convolutions of more than 64 channels: the last pixel is wrong where 16 pixels leave a rest of one."""

    def spoil(self, inputs, array):
        weights = self.shapes[1] if len(self.shapes) > 1 else ()
        if (
            self.node.op.name == "conv2d"
            and weights[1:3] != (1, 1)
            and self.types[1] == "qcint8"
            and weights[3] > 64
            and array.shape[1] * array.shape[2] % 16 == 1
        ):
            array = array.copy()
            array[:, -1, -1] = array[:, -1, -1] // 2
        return array


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (SecondVector, ["fully_connected fp16", "conv2d 1x1 fp16", "conv2d 3x3 fp16"]),
        (SingleRow, ["conv2d 3x3 qint8 qcint8", "conv2d 3x3 qdint8 qcint8"]),
    ],
)
def test_known_faults_are_found_and_told(monkeypatch, capsys, fault, found):
    monkeypatch.setattr(doctor, "Runtime", fault)
    results = doctor.run()
    wrong = [result for result in results if not result.ok]
    for family in found:
        assert any(family in result.family for result in wrong), family
    for result in wrong:
        assert result.failures and "differ, the first at" in result.failures[0]
    assert command("--only", found[0]) == 1
    told = capsys.readouterr().out
    assert "WRONG" in told and "are wrong" in told


def test_a_refusal_by_the_engine_is_a_finding(monkeypatch):
    class Refused(Seen):
        def run(self, *inputs):
            raise xnnfast.XnnpackError("xnn_invoke_runtime", 4)

    monkeypatch.setattr(doctor, "Runtime", Refused)
    (result,) = doctor.run("softmax fp16")
    assert not result.ok and "unsupported_parameter" in result.failures[0]


CAPPED = """
import sys
from xnnfast import doctor
from xnnfast._runtime import isa
results = doctor.run()
wrong = [(result.family, result.failures) for result in results if not result.ok]
assert not wrong, wrong
assert isa()[-1] == sys.argv[1], isa()
assert sum(result.checks for result in results) > 9000
# XNNPACK has fp16 kernels from AVX2 on.
assert all("fp16" in result.family for result in results if result.missing)
assert sys.argv[1] not in ("avx2", "avx512skx") or not any(result.missing for result in results)
"""


@pytest.mark.parametrize("cap", ["sse4.1", "fma3", "avx2", "avx512skx"])
def test_kernels_for_lesser_cpus_agree_too(cap, elsewhere):
    if cap not in isa():
        pytest.skip(f"this CPU has no {cap}")
    done = subprocess.run(
        [sys.executable, "-c", CAPPED, cap], capture_output=True, text=True, timeout=120,
        env={**os.environ, "XNNFAST_ISA": cap},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_a_family_without_kernels_is_no_difference(monkeypatch, capsys):
    class Lacking(Seen):
        def run(self, *inputs):
            raise xnnfast.XnnpackError("xnn_create_runtime_v4", 5)

    monkeypatch.setattr(doctor, "Runtime", Lacking)
    (result,) = doctor.run("softmax fp16")
    assert result.missing and result.ok
    assert command("--only", "softmax fp16") == 0
    assert "no kernels for it" in capsys.readouterr().out


# ---- the command


def test_command_prints_one_line_per_family(capsys):
    assert command("--only", "binary") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(doctor.run("binary"))
    assert all(line.startswith("ok ") for line in lines[1:-1]) and "agree with NumPy" in lines[-1]


def test_command_prints_json(capsys):
    assert command("--only", "softmax", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["ok"] and facts["checks"] == sum(each["checks"] for each in facts["families"]) and facts["isa"]


def test_command_names_what_it_does_not_have(capsys):
    assert command("--only", "nothing") == 2
    assert "nothing" in capsys.readouterr().err
