# cython: language_level=3
"""Runtime: the plan that runs. The only module that links XNNPACK.

In comes a Graph; its lowered form is defined in a fresh XNNPACK subgraph, constants are handed over in
place, and the runtime made of it is reshaped, set up and invoked with the GIL released.
"""

cimport cython
cimport numpy as cnp
from cpython.buffer cimport PyBUF_READ
from cpython.memoryview cimport PyMemoryView_FromMemory
# Some of these are for the generated lower.pxi alone, which need not be there when this is linted.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uintptr_t, SIZE_MAX  # no-cython-lint
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memset

from ._graph cimport Graph, Node, Value
from .includes.xnnpack cimport *

import marshal
import os
import re
import threading
import time
import weakref

import numpy as np

from . import shapes as _shapes
from .datatypes import DATATYPES
from .errors import (
    ArgumentError, BusyError, ClosedError, DtypeError, NotFiniteError, OverlapError, ShapeError,
    UnsupportedError, XnnpackError, xnnpack_error,
)
from .fuse import fold_affine as _fold_affine
from .lower import lower
from .quantization import PerBlock, PerChannel, PerTensor, PerToken, bf16_to_f32

cnp.import_array()

cdef extern from *:
    """
    #include <pthread.h>
    #include <stdlib.h>
    #include <string.h>

    /* Bumped in every forked child: pools made before have no threads there. */
    static volatile unsigned xf_fork_generation = 0;
    static void xf_after_fork(void) { ++xf_fork_generation; }
    static void xf_watch_forks(void) { pthread_atfork(NULL, NULL, xf_after_fork); }

    static inline int xf_try_enter(int* flag) { return __atomic_exchange_n(flag, 1, __ATOMIC_ACQUIRE) == 0; }
    static inline void xf_leave(int* flag) { __atomic_store_n(flag, 0, __ATOMIC_RELEASE); }

    #include <time.h>
    static inline double xf_now(void) {
      struct timespec t;
      clock_gettime(CLOCK_MONOTONIC, &t);
      return (double) t.tv_sec + 1e-9 * (double) t.tv_nsec;
    }

    static void* xf_alloc(size_t alignment, size_t size) {
      void* p = NULL;
      if (posix_memalign(&p, alignment, size) != 0) return NULL;
      return p;
    }
    """
    unsigned xf_fork_generation
    void xf_watch_forks() nogil
    bint xf_try_enter(int* flag) nogil
    void xf_leave(int* flag) nogil
    double xf_now() nogil
    void* xf_alloc(size_t alignment, size_t size) nogil

include "_generated/lower.pxi"

cdef extern from *:
    """
    #include "cpuinfo.h"
    #include "xnnpack/hardware-config.h"

    /* Microarchitectures: that of the first core, by which XNNPACK chooses among kernels, then all. */
    static int xf_processor(uint32_t* out, int room) {
      int n = 0;
      const struct cpuinfo_core* core;
      uint32_t i, all;
      if (!cpuinfo_initialize()) return 0;
      core = cpuinfo_get_core(0);
      if (core != NULL) out[n++] = (uint32_t) core->uarch;
      all = cpuinfo_get_uarchs_count();
      for (i = 0; i < all && n < room; ++i) out[n++] = (uint32_t) cpuinfo_get_uarch(i)->uarch;
      return n;
    }

    /* The instruction sets that XNNPACK selects on this CPU, from weakest to strongest. */
    static int xf_isa(const char** names, int room) {
      const struct xnn_hardware_config* c = xnn_init_hardware_config();
      int n = 0;
      if (c == NULL) return -1;
      #define XF_ISA(field, name) if (c->field && n < room) names[n++] = name;
      #if XNN_ARCH_X86 || XNN_ARCH_X86_64
      XF_ISA(use_x86_ssse3, "ssse3") XF_ISA(use_x86_sse4_1, "sse4.1") XF_ISA(use_x86_avx, "avx")
      XF_ISA(use_x86_f16c, "f16c") XF_ISA(use_x86_fma3, "fma3") XF_ISA(use_x86_avx2, "avx2")
      XF_ISA(use_x86_avxvnni, "avxvnni") XF_ISA(use_x86_avxvnniint8, "avxvnniint8")
      XF_ISA(use_x86_avx256skx, "avx256skx") XF_ISA(use_x86_avx256vnni, "avx256vnni")
      XF_ISA(use_x86_avx256vnnigfni, "avx256vnnigfni") XF_ISA(use_x86_avx512f, "avx512f")
      XF_ISA(use_x86_avx512skx, "avx512skx") XF_ISA(use_x86_avx512vbmi, "avx512vbmi")
      XF_ISA(use_x86_avx512vnni, "avx512vnni") XF_ISA(use_x86_avx512vnnigfni, "avx512vnnigfni")
      XF_ISA(use_x86_avx512fp16, "avx512fp16") XF_ISA(use_x86_avx512amx, "avx512amx")
      #elif XNN_ARCH_ARM64
      XF_ISA(use_arm_neon, "neon") XF_ISA(use_arm_neon_fma, "neonfma") XF_ISA(use_arm_neon_fp16, "neonfp16")
      XF_ISA(use_arm_neon_fp16_arith, "neonfp16arith") XF_ISA(use_arm_neon_bf16, "neonbf16")
      XF_ISA(use_arm_neon_dot, "neondot") XF_ISA(use_arm_neon_i8mm, "neoni8mm")
      XF_ISA(use_arm_sve, "sve") XF_ISA(use_arm_sve2, "sve2") XF_ISA(use_arm_sme, "sme") XF_ISA(use_arm_sme2, "sme2")
      #endif
      #undef XF_ISA
      return n;
    }
    """
    int xf_isa(const char** names, int room) nogil
    int xf_processor(uint32_t* out, int room) nogil

cdef extern from "xnnfast/loop-order.h":
    size_t xnnfast_loop_order() nogil
    void xnnfast_set_loop_order(size_t setting) nogil
    size_t xnnfast_l2_bytes() nogil

cdef extern from "xnnfast/isa-cap.h":
    const char* xnnfast_isa_name(int index) nogil

cdef extern from "xnnfast/second-isa.h":
    const char* xnnfast_second_isa() nogil
    double xnnfast_second_ratio() nogil
    size_t xnnfast_second_count() nogil

cdef enum:
    # What XNNPACK may read behind any tensor is 16 bytes (XNN_EXTRA_BYTES of xnnpack.h): a cache line.
    SLACK = 64
    TAIL = 16
    MAX_DIMS = 6
    NO_FUSION = 0x80000000
    FORCE_FP16 = 0x4
    PROFILING = 0x8
    LOW_MEMORY = 0x20

xf_watch_forks()

# ---------------------------------------------------------------------------------------------------
# Memory


@cython.final
@cython.no_gc
cdef class PaddedMemory:
    """Memory that an array of ours stands on: aligned, with readable bytes behind the last one."""

    cdef void* data
    cdef size_t nbytes

    def __cinit__(self):
        self.data = NULL

    def __dealloc__(self):
        free(self.data)


cdef cnp.ndarray padded_array(int ndim, cnp.npy_intp* dims, int typenum, size_t nbytes):
    cdef PaddedMemory memory = PaddedMemory.__new__(PaddedMemory)
    memory.data = xf_alloc(64, nbytes + SLACK)
    if memory.data == NULL:
        raise MemoryError(f"can't allocate {nbytes} bytes for an array")
    memory.nbytes = nbytes
    # The slack must not hold numbers that slow a kernel down (denormals, NaN).
    memset(<char*> memory.data + nbytes, 0, SLACK)
    cdef cnp.ndarray array = cnp.PyArray_SimpleNewFromData(ndim, dims, typenum, memory.data)
    cnp.set_array_base(array, memory)
    return array


