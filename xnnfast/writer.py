"""From a graph in our own form to bytes: a flatbuffer of any dialect, bare or behind an ``XH00`` header.

In comes a Graph, or Parts that nobody has checked; out goes one ``bytes`` object, or a file. What a
field is called and which slot it has is read from the schema tables; this module adds what they mean.

Constants are never inside the part that is encoded: they follow it, so that hundreds of megabytes
go from where they are straight into the file.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import stat
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ._generated import schema as _schema
from ._graph import Graph
from .dialects import DIALECTS, Dialect
from .errors import ArgumentError, GraphError, UnsupportedError
from .quantization import PerBlock, PerChannel, PerTensor, PerToken, bf16_to_f32

if TYPE_CHECKING:
    from typing import TypeAlias

    from ._graph import Constant, Node, Value

    Piece: TypeAlias = bytes | memoryview
    Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

__all__ = ["Parts", "encode", "to_bytes", "write"]

#: Nested data of many types.
schema: Any = _schema

#: An id that names nothing. It must be stored: an absent id reads as 0, which is a value's number.
NO_ID = 0xFFFFFFFF

#: The commit that the seed's own writer stored. Readers of the time told files apart by nothing else.
SEED_VERSION = "ae108ef49aa5623b896fc93d4298c49d1750d9ba"

#: Kernels may read this far past the last byte of any constant.
SLACK = 16
#: Constants start at a multiple of this, counted from the start of the payload.
ALIGNMENT = 16

#: magic, header length, flatbuffer offset and size, constant data offset and size.
HEADER = struct.Struct("<4x4sHIIIQ")
HEADER_ROOM = 32

#: A flatbuffer's offsets are 32 bits and its verifiers stop at 31.
FLATBUFFER_LIMIT = 2**31 - 1

INPUT, OUTPUT = 1, 2


#: Dialect -> containers it is written in, the first where none is asked for, and the version text.
_RULES = {"seed": (("bare",), SEED_VERSION), "xn00": (("bare", "XH00"), "0"), "xn01": (("XH00",), "0")}


class Parts(NamedTuple):
    """The parts of a graph as they are to be stored. Unlike a Graph they may be wrong."""

    values: Sequence[Value]
    nodes: Sequence[Node]
    inputs: Sequence[Value]
    outputs: Sequence[Value]


def to_bytes(graph: Graph | Parts, *, dialect: str = "xn01", container: str | None = None,
             scales: str | None = None, version: str | None = None) -> bytes:
    """The graph as a file's bytes.

    Parameters
    ----------
    graph : Graph or Parts
        Parts are stored as they are. A Graph's external ids are renumbered where the dialect would
        otherwise give its inputs or outputs another order.
    dialect : "xn01", "xn00" or "seed"
    container : "XH00" or "bare", optional
        xn01 always has the header; the seed never; xn00 has none unless asked for.
    scales : "inline" or "constant", optional
        Where scales of channels and blocks go: into the value's table, or among the constants.
        Left out, channels are inline and blocks are constants.
    version : str, optional
        The version text; left out, what the dialect's own writers store.

    Raises
    ------
    UnsupportedError
        The dialect has no word for something in the graph, such as any operator but add in the seed.
    """
    return b"".join(_pieces(graph, dialect, container, scales, version))


def write(target: str | os.PathLike[str] | IO[bytes], graph: Graph | Parts, *, dialect: str = "xn01",
          container: str | None = None, scales: str | None = None, version: str | None = None) -> int:
    """Writes the graph to a path or an open binary file; the number of bytes written.

    A path gets its content at once and whole: the bytes go to a temporary file beside it, which is
    flushed to disk and renamed. Constants are not copied in memory. The other parameters are those
    of :func:`to_bytes`.
    """
    pieces = _pieces(graph, dialect, container, scales, version)
    if not isinstance(target, (str, os.PathLike)):
        if not callable(getattr(target, "write", None)):
            raise ArgumentError(f"need a path or a file opened for writing bytes, found {type(target).__name__}")
        return _stream(target, pieces)
    # A link stays a link: its target is replaced.
    path = os.path.realpath(target)
    if os.path.exists(path) and not stat.S_ISREG(os.stat(path).st_mode):
        raise ArgumentError(f"need the path of a regular file, found {path}, which a rename would replace; "
                            "give an open file instead")
    folder, name = os.path.split(path)
    partial = os.path.join(folder, f".{name}.{secrets.token_hex(4)}.part")
    try:
        with open(partial, "xb") as file:
            size = _stream(file, pieces)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)
        raise
    # Without this the rename itself may be lost when the machine stops.
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    return size


def _stream(file: IO[bytes], pieces: Iterable[Piece]) -> int:
    size = 0
    for piece in pieces:
        rest = memoryview(piece)
        size += rest.nbytes
        while rest.nbytes:
            # Unbuffered files may take less than they are given.
            written = file.write(rest)
            rest = rest[rest.nbytes if written is None else written:]
    return size


def _pieces(graph: Graph | Parts, dialect: str, container: str | None, scales: str | None,
            version: str | None) -> list[Piece]:
    """The file as a list of buffers, the constants among them uncopied."""
    if dialect not in _RULES:
        raise ArgumentError(f"need a dialect of {', '.join(_RULES)}, found {dialect!r}")
    containers, usual = _RULES[dialect]
    if container is None:
        container = containers[0]
    if container not in containers:
        raise ArgumentError(f"need container {' or '.join(map(repr, containers))} for dialect {dialect}, found "
                            f"{container!r}")
    if scales not in (None, "inline", "constant"):
        raise ArgumentError(f"need scales 'inline' or 'constant', found {scales!r}")
    plan = _Plan(graph, DIALECTS[dialect], container, scales)
    return plan.pieces(usual if version is None else version)


# ---- structure: nested dictionaries to a flatbuffer


class _After(NamedTuple):
    """Stands for a vector that follows the encoded part, at this distance from its end."""

    distance: int


_SIZES = {"bool": 1, "i8": 1, "u8": 1, "i16": 2, "u16": 2, "i32": 4, "u32": 4, "i64": 8, "u64": 8, "f32": 4, "f64": 8}


def encode(tree: Mapping[str, Any], *, schema_key: str = "xnn", identifier: bytes | None = None,
           table: str | None = None) -> bytes:
    """A flatbuffer made of nested dictionaries: table field -> value, under the schema's names.

    A union is ``field: (member, table)``; its type field is filled in. A field that is left out is
    absent, a scalar that is given is stored even where it equals the default. Nothing is checked
    but names and the ranges of numbers, so that files can be made that no graph would give.
    """
    return _Encoder(schema_key).finish(tree, table or schema.ROOTS[schema_key], identifier)


class _Encoder:
    """One generic writer of tables for all the schemas."""

    def __init__(self, schema_key: str) -> None:
        try:
            import flatbuffers
            from flatbuffers import number_types
        except ImportError as error:
            raise ImportError("writing a graph needs the package flatbuffers, which reading does not; "
                              "pip install flatbuffers") from error
        self.tables = schema.TABLES[schema_key]
        self.unions = {name: {member: (ordinal, table) for ordinal, member, table in members}
                       for name, members in schema.UNIONS[schema_key].items()}
        self.aligned = schema.FORCE_ALIGN[schema_key]
        self.builder = flatbuffers.Builder(1 << 16)
        # The end must be as aligned as the constants that may follow it; padding is counted from there.
        self.builder.Prep(ALIGNMENT, 0)
        self.scalars = {
            "bool": number_types.BoolFlags, "i8": number_types.Int8Flags, "u8": number_types.Uint8Flags,
            "i16": number_types.Int16Flags, "u16": number_types.Uint16Flags, "i32": number_types.Int32Flags,
            "u32": number_types.Uint32Flags, "i64": number_types.Int64Flags, "u64": number_types.Uint64Flags,
            "f32": number_types.Float32Flags, "f64": number_types.Float64Flags,
        }

    def finish(self, tree: Mapping[str, Any], table: str, identifier: bytes | None) -> bytes:
        self.builder.Finish(self.table(table, tree), file_identifier=identifier)
        return bytes(self.builder.Output())

    def table(self, name: str, fields: Mapping[str, Any]) -> int:
        """Writes a table with all that hangs on it; where it is, in the builder's terms."""
        rows = self.tables[name]
        names = {row[0] for row in rows}
        for field in fields:
            if field not in names:
                raise GraphError(f"table {name} has no field {field}")
        # Tables don't nest in the bytes: what is referred to comes first.
        entries: list[tuple[int, int, str | None, Any, str]] = []
        for field, slot, kind, scalar, _, target in rows:
            value = fields.get(field)
            if value is None:
                continue
            if kind == "scalar":
                entries.append((_SIZES[scalar], slot, scalar, value, field))
                continue
            entries.append((4, slot, None, self.reference(name, field, kind, scalar, target, value), field))
            if kind == "union" and field + "_type" not in fields:
                # The type's slot stands before the union's.
                entries.append((1, slot - 1, "u8", self.unions[target][value[0]][0], field + "_type"))
        builder = self.builder
        builder.StartObject(len(rows))
        # From wide to narrow, which needs the least padding.
        for _, slot, scalar, value, field in sorted(entries, key=lambda entry: -entry[0]):
            if scalar is None:
                builder.PrependUOffsetTRelative(value)
            else:
                self.scalar(name, field, scalar, value)
            builder.Slot(slot)
        return int(builder.EndObject())

    def scalar(self, table: str, field: str, scalar: str, value: Any) -> None:
        try:
            if scalar in ("f32", "f64"):
                value = float(value)
                if scalar == "f32" and math.isfinite(value):
                    struct.pack("<f", value)
            self.builder.Prepend(self.scalars[scalar], value)
        except (TypeError, ValueError, OverflowError, struct.error):
            raise GraphError(f"need a number that fits {scalar} for {table}.{field}, found {value!r}") from None

    def reference(self, table: str, field: str, kind: str, scalar: str, target: str, value: Any) -> int:
        """Writes what a field refers to."""
        if isinstance(value, _After):
            return -value.distance
        if kind == "table":
            return self.table(target, value)
        if kind == "union":
            member, fields = value
            return self.table(self.unions[target][member][1], fields)
        if kind == "string":
            return int(self.builder.CreateString(value))
        if kind == "vector_scalar":
            return self.vector(table, field, scalar, value)
        if kind == "vector_table":
            places = [self.table(target, item) for item in value]
        else:
            places = [int(self.builder.CreateString(item)) for item in value]
        self.builder.StartVector(4, len(places), 4)
        for place in reversed(places):
            self.builder.PrependUOffsetTRelative(place)
        return int(self.builder.EndVector())

    def vector(self, table: str, field: str, scalar: str, value: Any) -> int:
        size = _SIZES[scalar]
        dtype = np.dtype(f"<{scalar[0]}{size}") if scalar != "bool" else np.dtype("?")
        if isinstance(value, (bytes, bytearray, memoryview)):
            array = np.frombuffer(value, dtype)
        elif dtype.kind == "f":
            array = np.asarray(value, dtype)
        else:
            wide = np.asarray(list(map(int, value)), object)
            limits = np.iinfo(dtype) if dtype.kind != "b" else None
            for item in wide:
                if limits is not None and not limits.min <= item <= limits.max:
                    raise GraphError(f"need numbers that fit {scalar} for {table}.{field}, found {item}")
            array = wide.astype(dtype)
        aligned = self.aligned.get((table, field))
        if aligned:
            # Afterwards the vector's own alignment asks for no more.
            self.builder.Prep(aligned, array.nbytes)
        return int(self.builder.CreateNumpyVector(array))


