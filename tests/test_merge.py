"""Merging: the same results from fewer steps; operators that are lowered, what stays outside, guards of attention."""

from __future__ import annotations

import pathlib
import re

import files
import numpy as np
import pytest
from sketch import Sketch

import xnnfast
from xnnfast.merge import DATA_SHAPED
from xnnfast.merge_rows import LOWERINGS
from xnnfast.portable import PORTABLE
from xnnfast.program import Program

RNG = np.random.default_rng(4)
SHAPE = (2, 4, 6)


def both(program, *inputs, tolerance=1e-5):
    """Run merged and as written; the merged program after its results were compared."""
    merged, plain = Program(program), Program(program, merge=False)
    results, wants = merged.run(*inputs), plain.run(*inputs)
    same(results, wants, tolerance)
    # A second call finds what the first one left.
    same(merged.run(*inputs), wants, tolerance)
    return merged


def same(results, wants, tolerance=1e-5):
    assert len(results) == len(wants)
    for got, want in zip(results, wants):
        if not isinstance(want, np.ndarray):
            assert got == want
            continue
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        if got.dtype.kind == "f":
            largest = np.abs(want[np.isfinite(want)].astype(np.float64)).max(initial=0) or 1
            np.testing.assert_allclose(
                got.astype(np.float64), want.astype(np.float64), rtol=0, atol=tolerance * largest
            )
        else:
            np.testing.assert_array_equal(got, want)


def between(build, *shapes, dtype=np.float32):
    """A program with delegates on both sides of what ``build`` adds, and inputs for it."""
    sketch = Sketch()
    inputs = [sketch.tensor(shape, dtype) for shape in shapes]
    shifted = []
    for x, shape in zip(inputs, shapes):
        shifted.append(sketch.tensor(shape, dtype))
        sketch.delegate(lambda b, v: b.negate(v), [x], [shifted[-1]])
    outs = build(sketch, *shifted)
    last = []
    for out in outs if isinstance(outs, tuple) else (outs,):
        fields = sketch.values[out]["val"][1]
        last.append(sketch.tensor(fields["sizes"], dtype))
        fields["scalar_type"] = sketch.values[last[-1]]["val"][1]["scalar_type"]
        sketch.delegate(lambda b, v: b.abs(v), [out], [last[-1]])
    arrays = [RNG.standard_normal(shape).astype(dtype) for shape in shapes]
    return sketch.program(inputs, last), arrays


# ---- every operator that is lowered


def unary(name, *args, sizes=SHAPE):
    return name, lambda s, x: s.unary(name, x, *args, sizes=sizes), (SHAPE,)


def binary(name, other, *args, swap=False):
    def build(s, x, *more):
        out = s.tensor(SHAPE)
        y = more[0] if more else s.constant(other)
        s.kernel(name, *((y, x) if swap else (x, y)), *map(s.number, args), out, out)
        return out

    return name, build, (SHAPE, other) if isinstance(other, tuple) else (SHAPE,)


def several(name, *args, shapes, sizes, outs=None):
    """Operators with lists: ``args`` after the tensors, out lists of ``outs``."""

    def build(s, *xs):
        if outs is None:
            out = s.tensor(sizes)
            s.kernel(name, s.tensors(*xs), *map(s.number, args), out, out)
            return out
        made = tuple(s.tensor(each) for each in outs)
        listed = s.tensors(*made)
        s.kernel(name, *xs, *map(s.number, args), listed, listed)
        return made

    return name, build, shapes


def norm(name, arrays, *args, outs=3, first=()):
    """Normalisations: parameters as constants, then numbers; only the first of three outs is used."""

    def build(s, x):
        moments = {"aten::native_layer_norm.out": (2, 4, 1), "aten::native_group_norm.out": (2, 2)}.get(name, (0,))
        made = [s.tensor(SHAPE), *(s.tensor(moments) for _ in range(outs - 1))]
        parameters = [s.number(None) if each is None else s.constant(np.asarray(each, np.float32)) for each in arrays]
        lead = [s.number(each) for each in first]
        s.kernel(name, x, *lead, *parameters, *map(s.number, args), *made, s.tensors(*made))
        return made[0]

    return name, build, (SHAPE,)


def matrices(name, *constants, sizes, shapes, args=(), order=None):
    def build(s, *xs):
        out = s.tensor(sizes)
        operands = [*xs, *(s.number(None) if each is None else s.constant(each) for each in constants)]
        if order is not None:
            operands = [operands[place] for place in order]
        s.kernel(name, *operands, *map(s.number, args), out, out)
        return out

    return name, build, shapes


ROW = np.linspace(-1, 1, 6, dtype=np.float32)
W = RNG.standard_normal((6, 5)).astype(np.float32)

