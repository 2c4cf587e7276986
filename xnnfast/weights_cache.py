"""Packed weights on disk: written once, mapped by every later process that runs the same graph.

XNNPACK copies and reorders every filter when a runtime is created. A cache file holds the result of that
for one graph, one set of runtime flags, one build of XNNPACK and one choice of kernels. Whatever does not
fit exactly means that weights are packed afresh; nothing read from a file is believed before it has been
checked.

What a file's name and header stand for:

* *structure*: a digest of the lowered graph with all quantization, flags, the vendored build, instruction
  sets and processor, and format. Computed at every use.
* *content*: a digest of the bytes of every constant that is packed. Reading 100 MB for it would cost as much
  as packing, so it is remembered for a model file under the file's device, inode, size and both times, if
  those times were already old when the bytes were read: a later change of the file then shows in its change
  time.

The same reasoning spares the checksums over a cache file that was verified before: its *seal* holds what
the file's own inode and times were. Any writing to either file breaks the seal.

Entries stand in the order in which XNNPACK asks for packed weights, one for each node that has any. Each
repeats XNNPACK's own key and a fingerprint of its node, and has a checksum that covers all of that, the
graph's identity, its own place and the packed bytes.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import marshal
import os
import stat
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ._graph import address_of
from ._payload import Payload
from .errors import ArgumentError, FormatError, UnsupportedError

ENV_FOLDER = "XNNFAST_CACHE_DIR"
ENV_LIMIT = "XNNFAST_CACHE_LIMIT"
#: Bytes that the files of a cache folder may take; the least recently used ones go first.
DEFAULT_LIMIT = 8 << 30
SUFFIX = ".xnnw"
SEAL = ".seal"
KNOWN = "known"

MAGIC = b"XNNFASTW"
#: Raised with every change of the layout below, or of how the runtime defines values and nodes in XNNPACK.
FORMAT = 1
#: magic, format, entries, bytes of the description, zero, table offset, blob offset, file size, then digests:
#: structure, content, and everything between header and blob.
HEADER = struct.Struct("<8sIIIIQQQ32s32s32s")
#: Its last 32 bytes are the header's own digest.
HEADER_SIZE = 256
#: seed, looked up, ordinals of kernel and bias among the packed constants (-1: no bias in XNNPACK's key, which
#: leaves it out for dynamically quantized inputs), offset, size, fingerprint of the node. A checksum follows.
ENTRY = struct.Struct("<IIqqQQ16s")
RECORD = struct.Struct("<IIqqQQ16s32s")
#: XNNPACK wants 64; 128 keeps entries off one another's prefetched lines.
ALIGNMENT = 128
#: Readable bytes that must follow an entry's last.
SLACK = 64
PAGE = 4096
#: Times that are younger than this when a file is read may not show a change that follows at once.
SETTLED_NS = 2_000_000_000
#: More entries than any graph has nodes; a header that claims more is damaged.
MAX_ENTRIES = 1 << 20
MAX_ABOUT = 1 << 16
#: Operators whose weights XNNPACK packs by way of the cache, once for each node. To depthwise convolutions and
#: products of matrices it does not hand the cache on: each runtime packs its own.
PACKING = frozenset(("fully_connected", "conv2d", "conv_transpose2d"))
#: File systems whose change times can be relied upon: kept by this kernel, and set by no one else.
KEEP_TIMES = frozenset((
    "bcachefs", "btrfs", "erofs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "ramfs", "reiserfs", "rootfs",
    "squashfs", "tmpfs", "xfs", "zfs",
))  # fmt: skip
#: Seconds after which what a killed writer left is removed, and what is remembered of unused model files.
LEFTOVER = 3600.0
FORGET = 90 * 86400.0

Location = str | os.PathLike[str]
Stamp = tuple[int, int, int, int, int]
#: seed, looked up, addresses of kernel and bias, packed bytes: what the runtime hands over, in its order.
Packed = tuple[int, bool, int, int, memoryview]


class Entry(NamedTuple):
    """One packed weight: XNNPACK's key with ordinals of constants in place of addresses, and where it is."""

    seed: int
    looked_up: bool
    kernel: int
    bias: int
    offset: int
    size: int
    fingerprint: bytes


