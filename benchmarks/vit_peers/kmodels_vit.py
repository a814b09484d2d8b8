"""kmodels, through `model.fit` or, to see what that costs, without it."""

from typing import Any

import keras

from kmodels import training
from kmodels.models import ViTBackbone, ViTImageClassifier
from vit_peers import loop_fit
from vit_peers.common import BETAS, EPSILON, WEIGHT_DECAY, Pace, Settings, facts, places, weights


def build(settings: Settings, policy: str) -> ViTImageClassifier:
    backbone = ViTBackbone(
        image_shape=(settings.image, settings.image, 3),
        patch_size=settings.patch,
        num_layers=settings.depth,
        num_heads=settings.heads,
        hidden_dim=settings.width,
        mlp_dim=settings.mlp,
        dropout_rate=settings.dropout,
        attention_dropout=settings.dropout,
        layer_norm_epsilon=EPSILON,
        dtype=policy,
    )
    model = ViTImageClassifier(backbone, settings.classes)
    arrays = weights(settings)
    for variable in model.weights:
        variable.assign(arrays[variable.path])
    return model


def train(
    settings: Settings,
    pace: Pace,
    fit: bool = True,
    narrow: bool = False,
    compiled: bool | str = "auto",
) -> None:
    model = build(settings, "bfloat16" if narrow else settings.keras_policy)
    block = model.backbone.blocks[0]
    found = facts(
        settings,
        **loop_fit.counted(model),
        compute=block.compute_dtype,
        heads=block.attention.num_heads,
        dropout=places(
            model.backbone.get_layer("token_dropout").rate,
            block.attention.dropout,
            block.dropout.rate,
            block.mlp.dropout.rate,
            block.dropout.rate,
        ),
    )
    if not fit:
        LOOPS[keras.backend.backend()](model, settings, pace, found)
        return
    if settings.optimizer == "adamw":
        optimizer: Any = training.AdamW(
            settings.learning_rate, WEIGHT_DECAY, BETAS[0], BETAS[1], 1e-8
        )
    else:
        optimizer = training.SGD(settings.learning_rate)
    loop_fit.train(model, optimizer, settings, pace, found, compiled)


def bare_torch(model: Any, settings: Settings, pace: Pace, found: dict) -> None:
    from vit_peers import loop_torch

    loop_torch.train(
        lambda images: model(images, training=True),
        [variable.value for variable in model.trainable_variables],
        settings,
        pace,
        found,
        autocast=False,
        channels_first=False,
    )


def bare_jax(model: Any, settings: Settings, pace: Pace, found: dict) -> None:
    from vit_peers import loop_jax

    loop_jax.train(
        lambda values, state, images: model.stateless_call(values, state, images, training=True),
        [variable.value for variable in model.trainable_variables],
        [variable.value for variable in model.non_trainable_variables],
        settings,
        pace,
        found,
    )


def bare_tensorflow(model: Any, settings: Settings, pace: Pace, found: dict) -> None:
    from vit_peers import loop_tensorflow

    loop_tensorflow.train(
        lambda images: model(images, training=True),
        [variable.value for variable in model.trainable_variables],
        settings,
        pace,
        found,
    )


LOOPS = {"torch": bare_torch, "jax": bare_jax, "tensorflow": bare_tensorflow}