CASES = [
    binary("aten::add.out", SHAPE, 1),
    binary("aten::add.out", ROW, 2),
    binary("aten::add.out", (4, 1), -1),
    binary("aten::add.out", np.arange(6), 1),
    unary("aten::add.Scalar_out", 2, 3),
    binary("aten::sub.out", ROW, 1),
    binary("aten::sub.out", ROW, 1, swap=True),
    unary("aten::sub.Scalar_out", 0.5, 2),
    unary("aten::rsub.Scalar_out", 1.5, 1),
    binary("aten::mul.out", SHAPE),
    unary("aten::mul.Scalar_out", 0.125),
    binary("aten::div.out", ROW + 3),
    unary("aten::div.Scalar_out", 3),
    binary("aten::minimum.out", ROW),
    binary("aten::maximum.out", ROW, swap=True),
    unary("aten::pow.Tensor_Scalar_out", 2),
    unary("aten::pow.Tensor_Scalar_out", 3.0),
    *(
        unary(f"aten::{name}.out")
        for name in ("abs", "neg", "ceil", "floor", "cos", "sin", "exp", "sigmoid", "tanh")
    ),
    unary("aten::relu.out"),
    unary("aten::clamp.out", -0.5, None),
    unary("aten::clamp.out", None, 1),
    unary("aten::hardtanh.out", -0.5, 0.5),
    unary("aten::leaky_relu.out", 0.1),
    unary("aten::elu.out", 0.7, 1, 1),
    unary("aten::gelu.out", "none"),
    unary("aten::gelu.out", "tanh"),
    unary("aten::mean.out", [-1], True, None, sizes=(2, 4, 1)),
    unary("aten::mean.out", [0, 2], False, None, sizes=(4,)),
    unary("aten::mean.out", None, False, None, sizes=()),
    unary("aten::sum.IntList_out", [1], True, None, sizes=(2, 1, 6)),
    unary("aten::_softmax.out", -1, False),
    norm("aten::native_layer_norm.out", [ROW, ROW[::-1]], 1e-5, first=([6],)),
    norm("aten::native_layer_norm.out", [None, None], 1e-12, first=([6],)),
    norm("aten::native_group_norm.out", [ROW[:4], ROW[1:5]], 2, 4, 6, 2, 1e-5),
    norm("aten::native_group_norm.out", [None, None], 2, 4, 6, 2, 1e-5),
    norm("aten::_native_batch_norm_legit_no_training.out", [ROW[:4], ROW[1:5], ROW[:4], ROW[:4] + 2], 0.1, 1e-5),
    norm("aten::_native_batch_norm_legit_no_training.out", [None, None, ROW[:4], ROW[:4] + 2], 0.1, 1e-5),
    *(
        unary(f"aten::{name}.out", *args)
        for name, args in (
            ("clone", (None,)),
            ("alias_copy", ()),
            ("detach_copy", ()),
            ("lift_fresh_copy", ()),
            ("_to_copy", (False, None)),
        )
    ),
    unary("dim_order_ops::_clone_dim_order.out", False, [0, 1, 2]),
    unary("dim_order_ops::_to_dim_order_copy.out", False, [0, 1, 2]),
    unary("aten::view_copy.out", [8, -1], sizes=(8, 6)),
    unary("aten::unsqueeze_copy.out", -2, sizes=(2, 4, 1, 6)),
    (
        "aten::squeeze_copy.dim_out",
        lambda s, x: s.unary("aten::squeeze_copy.dim_out", x, 1, sizes=(2, 6)),
        ((2, 1, 6),),
    ),
    (
        "aten::squeeze_copy.dims_out",
        lambda s, x: s.unary("aten::squeeze_copy.dims_out", x, [0, -1], sizes=(4,)),
        ((1, 4, 1),),
    ),
    (
        "aten::expand_copy.out",
        lambda s, x: s.unary("aten::expand_copy.out", x, [3, -1, 6], False, sizes=(3, 4, 6)),
        ((4, 1),),
    ),
    unary("aten::permute_copy.out", [2, 0, -2], sizes=(6, 2, 4)),
    unary("aten::transpose_copy.int_out", 0, -1, sizes=(6, 4, 2)),
    ("aten::t_copy.out", lambda s, x: s.unary("aten::t_copy.out", x, sizes=(6, 4)), ((4, 6),)),
    unary("aten::select_copy.int_out", 1, -1, sizes=(2, 6)),
    unary("aten::slice_copy.Tensor_out", 2, 1, -1, 1, sizes=(2, 4, 4)),
    unary("aten::slice_copy.Tensor_out", 0, None, 100, 1),
    unary("aten::narrow_copy.out", 1, -3, 2, sizes=(2, 2, 6)),
    several("aten::split_copy.Tensor_out", 4, -1, shapes=(SHAPE,), sizes=None, outs=((2, 4, 4), (2, 4, 2))),
    several("aten::split_with_sizes_copy.out", [1, 3], 1, shapes=(SHAPE,), sizes=None, outs=((2, 1, 6), (2, 3, 6))),
    several("aten::cat.out", 1, shapes=((2, 1, 6),) * 7, sizes=(2, 7, 6)),
    several("aten::stack.out", -1, shapes=((2, 4),) * 3, sizes=(2, 4, 3)),
    unary("aten::constant_pad_nd.out", [1, 2, 0, 3], 0.5, sizes=(2, 7, 9)),
    matrices("aten::mm.out", W, sizes=(4, 5), shapes=((4, 6),)),
    matrices("aten::mm.out", sizes=(4, 5), shapes=((4, 6), (6, 5))),
    matrices("aten::bmm.out", sizes=(2, 4, 5), shapes=((2, 4, 6), (2, 6, 5))),
    matrices("aten::addmm.out", W, W[0], sizes=(4, 5), shapes=((4, 6),), args=(1, 1), order=(2, 0, 1)),
    matrices("aten::addmm.out", W[:4], sizes=(4, 5), shapes=((4, 6), (6, 5)), args=(1, 1), order=(2, 0, 1)),
    matrices("aten::linear.out", np.ascontiguousarray(W.T), W[0], sizes=(2, 4, 5), shapes=(SHAPE,)),
    matrices("aten::linear.out", np.ascontiguousarray(W.T), None, sizes=(2, 4, 5), shapes=(SHAPE,)),
    matrices("aten::linear.out", W[0], sizes=(4, 5), shapes=((4, 6), (5, 6))),
]


def identify(case):
    return case[0].split("::")[1]


@pytest.mark.parametrize("case", CASES, ids=identify)
def test_lowered_operators_agree_and_are_inside(case):
    _, build, shapes = case
    program, inputs = between(build, *shapes)
    merged = both(program, *inputs)
    report = merged.plan()
    assert (report.runtimes, report.numpy_steps) == (1, 0), str(report)


