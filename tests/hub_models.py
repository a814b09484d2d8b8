"""Tiny models of keras-hub with random weights, and what they are called with."""

import keras
import numpy as np

from kmodels.models.blocks.config import GLOBAL, LOCAL
from kmodels.text.pieces import BYTE, CONTROL, NORMAL, TURNS, UNKNOWN, USER_DEFINED, Piece, build
from kmodels.text.training import train_tokenizer

SIZES = {"patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 16}
# 16 wide in the MLP too, so that a kernel is square.
VIT = {"image_shape": (32, 32, 3), "mlp_dim": 16, **SIZES}
NARROW = {"image_shape": (32, 32, 3), "intermediate_dim": 16, **SIZES}
GEMMA = {
    "vocabulary_size": 320,
    "num_query_heads": 4,
    "num_key_value_heads": 2,
    "hidden_dim": 24,
    "head_dim": 8,
}
GEMMA_2 = {
    "use_post_ffw_norm": True,
    "use_post_attention_norm": True,
    "attention_logit_soft_cap": 2.0,
    "final_logit_soft_cap": 1.5,
    "use_sliding_window_attention": True,
    "sliding_window_size": 6,
}

GEMMA_4 = {
    "num_layers": 5,
    "intermediate_dim": 48,
    "image_size": 16,
    "global_head_dim": 12,
    "final_logit_soft_cap": 1.5,
    "sliding_window_size": 6,
    "global_rope_partial_rotary_factor": 0.5,
    "layer_norm_epsilon": 1e-5,
    "layer_types": [LOCAL, LOCAL, GLOBAL, LOCAL, GLOBAL],
}


def _vit(models):
    return models.ViTBackbone(**VIT, use_mha_bias=False, layer_norm_epsilon=1e-5)


def _vit_classifier(models):
    return models.ViTImageClassifier(
        models.ViTBackbone(**VIT), 5, intermediate_dim=8, activation="softmax"
    )


def _vit_mean(models):
    return models.ViTImageClassifier(
        models.ViTBackbone(**VIT, use_class_token=False), 5, pooling="gap"
    )


def _deit(models):
    return models.DeiTImageClassifier(models.DeiTBackbone(**NARROW), 5)


def _dinov2(models):
    # Its positions belong to another size, so that those in use are made of them.
    shape = (48, 48, 3)
    return models.DINOV2Backbone(**NARROW, num_register_tokens=3, position_embedding_shape=shape)


def _dinov2_giant(models):
    sizes = {**NARROW, "intermediate_dim": 64}
    return models.DINOV2Backbone(**sizes, use_swiglu_ffn=True, position_embedding_shape=(32, 32, 3))


def _dinov3(models):
    return models.DINOV3Backbone(**NARROW, num_register_tokens=3, use_key_bias=False)


def _dinov3_gated(models):
    gated = {"use_gated_mlp": True, "hidden_activation": "silu", "rope_theta": 20.0}
    return models.DINOV3Backbone(**NARROW, **gated, num_register_tokens=0, use_mask_token=False)


def _siglip(models):
    return models.SigLIPVisionEncoder(**NARROW, name="tower")


def _gemma(models):
    return models.GemmaCausalLM(models.GemmaBackbone(**GEMMA, num_layers=2, intermediate_dim=48))


def _gemma_2(models):
    sizes = {**GEMMA, **GEMMA_2, "num_layers": 3, "intermediate_dim": 48}
    return models.GemmaCausalLM(models.GemmaBackbone(**sizes))


def _gemma_3(models):
    sizes = {**GEMMA, **GEMMA_2, "num_layers": 7, "intermediate_dim": 48, "image_size": 16}
    return models.Gemma3CausalLM(
        backbone=models.Gemma3Backbone(**sizes, global_rope_scaling_factor=8.0), preprocessor=None
    )


SEEN = {"image_size": 16, "patch_size": 4, "pool_size": 2, "num_layers": 2, "num_heads": 2}
PLACES = (2, 8)  # of the images in a text; each fills four tokens


def gemma_3_vision(models, dtype=None, encoder=None, **changes):
    """With its vision encoder; a window is as long as an image and shorter than a text."""
    sizes = {**GEMMA, **GEMMA_2, "num_layers": 7, "intermediate_dim": 48, "image_size": 16}
    sizes |= {"global_rope_scaling_factor": 8.0, "sliding_window_size": 4, **changes}
    tower = {**SEEN, "hidden_dim": 24, "intermediate_dim": 40, "output_dim": 24, **(encoder or {})}
    held = models.Gemma3VisionEncoder(**{"dtype": dtype, **tower})
    backbone = models.Gemma3Backbone(**sizes, vision_encoder=held, dtype=dtype)
    return models.Gemma3CausalLM(backbone=backbone, preprocessor=None)


def with_images(count, seed=1):
    """Texts with images, as both sides take them.

    Without any there is one that no token shows: keras-hub's convolution needs it on TensorFlow.
    """
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 319, (2, 15)).astype("int32")
    places = [start + i for start in PLACES[:count] for i in range(4)]
    ids[:, places] = 319
    shown = max(count, 1)
    indices = np.array(places or [0] * 4, "int32")
    return {
        "token_ids": ids,
        "padding_mask": np.ones_like(ids),
        "images": rng.normal(size=(2, shown, 16, 16, 3)).astype("float32"),
        "vision_mask": (ids == 319).astype("int32"),
        "vision_indices": np.tile(indices, (2, 1)),
    }


