# cython: language_level=3
"""Crew: workers that take pieces of a batch, each with its own engine, until none is left.

In come arrays whose samples lie on an axis; out go the same samples' results, written into arrays that
are there already. One call processes a whole batch without the GIL, and without going through Python for
a piece. XNNPACK is not linked here: engines come from ``_runtime``.
"""

cimport cython
cimport numpy as cnp
from cpython.exc cimport PyErr_CheckSignals
from cpython.ref cimport PyObject
from libc.stdint cimport int64_t, uint32_t, INT64_MAX
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from ._graph cimport Graph
from ._runtime cimport Engine, Packing, Pool, is_padded, padded_array, prepare_packing, tail_readable
from .includes.xnnpack cimport xnn_status, xnn_status_success

from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from . import shapes as _shapes
from ._runtime import broadcast_pattern
from .errors import BusyError, ClosedError, LimitError, xnnpack_error

cnp.import_array()

cdef extern from *:
    """
    #ifndef _GNU_SOURCE
    #define _GNU_SOURCE
    #endif
    #include <errno.h>
    #include <pthread.h>
    #include <sched.h>
    #include <signal.h>
    #include <stdint.h>
    #include <stdlib.h>
    #include <time.h>

    /* Bumped in every forked child: threads made before do not exist there. */
    static volatile unsigned xf_forks = 0;
    static void xf_count_fork(void) { ++xf_forks; }
    static void xf_count_forks(void) { pthread_atfork(NULL, NULL, xf_count_fork); }

    static inline int64_t xf_nanoseconds(void) {
      struct timespec t;
      clock_gettime(CLOCK_MONOTONIC, &t);
      return (int64_t) t.tv_sec * 1000000000 + t.tv_nsec;
    }

    static inline size_t xf_next(size_t* counter) { return __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); }
    static inline void xf_no_more(size_t* counter) { __atomic_store_n(counter, SIZE_MAX / 2, __ATOMIC_RELAXED); }
    static inline int xf_first_error(int* status, int mine) {
      int none = 0;
      return __atomic_compare_exchange_n(status, &none, mine, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
    }

    static inline void xf_pause(void) {
    #if defined(__x86_64__) || defined(__i386__)
      __builtin_ia32_pause();
    #elif defined(__aarch64__)
      __asm__ __volatile__("yield");
    #endif
    }

    /* Some tens of microseconds: less than it takes to wake a thread, so that calls which follow each other closely
       find the others awake, and an idle executor uses no CPU. */
    enum { XF_SPINS = 2000 };

    typedef void (*xf_work)(void* context, int member);

    /* Threads that sleep between jobs. A job is open until the caller closes it; whoever wakes later sleeps on. */
    typedef struct xf_team {
      pthread_mutex_t mutex;
      pthread_cond_t wake, idle;
      xf_work work;
      void* context;
      unsigned long job;
      int wanted, active, open, quit, count, started;
      pthread_t* threads;
      struct xf_member* members;
    } xf_team;

    typedef struct xf_member { xf_team* team; int number; } xf_member;

    static void* xf_member_main(void* argument) {
      xf_member* self = (xf_member*) argument;
      xf_team* team = self->team;
      unsigned long seen = 0;
      pthread_mutex_lock(&team->mutex);
      for (;;) {
        while (!team->quit && !(team->open && team->job != seen && self->number <= team->wanted))
          pthread_cond_wait(&team->wake, &team->mutex);
        if (team->quit) break;
        seen = team->job;
        __atomic_add_fetch(&team->active, 1, __ATOMIC_RELAXED);
        pthread_mutex_unlock(&team->mutex);
        team->work(team->context, self->number);
        pthread_mutex_lock(&team->mutex);
        if (__atomic_sub_fetch(&team->active, 1, __ATOMIC_RELEASE) == 0) pthread_cond_signal(&team->idle);
        pthread_mutex_unlock(&team->mutex);
        for (int i = 0; i < XF_SPINS && __atomic_load_n(&team->job, __ATOMIC_RELAXED) == seen; ++i) xf_pause();
        pthread_mutex_lock(&team->mutex);
      }
      pthread_mutex_unlock(&team->mutex);
      return NULL;
    }

    static void xf_team_stop(xf_team* team) {
      pthread_mutex_lock(&team->mutex);
      team->quit = 1;
      __atomic_add_fetch(&team->job, 1, __ATOMIC_RELAXED);
      pthread_cond_broadcast(&team->wake);
      pthread_mutex_unlock(&team->mutex);
      for (int i = 0; i < team->started; ++i) pthread_join(team->threads[i], NULL);
      pthread_mutex_destroy(&team->mutex);
      pthread_cond_destroy(&team->wake);
      pthread_cond_destroy(&team->idle);
      free(team->threads);
      free(team->members);
      free(team);
    }

    /* Members are numbered from 1: 0 is the thread that calls. They take turns in taking one of the cpus, if any. */
    static xf_team* xf_team_start(int count, const int* cpus, int places, xf_work work, void* context) {
      xf_team* team = (xf_team*) calloc(1, sizeof(xf_team));
      sigset_t all, before;
      if (team == NULL) return NULL;
      pthread_mutex_init(&team->mutex, NULL);
      pthread_cond_init(&team->wake, NULL);
      pthread_cond_init(&team->idle, NULL);
      team->work = work;
      team->context = context;
      team->count = count;
      team->threads = (pthread_t*) calloc(count + 1, sizeof(pthread_t));
      team->members = (xf_member*) calloc(count + 1, sizeof(xf_member));
      /* Signals are for the interpreter's own threads. */
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, &before);
      while (team->threads != NULL && team->members != NULL && team->started < count) {
        int i = team->started;
        team->members[i].team = team;
        team->members[i].number = i + 1;
        if (pthread_create(&team->threads[i], NULL, xf_member_main, &team->members[i]) != 0) break;
        #ifdef __linux__
        if (places > 0) {
          cpu_set_t set;
          CPU_ZERO(&set);
          CPU_SET(cpus[i % places], &set);
          pthread_setaffinity_np(team->threads[i], sizeof(set), &set);
        }
        #endif
        ++team->started;
      }
      pthread_sigmask(SIG_SETMASK, &before, NULL);
      if (team->started < count) {
        xf_team_stop(team);
        return NULL;
      }
      return team;
    }

    static void xf_team_open(xf_team* team, int wanted) {
      pthread_mutex_lock(&team->mutex);
      team->wanted = wanted;
      team->open = 1;
      __atomic_add_fetch(&team->job, 1, __ATOMIC_RELAXED);
      if (wanted == 1 && team->count == 1) pthread_cond_signal(&team->wake);
      else if (wanted > 0) pthread_cond_broadcast(&team->wake);
      pthread_mutex_unlock(&team->mutex);
    }

    static void xf_team_close(xf_team* team) {
      pthread_mutex_lock(&team->mutex);
      team->open = 0;
      pthread_mutex_unlock(&team->mutex);
      for (int i = 0; i < XF_SPINS && __atomic_load_n(&team->active, __ATOMIC_RELAXED) != 0; ++i) xf_pause();
      pthread_mutex_lock(&team->mutex);
      while (team->active != 0) pthread_cond_wait(&team->idle, &team->mutex);
      pthread_mutex_unlock(&team->mutex);
    }
    """
    ctypedef struct xf_team:
        pass
    ctypedef void (*xf_work)(void* context, int member) noexcept nogil
    unsigned xf_forks
    void xf_count_forks() nogil
    int64_t xf_nanoseconds() nogil
    size_t xf_next(size_t* counter) nogil
    void xf_no_more(size_t* counter) nogil
    bint xf_first_error(int* status, int mine) nogil
    xf_team* xf_team_start(int count, const int* cpus, int places, xf_work work, void* context) nogil
    void xf_team_stop(xf_team* team) nogil
    void xf_team_open(xf_team* team, int wanted) nogil
    void xf_team_close(xf_team* team) nogil