class Expected(NamedTuple):
    """What an entry must be to belong to a node."""

    kernel: int
    bias: int
    fingerprint: bytes
    #: No packing of the filter is smaller.
    at_least: int


class Plan:
    """What of a lowered graph is packed, and everything except the constants' bytes that packing depends on.

    Attributes
    ----------
    structure : bytes
    constants : list of Value
        Those that are packed, in the order of first use; entries refer to them by their place here.
    addresses : list of int
    expected : list of Expected
        One for each node that packs, in running order.
    owners : list of Payload
        Mapped files that constants come from.
    fixed : bool
        Whether all bytes are copies that nobody else can write.
    """

    def __init__(self, lowered: Any, flags: int) -> None:
        from ._runtime import node_texts

        values = lowered.values
        described: dict[int | None, Any] = {number: describe(value) for number, value in values.items()}
        described[None] = None
        texts, packing, constants = node_texts(lowered.nodes, values, described, PACKING)
        self.constants: list[Any] = constants
        self.expected: list[Expected] = []
        for place, kernel, bias in packing:
            filter = constants[kernel]
            # An fp16 layer may have an fp32 filter, which is halved.
            least = filter.nbytes // (2 if filter.datatype == "fp32" else 1)
            self.expected.append(Expected(kernel, bias, hashlib.sha256(texts[place]).digest()[:16], least))
        digest = hashlib.sha256(marshal.dumps((build(), flags, lowered.inputs, lowered.outputs), 2))
        digest.update(b"".join(texts))
        self.structure = digest.digest()
        self.addresses = [address_of(value.constant.data) for value in self.constants]
        owners = {id(value.constant.owner): value.constant.owner for value in self.constants}
        self.owners = [owner for owner in owners.values() if owner is not None and owner.mapped]
        self.fixed = all(value.constant.reason is not None for value in self.constants)
        self.content: bytes | None = None
        self.source: str = lowered.graph.source


