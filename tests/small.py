"""Small graphs for tests: run one, or store one with a single thing wrong and see it refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

import xnnfast as xf
from xnnfast import GraphBuilder, Runtime, Value, XnnfastError, writer

Build = Callable[[GraphBuilder], Any]


def f32(*numbers: Any) -> np.ndarray:
    return np.array(numbers if len(numbers) > 1 else numbers[0], np.float32)


def ramp(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    """1, 2, 3, ... in row-major order."""
    return np.arange(1, np.prod(shape, dtype=int) + 1).reshape(shape).astype(dtype)


def built(build: Build) -> GraphBuilder:
    """A builder whose outputs are what ``build`` returned."""
    b = GraphBuilder()
    made = build(b)
    for value in made if isinstance(made, tuple) else (made,):
        b.output(value)
    return b


def ran(build: Build, *arrays: np.ndarray) -> Any:
    """The output of a graph, or all of them, through a file and XNNPACK."""
    results = Runtime(xf.load(built(build).finish())).run(*arrays)
    return results[0] if len(results) == 1 else results


def stored(build: Build, *, node: int = 0, attrs: Mapping[str, Any] | None = None,
           values: Mapping[int, Mapping[str, Any]] | None = None, more: Any = (), dialect: str = "xn01",
           **fields: Any) -> bytes:
    """A file of a graph with something changed that the builder would not allow: attributes and fields of one
    node, fields of values by id, nodes at the end."""
    parts = built(build).parts()
    nodes = list(parts.nodes)
    if attrs:
        fields["attrs"] = {**nodes[node].attrs, **attrs}
    nodes[node] = nodes[node].replace(**fields)
    changed = {value.id: value.replace(**(values or {}).get(value.id, {})) for value in parts.values}

    def current(group: tuple[Value, ...]) -> tuple[Value, ...]:
        return tuple(changed[value.id] for value in group)

    return writer.to_bytes(writer.Parts(tuple(changed.values()), (*nodes, *more), current(parts.inputs),
                                        current(parts.outputs)), dialect=dialect)


def refused(data: bytes, match: str, error: type[XnnfastError] = XnnfastError) -> None:
    """The file is refused before anything runs, and the process goes on as before."""
    with pytest.raises(error, match=match):
        Runtime(xf.load(data))
    still_works()


def still_works() -> None:
    np.testing.assert_array_equal(ran(lambda b: b.add(b.input((3,)), f32(1, 2, 3)), f32(1, 1, 1)), [2, 3, 4])


def in_child(module: str, call: str, seconds: int = 60) -> None:
    """Run a function of a test module in a process of its own: what kills it must not kill the tests."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONFAULTHANDLER": "1"}
    done = subprocess.run([sys.executable, "-c", f"import {module}; {module}.{call}(); print('survived')"],
                          capture_output=True, text=True, timeout=seconds, env=environment)
    assert done.returncode == 0 and done.stdout.endswith("survived\n"), f"{done.returncode}: {done.stderr}"
