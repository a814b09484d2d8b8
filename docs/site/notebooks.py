"""Executes the notebooks for the site, so that their pages have outputs and figures.

    python docs/site/notebooks.py    executes those that changed since, in the full environment

Each runs on the first backend that its first cell names. One that needs several together measures
them, for a quarter of an hour, and runs at the small size that the tests use. What comes out is
kept below `FOLDER` until the notebook changes.
"""

import hashlib
import os
import re
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("KMODELS_VENV", ROOT / ".venv")) / "notebooks"
SECONDS = 1200
# Where the hash of the source stands in the metadata of an executed notebook.
KEY = "kmodels_source"
_BACKENDS = re.compile(r"^Backends: `(\w+)`[^.\n]*?( together)?\.", re.MULTILINE)


def digest(path: Path, small: bool) -> str:
    """Returns what the outputs depend on: the notebook, and whether it runs at the small size."""
    return hashlib.sha256(path.read_bytes() + bytes([small])).hexdigest()


def place(path: Path, backend: str) -> Path:
    """Returns where an executed notebook is kept."""
    return FOLDER / backend / "notebooks" / path.name


def execute(path: Path) -> bool:
    """Executes a notebook, unless it was executed as it is.

    Args:
        path: path of the notebook.

    Returns:
        Whether it was executed now.

    Raises:
        nbclient.exceptions.CellExecutionError: if a cell raises.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    named = _BACKENDS.search(notebook.cells[0].source)
    if named is None:
        raise ValueError(f"{path.name} names no backend; begin its first cell with 'Backends: '")
    small = bool(named[2]) or os.environ.get("KMODELS_SMALL") == "1"
    kept, source = place(path, named[1]), digest(path, small)
    if kept.is_file() and nbformat.read(kept, as_version=4).metadata.get(KEY) == source:
        return False
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    ours = {
        "KERAS_BACKEND": named[1],
        "KMODELS_SMALL": "1" if small else "0",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            timeout=SECONDS,
            kernel_name="python3",
            resources={"metadata": {"path": folder}},
        )
        client.execute(env={**os.environ, **ours})
    notebook.metadata[KEY] = source
    kept.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, kept)
    return True


def main() -> int:
    """Executes all notebooks."""
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        begun = time.monotonic()
        done = execute(path)
        spent = f"executed in {time.monotonic() - begun:.0f} s" if done else "as it was"
        print(f"{path.name}: {spent}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
