"""Arrays in files, a few rows at a time: what ``xnnfast batch`` reads and writes.

In come the names of files, out come :class:`Source` objects whose rows can be read; results go through a
:class:`Target` into a file that takes its name when all of it is written, with a :class:`Journal` beside it
that tells which rows are there already.

======================== ================================== ==========================================
format                   read                               written
======================== ================================== ==========================================
.npy                     mapped                             mapped
.raw .bin                mapped                             mapped
.safetensors             mapped                             mapped
.npz                     mapped where it is not compressed  mapped, then put into the archive
.arrow .feather .parquet FixedShapeTensor, fixed-size lists the same, then written as FixedShapeTensor
                         and numbers (extra ``arrow``)
======================== ================================== ==========================================
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from .errors import ArgumentError, FormatError, UnsupportedError

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]

__all__ = ["Journal", "Source", "Spec", "Target", "open_inputs"]

ALIGNMENT = 64
RAW = (".raw", ".bin")
TABLES = (".arrow", ".feather", ".parquet")
ENDINGS = ".npy, .npz, .safetensors, .raw, .bin, .arrow, .feather or .parquet"
#: A header longer than this is not one (the safetensors library has the same limit).
MAX_HEADER = 100_000_000

#: Of a sample; more than any graph has, fewer than any NumPy takes.
MAX_DIMS = 16

#: Names of dtypes in safetensors files.
SAFETENSORS: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64), "F32": np.dtype(np.float32), "F16": np.dtype(np.float16),
    "I64": np.dtype(np.int64), "I32": np.dtype(np.int32), "I16": np.dtype(np.int16), "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64), "U32": np.dtype(np.uint32), "U16": np.dtype(np.uint16), "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


class Spec(NamedTuple):
    """What a graph's input or output is: NumPy dtype, and shape with the batch on axis 0."""

    datatype: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


# ---------------------------------------------------------------------------------------------------
# Reading


class Source(Protocol):
    """An array in a file."""

    #: File, and which array in it.
    path: str
    key: str
    #: Both, for messages.
    where: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def read(self, start: int, stop: int) -> Array:
        """Rows ``start`` to ``stop``; where the file is mapped, a view of it."""


class _Mapped:
    """An array that is there as a whole, mapped or in memory."""

    def __init__(self, path: str, key: str, array: Array) -> None:
        self.path, self.key = path, key
        self.where = f"{path}:{key}" if key else path
        self.dtype = array.dtype
        self.shape = array.shape
        self.array = array

    def read(self, start: int, stop: int) -> Array:
        return self.array[start:stop]


def open_inputs(words: Sequence[str], specs: Sequence[Spec], names: Sequence[str]) -> list[Source]:
    """A source for every input of a graph.

    A word is a file, or ``NAME=FILE`` for the input of that name (its position, from 0); ``FILE:KEY`` picks
    one of several arrays, ``FILE:DTYPE`` and ``FILE:DTYPE:2x3x4`` say what a raw file holds. Words without a
    name stand for the inputs in their order; a file that holds several arrays may stand for several inputs.
    """
    found: dict[int, Source] = {}
    plain = []
    for word in words:
        name, equals, rest = word.partition("=")
        if equals and name in names and not os.path.exists(word):
            position = list(names).index(name)
            if position in found:
                raise ArgumentError(f"input {name} is given twice")
            arrays = _open(rest, specs[position])
            if len(arrays) != 1:
                raise ArgumentError(f"{rest} holds {', '.join(arrays) or 'no array'}: pick one, {name}={rest}:"
                                    f"{next(iter(arrays), 'KEY')}")
            found[position] = next(iter(arrays.values()))
        else:
            plain.append(word)
    open_positions = [position for position in range(len(specs)) if position not in found]
    for number, word in enumerate(plain):
        if not open_positions:
            raise ArgumentError(f"the graph has {len(specs)} input{'s' * (len(specs) != 1)}, got {word} besides")
        arrays = _open(word, specs[open_positions[0]])
        share = len(open_positions) - (len(plain) - number - 1)
        if len(arrays) > 1 and all(names[position] in arrays for position in open_positions[:share]):
            arrays = {names[position]: arrays[names[position]] for position in open_positions[:share]}
        if len(arrays) != 1 and len(arrays) != share:
            raise ArgumentError(f"{word} holds {', '.join(arrays) or 'no array'}: pick one, {word}:"
                                f"{next(iter(arrays), 'KEY')}")
        for source in arrays.values():
            found[open_positions.pop(0)] = source
    if open_positions:
        missing = ", ".join(f"{names[position]} ({specs[position].datatype} {_text(specs[position].shape)})"
                            for position in open_positions)
        raise ArgumentError(f"need {len(specs)} inputs, missing: {missing}")
    return [found[position] for position in range(len(specs))]


