"""The network of these tests, how many samples there are, and what Ray says where it had no time to start."""

from __future__ import annotations

import numpy as np

from xnnfast import GraphBuilder

ROWS = 600
LATE = "timed out during startup"


def network(seed: int = 0) -> GraphBuilder:
    rng, b = np.random.default_rng(seed), GraphBuilder()
    x = b.input((1, 8, 8))
    x = b.fully_connected(b.static_reshape(x, (1, 64)), rng.standard_normal((48, 64), np.float32), clamp=(0, None))
    b.output(b.softmax(b.fully_connected(x, rng.standard_normal((10, 48), np.float32))))
    return b
