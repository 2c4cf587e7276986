"""Sizes above which a file is refused, to protect the process from what a few bytes can ask for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Caps on what a file may ask for. Each may be raised: ``load(path, limits=Limits(max_workspace=1 << 40))``.

    Parameters
    ----------
    max_depth : int, default 64
        How deep tables may nest in a flatbuffer.
    max_tables : int, default 1,000,000
        Tables in a flatbuffer, each counted as often as it is referred to.
    max_shared : int, default 1 MiB
        Bytes of a flatbuffer that are referred to again and again, beyond twice its size.
    max_externs : int, default 4096
        Inputs and outputs of a graph.
    max_workspace : int, default 64 GiB
        Bytes of all values that are not constants.
    max_indirection : int, default 256 MiB
        Bytes of pointers for the taps of one convolution or pooling.
    max_steps : int, default 1,048,576
        Instructions of one call of a method that jumps.
    """

    #: How deep tables may nest in a flatbuffer.
    max_depth: int = 64
    #: Tables in a flatbuffer, each counted as often as it is referred to.
    max_tables: int = 1_000_000
    #: Bytes that tables, vectors and strings of a flatbuffer may take together above twice its size, each counted as
    #: often as it is referred to. Written once and referred to a thousand times, a few bytes would take hours.
    max_shared: int = 1 << 20
    #: Inputs and outputs of a graph.
    max_externs: int = 4096
    #: Bytes of all values that are not constants: by their declared shapes when a graph is opened, by those that the
    #: inputs lead to when it is run.
    max_workspace: int = 1 << 36
    #: Bytes of pointers that XNNPACK makes for one convolution or pooling, 8 for each tap of each place. It counts only
    #: where they are 64 times what the node reads and writes: large images may have large tables, small ones may not.
    max_indirection: int = 1 << 28
    #: Instructions of a method that jumps backwards, in one call.
    max_steps: int = 1 << 20


DEFAULT_LIMITS = Limits()