def empty(shape, dtype="fp32"):
    """An uninitialised array that :meth:`Runtime.run` takes without a copy, always.

    Parameters
    ----------
    shape : int or sequence of int
    dtype : str or NumPy dtype
        One of XNNPACK's names (``"fp32"``, ``"qint8"``, ...) or anything ``numpy.dtype`` takes.

    Returns
    -------
    numpy.ndarray
        C-contiguous, aligned to 64 bytes, with 64 readable bytes behind the last element.

    Raises
    ------
    DtypeError
        The dtype holds objects, or is one of 4 bits: those are packed into uint8.
    ShapeError
        A dimension is negative.
    """
    entry = DATATYPES.get(dtype) if isinstance(dtype, str) else None
    if entry is not None and entry.dtype is None:
        raise DtypeError(f"{dtype} has no NumPy dtype; its packed form is uint8", expected="a whole-byte datatype",
                         got=dtype)
    kind = entry.dtype if entry is not None else np.dtype(dtype)
    if kind.hasobject:
        raise DtypeError(f"need a numeric dtype, got {kind}", expected="a numeric dtype", got=kind)
    dims = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
    count = 1
    for dim in dims:
        if dim < 0:
            raise ShapeError(f"need dimensions of at least 0, got shape {tuple(dims)}", got=tuple(dims))
        count *= int(dim)
    cdef cnp.npy_intp n = count * kind.itemsize
    return padded_array(1, &n, cnp.NPY_UINT8, n).view(kind).reshape(dims)


cdef bint tail_readable(const char* data, size_t nbytes) noexcept nogil:
    # The 16 bytes behind the last one lie in its page: certainly mapped.
    cdef uintptr_t end = <uintptr_t> data + nbytes
    return nbytes == 0 or ((end - 1) >> 12) == ((end + TAIL - 1) >> 12)


cdef bint is_padded(cnp.ndarray array, size_t nbytes):
    """Whether the array lies in memory of ours, which has slack behind it."""
    cdef object base = array
    cdef PaddedMemory memory
    cdef const char* end = <const char*> cnp.PyArray_DATA(array) + nbytes
    while base is not None:
        if type(base) is PaddedMemory:
            memory = <PaddedMemory> base
            return end <= <const char*> memory.data + memory.nbytes + (SLACK - TAIL)
        if not isinstance(base, np.ndarray):
            return False
        base = base.base
    return False


# ---------------------------------------------------------------------------------------------------
# Packed weights, shared by all runtimes of a graph


@cython.final
@cython.no_gc_clear
cdef class PackedWeights:
    """The engine's packed copies of weights, made by the first creation and shared by later ones.

    XNNPACK's own key (seed, kernel, bias) leaves out scales and zero points, so an entry is known by the
    ordinal of the call within a creation, which is the same for the same lowered graph and flags, and the
    key only confirms it. Anything unexpected means: pack afresh for this runtime.
    Nothing ever moves: the addresses are captured when a runtime is reshaped.
    """

    def __cinit__(self, size_t capacity):
        memset(&self.state, 0, sizeof(PackedState))
        self.state.entries = <PackedEntry*> calloc(capacity, sizeof(PackedEntry))
        if self.state.entries == NULL:
            raise MemoryError
        self.state.capacity = capacity
        self.lock = threading.Lock()
        self.saving = threading.Lock()
        self.generation = xf_fork_generation
        self.provider.context = <void*> &self.state
        self.provider.look_up = packed_look_up
        self.provider.reserve_space = packed_reserve
        self.provider.look_up_or_insert = packed_insert
        self.provider.is_finalized = packed_is_finalized
        self.provider.offset_to_addr = packed_address
        self.provider.delete_cache = packed_delete

    def __dealloc__(self):
        cdef size_t i
        if self.state.entries != NULL:
            for i in range(self.state.count):
                if self.state.entries[i].owned:
                    free(self.state.entries[i].data)
            free(self.state.entries)
        free(self.state.reserved)

    @property
    def nbytes(self):
        """Bytes of packed weights."""
        return self.state.nbytes

    @property
    def mapped(self):
        """How many of those bytes lie in a mapped cache file."""
        return self.state.mapped

    @property
    def hits(self):
        """How often a packed weight was handed out again."""
        return self.state.hits

    @property
    def misses(self):
        """How often a weight had to be packed."""
        return self.state.misses

    cdef object acquire(self):
        """The lock, to be entered. In a forked child it may be held by a thread that does not exist there,
        in the middle of a creation: what earlier ones had finished stays good, the rest is forgotten."""
        if self.generation != xf_fork_generation:
            self.generation = xf_fork_generation
            self.lock = threading.Lock()
            self.saving = threading.Lock()
            self.state.reserved = NULL
            self.state.count = self.state.finished
        return self.lock

    cdef bint intact(self) except -1:
        """Whether the cache file that entries point into is still what was verified, as far as one can see."""
        if self.file is None:
            return True
        from .weights_cache import intact

        return intact(self.file)

    cdef bint attach(self, object payload, list entries, list addresses) except -1:
        """Take the entries of a cache file, as if the first creation had made them; whether there was room."""
        cdef const uint8_t[::1] view = memoryview(payload)
        cdef PackedEntry* entry
        if self.state.finished or <size_t> len(entries) > self.state.capacity:
            return False
        self.file = payload
        for seed, looked_up, kernel, bias, offset, size, _ in entries:
            entry = &self.state.entries[self.state.count]
            entry.seed = seed
            entry.kernel = <const void*> <uintptr_t> addresses[kernel]
            entry.bias = NULL if bias < 0 else <const void*> <uintptr_t> addresses[bias]
            entry.size = size
            entry.data = <void*> &view[<Py_ssize_t> offset]
            entry.looked_up = looked_up
            entry.owned = False
            self.state.nbytes += entry.size
            self.state.mapped += entry.size
            self.state.count += 1
        self.state.complete = self.state.finished = self.state.count
        self.since = time.time_ns()
        return True

    cdef list export(self):
        """(seed, looked up, address of kernel, address of bias, packed bytes) of every entry that the first creation
        made."""
        cdef size_t i
        cdef PackedEntry* entry
        cdef list made = []
        for i in range(self.state.complete):
            entry = &self.state.entries[i]
            data = PyMemoryView_FromMemory(<char*> entry.data, entry.size, PyBUF_READ)
            made.append((entry.seed, bool(entry.looked_up), <uintptr_t> entry.kernel, <uintptr_t> entry.bias, data))
        return made

    cdef int begin(self) except -1:
        """Before a creation, with the lock held."""
        if self.state.complete == 0:
            self.since = time.time_ns()
        self.state.cursor = 0
        self.state.replaying = self.state.complete > 0
        self.state.looked_up = False
        self.state.broken = False
        self.state.pending = SIZE_MAX
        return 0

    cdef bint end(self, bint created) noexcept nogil:
        """After a creation; whether it was handed nothing but what an earlier one had packed.

        ``created`` is whether its runtime is in use: otherwise nothing else has what it packed.
        """
        cdef PackedState* state = &self.state
        free(state.reserved)
        state.reserved = NULL
        if not created:
            while state.count > state.finished:
                state.count -= 1
                state.nbytes -= state.entries[state.count].size
                free(state.entries[state.count].data)
            return False
        state.finished = state.count
        if state.complete == 0:
            state.complete = state.count
        return state.replaying and state.cursor == state.complete


cdef inline bint same_key(const PackedEntry* entry, const xnn_weights_cache_look_up_key* key) noexcept nogil:
    return entry.seed == key.seed and entry.kernel == key.kernel and entry.bias == key.bias


cdef size_t packed_look_up(void* context, const xnn_weights_cache_look_up_key* key) noexcept nogil:
    cdef PackedState* state = <PackedState*> context
    cdef PackedEntry* entry
    state.looked_up = True
    state.pending = SIZE_MAX
    if state.replaying:
        if state.cursor < state.complete:
            entry = &state.entries[state.cursor]
            if entry.looked_up and same_key(entry, key):
                state.pending = state.cursor
                state.cursor += 1
                state.looked_up = False
                state.hits += 1
                return state.pending
        state.replaying = False
    return SIZE_MAX