@pytest.mark.parametrize("case", CASES, ids=identify)
def test_lowered_operators_agree_in_half_precision(case):
    _, build, shapes = case

    def halved(s, *xs):
        before = len(s.values)
        outs = build(s, *xs)
        for value in s.values[before:]:
            kind, fields = value["val"]
            if kind == "Tensor" and fields["scalar_type"] == 6 and "allocation_info" in fields:
                fields["scalar_type"] = 5
        return outs

    program, inputs = between(halved, *shapes, dtype=np.float16)
    merged = both(program, *inputs, tolerance=2e-3)
    assert merged.plan().numpy_steps == 0


def test_every_lowering_has_a_case():
    tested = {name for name, _, _ in CASES} | {"executorch_prim::et_view.default"}
    assert tested == set(LOWERINGS)
    assert set(PORTABLE) >= tested
    assert set(PORTABLE) >= DATA_SHAPED


def test_views_without_an_out_are_lowered_too():
    def build(s, x):
        out = s.tensor((8, 6))
        s.kernel("executorch_prim::et_view.default", x, s.number([8, 6]), out)
        return out

    program, inputs = between(build, SHAPE)
    assert both(program, *inputs).plan().numpy_steps == 0


# ---- what stays outside


@pytest.mark.parametrize(
    "case",
    [
        unary("aten::sqrt.out"),
        unary("aten::rsqrt.out"),
        unary("aten::log.out"),
        unary("aten::pow.Tensor_Scalar_out", 1.5),
        unary("aten::_softmax.out", 0, False),
        unary("aten::slice_copy.Tensor_out", 2, 0, 6, 2, sizes=(2, 4, 3)),
        unary("aten::constant_pad_nd.out", [-1, 0], 0.0, sizes=(2, 4, 5)),
        unary("aten::elu.out", 1.0, 2, 1),
        unary("aten::clamp.out", 1, -1),
        unary("aten::mul.Scalar_out", 1e300),
        unary("aten::flip.out", [0]),
        binary("aten::maximum.out", SHAPE),
        binary("aten::minimum.out", np.array([1, np.nan, 2, 3, 4, 5], np.float32)),
        norm("aten::native_layer_norm.out", [ROW, ROW], 0.0, first=([6],)),
        matrices("aten::addmm.out", W, W[0], sizes=(4, 5), shapes=((4, 6),), args=(2, 1), order=(2, 0, 1)),
    ],
    ids=identify,
)
def test_what_xnnpack_can_not_express_exactly_stays_in_numpy(case):
    _, build, shapes = case
    program, inputs = between(build, *shapes)
    report = both(program, *(np.abs(x) * -1 for x in inputs)).plan()
    assert (report.runtimes, report.numpy_steps) == (2, 1), str(report)


def test_more_dimensions_than_xnnpack_has_stay_in_numpy():
    sketch = Sketch()
    x = sketch.tensor((2, 3))
    y = sketch.unary("aten::view_copy.out", sketch.shift(x, (2, 3)), [1, 2, 1, 3, 1, 1, 1], sizes=(1, 2, 1, 3, 1, 1, 1))
    turned = sketch.unary("aten::permute_copy.out", y, [0, 3, 2, 1, 4, 5, 6], sizes=(1, 3, 1, 2, 1, 1, 1))
    z = sketch.shift(sketch.unary("aten::view_copy.out", turned, [3, 2], sizes=(3, 2)), (3, 2))
    assert both(sketch.program([x], [z]), np.ones((2, 3), np.float32)).plan().numpy_steps == 3


def test_a_norm_whose_moments_are_used_stays_in_numpy():
    def build(s, x):
        outs = [s.tensor(SHAPE), s.tensor((2, 4, 1)), s.tensor((2, 4, 1))]
        s.kernel(
            "aten::native_layer_norm.out",
            x,
            s.number([6]),
            s.number(None),
            s.number(None),
            s.number(1e-5),
            *outs,
            s.tensors(*outs),
        )
        return outs[0], outs[2]

    program, inputs = between(build, SHAPE)
    assert both(program, *inputs).plan().numpy_steps == 1


def test_nan_comes_out_as_it_does_unmerged():
    def build(s, x):
        y = s.tensor(SHAPE)
        s.kernel("aten::maximum.out", x, s.constant(ROW), y, y)
        return s.unary("aten::relu.out", y, sizes=SHAPE)

    program, (x,) = between(build, SHAPE)
    x[0, 0, :3] = [np.nan, np.inf, -np.inf]
    both(program, x)


def test_whole_numbers_and_truths_stay_in_numpy():
    sketch = Sketch()
    x, n = sketch.tensor((2, 3)), sketch.tensor((2, 3), np.int64)
    y = sketch.shift(x, (2, 3))
    m = sketch.unary("aten::add.Scalar_out", n, 1, 1, sizes=(2, 3), dtype=np.int64)
    truth = sketch.unary("aten::gt.Scalar_out", y, 0, sizes=(2, 3), dtype=np.bool_)
    z = sketch.tensor((2, 3))
    sketch.kernel("aten::mul.out", y, m, z, z)
    program = sketch.program([x, n], [z, truth])
    merged = both(program, RNG.standard_normal((2, 3)).astype(np.float32), np.arange(6).reshape(2, 3))
    assert merged.plan().numpy_steps == 3


def test_few_elements_away_from_delegates_stay_in_numpy():
    sketch = Sketch()
    x = sketch.tensor((2, 3))
    y = sketch.unary("aten::exp.out", x, sizes=(2, 3))
    program = both(sketch.program([x], [y]), np.ones((2, 3), np.float32))
    assert (program.plan().runtimes, program.plan().numpy_steps) == (0, 1)


