"""The operators that XNNPACK can express: how each of the portable ones becomes nodes of a graph.

In comes a Call, which knows the operands of one operator; its lowering adds nodes to a Maker and returns the ids of the
results. A lowering raises Unfit, or an operator's row Refusal, for what it can't express exactly: that stays in NumPy.
Sums are made in another order than NumPy's; NaN and infinities come out as the portable kernel gives them, but
for what the rows of :mod:`xnnfast.ops` say of single operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from .merge_graph import DATATYPES, KEEP_DIMS, Array, Shape
from .ops._rules import MAX_RANK
from .portable.movement import expand_shape, view_shape

if TYPE_CHECKING:
    from .merge_graph import Maker

TRANSPOSE = 0x01
#: Most elements of a constant that only stretches another.
MOST_ONES = 1 << 20
#: The largest float32.
LARGEST = float(np.finfo(np.float32).max)


class Unfit(Exception):
    """XNNPACK can't express an operator, or not exactly."""


class Call:
    """One operator to be lowered: module merge makes it."""

    maker: Maker
    name: str

    def is_tensor(self, place: int) -> bool:
        raise NotImplementedError

    def tensor(self, place: int) -> int:
        """The id of a tensor operand with its own datatype; Unfit if XNNPACK has none such."""
        raise NotImplementedError

    def tensors(self, place: int) -> list[int]:
        """The ids of a list of tensors."""
        raise NotImplementedError

    def known(self, place: int) -> Any:
        """An operand that never changes, a number or an array; Unfit if it does."""
        raise NotImplementedError

    def array(self, place: int) -> Array | None:
        """A tensor operand that never changes, None if it does or is absent."""
        raise NotImplementedError

    def sizes(self, place: int) -> Shape:
        """Logical sizes of a tensor operand."""
        raise NotImplementedError

    def dtype(self, place: int) -> np.dtype[Any]:
        raise NotImplementedError

    def out_dtype(self, result: int = 0) -> np.dtype[Any]:
        raise NotImplementedError

    def out_sizes(self, result: int = 0) -> Shape:
        raise NotImplementedError

    def is_used(self, result: int) -> bool:
        raise NotImplementedError

    # -- derived

    @property
    def datatype(self) -> str:
        """XNNPACK's name for the dtype of the result."""
        return datatype(self.out_dtype())

    def number(self, place: int) -> float:
        """A number operand that float32 can hold."""
        value = self.known(place)
        if not isinstance(value, (int, float)):
            raise Unfit
        number = float(value)
        if math.isfinite(number) and abs(number) > LARGEST:
            raise Unfit
        return number

    def ints(self, place: int) -> list[int]:
        values = self.known(place)
        if values is None:
            return []
        if not all(isinstance(value, int) for value in values):
            raise Unfit
        return list(values)

    def real(self, place: int) -> int:
        """A tensor operand as fp32: what portable kernels compute in."""
        array = self.array(place)
        if array is not None and array.dtype != np.float32:
            return self.maker.constant(array.astype(np.float32))
        return self.cast(self.tensor(place), "fp32")

    def cast(self, id: int, datatype: str) -> int:
        if self.maker.values[id].datatype == datatype:
            return id
        return self.maker.node("convert", (id,), datatype=datatype)

    def done(self, id: int) -> list[int | None]:
        """The result, rounded to its own datatype."""
        return [self.cast(id, self.datatype)]

    def rank(self, place: int) -> int:
        return len(self.sizes(place))

    def axis(self, place: int, rank: int) -> int:
        value = self.known(place)
        if not isinstance(value, int) or not -max(rank, 1) <= value < max(rank, 1):
            raise Unfit
        return value % max(rank, 1)


def datatype(dtype: np.dtype[Any]) -> str:
    try:
        return DATATYPES[dtype.name]
    except KeyError:
        raise Unfit from None


Lowering: TypeAlias = Callable[[Call], Sequence[int | None]]
LOWERINGS: dict[str, Lowering] = {}


def lowers(*names: str) -> Callable[[Lowering], Lowering]:
    def note(function: Lowering) -> Lowering:
        for name in names:
            LOWERINGS[name] = function
        return function

    return note


