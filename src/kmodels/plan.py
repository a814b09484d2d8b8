"""What a training step will need, told before anything is allocated, and what would lower it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from kmodels import compat, presets
from kmodels.errors import InputError
from kmodels.layers import remat
from kmodels.lora import LoraSettings
from kmodels.training import memory
from kmodels.training.footprint import ACTIVATIONS, FROZEN, PARTS, SLOTS, TRAINED, Setup, Sizes
from kmodels.units import human

# How far an estimate may be off before a run is stopped because of it.
DOUBT = 1.25


class Saving(NamedTuple):
    """A change of the setup, and the bytes that it takes off the peak."""

    flag: str
    bytes: int


class Plan:
    """The memory of one training step of one model.

    Args:
        origin: a registered name, or what `from_preset` reads; of a file only the header is read.
        setup: the step.
        image_size: height and width in pixels, where it is not the origin's.
        overrides: fields of the config and arguments of the task to change.
        available: bytes that there are; by default those of the device, or of the host.

    Attributes:
        estimate: every array that the step holds.
        available: bytes, None where the backend does not tell.

    Raises:
        InputError: for an unknown origin, or a setup that does not suit it.
    """

    def __init__(
        self,
        origin: str | Path,
        setup: Setup,
        image_size: int | None = None,
        overrides: dict[str, Any] | None = None,
        available: int | None = None,
    ):
        family = presets.family_of(origin)
        task, changed = family.tasks[0], dict(overrides or {})

        def outline() -> Any:
            with compat.without_values():
                return task.from_preset(origin, load_weights=False, preprocessor=None, **changed)

        self._model = outline()
        if image_size is not None:
            shape = getattr(self._model.backbone.config, "image_shape", None)
            if shape is None:
                raise InputError(f"{origin} takes no images; leave image_size out")
            changed["image_shape"] = (image_size, image_size, shape[-1])
            self._model = outline()
        self._sizes: Sizes = family.sizes(self._model.backbone.config)
        if self._sizes.tokens is None and setup.sequence_length < 2:
            raise InputError(
                f"sequence_length is {setup.sequence_length}; give a whole number from 2 on"
            )
        self.origin, self.setup = str(origin), setup
        self.estimate = self._estimate(setup)
        self.available = memory.available_bytes() if available is None else available

    def _estimate(self, setup: Setup) -> memory.Estimate:
        return memory.estimate(self._model, self._sizes, setup)

    @property
    def bytes(self) -> int:
        """At the peak of a step, beside what the process holds already."""
        return self.estimate.bytes

    @property
    def fits(self) -> bool | None:
        """Whether there is that much; None where that is not known."""
        return None if self.available is None else self.bytes <= self.available

    def cache_bytes(self, slots: int) -> int:
        """Of keys and values of so many tokens, in every row of a batch of the step's size."""
        return memory.cache_bytes(self._sizes, self.setup, slots)

    def savings(self) -> list[Saving]:
        """Flags that lower the peak, the one that saves most first; each counts alone."""
        found = []
        for flag, setup in _leaner(self.setup, self._sizes.tokens is None):
            saved = self.estimate.bytes - self._estimate(setup).bytes
            if saved > self.estimate.bytes // 100:
                found.append(Saving(flag, saved))
        return sorted(found, key=lambda saving: -saving.bytes)

    def to_dict(self, slots: int = 0) -> dict[str, Any]:
        """Plain values for JSON; with the cache of `generate` for so many tokens a row."""
        counts = {name: self.estimate.count(name) for name in (FROZEN, TRAINED)}
        return {
            "preset": self.origin,
            "parameters": sum(counts.values()),
            "trainable_parameters": counts[TRAINED],
            "bytes": {**self.estimate.parts, "overhead": self.estimate.overhead},
            "blocks": self.estimate.blocks,
            "peak_bytes": self.bytes,
            "cache_bytes": self.cache_bytes(slots),
            "available_bytes": self.available,
            "fits": self.fits,
            "savings": [saving._asdict() for saving in self.savings()],
        }


def _leaner(setup: Setup, text: bool) -> list[tuple[str, Setup]]:
    found = []
    if setup.batch_size > 1:
        half = setup.batch_size // 2
        found.append((f"--batch-size {half}", replace(setup, batch_size=half)))
    if text and setup.sequence_length >= 64:
        half = setup.sequence_length // 2
        found.append((f"--sequence-length {half}", replace(setup, sequence_length=half)))
    for mode in remat.MODES[1:]:
        if setup.remat == "none":
            found.append((f"--remat {mode}", replace(setup, remat=mode)))
    if setup.lora is None:
        lora = replace(setup, lora=LoraSettings(4), quantize=None)
        found.append(("--lora --rank 4", lora))
    elif setup.quantize is None:
        found += [
            (f"--quantize {mode}", replace(setup, quantize=mode)) for mode in ("int8", "int4")
        ]
    if setup.precision != "bfloat16":
        found.append(("--precision bfloat16", replace(setup, precision="bfloat16")))
    if SLOTS[setup.optimizer]:
        found.append(("--optimizer sgd", replace(setup, optimizer="sgd")))
    return found


def check(plan: Plan, flags: Sequence[str], anyway: str) -> None:
    """Stops a run that has no chance.

    Args:
        plan: of its step.
        flags: names of the flags that the caller has, such as "--remat".
        anyway: the flag with which it goes on in spite of the plan.

    Raises:
        InputError: if the step needs clearly more than there is; names the parts and the flags.
    """
    if plan.available is None or plan.bytes <= DOUBT * plan.available:
        return
    parts = sorted(plan.estimate.parts.items(), key=lambda part: -part[1])[:3]
    known = [s for s in plan.savings() if s.flag.split()[0] in flags][:3]
    hint = ", ".join(f"{s.flag} saves {human(s.bytes)}" for s in known)
    raise InputError(
        f"a step needs about {human(plan.bytes)} and there are {human(plan.available)}: "
        f"{', '.join(f'{name} {human(size)}' for name, size in parts)}; "
        f"{hint or 'take a smaller model'}; {anyway} goes on"
    )


def show(plan: Plan, console: Console, slots: int = 0) -> None:
    """Prints a plan as tables."""
    estimate = plan.estimate
    table = Table("part", "bytes", "", title=f"kmodels plan: {plan.origin}", title_justify="left")
    table.columns[1].justify = "right"
    blocks = list(estimate.blocks.values())
    notes = {name: f"{estimate.count(name):,} parameters" for name in (FROZEN, TRAINED)}
    if blocks:
        notes[ACTIVATIONS] = f"up to {human(max(blocks))} in a block"
    for name in PARTS:
        table.add_row(name, human(estimate.part(name)), notes.get(name, ""))
    table.add_row("overhead", human(estimate.overhead), "allocator, scheduler and compiler")
    table.add_section()
    table.add_row("peak of a step", human(plan.bytes), "activations and gradients take turns")
    if plan.available is not None:
        table.add_row("available", human(plan.available), "it fits" if plan.fits else "too little")
    if slots:
        table.add_row("cache of generate", human(plan.cache_bytes(slots)), f"{slots} tokens a row")
    console.print(table)
    if found := plan.savings():
        saved = Table("flag", "saves", title="what lowers the peak", title_justify="left")
        for saving in found:
            saved.add_row(saving.flag, human(saving.bytes))
        console.print(saved)
