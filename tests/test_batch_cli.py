"""``xnnfast batch``: files in, files out, and what is left when it is cut short."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("typer", reason="the command needs the extra cli")

from xnnfast import batch_io, reference
from xnnfast.builder import GraphBuilder
from xnnfast.cli import main
from xnnfast.cli.batch import _Job
from xnnfast.errors import ArgumentError, FormatError
from xnnfast.executor import Executor

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)


def arguments(*words):
    return [sys.executable, "-m", "xnnfast", "batch", *map(str, words)]


def batch(folder, *words, status=0):
    """The summary of a run that ends with that status, or the line on stderr. In this process: it is quick."""
    out, err = io.StringIO(), io.StringIO()
    before = os.getcwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as exit:
            main(["batch", *map(str, words)])
    finally:
        os.chdir(before)
    out, err = out.getvalue(), err.getvalue()
    assert (exit.value.code or 0) == status, err
    if status:
        assert out == "" and err.startswith("xnnfast: ") and err.count("\n") == 1, err
        return err.strip()
    assert err == ""
    return json.loads(out)


def graph():
    b = GraphBuilder()
    x = b.input((1, 6))
    b.output(b.tanh(b.fully_connected(x, numbers(4, 6), numbers(4, seed=1))))
    return b


@pytest.fixture
def folder(tmp_path):
    """A folder with dense.xnn (6 numbers to 4), two.xnn (two inputs, two outputs), x.npy and y.npy of 100 samples."""
    graph().save(tmp_path / "dense.xnn")
    b = GraphBuilder()
    x, y = b.input((1, 6)), b.input((1, 6))
    b.output(b.add(x, y))
    b.output(b.subtract(x, y))
    b.save(tmp_path / "two.xnn")
    np.save(tmp_path / "x.npy", numbers(100, 6))
    np.save(tmp_path / "y.npy", numbers(100, 6, seed=1))
    return tmp_path


def expected(x):
    return reference.run(graph().graph(), x)[0]


def leftovers(folder):
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


# ---------------------------------------------------------------------------------------------------
# Formats


def write(path, array):
    suffix = path.suffix
    if suffix == ".npy":
        np.save(path, array)
    elif suffix == ".npz":
        np.savez(path, x=array)
    elif suffix == ".raw":
        array.tofile(path)
    elif suffix == ".safetensors":
        target = batch_io.Target(path, ["x"], [batch_io.Spec("fp32", array.dtype, array.shape)])
        target.reserve()
        target.arrays()[0][...] = array
        target.finish()
    else:
        pa = pytest.importorskip("pyarrow")
        table = pa.table({"x": pa.FixedShapeTensorArray.from_numpy_ndarray(array)})
        if suffix == ".parquet":
            import pyarrow.parquet

            pyarrow.parquet.write_table(table, path, row_group_size=7)
        else:
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
                writer.write_table(table, max_chunksize=9)


def read(path, shape):
    suffix = path.suffix
    if suffix == ".npy":
        return np.load(path)
    if suffix == ".npz":
        return np.load(path)["output_0"]
    if suffix == ".raw":
        return np.fromfile(path, np.float32).reshape(shape)
    (source,) = batch_io._open(str(path), None).values()
    return source.read(0, source.shape[0])


FORMATS = (".npy", ".npz", ".raw", ".safetensors", ".parquet", ".arrow")


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_is_read_and_written(folder, kind):
    if kind in batch_io.TABLES:
        pytest.importorskip("pyarrow")
    x = np.load(folder / "x.npy")
    write(folder / f"in{kind}", x)
    summary = batch(folder, "dense.xnn", f"in{kind}", "-o", f"out{kind}", "--batch", 13, "--workers", 2)
    np.testing.assert_allclose(read(folder / f"out{kind}", (100, 4)), expected(x), 1e-4, 1e-6)
    assert summary["samples"] == 100 and summary["resumed"] == 0 and summary["workers"] == 2
    assert summary["outputs"] == [{"file": f"out{kind}", "name": "output_0", "dtype": "float32", "shape": [100, 4]}]
    assert leftovers(folder) == []


def test_safetensors_files_are_those_of_the_library(folder):
    library = pytest.importorskip("safetensors.numpy")
    x = np.load(folder / "x.npy")
    library.save_file({"a": x, "other": numbers(3)}, folder / "in.safetensors")
    batch(folder, "dense.xnn", "in.safetensors:a", "-o", "out.safetensors")
    np.testing.assert_allclose(library.load_file(folder / "out.safetensors")["output_0"], expected(x), 1e-4, 1e-6)


def test_compressed_archives_are_read(folder):
    x = np.load(folder / "x.npy")
    np.savez_compressed(folder / "in.npz", x)
    batch(folder, "dense.xnn", "in.npz", "-o", "out.npy")
    np.testing.assert_allclose(np.load(folder / "out.npy"), expected(x), 1e-4, 1e-6)


def test_members_of_archives_are_mapped(folder):
    np.savez(folder / "in.npz", a=numbers(4, 6), b=np.asfortranarray(numbers(5, 6)))
    spec = batch_io.Spec("fp32", np.dtype(np.float32), (1, 6))
    found = batch_io._open(str(folder / "in.npz"), spec)
    assert isinstance(found["a"].array, np.memmap) and isinstance(found["b"].array, np.memmap)
    np.testing.assert_array_equal(found["a"].read(1, 3), numbers(4, 6)[1:3])
    np.testing.assert_array_equal(found["b"].read(0, 5), numbers(5, 6))


def test_a_table_of_lists_and_numbers_is_read(folder):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    x = numbers(20, 6)
    lists = pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), 6)
    pyarrow.parquet.write_table(pa.table({"x": lists, "name": ["a"] * 20}), folder / "in.parquet")
    batch(folder, "dense.xnn", "in.parquet", "-o", "out.npy")
    np.testing.assert_allclose(np.load(folder / "out.npy"), expected(x), 1e-4, 1e-6)


def test_a_table_with_a_gap_is_refused(folder):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    pyarrow.parquet.write_table(pa.table({"x": pa.array([[1.0] * 6, None], pa.list_(pa.float32(), 6))}),
                                folder / "in.parquet")
    # Newer versions of the library don't even read it.
    error = batch(folder, "dense.xnn", "in.parquet", "-o", "out.npy", status=2)
    assert error.startswith("xnnfast: in.parquet:x: need ") and "row group 0" in error


def test_a_table_is_read_without_pandas(folder, monkeypatch):
    pa = pytest.importorskip("pyarrow")
    monkeypatch.setitem(sys.modules, "pandas", None)
    for kind, dtype in ((pa.float32(), np.float32), (pa.uint8(), np.uint8), (pa.float16(), np.float16)):
        assert batch_io._Column.of("t.arrow", "x", pa.list_(kind, 6), [2], None).dtype == dtype
    for kind in (pa.string(), pa.list_(pa.float32()), pa.timestamp("s")):
        assert batch_io._Column.of("t.arrow", "x", kind, [2], None) is None


# ---------------------------------------------------------------------------------------------------
# Inputs and outputs


@pytest.mark.parametrize("words", [("x.npy", "y.npy"), ("1=y.npy", "0=x.npy"), ("1=y.npy", "x.npy"), ("both.npz",),
                                   ("1=both.npz:b", "both.npz:a"), ("named.npz",)])
def test_several_inputs_by_order_or_by_position(folder, words):
    x, y = np.load(folder / "x.npy"), np.load(folder / "y.npy")
    np.savez(folder / "both.npz", a=x, b=y)
    np.savez(folder / "named.npz", **{"1": y, "0": x})
    batch(folder, "two.xnn", *words, "-o", "out_{}.npy")
    np.testing.assert_array_equal(np.load(folder / "out_0.npy"), x + y)
    np.testing.assert_array_equal(np.load(folder / "out_1.npy"), x - y)


@pytest.mark.parametrize(("words", "files"), [
    (("-o", "a.npy", "-o", "b.npy"), ["a.npy", "b.npy"]), (("-o", "out.npz"), ["out.npz"]),
    (("-o", "out.safetensors"), ["out.safetensors"])])
def test_several_outputs(folder, words, files):
    summary = batch(folder, "two.xnn", "x.npy", "y.npy", *words)
    assert [each["file"] for each in summary["outputs"]] == files * (2 // len(files))
    assert all((folder / name).exists() for name in files) and leftovers(folder) == []


@pytest.mark.parametrize(("words", "error"), [
    (("two.xnn", "x.npy", "-o", "o_{}.npy"), "need 2 inputs, missing: 1 (fp32 1x6)"),
    (("two.xnn", "x.npy", "x.npy", "x.npy", "-o", "o_{}.npy"), "the graph has 2 inputs, got x.npy besides"),
    (("two.xnn", "x.npy", "0=y.npy", "0=y.npy", "-o", "o_{}.npy"), "input 0 is given twice"),
    (("two.xnn", "x.npy", "short.npy", "-o", "o_{}.npy"), "short.npy holds 3 samples, inputs before it hold 100"),
    (("two.xnn", "x.npy", "y.npy", "-o", "o.npy"), "can hold one array, the graph has 2 outputs"),
    (("dense.xnn", "none.npy", "-o", "o.npy"), "none.npy: No such file"),
    (("dense.xnn", "dense.xnn", "-o", "o.npy"), "need a name that ends in .npy"),
    (("dense.xnn", "x.npy", "-o", "o.txt"), "need a name that ends in .npy"),
    (("dense.xnn", "x.npy", "-o", "x.npy"), "x.npy is an input"),
    (("dense.xnn", "x.npy", "-o", "nowhere/o.npy"), "the folder nowhere is not there"),
    (("dense.xnn", "bytes.npy", "-o", "o.npy"), "--normalize SCALE:OFFSET"),
    (("dense.xnn", "x.npy", "-o", "o.npy", "--normalize", "1"), "has the graph's dtype already"),
    (("dense.xnn", "bytes.npy", "-o", "o.npy", "--normalize", "a"), "found 'a'"),
    (("dense.xnn", "bytes.npy", "-o", "o.npy", "--normalize", "1,2:3"), "one axis of 2 channels, found 3x6"),
    (("dense.xnn", "double.npy", "-o", "o.npy"), "need float32, found float64"),
    (("dense.xnn", "wide.npy", "-o", "o.npy"), "node 0 (fully_connected)"),
    (("dense.xnn", "flat.npy", "-o", "o.npy"), "need rank 2"),
    (("dense.xnn", "x.npy", "-o", "o.npy", "--resume", "--restart"), "exclude each other"),
    (("dense.xnn", "x.npy", "-o", "folder.npy"), "folder.npy is there and is no regular file"),
    (("dense.xnn", "x.npy", "-o", ""), "need a name that ends in .npy"),
    (("two.xnn", "x.npy", "y.npy", "-o", "", "-o", "o.npy"), "need a name that ends in .npy"),
    (("model.bin", "x.npy", "-o", "model.bin"), "model.bin is the model"),
    (("dense.xnn", "pipe.raw", "-o", "o.npy"), "pipe.raw: need a regular file"),
    (("dense.xnn", "model.bin:V0", "-o", "o.npy"), "model.bin: need a numeric dtype"),
    (("dense.xnn", "model.bin:S4", "-o", "o.npy"), "model.bin: need a numeric dtype"),
    (("dense.xnn", f"model.bin:uint8:{'1x' * 70}1", "-o", "o.npy"), "model.bin: need 16 dims or fewer, got 71"),
    (("dense.xnn", "deep.safetensors", "-o", "o.npy"), "deep.safetensors: need a header in JSON"),
    (("x.npy", "x.npy", "-o", "o.npy"), "x.npy: no identifier"),
])
def test_what_does_not_fit_is_refused_and_leaves_nothing(folder, words, error):
    np.save(folder / "short.npy", numbers(3, 6))
    np.save(folder / "wide.npy", numbers(3, 7))
    np.save(folder / "flat.npy", numbers(6))
    np.save(folder / "double.npy", numbers(3, 6).astype(float))
    np.save(folder / "bytes.npy", np.zeros((3, 6), np.uint8))
    (folder / "folder.npy").mkdir()
    os.mkfifo(folder / "pipe.raw")
    (folder / "model.bin").write_bytes((folder / "dense.xnn").read_bytes())
    (folder / "deep.safetensors").write_bytes((100000).to_bytes(8, "little") + b"[" * 100000)
    before = sorted(path.name for path in folder.iterdir())
    assert error in batch(folder, *words, status=2)
    assert sorted(path.name for path in folder.iterdir()) == before


def test_integer_images_are_normalised(folder):
    images = np.random.default_rng(0).integers(0, 256, (50, 6)).astype(np.uint8)
    np.save(folder / "images.npy", images)
    scale, offset = [0.01, 0.02, 0.03, 0.04, 0.05, 0.06], [-1, -1, -1, 0, 0, 0]
    words = f"{','.join(map(str, scale))}:{','.join(map(str, offset))}"
    batch(folder, "dense.xnn", "images.npy", "-o", "out.npy", "--normalize", words, "--batch", 8)
    x = images * np.float32(scale) + np.float32(offset)
    np.testing.assert_allclose(np.load(folder / "out.npy"), expected(x), 1e-3, 1e-5)
    images.tofile(folder / "images.raw")
    batch(folder, "dense.xnn", "images.raw:uint8:6", "-o", "one.npy", "--normalize", "0.01")
    np.testing.assert_allclose(np.load(folder / "one.npy"), expected(images * np.float32(0.01)), 1e-3, 1e-5)


def test_packed_weights_may_come_from_a_cache(folder):
    for outcome in ("saved", "hit"):
        summary = batch(folder, "dense.xnn", "x.npy", "-o", "out.npy", "--weights-cache", "cache")
        assert summary["weights_cache"] == outcome


def test_precision_is_reported_with_what_it_costs(folder):
    b = GraphBuilder()
    b.output(b.fully_connected(b.input((1, 64)), numbers(4, 64)))
    b.save(folder / "deep.xnn")
    np.save(folder / "deep.npy", numbers(20, 64))
    summary = batch(folder, "deep.xnn", "deep.npy", "-o", "out.npy", "--precision", "int8-dynamic")
    assert summary["precision"] == "int8-dynamic" and summary["accuracy"]["samples"] == 20
    assert 0 < summary["accuracy"]["outputs"][0]["relative"] < 0.05


def test_an_empty_batch_gives_an_empty_file(folder):
    np.save(folder / "none.npy", numbers(0, 6))
    assert batch(folder, "dense.xnn", "none.npy", "-o", "out.npy")["samples"] == 0
    assert np.load(folder / "out.npy").shape == (0, 4)


def test_an_output_whose_batch_is_not_outermost(folder):
    b = GraphBuilder()
    b.output(b.static_transpose(b.input((1, 2, 3)), (1, 0, 2)))
    b.save(folder / "turn.xnn")
    x = numbers(37, 2, 3)
    np.save(folder / "z.npy", x)
    batch(folder, "turn.xnn", "z.npy", "-o", "out.npy", "--batch", 10)
    np.testing.assert_array_equal(np.load(folder / "out.npy"), x.transpose(1, 0, 2))


def test_a_finished_file_is_replaced(folder):
    (folder / "out.npy").write_bytes(b"old")
    batch(folder, "dense.xnn", "x.npy", "-o", "out.npy")
    assert np.load(folder / "out.npy").shape == (100, 4)


def test_names_may_hold_blanks_colons_and_letters_of_all_kinds(folder):
    (folder / "x.npy").rename(folder / "a:b c \u00e9.npy")
    assert batch(folder, "dense.xnn", "a:b c \u00e9.npy", "-o", "\u00f6 1:2.npy")["samples"] == 100
    np.testing.assert_allclose(np.load(folder / "\u00f6 1:2.npy"), expected(numbers(100, 6)), 1e-4, 1e-6)


@pytest.mark.parametrize("closed", [1, 2])
def test_closed_streams_are_no_fault(folder, closed):
    words = ("dense.xnn", "x.npy" if closed == 1 else "none.npy", "-o", "out.npy")
    process = subprocess.run(arguments(*words), cwd=folder, env=ENVIRONMENT, text=True, check=False,
                             preexec_fn=lambda: os.close(closed), capture_output=True)
    assert (process.returncode, process.stdout, process.stderr) == (0 if closed == 1 else 2, "", "")
    assert (folder / "out.npy").exists() == (closed == 1)


# ---------------------------------------------------------------------------------------------------
# Cut short


@pytest.fixture
def slow(tmp_path):
    """A folder with a graph that takes about a millisecond per sample, and 600 samples."""
    b = GraphBuilder()
    x = b.input((1, 48, 48, 4))
    for seed in range(6):
        x = b.conv2d(x, numbers(32, 3, 3, 4 if seed == 0 else 32, seed=seed), padding=1)
    b.output(b.global_average_pooling2d(x, keep_dims=False))
    b.save(tmp_path / "slow.xnn")
    np.save(tmp_path / "x.npy", numbers(600, 48, 48, 4))
    batch(tmp_path, "slow.xnn", "x.npy", "-o", "whole.npy")
    return tmp_path


def journal(folder, name="out.npy"):
    """Samples done according to the journal."""
    path = folder / f".{name}.journal"
    if not path.exists():
        return 0
    lines = [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    return sum(stop - start for start, stop in (line["rows"] for line in lines if "rows" in line))


def cut(folder, number, after=1, *words):
    """A run that gets the signal when so many samples are done; its status and stderr."""
    process = subprocess.Popen(arguments("slow.xnn", "x.npy", "-o", "out.npy", "--batch", 16, *words), cwd=folder,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    deadline = time.monotonic() + 60
    while journal(folder) < after and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    return process.returncode, err


def test_a_killed_run_goes_on_where_it_stopped(slow):
    done = 0
    for _ in range(4):
        status, _ = cut(slow, signal.SIGKILL, done + 40, *(["--resume"] if done else []))
        assert status == -signal.SIGKILL
        assert not (slow / "out.npy").exists()
        now = journal(slow)
        assert done < now < 600
        done = now
    summary = batch(slow, "slow.xnn", "x.npy", "-o", "out.npy", "--resume")
    assert summary["resumed"] == done and summary["samples"] == 600
    np.testing.assert_array_equal(np.load(slow / "out.npy"), np.load(slow / "whole.npy"))
    assert leftovers(slow) == []


@pytest.mark.parametrize(("number", "status", "word"), [(signal.SIGINT, 130, "interrupted"),
                                                        (signal.SIGTERM, 143, "terminated")])
def test_an_interrupted_run_says_what_is_kept(slow, number, status, word):
    got, err = cut(slow, number, 32)
    assert got == status, err
    assert word in err and "of 600 samples are done and kept, --resume goes on" in err and "Traceback" not in err
    assert not (slow / "out.npy").exists()
    summary = batch(slow, "slow.xnn", "x.npy", "-o", "out.npy", "--resume")
    assert 0 < summary["resumed"] < 600
    np.testing.assert_array_equal(np.load(slow / "out.npy"), np.load(slow / "whole.npy"))


def test_what_was_done_is_neither_forgotten_nor_mixed_up_silently(slow):
    cut(slow, signal.SIGKILL, 32)
    words = ("slow.xnn", "x.npy", "-o", "out.npy")
    assert "of 600 samples: --resume goes on, --restart forgets it" in batch(slow, *words, status=2)
    x = np.load(slow / "x.npy")
    np.save(slow / "x.npy", x[:300])
    assert "had other inputs" in batch(slow, *words, "--resume", status=2)
    assert "had other dialect" in batch(slow, *words, "--resume", "--dialect", "xn01", status=2)
    summary = batch(slow, *words, "--restart")
    assert summary["resumed"] == 0 and summary["samples"] == 300


def begun(journal, folder, words, done):
    """Leave what a killed run leaves."""
    model, *inputs = words[: words.index("-o")]
    before = os.getcwd()
    os.chdir(folder)
    try:
        with Executor(model) as executor:
            job = _Job(Path(model), executor, inputs, words[words.index("-o") + 1 :], None, None, None)
            job.open(journal, False, False)
            journal.add(0, done)
    finally:
        os.chdir(before)


def test_the_same_bytes_read_otherwise_are_other_inputs(slow):
    np.load(slow / "x.npy").tofile(slow / "x.raw")
    words = ["slow.xnn", "x.raw", "-o", "out.npy"]
    with batch_io.Journal(slow / ".out.npy.journal") as made:
        begun(made, slow, words, 32)
    words[1] = "x.raw:>f4:48x48x4"
    assert "had other inputs" in batch(slow, *words, "--resume", status=2)


def test_two_runs_that_share_an_output_do_not_mix(folder):
    done = batch_io.Target(folder / "b.npy", ["b"], [batch_io.Spec("fp32", np.dtype(np.float32), (3,))],
                           batch_io.journal_path(folder / "a.npy"))
    other = batch_io.Target(folder / "b.npy", ["b"], [batch_io.Spec("fp32", np.dtype(np.float32), (3,))],
                            batch_io.journal_path(folder / "b.npy"))
    done.reserve()
    other.reserve()
    other.arrays()[0][:] = 7
    other.finish()
    assert done.is_reserved and not done.arrays()[0].any()
    assert np.load(folder / "b.npy").tolist() == [7, 7, 7]


def test_nothing_done_leaves_nothing(slow):
    # Resuming what was never begun is an ordinary run.
    assert batch(slow, "slow.xnn", "x.npy", "-o", "out.npy", "--resume")["resumed"] == 0


def test_two_runs_on_one_output_do_not_mix(slow):
    first = subprocess.Popen(arguments("slow.xnn", "x.npy", "-o", "out.npy", "--batch", 16), cwd=slow, env=ENVIRONMENT,
                             stdout=subprocess.DEVNULL)
    while not journal(slow) and first.poll() is None:
        time.sleep(0.002)
    assert "another process is at work" in batch(slow, "slow.xnn", "x.npy", "-o", "out.npy", "--restart", status=2)
    assert first.wait(60) == 0


@pytest.fixture
def small(folder):
    """A folder on a file system of 64 KiB."""
    small = folder / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(small)], capture_output=True).returncode:
        pytest.skip("can't mount")
    yield small
    subprocess.run(["umount", str(small)], check=True)


needs_mount = pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="mounts a small file system")


@needs_mount
def test_a_full_disk_shows_before_the_work_begins(folder, small):
    np.save(folder / "many.npy", numbers(100000, 6))
    error = batch(folder, "dense.xnn", "many.npy", "-o", "small/out.npy", status=2)
    assert "need 1600128 bytes of space, " in error and error.endswith("are free")
    assert leftovers(small) == []


@needs_mount
def test_a_disk_that_is_full_in_the_end_leaves_what_is_done(folder, small):
    # Space for the numbers is there, not for the archive besides.
    np.save(folder / "many.npy", numbers(2500, 6))
    words = ("dense.xnn", "many.npy", "-o", "small/out.npz", "--batch", 500)
    error = batch(folder, *words, status=2)
    assert "No space left on device; 2500 of 2500 samples are done and kept, --resume goes on" in error
    subprocess.run(["mount", "-o", "remount,size=1m", str(small)], check=True)
    assert batch(folder, *words, "--resume")["resumed"] == 2500
    np.testing.assert_allclose(np.load(small / "out.npz")["output_0"], expected(numbers(2500, 6)), 1e-4, 1e-6)
    assert leftovers(small) == []


# ---------------------------------------------------------------------------------------------------
# Parts


def test_ranges_are_merged_and_completed():
    assert batch_io.merged([(5, 7), (0, 2), (2, 3), (6, 9)]) == [(0, 3), (5, 9)]
    assert list(batch_io.missing([(5, 7), (0, 2)], 10)) == [(2, 5), (7, 10)]
    assert list(batch_io.missing([], 3)) == [(0, 3)]
    assert list(batch_io.missing([(0, 3)], 3)) == []


def test_a_journal_forgets_what_a_restart_of_the_machine_may_have_lost(tmp_path, monkeypatch):
    path = tmp_path / "j"
    with batch_io.Journal(path) as made:
        assert made.open() is None
        made.begin({"rows": 10})
        made.add(0, 2)
        made.synced()
        made.add(2, 4)
    with batch_io.Journal(path) as read:
        assert read.open() == {"rows": 10} and read.done == [(0, 4)]
    monkeypatch.setattr(batch_io, "_boot", lambda: "another")
    with batch_io.Journal(path) as read:
        read.open()
        assert read.done == [(0, 2)]
        read.add(4, 6)
    with batch_io.Journal(path) as read:
        read.open()
        assert read.done == [(0, 2), (4, 6)]


def test_a_journal_cut_off_in_a_line_is_read_up_to_it(tmp_path):
    path = tmp_path / "j"
    with batch_io.Journal(path) as made:
        made.open()
        made.begin({"rows": 10})
        made.add(0, 2)
        made.add(2, 4)
    path.write_bytes(path.read_bytes()[:-4])
    with batch_io.Journal(path) as read:
        read.open()
        assert read.done == [(0, 2)]
        read.add(7, 9)
    with batch_io.Journal(path) as read:
        read.open()
        assert read.done == [(0, 2), (7, 9)]


def test_a_damaged_journal_claims_nothing(tmp_path):
    path = tmp_path / "j"
    with batch_io.Journal(path) as made:
        made.open()
        made.begin({"rows": 10})
        made.add(0, 2)
        made.add(2, 4)
    good = path.read_bytes()
    for place in range(len(good)):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with batch_io.Journal(path) as read:
            try:
                assert read.open() == {"rows": 10}
            except FormatError as error:
                assert "--restart forgets it" in str(error)
            assert set(read.done) <= {(0, 2), (2, 4), (0, 4)}
    for words in (b"5\n", b"[]\n", b'{"version":1,"boot":"a","run":{}}\n', b"[" * 100000 + b"\n", b"\xff\n"):
        path.write_bytes(words)
        with batch_io.Journal(path) as read, pytest.raises(FormatError, match="--restart forgets it"):
            read.open()
        with batch_io.Journal(path) as read:
            assert read.open(forget=True) is None


def test_a_journal_that_its_owner_removed_is_not_taken_for_the_new_one(tmp_path, monkeypatch):
    path = tmp_path / "j"
    path.write_bytes(b"")
    plain = batch_io.Journal._lock

    def lock(journal):
        # Between opening and locking, the other run comes to its end.
        monkeypatch.setattr(batch_io.Journal, "_lock", plain)
        path.unlink()
        plain(journal)

    monkeypatch.setattr(batch_io.Journal, "_lock", lock)
    with batch_io.Journal(path) as made:
        assert made.open() is None
        made.begin({"rows": 10})
        assert path.read_bytes().count(b"\n") == 1


@pytest.mark.parametrize("content", [
    b"", b"\x00" * 8, b"\xff" * 16, (10).to_bytes(8, "little") + b"{}", (2).to_bytes(8, "little") + b"[]",
    *((len(text)).to_bytes(8, "little") + text + b"\x00" * 16 for text in (
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[12,20]}}',
        b'{"a":{"dtype":"F32","shape":[-2,-1],"data_offsets":[0,8]}}',
        b'{"a":{"dtype":"X9","shape":[2],"data_offsets":[0,8]}}',
        b'{"a":{"dtype":"F32","shape":"2","data_offsets":[0]}}', b'{"a":1}'))])
def test_broken_safetensors_are_refused(tmp_path, content):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=r"bad\.safetensors"):
        batch_io._open(str(path), None)


@pytest.mark.parametrize("name", ["bad.npy", "bad.npz"])
def test_broken_numpy_files_are_refused(tmp_path, name):
    path = tmp_path / name
    for content in (b"", b"abc", b"\x93NUMPY\x01\x00\xff\xff"):
        path.write_bytes(content)
        with pytest.raises(FormatError, match=name):
            batch_io._open(str(path), batch_io.Spec("fp32", np.dtype(np.float32), (1, 6)))


def test_raw_files_need_whole_samples(tmp_path):
    path = tmp_path / "x.raw"
    path.write_bytes(bytes(50))
    spec = batch_io.Spec("fp32", np.dtype(np.float32), (1, 6))
    with pytest.raises(FormatError, match="multiple of 24 bytes for float32 6, found 50"):
        batch_io._open(str(path), spec)
    assert batch_io._open(f"{path}:uint8:5x2", spec)[""].shape == (5, 5, 2)
    for words in ("nonsense", "uint8:0", "uint8:a", "object"):
        with pytest.raises(ArgumentError):
            batch_io._open(f"{path}:{words}", spec)
