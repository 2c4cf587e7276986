"""Random matrix products and convolutions of every datatype, for comparing orders of the loops bit by bit."""

from __future__ import annotations

import numpy as np

from xnnfast import GraphBuilder, PerBlock, PerChannel, PerTensor, PerToken

F = np.float32
#: Activations and weights of what each operator takes.
FULLY_CONNECTED = (
    "fp32",
    "fp16",
    "qint8",
    "qint8-qcint8",
    "quint8",
    "fp32-qcint8",
    "fp32-qcint4",
    "qdint8-qcint8",
    "qdint8-qcint4",
    "qdint8-qbint4",
)
CONVOLUTION = ("fp32", "fp16-fp32", "qint8", "qint8-qcint8", "quint8", "qdint8-qcint8")
TRANSPOSED = ("fp32", "fp16-fp32", "qint8", "quint8", "qdint8-qcint8")
MATRICES = ("fp32", "fp16", "qdint8-qcint8")


def random_case(rng, most=96, rows=70):
    """(what it is, graph, inputs). `most` limits channels, `rows` the rows of a product."""
    kind = rng.choice(
        ["fully_connected", "conv2d", "conv_transpose2d", "batch_matrix_multiply"], p=[0.35, 0.4, 0.15, 0.1]
    )
    return globals()[f"_{kind}"](rng, most, rows)


