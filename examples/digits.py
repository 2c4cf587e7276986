"""Handwritten digits, from training to answers out of a graph file.

Trains a small network on the digits that come with scikit-learn, writes it as an XNNPACK graph file,
maps that file and classifies images the network has not seen, in batches. Status 1 if fewer than 96 %
are right, or if any constant had to be copied on its way from the file into XNNPACK.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier
from threadpoolctl import threadpool_limits

import xnnfast

NEEDED_ACCURACY = 0.96
HIDDEN = 256
BATCH = 32
SEED = 7


def data() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Images of 8x8 pixels as rows of 64 numbers 0..1, and what they show: to train with, and held out."""
    digits = load_digits()
    images = (digits.data / 16).astype(np.float32)
    return train_test_split(images, digits.target, test_size=0.25, random_state=SEED, stratify=digits.target)


def train(images: np.ndarray, labels: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Weights and biases of each layer."""
    network = MLPClassifier(
        (HIDDEN,), activation="relu", alpha=1e-3, learning_rate_init=2e-3, max_iter=100, random_state=SEED
    )
    # One thread: these matrices are small, and sums come out the same everywhere.
    with threadpool_limits(1), warnings.catch_warnings():
        # It is good enough long before it stops changing.
        warnings.simplefilter("ignore", ConvergenceWarning)
        network.fit(images, labels)
    return [
        (weights.astype(np.float32), bias.astype(np.float32))
        for weights, bias in zip(network.coefs_, network.intercepts_)
    ]


def write(path: Path, layers: list[tuple[np.ndarray, np.ndarray]]) -> None:
    """The network as a graph file: every layer is one node, ReLU included, then softmax."""
    builder = xnnfast.GraphBuilder()
    x = builder.input((BATCH, layers[0][0].shape[0]))
    for i, (weights, bias) in enumerate(layers):
        last = i == len(layers) - 1
        # XNNPACK wants one row of weights per output.
        x = builder.fully_connected(x, np.ascontiguousarray(weights.T), bias, clamp=None if last else (0, None))
    builder.output(builder.softmax(x))
    builder.save(path)


def classify(runtime: xnnfast.Runtime, images: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """What each image shows. Batches are slices of the arrays, so nothing is copied; the last one may be shorter."""
    for start in range(0, len(images), BATCH):
        batch = slice(start, start + BATCH)
        runtime.run(images[batch], out=[scores[batch]])
    return scores.argmax(axis=1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("out"), metavar="DIR", help="folder for digits.xnn (default: out)"
    )
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "digits.xnn"

    images, unseen, labels, answers = data()
    started = time.perf_counter()
    write(path, train(images, labels))
    seconds = time.perf_counter() - started
    print(f"trained on {len(images)} images in {seconds:.1f} s, wrote {path} ({path.stat().st_size} bytes)")

    graph = xnnfast.load(path)
    print(f"mapped {path}: {graph}")
    # Arrays of this kind have readable bytes behind the last element, which XNNPACK's kernels need.
    unseen_padded, scores = xnnfast.empty(unseen.shape), xnnfast.empty((len(unseen), 10))
    unseen_padded[:] = unseen
    with xnnfast.Runtime(graph) as runtime:
        found = classify(runtime, unseen_padded, scores)
        rounds, started = 0, time.perf_counter()
        while rounds < 10 or time.perf_counter() - started < 0.5:
            classify(runtime, unseen_padded, scores)
            rounds += 1
        speed = rounds * len(unseen) / (time.perf_counter() - started)
        staged = runtime.staged

    accuracy = float((found == answers).mean())
    used, total = graph.zero_copy
    print(f"accuracy: {accuracy:.4f} on {len(unseen)} held-out images")
    print(f"images per second: {speed:,.0f} in batches of {BATCH}, one thread")
    print(f"constants used in place: {used} of {total}; batches copied on their way in or out: {staged}")

    if accuracy < NEEDED_ACCURACY:
        print(f"accuracy must be at least {NEEDED_ACCURACY}", file=sys.stderr)
        return 1
    if used < total:
        for constant in graph.constants:
            if not constant.in_place:
                print(f"constant {constant.index} was copied: {constant.reason}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
