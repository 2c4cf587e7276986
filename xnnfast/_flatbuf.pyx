# cython: language_level=3
"""FlatBuffers by description: a verifier and a read cursor, both driven by the tables of ``schema/*.fbs``.

In come bytes of a payload and the name of a schema; out comes a FlatBuffer whose every offset has been
checked, so that reading needs no checks. The official Python runtime has no verifier.
"""

cimport cython
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.unicode cimport PyUnicode_DecodeUTF8

from ._generated import schema as _schema
from .errors import ArgumentError, FormatError, LimitError

#: FLATBUFFERS_MAX_BUFFER_SIZE: offsets are 32 bits wide and some readers treat them as signed.
MAX_NBYTES = 2**31 - 1
MAX_DEPTH = 64
MAX_TABLES = 1_000_000
MAX_SHARED = 1 << 20

cdef enum:
    # No schema of ours nests deeper than about ten tables; the recursion below must stay small.
    DEPTH_CEILING = 256

cdef enum Kind:
    SCALAR
    STRING
    VECTOR_SCALAR
    VECTOR_TABLE
    VECTOR_STRING
    TABLE
    UNION_TYPE
    UNION

cdef enum Fault:
    FAULT_NONE
    FAULT_ROOT
    FAULT_ALIGNMENT
    FAULT_TABLE
    FAULT_VTABLE
    FAULT_VTABLE_SIZE
    FAULT_TABLE_SIZE
    FAULT_FIELD
    FAULT_NULL
    FAULT_REFERENCE
    FAULT_VECTOR
    FAULT_NUL
    FAULT_UNION_VALUE
    FAULT_UNION_TYPE
    FAULT_UNION_MEMBER
    FAULT_SLOT
    FAULT_DEPTH
    FAULT_TABLES
    FAULT_SHARED

KINDS = {
    "scalar": SCALAR, "string": STRING, "vector_scalar": VECTOR_SCALAR, "vector_table": VECTOR_TABLE,
    "vector_string": VECTOR_STRING, "table": TABLE, "union": UNION,
}
WIDTHS = {"bool": 1, "i8": 1, "u8": 1, "i16": 2, "u16": 2, "i32": 4, "u32": 4, "f32": 4, "i64": 8, "u64": 8, "f64": 8}

#: Tables that tell the seed from later dialects: there a slot beyond those of the seed must be unset.
CLOSED = {"seed": frozenset(("XNNGraph", "XNNTensorValue", "XNode", "XValue"))}


@cython.final
cdef class Schema:
    """The tables and unions of one schema as C arrays. Made once per key by :func:`schema`."""

    def __cinit__(self, str key, bint closed):
        cdef int count, at, index, slot, number
        cdef Field* field
        self.fields = NULL
        self.tables = NULL
        self.members = NULL
        tables = _schema.TABLES[key]
        unions = _schema.UNIONS[key]
        self.key = key
        self.closed = closed
        self.table_names = tuple(tables)
        self.union_names = tuple(unions)
        self.table_index = {name: index for index, name in enumerate(self.table_names)}
        self.root = self.table_index[_schema.ROOTS[key]]
        union_index = {name: index for index, name in enumerate(self.union_names)}
        count = sum(len(fields) for fields in tables.values())
        self.fields = <Field*> PyMem_Malloc(max(1, count) * sizeof(Field))
        self.tables = <TableShape*> PyMem_Malloc(len(tables) * sizeof(TableShape))
        self.members = <int*> PyMem_Malloc(max(1, len(unions)) * 256 * sizeof(int))
        if self.fields is NULL or self.tables is NULL or self.members is NULL:
            raise MemoryError
        closed_tables = CLOSED.get(key, frozenset()) if closed else frozenset()
        field_names, scalar_names, self.field_index = [], [], []
        at = 0
        for index, (name, fields) in enumerate(tables.items()):
            self.tables[index].first = at
            self.tables[index].count = len(fields)
            self.tables[index].closed = name in closed_tables
            self.field_index.append({entry[0]: number for number, entry in enumerate(fields)})
            for slot, (field_name, declared, kind, scalar, default, target) in enumerate(fields):
                if slot != declared or default:
                    raise ValueError(f"{key}: {name}.{field_name} needs slot {slot} and default 0, found {declared} "
                                     f"and {default}")
                field = &self.fields[at]
                field.kind = KINDS[kind]
                field.width = WIDTHS[scalar] if scalar is not None else 4
                field.target = -1
                if kind in ("table", "vector_table"):
                    field.target = self.table_index[target]
                elif kind == "union":
                    field.target = union_index[target]
                elif kind == "scalar" and target in union_index:
                    field.kind = UNION_TYPE
                    field.target = union_index[target]
                field_names.append(field_name)
                scalar_names.append(scalar)
                at += 1
        self.field_names = tuple(field_names)
        self.scalar_names = tuple(scalar_names)
        member_names = []
        for index, members in enumerate(unions.values()):
            names = {}
            for number in range(256):
                self.members[index * 256 + number] = -1
            for ordinal, member, table in members:
                self.members[index * 256 + <int> ordinal] = self.table_index[table]
                names[ordinal] = member
            member_names.append(names)
        self.member_names = tuple(member_names)

    def __dealloc__(self):
        PyMem_Free(self.fields)
        PyMem_Free(self.tables)
        PyMem_Free(self.members)


