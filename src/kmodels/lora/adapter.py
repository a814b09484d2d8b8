"""The two small matrices beside the frozen kernel of a linear layer."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import keras
import numpy as np

from kmodels import ops
from kmodels.core import keras_internals
from kmodels.core.errors import InputError
from kmodels.core.types import Tensor
from kmodels.layers import Dense, GroupedDense, initializers, kernels
from kmodels.layers.shard_granularity import add_weight


@dataclass(frozen=True)
class LoraSettings:
    """The settings that all adapters of a model share.

    Args:
        rank: rank of the two matrices.
        alpha: the adapter counts alpha / rank times; None for `rank`, that is once.
        dropout: rate in front of the adapter, in training.
        targets: names or patterns of the layers, see `enable_lora`.
        rslora: alpha / sqrt(rank) instead (Kalajdzievski 2023).
        dora: learns each output's length of weights apart from direction (Liu et al. 2024).
        target_parameters: names or patterns of kernels of experts, see `enable_lora`.

    Raises:
        InputError: for values out of range.
    """

    rank: int
    alpha: float | None = None
    dropout: float = 0.0
    targets: str | Sequence[str] = ("query", "value")
    rslora: bool = False
    dora: bool = False
    target_parameters: str | Sequence[str] = ()

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            raise InputError(f"LoRA rank is {self.rank!r}; give a whole number from 1, such as 8")
        if self.alpha is not None and not 0 < self.alpha < math.inf:
            raise InputError(
                f"LoRA alpha is {self.alpha!r}; give a number above 0, or None for the rank"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise InputError(f"LoRA dropout is {self.dropout!r}; give a rate in [0, 1)")
        if not self.targets and not self.target_parameters:
            raise InputError('LoRA got no targets; name layers, such as ("query", "value")')
        if self.target_parameters and (self.dropout or self.dora):
            what = "dora" if self.dora else f"dropout {self.dropout}"
            raise InputError(f"LoRA has {what}, which adapters of experts lack; leave it out")

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as JSON has them."""
        targets = self.targets if isinstance(self.targets, str) else list(self.targets)
        found = {**asdict(self), "targets": targets}
        if not (parameters := found.pop("target_parameters")):
            return found
        names = parameters if isinstance(parameters, str) else list(parameters)
        return {**found, "target_parameters": names}

    @property
    def scaling(self) -> float:
        """The factor of the product of the two matrices."""
        alpha = self.rank if self.alpha is None else self.alpha
        return alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def kaiming_uniform(rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    """Draws uniformly in ±1 / sqrt(fan_in): PEFT's choice for the first matrix."""
    limit = 1.0 / math.sqrt(shape[-2])
    return (rng.random(tuple(shape), "float32") * 2 - 1) * np.float32(limit)


def matrices(layer: Dense | GroupedDense, rank: int) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Returns shape and granularity of lora_a and lora_b; those of experts are (E, in, out) too."""
    lead = (layer.groups,) if isinstance(layer, GroupedDense) else ()
    *outer, inward, outward = layer.shard_granularity
    return {
        "lora_a": ((*lead, layer.input_dim, rank), (*outer, inward, None)),
        "lora_b": ((*lead, rank, layer.units), (*outer, None, outward)),
    }


class Adapter:
    """x @ lora_a @ lora_b, scaled, beside the frozen layer; nothing of the kernel's size is made.

    The variables belong to the layer (block_0/attention/query/lora_a) and are float32 whatever the
    model's dtype: in bfloat16 small steps of the optimizer would be rounded away. `lora_b` starts
    at zero, so that an adapted layer starts as it was.

    Args:
        layer: a built `layers.Dense` or `layers.GroupedDense` without an adapter.
        settings: rank and so on.

    Weights:
        lora_a (in, rank), lora_b (rank, out), with DoRA lora_magnitude (out,). Those of experts
        have an axis of experts in front.

    Attributes:
        base_kernel: the kernel's values before merging, None while the adapter is not merged.
    """

    def __init__(self, layer: Any, settings: LoraSettings):
        self.layer = layer
        self.settings = settings
        self.base_kernel: np.ndarray | None = None
        self.seed: keras.random.SeedGenerator | None = None
        rank, path = settings.rank, layer.path
        sizes = matrices(layer, rank)
        draws = {"lora_a": kaiming_uniform, "lora_b": initializers.zeros}
        with keras_internals.changing(layer):
            made = {
                name: add_weight(
                    layer,
                    sizes[name][1],
                    shape=sizes[name][0],
                    initializer=initializers.Keyed(draw, f"{path}/{name}"),
                    dtype="float32",
                    name=name,
                )
                for name, draw in draws.items()
            }
            self.magnitude = None
            if settings.dora:
                self.magnitude = add_weight(
                    layer,
                    layer.shard_granularity[1:],
                    shape=(layer.units,),
                    initializer="zeros",
                    dtype="float32",
                    name="lora_magnitude",
                )
            if settings.dropout:
                stream = initializers.next_generator(f"{path}/lora_seed")
                self.seed = keras.random.SeedGenerator(
                    int(stream.integers(2**31)), name="lora_seed"
                )
                layer.lora_seed = self.seed
        self.a, self.b = made["lora_a"], made["lora_b"]
        if self.magnitude is not None:
            self.magnitude.assign(self.lengths())

    def start(self) -> None:
        """Makes the adapted layer give what it gives without the adapter."""
        self.b.assign(keras.ops.zeros(self.b.shape))
        if self.magnitude is not None:
            self.magnitude.assign(self.lengths())

    @property
    def variables(self) -> list[Any]:
        """lora_a, lora_b and, with DoRA, lora_magnitude."""
        return [self.a, self.b, *([] if self.magnitude is None else [self.magnitude])]

    def __call__(self, x: Tensor, training: bool) -> Any:
        """Returns what the layer gives for x, (..., in) -> (..., out)."""
        side = x
        if training and self.seed is not None:
            side = ops.dropout(x, self.settings.dropout, self.seed)
        side = ops.dense(side, keras.ops.cast(self.a, x.dtype)) * self.settings.scaling
        side = ops.dense(side, keras.ops.cast(self.b, x.dtype))
        bias = self.layer.bias
        if self.magnitude is None:
            return self.layer.linear(x, bias) + side
        # The lengths count as constants (Liu et al. 2024, section 4.3).
        lengths = keras.ops.stop_gradient(self.lengths())
        ratio = keras.ops.cast(keras.ops.cast(self.magnitude, "float32") / lengths, x.dtype)
        y = (self.layer.linear(x, None) + side) * ratio
        return y if bias is None else y + bias

    def grouped(self, x: Tensor, sizes: Tensor) -> Any:
        """Returns what a `GroupedDense` gives for x (N, in) and the rows of each group."""
        side = ops.grouped_dense(x, keras.ops.cast(self.a, x.dtype), sizes) * self.settings.scaling
        side = ops.grouped_dense(side, keras.ops.cast(self.b, x.dtype), sizes)
        return self.layer.linear(x, sizes) + side

    def lengths(self) -> Any:
        """Returns the length of each output's weights with the adapter, (out,) float32."""
        a, b = (keras.ops.cast(v, "float32") for v in (self.a, self.b))
        kernel = self.layer.wide_kernel() + keras.ops.matmul(a, b) * self.settings.scaling
        return keras.ops.sqrt(keras.ops.sum(keras.ops.square(kernel), axis=0))

    def merge(self) -> None:
        """Adds the product to the kernel, rounded once, and leaves the layer."""
        layer = self.layer
        kernel = keras.ops.convert_to_numpy(layer.kernel.value)
        a, b, *magnitude = (keras.ops.convert_to_numpy(v.value) for v in self.variables)
        self.base_kernel = np.array(kernel)
        layer.kernel.assign(kernels.merged(kernel, a, b, self.settings.scaling, *magnitude))
        keras_internals.detach(layer, self.variables)
        layer.adapter, layer.merged = None, self

    def unmerge(self) -> None:
        """Puts back the kernel as it was, bit for bit, and joins the layer again."""
        layer = self.layer
        layer.kernel.assign(self.base_kernel)
        self.base_kernel = None
        keras_internals.attach(layer, self.variables)
        layer.adapter, layer.merged = self, None

    def remove(self) -> None:
        """Takes the adapter away."""
        keras_internals.detach(self.layer, self.variables)
        self.layer.adapter = None
