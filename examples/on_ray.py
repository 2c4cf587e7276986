"""Digits and MobileNetV2 on a Ray cluster of two workers on this machine, one of which is killed in between.

    pip install 'xnnfast[ray,example]'
    python examples/on_ray.py [--model mobilenet_v2.pte] [--images 64]

Status 1 if a row is missing or differs from what Executor.run gives for it.
"""

from __future__ import annotations

import os

import ray
import shards

import xnnfast.ray


class DiesOnce(xnnfast.ray.Predictor):
    """As Predictor, but the first actor that comes to a second batch is killed, before rows of the first were sent."""

    def __init__(self, *args, mark: str, **options):
        super().__init__(*args, **options)
        self.mark, self.calls = mark, 0

    def __call__(self, batch):
        self.calls += 1
        if self.calls == 2:
            shards.end_once(self.mark)
        return super().__call__(batch)


def main() -> None:
    chosen = shards.arguments(__doc__)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Workers import this file's neighbours.
    folder = os.path.dirname(os.path.abspath(__file__))
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(
        filter(None, (os.environ.get("PYTHONPATH"), folder)))}})
    ray.data.DataContext.get_current().enable_progress_bars = False

    # One actor with both CPUs.
    network = chosen.out / "digits.xnn"
    unseen, answers = shards.digits(network)
    dataset = ray.data.from_items([{"id": number, "image": image} for number, image in enumerate(unseen)])
    scored = dataset.map_batches(
        xnnfast.ray.Predictor, fn_constructor_args=[str(network)], fn_constructor_kwargs={"inputs": "image",
        "outputs": "scores"}, num_cpus=2, compute=ray.data.ActorPoolStrategy(size=1), batch_size=256)  # fmt: skip
    found = {row["id"]: row["scores"] for row in scored.iter_rows()}
    shards.compare("digits", network, unseen, found)
    right = sum(int(row.argmax() == answers[number]) for number, row in found.items())
    print(f"digits: {right} of {len(answers)} right")

    if chosen.images:
        # Two actors with a CPU each, over a folder of Parquet shards. They keep their CPUs: with no third one, reading
        # has to come first.
        shape = shards.sample_shape(chosen.model)
        images = shards.write_shards(chosen.out / "shards", shape, chosen.images)
        mark = chosen.out / "killed"
        mark.unlink(missing_ok=True)
        # A block for each shard: Ray would put small files together, and have nothing for the second actor.
        blocks = ray.data.read_parquet(str(images)).repartition(len(list(images.glob("*.parquet"))))
        scored = blocks.materialize().map_batches(
            DiesOnce, fn_constructor_args=[str(chosen.model)], fn_constructor_kwargs={"inputs": "image",
            "outputs": "logits", "weights_cache": str(chosen.out / "packed/"), "mark": str(mark)}, num_cpus=1,
            compute=ray.data.ActorPoolStrategy(size=2), batch_size=8)  # fmt: skip
        found = {}
        for batch in scored.iter_batches(batch_size=None):
            for number, row in zip(batch["id"].tolist(), batch["logits"]):
                if number in found:
                    raise SystemExit(f"mobilenet: row {number} came twice")
                found[number] = row
        shards.tell_killed("mobilenet", mark, expected=chosen.images >= 16)
        shards.compare("mobilenet", chosen.model, shards.read_shards(images, shape), found)
    ray.shutdown()


if __name__ == "__main__":
    main()