# ---------------------------------------------------------------------------------------------------
# Element by element


def _only_floats(call: Call, *places: int) -> None:
    """The kernel computes in float32: a tensor among the operands is of a float type, and so is the result."""
    call.datatype  # noqa: B018 - refuses others
    if not any(call.dtype(place).kind == "f" for place in places if call.is_tensor(place)):
        raise Unfit
    if any(call.dtype(place) == np.float64 for place in places if call.is_tensor(place)):
        raise Unfit


def _binary(name: str, scaled: bool) -> Lowering:
    def lowering(call: Call) -> Sequence[int | None]:
        _only_floats(call, 0, 1)
        first = call.real(0)
        second = call.real(1) if call.is_tensor(1) else call.maker.scalar(call.number(1))
        if scaled and call.number(2) != 1:
            second = call.maker.node("multiply", (second, call.maker.scalar(call.number(2))))
        return call.done(call.maker.node(name, (first, second)))

    return lowering


for _name, _op, _scaled in (
    ("add.out", "add", True),
    ("add.Scalar_out", "add", True),
    ("sub.out", "subtract", True),
    ("sub.Scalar_out", "subtract", True),
    ("mul.out", "multiply", False),
    ("mul.Scalar_out", "multiply", False),
    ("div.out", "divide", False),
    ("div.Scalar_out", "divide", False),
):
    LOWERINGS[f"aten::{_name}"] = _binary(_op, _scaled)


@lowers("aten::rsub.Scalar_out")
def _rsub(call: Call) -> Sequence[int | None]:
    _only_floats(call, 0)
    if call.number(2) != 1:
        raise Unfit
    return call.done(call.maker.node("subtract", (call.maker.scalar(call.number(1)), call.real(0))))


def _extremum(name: str) -> Lowering:
    def lowering(call: Call) -> Sequence[int | None]:
        _only_floats(call, 0, 1)
        # Of a NaN and a number XNNPACK gives the second operand: exact if the first is never NaN.
        for first, second in ((0, 1), (1, 0)):
            array = call.array(first)
            if array is not None and not np.isnan(array).any():
                return call.done(call.maker.node(name, (call.real(first), call.real(second))))
        raise Unfit

    return lowering


LOWERINGS["aten::minimum.out"] = _extremum("minimum")
LOWERINGS["aten::maximum.out"] = _extremum("maximum")


@lowers("aten::pow.Tensor_Scalar_out")
def _power(call: Call) -> Sequence[int | None]:
    _only_floats(call, 0)
    exponent = call.number(1)
    if exponent not in (2, 3):
        raise Unfit
    x = call.real(0)
    square = call.maker.node("square", (x,))
    return call.done(square if exponent == 2 else call.maker.node("multiply", (square, x)))


def _unary(name: str) -> Lowering:
    def lowering(call: Call) -> Sequence[int | None]:
        _only_floats(call, 0)
        return call.done(call.maker.node(name, (call.real(0),)))

    return lowering


# Not among them: sqrt and rsqrt, which XNNPACK computes as NaN at infinity and 0, and log, which gives numbers for NaN
# and infinity where there is no AVX-512.
for _name, _op in (
    ("abs", "abs"),
    ("neg", "negate"),
    ("ceil", "ceiling"),
    ("floor", "floor"),
    ("cos", "cosine"),
    ("sin", "sine"),
    ("exp", "exp"),
    ("sigmoid", "sigmoid"),
    ("tanh", "tanh"),
):
    LOWERINGS[f"aten::{_name}.out"] = _unary(_op)


def _clamp(call: Call, low: float, high: float) -> Sequence[int | None]:
    _only_floats(call, 0)
    if not low <= high:
        raise Unfit
    return call.done(call.maker.node("clamp", (call.real(0),), clamp=(low, high)))


@lowers("aten::relu.out")
def _relu(call: Call) -> Sequence[int | None]:
    return _clamp(call, 0.0, math.inf)


@lowers("aten::clamp.out", "aten::hardtanh.out")
def _limits(call: Call) -> Sequence[int | None]:
    low = -math.inf if call.known(1) is None else call.number(1)
    return _clamp(call, low, math.inf if call.known(2) is None else call.number(2))