cdef enum:
    TAIL = 16
    # How many shapes of arrays, and how many engines per worker, are kept.
    MAX_SHAPES = 64
    MAX_ENGINES = 3
    # Nanoseconds after which the calling thread looks for signals.
    PATIENCE = 50_000_000

xf_count_forks()


cdef struct Port:
    # An input or output of the graph, as far as a job has to know it.
    size_t row          # bytes that one sample has in one block
    size_t blocks       # how often all samples come round; 1 where the batch is outermost
    bint shared         # not divided among samples


cdef struct Span:
    # The samples of one array.
    char* base
    Py_ssize_t stride   # bytes from a sample to the next; only inputs may have another one than port.row
    char* readable      # end of the memory that kernels may read


cdef struct Slot:
    # A worker's own things; the crew keeps what engine and stages point at.
    PyObject* engine
    char** stage        # one buffer per port, NULL where none is needed
    size_t segment      # where the last piece was
    size_t pieces
    int64_t best, busy  # nanoseconds of the fastest piece, and of all


cdef struct Job:
    size_t inputs, ports, segments
    Port* port
    size_t* first       # of each segment, the number of its first sample; one more for the end
    Span* span          # segments x ports
    size_t start, stop, micro, pieces
    size_t next         # the shared counter
    int status
    size_t bad          # sample at which the first error came
    size_t answers      # sample whose piece writes the results that all samples share
    Slot* slot


