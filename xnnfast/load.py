"""Opening files: from a path or a buffer to Graphs.

In comes whatever names the bytes; out comes the one graph in it, or all of them. Nothing is picked
silently: where there is a choice, the error lists it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from . import _reader
from ._graph import Value
from ._payload import Payload
from .caps import DEFAULT_LIMITS, Limits
from .containers import (
    XNNPACK_BACKEND,
    Blob,
    DelegateCall,
    FreeCall,
    KernelCall,
    MoveCall,
    Plan,
    ProgramFile,
    Section,
    Tensor,
    sections,
    sniff,
)
from .errors import ArgumentError, FormatError, GraphError, UnsupportedError

if TYPE_CHECKING:
    from ._graph import Graph
    from ._payload import Source
    from .containers import DataArgument

__all__ = ["load", "load_all"]

_PROGRAMS = (b"ET12", b"BP08")
_DATATYPES = {"float32": "fp32", "float16": "fp16", "int32": "int32"}


def load(
    source: Source | Payload,
    *,
    dialect: str | None = None,
    copy: bool | None = None,
    quantization: Mapping[int, tuple[float, int]] | None = None,
    delegate: int | None = None,
    method: str | None = None,
    data: DataArgument = (),
    limits: Limits | None = None,
) -> Graph:
    """The graph in a file or buffer, verified and validated; its constants stay where they are.

    The graph keeps the file mapped, or the buffer exported, for as long as it or an array of its
    constants lives. A ``.pte`` whose method is nothing but one XNNPACK delegate gives that delegate's
    graph with inputs and outputs in the program's order.

    Parameters
    ----------
    source : path or buffer
        A file is mapped, and must not change in place while the graph lives. A buffer is held, and its constants are
        copied if it is writable.
    dialect : "seed", "xn00" or "xn01", optional
        Overrules what the bytes say.
    copy : bool, optional
        None copies a constant only if XNNPACK can't read it in place, True copies all, False raises
        AlignmentError instead. ``Constant.reason`` tells why one was copied.
    quantization : dict of int to (float, int), optional
        Scale and zero point by value id, for quantized values of files that store none.
    delegate : int, optional
        Which delegate of a ``.pte`` to take, as a graph by itself: its inputs and outputs stay in its own order.
    method : str, optional
        Which method of a ``.pte`` to take, if it has several.
    data : path or buffer, or list of them
        Data files (``.ptd``) with constants that the file refers to by name.
    limits : Limits, optional
        Caps on what a file may ask for.

    Returns
    -------
    Graph

    Raises
    ------
    OSError
        The file can't be opened or mapped.
    ArgumentError
        There is no such method or delegate, or none can be named because the file is no program.
    FormatError, GraphError, ShapeError, LimitError, AlignmentError
        The bytes are not what they claim to be, or mean nothing that XNNPACK computes.
    UnsupportedError
        The program is more than one graph; the message lists its parts.
    """
    limits = limits or DEFAULT_LIMITS
    payload = Payload.open(source)
    if sniff(payload) in _PROGRAMS:
        program = ProgramFile(payload, data=data, limits=limits)
        plan = program.plan(method)
        if delegate is None:
            return _whole(program, plan, dialect, copy, quantization)
        if not 0 <= delegate < len(plan.delegates):
            raise ArgumentError(
                f"need a delegate from 0 to {len(plan.delegates) - 1} of method {plan.name!r}, found {delegate}"
                if plan.delegates
                else f"method {plan.name!r} has no delegates, found delegate={delegate}"
            )
        section = program.section(plan, delegate)
    else:
        for name, given in (("delegate", delegate), ("method", method)):
            if given is not None:
                raise ArgumentError(f"{name}= is for programs (.pte); {payload.name} holds one graph by itself")
        (section,) = sections(payload, data=data, limits=limits)
    return _reader.read(section, dialect, copy=copy, quantization=quantization, limits=limits).graph()


def load_all(
    source: Source | Payload,
    *,
    dialect: str | None = None,
    copy: bool | None = None,
    quantization: Mapping[int, tuple[float, int]] | None = None,
    data: DataArgument = (),
    limits: Limits | None = None,
) -> list[Graph]:
    """Every graph in a file or buffer, each by itself, in the file's order.

    Parameters
    ----------
    source, dialect, copy, quantization, data, limits
        As for :func:`load`.

    Returns
    -------
    list of Graph
        One for a graph file; of a program one for each XNNPACK delegate of each method, with inputs and outputs
        in the delegate's own order.

    Raises
    ------
    FormatError, GraphError, ShapeError, LimitError, AlignmentError, UnsupportedError
        Any of them is wrong: all are checked, or none is given.
    """
    limits = limits or DEFAULT_LIMITS
    payload = Payload.open(source)
    return [
        _reader.read(section, dialect, copy=copy, quantization=quantization, limits=limits).graph()
        for section in sections(payload, data=data, limits=limits)
    ]


# ---- a program that is one graph


def _whole(
    program: ProgramFile,
    plan: Plan,
    dialect: str | None,
    copy: bool | None,
    quantization: Mapping[int, tuple[float, int]] | None,
) -> Graph:
    """The graph of a method's only call, routed as the method routes it."""
    call, refusal = _only_call(plan)
    if call is None:
        raise UnsupportedError(
            f"{program.payload.name}, method {plan.name!r}, is not one graph: {refusal}; {_contents(plan)}. "
            "xnnfast.Program runs it; load(..., delegate=k) or load_all() gives single graphs"
        )
    section: Section = program.section(plan, call.delegate_index)
    decoded = _reader.read(section, dialect, copy=copy, quantization=quantization, limits=program.limits)
    try:
        _route(program, plan, call, decoded, copy)
    except _NotRouted as reason:
        raise UnsupportedError(
            f"{program.payload.name}, method {plan.name!r}, is not one graph: {reason}; {_contents(plan)}. "
            "xnnfast.Program runs it; load(..., delegate=k) gives the graph by itself"
        ) from None
    decoded.source = program.payload.name
    return decoded.graph()


