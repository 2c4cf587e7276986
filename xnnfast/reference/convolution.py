"""Convolutions over NHWC inputs: one matrix product per tap of the filter, for all pixels at once."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..ops._rules import SAME_PADDING
from ._operand import Operands, Results, Shapes, Values
from .matmul import factors, finish


class Window(NamedTuple):
    """A window that slides along one axis: the arithmetic of convolutions and pools."""

    kernel: int
    stride: int
    dilation: int
    before: int
    out: int
    #: Length of the padded axis that the windows reach over; what lies behind it is never read.
    reach: int

    @classmethod
    def over(cls, size: int, kernel: int, stride: int, dilation: int, before: int, after: int, same: int) -> Window:
        effective = (kernel - 1) * dilation + 1
        if same:
            out = -(-size // stride)
            before = max(0, (out - 1) * stride + effective - size) // 2
        else:
            out = (before + size + after - effective) // stride + 1
        return cls(kernel, stride, dilation, before, out, (out - 1) * stride + effective)

    def tap(self, index: int) -> slice:
        """The padded positions that one tap of every window falls on."""
        start = index * self.dilation
        return slice(start, start + (self.out - 1) * self.stride + 1, self.stride)


def windows(node: Any, shape: tuple[int, ...], kernel: str, stride: str | None, dilation: str | None) -> list[Window]:
    """Vertical and horizontal window, from the fields whose names start with the given words."""
    attrs = node.attrs
    found = []
    for size, axis, before, after in ((shape[1], "height", "top", "bottom"), (shape[2], "width", "left", "right")):
        taps = attrs[f"{kernel}_{axis}"]
        found.append(Window.over(
            size, taps, attrs[f"{stride}_{axis}"] if stride else taps, attrs[f"{dilation}_{axis}"] if dilation else 1,
            attrs[f"padding_{before}"], attrs[f"padding_{after}"], node.flags & SAME_PADDING,
        ))
    return found


def padded(x: np.ndarray, vertical: Window, horizontal: Window, fill: Any) -> np.ndarray:
    """``x`` on the canvas that the windows reach over."""
    _, height, width, _ = x.shape
    if (vertical.before, vertical.reach, horizontal.before, horizontal.reach) == (0, height, 0, width):
        return x
    canvas = np.full((x.shape[0], vertical.reach, horizontal.reach, x.shape[3]), fill, x.dtype)
    rows = min(height, vertical.reach - vertical.before)
    columns = min(width, horizontal.reach - horizontal.before)
    canvas[:, vertical.before:vertical.before + rows, horizontal.before:horizontal.before + columns] = (
        x[:, :rows, :columns])
    return canvas


def _grouped_product(pixels: np.ndarray, taps: np.ndarray) -> np.ndarray:
    """(n, h, w, groups * in) by (groups, out, in) -> (n, h, w, groups * out)."""
    groups, outputs, inputs = taps.shape
    n, height, width, _ = pixels.shape
    if groups == 1:
        return np.asarray(pixels @ taps[0].T)
    by_group = pixels.reshape(-1, groups, inputs).transpose(1, 0, 2) @ taps.transpose(0, 2, 1)
    return np.asarray(by_group.transpose(1, 0, 2).reshape(n, height, width, groups * outputs))


def _by_group(weights: np.ndarray, groups: int) -> np.ndarray:
    """OHWI filter -> (h, w, groups, out, in)."""
    outputs, height, width, inputs = weights.shape
    apart = weights.reshape(groups, outputs // groups, height, width, inputs)
    grouped: np.ndarray = apart.transpose(2, 3, 0, 1, 4)
    return grouped


def conv2d(node: Any, operands: Operands, outs: Values, shapes: Shapes) -> Results:
    (x, weights, bias), (out,) = operands, outs
    pixels, taps = factors(x, weights, out)
    taps = _by_group(taps, node.attrs["groups"])
    vertical, horizontal = windows(node, x.shape, "kernel", "subsampling", "dilation")
    pixels = padded(pixels, vertical, horizontal, 0)
    total: Any = 0
    for row in range(vertical.kernel):
        for column in range(horizontal.kernel):
            total = total + _grouped_product(pixels[:, vertical.tap(row), horizontal.tap(column)], taps[row, column])
    return [finish(total, x, weights, bias, out, node.clamp)]


def depthwise_conv2d(node: Any, operands: Operands, outs: Values, shapes: Shapes) -> Results:
    (x, weights, bias), (out,) = operands, outs
    pixels, taps = factors(x, weights, out)
    _, height, width, outputs = taps.shape
    channels = x.shape[3]
    taps = taps.reshape(height, width, channels, outputs // channels)
    vertical, horizontal = windows(node, x.shape, "kernel", "subsampling", "dilation")
    pixels = padded(pixels, vertical, horizontal, 0)
    total = np.zeros((x.shape[0], vertical.out, horizontal.out, channels, outputs // channels))
    for row in range(height):
        for column in range(width):
            total += pixels[:, vertical.tap(row), horizontal.tap(column), :, None] * taps[row, column]
    return [finish(total.reshape((*total.shape[:3], outputs)), x, weights, bias, out, node.clamp)]


def conv_transpose2d(node: Any, operands: Operands, outs: Values, shapes: Shapes) -> Results:
    (x, weights, bias), (out,) = operands, outs
    attrs = node.attrs
    pixels, taps = factors(x, weights, out)
    taps = _by_group(taps, attrs["groups"])
    n, height, width, _ = x.shape
    # Every input pixel adds its filter to the canvas; the padding is then cut off its edges.
    spread = [
        Window(attrs[f"kernel_{axis}"], attrs[f"subsampling_{axis}"], attrs[f"dilation_{axis}"], 0, size,
               (size - 1) * attrs[f"subsampling_{axis}"] + (attrs[f"kernel_{axis}"] - 1) * attrs[f"dilation_{axis}"] + 1
               + attrs[f"adjustment_{axis}"])
        for axis, size in (("height", height), ("width", width))
    ]
    vertical, horizontal = spread
    canvas = np.zeros((n, vertical.reach, horizontal.reach, weights.shape[0]))
    for row in range(vertical.kernel):
        for column in range(horizontal.kernel):
            canvas[:, vertical.tap(row), horizontal.tap(column)] += _grouped_product(pixels, taps[row, column])
    total = canvas[:, attrs["padding_top"]:vertical.reach - attrs["padding_bottom"],
                   attrs["padding_left"]:horizontal.reach - attrs["padding_right"]]
    return [finish(total, x, weights, bias, out, node.clamp)]


REFERENCES = {"conv2d": conv2d, "depthwise_conv2d": depthwise_conv2d, "conv_transpose2d": conv_transpose2d}
