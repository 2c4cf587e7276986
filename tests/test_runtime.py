"""Runtime: arrays in and out, shapes, threads, forks, memory. Operators have tests of their own."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import pickle
import platform
import threading
import weakref

import numpy as np
import pytest

import xnnfast
from xnnfast import (
    ArgumentError,
    BusyError,
    ClosedError,
    DtypeError,
    GraphBuilder,
    NotFiniteError,
    OverlapError,
    Runtime,
    ShapeError,
)

F = np.float32
PAGE = mmap.PAGESIZE


def unary(shape=(2, 3), name="negate", datatype="fp32"):
    b = GraphBuilder()
    b.output(getattr(b, name)(b.input(shape, datatype)))
    return b.graph()


def binary(a, c, name="add"):
    b = GraphBuilder()
    b.output(getattr(b, name)(b.input(a), b.input(c)))
    return b.graph()


def linear(inner=16, outer=8, batch=1, seed=0):
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((outer, inner), F)
    bias = rng.standard_normal(outer, F)
    b = GraphBuilder()
    b.output(b.fully_connected(b.input((batch, inner)), w, bias))
    return b.graph(), w, bias


def at_page_end(array):
    """The array's elements in memory whose next page can't be read, and the map that owns it."""
    nbytes = array.nbytes
    pages = -(-nbytes // PAGE) + 1
    memory = mmap.mmap(-1, pages * PAGE)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    assert libc.mprotect(base + (pages - 1) * PAGE, PAGE, 0) == 0
    start = (pages - 1) * PAGE - nbytes
    made = np.frombuffer(memory, array.dtype, array.size, start).reshape(array.shape)
    made[...] = array
    return made


# ---- arrays in


def test_result_is_new_and_owned_by_the_caller():
    rt = Runtime(unary())
    x = np.arange(6, dtype=F).reshape(2, 3)
    (first,) = rt.run(x)
    (second,) = rt.run(x + 1)
    np.testing.assert_array_equal(first, -x)
    np.testing.assert_array_equal(second, -(x + 1))
    assert first.flags.c_contiguous and first.flags.writeable and first.ctypes.data % 64 == 0
    assert rt.staged == 0


@pytest.mark.parametrize(
    "arrange",
    [
        pytest.param(np.asfortranarray, id="A1-fortran"),
        pytest.param(lambda x: np.repeat(np.repeat(x, 2, 0), 2, 1)[::2, ::2], id="strided"),
        pytest.param(lambda x: x[::-1, ::-1].copy()[::-1, ::-1], id="negative-strides"),
        pytest.param(lambda x: x.astype(">f4"), id="byte-swapped"),
        pytest.param(
            lambda x: np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(F).reshape(x.shape), id="misaligned"
        ),
    ],
)
def test_layouts_that_need_a_copy_are_staged_once_and_counted(arrange):
    rt = Runtime(unary())
    x = np.array([[1, 2, 3], [4, 5, 6]], F)
    (y,) = rt.run(arrange(x))
    np.testing.assert_array_equal(y, [[-1, -2, -3], [-4, -5, -6]])
    assert rt.staged == 1


def test_zero_strides_are_read_as_the_values_they_show():
    rt = Runtime(unary())
    (y,) = rt.run(np.broadcast_to(F(3), (2, 3)))
    np.testing.assert_array_equal(y, np.full((2, 3), -3, F))


def test_read_only_arrays_are_taken_in_place():
    rt = Runtime(unary())
    x = xnnfast.empty((2, 3))
    x[...] = 1
    x.flags.writeable = False
    rt.run(x)
    assert rt.staged == 0


@pytest.mark.parametrize(
    "x",
    [np.ones((2, 3)), np.ones((2, 3), np.float16), np.ones((2, 3), np.int64), np.ones((2, 3), bool),
     np.ones((2, 3), object), np.ones((2, 3), complex), [[1.0, 2, 3], [4, 5, 6]], np.ones((2, 3), np.int32), "text",
     np.array([["a", "b", "c"]] * 2)],
    ids=["float64", "float16", "int64", "bool", "object", "complex", "list", "int32", "str", "strings"],
)
def test_A3_other_dtypes_are_refused_by_name(x):
    rt = Runtime(unary())
    with pytest.raises(DtypeError, match=r"input 0.*float32") as caught:
        rt.run(x)
    assert isinstance(caught.value, TypeError)
    np.testing.assert_array_equal(rt.run(np.ones((2, 3), F))[0], -np.ones((2, 3), F))


def test_A3_int8_is_not_uint8():
    b = GraphBuilder()
    q = xnnfast.PerTensor(0.5, 3)
    x = b.input((4,), "quint8", q)
    b.output(b.static_reshape(x, (2, 2)))
    rt = Runtime(b.graph())
    with pytest.raises(DtypeError, match="uint8"):
        rt.run(np.ones(4, np.int8))
    np.testing.assert_array_equal(rt.run(np.arange(4, dtype=np.uint8))[0], [[0, 1], [2, 3]])


def test_A5_rank_0():
    rt = Runtime(binary((), (3,)))
    for scalar in (F(2), np.array(2, F)):
        np.testing.assert_array_equal(rt.run(scalar, np.array([1, 2, 3], F))[0], [3, 4, 5])
    (y,) = Runtime(binary((), ())).run(F(2), F(3))
    assert isinstance(y, np.ndarray) and y.shape == () and y == 5


def test_A7_shape_is_checked_axis_by_axis():
    b = GraphBuilder()
    b.output(b.conv2d(b.input((1, 2, 2, 3)), np.ones((1, 1, 1, 3), F)))
    rt = Runtime(b.graph())
    with pytest.raises(ShapeError, match=r"input dim 3 is 2, .* is 3"):
        rt.run(np.ones((1, 3, 2, 2), F))
    assert rt.run(np.ones((1, 2, 2, 3), F))[0].shape == (1, 2, 2, 1)


def test_rank_must_match():
    rt = Runtime(unary())
    with pytest.raises(ShapeError, match="rank 2"):
        rt.run(np.ones(6, F))


def test_number_of_inputs():
    with pytest.raises(ArgumentError, match="need 1 inputs, got 2"):
        Runtime(unary()).run(np.ones((2, 3), F), np.ones((2, 3), F))


class OnlyDlpack:
    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **kw):
        return self.array.__dlpack__(**kw)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_buffers_and_dlpack_exporters_are_taken():
    rt = Runtime(unary((4,)))
    x = np.array([1, 2, 3, 4], F)
    np.testing.assert_array_equal(rt.run(memoryview(x))[0], -x)
    np.testing.assert_array_equal(rt.run(OnlyDlpack(x))[0], -x)


@pytest.mark.parametrize("inner,outer", [(3, 3), (17, 1), (8, 32), (1024, 4)])
def test_B1_input_at_the_end_of_mapped_memory_is_staged(inner, outer):
    graph, w, bias = linear(inner, outer)
    rt = Runtime(graph)
    x = at_page_end(np.random.default_rng(1).standard_normal((1, inner), F))
    (y,) = rt.run(x)
    np.testing.assert_allclose(y, x @ w.T + bias, rtol=1e-4, atol=1e-4)
    assert rt.staged == 1


def test_B1_everyday_twin_memmap_of_whole_pages(tmp_path):
    x = np.arange(PAGE // 4, dtype=F).reshape(1, -1)
    np.save(tmp_path / "x.npy", x)
    raw = tmp_path / "x.bin"
    raw.write_bytes(x.tobytes())
    assert raw.stat().st_size % PAGE == 0
    graph, w, bias = linear(x.shape[1], 3)
    (y,) = Runtime(graph).run(np.memmap(raw, F, "r", shape=x.shape))
    np.testing.assert_allclose(y, x @ w.T + bias, rtol=1e-3, atol=1)


def test_a_slice_of_a_larger_array_is_taken_in_place():
    graph, *_ = linear(16, 8)
    rt = Runtime(graph)
    big = np.ones((64, 16), F)
    rt.run(big[10:11])
    assert rt.staged == 0


def test_outputs_of_one_runtime_feed_another_in_place():
    graph, *_ = linear(16, 16)
    first, second = Runtime(graph), Runtime(graph)
    # Many, so that some of the outputs end at the end of a page.
    outputs = [first.run(np.ones((1, 16), F))[0] for _ in range(500)]
    for y in outputs:
        second.run(y)
    assert second.staged == 0


def test_spare_bytes_do_not_reach_the_result():
    graph, *_ = linear(7, 5)
    rt = Runtime(graph)
    x = np.random.default_rng(3).standard_normal(7, F)
    results = []
    for fill in (0, np.nan):
        big = np.full((1, 64), fill, F)
        big[0, :7] = x
        results.append(rt.run(big[:, :7])[0])
    assert rt.staged == 0
    np.testing.assert_array_equal(*results)


# ---- arrays out


def test_B5_out_is_filled_and_returned():
    rt = Runtime(unary())
    x, z = np.ones((2, 3), F), np.zeros((2, 3), F)
    (y,) = rt.run(x, out=[z])
    assert y is z
    np.testing.assert_array_equal(z, -x)
    assert rt.run(x, out=(z,))[0] is z


@pytest.mark.parametrize(
    "out,error",
    [
        (np.zeros((2, 3)), DtypeError),
        (np.zeros((3, 2), F), ShapeError),
        (np.zeros((2, 3), ">f4"), DtypeError),
        (np.zeros((3, 2), F).T, ArgumentError),
        (np.broadcast_to(F(0), (2, 3)), ArgumentError),
        ([[0.0] * 3] * 2, ArgumentError),
    ],
    ids=["dtype", "shape", "byte-order", "order", "read-only", "list"],
)
def test_B5_unfit_out_is_refused(out, error):
    rt = Runtime(unary())
    with pytest.raises(error, match=r"out\[0\]"):
        rt.run(np.ones((2, 3), F), out=[out])


def test_B5_overlap_is_refused():
    rt = Runtime(unary((4,)))
    memory = xnnfast.empty((8,))
    with pytest.raises(OverlapError, match="input 0"):
        rt.run(memory[:4], out=[memory[2:6]])
    with pytest.raises(OverlapError):
        rt.run(memory[:4], out=[memory[:4]])
    rt.run(memory[:4], out=[memory[4:]])
    b = GraphBuilder()
    x = b.input((4,))
    b.output(b.negate(x))
    b.output(b.abs(x))
    with pytest.raises(OverlapError, match=r"out\[1\].*out\[0\]"):
        Runtime(b.graph()).run(np.ones(4, F), out=[memory[:4], memory[3:7]])


def test_number_of_out_arrays_and_their_container():
    rt = Runtime(unary())
    x = np.ones((2, 3), F)
    with pytest.raises(ArgumentError, match="need 1 arrays, got 2"):
        rt.run(x, out=[np.zeros((2, 3), F)] * 2)
    with pytest.raises(ArgumentError, match="list or tuple"):
        rt.run(x, out=np.zeros((1, 2, 3), F))


def test_out_at_the_end_of_mapped_memory():
    graph, w, bias = linear(8, 5)
    rt = Runtime(graph)
    x = np.ones((1, 8), F)
    z = at_page_end(np.zeros((1, 5), F))
    (y,) = rt.run(x, out=[z])
    assert y is z
    np.testing.assert_allclose(z, x @ w.T + bias, rtol=1e-5, atol=1e-5)
    assert rt.staged == 1


# ---- shapes


def test_C1_batch_is_free():
    graph, w, bias = linear(16, 8, batch=1)
    rt = Runtime(graph)
    for n in (10, 1, 3, 64, 2):
        x = np.arange(n * 16, dtype=F).reshape(n, 16) / 256
        (y,) = rt.run(x)
        assert y.shape == (n, 8)
        np.testing.assert_allclose(y, x @ w.T + bias, rtol=1e-5, atol=1e-5)


def test_broadcasting_that_comes_and_goes():
    # The engine keeps an in-place plan made for equal shapes when an operand becomes a broadcast.
    b = GraphBuilder()
    p, q = b.input((4, 64)), b.input((4, 64))
    b.output(b.abs(b.subtract(b.negate(p), b.negate(q))))
    rt = Runtime(b.graph())
    rng = np.random.default_rng(0)
    for left, right in [(4, 4), (1, 4), (4, 1), (4, 4), (1, 1), (9, 1), (1, 9)]:
        x, y = rng.standard_normal((left, 64), F), rng.standard_normal((right, 64), F)
        np.testing.assert_array_equal(rt.run(x, y)[0], abs(-x + y), err_msg=f"{left} and {right}")


def test_empty_batch_is_answered_without_the_engine():
    graph, *_ = linear(16, 8)
    rt = Runtime(graph)
    (y,) = rt.run(np.zeros((0, 16), F))
    assert y.shape == (0, 8) and y.dtype == F
    assert rt.run(np.ones((2, 16), F))[0].shape == (2, 8)


def test_J2_empty_operand_beside_a_full_one():
    b = GraphBuilder()
    b.output(b.concatenate([b.input((1, 2)), b.input((2, 2))], 0))
    rt = Runtime(b.graph())
    x = np.array([[1, 2], [3, 4]], F)
    np.testing.assert_array_equal(rt.run(np.zeros((0, 2), F), x)[0], x)


def test_a_refused_shape_leaves_the_runtime_as_it_was():
    graph, w, bias = linear(16, 8)
    rt = Runtime(graph)
    x = np.ones((3, 16), F)
    before = rt.run(x)[0]
    for bad in [(3, 15), (3, 17), (48,), (1, 3, 16)]:
        with pytest.raises(ShapeError):
            rt.run(np.ones(bad, F))
    np.testing.assert_array_equal(rt.run(x)[0], before)


# ---- topology


def test_K1_pass_through_is_a_copy():
    from xnnfast import Graph, Value

    value = Value(0, "fp32", (3,), external_id=0, is_input=True, is_output=True)
    rt = Runtime(Graph([value], [], [value], [value]))
    x = np.array([1, 2, 3], F)
    (y,) = rt.run(x)
    np.testing.assert_array_equal(y, x)
    assert not np.shares_memory(x, y)


def test_K1_value_that_is_consumed_and_exported():
    b = GraphBuilder()
    x = b.input((3,))
    m = b.add(x, x)
    b.output(m)
    b.output(b.clamp(m, 0, 5))
    y, z = Runtime(b.graph()).run(np.array([-1, 2, 3], F))
    np.testing.assert_array_equal(y, [-2, 4, 6])
    np.testing.assert_array_equal(z, [0, 4, 5])


def test_dead_chain_of_nodes_does_not_abort():
    b = GraphBuilder()
    x = b.input((3,))
    b.abs(b.negate(b.square(x)))
    b.output(b.add(x, x))
    np.testing.assert_array_equal(Runtime(b.graph()).run(np.array([1, 2, 3], F))[0], [2, 4, 6])


# ---- options


def test_check_finite_finds_what_kernels_hide():
    b = GraphBuilder()
    x = b.input((1, 2))
    b.output(b.fully_connected(x, np.ones((2, 2), F), clamp=(0, 6)))
    x = np.full((1, 2), np.nan, F)
    # Maximum and minimum of Arm hand a NaN on, those of x86 take the other operand.
    hidden = np.isfinite(Runtime(b.graph()).run(x)[0])
    assert hidden.all() if platform.machine() == "x86_64" else not hidden.any()
    with pytest.raises(NotFiniteError, match="input 0 holds 2 values"):
        Runtime(b.graph(), check_finite=True).run(x)


def test_check_finite_looks_at_outputs():
    rt = Runtime(unary((2,), "exp"), check_finite=True)
    rt.run(np.zeros(2, F))
    with pytest.raises(NotFiniteError, match="output 0"):
        rt.run(np.full(2, 1e5, F))


def test_threads_give_the_same_numbers():
    graph, w, bias = linear(256, 128)
    x = np.random.default_rng(5).standard_normal((32, 256), F)
    np.testing.assert_array_equal(Runtime(graph).run(x)[0], Runtime(graph, threads=2).run(x)[0])


@pytest.mark.parametrize("threads", [0, -1])
def test_number_of_threads_is_checked(threads):
    with pytest.raises(ArgumentError, match="at least 1"):
        Runtime(unary(), threads=threads)


def test_profile_times_every_node():
    b = GraphBuilder()
    x = b.input((64, 256))
    h = b.fully_connected(x, np.ones((256, 256), F))
    b.output(b.softmax(b.clamp(h, 0, 6)))
    rt = Runtime(b.graph())
    rows = rt.profile(np.ones((64, 256), F), rounds=3)
    # The clamp, node 1, was folded into node 0.
    assert [index for index, _, _ in rows] == [0, 2]
    assert "Fully Connected" in rows[0][1] and all(time >= 0 for _, _, time in rows)
    assert rt.run(np.ones((2, 256), F))[0].shape == (2, 256)


# ---- memory and sharing


def test_runtimes_of_a_graph_share_packed_weights():
    graph, w, bias = linear(512, 512)
    first = Runtime(graph)
    packed = first.memory["packed"]
    assert packed >= w.nbytes
    second = Runtime(graph)
    assert second.memory["packed"] == packed
    x = np.random.default_rng(0).standard_normal((4, 512), F)
    np.testing.assert_array_equal(first.run(x)[0], second.run(x)[0])
    del first
    np.testing.assert_allclose(second.run(x)[0], x @ w.T + bias, rtol=1e-3, atol=1e-3)


def test_equal_weights_with_different_scales_are_not_confused():
    w = np.random.default_rng(0).integers(-128, 128, (16, 32)).astype(np.int8)
    b = GraphBuilder()
    x = b.input((1, 32))
    q = b.convert(x, "qdint8", xnnfast.PerToken(1))
    one = b.constant(w, "qcint8", xnnfast.PerChannel(np.full(16, 0.5, F), 0))
    two = b.constant(w, "qcint8", xnnfast.PerChannel(np.full(16, 2.0, F), 0))
    b.output(b.fully_connected(q, one))
    b.output(b.fully_connected(q, two))
    graph = b.graph()
    for rt in (Runtime(graph), Runtime(graph)):
        y, z = rt.run(np.ones((1, 32), F))
        np.testing.assert_allclose(z, 4 * y, rtol=1e-5)


def test_trim_gives_the_workspace_back_and_the_runtime_still_runs():
    b = GraphBuilder()
    x = b.input((1, 64))
    b.output(b.abs(b.negate(b.square(x))))
    rt = Runtime(b.graph())
    rt.run(np.ones((4096, 64), F))
    grown = rt.memory["workspace"]
    rt.run(np.ones((1, 64), F))
    assert rt.memory["workspace"] == grown >= 4096 * 64 * 4
    rt.trim()
    assert rt.memory["workspace"] < grown / 100
    np.testing.assert_array_equal(rt.run(np.full((2, 64), 3, F))[0], np.full((2, 64), 9, F))


def test_closed_runtime_says_so():
    with Runtime(unary()) as rt:
        rt.run(np.ones((2, 3), F))
    with pytest.raises(ClosedError):
        rt.run(np.ones((2, 3), F))


def rss():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc")
def test_O1_memory_stays_flat_over_changing_batches():
    graph, *_ = linear(256, 256)
    rt = Runtime(graph)
    arrays = [np.ones((n, 256), F) for n in (1, 7, 33, 64)]
    for _ in range(300):
        for x in arrays:
            rt.run(x)
    before = rss()
    for _ in range(3000):
        for x in arrays:
            rt.run(x)
    assert rss() - before < 2 << 20


# ---- lifetime


def test_the_graph_outlives_its_name_while_a_runtime_uses_it():
    b = GraphBuilder()
    b.output(b.add(b.input((3,)), np.array([5, 5, 5], F)))
    graph = xnnfast.load(b.finish())
    rt = Runtime(graph)
    watch = weakref.ref(graph)
    del graph, b
    gc.collect()
    assert watch() is not None
    np.testing.assert_array_equal(rt.run(np.array([1, 2, 3], F))[0], [6, 7, 8])
    del rt
    gc.collect()
    assert watch() is None


def test_a_reference_cycle_is_collected():
    class Holder:
        pass

    holder = Holder()
    holder.runtime = Runtime(unary())
    holder.self = holder
    watch = weakref.ref(holder.runtime)
    del holder
    gc.collect()
    assert watch() is None


def test_B3_a_bytearray_may_change_after_loading():
    b = GraphBuilder()
    b.output(b.add(b.input((3,)), np.array([5, 5, 5], F)))
    source = bytearray(b.finish())
    rt = Runtime(xnnfast.load(source))
    for i in range(len(source)):
        source[i] = 0
    del source
    gc.collect()
    np.testing.assert_array_equal(rt.run(np.array([1, 2, 3], F))[0], [6, 7, 8])


def test_N5_a_runtime_is_pickled_by_its_graph_and_options():
    runtime = Runtime(unary(), threads=2)
    made = pickle.loads(pickle.dumps(runtime))
    assert made.threads == 2
    x = np.ones(runtime.inputs[0].shape, F)
    np.testing.assert_array_equal(made.run(x)[0], runtime.run(x)[0])


# ---- threads and forks


def test_a_second_caller_gets_busy_error():
    b = GraphBuilder()
    x = b.input((64, 512))
    for _ in range(8):
        x = b.fully_connected(x, np.eye(512, dtype=F))
    b.output(x)
    rt = Runtime(b.graph())
    arrays = [np.full((2048, 512), i, F) for i in range(4)]
    busy, wrong = [], []

    def work(i):
        for _ in range(10):
            try:
                (y,) = rt.run(arrays[i])
            except BusyError as error:
                busy.append(error)
            else:
                if not np.array_equal(y, arrays[i]):
                    wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert busy and not wrong
    assert "one Runtime per thread" in str(busy[0])


def test_many_runtimes_in_many_threads():
    graph, w, bias = linear(64, 32)
    failures = []

    def work(seed):
        rt = Runtime(graph)
        rng = np.random.default_rng(seed)
        for _ in range(50):
            x = rng.standard_normal((int(rng.integers(1, 40)), 64), F)
            if not np.allclose(rt.run(x)[0], x @ w.T + bias, rtol=1e-3, atol=1e-4):
                failures.append(seed)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def in_child(work):
    """Exit status of work() in a forked child, or None when it hangs."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = 0 if work() else 2
        finally:
            os._exit(status)
    import time

    end = time.monotonic() + 20
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return None


