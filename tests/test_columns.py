"""Columns in, columns out: what the objects for Ray and Spark make of a batch, without either."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xnnfast.ray
import xnnfast.spark
from xnnfast import (
    ArgumentError,
    DtypeError,
    Executor,
    FormatError,
    GraphBuilder,
    ShapeError,
    UnsupportedError,
    columns,
)
from xnnfast.ray import Predictor
from xnnfast.spark import predict_fn

X = np.random.default_rng(0).standard_normal((5, 8, 8), np.float32)


@pytest.fixture(autouse=True)
def forget() -> None:
    columns._executors.clear()


def square(*, batch: int = 1) -> Any:
    b = GraphBuilder()
    b.output(b.softmax(b.input((batch, 8, 8))))
    return b.graph()


def want(graph: Any, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    return tuple(Executor(graph, workers=1).run(*arrays))


def predictor(graph: Any, *args: Any, **options: Any) -> Predictor:
    return Predictor(graph, *args, workers=1, **options)


def cells(array: np.ndarray) -> np.ndarray:
    """An array of arrays, as pandas and Ray make of lists."""
    made = np.empty(len(array), object)
    made[:] = list(array)
    return made


# ---- bytes


def test_bytes_are_samples() -> None:
    graph = square()
    raw = [row.tobytes() for row in X]
    (expected,) = want(graph, X)
    np.testing.assert_array_equal(predictor(graph, "x", "y")({"x": cells_of(raw)})["y"], expected)
    np.testing.assert_array_equal(predict_fn(graph, workers=1)()(cells_of(raw)), expected.reshape(5, 64))


def test_bytes_that_are_no_sample_are_refused() -> None:
    predict = predictor(square(), "x", "y")
    raw: list[Any] = [row.tobytes() for row in X]
    for cell, error, words in (
        (raw[0][:-4], ShapeError, r"column 'x': need 256 bytes for float32 of shape \(8, 8\), row 2 .* has 252"),
        (b"", ShapeError, "need 256 bytes .* has 0"),
        (None, FormatError, "row 2 of the batch has none"),
        ("text", DtypeError, "need bytes in every row, row 2 of the batch has str"),
    ):
        with pytest.raises(error, match=words):
            predict({"x": cells_of([*raw[:2], cell, *raw[3:]])})


def test_arrow_s_bytes_are_samples() -> None:
    pa = pytest.importorskip("pyarrow")
    # Results go into columns of Ray's tensors.
    pytest.importorskip("ray.data.extensions")
    graph = square()
    predict = predictor(graph, "x", "y")
    (expected,) = want(graph, X)
    raw = [row.tobytes() for row in X]
    for kind in (pa.binary(), pa.large_binary(), pa.binary(256)):
        made = predict(pa.table({"x": pa.array(raw, kind)}))
        got = np.asarray(made["y"].to_pylist() if not hasattr(made["y"].chunk(0), "to_numpy_ndarray")
                         else made["y"].chunk(0).to_numpy_ndarray(), np.float32)  # fmt: skip
        np.testing.assert_array_equal(got.reshape(expected.shape), expected)
    with pytest.raises(FormatError, match="row 1 of the batch has none"):
        predict(pa.table({"x": pa.array([raw[0], None], pa.binary())}))


def cells_of(items: list[Any]) -> np.ndarray:
    made = np.empty(len(items), object)
    made[:] = items
    return made


# ---- NumPy


@pytest.mark.parametrize("form", [
    lambda x: x,
    lambda x: x.reshape(5, 64),
    lambda x: x.reshape(5, 2, 2, 16),
    cells,
    lambda x: cells(x.reshape(5, 64)),
    lambda x: [[list(row) for row in each] for each in x],
    lambda x: cells(np.array([cells(each) for each in x], object)),
    lambda x: np.asfortranarray(x),
    lambda x: x.astype(">f4"),
], ids=("tensor", "flat", "other rank", "cells", "flat cells", "lists", "nested", "fortran", "big-endian"))
def test_every_form_of_the_same_numbers(form: Any) -> None:
    graph = square()
    made = predictor(graph, "x", "y")({"x": form(X)})
    np.testing.assert_array_equal(made["y"], want(graph, X)[0])


def test_arrays_that_may_not_be_written_are_used_where_they_lie() -> None:
    x = X.copy()
    x.flags.writeable = False
    executor = Executor(square(), workers=1)
    array, rows = predictor(square(), "x")._columns._input(executor, 0, "x", x)
    assert rows == 5 and np.shares_memory(array, x)


def test_other_columns_are_passed_on() -> None:
    batch = {"id": np.arange(5), "x": X, "name": np.array(list("abcde"))}
    assert list(predictor(square(), "x")(batch)) == ["id", "name", "output"]
    assert list(predictor(square(), "x", keep=["name", "x"])(batch)) == ["name", "x", "output"]
    assert list(predictor(square(), "x", keep=[])(batch)) == ["output"]
    assert list(predictor(square(), "x", "x")(batch)) == ["id", "name", "x"]


def test_several_inputs_and_outputs() -> None:
    b = GraphBuilder()
    x, y = b.input((1, 4)), b.input((1,))
    b.output(b.multiply(x, x))
    b.output(b.add(y, y))
    graph = b.graph()
    x, y = np.arange(12, dtype=np.float32).reshape(3, 4), np.float32([1, 2, 3])
    made = predictor(graph, ["a", "b"])({"b": y, "a": x})
    np.testing.assert_array_equal(made["output_0"], x * x)
    np.testing.assert_array_equal(made["output_1"], y + y)
    fn = predict_fn(graph, workers=1)
    assert fn.input_tensor_shapes == [[4], []]
    assert fn.ddl == "struct<`output_0`:array<float>,`output_1`:float>"
    assert {name: each.shape for name, each in fn()(x, y).items()} == {"output_0": (3, 4), "output_1": (3,)}


def test_samples_of_several_rows_are_cells_of_as_many() -> None:
    b = GraphBuilder()
    b.output(b.softmax(b.input((6, 4))))
    model = columns.ColumnModel(b.graph(), ["x"], ["y"], False, {"workers": 1, "batch": 2})
    executor = model.executor()
    x = np.random.default_rng(1).standard_normal((5, 3, 4), np.float32)
    assert model.sample_shape(executor, 0) == (3, 4)
    made = model.run(executor, [x])["y"]
    assert made.shape == (5, 3, 4)
    np.testing.assert_array_equal(made.reshape(15, 4), executor.run(x.reshape(15, 4))[0])


def test_outputs_with_the_batch_inside_come_by_row() -> None:
    b = GraphBuilder()
    b.output(b.static_transpose(b.input((1, 3, 4)), (1, 0, 2)))
    x = np.random.default_rng(1).standard_normal((5, 3, 4), np.float32)
    np.testing.assert_array_equal(predictor(b.graph(), "x")({"x": x})["output"], x)


@pytest.mark.parametrize("batch", [{}, {"id": np.arange(0)}, {"x": np.empty(0)}, {"x": np.empty((0, 8, 8), np.int8)}])
def test_no_rows_are_no_results(batch: dict[str, np.ndarray]) -> None:
    made = predictor(square(), "x")(batch)["output"]
    assert made.shape == (0, 8, 8) and made.dtype == np.float32


@pytest.mark.parametrize("batch, error, message", [
    ({"y": X}, ArgumentError, "need a column 'x', the batch has 'y'"),
    ({"x": X.reshape(5, 64)[:, :63]}, ShapeError, r"need cells of shape \(8, 8\), or of 64 numbers, found \(63,\)"),
    ({"x": X.astype(np.float64)}, DtypeError, "column 'x': need float32, found float64: convert it, or give cast=True"),
    ({"x": np.array(list("abcde"))}, DtypeError, "column 'x': need float32, found <U1"),
    ({"x": [X[0], X[1], None]}, FormatError, "row 2 of the batch has none"),
    ({"x": [X[0], X[1, :4]]}, ShapeError, "row 1 of the batch has"),
    ({"x": np.array([{"a": 1}, {"a": 2}], object)}, DtypeError, "need numbers"),
])  # fmt: skip
def test_what_does_not_fit_is_named(batch: dict[str, Any], error: type[Exception], message: str) -> None:
    for name, column in batch.items():
        if isinstance(column, list):
            batch = {name: np.empty(len(column), object)}
            batch[name][:] = column
    with pytest.raises(error, match=message):
        predictor(square(), "x")(batch)


def test_casts_are_asked_for_and_keep_the_kind() -> None:
    made = predictor(square(), "x", cast=True)({"x": X.astype(np.float64)})
    np.testing.assert_array_equal(made["output"], want(square(), X)[0])
    predictor(square(), "x", cast=True)({"x": np.ones((5, 8, 8), np.int16)})
    b = GraphBuilder()
    b.output(b.copy(b.input((1, 4), "int32")))
    with pytest.raises(DtypeError, match=r"need int32, found float32$"):
        predictor(b.graph(), "x", cast=True)({"x": np.ones((5, 4), np.float32)})


def test_names_are_counted_at_once() -> None:
    for inputs, outputs, message in ((["x", "y"], None, "need the names of 1 columns as inputs="),
                                     ("x", ["a", "b"], "need the names of 1 columns as outputs=")):
        with pytest.raises(ArgumentError, match=message):
            Predictor(square(), inputs, outputs)
    b = GraphBuilder()
    b.output(b.add(b.input((1, 4)), b.input((1, 4))))
    with pytest.raises(ArgumentError, match="different names"):
        Predictor(b.graph(), ["x", "x"])


def test_what_all_samples_share_is_no_column() -> None:
    b = GraphBuilder()
    b.output(b.add(b.input((1, 4)), b.input((4,))))
    with pytest.raises(UnsupportedError, match="input 1 of the model is one array for all samples"):
        columns.ColumnModel(b.graph(), ["x", "y"], None, False, {"workers": 1, "batched": [0]}).executor()


def test_a_batch_of_another_kind_is_refused() -> None:
    with pytest.raises(ArgumentError, match="need batch_format='numpy' or 'pyarrow', got a batch of list"):
        predictor(square(), "x")([1])


# ---- processes


def test_copies_share_the_executor_of_their_process() -> None:
    one = predictor(square(), "x")
    two = pickle.loads(pickle.dumps(one))
    assert two._columns.executor() is one._columns.executor()
    assert predictor(square(), "x")._columns.executor() is not one._columns.executor()


def test_few_executors_are_kept() -> None:
    for _ in range(columns.KEPT + 3):
        predictor(square(), "x")._columns.executor()
    assert len(columns._executors) == columns.KEPT


def test_a_predictor_travels_by_reference(tmp_path: Path) -> None:
    path, b = tmp_path / "large.xnn", GraphBuilder()
    b.output(b.fully_connected(b.input((1, 64)), np.ones((1000, 64), np.float32)))
    b.save(path)
    assert len(pickle.dumps(predictor(path, "x"))) < 4096
    assert len(pickle.dumps(predict_fn(path))) < 4096


def test_neither_engine_is_imported() -> None:
    code = ("import sys, xnnfast.ray, xnnfast.spark\n"
            "print([name in sys.modules for name in ('ray', 'pyspark', 'pyarrow')])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[False, False, False]\n", done.stderr


def test_outside_of_workers_nothing_is_granted() -> None:
    assert xnnfast.spark.granted_cpus() is None
    if "ray" not in sys.modules:
        assert xnnfast.ray.granted_cpus() is None


# ---- Spark


def test_spark_gets_flat_arrays_of_its_own_types() -> None:
    b = GraphBuilder()
    b.output(b.static_reshape(b.input((1, 4), "fp16"), (1, 2, 2)))
    fn = predict_fn(b.graph(), workers=1)
    assert fn.input_tensor_shapes == [[4]] and fn.ddl == "array<float>"
    made = fn()(np.ones((3, 4), np.float16))
    assert made.shape == (3, 4) and made.dtype == np.float32


def test_one_named_output_is_a_struct_only_in_a_list() -> None:
    assert predict_fn(square(), "y").ddl == "array<float>"
    assert predict_fn(square(), ["y"]).ddl == "struct<`y`:array<float>>"


# ---- Arrow


@pytest.mark.parametrize("form", ("nested", "large", "fixed", "fixed of fixed", "tensor", "flat", "sliced", "chunked"))
def test_arrow_columns(form: str) -> None:
    pa = pytest.importorskip("pyarrow")
    flat, kind = pa.array(X.ravel()), pa.float32()
    column = {
        "nested": lambda: pa.array(X.tolist(), pa.list_(pa.list_(kind))),
        "large": lambda: pa.array(X.tolist(), pa.large_list(pa.large_list(kind))),
        "fixed": lambda: pa.FixedSizeListArray.from_arrays(flat, 64),
        "fixed of fixed": lambda: pa.FixedSizeListArray.from_arrays(pa.FixedSizeListArray.from_arrays(flat, 8), 8),
        "tensor": lambda: pa.FixedShapeTensorArray.from_numpy_ndarray(X),
        "flat": lambda: pa.array(X.reshape(5, 64).tolist(), pa.list_(kind)),
        "sliced": lambda: pa.array(np.concatenate([X[:1], X, X]).tolist(), pa.list_(pa.list_(kind))).slice(1, 5),
        "chunked": lambda: pa.chunked_array([pa.FixedSizeListArray.from_arrays(pa.array(X[a:b].ravel()), 64)
                                             for a, b in ((0, 2), (2, 2), (2, 5))]),
    }[form]()
    np.testing.assert_array_equal(columns.dense("x", column).reshape(X.shape), X)
    if form in ("fixed", "fixed of fixed", "tensor"):
        where = columns.dense("x", column).__array_interface__["data"][0]
        storage = column.storage if form == "tensor" else column
        while hasattr(storage, "flatten") and pa.types.is_fixed_size_list(storage.type):
            storage = storage.flatten()
        assert where == storage.buffers()[1].address


@pytest.mark.parametrize("make, error, message", [
    (lambda pa: pa.array([[1.0], None], pa.list_(pa.float32())), FormatError, "need a value in every row, 1 are"),
    (lambda pa: pa.array([[1.0], [None]], pa.list_(pa.float32())), FormatError, "every row, 1 are null"),
    (lambda pa: pa.array([[1.0], [1.0, 2.0]], pa.list_(pa.float32())), ShapeError, "lists of one length, found 1 to 2"),
    (lambda pa: pa.array(["a", "b"]), DtypeError, "need numbers, or lists or tensors of them, found string"),
])
def test_arrow_columns_that_do_not_fit(make: Any, error: type[Exception], message: str) -> None:
    pa = pytest.importorskip("pyarrow")
    with pytest.raises(error, match=message):
        columns.dense("x", make(pa))
