"""The blocks of Gemma 4's vision tower: attention in a plane, norms around each half, bounds."""

from collections.abc import MutableMapping
from typing import Any

import keras
import numpy as np

from kmodels import ops
from kmodels.core.errors import InputError, check_whole
from kmodels.core.types import Tensor
from kmodels.layers import Dense, Layer, RMSNorm
from kmodels.layers.base import Shape, reshape, shape_of

# No bound at all, by a number that a mean or a difference of weights survives.
WIDEST = float(np.finfo("float32").max)
BOUNDS = {"input_min": -WIDEST, "input_max": WIDEST}
BOUNDS |= {"output_min": -WIDEST, "output_max": WIDEST}


@keras.saving.register_keras_serializable(package="kmodels")
class ClippedDense(Dense):
    """`Dense` whose inputs and outputs stay within bounds that a checkpoint holds.

    Args:
        units: width of the output.
        use_bias: False, like all that is not listed as of `Dense`.
        **kwargs: of `Dense`.

    Call:
        x (..., in) -> (..., units).

    Weights:
        those of `Dense`; input_min, input_max, output_min, output_max: (), not trained.

    Source:
        Transformers' `Gemma4ClippableLinear`.
    """

    def __init__(self, units: int, use_bias: bool = False, **kwargs: Any):
        super().__init__(units, use_bias=use_bias, **kwargs)

    def build(self, input_shape: Shape) -> None:
        """Makes the kernel and the bounds."""
        super().build(input_shape)
        for name, value in BOUNDS.items():
            start = keras.initializers.Constant(value)
            setattr(self, name, self.add_parameter(name, (), start, trainable=False))

    def call(self, x: Tensor, training: bool = False) -> Any:
        """(..., in) -> (..., units)."""
        x = keras.ops.minimum(keras.ops.maximum(x, self.input_min), self.input_max)
        y = super().call(x, training=training)
        return keras.ops.minimum(keras.ops.maximum(y, self.output_min), self.output_max)

    @property
    def plain(self) -> bool:
        """False: there are bounds."""
        return False

    def save_own_variables(self, store: MutableMapping[str, Any]) -> None:
        """Writes what `Dense` does, and the bounds by name."""
        super().save_own_variables(store)
        for name in BOUNDS if self.built else ():
            store[name] = getattr(self, name)

    def load_own_variables(self, store: MutableMapping[str, Any]) -> None:
        """Reads what `save_own_variables` wrote; without bounds there these stay as they are.

        Raises:
            InputError: as `Dense`.
        """
        held = {name: store[name] for name in store.keys()}  # noqa: SIM118 - Keras' is no mapping
        super().load_own_variables({n: x for n, x in held.items() if n not in BOUNDS})
        for name in BOUNDS:
            if name in held:
                getattr(self, name).assign(held[name])


