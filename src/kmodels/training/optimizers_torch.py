"""The torch bodies of AdamW and SGD: few kernels over all variables instead of several for each."""

import math
from collections.abc import Sequence
from typing import Any

import keras
import torch

from kmodels.core import internals_torch, keras_internals, runtime_torch
from kmodels.core.types import Tensor

# Keras answers the constructor on torch with a class of its own that has the parallel step; a
# subclass of the public name would lose it.
_KerasAdamW: Any = type(keras.optimizers.AdamW())
_KerasSGD: Any = type(keras.optimizers.SGD())


class _Groups(keras_internals.OwnSteps):
    """Keras' parallel step with decay and learning rate by variable."""

    def apply(self: Any, grads: list[Any], trainable_variables: Any = None) -> Any:
        """Keras' `apply`; with gradient accumulation the host counts the batches too."""
        if not _counts(self) or not grads:
            return super().apply(grads, trainable_variables)  # type: ignore[misc]
        batches = keras_internals.batches_seen(self)
        count = runtime_torch.count(batches)
        result = super().apply(grads, trainable_variables)  # type: ignore[misc]
        runtime_torch.note(_value(batches), (count + 1,))
        return result

    def apply_all(self: Any, grads: list[Any], variables: Sequence[keras.Variable]) -> None:
        """Keras' step, with gradients that lie as the weights do."""
        grads = [_like(gradient, v) for gradient, v in zip(grads, variables, strict=True)]
        if not _counts(self):
            super().apply_all(grads, variables)
            return
        count = runtime_torch.count(keras_internals.batches_seen(self)) + 1
        self.accumulate_all(grads, variables, count % self.gradient_accumulation_steps == 0)

    @torch.no_grad()
    def clip_all(self: Any, grads: list[Any]) -> Any:
        """Keras' clipping, with one message to the other ranks for all gradients in parts."""
        if not self.global_clipnorm or not all(map(_is_part, grads)):
            return super().clip_all(grads)
        # This does what Keras does, but with one message to the other ranks instead of one for each
        # variable.
        norm, most = _norm(grads), self.global_clipnorm
        scale = most * torch.minimum(1.0 / norm, 1.0 / torch.full_like(norm, most)) + (norm - norm)
        return [gradient * scale for gradient in grads]

    @torch.no_grad()
    def move_all(
        self: Any, grads: list[Any], variables: Sequence[keras.Variable], learning_rate: Tensor
    ) -> None:
        """Keras' step for each group of variables of one learning rate and dtype."""
        # They are grouped by dtype too, since kernels over many tensors take one.
        groups: dict[tuple[float, Any], tuple[list[Any], list[Any], list[Any]]] = {}
        for gradient, variable in zip(grads, variables, strict=True):
            index, value = keras_internals.variable_index(self, variable), _value(variable)
            group = groups.setdefault((self._multipliers[index], value.dtype), ([], [], []))
            group[0].append(gradient)
            group[1].append(variable)
            if self.weight_decay and self._decays[index]:
                group[2].append(_own(value))
        for (multiplier, _), (gradients, members, decayed) in groups.items():
            rate = learning_rate * multiplier
            if decayed:
                internals_torch.multiply_all_(decayed, 1 - self.weight_decay * rate)
            super().move_all(gradients, members, rate)

    @torch.no_grad()
    def average_all(self: Any, variables: Sequence[keras.Variable]) -> None:
        """Keras' averages in few kernels."""
        if not self.use_ema:
            return
        values = [_own(_value(v)) for v in variables]
        averages = [_own(_value(average)) for _, average in keras_internals.moving_averages(self)]
        # The first update starts the average at the weights, as Keras' own does.
        momentum = (self.iterations != 0) * self.ema_momentum
        internals_torch.multiply_all_(averages, momentum)
        internals_torch.add_all_(averages, internals_torch.multiply_all(values, 1 - momentum))


