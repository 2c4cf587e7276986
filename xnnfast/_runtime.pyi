import os
from collections.abc import Sequence
from typing import Any, SupportsIndex, final

import numpy as np
import numpy.typing as npt

from ._graph import Graph, Value
from .weights_cache import WeightsCache

def empty(shape: SupportsIndex | Sequence[SupportsIndex], dtype: str | npt.DTypeLike = "fp32") -> npt.NDArray[Any]: ...
def isa() -> list[str]: ...
def loop_order(setting: int | None = None) -> int: ...
def l2_bytes() -> int: ...
@final
class Runtime:
    graph: Graph
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    threads: int
    check_finite: bool
    staged: int
    weights_cache: str
    def __init__(
        self,
        graph: Graph,
        *,
        threads: int = 1,
        check_finite: bool = False,
        low_memory: bool = False,
        weights_cache: bool | str | os.PathLike[str] | WeightsCache | None = None,
    ) -> None: ...
    def run(self, *inputs: Any, out: Sequence[npt.NDArray[Any]] | None = None) -> tuple[npt.NDArray[Any], ...]: ...
    def profile(self, *inputs: Any, rounds: int = 10) -> list[tuple[int, str, float]]: ...
    @property
    def memory(self) -> dict[str, int]: ...
    def trim(self) -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> Runtime: ...
    def __exit__(self, *exc: object) -> None: ...