class _Maker:
    def __init__(self, rng, family):
        self.rng, self.b, self.arrays = rng, GraphBuilder(), []
        self.x_type, _, self.w_type = family.partition("-")
        self.w_type = self.w_type or self.x_type
        self.out = {"qdint8": "fp32"}.get(self.x_type, self.x_type)

    def random(self, shape, datatype):
        if datatype in ("fp32", "fp16"):
            return self.rng.standard_normal(shape, F).astype(np.float16 if datatype == "fp16" else F)
        if datatype in ("qcint4", "qbint4"):
            return self.rng.integers(-8, 8, shape, np.int8)
        if datatype == "quint8":
            return self.rng.integers(0, 256, shape, np.uint8)
        return self.rng.integers(-128, 128, shape, np.int8)

    def zero_point(self, datatype):
        return int(self.rng.integers(0, 256) if datatype == "quint8" else self.rng.integers(-128, 128))

    def input(self, shape, row_axes=1):
        if self.x_type == "qdint8":
            self.arrays.append(self.random(shape, "fp32"))
            return self.b.convert(self.b.input(shape), "qdint8", PerToken(row_axes))
        self.arrays.append(self.random(shape, self.x_type))
        quantization = PerTensor(0.5, self.zero_point(self.x_type)) if self.x_type[0] == "q" else None
        return self.b.input(shape, self.x_type, quantization)

    def weights(self, shape, axis=0, scale=2.0**-6):
        """`axis`: where the output channels are."""
        array = self.random(shape, self.w_type)
        if self.w_type in ("fp32", "fp16"):
            return array
        if self.w_type in ("qcint8", "qcint4"):
            scales = (self.rng.random(shape[axis], F) + 0.5) * F(scale)
            return self.b.constant(array, self.w_type, PerChannel(scales, axis))
        if self.w_type == "qbint4":
            # bfloat16 patterns of numbers near 1.
            scales = self.rng.integers(0x3F00, 0x3F80, shape[0] * shape[1] // 32).astype(np.uint16)
            return self.b.constant(array, self.w_type, PerBlock(scales, 0, 32))
        zero_point = self.zero_point("quint8") if self.w_type == "quint8" else 0
        return self.b.constant(array, self.w_type, PerTensor(scale, zero_point))

    def bias(self, channels):
        if self.rng.random() < 0.3:
            return None
        if self.x_type in ("qint8", "quint8"):
            return self.rng.integers(-999, 999, channels, np.int32)
        return self.random(channels, "fp16" if self.w_type == "fp16" else "fp32")

    def options(self):
        if self.x_type in ("qint8", "quint8"):
            return {"quantization": PerTensor(2.0, self.zero_point(self.x_type))}
        return {"datatype": self.out}

    def done(self, value, *facts):
        self.b.output(value)
        return " ".join(map(str, facts)), self.b.graph(), self.arrays


def _size(rng, most):
    """Small numbers are as likely as large ones, and so are the neighbours of 8, 16, 32 and 64."""
    if rng.random() < 0.3:
        return max(1, min(most, int(rng.choice([8, 16, 32, 64, 128])) + int(rng.integers(-1, 2))))
    return int(np.exp(rng.uniform(0, np.log(most + 1))))


def _fully_connected(rng, most, rows):
    family = str(rng.choice(FULLY_CONNECTED))
    m = _Maker(rng, family)
    inner, outer, rows = _size(rng, most), _size(rng, 3 * most), _size(rng, rows)
    if "4" in m.w_type:
        inner = inner + inner % 2 if m.w_type == "qcint4" else -(-inner // 32) * 32
    y = m.b.fully_connected(m.input((rows, inner)), m.weights((outer, inner)), m.bias(outer), **m.options())
    return m.done(y, "fully_connected", family, rows, inner, outer)


def _window(rng, rows):
    kernel = rng.choice([1, 1, 2, 3, 3, 5], 2).tolist()
    stride = rng.choice([1, 1, 2, 3], 2).tolist()
    dilation = [1, 1] if rng.random() < 0.8 else rng.integers(1, 3, 2).tolist()
    edge = int(rows**0.5) + 1
    size = [max(int(rng.integers(1, edge + 1)), (k - 1) * d + 1) for k, d in zip(kernel, dilation)]
    padding = rng.integers(0, 3, 4).tolist() if rng.random() < 0.5 else 0
    batch = int(rng.choice([1, 1, 2, 3, 8]))
    groups = int(rng.choice([1, 1, 1, 2, 3]))
    return kernel, stride, dilation, size, padding, batch, groups


def _conv2d(rng, most, rows):
    family = str(rng.choice(CONVOLUTION))
    m = _Maker(rng, family)
    kernel, stride, dilation, size, padding, batch, groups = _window(rng, rows)
    inner, outer = max(2, _size(rng, most // 2)), max(2, _size(rng, 2 * most))
    x = m.input((batch, *size, groups * inner), 3)
    w = m.weights((groups * outer, *kernel, inner))
    y = m.b.conv2d(x, w, m.bias(groups * outer), padding=padding, stride=stride, dilation=dilation, groups=groups,
                   **m.options())  # fmt: skip
    return m.done(y, "conv2d", family, batch, size, groups, inner, outer, kernel, stride, dilation, padding)


def _conv_transpose2d(rng, most, rows):
    family = str(rng.choice(TRANSPOSED))
    m = _Maker(rng, family)
    kernel, stride, dilation, size, _, batch, groups = _window(rng, rows)
    if rng.random() < 0.3:
        # What is computed without an indirection buffer.
        kernel, dilation = stride, [1, 1]
    inner, outer = _size(rng, most // 2), _size(rng, most)
    x = m.input((batch, *size, groups * inner), 3)
    w = m.weights((groups * outer, *kernel, inner))
    y = m.b.conv_transpose2d(x, w, m.bias(groups * outer), stride=stride, dilation=dilation, groups=groups,
                             **m.options())  # fmt: skip
    return m.done(y, "conv_transpose2d", family, batch, size, groups, inner, outer, kernel, stride, dilation)


def _batch_matrix_multiply(rng, most, rows):
    family = str(rng.choice(MATRICES))
    m = _Maker(rng, family)
    inner, outer, rows = _size(rng, most), _size(rng, 2 * most), _size(rng, rows)
    batch = rng.integers(1, 5, 2).tolist()
    # One matrix for all of the batch, for a dimension of it, or one each.
    right = [n if rng.random() < 0.5 else 1 for n in batch]
    x = m.input((*batch, rows, inner))
    if m.w_type == "qcint8":
        w = m.weights((*batch, inner, outer), 3)
    elif rng.random() < 0.5:
        w = m.b.constant(m.random((*right, inner, outer), m.w_type))
    else:
        m.arrays.append(m.random((*right, inner, outer), m.w_type))
        w = m.b.input((*right, inner, outer), m.w_type)
    y = m.b.batch_matrix_multiply(x, w, datatype=m.out)
    return m.done(y, "batch_matrix_multiply", family, batch, right, rows, inner, outer)
