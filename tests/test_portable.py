from __future__ import annotations

import json
import math

import files
import numpy as np
import pytest

from xnnfast.containers import KernelCall, ListValue, ProgramFile, Tensor
from xnnfast.errors import FormatError, OperatorError, ShapeError
from xnnfast.portable import PORTABLE, OutSpec, key, missing

F, D, H = np.float32, np.float64, np.float16
L, W, U, B = np.int64, np.int32, np.uint8, np.bool_
INF, NAN = math.inf, math.nan


def f(*values):
    return np.array(values, F)


def n(*values):
    return np.array(values, L)


def b(*values):
    return np.array(values, B)


def run(name, *args, out=F, sizes=None):
    row = PORTABLE[name]
    if row.out_list or isinstance(out, tuple):
        return row.fn(list(args), [OutSpec(np.dtype(dtype), sizes) for dtype in out])
    return row.fn(list(args), OutSpec(np.dtype(out), sizes))


# ---- the table


@files.needs_shared
def test_every_operator_of_the_exported_programs_has_a_row():
    names = set()
    for path in files.shared_files("meta.json"):
        names |= set(json.loads(path.read_text()).get("non_delegated") or {})
    assert names
    assert missing(names) == []


def test_missing_names_each_once_in_order():
    assert missing(["aten::add.out", "x::b", "aten::fft.out", "x::b"]) == ["x::b", "aten::fft.out"]


def test_a_row_is_found_by_name_and_overload():
    assert key("aten::add", "out") in PORTABLE
    assert key("aten::copy_", "") == key("aten::copy_", None) == "aten::copy_"
    assert all(name == row.name for name, row in PORTABLE.items())


@pytest.mark.parametrize(
    ("name", "args", "inputs", "outputs"),
    [
        ("aten::add.out", [3, 9, 10, 8, 8], [3, 9, 10], [8]),
        ("aten::native_layer_norm.out", [0, 5, 6, 7, 8, 1, 2, 3, 9], [0, 5, 6, 7, 8], [1, 2, 3]),
        ("aten::split_copy.Tensor_out", [0, 1, 2, 7, 7], [0, 1, 2], [7]),
        ("aten::sym_size.int", [1, 2, 3], [1, 2], [3]),
        ("executorch_prim::et_view.default", [5, 7, 8], [5, 7], [8]),
        ("aten::copy_", [4, 5, 6, 9], [4, 5, 6], [4, 9]),
        ("executorch_prim::et_copy_index.tensor", [4, 5, 6], [4, 5, 6], [4]),
    ],
)
def test_the_args_of_a_call_are_taken_apart(name, args, inputs, outputs):
    routing = PORTABLE[name].split(args)
    assert (routing.inputs, routing.outputs) == (inputs, outputs)
    with pytest.raises(FormatError, match=f"the call has {len(args) + 1}"):
        PORTABLE[name].split([*args, 0])


def test_arguments_of_the_wrong_kind_are_refused_by_name():
    row = PORTABLE["aten::native_layer_norm.out"]
    row.check(["Tensor", "IntList", "Null", "Tensor", "Double"])
    with pytest.raises(FormatError, match="needs IntList for normalized_shape, the call has Int"):
        row.check(["Tensor", "Int", "Null", "Null", "Double"])
    with pytest.raises(FormatError, match="for input, the call has Null"):
        row.check(["Null", "IntList", "Null", "Null", "Double"])


@files.needs_shared
def test_the_rule_of_args_holds_for_every_call_of_the_exported_programs():
    calls = 0
    for path in files.shared_files("model.pte"):
        (plan,) = ProgramFile(path).plans
        for call in plan.chains[0].instructions:
            if not isinstance(call, KernelCall):
                continue
            calls += 1
            row = PORTABLE[str(plan.operators[call.op_index])]
            routing = row.split(call.args)
            row.check([plan.values.kind(index) for index in routing.inputs])
            returned = plan.values[call.args[-1]]
            if row.outs > 1:
                assert returned == ListValue("TensorList", tuple(routing.outputs))
            else:
                assert [call.args[-1]] == routing.outputs
    assert calls > 200


# Programs that are kernels alone.
KERNELS_ALONE = ["op_groupnorm", "op_layer_norm", "op_mean_last", "op_mm", "op_sum_last"]


@files.needs_shared
@pytest.mark.parametrize("name", KERNELS_ALONE)
def test_programs_of_kernels_alone_agree_with_executorch(name):
    folder = files.SHARED / "conformance" / name
    program = ProgramFile(folder / "model.pte")
    (plan,) = program.plans
    env = {index: np.load(folder / f"input_{place}.npy") for place, index in enumerate(plan.inputs)}

    def value(index):
        found = plan.values[index]
        if isinstance(found, ListValue):
            return [value(item) for item in found.items]
        if not isinstance(found, Tensor):
            return found
        if found.is_constant:
            return np.frombuffer(program.constant(found).data, found.dtype)[: math.prod(found.sizes)].reshape(
                found.sizes
            )
        return env[index]

    for call in plan.chains[0].instructions:
        assert isinstance(call, KernelCall)
        row = PORTABLE[str(plan.operators[call.op_index])]
        routing = row.split(call.args)
        outs = [OutSpec(plan.values[index].dtype, plan.values[index].sizes) for index in routing.outputs]
        results = row.fn([value(index) for index in routing.inputs], outs if len(outs) > 1 else outs[0])
        env.update(zip(routing.outputs, results if len(outs) > 1 else [results], strict=True))
    for place, index in enumerate(plan.outputs):
        expected = np.load(folder / f"expected_et_{place}.npy")
        assert env[index].dtype == expected.dtype
        np.testing.assert_allclose(env[index], expected, rtol=0, atol=1e-6 * np.abs(expected).max())


# ---- small cases: name, arguments, expected; the out tensors have the expected arrays' dtypes

X = np.arange(6, dtype=F).reshape(2, 3)
MATRIX = np.arange(12, dtype=F).reshape(3, 4)

