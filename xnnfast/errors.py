"""The exceptions of xnnfast, one class per kind of fault, and the names of XNNPACK's status codes.

Every class inherits from :class:`XnnfastError` and from the built-in exception that a caller who
does not know this package would catch. A message says what was needed, what was found and where;
the same facts are attributes where a program may want them.
"""

from __future__ import annotations

from typing import Any


class XnnfastError(Exception):
    """Base of every exception that xnnfast raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Constructors compose messages from their arguments; what they made is what another process is told.
        return _again, (type(self), self.args, dict(self.__dict__))


def _again(kind: type[XnnfastError], args: tuple[Any, ...], attributes: dict[str, Any]) -> XnnfastError:
    made = kind.__new__(kind, *args)
    made.args = args
    made.__dict__.update(attributes)
    return made


class FormatError(XnnfastError, ValueError):
    """The bytes are not what they claim to be.

    Attributes
    ----------
    offset : int or None
        Byte offset from the start of the payload at which the fault was seen.
    path : str or None
        Where in the file: a table and field such as ``XNNGraph.xvalues[5].dims``.
    """

    def __init__(self, message: str, *, offset: int | None = None, path: str | None = None) -> None:
        where = []
        if path:
            where.append(path)
        if offset is not None:
            where.append(f"offset {offset:#x}")
        super().__init__(f"{message} - at {', '.join(where)}" if where else message)
        self.offset = offset
        self.path = path


class AlignmentError(FormatError):
    """A constant can't be used in place and ``copy=False`` forbids the copy."""


class GraphError(XnnfastError, ValueError):
    """The file is well-formed but the graph in it has no meaning, or one that XNNPACK can't run.

    Attributes
    ----------
    node : int or None
        Index of the node in the file's order.
    value : int or None
        Id of the value (``id_out``).
    """

    def __init__(self, message: str, *, node: Any = None, value: int | None = None) -> None:
        super().__init__(message)
        self.node = node
        self.value = value


class ChangedError(XnnfastError, OSError):
    """A file that a pickle refers to is gone, or holds other bytes than where it was pickled.

    Attributes
    ----------
    path : str
        Where the file was, absolute.
    expected : str or None
        BLAKE2b of the file where it was pickled, in hexadecimal.
    got : str or None
        That of the file that was found, if its size was right.
    """

    def __init__(self, message: str, *, path: str, expected: str | None = None, got: str | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.expected = expected
        self.got = got


class UnsupportedError(XnnfastError, NotImplementedError):
    """A legal request that this build, this CPU or this XNNPACK can't serve."""


class ShapeError(XnnfastError, ValueError):
    """An array's shape, or the shape it leads to inside the graph, does not fit.

    Attributes
    ----------
    expected, got
        The two things that disagree, as far as they can be told.
    """

    def __init__(self, message: str, *, expected: Any = None, got: Any = None) -> None:
        super().__init__(message)
        self.expected = expected
        self.got = got


class DtypeError(XnnfastError, TypeError):
    """An array's dtype or byte order is not the one the value has; bytes are never reinterpreted.

    Attributes
    ----------
    expected, got
        The two dtypes.
    """

    def __init__(self, message: str, *, expected: Any = None, got: Any = None) -> None:
        super().__init__(message)
        self.expected = expected
        self.got = got


class OperatorError(XnnfastError, ValueError):
    """An operator outside XNNPACK can't work on the values it was given, such as an index out of range.

    Attributes
    ----------
    op : str or None
        Name and overload of the operator: ``aten::embedding.out``.
    """

    def __init__(self, message: str, *, op: str | None = None) -> None:
        super().__init__(message)
        self.op = op


class ArgumentError(XnnfastError, TypeError):
    """Wrong number or kind of arguments, such as two arrays for a graph of three inputs."""


class OverlapError(XnnfastError, ValueError):
    """Arrays share memory in a way that would corrupt a result."""


class NotFiniteError(XnnfastError, FloatingPointError):
    """``check_finite=True`` found a NaN or an infinity."""


class BusyError(XnnfastError, RuntimeError):
    """A second caller entered an object that serves one caller at a time."""


class ClosedError(XnnfastError, RuntimeError):
    """The object was closed."""


class LimitError(XnnfastError, MemoryError):
    """A size is above the cap that protects the process; the message names the option that raises it."""


#: enum xnn_status of xnnpack.h.
STATUS_NAMES = {
    0: "success",
    1: "uninitialized",
    2: "invalid_parameter",
    3: "invalid_state",
    4: "unsupported_parameter",
    5: "unsupported_hardware",
    6: "out_of_memory",
    7: "reallocation_required",
    8: "deprecated",
}


def status_name(status: int) -> str:
    """The name of an ``xnn_status`` without its prefix, or ``status N`` for one this table lacks."""
    return STATUS_NAMES.get(status, f"status {status}")


class XnnpackError(XnnfastError, RuntimeError):
    """A call into XNNPACK failed.

    Attributes
    ----------
    status : int
        The ``xnn_status``; :data:`STATUS_NAMES` has the names.
    call : str
        Name of the C function.
    node : int or None
        Index of the node in the file's order.
    """

    def __init__(self, call: str, status: int, *, node: int | None = None, detail: str = "") -> None:
        message = f"{call} failed: {status_name(status)}"
        super().__init__(f"{message} - {detail}" if detail else message)
        self.call = call
        self.status = status
        self.node = node


class XnnpackMemoryError(XnnpackError, MemoryError):
    """XNNPACK could not allocate."""


def xnnpack_error(call: str, status: int, *, node: int | None = None, detail: str = "") -> XnnpackError:
    """The exception for a failed call: out of memory has a class of its own."""
    kind = XnnpackMemoryError if status == 6 else XnnpackError
    return kind(call, status, node=node, detail=detail)