def _gemma_4(models):
    """With per-layer embeddings and shared keys and values, as the small sizes."""
    sizes = {**GEMMA, **GEMMA_4, "hidden_size_per_layer_input": 6, "num_kv_shared_layers": 2}
    sizes |= {"use_double_wide_mlp": True, "vocab_size_per_layer_input": 320}
    return models.Gemma4CausalLM(backbone=models.Gemma4Backbone(**sizes), preprocessor=None)


def _gemma_4_global(models):
    """With keys that are values in global layers, as the large size."""
    sizes = {**GEMMA, **GEMMA_4, "num_global_key_value_heads": 1, "global_rope_wavelength": 100.0}
    return models.Gemma4CausalLM(backbone=models.Gemma4Backbone(**sizes), preprocessor=None)


MAKERS = {
    "vit": _vit,
    "vit_classifier": _vit_classifier,
    "vit_mean": _vit_mean,
    "deit": _deit,
    "dinov2": _dinov2,
    "dinov2_giant": _dinov2_giant,
    "dinov3": _dinov3,
    "dinov3_gated": _dinov3_gated,
    "siglip": _siglip,
    "gemma": _gemma,
    "gemma2": _gemma_2,
    "gemma3": _gemma_3,
    "gemma3_vision": gemma_3_vision,
    "gemma4": _gemma_4,
    "gemma4_global": _gemma_4_global,
}


def randomize(model, seed=0):
    """Values far from what is drawn at first: norms that scale, biases that shift."""
    rng = np.random.default_rng(seed)
    for variable in model.weights:
        if "float" in str(variable.dtype):
            variable.assign(rng.normal(size=tuple(variable.shape)) * 0.3)


def make(name, models):
    """A random model of keras-hub."""
    model = MAKERS[name](models)
    randomize(model)
    embedding = getattr(model, "embeddings", None)
    if hasattr(
        embedding, "interpolated_position_embeddings"
    ):  # DINOv2's positions in use, made of those it keeps
        embedding.interpolated_position_embeddings.assign(
            embedding._interpolate_position_embeddings(
                embedding.position_embeddings,
                embedding.patch_size,
                embedding.position_embedding_shape,
                embedding.image_shape,
            )
        )
    return model


def inputs(name):
    """What a model is called with, on either side."""
    rng = np.random.default_rng(1)
    if name.endswith("vision"):
        return with_images(2)
    if name.startswith("gemma"):
        mask = np.ones((2, 13), "int32")
        return {"token_ids": rng.integers(0, 320, (2, 13)), "padding_mask": mask}
    return rng.normal(size=(2, 32, 32, 3)).astype("float32")


def output(model, x):
    """Values on the host; keras-hub's towers take their images by name."""
    if isinstance(model.input, dict) and not isinstance(x, dict):
        x = {next(iter(model.input)): x}
    if isinstance(model.input, dict) and "position_ids" in model.input:
        x = {**x, "position_ids": np.cumsum(x["padding_mask"], 1) - 1}
    return keras.ops.convert_to_numpy(model(x, training=False))


def values(model):
    return {v.path: keras.ops.convert_to_numpy(v) for v in model.weights}


def tokenizer(texts, size=800):
    """One whose merges are all that its pieces allow, as SentencePiece's are and Gemma's."""
    learnt = train_tokenizer(texts, size).core
    vocabulary = sorted(learnt.get_vocab().items(), key=lambda entry: entry[1])
    kinds = {"<unk>": UNKNOWN, **dict.fromkeys(("<pad>", "<eos>", "<bos>"), CONTROL)}
    kinds |= dict.fromkeys(TURNS, USER_DEFINED) | {f"<0x{i:02X}>": BYTE for i in range(256)}
    pieces = [Piece(text, -float(i), kinds.get(text, NORMAL)) for text, i in vocabulary]
    core = build(pieces, special=TURNS)
    from kmodels.models import GemmaTokenizer

    return GemmaTokenizer(core)
