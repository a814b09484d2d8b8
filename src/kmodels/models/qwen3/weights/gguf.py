"""GGUF files of dense Qwen 3 models, as llama.cpp writes them."""

from typing import Any

from kmodels.core.errors import InputError
from kmodels.models.common import gguf as decoder
from kmodels.models.qwen3.config import Qwen3Config
from kmodels.weights import Rule


def rules(fields: dict[str, Any]) -> list[Rule]:
    """Returns the table for the fields of a config."""
    return decoder.rules(Qwen3Config(**fields), decoder.NORMS | decoder.HEAD_NORMS)


def _fields(file: decoder.File) -> dict[str, Any]:
    # llama.cpp's qwen3 reads biases of queries, keys and values, and none of the output; a Qwen 3
    # has all four or none.
    if biases := sorted(name for name in file.tensors if name.endswith(".bias")):
        raise InputError(
            f"{file.path} has biases ({biases[0]}, ...), and a GGUF file of Qwen 3 has none; give "
            "the Hugging Face directory that it was converted from"
        )
    base, scaling = file.rope(1_000_000.0)
    return file.fields(head_dim=128) | {
        "rope_max_wavelength": base,
        "rope_scaling_factor": scaling,
        "tie_word_embeddings": decoder.OUTPUT not in file.tensors,
    }


FORMAT = decoder.GGUFFormat(("qwen3",), _fields, rules)
