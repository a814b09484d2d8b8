"""A Python process that a test starts and waits for."""

import os
import subprocess
import sys
from pathlib import Path


def run_python(
    *words: object,
    cwd: Path | None = None,
    seconds: int = 240,
    python: str = sys.executable,
    **variables: str | None,
) -> subprocess.CompletedProcess[str]:
    """Runs Python to its end and returns its exit code and what it wrote.

    Args:
        words: of the command line, behind the interpreter.
        cwd: the working directory.
        seconds: after which it is killed.
        python: the interpreter; `quick_python()` makes processes that start faster.
        variables: of the environment, beside those of this process; None removes one.
    """
    environment = {k: v for k, v in {**os.environ, **variables}.items() if v is not None}
    return subprocess.run(
        [python, *map(str, words)],
        cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=seconds,
    )  # fmt: skip
