"""Creating with packed weights from a file, against packing."""

from __future__ import annotations

import pytest

import xnnfast

MODELS = ("mlp_wide", "mobilenet_v2", "resnet50")


@pytest.mark.models(*MODELS)
def test_create_from_cache(benchmark, model, tmp_path):
    first = xnnfast.Runtime(model.load(), weights_cache=tmp_path)
    assert first.weights_cache == "saved"
    del first

    def setup():
        return (model.load(),), {"weights_cache": tmp_path}

    runtime = benchmark.pedantic(xnnfast.Runtime, setup=setup, rounds=10)
    assert runtime.weights_cache == "hit"
    x = model.example()
    (y,) = runtime.run(x)
    model.check(y, x)
