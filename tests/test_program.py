"""Programs: every instruction, what goes in and out, what is refused, and the programs that ExecuTorch exported."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import struct
import threading

import files
import numpy as np
import pytest
from sketch import Sketch

import xnnfast
from xnnfast.errors import (
    ArgumentError,
    BusyError,
    ClosedError,
    DtypeError,
    FormatError,
    GraphError,
    OperatorError,
    ShapeError,
    UnsupportedError,
)
from xnnfast.program import GraphStep, KernelStep, Program
from xnnfast.writer import encode

X = np.arange(6, dtype=np.float32).reshape(2, 3)
BOTH = pytest.mark.parametrize("merge", [True, False], ids=["merged", "plain"])


def bundled(program: bytes) -> bytes:
    return encode({"version": 0, "program": program}, schema_key="bundled", identifier=b"BP08")


# ---- programs that ExecuTorch exported

# Of the largest expected number: what the format's description asks for.
TOLERANCE = {"fp32": 1e-5, "fp16": 4e-3, "qs8": 1.5e-2, "qs8_pt": 1.5e-2, "qd8": 2e-2, "qc4w": 2e-2, "qb4w": 2e-2}


def exported(*folders):
    for folder in folders:
        for path in sorted((files.SHARED / folder).glob("*/meta.json")):
            yield pytest.param(path.parent, id=path.parent.name)


def sets(folder):
    """The variant, and inputs and expected outputs of every set of a program."""
    meta = json.loads((folder / "meta.json").read_text())
    for tag in sorted({each.get("tag") or "" for each in meta["sets"]}):
        tag = tag.lstrip("_")
        found = []
        for stem in ("input", "expected_et"):
            start = f"{stem}_{tag}_" if tag else f"{stem}_"
            numbers = sorted(
                int(path.stem[len(start) :])
                for path in folder.glob(f"{start}*.npy")
                if path.stem[len(start) :].isdigit()
            )
            found.append([np.load(folder / f"{start}{number}.npy") for number in numbers])
        yield meta["variant"], *found


def agree(got, want, tolerance):
    assert len(got) == len(want)
    for mine, other in zip(got, want):
        assert (mine.shape, mine.dtype) == (other.shape, other.dtype)
        if other.dtype.kind != "f":
            np.testing.assert_array_equal(mine, other)
            continue
        largest = np.abs(other[np.isfinite(other)].astype(np.float64)).max(initial=0)
        np.testing.assert_allclose(mine.astype(np.float64), other.astype(np.float64), rtol=0, atol=tolerance * largest)


@files.needs_shared
@BOTH
@pytest.mark.parametrize("folder", list(exported("conformance")))
def test_exported_programs_agree(folder, merge):
    program = Program(folder / "model.pte", merge=merge)
    # Twice, because sizes that come again are run in another way.
    for _ in range(2):
        for variant, inputs, want in sets(folder):
            agree(program.run(*inputs), want, TOLERANCE[variant])


@files.needs_shared
@BOTH
@pytest.mark.slow
@pytest.mark.parametrize("folder", list(exported("models")))
def test_exported_models_agree(folder, merge):
    program = Program(folder / "model.pte", merge=merge)
    for variant, inputs, want in sets(folder):
        agree(program.run(*inputs), want, TOLERANCE[variant])


@files.needs_shared
def test_no_array_is_copied_on_its_way_between_delegates():
    program = Program(files.SHARED / "conformance/mlp_qd8/model.pte", merge=False)
    x = xnnfast.empty((8, 784))
    x[...] = 1
    program.run(x)
    steps = [step for step, _ in program.method("forward").plain.straight]
    assert len(steps) == 5
    assert all(step.runtime.staged == 0 for step in steps)


def test_delegates_get_the_very_arrays_that_others_gave(monkeypatch):
    sketch = Sketch()
    x = sketch.tensor((2, 3))
    y = sketch.shift(sketch.shift(x, (2, 3)), (2, 3))
    program = Program(sketch.program([x], [y]), merge=False)
    seen = []

    class Watched:
        def __init__(self, runtime):
            self.runtime = runtime

        def run(self, *inputs):
            outputs = self.runtime.run(*inputs)
            seen.append(([each.ctypes.data for each in inputs], [each.ctypes.data for each in outputs]))
            return outputs

    for step, _ in program.method("forward").plain.straight:
        step.runtime = Watched(step.runtime)
    x = xnnfast.empty((2, 3))
    x[...] = X
    (result,) = program.run(x)
    np.testing.assert_array_equal(result, X + 2)
    assert [seen[0][0], seen[1][0], [result.ctypes.data]] == [[x.ctypes.data], seen[0][1], seen[1][1]]


# ---- facts


def test_a_program_tells_what_is_in_it():
    sketch = Sketch()
    x = sketch.tensor((4, 2, 3), shape_dynamism=1)
    y = sketch.shift(x, (4, 2, 3))
    z = sketch.unary("aten::relu.out", y, sizes=(4, 2, 3))
    sketch.kernel("custom::thing.out", z, z, z)
    metadata = {
        "encoded_inp_str": json.dumps(
            [
                1,
                _tree(
                    "builtins.tuple",
                    None,
                    [_tree("builtins.tuple", None, []), _tree("builtins.dict", '["image"]', [_leaf()])],
                ),
            ]
        ),
        "encoded_out_str": json.dumps([1, _tree("builtins.dict", '["logits"]', [_leaf()])]),
    }
    program = Program(sketch.program([x], [z], changes={"container_meta_type": metadata}))
    assert program.methods == ("forward",)
    (port,) = program.inputs()
    assert (port.name, port.kind, port.dtype, port.shape, port.dim_order, port.dynamism) == (
        "1.image",
        "Tensor",
        np.float32,
        (4, 2, 3),
        (0, 1, 2),
        "bounded",
    )
    assert str(port) == "1.image: float32 at most 4x2x3"
    assert program.outputs("forward")[0].name == "logits"
    (info,) = program.delegates
    assert (info.method, info.index, info.backend, info.instructions) == ("forward", 0, "XnnpackBackend", (0,))
    assert info.nbytes > 0
    assert [(call.op, call.known, call.instruction) for call in program.undelegated] == [
        ("aten::relu.out", True, 1),
        ("custom::thing.out", False, 2),
    ]
    assert "delegates=1" in repr(program)


def _leaf():
    return {"type": None, "context": None, "children_spec": []}


def _tree(kind, context, children):
    return {"type": kind, "context": context or "null", "children_spec": children}


@pytest.mark.parametrize("spec", ["", "nonsense", "[1, {}]", "[1, 3]", json.dumps([1, _leaf()] * 3), "[" * 5000])
def test_a_tree_of_arguments_that_can_not_be_read_names_nothing(spec):
    sketch = Sketch()
    x, other = sketch.tensor((2, 3)), sketch.tensor((2, 3))
    y = sketch.shift(x, (2, 3))
    program = Program(sketch.program([x, other], [y], changes={"container_meta_type": {"encoded_inp_str": spec}}))
    assert [port.name for port in program.inputs()] == [None, None]


def test_methods_are_picked_by_name():
    first, second = Sketch("encode"), Sketch("decode")
    plans = []
    for sketch, by in ((first, 1.0), (second, -1.0)):
        x = sketch.tensor((2, 3))
        y = sketch.shift(x, (2, 3), by)
        plans.append((sketch, x, y))
    segments = [b"", first.segments[1], second.segments[1]]
    second.delegates[0]["processed"]["index"] = 2
    program = Program(files.program(*(sketch.plan([x], [y]) for sketch, x, y in plans), segments=segments))
    assert program.methods == ("encode", "decode")
    np.testing.assert_array_equal(program.run(X, method="decode")[0], X - 1)
    np.testing.assert_array_equal(program.run(X, method="encode")[0], X + 1)
    with pytest.raises(ArgumentError, match="need a method of 'encode', 'decode', found 'forward'"):
        program.run(X)


# ---- what goes in


def simple(**more):
    sketch = Sketch()
    x = sketch.tensor((2, 3), **more)
    return Program(sketch.program([x], [sketch.shift(x, (2, 3))]))


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        ((), ArgumentError, "needs 1 input, got 0"),
        ((X, X), ArgumentError, "needs 1 input, got 2"),
        ((X.astype(np.float64),), DtypeError, "input 0: need dtype float32, got float64"),
        ((X.astype(np.float16),), DtypeError, "need dtype float32, got float16"),
        ((X.view(np.int32),), DtypeError, "need dtype float32, got int32"),
        ((X.astype(complex),), DtypeError, "got complex128"),
        ((X.astype(object),), DtypeError, "got object"),
        (([[1.0, 2.0, 3.0]] * 2,), DtypeError, "got float64"),
        ((X.reshape(3, 2),), ShapeError, r"input 0: need shape \(2, 3\), which is static in the program, got \(3, 2\)"),
        ((X[:1],), ShapeError, r"need shape \(2, 3\)"),
        ((X[None],), ShapeError, "need rank 2"),
        (("text",), DtypeError, "need dtype float32"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(x, error, message):
    program = simple()
    # The second time calls take a shorter way.
    for _ in range(2):
        with pytest.raises(error, match=message):
            program.run(*x)
        np.testing.assert_array_equal(program.run(X)[0], X + 1)


@pytest.mark.parametrize(
    "x", [X, np.asfortranarray(X), np.repeat(X, 2, 1)[:, ::2], X.astype(">f4"), memoryview(X), X.copy()[::1]]
)
def test_layouts_and_byte_orders_make_no_difference(x):
    np.testing.assert_array_equal(simple().run(x)[0], X + 1)


def test_dlpack_exporters_are_taken():
    class Exporter:
        def __dlpack__(self, **options):
            return X.__dlpack__(**options)

        def __dlpack_device__(self):
            return X.__dlpack_device__()

    np.testing.assert_array_equal(simple().run(Exporter())[0], X + 1)


def test_bounded_sizes_may_be_smaller_and_not_larger():
    program = simple(shape_dynamism=1)
    for _ in range(3):
        for rows in (2, 1):
            np.testing.assert_array_equal(program.run(X[:rows])[0], X[:rows] + 1)
    with pytest.raises(ShapeError, match=r"need a shape of at most \(2, 3\), got \(3, 3\)"):
        program.run(np.zeros((3, 3), np.float32))


def test_inputs_that_are_no_tensors_must_be_what_the_program_was_made_for():
    sketch = Sketch()
    x, two, half, yes = sketch.tensor((2, 3)), sketch.number(2), sketch.number(0.5), sketch.number(True)
    y = sketch.tensor((2, 3))
    sketch.kernel("aten::add.Scalar_out", x, two, half, y, y)
    program = Program(sketch.program([x, two, half, yes], [y, two]))
    assert [str(port) for port in program.inputs()[1:]] == ["Int 2", "Double 0.5", "Bool True"]
    for numbers in ((2, 0.5, True), (np.int64(2), np.float32(0.5), np.True_)):
        result, same = program.run(X, *numbers)
        np.testing.assert_array_equal(result, X + 1)
        assert same == 2
    for numbers, error in (
        ((3, 0.5, True), ArgumentError),
        ((2, 0.6, True), ArgumentError),
        ((2, 0.5, False), ArgumentError),
        ((2.0, 0.5, True), DtypeError),
        ((True, 0.5, True), DtypeError),
        ((2, "0.5", True), DtypeError),
        ((2, 0.5, 1), DtypeError),
        ((X, 0.5, True), DtypeError),
    ):
        with pytest.raises(error):
            program.run(X, *numbers)


# ---- what comes out


@BOTH
def test_what_comes_out_belongs_to_the_caller(merge):
    sketch = Sketch()
    x, c = sketch.tensor((2, 3)), sketch.constant(X + 10)
    y = sketch.shift(x, (2, 3))
    flat = sketch.unary("aten::view_copy.out", y, [6], sizes=(6,))
    moved = sketch.tensor((2, 3))
    sketch.instruct("MoveCall", move_from=y, move_to=moved)
    outputs = [x, c, y, y, flat, moved, c]
    program = Program(sketch.program([x], outputs), merge=merge)
    given = X.copy()
    first = program.run(given)
    for result in first:
        result[...] = -1
    np.testing.assert_array_equal(given, X)
    results = program.run(given)
    for result, want in zip(results, (X, X + 10, X + 1, X + 1, (X + 1).reshape(-1), X + 1, X + 10)):
        np.testing.assert_array_equal(result, want)
    for number, result in enumerate(results):
        assert result.flags.writeable
        assert not any(np.shares_memory(result, other) for other in (given, *results[:number]))


@BOTH
def test_numbers_are_outputs_too(merge):
    sketch = Sketch()
    x, fixed = sketch.tensor((2, 3)), sketch.number(7)
    rows, item = sketch.number(0), sketch.number(0.0)
    y = sketch.shift(x, (2, 3))
    sketch.kernel("aten::sym_size.int", y, sketch.number(1), rows)
    one = sketch.unary("aten::select_copy.int_out", y, 0, 0, sizes=(3,))
    one = sketch.unary("aten::select_copy.int_out", one, 0, 2, sizes=())
    sketch.kernel("aten::_local_scalar_dense", one, item)
    assert Program(sketch.program([x], [rows, fixed, item]), merge=merge).run(X) == (3, 7, 3.0)


@BOTH
def test_scalars_keep_rank_0_around_delegates(merge):
    sketch = Sketch()
    x, c = sketch.tensor(()), sketch.constant(np.float32(2))
    y, z = sketch.tensor(()), sketch.tensor(())
    sketch.delegate(lambda b, v: b.add(v, b.constant(np.ones(1, np.float32))), [x], [y])
    sketch.kernel("aten::mul.out", y, c, z, z)
    program = Program(sketch.program([x], [y, z]), merge=merge)
    y, z = program.run(np.float32(3))
    assert (y.shape, z.shape, float(y), float(z)) == ((), (), 4.0, 8.0)


@BOTH
def test_indices_of_pooling_are_whole_numbers(merge):
    sketch = Sketch()
    x, y, where = sketch.tensor((1, 4, 4, 1)), sketch.tensor((1, 2, 2, 1)), sketch.tensor((1, 2, 2, 1), np.int64)

    builder = xnnfast.GraphBuilder()
    top, index = builder.argmax_pooling2d(builder.input((1, 4, 4, 1)), (2, 2))
    builder.output(top)
    builder.output(index)
    sketch.delegate(builder.finish(), [x], [y, where])
    top, index = Program(sketch.program([x], [y, where]), merge=merge).run(
        np.arange(16, dtype=np.float32).reshape(1, 4, 4, 1)
    )
    np.testing.assert_array_equal(top.ravel(), [5, 7, 13, 15])
    assert index.dtype == np.int64
    np.testing.assert_array_equal(index.ravel(), [3, 3, 3, 3])


# ---- order of dimensions


@BOTH
def test_arrays_are_logical_whatever_lies_in_memory(merge):
    last = bytes((0, 2, 3, 1))
    sketch = Sketch()
    x = sketch.tensor((1, 3, 2, 2), dim_order=last)
    middle, y, z = sketch.tensor((1, 3, 2, 2), dim_order=last), sketch.tensor((1, 3, 2, 2)), sketch.tensor((1, 3, 2, 2))
    # In memory the channels are last: what is added differs from channel to channel.
    channels = np.array([10, 20, 30], np.float32)
    sketch.delegate(lambda b, v: b.add(v, b.constant(channels)), [x], [middle])
    sketch.kernel(
        "dim_order_ops::_to_dim_order_copy.out", middle, sketch.number(False), sketch.number([0, 1, 2, 3]), y, y
    )
    sketch.delegate(lambda b, v: b.add(v, b.constant(np.array([1, 2], np.float32))), [y], [z])
    constant = sketch.constant(np.arange(12, dtype=np.float32).reshape(1, 2, 2, 3))
    fields = sketch.values[constant]["val"][1]
    fields.update(sizes=[1, 3, 2, 2], dim_order=last)
    program = Program(sketch.program([x], [middle, z, constant]), merge=merge)
    assert program.inputs()[0].dim_order == (0, 2, 3, 1)
    given = np.arange(12, dtype=np.float32).reshape(1, 3, 2, 2)
    for array in (given, given.transpose(0, 2, 3, 1).copy().transpose(0, 3, 1, 2)):
        first, second, third = program.run(array)
        np.testing.assert_array_equal(first, given + channels[:, None, None])
        np.testing.assert_array_equal(second, given + channels[:, None, None] + [1, 2])
        np.testing.assert_array_equal(third, np.arange(12).reshape(1, 2, 2, 3).transpose(0, 3, 1, 2))


def test_memory_in_the_right_order_is_taken_as_it_is():
    last = bytes((0, 2, 3, 1))
    sketch = Sketch()
    x, y = sketch.tensor((1, 3, 2, 2), dim_order=last), sketch.tensor((1, 3, 2, 2), dim_order=last)
    sketch.delegate(lambda b, v: b.negate(v), [x], [y])
    program = Program(sketch.program([x], [y]))
    memory = xnnfast.empty((1, 2, 2, 3))
    memory[...] = 1
    program.run(memory.transpose(0, 3, 1, 2))
    ((step, _),) = program.method("forward").plain.straight
    assert step.runtime.staged == 0
    program.run(np.ones((1, 3, 2, 2), np.float32))
    assert step.runtime.staged == 1


# ---- instructions


def loop(times=5):
    """Adds one to the input as often as a counter says, and collects what it saw."""
    sketch = Sketch()
    x, state = sketch.tensor((2, 3)), sketch.tensor((2, 3))
    seen = sketch.tensor((times, 2, 3), shape_dynamism=1)
    count, limit, one, done = sketch.number(0), sketch.number(times), sketch.number(1), sketch.number(False)
    start = sketch.number(0)
    sketch.instruct("MoveCall", move_from=x, move_to=state)
    sketch.instruct("MoveCall", move_from=start, move_to=count)
    top = len(sketch.instructions)
    shifted = sketch.shift(state, (2, 3))
    sketch.kernel("executorch_prim::et_copy_index.tensor", seen, shifted, count)
    sketch.instruct("MoveCall", move_from=shifted, move_to=state)
    sketch.kernel("executorch_prim::add.Scalar", count, one, count)
    sketch.kernel("executorch_prim::eq.Scalar", count, limit, done)
    sketch.instruct("JumpFalseCall", cond_value_index=done, destination_instruction=top)
    sketch.instruct("FreeCall", value_index=shifted)
    return sketch, x, state, seen


@BOTH
def test_loops_run_until_their_condition_holds(merge):
    sketch, x, state, seen = loop()
    program = Program(sketch.program([x], [state, seen]), merge=merge)
    for _ in range(2):
        last, all_seen = program.run(X)
        np.testing.assert_array_equal(last, X + 5)
        np.testing.assert_array_equal(all_seen, np.stack([X + number for number in range(1, 6)]))
    assert not program.plan().merged
    assert ("it has jumps" in program.plan().reason) == merge


@pytest.mark.parametrize(("flag", "want"), [(True, X + 1), (False, X - 1)])
def test_branches_follow_a_tensor_of_one_truth(flag, want):
    sketch = Sketch()
    x, condition = sketch.tensor((2, 3)), sketch.tensor((), np.bool_)
    y, never = sketch.tensor((2, 3)), sketch.constant(np.False_)
    sketch.instruct("JumpFalseCall", cond_value_index=condition, destination_instruction=4)
    up = sketch.shift(x, (2, 3))
    sketch.instruct("MoveCall", move_from=up, move_to=y)
    sketch.instruct("JumpFalseCall", cond_value_index=never, destination_instruction=6)
    down = sketch.shift(x, (2, 3), -1.0)
    sketch.instruct("MoveCall", move_from=down, move_to=y)
    (result,) = Program(sketch.program([x, condition], [y])).run(X, np.array(flag))
    np.testing.assert_array_equal(result, want)


def test_a_jump_needs_a_truth():
    sketch = Sketch()
    x = sketch.tensor((2, 3))
    sketch.instruct("JumpFalseCall", cond_value_index=x, destination_instruction=1)
    y = sketch.shift(x, (2, 3))
    with pytest.raises(OperatorError, match="instruction 0: need a bool tensor as a condition, found float32"):
        Program(sketch.program([x], [y])).run(X)


def test_an_endless_loop_can_be_interrupted():
    sketch = Sketch()
    x, never = sketch.tensor((2, 3)), sketch.constant(np.False_)
    y = sketch.shift(x, (2, 3))
    sketch.instruct("JumpFalseCall", cond_value_index=never, destination_instruction=0)
    program = Program(sketch.program([x], [y]))

    def interrupt(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            program.run(X)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert program.method("forward")._lock.acquire(blocking=False)


@BOTH
def test_faults_of_values_name_the_instruction(merge):
    sketch = Sketch()
    x, indices = sketch.tensor((2, 3)), sketch.tensor((2,), np.int64)
    y = sketch.shift(x, (2, 3))
    out = sketch.tensor((2, 3))
    sketch.kernel("aten::embedding.out", y, indices, *map(sketch.number, (-1, False, False)), out, out)
    program = Program(sketch.program([x, indices], [out]), merge=merge)
    np.testing.assert_array_equal(program.run(X, np.array([1, 1]))[0], X[[1, 1]] + 1)
    with pytest.raises(
        OperatorError, match=r"method 'forward', instruction 1: aten::embedding.out: need indices in 0..1, found 2"
    ):
        program.run(X, np.array([0, 2]))
    np.testing.assert_array_equal(program.run(X, np.array([0, 1]))[0], X + 1)


# ---- state


def counter(**more):
    """Adds its input to a tensor that it keeps, and gives the sum."""
    sketch = Sketch()
    x, kept = sketch.tensor((2, 3)), sketch.tensor((2, 3), **more)
    total, returned = sketch.tensor((2, 3)), sketch.tensor((2, 3))
    sketch.delegate(lambda b, v, w: b.add(v, w), [x, kept], [total])
    sketch.kernel("aten::copy_", kept, total, sketch.number(False), returned)
    return sketch, x, returned


@BOTH
def test_tensors_keep_their_content_from_call_to_call(merge):
    sketch, x, returned = counter()
    program = Program(sketch.program([x], [returned]), merge=merge)
    for number in range(1, 4):
        (result,) = program.run(X)
        np.testing.assert_array_equal(result, X * number)
        result[...] = 100
    program.reset()
    np.testing.assert_array_equal(program.run(X)[0], X)


@BOTH
def test_kept_tensors_start_with_what_the_program_has_for_them(merge):
    sketch, x, returned = counter(extra_tensor_info={"mutable_data_segments_idx": 1})
    sketch.segments.append((X + 5).tobytes() + bytes(8))
    mutable = [{}, {"segment_index": 2, "offsets": [0, 0]}]
    program = Program(sketch.program([x], [returned], mutable_data_segments=mutable), merge=merge)
    for _ in range(2):
        np.testing.assert_array_equal(program.run(X)[0], X + X + 5)
        np.testing.assert_array_equal(program.run(X)[0], 3 * X + 5)
        program.reset()


def test_a_call_that_fails_leaves_the_state_alone():
    sketch, x, returned = counter()
    indices, out = sketch.tensor((2,), np.int64), sketch.tensor((2, 3))
    sketch.kernel("aten::embedding.out", returned, indices, *map(sketch.number, (-1, False, False)), out, out)
    program = Program(sketch.program([x, indices], [out]))
    good, bad = np.array([0, 1]), np.array([0, 9])
    np.testing.assert_array_equal(program.run(X, good)[0], X)
    with pytest.raises(OperatorError):
        program.run(X, bad)
    np.testing.assert_array_equal(program.run(X, good)[0], 2 * X)


# ---- what is refused


def test_everything_that_is_missing_is_named_at_once():
    sketch = Sketch()
    x = sketch.tensor((2, 3))
    y = sketch.shift(x, (2, 3))
    for name in ("custom::one.out", "custom::two", "custom::one.out"):
        sketch.kernel(name, y, y, y)
    sketch.delegate(b"whatever", [y], [y], id="VulkanBackend")
    sketch.stacks[1] = [
        {"filename": "torch/lib.py", "lineno": 3, "name": "call", "context": "f(x)"},
        {"filename": "model.py", "lineno": 12, "name": "forward", "context": "  y = one(x)  "},
    ]
    program = Program(sketch.program([x], [y]))
    assert program.undelegated[0].stack == ("model.py:12 in forward: y = one(x)", "torch/lib.py:3 in call: f(x)")
    assert program.undelegated[0].where == "method 'forward', instruction 1, from model.py:12 in forward: y = one(x)"
    for _ in range(2):
        with pytest.raises(UnsupportedError) as caught:
            program.run(X)
        message = str(caught.value)
        assert (
            "operator custom::one.out (2 calls: instruction 1 from model.py:12 in forward: y = one(x); instruction 3)"
            in message
        )
        assert "operator custom::two (1 call: instruction 2)" in message
        assert "backend VulkanBackend (delegate 1, called by instruction 4)" in message


def test_a_method_that_can_run_is_not_hindered_by_another():
    good, bad = Sketch("good"), Sketch("bad")
    x = good.tensor((2, 3))
    y = good.shift(x, (2, 3))
    other = bad.tensor((2, 3))
    bad.kernel("custom::one.out", other, other, other)
    program = Program(files.program(good.plan([x], [y]), bad.plan([other], [other]), segments=good.segments))
    np.testing.assert_array_equal(program.run(X, method="good")[0], X + 1)
    with pytest.raises(UnsupportedError, match="method 'bad'"):
        program.run(X, method="bad")


@BOTH
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            lambda s, x, y: s.instructions[0]["instr_args"][1].update(args=[x]),
            GraphError,
            "has 2 external values, its call has 1",
        ),
        (lambda s, x, y: s.values[y]["val"][1].update(sizes=[3, 2]), GraphError, r"is \[3, 2\] in memory, value"),
        (lambda s, x, y: s.values[y]["val"][1].update(scalar_type=3), GraphError, "is int32, value"),
        (lambda s, x, y: s.values[x]["val"][1].update(scalar_type=4), GraphError, "is int64, value"),
        (
            lambda s, x, y: s.values.__setitem__(y, {"val": ("Int", {"int_val": 3})}),
            FormatError,
            "need a tensor as value 1.*found Int",
        ),
        (lambda s, x, y: s.kernel("aten::relu.out", y, x), FormatError, "need 3 args, the call has 2"),
        (
            lambda s, x, y: s.kernel("aten::relu.out", s.number(3), x, x),
            FormatError,
            "needs Tensor for self, the call has Int",
        ),
        (
            lambda s, x, y: s.kernel("aten::relu.out", s.tensor((2, 3), allocation_info=None), y, y),
            FormatError,
            "is read before an instruction writes it",
        ),
        (
            lambda s, x, y: s.kernel("aten::cat.out", s.tensors(x, 99), s.number(0), y, y),
            FormatError,
            "need the index of one of",
        ),
    ],
)
def test_programs_that_contradict_themselves_are_refused(change, error, message, merge):
    sketch = Sketch()
    x = sketch.tensor((2, 3))
    y = sketch.shift(x, (2, 3))
    change(sketch, x, y)
    with pytest.raises(error, match=message):
        Program(sketch.program([x], [y]), merge=merge).prepare()


def test_outputs_that_nobody_writes_are_refused():
    sketch = Sketch()
    x, lost = sketch.tensor((2, 3)), sketch.tensor((2, 3))
    y = sketch.shift(x, (2, 3))
    with pytest.raises(FormatError, match=r"output value 1 .* is written by no instruction"):
        Program(sketch.program([x], [y, lost])).run(X)


def test_lists_are_no_outputs():
    sketch = Sketch()
    x = sketch.tensor((2, 3))
    some = sketch.tensors(sketch.shift(x, (2, 3)))
    with pytest.raises(UnsupportedError, match="is a list"):
        Program(sketch.program([x], [some])).run(X)


def test_a_result_of_another_shape_than_a_static_tensor_is_refused():
    sketch = Sketch()
    x, y = sketch.tensor((2, 3)), sketch.tensor((3, 4))
    sketch.kernel("aten::relu.out", x, y, y)
    with pytest.raises(ShapeError, match=r"aten::relu.out gives shape \(2, 3\), the program needs \(3, 4\)"):
        Program(sketch.program([x], [y]), merge=False).run(X)


# ---- life


def test_a_second_caller_is_refused():
    sketch = Sketch()
    x, never = sketch.tensor((2, 3)), sketch.tensor((), np.bool_)
    y = sketch.shift(x, (2, 3))
    sketch.instruct("JumpFalseCall", cond_value_index=never, destination_instruction=0)
    program = Program(sketch.program([x, never], [y]))
    flag = np.array(False)
    thread = threading.Thread(target=program.run, args=(X, flag))
    thread.start()
    try:
        while not program.method("forward")._lock.locked():
            pass
        with pytest.raises(BusyError, match="make one Program per thread"):
            program.run(X, flag)
    finally:
        flag[...] = True
        thread.join()
    np.testing.assert_array_equal(program.run(X, flag)[0], X + 1)


def test_a_forked_child_runs_what_its_parent_prepared():
    program = simple()
    program.run(X)
    # As if another thread were running at the moment of the fork.
    assert program.method("forward")._lock.acquire(blocking=False)
    child = os.fork()
    if not child:
        same = np.array_equal(program.run(X)[0], X + 1)
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_closed_programs_are_refused():
    program = simple()
    with program:
        program.run(X)
    with pytest.raises(ClosedError):
        program.run(X)


def test_threads_must_be_one_or_more():
    with pytest.raises(ArgumentError, match="threads must be at least 1, got 0"):
        Program(files.program(), threads=0)
    np.testing.assert_array_equal(
        Program(files.program(), threads=2).run(np.ones((1, 8), np.float32))[0], [files.ONES + 1]
    )


# ---- containers and old layouts


ONE = np.ones((1, 8), np.float32)
WEIGHTS = files.ONES.tobytes()


def placed(blob: bytes, **fields) -> bytes:
    """A program of one delegate whose payload is in the flatbuffer, as until v0.2."""
    changes = {"delegates": [files.delegate(0, location=0)]}
    return files.program(files.plan(**changes), header=False, backend_delegate_data=[{"data": blob}], **fields)


@BOTH
@pytest.mark.parametrize(
    ("program", "data"),
    [
        pytest.param(placed(files.bare()), (), id="v0.1: payload without header, inside the flatbuffer"),
        pytest.param(placed(files.inline()), (), id="v0.2: constants in the payload, inside the flatbuffer"),
        pytest.param(files.program(length=24), (), id="v0.3: payload in a segment"),
        pytest.param(
            files.program(segments=[b"", files.bare()], length=24), (), id="payload without header in a segment"
        ),
        pytest.param(files.program(alignment=1), (), id="segments anywhere"),
        pytest.param(
            files.program(segments=[b"", files.named(), WEIGHTS], named_data=[{"key": "weights", "segment_index": 2}]),
            (),
            id="v0.6: constants by name",
        ),
        pytest.param(
            files.program(segments=[b"", files.named()]),
            [files.data_file({"weights": WEIGHTS})],
            id="data file of v0.7",
        ),
        pytest.param(
            files.program(segments=[b"", files.named()]),
            [files.data_file({"weights": WEIGHTS}, older=True)],
            id="data file of v0.6",
        ),
        pytest.param(bundled(files.program()), (), id="bundled"),
    ],
)
def test_every_layout_runs(program, data, merge):
    loaded = Program(program, data, merge=merge)
    np.testing.assert_array_equal(loaded.run(ONE)[0], [files.ONES + 1])
    np.testing.assert_array_equal(xnnfast.Runtime(xnnfast.load(program, data=data)).run(ONE)[0], [files.ONES + 1])


@pytest.mark.parametrize("older", [False, True])
def test_data_files_are_read_from_disk(tmp_path, older):
    (tmp_path / "model.pte").write_bytes(files.program(segments=[b"", files.named()]))
    (tmp_path / "model.ptd").write_bytes(files.data_file({"weights": WEIGHTS}, older=older))
    program = Program(tmp_path / "model.pte", tmp_path / "model.ptd")
    np.testing.assert_array_equal(program.run(ONE)[0], [files.ONES + 1])
    with pytest.raises(FormatError, match="'weights' is in none of"):
        Program(tmp_path / "model.pte").run(ONE)


def test_constants_of_the_program_may_be_in_a_data_file():
    sketch = Sketch()
    x = sketch.tensor((1, 8))
    c = sketch.tensor((1, 8), allocation_info=None, extra_tensor_info={"fully_qualified_name": "bias", "location": 1})
    y, z = sketch.tensor((1, 8)), sketch.tensor((1, 8))
    sketch.delegate(lambda b, v, w: b.add(v, w), [x, c], [y])
    sketch.kernel("aten::add.out", y, c, sketch.number(1), z, z)
    program = sketch.program([x], [z])
    data = files.data_file({"bias": WEIGHTS})
    for merge in (True, False):
        np.testing.assert_array_equal(Program(program, [data], merge=merge).run(ONE)[0], [2 * files.ONES + 1])


def test_constants_of_old_programs_are_in_their_buffers():
    sketch = Sketch()
    x, c = sketch.tensor((1, 8)), sketch.constant(files.ONES.reshape(1, 8))
    y = sketch.tensor((1, 8))
    sketch.delegate(lambda b, v, w: b.add(v, w), [x, c], [y])
    program = sketch.program([x], [y], constant_segment=None, constant_buffer=[{}, {"storage": WEIGHTS}])
    np.testing.assert_array_equal(Program(program).run(ONE)[0], [files.ONES + 1])


def test_constants_feed_delegates_as_constants():
    sketch = Sketch()
    weights = np.arange(12, dtype=np.float32).reshape(4, 3)
    x, w, y = sketch.tensor((2, 3)), sketch.constant(weights), sketch.tensor((2, 4))
    builder = xnnfast.GraphBuilder()
    v, filters = builder.input((2, 3)), builder.input((4, 3))
    builder.output(builder.fully_connected(v, filters))
    sketch.delegate(builder.finish(), [x, w], [y])
    program = Program(sketch.program([x], [y]))
    np.testing.assert_array_equal(program.run(X)[0], X @ weights.T)
    ((step, _),) = program.method("forward").plain.straight
    assert [value.shape for value in step.runtime.graph.inputs] == [(2, 3)]
    assert step.runtime.memory["packed"] > 0


def test_one_blob_called_twice_is_one_runtime():
    sketch = Sketch()
    x = sketch.tensor((2, 3))
    y = sketch.shift(x, (2, 3))
    z = sketch.tensor((2, 3))
    sketch.instruct("DelegateCall", delegate_index=0, args=[y, z])
    sketch.delegates.append(sketch.delegates[0])
    w = sketch.tensor((2, 3))
    sketch.instruct("DelegateCall", delegate_index=1, args=[z, w])
    program = Program(sketch.program([x], [w]), merge=False)
    np.testing.assert_array_equal(program.run(X)[0], X + 3)
    assert len({id(step.runtime) for step, _ in program.method("forward").plain.straight}) == 1


def test_plain_steps_are_what_the_file_says():
    sketch = Sketch()
    x = sketch.tensor((2, 3))
    y = sketch.shift(x, (2, 3))
    z = sketch.unary("aten::relu.out", y, sizes=(2, 3))
    program = Program(sketch.program([x], [z]), merge=False)
    report = program.plan()
    assert (report.runtimes, report.numpy_steps, report.merged, report.reason) == (1, 1, False, "merge=False")
    assert report.steps == ("instruction 0: delegate 0", "instruction 1: aten::relu.out in NumPy")
    steps = [step for step, _ in program.method("forward").plain.straight]
    assert [type(step) for step in steps] == [GraphStep, KernelStep]


def test_files_that_are_no_programs_are_refused(tmp_path):
    for data in (b"", b"1234567", b"\0" * 64, files.bare(), files.data_file({"a": b"1"})):
        with pytest.raises(FormatError):
            Program(data)
    with pytest.raises(FileNotFoundError):
        Program(pathlib.Path(tmp_path) / "absent.pte")
    assert struct.calcsize("<I") == 4


# ---- views that the exporter left out


@BOTH
def test_a_tensor_that_nothing_writes_is_a_view_of_what_was_written_last_at_its_place(merge):
    # As current exports do: a view with fixed sizes is removed, its value just shares the place of its base.
    sketch = Sketch()
    x = sketch.tensor((2, 3))
    y = sketch.tensor((2, 3))
    sketch.kernel("aten::neg.out", x, y, y)
    # The input's place is used again.
    z = sketch.tensor((2, 3), over=x)
    sketch.kernel("aten::abs.out", y, z, z)
    view = sketch.tensor((3, 2), over=x)
    result = sketch.tensor((3, 2))
    sketch.kernel("aten::neg.out", view, result, result)
    last = sketch.tensor((6,), over=result)
    (first, second) = Program(sketch.program([x], [result, last]), merge=merge).run(X - 2)
    np.testing.assert_array_equal(first, -abs(X - 2).reshape(3, 2))
    np.testing.assert_array_equal(second, -abs(X - 2).reshape(6))


@BOTH
def test_a_view_of_an_input_can_be_left_out(merge):
    sketch = Sketch()
    x = sketch.tensor((2, 3))
    view = sketch.tensor((3, 2), over=x)
    result = sketch.tensor((3, 2))
    sketch.kernel("aten::neg.out", view, result, result)
    (y,) = Program(sketch.program([x], [result]), merge=merge).run(X)
    np.testing.assert_array_equal(y, -X.reshape(3, 2))


@pytest.mark.parametrize("sizes,dtype", [((2, 2), np.float32), ((2, 3), np.int32)], ids=["sizes", "dtype"])
def test_what_lies_at_the_place_of_another_tensor_must_be_a_view_of_it(sizes, dtype):
    sketch = Sketch()
    x = sketch.tensor((2, 3))
    other = sketch.tensor(sizes, dtype, over=x)
    result = sketch.tensor(sizes, dtype)
    sketch.kernel("aten::neg.out", other, result, result)
    with pytest.raises(UnsupportedError, match=r"value 1 .* lies where value 0 .* does"):
        Program(sketch.program([x], [result])).run(X)
