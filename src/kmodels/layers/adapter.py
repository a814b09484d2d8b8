"""LoRA adapters: two small trained matrices beside the frozen kernel of a linear layer."""

import math
import warnings
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import keras
import numpy as np

from kmodels import ops
from kmodels.core import keras_internals, traced
from kmodels.core.arguments import check_fields
from kmodels.core.errors import InputError
from kmodels.core.types import Tensor
from kmodels.layers import copies, initializers
from kmodels.layers import quantized as quantizing
from kmodels.layers.placement import add_weight
from kmodels.layers.quantized import MODES, QuantizedKernel
from kmodels.ops.grouped_dense import rows_of

# Names in a file of Keras: of an adapter's variables, and of its scaling.
ADAPTER = ("lora_a", "lora_b", "lora_magnitude")
SCALING = "lora_scaling"
UNBUILT = "it was never built and the file holds weights for it; build it before it reads them"


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
        check_fields(self)
        if self.rank < 1:
            raise InputError(f"LoRA rank is {self.rank!r}; give a whole number from 1, such as 8")
        if self.alpha is not None and self.alpha <= 0:
            raise InputError(
                f"LoRA alpha is {self.alpha!r}; give a number above 0, or None for the rank"
            )
        if not self.scaling <= float(np.finfo("float32").max):
            raise InputError(
                f"LoRA alpha is {self.alpha!r} with rank {self.rank}, a factor that float32 does "
                "not hold; give a smaller alpha"
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
    built: bool
    layout_family: Any
    kernel: Any
    quantized: Any
    shard_granularity: tuple[Any, ...]
    adapter: Any = traced.Variant()
    groups: Any = None
    is_lookup = False
    is_output = False
    prefix = ""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.merged: Adapter | None = None
        self._adapter: Adapter | None = None

    def add_adapter(self, settings: "LoraSettings | Mapping[str, Any]") -> "Adapter":
        """Adds an adapter with initial values; its settings may be a `LoraSettings.to_dict`."""
        if not isinstance(settings, LoraSettings):
            settings = LoraSettings(**settings)
        self.adapter = adapter = Adapter(self, settings)
        return adapter

    def adapter_variables(self) -> dict[str, Any]:
        """Returns the variables of the adapter by name; empty without one."""
        return (
            {} if self.adapter is None else dict(zip(ADAPTER, self.adapter.variables, strict=False))
        )

    def save_adapter(self, store: MutableMapping[str, Any]) -> None:
        """Writes the adapter by name, and its scaling."""
        for name, variable in self.adapter_variables().items():
            store[self.prefix + name] = variable
        if self.adapter is not None:
            store[self.prefix + SCALING] = np.float32(self.adapter.settings.scaling)

    def saved_adapter(self, store: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arrays of `save_adapter` in a file, without the prefix; empty without."""
        names = set(store.keys())
        return {
            name: store[self.prefix + name]
            for name in (*ADAPTER, SCALING)
            if self.prefix + name in names
        }

    def adapter_misfit(self, saved: Mapping[str, Any]) -> str | None:
        """Returns why the adapter cannot load a `saved_adapter`, or None."""
        own, names = self.adapter_variables(), [name for name in ADAPTER if name in saved]
        if not (names and own):
            return None
        rank, other = own["lora_a"].shape[-1], saved["lora_a"].shape[-1]
        if rank != other:
            return f"its adapter has rank {rank}, the file's {other}"
        if names != list(own):
            return f"its adapter has {', '.join(own)}, the file's {', '.join(names)}"
        scaling, other = self.adapter.settings.scaling, float(np.asarray(saved[SCALING]))
        if not np.isclose(scaling, other):
            return f"its adapter counts {scaling:g} times, the file's {other:g}: give that alpha"
        return None

    def load_adapter(self, saved: Mapping[str, Any]) -> None:
        """Fills the adapter from a `saved_adapter` that fits.

        Without an adapter that of the file is added to the kernel; an adapter is reset if the file
        has none.
        """
        own = self.adapter_variables()
        if "lora_a" not in saved:
            if own:
                self.adapter.start()
        elif own:
            for name, variable in own.items():
                variable.assign(saved[name])
        else:
            a, b, magnitude = map(saved.get, ADAPTER)
            add(self, a, b, float(np.asarray(saved[SCALING])), magnitude)


class AdaptableLayer(Adaptable):
    """An `Adaptable` that is a layer: its quantized kernel, and its variables in a file of Keras.

    Attributes:
        quantized: the quantized kernel, or None.
    """

    quantized: Any = traced.Variant()
    kernel_regularizer: Any = None
    kernel_constraint: Any = None
    copies: Any
    trainable: bool
    add_parameter: Any

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self._quantized: QuantizedKernel | None = None

    @property
    def variant(self) -> tuple[Any, ...]:
        """The state besides variables that the layer depends on, see `kmodels.core.traced`."""
        return self._adapter, self._quantized

    def compute_output_shape(self, input_shape: tuple[Any, ...], *_: object) -> tuple[Any, ...]:
        """Returns the input's shape with the last axis replaced by `units`."""
        return (*input_shape[:-1], self.units)

    def wide_kernel(self) -> Any:
        """Returns the kernel (in, units) in float32, dequantized if it is quantized."""
        if self.quantized is not None and self.kernel is None:
            return self.quantized.wide()
        return keras.ops.cast(self.kernel, "float32")

    def check_float_kernel(self) -> None:
        """Raises `InputError` if the kernel cannot be quantized: it is, or is trained as a copy."""
        if self.quantized is not None:
            raise InputError(f"{self.path} is {self.quantized.mode} already; quantize a model once")
        if self.copies is not None and "kernel" in self.copies.originals:
            raise InputError(
                f"{self.path} is trained as a whole; quantize the base before enable_lora with "
                "modules_to_save"
            )

    def quantize_kernel(self, settings: quantizing.Quantization) -> None:
        """Quantizes the kernel to 8 or 4 bits, see `layers.quantized`; an adapter stays.

        Raises:
            InputError: see `check_float_kernel`.
        """
        self.check_float_kernel()
        values = keras.ops.convert_to_numpy(self.wide_kernel())
        quantizing.fill(self.to_quantized(settings), values)

    def to_quantized(self, settings: quantizing.Quantization) -> QuantizedKernel:
        """Replaces the kernel by an empty quantized one, to be filled."""
        keras_internals.detach(self, [self.kernel])
        with keras_internals.changing(self):
            self.kernel = None
            self.quantized = quantizing.make(self, settings)
        return self.quantized

    def restore_quantized(self, config: object, keeps_values: bool) -> None:
        """Gives the layer the quantized kernel of a `Quantization.to_config`.

        With `keeps_values` it quantizes a kernel that has values; else zeros wait for a file.

        Raises:
            InputError: for values to be quantized in a mode that is read from files alone.
        """
        settings = quantizing.Quantization.of(config)
        if not (keeps_values and keras_internals.has_value(self.kernel)):
            self.to_quantized(settings)
        elif settings.mode in quantizing.READ:
            raise InputError(
                f"{self.path} is {settings.mode} in its file, which no random weights are made in; "
                "load the file's weights, or give quantized=False"
            )
        else:
            self.quantize_kernel(settings)

    def to_floats(self, kernel: Tensor | None = None) -> None:
        """Replaces a quantized kernel by the floats (in, units) it stands for, or by others."""
        if (quantized := self.quantized) is None:
            return
        values = keras.ops.convert_to_numpy(quantized.wide() if kernel is None else kernel)
        keras_internals.detach(self, quantized.variables)
        with keras_internals.changing(self):
            self.quantized = None
            made = self.add_parameter("kernel", values.shape, "zeros", self.shard_granularity)
        made.assign(values)
        made.trainable = self.trainable and self.adapter is None
        if self.copies is not None and "kernel" in self.copies.originals:
            self.copies.originals["kernel"] = made
        else:
            self.kernel = made

    # Methods, no properties: Keras' saving evaluates those of each layer.

    def base_variables(self) -> dict[str, Any]:
        """Returns the variables without adapter and copies, by name in a file of Keras."""
        named = (copies.original(self, name) for name in ("kernel", "bias"))
        plain = [v for v in named if v is not None]
        beside = [] if self.quantized is None else self.quantized.variables
        return {str(i): v for i, v in enumerate(plain)} | {v.name: v for v in beside}

    def save_own_variables(self, store: MutableMapping[str, Any]) -> None:
        """Writes kernel and bias as Keras' Dense does, and other variables by name."""
        for name, variable in self.base_variables().items():
            store[name] = variable
        copies.save(self, store)
        self.save_adapter(store)

    def load_own_variables(self, store: MutableMapping[str, Any]) -> None:
        """Loads the variables of `save_own_variables`, as Keras' Dense does.

        A layer without an adapter adds that of the file to its kernel; an adapter is reset if the
        file has none.

        Raises:
            InputError: for a kernel or adapter of another kind or size.
        """
        if problem := self.misfit(store):
            raise InputError(f"{self.path}: {problem}")
        for name, variable in self.base_variables().items():
            variable.assign(store[name])
        self.load_adapter(self.saved_adapter(store))
        copies.load(self, store)

    def misfit(self, store: Mapping[str, Any]) -> str | None:
        """Returns why the layer cannot load its arrays of a file, or None.

        Args:
            store: arrays by name, as `save_own_variables` writes them; for a layer that was never
                called, a file has none, as in Keras.
        """
        shapes = {name: tuple(store[name].shape) for name in store.keys()}  # noqa: SIM118
        if not self.built:
            return UNBUILT if shapes else None
        if not shapes:
            return "the file holds nothing for it"
        modes = [mode for mode in MODES if f"kernel_{mode}" in shapes]
        there = modes[0] if modes else None
        here = None if self.quantized is None else self.quantized.mode
        if there != here:
            return f"its kernel is {here or 'not quantized'}, the file's {there or 'not'}"
        wanted, own = self.base_variables(), self.adapter_variables()
        if "lora_a" in shapes and own:
            if problem := self.adapter_misfit(self.saved_adapter(store)):
                return problem
            wanted |= own
        elif "lora_a" in shapes and here:
            return (
                "the file has an adapter, which a quantized kernel cannot take in; call enable_lora"
            )
        for name, variable in wanted.items():
            if shapes.get(name) != tuple(variable.shape):
                shape = tuple(variable.shape)
                return f"{variable.name} is {shape}, in the file {shapes.get(name, 'missing')}"
        beside = copies.names(self, store)
        for name, variable in beside.items():
            if shapes[name] != tuple(variable.shape):
                shape = tuple(variable.shape)
                return f"{variable.name} is {shape}, {name} in the file {shapes[name]}"
        if more := sorted(set(shapes) - set(wanted) - {*ADAPTER, SCALING, *beside}):
            return f"the file has {', '.join(more)} too"
        return None


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


def merged(kernel: Tensor, a: Any, b: Any, scaling: float, magnitude: Any = None) -> np.ndarray:
    """Returns a kernel (in, out) with an adapter added in float64, rounded once to its own dtype.

    `a` is (in, rank), `b` (rank, out); with DoRA `magnitude` is the length of each output, (out,).
    """
    wide, a, b = (np.asarray(x, "float64") for x in (kernel, a, b))
    total = wide + a @ b * scaling
    if magnitude is not None:
        total *= np.asarray(magnitude, "float64") / np.sqrt(np.square(total).sum(0))
    return total.astype(kernel.dtype)


def add(layer: Any, a: Any, b: Any, scaling: float, magnitude: Any = None) -> np.ndarray:
    """Adds an adapter to the kernel of a layer, see `merged`; returns the kernel as it was."""
    before = np.array(keras.ops.convert_to_numpy(layer.kernel.value))
    # The kernel of an output layer is its table (out, in).
    total = merged(before.T if layer.is_output else before, a, b, scaling, magnitude)
    layer.kernel.assign(total.T if layer.is_output else total)
    return before


class Adapter(copies.TrainedPart):
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
    """

    name, merged_as = "adapter", "merged"

    def __init__(self, layer: Any, settings: LoraSettings):
        super().__init__(layer, owner_of(layer))
        self.settings = settings
        self.seed: keras.random.SeedGenerator | None = None
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

    def write(self) -> np.ndarray:
        """Adds the product to the kernel, rounded once."""
        a, b, *magnitude = (keras.ops.convert_to_numpy(v.value) for v in self.variables)
        return add(self.layer, a, b, self.settings.scaling, *magnitude)

    def put_back(self, base: np.ndarray) -> None:
        """Restores the kernel."""
        self.layer.kernel.assign(base)
