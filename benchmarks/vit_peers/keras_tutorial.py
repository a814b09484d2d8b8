"""A ViT as the Keras tutorial on image classification builds it: Keras layers and nothing else.

Patches are extracted and projected by a dense layer, blocks are `MultiHeadAttention` and dense
layers with dropout after each. It differs from the tutorial where the systems would do unequal
work: a class token and a linear head in place of flattening all tokens into a wide MLP (which would
have seven times the parameters of the ViT), and dropout on tokens and attention output like the
others.
"""

from typing import Any

import keras
from keras import layers, ops

from vit_peers import loop_fit
from vit_peers.common import EPSILON, Pace, Settings, facts, places, weights


class Patches(layers.Layer):
    def __init__(self, size: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.size = size

    def call(self, images: Any) -> Any:
        patches = ops.image.extract_patches(images, self.size)
        shape = ops.shape(patches)
        return ops.reshape(patches, (shape[0], shape[1] * shape[2], shape[3]))


class PatchEncoder(layers.Layer):
    def __init__(self, tokens: int, width: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.tokens, self.width = tokens, width
        self.projection = layers.Dense(width, name="projection")
        self.position_embedding = layers.Embedding(tokens, width, name="position_embedding")

    def build(self, input_shape: Any) -> None:
        self.class_token = self.add_weight(name="class_token", shape=(1, 1, self.width))
        self.projection.build(input_shape)
        self.position_embedding.build((self.tokens,))

    def call(self, patches: Any) -> Any:
        projected = self.projection(patches)
        token = ops.cast(self.class_token, projected.dtype)
        token = ops.broadcast_to(token, (ops.shape(projected)[0], 1, self.width))
        positions = ops.expand_dims(ops.arange(self.tokens), 0)
        x = ops.concatenate([token, projected], axis=1)
        return x + self.position_embedding(positions)


def build(settings: Settings) -> keras.Model:
    rate, width = settings.dropout, settings.width
    inputs = keras.Input((settings.image, settings.image, 3))
    patches = Patches(settings.patch)(inputs)
    x = PatchEncoder(settings.tokens, width, name="tokens")(patches)
    x = layers.Dropout(rate, name="token_dropout")(x)
    for i in range(settings.depth):
        y = layers.LayerNormalization(epsilon=EPSILON, name=f"block_{i}_attention_norm")(x)
        y = layers.MultiHeadAttention(
            settings.heads, width // settings.heads, dropout=rate, name=f"block_{i}_attention"
        )(y, y)
        y = layers.Dropout(rate, name=f"block_{i}_output_dropout")(y)
        x = layers.Add()([x, y])
        y = layers.LayerNormalization(epsilon=EPSILON, name=f"block_{i}_mlp_norm")(x)
        y = layers.Dense(settings.mlp, activation=keras.activations.gelu, name=f"block_{i}_up")(y)
        y = layers.Dropout(rate, name=f"block_{i}_hidden_dropout")(y)
        y = layers.Dense(width, name=f"block_{i}_down")(y)
        y = layers.Dropout(rate, name=f"block_{i}_mlp_dropout")(y)
        x = layers.Add()([x, y])
    x = layers.LayerNormalization(epsilon=EPSILON, name="final_norm")(x)
    logits = layers.Dense(settings.classes, name="logits", dtype="float32")(x[:, 0])
    return keras.Model(inputs, logits)


def fill(model: keras.Model, settings: Settings) -> None:
    arrays = weights(settings)

    def assign(layer: Any, *paths: str) -> None:
        for variable, path in zip(layer.weights, paths, strict=True):
            variable.assign(arrays[path].reshape(variable.shape))

    def dense(name: str, path: str) -> None:
        assign(model.get_layer(name), f"{path}/kernel", f"{path}/bias")

    def norm(name: str, path: str) -> None:
        assign(model.get_layer(name), f"{path}/scale", f"{path}/bias")

    tokens = model.get_layer("tokens")
    tokens.class_token.assign(arrays["tokens/class_token"])
    assign(tokens.projection, "patch_embedding/kernel", "patch_embedding/bias")
    assign(tokens.position_embedding, "tokens/position_embedding")
    for i in range(settings.depth):
        norm(f"block_{i}_attention_norm", f"block_{i}/attention_norm")
        norm(f"block_{i}_mlp_norm", f"block_{i}/mlp_norm")
        paths = [f"block_{i}/attention/{part}" for part in ("query", "key", "value", "output")]
        assign(
            model.get_layer(f"block_{i}_attention"),
            *(f"{path}/{value}" for path in paths for value in ("kernel", "bias")),
        )
        dense(f"block_{i}_up", f"block_{i}/mlp/up")
        dense(f"block_{i}_down", f"block_{i}/mlp/down")
    norm("final_norm", "final_norm")
    dense("logits", "logits")


def train(settings: Settings, pace: Pace) -> None:
    keras.config.set_dtype_policy(settings.keras_policy)
    model = build(settings)
    fill(model, settings)
    attention = model.get_layer("block_0_attention")
    rates = [
        model.get_layer(name).rate
        for name in (
            "block_0_output_dropout",
            "block_0_hidden_dropout",
            "block_0_mlp_dropout",
        )
    ]
    found = facts(
        settings,
        **loop_fit.counted(model),
        compute=attention.compute_dtype,
        heads=attention.num_heads,
        dropout=places(model.get_layer("token_dropout").rate, attention.dropout, *rates),
    )
    loop_fit.train(model, loop_fit.keras_optimizer(settings), settings, pace, found)
