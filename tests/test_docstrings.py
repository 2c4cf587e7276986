"""Docstrings of everything public: NumPy's sections, which name every parameter, what comes back and what is raised."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

import xnnfast as xf

#: Said in the docstrings of classes whose objects users get, and don't make.
NOT_BY_USERS = "the constructor is for tools"
#: Calls of the language, which mean what they mean everywhere.
PROTOCOLS = ("__enter__", "__exit__", "__repr__", "__reduce__")


def public() -> Iterator[tuple[str, Any]]:
    """Functions and classes of the package, functions of its public modules, and methods."""
    for name in xf.__all__:
        found = getattr(xf, name)
        if isinstance(found, ModuleType):
            for inner in found.__all__:
                if inspect.isfunction(getattr(found, inner)):
                    yield f"{name}.{inner}", getattr(found, inner)
        elif inspect.isclass(found):
            yield name, found
            # Of the class itself, not of tuple or Exception.
            for method in vars(found):
                if not method.startswith("_") and callable(getattr(found, method)):
                    yield f"{name}.{method}", getattr(found, method)
        elif callable(found):
            yield name, found


CALLABLES = {name: found for name, found in public() if not re.search(r"Error\b", name)}
ERRORS = [getattr(xf, name) for name in xf.__all__ if name.endswith("Error")]


def document(found: Any) -> str:
    """The docstring without the signature that Cython writes in front."""
    text = inspect.getdoc(found) or ""
    return re.sub(r"^[\w.]+\(.*\)(?: -> .*)?\n+", "", text)


def section(text: str, title: str) -> str | None:
    """What stands under a heading, without its indentation."""
    match = re.search(rf"^{title}\n-+\n(.*?)(?=\n\n?[A-Z][a-z]+\n-+\n|\Z)", text, re.M | re.S)
    return match[1] if match else None


def parameters(found: Any) -> list[str]:
    try:
        signature = inspect.signature(found)
    except ValueError:
        # A class of Cython's: its docstring begins with the signature.
        first = (inspect.getdoc(found) or "").split("\n")[0]
        inside = re.sub(r"^[\w.]+\(|\)$", "", first)
        names = [part.split("=")[0].split()[-1] for part in inside.split(", ") if part not in ("*", "/")]
        return [name for name in names if name != "self"]
    return [name for name in signature.parameters if name not in ("self", "cls")]


@pytest.mark.parametrize("name", CALLABLES)
def test_docstring_has_the_sections_that_the_signature_asks_for(name: str) -> None:
    found = CALLABLES[name]
    text = document(found)
    assert text, f"{name} has no docstring"
    wanted = parameters(found)
    if not wanted or NOT_BY_USERS in text:
        return
    listed = section(text, "Parameters")
    assert listed is not None, f"{name} takes {wanted} and has no section Parameters"
    named = {
        each.strip().lstrip("*")
        for line in listed.splitlines()
        if not line.startswith(" ")
        for each in line.split(":")[0].split(",")
    }
    assert named == set(wanted), f"{name}: parameters {sorted(wanted)}, described {sorted(named)}"
    if not inspect.isclass(found) and "Iterator" not in str(getattr(found, "__annotations__", {}).get("return", "")):
        nothing = getattr(found, "__annotations__", {}).get("return", "") in ("None", None)
        assert nothing or section(text, "Returns"), f"{name} has no section Returns"


#: These raise nothing of their own, or say in their text what becomes of faults.
RAISE_NOTHING = {
    "Graph.has_value", "PerTensor", "PerChannel", "PerBlock", "PerToken", "Limits", "doctor.run", "reference.store",
    "WeightsCache.identify", "WeightsCache.path", "WeightsCache.open", "WeightsCache.holds", "WeightsCache.save",
    "WeightsCache.steady",
}  # fmt: skip


@pytest.mark.parametrize("name", CALLABLES)
def test_docstring_says_what_is_raised(name: str) -> None:
    found = CALLABLES[name]
    text = document(found)
    if not parameters(found) or NOT_BY_USERS in text:
        return
    assert (section(text, "Raises") is None) == (name in RAISE_NOTHING), name


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_errors_describe_what_they_carry(error: type[Exception]) -> None:
    text = document(error)
    assert text and issubclass(error, xf.XnnfastError)
    if "__init__" in vars(error):
        carried = [name for name in parameters(error) if name not in ("message", "detail")]
        listed = section(text, "Attributes")
        assert listed is not None and all(re.search(rf"\b{name}\b", listed) for name in carried), error


def test_some_of_everything_is_looked_at() -> None:
    for name in ("Runtime", "Runtime.run", "load", "GraphBuilder.conv2d", "quantize", "Executor.map", "doctor.run"):
        assert name in CALLABLES
    assert len(CALLABLES) > 110 and len(ERRORS) > 12
