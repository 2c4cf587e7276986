cdef class AlignedBytes:
    cdef unsigned char* data
    cdef readonly Py_ssize_t nbytes
    cdef object __weakref__

    @staticmethod
    cdef AlignedBytes copy(const unsigned char* source, Py_ssize_t nbytes)


cdef class Payload:
    cdef const unsigned char* data
    cdef readonly Py_ssize_t nbytes
    cdef readonly str name
    # Absolute, of a mapped file; None where there is none.
    cdef readonly str path
    # The source may change under us: its bytes can't be trusted to stay what they were when read.
    cdef readonly bint writable
    cdef readonly bint mapped
    # What the mapped file was when it was opened: (device, inode, size, mtime_ns, ctime_ns), else None.
    cdef readonly tuple identity
    # Keeps data valid when the bytes come from a Python object, which is held too: the collector
    # follows attributes that are objects, and a type without any is not followed at all.
    cdef Py_buffer source
    cdef bint has_source
    cdef object holder
    # Bytes from data on that are certainly readable; a map ends with its last page.
    cdef Py_ssize_t readable
    cdef object __weakref__

    cdef bint tail_ok(self, Py_ssize_t end) noexcept
