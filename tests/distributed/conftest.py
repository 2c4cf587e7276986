"""Real clusters on this machine, one of each engine for all its tests; `make test-distributed` installs the engines."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from networks import LATE, ROWS, network

from xnnfast import Executor, GraphBuilder


@pytest.fixture(scope="session")
def images() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((ROWS, 64), np.float32)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """64 numbers in a square to 10 scores."""
    path = tmp_path / "network.xnn"
    network().save(path)
    return path


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """Two inputs, two outputs: a product and a number."""
    path, b = tmp_path / "two.xnn", GraphBuilder()
    x, y = b.input((1, 64)), b.input((1,))
    b.output(b.fully_connected(x, np.random.default_rng(2).standard_normal((3, 64), np.float32)))
    b.output(b.add(y, y))
    b.save(path)
    return path


@pytest.fixture
def want(model: Path, images: np.ndarray) -> np.ndarray:
    return Executor(model, workers=1).run(images.reshape(-1, 8, 8))[0]


@pytest.fixture(scope="session")
def ray() -> Iterator[Any]:
    ray = pytest.importorskip("ray", reason="Ray is not installed: make test-distributed")
    pytest.importorskip("ray.data", reason="Ray Data is not installed: make test-distributed")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray gives way to whatever else runs, and may wait for minutes on a busy machine.
    os.environ.setdefault("RAY_worker_niceness", "0")
    for left in (2, 1, 0):
        try:
            ray.init(num_cpus=2, include_dashboard=False, object_store_memory=200 << 20, logging_level="error",
                     log_to_driver=False)
            break
        except Exception as error:
            # Its processes get 30 seconds, whatever else the machine does.
            if LATE not in str(error) or not left:
                raise
            ray.shutdown()
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    yield ray
    ray.shutdown()


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    pytest.importorskip("pyspark", reason="Spark is not installed: make test-distributed")
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        pytest.skip("Spark needs Java (Debian: default-jre-headless)")
    from pyspark.sql import SparkSession

    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    # Otherwise its workers are whatever python3 is on the path.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    session = (SparkSession.builder.master("local[2,4]").appName("xnnfast")
               .config("spark.ui.enabled", "false").config("spark.driver.memory", "1g")
               .config("spark.sql.shuffle.partitions", "2").config("spark.default.parallelism", "4").getOrCreate())
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()