cdef dict _schemas = {}


cpdef Schema schema(str key, bint closed=False):
    """The compiled schema of a key: ``"seed"``, ``"xnn"``, ``"program"``, ... A closed one refuses unknown slots."""
    found = _schemas.get((key, closed))
    if found is None:
        found = _schemas[(key, closed)] = Schema(key, closed)
    return found


# ---- verifier

cdef struct Frame:
    int table
    int field
    # Index in a vector, -1 outside.
    int64_t element


cdef struct Walk:
    const unsigned char* base
    uint64_t size
    Field* fields
    TableShape* tables
    int* members
    int max_depth
    uint64_t tables_left
    # Bytes that may still be referred to. Without sharing they can't be more than the file has.
    uint64_t bytes_left
    int depth
    Frame frames[DEPTH_CEILING + 1]
    Fault fault
    uint64_t at
    int64_t found
    int64_t need


cdef int fail(Walk* walk, Fault fault, uint64_t at, int64_t found, int64_t need) noexcept nogil:
    walk.fault = fault
    walk.at = at
    walk.found = found
    walk.need = need
    return -1


cdef inline int charge(Walk* walk, uint64_t at, uint64_t nbytes) noexcept nogil:
    if nbytes > walk.bytes_left:
        return fail(walk, FAULT_SHARED, at, 0, 0)
    walk.bytes_left -= nbytes
    return 0


cdef int verify_reference(Walk* walk, uint64_t at, uint64_t* target) noexcept nogil:
    """Follow the reference stored at an offset that is inside."""
    cdef uint32_t distance = load_u32(walk.base + at)
    if distance == 0:
        return fail(walk, FAULT_NULL, at, 0, 0)
    if at + distance + 4 > walk.size:
        return fail(walk, FAULT_REFERENCE, at, <int64_t> (at + distance), 4)
    if (at + distance) & 3:
        return fail(walk, FAULT_ALIGNMENT, at, <int64_t> (at + distance), 4)
    target[0] = at + distance
    return 0


cdef int verify_elements(Walk* walk, uint64_t vector, uint64_t width) noexcept nogil:
    """A vector whose count is inside: its elements too, and aligned."""
    cdef uint64_t count = load_u32(walk.base + vector)
    if vector + 4 + count * width > walk.size:
        return fail(walk, FAULT_VECTOR, vector, <int64_t> (walk.size - vector - 4), <int64_t> (count * width))
    if count and (vector + 4) & (width - 1):
        return fail(walk, FAULT_ALIGNMENT, vector, <int64_t> (vector + 4), <int64_t> width)
    return charge(walk, vector, 4 + count * width)