@keras.saving.register_keras_serializable(package="kmodels")
class Gemma4VisionBlock(Layer):
    """One block of the tower: attention among all patches of an image, then a gated MLP.

    Args:
        num_heads: heads of the queries.
        num_key_value_heads: heads of keys and values.
        head_dim: width of each head, a multiple of 4.
        intermediate_dim: width of the MLP's gate.
        rope_max_wavelength: base of the rotary embedding of columns and rows.
        layer_norm_epsilon: epsilon of every norm.
        dropout: on attention weights, in training.
        use_clipped_linears: bounds around every linear layer, see `ClippedDense`.
        **kwargs: of `keras.layers.Layer`.

    Call:
        x (B, P, D); places (B, P, 2) int, column and row, -1 for padding, which no patch sees ->
        (B, P, D).

    Weights:
        attention_norm, post_attention_norm, mlp_norm, post_mlp_norm: scale (D,); query_norm,
        key_norm: scale (head_dim,); query, key, value, output, gate, up, down: kernel.

    Raises:
        InputError: for heads that do not fit together.

    Source:
        Transformers' `Gemma4VisionEncoderLayer`.
    """

    def __init__(
        self,
        num_heads: int,
        num_key_value_heads: int,
        head_dim: int,
        intermediate_dim: int,
        rope_max_wavelength: float = 100.0,
        layer_norm_epsilon: float = 1e-6,
        dropout: float = 0.0,
        use_clipped_linears: bool = True,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        check_heads(num_heads, num_key_value_heads, head_dim)
        self.num_heads = num_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.intermediate_dim = intermediate_dim
        self.rope_max_wavelength = rope_max_wavelength
        self.layer_norm_epsilon = layer_norm_epsilon
        self.dropout = dropout
        self.use_clipped_linears = use_clipped_linears

    def build(self, x_shape: Shape, places_shape: Shape) -> None:
        """Makes the norms and the linear layers."""
        width, head = x_shape[-1], self.head_dim
        for name in ("attention_norm", "post_attention_norm", "mlp_norm", "post_mlp_norm"):
            self._norm(name, width)
        for name in ("query_norm", "key_norm"):
            self._norm(name, head)
        self._norm("value_norm", head, use_scale=False)
        queries, groups = self.num_heads * head, self.num_key_value_heads * head
        self._dense("query", width, queries, (None, self.num_heads))
        self._dense("key", width, groups, (None, self.num_key_value_heads))
        self._dense("value", width, groups, (None, self.num_key_value_heads))
        self._dense("output", queries, width, (self.num_heads, None))
        for name, inner, outer in (
            ("gate", width, self.intermediate_dim),
            ("up", width, self.intermediate_dim),
            ("down", self.intermediate_dim, width),
        ):
            self._dense(name, inner, outer, (None, None))
        self.seed_generator = self.add_seed(self.dropout)

    def _norm(self, name: str, width: int, use_scale: bool = True) -> None:
        settings = {"use_scale": use_scale, "name": name, "dtype": self.dtype_policy}
        norm = RMSNorm(self.layer_norm_epsilon, offset=0.0, **settings)
        norm.build((None, width))
        setattr(self, name, norm)

    def _dense(
        self, name: str, inner: int, outer: int, granularity: tuple[int | None, int | None]
    ) -> None:
        kind = ClippedDense if self.use_clipped_linears else Dense
        settings: dict[str, Any] = {"shard_granularity": granularity, "dtype": self.dtype_policy}
        layer = kind(outer, use_bias=False, name=name, **settings)
        layer.build((None, inner))
        setattr(self, f"{name}_dense", layer)

    def call(self, x: Tensor, places: Tensor, training: bool = False) -> Any:
        """(B, P, D), (B, P, 2) -> (B, P, D)."""
        x = x + self.post_attention_norm(self._attention(self.attention_norm(x), places, training))
        y = self.mlp_norm(x)
        y = self.down_dense(ops.gated_gelu(self.gate_dense(y), self.up_dense(y)))
        return x + self.post_mlp_norm(y)

    def _attention(self, x: Tensor, places: Tensor, training: bool) -> Any:
        rope = {"max_wavelength": self.rope_max_wavelength, "pairs": "quarters"}
        groups = self.num_key_value_heads
        q = self.query_norm(self._heads(self.query_dense(x), self.num_heads))
        k = self.key_norm(self._heads(self.key_dense(x), groups))
        v = self.value_norm(self._heads(self.value_dense(x), groups))
        active = training and self.seed_generator is not None
        there = keras.ops.expand_dims(keras.ops.all(places >= 0, axis=-1), (1, 2))
        y = ops.attention(
            ops.rotary_embedding_2d(q, places, **rope),
            ops.rotary_embedding_2d(k, places, **rope),
            v,
            there,
            scale=1.0,
            dropout=self.dropout if active else 0.0,
            seed=self.seed_generator if active else None,
        )
        return self.output_dense(reshape(y, (-1, shape_of(x)[1], self.num_heads * self.head_dim)))

    def _heads(self, x: Tensor, heads: int) -> Any:
        return reshape(x, (-1, shape_of(x)[1], heads, self.head_dim))

    def compute_output_shape(self, x_shape: Shape, places_shape: Shape) -> Shape:
        """Returns the shape of x."""
        return x_shape


def check_heads(num_heads: int, num_key_value_heads: int, head_dim: int) -> None:
    """Raises `InputError` for heads that do not fit together."""
    sizes = {"num_heads": num_heads, "num_key_value_heads": num_key_value_heads}
    for name, size in {**sizes, "head_dim": head_dim}.items():
        check_whole(name, size)
    if num_heads % num_key_value_heads:
        raise InputError(
            f"{num_key_value_heads} key/value heads do not divide {num_heads} query heads; give a "
            "divisor"
        )
    if head_dim % 4:
        raise InputError(
            f"head_dim is {head_dim}; rotary embedding of columns and rows needs a multiple of 4"
        )
