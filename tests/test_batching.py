"""Which axis is the batch, and graphs that run another one than they were exported for."""

from __future__ import annotations

import math
import random
import re

import numpy as np
import pytest
from op_graphs import CASES, built

from xnnfast import reference
from xnnfast._runtime import Runtime
from xnnfast.batching import Layout, layouts_of
from xnnfast.builder import GraphBuilder
from xnnfast.errors import ArgumentError, GraphError, ShapeError
from xnnfast.lower import lower, lower_batches
from xnnfast.quantization import PerChannel, PerToken


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)


def graph_of(make, *shapes, outputs=1):
    b = GraphBuilder()
    made = make(b, *[b.input(shape) for shape in shapes])
    for value in made if isinstance(made, tuple) else (made,):
        b.output(value)
    return b.graph()


def layout(graph, output=0, **options):
    lowered = lower_batches(graph, **options)
    return tuple(lowered.batching.layouts[lowered.outputs[output]])


def reason(graph, **options):
    with pytest.raises(GraphError) as caught:
        lower_batches(graph, **options)
    assert "the batch can't be changed: node" in str(caught.value)
    assert caught.value.node is not None
    return str(caught.value)


def samples(array, where, batch):
    """Sample number -> what the array holds of it."""
    blocks = where.blocks(array.shape)
    return np.moveaxis(array.reshape(blocks, batch, -1), 1, 0)


def check_rows(graph, batches, *, seed=0, tolerance=1e-4):
    """Every batch gives for each sample what the declared batch gives, whose samples are all that one."""
    lowered = lower_batches(graph)
    declared = lowered.batching.batch
    rng = np.random.default_rng(seed)
    biggest = max(batches)
    full, once = [], []
    for position, value in enumerate(graph.inputs):
        if position in lowered.batching.inputs:
            unit = value.shape[0] // declared
            full.append(rng.uniform(-1, 1, (biggest * unit, *value.shape[1:])).astype(value.dtype))
        else:
            full.append(rng.uniform(-1, 1, value.shape).astype(value.dtype))
        once.append(full[-1])
    expected = []
    for sample in range(biggest):
        for position in lowered.batching.inputs:
            unit = graph.inputs[position].shape[0] // declared
            rows = full[position][sample * unit : (sample + 1) * unit]
            once[position] = np.concatenate([rows] * declared)
        expected.append(reference.run(graph, *once))
    runtime = Runtime(graph)
    for batch in batches:
        arrays = list(full)
        for position in lowered.batching.inputs:
            unit = graph.inputs[position].shape[0] // declared
            arrays[position] = full[position][: batch * unit]
        for position, got in enumerate(runtime.run(*arrays)):
            where = lowered.batching.layouts.get(lowered.outputs[position])
            for sample in range(batch):
                want = expected[sample][position]
                if where is None:
                    np.testing.assert_allclose(got, want, tolerance, tolerance)
                else:
                    np.testing.assert_allclose(
                        samples(got, where, batch)[sample], samples(want, where, declared)[0], tolerance, tolerance)


# ---------------------------------------------------------------------------------------------------
# Where the batch lies


@pytest.mark.parametrize(("shape", "blocks", "batch", "found"), [
    ((1, 8), 1, 1, [(0, 1, 1), (1, 1, 8)]),
    ((8,), 1, 1, [(0, 1, 8)]),
    ((1, 1, 8), 1, 1, [(0, 1, 1), (1, 1, 1), (2, 1, 8)]),
    ((4, 1, 8), 4, 1, [(1, 1, 1), (2, 1, 8), (0, 4, 1)]),
    ((32,), 4, 1, [(0, 4, 8)]),
    ((8, 16), 1, 2, [(0, 1, 4)]),
    ((8, 16), 4, 2, [(0, 4, 1)]),
    ((6, 4), 2, 2, []),
    ((6, 5), 3, 2, [(0, 3, 1)]),
])
def test_layouts_of_a_shape(shape, blocks, batch, found):
    assert [tuple(each) for each in layouts_of(shape, blocks, batch)] == found


