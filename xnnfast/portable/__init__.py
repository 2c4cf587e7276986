"""The operators that ExecuTorch programs leave outside XNNPACK, in NumPy: one table, one row each.

``PORTABLE`` maps an operator's name, as the program has it, to its row: ``aten::add.out``, or the
name alone where the overload is empty (``aten::copy_``); :func:`key` makes it. A row's kernel is
``row.fn(args, out)``:

* ``args`` are the call's inputs in order, without outs: arrays for tensors (any strides), int,
  float, bool, str or None for single values, lists for lists. The entries of an IntList and of
  both tensor lists of a file are indices of values, to be resolved by the caller; those of a
  DoubleList and a BoolList are the numbers themselves.
* ``out`` is an :class:`OutSpec`, or a list of them where the row has several outs or an out list.
  The result has the out tensor's dtype. Its shape follows from ``args`` alone; the declared sizes
  are only the bound that a result may not pass.
* What comes back is one array, or a tuple of them: for several outs in their order, for an out list
  in the list's order, for an in-place operator the new content of the argument it overwrites and the
  same array again as the value returned. Operators on numbers give Python numbers.
* Arrays show logical dimensions (dim_order never matters here). Rows with ``view`` may give strided
  arrays that share memory with an argument, all others give memory of their own.
* Faults in the values raise :class:`~xnnfast.errors.OperatorError` or ``ShapeError``.

**Arguments of a KernelCall.** A program's call lists the arguments of the operator's schema, outs
among them, and then the value returned. So ``aten::add.out`` has ``self, other, alpha, out, out``;
an operator of several outs has them in order and then one TensorList of them (``native_layer_norm``:
``..., out0, out1, out2, [out0, out1, out2]``); one with an out list has the TensorList twice; one that
returns its result has that value alone at the end (``sym_size.int``: ``self, dim, result``;
``et_view``: ``self, size, result``); an in-place one ends with what it returns, the argument it overwrites or
another value. ``et_copy_index`` alone ends without a returned value.
:meth:`Portable.split` takes such a list apart, :meth:`Portable.check` compares the kinds of values.

The kernels agree with ExecuTorch's portable ones in what they promote, accept and refuse, also where
those differ from PyTorch: no distinction of tensors of rank 0 in promotion, the dividend's sign in the
remainder of whole numbers, max_pool2d's passing over NaN. float16 and bfloat16 are computed in
float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Iterable

from . import elementwise, movement, neural, prim, quantized, reduction
from ._row import Argument, OutSpec, Portable, Routing

__all__ = ["PORTABLE", "Argument", "OutSpec", "Portable", "Routing", "key", "missing"]


def _table() -> dict[str, Portable]:
    table: dict[str, Portable] = {}
    for family in (elementwise, reduction, movement, neural, prim, quantized):
        for row in family.ROWS:
            if table.setdefault(row.name, row) is not row:
                raise AssertionError(f"two rows are named {row.name}")
    return table


PORTABLE: dict[str, Portable] = _table()


def key(name: str, overload: str | None) -> str:
    """The table's key of an operator from the two strings of a program's ``operators``."""
    return f"{name}.{overload}" if overload else name


def missing(names: Iterable[str]) -> list[str]:
    """The operators among ``names`` that have no row, each once, in order of appearance."""
    return [name for name in dict.fromkeys(names) if name not in PORTABLE]
