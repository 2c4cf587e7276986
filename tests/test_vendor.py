"""vendor/XNNPACK without network and without a build; what a build leaves behind is examined where one is cached."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "vendor" / "XNNPACK"


def _load(name):
    spec = importlib.util.spec_from_file_location(f"vendor_{name}_under_test", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


build = _load("build")
changes = _load("changes")
COMPILER = build.Compiler("/usr/bin/cc", "/usr/bin/c++", "cc 12.2", "c++ 12.2", "x86_64-linux-gnu")


@pytest.fixture
def cpuinfo(tmp_path):
    """A pin of a tiny cpuinfo, its archive, and its tree."""
    tree = tmp_path / "made" / "cpuinfo-1"
    (tree / "include").mkdir(parents=True)
    (tree / "include" / "cpuinfo.h").write_text("#pragma once\n")
    (tree / "link").symlink_to("include/cpuinfo.h")
    archive = tmp_path / "made" / "cpuinfo_1.orig.tar.xz"
    with tarfile.open(archive, "w:xz") as tar:
        tar.add(tree, "cpuinfo-1")
    pin = build.Pin(
        "cpuinfo", "1", "c" * 40, build.file_sum(archive), build.tree_sum(tree), "BSD-2-Clause", "https://up.example/c"
    )
    return pin, archive, tree


class FakeWay:
    """A way that has the named components, and remembers what it was asked for."""

    def __init__(self, name, *has):
        self.name, self.has, self.asked = name, has, []

    def obtain(self, alternatives):
        name = alternatives[0].name
        self.asked.append(name)
        if name not in self.has:
            raise build.Unavailable(f"no {name} here")
        return build.Source(alternatives[0], self.name, Path("/nowhere"))


def some_pin(name, version="1"):
    return build.Pin(name, version, "c" * 40, "a" * 64, "b" * 64, "MIT", "https://up.example/x")


# --- pin


def test_pin_names_five_components_with_full_sums():
    pins = build.read_pin()
    assert list(pins) == ["xnnpack", "pthreadpool", "cpuinfo", "fxdiv", "fp16"]
    for alternatives in pins.values():
        for pin in alternatives:
            assert len(pin.commit) == 40 and pin.version.endswith(pin.commit[:7])
            assert len(pin.sha256) == len(pin.tree_sha256) == 64
            assert pin.licence in ("BSD-2-Clause", "BSD-3-Clause", "MIT")
            assert pin.upstream.startswith("https://github.com/")
    assert [pin.version for pin in pins["cpuinfo"]] == ["0.0~git20250905.877328f", "0.0~git20250327.39ea79a"]
    assert pins["xnnpack"][0].archive == "xnnpack_0.0~git20241108.4ea82e5.orig.tar.xz"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("Licence: MIT\n", "", "lacks licence"),
        (
            "Commit: 4ea82e595b36106653175dcb04b2aa532660d0d8",
            "Commit: 4ea82e5",
            "must be 40 hex digits, found '4ea82e5'",
        ),
        ("Name: fp16", "Name: fp17", "it pins cpuinfo, fp17, fxdiv"),
    ],
)
def test_pin_is_refused_when_incomplete(tmp_path, old, new, says):
    text = (FOLDER / "PIN").read_text()
    assert old in text
    (tmp_path / "PIN").write_text(text.replace(old, new))
    with pytest.raises(build.BuildError, match=says):
        build.read_pin(tmp_path / "PIN")


# --- apt's configuration


def test_mirror_is_read_from_the_one_line_format(tmp_path):
    (tmp_path / "sources.list").write_text(
        "# deb http://commented.example/debian bookworm main\n"
        "deb cdrom:[Debian]/ bookworm main\n"
        "deb http://security.example/debian-security bookworm-security main\n"
        "deb [arch=amd64] http://mirror.example/debian/ bookworm main contrib # the nearest\n"
        "deb-src http://mirror.example/debian bookworm main\n"
    )
    assert build.debian_mirrors(tmp_path / "sources.list", tmp_path / "none") == ["http://mirror.example/debian"]


def test_mirror_is_read_from_deb822(tmp_path):
    parts = tmp_path / "sources.list.d"
    parts.mkdir()
    (parts / "debian.sources").write_text(
        "Types: deb\n# a comment\nURIs: http://mirror.example/debian\nSuites: bookworm bookworm-updates\n"
        "Components: main\nSigned-By: /usr/share/keyrings/debian-archive-keyring.gpg\n"
        "\n"
        "Types: deb\nURIs: http://mirror.example/debian-security\nSuites: bookworm-security\nComponents: main\n"
        "\n"
        "Enabled: no\nTypes: deb\nURIs: http://off.example/debian\nSuites: bookworm\nComponents: main\n"
    )
    assert build.debian_mirrors(tmp_path / "none", parts) == ["http://mirror.example/debian"]


def test_mirror_of_debian_comes_before_others_with_debian_suites(tmp_path):
    parts = tmp_path / "sources.list.d"
    parts.mkdir()
    (parts / "a-vendor.list").write_text(
        "deb [signed-by=/usr/share/keyrings/v.gpg] https://vendor.example/apt bookworm main\n"
    )
    (parts / "b-node.sources").write_text(
        "Types: deb\nURIs: https://node.example/x\nSuites: nodistro\nComponents: main\n"
    )
    (parts / "c-debian.list").write_text("deb http://mirror.example/debian trixie main\n")
    (parts / "d-saved.list.save").write_text("deb http://old.example/debian trixie main\n")
    assert build.debian_mirrors(tmp_path / "none", parts) == [
        "http://mirror.example/debian",
        "https://vendor.example/apt",
    ]


def test_no_mirror_is_found_on_another_distribution(tmp_path):
    (tmp_path / "sources.list").write_text("deb http://mirror.example/other noble main universe\n")
    assert build.debian_mirrors(tmp_path / "sources.list", tmp_path / "none") == []


def test_apt_way_says_when_there_is_no_apt(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.Unavailable, match="apt-get is not on PATH"):
        build.AptWay(tmp_path, tmp_path).obtain([some_pin("cpuinfo")])


def _fake_apt(folder, monkeypatch, served):
    """apt programs that list two Debian revisions of cpuinfo 1 and one of cpuinfo 2, and serve one version only."""
    monkeypatch.setattr(build, "KEYRINGS", (str(folder / "keyring"),))
    monkeypatch.setattr(build, "_apt_source_paths", lambda: (folder / "sources.list", folder / "parts"))
    (folder / "keyring").touch()
    (folder / "sources.list").write_text("deb http://user:secret@mirror.example/debian trixie main\n")
    (folder / "apt-cache").write_text(
        "#!/bin/sh\nfor v in 1-1 1-1.1 2-1; do printf 'Package: cpuinfo\\nVersion: %s\\n\\n' $v; done\n"
    )
    (folder / "apt-get").write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$*" >> {folder}/calls\ncase "$*" in *update) exit 0;; *cpuinfo={served}-*)\n'
        f"/bin/cp {folder}/served cpuinfo_{served}.orig.tar.xz;; *) echo 'E: Failed: 404'; exit 100;; esac\n"
    )
    for program in ("apt-cache", "apt-get"):
        (folder / program).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_apt_way_takes_the_version_that_is_served(tmp_path, monkeypatch):
    _fake_apt(tmp_path, monkeypatch, served="2")
    (tmp_path / "served").write_bytes(b"archive")
    pins = [
        some_pin("cpuinfo", "1"),
        dataclasses.replace(some_pin("cpuinfo", "2"), sha256=build.file_sum(tmp_path / "served")),
    ]
    (tmp_path / "downloads").mkdir()
    source = build.AptWay(tmp_path / "downloads", tmp_path / "work").obtain(pins)
    assert (source.pin.version, source.way, source.path.read_bytes()) == ("2", "apt", b"archive")
    assert source.path.parent == tmp_path / "downloads"
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call.rpartition(" ")[2] for call in calls] == ["update", "cpuinfo=1-1", "cpuinfo=1-1.1", "cpuinfo=2-1"]
    assert all("--tar-only" in call and "--download-only" in call for call in calls[1:])
    sources = (tmp_path / "work" / "apt0" / "sources.list").read_text()
    assert "mirror.example/debian trixie main" in sources and "mirror.example/debian sid main" in sources


def test_apt_way_asks_an_unreachable_mirror_once(tmp_path, monkeypatch):
    _fake_apt(tmp_path, monkeypatch, served="1")
    (tmp_path / "apt-get").write_text(
        f"#!/bin/sh\necho call >> {tmp_path}/calls\necho 'E: Failed to fetch'\nexit 100\n"
    )
    way = build.AptWay(tmp_path, tmp_path / "work")
    for _ in range(2):
        with pytest.raises(build.Unavailable, match=r"mirror.example/debian: no package list \(E: Failed to fetch\)"):
            way.obtain([some_pin("cpuinfo", "1")])
    assert (tmp_path / "calls").read_text() == "call\n"


def test_apt_way_refuses_an_archive_with_another_sum(tmp_path, monkeypatch):
    _fake_apt(tmp_path, monkeypatch, served="1")
    (tmp_path / "served").write_bytes(b"something else")
    with pytest.raises(build.BuildError, match=f"must be {'a' * 64}, found "):
        build.AptWay(tmp_path, tmp_path / "work").obtain([some_pin("cpuinfo", "1")])


def test_apt_way_says_what_was_not_served_without_the_password(tmp_path, monkeypatch):
    _fake_apt(tmp_path, monkeypatch, served="none")
    with pytest.raises(build.Unavailable) as error:
        build.AptWay(tmp_path, tmp_path / "work").obtain([some_pin("cpuinfo", "1"), some_pin("cpuinfo", "3")])
    assert str(error.value) == (
        "http://mirror.example/debian lists 1 but does not serve it (E: Failed: 404); "
        "http://mirror.example/debian lists no 3 in trixie or sid"
    )
    assert "secret" not in str(error.value)


# --- sums and the folder


def test_folder_gives_an_archive_with_the_right_sum(tmp_path, cpuinfo):
    pin, archive, tree = cpuinfo
    source = build.FolderWay(str(archive.parent)).obtain([pin])
    assert (source.way, source.path) == ("folder", archive)
    source.unpack(tmp_path / "out")
    assert build.tree_sum(tmp_path / "out") == build.tree_sum(tree)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "out"]


def test_folder_refuses_an_archive_with_another_sum(cpuinfo):
    pin, archive, _ = cpuinfo
    found = build.file_sum(archive)
    with pytest.raises(build.BuildError) as error:
        build.FolderWay(str(archive.parent)).obtain([dataclasses.replace(pin, sha256="0" * 64)])
    assert str(archive) in str(error.value) and "0" * 64 in str(error.value) and found in str(error.value)


@pytest.mark.parametrize("name", ["cpuinfo", "cpuinfo-1"])
def test_folder_gives_an_unpacked_tree(tmp_path, cpuinfo, name):
    pin, _, tree = cpuinfo
    shutil.copytree(tree, tmp_path / "own" / name, symlinks=True)
    (tmp_path / "own" / name / ".git").mkdir()
    (tmp_path / "own" / name / ".git" / "HEAD").touch()
    other = dataclasses.replace(pin, version="0", tree_sha256="0" * 64)
    source = build.FolderWay(str(tmp_path / "own")).obtain([other, pin])
    assert (source.pin, source.path) == (pin, tmp_path / "own" / name)
    source.unpack(tmp_path / "out")
    assert not (tmp_path / "out" / ".git").exists()
    assert build.tree_sum(tmp_path / "out") == pin.tree_sha256


def test_folder_refuses_a_changed_tree(tmp_path, cpuinfo):
    pin, _, tree = cpuinfo
    shutil.copytree(tree, tmp_path / "own" / "cpuinfo", symlinks=True)
    (tmp_path / "own" / "cpuinfo" / "extra.c").touch()
    with pytest.raises(build.BuildError, match=f"own/cpuinfo: its SHA-256 must be {pin.tree_sha256}, found "):
        build.FolderWay(str(tmp_path / "own")).obtain([pin])


def test_folder_must_exist_when_named(tmp_path):
    with pytest.raises(build.BuildError, match=r"XNNFAST_XNNPACK_SOURCES names .*absent, which is not a folder"):
        build.FolderWay(str(tmp_path / "absent")).obtain([some_pin("cpuinfo")])


def test_folder_names_a_version_that_is_not_pinned(tmp_path):
    (tmp_path / "cpuinfo_9.orig.tar.xz").touch()
    with pytest.raises(build.Unavailable, match=r"it holds cpuinfo_9\.orig\.tar\.xz, which is not pinned"):
        build.FolderWay(str(tmp_path)).obtain([some_pin("cpuinfo")])


def test_damaged_download_is_fetched_again(tmp_path, cpuinfo):
    pin, archive, _ = cpuinfo
    kept = tmp_path / f"{pin.sha256}.orig.tar.xz"
    shutil.copyfile(archive, kept)
    assert build.CacheWay(tmp_path).obtain([pin]).path == kept
    kept.write_bytes(b"damaged")
    with pytest.raises(build.Unavailable):
        build.CacheWay(tmp_path).obtain([pin])
    assert not kept.exists()


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_git_way_gives_the_pinned_commit_only(tmp_path, cpuinfo, monkeypatch):
    pin, _, tree = cpuinfo
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    git = ["git", "-C", str(tree), "-c", "user.name=x", "-c", "user.email=x@up.example"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *arguments], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    pin = dataclasses.replace(pin, commit=commit, upstream=tree.as_uri())
    for folder in ("downloads", "work"):
        (tmp_path / folder).mkdir()
    way = build.GitWay(tmp_path / "downloads", tmp_path / "work")
    source = way.obtain([dataclasses.replace(pin, commit="0" * 40), pin])
    assert (source.pin, source.way) == (pin, "git")
    source.unpack(tmp_path / "out")
    assert build.tree_sum(tmp_path / "out") == pin.tree_sha256
    assert build.CacheWay(tmp_path / "downloads").obtain([pin]).path == source.path
    changed = dataclasses.replace(source, pin=dataclasses.replace(pin, tree_sha256="0" * 64))
    with pytest.raises(build.BuildError, match="must be 0000"):
        changed.unpack(tmp_path / "other")


# --- order of the ways


def test_ways_are_tried_in_order_and_may_be_mixed():
    folder, apt, git = FakeWay("folder", "cpuinfo"), FakeWay("apt", "cpuinfo", "fxdiv"), FakeWay("git", "fxdiv", "fp16")
    pins = {name: [some_pin(name)] for name in ("cpuinfo", "fxdiv", "fp16")}
    sources = build.obtain(pins, [folder, apt, git])
    assert {name: source.way for name, source in sources.items()} == {
        "cpuinfo": "folder",
        "fxdiv": "apt",
        "fp16": "git",
    }
    assert (folder.asked, apt.asked, git.asked) == (["cpuinfo", "fxdiv", "fp16"], ["fxdiv", "fp16"], ["fp16"])


def test_real_ways_come_in_the_documented_order(tmp_path):
    assert [way.name for way in build._ways(tmp_path, tmp_path)] == ["folder", "bundled", "cache", "apt", "git"]


def test_sources_of_a_source_distribution_are_found(tmp_path, cpuinfo, monkeypatch):
    pin, archive, _ = cpuinfo
    monkeypatch.delenv(build.SOURCES_VARIABLE, raising=False)
    monkeypatch.setattr(build, "BUNDLED", tmp_path / "sources")
    bundled = build._ways(tmp_path, tmp_path)[1]
    with pytest.raises(build.Unavailable, match="this is no source distribution"):
        bundled.obtain([pin])
    (tmp_path / "sources").mkdir()
    shutil.copyfile(archive, tmp_path / "sources" / pin.archive)
    source = build._ways(tmp_path, tmp_path)[1].obtain([pin])
    assert (source.way, source.path) == ("bundled", tmp_path / "sources" / pin.archive)
    (tmp_path / "sources" / pin.archive).write_bytes(b"damaged")
    with pytest.raises(build.BuildError, match="must be"):
        build._ways(tmp_path, tmp_path)[1].obtain([pin])


def test_total_failure_lists_every_component_way_and_remedy():
    pins = {"cpuinfo": [some_pin("cpuinfo", "2"), some_pin("cpuinfo", "1")], "fp16": [some_pin("fp16")]}
    with pytest.raises(build.BuildError) as error:
        build.obtain(pins, [FakeWay("folder"), FakeWay("apt"), FakeWay("git")])
    text = str(error.value)
    assert "obtained:\n  cpuinfo 2 or cpuinfo 1\n  fp16 1\n" in text
    assert (
        "order:\n  folder, cpuinfo: no cpuinfo here\n  folder, fp16: no fp16 here\n  apt, cpuinfo: no cpuinfo here\n"
        in text
    )
    assert "    cpuinfo_2.orig.tar.xz\n    fp16_1.orig.tar.xz\n" in text
    for remedy in (build.SOURCES_VARIABLE, "debian-archive-keyring", "install git"):
        assert remedy in text


def test_total_failure_gives_a_reason_common_to_all_once(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    ways = [build.FolderWay(None), build.AptWay(tmp_path, tmp_path), build.GitWay(tmp_path, tmp_path)]
    with pytest.raises(build.BuildError) as error:
        build.obtain({name: [some_pin(name)] for name in ("fxdiv", "fp16")}, ways)
    lines = str(error.value).splitlines()
    assert lines[3:7] == [
        "What was tried, in this order:",
        "  folder: XNNFAST_XNNPACK_SOURCES is not set",
        "  apt: apt-get is not on PATH",
        "  git: git is not on PATH",
    ]


def test_wrong_sum_is_not_passed_over_to_the_next_way(cpuinfo):
    pin, archive, _ = cpuinfo
    git = FakeWay("git", "cpuinfo")
    with pytest.raises(build.BuildError, match="found"):
        build.obtain(
            {"cpuinfo": [dataclasses.replace(pin, sha256="0" * 64)]}, [build.FolderWay(str(archive.parent)), git]
        )
    assert git.asked == []


# --- changes


def _change(name):
    return next(change for change in changes.CHANGES if change.name == name)


def _tree(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


ROW_BLOCK = """\
      if (mr == 1)
      {
        while (k >= 64 * sizeof(int8_t)) {
          _tile_loadd(4, a0, 64);   // direct
          a15 += 64;
        }
      } else {
        a14 += 64;
        a15 += 64;
      }
