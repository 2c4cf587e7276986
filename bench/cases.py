"""Graphs to measure with: lists of layers in ``models/`` turned into graphs with random weights.

What the columns of a list mean stands in ``models/README.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import xnnfast

MODELS = Path(__file__).with_name("models")
PRECISIONS = ("fp32", "int8")
#: Real numbers are kept within about 12 times the deviation that the weights are made for.
INT8 = xnnfast.PerTensor(0.1, 0)
ACTIVATIONS = {"relu": (0, None), "relu6": (0, 6), "-": None, "gelu": None}


def names() -> list[str]:
    return sorted(path.stem for path in MODELS.glob("*.txt"))


def rows(name: str) -> list[list[str]]:
    return [line.split() for line in (MODELS / f"{name}.txt").read_text().splitlines() if line and line[0] != "#"]


def input_shape(name: str, *, batch: int = 1, size: int | None = None) -> tuple[int, ...]:
    """Images of ``size`` pixels (224), sequences of ``size`` tokens (128), or rows."""
    layers = rows(name)
    kinds = {layer[1] for layer in layers}
    width = int(layers[0][3])
    if kinds & {"conv", "depthwise"}:
        return batch, size or 224, size or 224, width
    return (batch, size or 128, width) if "attention" in kinds else (batch, width)


class Layers:
    """Turns layers into nodes; each kind is a method. In fp32, here and for all that int8 leaves alone."""

    def __init__(self, seed: int) -> None:
        self.b = xnnfast.GraphBuilder()
        self.rng = np.random.default_rng(seed)

    def input(self, shape: tuple[int, ...]) -> Any:
        return self.b.input(shape)

    def weights(self, *shape: int) -> Any:
        # Variance kept from layer to layer, so that no number leaves the range of its datatype.
        return self.rng.standard_normal(shape, np.float32) * np.float32(np.sqrt(2 / np.prod(shape[1:])))

    def filter(self, axis: int, weights: Any) -> Any:
        return weights

    def bias(self, count: int) -> Any:
        return self.weights(count, 1)[:, 0]

    def result(self) -> dict[str, Any]:
        """What the builder needs to know of a layer's result."""
        return {}

    def conv(self, ins: Sequence[Any], inner: int, outer: int, k: int, s: int, clamp: Any) -> Any:
        filter = self.filter(0, self.weights(outer, k, k, inner))
        options = {"stride": s, "padding": k // 2, "clamp": clamp, **self.result()}
        return self.b.conv2d(ins[0], filter, self.bias(outer), **options)

    def depthwise(self, ins: Sequence[Any], inner: int, outer: int, k: int, s: int, clamp: Any) -> Any:
        filter = self.filter(3, self.weights(outer, k, k).transpose(1, 2, 0)[None])
        options = {"stride": s, "padding": k // 2, "clamp": clamp, **self.result()}
        return self.b.depthwise_conv2d(ins[0], filter, self.bias(outer), **options)

    def maxpool(self, ins: Sequence[Any], inner: int, outer: int, k: int, s: int, clamp: Any) -> Any:
        return self.b.max_pooling2d(ins[0], k, stride=s, padding=k // 2)

    def add(self, ins: Sequence[Any], inner: int, outer: int, k: int, s: int, clamp: Any) -> Any:
        return self.b.add(*ins, clamp=clamp, **self.result())

    def mean(self, ins: Sequence[Any], inner: int, outer: int, k: int, s: int, clamp: Any) -> Any:
        return self.b.global_average_pooling2d(ins[0], keep_dims=False, **self.result())

    def fc(self, ins: Sequence[Any], inner: int, outer: int, k: int, s: int, clamp: Any) -> Any:
        filter = self.filter(0, self.weights(outer, inner))
        return self.b.fully_connected(ins[0], filter, self.bias(outer), clamp=clamp, **self.result())

    def attention(self, ins: Sequence[Any], inner: int, outer: int, heads: int, s: int, clamp: Any) -> Any:
        batch, tokens, width = ins[0].shape
        split = [
            self.b.static_transpose(self.b.static_reshape(x, (batch, tokens, heads, width // heads)), (0, 2, 1, 3))
            for x in ins
        ]
        mixed = self.b.scaled_dot_product_attention(*split)
        return self.b.static_reshape(self.b.static_transpose(mixed, (0, 2, 1, 3)), (batch, tokens, width))

    def norm(self, ins: Sequence[Any], inner: int, outer: int, k: int, s: int, clamp: Any) -> Any:
        """Layer normalization over the last axis; a file has no other mean than that of an image."""
        b, shape = self.b, ins[0].shape
        x = b.static_reshape(ins[0], (int(np.prod(shape[:-1])), shape[-1], 1, 1))
        x = b.subtract(x, b.global_average_pooling2d(x))
        deviation = b.reciprocal_square_root(b.add(b.global_average_pooling2d(b.square(x)), 1e-5))
        x = b.static_reshape(b.multiply(x, deviation), shape)
        return b.add(b.multiply(x, 1 + 0.1 * self.bias(inner)), 0.1 * self.bias(inner))


class Quantized(Layers):
    """Static int8 with a scale for each channel of a filter."""

    def input(self, shape: tuple[int, ...]) -> Any:
        return self.b.input(shape, "qint8", INT8)

    def filter(self, axis: int, weights: Any) -> Any:
        others = tuple(i for i in range(weights.ndim) if i != axis)
        scales = np.abs(weights).max(axis=others) / np.float32(127)
        shape = [-1 if i == axis else 1 for i in range(weights.ndim)]
        stored = np.clip(np.rint(weights / scales.reshape(shape)), -127, 127).astype(np.int8)
        return self.b.constant(stored, "qcint8", xnnfast.PerChannel(scales.astype(np.float32), axis))

    def bias(self, count: int) -> Any:
        return self.rng.integers(-1000, 1000, count, np.int32)

    def result(self) -> dict[str, Any]:
        return {"quantization": INT8}


class Dynamic(Quantized):
    """Products of fp32 rows with int8 filters; rows are quantized on their way in. What encoders are run with."""

    def input(self, shape: tuple[int, ...]) -> Any:
        return self.b.input(shape)

    def bias(self, count: int) -> Any:
        return Layers.bias(self, count)

    def result(self) -> dict[str, Any]:
        return {}

    def fc(self, ins: Sequence[Any], inner: int, outer: int, k: int, s: int, clamp: Any) -> Any:
        rows = self.b.convert(ins[0], "qdint8", xnnfast.PerToken(1))
        return super().fc([rows], inner, outer, k, s, clamp)


def build(name: str, *, batch: int = 1, size: int | None = None, seed: int = 0, precision: str = "fp32") -> Any:
    """A GraphBuilder that holds the graph of a list."""
    layers = rows(name)
    encoder = any(kind == "attention" for _, kind, *_ in layers)
    make = Layers(seed) if precision == "fp32" else Dynamic(seed) if encoder else Quantized(seed)
    values = {"input": make.input(input_shape(name, batch=batch, size=size))}
    for label, kind, sources, inner, outer, kernel, stride, activation in layers:
        ins = [values[source] for source in sources.split(",")]
        k, s = (int(text) if text != "-" else 0 for text in (kernel, stride))
        method = getattr(make, kind, None)
        if method is None:
            raise ValueError(f"{name}, layer {label}: no kind {kind}")
        out = method(ins, int(inner), int(outer), k, s, ACTIVATIONS[activation])
        values[label] = make.b.gelu(out) if activation == "gelu" else out
    make.b.output(out)
    return make.b


def example(name: str, *, batch: int = 1, size: int | None = None, seed: int = 1, precision: str = "fp32") -> Any:
    """An input for it."""
    shape = input_shape(name, batch=batch, size=size)
    rng = np.random.default_rng(seed)
    encoder = len(shape) == 3
    real = rng.standard_normal(shape, np.float32)
    if precision == "fp32" or encoder:
        return real
    return np.clip(np.rint(real / INT8.scale), -128, 127).astype(np.int8)
