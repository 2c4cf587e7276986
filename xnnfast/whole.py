"""The one graph that a program comes down to, for batches.

In comes a Program; out goes a graph that computes all of its method, if joining delegates and operators
leaves nothing else to do. Otherwise the error says what is left over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ._graph import Graph, Node, Value
from .errors import UnsupportedError

if TYPE_CHECKING:
    from .program import GraphStep, Method, Program, Routine

__all__ = ["Whole", "whole"]


class Whole(NamedTuple):
    """A graph that stands for a method."""

    #: Inputs and outputs in the method's order; behind the outputs, values that have to be finite: where one is
    #: not, the graph left out a case that the method provides for, and the method itself has to answer.
    graph: Graph
    watched: int


def whole(program: Program, method: str = "forward") -> Whole:
    """The graph of a method whose inputs are all tensors.

    Raises
    ------
    UnsupportedError
        Something else is left to do; the message lists it.
    """
    asked = program.method(method)
    name = f"{program.file.payload.name}, method {method!r}"
    for position, port in enumerate(asked.inputs):
        if port.kind != "Tensor":
            raise UnsupportedError(f"{name}: input {position} is {port}, a batch needs tensors")
    routine = _routine(asked)
    steps = [] if routine.jumps else [step for step, _ in routine.straight]
    if len(steps) != 1 or not hasattr(steps[0], "runtime") or routine.states:
        raise UnsupportedError(f"{name}, is not one graph, which a batch needs:\n{program.plan(method)}")
    step: GraphStep = steps[0]  # type: ignore[assignment]
    for what, side in (("input", step.inputs), ("output", step.outputs)):
        for routed in side:
            if routed.change is not None:
                raise UnsupportedError(f"{name}: an {what} of the graph has another shape or order of dimensions than "
                                       "the program's, a batch needs the same")
    given = [each.place for each in step.inputs]
    made = [each.place for each in step.outputs]
    unused = [position for position, place in enumerate(routine.inputs) if place not in given]
    constant = [position for position, place in enumerate(routine.outputs) if place not in made]
    if unused or constant:
        which = f"input {unused[0]} is not used" if unused else f"output {constant[0]} is not computed"
        raise UnsupportedError(f"{name}: {which}, a batch needs inputs and outputs that belong to the graph")
    graph = step.runtime.graph
    inputs = [graph.inputs[given.index(place)] for place in routine.inputs]
    outputs = [graph.outputs[made.index(place)] for place in routine.outputs]
    watched = list(graph.outputs[len(made) :])
    if not watched and inputs == list(graph.inputs) and outputs == list(graph.outputs):
        return Whole(graph, 0)
    return Whole(_rebuilt(graph, inputs, outputs, watched, name), len(watched))


def _routine(method: Method) -> Routine:
    if method.is_dynamic and not method.is_single and method.program.merge:
        # Sizes are known once it has run, and a second call with the same is worth joining what can be joined.
        zeros = [np.zeros(port.shape or (), port.dtype) for port in method.inputs]
        for _ in range(2):
            method.run(tuple(zeros))
        known = method._by_shapes.get(tuple(array.shape for array in zeros))
        if isinstance(known, tuple):
            return known[0]
    if not method.is_dynamic and method.program.merge and method.merged is not None:
        return method.merged[0]
    return method.plain


def _rebuilt(graph: Graph, inputs: list[Value], outputs: list[Value], watched: list[Value], name: str) -> Graph:
    """The graph with inputs and outputs in another order, and watched values that are not means over samples."""
    nodes: list[Node] = list(graph.nodes)
    values = {value.id: value for value in graph.values}
    rows = []
    for value in watched:
        # The mean of means along the rows: the latter tell as much, and of which sample.
        mean = graph.producers[value.id]
        source = mean.inputs[0]
        before = graph.producers.get(source)  # type: ignore[arg-type]
        if mean.op.name != "static_reduce" or before is None or before.op.name != "static_reduce":
            raise UnsupportedError(f"{name}: what {mean.where} watches can't be told sample by sample")
        nodes.remove(mean)
        del values[value.id]
        assert source is not None
        values[source] = values[source].replace(is_output=True, external_id=value.external_id)
        rows.append(values[source])
    return Graph(values.values(), nodes, inputs, [*outputs, *rows], dialect=graph.dialect, container=graph.container,
                 version=graph.version, source=graph.source, owner=graph, limits=graph.limits)
