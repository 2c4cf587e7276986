"""Element by element: binary operators with broadcasting, unary operators, Convert and Copy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ._quant import SAME_PAIRS, additive, leaky, multiplicative, requantized, same_pairs
from ._row import Check, Op, Refusal, Shape, Shapes
from ._rules import COPYABLE, FLOATS, Q8, broadcast, same

REAL = (*FLOATS, "bf16", *Q8)
INTEGER = (*REAL, "int32")
KEEPS_NAN = "NaN stays NaN."


def same_shape(node: Any, ins: Shapes) -> list[Shape]:
    return [ins[0]]


def broadcast_shape(node: Any, ins: Shapes) -> list[Shape]:
    return [broadcast(ins[0], ins[1])]


def elu_check(node: Any, ins: Sequence[Any], outs: Sequence[Any]) -> None:
    if not math.isfinite(node.attrs["alpha"]):
        raise Refusal(f"alpha is {node.attrs['alpha']}, need a finite number")


def convert_check(node: Any, ins: Sequence[Any], outs: Sequence[Any]) -> None:
    requantized(node, ins, outs)
    if outs[0].datatype == "qdint8":
        axes, rank = outs[0].quantization.num_nonbatch_dims, len(outs[0].shape)
        if not 1 <= axes <= rank:
            raise Refusal(f"output (value {outs[0].id}) is quantized over its last {axes} axes, need 1 to its rank "
                          f"{rank}")


def _binary(name: str, kind: str, doc: str, *, limits: bool = False, types: Sequence[str] = INTEGER,
            nan: str = KEEPS_NAN, check: Check | None = None, bounds: tuple[str, ...] = ()) -> Op:
    return Op(
        name, kind, "xnn_define_binary",
        f"=xnn_binary_{name} {'&limits' if limits else '=NULL'} @input1_id @input2_id @output_id flags",
        shape=broadcast_shape, datatypes=same(types, 3), flags=0, check=check, doc=doc, nan=nan, bounds=bounds,
    )


def _unary(name: str, kind: str, doc: str, *, block: str = "=NULL", types: Sequence[str] = REAL,
           nan: str = KEEPS_NAN, check: Check | None = None, bounds: tuple[str, ...] = ()) -> Op:
    return Op(
        name, kind, "xnn_define_unary", f"=xnn_unary_{name} {block} @input_id @output_id flags",
        shape=same_shape, datatypes=same(types, 2), flags=0, check=check, doc=doc, nan=nan, bounds=bounds,
    )


SECOND = "Of a NaN and a number the second operand is the result; of a NaN stretched over the other operand, NaN."
_ADDITIVE = "8 bits: input scale / output scale from 2**-10 to below 2**8, for both inputs"
_CONVERTIBLE = ("fp32", "fp16", "bf16", *Q8, "int32")

OPS = (
    _binary("add", "XNNAdd", "input1 + input2", limits=True, check=additive, bounds=(_ADDITIVE,)),
    _binary("subtract", "XNNSubtract", "input1 - input2", limits=True, check=additive, bounds=(_ADDITIVE,)),
    _binary("multiply", "XNNMultiply", "input1 * input2", limits=True, check=multiplicative,
            bounds=("8 bits: product of the input scales / output scale from 2**-16 to below 2**8",)),
    # No int32: XNNPACK's reference kernel traps on -2**31 / -1 and ends the process.
    _binary("divide", "XNNDiv", "input1 / input2", limits=True, types=REAL),
    _binary("minimum", "XNNMinimum", "the smaller of input1 and input2", nan=SECOND),
    _binary("maximum", "XNNMaximum", "the larger of input1 and input2", nan=SECOND),
    _binary("prelu", "XNNPReLU", "input1 where it is not negative, else input1 * input2", types=REAL),
    _unary("clamp", "XNNClamp", "input held between the limits", block="&clamp", types=INTEGER,
           nan="NaN stays NaN in fp32; vector kernels give the lower limit for it in fp16."),
    _unary("sigmoid", "XNNSigmoid", "1 / (1 + exp(-input))"),
    _unary("floor", "XNNFloor", "input rounded down"),
    _unary("square_root", "XNNSquareRoot", "square root of input",
           nan="NaN at infinity; in fp16 also NaN at -0, and -0 below 0."),
    _unary("reciprocal_square_root", "XNNReciprocalSquareRoot", "1 / square root of input",
           nan="NaN at infinity and at 0 in fp32."),
    _unary("ceiling", "XNNCeiling", "input rounded up"),
    _unary("gelu", "XNNGelu", "input * (1 + erf(input / sqrt(2))) / 2"),
    _unary("hardswish", "XNNHardswish", "input * min(max(input + 3, 0), 6) / 6"),
    _unary("log", "XNNLog", "natural logarithm of input",
           nan="In fp32 without AVX-512, NaN gives about 88.8, and infinity and all above 2.4e38 about 88.4."),
    _unary("negate", "XNNNegate", "-input", types=INTEGER),
    _unary("square", "XNNSquare", "input * input", types=INTEGER),
    _unary("abs", "XNNAbs", "input without its sign", types=INTEGER),
    _unary("sine", "XNNSin", "sine of input"),
    _unary("cosine", "XNNCos", "cosine of input"),
    _unary("exp", "XNNExp", "e to the power of input"),
    _unary("tanh", "XNNTanh", "hyperbolic tangent of input"),
    _unary("leaky_relu", "XNNLeakyReLU", "input where it is not negative, else input * negative_slope",
           block="&negative_slope", check=leaky,
           bounds=("8 bits: input scale / output scale, and that times |negative_slope|, from 2**-8 to 2**7",)),
    _unary("elu", "XNNELU", "input where it is not negative, else alpha * (exp(input) - 1)", block="&alpha",
           check=elu_check),
    Op("convert", "XNNConvert", "xnn_define_unary", "=xnn_unary_convert =NULL @input_id @output_id flags",
       shape=same_shape, check=convert_check, flags=0,
       datatypes=(*((x, y) for x in _CONVERTIBLE for y in _CONVERTIBLE), ("fp32", "qdint8"), ("fp16", "qdint8")),
       bounds=("between two values of one 8-bit type: input scale / output scale from 2**-8 to 2**7",
               "qdint8 can't leave the graph: a layer has to read it"),
       doc="input in another datatype or with other quantization parameters; to qdint8 it quantizes row by row",
       nan="NaN becomes 127 in qint8; a row that holds a NaN is lost when quantized row by row, other rows are not."),
    Op("copy", "XNNCopy", "xnn_define_copy", "@input_id @output_id flags", shape=same_shape,
       datatypes=same(COPYABLE, 2), flags=0, check=same_pairs, bounds=(SAME_PAIRS,), doc="input unchanged",
       nan="Bits are copied."),
)
