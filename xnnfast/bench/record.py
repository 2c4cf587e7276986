"""Records of measurements as files, and which of them may be compared.

A record is one JSON document: environment, build, settings, and for every model and configuration the samples of
every process in order, in nanoseconds of ``inner`` calls each. Nothing that was measured is left out; what stands
under ``summary`` can be computed again from it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import FormatError

Facts = dict[str, Any]
FORMAT = "xnnfast-bench"
VERSION = 1
PROFILE = "xnnfast-profile"

#: What two records must agree in, by the word that ``--allow`` takes.
LIKENESS = {
    "cpu": ("CPU", lambda r: r["environment"]["cpu"]),
    "isa": ("instruction sets in use", lambda r: r["build"]["isa"]),
    "pin": ("pinned libraries", lambda r: r["build"]["pin"]),
    "quota": ("CPUs allowed", lambda r: r["build"]["cpus"]),
    "affinity": ("bound CPUs", lambda r: r["settings"]["cpus"]),
    "variables": ("XNNFAST_ variables", lambda r: r["environment"]["variables"]),
    "cold": ("cold files", lambda r: r["settings"]["cold"]),
}
MODEL_LIKENESS = {
    "graph": ("the graph (sha256 of the file)", lambda m: m["sha256"]),
    "precision": ("datatypes", lambda m: m["datatypes"]),
    "kind": ("what runs it", lambda m: m["kind"]),
}


def is_record(path: str | os.PathLike[str]) -> bool:
    """Whether a file is JSON at all: models never start like that."""
    with open(path, "rb") as stream:
        return stream.read(64).lstrip()[:1] == b"{"


def load(path: str | os.PathLike[str], kind: str = FORMAT) -> Facts:
    """The record in a file.

    Raises
    ------
    FormatError
        It is none, or of a later version.
    """
    name = os.fspath(path)
    try:
        facts = json.loads(Path(path).read_text("utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise FormatError(f"{name}: need a record of {kind}, found no JSON: {error}") from None
    found = facts.get("format") if isinstance(facts, dict) else None
    if found != kind:
        raise FormatError(f"{name}: need a record of format {kind!r}, found {found!r}")
    if facts.get("version") != VERSION:
        raise FormatError(f"{name}: need version {VERSION} of {kind}, found {facts.get('version')!r}")
    missing = [key for key in ("environment", "build", "settings", "models") if key not in facts]
    if kind == FORMAT and missing:
        raise FormatError(f"{name}: need {', '.join(missing)} in a record of {kind}, found {', '.join(facts)}")
    return dict(facts)


def save(facts: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}.part")
    partial.write_text(json.dumps(facts, allow_nan=False), "utf-8")
    os.replace(partial, target)


def key(result: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a configuration is known by within a model."""
    return result["batch"], result["threads"], result["workers"]


def unlike(a: Mapping[str, Any], b: Mapping[str, Any], allow: frozenset[str] = frozenset()) -> list[str]:
    """Why two records can't be compared; empty if they can."""
    reasons = _differences(LIKENESS, a, b, allow)
    # Records of one model each are about that model; of several, names say which belong together.
    pairs = model_pairs(a, b)
    if not pairs:
        names = [", ".join(model["name"] for model in each["models"]) for each in (a, b)]
        reasons.append(f"no model is in both: {names[0]} and {names[1]}")
    for one, other in pairs:
        where = f"{one['name']}: " if len(pairs) > 1 else ""
        reasons += [where + reason for reason in _differences(MODEL_LIKENESS, one, other, allow)]
        found = {key(result): result for result in other["results"]}
        common = [(result, found[key(result)]) for result in one["results"] if key(result) in found]
        if not common:
            reasons.append(f"{where}{_unlike_configurations(one, other)}")
        for first, second in common:
            if first["shapes"] != second["shapes"] and "shapes" not in allow:
                reasons.append(f"{where}input shapes differ: {first['shapes']} and {second['shapes']}")
            elif first["inputs_sha256"] != second["inputs_sha256"] and "inputs" not in allow:
                reasons.append(f"{where}inputs differ (seed or files)")
    return reasons


def model_pairs(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[Facts, Facts]]:
    if len(a["models"]) == len(b["models"]) == 1:
        return [(a["models"][0], b["models"][0])]
    names = {model["name"]: model for model in b["models"]}
    return [(model, names[model["name"]]) for model in a["models"] if model["name"] in names]


def _differences(table: Mapping[str, Any], a: Any, b: Any, allow: frozenset[str]) -> list[str]:
    found = []
    for word, (what, get) in table.items():
        one, other = get(a), get(b)
        if one != other and word not in allow:
            found.append(f"{what} differ: {short(one, other)} and {short(other, one)}")
    return found


def short(value: Any, other: Any) -> str:
    """The value, of lists and dicts only what the other has not."""
    if isinstance(value, list) and isinstance(other, list):
        extra = [item for item in value if item not in other]
        return " ".join(map(str, extra)) or "nothing more"
    if isinstance(value, dict) and isinstance(other, dict):
        extra = [f"{name} {item}" for name, item in value.items() if other.get(name) != item]
        return ", ".join(extra) or "nothing more"
    text = str(value)
    return f"{text[:12]}..." if len(text) == 64 else text


def _unlike_configurations(one: Facts, other: Facts) -> str:
    """Which of batch, threads and workers differ."""
    parts = []
    for place, name in enumerate(("batch", "threads", "workers")):
        a = sorted({str(key(result)[place]) for result in one["results"]})
        b = sorted({str(key(result)[place]) for result in other["results"]})
        if a != b:
            parts.append(f"{name} differ: {', '.join(a)} and {', '.join(b)}")
    return "; ".join(parts) or "no configuration is in both"
