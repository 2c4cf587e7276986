"""The command ``xnnfast``, run as a user runs it: in a process of its own, judged by status, stdout and stderr."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("typer", reason="the command needs the extra cli")

from xnnfast.builder import GraphBuilder

A = np.arange(8, dtype=np.float32).reshape(1, 8)
B = np.full((1, 8), 0.5, np.float32)


class Result:
    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        self.status, self.out, self.err = done.returncode, done.stdout, done.stderr

    @property
    def error(self) -> str:
        """The one line on stderr; there is nothing else and nothing on stdout."""
        assert self.out == ""
        assert "Traceback" not in self.err
        assert self.err.count("\n") == 1 and self.err.startswith("xnnfast: "), self.err
        return self.err.strip()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with add.xnn (two inputs, a constant, two nodes), a.npy and b.npy."""
    builder = GraphBuilder()
    a, b = builder.input((1, 8)), builder.input((1, 8))
    total = builder.add(a, b, debug_handle=17)
    builder.output(builder.multiply(total, np.full((1, 8), 2, np.float32), clamp=(0, None)))
    builder.save(tmp_path / "add.xnn")
    np.save(tmp_path / "a.npy", A)
    np.save(tmp_path / "b.npy", B)
    return tmp_path


@pytest.fixture
def two_outputs(folder: Path) -> Path:
    """The folder with split.xnn, which gives the sum and the difference."""
    builder = GraphBuilder()
    a, b = builder.input((1, 8)), builder.input((1, 8))
    builder.output(builder.add(a, b))
    builder.output(builder.subtract(a, b))
    builder.save(folder / "split.xnn")
    return folder


def command(folder: Path, *arguments: str, env: Mapping[str, str] | None = None) -> Result:
    # In a folder of its own: in the repository's, the uncompiled package would be found first.
    return Result(
        subprocess.run(
            [sys.executable, "-m", "xnnfast", *arguments],
            cwd=folder,
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            timeout=120,
        )
    )


def damaged(folder: Path) -> Path:
    path = folder / "short.xnn"
    path.write_bytes((folder / "add.xnn").read_bytes()[:100])
    return path


# -- as a whole


def test_no_subcommand_is_wrong_usage(tmp_path: Path) -> None:
    result = command(tmp_path)
    assert result.status == 2
    assert "--help" in result.error


def test_unknown_subcommand_is_wrong_usage(tmp_path: Path) -> None:
    result = command(tmp_path, "incpect", "x")
    assert result.status == 2
    assert "incpect" in result.error


@pytest.mark.parametrize("words", [[], ["inspect"], ["verify"], ["run"], ["info"]])
def test_help_goes_to_stdout(tmp_path: Path, words: list[str]) -> None:
    result = command(tmp_path, *words, "--help")
    assert result.status == 0
    assert "Usage: xnnfast" in result.out
    assert result.err == ""


def test_version(tmp_path: Path) -> None:
    result = command(tmp_path, "--version")
    assert result.status == 0
    assert result.out.startswith("xnnfast ")


def test_missing_argument_names_it(tmp_path: Path) -> None:
    result = command(tmp_path, "inspect")
    assert result.status == 2
    assert "FILE" in result.error


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_its_extra_the_command_says_what_to_install(tmp_path: Path, missing: str) -> None:
    # Typer itself needs rich, so either may be the one that is not there.
    (tmp_path / "stubs").mkdir()
    (tmp_path / "stubs/typer.py").write_text(f"raise ModuleNotFoundError('no', name={missing!r})")
    path = os.pathsep.join([str(tmp_path / "stubs"), os.environ.get("PYTHONPATH", "")])
    result = command(tmp_path, "inspect", "x", env={"PYTHONPATH": path})
    assert result.status == 2
    assert missing in result.error
    assert "install xnnfast[cli]" in result.error


def test_package_itself_imports_neither_typer_nor_rich(tmp_path: Path) -> None:
    code = "import sys, xnnfast, xnnfast.cli; print([m for m in ('typer', 'click', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_traceback_only_on_demand(tmp_path: Path) -> None:
    assert "absent.xnn" in command(tmp_path, "inspect", "absent.xnn").error
    assert "Traceback" in command(tmp_path, "inspect", "absent.xnn", env={"XNNFAST_TRACEBACK": "1"}).err


