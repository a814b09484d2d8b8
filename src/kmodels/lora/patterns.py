"""Regular expressions of users and files, matched against the names of a model.

A pattern such as "(a+)+" may backtrack for years, and `re` holds the interpreter's lock meanwhile,
so no thread can stop it. A pattern with groups or with more than a few repetitions is therefore
matched in a child process with a time limit.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import lru_cache

from kmodels.core.errors import InputError

# Without groups, so many repetitions take at most the third power of a name's length of steps.
SIMPLE = 3
SECONDS = 10.0
_CHILD = (
    "import json, re, sys\n"
    "pattern, names = json.load(sys.stdin)\n"
    "print(json.dumps([name for name in names if re.fullmatch(pattern, name)]))"
)


def matching(pattern: str, names: Iterable[str]) -> frozenset[str]:
    """Returns the names that a regular expression matches as a whole.

    Args:
        pattern: as `re` takes it.
        names: paths of layers, or names of modules.

    Raises:
        InputError: for a pattern that is none, or that takes too long.
    """
    return _matching(pattern, tuple(names))


@lru_cache(maxsize=1024)
def _matching(pattern: str, names: tuple[str, ...]) -> frozenset[str]:
    try:
        compiled = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as problem:
        raise InputError(f"{_shown(pattern)} is not a pattern: {problem}") from None
    if sum(map(pattern.count, "*+?{")) <= SIMPLE and "(" not in pattern:
        return frozenset(name for name in names if compiled.fullmatch(name))
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _CHILD],
            input=json.dumps([pattern, names]),
            capture_output=True,
            text=True,
            check=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise InputError(
            f"the pattern {_shown(pattern)} takes more than {SECONDS:.0f} s to match; simplify it: "
            "a repetition inside a repetition, such as (a+)+, takes exponential time"
        ) from None
    except (OSError, subprocess.CalledProcessError) as problem:
        raise InputError(
            f"the pattern {_shown(pattern)} could not be matched in a child process "
            f"({type(problem).__name__}); give names instead"
        ) from None
    return frozenset(json.loads(done.stdout))


def _shown(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 80 else f"{pattern[:77]}...")
