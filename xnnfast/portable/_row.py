"""The form of a portable operator's row: its name and arguments, its kernel, and what a merging pass may know of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..errors import FormatError, LimitError, OperatorError, ShapeError, XnnfastError


class OutSpec(NamedTuple):
    """What the program says of a tensor that a kernel fills."""

    dtype: np.dtype
    #: Declared sizes: exact for a static tensor, an upper bound for a dynamic one. None means no bound.
    sizes: tuple[int, ...] | None = None
    #: Elements that a result may have where ``sizes`` sets no bound.
    most: int | None = None


class Argument(NamedTuple):
    """One argument of an operator, as its ``args`` text describes it."""

    name: str
    #: One letter: T tensor, S number, i int, f float, b bool, d scalar type, m memory format, s string.
    kind: str
    #: "": one; "[]": a list; "?[]": a list whose entries may be None.
    many: str
    optional: bool


class Routing(NamedTuple):
    """The parts of one KernelCall's ``args``."""

    inputs: list[int]
    #: The values that receive the kernel's results, in order. With ``out_list`` one tensor list.
    outputs: list[int]


#: What the kinds of arguments accept, by the names of EValue's union members.
_ACCEPTS = {
    "T": {"Tensor"},
    "S": {"Int", "Double", "Bool"},
    "i": {"Int", "Bool"},
    "f": {"Double", "Int"},
    "b": {"Bool", "Int"},
    "d": {"Int"},
    "m": {"Int"},
    "s": {"String"},
    "T[]": {"TensorList"},
    "T?[]": {"OptionalTensorList", "TensorList"},
    "i[]": {"IntList"},
    "f[]": {"DoubleList", "IntList"},
    "b[]": {"BoolList"},
}


#: Kinds that hold the result of an operator on numbers.
NUMBERS = ("Int", "Double", "Bool", "Null")


def _parse(args: str) -> tuple[Argument, ...]:
    parsed = []
    for text in filter(None, (part.strip() for part in args.split(","))):
        found = re.fullmatch(r"([TSifbdms])(\?\[\]|\[\])?(\?)? (\w+)", text)
        if found is None:
            raise ValueError(f"{text!r} is no argument")
        kind, many, optional, name = found.groups()
        parsed.append(Argument(name, kind, many or "", bool(optional)))
    return tuple(parsed)


@dataclass(frozen=True, slots=True, eq=False)
class Portable:
    """One operator that runs outside XNNPACK.

    ``args`` lists the arguments before the outs, ``kind name`` each: the kind is a letter of
    :class:`Argument`, ``[]`` behind it makes a list, ``?`` allows None.
    """

    #: Name and overload as in the program: ``aten::add.out``.
    name: str
    args: str
    #: compute(out, *arguments) -> array, or a tuple with one array per out.
    compute: Callable[..., Any]
    #: Number of out arguments; 0 for an operator that returns its result.
    outs: int = 1
    #: The one out argument is a list of tensors.
    out_list: bool = False
    #: Position of the argument that an in-place operator overwrites.
    mutates: int | None = None
    #: The call's args end with the value returned. Only et_copy_index returns nothing.
    returns: bool = True
    #: The result may share memory with the first argument, and may be strided.
    view: bool = False
    #: Element i of the result depends on element i of the (broadcast) arguments alone.
    elementwise: bool = False
    #: Reads the shapes of its tensors, never their elements.
    shape_only: bool = False
    #: Same arguments, same result, nothing else changed: may be evaluated once at load.
    pure: bool = True
    #: The idea by which XNNPACK can express it, None if none is known.
    lower: str | None = None
    # Derived.
    arguments: tuple[Argument, ...] = field(init=False)
    #: fn(args, out): the kernel under the contract that this package's docstring states.
    fn: Callable[[Sequence[Any], Any], Any] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "arguments", _parse(self.args))
        object.__setattr__(self, "fn", self._kernel())

    def __repr__(self) -> str:
        return f"Portable({self.name})"

    @property
    def constant(self) -> bool:
        """Takes no tensor: a pure row of this kind is a constant when its numbers are."""
        return not any(argument.kind == "T" for argument in self.arguments)

    def _kernel(self) -> Callable[[Sequence[Any], Any], Any]:
        compute, name, in_place = self.compute, self.name, self.mutates is not None and self.returns

        def fn(args: Sequence[Any], out: Any) -> Any:
            try:
                with np.errstate(all="ignore"):
                    result = compute(out, *args)
            except XnnfastError as error:
                if isinstance(error, OperatorError) and error.op is None:
                    error.op = name
                    error.args = (f"{name}: {error}",)
                raise
            except MemoryError as error:
                raise LimitError(f"{name}: {error or 'out of memory'}") from error
            except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError) as error:
                raise OperatorError(f"{name}: {error}", op=name) from error
            return (result, result) if in_place else result

        return fn

    def split(self, args: Sequence[int]) -> Routing:
        """The inputs of a KernelCall with these ``args`` and the values that receive its results."""
        count = len(self.arguments)
        needed = count + self.outs + self.returns
        if len(args) != needed:
            raise FormatError(
                f"{self.name} takes {count} arguments, {self.outs} outs and {int(self.returns)} returned values:"
                f" need {needed} args, the call has {len(args)}"
            )
        inputs = list(args[:count])
        if self.mutates is not None:
            return Routing(inputs, [args[self.mutates], *args[count:]])
        return Routing(inputs, list(args[count : count + self.outs] if self.outs else args[count:]))

    def check(self, kinds: Sequence[str]) -> None:
        """Refuse arguments whose kinds (names of EValue's union members) don't fit; for use before anything runs."""
        for argument, kind in zip(self.arguments, kinds, strict=True):
            fits = argument.optional if kind == "Null" else kind in _ACCEPTS[argument.kind + argument.many]
            if not fits:
                needed = sorted(_ACCEPTS[argument.kind + argument.many]) + ["Null"] * argument.optional
                raise FormatError(f"{self.name} needs {' or '.join(needed)} for {argument.name}, the call has {kind}")

    def check_outputs(self, kinds: Sequence[str]) -> None:
        """The same for the values that receive results. A number has no fixed kind: a sum is what its parts are."""
        tensors = self.outs > 0 or self.mutates is not None or self.view
        for kind in kinds:
            if kind not in (("TensorList",) if self.out_list else ("Tensor",) if tensors else NUMBERS):
                needed = "a TensorList" if self.out_list else "a Tensor" if tensors else "a number"
                raise FormatError(f"{self.name} needs {needed} for its result, the call has {kind}")


def room(out: OutSpec, shape: Sequence[int]) -> tuple[int, ...]:
    """``shape`` as a tuple, refused before anything is allocated if the out tensor could not hold it."""
    shape = tuple(int(size) for size in shape)
    count = 1
    for size in shape:
        if size < 0:
            raise ShapeError(f"need sizes of 0 or more, found {shape}", got=shape)
        count *= size
    if out.sizes is None:
        if out.most is not None and count > out.most:
            raise LimitError(
                f"the result would have shape {shape}, {count} elements, above the cap of {out.most}; max_workspace of "
                "Limits raises it"
            )
    else:
        bound = 1
        for size in out.sizes:
            bound *= size
        if count > bound:
            raise ShapeError(
                f"the result would have shape {shape}, {count} elements; the program planned {tuple(out.sizes)}",
                expected=tuple(out.sizes),
                got=shape,
            )
    return shape
