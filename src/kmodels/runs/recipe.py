"""Shared parts of recipes: flags from one dataclass, the run's directory, exit codes.

Nothing here imports Keras at import time, so wrong settings are reported before a backend loads.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kmodels.core.environment import check_backend, started_processes
from kmodels.core.errors import InputError, check_whole, one_line
from kmodels.core.files import is_remote, local_path
from kmodels.runs import report, trackers
from kmodels.runs.console import introduce, say, say_facts, say_metrics, working, wrapped
from kmodels.runs.console import short as _short
from kmodels.runs.run_folder import Folder, check_new, has_checkpoints, joined_processes, path_of
from kmodels.runs.settings import (
    FOLDERS,
    Common,
    at_least,
    check_fractions,
    flag,
    given,
    numbers,
    parse,
    texts_of,
)
from kmodels.runs.terminal import checked_output

if TYPE_CHECKING:
    import keras

__all__ = [
    "Common",
    "Folder",
    "InputError",
    "as_text",
    "at_least",
    "can_generate",
    "can_merge",
    "causal_lm_of",
    "check_backend",
    "check_fractions",
    "filled",
    "fit",
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
    "texts_of",
    "train_base",
    "work",
    "working",
]

_NOT_TRAINING = "stopped; no training was in progress, so nothing was saved"
# A KeyboardInterrupt that took longer to arrive was swallowed, as in a callback of JAX.
_ARRIVES_SECONDS = 1.0


# The help of each command.
SUMMARIES = {
    "vit": "Train a Vision Transformer to classify images.",
    "gemma": "Fine-tune a language model with LoRA on instructions or texts.",
    "probe": "Evaluate the features of a pretrained backbone with few labels.",
    "distill": "Train a small classifier to imitate a large one.",
    "caption": "Train a Gemma 3 with its vision encoder on images with texts.",
    "zero-shot": "Train two towers on images with captions, to classify by class names.",
    "prefer": "Fine-tune a language model on preferred answers (DPO, SimPO, KTO and others).",
    "dpo": "The same as prefer, whose default method is DPO.",
    "grpo": "Fine-tune a language model on the rewards of its own answers (GRPO).",
    "segment": "Train a Vision Transformer to predict the class of each pixel.",
    "detect": "Train a Vision Transformer to detect objects, a class and a box for each.",
    "mae": "Pretrain a Vision Transformer without labels as a masked autoencoder (MAE).",
    "dino": "Pretrain a Vision Transformer without labels by self-distillation (DINO).",
}
_FILES = {"gemma": "gemma_lora", "probe": "vit_probe", "dpo": "prefer"}
# Commands and the files of their recipes.
RECIPES = {name: _FILES.get(name, name.replace("-", "_")) for name in SUMMARIES}


def prepare(settings: Any) -> None:
    """Checks the common flags; sets memory, precision, caches, mesh and seed. Call it first.

    Args:
        settings: a `Common`.
    """
    from kmodels import distribution
    from kmodels.checkpoint.callback import SaveInterval
    from kmodels.core import keras_internals, runtime

    at_least(settings, batch_size=1, steps=1, keep=1, log_every=1, workers=0)
    SaveInterval(settings.checkpoint_every)  # Raises before a long preparation.
    if settings.log_to is not None:
        trackers.check(settings.log_to)

    if settings.memory_fraction is not None:
        runtime.memory_fraction(settings.memory_fraction)
    runtime.set_matmul_precision(settings.matmul_precision)
    runtime.native.keep_compiled()
    distribution.distribute(settings.mesh, settings.batch_size)
    if not 0 <= settings.seed < 2**32:
        raise InputError(f"--seed is {settings.seed}; give a whole number from 0 to 2**32 - 1")
    keras_internals.set_random_seed(settings.seed)
    working(None)


def filled(settings: Any, folder: Folder, **values: object) -> Any:
    """Returns the settings with values for those that are open: None, or "auto".

    The run's config.json will hold them.

    Args:
        settings: a `Common`.
        folder: directory of the run.
        **values: values by name.
    """
    chosen = {name: v for name, v in values.items() if getattr(settings, name) in (None, "auto")}
    folder.settings = dataclasses.replace(settings, **chosen)
    return folder.settings


def causal_lm_of(path: Any) -> type:
    """Returns the class of the language model at a path, such as `GemmaCausalLM`."""
    from kmodels import presets

    return presets.causal_lm_of(path)


def train_base(model: Any, texts: Sequence[str], steps: int, seed: int) -> Any:
    """Returns the base model of a demonstration, trained on the next token of texts.

    Args:
        model: a language model with a preprocessor.
        texts: packed into rows.
        steps: number of steps.
        seed: seed of the order of the rows.
    """
    import keras

    from kmodels import training
    from kmodels.text import TextLoader

    loader = TextLoader(model.preprocessor.pack(texts), 16, shuffle=True, seed=seed)
    model = parallelize(model)
    model.compile(
        optimizer=training.AdamW(training.WarmupSchedule(3e-3, steps, steps // 10), clip_norm=1.0),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    size = f"{model.count_params():,} parameters, {steps} steps"
    working(f"training the demonstration's base model: {size}")
    for epoch in range(-(-steps // len(loader))):
        loader.set_epoch(epoch)
        left = min(steps - epoch * len(loader), len(loader))
        model.fit(loader, steps_per_epoch=left, shuffle=False, verbose=0)
    return model


def as_text(prompt: Any) -> str:
    """Returns a prompt or an answer as text: messages are lines that begin with their role."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {message.get('content') or ''}" for message in prompt)


