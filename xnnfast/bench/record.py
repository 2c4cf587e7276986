"""Records of measurements as files, and which of them may be compared.

A record is one JSON document: environment, build, settings, and for every model and configuration the samples of
every process in order, in nanoseconds of ``inner`` calls each. Nothing that was measured is left out; what stands
under ``summary`` can be computed again from it.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import FormatError

Facts = dict[str, Any]
FORMAT = "xnnfast-bench"
VERSION = 1
PROFILE = "xnnfast-profile"
#: So many numbers of each output are kept.
SAMPLE = 1024

#: What two records must agree in, by the word that ``--allow`` takes.
LIKENESS = {
    "cpu": ("CPU", lambda r: r["environment"]["cpu"]),
    "isa": ("instruction sets in use", lambda r: instruction_sets(r["build"])),
    "pin": ("pinned libraries", lambda r: r["build"]["pin"]),
    "quota": ("CPUs allowed", lambda r: r["build"]["cpus"]),
    "affinity": ("bound CPUs", lambda r: r["settings"]["cpus"]),
    "variables": ("XNNFAST_ variables", lambda r: r["environment"]["variables"]),
    "cold": ("cold files", lambda r: r["settings"]["cold"]),
    "weights_cache": ("use of a weights cache", lambda r: r["settings"].get("weights_cache") not in (None, False)),
}
MODEL_LIKENESS = {
    "graph": ("the graph (sha256 of the file)", lambda m: m["sha256"]),
    "precision": ("datatypes", lambda m: m["datatypes"]),
    "kind": ("what runs it", lambda m: m["kind"]),
    "method": ("methods", lambda m: m["method"]),
}

# ---------------------------------------------------------------------------------------------------
# What a record has to hold


class Is:
    """A form of a single value, how a message calls it, and whether older records may lack it."""

    def __init__(self, what: str, holds: Callable[[Any], bool], *, optional: bool = False) -> None:
        self.what, self.holds, self.optional = what, holds, optional


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


#: More than any time in nanoseconds (30 years) or size in bytes, and what a float holds with ease.
_MOST = 1e18


def _is_output(value: Any) -> bool:
    if misfit(value, {"dtype": TEXT, "shape": (WHOLE,), "sha256": TEXT, "sample": TEXT, "largest": AMOUNT_OR_NULL}):
        return False
    try:
        sample_of(value)
    except (ValueError, TypeError):
        return False
    return True


TEXT = Is("text", lambda value: isinstance(value, str))
TEXT_OR_NULL = Is("text or null", lambda value: value is None or isinstance(value, str))
COUNT = Is("a whole number of at least 1", lambda v: isinstance(v, int) and _number(v) and 0 < v < _MOST)
WHOLE = Is("a whole number", lambda value: isinstance(value, int) and _number(value) and abs(value) < _MOST)
WHOLE_OR_NULL = Is("a whole number or null", lambda value: value is None or WHOLE.holds(value))
COUNT_OR_NULL = Is("a whole number of at least 1, or null", lambda value: value is None or COUNT.holds(value))
POSITIVE = Is("a number above 0", lambda value: _number(value) and 0 < value < _MOST)
AMOUNT = Is("a number of at least 0", lambda value: _number(value) and 0 <= value < _MOST)
AMOUNT_OR_NULL = Is("a number of at least 0, or null", lambda value: value is None or AMOUNT.holds(value))
SOME = Is("true or false", lambda value: isinstance(value, bool))
WORDS = Is("an object of text", lambda value: isinstance(value, dict) and all(map(TEXT.holds, value.values())))
OBJECT = Is("an object", lambda value: isinstance(value, dict))
LIST_OR_NULL = Is("a list or null", lambda value: value is None or isinstance(value, list))

_PROCESS = {
    "inner": COUNT, "samples": [POSITIVE], "load": {"total": POSITIVE}, "memory": {"process_peak": POSITIVE},
    "disturbed": WORDS,
}  # fmt: skip
_OUTPUTS = Is(
    "outputs as bench writes them",
    lambda value: isinstance(value, list) and all(map(_is_output, value)),
    optional=True,
)
_SECOND_ISA = Is(
    "null, or an isa with its ratio",
    lambda value: value is None or misfit(value, {"isa": TEXT, "ratio": POSITIVE}) is None,
    optional=True,
)
_RESULT = {
    "batch": COUNT_OR_NULL, "threads": COUNT, "workers": COUNT, "shapes": LIST_OR_NULL, "inputs_sha256": TEXT_OR_NULL,
    "error": TEXT_OR_NULL, "processes": (_PROCESS,), "outputs": _OUTPUTS,
}  # fmt: skip
_MODEL = {
    "name": TEXT, "sha256": TEXT, "datatypes": (TEXT,), "kind": TEXT, "method": TEXT_OR_NULL, "results": [_RESULT],
}  # fmt: skip
_NODE = {
    "part": WHOLE_OR_NULL, "index": WHOLE, "kernel": TEXT, "us": AMOUNT, "kind": TEXT, "debug_handle": WHOLE,
    "inputs": ((WHOLE,),), "outputs": ((WHOLE,),), "bytes": AMOUNT, "operations": AMOUNT, "precision": TEXT,
    "gflops": AMOUNT_OR_NULL, "gbytes": AMOUNT_OR_NULL, "intensity": AMOUNT_OR_NULL, "roofline": AMOUNT_OR_NULL,
}  # fmt: skip
_LEVEL = Is(
    "a size and a rate", lambda value: isinstance(value, list) and len(value) == 2 and all(map(POSITIVE.holds, value))
)
ROOFLINE = {
    "cpu": TEXT, "peak": {"fp32": POSITIVE, "int8": POSITIVE}, "levels": [_LEVEL], "bandwidth": POSITIVE,
}  # fmt: skip
#: Of each kind of record, all that is read from it. A dict has these keys and may have more, a list holds at least one
#: of its form, a tuple any number of them.
FORMS: dict[str, Any] = {
    FORMAT: {
        "environment": {"cpu": TEXT, "variables": WORDS},
        "build": {"isa": (TEXT,), "second_isa": _SECOND_ISA, "pin": WORDS, "cpus": COUNT},
        "settings": {"cpus": LIST_OR_NULL, "cold": SOME},
        "models": [_MODEL],
    },
    PROFILE: {
        "model": TEXT, "threads": COUNT, "batch": COUNT_OR_NULL, "rounds": COUNT, "total_us": AMOUNT,
        "call_us": AMOUNT, "nodes": (_NODE,), "notes": (TEXT,), "roofline": OBJECT,
    },
}  # fmt: skip


def misfit(value: Any, form: Any, where: str = "") -> str | None:
    """What of a value does not fit a form, and where; None if all of it fits."""
    if isinstance(form, Is):
        return None if form.holds(value) else f"need {form.what} in {where}, found {_brief(value)}"
    if isinstance(form, dict):
        if not isinstance(value, dict):
            return f"need an object in {where}, found {_brief(value)}"
        missing = [
            key for key, each in form.items() if key not in value and not (isinstance(each, Is) and each.optional)
        ]
        if missing:
            return f"need {', '.join(missing)} in {where or 'it'}, found {', '.join(map(str, value)) or 'nothing'}"
        parts = ((f"{where}.{key}" if where else key, value[key], each) for key, each in form.items() if key in value)
    else:
        if not isinstance(value, list) or (isinstance(form, list) and not value):
            return f"need a list{' with something in it' if isinstance(form, list) else ''} in {where}, " + (
                f"found {_brief(value)}"
            )
        parts = ((f"{where}[{place}]", each, form[0]) for place, each in enumerate(value))
    return next(filter(None, (misfit(each, inner, name) for name, each, inner in parts)), None)


def output(array: np.ndarray[Any, Any]) -> Facts:
    """What a record keeps of an output: its hash, and some of its numbers for when that is another."""
    flat = np.ascontiguousarray(array).reshape(-1)
    picked = flat[np.linspace(0, flat.size - 1, min(flat.size, SAMPLE)).astype(np.intp)]
    largest = None
    if array.dtype.kind == "f":
        finite = np.abs(flat[np.isfinite(flat)].astype(np.float64))
        largest = min(float(finite.max(initial=0.0)), _MOST / 2)
    return {
        "dtype": array.dtype.str,
        "shape": list(array.shape),
        "sha256": hashlib.sha256(flat.view(np.uint8).data if flat.size else b"").hexdigest(),
        "sample": base64.b64encode(picked.tobytes()).decode("ascii"),
        "largest": largest,
    }


def sample_of(facts: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    """The numbers of an output that a record keeps."""
    # V2 is bfloat16, as NumPy writes it.
    if not re.fullmatch(r"[<>|=]?(?:b1|[iu][1248]|f[248]|V2)", facts["dtype"]):
        raise ValueError(f"need a dtype of numbers, found {facts['dtype']!r}")
    return np.frombuffer(base64.b64decode(facts["sample"], validate=True), facts["dtype"])


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


# ---------------------------------------------------------------------------------------------------
# Files


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

    def no_number(word: str) -> None:
        raise ValueError(f"{word} is no number")

    try:
        facts = json.loads(Path(path).read_text("utf-8"), parse_constant=no_number)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{name}: need a record of {kind}, found no JSON: {error}") from None
    found = facts.get("format") if isinstance(facts, dict) else None
    if found != kind:
        raise FormatError(f"{name}: need a record of format {kind!r}, found {found!r}")
    if facts.get("version") != VERSION:
        raise FormatError(f"{name}: need version {VERSION} of {kind}, found {facts.get('version')!r}")
    form = FORMS[kind]
    if kind == PROFILE and "roofline" in facts:
        form = {**form, "roofline": ROOFLINE if facts["roofline"] is not None else Is("null", lambda value: True)}
    reason = misfit(facts, form)
    if reason is not None:
        raise FormatError(f"{name}: {reason}")
    return dict(facts)


def save(facts: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a record."""
    write(json.dumps(facts, allow_nan=False), path)


