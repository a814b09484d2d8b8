"""Numerics of the models: one `keras.ops` body each, a faster one per backend where it pays."""

from kmodels.dispatch import load_overrides
from kmodels.ops.attention import attention
from kmodels.ops.dense import dense
from kmodels.ops.dropout import dropout
from kmodels.ops.gelu import gelu
from kmodels.ops.layer_norm import layer_norm
from kmodels.ops.patch_embedding import patch_embedding

load_overrides()

__all__ = ["attention", "dense", "dropout", "gelu", "layer_norm", "patch_embedding"]
