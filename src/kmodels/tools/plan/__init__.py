"""`kmodels plan`: the memory and traffic of a training step, before anything is allocated."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from kmodels import presets
from kmodels.core import keras_internals, runtime
from kmodels.core.dispatch import backend_module
from kmodels.core.errors import InputError, human
from kmodels.distribution import Mesh, check_batch, parse_mesh
from kmodels.distribution.mesh import REST
from kmodels.layers import remat
from kmodels.lora import LoraSettings
from kmodels.models.blocks.sizes import Sizes
from kmodels.tools.plan import estimate
from kmodels.tools.plan.estimate import (
    ACTIVATIONS,
    FROZEN,
    GATHERED,
    PARTS,
    SLOTS,
    TRAINED,
    FactsBackend,
    Setup,
    StepArray,
)
from kmodels.tools.plan.per_device import FORMULAS, exchanges, on_device

__all__ = ["DOUBT", "Plan", "Saving", "Setup", "check", "show"]

# A run is stopped if its estimate exceeds the available memory by more than this factor.
DOUBT = 1.25


class Saving(NamedTuple):
    """A flag that changes the setup, and the bytes by which it lowers the peak."""

    flag: str
    bytes: int


class Plan:
    """The memory of one training step of one model, and the traffic between its devices.

    Args:
        origin: a registered name or a path for `from_preset`; only headers of files are read.
        setup: the step.
        image_size: height and width in pixels; by default the origin's.
        overrides: fields of the config and arguments of the task to change.
        available: available bytes; by default the free bytes of the device or the host.
        mesh: devices, as `distribution.parse_mesh` reads them; they need not exist.

    Attributes:
        estimate: every array that one device holds during the step.
        mesh: the devices.
        exchanges: messages of each device in a step.
        available: bytes, None if unknown, as for an accelerator that this process does not have.

    Raises:
        InputError: for an unknown origin, a setup that it does not support, or a mesh that does
            not divide the batch.
    """

    def __init__(
        self,
        origin: str | Path,
        setup: Setup,
        image_size: int | None = None,
        overrides: dict[str, Any] | None = None,
        available: int | None = None,
        mesh: str | Mesh | None = None,
    ):
        family = presets.family_of(origin)
        task, changed = family.tasks[0], dict(overrides or {})

        def outline() -> Any:
            with keras_internals.without_values():
                return task.from_preset(origin, load_weights=False, preprocessor=None, **changed)

        self._model = outline()
        if image_size is not None:
            shape = getattr(self._model.backbone.config, "image_shape", None)
            if shape is None:
                raise InputError(f"{origin} has no image input; leave image_size out")
            changed["image_shape"] = (image_size, image_size, shape[-1])
            self._model = outline()
        self._sizes: Sizes = family.sizes(self._model.backbone.config)
        if self._sizes.tokens is None and setup.sequence_length < 2:
            raise InputError(
                f"sequence_length is {setup.sequence_length}; give a whole number from 2 on"
            )
        self.mesh = parse_mesh(mesh) if isinstance(mesh, str) else mesh or Mesh()
        if REST in self.mesh.lengths.values():
            raise InputError(f"the mesh {self.mesh} has a length of -1; a plan needs all lengths")
        if self.mesh.sequence > 1:
            raise InputError(
                f"the mesh {self.mesh} has a sequence axis; plans do not support it, leave it out"
            )
        check_batch(self.mesh, setup.batch_size)
        self.origin, self.setup = str(origin), setup
        whole = self._held(setup)
        self._counts = {
            name: sum(h.size for h in whole if h.part == name) for name in (FROZEN, TRAINED)
        }
        self.estimate = self._estimate(setup)
        self.exchanges = exchanges(whole, self._sizes, setup, self.mesh)
        if available is None and not setup.accelerator:
            available = runtime.available_bytes()
        self.available = available

    def _held(self, setup: Setup) -> list[StepArray]:
        """Returns the whole arrays of a step; ops choose as on the mesh."""
        engine = backend_module("kmodels.tools.plan.facts", FactsBackend)
        with engine.supposed(self.mesh):
            return estimate.held_by(self._model, self._sizes, setup)

    def _estimate(self, setup: Setup) -> estimate.Estimate:
        """Returns the estimate for one device; indivisible rows count in parts."""
        arrays = self._held(setup)
        if self.mesh.size > 1:
            arrays = on_device(arrays, self.mesh, setup)
        return estimate.estimate(arrays, setup)

    @property
    def bytes(self) -> int:
        """The bytes at the peak of a step, in addition to those that the process holds already."""
        return self.estimate.bytes

    @property
    def fits(self) -> bool | None:
        """True if the step fits into the available memory; None if that is unknown."""
        return None if self.available is None else self.bytes <= self.available

    @property
    def backbone(self) -> Any:
        """The backbone, without values."""
        return self._model.backbone

    def saved_by(self, setup: Setup) -> int:
        """Returns the bytes by which another setup lowers the peak."""
        return self.bytes - self._estimate(setup).bytes

    def cache_bytes(self, slots: int) -> int:
        """Returns the bytes of a device's KV cache of so many tokens of each row.

        All rows count, as where each device has a process; a process with several splits them.
        """
        return estimate.cache_bytes(self._sizes, self.setup, slots, self.mesh.model)

    def parameters(self, part: str) -> int:
        """Returns the number of frozen or trained parameters, over all devices."""
        return self._counts[part]

    @property
    def active_parameters(self) -> int:
        """Number of parameters that a token uses: of experts, those that it is routed to."""
        return sum(self._counts.values()) - self._sizes.idle_parameters

    def savings(self) -> list[Saving]:
        """Returns flags that lower the peak, largest saving first; each is applied alone."""
        return [saving for saving, _ in self._leaner(self.setup, self.bytes, lambda flag: True)]

    def _leaner(
        self, setup: Setup, peak: int, accepts: Callable[[str], bool]
    ) -> list[tuple[Saving, Setup]]:
        """Returns changes of a setup that lower its peak, largest saving first."""
        changes = []
        for flag, changed in _changes(setup, self._sizes.tokens is None, self.mesh.replicas):
            if not accepts(flag):
                continue
            saved = peak - self._estimate(changed).bytes
            if saved > peak // 100:
                changes.append((Saving(flag, saved), changed))
        return sorted(changes, key=lambda change: -change[0].bytes)

    def fitting(self, accepts: Callable[[str], bool]) -> tuple[list[str], int] | None:
        """Returns flags that together make the step fit, and its peak with them; None if none do.

        The largest saving is applied first, repeatedly; a later value of a flag replaces an earlier
        one.

        Args:
            accepts: returns True for a flag with its value that the caller may propose.
        """
        setup, peak, flags = self.setup, self.bytes, dict[str, str]()
        while self.available is not None and peak > self.available:
            changes = self._leaner(setup, peak, accepts)
            if not changes:
                return None
            saving, setup = changes[0]
            flags[saving.flag.split()[0]] = saving.flag
            peak -= saving.bytes
        return list(flags.values()), peak

    def to_dict(self, slots: int = 0) -> dict[str, Any]:
        """Returns plain values for JSON, with a KV cache for `slots` tokens of each row."""
        sent: dict[str, dict[str, int]] = {}
        for one in self.exchanges:
            kinds = sent.setdefault(one.axis, {})
            kinds[one.kind] = kinds.get(one.kind, 0) + one.bytes
        active = {"active_parameters": self.active_parameters}
        return {
            "preset": self.origin,
            "mesh": self.mesh.lengths,
            "parameters": sum(self._counts.values()),
            "trainable_parameters": self._counts[TRAINED],
            **(active if self._sizes.idle_parameters else {}),
            "bytes": {**self.estimate.parts, "overhead": self.estimate.overhead},
            "blocks": self.estimate.blocks,
            "peak_bytes": self.bytes,
            "cache_bytes": self.cache_bytes(slots),
            "available_bytes": self.available,
            "fits": self.fits,
            "savings": [saving._asdict() for saving in self.savings()],
            "sent_bytes": sent,
            "exchanges": [one.to_dict() for one in self.exchanges],
        }


def _changes(setup: Setup, text: bool, replicas: int) -> list[tuple[str, Setup]]:
    changes = []
    if setup.batch_size % (2 * replicas) == 0 or (setup.batch_size > 1 and replicas == 1):
        half = setup.batch_size // 2
        changes.append((f"--batch-size {half}", replace(setup, batch_size=half)))
    if text and setup.sequence_length >= 64:
        half = setup.sequence_length // 2
        changes.append((f"--sequence-length {half}", replace(setup, sequence_length=half)))
    for mode in remat.MODES[1:]:
        if setup.remat == "none":
            changes.append((f"--remat {mode}", replace(setup, remat=mode)))
    if setup.lora is None:
        lora = replace(setup, lora=LoraSettings(4), quantize=None)
        changes.append(("--lora --rank 4", lora))
    elif setup.quantize is None:
        changes += [
            (f"--quantize {mode}", replace(setup, quantize=mode))
            for mode in ("int8", "int4", "nf4")
        ]
    precisions = {"float32": ("bfloat16", "mixed_bfloat16")}.get(setup.precision, ("bfloat16",))
    changes += [
        (f"--precision {name}", replace(setup, precision=name))
        for name in precisions
        if name != setup.precision
    ]
    if SLOTS[setup.optimizer]:
        changes.append(("--optimizer sgd", replace(setup, optimizer="sgd")))
    return changes


def _accepted(settings: type | Sequence[str]) -> Callable[[str], bool]:
    """Returns a function that returns True if a command has a flag and accepts its value."""
    if not isinstance(settings, type):
        return lambda flag: flag.split()[0] in settings
    choices = {
        f"--{field.name.replace('_', '-')}": field.metadata.get("choices") or None
        for field in dataclasses.fields(settings)
    }

    def accepts(flag: str) -> bool:
        name, value, *more = flag.split()
        allowed = choices.get(name, ())
        return not more and (allowed is None or value in map(str, allowed))

    return accepts


def check(plan: Plan, flags: Sequence[str] | type, anyway: str) -> None:
    """Raises InputError for a run that cannot fit into memory.

    Args:
        plan: plan of its step.
        flags: flags that may be proposed: a dataclass of settings made by `flag`, or names such as
            "--remat".
        anyway: the flag that skips this check.

    Raises:
        InputError: if the step clearly does not fit; names the parts, the flags that save most,
            and a set of flags with which the step fits.
    """
    if plan.available is None or plan.bytes <= DOUBT * plan.available:
        return
    accepts = _accepted(flags)
    parts = sorted(plan.estimate.parts.items(), key=lambda part: -part[1])[:3]
    known = [saving for saving in plan.savings() if accepts(saving.flag)][:3]
    hint = "; use a smaller model"
    if known:
        hint = f"; {', '.join(f'{s.flag} saves {human(s.bytes)}' for s in known)}"
        if (fitting := plan.fitting(accepts)) is None:
            hint += "; no set of flags makes it fit, use a smaller model"
        else:
            hint += f"; {' '.join(fitting[0])} would fit with {human(fitting[1])}"
    raise InputError(
        f"a step needs about {human(plan.bytes)}, and {human(plan.available)} are available: "
        f"{', '.join(f'{name} {human(size)}' for name, size in parts)}{hint}; {anyway} continues"
    )


def show(plan: Plan, console: Console, slots: int = 0) -> None:
    """Prints memory and traffic of a device, and flags that lower the peak."""
    estimate, many = plan.estimate, plan.mesh.size > 1
    title = f"kmodels plan: {plan.origin}" + (f" on {plan.mesh}, each device" if many else "")
    table = Table("part", "bytes", "", title=title, title_justify="left")
    table.columns[1].justify = "right"
    blocks = list(estimate.blocks.values())
    notes = {name: f"{plan.parameters(name):,} parameters" for name in (FROZEN, TRAINED)}
    if many:
        notes = {name: f"of {note}" for name, note in notes.items()}
    if blocks:
        notes[ACTIVATIONS] = f"up to {human(max(blocks))} in a block"
    for name in PARTS:
        if estimate.part(name) or name != GATHERED:
            table.add_row(name, human(estimate.part(name)), notes.get(name, ""))
    table.add_row("overhead", human(estimate.overhead), "allocator, scheduler and compiler")
    table.add_section()
    if plan.active_parameters < plan.parameters(FROZEN) + plan.parameters(TRAINED):
        table.add_row(
            "of a token", "", f"{plan.active_parameters:,} parameters, without idle experts"
        )
    table.add_row(
        "peak of a step", human(plan.bytes), "activations are freed before all gradients exist"
    )
    if plan.available is not None:
        table.add_row("available", human(plan.available), "it fits" if plan.fits else "too little")
    if slots:
        table.add_row(
            "cache of generate", human(plan.cache_bytes(slots)), f"{slots} tokens per row"
        )
    console.print(table)
    if plan.exchanges:
        console.print(_sent(plan))
    if savings := plan.savings():
        saved = Table("flag", "saves", title="flags that lower the peak", title_justify="left")
        for saving in savings:
            saved.add_row(saving.flag, human(saving.bytes))
        console.print(saved)


def _sent(plan: Plan) -> Table:
    table = Table(
        *("axis", "n", "collective", "of", "S", "sent"),
        title="traffic of each device in a step",
        caption="\n".join(_sources(plan)),
        title_justify="left",
        caption_justify="left",
    )
    for number in (1, 4, 5):
        table.columns[number].justify = "right"
    for one in plan.exchanges:
        whole, sent = human(one.size), human(one.bytes)
        table.add_row(one.axis, str(one.devices), one.kind, one.what, whole, sent)
    return table


def _sources(plan: Plan) -> list[str]:
    """Returns the formulas of the collectives and their sources."""
    kinds = {one.kind for one in plan.exchanges}
    formulas = [f"{kind} sends {formula}" for kind, formula in FORMULAS.items() if kind in kinds]
    sources = dict.fromkeys(one.source for one in plan.exchanges)
    return [f"{'; '.join(formulas)} on a ring of n devices", *(f"after {name}" for name in sources)]
