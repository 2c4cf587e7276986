"""Executor: any batch, several workers, results row by row those of the declared batch."""

from __future__ import annotations

import gc
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest

from xnnfast import _runtime, load, reference
from xnnfast._graph import Graph
from xnnfast.builder import GraphBuilder
from xnnfast.caps import Limits
from xnnfast.errors import (
    ArgumentError,
    ClosedError,
    DtypeError,
    GraphError,
    LimitError,
    OverlapError,
    ShapeError,
    UnsupportedError,
)
from xnnfast.executor import Executor, _Tuner


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)


def dense_graph(batch=1, inner=12, outer=5):
    b = GraphBuilder()
    x = b.input((batch, inner))
    b.output(b.tanh(b.fully_connected(x, numbers(outer, inner), numbers(outer, seed=1))))
    return b.graph()


def conv_graph(batch=1, size=9):
    b = GraphBuilder()
    x = b.input((batch, size, size, 3))
    y = b.conv2d(x, numbers(8, 3, 3, 3), numbers(8, seed=1), padding=1, clamp=(0, 6))
    y = b.add(y, b.depthwise_conv2d(y, numbers(1, 3, 3, 8, seed=2), same_padding=True))
    y = b.static_reshape(b.global_average_pooling2d(y), (batch, 8))
    b.output(b.softmax(b.fully_connected(y, numbers(4, 8, seed=3))))
    return b.graph()


def rows(graph, *arrays):
    """What the declared batch gives for every sample by itself, by NumPy."""
    declared = graph.inputs[0].shape[0]
    made = [reference.run(graph, *[np.repeat(array[i : i + 1], declared, 0) for array in arrays])
            for i in range(len(arrays[0]))]
    return [np.stack([each[position][0] for each in made]) for position in range(len(graph.outputs))]


BATCHES = (1, 2, 3, 7, 8, 9, 31, 32, 64, 100)


@pytest.mark.parametrize("declared", [1, 8])
@pytest.mark.parametrize("make", [dense_graph, conv_graph])
@pytest.mark.parametrize("micro", [None, 1, 4, 16])
def test_any_batch_gives_what_each_sample_gives(make, declared, micro):
    graph = make(declared)
    x = numbers(100, *graph.inputs[0].shape[1:], seed=5)
    (expected,) = rows(graph, x)
    with Executor(graph, workers=2, micro_batch=micro) as executor:
        for batch in BATCHES:
            (y,) = executor.run(x[:batch])
            np.testing.assert_allclose(y, expected[:batch], 1e-4, 1e-5)


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_any_number_of_workers_gives_the_same_bits(workers):
    graph = conv_graph()
    x = numbers(50, 9, 9, 3)
    (one,) = _runtime.Runtime(graph).run(x)
    with Executor(graph, workers=workers, micro_batch=3) as executor:
        (y,) = executor.run(x)
        np.testing.assert_array_equal(y, one)


def test_an_empty_batch_has_empty_results():
    with Executor(conv_graph(), workers=2) as executor:
        (y,) = executor.run(np.empty((0, 9, 9, 3), np.float32))
        assert y.shape == (0, 4)
        out = np.empty((0, 4), np.float32)
        assert executor.run(np.empty((0, 9, 9, 3), np.float32), out=[out])[0] is out


def test_samples_without_elements_never_reach_the_engine():
    b = GraphBuilder()
    x = b.input((1, 4, 3))
    b.output(b.tanh(x))
    b.output(b.concatenate([x, b.input((1, 2, 3))], 1))
    with Executor(b.graph(), workers=2) as executor:
        one, two = executor.run(numbers(5, 0, 3), numbers(5, 2, 3))
        assert one.shape == (5, 0, 3)
        np.testing.assert_array_equal(two, numbers(5, 2, 3))


def test_a_batch_may_be_larger_than_what_fits_in_the_workspace_at_once():
    b = GraphBuilder()
    b.output(b.global_average_pooling2d(b.conv2d(b.input((1, 8, 8, 1)), numbers(64, 1, 1, 1)), keep_dims=False))
    parts = b.parts()
    graph = Graph(*parts, limits=Limits(max_workspace=1 << 20))
    x = numbers(1000, 8, 8, 1)
    with Executor(graph, workers=2) as executor:
        (y,) = executor.run(x)
        np.testing.assert_allclose(y[::9], rows(graph, x[::9])[0], 1e-4, 1e-5)
        assert executor.plan.micro_batch <= 16
    with Executor(graph, workers=1, micro_batch=100) as executor, pytest.raises(LimitError, match="max_workspace"):
        executor.run(x)


