"""Delegates as files of their own, and what the command says of programs."""

from __future__ import annotations

import json
import subprocess
import sys

import files
import numpy as np
import pytest
from sketch import Sketch

import xnnfast
from xnnfast.describe_program import describe_program, program_text
from xnnfast.errors import FormatError, UnsupportedError
from xnnfast.extract import extract
from xnnfast.program import Program

WEIGHTS = files.ONES.tobytes()
ONE = np.ones((1, 8), np.float32)


def partly():
    """Two delegates, an operator that is known and one that is not, in a method of that name."""
    sketch = Sketch()
    x = sketch.tensor((1, 8))
    y = sketch.unary("aten::relu.out", sketch.shift(x, (1, 8)), sizes=(1, 8))
    sketch.kernel("custom::thing.out", y, y, y)
    sketch.stacks[2] = [{"filename": "model.py", "lineno": 3, "name": "forward", "context": ""}]
    z = sketch.shift(y, (1, 8), 2.0)
    return sketch.program([x], [z])


# ---- files


@pytest.mark.parametrize(
    ("program", "data"),
    [
        pytest.param(files.program(), (), id="constants in the payload"),
        pytest.param(files.program(segments=[b"", files.bare()]), (), id="constants in the flatbuffer"),
        pytest.param(
            files.program(segments=[b"", files.named(), WEIGHTS], named_data=[{"key": "weights", "segment_index": 2}]),
            (),
            id="named data",
        ),
        pytest.param(
            files.program(segments=[b"", files.named()]), [files.data_file({"weights": WEIGHTS})], id="data file"
        ),
        pytest.param(
            files.program(segments=[b"", files.named()]),
            [files.data_file({"weights": WEIGHTS}, older=True)],
            id="older data file",
        ),
    ],
)
def test_delegates_stand_by_themselves(program, data, tmp_path):
    (each,) = extract(program, tmp_path / "new" / "folder", data=data)
    assert (each.method, each.delegate, each.path) == ("forward", 0, tmp_path / "new" / "folder" / "forward-0.xnn")
    assert each.nbytes == each.path.stat().st_size
    graph = xnnfast.load(each.path)
    assert graph.dialect == each.graph.dialect
    np.testing.assert_array_equal(xnnfast.Runtime(graph).run(ONE)[0], [files.ONES + 1])


def test_each_delegate_is_the_graph_that_load_gives(tmp_path):
    program = partly()
    found = list(extract(program, tmp_path))
    assert [each.path.name for each in found] == ["forward-0.xnn", "forward-1.xnn"]
    for each in found:
        mine, other = xnnfast.load(each.path), xnnfast.load(program, delegate=each.delegate)
        assert [node.op.name for node in mine.nodes] == [node.op.name for node in other.nodes]
        np.testing.assert_array_equal(xnnfast.Runtime(mine).run(ONE)[0], xnnfast.Runtime(other).run(ONE)[0])


def test_names_of_methods_make_names_of_files(tmp_path):
    plans, segments = [], [b""]
    for name in ("a/b", "a:b", "A_B", "..", "", "x" * 200):
        sketch = Sketch(name)
        x = sketch.tensor((1, 8))
        y = sketch.shift(x, (1, 8))
        segments.append(sketch.segments[1])
        sketch.delegates[0]["processed"]["index"] = len(segments) - 1
        plans.append(sketch.plan([x], [y]))
    found = list(extract(files.program(*plans, segments=segments), tmp_path))
    names = [each.path.name for each in found]
    assert names[:4] == ["a_b-0.xnn", "a_b_2-0.xnn", "A_B_3-0.xnn", "method-0.xnn"]
    assert len({name.lower() for name in names}) == 6
    assert all(each.path.parent == tmp_path and len(each.path.name) < 80 for each in found)


