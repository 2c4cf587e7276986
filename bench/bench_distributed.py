"""What an engine leaves of the throughput of a plain Executor on the same cores, for MobileNetV2.

    python bench/bench_distributed.py [--engine ray] [--engine spark] [--model FILE] [--images 1024] [--rounds 5]

Rounds alternate: Executor, engine, Executor, engine, ... The figure is the median of the ratios of neighbours, engine
to Executor; below 1 the engine is slower. Both read the same images: the Executor arrays in memory, in batches as
large as the engine's; Ray blocks in its shared memory; Spark a folder of Parquet shards, through its JVM and Arrow.

ray-node   one actor with all CPUs; ray-cpu one actor for each CPU. Time counts from when the first actor begins with
           its first block to when the last block has come back: what it takes to start actors, printed beside it,
           is paid once.
spark      predict_batch_udf in a Python worker for each CPU, which the first, uncounted, round starts; images are
           arrays of floats. spark-binary: images are the bytes of the same floats.

Results are compared with the Executor's in every round.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import xnnfast
from xnnfast.limits import allowed_cpus

BLOCK = 128
#: Images that exist; streams of more repeat them.
DIFFERENT = 256

Runs = Iterator[tuple[str, Callable[[], tuple[float, float]]]]


def images_for(model: Path) -> np.ndarray:
    with xnnfast.Executor(model, workers=1) as executor:
        shape = executor.inputs[0].shape[1:]
    made: np.ndarray = np.random.default_rng(0).standard_normal((DIFFERENT, *shape), np.float32)
    return made


class Plain:
    """The Executor by itself, ready before the time counts."""

    def __init__(self, model: Path, images: np.ndarray, count: int) -> None:
        self.executor = xnnfast.Executor(model)
        self.images, self.count = images, count
        self.want = self.executor.run(images)[0]

    def rate(self) -> float:
        begun = time.perf_counter()
        for start in range(0, self.count, BLOCK):
            at = start % DIFFERENT
            self.executor.run(self.images[at : at + BLOCK])
        return self.count / (time.perf_counter() - begun)


def check(found: np.ndarray, want: np.ndarray, what: str) -> None:
    if not np.array_equal(found, want):
        sys.exit(f"{what}: results differ from the Executor's")


def on_ray(model: Path, images: np.ndarray, count: int, want: np.ndarray) -> Runs:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray gives way to whatever else runs, the Executor doesn't.
    os.environ.setdefault("RAY_worker_niceness", "0")
    import pyarrow as pa
    import ray
    from ray.data.extensions import ArrowTensorArray

    import xnnfast.ray

    cpus = allowed_cpus().count
    ray.init(num_cpus=cpus, include_dashboard=False, logging_level="error", log_to_driver=False,
             object_store_memory=images.nbytes * 2 + (200 << 20))
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    # All actors at work from the first block on.
    context.wait_for_min_actors_s = 300
    blocks = []
    for at in range(0, DIFFERENT, BLOCK):
        cells = ArrowTensorArray.from_numpy(images[at : at + BLOCK])
        blocks.append(ray.put(pa.table({"id": np.arange(at, at + BLOCK), "image": cells})))

    class Timed(xnnfast.ray.Predictor):
        """Tells when it began with a block, by the clock that all processes of a machine share."""

        def __call__(self, batch: Any) -> Any:
            begun = time.monotonic()
            made = super().__call__(batch)
            return made.append_column("begun", pa.array(np.full(made.num_rows, begun)))

    def rate(actors: int) -> tuple[float, float]:
        # Two blocks for each actor at least.
        refs = [blocks[number % len(blocks)] for number in range(max(2 * actors, count // BLOCK))]
        scored = ray.data.from_arrow_refs(refs).map_batches(
            Timed, fn_constructor_args=[str(model), "image", "logits"], batch_format="pyarrow",
            batch_size=None, num_cpus=cpus // actors, compute=ray.data.ActorPoolStrategy(size=actors))
        asked = time.monotonic()
        found, starts = [], []
        for batch in scored.iter_batches(batch_size=None):
            found.append((batch["id"], batch["logits"]))
            starts.append(float(batch["begun"].min()))
        ended, begun = time.monotonic(), min(starts)
        for ids, logits in found:
            check(logits, want[ids], "ray")
        rows = sum(len(ids) for ids, _ in found)
        if rows != len(refs) * BLOCK:
            sys.exit(f"ray: need {len(refs) * BLOCK} rows, found {rows}")
        return rows / (ended - begun), begun - asked

    yield "ray-node", lambda: rate(1)
    if cpus > 1:
        yield "ray-cpu", lambda: rate(cpus)
    ray.shutdown()


def on_spark(model: Path, images: np.ndarray, count: int, want: np.ndarray) -> Runs:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pyspark.ml.functions import predict_batch_udf
    from pyspark.sql import SparkSession

    import xnnfast.spark

    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    cpus = allowed_cpus().count
    spark = (SparkSession.builder.master(f"local[{cpus}]").config("spark.ui.enabled", "false")
             .config("spark.driver.memory", "3g").config("spark.sql.files.maxPartitionBytes", "64m")
             .config("spark.sql.execution.arrow.maxRecordsPerBatch", "64").getOrCreate())
    spark.sparkContext.setLogLevel("OFF")
    flat = images.reshape(len(images), -1)
    with tempfile.TemporaryDirectory() as folder:
        for form in ("arrays", "binary"):
            os.mkdir(f"{folder}/{form}")
            for at in range(0, count, BLOCK):
                place = at % DIFFERENT
                piece = flat[place : place + BLOCK]
                if form == "arrays":
                    cells: Any = pa.FixedSizeListArray.from_arrays(pa.array(piece.ravel()), piece.shape[1])
                else:
                    cells = pa.array([row.tobytes() for row in piece], pa.binary())
                table = pa.table({"id": np.arange(place, place + BLOCK), "image": cells})
                pq.write_table(table, f"{folder}/{form}/{at:06d}.parquet", compression="none", use_dictionary=False)
        fn = xnnfast.spark.predict_fn(model)
        udfs = {"arrays": predict_batch_udf(fn, batch_size=64, **fn.spec),
                "binary": predict_batch_udf(fn, batch_size=64, return_type=fn.return_type)}  # fmt: skip

        def rate(form: str) -> tuple[float, float]:
            scored = spark.read.parquet(f"{folder}/{form}").select("id", udfs[form]("image").alias("logits"))
            begun = time.perf_counter()
            # As a table: a list of a thousand Python numbers for each row would be what is measured.
            rows = scored.toArrow()
            seconds = time.perf_counter() - begun
            if len(rows) != count:
                sys.exit(f"spark: need {count} rows, found {len(rows)}")
            logits = rows["logits"].combine_chunks().flatten().to_numpy().reshape(count, -1)
            check(logits, want[rows["id"].to_numpy()], "spark")
            return count / seconds, 0.0

        for name, form in (("spark", "arrays"), ("spark-binary", "binary")):
            rate(form)
            yield name, functools.partial(rate, form)
    spark.stop()


ENGINES = {"ray": on_ray, "spark": on_spark}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", action="append", choices=sorted(ENGINES), help="default: both")
    parser.add_argument("--model", type=Path, help="by default the shapes of MobileNetV2 with random weights")
    parser.add_argument("--images", type=int, default=1024, help="in a round, rounded up to blocks of 128")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where to write the figures too")
    chosen = parser.parse_args()
    count = -(-chosen.images // BLOCK) * BLOCK
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = chosen.model
        if model is None:
            import cases

            model = Path(folder) / "mobilenet_v2.xnn"
            cases.build("mobilenet_v2").save(model)
        model = model.resolve()
        images = images_for(model)
        plain = Plain(model, images, count)
        print(f"{count} images a round in blocks of {BLOCK}; {plain.executor.plan}", flush=True)
        for engine in chosen.engine or sorted(ENGINES):
            for name, run in ENGINES[engine](model, images, count, plain.want):
                pairs, starts = [], []
                for _ in range(chosen.rounds):
                    alone = plain.rate()
                    rate, start = run()
                    pairs.append((alone, rate))
                    starts.append(start)
                ratios = sorted(rate / alone for alone, rate in pairs)
                figures[name] = {"ratio": statistics.median(ratios), "ratios": ratios, "pairs": pairs, "start": starts}
                print(f"{name:9s} {statistics.median(ratios):.2f} of Executor ({ratios[0]:.2f} to {ratios[-1]:.2f}); "
                      f"images per second {statistics.median(rate for _, rate in pairs):.0f} against "
                      f"{statistics.median(alone for alone, _ in pairs):.0f}"
                      + (f"; actors began after {statistics.median(starts):.1f} s" if any(starts) else ""), flush=True)
    if chosen.json:
        chosen.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