cdef void* packed_reserve(void* context, size_t n) noexcept nogil:
    cdef PackedState* state = <PackedState*> context
    free(state.reserved)
    state.reserved = NULL
    state.pending = SIZE_MAX
    if n > SIZE_MAX - SLACK:
        return NULL
    state.reserved = xf_alloc(128, n + SLACK)
    state.reserved_size = n
    if state.reserved != NULL:
        memset(<char*> state.reserved + n, 0, SLACK)
    return state.reserved


cdef size_t packed_insert(
        void* context, const xnn_weights_cache_look_up_key* key, void* data, size_t size) noexcept nogil:
    cdef PackedState* state = <PackedState*> context
    cdef PackedEntry* entry
    cdef size_t pending = state.pending
    state.pending = SIZE_MAX
    if data == NULL:
        # A convolution asks again after its hit; an answer of another size would be read out of bounds.
        if pending != SIZE_MAX and same_key(&state.entries[pending], key) and state.entries[pending].size == size:
            return pending
        state.broken = True
        return SIZE_MAX
    if data != state.reserved or size > state.reserved_size:
        state.broken = True
        return SIZE_MAX
    if state.replaying and not state.looked_up and state.cursor < state.complete:
        # Operators that never look up have packed again: their bytes must be those of the first time.
        entry = &state.entries[state.cursor]
        if not entry.looked_up and same_key(entry, key) and entry.size == size and memcmp(entry.data, data, size) == 0:
            state.cursor += 1
            state.hits += 1
            return state.cursor - 1
    state.replaying = False
    if state.count == state.capacity:
        state.broken = True
        return SIZE_MAX
    entry = &state.entries[state.count]
    entry.seed = key.seed
    entry.kernel = key.kernel
    entry.bias = key.bias
    entry.size = size
    entry.data = data
    entry.owned = True
    entry.looked_up = state.looked_up
    state.looked_up = False
    state.reserved = NULL
    state.nbytes += size
    state.misses += 1
    state.count += 1
    return state.count - 1


cdef c_bool packed_is_finalized(void* context) noexcept nogil:
    return True


cdef void* packed_address(void* context, size_t offset) noexcept nogil:
    cdef PackedState* state = <PackedState*> context
    return state.entries[offset].data if offset < state.count else NULL


cdef xnn_status packed_delete(void* context) noexcept nogil:
    return xnn_status_success


# ---------------------------------------------------------------------------------------------------
# Library, pools

cdef bint _initialized = False
_initialize_lock = threading.Lock()


def _new_locks():
    # A thread that held one when the process forked does not exist in the child.
    global _initialize_lock, _packed_lock
    _initialize_lock = threading.Lock()
    _packed_lock = threading.Lock()


os.register_at_fork(after_in_child=_new_locks)


cdef int check_isa_cap() except -1:
    """Refuse what XNNFAST_ISA and its kin hold if the C side would pass over it without a word."""
    cdef int i = 0
    names = []
    while xnnfast_isa_name(i) != NULL:
        names.append(xnnfast_isa_name(i).decode())
        i += 1
    for variable, known in (("XNNFAST_ISA", names), ("XNNFAST_SECOND_ISA", [*names, "none"])):
        found = os.environ.get(variable)
        if found is not None and found not in known:
            raise ArgumentError(f"need one of {', '.join(known)} in {variable}, found {found!r}")
    found = os.environ.get("XNNFAST_SECOND_RATIO")
    if found is not None and re.fullmatch(r"0*[1-9][0-9]*(\.[0-9]*)?|0*\.0*[1-9][0-9]*", found) is None:
        raise ArgumentError(f"need a number above 0 in XNNFAST_SECOND_RATIO, found {found!r}")
    return 0


cdef int initialize() except -1:
    """xnn_initialize once per process, with no allocator: the first caller's would be kept for ever."""
    global _initialized
    cdef xnn_status status
    if _initialized:
        return 0
    with _initialize_lock:
        if not _initialized:
            check_isa_cap()
            with nogil:
                status = xnn_initialize(NULL)
            if status == xnn_status_unsupported_hardware:
                raise UnsupportedError(
                    "XNNPACK finds no CPU that it supports: it needs x86-64 or aarch64, and a kernel that shows "
                    "processors under the device tree of sysfs (some sandboxed containers hide it)"
                )
            if status != xnn_status_success:
                raise xnnpack_error("xnn_initialize", status)
            _initialized = True
    return 0


def processor():
    """Numbers of cpuinfo for this machine's microarchitectures, the first core's first: XNNPACK chooses by it too."""
    cdef uint32_t found[64]
    cdef int n, i
    initialize()
    n = xf_processor(found, 64)
    return tuple([found[i] for i in range(n)])


def isa():
    """The instruction sets that XNNPACK found on this CPU and selects kernels for, weakest first."""
    cdef const char* names[64]
    cdef int n, i
    initialize()
    n = xf_isa(names, 64)
    return [names[i].decode() for i in range(n)]


def second_isa():
    """The second choice of kernels for 8-bit products: its strongest instruction set, its factor of padding, its uses.

    None where there is no second choice. Uses are counted over the process, one for each operator made.
    """
    initialize()
    if xnnfast_second_isa() == NULL:
        return None
    return xnnfast_second_isa().decode(), xnnfast_second_ratio(), xnnfast_second_count()


def loop_order(setting=None):
    """How matrix products walk over rows and channels, in the whole process; the setting until now.

    0 is XNNPACK's order, 1 the one chosen for each product, and a larger number is the bytes of packed
    filter in a block. Results are the same. The first setting comes from XNNFAST_LOOP_ORDER, else it is 1.
    """
    cdef size_t before = xnnfast_loop_order()
    if setting is not None:
        xnnfast_set_loop_order(setting)
    return before


def l2_bytes():
    """The level 2 cache that one core can count on, as the loop order assumes it."""
    return xnnfast_l2_bytes()


@cython.final
@cython.no_gc_clear
cdef class Pool:
    """A thread pool for one runtime; immutable, because resizing one from several threads is unsafe."""

    def __cinit__(self, int threads):
        self.pool = NULL
        self.threads = threads
        self.generation = xf_fork_generation
        if threads > 1:
            with nogil:
                self.pool = pthreadpool_create(threads)
            if self.pool == NULL:
                raise MemoryError(f"can't start a pool of {threads} threads")

    def __dealloc__(self):
        # In a forked child the pool's threads don't exist, and joining them could wait for ever.
        if self.pool != NULL and self.generation == xf_fork_generation:
            with nogil:
                pthreadpool_destroy(self.pool)


# ---------------------------------------------------------------------------------------------------
# Engine: one XNNPACK runtime at one set of planned shapes

cdef dict ENGINE_DATATYPES = {
    "fp32": <int> xnn_datatype_fp32, "fp16": <int> xnn_datatype_fp16, "bf16": <int> xnn_datatype_bf16,
    "int32": <int> xnn_datatype_int32, "qint8": <int> xnn_datatype_qint8, "quint8": <int> xnn_datatype_quint8,
    "qint32": <int> xnn_datatype_qint32, "qcint8": <int> xnn_datatype_qcint8, "qcint32": <int> xnn_datatype_qcint32,
    "qcint4": <int> xnn_datatype_qcint4, "qbint4": <int> xnn_datatype_qbint4, "qdint8": <int> xnn_datatype_qdint8,
}


