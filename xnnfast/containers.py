"""From a payload to its sections: the flatbuffers in it and where their constants lie.

In comes a Payload; out come Sections, whose ranges have been checked against the file, or a ProgramFile,
which also tells how an ExecuTorch program routes values. No constant is touched: opening costs what the
tables cost, whatever the size of the file.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from ._flatbuf import FlatBuffer, Table, verify
from ._payload import Payload
from .caps import DEFAULT_LIMITS, Limits
from .errors import ArgumentError, FormatError

if TYPE_CHECKING:
    from ._payload import Source

    #: What ``data=`` takes.
    DataArgument: TypeAlias = "Source | Payload | DataFile | Sequence[Source | Payload | DataFile]"

#: Dimensions of a tensor of a program, by ExecuTorch's own limit, and elements: their bytes must fit 63 bits.
MAX_TENSOR_RANK = 16
MAX_TENSOR_ELEMENTS = 1 << 59

#: Id of our backend in a program.
XNNPACK_BACKEND = "XnnpackBackend"

#: Bytes 4..8 -> what a file is.
NAMES = {
    b"ET12": "an ExecuTorch program",
    b"FT01": "a data file",
    b"BP08": "a bundled program",
    b"XH00": "an XNNPACK payload",
    b"XN00": "an XNNPACK payload without header",
    b"XN01": "an XNNPACK payload without header",
}

#: What a flatbuffer of a graph may be identified by.
GRAPH_IDENTIFIERS = (b"XN00", b"XN01")

# magic, header length, flatbuffer offset and size, constant data offset and size.
_PAYLOAD_HEADER = struct.Struct("<4sHIIIQ")
_PAYLOAD_HEADER_NBYTES = 30

# Headers that were put behind bytes 0..8 of a finished flatbuffer; lengths are counted from their magic.
_PROGRAM_MAGIC, _DATA_MAGIC = b"eh00", b"FH01"
_HEADER_AT = 8

#: ScalarType numbers that NumPy has a dtype for.
SCALAR_TYPES: dict[int, np.dtype[Any]] = {
    number: np.dtype(name)
    for number, name in (
        (0, "u1"),
        (1, "i1"),
        (2, "i2"),
        (3, "i4"),
        (4, "i8"),
        (5, "f2"),
        (6, "f4"),
        (7, "f8"),
        (11, "?"),
        (27, "u2"),
        (28, "u4"),
        (29, "u8"),
    )
}


class Blob(NamedTuple):
    """A range of a payload."""

    payload: Payload
    offset: int
    nbytes: int

    @property
    def data(self) -> memoryview:
        """The bytes: a read-only view that keeps the payload alive."""
        return memoryview(self.payload)[self.offset : self.offset + self.nbytes]


class Segments(Sequence[Blob]):
    """The segments of a program or data file, bounded by the file and by what its header says."""

    def __init__(self, payload: Payload, start: int, places: list[tuple[int, int]]) -> None:
        self.payload = payload
        self.start = start
        #: (offset from start, size) of each.
        self.places = places

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self[each] for each in range(*index.indices(len(self))))
        offset, nbytes = self.places[index]
        return Blob(self.payload, self.start + offset, nbytes)


class NamedData:
    """Blobs by key, of one program or data file, or of several together."""

    def __init__(self, *files: tuple[Segments, dict[str, int], dict[str, list[int]]]) -> None:
        # Of each file: segments, key -> segment, key -> all segments of a key, if any occurs repeatedly.
        self._files = files

    @property
    def single(self) -> tuple[Payload, int, dict[str, int], list[tuple[int, int]]] | None:
        """(payload, start, key -> segment, places) if each key is there once: for loops that need no :meth:`find`."""
        if len(self._files) != 1 or self._files[0][2]:
            return None
        segments, known, _ = self._files[0]
        return segments.payload, segments.start, known, segments.places

    def merged(self, others: Iterable[NamedData]) -> NamedData:
        """This and other named data as one."""
        return NamedData(*self._files, *(file for other in others for file in other._files))

    def find(self, key: str) -> Blob:
        """The blob of a key; FormatError if no file has it, or more than one."""
        places: list[Blob] = []
        for segments, known, more in self._files:
            if key in known:
                places += [segments[index] for index in (known[key], *more.get(key, ()))]
        if not places:
            files = ", ".join(segments.payload.name for segments, _, _ in self._files)
            raise FormatError(
                f"named data {key!r} is in none of: {files or 'no files'} (a data file is given as data=[...])"
            )
        # The same bytes listed twice are no contradiction.
        if any(place != places[0] for place in places):
            found = ", ".join(f"{blob.payload.name} at {blob.offset:#x}" for blob in places)
            raise FormatError(f"named data {key!r} is in more than one place: {found}")
        return places[0]

    def __contains__(self, key: str) -> bool:
        return any(key in known for _, known, _ in self._files)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(key for _, known, _ in self._files for key in known))

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(frozen=True, eq=False)
class Section:
    """One graph's flatbuffer in a payload.

    ``constants`` is the (offset, size) of the header's constant area, None when there is no header: then
    constants are inside the flatbuffer. All offsets are from the payload's start.
    """

    payload: Payload
    offset: int
    nbytes: int
    constants: tuple[int, int] | None
    named: NamedData | None
    #: Where in its container: empty for a file that is nothing else.
    label: str
    #: ``"bare"``, ``"XH00"`` or ``"pte"``.
    container: str

    @property
    def identifier(self) -> bytes:
        """Bytes 4..8 of the flatbuffer."""
        return bytes(memoryview(self.payload)[self.offset + 4 : self.offset + 8])

    @property
    def source(self) -> str:
        """The section as messages name it."""
        return f"{self.payload.name}: {self.label}" if self.label else self.payload.name


# ---- one payload of XNNPACK


def payload_section(
    blob: Blob, *, named: NamedData | None = None, label: str = "", container: str | None = None
) -> Section:
    """The section in a range that holds an XNNPACK payload, with or without header."""
    payload, start, nbytes = blob
    if nbytes < 8:
        raise FormatError(f"need 8 bytes or more for an XNNPACK payload, found {nbytes}", offset=start)
    magic = bytes(memoryview(payload)[start + 4 : start + 8])
    if magic != b"XH00":
        return Section(payload, start, nbytes, None, named, label, container or "bare")
    if nbytes < _PAYLOAD_HEADER_NBYTES:
        raise FormatError(f"need {_PAYLOAD_HEADER_NBYTES} bytes of XH00 header, found {nbytes}", offset=start)
    _, length, at, size, area, area_size = _PAYLOAD_HEADER.unpack_from(memoryview(payload), start + 4)
    if memoryview(payload)[start : start + 4] != bytes(4):
        raise FormatError("need four zero bytes before XH00", offset=start)
    if length != _PAYLOAD_HEADER_NBYTES:
        raise FormatError(
            f"need an XH00 header of {_PAYLOAD_HEADER_NBYTES} bytes, found length {length}", offset=start + 8
        )
    if size < 8:
        raise FormatError(f"need a flatbuffer of 8 bytes or more, found size {size}", offset=start + 14)
    if at < length or at + size > nbytes:
        raise FormatError(
            f"need the flatbuffer between the header and the payload's end at {nbytes:#x}, "
            f"found {size} bytes at {at:#x}",
            offset=start + 10,
        )
    if area < at + size or area + area_size > nbytes:
        raise FormatError(
            f"need the constant data between the flatbuffer's end at {at + size:#x} and the payload's end at "
            f"{nbytes:#x}, found {area_size} bytes at {area:#x}",
            offset=start + 18,
        )
    section = Section(payload, start + at, size, (start + area, area_size), named, label, container or "XH00")
    if section.identifier not in GRAPH_IDENTIFIERS:
        raise FormatError(
            f"need identifier XN00 or XN01 behind an XH00 header, found {section.identifier!r}",
            offset=section.offset + 4,
        )
    return section


# ---- programs


class Tensor(NamedTuple):
    """A tensor of a plan. ``sizes`` are logical; :attr:`shape` is what lies in memory."""

    scalar_type: int
    sizes: tuple[int, ...]
    dim_order: tuple[int, ...]
    storage_offset: int
    data_buffer_idx: int
    #: (arena, offset in it), None for constants and for tensors that the caller places.
    allocation: tuple[int, int] | None
    #: 0 static, 1 sizes are an upper bound, 2 unbounded.
    dynamism: int
    #: Key in a data file, where the bytes are external.
    name: str | None
    external: bool
    mutable_segment: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """NumPy's dtype; FormatError for a scalar type that NumPy lacks."""
        try:
            return SCALAR_TYPES[self.scalar_type]
        except KeyError:
            raise FormatError(f"need a scalar type that NumPy has, found {self.scalar_type}") from None

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes in memory order."""
        return tuple(self.sizes[axis] for axis in self.dim_order)

    @property
    def nbytes(self) -> int:
        count = self.dtype.itemsize
        for size in self.sizes:
            count *= size
        return count

    @property
    def is_constant(self) -> bool:
        return self.allocation is None and (self.data_buffer_idx > 0 or self.external)


class ListValue(NamedTuple):
    """A list of a plan. Items of ``IntList``, ``TensorList`` and ``OptionalTensorList`` are indices of values."""

    kind: str
    items: tuple[Any, ...]


class KernelCall(NamedTuple):
    op_index: int
    args: tuple[int, ...]


class DelegateCall(NamedTuple):
    delegate_index: int
    args: tuple[int, ...]


class MoveCall(NamedTuple):
    move_from: int
    move_to: int


class JumpFalseCall(NamedTuple):
    cond_value_index: int
    destination_instruction: int


class FreeCall(NamedTuple):
    value_index: int


Instruction: TypeAlias = KernelCall | DelegateCall | MoveCall | JumpFalseCall | FreeCall
PlanValue: TypeAlias = Tensor | ListValue | int | float | bool | str | None


class Operator(NamedTuple):
    name: str
    overload: str

    def __str__(self) -> str:
        return f"{self.name}.{self.overload}" if self.overload else self.name


class Delegate(NamedTuple):
    id: str
    blob: Blob
    compile_specs: tuple[tuple[str, bytes], ...]


class Chain(NamedTuple):
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    instructions: tuple[Instruction, ...]


class Values(Sequence[PlanValue]):
    """The values of a plan, decoded when asked for: a delegated program leaves most of them alone."""

    def __init__(self, plan: Table) -> None:
        self._plan = plan
        self._known: dict[int, PlanValue] = {}
        self._count = plan.count("values")

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self[each] for each in range(*index.indices(self._count)))
        if index < 0:
            index += self._count
        if index in self._known:
            return self._known[index]
        found = self._known[index] = _plan_value(self._plan.item("values", index))
        return found

    def kind(self, index: int) -> str:
        """Name of the value's type: ``"Tensor"``, ``"Int"``, ..."""
        found = self._plan.item("values", index).get("val")
        return "Null" if found is None else found.kind


