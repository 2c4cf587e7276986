"""From a method's instructions to fewer, larger steps with the same results.

In comes a Method without jumps; out goes a Routine in which delegates, and the operators between them that
XNNPACK can express, are joined into as few graphs as possible, and what never changes has been computed.

The method is first brought into a form in which every value is written once and has a number of its own (Flow).
Each call then runs either in XNNPACK or in NumPy, and belongs to a level: NumPy's calls of a level read graphs of the
levels before, the calls of XNNPACK of one level become one graph.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _reader
from ._graph import Constant
from .containers import DelegateCall, JumpFalseCall, KernelCall, MoveCall, Tensor
from .errors import GraphError, ShapeError, XnnfastError, XnnpackError
from .lower import lower
from .merge_graph import KEEP_DIMS, Array, Conflict, Constants, External, Form, Maker, Shape, Source, narrow, simplify
from .merge_rows import LOWERINGS, Call, Unfit, datatype
from .ops import Refusal
from .portable import Portable
from .program import (
    Fixed,
    GraphStep,
    Items,
    KernelStep,
    Method,
    Operand,
    PlanReport,
    Routed,
    Routine,
    Slot,
    Spec,
    Step,
    Unsound,
    ViewCall,
    argument,
    fresh_values,
    inverse,
    operand_slots,
)

if TYPE_CHECKING:
    from ._graph import Graph, Node

#: Results above this many bytes are computed when they are needed, not kept.
MAX_EVALUATED = 1 << 26

#: Operators whose result's shape follows from elements, not from shapes and numbers.
DATA_SHAPED = frozenset(
    ("aten::nonzero.out", "aten::masked_select.out", "aten::repeat_interleave.Tensor_out", "aten::index.Tensor_out")
)

#: Lowerings that move elements and compute nothing: not worth a graph of their own.
MOVING = frozenset(
    name
    for name, row in LOWERINGS.items()
    if row.__name__
    in (
        "_copy",
        "_view",
        "_rearranged",
        "_expand",
        "_permute",
        "_transpose",
        "_t",
        "_select",
        "_slice",
        "_narrow",
        "_split",
        "_cat",
        "_stack",
        "_pad",
    )
)


class NotMerged(Exception):
    """Why a method runs as it is written."""


# ---------------------------------------------------------------------------------------------------
# Every value written once


@dataclass(eq=False)
class Info:
    """A tensor of the flow."""

    dtype: np.dtype[Any]
    #: Logical sizes; None if they depend on more than the shapes of the inputs.
    sizes: Shape | None
    order: tuple[int, ...]
    #: Index of the program's constant with these very bytes.
    stored: int | None = None


@dataclass(eq=False)
class Work:
    """Something to be done."""

    instruction: int
    #: Numbers of the values it makes.
    results: list[int]

    def reads(self) -> Iterable[int]:
        raise NotImplementedError


@dataclass(eq=False)
class Kernel(Work):
    """An operator outside delegates."""

    row: Portable
    operands: list[Operand]
    specs: list[Spec | None]

    def reads(self) -> Iterable[int]:
        return operand_slots(self.operands)


@dataclass(eq=False)
class Delegated(Work):
    """A call of a delegate."""

    delegate: int
    graph: Graph
    #: Number and order of dimensions of what goes in and out, in the graph's order.
    takes: list[tuple[int, tuple[int, ...]]]
    gives: list[tuple[int, tuple[int, ...]]]
    routed: tuple[list[Routed], list[Routed]]
    #: Id of a constant of the graph -> what is taken in its place.
    swaps: dict[int, int] = field(default_factory=dict)

    def reads(self) -> Iterable[int]:
        return [number for number, _ in self.takes]


@dataclass(eq=False)
class Custom(Work):
    """Arrays from arrays by a function of ours."""

    title: str
    sources: list[int]
    function: Callable[..., tuple[Array, ...]]

    def reads(self) -> Iterable[int]:
        return self.sources


@dataclass(eq=False)
class Product(Work):
    """Two values multiplied in XNNPACK."""

    first: int
    second: int

    def reads(self) -> Iterable[int]:
        return (self.first, self.second)


@dataclass(eq=False)
class Watch:
    """A value inside a delegate's graph that must be finite for the merged graph to be right."""

    work: Delegated
    #: Id in the lowered graph of the delegate.
    value: int


@dataclass(eq=False)
class Flow:
    """A method in which every value is written once."""

    method: Method
    infos: list[Info | None] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outputs: list[Operand] = field(default_factory=list)
    #: Index in the program -> numbers before and after a run.
    states: dict[int, tuple[int, int]] = field(default_factory=dict)
    #: Number -> what never changes.
    known: dict[int, Any] = field(default_factory=dict)
    watches: list[Watch] = field(default_factory=list)
    evaluated: int = 0

    def new(self, info: Info | None) -> int:
        self.infos.append(info)
        return len(self.infos) - 1

    def info(self, number: int) -> Info:
        info = self.infos[number]
        assert info is not None
        return info


def read(method: Method, shapes: dict[int, Shape] | None) -> Flow:
    """The flow of a method.

    ``shapes`` has the sizes of tensors that the program does not fix, by the order in which values are
    written (noted by :meth:`Routine.run`), and those of the inputs under negative numbers; None for a static program.
    """
    return _Reading(method, shapes).run()