class Identity(NamedTuple):
    """What a cache file must be for."""

    plan: Plan
    content: bytes
    #: Whether the constants had to be read for it.
    read: bool


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
    ArgumentError
        Something else was given, or ``XNNFAST_CACHE_LIMIT`` is no number.
    """

    def __init__(self, where: bool | str | os.PathLike[str] = True) -> None:
        self.file: str | None = None
        self.limit = limit()
        self._default = where is True
        if where is True:
            self.folder = default_folder()
            return
        text = os.fspath(where) if isinstance(where, (str, os.PathLike)) else where
        if not isinstance(text, str) or not text or "\0" in text:
            raise ArgumentError(f"weights_cache: need True, a folder or a file, got {where!r}")
        if os.path.isdir(text) or text.endswith(os.sep) or not (os.path.splitext(text)[1] or os.path.isfile(text)):
            self.folder = text
        else:
            self.folder, self.file = os.path.dirname(text) or os.curdir, text

    def __repr__(self) -> str:
        return f"WeightsCache({self.file or self.folder!r})"

    def __reduce__(self) -> tuple[type[WeightsCache], tuple[bool | str]]:
        # The user's own folder is another one for another user.
        if self._default:
            return WeightsCache, (True,)
        if self.file is not None:
            return WeightsCache, (os.path.abspath(self.file),)
        # With a separator at its end it is a folder, whether it is there or not.
        return WeightsCache, (os.path.join(os.path.abspath(self.folder), ""),)

    # -- use -------------------------------------------------------------------------------------------

    def identify(self, lowered: Any, flags: int) -> Identity:
        """What the file for a graph must be.

        Parameters
        ----------
        lowered : Lowered
            A graph as XNNPACK gets it.
        flags : int
            XNNPACK's flags of the runtime.

        Returns
        -------
        Identity
        """
        plan = lowered.plans.get(flags)
        if plan is None:
            plan = lowered.plans[flags] = Plan(lowered, flags)
        content, read = self._content(plan)
        return Identity(plan, content, read)

    def path(self, identity: Identity) -> str:
        """The file for a graph.

        Parameters
        ----------
        identity : Identity

        Returns
        -------
        str
            Its path, whether there is one or not.
        """
        if self.file is not None:
            return self.file
        name = hashlib.sha256(identity.plan.structure + identity.content).hexdigest()[:40]
        return os.path.join(self.folder, f"{name}{SUFFIX}")

    def open(self, identity: Identity) -> tuple[Payload, list[Entry]] | None:
        """The mapped file and its entries.

        Parameters
        ----------
        identity : Identity

        Returns
        -------
        (Payload, list of Entry) or None
            None when there is no usable file; nothing is raised for what is wrong with one.
        """
        path = self.path(identity)
        if self._refusal() is not None:
            return None
        opened = open_checked(path, identity)
        if opened is not None:
            touch(seal_path(path))
        return opened

    def holds(self, identity: Identity) -> bool:
        """Whether there is a file for the graph, checked except for the packed bytes.

        Parameters
        ----------
        identity : Identity

        Returns
        -------
        bool
        """
        return self._refusal() is None and open_fitting(self.path(identity), identity) is not None

    def save(self, identity: Identity, packed: Sequence[Packed], since: int) -> str | None:
        """Write what was packed. Never raises for the disk's sake.

        Parameters
        ----------
        identity : Identity
        packed : sequence of (int, bool, int, int, buffer)
            What XNNPACK asked for, in that order.
        since : int
            When packing began, or before, in nanoseconds since the epoch; the identity was made before that, or the
            constants are :meth:`steady` since then.

        Returns
        -------
        str or None
            None if it was written, else why not.
        """
        plan = identity.plan
        if not plan.expected:
            return "the graph has no weights to pack"
        if len(packed) != len(plan.expected):
            return f"XNNPACK packed {len(packed)} weights for {len(plan.expected)} nodes"
        for (_, _, kernel, bias, data), wanted in zip(packed, plan.expected):
            biases = (0,) if wanted.bias < 0 else (0, plan.addresses[wanted.bias])
            if kernel != plan.addresses[wanted.kernel] or bias not in biases or len(data) < wanted.at_least:
                return "XNNPACK packed weights that it had converted first"
        # What was packed must be what was digested, whatever became of the bytes in between.
        if not self.steady(identity, since) and content_digest(plan.constants) != identity.content:
            return "the constants changed while they were packed"
        path = self.path(identity)
        try:
            self._make_folder()
            refusal = keep_off(self.file) if self.file is not None else None
            if refusal is not None:
                return refusal
            write_file(path, identity, packed)
            if self.file is None:
                evict(self.folder, self.limit, keep=path)
            else:
                sweep(self.folder, f".{os.path.basename(path)}.")
        except OSError as error:
            return f"{error.strerror or error}: {error.filename or path}"
        return None

    @staticmethod
    def steady(identity: Identity, since: int) -> bool:
        """Whether the constants' bytes have certainly been the same since a time.

        Parameters
        ----------
        identity : Identity
        since : int
            Nanoseconds since the epoch.

        Returns
        -------
        bool
        """
        plan = identity.plan
        for value in plan.constants:
            if value.constant.in_place and (value.constant.owner is None or not value.constant.owner.mapped):
                return False
        return all(unchanged(owner) and at_rest(owner, since) for owner in plan.owners)

    # -- the folder ------------------------------------------------------------------------------------

    def _make_folder(self) -> None:
        os.makedirs(self.folder, 0o700, exist_ok=True)
        refusal = self._refusal()
        if refusal is not None:
            raise PermissionError(errno.EPERM, refusal, self.folder)

    def _refusal(self) -> str | None:
        """Why files of this folder can't be trusted; a folder that is not there has none."""
        return refusal(self.folder, for_file=self.file is not None)

    # -- content ---------------------------------------------------------------------------------------

    def _content(self, plan: Plan) -> tuple[bytes, bool]:
        if plan.fixed:
            if plan.content is None:
                plan.content = content_digest(plan.constants)
                return plan.content, True
            return plan.content, False
        if not plan.owners or not all(unchanged(owner) for owner in plan.owners):
            return content_digest(plan.constants), True
        key = self._key(plan)
        if key is None or self._refusal() is not None:
            return content_digest(plan.constants), True
        path = self._known(key)
        found = recall(path, key)
        if found is not None:
            return found, False
        # The time of before reading: what is written meanwhile must show.
        now = time.time_ns()
        content = content_digest(plan.constants)
        if all(at_rest(owner, now) and unchanged(owner) for owner in plan.owners):
            with contextlib.suppress(OSError):
                self._make_folder()
                os.makedirs(os.path.dirname(path) or os.curdir, 0o700, exist_ok=True)
                write_small(path, f"{key} {content.hex()}".encode())
        return content, True

    def _key(self, plan: Plan) -> str | None:
        """Which bytes of which files the constants are, None where that does not say it all."""
        numbers = {id(owner): place for place, owner in enumerate(plan.owners)}
        where: list[Any] = [plan.structure, [owner.identity for owner in plan.owners]]
        for value in plan.constants:
            constant = value.constant
            number = numbers.get(id(constant.owner))
            offset = constant.offset
            if number is not None and offset >= 0:
                where.append((number, offset, constant.nbytes))
            elif constant.in_place:
                return None
            else:
                # Made by lowering, and small.
                where.append(bytes(constant.data))
        return hashlib.sha256(marshal.dumps(where, 2)).hexdigest()

    def _known(self, key: str) -> str:
        return f"{self.file}.{KNOWN}" if self.file is not None else os.path.join(self.folder, KNOWN, key[:40])


