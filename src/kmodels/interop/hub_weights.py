"""Weights of a model of keras-hub by name, and the comparison of both sides."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np

from kmodels.core import keras_internals
from kmodels.core.errors import InputError
from kmodels.models.common.keras_hub_mapping import KerasHubMapping
from kmodels.weights import LazyArray, Rule, engine, gather

LORA = ("/lora_kernel_a", "/lora_kernel_b")


def make(peer: KerasHubMapping, config: Any, hub: Any, policy: keras.DTypePolicy) -> keras.Model:
    """Returns a new backbone of keras-hub.

    Args:
        peer: the counterpart of the backbone.
        config: config of the backbone here.
        hub: keras-hub itself.
        policy: of the backbone. As an object: by the name "bfloat16", a vision encoder of keras-hub
            makes itself float32.
    """
    more = {}
    if peer.make_part is not None:
        name, arguments = peer.make_part(config)
        own = arguments.pop("dtype", None)
        held = policy if own is None else keras.DTypePolicy(own)
        more[peer.part] = getattr(hub.models, name)(**arguments, dtype=held)
    return getattr(hub.models, peer.backbone)(**peer.arguments(config), **more, dtype=policy)


def variables(peer: KerasHubMapping, model: keras.Model) -> dict[str, Any]:
    """Returns the weights of a backbone or task of keras-hub by the names in the table.

    Args:
        peer: the counterpart of the backbone.
        model: whose weights they are.

    Raises:
        InputError: for weights that are not plain numbers, or adapters beside them.
    """
    backbone = getattr(model, "backbone", model)
    parts = [part for name in peer.ignored if (part := getattr(backbone, name, None)) is not None]
    left = {id(variable) for part in parts for variable in part.weights}
    found: dict[str, Any] = {}
    for variable in model.weights:
        if id(variable) in left:
            continue
        name = variable.path.removeprefix(f"{model.name}/").removeprefix(f"{backbone.name}/")
        # Layers of some backbones bear the backbone's name in front of their own, if it has one.
        name = name.removeprefix(f"{backbone.name}_")
        for pattern, known in peer.renamed.items():
            name = re.sub(f"^{pattern}$", known, name)
        if name in found:
            raise InputError(f"two weights of {model.name} are called {name}; rename the layers")
        found[name] = variable
    if adapted := [name for name in found if name.endswith(LORA)]:
        raise InputError(
            f"{model.name} has LoRA adapters ({len(adapted)} weights, {adapted[0]} first): take "
            "them by save_lora_weights and read_lora, and give the model as it was without"
        )
    return {name: variable for name, variable in found.items() if name not in peer.copies}


def check_file(file: Path, model: keras.Model) -> None:
    """Raises `InputError` that names what Keras passed over as it filled a model from a file.

    Args:
        file: a .weights.h5.
        model: that was filled from it.
    """
    held: list[str] = []

    def note(name: str, entry: "h5py.Dataset") -> None:
        if isinstance(entry, h5py.Dataset):
            held.append(name)

    with h5py.File(file) as opened:
        opened.visititems(note)
    known = keras_internals.saved_arrays(model)
    if surplus := _listed("", [name for name in held if name not in known]):
        raise InputError(
            f"{file} holds weights that {type(model).__name__} does not have{surplus[0]}"
        )


def tensors(peer: KerasHubMapping, model: keras.Model) -> dict[str, LazyArray]:
    """Returns the same as an open file would give them."""
    return {name: _lazy(variable) for name, variable in variables(peer, model).items()}


def _lazy(variable: keras.Variable) -> LazyArray:
    dtype = np.dtype(keras.backend.standardize_dtype(variable.dtype))
    return LazyArray(tuple(variable.shape), dtype, lambda: gather.values(variable))


def fill(peer: KerasHubMapping, model: keras.Model, values: Mapping[str, LazyArray]) -> None:
    """Puts values into a model of keras-hub, where every name and shape fits.

    Args:
        peer: the counterpart of the backbone.
        model: new, of keras-hub.
        values: by the names in the table.

    Raises:
        InputError: lists what does not fit.
    """
    held = variables(peer, model)
    engine.load(held, values, [Rule(name, name) for name in values], origin="the converted model")
    backbone = getattr(model, "backbone", model)
    for variable in backbone.weights:
        name = variable.path.removeprefix(f"{backbone.name}_")
        if (source := peer.copies.get(name)) is not None:
            gather.put(variable, values[source].read())


def compare(
    peer: KerasHubMapping, model: keras.Model, theirs: keras.Model, rules: Sequence[Rule]
) -> None:
    """Raises `InputError` that names every weight that is not the same, bit for bit, on both sides.

    Args:
        peer: the counterpart of the backbone.
        model: a model of kmodels.
        theirs: a model of keras-hub.
        rules: the table.
    """
    ours, found = engine.export(model, rules), tensors(peer, theirs)
    problems = [
        *_listed("not in kmodels", [name for name in found if name not in ours]),
        *_listed("not in keras-hub", [name for name in ours if name not in found]),
        *_listed(
            "different", [name for name in ours if name in found and _differ(ours, found, name)]
        ),
    ]
    if problems:
        raise InputError(f"the two models do not hold the same weights: {'; '.join(problems)}")


def _differ(ours: Mapping[str, LazyArray], theirs: Mapping[str, LazyArray], name: str) -> bool:
    left, right = ours[name], theirs[name]
    if (left.shape, left.dtype) != (right.shape, right.dtype):
        return True
    return left.read().tobytes() != right.read().tobytes()


def _listed(title: str, names: Sequence[str]) -> list[str]:
    more = f" and {len(names) - engine.SHOWN} more" if len(names) > engine.SHOWN else ""
    return [f"{title}: {', '.join(names[: engine.SHOWN])}{more}"] if names else []
