"""GraphBuilder: a graph made by calls, one method per operator, with shapes and datatypes worked out on the way.

In come NumPy arrays and the Values that earlier calls returned; out goes a validated Graph, or a
file in any dialect.

>>> import numpy as np
>>> b = GraphBuilder()
>>> x = b.input((1, 8))
>>> b.output(b.add(x, np.ones((1, 8), np.float32), clamp=(0, 6)))
Value(id=2, fp32, 1x8)
>>> payload = b.finish()
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import IO, TYPE_CHECKING, Any, NamedTuple, TypedDict

import numpy as np

from . import datatypes as _datatypes
from . import writer as _writer
from ._graph import Constant, Graph, Node, Value
from .errors import ArgumentError, DtypeError, GraphError, ShapeError
from .ops import OPS, Refusal, check_op, operand_type
from .ops._rules import (
    ALIGN_CORNERS,
    KEEP_DIMS,
    LEGACY_MODE,
    MAX_RANK,
    SAME_PADDING,
    TRANSPOSE_B,
    TRANSPOSE_WEIGHTS,
)
from .quantization import PerBlock, PerChannel, PerTensor, PerToken, bf16_to_f32, f32_to_bf16, pack_int4

if TYPE_CHECKING:
    import os
    from typing import TypeAlias

    from typing_extensions import Unpack

    from .ops import Op
    from .quantization import Quantization

    Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
    #: Where a value is wanted: one of this builder's, an array that becomes a constant, or a number.
    Operand: TypeAlias = Value | Array | float
    Size: TypeAlias = int | Sequence[int]
    Limits: TypeAlias = tuple[float | None, float | None]

__all__ = ["GraphBuilder"]

#: NumPy dtype -> datatype of a constant, by the kind of quantization given with it.
_NAMES: dict[tuple[np.dtype[Any], str], str] = {
    (np.dtype(np.float32), "none"): "fp32",
    (np.dtype(np.float16), "none"): "fp16",
    (np.dtype(np.int32), "none"): "int32",
    (np.dtype(np.int8), "tensor"): "qint8",
    (np.dtype(np.uint8), "tensor"): "quint8",
    (np.dtype(np.int32), "tensor"): "qint32",
    (np.dtype(np.int8), "channel"): "qcint8",
    (np.dtype(np.int32), "channel"): "qcint32",
    (np.dtype(np.int8), "block"): "qbint4",
    (np.dtype(np.uint8), "block"): "qbint4",
}

_CATEGORIES = {PerTensor: "tensor", PerChannel: "channel", PerBlock: "block", PerToken: "token"}
_NEED = {"none": "None"} | {category: kind.__name__ for kind, category in _CATEGORIES.items()}

#: Operators that move numbers or choose among them, so that a result has its input's parameters.
_KEEPS_PARAMETERS = frozenset(
    ["clamp", "copy", "max_pooling2d", "global_average_pooling2d", "static_transpose", "static_reshape", "static_slice",
     "static_constant_pad", "static_resize_bilinear2d", *(f"concatenate{count}" for count in (2, 3, 4, 5))])


class Options(TypedDict, total=False):
    """What every operator's method takes besides its own arguments.

    The result's datatype is the first input's unless the operator can't give that one; a quantized
    result needs its parameters, except from operators that only move numbers.
    """

    #: A value made by :meth:`GraphBuilder.value` to hold the result.
    output: Value | None
    datatype: str | None
    quantization: Quantization | None
    #: A value whose datatype and quantization the result gets.
    like: Value | None
    debug_handle: int


class ClampOptions(Options, total=False):
    """For operators that can limit their result."""

    #: Lowest and highest result; None on either side leaves it open.
    clamp: Limits | None


class GraphBuilder:
    """Makes a graph. Values belong to the builder that made them; everything is checked as it is added.

    Notes
    -----
    There is one method per operator. Each takes operands (values of this builder, arrays that become constants, numbers
    beside an fp32 or fp16 value) and, by name, what every operator takes:

    * ``output``: a value made by :meth:`value` to hold the result;
    * ``datatype``, ``quantization``: the result's, the first input's if left out; quantized results need parameters,
      except from operators that only move numbers;
    * ``like``: a value whose datatype and quantization the result gets;
    * ``debug_handle``: a number of yours that messages and profiles repeat;
    * ``clamp``: lowest and highest result, None for an open side; only where the method's text says so.
    """

    def __init__(self) -> None:
        self._values: list[Value] = []
        self._nodes: list[Node] = []
        # Ids of inputs and outputs, with the external id where one was asked for.
        self._inputs: dict[int, int | None] = {}
        self._outputs: dict[int, int | None] = {}
        self._produced: set[int] = set()

    # ---- values

    def input(self, shape: Sequence[int], datatype: str = "fp32", quantization: Quantization | None = None,
              *, external_id: int | None = None, dq_datatype: str | None = None) -> Value:
        """A value that the caller of the graph provides.

        Parameters
        ----------
        shape : sequence of int
            As declared. Runs may bring others, where the operators permit it.
        datatype : str, default "fp32"
            XNNPACK's name: docs/operators.md has those of each operator.
        quantization : PerTensor or PerToken, optional
            Needed for quantized datatypes.
        external_id : int, optional
            External ids count up from 0, inputs before outputs, each in the order of the calls, where they are
            not given.
        dq_datatype : str, optional
            With ``"qint8"`` (dialect xn00) the value comes in as declared and is quantized on its way to the
            operators.

        Returns
        -------
        Value

        Raises
        ------
        DtypeError, ShapeError, GraphError
            There is no such datatype or shape, or the parameters do not go with it.
        """
        value = self._add(datatype, shape, quantization, is_input=True, dq_datatype=dq_datatype)
        self._inputs[value.id] = external_id
        return value

    def value(self, shape: Sequence[int], datatype: str = "fp32", quantization: Quantization | None = None) -> Value:
        """A value for an operator to write: pass it as ``output=``. Only needed to declare one by hand.

        Parameters
        ----------
        shape, datatype, quantization
            As for :meth:`input`.

        Returns
        -------
        Value

        Raises
        ------
        DtypeError, ShapeError, GraphError
            As for :meth:`input`.
        """
        return self._add(datatype, shape, quantization)

    def constant(self, array: Array, datatype: str | None = None, quantization: Quantization | None = None) -> Value:
        """A value with fixed elements, copied from the array.

        Parameters
        ----------
        array : array_like
            4-bit types take int8 numbers -8..7, or uint8 rows that are packed already.
        datatype : str, optional
            Follows from the dtype and the kind of quantization where it is not given.
        quantization : PerTensor, PerChannel or PerBlock, optional
            Needed for quantized datatypes.

        Returns
        -------
        Value

        Raises
        ------
        DtypeError
            There is no datatype for such an array.
        ShapeError, GraphError
            Rows of an odd number of 4-bit elements, numbers out of range, parameters that do not fit.
        """
        array = np.asarray(array)
        datatype = _constant_datatype(array, datatype, quantization)
        entry = _datatypes.DATATYPES[datatype]
        shape = array.shape
        if entry.bits == 4:
            if array.dtype == np.uint8:
                shape = (*shape[:-1], shape[-1] * 2) if shape else shape
            else:
                if not shape or shape[-1] % 2:
                    raise ShapeError(f"need an even number of elements in a row of {datatype}, found "
                                     f"{_text(shape)}: XNNPACK would read the rows after the first wrongly",
                                     expected="even", got=shape[-1] if shape else None)
                try:
                    array = pack_int4(array)
                except ValueError as error:
                    raise GraphError(str(error)) from None
        return self._add(datatype, shape, quantization, constant=_owned(array))

    def output(self, value: Value, *, external_id: int | None = None) -> Value:
        """Declares a value as a result of the graph.

        Parameters
        ----------
        value : Value
            One that an operator writes, or an input.
        external_id : int, optional
            As for :meth:`input`.

        Returns
        -------
        Value
            The same.

        Raises
        ------
        GraphError
            It is constant, an output already, or of another builder.
        """
        self._own(value)
        if value.constant is not None:
            raise GraphError(f"need a value that a node or the caller writes, value {value.id} is constant",
                             value=value.id)
        if value.id in self._outputs:
            raise GraphError(f"value {value.id} is an output already", value=value.id)
        self._outputs[value.id] = external_id
        return value

    def _add(self, datatype: str, shape: Sequence[int], quantization: Quantization | None, **fields: Any) -> Value:
        if datatype not in _datatypes.DATATYPES:
            raise DtypeError(f"need a datatype of {', '.join(_datatypes.DATATYPES)}, found {datatype!r}",
                             expected=tuple(_datatypes.DATATYPES), got=datatype)
        shape = _shape(shape)
        quantization = _parameters(datatype, shape, quantization)
        value = Value(len(self._values), datatype, shape, quantization=quantization, **fields)
        self._values.append(value)
        return value

    def _own(self, value: Value) -> Value:
        if not isinstance(value, Value):
            raise ArgumentError(f"need a Value of this builder, found {type(value).__name__}")
        if not (0 <= value.id < len(self._values) and self._values[value.id] is value):
            raise GraphError(f"{value!r} was not made by this builder", value=value.id)
        return value

    def _operand(self, operand: Operand, partner: Value | None = None) -> Value:
        """The value of an operand; arrays become constants, and numbers constants of the partner's datatype."""
        if isinstance(operand, Value):
            return self._own(operand)
        if isinstance(operand, (np.ndarray, np.generic)):
            # Files have no values of rank 0.
            return self.constant(np.atleast_1d(operand))
        if isinstance(operand, (int, float)) and not isinstance(operand, bool):
            if partner is None or partner.datatype not in ("fp32", "fp16"):
                raise ArgumentError(f"need an array or a Value where no fp32 or fp16 value stands beside it, found the "
                                    f"number {operand!r}")
            return self.constant(np.array([operand], partner.dtype))
        raise ArgumentError(f"need a Value, a NumPy array or a number, found {type(operand).__name__}")

    # ---- nodes

    def node(self, name: str, inputs: Sequence[Operand | None], attrs: Mapping[str, Any] | None = None, *,
             flags: int = 0, clamp: Limits | None = None, output: Value | None = None, datatype: str | None = None,
             quantization: Quantization | None = None, like: Value | None = None,
             debug_handle: int = 0) -> tuple[Value, ...]:
        """The values that a new node writes. The operators' methods are short forms of this one.

        Parameters
        ----------
        name : str
            The operator: ``"fully_connected"``.
        inputs : sequence of Value, array, number or None
            In the order of ``xnnfast.ops.OPS[name].inputs``, None for one that is left out.
        attrs : mapping of str to int, float or sequence of int, optional
            The other fields of the node's table, under the schema's names.
        flags : int
            XNNPACK's bits.
        clamp, output, datatype, quantization, like, debug_handle
            What the class says of all operators.

        Returns
        -------
        tuple of Value

        Raises
        ------
        ArgumentError
            There is no such operator, or it does not take such arguments.
        ShapeError, GraphError, DtypeError
            XNNPACK would not compute that node; the message says which rule it breaks.
        """
        op = OPS.get(name)
        if op is None or op.kind is None:
            raise ArgumentError(f"need an operator that files can hold, found {name!r}")
        if len(inputs) != len(op.inputs):
            raise ArgumentError(f"{name} needs {len(op.inputs)} inputs ({', '.join(op.inputs)}), found {len(inputs)}")
        if clamp is not None and not op.takes_clamp:
            raise ArgumentError(f"{name} has no limits; use clamp() on its result")
        if flags & ~op.flags:
            raise ArgumentError(f"{name} knows flags {op.flags:#x}, found {flags:#x}")
        if like is not None:
            if datatype is not None or quantization is not None:
                raise ArgumentError("need like, or datatype and quantization, found both")
            datatype, quantization = self._own(like).datatype, like.quantization
        if output is not None:
            self._free(output)
            if len(op.outputs) != 1:
                raise ArgumentError(f"{name} has {len(op.outputs)} outputs and can't take output=")
            if datatype is not None or quantization is not None:
                raise ArgumentError("need output, or what a new one is to be like, found both")
            datatype, quantization = output.datatype, output.quantization
        before = len(self._values)
        try:
            node, outs = self._node(op, inputs, _attributes(op, attrs or {}), flags, _limits(clamp), output, datatype,
                                    quantization, debug_handle)
        except BaseException:
            # Constants made for the node go with it.
            del self._values[before:]
            raise
        self._produced.update(node.outputs)
        self._nodes.append(node)
        return tuple(outs)

    def _node(self, op: Op, inputs: Sequence[Operand | None], attrs: dict[str, Any], flags: int,
              clamp: tuple[float, float] | None, output: Value | None, datatype: str | None,
              quantization: Quantization | None, debug_handle: int) -> tuple[Node, list[Value]]:
        """The node and its results, checked by all the rules of the operator's row."""
        partner = next((operand for operand in inputs if isinstance(operand, Value)), None)
        ins: list[Value | None] = []
        for field, operand in zip(op.inputs, inputs):
            if operand is None and field not in op.optional:
                raise ArgumentError(f"{op.name} can't go without {field}")
            ins.append(None if operand is None else self._operand(operand, partner))
        first = len(self._values) if output is None else output.id
        node = Node(op, tuple(None if value is None else value.id for value in ins),
                    tuple(range(first, first + len(op.outputs))), attrs, flags=flags, clamp=clamp,
                    debug_handle=debug_handle, index=len(self._nodes))
        try:
            shapes = op.shape(node, [None if value is None else value.shape for value in ins])
        except Refusal as refusal:
            raise ShapeError(f"{node.where}: {refusal}") from None
        if output is not None and output.shape != shapes[0]:
            raise ShapeError(f"{node.where}: the output given is {_text(output.shape)}, the operator gives "
                             f"{_text(shapes[0])}", expected=shapes[0], got=output.shape)
        try:
            types = _result_types(node, ins, datatype)
            outs = [output] if output is not None else [
                self._add(result, shape, self._result_parameters(node, ins[0], result, quantization))
                for shape, result in zip(shapes, types)]
            check_op(node, ins, outs)
        except Refusal as refusal:
            raise GraphError(f"{node.where}: {refusal}", node=node.index) from None
        return node, outs

    def _result_parameters(self, node: Node, source: Value | None, datatype: str,
                           quantization: Quantization | None) -> Quantization | None:
        if quantization is not None or _datatypes.DATATYPES[datatype].quantization == "none":
            return quantization
        if node.op.name in _KEEPS_PARAMETERS and source is not None and source.datatype == datatype:
            kept: Quantization | None = source.quantization
            return kept
        raise GraphError(f"{node.where} needs quantization= or like= for its {datatype} result", node=node.index)

    def _free(self, output: Value) -> None:
        """Refuses a value that something writes already."""
        self._own(output)
        taken = ("a constant" if output.constant is not None else "an input" if output.is_input
                 else "written by another node" if output.id in self._produced else None)
        if taken:
            raise GraphError(f"need a value that nothing writes as output=, value {output.id} is {taken}",
                             value=output.id)

    # ---- the graph

    def parts(self) -> _writer.Parts:
        """The values and nodes so far, as the writer takes them; nothing is checked as a whole.

        Returns
        -------
        Parts
        """
        external = self._external_ids()
        values = []
        for value in self._values:
            if value.id in external:
                value = value.replace(external_id=external[value.id], is_output=value.id in self._outputs)
            values.append(value)
        # Ascending external ids are the order that a reader of the file will see.
        return _writer.Parts(tuple(values), tuple(self._nodes),
                             *(tuple(values[value] for value in sorted(group, key=external.__getitem__))
                               for group in (self._inputs, self._outputs)))

    def _external_ids(self) -> dict[int, int]:
        external: dict[int, int] = {}
        taken: dict[int, int] = {}
        for group in (self._inputs, self._outputs):
            for value, wanted in group.items():
                if wanted is None:
                    continue
                wanted = operator.index(wanted)
                if taken.setdefault(wanted, value) != value:
                    raise GraphError(f"values {taken[wanted]} and {value} both have the external id {wanted}",
                                     value=value)
                if external.setdefault(value, wanted) != wanted:
                    raise GraphError(f"value {value} is an input with external id {external[value]} and an output with "
                                     f"{wanted}, which must agree", value=value)
        free = (number for number in range(len(self._inputs) + len(self._outputs)) if number not in taken)
        for value in (*self._inputs, *self._outputs):
            if value not in external:
                external[value] = next(free)
        return external

    def graph(self, *, dialect: str = "xn01") -> Graph:
        """The validated graph, in memory. The builder may go on; the graph won't follow.

        Parameters
        ----------
        dialect : "xn01", "xn00" or "seed"
            Whose rules the graph has to satisfy.

        Returns
        -------
        Graph

        Raises
        ------
        GraphError, ShapeError, UnsupportedError
            It makes no sense as a whole: no outputs, say.
        """
        return Graph(*self.parts(), dialect=dialect)

    def finish(self, *, dialect: str = "xn01", container: str | None = None, scales: str | None = None,
               version: str | None = None) -> bytes:
        """The validated graph as a file's bytes.

        Parameters
        ----------
        dialect : "xn01", "xn00" or "seed"
        container : "XH00" or "bare", optional
            xn01 always has the header; the seed never; xn00 has none unless asked for.
        scales : "inline" or "constant", optional
            Where scales of channels and blocks go: into the value's table, or among the constants. Left out,
            channels are inline and blocks are constants.
        version : str, optional
            The version text; left out, what the dialect's own writers store.

        Returns
        -------
        bytes

        Raises
        ------
        GraphError, ShapeError
            As for :meth:`graph`.
        UnsupportedError
            The dialect has no word for something in the graph, such as any operator but add in the seed.
        """
        return _writer.to_bytes(self.graph(dialect=dialect), dialect=dialect, container=container, scales=scales,
                                version=version)

    def save(self, target: str | os.PathLike[str] | IO[bytes], *, dialect: str = "xn01", container: str | None = None,
             scales: str | None = None, version: str | None = None) -> int:
        """Writes the validated graph to a file, whole or not at all.

        Parameters
        ----------
        target : path or binary file
            A path gets its content by renaming: the bytes go to a temporary file beside it, which is flushed to disk.
        dialect, container, scales, version
            As for :meth:`finish`.

        Returns
        -------
        int
            The number of bytes.

        Raises
        ------
        OSError
            The disk is full, or may not be written.
        GraphError, ShapeError, UnsupportedError
            As for :meth:`finish`.
        """
        return _writer.write(target, self.graph(dialect=dialect), dialect=dialect, container=container, scales=scales,
                             version=version)

    # ---- operators of two inputs

    def add(self, a: Operand, b: Operand, **options: Unpack[ClampOptions]) -> Value:
        return self.node("add", [a, b], **options)[0]

    def subtract(self, a: Operand, b: Operand, **options: Unpack[ClampOptions]) -> Value:
        return self.node("subtract", [a, b], **options)[0]

    def multiply(self, a: Operand, b: Operand, **options: Unpack[ClampOptions]) -> Value:
        return self.node("multiply", [a, b], **options)[0]

    def divide(self, a: Operand, b: Operand, **options: Unpack[ClampOptions]) -> Value:
        return self.node("divide", [a, b], **options)[0]

    def minimum(self, a: Operand, b: Operand, **options: Unpack[Options]) -> Value:
        return self.node("minimum", [a, b], **options)[0]

    def maximum(self, a: Operand, b: Operand, **options: Unpack[Options]) -> Value:
        return self.node("maximum", [a, b], **options)[0]

    def prelu(self, x: Operand, slope: Operand, **options: Unpack[Options]) -> Value:
        return self.node("prelu", [x, slope], **options)[0]

    # ---- operators of one input

    def clamp(self, x: Operand, low: float | None, high: float | None, **options: Unpack[Options]) -> Value:
        return self.node("clamp", [x], clamp=(low, high), **options)[0]

    def sigmoid(self, x: Operand, **options: Unpack[Options]) -> Value:
        return self.node("sigmoid", [x], **options)[0]

    def floor(self, x: Operand, **options: Unpack[Options]) -> Value:
        return self.node("floor", [x], **options)[0]

    def square_root(self, x: Operand, **options: Unpack[Options]) -> Value:
        return self.node("square_root", [x], **options)[0]

    def reciprocal_square_root(self, x: Operand, **options: Unpack[Options]) -> Value:
        return self.node("reciprocal_square_root", [x], **options)[0]

    def ceiling(self, x: Operand, **options: Unpack[Options]) -> Value:
        return self.node("ceiling", [x], **options)[0]

    def gelu(self, x: Operand, **options: Unpack[Options]) -> Value:
        return self.node("gelu", [x], **options)[0]

    def hardswish(self, x: Operand, **options: Unpack[Options]) -> Value:
        return self.node("hardswish", [x], **options)[0]

    def log(self, x: Operand, **options: Unpack[Options]) -> Value:
        return self.node("log", [x], **options)[0]

    def negate(self, x: Operand, **options: Unpack[Options]) -> Value:
        return self.node("negate", [x], **options)[0]

    def square(self, x: Operand, **options: Unpack[Options]) -> Value:
        return self.node("square", [x], **options)[0]

    def abs(self, x: Operand, **options: Unpack[Options]) -> Value:
        return self.node("abs", [x], **options)[0]

    def sine(self, x: Operand, **options: Unpack[Options]) -> Value:
        return self.node("sine", [x], **options)[0]

    def cosine(self, x: Operand, **options: Unpack[Options]) -> Value:
        return self.node("cosine", [x], **options)[0]

    def exp(self, x: Operand, **options: Unpack[Options]) -> Value:
        return self.node("exp", [x], **options)[0]

    def tanh(self, x: Operand, **options: Unpack[Options]) -> Value:
        return self.node("tanh", [x], **options)[0]

    def leaky_relu(self, x: Operand, negative_slope: float = 0.01, **options: Unpack[Options]) -> Value:
        return self.node("leaky_relu", [x], {"negative_slope": negative_slope}, **options)[0]

    def elu(self, x: Operand, alpha: float = 1.0, **options: Unpack[Options]) -> Value:
        return self.node("elu", [x], {"alpha": alpha}, **options)[0]

    def convert(self, x: Operand, datatype: str | None = None, quantization: Quantization | None = None, *,
                output: Value | None = None, like: Value | None = None, debug_handle: int = 0) -> Value:
        """``"qdint8"`` with ``PerToken(n)`` quantizes each run's rows of the last n axes by themselves."""
        return self.node("convert", [x], datatype=datatype, quantization=quantization, output=output, like=like,
                         debug_handle=debug_handle)[0]

    def copy(self, x: Operand, **options: Unpack[Options]) -> Value:
        return self.node("copy", [x], **options)[0]

    def softmax(self, x: Operand, **options: Unpack[Options]) -> Value:
        return self.node("softmax", [x], **options)[0]

    # ---- matrix products and convolutions

    def fully_connected(self, x: Operand, filter: Operand, bias: Operand | None = None, *,
                        transpose_weights: bool = False, **options: Unpack[ClampOptions]) -> Value:
        x, filter = self._operand(x), self._operand(filter)
        return self.node("fully_connected", [x, filter, self._bias(x, filter, bias)],
                         flags=TRANSPOSE_WEIGHTS if transpose_weights else 0, **options)[0]

    def batch_matrix_multiply(self, a: Operand, b: Operand, *, transpose_b: bool = False,
                              **options: Unpack[Options]) -> Value:
        return self.node("batch_matrix_multiply", [a, b], flags=TRANSPOSE_B if transpose_b else 0, **options)[0]

    def scaled_dot_product_attention(self, query: Operand, key: Operand, value: Operand,
                                     scale: Operand | None = None, mask: Operand | None = None,
                                     **options: Unpack[Options]) -> Value:
        query, key = self._operand(query), self._operand(key)
        if len(query.shape) != 4 or len(key.shape) not in (3, 4):
            raise ShapeError(f"need a query of rank 4 and a key of rank 3 or 4, found {_text(query.shape)} and "
                             f"{_text(key.shape)}")
        if scale is None:
            scale = 1 / math.sqrt(query.shape[-1])
        if isinstance(scale, (int, float)):
            scale = np.full(query.shape[-1], scale, query.dtype)
        if mask is None:
            mask = np.zeros((query.shape[-2], key.shape[-2]), query.dtype)
        return self.node("scaled_dot_product_attention", [query, key, value, scale, mask], **options)[0]

    def conv2d(self, x: Operand, filter: Operand, bias: Operand | None = None, *, padding: Size = 0, stride: Size = 1,
               dilation: Size = 1, groups: int = 1, same_padding: bool = False,
               **options: Unpack[ClampOptions]) -> Value:
        x, filter = self._operand(x), self._operand(filter)
        outputs, height, width, inputs = _rank4("a conv2d filter", filter)
        return self.node("conv2d", [x, filter, self._bias(x, filter, bias)],
                         _window(height, width, padding, stride, dilation) | {
                             "groups": groups, "group_input_channels": inputs,
                             "group_output_channels": _divided(outputs, groups)},
                         flags=SAME_PADDING if same_padding else 0, **options)[0]

    def depthwise_conv2d(self, x: Operand, filter: Operand, bias: Operand | None = None, *, padding: Size = 0,
                         stride: Size = 1, dilation: Size = 1, same_padding: bool = False,
                         **options: Unpack[ClampOptions]) -> Value:
        x, filter = self._operand(x), self._operand(filter)
        _, height, width, outputs = _rank4("a depthwise_conv2d filter", filter)
        channels = _rank4("the input of depthwise_conv2d", x)[3]
        return self.node("depthwise_conv2d", [x, filter, self._bias(x, filter, bias)],
                         _window(height, width, padding, stride, dilation) | {
                             "groups": channels, "group_input_channels": 1,
                             "group_output_channels": _divided(outputs, channels)},
                         flags=SAME_PADDING if same_padding else 0, **options)[0]

    def conv_transpose2d(self, x: Operand, filter: Operand, bias: Operand | None = None, *, padding: Size = 0,
                         stride: Size = 1, dilation: Size = 1, groups: int = 1, adjustment: Size = 0,
                         **options: Unpack[ClampOptions]) -> Value:
        x, filter = self._operand(x), self._operand(filter)
        outputs, height, width, inputs = _rank4("a conv_transpose2d filter", filter)
        more = dict(zip(("adjustment_height", "adjustment_width"), _pair("adjustment", adjustment)))
        return self.node("conv_transpose2d", [x, filter, self._bias(x, filter, bias)],
                         _window(height, width, padding, stride, dilation) | more | {
                             "groups": groups, "group_input_channels": inputs,
                             "group_output_channels": _divided(outputs, groups)}, **options)[0]

    def _bias(self, x: Value, filter: Value, bias: Operand | None) -> Operand | None:
        """A bias array of a statically quantized layer as a constant: its scale is input's times filter's."""
        if not isinstance(bias, np.ndarray) or bias.dtype != np.int32 or not isinstance(x.quantization, PerTensor):
            return bias
        scale = np.float32(x.quantization.scale)
        if isinstance(filter.quantization, PerTensor):
            return self.constant(bias, "qint32", PerTensor(float(scale * np.float32(filter.quantization.scale)), 0))
        if isinstance(filter.quantization, PerChannel):
            return self.constant(bias, "qcint32", PerChannel(scale * filter.quantization.scales, 0))
        return bias

    # ---- pooling

    def average_pooling2d(self, x: Operand, pooling: Size, *, stride: Size | None = None, padding: Size = 0,
                          same_padding: bool = False, **options: Unpack[ClampOptions]) -> Value:
        return self.node("average_pooling2d", [x], _pool(pooling, padding) | _stride(pooling, stride),
                         flags=SAME_PADDING if same_padding else 0, **options)[0]

    def max_pooling2d(self, x: Operand, pooling: Size, *, stride: Size | None = None, padding: Size = 0,
                      dilation: Size = 1, same_padding: bool = False, **options: Unpack[ClampOptions]) -> Value:
        more = dict(zip(("dilation_height", "dilation_width"), _pair("dilation", dilation)))
        return self.node("max_pooling2d", [x], _pool(pooling, padding) | _stride(pooling, stride) | more,
                         flags=SAME_PADDING if same_padding else 0, **options)[0]

    def argmax_pooling2d(self, x: Operand, pooling: Size, *, padding: Size = 0, same_padding: bool = False,
                         debug_handle: int = 0) -> tuple[Value, Value]:
        value, index = self.node("argmax_pooling2d", [x], _pool(pooling, padding),
                                 flags=SAME_PADDING if same_padding else 0, debug_handle=debug_handle)
        return value, index

    def global_average_pooling2d(self, x: Operand, *, keep_dims: bool = True, **options: Unpack[Options]) -> Value:
        return self.node("global_average_pooling2d", [x], flags=KEEP_DIMS if keep_dims else 0, **options)[0]

    # ---- moving elements

    def static_transpose(self, x: Operand, perm: Sequence[int], **options: Unpack[Options]) -> Value:
        rank = len(perm)
        return self.node("static_transpose", [x], {"perm": [axis + rank if -rank <= axis < 0 else axis
                                                            for axis in perm]}, **options)[0]

    def static_reshape(self, x: Operand, new_shape: Sequence[int], **options: Unpack[Options]) -> Value:
        return self.node("static_reshape", [x], {"new_shape": [0 if dim == -1 else dim for dim in new_shape]},
                         **options)[0]

    def static_slice(self, x: Operand, offsets: Sequence[int], sizes: Sequence[int | None],
                     **options: Unpack[Options]) -> Value:
        x = self._operand(x)
        rest = [dim - offset if size is None else size for dim, offset, size in zip(x.shape, offsets, sizes)]
        return self.node("static_slice", [x], {"offsets": offsets, "sizes": rest + list(sizes)[len(rest):]},
                         **options)[0]

    def static_constant_pad(self, x: Operand, pre_paddings: Sequence[int], post_paddings: Sequence[int],
                            padding_value: float = 0.0, **options: Unpack[Options]) -> Value:
        return self.node("static_constant_pad", [x], {"pre_paddings": pre_paddings, "post_paddings": post_paddings,
                                                      "padding_value": padding_value}, **options)[0]

    def static_resize_bilinear2d(self, x: Operand, new_size: Size, *, align_corners: bool = False,
                                 legacy_mode: bool = False, **options: Unpack[Options]) -> Value:
        height, width = _pair("new_size", new_size)
        return self.node("static_resize_bilinear2d", [x], {"new_height": height, "new_width": width},
                         flags=(ALIGN_CORNERS if align_corners else 0) | (LEGACY_MODE if legacy_mode else 0),
                         **options)[0]

    def concatenate(self, values: Sequence[Operand], axis: int, **options: Unpack[Options]) -> Value:
        """Any number of values one after the other: a node takes up to five, so more make a tree of nodes.

        Parameters
        ----------
        values : sequence of Value or array
            Two or more, of equal shapes except along the axis.
        axis : int
            Negative ones count from the end.
        **options
            What the class says of all operators.

        Returns
        -------
        Value

        Raises
        ------
        ArgumentError, ShapeError, GraphError
            Fewer than two, or of shapes or datatypes that do not go together.
        """
        operands = [self._operand(value) for value in values]
        if len(operands) < 2:
            raise ArgumentError(f"need 2 values or more to concatenate, found {len(operands)}")
        while len(operands) > 5:
            # Down to five, or to a fifth, by as few nodes as it takes: a chain would copy the first values often.
            groups: list[Value] = []
            over = len(operands) - max(5, -(-len(operands) // 5))
            while over:
                count = min(5, over + 1)
                groups.append(self._concatenate(operands[:count], axis, {}))
                operands, over = operands[count:], over - (count - 1)
            operands = groups + operands
        return self._concatenate(operands, axis, options)

    def concatenate2(self, a: Operand, b: Operand, axis: int, **options: Unpack[Options]) -> Value:
        return self._concatenate([a, b], axis, options)

    def concatenate3(self, a: Operand, b: Operand, c: Operand, axis: int, **options: Unpack[Options]) -> Value:
        return self._concatenate([a, b, c], axis, options)

    def concatenate4(self, a: Operand, b: Operand, c: Operand, d: Operand, axis: int,
                     **options: Unpack[Options]) -> Value:
        return self._concatenate([a, b, c, d], axis, options)

    def concatenate5(self, a: Operand, b: Operand, c: Operand, d: Operand, e: Operand, axis: int,
                     **options: Unpack[Options]) -> Value:
        return self._concatenate([a, b, c, d, e], axis, options)

    def _concatenate(self, operands: Sequence[Operand], axis: int, options: Options) -> Value:
        values = [self._operand(operand) for operand in operands]
        rank = len(values[0].shape)
        return self.node(f"concatenate{len(values)}", values,
                         {"axis": axis + rank if -rank <= axis < 0 else axis}, **options)[0]


# What an operator computes is said once, in its row; what an argument means, once for all operators that have it.
_SAID = {
    "a": "Value, array or number", "b": "Value, array or number", "c": "Value or array", "d": "Value or array",
    "e": "Value or array", "query": "Value\n    Batch, heads, tokens, channels.",
    "key": "Value\n    Batch, heads, tokens, channels; without heads, one for all of them.",
    "value": "Value\n    As the key.",
    "x": "Value, array or number",
    "slope": "Value or array\n    One for each channel of the last axis.",
    "low": "float or None\n    Lowest result, None for none.",
    "high": "float or None\n    Highest result, None for none.",
    "negative_slope": "float, default 0.01\n    Factor of negative numbers.",
    "alpha": "float, default 1\n    What very negative numbers come down to, with its sign changed.",
    "datatype": "str, optional\n    The result's; ``\"qdint8\"`` with ``PerToken(n)`` quantizes each run's rows of the "
                "last n axes by themselves.",
    "quantization": "PerTensor or PerToken, optional\n    The result's.",
    "output": "Value, optional\n    A value made by :meth:`value` to hold the result.",
    "like": "Value, optional\n    A value whose datatype and quantization the result gets.",
    "debug_handle": "int\n    A number of yours that messages and profiles repeat.",
    "filter": "Value or array\n    Output channels first, input channels last; for depthwise convolutions all channels "
              "last.",
    "bias": "Value or array, optional\n    One for each output channel. An int32 array beside a quantized input gets "
            "the parameters that it must have.",
    "transpose_weights": "bool, default False\n    The filter has input channels first.",
    "transpose_b": "bool, default False\n    The last two axes of ``b`` are swapped.",
    "scale": "Value, array or float, optional\n    One for each channel; left out, one over the square root of the "
             "channels.",
    "mask": "Value or array, optional\n    Added to the scores, tokens of the query by those of the key. "
            "Left out, zeros.",
    "padding": "int or (int, int, int, int), default 0\n    Rows and columns around images: top, right, bottom, "
               "left.",
    "stride": "int or (int, int)\n    Rows and columns from one window to the next: 1 if left out, for pooling the "
              "window's size.",
    "dilation": "int or (int, int), default 1\n    Rows and columns from one tap to the next.",
    "groups": "int, default 1\n    Groups of channels that do not mix.",
    "same_padding": "bool, default False\n    Pad as TensorFlow's SAME does; ``padding`` has to be 0.",
    "adjustment": "int or (int, int), default 0\n    Rows and columns added at the bottom and right: a stride leaves "
                  "several sizes possible.",
    "pooling": "int or (int, int)\n    Height and width of the window.",
    "keep_dims": "bool, default True\n    Leave height and width in the shape, as 1.",
    "perm": "sequence of int\n    For each axis of the result, the axis it comes from.",
    "new_shape": "sequence of int\n    At most one of them 0 or -1: what is left over.",
    "offsets": "sequence of int\n    First element along each axis.",
    "sizes": "sequence of int or None\n    Elements along each axis, None for what is left of it.",
    "pre_paddings": "sequence of int\n    Elements put before, for each axis.",
    "post_paddings": "sequence of int\n    Elements put behind, for each axis.",
    "padding_value": "float, default 0\n    As a real number, also in quantized values.",
    "new_size": "int or (int, int)\n    Height and width of the result.",
    "align_corners": "bool, default False\n    Corners of input and result are at the same place.",
    "legacy_mode": "bool, default False\n    The centres of pixels are at whole numbers, as in old TensorFlow.",
    "axis": "int\n    Negative ones count from the end.",
}  # fmt: skip


def _described(op: Op, method: Any) -> str:
    code = method.__code__
    names = code.co_varnames[1:code.co_argcount + code.co_kwonlyargcount]
    takes = ", and ``clamp``" if op.takes_clamp else ""
    lines = [f"{op.doc[:1].upper()}{op.doc[1:]}.", "", "Parameters", "----------"]
    lines += [f"{name} : {_SAID[name]}" for name in names]
    if code.co_flags & 8:
        lines += ["**options", f"    What the class says of all operators{takes}."]
    result = "Value" if len(op.outputs) == 1 else \
        "(Value, Value)\n    The elements and their places. Files declare the places fp32; the bytes are uint32."
    types = sorted({types[0] for types in op.datatypes})
    return "\n".join([*lines, "", "Returns", "-------", result, "", "Raises", "------",
                      "ShapeError, GraphError, DtypeError, ArgumentError",
                      "    XNNPACK would not compute that; the message says which rule is broken.", "", "Notes",
                      "-----", f"Datatypes of the first input: {', '.join(types)}."])


for _op in OPS.values():
    _method = GraphBuilder.__dict__.get(_op.name)
    if _method is not None:
        _method.__doc__ = _described(_op, _method)


# ---- arguments


def _or(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last


def _text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "a scalar"


def _shape(shape: Sequence[int]) -> tuple[int, ...]:
    try:
        dims = tuple(map(operator.index, shape))
    except TypeError:
        raise ArgumentError(f"need a shape of whole numbers, found {shape!r}") from None
    if len(dims) > MAX_RANK:
        raise ShapeError(f"need rank {MAX_RANK} or less, found rank {len(dims)} ({_text(dims)})",
                         expected=MAX_RANK, got=len(dims))
    if any(not 0 <= dim < 1 << 32 for dim in dims):
        raise ShapeError(f"need dimensions of 0 to {(1 << 32) - 1}, found {_text(dims)}", got=dims)
    return dims


def _pair(what: str, size: Size) -> tuple[int, int]:
    """(height, width) of one number or two."""
    if isinstance(size, Sequence):
        if len(size) != 2:
            raise ArgumentError(f"need one number or (height, width) as {what}, found {size!r}")
        return operator.index(size[0]), operator.index(size[1])
    return operator.index(size), operator.index(size)


def _padding(padding: Size) -> dict[str, int]:
    if not isinstance(padding, Sequence):
        padding = (padding,) * 4
    if len(padding) != 4:
        raise ArgumentError(f"need one number or (top, right, bottom, left) as padding, found {padding!r}")
    return dict(zip(("padding_top", "padding_right", "padding_bottom", "padding_left"), padding))


def _window(height: int, width: int, padding: Size, stride: Size, dilation: Size) -> dict[str, int]:
    stride, dilation = _pair("stride", stride), _pair("dilation", dilation)
    return _padding(padding) | {
        "kernel_height": height, "kernel_width": width, "subsampling_height": stride[0], "subsampling_width": stride[1],
        "dilation_height": dilation[0], "dilation_width": dilation[1]}


def _pool(pooling: Size, padding: Size) -> dict[str, int]:
    return _padding(padding) | dict(zip(("pooling_height", "pooling_width"), _pair("pooling", pooling)))


def _stride(pooling: Size, stride: Size | None) -> dict[str, int]:
    return dict(zip(("stride_height", "stride_width"), _pair("stride", pooling if stride is None else stride)))


def _rank4(what: str, value: Value) -> tuple[int, int, int, int]:
    if len(value.shape) != 4:
        raise ShapeError(f"{what} needs rank 4, found rank {len(value.shape)} ({_text(value.shape)})",
                         expected=4, got=len(value.shape))
    a, b, c, d = value.shape
    return a, b, c, d


def _divided(channels: int, groups: int) -> int:
    if groups < 1 or channels % groups:
        raise ShapeError(f"need output channels that {groups} groups divide, found {channels}")
    return channels // groups


def _limits(clamp: Limits | None) -> tuple[float, float] | None:
    """The limits as a file holds them: float32, open ends infinite."""
    if clamp is None:
        return None
    low, high = clamp
    low = -math.inf if low is None else float(np.float32(low))
    high = math.inf if high is None else float(np.float32(high))
    if not low <= high:
        raise ArgumentError(f"need limits of which the first is not above the second, found {clamp!r}")
    return low, high


#: Kind -> field -> (vector?, scalar type) of the nodes' own fields.
_FIELDS = {member: {field: (kind == "vector_scalar", scalar) for field, _, kind, scalar, _, _ in
                    _writer.schema.TABLES["xnn"][table]}
           for _, member, table in _writer.schema.UNIONS["xnn"]["XNodeUnion"]}


def _attributes(op: Op, attrs: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes as a reader would give them: ints, float32 numbers, tuples."""
    if set(attrs) != set(op.attrs):
        raise ArgumentError(f"{op.name} needs attributes {', '.join(op.attrs) or 'none'}, found "
                            f"{', '.join(attrs) or 'none'}")
    out: dict[str, Any] = {}
    for name in op.attrs:
        vector, scalar = _FIELDS[op.kind][name]
        value = attrs[name]
        try:
            if vector:
                out[name] = tuple(map(operator.index, value))
            else:
                out[name] = float(np.float32(value)) if scalar == "f32" else operator.index(value)
        except TypeError:
            need = "a sequence of whole numbers" if vector else "a number" if scalar == "f32" else "a whole number"
            raise ArgumentError(f"{op.name} needs {need} as {name}, found {value!r}") from None
        if scalar == "u32" and any(not 0 <= number < 1 << 32 for number in (out[name] if vector else (out[name],))):
            raise ArgumentError(f"{op.name} needs {name} of 0 to {(1 << 32) - 1}, found {value!r}")
    return out


def _result_types(node: Node, ins: Sequence[Value | None], wanted: str | None) -> list[str]:
    """The datatypes of a node's outputs: those of the first row of the operator's table that fits, or the
    one that keeps the first input's datatype."""
    types = tuple(map(operand_type, ins))
    results = [row[len(types):] for row in node.op.datatypes if row[:len(types)] == types
               and (wanted is None or row[len(types)] == wanted)]
    if not results:
        # The rules know best what is missing.
        check_op(node, ins, [_Asked(wanted or types[0])] * len(node.outputs))
    return list(next((result for result in results if result[0] == types[0]), results[0]))


class _Asked(NamedTuple):
    """Stands for a result of a datatype that the operator can't make."""

    datatype: str
    dq_datatype: None = None


# ---- constants and quantization


def _owned(array: Array) -> Constant:
    """The array's bytes in memory of our own, with room behind them: kernels read past the end."""
    dtype = _native(array.dtype)
    size = array.size * dtype.itemsize
    room = np.empty(size + 64 + _writer.SLACK, np.uint8)
    start = -room.ctypes.data % 64
    room[start + size:] = 0
    place = room[start:start + size]
    place.view(dtype).reshape(array.shape)[...] = array
    return Constant(place.data)


def _native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype if dtype.isnative else dtype.newbyteorder("=")


@cache
def _all_names() -> dict[tuple[np.dtype[Any], str], str]:
    """Those of NumPy's own dtypes, and bfloat16 where it exists."""
    bf16 = _datatypes.DATATYPES["bf16"].dtype
    return _NAMES if bf16 is None or bf16 == np.uint16 else {**_NAMES, (bf16, "none"): "bf16"}


def _constant_datatype(array: Array, datatype: str | None, quantization: Quantization | None) -> str:
    category = _category(quantization)
    dtype = _native(array.dtype)
    if datatype is None:
        found = _NAMES.get((dtype, category)) or _all_names().get((dtype, category))
        if found is None:
            kinds = [kind for known, kind in _all_names() if known == dtype]
            if not kinds:
                names = dict.fromkeys(known.name for known, _ in _all_names())
                raise DtypeError(f"need an array of {_or(names)}, found {array.dtype}", expected=tuple(names),
                                 got=array.dtype)
            need = _or(_NEED[kind] for kind in kinds)
            raise DtypeError(f"need {need} as the quantization of an array of {array.dtype}, found {_NEED[category]}",
                             got=array.dtype)
        return found
    entry = _datatypes.DATATYPES.get(datatype)
    if entry is None or datatype == "qdint8":
        raise DtypeError(f"need a datatype of {', '.join(name for name in _datatypes.DATATYPES if name != 'qdint8')}, "
                         f"found {datatype!r}", got=datatype)
    allowed: tuple[np.dtype[Any], ...]
    allowed = (np.dtype(np.int8), np.dtype(np.uint8)) if entry.dtype is None else (entry.dtype,)
    if datatype == "bf16":
        allowed += (np.dtype(np.uint16),)
    if dtype not in allowed:
        raise DtypeError(f"need an array of {_or(known.name for known in allowed)} for {datatype}, found "
                         f"{array.dtype}", expected=allowed[0], got=array.dtype)
    return datatype


def _category(quantization: Quantization | None) -> str:
    if quantization is None:
        return "none"
    try:
        return _CATEGORIES[type(quantization)]
    except KeyError:
        raise ArgumentError(f"need PerTensor, PerChannel, PerBlock or PerToken as quantization, found "
                            f"{quantization!r}") from None


def _parameters(datatype: str, shape: tuple[int, ...], quantization: Quantization | None) -> Quantization | None:
    """The parameters as a file holds them: float32 or bfloat16 scales, as many as the shape needs."""
    need, found = _datatypes.DATATYPES[datatype].quantization, _category(quantization)
    if need != found:
        raise GraphError(f"{datatype} needs {_NEED[need]} as its quantization, found {_NEED[found]}")
    if isinstance(quantization, PerTensor):
        entry, zero_point = _datatypes.DATATYPES[datatype], operator.index(quantization.zero_point)
        low, high = (entry.low, entry.high) if entry.bits == 8 else (0, 0)
        if not low <= zero_point <= high:
            raise GraphError(f"need a zero point of {low} to {high} for {datatype}, found {zero_point}")
        return PerTensor(float(_scales(np.array([quantization.scale], np.float32), 1, shape)[0]), zero_point)
    if isinstance(quantization, PerToken):
        return PerToken(operator.index(quantization.num_nonbatch_dims))
    if isinstance(quantization, PerChannel):
        axis = _axis(quantization.axis, shape)
        return PerChannel(_scales(np.array(quantization.scales, np.float32), shape[axis], shape), axis)
    if isinstance(quantization, PerBlock):
        axis, size = _axis(quantization.axis, shape), operator.index(quantization.block_size)
        if len(shape) != 2 or size < 1 or shape[1] % size:
            raise GraphError(f"need rows that blocks of {size} divide, found {_text(shape)}")
        scales = np.asarray(quantization.scales)
        # Patterns stay as they are, numbers are rounded.
        patterns = f32_to_bf16(scales) if scales.dtype.kind == "f" else np.array(scales, np.uint16)
        _scales(bf16_to_f32(patterns), shape[0] * shape[1] // size, shape)
        return PerBlock(patterns.reshape(-1), axis, size)
    return None


def _axis(axis: int, shape: tuple[int, ...]) -> int:
    axis = operator.index(axis)
    if not -len(shape) <= axis < len(shape):
        raise GraphError(f"need a channel axis of {_text(shape)}, found {axis}")
    return axis % len(shape)


def _scales(scales: Array, need: int, shape: tuple[int, ...]) -> Array:
    scales = scales.reshape(-1)
    if scales.size != need:
        raise GraphError(f"need {need} scales for {_text(shape)}, found {scales.size}")
    usable = np.isfinite(scales) & (scales >= np.finfo(np.float32).tiny)
    if not usable.all():
        raise GraphError(f"need scales that are finite, normal and positive, found {scales[~usable][0]:g}")
    return scales
