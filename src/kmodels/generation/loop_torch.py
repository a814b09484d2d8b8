"""Generation on torch: the cache is written in place, without autograd."""

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import torch

from kmodels.core import runtime_torch
from kmodels.core.types import Tensor
from kmodels.generation.cache import Passes


class Store:
    """Tensors that are changed in place."""

    def __init__(self, rings: dict[int, torch.Tensor]):
        self.rings = rings
        self._slot: Any = None
        self._index: Any = None

    def fill(self, ring: int, content: Any) -> None:
        """See `kmodels.generation.cache.Store`."""
        self.rings[ring] = content

    def write(self, ring: int, slot: Any, new: Any) -> Any:
        """See `kmodels.generation.cache.Store`."""
        if slot is not self._slot:  # that of all layers with so many slots
            self._slot, self._index = slot, slot.reshape(1).long()
        return self.rings[ring].index_copy_(1, self._index, new)

    def scatter(self, ring: int, slots: Any, new: Any) -> Any:
        """See `kmodels.generation.cache.Store`."""
        if slots is not self._slot:
            rows = torch.arange(slots.shape[0], device=slots.device)[:, None]
            self._slot, self._index = slots, (rows, slots.long())
        return self.rings[ring].index_put_(self._index, new)


def lay_out_by_output(backbone: keras.Model) -> None:
    """Turns the memory of half precision kernels (in, out) so that an output's numbers are one run.

    The kernels keep shape and values. One row by a kernel that lies the other way takes a CPU twice
    as long, for oneDNN turns all of it in each call.
    """
    for variable in backbone.variables:
        kernel = variable.value
        if kernel.ndim != 2 or kernel.dtype.itemsize != 2 or not kernel.is_contiguous():
            continue
        if variable is not backbone.token_embedding.output_table:
            kernel.data = kernel.T.contiguous().T


class Loop:
    """The steps of one batch shape.

    Attributes:
        compiled: whether `torch.compile` takes the token step: by "auto" on accelerators alone,
            for on a CPU it costs more than it saves, see `benchmarks/LOG.md`.
    """

    def __init__(self, passes: Passes, jit_compile: bool | str = "auto"):
        self.passes = passes
        self.device = passes.backbone.token_embedding.embeddings.value.device
        runtime_torch.send_without_waiting()
        if self.device.type == "cpu":
            lay_out_by_output(passes.backbone)
        self.compiled = self.device.type != "cpu" if jit_compile == "auto" else bool(jit_compile)
        self.following, self.several = self._following, self._several
        if self.compiled:
            self.following = torch.compile(self._following, dynamic=False)
            self.several = torch.compile(self._several, dynamic=False)
        self.rings: dict[int, torch.Tensor] = {}

    def _following(self, rings: dict[int, torch.Tensor], *inputs: Any) -> torch.Tensor:
        return self.passes.next_token(Store(rings), *inputs)

    def _several(self, rings: dict[int, torch.Tensor], *inputs: Any) -> torch.Tensor:
        return self.passes.next_tokens(Store(rings), *inputs)

    def start(
        self,
        token_ids: np.ndarray,
        lengths: np.ndarray,
        draws: np.ndarray,
        images: Mapping[str, np.ndarray] | None = None,
    ) -> Any:
        """Takes the prompts in; returns the first tokens."""
        with torch.no_grad():
            ids, self.lengths = self._put(token_ids), self._put(lengths)
            slots = self.passes.slots
            self.count = torch.arange(slots, dtype=torch.int32, device=self.device)
            seen = None if images is None else {n: self._put(x) for n, x in images.items()}
            store = Store(self.rings)
            return self.passes.first_token(store, ids, self.lengths, self._put(draws), seen)

    def step(self, index: int, tokens: Tensor, draws: np.ndarray) -> Any:
        """Takes in token `index` of each row; returns the next ones."""
        with torch.no_grad():
            step = self.count[index]
            return self.following(self.rings, tokens, step, self.lengths, self._put(draws))

    def extend(self, tokens: Tensor, starts: np.ndarray, draws: np.ndarray) -> Any:
        """Takes in some tokens of each row; returns the one behind each."""
        # Compiled code is made for strides, and parts of arrays have others.
        inputs = [self._put(array).contiguous() for array in (tokens, starts, draws)]
        with torch.no_grad():
            return self.several(self.rings, *inputs)

    def reorder(self, order: np.ndarray) -> None:
        """See `kmodels.generation.generate.Loop`."""
        rows = self._put(order).long()
        with torch.no_grad():
            self.rings = {
                ring: content.index_select(0, rows) for ring, content in self.rings.items()
            }

    def _put(self, array: np.ndarray | Tensor) -> torch.Tensor:
        return runtime_torch.put(array, self.device)

    def finish(self) -> None:
        """Frees the cache."""
        self.rings = {}
