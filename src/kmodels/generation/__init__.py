"""Continuing texts token by token, for any model with `extend` and an embedding table."""

from kmodels.generation.drafts import DraftCounts
from kmodels.generation.generate import continue_prompts
from kmodels.generation.sampler import Sampler
from kmodels.generation.samplers import (
    BeamSampler,
    ContrastiveSampler,
    GreedySampler,
    RandomSampler,
    TopKSampler,
    TopPSampler,
    deserialize,
    get,
    serialize,
)

__all__ = [
    "BeamSampler",
    "ContrastiveSampler",
    "DraftCounts",
    "GreedySampler",
    "RandomSampler",
    "Sampler",
    "TopKSampler",
    "TopPSampler",
    "continue_prompts",
    "deserialize",
    "get",
    "serialize",
]
