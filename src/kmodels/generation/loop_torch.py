"""Generation on torch: the cache is written in place, without autograd."""

from typing import Any

import numpy as np
import torch

from kmodels.generation import steps
from kmodels.generation.sampler import Sampler


class Store:
    """Tensors that are changed in place."""

    def __init__(self, keys: list[torch.Tensor], values: list[torch.Tensor]):
        self.keys = keys
        self.values = values

    def write(self, layer: int, slot: Any, key: Any, value: Any) -> tuple[Any, Any]:
        """See `kmodels.generation.cache.Store`."""
        keys, values = self.keys[layer], self.values[layer]
        if isinstance(slot, int):
            keys[:, slot : slot + key.shape[1]] = key
            values[:, slot : slot + key.shape[1]] = value
        else:
            at = slot.reshape(1).long()
            keys.index_copy_(1, at, key)
            values.index_copy_(1, at, value)
        return keys, values


class Loop:
    """The steps of one batch shape; compiled by `torch.compile` on accelerators."""

    def __init__(self, backbone: Any, sampler: Sampler, batch: int, prompt: int, slots: int):
        self.backbone = backbone
        self.sampler = sampler
        self.prompt = prompt
        self.slots = slots
        table = backbone.token_embedding.embeddings.value
        self.device = table.device
        self.shape = (batch, slots, *backbone.cache_shape)
        self.dtype = getattr(torch, backbone.dtype_policy.compute_dtype)
        self.following = self._following
        if self.device.type == "cuda":
            self.following = torch.compile(self._following)
        self.store: Any = None

    def _following(
        self, history: Any, tokens: Any, step: Any, lengths: Any, draws: Any
    ) -> torch.Tensor:
        history.index_copy_(1, (step + self.prompt).reshape(1).long(), tokens[:, None])
        return steps.next_token(
            self.backbone,
            self.sampler,
            self.store,
            tokens,
            step,
            lengths,
            history,
            self.prompt,
            draws,
        )

    def start(self, token_ids: np.ndarray, lengths: np.ndarray, draws: np.ndarray) -> Any:
        """Takes the prompts in; returns the first tokens."""
        with torch.inference_mode():
            layers = range(len(self.backbone.blocks))
            keys, values = (
                [torch.zeros(self.shape, dtype=self.dtype, device=self.device) for _ in layers]
                for _ in range(2)
            )
            self.store = Store(keys, values)
            ids, self.lengths = self._put(token_ids), self._put(lengths)
            self.history = torch.nn.functional.pad(ids, (0, self.slots - self.prompt))
            self.count = torch.arange(self.slots, dtype=torch.int32, device=self.device)
            return steps.first_token(
                self.backbone,
                self.sampler,
                self.store,
                ids,
                self.lengths,
                self.history,
                self._put(draws),
            )

    def step(self, index: int, tokens: Any, draws: np.ndarray) -> Any:
        """Takes in token `index` of each row; returns the next ones."""
        with torch.inference_mode():
            step = self.count[index]
            return self.following(self.history, tokens, step, self.lengths, self._put(draws))

    def _put(self, array: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(array).to(self.device)

    def finish(self) -> None:
        """Frees the cache."""
        self.store = self.history = None
