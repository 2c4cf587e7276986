"""Graphs to measure with: lists of layers in ``models/`` turned into graphs with random weights.

What the columns of a list mean stands in ``models/README.md``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import xnnfast

MODELS = Path(__file__).with_name("models")


def names() -> list[str]:
    return sorted(path.stem for path in MODELS.glob("*.txt"))


def build(name: str, *, batch: int = 1, size: int = 224, seed: int = 0) -> Any:
    """A GraphBuilder that holds the graph of a list, in fp32."""
    rng = np.random.default_rng(seed)

    def weights(*shape: int) -> Any:
        # Variance kept from layer to layer, so that no number leaves the range of its datatype.
        return rng.standard_normal(shape, np.float32) * np.float32(np.sqrt(2 / np.prod(shape[1:])))

    b = xnnfast.GraphBuilder()
    lines = [line.split() for line in (MODELS / f"{name}.txt").read_text().splitlines() if line and line[0] != "#"]
    values = {"input": b.input((batch, size, size, int(lines[0][3])))}
    for label, kind, sources, inner, outer, kernel, stride, activation in lines:
        ins = [values[source] for source in sources.split(",")]
        clamp = {"relu": (0, None), "relu6": (0, 6), "-": None}[activation]
        k, s = (int(text) if text != "-" else 0 for text in (kernel, stride))
        if kind == "conv":
            out = b.conv2d(ins[0], weights(int(outer), k, k, int(inner)), weights(int(outer), 1)[:, 0], stride=s,
                           padding=k // 2, clamp=clamp)
        elif kind == "depthwise":
            filter = weights(int(outer), k, k).transpose(1, 2, 0)[None]
            bias = weights(int(outer), 1)[:, 0]
            out = b.depthwise_conv2d(ins[0], filter, bias, stride=s, padding=k // 2, clamp=clamp)
        elif kind == "maxpool":
            out = b.max_pooling2d(ins[0], k, stride=s, padding=k // 2)
        elif kind == "add":
            out = b.add(*ins, clamp=clamp)
        elif kind == "mean":
            out = b.global_average_pooling2d(ins[0], keep_dims=False)
        elif kind == "fc":
            out = b.fully_connected(ins[0], weights(int(outer), int(inner)), weights(int(outer), 1)[:, 0], clamp=clamp)
        else:
            raise ValueError(f"{name}, layer {label}: no kind {kind}")
        values[label] = out
    b.output(out)
    return b
