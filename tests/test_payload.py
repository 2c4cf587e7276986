"""Payload: what it holds, for how long, and what it knows about the bytes behind it."""

from __future__ import annotations

import gc
import mmap
import os
import pathlib
import pickle
import weakref

import numpy as np
import pytest

from xnnfast._payload import Payload, padded_copy
from xnnfast.errors import ArgumentError, FormatError, XnnfastError

PAGE = os.sysconf("SC_PAGESIZE")


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    made = tmp_path / "file.bin"
    made.write_bytes(bytes(range(256)) * 40)
    return made


# ---- opening


@pytest.mark.parametrize("form", [str, lambda path: path, os.fspath])
def test_open_maps_a_path(path, form):
    payload = Payload.open(form(path))
    assert payload.mapped and not payload.writable
    assert payload.nbytes == len(payload) == 10240
    assert payload.name == str(path)
    assert payload.address % PAGE == 0
    assert bytes(payload) == path.read_bytes()


def test_open_keeps_no_file_open(path):
    before = len(os.listdir("/proc/self/fd"))
    payload = Payload.open(path)
    assert len(os.listdir("/proc/self/fd")) == before
    path.unlink()
    assert bytes(payload)[:3] == b"\0\1\2"


@pytest.mark.parametrize(
    "make",
    [
        lambda: bytes(100),
        lambda: bytearray(100),
        lambda: memoryview(bytes(100)),
        lambda: np.zeros(25, np.float32),
        lambda: np.zeros((5, 5), np.float32),
    ],
)
def test_open_holds_a_buffer_in_place(make):
    source = make()
    payload = Payload.open(source)
    assert not payload.mapped
    assert payload.nbytes == 100
    assert payload.address == np.frombuffer(source, np.uint8).ctypes.data
    assert "of 100 bytes" in payload.name


def test_open_returns_a_payload_as_it_is():
    payload = Payload.open(bytes(8))
    assert Payload.open(payload) is payload


@pytest.mark.parametrize("source", [3, None, [1, 2], object()])
def test_open_refuses_what_is_neither_path_nor_buffer(source):
    with pytest.raises(ArgumentError, match="need a path or an object with the buffer protocol"):
        Payload.open(source)


def test_open_refuses_what_is_not_a_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        Payload.open(tmp_path / "none")
    with pytest.raises(IsADirectoryError):
        Payload.open(tmp_path)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    # It must not wait for a writer.
    with pytest.raises(FormatError, match="need a regular file"):
        Payload.open(fifo)
    with pytest.raises(FormatError, match="need a regular file"):
        Payload.open("/dev/null")


def test_open_refuses_the_empty(tmp_path):
    empty = tmp_path / "empty"
    empty.touch()
    for source in (empty, b"", np.zeros(0)):
        with pytest.raises(FormatError, match="empty"):
            Payload.open(source)


@pytest.mark.parametrize("source", [np.zeros((4, 4))[:, ::2], np.zeros((4, 4)).T[1:], memoryview(bytes(10))[::2]])
def test_open_refuses_strided_buffers(source):
    with pytest.raises(FormatError, match="contiguous"):
        Payload.open(source)


def test_constructor_names_the_factory():
    with pytest.raises(TypeError, match=r"Payload.open"):
        Payload()


def test_a_payload_of_bytes_is_pickled_with_them():
    assert bytes(pickle.loads(pickle.dumps(Payload.open(b"12345678")))) == b"12345678"


# ---- who may write


def _readonly_view_of_writable():
    array = np.zeros(8)
    view = array[1:]
    view.flags.writeable = False
    return view


@pytest.mark.parametrize(
    ("make", "writable"),
    [
        (lambda: bytes(8), False),
        (lambda: memoryview(bytes(8)), False),
        (lambda: np.frombuffer(bytes(8), np.uint8), False),
        (lambda: bytearray(8), True),
        (lambda: memoryview(bytearray(8)).toreadonly(), True),
        (lambda: memoryview(memoryview(bytearray(8)).toreadonly())[2:], True),
        (lambda: np.zeros(8), True),
        (_readonly_view_of_writable, True),
    ],
)
def test_writable_sees_through_views(make, writable):
    assert Payload.open(make()).writable is writable


def test_writable_of_maps(path):
    with open(path, "r+b") as file:
        assert not Payload.open(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)).writable
        assert Payload.open(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_WRITE)).writable
    assert not Payload.open(np.memmap(path, mode="r")).writable
    assert Payload.open(np.memmap(path, mode="r+")).writable
    assert Payload.open(np.memmap(path, mode="c")).writable


def test_source_can_not_be_resized_while_held():
    source = bytearray(100)
    payload = Payload.open(source)
    with pytest.raises(BufferError):
        source.append(0)
    del payload
    source.append(0)


# ---- buffer protocol and lifetime