@pytest.mark.parametrize("threads", [1, 2])
def test_N1_forked_child_runs_and_frees(threads):
    graph, w, bias = linear(256, 128)
    x = np.random.default_rng(5).standard_normal((64, 256), F)
    rt = Runtime(graph, threads=threads)
    want = rt.run(x)[0]
    assert in_child(lambda: np.array_equal(rt.run(x)[0], want)) == 0

    def free():
        nonlocal rt
        rt = None
        gc.collect()
        return True

    assert in_child(free) == 0
    np.testing.assert_array_equal(rt.run(x)[0], want)


def test_fork_while_another_thread_runs():
    graph, w, bias = linear(512, 512)
    x = np.random.default_rng(5).standard_normal((512, 512), F)
    rt = Runtime(graph)
    want = rt.run(x)[0]
    stop = threading.Event()

    def work():
        while not stop.is_set():
            rt.run(x)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(5):
            assert in_child(lambda: np.array_equal(rt.run(x)[0], want)) == 0
    finally:
        stop.set()
        thread.join()


# ---- empty


def test_empty_makes_arrays_that_never_need_a_copy():
    graph, *_ = linear(5, 3)
    rt = Runtime(graph)
    for _ in range(3000):
        x = xnnfast.empty((1, 5))
        x[...] = 1
        rt.run(x, out=[xnnfast.empty((1, 3), np.float32)])
    assert rt.staged == 0