def test_layout_counts_blocks_and_makes_shapes():
    where = Layout(1, 2, 3)
    assert where.blocks((5, 24, 7)) == 10
    assert where.sized((5, 24, 7), 9) == (5, 54, 7)


@pytest.mark.parametrize("batch", [1, 2])
def test_batch_moves_with_a_transpose(batch):
    assert layout(graph_of(lambda b, x: b.static_transpose(x, (1, 2, 0)), (batch, 3, 4))) == (2, 1, 1)


@pytest.mark.parametrize("batch", [1, 2])
def test_batch_merges_with_heads_and_comes_out_again(batch):
    def make(b, x):
        heads = b.static_transpose(b.static_reshape(x, (batch, 5, 4, 6)), (0, 2, 1, 3))
        merged = b.static_reshape(heads, (batch * 4, 5, 6))
        scores = b.softmax(b.batch_matrix_multiply(merged, merged, transpose_b=True))
        mixed = b.static_reshape(b.batch_matrix_multiply(scores, merged), (batch, 4, 5, 6))
        return b.static_reshape(b.static_transpose(mixed, (0, 2, 1, 3)), (batch, 5, 24))

    graph = graph_of(make, (batch, 5, 24))
    assert layout(graph) == (0, 1, 1)
    check_rows(graph, (1, 3, 8))


def test_an_output_without_a_batch_axis_of_its_own_holds_samples_one_after_the_other():
    graph = graph_of(lambda b, x: b.static_reshape(x, (6,)), (1, 6))
    assert layout(graph) == (0, 1, 6)
    check_rows(graph, (1, 3))


def test_the_open_reading_that_later_nodes_need_is_found():
    # 1x1x8 may hold the batch on axis 0 or 1; the sum with 1x4x8, whose batch is on axis 0, decides.
    def make(b, x, y):
        return b.add(b.static_transpose(b.static_reshape(x, (1, 1, 8)), (1, 0, 2)), b.static_transpose(y, (1, 0, 2)))

    graph = graph_of(make, (1, 8), (1, 4, 8))
    assert layout(graph) == (1, 1, 1)
    check_rows(graph, (1, 3))


def test_rows_that_a_fully_connected_layer_merges_follow_the_batch():
    def make(b, x):
        rows = b.node("fully_connected", [x, numbers(5, 4), None], flags=0x4)[0]
        return b.static_reshape(rows, (2, 3, 5))

    graph = graph_of(make, (2, 3, 4))
    assert layout(graph) == (0, 1, 1)
    check_rows(graph, (1, 2, 7))
    with pytest.raises(ShapeError, match="15 behind, found 2x6x5"):
        Runtime(graph).run(numbers(2, 6, 4))


# ---------------------------------------------------------------------------------------------------
# Which inputs carry it


def test_inputs_of_another_size_are_shared_by_all_samples():
    graph = graph_of(lambda b, x, y: b.batch_matrix_multiply(x, y), (2, 3, 4), (1, 4, 5))
    assert lower_batches(graph).batching.inputs == (0,)
    check_rows(graph, (1, 5))


def test_a_lone_number_is_shared_by_all_samples():
    graph = graph_of(lambda b, x, y: b.multiply(x, y), (1, 4), (1,))
    assert lower_batches(graph).batching.inputs == (0,)
    check_rows(graph, (3,))


def test_the_size_that_most_inputs_have_is_the_batch():
    graph = graph_of(lambda b, x, y, z: b.concatenate([b.add(x, y), z], 1), (1, 4), (8, 4), (8, 3))
    assert lower_batches(graph).batching.inputs == (1, 2)


def test_the_user_names_the_inputs_that_carry_the_batch():
    graph = graph_of(lambda b, x, y: (b.tanh(x), b.tanh(y)), (4, 3), (4, 3))
    lowered = lower_batches(graph, inputs=[1])
    assert lowered.batching.inputs == (1,)
    assert [id in lowered.batching.layouts for id in lowered.outputs] == [False, True]
    assert lower_batches(graph, inputs=[1]) is lowered
    with pytest.raises(ArgumentError, match="0 to 1, found 2"):
        lower_batches(graph, inputs=[2])


