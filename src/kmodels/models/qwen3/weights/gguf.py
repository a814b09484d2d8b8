"""GGUF files of dense Qwen 3 models, as llama.cpp writes them."""

from typing import Any

from kmodels.models.common import gguf as decoder
from kmodels.models.qwen3.config import Qwen3Config
from kmodels.weights import Rule


def rules(config: Qwen3Config) -> list[Rule]:
    """Returns the table of a config."""
    return decoder.rules(config, decoder.NORMS | decoder.HEAD_NORMS)


def _fields(file: decoder.File) -> dict[str, Any]:
    base, scaling = file.rope(1_000_000.0)
    return file.fields(head_dim=128) | {
        "rope_max_wavelength": base,
        "rope_scaling_factor": scaling,
        "tie_word_embeddings": decoder.OUTPUT not in file.tensors,
    }


FORMAT = decoder.GGUFFormat("Qwen 3", ("qwen3",), Qwen3Config, _fields, rules)
