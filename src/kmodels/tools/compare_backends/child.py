"""The child's side: `Child` runs `python -m kmodels.tools.compare_backends.child SETTINGS`."""

import ctypes
import importlib
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterable, Sequence
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

from kmodels.core.errors import InputError
from kmodels.tools.compare_backends.children import REFUSED, ChildError

if TYPE_CHECKING:
    from types import ModuleType


class Link:
    """The child's end of the pipes to its parent; each message is a line of JSON.

    Args:
        answers: a file descriptor that nothing else writes to.
    """

    def __init__(self, answers: int):
        self._answers = os.fdopen(answers, "wb", buffering=0)

    def send(self, **answer: object) -> None:
        """Sends one answer of plain values."""
        self._answers.write(json.dumps(answer).encode() + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """Waits for the next request; None means that there are no more."""
        line = sys.stdin.readline()
        return json.loads(line) if line else None


# Characters of an error that are sent to the parent; the log has all of it.
_SHOWN = 240
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux' prctl


class _Hiding(PathFinder):
    """Finds everything except the hidden packages.

    Keras imports each framework that it finds, which takes hundreds of MiB.
    """

    hidden: frozenset[str] = frozenset()

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: "ModuleType | None" = None
    ) -> Any:
        """Python's own search, or None."""
        return None if fullname in cls.hidden else super().find_spec(fullname, path, target)


def hide(packages: Iterable[str]) -> None:
    """Makes packages look as if they were not installed; call it before they are imported."""
    _Hiding.hidden = frozenset(packages)
    sys.meta_path = [_Hiding if finder is PathFinder else finder for finder in sys.meta_path]


def die_with(parent: int) -> None:
    """Makes Linux kill this process when its parent ends for any reason."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def main(settings: dict[str, Any]) -> None:
    """Runs `work(job, link)` of a module and sends a failure to the parent."""
    # What libraries print must not end up between the answers.
    link = Link(os.dup(1))
    os.dup2(2, 1)
    die_with(settings["parent"])
    # The parent blocked signals while it started this process.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if settings["cpus"]:
        os.sched_setaffinity(0, settings["cpus"])
    hide(settings["hidden"])
    try:
        importlib.import_module(settings["module"]).work(settings["job"], link)
    except BrokenPipeError:
        pass  # the parent is gone
    except InputError as error:
        link.send(failed=REFUSED, text=str(error))
    except ChildError as error:
        link.send(failed=error.kind, text=str(error))
    except Exception as error:
        traceback.print_exc()
        plain = re.sub(r"\x1b\[[\d;]*m", "", str(error))  # Keras writes in bold
        text = " ".join(plain.split())[:_SHOWN]
        link.send(failed=ChildError.kind, text=f"{type(error).__name__}: {text}")
    finally:
        sys.stderr.flush()
        # The frameworks' threads and pools need no orderly end.
        os._exit(0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
