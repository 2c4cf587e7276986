"""Objects in other processes: what a pickle holds, and how the objects are made again from it.

In come payloads, constants, values, nodes and graphs; out goes what names them elsewhere, and there the objects
again. Bytes of a mapped file are named by the file's absolute path, its size and a digest of all of it; the receiver
maps the file again and refuses one with other bytes. Everything else travels as bytes.

The digest is BLAKE2b of the whole file, made when the first object of it is pickled and remembered. The receiver
makes it too, unless the file is the very one that the sender saw: the same boot of the same system, the same device,
inode, size and times, in a file system that keeps change times itself, and times that were old enough for any later
change to show.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import threading
import time
import weakref
from typing import Any, NamedTuple

from ._graph import Constant, Graph, Node, Value
from ._payload import Payload, padded_copy
from .errors import ChangedError, FormatError
from .weights_cache import Stamp, WeightsCache, at_rest, file_stamp, unchanged

__all__ = ["digest"]

#: Bytes that are digested at a time, after which their pages are given back.
PIECE = 16 << 20
#: How many files' digests are remembered by what the file was.
REMEMBERED = 256
BOOT = "/proc/sys/kernel/random/boot_id"

Reduced = tuple[Any, tuple[Any, ...]]


class Mark(NamedTuple):
    """Which file it was, for a receiver on the same machine."""

    boot: str
    stamp: Stamp


_lock = threading.Lock()
_digests: weakref.WeakKeyDictionary[Payload, bytes] = weakref.WeakKeyDictionary()
#: Files that were at rest when they were digested.
_by_stamp: dict[Stamp, bytes] = {}
#: (path, digest) -> a map of that file, for the next object that needs it.
_held: weakref.WeakValueDictionary[tuple[str, bytes], Payload] = weakref.WeakValueDictionary()


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


# ---- files


def digest(payload: Payload) -> bytes:
    """BLAKE2b (32 bytes) of all bytes of a payload. Each payload is read once, and so is a file that is at rest.

    Raises
    ------
    ChangedError
        The file was overwritten since it was mapped: its bytes are no longer those that were verified.
    """
    with _lock:
        known = _digests.get(payload)
        if known is None and payload.identity is not None:
            known = _by_stamp.get(payload.identity)
        if known is not None:
            return known
        _refuse_overwritten(payload)
        # The time of before reading: what is written meanwhile must show.
        now = time.time_ns()
        made = hashlib.blake2b(digest_size=32)
        view = memoryview(payload)
        for start in range(0, payload.nbytes, PIECE):
            stop = min(start + PIECE, payload.nbytes)
            made.update(view[start:stop])
            # Constants that were packed had been given back, and are not to come back for this.
            payload.release(start, stop)
        known = _digests[payload] = made.digest()
        if at_rest(payload, now) and unchanged(payload):
            assert payload.identity is not None
            _remember(payload.identity, known)
        return known


def _remember(stamp: Stamp, known: bytes) -> None:
    if len(_by_stamp) >= REMEMBERED:
        _by_stamp.pop(next(iter(_by_stamp)))
    _by_stamp[stamp] = known


def _refuse_overwritten(payload: Payload) -> None:
    """The same file with another size or time was written to, and one cut short can't even be read."""
    if payload.path is None or payload.identity is None:
        return
    try:
        now = file_stamp(os.stat(payload.path))
    except OSError:
        return
    if now[:2] == payload.identity[:2] and now[2:4] != payload.identity[2:4]:
        raise ChangedError(f"{payload.path} was overwritten after it was mapped (then {payload.identity[2]} bytes, now "
                           f"{now[2]}): what was loaded from it can't be pickled", path=payload.path)


def _boot() -> str | None:
    try:
        with open(BOOT, encoding="ascii") as file:
            return file.read().strip()
    except (OSError, ValueError):
        return None


def map_again(path: str, nbytes: int, wanted: bytes, mark: tuple[str, Stamp] | None) -> Payload:
    """The file at a path, if it holds the bytes that it held where it was pickled.

    Raises
    ------
    ChangedError
        It does not, or there is no such file.
    """
    held = _held.get((path, wanted))
    if held is not None and unchanged(held):
        return held
    need = f"need {path} with the {nbytes} bytes that it had where this was pickled"
    expected = wanted.hex()
    try:
        payload = Payload.open(path)
    except (OSError, FormatError) as error:
        raise ChangedError(f"{need}, found none here: {error}", path=path, expected=expected) from error
    if payload.nbytes != nbytes:
        raise ChangedError(f"{need}, found {payload.nbytes} bytes", path=path, expected=expected)
    if mark is not None and mark[1] == payload.identity and mark[0] == _boot():
        with _lock:
            _digests[payload] = wanted
            _remember(mark[1], wanted)
    else:
        found = digest(payload)
        if found != wanted:
            raise ChangedError(f"{need} (BLAKE2b {expected[:16]}...), found other bytes ({found.hex()[:16]}...)",
                               path=path, expected=expected, got=found.hex())
    _held[path, wanted] = payload
    return payload


