# cython: language_level=3
"""From a section to a Graph: values, nodes and constants decoded in one pass over a verified flatbuffer.

In comes a Section; out comes Decoded, whose parts a caller may still exchange before the Graph is made.
Constants stay where they are in the payload as far as XNNPACK can read them there.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_New, PyTuple_SET_ITEM
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport int32_t, int64_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy

from ._flatbuf cimport (
    FlatBuffer, get_f32, get_i16, get_i32, get_u8, get_u32, get_u64, load_f32, load_u32, reference_at,
)
from ._graph cimport Constant, Graph, Node, Value
from ._payload cimport AlignedBytes, Payload

import re
import types

import numpy as np

from ._generated import schema as _schema
from . import dialects as _dialects
from .caps import DEFAULT_LIMITS
from .datatypes import DATATYPES
from .errors import AlignmentError, ArgumentError, FormatError, GraphError, LimitError
from .ops import BY_KIND, Refusal
from .quantization import PerBlock, PerChannel, PerTensor, PerToken

include "_generated/fields.pxi"

#: An id that is no id.
cdef uint32_t NO_ID = 0xFFFFFFFF

cdef enum:
    FLAG_INPUT = 1
    FLAG_OUTPUT = 2
    ALIGNMENT = 16
    MAX_INPUTS = 8
    MAX_OUTPUTS = 2

cdef enum AttrKind:
    ATTR_U32
    ATTR_I32
    ATTR_F32
    ATTR_VECTOR_U32

cdef object NO_ATTRS = types.MappingProxyType({})
cdef object proxy = types.MappingProxyType

# Engine-private packings: in the schema's list of datatypes, never in a file.
PRIVATE_DATATYPES = frozenset(("qpint8", "pfp32"))
# Which table of parameters a datatype needs.
QUANT_TABLES = {"tensor": UNION_XNNQuantParams_PerTensorQuant, "channel": UNION_XNNQuantParams_PerChannelQuant,
                "token": UNION_XNNQuantParams_PerTokenDynamicQuant, "block": UNION_XNNQuantParams_PerChannelGroupQuant}
cdef dict BITS = {name: entry.bits for name, entry in DATATYPES.items()}
cdef dict NEEDED_QUANT = {name: QUANT_TABLES.get(entry.quantization) for name, entry in DATATYPES.items()}
SEED_VERSION = re.compile("[0-9a-f]{40}")


# ---- constants

def constant_at(Payload payload not None, Py_ssize_t offset, Py_ssize_t nbytes, int index=0, *, copy=None,
                str key=None):
    """A Constant over a range of a payload, in place where XNNPACK can read it there, else a padded copy.

    ``copy`` is None (only if needed), True (always) or False (AlignmentError if needed).
    """
    return make_constant(payload, None, offset, nbytes, index, copy, key)


cdef Constant make_constant(Payload payload, object view, Py_ssize_t offset, Py_ssize_t nbytes, int index,
                            object copy, str key):
    cdef Constant made = Constant.__new__(Constant)
    cdef const unsigned char* data
    if not (0 <= offset <= payload.nbytes and 0 <= nbytes <= payload.nbytes - offset):
        raise FormatError(f"need constant {index} inside the {payload.nbytes} bytes of {payload.name}, found "
                          f"{nbytes} bytes", offset=offset)
    data = payload.data + offset
    made.index = index
    made.nbytes = nbytes
    made.offset = offset
    made.key = key
    made._owner = payload
    if copy is True:
        made.reason = "copy=True"
    elif payload.writable:
        made.reason = "source is writable"
    elif <uintptr_t> data & (ALIGNMENT - 1):
        made.reason = f"address is {<int> (<uintptr_t> data & (ALIGNMENT - 1))} past a multiple of {ALIGNMENT}"
    elif not payload.tail_ok(offset + nbytes):
        made.reason = "the 16 bytes behind it are not certainly readable"
    if made.reason is None:
        made._data = (memoryview(payload) if view is None else view)[offset:offset + nbytes]
    elif copy is False:
        name = f"constant {index}" if key is None else f"constant {index} ({key})"
        raise AlignmentError(f"{name}, {nbytes} bytes at address {<uintptr_t> data:#x}, needs a copy, which "
                             f"copy=False forbids: {made.reason}", offset=offset)
    else:
        made._data = memoryview(AlignedBytes.copy(data, nbytes))
    return made


# ---- how to read each kind of node

@cython.final
cdef class KindPlan:
    """Slots of one kind of node, in the order of its operator's row."""

    cdef object op
    cdef int inputs
    cdef int input_slots[MAX_INPUTS]
    cdef bint optional[MAX_INPUTS]
    cdef int outputs
    cdef int output_slots[MAX_OUTPUTS]
    cdef int attrs
    cdef list names
    cdef int attr_slots[32]
    cdef int attr_kinds[32]
    cdef int flags_slot
    # -1 if the table has none; else every vector must be that long.
    cdef int num_dims_slot

    def __cinit__(self, op, fields):
        slots = {entry[0]: entry[1] for entry in fields}
        self.op = op
        self.inputs = len(op.inputs)
        self.outputs = len(op.outputs)
        self.names = []
        self.attrs = 0
        self.flags_slot = slots["flags"]
        self.num_dims_slot = slots.get("num_dims", -1)
        if self.inputs > MAX_INPUTS or self.outputs > MAX_OUTPUTS or len(fields) > 32:
            raise ValueError(f"{op.name} has more operands or fields than the reader has room for")
        for place, name in enumerate(op.inputs):
            self.input_slots[place] = slots[name]
            self.optional[place] = name in op.optional
        for place, name in enumerate(op.outputs):
            self.output_slots[place] = slots[name]
        for name, slot, kind, scalar, _, _ in fields:
            # Ids that the row does not list are those of a layout shared with other kinds.
            if name in ("flags", "num_dims") or name.endswith("_id"):
                continue
            if kind == "scalar" and scalar == "u32":
                self.attr_kinds[self.attrs] = ATTR_U32
            elif kind == "scalar" and scalar == "i32":
                self.attr_kinds[self.attrs] = ATTR_I32
            elif kind == "scalar" and scalar == "f32":
                self.attr_kinds[self.attrs] = ATTR_F32
            elif kind == "vector_scalar" and scalar == "u32":
                self.attr_kinds[self.attrs] = ATTR_VECTOR_U32
            else:
                raise ValueError(f"{op.name}.{name} is a {kind} of {scalar}, which the reader has no rule for")
            self.attr_slots[self.attrs] = slot
            self.names.append(name)
            self.attrs += 1


