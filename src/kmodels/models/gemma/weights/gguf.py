"""GGUF files of Gemma 1, 2 and 3, as llama.cpp writes them; quantized tensors become floats."""

from typing import Any

from kmodels.models.common import gguf as decoder
from kmodels.models.gemma.config import GemmaConfig
from kmodels.models.gemma.presets import GEMMA_2, GEMMA_3
from kmodels.weights import Rule, Transform

GENERATIONS = {"gemma": 1, "gemma2": 2, "gemma3": 3}
# The largest of each generation divides queries by the root of another number; files do not tell.
LARGEST = {2: 46, 3: 62}

# llama.cpp stores norms with the 1 added that the model adds itself.
plus_one = Transform(lambda x: x - 1, lambda x: x + 1)


def rules(config: GemmaConfig) -> list[Rule]:
    """Returns the table of one generation."""
    norms = dict(decoder.NORMS)
    if config.generation > 1:
        norms["post_attention_norm"] = "post_attention_norm"
        norms["post_ffw_norm"] = "post_mlp_norm"
    if config.generation == 3:
        norms |= decoder.HEAD_NORMS
    return decoder.rules(config, norms, plus_one)


def _fields(file: decoder.File) -> dict[str, Any]:
    generation, get = GENERATIONS[file.architecture], file.get
    fields = file.fields(head_dim=256)
    fields["intermediate_dim"] *= 1 if generation == 3 else 2
    layers = fields["num_layers"]
    base, scaling = file.rope(1_000_000.0 if generation == 3 else 10_000.0)
    fields["global_rope_wavelength"], fields["global_rope_scaling_factor"] = base, scaling
    if generation < 3:
        fields["local_rope_wavelength"], fields["local_rope_scaling_factor"] = base, scaling
    if generation == 1:
        return fields
    fields = {**(GEMMA_2 if generation == 2 else GEMMA_3), **fields}
    if generation == 2:
        fields["attention_logit_soft_cap"] = float(get("attn_logit_softcapping", 50.0))
        fields["final_logit_soft_cap"] = float(get("final_logit_softcapping", 30.0))
    else:
        fields["local_rope_wavelength"] = float(get("rope.freq_base_swa", 10_000.0))
    fields["sliding_window_size"] = int(
        get("attention.sliding_window", fields["sliding_window_size"])
    )
    if isinstance(pattern := get("attention.sliding_window_pattern"), int):
        fields["sliding_window_pattern"] = pattern
    fields["query_head_dim_normalize"] = layers != LARGEST[generation]
    return fields


FORMAT = decoder.GGUFFormat("Gemma", GENERATIONS, GemmaConfig, _fields, rules)
