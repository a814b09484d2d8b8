"""A ViT in plain TensorFlow: variables, `tf.nn`, one product for query, key and value."""

from typing import Any

import numpy as np
import tensorflow as tf

from vit_peers import loop_tensorflow
from vit_peers.common import EPSILON, Pace, Settings, facts, places, weights


class ViT:
    def __init__(self, settings: Settings):
        self.settings = settings
        self.dtype = settings.precision
        self.rates: dict[str, float] = {}
        self.values: dict[str, Any] = {}
        arrays, width, side = weights(settings), settings.width, settings.patch
        for name in arrays:
            if "/query/" in name:
                # Shape (D, 3 D) and (3 D,).
                parts = [arrays[name.replace("query", part)] for part in ("query", "key", "value")]
                self.values[name.replace("query", "qkv")] = tf.Variable(tf.concat(parts, -1))
            elif name == "patch_embedding/kernel":
                self.values[name] = tf.Variable(arrays[name].reshape(side, side, 3, width))
            elif "/key/" not in name and "/value/" not in name:
                self.values[name] = tf.Variable(arrays[name])

    def _dense(self, x: Any, path: str) -> Any:
        kernel = tf.cast(self.values[f"{path}/kernel"], x.dtype)
        shape = tf.shape(x)
        flat = tf.reshape(x, (-1, x.shape[-1]))
        y = tf.nn.bias_add(tf.matmul(flat, kernel), tf.cast(self.values[f"{path}/bias"], x.dtype))
        return tf.reshape(y, tf.concat([shape[:-1], [kernel.shape[1]]], 0))

    def _norm(self, x: Any, path: str) -> Any:
        y = tf.cast(x, "float32")
        mean, variance = tf.nn.moments(y, -1, keepdims=True)
        scale, bias = self.values[f"{path}/scale"], self.values[f"{path}/bias"]
        return tf.cast(tf.nn.batch_normalization(y, mean, variance, bias, scale, EPSILON), x.dtype)

    def _dropout(self, x: Any, place: str) -> Any:
        self.rates[place] = rate = self.settings.dropout
        return tf.nn.dropout(x, rate) if rate else x

    def _attention(self, x: Any, path: str) -> Any:
        s = self.settings
        shape = (-1, s.tokens, 3, s.heads, s.width // s.heads)
        qkv = tf.transpose(tf.reshape(self._dense(x, f"{path}/qkv"), shape), (2, 0, 3, 1, 4))
        q, k, v = tf.unstack(qkv)
        scores = tf.matmul(q * (s.width // s.heads) ** -0.5, k, transpose_b=True)
        probabilities = tf.cast(tf.nn.softmax(tf.cast(scores, "float32")), x.dtype)
        y = tf.matmul(self._dropout(probabilities, "attention_weights"), v)
        y = tf.reshape(tf.transpose(y, (0, 2, 1, 3)), (-1, s.tokens, s.width))
        return self._dense(y, f"{path}/output")

    def __call__(self, images: Any) -> Any:
        s, side = self.settings, self.settings.patch
        kernel = tf.cast(self.values["patch_embedding/kernel"], self.dtype)
        x = tf.nn.conv2d(tf.cast(images, self.dtype), kernel, side, "VALID")
        x = tf.nn.bias_add(x, tf.cast(self.values["patch_embedding/bias"], self.dtype))
        x = tf.reshape(x, (-1, s.tokens - 1, s.width))
        token = tf.cast(self.values["tokens/class_token"], self.dtype)
        x = tf.concat([tf.repeat(token, tf.shape(x)[0], 0), x], 1)
        x = x + tf.cast(self.values["tokens/position_embedding"], self.dtype)
        x = self._dropout(x, "tokens")
        for i in range(s.depth):
            block = f"block_{i}"
            y = self._attention(self._norm(x, f"{block}/attention_norm"), f"{block}/attention")
            x = x + self._dropout(y, "attention_output")
            y = self._dense(self._norm(x, f"{block}/mlp_norm"), f"{block}/mlp/up")
            y = self._dropout(tf.nn.gelu(y), "mlp_hidden")
            x = x + self._dropout(self._dense(y, f"{block}/mlp/down"), "mlp_output")
        x = self._norm(x, "final_norm")
        return self._dense(tf.cast(x[:, 0], "float32"), "logits")


def train(settings: Settings, pace: Pace, xla: bool = False) -> None:
    model = ViT(settings)
    variables = list(model.values.values())
    # A symbolic call, to see the places of dropout.
    signature = tf.TensorSpec((settings.batch, settings.image, settings.image, 3))
    tf.function(model.__call__).get_concrete_function(signature)
    found = facts(
        settings,
        parameters=sum(int(np.prod(v.shape)) for v in variables),
        variables=" ".join(sorted({v.dtype.name for v in variables})),
        compute=settings.precision,
        heads=settings.heads,
        dropout=places(
            *(model.rates[place] for place in places(0, 0, 0, 0, 0)),
        ),
    )
    loop_tensorflow.train(model, variables, settings, pace, found, xla=xla)
