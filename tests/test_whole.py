"""Programs as one graph, for the executor."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

from xnnfast import Program, Runtime, load, load_all
from xnnfast.errors import UnsupportedError
from xnnfast.executor import Executor
from xnnfast.lower import lower_batches
from xnnfast.whole import whole

FOLDER = pathlib.Path(__file__).parents[2] / "shared"

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="the programs are not here")


def path(name):
    (found,) = FOLDER.glob(f"*/{name}/model.pte")
    return found


def numbers(rng, dtype, shape):
    if dtype.kind == "f":
        return rng.uniform(-1, 1, shape).astype(dtype)
    return rng.integers(-100, 100, shape).astype(dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mobilenet_v2_fp32_b1", "mobilenet_v2_qs8_b1"])
def test_a_network_exported_for_one_image_gives_the_same_bits_in_batches(name):
    graph = load(path(name))
    x = numbers(np.random.default_rng(0), graph.inputs[0].dtype, (257, *graph.inputs[0].shape[1:]))
    runtime = Runtime(graph)
    want = np.concatenate([runtime.run(x[i : i + 1])[0] for i in range(len(x))])
    with Executor(graph, workers=2) as executor:
        for count in (1, 3, 32, 257):
            np.testing.assert_array_equal(executor.run(x[:count])[0], want[:count])


#: Its four inputs have 1, 2, 1 and 3 rows, and the output is all of them.
MIXED = ["op_cat4"]


@pytest.mark.parametrize("file", sorted(FOLDER.glob("conformance/*/model.pte")), ids=lambda file: file.parent.name)
def test_every_exported_graph_runs_other_batches(file):
    if file.parent.name in MIXED:
        return
    rng = np.random.default_rng(0)
    for graph in load_all(file):
        lowered = lower_batches(graph)
        batching = lowered.batching
        whole_batch, single = [], []
        for position, value in enumerate(graph.inputs):
            carries = position in batching.inputs
            unit = value.shape[0] // batching.batch if carries else 0
            whole_batch.append(numbers(rng, value.dtype, (3 * unit, *value.shape[1:]) if carries else value.shape))
            single.append(np.concatenate([whole_batch[-1][unit : 2 * unit]] * batching.batch) if carries
                          else whole_batch[-1])
        with Executor(graph, workers=1, micro_batch=2) as executor:
            got = executor.run(*whole_batch)
        want = Runtime(graph).run(*single)
        for id, one, other in zip(lowered.outputs, got, want):
            layout = batching.layouts.get(id)
            if layout is not None:
                blocks = layout.blocks(layout.sized(one.shape, 1))
                one = one.reshape(blocks, 3, -1)[:, 1]
                other = other.reshape(blocks, batching.batch, -1)[:, 0]
            np.testing.assert_array_equal(one, other)


def batch_of(program, count, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((count, *port.shape[1:])).astype(port.dtype) for port in program.inputs()]


def one_by_one(program, arrays, declared):
    made = [program.run(*[np.repeat(array[i : i + 1], declared, 0) for array in arrays]) for i in range(len(arrays[0]))]
    return [np.concatenate([each[position][:1] for each in made]) for position in range(len(program.outputs()))]


# smallcnn_fp32_dyn has two delegates and says that its batch of 15 is an upper bound.
@pytest.mark.parametrize("name", ["bert_mini_fp32_b1", "attn_block_fp32_b2", "smallcnn_fp32_dyn", "mlp_qd8"])
def test_a_program_that_comes_down_to_one_graph_runs_any_batch(name):
    program = Program(path(name))
    declared = program.inputs()[0].shape[0]
    arrays = batch_of(program, 7)
    want = one_by_one(program, arrays, declared)
    for source in (program, path(name)):
        with Executor(source, workers=2) as executor:
            for count in (7, 1, 3):
                for one, other in zip(executor.run(*[array[:count] for array in arrays]), want):
                    np.testing.assert_allclose(one, other[:count], 1e-4, 1e-5)


def test_a_sample_that_the_graph_does_not_provide_for_is_answered_by_the_program():
    program = Program(path("bert_mini_fp32_b1"))
    found = whole(program)
    assert found.watched == 4
    (x,) = batch_of(program, 6)
    with Executor(program, workers=2) as executor:
        asked = []
        run, program.run = program.run, lambda *arrays: asked.append(arrays) or run(*arrays)
        executor.run(x)
        assert not asked
        x[4, 2, 5] = np.nan
        out = np.empty((6, 2), np.float32)
        (y,) = executor.run(x, out=[out])
        assert len(asked) == 1 and np.array_equal(asked[0][0], x[4:5], equal_nan=True) and y is out
        np.testing.assert_array_equal(y[4], run(x[4:5])[0][0])
        (again,) = executor.submit(x).result(60)
        np.testing.assert_array_equal(again, y)


def test_whole_refuses_what_leaves_something_to_do_with_what_that_is():
    with pytest.raises(UnsupportedError, match=r"is not one graph.*\n.*NumPy step"):
        whole(Program(path("bert_mini_fp32_b1"), merge=False))
