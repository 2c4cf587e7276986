"""Caps on what a file, or an input, may ask for: where each holds, that it can be raised, and that it costs nothing."""

from __future__ import annotations

import pathlib

import files
import numpy as np
import pytest

import xnnfast
from xnnfast import GraphBuilder, LimitError, Program, Runtime, load
from xnnfast.caps import DEFAULT_LIMITS, Limits
from xnnfast.executor import Executor

F = np.float32


def stretched():
    """x of 1xN and y of Nx1 give NxN: a small input leads to a large value."""
    b = GraphBuilder()
    b.output(b.add(b.input((1, 4)), b.input((4, 1))))
    return b.finish()


def test_every_cap_is_an_error_of_memory_that_names_its_option():
    for limits, data in (
        (Limits(max_workspace=50), files.bare()),
        (Limits(max_tables=5), files.bare()),
        (Limits(max_depth=2), files.bare()),
        (Limits(max_externs=1), files.bare()),
    ):
        (name,) = [name for name, value in vars(limits).items() if value != getattr(DEFAULT_LIMITS, name)]
        with pytest.raises(MemoryError, match=f"{name} of Limits raises") as told:
            load(data, limits=limits)
        assert isinstance(told.value, LimitError)
        assert len(load(data).nodes) == 1


def test_shapes_of_a_run_are_held_to_the_cap():
    graph = load(stretched(), limits=Limits(max_workspace=1 << 20))
    runtime = Runtime(graph)
    x, y = np.ones((1, 500), F), np.ones((500, 1), F)
    np.testing.assert_array_equal(runtime.run(x, y)[0], np.full((500, 500), 2, F))
    staged = runtime.staged
    with pytest.raises(LimitError, match=r"would take \d+ bytes, the largest of them 600x600 fp32.*max_workspace"):
        runtime.run(np.ones((1, 600), F), np.ones((600, 1), F))
    # Nothing was made for it, and the runtime goes on.
    assert runtime.staged == staged
    np.testing.assert_array_equal(runtime.run(x, y)[0], np.full((500, 500), 2, F))
    wide = Runtime(load(stretched(), limits=Limits(max_workspace=1 << 22)))
    assert wide.run(np.ones((1, 600), F), np.ones((600, 1), F))[0].shape == (600, 600)


def test_a_terabyte_by_broadcasting_is_refused_at_once():
    runtime = Runtime(load(stretched()))
    x = xnnfast.empty((1, 1 << 19))
    with pytest.raises(LimitError, match="524288x524288"):
        runtime.run(x, x.reshape(-1, 1))


def pooled(window, **limits):
    b = GraphBuilder()
    b.output(b.average_pooling2d(b.input((1, 8, 8, 1)), window, padding=(window - 1, 0, 0, window - 1), stride=1))
    return load(b.finish(), limits=Limits(**limits)), window


def test_tables_of_pointers_are_held_to_the_cap():
    """8x8 places of 500x500 taps are 128 MB of pointers for 512 bytes of numbers."""
    graph, _ = pooled(500)
    Runtime(graph)
    with pytest.raises(LimitError, match=r"128000000 bytes of pointers for 250000 taps at 8x8.*max_indirection"):
        pooled(500, max_indirection=100_000_000)
    with pytest.raises(LimitError, match="max_indirection"):
        pooled(1000)
    graph, _ = pooled(4, max_indirection=1 << 20)
    runtime = Runtime(graph)
    runtime.run(np.ones((1, 9, 9, 1), F))


def test_tables_in_proportion_to_the_image_are_not_capped():
    # A 3x3 window over a megapixel: 72 MB of pointers beside 8 MB of numbers.
    b = GraphBuilder()
    b.output(b.max_pooling2d(b.input((1, 8, 8, 1)), 3, stride=1))
    runtime = Runtime(load(b.finish(), limits=Limits(max_indirection=1 << 20)))
    assert runtime.run(np.ones((1, 1000, 1000, 1), F))[0].shape == (1, 998, 998, 1)


def test_an_empty_batch_is_held_to_the_cap_too():
    b = GraphBuilder()
    b.output(b.static_constant_pad(b.input((1, 1)), (0, 0), (0, 1000)))
    runtime = Runtime(load(b.finish(), limits=Limits(max_workspace=1 << 20)))
    assert runtime.run(np.ones((0, 1), F))[0].shape == (0, 1001)
    with pytest.raises(LimitError):
        runtime.run(np.ones((300, 1), F))


def test_the_engine_is_not_asked():
    """The refusal comes from the shape rules: no engine is made or changed for such a shape."""
    runtime = Runtime(load(stretched(), limits=Limits(max_workspace=1 << 16)))
    before = runtime.memory
    for _ in range(3):
        with pytest.raises(LimitError):
            runtime.run(np.ones((1, 4000), F), np.ones((4000, 1), F))
    assert runtime.memory == before


def test_pieces_of_an_executor_are_held_to_the_cap():
    b = GraphBuilder()
    b.output(b.negate(b.negate(b.input((1, 1000)))))
    graph = load(b.finish(), limits=Limits(max_workspace=100_000))
    with Executor(graph, workers=1, micro_batch=4) as executor:
        # Any number of samples, since only pieces of four are in the engine at once.
        assert executor.run(np.ones((1000, 1000), F))[0].shape == (1000, 1000)
    with Executor(graph, workers=1, micro_batch=64) as executor, pytest.raises(LimitError, match="max_workspace"):
        executor.run(np.ones((1000, 1000), F))


def test_instructions_of_a_call_are_capped():
    data = (pathlib.Path(__file__).parent / "hostile/endless-loop.pte").read_bytes()
    x = np.ones((1, 8), F)
    with pytest.raises(LimitError, match=r"has run 100 instructions.*max_steps"):
        Program(data, limits=Limits(max_steps=100)).run(x)


def test_jumps_that_end_are_not_concerned():
    values = [files.tensor(), files.tensor(), {"val": ("Bool", {"bool_val": False})}]
    jump = {"instr_args": ("JumpFalseCall", {"cond_value_index": 2, "destination_instruction": 2})}
    move = {"instr_args": ("MoveCall", {"move_from": 0, "move_to": 1})}
    plan = files.plan(values=values, chains=[{"instructions": [move, jump]}], delegates=[])
    program = Program(files.program(plan, header=False), limits=Limits(max_steps=2))
    np.testing.assert_array_equal(program.run(np.ones((1, 8), F))[0], np.ones((1, 8), F))


def test_limits_are_kept_with_the_graph():
    limits = Limits(max_workspace=1 << 20)
    assert load(files.bare(), limits=limits).limits is limits
    assert load(files.bare()).limits is DEFAULT_LIMITS
    b = GraphBuilder()
    b.output(b.negate(b.input((1,))))
    assert b.graph().limits is DEFAULT_LIMITS
