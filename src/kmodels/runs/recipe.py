"""Shared parts of recipes: flags from one dataclass, the run's folder, exit codes.

Nothing here imports Keras at import time: a wrong setting is told before a backend is loaded.
"""

import contextlib
import dataclasses
import functools
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kmodels.core.backend_choice import check_backend
from kmodels.core.errors import InputError
from kmodels.core.files import local_path
from kmodels.runs import on_ray, trackers
from kmodels.runs.console import say, say_facts, say_metrics, working, wrapped
from kmodels.runs.console import short as _short
from kmodels.runs.flags import Common, flag, parse
from kmodels.runs.introduction import introduce
from kmodels.runs.output import checked_output
from kmodels.runs.run_folder import Folder, joined_processes
from kmodels.runs.settings_checks import at_least, check_fractions, given, numbers

if TYPE_CHECKING:
    import keras

__all__ = [
    "Common",
    "Folder",
    "InputError",
    "at_least",
    "can_generate",
    "can_merge",
    "causal_lm_of",
    "check_backend",
    "check_fractions",
    "flag",
    "given",
    "introduce",
    "local_path",
    "main",
    "numbers",
    "parallelize",
    "parse",
    "prepare",
    "run_options",
    "say",
    "say_facts",
    "say_metrics",
    "work",
    "working",
]

# Variables in which launchers say how many processes they have started.
_STARTED = ("WORLD_SIZE", "KERAS_DISTRIBUTION_NUM_PROCESSES")
_NOT_TRAINING = "stopped; no training was in progress, so nothing was saved"
# A KeyboardInterrupt that took longer to arrive was swallowed, as in a callback of JAX.
_ARRIVES_SECONDS = 1.0


def prepare(settings: Any) -> None:
    """Checks the common flags; sets memory, precision, caches, mesh and seed. Call it first.

    Args:
        settings: a `Common`.
    """
    from kmodels import distribution
    from kmodels.core import hardware, keras_internals, precision

    at_least(settings, batch_size=1, steps=1, keep=1, log_every=1, workers=0)
    if settings.log_to is not None:
        trackers.check(settings.log_to)

    if settings.memory_fraction is not None:
        precision.memory_fraction(settings.memory_fraction)
    precision.set_matmul_precision(settings.matmul_precision)
    hardware.keep_compiled()
    distribution.distribute(settings.mesh, settings.batch_size)
    if not 0 <= settings.seed < 2**32:
        raise InputError(f"--seed is {settings.seed}; give a whole number from 0 to 2**32 - 1")
    keras_internals.set_random_seed(settings.seed)
    working(None)


def causal_lm_of(path: Any) -> type:
    """Returns the class of the language model at a path, such as `GemmaCausalLM`."""
    from kmodels import presets

    return presets.causal_lm_of(path)


def can_generate(model: "keras.Model") -> bool:
    """Returns whether `generate` works; in FSDP2 layers have their weights in a step alone."""
    from kmodels.weights import gather

    return _passes(gather.check_callable, model)


def can_merge(model: "keras.Model", origin: object, adapter: Path) -> bool:
    """Returns whether adapters can be merged, for which a process must hold all weights.

    Where it does not, a line says how they are merged afterwards.

    Args:
        model: with adapters.
        origin: what it was made of.
        adapter: directory of the adapters.
    """
    from kmodels.weights import gather

    merges = _passes(gather.check_whole, model)
    if not merges:
        say(
            "not merged, since each process holds a part of the weights; on one machine run "
            f"kmodels convert {origin} merged --to hf --adapter {adapter}"
        )
    return merges


def parallelize(model: "keras.Model") -> Any:
    """Returns the model to compile, over the devices of --mesh where one was given."""
    from kmodels import distribution

    plan = distribution.current()
    return model if plan is None else plan.prepare(model)


def run_options(settings: Any, fixed: Sequence[str]) -> dict[str, Any]:
    """Returns what `training.Runner` takes from the common flags.

    Args:
        settings: a `Common`.
        fixed: names of the settings that a resumed run must share with the one it continues.
    """
    names = ("batch_size", "log_every", "checkpoint_every", "keep", "resume", "log_to")
    options = {name: getattr(settings, name) for name in names}
    options["config"] = dataclasses.asdict(settings)
    return {**options, "settings": {name: getattr(settings, name) for name in fixed}}