@lowers("aten::leaky_relu.out")
def _leaky_relu(call: Call) -> Sequence[int | None]:
    _only_floats(call, 0)
    return call.done(call.maker.node("leaky_relu", (call.real(0),), attrs={"negative_slope": call.number(1)}))


@lowers("aten::elu.out")
def _elu(call: Call) -> Sequence[int | None]:
    _only_floats(call, 0)
    if call.number(2) != 1 or call.number(3) != 1:
        raise Unfit
    return call.done(call.maker.node("elu", (call.real(0),), attrs={"alpha": call.number(1)}))


@lowers("aten::gelu.out")
def _gelu(call: Call) -> Sequence[int | None]:
    _only_floats(call, 0)
    maker, x = call.maker, call.real(0)
    kind = call.known(1)
    if kind == "none":
        return call.done(maker.node("gelu", (x,)))
    if kind != "tanh":
        raise Unfit
    cube = maker.node("multiply", (maker.node("square", (x,)), x))
    inner = maker.node("add", (x, maker.node("multiply", (cube, maker.scalar(0.044715)))))
    bent = maker.node("tanh", (maker.node("multiply", (inner, maker.scalar(math.sqrt(2 / math.pi)))),))
    half = maker.node("multiply", (x, maker.scalar(0.5)))
    return call.done(maker.node("multiply", (half, maker.node("add", (bent, maker.scalar(1.0))))))


# ---------------------------------------------------------------------------------------------------
# Reductions and what is made of them


def _axes(call: Call, place: int, rank: int) -> list[int]:
    named = call.ints(place)
    if rank == 0 or any(not -rank <= axis < rank for axis in named):
        raise Unfit
    return sorted({axis % rank for axis in named}) if named else list(range(rank))


def _mean(call: Call, x: int, axes: Sequence[int], keep: bool) -> int:
    maker = call.maker
    # XNNPACK's mean of all dimensions without KEEP_DIMS has no dimension left; ours have one.
    every = len(axes) == len(maker.shape(x))
    y = maker.node(
        "static_reduce", (x,), attrs={"reduction_axes": tuple(axes)}, flags=KEEP_DIMS if keep or every else 0
    )
    return maker.node("static_reshape", (y,), attrs={"new_shape": (1,)}) if every and not keep else y


@lowers("aten::mean.out", "aten::sum.IntList_out")
def _average(call: Call) -> Sequence[int | None]:
    _only_floats(call, 0)
    axes = _axes(call, 1, call.rank(0))
    y = _mean(call, call.real(0), axes, bool(call.known(2)))
    if "sum" in call.name:
        y = call.maker.node("multiply", (y, call.maker.scalar(float(math.prod(call.sizes(0)[axis] for axis in axes)))))
    return call.done(y)


@lowers("aten::_softmax.out")
def _softmax(call: Call) -> Sequence[int | None]:
    _only_floats(call, 0)
    rank = call.rank(0)
    if rank == 0 or call.axis(1, rank) != rank - 1:
        raise Unfit
    return call.done(call.maker.node("softmax", (call.real(0),)))


def _standardised(call: Call, x: int, axes: Sequence[int], eps: float) -> int:
    """x less its mean over its deviation."""
    maker = call.maker
    # XNNPACK's reciprocal root is NaN at 0, and flushes denormals.
    if not eps >= float(np.finfo(np.float32).tiny):
        raise Unfit
    centred = maker.node("subtract", (x, _mean(call, x, axes, True)))
    variance = _mean(call, maker.node("square", (centred,)), axes, True)
    shifted = maker.node("add", (variance, maker.scalar(eps)))
    return maker.node("multiply", (centred, maker.node("reciprocal_square_root", (shifted,))))


def _affine(call: Call, y: int, weight: int | None, bias: int | None, shape: Shape | None = None) -> int:
    maker = call.maker
    for place, op in ((weight, "multiply"), (bias, "add")):
        if place is None or not call.is_tensor(place):
            continue
        parameter = call.real(place)
        if shape is not None:
            parameter = maker.node("static_reshape", (parameter,), attrs={"new_shape": shape})
        y = maker.node(op, (y, parameter))
    return y


