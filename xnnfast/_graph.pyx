# cython: language_level=3
"""The graph in our own form: Graph and its parts Value, Node and Constant.

In come the fields that a reader decoded or a builder made; out goes a Graph that has been validated,
so whatever holds a Graph may trust it. All attributes are read-only: a changed graph is a new Graph.
"""

import types

import numpy as np

from . import datatypes as _datatypes
from .errors import GraphError

EMPTY_ATTRS = types.MappingProxyType({})


cdef class Constant:
    """Bytes of a constant value: a read-only view into the payload, or a padded copy.

    Made by :func:`load` and :class:`GraphBuilder`; the constructor is for tools and takes the attributes by name.

    Attributes
    ----------
    index : int
        Place in the file's constant table.
    data : memoryview
        Read-only, format ``B``. Zero-copy constants point into the payload, which the view keeps alive.
    nbytes : int
        Length of ``data``; it may exceed what the value needs (seed writers stored whole storages).
    offset : int
        Offset from the payload's start, or -1 when the bytes come from elsewhere.
    key : str or None
        Named-data key, where the file stores constants by name.
    in_place : bool
        True when XNNPACK reads the payload itself.
    reason : str or None
        Why the bytes were copied.
    owner : object
        What the bytes came from, kept alive as long as the constant.
    address : int
        Address of the first byte.

    Raises
    ------
    ValueError
        The constructor was given a buffer that is not contiguous.
    """

    def __init__(self, data, *, int index=0, Py_ssize_t offset=-1, str key=None, str reason=None, owner=None):
        view = memoryview(data)
        if not view.c_contiguous:
            raise ValueError("a constant's bytes must be contiguous")
        if view.format != "B" or view.ndim != 1:
            view = view.cast("B")
        self._data = view.toreadonly()
        self._owner = owner
        self.nbytes = view.nbytes
        self.index = index
        self.offset = offset
        self.key = key
        self.reason = reason

    @property
    def data(self):
        return self._data

    @property
    def owner(self):
        """The payload the bytes came from, whether in place or copied; None for bytes made in memory."""
        return self._owner

    @property
    def in_place(self):
        return self.reason is None

    @property
    def address(self):
        """Address of the first byte."""
        return address_of(self._data)

    def __reduce_ex__(self, protocol):
        from .pickling import of_constant

        return of_constant(self, protocol)

    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return self

    def __repr__(self):
        where = "in place" if self.reason is None else f"copied: {self.reason}"
        return f"Constant({self.index}, {self.nbytes} bytes, {where})"


cpdef size_t address_of(object buffer) except? 0:
    """Address of the first byte of a contiguous buffer."""
    cdef const unsigned char[::1] view = buffer if isinstance(buffer, memoryview) else memoryview(buffer).cast("B")
    if view.shape[0] == 0:
        return <size_t> 64
    return <size_t> &view[0]