def test_many_elements_are_worth_a_graph():
    sketch = Sketch()
    x = sketch.tensor((64, 512))
    y = sketch.unary("aten::exp.out", x, sizes=(64, 512))
    program = both(sketch.program([x], [y]), np.ones((64, 512), np.float32))
    assert (program.plan().runtimes, program.plan().numpy_steps) == (1, 0)


# ---- levels


def test_delegates_around_an_operator_in_numpy_are_two_graphs():
    sketch = Sketch()
    x = sketch.tensor((2, 3))
    first = sketch.shift(sketch.shift(x, (2, 3)), (2, 3))
    aside = sketch.shift(x, (2, 3), 5.0)
    middle = sketch.unary("aten::sqrt.out", first, sizes=(2, 3))
    last = sketch.tensor((2, 3))
    sketch.delegate(lambda b, v, w: b.add(v, w), [middle, aside], [last])
    last = sketch.shift(last, (2, 3))
    report = both(sketch.program([x], [last]), np.ones((2, 3), np.float32)).plan()
    assert (report.runtimes, report.numpy_steps, report.delegates) == (2, 1, 5)
    assert [step.split(": ")[1] for step in report.steps] == [
        "graph of 3 nodes",
        "aten::sqrt.out in NumPy",
        "graph of 2 nodes",
    ]


def test_a_delegate_that_needs_another_type_runs_by_itself():
    # The same int8 tensor with two scales.
    def payload(scale, first):
        b = xnnfast.GraphBuilder()
        kind = ("qint8", xnnfast.PerTensor(scale, 0))
        if first:
            b.output(b.convert(b.input((2, 3)), *kind))
        else:
            b.output(b.convert(b.input((2, 3), *kind), "fp32"))
        return b.finish()

    sketch = Sketch()
    x, q, y, z = sketch.tensor((2, 3)), sketch.tensor((2, 3), np.int8), sketch.tensor((2, 3)), sketch.tensor((2, 3))
    sketch.delegate(payload(0.5, True), [x], [q])
    sketch.delegate(payload(0.5, False), [q], [y])
    sketch.delegate(payload(0.25, False), [q], [z])
    program = both(sketch.program([x], [y, z, q]), np.arange(6, dtype=np.float32).reshape(2, 3))
    y, z, _ = program.run(np.arange(6, dtype=np.float32).reshape(2, 3))
    np.testing.assert_array_equal(y, z * 2)
    report = program.plan()
    assert (report.runtimes, report.delegates) == (2, 3)


def test_orders_of_dimensions_meet_inside_a_graph():
    last = bytes((0, 2, 3, 1))
    sketch = Sketch()
    x = sketch.tensor((1, 3, 2, 2))
    a, b = sketch.tensor((1, 3, 2, 2)), sketch.tensor((1, 3, 2, 2), dim_order=last)
    sketch.delegate(lambda g, v: g.add(v, g.constant(np.array([1, 2], np.float32))), [x], [a])
    sketch.kernel("dim_order_ops::_to_dim_order_copy.out", a, sketch.number(False), sketch.number([0, 2, 3, 1]), b, b)
    c, d = sketch.tensor((1, 3, 2, 2), dim_order=last), sketch.tensor((1, 3, 2, 2))
    sketch.delegate(lambda g, v: g.add(v, g.constant(np.array([10, 20, 30], np.float32))), [b], [c])
    sketch.kernel("dim_order_ops::_to_dim_order_copy.out", c, sketch.number(False), sketch.number([0, 1, 2, 3]), d, d)
    program = both(sketch.program([x], [b, c, d]), RNG.standard_normal((1, 3, 2, 2)).astype(np.float32))
    assert (program.plan().runtimes, program.plan().numpy_steps) == (1, 0)


# ---- what is computed once


def test_what_never_changes_is_computed_once():
    sketch = Sketch()
    x, table = sketch.tensor((1, 4)), sketch.constant(np.arange(40, dtype=np.float32).reshape(10, 4))
    places = sketch.tensor((4,), np.int64)
    sketch.kernel("aten::arange.start_out", *map(sketch.number, (0, 8, 2)), places, places)
    rows = sketch.tensor((4, 4))
    sketch.kernel("aten::embedding.out", table, places, *map(sketch.number, (-1, False, False)), rows, rows)
    like = sketch.unary("aten::full_like.out", x, 3, None, sizes=(1, 4))
    size = sketch.number(0)
    sketch.kernel("aten::sym_size.int", x, sketch.number(1), size)
    twice = sketch.number(0)
    sketch.kernel("executorch_prim::mul.Scalar", size, sketch.number(2), twice)
    shifted = sketch.shift(rows, (4, 4))
    y = sketch.tensor((4, 4))
    sketch.delegate(lambda b, u, v, w: b.add(b.add(u, v), w), [shifted, like, x], [y])
    program = both(sketch.program([x], [y, twice, rows]), np.ones((1, 4), np.float32))
    report = program.plan()
    assert (report.runtimes, report.numpy_steps, report.evaluated) == (1, 0, 6)
    y, twice, rows = program.run(np.ones((1, 4), np.float32))
    np.testing.assert_array_equal(rows, np.arange(40).reshape(10, 4)[::2][:4])
    np.testing.assert_array_equal(y, rows + 1 + 3 + 1)
    assert twice == 8
    rows[...] = 0
    np.testing.assert_array_equal(program.run(np.ones((1, 4), np.float32))[2][1], [8, 9, 10, 11])


def test_a_program_of_constants_runs():
    sketch = Sketch()
    x = sketch.tensor((2, 3))
    y = sketch.shift(sketch.constant(np.ones((2, 3), np.float32)), (2, 3))
    program = both(sketch.program([x], [y]), np.zeros((2, 3), np.float32))
    assert (program.plan().runtimes, program.plan().numpy_steps) == (1, 0) or program.plan().evaluated == 1


