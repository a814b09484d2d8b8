"""Numerics of the models: one `keras.ops` body per op, and faster ones per backend.

How an op and its overrides are written is in the docstring of `kmodels.core.dispatch`.
"""

from kmodels.core.dispatch import load_overrides
from kmodels.ops.activations import gated_gelu, gated_silu, gelu
from kmodels.ops.attention import attention
from kmodels.ops.dense import dense
from kmodels.ops.dropout import dropout
from kmodels.ops.grouped_dense import grouped_dense
from kmodels.ops.linear_cross_entropy import linear_cross_entropy, linear_log_probs
from kmodels.ops.linear_divergence import linear_divergence
from kmodels.ops.mlp import mlp
from kmodels.ops.norms import layer_norm, rms_norm
from kmodels.ops.patch_embedding import patch_embedding
from kmodels.ops.quantized_dense import quantized_dense
from kmodels.ops.rotary_embedding import rotary_embedding, rotary_embedding_2d

load_overrides()

__all__ = [
    "attention",
    "dense",
    "dropout",
    "gated_gelu",
    "gated_silu",
    "gelu",
    "grouped_dense",
    "layer_norm",
    "linear_cross_entropy",
    "linear_divergence",
    "linear_log_probs",
    "mlp",
    "patch_embedding",
    "quantized_dense",
    "rms_norm",
    "rotary_embedding",
    "rotary_embedding_2d",
]