@cython.final
@cython.no_gc_clear
cdef class Engine:
    """An XNNPACK runtime with its own workspace. One caller at a time; the owner sees to that."""

    def __cinit__(self):
        self.rt = NULL
        self.workspace = NULL
        self.externals = NULL

    def __dealloc__(self):
        # Order matters: the runtime unlinks itself from its workspace.
        if self.rt != NULL:
            xnn_delete_runtime(self.rt)
        if self.workspace != NULL:
            xnn_release_workspace(self.workspace)
        free(self.externals)

    @staticmethod
    cdef Engine create(object lowered, dict shapes, Pool pool, uint32_t flags, PackedWeights packed, bint planned=True):
        cdef Engine self = Engine.__new__(Engine)
        cdef xnn_subgraph_t subgraph = NULL
        cdef xnn_status status
        cdef pthreadpool_t threads = NULL if pool is None else pool.pool
        cdef size_t i
        cdef bint broken = False
        initialize()
        self.lowered = lowered
        self.pool = pool
        self.shapes = shapes
        self.pattern = broadcast_pattern(lowered, shapes)
        ordered = (*lowered.inputs, *lowered.outputs, *lowered.scratch)
        self.num_inputs = len(lowered.inputs)
        self.num_outputs = len(lowered.outputs)
        self.num_externals = len(ordered)
        self.externals = <xnn_external_value*> calloc(max(1, self.num_externals), sizeof(xnn_external_value))
        if self.externals == NULL:
            raise MemoryError
        status = xnn_create_subgraph(self.num_externals, 0, &subgraph)
        if status != xnn_status_success:
            raise xnnpack_error("xnn_create_subgraph", status)
        # Scale arrays are kept by pointer until the runtime exists.
        keep = []
        try:
            ids = {}
            for i in range(self.num_externals):
                self.externals[i].id = <uint32_t> i
                ids[ordered[i]] = i
            for id, value in lowered.values.items():
                number = ids.get(id)
                flag = 0
                if number is not None:
                    flag = 1 if number < <object> self.num_inputs else 2
                ids[id] = define_value(subgraph, value, shapes[id], -1 if number is None else number, flag, keep)
            for node in lowered.nodes:
                status = define_node(subgraph, node, ids)
                if status != xnn_status_success:
                    raise xnnpack_error(
                        node.op.call, status, node=node.index, detail=f"XNNPACK refused {node.where}"
                    )
            status = xnn_create_workspace(&self.workspace)
            if status != xnn_status_success:
                raise xnnpack_error("xnn_create_workspace", status)
            if packed is not None and packed.intact():
                with packed.acquire():
                    packed.begin()
                    with nogil:
                        status = xnn_create_runtime_v4(subgraph, &packed.provider, self.workspace, threads,
                                                       flags | NO_FUSION, &self.rt)
                    broken = packed.state.broken
                    if broken and status == xnn_status_success:
                        xnn_delete_runtime(self.rt)
                    self.replayed = packed.end(status == xnn_status_success and not broken)
                if broken:
                    self.rt = NULL
                    return Engine.create(lowered, shapes, pool, flags, None, planned)
                self.packed = packed
            else:
                with nogil:
                    status = xnn_create_runtime_v4(subgraph, NULL, self.workspace, threads, flags | NO_FUSION, &self.rt)
            if status != xnn_status_success:
                self.rt = NULL
                raise xnnpack_error("xnn_create_runtime_v4", status,
                                    detail="XNNPACK could not create the operators of the graph")
        finally:
            xnn_delete_subgraph(subgraph)
        if planned:
            self.plan()
        return self

    cdef int plan(self) except -1:
        """Let the engine plan its memory. It costs as much as an inference on some networks, so a runtime
        puts it off until it knows the first inputs' shapes."""
        cdef xnn_status status
        with nogil:
            status = xnn_reshape_runtime(self.rt)
        if status != xnn_status_success:
            raise xnnpack_error("xnn_reshape_runtime", status, detail="at " + describe(self.lowered, self.shapes))
        self.bound = False
        self.check_shapes()
        self.bind_scratch()
        self.planned = True
        return 0

    cdef int check_shapes(self) except -1:
        """The engine's output shapes must be those that the shape rules gave: memory was sized by them."""
        cdef size_t dims[MAX_DIMS]
        cdef size_t rank, i, j
        cdef xnn_status status
        for j in range(self.num_outputs):
            i = self.num_inputs + j
            status = xnn_get_external_value_shape(self.rt, <uint32_t> i, &rank, dims)
            if status != xnn_status_success:
                raise xnnpack_error("xnn_get_external_value_shape", status)
            got = tuple(dims[k] for k in range(rank))
            id = self.lowered.outputs[j]
            want = self.shapes[id]
            if got != want and not self.is_index(id):
                raise XnnpackError(
                    "xnn_reshape_runtime", 3,
                    detail=f"output {j} (value {id}): XNNPACK plans shape {got}, the shape rules give {want}",
                )
        return 0

    cdef bint is_index(self, id):
        # The engine leaves the declared shape on argmax indices.
        for node in self.lowered.nodes:
            if node.op.name == "argmax_pooling2d" and node.outputs[1] == id:
                return True
        return False

    cdef int reshape(self, dict shapes) except -1:
        """Other input shapes with the same broadcasting pattern; on failure the engine must be dropped."""
        cdef size_t dims[MAX_DIMS]
        cdef xnn_status status
        cdef size_t i
        for i in range(self.num_inputs):
            shape = shapes[self.lowered.inputs[i]]
            for k in range(len(shape)):
                dims[k] = shape[k]
            status = xnn_reshape_external_value(self.rt, <uint32_t> i, len(shape), dims)
            if status != xnn_status_success:
                raise xnnpack_error("xnn_reshape_external_value", status)
        self.shapes = shapes
        self.planned = False
        return 0

    cdef int bind_scratch(self) except -1:
        cdef cnp.ndarray array
        cdef size_t i = self.num_inputs + self.num_outputs
        self.scratch = []
        for id in self.lowered.scratch:
            array = empty(self.shapes[id], np.uint32)
            self.scratch.append(array)
            self.externals[i].data = cnp.PyArray_DATA(array)
            i += 1
        return 0

    cdef xnn_status invoke(self) noexcept nogil:
        """Set up if a pointer changed, then run. Every external pointer must be set."""
        cdef xnn_status status
        if not self.bound:
            status = xnn_setup_runtime_v2(self.rt, self.num_externals, self.externals)
            if status != xnn_status_success:
                return status
            self.bound = True
        return xnn_invoke_runtime(self.rt)

    cdef void bind(self, size_t i, void* data) noexcept nogil:
        if self.externals[i].data != data:
            self.externals[i].data = data
            self.bound = False

    def profile_names(self):
        return self.profile_query(0)

    cdef object profile_query(self, int what):
        cdef size_t need = 0
        cdef xnn_status status
        cdef xnn_profile_info info = xnn_profile_info_operator_name if what == 0 else xnn_profile_info_operator_timing
        status = xnn_get_runtime_profiling_info(self.rt, info, 0, NULL, &need)
        if status != xnn_status_success and status != xnn_status_out_of_memory:
            raise xnnpack_error("xnn_get_runtime_profiling_info", status)
        cdef bytearray data = bytearray(max(need, <size_t> 1))
        cdef char* raw = data
        status = xnn_get_runtime_profiling_info(self.rt, info, need, raw, &need)
        if status != xnn_status_success:
            raise xnnpack_error("xnn_get_runtime_profiling_info", status)
        if what == 0:
            return [name.decode() for name in bytes(data[:need]).split(b"\0")[:-1]]
        return np.frombuffer(bytes(data[:need]), np.uint64).tolist()


def broadcast_pattern(lowered, dict shapes):
    """What of the shapes an engine can't change: which operands of binary nodes are as large as the output (its
    in-place plan rests on it), and the batch of dynamically quantized convolutions."""
    return (
        *[(shapes[a] == shapes[c], shapes[b] == shapes[c]) for a, b, c in lowered.broadcasts],
        *[shapes[id][0] for id in lowered.pinned],
    )


cdef str describe(object lowered, dict shapes):
    return "input shapes " + ", ".join("x".join(map(str, shapes[id])) or "scalar" for id in lowered.inputs)