cdef int verify_string(Walk* walk, uint64_t string) noexcept nogil:
    cdef uint64_t length = load_u32(walk.base + string)
    if string + 4 + length + 1 > walk.size:
        return fail(walk, FAULT_VECTOR, string, <int64_t> (walk.size - string - 4), <int64_t> length + 1)
    if walk.base[string + 4 + length]:
        return fail(walk, FAULT_NUL, string + 4 + length, walk.base[string + 4 + length], 0)
    return charge(walk, string, 5 + length)


cdef int verify_table(Walk* walk, int table, uint64_t at) noexcept nogil:
    """A table whose first four bytes are inside and aligned, and all that it refers to.

    On failure the frames up to ``walk.depth`` tell the way to the fault.
    """
    cdef int64_t vtable = <int64_t> at - load_i32(walk.base + at)
    cdef uint64_t vtable_size, table_size, place, target, vector, count, element
    cdef int slots, slot, number, member
    cdef uint16_t offset
    cdef Field* field
    cdef TableShape* shape = &walk.tables[table]
    cdef Frame* frame
    walk.frames[walk.depth].table = table
    walk.frames[walk.depth].field = -1
    walk.frames[walk.depth].element = -1
    if walk.tables_left == 0:
        return fail(walk, FAULT_TABLES, at, 0, 0)
    walk.tables_left -= 1
    if vtable < 0 or vtable & 1 or <uint64_t> vtable + 4 > walk.size:
        return fail(walk, FAULT_VTABLE, at, vtable, 0)
    vtable_size = load_u16(walk.base + vtable)
    table_size = load_u16(walk.base + vtable + 2)
    if vtable_size < 4 or vtable_size & 1 or <uint64_t> vtable + vtable_size > walk.size:
        return fail(walk, FAULT_VTABLE_SIZE, <uint64_t> vtable, <int64_t> vtable_size, 0)
    if table_size < 4 or at + table_size > walk.size:
        return fail(walk, FAULT_TABLE_SIZE, at, <int64_t> table_size, 0)
    if charge(walk, at, table_size):
        return -1
    slots = <int> ((vtable_size - 4) >> 1)
    if shape.closed:
        for slot in range(shape.count, slots):
            if load_u16(walk.base + vtable + 4 + 2 * slot):
                return fail(walk, FAULT_SLOT, at, slot, shape.count)
    if walk.depth + 1 >= walk.max_depth:
        # The table itself may stand here, what it refers to may not.
        for slot in range(min(slots, shape.count)):
            number = walk.fields[shape.first + slot].kind
            if number in (VECTOR_TABLE, TABLE, UNION) and load_u16(walk.base + vtable + 4 + 2 * slot):
                walk.frames[walk.depth].field = slot
                return fail(walk, FAULT_DEPTH, at, walk.max_depth, 0)
    frame = &walk.frames[walk.depth]
    for slot in range(min(slots, shape.count)):
        offset = load_u16(walk.base + vtable + 4 + 2 * slot)
        if offset == 0:
            continue
        field = &walk.fields[shape.first + slot]
        frame.field = slot
        frame.element = -1
        if offset < 4 or offset + <uint64_t> (field.width if field.kind in (SCALAR, UNION_TYPE) else 4) > table_size:
            return fail(walk, FAULT_FIELD, <uint64_t> vtable + 4 + 2 * slot, offset, <int64_t> table_size)
        place = at + offset
        if field.kind == SCALAR:
            if place & <uint64_t> (field.width - 1):
                return fail(walk, FAULT_ALIGNMENT, place, <int64_t> place, field.width)
            continue
        if field.kind == UNION_TYPE:
            # Its value is the next slot, verified there; what remains is a type without a value.
            number = walk.base[place]
            if number and (slot + 1 >= slots or load_u16(walk.base + vtable + 6 + 2 * slot) == 0):
                frame.field = slot + 1
                return fail(walk, FAULT_UNION_VALUE, place, number, 0)
            continue
        if place & 3:
            return fail(walk, FAULT_ALIGNMENT, place, <int64_t> place, 4)
        if verify_reference(walk, place, &target):
            return -1
        if field.kind == STRING:
            if verify_string(walk, target):
                return -1
        elif field.kind == VECTOR_SCALAR:
            if verify_elements(walk, target, <uint64_t> field.width):
                return -1
        elif field.kind == TABLE:
            walk.depth += 1
            if verify_table(walk, field.target, target):
                return -1
            walk.depth -= 1
        elif field.kind == UNION:
            offset = load_u16(walk.base + vtable + 2 + 2 * slot)
            number = walk.base[at + offset] if offset else 0
            if number == 0:
                return fail(walk, FAULT_UNION_TYPE, place, 0, 0)
            member = walk.members[field.target * 256 + number]
            if member < 0:
                return fail(walk, FAULT_UNION_MEMBER, at + offset, number, 0)
            walk.depth += 1
            if verify_table(walk, member, target):
                return -1
            walk.depth -= 1
        else:
            if verify_elements(walk, target, 4):
                return -1
            count = load_u32(walk.base + target)
            if count > walk.tables_left:
                return fail(walk, FAULT_TABLES, target, <int64_t> count, 0)
            for element in range(count):
                frame.element = <int64_t> element
                if verify_reference(walk, target + 4 + 4 * element, &vector):
                    return -1
                if field.kind == VECTOR_STRING:
                    # Counted like tables: a vector of strings may be shared too.
                    if walk.tables_left == 0:
                        return fail(walk, FAULT_TABLES, target, 0, 0)
                    walk.tables_left -= 1
                    if verify_string(walk, vector):
                        return -1
                else:
                    walk.depth += 1
                    if verify_table(walk, field.target, vector):
                        return -1
                    walk.depth -= 1
    return 0