"""


def test_amx_change_touches_the_single_row_block_only(tmp_path):
    name = "src/q-igemm/gen/q-igemm-16x64c4-avx512amx.c"
    _tree(tmp_path, {name: ROW_BLOCK, "src/q-gemm/gen/q-gemm-16x64c4-avx512amx.c": ROW_BLOCK})
    change = dataclasses.replace(_change("amx-igemm-single-row"), files=1, places=1)
    (applied,) = changes.apply({"xnnpack": tmp_path}, [change])
    assert (applied.name, applied.files, applied.places) == ("amx-igemm-single-row", 1, 1)
    assert (tmp_path / name).read_text() == ROW_BLOCK.replace("a15 += 64", "a0 += 64", 1)
    assert "a0 += 64" not in (tmp_path / "src/q-gemm/gen/q-gemm-16x64c4-avx512amx.c").read_text()


def test_fp16_change_moves_second_vectors_of_the_same_row(tmp_path):
    name = "src/f16-gemm/gen/f16-gemm-7x64-minmax-avx512fp16-broadcast.c"
    text = "".join(
        f"_mm512_storeu_ph(c{n}, vacc{n}x0);\n_mm512_storeu_ph((uint16_t*) c{n} + 1, vacc{n}x1);\n" for n in (0, 10)
    )
    unrelated = "_mm512_storeu_ph((uint16_t*) c1 + 1, vacc2x1);\nc0 + 1\n"
    _tree(tmp_path, {name: text + unrelated})
    change = dataclasses.replace(_change("fp16-second-vector-store"), files=1, places=2)
    changes.apply({"xnnpack": tmp_path}, [change])
    assert (tmp_path / name).read_text() == text.replace(" + 1,", " + 32,") + unrelated


def test_sums_of_blockwise_weights_are_loaded_from_anywhere(tmp_path):
    name = "src/qd8-f32-qb4w-gemm/gen/qd8-f32-qb4w-gemm-4x4c8-minmax-avx-ld128.c"
    _tree(tmp_path, {name: "vksum = _mm_load_ps((const float*) w);\nvmax = _mm_load_ps(params);\n"})
    changes.apply({"xnnpack": tmp_path}, [dataclasses.replace(_change("qb4w-unaligned-sums"), files=1, places=1)])
    assert (tmp_path / name).read_text() == "vksum = _mm_loadu_ps((const float*) w);\nvmax = _mm_load_ps(params);\n"


PLANNER = """\
  if (num_mem_blocks == 1) {
    return live_mem_blocks[0].end;
  }

  // Sort memory blocks according to 'start' in increasing order.
  qsort(live_mem_blocks, num_mem_blocks, sizeof(struct memory_block), cmp_memory_block);

  size_t smallest_gap_size = SIZE_MAX;
