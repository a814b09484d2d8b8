"""An estimate of a training step's memory, from shapes alone: nothing is allocated.

A model built inside `compat.without_values()` has the paths, shapes and layers of the real one and
no numbers. The size of its weights, their gradients and the optimizer's slots is then arithmetic.
The arrays that the blocks keep for the backward pass follow from `Sizes`, which each family derives
from its config.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import keras

from kmodels.core.dispatch import backend_module
from kmodels.layers import quantized
from kmodels.layers.adapter import matrices, name_in
from kmodels.layers.layout_family import family_of
from kmodels.layers.shard_granularity import granularity_of
from kmodels.lora.enable import chosen
from kmodels.lora.targets import linear_layers
from kmodels.memory import activations
from kmodels.memory.sizes import (
    ACTIVATIONS,
    FROZEN,
    GATHERED,
    GRADIENTS,
    HEAD,
    MOVING,
    OPTIMIZER,
    PARTS,
    SCRATCH,
    SLOTS,
    TRAINED,
    FactsBackend,
    Held,
    Setup,
    Sizes,
    width_of,
)


@dataclass(frozen=True)
class Estimate:
    """The memory that a step holds.

    Attributes:
        held: every array.
        overhead: bytes besides, for allocator, scheduler and compiler.
    """

    held: tuple[Held, ...]
    overhead: int = 0

    def part(self, name: str) -> int:
        """Returns bytes of one part."""
        return sum(held.bytes for held in self.held if held.part == name)

    def count(self, name: str) -> int:
        """Returns elements of one part."""
        return sum(held.size for held in self.held if held.part == name)

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by part."""
        return {name: self.part(name) for name in PARTS}

    @property
    def blocks(self) -> dict[str, int]:
        """Bytes that each block keeps for the backward pass."""
        found: dict[str, int] = {}
        for held in self.held:
            if held.part == ACTIVATIONS:
                block = held.name.partition("/")[0]
                found[block] = found.get(block, 0) + held.bytes
        return found

    @property
    def bytes(self) -> int:
        """The peak: activations are gone when the gradients are whole, the larger one counts."""
        parts = self.parts
        forward, backward = parts[ACTIVATIONS] + parts[HEAD], parts[GRADIENTS]
        kept = parts[FROZEN] + parts[TRAINED] + parts[OPTIMIZER]
        moving = max(forward, backward) + parts[GATHERED] + parts[SCRATCH]
        return kept + moving + self.overhead


def weights(model: keras.Model, setup: Setup) -> Iterator[Held]:
    """Yields the variables that the model will have: adapters are in, quantized kernels are small.

    Args:
        model: a task, with or without values, neither quantized nor with adapters.
        setup: the step.

    Yields:
        Each of them, with its part.

    Raises:
        InputError: for LoRA targets that the model does not have.
    """
    policy = keras.dtype_policies.get(setup.precision)
    backbone = getattr(model, "backbone", model)
    if setup.quantize:
        quantized.check_layers(backbone)
    linear = linear_layers(backbone)
    kernels = {f"{path}/kernel": layer for path, layer in linear.items()}
    base = {variable.path for variable in backbone.weights} if setup.lora else set()
    for variable in model.weights:
        part = FROZEN if variable.path in base or not variable.trainable else TRAINED
        if setup.quantize and variable.path in kernels:
            yield from _quantized(kernels[variable.path], setup.quantize)
        else:
            shape, granularity = tuple(variable.shape), granularity_of(variable)
            yield Held(
                part,
                variable.path,
                shape,
                policy.variable_dtype,
                granularity=granularity,
                family=family_of(variable),
            )
    if setup.lora is not None:
        for layer in chosen(backbone, setup.lora).values():
            made = matrices(layer, setup.lora.rank)
            if setup.lora.dora:
                made["lora_magnitude"] = ((layer.units,), layer.shard_granularity[1:])
            for name, (shape, granularity) in made.items():
                yield Held(
                    TRAINED,
                    name_in(layer, name),
                    shape,
                    "float32",
                    granularity=granularity,
                    family=layer.layout_family,
                )


def _quantized(layer: keras.Layer, mode: str) -> Iterator[Held]:
    for name, (shape, dtype) in quantized.shapes(mode, layer.input_dim, layer.units).items():
        yield Held(
            FROZEN,
            f"{layer.path}/{name}",
            shape,
            dtype,
            granularity=layer.shard_granularity,
            family=layer.layout_family,
        )


def held_by(model: keras.Model, sizes: Sizes, setup: Setup) -> list[Held]:
    """Returns all arrays of a training step, whole.

    Args:
        model: a task, with or without values, neither quantized nor with adapters.
        sizes: sizes of its blocks.
        setup: the step.

    Raises:
        InputError: for LoRA targets or ranks that the model does not have.
    """
    held = list(weights(model, setup))
    trained = [h for h in held if h.part == TRAINED]
    slots = SLOTS[setup.optimizer] + (setup.accumulate > 1) + setup.ema
    held += [replace(h, part=GRADIENTS) for h in trained]
    held += [replace(h, part=OPTIMIZER, shape=(slots, *h.shape)) for h in trained if slots]
    return held + list(activations.of_step(held, sizes, setup))


def estimate(held: Sequence[Held], setup: Setup) -> Estimate:
    """Returns what these arrays of a step take on a device at their peak, and what comes on top."""
    facts = activations.facts(setup.accelerator)
    slack = facts.slack * sum(h.bytes for h in held if h.part in MOVING)
    return Estimate(tuple(held), round(slack) + facts.compiler)


def cache_bytes(sizes: Sizes, setup: Setup, slots: int) -> int:
    """Returns the bytes of the keys and values that `generate` keeps.

    Args:
        sizes: sizes of the blocks.
        setup: the step, whose batch and dtype count.
        slots: tokens of each row.
    """
    dtype = keras.dtype_policies.get(setup.precision).compute_dtype
    tokens = setup.batch_size * slots
    return sum(2 * tokens * b.groups * b.head_dim * width_of(dtype) for b in sizes.blocks)


def available_bytes() -> int | None:
    """Returns what the device has left, or the host on a CPU; None where nobody tells."""
    engine = backend_module("kmodels.memory.facts", FactsBackend)
    found = engine.device_bytes()
    return host_bytes() if found == 0 else found


def host_bytes() -> int | None:
    """Returns the bytes that the host and its control group have left for this process."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    free = [int(text.split("MemAvailable:")[1].split()[0]) * 1024]
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        try:
            free.append(int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):
            continue  # no such control group, or one without a limit
    return max(min(free), 0)