def can_generate(model: "keras.Model") -> bool:
    """Returns True if `generate` works; under FSDP2 layers have weights only inside a step."""
    from kmodels.weights import gather

    return _passes(gather.check_callable, model)


def can_merge(model: "keras.Model", origin: object, adapter: str | Path) -> bool:
    """Returns True if adapters can be merged; otherwise prints how to merge them later.

    Merging needs a process with all weights, and kernels that are not quantized.

    Args:
        model: a model with adapters.
        origin: path of its base model.
        adapter: directory of the adapters.
    """
    from kmodels.layers.changes import quantized_layers
    from kmodels.weights import gather

    if quantized_layers(model):
        say(
            "not merged: the base is quantized; load it with the adapter and call "
            "model.merge_lora(onto='dequantized')"
        )
        return False
    merges = _passes(gather.check_whole, model)
    if not merges:
        say(
            "not merged: each process holds a part of the weights; on one machine run "
            f"kmodels convert {origin} merged --to hf --adapter {adapter}"
        )
    return merges


def parallelize(model: "keras.Model") -> Any:
    """Returns the model to compile, distributed over the devices of --mesh if it is given."""
    from kmodels import distribution

    plan = distribution.current()
    return model if plan is None else plan.prepare(model)


def run_options(settings: Any, fixed: Sequence[str]) -> dict[str, Any]:
    """Returns the arguments of `training.Runner` that come from the common flags.

    Args:
        settings: a `Common`.
        fixed: names of the settings that must not change when a run is resumed.
    """
    names = ("batch_size", "log_every", "checkpoint_every", "keep", "resume", "log_to")
    options = {name: getattr(settings, name) for name in names}
    options["config"] = dataclasses.asdict(settings)
    return {**options, "settings": {name: getattr(settings, name) for name in fixed}}


def fit(
    folder: Folder,
    model: "keras.Model",
    loader: Any,
    validation: Any,
    schedule: Any,
    fixed: Sequence[str],
    **options: Any,
) -> Any:
    """Trains to the end; with --evaluate it restores the newest checkpoint instead.

    Args:
        folder: directory of the run, which receives config.json, history.csv and checkpoints.
        model: compiled; with --evaluate it gets the weights of the checkpoint.
        loader: training batches.
        validation: `validation_data` of `fit`, or None.
        schedule: learning rate schedule of the optimizer.
        fixed: names of the settings that must not change when a run is resumed.
        **options: `best`, `origin` and `callbacks` of `training.Runner`.

    Returns:
        The `training.Runner` after the training, or None.

    Raises:
        InputError: if there is no checkpoint to evaluate or to resume, or the loss is not finite.
    """
    from kmodels.checkpoint.manager import restore_newest
    from kmodels.runs import runner

    settings = folder.settings
    if getattr(settings, "evaluate", False):
        restore_newest(folder.path / "checkpoints", model)
        return None
    options |= run_options(settings, fixed)
    run = runner.Runner(model, folder.path, loader, validation, schedule, **options)
    folder.write_config()
    run.run()
    return run