@dataclass(frozen=True, eq=False)
class Plan:
    """One method of a program. All indices in it have been checked."""

    name: str
    values: Values
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    chains: tuple[Chain, ...]
    operators: tuple[Operator, ...]
    delegates: tuple[Delegate, ...]
    #: Bytes per arena; entry 0 is reserved.
    buffer_sizes: tuple[int, ...]


def _plan_value(entry: Table) -> PlanValue:
    value = entry.get("val")
    if value is None:
        return None
    kind = value.kind
    if kind == "Tensor":
        return _tensor(value)
    if kind == "Null":
        return None
    if kind in ("Int", "Bool", "Double"):
        found: PlanValue = value.get({"Int": "int_val", "Bool": "bool_val", "Double": "double_val"}[kind])
        return found
    if kind == "String":
        return str(value.get("string_val") or "")
    return ListValue(kind, value.get("items"))


def _tensor(table: Table) -> Tensor:
    sizes = table.get("sizes")
    order = table.get("dim_order") or tuple(range(len(sizes)))
    if sorted(order) != list(range(len(sizes))):
        raise FormatError(
            f"need each of 0 to {len(sizes) - 1} once in dim_order, found {list(order)}",
            offset=table.at,
            path="Tensor.dim_order",
        )
    if any(size < 0 for size in sizes):
        raise FormatError(f"need sizes from 0 on, found {list(sizes)}", offset=table.at, path="Tensor.sizes")
    if len(sizes) > MAX_TENSOR_RANK:
        raise FormatError(
            f"rank {len(sizes)}, limit {MAX_TENSOR_RANK} (ExecuTorch's own)", offset=table.at, path="Tensor.sizes"
        )
    # NumPy multiplies the others even where one is 0.
    if math.prod(size for size in sizes if size) > MAX_TENSOR_ELEMENTS:
        raise FormatError(
            f"need sizes whose product is at most {MAX_TENSOR_ELEMENTS}, found {list(sizes)}",
            offset=table.at,
            path="Tensor.sizes",
        )
    if not 0 <= table.get("shape_dynamism") <= 2:
        raise FormatError(
            f"need shape_dynamism from 0 to 2, found {table.get('shape_dynamism')}",
            offset=table.at,
            path="Tensor.shape_dynamism",
        )
    place = table.get("allocation_info")
    allocation = None
    if place is not None:
        offset = place.get("memory_offset_high") << 32 | place.get("memory_offset_low")
        allocation = (place.get("memory_id"), offset)
    extra = table.get("extra_tensor_info")
    name, external, segment = None, False, 0
    if extra is not None:
        name, external = extra.get("fully_qualified_name"), extra.get("location") == 1
        segment = extra.get("mutable_data_segments_idx")
    return Tensor(
        table.get("scalar_type"),
        sizes,
        order,
        table.get("storage_offset"),
        table.get("data_buffer_idx"),
        allocation,
        table.get("shape_dynamism"),
        name,
        external,
        segment,
    )