def test_other_backends_are_left_out(tmp_path):
    sketch = Sketch()
    x = sketch.tensor((1, 8))
    sketch.delegate(b"whatever", [x], [x], id="VulkanBackend")
    y = sketch.shift(x, (1, 8))
    assert [each.delegate for each in extract(sketch.program([x], [y]), tmp_path)] == [1]
    sketch = Sketch()
    x = sketch.tensor((1, 8))
    y = sketch.unary("aten::relu.out", x, sizes=(1, 8))
    with pytest.raises(UnsupportedError, match="has no delegate of XnnpackBackend"):
        list(extract(sketch.program([x], [y]), tmp_path / "none"))
    assert not (tmp_path / "none").exists()


def test_missing_data_is_named(tmp_path):
    with pytest.raises(FormatError, match="'weights' is in none of"):
        list(extract(files.program(segments=[b"", files.named()]), tmp_path))


@files.needs_shared
@pytest.mark.parametrize(
    "name", ["attn_block_fp16_b2", "mlp_qd8", "mlp768_qb4w_b8", "op_qc4w_linear_3d", "op_qs8_mha", "unet_tiny_qs8_b1"]
)
def test_exported_delegates_survive(name, tmp_path):
    path = files.SHARED / "conformance" / name / "model.pte"
    rng = np.random.default_rng(1)
    for each in extract(path, tmp_path):
        mine, other = xnnfast.load(each.path), xnnfast.load(path, delegate=each.delegate)
        inputs = [rng.standard_normal(value.shape).astype(value.dtype) for value in other.inputs]
        for one, two in zip(xnnfast.Runtime(mine).run(*inputs), xnnfast.Runtime(other).run(*inputs)):
            np.testing.assert_array_equal(one, two)


# ---- facts


def test_coverage_is_the_first_line():
    facts = describe_program(Program(partly()))
    assert facts["coverage"] == {"nodes_inside": 2, "delegates": 2, "instructions_outside": 2}
    json.dumps(facts, allow_nan=False)
    lines = program_text(facts).splitlines()
    assert lines[0].endswith(": 2 nodes in 2 delegates of XNNPACK, 2 instructions outside")
    text = "\n".join(lines)
    assert "method 'forward': 2 operators, 2 delegates" in text
    assert "aten::relu.out     1 call  in NumPy            at 1" in text
    assert "custom::thing.out  1 call  MISSING in xnnfast  at 2, from model.py:3 in forward" in text
    assert "    float32 1x8" in lines


def test_delegates_that_can_not_be_read_do_not_hide_the_rest():
    sketch = Sketch()
    x = sketch.tensor((1, 8))
    y = sketch.shift(x, (1, 8))
    sketch.delegate(b"no graph at all, but long enough for a header", [y], [y])
    sketch.delegate(b"whatever", [y], [y], id="VulkanBackend")
    text = program_text(describe_program(Program(sketch.program([x], [y]))))
    assert text.splitlines()[0].endswith("1 node in 3 delegates of XNNPACK, 0 instructions outside")
    assert "unreadable: " in text
    assert "another backend" in text


def test_data_by_name_is_listed():
    program = files.program(segments=[b"", files.named()])
    facts = describe_program(Program(program, [files.data_file({"weights": WEIGHTS})]))
    assert [(entry["key"], entry["nbytes"]) for entry in facts["named_data"]] == [("weights", 32)]
    assert "named data: 1, 32 bytes\n  weights  32 bytes" in program_text(facts)


# ---- the command


def command(*arguments):
    pytest.importorskip("typer", reason="the command needs the extra cli")
    done = subprocess.run(
        [sys.executable, "-m", "xnnfast", *map(str, arguments)], capture_output=True, text=True, timeout=60
    )
    assert "Traceback" not in done.stderr
    return done


def test_the_command_inspects_programs(tmp_path):
    (tmp_path / "m.pte").write_bytes(partly())
    done = command("inspect", tmp_path / "m.pte")
    assert done.returncode == 0
    assert (
        done.stdout.splitlines()[0]
        == f"{tmp_path / 'm.pte'}: 2 nodes in 2 delegates of XNNPACK, 2 instructions outside"
    )
    facts = json.loads(command("inspect", "--json", tmp_path / "m.pte").stdout)
    assert (facts["kind"], facts["graph"]) == ("program", None)


