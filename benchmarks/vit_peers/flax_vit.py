"""A ViT in Flax linen, as its own examples are written."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import linen as nn
from jax import numpy as jnp

from vit_peers import loop_jax
from vit_peers.common import EPSILON, Pace, Settings, facts, places, weights


class Block(nn.Module):
    settings: Settings

    @nn.compact
    def __call__(self, x: Any) -> Any:
        s = self.settings

        def norm(name: str) -> nn.LayerNorm:
            return nn.LayerNorm(EPSILON, dtype=s.precision, name=name)

        y = norm("attention_norm")(x)
        y = nn.MultiHeadDotProductAttention(
            s.heads,
            dtype=s.precision,
            dropout_rate=s.dropout,
            broadcast_dropout=False,
            deterministic=False,
            name="attention",
        )(y, y)
        x = x + nn.Dropout(s.dropout, deterministic=False, name="output_dropout")(y)
        y = norm("mlp_norm")(x)
        y = nn.gelu(nn.Dense(s.mlp, dtype=s.precision, name="up")(y), approximate=False)
        y = nn.Dropout(s.dropout, deterministic=False, name="hidden_dropout")(y)
        y = nn.Dense(s.width, dtype=s.precision, name="down")(y)
        return x + nn.Dropout(s.dropout, deterministic=False, name="mlp_dropout")(y)


class ViT(nn.Module):
    settings: Settings

    @nn.compact
    def __call__(self, images: Any) -> Any:
        s, side = self.settings, (self.settings.patch,) * 2
        normal = nn.initializers.normal(0.02)
        x = nn.Conv(s.width, side, side, "VALID", dtype=s.precision, name="patch_embedding")(images)
        x = x.reshape(x.shape[0], -1, s.width)
        token = self.param("class_token", normal, (1, 1, s.width))
        token = jnp.broadcast_to(token.astype(x.dtype), (x.shape[0], 1, s.width))
        position = self.param("position_embedding", normal, (1, s.tokens, s.width))
        x = jnp.concatenate([token, x], axis=1) + position.astype(x.dtype)
        x = nn.Dropout(s.dropout, deterministic=False, name="token_dropout")(x)
        for i in range(s.depth):
            x = Block(s, name=f"block_{i}")(x)
        x = nn.LayerNorm(EPSILON, dtype=s.precision, name="final_norm")(x)
        return nn.Dense(s.classes, name="logits")(x[:, 0].astype("float32"))


def parameters(settings: Settings) -> dict[str, Any]:
    """Returns its tree of parameters from ours."""
    arrays, heads = weights(settings), (settings.heads, settings.width // settings.heads)

    def take(path: str, shape: tuple[int, ...] | None = None) -> Any:
        array = arrays[path]
        return jnp.asarray(array if shape is None else array.reshape(shape))

    def pair(path: str, first: str = "kernel") -> dict[str, Any]:
        return {first: take(f"{path}/{first}"), "bias": take(f"{path}/bias")}

    side, width = settings.patch, settings.width
    tree: dict[str, Any] = {
        "patch_embedding": {
            "kernel": take("patch_embedding/kernel", (side, side, 3, width)),
            "bias": take("patch_embedding/bias"),
        },
        "class_token": take("tokens/class_token"),
        "position_embedding": take("tokens/position_embedding"),
        "final_norm": pair("final_norm", "scale"),
        "logits": pair("logits"),
    }
    for i in range(settings.depth):
        path = f"block_{i}"
        attention = {
            part: {
                "kernel": take(f"{path}/attention/{part}/kernel", (width, *heads)),
                "bias": take(f"{path}/attention/{part}/bias", heads),
            }
            for part in ("query", "key", "value")
        }
        attention["out"] = {
            "kernel": take(f"{path}/attention/output/kernel", (*heads, width)),
            "bias": take(f"{path}/attention/output/bias"),
        }
        tree[path] = {
            "attention_norm": pair(f"{path}/attention_norm", "scale"),
            "attention": attention,
            "mlp_norm": pair(f"{path}/mlp_norm", "scale"),
            "up": pair(f"{path}/mlp/up"),
            "down": pair(f"{path}/mlp/down"),
        }
    return tree


def dropout_rates(model: ViT, tree: Any, settings: Settings) -> Mapping[str, float]:
    """Rate by the last name of the module, seen while one call is traced."""
    seen: dict[str, float] = {}

    def watch(call: Any, arguments: Any, keywords: Any, context: Any) -> Any:
        module = context.module
        rate = getattr(module, "rate", getattr(module, "dropout_rate", None))
        if context.method_name == "__call__" and rate is not None:
            seen[str(module.name)] = float(rate)
        return call(*arguments, **keywords)

    images = jax.ShapeDtypeStruct((1, settings.image, settings.image, 3), "float32")
    with nn.intercept_methods(watch):
        jax.eval_shape(
            lambda x: model.apply({"params": tree}, x, rngs={"dropout": jax.random.key(0)}), images
        )
    return seen


def train(settings: Settings, pace: Pace) -> None:
    model, tree = ViT(settings), parameters(settings)
    leaves = jax.tree.leaves(tree)
    rates = dropout_rates(model, tree, settings)
    names = ("token_dropout", "attention", "output_dropout", "hidden_dropout", "mlp_dropout")
    found = facts(
        settings,
        parameters=sum(leaf.size for leaf in leaves),
        variables=" ".join(sorted({str(leaf.dtype) for leaf in leaves})),
        compute=settings.precision,
        heads=settings.heads,
        dropout=places(*(rates[name] for name in names)),
    )

    def forward(tree: Any, key: Any, images: Any) -> tuple[Any, Any]:
        key, use = jax.random.split(key)
        return model.apply({"params": tree}, images, rngs={"dropout": use}), key

    loop_jax.train(forward, tree, jax.random.key(0), settings, pace, found)
