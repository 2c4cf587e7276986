"""Program: a whole ExecuTorch program, run from Python.

In comes a ``.pte`` file with its data files, out come the answers of its methods. XNNPACK delegates run in a
Runtime each, or joined with what stands between them (module merge); the other operators run in NumPy.
Values pass from step to step as arrays, which the next step takes as they are.
"""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from . import _reader
from ._runtime import Runtime
from .caps import DEFAULT_LIMITS, Limits
from .containers import (
    XNNPACK_BACKEND,
    DataFile,
    DelegateCall,
    FreeCall,
    JumpFalseCall,
    KernelCall,
    ListValue,
    MoveCall,
    Plan,
    ProgramFile,
    Tensor,
)
from .errors import (
    ArgumentError,
    BusyError,
    ClosedError,
    DtypeError,
    FormatError,
    GraphError,
    LimitError,
    OperatorError,
    ShapeError,
    UnsupportedError,
    XnnfastError,
)
from .portable import PORTABLE, Portable, key

if TYPE_CHECKING:
    from ._graph import Graph, Value
    from ._payload import Payload, Source
    from .merge_graph import Constants
    from .weights_cache import WeightsCache

__all__ = ["DelegateInfo", "PlanReport", "Port", "Program", "Undelegated"]

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
#: The values of a method while it runs, by index.
Env: TypeAlias = list[Any]

#: How many shapes of inputs a dynamic method keeps a merged form for.
MAX_SHAPES = 8
#: How often the guards of attention may turn out to be needed before they are left in.
MAX_UNSOUND = 3
#: Where the number of values noted so far is among noted shapes; inputs have the negative numbers above it.
COUNT = -(1 << 30)
DYNAMISM = ("static", "bounded", "unbounded")
LISTS = ("TensorList", "OptionalTensorList")


# ---------------------------------------------------------------------------------------------------
# What a program is, for its user


@dataclass(frozen=True)
class Port:
    """An input or an output of a method."""

    #: From the program's tree of arguments or results, or the tensor's own name; None if it has none.
    name: str | None
    #: ``"Tensor"``, ``"Int"``, ``"Double"``, ``"Bool"``, ``"String"`` or ``"Null"``.
    kind: str
    dtype: np.dtype[Any] | None = None
    #: Sizes of the array that the user gives or gets, whatever lies in memory; with ``dynamism`` their bound.
    shape: tuple[int, ...] | None = None
    #: Dimensions from outermost to innermost in memory.
    dim_order: tuple[int, ...] | None = None
    #: ``"static"``, ``"bounded"`` (``shape`` is an upper bound) or ``"unbounded"``.
    dynamism: str = "static"
    #: The one value that an input which is no tensor may have: programs are made for it.
    value: Any = None

    def __str__(self) -> str:
        what = self.kind
        if self.kind == "Tensor":
            sizes = "x".join(map(str, self.shape or ())) or "scalar"
            bound = {"static": "", "bounded": " at most", "unbounded": " of any size, declared"}[self.dynamism]
            what = f"{self.dtype}{bound} {sizes}"
            if self.dim_order != tuple(range(len(self.shape or ()))):
                what += f", dim order {','.join(map(str, self.dim_order or ()))}"
        elif self.value is not None:
            what += f" {self.value!r}"
        return f"{self.name}: {what}" if self.name else what


@dataclass(frozen=True)
class DelegateInfo:
    """A delegate of a method."""

    method: str
    #: Number of the delegate in its method, as ``load(..., delegate=)`` takes it.
    index: int
    #: Name of the backend; only ``"XnnpackBackend"`` can be run.
    backend: str
    nbytes: int
    #: The instructions that call it.
    instructions: tuple[int, ...]


@dataclass(frozen=True)
class Undelegated:
    """An operator call that a program makes outside its delegates."""

    method: str
    chain: int
    instruction: int
    #: Name and overload: ``aten::add.out``.
    op: str
    #: Whether this package has the operator.
    known: bool
    #: Innermost frame of the stack that the exporter recorded, outermost last; empty in most files.
    stack: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """The call as messages name it."""
        chain = f"chain {self.chain}, " if self.chain else ""
        stack = f", from {self.stack[0]}" if self.stack else ""
        return f"method {self.method!r}, {chain}instruction {self.instruction}{stack}"


@dataclass(frozen=True)
class PlanReport:
    """What runs when a method is called."""

    method: str
    #: Calls into XNNPACK.
    runtimes: int
    #: Operators run by NumPy.
    numpy_steps: int
    #: Operators and delegates whose results never change, computed when the method was prepared.
    evaluated: int
    #: Operators outside delegates that became a part of a graph of XNNPACK.
    lowered: int
    #: Delegates in those graphs.
    delegates: int
    merged: bool
    #: Why nothing is merged.
    reason: str
    #: One line for each step.
    steps: tuple[str, ...]

    def __str__(self) -> str:
        head = (
            f"method {self.method!r}: {_count(self.runtimes, 'runtime')}, {_count(self.numpy_steps, 'NumPy step')}"
            f" ({_count(self.delegates, 'delegate')}, {_count(self.lowered, 'operator')} joined to them, "
            f"{self.evaluated} evaluated once)"
        )
        reason = [f"  not merged: {self.reason}"] if self.reason else []
        return "\n".join([head, *reason, *(f"  {step}" for step in self.steps)])


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


# ---------------------------------------------------------------------------------------------------
# Steps


class Fixed(NamedTuple):
    """An operand that never changes."""

    value: Any


class Slot(NamedTuple):
    """An operand that is computed, or given by the user."""

    place: int


class Items(NamedTuple):
    """A list of operands."""

    parts: tuple[Fixed | Slot, ...]


Operand: TypeAlias = Fixed | Slot | Items


class Unsound(Exception):
    """What a merged graph takes for granted does not hold for this input."""


class Step:
    """One thing that a method does. A call reads and writes the environment and may return where to go on."""

    __slots__ = ("instruction", "reads", "writes")

    #: Number of the instruction in its chain.
    instruction: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]

    def __call__(self, env: Env) -> int | None:
        raise NotImplementedError

    def __str__(self) -> str:
        return f"instruction {self.instruction}: {self.title}"

    @property
    def title(self) -> str:
        """What the step is, in a few words."""
        raise NotImplementedError