def _text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _open(word: str, spec: Spec) -> dict[str, Source]:
    """The arrays of a file, by key."""
    path, key = word, ""
    while not os.path.exists(path) and ":" in path:
        path, _, last = path.rpartition(":")
        key = f"{last}:{key}" if key else last
    if not os.path.exists(path):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), word)
    if not os.path.isfile(path):
        raise ArgumentError(f"{path}: need a regular file, which can be mapped")
    suffix = Path(path).suffix.lower()
    if suffix in RAW:
        return {"": _open_raw(path, key, spec)}
    if suffix == ".npy":
        arrays: dict[str, Source] = {"": _Mapped(path, "", _open_npy(path, spec))}
    elif suffix == ".npz":
        arrays = _open_npz(path, spec)
    elif suffix == ".safetensors":
        arrays = _open_safetensors(path)
    elif suffix in TABLES:
        arrays = _open_table(path, suffix)
    else:
        raise UnsupportedError(f"{path}: need a name that ends in {ENDINGS}")
    if not key:
        return arrays
    if key not in arrays:
        has = f", it has {', '.join(arrays)}" if suffix != ".npy" else ""
        raise ArgumentError(f"{path} has no array {key!r}{has}")
    return {key: arrays[key]}


def _bf16(array: Array, spec: Spec) -> Array:
    # A .npy file can't name bfloat16; NumPy writes such an array as two opaque bytes.
    return array.view(spec.dtype) if spec.datatype == "bf16" and array.dtype == np.dtype("V2") else array


def _open_npy(path: str, spec: Spec) -> Array:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise FormatError(f"{path}: need a whole .npy file: {error}") from error
    if not isinstance(array, np.ndarray):
        raise FormatError(f"{path}: need a .npy file, found an archive")
    return _bf16(array, spec)


