"""Packed weights on disk: written once, mapped by every later process that runs the same graph.

XNNPACK copies and reorders every filter when a runtime is created. A cache file holds the result of that
for one graph, one set of runtime flags, one build of XNNPACK and one choice of instruction sets. Whatever
does not fit exactly means that weights are packed afresh; nothing read from a file is believed before
it has been checked.

What a file's name and header stand for:

* *structure*: a digest of the lowered graph with all quantization, flags, the vendored build, instruction
  sets, package version and format. Computed at every use.
* *content*: a digest of the bytes of every constant. Reading 100 MB for it would cost as much as packing, so
  it is remembered for a model file under the file's device, inode, size and both times, if those times were
  already old when the bytes were read: a later change of the file then shows in its change time.

The same reasoning spares the checksum over a cache file that was verified before: its *seal* holds what
the file's own inode and times were. Any writing to either file breaks the seal.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import marshal
import os
import stat
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ._graph import address_of
from ._payload import Payload
from .errors import ArgumentError, FormatError, UnsupportedError

ENV_FOLDER = "XNNFAST_CACHE_DIR"
ENV_LIMIT = "XNNFAST_CACHE_LIMIT"
#: Bytes that the files of a cache folder may take; the least recently used ones go first.
DEFAULT_LIMIT = 8 << 30
SUFFIX = ".xnnw"
SEAL = ".seal"

MAGIC = b"XNNFASTW"
FORMAT = 1
#: magic, format, entries, table offset, blob offset, file size, then digests: structure, content, table, blob.
HEADER = struct.Struct("<8sIIQQQ32s32s32s32s")
#: The header's own digest follows it.
HEADER_SIZE = 256
#: seed, looked up, ordinals of kernel and bias among the graph's constants (-1: none), offset, size.
ENTRY = struct.Struct("<IIqqQQ")
#: XNNPACK wants 64; 128 keeps entries off one another's prefetched lines.
ALIGNMENT = 128
#: Readable bytes that must follow an entry's last.
SLACK = 64
PAGE = 4096
#: Times that are younger than this when a file is read may not show a change that follows at once.
SETTLED_NS = 2_000_000_000
#: More entries than any graph has nodes; a header that claims more is damaged.
MAX_ENTRIES = 1 << 20


class Entry(NamedTuple):
    """One packed weight: XNNPACK's key with ordinals of constants in place of addresses, and where it is."""

    seed: int
    looked_up: bool
    kernel: int
    bias: int
    offset: int
    size: int