def main(
    recipe: str,
    settings: type,
    train: Callable[[Any, Folder], None],
    argv: Sequence[str] | None = None,
    description: str | None = "",
    program: str = "",
) -> int:
    """Runs a recipe and returns its exit code.

    0 done; 2 wrong settings or input, with one line on stderr; 143 or 130 stopped by a signal after
    saving; 141 stopped after saving because standard output was closed; 74 done, but standard
    output could not be written.

    Args:
        recipe: name of the recipe.
        settings: dataclass of its flags, with `out`, `resume` and optionally `evaluate`.
        train: called with the settings and the run's folder.
        argv: arguments; those of the process by default.
        description: text of --help.
        program: name of the program in --help; the recipe's file by default.
    """
    program = program or f"{recipe}.py"
    try:
        with checked_output() as output, _interruptible(recipe):
            parsed = parse(settings, argv, description, recipe, program)
            check_backend()
            output.trains = True
            command = _command(argv, program)
            bound = functools.partial(work, recipe=recipe, train=train, command=command)
            if getattr(parsed, "on", None) is not None:
                _run_on_ray(recipe, parsed, train, bound)
            else:
                bound(parsed)
        return output.code
    except InputError as error:
        working(None)
        text = f"{recipe}: error: {one_line(error)}"
        print(wrapped(text, 2) if sys.stderr.isatty() else text, file=sys.stderr)
        if (processes := joined_processes()) is not None:
            processes.give_up(2)
        return 2
    except KeyboardInterrupt:
        print(f"{recipe}: {_NOT_TRAINING}", file=sys.stderr)
        return 130
    except SystemExit as stop:
        # Stopped by a signal, after a message. Importing the class would import Keras.
        if (signum := getattr(stop, "signum", None)) is None:
            raise
        return 128 + signum
    finally:
        working(None)


def work(settings: Any, recipe: str, train: Callable[[Any, Folder], None], command: str) -> None:
    """Runs a recipe in this process, one of those that train together.

    Args:
        settings: settings of the run.
        recipe: name of the recipe.
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
            if folder.main:
                folder.note()
                say(f"report: {_short(report.write(folder.path))}")
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
    """Ends the process soon after SIGINT inside the block, even if the exception is swallowed.

    Training has its own handler, which saves first.
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
    """Returns the command line that repeats this call."""
    words = [*program.split(), *(sys.argv[1:] if argv is None else argv)]
    if argv is None:
        words = ["python", sys.argv[0], *sys.argv[1:]]
    backend = os.environ.get("KERAS_BACKEND")
    return (f"KERAS_BACKEND={backend} " if backend else "") + shlex.join(words)


def _join(mesh: str | None) -> None:
    """Joins the processes that train together, if there are others."""
    if mesh:
        from kmodels.core import processes

        processes.join()
        return
    if started := started_processes():
        raise InputError(
            f"this is one of {started[1]} processes, each of which would train alone; add "
            "--mesh data=-1, or start one"
        )


@contextlib.contextmanager
def _shown(main: bool) -> Iterator[None]:
    """Hides the output of the block except on rank zero."""
    if main:
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


def run(command: str, arguments: Sequence[str]) -> int:
    """Runs a recipe with its own flags and returns its exit code.

    Args:
        command: a key of `RECIPES`.
        arguments: arguments of the command line after the recipe's name.

    Raises:
        InputError: if the file of the recipe is not installed.
    """
    name = RECIPES[command]
    module = load(name)
    # Examples of a recipe call its file.
    text = module.__doc__ or ""
    for other, file in {command: name, **RECIPES}.items():
        text = text.replace(f"python recipes/{file}.py", f"kmodels {other}")
    program = f"kmodels {command}"
    return main(name, module.Settings, module.train, arguments, text, program)


def load(name: str) -> ModuleType:
    """Imports a recipe.

    Args:
        name: name of its file.

    Raises:
        InputError: if the file is not installed.
    """
    files = [folder / f"{name}.py" for folder in FOLDERS if (folder / f"{name}.py").is_file()]
    if not files:
        raise InputError(f"{name}.py is not in {FOLDERS[0]}; install kmodels from a wheel")
    spec = importlib.util.spec_from_file_location(f"kmodels_recipe_{name}", files[0])
    if spec is None or spec.loader is None:
        raise ImportError(f"Python cannot load {files[0]}")
    module = importlib.util.module_from_spec(spec)
    # A dataclass finds the module of its annotations here.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


