"""Continuing texts token by token, for any model with `extend` and an embedding table."""

from kmodels.generation.generate import continue_prompts
from kmodels.generation.sampler import Sampler

__all__ = ["Sampler", "continue_prompts"]