def test_the_command_shows_the_graph_of_a_program_that_is_one(tmp_path):
    (tmp_path / "m.pte").write_bytes(files.program(segments=[b"", files.named()]))
    (tmp_path / "m.ptd").write_bytes(files.data_file({"weights": WEIGHTS}))
    done = command("inspect", tmp_path / "m.pte", "--data", tmp_path / "m.ptd")
    assert done.returncode == 0
    assert "1 node in 1 delegate of XNNPACK, 0 instructions outside" in done.stdout
    assert "the program is one graph" in done.stdout
    facts = json.loads(command("inspect", "--json", tmp_path / "m.pte", "--data", tmp_path / "m.ptd").stdout)
    assert [node["op"] for node in facts["graph"]["nodes"]] == ["add"]


def test_the_command_extracts(tmp_path):
    (tmp_path / "m.pte").write_bytes(partly())
    done = command("extract", tmp_path / "m.pte", "-o", tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    first, second = done.stdout.splitlines()
    assert first.startswith(f"{tmp_path / 'out' / 'forward-0.xnn'}: method 'forward', delegate 0, 1 nodes, ")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["forward-0.xnn", "forward-1.xnn"]
    written = json.loads(command("extract", tmp_path / "m.pte", "-o", tmp_path / "out", "--json").stdout)
    assert [each["delegate"] for each in written] == [0, 1]
    assert second
    done = command("run", tmp_path / "out" / "forward-1.xnn", "--help")
    assert done.returncode == 0


def test_the_command_runs_programs_of_any_kind(tmp_path):
    sketch = Sketch("encode")
    x, two = sketch.tensor((1, 8)), sketch.number(2)
    y = sketch.unary("aten::exp.out", sketch.shift(x, (1, 8)), sizes=(1, 8))
    z = sketch.tensor((1, 8))
    sketch.kernel("aten::mul.Scalar_out", y, two, z, z)
    (tmp_path / "m.pte").write_bytes(sketch.program([x, two], [z, two]))
    np.save(tmp_path / "x.npy", ONE)
    for more in ((), ("--method", "encode"), ("--threads", "0")):
        done = command("run", tmp_path / "m.pte", tmp_path / "x.npy", "-o", tmp_path / "y{}.npy", *more)
        assert done.returncode == 0, done.stderr
        np.testing.assert_allclose(np.load(tmp_path / "y0.npy"), np.exp(ONE + 1) * 2, rtol=1e-5)
        assert np.load(tmp_path / "y1.npy") == 2
    for arguments, message in (
        (("x.npy", "x.npy"), "need 1 inputs (float32 1x8), got 2"),
        (("x.npy", "--method", "decode"), "need a method of 'encode', found 'decode'"),
        (("m.pte",), "need a .npy file"),
    ):
        paths = [tmp_path / each if each.endswith(("npy", "pte")) else each for each in arguments]
        done = command("run", tmp_path / "m.pte", *paths, "-o", tmp_path / "z{}.npy")
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    (tmp_path / "d.pte").write_bytes(files.program(segments=[b"", files.named()]))
    (tmp_path / "d.ptd").write_bytes(files.data_file({"weights": WEIGHTS}))
    done = command(
        "run", tmp_path / "d.pte", tmp_path / "x.npy", "--data", tmp_path / "d.ptd", "-o", tmp_path / "y.npy"
    )
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), [files.ONES + 1])


def test_the_command_says_what_is_wrong_with_programs(tmp_path):
    (tmp_path / "bad.pte").write_bytes(partly()[:600])
    (tmp_path / "graph.xnn").write_bytes(files.bare())
    for arguments in (
        ("inspect", "bad.pte"),
        ("extract", "bad.pte", "-o", "out"),
        ("extract", "graph.xnn", "-o", "out"),
        ("extract", "absent.pte", "-o", "out"),
    ):
        done = command(arguments[0], tmp_path / arguments[1], *arguments[2:])
        assert done.returncode == 2
        assert done.stderr.startswith("xnnfast: ") and done.stderr.count("\n") == 1
