"""examples/digits.py does what it says, in a folder of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sklearn", reason="the example needs the extra example")

EXAMPLE = Path(__file__).resolve().parent.parent / "examples/digits.py"


def test_digits_are_classified_in_place(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, EXAMPLE], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    accuracy = re.search(r"^accuracy: ([\d.]+) on (\d+)", done.stdout, re.M)
    assert accuracy is not None
    assert float(accuracy[1]) >= 0.96
    assert int(accuracy[2]) == 450
    assert re.search(r"^images per second: [\d,]+ in batches", done.stdout, re.M)
    # Two layers, each with weights and bias.
    assert "constants used in place: 4 of 4; batches copied on their way in or out: 0" in done.stdout
    assert (tmp_path / "out/digits.xnn").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
