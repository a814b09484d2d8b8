"""Image classification with a ViT."""

from typing import Any

import keras

from kmodels import initializers
from kmodels.errors import InputError, check_whole
from kmodels.layers import Dense, Dropout, LayerNorm
from kmodels.models.vit.layers import Pooling
from kmodels.models.vit.model import ViTBackbone
from kmodels.models.vit.preprocessor import ViTImageClassifierPreprocessor
from kmodels.task import Task

POOLINGS = ("token", "gap", "map")


@keras.saving.register_keras_serializable(package="kmodels")
class ViTImageClassifier(Task):
    """A ViT with a head for images of one class each.

    Args:
        backbone: a `ViTBackbone`.
        num_classes: number of logits.
        preprocessor: turns raw pictures into what the backbone takes, or None.
        pooling: "token", "gap" (mean over the patches) or "map" (attention pooling).
        intermediate_dim: width of a tanh layer in front of the logits (the pre-logits of the
            original), or None for none.
        activation: on the logits, such as "softmax"; None leaves logits.
        dropout: rate in front of the head.
        pooled_norm: a norm after pooling, for backbones without a final one (timm's `fc_norm`).
        head_dtype: policy of the head; by default the dtype of the backbone's variables, so that
            under "mixed_bfloat16" it computes in float32. There a logit of 0.1 would otherwise be
            off by 2e-4, and the head is a ten-thousandth of the work.

    Call:
        images (B, height, width, C), preprocessed floats -> logits (B, num_classes), float32.

    Raises:
        InputError: for an unknown pooling, or "token" without a class token.
    """

    backbone_class = ViTBackbone
    preprocessor_class = ViTImageClassifierPreprocessor

    def __init__(
        self,
        backbone: ViTBackbone,
        num_classes: int,
        preprocessor: ViTImageClassifierPreprocessor | None = None,
        pooling: str = "token",
        intermediate_dim: int | None = None,
        activation: Any = None,
        dropout: float = 0.0,
        pooled_norm: bool = False,
        head_dtype: Any = None,
        name: str = "vit_image_classifier",
        **kwargs: Any,
    ):
        if pooling not in POOLINGS:
            raise InputError(f"pooling is {pooling!r}; choose one of {', '.join(POOLINGS)}")
        if pooling == "token" and not backbone.config.use_class_token:
            raise InputError('pooling is "token" but the backbone has no class token; give "gap"')
        check_whole("num_classes", num_classes)
        policy = keras.dtype_policies.get(head_dtype or backbone.variable_dtype)
        # Attention over all tokens is the one pooling whose cost is that of a block.
        pool_policy = backbone.dtype_policy if pooling == "map" else policy

        # === Layers ===
        pool = Pooling(pooling, backbone.config, name="pooling", dtype=pool_policy)
        epsilon = backbone.config.layer_norm_epsilon
        norm = LayerNorm(epsilon, name="pooled_norm", dtype=policy) if pooled_norm else None
        pre_logits = None
        if intermediate_dim is not None:
            pre_logits = Dense(intermediate_dim, name="pre_logits", dtype=policy)
        drop = Dropout(dropout, name="head_dropout", dtype=policy)
        head = Dense(
            num_classes,
            kernel_initializer=initializers.truncated_normal(0.02),
            name="logits",
            dtype=policy,
        )

        # === Graph ===
        inputs = backbone.input
        # Of a model that reads the class token alone, the last block need not make the others.
        x = pool(backbone(inputs, keep=1) if pooling == "token" else backbone(inputs))
        if norm is not None:
            x = norm(x)
        if pre_logits is not None:
            x = keras.ops.tanh(pre_logits(x))
        # The loss needs float32, whatever the head's own policy.
        x = keras.ops.cast(head(drop(x)), "float32")
        outputs = keras.activations.get(activation)(x)
        super().__init__(
            backbone=backbone,
            preprocessor=preprocessor,
            inputs=inputs,
            outputs=outputs,
            name=name,
            **kwargs,
        )

        # === Config ===
        self.num_classes = num_classes
        self.pooling = pooling
        self.settings = {
            "num_classes": num_classes,
            "pooling": pooling,
            "intermediate_dim": intermediate_dim,
            "activation": keras.activations.serialize(keras.activations.get(activation)),
            "dropout": dropout,
            "pooled_norm": pooled_norm,
        }
        self.head_dtype = policy
