"""LoRA adapters: two small trained matrices beside the frozen kernel of a linear layer."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import keras
import numpy as np

from kmodels import ops
from kmodels.core import keras_internals, traced
from kmodels.core.errors import InputError
from kmodels.core.types import Tensor
from kmodels.layers import initializers, kernels
from kmodels.layers.shard_granularity import add_weight
from kmodels.ops.grouped_dense import rows_of


@dataclass(frozen=True)
class LoraSettings:
    """The settings that all adapters of a model share.

    Args:
        rank: rank of the two matrices.
        alpha: scales the adapter by alpha / rank; None for a scale of 1.
        dropout: dropout rate of the adapter's input.
        targets: names or patterns of the layers, see `enable_lora`.
        rslora: scales by alpha / sqrt(rank) instead (Kalajdzievski 2023).
        dora: trains magnitude and direction of the weights separately (Liu et al. 2024).
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
        """Returns the fields as JSON values, without `target_parameters` if there are none."""
        fields = asdict(self)
        for name in ("targets", "target_parameters"):
            if not isinstance(fields[name], str):
                fields[name] = list(fields[name])
        if not fields["target_parameters"]:
            del fields["target_parameters"]
        return fields

    @property
    def scaling(self) -> float:
        """The factor of the product of the two matrices."""
        return self.given_alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def given_alpha(self) -> float:
        """Alpha as a number: the rank if it is None."""
        return self.rank if self.alpha is None else self.alpha


