from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from ._graph import Constant, Graph, Node, Value
from ._payload import Payload
from .caps import DEFAULT_LIMITS as DEFAULT_LIMITS
from .caps import Limits
from .containers import Section
from .datatypes import DATATYPES as DATATYPES
from .ops import BY_KIND as BY_KIND
from .ops import Op, Refusal

QUANT_TABLES: dict[str, int]
PRIVATE_DATATYPES: frozenset[str]

@final
class KindPlan:
    def __new__(cls, op: Op, fields: Mapping[str, Any]) -> KindPlan: ...

def constant_at(
    payload: Payload, offset: int, nbytes: int, index: int = 0, *, copy: bool | None = None, key: str | None = None
) -> Constant: ...
def bits_of(datatype: str) -> int: ...

@final
class Decoded:
    def __init__(self, *args: object, **kwargs: object) -> None: ...
    values: list[Value]
    nodes: list[Node]
    inputs: list[Value]
    outputs: list[Value]
    notes: list[str]
    source: str
    @property
    def dialect(self) -> str: ...
    @property
    def container(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def mem_buffer_sizes(self) -> tuple[int, ...]: ...
    @property
    def owner(self) -> Payload: ...
    @property
    def limits(self) -> Limits: ...
    def graph(self) -> Graph: ...
    def replace_value(self, old: Value, new: Value) -> None: ...

def read(
    section: Section,
    dialect: str | None = None,
    *,
    copy: bool | None = None,
    quantization: Mapping[int, tuple[float, int]] | None = None,
    limits: Limits = ...,
) -> Decoded: ...
def screen_values(values: tuple[Value, ...]) -> tuple[int, list[Value], list[Value]]: ...
def screen_nodes(graph: Graph) -> bool: ...
def check_nodes(
    graph: Graph, nodes: list[Node], check_op: Callable[[Node, Sequence[Value | None], Sequence[Value]], None]
) -> tuple[list[Node], bool, tuple[Node, Refusal] | None]: ...
def dead_nodes(graph: Graph, nodes: list[Node]) -> tuple[list[Node], set[int]]: ...
