"""A `python` that starts as a fork of a process with torch or JAX and Keras already imported.

    subprocess.run([quick_python(), "-m", "kmodels", "vit", "--epochs", "1"])

Importing these packages takes most of the time of a small program. This `python` is a short script
that passes on its command line, folder, variables and open files, waits for the fork, and ends as
the fork ends. The fork imports kmodels itself. `keras` is not in `sys.modules` until the program
imports it, and a program that chooses another backend imports another Keras. A command line with
options of Python, or other values of variables that are read at an import, starts the real Python.

A test needs the real one, `sys.executable`, if it is about the start itself, or if it looks at the
parents, names and groups of processes.
"""

import atexit
import functools
import gc
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

# Prefixes of what is read at the imports, and of what is set or read later.
READ_AT_IMPORT = {
    "jax": ("KERAS_", "PYTHON", "LD_", "OMP_", "JAX_"),
    "torch": ("KERAS_", "PYTHON", "LD_", "OMP_", "MKL_", "CUDA_", "TORCH", "PYTORCH_"),
}
READ_LATER = (
    *("KERAS_BACKEND", "KERAS_DISTRIBUTION_", "PYTHONPATH", "PYTHONSAFEPATH", "PYTHON_EXEC"),
    *("TORCHELASTIC_", "TORCH_NCCL_"),
)

# It stands in the place of an interpreter, so it imports little. `ps` shows whom it waits for.
SCRIPT = """#!{real} -IS
import json, os, signal, socket, sys

words, variables = sys.argv[1:], dict(os.environ)
read = {{
    name: value
    for name, value in variables.items()
    if name.startswith({at_import}) and not name.startswith({later})
}}
lines = words[:1] == ["-u"]
words = words[lines:]
known = words and (words[0] in ("-c", "-m", "-") or words[0][:1] != "-")
if not known or read != {read} or variables.get("KERAS_BACKEND", {backend!r}) != {backend!r}:
    os.execv({real!r}, [{real!r}, *sys.argv[1:]])
link = socket.socket(socket.AF_UNIX)
link.connect({address!r})
request = {{"words": words, "lines": lines, "folder": os.getcwd(), "variables": variables}}
request = json.dumps(request).encode()
socket.send_fds(link, [len(request).to_bytes(8, "big")], [0, 1, 2])
link.sendall(request)
number = lambda: int.from_bytes(link.recv(8), "big", signed=True)
pid = number()
with open("/proc/self/comm", "w") as file:
    file.write("fork %d" % pid)
for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"):
    signal.signal(getattr(signal, name), lambda number, frame: os.kill(pid, number))
status = number()
if status < 0:
    if status != -signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""


def can_fork() -> bool:
    """Returns True if the backend of the tests starts no thread when it is imported.

    The full environment has several backends, and its tests change between them. The address of a
    socket has at most 107 characters, 19 of them after the folder of temporary files.
    """
    short = len(tempfile.gettempdir()) <= 88
    return (
        os.environ.get("KMODELS_ENVIRONMENT") in READ_AT_IMPORT
        and sys.platform == "linux"
        and short
    )


@functools.cache
def quick_python() -> str:
    """Returns the path of a Python with the packages of this one, whose processes are forks.

    It is `sys.executable` where they cannot be.
    """
    if not can_fork():
        return sys.executable
    stack = ExitStack()
    atexit.register(stack.close)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    return str(stack.enter_context(forked_python(folder, sys.executable, os.environ)))


@contextmanager
def forked_python(folder: Path, real: str, variables: Mapping[str, str]) -> Iterator[Path]:
    """Starts the process that forks, ends it after the block, and gives the path of its `python`.

    Args:
        folder: for `python` and a socket. Its name has to be short.
        real: the interpreter.
        variables: of the process.
    """
    path, backend = folder / "python", os.environ["KERAS_BACKEND"]
    early = READ_AT_IMPORT[backend]
    read = {
        name: value
        for name, value in variables.items()
        if name.startswith(early) and not name.startswith(READ_LATER)
    }
    address = str(folder / "socket")
    text = SCRIPT.format(
        real=real, backend=backend, at_import=early, later=READ_LATER, read=read, address=address
    )
    # It ends when its standard input does.
    with subprocess.Popen(
        [real, __file__, address],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**variables, "KERAS_BACKEND": backend}, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        path.write_text(text)
        path.chmod(0o755)
        yield path


class _Held(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives a program the Keras that is imported already, if it has the program's backend."""

    def __init__(self, modules: dict[str, ModuleType], backend: str):
        self.modules, self.backend = modules, backend
        self.spec = modules["keras"].__spec__

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name != "keras":
            return None
        sys.meta_path.remove(self)
        if os.environ.get("KERAS_BACKEND") != self.backend:
            return None
        return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec: object) -> ModuleType:
        sys.modules.update(self.modules)
        return self.modules["keras"]

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec


