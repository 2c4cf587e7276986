"""Predictor on a real Ray cluster of two workers: every row as Executor.run gives it, though actors are killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from networks import ROWS, network

import xnnfast as xf
import xnnfast.ray

pytest.importorskip("ray.data", reason="Ray Data is not installed: make test-distributed")


def dataset(ray: Any, images: np.ndarray, blocks: int = 6) -> Any:
    """Rows with an id and a tensor, in several blocks."""
    import pyarrow as pa
    from ray.data.extensions import ArrowTensorArray

    pieces = np.array_split(np.arange(len(images)), blocks)
    return ray.data.from_arrow([
        pa.table({"id": piece, "image": ArrowTensorArray.from_numpy(images[piece])})
        for piece in pieces])


def actors(ray: Any, count: int, cpus: int = 1) -> dict[str, Any]:
    return {"compute": ray.data.ActorPoolStrategy(size=count), "num_cpus": cpus}


def by_id(batches: Any, column: str = "scores") -> np.ndarray:
    rows = {}
    for batch in batches:
        for number, row in zip(batch["id"].tolist(), batch[column]):
            assert number not in rows
            rows[number] = row
    return np.stack([rows[number] for number in range(ROWS)])


@pytest.mark.parametrize("batch_format", ("numpy", "pyarrow"))
@pytest.mark.parametrize("count, cpus", ((2, 1), (1, 2)))
def test_rows_are_those_of_an_executor(ray: Any, model: Path, images: np.ndarray, want: np.ndarray, batch_format: str,
                                       count: int, cpus: int) -> None:
    scored = dataset(ray, images).map_batches(
        xnnfast.ray.Predictor, fn_constructor_args=[str(model)], fn_constructor_kwargs={"inputs": "image",
        "outputs": "scores"}, batch_size=64, batch_format=batch_format, **actors(ray, count, cpus))  # fmt: skip
    np.testing.assert_array_equal(by_id(scored.iter_batches(batch_size=None)), want)
    assert set(scored.columns()) == {"id", "scores"}


@pytest.mark.parametrize("count, cpus", ((2, 1), (1, 2)))
def test_an_actor_has_as_many_threads_as_ray_granted(ray: Any, model: Path, images: np.ndarray, count: int,
                                                     cpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Else the first actor may have done all before the second is there. Not for all tests: whoever kills an actor
    # would wait for it in vain.
    monkeypatch.setattr(ray.data.DataContext.get_current(), "wait_for_min_actors_s", 300)

    class Telling(xnnfast.ray.Predictor):
        def __call__(self, batch: Any) -> Any:
            time.sleep(0.3)
            made = super().__call__(batch)
            executor = self._columns.executor(xnnfast.ray.granted_cpus())
            rows = len(made["id"])
            return {"workers": np.full(rows, executor.workers), "pid": np.full(rows, os.getpid())}

    table = dataset(ray, images).map_batches(
        Telling, fn_constructor_args=[str(model), "image"], batch_size=100, **actors(ray, count, cpus)).to_pandas()
    assert set(table["workers"]) == {cpus}
    assert len(set(table["pid"])) == count and os.getpid() not in set(table["pid"])


def test_an_instance_runs_in_tasks(ray: Any, model: Path, images: np.ndarray, want: np.ndarray) -> None:
    predictor = xnnfast.ray.Predictor(xf.load(model), "image", "scores", keep=["id"])
    scored = dataset(ray, images).map_batches(predictor, batch_size=None)
    np.testing.assert_array_equal(by_id(scored.iter_batches(batch_size=None)), want)


def test_nested_lists_of_a_parquet_file(ray: Any, tmp_path: Path, model: Path, images: np.ndarray,
                                        want: np.ndarray) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    nested = pa.array(images.reshape(-1, 8, 8).tolist(), pa.list_(pa.list_(pa.float32())))
    (tmp_path / "shards").mkdir()
    table = pa.table({"id": np.arange(ROWS), "image": nested})
    for number in range(3):
        pq.write_table(table.slice(number * 200, 200), tmp_path / f"shards/{number}.parquet")
    for batch_format in ("numpy", "pyarrow"):
        scored = ray.data.read_parquet(str(tmp_path / "shards")).map_batches(
            xnnfast.ray.Predictor, fn_constructor_args=[str(model), "image", "scores"], batch_size=128,
            batch_format=batch_format, **actors(ray, 1))
        np.testing.assert_array_equal(by_id(scored.iter_batches(batch_size=None)), want)


def test_several_inputs_and_outputs(ray: Any, two: Path, images: np.ndarray) -> None:
    numbers = np.arange(ROWS, dtype=np.float32)
    products, doubles = xf.Executor(two, workers=1).run(images, numbers)
    with_numbers = dataset(ray, images).map_batches(lambda batch: {**batch, "y": batch["id"].astype(np.float32)})
    scored = with_numbers.map_batches(
        xnnfast.ray.Predictor, fn_constructor_args=[str(two), ["image", "y"], ["product", "double"]], batch_size=50,
        **actors(ray, 1)).materialize()
    np.testing.assert_array_equal(by_id(scored.iter_batches(batch_size=None), "product"), products)
    np.testing.assert_array_equal(by_id(scored.iter_batches(batch_size=None), "double"), doubles)


def test_no_rows_are_no_results(ray: Any, model: Path, images: np.ndarray) -> None:
    none = dataset(ray, images).map_batches(lambda batch: {name: column[:0] for name, column in batch.items()})
    for batch_format in ("numpy", "pyarrow"):
        scored = none.map_batches(xnnfast.ray.Predictor, fn_constructor_args=[str(model), "image"],
                                  batch_format=batch_format, **actors(ray, 1))
        assert scored.count() == 0


@pytest.mark.parametrize("inputs, change, message", [
    ("picture", lambda images: images, "need a column 'picture', the batch has 'id', 'image'"),
    ("image", lambda images: images.astype(np.float64), "need float32, found float64: convert it, or give cast=True"),
    ("image", lambda images: images[:, :60], "need cells of shape (8, 8), or of 64 numbers, found (60,)"),
])
def test_columns_that_do_not_fit_are_named(ray: Any, model: Path, images: np.ndarray, inputs: str, change: Any,
                                           message: str) -> None:
    scored = dataset(ray, change(images), 1).map_batches(
        xnnfast.ray.Predictor, fn_constructor_args=[str(model), inputs], **actors(ray, 1))
    with pytest.raises(Exception) as caught:
        scored.materialize()
    assert message in str(caught.value) or message in str(caught.value.__cause__)


def test_a_model_replaced_on_its_way_is_refused(ray: Any, model: Path, images: np.ndarray) -> None:
    predictor = xnnfast.ray.Predictor(xf.load(model), "image")
    scored = dataset(ray, images, 1).map_batches(predictor)
    network(1).save(model)
    with pytest.raises(Exception, match="where this was pickled"):
        scored.materialize()


def test_packed_weights_are_shared_by_a_file(ray: Any, tmp_path: Path, model: Path, images: np.ndarray) -> None:
    class Telling(xnnfast.ray.Predictor):
        def __call__(self, batch: Any) -> Any:
            super().__call__(batch)
            return {"outcome": [self._columns.executor(1).weights_cache] * len(batch["id"])}

    outcomes = []
    for _ in range(2):
        table = dataset(ray, images, 1).map_batches(
            Telling, fn_constructor_args=[str(model), "image"],
            fn_constructor_kwargs={"weights_cache": str(tmp_path / "packed")}, **actors(ray, 1)).to_pandas()
        outcomes.append(set(table["outcome"]))
    assert outcomes == [{"saved"}, {"hit"}]


def test_an_actor_that_is_killed_loses_nothing(ray: Any, model: Path, images: np.ndarray, want: np.ndarray) -> None:
    class Slow(xnnfast.ray.Predictor):
        def __call__(self, batch: Any) -> Any:
            time.sleep(0.1)
            made = super().__call__(batch)
            return {**made, "pid": np.full(len(made["id"]), os.getpid())}

    scored = dataset(ray, images, 30).map_batches(
        Slow, fn_constructor_args=[str(model), "image", "scores"], batch_size=10, **actors(ray, 2))
    batches, killed = [], None
    for batch in scored.iter_batches(batch_size=None):
        batches.append(batch)
        if killed is None:
            killed = int(batch["pid"][0])
            os.kill(killed, signal.SIGKILL)
    np.testing.assert_array_equal(by_id(batches), want)
    pids = {int(pid) for batch in batches for pid in batch["pid"]}
    assert killed in pids and len(pids) > 1