cdef object fault_path(Schema schema, Walk* walk):
    """``XNNGraph.xvalues[5].dims``: the way to the fault; unions are passed through without their names."""
    cdef int depth
    cdef Frame* frame
    cdef Field* field
    parts = [schema.table_names[schema.root]]
    for depth in range(walk.depth + 1):
        frame = &walk.frames[depth]
        if frame.field < 0:
            break
        field = &schema.fields[schema.tables[frame.table].first + frame.field]
        if field.kind == UNION and depth < walk.depth:
            continue
        parts.append(f".{schema.field_names[schema.tables[frame.table].first + frame.field]}")
        if frame.element >= 0:
            parts.append(f"[{frame.element}]")
    return "".join(parts)


cdef object fault_error(FlatBuffer buffer, Walk* walk, object max_tables, object max_shared):
    cdef Schema schema = buffer.schema
    cdef Frame* frame = &walk.frames[walk.depth]
    found, need, size = walk.found, walk.need, walk.size
    path = fault_path(schema, walk) if walk.fault != FAULT_ROOT else None
    at = buffer.offset + <Py_ssize_t> walk.at
    table = schema.table_names[frame.table]
    union, number = "", -1
    if frame.field >= 0:
        number = schema.fields[schema.tables[frame.table].first + frame.field].target
    if walk.fault in (FAULT_UNION_VALUE, FAULT_UNION_TYPE, FAULT_UNION_MEMBER):
        union = schema.union_names[number]
    if walk.fault == FAULT_ROOT:
        text = f"need the root table inside the {size} bytes of flatbuffer and at a multiple of 4, found {found:#x}"
    elif walk.fault == FAULT_ALIGNMENT:
        text = f"need a place in the flatbuffer that is a multiple of {need}, found {found:#x}"
    elif walk.fault == FAULT_VTABLE:
        text = f"need an even vtable offset inside the {size} bytes of flatbuffer, found {found}"
    elif walk.fault == FAULT_VTABLE_SIZE:
        text = f"need an even vtable size from 4 on that stays inside the {size} bytes of flatbuffer, found {found}"
    elif walk.fault == FAULT_TABLE_SIZE:
        text = f"need a table size from 4 on that stays inside the {size} bytes of flatbuffer, found {found}"
    elif walk.fault == FAULT_FIELD:
        text = f"need a field from byte 4 on inside the {need} bytes of its table, found byte {found}"
    elif walk.fault == FAULT_NULL:
        text = "need a reference, found 0"
    elif walk.fault == FAULT_REFERENCE:
        text = f"need a reference into the {size} bytes of flatbuffer, found one to {found:#x}"
    elif walk.fault == FAULT_VECTOR:
        text = f"need {need} bytes of elements, found {found} to the end of the flatbuffer"
    elif walk.fault == FAULT_NUL:
        text = f"need a zero byte after the string, found {found:#x}"
    elif walk.fault == FAULT_UNION_VALUE:
        text = f"union {union} has type {found} but no value"
    elif walk.fault == FAULT_UNION_TYPE:
        text = f"union {union} has a value but no type"
    elif walk.fault == FAULT_UNION_MEMBER:
        text = f"unsupported: union {union} has no member {found}, known are 1 to {max(schema.member_names[number])}"
    elif walk.fault == FAULT_SLOT:
        text = f"slot {found} of {table} is set, the {schema.key} dialect has slots 0 to {need - 1}"
    elif walk.fault == FAULT_DEPTH:
        return LimitError(f"tables nest deeper than {found} - at {path}, offset {at:#x}; max_depth of Limits raises "
                          "the limit")
    elif walk.fault == FAULT_SHARED:
        return LimitError(f"need at most {2 * size + max_shared} bytes of tables, vectors and strings in {size} bytes "
                          f"of flatbuffer, each counted as often as it is referred to, found more - at {path}, offset "
                          f"{at:#x}; max_shared of Limits raises the limit")
    else:
        return LimitError(f"need at most {max_tables} tables in a flatbuffer, found more - at {path}, offset "
                          f"{at:#x}; max_tables of Limits raises the limit")
    return FormatError(text, offset=at, path=path)


