"""The datatypes of XNNPACK values, one entry each, known by name.

Three numberings disagree (seed schema, ExecuTorch schema, xnnpack.h), so a number never leaves the
module that read it: everything else uses the names below, which are XNNPACK's without the prefix
``xnn_datatype_``.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np


class Datatype(NamedTuple):
    """What the package knows about one datatype."""

    name: str
    #: Bits per element in memory.
    bits: int
    #: The dtype of NumPy's own whose elements are as large and, but for bf16, mean the same; None for 4-bit types.
    plain: np.dtype[Any] | None
    #: The quantization a value of this type must carry: none, tensor, channel, block or token.
    quantization: str
    #: Lowest and highest stored number of the quantized types.
    low: int = 0
    high: int = 0

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """NumPy dtype of an array that holds it; None for 4-bit types, which are handled as packed ``uint8``."""
        return _bf16() if self.name == "bf16" else self.plain


@cache
def _bf16() -> np.dtype[Any]:
    # ml_dtypes is optional: without it bfloat16 arrays travel as their 16-bit patterns. It takes longer to import than
    # this package, so that waits for the first use.
    try:
        import ml_dtypes
    except ImportError:
        return np.dtype(np.uint16)
    kind: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return kind


DATATYPES: dict[str, Datatype] = {
    entry.name: entry
    for entry in (
        Datatype("fp32", 32, np.dtype(np.float32), "none"),
        Datatype("fp16", 16, np.dtype(np.float16), "none"),
        Datatype("bf16", 16, np.dtype(np.uint16), "none"),
        Datatype("int32", 32, np.dtype(np.int32), "none"),
        Datatype("qint8", 8, np.dtype(np.int8), "tensor", -128, 127),
        Datatype("quint8", 8, np.dtype(np.uint8), "tensor", 0, 255),
        Datatype("qint32", 32, np.dtype(np.int32), "tensor", -(2**31), 2**31 - 1),
        Datatype("qcint8", 8, np.dtype(np.int8), "channel", -128, 127),
        Datatype("qcint32", 32, np.dtype(np.int32), "channel", -(2**31), 2**31 - 1),
        Datatype("qcint4", 4, None, "channel", -8, 7),
        Datatype("qbint4", 4, None, "block", -8, 7),
        Datatype("qdint8", 8, np.dtype(np.int8), "token", -128, 127),
    )
}


def nbytes(datatype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a dense value; the rows of 4-bit types are padded to whole bytes."""
    entry = DATATYPES[datatype]
    if entry.bits == 4:
        if not shape:
            return 1
        rows = 1
        for dim in shape[:-1]:
            rows *= dim
        return rows * ((shape[-1] + 1) // 2)
    count = 1
    for dim in shape:
        count *= dim
    return count * (entry.bits // 8)