def test_several_inputs_shared_inputs_and_shared_outputs():
    b = GraphBuilder()
    x, y, factor = b.input((1, 6)), b.input((1, 6)), b.input((6,))
    b.output(b.multiply(b.add(x, y), factor))
    b.output(b.tanh(factor))
    graph = b.graph()
    a, c, f = numbers(33, 6), numbers(33, 6, seed=1), numbers(6, seed=2)
    with Executor(graph, workers=2, micro_batch=4, batched=[0, 1]) as executor:
        total, shared = executor.run(a, c, f)
        np.testing.assert_allclose(total, (a + c) * f, 1e-5, 1e-6)
        np.testing.assert_allclose(shared, np.tanh(f), 1e-5)
        several = list(executor.map([(a[:5], c[:5], f), (a[5:9], c[5:9], f)]))
        np.testing.assert_array_equal(np.concatenate([each[0] for each in several]), total[:9])
        np.testing.assert_array_equal(several[1][1], shared)


def test_a_batch_that_is_not_outermost_in_an_output_is_put_in_its_place():
    b = GraphBuilder()
    b.output(b.static_transpose(b.input((1, 4, 3)), (1, 0, 2)))
    graph = b.graph()
    x = numbers(21, 4, 3)
    with Executor(graph, workers=2, micro_batch=4) as executor:
        (y,) = executor.run(x)
        np.testing.assert_array_equal(y, x.transpose(1, 0, 2))
        merged = list(executor.map([x[:3], x[3:11]]))
        np.testing.assert_array_equal(merged[1][0], x[3:11].transpose(1, 0, 2))


def test_argmax_indices_come_as_uint32():
    b = GraphBuilder()
    for value in b.argmax_pooling2d(b.input((1, 4, 4, 2)), 2):
        b.output(value)
    graph = b.graph()
    x = numbers(9, 4, 4, 2)
    with Executor(graph, workers=2, micro_batch=2) as executor:
        _, index = executor.run(x)
        assert index.dtype == np.uint32
        np.testing.assert_array_equal(index, rows(graph, x)[1])


def test_another_size_behind_axis_0_is_taken_where_the_graph_permits_it():
    graph = conv_graph()
    with Executor(graph, workers=2, micro_batch=2) as executor:
        for size in (9, 12, 7, 9):
            x = numbers(5, size, size, 3)
            np.testing.assert_array_equal(executor.run(x)[0], _runtime.Runtime(graph).run(x)[0])


def test_a_graph_that_mixes_samples_is_refused():
    b = GraphBuilder()
    b.output(b.softmax(b.static_transpose(b.input((2, 3)), (1, 0))))
    with pytest.raises(GraphError, match=r"node 1 \(softmax\)"):
        Executor(b.graph())


def test_opens_a_path_and_bytes(tmp_path):
    b = GraphBuilder()
    b.output(b.tanh(b.input((1, 4))))
    b.save(tmp_path / "tanh.xnn")
    x = numbers(5, 4)
    for source in (tmp_path / "tanh.xnn", str(tmp_path / "tanh.xnn"), b.finish()):
        with Executor(source, workers=1) as executor:
            np.testing.assert_allclose(executor.run(x)[0], np.tanh(x), 1e-5)


# ---------------------------------------------------------------------------------------------------
# Arrays


def test_strided_batches_are_read_where_they_are():
    graph = dense_graph()
    x = numbers(60, 12)
    (expected,) = rows(graph, x)
    with Executor(graph, workers=2, micro_batch=4) as executor:
        np.testing.assert_allclose(executor.run(x[::2])[0], expected[::2], 1e-4, 1e-5)
        np.testing.assert_allclose(executor.run(x[::-1])[0], expected[::-1], 1e-4, 1e-5)
        repeated = np.broadcast_to(x[3], (9, 12))
        np.testing.assert_allclose(executor.run(repeated)[0], np.repeat(expected[3:4], 9, 0), 1e-4, 1e-5)
        assert executor.staged == 0
        np.testing.assert_allclose(executor.run(np.asfortranarray(x))[0], expected, 1e-4, 1e-5)
        np.testing.assert_allclose(executor.run(x.astype(">f4"))[0], expected, 1e-4, 1e-5)
        assert executor.staged == 2


