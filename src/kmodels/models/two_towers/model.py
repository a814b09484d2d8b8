"""Image tower and text tower of CLIP, SigLIP and SigLIP 2, and the logits of their pairs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import keras
from keras import ops

from kmodels.core.errors import InputError, check_whole
from kmodels.core.types import DTypeLike, Tensor, Tree
from kmodels.layers import Dense, Layer
from kmodels.layers.base import Shape
from kmodels.layers.placement import of_family
from kmodels.models.blocks import encoder_rules
from kmodels.models.blocks.config import FrozenConfig
from kmodels.models.blocks.encoder_config import TextEncoderConfig
from kmodels.models.blocks.inputs import OptionalInputs, as_tensors
from kmodels.models.blocks.sharding import KERNEL, TEXT_ENCODER
from kmodels.models.blocks.text_encoder_files import EMBEDDINGS, PREFIX, PROJECTION
from kmodels.models.clip import CLIPTextConfig, CLIPTextEncoder, CLIPVisionEncoder
from kmodels.models.siglip import SigLIPTextConfig, SigLIPTextEncoder, SigLIPVisionEncoder
from kmodels.models.vit.config import ViTConfig
from kmodels.models.vit.model import LAYOUT as VISION
from kmodels.models.vit.naflex.model import (
    MASK,
    NAMES,
    SHAPES,
    VALUES,
    SigLIPNaFlexVisionEncoder,
    check_free,
    graph_inputs,
)
from kmodels.models.vit.weights import clip_siglip
from kmodels.models.vit.weights.module_names import SIGLIP
from kmodels.ops._wide import wide
from kmodels.task import Backbone

# === Config ===


@dataclass(frozen=True)
class TwoTowersConfig(FrozenConfig):
    """Sizes of two towers; names as in keras-hub.

    Args:
        vision_encoder: fields of the vision tower's `ViTConfig`.
        text_encoder: fields of the text tower's `CLIPTextConfig` or `SigLIPTextConfig`.
        projection_dim: width to which both towers of a CLIP are projected; None for a SigLIP,
            whose towers have equal output widths.
        naflex: True if the vision tower takes patches of images of any aspect ratio, as
            `SigLIPNaFlexVisionEncoder`; SigLIP only.

    Raises:
        InputError: for sizes that do not fit together.
    """

    vision_encoder: Mapping[str, Any]
    text_encoder: Mapping[str, Any]
    projection_dim: int | None = None
    naflex: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "vision_encoder", self.vision.to_dict())
        object.__setattr__(self, "text_encoder", self.text.to_dict())
        if self.naflex:
            check_free(self.vision)
        if self.projection_dim is not None:
            check_whole("projection_dim", self.projection_dim)
            if not self.vision.use_class_token:
                raise InputError(
                    "use_class_token is False in vision_encoder; a CLIP pools images at that "
                    "token: give one, or a SigLIPBackbone"
                )
            return
        widths = self.vision.hidden_dim, self.text_encoder["projection_dim"]
        if widths[0] != widths[1]:
            raise InputError(
                f"the vision tower gives {widths[0]} numbers and the text tower {widths[1]}; give "
                f"text_encoder projection_dim={widths[0]}"
            )

    @property
    def projects(self) -> bool:
        """True if the towers are projected, as in CLIP."""
        return self.projection_dim is not None

    @property
    def vision(self) -> ViTConfig:
        """The config of the vision tower."""
        return ViTConfig(**self.vision_encoder)

    @property
    def text(self) -> TextEncoderConfig:
        """The config of the text tower."""
        kind = CLIPTextConfig if self.projects else SigLIPTextConfig
        return kind(**self.text_encoder)

    @property
    def width(self) -> int:
        """Width of the vectors of images and texts."""
        return self.projection_dim or self.vision.hidden_dim


# === Layers ===

LAYOUT: dict[str, tuple[str | None, ...]] = {
    **VISION,
    **TEXT_ENCODER,
    rf"(?:.*/)?(?:vision_projection|text_encoder/head)/{KERNEL}": ("embed", None),
}


class _Tower(Layer):
    """A backbone below this layer, whose output is one vector for each image or text.

    Args:
        fields: fields of the backbone's config.
        pools: True if the backbone pools, as SigLIP's do; False to pool its tokens as CLIP does.

    Attributes:
        kinds: the classes of the backbone, without and with a pooling.

    Weights:
        those of the backbone.
    """

    kinds: ClassVar[tuple[type[Backbone], type[Backbone]]]

    def __init__(self, fields: Mapping[str, Any], pools: bool, **kwargs: Any):
        super().__init__(**kwargs)
        self.fields = dict(fields)
        self.pools = pools

    def build(self, input_shape: Shape) -> None:
        """Makes the backbone, whose variables are named below this layer."""
        make: Any = self.kinds[self.pools]
        self.tower = make(**self.fields, name="tower", dtype=self.dtype_policy)

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        """(B, D)."""
        return (input_shape[0], self.fields["hidden_dim"])


@keras.saving.register_keras_serializable(package="kmodels")
class VisionTower(_Tower):
    """Images to one vector each, by attention pooling or from the class token.

    Call:
        images (B, height, width, C), preprocessed floats -> (B, D).
    """

    kinds = (CLIPVisionEncoder, SigLIPVisionEncoder)

    def call(self, images: Tensor, training: bool = False) -> Any:
        """(B, height, width, C) -> (B, D)."""
        if self.pools:
            return self.tower({"images": images}, training=training)
        return self.tower({"images": images}, training=training, keep=1)[:, 0]


@keras.saving.register_keras_serializable(package="kmodels")
class NaFlexVisionTower(_Tower):
    """Patches of images of any aspect ratio to one vector each; it always pools.

    Call:
        pixel_values (B, N, patch * patch * C), preprocessed floats, spatial_shapes (B, 2) int,
        pixel_attention_mask (B, N) int or None -> (B, D).
    """

    kinds = (SigLIPNaFlexVisionEncoder, SigLIPNaFlexVisionEncoder)

    def call(
        self,
        pixel_values: Tensor,
        spatial_shapes: Tensor,
        pixel_attention_mask: Tensor | None = None,
        training: bool = False,
    ) -> Any:
        """(B, N, patch * patch * C) -> (B, D)."""
        inputs = {VALUES: pixel_values, SHAPES: spatial_shapes, MASK: pixel_attention_mask}
        return self.tower(inputs, training=training)


@keras.saving.register_keras_serializable(package="kmodels")
class TextTower(_Tower):
    """Texts to one vector each, at the last position or at the end token.

    Call:
        token_ids (B, T) int, padding_mask (B, T) int or None -> (B, D).
    """

    kinds = (CLIPTextEncoder, SigLIPTextEncoder)

    def call(
        self, token_ids: Tensor, padding_mask: Tensor | None = None, training: bool = False
    ) -> Any:
        """(B, T) -> (B, D)."""
        inputs = {"token_ids": token_ids, "padding_mask": padding_mask}
        hidden = self.tower(inputs, training=training)
        if isinstance(hidden, dict):
            hidden = hidden["sequence_output"]
        return self.tower.pool(hidden, token_ids)

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        """(B, D)."""
        return (input_shape[0], self.fields["projection_dim" if self.pools else "hidden_dim"])


# Smaller squared lengths are replaced by this one, so that a zero vector has a gradient.
SMALLEST = 1e-24


@keras.saving.register_keras_serializable(package="kmodels")
class SimilarityHead(Layer):
    """Logits of all pairs: cosine similarities times a learned scale, plus an optional bias.

    Args:
        use_bias: adds a learned number to all logits.
        first_scale: initial logarithm of the scale.
        first_bias: initial bias.

    Call:
        image_embeds (B, P), text_embeds (N, P) -> vision_logits (B, N), text_logits (N, B), in
        float32 or wider, independent of the dtype of the vectors.

    Weights:
        logit_scale (), a logarithm; with `use_bias` also logit_bias ().
    """

    def __init__(
        self,
        use_bias: bool = False,
        first_scale: float = 0.0,
        first_bias: float = 0.0,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.use_bias = use_bias
        self.first_scale = first_scale
        self.first_bias = first_bias

    def build(self, image_embeds_shape: Shape, text_embeds_shape: Shape) -> None:
        """Makes the scale and the bias."""
        first = keras.initializers.Constant
        self.logit_scale = self.add_parameter("logit_scale", (), first(self.first_scale))
        self.logit_bias = None
        if self.use_bias:
            self.logit_bias = self.add_parameter("logit_bias", (), first(self.first_bias))

    def call(self, image_embeds: Tensor, text_embeds: Tensor) -> Any:
        """(B, P), (N, P) -> (B, N), (N, B)."""
        images, texts = unit_length(image_embeds), unit_length(text_embeds)
        # einsum, since `matmul` rounds float64 on some backends.
        logits = ops.einsum("ip,jp->ij", images, texts)
        logits = logits * ops.exp(ops.cast(self.logit_scale, logits.dtype))
        if self.logit_bias is not None:
            logits = logits + ops.cast(self.logit_bias, logits.dtype)
        return logits, ops.transpose(logits)

    def compute_output_spec(
        self, image_embeds: keras.KerasTensor, text_embeds: keras.KerasTensor
    ) -> tuple[keras.KerasTensor, keras.KerasTensor]:
        """Returns shapes and dtypes of both."""
        images, texts, dtype = image_embeds.shape[0], text_embeds.shape[0], wide(image_embeds)
        return keras.KerasTensor((images, texts), dtype), keras.KerasTensor((texts, images), dtype)


def unit_length(x: Tensor) -> Any:
    """Returns vectors (..., P) divided by their lengths, in float32 at least."""
    x = ops.cast(x, wide(x))
    squares = ops.sum(ops.square(x), axis=-1, keepdims=True)
    return x * ops.rsqrt(ops.maximum(squares, SMALLEST))


# === Backbones ===


def peft_names(model: keras.Model) -> Sequence[Mapping[str, str]]:
    """See `Backbone.peft_names`."""
    projects = getattr(model, "backbone", model).config.projects
    vision = encoder_rules.names() if projects else SIGLIP
    text = encoder_rules.names() | {"token_embedding": EMBEDDINGS["token_embedding"]}
    text |= {} if projects else {"head": "head"}
    # transformers' model has no prefix in front of its towers.
    towers = (("vision_encoder", clip_siglip.PREFIX, vision), ("text_encoder", PREFIX, text))
    table = {
        f"{tower}/{ours}" if ours else "": f"{prefix}{theirs}"
        for tower, prefix, names in towers
        for ours, theirs in names.items()
    }
    if projects:
        table |= {"vision_projection": "visual_projection", "text_projection": PROJECTION}
    return [table]


# Initial scale and bias: Radford et al. 2021, section 2.5; Zhai et al. 2023, section 3.2.
CLIP_HEAD: dict[str, Any] = {"first_scale": math.log(1 / 0.07)}
SIGLIP_HEAD: dict[str, Any] = {"use_bias": True, "first_scale": math.log(10.0), "first_bias": -10.0}
Encoder = Backbone | Mapping[str, Any]


@keras.saving.register_keras_serializable(package="kmodels")
class TwoTowersBackbone(OptionalInputs, Backbone):
    """An image tower and a text tower; the base of `CLIPBackbone` and `SigLIPBackbone`.

    Args:
        vision_encoder: a backbone, whose config and weights are copied, or the fields of a config.
        text_encoder: the same for the text tower.
        projection_dim: width to which both are projected; None for towers of one width.
        dtype: policy, such as "mixed_bfloat16"; Keras' global one by default.
        name: name of the model.
        naflex: True if images are given as patches, of any aspect ratio; see `TwoTowersConfig`.

    Attributes:
        vision_encoder: the backbone of the images.
        text_encoder: the backbone of the texts.
        token_embedding: None, as in keras-hub; the text tower has it.

    Call:
        {"images": (B, height, width, C) preprocessed floats, "token_ids": (N, T) int,
        "padding_mask": (N, T) int or bool, optional} -> {"vision_logits": (B, N),
        "text_logits": (N, B)}, float32, the logits of each image with each text. With `naflex`,
        "pixel_values", "spatial_shapes" (B, 2) and optionally "pixel_attention_mask" replace
        "images", as in `NaFlexViTBackbone`.

    Raises:
        InputError: for sizes that do not fit together, or a call without images.
    """

    config_class = TwoTowersConfig
    family = "two_towers"
    layout = LAYOUT
    peft_names = staticmethod(peft_names)
    takes = ("token_ids", "padding_mask", "images", *NAMES)
    token_embedding = None

    @of_family
    def __init__(
        self,
        vision_encoder: Encoder,
        text_encoder: Encoder,
        projection_dim: int | None = None,
        dtype: DTypeLike = None,
        name: str | None = None,
        naflex: bool = False,
    ):
        config = self.make_config(
            vision_encoder=_fields(vision_encoder),
            text_encoder=_fields(text_encoder),
            projection_dim=projection_dim,
            naflex=naflex,
        )
        policy = keras.dtype_policies.get(dtype or keras.config.dtype_policy())
        # Projections and head are cheap, and rounding in them is visible in the logits.
        wide = keras.dtype_policies.get(policy.variable_dtype)
        pools = not config.projects

        # === Layers ===
        kind = NaFlexVisionTower if config.naflex else VisionTower
        vision = kind(config.vision_encoder, pools, name="vision_encoder", dtype=policy)
        text = TextTower(config.text_encoder, pools, name="text_encoder", dtype=policy)
        projections: dict[str, Dense] = {}
        if config.projects:
            projections = {
                part: Dense(config.width, use_bias=False, name=f"{part}_projection", dtype=wide)
                for part in ("vision", "text")
            }
        settings = CLIP_HEAD if config.projects else SIGLIP_HEAD
        head = SimilarityHead(**settings, name="similarity", dtype=wide)

        # === Graph ===
        floats = "float64" if policy.compute_dtype == "float64" else "float32"
        if config.naflex:
            width = config.vision.patch_size**2 * config.vision.image_shape[2]
            images = graph_inputs(width, 0, floats)
        else:
            images = {"images": keras.Input(config.vision.image_shape, name="images", dtype=floats)}
        inputs = {
            **images,
            "token_ids": keras.Input((None,), name="token_ids", dtype="int32"),
            "padding_mask": keras.Input((None,), name="padding_mask", dtype="int32", optional=True),
        }
        out = {
            "image_embeds": vision(*images.values()),
            "text_embeds": text(inputs["token_ids"], padding_mask=inputs["padding_mask"]),
        }
        if projections:
            out["image_embeds"] = projections["vision"](out["image_embeds"])
            out["text_embeds"] = projections["text"](out["text_embeds"])
        out["vision_logits"], out["text_logits"] = head(out["image_embeds"], out["text_embeds"])
        outputs = {name: out[name] for name in ("vision_logits", "text_logits")}
        super().__init__(
            config=config, intermediates=out, inputs=inputs, outputs=outputs, name=name
        )

        # === Config ===
        self.projection_dim = projection_dim
        self.naflex = config.naflex
        self.image_inputs = tuple(images)
        self.takes = ("token_ids", "padding_mask", *images)
        self.absent = ("padding_mask", *((MASK,) if config.naflex else ()))
        self.dtype_policy = policy
        for tower, encoder in ((vision.tower, vision_encoder), (text.tower, text_encoder)):
            if isinstance(encoder, Backbone):
                tower.set_weights(encoder.get_weights())

    @classmethod
    def class_of(cls, config: TwoTowersConfig) -> type[Self]:
        """Returns `CLIPBackbone` or `SigLIPBackbone` if `cls` is neither."""
        kinds: Any = (SigLIPBackbone, CLIPBackbone)
        return kinds[config.projects] if cls is TwoTowersBackbone else cls

    @classmethod
    def fits_preset(cls, name: str, fields: Mapping[str, Any]) -> bool:
        """Returns True if the preset's fields make a model of this class."""
        projects = fields.get("projection_dim") is not None
        return cls in (TwoTowersBackbone, CLIPBackbone if projects else SigLIPBackbone)

    def check_inputs(self, inputs: dict[str, Any]) -> None:
        """Raises `InputError` for a call without images."""
        super().check_inputs(inputs)
        wanted = [name for name in self.image_inputs if name != MASK]
        if any(name not in inputs for name in wanted):
            raise InputError(
                f"the model got no images; give {' and '.join(wanted)} beside token_ids, or call "
                "encode_text or get_text_embeddings"
            )

    def intermediates(self, inputs: Tree) -> dict[str, Any]:
        """Returns the vectors of images and texts, and the logits."""
        return super().intermediates(as_tensors(self, inputs))

    @property
    def config(self) -> TwoTowersConfig:
        """The config, with later changes of the vision tower such as `token_merging`."""
        fields = self.vision_encoder.config.to_dict()
        if fields != self._config.vision_encoder:
            self._config = replace(self._config, vision_encoder=fields)
        return self._config

    @config.setter
    def config(self, config: TwoTowersConfig) -> None:
        self._config = config

    @property
    def vision_encoder(self) -> Any:
        """The backbone of the images."""
        return self.get_layer("vision_encoder").tower

    @property
    def text_encoder(self) -> Any:
        """The backbone of the texts."""
        return self.get_layer("text_encoder").tower

    @property
    def blocks(self) -> list[Any]:
        """The blocks of both towers, those of the images first."""
        return [*self.vision_encoder.blocks, *self.text_encoder.blocks]

    def get_vision_embeddings(self, images: Tensor | Mapping[str, Tensor]) -> Any:
        """Returns the vectors of preprocessed images: (B, height, width, C) -> (B, P).

        With `naflex` the argument is the dictionary that the model takes.
        """
        values = [images.get(x) for x in NAMES] if isinstance(images, Mapping) else [images]
        x = self.get_layer("vision_encoder")(*values)
        return self.get_layer("vision_projection")(x) if self.config.projects else x

    def get_text_embeddings(self, token_ids: Tensor, padding_mask: Tensor | None = None) -> Any:
        """Returns the vectors of texts: (N, T) -> (N, P)."""
        x = self.get_layer("text_encoder")(token_ids, padding_mask=padding_mask)
        return self.get_layer("text_projection")(x) if self.config.projects else x