OF_RAY = ("resources", "max_failures")
# Flags that arguments of `kmodels.distribution.ray.run` replace.
_OF_RUN = {
    "out": "give storage=",
    "keep": "give keep=",
    "workers": "each of its workers makes its own batches",
    "evaluate": "evaluate in one process",
}

# === On a Ray cluster, whose workers are the processes that train together ===


def on_ray_of(command: str, arguments: Sequence[object], out: str | Path) -> Callable[[], None]:
    """Returns the function of each Ray worker of a recipe, see `kmodels.distribution.ray.run`.

    Args:
        command: a key of `RECIPES`.
        arguments: arguments of the command line, without those of the cluster.
        out: directory of the run.

    Raises:
        InputError: for an unknown recipe or flag, or a directory that holds another run.
    """
    if command not in RECIPES:
        raise InputError(
            f"{command!r} is not a recipe; give a function, or one of {', '.join(RECIPES)}"
        )
    name = RECIPES[command]
    module, words = load(name), [str(word) for word in arguments]
    program = f"kmodels {command}"
    settings = parse(module.Settings, words, module.__doc__ or "", name, program)
    if settings.on is not None:
        raise InputError("the recipe already runs on Ray; leave --on out")
    for name, instead in _OF_RUN.items():
        if getattr(settings, name) != getattr(module.Settings, name):
            raise InputError(f"--{name} has no effect in run(...); leave it out, and {instead}")
    bound = functools.partial(
        work, recipe=name, train=module.train, command=" ".join([program, *words])
    )
    placed = dataclasses.replace(settings, out=os.fspath(out))
    return _of_workers(settings, module.train, bound, _directory_on_ray(name, placed))


def _run_on_ray(
    recipe: str, settings: Any, train: Callable[..., None], work: Callable[[Any], None]
) -> None:
    """Runs a recipe on Ray, where each worker calls `work`, and waits for its end."""
    if getattr(settings, "evaluate", False):
        raise InputError("--evaluate runs in one process; leave --on out")
    check_whole("--workers", settings.workers, 0)
    out = _directory_on_ray(recipe, settings)
    resources = _resources(settings.resources)
    function = _of_workers(settings, train, work, out)
    from kmodels.distribution import ray

    ray.run(
        function,
        workers=max(settings.workers, 1),
        resources=resources,
        storage=out,
        max_failures=settings.max_failures,
        keep=settings.keep,
        best=True,
    )


def _of_workers(
    settings: Any, train: Callable[..., None], work: Callable[[Any], None], out: str
) -> Callable[[], None]:
    """Returns the function of each worker, which is pickled with the recipe's code."""
    from kmodels.distribution.ray.cluster import check_installed

    check_installed()
    from ray import cloudpickle

    # Workers cannot import the file of a recipe.
    module = sys.modules[train.__module__]
    if module.__name__ != "__main__":
        cloudpickle.register_pickle_by_value(module)
    mesh = settings.mesh or "data=-1"
    cluster = {name: getattr(Common, name) for name in ("on", "workers", *OF_RAY)}
    inside = dataclasses.replace(settings, out=out, mesh=mesh, **cluster)

    def call() -> None:
        # Restarted workers resume from their own checkpoints.
        work(dataclasses.replace(inside, resume=has_checkpoints(Path(out))))

    return call


def _directory_on_ray(recipe: str, settings: Any) -> str:
    """Returns the directory of a run, which must be visible to Ray and all workers."""
    if settings.out is not None and is_remote(settings.out):
        raise InputError(
            f"--out is the address {settings.out}; give a directory that all nodes share"
        )
    out = path_of(recipe, settings.out).resolve()
    check_new(out, settings.resume)
    return str(out)


def _resources(text: str) -> dict[str, float]:
    resources: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, amount = part.partition("=")
        try:
            resources[name.strip()] = float(amount)
        except ValueError:
            resources[name.strip()] = -1.0
    if not resources or min(resources.values()) < 0:
        raise InputError(f"--resources is {text!r}; write it as in GPU=1,CPU=4")
    return resources