class _Header(NamedTuple):
    """Where a program or data file says that its flatbuffer and segments are."""

    flatbuffer_nbytes: int
    segment_base: int
    #: None when unknown.
    segment_nbytes: int | None


def _program_header(payload: Payload, start: int, nbytes: int) -> _Header:
    view = memoryview(payload)[start : start + nbytes]
    if view[_HEADER_AT : _HEADER_AT + 4] != _PROGRAM_MAGIC:
        return _Header(nbytes, nbytes, None)
    at = start + _HEADER_AT
    if nbytes < _HEADER_AT + 24:
        raise FormatError(f"need {_HEADER_AT + 24} bytes of program with its header, found {nbytes}", offset=at)
    length = struct.unpack_from("<I", view, _HEADER_AT + 4)[0]
    if length < 24 or _HEADER_AT + length > nbytes:
        raise FormatError(
            f"need an eh00 header of 24 bytes or more inside {nbytes} bytes, found length {length}", offset=at + 4
        )
    size, base = struct.unpack_from("<QQ", view, _HEADER_AT + 8)
    data = struct.unpack_from("<Q", view, _HEADER_AT + 24)[0] if length >= 32 else 0
    if not _HEADER_AT + length <= size <= nbytes:
        raise FormatError(
            f"need a program that holds its header and ends inside {nbytes} bytes, found size {size}", offset=at + 8
        )
    if base > nbytes or data > nbytes - base:
        raise FormatError(f"need segments inside {nbytes} bytes, found {data} bytes from {base:#x}", offset=at + 16)
    return _Header(size, base, data or None)