def test_dead_operators_are_dropped():
    sketch = Sketch()
    x = sketch.tensor((2, 3))
    y = sketch.shift(x, (2, 3))
    sketch.unary("aten::sqrt.out", y, sizes=(2, 3))
    z = sketch.shift(y, (2, 3))
    assert both(sketch.program([x], [z]), np.ones((2, 3), np.float32)).plan().numpy_steps == 0


def test_constants_stay_where_they_are():
    sketch = Sketch()
    x, c = sketch.tensor((1, 64)), sketch.constant(np.arange(64, dtype=np.float32).reshape(1, 64))
    y, z = sketch.tensor((1, 64)), sketch.tensor((1, 64))
    sketch.kernel("aten::mul.out", sketch.shift(x, (1, 64)), c, y, y)
    z = sketch.shift(y, (1, 64))
    program = both(sketch.program([x], [z]), np.ones((1, 64), np.float32))
    ((step, _),) = program.method("forward").merged[0].straight
    constants = [
        value.constant for value in step.runtime.graph.values if value.constant is not None and value.shape == (1, 64)
    ]
    assert [constant.in_place for constant in constants] == [True]


# ---- cuts


def test_what_a_slice_leaves_out_is_not_computed():
    sketch = Sketch()
    x = sketch.tensor((1, 8, 6))
    w, v = RNG.standard_normal((10, 6)).astype(np.float32), RNG.standard_normal((6, 10)).astype(np.float32)
    y = sketch.tensor((1, 8, 6))

    def block(b, u):
        h = b.gelu(b.fully_connected(u, b.constant(w)))
        return b.add(b.fully_connected(h, b.constant(v)), u)

    sketch.delegate(block, [x], [y])
    cut = sketch.unary("aten::select_copy.int_out", y, 1, 2, sizes=(1, 6))
    z = sketch.shift(cut, (1, 6))
    program = both(sketch.program([x], [z]), RNG.standard_normal((1, 8, 6)).astype(np.float32))
    ((step, _),) = program.method("forward").merged[0].straight
    graph = step.runtime.graph
    layers = [graph.value(node.inputs[0]).shape for node in graph.nodes if node.op.name == "fully_connected"]
    assert layers == [(1, 1, 6), (1, 1, 10)]


@pytest.mark.parametrize(
    "sizes", [((0, 1, 2, 0), (2, 2, 3, 5)), ((1, 0, 0, 0), (1, 4, 6, 5)), ((0, 3, 5, 1), (2, 1, 1, 2))]
)
def test_cuts_move_through_everything_that_allows_it(sizes):
    offsets, extent = sizes

    def attention(b, q, k, m):
        scores = b.softmax(b.add(b.batch_matrix_multiply(b.multiply(q, b.constant(np.array([0.5], np.float32))), k), m))
        turned = b.static_transpose(b.static_transpose(scores, (0, 2, 1, 3)), (0, 2, 1, 3))
        flat = b.static_reshape(turned, (8, 6, 5))
        again = b.static_reshape(flat, (2, 4, 6, 5))
        centred = b.subtract(again, b.constant(RNG.standard_normal((4, 1, 5)).astype(np.float32)))
        return b.static_slice(b.square(centred), offsets, extent)

    sketch = Sketch()
    q, k, m = sketch.tensor((2, 4, 6, 3)), sketch.tensor((2, 4, 3, 5)), sketch.tensor((1, 1, 6, 5))
    y = sketch.tensor(extent)
    sketch.delegate(attention, [q, k, m], [y])
    z = sketch.shift(y, extent)
    both(
        sketch.program([q, k, m], [z]),
        *(RNG.standard_normal(shape).astype(np.float32) for shape in ((2, 4, 6, 3), (2, 4, 3, 5), (1, 1, 6, 5))),
    )


def test_a_value_that_is_needed_whole_is_not_cut():
    sketch = Sketch()
    x = sketch.tensor((4, 6))
    y = sketch.shift(x, (4, 6))
    cut = sketch.unary("aten::slice_copy.Tensor_out", y, 0, 1, 3, 1, sizes=(2, 6))
    other = sketch.unary("aten::slice_copy.Tensor_out", y, 0, 0, 2, 1, sizes=(2, 6))
    a, b = sketch.shift(cut, (2, 6)), sketch.shift(other, (2, 6))
    both(sketch.program([x], [a, b]), RNG.standard_normal((4, 6)).astype(np.float32))
    both(sketch.program([x], [a, y]), RNG.standard_normal((4, 6)).astype(np.float32))


# ---- attention


