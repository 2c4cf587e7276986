"""Element by element: binary operators with broadcasting, unary operators, Convert and Copy."""

from __future__ import annotations

from ._row import Op
from ._rules import FLOATS, MAX_RANK, Q8, broadcast, same

NUMBERS = FLOATS + Q8 + ("bf16",)


def same_shape(node, ins):
    return [ins[0]]


def broadcast_shape(node, ins):
    return [broadcast(ins[0], ins[1])]


def _binary(name, kind, doc, *, limits=False, types=FLOATS + Q8 + ("bf16", "int32"), nan="", check=None):
    return Op(
        name, kind, "xnn_define_binary",
        f"=xnn_binary_{name} {'&limits' if limits else '=NULL'} @input1_id @input2_id @output_id flags",
        shape=broadcast_shape, datatypes=same(types, 3), check=check, doc=doc, nan=nan,
    )


def _unary(name, kind, doc, *, block="=NULL", types=NUMBERS, nan="NaN stays NaN.", check=None):
    return Op(
        name, kind, "xnn_define_unary", f"=xnn_unary_{name} {block} @input_id @output_id flags",
        shape=same_shape, datatypes=same(types, 2), check=check, doc=doc, nan=nan,
    )


OPS = (
    _binary("add", "XNNAdd", "input1 + input2", limits=True),
    _binary("subtract", "XNNSubtract", "input1 - input2", limits=True),
    _binary("multiply", "XNNMultiply", "input1 * input2", limits=True),
    _binary("divide", "XNNDiv", "input1 / input2", limits=True),
    _binary("minimum", "XNNMinimum", "the smaller of input1 and input2"),
    _binary("maximum", "XNNMaximum", "the larger of input1 and input2"),
    _binary("prelu", "XNNPReLU", "input1 where it is not negative, else input1 * input2"),
    _unary("clamp", "XNNClamp", "input held between the limits", block="&clamp"),
    _unary("sigmoid", "XNNSigmoid", "1 / (1 + exp(-input))"),
    _unary("floor", "XNNFloor", "input rounded down"),
    _unary("square_root", "XNNSquareRoot", "square root of input"),
    _unary("reciprocal_square_root", "XNNReciprocalSquareRoot", "1 / square root of input"),
    _unary("ceiling", "XNNCeiling", "input rounded up"),
    _unary("gelu", "XNNGelu", "input * (1 + erf(input / sqrt(2))) / 2"),
    _unary("hardswish", "XNNHardswish", "input * min(max(input + 3, 0), 6) / 6"),
    _unary("log", "XNNLog", "natural logarithm of input"),
    _unary("negate", "XNNNegate", "-input"),
    _unary("square", "XNNSquare", "input * input"),
    _unary("abs", "XNNAbs", "input without its sign"),
    _unary("sine", "XNNSin", "sine of input"),
    _unary("cosine", "XNNCos", "cosine of input"),
    _unary("exp", "XNNExp", "e to the power of input"),
    _unary("tanh", "XNNTanh", "hyperbolic tangent of input"),
    _unary("leaky_relu", "XNNLeakyReLU", "input where it is not negative, else input * negative_slope",
           block="&negative_slope"),
    _unary("elu", "XNNELU", "input where it is not negative, else alpha * (exp(input) - 1)", block="&alpha"),
    Op("convert", "XNNConvert", "xnn_define_unary", "=xnn_unary_convert =NULL @input_id @output_id flags",
       shape=same_shape, doc="input in another datatype or with other quantization parameters"),
    Op("copy", "XNNCopy", "xnn_define_copy", "@input_id @output_id flags", shape=same_shape,
       doc="input unchanged"),
)