def _data_header(payload: Payload) -> _Header:
    view, nbytes = memoryview(payload), payload.nbytes
    if nbytes < _HEADER_AT + 40 or view[_HEADER_AT : _HEADER_AT + 4] != _DATA_MAGIC:
        raise FormatError("need an FH01 header of 40 bytes in a data file, found none", offset=_HEADER_AT)
    length, at, size, base, data = struct.unpack_from("<IQQQQ", view, _HEADER_AT + 4)
    if length < 40 or _HEADER_AT + length > nbytes:
        raise FormatError(
            f"need an FH01 header of 40 bytes or more inside {nbytes} bytes, found length {length}",
            offset=_HEADER_AT + 4,
        )
    # The flatbuffer is read from byte 0, where its root offset is.
    if not _HEADER_AT + length <= at + size <= nbytes:
        raise FormatError(
            f"need a flatbuffer that ends inside {nbytes} bytes, found {size} bytes at {at:#x}", offset=_HEADER_AT + 8
        )
    if base > nbytes or data > nbytes - base:
        raise FormatError(
            f"need segments inside {nbytes} bytes, found {data} bytes from {base:#x}", offset=_HEADER_AT + 24
        )
    return _Header(at + size, base, data)


def _segments(payload: Payload, start: int, nbytes: int, root: Table, header: _Header) -> Segments:
    base = header.segment_base
    room = nbytes - base if header.segment_nbytes is None else header.segment_nbytes
    places = root.rows("segments", "offset", "size")
    for number, (offset, size) in enumerate(places):
        if offset + size > room:
            raise FormatError(
                f"need a segment inside the {room} bytes of segment data, found {size} bytes at {offset:#x}",
                path=f"{root.kind}.segments[{number}]",
            )
        if size and base < header.flatbuffer_nbytes:
            raise FormatError(
                f"need segments behind the flatbuffer's end at {header.flatbuffer_nbytes:#x}, found them at {base:#x}",
                path=f"{root.kind}.segments[{number}]",
            )
    return Segments(payload, start + base, places)


