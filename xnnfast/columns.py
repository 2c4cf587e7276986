"""Columns of tables as inputs and outputs of a model: what Ray, Spark and their like hand over, and take back.

In come a batch's columns, NumPy arrays or Arrow columns whose rows are samples; out come columns of results. The
model is opened where it first works and stays for the process, so that an engine may copy the object that names it
as often as it likes.
"""

from __future__ import annotations

import math
import sys
import uuid
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ._graph import Graph
from .errors import ArgumentError, DtypeError, FormatError, ShapeError, UnsupportedError
from .executor import Executor, model_of
from .program import Program

__all__ = ["ColumnModel"]

Array = np.ndarray[Any, np.dtype[Any]]
#: Executors that a process keeps for the objects it is sent.
KEPT = 4

_executors: OrderedDict[tuple[str, int | None], Executor] = OrderedDict()


class ColumnModel:
    """A model as a function of columns. It pickles by reference, as :class:`xnnfast.Graph` does.

    Parameters
    ----------
    model : Graph, Program, path or buffer
        As for :class:`xnnfast.Executor`. A file is mapped and verified at once.
    inputs, outputs : sequence of str
        Names, one for each of the model's inputs and outputs, in its order.
    cast : bool
        Convert floats to floats, integers to integers and integers to floats of the input's type. Otherwise another
        dtype is an error.
    options
        The other arguments of :class:`xnnfast.Executor`.
    """

    def __init__(self, model: Any, inputs: Sequence[str], outputs: Sequence[str] | None, cast: bool,
                 options: Mapping[str, Any]) -> None:
        self.model: Graph | Program = model_of(model, options.get("weights_cache"))
        ports: tuple[int, int]
        if isinstance(self.model, Graph):
            ports = len(self.model.inputs), len(self.model.outputs)
        else:
            ports = len(self.model.inputs()), len(self.model.outputs())
        if outputs is None:
            outputs = ["output"] if ports[1] == 1 else [f"output_{number}" for number in range(ports[1])]
        self.inputs, self.outputs = list(inputs), list(outputs)
        for what, names, count in (("inputs", self.inputs, ports[0]), ("outputs", self.outputs, ports[1])):
            if len(names) != count:
                raise ArgumentError(f"need the names of {count} columns as {what}=, one for each {what[:-1]} of the "
                                    f"model, got {names}")
            if len(set(names)) != count:
                raise ArgumentError(f"need {what}= with different names, got {names}")
        self.cast = cast
        self.options = dict(options)
        # Copies of this object, in whatever process, stand for one executor there.
        self._token = uuid.uuid4().hex

    def executor(self, workers: int | None = None) -> Executor:
        """The executor of this process, with so many workers where the options don't say how many."""
        options = {"workers": workers, **self.options}
        key = self._token, options["workers"]
        found = _executors.get(key)
        if found is None:
            found = Executor(self.model, **options)
            for position, layout in enumerate(found.layouts[: len(self.inputs)]):
                if layout is None:
                    raise UnsupportedError(f"input {position} of the model is one array for all samples, so no column "
                                           "can hold it")
            while len(_executors) >= KEPT:
                _executors.popitem(last=False)
            _executors[key] = found
        return found

    def run(self, executor: Executor, columns: Sequence[Any]) -> dict[str, Array]:
        """The outputs for a batch, by name: arrays whose axis 0 counts rows, as the columns' rows do."""
        arrays = []
        rows = None
        for position, (name, column) in enumerate(zip(self.inputs, columns)):
            array, count = self._input(executor, position, name, column)
            if rows is not None and count != rows:
                raise ShapeError(f"column {name!r} has {count} rows, those before it have {rows}", expected=rows,
                                 got=count)
            rows = count
            arrays.append(array)
        results = executor.run(*arrays)
        assert rows is not None
        layouts = executor.layouts[len(self.inputs):]
        return {name: _by_row(result, layout, rows) for name, result, layout in zip(self.outputs, results, layouts)}

    def sample_shape(self, executor: Executor, position: int) -> tuple[int, ...]:
        """The declared shape of a row of an input's column."""
        shape, rows = executor.inputs[position].shape, _rows_per_sample(executor, position)
        return shape[1:] if rows == 1 else (rows, *shape[1:])

    def _input(self, executor: Executor, position: int, name: str, column: Any) -> tuple[Array, int]:
        """A column as the executor takes it, and its rows."""
        sample = self.sample_shape(executor, position)
        want = executor.dtypes[position]
        rows = len(column)
        if not rows:
            # Engines don't know the dtype or the shape of cells of which there are none.
            array = np.empty((0, *sample), want)
        else:
            raw = _raw(name, column, want, sample)
            array = dense(name, column) if raw is None else raw
            if array.dtype.newbyteorder("=") != want:
                array = self._cast(name, array, want)
            if array.ndim != 1 + len(sample):
                # Tables often hold rows of numbers without a shape.
                if array.size != rows * math.prod(sample):
                    raise ShapeError(f"column {name!r}: need cells of shape {sample}, or of {math.prod(sample)} "
                                     f"numbers, found {array.shape[1:]}", expected=sample, got=array.shape[1:])
                array = array.reshape(rows, *sample)
        inner = _rows_per_sample(executor, position)
        return (array if inner == 1 else array.reshape(rows * inner, *sample[1:])), rows

    def _cast(self, name: str, array: Array, want: np.dtype[Any]) -> Array:
        numbers = array.dtype.kind in "biuf" and np.can_cast(array.dtype, want, "same_kind")
        if self.cast and numbers:
            return array.astype(want)
        advice = ": convert it, or give cast=True" if numbers else ""
        raise DtypeError(f"column {name!r}: need {want}, found {array.dtype}{advice}", expected=want, got=array.dtype)


