"""The files that the documents speak of, small ones: what a reader brings along."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from files import plan, program, tensor

import xnnfast as xf

SIDE = 224


def classifier() -> xf.GraphBuilder:
    """Images as exporters have them, 1x3x224x224, to ten numbers."""
    rng = np.random.default_rng(0)
    b = xf.GraphBuilder()
    x = b.static_transpose(b.input((1, 3, SIDE, SIDE)), (0, 2, 3, 1))
    x = b.conv2d(x, rng.standard_normal((8, 8, 8, 3), np.float32) / 14, stride=8, clamp=(0, 6), debug_handle=11)
    x = b.global_average_pooling2d(x, keep_dims=False)
    b.output(b.fully_connected(x, rng.standard_normal((10, 8), np.float32), debug_handle=12))
    return b


def encoder() -> xf.GraphBuilder:
    """128 vectors of 256 numbers to as many of the same length."""
    rng = np.random.default_rng(1)
    b = xf.GraphBuilder()
    x = b.input((1, 128, 256))
    b.output(b.tanh(b.fully_connected(x, rng.standard_normal((256, 256), np.float32) / 16)))
    return b


def as_program(builder: xf.GraphBuilder) -> bytes:
    """A .pte whose method is one delegate."""
    graph = builder.graph()
    shapes = [value.shape for value in (*graph.inputs, *graph.outputs)]
    return program(plan(values=[tensor(shape) for shape in shapes]), segments=[b"", builder.finish()])


def make(folder: Path) -> None:
    """model.pte, bert.pte, images.npy, and photos/ where pillow is installed."""
    (folder / "model.pte").write_bytes(as_program(classifier()))
    (folder / "bert.pte").write_bytes(as_program(encoder()))
    rng = np.random.default_rng(2)
    np.save(folder / "images.npy", rng.random((12, 3, SIDE, SIDE), np.float32))
    try:
        from PIL import Image
    except ImportError:
        return
    (folder / "photos").mkdir()
    for number in range(4):
        pixels = rng.integers(0, 256, (200 + 20 * number, 300, 3), np.uint8)
        Image.fromarray(pixels).save(folder / "photos" / f"{number}.png")
