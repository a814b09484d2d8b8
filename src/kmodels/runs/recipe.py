"""What every recipe shares: flags from one dataclass, the run's folder, exit codes.

Nothing here imports Keras at import time: a wrong setting is told before a backend is loaded.
"""

import argparse
import contextlib
import dataclasses
import difflib
import fcntl
import json
import os
import sys
import time
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from kmodels.core.errors import InputError
from kmodels.core.files import atomic_write, local_path
from kmodels.runs import report

BACKENDS = ("jax", "torch", "tensorflow")
# Where launchers say how many processes they have started.
_STARTED = ("WORLD_SIZE", "KERAS_DISTRIBUTION_NUM_PROCESSES")


def flag(default: Any, text: str, *, choices: Sequence[Any] = (), small: Any = None) -> Any:
    """A field of a recipe's settings.

    Args:
        default: its value where the flag is not given; its annotation decides the type.
        text: for --help.
        choices: values that are allowed.
        small: the default under KMODELS_SMALL=1.
    """
    return dataclasses.field(
        default=default, metadata={"help": text, "choices": tuple(choices), "small": small}
    )


class _Parser(argparse.ArgumentParser):
    """One line for what is wrong, and the nearest flag for a mistyped one."""

    flags: tuple[str, ...] = ()

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            word = unknown.split()[0].split("=")[0]
            near = difflib.get_close_matches(word, self.flags, 1)
            message = f"unknown flag {word}"
            message += f"; did you mean {near[0]}?" if near else "; --help lists the flags"
        raise InputError(message.replace("\n", " "))


@dataclasses.dataclass(frozen=True)
class Common:
    """The flags that every recipe has."""

    batch_size: int = flag(64, "examples per step, over all devices")
    steps: int | None = flag(None, "batches in all, instead of epochs")
    precision: str = flag("float32", "dtype policy", choices=("float32", "mixed_bfloat16"))
    matmul_precision: str = flag("default", "of matmuls", choices=("highest", "high", "default"))
    memory_fraction: float | None = flag(None, "share of an accelerator's memory to use")
    mesh: str | None = flag(None, "devices, as in data=4, fsdp=8 or data=2,model=2")
    workers: int = flag(0, "processes that prepare batches")
    seed: int = flag(0, "of first weights, order, augmentation and dropout")
    out: str | None = flag(None, "directory of the run; runs/<recipe>-<time> by default")
    resume: bool = flag(False, "go on from the newest checkpoint in --out, or of the newest run")
    evaluate: bool = flag(False, "only evaluate the newest checkpoint in --out, or else --weights")
    checkpoint_every: str = flag("0", "steps between checkpoints, or 300s; 0 makes one per epoch")
    keep: int = flag(2, "newest checkpoints to keep")
    log_every: int = flag(10, "steps between fetching and writing losses")


