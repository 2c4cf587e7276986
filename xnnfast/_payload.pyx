# cython: language_level=3
"""Bytes held still: a file mapped read-only, or the memory of any object with the buffer protocol.

In comes a path or a buffer; out goes a Payload, itself a read-only buffer. Whoever holds a view of it
keeps the mapping, or the source object, alive.
"""

cimport cython
from cpython.buffer cimport (
    PyBUF_FULL_RO, PyBuffer_FillInfo, PyBuffer_IsContiguous, PyBuffer_Release, PyObject_CheckBuffer,
    PyObject_GetBuffer,
)
from cpython.memoryview cimport PyMemoryView_GET_BUFFER
from libc.stdint cimport uintptr_t
from libc.stdlib cimport free
from libc.string cimport memcpy, memset

import errno
import os
import stat

from .errors import ArgumentError, FormatError

cdef extern from "<stdlib.h>" nogil:
    int posix_memalign(void** memory, size_t alignment, size_t size)

cdef extern from "<sys/mman.h>" nogil:
    ctypedef Py_ssize_t off_t
    enum:
        PROT_READ
        MAP_PRIVATE
        MADV_DONTNEED
    void* MAP_FAILED
    void* mmap(void* address, size_t length, int protection, int flags, int fd, off_t offset)
    int munmap(void* address, size_t length)
    int madvise(void* address, size_t length, int advice)

cdef extern from "<unistd.h>" nogil:
    enum:
        _SC_PAGESIZE
    long sysconf(int name)

cdef extern from "<errno.h>" nogil:
    int c_errno "errno"

# xnnpack.h: XNN_EXTRA_BYTES, what a kernel may read past the end of a value.
cdef enum:
    TAIL = 16
    ALIGNMENT = 64
    SPARE = 64
    # Smallest page of the supported platforms: right, if pessimistic, where pages are larger.
    SMALL_PAGE_SHIFT = 12
    # From here on a copy takes long enough to let other threads run.
    LONG_COPY = 1 << 20

cdef Py_ssize_t PAGE = sysconf(_SC_PAGESIZE)


@cython.final
cdef class AlignedBytes:
    """A read-only copy of bytes at an address that is a multiple of 64, with 64 zero bytes after the last."""

    def __cinit__(self):
        self.data = NULL
        self.nbytes = 0

    def __init__(self, source):
        raise TypeError("AlignedBytes are made by padded_copy()")

    @staticmethod
    cdef AlignedBytes copy(const unsigned char* source, Py_ssize_t nbytes):
        cdef AlignedBytes self = AlignedBytes.__new__(AlignedBytes)
        cdef void* memory = NULL
        # The sum can't overflow: nbytes is that of an object in memory.
        if posix_memalign(&memory, ALIGNMENT, <size_t> nbytes + SPARE):
            raise MemoryError(f"no memory for a copy of {nbytes} bytes")
        self.data = <unsigned char*> memory
        self.nbytes = nbytes
        if nbytes >= LONG_COPY:
            with nogil:
                memcpy(self.data, source, <size_t> nbytes)
        else:
            memcpy(self.data, source, <size_t> nbytes)
        memset(self.data + nbytes, 0, SPARE)
        return self

    @property
    def address(self):
        return <uintptr_t> self.data

    def __len__(self):
        return self.nbytes

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.data, self.nbytes, 1, flags)

    def __dealloc__(self):
        free(self.data)

    def __repr__(self):
        return f"AlignedBytes({self.nbytes} bytes)"


def padded_copy(source):
    """A copy of a contiguous buffer with 64 zero bytes after the last, aligned to 64."""
    cdef Py_buffer view
    PyObject_GetBuffer(source, &view, PyBUF_FULL_RO)
    try:
        if not PyBuffer_IsContiguous(&view, b"C"):
            raise ArgumentError(f"need contiguous bytes, found a strided {type(source).__name__}")
        return AlignedBytes.copy(<const unsigned char*> view.buf, view.len)
    finally:
        PyBuffer_Release(&view)


cdef bint may_change(object source):
    """Whether anybody could write the memory of a buffer: a read-only view of something writable counts."""
    cdef Py_buffer view
    cdef int _
    for _ in range(32):
        if type(source) is bytes or isinstance(source, (Payload, AlignedBytes)):
            return False
        if not PyObject_CheckBuffer(source):
            return False
        PyObject_GetBuffer(source, &view, PyBUF_FULL_RO)
        readonly = view.readonly
        PyBuffer_Release(&view)
        if not readonly:
            return True
        # A view names what it looks at: memoryview.obj, numpy.ndarray.base.
        below = getattr(source, "obj", None) if isinstance(source, memoryview) else getattr(source, "base", None)
        if below is None:
            return False
        source = below
    return True