cdef inline void gather(Job* job, size_t i, size_t segment, size_t start, size_t count, char* to) noexcept nogil:
    """Copy samples of an input, also from several arrays, one after the other."""
    cdef size_t row = job.port[i].row, s = segment, end, _
    cdef Span* span
    cdef char* source
    while count:
        span = &job.span[s * job.ports + i]
        end = min(start + count, job.first[s + 1])
        source = span.base + <Py_ssize_t> (start - job.first[s]) * span.stride
        if span.stride == <Py_ssize_t> row:
            memcpy(to, source, row * (end - start))
            to += row * (end - start)
        else:
            for _ in range(end - start):
                memcpy(to, source, row)
                to += row
                source += span.stride
        count -= end - start
        start = end
        s += 1


cdef inline void scatter(
        Job* job, size_t i, size_t segment, size_t start, size_t count, const char* source) noexcept nogil:
    """Copy samples of an output to their places, also in several arrays."""
    cdef size_t row = job.port[i].row, s = segment, p, end, done = 0, samples
    cdef Span* span
    while done < count:
        span = &job.span[s * job.ports + i]
        end = min(start + count, job.first[s + 1])
        samples = job.first[s + 1] - job.first[s]
        for p in range(job.port[i].blocks):
            memcpy(span.base + (p * samples + (start + done - job.first[s])) * row, source + (p * count + done) * row,
                   (end - start - done) * row)
        done = end - start
        s += 1


cdef xnn_status process(Job* job, Slot* slot, Engine engine, size_t start, size_t count) noexcept nogil:
    """Run one piece: samples start to start + count, whichever arrays they are in."""
    cdef size_t s = slot.segment, i, offset
    cdef Port* port
    cdef Span* span
    cdef char* place
    cdef bint whole
    cdef xnn_status status
    if job.first[s] > start:
        s = 0
    while job.first[s + 1] <= start:
        s += 1
    slot.segment = s
    whole = start + count <= job.first[s + 1]
    offset = start - job.first[s]
    for i in range(job.ports):
        port = &job.port[i]
        span = &job.span[s * job.ports + i]
        if i < job.inputs:
            if port.shared:
                engine.bind(i, span.base)
                continue
            place = span.base + <Py_ssize_t> offset * span.stride
            # Earlier pieces are followed by the next samples; only the last can end where nothing is readable.
            if (whole and (count == 1 or span.stride == <Py_ssize_t> port.row)
                    and place + count * port.row + TAIL <= span.readable):
                engine.bind(i, place)
            else:
                gather(job, i, s, start, count, slot.stage[i])
                engine.bind(i, slot.stage[i])
        elif port.shared:
            engine.bind(i, span.base if start == job.answers else slot.stage[i])
        else:
            place = span.base + offset * port.row
            if whole and port.blocks == 1 and place + count * port.row + TAIL <= span.readable:
                engine.bind(i, place)
            else:
                engine.bind(i, slot.stage[i])
    status = engine.invoke()
    if status != xnn_status_success:
        return status
    for i in range(job.inputs, job.ports):
        port = &job.port[i]
        span = &job.span[s * job.ports + i]
        place = span.base + offset * port.row
        if not port.shared and not (
                whole and port.blocks == 1 and place + count * port.row + TAIL <= span.readable):
            scatter(job, i, s, start, count, slot.stage[i])
    return status


