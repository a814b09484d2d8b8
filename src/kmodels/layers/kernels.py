"""Kernels of linear layers in Keras' files, and the merge of an adapter into one."""

from collections.abc import Mapping, MutableMapping
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
        scaling: factor of their product.
        magnitude: with DoRA the length of each output's weights, (out,).
    """
    wide, a, b = (np.asarray(x, "float64") for x in (kernel, a, b))
    total = wide + a @ b * scaling
    if magnitude is not None:
        total *= np.asarray(magnitude, "float64") / np.sqrt(np.square(total).sum(0))
    return total.astype(kernel.dtype)


def add(layer: Any, a: Any, b: Any, scaling: float, magnitude: Any = None) -> np.ndarray:
    """Adds an adapter to the kernel of a layer, see `merged`; returns the kernel as it was."""
    before = np.array(keras.ops.convert_to_numpy(layer.kernel.value))
    # The kernel of an output layer is its table (out, in).
    total = merged(before.T if layer.is_output else before, a, b, scaling, magnitude)
    layer.kernel.assign(total.T if layer.is_output else total)
    return before


def base(layer: keras.Layer) -> dict[str, Any]:
    """Returns the variables of a layer without its adapter, by name in a file of Keras."""
    named = (copies.original(layer, name) for name in ("kernel", "bias"))
    plain = [v for v in named if v is not None]
    beside = [] if layer.quantized is None else layer.quantized.variables
    return {str(i): v for i, v in enumerate(plain)} | {v.name: v for v in beside}


def adapter(layer: Any) -> dict[str, Any]:
    """Returns the variables of a layer's adapter by name; empty without one."""
    if layer.adapter is None:
        return {}
    return dict(zip(ADAPTER, layer.adapter.variables, strict=False))


def save_adapter(layer: Any, store: MutableMapping[str, Any]) -> None:
    """Writes the adapter of a layer by name, and its scaling."""
    for name, variable in adapter(layer).items():
        store[layer.prefix + name] = variable
    if layer.adapter is not None:
        store[layer.prefix + SCALING] = np.float32(layer.adapter.settings.scaling)


def within(store: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Returns the arrays in a file for the adapter of one table, without the prefix."""
    held = set(store.keys())
    return {name: store[prefix + name] for name in (*ADAPTER, SCALING) if prefix + name in held}


def misfit_of_adapter(layer: Any, store: Mapping[str, Any]) -> str | None:
    """Returns why the adapter of a layer cannot load that of a file, or None.

    Args:
        layer: has an adapter, or none.
        store: arrays by name.
    """
    own, held = adapter(layer), [name for name in ADAPTER if name in set(store.keys())]
    if not (held and own):
        return None
    rank, other = own["lora_a"].shape[-1], store["lora_a"].shape[-1]
    if rank != other:
        return f"its adapter has rank {rank}, the file's {other}"
    if held != list(own):
        return f"its adapter has {', '.join(own)}, the file's {', '.join(held)}"
    scaling, other = layer.adapter.settings.scaling, float(np.asarray(store[SCALING]))
    if not np.isclose(scaling, other):
        return f"its adapter counts {scaling:g} times, the file's {other:g}: give that alpha"
    return None


def load_adapter(layer: Any, store: Mapping[str, Any]) -> None:
    """Fills the adapter of a layer from a file that fits.

    A layer without an adapter adds that of the file to its kernel; an adapter is reset if the file
    has none.
    """
    own, held = adapter(layer), set(store.keys())
    if "lora_a" not in held:
        if own:
            layer.adapter.start()
    elif own:
        for name, variable in own.items():
            variable.assign(store[name])
    else:
        a, b, magnitude = (store[name] if name in held else None for name in ADAPTER)
        add(layer, a, b, float(np.asarray(store[SCALING])), magnitude)


def misfit(layer: keras.Layer, store: Mapping[str, Any]) -> str | None:
    """Returns why a layer cannot load its arrays of a file, or None.

    Args:
        layer: a `Dense`; if it was never called, a file has no arrays for it, as in Keras.
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
        if problem := misfit_of_adapter(layer, store):
            return problem
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
    load_adapter(layer, store)
    copies.load(layer, store)