def at_the_end_of_a_page(array):
    """The array in memory of its own whose next byte can't be read."""
    import ctypes

    size = -(-array.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    area = mmap.mmap(-1, size + mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + size), mmap.PAGESIZE, 0) == 0
    made = np.frombuffer(area, array.dtype, array.size, size - array.nbytes).reshape(array.shape)
    made[...] = array
    return made


@pytest.mark.skipif(sys.platform != "linux", reason="uses mprotect")
@pytest.mark.parametrize("micro", [1, 3, 8])
def test_the_last_piece_may_end_where_nothing_can_be_read(micro):
    # Fewer outputs than a vector holds and an inner size that is no multiple of 4: a kernel that reads too far.
    graph = dense_graph(1, 13, 3)
    x = at_the_end_of_a_page(numbers(25, 13))
    out = at_the_end_of_a_page(np.zeros((25, 3), np.float32))
    with Executor(graph, workers=2, micro_batch=micro) as executor:
        executor.run(x, out=[out])
        np.testing.assert_allclose(out, rows(graph, np.array(x))[0], 1e-4, 1e-5)
        assert executor.staged == 0
        futures = [executor.submit(x[i:]) for i in range(3)]
        for i, future in enumerate(futures):
            np.testing.assert_array_equal(future.result()[0], out[i:])


def test_out_is_filled_and_checked():
    graph = dense_graph()
    x = numbers(10, 12)
    with Executor(graph, workers=2, micro_batch=2) as executor:
        (expected,) = executor.run(x)
        big = np.full((12, 5), 7, np.float32)
        (got,) = executor.run(x, out=[big[1:11]])
        np.testing.assert_array_equal(big[1:11], expected)
        assert got.base is big and (big[[0, 11]] == 7).all()
        for out, error, words in [
            ([], ArgumentError, "1 arrays"),
            (np.empty((10, 5), np.float32), ArgumentError, "list or tuple"),
            ([[1.0]], ArgumentError, "numpy.ndarray"),
            ([np.empty((10, 5))], DtypeError, "float32"),
            ([np.empty((9, 5), np.float32)], ShapeError, r"\(10, 5\)"),
            ([np.empty((5, 10), np.float32).T], ArgumentError, "contiguous"),
        ]:
            with pytest.raises(error, match=words):
                executor.run(x, out=out)
        with pytest.raises(OverlapError):
            executor.run(x, out=[x.reshape(-1)[:50].reshape(10, 5)])


def test_wrong_arrays_are_refused_before_anything_runs():
    b = GraphBuilder()
    b.output(b.add(b.input((1, 4)), b.input((1, 4))))
    with Executor(b.graph(), workers=2) as executor:
        x = numbers(3, 4)
        for arrays, error, words in [
            ((x,), ArgumentError, "need 2 inputs, got 1"),
            ((x, x.astype(float)), DtypeError, "input 1 .*float32, got float64"),
            ((x, x[0]), ShapeError, "rank 2"),
            ((x, x[:2]), ShapeError, "input 1 holds 2 samples, inputs before it hold 3"),
            ((x, numbers(3, 5)), ShapeError, r"node 0 \(add\)"),
            ((x, object()), DtypeError, "input 1"),
        ]:
            with pytest.raises(error, match=words):
                executor.run(*arrays)
        np.testing.assert_array_equal(executor.run(x, x)[0], x + x)


@pytest.mark.parametrize("arguments", [
    {"workers": 0}, {"threads": 0}, {"micro_batch": 0}, {"workers": 1.5}, {"workers": 1 << 40}, {"threads": 5000}])
def test_wrong_numbers_are_refused(arguments):
    with pytest.raises(ArgumentError, match=next(iter(arguments))):
        Executor(dense_graph(), **arguments)


@pytest.mark.parametrize("batched", [[1], [-1], "x", [0.5]])
def test_positions_of_inputs_are_checked(batched):
    with pytest.raises(ArgumentError, match="need positions of inputs from 0 to 0, found"):
        Executor(dense_graph(), batched=batched)


# ---------------------------------------------------------------------------------------------------
# Plans


