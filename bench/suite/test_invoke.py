"""Calls: of whole models, and of a node so small that only the way to it counts."""

from __future__ import annotations

import numpy as np
import pytest

import xnnfast


@pytest.mark.parametrize("threads", [1, 2])
def test_invoke(benchmark, model, threads):
    runtime = xnnfast.Runtime(model.load(), threads=threads)
    x = model.example()
    out = list(runtime.run(x))
    benchmark.extra_info["threads"] = threads
    (y,) = benchmark(runtime.run, x, out=out)
    assert y is out[0]
    model.check(y, x)


@pytest.fixture
def add():
    b = xnnfast.GraphBuilder()
    b.output(b.add(b.input((1, 4)), b.input((1, 4))))
    x, y = (xnnfast.empty((1, 4)) for _ in range(2))
    x[:], y[:] = np.arange(4), 1
    return xnnfast.Runtime(b.graph()), x, y


def test_call(benchmark, add):
    runtime, x, y = add
    out = [xnnfast.empty((1, 4))]
    benchmark(runtime.run, x, y, out=out)
    np.testing.assert_array_equal(out[0], x + y)


def test_call_with_new_outputs(benchmark, add):
    runtime, x, y = add
    (z,) = benchmark(runtime.run, x, y)
    np.testing.assert_array_equal(z, x + y)


def test_call_floor(benchmark, add):
    """A thousand times setup and invoke in C: what a call can't go below. Divide by a thousand."""
    runtime, x, y = add
    assert benchmark(runtime._c_loop, x, y, rounds=1000) > 0
    np.testing.assert_array_equal(runtime.run(x, y)[0], x + y)
