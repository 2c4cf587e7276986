"""``xnnfast cache``, ``--weights-cache`` and ``inspect --memory``, run as a user runs them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("typer", reason="the command needs the extra cli")

from test_cli import command

from xnnfast import memory, weights_cache
from xnnfast.builder import GraphBuilder

F = np.float32


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with dense.xnn, whose filter has a megabyte, and x.npy."""
    rng = np.random.default_rng(0)
    b = GraphBuilder()
    b.output(b.fully_connected(b.input((1, 512)), rng.standard_normal((512, 512), F), rng.standard_normal(512, F)))
    b.save(tmp_path / "dense.xnn")
    np.save(tmp_path / "x.npy", rng.standard_normal((1, 512), F))
    return tmp_path


def fill(folder: Path, *more: str) -> str:
    done = command(folder, "run", "dense.xnn", "x.npy", "-o", "y.npy", "--weights-cache", "kept/", *more)
    assert done.status == 0, done.err
    return done.err


def test_run_tells_what_became_of_the_cache(folder: Path) -> None:
    assert fill(folder).splitlines()[0] == "weights cache: saved"
    first = np.load(folder / "y.npy")
    assert fill(folder).splitlines()[0] == "weights cache: hit"
    np.testing.assert_array_equal(np.load(folder / "y.npy"), first)
    assert fill(folder, "--quiet") == ""
    assert fill(folder, "--backend", "reference").splitlines()[0] == "weights cache: not used by the reference"


def test_user_is_the_users_folder(folder: Path) -> None:
    done = command(folder, "run", "dense.xnn", "x.npy", "-o", "y.npy", "--weights-cache", "user",
                   env={"XNNFAST_CACHE_DIR": str(folder / "mine")})
    assert done.err.startswith("weights cache: saved")
    assert len(list((folder / "mine").glob("*.xnnw"))) == 1


def test_list(folder: Path) -> None:
    empty = command(folder, "cache", "list", env={"XNNFAST_CACHE_DIR": str(folder / "mine")})
    assert (empty.status, empty.out) == (0, f"{folder / 'mine'}: 0 files, 0 bytes of at most 8.59 GB\n")
    fill(folder)
    done = command(folder, "cache", "list", "--folder", "kept")
    head, row = done.out.splitlines()
    assert head.startswith("kept: 1 file, 1.")
    assert row.endswith("1 weights of dense.xnn")
    facts = json.loads(command(folder, "cache", "list", "--folder", "kept", "--json").out)
    (file,) = facts["files"]
    assert file["bytes"] == facts["bytes"] == os.stat(folder / file["path"]).st_size
    assert (file["entries"], file["source"]) == (1, "dense.xnn")
    (folder / file["path"]).write_bytes(b"rubbish")
    assert "unreadable" in command(folder, "cache", "list", "--folder", "kept").out


def test_verify(folder: Path) -> None:
    fill(folder)
    (path,) = (folder / "kept").glob("*.xnnw")
    good = command(folder, "cache", "verify", "--folder", "kept")
    assert (good.status, good.out) == (0, f"kept/{path.name}: good\n")
    data = bytearray(path.read_bytes())
    data[-5000] ^= 1
    path.write_bytes(data)
    bad = command(folder, "cache", "verify", "--folder", "kept", "--json")
    assert bad.status == 1
    assert json.loads(bad.out)["files"] == [
        {"path": f"kept/{path.name}", "wrong": "the packed bytes of entry 0 are damaged"}
    ]
    removed = command(folder, "cache", "verify", "--folder", "kept", "--remove")
    assert removed.status == 1
    assert removed.out.endswith("are damaged, removed\n")
    assert not path.exists()


def test_prune_and_clear(folder: Path) -> None:
    fill(folder)
    (path,) = (folder / "kept").glob("*.xnnw")
    assert "removed 0 files" in command(folder, "cache", "prune", "--folder", "kept").out
    assert "removed 0 files" in command(folder, "cache", "prune", "--folder", "kept", "--unused", "1").out
    os.utime(path, (1000, 1000))
    assert "removed 1 file," in command(folder, "cache", "prune", "--folder", "kept", "--unused", "1").out
    assert not path.exists()
    fill(folder)
    assert "removed 1 file," in command(folder, "cache", "prune", "--folder", "kept", "--limit", "0").out
    fill(folder)
    gone = json.loads(command(folder, "cache", "clear", "--folder", "kept", "--json").out)
    assert [Path(each["path"]).name for each in gone["files"]] == [path.name]
    assert weights_cache.files(folder / "kept") == []


def test_a_folder_that_is_not_there(folder: Path) -> None:
    for name in ("list", "prune", "clear", "verify"):
        assert command(folder, "cache", name, "--folder", "nowhere").error == "xnnfast: nowhere: need a folder"


def test_inspect_memory(folder: Path) -> None:
    for outcome, mapped in (("saved", False), ("hit", True)):
        done = command(folder, "inspect", "dense.xnn", "--memory", "--weights-cache", "kept/", "--json")
        facts = json.loads(done.out)
        assert facts["weights_cache"] == outcome
        assert facts["mapped"] >= 2**20
        assert facts["packed"] >= 2**20
        assert facts["packed_mapped"] == (facts["packed"] if mapped else 0)
        if "process" in facts:
            assert facts["constants_map"]["bytes"] == os.stat(folder / "dense.xnn").st_size
            assert facts["constants_map"]["resident"] < 2**20 // 2
            assert (facts["packed_map"]["resident"] >= 2**20) == mapped
            assert facts["process"]["resident"] > facts["process"]["anonymous"] > 0
    lines = command(folder, "inspect", "dense.xnn", "--memory", "--weights-cache", "kept/").out.splitlines()
    assert [line.split("  ")[0] for line in lines][:5] == [
        "constants in place", "constants copied", "packed weights", "workspace", "staging",
    ]  # fmt: skip
    assert lines[-1].split() == ["weights", "cache", "hit"]
    plain = command(folder, "inspect", "dense.xnn", "--memory").out
    assert "weights cache" not in plain


def test_pages_that_two_processes_map_are_shared(folder: Path) -> None:
    fill(folder)
    from xnnfast import Runtime, load

    with Runtime(load(folder / "dense.xnn"), weights_cache=folder / "kept") as runtime:
        assert runtime.weights_cache == "hit"
        x = np.load(folder / "x.npy")
        runtime.run(x)
        done = command(folder, "inspect", "dense.xnn", "--memory", "--weights-cache", "kept/", "--json")
        other = json.loads(done.out)
        if "process" not in other:
            pytest.skip("no /proc")
        assert other["packed_map"]["shared"] >= 2**20
        assert other["packed_map"]["proportional"] <= other["packed_map"]["resident"] // 2 + 4096
        facts = memory.breakdown(runtime)
        assert facts["packed_map"]["private"] >= 2**20


def test_memory_without_proc(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from xnnfast import Runtime, load

    monkeypatch.setattr(memory, "SMAPS", str(folder / "none"))
    with Runtime(load(folder / "dense.xnn")) as runtime:
        runtime.plan()
        facts = memory.breakdown(runtime)
        assert "process" not in facts
        assert facts["workspace"] > 0 or facts["packed"] > 0
        assert "constants in place" in memory.text(facts)
        runtime.close()
        assert memory.breakdown(runtime)["packed"] == 0