def test_the_probe_uses_the_batch_at_hand_and_is_shared():
    graph = dense_graph()
    x = numbers(3000, 12)
    executor = Executor(graph, workers=2)
    assert executor.plan.source == "default" and executor.plan.micro_batch == 1
    (y,) = executor.run(x)
    np.testing.assert_allclose(y[::100], rows(graph, x[::100])[0], 1e-4, 1e-5)
    plan = executor.plan
    assert plan.source == "probe" and set(plan.timings) >= {1, 2, 4} and plan.micro_batch in plan.timings
    assert "2 workers: given" in str(plan) and "us per sample" in str(plan)
    for _ in range(8):
        executor.run(numbers(20000, 12))
    assert executor.plan.complete
    again = Executor(graph, workers=2)
    again.run(x)
    assert again.plan.source == "cache" and again.plan.timings == executor.plan.timings


def test_small_batches_bring_the_probe_forward_bit_by_bit():
    executor = Executor(dense_graph(), workers=2)
    for _ in range(40):
        executor.run(numbers(24, 12))
    assert set(executor.plan.timings) >= {1, 2}


def test_single_samples_in_a_stream_are_enough_for_a_probe():
    with Executor(dense_graph(), workers=2) as executor:
        for _ in executor.map(numbers(1, 12) for _ in range(600)):
            pass
        assert max(executor.plan.timings) >= 8


def test_a_given_size_is_kept():
    executor = Executor(dense_graph(), workers=1, micro_batch=6)
    executor.run(numbers(100, 12))
    assert executor.plan.micro_batch == 6 and executor.plan.source == "given" and not executor.plan.timings


def test_the_tuner_stops_where_larger_pieces_are_slower_and_takes_the_smallest_good_one():
    tuner = _Tuner()
    for seconds in (10.0, 6.0, 5.05, 5.0, 5.4, 5.5):
        assert not tuner.complete
        tuner.add(tuner.candidate(), seconds)
    assert tuner.complete and tuner.micro_batch == 4
    tuner = _Tuner()
    tuner.add(1, 1.0)
    tuner.add(2, 1.3)
    assert tuner.complete and tuner.micro_batch == 1


def test_the_tuner_does_not_judge_by_pieces_of_microseconds():
    tuner = _Tuner()
    for seconds in (10e-6, 14e-6, 7e-6, 4e-6):
        tuner.add(tuner.candidate(), seconds)
    assert not tuner.complete and tuner.micro_batch == 8


def test_default_workers_are_the_allowed_cpus(monkeypatch):
    monkeypatch.setenv("XNNFAST_CPUS", "3")
    executor = Executor(dense_graph())
    assert executor.workers == 3 and "XNNFAST_CPUS" in executor.plan.reason


def test_a_batch_smaller_than_the_workers_may_use_a_pool():
    graph = conv_graph()
    x = numbers(3, 9, 9, 3)
    with Executor(graph, workers=4, threads=2) as executor:
        for batch in (1, 3, 2):
            np.testing.assert_allclose(executor.run(x[:batch])[0], rows(graph, x[:batch])[0], 1e-4, 1e-5)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity here")
def test_pinned_workers_give_the_same():
    graph = conv_graph()
    x = numbers(20, 9, 9, 3)
    mask = os.sched_getaffinity(0)
    with Executor(graph, workers=3, micro_batch=1, pin=True) as executor:
        np.testing.assert_array_equal(executor.run(x)[0], _runtime.Runtime(graph).run(x)[0])
    assert os.sched_getaffinity(0) == mask


# ---------------------------------------------------------------------------------------------------
# Many calls


@pytest.mark.parametrize("prefetch", [None, 1, 2, 50])
def test_map_gives_results_in_order(prefetch):
    graph = dense_graph()
    batches = [numbers(1 + i % 5, 12, seed=i) for i in range(60)]
    with Executor(graph, workers=2, micro_batch=4) as executor:
        results = list(executor.map(iter(batches), prefetch=prefetch))
        assert len(results) == 60
        for batch, (y,) in zip(batches, results):
            np.testing.assert_allclose(y, rows(graph, batch)[0], 1e-4, 1e-5)


def test_map_without_order_tells_positions():
    graph = dense_graph()
    batches = [numbers(3, 12, seed=i) for i in range(30)]
    with Executor(graph, workers=2) as executor:
        seen = {}
        for position, (y,) in executor.map(batches, ordered=False):
            seen[position] = y
        assert sorted(seen) == list(range(30))
        for position, y in seen.items():
            np.testing.assert_allclose(y, rows(graph, batches[position])[0], 1e-4, 1e-5)


def test_map_reads_ahead_only_so_far():
    taken = []

    def batches():
        for i in range(1000):
            taken.append(i)
            yield numbers(2, 12)

    with Executor(dense_graph(), workers=2, micro_batch=1) as executor:
        results = executor.map(batches(), prefetch=3)
        assert taken == []
        next(results)
        assert len(taken) == 3
        results.close()


