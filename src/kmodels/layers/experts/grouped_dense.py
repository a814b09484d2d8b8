"""A linear layer with a kernel for each group of rows."""

from collections.abc import MutableMapping
from typing import Any

import keras

from kmodels import ops
from kmodels.core import traced
from kmodels.core.errors import InputError, check_whole
from kmodels.core.types import InitializerLike, Tensor
from kmodels.layers import kernels
from kmodels.layers.adapter import Adaptable
from kmodels.layers.base import Layer, Shape


@keras.saving.register_keras_serializable(package="kmodels")
class GroupedDense(Adaptable, Layer):
    """`x[i] @ kernel[g]` for the rows i of each group g, without biases.

    Args:
        groups: number of kernels G.
        units: width of the output.
        kernel_initializer: of each kernel as if it were alone; None for Glorot uniform.
        **kwargs: of `keras.layers.Layer`.

    Call:
        x (N, in), sizes (G,) int32 -> (N, units): the first sizes[0] rows are those of group 0, and
        so on.

    Weights:
        kernel (G, in, units); one with an adapter lora_a and lora_b too.

    Raises:
        InputError: for `groups` or `units` that are no whole number above 0.
    """

    kernel: keras.Variable
    # As in `Dense`, of which this has neither.
    bias = quantized = None
    not_quantized = "has a kernel for each expert, which there is in no 4 or 8 bits"

    def __init__(
        self,
        groups: int,
        units: int,
        kernel_initializer: InitializerLike = None,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        check_whole("groups", groups)
        check_whole("units", units)
        self.groups = groups
        self.units = units
        given = kernel_initializer is not None
        self.kernel_initializer = keras.initializers.get(kernel_initializer) if given else None
        self.shard_granularity = (None, None, None)

    @property
    def variant(self) -> tuple[Any, ...]:
        """The state besides variables that the layer depends on, see `kmodels.core.traced`."""
        return (self._adapter,)

    def build(self, input_shape: Shape, *_: object) -> None:
        """Makes the kernels."""
        self.input_dim = input_shape[-1]
        drawn = self.kernel_initializer
        if drawn is None:
            # Keras counts the first axis as the window of a convolution.
            drawn = keras.initializers.VarianceScaling(self.groups, "fan_avg", "uniform")
        self.kernel = self.add_parameter("kernel", (self.groups, self.input_dim, self.units), drawn)

    def call(self, x: Tensor, sizes: Tensor, training: bool = False) -> Any:
        """(N, in), (G,) -> (N, units)."""
        traced.note()
        if self._adapter is not None:
            return self._adapter.grouped(x, sizes)
        return self.linear(x, sizes)

    def linear(self, x: Tensor, sizes: Tensor) -> Any:
        """Returns the layer without its adapter."""
        return ops.grouped_dense(x, self.kernel, sizes)

    def save_own_variables(self, store: MutableMapping[str, Any]) -> None:
        """Writes the kernel, and what stands beside it by name."""
        for name, variable in kernels.base(self).items():
            store[name] = variable
        kernels.save_adapter(self, store)

    def load_own_variables(self, store: MutableMapping[str, Any]) -> None:
        """Reads what `save_own_variables` wrote, as `Dense` does.

        Raises:
            InputError: for a kernel or adapter of another kind or size.
        """
        if problem := kernels.misfit(self, store):
            raise InputError(f"{self.path}: {problem}")
        kernels.load(self, store)

    def compute_output_shape(self, input_shape: Shape, *_: object) -> Shape:
        """Returns the input's shape with the last axis replaced by `units`."""
        return (*input_shape[:-1], self.units)
