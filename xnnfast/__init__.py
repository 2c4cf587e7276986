"""Runs XNNPACK graph files from Python: mapped in place, verified, fast.

    graph = xnnfast.load("model.xnn")         # maps and verifies; constants stay in the map
    runtime = xnnfast.Runtime(graph)          # plans and packs
    (y,) = runtime.run(x)                     # NumPy in, NumPy out
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# At once, not on demand: the submodule of the same name would take the attribute when it is imported.
from .load import load, load_all

#: Public name -> the module that has it. Nothing is imported before its first use: a process that only
#: runs a model pays neither for the builder nor for the reference.
_HOME = {
    **dict.fromkeys(("Constant", "Graph", "Node", "Value"), "_graph"),
    **dict.fromkeys(("Runtime", "empty"), "_runtime"),
    **dict.fromkeys(("GraphBuilder",), "builder"),
    **dict.fromkeys(("__version__", "config"), "configuration"),
    **dict.fromkeys(
        (
            "AlignmentError",
            "ArgumentError",
            "BusyError",
            "ChangedError",
            "ClosedError",
            "DtypeError",
            "FormatError",
            "GraphError",
            "LimitError",
            "NotFiniteError",
            "OperatorError",
            "OverlapError",
            "ShapeError",
            "UnsupportedError",
            "XnnfastError",
            "XnnpackError",
            "XnnpackMemoryError",
        ),
        "errors",
    ),
    **dict.fromkeys(("Executor",), "executor"),
    **dict.fromkeys(("Limits",), "caps"),
    **dict.fromkeys(("Program",), "program"),
    **dict.fromkeys(("WeightsCache",), "weights_cache"),
    **dict.fromkeys(("PerBlock", "PerChannel", "PerTensor", "PerToken", "dequantize", "quantize"), "quantization"),
}
_MODULES = ("doctor", "reference")

__all__ = sorted((*_HOME, *_MODULES, "load", "load_all"))

if TYPE_CHECKING:
    from . import doctor, reference
    from ._graph import Constant, Graph, Node, Value
    from ._runtime import Runtime, empty
    from .builder import GraphBuilder
    from .caps import Limits
    from .configuration import __version__, config
    from .errors import (
        AlignmentError,
        ArgumentError,
        BusyError,
        ChangedError,
        ClosedError,
        DtypeError,
        FormatError,
        GraphError,
        LimitError,
        NotFiniteError,
        OperatorError,
        OverlapError,
        ShapeError,
        UnsupportedError,
        XnnfastError,
        XnnpackError,
        XnnpackMemoryError,
    )
    from .executor import Executor
    from .program import Program
    from .quantization import PerBlock, PerChannel, PerTensor, PerToken, dequantize, quantize
    from .weights_cache import WeightsCache


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is not None:
        value = getattr(importlib.import_module(f".{home}", __name__), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted((*globals(), *__all__))
