"""Hugging Face directories of CLIP: their text tower, alone, projected, or beside the images'."""

from kmodels.models.common.encoder.huggingface import END_TOKEN, TextTowerFormat

FORMAT = TextTowerFormat(
    kinds=("clip_text_model", "clip"),
    architectures=("CLIPTextModel", "CLIPTextModelWithProjection"),
    defaults={
        **{"vocab_size": 49_408, "hidden_size": 512, "intermediate_size": 2048},
        **{"num_hidden_layers": 12, "num_attention_heads": 8, "max_position_embeddings": 77},
        **{"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5, "attention_dropout": 0.0},
        **{"eos_token_id": 49_407, "projection_dim": 512},
    },
    others=("vision_model.", "visual_projection.", "logit_scale"),
    settings={"end_token_id": END_TOKEN},
)
