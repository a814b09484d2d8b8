"""keras-hub's LoRA files, which name their matrices by the number of a layer.

A layer with heads has kernels of three axes there, and one of the two matrices is shared by all
heads: (D, N, r) and (r, H). In kmodels that is a product of (D, N * r) and (N * r, N * H), whose
second matrix holds the shared one N times on its diagonal, and zeros.
"""

from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np

from kmodels import lora
from kmodels.core import keras_internals
from kmodels.core.errors import InputError
from kmodels.interop import hub_weights
from kmodels.lora import LoraSettings
from kmodels.lora.targets import linear_layers
from kmodels.models.common.keras_hub_mapping import KerasHubMapping
from kmodels.weights.rules import Bound, bind_sources
from kmodels.weights.transforms import source_shape

Factors = tuple[np.ndarray, np.ndarray]
PARTS = ("lora_kernel_a", "lora_kernel_b")


def read(model: keras.Model, file: Path, peer: KerasHubMapping, hub: keras.Model) -> None:
    """See `keras_hub.read_lora`."""
    backbone = getattr(model, "backbone", model)
    if lora.describe(model):
        raise InputError("the model has LoRA adapters already; read_lora needs one without")
    rank, stored = _stored(file)
    config = backbone.config
    # A layer that computes from its weights while it is built needs their values.
    with nullcontext() if peer.copies else keras_internals.without_values():
        theirs = hub_weights.make(peer, config, hub, keras.config.dtype_policy())
    names = {id(v): name for name, v in hub_weights.variables(peer, theirs).items()}
    numbered = [
        layer
        for layer in keras_internals.sublayers(theirs)
        if layer is not theirs and layer.weights
    ]
    rules = bind_sources(peer.table(config), names.values())
    layers = linear_layers(backbone)
    found: dict[str, Factors] = {}
    for number, matrices in stored.items():
        if number >= len(numbered):
            raise InputError(
                f"{file} has an adapter for layer {number}, the model has {len(numbered)}; it was "
                "made for another model"
            )
        name = names.get(id(getattr(numbered[number], "kernel", None)))
        rule = rules.get(name) if name else None
        path = rule.targets[0].removesuffix("/kernel") if rule else ""
        if rule is None or len(rule.targets) > 1 or path not in layers:
            raise InputError(
                f"{file} has an adapter for layer {number}, {numbered[number].path}, which has no "
                "linear layer of its own here"
            )
        found[path] = _plain(f"{file}: {name}", matrices, rank, rule, layers[path])
    _put(file, backbone, layers, found)


def _stored(file: Path) -> tuple[int, dict[int, Factors]]:
    try:
        with h5py.File(file) as opened:
            held: Any = opened["lora"]
            rank = int(held["vars"]["rank"][()])
            numbers = [name for name in held if name.isdigit()]
            found = {
                int(name): tuple(np.asarray(held[name]["vars"][part], "float32") for part in PARTS)
                for name in numbers
            }
    except (OSError, KeyError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{file} is not a .lora.h5 of keras-hub: {reason}") from None
    if not found:
        raise InputError(f"{file} holds no adapters")
    return rank, {number: (a, b) for number, (a, b) in sorted(found.items())}


def _plain(origin: str, matrices: Factors, rank: int, rule: Bound, layer: keras.Layer) -> Factors:
    """Returns two matrices (in, R) and (R, out) with the same product."""
    a, b = matrices
    ours = (layer.input_dim, layer.units)
    shape = source_shape([ours], rule.transform, rule.axis)
    if a.shape != (*shape[:-1], rank) or b.shape != (rank, shape[-1]):
        raise InputError(
            f"{origin} has adapters of {a.shape} and {b.shape}, the model needs "
            f"{(*shape[:-1], rank)} and {(rank, shape[-1])}"
        )
    product = np.ascontiguousarray(rule.transform.forward(a @ b))
    if len(shape) == 2 or shape[0] * shape[1] == layer.input_dim:
        return a.reshape(-1, rank), b
    heads = layer.units // shape[-1]
    if heads * rank > min(ours):  # more columns than any product of this shape needs
        one = np.eye(min(ours), dtype="float32")
        return (one, product) if ours[0] <= ours[1] else (product, one)
    wide = np.kron(np.eye(heads, dtype="float32"), b)
    for axis in (0, 1):
        if shape[axis] == heads:
            columns = np.moveaxis(a, axis, 1).reshape(layer.input_dim, heads * rank)
            if np.allclose(columns @ wide, product, rtol=1e-4, atol=1e-6):
                break
    return columns, wide


def _put(
    file: Path, backbone: keras.Model, layers: dict[str, Any], found: dict[str, Factors]
) -> None:
    """Gives the layers their adapters, all of one rank, as PEFT's files want it."""
    rank = max(a.shape[1] for a, _ in found.values())
    for path in found:
        if rank > (limit := min(layers[path].input_dim, layers[path].units)):
            raise InputError(
                f"{file} needs adapters of rank {rank} here, since keras-hub shares a matrix among "
                f"heads, and {path} takes at most {limit}"
            )
    ends = tuple(sorted({path.rpartition("/")[2] for path in found}))
    settings = asdict(LoraSettings(rank=rank, targets=ends))
    lora.restore(backbone, dict.fromkeys(found, settings))
    for path, (a, b) in found.items():
        more = rank - a.shape[1]
        adapter = layers[path].adapter
        adapter.a.assign(np.pad(a, ((0, 0), (0, more))))
        adapter.b.assign(np.pad(b, ((0, more), (0, 0))))
