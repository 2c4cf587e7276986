"""Digits and MobileNetV2 on Spark with two Python workers on this machine, one of which is killed in between.

    pip install 'xnnfast[spark,example]'        # and Java 17, on Debian: apt install default-jre-headless
    python examples/on_spark.py [--model mobilenet_v2.pte] [--images 64]

Status 1 if a row is missing or differs from what Executor.run gives for it.
"""

from __future__ import annotations

import os
import sys

import numpy as np
import shards
from pyspark.ml.functions import predict_batch_udf
from pyspark.sql import SparkSession

import xnnfast.spark


def dies_once(fn: xnnfast.spark.PredictFn, mark: str):
    """As fn, but the first worker that comes to its third batch is killed."""

    def make():
        predict, calls = fn(), 0

        def run(batch):
            nonlocal calls
            calls += 1
            if calls == 3:
                shards.end_once(mark)
            return predict(batch)

        return run

    return make


def main() -> None:
    chosen = shards.arguments(__doc__)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    # Otherwise its workers are whatever python3 is on the path.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    # Two cores, four tries for each task.
    spark = (SparkSession.builder.master("local[2,4]").config("spark.ui.enabled", "false")
             .config("spark.driver.memory", "2g").config("spark.sql.files.maxPartitionBytes", "32m").getOrCreate())
    spark.sparkContext.setLogLevel("OFF")
    # Workers import it.
    spark.sparkContext.addPyFile(shards.__file__)

    network = chosen.out / "digits.xnn"
    unseen, answers = shards.digits(network)
    frame = spark.createDataFrame([(number, image.tolist()) for number, image in enumerate(unseen)],
                                  "id long, image array<float>")
    fn = xnnfast.spark.predict_fn(network)
    predict = predict_batch_udf(fn, batch_size=256, **fn.spec)
    rows = frame.repartition(2).select("id", predict("image").alias("scores")).collect()
    found = {row.id: np.float32(row.scores) for row in rows}
    shards.compare("digits", network, unseen, found)
    right = sum(int(row.argmax() == answers[number]) for number, row in found.items())
    print(f"digits: {right} of {len(answers)} right")

    if chosen.images:
        shape = shards.sample_shape(chosen.model)
        images = shards.write_shards(chosen.out / "shards", shape, chosen.images)
        fn = xnnfast.spark.predict_fn(chosen.model, weights_cache=str(chosen.out / "packed/"))
        mark = chosen.out / "killed"
        mark.unlink(missing_ok=True)
        predict = predict_batch_udf(dies_once(fn, str(mark)), batch_size=4, **fn.spec)
        # Images are large, and Spark hands over so many rows at a time.
        spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "16")
        rows = spark.read.parquet(str(images)).select("id", predict("image").alias("logits")).collect()
        shards.tell_killed("mobilenet", mark, expected=chosen.images >= 48)
        if len({row.id for row in rows}) != len(rows):
            raise SystemExit("mobilenet: a row came twice")
        shards.compare("mobilenet", chosen.model, shards.read_shards(images, shape),
                       {row.id: np.float32(row.logits) for row in rows})
    spark.stop()


if __name__ == "__main__":
    main()
