"""Starts `runner`; see `python benchmarks/accelerator --help`."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from accelerator.runner import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