CASES = [
    # Promotion: the wider float, a float over whole numbers, int64 over bool; a rank of 0 counts like any other.
    ("aten::add.out", [f(1, 2), n(3), 1], f(4, 5)),
    ("aten::add.out", [n(1, 2), np.array([3], W), 2], n(7, 8)),
    ("aten::add.out", [np.array([1, 2], H), np.array(0.5, F), 1], np.array([1.5, 2.5], H)),
    ("aten::add.out", [np.array([200], U), np.array([100], np.int8), 1], np.array([300], np.int16)),
    ("aten::add.Scalar_out", [n(1, 2), 0.5, 1], f(1.5, 2.5)),
    ("aten::add.Scalar_out", [b(True, False), 2, 1], n(3, 2)),
    ("aten::add.Scalar_out", [np.array([250], U), 10, 1], np.array([4], U)),
    ("aten::sub.out", [f(5), f(2), 2], f(1)),
    ("aten::rsub.Scalar_out", [f(1, 2), 10, 3], f(7, 4)),
    ("aten::mul.Scalar_out", [f(1, INF, NAN), 2.0], f(2, INF, NAN)),
    # Division: true division of whole numbers is float32; the modes round.
    ("aten::div.out", [n(1, -7), n(2, 2)], f(0.5, -3.5)),
    ("aten::div.Scalar_out", [n(3), 2], f(1.5)),
    ("aten::div.out_mode", [n(-7, 7, -6, 6), n(2, -2, 3, 4), "trunc"], n(-3, -3, -2, 1)),
    ("aten::div.out_mode", [n(-7, 7, -6, 6), n(2, -2, 3, 4), "floor"], n(-4, -4, -2, 1)),
    ("aten::div.out_mode", [f(-7.5, 1, -1, 0), f(2, 0, 0, 0), "floor"], f(-4, INF, -INF, INF)),
    ("aten::div.out_mode", [f(-7.5, 7.5), f(2, 2), "trunc"], f(-3, 3)),
    ("aten::div.Scalar_mode_out", [f(3), 2, None], f(1.5)),
    ("aten::floor_divide.out", [n(-7, 7), n(2, 2)], n(-4, 3)),
    # Remainders: of floats with the divisor's sign, of whole numbers with the dividend's, as ExecuTorch has it.
    ("aten::remainder.Tensor_out", [f(-7, 7, -6), f(3, -3, 3)], f(2, -2, 0)),
    ("aten::remainder.Scalar_out", [n(-7, 7), 3], n(-1, 1)),
    ("aten::fmod.Scalar_out", [f(-7, 7), 3], f(-1, 1)),
    ("aten::pow.Tensor_Scalar_out", [f(3, -2, NAN), 2], f(9, 4, NAN)),
    ("aten::pow.Tensor_Scalar_out", [f(4, -INF, -0.0, -1), 0.5], f(2, INF, 0, NAN)),
    ("aten::pow.Tensor_Scalar_out", [n(3), 2], n(9)),
    ("aten::pow.Scalar_out", [2, f(3, -1)], f(8, 0.5)),
    # NaN wins in minimum, maximum and clamp.
    ("aten::maximum.out", [f(NAN, 1, 2), f(1, NAN, 3)], f(NAN, NAN, 3)),
    ("aten::minimum.out", [f(NAN, 1, 2), f(1, NAN, 3)], f(NAN, NAN, 2)),
    ("aten::clamp.out", [f(NAN, -INF, INF, 0.5), 0, 6], f(NAN, 0, 6, 0.5)),
    ("aten::clamp.out", [f(0.5), 2, 1], f(1)),
    ("aten::clamp.out", [n(-5, 5), None, 3], n(-5, 3)),
    ("aten::clamp.Tensor_out", [f(-5, 5), f(-1), None], f(-1, 5)),
    ("aten::relu.out", [f(-1, NAN, 2)], f(0, NAN, 2)),
    ("aten::hardtanh.out", [f(-3, 0.5, 3), -1, 2], f(-1, 0.5, 2)),
    # Comparison and logic.
    ("aten::eq.Scalar_out", [f(-INF, 0, NAN), -INF], b(True, False, False)),
    ("aten::ne.Tensor_out", [f(NAN, 1), f(NAN, 1)], b(True, False)),
    ("aten::ge.Scalar_out", [n(-1, 0, 1), 0], b(False, True, True)),
    ("aten::lt.Scalar_out", [n(1, 2), 1.5], b(True, False)),
    ("aten::eq.Tensor_out", [np.array([16777217], D), f(16777216)], b(True)),
    ("aten::logical_not.out", [f(0, 2, NAN)], b(True, False, False)),
    ("aten::logical_and.out", [n(1, 0), f(2, 2)], b(True, False)),
    ("aten::bitwise_not.out", [b(True, False)], b(False, True)),
    ("aten::bitwise_and.Scalar_out", [n(6, 5), 3], n(2, 1)),
    ("aten::bitwise_left_shift.Tensor_Scalar_out", [n(3), 2], n(12)),
    # One argument: whole numbers become float32 where the result has fractions.
    ("aten::abs.out", [n(-3, 2)], n(3, 2)),
    ("aten::neg.out", [f(1, -0.0)], f(-1, 0)),
    ("aten::exp.out", [n(0)], f(1)),
    ("aten::rsqrt.out", [f(4, 0, INF, -1)], f(0.5, INF, 0, NAN)),
    ("aten::sqrt.out", [f(INF, 4, -1)], f(INF, 2, NAN)),
    ("aten::sigmoid.out", [f(0, -200, 200, INF)], f(0.5, 0, 1, 1)),
    ("aten::round.out", [f(0.5, 1.5, 2.5, -0.5)], f(0, 2, 2, -0.0)),
    ("aten::sign.out", [f(-2, 0, NAN)], f(-1, 0, NAN)),
    ("aten::isinf.out", [f(INF, NAN, 1)], b(True, False, False)),
    ("aten::leaky_relu.out", [f(-2, 3), 0.5], f(-1, 3)),
    ("aten::elu.out", [f(-INF, 2), 1.5, 2, 1], f(-3, 4)),
    # Choice.
    ("aten::where.self_out", [b(True, False), f(1, 2), f(3, NAN)], f(1, NAN)),
    ("aten::where.self_out", [b(True, False)[:, None], f(1, 2), np.array(9, F)], np.array([[1, 2], [9, 9]], F)),
    ("aten::where.self_out", [np.array([2, 0], U), n(1, 2), f(3.5, 4.5)], f(1, 4.5)),
    ("aten::where.self_out", [np.array(True), np.array(1, F), np.array(2, F)], np.array(1, F)),
    ("aten::masked_fill.Scalar_out", [f(1, 2), b(False, True), -INF], f(1, -INF)),
    # Sums and their like: negative axes, keepdim, none named means all.
    ("aten::sum.IntList_out", [X, [-1], True, None], np.array([[3], [12]], F)),
    ("aten::sum.IntList_out", [X, [], False, None], np.array(15, F)),
    ("aten::sum.IntList_out", [b(True, True), [0], False, None], np.array(2, L)),
    ("aten::mean.out", [X, [0], False, None], f(1.5, 2.5, 3.5)),
    ("aten::mean.out", [X.astype(H) + H(2000), None, True, None], np.array([[2002.5]], H)),
    ("aten::var.correction_out", [X, [1], None, False], f(1, 1)),
    ("aten::var.correction_out", [X[:1], [0], 1, False], f(NAN, NAN, NAN)),
    ("aten::var.out", [X, [1], False, True], np.array([[2 / 3], [2 / 3]], F)),
    ("aten::amax.out", [f(1, NAN, 3), [0], False], np.array(NAN, F)),
    ("aten::amin.out", [X, [], True], np.array([[0]], F)),
    ("aten::any.out", [X > 4, -1, True], np.array([[False], [True]])),
    ("aten::any.dims_out", [X, [], False], X > 0),
    ("aten::any.dims_out", [X, None, False], np.array(True)),
    ("aten::all.out", [X < 3, 1, False], b(True, False)),
    ("aten::any.all_out", [np.zeros((0, 3), F)], np.array(False)),
    ("aten::argmax.out", [f(1, 3, 3, NAN, NAN), 0, False], np.array(3, L)),
    ("aten::argmin.out", [X, None, True], np.array([[0]], L)),
    ("aten::max.dim_max", [X[:, ::-1], -1, True], (np.array([[2], [5]], F), np.array([[0], [0]], L))),
    ("aten::prod.int_out", [X, 0, False, None], f(0, 4, 10)),
    ("aten::cumsum.out", [X, 1, None], np.array([[0, 1, 3], [3, 7, 12]], F)),
    ("aten::topk.values", [f(1, 3, NAN, 3, 2), 3, 0, True, True], (f(NAN, 3, 3), n(2, 1, 3))),
    ("aten::topk.values", [f(1, 3, NAN, 3, 0), 2, -1, False, True], (f(0, 1), n(4, 0))),
    ("aten::_softmax.out", [f(1000, 1000, -1000), -1, False], f(0.5, 0.5, 0)),
    ("aten::_softmax.out", [f(-INF, -INF), 0, False], f(NAN, NAN)),
    ("aten::_softmax.out", [np.array(3, F), 0, False], np.array(1, F)),
    ("aten::_log_softmax.out", [f(0, 0), 0, False], f(-math.log(2), -math.log(2))),
    # Norms.
    (
        "aten::native_layer_norm.out",
        [f(-1, 1)[None], [2], f(2, 2), f(0.5, 0.5), 0.0],
        (np.array([[-1.5, 2.5]], F), np.array([[0]], F), np.array([[1]], F)),
    ),
    (
        "aten::native_layer_norm.out",
        [np.zeros((2, 0), F), [0], None, None, 1e-5],
        (np.zeros((2, 0), F), np.zeros((2, 1), F), np.full((2, 1), NAN, F)),
    ),
    (
        "aten::native_group_norm.out",
        [np.array([[-1, 1, 10, 30]], F)[..., None], f(1, 1, 2, 2), f(0, 0, 5, 5), 1, 4, 1, 2, 0.0],
        (np.array([[-1, 1, 3, 7]], F)[..., None], np.array([[0, 20]], F), np.array([[1, 0.1]], F)),
    ),
    (
        "aten::_native_batch_norm_legit_no_training.out",
        [np.array([[1, 10], [3, 30]], F), f(2, 1), f(0, 5), f(2, 20), f(1, 100), 0.1, 0.0],
        (np.array([[-2, 4], [2, 6]], F), np.zeros(0, F), np.zeros(0, F)),
    ),
    # Shapes.
    ("aten::view_copy.out", [X, [3, -1]], X.reshape(3, 2)),
    ("executorch_prim::et_view.default", [X, [6]], X.reshape(6)),
    ("aten::expand_copy.out", [f(1, 2)[:, None], [2, -1, 3], False], np.array([[[1] * 3, [2] * 3]] * 2, F)),
    ("aten::unsqueeze_copy.out", [X, -1], X[..., None]),
    ("aten::squeeze_copy.dims_out", [X[None, :, :, None], [0, 1]], X[..., None]),
    ("aten::squeeze_copy.dim_out", [X[None], -3], X),
    ("aten::permute_copy.out", [X[None], [-1, 0, 1]], X[None].transpose(2, 0, 1)),
    ("aten::transpose_copy.int_out", [X, 0, -1], X.T),
    ("aten::select_copy.int_out", [X, -1, -2], X[:, 1]),
    ("aten::slice_copy.Tensor_out", [X, -1, -2, 2**63 - 1, 1], X[:, 1:]),
    ("aten::slice_copy.Tensor_out", [X, 1, None, None, 2], X[:, ::2]),
    ("aten::slice_copy.Tensor_out", [X, 0, 2, 1, 1], X[:0]),
    ("aten::narrow_copy.out", [X, 1, -2, 1], X[:, 1:2]),
    ("aten::cat.out", [[np.zeros(0, F), X, n(7, 8)[:, None]], -1], np.array([[0, 1, 2, 7], [3, 4, 5, 8]], F)),
    ("aten::stack.out", [[f(1, 2), f(3, 4)], -1], np.array([[1, 3], [2, 4]], F)),
    ("aten::repeat.out", [f(1, 2), [2, 2]], np.array([[1, 2, 1, 2]] * 2, F)),
    ("aten::repeat_interleave.Tensor_out", [n(1, 0, 2), None], n(0, 2, 2)),
    ("aten::roll.out", [X, [1, -1], [0, 1]], np.array([[4, 5, 3], [1, 2, 0]], F)),
    ("aten::flip.out", [X, [-1]], X[:, ::-1]),
    ("aten::tril.out", [X, -1], np.array([[0, 0, 0], [3, 0, 0]], F)),
    ("aten::diagonal_copy.out", [X, 1, 0, 1], f(1, 5)),
    ("aten::unfold_copy.out", [f(0, 1, 2, 3, 4), 0, 3, 2], np.array([[0, 1, 2], [2, 3, 4]], F)),
    ("aten::as_strided_copy.out", [X, [2, 2], [1, 2], 1], np.array([[1, 3], [2, 4]], F)),
    ("aten::split_copy.Tensor_out", [X, 2, 1], (X[:, :2], X[:, 2:])),
    ("aten::split_with_sizes_copy.out", [X, [1, 0, 2], -1], (X[:, :1], X[:, 1:1], X[:, 1:])),
    ("aten::unbind_copy.int_out", [X, 0], (X[0], X[1])),
    ("aten::constant_pad_nd.out", [f(1, 2)[None], [1, 0, 0, 1], 9], np.array([[9, 1, 2], [9, 9, 9]], F)),
    ("aten::constant_pad_nd.out", [f(1, 2, 3), [-1, 1], 0.5], f(2, 3, 0.5)),
    ("aten::reflection_pad1d.out", [f(1, 2, 3)[None], [2, 1]], f(3, 2, 1, 2, 3, 2)[None]),
    ("aten::replication_pad1d.out", [f(1, 2, 3)[None], [2, 1]], f(1, 1, 1, 2, 3, 3)[None]),
    ("aten::pixel_shuffle.out", [np.arange(4, dtype=F).reshape(4, 1, 1), 2], np.array([[[0, 1], [2, 3]]], F)),
    ("aten::pixel_unshuffle.out", [np.array([[[0, 1], [2, 3]]], F), 2], np.arange(4, dtype=F).reshape(4, 1, 1)),
    # Conversions: the out tensor says to what.
    ("dim_order_ops::_to_dim_order_copy.out", [f(1.7, -1.7, 0), False, None], n(1, -1, 0)),
    ("dim_order_ops::_to_dim_order_copy.out", [f(0.5, 0, NAN), False, [0]], b(True, False, True)),
    ("aten::copy.out", [np.zeros((2, 2), F), n(1, 2), False], np.array([[1, 2], [1, 2]], F)),
    # Picking.
    ("aten::embedding.out", [MATRIX, np.array([[2, 0]], W), -1, False, False], MATRIX[None, [2, 0]]),
    ("aten::index_select.out", [MATRIX, -1, n(3, 0)], MATRIX[:, [3, 0]]),
    ("aten::gather.out", [MATRIX, 1, np.array([[3], [0]], L), False], np.array([[3], [4]], F)),
    ("aten::scatter.value_out", [X, 1, np.array([[2]], L), 9], np.array([[0, 1, 9], [3, 4, 5]], F)),
    ("aten::scatter_add.out", [f(1, 1), 0, n(0, 0), f(2, 3)], f(6, 1)),
    ("aten::index.Tensor_out", [MATRIX, [None, n(-1, 0)]], MATRIX[:, [-1, 0]]),
    ("aten::index.Tensor_out", [MATRIX, [b(True, False, True)]], MATRIX[[0, 2]]),
    ("aten::index_put.out", [f(1, 2, 3), [n(0, 0)], f(5, 5), True], f(11, 2, 3)),
    ("aten::select_scatter.out", [X, f(8, 9), 1, -1], np.array([[0, 1, 8], [3, 4, 9]], F)),
    ("aten::masked_select.out", [X, b(True, False, True)], f(0, 2, 3, 5)),
    ("aten::nonzero.out", [np.array([[1, 0], [2, 3]])], np.array([[0, 0], [1, 0], [1, 1]], L)),
    # Making.
    ("aten::full.out", [[2], 2.7], np.array([2, 2], W)),
    ("aten::full_like.out", [X, -INF, None], np.full((2, 3), -INF, F)),
    ("aten::zeros.out", [[0, 2]], np.zeros((0, 2), F)),
    ("aten::scalar_tensor.out", [-INF], np.array(-INF, F)),
    ("aten::arange.start_out", [5, 0, -2], n(5, 3, 1)),
    ("aten::arange.start_out", [0, 1, 0.25], f(0, 0.25, 0.5, 0.75)),
    ("aten::arange.out", [3], n(0, 1, 2)),
    # Products.
    ("aten::mm.out", [X, X.T], np.array([[5, 14], [14, 50]], F)),
    ("aten::mm.out", [np.zeros((2, 0), F), np.zeros((0, 3), F)], np.zeros((2, 3), F)),
    ("aten::bmm.out", [X[None], X.T[None]], np.array([[[5, 14], [14, 50]]], F)),
    ("aten::addmm.out", [f(1, 2), X, X.T, 2, 0.5], np.array([[4.5, 11], [9, 29]], F)),
    # Pooling and resizing.
    (
        "aten::max_pool2d_with_indices.out",
        [np.arange(9, dtype=F).reshape(1, 3, 3), [2, 2], [2, 2], [0, 0], [1, 1], True],
        (np.array([[[4, 5], [7, 8]]], F), np.array([[[4, 5], [7, 8]]], L)),
    ),
    (
        "aten::max_pool2d_with_indices.out",
        [np.full((1, 2, 2), -INF, F), [2, 2], [1, 1], [1, 1], [1, 1], False],
        (np.full((1, 3, 3), -INF, F), np.array([[[0, 0, 1], [0, 0, 1], [2, 2, 3]]], L)),
    ),
    (
        "aten::max_pool2d_with_indices.out",
        [np.array([[[NAN, 5], [1, NAN]]], F), [1, 2], [], [0], [1], False],
        (np.array([[[NAN], [1]]], F), np.array([[[0], [2]]], L)),
    ),
    ("aten::avg_pool2d.out", [X[None], [2, 2], [], [0, 0], False, True, None], np.array([[[2]]], F)),
    (
        "aten::avg_pool2d.out",
        [X[None], [2, 2], [2, 2], [1, 1], False, True, None],
        np.array([[[0, 0.75], [0.75, 2.25]]], F),
    ),
    (
        "aten::avg_pool2d.out",
        [X[None], [2, 2], [2, 2], [1, 1], False, False, None],
        np.array([[[0, 1.5], [3, 4.5]]], F),
    ),
    ("aten::avg_pool2d.out", [X[None], [2, 2], [2, 2], [0, 0], True, True, 3], np.array([[[8 / 3, 7 / 3]]], F)),
    ("aten::_adaptive_avg_pool2d.out", [X[None], [1, 2]], np.array([[[2, 3]]], F)),
    (
        "aten::upsample_bilinear2d.vec_out",
        [np.array([[[[0, 4]]]], F), [1, 4], False, None],
        np.array([[[[0, 1, 3, 4]]]], F),
    ),
    (
        "aten::upsample_bilinear2d.vec_out",
        [np.array([[[[0, 3]]]], F), None, True, [1.0, 2.0]],
        np.array([[[[0, 1, 2, 3]]]], F),
    ),
    ("aten::upsample_nearest2d.vec_out", [X[None, None], [1, 6], None], np.array([[[[0, 0, 1, 1, 2, 2]]]], F)),
    (
        "aten::grid_sampler_2d.out",
        [X[None, None], np.array([[[[-1, -1], [1, 1], [3, 0]]]], F), 0, 0, True],
        np.array([[[[0, 5, 0]]]], F),
    ),
    # Numbers.
    ("aten::sym_size.int", [X, -1], 3),
    ("aten::sym_numel", [X], 6),
    ("aten::_local_scalar_dense", [n(7)], 7),
    ("executorch_prim::add.Scalar", [2, 3], 5),
    ("executorch_prim::floordiv.Scalar", [-7, 2], -4),
    ("executorch_prim::floordiv.Scalar", [-7.0, 2], -4.0),
    ("executorch_prim::floordiv.int", [-7, 2], -3),
    ("executorch_prim::mod.Scalar", [-7, 2], -1),
    ("executorch_prim::truediv.Scalar", [1, 2], 0.5),
    ("executorch_prim::le.Scalar", [1, 1.5], True),
    ("executorch_prim::round.Scalar", [2.5], 2),
    ("executorch_prim::sym_ite.Scalar", [False, 1, 2.5], 2.5),
    ("executorch_prim::et_copy_index.tensor", [X[:1], f(7, 8, 9), 1], np.array([[0, 1, 2], [7, 8, 9]], F)),
    # Quantized.
    (
        "quantized_decomposed::quantize_per_tensor.out",
        [f(0.5, 1.5, 2.5, -0.5, 1e9, -INF), 1.0, 1, -128, 127, 1],
        np.array([1, 3, 3, 1, 127, -128], np.int8),
    ),
    ("quantized_decomposed::dequantize_per_tensor.out", [np.array([3, 255], U), 0.5, 1, 0, 255, 0, None], f(1, 127)),
    (
        "quantized_decomposed::quantize_per_channel.out",
        [X, np.array([1, 0.5]), n(0, -1), 0, -128, 127, 1],
        np.array([[0, 1, 2], [5, 7, 9]], np.int8),
    ),
    (
        "quantized_decomposed::dequantize_per_channel.out",
        [np.array([[1, 2]], np.int8), f(1, 2), None, -1, -128, 127, 1, None],
        np.array([[1, 4]], F),
    ),
    (
        "quantized_decomposed::choose_qparams_per_token_asymmetric.out",
        [np.array([[0, 255], [-255, 0]], F), 1],
        (np.array([[1], [1]], D), np.array([[-128], [127]], L)),
    ),
    (
        "quantized_decomposed::embedding_4bit.out",
        [np.array([[0x19, 0xF0], [0x88, 0x88]], U), np.array([[1, 2], [1, 1]], F), None, -8, 7, n(0)],
        np.array([[-7, 1, 14, -16]], F),
    ),
    (
        "quantized_decomposed::embedding_2bit.dtype_out",
        [np.array([[0b11100100]], U), f(0.5), f(1), -2, 1, n(0), None],
        np.array([[-1.5, -1, -0.5, 0]], H),
    ),
    (
        "quantized_decomposed::add.out",
        [np.array([10], U), 0.5, 0, 0, 255, np.array([5], U), 1.0, 1, 0, 255, 1.0, 3, 0, 255],
        np.array([12], U),
    ),
]