class _NotRouted(Exception):
    """Why a method's inputs and outputs are not those of its delegate."""


def _only_call(plan: Plan) -> tuple[DelegateCall | None, str]:
    """The call of a method that is nothing else, or None and why it is more."""
    if len(plan.chains) != 1:
        return None, f"it has {len(plan.chains)} chains"
    work = [each for each in plan.chains[0].instructions if not isinstance(each, FreeCall)]
    calls = [each for each in work if isinstance(each, DelegateCall)]
    if len(work) != len(calls):
        return None, f"{len(work) - len(calls)} of its {len(work)} instructions are no delegate calls"
    if len(calls) != 1:
        return None, f"it calls delegates {len(calls)} times"
    backend = plan.delegates[calls[0].delegate_index].id
    if backend != XNNPACK_BACKEND:
        return None, f"its delegate is of {backend}"
    return calls[0], ""


def _contents(plan: Plan) -> str:
    """What a method consists of, by name."""
    kernels: dict[str, int] = {}
    calls: dict[str, int] = {}
    for chain in plan.chains:
        for each in chain.instructions:
            if isinstance(each, KernelCall):
                name = str(plan.operators[each.op_index])
                kernels[name] = kernels.get(name, 0) + 1
            elif isinstance(each, DelegateCall):
                name = plan.delegates[each.delegate_index].id
                calls[name] = calls.get(name, 0) + 1
            elif not isinstance(each, FreeCall):
                name = "a move" if isinstance(each, MoveCall) else "a jump"
                kernels[name] = kernels.get(name, 0) + 1
    parts = [f"{count} call{'s' if count > 1 else ''} of {name}" for name, count in calls.items()]
    parts += [f"undelegated {name}{f' ({count} times)' if count > 1 else ''}" for name, count in kernels.items()]
    return f"it has {', '.join(parts)}" if parts else "it has no instructions"