def write(text: str, path: str | os.PathLike[str]) -> None:
    """Write a file whole or not at all. What is no file (a pipe, a device) is written to, not replaced."""
    data = text.encode("utf-8", "backslashreplace")
    try:
        if _is_special(path):
            Path(path).write_bytes(data)
            return
        # The file behind a symbolic link, not the link.
        target = Path(os.path.realpath(path))
        partial = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            partial.write_bytes(data)
            os.replace(partial, target)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise
    except OSError as error:
        # The name that the user knows.
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def _is_special(path: str | os.PathLike[str]) -> bool:
    try:
        return not stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False


def check_writable(path: str | os.PathLike[str]) -> None:
    """Refuse a place that can't be written to before something takes minutes for it.

    Raises
    ------
    OSError
        Its folder is missing or closed, or it is a folder itself.
    """
    target = Path(os.path.realpath(path))
    reason = None
    if target.is_dir():
        reason = errno.EISDIR
    elif _is_special(path):
        reason = None if os.access(path, os.W_OK) else errno.EACCES
    elif not target.parent.is_dir():
        reason = errno.ENOENT
    elif not os.access(target.parent, os.W_OK):
        reason = errno.EACCES
    if reason is not None:
        raise OSError(reason, os.strerror(reason), os.fspath(path))