@pytest.mark.parametrize(("name", "args", "expected"), CASES, ids=[case[0] for case in CASES])
def test_a_small_case(name, args, expected):
    row = PORTABLE[name]
    several = isinstance(expected, tuple)
    before = [np.array(arg) if isinstance(arg, np.ndarray) else arg for arg in args]
    wanted = expected if several else (expected,)
    specs = [OutSpec(each.dtype, each.shape) if isinstance(each, np.ndarray) else None for each in wanted]
    result = row.fn(args, specs if several else specs[0])
    for got, each in zip(result if several else (result,), wanted, strict=True):
        if not isinstance(each, np.ndarray):
            assert type(got) is type(each)
            assert got == each
            continue
        assert isinstance(got, np.ndarray)
        assert (got.dtype, got.shape) == (each.dtype, each.shape)
        np.testing.assert_allclose(got.astype(D), each.astype(D), rtol=1e-6, atol=1e-7)
        for arg in args:
            if isinstance(arg, np.ndarray) and not row.view:
                assert not np.shares_memory(arg, got)
    for old, arg in zip(before, args, strict=True):
        if isinstance(arg, np.ndarray):
            np.testing.assert_array_equal(old, arg)


def test_every_row_has_a_small_case_or_a_test_of_its_family():
    seen = {case[0] for case in CASES}
    of_family = {
        # Elementwise functions of one argument or a pair, whose kernel is NumPy's function behind the shared casts.
        *(row.name for row in PORTABLE.values() if row.elementwise),
        # The same kernel under another name.
        *("aten::mean.dtype_out", "aten::max.unary_out", "aten::min.unary_out", "aten::min.dim_min", "aten::prod.out"),
        *("aten::all.dims_out", "aten::all.all_out", "aten::t_copy.out", "aten::fill.Scalar_out", "aten::empty.out"),
        *("aten::clone.out", "aten::alias_copy.out", "aten::detach_copy.out", "aten::lift_fresh_copy.out"),
        *("aten::_to_copy.out", "dim_order_ops::_clone_dim_order.out", "dim_order_ops::_empty_dim_order.out"),
        *("aten::ones.out", "aten::triu.out", "aten::var_mean.correction_out", "aten::slice_scatter.out"),
        *(f"aten::{word}_pad{rank}d.out" for word in ("reflection", "replication") for rank in (2, 3)),
        *(name for name in PORTABLE if name.startswith(("executorch_prim::", "quantized_decomposed::"))),
        # Below.
        *("aten::convolution.out", "aten::linear.out", "aten::gelu.out", "aten::glu.out", "aten::copy_"),
        *("aten::index_put_", "aten::fill.Tensor_out", "aten::scatter.src_out", "aten::masked_scatter.out"),
        *("aten::_native_batch_norm_legit.out", "aten::_native_batch_norm_legit.no_stats_out"),
        *("aten::_cdist_forward.out", "aten::_pdist_forward.out"),
    }
    assert set(PORTABLE) - seen - of_family == set()


