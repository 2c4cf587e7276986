# What other compiled modules may use of the runtime; none of them links XNNPACK itself.

cimport numpy as cnp
from libc.stdint cimport uint32_t

from ._graph cimport Graph
from .includes.xnnpack cimport (
    pthreadpool_t, xnn_external_value, xnn_runtime_t, xnn_status, xnn_weights_cache_provider, xnn_workspace_t,
)


cdef struct PackedEntry:
    uint32_t seed
    const void* kernel
    const void* bias
    size_t size
    void* data
    bint looked_up
    # Whether data was allocated for this entry; otherwise it lies in a mapped cache file.
    bint owned


cdef struct PackedState:
    # Written under PackedWeights.lock; entries never move and are only appended, so that runtimes which
    # are running may read theirs meanwhile.
    PackedEntry* entries
    size_t count, capacity, nbytes
    # The first so many are those of one whole creation, which later ones replay; and so many belong to
    # creations that are over.
    size_t complete, finished
    # Of the creation under way.
    size_t cursor, pending
    bint looked_up, broken, replaying
    void* reserved
    size_t reserved_size
    size_t hits, misses, mapped


cdef class PackedWeights:
    cdef xnn_weights_cache_provider provider
    cdef PackedState state
    # Held during a creation; take it through acquire(), which knows about forks.
    cdef object lock
    # Held while a cache file is written.
    cdef object saving
    cdef unsigned generation
    # The mapped cache file that entries point into.
    cdef object file
    # When the first creation began, in nanoseconds since the epoch.
    cdef long long since
    cdef object __weakref__
    cdef object acquire(self)
    cdef bint intact(self) except -1
    cdef bint attach(self, object payload, list entries, list addresses) except -1
    cdef list export(self)
    cdef int begin(self) except -1
    cdef bint end(self, bint created) noexcept nogil


cdef class Pool:
    cdef pthreadpool_t pool
    cdef unsigned generation
    cdef readonly int threads


cdef class Engine:
    cdef xnn_runtime_t rt
    cdef xnn_workspace_t workspace
    # Pointers of all external values, inputs first, in the order of their engine ids.
    cdef xnn_external_value* externals
    cdef size_t num_externals, num_inputs, num_outputs
    # An engine may not be invoked before plan() has run, once after create(planned=False) and after every reshape().
    cdef bint bound, planned
    # Whether all packed weights had been there before.
    cdef bint replayed
    # XNNPACK reads constants that it does not pack for the runtime's whole life: lowered keeps them.
    cdef readonly object lowered
    # The runtime calls into the provider at every reshape and setup.
    cdef PackedWeights packed
    # The runtime uses the pool in every call.
    cdef Pool pool
    cdef readonly dict shapes
    cdef readonly tuple pattern
    cdef list scratch

    @staticmethod
    cdef Engine create(object lowered, dict shapes, Pool pool, uint32_t flags, PackedWeights packed, bint planned=*)
    cdef int plan(self) except -1
    cdef int check_shapes(self) except -1
    cdef bint is_index(self, id)
    cdef int reshape(self, dict shapes) except -1
    cdef int bind_scratch(self) except -1
    cdef xnn_status invoke(self) noexcept nogil
    cdef void bind(self, size_t i, void* data) noexcept nogil
    cdef object profile_query(self, int what)


cdef cnp.ndarray padded_array(int ndim, cnp.npy_intp* dims, int typenum, size_t nbytes)
cdef bint tail_readable(const char* data, size_t nbytes) noexcept nogil
cdef bint is_padded(cnp.ndarray array, size_t nbytes)
cdef PackedWeights packed_weights(Graph graph, object lowered, uint32_t flags, PackedWeights instead_of=*)


# What an owner of engines makes them with: prepare_packing() once, then Packing.engine() for each. The first
# engine opens or fills the weights cache; ``outcome`` says what became of it.
cdef class Packing:
    # Another one after the first engine, if a cache file turned out to be for other weights.
    cdef readonly PackedWeights packed
    cdef readonly str outcome
    cdef Graph graph
    cdef object lowered, cache
    cdef uint32_t flags
    cdef bint done
    cdef Engine engine(self, dict shapes, Pool pool, uint32_t flags, bint planned=*)
    cdef str keep(self, object identity, Engine made)


cdef Packing prepare_packing(Graph graph, object lowered, uint32_t flags, object where)
