from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

from ._payload cimport AlignedBytes, Payload


# Loads go through memcpy, so nothing here depends on where the bytes lie in memory.

cdef inline uint16_t load_u16(const unsigned char* p) noexcept nogil:
    cdef uint16_t x
    memcpy(&x, p, 2)
    return x


cdef inline int16_t load_i16(const unsigned char* p) noexcept nogil:
    cdef int16_t x
    memcpy(&x, p, 2)
    return x


cdef inline uint32_t load_u32(const unsigned char* p) noexcept nogil:
    cdef uint32_t x
    memcpy(&x, p, 4)
    return x


cdef inline int32_t load_i32(const unsigned char* p) noexcept nogil:
    cdef int32_t x
    memcpy(&x, p, 4)
    return x


cdef inline uint64_t load_u64(const unsigned char* p) noexcept nogil:
    cdef uint64_t x
    memcpy(&x, p, 8)
    return x


cdef inline float load_f32(const unsigned char* p) noexcept nogil:
    cdef float x
    memcpy(&x, p, 4)
    return x


# The functions below read a verified flatbuffer. An offset of 0 stands for an absent field.

cdef inline uint64_t field_at(const unsigned char* base, uint64_t table, int slot) noexcept nogil:
    """Offset of a table's field."""
    cdef const unsigned char* vtable = base + <int64_t> table - load_i32(base + table)
    cdef int entry = 4 + 2 * slot
    if entry >= load_u16(vtable):
        return 0
    cdef uint16_t offset = load_u16(vtable + entry)
    return table + offset if offset else 0


cdef inline uint32_t get_u32(const unsigned char* base, uint64_t table, int slot) noexcept nogil:
    cdef uint64_t at = field_at(base, table, slot)
    return load_u32(base + at) if at else 0


cdef inline int32_t get_i32(const unsigned char* base, uint64_t table, int slot) noexcept nogil:
    cdef uint64_t at = field_at(base, table, slot)
    return load_i32(base + at) if at else 0


cdef inline uint64_t get_u64(const unsigned char* base, uint64_t table, int slot) noexcept nogil:
    cdef uint64_t at = field_at(base, table, slot)
    return load_u64(base + at) if at else 0


cdef inline int16_t get_i16(const unsigned char* base, uint64_t table, int slot) noexcept nogil:
    cdef uint64_t at = field_at(base, table, slot)
    return load_i16(base + at) if at else 0


cdef inline uint8_t get_u8(const unsigned char* base, uint64_t table, int slot) noexcept nogil:
    cdef uint64_t at = field_at(base, table, slot)
    return base[at] if at else 0


cdef inline float get_f32(const unsigned char* base, uint64_t table, int slot) noexcept nogil:
    cdef uint64_t at = field_at(base, table, slot)
    return load_f32(base + at) if at else 0.0


cdef inline uint64_t reference_at(const unsigned char* base, uint64_t table, int slot) noexcept nogil:
    """Offset of what a field refers to: a table, a vector's or string's length."""
    cdef uint64_t at = field_at(base, table, slot)
    return at + load_u32(base + at) if at else 0


cdef struct Field:
    int kind
    int width
    int target


cdef struct TableShape:
    int first
    int count
    bint closed


cdef class Schema:
    cdef readonly str key
    cdef readonly bint closed
    cdef Field* fields
    cdef TableShape* tables
    # Union u, ordinal n: table members[u * 256 + n], -1 if there is none.
    cdef int* members
    cdef int root
    cdef readonly tuple table_names
    cdef tuple field_names
    cdef tuple union_names
    cdef tuple scalar_names
    cdef tuple member_names
    cdef list field_index
    cdef dict table_index


cdef class FlatBuffer:
    cdef readonly Schema schema
    cdef readonly Payload payload
    # Offset of the flatbuffer in the payload.
    cdef readonly Py_ssize_t offset
    cdef readonly Py_ssize_t nbytes
    # Points into payload, or into copy.
    cdef const unsigned char* data
    # Made when the payload is writable: what was verified must stay what it was.
    cdef readonly AlignedBytes copy
    cdef uint64_t root_at


cdef class Table:
    cdef readonly FlatBuffer buffer
    # From the start of the flatbuffer.
    cdef readonly Py_ssize_t offset
    cdef int table

    cdef int slot(self, str name) except -1
    cdef object read(self, int slot, str name)
