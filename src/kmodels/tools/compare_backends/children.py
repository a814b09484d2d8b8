"""Child processes with one backend each, which compute only while a request is open.

Keras has one backend per process, so a comparison of two needs two processes. Nothing here imports
Keras: the parent has no backend.
"""

import ctypes
import importlib
import importlib.util
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Self

from kmodels.core.environment import SAFE_PATH
from kmodels.core.errors import InputError

# No accelerator memory is allocated ahead of need, and no compilation cache is read.
QUIET = {
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
}
# `python -m` would import this module a second time, with other classes of errors.
_MAIN = "from kmodels.tools.compare_backends.children import main; main()"
# Seconds between two checks of the memory of a child with a limit.
_LOOK = 0.05
_SHOWN = 300


class ChildError(RuntimeError):
    """A child crashed or did not answer in time; the message is one line."""

    kind = "crashed"


class OutOfMemory(ChildError):
    """A child needed more memory than is available or allowed."""

    kind = "out_of_memory"


class LeftOut(ChildError):
    """Raised if a child's job is not possible on its backend or device."""

    kind = "left_out"


KINDS = {kind.kind: kind for kind in (ChildError, OutOfMemory, LeftOut)}
REFUSED = "refused"


class Child:
    """A process that runs `work(job, link)` of a module and is stopped between requests.

    Its first answer comes without a request, see `started`. The process and its children end
    with the block `with Child(...) as child:`, and with this process.

    Args:
        module: imported in the child.
        job: plain values for `work`.
        python: the interpreter, which imports this copy of kmodels.
        memory: largest resident memory in bytes, or None.
    """

    def __init__(
        self,
        name: str,
        module: str,
        job: Mapping[str, Any],
        *,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
        hidden: Sequence[str] = (),
        cpus: Sequence[int] = (),
        limit: float = 900.0,
        memory: int | None = None,
    ):
        self.name, self.limit, self.memory = name, limit, memory
        self._buffer = b""
        self._folder = Path(tempfile.mkdtemp(prefix="kmodels-"))
        try:
            # A link, so that another interpreter sees kmodels alone and not its neighbours.
            (self._folder / "kmodels").symlink_to(Path(__file__).resolve().parents[2])
            self._log = (self._folder / "log").open("wb")
            settings = {"module": module, "job": dict(job), "hidden": list(hidden)}
            settings |= {"cpus": list(cpus), "parent": os.getpid()}
            paths = [str(self._folder), os.environ.get("PYTHONPATH", "")]
            with _stopped_later():
                self._process = subprocess.Popen(
                    [python, "-c", _MAIN, json.dumps(settings)],
                    env={
                        **os.environ,
                        # Another interpreter may lack the backend of a notebook.
                        "MPLBACKEND": "agg",
                        **(environment or {}),
                        **SAFE_PATH,
                        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                    },
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._log,
                    # Its own group: stopped and killed with what it started, while Ctrl-C reaches
                    # the parent alone.
                    start_new_session=True,
                )
        except BaseException:
            if hasattr(self, "_process"):
                self.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def started(self) -> dict[str, Any]:
        """Returns the first answer.

        Raises:
            InputError: if the child raised one.
            ChildError: if it failed or did not answer in time.
        """
        return self._answer()

    def ask(self, **request: object) -> dict[str, Any]:
        """Sends a request and waits for its answer; raises as `started`."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; reading tells how
        return self._answer()

    def close(self) -> None:
        """Ends the process and its children."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    pass  # a request that nobody read
        shutil.rmtree(self._folder, ignore_errors=True)

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self._process.pid, number)
        except (ProcessLookupError, PermissionError):
            pass  # it has ended

    def _answer(self) -> dict[str, Any]:
        answer = json.loads(self._line())
        if (kind := answer.get("failed")) is None:
            self._signal(signal.SIGSTOP)
            return answer
        self.close()
        text = f"{self.name}: {answer['text']}"
        raise InputError(answer["text"]) if kind == REFUSED else KINDS[kind](text)

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        stream, deadline = self._process.stdout.fileno(), time.monotonic() + self.limit
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0:
                self.close()
                raise ChildError(f"{self.name}: no answer for {self.limit:g} s, so it was killed")
            wait = left if self.memory is None else min(left, _LOOK)
            if select.select([stream], [], [], wait)[0]:
                chunk = os.read(stream, 65536)
                if not chunk:
                    raise self._ended()
                self._buffer += chunk
            if self.memory is not None and self._held() > self.memory:
                self.close()
                raise OutOfMemory(f"{self.name}: more than {self.memory / 2**20:,.0f} MiB")
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _held(self) -> int:
        """Returns the resident memory in bytes, 0 if the system does not report it."""
        try:
            text = Path(f"/proc/{self._process.pid}/status").read_text()
            return int(text.split("VmRSS:")[1].split()[0]) * 1024
        except (OSError, IndexError):
            return 0

    def _ended(self) -> ChildError:
        code = self._process.wait()
        text = Path(self._log.name).read_text(errors="replace").strip()
        self.close()
        if code == -signal.SIGKILL:
            return OutOfMemory(f"{self.name}: killed by the system, probably out of memory")
        last = text.splitlines()[-1][:_SHOWN] if text else "no output"
        return ChildError(f"{self.name}: ended with status {code}: {last}")


def installed(python: str, packages: Sequence[str]) -> set[str]:
    """Returns the packages that an interpreter finds; none is imported."""
    if python == sys.executable:
        return {name for name in packages if importlib.util.find_spec(name)}
    code = "import sys; from importlib.util import find_spec\n"
    code += "print(*[name for name in sys.argv[1:] if find_spec(name)])"
    try:
        done = subprocess.run(
            [python, "-c", code, *packages],
            env={**os.environ, **SAFE_PATH},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise InputError(
            f"{python} does not run: {error}; give the path of a Python interpreter"
        ) from None
    return set(done.stdout.split())


@contextmanager
def _stopped_later() -> Iterator[None]:
    """Delays Ctrl-C and SIGTERM to the end of the block, so that no unregistered child is left.

    A child starts with both blocked and unblocks them itself.
    """
    former = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Turns SIGTERM into an exception, so that no child is left behind."""

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


def environment(backend: str, generic: str, threads: int) -> dict[str, str]:
    """Returns the environment variables that make processes of different backends comparable."""
    flags = [os.environ.get("XLA_FLAGS", "")]
    if threads == 1:
        flags.append("--xla_cpu_multi_thread_eigen=false")
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    names = (*names, "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
    return {
        **QUIET,
        **dict.fromkeys(names, str(threads)),
        "XLA_FLAGS": " ".join(filter(None, flags)),
        "KERAS_BACKEND": backend,
        "KMODELS_GENERIC_OPS": generic,
    }


# === Inside the child ===


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
_SENT = 240
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux' prctl


class _Hiding(PathFinder):
    """Finds everything except the hidden packages.

    Keras imports each framework that it finds, which takes hundreds of MiB.
    """

    hidden: frozenset[str] = frozenset()

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
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


def main() -> None:
    """Runs `work(job, link)` of the module in the settings and sends a failure to the parent."""
    settings = json.loads(sys.argv[1])
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
        text = " ".join(plain.split())[:_SENT]
        link.send(failed=ChildError.kind, text=f"{type(error).__name__}: {text}")
    finally:
        sys.stderr.flush()
        # The frameworks' threads and pools need no orderly end.
        os._exit(0)
