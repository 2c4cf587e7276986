"""What several families of operators share: shape arithmetic, geometry of windows, datatype tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ._row import Refusal, Shape

#: The XNNPACK that these rows describe, for messages.
ENGINE = "XNNPACK 4ea82e5"

#: XNNPACK keeps at most this many dimensions of a value.
MAX_RANK = 6

#: Flag bits of nodes, by XNNPACK's names; one bit means different things on different operators.
TRANSPOSE_WEIGHTS = TRANSPOSE_B = 0x01
SAME_PADDING = RESHAPE_2D = LEGACY_MODE = 0x04
ALIGN_CORNERS = 0x08
TRANSIENT_INDIRECTION_BUFFER = 0x20
KEEP_DIMS = 0x40

FLOATS = ("fp32", "fp16")
Q8 = ("qint8", "quint8")
#: What XNNPACK can move about; the element width of other types is lost on the way.
MOVABLE = FLOATS + Q8
#: What can be copied in one piece.
COPYABLE = (*MOVABLE, "bf16", "int32", "qint32")

MOVED = "Elements are moved as they are."
UNPROMISED = "Nothing is promised: a NaN may come out as a limit, without limits as an infinity or as NaN."

PADDING = "padding_top padding_right padding_bottom padding_left"
CLAMP = "clamp.min clamp.max"


def same(types: Sequence[str], operands: int) -> tuple[tuple[str, ...], ...]:
    """Combinations in which all operands have one type."""
    return tuple((each,) * operands for each in types)


def with_and_without_bias(*table: tuple[str, str, str, str]) -> tuple[tuple[str, ...], ...]:
    """Combinations of input, filter, bias and output, each also with the bias absent."""
    return tuple(row for x, weights, bias, out in table for row in ((x, weights, bias, out), (x, weights, "-", out)))


def text(shape: Sequence[int]) -> str:
    """A shape as messages print it: ``1x3x3x8``."""
    return "x".join(map(str, shape)) or "scalar"


def rank(name: str, shape: Shape, need: int) -> None:
    if len(shape) != need:
        raise Refusal(f"{name} needs rank {need}, found rank {len(shape)} ({text(shape)})")


def equal(what: str, found: int, need: int, why: str) -> None:
    """``filter dim 1 is 2, kernel_height is 3``."""
    if found != need:
        raise Refusal(f"{what} is {found}, {why} is {need}")


def positive(attrs: Any, *names: str) -> None:
    for name in names:
        if attrs[name] <= 0:
            raise Refusal(f"{name} is {attrs[name]}, need 1 or more")


def broadcast(a: Shape, b: Shape) -> Shape:
    """NumPy's broadcasting: aligned at the right, a dimension of 1 stretches."""
    if a == b:
        return a
    if len(a) < len(b):
        a = (1,) * (len(b) - len(a)) + a
    elif len(b) < len(a):
        b = (1,) * (len(a) - len(b)) + b
    out = []
    for axis, (one, two) in enumerate(zip(a, b)):
        if one == two or two == 1:
            out.append(one)
        elif one == 1:
            out.append(two)
        else:
            raise Refusal(f"dim {axis} of {text(a)} is {one}, of {text(b)} it is {two}: neither equal nor 1")
    return tuple(out)


#: More padding than this on one side is a negative number stored unsigned, or nonsense.
MAX_PADDING = 1 << 16
#: Strides, dilations and kernel sizes; keeps all products of the window arithmetic small.
MAX_EXTENT = 1 << 16


class Axis:
    """One spatial axis of a window that slides: names of the fields, and the arithmetic."""

    __slots__ = ("after", "axis", "before", "dilation", "kernel", "stride")

    def __init__(self, axis: str, before: str, after: str, kernel: str, stride: str, dilation: str | None) -> None:
        self.axis, self.before, self.after = axis, before, after
        self.kernel, self.stride, self.dilation = kernel, stride, dilation

    def extent(self, attrs: Any) -> tuple[int, int, int, int]:
        """(kernel, stride, dilation, effective kernel), all checked to be sane."""
        kernel, stride = attrs[self.kernel], attrs[self.stride]
        dilation = attrs[self.dilation] if self.dilation else 1
        for name, number in ((self.kernel, kernel), (self.stride, stride), (self.dilation, dilation)):
            if not 0 < number <= MAX_EXTENT:
                raise Refusal(f"{name} is {number}, need 1 to {MAX_EXTENT}")
        return kernel, stride, dilation, (kernel - 1) * dilation + 1

    def padding(self, attrs: Any) -> tuple[int, int]:
        before, after = attrs[self.before], attrs[self.after]
        for name, number in ((self.before, before), (self.after, after)):
            if not 0 <= number <= MAX_PADDING:
                raise Refusal(f"{name} is {number}, need 0 to {MAX_PADDING}")
        return before, after

    def window(self, attrs: Any, size: int, same_padding: int) -> Window:
        """Where the windows lie over an input of that size."""
        kernel, stride, dilation, extent = self.extent(attrs)
        before, after = self.padding(attrs)
        if size == 0:
            raise Refusal(f"the input is 0 {self.axis}, need 1 or more")
        if same_padding:
            if before or after:
                raise Refusal(f"{self.before} is {before} and {self.after} is {after}, "
                              "SAME padding (flag 0x4) needs both 0")
            out = -(-size // stride)
            total = (out - 1) * stride + extent - size
            if total < 0:
                # Correct would be no padding; XNNPACK's unsigned arithmetic wraps around instead.
                raise Refusal(f"SAME padding (flag 0x4) with {self.stride} {stride} over {size} {self.axis} leaves "
                              f"{-total} behind the last window of {extent}, where {ENGINE} goes wrong: "
                              "use explicit padding of 0")
            before = total // 2
            after = total - before
        else:
            padded = before + size + after
            if padded < extent:
                raise Refusal(f"the window is {extent} {self.axis} ({self.kernel} {kernel}"
                              f"{f', dilation {dilation}' if dilation > 1 else ''}), the padded input is {padded} "
                              f"({before} + {size} + {after})")
            out = (padded - extent) // stride + 1
        return Window(self, size, out, before, after, kernel, stride, dilation)


class Window(NamedTuple):
    """How a window slides along one axis of an input: ``out`` places, ``stride`` apart, from ``-before`` on."""

    axis: Axis
    size: int
    out: int
    before: int
    after: int
    kernel: int
    stride: int
    dilation: int

    def __str__(self) -> str:
        axis = self.axis
        return (f"{axis.kernel} {self.kernel}, {axis.stride} {self.stride}, dilation {self.dilation} with "
                f"{self.before} before and {self.after} after {self.size} {axis.axis}")

    def touches(self) -> bool:
        """Whether every window has a tap inside the input."""
        size, dilation = self.size, self.dilation
        reach = (self.kernel - 1) * dilation
        last = (self.out - 1) * self.stride - self.before
        if reach < self.before or last >= size:
            return False
        if size >= dilation:
            # Taps are no further apart than the input is long: none can step over it.
            return True
        # Tens of thousands of windows in a file of a few bytes: not one by one.
        starts = np.arange(-self.before, last + 1, self.stride)
        first = np.maximum(-(starts // dilation), 0)
        return bool(((first < self.kernel) & (starts + first * dilation < size)).all())