@cython.final
cdef class FlatBuffer:
    """A verified flatbuffer inside a payload; made by :func:`verify`."""

    def __init__(self):
        raise TypeError("a FlatBuffer is made by verify()")

    @property
    def root(self):
        """The root table."""
        return make_table(self, self.schema.root, self.root_at)

    @property
    def identifier(self):
        """Bytes 4..8, which hold the file identifier in formats that have one."""
        return bytes(self.data[4:8])


def verify(Payload payload not None, Py_ssize_t offset, Py_ssize_t nbytes, str key not None, *, bint closed=False,
           int max_depth=MAX_DEPTH, max_tables=MAX_TABLES, max_shared=MAX_SHARED):
    """A FlatBuffer over ``payload[offset:offset + nbytes]`` after a check of every offset in it.

    Alignment is judged from the flatbuffer's own start, wherever that lies in memory. A writable payload's
    range is copied first, for what was checked must not change.

    Raises
    ------
    FormatError
        With path and offset of the first fault.
    LimitError
        Tables nest deeper than ``max_depth`` or are more than ``max_tables``, counted once per reference, or all
        that is referred to is more than twice the flatbuffer and ``max_shared`` bytes.
    """
    cdef FlatBuffer self = FlatBuffer.__new__(FlatBuffer)
    cdef Walk walk
    cdef uint32_t root
    cdef int status
    if not (0 <= offset <= payload.nbytes and 0 <= nbytes <= payload.nbytes - offset):
        raise ArgumentError(f"need a range inside {payload.nbytes} bytes, found {nbytes} bytes from {offset:#x}")
    if not 1 <= max_depth <= DEPTH_CEILING:
        raise ArgumentError(f"need max_depth from 1 to {DEPTH_CEILING}, found {max_depth}")
    if nbytes > MAX_NBYTES:
        raise FormatError(f"need a flatbuffer of at most {MAX_NBYTES} bytes, found {nbytes}", offset=offset)
    if nbytes < 8:
        raise FormatError(f"need 8 bytes or more for a flatbuffer, found {nbytes}", offset=offset)
    self.schema = schema(key, closed)
    self.payload = payload
    self.offset = offset
    self.nbytes = nbytes
    self.data = payload.data + offset
    if payload.writable:
        self.copy = AlignedBytes.copy(self.data, nbytes)
        self.data = self.copy.data
    walk.base = self.data
    walk.size = <uint64_t> nbytes
    walk.fields = self.schema.fields
    walk.tables = self.schema.tables
    walk.members = self.schema.members
    walk.max_depth = max_depth
    walk.tables_left = max_tables
    walk.bytes_left = 2 * walk.size + <uint64_t> max_shared
    walk.depth = 0
    walk.fault = FAULT_NONE
    walk.frames[0].field = -1
    walk.frames[0].table = self.schema.root
    root = load_u32(walk.base)
    if root < 4 or root & 3 or root + <uint64_t> 4 > walk.size:
        status = fail(&walk, FAULT_ROOT, 0, root, 0)
    else:
        with nogil:
            status = verify_table(&walk, self.schema.root, root)
    if status:
        raise fault_error(self, &walk, max_tables, max_shared)
    self.root_at = root
    return self