def test_views_share_memory_and_are_read_only(path):
    payload = Payload.open(path)
    view = memoryview(payload)[100:200]
    assert view.readonly and view.format == "B"
    array = np.frombuffer(payload, np.uint8)
    assert array.ctypes.data == payload.address
    assert not array.flags.writeable
    assert np.frombuffer(view, np.uint8).ctypes.data == payload.address + 100
    with pytest.raises(ValueError, match="WRITEABLE"):
        array.setflags(write=True)
    with pytest.raises(TypeError, match="read-only"):
        view[0] = 1


def _mapped(path: pathlib.Path) -> bool:
    return str(path) in pathlib.Path("/proc/self/maps").read_text()


def test_map_lives_as_long_as_its_views(path):
    view = memoryview(Payload.open(path))[5:10]
    gc.collect()
    assert _mapped(path)
    assert bytes(view) == bytes(range(5, 10))
    array = np.frombuffer(view, np.uint8)
    del view
    assert _mapped(path) and array[0] == 5
    del array
    assert not _mapped(path)


def test_cycle_through_the_source_is_collected():
    class Source(np.ndarray):
        pass

    source = np.zeros(100, np.uint8).view(Source)
    alive = weakref.ref(source)
    payload = Payload.open(source)
    source.cycle = payload
    del source, payload
    gc.collect()
    assert alive() is None


# ---- the bytes behind


def test_tail_readable_ends_with_the_last_page(tmp_path):
    for size, readable in (
        (PAGE, False),
        (PAGE - 15, False),
        (PAGE - 16, True),
        (PAGE + 1, True),
        (2 * PAGE - 1, False),
    ):
        file = tmp_path / str(size)
        file.write_bytes(bytes(size))
        payload = Payload.open(file)
        assert payload.tail_readable(size) is readable
        # Inside the file a page end is followed by another page.
        assert payload.tail_readable(size - 16)


def test_tail_readable_of_a_buffer_goes_by_its_page():
    array = np.zeros(4 * 4096, np.uint8)
    start = -array.ctypes.data % 4096
    page = array[start : start + 4096]
    assert not Payload.open(page).tail_readable(4096)
    assert not Payload.open(page[:-15]).tail_readable(4096 - 15)
    assert Payload.open(page[:-16]).tail_readable(4096 - 16)
    # The tempting test "end % 4096 + 16 <= 4096" would call this readable.
    assert Payload.open(array[start : start + 4097]).tail_readable(4096) is False
    assert Payload.open(array[start : start + 4112]).tail_readable(4096)


def test_tail_readable_refuses_offsets_outside():
    payload = Payload.open(bytes(10))
    for end in (-1, 11):
        with pytest.raises(XnnfastError):
            payload.tail_readable(end)


def _resident(address: int) -> int:
    """Resident kB of the mapping at an address."""
    found = False
    for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            low, high = (int(part, 16) for part in first.split("-"))
            found = low <= address < high
        elif found and first == "Rss:":
            return int(line.split()[1])
    return 0


def test_release_gives_whole_pages_back(tmp_path):
    file = tmp_path / "big"
    file.write_bytes(b"\7" * (64 * PAGE))
    payload = Payload.open(file)
    assert np.frombuffer(payload, np.uint8).sum() == 7 * 64 * PAGE
    before = _resident(payload.address)
    # Whole pages strictly inside: pages 1 to 62.
    assert payload.release(1, 64 * PAGE - 1) == 62 * PAGE
    assert _resident(payload.address) <= before - 60 * PAGE // 1024
    assert payload.release(10, PAGE + 20) == 0
    assert np.frombuffer(payload, np.uint8).sum() == 7 * 64 * PAGE


def test_release_leaves_foreign_memory_alone():
    source = np.full(8 * PAGE, 7, np.uint8)
    payload = Payload.open(source)
    assert payload.release(0, payload.nbytes) == 0
    assert source.min() == 7
    with pytest.raises(ArgumentError):
        payload.release(5, 4)
    with pytest.raises(ArgumentError):
        payload.release(0, payload.nbytes + 1)


def test_a_view_in_a_cycle_with_its_payload_can_be_collected():
    # A memoryview that exports a buffer crashed the collector: the payload holds what is behind it.
    for _ in range(20):
        view = memoryview(bytearray(b"0123456789"))
        cycle = [view, Payload.open(view)]
        cycle.append(cycle)
        del view, cycle
        gc.collect()
    source = bytearray(b"0123456789")
    view = memoryview(source)
    payload = Payload.open(view[2:6])
    view.release()
    assert bytes(payload) == b"2345"
    with pytest.raises(BufferError):
        source.append(0)


# ---- copies


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 1 << 20, (1 << 20) + 3])
def test_padded_copy_is_aligned_and_padded(size):
    import ctypes

    source = (np.arange(size) % 251).astype(np.uint8)
    made = padded_copy(source)
    assert made.nbytes == len(made) == size
    assert made.address % 64 == 0
    assert bytes(made) == source.tobytes()
    assert memoryview(made).readonly
    assert ctypes.string_at(made.address + size, 64) == bytes(64)


def test_padded_copy_refuses_strided_buffers():
    with pytest.raises(ArgumentError, match="contiguous"):
        padded_copy(np.zeros(10)[::2])
