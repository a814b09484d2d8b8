"""The options of `kmodels bench` and `kmodels parity`."""

import math
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from typing import Any

from kmodels.core.environment import BACKENDS
from kmodels.core.errors import InputError, check_whole

# Maps a name to the dtype policy and the precision of float32 products.
PRECISIONS = {
    "float32": ("float32", "highest"),
    "tf32": ("float32", "high"),
    "mixed_bfloat16": ("mixed_bfloat16", "highest"),
    "bfloat16": ("bfloat16", "highest"),
}
MODES = {
    "jax": ("xla",),
    "torch": ("none", "inductor", "openxla"),
    "tensorflow": ("none", "xla"),
}
AUTO, OPENXLA = "auto", "openxla"
# `kmodels bench`: largest relative difference of a loss. TF32 and bfloat16 have mantissas of 10 and
# 7 bits, each backend rounds in other places, and an optimizer carries the difference on.
LOSSES = {"float32": 1e-4, "tf32": 5e-3, "mixed_bfloat16": 2e-2, "bfloat16": 3e-2}
# `kmodels parity`: how far rounding may take one side from the exact result, as a share of a
# tensor's largest value.
TOLERANCES = {"float32": 1e-4, "tf32": 1e-2, "mixed_bfloat16": 5e-2, "bfloat16": 5e-2}
OPTIMIZERS = ("adamw", "sgd")
# Names the interpreters if `--python` does not.
ENVIRONMENT = "KMODELS_BENCH_PYTHON"


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The options that both commands share: the model and the data of a step.

    Args:
        batch_size: rows of a step.
        image_size: height and width in pixels; the preset's by default.
        num_classes: number of classes of a classifier; the preset's by default.
        sequence_length: tokens of a row of text.
        seed: seed of initial weights and data.
        limit: longest time for an answer of a process, in seconds.
    """

    batch_size: int = 8
    image_size: int | None = None
    num_classes: int | None = None
    sequence_length: int = 512
    seed: int = 0
    limit: float = 900.0

    def __post_init__(self) -> None:
        check_whole("batch_size", self.batch_size)
        check_whole("sequence_length", self.sequence_length, 2)
        check_whole("seed", self.seed, 0)
        if not 0 < self.limit < math.inf:
            raise InputError(f"the limit is {self.limit}; give seconds above 0")

    @property
    def job(self) -> dict[str, Any]:
        """The values that a child needs, by name."""
        names = ("batch_size", "image_size", "num_classes", "sequence_length", "seed")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class BenchOptions(ModelOptions):
    """The rows of the table and how they are measured.

    Args:
        preset: a registered name or a directory.
        backends: names, or "all" for those that are installed.
        precisions: keys of `PRECISIONS`.
        compile: modes, see `MODES`; "auto" is the default of each backend.
        attention: "fused" for attention with its override, "generic" for attention without.
        ops: "override" for ops with their overrides, "generic" for ops without.
        workers: numbers of workers of an image loader; empty for batches made in advance.
        lora: adapters or all weights; None for adapters if the model is a language model.
        rank: LoRA rank.
        optimizer: one of `OPTIMIZERS`.
        rounds: turns of each row.
        steps: steps of a turn.
        check_steps: number of first steps whose losses must agree.
        threads: threads of each process; by default all CPUs of this process.
        together: largest number of processes at a time.
        largest_batch: also searches for the largest batch of each row.
        memory: bytes that a step may use; by default those of the host or the accelerator.
        python: interpreters by backend or mode, as in "openxla=/path/to/python".
    """

    preset: str
    backends: str = "all"
    precisions: tuple[str, ...] = ("float32",)
    compile: tuple[str, ...] = (AUTO,)
    attention: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    workers: tuple[int, ...] = ()
    lora: bool | None = None
    rank: int = 4
    optimizer: str = "adamw"
    rounds: int = 10
    steps: int = 1
    check_steps: int = 3
    threads: int | None = None
    together: int = 16
    largest_batch: bool = False
    memory: int | None = None
    python: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("rank", "rounds", "steps", "together"):
            check_whole(name, getattr(self, name))
        check_whole("check_steps", self.check_steps, 2)
        for name in ("image_size", "num_classes", "threads"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name))
        for count in self.workers:
            check_whole("workers", count, 0)
        known = sorted({mode for modes in MODES.values() for mode in modes})
        check_names("precision", self.precisions, PRECISIONS)
        check_names("compile", self.compile, (AUTO, *known))
        check_names("attention", self.attention, ("fused", "generic"), some=False)
        check_names("ops", self.ops, ("override", "generic"), some=False)
        check_names("optimizer", (self.optimizer,), OPTIMIZERS)
        if self.backends != "all":
            check_names("backends", self.named, BACKENDS)

    @property
    def named(self) -> tuple[str, ...]:
        """The backends that were named, () for all installed ones."""
        return () if self.backends == "all" else listed(self.backends)

    @property
    def cpus(self) -> list[int]:
        """The CPUs that each process may use, the last ones if not all.

        Raises:
            InputError: for more threads than CPUs.
        """
        if not hasattr(os, "sched_getaffinity"):
            return []
        allowed = sorted(os.sched_getaffinity(0))
        if self.threads is not None and self.threads > len(allowed):
            raise InputError(f"threads is {self.threads}; this process may use {len(allowed)} CPUs")
        return allowed[-self.threads :] if self.threads else allowed

    def interpreters(self) -> dict[str, str]:
        """Returns interpreters by backend or mode; the flag takes precedence over the environment.

        Raises:
            InputError: for an entry that is not NAME=PATH, or whose NAME is not compared.
        """
        names = {*BACKENDS, OPENXLA}
        compared = {*(self.named or BACKENDS), *self.compile}
        paths = {}
        for entry in (*listed(os.environ.get(ENVIRONMENT, "")), *self.python):
            name, equals, path = entry.partition("=")
            if not equals or name not in names or not path:
                raise InputError(
                    f"the interpreter {entry!r} is not NAME=PATH, where NAME is one of "
                    f"{', '.join(sorted(names))}"
                )
            if name not in compared and entry in self.python:
                raise InputError(f"--python {entry} has no effect: {name} is not compared")
            paths[name] = os.path.expanduser(path)
        return paths


def listed(text: str) -> tuple[str, ...]:
    """Returns the parts of a text such as "jax,torch"."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def numbers(name: str, text: str) -> tuple[int, ...]:
    """Returns the whole numbers of a text such as "0,2".

    Raises:
        InputError: for anything else.
    """
    if wrong := [part for part in listed(text) if not re.fullmatch(r"\d+", part)]:
        raise InputError(f"{name} is {', '.join(wrong)}; give whole numbers separated by commas")
    return tuple(int(part) for part in listed(text))