def _route(program: ProgramFile, plan: Plan, call: DelegateCall, decoded: _reader.Decoded, copy: bool | None) -> None:
    """Order inputs and outputs as the method does, and put its constants in the place of inputs."""
    args = call.args
    externals = {*decoded.inputs, *decoded.outputs}
    if len(externals) != len(args):
        raise GraphError(
            f"delegate {call.delegate_index} has {len(externals)} external values, its call has {len(args)} "
            "arguments: need as many"
        )
    inputs: dict[int, Value] = {}
    outputs: dict[int, Value] = {}
    for value in decoded.inputs:
        index = args[_external(value)]
        tensor = _tensor(plan, index, value)
        if tensor.is_constant and index not in plan.inputs:
            constant = _constant(program, tensor, value, copy)
            if value.is_output:
                raise _NotRouted(f"output value {value.id} of the delegate is a constant of the program")
            decoded.replace_value(value, value.replace(is_input=False, external_id=None, constant=constant))
        elif index in inputs:
            raise _NotRouted(f"value {index} of the program is two inputs of the delegate")
        else:
            inputs[index] = value
    for value in decoded.outputs:
        index = args[_external(value)]
        _tensor(plan, index, value)
        if index in outputs:
            raise _NotRouted(f"value {index} of the program is two outputs of the delegate")
        outputs[index] = value
    for place, index in enumerate(plan.inputs):
        if index not in inputs:
            inputs[index] = _unused(plan, place, index, decoded)
    for name, listed, known in (("input", plan.inputs, inputs), ("output", plan.outputs, outputs)):
        for place, index in enumerate(listed):
            if index not in known:
                raise _NotRouted(f"{name} {place} of the program is no {name} of the delegate")
        if len(set(listed)) != len(listed):
            raise _NotRouted(f"the program lists an {name} twice")
    for index, value in inputs.items():
        if index not in plan.inputs:
            raise _NotRouted(f"input value {value.id} of the delegate is neither input nor constant of the program")
    decoded.inputs = [inputs[index] for index in plan.inputs]
    for index, value in outputs.items():
        if index not in plan.outputs and not value.is_input:
            # Computed, but not asked for.
            decoded.replace_value(value, value.replace(is_output=False, external_id=None))
    decoded.outputs = [outputs[index] for index in plan.outputs]


def _external(value: Value) -> int:
    assert value.external_id is not None, "inputs and outputs have one"
    return value.external_id


def _unused(plan: Plan, place: int, index: int, decoded: _reader.Decoded) -> Value:
    """An input for something that the program takes and its delegate doesn't."""
    tensor = plan.values[index]
    datatype = _DATATYPES.get(str(tensor.dtype)) if isinstance(tensor, Tensor) else None
    if datatype is None:
        raise _NotRouted(f"input {place} of the program is no input of the delegate, and of a type that no graph has")
    made = Value(
        max((value.id for value in decoded.values), default=-1) + 1,
        datatype,
        tensor.shape,
        is_input=True,
        external_id=max((value.external_id for value in decoded.values if value.external_id is not None), default=-1)
        + 1,
    )
    decoded.values.append(made)
    return made


def _tensor(plan: Plan, index: int, value: Value) -> Tensor:
    """A tensor of the program that holds an external value of the delegate."""
    tensor = plan.values[index]
    if not isinstance(tensor, Tensor):
        raise FormatError(f"need a tensor as value {index} of method {plan.name!r}, found {plan.values.kind(index)}")
    # A scalar of the program is stored as one element of rank 1.
    if tensor.shape != value.shape and not (not tensor.sizes and value.shape == (1,)):
        raise GraphError(
            f"value {index} of method {plan.name!r} is {list(tensor.shape)} in memory, value {value.id} of the "
            f"delegate is declared {list(value.shape)}: need the same",
            value=value.id,
        )
    return tensor


def _constant(program: ProgramFile, tensor: Tensor, value: Value, copy: bool | None) -> object:
    blob: Blob = program.constant(tensor)
    if tensor.dtype.itemsize * 8 != _reader.bits_of(value.datatype):
        raise GraphError(
            f"a constant of {tensor.dtype} in the program is value {value.id} of the delegate, declared "
            f"{value.datatype}",
            value=value.id,
        )
    return _reader.constant_at(blob.payload, blob.offset, blob.nbytes, tensor.data_buffer_idx, copy=copy)
