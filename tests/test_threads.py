"""Threads and processes: first use by many at once, many runtimes side by side, forks at bad moments.

One runtime in two threads, forks of an idle process and executors have their tests beside the classes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

from xnnfast import BusyError, ClosedError, GraphBuilder, Program, Runtime, load
from xnnfast.quantization import PerTensor

F = np.float32


def layered(outer=32, inner=24, seed=0):
    """A graph of two layers with weights of its own, and the arrays in it."""
    rng = np.random.default_rng(seed)
    first, second = rng.standard_normal((outer, inner), F), rng.standard_normal((8, outer), F)
    b = GraphBuilder()
    b.output(b.fully_connected(b.fully_connected(b.input((4, inner)), first, clamp=(0, None)), second))
    return b, lambda x: np.maximum(x @ first.T, 0) @ second.T


def quantized():
    b = GraphBuilder()
    scale = PerTensor(0.5, 3)
    x = b.input((1, 6, 6, 4), "qint8", scale)
    weights = b.constant(np.arange(-72, 72, dtype=np.int8).reshape(4, 3, 3, 4), "qint8", PerTensor(0.25, 0))
    b.output(b.conv2d(x, weights, padding=1, datatype="qint8", quantization=PerTensor(4.0, -7)))
    return b


def halved():
    b = GraphBuilder()
    b.output(b.softmax(b.multiply(b.input((3, 40), "fp16"), np.linspace(-1, 1, 40, dtype=np.float16))))
    return b


# ---- N3


RACE = """
    import os, sys, threading
    import numpy as np

    paths, wanted = sys.argv[1::2], [np.load(path) for path in sys.argv[2::2]]

    def trial():
        # Everything of the package happens here for the first time: imports, tables, xnn_initialize.
        found, start = [], threading.Barrier(8)

        def work(number):
            try:
                start.wait()
                import xnnfast
                for place in range(len(paths)):
                    place = (place + number) % len(paths)
                    graph = xnnfast.load(paths[place])
                    inputs = [np.arange(np.prod(value.shape)).reshape(value.shape).astype(value.dtype) % 7
                              for value in graph.inputs]
                    (got,) = xnnfast.Runtime(graph).run(*inputs)
                    if not np.array_equal(got, wanted[place]):
                        found.append(f"thread {number}: wrong result of {paths[place]}")
            except BaseException as error:
                found.append(f"thread {number}: {error!r}")

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for line in found:
            print(line, flush=True)
        return 1 if found else 0

    assert not any(name.split(".")[0] == "xnnfast" for name in sys.modules)
    for number in range(50):
        pid = os.fork()
        if pid == 0:
            os._exit(trial())
        _, status = os.waitpid(pid, 0)
        if status:
            print(f"trial {number} ended with {status}", flush=True)
    print("done")