def _serve(address: str) -> dict[str, Any]:
    """Returns in a fork for each request, with the request; this process ends with its parent."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    print("ready", flush=True)
    running: dict[socket.socket, int] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ, "parent")
        selector.register(listener, selectors.EVENT_READ, "request")
        while True:
            for key, _ in selector.select():
                if key.data == "parent":
                    for pid in running.values():
                        _kill(pid)
                        os.waitpid(pid, 0)
                    os._exit(0)
                elif key.data == "request":
                    link, _ = listener.accept()
                    size, files, *_ = socket.recv_fds(link, 8, 3)
                    text = link.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)
                    if (pid := os.fork()) == 0:
                        for number, file in enumerate(files):
                            os.dup2(file, number)
                        for file in files:
                            os.close(file)
                        for held in (listener, link, *running):
                            held.close()
                        return json.loads(text)
                    for file in files:
                        os.close(file)
                    _tell(link, pid)
                    running[link] = pid
                    selector.register(link, selectors.EVENT_READ, "gone")
                    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, link)
                elif key.data == "gone":  # somebody killed the script
                    selector.unregister(key.fileobj)
                    _kill(running[key.fileobj])
                else:
                    link = key.data
                    _, status = os.waitpid(running.pop(link), 0)
                    if link in selector.get_map():
                        selector.unregister(link)
                        _tell(link, os.waitstatus_to_exitcode(status))
                    link.close()
                    selector.unregister(key.fd)
                    os.close(key.fd)


def _tell(link: socket.socket, number: int) -> None:
    try:
        link.sendall(number.to_bytes(8, "big", signed=True))
    except BrokenPipeError:
        pass  # somebody killed the script


def _kill(pid: int) -> None:
    """Kills the group that a fork leads, or the fork alone, if it has just begun."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(pid, signal.SIGKILL)


def _become(request: Mapping[str, Any], path: list[str]) -> None:
    """Makes this fork what a Python that was started with the request is.

    Args:
        request: words, folder, variables, and whether each line of the output is written at once.
        path: sys.path of a Python without PYTHONPATH.
    """
    import numpy as np

    words, variables = request["words"], request["variables"]
    os.setsid()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(variables)
    np.random.seed()
    sys.stdout.reconfigure(line_buffering=request["lines"] or os.isatty(1))
    sys.argv = words[1:] if words[0] == "-m" else ["-c", *words[2:]] if words[0] == "-c" else words
    first = {"-c": "", "-": "", "-m": os.getcwd()}
    own = [] if "PYTHONSAFEPATH" in variables else [first.get(words[0], _folder(words[0]))]
    more = filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [*own, *map(os.path.abspath, more), *path]


def _folder(script: str) -> str:
    return str(Path(script).resolve().parent)


def _run(words: list[str]) -> None:
    if words[0] == "-m":
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = ModuleType("__main__")
    if words[0] == "-c":
        name, text = "<string>", words[1]
    elif words[0] == "-":
        name, text = "<stdin>", sys.stdin.read()
    else:
        name = main.__file__ = words[0]
        text = Path(name).read_bytes()
    exec(compile(text, name, "exec"), main.__dict__)


def _end() -> None:
    """Ends a fork whose program ended by itself; taking torch apart would take 0.3 s.

    It is registered first, so it runs last.
    """
    if status is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    status: int | None = None
    atexit.register(_end)
    without = {*os.environ.get("PYTHONPATH", "").split(os.pathsep), _folder(__file__)}
    importlib.import_module("keras")
    names = [name for name in sys.modules if name.split(".")[0] == "keras"]
    held = _Held({name: sys.modules.pop(name) for name in names}, os.environ["KERAS_BACKEND"])
    sys.meta_path.insert(0, held)
    gc.collect()
    gc.freeze()
    request = _serve(sys.argv[1])
    _become(request, [entry for entry in sys.path if entry not in without])
    try:
        _run(request["words"])
        status = 0
    except SystemExit as stop:
        status = stop.code or 0 if isinstance(stop.code, int | None) else None
        raise