# ---- identity

_build: tuple[Any, ...] | None = None


def build() -> tuple[Any, ...]:
    """What of this installation and this machine decides how weights are packed."""
    global _build
    if _build is None:
        from ._generated.build_info import INFO
        from ._runtime import isa, processor, second_isa

        info: dict[str, Any] = INFO
        archives = tuple([archive["sha256"] for archive in info["archives"]])
        _build = (info["key"], archives, tuple(isa()), (second_isa() or ())[:2], processor(), FORMAT)
    return _build


def describe(value: Any) -> tuple[Any, ...]:
    """Everything about a value but its bytes."""
    quantization = value.quantization
    if quantization is not None:
        scales = getattr(quantization, "scales", None)
        if scales is None:
            quantization = (type(quantization).__name__, *quantization)
        else:
            quantization = (
                type(quantization).__name__,
                quantization.axis,
                getattr(quantization, "block_size", 0),
                scales.dtype.str,
                scales.size,
                hashlib.sha256(scales.tobytes()).digest(),
            )
    return value.id, value.datatype, value.shape, quantization, value.constant is not None


def content_digest(constants: Sequence[Any]) -> bytes:
    """Digest of the bytes of constants, lengths included."""
    digest = hashlib.sha256()
    for value in constants:
        data = value.constant.data[: value.nbytes]
        digest.update(struct.pack("<Q", len(data)))
        digest.update(data)
    return digest.digest()


def file_stamp(status: os.stat_result) -> Stamp:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def unchanged(payload: Payload) -> bool:
    """Whether the payload is a mapped file that is still what it was when it was opened."""
    if payload.identity is None:
        return False
    try:
        return file_stamp(os.stat(payload.path or payload.name)) == payload.identity
    except OSError:
        return False


def at_rest(payload: Payload, now: int) -> bool:
    """Whether every change of the mapped file from that time on shows, or has shown, in its change time."""
    # The change time, unlike the other one, can't be set.
    return payload.identity is not None and payload.identity[4] + SETTLED_NS < now and keeps_times(payload)


_keeps_times: dict[tuple[int, str], bool] = {}