def _rows_per_sample(executor: Executor, position: int) -> int:
    layout = executor.layouts[position]
    assert layout is not None, "models that have such an input were refused"
    return layout.inner


def names_of(given: str | Sequence[str]) -> list[str]:
    """One name or several, as a list."""
    return [given] if isinstance(given, str) else list(given)


def column_of(batch: Mapping[str, Any], name: str, has: Sequence[str]) -> Any:
    """A column of a batch."""
    if name not in has:
        raise ArgumentError(f"need a column {name!r}, the batch has {', '.join(map(repr, has)) or 'none'}")
    return batch[name]


# ---- in


def _raw(name: str, column: Any, want: np.dtype[Any], sample: tuple[int, ...]) -> Array | None:
    """A column of bytes as samples: each cell a sample's numbers in C order, little-endian. None for other columns."""
    if hasattr(column, "combine_chunks") or hasattr(column, "buffers"):
        kind = str(column.type)
        if not (kind.startswith(("binary", "large_binary", "fixed_size_binary"))):
            return None
        cells = column.to_pylist()
    else:
        array = np.asarray(column)
        if array.dtype != object or not isinstance(array[0], (bytes, bytearray, memoryview)):
            return None
        cells = list(array)
    nbytes = math.prod(sample) * want.itemsize
    for row, cell in enumerate(cells):
        if cell is None:
            raise FormatError(f"column {name!r}: need a value in every row, row {row} of the batch has none")
        if not isinstance(cell, (bytes, bytearray, memoryview)):
            raise DtypeError(f"column {name!r}: need bytes in every row, row {row} of the batch has "
                             f"{type(cell).__name__}", expected="bytes", got=type(cell).__name__)
        if len(cell) != nbytes:
            raise ShapeError(f"column {name!r}: need {nbytes} bytes for {want} of shape {sample}, row {row} of the "
                             f"batch has {len(cell)}", expected=nbytes, got=len(cell))
    made = np.empty((len(cells), *sample), want if sys.byteorder == "little" else want.newbyteorder("<"))
    if nbytes:
        flat = made.reshape(len(cells), -1).view(np.uint8)
        for row, cell in enumerate(cells):
            flat[row] = np.frombuffer(cell, np.uint8)
    return made