# ---- functions


def test_functions_of_one_argument_take_every_type():
    for row in PORTABLE.values():
        if not row.elementwise or row.args != "T self" or "bitwise" in row.name:
            continue
        for dtype in (F, D, H, L):
            x = np.array([[1, 2, 3]], dtype)
            got = row.fn([x], OutSpec(np.dtype(F)))
            assert (got.dtype, got.shape) == (F, (1, 3)), row.name
            empty = row.fn([x[:0]], OutSpec(np.dtype(F)))
            assert empty.shape == (0, 3), row.name
            scalar = row.fn([np.array(1, dtype)], OutSpec(np.dtype(F)))
            assert isinstance(scalar, np.ndarray), row.name
            assert scalar.shape == (), row.name


@pytest.mark.parametrize(
    "name",
    [
        *("acos", "acosh", "asin", "asinh", "atan", "atanh", "ceil", "cos", "cosh", "erf", "exp", "expm1", "floor"),
        *("log", "log10", "log1p", "log2", "sin", "sinh", "sqrt", "tan", "tanh", "trunc"),
    ],
)
def test_functions_of_one_argument_are_those_of_their_names(name):
    x = [1.0, 1.5, 2.5] if name == "acosh" else [0.1, 0.5, 0.9]
    expected = [getattr(math, name)(each) for each in x]
    np.testing.assert_allclose(run(f"aten::{name}.out", f(*x)), expected, rtol=1e-6)
    np.testing.assert_allclose(run(f"aten::{name}.out", np.array(x), out=D), expected, rtol=1e-14)


