"""Kernels of linear layers in Keras' files, and the merge of an adapter into one."""

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from kmodels.core.types import Tensor
from kmodels.layers import copies, quantized

ADAPTER = ("lora_a", "lora_b", "lora_magnitude")
SCALING = "lora_scaling"
UNBUILT = "it was never built and the file holds weights for it; build it before it reads them"


def merged(kernel: Tensor, a: Any, b: Any, scaling: float, magnitude: Any = None) -> np.ndarray:
    """Returns the kernel (in, out) with an adapter added in float64, rounded once to its own dtype.

    Args:
        kernel: as it is without.
        a: (in, rank).
        b: (rank, out).
        scaling: what their product is multiplied by.
        magnitude: with DoRA the length of each output's weights, (out,).
    """
    wide, a, b = (np.asarray(x, "float64") for x in (kernel, a, b))
    total = wide + a @ b * scaling
    if magnitude is not None:
        total *= np.asarray(magnitude, "float64") / np.sqrt(np.square(total).sum(0))
    return total.astype(kernel.dtype)


def base(layer: keras.Layer) -> dict[str, Any]:
    """Returns the variables of a layer without its adapter, by name in a file of Keras."""
    named = (copies.original(layer, name) for name in ("kernel", "bias"))
    plain = [v for v in named if v is not None]
    beside = [] if layer.quantized is None else layer.quantized.variables
    return {str(i): v for i, v in enumerate(plain)} | {v.name: v for v in beside}


def adapter(layer: keras.Layer) -> dict[str, Any]:
    """Returns the variables of a layer's adapter by name; empty without one."""
    return {} if layer.adapter is None else {v.name: v for v in layer.adapter.variables}


def misfit(layer: keras.Layer, store: Mapping[str, Any]) -> str | None:
    """Returns why a layer cannot take what a file holds for it; None where it can.

    Args:
        layer: a `Dense`; one that was never called has nothing in a file, as Keras' own.
        store: arrays by name, as `Dense.save_own_variables` writes them.
    """
    shapes = {name: tuple(store[name].shape) for name in store.keys()}  # noqa: SIM118
    if not layer.built:
        return UNBUILT if shapes else None
    if not shapes:
        return "the file holds nothing for it"
    there = next((mode for mode in quantized.MODES if f"kernel_{mode}" in shapes), None)
    here = None if layer.quantized is None else layer.quantized.mode
    if there != here:
        return f"its kernel is {here or 'not quantized'}, the file's {there or 'not'}"
    wanted, own = base(layer), adapter(layer)
    held = [name for name in ADAPTER if name in shapes]
    if held and own:
        rank, other = own["lora_a"].shape[-1], shapes["lora_a"][-1]
        if rank != other:
            return f"its adapter has rank {rank}, the file's {other}"
        if held != list(own):
            return f"its adapter has {', '.join(own)}, the file's {', '.join(held)}"
        scaling, other = layer.adapter.settings.scaling, float(np.asarray(store[SCALING]))
        if not np.isclose(scaling, other):
            return f"its adapter counts {scaling:g} times, the file's {other:g}: give that alpha"
        wanted |= own
    elif held and here:
        return "the file has an adapter, which a quantized kernel cannot take in; call enable_lora"
    for name, variable in wanted.items():
        if shapes.get(name) != tuple(variable.shape):
            found = shapes.get(name, "missing")
            return f"{variable.name} is {tuple(variable.shape)}, in the file {found}"
    beside = copies.names(layer, store)
    for name, variable in beside.items():
        if shapes[name] != tuple(variable.shape):
            return f"{variable.name} is {tuple(variable.shape)}, {name} in the file {shapes[name]}"
    if more := sorted(set(shapes) - set(wanted) - {*ADAPTER, SCALING, *beside}):
        return f"the file has {', '.join(more)} too"
    return None


def load(layer: keras.Layer, store: Mapping[str, Any]) -> None:
    """Fills a layer from a file that fits, see `Dense.load_own_variables`."""
    for name, variable in base(layer).items():
        variable.assign(store[name])
    own = adapter(layer)
    if "lora_a" in store.keys():  # noqa: SIM118
        if own:
            for name, variable in own.items():
                variable.assign(store[name])
        else:
            held = set(store.keys())
            a, b, magnitude = (store[name] if name in held else None for name in ADAPTER)
            scaling = float(np.asarray(store[SCALING]))
            kernel = keras.ops.convert_to_numpy(layer.kernel.value)
            layer.kernel.assign(merged(kernel, a, b, scaling, magnitude))
    elif own:
        layer.adapter.start()
    copies.load(layer, store)