def _named(root: Table, segments: Segments) -> NamedData:
    rows = root.rows("named_data", "key", "segment_index")
    known = dict(rows)
    count = len(segments)
    for number, (key, index) in enumerate(rows):
        if key is None:
            raise FormatError("need a key, found none", path=f"{root.kind}.named_data[{number}]")
        if index >= count:
            raise FormatError(
                f"need a segment from 0 to {count - 1}, found {index}",
                path=f"{root.kind}.named_data[{number}].segment_index",
            )
    more: dict[str, list[int]] = {}
    if len(known) != len(rows):
        for key, index in rows:
            more.setdefault(key, []).append(index)
    return NamedData((segments, known, more))


def _verify(payload: Payload, offset: int, nbytes: int, key: str, limits: Limits) -> FlatBuffer:
    return verify(
        payload,
        offset,
        nbytes,
        key,
        max_depth=limits.max_depth,
        max_tables=limits.max_tables,
        max_shared=limits.max_shared,
    )


class DataFile:
    """A ``.ptd``: blobs by name beside a program.

    Attributes
    ----------
    payload : Payload
    named_data : NamedData
    layouts : dict of str to (int, tuple, tuple)
        Scalar type, sizes and dim order of those blobs that are tensors.
    """

    def __init__(self, source: Source | Payload, *, limits: Limits = DEFAULT_LIMITS) -> None:
        payload = Payload.open(source)
        magic = _magic(payload, 0, payload.nbytes)
        if magic != b"FT01":
            raise FormatError(
                f"need a data file (FT01 at byte 4), {payload.name} is {NAMES.get(magic, 'something else')}", offset=4
            )
        header = _data_header(payload)
        buffer = _verify_data(payload, header.flatbuffer_nbytes, limits)
        root = buffer.root
        segments = _segments(payload, 0, payload.nbytes, root, header)
        self.payload = payload
        self.named_data = _named(root, segments)
        self.layouts: dict[str, tuple[int, tuple[int, ...], tuple[int, ...]]] = {}
        if buffer.schema.key == "flat_tensor":
            for key, layout in root.rows("named_data", "key", "tensor_layout"):
                if layout is not None:
                    self.layouts[key] = (layout.get("scalar_type"), layout.get("sizes"), layout.get("dim_order"))


def _verify_data(payload: Payload, nbytes: int, limits: Limits) -> FlatBuffer:
    """The flatbuffer of a data file by whichever of the two layouts fits.

    The older layout has five slots and a number in slot 1, where the newer one refers to a vector. A
    file that verifies as the newer is taken for it unless slots 3 and 4 are in use.
    """
    older = _verify_layout(payload, nbytes, "flat_tensor_v06", limits)
    if isinstance(older, FlatBuffer) and (older.root.has("segments") or older.root.has("named_data")):
        return older
    newer = _verify_layout(payload, nbytes, "flat_tensor", limits)
    if isinstance(newer, FlatBuffer):
        return newer
    if isinstance(older, FlatBuffer):
        return older
    raise newer


def _verify_layout(payload: Payload, nbytes: int, key: str, limits: Limits) -> FlatBuffer | FormatError:
    try:
        return _verify(payload, 0, nbytes, key, limits)
    except FormatError as error:
        return error