def attention(mask, *, given=False, apart=False):
    """Softmax with the guard that exporters put around it, with a mask that is a constant, an input, or none.

    ``apart`` computes scores and softmax in different delegates, with a view between.
    """
    heads, rows, columns, depth = 2, 4, 5, 3
    sketch = Sketch()
    q, k = sketch.tensor((1, heads, rows, depth)), sketch.tensor((1, heads, depth, columns))
    v = sketch.tensor((1, heads, columns, depth))
    shape = (1, heads, rows, columns)
    weights = sketch.tensor(shape)
    operands, inputs = [q, k], [q, k, v]
    if mask is not None:
        operands.append(sketch.tensor(mask.shape) if given else sketch.constant(mask))
        inputs += operands[2:] if given else []

    def scored(b, x, y, *z):
        made = b.batch_matrix_multiply(x, y)
        return b.add(made, *z) if z else made

    if apart:
        product = sketch.tensor(shape)
        sketch.delegate(lambda b, x, y: scored(b, x, y), [q, k], [product])
        product = sketch.unary("aten::view_copy.out", product, list(shape[1:]), sizes=shape[1:])
        product = sketch.unary("aten::unsqueeze_copy.out", product, 0, sizes=shape)
        scores = sketch.tensor(shape)
        if mask is None:
            scores = product
        else:
            sketch.delegate(lambda b, x, z: b.add(x, z), [product, operands[2]], [scores])
        sketch.delegate(lambda b, x: b.softmax(x), [scores], [weights])
    else:
        scores = sketch.tensor(shape)

        def both_of_them(b, *xs):
            made = scored(b, *xs)
            return made, b.softmax(made)

        sketch.delegate(both_of_them, operands, [scores, weights])
    closed = sketch.unary("aten::eq.Scalar_out", scores, float("-inf"), sizes=shape, dtype=np.bool_)
    zeros = sketch.unary("aten::full_like.out", weights, 0, None, sizes=shape)
    for name, args, sizes in (
        ("aten::logical_not.out", (), shape),
        ("aten::any.out", (-1, True), (*shape[:-1], 1)),
        ("aten::logical_not.out", (), (*shape[:-1], 1)),
    ):
        closed = sketch.unary(name, closed, *args, sizes=sizes, dtype=np.bool_)
    guarded = sketch.tensor(shape)
    sketch.kernel("aten::where.self_out", closed, zeros, weights, guarded, guarded)
    y = sketch.tensor((1, heads, rows, depth))
    sketch.delegate(lambda b, w, u: b.batch_matrix_multiply(w, u), [guarded, v], [y])
    arrays = [RNG.standard_normal(sketch.values[each]["val"][1]["sizes"]).astype(np.float32) for each in (q, k, v)]
    return sketch.program(inputs, [y]), arrays + ([mask] if given else [])


INF = np.float32(np.inf)
OPEN = RNG.standard_normal((1, 1, 4, 5)).astype(np.float32)
PARTLY = np.where(np.arange(5) > 2, -INF, np.float32(0)).reshape(1, 1, 1, 5)
CAUSAL = np.where(np.tri(4, 5, dtype=bool), np.float32(0), -INF).reshape(1, 1, 4, 5)
CLOSED = np.where(np.arange(4)[:, None] == 1, -INF, OPEN)
ALL = np.full((1, 2, 4, 5), -INF)


MASKS = {"open": OPEN, "partly": PARTLY, "causal": CAUSAL, "closed": CLOSED, "all": ALL}
APART = pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])


@APART
@pytest.mark.parametrize("name", ["none", *MASKS])
def test_guards_of_softmax_are_dropped(name, apart):
    program, inputs = attention(MASKS.get(name), apart=apart)
    merged = both(program, *inputs)
    report = merged.plan()
    assert (report.runtimes, report.numpy_steps) == (1, 0), str(report)
    assert np.isfinite(merged.run(*inputs)[0]).all()
    assert merged.method("forward").unsound == 0


@APART
@pytest.mark.parametrize("name", MASKS)
def test_guards_of_masks_that_come_in_look_at_the_mask(name, apart):
    mask = MASKS[name]
    program, inputs = attention(mask, given=True, apart=apart)
    merged = both(program, *inputs)
    report = merged.plan()
    assert (report.runtimes, report.numpy_steps) == (1, 1), str(report)
    assert report.steps[0].endswith("rows of a mask in NumPy")
    # The same program with every other mask.
    for other in MASKS.values():
        if other.shape == mask.shape:
            both(program, *inputs[:3], other)
    assert merged.method("forward").unsound == 0


@pytest.mark.parametrize("mask", [None, OPEN, CLOSED], ids=["none", "open", "closed"])
def test_scores_that_overflow_run_as_written(mask):
    program, (q, k, v) = attention(mask)
    q, k = q.copy(), k.copy()
    # A row of -inf, which the guard turns into zeros.
    q[0, 0, 2] = 3e38
    k[0, 0] = -3e38
    merged, plain = Program(program), Program(program, merge=False)
    wants = plain.run(q, k, v)
    assert np.array_equal(wants[0][0, 0, 2], [0, 0, 0])
    for turn in range(5):
        same(merged.run(q, k, v), wants)
        # What is needed so often is left in.
        assert merged.plan().numpy_steps == (0 if turn < 2 else 5)
    k[0, 0, 0, 0] = np.nan
    np.testing.assert_array_equal(np.isnan(merged.run(q, k, v)[0]), np.isnan(plain.run(q, k, v)[0]))


def test_a_guard_of_something_else_stays():
    sketch = Sketch()
    x = sketch.tensor((2, 3))
    scores, weights = sketch.tensor((2, 3)), sketch.tensor((2, 3))
    sketch.delegate(lambda b, v: (b.negate(v), b.softmax(v)), [x], [scores, weights])
    closed = sketch.unary("aten::eq.Scalar_out", scores, float("-inf"), sizes=(2, 3), dtype=np.bool_)
    closed = sketch.unary("aten::logical_not.out", closed, sizes=(2, 3), dtype=np.bool_)
    closed = sketch.unary("aten::any.out", closed, -1, True, sizes=(2, 1), dtype=np.bool_)
    closed = sketch.unary("aten::logical_not.out", closed, sizes=(2, 1), dtype=np.bool_)
    zeros = sketch.unary("aten::full_like.out", weights, 0, None, sizes=(2, 3))
    out = sketch.tensor((2, 3))
    sketch.kernel("aten::where.self_out", closed, zeros, weights, out, out)
    # Softmax is of something else than the scores that are looked at.
    assert both(sketch.program([x], [out]), np.ones((2, 3), np.float32)).plan().numpy_steps == 5


# ---- sizes that vary


