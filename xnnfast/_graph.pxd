cdef class Constant:
    cdef readonly int index
    cdef readonly Py_ssize_t nbytes
    cdef readonly Py_ssize_t offset
    cdef readonly str key
    cdef readonly str reason
    cdef object _data
    cdef object _owner


cdef class Value:
    cdef readonly long long id
    cdef readonly str datatype
    cdef readonly tuple shape
    cdef readonly object quantization
    cdef readonly object external_id
    cdef readonly bint is_input
    cdef readonly bint is_output
    cdef readonly Constant constant
    cdef readonly str dq_datatype
    cdef readonly Py_ssize_t offset


cdef class Node:
    cdef readonly object op
    cdef readonly tuple inputs
    cdef readonly tuple outputs
    cdef readonly object attrs
    cdef readonly int flags
    cdef readonly tuple clamp
    cdef readonly long long debug_handle
    cdef readonly int index
    cdef readonly Py_ssize_t offset


cdef class Graph:
    cdef readonly tuple values
    cdef readonly tuple nodes
    cdef readonly tuple inputs
    cdef readonly tuple outputs
    cdef readonly tuple constants
    cdef readonly str dialect
    cdef readonly str container
    cdef readonly str version
    cdef readonly str source
    cdef readonly tuple mem_buffer_sizes
    cdef readonly tuple notes
    cdef readonly dict producers
    cdef dict _by_id
    cdef readonly object owner
    cdef readonly object limits
    cdef object _caches
    cdef object __weakref__
