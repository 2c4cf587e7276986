"""What the suites share: models by name, their files, inputs and right answers.

    pytest bench/suite                                    everything
    pytest bench/suite -k "mobilenet_v2 and int8"         some of it
    pytest bench/suite --benchmark-autosave               keep the figures (.benchmarks/)
    pytest bench/suite --benchmark-compare                beside the last ones kept

Every case compares its result before figures count. Image networks and encoders run at a size that NumPy can follow;
XNNFAST_BENCH_FULL=1 runs them at full size, and then compares with a runtime made by itself.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cases

import xnnfast

FULL = os.environ.get("XNNFAST_BENCH_FULL") == "1"
#: In pixels or tokens. Networks of 32x have 1 pixel left at the end.
SIZES = {"encoder_mini": 32, "encoder_base": 8, "resnet50": 64, "resnet18": 64, "mobilenet_v1": 64, "mobilenet_v2": 64}
LARGE = ("encoder_base", "mlp_wide", "resnet50")
#: Of the largest number; int8 results differ by one step at most.
TOLERANCE = {"fp32": 1e-4, "int8": 0.03}


class Model(NamedTuple):
    """A model of the lists."""

    name: str
    precision: str
    path: Path
    size: int | None

    def load(self) -> Any:
        return xnnfast.load(self.path)

    def example(self, batch: int = 1, seed: int = 1) -> Any:
        x = cases.example(self.name, batch=batch, size=self.size, seed=seed, precision=self.precision)
        held = xnnfast.empty(x.shape, x.dtype)
        np.copyto(held, x)
        return held

    def check(self, got: Any, x: Any) -> None:
        """Fails if a result is wrong."""
        graph = self.load()
        (want,) = xnnfast.Runtime(graph).run(x) if FULL else xnnfast.reference.run(graph, x)
        assert got.shape == want.shape and got.dtype == want.dtype
        distance = np.abs(got.astype(np.float64) - want).max()
        if got.dtype == np.int8:
            assert distance <= 1
        else:
            assert distance <= TOLERANCE[self.precision] * np.abs(want).max()


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Model]:
    return {}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "model" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("models")
        names = marker.args if marker else cases.names()
        chosen = [(name, precision) for name in names for precision in cases.PRECISIONS]
        metafunc.parametrize("model", chosen, ids=["-".join(each) for each in chosen], indirect=True)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "models(*names): lists that a case is measured with; all without it")


@pytest.fixture
def model(request: pytest.FixtureRequest, files: Any, tmp_path_factory: pytest.TempPathFactory) -> Model:
    name, precision = request.param
    if request.param not in files:
        size = None if FULL else SIZES.get(name)
        path = tmp_path_factory.mktemp("models") / f"{name}-{precision}.xnn"
        cases.build(name, size=size, precision=precision).save(path)
        files[request.param] = Model(name, precision, path, size)
    made: Model = files[request.param]
    return made


@pytest.fixture(autouse=True)
def machine(request: pytest.FixtureRequest) -> None:
    """What the figures were taken on, kept with each of them."""
    if "benchmark" in request.fixturenames:
        benchmark = request.getfixturevalue("benchmark")
        config = xnnfast.config()
        benchmark.extra_info.update(
            xnnfast=config["xnnfast"],
            isa=config["isa"][-1],
            pin=next(each["commit"] for each in config["pin"] if each["name"] == "xnnpack"),
            cpus=config["cpus"],
        )