cdef uint32_t define_value(
    xnn_subgraph_t subgraph, Value value, tuple shape, external, uint32_t flags, list keep
) except? 0xFFFFFFFE:
    cdef size_t dims[MAX_DIMS]
    cdef size_t rank = len(shape), k
    cdef void* data = NULL
    cdef const uint8_t[::1] view
    cdef uint32_t id = XNN_INVALID_VALUE_ID
    cdef uint32_t external_id = XNN_INVALID_VALUE_ID if external < 0 else <uint32_t> external
    cdef xnn_status status
    cdef xnn_datatype datatype = <xnn_datatype> (<int> ENGINE_DATATYPES[value.datatype])
    cdef float[::1] scales
    cdef uint16_t[::1] block_scales
    cdef const char* call
    if rank > MAX_DIMS:
        raise ShapeError(f"value {value.id} has rank {rank}, XNNPACK's limit is {MAX_DIMS}")
    for k in range(rank):
        dims[k] = shape[k]
    if value.constant is not None:
        view = value.constant.data
        data = <void*> &view[0]
    quantization = value.quantization
    if quantization is None:
        call = b"xnn_define_tensor_value"
        status = xnn_define_tensor_value(subgraph, datatype, rank, dims, data, external_id, flags, &id)
    elif isinstance(quantization, PerTensor):
        call = b"xnn_define_quantized_tensor_value"
        status = xnn_define_quantized_tensor_value(
            subgraph, datatype, quantization.zero_point, quantization.scale, rank, dims, data, external_id, flags, &id)
    elif isinstance(quantization, PerChannel):
        call = b"xnn_define_channelwise_quantized_tensor_value_v2"
        # Padded: XNNPACK reads up to ten parameters more than there are channels.
        padded = np.zeros(len(quantization.scales) + 16, np.float32)
        padded[: len(quantization.scales)] = quantization.scales
        keep.append(padded)
        scales = padded
        status = xnn_define_channelwise_quantized_tensor_value_v2(
            subgraph, datatype, 8 if value.datatype == "qcint4" else 0, &scales[0], rank, quantization.axis, dims, data,
            external_id, flags, &id)
    elif isinstance(quantization, PerBlock):
        call = b"xnn_define_blockwise_quantized_tensor_value"
        padded = np.zeros(len(quantization.scales) + 32, np.uint16)
        padded[: len(quantization.scales)] = quantization.scales
        keep.append(padded)
        block_scales = padded
        status = xnn_define_blockwise_quantized_tensor_value(
            subgraph, datatype, 8, &block_scales[0], rank, quantization.axis, quantization.block_size, dims, data,
            external_id, flags, &id)
    elif isinstance(quantization, PerToken):
        call = b"xnn_define_dynamically_quantized_tensor_value"
        status = xnn_define_dynamically_quantized_tensor_value(
            subgraph, datatype, rank, quantization.num_nonbatch_dims, dims, external_id, flags, &id)
    else:
        raise TypeError(f"unknown quantization {quantization!r}")
    if status != xnn_status_success:
        raise xnnpack_error(call.decode(), status, detail=f"XNNPACK refused {value!r}")
    return id


# ---------------------------------------------------------------------------------------------------
# Runtime


