from collections.abc import Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

from ._graph import Graph, Value
from .batching import Layout
from .lower import Lowered

_Array = npt.NDArray[Any]
_Request = tuple[tuple[_Array, ...], tuple[_Array, ...], int]

@final
class Crew:
    graph: Graph
    lowered: Lowered
    workers: int
    threads: int
    dtypes: tuple[np.dtype[Any], ...]
    layouts: tuple[Layout | None, ...]
    def __init__(
        self,
        graph: Graph,
        lowered: Lowered,
        *,
        workers: int,
        threads: int = 1,
        flags: int = 0,
        cpus: Sequence[int] | None = None,
        weights_cache: Any = None,
    ) -> None: ...
    @property
    def weights_cache(self) -> str: ...
    @property
    def stale(self) -> bool: ...
    @property
    def memory(self) -> dict[str, int]: ...
    def shapes(self, variant: tuple[Any, ...], count: int) -> dict[int, tuple[int, ...]]: ...
    def has_zero(self, variant: tuple[Any, ...]) -> bool: ...
    def output_shapes(self, variant: tuple[Any, ...], count: int) -> list[tuple[int, ...]]: ...
    def new_outputs(self, variant: tuple[Any, ...], count: int) -> tuple[_Array, ...]: ...
    def plan(self, member: int) -> None: ...
    def run(
        self,
        requests: list[_Request],
        variant: tuple[Any, ...],
        micro: int,
        start: int,
        stop: int,
        *,
        members: int = 0,
        pooled: bool = False,
    ) -> tuple[int, ...]: ...
    def trim(self) -> None: ...
    def close(self) -> None: ...

def output_dtype(graph: Graph, value: Value) -> np.dtype[Any]: ...
def is_ready(array: _Array) -> bool: ...
