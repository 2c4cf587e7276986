"""Runs cases in memory that ends at an unreadable page, one line of JSON per case: a process that may die.

``python guarded.py FIRST`` starts with case number FIRST. What is tried with each case:

* inputs that end at the page (the runtime must copy them), and 16 bytes before it with zeros, then NaN, between
  (in place: XNNPACK may read those bytes but they must not matter);
* ``out=`` arrays in the same places, whose 16 bytes behind must stay what they are;
* a file in which a constant is the last thing before the page, and 16 bytes before it.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import struct
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np
from op_cases import Case, case, combinations

import xnnfast as xf
from xnnfast import Graph, Runtime, writer
from xnnfast._graph import Constant

PAGE = mmap.PAGESIZE
SLACK = 16
_libc = ctypes.CDLL(None, use_errno=True)


class Guarded:
    """Pages followed by one that can't be touched; ``file`` sees them read-only."""

    def __init__(self, size: int) -> None:
        pages = -(-size // PAGE) + 1
        self.end = pages * PAGE
        handle = os.memfd_create("guarded")
        try:
            os.ftruncate(handle, self.end + PAGE)
            self.maps = [mmap.mmap(handle, self.end + PAGE, access=access)
                         for access in (mmap.ACCESS_WRITE, mmap.ACCESS_READ)]
        finally:
            os.close(handle)
        self.bytes, self.readable = (np.frombuffer(each, np.uint8) for each in self.maps)
        for each in (self.bytes, self.readable):
            if _libc.mprotect(ctypes.c_void_p(each.ctypes.data + self.end), ctypes.c_size_t(PAGE), 0):
                raise OSError(ctypes.get_errno(), "mprotect")

    def array(self, like: np.ndarray, gap: int, fill: int = 0) -> np.ndarray:
        """A copy of an array that ends ``gap`` bytes before the page, those bytes filled."""
        stop = self.end - gap
        self.bytes[stop:self.end] = fill
        place = self.bytes[stop - like.nbytes:stop].view(like.dtype).reshape(like.shape)
        place[...] = like
        return place

    def behind(self, gap: int) -> np.ndarray:
        return self.bytes[self.end - gap:self.end]

    def file(self, data: bytes) -> memoryview:
        """Read-only bytes that end at the page."""
        self.bytes[self.end - len(data):self.end] = np.frombuffer(data, np.uint8)
        return memoryview(self.maps[1])[self.end - len(data):self.end]


def same(got: Any, want: Any, what: str) -> None:
    for one, other in zip(got, want):
        if one.tobytes() != other.tobytes():
            raise AssertionError(f"{what} changes the result")


def inputs(made: Case) -> None:
    arrays = made.arrays()
    runtime = Runtime(made.graph)
    want = runtime.run(*arrays)
    copied = runtime.staged
    for gap, fill in ((0, 0), (SLACK, 0), (SLACK, 0xFF)):
        places = [Guarded(array.nbytes + SLACK) for array in arrays]
        put = [place.array(array, gap, fill) for place, array in zip(places, arrays)]
        same(runtime.run(*put), want, f"an input with {gap} bytes of {fill:#x} behind it")
        if gap and runtime.staged != copied:
            raise AssertionError("an input with room behind it was copied")
        if not gap and runtime.staged != copied + len(arrays):
            raise AssertionError("an input without room behind it was not copied")
        copied = runtime.staged


def outputs(made: Case) -> None:
    arrays = made.arrays()
    runtime = Runtime(made.graph)
    want = runtime.run(*arrays)
    for gap in (0, SLACK):
        places = [Guarded(array.nbytes + SLACK) for array in want]
        put = [place.array(np.zeros_like(array), gap, 0xA5) for place, array in zip(places, want)]
        got = runtime.run(*arrays, out=put)
        if any(one is not other for one, other in zip(got, put)):
            raise AssertionError("out= was not what came back")
        same(got, want, "out=")
        if any((place.behind(gap) != 0xA5).any() for place in places):
            raise AssertionError("bytes behind out= were written")


def constants(made: Case) -> None:
    """Every operand that may be a constant, as the last thing of a file."""
    arrays = made.arrays()
    want = Runtime(made.graph).run(*arrays)
    for keep in range(len(arrays)):
        graph = frozen(made.graph, arrays, keep)
        for value in graph.values:
            if value.constant is not None:
                values = [other for other in graph.values if other is not value] + [value]
                data = writer.to_bytes(Graph(values, graph.nodes, graph.inputs, graph.outputs), scales="inline")
                check_file(data, arrays[:keep], want, f"constant {value.id}")


def frozen(graph: Graph, arrays: list[np.ndarray], keep: int) -> Graph:
    """The graph with its inputs after the first few made constants."""
    made = {}
    for value, array in zip(graph.inputs[keep:], arrays[keep:]):
        constant = Constant(np.frombuffer(array.tobytes() + bytes(SLACK), np.uint8)[:array.nbytes])
        made[value.id] = value.replace(is_input=False, external_id=None, constant=constant)
    return Graph([made.get(value.id, value) for value in graph.values], graph.nodes, graph.inputs[:keep], graph.outputs)


def check_file(data: bytes, arrays: list[np.ndarray], want: Any, what: str) -> None:
    end = max(constant.offset + constant.nbytes for constant in xf.load(data).constants)
    # The size of the constants' area stands at byte 22.
    (area,) = struct.unpack_from("<Q", data, 22)
    cut = len(data) - end
    trimmed = data[:22] + struct.pack("<Q", area - cut) + data[30:end]
    for fill, file in ((None, trimmed), (0, data), (0xFF, data[:end] + b"\xff" * cut)):
        graph = xf.load(Guarded(len(file)).file(file))
        if fill is not None and graph.zero_copy[0] != graph.zero_copy[1]:
            raise AssertionError(f"{what} was copied though there is room behind it: {graph.constants}")
        if fill is None and graph.zero_copy[0] == graph.zero_copy[1]:
            raise AssertionError(f"{what} was not copied though there is no room behind it")
        same(Runtime(graph).run(*arrays), want, f"{what} with {0 if fill is None else cut} bytes of {fill} behind it")


#: Shapes that leave a vector register partly used, and the ones of cases.md, row B1.
SHAPES: dict[str, list[dict[str, Any]]] = {
    "fully_connected": [{"lead": (2,), "inner": 64, "outer": 3}],
    **{name: [{"batch": 1, "height": 4, "width": 4, "pooling": 2, "channels": each} for each in (1, 3, 17)]
       for name in ("average_pooling2d", "max_pooling2d", "argmax_pooling2d")},
    "static_resize_bilinear2d": [{"batch": 1, "height": 2, "width": 2, "size": 4, "channels": each}
                                 for each in (1, 3, 17)],
    "softmax": [{"shape": (1, 3)}, {"shape": (2, 33)}],
    "batch_matrix_multiply": [{"transpose": True}],
}


def cases() -> Iterator[tuple[str, str, Case, Any]]:
    for name, types in combinations():
        for options in [{}, *SHAPES.get(name, [])]:
            made = case(name, types, **options)
            title = f"{'/'.join(types)} {options or ''}"
            yield name, f"{title} inputs", made, inputs
            yield name, f"{title} outputs", made, outputs
            if made.op.kind is not None:
                yield name, f"{title} constants", made, constants


def main(first: int) -> None:
    """Before each case its name is told, so that what a dead process did last is known; a fault is told after it."""
    for number, (name, title, made, attempt) in enumerate(cases()):
        if number >= first:
            print(json.dumps([number, name, title, None]), flush=True)
            try:
                attempt(made)
            except Exception:
                print(json.dumps([number, name, title, traceback.format_exc(limit=-3)]), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