@pytest.mark.parametrize("dtype", [F, D])
def test_erf_is_exact_to_the_type(dtype):
    x = np.concatenate([np.linspace(-6, 6, 40001), [0.0, -0.0, 1e-30, INF, -INF]]).astype(dtype)
    expected = np.array([math.erf(each) for each in x.tolist()])
    got = run("aten::erf.out", x, out=dtype)
    np.testing.assert_allclose(got, expected, rtol=5e-7 if dtype is F else 1e-15, atol=0)
    assert np.isnan(run("aten::erf.out", f(NAN), out=F)).all()


@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 20000)])
def test_gelu_in_both_forms(shape):
    x = np.random.default_rng(1).standard_normal(shape).astype(F) * F(3)
    wide = np.asarray(x, D)
    erf = np.array([math.erf(each / math.sqrt(2)) for each in wide.ravel()]).reshape(shape)
    np.testing.assert_allclose(run("aten::gelu.out", x, "none"), wide / 2 * (1 + erf), atol=2e-6)
    inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
    np.testing.assert_allclose(run("aten::gelu.out", x, "tanh"), wide / 2 * (1 + np.tanh(inner)), atol=2e-6)


def test_float16_is_computed_wide_and_rounded_once():
    x = np.array([2000, 2001, 2002, 2003] * 50, H)
    assert run("aten::mean.out", x, [0], False, None, out=H) == H(np.mean(x, dtype=F))
    y, mean, deviation = run("aten::native_layer_norm.out", x[None], [200], None, None, 1e-5, out=(H, H, H))
    assert y.dtype == mean.dtype == deviation.dtype == H
    wide = x.astype(D)
    np.testing.assert_allclose(y[0], (wide - wide.mean()) / np.sqrt(wide.var() + 1e-5), atol=1e-3)


