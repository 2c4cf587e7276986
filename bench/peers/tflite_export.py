"""A graph as a .tflite file, for LiteRT: the operators of the image models and MLPs in bench/, fp32 and int8.

Layouts are the same there, so that tensors are taken over as they are. Padding that TFLite has no word for becomes a
node of its own, as its converters do. The schema's classes come from LiteRT's own package.
"""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
from fold import folded

#: BuiltinOperator, and the least version that has what is used here.
OPERATORS = {
    "ADD": (0, 2), "CONV_2D": (3, 3), "DEPTHWISE_CONV_2D": (4, 3), "DEQUANTIZE": (6, 2), "FULLY_CONNECTED": (9, 4),
    "MAX_POOL_2D": (17, 2), "RELU6": (21, 2), "RESHAPE": (22, 1), "PAD": (34, 2), "TRANSPOSE": (39, 2), "MEAN": (40, 2),
    "QUANTIZE": (114, 2),
}  # fmt: skip
TYPES = {np.dtype(np.float32): 0, np.dtype(np.int32): 2, np.dtype(np.int8): 9}
NONE, RELU, RELU6 = 0, 1, 3
SAME, VALID = 0, 1


class Unknown(ValueError):
    """A graph with something that is not written here."""


def schema(site: Path) -> Any:
    """The classes of the schema, from the site-packages of an environment with LiteRT."""
    path = site / "ai_edge_litert/schema_py_generated.py"
    spec = importlib.util.spec_from_file_location("tflite_schema", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Writer:
    def __init__(self, graph: Any, s: Any) -> None:
        self.graph, self.s = graph, s
        self.tensors: list[Any] = []
        self.buffers: list[Any] = [s.BufferT()]
        self.operators: list[Any] = []
        self.codes: dict[str, int] = {}
        self.places: dict[int, int] = {}

    def tensor(self, shape: Any, dtype: Any, quantization: Any = None, data: Any = None) -> int:
        s, made = self.s, self.s.TensorT()
        made.shape = [int(dim) for dim in shape]
        made.type = TYPES[np.dtype(dtype)]
        made.name = f"t{len(self.tensors)}".encode()
        made.buffer = 0
        if data is not None:
            buffer = s.BufferT()
            buffer.data = np.frombuffer(np.ascontiguousarray(data).tobytes(), np.uint8)
            made.buffer = len(self.buffers)
            self.buffers.append(buffer)
        if quantization is not None:
            q = made.quantization = s.QuantizationParametersT()
            scales = np.atleast_1d(np.asarray(getattr(quantization, "scales", getattr(quantization, "scale", None))))
            q.scale = scales.astype(np.float32)
            q.zeroPoint = np.full(scales.size, getattr(quantization, "zero_point", 0), np.int64)
            q.quantizedDimension = getattr(quantization, "axis", 0)
        self.tensors.append(made)
        return len(self.tensors) - 1

    def place(self, id: int) -> int:
        if id not in self.places:
            value = self.graph.value(id)
            data = None if value.constant is None else value.array()
            self.places[id] = self.tensor(value.shape, value.dtype, value.quantization, data)
        return self.places[id]

    def operator(self, name: str, inputs: list[int], outputs: list[int], options: Any = None, **fields: Any) -> None:
        made = self.s.OperatorT()
        made.opcodeIndex = self.codes.setdefault(name, len(self.codes))
        made.inputs, made.outputs = inputs, outputs
        if options is not None:
            held = getattr(self.s, f"{options}T")()
            for field, value in fields.items():
                setattr(held, field, value)
            made.builtinOptions = held
            made.builtinOptionsType = getattr(self.s.BuiltinOptions, options)
        self.operators.append(made)

    def activation(self, clamp: Any) -> int:
        if clamp is None:
            return NONE
        known = {(0.0, math.inf): RELU, (0.0, 6.0): RELU6}.get((float(clamp[0]), float(clamp[1])))
        if known is None:
            raise Unknown(f"limits {clamp}")
        return known

    def padded(self, node: Any, stride: tuple[int, int], kernel: tuple[int, int]) -> tuple[int, int]:
        """The input, padded by a node of its own where SAME means something else; and the padding that remains."""
        pads = [int(node.attrs[f"padding_{side}"]) for side in ("top", "bottom", "left", "right")]
        source = self.place(node.inputs[0])
        if not any(pads):
            return source, VALID
        if stride == (1, 1) and pads == [kernel[0] // 2] * 2 + [kernel[1] // 2] * 2:
            return source, SAME
        value = self.graph.value(node.inputs[0])
        shape = (value.shape[0], value.shape[1] + pads[0] + pads[1], value.shape[2] + pads[2] + pads[3], value.shape[3])
        out = self.tensor(shape, value.dtype, value.quantization)
        amounts = self.tensor((4, 2), np.int32, None, np.int32([[0, 0], pads[:2], pads[2:], [0, 0]]))
        self.operator("PAD", [source, amounts], [out], "PadOptions")
        return out, VALID

    def write(self, node: Any) -> None:
        name, attrs = node.op.name, node.attrs
        ins = [id for id in node.inputs if id is not None]
        outs = [self.place(id) for id in node.outputs]
        if name in ("conv2d", "depthwise_conv2d"):
            stride = int(attrs["subsampling_height"]), int(attrs["subsampling_width"])
            source, padding = self.padded(node, stride, (int(attrs["kernel_height"]), int(attrs["kernel_width"])))
            fields: dict[str, Any] = {
                "strideH": stride[0], "strideW": stride[1], "padding": padding, "dilationHFactor": 1,
                "dilationWFactor": 1, "fusedActivationFunction": self.activation(node.clamp),
            }  # fmt: skip
            operands = [source, *map(self.place, ins[1:])]
            if name == "conv2d":
                if int(attrs["groups"]) != 1:
                    raise Unknown(f"{node.where}: groups")
                self.operator("CONV_2D", operands, outs, "Conv2DOptions", **fields)
            else:
                self.operator(
                    "DEPTHWISE_CONV_2D", operands, outs, "DepthwiseConv2DOptions", depthMultiplier=1, **fields
                )
        elif name == "max_pooling2d":
            stride = int(attrs["stride_height"]), int(attrs["stride_width"])
            kernel = int(attrs["pooling_height"]), int(attrs["pooling_width"])
            # Zeros are as good as nothing beside what comes out of a relu.
            producer = self.graph.producers.get(ins[0])
            if producer is None or producer.clamp is None or producer.clamp[0] != 0:
                raise Unknown(f"{node.where}: padding of what may be negative")
            source, padding = self.padded(node, stride, kernel)
            self.operator(
                "MAX_POOL_2D", [source], outs, "Pool2DOptions", strideH=stride[0], strideW=stride[1], padding=padding,
                filterHeight=kernel[0], filterWidth=kernel[1], fusedActivationFunction=self.activation(node.clamp),
            )  # fmt: skip
        elif name == "add":
            self.operator(
                "ADD", [*map(self.place, ins)], outs, "AddOptions", fusedActivationFunction=self.activation(node.clamp)
            )
        elif name == "fully_connected":
            self.operator(
                "FULLY_CONNECTED", [*map(self.place, ins)], outs, "FullyConnectedOptions",
                fusedActivationFunction=self.activation(node.clamp), keepNumDims=False,
            )  # fmt: skip
        elif name == "global_average_pooling2d":
            axes = self.tensor((2,), np.int32, None, np.int32([1, 2]))
            keep = len(self.graph.value(node.outputs[0]).shape) == 4
            self.operator("MEAN", [self.place(ins[0]), axes], outs, "ReducerOptions", keepDims=keep)
        elif name == "static_transpose":
            perm = self.tensor((len(attrs["perm"]),), np.int32, None, np.int32(attrs["perm"]))
            self.operator("TRANSPOSE", [self.place(ins[0]), perm], outs, "TransposeOptions")
        elif name == "static_reshape":
            # Any batch.
            shape = np.int32([-1, *self.graph.value(node.outputs[0]).shape[1:]])
            target = self.tensor(shape.shape, np.int32, None, shape)
            self.operator("RESHAPE", [self.place(ins[0]), target], outs, "ReshapeOptions", newShape=shape)
        elif name == "clamp" and self.activation(node.clamp) == RELU6:
            self.operator("RELU6", [self.place(ins[0])], outs)
        elif name == "convert" and self.graph.value(node.outputs[0]).datatype == "qint8":
            self.operator("QUANTIZE", [self.place(ins[0])], outs, "QuantizeOptions")
        elif name == "convert" and self.graph.value(node.outputs[0]).datatype == "fp32":
            self.operator("DEQUANTIZE", [self.place(ins[0])], outs, "DequantizeOptions")
        else:
            raise Unknown(f"no way to write {node.where}")

    def model(self) -> bytes:
        s = self.s
        inputs = [self.place(value.id) for value in self.graph.inputs]
        for node in folded(self.graph):
            self.write(node)
        part = s.SubGraphT()
        part.tensors, part.operators, part.inputs = self.tensors, self.operators, inputs
        part.outputs = [self.place(value.id) for value in self.graph.outputs]
        part.name = b"main"
        made = s.ModelT()
        made.version, made.description, made.subgraphs, made.buffers = 3, b"xnnfast bench", [part], self.buffers
        made.operatorCodes = []
        for name in self.codes:
            code = s.OperatorCodeT()
            code.builtinCode, code.version = OPERATORS[name]
            code.deprecatedBuiltinCode = min(127, code.builtinCode)
            made.operatorCodes.append(code)
        builder = flatbuffers.Builder(1 << 20)
        builder.Finish(made.Pack(builder), b"TFL3")
        return bytes(builder.Output())


def export(graph: Any, path: Path, site: Path) -> None:
    path.write_bytes(Writer(graph, schema(site)).model())
