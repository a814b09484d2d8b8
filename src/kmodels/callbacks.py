"""Callbacks for `fit` of any Keras model."""

from kmodels.training.checkpointing import Checkpoint

__all__ = ["Checkpoint"]