def test_sizes_that_come_again_are_merged():
    sketch = Sketch()
    x = sketch.tensor((8, 3, 4), shape_dynamism=1)
    y = sketch.tensor((8, 3, 4), shape_dynamism=1)
    sketch.delegate(lambda b, v: b.add(v, b.constant(np.ones(1, np.float32))), [x], [y])
    rows = sketch.number(0)
    sketch.kernel("aten::sym_size.int", x, sketch.number(0), rows)
    sizes = sketch.value("IntList", items=[rows, sketch.number(12)])
    flat = sketch.tensor((8, 12), shape_dynamism=1)
    sketch.kernel("aten::view_copy.out", y, sizes, flat, flat)
    z = sketch.tensor((8, 12), shape_dynamism=1)
    sketch.delegate(lambda b, v: b.negate(v), [flat], [z])
    program = Program(sketch.program([x], [z]))
    method = program.method("forward")
    for turn in range(3):
        for count in (1, 5, 8):
            given = RNG.standard_normal((count, 3, 4)).astype(np.float32)
            np.testing.assert_allclose(program.run(given)[0], -(given + 1).reshape(count, 12))
            assert isinstance(method._by_shapes[((count, 3, 4),)], dict) == (turn == 0)
    report = program.plan()
    assert (report.runtimes, report.numpy_steps) == (1, 0)
    for count in range(1, 9):
        program.run(np.zeros((count, 3, 4), np.float32))
    assert len(method._by_shapes) == 8
    assert Program(sketch.program([x], [z])).plan().runtimes == 1


def test_merged_forms_of_one_method_share_packed_weights():
    sketch = Sketch()
    x = sketch.tensor((8, 6), shape_dynamism=1)
    y, z = sketch.tensor((8, 5), shape_dynamism=1), sketch.tensor((8, 5), shape_dynamism=1)
    w = RNG.standard_normal((5, 6)).astype(np.float32)
    sketch.delegate(lambda b, v: b.fully_connected(v, b.constant(w)), [x], [y])
    sketch.kernel("aten::mm.out", y, sketch.constant(w[:, :5]), z, z)
    program = Program(sketch.program([x], [z]))
    method = program.method("forward")
    for count in (3, 3, 8, 8):
        given = RNG.standard_normal((count, 6)).astype(np.float32)
        np.testing.assert_allclose(program.run(given)[0], given @ w.T @ w[:, :5], rtol=0, atol=1e-4)
    first, second = (routine.straight[0][0].runtime for routine, _ in method._by_shapes.values())
    assert first.graph is not second.graph
    (packed,) = first.graph.caches["packed"].values()
    assert packed is next(iter(second.graph.caches["packed"].values()))
    assert packed.hits > 0
    assert (
        first.memory["packed"]
        == second.memory["packed"]
        == Program(sketch.program([x], [z]))
        .method("forward")
        .merge({-1: (8, 6), 0: (8, 5), 1: (8, 5)})[0]
        .straight[0][0]
        .runtime.memory["packed"]
    )


def test_packed_weights_are_kept_for_the_next_process(tmp_path):
    sketch = Sketch()
    x, y = sketch.tensor((2, 600)), sketch.tensor((2, 500))
    w = RNG.standard_normal((500, 600)).astype(np.float32)
    sketch.delegate(lambda b, v: b.fully_connected(v, b.constant(w)), [x], [y])
    z = sketch.unary("aten::exp.out", sketch.unary("aten::mul.Scalar_out", y, 1e-3, sizes=(2, 500)), sizes=(2, 500))
    given = RNG.standard_normal((2, 600)).astype(np.float32)
    (tmp_path / "m.pte").write_bytes(sketch.program([x], [z]))
    outcomes = []
    for _ in range(2):
        program = Program(tmp_path / "m.pte", weights_cache=tmp_path / "cache")
        np.testing.assert_allclose(program.run(given)[0], np.exp(given @ w.T * 1e-3), rtol=1e-4)
        ((step, _),) = program.method("forward").merged[0].straight
        outcomes.append(step.runtime.weights_cache)
        program.close()
    assert outcomes == ["saved", "hit"]


def test_results_whose_size_depends_on_elements_stay_outside():
    sketch = Sketch()
    x = sketch.tensor((6,))
    y = sketch.shift(x, (6,))
    places = sketch.tensor((6, 1), np.int64, shape_dynamism=1)
    sketch.kernel("aten::nonzero.out", y, places, places)
    chosen = sketch.tensor((6, 1), shape_dynamism=1)
    sketch.kernel(
        "dim_order_ops::_to_dim_order_copy.out", places, sketch.number(False), sketch.number([0, 1]), chosen, chosen
    )
    z = sketch.tensor((6, 1), shape_dynamism=1)
    sketch.delegate(lambda b, v: b.negate(v), [chosen], [z])
    program = Program(sketch.program([x], [z]))
    for x in ([0, -1, 1, -1, 2, 3], [-1, -1, -1, -1, -1, 0], [1, 1, 1, 1, 1, 1]) * 2:
        (result,) = program.run(np.array(x, np.float32))
        np.testing.assert_array_equal(result, -np.argwhere(np.array(x) + 1).astype(np.float32))
    assert program.plan().numpy_steps == 2


def test_empty_batches_run():
    sketch = Sketch()
    x = sketch.tensor((4, 3), shape_dynamism=1)
    y = sketch.shift(x, (4, 3))
    sketch.values[y]["val"][1]["shape_dynamism"] = 1
    z = sketch.unary("aten::relu.out", y, sizes=(4, 3))
    sketch.values[z]["val"][1]["shape_dynamism"] = 1
    program = Program(sketch.program([x], [z]))
    for _ in range(3):
        assert program.run(np.zeros((0, 3), np.float32))[0].shape == (0, 3)


# ---- the model


