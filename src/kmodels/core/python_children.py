"""Python processes that this one starts: none imports from the folder that it happens to run in."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

# `python -m` and `python -c` put the working directory first on sys.path, where a json.py or
# kmodels.py of somebody else's data would run. It holds for the children of children too.
SAFE_PATH = {"PYTHONSAFEPATH": "1"}


@contextmanager
def safe_path() -> Iterator[None]:
    """Has Python processes that a library starts in the block leave out the working directory."""
    former = {name: os.environ.get(name) for name in SAFE_PATH}
    os.environ.update(SAFE_PATH)
    try:
        yield
    finally:
        for name, value in former.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
