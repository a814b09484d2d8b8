"""Writes tiny random models of other packages with their outputs, which every backend's tests read.

python tests/write_references.py [OUT [MODULE ...]]

Needs transformers, timm and torch. OUT is by default $KMODELS_REFERENCES or tests/.references. Each
module in tests/references has `write(folder)` and gets the folder OUT/<module>; all do by default.
"""

import importlib
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path

HERE = Path(__file__).resolve().parent
SHARED = ("__init__", "common")
LONGEST = "gemma4"


def write_module(name: str, out: Path) -> str:
    begun = time.monotonic()
    module = importlib.import_module(f"references.{name}")
    logging = importlib.import_module("transformers").logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    module.write(folder)
    return f"{folder}: {time.monotonic() - begun:.0f} s"


def main(arguments: list[str]) -> int:
    default = os.environ.get("KMODELS_REFERENCES", str(HERE / ".references"))
    out = Path(arguments[0] if arguments else default)
    modules = {path.stem for path in (HERE / "references").glob("*.py")}
    names = arguments[1:] or sorted(modules.difference(SHARED))
    names.sort(key=lambda name: name != LONGEST)
    # Forked processes have what this one has imported.
    context = get_context("fork" if sys.platform == "linux" else "spawn")
    for name in names:
        importlib.import_module(f"references.{name}")
    with ProcessPoolExecutor(min(2, os.cpu_count() or 1), context) as executor:
        for line in executor.map(write_module, names, repeat(out)):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
