"""Runs on a Ray cluster: `run` starts one there, `directory` is where it keeps what it saves."""

from kmodels.distribution.ray.inside import directory
from kmodels.distribution.ray.start import run

__all__ = ["directory", "run"]
