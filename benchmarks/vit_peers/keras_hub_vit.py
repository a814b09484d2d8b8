"""keras-hub's ViT through `model.fit`."""

from typing import Any

import keras
import keras_hub

from vit_peers import loop_fit
from vit_peers.common import EPSILON, Pace, Settings, facts, places, weights

PARTS = {"query": "query", "key": "key", "value": "value", "output": "attention_output"}


def ours(settings: Settings) -> dict[str, str]:
    """Our path of each of its variables."""
    names = {
        "vit_patching_and_embedding/class_token": "tokens/class_token",
        "vit_patching_and_embedding/patch_embedding/kernel": "patch_embedding/kernel",
        "vit_patching_and_embedding/patch_embedding/bias": "patch_embedding/bias",
        "vit_patching_and_embedding/position_embedding/embeddings": "tokens/position_embedding",
        "vit_encoder/ln/gamma": "final_norm/scale",
        "vit_encoder/ln/beta": "final_norm/bias",
        "predictions/kernel": "logits/kernel",
        "predictions/bias": "logits/bias",
    }
    for i in range(settings.depth):
        block, mine = f"vit_encoder/transformer_block_{i + 1}", f"block_{i}"
        for its, norm in (("ln_1", "attention_norm"), ("ln_2", "mlp_norm")):
            names[f"{block}/{its}/gamma"] = f"{mine}/{norm}/scale"
            names[f"{block}/{its}/beta"] = f"{mine}/{norm}/bias"
        dense = {f"mha/{its}": f"attention/{part}" for part, its in PARTS.items()}
        dense |= {"mlp/dense_1": "mlp/up", "mlp/dense_2": "mlp/down"}
        for its, part in dense.items():
            for value in ("kernel", "bias"):
                names[f"{block}/{its}/{value}"] = f"{mine}/{part}/{value}"
    return names


def build(settings: Settings) -> Any:
    backbone = keras_hub.models.ViTBackbone(
        image_shape=(settings.image, settings.image, 3),
        patch_size=settings.patch,
        num_layers=settings.depth,
        num_heads=settings.heads,
        hidden_dim=settings.width,
        mlp_dim=settings.mlp,
        dropout_rate=settings.dropout,
        attention_dropout=settings.dropout,
        layer_norm_epsilon=EPSILON,
        dtype=settings.keras_policy,
    )
    model = keras_hub.models.ViTImageClassifier(
        backbone, settings.classes, preprocessor=None, head_dtype="float32"
    )
    arrays, names = weights(settings), ours(settings)
    for variable in model.weights:
        variable.assign(arrays[names[variable.path]].reshape(variable.shape))
    return model


def train(settings: Settings, pace: Pace) -> None:
    model = build(settings)
    encoder = model.backbone.get_layer("vit_encoder")
    block = encoder.encoder_layers[0]
    found = facts(
        settings,
        **loop_fit.counted(model),
        compute=block.compute_dtype,
        heads=block.mha.num_heads,
        dropout=places(
            encoder.dropout.rate,
            block.mha.dropout,
            block.dropout.rate,
            block.mlp.dropout.rate,
            block.mlp.dropout.rate,
        ),
    )
    # Its own fit maps a preprocessor over the data, which here has nothing to do.
    fit = keras.Model.fit.__get__(model)
    object.__setattr__(model, "fit", fit)
    loop_fit.train(model, loop_fit.keras_optimizer(settings), settings, pace, found)
