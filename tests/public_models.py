"""The smallest model of every public class, and what it is called on."""

from typing import Any

import numpy as np
import pytest

from kmodels import models

GEMMA = {
    "vocabulary_size": 31, "num_layers": 1, "num_query_heads": 2, "num_key_value_heads": 1,
    "hidden_dim": 8, "intermediate_dim": 24, "head_dim": 4,
}  # fmt: skip
QWEN3 = {**GEMMA, "tie_word_embeddings": False}
CLIP = {
    "vocabulary_size": 31, "embedding_dim": 8, "hidden_dim": 8, "num_layers": 1, "num_heads": 2,
    "intermediate_dim": 12, "max_sequence_length": 6, "end_token_id": 4,
}  # fmt: skip
VIT = {
    "image_shape": (8, 8, 3), "patch_size": 4, "num_layers": 1, "num_heads": 2, "hidden_dim": 8,
    "mlp_dim": 12,
}  # fmt: skip
SEEING = {
    **GEMMA, "image_token_id": 31, "vision_encoder": {
        "image_size": 8, "patch_size": 2, "pool_size": 2, "num_layers": 1, "num_heads": 2,
        "hidden_dim": 8, "intermediate_dim": 12,
    },
}  # fmt: skip
PATCHES = {
    **GEMMA, "image_token_id": 30, "vision_encoder": {
        "patch_size": 2, "pool_size": 2, "num_layers": 1, "num_heads": 2, "head_dim": 4,
        "hidden_dim": 8, "intermediate_dim": 12, "position_embedding_size": 8,
        "use_clipped_linears": False,  # bounds that are drawn leave nothing to learn
    },
}  # fmt: skip
IMAGES = np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype("float32")
TWO = {
    "vision_encoder": {
        **VIT, "use_patch_bias": False, "pre_norm": True, "approximate_gelu": "sigmoid",
    },
    "text_encoder": CLIP,
    "projection_dim": 6,
}  # fmt: skip
SIGLIP_TEXT = {name: x for name, x in CLIP.items() if name != "end_token_id"}
SIGLIP = {
    "vision_encoder": {**VIT, "use_class_token": False, "approximate_gelu": True},
    "text_encoder": SIGLIP_TEXT,
}
IDS = {"token_ids": np.arange(10).reshape(2, 5) % 31, "padding_mask": np.ones((2, 5), "int32")}
PAIRS = {**IDS, "images": IMAGES}
# Each row shows an image, whose four tokens stand behind the first.
SEEN = {
    "token_ids": np.array([[2, 31, 31, 31, 31, 7, 9], [2, 31, 31, 31, 31, 5, 3]]),
    "padding_mask": np.ones((2, 7), "int32"),
    "images": np.random.default_rng(1).normal(size=(2, 1, 8, 8, 3)).astype("float32"),
    "vision_mask": np.array([[0, 1, 1, 1, 1, 0, 0]] * 2),
}
# The same as four patches for each piece, in two rows.
PATCHED = {
    **{name: SEEN[name] for name in ("padding_mask", "vision_mask")},
    "token_ids": np.where(SEEN["vision_mask"], 30, SEEN["token_ids"]),
    "pixel_values": np.random.default_rng(1).random((2, 1, 16, 12)).astype("float32"),
    "pixel_position_ids": np.stack([np.arange(16) % 8, np.arange(16) // 8], -1)[None, None]
    + np.zeros((2, 1, 1, 1), "int32"),
}
NAFLEX_PATCHES = {
    "pixel_values": np.random.default_rng(2).normal(size=(2, 7, 48)).astype("float32"),
    "spatial_shapes": np.array([[[2, 2], [1, 2]], [[1, 7], [0, 0]]], "int32"),
    "pixel_attention_mask": np.ones((2, 7), "int32"),
}
NAFLEX = {**VIT, "use_class_token": False}
EMBEDDING = {
    **GEMMA, "use_sliding_window_attention": True, "sliding_window_size": 3,
    "use_bidirectional_attention": True,
}  # fmt: skip
MODULES = [{"units": 5, "activation": "tanh"}, {"units": 3, "use_bias": False}]
MAE_DECODER = {
    "decoder_hidden_size": 8, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2,
    "decoder_intermediate_size": 12, "fixed_positions": False,
}  # fmt: skip
QUERIES = {"num_queries": 4, "num_blocks": 1, "num_upscale_blocks": 1, "train_num_points": 16}


def backbone(cls: type, sizes: dict[str, Any], x: Any) -> tuple[Any, Any]:
    """A function that makes a backbone, and what it is called on."""
    return lambda **more: cls(**sizes, **more), x


def task(cls: type, made: type, sizes: dict[str, Any], x: Any, **settings: Any) -> tuple[Any, Any]:
    """A function that makes a task over a backbone of a class, and what it is called on."""
    return lambda dtype=None, **more: cls(made(**sizes, dtype=dtype), **settings, **more), x


BACKBONES = [
    (models.NaFlexViTBackbone, NAFLEX, NAFLEX_PATCHES),
    (models.SigLIPNaFlexVisionEncoder, NAFLEX, NAFLEX_PATCHES),
    (models.ViTBackbone, VIT, IMAGES),
    (models.DeiTBackbone, VIT, IMAGES),
    (models.DINOV2Backbone, VIT, IMAGES),
    (models.DINOV3Backbone, VIT, IMAGES),
    (models.SigLIPVisionEncoder, VIT, IMAGES),
    (models.CLIPVisionEncoder, VIT, IMAGES),
    (models.GemmaBackbone, GEMMA, IDS),
    (models.Gemma3Backbone, {**GEMMA, "sliding_window_size": 3}, IDS),
    (models.Gemma4Backbone, {**GEMMA, "sliding_window_size": 3}, IDS),
    (models.Gemma3ImageTextBackbone, SEEING, SEEN),
    (models.Gemma4ImageTextBackbone, PATCHES, PATCHED),
    (models.CLIPTextEncoder, CLIP, IDS),
    (models.SigLIPTextEncoder, SIGLIP_TEXT, IDS),
    (models.CLIPBackbone, TWO, PAIRS),
    (models.SigLIPBackbone, SIGLIP, PAIRS),
    (models.Llama3Backbone, GEMMA, IDS),
    (models.Qwen3Backbone, GEMMA, IDS),
]
# Of a batch norm the numbers in training are others, and drawn variances may be negative.
SEGMENTED = {"num_classes": 3, "use_batch_norm": False}
TASKS = [
    (
        *(models.NaFlexViTImageClassifier, models.NaFlexViTBackbone, NAFLEX, NAFLEX_PATCHES),
        {"num_classes": 3, "pooling": "map"},
    ),
    (models.DeiTImageClassifier, models.DeiTBackbone, VIT, IMAGES, {"num_classes": 3}),
    (models.Gemma3ImageTextLM, models.Gemma3ImageTextBackbone, SEEING, SEEN, {}),
    (models.Gemma4ImageTextLM, models.Gemma4ImageTextBackbone, PATCHES, PATCHED, {}),
    (models.GemmaTextEmbedder, models.GemmaBackbone, EMBEDDING, IDS, {"dense": MODULES}),
    (models.Gemma3TextEmbedder, models.Gemma3Backbone, GEMMA, IDS, {"dense": MODULES}),
    (models.Qwen3TextEmbedder, models.Qwen3Backbone, GEMMA, IDS, {"dense": MODULES}),
    (models.CLIPTextModelWithProjection, models.CLIPTextEncoder, CLIP, IDS, {"projection_dim": 3}),
    (models.ImageTextSimilarity, models.CLIPBackbone, TWO, PAIRS, {}),
    (models.Llama3CausalLM, models.Llama3Backbone, GEMMA, IDS, {}),
    (models.Qwen3CausalLM, models.Qwen3Backbone, QWEN3, IDS, {}),
    (
        *(models.ViTImageClassifier, models.ViTBackbone, VIT, IMAGES),
        {"num_classes": 3, "activation": "softmax"},
    ),
    (models.ViTImageSegmenter, models.ViTBackbone, VIT, IMAGES, SEGMENTED),
    (models.EoMTImageSegmenter, models.ViTBackbone, VIT, IMAGES, {"num_classes": 3, **QUERIES}),
    (models.ViTMAEForPreTraining, models.ViTBackbone, VIT, IMAGES, MAE_DECODER),
    (models.GemmaCausalLM, models.GemmaBackbone, GEMMA, IDS, {}),
    (models.Gemma3CausalLM, models.Gemma3Backbone, GEMMA, IDS, {}),
    (models.Gemma4CausalLM, models.Gemma4Backbone, GEMMA, IDS, {}),
]
CASES = {cls: backbone(cls, *row) for cls, *row in BACKBONES}
CASES |= {cls: task(cls, *row, **settings) for cls, *row, settings in TASKS}
# What Keras makes of them runs on each backend; that of the others differs in shapes alone.
EACH_BACKEND = (models.ViTImageClassifier, models.GemmaCausalLM)


def case(cls: type, *more: object) -> Any:
    """The parameters of a test of a class."""
    marks = [pytest.mark.each_backend] * (cls in EACH_BACKEND)
    name = "-".join([cls.__name__, *map(str, more)])
    return pytest.param(*CASES[cls], *more, id=name, marks=marks)


cases = pytest.mark.parametrize(("make", "x"), [case(cls) for cls in CASES])
# What is true of a task is true of the backbone that it holds.
HELD = {made for _, made, *_ in TASKS}
outermost = pytest.mark.parametrize(("make", "x"), [case(cls) for cls in CASES if cls not in HELD])


def random(model: Any, seed: int = 1) -> Any:
    """The model with every weight drawn, so that none hides behind zeros."""
    rng = np.random.default_rng(seed)
    model.set_weights([rng.normal(0.2, 0.3, w.shape) for w in model.weights])
    return model