class ProgramFile:
    """An ExecuTorch program: verified tables, segments and named data.

    Attributes
    ----------
    payload : Payload
    version : int
    segments : sequence of Blob
    named_data : NamedData
        Of the program and of the data files given with it.
    plans : tuple of Plan
        The methods, in the file's order.
    """

    def __init__(
        self,
        source: Source | Payload,
        *,
        data: DataArgument = (),
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        payload = Payload.open(source)
        start, nbytes = 0, payload.nbytes
        magic = _magic(payload, start, nbytes)
        if magic == b"BP08":
            start, nbytes = _bundled_program(payload, limits)
            magic = _magic(payload, start, nbytes)
        if magic != b"ET12":
            raise FormatError(
                f"need a program (ET12 at byte 4), {payload.name} is {NAMES.get(magic, 'something else')}",
                offset=start + 4,
            )
        self.payload = payload
        self.offset = start
        self.limits = limits
        header = _program_header(payload, start, nbytes)
        self.flatbuffer = _verify(payload, start, header.flatbuffer_nbytes, "program", limits)
        root = self.flatbuffer.root
        self.version: int = root.get("version")
        self.segments = _segments(payload, start, nbytes, root, header)
        self.data_files = data_files(data, limits)
        self.named_data = _named(root, self.segments).merged(file.named_data for file in self.data_files)
        self._constants = self._subsegment(root.get("constant_segment"), "Program.constant_segment")
        self._mutable = [
            self._subsegment(table, f"Program.mutable_data_segments[{number}]")
            for number, table in enumerate(root.get("mutable_data_segments"))
        ]

    def _subsegment(self, table: Table | None, path: str) -> tuple[Blob, tuple[int, ...]] | None:
        if table is None:
            return None
        index, offsets = table.get("segment_index"), table.get("offsets")
        # The exporter leaves an empty table where there is nothing.
        if not offsets:
            return None
        if index >= len(self.segments):
            raise FormatError(
                f"need a segment from 0 to {len(self.segments) - 1}, found {index}", path=f"{path}.segment_index"
            )
        segment = self.segments[index]
        for number, offset in enumerate(offsets):
            if offset > segment.nbytes:
                raise FormatError(
                    f"need an offset inside the segment's {segment.nbytes} bytes, found {offset:#x}",
                    path=f"{path}.offsets[{number}]",
                )
        return segment, offsets

    @cached_property
    def plans(self) -> tuple[Plan, ...]:
        return tuple(
            self._plan(table, f"Program.execution_plan[{number}]")
            for number, table in enumerate(self.flatbuffer.root.get("execution_plan"))
        )

    def segment(self, index: int) -> memoryview:
        """The bytes of a segment."""
        blob: Blob = self.segments[index]
        return blob.data

    def named(self, key: str) -> memoryview:
        """The bytes of named data, from the program or its data files."""
        return self.named_data.find(key).data

    def plan(self, method: str | None = None) -> Plan:
        """A method by its name; without a name, the only one."""
        names = [plan.name for plan in self.plans]
        if method is None:
            if not names:
                raise FormatError(f"need a method, {self.payload.name} has none", path="Program.execution_plan")
            if len(names) != 1:
                raise ArgumentError(f"need method=, one of {', '.join(map(repr, names))}")
            return self.plans[0]
        if names.count(method) != 1:
            raise ArgumentError(f"need a method of {', '.join(map(repr, names)) or 'none'}, found {method!r}")
        return self.plans[names.index(method)]

    def constant(self, tensor: Tensor) -> Blob:
        """Where the bytes of a constant tensor are. Their number follows from dtype and sizes."""
        need = tensor.nbytes
        if tensor.external:
            if not tensor.name:
                raise FormatError("an external tensor needs a name, found none")
            blob = self.named_data.find(tensor.name)
            room, offset = blob.nbytes, blob.offset
        elif self._constants is not None:
            segment, offsets = self._constants
            if not 0 < tensor.data_buffer_idx < len(offsets):
                raise FormatError(
                    f"need a constant from 1 to {len(offsets) - 1}, found {tensor.data_buffer_idx}",
                    path="Tensor.data_buffer_idx",
                )
            within = offsets[tensor.data_buffer_idx]
            room, offset = segment.nbytes - within, segment.offset + within
            blob = segment
        else:
            root = self.flatbuffer.root
            count = root.count("constant_buffer")
            if not 0 < tensor.data_buffer_idx < count:
                raise FormatError(
                    f"need a constant from 1 to {count - 1}, found {tensor.data_buffer_idx}",
                    path="Tensor.data_buffer_idx",
                )
            offset, room = root.item("constant_buffer", tensor.data_buffer_idx).span("storage") or (0, 0)
            blob = Blob(self.payload, offset, room)
        if tensor.storage_offset:
            raise FormatError(f"need a constant without storage_offset, found {tensor.storage_offset}")
        if need > room:
            raise FormatError(
                f"need {need} bytes for a constant of sizes {list(tensor.sizes)}, found {room}", offset=offset
            )
        return Blob(blob.payload, offset, need)

    def initial(self, tensor: Tensor) -> Blob | None:
        """Where the first content of a mutable tensor is; None if it has none."""
        if tensor.allocation is None or not tensor.mutable_segment:
            return None
        arena, need = tensor.allocation[0], tensor.nbytes
        entry = self._mutable[arena] if arena < len(self._mutable) else None
        if entry is None or tensor.mutable_segment >= len(entry[1]):
            raise FormatError(
                f"need content {tensor.mutable_segment} of arena {arena} in Program.mutable_data_segments"
            )
        segment, offsets = entry
        within = offsets[tensor.mutable_segment]
        if need > segment.nbytes - within:
            raise FormatError(
                f"need {need} bytes for a tensor of sizes {list(tensor.sizes)}, found {segment.nbytes - within}",
                offset=segment.offset + within,
            )
        return Blob(segment.payload, segment.offset + within, need)

    def section(self, plan: Plan, index: int) -> Section:
        """The graph of a plan's delegate."""
        delegate = plan.delegates[index]
        if delegate.id != XNNPACK_BACKEND:
            raise FormatError(
                f"need a delegate of {XNNPACK_BACKEND}, delegate {index} of method {plan.name!r} is of {delegate.id}"
            )
        return payload_section(
            delegate.blob, named=self.named_data, label=f"method {plan.name!r}, delegate {index}", container="pte"
        )

    def sections(self) -> list[Section]:
        """The graph of every XNNPACK delegate, method by method."""
        return [
            self.section(plan, index)
            for plan in self.plans
            for index, delegate in enumerate(plan.delegates)
            if delegate.id == XNNPACK_BACKEND
        ]

    # -- plans

    def _plan(self, table: Table, path: str) -> Plan:
        values = Values(table)
        operators = tuple(
            Operator(name or "", overload or "") for name, overload in table.rows("operators", "name", "overload")
        )
        delegates = tuple(
            self._delegate(each, f"{path}.delegates[{number}]") for number, each in enumerate(table.get("delegates"))
        )
        chains = tuple(
            Chain(
                _indices(chain.get("inputs"), len(values), f"{path}.chains[{number}].inputs"),
                _indices(chain.get("outputs"), len(values), f"{path}.chains[{number}].outputs"),
                _instructions(chain, len(values), len(operators), len(delegates), f"{path}.chains[{number}]"),
            )
            for number, chain in enumerate(table.get("chains"))
        )
        return Plan(
            table.get("name") or "",
            values,
            _indices(table.get("inputs"), len(values), f"{path}.inputs"),
            _indices(table.get("outputs"), len(values), f"{path}.outputs"),
            chains,
            operators,
            delegates,
            table.get("non_const_buffer_sizes"),
        )

    def _delegate(self, table: Table, path: str) -> Delegate:
        processed = table.get("processed")
        if processed is None:
            raise FormatError("need a reference to the delegate's data, found none", path=f"{path}.processed")
        location, index = processed.get("location"), processed.get("index")
        if location == 1:
            count = len(self.segments)
        elif location == 0:
            count = self.flatbuffer.root.count("backend_delegate_data")
        else:
            raise FormatError(f"need location 0 (inline) or 1 (segment), found {location}", path=f"{path}.processed")
        if index >= count:
            raise FormatError(f"need a place from 0 to {count - 1}, found {index}", path=f"{path}.processed.index")
        if location == 1:
            blob = self.segments[index]
        else:
            offset, nbytes = self.flatbuffer.root.item("backend_delegate_data", index).span("data") or (0, 0)
            blob = Blob(self.payload, offset, nbytes)
        specs = []
        for entry in table.get("compile_specs"):
            span = entry.span("value")
            specs.append((entry.get("key") or "", bytes(Blob(self.payload, *span).data) if span else b""))
        return Delegate(table.get("id") or "", blob, tuple(specs))


def _indices(found: tuple[int, ...], count: int, path: str) -> tuple[int, ...]:
    for number, index in enumerate(found):
        if not 0 <= index < count:
            raise FormatError(f"need the index of one of {count} values, found {index}", path=f"{path}[{number}]")
    return found


def _index(found: int, count: int, what: str, path: str) -> int:
    if not 0 <= found < count:
        raise FormatError(f"need the index of one of {count} {what}, found {found}", path=path)
    return found


def _instructions(chain: Table, values: int, operators: int, delegates: int, path: str) -> tuple[Instruction, ...]:
    made: list[Instruction] = []
    rows = chain.rows("instructions", "instr_args")
    for number, (call,) in enumerate(rows):
        where = f"{path}.instructions[{number}]"
        if call is None:
            raise FormatError("need an instruction, found none", path=where)
        kind = call.kind
        if kind == "KernelCall":
            made.append(
                KernelCall(
                    _index(call.get("op_index"), operators, "operators", f"{where}.op_index"),
                    _indices(call.get("args"), values, f"{where}.args"),
                )
            )
        elif kind == "DelegateCall":
            made.append(
                DelegateCall(
                    _index(call.get("delegate_index"), delegates, "delegates", f"{where}.delegate_index"),
                    _indices(call.get("args"), values, f"{where}.args"),
                )
            )
        elif kind == "MoveCall":
            made.append(
                MoveCall(
                    _index(call.get("move_from"), values, "values", f"{where}.move_from"),
                    _index(call.get("move_to"), values, "values", f"{where}.move_to"),
                )
            )
        elif kind == "JumpFalseCall":
            made.append(
                JumpFalseCall(
                    _index(call.get("cond_value_index"), values, "values", f"{where}.cond_value_index"),
                    _index(
                        call.get("destination_instruction"),
                        len(rows) + 1,
                        "instructions",
                        f"{where}.destination_instruction",
                    ),
                )
            )
        else:
            made.append(FreeCall(_index(call.get("value_index"), values, "values", f"{where}.value_index")))
    return tuple(made)


def _magic(payload: Payload, start: int, nbytes: int) -> bytes:
    if nbytes < 8:
        raise FormatError(f"need 8 bytes or more, {payload.name} has {nbytes}", offset=start)
    return bytes(memoryview(payload)[start + 4 : start + 8])


def _bundled_program(payload: Payload, limits: Limits) -> tuple[int, int]:
    """(offset, size) of the program inside a bundled one."""
    span = _verify(payload, 0, payload.nbytes, "bundled", limits).root.span("program")
    if span is None:
        raise FormatError("need a program in the bundle, found none", path="BundledProgram.program")
    return span


# ---- any payload


def data_files(data: DataArgument, limits: Limits = DEFAULT_LIMITS) -> tuple[DataFile, ...]:
    """The data files named by a ``data=`` argument: one source or several."""
    several: Iterable[Source | Payload | DataFile] = data if isinstance(data, (list, tuple)) else (data,)
    return tuple(each if isinstance(each, DataFile) else DataFile(each, limits=limits) for each in several)


def sniff(payload: Payload) -> bytes:
    """Bytes 4..8 if they say what the payload is, else ``b""``: then only the seed dialect is left."""
    magic = _magic(payload, 0, payload.nbytes)
    return magic if magic in NAMES else b""


def sections(payload: Payload, *, data: DataArgument = (), limits: Limits = DEFAULT_LIMITS) -> list[Section]:
    """All graphs in a payload, in the file's order. What it is decides bytes 4..8, never its name."""
    magic = sniff(payload)
    if magic in (b"ET12", b"BP08"):
        return ProgramFile(payload, data=data, limits=limits).sections()
    if magic == b"FT01":
        raise FormatError(
            f"{payload.name} is a data file (FT01): it holds named data and no graph; give it as data=[...]", offset=4
        )
    files = data_files(data, limits)
    named = NamedData().merged(file.named_data for file in files) if files else None
    return [payload_section(Blob(payload, 0, payload.nbytes), named=named)]