class WeightsCache:
    """Where packed weights are kept: a folder, or one file.

    Parameters
    ----------
    where : True, str or os.PathLike
        True is the user's cache folder (``XNNFAST_CACHE_DIR``, else that of platformdirs); a path that is a
        folder, ends in a separator or has no suffix is a folder; any other is the one file to use.

    Raises
    ------
    UnsupportedError
        ``True`` without platformdirs and without ``XNNFAST_CACHE_DIR``.
    """

    def __init__(self, where: bool | str | os.PathLike[str] = True) -> None:
        self.file: Path | None = None
        if where is True:
            self.folder = default_folder()
            return
        if isinstance(where, bool) or not isinstance(where, (str, os.PathLike)):
            raise ArgumentError(f"weights_cache: need True, a folder or a file, got {type(where).__name__}")
        text = os.fspath(where)
        path = Path(text)
        if path.is_dir() or text.endswith(os.sep) or not path.suffix:
            self.folder = path
        else:
            self.folder, self.file = path.parent, path

    def path(self, structure: bytes, content: bytes) -> Path:
        """The file for a graph."""
        if self.file is not None:
            return self.file
        return self.folder / f"{hashlib.sha256(structure + content).hexdigest()[:40]}{SUFFIX}"

    # -- use -------------------------------------------------------------------------------------------

    def identify(self, lowered: Any, flags: int) -> tuple[bytes, bytes, list[int]]:
        """(structure, content, addresses of the constants by ordinal) of what a runtime would pack."""
        constants = [value for value in lowered.values.values() if value.constant is not None]
        structure = structure_digest(lowered, constants, flags)
        return structure, self._content(constants, structure), [address_of(v.constant.data) for v in constants]

    def open(self, lowered: Any, flags: int) -> tuple[Payload, list[Entry], list[int]] | None:
        """The mapped file, its entries and the constants' addresses; None when there is no usable file."""
        structure, content, addresses = self.identify(lowered, flags)
        path = self.path(structure, content)
        opened = open_checked(path, structure, content, len(addresses))
        if opened is None:
            return None
        payload, entries = opened
        self._touch(path)
        return payload, entries, addresses

    def save(self, lowered: Any, flags: int, packed: list[tuple[int, bool, int, int, memoryview]]) -> str | None:
        """Write what was packed; None if it was written, else why not. Never raises for the disk's sake."""
        structure, content, addresses = self.identify(lowered, flags)
        ordinals: dict[int, int] = {}
        for ordinal, address in enumerate(addresses):
            ordinals.setdefault(address, ordinal)
        entries = []
        for seed, looked_up, kernel, bias, data in packed:
            places = [-1 if pointer == 0 else ordinals.get(pointer, -2) for pointer in (kernel, bias)]
            if -2 in places:
                return "XNNPACK packed weights that it had converted first"
            entries.append((seed, looked_up, places[0], places[1], data))
        if not entries:
            return "nothing was packed"
        try:
            make_folder(self.folder)
            write_file(self.path(structure, content), structure, content, entries)
            if self.file is None:
                evict(self.folder, limit())
        except OSError as error:
            return f"{error.strerror or error}: {error.filename or self.folder}"
        return None

    def _touch(self, path: Path) -> None:
        # The time of last use lives on the seal: a new time on the file itself would break the seal.
        with contextlib.suppress(OSError):
            seal = seal_path(path)
            if time.time() - seal.stat().st_mtime > 60:
                os.utime(seal)

    # -- content ---------------------------------------------------------------------------------------

    def _content(self, constants: list[Any], structure: bytes) -> bytes:
        owners: dict[int, Payload] = {}
        digest = hashlib.sha256()
        stable = True
        for value in constants:
            owner = value.constant.owner
            if owner is None:
                # Made by lowering: small, and not in any file.
                digest.update(value.constant.data)
            elif unchanged(owner):
                owners[id(owner)] = owner
            else:
                stable = False
        if not stable or not owners:
            return content_digest(constants)
        for owner in owners.values():
            digest.update(repr(owner.identity).encode())
        digest.update(structure)
        known = self.folder / "known" / digest.hexdigest()[:40]
        found = read_small(known, 64)
        if found is not None:
            with contextlib.suppress(ValueError):
                return bytes.fromhex(found.decode("ascii", "replace"))
        content = content_digest(constants)
        now = time.time_ns()
        settled = all(max(owner.identity[3:]) + SETTLED_NS < now and unchanged(owner) for owner in owners.values())
        if settled:
            with contextlib.suppress(OSError):
                make_folder(known.parent)
                write_small(known, content.hex().encode())
        return content


# ---- identity


def structure_digest(lowered: Any, constants: list[Any], flags: int) -> bytes:
    """Digest of everything but the constants' bytes that packing depends on."""
    from ._generated.build_info import INFO
    from ._runtime import isa
    from .configuration import __version__

    ordinal = {value.id: place for place, value in enumerate(constants)}
    digest = hashlib.sha256()
    values = []
    for value in lowered.values.values():
        quantization = value.quantization
        scales = getattr(quantization, "scales", None)
        if scales is not None:
            digest.update(np.ascontiguousarray(scales))
            quantization = (type(quantization).__name__, quantization.axis, getattr(quantization, "block_size", 0), scales.shape)
        elif quantization is not None:
            quantization = (type(quantization).__name__, *quantization)
        values.append((value.id, value.datatype, value.shape, quantization, ordinal.get(value.id)))
    nodes = [
        (node.op.name, node.inputs, node.outputs, sorted(node.attrs.items()), node.flags, node.clamp) for node in lowered.nodes
    ]
    build = (INFO["key"], [archive["sha256"] for archive in INFO["archives"]], isa(), __version__, FORMAT)
    digest.update(marshal.dumps((values, nodes, flags, build, lowered.inputs, lowered.outputs), 2))
    return digest.digest()


def content_digest(constants: list[Any]) -> bytes:
    """Digest of the bytes of all constants, lengths included."""
    digest = hashlib.sha256()
    for value in constants:
        data = value.constant.data[: value.nbytes]
        digest.update(struct.pack("<Q", len(data)))
        digest.update(data)
    return digest.digest()


