"""Compares the settings of a decoder, block by block, with those that a file holds."""

from dataclasses import asdict
from typing import Any

import numpy as np

from kmodels.models.common.config import DecoderConfig


def differences(wanted: DecoderConfig, read: DecoderConfig) -> list[str]:
    """Returns the settings that results depend on and that differ, however a config says them.

    Args:
        wanted: config of a model.
        read: config of the file that was written of it, which has as many layers.

    Returns:
        "name=value" as wanted; one that differs in some blocks alone names the first of them.
    """
    found = [f"{name}={value!r}" for name, value in _lost(_outside(wanted), _outside(read)).items()]
    by_name: dict[str, dict[int, Any]] = {}
    for i in range(wanted.num_layers):
        for name, value in _lost(_block(wanted, i), _block(read, i)).items():
            by_name.setdefault(name, {})[i] = value
    for name, lost in by_name.items():
        first, value = next(iter(lost.items()))
        everywhere = list(lost.values()) == [value] * wanted.num_layers
        found.append(f"{name}={value!r}" if everywhere else f"{name} of layer {first}={value!r}")
    return found


def _lost(wanted: dict[str, Any], read: dict[str, Any]) -> dict[str, Any]:
    """Returns what differs; a file holds numbers in float32."""
    same = {
        name: np.float32(value) == np.float32(read[name])
        if isinstance(value, float) and isinstance(read[name], float)
        else value == read[name]
        for name, value in wanted.items()
    }
    return {name: value for name, value in wanted.items() if not same[name]}


def _outside(config: DecoderConfig) -> dict[str, Any]:
    """Returns what stands outside the blocks."""
    per_layer = any(config.block(i).per_layer_dim for i in range(config.num_layers))
    return {
        "vocabulary_size": config.vocabulary_size,
        "hidden_dim": config.hidden_dim,
        "scales_embeddings": config.scales_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "final_logit_soft_cap": config.logit_soft_cap,
        "per_layer_vocabulary": config.per_layer_vocabulary if per_layer else None,
    }


def _block(config: DecoderConfig, index: int) -> dict[str, Any]:
    """Returns what a block is made of, except for what counts in training alone."""
    block = asdict(config.block(index))
    del block["dropout"]
    # As many channels may turn by two shares.
    block["turned_channels"] = int(block.pop("rope_turned") * block["head_dim"] // 2)
    return block