@keras.saving.register_keras_serializable(package="kmodels")
class CLIPBackbone(TwoTowersBackbone):
    """CLIP with both towers; calls are `TwoTowersBackbone`'s.

    Args:
        vision_encoder: a `CLIPVisionEncoder`, or the fields of its config.
        text_encoder: a `CLIPTextEncoder`, or the fields of its config.
        projection_dim: width to which both are projected.
        dtype: policy, such as "mixed_bfloat16"; Keras' global one by default.
        name: name of the model.
        naflex: must be False; a CLIP takes images of one size.

    Raises:
        InputError: without a width, or for sizes that do not fit together.

    Source:
        Radford et al. 2021, arXiv:2103.00020; Transformers' `CLIPModel`.
    """

    def __init__(
        self,
        vision_encoder: Encoder,
        text_encoder: Encoder,
        projection_dim: int,
        dtype: DTypeLike = None,
        name: str | None = None,
        naflex: bool = False,
    ):
        if projection_dim is None:
            raise InputError("projection_dim is None; give a CLIP one, or take SigLIPBackbone")
        super().__init__(vision_encoder, text_encoder, projection_dim, dtype, name, naflex)


@keras.saving.register_keras_serializable(package="kmodels")
class SigLIPBackbone(TwoTowersBackbone):
    """SigLIP or SigLIP 2 with both towers; calls are `TwoTowersBackbone`'s.

    Args:
        vision_encoder: a `SigLIPVisionEncoder`, or the fields of its config.
        text_encoder: a `SigLIPTextEncoder`, or the fields of its config.
        dtype: policy, such as "mixed_bfloat16"; Keras' global one by default.
        name: name of the model.
        projection_dim: must be None; a SigLIP has no projections.
        naflex: True if images are given as patches, of any aspect ratio, as in transformers'
            `Siglip2Model`.

    Raises:
        InputError: for projections, or sizes that do not fit together.

    Source:
        Zhai et al. 2023, arXiv:2303.15343; Tschannen et al. 2025, arXiv:2502.14786; Transformers'
        `SiglipModel`.
    """

    def __init__(
        self,
        vision_encoder: Encoder,
        text_encoder: Encoder,
        dtype: DTypeLike = None,
        name: str | None = None,
        projection_dim: None = None,
        naflex: bool = False,
    ):
        if projection_dim is not None:
            raise InputError(
                f"projection_dim is {projection_dim}; a SigLIP has no projections: leave it out, "
                "or take CLIPBackbone"
            )
        super().__init__(vision_encoder, text_encoder, projection_dim, dtype, name, naflex)


def _fields(encoder: Encoder) -> dict[str, Any]:
    return dict(encoder) if isinstance(encoder, Mapping) else encoder.config.to_dict()
