"""NumPy interpreter of a Graph: in go the graph and arrays, out come the arrays that XNNPACK should give.

What it promises, kind by kind:

=========================== =======================================================================
fp32, fp16                  computed in float64, rounded once to the output's type
8-bit types                 bit for bit what XNNPACK computes on x86-64 (elsewhere multiplication may
                            differ by a step at ties):
                            - fully connected, convolutions, multiplication, means: exact sums, then
                              its fp32 requantization, ties to even
                            - addition, subtraction, leaky ReLU, resizing, Convert within a type: its
                              fixed-point arithmetic, within one step of the real result
                            - what it runs from a table or by reference code (sigmoid, exp, division,
                              maximum, ...): float32, ties away from zero, NaN stored as 0
                            - Convert of floats: float32, ties to even, NaN gives the highest number
dynamic quantization        XNNPACK's choice of scale and zero point per row, products in float64
fp16                        fp32 filters and biases of an fp16 layer are first rounded to fp16, as
                            XNNPACK's packing does
bf16                        computed in float64, the low bits dropped as XNNPACK does
int32                       wraps
argmax pooling              the index is uint32, counts the places of a window column by column, and may
                            name a place in the padding, which repeats the edge
=========================== =======================================================================

NaN, infinities and denormals behave as in NumPy: NaN goes through limits, minimum, maximum and pools,
and denormals count. XNNPACK differs there (each operator's row says how), so a comparison has to decide
what it wants to see.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from .. import shapes as _shapes
from ..errors import ArgumentError, DtypeError, ShapeError
from . import convolution, elementwise, matmul, movement, pooling
from ._operand import Operand, store

__all__ = ["REFERENCES", "Operand", "operands", "run", "store", "trace"]

#: Operator name -> function(node, operands, output values, output shapes) -> arrays (or Operands).
REFERENCES = {
    **elementwise.REFERENCES,
    **matmul.REFERENCES,
    **convolution.REFERENCES,
    **pooling.REFERENCES,
    **movement.REFERENCES,
}


def run(graph: Any, *inputs: Any) -> tuple[np.ndarray, ...]:
    """The graph's outputs for ``inputs``, both in the graph's order; quantized ones are raw integers.

    Parameters
    ----------
    graph : Graph
    *inputs : array_like
        One for each input, of exactly its dtype and rank; batches and sizes as far as the graph permits.

    Returns
    -------
    tuple of numpy.ndarray
        New arrays, even where an output is an input. The index of argmax pooling is uint32, whatever the file
        declares it to be.

    Raises
    ------
    ArgumentError, DtypeError, ShapeError
        The arrays do not fit the graph's inputs.
    """
    last_use = {value: step for step, node in enumerate(graph.nodes) for value in node.inputs if value is not None}
    kept = {value.id for value in graph.outputs}
    results: dict[int, Operand] = {}
    for step, made in enumerate(_steps(graph, inputs, results)):
        for operand in made:
            last_use.setdefault(operand.value.id, step)
        for value in [value for value, last in last_use.items() if last <= step]:
            del last_use[value]
            if value not in kept:
                results.pop(value, None)
    return tuple(_delivered(results[value.id]) for value in graph.outputs)


def trace(graph: Any, *inputs: Any) -> dict[int, np.ndarray]:
    """Value id -> stored numbers of every value that is not constant, inputs included.

    For a comparison layer by layer. Dynamically quantized values are their int8 numbers here;
    :func:`operands` has their scales as well.

    Parameters
    ----------
    graph : Graph
    *inputs : array_like
        As for :func:`run`.

    Returns
    -------
    dict of int to numpy.ndarray
        All values are kept: as much memory as all of them take.

    Raises
    ------
    ArgumentError, DtypeError, ShapeError
        The arrays do not fit the graph's inputs.
    """
    return {value: operand.raw for value, operand in operands(graph, *inputs).items()}


def operands(graph: Any, *inputs: Any) -> dict[int, Operand]:
    """Value id -> :class:`Operand` of every value that is not constant; ``.real`` are the numbers it means.

    Parameters
    ----------
    graph : Graph
    *inputs : array_like
        As for :func:`run`.

    Returns
    -------
    dict of int to Operand

    Raises
    ------
    ArgumentError, DtypeError, ShapeError
        The arrays do not fit the graph's inputs.
    """
    results: dict[int, Operand] = {}
    for _ in _steps(graph, inputs, results):
        pass
    return results


def _steps(graph: Any, inputs: tuple[Any, ...], results: dict[int, Operand]) -> Iterator[list[Operand]]:
    """Fill ``results`` node by node; yields what each step made."""
    arrays = _checked(graph, inputs)
    shapes = _shapes.infer(graph, {value.id: array.shape for value, array in zip(graph.inputs, arrays)})
    rows: dict[int, Operand] = {}
    for value, array in zip(graph.inputs, arrays):
        results[value.id] = Operand(value, array)
        if value.dq_datatype:
            rows[value.id] = elementwise.quantized_rows(results[value.id], value, 1)

    def operand(number: int | None) -> Operand | None:
        if number is None:
            return None
        if number in rows:
            return rows[number]
        return results[number] if number in results else Operand.constant(graph.value(number))

    for node in graph.nodes:
        outs = [graph.value(number) for number in node.outputs]
        expected = [shapes[number] for number in node.outputs]
        if all(0 in shape for shape in expected):
            # Of argmax pooling the second result is the index.
            dtypes = [value.dtype for value in outs[:1]] + [np.dtype(np.uint32) for _ in outs[1:]]
            made: list[Any] = [np.zeros(shape, dtype) for shape, dtype in zip(expected, dtypes)]
        else:
            # Overflow, division by zero and NaN are results like others.
            with np.errstate(all="ignore"):
                made = REFERENCES[node.op.name](node, [operand(number) for number in node.inputs], outs, expected)
        finished = []
        for value, shape, result in zip(outs, expected, made):
            kept = result if isinstance(result, Operand) else Operand(value, np.asarray(result))
            if kept.shape != tuple(shape):
                raise AssertionError(
                    f"{node.where}: the reference made {kept.shape}, shape inference says {shape}")
            results[value.id] = kept
            finished.append(kept)
        yield finished


def _checked(graph: Any, inputs: tuple[Any, ...]) -> list[np.ndarray]:
    """The inputs as arrays of the right count, dtype and rank."""
    if len(inputs) != len(graph.inputs):
        raise ArgumentError(f"the graph has {len(graph.inputs)} input{'s' * (len(graph.inputs) != 1)}, "
                            f"found {len(inputs)}")
    arrays = []
    for index, (value, given) in enumerate(zip(graph.inputs, inputs)):
        array = np.asarray(given)
        where = f"input {index} (value {value.id})"
        bits = np.dtype(np.uint16) if value.datatype == "bf16" else value.dtype
        if array.dtype not in (value.dtype, bits):
            raise DtypeError(f"{where} needs {value.dtype} ({value.datatype}), found {array.dtype}",
                             expected=value.dtype, got=array.dtype)
        if array.ndim != len(value.shape):
            raise ShapeError(f"{where} needs rank {len(value.shape)} {value.shape}, found rank {array.ndim} "
                             f"{array.shape}", expected=value.shape, got=array.shape)
        arrays.append(array)
    return arrays


def _delivered(operand: Operand) -> np.ndarray:
    """A result that shares memory with nothing."""
    return np.array(operand.raw, order="C")