class _Reading:
    def __init__(self, method: Method, shapes: dict[int, Shape] | None) -> None:
        self.method = method
        self.plan = method.plan
        self.flow = Flow(method)
        self.shapes = shapes
        self.current: dict[int, Operand] = {}
        self.count = 0

    def run(self) -> Flow:
        flow, method = self.flow, self.method
        for place, index in enumerate(self.plan.inputs):
            number = flow.new(self.tensor_info(index, None if self.shapes is None else self.shapes.get(-1 - place)))
            flow.inputs.append(number)
            self.current[index] = Slot(number)
        starts = {}
        for index in method.states:
            starts[index] = flow.new(self.tensor_info(index, None))
            self.current[index] = Slot(starts[index])
        for chain in method.chains:
            for number, instruction in enumerate(chain):
                self.instruction(instruction, number)
        for index in self.plan.outputs:
            flow.outputs.append(self.single(index))
        for index, start in starts.items():
            end = self.current[index]
            assert isinstance(end, Slot)
            flow.states[index] = (start, end.place)
        return flow

    # -- operands

    def tensor_info(self, index: int, sizes: Shape | None) -> Info | None:
        tensor = self.plan.values[index]
        if not isinstance(tensor, Tensor):
            return None
        return Info(tensor.dtype, tensor.sizes if tensor.dynamism == 0 else sizes, tensor.dim_order)

    def single(self, index: int) -> Fixed | Slot:
        if index in self.current:
            operand = self.current[index]
            assert not isinstance(operand, Items)
            return operand
        value = self.plan.values[index]
        if not isinstance(value, Tensor):
            return Fixed(value)
        if not value.is_constant:
            raise NotMerged(f"value {index} is read before an instruction writes it")
        number = self.flow.new(Info(value.dtype, value.sizes, value.dim_order, index))
        self.flow.known[number] = self.method.constant(index)
        self.current[index] = Slot(number)
        return Slot(number)

    def operand(self, index: int) -> Operand:
        operand = self.method.operand(index)
        if isinstance(operand, Items):
            members = self.method.members(index)
            return Items(tuple(Fixed(None) if item == -1 else self.single(item) for item in members))
        return (
            operand if isinstance(operand, Fixed) and not isinstance(operand.value, np.ndarray) else self.single(index)
        )

    def resolved(self, operand: Operand) -> Operand:
        """An operand with the values that are known put in."""
        if isinstance(operand, Items):
            parts = [self.resolved(part) for part in operand.parts]
            return Items(tuple(part for part in parts if not isinstance(part, Items)))
        if isinstance(operand, Slot) and operand.place in self.flow.known:
            return Fixed(self.flow.known[operand.place])
        return operand

    # -- instructions

    def instruction(self, instruction: Any, number: int) -> None:
        if isinstance(instruction, JumpFalseCall):
            raise NotMerged("it has jumps")
        if isinstance(instruction, MoveCall):
            self.current[instruction.move_to] = self.single(instruction.move_from)
        elif isinstance(instruction, KernelCall):
            self.kernel(instruction, number)
        elif isinstance(instruction, ViewCall):
            row, operands = self.method.view(instruction)
            self.work(row, [self.single(instruction.source), *operands[1:]], [instruction.target], number)
        elif isinstance(instruction, DelegateCall):
            self.delegate(instruction, number)

    def written(self, index: int, stable: bool) -> int:
        """A number for what an instruction writes."""
        recorded = None if self.shapes is None else self.shapes.get(self.count)
        self.count += 1
        info = self.tensor_info(index, recorded if stable else None)
        return self.flow.new(info)

    def kernel(self, call: KernelCall, number: int) -> None:
        method = self.method
        row = method.row(call)
        assert row is not None
        routing = row.split(call.args)
        row.check([self.plan.values.kind(index) for index in routing.inputs])
        operands = [self.operand(index) for index in routing.inputs]
        targets = [index for each in routing.outputs for index in method.members(each)]
        self.work(row, operands, targets, number)

    def work(self, row: Portable, operands: list[Operand], targets: list[int], number: int) -> None:
        """Take in an operator and what it writes."""
        flow, method = self.flow, self.method
        stable = self.is_stable(row, operands)
        results = [self.written(index, stable) for index in targets]
        specs = [method.spec(index) for index in targets]
        alias = self.alias(row, operands, results)
        if alias is not None:
            self.current[targets[0]] = alias
            return
        work = Kernel(number, results, row, operands, specs)
        for index, result in zip(targets, results):
            self.current[index] = Slot(result)
        if not self.evaluate(work):
            flow.works.append(work)

    def is_stable(self, row: Portable, operands: Sequence[Operand]) -> bool:
        """Whether the shapes of the results follow from those of the method's inputs."""
        if row.name in DATA_SHAPED:
            return False
        for place in operand_slots(operands):
            info = self.flow.infos[place]
            if place not in self.flow.known and (info is None or info.sizes is None):
                return False
        return True

    def alias(self, row: Portable, operands: Sequence[Operand], results: Sequence[int]) -> Operand | None:
        """The operand that is the result already, if there is one."""
        if not row.view or row.out_list or not isinstance(operands[0], Slot):
            return None
        before, after = self.flow.infos[operands[0].place], self.flow.infos[results[0]]
        if (
            before is None
            or after is None
            or before.sizes is None
            or after.sizes is None
            or before.dtype != after.dtype
        ):
            return None
        same = row.lower == "copy" or (row.lower in ("view", "expand") and before.sizes == after.sizes)
        return operands[0] if same else None

    def evaluate(self, work: Kernel) -> bool:
        """Compute now what never changes."""
        flow = self.flow
        if not (work.row.pure or work.row.mutates is not None):
            return False
        sizes = [flow.infos[result] for result in work.results]
        if any(
            info is not None and info.sizes is not None and math.prod(info.sizes) * info.dtype.itemsize > MAX_EVALUATED
            for info in sizes
        ):
            return False
        operands = []
        for operand in map(self.resolved, work.operands):
            parts = operand.parts if isinstance(operand, Items) else (operand,)
            if any(isinstance(part, Slot) for part in parts):
                if not work.row.shape_only or not isinstance(operand, Slot):
                    return False
                info = flow.infos[operand.place]
                if info is None or info.sizes is None:
                    return False
                # Only its shape is looked at.
                operand = Fixed(np.broadcast_to(np.zeros((), info.dtype), info.sizes))
            operands.append(operand)
        places = range(len(work.results))
        env: list[Any] = [None] * len(work.results)
        try:
            KernelStep(work.row, operands, places, work.specs, work.instruction)(env)
        except XnnfastError:
            # It fails when the method runs, which says where.
            return False
        for result, value in zip(work.results, env):
            flow.known[result] = value
            info = flow.infos[result]
            if info is not None:
                flow.infos[result] = Info(info.dtype, value.shape, info.order)
        flow.evaluated += 1
        return True

    def delegate(self, call: DelegateCall, number: int) -> None:
        flow, method = self.flow, self.method
        graph = method.graph(call)
        routed = method.routed(call, graph)
        takes = []
        for value in graph.inputs:
            index = argument(call, value)
            operand = self.single(index)
            assert isinstance(operand, Slot)
            takes.append((operand.place, self.plan.values[index].dim_order))
        stable = all(flow.info(place).sizes is not None for place, _ in takes)
        gives = []
        for value in graph.outputs:
            index = argument(call, value)
            result = self.written(index, stable)
            self.current[index] = Slot(result)
            gives.append((result, self.plan.values[index].dim_order))
        works = Delegated(number, [result for result, _ in gives], call.delegate_index, graph, takes, gives, routed)
        if not all(place in flow.known for place, _ in takes):
            flow.works.append(works)
            return
        results = method.runtime(graph).run(
            *[
                flow.known[place] if change is None else change(flow.known[place])
                for (place, _), (_, change) in zip(takes, routed[0])
            ]
        )
        for (result, _), (_, change), array in zip(gives, routed[1], results):
            flow.known[result] = array if change is None else change(array)
        flow.evaluated += 1