"""


def test_planner_looks_below_the_first_block_when_blocks_are_sorted(tmp_path):
    name = "src/memory-planner.c"
    _tree(tmp_path, {name: PLANNER})
    changes.apply({"xnnpack": tmp_path}, [_change("planner-room-below")])
    text = (tmp_path / name).read_text()
    assert "num_mem_blocks == 1" not in text
    assert text.index("qsort(") < text.index("if (live_mem_blocks[0].start >= to_alloc_size) {\n    return 0;\n  }\n")


def test_fully_connected_tells_the_size_of_what_it_found(tmp_path):
    name = "src/operators/fully-connected-nc.c"
    _tree(tmp_path, {name: "    fully_connected_op->packed_weights.offset = cache_offset;\n"})
    changes.apply({"xnnpack": tmp_path}, [_change("fully-connected-hit-size")])
    assert "&cache_key, NULL, aligned_total_weights_size);" in (tmp_path / name).read_text()


def test_spin_change_replaces_the_number(tmp_path):
    _tree(tmp_path, {"src/threadpool-common.h": "#define PTHREADPOOL_SPIN_WAIT_ITERATIONS 1000000\n"})
    changes.apply({"pthreadpool": tmp_path}, [_change("spin-wait")])
    assert (tmp_path / "src/threadpool-common.h").read_text() == "#define PTHREADPOOL_SPIN_WAIT_ITERATIONS 2000\n"


def _gates(*options):
    return "PROJECT(X C)\n" + "".join(
        f'OPTION({option} "x" ON)\n'
        'IF(CMAKE_C_COMPILER_ID STREQUAL "GNU")\n  IF(CMAKE_C_COMPILER_VERSION VERSION_LESS "13")\n'
        f"    SET({option} OFF)\n  ENDIF()\nELSEIF(MSVC)\n  SET({option} OFF)\nENDIF()\n"
        f'IF(XNNPACK_TARGET_PROCESSOR STREQUAL "x86")\n  SET({option} OFF)\nENDIF()\n'
        for option in options
    )


def test_gate_changes_ask_the_compiler_instead_of_its_version(tmp_path):
    amx, fp16, other = "XNNPACK_ENABLE_AVX512AMX", "XNNPACK_ENABLE_AVX512FP16", "XNNPACK_ENABLE_AVX512F"
    _tree(tmp_path, {"CMakeLists.txt": _gates(other, amx, fp16)})
    changes.apply({"xnnpack": tmp_path}, [_change("amx-gate"), _change("avx512fp16-gate")])
    text = (tmp_path / "CMakeLists.txt").read_text()
    assert text.startswith(_gates(other)) and text.count("VERSION_LESS") == 1
    assert text.count("CHECK_C_SOURCE_COMPILES") == 2
    assert text.index("-mamx-int8") < text.index("IF(NOT XNNPACK_COMPILER_HAS_AVX512AMX)") < text.index("-mavx512fp16")
    # The lines for 32-bit machines after each gate are not part of it.
    assert text.count('STREQUAL "x86"') == 3


@pytest.mark.parametrize("count", [{"files": 2}, {"places": 2}, {"files": 0, "places": 0}])
def test_change_that_hits_another_number_fails_and_writes_nothing(tmp_path, count):
    name = "src/threadpool-common.h"
    _tree(tmp_path, {name: "#define PTHREADPOOL_SPIN_WAIT_ITERATIONS 1000000\n"})
    change = dataclasses.replace(_change("spin-wait"), **count)
    with pytest.raises(changes.ChangeError, match=r"'spin-wait' must hit .* it hit 1 in 1"):
        changes.apply({"pthreadpool": tmp_path}, [change])
    assert (tmp_path / name).read_text().endswith("1000000\n")


def test_changes_refuse_a_tree_they_were_applied_to(tmp_path):
    _tree(tmp_path, {"src/threadpool-common.h": "#define PTHREADPOOL_SPIN_WAIT_ITERATIONS 1000000\n"})
    changes.apply({"pthreadpool": tmp_path}, [_change("spin-wait")])
    with pytest.raises(changes.ChangeError, match="it hit 0 in 0"):
        changes.apply({"pthreadpool": tmp_path}, [_change("spin-wait")])


RUN_OPERATOR = """\
#include "pthreadpool.h"

  for (size_t i = 0; i < XNN_MAX_COMPUTE_INVOCATIONS; i++) {
    switch (op->compute[i].type) {
"""


def test_loop_order_is_asked_before_each_step(tmp_path):
    name = "src/operator-run.c"
    _tree(tmp_path, {name: RUN_OPERATOR})
    changes.apply({"xnnpack": tmp_path}, [_change("loop-order-include"), _change("loop-order-call")])
    text = (tmp_path / name).read_text()
    assert text.startswith('#include "pthreadpool.h"\n#include "xnnfast/loop-order.h"\n')
    assert text.index("  for (") < text.index("xnnfast_run_turned(&op->compute[i]") < text.index("    switch (")


def test_isa_is_capped_before_flags_are_made_of_it(tmp_path):
    name = "src/configs/hardware-config.c"
    _tree(tmp_path, {name: '#include "xnnpack/hardware-config.h"\n  hardware_config.arch_flags = 0;\n'})
    changes.apply({"xnnpack": tmp_path}, [_change("isa-cap-include"), _change("isa-cap-call")])
    assert (tmp_path / name).read_text().splitlines() == [
        '#include "xnnpack/hardware-config.h"',
        '#include "xnnfast/isa-cap.h"',
        "  xnnfast_cap_isa(&hardware_config);",
        "  hardware_config.arch_flags = 0;",
    ]


@pytest.mark.parametrize(
    ("name", "line", "becomes"),
    [
        (
            "loop-order-build",
            "  ADD_LIBRARY(operator-run OBJECT src/operator-run.c)\n",
            "  ADD_LIBRARY(operator-run OBJECT src/operator-run.c src/xnnfast/loop-order.c)\n",
        ),
        (
            "loop-order-cpuinfo",
            "  TARGET_LINK_LIBRARIES(hardware-config PRIVATE cpuinfo)\n",
            "  TARGET_LINK_LIBRARIES(hardware-config PRIVATE cpuinfo)\n"
            "  TARGET_LINK_LIBRARIES(operator-run PRIVATE cpuinfo)\n",
        ),
        (
            "isa-cap-build",
            "ADD_LIBRARY(hardware-config OBJECT src/configs/hardware-config.c)\n",
            "ADD_LIBRARY(hardware-config OBJECT src/configs/hardware-config.c src/xnnfast/isa-cap.c)\n",
        ),
    ],
)
def test_own_sources_are_compiled(tmp_path, name, line, becomes):
    _tree(tmp_path, {"CMakeLists.txt": line})
    changes.apply({"xnnpack": tmp_path}, [_change(name)])
    assert (tmp_path / "CMakeLists.txt").read_text() == becomes


def test_sums_stay_in_registers_by_options_for_some_kernels_of_gcc(tmp_path):
    line = '  SET_PROPERTY(SOURCE ${ALL_MICROKERNEL_SRCS} APPEND_STRING PROPERTY COMPILE_FLAGS " -fno-math-errno ")\n'
    _tree(tmp_path, {"CMakeLists.txt": line})
    changes.apply({"xnnpack": tmp_path}, [_change("spilled-sums")])
    text = (tmp_path / "CMakeLists.txt").read_text()
    assert text.startswith(line)
    assert text.endswith(
        "    SET_PROPERTY(SOURCE ${XNNFAST_SPILLING_SRCS} APPEND_STRING PROPERTY COMPILE_FLAGS "
        '" -fschedule-insns -fsched-pressure ")\n  ENDIF()\n'
    )
    pattern = re.compile(re.search(r'INCLUDE REGEX "(.*)"\)', text)[1])
    chosen = (
        "src/f32-gemm/gen/f32-gemm-5x16-minmax-fma3-broadcast.c",
        "src/f32-igemm/gen/f32-igemm-5x16-minmax-fma3-broadcast-prfm.c",
        "src/f32-qc8w-gemm/gen/f32-qc8w-gemm-5x16-minmax-avx2-broadcast.c",
        "src/qs8-qc8w-dwconv/gen/qs8-qc8w-dwconv-25p32c-minmax-fp32-avx512skx-mul32.c",
        "src/qu8-dwconv/gen/qu8-dwconv-9p16c-minmax-fp32-avx2-mul32.c",
    )
    left = (
        "src/f32-gemm/gen/f32-gemm-4x16s4-minmax-fma3-broadcast.c",
        "src/f32-dwconv/gen/f32-dwconv-9p16c-minmax-fma3.c",
        "src/qu8-dwconv/gen/qu8-dwconv-9p16c-minmax-fp32-avx-mul16.c",
        "src/qs8-qc8w-gemm/gen/qs8-qc8w-gemm-3x8c8-minmax-fp32-avx2.c",
    )
    assert all(map(pattern.search, chosen)) and not any(map(pattern.search, left))


def test_own_sources_get_a_folder_of_their_own(tmp_path):
    (tmp_path / "src").mkdir()
    names = changes.add_own({"xnnpack": tmp_path})
    assert names == [f"src/xnnfast/{path.name}" for path in changes.own_files()]
    assert all((tmp_path / name).read_bytes() for name in names)
    with pytest.raises(changes.ChangeError, match="must be a folder that XNNPACK does not have"):
        changes.add_own({"xnnpack": tmp_path})


def test_key_covers_own_sources(tmp_path, monkeypatch):
    shutil.copytree(changes.OWN, tmp_path / "own")
    monkeypatch.setattr(changes, "OWN", tmp_path / "own")
    before = changes.content()
    with (tmp_path / "own" / "loop-order.c").open("a") as file:
        file.write("\n")
    assert changes.content() != before


def test_changes_state_the_counts_of_the_pin():
    assert {change.name: (change.files, change.places) for change in changes.CHANGES} == {
        "amx-gate": (1, 1),
        "avx512fp16-gate": (1, 1),
        "amx-igemm-single-row": (21, 21),
        "fp16-second-vector-store": (12, 62),
        "qb4w-unaligned-sums": (24, 24),
        "quantization-params-room": (1, 1),
        "planner-room-below": (1, 1),
        "fully-connected-hit-size": (1, 1),
        "spin-wait": (1, 1),
        "spilled-sums": (1, 1),
        "loop-order-build": (1, 1),
        "loop-order-cpuinfo": (1, 1),
        "loop-order-include": (1, 1),
        "loop-order-call": (1, 1),
        "isa-cap-build": (1, 1),
        "isa-cap-include": (1, 1),
        "isa-cap-call": (1, 1),
        "second-isa-build": (1, 1),
        "second-isa-include": (1, 1),
        "second-isa-convolution": (2, 6),
        "second-isa-fully-connected": (1, 5),
    }


# --- compiler, key, cache


def test_missing_compiler_says_what_to_install(tmp_path):
    with pytest.raises(build.BuildError, match=r"no C compiler: .*build-essential.* or set CC"):
        build.find_compiler({"PATH": str(tmp_path)})
    with pytest.raises(build.BuildError, match="CC is 'icc-none', which cannot be run"):
        build.find_compiler({"PATH": str(tmp_path), "CC": "icc-none"})


def test_missing_tool_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.BuildError, match="ninja is missing: install the Python package no_such_module"):
        build.find_tool("ninja", "no_such_module", "BIN_DIR")


def _key(**other):
    facts = {"compiler": COMPILER, "pin": b"pin", "changes": b"changes", "machine": "Linux x86_64", **other}
    return build.cache_key(facts.pop("compiler"), **facts)


@pytest.mark.parametrize(
    "other",
    [
        {"pin": b"pin 2"},
        {"changes": b"changes 2"},
        {"flags": ("-O1",)},
        {"options": {"CMAKE_BUILD_TYPE": "Debug"}},
        {"machine": "Linux aarch64"},
        {"compiler": dataclasses.replace(COMPILER, c_version="cc 13.1")},
        {"compiler": dataclasses.replace(COMPILER, c="/usr/bin/cc -m32")},
        {"compiler": dataclasses.replace(COMPILER, target="aarch64-linux-gnu")},
    ],
)
def test_key_changes_with_whatever_changes_the_product(other):
    assert _key(**other) != _key()


def test_cross_compiler_builds_for_its_own_machine(monkeypatch):
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    cross = dataclasses.replace(COMPILER, target="aarch64-linux-gnu")
    assert (COMPILER.machine, cross.machine) == ("x86_64", "aarch64")
    assert dataclasses.replace(COMPILER, target="arm64-apple-darwin23.4.0").machine == "x86_64"
    keys = [build.cache_key(compiler, pin=b"", changes=b"") for compiler in (COMPILER, cross)]
    assert keys[0] != keys[1]


def test_key_does_not_depend_on_where_the_compiler_lies():
    assert _key(compiler=dataclasses.replace(COMPILER, c="/opt/bin/cc")) == _key()


def test_key_covers_the_recipe(monkeypatch):
    before = _key()
    monkeypatch.setattr(build, "RECIPE", build.RECIPE + 1)
    assert _key() != before


def test_cache_folder_follows_the_variables():
    assert build.cache_folder({"XNNFAST_BUILD_CACHE": "/a/b", "XDG_CACHE_HOME": "/x"}) == Path("/a/b")
    assert build.cache_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/xnnfast")
    assert build.cache_folder({}) == Path.home() / ".cache" / "xnnfast"


def _fake_product(folder, content=b"archive"):
    for name in ("include", "lib", "licenses"):
        (folder / name).mkdir(parents=True)
    (folder / "licenses" / "xnnpack.txt").touch()
    (folder / "lib" / "libXNNPACK.a").write_bytes(content)
    info = {"archives": [{"file": "libXNNPACK.a", "size": len(content)}], "families": {"scalar": 1}}
    (folder / "build-info.json").write_text(json.dumps(info))
    return folder


def test_product_is_loaded_only_when_whole(tmp_path):
    product = _fake_product(tmp_path / "product")
    built = build.load(product)
    assert built.include_dirs == [str(product / "include")]
    assert built.archives == [str(product / "lib" / "libXNNPACK.a")]
    assert built.licenses == [str(product / "licenses" / "xnnpack.txt")]
    (product / "lib" / "libXNNPACK.a").write_bytes(b"")
    assert build.load(product) is None
    assert build.load(tmp_path / "absent") is None


def test_faster_build_of_two_is_kept(tmp_path):
    first, second = _fake_product(tmp_path / "1", b"first"), _fake_product(tmp_path / "2", b"second")
    build._publish(first, tmp_path / "product")
    build._publish(second, tmp_path / "product")
    assert (tmp_path / "product" / "lib" / "libXNNPACK.a").read_bytes() == b"first"


def test_broken_product_is_replaced(tmp_path):
    product = _fake_product(tmp_path / "product", b"first")
    (product / "lib" / "libXNNPACK.a").unlink()
    build._publish(_fake_product(tmp_path / "2", b"second"), product)
    assert (product / "lib" / "libXNNPACK.a").read_bytes() == b"second"


def test_ensure_builds_once_for_concurrent_callers(tmp_path, monkeypatch):
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(build, "find_compiler", lambda: COMPILER)
    builds, results = [], []

    def fake_build(compiler, key, cache, work, jobs, say):
        builds.append(work)
        return _fake_product(work / "product")

    monkeypatch.setattr(build, "_build", fake_build)
    assert build.cached() is None
    threads = [threading.Thread(target=lambda: results.append(build.ensure(verbose=False))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1 and len(results) == 4
    assert {result.archives[0] for result in results} == {build.cached().archives[0]}
    assert list((tmp_path / "cache" / "work").iterdir()) == []


def test_ensure_leaves_nothing_behind_when_the_build_fails(tmp_path, monkeypatch):
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(build, "find_compiler", lambda: COMPILER)

    def fail(compiler, key, cache, work, jobs, say):
        raise build.BuildError("no")

    monkeypatch.setattr(build, "_build", fail)
    with pytest.raises(build.BuildError):
        build.ensure(verbose=False)
    assert list((tmp_path / "work").iterdir()) == list((tmp_path / "built").iterdir()) == []


@pytest.mark.parametrize("call", [lambda: build.ensure(verbose=False), lambda: build.fetch_only(Path("unused"))])
def test_cache_that_cannot_be_made_names_the_variable(tmp_path, monkeypatch, call):
    (tmp_path / "file").touch()
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(build, "find_compiler", lambda: COMPILER)
    with pytest.raises(build.BuildError, match=r"file/cache cannot be made .*; set XNNFAST_BUILD_CACHE"):
        call()


def test_failing_step_shows_the_end_of_its_log(tmp_path):
    log = tmp_path / "log"
    with pytest.raises(build.BuildError, match=r"configure failed with status 3; the end of .*log:\nhere is why"):
        build._logged(["sh", "-c", "echo here is why >&2; exit 3"], {"PATH": "/usr/bin:/bin"}, log, "configure")


def test_main_prints_the_error_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert build.main([]) == 1
    assert capsys.readouterr().err.startswith("error: no C compiler")


# --- product


def test_families_are_those_whose_kernels_were_compiled(tmp_path):
    gen = "cmake/gen/{}_microkernels.cmake"
    _tree(
        tmp_path,
        {
            "prod_microkernel_srcs.txt": "src/a-scalar.c\nsrc/b-scalar.c\nsrc/a-avx512amx.c",
            gen.format("scalar"): "SET(PROD_SCALAR_MICROKERNEL_SRCS\n  src/a-scalar.c\n  src/b-scalar.c)\n",
            gen.format("avx512amx"): "SET(PROD_AVX512AMX_MICROKERNEL_SRCS\n  src/a-avx512amx.c)\n",
            gen.format("avx512fp16"): "SET(PROD_AVX512FP16_MICROKERNEL_SRCS\n  src/a-avx512fp16.c)\n",
            gen.format("neonsme"): "SET(PROD_NEONSME_MICROKERNEL_SRCS)\n",
        },
    )
    assert build.kernel_families(tmp_path) == {"avx512amx": 1, "scalar": 2}


@pytest.fixture(scope="module")
def product():
    built = build.cached()
    if built is None:
        pytest.skip("no build is cached for this compiler")
    return built


def test_product_says_what_it_is(product):
    info = product.info
    pins = build.read_pin()
    assert [entry["name"] for entry in info["pin"]] == list(pins)
    for entry in info["pin"]:
        assert entry["version"] in [pin.version for pin in pins[entry["name"]]]
    assert [(row["name"], row["files"], row["places"]) for row in info["changes"]] == [
        (change.name, change.files, change.places) for change in changes.CHANGES
    ]
    assert info["families"]["scalar"] > 100
    assert info["avx512amx"] == ("avx512amx" in info["families"])
    assert info["avx512fp16"] == ("avx512fp16" in info["families"])
    assert info["libraries"] == ["m", "pthread"]
    assert info["own"] == [f"src/xnnfast/{path.name}" for path in changes.own_files()]
    assert [Path(path).name for path in product.archives] == list(build.ARCHIVES)
    assert [Path(path).stem for path in product.licenses] == sorted(pins)
    assert all("opyright" in Path(path).read_text() for path in product.licenses)


def test_product_has_the_headers(product):
    (include,) = map(Path, product.include_dirs)
    for header in build.HEADERS:
        assert (include / header).stat().st_size > 100


@pytest.mark.skipif(not shutil.which("readelf"), reason="needs binutils")
def test_product_defines_no_visible_symbol(product):
    for archive in product.archives:
        table = subprocess.run(["readelf", "-sW", archive], capture_output=True, text=True, check=True).stdout
        rows = [line.split() for line in table.splitlines()]
        names = {row[7]: row[5] for row in rows if len(row) == 8 and row[4] in ("GLOBAL", "WEAK") and row[6] != "UND"}
        assert len(names) > 20
        assert {name for name, visibility in names.items() if visibility == "DEFAULT"} == set()


def test_product_names_no_folder_of_the_machine(product):
    cache = str(build.cache_folder()).encode()
    for path in [*product.archives, Path(product.archives[0]).parents[1] / "build-info.json"]:
        assert cache not in Path(path).read_bytes()


def test_product_links_and_starts(product, tmp_path):
    (tmp_path / "start.c").write_text(
        "#include <xnnpack.h>\n#include <pthreadpool.h>\n#include <cpuinfo.h>\n#include <xnnpack/hardware-config.h>\n"
        "int main(void) {\n"
        "  if (xnn_initialize(NULL) != xnn_status_success || !cpuinfo_initialize()) return 1;\n"
        "  if (xnn_init_hardware_config() == NULL) return 2;\n"
        "  pthreadpool_t pool = pthreadpool_create(2);\n"
        "  const size_t threads = pthreadpool_get_threads_count(pool);\n"
        "  pthreadpool_destroy(pool);\n"
        "  return threads == 2 ? 0 : 3;\n}\n"
    )
    compiler = build.find_compiler()
    command = [*build.shlex.split(compiler.c), str(tmp_path / "start.c"), "-o", str(tmp_path / "start")]
    command += [f"-I{folder}" for folder in product.include_dirs] + product.archives
    command += [f"-l{name}" for name in product.info["libraries"]]
    subprocess.run(command, check=True)
    assert subprocess.run([tmp_path / "start"]).returncode == 0


def test_folder_holds_no_foreign_source():
    assert sorted(path.name for path in FOLDER.iterdir() if path.name != "__pycache__") == [
        "PIN",
        "README.md",
        "build.py",
        "changes.py",
        "check",
        "check_kernels.py",
        "own",
    ]
    for path in (*changes.OWN.iterdir(), *(FOLDER / "check").iterdir()):
        assert path.suffix in (".c", ".h")
        assert path.read_text().startswith("// Part of xnnfast, BSD-3-Clause. Not from XNNPACK.\n")
