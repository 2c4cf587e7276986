"""Models in Spark: :func:`predict_fn`, for ``pyspark.ml.functions.predict_batch_udf``.

In come a model and names; out goes what Spark sends to its Python workers, where each makes an executor of it, once.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .columns import Array, ColumnModel, names_of
from .errors import UnsupportedError
from .executor import Executor, model_of
from .limits import allowed_cpus

__all__ = ["PredictFn", "predict_fn"]

#: What Spark calls the elements of an output, its class for them, and the dtype that it takes: it has no unsigned ones.
TYPES = {
    "float32": ("float", "FloatType", "float32"),
    "float16": ("float", "FloatType", "float32"),
    "float64": ("double", "DoubleType", "float64"),
    "int8": ("tinyint", "ByteType", "int8"),
    "int16": ("smallint", "ShortType", "int16"),
    "int32": ("int", "IntegerType", "int32"),
    "int64": ("bigint", "LongType", "int64"),
    "uint8": ("smallint", "ShortType", "int16"),
    "uint16": ("int", "IntegerType", "int32"),
    "uint32": ("bigint", "LongType", "int64"),
}


class Field(NamedTuple):
    """An output as Spark has it."""

    name: str
    element: str
    #: Name of a class of pyspark.sql.types.
    kind: str
    dtype: str
    is_array: bool


def predict_fn(model: Any, outputs: str | Sequence[str] | None = None, *, cast: bool = False,
               **options: Any) -> PredictFn:
    """What ``predict_batch_udf`` needs of a model::

        fn = xnnfast.spark.predict_fn("model.pte")
        predict = predict_batch_udf(fn, batch_size=256, **fn.spec)
        frame.withColumn("logits", predict("image"))

    Parameters
    ----------
    model : path, Graph, Program or buffer
        As for :class:`xnnfast.Executor`. It is opened at once, and again in each Python worker, which refuses a file
        with other bytes (:class:`xnnfast.ChangedError`).
    outputs : str or sequence of str, optional
        Names of the outputs. With a sequence the result is a struct with a field for each. By default a model with
        one output gives that, and one with several a struct of ``output_0``, ``output_1``, ...
    cast : bool, default False
        Convert numbers to the input's dtype, floats to integers excepted: Spark's ``double`` to float32, say.
        Otherwise another dtype is an error.
    **options
        The other arguments of :class:`xnnfast.Executor`. ``workers`` is by default what Spark grants a task
        (``spark.task.cpus``): Spark runs as many tasks side by side as there are CPUs.
    """
    return PredictFn(model, outputs, cast, options)


class PredictFn:
    """Makes, where it is called, the function from batches to results. Made by :func:`predict_fn`.

    Attributes
    ----------
    input_tensor_shapes : list of list of int
        Shape of a row of each input's column. A column holds scalars, or flat arrays of as many numbers.
        ``binary`` columns hold the bytes of as many numbers instead, in C order, little-endian; they go without
        shapes, and several times as fast through Spark where rows are large.
    return_type : pyspark.sql.types.DataType
        The result's type. Arrays are flat, since ``predict_batch_udf`` takes no others.
    ddl : str
        The same in words: ``array<float>``, ``struct<`boxes`:array<float>,`label`:bigint>``.
    spec : dict
        ``input_tensor_shapes`` and ``return_type``, as arguments of ``predict_batch_udf``.
    """

    def __init__(self, model: Any, outputs: str | Sequence[str] | None, cast: bool, options: dict[str, Any]) -> None:
        opened = model_of(model, options.get("weights_cache"))
        inputs = opened.inputs() if callable(opened.inputs) else opened.inputs
        names = [f"input_{position}" for position in range(len(inputs))]
        self._columns = ColumnModel(opened, names, None if outputs is None else names_of(outputs), cast, options)
        self._struct = len(self._columns.outputs) > 1 if outputs is None else not isinstance(outputs, str)
        # Shapes come from the executor that answers to them, here with one worker and for this alone.
        with Executor(opened, **{**options, "workers": 1, "weights_cache": None}) as executor:
            count = len(names)
            self.input_tensor_shapes = [
                list(self._columns.sample_shape(executor, position)) for position in range(count)
            ]
            self._fields = []
            for name, array in self._columns.run(executor, [()] * count).items():
                if array.dtype.name not in TYPES:
                    raise UnsupportedError(f"Spark has no type for elements of {array.dtype}, as output {name!r} has")
                self._fields.append(Field(name, *TYPES[array.dtype.name], array.ndim > 1))

    @property
    def ddl(self) -> str:
        texts = [f"array<{field.element}>" if field.is_array else field.element for field in self._fields]
        if not self._struct:
            return texts[0]
        return f"struct<{','.join(f'`{field.name}`:{text}' for field, text in zip(self._fields, texts))}>"

    @property
    def return_type(self) -> Any:
        from pyspark.sql import types  # type: ignore[import-not-found, unused-ignore]

        kinds = [getattr(types, field.kind)() for field in self._fields]
        kinds = [types.ArrayType(kind) if field.is_array else kind for field, kind in zip(self._fields, kinds)]
        if not self._struct:
            return kinds[0]
        return types.StructType([types.StructField(field.name, kind) for field, kind in zip(self._fields, kinds)])

    @property
    def spec(self) -> dict[str, Any]:
        return {"input_tensor_shapes": self.input_tensor_shapes, "return_type": self.return_type}

    def __call__(self) -> Callable[..., Any]:
        """The function from a batch to its results, with the model ready."""
        columns = self._columns
        executor = columns.executor(granted_cpus())

        def predict(*batch: Array) -> Any:
            made = columns.run(executor, batch)
            for field in self._fields:
                array = made[field.name]
                flat = array if array.ndim <= 2 else array.reshape(len(array), math.prod(array.shape[1:]))
                made[field.name] = flat.astype(field.dtype, copy=False)
            return made if self._struct else next(iter(made.values()))

        # Spark counts the parameters to know how many columns there are.
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(name, kind) for name in columns.inputs]
        predict.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return predict


def granted_cpus() -> int | None:
    """How many CPUs Spark grants the task that is running, at least 1; None outside of Spark's workers."""
    pyspark = sys.modules.get("pyspark")
    context = pyspark.TaskContext.get() if pyspark is not None and hasattr(pyspark, "TaskContext") else None
    return None if context is None else max(1, min(int(context.cpus()), allowed_cpus().count))