def _first_alone(call: Call) -> None:
    if call.is_used(1) or call.is_used(2):
        raise Unfit


@lowers("aten::native_layer_norm.out")
def _layer_norm(call: Call) -> Sequence[int | None]:
    _only_floats(call, 0)
    _first_alone(call)
    rank, count = call.rank(0), len(call.ints(1))
    if not 0 < count <= rank or tuple(call.ints(1)) != call.sizes(0)[rank - count :]:
        raise Unfit
    y = _standardised(call, call.real(0), range(rank - count, rank), call.number(4))
    return [*call.done(_affine(call, y, 2, 3)), None, None]


@lowers("aten::native_group_norm.out")
def _group_norm(call: Call) -> Sequence[int | None]:
    _only_floats(call, 0)
    _first_alone(call)
    shape, groups = call.sizes(0), call.known(6)
    if len(shape) < 2 or not isinstance(groups, int) or groups < 1 or shape[1] % groups or 0 in shape:
        raise Unfit
    maker = call.maker
    rows = maker.node(
        "static_reshape", (call.real(0),), attrs={"new_shape": (shape[0], groups, math.prod(shape[1:]) // groups)}
    )
    y = maker.node("static_reshape", (_standardised(call, rows, (2,), call.number(7)),), attrs={"new_shape": shape})
    return [*call.done(_affine(call, y, 1, 2, (shape[1],) + (1,) * (len(shape) - 2))), None, None]


@lowers("aten::_native_batch_norm_legit_no_training.out")
def _batch_norm(call: Call) -> Sequence[int | None]:
    _only_floats(call, 0)
    _first_alone(call)
    shape = call.sizes(0)
    mean, variance = call.array(3), call.array(4)
    weight = call.array(1) if call.is_tensor(1) else np.ones(1, np.float32)
    bias = call.array(2) if call.is_tensor(2) else np.zeros(1, np.float32)
    if len(shape) < 2 or mean is None or variance is None or weight is None or bias is None:
        raise Unfit
    with np.errstate(all="ignore"):
        scale = weight.astype(np.float64) / np.sqrt(variance.astype(np.float64) + call.number(6))
        shift = bias.astype(np.float64) - mean.astype(np.float64) * scale
    if not (np.isfinite(scale).all() and np.isfinite(shift).all()):
        raise Unfit
    maker, places = call.maker, (-1,) + (1,) * (len(shape) - 2)
    y = maker.node("multiply", (call.real(0), maker.constant(scale.astype(np.float32).reshape(places))))
    y = maker.node("add", (y, maker.constant(shift.astype(np.float32).reshape(places))))
    return [*call.done(y), None, None]


# ---------------------------------------------------------------------------------------------------
# Moving elements


def _reshaped(call: Call, shape: Sequence[int]) -> Sequence[int | None]:
    x = call.tensor(0)
    shape = tuple(shape) or (1,)
    if len(shape) > MAX_RANK or 0 in shape:
        raise Unfit
    if call.maker.shape(x) != shape:
        x = call.maker.node("static_reshape", (x,), attrs={"new_shape": shape})
    return call.done(x)


@lowers(
    "aten::clone.out",
    "aten::alias_copy.out",
    "aten::detach_copy.out",
    "aten::lift_fresh_copy.out",
    "dim_order_ops::_clone_dim_order.out",
    "aten::_to_copy.out",
    "dim_order_ops::_to_dim_order_copy.out",
)
def _copy(call: Call) -> Sequence[int | None]:
    return call.done(call.tensor(0))


@lowers("aten::view_copy.out", "executorch_prim::et_view.default")
def _view(call: Call) -> Sequence[int | None]:
    return _reshaped(call, view_shape(call.sizes(0), call.ints(1)))


@lowers("aten::unsqueeze_copy.out", "aten::squeeze_copy.dim_out", "aten::squeeze_copy.dims_out")
def _rearranged(call: Call) -> Sequence[int | None]:
    return _reshaped(call, call.out_sizes())


@lowers("aten::expand_copy.out")
def _expand(call: Call) -> Sequence[int | None]:
    maker, x = call.maker, call.tensor(0)
    shape = expand_shape(call.sizes(0), call.ints(1)) or (1,)
    if len(shape) > MAX_RANK or 0 in shape:
        raise Unfit
    if maker.shape(x) == shape:
        return call.done(x)
    if math.prod(shape) > MOST_ONES:
        raise Unfit
    # Multiplied by one, the broadcast of binary operators stretches it.
    ones = maker.constant(np.ones(shape, np.float32 if call.datatype == "fp32" else np.float16), call.datatype)
    return call.done(maker.node("multiply", (x, ones)))


def _transposed(call: Call, perm: Sequence[int]) -> Sequence[int | None]:
    x = call.tensor(0)
    if list(perm) != list(range(len(perm))):
        x = call.maker.node("static_transpose", (x,), attrs={"perm": tuple(perm)})
    return call.done(x)


@lowers("aten::permute_copy.out")
def _permute(call: Call) -> Sequence[int | None]:
    rank = call.rank(0)
    dims = call.ints(1)
    if any(not -rank <= dim < rank for dim in dims):
        raise Unfit
    return _transposed(call, [dim % rank for dim in dims])


@lowers("aten::transpose_copy.int_out")
def _transpose(call: Call) -> Sequence[int | None]:
    rank = call.rank(0)
    perm = list(range(rank))
    if rank:
        first, second = call.axis(1, rank), call.axis(2, rank)
        perm[first], perm[second] = perm[second], perm[first]
    return _transposed(call, perm)


@lowers("aten::t_copy.out")
def _t(call: Call) -> Sequence[int | None]:
    if call.rank(0) > 2:
        raise Unfit
    return _transposed(call, range(call.rank(0))[::-1])


def _part(call: Call, axis: int, start: int, length: int) -> int:
    x = call.tensor(0)
    shape = call.sizes(0)
    if length < 1 or 0 in shape:
        raise Unfit
    if length == shape[axis]:
        return x
    offsets = tuple(start if place == axis else 0 for place in range(len(shape)))
    sizes = tuple(length if place == axis else size for place, size in enumerate(shape))
    return call.maker.node("static_slice", (x,), attrs={"offsets": offsets, "sizes": sizes})


@lowers("aten::select_copy.int_out")
def _select(call: Call) -> Sequence[int | None]:
    rank = call.rank(0)
    if rank == 0:
        raise Unfit
    axis, index = call.axis(1, rank), call.known(2)
    size = call.sizes(0)[axis]
    if not isinstance(index, int) or not -size <= index < size:
        raise Unfit
    x = _part(call, axis, index % size, 1)
    rest = tuple(size for place, size in enumerate(call.sizes(0)) if place != axis) or (1,)
    return call.done(call.maker.node("static_reshape", (x,), attrs={"new_shape": rest}))


@lowers("aten::slice_copy.Tensor_out")
def _slice(call: Call) -> Sequence[int | None]:
    rank = call.rank(0)
    if rank == 0 or call.known(4) != 1:
        raise Unfit
    axis = call.axis(1, rank)
    start, end, _ = slice(call.known(2), call.known(3)).indices(call.sizes(0)[axis])
    return call.done(_part(call, axis, start, end - start))


@lowers("aten::narrow_copy.out")
def _narrow(call: Call) -> Sequence[int | None]:
    rank = call.rank(0)
    if rank == 0:
        raise Unfit
    axis, start, length = call.axis(1, rank), call.known(2), call.known(3)
    size = call.sizes(0)[axis]
    start = start + size if start < 0 else start
    if not 0 <= start <= start + length <= size:
        raise Unfit
    return call.done(_part(call, axis, start, length))


@lowers("aten::split_copy.Tensor_out", "aten::split_with_sizes_copy.out")
def _split(call: Call) -> Sequence[int | None]:
    rank = call.rank(0)
    if rank == 0:
        raise Unfit
    axis = call.axis(2, rank)
    size = call.sizes(0)[axis]
    step = call.known(1)
    lengths = (
        [min(step, size - start) for start in range(0, size, step)]
        if isinstance(step, int) and step > 0
        else call.ints(1)
    )
    if sum(lengths) != size:
        raise Unfit
    found: list[int | None] = []
    start = 0
    for number, length in enumerate(lengths):
        found.append(_part(call, axis, start, length) if call.is_used(number) else None)
        start += length
    return found


def _joined(call: Call, parts: list[int], axis: int) -> int:
    """Concatenated, five at a time."""
    while len(parts) > 1:
        parts = [
            call.maker.node(f"concatenate{len(some)}", some, attrs={"axis": axis}) if len(some) > 1 else some[0]
            for some in (parts[start : start + 5] for start in range(0, len(parts), 5))
        ]
    return parts[0]


@lowers("aten::cat.out")
def _cat(call: Call) -> Sequence[int | None]:
    rank = len(call.out_sizes())
    parts = [call.cast(part, call.datatype) for part in call.tensors(0)]
    if rank == 0 or any(len(call.maker.shape(part)) != rank or 0 in call.maker.shape(part) for part in parts):
        raise Unfit
    return [_joined(call, parts, call.axis(1, rank))]


@lowers("aten::stack.out")
def _stack(call: Call) -> Sequence[int | None]:
    shape = call.out_sizes()
    axis = call.axis(1, len(shape))
    if 0 in shape or len(shape) > MAX_RANK:
        raise Unfit
    single = (*shape[:axis], 1, *shape[axis + 1 :])
    parts = [
        call.maker.node("static_reshape", (call.cast(part, call.datatype),), attrs={"new_shape": single})
        for part in call.tensors(0)
    ]
    return [_joined(call, parts, axis)]


@lowers("aten::constant_pad_nd.out")
def _pad(call: Call) -> Sequence[int | None]:
    rank, pads = call.rank(0), call.ints(1)
    if len(pads) % 2 or len(pads) > 2 * rank or any(pad < 0 for pad in pads) or 0 in call.sizes(0):
        raise Unfit
    before, after = [0] * rank, [0] * rank
    for place in range(len(pads) // 2):
        before[rank - 1 - place], after[rank - 1 - place] = pads[2 * place : 2 * place + 2]
    attrs = {"pre_paddings": tuple(before), "post_paddings": tuple(after), "padding_value": call.number(2)}
    return call.done(call.maker.node("static_constant_pad", (call.tensor(0),), attrs=attrs))


# ---------------------------------------------------------------------------------------------------
# Matrix products


def _product(call: Call, first: int, second: int, bias: int | None = None) -> int:
    """The product of two operands; a matrix that never changes is packed once, as a layer's weights are."""
    maker = call.maker
    weights = call.array(second)
    if weights is not None and weights.ndim == 2:
        filters = maker.constant(weights.astype(np.float32).T)
        vector = None
        if bias is not None and call.array(bias) is not None and call.sizes(bias) == (weights.shape[1],):
            vector, bias = call.real(bias), None
        y = maker.node("fully_connected", (call.real(first), filters, vector))
    else:
        y = maker.node("batch_matrix_multiply", (call.real(first), call.real(second)))
    return y if bias is None else maker.node("add", (y, call.real(bias)))


@lowers("aten::mm.out", "aten::bmm.out")
def _matmul(call: Call) -> Sequence[int | None]:
    _only_floats(call, 0, 1)
    return call.done(_product(call, 0, 1))


@lowers("aten::addmm.out")
def _addmm(call: Call) -> Sequence[int | None]:
    _only_floats(call, 0, 1, 2)
    if call.number(3) != 1 or call.number(4) != 1:
        raise Unfit
    return call.done(_product(call, 1, 2, 0))


@lowers("aten::linear.out")
def _linear(call: Call) -> Sequence[int | None]:
    _only_floats(call, 0, 1)
    maker, weights = call.maker, call.array(1)
    bias = call.array(2) if call.is_tensor(2) else None
    if call.rank(0) == 0:
        raise Unfit
    if weights is not None and (bias is not None or not call.is_tensor(2)):
        vector = None if bias is None else call.real(2)
        return call.done(maker.node("fully_connected", (call.real(0), call.real(1), vector)))
    if call.rank(0) < 2:
        raise Unfit
    y = maker.node("batch_matrix_multiply", (call.real(0), call.real(1)), flags=TRANSPOSE)
    return call.done(maker.node("add", (y, call.real(2))) if call.is_tensor(2) else y)