def check_names(
    what: str, values: Sequence[str], known: Collection[str], some: bool = True
) -> None:
    """Raises `InputError` for an unknown name, a repeated name, or none."""
    if some and not values:
        raise InputError(f"{what} is empty; give some of {', '.join(known)}")
    for name in values:
        if name not in known:
            raise InputError(f"{what} is {name!r}; give some of {', '.join(known)}")
        if list(values).count(name) > 1:
            raise InputError(f"{what} names {name} twice")


@dataclass(frozen=True)
class Side:
    """One side of a comparison.

    Attributes:
        backend: backend of Keras.
        preset: a registered name or a directory.
        precision: a key of `PRECISIONS`.
        ops: "override" or "generic".
    """

    backend: str
    preset: str
    precision: str = "float32"
    ops: str = "override"

    def label(self, other: "Side") -> str:
        """Returns the backend and each setting that differs from the other side."""
        own, theirs = asdict(self), asdict(other)
        more = [str(own[name]) for name in own if name != "backend" and own[name] != theirs[name]]
        return " ".join([self.backend, *more])


@dataclass(frozen=True)
class ParityOptions(ModelOptions):
    """The sides and steps that are compared.

    Args:
        left: the first side.
        right: the second side.
        steps: steps of training.
        tolerance: share of a tensor's largest value; by default that of the two precisions.
    """

    left: Side
    right: Side
    _: KW_ONLY
    steps: int = 3
    batch_size: int = 2
    sequence_length: int = 16
    tolerance: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("steps", self.steps)
        if self.tolerance is not None and not 0 < self.tolerance < 1:
            raise InputError(f"tolerance is {self.tolerance}; give a share between 0 and 1")
        for side in (self.left, self.right):
            check_names("backends", (side.backend,), BACKENDS)
            check_names("precision", (side.precision,), PRECISIONS)
            check_names("ops", (side.ops,), ("override", "generic"))

    @property
    def allowed(self) -> float:
        """The tolerance: the squares of both sides add up, as each rounds on its own."""
        if self.tolerance is not None:
            return self.tolerance
        return math.hypot(*(TOLERANCES[side.precision] for side in (self.left, self.right)))