"""


def test_N3_first_use_by_eight_threads_at_once(tmp_path):
    arguments = []
    for number, builder in enumerate((layered()[0], quantized(), halved())):
        path = tmp_path / f"{number}.xnn"
        builder.save(path)
        graph = load(path)
        inputs = [
            np.arange(np.prod(value.shape)).reshape(value.shape).astype(value.dtype) % 7 for value in graph.inputs
        ]
        np.save(tmp_path / f"{number}.npy", Runtime(graph).run(*inputs)[0])
        arguments += [str(path), str(tmp_path / f"{number}.npy")]
    script = tmp_path / "race.py"
    script.write_text(textwrap.dedent(RACE))
    done = subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


# ---- many at once


def together(*works, seconds=1.5):
    """Run each function over and over in a thread of its own; what went wrong in any."""
    found: list[BaseException] = []
    end = time.monotonic() + seconds

    def repeat(work):
        try:
            while time.monotonic() < end and not found:
                work()
        except BaseException as error:
            found.append(error)

    threads = [threading.Thread(target=repeat, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    return found


def test_runtimes_come_and_go_in_many_threads(tmp_path):
    builder, answer = layered()
    builder.save(tmp_path / "a.xnn")
    shared = load(tmp_path / "a.xnn")

    def make(graph):
        def work():
            x = np.random.default_rng(threading.get_ident() % 1000).standard_normal((5, 24), F)
            with Runtime(graph()) as runtime:
                np.testing.assert_allclose(runtime.run(x)[0], answer(x), rtol=1e-4, atol=1e-4)

        return work

    # Some of one graph, whose packed weights they share, some of graphs of their own.
    assert not together(*[make(lambda: shared)] * 4, *[make(lambda: load(tmp_path / "a.xnn"))] * 4)


def test_one_runtime_in_many_threads_is_busy_or_right():
    builder, answer = layered()
    runtime = Runtime(builder.graph())
    counts = {"busy": 0, "right": 0}

    def run():
        x = np.random.default_rng(threading.get_ident() % 1000).standard_normal((300, 24), F)
        try:
            (got,) = runtime.run(x)
        except BusyError:
            counts["busy"] += 1
            return
        np.testing.assert_allclose(got, answer(x), rtol=1e-4, atol=1e-4)
        counts["right"] += 1

    def trim():
        try:
            runtime.trim()
        except BusyError:
            counts["busy"] += 1

    assert not together(run, run, run, trim)
    assert counts["right"]


def test_closing_while_others_run_is_an_error_for_one_of_them():
    builder, answer = layered()
    graph = builder.graph()
    x = np.ones((200, 24), F)
    for _ in range(20):
        runtime = Runtime(graph)
        found = []

        def run(runtime=runtime, found=found):
            try:
                while True:
                    np.testing.assert_allclose(runtime.run(x)[0], answer(x), rtol=1e-4, atol=1e-4)
            except BaseException as error:
                found.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        time.sleep(0.005)
        while True:
            try:
                runtime.close()
                break
            except BusyError:
                continue
        thread.join(20)
        assert not thread.is_alive()
        # Which of the two depends on where the other thread was.
        assert isinstance(found[0], (ClosedError, BusyError))


def test_programs_in_many_threads(tmp_path):
    import files

    path = tmp_path / "model.pte"
    path.write_bytes(files.program(alignment=16))
    x = np.arange(8, dtype=F).reshape(1, 8)

    def work():
        program = Program(path)
        np.testing.assert_array_equal(program.run(x)[0], x + files.ONES)

    assert not together(*[work] * 6)


# ---- forks


def child(work):
    """Status of a function in a forked child; None if it hangs."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = 0 if work() else 2
        finally:
            os._exit(status)
    end = time.monotonic() + 20
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        time.sleep(0.002)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return None


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_fork_while_other_threads_make_runtimes():
    """A lock that another thread held at the fork stays locked in the child for ever, unless it is replaced."""
    builder, answer = layered(256, 200)
    graph = builder.graph()
    x = np.ones((4, 200), F)
    stop = threading.Event()

    def churn():
        while not stop.is_set():
            Runtime(graph).run(x)

    def work():
        return np.allclose(Runtime(graph).run(x)[0], answer(x), rtol=1e-3, atol=1e-3)

    threads = [threading.Thread(target=churn) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        assert [child(work) for _ in range(30)] == [0] * 30
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_child_may_fork_again(threads):
    builder, answer = layered()
    runtime = Runtime(builder.graph(), threads=threads)
    x = np.ones((64, 24), F)
    want = runtime.run(x)[0]

    def grandchild():
        return np.array_equal(runtime.run(x)[0], want)

    assert child(lambda: grandchild() and child(grandchild) == 0 and grandchild()) == 0
    assert child(lambda: child(grandchild) == 0) == 0


def test_spawned_processes_load_for_themselves(tmp_path):
    builder, answer = layered()
    builder.save(tmp_path / "a.xnn")
    script = tmp_path / "pool.py"
    script.write_text(
        textwrap.dedent(
            """
            import multiprocessing, sys
            import numpy as np

            def work(path):
                import xnnfast
                return xnnfast.Runtime(xnnfast.load(path)).run(np.ones((4, 24), np.float32))[0]

            if __name__ == "__main__":
                with multiprocessing.get_context("spawn").Pool(2) as pool:
                    first, second = pool.map(work, [sys.argv[1]] * 2)
                np.save(sys.argv[2], first)
                assert np.array_equal(first, second)
            """
        )
    )
    out = tmp_path / "out.npy"
    done = subprocess.run([sys.executable, str(script), str(tmp_path / "a.xnn"), str(out)], capture_output=True,
                          text=True, timeout=120)  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    np.testing.assert_allclose(np.load(out), answer(np.ones((4, 24), F)), rtol=1e-4)