def test_bfloat16_where_ml_dtypes_is_installed():
    bfloat16 = np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    x = np.array([1, 2.5], bfloat16)
    assert run("aten::add.out", x, np.array([1, 1], H), 1, out=F).tolist() == [2, 3.5]
    got = run("aten::mul.Scalar_out", x, 2, out=bfloat16)
    assert got.dtype == bfloat16
    assert got.astype(F).tolist() == [2, 5]


def test_layer_norm_keeps_its_precision_far_from_zero():
    x = (np.random.default_rng(2).standard_normal((4, 64)) * 1e-2 + 100).astype(F)
    wide = x.astype(D)
    expected = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    y, _, _ = run("aten::native_layer_norm.out", x, [64], None, None, 1e-5, out=(F, F, F))
    np.testing.assert_allclose(y, expected, atol=5e-3)


def test_where_chooses_bits_and_all_shapes():
    rng = np.random.default_rng(3)
    values = np.array([NAN, -0.0, INF, 1e-45, 1], F)
    for shapes in [
        ((4, 5), (5,), (4, 1)),
        ((4, 1), (4, 5), (1, 5)),
        ((), (4, 5), ()),
        ((4, 5), (), ()),
        ((0, 5), (5,), ()),
    ]:
        condition = rng.random(shapes[0]) > 0.5
        condition = np.asarray(condition)
        first, second = (np.asarray(rng.choice(values, shape), F) for shape in shapes[1:])
        got = run("aten::where.self_out", condition, first, second)
        expected = np.where(condition, first, second)
        assert got.shape == expected.shape
        assert got.tobytes() == expected.tobytes()