cdef class Value:
    """One value (tensor) of a graph.

    Made by :func:`load` and :class:`GraphBuilder`; the constructor is for tools and takes the attributes by name.

    Attributes
    ----------
    id : int
        The file's ``id_out``, by which nodes name the value.
    datatype : str
        XNNPACK's name without prefix: ``"fp32"``, ``"qint8"``, ...
    shape : tuple of int
        The declared shape; outer dimensions may differ at run time where the graph permits it.
    quantization : PerTensor, PerChannel, PerBlock, PerToken or None
    external_id : int or None
        Number by which a delegate call names an input or output; None for internal values and constants.
    is_input, is_output, is_external : bool
        Whether the caller provides it, gets it, or one of both.
    constant : Constant or None
        Its bytes, if they never change.
    dq_datatype : str or None
        XN00 only: ``"qint8"`` where the external value is quantized dynamically on its way in.
    offset : int
        Byte offset of the value's table in the payload, -1 if it has none.
    nbytes : int
        Bytes of the declared shape.
    dtype : numpy.dtype or None
        dtype of an array that holds the value; None for packed 4-bit types.
    """

    def __init__(self, id, str datatype, shape, *, quantization=None, external_id=None, bint is_input=False,
                 bint is_output=False, Constant constant=None, str dq_datatype=None, Py_ssize_t offset=-1):
        self.id = id
        self.datatype = datatype
        self.shape = shape if type(shape) is tuple else tuple(shape)
        self.quantization = quantization
        self.external_id = external_id
        self.is_input = is_input
        self.is_output = is_output
        self.constant = constant
        self.dq_datatype = dq_datatype
        self.offset = offset

    def replace(self, **changes):
        """A copy of the value with some attributes changed.

        Parameters
        ----------
        **changes
            New attributes, by the names of the constructor's arguments.

        Returns
        -------
        Value
            One that no graph knows; nothing is checked before it becomes part of one.

        Raises
        ------
        TypeError
            There is no such attribute.
        """
        fields = dict(
            id=self.id, datatype=self.datatype, shape=self.shape, quantization=self.quantization,
            external_id=self.external_id, is_input=self.is_input, is_output=self.is_output,
            constant=self.constant, dq_datatype=self.dq_datatype, offset=self.offset,
        )
        fields.update(changes)
        return Value(fields.pop("id"), fields.pop("datatype"), fields.pop("shape"), **fields)

    @property
    def nbytes(self):
        """Bytes of the declared shape."""
        return _datatypes.nbytes(self.datatype, self.shape)

    @property
    def dtype(self):
        """NumPy dtype of an array that holds the value; None for packed 4-bit types."""
        return _datatypes.DATATYPES[self.datatype].dtype

    @property
    def is_external(self):
        return self.is_input or self.is_output

    def array(self):
        """A constant's elements.

        Returns
        -------
        numpy.ndarray
            Read-only, of :attr:`shape` and :attr:`dtype`, in the memory of the constant: the file stays mapped as long
            as the array lives. 4-bit types: packed uint8, two elements in a byte, ``ceil(n / 2)`` bytes in a row.

        Raises
        ------
        GraphError
            The value is not constant.
        """
        if self.constant is None:
            raise GraphError(f"value {self.id} is not constant", value=self.id)
        dtype = self.dtype
        raw = np.frombuffer(self.constant.data, np.uint8, self.nbytes)
        if dtype is None:
            return raw.reshape(self.shape[:len(self.shape) - 1] + (-1,)) if self.shape else raw
        return raw.view(dtype).reshape(self.shape)

    def __reduce__(self):
        from .pickling import of_value

        return of_value(self)

    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return self

    def __repr__(self):
        shape = "x".join(map(str, self.shape)) or "scalar"
        role = [name for name, yes in (("external input", self.is_input), ("external output", self.is_output),
                                       ("constant", self.constant is not None)) if yes]
        return f"Value(id={self.id}, {self.datatype}, {shape}{', ' if role else ''}{', '.join(role)})"


cdef class Node:
    """One operation of a graph.

    Made by :func:`load` and :class:`GraphBuilder`; the constructor is for tools and takes the attributes by name.

    Attributes
    ----------
    op : xnnfast.ops.Op
        The operator's row; ``op.name`` is its name.
    inputs : tuple of int or None
        Value ids in the order of ``op.inputs``; None for an absent optional one.
    outputs : tuple of int
        Value ids in the order of ``op.outputs``.
    attrs : mapping of str to int, float or tuple of int
        The other fields of the node's table, under the schema's names.
    flags : int
        XNNPACK's bits, such as that of same padding; docs/operators.md lists those of each operator.
    clamp : (float, float) or None
        ``output_min_max``, lowest and highest result as real numbers; None when absent.
    debug_handle : int
        The exporter's number of the source operation; 0 for none.
    index : int
        Place in the file's order.
    offset : int
        Byte offset of the node's table in the payload, -1 if it has none.
    where : str
        The node as error messages name it: ``node 4 (add, debug handle 17)``.
    """

    def __init__(self, op, inputs, outputs, attrs=None, *, int flags=0, tuple clamp=None,
                 debug_handle=0, int index=-1, Py_ssize_t offset=-1):
        self.op = op
        self.inputs = inputs if type(inputs) is tuple else tuple(inputs)
        self.outputs = outputs if type(outputs) is tuple else tuple(outputs)
        self.attrs = types.MappingProxyType(attrs) if attrs else EMPTY_ATTRS
        self.flags = flags
        self.clamp = clamp
        self.debug_handle = debug_handle
        self.index = index
        self.offset = offset

    def replace(self, **changes):
        """A copy of the node with some attributes changed.

        Parameters
        ----------
        **changes
            New attributes, by the names of the constructor's arguments.

        Returns
        -------
        Node
            One that no graph knows; nothing is checked before it becomes part of one.

        Raises
        ------
        TypeError
            There is no such attribute.
        """
        fields = dict(op=self.op, inputs=self.inputs, outputs=self.outputs, attrs=dict(self.attrs), flags=self.flags,
                      clamp=self.clamp, debug_handle=self.debug_handle, index=self.index, offset=self.offset)
        fields.update(changes)
        return Node(fields.pop("op"), fields.pop("inputs"), fields.pop("outputs"), fields.pop("attrs"), **fields)

    def __reduce__(self):
        from .pickling import of_node

        return of_node(self)

    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return self

    def __repr__(self):
        return f"Node({self.index}, {self.op.name}, inputs={self.inputs}, outputs={self.outputs})"

    @property
    def where(self):
        """The node as error messages name it."""
        handle = f", debug handle {self.debug_handle}" if self.debug_handle else ""
        return f"node {self.index} ({self.op.name}{handle})"


