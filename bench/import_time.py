"""How long Python takes to import the package, beyond NumPy, and to come to a first result from the start of a process.

    python bench/import_time.py [--rounds 20] [--json]

Each figure is the median over fresh processes, those of all rows in turn, so that a machine that gets slower in between
slows all rows. Times are those of the CPU that the process used, user and system, next to those of the clock: on a busy
machine only the former mean something. Bytecode is compiled beforehand.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FIRST_RESULT = """
import numpy as np
import xnnfast as xf
with xf.Runtime(xf.load({path!r})) as runtime:
    runtime.run(np.ones((1, 64), np.float32))
"""
ROWS = {
    "python": "pass",
    "numpy": "import numpy",
    "xnnfast": "import numpy, xnnfast",
    "xnnfast.Runtime": "import numpy, xnnfast; xnnfast.Runtime",
    "first result": FIRST_RESULT,
}


def write_model(path: Path) -> None:
    """Two layers of 64: small, so that the start of everything else is what is measured."""
    import numpy as np

    import xnnfast as xf

    rng = np.random.default_rng(1)
    b = xf.GraphBuilder()
    x = b.input((1, 64))
    for _ in range(2):
        x = b.fully_connected(x, rng.standard_normal((64, 64), np.float32), clamp=(0, 6))
    b.output(x)
    b.save(path)


def once(code: str) -> tuple[float, float]:
    """Seconds by the clock, and of CPU, that a process with that code takes."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    wall = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model.xnn"
        write_model(model)
        codes = {name: code.format(path=str(model)) for name, code in ROWS.items()}
        seen: dict[str, list[tuple[float, float]]] = {name: [] for name in codes}
        for turn in range(chosen.rounds + 1):
            for name, code in codes.items():
                taken = once(code)
                # The first turn compiles bytecode and reads files from disk.
                if turn:
                    seen[name].append(taken)
    rows = {
        name: {
            "wall_ms": round(1e3 * statistics.median(wall for wall, _ in taken), 2),
            "cpu_ms": round(1e3 * statistics.median(cpu for _, cpu in taken), 2),
        }
        for name, taken in seen.items()
    }
    for row in rows.values():
        row["beyond_numpy_cpu_ms"] = round(row["cpu_ms"] - rows["numpy"]["cpu_ms"], 2)
        row["beyond_numpy_wall_ms"] = round(row["wall_ms"] - rows["numpy"]["wall_ms"], 2)
    if chosen.json:
        print(json.dumps({"rounds": chosen.rounds, "rows": rows}))
        return 0
    print(f"{'median of ' + str(chosen.rounds):<18}{'CPU ms':>9}{'wall ms':>9}{'beyond NumPy: CPU':>20}{'wall':>9}")
    for name, row in rows.items():
        extra = (row["beyond_numpy_cpu_ms"], row["beyond_numpy_wall_ms"])
        print(f"{name:<18}{row['cpu_ms']:>9}{row['wall_ms']:>9}{extra[0]:>20}{extra[1]:>9}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