class KernelStep(Step):
    """An operator in NumPy."""

    __slots__ = ("fixed", "fn", "lists", "loose", "makes_memory", "many", "name", "out", "shapes")

    def __init__(
        self, row: Portable, operands: Sequence[Operand], writes: Sequence[int], specs: Sequence[Any], instruction: int
    ) -> None:
        self.name = row.name
        self.fn = row.fn
        #: Results share memory with nothing.
        self.makes_memory = not row.view and row.mutates is None
        self.instruction = instruction
        self.writes = tuple(writes)
        self.fixed: list[Any] = []
        self.loose: list[tuple[int, int]] = []
        self.lists: list[tuple[int, tuple[Fixed | Slot, ...]]] = []
        for place, operand in enumerate(operands):
            value = None
            if isinstance(operand, Fixed):
                value = operand.value
            elif isinstance(operand, Slot):
                self.loose.append((place, operand.place))
            elif all(isinstance(part, Fixed) for part in operand.parts):
                value = [part.value for part in operand.parts if isinstance(part, Fixed)]
            else:
                self.lists.append((place, operand.parts))
            self.fixed.append(value)
        self.reads = tuple(operand_slots(operands))
        tensors = [spec for spec in specs if spec is not None]
        self.many = row.outs > 1 or row.out_list or (row.mutates is not None and row.returns)
        if row.outs > 1 or row.out_list:
            self.out: Any = tensors
        else:
            self.out = tensors[0] if tensors else None
        #: Sizes that a result must have, None where they may differ.
        self.shapes = tuple(
            None if spec is None or not exact else spec.sizes for spec, exact in zip(specs, _exact(specs))
        )

    @property
    def title(self) -> str:
        return f"{self.name} in NumPy"

    def __call__(self, env: Env) -> None:
        args = self.fixed.copy()
        for place, index in self.loose:
            args[place] = env[index]
        for place, parts in self.lists:
            args[place] = [part.value if isinstance(part, Fixed) else env[part.place] for part in parts]
        result = self.fn(args, self.out)
        if not self.many:
            result = (result,)
        for index, shape, each in zip(self.writes, self.shapes, result):
            if shape is not None and each.shape != shape:
                raise ShapeError(
                    f"{self.name} gives shape {each.shape}, the program needs {shape}", expected=shape, got=each.shape
                )
            env[index] = each


class Spec(NamedTuple):
    """An OutSpec that knows whether its sizes are exact."""

    dtype: np.dtype[Any]
    sizes: tuple[int, ...] | None
    exact: bool
    most: int


def _exact(specs: Sequence[Any]) -> Iterator[bool]:
    for spec in specs:
        yield spec is not None and spec.exact


class Routed(NamedTuple):
    """How an array goes from the program to a graph or back."""

    place: int
    #: What to make of the array; None if it passes as it is.
    change: Callable[[Array], Array] | None


class GraphStep(Step):
    """A graph in XNNPACK."""

    __slots__ = ("direct", "inputs", "name", "outputs", "runtime")

    def __init__(
        self, runtime: Runtime, inputs: Sequence[Routed], outputs: Sequence[Routed], title: str, instruction: int
    ) -> None:
        self.runtime = runtime
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.name = title
        self.instruction = instruction
        self.reads = tuple(each.place for each in inputs)
        self.writes = tuple(each.place for each in outputs)
        self.direct = all(each.change is None for each in (*inputs, *outputs))

    @property
    def title(self) -> str:
        return self.name

    def __call__(self, env: Env) -> None:
        if self.direct:
            for index, array in zip(self.writes, self.runtime.run(*[env[index] for index in self.reads])):
                env[index] = array
            return
        results = self.runtime.run(*[env[i] if change is None else change(env[i]) for i, change in self.inputs])
        for (index, change), array in zip(self.outputs, results):
            env[index] = array if change is None else change(array)


class MoveStep(Step):
    """One value becomes another."""

    __slots__ = ()

    def __init__(self, source: int, target: int, instruction: int) -> None:
        self.instruction = instruction
        self.reads, self.writes = (source,), (target,)

    @property
    def title(self) -> str:
        return "a move"

    def __call__(self, env: Env) -> None:
        env[self.writes[0]] = env[self.reads[0]]


class JumpStep(Step):
    """Goes on elsewhere if a condition is false."""

    __slots__ = ("target",)

    def __init__(self, condition: int, target: int, instruction: int) -> None:
        self.instruction = instruction
        self.target = target
        self.reads, self.writes = (condition,), ()

    @property
    def title(self) -> str:
        return f"a jump to {self.target}"

    def __call__(self, env: Env) -> int | None:
        condition = env[self.reads[0]]
        if isinstance(condition, np.ndarray):
            if condition.dtype != np.bool_:
                raise OperatorError(f"need a bool tensor as a condition, found {condition.dtype}")
            condition = bool(condition.all())
        elif not isinstance(condition, bool):
            raise OperatorError(f"need a bool or a bool tensor as a condition, found {type(condition).__name__}")
        return None if condition else self.target


class NoStep(Step):
    """An instruction that asks for nothing here: memory is given back when the last reader is done."""

    __slots__ = ()

    def __init__(self, instruction: int) -> None:
        self.instruction = instruction
        self.reads = self.writes = ()

    @property
    def title(self) -> str:
        return "nothing"

    def __call__(self, env: Env) -> None:
        pass


def operand_slots(operands: Iterable[Operand]) -> Iterator[int]:
    """The indices of all values that operands read."""
    for operand in operands:
        if isinstance(operand, Slot):
            yield operand.place
        elif isinstance(operand, Items):
            yield from (part.place for part in operand.parts if isinstance(part, Slot))


# ---------------------------------------------------------------------------------------------------
# From the program's tensors to arrays of a graph and back


def inverse(order: Sequence[int]) -> tuple[int, ...]:
    """The permutation that undoes ``order``."""
    found = [0] * len(order)
    for place, axis in enumerate(order):
        found[axis] = place
    return tuple(found)


def is_contiguous(tensor: Tensor) -> bool:
    return tensor.dim_order == tuple(range(len(tensor.sizes)))


def _as_vector(array: Array) -> Array:
    return _of_size_1(array).reshape(1)


def _as_scalar(array: Array) -> Array:
    return _of_size_1(array).reshape(())


def _of_size_1(array: Array) -> Array:
    if array.size != 1:
        raise ShapeError(f"need one element for a tensor without sizes, found shape {array.shape}", got=array.shape)
    return array


def _permuted(array: Array, order: Sequence[int]) -> Array:
    if array.ndim != len(order):
        raise ShapeError(f"need rank {len(order)} for dim order {tuple(order)}, found shape {array.shape}",
                         got=array.shape)
    turned: Array = array.transpose(order)
    return turned


def change_in(tensor: Tensor) -> Callable[[Array], Array] | None:
    """What makes an array of the program's one that a graph takes."""
    if not tensor.sizes:
        return _as_vector
    if is_contiguous(tensor):
        return None
    order = tensor.dim_order
    return lambda array: _permuted(array, order)


def change_out(tensor: Tensor, dtype: np.dtype[Any]) -> Callable[[Array], Array] | None:
    """What makes a result of a graph an array of the program's. Indices of argmax are uint32 in XNNPACK."""
    cast = tensor.dtype if tensor.dtype != dtype else None
    if not tensor.sizes:
        return _as_scalar if cast is None else lambda array: _as_scalar(array).astype(cast)
    if is_contiguous(tensor):
        return None if cast is None else lambda array: array.astype(cast)
    order = inverse(tensor.dim_order)
    return lambda array: _permuted(array if cast is None else array.astype(cast), order)


def output_dtype(graph: Graph, value: Value) -> np.dtype[Any]:
    """The dtype of an output's array. Indices of argmax pooling are declared as float, but uint32."""
    node = graph.producers.get(value.id)
    if node is not None and node.op.name == "argmax_pooling2d" and node.outputs[1] == value.id:
        return np.dtype(np.uint32)
    assert value.dtype is not None
    return value.dtype


def argument(call: DelegateCall, value: Value) -> int:
    """The value of the method that is an external value of the called delegate."""
    assert value.external_id is not None
    return call.args[value.external_id]


