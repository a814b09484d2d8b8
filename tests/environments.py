"""Makes the virtual environments that tests and recipes run in.

python3 tests/environments.py NAME...   makes or reuses them, NAME one of ENVIRONMENTS

An environment is reused while its stamp matches: dependencies in pyproject.toml, constraints.txt
and the Python version. Otherwise it is made again, so that nothing old is left in it.

Versions are those of constraints.txt. `nightly-*` has Keras' nightly build on top of them,
`newest-*` the newest versions that pip finds, `lowest-*` those from which pyproject.toml begins.
`accelerator` has MACHINE, and neither Keras nor kmodels: `make accelerator-rehearsal` brings both.
"""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event, Lock
from typing import Any

if sys.version_info < (3, 11):  # noqa: UP036, this file runs before pip could tell
    sys.exit("kmodels needs Python 3.11 or newer: name one with make PYTHON=python3.11 ...")
import tomllib

ROOT = Path(__file__).resolve().parent.parent
FOLDER = Path(os.environ.get("KMODELS_VENV", ROOT / ".venv"))
LOGS = FOLDER / "logs"
BACKENDS = ("jax", "torch", "tensorflow")
# Other versions than those of constraints.txt, and the prefixes of their environments.
VERSIONS = ("nightly", "newest", "lowest")
# What a machine with a GPU has installed, in builds for CPUs: it lacks Keras.
MACHINE = (
    *("torch==2.11.0", "torchvision==0.26.0", "jax==0.11.2", "jaxlib==0.11.2", "numpy==2.5.2"),
    *("transformers==5.17.0", "tokenizers==0.23.2", "safetensors==0.8.0", "accelerate==1.15.0"),
    *("peft", "timm", "flax", "optax", "h5py", "ml-dtypes", "absl-py", "pillow", "protobuf"),
    *("jinja2", "packaging", "rich", "typer", "matplotlib", "pytest", "hypothesis"),
)
ENVIRONMENTS = {
    **{backend: f"{backend},test" for backend in BACKENDS},
    "full": "jax,torch,tensorflow,dev",
    "vit": "jax,plots",
    "accelerator": ",".join(MACHINE),
    **{f"{kind}-{backend}": f"{backend},test" for kind in VERSIONS for backend in BACKENDS},
}
# Only asked when pip's own sources lack the wheels for CPUs.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
SECONDS_BETWEEN_LINES = 10.0
START = time.monotonic()
_interrupted = Event()


def say(name: str, text: str) -> None:
    """Print one line: time since the start, who, what."""
    passed = int(time.monotonic() - START)
    print(f"{passed // 60:3d}:{passed % 60:02d}  {name:<12} {text}", flush=True)


def run_logged(
    name: str,
    command: Sequence[str | Path],
    log: Path,
    describe: Callable[[str], str],
    limit: float,
    environment: dict[str, str] | None = None,
) -> int:
    """Run a command into a log file and print how far it is every few seconds.

    Args:
        name: who is at work, for the printed lines.
        command: program and arguments; runs in the repository root.
        log: file for stdout and stderr.
        describe: makes a line out of the log's end.
        limit: seconds after which the command and its children are killed.
        environment: the child's variables, by default ours.

    Returns:
        The exit status; 124 if the limit was reached.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    begun = shown = time.monotonic()
    with log.open("w") as out:
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while True:
                try:
                    return process.wait(timeout=0.5)
                except subprocess.TimeoutExpired:
                    now = time.monotonic()
                if _interrupted.is_set():
                    raise KeyboardInterrupt
                if now - begun > limit:
                    say(name, f"stopped after {limit:.0f} s")
                    return 124
                if now - shown >= SECONDS_BETWEEN_LINES:
                    shown = now
                    say(name, describe(log.read_text(errors="replace")[-20_000:]))
        finally:
            try:  # also ends what a stopped run left behind
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()


def side_by_side(function: Callable[..., Any], items: Iterable[Any], at_once: int) -> list[Any]:
    """Calls a function with each item in threads; Ctrl-C ends what `run_logged` runs in them.

    Args:
        function: called with one item.
        items: in the order of the results.
        at_once: maximum number of threads.
    """
    with ThreadPoolExecutor(at_once) as pool:
        try:
            return list(pool.map(function, items))
        except KeyboardInterrupt:
            _interrupted.set()
            raise


def _stamp(name: str) -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [
        project["project"]["dependencies"],
        project["project"]["optional-dependencies"],
        (ROOT / "constraints.txt").read_text(),
        ENVIRONMENTS[name],
        sys.version,
        str(ROOT),
        # What is newest today may not be tomorrow.
        time.strftime("%Y-%m-%d") if name.startswith("newest-") else "",
    ]
    return hashlib.sha256(json.dumps(wanted).encode()).hexdigest()


def floors(extras: str) -> list[str]:
    """Returns a pin of the lowest version for each dependency and for those of the extras.

    If an extra repeats a dependency, its floor counts: JAX needs a newer NumPy than kmodels.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"]]
    for extra in set(extras.split(",")) & set(BACKENDS):
        wanted += project["optional-dependencies"][extra]
    lowest = dict(requirement.split(">=") for requirement in wanted)
    return [f"{name}=={version}" for name, version in lowest.items()]


def _versions(name: str) -> list[str | Path]:
    """Returns pip's options for the versions of an environment."""
    if name.startswith("newest-") or name == "accelerator":
        return []
    if not name.startswith("lowest-"):
        return ["-c", "constraints.txt"]
    LOGS.mkdir(parents=True, exist_ok=True)
    path = LOGS / f"{name}.txt"
    path.write_text("\n".join(floors(ENVIRONMENTS[name])) + "\n")
    return ["-c", path]


