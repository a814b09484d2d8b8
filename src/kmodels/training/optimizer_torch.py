"""The torch bodies of AdamW and SGD: few kernels over all variables instead of several for each."""

import math
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
        # By dtype too, since kernels over many tensors take one.
        groups: dict[tuple[float, str], tuple[list[Any], list[Any], list[Any]]] = {}
        for gradient, variable in zip(grads, variables, strict=True):
            index = self._get_variable_index(variable)
            group = groups.setdefault((self._multipliers[index], variable.dtype), ([], [], []))
            group[0].append(gradient)
            group[1].append(variable)
            if self._decays[index]:
                group[2].append(variable.value)
        for (multiplier, _), (gradients, members, decayed) in groups.items():
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


class _Fused(_KerasAdamW):
    """Keras' AdamW; a variable, its gradient and its two slots are read and written once."""

    def _parallel_update_step(self, grads: Any, variables: Any, learning_rate: Any) -> None:
        indices = [self._get_variable_index(variable) for variable in variables]
        weights = [variable.value for variable in variables]
        first = [self._momentums[index].value for index in indices]
        second = [self._velocities[index].value for index in indices]
        highest = [self._velocity_hats[index].value for index in indices] if self.amsgrad else []
        grads = [g.to(w.dtype).contiguous() for g, w in zip(grads, weights, strict=True)]
        if not _fusible([*weights, *first, *second, *highest, *grads]):
            super()._parallel_update_step(grads, variables, learning_rate)
            return
        step = (self.iterations + 1).to(torch.float32)
        rate = learning_rate * (1 - self.beta_2**step).sqrt() / (1 - self.beta_1**step)
        # torch corrects the root by the count of steps before it adds epsilon, Keras after. With
        # a count without end torch corrects nothing; the correction is in the rate.
        endless = torch.full_like(step, math.inf)
        torch._fused_adamw_(
            weights, grads, first, second, highest, [endless] * len(weights),
            lr=rate.to(torch.float32), beta1=self.beta_1, beta2=self.beta_2, weight_decay=0.0,
            eps=self.epsilon, amsgrad=self.amsgrad, maximize=False,
        )  # fmt: skip


def _fusible(tensors: list[Any]) -> bool:
    """Whether torch's fused kernel takes them; it goes through memory, whatever the strides."""
    dtype, device = tensors[0].dtype, tensors[0].device
    # A compiler makes few passes of Keras' own step.
    return (
        dtype in (torch.float32, torch.bfloat16)
        and not torch.compiler.is_compiling()
        and all(
            type(tensor) in (torch.Tensor, torch.nn.Parameter)
            and (tensor.dtype, tensor.device) == (dtype, device)
            and tensor.is_contiguous()
            for tensor in tensors
        )
    )


class AdamW(_Groups, _Fused):
    """Keras' AdamW with its own step where torch has none for the dtypes at hand."""


class SGD(_Groups, _KerasSGD):
    """Keras' SGD, which takes no memory beside the slots."""