def keeps_times(payload: Payload) -> bool:
    """Whether the payload's file lies in a file system whose change times can be relied upon."""
    assert payload.identity is not None
    folder = os.path.dirname(os.path.realpath(payload.path or payload.name))
    key = payload.identity[0], folder
    if key not in _keeps_times:
        if len(_keeps_times) >= 256:
            _keeps_times.clear()
        _keeps_times[key] = file_system(folder) in KEEP_TIMES
    return _keeps_times[key]


def file_system(folder: str) -> str | None:
    """The kind of file system that is mounted at a folder, None where that can't be told."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
            mounts = [line.split() for line in lines]
    except OSError:
        return None
    kind, longest = None, -1
    for fields in mounts:
        with contextlib.suppress(ValueError, IndexError):
            point = unescaped(fields[4])
            inside = point == "/" or folder == point or folder.startswith(point + "/")
            # Of mounts over one another, the last is what one sees.
            if inside and len(point) >= longest:
                kind, longest = fields[fields.index("-") + 1], len(point)
    return kind


def unescaped(text: str) -> str:
    """A path as mountinfo writes it: blanks and backslashes are octal there."""
    for code in ("\\040", "\\011", "\\012", "\\134"):
        text = text.replace(code, chr(int(code[1:], 8)))
    return text


# ---- files


def default_folder() -> str:
    """The user's cache folder for packed weights."""
    override = os.environ.get(ENV_FOLDER)
    if override:
        return override
    try:
        import platformdirs
    except ImportError:
        raise UnsupportedError(
            f"weights_cache=True needs the platformdirs package (install xnnfast[cache]), or {ENV_FOLDER}, or a folder "
            "in its place"
        ) from None
    return os.path.join(platformdirs.user_cache_dir("xnnfast", appauthor=False), "weights")


def limit() -> int:
    """Bytes a cache folder may take: XNNFAST_CACHE_LIMIT, else 8 GiB."""
    text = os.environ.get(ENV_LIMIT)
    if not text:
        return DEFAULT_LIMIT
    if not text.isascii() or not text.isdigit():
        raise ArgumentError(f"{ENV_LIMIT} must be a number of bytes, found {text!r}")
    return int(text)


def refusal(folder: Location, *, for_file: bool = False) -> str | None:
    """Why files of a folder can't be trusted, None if they can or there is no such folder.

    Whoever may write to a folder can put other files in the place of ours. A single file may also lie in a
    folder of the system's, where others can add files but not touch this one.
    """
    try:
        status = os.stat(folder)
    except OSError:
        return None
    mine = status.st_uid == os.geteuid() or (for_file and status.st_uid == 0)
    open_to_others = status.st_mode & 0o022 and not (for_file and status.st_mode & stat.S_ISVTX)
    return None if mine and not open_to_others else "need a cache folder that only its owner can write"


def own_file(status: os.stat_result) -> bool:
    """A regular file that belongs to this user and that nobody else can write: it is fed to kernels."""
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022


def keep_off(path: str) -> str | None:
    """Why whatever a user's path names must stay there; None if there is nothing, or a cache file."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    if not own_file(status):
        return f"{path} is not a regular file that its owner alone can write"
    if status.st_size and not path.endswith(SUFFIX) and read_start(path, len(MAGIC)) != MAGIC:
        return f"{path} is there and is no cache file"
    return None


def read_start(path: Location, count: int) -> bytes | None:
    """The first bytes of a file of our own; None when it is missing or foreign."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return os.read(fd, count) if own_file(os.fstat(fd)) else None
    except OSError:
        return None
    finally:
        os.close(fd)


def read_small(path: Location, most: int) -> bytes | None:
    """A small file of our own; None when it is missing, foreign or too large."""
    data = read_start(path, most + 1)
    return data if data is not None and len(data) <= most else None


@contextlib.contextmanager
def replacing(path: str, *, sync: bool = True) -> Iterator[Any]:
    """A file that appears under its name when it is whole, and not at all otherwise."""
    # Here, as json below: a process that finds its weights should not wait for what it does not use.
    import tempfile

    fd, name = tempfile.mkstemp(prefix=f".{os.path.basename(path)}.", dir=os.path.dirname(path) or os.curdir)
    try:
        with os.fdopen(fd, "wb") as file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def write_small(path: str, data: bytes) -> None:
    # If the machine stops now, the file may be empty afterwards: then it says nothing.
    with replacing(path, sync=False) as file:
        file.write(data)