@cython.final
@cython.no_gc_clear
cdef class Runtime:
    """A graph made ready to run.

    Parameters
    ----------
    graph : Graph
        Kept, and with it the mapped file, as long as the runtime lives.
    threads : int, default 1
        Threads that share the work of one call. One is right for throughput, where several runtimes
        run side by side; more lower the latency of large graphs and slow small ones down.
    check_finite : bool, default False
        Scan float inputs and outputs at every call and raise NotFiniteError on NaN or infinity: some
        kernels hide a NaN.
    low_memory : bool, default False
        Trade speed for memory in convolutions and resizing (transient indirection buffers).
    weights_cache : True, path or WeightsCache, optional
        Keep packed weights on disk and map them there the next time: True is the user's cache folder, a
        path a folder or a file. Without it nothing is written. A file that does not fit exactly is not used.
    fuse : bool, default True
        Let layers do the work of a Clamp behind them and of a pad of zeros before them. No bit of a result that is a
        number changes.
    fold_affine : bool, default False
        Compute factors and summands per channel behind fp32 layers into copies of their filters and biases
        (batch normalisation). Results change by rounding.

    Attributes
    ----------
    graph : Graph
        The one given, or with ``fold_affine`` what became of it.
    fused : tuple of Fusion
        The file's nodes that others do the work of: what each was, its index, and the index of the other.
    inputs, outputs : tuple of Value
        In the order in which :meth:`run` takes and returns them.
    threads : int
    check_finite : bool
    weights_cache : str
        What became of the cache: ``"off"``, ``"hit"`` (weights are mapped from its file), ``"saved"`` (packed and
        written), ``"shared"`` (another runtime of the graph had packed already), ``"not saved: "`` and why, or
        ``"unused"`` as long as no engine was needed (inputs without elements).
    staged : int
        How many input or output arrays had to be copied so far, because they were not contiguous,
        not aligned, byte-swapped, or ended too close to the end of mapped memory.

    Raises
    ------
    ArgumentError
        ``threads`` is not positive, or ``weights_cache`` is none of these.
    UnsupportedError
        This CPU has no kernel for something in the graph.
    XnnpackError
        XNNPACK refused the graph.

    Notes
    -----
    One caller at a time: a second one gets BusyError. Different runtimes may run in different threads;
    the GIL is released while XNNPACK works. All runtimes of one graph share its packed weights. The
    runtime keeps the graph, and with it the mapped file, alive.
    """

    cdef int busy
    cdef unsigned generation
    cdef readonly Graph graph
    cdef readonly tuple inputs
    cdef readonly tuple outputs
    cdef readonly int threads
    cdef readonly bint check_finite
    cdef readonly size_t staged
    cdef object lowered
    cdef tuple declared
    cdef uint32_t flags
    cdef Engine engine
    cdef Pool pool
    cdef Packing packing
    cdef bint closed, has_zero
    cdef size_t num_inputs, num_outputs
    # Current input and output shapes in C, for the checks of every call.
    cdef int* typenums
    cdef int* ranks
    cdef cnp.npy_intp* dims
    cdef size_t* sizes
    cdef tuple shape_key
    cdef list staging
    cdef dict plans
    cdef object __weakref__

    def __cinit__(self):
        self.typenums = NULL
        self.ranks = NULL
        self.dims = NULL
        self.sizes = NULL

    def __init__(self, Graph graph not None, *, int threads=1, bint check_finite=False, bint low_memory=False,
                 weights_cache=None, bint fuse=True, bint fold_affine=False):
        if threads < 1:
            raise ArgumentError(f"threads must be at least 1, got {threads}")
        if fold_affine:
            graph = _fold_affine(graph)
        self.graph = graph
        self.inputs = graph.inputs
        self.outputs = graph.outputs
        self.threads = threads
        self.check_finite = check_finite
        self.flags = LOW_MEMORY if low_memory else 0
        self.lowered = lower(graph, fuse)
        self.num_inputs = len(self.inputs)
        self.num_outputs = len(self.outputs)
        cdef size_t n = self.num_inputs + self.num_outputs, i
        self.typenums = <int*> calloc(n + 1, sizeof(int))
        self.ranks = <int*> calloc(n + 1, sizeof(int))
        self.dims = <cnp.npy_intp*> calloc((n + 1) * MAX_DIMS, sizeof(cnp.npy_intp))
        self.sizes = <size_t*> calloc(n + 1, sizeof(size_t))
        if self.typenums == NULL or self.ranks == NULL or self.dims == NULL or self.sizes == NULL:
            raise MemoryError
        for i in range(len(self.inputs) + len(self.outputs)):
            self.typenums[i] = self.array_dtype(i).num
        self.staging = [None] * n
        self.plans = {}
        self.generation = xf_fork_generation
        self.packing = prepare_packing(graph, self.lowered, self.flags, weights_cache)
        self.shape_key = None
        self.declared = tuple([value.shape for value in self.inputs])
        self.select(self.declared)

    def __dealloc__(self):
        free(self.typenums)
        free(self.ranks)
        free(self.dims)
        free(self.sizes)

    @property
    def weights_cache(self):
        return self.packing.outcome

    @property
    def fused(self):
        return self.lowered.fused

    cdef object value_at(self, size_t i):
        return self.inputs[i] if i < self.num_inputs else self.outputs[i - self.num_inputs]

    cdef object array_dtype(self, size_t i):
        value = self.value_at(i)
        if i >= self.num_inputs:
            node = self.graph.producers.get(value.id)
            if node is not None and node.op.name == "argmax_pooling2d" and node.outputs[1] == value.id:
                # Declared as float in the file; the engine writes uint32, local to the window.
                return np.dtype(np.uint32)
        return value.dtype

    # -- shapes ------------------------------------------------------------------------------------

    cdef int select(self, tuple key) except -1:
        """Make the engine fit these input shapes; leaves everything as it was when they don't fit."""
        cdef size_t i, k
        lowered = self.lowered
        plan = self.plans.get(key)
        if plan is None:
            for i, (value, shape) in enumerate(zip(self.inputs, key)):
                if len(shape) != len(value.shape):
                    raise ShapeError(
                        f"input {i} (value {value.id}): need rank {len(value.shape)} as in {value.shape}, "
                        f"got shape {shape}",
                        expected=value.shape, got=shape)
            if key == self.declared:
                # Inferred and measured when the graph was validated.
                shapes = lowered.shapes
            else:
                shapes = _shapes.infer(lowered, dict(zip(lowered.inputs, key)))
                _shapes.check_sizes(lowered, shapes, self.graph.limits)
            plan = (shapes, broadcast_pattern(lowered, shapes))
            if len(self.plans) >= 64:
                self.plans.pop(next(iter(self.plans)))
            self.plans[key] = plan
        shapes, pattern = plan
        # Kernels index before they look at a dimension of 0: such calls never reach the engine.
        has_zero = any([0 in shape for shape in shapes.values()])
        if not has_zero:
            try:
                if self.engine is not None and self.engine.pattern == pattern:
                    if self.engine.shapes is not shapes and self.engine.shapes != shapes:
                        self.engine.reshape(shapes)
                else:
                    # A change of broadcasting would leave the engine's in-place plan stale.
                    if self.threads > 1 and self.pool is None:
                        self.pool = Pool(self.threads)
                    self.engine = None
                    self.engine = self.packing.engine(shapes, self.pool, self.flags, False)
            except BaseException:
                # Half-changed shapes inside the engine can't be trusted any more.
                self.engine = None
                self.shape_key = None
                raise
        for i in range(self.num_inputs + self.num_outputs):
            id = lowered.inputs[i] if i < self.num_inputs else lowered.outputs[i - self.num_inputs]
            shape = shapes[id]
            self.ranks[i] = len(shape)
            self.sizes[i] = self.array_dtype(i).itemsize
            for k in range(len(shape)):
                self.dims[i * MAX_DIMS + k] = shape[k]
                self.sizes[i] *= <size_t> shape[k]
        self.has_zero = has_zero
        self.shape_key = key
        return 0

    # -- arrays ------------------------------------------------------------------------------------

    cdef inline bint fits(self, size_t i, object x):
        """Whether x is an array that can be handed over as it is. Must stay cheap."""
        cdef cnp.ndarray array
        cdef int k, rank
        cdef cnp.npy_intp* dims
        if not cnp.PyArray_Check(x):
            return False
        array = <cnp.ndarray> x
        rank = self.ranks[i]
        if cnp.PyArray_TYPE(array) != self.typenums[i] or cnp.PyArray_NDIM(array) != rank:
            return False
        if not cnp.PyArray_ISCARRAY_RO(array):
            return False
        dims = cnp.PyArray_DIMS(array)
        for k in range(rank):
            if dims[k] != self.dims[i * MAX_DIMS + k]:
                return False
        if not tail_readable(<const char*> cnp.PyArray_DATA(array), self.sizes[i]):
            return is_padded(array, self.sizes[i])
        return True

    cdef cnp.ndarray to_array(self, size_t i, object x):
        """x as an array of the right dtype, in whatever layout; never a change of value."""
        cdef object array
        want = self.array_dtype(i)
        if isinstance(x, np.ndarray):
            array = np.asarray(x)
        elif hasattr(x, "__dlpack__") and not isinstance(x, np.generic):
            try:
                array = np.from_dlpack(x)
            except (BufferError, RuntimeError, TypeError) as error:
                raise DtypeError(f"input {i}: NumPy can't take the array through DLPack: {error}",
                                 expected=want) from error
        else:
            try:
                array = np.asarray(x)
            except (TypeError, ValueError) as error:
                raise DtypeError(f"input {i}: need an array of {want}, got {type(x).__name__}: {error}", expected=want,
                                 got=type(x).__name__) from error
        if array.dtype != want and array.dtype.newbyteorder("=") != want:
            raise DtypeError(
                f"input {i} (value {self.value_at(i).id}): need dtype {want}, got {array.dtype}",
                expected=want, got=array.dtype)
        return array

    cdef cnp.ndarray stage(self, size_t i, object array):
        """A copy of the array in memory of the runtime's own."""
        cdef cnp.ndarray held = self.staging[i]
        if held is None or (<object> held).shape != array.shape:
            held = empty(array.shape, self.array_dtype(i))
            self.staging[i] = held
        np.copyto(held, array)
        self.staged += 1
        return held

    # -- running -----------------------------------------------------------------------------------

    def run(self, *inputs, out=None):
        """Run the graph once.

        Parameters
        ----------
        *inputs : array_like
            One for each of :attr:`inputs`, in that order, of exactly that dtype. NumPy arrays, objects
            with the buffer protocol and DLPack exporters are taken without a copy where they are
            C-contiguous and 16 bytes behind them are readable (:func:`empty` makes such arrays);
            otherwise one copy is staged and counted in :attr:`staged`. Shapes may differ from the declared
            ones wherever the graph permits it.
        out : sequence of numpy.ndarray, optional
            Arrays that receive the outputs: right dtype and shape, C-contiguous, writeable, overlapping
            neither an input nor one another.

        Returns
        -------
        tuple of numpy.ndarray
            New arrays that belong to the caller, or those of ``out``.

        Raises
        ------
        ArgumentError, DtypeError, ShapeError, OverlapError
            Something about the arrays, before any kernel runs.
        LimitError
            The shapes lead to more memory than the cap of the graph's limits.
        BusyError
            Another call is running on this runtime.
        """
        if not xf_try_enter(&self.busy):
            if self.generation == xf_fork_generation:
                raise BusyError("this runtime is running in another thread; make one Runtime per thread")
            # The process was forked while another thread ran it: that thread does not exist here.
            self.engine = None
        try:
            return self.call(inputs, out)
        finally:
            xf_leave(&self.busy)

    cdef int revive(self) except -1:
        """First use in a forked child: the pool's threads are gone, and a half-done call may be stuck."""
        self.generation = xf_fork_generation
        if self.pool is not None:
            self.pool = None
            self.engine = None
        if self.engine is None:
            self.restore()
        return 0

    cdef int restore(self) except -1:
        """An engine for the current shapes, or for the declared ones where a failure left none."""
        key, self.shape_key = self.shape_key, None
        self.select(key if key is not None else tuple([value.shape for value in self.inputs]))
        return 0

    cdef object call(self, tuple inputs, object out):
        cdef size_t i, j
        cdef cnp.ndarray array
        cdef xnn_status status
        cdef Engine engine
        cdef list held = None
        if self.closed:
            raise ClosedError("this runtime was closed")
        if self.generation != xf_fork_generation:
            self.revive()
        if self.shape_key is None:
            self.restore()
        if <size_t> len(inputs) != self.num_inputs:
            raise ArgumentError(f"need {self.num_inputs} inputs, got {len(inputs)}")
        for i in range(self.num_inputs):
            if not self.fits(i, inputs[i]):
                held = self.take(inputs)
                break
        cdef tuple arrays = inputs if held is None else tuple(held)
        cdef tuple results
        cdef list copy_back = None
        if out is None:
            results = self.new_outputs()
        else:
            if not isinstance(out, (list, tuple)):
                raise ArgumentError(f"out: need a list or tuple of {self.num_outputs} arrays, got {type(out).__name__}")
            results = tuple(out)
            self.check_out(results, arrays)
        if self.has_zero:
            return self.run_empty(arrays, results)
        if self.check_finite:
            self.scan(arrays, "input")
        engine = self.engine
        if not engine.planned:
            self.plan_engine()
        for i in range(self.num_inputs):
            engine.bind(i, cnp.PyArray_DATA(<cnp.ndarray> arrays[i]))
        for j in range(self.num_outputs):
            i = self.num_inputs + j
            array = <cnp.ndarray> results[j]
            if (out is not None and not tail_readable(<const char*> cnp.PyArray_DATA(array), self.sizes[i])
                    and not is_padded(array, self.sizes[i])):
                if copy_back is None:
                    copy_back = []
                array = self.stage_output(i)
                copy_back.append((j, array))
            engine.bind(i, cnp.PyArray_DATA(array))
        with nogil:
            status = engine.invoke()
        if status != xnn_status_success:
            self.engine = None
            self.shape_key = None
            raise xnnpack_error("xnn_invoke_runtime", status)
        if copy_back is not None:
            for j, array in copy_back:
                np.copyto(results[j], array)
        if self.check_finite:
            self.scan(results, "output")
        return results

    cdef int plan_engine(self) except -1:
        try:
            self.engine.plan()
        except BaseException:
            self.engine = None
            self.shape_key = None
            raise
        return 0

    cdef tuple new_outputs(self):
        cdef size_t i, j
        cdef list made = []
        for j in range(self.num_outputs):
            i = self.num_inputs + j
            made.append(padded_array(self.ranks[i], &self.dims[i * MAX_DIMS], self.typenums[i], self.sizes[i]))
        return tuple(made)

    cdef list take(self, tuple inputs):
        """The inputs as arrays that fit, after a change of shape or a staged copy where needed."""
        cdef list arrays = [self.to_array(i, x) for i, x in enumerate(inputs)]
        key = tuple([array.shape for array in arrays])
        if key != self.shape_key:
            self.select(key)
        for i in range(len(arrays)):
            if not self.fits(i, arrays[i]):
                arrays[i] = self.stage(i, arrays[i])
        return arrays

    cdef cnp.ndarray stage_output(self, size_t i):
        cdef cnp.ndarray array = self.staging[i]
        shape = tuple(self.dims[i * MAX_DIMS + k] for k in range(self.ranks[i]))
        if array is None or (<object> array).shape != shape:
            array = empty(shape, self.array_dtype(i))
            self.staging[i] = array
        self.staged += 1
        return array

    cdef int check_out(self, tuple out, tuple arrays) except -1:
        cdef size_t i, j, k
        cdef cnp.ndarray array, other
        cdef const char* start
        cdef const char* end
        cdef const char* other_start
        cdef bint same
        if <size_t> len(out) != self.num_outputs:
            raise ArgumentError(f"out: need {self.num_outputs} arrays, got {len(out)}")
        for j in range(self.num_outputs):
            i = self.num_inputs + j
            x = out[j]
            if not cnp.PyArray_Check(x):
                raise ArgumentError(f"out[{j}]: need a numpy.ndarray, got {type(x).__name__}")
            array = x
            if cnp.PyArray_TYPE(array) != self.typenums[i] or not cnp.PyArray_ISNOTSWAPPED(array):
                want = self.array_dtype(i)
                raise DtypeError(f"out[{j}]: need dtype {want}, got {x.dtype}", expected=want, got=x.dtype)
            same = cnp.PyArray_NDIM(array) == self.ranks[i]
            if same:
                for k in range(self.ranks[i]):
                    same = same and cnp.PyArray_DIMS(array)[k] == self.dims[i * MAX_DIMS + k]
            if not same:
                want = tuple(self.dims[i * MAX_DIMS + k] for k in range(self.ranks[i]))
                raise ShapeError(f"out[{j}]: need shape {want}, got {x.shape}", expected=want, got=x.shape)
            if not cnp.PyArray_ISCARRAY(array):
                raise ArgumentError(
                    f"out[{j}]: need a C-contiguous, aligned, writeable array, got strides {x.strides}, "
                    f"writeable={x.flags.writeable}, aligned={x.flags.aligned}")
            start = <const char*> cnp.PyArray_DATA(array)
            end = start + self.sizes[i]
            for k in range(self.num_inputs + j):
                if k < self.num_inputs:
                    other = arrays[k]
                else:
                    other = out[k - self.num_inputs]
                other_start = <const char*> cnp.PyArray_DATA(other)
                if start < other_start + self.sizes[k] and other_start < end:
                    what = f"input {k}" if k < self.num_inputs else f"out[{k - self.num_inputs}]"
                    raise OverlapError(f"out[{j}] shares memory with {what}")
        return 0

    cdef object run_empty(self, tuple arrays, tuple results):
        if any(result.size for result in results):
            from . import reference

            for result, value in zip(results, reference.run(self.graph, *arrays)):
                np.copyto(result, value)
        return results

    cdef int scan(self, object arrays, str what) except -1:
        for i, (array, value) in enumerate(zip(arrays, self.inputs if what == "input" else self.outputs)):
            if value.datatype == "bf16":
                array = bf16_to_f32(array.view(np.uint16))
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                bad = array[~np.isfinite(array)]
                raise NotFiniteError(f"{what} {i} holds {bad.size} values that are not finite, "
                                     f"the first is {bad.flat[0]}")
        return 0

    def profile(self, *inputs, int rounds=10):
        """Time of every operator, averaged over rounds.

        Parameters
        ----------
        *inputs : array_like
            As for :meth:`run`.
        rounds : int, default 10
            How often the graph runs.

        Returns
        -------
        list of (int, str, float)
            Index of the graph's node (-1 for a copy that lowering added), kernel name, microseconds.
            XNNPACK's clock counts whole microseconds: only the average over rounds says something about
            operators shorter than that.

        Raises
        ------
        ArgumentError, DtypeError, ShapeError, LimitError, BusyError
            As for :meth:`run`.
        """
        if not xf_try_enter(&self.busy):
            raise BusyError("this runtime is running in another thread; make one Runtime per thread")
        flags, self.flags = self.flags, self.flags | PROFILING
        try:
            self.engine = None
            key, self.shape_key = self.shape_key, None
            self.select(key)
            totals = None
            for _ in range(max(1, rounds)):
                self.call(inputs, None)
                times = self.engine.profile_query(1)
                totals = times if totals is None else [a + b for a, b in zip(totals, times)]
            names = self.engine.profile_query(0)
            nodes = self.lowered.nodes
            index = [node.index for node in nodes] if len(nodes) == len(names) else [-1] * len(names)
            return [(i, name, total / max(1, rounds)) for i, name, total in zip(index, names, totals)]
        finally:
            self.flags = flags
            self.engine = None
            self.shape_key = None
            xf_leave(&self.busy)
            self.select(key)

    def _c_loop(self, *inputs, long rounds=1000):
        """Seconds for that many setups and invokes in compiled code: the floor that a call is measured against."""
        cdef long _i
        cdef double start
        cdef xnn_status status = xnn_status_success
        cdef tuple results = self.run(*inputs)
        cdef Engine engine = self.engine
        for j in range(self.num_outputs):
            engine.bind(self.num_inputs + j, cnp.PyArray_DATA(<cnp.ndarray> results[j]))
        with nogil:
            start = xf_now()
            for _i in range(rounds):
                engine.bound = False
                status = engine.invoke()
                if status != xnn_status_success:
                    break
            start = xf_now() - start
        if status != xnn_status_success:
            raise xnnpack_error("xnn_invoke_runtime", status)
        return start

    @property
    def memory(self):
        """Bytes: ``mapped`` constants used in place, ``copied`` constants, ``packed`` weights (shared by all
        runtimes of the graph), of those ``packed_mapped`` in a cache file, ``workspace`` of this runtime (0 before
        memory is planned, see :meth:`plan`), ``staging`` buffers. Depthwise convolutions and products with a
        constant matrix have packed weights of their own in every runtime, which are not counted."""
        cdef PackedWeights packed = self.packing.packed
        return {
            "mapped": sum(c.nbytes for c in self.graph.constants if c.in_place),
            "copied": sum(c.nbytes for c in self.graph.constants if not c.in_place),
            "packed": 0 if packed is None else packed.nbytes,
            "packed_mapped": 0 if packed is None else packed.mapped,
            "workspace": workspace_size(self.engine),
            "staging": sum(array.nbytes for array in self.staging if array is not None),
        }

    @property
    def _maps(self):
        """(what, address, bytes) of files that are mapped for this runtime; xnnfast.memory looks them up."""
        cdef PackedWeights packed = self.packing.packed
        owners = {id(c.owner): c.owner for c in self.graph.constants if c.owner is not None and c.owner.mapped}
        made = [("constants", owner.address, owner.nbytes) for owner in owners.values()]
        if packed is not None and packed.file is not None:
            made.append(("packed", packed.file.address, packed.file.nbytes))
        return made

    def plan(self):
        """Plan memory for the current shapes now; otherwise the first call does, which takes so much longer."""
        if not xf_try_enter(&self.busy):
            raise BusyError("this runtime is running in another thread; make one Runtime per thread")
        try:
            if self.closed:
                raise ClosedError("this runtime was closed")
            if self.generation != xf_fork_generation:
                self.revive()
            if self.shape_key is None:
                self.restore()
            if not self.has_zero and not self.engine.planned:
                self.plan_engine()
        finally:
            xf_leave(&self.busy)

    def trim(self):
        """Give back workspace and staging memory; the next call plans anew."""
        if not xf_try_enter(&self.busy):
            raise BusyError("this runtime is running in another thread; make one Runtime per thread")
        try:
            key = self.shape_key
            self.engine = None
            self.shape_key = None
            self.staging = [None] * (self.num_inputs + self.num_outputs)
            self.plans.clear()
            if key is not None and not self.closed:
                self.select(key)
        finally:
            xf_leave(&self.busy)

    def close(self):
        """Free everything now; later calls raise ClosedError."""
        if not xf_try_enter(&self.busy):
            raise BusyError("this runtime is running in another thread")
        self.closed = True
        self.engine = None
        self.pool = None
        self.packing.packed = None
        self.staging = []
        self.plans = {}
        xf_leave(&self.busy)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def __reduce__(self):
        from .pickling import again

        if self.closed:
            raise ClosedError("this runtime was closed")
        return again, (Runtime, (self.graph,), {
            "threads": self.threads, "check_finite": self.check_finite, "low_memory": bool(self.flags & LOW_MEMORY),
            "weights_cache": self.packing.cache})

    def __repr__(self):
        return f"Runtime({self.graph!r}, threads={self.threads})"