cdef class Graph:
    """A validated graph: values, nodes in an order in which they can run, inputs and outputs.

    Made by :func:`load` and :meth:`GraphBuilder.graph`; the constructor is for tools, takes the attributes by name and
    checks everything: what it lets through is a graph that XNNPACK can run.

    Attributes
    ----------
    values : tuple of Value
        All of them, constants included.
    nodes : tuple of Node
        Sorted so that every node follows the producers of its inputs; ``node.index`` is the file's order.
    inputs, outputs : tuple of Value
        In the order in which :meth:`Runtime.run` takes and returns them.
    constants : tuple of Constant
        Each constant once, also where several values use it.
    dialect : str
        ``"seed"``, ``"xn00"`` or ``"xn01"``.
    container : str
        ``"bare"``, ``"XH00"``, ``"pte"``, or ``"memory"`` for a graph that was made, not read.
    version : str
        The file's version text.
    source : str
        Name of the file, or a description of the buffer.
    notes : tuple of str
        What a careful reader would want to know: nodes that lead nowhere, an unusual version, ...
    producers : dict
        Value id -> Node that writes it.
    owner : object
        Keeps the bytes of the constants alive.
    limits : Limits
        Caps on what the graph may ask for, here and when it runs.
    zero_copy : (int, int)
        How many constants are used in place, and how many there are.

    Raises
    ------
    GraphError, ShapeError, UnsupportedError, LimitError
        The parts make no graph, or none that XNNPACK computes.
    """

    def __init__(self, values, nodes, inputs, outputs, *, str dialect="xn01", str container="memory", str version="",
                 str source="<memory>", mem_buffer_sizes=(), notes=(), owner=None, limits=None):
        from .caps import DEFAULT_LIMITS
        from .validate import validate

        self.values = tuple(values)
        self.nodes = tuple(nodes)
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.dialect = dialect
        self.container = container
        self.version = version
        self.source = source
        self.mem_buffer_sizes = tuple(mem_buffer_sizes)
        self.notes = tuple(notes)
        self.owner = owner
        self.limits = limits or DEFAULT_LIMITS
        self._by_id = {}
        self._caches = {}
        self.producers = {}
        for value in self.values:
            if value.id in self._by_id:
                raise GraphError(f"two values have the id {value.id}", value=value.id)
            self._by_id[value.id] = value
        seen = {}
        for value in self.values:
            if value.constant is not None:
                seen.setdefault(id(value.constant), value.constant)
        self.constants = tuple(seen.values())
        # validate checks everything and returns the nodes in running order, with the notes it made.
        order, more = validate(self, self.limits)
        self.nodes = tuple(order)
        # A graph that comes out of a pickle has them already.
        self.notes += tuple([note for note in more if note not in self.notes])
        self.producers = {output: node for node in self.nodes for output in node.outputs}

    def value(self, id):
        """The value with that id.

        Parameters
        ----------
        id : int
            The file's ``id_out``, as nodes name it.

        Returns
        -------
        Value

        Raises
        ------
        GraphError
            No value has it.
        """
        try:
            return self._by_id[id]
        except KeyError:
            raise GraphError(f"no value has the id {id}", value=id) from None

    def has_value(self, id):
        """Whether a value has that id.

        Parameters
        ----------
        id : int

        Returns
        -------
        bool
        """
        return id in self._by_id

    @property
    def zero_copy(self):
        """(constants used in place, constants in all)."""
        return sum(1 for c in self.constants if c.in_place), len(self.constants)

    @property
    def caches(self):
        """A dict in which other modules keep what they derived from this graph."""
        return self._caches

    def __reduce__(self):
        from .pickling import of_graph

        return of_graph(self)

    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return self

    def __repr__(self):
        used, total = self.zero_copy
        return (f"Graph(dialect={self.dialect!r}, container={self.container!r}, nodes={len(self.nodes)}, "
                f"constants={total}, zero_copy={used}/{total})")