# ---- meaning: a graph to nested dictionaries and the constants that follow them


class _Plan:
    """Decides numbers and places for one file."""

    def __init__(self, graph: Graph | Parts, dialect: Dialect, container: str, scales: str | None) -> None:
        self.graph = graph
        self.dialect = dialect.name
        self.rule = dialect
        self.container = container
        self.scales = scales
        self.numbers = {name: number for number, name in dialect.datatypes.items()}
        self.kinds = {member: table for _, member, table in schema.UNIONS[dialect.key]["XNodeUnion"]}
        # Constants in the order of their numbers, from 1; a buffer that several values use has one number.
        self.constants: list[memoryview] = []
        self.known: dict[int, int] = {}
        self.alive: list[Any] = []

    def pieces(self, version: str) -> list[Piece]:
        if self.dialect == "seed" and not re.fullmatch("[0-9a-f]{40}", version):
            raise ArgumentError(f"need 40 hexadecimal digits as the version of a seed file, found {version!r}")
        graph = self.graph
        external = self.external_ids()
        needed = self.constant_sizes()
        xvalues = [self.value(value, external, needed) for value in graph.values]
        tree: dict[str, Any] = {
            "version": version,
            "xnodes": [self.node(node) for node in graph.nodes],
            "xvalues": xvalues,
            "num_externs": len(set(external.values())),
            "input_ids": [value.id for value in graph.inputs],
            "output_ids": [value.id for value in graph.outputs],
        }
        return self.bare(tree) if self.container == "bare" else self.headed(tree)

    def bare(self, tree: dict[str, Any]) -> list[Piece]:
        """The constants are vectors of the flatbuffer, laid behind the part that is encoded."""
        buffers: list[dict[str, Any]] = [{}]
        tail: list[Piece] = []
        place = 0
        for data in self.constants:
            # The vector's length stands in the four bytes before its first, aligned one.
            start = _align(place + 4)
            buffers.append({"storage": _After(start - 4)})
            tail += [bytes(start - 4 - place), struct.pack("<I", data.nbytes), data]
            place = start + data.nbytes
        if self.constants:
            tail.append(bytes(SLACK + -place % ALIGNMENT))
        tree["constant_buffer"] = buffers
        tree["mem_buffer_sizes"] = [0] + [data.nbytes for data in self.constants]
        # Before the encoding, whose offsets would not fit.
        self.limit(place)
        flatbuffer = encode(tree, schema_key=self.rule.key, identifier=self.rule.identifier)
        self.limit(len(flatbuffer) + sum(map(len, tail)))
        return [flatbuffer, *tail]

    def limit(self, size: int) -> None:
        if size > FLATBUFFER_LIMIT:
            other = "" if self.dialect == "seed" else "; container 'XH00' keeps them outside"
            raise UnsupportedError(f"a flatbuffer holds at most {FLATBUFFER_LIMIT} bytes, with its constants this "
                                   f"one needs {size}{other}")

    def headed(self, tree: dict[str, Any]) -> list[Piece]:
        """The constants follow the flatbuffer; a table says where in that area each one is."""
        entries = [{"offset": 0, "size": 0}]
        tail: list[Piece] = []
        place = 0
        for data in self.constants:
            start = _align(place)
            entries.append({"offset": start, "size": data.nbytes})
            tail += [bytes(start - place), data]
            place = start + data.nbytes
        if self.constants:
            padding = SLACK + -place % ALIGNMENT
            tail.append(bytes(padding))
            place += padding
        tree["constant_data"] = entries
        flatbuffer = encode(tree, schema_key=self.rule.key, identifier=self.rule.identifier)
        start = HEADER_ROOM + _align(len(flatbuffer))
        header = HEADER.pack(b"XH00", HEADER.size, HEADER_ROOM, len(flatbuffer), start, place)
        return [header.ljust(HEADER_ROOM, b"\0"), flatbuffer.ljust(start - HEADER_ROOM, b"\0"), *tail]

    # -- ids

    def external_ids(self) -> dict[int, int]:
        """Value id -> external id. Parts keep theirs; a Graph keeps them if they give its order."""
        graph = self.graph
        own = {value.id: value.external_id for value in graph.values if value.external_id is not None}
        if isinstance(graph, Parts):
            return own
        inputs = [value.id for value in graph.inputs]
        outputs = [value.id for value in graph.outputs]

        def ordered(ids: Mapping[int, int]) -> bool:
            # The seed has lists for the order.
            return self.dialect == "seed" or all(numbers == sorted(numbers) for numbers in (
                [ids[value] for value in group] for group in (inputs, outputs)))

        names = list(dict.fromkeys(inputs + outputs))
        if set(own) == set(names) and set(own.values()) == set(range(len(names))) and ordered(own):
            return own
        ids = {value: number for number, value in enumerate(names)}
        if not ordered(ids):
            raise UnsupportedError(f"dialect {self.dialect} orders inputs and outputs by one numbering, which can't "
                                   f"give inputs {inputs} and outputs {outputs} both; dialect seed can, and a copy "
                                   "of the value that is both would do")
        return ids

    # -- constants

    def constant_sizes(self) -> dict[int, int]:
        """id of a Constant -> bytes that any of its values needs; the rest of a larger buffer is left out."""
        sizes: dict[int, int] = {}
        for value in self.graph.values:
            if value.constant is not None:
                sizes[id(value.constant)] = max(sizes.get(id(value.constant), 0), value.nbytes)
        return sizes

    def constant(self, value: Value, needed: Mapping[int, int]) -> int:
        """Number of the value's constant; 0 if it has none."""
        if value.constant is None:
            return 0
        return self.number(value.constant, value.constant.data[:needed[id(value.constant)]])

    def number(self, owner: Constant | Array, data: memoryview) -> int:
        if id(owner) not in self.known:
            self.constants.append(data)
            # An id stays taken for as long as its owner lives.
            self.alive.append(owner)
            self.known[id(owner)] = len(self.constants)
        return self.known[id(owner)]

    # -- values

    def value(self, value: Value, external: Mapping[int, int], needed: Mapping[int, int]) -> dict[str, Any]:
        number = self.numbers.get(value.datatype)
        if number is None or (self.dialect == "seed" and value.datatype not in ("fp32", "fp16")):
            raise UnsupportedError(f"dialect {self.dialect} can't hold value {value.id} of datatype {value.datatype}"
                                   + ("; it has fp32 and fp16" if self.dialect == "seed" else ""))
        fields: dict[str, Any] = {
            "datatype": number,
            "num_dims": len(value.shape),
            "dims": value.shape,
            "constant_buffer_idx": self.constant(value, needed),
            "external_id": external.get(value.id, NO_ID),
            "flags": (INPUT if value.is_input else 0) | (OUTPUT if value.is_output else 0),
            "id_out": value.id,
        }
        if value.dq_datatype is not None:
            if self.dialect != "xn00":
                raise UnsupportedError(f"dialect {self.dialect} has no dq_datatype, which value {value.id} has; "
                                       "dialect xn00 does")
            fields["dq_datatype"] = self.numbers[value.dq_datatype]
        union = next(field for field, _, kind, *_ in schema.TABLES[self.rule.key]["XValue"] if kind == "union")
        if value.quantization is None:
            return {union: ("XNNTensorValue", fields)}
        if self.dialect == "seed":
            raise UnsupportedError(f"dialect seed has no quantization, which value {value.id} has")
        return {union: ("XNNQuantizedTensorValue",
                        {"tensor_value": fields, "quant_params": self.quantization(value)})}

    def quantization(self, value: Value) -> tuple[str, dict[str, Any]]:
        params = value.quantization
        if isinstance(params, PerTensor):
            return "PerTensorQuant", {"scale": params.scale, "zero_point": params.zero_point}
        if isinstance(params, PerToken):
            return "PerTokenDynamicQuant", {"num_nonbatch_dims": params.num_nonbatch_dims}
        if not isinstance(params, (PerChannel, PerBlock)):
            raise GraphError(f"need PerTensor, PerChannel, PerBlock or PerToken as the quantization of value "
                             f"{value.id}, found {type(params).__name__}", value=value.id)
        fields: dict[str, Any] = {"channel_dim": params.axis, "num_scales": len(params.scales)}
        if isinstance(params, PerChannel):
            if self.scales == "constant":
                fields["scale_buffer_idx"] = self.number(params.scales, _little(params.scales, "<f4"))
            else:
                fields |= {"scale": params.scales, "scale_buffer_idx": 0}
            return "PerChannelQuant", fields
        fields["group_size"] = params.block_size
        if self.scales == "inline":
            # Widened they are exact, and a reader's narrowing gives these very bits again.
            fields |= {"scale": bf16_to_f32(params.scales), "scale_buffer_idx": 0}
        else:
            fields["scale_buffer_idx"] = self.number(params.scales, _little(params.scales, "<u2"))
        return "PerChannelGroupQuant", fields

    # -- nodes

    def node(self, node: Node) -> dict[str, Any]:
        table = self.kinds.get(node.op.kind)
        if table is None:
            raise UnsupportedError(f"dialect {self.dialect} has no node for {node.where}"
                                   + ("; add is its only operator" if self.dialect == "seed" else ""))
        ids = dict(zip(node.op.inputs, node.inputs)) | dict(zip(node.op.outputs, node.outputs))
        rows = schema.TABLES[self.rule.key][table]
        fields: dict[str, Any] = {}
        for field, _, kind, *_ in rows:
            if field == "flags":
                fields[field] = node.flags
            elif field == "num_dims":
                vector = next(name for name, _, other, *_ in rows if other == "vector_scalar")
                fields[field] = len(node.attrs[vector])
            elif field in ids:
                fields[field] = NO_ID if ids[field] is None else ids[field]
            elif field in node.attrs:
                fields[field] = node.attrs[field]
            elif field in node.op.attrs or kind != "scalar":
                raise GraphError(f"{node.where} lacks {field}", node=node.index)
            else:
                # A field for another kind that shares the table.
                fields[field] = NO_ID if field.endswith("_id") else 0
        names = [field for field, _, kind, *_ in schema.TABLES[self.rule.key]["XNode"] if kind == "union"]
        entry: dict[str, Any] = {names[0]: (node.op.kind, fields), "debug_handle": node.debug_handle}
        if node.clamp is not None:
            if self.dialect == "seed":
                raise UnsupportedError(f"dialect seed has no limits of outputs, which {node.where} has")
            entry["output_min_max"] = {"output_min": node.clamp[0], "output_max": node.clamp[1]}
        return entry


def _align(place: int) -> int:
    return -(-place // ALIGNMENT) * ALIGNMENT


def _little(array: Array, dtype: str) -> memoryview:
    return np.ascontiguousarray(array, dtype).data.cast("B")
