"""The torch bodies of AdamW and SGD: few kernels over all variables instead of several for each."""

from typing import Any

import keras
import torch

# On torch Keras answers the constructor with a class of its own that has the parallel step; a
# subclass of the public name would lose it.
_KerasAdamW: Any = type(keras.optimizers.AdamW())
_KerasSGD: Any = type(keras.optimizers.SGD())


class _Groups:
    """Keras' parallel step with decay and learning rate by variable."""

    @torch.no_grad()
    def _parallel_update_step(self: Any, grads: Any, variables: Any, learning_rate: Any) -> None:
        groups: dict[float, tuple[list[Any], list[Any], list[Any]]] = {}
        for gradient, variable in zip(grads, variables, strict=True):
            index = self._get_variable_index(variable)
            group = groups.setdefault(self._multipliers[index], ([], [], []))
            group[0].append(gradient)
            group[1].append(variable)
            if self._decays[index]:
                group[2].append(variable.value)
        for multiplier, (gradients, members, decayed) in groups.items():
            rate = learning_rate * multiplier
            if self.weight_decay and decayed:
                torch._foreach_mul_(decayed, 1 - self.weight_decay * rate)
            super()._parallel_update_step(gradients, members, rate)  # type: ignore[misc]

    @torch.no_grad()
    def _update_model_variables_moving_average(self: Any, trainable_variables: Any) -> None:
        if not self.use_ema:
            return
        values = [v.value for v in trainable_variables]
        averages = [v.value for v in self._model_variables_moving_average]
        # The first update starts the average at the weights, as Keras' own does.
        momentum = (self.iterations != 0) * self.ema_momentum
        torch._foreach_mul_(averages, momentum)
        torch._foreach_add_(averages, torch._foreach_mul(values, 1 - momentum))


class AdamW(_Groups, _KerasAdamW):
    """Keras' AdamW."""


class SGD(_Groups, _KerasSGD):
    """Keras' SGD, which takes no memory beside the slots."""
