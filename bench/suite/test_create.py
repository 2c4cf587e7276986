"""From a graph to a runtime: lowering, creating (which packs the weights), planning other shapes."""

from __future__ import annotations

import cases
import pytest

import xnnfast
from xnnfast.lower import lower


def test_lower(benchmark, model):
    """A graph keeps its lowered form, so that each round needs a graph of its own."""
    lowered = benchmark.pedantic(lower, setup=lambda: ((model.load(),), {}), rounds=10)
    assert len(lowered.nodes) >= 1 and len(lowered.outputs) == 1


def test_create(benchmark, model):
    """The first runtime of a graph packs."""
    runtime = benchmark.pedantic(xnnfast.Runtime, setup=lambda: ((model.load(),), {}), rounds=7)
    x = model.example()
    (y,) = runtime.run(x)
    model.check(y, x)


def test_create_another(benchmark, model):
    """Later ones share what the first has packed."""
    graph = model.load()
    first = xnnfast.Runtime(graph)
    runtime = benchmark(xnnfast.Runtime, graph)
    assert runtime.memory["packed"] == first.memory["packed"]
    x = model.example()
    (y,) = runtime.run(x)
    model.check(y, x)


@pytest.mark.models(*(name for name in cases.names() if not name.startswith("encoder")))
def test_reshape(benchmark, model):
    """A call with one batch, then with another: twice planning, and two inferences."""
    runtime = xnnfast.Runtime(model.load())
    one, two = model.example(1), model.example(2)

    def both():
        return runtime.run(one)[0], runtime.run(two)[0]

    first, second = benchmark(both)
    model.check(first, one)
    model.check(second, two)