def recall(path: Location, key: str) -> bytes | None:
    """The digest that was remembered under a key."""
    found = read_small(path, 256)
    if found is None:
        return None
    name, _, content = found.decode("ascii", "replace").partition(" ")
    with contextlib.suppress(ValueError):
        digest = bytes.fromhex(content)
        if name == key and len(digest) == 32:
            return digest
    return None


def seal_path(path: Location) -> str:
    return os.fspath(path) + SEAL


def touch(seal: str) -> None:
    # The time of last use lives on the seal: a new time on the file itself would break the seal.
    with contextlib.suppress(OSError):
        if time.time() - os.lstat(seal).st_mtime > 60:
            os.utime(seal, follow_symlinks=False)


def align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def reserve(fd: int, size: int) -> None:
    """Have the disk set aside that many bytes: one that fills up halfway is no way to find out."""
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        # Not every file system can.
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise


def about(plan: Plan) -> bytes:
    """For people who look at a file: where it comes from."""
    import json

    _, _, sets, _, processor, _ = build()
    text = json.dumps({"source": plan.source[-1024:], "isa": sets, "processor": processor})
    return text.encode()[:MAX_ABOUT]


def entry_digest(identity: bytes, place: int, entry: bytes) -> Any:
    """The digest of an entry, to be fed with its bytes up to the next one."""
    return hashlib.sha256(identity + struct.pack("<Q", place) + entry)


def write_file(path: str, identity: Identity, packed: Sequence[Packed]) -> None:
    """Write a cache file; it appears under its name when it is whole."""
    plan = identity.plan
    both = plan.structure + identity.content
    description = about(plan)
    table_offset = align(HEADER_SIZE + len(description), 8)
    blob_offset = align(table_offset + RECORD.size * len(packed), PAGE)
    offsets = [blob_offset]
    for *_, data in packed:
        offsets.append(align(offsets[-1] + len(data) + SLACK, ALIGNMENT))
    front = bytearray(blob_offset - HEADER_SIZE)
    front[: len(description)] = description
    with replacing(path) as file:
        reserve(file.fileno(), offsets[-1])
        file.seek(blob_offset)
        for place, ((seed, looked_up, _, bias, data), wanted) in enumerate(zip(packed, plan.expected)):
            keyed = wanted.bias if bias else -1
            entry = ENTRY.pack(seed, looked_up, wanted.kernel, keyed, offsets[place], len(data), wanted.fingerprint)
            digest = entry_digest(both, place, entry)
            for part in (data, bytes(offsets[place + 1] - offsets[place] - len(data))):
                file.write(part)
                digest.update(part)
            start = table_offset - HEADER_SIZE + place * RECORD.size
            front[start : start + RECORD.size] = entry + digest.digest()
        header = HEADER.pack(
            MAGIC, FORMAT, len(packed), len(description), 0, table_offset, blob_offset, offsets[-1], plan.structure,
            identity.content, hashlib.sha256(front).digest(),
        ).ljust(HEADER_SIZE - 32, b"\0")  # fmt: skip
        file.seek(0)
        file.write(header + hashlib.sha256(header).digest())
        file.write(front)


class Front(NamedTuple):
    """What stands before a cache file's packed bytes."""

    structure: bytes
    content: bytes
    about: bytes
    entries: list[Entry]
    checksums: list[bytes]