# ---- read cursor

cdef Table make_table(FlatBuffer buffer, int table, uint64_t at):
    cdef Table self = Table.__new__(Table)
    self.buffer = buffer
    self.table = table
    self.offset = <Py_ssize_t> at
    return self


cdef object scalar(const unsigned char* at, str name):
    cdef double f64
    if name == "u32":
        return load_u32(at)
    if name == "i32":
        return load_i32(at)
    if name == "u8":
        return at[0]
    if name == "u64":
        return load_u64(at)
    if name == "i64":
        return <int64_t> load_u64(at)
    if name == "bool":
        return at[0] != 0
    if name == "i8":
        return <int8_t> at[0]
    if name == "f32":
        return load_f32(at)
    if name == "f64":
        memcpy(&f64, at, 8)
        return f64
    if name == "i16":
        return load_i16(at)
    return load_u16(at)


@cython.final
cdef class Table:
    """A table in a verified flatbuffer, read field by field under the schema's names."""

    def __init__(self):
        raise TypeError("a Table comes from a FlatBuffer")

    @property
    def kind(self):
        """Name of the table in the schema."""
        return self.buffer.schema.table_names[self.table]

    @property
    def at(self):
        """Offset of the table in the payload."""
        return self.buffer.offset + self.offset

    cdef int slot(self, str name) except -1:
        try:
            return (<dict> self.buffer.schema.field_index[self.table])[name]
        except KeyError:
            raise AttributeError(f"{self.kind} has no field {name!r}") from None

    def has(self, str name not None):
        """Whether the field is set."""
        return field_at(self.buffer.data, <uint64_t> self.offset, self.slot(name)) != 0

    cdef object read(self, int slot, str name):
        cdef FlatBuffer buffer = self.buffer
        cdef Schema schema = buffer.schema
        cdef const unsigned char* base = buffer.data
        cdef int index = schema.tables[self.table].first + slot
        cdef Field* field = &schema.fields[index]
        cdef uint64_t at = field_at(base, <uint64_t> self.offset, slot)
        cdef uint64_t element
        cdef uint32_t count
        cdef int member
        cdef str kind = schema.scalar_names[index]
        if field.kind == SCALAR or field.kind == UNION_TYPE:
            if at:
                return scalar(base + at, kind)
            return False if kind == "bool" else 0.0 if kind[0] == "f" else 0
        if at == 0:
            return () if field.kind in (VECTOR_SCALAR, VECTOR_TABLE, VECTOR_STRING) else None
        at += load_u32(base + at)
        if field.kind == TABLE:
            return make_table(buffer, field.target, at)
        if field.kind == UNION:
            member = schema.members[field.target * 256 + get_u8(base, <uint64_t> self.offset, slot - 1)]
            return make_table(buffer, member, at)
        if field.kind == STRING:
            return text(buffer, at, name)
        count = load_u32(base + at)
        at += 4
        if field.kind == VECTOR_SCALAR:
            if kind == "i32":
                return tuple([load_i32(base + at + 4 * element) for element in range(count)])
            return tuple([scalar(base + at + element * <uint64_t> field.width, kind) for element in range(count)])
        if field.kind == VECTOR_TABLE:
            return tuple([make_table(buffer, field.target, at + 4 * element + load_u32(base + at + 4 * element))
                          for element in range(count)])
        return tuple([text(buffer, at + 4 * element + load_u32(base + at + 4 * element), name)
                      for element in range(count)])

    def get(self, str name not None):
        """The field's value: a number, string, tuple, Table, or tuple of Tables.

        Absent scalars are 0, absent vectors ``()``, other absent fields None.
        """
        return self.read(self.slot(name), name)

    def rows(self, str name not None, *fields):
        """Some fields of every table in a vector, as a list of tuples: ``rows("segments", "offset", "size")``."""
        cdef Schema schema = self.buffer.schema
        cdef const unsigned char* base = self.buffer.data
        cdef int slot = self.slot(name)
        cdef Field* field = &schema.fields[schema.tables[self.table].first + slot]
        cdef uint64_t at = reference_at(base, <uint64_t> self.offset, slot)
        cdef uint64_t element
        cdef Table row
        if field.kind != VECTOR_TABLE:
            raise AttributeError(f"{self.kind}.{name} is not a vector of tables")
        if at == 0:
            return []
        row = make_table(self.buffer, field.target, 0)
        slots = [(row.slot(each), each) for each in fields]
        found = []
        for element in range(load_u32(base + at)):
            row.offset = <Py_ssize_t> (at + 4 + 4 * element + load_u32(base + at + 4 + 4 * element))
            found.append(tuple([row.read(number, each) for number, each in slots]))
        return found

    def item(self, str name not None, Py_ssize_t index):
        """One Table of a vector of tables; IndexError outside of it."""
        cdef Schema schema = self.buffer.schema
        cdef const unsigned char* base = self.buffer.data
        cdef int slot = self.slot(name)
        cdef Field* field = &schema.fields[schema.tables[self.table].first + slot]
        cdef uint64_t at = reference_at(base, <uint64_t> self.offset, slot)
        if field.kind != VECTOR_TABLE:
            raise AttributeError(f"{self.kind}.{name} is not a vector of tables")
        if at == 0 or not 0 <= index < load_u32(base + at):
            raise IndexError(f"{self.kind}.{name} has {load_u32(base + at) if at else 0} entries, found index "
                             f"{index}")
        at += 4 + 4 * <uint64_t> index
        return make_table(self.buffer, field.target, at + load_u32(base + at))

    def count(self, str name not None):
        """Number of elements of a vector, 0 if the field is absent."""
        cdef uint64_t at = reference_at(self.buffer.data, <uint64_t> self.offset, self.slot(name))
        return load_u32(self.buffer.data + at) if at else 0

    def span(self, str name not None):
        """(offset in the payload, bytes) of a vector's elements; None if the field is absent."""
        cdef int slot = self.slot(name)
        cdef uint64_t at = reference_at(self.buffer.data, <uint64_t> self.offset, slot)
        cdef Field* field = &self.buffer.schema.fields[self.buffer.schema.tables[self.table].first + slot]
        if field.kind != VECTOR_SCALAR:
            raise AttributeError(f"{self.kind}.{name} is not a vector of scalars")
        if at == 0:
            return None
        return self.buffer.offset + <Py_ssize_t> at + 4, <Py_ssize_t> load_u32(self.buffer.data + at) * field.width

    def __repr__(self):
        return f"Table({self.kind} at {self.at:#x})"


cdef str text(FlatBuffer buffer, uint64_t at, name):
    cdef uint32_t length = load_u32(buffer.data + at)
    try:
        return PyUnicode_DecodeUTF8(<const char*> buffer.data + at + 4, length, NULL)
    except UnicodeDecodeError as error:
        raise FormatError(f"need UTF-8 in {name}, found byte {error.object[error.start]:#x}",
                          offset=buffer.offset + <Py_ssize_t> at + 4 + error.start) from None
