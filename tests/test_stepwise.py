"""Programs of several parts in batches: every worker has the program and takes sample after sample."""

from __future__ import annotations

import os

import numpy as np
import pytest
from sketch import Sketch

import xnnfast
from xnnfast import Executor, Program
from xnnfast.errors import ArgumentError, DtypeError, ShapeError, UnsupportedError

F, L = np.float32, np.int64


def top(rows=1, size=8, k=3, *, shared=False):
    """A delegate, then the largest numbers and where they are, which no graph can compute."""
    sketch = Sketch()
    x = sketch.tensor((rows, size))
    y = sketch.shift(x, (rows, size), 2.0)
    inputs = [x]
    if shared:
        offset = sketch.tensor((size,))
        z = sketch.tensor((rows, size))
        sketch.kernel("aten::maximum.out", y, offset, z, z)
        y, inputs = z, [x, offset]
    values, places = sketch.tensor((rows, k)), sketch.tensor((rows, k), L)
    sketch.kernel("aten::topk.values", y, *map(sketch.number, (k, -1, True, True)), values, places,
                  sketch.tensors(values, places))  # fmt: skip
    return sketch.program(inputs, [values, places])


def wanted(x, k=3):
    order = np.argsort(-x, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(x, order, 1) + F(2), order


@pytest.fixture
def numbers():
    return np.random.default_rng(0).permutation(8 * 37).reshape(37, 8).astype(F)


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 3, 37])
def test_every_sample_gets_the_program_s_own_answer(numbers, workers, count):
    x = numbers[:count]
    with Executor(top(), workers=workers) as executor:
        assert executor.graph is None
        assert [(each.shape, each.dtype) for each in (*executor.inputs, *executor.outputs)] == [
            ((1, 8), F), ((1, 3), F), ((1, 3), L)]  # fmt: skip
        values, places = executor.run(x)
        np.testing.assert_array_equal(values, wanted(x)[0])
        np.testing.assert_array_equal(places, wanted(x)[1])
        assert executor.plan.micro_batch == 1 and executor.plan.workers == workers
        out = (np.empty((count, 3), F), np.empty((count, 3), L))
        again = executor.run(np.asfortranarray(x), out=out)
        assert again[0] is out[0] and np.array_equal(out[1], places)


def test_streams_futures_and_trimming_work_as_for_graphs(numbers):
    with Executor(top(), workers=2) as executor:
        futures = [executor.submit(numbers[i : i + 5]) for i in range(0, 37, 5)]
        got = np.concatenate([future.result(60)[0] for future in futures])
        np.testing.assert_array_equal(got, wanted(numbers)[0])
        executor.trim()
        parts = [part for _, part in executor.map(numbers[i : i + 1] for i in range(9))]
        np.testing.assert_array_equal(np.concatenate(parts), wanted(numbers[:9])[1])
        assert set(executor.memory) == {"mapped", "copied", "packed", "workspace", "staging"}


def test_what_all_samples_share_is_given_as_it_is(numbers):
    floor = np.full(8, 100, F)
    with Executor(top(shared=True), workers=2) as executor:
        (values, _) = executor.run(numbers, floor)
    np.testing.assert_array_equal(values, np.sort(np.maximum(numbers + F(2), floor), axis=1)[:, :-4:-1])


def test_arrays_that_do_not_fit_are_refused_before_anything_runs(numbers):
    with Executor(top(), workers=2) as executor:
        for array, error in (
            (numbers.astype(np.float64), DtypeError),
            (numbers[:, :7], ShapeError),
            (numbers[0], ShapeError),
        ):
            with pytest.raises(error, match="input 0"):
                executor.run(array)
        with pytest.raises(ArgumentError, match="need 1 input"):
            executor.run(numbers, numbers)


def test_what_fails_names_its_sample(numbers):
    """An index out of range is an error of the operator, in the sample that has it."""
    sketch = Sketch()
    table, index, out = sketch.constant(np.eye(4, dtype=F)), sketch.tensor((1,), L), sketch.tensor((1, 4))
    sketch.kernel("aten::embedding.out", table, index, *map(sketch.number, (-1, False, False)), out, out)
    values, places = sketch.tensor((1, 2)), sketch.tensor((1, 2), L)
    sketch.kernel("aten::topk.values", out, *map(sketch.number, (2, -1, True, True)), values, places,
                  sketch.tensors(values, places))  # fmt: skip
    with Executor(sketch.program([index], [places]), workers=2) as executor:
        (found,) = executor.run(np.arange(4))
        np.testing.assert_array_equal(found[:, 0], np.arange(4))
        with pytest.raises(xnnfast.XnnfastError, match=r"need indices in 0\.\.3, found 9") as caught:
            executor.run(np.array([0, 1, 2, 9, 3]))
        assert caught.value.sample == 3
        # And it goes on.
        np.testing.assert_array_equal(executor.run(np.arange(4))[0], found)


def test_what_can_t_be_split_into_samples_is_refused_saying_why():
    with pytest.raises(UnsupportedError, match=r"no input has a batch of 1 .*2x8"):
        Executor(top(rows=2))
    with pytest.raises(UnsupportedError, match=r"input 0 is float32 2x8, made for another batch"):
        Executor(top(rows=2), batched=[0])
    with pytest.raises(UnsupportedError, match="precision 'int8-dynamic' needs a graph"):
        Executor(top(), precision="int8-dynamic")
    with pytest.raises(ArgumentError, match="micro_batch"):
        Executor(top(), micro_batch=4)
    sketch = Sketch()
    x = sketch.tensor((1, 8))
    flat = sketch.tensor((3,))
    places = sketch.tensor((3,), L)
    line = sketch.unary("aten::select_copy.int_out", sketch.shift(x, (1, 8)), 0, 0, sizes=(8,))
    sketch.kernel("aten::topk.values", line, *map(sketch.number, (3, -1, True, True)), flat, places,
                  sketch.tensors(flat, places))  # fmt: skip
    with pytest.raises(UnsupportedError, match="output 0 is 3 for one sample"):
        Executor(sketch.program([x], [flat]))


def test_a_forked_child_has_threads_of_its_own(numbers):
    with Executor(top(), workers=2) as executor:
        want = executor.run(numbers)[1]
        pid = os.fork()
        if not pid:
            os._exit(0 if np.array_equal(executor.run(numbers)[1], want) else 1)
        assert os.waitpid(pid, 0)[1] == 0
        np.testing.assert_array_equal(executor.run(numbers)[1], want)


def test_a_program_that_is_not_merged_runs_in_steps(numbers):
    """By the caller's own wish."""
    sketch = Sketch()
    x = sketch.tensor((1, 8))
    y = sketch.unary("aten::relu.out", sketch.shift(x, (1, 8), -40.0), sizes=(1, 8))
    data = sketch.program([x], [y])
    with Executor(data, workers=2) as one, Executor(Program(data, merge=False), workers=2) as steps:
        assert one.graph is not None and steps.graph is None
        np.testing.assert_array_equal(one.run(numbers)[0], steps.run(numbers)[0])