def test_an_input_may_have_several_rows_per_sample():
    graph = graph_of(lambda b, x, y: b.add(b.static_reshape(x, (2, 3, 4)), y), (6, 4), (2, 3, 4))
    lowered = lower_batches(graph, batch=2)
    assert lowered.batching.inputs == (0, 1)
    assert lowered.batching.layouts[lowered.inputs[0]] == (0, 1, 3)
    with pytest.raises(ArgumentError, match="no multiple of the batch 4"):
        lower_batches(graph, inputs=[0, 1], batch=4)


# ---------------------------------------------------------------------------------------------------
# Refusals


@pytest.mark.parametrize(("make", "shapes", "words"), [
    (lambda b, x: b.softmax(b.static_transpose(x, (1, 0))), [(2, 3)], "softmax.*normalises axis 1 of 3x2"),
    (lambda b, x: b.fully_connected(b.static_transpose(x, (1, 0)), numbers(5, 2)), [(2, 3)], "sums over axis 1"),
    (lambda b, x: b.fully_connected(b.static_reshape(x, (1, 6)), numbers(5, 6)), [(2, 3)], "sums over axis 1 of 1x6"),
    (lambda b, x: b.fully_connected(x, b.tanh(x)), [(2, 3)], "filter depends on the batch"),
    (lambda b, x: b.batch_matrix_multiply(numbers(3, 2), x), [(2, 3)], "sums over axis 0 of 2x3.* of input2"),
    (lambda b, x: b.batch_matrix_multiply(x, x, transpose_b=True), [(2, 3)], "every sample of input1 meets every"),
    (lambda b, x: b.add(x, numbers(2, 3)), [(2, 3)], "input2 is 2x3 for all samples"),
    (lambda b, x: b.add(x, numbers(4, 3)), [(1, 3)], "input2 is 4x3 for all samples"),
    (lambda b, x: b.add(x, b.static_transpose(x, (1, 0))), [(1, 1)], "axis 0 of the output through input1 and axis 1"),
    (lambda b, x: b.concatenate([x, x], 0), [(2, 3)], "one after the other on axis 0"),
    (lambda b, x: b.concatenate([x, numbers(2, 1)], 1), [(2, 3)], "input2 is 2x1 for all samples and would have to be"),
    (lambda b, x: b.static_slice(x, (1, 0), (1, 3)), [(2, 3)], "takes 1 of 2 from axis 0 of 2x3"),
    (lambda b, x: b.static_constant_pad(x, (0, 0), (1, 0)), [(2, 3)], "adds 0 before and 1 after axis 0"),
    (lambda b, x: b.static_reshape(x, (2, 6)), [(3, 4)], "makes 2x6 of 3x4.*batch of 3"),
    (lambda b, x: b.global_average_pooling2d(b.static_transpose(x, (3, 0, 1, 2))), [(2, 3, 3, 4)], "takes the mean"),
    (lambda b, x: b.max_pooling2d(b.static_transpose(x, (1, 0, 2, 3)), 2), [(2, 3, 2, 4)], "the batch on axis 0"),
])
def test_a_mixed_batch_is_refused_with_node_and_reason(make, shapes, words):
    assert re.search(words, reason(graph_of(make, *shapes)))


def test_rows_quantized_together_can_not_be_samples():
    b = GraphBuilder()
    x = b.convert(b.static_transpose(b.input((2, 3, 3, 4)), (1, 0, 2, 3)), "qdint8", PerToken(3))
    filter = b.constant(np.ones((5, 1, 1, 4), np.int8), "qcint8", PerChannel(np.full(5, 0.1, np.float32), 0))
    b.output(b.conv2d(x, filter, numbers(5), datatype="fp32"))
    assert "quantizes the last 3 axes of 3x2x3x4 together" in reason(b.graph())


