"""What other processes are asked to do with objects that were pickled: importable by its name everywhere."""

from __future__ import annotations

import os
import pickle
import time
from typing import Any

import numpy as np

from xnnfast import Executor, Graph, Program, Runtime, pickling


def run(thing: Any, *arrays: np.ndarray) -> tuple[int, tuple[np.ndarray, ...]]:
    """The process and the results of whatever runs."""
    if isinstance(thing, Graph):
        thing = Runtime(thing)
    assert isinstance(thing, (Runtime, Executor, Program))
    return os.getpid(), tuple(thing.run(*arrays))


def digested(data: bytes) -> tuple[str, int]:
    """What unpickling gives, and how many files were read for digests meanwhile."""
    count = 0
    original = pickling.hashlib.blake2b

    def counting(*args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        return original(*args, **options)

    pickling.hashlib.blake2b = counting  # type: ignore[assignment]
    try:
        return repr(pickle.loads(data)), count
    finally:
        pickling.hashlib.blake2b = original


def refusal(data: bytes) -> Exception | None:
    """What unpickling raises."""
    try:
        pickle.loads(data)
    except Exception as error:
        return error
    return None


def fails(error: Exception) -> None:
    time.sleep(0.01)
    raise error
