"""Random shapes of everything that multiplies, each against the reference: a given number, from a given seed.

    python tests/sweep.py                                        # 20,000 shapes
    python tests/sweep.py --shapes 2000 --isa avx512skx avx2 sse2  # under each of these caps, in processes of their own

Every shape is a graph of its own: fully connected layers and batched products (GEMM), convolutions and transposed ones
(IGEMM), depthwise convolutions, with static and dynamic quantization, 4-bit filters and fp16, as far as the processor
has the kernels. Rows, channels and depths lie around the sizes of kernels' tiles. Ends with 0 if all agree, with 1 if
not; each shape that does not is printed as the call that makes it again.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from op_cases import case

import xnnfast as xf
from xnnfast._runtime import second_isa
from xnnfast.errors import XnnpackError
from xnnfast.ops import OPS

#: enum xnn_status of xnnpack.h.
UNSUPPORTED_HARDWARE = 5
#: How often each is drawn.
FAMILIES = {"fully_connected": 5, "batch_matrix_multiply": 2, "conv2d": 6, "conv_transpose2d": 2, "depthwise_conv2d": 5}


def around(rng: np.random.Generator, most: int) -> int:
    """A number up to ``most``, more often one that is close to a multiple of a power of two."""
    if rng.integers(3) == 0:
        return int(rng.integers(1, most + 1))
    tile = 1 << int(rng.integers(0, 8))
    return int(np.clip(tile * rng.integers(1, 4) + rng.integers(-1, 2), 1, most))


def options(rng: np.random.Generator, name: str, types: tuple[str, ...]) -> dict[str, Any]:
    """Arguments of ``op_cases.case``."""
    made: dict[str, Any] = {"seed": int(rng.integers(1 << 20)), "wild": bool(rng.integers(2))}
    if name in ("fully_connected", "batch_matrix_multiply"):
        inner = around(rng, 300)
        if name == "batch_matrix_multiply":
            lead = tuple(int(each) for each in rng.integers(1, 4, rng.integers(1, 3)))
            return made | {"first": lead, "second": lead, "rows": around(rng, 40), "inner": inner,
                           "columns": around(rng, 140), "transpose": bool(rng.integers(2))}  # fmt: skip
        if types[1] == "qbint4":
            inner = 32 * int(rng.integers(1, 9))
        elif types[1] == "qcint4":
            inner += inner % 2
        return made | {"lead": (around(rng, 40),), "inner": inner, "outer": around(rng, 140)}
    kernel = tuple(int(each) for each in rng.integers(1, 4, 2))
    made |= {
        "kernel": kernel,
        "batch": int(rng.integers(1, 3)),
        "stride": tuple(int(each) for each in rng.integers(1, 3, 2)),
        "height": int(rng.integers(kernel[0], kernel[0] + 6)),
        "width": int(rng.integers(kernel[1], kernel[1] + 8)),
        "padding": tuple(int(each) for each in rng.integers(0, 3, 4)),
    }
    if rng.integers(3) == 0:
        made["clamp"] = (-0.7, 0.6)
    if name == "depthwise_conv2d":
        return made | {"channels": around(rng, 140)}
    groups = int(rng.integers(1, 3))
    return made | {"groups": groups, "each_in": around(rng, 200), "each_out": around(rng, 140 // groups)}


def sweep(shapes: int, seed: int, only: str) -> Iterator[tuple[str, str, str]]:
    """(family, what came of it, its call) of as many shapes as are asked for, not counting what XNNPACK refuses."""
    rng = np.random.default_rng(seed)
    choices = [(name, types) for name in FAMILIES for types in OPS[name].datatypes if only in " ".join((name, *types))]
    if not choices:
        raise SystemExit(f"no family's name has {only!r} in it: {', '.join(FAMILIES)} with their datatypes")
    weights = np.array([FAMILIES[name] / len(OPS[name].datatypes) for name, _ in choices])
    missing = set()
    done = 0
    while done < shapes and len(missing) < len(choices):
        name, types = choices[int(rng.choice(len(choices), p=weights / weights.sum()))]
        arguments = options(rng, name, types)
        call = f"case({name!r}, {types!r}, {', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        if (name, types) in missing:
            continue
        family = f"{name} {'dynamic' if types[0] == 'qdint8' else 'fp16' if 'fp16' in types else types[0]}"
        try:
            made = case(name, types, **arguments)
        except (xf.GraphError, xf.ShapeError):
            # A window that its padding does not fit, or a scale that is out of bounds.
            yield family, "refused", call
            continue
        try:
            made.check()
        except XnnpackError as error:
            if error.status != UNSUPPORTED_HARDWARE:
                raise
            missing.add((name, types))
            yield family, "missing", call
            continue
        except AssertionError as error:
            yield family, "wrong", f"{call}: {' '.join(str(error).split())[:300]}"
        else:
            yield family, "right", call
        done += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=int, default=20000, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", metavar="TEXT", help="families and datatypes that have this in them")
    parser.add_argument("--isa", nargs="*", default=[], metavar="NAME", help="caps, as XNNFAST_ISA takes them")
    chosen = parser.parse_args()
    if chosen.isa:
        words = [f"--shapes={chosen.shapes}", f"--seed={chosen.seed}", f"--only={chosen.only}"]
        codes = [
            subprocess.run([sys.executable, __file__, *words], env=os.environ | {"XNNFAST_ISA": cap}).returncode
            for cap in chosen.isa
        ]
        return max(codes)
    counts: dict[str, dict[str, int]] = {}
    begin = time.perf_counter()
    for family, outcome, call in sweep(chosen.shapes, chosen.seed, chosen.only):
        row = counts.setdefault(family, dict.fromkeys(("right", "wrong", "refused", "missing"), 0))
        row[outcome] += 1
        if outcome == "wrong":
            print(call, flush=True)
    facts = xf.config()
    for family, row in sorted(counts.items()):
        lacking = f", {row['missing']} combinations of datatypes without kernels" if row["missing"] else ""
        told = f"{row['right']} right, {row['wrong']} wrong, {row['refused']} refused before they ran"
        print(f"{family}: {told}{lacking}")
    right, wrong = (sum(row[each] for row in counts.values()) for each in ("right", "wrong"))
    cap = f" (capped at {facts['isa_cap']})" if facts["isa_cap"] else ""
    print(f"{right + wrong} shapes, {wrong} wrong, seed {chosen.seed}, isa {(facts['isa'] or ['baseline'])[-1]}{cap}, "
          f"{time.perf_counter() - begin:.0f} s")  # fmt: skip
    if (second := second_isa()) is not None:
        print(f"kernels up to {second[0]} taken for {second[2]} operators padded {second[1]:g} times or more")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
