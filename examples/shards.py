"""What the examples for Ray and Spark share: digits, MobileNetV2, a folder of Parquet shards, and the comparison."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

import numpy as np

import xnnfast

ROOT = Path(__file__).resolve().parent.parent


def arguments(description: str | None) -> argparse.Namespace:
    """The command line of both examples."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for models and shards (default: out)")
    parser.add_argument("--model", type=Path, help="a MobileNetV2 or another model of one image, .pte or .xnn; by "
                        "default one with the shapes of MobileNetV2 and random weights is made")
    parser.add_argument("--images", type=int, default=64, help="random images to run it on (default: 64, 0: none)")
    chosen = parser.parse_args()
    # Workers run elsewhere.
    chosen.out = chosen.out.resolve()
    chosen.out.mkdir(parents=True, exist_ok=True)
    if chosen.images and chosen.model is None:
        chosen.model = mobilenet(chosen.out / "mobilenet_v2.xnn")
    return chosen


def digits(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images that the network has not seen, 64 numbers each, and what they show; trains and writes the network."""
    import digits

    images, unseen, labels, answers = digits.data()
    digits.write(path, digits.train(images, labels))
    return unseen, answers


def mobilenet(path: Path) -> Path:
    """A network with the shapes of MobileNetV2 and random weights."""
    if not path.exists():
        sys.path.insert(0, str(ROOT / "bench"))
        import cases

        cases.build("mobilenet_v2").save(path)
    return path


def sample_shape(model: Path) -> tuple[int, ...]:
    """The shape of the image that a model takes."""
    with xnnfast.Executor(model, workers=1) as executor:
        return executor.inputs[0].shape[1:]


def write_shards(folder: Path, shape: tuple[int, ...], count: int, rows: int = 16) -> Path:
    """Random images as Parquet files of so many rows: an id, and the image as a fixed-size list."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.parquet"):
        old.unlink()
    size = int(np.prod(shape))
    for start in range(0, count, rows):
        numbers = np.arange(start, min(start + rows, count))
        flat = np.random.default_rng(start).standard_normal((len(numbers), size), np.float32)
        table = pa.table({"id": numbers, "image": pa.FixedSizeListArray.from_arrays(pa.array(flat.ravel()), size)})
        # Noise does not compress.
        pq.write_table(table, folder / f"{start:06d}.parquet", compression="none", use_dictionary=False)
    return folder


def read_shards(folder: Path, shape: tuple[int, ...]) -> np.ndarray:
    """All images of a folder, by id."""
    import pyarrow.parquet as pq

    table = pq.read_table(folder).sort_by("id")
    return np.concatenate([chunk.flatten().to_numpy() for chunk in table["image"].chunks]).reshape(-1, *shape)


def compare(what: str, model: Path, images: np.ndarray, found: dict[int, np.ndarray]) -> None:
    """Every row as Executor.run gives it, none missing, none twice; else the example ends with status 1."""
    with xnnfast.Executor(model) as executor:
        (want,) = executor.run(images)
    if sorted(found) != list(range(len(images))):
        sys.exit(f"{what}: need {len(images)} rows, found {len(found)}")
    wrong = [number for number, row in found.items() if not np.array_equal(row, want[number])]
    if wrong:
        sys.exit(f"{what}: {len(wrong)} of {len(images)} rows differ, the first is {wrong[0]}")
    print(f"{what}: {len(images)} rows, all as Executor.run gives them")


def end_once(mark: str) -> None:
    """End this process without a word, unless the file of that name tells that it has been done."""
    try:
        os.write(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY), str(os.getpid()).encode())
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def tell_killed(what: str, mark: Path, expected: bool) -> None:
    """Which worker was killed. None is an error where the images were enough for it."""
    if mark.exists():
        print(f"{what}: the worker with pid {mark.read_text()} was killed in between")
    elif expected:
        sys.exit(f"{what}: no worker was killed")
