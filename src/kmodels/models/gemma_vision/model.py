"""What Gemma 3 and Gemma 4 with images share: config, backbone and Hugging Face directories."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import keras

from kmodels.core.errors import InputError, check_whole
from kmodels.core.types import Tensor
from kmodels.models.blocks import huggingface as decoder
from kmodels.models.blocks.decoder import DecoderBackbone
from kmodels.models.blocks.directories import warn_of_encoder
from kmodels.models.gemma.config import GemmaConfig
from kmodels.models.gemma_vision.preprocessor import ImageTextConverter
from kmodels.weights import LazyArray, Rule, SourceCheckpoint, read_safetensors

# Tensors by name, their rules, and the names of parts that are left out.
Parts = tuple[dict[str, LazyArray], Sequence[Rule], list[str]]


@dataclass(frozen=True)
class ImageTextConfig(GemmaConfig):
    """`GemmaConfig` of a model that reads images.

    Args:
        vocabulary_size: rows of the embedding table. Other fields are those of `GemmaConfig`.
        vision_encoder: arguments of the vision encoder without `output_dim`, which is
            `hidden_dim`; "dtype" only if it differs from the text's.
        image_token_id: id of the token that an image fills.

    Raises:
        InputError: for a model without a vision encoder, or one that is not causal.
    """

    # Complete the errors for a model that is not causal, and one without a vision encoder.
    advice: ClassVar[str] = ""
    encoders: ClassVar[str]
    # Settings of the layer that the text model's config says otherwise, or that are no sizes.
    derived: ClassVar[tuple[str, ...]] = ("output_dim", "name", "trainable")
    vision_encoder: Mapping[str, Any] | None = None
    image_token_id: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("image_token_id", self.image_token_id)
        if not self.is_causal:
            raise InputError(
                "use_bidirectional_attention is True; a model of texts and images is causal, so "
                f"leave it out{self.advice}"
            )
        if self.vision_encoder is None:
            raise InputError(f"vision_encoder is missing; give the arguments of {self.encoders}")
        fields = {name: x for name, x in self.vision_encoder.items() if name not in self.derived}
        object.__setattr__(self, "vision_encoder", fields)

    @property
    def decoder(self) -> GemmaConfig:
        """The config of the text model."""
        return GemmaConfig(**{x.name: getattr(self, x.name) for x in fields(GemmaConfig)})


PLACES = ("vision_indices", "vision_mask")


class ImageTextBackbone(DecoderBackbone):
    """A `DecoderBackbone` with a vision encoder, whose features replace the embeddings of tokens.

    The base of Gemma 3 and Gemma 4 with images. The config's `encoder` makes the vision encoder.

    Attributes:
        image_inputs: names of the inputs of the vision encoder.

    Call:
        The inputs of `DecoderBackbone`, those in `image_inputs`, and "vision_mask" (B, T) int, 1
        for each token that an image fills, or "vision_indices" (B, N) int, the positions of these
        tokens, 0 for padding; names are keras-hub's. Without either, the tokens are those with the
        id `image_token_id`. Without images, or with zero of them (B, 0, ...), the model is a text
        model.
    """

    image_inputs: ClassVar[tuple[str, ...]]
    vision_encoder: keras.layers.Layer
    layer_fields = ("vision_encoder",)

    @classmethod
    def image_symbols(cls, config: Any, dtype: str) -> dict[str, Any]:
        """Returns optional symbolic inputs for `image_inputs`, in the same order."""
        raise NotImplementedError

    def beside_text(
        self, config: Any, policy: keras.DTypePolicy
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, keras.Layer]]:
        """See `DecoderBackbone.beside_text`."""
        encoder = config.encoder(name="vision_encoder", dtype=policy)
        dtype = "float64" if policy.compute_dtype == "float64" else "float32"
        pictures = self.image_symbols(config, dtype)
        mask = keras.Input((None,), name="vision_mask", dtype="int32", optional=True)
        seen = {"features": encoder(*pictures.values()), "vision_mask": mask}
        return {**pictures, "vision_mask": mask}, seen, {"vision_encoder": encoder}

    def seen(self, inputs: dict[str, Any], training: bool | None = False) -> dict[str, Any]:
        """See `DecoderBackbone.seen`: computes features of images and the mask of their tokens."""
        images = [inputs.get(name) for name in self.image_inputs]
        indices, mask = (inputs.get(name) for name in PLACES)
        text = {name: x for name, x in inputs.items() if name not in (*self.image_inputs, *PLACES)}
        if any(x is None or x.shape[1] == 0 for x in images):
            return text
        token_ids = inputs["token_ids"]
        if mask is None:
            mask = self._mask(token_ids, indices)
        features = self.vision_encoder(*images, training=training)
        return {**text, "features": features, "vision_mask": mask}

    def _mask(self, token_ids: Tensor, indices: Tensor | None) -> Any:
        if indices is None:
            is_image = keras.ops.equal(token_ids, self.config.image_token_id)
            return keras.ops.cast(is_image, "int32")
        # The first token of a row never belongs to an image, so 0 is padding.
        places = keras.ops.arange(token_ids.shape[1], dtype="int32")
        matches = keras.ops.equal(keras.ops.expand_dims(indices, -1), places)
        return keras.ops.cast(keras.ops.logical_and(keras.ops.any(matches, 1), places > 0), "int32")

    @classmethod
    def vision_settings(cls, encoder: object, image_size: object = None) -> dict[str, Any]:
        """Returns the settings of a vision encoder: a layer, keras-hub's model, or a mapping.

        "dtype" is only kept in a mapping of settings that Keras did not serialize. `image_size` is
        the side of the images, an argument of keras-hub's backbones, or None.
        """
        if isinstance(encoder, Mapping):
            settings = dict(encoder.get("config", encoder))
        elif hasattr(encoder, "get_config"):
            settings = encoder.get_config()  # type: ignore[attr-defined]
        else:
            raise InputError(
                f"vision_encoder is {encoder!r}; give a vision encoder, or its arguments"
            )
        if not isinstance(encoder, Mapping) or "config" in encoder:
            settings.pop("dtype", None)  # every layer has one, set or not
        if image_size not in (None, (side := settings.get("image_size"))):
            raise InputError(
                f"image_size is {image_size} and that of the vision encoder {side}; leave it out"
            )
        return settings


@dataclass(frozen=True)
class ImageTextFormat:
    """Hugging Face directories of a decoder with a vision encoder, for `Family.formats`.

    Args:
        kind: `model_type` in config.json.
        config_class: config class of the family.
        fields: (path, description) to the fields of the config.
        parts: (tensors, config) to the tensors in use, their rules, and the names of parts that are
            left out, such as an audio encoder.
        converter: image converter of the family.

    Attributes:
        takes: inputs of the model, for the warning about parts that are left out.
    """

    kind: str
    config_class: Callable[..., Any]
    fields: Callable[[Path, dict[str, Any]], dict[str, Any]]
    parts: Callable[[Mapping[str, LazyArray], Any], Parts]
    converter: type[ImageTextConverter]
    takes: ClassVar[str] = "text and images"

    def matches(self, path: Path, description: dict[str, Any]) -> bool:
        """Returns True for a config.json of this kind with a vision encoder."""
        there = description.get("vision_config") is not None
        return path.is_dir() and description.get("model_type") == self.kind and there

    def open_checkpoint(
        self, path: Path, description: dict[str, Any], overrides: dict[str, Any], weights: bool
    ) -> SourceCheckpoint:
        """Reads config, tokenizer and generation settings of a directory, and opens its tensors."""
        backbone, tensors = decoder.with_output_layer(
            path, self.fields(path, description), read_safetensors(path) if weights else {}
        )
        if weights:
            decoder.warn_of_decoder(path, description)
            warn_of_encoder(path, description["vision_config"])
        used, rules, left_out = self.parts(tensors, self.config_class(**backbone))
        tokenizer = decoder.tokenizer_of(path)
        return SourceCheckpoint(
            path=path,
            kind="Hugging Face",
            backbone=backbone,
            task={"generation_config": decoder.generation_config(path, warns=bool(tensors))},
            preprocessor=None if tokenizer is None else tokenizer | self.converter.read_files(path),
            tensors=used,
            rules=rules,
            left_out=left_out,
            takes=self.takes,
        )