def parse(view: memoryview) -> Front | None:
    """The front of a cache file, every number checked; None if anything is out of order."""
    if len(view) < HEADER_SIZE:
        return None
    fields = HEADER.unpack_from(view)
    magic, version, count, described, zero, table_offset, blob_offset, size, structure, content, front_sum = fields
    if magic != MAGIC or version != FORMAT or zero or any(view[HEADER.size : HEADER_SIZE - 32]):
        return None
    if hashlib.sha256(view[: HEADER_SIZE - 32]).digest() != view[HEADER_SIZE - 32 : HEADER_SIZE]:
        return None
    if size != len(view) or count > MAX_ENTRIES or described > MAX_ABOUT:
        return None
    if table_offset != align(HEADER_SIZE + described, 8) or blob_offset % PAGE:
        return None
    table_end = table_offset + count * RECORD.size
    if not table_end <= blob_offset <= size:
        return None
    if hashlib.sha256(view[HEADER_SIZE:blob_offset]).digest() != front_sum:
        return None
    entries = []
    checksums = []
    end = blob_offset
    for record in RECORD.iter_unpack(view[table_offset:table_end]):
        seed, looked_up, kernel, bias, offset, length, fingerprint, checksum = record
        if looked_up > 1 or offset != end or length > size or offset + length + SLACK > size:
            return None
        end = align(offset + length + SLACK, ALIGNMENT)
        entries.append(Entry(seed, bool(looked_up), kernel, bias, offset, length, fingerprint))
        checksums.append(checksum)
    if end != size:
        return None
    return Front(structure, content, bytes(view[HEADER_SIZE : HEADER_SIZE + described]), entries, checksums)


def bad_entry(view: memoryview, front: Front) -> int | None:
    """The place of the first entry whose bytes are not those that were written; None if all are."""
    both = front.structure + front.content
    ends = [entry.offset for entry in front.entries[1:]] + [len(view)]
    for place, (entry, end) in enumerate(zip(front.entries, ends)):
        digest = entry_digest(both, place, ENTRY.pack(*entry))
        digest.update(view[entry.offset : end])
        if digest.digest() != front.checksums[place]:
            return place
    return None


def open_fitting(path: Location, identity: Identity) -> tuple[Payload, Front] | None:
    """The file mapped, if it is ours and says that it is for exactly this graph."""
    try:
        status = os.lstat(path)
        if not own_file(status):
            return None
        payload = Payload.open(path)
    except (OSError, FormatError):
        return None
    # The file that was opened, not another one that took its name in between.
    if payload.identity != file_stamp(status):
        return None
    front = parse(memoryview(payload))
    plan = identity.plan
    if front is None or front.structure != plan.structure or front.content != identity.content:
        return None
    if len(front.entries) != len(plan.expected) or not front.entries:
        return None
    for entry, wanted in zip(front.entries, plan.expected):
        if (entry.kernel, entry.fingerprint) != (wanted.kernel, wanted.fingerprint):
            return None
        if entry.bias not in (-1, wanted.bias) or entry.size < wanted.at_least:
            return None
    return payload, front


def open_checked(path: Location, identity: Identity) -> tuple[Payload, list[Entry]] | None:
    """The file mapped, if it is ours, whole, and for exactly this graph."""
    opened = open_fitting(path, identity)
    if opened is None:
        return None
    payload, front = opened
    if not sealed(path, payload):
        # The time of before reading: what is written meanwhile must show.
        now = time.time_ns()
        if bad_entry(memoryview(payload), front) is not None:
            return None
        if at_rest(payload, now) and unchanged(payload):
            with contextlib.suppress(OSError):
                write_small(seal_path(path), repr(payload.identity).encode())
    return payload, front.entries


def sealed(path: Location, payload: Payload) -> bool:
    """Whether this very file, unwritten since, was verified before."""
    return read_small(seal_path(path), 512) == repr(payload.identity).encode()


def intact(payload: Payload) -> bool:
    """Whether nobody has written to, or cut, a file that is mapped. One that was replaced or removed is intact."""
    assert payload.identity is not None
    try:
        now = file_stamp(os.stat(payload.name))
    except OSError:
        return True
    return now[:2] != payload.identity[:2] or now[2:4] == payload.identity[2:4]


# ---- care


class CacheFile(NamedTuple):
    """One file of a cache folder."""

    path: str
    nbytes: int
    #: Seconds since the epoch.
    last_used: float


