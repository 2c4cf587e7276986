"""Batches: one runtime on all of it, and the executor with one and two workers."""

from __future__ import annotations

import numpy as np
import pytest

import xnnfast
from xnnfast.executor import Executor

MODELS = ("mlp", "mobilenet_v2", "resnet18")
BATCH = 16


@pytest.mark.models(*MODELS)
def test_whole_batch(benchmark, model):
    runtime = xnnfast.Runtime(model.load())
    x = model.example(BATCH)
    out = list(runtime.run(x))
    (y,) = benchmark(runtime.run, x, out=out)
    benchmark.extra_info["batch"] = BATCH
    model.check(y, x)


@pytest.mark.models(*MODELS)
@pytest.mark.parametrize("workers", [1, 2])
def test_executor(benchmark, model, workers):
    x = model.example(BATCH)
    with Executor(model.load(), workers=workers) as executor:
        # Sizes of pieces are tried on the first calls.
        for _ in range(10):
            out = list(executor.run(x))
        (y,) = benchmark(executor.run, x, out=out)
        benchmark.extra_info.update(batch=BATCH, workers=workers, plan=str(executor.plan))
    assert not np.shares_memory(y, x)
    model.check(y, x)
