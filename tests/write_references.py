"""Writes tiny random models of other packages with their outputs, which every backend's tests read.

python tests/write_references.py [OUT [MODULE ...]]

Needs transformers, timm and torch. OUT is by default $KMODELS_REFERENCES or tests/.references. Each
module in tests/references has `write(folder)` and gets the folder OUT/<module>; all do by default.
"""

import importlib
import os
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main(arguments: list[str]) -> int:
    default = os.environ.get("KMODELS_REFERENCES", str(HERE / ".references"))
    out = Path(arguments[0] if arguments else default)
    sys.path.insert(0, str(HERE))
    names = arguments[1:] or sorted(path.stem for path in (HERE / "references").glob("*.py"))
    for name in names:
        begun = time.monotonic()
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        importlib.import_module(f"references.{name}").write(folder)
        print(f"{folder}: {time.monotonic() - begun:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
