"""An image tower and a text tower with the logits of all their pairs, in keras-hub's words."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

import keras

from kmodels.core.errors import InputError
from kmodels.core.types import DTypeLike, Tensor, Tree
from kmodels.layers import Dense
from kmodels.layers.layout_family import of_family
from kmodels.models.common.image_text.similarity_head import SimilarityHead
from kmodels.models.common.inputs import OptionalInputs, as_tensors
from kmodels.models.two_towers.config import TwoTowersConfig
from kmodels.models.two_towers.sharding import LAYOUT
from kmodels.models.two_towers.towers import NaFlexVisionTower, TextTower, VisionTower
from kmodels.models.two_towers.weights import peft
from kmodels.models.vit.naflex.model import MASK, NAMES, graph_inputs
from kmodels.task import Backbone

# Scale and bias at the start: Radford et al. 2021, section 2.5; Zhai et al. 2023, section 3.2.
CLIP_HEAD: dict[str, Any] = {"first_scale": math.log(1 / 0.07)}
SIGLIP_HEAD: dict[str, Any] = {"use_bias": True, "first_scale": math.log(10.0), "first_bias": -10.0}
Encoder = Backbone | Mapping[str, Any]


@keras.saving.register_keras_serializable(package="kmodels")
class TwoTowersBackbone(OptionalInputs, Backbone):
    """An image tower and a text tower; the base of `CLIPBackbone` and `SigLIPBackbone`.

    Args:
        vision_encoder: a backbone, or the fields of its config. Of a backbone the sizes and the
            weights are taken over; it stays what it is.
        text_encoder: likewise.
        projection_dim: width to which both are projected; None for towers of one width.
        dtype: policy, such as "mixed_bfloat16"; Keras' global one by default.
        name: name of the model.
        naflex: whether the images come as patches, of any aspect ratio; see `TwoTowersConfig`.

    Attributes:
        vision_encoder: the backbone of the images.
        text_encoder: the backbone of the texts.

    Call:
        {"images": (B, height, width, C) preprocessed floats, "token_ids": (N, T) int,
        "padding_mask": (N, T) int or bool, which may be left out} -> {"vision_logits": (B, N),
        "text_logits": (N, B)}, float32: how well each image goes with each text. With `naflex`,
        "pixel_values", "spatial_shapes" (B, 2) and, where wanted, "pixel_attention_mask" stand for
        "images", as of `NaFlexViTBackbone`.

    Raises:
        InputError: for sizes that do not fit together, or a call without images.
    """

    config_class = TwoTowersConfig
    family = "two_towers"
    layout = LAYOUT
    peft_names = staticmethod(peft.names)
    takes = ("token_ids", "padding_mask", "images", *NAMES)

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
        self.check(config)
        policy = keras.dtype_policies.get(dtype or keras.config.dtype_policy())
        # As in embedders: what is made of the vectors is cheap, and rounding it shows.
        wide = keras.dtype_policies.get(policy.variable_dtype)
        pools = not config.projects

        # === Layers ===
        named = {"name": "vision_encoder", "dtype": policy}
        vision: VisionTower | NaFlexVisionTower = (
            NaFlexVisionTower(config.vision_encoder, **named)
            if config.naflex
            else VisionTower(config.vision_encoder, pools, **named)
        )
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
        for tower, given in ((vision.tower, vision_encoder), (text.tower, text_encoder)):
            if isinstance(given, Backbone):
                tower.set_weights(given.get_weights())

    @classmethod
    def class_of(cls, config: TwoTowersConfig) -> type[Self]:
        """Returns `CLIPBackbone` or `SigLIPBackbone` where nobody says which."""
        kinds: Any = (SigLIPBackbone, CLIPBackbone)
        return kinds[config.projects] if cls is TwoTowersBackbone else cls

    @classmethod
    def fits_preset(cls, name: str, fields: Mapping[str, Any]) -> bool:
        """Returns those of the class."""
        return cls is TwoTowersBackbone or cls is cls.class_of_fields(fields)

    @classmethod
    def class_of_fields(cls, fields: Mapping[str, Any]) -> type:
        """Returns the class of a model with these fields."""
        return SigLIPBackbone if fields.get("projection_dim") is None else CLIPBackbone

    @classmethod
    def check(cls, config: TwoTowersConfig) -> None:
        """Raises `InputError` for a config of another class."""

    def check_inputs(self, inputs: dict[str, Any]) -> None:
        """Raises `InputError` for a call without images."""
        wanted = [name for name in self.image_inputs if name != MASK]
        if any(name not in inputs for name in wanted):
            raise InputError(
                f"the model got no images; give {' and '.join(wanted)} beside token_ids, or call "
                "encode_text or get_text_embeddings"
            )

    def intermediates(self, inputs: Tree) -> dict[str, Any]:
        """Vectors of images and texts as the towers give them, and the logits."""
        return super().intermediates(as_tensors(self, inputs))

    @property
    def config(self) -> TwoTowersConfig:
        """The config with what was set on the images' tower since, such as `token_merging`."""
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

    @property
    def token_embedding(self) -> Any:
        """The table of the texts."""
        return self.text_encoder.token_embedding

    def get_vision_embeddings(self, images: Tensor | Mapping[str, Tensor]) -> Any:
        """Returns the vectors of preprocessed images: (B, height, width, C) -> (B, P).

        With `naflex` they are the dictionary that the call takes.
        """
        given = [images.get(x) for x in NAMES] if isinstance(images, Mapping) else [images]
        x = self.get_layer("vision_encoder")(*given)
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
        naflex: False; a CLIP takes images of one size.

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
        super().__init__(vision_encoder, text_encoder, projection_dim, dtype, name, naflex)

    @classmethod
    def check(cls, config: TwoTowersConfig) -> None:
        """Raises `InputError` for a SigLIP."""
        if not config.projects:
            raise InputError("projection_dim is None; give a CLIP one, or take SigLIPBackbone")


@keras.saving.register_keras_serializable(package="kmodels")
class SigLIPBackbone(TwoTowersBackbone):
    """SigLIP or SigLIP 2 with both towers; calls are `TwoTowersBackbone`'s.

    Args:
        vision_encoder: a `SigLIPVisionEncoder`, or the fields of its config.
        text_encoder: a `SigLIPTextEncoder`, or the fields of its config.
        dtype: policy, such as "mixed_bfloat16"; Keras' global one by default.
        name: name of the model.
        projection_dim: None; a SigLIP has no projections.
        naflex: whether the images come as patches, of any aspect ratio, as in the SigLIP 2 that
            transformers calls `Siglip2Model`.

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
        super().__init__(vision_encoder, text_encoder, projection_dim, dtype, name, naflex)

    @classmethod
    def check(cls, config: TwoTowersConfig) -> None:
        """Raises `InputError` for a CLIP."""
        if config.projects:
            raise InputError(
                f"projection_dim is {config.projection_dim}; a SigLIP has no projections: leave it "
                "out, or take CLIPBackbone"
            )


def _fields(encoder: Encoder) -> dict[str, Any]:
    return dict(encoder) if isinstance(encoder, Mapping) else encoder.config.to_dict()
