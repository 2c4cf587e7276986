"""The order of the loops of matrix products changes no bit of a result, and the settings do what they say.

XNNFAST_LOOP_SHAPES sets how many random operators are compared (default 400); XNNFAST_LOOP_SEED starts elsewhere.
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from loop_order_cases import random_case

import xnnfast
from xnnfast import ArgumentError, GraphBuilder, Runtime, XnnpackError
from xnnfast._runtime import l2_bytes, loop_order
from xnnfast.errors import status_name

F = np.float32
SHAPES = int(os.environ.get("XNNFAST_LOOP_SHAPES", "400"))
SEED = int(os.environ.get("XNNFAST_LOOP_SEED", "0"))
CHUNKS = 8


@pytest.fixture(autouse=True)
def setting():
    before = loop_order()
    yield
    loop_order(before)


def outcomes(graph, arrays, settings, threads=1):
    with Runtime(graph, threads=threads) as runtime:
        results = []
        for setting in settings:
            loop_order(setting)
            results.append([y.tobytes() for y in runtime.run(*arrays)])
    return results


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_blocks_of_any_size_change_no_bit(chunk):
    differ = []
    for number in range(chunk, SHAPES, CHUNKS):
        rng = np.random.default_rng([SEED, number])
        what, graph, arrays = random_case(rng)
        # Blocks of one panel, and of some; with one thread and with two.
        settings = [0, 2, int(rng.integers(2, 1 << 15))]
        try:
            first, *others = outcomes(graph, arrays, settings)
        except XnnpackError as error:
            # XNNPACK has fp16 for processors with AVX2 and more only.
            assert status_name(error.status) == "unsupported_hardware" and "fp16" in what
            continue
        others += outcomes(graph, arrays, settings, threads=2)
        if any(other != first for other in others):
            differ.append(f"case {number}: {what}")
    assert not differ


def fully_connected(rows, inner, outer, seed=0):
    rng = np.random.default_rng(seed)
    b = GraphBuilder()
    b.output(b.fully_connected(b.input((rows, inner)), rng.standard_normal((outer, inner), F)))
    return b.graph(), [rng.standard_normal((rows, inner), F)]


def convolution(batch, size, inner, outer, kernel, seed=0):
    rng = np.random.default_rng(seed)
    b = GraphBuilder()
    x = b.input((batch, size, size, inner))
    b.output(b.conv2d(x, rng.standard_normal((outer, kernel, kernel, inner), F), padding=kernel // 2))
    return b.graph(), [rng.standard_normal((batch, size, size, inner), F)]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(lambda: fully_connected(1, 1024, 1024), id="one row"),
        pytest.param(lambda: fully_connected(20, 640, 2048), id="input stays"),
        pytest.param(lambda: fully_connected(300, 2500, 300), id="input passes by"),
        pytest.param(lambda: convolution(3, 5, 256, 512, 3), id="images in the block"),
        pytest.param(lambda: convolution(2, 9, 1024, 600, 1), id="one pixel"),
    ],
)
def test_chosen_order_changes_no_bit(case, threads):
    graph, arrays = case()
    first, second = outcomes(graph, arrays, [0, 1], threads)
    assert first == second


def test_setting_returns_the_one_before_and_lasts():
    loop_order(0)
    assert loop_order(4096) == 0
    assert loop_order() == 4096
    assert xnnfast.config()["loop_order"] == 4096


def test_cache_is_of_a_plausible_size():
    assert 128 << 10 <= l2_bytes() <= 4 << 20
    assert xnnfast.config()["l2_bytes"] == l2_bytes()


def python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, timeout=60
    )


@pytest.mark.parametrize(("text", "means"), [("0", 0), ("1", 1), ("262144", 262144), ("", 1), ("12k", 1)])
def test_variable_sets_the_order(text, means):
    code = "from xnnfast._runtime import loop_order; print(loop_order())"
    assert python(code, XNNFAST_LOOP_ORDER=text).stdout.split() == [str(means)]


def test_isa_cap_takes_what_is_stronger():
    available = xnnfast.config()["isa"]
    if not available:
        pytest.skip("this CPU has the architecture's baseline only")
    cap = available[len(available) // 2]
    code = "import xnnfast; c = xnnfast.config(); print(c['isa_cap'], *c['isa'])"
    reported, *names = python(code, XNNFAST_ISA=cap).stdout.split()
    assert reported == cap
    assert names == available[: available.index(cap) + 1]


def test_isa_cap_of_another_name_is_refused():
    code = "from xnnfast._runtime import isa; isa()"
    answer = python(code, XNNFAST_ISA="avx99")
    assert answer.returncode == 1
    assert "need one of " in answer.stderr and "found 'avx99'" in answer.stderr
    assert ArgumentError.__name__ in answer.stderr
