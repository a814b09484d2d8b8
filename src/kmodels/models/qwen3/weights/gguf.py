"""GGUF files of dense Qwen 3 models, as llama.cpp writes them."""

from typing import Any

from kmodels.models.common.gguf import reading, tensors
from kmodels.models.qwen3.config import Qwen3Config
from kmodels.weights import Rule

ARCHITECTURE = "qwen3"


def rules(config: Qwen3Config) -> list[Rule]:
    """Returns the table of a config."""
    return tensors.rules(config, tensors.NORMS | tensors.HEAD_NORMS)


def _fields(file: reading.File) -> dict[str, Any]:
    base, scaling, yarn = file.rope(1_000_000.0)
    return file.fields(head_dim=128) | {
        "rope_max_wavelength": base,
        "rope_scaling_factor": scaling,
        "rope_yarn": yarn,
    }


# An embedder takes the last token of a text.
LAST = 3
FORMAT = reading.GGUFFormat(
    "Qwen 3",
    (ARCHITECTURE,),
    Qwen3Config,
    _fields,
    rules,
    idle_at={"pooling_type": (0, LAST)},
)
