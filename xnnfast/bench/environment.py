"""What the machine is, and whether it left a measurement alone.

In come files of /proc and /sys and the counters that a worker read before and after its samples; out go the
environment part of a record, and for every measurement the list of what disturbed it.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..limits import cgroup_quota

Facts = dict[str, Any]

#: Shares of the measured time. What a scheduler does on an idle machine stays below all of them.
WAITED = 0.03
STEAL = 0.02
SWITCHES_PER_SECOND = 60
MIGRATIONS_PER_SECOND = 20
SPIN = 0.08
#: CPUs that others may use of those that the measurement leaves free.
SPARE = 0.3
WAITS = frozenset(("others", "switches", "throttling", "waiting", "migrations"))
#: Two ticks of the kernel's clock: what is below can't be told from nothing.
TICKS_NS = 20_000_000


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def _chosen(text: str | None) -> str | None:
    """The word in brackets."""
    if text is None or "[" not in text:
        return text
    return text.partition("[")[2].partition("]")[0]


def cpu_model() -> str:
    for line in (_read("/proc/cpuinfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model", "CPU part"):
            return value.strip()
    return platform.processor() or platform.machine()


def free_memory() -> int:
    """Bytes that may be taken without swapping."""
    for line in (_read("/proc/meminfo") or "").splitlines():
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def environment() -> Facts:
    """What of this machine and this moment can change a time."""
    affinity = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    cpu = affinity[0] if affinity else 0
    quota = cgroup_quota()
    turbo = _read("/sys/devices/system/cpu/intel_pstate/no_turbo")
    boost = _read("/sys/devices/system/cpu/cpufreq/boost")
    flags = [line for line in (_read("/proc/cpuinfo") or "").splitlines() if line.startswith(("flags", "Features"))]
    return {
        "cpu": cpu_model(),
        "cpu_flags": flags[0].partition(":")[2].split() if flags else [],
        "cpus": os.cpu_count(),
        "affinity": affinity,
        "cgroup_quota": None if quota is None else {"cpus": quota[0], "from": quota[1]},
        "governor": _read(f"/sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor"),
        "turbo": {"0": "on", "1": "off"}.get(turbo or "") or {"1": "on", "0": "off"}.get(boost or ""),
        "smt": _read("/sys/devices/system/cpu/smt/control"),
        "aslr": _read("/proc/sys/kernel/randomize_va_space"),
        "huge_pages": _chosen(_read("/sys/kernel/mm/transparent_hugepage/enabled")),
        "virtual": "hypervisor" in (flags[0] if flags else ""),
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "load": list(os.getloadavg()),
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith("XNNFAST_")},
    }


def advice(facts: Mapping[str, Any]) -> list[str]:
    """What of the environment makes figures less trustworthy."""
    found = []
    load, cpus = facts["load"][0], max(1, len(facts["affinity"]) or facts["cpus"] or 1)
    if load > 0.5 * cpus:
        found.append(f"the machine is busy: load {load:.1f} on {cpus} CPUs")
    if facts["governor"] not in (None, "performance"):
        found.append(f"the governor is {facts['governor']}: the clock follows the load")
    if facts["cgroup_quota"] is not None:
        quota = facts["cgroup_quota"]
        found.append(f"{quota['from']} grants {quota['cpus']:g} CPUs: runs may be throttled")
    return found


def disturbances(answer: Mapping[str, Any], needed: int, cpus: int, clock: str = "wall") -> dict[str, str]:
    """What disturbed a measurement that needs that many CPUs of those that it may use, by a word for its kind.

    With CPU time as the clock, waiting and whatever causes it is not a part of what was measured.
    """
    found = _disturbances(answer["while"], needed, cpus)
    if not answer.get("turns"):
        # Between the slices of two processes that take turns, a change hits both.
        first, last = answer["spin"]
        if _apart(first, last):
            found["clock"] = f"a fixed loop took {first / 1000:.0f} us before and {last / 1000:.0f} us after"
    if not found:
        # Opening and warming up: the time to load counts too.
        for word, text in _disturbances(answer["opening"], needed, cpus).items():
            found[word] = f"while opening, {text}"
    return found if clock == "wall" else {word: text for word, text in found.items() if word not in WAITS}


def _disturbances(counts: Mapping[str, int], needed: int, cpus: int) -> dict[str, str]:
    wall = max(1, counts["wall"])
    seconds = wall / 1e9
    found = {}
    if counts["throttled"]:
        milliseconds = counts["throttled_us"] / 1000
        found["throttling"] = f"the cgroup was throttled {counts['throttled']} times ({milliseconds:.0f} ms)"
    if counts["steal"] >= TICKS_NS and counts["steal"] > STEAL * wall * cpus:
        found["steal"] = f"the hypervisor took {100 * counts['steal'] / wall / cpus:.0f} % of the time"
    if counts["waited"] > WAITED * wall * needed:
        share = 100 * counts["waited"] / wall / needed
        found["waiting"] = f"runnable threads waited for a CPU {share:.0f} % of the time"
    if counts["involuntary"] > 5 + SWITCHES_PER_SECOND * seconds * needed:
        found["switches"] = f"{counts['involuntary']} involuntary switches in {1000 * seconds:.0f} ms"
    if counts["migrations"] > 5 + MIGRATIONS_PER_SECOND * seconds * needed:
        found["migrations"] = f"{counts['migrations']} migrations in {1000 * seconds:.0f} ms"
    others = max(0, counts["busy"] - counts["cpu"])
    if others > TICKS_NS and others / wall > max(0, cpus - needed) + SPARE:
        found["others"] = f"others used {others / wall:.1f} of {cpus} CPUs"
    return found


def _apart(one: float, other: float) -> bool:
    return abs(math.log(other / one)) > SPIN


def unlike_clocks(a: Mapping[str, Any], b: Mapping[str, Any]) -> str | None:
    """Whether the CPU was faster for one of two processes that took turns, by what went before their slices.

    Openings are not judged that way: they are too short for a loop before them to tell what they met.
    """
    one, other = (statistics.median(each["spin"][1:]) for each in (a, b))
    if not _apart(one, other):
        return None
    return f"a fixed loop took {one / 1000:.0f} us before slices of A and {other / 1000:.0f} us before those of B"