def kaiming_uniform(rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    """Draws uniformly in ±1 / sqrt(fan_in), as PEFT does for the first matrix."""
    limit = 1.0 / math.sqrt(shape[-2])
    return (rng.random(tuple(shape), "float32") * 2 - 1) * np.float32(limit)


class Adaptable:
    """A linear map with a kernel (in, out) that may have an adapter.

    Attributes:
        adapter: the active adapter, or None.
        merged: the adapter that `merge_lora` added to the kernel, or None.
        groups: the number of kernels of a layer of experts, which are (groups, in, out); else None.
        is_lookup: True for an embedding table: its inputs are token ids.
        is_output: True for the table of an output layer, which is stored transposed.
        prefix: prefix of the names of the adapter's variables.
    """

    input_dim: int
    units: int
    path: str
    layout_family: Any
    kernel: Any
    quantized: Any
    shard_granularity: tuple[Any, ...]
    groups: Any = None
    is_lookup = False
    is_output = False
    prefix = ""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.merged: Adapter | None = None
        self._adapter: Adapter | None = None

    @property
    def adapter(self) -> Any:
        """The active adapter, or None."""
        return self._adapter

    @adapter.setter
    def adapter(self, adapter: Any) -> None:
        self._adapter = adapter
        traced.changed()


def owner_of(layer: Adaptable) -> Any:
    """Returns the layer that the variables of an adapter belong to."""
    # No property of the layer: Keras' saving walks attributes and would never end.
    return getattr(layer, "owner", layer)


def matrices(layer: Adaptable, rank: int) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Returns shape and shard granularity of lora_a (in, rank) and lora_b (rank, out).

    Those of experts have an axis of experts in front.
    """
    lead = () if layer.groups is None else (layer.groups,)
    *outer, inward, outward = layer.shard_granularity
    return {
        "lora_a": ((*lead, layer.input_dim, rank), (*outer, inward, None)),
        "lora_b": ((*lead, rank, layer.units), (*outer, None, outward)),
    }


def name_in(layer: Adaptable, name: str) -> str:
    """Returns the path of a variable of an adapter, by its name."""
    return f"{owner_of(layer).path}/{layer.prefix}{name}"


def warn_of_rank(layers: Sequence[Adaptable], rank: int, stacklevel: int) -> None:
    """Warns of a rank above that of the kernel, which adds parameters and no capacity."""
    limits = {layer.path: min(layer.input_dim, layer.units) for layer in layers}
    if not (narrow := [path for path, limit in limits.items() if rank > limit]):
        return
    more = f" and {len(narrow) - 1} more" if narrow[1:] else ""
    warnings.warn(
        f"LoRA rank {rank} is above {limits[narrow[0]]}, the smaller side of {narrow[0]}{more}; a "
        "rank up to there can learn as much",
        stacklevel=stacklevel,
    )


class Adapter:
    """x @ lora_a @ lora_b, scaled, added to the frozen layer without a tensor of the kernel's size.

    The variables belong to the layer (block_0/attention/query/lora_a) and are float32 in every
    model: in bfloat16 small steps of the optimizer would be rounded away. `lora_b` starts at zero,
    so that the outputs are unchanged at first; for an embedding table, as in PEFT, `lora_a` starts
    at zero, and there is no dropout.

    Args:
        layer: a built `layers.Dense`, `layers.GroupedDense` or table without an adapter.
        settings: rank, alpha and so on.

    Weights:
        lora_a (in, rank), lora_b (rank, out), with DoRA lora_magnitude (out,). Those of experts
        have an axis of experts in front. Those of a table belong to its embedding layer.

    Attributes:
        base_kernel: the kernel's values before merging, None while the adapter is not merged.
    """

    def __init__(self, layer: Any, settings: LoraSettings):
        self.layer = layer
        self.settings = settings
        self.base_kernel: np.ndarray | None = None
        self.seed: keras.random.SeedGenerator | None = None
        self.owner = owner_of(layer)
        prefix, sizes = layer.prefix, matrices(layer, settings.rank)
        draws = {"lora_a": kaiming_uniform, "lora_b": initializers.zeros}
        if layer.is_lookup:
            draws = {"lora_a": initializers.zeros, "lora_b": initializers.normal(1.0)}
        with keras_internals.changing(self.owner):
            self.a, self.b = (
                add_weight(
                    self.owner,
                    sizes[name][1],
                    shape=sizes[name][0],
                    initializer=initializers.Keyed(draw, name_in(layer, name)),
                    dtype="float32",
                    name=prefix + name,
                )
                for name, draw in draws.items()
            )
            self.magnitude = None
            if settings.dora:
                self.magnitude = add_weight(
                    self.owner,
                    layer.shard_granularity[1:],
                    shape=(layer.units,),
                    initializer="zeros",
                    dtype="float32",
                    name=f"{prefix}lora_magnitude",
                )
            if settings.dropout and not layer.is_lookup:
                stream = initializers.next_generator(name_in(layer, "lora_seed"))
                self.seed = keras.random.SeedGenerator(
                    int(stream.integers(2**31)), name=f"{prefix}lora_seed"
                )
                setattr(self.owner, f"{prefix}lora_seed", self.seed)
        if self.magnitude is not None:
            self.magnitude.assign(self.lengths())

    def start(self) -> None:
        """Resets the adapter, so that the layer's outputs are those of its base."""
        first = self.a if self.layer.is_lookup else self.b
        first.assign(keras.ops.zeros(first.shape))
        if self.magnitude is not None:
            self.magnitude.assign(self.lengths())

    @property
    def variables(self) -> list[Any]:
        """lora_a, lora_b and, with DoRA, lora_magnitude."""
        return [self.a, self.b, *([] if self.magnitude is None else [self.magnitude])]

    def __call__(self, x: Tensor, training: bool) -> Any:
        """Returns the adapted layer's output without its activation, (..., in) -> (..., out)."""
        side = ops.dense(self._inner(x, training), keras.ops.cast(self.b, x.dtype))
        bias = self.layer.bias
        if self.magnitude is None:
            return self.layer.linear(x, bias) + side
        y = (self.layer.linear(x, None) + side) * self._ratio(x.dtype)
        return y if bias is None else y + bias

    def _inner(self, x: Tensor, training: bool) -> Any:
        """Returns x @ lora_a, scaled, (..., rank)."""
        if training and self.seed is not None:
            x = ops.dropout(x, self.settings.dropout, self.seed)
        return ops.dense(x, keras.ops.cast(self.a, x.dtype)) * self.settings.scaling

    def _ratio(self, dtype: str) -> Any:
        """Returns DoRA's factor of each output, (out,)."""
        # The lengths count as constants (Liu et al. 2024, section 4.3).
        lengths = keras.ops.stop_gradient(self.lengths())
        return keras.ops.cast(keras.ops.cast(self.magnitude, "float32") / lengths, dtype)

    def over(self, token_ids: Tensor, rows: Tensor) -> Any:
        """Adds the adapter to rows that were looked up in an embedding table, (..., D)."""
        inner = keras.ops.cast(rows_of(self.a, token_ids), rows.dtype) * self.settings.scaling
        rows = rows + ops.dense(inner, keras.ops.cast(self.b, rows.dtype))
        return rows if self.magnitude is None else rows * self._ratio(rows.dtype)

    def widened(self, x: Tensor, training: bool) -> tuple[Any, Any]:
        """Returns x (..., in + rank) and a table (out, in + rank) whose product is the output.

        It serves losses that never compute all logits at once.
        """
        b = keras.ops.transpose(keras.ops.cast(self.b, x.dtype))
        table = keras.ops.concatenate([keras.ops.cast(self.layer.kernel, x.dtype), b], axis=-1)
        if self.magnitude is not None:
            table = table * keras.ops.expand_dims(self._ratio(x.dtype), -1)
        return keras.ops.concatenate([x, self._inner(x, training)], axis=-1), table

    def grouped(self, x: Tensor, sizes: Tensor) -> Any:
        """Returns a `GroupedDense`'s output for x (N, in) and the rows of each group."""
        side = ops.grouped_dense(x, keras.ops.cast(self.a, x.dtype), sizes) * self.settings.scaling
        side = ops.grouped_dense(side, keras.ops.cast(self.b, x.dtype), sizes)
        return self.layer.linear(x, sizes) + side

    def lengths(self) -> Any:
        """Returns the norm of each output's weights with the adapter, (out,) float32."""
        a, b = (keras.ops.cast(v, "float32") for v in (self.a, self.b))
        kernel = self.layer.wide_kernel() + keras.ops.matmul(a, b) * self.settings.scaling
        return keras.ops.sqrt(keras.ops.sum(keras.ops.square(kernel), axis=0))

    def on(self) -> None:
        """Makes the layer use the adapter."""
        self.layer.adapter = self

    def off(self) -> None:
        """Makes the layer compute its base alone."""
        self.layer.adapter = None

    def merge(self) -> None:
        """Adds the product to the kernel, rounded once, and leaves the layer."""
        layer = self.layer
        a, b, *magnitude = (keras.ops.convert_to_numpy(v.value) for v in self.variables)
        self.base_kernel = kernels.add(layer, a, b, self.settings.scaling, *magnitude)
        self.remove()
        layer.merged = self

    def unmerge(self) -> None:
        """Puts back the kernel as it was, bit for bit, and joins the layer again."""
        self.layer.kernel.assign(self.base_kernel)
        self.base_kernel = None
        keras_internals.attach(self.owner, self.variables)
        self.layer.merged = None
        self.on()

    def remove(self) -> None:
        """Removes the adapter from the layer."""
        self.off()
        keras_internals.detach(self.owner, self.variables)
