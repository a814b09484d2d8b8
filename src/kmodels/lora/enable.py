"""Adapters on a whole model: enable, disable, merge."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import keras

from kmodels.core.errors import InputError
from kmodels.layers.adapter import Adaptable, LoraSettings, warn_of_rank
from kmodels.layers.changes import adapters, copies, is_merged, put_adapters, trained_parts
from kmodels.lora import modules
from kmodels.lora.modules import choose, choose_experts, expert_layers


def enable(
    model: keras.Model,
    settings: LoraSettings,
    trainable_token_indices: modules.Ids | None = None,
    modules_to_save: Sequence[str] | None = None,
    task: keras.Model | None = None,
) -> None:
    """Freezes a model and adds adapters to the target layers.

    Args:
        model: a built model.
        settings: rank, targets and so on.
        trainable_token_indices: trained rows of the embedding table, see `enable_lora`.
        modules_to_save: modules that are trained as a whole; they get no adapter.
        task: the task around a backbone; `modules_to_save` may name modules of its head, too.

    Raises:
        InputError: for unknown targets or tokens, or a model that has adapters.
    """
    if adapters(model) or is_merged(model):
        raise InputError("this model has LoRA adapters already; make a new one to start over")
    task = model if task is None else task
    saved = modules.chosen_modules(task, modules_to_save)
    layers = {path: x for path, x in chosen(model, settings).items() if path not in saved}
    if not layers:
        raise InputError("modules_to_save names all targets; leave some of them to the adapters")
    begin = modules.prepare(task, trainable_token_indices, modules_to_save)
    looked_up = [path for path, layer in layers.items() if layer.is_lookup]
    if trainable_token_indices is not None and looked_up:
        raise InputError(
            f"{looked_up[0]} is a target, so trainable_token_indices would train its rows twice; "
            "leave one of the two out"
        )
    warn_of_rank(list(layers.values()), settings.rank, stacklevel=5)
    put_adapters(model, {path: (layer, settings) for path, layer in layers.items()})
    begin()


def chosen(model: keras.Model, settings: LoraSettings) -> dict[str, Adaptable]:
    """Returns the layers that get an adapter, by path.

    Raises:
        InputError: for unknown targets.
    """
    names = modules.names(model, expert_layers(model))
    experts = choose_experts(model, settings.target_parameters, names)
    return {**choose(model, settings.targets), **experts}


@contextmanager
def disabled(model: keras.Model) -> Iterator[None]:
    """Turns adapters off inside the block: the model computes the outputs of its frozen base.

    `fit`, `evaluate`, `predict` and `generate` respect it. In a function that you compile yourself,
    enter the block inside that function.

    Args:
        model: with adapters.

    Raises:
        InputError: without adapters, or if the whole embedding table is trained in place.
    """
    if not adapters(model):
        raise InputError("disabled found no LoRA adapters; call enable_lora first")
    if whole := [x for x in modules.trained_tables(model) if x.copies is None]:
        raise InputError(
            f"{whole[0].path} is trained in place, so the table as it was is gone; give its name "
            "to modules_to_save of enable_lora, which keeps it"
        )
    active = trained_parts(model)
    try:
        for part in active:
            part.off()
        yield
    finally:
        for part in active:
            part.on()


def merge(model: keras.Model) -> None:
    """Adds every adapter to its kernel, and writes trained rows and copies into the originals.

    The model then has the variables it had without LoRA.

    Raises:
        InputError: without adapters, or on a quantized base.
    """
    adapted = adapters(model)
    if not adapted:
        raise InputError("merge_lora found no adapters; call enable_lora or load_adapter first")
    in_few_bits = [x for x in copies(model).values() if None in x.originals.values()]
    layers = [part.layer for part in (*adapted.values(), *in_few_bits)]
    quantized = [layer for layer in layers if layer.quantized is not None]
    if quantized:
        raise InputError(
            f"merge_lora would round the adapter away, since {quantized[0].path} and "
            f"{len(quantized) - 1} more are quantized to {quantized[0].quantized.mode}; give "
            "onto='dequantized', or onto='original' and base, the model before it was quantized"
        )
    for part in trained_parts(model):
        part.merge()


def unmerge(model: keras.Model) -> None:
    """Undoes `merge`, bit for bit.

    Raises:
        InputError: for a model without merged adapters.
    """
    if not is_merged(model):
        raise InputError(
            "unmerge_lora found no merged adapters: none were merged since this model was made, "
            "and a file holds the merged kernels alone; load what was saved before merge_lora"
        )
    for part in trained_parts(model, merged=True):
        part.unmerge()
