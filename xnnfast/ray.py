"""Models in Ray Data: :class:`Predictor`, for ``Dataset.map_batches``.

In come batches as Ray hands them over, NumPy or Arrow; out go the same with columns of results. Ray itself is
imported only if the process has it already: a worker always has.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from .columns import ColumnModel, column_of, names_of
from .errors import ArgumentError
from .limits import allowed_cpus

__all__ = ["Predictor", "granted_cpus"]


class Predictor:
    """A model as a callable class for ``Dataset.map_batches``; its instances work there too.

    Given as a class, Ray makes actors of it, each of which keeps the model ready::

        dataset.map_batches(xnnfast.ray.Predictor, fn_constructor_args=["model.pte"],
                            fn_constructor_kwargs={"inputs": "image", "outputs": "logits"},
                            num_cpus=2, compute=ray.data.ActorPoolStrategy(size=1), batch_size=256)

    An actor uses as many threads as Ray granted it CPUs. An instance runs in tasks; every process that runs some
    keeps the model ready for the next.

    Parameters
    ----------
    model : path, Graph, Program or buffer
        As for :class:`xnnfast.Executor`. A path is opened where the object is made: for a class in the actor. A graph
        or program, or the path of an instance, reaches workers by absolute path and content, see docs/distributed.md.
    inputs : str or sequence of str
        Column for each input of the model, in order. A row is a sample: a tensor of the input's shape without the
        batch, or as many numbers in whatever form, or their bytes (C order, little-endian).
    outputs : str or sequence of str, optional
        Column for each output. By default ``output``, or ``output_0``, ``output_1``, ...
    keep : sequence of str, optional
        Columns to pass on. By default all that are no inputs.
    cast : bool, default False
        Convert numbers to the input's dtype, floats to integers excepted. Otherwise another dtype is an error.
    **options
        The other arguments of :class:`xnnfast.Executor`: ``precision``, ``weights_cache``, ``micro_batch``, ...
        ``workers`` overrides what Ray granted.

    Raises
    ------
    ArgumentError
        Names that are not as many as the model has inputs or outputs; in a call, a column that is not there.
    DtypeError, ShapeError, FormatError
        In a call: cells of another dtype or shape, or without a value.
    """

    def __init__(self, model: Any, inputs: str | Sequence[str], outputs: str | Sequence[str] | None = None, *,
                 keep: Sequence[str] | None = None, cast: bool = False, **options: Any) -> None:
        self._columns = ColumnModel(model, names_of(inputs), None if outputs is None else names_of(outputs), cast,
                                    options)
        self.keep = None if keep is None else names_of(keep)
        granted = granted_cpus()
        if granted is not None:
            # An actor: be ready when it says so, and fail here if at all.
            self._columns.executor(granted)

    def __call__(self, batch: Any) -> Any:
        """The batch without its inputs and with the model's outputs, in the form in which it came."""
        columns = self._columns
        is_table = not isinstance(batch, Mapping)
        if is_table and not hasattr(batch, "column_names"):
            raise ArgumentError(f"need batch_format='numpy' or 'pyarrow', got a batch of {type(batch).__name__}")
        has: list[str] = list(batch.column_names if is_table else batch)
        rows = batch.num_rows if is_table else len(batch[has[0]]) if has else 0
        # Of a block without rows, Ray may not know the columns either.
        blank = not rows and not any(name in has for name in columns.inputs)
        given = [() if blank else column_of(batch, name, has) for name in columns.inputs]
        made = columns.run(columns.executor(granted_cpus()), given)
        kept = self.keep
        if kept is None:
            kept = [name for name in has if name not in columns.inputs and name not in columns.outputs]
        passed = {} if blank else {name: column_of(batch, name, has) for name in kept}
        if not is_table:
            return {**passed, **made}
        import pyarrow as pa  # type: ignore[import-not-found, unused-ignore]

        return pa.table({**passed, **{name: _tensors(array) for name, array in made.items()}})


def granted_cpus() -> int | None:
    """How many CPUs Ray granted the task or actor that is running, at least 1; None outside of Ray's workers."""
    ray = sys.modules.get("ray")
    if ray is None or not hasattr(ray, "is_initialized") or not ray.is_initialized():
        return None
    try:
        resources = ray.get_runtime_context().get_assigned_resources()
    except AssertionError:
        # The driver: Ray grants it nothing and forbids it nothing.
        return None
    return max(1, min(int(resources.get("CPU", 1)), allowed_cpus().count))


def _tensors(array: Any) -> Any:
    """An array as an Arrow column that Ray knows as tensors."""
    import pyarrow as pa  # type: ignore[import-not-found, unused-ignore]

    if array.ndim == 1:
        return pa.array(array)
    from ray.data.extensions import ArrowTensorArray  # type: ignore[import-not-found, unused-ignore]

    return ArrowTensorArray.from_numpy(array)