def dense(name: str, column: Any) -> Array:
    """A column of one row or more as an array, without a copy where its cells lie side by side."""
    if hasattr(column, "combine_chunks") or hasattr(column, "buffers"):
        return _from_arrow(name, column)
    array = np.asarray(column)
    if array.dtype != object:
        return array
    cells: list[Array] = []
    for row, cell in enumerate(array):
        if cell is None:
            raise FormatError(f"column {name!r}: need a value in every row, row {row} of the batch has none")
        each = np.asarray(cell)
        if each.dtype == object and each.ndim:
            # An array of arrays, or a list that is ragged.
            each = dense(name, cell)
        if cells and each.shape != cells[0].shape:
            raise ShapeError(f"column {name!r}: need cells of one shape, row {row} of the batch has {each.shape}, "
                             f"those before it have {cells[0].shape}", expected=cells[0].shape, got=each.shape)
        if each.dtype.kind not in "biuf":
            raise DtypeError(f"column {name!r}: need numbers, found {type(cell).__name__}", got=each.dtype)
        cells.append(each)
    return np.stack(cells)


def _from_arrow(name: str, column: Any) -> Array:
    import pyarrow as pa  # type: ignore[import-not-found, unused-ignore]

    if isinstance(column, pa.ChunkedArray):
        chunks = [chunk for chunk in column.chunks if len(chunk)]
        parts = [_from_arrow(name, chunk) for chunk in chunks]
        for part in parts:
            if part.shape[1:] != parts[0].shape[1:]:
                raise ShapeError(f"column {name!r}: need cells of one shape, found {parts[0].shape[1:]} and "
                                 f"{part.shape[1:]}", expected=parts[0].shape[1:], got=part.shape[1:])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
    shape = [len(column)]
    while True:
        kind = column.type
        if column.null_count:
            raise FormatError(f"column {name!r}: need a value in every row, {column.null_count} are null")
        if isinstance(kind, pa.FixedShapeTensorType):
            return _reshaped(name, column.to_numpy_ndarray(), shape)
        if isinstance(kind, pa.BaseExtensionType):
            if hasattr(column, "to_numpy_ndarray"):
                # Ray's tensors, of whichever of its versions.
                return _reshaped(name, np.asarray(column.to_numpy_ndarray()), shape)
            column = column.storage
        elif pa.types.is_fixed_size_list(kind):
            shape.append(kind.list_size)
            column = column.flatten()
        elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
            lengths = np.diff(column.offsets.to_numpy())
            if len(lengths) and (lengths != lengths[0]).any():
                raise ShapeError(f"column {name!r}: need lists of one length, found {int(lengths.min())} to "
                                 f"{int(lengths.max())}", expected=int(lengths[0]))
            shape.append(int(lengths[0]) if len(lengths) else 0)
            column = column.flatten()
        else:
            break
    numbers = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    if not numbers:
        raise DtypeError(f"column {name!r}: need numbers, or lists or tensors of them, found {kind}", got=str(kind))
    array: Array = column.to_numpy(zero_copy_only=False)
    return array.reshape(shape)


def _reshaped(name: str, array: Array, shape: list[int]) -> Array:
    if array.dtype == object:
        # Tensors of several shapes.
        array = dense(name, array)
    return array.reshape(*shape, *array.shape[1:])


# ---- out


def _by_row(result: Array, layout: Any, rows: int) -> Array:
    """An output with one row per sample on axis 0, whatever axis it has them on."""
    if layout is None:
        return np.broadcast_to(result, (rows, *result.shape))
    axis, outer, inner = layout
    if axis == 0 and outer == inner == 1:
        return result
    before, after = result.shape[:axis], result.shape[axis + 1 :]
    apart = np.moveaxis(result.reshape(*before, outer, rows, inner, *after), axis + 1, 0)
    own = () if outer * inner == 1 else (outer * inner,)
    return apart.reshape(rows, *before, *own, *after)
