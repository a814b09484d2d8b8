"""Mixtures of experts."""

from kmodels.layers.experts.experts import Experts
from kmodels.layers.experts.grouped_dense import GroupedDense
from kmodels.layers.experts.router import Router

__all__ = ["Experts", "GroupedDense", "Router"]