# ---- convolution


def reference_convolution(x, weight, stride, padding, dilation, transposed, output_padding, groups):
    """By the definition: every product of an input, a weight and the output it adds to."""
    batch, channels, size = x.shape
    kernel = weight.shape[2]
    per_group = channels // groups
    if transposed:
        outputs = weight.shape[1] * groups
        places = (size - 1) * stride - 2 * padding + dilation * (kernel - 1) + output_padding + 1
    else:
        outputs = weight.shape[0]
        places = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    y = np.zeros((batch, outputs, places))
    for o, i, k in np.ndindex(outputs, channels, kernel):
        group = i // per_group
        if o // (outputs // groups) != group:
            continue
        w = weight[i, o - group * weight.shape[1], k] if transposed else weight[o, i - group * per_group, k]
        for place in range(size if transposed else places):
            source, target = (place, place * stride - padding + k * dilation)[:: 1 if transposed else -1]
            if 0 <= source < size and 0 <= target < places if transposed else 0 <= source < size:
                y[:, o, target if transposed else place] += x[:, i, source] * w
    return y


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("stride", "padding", "dilation", "groups", "output_padding"),
    [(1, 0, 1, 1, 0), (2, 1, 1, 2, 1), (1, 2, 2, 1, 0), (3, 2, 2, 2, 2), (2, 3, 1, 4, 0)],
)
def test_convolution_is_the_sum_of_its_products(transposed, stride, padding, dilation, groups, output_padding):
    rng = np.random.default_rng(4)
    x = rng.standard_normal((2, 4, 9)).astype(F)
    weight = rng.standard_normal((4, 2, 3) if transposed else (8, 4 // groups, 3)).astype(F)
    expected = reference_convolution(x, weight, stride, padding, dilation, transposed, output_padding, groups)
    bias = rng.standard_normal(expected.shape[1]).astype(F)
    args = [[stride], [padding], [dilation], transposed, [output_padding], groups]
    np.testing.assert_allclose(run("aten::convolution.out", x, weight, None, *args), expected, atol=1e-5)
    got = run("aten::convolution.out", x, weight, bias, *args)
    np.testing.assert_allclose(got, expected + bias[:, None], atol=1e-5)
    assert got.flags.c_contiguous


def test_convolution_in_two_dimensions_and_one_number_for_both():
    x = np.arange(16, dtype=F).reshape(1, 1, 4, 4)
    weight = np.ones((1, 1, 2, 3), F)
    got = run("aten::convolution.out", x, weight, None, [2, 1], [0, 1], [1], False, [0], 1)
    padded = np.pad(x[0, 0], [(0, 0), (1, 1)])
    expected = [[padded[r : r + 2, c : c + 3].sum() for c in range(4)] for r in (0, 2)]
    np.testing.assert_array_equal(got[0, 0], expected)


def test_transposed_convolution_with_dilation():
    x = np.array([[[[1, 2], [3, 4]]]], F)
    got = run("aten::convolution.out", x, x, None, [1, 1], [0, 0], [2, 2], True, [0, 0], 1)
    assert got[0, 0].tolist() == [[1, 2, 2, 4], [3, 4, 6, 8], [3, 6, 4, 8], [9, 12, 12, 16]]


def test_linear_and_glu():
    np.testing.assert_array_equal(run("aten::linear.out", X[None], X, f(1, 2)), X[None] @ X.T + f(1, 2))
    x = f(2, 3, 0, 100)
    np.testing.assert_allclose(run("aten::glu.out", x, -1), f(1, 3))


def test_batch_norm_of_the_batch_itself():
    x = np.random.default_rng(5).standard_normal((3, 2, 4)).astype(F)
    y, mean, deviation = run(
        "aten::_native_batch_norm_legit.no_stats_out", x, f(2, 3), f(0, 1), True, 0.1, 1e-5, out=(F, F, F)
    )
    np.testing.assert_allclose(mean, x.mean((0, 2)), atol=1e-6)
    np.testing.assert_allclose(deviation, 1 / np.sqrt(x.var((0, 2)) + 1e-5), rtol=1e-5)
    expected = (x - mean[:, None]) * deviation[:, None] * f(2, 3)[:, None] + f(0, 1)[:, None]
    np.testing.assert_allclose(y, expected, atol=1e-5)
    args = [x, f(2, 3), f(0, 1), mean, x.var((0, 2)), False, 0.1, 1e-5]
    np.testing.assert_allclose(
        run("aten::_native_batch_norm_legit.out", *args, out=(F, F, F), sizes=(0,))[0], y, atol=1e-5
    )


def test_distances():
    a = np.array([[0, 0], [3, 4]], F)
    for p, expected in [(2.0, 5), (1.0, 7), (INF, 4), (0.0, 2), (3.0, 91 ** (1 / 3))]:
        np.testing.assert_allclose(
            run("aten::_cdist_forward.out", a, a, p, None), [[0, expected], [expected, 0]], rtol=1e-6
        )
        np.testing.assert_allclose(run("aten::_pdist_forward.out", a, p), [expected], rtol=1e-6)


def test_scattering():
    got = run("aten::scatter.src_out", X, 0, np.array([[1, 0, 1]]), np.array([[7, 8, 9]], F))
    assert got.tolist() == [[0, 8, 2], [7, 4, 9]]
    assert run("aten::masked_scatter.out", X, b(False, True, True), f(6, 7, 8, 9)).tolist() == [[0, 6, 7], [3, 8, 9]]
    assert run("aten::fill.Tensor_out", n(1, 2), np.array(2.7, F), out=L).tolist() == [2, 2]


def test_operators_in_place_give_the_new_content_twice_and_leave_the_old():
    old = f(1, 2, 3)
    content, returned = run("aten::copy_", old, n(4, 5, 6), False)
    assert content is returned
    assert content.tolist() == [4, 5, 6]
    content, returned = run("aten::index_put_", old, [n(-1)], f(9), False)
    assert returned.tolist() == [1, 2, 9]
    assert old.tolist() == [1, 2, 3]
    assert not PORTABLE["aten::copy_"].pure


def test_views_do_not_copy():
    for name, args in [
        ("aten::view_copy.out", [X, [3, 2]]),
        ("aten::expand_copy.out", [X, [9, 2, 3], False]),
        ("aten::slice_copy.Tensor_out", [X, 0, 1, 2, 1]),
        ("aten::permute_copy.out", [X, [1, 0]]),
        ("dim_order_ops::_clone_dim_order.out", [X, False, None]),
    ]:
        assert PORTABLE[name].view
        assert np.shares_memory(X, run(name, *args)), name


# ---- refusals


@pytest.mark.parametrize(
    ("name", "args", "text"),
    [
        ("aten::embedding.out", [MATRIX, n(3), -1, False, False], r"indices in 0\.\.2, found 3"),
        ("aten::embedding.out", [MATRIX, n(-1), -1, False, False], r"indices in 0\.\.2, found -1"),
        ("aten::gather.out", [X, 1, np.array([[3]]), False], r"indices in 0\.\.2, found 3"),
        ("aten::index.Tensor_out", [X, [n(-3)]], r"indices in -2\.\.1, found -3"),
        ("aten::index_select.out", [X, 0, f(1)], "whole numbers as indices, found float32"),
        ("aten::select_copy.int_out", [X, 1, 3], r"index in -3\.\.2"),
        ("aten::sum.IntList_out", [X, [2], False, None], r"dimension in -2\.\.1, found 2"),
        ("aten::sum.IntList_out", [X, [0, -2], False, None], "each dimension once"),
        ("aten::view_copy.out", [X, [4, -1]], "divide the 6 elements"),
        ("aten::view_copy.out", [X, [-1, -1]], "at most one -1"),
        ("aten::expand_copy.out", [X, [4, 3], False], "can't expand"),
        ("aten::add.out", [f(1, 2), f(1, 2, 3), 1], "broadcast"),
        ("aten::div.out_mode", [n(1), n(0), "floor"], "divisor other than 0"),
        ("aten::remainder.Scalar_out", [n(1), 0], "divisor other than 0"),
        ("aten::full.out", [[1], 1e300], "float32 can hold"),
        ("aten::as_strided_copy.out", [X, [2], [6], None], "indices in"),
        ("aten::slice_copy.Tensor_out", [X, 0, None, None, 0], "step of 1 or more"),
        ("aten::mm.out", [X, X], "matrices of rank 2 that fit"),
        ("aten::convolution.out", [X[None], X[None], None, [1], [0], [1], False, [0], 2], "in 2 groups"),
        ("aten::avg_pool2d.out", [X[None], [2, 2], [1, 1], [2, 0], False, True, None], "at most half the window"),
        ("aten::native_layer_norm.out", [X, [2], None, None, 0.1], r"ends in \(2,\)"),
        ("aten::cat.out", [[X, f(1)], 0], "dimensions"),
        ("aten::topk.values", [f(1), 2, 0, True, True], r"k in 0\.\.1"),
        ("executorch_prim::mul.Scalar", [2**62, 4], "int64 can hold"),
        ("executorch_prim::mod.int", [1, 0], "zero"),
    ],
)
def test_values_that_do_not_fit_are_refused_with_the_operator_named(name, args, text):
    row = PORTABLE[name]
    specs = [OutSpec(np.dtype(F))] * 3
    with pytest.raises(OperatorError, match=text) as caught:
        row.fn(args, specs[: row.outs] if row.outs > 1 else specs[0])
    assert name in str(caught.value)
    assert caught.value.op == name


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("aten::full.out", [[2**20, 2**20], 0]),
        ("aten::zeros.out", [[-1]]),
        ("aten::arange.start_out", [0, 2**40, 1]),
        ("aten::repeat.out", [X, [2**30, 2**30]]),
        ("aten::constant_pad_nd.out", [X, [2**40, 0], 0]),
        ("aten::upsample_nearest2d.vec_out", [X[None, None], [2**20, 2**20], None]),
        ("aten::expand_copy.out", [X, [2**40, 2, 3], False]),
    ],
)
def test_nothing_is_allocated_beyond_what_the_program_planned(name, args):
    with pytest.raises(ShapeError, match="sizes of 0 or more" if name == "aten::zeros.out" else "the program planned"):
        run(name, *args, sizes=(4, 4))


# ---- against PyTorch, where it is installed


def test_promotion_is_pytorchs_for_tensors_of_a_dimension():
    torch = pytest.importorskip("torch")
    dtypes = [F, D, H, L, W, np.int16, np.int8, U, B]
    for first in dtypes:
        for second in dtypes:
            a, c = np.array([1, 0], first), np.array([1, 1], second)
            expected = torch.mul(torch.from_numpy(a), torch.from_numpy(c)).numpy()
            np.testing.assert_array_equal(run("aten::mul.out", a, c, out=expected.dtype), expected)
