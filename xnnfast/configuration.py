"""What this installation was built from, and what it finds on this machine."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from .limits import allowed_cpus

try:
    __version__ = version("xnnfast")
except PackageNotFoundError:
    __version__ = "0+unknown"


def config() -> dict[str, Any]:
    """Versions, the pinned libraries, the kernels that were compiled in, and those this CPU selects.

    Returns
    -------
    dict
        ``xnnfast``, ``python``, ``numpy``, ``machine``: versions and architecture; ``pin``: one entry per
        vendored library; ``changes``: the project's corrections to them; ``families``: compiled kernel
        families; ``isa``: instruction sets that XNNPACK selects here; ``isa_cap``: the limit that the variable
        XNNFAST_ISA sets to them, or None; ``second_isa``: the choice of kernels for 8-bit products that AMX would
        mostly fill with padding, as its strongest instruction set ``isa`` and the factor of padding ``ratio`` from
        which on it is taken, or None; ``loop_order``: 1 if matrix products choose the order of their loops,
        0 if they have XNNPACK's; ``l2_bytes``: the cache that this choice assumes; ``cpus``, ``cpus_reason``:
        how many CPUs this process may use, and why.
    """
    from ._generated.build_info import INFO
    from ._runtime import isa, l2_bytes, loop_order, second_isa

    cpus = allowed_cpus()
    second = second_isa()
    return {
        "xnnfast": __version__,
        "python": sys.version.split()[0],
        "numpy": np.__version__,
        "machine": platform.machine(),
        **{key: value for key, value in INFO.items() if key not in ("key",)},
        "isa": isa(),
        "isa_cap": os.environ.get("XNNFAST_ISA"),
        "second_isa": None if second is None else {"isa": second[0], "ratio": second[1]},
        "loop_order": loop_order(),
        "l2_bytes": l2_bytes(),
        "cpus": cpus.count,
        "cpus_reason": cpus.reason,
    }