def test_map_keeps_inputs_alive_while_they_are_read():
    graph = dense_graph()

    def batches():
        for i in range(50):
            yield numbers(40, 12, seed=i)
            gc.collect(0)

    with Executor(graph, workers=2, micro_batch=2) as executor:
        for i, (y,) in enumerate(executor.map(batches(), prefetch=8)):
            np.testing.assert_allclose(y[:1], rows(graph, numbers(40, 12, seed=i)[:1])[0], 1e-4, 1e-5)


def test_map_tells_which_batch_was_wrong():
    with Executor(dense_graph(), workers=2) as executor:
        results = executor.map([numbers(2, 12), numbers(2, 12), numbers(2, 13)])
        with pytest.raises(ShapeError) as caught:
            list(results)
        assert caught.value.item == 2
        for prefetch in (0, "1", 1.5):
            with pytest.raises(ArgumentError, match="prefetch"):
                executor.map([], prefetch=prefetch)


@pytest.mark.parametrize("ordered", [True, False])
def test_map_gives_what_was_submitted_before_what_is_wrong(ordered):
    def raises():
        yield numbers(2, 12)
        yield numbers(3, 12)
        raise KeyError("gone")

    with Executor(dense_graph(), workers=2) as executor:
        for batches, error in (([numbers(2, 12), numbers(3, 12), numbers(2, 13)], ShapeError), (raises(), KeyError)):
            found = []
            with pytest.raises(error):
                for item in executor.map(batches, ordered=ordered, prefetch=4):
                    (result,) = item if ordered else item[1]
                    found.append(len(result))
            assert sorted(found) == [2, 3]


def test_batches_that_run_together_fail_each_by_itself(monkeypatch):
    with Executor(dense_graph(), workers=2, micro_batch=64) as executor:
        plain, together, held = executor._process, [], threading.Event()

        def process(requests):
            held.wait(10)
            together.append(len(requests))
            if any(np.isnan(request.inputs[0]).any() for request in requests):
                raise LimitError("no")
            plain(requests)

        monkeypatch.setattr(executor, "_process", process)
        good, bad = numbers(2, 12), np.full((2, 12), np.nan, np.float32)
        results = executor.map([good, good, bad, good], ordered=False, prefetch=4)
        threading.Timer(0.2, held.set).start()
        found = [next(results)[0], next(results)[0]]
        with pytest.raises(LimitError) as caught:
            found.append(next(results)[0])
        assert found == [0, 1] and caught.value.item == 2
        assert max(together) > 1


def test_submit_gives_futures():
    graph = dense_graph()
    batches = [numbers(n, 12, seed=n) for n in (1, 5, 1, 1, 40, 0, 2)]
    with Executor(graph, workers=2, micro_batch=4) as executor:
        futures = [executor.submit(batch) for batch in batches]
        for batch, future in zip(batches, futures):
            (y,) = future.result(60)
            assert y.shape == (len(batch), 5)
            if len(batch):
                np.testing.assert_allclose(y, rows(graph, batch)[0], 1e-4, 1e-5)


def test_calls_from_several_threads_take_turns():
    graph = conv_graph()
    x = [numbers(5 + i, 9, 9, 3, seed=i) for i in range(6)]
    expected = [_runtime.Runtime(graph).run(each)[0] for each in x]
    wrong = []
    with Executor(graph, workers=2) as executor:
        def work(i):
            for _ in range(20):
                if not np.array_equal(executor.run(x[i])[0], expected[i]):
                    wrong.append(i)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_the_gil_is_free_while_a_batch_runs():
    graph = conv_graph(1, 32)
    x = numbers(400, 32, 32, 3)
    with Executor(graph, workers=1, micro_batch=1) as executor:
        executor.run(x[:4])
        counted, stop = [0], threading.Event()

        def count():
            while not stop.is_set():
                counted[0] += 1
                time.sleep(0.0005)

        thread = threading.Thread(target=count)
        thread.start()
        before = counted[0]
        executor.run(x)
        after = counted[0]
        stop.set()
        thread.join()
    assert after > before


def test_an_interrupt_ends_a_long_run():
    graph = conv_graph(1, 48)
    x = numbers(20000, 12, 12, 3)
    with Executor(graph, workers=2, micro_batch=1) as executor:
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                for _ in range(200):
                    executor.run(x)
        finally:
            # Whatever else went wrong, the signal must not hit the test run.
            timer.cancel()
            timer.join()
        assert executor.run(x[:3])[0].shape == (3, 4)