def unchanged(payload: Payload) -> bool:
    """Whether the payload is a mapped file that is still what it was when it was opened."""
    if payload.identity is None:
        return False
    try:
        return file_identity(os.stat(payload.name)) == payload.identity
    except OSError:
        return False


def file_identity(status: os.stat_result) -> tuple[int, int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


# ---- files


def default_folder() -> Path:
    """The user's cache folder for packed weights."""
    override = os.environ.get(ENV_FOLDER)
    if override:
        return Path(override)
    try:
        import platformdirs
    except ImportError:
        raise UnsupportedError(
            f"weights_cache=True needs the platformdirs package (install xnnfast[cache]), or {ENV_FOLDER}, or a folder in its place"
        ) from None
    return Path(platformdirs.user_cache_dir("xnnfast", appauthor=False)) / "weights"


def limit() -> int:
    """Bytes a cache folder may take: XNNFAST_CACHE_LIMIT, else 8 GiB."""
    text = os.environ.get(ENV_LIMIT)
    if not text:
        return DEFAULT_LIMIT
    if not text.isascii() or not text.isdigit():
        raise ArgumentError(f"{ENV_LIMIT} must be a number of bytes, found {text!r}")
    return int(text)


def make_folder(folder: Path) -> None:
    """The folder, made for its owner alone; PermissionError if others could put files there."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError(1, "need a cache folder that only its owner can write", str(folder))


def own_file(status: os.stat_result) -> bool:
    """A regular file that belongs to this user and that nobody else can write: it is fed to kernels."""
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022


def read_small(path: Path, most: int) -> bytes | None:
    """A small file of our own; None when it is missing, foreign or too large."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        if not own_file(os.fstat(fd)):
            return None
        data = os.read(fd, most + 1)
        return data if len(data) <= most else None
    except OSError:
        return None
    finally:
        os.close(fd)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Any]:
    """A file that appears under its name when it is whole, and not at all otherwise."""
    fd, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def write_small(path: Path, data: bytes) -> None:
    with replacing(path) as file:
        file.write(data)


def seal_path(path: Path) -> Path:
    return path.with_name(path.name + SEAL)


def align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def write_file(path: Path, structure: bytes, content: bytes, entries: list[tuple[int, bool, int, int, memoryview]]) -> None:
    table_offset = HEADER_SIZE
    blob_offset = align(table_offset + ENTRY.size * len(entries), PAGE)
    table = bytearray()
    offset = blob_offset
    for seed, looked_up, kernel, bias, data in entries:
        table += ENTRY.pack(seed, looked_up, kernel, bias, offset, len(data))
        offset = align(offset + len(data) + SLACK, ALIGNMENT)
    size = offset
    with replacing(path) as file:
        # All of it now: a disk that fills up halfway leaves nothing behind.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        blob = hashlib.sha256()
        file.seek(blob_offset)
        for (_, _, _, _, data), place in zip(entries, range(len(entries))):
            start, length = ENTRY.unpack_from(table, place * ENTRY.size)[4:]
            end = align(start + length + SLACK, ALIGNMENT)
            padding = bytes(end - start - length)
            for part in (data, padding):
                file.write(part)
                blob.update(part)
        header = HEADER.pack(
            MAGIC, FORMAT, len(entries), table_offset, blob_offset, size, structure, content,
            hashlib.sha256(table).digest(), blob.digest(),
        )  # fmt: skip
        file.seek(0)
        file.write(header + hashlib.sha256(header).digest())
        file.seek(table_offset)
        file.write(table)


def open_checked(path: Path, structure: bytes, content: bytes, constants: int) -> tuple[Payload, list[Entry]] | None:
    """The file mapped, if it is ours, whole, and for exactly this graph."""
    try:
        status = os.lstat(path)
        if not own_file(status):
            return None
        payload = Payload.open(path)
    except (OSError, FormatError):
        return None
    # The file that was opened, not another one that took its name in between.
    if payload.identity != file_identity(status):
        return None
    entries = parse(payload, constants)
    if entries is None:
        return None
    view = memoryview(payload)
    fields = HEADER.unpack_from(view)
    if fields[6] != structure or fields[7] != content:
        return None
    if not sealed(path, payload):
        if hashlib.sha256(view[fields[4] :]).digest() != fields[9]:
            return None
        seal(path, payload)
    return payload, entries