@cython.final
@cython.no_gc_clear          # the collector must not drop the source's buffer before __dealloc__ releases it
cdef class Payload:
    """A whole byte range, held: attributes ``nbytes``, ``address``, ``name``, ``path``, ``writable`` and ``mapped``.

    A Payload supports the buffer protocol (read-only), so ``memoryview(payload)[a:b]`` and
    ``numpy.frombuffer(payload)`` share its memory and keep it alive. It is made by :meth:`Payload.open`.
    """

    def __cinit__(self):
        self.data = NULL
        self.nbytes = 0
        self.readable = 0
        self.writable = False
        self.mapped = False
        self.has_source = False
        self.name = ""

    def __init__(self):
        raise TypeError("a Payload is made by Payload.open(path or buffer)")

    @staticmethod
    def open(source):
        """A Payload over a file (``str`` or ``os.PathLike``) or over the memory of a buffer; nothing is copied.

        Raises
        ------
        FormatError
            The source is empty, not a regular file, or not contiguous.
        ArgumentError
            It is neither a path nor a buffer.
        OSError
            The file can't be opened.
        """
        if isinstance(source, Payload):
            return source
        if isinstance(source, (str, os.PathLike)):
            return _open_path(os.fspath(source))
        if not PyObject_CheckBuffer(source):
            raise ArgumentError(f"need a path or an object with the buffer protocol, found {type(source).__name__}")
        return _open_buffer(source)

    @property
    def address(self):
        """Address of the first byte."""
        return <uintptr_t> self.data

    def __len__(self):
        return self.nbytes

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        PyBuffer_FillInfo(buffer, self, <void*> self.data, self.nbytes, 1, flags)

    def __dealloc__(self):
        if self.has_source:
            PyBuffer_Release(&self.source)
        elif self.data is not NULL:
            munmap(<void*> self.data, <size_t> self.nbytes)

    cdef bint tail_ok(self, Py_ssize_t end) noexcept:
        if end <= self.readable - TAIL:
            return True
        cdef uintptr_t after = <uintptr_t> self.data + <uintptr_t> end
        return (after - 1) >> SMALL_PAGE_SHIFT == (after + TAIL - 1) >> SMALL_PAGE_SHIFT

    def tail_readable(self, Py_ssize_t end):
        """Whether the 16 bytes from offset ``end`` on are certainly readable, as XNNPACK demands of values."""
        if not 0 <= end <= self.nbytes:
            raise ArgumentError(f"need an offset from 0 to {self.nbytes}, found {end}")
        return self.tail_ok(end)

    def release(self, Py_ssize_t start, Py_ssize_t stop):
        """Bytes given back to the system: the whole pages of the mapping inside ``[start, stop)``.

        They stay valid and are read from the file again when touched. Nothing happens, and 0 is
        returned, when the payload is not a mapped file.
        """
        cdef uintptr_t low, high
        cdef int status
        if not 0 <= start <= stop <= self.nbytes:
            raise ArgumentError(f"need 0 <= start <= stop <= {self.nbytes}, found {start} and {stop}")
        if not self.mapped:
            return 0
        low = (<uintptr_t> self.data + <uintptr_t> start + <uintptr_t> PAGE - 1) & ~(<uintptr_t> PAGE - 1)
        high = (<uintptr_t> self.data + <uintptr_t> stop) & ~(<uintptr_t> PAGE - 1)
        if high <= low:
            return 0
        with nogil:
            status = madvise(<void*> low, high - low, MADV_DONTNEED)
        return 0 if status else <Py_ssize_t> (high - low)

    def __reduce_ex__(self, protocol):
        from .pickling import of_payload

        return of_payload(self, protocol)

    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return self

    def __repr__(self):
        return f"Payload({self.name!r}, {self.nbytes} bytes, {'mapped' if self.mapped else 'held'})"


cdef Payload _open_path(object path):
    cdef Payload self = Payload.__new__(Payload)
    cdef void* memory
    cdef int fd, error
    # O_NONBLOCK: opening a FIFO must fail, not wait for a writer.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not stat.S_ISREG(status.st_mode):
            raise FormatError(f"need a regular file to map, {os.fsdecode(path)!r} is not one: read it and pass the "
                              "bytes")
        if status.st_size == 0:
            raise FormatError(f"{os.fsdecode(path)!r} is empty")
        self.nbytes = status.st_size
        memory = mmap(NULL, <size_t> self.nbytes, PROT_READ, MAP_PRIVATE, fd, 0)
        error = c_errno
        if memory == MAP_FAILED:
            raise OSError(error, os.strerror(error), path)
    finally:
        os.close(fd)
    self.data = <const unsigned char*> memory
    self.mapped = True
    self.identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    self.name = os.fsdecode(path)
    self.path = os.path.abspath(self.name)
    # The rest of the last page is mapped too, and reads as zero.
    self.readable = (self.nbytes + PAGE - 1) // PAGE * PAGE
    return self


cdef Payload _open_buffer(object source):
    cdef Payload self = Payload.__new__(Payload)
    cdef Py_buffer* view = &self.source
    cdef object exporter = source
    if isinstance(source, memoryview) and source.obj is not None:
        # What the view looks at is held, not the view: a view with an export crashes the collectors of Python
        # before 3.13 when it is part of a cycle (gh-77894).
        exporter = source.obj
        view = PyMemoryView_GET_BUFFER(source)
    PyObject_GetBuffer(exporter, &self.source, PyBUF_FULL_RO)
    self.has_source = True
    self.holder = exporter
    if not PyBuffer_IsContiguous(view, b"C"):
        raise FormatError(f"need contiguous bytes, found a strided {type(source).__name__}")
    if view.len == 0:
        raise FormatError(f"the {type(source).__name__} is empty")
    self.data = <const unsigned char*> view.buf
    self.nbytes = self.readable = view.len
    self.writable = may_change(source)
    self.name = f"<{type(source).__name__} of {self.nbytes} bytes>"
    return self
