"""Gemma 1, 2, 3 and 4, text only (Gemma Team 2024, 2024, 2025, 2026)."""

from kmodels.models.blocks.embedder.task import PARTS
from kmodels.models.blocks.sizes import sizes
from kmodels.models.gemma import gguf, huggingface
from kmodels.models.gemma.keras_hub import PEERS
from kmodels.models.gemma.model import GemmaBackbone
from kmodels.models.gemma.presets import PRESETS
from kmodels.models.gemma.tasks import (
    Gemma3CausalLM,
    Gemma3TextEmbedder,
    Gemma4CausalLM,
    GemmaCausalLM,
    GemmaTextEmbedder,
)
from kmodels.registry import Family

FAMILY = Family(
    name="gemma",
    backbone=GemmaBackbone,
    tasks=(GemmaCausalLM, Gemma3CausalLM, Gemma4CausalLM, GemmaTextEmbedder, Gemma3TextEmbedder),
    presets=PRESETS,
    formats=(huggingface.FORMAT, gguf.FORMAT),
    sizes=sizes,
    transformers_form=huggingface.transformers_form,
    keras_hub=PEERS,
    parts=PARTS,
)