def _open_raw(path: str, key: str, spec: Spec) -> Source:
    name, _, dims = key.partition(":")
    try:
        dtype = np.dtype(name) if name else spec.dtype
        sample = tuple(int(dim) for dim in dims.split("x")) if dims else spec.shape[1:]
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{path}: need DTYPE or DTYPE:2x3x4 after the name, got {key!r}") from error
    if dtype.kind not in "biufcV" or not dtype.itemsize or any(dim < 1 for dim in sample):
        raise ArgumentError(f"{path}: need a numeric dtype and dims of at least 1, got {key!r}")
    if len(sample) > MAX_DIMS:
        raise ArgumentError(f"{path}: need {MAX_DIMS} dims or fewer, got {len(sample)}")
    size, each = os.path.getsize(path), dtype.itemsize * math.prod(sample)
    if size % each:
        raise FormatError(f"{path}: need a multiple of {each} bytes for {dtype} {_text(sample)}, found {size}")
    shape = (size // each, *sample)
    # An empty file can't be mapped.
    return _Mapped(path, "", np.memmap(path, dtype, "r", shape=shape) if size else np.empty(shape, dtype))


def _open_npz(path: str, spec: Spec) -> dict[str, Source]:
    arrays: dict[str, Source] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                if not member.filename.endswith(".npy"):
                    continue
                key = member.filename.removesuffix(".npy")
                arrays[key] = _Mapped(path, key, _bf16(_member(path, archive, member), spec))
    except (zipfile.BadZipFile, ValueError, EOFError) as error:
        raise FormatError(f"{path}: need a whole .npz file: {error}") from error
    return arrays


def _member(path: str, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Array:
    """An array of an archive: mapped where its bytes stand in the file as they are."""
    with archive.open(member) as stream:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(stream)
        header = stream.tell()
        if dtype.hasobject:
            raise FormatError(f"{path}:{member.filename}: need numbers, found Python objects")
        nbytes = dtype.itemsize * math.prod(shape)
        if member.file_size - header < nbytes:
            raise FormatError(f"{path}:{member.filename}: need {nbytes} bytes for {dtype} {_text(shape)}, found "
                              f"{member.file_size - header}")
        if member.compress_type != zipfile.ZIP_STORED or not nbytes:
            array = np.frombuffer(stream.read(nbytes), dtype)
            return array.reshape(shape, order="F" if fortran else "C")
    with open(path, "rb") as file:
        # The local header repeats the name and may have other extra fields than the directory.
        file.seek(member.header_offset + 26)
        lengths = file.read(4)
    start = member.header_offset + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
    return np.memmap(path, dtype, "r", start + header, shape, "F" if fortran else "C")


def _open_safetensors(path: str) -> dict[str, Source]:
    # The library reads whole tensors only, and copies them.
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER):
            raise FormatError(f"{path}: need a header within {size} bytes, found a length of {length}")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{path}: need a header in JSON: {error}") from error
    arrays: dict[str, Source] = {}
    bf16 = _bf16_dtype()
    try:
        for key, entry in header.items():
            if key == "__metadata__":
                continue
            dtype = bf16 if entry["dtype"] == "BF16" else SAFETENSORS[entry["dtype"]]
            shape = tuple(int(dim) for dim in entry["shape"])
            start, end = entry["data_offsets"]
            nbytes = dtype.itemsize * math.prod(shape)
            if any(dim < 0 for dim in shape) or start < 0 or end - start != nbytes or end > size - 8 - length:
                raise FormatError(f"{path}:{key}: need {nbytes} bytes for {entry['dtype']} {_text(shape)} within the "
                                  f"file, found offsets {start} to {end}")
            array = np.memmap(path, dtype, "r", 8 + length + start, shape) if nbytes else np.empty(shape, dtype)
            arrays[key] = _Mapped(path, key, array)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"{path}: need dtype, shape and data_offsets of every tensor: {error!r}") from error
    return arrays


def _bf16_dtype() -> np.dtype[Any]:
    from .datatypes import DATATYPES

    dtype = DATATYPES["bf16"].dtype
    assert dtype is not None
    return dtype


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise UnsupportedError("Arrow and Parquet files need pyarrow, which is not installed: install "
                               "xnnfast[arrow]") from None
    return pyarrow


def _open_table(path: str, suffix: str) -> dict[str, Source]:
    pa = _pyarrow()
    try:
        if suffix == ".parquet":
            import pyarrow.parquet

            file = pyarrow.parquet.ParquetFile(path, memory_map=True)
            schema = file.schema_arrow
            counts = [file.metadata.row_group(k).num_rows for k in range(file.metadata.num_row_groups)]
            group = file.read_row_group
        else:
            opened = pa.ipc.open_file(pa.memory_map(path))
            schema = opened.schema
            # Mapped: this reads nothing but the messages' heads.
            batches = [opened.get_batch(k) for k in range(opened.num_record_batches)]
            counts = [batch.num_rows for batch in batches]

            def group(k: int, columns: Sequence[str]) -> Any:
                return batches[k].select(list(columns))
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise
        raise FormatError(f"{path}: need a whole {suffix} file: {error}") from error
    return {name: column for name in schema.names
            if (column := _Column.of(path, name, schema.field(name).type, counts, group)) is not None}


