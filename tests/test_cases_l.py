"""Faults that others had, class L: malformed files. Every cut and every word: tests/test_hostile.py, fuzz/."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import files
import numpy as np
import pytest

from xnnfast import FormatError, LimitError, Runtime, XnnfastError, load, load_all

X = np.arange(8, dtype=np.float32).reshape(1, 8)


def ran(source):
    return Runtime(load(source)).run(X)[0]


def wrapped(identifier):
    return files.xh00(files.bare(identifier=identifier))


# ---- L1


@pytest.mark.parametrize("make", [files.bare, lambda identifier: wrapped(identifier)], ids=["bare", "XH00"])
@pytest.mark.parametrize("identifier", [b"XN00", b"XN01"])
def test_L1_both_identifiers_load(make, identifier):
    data = files.bare(identifier=identifier) if make is files.bare else files.inline()
    np.testing.assert_array_equal(ran(data), X + files.ONES)


@pytest.mark.parametrize("identifier", [b"XN02", b"XN10", b"xn01", b"XNXX", b"ABCD"])
def test_L1_other_identifiers_are_refused_by_name(identifier):
    for data in (files.bare(identifier=identifier), wrapped(identifier)):
        with pytest.raises(FormatError, match=identifier.decode()):
            load(data)


def test_L1_every_cut_and_every_word_of_a_file_of_each_kind():
    """In this process; whole corpora in children are for fuzz/corpus_campaign.py."""
    for make in (files.bare, files.seed, files.inline, lambda: files.program(alignment=16)):
        good = make()
        changed = [good[:size] for size in range(len(good))]
        for at in range(0, len(good) - 3, 4):
            changed += [
                good[:at] + word.to_bytes(4, "little") + good[at + 4 :] for word in (0, 1, 0x7FFFFFFF, 0xFFFFFFFF)
            ]
        for data in changed:
            try:
                graphs = load_all(data)
            except XnnfastError:
                continue
            for graph in graphs:
                try:
                    Runtime(graph).run(*[np.zeros(value.shape, value.dtype) for value in graph.inputs])
                except XnnfastError:
                    continue
        np.testing.assert_array_equal(ran(good), X + files.ONES)


# ---- L3


def dims(**changes):
    first = {**files.plain(0, external=0, flags=1), **changes}
    table = {name: value for name, value in first.items() if value is not None}
    return files.bare(
        files.tree(xvalues=files.values(table, files.plain(1, constant=1), files.plain(2, external=1, flags=2)))
    )


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"num_dims": 4}, "found 4 and 2"),
        ({"num_dims": 1}, "found 1 and 2"),
        ({"num_dims": 0}, "found 0 and 2"),
        ({"num_dims": 0xFFFFFFFF}, "found 4294967295 and 2"),
        ({"dims": None}, "found 2 and no dims"),
        ({"dims": []}, "found 2 and 0"),
        ({"dims": [1, 8, 1]}, "found 2 and 3"),
    ],
)
def test_L3_num_dims_and_dims_disagree(changes, found):
    with pytest.raises(FormatError, match=rf"num_dims equal to the length of dims, {found}.*xvalues\[0\]"):
        load(dims(**changes))


def test_L3_dims_that_agree_load():
    np.testing.assert_array_equal(ran(dims()), X + files.ONES)


def test_L3_vectors_of_nodes_are_held_to_num_dims_too():
    def transposed(num_dims, perm):
        node = files.node("XNNStaticTranspose", input_id=0, output_id=1, flags=0, num_dims=num_dims, perm=perm)
        values = files.values(files.plain(0, external=0, flags=1), files.plain(1, external=1, flags=2, dims=(8, 1)))
        return files.bare(files.tree(xnodes=[node], xvalues=values, constant_buffer=None, mem_buffer_sizes=None))

    np.testing.assert_array_equal(ran(transposed(2, [1, 0])), X.T)
    for num_dims, perm in ((4, [1, 0]), (2, [1]), (2, None), (0, [1, 0]), (2, [1, 0, 2])):
        with pytest.raises(FormatError, match="perm"):
            load(transposed(num_dims, perm))


# ---- L5


HUGE = {
    "num_externs": (lambda: files.bare(files.tree(num_externs=4_000_000_000)), LimitError),
    "num_externs below the cap": (lambda: files.bare(files.tree(num_externs=4000)), FormatError),
    "no xvalues": (lambda: files.bare(files.tree(xvalues=None)), FormatError),
    "no xnodes": (lambda: files.bare(files.tree(xnodes=None)), FormatError),
    "empty xvalues": (lambda: files.bare(files.tree(xvalues=[])), FormatError),
    "a value without a table": (
        lambda: files.bare(files.tree(xvalues=[*files.tree()["xvalues"], {}])),
        FormatError,
    ),
    "a node without a table": (lambda: files.bare(files.tree(xnodes=[{}])), FormatError),
    "a null element": (lambda: null_element(), FormatError),
    "a huge count": (lambda: huge_count(), FormatError),
}


def vector(data, slot):
    """Offset of the vector in a slot of the root."""
    import struct

    (root,) = struct.unpack_from("<I", data)
    vtable = root - struct.unpack_from("<i", data, root)[0]
    field = root + struct.unpack_from("<H", data, vtable + 4 + 2 * slot)[0]
    return field + struct.unpack_from("<I", data, field)[0]


def null_element():
    data = bytearray(files.bare())
    # Slot 2 is xvalues.
    at = vector(data, 2)
    data[at + 4 : at + 8] = bytes(4)
    return bytes(data)


def huge_count():
    data = bytearray(files.bare())
    at = vector(data, 2)
    data[at : at + 4] = b"\xff\xff\xff\x7f"
    return bytes(data)


@pytest.mark.parametrize("what", HUGE)
def test_L5_refused_in_no_time_and_no_memory(what, tmp_path):
    make, kind = HUGE[what]
    path = tmp_path / "file"
    path.write_bytes(make())
    script = """
        import resource, sys, time
        from xnnfast import XnnfastError, load

        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

        begin, before = time.thread_time(), peak()
        try:
            load(sys.argv[1])
        except XnnfastError as error:
            print(type(error).__name__, time.thread_time() - begin, peak() - before)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(path)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    name, seconds, grown = done.stdout.split()
    assert name == kind.__name__
    assert float(seconds) < 1 and int(grown) < 50 << 10


# ---- L9


@pytest.mark.parametrize("make", [files.bare, files.seed, files.inline, files.program], ids=lambda make: make.__name__)
@pytest.mark.parametrize("shift", [1, 2, 4, 8, 15])
def test_L9_bytes_at_any_address(make, shift):
    data = make()
    for source in (memoryview(bytes(shift) + data)[shift:], memoryview(bytearray(bytes(shift) + data))[shift:]):
        np.testing.assert_array_equal(ran(source), X + files.ONES)


@pytest.mark.parametrize("shift", [1, 2, 4, 12])
def test_L9_constants_at_any_offset(shift):
    area = bytes(shift) + files.ONES.tobytes() + bytes(16)
    graph = load(files.inline(area, offset=shift))
    assert not graph.constants[0].in_place
    np.testing.assert_array_equal(Runtime(graph).run(X)[0], X + files.ONES)