def parse(
    settings: type, argv: Sequence[str] | None = None, description: str = "", recipe: str = ""
) -> Any:
    """Settings from the command line.

    With --resume or --evaluate, flags that are not given are those of the run in --out. --resume
    alone goes on with the newest run of the recipe.

    Args:
        settings: a dataclass whose fields are made by `flag`.
        argv: arguments; the process's by default.
        description: for --help.
        recipe: its name.

    Raises:
        InputError: for an unknown flag or a value that does not fit, or where there is no run to
            go on with.
    """
    parser = _Parser(
        description=description,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    small = os.environ.get("KMODELS_SMALL") == "1"
    hints = typing.get_type_hints(settings)
    defaults: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        kind, default = _kind(hints[field.name]), field.default
        if small and field.metadata["small"] is not None:
            default = field.metadata["small"]
        defaults[field.name] = default
        shown = "" if default in (None, "", False) else f" (default: {default})"
        options: dict[str, Any] = {"help": (field.metadata["help"] + shown).replace("%", "%%")}
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["type"] = kind
            options["metavar"] = kind.__name__.upper()
        if field.metadata["choices"]:
            options["choices"] = field.metadata["choices"]
            options["metavar"] = "|".join(map(str, field.metadata["choices"]))
        parser.add_argument("--" + field.name.replace("_", "-"), **options)
    parser.flags = tuple(parser._option_string_actions)
    given = vars(parser.parse_args(argv))
    if recipe and given.get("resume") and not given.get("out"):
        given["out"] = _newest_run(recipe)
    if given.get("out") and (given.get("resume") or given.get("evaluate")):
        defaults |= _former(local_path(given["out"]) / "config.json", defaults)
    return settings(**{**defaults, **given})


def _newest_run(recipe: str) -> str:
    """The directory in runs/ where the recipe has saved a checkpoint last."""
    found = [
        (max(step.stat().st_mtime for step in steps), str(file.parent))
        for file in Path("runs").glob("*/config.json")
        if (steps := list(file.parent.glob("checkpoints/step_*")))
        and _read(file).get("recipe") == recipe
    ]
    if not found:
        raise InputError(
            f"--resume finds no run of {recipe} with a checkpoint in {Path('runs').resolve()}; "
            "give its directory by --out"
        )
    out = max(found)[1]
    print(f"--resume goes on with {out}, the newest run of {recipe}", flush=True)
    return out


def _former(file: Path, known: dict[str, Any]) -> dict[str, Any]:
    """Settings of the run that is gone on with, less what belongs to one call."""
    found = _read(file) if file.exists() else {}
    return {k: v for k, v in found.items() if k in known and k not in ("out", "resume", "evaluate")}


def _read(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read: {error}") from error


def _kind(annotation: Any) -> type:
    """The type within `X | None`."""
    if isinstance(annotation, types.UnionType):
        annotation = next(part for part in annotation.__args__ if part is not type(None))
    return annotation


def given(**values: Any) -> dict[str, Any]:
    """Those that are not None: a flag left out leaves the preset's own value."""
    return {name: value for name, value in values.items() if value is not None}


def at_least(settings: Any, **limits: float) -> None:
    """Checks lower bounds: `at_least(settings, epochs=1)`."""
    for name, limit in limits.items():
        value = getattr(settings, name)
        if value is not None and not value >= limit:
            raise InputError(f"--{name.replace('_', '-')} is {value}; give at least {limit}")


def check_fractions(settings: Any, *names: str) -> None:
    """Checks that these are in [0, 1)."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and not 0 <= value < 1:
            raise InputError(f"--{name.replace('_', '-')} is {value}; give at least 0, below 1")


def numbers(settings: Any, name: str, count: int) -> tuple[float, ...] | None:
    """A setting such as "2,9" as numbers; whole ones are int. None stays None."""
    text = getattr(settings, name)
    if text is None:
        return None
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if len(values) != count:
        raise InputError(
            f"--{name.replace('_', '-')} is {text!r}; give {count} numbers, a comma between them"
        )
    return tuple(int(value) if value == int(value) else value for value in values)


def check_backend() -> None:
    """Chooses an installed backend where none is named; raises `InputError` for a wrong one."""
    from importlib.util import find_spec

    name = os.environ.get("KERAS_BACKEND")
    installed = [backend for backend in BACKENDS if find_spec(backend)]
    if name is None:
        # Keras' own default is TensorFlow, which need not be there.
        if installed and "tensorflow" not in installed and not _keras_config().exists():
            os.environ["KERAS_BACKEND"] = installed[0]
    elif name not in BACKENDS:
        raise InputError(f"KERAS_BACKEND is {name!r}; choose one of {', '.join(BACKENDS)}")
    elif name not in installed:
        raise InputError(f"KERAS_BACKEND is {name!r}, which is not installed: pip install {name}")


def _keras_config() -> Path:
    return Path(os.environ.get("KERAS_HOME", "~/.keras")).expanduser() / "keras.json"


def prepare(settings: Any) -> None:
    """Checks the common flags; sets memory, precision, caches, mesh and seed. Call it first.

    Args:
        settings: a `Common`.
    """
    import keras

    from kmodels import distribution
    from kmodels.core import hardware, precision

    at_least(settings, batch_size=1, steps=1, keep=1, log_every=1, workers=0)

    if settings.memory_fraction is not None:
        precision.memory_fraction(settings.memory_fraction)
    precision.set_matmul_precision(settings.matmul_precision)
    hardware.keep_compiled()
    distribution.distribute(settings.mesh, settings.batch_size)
    if not 0 <= settings.seed < 2**32:
        raise InputError(f"--seed is {settings.seed}; give a whole number from 0 to 2**32 - 1")
    keras.utils.set_random_seed(settings.seed)


def parallelize(model: Any) -> Any:
    """The model to compile: over the devices of --mesh, or as it is where none was given."""
    from kmodels import distribution

    plan = distribution.current()
    return model if plan is None else plan.prepare(model)


def run_options(settings: Any, fixed: Sequence[str]) -> dict[str, Any]:
    """What `training.Runner` takes from the common flags.

    Args:
        settings: a `Common`.
        fixed: names of the settings that a resumed run must share with the one it continues.
    """
    names = ("batch_size", "log_every", "checkpoint_every", "keep", "resume")
    options = {name: getattr(settings, name) for name in names}
    return {**options, "settings": {name: getattr(settings, name) for name in fixed}}


class Folder:
    """The directory of a run, held against a second run by a lock that dies with the process.

    Of a run of several processes, the first one makes and holds it.

    Args:
        recipe: its name.
        out: the directory; runs/<recipe>-<time> by default.
        settings: of the run.
        resume: whether an earlier run may be in it.

    Raises:
        InputError: where it cannot be written, holds a run, or another process uses it.
    """

    def __init__(self, recipe: str, out: str | None, settings: Any, resume: bool = False):
        self.recipe, self.settings = recipe, settings
        self._lock: Any = None
        processes = _processes()
        self.main = processes is None or processes.is_rank_zero()
        if processes is None:
            self._take(out, resume)
        else:
            path = processes.broadcast("the folder of the run", lambda: self._take(out, resume))
            self.path = Path(path)

    def _take(self, out: str | None, resume: bool) -> str:
        name = out or f"runs/{self.recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
        self.path = local_path(name)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / ".lock").open("w")
        except OSError as error:
            raise InputError(
                f"cannot write to --out {self.path}: {error.strerror}; give another directory"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise InputError(f"another run is using --out {self.path}; give another") from error
        if not resume and self.has_checkpoints:
            self.close()
            raise InputError(
                f"--out {self.path} holds checkpoints of a run; add --resume to go on with it, or "
                "give another directory"
            )
        return str(self.path)

    @property
    def has_checkpoints(self) -> bool:
        """Whether a run was saved in it."""
        return any((self.path / "checkpoints").glob("step_*"))

    def write_config(self) -> Path:
        """Writes config.json, the settings in force."""
        content = {"recipe": self.recipe, **dataclasses.asdict(self.settings)}
        return self.write_json("config.json", content)

    def write_json(self, name: str, content: dict[str, Any]) -> Path:
        """Writes a file of the run, atomically; numbers that are not finite become null.

        In a run of several processes the first one writes.
        """
        if not self.main:
            return self.path / name
        text = json.dumps(_plain(content), indent=1, allow_nan=False) + "\n"
        return atomic_write(self.path / name, lambda path: path.write_text(text))

    def write_report(self) -> None:
        """Writes report.html, one page that shows the run."""
        if self.main:
            report.write(self.path)

    def close(self) -> None:
        """Lets go of the directory; removes it where nothing was written."""
        if self._lock is None:
            return
        self._lock.close()
        if [path.name for path in self.path.iterdir()] == [".lock"]:
            (self.path / ".lock").unlink()
            self.path.rmdir()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not (abs(value) < float("inf")):
        return None
    return value


def main(
    recipe: str,
    settings: type,
    train: Callable[[Any, Folder], None],
    argv: Sequence[str] | None = None,
    description: str = "",
) -> int:
    """Runs a recipe and returns its exit code.

    0 done; 2 wrong settings or input, with one line on stderr; 143 or 130 stopped by a signal after
    saving.

    Args:
        recipe: its name.
        settings: dataclass of its flags, with `out` and `resume`, maybe `evaluate`.
        train: called with the settings and the run's folder.
        argv: arguments; the process's by default.
        description: for --help.
    """
    folder = None
    try:
        chosen = parse(settings, argv, description, recipe)
        check_backend()
        _join(getattr(chosen, "mesh", None))
        again = chosen.resume or getattr(chosen, "evaluate", False)
        folder = Folder(recipe, chosen.out, chosen, again)
        with _shown(folder.main):
            train(chosen, folder)
        folder.write_report()
    except InputError as error:
        print(f"{recipe}: error: {_one_line(error)}", file=sys.stderr)
        if (processes := _processes()) is not None:
            if folder is not None:
                folder.close()
            processes.give_up(2)
        return 2
    except KeyboardInterrupt:
        print(f"{recipe}: stopped before or after training", file=sys.stderr)
        return 130
    except SystemExit as stop:
        # Stopped by a signal, which was said; the class is not imported, as it would bring Keras.
        if (signum := getattr(stop, "signum", None)) is None:
            raise
        return 128 + signum
    finally:
        if folder is not None:
            folder.close()
    return 0


def _join(mesh: str | None) -> None:
    """Makes this process one of those that train together, if there are others."""
    if mesh:
        from kmodels.distribution import processes

        processes.join()
        return
    started = max(int(os.environ.get(name) or 1) for name in _STARTED)
    if started > 1:
        raise InputError(
            f"this is one of {started} processes, each of which would train alone; add "
            "--mesh data=-1, or start one"
        )


def _processes() -> Any:
    """`kmodels.distribution.processes` in a run of several of them, else None."""
    module = sys.modules.get("kmodels.distribution.processes")
    return module if module is not None and module.count() > 1 else None


@contextlib.contextmanager
def _shown(main: bool) -> Iterator[None]:
    """What is printed in the block is shown by the first process alone."""
    if main:
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
