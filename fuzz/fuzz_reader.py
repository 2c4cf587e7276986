"""Coverage-guided fuzzing of everything that reads a file, with Atheris (libFuzzer for Python).

``python fuzz/fuzz_reader.py [libFuzzer options] CORPUS...``

The reading modules' Python is instrumented here; their C as well when the package is that of build_reader.py.
Mutations are libFuzzer's own half of the time and those of mutate.py otherwise, which keep a file a file.
"""

from __future__ import annotations

import random
import sys

import atheris

with atheris.instrument_imports(include=["xnnfast"]):
    import xnnfast.containers
    import xnnfast.dialects
    import xnnfast.ops
    import xnnfast.shapes
    import xnnfast.validate
    from xnnfast import load, load_all

import forms
import mutate

from xnnfast import XnnfastError
from xnnfast._payload import Payload
from xnnfast.caps import Limits
from xnnfast.containers import DataFile, ProgramFile, sniff

LIMITS = Limits(max_workspace=1 << 24)
LARGEST = 1 << 16


def read(data: bytes) -> None:
    """Whatever the package reads of a file without XNNPACK."""
    for step in (
        lambda: load(data, limits=LIMITS),
        lambda: load_all(data, limits=LIMITS),
        lambda: everything(data),
    ):
        try:
            step()
        except XnnfastError:
            continue


def everything(data: bytes) -> None:
    """Parts of programs and data files that loading a graph leaves alone."""
    payload = Payload.open(data)
    magic = sniff(payload)
    if magic == b"FT01":
        file = DataFile(payload, limits=LIMITS)
        for key in file.named_data:
            bytes(file.named_data.find(key).data)
    elif magic in (b"ET12", b"BP08"):
        program = ProgramFile(payload, limits=LIMITS)
        for plan in program.plans:
            for index, value in enumerate(plan.values):
                plan.values.kind(index)
                if isinstance(value, xnnfast.containers.Tensor) and value.is_constant:
                    try:
                        bytes(program.constant(value).data)
                    except XnnfastError:
                        continue


_mutator = mutate.Mutator([])
_spots: dict[int, list[forms.Spot]] = {}


def change(data: bytes, max_size: int, seed: int) -> bytes:
    """libFuzzer's mutation or one of our own."""
    rng = random.Random(seed)
    if rng.random() < 0.4:
        return atheris.Mutate(data, max_size)
    key = hash(data)
    if key not in _spots:
        if len(_spots) > 4096:
            _spots.clear()
        try:
            _spots[key] = forms.spots(data)
        except Exception:
            _spots[key] = []
    return _mutator.patch(rng, data, _spots[key])[:max_size]


def main() -> None:
    atheris.Setup([sys.argv[0], f"-max_len={LARGEST}", "-rss_limit_mb=2048", "-timeout=10", *sys.argv[1:]], read,
                  custom_mutator=change)  # fmt: skip
    atheris.Fuzz()


if __name__ == "__main__":
    main()
