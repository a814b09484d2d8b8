"""Sets up what all tests share: the backend, virtual devices, references, markers, no network.

One process tests one backend. These variables decide (tests/run.py sets all of them):

KERAS_BACKEND        the backend; default: the first of jax, torch, tensorflow that is installed
KMODELS_ENVIRONMENT  jax, torch, tensorflow (only that framework is installed) or full (everything)
KMODELS_REFERENCES   folder written by tests/write_references.py; default tests/.references
KMODELS_EXCHANGE     folder where backends leave files for the tests that compare them
"""

import functools
import gc
import ipaddress
import os
import re
import runpy
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

BACKENDS = ("jax", "torch", "tensorflow")
ENVIRONMENT = os.environ.get("KMODELS_ENVIRONMENT", "")
TESTS = Path(__file__).parent
# The others run on torch alone: what they prove does not depend on the backend.
ON_EACH_BACKEND = ("numerics", "loop")
DEVICES = 8
# Virtual devices for multi-device tests; all others let XLA compile faster, which is most of what
# tests of small models take on JAX.
XLA_FLAGS = (
    f"--xla_force_host_platform_device_count={DEVICES}",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
)
# XLA ends the process for a flag that it does not know, as jaxlib 0.12 does for this one.
UNTIL_JAXLIB_0_11 = "--xla_cpu_use_fusion_emitters=false"


def _default_backend() -> str:
    installed = [name for name in BACKENDS if find_spec(name)]
    if not installed:
        raise pytest.UsageError(
            "no backend is installed: pip install -c constraints.txt -e '.[jax,test]'"
        )
    return installed[0]


def _xla_flags(given: str) -> str:
    ours = [*XLA_FLAGS]
    if find_spec("jaxlib") and tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):
        ours.append(UNTIL_JAXLIB_0_11)
    return " ".join([given, *(flag for flag in ours if flag.split("=")[0] not in given)]).strip()


# What a shell starts in the background ignores Ctrl-C, and nohup SIGHUP; some tests send both.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
# Everything here must stand before the first import of keras, in this process and in children.
os.environ.setdefault("KERAS_BACKEND", _default_backend())
BACKEND = os.environ["KERAS_BACKEND"]
os.environ["XLA_FLAGS"] = _xla_flags(os.environ.get("XLA_FLAGS", ""))
os.environ["MPLBACKEND"] = "agg"
os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "cpu")
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Keras imports scikit-learn and Matplotlib where they are, half of what a process takes to start,
# and the garbage collector runs too often.
CHILDREN = Path(__file__).parent / "children"
runpy.run_path(str(CHILDREN / "sitecustomize.py"))
_paths = (CHILDREN, Path(__file__).parents[1] / "src", os.environ.get("PYTHONPATH", ""))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, map(str, _paths)))
# Child processes are out of reach of `_forbid_network`; a dead proxy stops theirs at once.
os.environ["HTTP_PROXY"] = os.environ["HTTPS_PROXY"] = "http://127.0.0.1:9"
os.environ["NO_PROXY"] = "localhost,127.0.0.1,::1"

if BACKEND == "tensorflow":
    import tensorflow as tf

    _cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(_cpu, [tf.config.LogicalDeviceConfiguration()] * 2)

    from quick_graphs_tensorflow import keep_no_stacks

    keep_no_stacks()

if BACKEND == "jax":
    import jax
    from jax._src.interpreters import mlir

    # JAX computes the key of each program, 2 % of the time, even if there is no persistent cache.
    jax.config.update("jax_enable_compilation_cache", False)

    # JAX lowers each program in an MLIR context of its own, which takes 5 to 7 ms of the 23 ms of a
    # small program. One context serves all programs of a process.
    if hasattr(mlir, "make_ir_context"):
        mlir.make_ir_context = functools.cache(mlir.make_ir_context)

    from compiled_once_jax import compile_equal_programs_once

    compile_equal_programs_once()

if ENVIRONMENT == "full":
    from torchvision_cpu import define_torchvision_operators

    define_torchvision_operators()


