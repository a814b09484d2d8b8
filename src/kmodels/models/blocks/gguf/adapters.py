"""LoRA adapters as GGUF files, which llama.cpp adds to a model with `--lora`.

Such a file holds lora_a (rank, in) and lora_b (out, rank) for each adapted matrix of the base's
file, and one alpha: llama.cpp scales each product by alpha / rank.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from kmodels.core.errors import InputError
from kmodels.core.remote import write_file
from kmodels.layers.adapter import Adapter
from kmodels.layers.changes import adapters, copies, rows
from kmodels.models.blocks.gguf.writing import (
    KINDS,
    GGUFExport,
    check_file,
    check_package,
    write_tensors,
)
from kmodels.weights import LazyArray, Rule, gather
from kmodels.weights.gguf import Settings, open_gguf
from kmodels.weights.rules import bind_targets

PARTS = ("lora_a", "lora_b")
DTYPES = ("float32", "float16")


def write_adapter(
    export: GGUFExport, model: keras.Model, path: str | Path, dtype: str = "float32"
) -> Path:
    """Writes the adapters of a model, atomically, in one of `DTYPES`."""
    if dtype not in DTYPES:
        known = " or ".join(DTYPES)
        raise InputError(f"dtype is {dtype!r}; adapters in GGUF files are written as {known}")
    check_file(path, dtype)
    config, form = export.form_of(model)
    check_package()
    bound = _bound(model, export.format.table(config))
    # llama.cpp has one alpha, which is that of most adapters. The second matrices of the others
    # are scaled, as are those of rsLoRA with another rank.
    alphas = {
        layer: float(np.float32(adapter.settings.scaling * adapter.settings.rank))
        for layer, (adapter, _) in bound.items()
    }
    alpha = Counter(alphas.values()).most_common(1)[0][0]
    tensors: dict[str, LazyArray] = {}
    for layer, (adapter, rule) in bound.items():
        tensors |= _tensors(adapter, rule, alphas[layer] / alpha)

    def write(temporary: Path) -> None:
        import gguf

        writer = gguf.GGUFWriter(temporary, form.architecture)
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
        write_tensors(writer, tensors, dict.fromkeys(tensors, KINDS[dtype]))

    return write_file(path, write)


def _tensors(adapter: Adapter, rule: Rule, factor: float) -> dict[str, LazyArray]:
    rank = adapter.settings.rank

    def first() -> np.ndarray:
        return np.asarray(gather.values(adapter.a), "float32").T

    def second() -> np.ndarray:
        # (rank, out) is a kernel with `rank` inputs, whose outputs the rule orders as the kernel's.
        return rule.transform.inverse(np.asarray(gather.values(adapter.b), "float32")) * factor

    names = [f"{rule.source}.{part}" for part in PARTS]
    return {
        names[0]: LazyArray((rank, adapter.layer.input_dim), np.dtype("float32"), first),
        names[1]: LazyArray((adapter.layer.units, rank), np.dtype("float32"), second),
    }


def _bound(model: keras.Model, table: Sequence[Rule]) -> dict[str, tuple[Adapter, Rule]]:
    """Returns adapter and rule by path of the layer, if llama.cpp has a place for all of them."""
    by_path = adapters(model)
    if not by_path:
        raise InputError("the model has no LoRA adapters; call enable_lora or load_adapter first")
    own = {id(variable) for adapter in by_path.values() for variable in adapter.variables}
    beside = [*rows(model), *copies(model)]
    beside += [v.path for v in model.trainable_weights if id(v) not in own]
    if dora := [path for path, adapter in by_path.items() if adapter.magnitude is not None]:
        raise InputError(
            f"llama.cpp's adapters have no DoRA, and {dora[0]} has; call merge_lora and "
            "export_to_gguf"
        )
    rules = {
        rule.targets[0]: rule for rule in bind_targets(table, map("{}/kernel".format, by_path))
    }
    bound = {
        path: (adapter, rule)
        for path, adapter in by_path.items()
        # llama.cpp leaves adapters of the matrices outside the blocks without effect.
        if (rule := rules.get(f"{path}/kernel")) is not None and rule.source.startswith("blk.")
    }
    if lost := list(dict.fromkeys([*(path for path in by_path if path not in bound), *beside])):
        more = f" and {len(lost) - 1} more" if lost[1:] else ""
        raise InputError(
            f"llama.cpp's adapters have no place for the trained {lost[0]}{more}; call merge_lora "
            "and export_to_gguf"
        )
    return bound


def compare(export: GGUFExport, model: keras.Model, path: Path) -> tuple[float, float]:
    """Compares the changes of the base's matrices in a file with those of the model.

    Args:
        export: the way of the model's family into GGUF files.
        model: the model whose adapters were written.
        path: the file.

    Returns:
        The largest absolute difference, and the largest absolute value of a change.

    Raises:
        InputError: for a file with other tensors than the model has adapters.
    """
    bound = _bound(model, export.format.table(export.form_of(model)[0]))
    reader = open_gguf(path)
    alpha = Settings(path, reader)("adapter.lora.alpha")
    stored: Mapping[str, Any] = {tensor.name: tensor for tensor in reader.tensors}
    names = {f"{rule.source}.{part}" for _, rule in bound.values() for part in PARTS}
    if names != set(stored):
        raise InputError(f"{path} holds other tensors than the adapter; write it again")
    difference = largest = 0.0
    for adapter, rule in bound.values():
        first, second = (np.asarray(stored[f"{rule.source}.{x}"].data, "float32") for x in PARTS)
        a, b = (np.asarray(gather.values(x), "float32") for x in (adapter.a, adapter.b))
        change = rule.transform.inverse(a @ b * np.float32(adapter.settings.scaling))
        again = second @ first * np.float32(alpha / len(first))
        difference = max(difference, float(np.abs(again - change).max()))
        largest = max(largest, float(np.abs(change).max()))
    return difference, largest
