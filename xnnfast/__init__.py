"""Runs XNNPACK graph files from Python: mapped in place, verified, fast.

    graph = xnnfast.load("model.xnn")         # maps and verifies; constants stay in the map
    runtime = xnnfast.Runtime(graph)          # plans and packs
    (y,) = runtime.run(x)                     # NumPy in, NumPy out
"""

from . import reference
from ._graph import Constant, Graph, Node, Value
from ._runtime import Runtime, empty
from .builder import GraphBuilder
from .configuration import __version__, config
from .errors import (
    AlignmentError,
    ArgumentError,
    BusyError,
    ClosedError,
    DtypeError,
    FormatError,
    GraphError,
    LimitError,
    NotFiniteError,
    OverlapError,
    ShapeError,
    UnsupportedError,
    XnnfastError,
    XnnpackError,
    XnnpackMemoryError,
)
from .load import load, load_all
from .quantization import PerBlock, PerChannel, PerTensor, PerToken, dequantize, quantize

__all__ = [
    "AlignmentError",
    "ArgumentError",
    "BusyError",
    "ClosedError",
    "Constant",
    "DtypeError",
    "FormatError",
    "Graph",
    "GraphBuilder",
    "GraphError",
    "LimitError",
    "Node",
    "NotFiniteError",
    "OverlapError",
    "PerBlock",
    "PerChannel",
    "PerTensor",
    "PerToken",
    "Runtime",
    "ShapeError",
    "UnsupportedError",
    "Value",
    "XnnfastError",
    "XnnpackError",
    "XnnpackMemoryError",
    "__version__",
    "config",
    "dequantize",
    "empty",
    "load",
    "load_all",
    "quantize",
    "reference",
]
