"""The options of `kmodels bench`."""

import math
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kmodels.core.backend_choice import BACKENDS
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
AUTO = "auto"
OPTIMIZERS = ("adamw", "sgd")
# Names the interpreters where `--python` does not.
ENVIRONMENT = "KMODELS_BENCH_PYTHON"


@dataclass(frozen=True)
class BenchOptions:
    """The rows of the table and how they are measured.

    Args:
        preset: a registered name or a directory.
        backends: names, or "all" for those that are installed.
        precisions: keys of `PRECISIONS`.
        compile: modes, see `MODES`; "auto" is what each backend does by itself.
        attention: "fused" for overrides in force, "generic" for attention without.
        ops: "override" for overrides in force, "generic" for none.
        workers: workers of the loader that makes images while steps run; none where batches lie
            ready.
        batch_size: rows of a step.
        image_size: height and width in pixels; the preset's by default.
        num_classes: number of classes of a classifier; the preset's by default.
        sequence_length: tokens of a row of text.
        lora: adapters or all weights; None for adapters where the model is of text.
        rank: rank of the adapters.
        optimizer: one of `OPTIMIZERS`.
        seed: seed of first weights and data.
        rounds: turns of each row.
        steps: steps of a turn.
        check_steps: first steps, whose losses must agree.
        threads: threads of each process; all that this one may use by default.
        limit: seconds that a process may take for an answer.
        together: most processes at a time.
        largest_batch: looks for the largest batch of each row.
        memory: bytes that a step may take; what the host or the accelerator has by default.
        python: interpreters by backend or mode, as in "openxla=/path/to/python".
    """

    preset: str
    backends: str = "all"
    precisions: tuple[str, ...] = ("float32",)
    compile: tuple[str, ...] = (AUTO,)
    attention: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    workers: tuple[int, ...] = ()
    batch_size: int = 8
    image_size: int | None = None
    num_classes: int | None = None
    sequence_length: int = 512
    lora: bool | None = None
    rank: int = 4
    optimizer: str = "adamw"
    seed: int = 0
    rounds: int = 10
    steps: int = 1
    check_steps: int = 3
    threads: int | None = None
    limit: float = 900.0
    together: int = 16
    largest_batch: bool = False
    memory: int | None = None
    python: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("batch_size", "rank", "rounds", "steps", "together"):
            check_whole(name, getattr(self, name))
        check_whole("check_steps", self.check_steps, 2)
        check_whole("sequence_length", self.sequence_length, 2)
        check_whole("seed", self.seed, 0)
        for name in ("image_size", "num_classes", "threads"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name))
        for count in self.workers:
            check_whole("workers", count, 0)
        if not 0 < self.limit < math.inf:
            raise InputError(f"the limit is {self.limit}; give seconds above 0")
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
        """The backends that were asked for by name."""
        return () if self.backends == "all" else listed(self.backends)

    @property
    def cpus(self) -> list[int]:
        """The CPUs that each process may use, the last ones if not all.

        Raises:
            InputError: for more threads than there are.
        """
        if not hasattr(os, "sched_getaffinity"):
            return []
        allowed = sorted(os.sched_getaffinity(0))
        if self.threads is not None and self.threads > len(allowed):
            raise InputError(f"threads is {self.threads}; this process may use {len(allowed)} CPUs")
        return allowed[-self.threads :] if self.threads else allowed

    def interpreters(self) -> dict[str, str]:
        """Pythons by backend or mode, those of the environment below those of the flag.

        Raises:
            InputError: for what is not NAME=PATH.
        """
        names = {*BACKENDS, "openxla"}
        found = {}
        for entry in (*listed(os.environ.get(ENVIRONMENT, "")), *self.python):
            name, equals, path = entry.partition("=")
            if not equals or name not in names or not path:
                raise InputError(
                    f"the interpreter {entry!r} is not NAME=PATH, where NAME is one of "
                    f"{', '.join(sorted(names))}"
                )
            found[name] = os.path.expanduser(path)
        return found


def listed(text: str) -> tuple[str, ...]:
    """Returns the parts of a text such as "jax,torch"."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def numbers(name: str, text: str) -> tuple[int, ...]:
    """Returns the whole numbers of a text such as "0,2".

    Raises:
        InputError: for anything else.
    """
    if wrong := [part for part in listed(text) if not re.fullmatch(r"\d+", part)]:
        raise InputError(f"{name} is {', '.join(wrong)}; give whole numbers, a comma between them")
    return tuple(int(part) for part in listed(text))


def check_names(what: str, given: Sequence[str], known: Collection[str], some: bool = True) -> None:
    """Raises `InputError` for a name that is not known, one that is twice, or for none."""
    if some and not given:
        raise InputError(f"{what} is empty; give some of {', '.join(known)}")
    for name in given:
        if name not in known:
            raise InputError(f"{what} is {name!r}; give some of {', '.join(known)}")
        if list(given).count(name) > 1:
            raise InputError(f"{what} names {name} twice")
