"""Good files to begin with: every operator, dialect and container, made by the package and the helpers of its tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import files  # noqa: E402
import harness  # noqa: E402
from op_cases import case, combinations  # noqa: E402
from op_graphs import CASES, built  # noqa: E402

from xnnfast import writer  # noqa: E402
from xnnfast.errors import XnnfastError  # noqa: E402

#: Of larger files too little is tables.
LARGEST = 6144


def graphs() -> Iterator[bytes]:
    """Graph files of every operator in every combination of datatypes."""
    for name in CASES:
        graph = built(name).graph()
        yield writer.to_bytes(graph, dialect="xn01")
        yield writer.to_bytes(graph, dialect="xn00", container="bare")
        if name == "add":
            yield writer.to_bytes(files_seed_graph(), dialect="seed")
    for number, (name, types) in enumerate(combinations()):
        try:
            graph = case(name, types).graph
            scales = ("inline", "constant")[number % 2]
            dialect, container = (("xn01", "XH00"), ("xn00", "bare"), ("xn00", "XH00"))[number % 3]
            yield writer.to_bytes(graph, dialect=dialect, container=container, scales=scales)
        except XnnfastError:
            # An operator that no file can hold.
            continue


def files_seed_graph():  # type: ignore[no-untyped-def]
    from xnnfast import GraphBuilder

    builder = GraphBuilder()
    builder.output(builder.add(builder.input((2, 3)), np.ones((2, 3), np.float32)))
    return builder.graph()


def programs() -> Iterator[bytes]:
    """Programs, data files and bundles."""
    yield files.program(alignment=16)
    yield files.program(header=False, alignment=16)
    yield files.program(
        segments=[b"", files.named(), files.ONES.tobytes()],
        named_data=[{"key": "weights", "segment_index": 2}],
        alignment=16,
    )
    kernels = files.plan(
        values=[files.tensor(), files.tensor(), files.tensor(), {"val": ("Int", {"int_val": 1})}],
        outputs=[2],
        operators=[{"name": "aten::add", "overload": "out"}],
        chains=[{"instructions": [files.call(), files.kernel(0, (1, 0, 3, 2, 2))]}],
    )
    yield files.program(kernels, alignment=16)
    moves = files.plan(
        values=[files.tensor(), files.tensor(), files.tensor(), {"val": ("Bool", {"bool_val": False})}],
        outputs=[2],
        chains=[
            {
                "instructions": [
                    files.call(),
                    {"instr_args": ("MoveCall", {"move_from": 1, "move_to": 2})},
                    {"instr_args": ("JumpFalseCall", {"cond_value_index": 3, "destination_instruction": 3})},
                    {"instr_args": ("FreeCall", {"value_index": 1})},
                ]
            }
        ],
    )
    yield files.program(moves, alignment=16)
    from xnnfast.writer import encode

    yield encode({"version": 1, "program": files.program(alignment=16)}, schema_key="bundled", identifier=b"BP08")
    yield files.data_file({"weights": files.ONES.tobytes(), "b": b"12345678"})
    yield files.data_file({"weights": files.ONES.tobytes()}, older=True)


def corpus(*folders: Path) -> list[bytes]:
    """All seeds, with the small files of folders."""
    harness.needs_data = files.program(segments=[b"", files.named()], alignment=16)
    found = [*graphs(), *programs(), files.seed(), files.bare(), files.inline(), files.named()]
    for folder in folders:
        for pattern in ("*.pte", "*.ptd", "*.xnnpack", "*.fb"):
            found += [path.read_bytes() for path in sorted(folder.rglob(pattern))]
    return list(dict.fromkeys(data for data in found if len(data) <= LARGEST))