# ---------------------------------------------------------------------------------------------------
# Softmax with a guard


def unguard(flow: Flow) -> None:
    """Take away the guards that attention puts on softmax, where something cheaper does the same.

    A row of scores that is -inf throughout gives NaN; the guard looks at all scores and puts zeros in such rows:
    ``where(logical_not(any(logical_not(scores == -inf), -1)), 0, softmax(scores))``. Scores are a product plus a mask,
    and a product is not -inf unless it overflows. So the mask tells which rows these are. That no NaN comes out
    all the same is seen to at every run (:class:`Watch`); if one does, the method runs as it is written.
    """
    makers = {result: work for work in flow.works for result in work.results}
    readers: dict[int, list[Work]] = {}
    for work in flow.works:
        for number in work.reads():
            readers.setdefault(number, []).append(work)
    kept = {operand.place for operand in flow.outputs if isinstance(operand, Slot)} | {
        end for _, end in flow.states.values()
    }
    for work in list(flow.works):
        if isinstance(work, Kernel) and work.row.name == "aten::where.self_out":
            _unguard(flow, work, makers, readers, kept)


@dataclass(eq=False)
class _Guard:
    """A guard that was found: what it is made of and what it guards."""

    #: The operators, the one that gives the result first.
    chain: list[Kernel]
    #: Softmax's input and output.
    scores: int
    weights: int
    #: The delegate that computes softmax, and its output there.
    source: Delegated
    softmax: Node


def _unguard(flow: Flow, work: Kernel, makers: dict[int, Work], readers: dict[int, list[Work]], kept: set[int]) -> None:
    guard = _find_guard(flow, work, makers, readers, kept)
    if guard is None:
        return
    watch = Watch(guard.source, guard.softmax.outputs[0])
    mask = _find_mask(flow, guard, makers)
    opened = False
    if mask is not None and (mask.known is None or np.isneginf(mask.known).all(axis=-1).any()):
        # Rows may be closed: others of its readers shall not see them opened, and its rows must be those of scores.
        if not mask.exact:
            return
        opened = True
    if mask is None or not opened:
        _replace(flow, work, guard.chain, Slot(guard.weights))
    else:
        keep = _open_mask(flow, mask)
        flow.works[flow.works.index(work)] = Product(work.instruction, list(work.results), guard.weights, keep)
        for each in guard.chain[1:]:
            flow.works.remove(each)
    flow.watches.append(watch)


