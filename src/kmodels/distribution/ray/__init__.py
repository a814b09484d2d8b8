"""Runs on a Ray cluster: `run` starts one, `directory` returns the directory of its checkpoints."""

from kmodels.distribution.ray.inside import directory
from kmodels.distribution.ray.start import run

__all__ = ["directory", "run"]
