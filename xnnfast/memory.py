"""Where the memory of a runtime is: mapped or packed, private or shared with other processes.

In comes a Runtime; out goes a dict of JSON's own types, or the lines that ``xnnfast inspect --memory``
prints. What is resident and shared is the kernel's own count (/proc/self/smaps), page by page.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from .describe import size

if TYPE_CHECKING:
    from ._runtime import Runtime

SMAPS = "/proc/self/smaps"
PAGE = 4096


def breakdown(runtime: Runtime) -> dict[str, Any]:
    """Bytes by purpose.

    Returns
    -------
    dict
        What :attr:`Runtime.memory` has; for ``constants_map`` and ``packed_map``, the mapped files of the model
        and of the weights cache, ``bytes`` of the maps, ``resident`` ones, ``shared`` ones that at least one
        other process has mapped too, ``private`` ones, and ``proportional`` ones (shared pages divided by the
        number of processes); for the ``process`` as a whole, ``resident``, ``proportional`` and ``anonymous``
        bytes. Without /proc, the last three are missing.
    """
    facts: dict[str, Any] = dict(runtime.memory)
    with contextlib.suppress(OSError):
        regions = read(SMAPS)
        for what in ("constants", "packed"):
            maps = [(start, nbytes) for kind, start, nbytes in runtime._maps if kind == what]
            facts[f"{what}_map"] = counted(regions, maps)
        facts["process"] = {
            "resident": sum(each["Rss"] for _, _, each in regions),
            "proportional": sum(each["Pss"] for _, _, each in regions),
            "anonymous": sum(each["Anonymous"] for _, _, each in regions),
        }
    return facts


def read(path: str = SMAPS) -> list[tuple[int, int, dict[str, int]]]:
    """(start, end, counts in bytes) of every region of this process."""
    regions: list[tuple[int, int, dict[str, int]]] = []
    with open(path, encoding="ascii", errors="replace") as lines:
        for line in lines:
            name, _, rest = line.partition(" ")
            if name.endswith(":"):
                words = rest.split()
                if len(words) == 2 and words[1] == "kB":
                    regions[-1][2][name[:-1]] = int(words[0]) * 1024
            else:
                start, _, end = name.partition("-")
                regions.append((int(start, 16), int(end, 16), dict.fromkeys(("Rss", "Pss", "Anonymous"), 0)))
    return regions


def counted(regions: Iterable[tuple[int, int, Mapping[str, int]]], maps: list[tuple[int, int]]) -> dict[str, int]:
    """The counts of the regions that make up some maps."""
    total = dict.fromkeys(("bytes", "resident", "shared", "private", "proportional"), 0)
    ends = [(start, start + -(-nbytes // PAGE) * PAGE) for start, nbytes in maps]
    total["bytes"] = sum(nbytes for _, nbytes in maps)
    for start, end, each in regions:
        # A map may have been split, never joined with another: files differ.
        if any(low <= start and end <= high for low, high in ends):
            total["resident"] += each["Rss"]
            total["shared"] += each.get("Shared_Clean", 0) + each.get("Shared_Dirty", 0)
            total["private"] += each.get("Private_Clean", 0) + each.get("Private_Dirty", 0)
            total["proportional"] += each["Pss"]
    return total


def text(facts: Mapping[str, Any]) -> str:
    """The breakdown in lines."""
    packed = facts["packed"]
    in_file = facts["packed_mapped"]
    rows = [
        ("constants in place", size(facts["mapped"]), _pages(facts.get("constants_map"))),
        ("constants copied", size(facts["copied"]), "private" if facts["copied"] else ""),
        ("packed weights", size(packed), "in a weights cache: " + _pages(facts.get("packed_map")) if in_file else
         "private" if packed else ""),
        ("workspace", size(facts["workspace"]), "private"),
        ("staging", size(facts["staging"]), "private" if facts["staging"] else ""),
    ]  # fmt: skip
    lines = [f"{name:20s}{nbytes:>12s}  {where}".rstrip() for name, nbytes, where in rows]
    if "process" in facts:
        whole = facts["process"]
        lines.append(
            f"{'process':20s}{size(whole['resident']):>12s}  resident, {size(whole['proportional'])} when pages that "
            f"are shared are divided, {size(whole['anonymous'])} anonymous"
        )
    return "\n".join(lines)


def _pages(counts: Mapping[str, int] | None) -> str:
    if counts is None:
        return ""
    if not counts["bytes"]:
        return "not in a file"
    return (
        f"{size(counts['resident'])} resident of {size(counts['bytes'])}, {size(counts['shared'])} of it mapped by "
        "other processes too"
    )