def _find_guard(
    flow: Flow, work: Kernel, makers: dict[int, Work], readers: dict[int, list[Work]], kept: set[int]
) -> _Guard | None:
    chain: list[Kernel] = [work]

    def step(operand: Operand, name: str) -> Kernel | None:
        """The operator that makes an operand, if nobody else looks at that."""
        if not isinstance(operand, Slot) or operand.place in kept or len(readers.get(operand.place, ())) != 1:
            return None
        made = makers.get(operand.place)
        if not isinstance(made, Kernel) or made.row.name != name:
            return None
        chain.append(made)
        return made

    condition, zeros, weights = work.operands
    if not isinstance(zeros, Slot) or not isinstance(weights, Slot) or not _is_zero(flow.known.get(zeros.place)):
        return None
    last = step(condition, "aten::logical_not.out")
    some = step(last.operands[0], "aten::any.out") if last else None
    finite = step(some.operands[0], "aten::logical_not.out") if some else None
    infinite = step(finite.operands[0], "aten::eq.Scalar_out") if finite else None
    if some is None or infinite is None or infinite.operands[1] != Fixed(-math.inf) or some.operands[2] != Fixed(True):
        return None
    scores, source = infinite.operands[0], makers.get(weights.place)
    if not isinstance(scores, Slot) or not isinstance(source, Delegated):
        return None
    if weights.place in kept or readers[weights.place] != [work]:
        return None
    info, order = flow.infos[scores.place], flow.info(weights.place).order
    if info is None or not info.sizes or order != tuple(range(len(info.sizes))):
        return None
    if some.operands[1] not in (Fixed(-1), Fixed(len(info.sizes) - 1)):
        return None
    if not info.sizes == flow.info(weights.place).sizes == flow.info(work.results[0]).sizes:
        return None
    lowered = lower(source.graph)
    softmax = next((node for node in lowered.nodes if node.outputs[0] == _inner(source, weights.place)), None)
    if softmax is None or softmax.op.name != "softmax" or softmax.inputs[0] != _inner(source, scores.place):
        return None
    return _Guard(chain, scores.place, weights.place, source, softmax)


def _inner(work: Delegated, number: int) -> int | None:
    """The id that a value of the flow has in a delegate's lowered graph."""
    lowered = lower(work.graph)
    for (place, _), id in zip((*work.takes, *work.gives), (*lowered.inputs, *lowered.outputs)):
        if place == number:
            return id
    return None


@dataclass(eq=False)
class _Mask:
    """What is added to scores."""

    #: The delegate that adds it, and its id there.
    owner: Delegated
    id: int
    #: Its place among what the delegate takes, None for a constant of the delegate.
    place: int | None
    #: Its elements if they never change.
    known: Array | None
    info: Info
    #: It goes nowhere else, and its rows are those of the scores.
    exact: bool


def _find_mask(flow: Flow, guard: _Guard, makers: dict[int, Work]) -> _Mask | None:
    """What is added to the scores; None if nothing is seen to be."""
    number, owner = _origin(guard.scores, makers)
    if not isinstance(owner, Delegated):
        return None
    lowered = lower(owner.graph)
    inner = _inner(owner, number)
    added = next((node for node in lowered.nodes if node.outputs[0] == inner), None)
    if added is None or added.op.name != "add":
        return None
    found = []
    for id in added.inputs:
        assert id is not None
        value = lowered.value(id)
        place, known, info = None, None, None
        if id in lowered.inputs:
            place = lowered.inputs.index(id)
            mask, order = owner.takes[place]
            info, known = flow.info(mask), flow.known.get(mask)
            # What comes from XNNPACK is the product.
            if order != info.order or isinstance(_origin(mask, makers)[1], Delegated):
                continue
        elif value.constant is not None and value.datatype in ("fp32", "fp16"):
            known = value.array()
            info = Info(known.dtype, known.shape, tuple(range(known.ndim)))
        if info is None or not info.sizes or info.order != tuple(range(len(info.sizes))) or info.dtype.kind != "f":
            continue
        alone = sum(id in node.inputs for node in lowered.nodes) == 1
        onward = [node for node in lowered.nodes if inner in node.inputs]
        further = [node for node in lower(guard.source.graph).nodes if guard.softmax.outputs[0] in node.inputs]
        exact = number == guard.scores and alone and all(node is guard.softmax for node in onward) and not further
        found.append(_Mask(owner, id, place, known, info, exact))
    # One that is known is best.
    return min(found, key=lambda mask: mask.known is None, default=None)


def _origin(number: int, makers: dict[int, Work]) -> tuple[int, Work | None]:
    """Where the elements of a value were computed: the number before they were moved, and what makes that."""
    made = makers.get(number)
    while isinstance(made, Kernel) and made.row.lower in ("view", "unsqueeze", "squeeze", "copy"):
        first = made.operands[0]
        if not isinstance(first, Slot):
            break
        number, made = first.place, makers.get(first.place)
    return number, made


