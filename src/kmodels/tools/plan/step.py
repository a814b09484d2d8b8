"""The plan of a step: what a device holds and sends, and what would lower it."""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from kmodels import presets
from kmodels.core import keras_internals
from kmodels.core.dispatch import backend_module
from kmodels.core.errors import InputError
from kmodels.core.units import human
from kmodels.distribution import Mesh, check_batch, parse_mesh
from kmodels.distribution.mesh import REST
from kmodels.layers import remat
from kmodels.lora import LoraSettings
from kmodels.memory import estimate
from kmodels.memory.sizes import FROZEN, SLOTS, TRAINED, Held, Setup, Sizes
from kmodels.tools.plan import shares, traffic

# How far an estimate may be off before a run is stopped because of it.
DOUBT = 1.25


class SupposedBackend(Protocol):
    """Meshes without devices, on a backend that has them."""

    def supposed(self, mesh: Mesh) -> AbstractContextManager[None]:
        """Has the mesh in force inside the block, where nothing may be placed."""
        ...


class Saving(NamedTuple):
    """A change of the setup, and the bytes that it takes off the peak."""

    flag: str
    bytes: int


class Plan:
    """The memory of one training step of one model, and what its devices send each other.

    Args:
        origin: a registered name, or what `from_preset` reads; of a file only the header is read.
        setup: the step.
        image_size: height and width in pixels, where it is not the origin's.
        overrides: fields of the config and arguments of the task to change.
        available: bytes that there are; by default those of the device, or of the host.
        mesh: devices, as `distribution.parse_mesh` reads them; they need not exist.

    Attributes:
        estimate: every array that one device holds during the step.
        mesh: the devices.
        exchanges: what each device sends in a step.
        available: bytes, None where nobody tells: for an accelerator that is not here, too.

    Raises:
        InputError: for an unknown origin, a setup that does not suit it, or a mesh that does not
            divide the batch.
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
                raise InputError(f"{origin} takes no images; leave image_size out")
            changed["image_shape"] = (image_size, image_size, shape[-1])
            self._model = outline()
        self._sizes: Sizes = family.sizes(self._model.backbone.config)
        if self._sizes.tokens is None and setup.sequence_length < 2:
            raise InputError(
                f"sequence_length is {setup.sequence_length}; give a whole number from 2 on"
            )
        self.mesh = parse_mesh(mesh) if isinstance(mesh, str) else mesh or Mesh()
        if REST in self.mesh.lengths.values():
            raise InputError(
                f"the mesh {self.mesh} takes the devices that are left; give all lengths"
            )
        if self.mesh.sequence > 1:
            raise InputError(
                f"the mesh {self.mesh} cuts rows by their tokens, which a plan does not count; "
                "leave sequence out"
            )
        check_batch(self.mesh, setup.batch_size)
        self.origin, self.setup = str(origin), setup
        whole = self._held(setup)
        self._counts = {
            name: sum(h.size for h in whole if h.part == name) for name in (FROZEN, TRAINED)
        }
        self.estimate = self._estimate(setup)
        self.exchanges = traffic.exchanges(whole, self._sizes, setup, self.mesh)
        if available is None and not setup.accelerator:
            available = estimate.available_bytes()
        self.available = available

    def _held(self, setup: Setup) -> list[Held]:
        """Returns the arrays of a step, whole; ops are asked as they would be on the mesh."""
        engine = backend_module("kmodels.tools.plan.supposed", SupposedBackend, optional=True)
        with ExitStack() as stack:
            if engine is not None and self.mesh.size > 1:
                stack.enter_context(engine.supposed(self.mesh))
                stack.enter_context(keras_internals.without_values())
            return estimate.held_by(self._model, self._sizes, setup)

    def _estimate(self, setup: Setup) -> estimate.Estimate:
        """Returns what one device holds; rows that the mesh does not divide count in parts."""
        held = self._held(setup)
        if self.mesh.size > 1:
            held = shares.on_device(held, self.mesh, setup)
        return estimate.estimate(held, setup)

    @property
    def bytes(self) -> int:
        """The bytes at the peak of a step, beside what the process holds already."""
        return self.estimate.bytes

    @property
    def fits(self) -> bool | None:
        """True if there is that much; None if that is not known."""
        return None if self.available is None else self.bytes <= self.available

    def cache_bytes(self, slots: int) -> int:
        """Returns the bytes of keys and values of so many tokens, in a device's rows of a batch."""
        return estimate.cache_bytes(self._sizes, self.setup, slots) // self.mesh.replicas

    def parameters(self, part: str) -> int:
        """Returns elements of the model's frozen or trained weights, over all devices."""
        return self._counts[part]

    @property
    def active_parameters(self) -> int:
        """Elements of the weights that a token meets: of experts, those that it goes to."""
        return sum(self._counts.values()) - self._sizes.idle_parameters

    def savings(self) -> list[Saving]:
        """Flags that lower the peak, the one that saves most first; each counts alone."""
        return [saving for saving, _ in self._leaner(self.setup, self.bytes, lambda flag: True)]

    def _leaner(
        self, setup: Setup, peak: int, accepts: Callable[[str], bool]
    ) -> list[tuple[Saving, Setup]]:
        """Returns changes of a setup that lower its peak, the one that saves most first."""
        found = []
        experts = any(block.experts for block in self._sizes.blocks)
        for flag, changed in _leaner(setup, self._sizes.tokens is None, self.mesh.replicas):
            if not accepts(flag) or (experts and changed.quantize):
                continue  # There is no quantized form of experts.
            saved = peak - self._estimate(changed).bytes
            if saved > peak // 100:
                found.append((Saving(flag, saved), changed))
        return sorted(found, key=lambda change: -change[0].bytes)

    def fitting(self, accepts: Callable[[str], bool]) -> tuple[list[str], int] | None:
        """Returns flags that together make the step fit, and its peak with them; None if none do.

        The change that saves most comes first, again and again; a later value of a flag takes the
        place of an earlier one.

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
        """Returns plain values for JSON; with the cache of `generate` for so many tokens a row."""
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


def _leaner(setup: Setup, text: bool, replicas: int) -> list[tuple[str, Setup]]:
    found = []
    if setup.batch_size % (2 * replicas) == 0 or (setup.batch_size > 1 and replicas == 1):
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
    precisions = {"float32": ("bfloat16", "mixed_bfloat16")}.get(setup.precision, ("bfloat16",))
    found += [
        (f"--precision {name}", replace(setup, precision=name))
        for name in precisions
        if name != setup.precision
    ]
    if SLOTS[setup.optimizer]:
        found.append(("--optimizer sgd", replace(setup, optimizer="sgd")))
    return found


def _accepted(settings: type | Sequence[str]) -> Callable[[str], bool]:
    """Returns whether a command takes a flag with a value, by the choices of its settings."""
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
    """Stops a run that has no chance.

    Args:
        plan: plan of its step.
        flags: dataclass of the caller's settings, made by `flag`, whose flags and choices decide
            what is proposed; or names of flags, such as "--remat".
        anyway: the flag with which it continues in spite of the plan.

    Raises:
        InputError: if the step needs clearly more than there is; names the parts, the flags that
            save most, and a set of flags with which the step fits.
    """
    if plan.available is None or plan.bytes <= DOUBT * plan.available:
        return
    accepts = _accepted(flags)
    parts = sorted(plan.estimate.parts.items(), key=lambda part: -part[1])[:3]
    known = [saving for saving in plan.savings() if accepts(saving.flag)][:3]
    hint = "; take a smaller model"
    if known:
        hint = f"; {', '.join(f'{s.flag} saves {human(s.bytes)}' for s in known)}"
        if (fitting := plan.fitting(accepts)) is None:
            hint += "; no set of flags makes it fit, take a smaller model"
        else:
            hint += f"; {' '.join(fitting[0])} would fit with {human(fitting[1])}"
    raise InputError(
        f"a step needs about {human(plan.bytes)} and there are {human(plan.available)}: "
        f"{', '.join(f'{name} {human(size)}' for name, size in parts)}{hint}; {anyway} goes on"
    )
