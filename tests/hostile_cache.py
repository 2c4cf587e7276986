"""Cache files that are damaged, cut, mixed up or somebody else's: results must be those of packing afresh.

    python tests/hostile_cache.py [--count 10000] [--seed 0] [--folder /dev/shm]

Every trial puts one such file where a runtime looks for its packed weights, makes the runtime and compares
its results bit by bit. A crash ends the process; the file of that trial stays, the last line printed names it.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import os
import shutil
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from xnnfast import Graph, GraphBuilder, PerChannel, PerTensor, Runtime, load
from xnnfast import weights_cache as cache
from xnnfast.quantization import PerToken

F = np.float32
HEADER_END = cache.HEADER_SIZE - 32
#: (kind of damage, what became of the cache) -> how often.
Outcomes = collections.Counter[tuple[str, str]]


def mixed(seed: int = 0, outputs: int = 24) -> GraphBuilder:
    """Every way in which XNNPACK packs: gemm, igemm, grouped, depthwise and transposed convolutions, products."""
    rng = np.random.default_rng(seed)

    def real(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(F)

    def small(*shape: int, dtype: Any = np.int8) -> Any:
        return rng.integers(-100, 100, shape).astype(dtype)

    b = GraphBuilder()
    x = b.input((1, 6, 5, 8))
    y = b.conv2d(x, real(12, 3, 3, 8), real(12), padding=1, clamp=(0, 6))
    y = b.conv2d(y, real(12, 1, 1, 12), real(12))
    # Twice the same shapes, so that their packed weights could be mistaken for one another.
    y = b.conv2d(y, real(12, 1, 1, 12), real(12))
    y = b.conv2d(y, real(8, 3, 3, 6), None, groups=2, padding=1)
    y = b.depthwise_conv2d(y, real(1, 3, 3, 8), real(8), padding=1)
    b.output(b.conv_transpose2d(y, real(4, 3, 3, 8), real(4), stride=2))
    b.output(b.conv_transpose2d(y, real(4, 2, 2, 8), None))
    flat = b.static_reshape(y, (1, -1))
    z = b.fully_connected(flat, real(outputs, 240), real(outputs))
    z = b.fully_connected(z, real(outputs, outputs), real(outputs))
    z = b.fully_connected(z, real(outputs, outputs), real(outputs))
    # Bias divided by lowering.
    z = b.fully_connected(z, b.constant(small(16, outputs), "qcint8", PerChannel(np.abs(real(16)) / 64, 0)), real(16))
    q = b.convert(z, "qdint8", PerToken(1))
    weights = b.constant(small(16, 16), "qcint8", PerChannel(np.abs(real(16)) / 64, 0))
    b.output(b.fully_connected(q, weights, real(16), datatype="fp32"))
    b.output(b.fully_connected(q, weights, real(16), datatype="fp32"))
    s = b.convert(x, "qint8", PerTensor(0.05, 3))
    t = b.conv2d(s, b.constant(small(8, 3, 3, 8), "qcint8", PerChannel(np.abs(real(8)) / 64, 0)),
                 small(8, dtype=np.int32), padding=1, datatype="qint8", quantization=PerTensor(0.5, -3))
    b.output(b.convert(t, "fp32"))
    return b


class Trials:
    """A graph with its answer and its cache file, and files that are not its own."""

    def __init__(self, folder: Path, *, mapped: bool = False, single: bool = False) -> None:
        self.folder = folder / "cache"
        self.folder.mkdir(mode=0o700, parents=True)
        builder = mixed()
        if mapped:
            builder.save(folder / "model.xnn")
            self.graph: Graph = load(folder / "model.xnn")
        else:
            self.graph = builder.graph()
        rng = np.random.default_rng(1)
        self.x = rng.standard_normal(self.graph.inputs[0].shape).astype(F)
        self.want = self.answer(self.graph, None)[0]
        self.where = self.folder / "weights.xnnw" if single else self.folder
        # Its own file, and its name.
        self.own = self.made(self.graph)
        self.path = self.left
        self.front = self.parsed(self.own)
        outcome = self.answer(self.graph, self.where)
        assert outcome == (self.want, "saved"), outcome
        outcome = self.answer(self.graph, self.where)
        assert outcome == (self.want, "hit"), outcome
        # The others' files: other bytes in the same structure, another structure, other flags, another machine.
        self.foreign = {
            "other weights": self.made(mixed(1).graph()),
            "other structure": self.made(mixed(0, 32).graph()),
            "other flags": self.made(self.graph, low_memory=True),
            "other instruction sets": self.made_elsewhere(2, ("avx2",)),
            "other processor": self.made_elsewhere(3, (4711,)),
            "other build": self.made_elsewhere(0, "another"),
            "other version": self.patched(8, struct.pack("<I", cache.FORMAT + 1)),
        }

    def answer(self, graph: Graph, where: Any, **options: Any) -> tuple[list[bytes], str]:
        with Runtime(graph, weights_cache=where, **options) as runtime:
            return [y.tobytes() for y in runtime.run(self.x)], runtime.weights_cache

    def made(self, graph: Graph, **options: Any) -> bytes:
        """The bytes of the file that a graph leaves."""
        shutil.rmtree(self.folder)
        self.folder.mkdir(mode=0o700)
        outcome = self.answer(graph, self.where, **options)[1]
        assert outcome == "saved", outcome
        (self.left,) = self.folder.glob("*.xnnw")
        data = self.left.read_bytes()
        self.left.unlink()
        return data

    def made_elsewhere(self, place: int, what: Any) -> bytes:
        """The file that this graph would leave on another machine, or with another build."""
        before = cache.build()
        changed = list(before)
        changed[place] = what
        cache._build = tuple(changed)
        graph = mixed().graph()
        try:
            return self.made(graph)
        finally:
            cache._build = before

    def parsed(self, data: bytes) -> cache.Front:
        front = cache.parse(memoryview(data))
        assert front is not None
        return front

    # ---- files made of the own one

    def patched(self, offset: int, value: bytes) -> bytes:
        """With other bytes in the header, under a right digest."""
        data = bytearray(self.own)
        data[offset : offset + len(value)] = value
        return resealed(data)

    def rebuilt(self, order: list[int], edit: Callable[[int, list[Any]], None] | None = None, *,
                data: list[int] | None = None, honest: bool = True) -> bytes:
        """A whole file of the entries in another order, or with other fields, or with one another's bytes.

        ``honest`` gives each entry the checksum of what it has now; otherwise it keeps the one it had. All
        other digests are right in any case.
        """
        front = self.front
        both = front.structure + front.content
        fields = list(cache.HEADER.unpack_from(self.own))
        table, blob = fields[5], cache.align(fields[5] + cache.RECORD.size * len(order), cache.PAGE)
        out = bytearray(self.own[:table]).ljust(blob, b"\0")
        offset = blob
        for place, number in enumerate(order):
            entry = front.entries[number]
            source = front.entries[data[place] if data is not None else number]
            packed = self.own[source.offset : source.offset + source.size]
            values: list[Any] = [*entry]
            values[4], values[5] = offset, len(packed)
            if edit is not None:
                edit(place, values)
            size = max(0, min(values[5], 1 << 20))
            end = cache.align(offset + size + cache.SLACK, cache.ALIGNMENT)
            body = packed[:size].ljust(end - offset, b"\0")
            record = cache.ENTRY.pack(*values)
            checksum = front.checksums[number]
            if honest:
                digest = cache.entry_digest(both, place, record)
                digest.update(body)
                checksum = digest.digest()
            at = table + place * cache.RECORD.size
            out[at : at + cache.RECORD.size] = record + checksum
            out += body
            offset = end
        fields[2], fields[6], fields[7] = len(order), blob, offset
        fields[10] = hashlib.sha256(out[cache.HEADER_SIZE : blob]).digest()
        out[: cache.HEADER.size] = cache.HEADER.pack(*fields)
        return resealed(out)

    # ---- mutations

    def mutation(self, rng: np.random.Generator) -> tuple[str, bytes]:
        name = KINDS[rng.integers(len(KINDS))]
        return name, getattr(self, name)(rng)

    def flip(self, rng: np.random.Generator, low: int = 0, high: int | None = None) -> bytes:
        data = bytearray(self.own)
        for _ in range(rng.integers(1, 5)):
            data[rng.integers(low, high or len(data))] ^= 1 << rng.integers(8)
        return bytes(data)

    def flip_header(self, rng: np.random.Generator) -> bytes:
        return self.flip(rng, 0, cache.HEADER_SIZE)

    def flip_front(self, rng: np.random.Generator) -> bytes:
        return self.flip(rng, cache.HEADER_SIZE, self.front.entries[0].offset)

    def flip_packed(self, rng: np.random.Generator) -> bytes:
        return self.flip(rng, self.front.entries[0].offset)

    def truncate(self, rng: np.random.Generator) -> bytes:
        return self.own[: rng.integers(len(self.own))]

    def extend(self, rng: np.random.Generator) -> bytes:
        return self.own + rng.bytes(rng.integers(1, 9000))

    def zero(self, rng: np.random.Generator) -> bytes:
        start, stop = sorted(rng.integers(0, len(self.own) + 1, 2))
        return self.own[:start] + bytes(stop - start) + self.own[stop:]

    def noise(self, rng: np.random.Generator) -> bytes:
        start, stop = sorted(rng.integers(0, len(self.own) + 1, 2))
        return self.own[:start] + rng.bytes(stop - start) + self.own[stop:]

    def repeat(self, rng: np.random.Generator) -> bytes:
        """A range copied over another: pages written to the wrong place."""
        size = int(rng.integers(1, 9000))
        source, target = rng.integers(0, max(1, len(self.own) - size), 2)
        data = bytearray(self.own)
        data[target : target + size] = data[source : source + size]
        return bytes(data)

    def garbage(self, rng: np.random.Generator) -> bytes:
        return (cache.MAGIC if rng.integers(2) else b"") + rng.bytes(rng.integers(0, 40000))

    def header_field(self, rng: np.random.Generator) -> bytes:
        """Another number in the header, under a right digest."""
        offset = int(rng.integers(8, cache.HEADER.size))
        size = int(rng.integers(1, 9))
        return self.patched(offset, rng.bytes(size)[: cache.HEADER.size - offset])

    def header_zeros(self, rng: np.random.Generator) -> bytes:
        return self.patched(int(rng.integers(cache.HEADER.size, HEADER_END)), bytes([rng.integers(1, 256)]))

    def swap_records(self, rng: np.random.Generator) -> bytes:
        """Two entries' records have changed places, and all digests but the entries' own were made anew."""
        return self.rebuilt(self.swapped(rng), honest=False)

    def swap_data(self, rng: np.random.Generator) -> bytes:
        """Two entries' bytes have changed places, and all digests but the entries' own were made anew."""
        return self.rebuilt(list(range(len(self.front.entries))), data=self.swapped(rng), honest=False)

    def swap_whole(self, rng: np.random.Generator) -> bytes:
        """A file that is right in itself, with entries in another order."""
        return self.rebuilt(self.swapped(rng))

    def drop(self, rng: np.random.Generator) -> bytes:
        order = list(range(len(self.front.entries)))
        del order[rng.integers(len(order))]
        return self.rebuilt(order)

    def double(self, rng: np.random.Generator) -> bytes:
        order = list(range(len(self.front.entries)))
        order.insert(int(rng.integers(len(order))), int(rng.integers(len(order))))
        return self.rebuilt(order)

    def other_bytes(self, rng: np.random.Generator) -> bytes:
        """The bytes of an entry stand in several; all digests but the entries' own were made anew."""
        count = len(self.front.entries)
        return self.rebuilt(list(range(count)), data=[int(rng.integers(count)) for _ in range(count)], honest=False)

    def record_field(self, rng: np.random.Generator) -> bytes:
        """Another number in an entry, all digests made anew but those of entries, or those too."""
        victim, field = int(rng.integers(len(self.front.entries))), int(rng.integers(7))
        honest = bool(rng.integers(2))

        def edit(place: int, values: list[Any]) -> None:
            if place == victim:
                values[field] = changed(rng, field, values[field])

        return self.rebuilt(list(range(len(self.front.entries))), edit, honest=honest)

    def foreign_file(self, rng: np.random.Generator) -> bytes:
        return self.foreign[list(self.foreign)[rng.integers(len(self.foreign))]]

    def foreign_disguised(self, rng: np.random.Generator) -> bytes:
        """Another one's file whose header claims to be ours, under right digests of header and front."""
        data = bytearray(self.foreign_file(rng))
        data[: cache.HEADER.size] = cache.HEADER.pack(
            *cache.HEADER.unpack_from(self.own)[:2], *cache.HEADER.unpack_from(data)[2:8], self.front.structure,
            self.front.content, cache.HEADER.unpack_from(data)[10],
        )  # fmt: skip
        return resealed(data)

    def swapped(self, rng: np.random.Generator) -> list[int]:
        order = list(range(len(self.front.entries)))
        i, j = rng.choice(len(order), 2, replace=False)
        order[i], order[j] = order[j], order[i]
        return order

    # ---- one trial

    def trial(self, data: bytes, rng: np.random.Generator) -> str:
        """Run with these bytes as the cache file; what became of the cache."""
        if rng.integers(2):
            # In place, as a failing disk or a careless program would.
            with open(self.path, "r+b" if self.path.exists() else "wb") as file:
                file.truncate(len(data))
                file.write(data)
        else:
            fresh = self.path.with_suffix(".new")
            fresh.write_bytes(data)
            os.replace(fresh, self.path)
        os.chmod(self.path, 0o600)
        got, outcome = self.answer(self.graph, self.where)
        assert got == self.want, "a wrong result"
        return outcome