class _Column:
    """A column of a table whose cells are arrays of one shape, read group by group."""

    def __init__(self, path: str, name: str, dtype: np.dtype[Any], sample: tuple[int, ...], counts: list[int],
                 group: Any) -> None:
        self.path, self.key = path, name
        self.where = f"{path}:{name}"
        self.dtype = dtype
        self.shape = (sum(counts), *sample)
        self._group = group
        self._starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self._kept: tuple[int, Array] | None = None

    @staticmethod
    def of(path: str, name: str, kind: Any, counts: list[int], group: Any) -> _Column | None:
        """The column, or None for one of strings, maps and the like."""
        pa = _pyarrow()
        sample: tuple[int, ...] = ()
        if isinstance(kind, pa.FixedShapeTensorType):
            if kind.permutation is not None and list(kind.permutation) != list(range(len(kind.shape))):
                return None
            sample, kind = tuple(kind.shape), kind.value_type
        while pa.types.is_fixed_size_list(kind):
            sample, kind = (*sample, kind.list_size), kind.value_type
        try:
            # Not to_pandas_dtype(), which needs pandas.
            dtype = pa.nulls(0, kind).to_numpy(zero_copy_only=False).dtype
        except (pa.ArrowException, NotImplementedError, TypeError):
            return None
        if dtype.hasobject or dtype.kind not in "biuf":
            return None
        return _Column(path, name, dtype, sample, counts, group)

    def read(self, start: int, stop: int) -> Array:
        first = int(np.searchsorted(self._starts, start, "right")) - 1
        parts = []
        while start < stop:
            end = min(stop, int(self._starts[first + 1]))
            if end > start:
                at = int(self._starts[first])
                parts.append(self._rows(first)[start - at : end - at])
                start = end
            first += 1
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty((0, *self.shape[1:]), self.dtype)

    def _rows(self, number: int) -> Array:
        """All rows of a group; the latest stays, since pieces are asked for in order."""
        if self._kept is None or self._kept[0] != number:
            self._kept = None
            pa = _pyarrow()
            try:
                column = self._group(number, columns=[self.key]).column(0)
            except pa.ArrowException as error:
                # Among them, with some versions, a null among lists of one size.
                raise FormatError(f"{self.where}: need rows that can be read, row group {number}: {error}") from error
            if hasattr(column, "combine_chunks"):
                column = column.combine_chunks()
            if column.null_count:
                raise FormatError(f"{self.where}: need a value in every row, found {column.null_count} nulls in row "
                                  f"group {number}")
            cells = column.storage if isinstance(column, pa.ExtensionArray) else column
            while pa.types.is_fixed_size_list(cells.type):
                cells = cells.flatten()
            array = cells.to_numpy(zero_copy_only=False)
            self._kept = number, array.astype(self.dtype, copy=False).reshape(-1, *self.shape[1:])
        return self._kept[1]


# ---------------------------------------------------------------------------------------------------
# Writing