def _is_local(host: object) -> bool:
    if isinstance(host, bytes):
        host = host.decode()
    if host in (None, "", "localhost", socket.gethostname()):
        return True
    try:
        return ipaddress.ip_address(str(host)).is_loopback or str(host) in ("0.0.0.0", "::")
    except ValueError:
        return False


def _forbid_network() -> None:
    """Lets only Unix sockets and the loopback through (notebook kernels and process groups).

    An audit hook would also be called for each `id()`, which takes 3 to 5 % of the time.
    """

    def guard(owner: Any, name: str, find_host: Callable[..., Any]) -> None:
        call = getattr(owner, name)

        @functools.wraps(call)
        def guarded(*arguments: Any, **named: Any) -> Any:
            if not _is_local(host := find_host(*arguments, **named)):
                raise RuntimeError(f"a test tried to reach {host!r}; tests run without a network")
            return call(*arguments, **named)

        setattr(owner, name, guarded)

    def host_of(address: Any) -> Any:
        return address[0] if isinstance(address, tuple) else None

    for name in ("connect", "connect_ex", "sendto"):
        guard(socket.socket, name, lambda *arguments: host_of(arguments[-1]))
    guard(socket.socket, "sendmsg", lambda *arguments: host_of((*arguments, *[None] * 5)[4]))
    for name in ("getaddrinfo", "gethostbyname", "gethostbyname_ex"):
        guard(socket, name, lambda host, *arguments, **named: host)


_forbid_network()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--across",
        action="store_true",
        help="run only the tests that need two frameworks or optional packages",
    )
    parser.addoption(
        "--nightly", action="store_true", help="run what takes minutes, too: make test-all"
    )


def pytest_report_header() -> str:
    return f"kmodels: backend {BACKEND}, environment {ENVIRONMENT or 'not named'}"


def _missing(item: pytest.Item) -> list[str]:
    needed = [name for mark in item.iter_markers("needs") for name in mark.args]
    return [name for name in needed if not find_spec(name)]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Spares a run the import of files from which it would choose nothing."""
    if collection_path.suffix != ".py" or ENVIRONMENT not in (*BACKENDS, "full"):
        return None
    text = collection_path.read_text()
    if config.getoption("--across"):
        return ("mark.across" not in text and "mark.needs" not in text) or None
    if BACKEND == "torch" or collection_path.relative_to(TESTS).parts[0] in ON_EACH_BACKEND:
        return None
    tonight = config.getoption("--nightly")
    mark = "each_backend" if tonight else r"each_backend(?!\(\"nightly)"
    return not re.search(mark, text) or None


def _waits_for_the_night(item: pytest.Item) -> bool:
    """Returns whether `make test` leaves a test to `make test-all` on this backend."""
    if any(BACKEND in (mark.args or BACKENDS) for mark in item.iter_markers("nightly")):
        return True
    return any(
        BACKEND in mark.kwargs.get("on", BACKENDS) and item.callspec.id not in mark.args
        for mark in item.iter_markers("each_time")
    )


def _check_each_time(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Raises `pytest.UsageError` if `each_time` names no case of a test: none would ever run."""
    if any("::" in argument for argument in config.args):
        return
    cases: dict[str, set[str]] = {}
    named: dict[str, set[str]] = {}
    for item in items:
        for mark in item.iter_markers("each_time"):
            test = item.nodeid.partition("[")[0]
            cases.setdefault(test, set()).add(item.callspec.id)
            named.setdefault(test, set()).update(mark.args)
    for test, names in named.items():
        if not names & cases[test]:
            raise pytest.UsageError(
                f"each_time of {test} names {sorted(names)}; its cases are {sorted(cases[test])}"
            )


def _is_for_this_backend(item: pytest.Item, nightly: bool) -> bool:
    if BACKEND == "torch":
        return True
    if mark := item.get_closest_marker("each_backend"):
        return nightly or "nightly" not in mark.args
    on_each = item.path.relative_to(TESTS).parts[0] in ON_EACH_BACKEND
    return on_each and not item.get_closest_marker("once")