# ---------------------------------------------------------------------------------------------------
# Likeness


def instruction_sets(build: Mapping[str, Any]) -> list[str]:
    """Those in use, and what takes the place of the strongest where products are small."""
    second = build.get("second_isa")
    if second is None:
        return list(build["isa"])
    return [*build["isa"], f"{second['isa']} for products padded {second['ratio']:g} times"]


def key(result: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a configuration is known by within a model."""
    return result["batch"], result["threads"], result["workers"]


def unlike(a: Mapping[str, Any], b: Mapping[str, Any], allow: frozenset[str] = frozenset()) -> list[str]:
    """Why two records can't be compared; empty if they can."""
    reasons = differences(LIKENESS, a, b, allow)
    # Records of one model each are about that model; of several, names say which belong together.
    pairs = model_pairs(a, b)
    if not pairs:
        names = [", ".join(model["name"] for model in each["models"]) for each in (a, b)]
        reasons.append(f"no model is in both: {names[0]} and {names[1]}")
    for one, other in pairs:
        where = f"{one['name']}: " if len(pairs) > 1 else ""
        reasons += [where + reason for reason in differences(MODEL_LIKENESS, one, other, allow)]
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
    """The models that belong together: the only ones, or those of one name; of several of one name in their order."""
    if len(a["models"]) == len(b["models"]) == 1:
        return [(a["models"][0], b["models"][0])]
    rest = list(b["models"])
    pairs = []
    for model in a["models"]:
        other = next((each for each in rest if each["name"] == model["name"]), None)
        if other is not None:
            rest = [each for each in rest if each is not other]
            pairs.append((model, other))
    return pairs


def differences(table: Mapping[str, Any], a: Any, b: Any, allow: frozenset[str]) -> list[str]:
    """In which rows of a table of likeness two records differ, without those that are allowed to."""
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