def test_empty_takes_datatypes_and_dtypes():
    assert xnnfast.empty(3, "qint8").dtype == np.int8
    assert xnnfast.empty((), "fp16").shape == ()
    assert xnnfast.empty((2, 0), np.float32).size == 0
    with pytest.raises(DtypeError):
        xnnfast.empty(3, object)
    with pytest.raises(DtypeError, match="packed"):
        xnnfast.empty(3, "qcint4")
    with pytest.raises(ShapeError):
        xnnfast.empty((-1, 2))


def test_fork_while_another_thread_creates():
    # The packed weights' lock is held by a thread that the child does not have.
    rng = np.random.default_rng(0)
    filters = [rng.standard_normal((512, 512), F) for _ in range(8)]

    def graph():
        b = GraphBuilder()
        x = b.input((1, 512))
        for w in filters:
            x = b.fully_connected(x, w)
        b.output(x)
        return b.graph()

    shared = graph()
    x = rng.standard_normal((1, 512), F)
    want = Runtime(graph()).run(x)[0]
    started = threading.Event()

    def work():
        started.set()
        Runtime(shared)

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    assert in_child(lambda: np.array_equal(Runtime(shared).run(x)[0], want)) == 0
    thread.join()
    np.testing.assert_array_equal(Runtime(shared).run(x)[0], want)


def test_the_workspace_is_what_is_in_use_at_once():
    # Every layer's result is as large as any other; two are in use at a time.
    b = GraphBuilder()
    x = b.input((1, 32, 32, 16))
    w = np.full((16, 1, 1, 16), 0.25, F)
    for _ in range(12):
        x = b.conv2d(x, w)
    b.output(b.global_average_pooling2d(x))
    runtime = Runtime(b.graph())
    runtime.plan()
    assert runtime.memory["workspace"] < 2.5 * 32 * 32 * 16 * 4