def in_process(tmp_path: Path, code: str) -> Result:
    """main() with one thing in it replaced."""
    whole = f"import xnnfast.cli, xnnfast.cli.commands as commands\n{code}\nxnnfast.cli.main(['info'])\n"
    return Result(
        subprocess.run([sys.executable, "-c", whole], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    )


def test_interrupt_is_quiet(tmp_path: Path) -> None:
    result = in_process(tmp_path, "def run(arguments): raise KeyboardInterrupt\ncommands.run = run")
    assert (result.status, result.out, result.err) == (130, "", "")


def test_broken_pipe_is_quiet(folder: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "xnnfast", "inspect", "add.xnn"],
            cwd=folder,
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    finally:
        os.close(writer)
    assert done.returncode == 141
    assert done.stderr == ""


def test_fault_of_our_own_is_one_line_too(tmp_path: Path) -> None:
    result = in_process(tmp_path, "def run(arguments): raise KeyError('odd')\ncommands.run = run")
    assert result.status == 2
    assert "KeyError" in result.error


# -- inspect


def test_inspect_tells_what_is_in_the_file(folder: Path) -> None:
    result = command(folder, "inspect", "add.xnn")
    assert result.status == 0
    assert result.err == ""
    lines = result.out.splitlines()
    assert "add.xnn" in lines[0] and "XH00" in lines[0] and "xn01" in lines[0]
    assert any("inputs: 2" in line for line in lines)
    assert any("multiply" in line and "clamp=[0,inf]" in line for line in lines)
    assert any("add" in line and "handle 17" in line for line in lines)
    assert any("constants: 1 of 1 in place (32 bytes of 32 bytes)" in line for line in lines)


def test_inspect_json_is_nothing_but_json(folder: Path) -> None:
    result = command(folder, "inspect", "add.xnn", "--json")
    assert result.status == 0
    assert result.err == ""
    facts = json.loads(result.out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert facts["kind"] == "graph"
    assert (facts["container"], facts["dialect"]) == ("XH00", "xn01")
    assert [node["op"] for node in facts["nodes"]] == ["add", "multiply"]
    assert [node["debug_handle"] for node in facts["nodes"]] == [17, 0]
    assert facts["nodes"][1]["clamp"] == [0, "inf"]
    assert facts["zero_copy"] == {"constants": 1, "in_place": 1, "bytes": 32, "bytes_in_place": 32}
    values = {value["id"]: value for value in facts["values"]}
    assert [values[name]["shape"] for name in facts["inputs"]] == [[1, 8], [1, 8]]
    assert [values[name]["roles"] for name in facts["outputs"]] == [["output"]]
    (constant,) = facts["constants"]
    assert constant["in_place"] is True and constant["reason"] is None
    assert constant["offset"] % 16 == 0
    assert [values[name]["roles"] for name in constant["values"]] == [["constant"]]


def test_inspect_reads_the_dialect_it_is_told(folder: Path) -> None:
    builder = GraphBuilder()
    builder.output(builder.add(builder.input((1, 8)), B))
    builder.save(folder / "seed.xnn", dialect="seed")
    for words in ([], ["--dialect", "seed"]):
        result = command(folder, "inspect", "seed.xnn", "--json", *words)
        assert result.status == 0
        facts = json.loads(result.out)
        assert (facts["container"], facts["dialect"]) == ("bare", "seed")


def test_inspect_of_a_missing_file(tmp_path: Path) -> None:
    result = command(tmp_path, "inspect", "absent.xnn")
    assert result.status == 2
    assert result.error == "xnnfast: absent.xnn: No such file or directory"


def test_inspect_of_a_folder(tmp_path: Path) -> None:
    result = command(tmp_path, "inspect", ".")
    assert result.status == 2
    assert "directory" in result.error.lower()


@pytest.mark.parametrize("content", [b"", b"no", b"not a graph file at all", bytes(4096)])
def test_inspect_of_something_else(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "else.bin").write_bytes(content)
    result = command(tmp_path, "inspect", "else.bin")
    assert result.status == 2
    assert "else.bin" in result.error


def test_inspect_with_json_keeps_stdout_empty_on_errors(folder: Path) -> None:
    assert command(folder, "inspect", "--json", damaged(folder).name).error


def test_unknown_dialect_is_named(folder: Path) -> None:
    result = command(folder, "inspect", "add.xnn", "--dialect", "xn99")
    assert result.status == 2
    assert "xn99" in result.error


# -- verify


def test_verify_of_good_files(two_outputs: Path) -> None:
    result = command(two_outputs, "verify", "add.xnn", "split.xnn")
    assert result.status == 0
    first, second = result.out.splitlines()
    assert first.startswith("add.xnn: good: ")
    assert second.startswith("split.xnn: good: ")


def test_verify_goes_on_after_a_bad_file(folder: Path) -> None:
    damaged(folder)
    result = command(folder, "verify", "short.xnn", "add.xnn")
    assert result.status == 1
    first, second = result.out.splitlines()
    assert first.startswith("short.xnn: bad: FormatError: ")
    assert second.startswith("add.xnn: good: ")
    assert result.err == ""


def test_verify_of_an_unreadable_file_outranks_a_bad_one(folder: Path) -> None:
    damaged(folder)
    result = command(folder, "verify", "absent.xnn", "short.xnn", "add.xnn")
    assert result.status == 2
    assert [line.split(": ")[1] for line in result.out.splitlines()] == ["unreadable", "bad", "good"]


def test_verify_quiet_prints_only_what_is_not_good(folder: Path) -> None:
    damaged(folder)
    result = command(folder, "verify", "--quiet", "add.xnn", "short.xnn")
    assert result.status == 1
    assert len(result.out.splitlines()) == 1


# -- run


@pytest.mark.parametrize("backend", ["xnnpack", "reference"])
def test_run_writes_the_answer(folder: Path, backend: str) -> None:
    result = command(folder, "run", "add.xnn", "a.npy", "b.npy", "-o", "out.npy", "--backend", backend)
    assert result.status == 0, result.err
    assert result.out == ""
    assert "out.npy" in result.err
    np.testing.assert_array_equal(np.load(folder / "out.npy"), (A + B) * 2)


def test_run_with_threads(folder: Path) -> None:
    result = command(folder, "run", "add.xnn", "a.npy", "b.npy", "-o", "out.npy", "--threads", "0", "--quiet")
    assert (result.status, result.err) == (0, "")
    np.testing.assert_array_equal(np.load(folder / "out.npy"), (A + B) * 2)


def test_run_takes_other_shapes_where_the_graph_permits(folder: Path) -> None:
    np.save(folder / "a.npy", np.repeat(A, 3, axis=0))
    np.save(folder / "b.npy", np.repeat(B, 3, axis=0))
    assert command(folder, "run", "add.xnn", "a.npy", "b.npy", "-o", "out.npy").status == 0
    np.testing.assert_array_equal(np.load(folder / "out.npy"), np.repeat((A + B) * 2, 3, axis=0))


def test_run_takes_fortran_order_and_an_empty_batch(folder: Path) -> None:
    np.save(folder / "a.npy", np.asfortranarray(np.repeat(A, 2, axis=0)))
    np.save(folder / "b.npy", np.repeat(B, 2, axis=0))
    assert command(folder, "run", "add.xnn", "a.npy", "b.npy", "-o", "out.npy").status == 0
    np.testing.assert_array_equal(np.load(folder / "out.npy"), np.repeat((A + B) * 2, 2, axis=0))
    for name in ("a.npy", "b.npy"):
        np.save(folder / name, A[:0])
    assert command(folder, "run", "add.xnn", "a.npy", "b.npy", "-o", "out.npy").status == 0
    assert np.load(folder / "out.npy").shape == (0, 8)


@pytest.mark.parametrize("names", [["-o", "r{}.npy"], ["-o", "r0.npy", "-o", "r1.npy"]])
def test_run_with_two_outputs(two_outputs: Path, names: list[str]) -> None:
    result = command(two_outputs, "run", "split.xnn", "a.npy", "b.npy", *names)
    assert result.status == 0, result.err
    np.testing.assert_array_equal(np.load(two_outputs / "r0.npy"), A + B)
    np.testing.assert_array_equal(np.load(two_outputs / "r1.npy"), A - B)


@pytest.mark.parametrize("names", [[], ["-o", "r.npy"], ["-o", "r.npy"] * 3, ["-o", "r.npy", "-o", "./r.npy"]])
def test_run_with_the_wrong_number_of_names(two_outputs: Path, names: list[str]) -> None:
    result = command(two_outputs, "run", "split.xnn", "a.npy", "b.npy", *names)
    assert result.status == 2
    assert "output" in result.error
    assert not list(two_outputs.glob("r*"))


def test_run_with_too_few_inputs_says_which_are_needed(folder: Path) -> None:
    result = command(folder, "run", "add.xnn", "a.npy", "-o", "out.npy")
    assert result.status == 2
    assert "need 2 inputs (fp32 1x8, fp32 1x8), got 1" in result.error


def test_run_with_another_dtype_reinterprets_nothing(folder: Path) -> None:
    np.save(folder / "b.npy", B.astype(np.int32))
    result = command(folder, "run", "add.xnn", "a.npy", "b.npy", "-o", "out.npy")
    assert result.status == 2
    assert "float32" in result.error and "int32" in result.error
    assert not (folder / "out.npy").exists()


def test_run_with_a_shape_that_does_not_fit(folder: Path) -> None:
    np.save(folder / "b.npy", np.zeros((1, 7), np.float32))
    result = command(folder, "run", "add.xnn", "a.npy", "b.npy", "-o", "out.npy")
    assert result.status == 2
    assert "7" in result.error
    assert not (folder / "out.npy").exists()


@pytest.mark.parametrize("content", [b"", b"1 2 3", b"\x93NUMPY\x01\x00"])
def test_run_on_something_that_is_no_array_file(folder: Path, content: bytes) -> None:
    (folder / "b.npy").write_bytes(content)
    result = command(folder, "run", "add.xnn", "a.npy", "b.npy", "-o", "out.npy")
    assert result.status == 2
    assert "b.npy" in result.error and ".npy file" in result.error


def test_run_never_unpickles(folder: Path) -> None:
    np.save(folder / "b.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    result = command(folder, "run", "add.xnn", "a.npy", "b.npy", "-o", "out.npy")
    assert result.status == 2
    assert "b.npy" in result.error


def test_run_into_a_folder_that_is_not_there(folder: Path) -> None:
    result = command(folder, "run", "add.xnn", "a.npy", "b.npy", "-o", "nowhere/out.npy")
    assert result.status == 2
    assert "nowhere" in result.error


def test_run_replaces_a_file_whole_and_leaves_nothing_behind(folder: Path) -> None:
    (folder / "out.npy").write_bytes(b"old")
    assert command(folder, "run", "add.xnn", "a.npy", "b.npy", "-o", "out.npy").status == 0
    assert np.load(folder / "out.npy").shape == (1, 8)
    mask = os.umask(0)
    os.umask(mask)
    assert (folder / "out.npy").stat().st_mode & 0o777 == 0o666 & ~mask
    assert not list(folder.glob(".*")) and not list(folder.glob("*.part"))


def test_run_may_write_over_its_own_input(folder: Path) -> None:
    # The input stays mapped while its name goes to the new file.
    assert command(folder, "run", "add.xnn", "a.npy", "b.npy", "-o", "a.npy").status == 0
    np.testing.assert_array_equal(np.load(folder / "a.npy"), (A + B) * 2)


# -- info


def test_info_tells_versions_libraries_and_threads(tmp_path: Path) -> None:
    result = command(tmp_path, "info")
    assert result.status == 0, result.err
    assert "xnnpack" in result.out
    assert "threads allowed: " in result.out


def test_info_json(tmp_path: Path) -> None:
    result = command(tmp_path, "info", "--json", env={"XNNFAST_CPUS": "3"})
    assert result.status == 0, result.err
    assert result.err == ""
    facts = json.loads(result.out)
    assert facts["numpy"] == np.__version__
    assert {"xnnpack", "pthreadpool", "cpuinfo"} <= {library["name"] for library in facts["pin"]}
    assert facts["families"] and facts["isa"]
    assert facts["cpus"] == 3 and "XNNFAST_CPUS" in facts["cpus_reason"]


def test_info_with_a_wrong_override(tmp_path: Path) -> None:
    result = command(tmp_path, "info", env={"XNNFAST_CPUS": "many"})
    assert result.status == 2
    assert "XNNFAST_CPUS" in result.error
