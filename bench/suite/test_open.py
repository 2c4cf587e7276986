"""From bytes to a graph: opening files, and verifying what is in memory already."""

from __future__ import annotations

import mmap

import numpy as np

import xnnfast


def test_open(benchmark, model):
    """Map, verify, validate; constants stay in the map."""
    graph = benchmark(xnnfast.load, model.path)
    used, total = graph.zero_copy
    assert used == total > 0
    benchmark.extra_info["nodes"] = len(graph.nodes)


def test_map_alone(benchmark, model):
    """What the system takes for the same file, and a look at every page of it: the floor under opening."""

    def look():
        with open(model.path, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as held:
            view = np.frombuffer(held, np.uint8)
            total = int(view[::4096].sum(dtype=np.int64))
            del view
            return total

    data = np.fromfile(model.path, np.uint8)
    assert benchmark(look) == int(data[::4096].sum(dtype=np.int64))


def test_verify(benchmark, model):
    """The same from a buffer: what remains is checking structure and meaning."""
    data = model.path.read_bytes()
    graph = benchmark(xnnfast.load, data)
    assert len(graph.nodes) == len(model.load().nodes)