def _open_mask(flow: Flow, mask: _Mask) -> int:
    """Give a delegate its mask with closed rows opened; the number of what is 0 in those rows and 1 in others."""
    info, owner = mask.info, mask.owner
    assert info.sizes is not None
    opened = flow.new(Info(info.dtype, info.sizes, info.order))
    keep = flow.new(Info(info.dtype, (*info.sizes[:-1], 1), info.order))
    if mask.known is not None:
        flow.known[opened], flow.known[keep] = _open_rows(mask.known)
    if mask.place is None:
        owner.swaps[mask.id] = opened
        return keep
    if mask.known is None:
        work = Custom(owner.instruction, [opened, keep], "rows of a mask", [owner.takes[mask.place][0]], _open_rows)
        flow.works.insert(flow.works.index(owner), work)
    owner.takes[mask.place] = (opened, info.order)
    return keep


def _is_zero(array: Any) -> bool:
    return isinstance(array, np.ndarray) and not array.any() and not np.signbit(array).any()


def _open_rows(mask: Array) -> tuple[Array, Array]:
    """The mask with zeros in rows that are -inf throughout, and 0 for those rows, 1 for others."""
    closed = np.isneginf(mask).all(axis=-1, keepdims=True)
    return np.where(closed, mask.dtype.type(0), mask), np.where(closed, mask.dtype.type(0), mask.dtype.type(1))


def _replace(flow: Flow, work: Kernel, chain: Sequence[Kernel], operand: Slot) -> None:
    """Drop operators, whose result is another value from now on."""
    for each in chain:
        flow.works.remove(each)
    old = work.results[0]

    def renamed(each: Any) -> Any:
        if isinstance(each, Items):
            return Items(tuple(renamed(part) for part in each.parts))
        return operand if each == Slot(old) else each

    for other in flow.works:
        if isinstance(other, Kernel):
            other.operands = [renamed(each) for each in other.operands]
        elif isinstance(other, Delegated):
            other.takes = [(operand.place if number == old else number, order) for number, order in other.takes]
        elif isinstance(other, Product):
            other.first, other.second = (operand.place if each == old else each for each in (other.first, other.second))
        elif isinstance(other, Custom):
            other.sources = [operand.place if each == old else each for each in other.sources]
    flow.outputs = [renamed(each) for each in flow.outputs]
    flow.states = {index: (start, operand.place if end == old else end) for index, (start, end) in flow.states.items()}


# ---------------------------------------------------------------------------------------------------
# Who computes what


