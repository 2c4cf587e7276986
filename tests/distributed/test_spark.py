"""predict_fn on a real Spark of two Python workers: every row as Executor.run gives it, though a worker is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from networks import ROWS, network

import xnnfast as xf
import xnnfast.spark

pytest.importorskip("pyspark", reason="Spark is not installed: make test-distributed")


def frame(spark: Any, images: np.ndarray, kind: str = "float") -> Any:
    rows = [(number, image.tolist(), float(number)) for number, image in enumerate(images)]
    return spark.createDataFrame(rows, f"id long, image array<{kind}>, y {kind}").repartition(4)


def udf(fn: Any, batch_size: int = 64) -> Any:
    from pyspark.ml.functions import predict_batch_udf

    return predict_batch_udf(fn, batch_size=batch_size, **fn.spec)


def by_id(rows: Any, take: Any) -> np.ndarray:
    found = {row.id: np.float32(take(row)) for row in rows}
    assert len(found) == len(rows) == ROWS
    return np.stack([found[number] for number in range(ROWS)])


def test_rows_are_those_of_an_executor(spark: Any, model: Path, images: np.ndarray, want: np.ndarray) -> None:
    fn = xnnfast.spark.predict_fn(model)
    assert fn.input_tensor_shapes == [[8, 8]] and fn.return_type.simpleString() == fn.ddl == "array<float>"
    rows = frame(spark, images).select("id", udf(fn)("image").alias("scores")).collect()
    np.testing.assert_array_equal(by_id(rows, lambda row: row.scores), want)


def test_bytes_are_rows_without_shapes(spark: Any, model: Path, images: np.ndarray, want: np.ndarray) -> None:
    from pyspark.ml.functions import predict_batch_udf

    fn = xnnfast.spark.predict_fn(model)
    predict = predict_batch_udf(fn, batch_size=64, return_type=fn.return_type)
    rows = [(number, image.tobytes()) for number, image in enumerate(images)]
    raw = spark.createDataFrame(rows, "id long, image binary").repartition(4)
    rows = raw.select("id", predict("image").alias("scores")).collect()
    np.testing.assert_array_equal(by_id(rows, lambda row: row.scores), want)


def test_several_columns_and_outputs(spark: Any, two: Path, images: np.ndarray) -> None:
    products, doubles = xf.Executor(two, workers=1).run(images, np.arange(ROWS, dtype=np.float32))
    fn = xnnfast.spark.predict_fn(two, outputs=["product", "double"])
    assert fn.input_tensor_shapes == [[64], []]
    assert fn.return_type.simpleString() == fn.ddl.replace("`", "") == "struct<product:array<float>,double:float>"
    rows = frame(spark, images).select("id", udf(fn)("image", "y").alias("made")).collect()
    np.testing.assert_array_equal(by_id(rows, lambda row: row.made.product), products)
    np.testing.assert_array_equal(by_id(rows, lambda row: row.made["double"]), doubles)


def test_doubles_are_cast_if_that_is_asked_for(spark: Any, model: Path, images: np.ndarray, want: np.ndarray) -> None:
    doubles = frame(spark, images, "double")
    rows = doubles.select("id", udf(xnnfast.spark.predict_fn(model, cast=True))("image").alias("scores")).collect()
    np.testing.assert_array_equal(by_id(rows, lambda row: row.scores), want)
    with pytest.raises(Exception, match="need float32, found float64: convert it, or give cast=True"):
        doubles.select(udf(xnnfast.spark.predict_fn(model))("image")).collect()


def test_a_task_has_one_thread_unless_spark_grants_more(spark: Any, model: Path, images: np.ndarray) -> None:
    fn = xnnfast.spark.predict_fn(model)

    class Telling:
        def __call__(self) -> Any:
            predict = fn()
            workers = fn._columns.executor(xnnfast.spark.granted_cpus()).workers

            def tell(batch: np.ndarray) -> np.ndarray:
                predict(batch)
                return np.full((len(batch), 1), workers, np.int64)

            return tell

    from pyspark.ml.functions import predict_batch_udf
    from pyspark.sql.types import LongType

    tell = predict_batch_udf(Telling(), return_type=LongType(), batch_size=64, input_tensor_shapes=[[8, 8]])
    assert {row[0] for row in frame(spark, images).select(tell("image")).collect()} == {1}


def test_no_rows_are_no_results(spark: Any, model: Path, images: np.ndarray) -> None:
    none = frame(spark, images).where("id < 0")
    assert none.select(udf(xnnfast.spark.predict_fn(model))("image")).collect() == []


def test_a_model_replaced_on_its_way_is_refused(spark: Any, model: Path, images: np.ndarray) -> None:
    predict = udf(xnnfast.spark.predict_fn(model))
    rows = frame(spark, images).select(predict("image"))
    network(1).save(model)
    with pytest.raises(Exception, match="ChangedError"):
        rows.collect()


def test_a_worker_that_is_killed_loses_nothing(spark: Any, tmp_path: Path, model: Path, images: np.ndarray,
                                               want: np.ndarray) -> None:
    fn = xnnfast.spark.predict_fn(model)
    once = tmp_path / "killed"

    class Dying:
        def __call__(self) -> Any:
            predict, calls = fn(), 0

            def die_once(batch: np.ndarray) -> np.ndarray:
                nonlocal calls
                calls += 1
                if calls == 3 and not once.exists():
                    once.write_text(str(os.getpid()))
                    os.kill(os.getpid(), signal.SIGKILL)
                return predict(batch)

            return die_once

    from pyspark.ml.functions import predict_batch_udf

    predict = predict_batch_udf(Dying(), batch_size=10, **fn.spec)
    rows = frame(spark, images).select("id", predict("image").alias("scores")).collect()
    assert int(once.read_text()) != os.getpid()
    np.testing.assert_array_equal(by_id(rows, lambda row: row.scores), want)
