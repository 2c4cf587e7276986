"""The recipes of docs/distributed.md, each in a process of its own, where its engine is installed."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from networks import LATE

TEXT = (Path(__file__).resolve().parents[2] / "docs/distributed.md").read_text("utf-8")
COMMON = "\n".join(re.findall(r"^```python\n(.*?)^```$", TEXT, re.M | re.S))
RECIPES = re.findall(r"^```py (\w+)\n(.*?)^```$", TEXT, re.M | re.S)
#: Where the name of the recipe is not that of the module.
MODULES = {"spark": "pyspark", "beam": "apache_beam"}


@pytest.mark.parametrize("engine", ("ray", "spark", "dask", "distributed", "daft", "beam"))
def test_a_recipe_does_what_it_says(engine: str, tmp_path: Path) -> None:
    code = "\n".join(block for name, block in RECIPES if name == engine)
    assert code
    module = MODULES.get(engine, engine)
    found = importlib.util.find_spec(module)
    # The folder of these tests has the name of one of the engines, and no file that makes it a package.
    if found is None or found.origin is None:
        pytest.skip(f"{module} is not installed: make test-distributed")
    if engine == "spark" and shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        pytest.skip("Spark needs Java (Debian: default-jre-headless)")
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0",
                   "DO_NOT_TRACK": "1", "SPARK_LOCAL_IP": "127.0.0.1",
                   "PYSPARK_PYTHON": sys.executable}
    # Of -c there is no file that workers would import.
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", f"{COMMON}\n{code}"], cwd=tmp_path, capture_output=True, text=True,
                              timeout=240, env=environment)
        if done.returncode == 0 or LATE not in done.stderr:
            break
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_recipe_has_a_test() -> None:
    assert {name for name, _ in RECIPES} == {"ray", "spark", "dask", "distributed", "daft", "beam"}