class _Arrays(Source):
    """The flow as a Maker sees it."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow

    def shape(self, number: int, order: tuple[int, ...]) -> Shape:
        sizes = self.flow.info(number).sizes
        # Another rank than the one declared is an error that the run will tell.
        if sizes is None or len(sizes) != len(order):
            raise Unfit
        return tuple(sizes[axis] for axis in order) or (1,)

    def constant(self, maker: Maker, number: int, form: Form) -> int | None:
        flow = self.flow
        if number not in flow.known:
            return None
        info = flow.info(number)
        if np.ndim(flow.known[number]) != len(form.order):
            raise Unfit
        if info.stored is not None and form.order == info.order:
            # In place, if XNNPACK can read it there.
            constant = maker.constants.known(("stored", info.stored), partial(_stored, flow.method, info.stored))
        else:
            constant = maker.constants.copy_of(flow.known[number].transpose(form.order))
        return maker.add(
            form.datatype, self.shape(number, form.order), quantization=form.quantization, constant=constant
        )


def _stored(method: Method, index: int) -> Constant:
    """A constant tensor of the program as one of a graph."""
    tensor = method.plan.values[index]
    blob = method.file.constant(tensor)
    return _reader.constant_at(blob.payload, blob.offset, blob.nbytes, tensor.data_buffer_idx, copy=method.program.copy)


class _KernelCall(Call):
    """An operator of the flow as a lowering sees it."""

    def __init__(self, flow: Flow, work: Kernel, maker: Maker, used: set[int]) -> None:
        self.flow = flow
        self.work = work
        self.maker = maker
        self.used = used
        self.name = work.row.name

    def _number(self, operand: Any) -> int:
        if not isinstance(operand, Slot):
            raise Unfit
        return operand.place

    def is_tensor(self, place: int) -> bool:
        operand = self.work.operands[place]
        return isinstance(operand, Slot) and self.flow.infos[operand.place] is not None

    def _take(self, number: int) -> int:
        info = self.flow.infos[number]
        if info is None or info.sizes is None or 0 in info.sizes:
            raise Unfit
        return self.maker.take(number, Form(tuple(range(len(info.sizes))), datatype(info.dtype)))

    def tensor(self, place: int) -> int:
        return self._take(self._number(self.work.operands[place]))

    def tensors(self, place: int) -> list[int]:
        operand = self.work.operands[place]
        if not isinstance(operand, Items) or not operand.parts:
            raise Unfit
        return [self._take(self._number(part)) for part in operand.parts]

    def known(self, place: int) -> Any:
        operand = self.work.operands[place]
        parts = operand.parts if isinstance(operand, Items) else (operand,)
        values = []
        for part in parts:
            if isinstance(part, Slot):
                if part.place not in self.flow.known:
                    raise Unfit
                values.append(self.flow.known[part.place])
            else:
                values.append(part.value)
        return values if isinstance(operand, Items) else values[0]

    def array(self, place: int) -> Array | None:
        operand = self.work.operands[place]
        found = self.flow.known.get(operand.place) if isinstance(operand, Slot) else None
        return found if isinstance(found, np.ndarray) else None

    def _info(self, number: int) -> Info:
        info = self.flow.infos[number]
        if info is None:
            raise Unfit
        return info

    def sizes(self, place: int) -> Shape:
        sizes = self._info(self._number(self.work.operands[place])).sizes
        if sizes is None:
            raise Unfit
        return sizes

    def dtype(self, place: int) -> np.dtype[Any]:
        return self._info(self._number(self.work.operands[place])).dtype

    def out_dtype(self, result: int = 0) -> np.dtype[Any]:
        return self._info(self.work.results[result]).dtype

    def out_sizes(self, result: int = 0) -> Shape:
        sizes = self._info(self.work.results[result]).sizes
        if sizes is None:
            raise Unfit
        return sizes

    def is_used(self, result: int) -> bool:
        return self.work.results[result] in self.used


def emit(flow: Flow, work: Work, maker: Maker, used: set[int]) -> None:
    """Add what a work computes to a graph."""
    if isinstance(work, Delegated):
        ids = maker.inline(work.graph, work.takes, work.gives, work.swaps)
        for watch in flow.watches:
            if watch.work is work:
                maker.watched.append(ids[watch.value])
    elif isinstance(work, Product):
        forms = []
        for number in (work.first, work.second):
            info = flow.info(number)
            forms.append(maker.take(number, Form(tuple(range(len(info.sizes or ()))), datatype(info.dtype))))
        result = maker.node("multiply", forms)
        maker.give(work.results[0], tuple(range(len(maker.shape(result)))), result)
    else:
        assert isinstance(work, Kernel)
        results = LOWERINGS[work.row.name](_KernelCall(flow, work, maker, used))
        for number, id in zip(work.results, results):
            if id is None:
                continue
            sizes = flow.info(number).sizes
            if sizes is None or (sizes or (1,)) != maker.shape(id):
                raise Unfit
            maker.give(number, tuple(range(len(sizes))), id)


def fits(flow: Flow, work: Work, used: set[int]) -> bool:
    """Whether XNNPACK can do a work."""
    if isinstance(work, Custom):
        return False
    if isinstance(work, Kernel) and work.row.name not in LOWERINGS:
        return False
    if any(
        info.sizes is None or 0 in info.sizes for number in work.reads() if (info := flow.infos[number]) is not None
    ):
        return False
    try:
        emit(flow, work, Maker(_Arrays(flow), Constants()), used)
    except (Unfit, Refusal, Conflict, XnnfastError):
        return False
    return True


class _Levels:
    """A partition of the works into XNNPACK's and NumPy's, by levels."""

    def __init__(self, flow: Flow, used: set[int]) -> None:
        self.flow = flow
        self.used = used
        self.inside = {id(work) for work in flow.works if fits(flow, work, used)}

    def assign(self) -> list[tuple[list[Work], list[Work]]]:
        """For each level the works in NumPy, in order, and those in XNNPACK."""
        level: dict[int, tuple[int, bool]] = {}
        found: list[tuple[list[Work], list[Work]]] = []
        for work in self.flow.works:
            inside = id(work) in self.inside
            own = 0
            for number in work.reads():
                if number in level:
                    other, other_inside = level[number]
                    own = max(own, other + (other_inside and not inside))
            for number in work.results:
                level[number] = (own, inside)
            while len(found) <= own:
                found.append(([], []))
            found[own][inside].append(work)
        return found

    def settle(self) -> list[tuple[list[Work], list[Work]]]:
        """The levels, once graphs that would only move elements are NumPy's."""
        while True:
            levels = self.assign()
            idle = [work for _, works in levels for work in _idle(self.flow, works)]
            if not idle:
                return levels
            self.inside.difference_update(map(id, idle))


#: A group of fewer elements, without a delegate, is done in NumPy sooner than another graph is called.
FEW = 1 << 14


def _idle(flow: Flow, works: Sequence[Work]) -> list[Work]:
    """Works of one level in groups that hang together and compute little."""
    group = {id(work): [work] for work in works}
    makers = {number: work for work in works for number in work.results}
    for work in works:
        for number in work.reads():
            other = makers.get(number)
            if other is not None and group[id(other)] is not group[id(work)]:
                joined = group[id(other)] + group[id(work)]
                for member in joined:
                    group[id(member)] = joined
    idle = []
    for work in works:
        members = group[id(work)]
        if not any(isinstance(member, (Delegated, Product)) for member in members):
            busy = [member for member in members if isinstance(member, Kernel) and member.row.name not in MOVING]
            if sum(math.prod(flow.info(member.results[0]).sizes or ()) for member in busy) < FEW:
                idle.append(work)
    return idle


