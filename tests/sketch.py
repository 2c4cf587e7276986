"""Programs made by hand for the tests: values, operator calls and delegates in a few lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import files
import numpy as np

import xnnfast
from xnnfast.containers import SCALAR_TYPES

NUMBERS = {dtype: number for number, dtype in SCALAR_TYPES.items()}


class Sketch:
    """A method in the making. Values are named by their index."""

    def __init__(self, name: str = "forward") -> None:
        self.name = name
        self.values: list[dict[str, Any]] = []
        self.operators: list[dict[str, str]] = []
        self.instructions: list[dict[str, Any]] = []
        self.delegates: list[dict[str, Any]] = []
        #: Segment 0 is empty; the constants have one to themselves at the end.
        self.segments: list[bytes] = [b""]
        self.constants: list[bytes] = [b""]
        self.stacks: dict[int, list[dict[str, Any]]] = {}

    # -- values

    def value(self, kind: str, **fields: Any) -> int:
        self.values.append({"val": (kind, fields)})
        return len(self.values) - 1

    def tensor(self, sizes: Sequence[int], dtype: Any = np.float32, *, over: int | None = None, **more: Any) -> int:
        """A planned tensor, in a place of its own, or in that of the value ``over``."""
        if "allocation_info" not in more:
            place = 65536 * (len(self.values) if over is None else over)
            more["allocation_info"] = {"memory_id": 1, "memory_offset_low": place, "memory_offset_high": 0}
        self.values.append(files.tensor(sizes, dtype=NUMBERS[np.dtype(dtype)], **more))
        return len(self.values) - 1

    def constant(self, array: Any, **more: Any) -> int:
        """A tensor whose bytes are in the program."""
        array = np.asarray(array)
        self.constants.append(array.tobytes() + bytes(-array.nbytes % 16 + 16))
        return self.tensor(
            array.shape, array.dtype, allocation_info=None, data_buffer_idx=len(self.constants) - 1, **more
        )

    def number(self, number: Any) -> int:
        """A value that is no tensor."""
        if number is None:
            return self.value("Null")
        if isinstance(number, bool):
            return self.value("Bool", bool_val=number)
        if isinstance(number, int):
            return self.value("Int", int_val=number)
        if isinstance(number, float):
            return self.value("Double", double_val=number)
        if isinstance(number, str):
            return self.value("String", string_val=number)
        if all(isinstance(item, int) for item in number):
            return self.value("IntList", items=[self.number(item) for item in number])
        return self.value("DoubleList", items=list(number))

    def tensors(self, *members: int) -> int:
        return self.value("TensorList", items=list(members))

    # -- instructions

    def kernel(self, name: str, *args: int) -> int:
        """Call an operator by name.overload; the number of the instruction."""
        name, _, overload = name.partition(".")
        operator = {"name": name, "overload": overload}
        if operator not in self.operators:
            self.operators.append(operator)
        return self.instruct("KernelCall", op_index=self.operators.index(operator), args=list(args))

    def unary(self, name: str, x: int, *args: Any, sizes: Sequence[int], dtype: Any = np.float32) -> int:
        """Call an operator of one tensor, numbers and one out; its out."""
        out = self.tensor(sizes, dtype)
        self.kernel(name, x, *map(self.number, args), out, out)
        return out

    def instruct(self, kind: str, **fields: Any) -> int:
        self.instructions.append({"instr_args": (kind, fields)})
        return len(self.instructions) - 1

    def delegate(
        self,
        graph: Callable[..., Any] | bytes,
        inputs: Sequence[int],
        outputs: Sequence[int],
        *,
        id: str = "XnnpackBackend",
    ) -> int:
        """Call a delegate: a function that builds its outputs from builder and inputs, or a payload."""
        if callable(graph):
            builder = xnnfast.GraphBuilder()
            ins = [builder.input(self._sizes(index), self._datatype(index)) for index in inputs]
            outs = graph(builder, *ins)
            for out in outs if isinstance(outs, tuple) else (outs,):
                builder.output(out)
            graph = builder.finish()
        self.segments.append(graph)
        self.delegates.append(files.delegate(len(self.segments) - 1, id=id))
        return self.instruct("DelegateCall", delegate_index=len(self.delegates) - 1, args=[*inputs, *outputs])

    def shift(self, x: int, sizes: Sequence[int], by: float = 1.0) -> int:
        """A delegate that adds a number."""
        out = self.tensor(sizes)
        self.delegate(lambda b, v: b.add(v, b.constant(np.array([by], np.float32))), [x], [out])
        return out

    def _sizes(self, index: int) -> list[int]:
        fields = self.values[index]["val"][1]
        return [fields["sizes"][axis] for axis in fields["dim_order"]] or [1]

    def _datatype(self, index: int) -> str:
        return {6: "fp32", 5: "fp16"}[self.values[index]["val"][1]["scalar_type"]]

    # -- the end

    def plan(self, inputs: Sequence[int], outputs: Sequence[int], **changes: Any) -> dict[str, Any]:
        chain: dict[str, Any] = {"inputs": [], "outputs": [], "instructions": self.instructions}
        if self.stacks:
            chain["stacktrace"] = [{"items": self.stacks.get(number, [])} for number in range(len(self.instructions))]
        return files.plan(
            name=self.name,
            values=self.values,
            inputs=list(inputs),
            outputs=list(outputs),
            chains=[chain],
            operators=self.operators,
            delegates=self.delegates,
            **changes,
        )

    def program(
        self, inputs: Sequence[int], outputs: Sequence[int], *, changes: dict[str, Any] | None = None, **fields: Any
    ) -> bytes:
        """The ``.pte``."""
        offsets, data = [], b""
        for each in self.constants:
            offsets.append(len(data))
            data += each
        constants = {"segment_index": len(self.segments), "offsets": offsets}
        return files.program(
            self.plan(inputs, outputs, **(changes or {})),
            segments=[*self.segments, data],
            **{"constant_segment": constants, **fields},
        )