class _Fused(keras_internals.OwnSteps, _KerasAdamW):
    """Keras' AdamW; a variable, its gradient and its two slots are read and written once."""

    def move_all(
        self: Any, grads: list[Any], variables: Sequence[keras.Variable], learning_rate: Tensor
    ) -> None:
        """Runs torch's fused kernel if it supports the tensors, else Keras' step."""
        weights = [_own(_value(variable)) for variable in variables]
        slots = [keras_internals.adam_slots(self, variable) for variable in variables]
        first, second, highest = (
            [_own(_value(slot)) for slot in kind if slot is not None]
            for kind in zip(*slots, strict=True)
        )
        own = [_own(g).to(w.dtype).contiguous() for g, w in zip(grads, weights, strict=True)]
        if not _fusible([*weights, *first, *second, *highest, *own]):
            super().move_all(grads, variables, learning_rate)
            return
        rate: Any = learning_rate
        step = (self.iterations + 1).to(torch.float32)
        if not self.corrected_epsilon:
            # torch corrects the root by the count of steps before it adds epsilon, Keras after.
            # torch corrects nothing at an infinite count; the correction is in the rate.
            rate = rate * (1 - self.beta_2**step).sqrt() / (1 - self.beta_1**step)
            step = torch.full_like(step, math.inf)
        internals_torch.fused_adamw_(
            weights, own, first, second, highest, [step] * len(weights),
            learning_rate=rate.to(torch.float32), beta_1=self.beta_1, beta_2=self.beta_2,
            epsilon=self.plain_epsilon, amsgrad=self.amsgrad,
        )  # fmt: skip


class _Descent(keras_internals.OwnSteps, _KerasSGD):
    """Keras' SGD; on CUDA the learning rate, which Keras reads in each step, stays there."""

    def move_all(
        self: Any, grads: list[Any], variables: Sequence[keras.Variable], learning_rate: Tensor
    ) -> None:
        """Keras' step in few kernels, without a read."""
        if not runtime_torch.on_cuda():
            super().move_all(grads, variables, learning_rate)
            return
        weights = [_own(_value(variable)) for variable in variables]
        moves = internals_torch.multiply_all([_own(g) for g in grads], -learning_rate)
        if self.momentum:
            indices = [keras_internals.variable_index(self, variable) for variable in variables]
            slots = [_own(_value(self.momentums[index])) for index in indices]
            internals_torch.multiply_all_(slots, self.momentum)
            internals_torch.add_all_(slots, moves)
            if self.nesterov:
                internals_torch.add_all_(weights, moves)
                slots = internals_torch.multiply_all(slots, self.momentum)
            moves = slots
        internals_torch.add_all_(weights, moves)


def _counts(optimizer: Any) -> bool:
    """Returns True if the host decides which batch is the last of an update."""
    return bool(optimizer.gradient_accumulation_steps) and not torch.compiler.is_compiling()


def _value(variable: keras.Variable) -> Any:
    return keras_internals.value_of(variable, cast=False)


def _own(tensor: Any) -> Any:
    """Returns this rank's part of a sharded tensor: steps are elementwise."""
    return tensor.to_local() if hasattr(tensor, "placements") else tensor


def _like(gradient: Any, variable: keras.Variable) -> Any:
    """Returns a gradient that lies as its weight does; Keras' split layers may leave a sum open."""
    if not hasattr(gradient, "placements"):
        return gradient
    weight = _value(variable)
    if not hasattr(weight, "placements"):
        return gradient.full_tensor()
    if gradient.placements == weight.placements:
        return gradient
    return gradient.redistribute(weight.device_mesh, weight.placements)


def _is_part(tensor: object) -> bool:
    """Returns True if each rank has another part; along a `model` axis ranks may have copies."""
    mesh = getattr(tensor, "device_mesh", None)
    return mesh is not None and "model" not in (mesh.mesh_dim_names or ())


def _norm(parts: list[Any]) -> torch.Tensor:
    """Returns the norm of all elements of tensors in parts, which are cut over the same ranks."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh, placements = parts[0].device_mesh, parts[0].placements
    norms = internals_torch.norms_of_all([_own(part) for part in parts])
    square = torch.stack(norms).square().sum()
    sums = [Partial() if placement.is_shard() else Replicate() for placement in placements]
    return DTensor.from_local(square, mesh, sums, run_check=False).full_tensor().sqrt()


def _fusible(tensors: list[Any]) -> bool:
    """Returns True if torch's fused kernel, which ignores strides, supports these tensors."""
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
    """AdamW by torch's fused kernel, or by Keras' step if torch does not support the dtypes."""


class SGD(_Groups, _Descent):
    """SGD with Keras' step, or one that leaves the learning rate on the device."""