cdef bint labour(Job* job, int member, int64_t deadline) noexcept nogil:
    """Take pieces until none is left, or until the deadline; whether some may be left."""
    cdef Slot* slot = &job.slot[member]
    cdef size_t piece, start
    cdef int64_t before = xf_nanoseconds(), now
    cdef xnn_status status
    while True:
        piece = xf_next(&job.next)
        if piece >= job.pieces:
            return False
        start = job.start + piece * job.micro
        status = process(job, slot, <Engine> slot.engine, start, job.micro)
        if status != xnn_status_success:
            if xf_first_error(&job.status, <int> status):
                job.bad = start
            xf_no_more(&job.next)
            return False
        now = xf_nanoseconds()
        slot.pieces += 1
        slot.busy += now - before
        if now - before < slot.best:
            slot.best = now - before
        before = now
        if now > deadline:
            return True


cdef void member_main(void* context, int member) noexcept nogil:
    labour(<Job*> context, member, INT64_MAX)


@cython.final
@cython.no_gc_clear
cdef class Crew:
    """Workers over one lowered graph. One job at a time; the owner sees to that.

    Parameters
    ----------
    graph : Graph
    lowered : Lowered
        A form that follows the batch.
    workers : int
        Threads that work on a job, the calling one included.
    threads : int
        Of the pool for batches smaller than the number of workers; 1 means no pool.
    flags : int
        Of XNNPACK's runtimes.
    cpus : sequence of int or None
        Where to pin the other threads, one CPU for each.
    weights_cache : optional
        What the user gave as such.
    """

    cdef readonly Graph graph
    cdef readonly object lowered
    cdef readonly int workers, threads
    cdef uint32_t flags
    cdef unsigned generation
    cdef bint busy, closed
    # Sleeps while no job is open; its threads read job, so they are stopped before anything is freed.
    cdef xf_team* team
    cdef Job job
    # Every engine that a slot points at, by worker and broadcasting pattern.
    cdef list engines
    cdef list stages
    cdef object planned
    # Bytes of input of the largest piece so far.
    cdef size_t largest
    # Keys of planned whose sizes were compared with the cap.
    cdef set within_cap
    # By variant, whether some value has no elements.
    cdef dict empties
    cdef object cpus
    cdef Packing packing
    cdef Pool pool
    cdef readonly tuple dtypes
    cdef readonly tuple layouts
    cdef object __weakref__

    def __cinit__(self):
        self.team = NULL
        self.job.port = NULL
        self.job.slot = NULL

    def __init__(self, Graph graph not None, lowered, *, int workers, int threads=1, uint32_t flags=0, cpus=None,
                 weights_cache=None):
        cdef size_t i, n
        self.generation = xf_forks
        self.graph = graph
        self.lowered = lowered
        self.workers = workers
        self.threads = threads
        self.flags = flags
        self.cpus = cpus
        self.packing = prepare_packing(graph, lowered, flags, weights_cache)
        self.planned = OrderedDict()
        self.within_cap = set()
        self.empties = {}
        # One more than there are workers: the engine with a pool.
        self.engines = [OrderedDict() for _ in range(workers + 1)]
        self.stages = [[None] * (len(graph.inputs) + len(graph.outputs)) for _ in range(workers + 1)]
        batching = lowered.batching
        self.dtypes = (*[value.dtype for value in graph.inputs],
                       *[output_dtype(graph, value) for value in graph.outputs])
        self.layouts = tuple([batching.layouts.get(id) for id in (*lowered.inputs, *lowered.outputs)])
        n = len(self.dtypes)
        self.job.inputs = len(graph.inputs)
        self.job.ports = n
        self.job.port = <Port*> calloc(n + 1, sizeof(Port))
        self.job.slot = <Slot*> calloc(workers + 1, sizeof(Slot))
        if self.job.port == NULL or self.job.slot == NULL:
            raise MemoryError
        for i in range(<size_t> workers + 1):
            self.job.slot[i].stage = <char**> calloc(n + 1, sizeof(char*))
            if self.job.slot[i].stage == NULL:
                raise MemoryError

    def __dealloc__(self):
        cdef int i
        self.dismiss()
        if self.job.slot != NULL:
            for i in range(self.workers + 1):
                free(self.job.slot[i].stage)
        free(self.job.slot)
        free(self.job.port)

    cdef void dismiss(self) noexcept:
        # In a forked child the threads do not exist: joining them could wait for ever.
        if self.team != NULL and self.generation == xf_forks:
            with nogil:
                xf_team_stop(self.team)
        self.team = NULL

    @property
    def weights_cache(self):
        """What became of the cache: see :attr:`Runtime.weights_cache`."""
        return self.packing.outcome

    @property
    def stale(self):
        """Whether the process was forked since: the threads stayed behind."""
        return self.generation != xf_forks

    # -- shapes ------------------------------------------------------------------------------------

    def shapes(self, tuple variant, size_t count):
        """Value id -> shape for that many samples.

        ``variant`` holds for each input its shape behind axis 0, or the whole shape where all samples share it.
        """
        key = (variant, count)
        shapes = self.planned.get(key)
        if shapes is None:
            overrides = {}
            for layout, id, shape in zip(self.layouts, self.lowered.inputs, variant):
                overrides[id] = shape if layout is None else (layout.inner * count, *shape)
            shapes = _shapes.infer(self.lowered, overrides)
            while len(self.planned) >= MAX_SHAPES:
                self.planned.popitem(last=False)
            self.planned[key] = shapes
        else:
            self.planned.move_to_end(key)
        return shapes

    def has_zero(self, tuple variant):
        """Whether some value has no elements, however many samples there are."""
        cdef object found = self.empties.get(variant)
        if found is None:
            found = any([0 in shape for shape in self.shapes(variant, 1).values()])
            if len(self.empties) >= MAX_SHAPES:
                self.empties.clear()
            self.empties[variant] = found
        return found

    def output_shapes(self, tuple variant, size_t count):
        """Shapes of the outputs for that many samples."""
        # From those for one sample: a whole batch may be far too large for what lies between inputs and outputs.
        shapes = self.shapes(variant, 1)
        return [shapes[id] if layout is None else layout.sized(shapes[id], count)
                for layout, id in zip(self.layouts[self.job.inputs:], self.lowered.outputs)]

    def new_outputs(self, tuple variant, size_t count):
        """Arrays for the results of that many samples, with readable bytes behind them."""
        cdef cnp.npy_intp dims[8]
        cdef int k
        made = []
        for shape, dtype in zip(self.output_shapes(variant, count), self.dtypes[self.job.inputs:]):
            nbytes = dtype.itemsize
            for k, dim in enumerate(shape):
                dims[k] = dim
                nbytes *= dim
            made.append(padded_array(len(shape), dims, dtype.num, nbytes))
        return tuple(made)

    # -- engines -----------------------------------------------------------------------------------

    cdef int assign(self, int member, tuple variant, size_t count, Pool pool) except -1:
        """Give a worker an engine for so many samples; it may still have to be planned."""
        cdef Engine engine
        cdef object engines = self.engines[member]
        shapes = self.shapes(variant, count)
        if (variant, count) not in self.within_cap:
            _shapes.check_sizes(self.lowered, shapes, self.graph.limits)
            if len(self.within_cap) >= MAX_SHAPES:
                self.within_cap.clear()
            self.within_cap.add((variant, count))
        pattern = broadcast_pattern(self.lowered, shapes)
        engine = engines.get(pattern)
        self.job.slot[member].engine = NULL
        try:
            if engine is None:
                while len(engines) >= MAX_ENGINES:
                    engines.popitem(last=False)
                engine = self.packing.engine(shapes, pool, self.flags, False)
                engines[pattern] = engine
            else:
                engines.move_to_end(pattern)
                if engine.shapes is not shapes and engine.shapes != shapes:
                    # Downwards this costs microseconds; memory grows here and never inside a job.
                    engine.reshape(shapes)
        except BaseException:
            engines.pop(pattern, None)
            raise
        self.job.slot[member].engine = <PyObject*> engine
        return 0

    def plan(self, int member):
        """Let a worker's engine plan its memory, if it has not."""
        cdef Engine engine = <Engine> self.job.slot[member].engine
        if engine.planned:
            return
        try:
            engine.plan()
        except BaseException:
            self.job.slot[member].engine = NULL
            self.engines[member].clear()
            raise

    cdef int plan_all(self, int first, int last, size_t nbytes) except -1:
        """Plan the engines of several workers: side by side where they grow, which takes as long as an inference."""
        cdef int w
        waiting = [w for w in range(first, last) if not (<Engine> self.job.slot[w].engine).planned]
        if len(waiting) > 1 and nbytes > self.largest:
            with ThreadPoolExecutor(len(waiting)) as threads:
                list(threads.map(self.plan, waiting))
        else:
            for w in waiting:
                self.plan(w)
        self.largest = max(self.largest, nbytes)
        return 0

    cdef int provide(self, int member, size_t i, size_t nbytes) except -1:
        """A buffer in which a worker collects the samples of a piece."""
        cdef cnp.ndarray held = self.stages[member][i]
        cdef cnp.npy_intp n = nbytes
        if held is None or <size_t> cnp.PyArray_NBYTES(held) < nbytes:
            held = padded_array(1, &n, cnp.NPY_UINT8, nbytes)
            self.stages[member][i] = held
        self.job.slot[member].stage[i] = <char*> cnp.PyArray_DATA(held)
        return 0

    # -- jobs --------------------------------------------------------------------------------------

    def run(self, list requests, tuple variant, size_t micro, size_t start, size_t stop, *, int members=0,
            bint pooled=False):
        """Process samples ``start`` to ``stop`` of all requests, numbered one after the other.

        Parameters
        ----------
        requests : list of (tuple of ndarray, tuple of ndarray, int)
            Inputs, outputs and number of samples. Arrays have the right dtype; inputs are contiguous behind
            axis 0, outputs contiguous; shared inputs have readable bytes behind them.
        variant : tuple
            As in :meth:`shapes`.
        micro : int
            Samples per piece.
        members : int
            How many workers take part; 0 means all.
        pooled : bool
            Process everything at once with the pool.

        Returns
        -------
        tuple
            Nanoseconds of the fastest piece of each worker that had two or more.
        """
        cdef Job* job = &self.job
        cdef size_t i, rest
        cdef int w, everyone
        cdef bint more = True
        cdef xnn_status result
        if self.closed:
            raise ClosedError("this executor was closed")
        if self.busy:
            raise BusyError("the crew is at work")
        if stop <= start:
            return ()
        job.segments = len(requests)
        job.first = <size_t*> calloc(job.segments + 1, sizeof(size_t))
        job.span = <Span*> calloc(job.segments * job.ports + 1, sizeof(Span))
        self.busy = True
        try:
            if job.first == NULL or job.span == NULL:
                raise MemoryError
            need = self.describe(requests, variant)
            everyone = min(<int> (members or self.workers), self.workers)
            if pooled:
                micro = stop - start
                if self.pool is None:
                    self.pool = Pool(self.threads)
            micro = min(micro, stop - start)
            job.micro = micro
            job.pieces = (stop - start) // micro
            rest = (stop - start) % micro
            job.start = start
            job.stop = stop
            job.answers = start
            job.next = 0
            job.status = 0
            everyone = min(everyone, <int> min(job.pieces, <size_t> self.workers))
            for w in range(self.workers if pooled else 0, self.workers + 1 if pooled else everyone):
                job.slot[w].segment = 0
                job.slot[w].pieces = 0
                job.slot[w].busy = 0
                job.slot[w].best = INT64_MAX
                self.assign(w, variant, micro, self.pool if pooled else None)
                for i in range(job.ports):
                    if need[i]:
                        self.provide(w, i, need[i] * (1 if job.port[i].shared else micro))
            self.plan_all(self.workers if pooled else 0, self.workers + 1 if pooled else everyone,
                          micro * job.port[0].row)
            if pooled:
                with nogil:
                    result = process(job, &job.slot[self.workers], <Engine> job.slot[self.workers].engine, start, micro)
                self.judge(<int> result, start, self.workers, self.workers + 1)
                return ()
            if everyone > 1 and self.team == NULL:
                self.muster()
            # The remainder comes last in the batch and first in time: the calling thread's engine goes down to its
            # size and comes back while the others are at work already.
            try:
                if everyone > 1:
                    with nogil:
                        xf_team_open(self.team, everyone - 1)
                if rest:
                    self.remainder(variant, micro, rest, need)
                while more:
                    with nogil:
                        more = labour(job, 0, xf_nanoseconds() + PATIENCE)
                    if more:
                        PyErr_CheckSignals()
            finally:
                xf_no_more(&job.next)
                if everyone > 1:
                    with nogil:
                        xf_team_close(self.team)
            self.judge(job.status, job.bad, 0, everyone)
            return tuple([job.slot[w].best for w in range(everyone) if job.slot[w].pieces > 1])
        finally:
            self.busy = False
            free(job.first)
            free(job.span)
            job.first = NULL
            job.span = NULL

    cdef int remainder(self, tuple variant, size_t micro, size_t rest, list need) except -1:
        cdef Job* job = &self.job
        cdef Slot* slot = &job.slot[0]
        cdef xnn_status status
        self.assign(0, variant, rest, None)
        self.plan(0)
        with nogil:
            status = process(job, slot, <Engine> slot.engine, job.stop - rest, rest)
        if status != xnn_status_success:
            if xf_first_error(&job.status, <int> status):
                job.bad = job.stop - rest
            xf_no_more(&job.next)
            return 0
        self.assign(0, variant, micro, None)
        self.plan(0)
        return 0

    cdef int judge(self, int status, size_t bad, int first, int last) except -1:
        """After a failure no engine that took part can be trusted."""
        cdef int w
        if status == 0:
            return 0
        for w in range(first, last):
            self.job.slot[w].engine = NULL
            self.engines[w].clear()
        error = xnnpack_error("xnn_invoke_runtime", status, detail=f"at sample {bad}")
        error.sample = bad
        raise error

    cdef int muster(self) except -1:
        cdef int cpus[1024]
        cdef int i, places = 0
        if self.cpus is not None:
            places = min(len(self.cpus), 1024)
            for i in range(places):
                cpus[i] = self.cpus[i]
        with nogil:
            self.team = xf_team_start(self.workers - 1, cpus, places, member_main, &self.job)
        if self.team == NULL:
            raise LimitError(f"workers={self.workers}: the system does not permit {self.workers - 1} more threads")
        return 0

    cdef list describe(self, list requests, tuple variant):
        """Fill in ports and spans; for every port the bytes per sample of a buffer, 0 where none is needed."""
        cdef Job* job = &self.job
        cdef size_t i, s, rows, total = 0, nbytes
        cdef cnp.ndarray array
        cdef Span* span
        cdef char* high
        cdef bint several = job.segments > 1
        cdef list need = [0] * job.ports
        one = self.shapes(variant, 1)
        ids = (*self.lowered.inputs, *self.lowered.outputs)
        for i in range(job.ports):
            shape = one[ids[i]]
            nbytes = self.dtypes[i].itemsize
            for dim in shape:
                nbytes *= <size_t> dim
            layout = self.layouts[i]
            job.port[i].shared = layout is None
            job.port[i].blocks = 1 if layout is None else layout.blocks(shape)
            job.port[i].row = nbytes // job.port[i].blocks
        for s, (inputs, outputs, count) in enumerate(requests):
            rows = count
            job.first[s] = total
            total += rows
            for i in range(job.ports):
                array = inputs[i] if i < job.inputs else outputs[i - job.inputs]
                span = &job.span[s * job.ports + i]
                span.base = <char*> cnp.PyArray_DATA(array)
                span.stride = <Py_ssize_t> job.port[i].row
                if i < job.inputs and not job.port[i].shared and rows > 1:
                    span.stride = (cnp.PyArray_STRIDES(array)[0]
                                   * <Py_ssize_t> (<size_t> cnp.PyArray_DIMS(array)[0] // rows))
                high = span.base + job.port[i].row
                if i >= job.inputs:
                    high = span.base + cnp.PyArray_NBYTES(array)
                elif span.stride > 0 and rows > 1:
                    high += (rows - 1) * span.stride
                span.readable = high
                if tail_readable(high - 1, 1) or is_padded(array, cnp.PyArray_NBYTES(array)):
                    span.readable += TAIL
                # Where a piece may not be taken from, or written to, its place.
                if i < job.inputs:
                    if not job.port[i].shared and (
                            several or span.readable == high or span.stride != <Py_ssize_t> job.port[i].row):
                        need[i] = job.port[i].row
                elif several or span.readable == high or job.port[i].blocks != 1 or job.port[i].shared:
                    need[i] = job.port[i].row * job.port[i].blocks
        job.first[job.segments] = total
        return need

    # -- memory ------------------------------------------------------------------------------------

    @property
    def memory(self):
        """Bytes of ``packed`` weights, shared by all workers, of all ``workspace`` and of ``staging`` buffers."""
        cdef Engine engine
        cdef size_t workspaces = 0
        for engines in self.engines:
            for engine in engines.values():
                # First two members of struct xnn_workspace at the pin: data, size.
                workspaces += (<size_t*> engine.workspace)[1]
        return {
            "packed": self.packing.packed.nbytes,
            "workspace": workspaces,
            "staging": sum([array.nbytes for stage in self.stages for array in stage if array is not None]),
        }

    def trim(self):
        """Give back engines and buffers; the next job plans anew."""
        cdef int w
        if self.busy:
            raise BusyError("the crew is at work")
        for w in range(self.workers + 1):
            self.job.slot[w].engine = NULL
            self.engines[w].clear()
            self.stages[w] = [None] * self.job.ports
        self.planned.clear()
        self.largest = 0
        self.pool = None

    def close(self):
        """Stop the threads and free what the workers had."""
        if self.closed:
            return
        self.trim()
        self.closed = True
        self.dismiss()


def output_dtype(Graph graph, value):
    """The dtype of an output's array: the index of argmax pooling is uint32, whatever the file declares."""
    node = graph.producers.get(value.id)
    if node is not None and node.op.name == "argmax_pooling2d" and node.outputs[1] == value.id:
        return np.dtype(np.uint32)
    return value.dtype


def is_ready(cnp.ndarray array not None):
    """Whether kernels may read the bytes behind a contiguous array."""
    return bool(tail_readable(<const char*> cnp.PyArray_DATA(array), cnp.PyArray_NBYTES(array))
                or is_padded(array, cnp.PyArray_NBYTES(array)))
