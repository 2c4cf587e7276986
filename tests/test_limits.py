"""limits.py: how many CPUs are allowed, from pictures of /proc and /sys/fs/cgroup under a folder of ours."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from xnnfast import limits
from xnnfast.errors import ArgumentError, XnnfastError

Tree = dict[str, str]


def plant(root: Path, files: Tree) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


@pytest.fixture(autouse=True)
def mask_of_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(limits.ENV_CPUS, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


V2_SELF = {"proc/self/cgroup": "0::/\n"}
V2_NESTED = {"proc/self/cgroup": "0::/outer/inner\n"}
V1_NESTED = {"proc/self/cgroup": "12:memory:/elsewhere\n4:cpu,cpuacct:/outer/inner\n1:name=systemd:/x\n"}


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        pytest.param({}, None, id="no cgroups at all"),
        pytest.param(V2_SELF | {"sys/fs/cgroup/cpu.max": "max 100000\n"}, None, id="v2 without a quota"),
        pytest.param(V2_SELF | {"sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2.0, id="v2 at the root"),
        pytest.param({"sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2.0, id="v2 without /proc/self/cgroup"),
        pytest.param(V2_SELF | {"sys/fs/cgroup/cpu.max": "50000\n"}, 0.5, id="v2 with the default period"),
        pytest.param(
            V2_NESTED | {"sys/fs/cgroup/outer/inner/cpu.max": "150000 100000\n"}, 1.5, id="v2 in its own folder"
        ),
        pytest.param(
            V2_NESTED
            | {
                "sys/fs/cgroup/outer/inner/cpu.max": "400000 100000\n",
                "sys/fs/cgroup/outer/cpu.max": "100000 100000\n",
                "sys/fs/cgroup/cpu.max": "max 100000\n",
            },
            1.0,
            id="v2 with a tighter parent",
        ),
        pytest.param(
            V2_NESTED | {"sys/fs/cgroup/cpu.max": "300000 100000\n"}, 3.0, id="v2 whose own folder is not mounted"
        ),
        pytest.param(
            {"proc/self/cgroup": "0::/../../outside\n", "sys/fs/cgroup/cpu.max": "300000 100000\n"},
            3.0,
            id="v2 seen from a namespace inside",
        ),
        pytest.param(V2_SELF | {"sys/fs/cgroup/cpu.max": "lots 100000\n"}, None, id="v2 with nonsense"),
        pytest.param(V2_SELF | {"sys/fs/cgroup/cpu.max": "100000 0\n"}, None, id="v2 with a period of 0"),
        pytest.param(V2_SELF | {"sys/fs/cgroup/cpu.max": ""}, None, id="v2 with an empty file"),
        pytest.param(
            V1_NESTED
            | {
                "sys/fs/cgroup/cpu/outer/inner/cpu.cfs_quota_us": "250000\n",
                "sys/fs/cgroup/cpu/outer/inner/cpu.cfs_period_us": "100000\n",
            },
            2.5,
            id="v1",
        ),
        pytest.param(
            V1_NESTED
            | {
                "sys/fs/cgroup/cpu,cpuacct/outer/cpu.cfs_quota_us": "100000\n",
                "sys/fs/cgroup/cpu,cpuacct/outer/cpu.cfs_period_us": "50000\n",
            },
            2.0,
            id="v1 mounted with both names, quota on the parent",
        ),
        pytest.param(
            V1_NESTED
            | {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"},
            None,
            id="v1 without a quota",
        ),
    ],
)
def test_quota_is_read_from_cgroups(tmp_path: Path, files: Tree, quota: float | None) -> None:
    found = limits.cgroup_quota(plant(tmp_path, files))
    assert (None if found is None else found[0]) == quota


def test_the_tighter_of_v1_and_v2_holds(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:cpu:/\n0::/\n",
        "sys/fs/cgroup/cpu.max": "400000 100000\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    found = limits.cgroup_quota(plant(tmp_path, files))
    assert found is not None
    assert found[0] == 3.0
    assert "v1" in found[1]


@pytest.mark.parametrize(
    ("cpu_max", "count", "words"),
    [
        pytest.param("max 100000", 8, "affinity mask", id="no quota: the mask"),
        pytest.param("1600000 100000", 8, "affinity mask", id="quota above the mask: the mask"),
        pytest.param("200000 100000", 2, "grants 2 CPUs", id="quota below the mask: the quota"),
        pytest.param("150000 100000", 2, "grants 1.5 CPUs", id="part of a CPU: rounded up"),
        pytest.param("10000 100000", 1, "grants 0.1 CPUs", id="next to nothing: one"),
    ],
)
def test_allowed_cpus_explains_its_number(tmp_path: Path, cpu_max: str, count: int, words: str) -> None:
    allowed = limits.allowed_cpus(plant(tmp_path, V2_SELF | {"sys/fs/cgroup/cpu.max": cpu_max}))
    assert allowed.count == count
    assert words in allowed.reason


def test_mask_of_one_cpu_is_said_in_the_singular(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3}, raising=False)
    assert limits.allowed_cpus(tmp_path) == (1, "affinity mask holds 1 CPU")


def test_override_wins_over_mask_and_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(limits.ENV_CPUS, "16")
    allowed = limits.allowed_cpus(plant(tmp_path, V2_SELF | {"sys/fs/cgroup/cpu.max": "100000 100000"}))
    assert allowed.count == 16
    assert limits.ENV_CPUS in allowed.reason


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", " ", "²"])
def test_override_must_be_a_positive_whole_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(limits.ENV_CPUS, text)
    with pytest.raises(ArgumentError, match=limits.ENV_CPUS) as caught:
        limits.allowed_cpus(tmp_path)
    assert isinstance(caught.value, XnnfastError)
    assert isinstance(caught.value, TypeError)


def test_empty_override_is_no_override(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(limits.ENV_CPUS, "")
    assert limits.allowed_cpus(tmp_path).count == 8


def test_real_machine_allows_at_least_one() -> None:
    allowed = limits.allowed_cpus()
    assert allowed.count >= 1
    assert allowed.reason