def hold_again(data: Any) -> Payload:
    """A payload over bytes that came with the pickle."""
    return Payload.open(data)


def of_payload(payload: Payload, protocol: int) -> Reduced:
    """What a pickle holds of a payload."""
    if payload.path is None:
        return hold_again, (_bytes(memoryview(payload), protocol),)
    wanted = digest(payload)
    boot = _boot()
    # Remembered are those whose identity vouches for their bytes.
    with _lock:
        vouched = payload.identity if payload.identity in _by_stamp else None
    mark = None if boot is None or vouched is None else (boot, vouched)
    return map_again, (payload.path, payload.nbytes, wanted, mark)


def _bytes(data: memoryview, protocol: int) -> Any:
    # From protocol 5 on, whoever pickles may send buffers beside the pickle without copying them.
    return pickle.PickleBuffer(data) if protocol >= 5 else bytes(data)


# ---- graphs


def of_constant(constant: Constant, protocol: int) -> Reduced:
    """What a pickle holds of a constant: its place in a mapped file, or its bytes."""
    owner = constant.owner
    if isinstance(owner, Payload) and owner.path is not None and constant.offset >= 0:
        return constant_in, (owner, constant.offset, constant.nbytes, constant.index, constant.key,
                             True if constant.reason == "copy=True" else None)
    return constant_of, (_bytes(constant.data, protocol), constant.index, constant.key, constant.reason)


def constant_in(owner: Payload, offset: int, nbytes: int, index: int, key: str | None, copy: bool | None) -> Constant:
    """A constant in a mapped file."""
    from ._reader import constant_at

    made: Constant = constant_at(owner, offset, nbytes, index, copy=copy, key=key)
    return made


def constant_of(data: Any, index: int, key: str | None, reason: str | None) -> Constant:
    """A constant whose bytes came with the pickle, where XNNPACK can read them."""
    return Constant(padded_copy(data), index=index, key=key, reason=reason)


def of_value(value: Value) -> Reduced:
    """What a pickle holds of a value."""
    return value_of, (value.id, value.datatype, value.shape, value.quantization, value.external_id, value.is_input,
                      value.is_output, value.constant, value.dq_datatype, value.offset)


def value_of(id: int, datatype: str, shape: tuple[int, ...], quantization: Any, external_id: int | None, is_input: bool,
             is_output: bool, constant: Constant | None, dq_datatype: str | None, offset: int) -> Value:
    """The value again."""
    return Value(id, datatype, shape, quantization=quantization, external_id=external_id, is_input=is_input,
                 is_output=is_output, constant=constant, dq_datatype=dq_datatype, offset=offset)


def of_node(node: Node) -> Reduced:
    """What a pickle holds of a node."""
    return node_of, (node.op, node.inputs, node.outputs, dict(node.attrs), node.flags, node.clamp, node.debug_handle,
                     node.index, node.offset)


def node_of(op: Any, inputs: Any, outputs: Any, attrs: dict[str, Any], flags: int, clamp: Any, debug_handle: int,
            index: int, offset: int) -> Node:
    """The node again."""
    return Node(op, inputs, outputs, attrs, flags=flags, clamp=clamp, debug_handle=debug_handle, index=index,
                offset=offset)


def of_graph(graph: Graph) -> Reduced:
    """What a pickle holds of a graph."""
    owner = graph.owner
    fields = {"dialect": graph.dialect, "container": graph.container, "version": graph.version,
              "source": graph.source, "mem_buffer_sizes": graph.mem_buffer_sizes, "notes": graph.notes,
              "limits": graph.limits,
              # Of a file without constants too, other bytes are refused. Constants keep their own memory alive.
              "owner": owner if isinstance(owner, Payload) and owner.path is not None else None}
    return graph_of, (graph.values, graph.nodes, graph.inputs, graph.outputs, fields)


def graph_of(values: Any, nodes: Any, inputs: Any, outputs: Any, fields: dict[str, Any]) -> Graph:
    """The graph again, validated like any other."""
    return Graph(values, nodes, inputs, outputs, **fields)


# ---- options


def weights_cache_option(where: Any) -> Any:
    """A ``weights_cache=`` argument as a pickle holds it: paths made absolute, True still the receiver's folder."""
    return where if where is None or isinstance(where, (bool, WeightsCache)) else WeightsCache(where)


def again(kind: type[Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """A runtime, program or executor made anew."""
    return kind(*args, **options)