_one_download = Lock()


def _cpu_wheels(name: str) -> list[str | Path]:
    """Gets torch's wheels for CPUs, and returns the options by which pip prefers them.

    The plain wheels for Linux are built for CUDA, and bring gigabytes of it.
    """
    with_torch = {"torch", "dev", *MACHINE} & set(ENVIRONMENTS[name].split(","))
    if sys.platform != "linux" or not with_torch:
        return []
    wheels = FOLDER / "wheels" / name.partition("-")[0]
    pinned = [] if name.startswith("newest-") else (ROOT / "constraints.txt").read_text().split()
    if name.startswith("lowest-"):
        pinned = floors("torch")
    if name == "accelerator":
        pinned = list(MACHINE)
    packages = "torch|torchvision" if name in ("full", "accelerator") else "torch"
    pins = [f"{pin}+cpu" for pin in pinned if re.match(rf"({packages})==", pin)]
    index = ["--index-url", TORCH_CPU_INDEX, "--retries", "0"]
    log = LOGS / f"wheels-{name}.log"
    for wanted in pins or ["torch"]:
        command = [
            *(python_of(name), "-m", "pip", "download", "--no-input", "--no-deps"),
            *("--disable-pip-version-check", "--progress-bar", "off", "--dest", wheels, wanted),
        ]
        # Only a pin tells a wheel for CPUs from others in the same place.
        doing = f"getting {wanted}"
        for more in ([], index) if pins else (index,):
            with _one_download:
                if not run_logged(name, [*command, *more], log, lambda _, doing=doing: doing, 600):
                    break
        else:
            say(name, f"{wanted} for CPUs is not at hand; the build for CUDA is large")
    return ["--find-links", wheels]


def _describe_install(place: Path, tail: str) -> str:
    """Says what pip is doing: its log tells while it loads, site-packages while it unpacks."""
    lines = [line.strip() for line in tail.splitlines()]
    kept = [line for line in lines if line.startswith(("Collecting", "Downloading", "Installing"))]
    if lines and lines[-1].startswith("Successfully"):
        return "unpacked, pip removes what it loaded"
    if not kept or not kept[-1].startswith("Installing collected"):
        return kept[-1][:80] if kept else "asking for packages"
    done = sum(1 for _ in place.glob("lib/python*/site-packages/*.dist-info"))
    return f"unpacking, {done} of about {kept[-1].count(',') + 1} packages"


def python_of(name: str) -> Path:
    """The interpreter of an environment."""
    return FOLDER / name / "bin" / "python"


def _pip(name: str, doing: str, *words: str) -> bool:
    """Returns whether pip did as asked; if not, prints the end of its log."""
    command = [python_of(name), "-m", "pip", "--no-input", "--disable-pip-version-check", *words]
    log = LOGS / f"{words[0]}-{words[-1]}-{name}.log"
    status = run_logged(name, command, log, lambda _: doing, 300)
    if status:
        print(log.read_text(errors="replace")[-3000:], flush=True)
    return not status


def _take_nightly(name: str) -> bool:
    """Puts Keras' nightly in the place of Keras: both are the package `keras`, so one has to go."""
    doing, pins = "taking Keras' nightly", ("--no-compile", "--no-deps", "-c", "constraints.txt")
    return _pip(name, doing, "uninstall", "--yes", "keras") and _pip(
        name, doing, "install", *pins, "keras-nightly"
    )


def _prefer_fork(name: str) -> bool:
    """Puts the fork of docstring_parser that pydoclint needs over the one that keras-cv brings.

    Both are the same module, and the fork has all of the other.
    """
    words = ("install", "--no-compile", "--no-deps", "--force-reinstall", "-c", "constraints.txt")
    return _pip(name, "taking a fork of docstring_parser", *words, "docstring_parser_fork")


def make_environment(name: str) -> bool:
    """Makes an environment or reuses it; returns False after printing the log if pip failed."""
    extras, place = ENVIRONMENTS[name], FOLDER / name
    stamp = place / "kmodels-stamp"
    if stamp.is_file() and stamp.read_text() == _stamp(name):
        say(name, "environment is up to date")
        return True
    if place.exists():
        shutil.rmtree(place)
    wanted = MACHINE if name == "accelerator" else ("-e", f".[{extras}]")
    say(name, f"making an environment with {' '.join(wanted)}")
    begun = time.monotonic()
    venv.create(place, with_pip=True)
    log = LOGS / f"install-{name}.log"
    command: list[str | Path] = [
        *(python_of(name), "-m", "pip", "install", "--no-input", "--disable-pip-version-check"),
        *("--progress-bar", "off", "--no-compile", *_versions(name), *_cpu_wheels(name)),
        *wanted,
    ]
    status = run_logged(name, command, log, partial(_describe_install, place), 1500)
    if status:
        say(name, f"pip failed with status {status}; the end of {log}:")
        print("\n".join(log.read_text(errors="replace").splitlines()[-30:]), flush=True)
        return False
    if name.startswith("nightly-") and not _take_nightly(name):
        return False
    if name == "full" and not _prefer_fork(name):
        return False
    stamp.write_text(_stamp(name))
    say(name, f"installed in {time.monotonic() - begun:.0f} s")
    return True


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in ENVIRONMENTS]
    if unknown or not names:
        print(f"unknown {unknown}: name some of {', '.join(ENVIRONMENTS)}", file=sys.stderr)
        return 2
    return 0 if all(side_by_side(make_environment, names, 2)) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
