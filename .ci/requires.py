"""Print what pyproject.toml names as needed for building, one requirement a line."""

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

project = tomllib.loads(Path(__file__).resolve().parent.parent.joinpath("pyproject.toml").read_text("utf-8"))
print("\n".join(project["build-system"]["requires"]))