class Target:
    """A file that will hold one or several arrays, of known shapes.

    Until :meth:`finish` the bytes are in a file beside it, whose name starts with a dot and ends in
    ``.part``. Its space is reserved beforehand: a full disk shows at once, not in the middle. ``journal`` is
    the one that tells what is in it, if that is not the file's own: no other run takes such a part for its own.
    """

    def __init__(self, path: Path, names: Sequence[str], specs: Sequence[Spec], journal: Path | None = None) -> None:
        self.path = path
        self.names = list(names)
        self.specs = list(specs)
        self.suffix = path.suffix.lower()
        if self.suffix in (".npy", *RAW):
            if len(specs) != 1:
                raise ArgumentError(f"{path} can hold one array, the graph has {len(specs)} outputs: give -o for each, "
                                    "or one name with {} in it, or .npz or .safetensors")
        elif self.suffix in TABLES:
            _pyarrow()
        elif self.suffix not in (".npz", ".safetensors"):
            raise UnsupportedError(f"{path}: need a name that ends in {ENDINGS}")
        if path.exists() and not path.is_file():
            raise ArgumentError(f"{path} is there and is no regular file")
        mark = ""
        if journal is not None and journal != journal_path(path):
            mark = f".{hashlib.sha256(os.fsencode(os.path.relpath(journal, path.parent))).hexdigest()[:8]}"
        self.part = path.with_name(f".{path.name}{mark}.part")
        self._header = self._make_header()
        self._places = []
        at = len(self._header)
        for spec in self.specs:
            if self.suffix not in (".safetensors", *RAW):
                at = -(-at // ALIGNMENT) * ALIGNMENT
            self._places.append(at)
            at += spec.dtype.itemsize * math.prod(spec.shape)
        self.nbytes = at

    def _make_header(self) -> bytes:
        if self.suffix == ".npy":
            import io

            stream = io.BytesIO()
            spec = self.specs[0]
            descr = np.lib.format.dtype_to_descr(spec.dtype)
            np.lib.format.write_array_header_1_0(stream, {"descr": descr, "fortran_order": False, "shape": spec.shape})
            return stream.getvalue()
        if self.suffix == ".safetensors":
            codes = {dtype: code for code, dtype in SAFETENSORS.items()}
            entries, at = {}, 0
            for name, spec in zip(self.names, self.specs):
                nbytes = spec.dtype.itemsize * math.prod(spec.shape)
                entries[name] = {"dtype": "BF16" if spec.datatype == "bf16" else codes[spec.dtype],
                                 "shape": list(spec.shape), "data_offsets": [at, at + nbytes]}
                at += nbytes
            text = json.dumps(entries, separators=(",", ":")).encode()
            text += b" " * (-(8 + len(text)) % ALIGNMENT)
            return len(text).to_bytes(8, "little") + text
        return b""

    def reserve(self) -> None:
        """Make the part file, or keep one of the right size."""
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
        descriptor = os.open(self.part, flags, 0o666)
        try:
            if os.fstat(descriptor).st_size != self.nbytes:
                os.ftruncate(descriptor, 0)
                if self.nbytes and hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(descriptor, 0, self.nbytes)
                else:
                    os.ftruncate(descriptor, self.nbytes)
            os.pwrite(descriptor, self._header, 0)
        finally:
            os.close(descriptor)

    @property
    def is_reserved(self) -> bool:
        """Whether a part file of the right size is there."""
        try:
            return self.part.stat().st_size == self.nbytes
        except FileNotFoundError:
            return False

    def arrays(self, mode: Any = "r+") -> list[Array]:
        """The arrays, mapped."""
        return [np.memmap(self.part, spec.dtype, mode, place, spec.shape)
                if math.prod(spec.shape) else np.empty(spec.shape, spec.dtype)
                for place, spec in zip(self._places, self.specs)]

    def sync(self) -> None:
        """Wait until what was written is on the disk."""
        with open(self.part, "rb") as file:
            os.fsync(file.fileno())

    def finish(self) -> None:
        """Give the file its name."""
        if self.suffix in (".npz", *TABLES):
            partial = self.path.with_name(f".{self.path.name}.tmp")
            try:
                with open(partial, "wb") as file:
                    (self._write_npz if self.suffix == ".npz" else self._write_table)(file)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(partial, self.path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(partial)
                raise
            os.unlink(self.part)
        else:
            self.sync()
            os.replace(self.part, self.path)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _write_npz(self, file: IO[bytes]) -> None:
        np.savez(file, allow_pickle=False, **dict(zip(self.names, self.arrays("r"))))

    def _write_table(self, file: IO[bytes]) -> None:
        pa = _pyarrow()
        arrays = self.arrays("r")
        rows = len(arrays[0])
        step = max(1, (16 << 20) // max(1, sum(array.nbytes for array in arrays) // max(1, rows)))

        def cells(array: Array) -> Any:
            if array.ndim == 1:
                return pa.array(array)
            return pa.FixedShapeTensorArray.from_numpy_ndarray(np.ascontiguousarray(array))

        def kind(array: Array) -> Any:
            value = pa.from_numpy_dtype(array.dtype)
            return value if array.ndim == 1 else pa.fixed_shape_tensor(value, array.shape[1:])

        schema = pa.schema([(name, kind(array)) for name, array in zip(self.names, arrays)])
        if self.suffix == ".parquet":
            import pyarrow.parquet

            writer = pyarrow.parquet.ParquetWriter(file, schema)
        else:
            writer = pa.ipc.new_file(file, schema)
        with writer:
            for start in range(0, rows, step):
                columns = [cells(array[start : start + step]) for array in arrays]
                writer.write_batch(pa.record_batch(columns, schema=schema))

    def discard(self) -> None:
        """Remove the part file."""
        with contextlib.suppress(FileNotFoundError):
            self.part.unlink()


def journal_path(path: Path) -> Path:
    """Where the journal of a run is whose first output has that path."""
    return path.with_name(f".{path.name}.journal")


class Journal:
    """Which rows of a run are written: lines of JSON in a file beside the output.

    The first line says what the run is, so that no other one continues it. Each line has a checksum: one
    that is damaged counts for nothing. It is written after its rows; a killed process loses neither, since
    both are in the kernel by then. A machine that goes down may lose rows and keep lines: after a restart
    only what a ``synced`` line vouches for counts.
    """

    VERSION = 2

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: list[tuple[int, int]] = []
        self.finishing = False
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def open(self, *, forget: bool = False) -> dict[str, Any] | None:
        """Lock the journal and read it; what the run was, None where there was none or it is to be forgotten."""
        while True:
            self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115
            self._lock()
            if self._is_named():
                break
            # Whoever had the lock finished, and removed the file.
            self._file.close()
        self._file.seek(0)
        data = self._file.read()
        # Of a journal that was cut off in its first line nothing was done.
        if forget or b"\n" not in data:
            return None
        lines = [line for line in map(_checked, data.splitlines(keepends=True)) if line is not None]
        if not lines or lines[0].get("version") != self.VERSION:
            raise FormatError(f"{self.path}: need a journal whose first line is of version {self.VERSION} and whole: "
                              "--restart forgets it")
        boot, doubtful = lines[0]["boot"], []
        for line in lines[1:]:
            if "rows" in line:
                doubtful.append((line["rows"][0], line["rows"][1]))
            elif "synced" in line:
                self.done += doubtful
                doubtful = []
            elif "boot" in line and line["boot"] != boot:
                boot, doubtful = line["boot"], []
            self.finishing = self.finishing or "finishing" in line
        if boot == _boot():
            self.done += doubtful
        self.done = merged(self.done)
        if not data.endswith(b"\n"):
            self._file.write(b"\n")
        self._write({"boot": _boot()})
        run: dict[str, Any] = lines[0]["run"]
        return run

    def _lock(self) -> None:
        assert self._file is not None
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ArgumentError(f"{self.path}: another process is at work on this output") from None
        except OSError as error:
            raise OSError(error.errno, f"can't be locked: {error.strerror}", str(self.path)) from error

    def _is_named(self) -> bool:
        """Whether the file that is open is the one that has the name."""
        assert self._file is not None
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), os.stat(self.path))
        except FileNotFoundError:
            return False

    def begin(self, run: dict[str, Any]) -> None:
        """Start anew."""
        assert self._file is not None
        self.done, self.finishing = [], False
        self._file.truncate(0)
        self._write({"version": self.VERSION, "boot": _boot(), "run": run})

    def add(self, start: int, stop: int) -> None:
        """Rows are written."""
        self._write({"rows": [start, stop]})

    def synced(self) -> None:
        """All rows so far are on the disk."""
        assert self._file is not None
        self._write({"synced": True})
        os.fsync(self._file.fileno())

    def finish(self) -> None:
        """From here on files get their names."""
        self.finishing = True
        self._write({"finishing": True})
        self.synced()

    def _write(self, line: dict[str, Any]) -> None:
        assert self._file is not None
        data = json.dumps({**line, "sum": _sum(line)}, separators=(",", ":")).encode() + b"\n"
        try:
            # What stops in the middle tells why when it is asked to go on.
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def discard(self) -> None:
        """Remove the journal."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()


def _sum(line: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(line, separators=(",", ":")).encode())


def _checked(text: bytes) -> dict[str, Any] | None:
    """A line of a journal; None if it was cut off or is damaged."""
    try:
        line = json.loads(text) if text.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) and line.pop("sum", None) == _sum(line) else None


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same rows in ascending ranges that don't touch."""
    out: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(stop, out[-1][1])
        elif stop > start:
            out.append((start, stop))
    return out


def missing(done: Sequence[tuple[int, int]], rows: int) -> Iterator[tuple[int, int]]:
    """The ranges between those that are done."""
    at = 0
    for start, stop in (*merged(done), (rows, rows)):
        if start > at:
            yield at, min(start, rows)
        at = max(at, stop)
