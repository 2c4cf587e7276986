"""A graph as an ONNX file, for peers that read nothing else: the operators of the models in bench/, fp32 and int8.

The file is written field by field: the format needs no library for that. Images are channels first there, so that
filters are laid out anew and an image that the graph takes channels last has to be given channels first. int8 stands as
QuantizeLinear and DequantizeLinear around each operator, which the peers fuse; inside the graph as unsigned numbers,
which they are faster with on x86. Axis 0 takes any batch.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from fold import folded

ELEMENT = {
    np.dtype(each): number
    for each, number in ((np.float32, 1), (np.uint8, 2), (np.int8, 3), (np.int32, 6), (np.int64, 7))
}
OPSET = 20
FIRST, LAST = (0, 3, 1, 2), (0, 2, 3, 1)


class Unknown(ValueError):
    """A graph with something that is not written here."""


# ---- protobuf


def varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def field(number: int, value: Any) -> bytes:
    """A field of a message: an integer, a float, or bytes with their length."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def tensor(name: str, array: Any) -> bytes:
    array = np.ascontiguousarray(array)
    dims = b"".join(field(1, int(dim)) for dim in array.shape)
    return dims + field(2, ELEMENT[array.dtype]) + field(8, name) + field(9, array.tobytes())


def attribute(name: str, value: Any) -> bytes:
    if isinstance(value, (list, tuple)):
        return field(1, name) + b"".join(field(8, int(each)) for each in value) + field(20, 7)
    if isinstance(value, float):
        return field(1, name) + field(2, value) + field(20, 1)
    return field(1, name) + field(3, int(value)) + field(20, 2)


def described(name: str, element: int, shape: Sequence[Any]) -> bytes:
    dims = b"".join(field(1, field(2, dim) if isinstance(dim, str) else field(1, int(dim))) for dim in shape)
    return field(1, name) + field(2, field(1, field(1, element) + field(2, dims)))


# ---- the graph