def _is_chosen(item: pytest.Item, across: bool, nightly: bool) -> bool:
    """Returns whether a test belongs to this run; see the markers in pyproject.toml."""
    marks = list(item.iter_markers("across"))
    needs = item.get_closest_marker("needs") is not None
    if across:
        backends = [name for mark in marks for name in mark.args] or ["torch"]
        return bool(marks or needs) and BACKEND in backends
    if ENVIRONMENT not in BACKENDS:
        return not marks
    # The full environment runs what a single one lacks by design: deselected, not skipped.
    return not marks and not _missing(item) and _is_for_this_backend(item, nightly)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    across, nightly = config.getoption("--across"), config.getoption("--nightly")
    _check_each_time(config, items)
    chosen = {
        item
        for item in items
        if _is_chosen(item, across, nightly) and (nightly or not _waits_for_the_night(item))
    }
    if left := [item for item in items if item not in chosen]:
        config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item in chosen]
    if ENVIRONMENT == "full":
        return  # there a missing package is a failure
    for item in items:
        if missing := _missing(item):
            item.add_marker(pytest.mark.skip(reason=f"needs {', '.join(missing)}"))


def pytest_collection_finish() -> None:
    """Keeps what was imported out of the garbage collector's way."""
    gc.freeze()


@pytest.fixture(scope="session")
def backend() -> str:
    """Name of the backend under test."""
    return BACKEND


@pytest.fixture(scope="session")
def references() -> Path:
    """Folder with the tiny models and outputs that tests/write_references.py writes."""
    folder = Path(os.environ.get("KMODELS_REFERENCES", TESTS / ".references"))
    if not folder.is_dir() or not any(folder.iterdir()):
        pytest.fail(
            f"no references in {folder}: write them with 'python3 tests/run.py --references', "
            "or with 'python tests/write_references.py' where transformers, timm and peft are"
        )
    return folder


@pytest.fixture(scope="session")
def exchange(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder shared by all runs of one `make test`; a backend writes to `exchange / backend`."""
    named = os.environ.get("KMODELS_EXCHANGE")
    folder = Path(named) if named else tmp_path_factory.mktemp("exchange")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the programs of an environment in which the wheel is installed."""
    import installed_wheel

    folder = tmp_path_factory.mktemp("wheel")
    return installed_wheel.install(installed_wheel.build(folder), folder / "environment")


@pytest.fixture(scope="session")
def forked_programs(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """As `programs`, and their processes are forks where that is possible."""
    import installed_wheel
    from forked_python import can_fork, forked_python

    if not can_fork():
        yield programs
        return
    variables = installed_wheel.variables(programs, tmp_path_factory.mktemp("home"))
    real = str(programs / "python")
    with (
        tempfile.TemporaryDirectory() as folder,
        forked_python(Path(folder), real, variables) as python,
    ):
        _, script = (programs / "kmodels").read_text().split("\n", 1)
        command = Path(folder, "kmodels")
        command.write_text(f"#!{python}\n{script}")
        command.chmod(0o755)
        yield Path(folder)


@pytest.fixture(scope="module", autouse=True)
def _clean_session():
    """Free Keras' global state once per module; per test it would cost more than it gives."""
    yield
    if "keras" in sys.modules:
        sys.modules["keras"].utils.clear_session()
    if "compiled_once_jax" in sys.modules:
        sys.modules["compiled_once_jax"].let_programs_go()
    # What is left, compiled programs above all, stays until the process ends.
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _graphs(request: pytest.FixtureRequest):
    """Have TensorFlow rewrite graphs where that is part of what a file tests."""
    if BACKEND == "tensorflow":
        from quick_graphs_tensorflow import rewrite_graphs_of

        rewrite_graphs_of(request.path)


@pytest.fixture(autouse=True)
def _seed():
    """Start each test from one seed, so that its result does not hang on its neighbours."""
    import keras

    keras.utils.set_random_seed(1234)