cdef dict _plans = {}


cdef list plans_of(str key):
    """KindPlan by the ordinal of the node union."""
    found = _plans.get(key)
    if found is None:
        members = _schema.UNIONS[key]["XNodeUnion"]
        found = [None] * (max(ordinal for ordinal, _, _ in members) + 1)
        for ordinal, kind, table in members:
            found[ordinal] = KindPlan(BY_KIND[kind], _schema.TABLES[key][table])
        _plans[key] = found
    return found


cdef tuple u32_tuple(const unsigned char* base, uint64_t vector):
    """Elements of a vector of u32 whose count is at an offset."""
    cdef uint32_t element, count
    cdef tuple made
    cdef object number
    if vector == 0:
        return ()
    count = load_u32(base + vector)
    made = PyTuple_New(<Py_ssize_t> count)
    for element in range(count):
        number = load_u32(base + vector + 4 + 4 * <uint64_t> element)
        Py_INCREF(number)
        PyTuple_SET_ITEM(made, <Py_ssize_t> element, number)
    return made


cdef str scale_path(int value):
    return f"XNNGraph.xvalues[{value}].quant_params"


# ---- the reader

@cython.final
cdef class Decoded:
    """The parts of a graph as the file has them, not yet validated. :meth:`graph` makes the Graph.

    ``values``, ``nodes``, ``inputs`` and ``outputs`` are lists that may be changed before.
    """

    cdef public list values
    cdef public list nodes
    cdef public list inputs
    cdef public list outputs
    cdef public list notes
    cdef readonly str dialect
    cdef readonly str container
    cdef readonly str version
    cdef public str source
    cdef readonly tuple mem_buffer_sizes
    cdef readonly object owner
    cdef readonly object limits
    # Decoding state.
    cdef FlatBuffer buffer
    cdef const unsigned char* base
    cdef uint64_t root
    cdef object section
    cdef object copy
    cdef list datatypes
    cdef list constants
    cdef dict scales
    cdef dict parameters
    cdef bint has_header
    # One view of the payload, to slice.
    cdef object view
    # Named data in its simple form, see NamedData.single.
    cdef Payload single_payload
    cdef uint64_t single_start
    cdef dict single
    cdef list single_places

    def __init__(self):
        raise TypeError("Decoded is made by read()")

    def graph(self):
        """The validated Graph."""
        return Graph(self.values, self.nodes, self.inputs, self.outputs, dialect=self.dialect,
                     container=self.container, version=self.version, source=self.source,
                     mem_buffer_sizes=self.mem_buffer_sizes, notes=self.notes,
                     owner=self.owner, limits=self.limits)

    def replace_value(self, Value old, Value new):
        """Put another value in the place of one that has the same id."""
        for group in (self.values, self.inputs, self.outputs):
            for place, value in enumerate(<list> group):
                if value is old:
                    (<list> group)[place] = new

    # -- errors

    cdef inline Py_ssize_t at(self, uint64_t table) noexcept:
        return self.buffer.offset + <Py_ssize_t> table

    cdef object format_error(self, str message, str path, uint64_t table):
        return FormatError(message, path=path, offset=self.at(table))

    cdef object value_error(self, str message, int index, uint64_t table, id=None):
        return GraphError(f"{message} - at XNNGraph.xvalues[{index}], offset {self.at(table):#x}", value=id)

    # -- constants

    cdef Constant constant(self, uint32_t index, int value, uint64_t table):
        """Entry ``index`` of the file's constants; made once."""
        cdef Constant made
        cdef Py_ssize_t offset, nbytes
        if index < <uint32_t> len(self.constants) and self.constants[index] is not None:
            return <Constant> self.constants[index]
        payload, offset, nbytes, key = self.place(index, value, "constant_buffer_idx", table)
        made = make_constant(payload, self.view if payload is self.owner else None, offset, nbytes, <int> index,
                             self.copy, key)
        self.constants[index] = made
        return made

    cdef tuple place(self, uint32_t index, int value, str field, uint64_t table):
        """(payload, offset, bytes, key) of a constant. Whether there was a header decides where to look."""
        cdef uint64_t vector, entry, key_at, offset, nbytes, size
        cdef uint32_t length
        if index >= <uint32_t> len(self.constants):
            name = "constant_data" if self.has_header else "constant_buffer"
            path = f"XNNGraph.xvalues[{value}].{field}" if value >= 0 else f"XNNGraph.{field}"
            raise self.format_error(f"need a constant below {len(self.constants)}, the length of {name}, found "
                                    f"{index}", path, table)
        if not self.has_header:
            vector = reference_at(self.base, self.root, SLOT_XNNGraph_constant_buffer)
            entry = vector + 4 + 4 * <uint64_t> index
            entry += load_u32(self.base + entry)
            vector = reference_at(self.base, entry, SLOT_Buffer_storage)
            if vector == 0:
                return self.buffer.payload, <Py_ssize_t> self.at(entry), 0, None
            return self.buffer.payload, self.at(vector + 4), <Py_ssize_t> load_u32(self.base + vector), None
        vector = reference_at(self.base, self.root, SLOT_XNNGraph_constant_data)
        entry = vector + 4 + 4 * <uint64_t> index
        entry += load_u32(self.base + entry)
        nbytes = get_u64(self.base, entry, SLOT_ConstantDataOffset_size)
        key_at = reference_at(self.base, entry, SLOT_ConstantDataOffset_named_key)
        if key_at:
            length = load_u32(self.base + key_at)
            try:
                key = PyUnicode_DecodeUTF8(<const char*> self.base + key_at + 4, length, NULL)
            except UnicodeDecodeError:
                raise self.format_error("need UTF-8 in a key", f"XNNGraph.constant_data[{index}].named_key",
                                        key_at) from None
            if self.section.named is None:
                raise self.format_error(f"need named data {key!r}, found none: the payload is read without its "
                                        "program (load the program, or give a data file as data=[...])",
                                        f"XNNGraph.constant_data[{index}]", entry)
            found = self.single.get(key) if self.single is not None else None
            if found is not None:
                held = self.single_payload
                offset, size = self.single_places[<Py_ssize_t> found]
                offset += self.single_start
            else:
                held, offset, size = self.section.named.find(key)
            if nbytes and size != nbytes:
                raise self.format_error(f"need {nbytes} bytes of named data {key!r}, found {size}",
                                        f"XNNGraph.constant_data[{index}].size", entry)
            return held, offset, size, key
        offset = get_u64(self.base, entry, SLOT_ConstantDataOffset_offset)
        start, room = self.section.constants
        if offset > <uint64_t> room or nbytes > <uint64_t> room - offset:
            raise self.format_error(f"need {nbytes} bytes inside the {room} bytes of constant data, found them at "
                                    f"{offset:#x}", f"XNNGraph.constant_data[{index}]", entry)
        return self.buffer.payload, start + <Py_ssize_t> offset, <Py_ssize_t> nbytes, None

    cdef object scale_array(self, uint64_t params, int slot_inline, int slot_index, int slot_count, bint block,
                            uint64_t need, int value):
        """float32 scales, or bf16 bit patterns for blocks: from a constant if one is named, else from the table."""
        cdef uint32_t index = get_u32(self.base, params, slot_index)
        cdef uint32_t declared = get_u32(self.base, params, slot_count)
        cdef uint64_t vector, width, place
        cdef Payload payload
        cdef const unsigned char* source
        cdef uint16_t* bits
        cdef uint32_t word
        cdef float scale
        cdef Py_ssize_t offset, nbytes
        if declared and declared != need:
            raise self.format_error(f"need num_scales 0 or {need}, found {declared}", scale_path(value), params)
        if need == 0:
            return np.empty(0, np.uint16 if block else np.float32)
        if index:
            found = self.scales.get((index, block, need))
            if found is not None:
                return found
            width = 2 if block else 4
            held, offset, nbytes, _ = self.place(index, value, "quant_params.scale_buffer_idx", params)
            if <uint64_t> nbytes < need * width:
                raise self.format_error(f"need {need * width} bytes for {need} scales, constant {index} has {nbytes}",
                                        scale_path(value), params)
            payload = held
            raw = PyBytes_FromStringAndSize(<const char*> payload.data + offset, <Py_ssize_t> (need * width))
            found = np.frombuffer(raw, np.uint16 if block else np.float32)
            self.scales[index, block, need] = found
            return found
        vector = reference_at(self.base, params, slot_inline)
        if vector == 0:
            raise self.format_error("need scales, inline or as a constant, found neither", scale_path(value), params)
        if load_u32(self.base + vector) != need:
            raise self.format_error(f"need {need} scales, found {load_u32(self.base + vector)}", scale_path(value),
                                    params)
        source = self.base + vector + 4
        if not block:
            return np.frombuffer(PyBytes_FromStringAndSize(<const char*> source, <Py_ssize_t> need * 4), np.float32)
        raw = PyBytes_FromStringAndSize(NULL, <Py_ssize_t> need * 2)
        bits = <uint16_t*> PyBytes_AS_STRING(raw)
        for place in range(need):
            # ExecuTorch's rounding: half a unit in the last place of bf16 is added, then the low bits are cut.
            scale = load_f32(source + 4 * place) * <float> 1.00389105
            memcpy(&word, &scale, 4)
            bits[place] = <uint16_t> (word >> 16)
        return np.frombuffer(raw, np.uint16)

    # -- values

    cdef str datatype(self, int number, str field, int index, uint64_t table):
        cdef str name = None
        if 0 < number < <int> len(self.datatypes):
            name = <str> self.datatypes[number]
        if name is None:
            raise self.format_error(f"need a datatype that the {self.dialect} dialect has, found number {number}",
                                    f"XNNGraph.xvalues[{index}].{field}", table)
        if name in PRIVATE_DATATYPES:
            raise self.format_error(f"datatype {name} (number {number}) is XNNPACK's own and can't be in a file",
                                    f"XNNGraph.xvalues[{index}].{field}", table)
        return name

    cdef object quantized(self, int index, uint64_t quantized, uint64_t table, str datatype, tuple shape,
                          uint32_t id):
        """Quantization parameters of an XNNQuantizedTensorValue."""
        cdef int kind = get_u8(self.base, quantized, SLOT_XNNQuantizedTensorValue_quant_params_type)
        cdef uint64_t params = reference_at(self.base, quantized, SLOT_XNNQuantizedTensorValue_quant_params)
        cdef int32_t axis, group
        cdef uint64_t need, inner
        if params == 0:
            raise self.format_error("need quantization parameters, found none", scale_path(index), quantized)
        needed = NEEDED_QUANT[datatype]
        if kind != needed:
            found = _schema.UNIONS["xnn"]["XNNQuantParams"][kind - 1][1]
            wanted = "no parameters" if needed is None else _schema.UNIONS["xnn"]["XNNQuantParams"][needed - 1][1]
            raise self.value_error(f"value {id} of {datatype} needs {wanted}, found {found}", index, params, id)
        if kind == UNION_XNNQuantParams_PerTensorQuant:
            return PerTensor(get_f32(self.base, params, SLOT_PerTensorQuant_scale),
                             get_i32(self.base, params, SLOT_PerTensorQuant_zero_point))
        if kind == UNION_XNNQuantParams_PerTokenDynamicQuant:
            return PerToken(get_i32(self.base, params, SLOT_PerTokenDynamicQuant_num_nonbatch_dims))
        axis = get_i32(self.base, params, SLOT_PerChannelQuant_channel_dim)
        if not 0 <= axis < len(shape):
            raise self.value_error(f"value {id} needs channel_dim from 0 to {len(shape) - 1}, found {axis}", index,
                                   params, id)
        if kind == UNION_XNNQuantParams_PerChannelQuant:
            return PerChannel(self.scale_array(params, SLOT_PerChannelQuant_scale,
                                               SLOT_PerChannelQuant_scale_buffer_idx,
                                               SLOT_PerChannelQuant_num_scales, False, shape[axis], index), axis)
        group = get_i32(self.base, params, SLOT_PerChannelGroupQuant_group_size)
        if len(shape) != 2 or axis != 0:
            raise self.value_error(f"value {id} of {datatype} needs rank 2 and channel_dim 0, found rank "
                                   f"{len(shape)} and {axis}", index, params, id)
        inner = shape[1]
        if group < 32 or group % 32 or inner % <uint64_t> group:
            raise self.value_error(f"value {id} needs a group_size that is a multiple of 32 and divides {inner}, "
                                   f"found {group}", index, params, id)
        # Each factor is below 2**32 and the group at least 32: no overflow.
        need = <uint64_t> shape[0] * (inner // <uint64_t> group)
        return PerBlock(self.scale_array(params, SLOT_PerChannelGroupQuant_scale,
                                         SLOT_PerChannelGroupQuant_scale_buffer_idx,
                                         SLOT_PerChannelGroupQuant_num_scales, True, need, index), axis, group)

    cdef object plain(self, int index, uint64_t table, str datatype, uint32_t id, bint seed):
        """Quantization parameters of a plain value: the caller's, or none."""
        if NEEDED_QUANT[datatype] is None:
            return None
        if seed and datatype == "qint32":
            raise self.value_error(f"value {id} is qint32, and XNNPACK has no addition of that type", index, table,
                                   id)
        if NEEDED_QUANT[datatype] != UNION_XNNQuantParams_PerTensorQuant:
            raise self.value_error(f"value {id} of {datatype} needs quantization parameters, a plain value has none",
                                   index, table, id)
        given = self.parameters.pop(id, None)
        if given is None:
            raise self.value_error(f"value {id} is {datatype} and the file stores no scale and zero point for it: "
                                   f"give them as quantization={{{id}: (scale, zero_point)}}", index, table, id)
        return given

    cdef Value value(self, int index, uint64_t entry, bint seed):
        cdef Value made = Value.__new__(Value)
        cdef const unsigned char* base = self.base
        cdef int kind = get_u8(base, entry, SLOT_XValue_xvalue_union_type)
        cdef uint64_t table = reference_at(base, entry, SLOT_XValue_xvalue_union)
        cdef uint64_t outer = table
        cdef uint64_t dims, nbytes
        cdef uint32_t rank, number, id, external, flags
        cdef int dq
        if table == 0:
            raise self.format_error("need a value, found none", f"XNNGraph.xvalues[{index}]", entry)
        if kind == UNION_XValueUnion_XNNQuantizedTensorValue:
            table = reference_at(base, outer, SLOT_XNNQuantizedTensorValue_tensor_value)
            if table == 0:
                raise self.format_error("need tensor_value, found none", f"XNNGraph.xvalues[{index}]", outer)
        id = get_u32(base, table, SLOT_XNNTensorValue_id_out)
        if id == NO_ID:
            raise self.value_error("need an id_out below 0xffffffff, which means none", index, table)
        dims = reference_at(base, table, SLOT_XNNTensorValue_dims)
        rank = get_u32(base, table, SLOT_XNNTensorValue_num_dims)
        number = load_u32(base + dims) if dims else 0
        if rank != number:
            raise self.format_error(f"need num_dims equal to the length of dims, found {rank} and "
                                    f"{number if dims else 'no dims'}", f"XNNGraph.xvalues[{index}].num_dims", table)
        if rank > 6:
            raise self.value_error(f"value {id} has rank {rank}, limit 6", index, table, id)
        datatype = self.datatype(get_i16(base, table, SLOT_XNNTensorValue_datatype), "datatype", index, table)
        made.id = id
        made.datatype = datatype
        made.shape = u32_tuple(base, dims)
        made.offset = self.at(table)
        flags = get_u32(base, table, SLOT_XNNTensorValue_flags)
        if flags & ~<uint32_t> (FLAG_INPUT | FLAG_OUTPUT):
            raise self.value_error(f"value {id} has flags {flags:#x}, need a combination of 1 (input) and 2 (output)",
                                   index, table, id)
        made.is_input = flags & FLAG_INPUT != 0
        made.is_output = flags & FLAG_OUTPUT != 0
        external = get_u32(base, table, SLOT_XNNTensorValue_external_id)
        if external != NO_ID:
            if not flags:
                raise self.value_error(f"value {id} has external id {external} but neither flag 1 (input) nor 2 "
                                       "(output); an internal value stores 0xffffffff", index, table, id)
            made.external_id = external
        elif flags:
            raise self.value_error(f"value {id} has flags {flags:#x} but no external id", index, table, id)
        if kind == UNION_XValueUnion_XNNQuantizedTensorValue:
            made.quantization = self.quantized(index, outer, table, datatype, made.shape, id)
        else:
            made.quantization = self.plain(index, table, datatype, id, seed)
        dq = 0 if seed else get_i16(base, table, SLOT_XNNTensorValue_dq_datatype)
        if dq:
            if self.dialect != "xn00":
                raise self.value_error(f"value {id} has dq_datatype {dq}, which only XN00 files may use", index,
                                       table, id)
            made.dq_datatype = self.datatype(dq, "dq_datatype", index, table)
            if kind != UNION_XValueUnion_XNNTensorValue:
                raise self.value_error(f"value {id} is quantized and has a dq_datatype too", index, table, id)
        number = get_u32(base, table, SLOT_XNNTensorValue_constant_buffer_idx)
        if number:
            made.constant = self.constant(number, index, table)
            nbytes = needed_bytes(datatype, made.shape)
            if <uint64_t> made.constant.nbytes < nbytes:
                shape = "x".join(map(str, made.shape)) or "scalar"
                raise self.format_error(f"need {nbytes} bytes for {shape} {datatype}, constant {number} has "
                                        f"{made.constant.nbytes}",
                                        f"XNNGraph.xvalues[{index}].constant_buffer_idx", table)
        return made

    # -- nodes

    cdef Node node(self, int index, uint64_t entry, list plans):
        cdef Node made = Node.__new__(Node)
        cdef const unsigned char* base = self.base
        cdef uint64_t table = reference_at(base, entry, SLOT_XNode_xnode_union)
        cdef uint64_t limits, vector
        cdef KindPlan plan
        cdef uint32_t id, num_dims = 0
        cdef int place, kind
        if table == 0:
            raise self.format_error("need an operator, found none", f"XNNGraph.xnodes[{index}]", entry)
        plan = <KindPlan> plans[get_u8(base, entry, SLOT_XNode_xnode_union_type)]
        made.op = plan.op
        made.index = index
        made.offset = self.at(table)
        made.debug_handle = get_u32(base, entry, SLOT_XNode_debug_handle)
        made.flags = <int> get_u32(base, table, plan.flags_slot)
        ids = []
        for place in range(plan.inputs):
            id = get_u32(base, table, plan.input_slots[place])
            if id != NO_ID:
                ids.append(id)
            elif plan.optional[place]:
                ids.append(None)
            else:
                raise GraphError(f"{made.where}: {plan.op.inputs[place]} is absent (0xffffffff), {plan.op.name} "
                                 f"needs it - at XNNGraph.xnodes[{index}], offset {self.at(table):#x}", node=index)
        made.inputs = tuple(ids)
        ids = []
        for place in range(plan.outputs):
            id = get_u32(base, table, plan.output_slots[place])
            if id == NO_ID:
                raise GraphError(f"{made.where}: {plan.op.outputs[place]} is absent (0xffffffff) - at "
                                 f"XNNGraph.xnodes[{index}], offset {self.at(table):#x}", node=index)
            ids.append(id)
        made.outputs = tuple(ids)
        made.attrs = NO_ATTRS
        if plan.attrs:
            attrs = {}
            if plan.num_dims_slot >= 0:
                num_dims = get_u32(base, table, plan.num_dims_slot)
            for place in range(plan.attrs):
                kind = plan.attr_kinds[place]
                if kind == ATTR_U32:
                    attrs[plan.names[place]] = get_u32(base, table, plan.attr_slots[place])
                elif kind == ATTR_F32:
                    attrs[plan.names[place]] = get_f32(base, table, plan.attr_slots[place])
                elif kind == ATTR_I32:
                    attrs[plan.names[place]] = get_i32(base, table, plan.attr_slots[place])
                else:
                    vector = reference_at(base, table, plan.attr_slots[place])
                    if vector and load_u32(base + vector) > 6:
                        raise self.format_error(f"need at most 6 entries in {plan.names[place]}, found "
                                                f"{load_u32(base + vector)}",
                                                f"XNNGraph.xnodes[{index}].{plan.names[place]}", table)
                    attrs[plan.names[place]] = u32_tuple(base, vector)
                    if plan.num_dims_slot >= 0 and (load_u32(base + vector) if vector else 0) != num_dims:
                        raise self.format_error(f"need {plan.names[place]} of num_dims = {num_dims} entries, found "
                                                f"{load_u32(base + vector) if vector else 0}",
                                                f"XNNGraph.xnodes[{index}].{plan.names[place]}", table)
            made.attrs = proxy(attrs)
        if self.buffer.schema.key == "xnn":
            limits = reference_at(base, entry, SLOT_XNode_output_min_max)
            if limits:
                made.clamp = (get_f32(base, limits, SLOT_OutputMinMax_output_min),
                              get_f32(base, limits, SLOT_OutputMinMax_output_max))
        return made

    # -- graph

    cdef int externals(self) except -1:
        """Inputs and outputs in calling order, after the checks of external ids against num_externs."""
        cdef uint32_t declared = get_u32(self.base, self.root, SLOT_XNNGraph_num_externs)
        cdef Value value
        by_external = {}
        for value in self.values:
            if value.external_id is not None:
                other = by_external.setdefault(value.external_id, value)
                if other is not value:
                    raise GraphError(f"values {other.id} and {value.id} both have external id {value.external_id}",
                                     value=value.id)
                if value.external_id >= declared:
                    raise GraphError(f"value {value.id} has external id {value.external_id}, need one below "
                                     f"num_externs = {declared}", value=value.id)
        if len(by_external) != declared:
            raise self.format_error(f"need num_externs equal to the number of external values, {len(by_external)}, "
                                    f"found {declared}", "XNNGraph.num_externs", self.root)
        ordered = [by_external[number] for number in sorted(by_external)]
        self.inputs = [each for each in ordered if each.is_input]
        self.outputs = [each for each in ordered if each.is_output]
        return 0

    cdef int rows_of_tokens(self) except -1:
        """Give the result of a dynamic quantization the shape of its input where the two are permutations.

        ExecuTorch's exporter declares it in the model's order of axes when a shuffle to NHWC precedes;
        XNNPACK goes by what it infers.
        """
        cdef Node node
        cdef Value value, new
        by_id = None
        for node in self.nodes:
            if node.op.name != "convert":
                continue
            if by_id is None:
                by_id = {each.id: each for each in self.values}
            value = by_id.get(node.outputs[0])
            source = by_id.get(node.inputs[0])
            if (value is None or source is None or value.datatype != "qdint8" or value.is_input or value.is_output
                    or value.shape == source.shape or sorted(value.shape) != sorted(source.shape)):
                continue
            new = value.replace(shape=source.shape)
            self.replace_value(value, new)
            by_id[value.id] = new
            self.notes.append(f"value {value.id} is declared {'x'.join(map(str, value.shape))} and taken for "
                              f"{'x'.join(map(str, new.shape))}, the shape of what {node.where} quantizes")
        return 0

    cdef list listed(self, int slot, str name, list flagged):
        """Values of one of the seed's id lists, which must be those with the flag."""
        cdef uint64_t vector = reference_at(self.base, self.root, slot)
        known = {each.id: each for each in flagged}
        # Not more than can be right, whatever the vector's length.
        ids = ()
        if vector and load_u32(self.base + vector) <= <uint32_t> len(known) + 16:
            ids = u32_tuple(self.base, vector)
        if len(ids) != len(known) or set(ids) != set(known):
            raise GraphError(f"{name} is {list(ids)}, the values with that flag are {sorted(known)}: need each of "
                             f"them once - at XNNGraph.{name}, offset {self.at(self.root):#x}")
        return [known[each] for each in ids]

    cdef int buffer_sizes(self) except -1:
        """The seed's list of sizes: entry i is the number of bytes in entry i of constant_buffer."""
        cdef Py_ssize_t place
        if not self.mem_buffer_sizes:
            return 0
        if len(self.mem_buffer_sizes) != len(self.constants):
            raise self.format_error(f"need as many entries as constant_buffer has, {len(self.constants)}, found "
                                    f"{len(self.mem_buffer_sizes)}", "XNNGraph.mem_buffer_sizes", self.root)
        for place in range(len(self.constants)):
            nbytes = self.place(<uint32_t> place, -1, "constant_buffer", self.root)[2]
            if self.mem_buffer_sizes[place] != nbytes:
                raise self.format_error(f"need {nbytes}, the bytes of constant_buffer[{place}], found "
                                        f"{self.mem_buffer_sizes[place]}",
                                        f"XNNGraph.mem_buffer_sizes[{place}]", self.root)
        return 0


cdef uint64_t needed_bytes(str datatype, tuple shape) except? 0xFFFFFFFFFFFFFFFF:
    """Bytes of a shape whose dims are below 2**32; about 2**60 if there would be more."""
    cdef uint64_t count = 1, dim
    cdef int bits = BITS[datatype]
    cdef Py_ssize_t place, rank = len(shape)
    cdef bint zero = False
    for place in range(rank):
        dim = <object> shape[place]
        if bits == 4 and place == rank - 1:
            dim = (dim + 1) // 2
        if dim == 0:
            zero = True
        elif count > (<uint64_t> 1 << 60) // dim:
            count = <uint64_t> 1 << 60
        else:
            count *= dim
    if zero:
        return 0
    return count if bits == 4 else count * <uint64_t> (bits >> 3)


cdef dict caller_parameters(object given):
    """``quantization=`` as value id -> PerTensor."""
    made = {}
    for id, pair in (given or {}).items():
        try:
            scale, zero_point = pair
            made[int(id)] = PerTensor(float(scale), int(zero_point))
        except (TypeError, ValueError):
            raise ArgumentError(f"need quantization={{value id: (scale, zero_point)}}, found {id!r}: "
                                f"{pair!r}") from None
    return made


def read(section, dialect=None, *, copy=None, quantization=None, limits=DEFAULT_LIMITS):
    """The graph in a section, decoded.

    Parameters
    ----------
    section : xnnfast.containers.Section
    dialect : str, optional
        Overrules what the bytes say.
    copy : bool, optional
        None copies a constant only if XNNPACK can't read it in place, True always, False never.
    quantization : dict of int to (float, int), optional
        Scale and zero point by value id, for quantized values whose file can't store them.
    """
    cdef Decoded self = Decoded.__new__(Decoded)
    cdef FlatBuffer buffer
    cdef uint64_t nodes, values, vector, entry
    cdef uint32_t count, index
    cdef bint seed
    if copy not in (None, True, False):
        raise ArgumentError(f"need copy None, True or False, found {copy!r}")
    found, buffer = _dialects.verify(section, dialect, limits)
    seed = found.key == "seed"
    self.section = section
    self.buffer = buffer
    self.base = buffer.data
    self.root = buffer.root_at
    self.dialect = found.name
    self.container = section.container
    self.source = section.source
    self.owner = section.payload
    self.limits = limits
    self.copy = copy
    self.notes = []
    self.scales = {}
    self.parameters = caller_parameters(quantization)
    self.has_header = section.constants is not None
    self.view = memoryview(section.payload)
    if section.named is not None:
        simple = section.named.single
        if simple is not None:
            self.single_payload, self.single_start, self.single, self.single_places = simple
    names = found.datatypes
    self.datatypes = [names.get(number) for number in range(max(names) + 1)]
    vector = reference_at(self.base, self.root,
                          SLOT_XNNGraph_constant_data if self.has_header else SLOT_XNNGraph_constant_buffer)
    self.constants = [None] * load_u32(self.base + vector) if vector else []
    root = buffer.root
    version = root.get("version")
    self.version = version or ""
    if seed and not SEED_VERSION.fullmatch(self.version):
        self.notes.append(f"version is {version!r}, seed files have 40 hexadecimal digits" if version is not None
                          else "there is no version, seed files have 40 hexadecimal digits")
    count = get_u32(self.base, self.root, SLOT_XNNGraph_num_externs)
    if count > limits.max_externs:
        raise LimitError(f"num_externs is {count}, above the cap of {limits.max_externs}; max_externs of Limits "
                         "raises it")
    nodes = reference_at(self.base, self.root, SLOT_XNNGraph_xnodes)
    values = reference_at(self.base, self.root, SLOT_XNNGraph_xvalues)
    for name, vector in (("xnodes", nodes), ("xvalues", values)):
        if vector == 0:
            raise self.format_error(f"need {name}, found none", f"XNNGraph.{name}", self.root)
    vector = reference_at(self.base, self.root, SLOT_XNNGraph_mem_buffer_sizes)
    if vector and load_u32(self.base + vector) > limits.max_tables:
        raise LimitError(f"mem_buffer_sizes has {load_u32(self.base + vector)} entries, above the cap of "
                         f"{limits.max_tables}; max_tables of Limits raises it")
    self.mem_buffer_sizes = u32_tuple(self.base, reference_at(self.base, self.root, SLOT_XNNGraph_mem_buffer_sizes))
    if seed:
        self.buffer_sizes()
    self.values = []
    for index in range(load_u32(self.base + values)):
        entry = values + 4 + 4 * <uint64_t> index
        self.values.append(self.value(<int> index, entry + load_u32(self.base + entry), seed))
    if self.parameters:
        wrong = min(self.parameters)
        why = "stores its own or needs none" if any(each.id == wrong for each in self.values) else "does not exist"
        raise ArgumentError(f"quantization= has parameters for value {wrong}, which {why}")
    plans = plans_of(found.key)
    self.nodes = []
    for index in range(load_u32(self.base + nodes)):
        entry = nodes + 4 + 4 * <uint64_t> index
        self.nodes.append(self.node(<int> index, entry + load_u32(self.base + entry), plans))
    self.rows_of_tokens()
    self.externals()
    if seed:
        self.inputs = self.listed(SLOT_XNNGraph_input_ids, "input_ids", self.inputs)
        self.outputs = self.listed(SLOT_XNNGraph_output_ids, "output_ids", self.outputs)
    return self


def bits_of(str datatype not None):
    """Bits per element of a datatype."""
    return BITS[datatype]


# ---- the quick part of validation
#
# What nearly every graph passes is tested here, in C. Whatever is not plainly right is left to
# xnnfast.validate, which knows the rules one by one and words the errors: this part has none.

cdef enum:
    MAX_RANK = 6

cdef uint64_t MAX_ELEMENTS = <uint64_t> 1 << 38
cdef float TINY = 1.17549435e-38


cdef bint sound_tensor(object quantization, str datatype) except -1:
    cdef double scale
    cdef long long zero_point
    if type(quantization) is not PerTensor:
        return False
    scale = (<tuple> quantization)[0]
    zero_point = (<tuple> quantization)[1]
    if not TINY <= scale <= 3.4028234e38:
        return False
    if datatype == "qint8":
        return -128 <= zero_point <= 127
    if datatype == "quint8":
        return 0 <= zero_point <= 255
    return zero_point == 0


cdef bint sound_channels(object quantization, tuple shape) except -1:
    cdef const float[::1] scales
    cdef Py_ssize_t axis, index
    if type(quantization) is not PerChannel:
        return False
    axis = quantization.axis
    if not 0 <= axis < len(shape):
        return False
    try:
        scales = quantization.scales
    except (ValueError, TypeError):
        return False
    if scales.shape[0] != <Py_ssize_t> shape[axis]:
        return False
    for index in range(scales.shape[0]):
        if not TINY <= scales[index] <= 3.4028234e38:
            return False
    return True


cdef int64_t sound_value(Value value) except? -1:
    """Bytes of a value that is plainly right; -1 if it must be looked at more closely."""
    cdef uint64_t count = 1, dim, need
    cdef str datatype = value.datatype
    cdef tuple shape = value.shape
    cdef Py_ssize_t place, rank = len(shape)
    bits = BITS.get(datatype)
    if bits is None or bits < 8 or rank > MAX_RANK or not 0 <= value.id < NO_ID or value.dq_datatype is not None:
        return -1
    for place in range(rank):
        if not 0 < shape[place] <= 0x7FFFFFFF:
            return -1
        dim = <object> shape[place]
        count *= dim
        if count > MAX_ELEMENTS:
            return -1
    need = count * <uint64_t> (<int> bits >> 3)
    kind = NEEDED_QUANT[datatype]
    if kind is None:
        if value.quantization is not None:
            return -1
    elif kind == UNION_XNNQuantParams_PerTensorQuant:
        if not sound_tensor(value.quantization, datatype):
            return -1
    elif kind != UNION_XNNQuantParams_PerChannelQuant or not sound_channels(value.quantization, shape):
        return -1
    if value.is_input or value.is_output:
        if value.constant is not None or value.external_id is None:
            return -1
    elif value.external_id is not None:
        return -1
    if value.constant is not None and <uint64_t> value.constant.nbytes < need:
        return -1
    return <int64_t> need


def screen_values(tuple values not None):
    """(bytes of the values that are plainly right and not constant, the other values, the external ones)."""
    cdef Value value
    cdef int64_t need
    # Each below 2**40 bytes; more than 2**23 values do not fit a file's table limit.
    cdef uint64_t total = 0
    rest, externals = [], []
    for each in values:
        value = <Value?> each
        need = sound_value(value)
        if need < 0:
            rest.append(value)
        elif value.constant is None:
            total += <uint64_t> need
        if value.external_id is not None:
            externals.append(value)
    return total, rest, externals


def screen_nodes(Graph graph not None):
    """Whether every id that nodes name is there, written once, and before it is read; False if in doubt."""
    cdef Node node
    cdef Value value
    cdef dict by_id = graph._by_id
    written = set()
    for each in graph.nodes:
        node = <Node?> each
        if len(node.inputs) != len(node.op.inputs) or len(node.outputs) != len(node.op.outputs):
            return False
        for id in node.inputs:
            if id is None:
                continue
            found = by_id.get(id)
            if found is None:
                return False
            value = <Value> found
            if value.constant is None and not value.is_input and id not in written:
                return False
        for id in node.outputs:
            found = by_id.get(id)
            if found is None:
                return False
            value = <Value> found
            if value.constant is not None or value.is_input or id in written:
                return False
            written.add(id)
    for value in graph.outputs:
        if not value.is_input and value.id not in written:
            return False
    return True


def check_nodes(Graph graph not None, list nodes not None, check_op):
    """The nodes after check_op and normalize, and whether all declared shapes are what the nodes give.

    A Refusal of check_op or of a shape's rule leaves through ``failed``: (node, refusal) or None.
    """
    cdef Node node
    cdef Value value
    cdef dict by_id = graph._by_id
    cdef bint agree = True
    made = []
    for each in nodes:
        node = <Node?> each
        op = node.op
        ins, in_shapes, outs = [], [], []
        for id in node.inputs:
            if id is None:
                ins.append(None)
                in_shapes.append(None)
            else:
                value = <Value> by_id[id]
                ins.append(value)
                in_shapes.append(value.shape)
        for id in node.outputs:
            outs.append(by_id[id])
        try:
            check_op(node, ins, outs)
            normalize = op.normalize
            if normalize is not None:
                node = normalize(node, in_shapes, [each.shape for each in outs])
        except Refusal as refusal:
            return made, False, (node, refusal)
        made.append(node)
        if agree:
            try:
                shapes = op.shape(node, in_shapes)
            except Refusal:
                agree = False
                continue
            if len(shapes) != len(outs):
                agree = False
                continue
            for place in range(len(outs)):
                value = <Value> outs[place]
                if shapes[place] != value.shape:
                    agree = False
    return made, agree, None


def dead_nodes(Graph graph not None, list nodes not None):
    """(nodes in order that lead to no output, ids of values that something depends on)."""
    cdef Node node
    cdef Value value
    cdef bint used
    live = set()
    for value in graph.outputs:
        live.add(value.id)
    dead = []
    for each in reversed(nodes):
        node = <Node> each
        used = False
        for id in node.outputs:
            if id in live:
                used = True
                break
        if not used:
            dead.append(node)
            continue
        for id in node.inputs:
            if id is not None:
                live.add(id)
    dead.reverse()
    return dead, live
