"""``python -m xnnfast`` is the command ``xnnfast``."""

from .cli import main

if __name__ == "__main__":
    main()