def files(folder: Location) -> list[CacheFile]:
    """The cache files of a folder, least recently used first."""
    found = []
    for entry in scan(folder):
        if entry.name.endswith(SUFFIX) and not entry.name.startswith(".") and entry.is_file(follow_symlinks=False):
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                used = status.st_mtime
                with contextlib.suppress(OSError):
                    used = max(used, os.lstat(entry.path + SEAL).st_mtime)
                found.append(CacheFile(entry.path, status.st_size, used))
    return sorted(found, key=lambda each: (each.last_used, each.path))


def scan(folder: Location) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def remove(file: CacheFile) -> None:
    """Unlink a cache file; processes that have it mapped keep what they have."""
    for path in (file.path, seal_path(file.path)):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def evict(
    folder: Location, most: int, *, keep: str | None = None, unused_since: float | None = None
) -> list[CacheFile]:
    """Remove least recently used files until at most that many bytes are left, and leftovers of killed writers.

    ``keep`` stays in any case: it was just made for someone. Files not used since ``unused_since`` go too.
    """
    gone = []
    present = files(folder)
    total = sum(file.nbytes for file in present)
    for file in present:
        old = unused_since is not None and file.last_used < unused_since
        if file.path != keep and (total > most or old):
            with contextlib.suppress(OSError):
                remove(file)
                gone.append(file)
                total -= file.nbytes
    sweep(folder)
    return gone


def sweep(folder: Location, prefix: str | None = None, older_than: float = LEFTOVER) -> None:
    """Remove what a killed process left, seals of files that are gone, and what is known of forgotten models."""
    now = time.time()

    def unlink(entries: list[os.DirEntry[str]], condition: Callable[[str], bool], age: float) -> None:
        for entry in entries:
            if condition(entry.name):
                with contextlib.suppress(OSError):
                    if now - entry.stat(follow_symlinks=False).st_mtime > age:
                        os.unlink(entry.path)

    if prefix is not None:
        unlink(scan(folder), lambda name: name.startswith(prefix), older_than)
        return
    present = scan(folder)
    names = {entry.name for entry in present}
    unlink(present, lambda name: name.startswith(".") and SUFFIX in name, older_than)
    unlink(present, lambda name: name.endswith(SUFFIX + SEAL) and name[: -len(SEAL)] not in names, older_than)
    known = scan(os.path.join(folder, KNOWN))
    unlink(known, lambda name: name.startswith("."), older_than)
    unlink(known, lambda name: True, min(FORGET, older_than) if older_than < 0 else FORGET)


def clear(folder: Location) -> list[CacheFile]:
    """Remove every file of the cache."""
    present = files(folder)
    for file in present:
        remove(file)
    sweep(folder, older_than=-1)
    return present


def look(path: Location) -> tuple[Front | None, int | None, str | None]:
    """(front, first bad entry, what is wrong) of a file, whichever graph it is for."""
    try:
        if not own_file(os.lstat(path)):
            return None, None, "not a regular file that its owner alone can write"
        payload = Payload.open(path)
    except FormatError as error:
        return None, None, str(error)
    front = parse(memoryview(payload))
    if front is None:
        return None, None, "header or table are damaged, or of another version"
    bad = bad_entry(memoryview(payload), front)
    return front, bad, None if bad is None else f"the packed bytes of entry {bad} are damaged"


def verify(path: Location) -> str | None:
    """None if the file is whole, else what is wrong with it; OSError if it can't be read."""
    return look(path)[2]


def described(path: Location) -> dict[str, Any] | None:
    """What a cache file says about itself, None if it can't be read. The packed bytes are not looked at."""
    import json

    try:
        if not own_file(os.lstat(path)):
            return None
        front = parse(memoryview(Payload.open(path)))
    except (OSError, FormatError):
        return None
    if front is None:
        return None
    facts = {"entries": len(front.entries), "packed": sum(entry.size for entry in front.entries)}
    with contextlib.suppress(ValueError, RecursionError):
        told = json.loads(front.about)
        if isinstance(told, dict):
            facts.update({key: told[key] for key in ("source", "isa") if key in told})
    return facts
