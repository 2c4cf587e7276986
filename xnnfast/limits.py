"""How many CPUs this process may use, and why: affinity mask, cgroup quota and an override.

The machine's processor count is the wrong number in a container, where it made others up to 45 times
slower: only what the scheduler will really grant counts.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import NamedTuple

from .errors import ArgumentError

ENV_CPUS = "XNNFAST_CPUS"


class AllowedCpus(NamedTuple):
    """A number of CPUs and the sentence that explains it."""

    count: int  # type: ignore[assignment]  # the name says it best; nobody counts in this tuple
    reason: str


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def _cgroup_folders(root: Path, controller: str | None) -> list[Path]:
    """The process's cgroup folder and its parents: the tightest quota on the way up holds."""
    text = _read(root / "proc/self/cgroup")
    relative = "/"
    for line in (text or "").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        unified = controller is None and number == "0" and not controllers
        if unified or (controller and controller in controllers.split(",")):
            relative = path
    base = root / "sys/fs/cgroup"
    if controller:
        base = base / controller if (base / controller).is_dir() else base / "cpu,cpuacct"
    folders = []
    parts = [part for part in relative.split("/") if part and part != ".."]
    for depth in range(len(parts), -1, -1):
        folders.append(base.joinpath(*parts[:depth]))
    return folders


def cgroup_quota(root: Path = Path("/")) -> tuple[float, str] | None:
    """CPUs granted by the cgroup quota (v2, then v1) and where it was read; None without a quota."""
    found: list[tuple[float, str]] = []
    for folder in _cgroup_folders(root, None):
        text = _read(folder / "cpu.max")
        if text:
            quota, _, period = text.partition(" ")
            if quota != "max":
                try:
                    found.append((int(quota) / int(period or 100000), "cgroup v2 cpu.max"))
                except (ValueError, ZeroDivisionError):
                    continue
    for folder in _cgroup_folders(root, "cpu"):
        try:
            quota_us = int(_read(folder / "cpu.cfs_quota_us") or -1)
            period_us = int(_read(folder / "cpu.cfs_period_us") or 0)
        except ValueError:
            continue
        if quota_us > 0 and period_us > 0:
            found.append((quota_us / period_us, "cgroup v1 cpu.cfs_quota_us"))
    return min(found) if found else None


def allowed_cpus(root: Path = Path("/")) -> AllowedCpus:
    """CPUs this process should use: the override if set, else the smaller of affinity and quota rounded up.

    Raises
    ------
    ArgumentError
        The override is not a positive whole number.
    """
    override = os.environ.get(ENV_CPUS)
    if override:
        if not override.isdecimal() or int(override) < 1:
            raise ArgumentError(f"{ENV_CPUS} must be a positive whole number, found {override!r}")
        return AllowedCpus(int(override), f"{ENV_CPUS} is set to {override}")
    if hasattr(os, "sched_getaffinity"):
        count, reason = len(os.sched_getaffinity(0)), "affinity mask"
    else:
        count, reason = os.cpu_count() or 1, "processor count"
    reason = f"{reason} holds {count} CPU{'s' if count != 1 else ''}"
    quota = cgroup_quota(root)
    if quota is not None and math.ceil(quota[0]) < count:
        count = max(1, math.ceil(quota[0]))
        reason = f"{quota[1]} grants {quota[0]:g} CPUs, fewer than the mask"
    return AllowedCpus(count, reason)