cdef int release_packed(object lowered) except -1:
    """Let go of the file pages of constants that were packed: nothing reads them again, and if it did, they
    would come back from the page cache."""
    kept, packed = set(), set()
    for node in lowered.nodes:
        for place, id in enumerate(node.inputs):
            if id is not None:
                (packed if place in node.op.packed else kept).add(id)
    for id in packed - kept:
        constant = lowered.values[id].constant
        if (constant is not None and constant.in_place and constant.owner is not None and constant.owner.mapped
                and constant.nbytes >= 65536):
            constant.owner.release(constant.offset, constant.offset + constant.nbytes)
    return 0


cdef size_t workspace_size(Engine engine):
    # First two members of struct xnn_workspace at the pin (data, size); a test compares with the process's memory.
    if engine is None or engine.workspace == NULL:
        return 0
    return (<size_t*> engine.workspace)[1]


def node_texts(list nodes not None, dict values not None, dict described not None, packing not None):
    """What a weights cache must know of nodes, in running order.

    Returns
    -------
    texts : list of bytes
        Everything about a node that reaches XNNPACK, with its values as ``described`` has them by id.
    packs : list of (int, int, int)
        Nodes that pack weights: place, and ordinals of filter and bias (-1: none) among the constants.
    constants : list of Value
        The weights, in the order of first use.
    """
    cdef Node node
    cdef Value value
    cdef dict ordinals = {}
    cdef list texts = [], packs = [], constants = [], weights, places
    cdef bint packed
    for node in nodes:
        op = node.op
        weights = []
        packed = op.name in packing
        if packed:
            weights = [values[id] for id in node.inputs[1:] if id is not None]
            for value in weights:
                packed = packed and value.constant is not None
        if packed:
            for value in weights:
                if value.id not in ordinals:
                    ordinals[value.id] = len(constants)
                    constants.append(value)
            packs.append((len(texts), ordinals[node.inputs[1]], -1 if len(weights) < 2 else ordinals[node.inputs[2]]))
        places = [ordinals.get(id, -1) for id in node.inputs]
        # marshal's version 2 writes equal objects alike; later ones look at references.
        texts.append(marshal.dumps((
            op.name, [node.attrs.get(name) for name in op.attrs], node.flags, node.clamp,
            [described[id] for id in node.inputs], [described[id] for id in node.outputs], places,
        ), 2))
    return texts, packs, constants