def parse(payload: Payload, constants: int | None) -> list[Entry] | None:
    """The entries of a cache file, every number checked; None if anything is out of order."""
    view = memoryview(payload)
    if len(view) < HEADER_SIZE:
        return None
    magic, version, count, table_offset, blob_offset, size, _, _, table_sum, _ = HEADER.unpack_from(view)
    header_sum = bytes(view[HEADER.size : HEADER.size + 32])
    if magic != MAGIC or version != FORMAT or hashlib.sha256(view[: HEADER.size]).digest() != header_sum:
        return None
    if size != len(view) or count > MAX_ENTRIES or table_offset != HEADER_SIZE or blob_offset % PAGE:
        return None
    table_end = table_offset + count * ENTRY.size
    if not table_end <= blob_offset <= size:
        return None
    table = view[table_offset:table_end]
    if hashlib.sha256(table).digest() != table_sum:
        return None
    entries = []
    end = blob_offset
    for seed, looked_up, kernel, bias, offset, length in ENTRY.iter_unpack(table):
        if offset % ALIGNMENT or offset < end or length > size or offset + length + SLACK > size or looked_up > 1:
            return None
        if constants is not None and not (0 <= kernel < constants and -1 <= bias < constants):
            return None
        end = offset + length + SLACK
        entries.append(Entry(seed, bool(looked_up), kernel, bias, offset, length))
    return entries


def sealed(path: Path, payload: Payload) -> bool:
    """Whether this very file, unwritten since, was verified before."""
    data = read_small(seal_path(path), 512)
    if data is None:
        return False
    try:
        return tuple(json.loads(data)) == payload.identity
    except (ValueError, TypeError):
        return False


def seal(path: Path, payload: Payload) -> None:
    # A change that follows within the clock's tick would not show: only files at rest are sealed.
    if payload.identity is None or max(payload.identity[3:]) + SETTLED_NS > time.time_ns():
        return
    with contextlib.suppress(OSError):
        write_small(seal_path(path), json.dumps(payload.identity).encode())


# ---- care


class CacheFile(NamedTuple):
    """One file of a cache folder."""

    path: Path
    nbytes: int
    #: Seconds since the epoch.
    last_used: float


def files(folder: Path) -> list[CacheFile]:
    """The cache files of a folder, least recently used first."""
    found = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            if entry.name.endswith(SUFFIX) and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    used = status.st_mtime
                    with contextlib.suppress(OSError):
                        used = max(used, os.stat(entry.path + SEAL).st_mtime)
                    found.append(CacheFile(Path(entry.path), status.st_size, used))
    return sorted(found, key=lambda each: each.last_used)


def remove(file: CacheFile) -> None:
    """Unlink a cache file; processes that have it mapped keep what they have."""
    for path in (file.path, seal_path(file.path)):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def evict(folder: Path, most: int) -> list[CacheFile]:
    """Remove least recently used files until at most that many bytes are left, and leftovers of killed writers."""
    gone = []
    present = files(folder)
    total = sum(file.nbytes for file in present)
    # The newest stays whatever its size: it was just made for someone.
    for file in present[:-1]:
        if total <= most:
            break
        remove(file)
        total -= file.nbytes
        gone.append(file)
    sweep(folder)
    return gone


def sweep(folder: Path, older_than: float = 3600) -> None:
    """Remove temporary files that a killed process left."""
    now = time.time()
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            if entry.name.startswith(".") and SUFFIX in entry.name:
                with contextlib.suppress(OSError):
                    if now - entry.stat(follow_symlinks=False).st_mtime > older_than:
                        os.unlink(entry.path)


def clear(folder: Path) -> list[CacheFile]:
    """Remove every file of the cache."""
    present = files(folder)
    for file in present:
        remove(file)
    sweep(folder, -1)
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder / "known"):
            with contextlib.suppress(OSError):
                os.unlink(entry.path)
    return present


def verify(path: Path) -> str | None:
    """None if the file is whole, else what is wrong with it."""
    try:
        if not own_file(os.lstat(path)):
            return "not a regular file that its owner alone can write"
        payload = Payload.open(path)
    except (OSError, FormatError) as error:
        return str(error)
    if parse(payload, None) is None:
        return "header or table are damaged, or of another format"
    view = memoryview(payload)
    fields = HEADER.unpack_from(view)
    if hashlib.sha256(view[fields[4] :]).digest() != fields[9]:
        return "the packed weights differ from their checksum"
    seal(path, payload)
    return None
