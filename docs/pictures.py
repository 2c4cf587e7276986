"""Makes the pictures of the documents: ``python docs/pictures.py NAME=FILE[#VIEW.ITEM]...``, where the files lie.

Needs Chromium, and pillow, which stores them smaller. VIEW.ITEM is what the address of a page ends in when something
is picked.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from browser import screenshot  # noqa: E402


def main() -> None:
    for argument in sys.argv[1:]:
        name, _, what = argument.partition("=")
        file, _, place = what.partition("#")
        with tempfile.TemporaryDirectory() as folder:
            page, picture = Path(folder) / "page.html", Path(folder) / "page.png"
            subprocess.run([sys.executable, "-m", "xnnfast", "inspect", file, "--html", page], check=True)
            screenshot(f"{page.as_uri()}#{place}", picture, size=(1280, 800))
            target = ROOT / "docs" / "images" / f"{name}.png"
            with Image.open(picture) as opened:
                few = opened.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
                few.save(target, optimize=True)
            print(f"{target}: {target.stat().st_size} bytes")


if __name__ == "__main__":
    main()
