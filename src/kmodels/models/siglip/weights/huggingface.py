"""Hugging Face directories of SigLIP and SigLIP 2: the text tower, alone or beside the images'."""

from pathlib import Path

from kmodels.models.common.encoder.huggingface import Setting, TextTowerFormat


def _read(path: Path, width: int | None) -> int | None:
    return width


def _write(width: int) -> int:
    return width


FORMAT = TextTowerFormat(
    kinds=("siglip_text_model", "siglip", "siglip2_text_model", "siglip2"),
    architectures=("SiglipTextModel",),
    defaults={
        **{"vocab_size": 32_000, "hidden_size": 768, "intermediate_size": 3072},
        **{"num_hidden_layers": 12, "num_attention_heads": 12, "max_position_embeddings": 64},
        **{"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "attention_dropout": 0.0},
        "projection_size": None,
    },
    others=("vision_model.", "logit_scale", "logit_bias"),
    settings={"projection_dim": Setting("projection_size", _read, _write)},
    layers={"head": "head"},
)
