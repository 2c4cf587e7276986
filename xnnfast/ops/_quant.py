"""Rules of datatypes and quantization that XNNPACK leaves to its caller.

Its own answer to most of these faults is a wrong number or none at all: the ranges below are asserts
that a release build does not contain.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

from ._row import Check, Op, Refusal
from ._rules import Q8, text

#: Relative difference that a bias's scale may have from input scale * filter scale. Writers multiply in
#: single precision; one unit in the last place is 1.2e-7.
BIAS_SCALE_TOLERANCE = 1e-5


#: What the documentation says of the rules of ``weighted``.
WEIGHTED_BOUNDS = (
    "8 bits: input scale * filter scale / output scale from 2**-32 to below 2**8, the bias has scale input * filter, a "
    "qint8 filter has zero point 0",
)
SAME_PAIRS = "quantized: inputs and output have one scale and zero point"


def f32(number: float) -> float:
    """The number in single precision, as XNNPACK holds it."""
    try:
        return float(struct.unpack("f", struct.pack("f", number))[0])
    except OverflowError:
        return math.copysign(math.inf, number)


def operand_type(value: Any) -> str:
    """The datatype that nodes see: an XN00 input with a ``dq_datatype`` is quantized on its way in."""
    if value is None:
        return "-"
    return "qdint8" if value.dq_datatype else value.datatype


def pair(value: Any) -> tuple[float, int]:
    return f32(value.quantization.scale), value.quantization.zero_point


def name(op: Op, position: int) -> str:
    """What messages call an input: ``filter``."""
    return op.inputs[position].removesuffix("_id")


def constant(node: Any, position: int, value: Any, why: str = "") -> None:
    if value is not None and value.constant is None:
        raise Refusal(f"{name(node.op, position)} (value {value.id}) needs to be constant{why}")


def same_pairs(node: Any, ins: Sequence[Any], outs: Sequence[Any]) -> None:
    """Operators that move elements: the stored numbers stay, hence their meaning must."""
    out = outs[0]
    if out.datatype not in (*Q8, "qint32"):
        return
    need = pair(out)
    for value in ins:
        found = pair(value)
        if found != need:
            raise Refusal(
                f"input (value {value.id}) has scale {found[0]:g}, zero point {found[1]}, output (value {out.id}) has "
                f"scale {need[0]:g}, zero point {need[1]}: they need to be equal")


def ratio(what: str, found: float, low: float, high: float, *, closed: bool = False) -> None:
    if not (low <= found <= high if closed else low <= found < high):
        raise Refusal(f"{what} is {found:g}, need 2**{round(math.log2(low))} to "
                      f"{'' if closed else 'below '}2**{round(math.log2(high))}")


def additive(node: Any, ins: Sequence[Any], outs: Sequence[Any]) -> None:
    if outs[0].datatype in Q8:
        for number, value in enumerate(ins, 1):
            ratio(f"input{number} scale / output scale", f32(pair(value)[0] / pair(outs[0])[0]), 2**-10, 2**8)


def multiplicative(node: Any, ins: Sequence[Any], outs: Sequence[Any]) -> None:
    if outs[0].datatype in Q8:
        product = f32(pair(ins[0])[0] * pair(ins[1])[0])
        ratio("input1 scale * input2 scale / output scale", f32(product / pair(outs[0])[0]), 2**-16, 2**8)


def requantized(node: Any, ins: Sequence[Any], outs: Sequence[Any]) -> None:
    if ins[0].datatype == outs[0].datatype and outs[0].datatype in Q8:
        ratio("input scale / output scale", f32(pair(ins[0])[0] / pair(outs[0])[0]), 2**-8, 2**7, closed=True)


def leaky(node: Any, ins: Sequence[Any], outs: Sequence[Any]) -> None:
    slope = node.attrs["negative_slope"]
    if not math.isfinite(slope):
        raise Refusal(f"negative_slope is {slope}, need a finite number")
    if outs[0].datatype in Q8:
        positive = f32(pair(ins[0])[0] / pair(outs[0])[0])
        ratio("input scale / output scale", positive, 2**-8, 2**7, closed=True)
        negative = f32(positive * f32(slope))
        ratio("|negative_slope| * input scale / output scale", abs(negative), 2**-8, 2**7, closed=True)
        if negative < -float.fromhex("0x1.FFFC00p+6"):
            raise Refusal(f"negative_slope * input scale / output scale is {negative:g}, need more than -128")


def tokens(node: Any, value: Any, need: int) -> None:
    """A dynamically quantized operand carries one pair of parameters per row of this many axes."""
    found = 1 if value.dq_datatype else value.quantization.num_nonbatch_dims
    if found != need:
        raise Refusal(f"input (value {value.id}) is quantized over its last {found} axes, {node.op.name} needs {need}: "
                      "XNNPACK would take other rows' parameters")


def channel_axis(what: str, value: Any, need: int) -> None:
    if value.quantization.axis != need:
        raise Refusal(f"{what} (value {value.id}) has one scale per index of axis {value.quantization.axis}, need axis "
                      f"{need}")


def weighted(outputs: Callable[[Any], int], rows: int, *, dynamic: bool = False) -> Check:
    """The rules of an operator with filter and bias.

    ``outputs`` tells the filter's axis of output channels; ``rows`` is how many axes of a dynamically
    quantized input share parameters; ``dynamic`` permits filter and bias that are not constant in fp32.
    """

    def check(node: Any, ins: Sequence[Any], outs: Sequence[Any]) -> None:
        x, weights, bias = ins
        out = outs[0]
        axis = outputs(node)
        kind = weights.datatype
        floating = dynamic and x.datatype == kind == "fp32"
        if not floating:
            why = f" with {operand_type(x)} input and {kind} filter" if dynamic else ""
            constant(node, 1, weights, why)
            constant(node, 2, bias, why)
        if operand_type(x) == "qdint8":
            tokens(node, x, rows)
        if kind == "qint8" and weights.quantization.zero_point != 0:
            raise Refusal(f"filter (value {weights.id}) has zero point {weights.quantization.zero_point}, need 0: "
                          "XNNPACK would ignore it")
        if kind in ("qcint8", "qcint4", "qbint4"):
            channel_axis("filter", weights, axis)
        if bias is not None and bias.datatype == "qcint32":
            channel_axis("bias", bias, 0)
        if kind in ("qcint4", "qbint4"):
            _nibbles(node, weights)
        if out.datatype in Q8:
            _requantization(x, weights, bias, out)
        elif out.datatype == "fp16" and node.clamp is not None:
            _strict_in_half(node.clamp)

    return check


def _nibbles(node: Any, weights: Any) -> None:
    if len(weights.shape) != 2:
        raise Refusal(f"a filter of {weights.datatype} needs rank 2, found {text(weights.shape)}")
    inner = weights.shape[1]
    if node.flags & 1:
        raise Refusal(f"flag 0x1 (transposed filter) is not possible with a filter of {weights.datatype}")
    if inner % 2:
        raise Refusal(f"filter (value {weights.id}) has {inner} input channels, {weights.datatype} needs an even "
                      "number")
    if weights.datatype == "qbint4":
        block = weights.quantization.block_size
        if block < 32 or block % 32:
            raise Refusal(f"filter (value {weights.id}) has groups of {block}, need a multiple of 32")
        if inner % block:
            raise Refusal(f"filter (value {weights.id}) has {inner} input channels, need a multiple of the group size "
                          f"{block}")


def _requantization(x: Any, weights: Any, bias: Any, out: Any) -> None:
    per_channel = weights.datatype == "qcint8"
    scales, in_scale, out_scale = weights.quantization, pair(x)[0], pair(out)[0]
    if per_channel:
        # Arrays of float32; this runs for every channel of a network when it is opened.
        products = scales.scales * in_scale
        ratios = products / out_scale
        fine = ratios.size == 0 or (ratios.min() >= 2**-32 and ratios.max() < 2**8)
        found = None if bias is None else bias.quantization.scales
        if found is not None and len(found) != len(products):
            raise Refusal(f"bias (value {bias.id}) has {len(found)} scales, need {len(products)}, one for each output "
                          "channel of the filter")
        fine = fine and (bias is None or bool((abs(found - products) <= products * BIAS_SCALE_TOLERANCE).all()))
    else:
        products = [f32(f32(scales.scale) * in_scale)]
        found = None if bias is None else [pair(bias)[0]]
        fine = False
    if not fine:
        _each_channel(products, out_scale, bias, found, per_channel)


def _each_channel(products: Any, out_scale: float, bias: Any, found: Any, per_channel: bool) -> None:
    for channel, product in enumerate(map(float, products)):
        at = f"of output channel {channel} " if per_channel else ""
        ratio(f"input scale * filter scale {at}/ output scale", f32(product / out_scale), 2**-32, 2**8)
        if bias is not None and not abs(float(found[channel]) - product) <= BIAS_SCALE_TOLERANCE * product:
            at = f" for output channel {channel}" if per_channel else ""
            raise Refusal(f"bias (value {bias.id}) has scale {found[channel]:g}{at}, need input scale * filter scale = "
                          f"{product:g}: XNNPACK would ignore the difference")


def _strict_in_half(clamp: tuple[float, float]) -> None:
    low, high = (struct.unpack("e", struct.pack("e", max(-65504.0, min(65504.0, limit))))[0]
                 if math.isfinite(limit) else limit for limit in clamp)
    if low >= high:
        raise Refusal(f"limits {clamp[0]:g} and {clamp[1]:g} are the same number in fp16, XNNPACK needs two")


def strict_limits(node: Any, ins: Sequence[Any], outs: Sequence[Any]) -> None:
    if outs[0].datatype == "fp16" and node.clamp is not None:
        _strict_in_half(node.clamp)


def limits(node: Any, outs: Sequence[Any]) -> None:
    """What XNNPACK's own checks let through: limits that are no interval, or that the datatype can't have."""
    low, high = node.clamp or (-math.inf, math.inf)
    if not low <= high:
        raise Refusal(f"output_min is {low:g} and output_max {high:g}, need output_min <= output_max and no NaN")
    datatype = outs[0].datatype
    bounded = low != -math.inf or high != math.inf
    if bounded and datatype in ("qdint8", "qint32"):
        raise Refusal(f"output_min is {low:g} and output_max {high:g}, XNNPACK can't limit {datatype}")
    # An infinite limit would be cast to an integer, which is undefined.
    integer = datatype == "int32" and (bounded or node.op.name == "clamp")
    if integer and not -(2.0**31) <= f32(low) <= f32(high) < 2.0**31:
        raise Refusal(f"output_min is {low:g} and output_max {high:g}, an int32 needs both from -2**31 to below 2**31")