def main(
    recipe: str,
    settings: type,
    train: Callable[[Any, Folder], None],
    argv: Sequence[str] | None = None,
    description: str = "",
    program: str = "",
) -> int:
    """Runs a recipe and returns its exit code.

    0 done; 2 wrong settings or input, with one line on stderr; 143 or 130 stopped by a signal after
    saving; 141 stopped after saving because standard output was closed; 74 done, but standard
    output could not be written.

    Args:
        recipe: its name.
        settings: dataclass of its flags, with `out` and `resume`, maybe `evaluate`.
        train: called with the settings and the run's folder.
        argv: arguments; the process's by default.
        description: for --help.
        program: what --help calls it; the recipe's file by default.
    """
    program = program or f"{recipe}.py"
    try:
        with checked_output() as output, _interruptible(recipe):
            chosen = parse(settings, argv, description, recipe, program)
            check_backend()
            output.trains = True
            command = _command(argv, program)
            bound = functools.partial(work, recipe=recipe, train=train, command=command)
            if getattr(chosen, "on", None) is not None:
                on_ray.run(recipe, chosen, train, bound)
            else:
                bound(chosen)
        return output.code
    except InputError as error:
        working(None)
        _say_error(f"{recipe}: error: {_one_line(error)}")
        if (processes := joined_processes()) is not None:
            processes.give_up(2)
        return 2
    except KeyboardInterrupt:
        print(f"{recipe}: {_NOT_TRAINING}", file=sys.stderr)
        return 130
    except SystemExit as stop:
        # Stopped by a signal, which was said; the class is not imported, as it would bring Keras.
        if (signum := getattr(stop, "signum", None)) is None:
            raise
        return 128 + signum
    finally:
        working(None)


def work(settings: Any, recipe: str, train: Callable[[Any, Folder], None], command: str) -> None:
    """Runs a recipe in this process, or in each of those that train together.

    Args:
        settings: of the run.
        recipe: its name.
        train: called with the settings and the run's folder.
        command: the command line that started it.

    Raises:
        InputError: for wrong settings or input.
    """
    folder = None
    try:
        _join(getattr(settings, "mesh", None))
        again = settings.resume or getattr(settings, "evaluate", False)
        folder = Folder(recipe, settings.out, settings, again)
        folder.begin(command)
        with _shown(folder.main):
            working(f"loading Keras on {os.environ.get('KERAS_BACKEND', 'its backend')}")
            train(settings, folder)
            working(None)
            trackers.finish(folder.path)
            say(f"report: {_short(folder.write_report())}")
        folder.check_exists()
    except Exception:
        if folder is not None:
            folder.check_exists()
        raise
    finally:
        trackers.give_up()
        working(None)
        if folder is not None:
            folder.close()


@contextlib.contextmanager
def _interruptible(recipe: str) -> Iterator[None]:
    """Ends the process soon after SIGINT inside the block, also where the exception is swallowed.

    Training has a handler of its own, which saves first.
    """
    former = signal.getsignal(signal.SIGINT)
    if (
        former is not signal.default_int_handler
        or threading.current_thread() is not threading.main_thread()
    ):
        yield
        return

    def end() -> None:
        print(f"{recipe}: {_NOT_TRAINING}", file=sys.stderr, flush=True)
        os._exit(130)

    later = threading.Timer(_ARRIVES_SECONDS, end)
    later.daemon = True

    def interrupt(signum: int, frame: object) -> None:
        if later.ident is not None:
            end()
        later.start()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
        later.cancel()


def _passes(check: Callable[["keras.Model", str], None], model: "keras.Model") -> bool:
    try:
        check(model, "the recipe")
    except InputError:
        return False
    return True


def _command(argv: Sequence[str] | None, program: str) -> str:
    """Returns the command line as it would be typed again."""
    words = [*program.split(), *(sys.argv[1:] if argv is None else argv)]
    if argv is None:
        words = ["python", sys.argv[0], *sys.argv[1:]]
    chosen = os.environ.get("KERAS_BACKEND")
    return (f"KERAS_BACKEND={chosen} " if chosen else "") + shlex.join(words)


def _say_error(text: str) -> None:
    """Prints one line; on a terminal its words stay whole."""
    print(wrapped(text, 2) if sys.stderr.isatty() else text, file=sys.stderr)


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


@contextlib.contextmanager
def _shown(main: bool) -> Iterator[None]:
    """Lets rank zero alone show what is printed inside the block."""
    if main:
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