def test_a_refused_graph_still_runs_its_declared_batch_and_refuses_others():
    graph = graph_of(lambda b, x: b.add(x, numbers(2, 3)), (2, 3))
    assert "for all samples" in str(lower(graph).batch_error)
    runtime = Runtime(graph)
    runtime.run(numbers(2, 3))
    with pytest.raises(ShapeError, match=r"node 0 \(add\)"):
        runtime.run(numbers(4, 3))


def test_a_graph_without_inputs_has_no_batch():
    b = GraphBuilder()
    b.output(b.tanh(numbers(2, 3)))
    with pytest.raises(GraphError, match="no input"):
        lower_batches(b.graph())


# ---------------------------------------------------------------------------------------------------
# Nothing else slides into the batch


def test_a_slice_exported_at_batch_8_drops_no_rows_at_16():
    graph = graph_of(lambda b, x: b.static_slice(x, (0, 1), (8, 2)), (8, 4))
    x = numbers(16, 4)
    (y,) = Runtime(graph).run(x)
    np.testing.assert_array_equal(y, x[:, 1:3])


def test_a_change_of_height_does_not_become_a_change_of_batch():
    graph = graph_of(lambda b, x: b.static_reshape(b.static_reshape(x, (12, 5)), (1, 3, 4, 5)), (1, 3, 4, 5))
    runtime = Runtime(graph)
    assert runtime.run(numbers(2, 3, 4, 5))[0].shape == (2, 3, 4, 5)
    with pytest.raises(ShapeError, match="0 follows axis 0"):
        runtime.run(numbers(1, 6, 4, 5))


def test_a_dimension_that_the_file_leaves_open_stays_open():
    # The tokens may change, the heads are inferred from them: a change of the batch would be taken for tokens.
    graph = graph_of(lambda b, x: b.static_reshape(x, (1, 0, 2, 4)), (1, 5, 8))
    runtime = Runtime(graph)
    assert runtime.run(numbers(1, 7, 8))[0].shape == (1, 7, 2, 4)
    with pytest.raises(ShapeError, match="takes up a change of axis 1 alone"):
        runtime.run(numbers(2, 5, 8))
    assert not lower(graph).follows_batch
    # The form for batches is the other way round.
    assert layout(graph) == (0, 1, 1)


def test_an_inferred_dimension_that_can_not_change_gives_way_to_the_batch():
    graph = graph_of(lambda b, x: b.static_reshape(b.fully_connected(x, numbers(8, 8)), (1, 5, 0, 4)), (1, 5, 8))
    assert lower(graph).follows_batch
    check_rows(graph, (1, 3))


def test_tokens_do_not_slide_into_heads():
    graph = graph_of(lambda b, x: b.static_reshape(x, (1, 5, 0, 4)), (1, 5, 8))
    with pytest.raises(ShapeError):
        Runtime(graph).run(numbers(1, 10, 8))


# ---------------------------------------------------------------------------------------------------
# Every operator

#: Operators whose example graph works on axis 0 itself.
MIXED = ("static_slice", "static_constant_pad", "concatenate3", "concatenate4")


@pytest.mark.parametrize("name", CASES)
def test_every_operator_runs_other_batches_or_says_why_not(name):
    graph = built(name).graph()
    if name in MIXED:
        assert f"node 0 ({name})" in reason(graph)
        return
    assert lower(graph).follows_batch
    check_rows(graph, (1, 3, 5), tolerance=2e-3)


# ---------------------------------------------------------------------------------------------------
# Random graphs