# ---------------------------------------------------------------------------------------------------
# The result


class MergedStep(GraphStep):
    """A graph made of several works."""

    __slots__ = ()

    def __call__(self, env: list[Any]) -> None:
        results = self.runtime.run(*[env[i] if change is None else change(env[i]) for i, change in self.inputs])
        # What follows the program's values are means that must be finite.
        for array in results[len(self.outputs) :]:
            if not math.isfinite(array.item()):
                raise Unsound
        for (index, change), array in zip(self.outputs, results):
            env[index] = array if change is None else change(array)


class CustomStep(Step):
    """Arrays from arrays."""

    __slots__ = ("function", "name")

    def __init__(self, work: Custom) -> None:
        self.instruction = work.instruction
        self.name = work.title
        self.function = work.function
        self.reads, self.writes = tuple(work.sources), tuple(work.results)

    @property
    def title(self) -> str:
        return f"{self.name} in NumPy"

    def __call__(self, env: list[Any]) -> None:
        for index, array in zip(self.writes, self.function(*[env[number] for number in self.reads])):
            env[index] = array


def merge(
    method: Method, shapes: dict[int, Shape] | None = None, *, guarded: bool = False
) -> tuple[Routine, PlanReport]:
    """The merged routine of a method and what is in it. NotMerged says why there is none.

    ``guarded`` leaves the guards of attention where they are.
    """
    try:
        try:
            return _merge(read(method, shapes), guarded=guarded)
        except _Guarded:
            return _merge(read(method, shapes), guarded=True)
    except (GraphError, ShapeError, XnnpackError) as error:
        if isinstance(error, MemoryError):
            raise
        raise NotMerged(f"the joined graph is refused: {error}") from error


class _Guarded(Exception):
    """What a guard was dropped for can't be watched."""


def _merge(flow: Flow, *, guarded: bool) -> tuple[Routine, PlanReport]:
    method = flow.method
    used = _drop_dead(flow)
    if not guarded:
        unguard(flow)
        used = _drop_dead(flow)
    levels = _Levels(flow, used)
    while True:
        parts = levels.settle()
        try:
            steps = _steps(flow, parts, used)
        except _Refused as refused:
            levels.inside.discard(id(refused.work))
            continue
        break
    needed = [watch.work for watch in flow.watches]
    needed += [work for work in flow.works if isinstance(work, Delegated) and work.swaps]
    if any(id(work) not in levels.inside for work in needed):
        raise _Guarded
    env: list[Any] = [None] * len(flow.infos)
    for number, value in flow.known.items():
        env[number] = value
    outputs = []
    for operand in flow.outputs:
        if isinstance(operand, Slot):
            outputs.append(operand.place)
        else:
            assert isinstance(operand, Fixed)
            outputs.append(len(env))
            env.append(operand.value)
    routine = Routine(method, [steps], env, flow.inputs, outputs, flow.states, fresh_values([steps]))
    inside = [work for _, works in parts for work in works]
    outside = [work for works, _ in parts for work in works if not isinstance(work, Delegated)]
    report = PlanReport(
        method.name,
        runtimes=sum(isinstance(step, GraphStep) for step in steps),
        numpy_steps=len(outside),
        evaluated=flow.evaluated,
        lowered=sum(not isinstance(work, Delegated) for work in inside),
        delegates=sum(isinstance(work, Delegated) for work in flow.works),
        merged=True,
        reason="",
        steps=tuple(str(step) for step in steps),
    )
    return routine, report


def _drop_dead(flow: Flow) -> set[int]:
    """Forget works that lead to no output; the numbers that are used."""
    used = {operand.place for operand in flow.outputs if isinstance(operand, Slot)} | {
        end for _, end in flow.states.values()
    }
    live: list[Work] = []
    for work in reversed(flow.works):
        if any(number in used for number in work.results):
            live.append(work)
            used.update(work.reads())
    flow.works = live[::-1]
    flow.watches = [watch for watch in flow.watches if any(watch.work is work for work in live)]
    return used