def check_external(plan: Plan, index: int, value: Value, delegate: int) -> Tensor:
    """The tensor of the program that is an external value of a delegate, proven to fit."""
    tensor = plan.values[index]
    if not isinstance(tensor, Tensor):
        raise FormatError(
            f"need a tensor as value {index} of method {plan.name!r}, an argument of delegate {delegate}; "
            f"found {plan.values.kind(index)}"
        )
    # A scalar of the program is stored as one element of rank 1.
    if tensor.shape != value.shape and not (not tensor.sizes and value.shape == (1,)):
        raise GraphError(
            f"value {index} of method {plan.name!r} is {list(tensor.shape)} in memory, value {value.id} of "
            f"delegate {delegate} is declared {list(value.shape)}: need the same",
            value=value.id,
        )
    return tensor


# ---------------------------------------------------------------------------------------------------
# A method


class ViewCall(NamedTuple):
    """Stands where a program leaves out a view: the target is the source in the target's sizes."""

    source: int
    target: int


class Options(NamedTuple):
    """How a program was asked to run."""

    merge: bool
    threads: int
    copy: bool | None
    weights_cache: bool | str | os.PathLike[str] | WeightsCache | None


class Method:
    """A method of a program: its ports at once, everything else when it is first run."""

    def __init__(self, file: ProgramFile, options: Options, plan: Plan, number: int) -> None:
        # Not the Program itself: what nobody uses any more must go at once, with its maps and packed weights, and not
        # when the collector happens to look.
        self.program = options
        self.plan = plan
        self.name = plan.name
        self.number = number
        self.file = file
        names = _names(self._metadata("encoded_inp_str"), len(plan.inputs))
        self.inputs = tuple(self._port(index, name) for index, name in zip(plan.inputs, names))
        names = _names(self._metadata("encoded_out_str"), len(plan.outputs))
        self.outputs = tuple(self._port(index, name) for index, name in zip(plan.outputs, names))
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self.reason = ""
        #: How often a merged form had to give way to the plain one.
        self.unsound = 0
        #: Shapes of the inputs -> the sizes noted at a first call, or the merged form.
        self._by_shapes: dict[Any, dict[int, tuple[int, ...]] | tuple[Routine, PlanReport]] = {}
        self._graphs: dict[Any, Graph] = {}
        self._runtimes: dict[Graph, Runtime] = {}
        self._constants: dict[int, Array] = {}
        #: What is packed, in order -> the packed weights of merged graphs that have that in common.
        self.packed: dict[Any, Any] = {}
        #: Content of the states, once there was a call.
        self.state: dict[int, Array] = {}

    # -- facts

    def _metadata(self, name: str) -> str:
        table = self.file.flatbuffer.root.item("execution_plan", self.number).get("container_meta_type")
        return "" if table is None else table.get(name) or ""

    def _port(self, index: int, name: str | None) -> Port:
        value = self.plan.values[index]
        kind = self.plan.values.kind(index)
        if not isinstance(value, Tensor):
            return Port(name, kind, value=None if isinstance(value, ListValue) else value)
        return Port(name or value.name, kind, value.dtype, value.sizes, value.dim_order, DYNAMISM[value.dynamism])

    def delegates(self) -> list[DelegateInfo]:
        calls: dict[int, list[int]] = {}
        for chain in self.plan.chains:
            for number, each in enumerate(chain.instructions):
                if isinstance(each, DelegateCall):
                    calls.setdefault(each.delegate_index, []).append(number)
        return [
            DelegateInfo(self.name, index, delegate.id, delegate.blob.nbytes, tuple(calls.get(index, ())))
            for index, delegate in enumerate(self.plan.delegates)
        ]

    def undelegated(self) -> list[Undelegated]:
        found = []
        for number, chain in enumerate(self.plan.chains):
            for place, each in enumerate(chain.instructions):
                if isinstance(each, KernelCall):
                    operator = self.plan.operators[each.op_index]
                    name = key(operator.name, operator.overload)
                    found.append(
                        Undelegated(self.name, number, place, name, name in PORTABLE, self._stack(number, place))
                    )
        return found

    def _stack(self, chain: int, instruction: int) -> tuple[str, ...]:
        table = self.file.flatbuffer.root.item("execution_plan", self.number).item("chains", chain)
        if instruction >= table.count("stacktrace"):
            return ()
        frames = table.item("stacktrace", instruction).rows("items", "filename", "lineno", "name", "context")
        return tuple(
            f"{filename or '?'}:{line} in {name or '?'}{f': {context.strip()}' if context else ''}"
            for filename, line, name, context in reversed(frames)
        )

    # -- preparation

    def require_operators(self) -> None:
        """Raise one error for everything in the method that this package can't run."""
        missing: dict[str, list[Undelegated]] = {}
        for call in self.undelegated():
            if not call.known:
                missing.setdefault(call.op, []).append(call)
        lines = []
        for op, calls in missing.items():
            lines.append(
                f"operator {op} ({_count(len(calls), 'call')}: {'; '.join(_place(call) for call in calls[:4])}"
                f"{', ...' if len(calls) > 4 else ''})"
            )
        for info in self.delegates():
            if info.backend != XNNPACK_BACKEND and info.instructions:
                lines.append(
                    f"backend {info.backend} (delegate {info.index}, called by instruction "
                    f"{', '.join(map(str, info.instructions))})"
                )
        if lines:
            raise UnsupportedError(
                f"{self.file.payload.name}, method {self.name!r}, needs what xnnfast does not have: " + ", ".join(lines)
            )
        assert self.proven

    @cached_property
    def proven(self) -> bool:
        """True, after a look at what every instruction reads and writes: kinds of values, and how many there are.

        Whatever is written has then the kind that the plan declares, and a list that is named over and over does
        not become a million operands.
        """
        kinds = self.plan.values.kind
        count = nbytes = 0
        written: set[int] = set()
        for chain in self.plan.chains:
            for number, each in enumerate(chain.instructions):
                where = f"method {self.name!r}, instruction {number}"
                if isinstance(each, MoveCall) and kinds(each.move_from) != kinds(each.move_to):
                    raise FormatError(
                        f"{where} moves {kinds(each.move_from)} value {each.move_from} to {kinds(each.move_to)} value "
                        f"{each.move_to}: need the same kind"
                    )
                if not isinstance(each, KernelCall):
                    continue
                row = self.row(each)
                assert row is not None, "require_operators comes first"
                routing = row.split(each.args)
                row.check([kinds(index) for index in routing.inputs])
                row.check_outputs([kinds(index) for index in routing.outputs])
                results = [index for listed in routing.outputs for index in self.members(listed)]
                count += len(results) + sum(len(self.members(index)) for index in routing.inputs)
                if count > self.file.limits.max_tables:
                    raise LimitError(
                        f"{where}: the method's operators have more than {self.file.limits.max_tables} operands; "
                        "max_tables of Limits raises the cap"
                    )
                for index in results:
                    tensor = self.plan.values[index]
                    if isinstance(tensor, Tensor) and index not in written:
                        nbytes += tensor.nbytes
                        written.add(index)
                    elif row.out_list and not isinstance(tensor, Tensor):
                        found = kinds(index)
                        raise FormatError(f"{where}: need a Tensor as value {index} in a TensorList, found {found}")
                if nbytes > self.file.limits.max_workspace:
                    raise LimitError(
                        f"{where}: the tensors up to here take {nbytes} bytes by the sizes that the program declares, "
                        f"above the cap of {self.file.limits.max_workspace}; max_workspace of Limits raises it"
                    )
        return True

    @cached_property
    def written(self) -> frozenset[int]:
        """The values that some instruction computes."""
        found: set[int] = set()
        for chain in self.chains:
            for each in chain:
                found.update(self.outputs_of(each))
        return frozenset(found)

    @cached_property
    def chains(self) -> tuple[tuple[Any, ...], ...]:
        """The instructions, with the views put back that the exporter left out.

        A view whose sizes never change is removed from a program: nothing writes its value, which lies where
        the tensor lies that it is a view of. So a tensor that nothing has written is a view of what was written
        last at its place; one whose place is nobody else's is a state.
        """
        at: dict[tuple[int, int], int] = {}
        known = set(self.plan.inputs)
        for index in self.plan.inputs:
            self._lies(index, at)
        made, jumps, views = [], False, 0
        for chain in self.plan.chains:
            instructions: list[Any] = []
            for each in chain.instructions:
                jumps = jumps or isinstance(each, JumpFalseCall)
                for index in self.inputs_of(each):
                    view = self._left_out(index, known, at)
                    if view is not None:
                        instructions.append(view)
                        views += 1
                instructions.append(each)
                for index in self.outputs_of(each):
                    if self.is_constant(index):
                        raise FormatError(f"an instruction of method {self.name!r} writes value {index}, a constant")
                    known.add(index)
                    self._lies(index, at)
            made.append(instructions)
        for index in self.plan.outputs:
            view = self._left_out(index, known, at)
            if view is not None and made:
                made[-1].append(view)
                views += 1
        if jumps and views:
            raise UnsupportedError(
                f"method {self.name!r} has jumps, and tensors that are views of what was written last at their place: "
                "which one that is depends on the jumps"
            )
        return tuple(tuple(instructions) for instructions in made)

    def _lies(self, index: int, at: dict[tuple[int, int], int]) -> None:
        tensor = self.plan.values[index]
        if isinstance(tensor, Tensor) and tensor.allocation is not None:
            at[tensor.allocation] = index

    def _left_out(self, index: int, known: set[int], at: dict[tuple[int, int], int]) -> ViewCall | None:
        """The view that a value must be, if nothing has written it and something lies at its place."""
        tensor = self.plan.values[index]
        if index in known or not isinstance(tensor, Tensor) or tensor.is_constant or tensor.allocation is None:
            return None
        source = at.get(tensor.allocation)
        if source is None:
            return None
        known.add(index)
        base: Tensor = self.plan.values[source]
        fixed = all(each.dynamism == 0 and each.dim_order == tuple(range(len(each.sizes))) for each in (base, tensor))
        if tensor.dtype != base.dtype or tensor.nbytes != base.nbytes or not fixed:
            raise UnsupportedError(
                f"value {index} of method {self.name!r} ({tensor.dtype}, {tensor.sizes}) is written by no instruction "
                f"and lies where value {source} ({base.dtype}, {base.sizes}) does: need a view of it, with the same "
                "dtype and number of elements, fixed sizes and the default order of dimensions"
            )
        return ViewCall(source, index)

    def view(self, call: ViewCall) -> tuple[Portable, list[Operand]]:
        """The operator and operands that make a view."""
        sizes = list(self.plan.values[call.target].sizes)
        return PORTABLE["executorch_prim::et_view.default"], [self._single(call.source), Fixed(sizes)]

    def outputs_of(self, instruction: Any) -> list[int]:
        """The values that an instruction writes, the tensors of lists one by one."""
        if isinstance(instruction, KernelCall):
            row = self.row(instruction)
            return (
                []
                if row is None
                else [index for each in row.split(instruction.args).outputs for index in self.members(each)]
            )
        if isinstance(instruction, DelegateCall):
            return [argument(instruction, value) for value in self.graph(instruction).outputs]
        if isinstance(instruction, ViewCall):
            return [instruction.target]
        return [instruction.move_to] if isinstance(instruction, MoveCall) else []

    def row(self, call: KernelCall) -> Portable | None:
        operator = self.plan.operators[call.op_index]
        return PORTABLE.get(key(operator.name, operator.overload))

    def members(self, index: int) -> list[int]:
        """The values that a value stands for: those in a list of values, or itself."""
        value = self.plan.values[index]
        if not isinstance(value, ListValue) or value.kind not in (*LISTS, "IntList"):
            return [index]
        for item in value.items:
            # -1 stands for None in a list of optional tensors.
            if not 0 <= item < len(self.plan.values) and not (item == -1 and value.kind == "OptionalTensorList"):
                raise FormatError(
                    f"need the index of one of {len(self.plan.values)} values, found {item} in value {index} "
                    f"of method {self.name!r}"
                )
        return list(value.items)

    # -- delegates

    def graph(self, call: DelegateCall) -> Graph:
        """The graph of a delegate as one call uses it.

        Constants of the program that are inputs of the delegate are constants of the graph, so that
        XNNPACK can pack them. The same bytes called with the same constants are one graph.
        """
        blob = self.plan.delegates[call.delegate_index].blob
        fixed = tuple(index if self.is_constant(index) else None for index in call.args)
        known = (blob.offset, blob.nbytes, fixed)
        if known not in self._graphs:
            self._graphs[known] = self._read(call)
        return self._graphs[known]

    def _read(self, call: DelegateCall) -> Graph:
        number = call.delegate_index
        decoded = _reader.read(self.file.section(self.plan, number), copy=self.program.copy, limits=self.file.limits)
        externals = {value.external_id for value in (*decoded.inputs, *decoded.outputs)}
        if len(externals) != len(call.args):
            raise GraphError(
                f"delegate {number} of method {self.name!r} has {len(externals)} external values, its call has "
                f"{len(call.args)} arguments: need as many"
            )
        for value in (*decoded.inputs, *decoded.outputs):
            check_external(self.plan, argument(call, value), value, number)
        for value in tuple(decoded.inputs):
            index = argument(call, value)
            if not self.is_constant(index) or value.is_output or value.dq_datatype:
                continue
            tensor = self.plan.values[index]
            if tensor.dtype.itemsize * 8 != _reader.bits_of(value.datatype):
                raise GraphError(
                    f"value {index} of method {self.name!r} is a constant of {tensor.dtype}, value {value.id} of "
                    f"delegate {number} is declared {value.datatype}",
                    value=value.id,
                )
            blob = self.file.constant(tensor)
            constant = _reader.constant_at(
                blob.payload, blob.offset, blob.nbytes, tensor.data_buffer_idx, copy=self.program.copy
            )
            decoded.inputs.remove(value)
            decoded.replace_value(value, value.replace(is_input=False, external_id=None, constant=constant))
        return decoded.graph()

    def is_constant(self, index: int) -> bool:
        """Whether a value is a constant tensor, and never anything else."""
        tensor = self.plan.values[index]
        return isinstance(tensor, Tensor) and tensor.is_constant and index not in self.plan.inputs

    def routed(self, call: DelegateCall, graph: Graph) -> tuple[list[Routed], list[Routed]]:
        """How the inputs and outputs of a delegate's graph are values of the method."""
        inputs, outputs = [], []
        for value in graph.inputs:
            index = argument(call, value)
            tensor = self.plan.values[index]
            if tensor.dtype != value.dtype:
                raise GraphError(
                    f"value {index} of method {self.name!r} is {tensor.dtype}, value {value.id} of delegate "
                    f"{call.delegate_index} is {value.datatype}: need the same",
                    value=value.id,
                )
            inputs.append(Routed(index, change_in(tensor)))
        for value in graph.outputs:
            index = argument(call, value)
            tensor = self.plan.values[index]
            dtype = output_dtype(graph, value)
            if tensor.dtype != dtype and dtype != np.uint32:
                raise GraphError(
                    f"value {index} of method {self.name!r} is {tensor.dtype}, value {value.id} of delegate "
                    f"{call.delegate_index} is {value.datatype}: need the same",
                    value=value.id,
                )
            outputs.append(Routed(index, change_out(tensor, dtype)))
        return inputs, outputs

    # -- operands

    def constant(self, index: int) -> Array:
        """A constant tensor in its logical dimensions, in place."""
        if index not in self._constants:
            tensor = self.plan.values[index]
            array = np.frombuffer(self.file.constant(tensor).data, tensor.dtype).reshape(tensor.shape)
            self._constants[index] = array.transpose(inverse(tensor.dim_order))
        return self._constants[index]

    def operand(self, index: int) -> Operand:
        """What an instruction reads when it names a value."""
        value = self.plan.values[index]
        if isinstance(value, ListValue):
            if value.kind in ("DoubleList", "BoolList"):
                return Fixed(list(value.items))
            return Items(tuple(Fixed(None) if item == -1 else self._single(item) for item in self.members(index)))
        return self._single(index)

    def _single(self, index: int) -> Fixed | Slot:
        value = self.plan.values[index]
        if index in self.written or index in self.plan.inputs:
            return Slot(index)
        if not isinstance(value, Tensor):
            return Fixed(value)
        return Fixed(self.constant(index)) if value.is_constant else Slot(index)

    def kernel(self, call: KernelCall, instruction: int) -> KernelStep:
        """The step of an operator call."""
        row = self.row(call)
        assert row is not None
        routing = row.split(call.args)
        row.check([self.plan.values.kind(index) for index in routing.inputs])
        specs = [self.spec(index) for each in routing.outputs for index in self.members(each)]
        operands = [self.operand(index) for index in routing.inputs]
        return KernelStep(
            row, operands, [index for each in routing.outputs for index in self.members(each)], specs, instruction
        )

    def spec(self, index: int) -> Spec | None:
        """What is known of a tensor that an instruction writes."""
        tensor = self.plan.values[index]
        if not isinstance(tensor, Tensor):
            return None
        sizes = None if tensor.dynamism == 2 else tensor.sizes
        return Spec(tensor.dtype, sizes, tensor.dynamism == 0, self.file.limits.max_workspace // tensor.dtype.itemsize)

    # -- the plain way: instruction by instruction

    @cached_property
    def states(self) -> tuple[int, ...]:
        """Tensors that keep their content from call to call: read before anything has written them."""
        found: dict[int, None] = {}
        known = set(self.plan.inputs)
        for chain in self.chains:
            for each in chain:
                for index in self.inputs_of(each):
                    tensor = self.plan.values[index]
                    if isinstance(tensor, Tensor) and index not in known and not tensor.is_constant:
                        if tensor.allocation is None:
                            raise FormatError(
                                f"value {index} of method {self.name!r} is read before an instruction writes it"
                            )
                        found[index] = None
                known.update(self.outputs_of(each))
        return tuple(found)

    def inputs_of(self, instruction: Any) -> list[int]:
        """The values that an instruction reads, those in lists one by one."""
        if isinstance(instruction, KernelCall):
            row = self.row(instruction)
            return (
                []
                if row is None
                else [item for index in row.split(instruction.args).inputs for item in self.members(index) if item >= 0]
            )
        if isinstance(instruction, DelegateCall):
            return [argument(instruction, value) for value in self.graph(instruction).inputs]
        if isinstance(instruction, MoveCall):
            return [instruction.move_from]
        if isinstance(instruction, ViewCall):
            return [instruction.source]
        return [instruction.cond_value_index] if isinstance(instruction, JumpFalseCall) else []

    def initial(self, index: int) -> Array:
        """The first content of a state: what the program has for it, or zeros."""
        tensor: Tensor = self.plan.values[index]
        blob = self.file.initial(tensor)
        if tensor.nbytes > self.file.limits.max_workspace:
            raise LimitError(
                f"value {index} of method {self.name!r} takes {tensor.nbytes} bytes, above the cap of "
                f"{self.file.limits.max_workspace}; max_workspace of Limits raises it"
            )
        if blob is None:
            return np.zeros(tensor.sizes, tensor.dtype)
        array: Array = np.frombuffer(blob.data, tensor.dtype).reshape(tensor.shape)
        content: Array = array.transpose(inverse(tensor.dim_order)).copy()
        return content

    def runtime(self, graph: Graph) -> Runtime:
        """The runtime of a graph, made once."""
        if graph not in self._runtimes:
            self._runtimes[graph] = self.new_runtime(graph)
        return self._runtimes[graph]

    def new_runtime(self, graph: Graph) -> Runtime:
        """A runtime with the program's options."""
        program = self.program
        return Runtime(graph, threads=program.threads, weights_cache=program.weights_cache)

    @cached_property
    def constants(self) -> Constants:
        """The constants that merged graphs have beside those of their delegates."""
        from .merge_graph import Constants

        return Constants()

    def step(self, instruction: Any, number: int) -> Step:
        """The step of an instruction."""
        if isinstance(instruction, KernelCall):
            return self.kernel(instruction, number)
        if isinstance(instruction, DelegateCall):
            graph = self.graph(instruction)
            inputs, outputs = self.routed(instruction, graph)
            return GraphStep(self.runtime(graph), inputs, outputs, f"delegate {instruction.delegate_index}", number)
        if isinstance(instruction, ViewCall):
            row, operands = self.view(instruction)
            return KernelStep(row, operands, [instruction.target], [self.spec(instruction.target)], number)
        if isinstance(instruction, MoveCall):
            return MoveStep(instruction.move_from, instruction.move_to, number)
        if isinstance(instruction, JumpFalseCall):
            return JumpStep(instruction.cond_value_index, instruction.destination_instruction, number)
        return NoStep(number)

    @cached_property
    def plain(self) -> Routine:
        """The method instruction by instruction."""
        self.require_operators()
        chains = [
            [self.step(each, number) for number, each in enumerate(chain)] for chain in self.chains
        ]
        count = len(self.plan.values)
        env: Env = [None] * count
        for index in range(count):
            if index in self.plan.inputs or index in self.written or index in self.states:
                continue
            value = self.plan.values[index]
            if isinstance(value, Tensor):
                if value.is_constant:
                    # Read through the environment only as a graph's input or as an output.
                    env[index] = self.constant(index)
            elif not isinstance(value, ListValue):
                env[index] = value
        outputs = self.plan.outputs
        for index in outputs:
            if isinstance(self.plan.values[index], ListValue):
                raise UnsupportedError(
                    f"output value {index} of method {self.name!r} is a list ({self.plan.values.kind(index)})"
                )
            if (
                index not in self.written
                and index not in self.plan.inputs
                and index not in self.states
                and env[index] is None
                and isinstance(self.plan.values[index], Tensor)
            ):
                raise FormatError(f"output value {index} of method {self.name!r} is written by no instruction")
        return Routine(
            self,
            chains,
            env,
            self.plan.inputs,
            outputs,
            {index: (index, index) for index in self.states},
            fresh_values(chains),
        )

    # -- running

    def take(self, inputs: tuple[Any, ...]) -> list[Any]:
        """The caller's inputs, proven to be what the method needs."""
        ports = self.inputs
        if len(inputs) != len(ports):
            raise ArgumentError(f"method {self.name!r} needs {_count(len(ports), 'input')}, got {len(inputs)}")
        taken = list(inputs)
        for number, port in enumerate(ports):
            x = taken[number]
            if port.kind != "Tensor":
                taken[number] = self._same(number, port, x)
                continue
            if type(x) is not np.ndarray or x.dtype != port.dtype or not x.dtype.isnative:
                x = taken[number] = self._array(number, port, x)
            if x.shape != port.shape:
                self._fits(number, port, x.shape)
        return taken

    def _label(self, number: int, port: Port) -> str:
        return f"input {number} ({port.name})" if port.name else f"input {number}"

    def _array(self, number: int, port: Port, x: Any) -> Array:
        """x as an array of the right dtype; never a change of value."""
        label, want = self._label(number, port), port.dtype
        assert want is not None
        try:
            if isinstance(x, np.ndarray) or not hasattr(x, "__dlpack__") or isinstance(x, np.generic):
                array = np.asarray(x)
            else:
                array = np.from_dlpack(x)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise DtypeError(
                f"{label}: need an array of {want}, got {type(x).__name__}: {error}",
                expected=want,
                got=type(x).__name__,
            ) from error
        if array.dtype != want and array.dtype.newbyteorder("=") != want:
            raise DtypeError(f"{label}: need dtype {want}, got {array.dtype}", expected=want, got=array.dtype)
        return (
            np.ascontiguousarray(array, want).reshape(array.shape)
            if array.dtype != want or not array.dtype.isnative
            else array
        )

    def _fits(self, number: int, port: Port, shape: tuple[int, ...]) -> None:
        need = port.shape
        assert need is not None
        label = self._label(number, port)
        if len(shape) != len(need):
            raise ShapeError(
                f"{label}: need rank {len(need)} as in {need}, got shape {shape}", expected=need, got=shape
            )
        if port.dynamism == "static":
            raise ShapeError(
                f"{label}: need shape {need}, which is static in the program, got {shape}", expected=need, got=shape
            )
        if port.dynamism == "bounded" and any(size > bound for size, bound in zip(shape, need)):
            raise ShapeError(f"{label}: need a shape of at most {need}, got {shape}", expected=need, got=shape)

    def _same(self, number: int, port: Port, x: Any) -> Any:
        """An input that is no tensor has the value that the program was made for, or the call is refused."""
        label, need = self._label(number, port), port.value
        given: Any = x
        kinds = {
            "Int": (int, np.integer),
            "Double": (float, int, np.floating, np.integer),
            "Bool": (bool, np.bool_),
            "String": (str,),
            "Null": (type(None),),
        }.get(port.kind)
        if kinds is None:
            raise UnsupportedError(f"{label} is a {port.kind}, which no caller can give")
        if not isinstance(x, kinds) or (isinstance(x, bool) and port.kind != "Bool"):
            raise DtypeError(
                f"{label}: need {port.kind}, got {type(x).__name__}", expected=port.kind, got=type(x).__name__
            )
        # The tolerance of ExecuTorch's own check.
        same = given == need or (
            port.kind == "Double" and np.isclose(given, need, rtol=1e-5, atol=1e-4, equal_nan=True)
        )
        if not same:
            raise ArgumentError(f"{label}: the program was made for {need!r} and nothing else, got {x!r}")
        return need

    def run(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        if self._pid != os.getpid():
            # Forked while another thread was running: that thread does not exist here.
            self._pid, self._lock = os.getpid(), threading.Lock()
        if not self._lock.acquire(blocking=False):
            raise BusyError(f"method {self.name!r} is running in another thread; make one Program per thread")
        try:
            taken = self.take(inputs)
            if not self.program.merge:
                return self.plain.run(taken)
            if self.is_dynamic:
                return self._run_dynamic(taken)
            merged = self.merged
            if merged is None:
                return self.plain.run(taken)
            try:
                return merged[0].run(taken)
            except Unsound:
                return self._run_anyway(taken)
        finally:
            self._lock.release()

    # -- merged

    @cached_property
    def is_dynamic(self) -> bool:
        """Whether sizes of some tensor follow from the inputs of a call."""
        values = self.plan.values
        return any(isinstance(value := values[index], Tensor) and value.dynamism for index in range(len(values)))

    @cached_property
    def is_single(self) -> bool:
        """Whether the method is one call of a delegate and nothing else, which merging can't improve."""
        work = [each for chain in self.plan.chains for each in chain.instructions if not isinstance(each, FreeCall)]
        return len(work) == 1 and isinstance(work[0], DelegateCall)

    @cached_property
    def merged(self) -> tuple[Routine, PlanReport] | None:
        """The merged form of a method whose sizes are all known; None if it runs as it is written."""
        return self.merge(None)

    def merge(self, shapes: dict[int, tuple[int, ...]] | None) -> tuple[Routine, PlanReport] | None:
        from .merge import NotMerged, merge

        self.require_operators()
        if self.is_single:
            self.reason = "it is one delegate"
            return None
        try:
            return merge(self, shapes, guarded=self.unsound >= MAX_UNSOUND)
        except NotMerged as reason:
            self.reason = str(reason)
            return None

    def _run_dynamic(self, taken: list[Any]) -> tuple[Any, ...]:
        """Shapes that come again are worth a merged form of their own; those of a first call are noted."""
        shapes = tuple(x.shape for x in taken if isinstance(x, np.ndarray))
        known = self._by_shapes.get(shapes)
        if known is None:
            if self.is_single:
                return self.plain.run(taken)
            if len(self._by_shapes) >= MAX_SHAPES:
                self._by_shapes.pop(next(iter(self._by_shapes)))
            noted = {-1 - place: x.shape for place, x in enumerate(taken) if isinstance(x, np.ndarray)}
            results = self.plain.run(taken, noted)
            self._by_shapes[shapes] = noted
            return results
        if isinstance(known, dict):
            known = self._by_shapes[shapes] = self.merge(known) or (self.plain, self.plain_report)
        try:
            return known[0].run(taken)
        except Unsound:
            return self._run_anyway(taken)

    def _run_anyway(self, taken: list[Any]) -> tuple[Any, ...]:
        """Run as written. What does not hold time and again is not taken for granted any more."""
        self.unsound += 1
        if self.unsound == MAX_UNSOUND:
            self.__dict__.pop("merged", None)
            self._by_shapes.clear()
        return self.plain.run(taken)

    @cached_property
    def plain_report(self) -> PlanReport:
        """What runs when nothing is merged."""
        steps = [step for chain in self.plain.chains for step in chain if not isinstance(step, NoStep)]
        graphs = sum(isinstance(step, GraphStep) for step in steps)
        kernels = sum(isinstance(step, KernelStep) for step in steps)
        return PlanReport(self.name, graphs, kernels, 0, 0, graphs, False, self.reason, tuple(map(str, steps)))

    def shortcut(self) -> tuple[Any, ...]:
        """``Runtime.run`` and shapes and dtypes of its inputs, if a call of the method does nothing else; else ()."""
        if self.is_dynamic and self.program.merge and not self.is_single:
            return ()
        routine = self.plain if self.is_dynamic or not self.program.merge or self.merged is None else self.merged[0]
        steps = [] if routine.jumps else [step for step, _ in routine.straight]
        step = steps[0] if len(steps) == 1 else None
        if not isinstance(step, GraphStep) or routine.copied or routine.states:
            return ()
        given = step.direct and len(step.runtime.outputs) == len(step.outputs)
        if not given or routine.inputs != step.reads or routine.outputs != step.writes:
            return ()
        return step.runtime.run, tuple((port.shape, port.dtype) for port in self.inputs)

    def prepare(self) -> None:
        if self.is_dynamic or not self.program.merge or self.merged is None:
            self.plain  # noqa: B018 - made on first use

    def report(self) -> PlanReport:
        if not self.program.merge:
            self.reason = "merge=False"
            return self.plain_report
        if not self.is_dynamic:
            return self.plain_report if self.merged is None else self.merged[1]
        for known in reversed(list(self._by_shapes.values())):
            if not isinstance(known, dict):
                return known[1]
        # Without a call to go by, the sizes are those that the program declares.
        taken = [
            port.value if port.kind != "Tensor" else np.zeros(port.shape or (), port.dtype) for port in self.inputs
        ]
        noted = {-1 - place: x.shape for place, x in enumerate(taken) if isinstance(x, np.ndarray)}
        states = dict(self.state)
        self.plain.run(taken, noted)
        self.state = states
        merged = self.merge(noted)
        return self.plain_report if merged is None else merged[1]


def fresh_values(chains: Sequence[Sequence[Step]]) -> frozenset[int]:
    """The values whose memory nothing else refers to, however they came about."""
    fresh: set[int] = set()
    shared: set[int] = set()
    for chain in chains:
        for step in chain:
            own = isinstance(step, GraphStep) or (isinstance(step, KernelStep) and step.makes_memory)
            (fresh if own else shared).update(step.writes)
            if len(set(step.writes)) != len(step.writes):
                shared.update(step.writes)
    return frozenset(fresh - shared)


class Routine:
    """Steps made ready to run."""

    def __init__(
        self,
        method: Method,
        chains: Sequence[Sequence[Step]],
        env: Env,
        inputs: Sequence[int],
        outputs: Sequence[int],
        states: dict[int, tuple[int, int]],
        fresh: frozenset[int],
    ) -> None:
        # The method keeps its routines.
        self._method = weakref.ref(method)
        self.chains = chains
        self.env = env
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        #: Index in the program -> where its content is before and after a run.
        self.states = states
        self.jumps = any(isinstance(step, JumpStep) for chain in chains for step in chain)
        # Of what is handed out, everything that somebody else might see change is copied.
        kept = {place for pair in states.values() for place in pair}
        seen: set[int] = set()
        self.copied = []
        for place, index in enumerate(self.outputs):
            if index not in fresh or index in kept or index in seen:
                self.copied.append(place)
            seen.add(index)
        self.straight = [] if self.jumps else self._with_ends()

    @property
    def method(self) -> Method:
        method = self._method()
        assert method is not None, "whoever runs a routine holds its method"
        return method

    def _with_ends(self) -> list[tuple[Step, tuple[int, ...]]]:
        """Every step with the values that nobody needs after it."""
        steps = [step for chain in self.chains for step in chain if not isinstance(step, NoStep)]
        kept = {*self.outputs, *(end for _, end in self.states.values())}
        last: dict[int, int] = {}
        for place, step in enumerate(steps):
            for index in (*step.reads, *step.writes):
                last[index] = place
        ends: list[list[int]] = [[] for _ in steps]
        for index, place in last.items():
            if index not in kept:
                ends[place].append(index)
        return [(step, tuple(indices)) for step, indices in zip(steps, ends)]

    def run(self, inputs: list[Any], noted: dict[int, tuple[int, ...]] | None = None) -> tuple[Any, ...]:
        """One call. ``noted`` receives the shapes of what steps write, counted from 0 in the order of writing."""
        env = self.env.copy()
        for index, array in zip(self.inputs, inputs):
            env[index] = array
        method = self.method
        for index, (start, _) in self.states.items():
            env[start] = method.state[index] if index in method.state else method.initial(index)
        step: Step | None = None
        try:
            if not self.jumps:
                for step, ends in self.straight:
                    step(env)
                    if noted is not None:
                        _note(step, env, noted)
                    for index in ends:
                        env[index] = None
            else:
                left = method.file.limits.max_steps
                for chain in self.chains:
                    place, count = 0, len(chain)
                    while place < count:
                        step = chain[place]
                        left -= 1
                        if left < 0:
                            raise LimitError(
                                f"the method has run {method.file.limits.max_steps} instructions and does not end; "
                                "max_steps of Limits raises the cap"
                            )
                        jump = step(env)
                        place = place + 1 if jump is None else jump
        except XnnfastError as error:
            if step is not None and error.args and isinstance(error.args[0], str):
                error.args = (
                    f"method {method.name!r}, instruction {step.instruction}: {error.args[0]}",
                    *error.args[1:],
                )
            raise
        results = [env[index] for index in self.outputs]
        for place in self.copied:
            if isinstance(results[place], np.ndarray):
                results[place] = results[place].copy()
        for index, (_, end) in self.states.items():
            method.state[index] = env[end]
        return tuple(results)


def _note(step: Step, env: Env, noted: dict[int, tuple[int, ...]]) -> None:
    if isinstance(step, (KernelStep, GraphStep)):
        count = noted.setdefault(COUNT, (0,))[0]
        for place, index in enumerate(step.writes):
            if isinstance(env[index], np.ndarray):
                noted[count + place] = env[index].shape
        noted[COUNT] = (count + len(step.writes),)


def _place(call: Undelegated) -> str:
    chain = f"chain {call.chain} " if call.chain else ""
    return f"{chain}instruction {call.instruction}{f' from {call.stack[0]}' if call.stack else ''}"


def _names(spec: str, count: int) -> list[str | None]:
    """Names of the leaves of a tree of arguments, as the exporter wrote the tree; None for those without.

    The tree is JSON: [version, {"type", "context", "children_spec"}]. The context of a dict is the list of its keys.
    """
    try:
        found = list(_leaves(json.loads(spec)[1], ()))
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        return [None] * count
    names = [".".join(path) if any(not part.isdigit() for part in path) else None for path in found]
    return names if len(names) == count else [None] * count


def _leaves(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    children = tree["children_spec"]
    if tree["type"] is None:
        yield path
        return
    try:
        keys = json.loads(tree["context"]) if isinstance(tree["context"], str) else tree["context"]
    except ValueError:
        keys = None
    named = isinstance(keys, list) and len(keys) == len(children) and all(isinstance(each, str) for each in keys)
    for number, child in enumerate(children):
        yield from _leaves(child, (*path, keys[number] if named else str(number)))


# ---------------------------------------------------------------------------------------------------
# The program


class Program:
    """An ExecuTorch program made ready to run.

    Parameters
    ----------
    source : path or buffer
        A ``.pte`` file, or a bundled program with one inside.
    data : iterable of path or buffer
        Data files (``.ptd``) with what the program refers to by name.
    merge : bool, default True
        Join delegates and the operators between them into as few graphs as possible, and compute once
        what never changes. False runs the program as it is written.
    threads : int, default 1
        Threads of each runtime.
    copy : bool, optional
        As in :func:`load`: whether constants of delegates may or must be copied.
    limits : Limits, optional
        Caps on what a file may ask for.
    weights_cache : bool, path or WeightsCache, optional
        As in :class:`Runtime`: where packed weights are kept for the next process.

    Raises
    ------
    OSError
        A file can't be opened or mapped.
    ArgumentError
        ``threads`` is not positive.
    FormatError, LimitError
        The bytes are no program. Operators and backends that are missing raise nothing here.

    Notes
    -----
    Opening reads the tables only. A method is prepared, and its weights packed, when it first runs or
    :meth:`prepare` asks for it. One caller at a time for each method; a second one gets BusyError.
    """

    def __init__(
        self,
        source: Source | Payload,
        data: Iterable[Source | Payload | DataFile] = (),
        *,
        merge: bool = True,
        threads: int = 1,
        copy: bool | None = None,
        limits: Limits | None = None,
        weights_cache: bool | str | os.PathLike[str] | WeightsCache | None = None,
    ) -> None:
        if threads < 1:
            raise ArgumentError(f"threads must be at least 1, got {threads}")
        self.file = ProgramFile(source, data=data, limits=limits or DEFAULT_LIMITS)
        self.merge = merge
        self.threads = threads
        self.copy = copy
        self.weights_cache = weights_cache
        self._methods: dict[str, Method] = {}
        options = Options(merge, threads, copy, weights_cache)
        for number, plan in enumerate(self.file.plans):
            if plan.name in self._methods:
                raise FormatError(f"two methods are named {plan.name!r}")
            self._methods[plan.name] = Method(self.file, options, plan, number)
        #: Method -> how to run it when inputs are plainly right, or () if there is no such way.
        self._shortcuts: dict[str, Any] = {}
        self._closed = False

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the methods, in the file's order."""
        return tuple(self._methods)

    def method(self, name: str) -> Method:
        """A method by its name.

        Parameters
        ----------
        name : str

        Returns
        -------
        Method

        Raises
        ------
        ArgumentError
            There is none of that name.
        ClosedError
            The program was closed.
        """
        if self._closed:
            raise ClosedError("this program was closed")
        try:
            return self._methods[name]
        except KeyError:
            raise ArgumentError(
                f"need a method of {', '.join(map(repr, self._methods)) or 'none'}, found {name!r}"
            ) from None

    def inputs(self, method: str = "forward") -> tuple[Port, ...]:
        """What a method takes, in order.

        Parameters
        ----------
        method : str, default "forward"

        Returns
        -------
        tuple of Port
            With name, kind, dtype, shape (logical sizes, or their bound), ``dim_order`` and dynamism of each.

        Raises
        ------
        ArgumentError
            There is no such method.
        """
        return self.method(method).inputs

    def outputs(self, method: str = "forward") -> tuple[Port, ...]:
        """What a method gives, in order.

        Parameters
        ----------
        method : str, default "forward"

        Returns
        -------
        tuple of Port
            As for :meth:`inputs`.

        Raises
        ------
        ArgumentError
            There is no such method.
        """
        return self.method(method).outputs

    @property
    def delegates(self) -> tuple[DelegateInfo, ...]:
        """The delegates of all methods."""
        return tuple(info for method in self._methods.values() for info in method.delegates())

    @property
    def undelegated(self) -> tuple[Undelegated, ...]:
        """The operator calls outside delegates, of all methods."""
        return tuple(call for method in self._methods.values() for call in method.undelegated())

    def run(self, *inputs: Any, method: str = "forward") -> tuple[Any, ...]:
        """Run a method once.

        Parameters
        ----------
        *inputs : array_like
            One for each of :meth:`inputs`, of exactly that dtype. Arrays are logical: dimensions as in the
            model's source, whatever ``dim_order`` says about memory. An input that is no tensor must be the
            value that the program was made for.
        method : str, default "forward"

        Returns
        -------
        tuple of numpy.ndarray
            New arrays that belong to the caller; numbers for outputs that are no tensors.

        Raises
        ------
        UnsupportedError
            The method needs operators or backends that this package lacks; all of them are named, before
            anything runs.
        ArgumentError, DtypeError, ShapeError
            Something about the inputs.
        BusyError
            Another thread is running the method.
        """
        shortcut = self._shortcuts.get(method)
        if shortcut:
            run, forms = shortcut
            if len(inputs) == len(forms):
                for x, (shape, dtype) in zip(inputs, forms):
                    if type(x) is not np.ndarray or x.dtype is not dtype or x.shape != shape:
                        break
                else:
                    direct: tuple[Any, ...] = run(*inputs)
                    return direct
        found = self.method(method)
        results = found.run(inputs)
        if shortcut is None:
            self._shortcuts[method] = found.shortcut()
        return results

    def plan(self, method: str = "forward") -> PlanReport:
        """What runs when a method is called: how many graphs of XNNPACK, how many operators in NumPy, and which.

        It prepares the method. A method with dynamic sizes is merged anew for shapes that come twice; the report is
        about the latest of them, or about the declared sizes if there are none yet.

        Parameters
        ----------
        method : str, default "forward"

        Returns
        -------
        PlanReport
            Printed, it is one line for each step.

        Raises
        ------
        ArgumentError
            There is no such method.
        UnsupportedError
            The method needs operators or backends that this package lacks.
        """
        return self.method(method).report()

    def prepare(self, method: str = "forward") -> None:
        """Do now what the first run would do before it runs.

        Parameters
        ----------
        method : str, default "forward"

        Raises
        ------
        ArgumentError
            There is no such method.
        UnsupportedError
            The method needs operators or backends that this package lacks.
        FormatError, GraphError
            A delegate, or an operator's arguments, make no sense.
        """
        self.method(method).prepare()

    def reset(self, method: str = "forward") -> None:
        """Give the tensors that keep their content from call to call the content that they had at first.

        Parameters
        ----------
        method : str, default "forward"

        Raises
        ------
        ArgumentError
            There is no such method.
        """
        self.method(method).state.clear()

    def close(self) -> None:
        """Free everything now; later calls raise ClosedError."""
        self._closed = True
        self._methods = {}
        self._shortcuts = {}

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        from .pickling import again, weights_cache_option

        if self._closed:
            raise ClosedError("this program was closed")
        data = [file.payload for file in self.file.data_files]
        return again, (type(self), (self.file.payload, data), {
            "merge": self.merge, "threads": self.threads, "copy": self.copy, "limits": self.file.limits,
            "weights_cache": weights_cache_option(self.weights_cache)})

    def __repr__(self) -> str:
        return f"Program({self.file.payload.name!r}, methods={list(self._methods)}, delegates={len(self.delegates)})"