# ---------------------------------------------------------------------------------------------------
# Life


def test_a_closed_executor_refuses_and_answers_what_waits():
    executor = Executor(dense_graph(), workers=2)
    future = executor.submit(numbers(3, 12))
    executor.close()
    executor.close()
    assert future.result(10)[0].shape == (3, 5)
    for call in (lambda: executor.run(numbers(1, 12)), lambda: executor.submit(numbers(1, 12)),
                 lambda: executor.map([]), executor.trim):
        with pytest.raises(ClosedError):
            call()


class Closing:
    """An input that closes the executor while it is made an array."""

    def __init__(self, executor):
        self.executor = executor

    def __array__(self, dtype=None, copy=None):
        self.executor.close()
        return numbers(3, 12)


@pytest.mark.parametrize("begun", [False, True])
def test_what_comes_while_an_executor_is_closed_is_refused(begun):
    executor = Executor(dense_graph(), workers=2)
    if begun:
        executor.submit(numbers(1, 12)).result(10)
    before = threading.active_count()
    with pytest.raises(ClosedError, match="this executor was closed"):
        executor.submit(Closing(executor)).result(10)
    assert threading.active_count() <= before
    executor = Executor(dense_graph(), workers=2)
    with pytest.raises(ClosedError, match="this executor was closed"):
        executor.run(Closing(executor))


def test_what_was_submitted_keeps_the_executor():
    executor = Executor(dense_graph(), workers=2)
    gone = weakref.ref(executor)
    with executor._lock:
        futures = [executor.submit(numbers(count, 12)) for count in (3, 4)]
        lock = executor._lock
        del executor
        gc.collect()
        assert gone() is not None and lock.locked()
    assert [len(future.result(10)[0]) for future in futures] == [3, 4]
    for _ in range(100):
        gc.collect()
        if gone() is None:
            break
        time.sleep(0.02)
    assert gone() is None


