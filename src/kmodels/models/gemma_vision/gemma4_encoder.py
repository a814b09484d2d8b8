"""The vision parts of Gemma 4: the encoder, and the embedder of the size that has none."""

import math
from collections.abc import MutableMapping
from typing import Any

import keras
import numpy as np

from kmodels import ops
from kmodels.core.errors import InputError, check_whole
from kmodels.core.types import Tensor
from kmodels.layers import Dense, Layer, LayerNorm, RMSNorm
from kmodels.layers.base import Shape, reshape, shape_of
from kmodels.layers.norm import check_epsilon
from kmodels.models.blocks.config import check_groups
from kmodels.models.blocks.hub_order import in_order
from kmodels.models.blocks.inputs import Reordered, TokensFirst
from kmodels.ops.dropout import check_rate

CHANNELS = 3


class PatchFeatures(Layer):
    """A layer of patches with their places to the features that stand among a text.

    Args:
        hidden_dim: width of the patches on their way.
        output_dim: width of the features, which is that of the text.
        patch_size: side of the square patches, in pixels.
        pool_size: side of the squares of patches that become one feature.
        position_embedding_size: largest number of patches of a row or a column.
        layer_norm_epsilon: epsilon of every RMSNorm.
    """

    def __init__(
        self,
        hidden_dim: int,
        output_dim: int,
        patch_size: int,
        pool_size: int,
        position_embedding_size: int,
        layer_norm_epsilon: float,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        sizes = {"patch_size": patch_size, "pool_size": pool_size, "hidden_dim": hidden_dim}
        sizes |= {"output_dim": output_dim, "position_embedding_size": position_embedding_size}
        for name, size in sizes.items():
            check_whole(name, size)
        check_epsilon(layer_norm_epsilon)
        self.hidden_dim = hidden_dim
        self.output_dim = output_dim
        self.patch_size = patch_size
        self.pool_size = pool_size
        self.position_embedding_size = position_embedding_size
        self.layer_norm_epsilon = layer_norm_epsilon

    def make_end(self) -> None:
        """Makes the norm without a scale and the matrix in front of the text."""
        policy, shape = self.dtype_policy, (None, None, self.hidden_dim)
        settings = {"use_scale": False, "name": "soft_embedding_norm", "dtype": policy}
        self.soft_embedding_norm = RMSNorm(self.layer_norm_epsilon, **settings)
        self.soft_embedding_norm.build(shape)
        self.input_projection = Dense(
            self.output_dim, use_bias=False, name="input_projection", dtype=policy
        )
        self.input_projection.build(shape)
        self.order, self.move = TokensFirst(), Reordered()

    def end(self, x: Tensor, is_there: Tensor) -> Any:
        """Returns the features of x (B, M, N, hidden_dim), those of padding behind all others."""
        images, features = shape_of(x)[1:3]
        x = reshape(x, (-1, images * features, self.hidden_dim))
        x = self.input_projection(self.soft_embedding_norm(x))
        mask = reshape(keras.ops.cast(is_there, "int32"), (-1, images * features))
        front, _ = self.order(mask)
        return self.move(x, front)

    def of_places(self, table: Tensor, places: Tensor, is_by_place: bool = False) -> Any:
        """Returns the sum of the learned vectors of columns and rows, (..., D).

        The table is (2, size, D), columns first, or by place (size, 2, D). Places (..., 2) int are
        column and row, -1 for padding, whose vector is 0.
        """
        size = self.position_embedding_size
        step, firsts = (2, [0, 1]) if is_by_place else (1, [0, size])
        ids = keras.ops.maximum(places, 0) * step
        ids += keras.ops.convert_to_tensor(firsts, dtype=places.dtype)
        rows = keras.ops.take(keras.ops.reshape(table, (-1, table.shape[-1])), ids, axis=0)
        there = keras.ops.expand_dims(keras.ops.cast(places >= 0, rows.dtype), -1)
        return keras.ops.sum(rows * there, axis=-2)

    def compute_output_shape(
        self, pixel_values_shape: Shape, pixel_position_ids_shape: Shape
    ) -> Shape:
        """(B, M, P, C), (B, M, P, 2) -> (B, M * N, output_dim)."""
        batch, images, patches = pixel_values_shape[:3]
        if images is None or patches is None:
            return batch, None, self.output_dim
        return batch, images * (patches // self.patches_per_feature), self.output_dim

    @property
    def side(self) -> int:
        """Side of the patches that come in, in pixels."""
        return self.patch_size * self.pool_size

    @property
    def patches_per_feature(self) -> int:
        """Patches that become one feature."""
        return 1


# No bound at all, by a number that a mean or a difference of weights survives.
WIDEST = float(np.finfo("float32").max)
BOUNDS = {"input_min": -WIDEST, "input_max": WIDEST}
BOUNDS |= {"output_min": -WIDEST, "output_max": WIDEST}


@keras.saving.register_keras_serializable(package="kmodels")
class ClippedDense(Dense):
    """`Dense` whose inputs and outputs stay within bounds that a checkpoint holds.

    Args:
        use_bias: False; arguments that are not listed are those of `Dense`.

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
        """Writes the variables of `Dense`, and the bounds by name."""
        super().save_own_variables(store)
        for name in BOUNDS if self.built else ():
            store[name] = getattr(self, name)

    def load_own_variables(self, store: MutableMapping[str, Any]) -> None:
        """Reads the result of `save_own_variables`; bounds that are not in it stay unchanged."""
        values = {name: store[name] for name in store.keys()}  # noqa: SIM118 - Keras' is no mapping
        super().load_own_variables({n: x for n, x in values.items() if n not in BOUNDS})
        for name in BOUNDS:
            if name in values:
                getattr(self, name).assign(values[name])


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
    check_groups(num_heads, num_key_value_heads)
    if head_dim % 4:
        raise InputError(
            f"head_dim is {head_dim}; rotary embedding of columns and rows needs a multiple of 4"
        )


@keras.saving.register_keras_serializable(package="kmodels")
class Gemma4VisionEncoder(PatchFeatures):
    """Patches to the features that stand among a text; arguments are keras-hub's.

    Patches are averaged in squares of `pool_size`, wherever they lie in the row.

    Args:
        patch_size: side of the square patches, in pixels.
        num_heads: heads of the queries.
        hidden_dim: width of the tower.
        num_layers: blocks.
        intermediate_dim: width of the MLP's gate.
        head_dim: width of each head.
        output_dim: width of the features, which is that of the text.
        num_key_value_heads: heads of keys and values; None for `num_heads`.
        pool_size: side of the squares of patches that become one feature.
        position_embedding_size: largest number of patches of a row or a column.
        rope_max_wavelength: base of the rotary embedding of columns and rows.
        layer_norm_epsilon: epsilon of every norm.
        dropout: on attention weights, in training.
        use_clipped_linears: bounds around every linear layer of a block, see `ClippedDense`.
        standardize: shifts and scales the features in front of the last norm.
        image_size: not used; keras-hub's encoder is told one.
        **kwargs: of `keras.layers.Layer`.

    Call:
        pixel_values (B, M, P, patch_size^2 * 3), floats from 0 to 1; pixel_position_ids
        (B, M, P, 2) int, column and row of each patch, -1 for padding; P a multiple of pool_size^2
        -> (B, M * N, output_dim) with N = P / pool_size^2, image by image, padding last.

    Weights:
        patch_embedding: kernel (patch, hidden_dim); position_embeddings (2,
        position_embedding_size, hidden_dim); block_<i>: see `Gemma4VisionBlock`; with `standardize`
        std_bias and std_scale (hidden_dim,), not trained; input_projection: kernel (hidden_dim,
        output_dim).

    Raises:
        InputError: for sizes that do not fit together.

    Source:
        Transformers' `Gemma4VisionModel`.
    """

    @in_order(
        *("image_size", "patch_size", "num_heads", "hidden_dim", "num_layers"),
        *("intermediate_dim", "head_dim", "output_dim", "num_key_value_heads", "pool_size"),
        *("position_embedding_size", "rope_max_wavelength", "layer_norm_epsilon", "dropout"),
        *("use_clipped_linears", "standardize", "dtype"),
    )
    def __init__(
        self,
        patch_size: int,
        num_heads: int,
        hidden_dim: int,
        num_layers: int,
        intermediate_dim: int,
        head_dim: int,
        output_dim: int,
        num_key_value_heads: int | None = None,
        pool_size: int = 3,
        position_embedding_size: int = 1024,
        rope_max_wavelength: float = 100.0,
        layer_norm_epsilon: float = 1e-6,
        dropout: float = 0.0,
        use_clipped_linears: bool = True,
        standardize: bool = False,
        image_size: int | None = None,
        **kwargs: Any,
    ):
        super().__init__(
            hidden_dim,
            output_dim,
            patch_size,
            pool_size,
            position_embedding_size,
            layer_norm_epsilon,
            # Pixels are scaled before they are rounded to the compute dtype.
            autocast=False,
            **kwargs,
        )
        check_whole("num_layers", num_layers)
        check_rate(dropout)
        check_whole("intermediate_dim", intermediate_dim)
        self.num_heads = num_heads
        self.num_layers = num_layers
        self.intermediate_dim = intermediate_dim
        self.head_dim = head_dim
        self.num_key_value_heads = num_key_value_heads or num_heads
        self.rope_max_wavelength = rope_max_wavelength
        self.dropout = dropout
        self.use_clipped_linears = use_clipped_linears
        self.standardize = standardize
        self.image_size = image_size
        check_heads(num_heads, self.num_key_value_heads, head_dim)

    def build(self, pixel_values_shape: Shape, pixel_position_ids_shape: Shape) -> None:
        """Makes the embedding of patches, the blocks, and the way into the text."""
        policy, width = self.dtype_policy, self.hidden_dim
        self.patch_embedding = Dense(width, use_bias=False, name="patch_embedding", dtype=policy)
        self.patch_embedding.build((None, self.patch_size**2 * CHANNELS))
        shape = (2, self.position_embedding_size, width)
        start = keras.initializers.RandomNormal(stddev=0.02)
        self.position_embeddings = self.add_parameter("position_embeddings", shape, start)
        self.blocks = [
            Gemma4VisionBlock(
                self.num_heads,
                self.num_key_value_heads,
                self.head_dim,
                self.intermediate_dim,
                self.rope_max_wavelength,
                self.layer_norm_epsilon,
                self.dropout,
                self.use_clipped_linears,
                name=f"block_{i}",
                dtype=policy,
            )
            for i in range(self.num_layers)
        ]
        for block in self.blocks:
            block.build((None, None, width), (None, None, 2))
        if self.standardize:
            self.std_bias = self.add_parameter("std_bias", (width,), "zeros", trainable=False)
            self.std_scale = self.add_parameter("std_scale", (width,), "ones", trainable=False)
        self.make_end()

    def call(self, pixel_values: Tensor, pixel_position_ids: Tensor, training: bool = False) -> Any:
        """(B, M, P, C), (B, M, P, 2) -> (B, M * N, output_dim)."""
        images, patches = shape_of(pixel_values)[1:3]
        places = reshape(pixel_position_ids, (-1, patches, 2))
        pixels = reshape(pixel_values, (-1, patches, self.patch_size**2 * CHANNELS))
        x = self.patch_embedding(keras.ops.cast(2 * (pixels - 0.5), self.compute_dtype))
        table = keras.ops.cast(self.position_embeddings, self.compute_dtype)
        x = x + self.of_places(table, places)
        for block in self.blocks:
            x = block(x, places, training=training)
        x, is_there = pooled(x, places, self.pool_size)
        wide = "float64" if self.compute_dtype == "float64" else "float32"
        x = keras.ops.cast(x, wide) * math.sqrt(self.hidden_dim)
        if self.standardize:
            bias, scale = (keras.ops.cast(v, wide) for v in (self.std_bias, self.std_scale))
            x = (x - bias) * scale
        x = keras.ops.cast(x, self.compute_dtype)
        count = patches // self.patches_per_feature
        x = reshape(x, (-1, images, count, self.hidden_dim))
        return self.end(x, reshape(is_there, (-1, images, count)))

    @property
    def num_vision_tokens_per_image(self) -> int | None:
        """Features of a square image of `image_size`; None without it."""
        if self.image_size is None:
            return None
        return (self.image_size // self.patch_size // self.pool_size) ** 2

    @property
    def patches_per_feature(self) -> int:
        """Patches that become one feature."""
        return self.pool_size**2

    @property
    def side(self) -> int:
        """Side of the patches that come in, in pixels."""
        return self.patch_size


def pooled(x: Tensor, places: Tensor, size: int) -> tuple[Any, Any]:
    """Returns the mean (B, N, D) of patches (B, P, D) in squares, and which squares there are.

    Places (B, P, 2) int are column and row, -1 for padding, and N = P / size^2. The mean is
    computed in float32.
    """
    dtype = "float64" if keras.backend.standardize_dtype(x.dtype) == "float64" else "float32"
    there = keras.ops.all(places >= 0, axis=-1)
    inside = keras.ops.maximum(places, 0)
    # A column for images without patches: Keras' `initial` is on the CPU on torch.
    padded = keras.ops.pad(inside[..., 0], ((0, 0), (0, 1)))
    some = padded.shape[0] != 0
    last = keras.ops.max(padded, axis=-1, keepdims=True) if some else padded[:, :1]
    columns = (last + 1) // size
    number = inside[..., 0] // size + columns * (inside[..., 1] // size)
    count = shape_of(x)[1] // size**2
    squares = keras.ops.arange(count, dtype="int32")
    share = keras.ops.logical_and(
        keras.ops.expand_dims(number, 1) == keras.ops.expand_dims(squares, -1),
        keras.ops.expand_dims(there, 1),
    )  # (B, N, P)
    weights = keras.ops.cast(share, dtype) / size**2
    y = keras.ops.matmul(weights, keras.ops.cast(x, dtype))
    return keras.ops.cast(y, x.dtype), keras.ops.any(share, axis=-1)


# Of PyTorch's LayerNorm, which transformers takes as it is.
EPSILON = 1e-5


@keras.saving.register_keras_serializable(package="kmodels")
class Gemma4VisionEmbedder(PatchFeatures):
    """Patches to the features that stand among a text, by one dense layer between norms.

    Args:
        hidden_dim: width behind the dense layer.
        output_dim: width of the features, which is that of the text.
        patch_size: side of the square patches of which `pool_size` squared make one here.
        pool_size: patches of a side; the patches of the input are 48 pixels wide by default.
        position_embedding_size: largest number of patches of a row or a column.
        layer_norm_epsilon: epsilon of the RMSNorm at the end.
        **kwargs: of `keras.layers.Layer`.

    Call:
        pixel_values (B, M, P, (patch_size * pool_size)^2 * 3), floats from 0 to 1;
        pixel_position_ids (B, M, P, 2) int, column and row of each patch, -1 for padding ->
        (B, M * P, output_dim), image by image, padding last.

    Weights:
        patch_norm: scale, bias (patch,); patch_embedding: kernel (patch, hidden_dim), bias;
        patch_embedding_norm, position_norm: scale, bias (hidden_dim,); position_embeddings
        (position_embedding_size, 2, hidden_dim); input_projection: kernel (hidden_dim, output_dim).

    Raises:
        InputError: for sizes that are no whole numbers above 0.

    Source:
        Transformers' `Gemma4UnifiedVisionEmbedder`.
    """

    def __init__(
        self,
        hidden_dim: int,
        output_dim: int,
        patch_size: int = 16,
        pool_size: int = 3,
        position_embedding_size: int = 1120,
        layer_norm_epsilon: float = 1e-6,
        **kwargs: Any,
    ):
        super().__init__(
            hidden_dim,
            output_dim,
            patch_size,
            pool_size,
            position_embedding_size,
            layer_norm_epsilon,
            **kwargs,
        )

    def build(self, pixel_values_shape: Shape, pixel_position_ids_shape: Shape) -> None:
        """Makes the norms, the dense layer, the positions and the matrix."""
        policy, width = self.dtype_policy, self.hidden_dim
        inner = (self.patch_size * self.pool_size) ** 2 * CHANNELS
        self.patch_norm = LayerNorm(EPSILON, name="patch_norm", dtype=policy)
        self.patch_norm.build((None, inner))
        self.patch_embedding = Dense(width, name="patch_embedding", dtype=policy)
        self.patch_embedding.build((None, inner))
        self.patch_embedding_norm = LayerNorm(EPSILON, name="patch_embedding_norm", dtype=policy)
        self.patch_embedding_norm.build((None, width))
        shape = (self.position_embedding_size, 2, width)
        self.position_embeddings = self.add_parameter("position_embeddings", shape, "zeros")
        self.position_norm = LayerNorm(EPSILON, name="position_norm", dtype=policy)
        self.position_norm.build((None, width))
        self.make_end()

    def call(self, pixel_values: Tensor, pixel_position_ids: Tensor, training: bool = False) -> Any:
        """(B, M, P, C), (B, M, P, 2) -> (B, M * P, output_dim)."""
        images, patches = shape_of(pixel_values)[1:3]
        pixels = reshape(pixel_values, (-1, images * patches, pixel_values.shape[-1]))
        places = reshape(pixel_position_ids, (-1, images * patches, 2))
        x = self.patch_embedding_norm(self.patch_embedding(self.patch_norm(pixels)))
        table = keras.ops.convert_to_tensor(self.position_embeddings)
        x = self.position_norm(x + self.of_places(table, places, is_by_place=True))
        x = reshape(x, (-1, images, patches, self.hidden_dim))
        return self.end(x, keras.ops.all(pixel_position_ids >= 0, axis=-1))
