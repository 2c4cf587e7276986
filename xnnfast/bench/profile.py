"""Time per node of a model, with what the node does and what the machine could do.

In comes a model; out goes a profile: one entry per operator that XNNPACK runs, in running order, averaged over many
invokes, because XNNPACK's clock counts whole microseconds. Times include waking the threads of a pool.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ArgumentError, UnsupportedError
from ..load import load
from . import costs, record
from .measure import random_array, read_array
from .roofline import roof, roofline

if TYPE_CHECKING:
    from .._graph import Graph
    from .._runtime import Runtime
    from ..program import Program

    Array = np.ndarray[Any, np.dtype[Any]]

Facts = dict[str, Any]
#: Each batch of invokes is a runtime of its own, whose first invoke is cold: the median of the batches counts.
BATCHES = 5


def profile(
    model: str | os.PathLike[str],
    *,
    threads: int = 1,
    batch: int | None = None,
    rounds: int | None = None,
    seconds: float = 1.0,
    seed: int = 0,
    inputs: Sequence[str | os.PathLike[str]] = (),
    method: str | None = None,
    weights_cache: bool | str | None = None,
    roof_again: bool = False,
    with_roof: bool = True,
) -> Facts:
    """The profile of a model in a file.

    Parameters
    ----------
    rounds : int, optional
        Invokes; without it as many as fit into ``seconds``, at least 25.
    with_roof : bool
        Measure the machine's roofline if it is not known yet, and relate the nodes to it.
    """
    given = [read_array(name) for name in inputs]
    notes: list[str] = []
    try:
        graph = load(model) if method is None else load(model, method=method)
    except UnsupportedError:
        if batch is not None:
            raise ArgumentError("the batch of a program can't be chosen; leave it out") from None
        nodes, total, used = _of_program(model, threads, rounds, seconds, seed, given, method, notes, weights_cache)
    else:
        nodes, total, used = _of_graph(graph, threads, batch, rounds, seconds, seed, given, weights_cache)
    roof_facts = roofline(threads, again=roof_again) if with_roof else None
    for node in nodes:
        _rate(node, roof_facts)
    if any(node["us"] < 1 for node in nodes):
        notes.append(f"nodes under 1 us are below the resolution of XNNPACK's clock: averages of {used} invokes")
    over = [node for node in nodes if (node["roofline"] or 0) > 1.1 and node["us"] >= 5]
    if over:
        notes.append(f"above the roofline: {len(over)} nodes. It was measured at a bad moment; measure it again")
    return {
        "format": record.PROFILE,
        "version": record.VERSION,
        "model": os.fspath(model),
        "threads": threads,
        "batch": batch,
        "rounds": used,
        "seed": seed,
        "total_us": sum(node["us"] for node in nodes),
        "call_us": total,
        "roofline": roof_facts,
        "nodes": nodes,
        "notes": notes,
    }


def _rate(node: Facts, roof_facts: Facts | None) -> None:
    """GFLOP/s, GB/s and share of the roofline, where the time says something."""
    seconds = node["us"] / 1e6
    told = node["us"] >= 1 and node["index"] >= -1
    node["gflops"] = node["operations"] / seconds / 1e9 if told and node["operations"] else None
    node["gbytes"] = node["bytes"] / seconds / 1e9 if told and node["bytes"] else None
    node["intensity"] = node["operations"] / node["bytes"] if node["bytes"] else None
    node["roofline"] = None
    if roof_facts is not None and told and node["bytes"]:
        least = roof(roof_facts, node["precision"], node["operations"], node["bytes"])
        node["roofline"] = None if least is None else least / seconds


# ---------------------------------------------------------------------------------------------------
# A graph


def _of_graph(
    graph: Graph,
    threads: int,
    batch: int | None,
    rounds: int | None,
    seconds: float,
    seed: int,
    given: Sequence[Array],
    weights_cache: bool | str | None,
) -> tuple[list[Facts], float, int]:
    from .._runtime import Runtime
    from .worker import batched

    if given and len(given) != len(graph.inputs):
        raise ArgumentError(f"need {len(graph.inputs)} input files, got {len(given)}")
    places = batched(graph) if batch is not None else []
    if batch is not None and not places:
        raise ArgumentError("the graph has no input whose batch can be chosen; leave it out")
    # A .npy file can't name bfloat16.
    arrays = [_typed(array, value.dtype) for array, value in zip(given, graph.inputs)]
    if not arrays:
        for place, value in enumerate(graph.inputs):
            assert batch is None or place not in places or value.shape
            shape = (batch, *value.shape[1:]) if batch is not None and place in places else value.shape
            arrays.append(_typed(random_array(str(value.dtype), shape, (seed, place)), value.dtype))
    with Runtime(graph, threads=threads, weights_cache=weights_cache) as runtime:
        call = _timed(lambda: runtime.run(*arrays), seconds / 4)
        return _nodes_of(runtime, arrays, rounds, seconds, call), call, _used(rounds, seconds, call)


def _typed(array: Array, dtype: Any) -> Array:
    return array.view(dtype) if array.dtype == np.dtype("V2") and np.dtype(dtype).itemsize == 2 else array


def _timed(call: Callable[[], object], seconds: float) -> float:
    """Median microseconds of a call after it has become steady."""
    call()
    found: list[float] = []
    end = time.perf_counter() + seconds
    while len(found) < 5 or time.perf_counter() < end:
        start = time.perf_counter_ns()
        call()
        found.append((time.perf_counter_ns() - start) / 1000)
    return statistics.median(found[len(found) // 3 :])


def _used(rounds: int | None, seconds: float, call_us: float) -> int:
    """Invokes in all: a multiple of the batches."""
    if rounds is None:
        rounds = max(25, min(20_000, int(1e6 * seconds / max(call_us, 1))))
    return BATCHES * max(1, -(-rounds // BATCHES))


def _nodes_of(
    runtime: Runtime,
    arrays: Sequence[Array],
    rounds: int | None,
    seconds: float,
    call_us: float,
    part: int | None = None,
) -> list[Facts]:
    """The nodes of a runtime with their times."""
    from ..lower import lower
    from ..shapes import infer

    graph = runtime.graph
    each = _used(rounds, seconds, call_us) // BATCHES
    batches = [runtime.profile(*arrays, rounds=each) for _ in range(BATCHES)]
    times = [statistics.median(row[2] for row in rows) for rows in zip(*batches)]
    lowered = lower(graph)
    known: Mapping[int, tuple[int, ...]] = {}
    if len(lowered.nodes) == len(times):
        known = infer(lowered, dict(zip(lowered.inputs, (array.shape for array in arrays))))
    by_index = {node.index: node for node in graph.nodes}
    made = []
    for place, ((index, kernel, _), us) in enumerate(zip(batches[0], times)):
        entry: Facts = {
            "part": part, "index": index, "kernel": kernel, "us": us, "kind": "copy", "debug_handle": 0, "inputs": [],
            "outputs": [], "bytes": 0, "operations": 0, "precision": "fp32",
        }  # fmt: skip
        if gone := [fusion.node for fusion in runtime.fused if fusion.into == index]:
            entry["fused"] = gone
        node = lowered.nodes[place] if known else by_index.get(index)
        if node is not None:
            value = lowered.value if known else graph.value
            ins = [value(id) for id in node.inputs if id is not None]
            outs = [value(id) for id in node.outputs]
            shape = known or {v.id: v.shape for v in (*ins, *outs)}
            sizes = [shape[v.id] for v in ins], [shape[v.id] for v in outs]
            entry.update(
                kind=node.op.name,
                debug_handle=by_index[index].debug_handle if index in by_index else node.debug_handle,
                inputs=[list(size) for size in sizes[0]],
                outputs=[list(size) for size in sizes[1]],
                datatypes=[v.datatype for v in (*ins, *outs)],
                bytes=costs.traffic([*ins, *outs], shape),
                operations=costs.operations(node.op.name, node.attrs, *sizes),
                precision=costs.precision(node, value),
            )
        made.append(entry)
    return made


# ---------------------------------------------------------------------------------------------------
# A program


def _of_program(
    model: str | os.PathLike[str],
    threads: int,
    rounds: int | None,
    seconds: float,
    seed: int,
    given: Sequence[Array],
    method: str | None,
    notes: list[str],
    weights_cache: bool | str | None,
) -> tuple[list[Facts], float, int]:
    """The nodes of all graphs of a program, and between them what NumPy does."""
    from ..program import GraphStep, NoStep, Program

    with Program(model, threads=threads, weights_cache=weights_cache) as program:
        name = method or ("forward" if "forward" in program.methods else program.methods[0])
        ports = program.inputs(name)
        if given and len(given) != len(ports):
            raise ArgumentError(f"need {len(ports)} input files, got {len(given)}")
        arrays: list[Any] = [
            _typed(array, port.dtype) if port.kind == "Tensor" else port.value for array, port in zip(given, ports)
        ]
        if not arrays:
            for place, port in enumerate(ports):
                if port.kind != "Tensor":
                    arrays.append(port.value)
                else:
                    assert port.shape is not None
                    arrays.append(_typed(random_array(str(port.dtype), port.shape, (seed, place)), port.dtype))
        call = _timed(lambda: program.run(*arrays, method=name), seconds / 4)
        routine, taken = _routine(program, name, arrays)
        if routine.jumps:
            raise UnsupportedError(f"method {name!r} has jumps: its steps differ from call to call")
        repeats = max(5, min(1000, int(5e5 * seconds / max(call, 1))))
        spans: list[list[float]] = [[] for _ in routine.straight]
        held: list[list[Any]] = [[] for _ in routine.straight]
        for turn in range(repeats):
            _walk(routine, taken, spans, held if turn == 0 else None)
        nodes: list[Facts] = []
        graph_us = 0.0
        used = _used(rounds, seconds, call)
        for place, (step, _) in enumerate(routine.straight):
            us = statistics.median(spans[place])
            if isinstance(step, GraphStep):
                graph_us += us
                nodes += _nodes_of(step.runtime, held[place], used, seconds, call, part=place)
            elif not isinstance(step, NoStep):
                nodes.append(
                    {
                        "part": place, "index": -2, "kernel": "NumPy", "us": us,
                        "kind": getattr(step, "name", type(step).__name__), "debug_handle": 0, "inputs": [],
                        "outputs": [list(array.shape) for array in held[place] if isinstance(array, np.ndarray)],
                        "bytes": 0, "operations": 0, "precision": "fp32",
                    }
                )  # fmt: skip
        graphs = sum(isinstance(step, GraphStep) for step, _ in routine.straight)
        notes.append(
            f"method {name!r}: {graphs} graphs in XNNPACK take {graph_us / 1000:.3g} ms, a call {call / 1000:.3g} ms; "
            f"{len(routine.straight) - graphs} steps in NumPy and the rest are Python"
        )
        return nodes, call, used


def _routine(program: Program, name: str, arrays: Sequence[Any]) -> tuple[Any, list[Any]]:
    """The steps that a call of the method really runs, and what it starts them with."""
    from ..program import Routine

    seen: list[tuple[Any, list[Any]]] = []
    original = Routine.run

    def run(self: Any, inputs: list[Any], *rest: Any) -> Any:
        seen.append((self, list(inputs)))
        return original(self, inputs, *rest)

    Routine.run = run  # type: ignore[method-assign,assignment]
    try:
        # The method itself: a program that is one graph is run by a shorter way.
        program.method(name).run(tuple(arrays))
    finally:
        Routine.run = original  # type: ignore[method-assign]
    return seen[-1]


def _walk(routine: Any, inputs: Sequence[Any], spans: list[list[float]], held: list[list[Any]] | None) -> None:
    """One call, step by step. With ``held``: keep what graphs are given, and what other steps give."""
    from ..program import GraphStep

    env = list(routine.env)
    for index, array in zip(routine.inputs, inputs):
        env[index] = array
    method = routine.method
    for index, (begin, _) in routine.states.items():
        env[begin] = method.state[index] if index in method.state else method.initial(index)
    for place, (step, ends) in enumerate(routine.straight):
        if held is not None and isinstance(step, GraphStep):
            held[place] = [env[index] if change is None else change(env[index]) for index, change in step.inputs]
        start = time.perf_counter_ns()
        step(env)
        spans[place].append((time.perf_counter_ns() - start) / 1000)
        if held is not None and not isinstance(step, GraphStep):
            held[place] = [env[index] for index in step.writes]
        for index in ends:
            env[index] = None
    for index, (_, end) in routine.states.items():
        method.state[index] = env[end]


# ---------------------------------------------------------------------------------------------------
# Two profiles


def _name(node: Facts) -> tuple[Any, ...]:
    return node["kind"], tuple(map(tuple, node["outputs"]))


def diff(a: Facts, b: Facts) -> Facts:
    """Node by node: nodes of the same kind and shape belong together, in running order; largest differences first."""
    notes = []
    for what in ("threads", "batch"):
        if a[what] != b[what]:
            notes.append(f"{what} differ: {a[what]} and {b[what]}")
    rows: list[Facts] = []
    for one, other in _align(a["nodes"], b["nodes"]):
        times = [0.0 if each is None else each["us"] for each in (one, other)]
        rows.append(
            {
                "a": one,
                "b": other,
                "difference_us": times[1] - times[0],
                "ratio": times[1] / times[0] if min(times) >= 1 else None,
            }
        )
    rows.sort(key=lambda row: -abs(float(row["difference_us"])))
    return {
        "format": "xnnfast-profile-diff",
        "version": record.VERSION,
        "a": a["model"],
        "b": b["model"],
        "total_us": [a["total_us"], b["total_us"]],
        "rows": rows,
        "notes": notes,
    }


def _align(a: Sequence[Facts], b: Sequence[Facts]) -> list[tuple[Facts | None, Facts | None]]:
    from difflib import SequenceMatcher

    matcher = SequenceMatcher(None, [_name(node) for node in a], [_name(node) for node in b], autojunk=False)
    found: list[tuple[Facts | None, Facts | None]] = []
    for tag, i, i_end, j, j_end in matcher.get_opcodes():
        if tag == "equal":
            found += zip(a[i:i_end], b[j:j_end])
        else:
            found += [(node, None) for node in a[i:i_end]]
            found += [(None, node) for node in b[j:j_end]]
    return found


# ---------------------------------------------------------------------------------------------------
# Chrome's trace


def trace(facts: Facts) -> Facts:
    """The profile as a trace for chrome://tracing or Perfetto: one call, its nodes end to end at their mean times."""
    events: list[Facts] = [
        {"ph": "M", "pid": 1, "tid": 1, "name": "process_name", "args": {"name": f"xnnfast: {facts['model']}"}},
        {"ph": "M", "pid": 1, "tid": 1, "name": "thread_name", "args": {"name": "one call, mean times"}},
    ]
    start = 0.0
    for node in facts["nodes"]:
        events.append(
            {
                "ph": "X",
                "pid": 1,
                "tid": 1,
                "ts": round(start, 4),
                "dur": round(node["us"], 4),
                "name": node["kind"],
                "cat": node["kernel"],
                "args": {
                    key: node[key]
                    for key in (
                        "index", "part", "kernel", "debug_handle", "inputs", "outputs", "bytes", "operations", "gflops",
                        "roofline",
                    )
                },
            }
        )  # fmt: skip
        start += node["us"]
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"rounds": facts["rounds"]}}