KINDS = (
    "flip", "flip_header", "flip_front", "flip_packed", "truncate", "extend", "zero", "noise", "repeat", "garbage",
    "header_field", "header_zeros", "swap_records", "swap_data", "swap_whole", "drop", "double", "other_bytes",
    "record_field", "foreign_file", "foreign_disguised",
)  # fmt: skip


def resealed(data: bytearray) -> bytes:
    """With the digest of the header that there is now."""
    data[HEADER_END : cache.HEADER_SIZE] = hashlib.sha256(data[:HEADER_END]).digest()
    return bytes(data)


def changed(rng: np.random.Generator, field: int, value: Any) -> Any:
    """Another value for a field of an entry."""
    if field == 6:
        return rng.bytes(16)
    bits = 32 if field < 2 else 64
    flipped, near = value ^ (1 << int(rng.integers(bits - 1))), value + int(rng.integers(-3, 4))
    new = (flipped, near, int(rng.integers(0, 64)), 2 ** (bits - 1) - 1)[rng.integers(4)]
    lowest = -(2**63) if field in (2, 3) else 0
    return max(lowest, min(new, 2 ** (63 if field in (2, 3) else bits) - 1))


def run(trials: Trials, count: int, rng: np.random.Generator, note: Path | None = None) -> Outcomes:
    """That many trials; how often each kind had each outcome."""
    outcomes: Outcomes = collections.Counter()
    for number in range(count):
        name, data = trials.mutation(rng)
        if note is not None:
            note.write_text(f"trial {number}: {name}\n")
        try:
            outcome = trials.trial(data, rng)
        except BaseException:
            print(f"trial {number}: {name}, file kept as {trials.path}.bad", file=sys.stderr)
            Path(f"{trials.path}.bad").write_bytes(data)
            raise
        # A field may have changed to itself, or zeros to zeros.
        assert outcome == "saved" or data == trials.own, (number, name, outcome)
        outcomes[name, outcome] += 1
        if number % 10 == 0:
            assert trials.answer(trials.graph, trials.where) == (trials.want, "hit"), (number, name)
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    start = time.perf_counter()
    folder = Path(tempfile.mkdtemp(prefix="hostile-cache-", dir=options.folder))
    total: Outcomes = collections.Counter()
    settings = [(mapped, single) for mapped in (False, True) for single in (False, True)]
    for place, (mapped, single) in enumerate(settings):
        trials = Trials(folder / f"{place}", mapped=mapped, single=single)
        share = options.count // len(settings) + (place < options.count % len(settings))
        total += run(trials, share, rng, folder / "last")
    shutil.rmtree(folder)
    for (name, outcome), number in sorted(total.items()):
        print(f"{name:20s} {outcome:10s} {number:6d}")
    print(json.dumps({
        "mutations": sum(total.values()), "seed": options.seed, "wrong_results": 0, "crashes": 0,
        "seconds": round(time.perf_counter() - start, 1),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