class _Refused(Exception):
    """A work can't be part of the graph of its level."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work = work


def _steps(flow: Flow, levels: Sequence[tuple[list[Work], list[Work]]], used: set[int]) -> list[Step]:
    made: list[tuple[str, Any]] = []
    place = {number: level for level, (_, works) in enumerate(levels) for work in works for number in work.results}
    wanted = {operand.place for operand in flow.outputs if isinstance(operand, Slot)} | {
        end for _, end in flow.states.values()
    }
    for level, (outside, inside) in enumerate(levels):
        for work in outside:
            wanted.update(work.reads())
        for work in inside:
            wanted.update(number for number in work.reads() if place.get(number) != level)
    for outside, inside in levels:
        made += [("one", work) for work in outside]
        if inside:
            made.append(("graph", _graph(flow, inside, wanted, used)))
    steps: list[Step] = []
    for kind, each in made:
        steps.append(_single(flow, each) if kind == "one" else _merged(flow, *each))
    return steps


def _graph(flow: Flow, works: Sequence[Work], wanted: set[int], used: set[int]) -> tuple[Any, ...]:
    """The graph of a level's works in XNNPACK, with what its externals are."""
    maker = Maker(_Arrays(flow), flow.method.constants)
    for work in works:
        try:
            emit(flow, work, maker, used)
        except (Conflict, Unfit, Refusal):
            raise _Refused(work) from None
    numbers = [number for work in works for number in work.results if number in wanted]
    ids = []
    for number in numbers:
        # Any form will do: orders of dimensions are undone by views.
        form, id = maker.forms[number][0]
        ids.append((External(number, form.order), id))
    outputs: list[int] = []
    for _, id in ids:
        outputs.append(maker.plain_output(id, outputs))
    simplify(maker, outputs)
    maker.watched = [_weighted(maker, id) for id in maker.watched]
    outputs = narrow(maker, outputs)
    outputs += [_average(maker, id) for id in maker.watched]
    method = flow.method
    names = (
        f"instructions {works[0].instruction} to {works[-1].instruction}"
        if len(works) > 1
        else f"instruction {works[0].instruction}"
    )
    # Each delegate and each tensor of the program is below the cap by itself.
    limits = method.file.limits
    graph = maker.finish(
        outputs,
        source=f"{method.file.payload.name}, method {method.name!r}, {names}",
        owner=method.file.payload,
        limits=replace(limits, max_workspace=limits.max_workspace * (len(works) + 1)),
    )
    # Weights that another merged form of the method has packed need not be packed again.
    graph.caches["packed"] = method.packed.setdefault(maker.packing(), weakref.WeakValueDictionary())
    inputs = [maker.inputs[value.id] for value in graph.inputs]
    return graph, inputs, [external for external, _ in ids], list(works)


def _weighted(maker: Maker, weights: int) -> int:
    """The product that weights of attention go into, smaller than they are and as finite; or they themselves."""
    id = weights
    while True:
        readers = [node for node in maker.nodes if id in node.inputs]
        if len(readers) != 1:
            return weights
        (node,) = readers
        if node.op.name == "batch_matrix_multiply" and node.inputs[0] == id:
            return node.outputs[0]
        if node.op.name not in ("static_reshape", "static_reshape_rows", "copy", "multiply"):
            return weights
        id = node.outputs[0]


def _average(maker: Maker, id: int) -> int:
    """A mean of all elements, computed as soon as they are there."""
    count = len(maker.nodes)
    # First along the rows, for which XNNPACK is much faster than for everything at once.
    last = len(maker.shape(id)) - 1
    rows = maker.node("static_reduce", (id,), attrs={"reduction_axes": (last,)}, flags=KEEP_DIMS)
    mean = maker.node("static_reduce", (rows,), attrs={"reduction_axes": tuple(range(last)) or (0,)}, flags=KEEP_DIMS)
    made = maker.nodes[count:]
    place = next(place for place, node in enumerate(maker.nodes) if id in node.outputs)
    maker.nodes[count:] = []
    maker.nodes[place + 1 : place + 1] = made
    return mean


def _change_in(flow: Flow, external: External) -> Any:
    sizes = flow.info(external.number).sizes
    if not sizes:
        return lambda array: array.reshape(1)
    if external.order == tuple(range(len(sizes))):
        return None
    order = external.order
    return lambda array: array.transpose(order)


def _change_out(flow: Flow, external: External) -> Any:
    sizes = flow.info(external.number).sizes
    if not sizes:
        return lambda array: array.reshape(())
    if external.order == tuple(range(len(sizes))):
        return None
    order = inverse(external.order)
    return lambda array: array.transpose(order)


def _merged(
    flow: Flow,
    graph: Graph,
    inputs: Sequence[External],
    outputs: Sequence[External],
    works: Sequence[Work],
) -> Step:
    runtime = flow.method.new_runtime(graph)
    delegates = sum(isinstance(work, Delegated) for work in works)
    title = f"graph of {len(graph.nodes)} nodes: {delegates} delegates, {len(works) - delegates} operators"
    step = MergedStep(
        runtime,
        [Routed(external.number, _change_in(flow, external)) for external in inputs],
        [Routed(external.number, _change_out(flow, external)) for external in outputs],
        title,
        works[0].instruction,
    )
    return step


def _single(flow: Flow, work: Work) -> Step:
    if isinstance(work, Custom):
        return CustomStep(work)
    if isinstance(work, Kernel):
        operands = []
        for operand in work.operands:
            if isinstance(operand, Items):
                operands.append(Items(tuple(_known(flow, part) for part in operand.parts)))
            else:
                operands.append(_known(flow, operand))
        return KernelStep(work.row, operands, work.results, work.specs, work.instruction)
    assert isinstance(work, Delegated)
    inputs = [Routed(number, change) for (number, _), (_, change) in zip(work.takes, work.routed[0])]
    outputs = [Routed(number, change) for (number, _), (_, change) in zip(work.gives, work.routed[1])]
    return GraphStep(flow.method.runtime(work.graph), inputs, outputs, f"delegate {work.delegate}", work.instruction)


def _known(flow: Flow, operand: Any) -> Any:
    return Fixed(flow.known[operand.place]) if isinstance(operand, Slot) and operand.place in flow.known else operand