_packed_lock = threading.Lock()


cdef PackedWeights packed_weights(Graph graph, object lowered, uint32_t flags, PackedWeights instead_of=None):
    """The packed weights of a graph, shared by all its runtimes that pack alike; new ones in the place of some."""
    cdef PackedWeights packed
    with _packed_lock:
        shared = graph.caches.setdefault("packed", weakref.WeakValueDictionary())
        packed = shared.get(flags)
        if packed is None or packed is instead_of or not packed.intact():
            # A node packs at most twice; room for creations that could not replay.
            packed = PackedWeights(4 * len(lowered.nodes) + 16)
            shared[flags] = packed
    return packed


@cython.final
cdef class Packing:
    """How one owner of engines comes by packed weights: shared with other owners, and by way of a cache file.

    Attributes
    ----------
    outcome : str
        What became of the cache, as :attr:`Runtime.weights_cache` says it.
    """

    cdef Engine engine(self, dict shapes, Pool pool, uint32_t flags, bint planned=True):
        """An engine. The first one opens the cache, or fills it."""
        cdef Engine made
        cdef bint attached = False, read = False
        cdef size_t misses
        if self.cache is None or self.done:
            misses = self.packed.state.misses
            made = Engine.create(self.lowered, shapes, pool, flags, self.packed, planned)
            if self.packed.state.misses > misses:
                release_packed(self.lowered)
            return made
        identity = None
        with self.packed.acquire():
            if not self.packed.state.finished:
                identity = self.cache.identify(self.lowered, self.flags)
                read = identity.read
                opened = self.cache.open(identity)
                if opened is not None:
                    attached = self.packed.attach(opened[0], opened[1], identity.plan.addresses)
        made = Engine.create(self.lowered, shapes, pool, flags, self.packed, planned)
        if attached and not made.replayed:
            # The engine asked for other weights than those of the file: nobody shall have them.
            made = None
            attached = False
            self.packed = packed_weights(self.graph, self.lowered, self.flags, self.packed)
            made = Engine.create(self.lowered, shapes, pool, flags, self.packed, planned)
        self.done = True
        self.outcome = "hit" if attached else self.keep(identity, made)
        if read or not attached:
            release_packed(self.lowered)
        return made

    cdef str keep(self, object identity, Engine made):
        """Put packed weights into the cache; what became of that."""
        if made.packed is None:
            return "not saved: XNNPACK did not pack as announced"
        with self.packed.saving:
            late = identity is None or made.replayed
            if late:
                if identity is None:
                    identity = self.cache.identify(self.lowered, self.flags)
                # Packed by someone else, some time ago: perhaps from other bytes than the constants have now.
                if self.cache.holds(identity) or not self.cache.steady(identity, self.packed.since):
                    return "shared"
            refusal = self.cache.save(identity, self.packed.export(), self.packed.since)
        return "saved" if refusal is None else f"not saved: {refusal}"


cdef Packing prepare_packing(Graph graph, object lowered, uint32_t flags, object where):
    """Packed weights for one owner of engines; ``where`` is what the user gave as weights_cache."""
    cdef Packing made = Packing.__new__(Packing)
    made.graph = graph
    made.lowered = lowered
    made.flags = flags
    made.outcome = "off"
    if where is not None and where is not False:
        from .weights_cache import WeightsCache

        made.cache = where if isinstance(where, WeightsCache) else WeightsCache(where)
        made.outcome = "unused"
    made.packed = packed_weights(graph, lowered, flags)
    return made