class Chain:
    """A random graph over values that start at one input; whether its samples stay apart is left to chance."""

    def __init__(self, seed, batch):
        self.rng = random.Random(seed)
        self.b = GraphBuilder()
        rank = self.rng.choice((2, 3, 4, 4))
        self.values = [self.b.input((batch, *(self.rng.choice((2, 3, 4, 6)) for _ in range(rank - 1))))]
        if self.rng.random() < 0.3:
            self.values.append(self.b.input(self.values[0].shape))
        for _ in range(self.rng.randint(1, 7)):
            step = self.rng.choice((self.unary, self.binary, self.dense, self.transpose, self.transpose, self.reshape,
                                    self.reshape, self.reshape, self.slice, self.pad, self.concatenate, self.product,
                                    self.image, self.softmax))
            made = step(self.rng.choice(self.values[-2:]))
            if made is not None and math.prod(made.shape) <= 4096:
                self.values.append(made)
        self.b.output(self.values[-1])
        self.graph = self.b.graph()

    def constant(self, *shape):
        return numbers(*shape, seed=self.rng.randrange(1 << 30))

    def unary(self, x):
        return getattr(self.b, self.rng.choice(("tanh", "abs", "sigmoid", "negate", "copy")))(x)

    def binary(self, x):
        others = [each for each in self.values if each.shape == x.shape]
        shape = [dim if self.rng.random() < 0.5 else 1 for dim in x.shape[self.rng.randint(0, len(x.shape) - 1):]]
        y = self.rng.choice(others) if self.rng.random() < 0.4 else self.constant(*shape)
        return self.b.add(x, y) if self.rng.random() < 0.5 else self.b.multiply(y, x)

    def dense(self, x):
        out = self.rng.choice((2, 3, 4))
        return self.b.fully_connected(x, self.constant(out, x.shape[-1]), self.constant(out))

    def softmax(self, x):
        return self.b.softmax(x)

    def transpose(self, x):
        perm = list(range(len(x.shape)))
        self.rng.shuffle(perm)
        return self.b.static_transpose(x, perm)

    def reshape(self, x):
        factors = list(x.shape)
        for _ in range(self.rng.randint(1, 3)):
            at = self.rng.randrange(len(factors))
            if self.rng.random() < 0.5 and at + 1 < len(factors):
                factors[at : at + 2] = [factors[at] * factors[at + 1]]
            else:
                divisor = self.rng.choice([d for d in (1, 2, 3, 4) if factors[at] % d == 0])
                factors[at : at + 1] = [divisor, factors[at] // divisor]
        if len(factors) > 6:
            return None
        if self.rng.random() < 0.3:
            factors[self.rng.randrange(len(factors))] = 0
        return self.b.static_reshape(x, factors)

    def slice(self, x):
        axis = self.rng.randrange(len(x.shape))
        offsets, sizes = [0] * len(x.shape), list(x.shape)
        offsets[axis] = self.rng.randrange(x.shape[axis])
        sizes[axis] = self.rng.randint(1, x.shape[axis] - offsets[axis])
        return self.b.static_slice(x, offsets, sizes)

    def pad(self, x):
        axis = self.rng.randrange(len(x.shape))
        after = [int(each == axis) for each in range(len(x.shape))]
        return self.b.static_constant_pad(x, [0] * len(x.shape), after, 0.5)

    def concatenate(self, x):
        axis = self.rng.randrange(len(x.shape))
        return self.b.concatenate([x, self.b.negate(x)], axis)

    def product(self, x):
        if len(x.shape) < 2:
            return None
        if self.rng.random() < 0.5:
            return self.b.batch_matrix_multiply(x, x, transpose_b=True)
        return self.b.batch_matrix_multiply(x, self.constant(x.shape[-1], 3))

    def image(self, x):
        if len(x.shape) != 4:
            return None
        kind = self.rng.randrange(4)
        if kind == 0:
            return self.b.conv2d(x, self.constant(3, 3, 3, x.shape[-1]), padding=1)
        if kind == 1:
            return self.b.max_pooling2d(x, 3, stride=1, padding=1)
        if kind == 2:
            return self.b.global_average_pooling2d(x, keep_dims=bool(self.rng.randrange(2)))
        return self.b.static_resize_bilinear2d(x, 5)


@pytest.mark.parametrize("declared", [1, 2, 8])
def test_random_graphs_run_row_by_row_or_are_refused(declared):
    followed = 0
    for seed in range(120):
        graph = Chain(seed * 10 + declared, declared).graph
        try:
            lower_batches(graph)
        except GraphError as error:
            assert error.node is not None, seed
            continue
        if not lower(graph).follows_batch:
            continue
        followed += 1
        try:
            check_rows(graph, (1, 3, 8, 16, 32), seed=seed)
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {[node.op.name for node in graph.nodes]}") from error
    assert followed > 40