def test_a_thread_that_can_not_start_is_an_error_and_no_trap(monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    with Executor(dense_graph(), workers=1) as executor:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            with pytest.raises(LimitError, match="need a thread for what is submitted"):
                executor.submit(numbers(1, 12))
        assert executor.submit(numbers(1, 12)).result(10)[0].shape == (1, 5)


def test_a_dropped_executor_goes_with_its_threads():
    before = threading.active_count()
    executor = Executor(dense_graph(), workers=3)
    executor.submit(numbers(9, 12)).result(10)
    executor.run(numbers(90, 12))
    gone = weakref.ref(executor)
    del executor
    for _ in range(100):
        gc.collect()
        if gone() is None and threading.active_count() <= before:
            break
        time.sleep(0.02)
    assert gone() is None and threading.active_count() <= before


def test_an_executor_keeps_a_mapped_file(tmp_path):
    b = GraphBuilder()
    b.output(b.add(b.input((1, 4)), numbers(1, 4)))
    b.save(tmp_path / "add.xnn")
    executor = Executor(load(tmp_path / "add.xnn"), workers=2)
    gc.collect()
    x = numbers(9, 4)
    np.testing.assert_array_equal(executor.run(x)[0], x + numbers(1, 4))


def test_results_outlive_the_executor():
    executor = Executor(dense_graph(), workers=2)
    x = numbers(40, 12)
    (y,) = executor.run(x)
    kept = y.copy()
    executor.close()
    del executor
    gc.collect()
    np.testing.assert_array_equal(y, kept)


def test_trim_gives_memory_back():
    executor = Executor(conv_graph(1, 64), workers=2, micro_batch=8)
    x = numbers(32, 64, 64, 3)
    (y,) = executor.run(x)
    used = executor.memory
    assert used["workspace"] > 0 and used["packed"] > 0
    executor.trim()
    assert executor.memory["workspace"] == 0
    np.testing.assert_array_equal(executor.run(x)[0], y)


def test_weights_are_packed_once():
    graph = conv_graph()
    one = Executor(graph, workers=1)
    one.run(numbers(4, 9, 9, 3))
    many = Executor(graph, workers=6, micro_batch=1)
    many.run(numbers(24, 9, 9, 3))
    assert many.memory["packed"] == one.memory["packed"]


def test_packed_weights_may_come_from_a_cache(tmp_path):
    b = GraphBuilder()
    b.output(b.fully_connected(b.input((1, 64)), numbers(128, 64), numbers(128)))
    b.save(tmp_path / "dense.xnn")
    x = numbers(20, 64)
    results = []
    for outcome in ("saved", "hit"):
        with Executor(tmp_path / "dense.xnn", workers=2, weights_cache=tmp_path / "cache") as executor:
            results.append(executor.run(x)[0])
            assert executor.weights_cache == outcome
    np.testing.assert_array_equal(*results)


def test_memory_stays_flat_over_changing_batches():
    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE

    graph = dense_graph()
    x = numbers(100, 12)
    with Executor(graph, workers=2) as executor:
        def cycle(count):
            for i in range(count):
                executor.run(x[: i * 37 % 101])

        cycle(3000)
        gc.collect()
        before = resident()
        cycle(6000)
        gc.collect()
        assert resident() - before < 2 << 20


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")


def in_child(work):
    """Exit status of a forked child that runs the function; it is killed where it hangs."""
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(30)
            status = work()
        except BaseException:
            status = 99
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@needs_fork
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_starts_workers_of_its_own():
    graph = conv_graph()
    x = numbers(20, 9, 9, 3)
    with Executor(graph, workers=3, threads=2, micro_batch=2) as executor:
        (expected,) = executor.run(x)
        (small,) = executor.run(x[:2])

        def work():
            assert np.array_equal(executor.run(x)[0], expected)
            assert np.array_equal(executor.run(x[:2])[0], small)
            assert np.array_equal(executor.submit(x).result(10)[0], expected)
            executor.close()
            return 7

        assert in_child(work) == 7
        np.testing.assert_array_equal(executor.run(x)[0], expected)


@needs_fork
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_in_the_middle_of_a_run_does_not_hang():
    graph = conv_graph(1, 32)
    x = numbers(300, 32, 32, 3)
    with Executor(graph, workers=2, micro_batch=1) as executor:
        (expected,) = executor.run(x)
        thread = threading.Thread(target=lambda: [executor.run(x) for _ in range(5)])
        thread.start()
        time.sleep(0.01)
        waiting = executor.submit(x)

        def work():
            if not waiting.done():
                return 8
            if waiting.exception() is not None and not isinstance(waiting.exception(), ClosedError):
                return 9
            return 7 if np.array_equal(executor.run(x)[0], expected) else 10

        assert in_child(work) == 7
        thread.join()
        np.testing.assert_array_equal(waiting.result(60)[0], expected)


@needs_fork
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_dropping_an_executor_in_a_child_does_not_hang():
    made = [Executor(conv_graph(), workers=3, micro_batch=1)]
    made[0].run(numbers(20, 9, 9, 3))

    def work():
        made.clear()
        gc.collect()
        return 7

    assert in_child(work) == 7


def test_the_interpreter_exits_with_a_live_executor():
    script = """
import numpy as np
from xnnfast import GraphBuilder
from xnnfast.executor import Executor
b = GraphBuilder()
b.output(b.tanh(b.input((1, 64))))
executor = Executor(b.graph(), workers=3)
x = np.ones((5000, 64), np.float32)
executor.run(x)
futures = [executor.submit(x) for _ in range(50)]
print("end")
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


# ---------------------------------------------------------------------------------------------------
# Precision


def deep_graph(batch=1):
    b = GraphBuilder()
    x = b.input((batch, 9, 9, 8))
    y = b.conv2d(x, numbers(16, 3, 3, 8), numbers(16, seed=1), padding=1, clamp=(0, 6))
    y = b.depthwise_conv2d(y, numbers(1, 3, 3, 16, seed=2), padding=1)
    y = b.conv_transpose2d(y, numbers(8, 2, 2, 16, seed=3), stride=2)
    y = b.static_reshape(b.global_average_pooling2d(y), (batch, 8))
    y = b.fully_connected(y, numbers(64, 8, seed=4), numbers(64, seed=5))
    b.output(b.fully_connected(y, numbers(64, 10, seed=6), transpose_weights=True))
    b.output(b.fully_connected(y, numbers(6, 64, seed=7), numbers(6)))
    return b.graph()


def test_int8_dynamic_rewrites_what_pays_and_reports_what_it_costs():
    graph = deep_graph()
    x = numbers(50, 9, 9, 8)
    with Executor(graph, workers=2, micro_batch=4, precision="int8-dynamic") as executor:
        assert executor.accuracy is None
        got = executor.run(x)
        rewritten = executor._run
        assert [node.op.name for node in rewritten.nodes].count("convert") == 3
        kinds = {node.op.name: rewritten.value(node.inputs[1]).datatype for node in rewritten.nodes
                 if node.op.name in ("conv2d", "depthwise_conv2d", "conv_transpose2d")}
        assert kinds == {"conv2d": "qcint8", "depthwise_conv2d": "fp32", "conv_transpose2d": "qcint8"}
        # The first layer has 8 products per result, which is not worth it.
        assert [rewritten.value(node.inputs[1]).datatype for node in rewritten.nodes
                if node.op.name == "fully_connected"] == ["fp32", "qcint8", "qcint8"]
        accuracy = executor.accuracy
    for position, (one, two) in enumerate(zip(got, rows(graph, x))):
        scale = np.abs(two).max()
        np.testing.assert_allclose(one, two, 0, 0.03 * scale)
        report = accuracy.outputs[position]
        np.testing.assert_allclose(report.max_error, np.abs(one - two)[:32].max(), 1e-3)
        assert 0 < report.relative < 0.03 and report.cosine > 0.999 and report.same_largest > 0.5 and not report.lost
    assert accuracy.samples == 32 and "int8-dynamic" in str(accuracy)
    assert accuracy.as_dict()["outputs"][0]["max_error"] == accuracy.outputs[0].max_error


def test_int8_dynamic_quantizes_each_sample_by_itself():
    graph = deep_graph()
    x = numbers(20, 9, 9, 8) * np.logspace(-3, 3, 20, dtype=np.float32).reshape(-1, 1, 1, 1)
    with Executor(graph, workers=2, micro_batch=4, precision="int8-dynamic") as executor:
        together = executor.run(x)
        for i in range(20):
            for one, two in zip(executor.run(x[i : i + 1]), together):
                np.testing.assert_allclose(one[0], two[i], 1e-4, 1e-6)


def test_int8_dynamic_shares_its_filters_among_executors():
    graph = deep_graph()
    one, two = (Executor(graph, workers=1, precision="int8-dynamic") for _ in range(2))
    assert one._run is two._run


def test_int8_dynamic_leaves_odd_filters_alone():
    b = GraphBuilder()
    x = b.input((1, 40))
    odd = numbers(4, 40)
    odd[2, 3] = np.inf
    zero = numbers(4, 40)
    zero[1] = 0
    b.output(b.fully_connected(x, odd))
    b.output(b.fully_connected(x, zero))
    with Executor(b.graph(), workers=1, precision="int8-dynamic") as executor:
        got = executor.run(numbers(3, 40))
        assert (got[1][:, 1] == 0).all()
        assert [executor._run.value(node.inputs[1]).datatype for node in executor._run.nodes
                if node.op.name == "fully_connected"] == ["fp32", "qcint8"]


def test_precisions_that_gain_nothing_are_refused(monkeypatch):
    b = GraphBuilder()
    b.output(b.tanh(b.input((1, 40))))
    with pytest.raises(UnsupportedError, match="found none"):
        Executor(b.graph(), precision="int8-dynamic")
    with pytest.raises(ArgumentError, match="fp16, int8-dynamic"):
        Executor(b.graph(), precision="fp8")
    monkeypatch.setattr(_runtime, "isa", lambda: ["avx2", "avx512vnni"])
    with pytest.raises(UnsupportedError, match="found avx2 avx512vnni: XNNPACK would convert to fp32"):
        Executor(b.graph(), precision="fp16")


def test_fp16_computes_with_less_and_reports_it(monkeypatch):
    # Whether the CPU has the arithmetic decides about speed, not about the result.
    monkeypatch.setattr(_runtime, "isa", lambda: ["avx512fp16"])
    graph = conv_graph()
    x = numbers(20, 9, 9, 3)
    with Executor(graph, workers=2, micro_batch=2, precision="fp16") as executor:
        (y,) = executor.run(x)
        assert y.dtype == np.float32
        report = executor.accuracy.outputs[0]
        assert 0 < report.relative < 0.02
    np.testing.assert_allclose(y, rows(graph, x)[0], 0.02, 0.01)
    b = GraphBuilder()
    b.output(b.convert(b.tanh(b.input((1, 4))), "fp16"))
    with pytest.raises(UnsupportedError, match="is fp16"):
        Executor(b.graph(), precision="fp16")