@files.needs_shared
def test_bert_is_one_graph():
    folder = files.SHARED / "models/bert_mini_fp32_b1"
    x, want = np.load(folder / "input_0.npy"), np.load(folder / "expected_et_0.npy")
    merged, plain = Program(folder / "model.pte"), Program(folder / "model.pte", merge=False)
    assert (plain.plan().runtimes, plain.plan().numpy_steps) == (18, 83)
    report = merged.plan()
    assert (report.runtimes, report.numpy_steps, report.delegates) == (1, 0, 18)
    for program in (merged, plain):
        np.testing.assert_allclose(program.run(x)[0], want, rtol=0, atol=1e-5 * np.abs(want).max())
    x = RNG.standard_normal(x.shape).astype(np.float32)
    np.testing.assert_allclose(merged.run(x)[0], plain.run(x)[0], rtol=0, atol=1e-5)
    x[0, 3, 5] = np.nan
    assert np.isnan(merged.run(x)[0]).all() == np.isnan(plain.run(x)[0]).all()


# ---- at random


class Dice:
    """A random program of delegates and operators over tensors of a few shapes."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.sketch = Sketch()
        self.shapes = {}
        self.inputs = [self.note(self.sketch.tensor(shape), shape) for shape in ((2, 3, 4), (3, 4))]

    def note(self, index, shape):
        self.shapes[index] = tuple(shape)
        return index

    def pick(self, rank=None):
        chosen = [index for index, shape in self.shapes.items() if rank is None or len(shape) == rank]
        return int(self.rng.choice(chosen)) if chosen else None

    def kernel(self, name, x, *args, sizes):
        return self.note(self.sketch.unary(name, x, *args, sizes=sizes), sizes)

    def step(self):
        s, rng = self.sketch, self.rng
        x = self.pick()
        shape = self.shapes[x]
        axis = int(rng.integers(len(shape)))
        match int(rng.integers(15)):
            case 0:
                return self.note(s.shift(x, shape, 0.5), shape)
            case 1:
                out = s.tensor(shape)
                s.delegate(lambda b, v: b.softmax(b.negate(v)), [x], [out])
                return self.note(out, shape)
            case 2:
                other = self.pick(len(shape))
                if self.shapes[other] != shape:
                    return None
                out, more = s.tensor(shape), s.tensor(shape)
                s.delegate(lambda b, v, w: (b.add(v, w), b.tanh(w)), [x, other], [out, more])
                self.note(more, shape)
                return self.note(out, shape)
            case 3:
                return self.kernel("aten::mul.Scalar_out", x, 0.5, sizes=shape)
            case 4:
                # Not among those that XNNPACK takes over.
                return self.kernel("aten::sqrt.out", self.kernel("aten::abs.out", x, sizes=shape), sizes=shape)
            case 5:
                return self.kernel("aten::flip.out", x, [axis], sizes=shape)
            case 6:
                perm = [int(each) for each in rng.permutation(len(shape))]
                return self.kernel("aten::permute_copy.out", x, perm, sizes=[shape[each] for each in perm])
            case 7:
                start = int(rng.integers(shape[axis]))
                stop = int(rng.integers(start, shape[axis])) + 1
                sizes = [*shape[:axis], stop - start, *shape[axis + 1 :]]
                return self.kernel("aten::slice_copy.Tensor_out", x, axis, start, stop, 1, sizes=sizes)
            case 8:
                if len(shape) < 2:
                    return None
                index = int(rng.integers(-shape[axis], shape[axis]))
                return self.kernel("aten::select_copy.int_out", x, axis, index, sizes=shape[:axis] + shape[axis + 1 :])
            case 9:
                if len(shape) > 3:
                    return None
                return self.kernel("aten::unsqueeze_copy.out", x, axis, sizes=[*shape[:axis], 1, *shape[axis:]])
            case 10:
                sizes = [*shape[:axis], 1, *shape[axis + 1 :]]
                return self.kernel("aten::mean.out", x, [axis], True, None, sizes=sizes)
            case 11:
                return self.kernel("aten::view_copy.out", x, [-1], sizes=[int(np.prod(shape))])
            case 12:
                other = self.pick()
                try:
                    sizes = np.broadcast_shapes(shape, self.shapes[other])
                except ValueError:
                    return None
                if np.prod(sizes) > 4096:
                    return None
                out = s.tensor(sizes)
                s.kernel("aten::add.out", x, other, s.number(1), out, out)
                return self.note(out, sizes)
            case 13:
                outs = [s.tensor(shape), *(s.tensor([*shape[:-1], 1]) for _ in range(2))]
                arrays = [s.constant(rng.standard_normal(shape[-1]).astype(np.float32)) for _ in range(2)]
                s.kernel(
                    "aten::native_layer_norm.out",
                    *(x, s.number([shape[-1]]), *arrays, s.number(1e-3), *outs, s.tensors(*outs)),
                )
                return self.note(outs[0], shape)
            case _:
                c = rng.standard_normal((5, shape[-1])).astype(np.float32)
                out = s.tensor([*shape[:-1], 5])
                s.delegate(lambda b, v: b.fully_connected(v, b.constant(c)), [x], [out])
                return self.note(out, [*shape[:-1], 5])


@pytest.mark.parametrize("seed", range(60))
def test_programs_at_random_agree(seed):
    dice = Dice(seed)
    made = [index for index in (dice.step() for _ in range(25)) if index is not None]
    outputs = [int(each) for each in dice.rng.choice(made, min(4, len(made)), replace=False)]
    arrays = [dice.rng.standard_normal(dice.shapes[index]).astype(np.float32) for index in dice.inputs]
    both(dice.sketch.program(dice.inputs, outputs), *arrays, tolerance=2e-5)


def test_the_document_lists_what_is_lowered():
    document = pathlib.Path(__file__).parents[1] / "docs" / "programs.md"
    (table,) = re.findall(r"^\| becomes nodes of a graph.*?(?=^$)", document.read_text("utf-8"), re.M | re.S)
    listed = re.findall(r"`([\w.]+)`", table)
    assert sorted(listed) == sorted(name.split("::")[1] for name in LOWERINGS)
