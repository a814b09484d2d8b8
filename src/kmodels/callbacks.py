"""Callbacks for `fit` of any Keras model."""

from kmodels.checkpoint.callback import Checkpoint

__all__ = ["Checkpoint"]
