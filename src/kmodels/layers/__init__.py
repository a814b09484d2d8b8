"""Layers: variables and `kmodels.ops`, nothing of any one family."""

from kmodels.layers.attention import Attention
from kmodels.layers.base import Layer
from kmodels.layers.dense import Dense, GroupedDense
from kmodels.layers.dropout import Dropout, DropPath
from kmodels.layers.embedding import Embedding, PositionEmbedding
from kmodels.layers.experts import Experts, Router
from kmodels.layers.mlp import MLP, GatedMLP, SwiGLU
from kmodels.layers.norm import LayerNorm, LayerScale, RMSNorm
from kmodels.layers.remat import rematerialize

__all__ = [
    "MLP",
    "Attention",
    "Dense",
    "DropPath",
    "Dropout",
    "Embedding",
    "Experts",
    "GatedMLP",
    "GroupedDense",
    "Layer",
    "LayerNorm",
    "LayerScale",
    "PositionEmbedding",
    "RMSNorm",
    "Router",
    "SwiGLU",
    "rematerialize",
]
