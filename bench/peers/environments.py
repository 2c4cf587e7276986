"""Environments of the peers, each by itself: two of them in one process would share libraries and thread pools.

    python bench/peers/environments.py [NAME ...]           make those that are missing; without names: all

They are kept in $XNNFAST_PEERS, or in the user's cache folder. XNNFAST_PEER_<NAME> names a Python to use instead.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

#: Name -> what is installed. Versions are those that docs/benchmarks.md speaks of.
PEERS = {
    "onnxruntime": ("onnxruntime>=1.31", "numpy"),
    "openvino": ("openvino>=2026.4", "numpy"),
    "litert": ("ai-edge-litert>=2.3", "numpy"),
    "executorch_numpy": ("executorch-numpy-runtime==1.4.0", "numpy"),
    "executorch": ("executorch==1.5.1", "torch", "numpy"),
    # After executorch, which brings it.
    "torch": ("torch", "numpy"),
}
#: Oldest Python that a peer has wheels for, where it is not that of this package.
NEEDS = {"executorch_numpy": (3, 12)}
#: Whose environment does as well, if there is none of its own.
SHARES = {"torch": "executorch"}


def folder() -> Path:
    given = os.environ.get("XNNFAST_PEERS")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(given) if given else Path(base) / "xnnfast" / "peers"


def python_of(name: str) -> Path | None:
    """The Python of a peer's environment, or None if there is none yet."""
    given = os.environ.get(f"XNNFAST_PEER_{name.upper()}")
    if given:
        return Path(given)
    path = folder() / name / "bin/python"
    if (folder() / name / "installed").exists():
        return path
    return python_of(SHARES[name]) if name in SHARES else None


def base_of(name: str) -> str:
    """A Python that is new enough for a peer."""
    least = NEEDS.get(name, (3, 10))
    if sys.version_info[:2] >= least:
        return sys.executable
    for minor in range(least[1], least[1] + 4):
        command = f"python3.{minor}"
        # Wrappers of version managers exist for versions that are not there.
        if shutil.which(command) and subprocess.run([command, "-c", ""], capture_output=True).returncode == 0:
            return command
    raise LookupError(f"needs Python {least[0]}.{least[1]} or newer")


def make(name: str) -> Path:
    """The Python of a peer, with its environment made if need be."""
    found = python_of(name)
    if found is not None:
        return found
    place = folder() / name
    subprocess.run([base_of(name), "-m", "venv", "--clear", str(place)], check=True)
    python = place / "bin/python"
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", *PEERS[name]], check=True)
    (place / "installed").touch()
    return python


def main() -> int:
    names = sys.argv[1:] or list(PEERS)
    failed = 0
    for name in names:
        if name not in PEERS:
            print(f"{name}: need one of {', '.join(PEERS)}", file=sys.stderr)
            return 2
        try:
            print(f"{name}: {make(name)}", flush=True)
        except (subprocess.CalledProcessError, LookupError) as error:
            failed += 1
            print(f"{name}: can't be made: {error}", file=sys.stderr)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