class Writer:
    def __init__(self, graph: Any, fold: bool = True) -> None:
        self.graph = graph
        self.fold = fold
        self.steps = folded(graph) if fold else list(graph.nodes)
        self.nodes: list[bytes] = []
        self.constants: dict[str, bytes] = {}
        #: Value id -> name, and whether it is an image that lies channels first.
        self.names: dict[int, str] = {}
        self.images: set[int] = set()
        self.count = 0

    def fresh(self, what: str) -> str:
        self.count += 1
        return f"{what}_{self.count}"

    def node(self, op: str, inputs: Iterable[str], output: str | None = None, **attributes: Any) -> str:
        output = output or self.fresh(op.lower())
        self.nodes.append(
            b"".join(field(1, name) for name in inputs)
            + field(2, output)
            + field(3, self.fresh("node"))
            + field(4, op)
            + b"".join(field(5, attribute(name, value)) for name, value in attributes.items())
        )
        return output

    def constant(self, array: Any) -> str:
        name = self.fresh("constant")
        self.constants[name] = tensor(name, array)
        return name

    def scales(self, value: Any) -> tuple[str, str, dict[str, int]]:
        quantization = value.quantization
        if hasattr(quantization, "scales"):
            scales = np.asarray(quantization.scales, np.float32)
            return self.constant(scales), self.constant(np.zeros(scales.size, np.int8)), {"axis": quantization.axis}
        zero: Any = np.int8(quantization.zero_point)
        if value.constant is None and not value.is_external:
            zero = np.uint8(quantization.zero_point + 128)
        return self.constant(np.float32(quantization.scale)), self.constant(zero), {}

    def real(self, id: int) -> str:
        """The name of a value's real numbers."""
        value, name = self.graph.value(id), self.names[id]
        if value.quantization is None:
            return name
        scale, zero, more = self.scales(value)
        return self.node("DequantizeLinear", [name, scale, zero], **more)

    def fixed(self, id: int, array: Any) -> str:
        """A constant laid out anew; ``array`` is None where it stays as it is."""
        value = self.graph.value(id)
        if value.quantization is None:
            return self.constant(np.asarray(array, np.float32))
        axis = getattr(value.quantization, "axis", 0)
        name = self.constant(array)
        if array.dtype == np.int32:
            scales = np.asarray(getattr(value.quantization, "scales", getattr(value.quantization, "scale", None)))
            return self.node(
                "DequantizeLinear",
                [name, self.constant(scales.astype(np.float32))],
                **({"axis": 0} if scales.ndim else {}),
            )
        scale, zero, more = self.scales(value)
        if more:
            # A depthwise filter has its channels last, here first.
            more = {"axis": 0 if axis == 3 else axis}
        return self.node("DequantizeLinear", [name, scale, zero], **more)

    def store(self, id: int, real: str, image: bool, clamp: Any = None) -> None:
        value = self.graph.value(id)
        if value.quantization is None or not self.fold:
            real, clamp = self.limits(real, clamp), None
        if value.quantization is not None:
            scale, zero, more = self.scales(value)
            real = self.node("QuantizeLinear", [real, scale, zero], **more)
            if clamp is not None:
                # On the stored numbers: between products and their rounding, limits would keep a layer in fp32.
                offset, kind = (0, np.int8) if value.is_external else (128, np.uint8)
                stored = np.rint(np.asarray(clamp) / value.quantization.scale) + value.quantization.zero_point
                low, high = (np.clip(stored, -128, 127) + offset).astype(kind)
                real = self.node("Clip", [real, self.constant(low), self.constant(high)])
        self.names[id] = real
        if image:
            self.images.add(id)

    def limits(self, name: str, clamp: Any) -> str:
        if clamp is None:
            return name
        low, high = clamp
        if low == 0 and math.isinf(high):
            return self.node("Relu", [name])
        bounds = [self.constant(np.float32(np.clip(each, -3e38, 3e38))) for each in (low, high)]
        return self.node("Clip", [name, *bounds])

    def operand(self, id: int, image: bool) -> str:
        """The real numbers of an operand, a constant if it is one, laid out like the image beside it."""
        value = self.graph.value(id)
        if value.constant is None:
            return self.real(id)
        array = value.array()
        if image:
            array = array.reshape((1,) * (4 - array.ndim) + array.shape).transpose(FIRST)
        return self.fixed(id, array)

    # -- operators

    def window(self, attrs: Any) -> dict[str, Any]:
        pads = [int(attrs[f"padding_{side}"]) for side in ("top", "left", "bottom", "right")]
        return {"pads": pads}

    def write(self, node: Any) -> None:
        name, ins, out = node.op.name, [id for id in node.inputs if id is not None], node.outputs[0]
        method = getattr(self, name, None)
        if method is None:
            raise Unknown(f"no way to write {node.where}")
        method(node, ins, out)

    def conv2d(self, node: Any, ins: list[int], out: int) -> None:
        attrs = node.attrs
        filter = self.graph.value(ins[1]).array()
        filter = filter.transpose(3, 0, 1, 2) if node.op.name == "depthwise_conv2d" else filter.transpose(0, 3, 1, 2)
        operands = [self.real(ins[0]), self.fixed(ins[1], np.ascontiguousarray(filter))]
        operands += [self.fixed(id, self.graph.value(id).array()) for id in ins[2:]]
        result = self.node(
            "Conv", operands, group=int(attrs["groups"]),
            strides=[int(attrs["subsampling_height"]), int(attrs["subsampling_width"])],
            dilations=[int(attrs["dilation_height"]), int(attrs["dilation_width"])], **self.window(attrs),
        )  # fmt: skip
        self.store(out, result, True, node.clamp)

    depthwise_conv2d = conv2d

    def max_pooling2d(self, node: Any, ins: list[int], out: int) -> None:
        attrs = node.attrs
        result = self.node(
            "MaxPool", [self.real(ins[0])], kernel_shape=[int(attrs["pooling_height"]), int(attrs["pooling_width"])],
            strides=[int(attrs["stride_height"]), int(attrs["stride_width"])], **self.window(attrs),
        )  # fmt: skip
        self.store(out, result, True, node.clamp)

    def global_average_pooling2d(self, node: Any, ins: list[int], out: int) -> None:
        shape, image = self.graph.value(out).shape, ins[0] in self.images
        if image:
            result = self.node("GlobalAveragePool", [self.real(ins[0])])
        else:
            result = self.node("ReduceMean", [self.real(ins[0]), self.constant(np.int64([1, 2]))], keepdims=1)
        if len(shape) == 2:
            result = self.node("Reshape", [result, self.constant(np.int64([-1, shape[1]]))])
        self.store(out, result, image and len(shape) == 4)

    def fully_connected(self, node: Any, ins: list[int], out: int) -> None:
        weights = self.graph.value(ins[1]).array()
        quantized = self.graph.value(ins[1]).quantization is not None
        bias = [self.fixed(id, self.graph.value(id).array()) for id in ins[2:]]
        if len(self.graph.value(ins[0]).shape) == 2:
            result = self.node("Gemm", [self.real(ins[0]), self.fixed(ins[1], weights), *bias], transB=1)
        elif quantized:
            raise Unknown(f"{node.where}: int8 products of rank 3")
        else:
            result = self.node("MatMul", [self.real(ins[0]), self.constant(np.ascontiguousarray(weights.T))])
            if bias:
                result = self.node("Add", [result, *bias])
        self.store(out, result, False, node.clamp)

    def binary(self, op: str, node: Any, ins: list[int], out: int) -> None:
        image = any(id in self.images for id in ins)
        result = self.node(op, [self.operand(id, image) for id in ins])
        self.store(out, result, image, node.clamp)

    def add(self, *args: Any) -> None:
        self.binary("Add", *args)

    def subtract(self, *args: Any) -> None:
        self.binary("Sub", *args)

    def multiply(self, *args: Any) -> None:
        self.binary("Mul", *args)

    def unary(self, result: str, ins: list[int], out: int) -> None:
        self.store(out, result, ins[0] in self.images)

    def clamp(self, node: Any, ins: list[int], out: int) -> None:
        self.unary(self.limits(self.real(ins[0]), node.clamp), ins, out)

    def gelu(self, node: Any, ins: list[int], out: int) -> None:
        self.unary(self.node("Gelu", [self.real(ins[0])]), ins, out)

    def square(self, node: Any, ins: list[int], out: int) -> None:
        self.unary(self.node("Mul", [self.real(ins[0])] * 2), ins, out)

    def reciprocal_square_root(self, node: Any, ins: list[int], out: int) -> None:
        self.unary(self.node("Reciprocal", [self.node("Sqrt", [self.real(ins[0])])]), ins, out)

    def convert(self, node: Any, ins: list[int], out: int) -> None:
        if self.graph.value(out).datatype == "qdint8":
            raise Unknown(f"{node.where}: dynamic quantization")
        self.unary(self.real(ins[0]), ins, out)

    def same(self, id: int, out: int, name: str) -> None:
        """A value that is another one, but for where it lies; outside the graph numbers are signed."""
        one, other = self.graph.value(id), self.graph.value(out)
        if one.quantization is not None and one.is_external != other.is_external:
            scale, zero, more = self.scales(one)
            real = self.node("DequantizeLinear", [name, scale, zero], **more)
            scale, zero, more = self.scales(other)
            name = self.node("QuantizeLinear", [real, scale, zero], **more)
        self.names[out] = name

    def static_transpose(self, node: Any, ins: list[int], out: int) -> None:
        perm = tuple(node.attrs["perm"])
        image = ins[0] in self.images
        if (perm == LAST and not image) or (perm == FIRST and image):
            # The same bytes by another name.
            self.same(ins[0], out, self.names[ins[0]])
            if perm == LAST:
                self.images.add(out)
            return
        if image:
            raise Unknown(f"{node.where}: an image transposed by {perm}")
        self.same(ins[0], out, self.node("Transpose", [self.names[ins[0]]], perm=perm))

    def static_reshape(self, node: Any, ins: list[int], out: int) -> None:
        if ins[0] in self.images and max(self.graph.value(ins[0]).shape[1:3]) > 1:
            raise Unknown(f"{node.where}: an image reshaped")
        shape = [-1, *self.graph.value(out).shape[1:]]
        self.same(ins[0], out, self.node("Reshape", [self.names[ins[0]], self.constant(np.int64(shape))]))

    def scaled_dot_product_attention(self, node: Any, ins: list[int], out: int) -> None:
        query, key, value = (self.real(id) for id in ins[:3])
        scale, mask = (self.graph.value(id).array() for id in ins[3:5])
        if np.any(mask):
            raise Unknown(f"{node.where}: a mask")
        query = self.node("Mul", [query, self.constant(np.asarray(scale, np.float32))])
        key = self.node("Transpose", [key], perm=(0, 1, 3, 2))
        weights = self.node("Softmax", [self.node("MatMul", [query, key])], axis=-1)
        self.store(out, self.node("MatMul", [weights, value]), False)

    # -- the whole

    def model(self) -> bytes:
        graph = self.graph
        inputs, outputs = b"", b""
        first = {node.inputs[0]: node for node in reversed(graph.nodes) if node.inputs}
        for place, value in enumerate(graph.inputs):
            name = self.names[value.id] = f"input_{place}"
            shape: list[Any] = ["N", *value.shape[1:]]
            user = first.get(value.id)
            if len(shape) == 4 and user is not None and user.op.name in ("conv2d", "depthwise_conv2d"):
                self.images.add(value.id)
                shape = [shape[axis] for axis in FIRST]
            inputs += field(11, described(name, ELEMENT[value.dtype], shape))
        for node in self.steps:
            self.write(node)
        for place, value in enumerate(graph.outputs):
            if value.id in self.images:
                raise Unknown("an image as output")
            name = self.node("Identity", [self.names[value.id]], f"output_{place}")
            outputs += field(12, described(name, ELEMENT[value.dtype], ["N", *value.shape[1:]]))
        made = b"".join(field(1, node) for node in self.nodes) + field(2, "graph")
        made += b"".join(field(5, each) for each in self.constants.values()) + inputs + outputs
        return field(1, 9) + field(2, "xnnfast bench") + field(7, made) + field(8, field(1, "") + field(2, OPSET))


def export(graph: Any, path: Path, *, fold: bool = True) -> None:
    path.write_bytes(Writer(graph, fold).model())


def image_inputs(graph: Any) -> list[bool]:
    """Which inputs have to be given channels first."""
    writer = Writer(graph)
    writer.model()
    return [value.id in writer.images for value in graph.inputs]
