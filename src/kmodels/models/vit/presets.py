"""The named sizes. A name gives an architecture; weights come from a file."""

from typing import Any

# width, blocks, heads, MLP: Touvron et al. 2021 table 1 (tiny, small), Dosovitskiy et al. 2021
# table 1 (base, large, huge).
SIZES: dict[str, tuple[int, int, int, int]] = {
    "tiny": (192, 12, 3, 768),
    "small": (384, 12, 6, 1536),
    "base": (768, 12, 12, 3072),
    "large": (1024, 24, 16, 4096),
    "huge": (1280, 32, 16, 5120),
}
PATCHES = (14, 16, 32)


def _size(size: str, patch: int) -> dict[str, Any]:
    width, layers, heads, mlp = SIZES[size]
    return {
        "image_shape": (224, 224, 3),
        "patch_size": patch,
        "num_layers": layers,
        "num_heads": heads,
        "hidden_dim": width,
        "mlp_dim": mlp,
    }


# Backbone fields; keys that start with "task_" are arguments of the classifier.
PRESETS: dict[str, dict[str, Any]] = {
    f"vit_{size}_patch{patch}_224": _size(size, patch) for size in SIZES for patch in PATCHES
} | {
    # The ViT of Keras' image-classification tutorial at ViT-Base sizes: no class token, mean
    # pooling, dropout 0.1 in the blocks and 0.5 in front of the head.
    "vit_keras_tutorial_base_patch16_224": _size("base", 16)
    | {
        "use_class_token": False,
        "dropout_rate": 0.1,
        "attention_dropout": 0.1,
        "task_pooling": "gap",
        "task_dropout": 0.5,
    },
    # Small enough to train on two cores: scikit-learn's digits, and Fashion-MNIST.
    "vit_micro_patch2_8": {
        "image_shape": (8, 8, 1),
        "patch_size": 2,
        "num_layers": 4,
        "num_heads": 4,
        "hidden_dim": 64,
        "mlp_dim": 128,
        "use_class_token": False,
        "task_pooling": "gap",
    },
    "vit_micro_patch7_28": {
        "image_shape": (28, 28, 1),
        "patch_size": 7,
        "num_layers": 6,
        "num_heads": 4,
        "hidden_dim": 128,
        "mlp_dim": 256,
        "use_class_token": False,
        "task_pooling": "gap",
    },
    "vit_debug": {
        "image_shape": (16, 16, 3),
        "patch_size": 8,
        "num_layers": 2,
        "num_heads": 2,
        "hidden_dim": 16,
        "mlp_dim": 32,
    },
}
