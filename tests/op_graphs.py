"""One small graph for each operator, by name: what tests parametrised over the operators start from.

``CASES[name](builder)`` adds the operator to a builder and returns the value or values it makes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from xnnfast.builder import GraphBuilder
from xnnfast.ops import OPS


def numbers(*shape: int) -> Any:
    """Distinct fp32 numbers, small and of both signs."""
    count = int(np.prod(shape))
    return ((np.arange(count, dtype=np.float32) - count // 3) / 8).reshape(shape)


CASES: dict[str, Callable[[GraphBuilder], Any]] = {
    "add": lambda b: b.add(b.input((2, 3)), b.input((2, 3)), clamp=(-1, 6)),
    "subtract": lambda b: b.subtract(b.input((2, 3)), b.input((3,))),
    "multiply": lambda b: b.multiply(b.input((2, 3)), numbers(1, 3)),
    "divide": lambda b: b.divide(b.input((2, 3)), b.input((2, 1))),
    "minimum": lambda b: b.minimum(b.input((2, 3)), 0.5),
    "maximum": lambda b: b.maximum(b.input((2, 3)), b.input((2, 3))),
    "prelu": lambda b: b.prelu(b.input((2, 3)), numbers(3)),
    "clamp": lambda b: b.clamp(b.input((2, 3)), 0, None),
    "leaky_relu": lambda b: b.leaky_relu(b.input((2, 3)), 0.1),
    "elu": lambda b: b.elu(b.input((2, 3)), 0.7),
    "convert": lambda b: b.convert(b.input((2, 3)), "fp16"),
    "fully_connected": lambda b: b.fully_connected(b.input((2, 3)), numbers(4, 3), numbers(4), clamp=(0, None)),
    "batch_matrix_multiply": lambda b: b.batch_matrix_multiply(b.input((2, 3, 4)), b.input((2, 5, 4)),
                                                               transpose_b=True),
    "scaled_dot_product_attention": lambda b: b.scaled_dot_product_attention(
        b.input((1, 2, 3, 4)), b.input((1, 2, 5, 4)), b.input((1, 2, 5, 6))),
    "conv2d": lambda b: b.conv2d(b.input((1, 5, 6, 4)), numbers(6, 3, 2, 2), numbers(6), padding=(1, 0, 2, 1),
                                 stride=(2, 1), dilation=(1, 2), groups=2, clamp=(0, 6)),
    "depthwise_conv2d": lambda b: b.depthwise_conv2d(b.input((1, 5, 6, 3)), numbers(1, 3, 3, 6), same_padding=True,
                                                     stride=2),
    "conv_transpose2d": lambda b: b.conv_transpose2d(b.input((1, 3, 4, 2)), numbers(3, 3, 2, 2), numbers(3),
                                                     stride=(2, 3), padding=(1, 0, 0, 1), adjustment=(1, 2)),
    "average_pooling2d": lambda b: b.average_pooling2d(b.input((1, 6, 5, 2)), (3, 2), padding=1, stride=(2, 1)),
    "max_pooling2d": lambda b: b.max_pooling2d(b.input((1, 6, 5, 2)), (3, 2), dilation=(1, 2), stride=1),
    "argmax_pooling2d": lambda b: b.argmax_pooling2d(b.input((1, 6, 5, 2)), (3, 2)),
    "static_transpose": lambda b: b.static_transpose(b.input((2, 3, 4)), (2, 0, -2)),
    "static_reshape": lambda b: b.static_reshape(b.input((2, 3, 4)), (4, -1)),
    "static_slice": lambda b: b.static_slice(b.input((4, 5)), (1, 2), (2, None)),
    "static_constant_pad": lambda b: b.static_constant_pad(b.input((2, 3)), (0, 1), (2, 0), 0.5),
    "static_resize_bilinear2d": lambda b: b.static_resize_bilinear2d(b.input((1, 2, 3, 2)), (4, 5), align_corners=True),
    "concatenate2": lambda b: b.concatenate2(b.input((2, 3)), b.input((2, 1)), -1),
    "concatenate3": lambda b: b.concatenate3(b.input((2, 3)), b.input((2, 3)), numbers(2, 3), 0),
    "concatenate4": lambda b: b.concatenate4(*(b.input((2, 3)) for _ in range(4)), 0),
    "concatenate5": lambda b: b.concatenate5(*(b.input((2, 3)) for _ in range(5)), 1),
}
# What is left takes one input and nothing else.
for _name, _op in OPS.items():
    if _op.kind is not None and _name not in CASES:
        CASES[_name] = lambda b, name=_name: getattr(b, name)(b.input((1, 3, 2, 4)))


def built(name: str) -> GraphBuilder:
    """A builder that holds the operator's graph, results declared as outputs."""
    builder = GraphBuilder()
    results = CASES[name](builder)
    for value in results if isinstance(results, tuple) else (results,):
        builder.output(value)
    return builder
