"""What the preprocessors of Gemma 3 and Gemma 4 with images share."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import keras
import numpy as np

from kmodels import presets
from kmodels.core.errors import InputError, check_whole
from kmodels.core.schema import read_json
from kmodels.core.types import Data
from kmodels.data.images.any_picture import open_picture
from kmodels.data.rows import assign
from kmodels.models.blocks.image_converter import ImageConverter
from kmodels.models.blocks.preprocessing import SETTINGS_FILE
from kmodels.models.blocks.preprocessor import CausalLMPreprocessor
from kmodels.models.gemma_vision.records import (
    Sample,
    check_graph,
    expand,
    parts_of,
    samples,
    without_images,
)
from kmodels.text import Example, Tokenizer, pack
from kmodels.text.settings import token_text
from kmodels.text.templates import AUTO

# === Files of transformers' processors ===

CONFIG, PROCESSOR, IMAGES = "config.json", "processor_config.json", "preprocessor_config.json"
# Keys of a tokenizer_config.json that may hold the tokens of images, besides the top level.
NESTED = ("extra_special_tokens", "model_specific_special_tokens")
RESAMPLE = {"nearest": 0, "lanczos3": 1, "bilinear": 2, "bicubic": 3}
CHANNELS = 3


def processor_files(path: Path) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Returns the settings of a processor and of its image processor.

    Args:
        path: directory of transformers. Both are empty for a directory without the files, or one
            of kmodels.
    """
    config = read_json(path / CONFIG) if (path / CONFIG).is_file() else {}
    if "preprocessor" in config or (path / SETTINGS_FILE).is_file():
        return {}, {}
    whole, images = (
        read_json(path / name) if (path / name).is_file() else {} for name in (PROCESSOR, IMAGES)
    )
    # Since version 5 one file holds both, and takes precedence over older files.
    nested = whole.get("image_processor")
    return whole, nested if isinstance(nested, Mapping) else images


def kernel_of(images: Mapping[str, Any], usual: str) -> tuple[str | None, list[str]]:
    """Returns the kernel of resizing, and the settings that no converter supports.

    Args:
        images: settings of the image processor.
        usual: the default kernel.
    """
    absent = [key for key in ("do_resize", "do_rescale") if images.get(key) is False]
    number = images.get("resample", RESAMPLE[usual])
    kernel = next((key for key, value in RESAMPLE.items() if value == number), None)
    if kernel is None:
        absent.append(f"resample {number}")
    if abs(images.get("rescale_factor", 1 / 255) * 255 - 1) > 1e-6:
        absent.append(f"rescale_factor {images['rescale_factor']}")
    return kernel, absent


def image_tokens(tokenizer: Tokenizer, usual: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Returns the texts of a tokenizer's tokens for images, by transformers' names for them.

    Args:
        tokenizer: tokenizer, whose settings may name the tokens.
        usual: default texts of each token.

    Raises:
        InputError: for a token that is not in the vocabulary.
    """
    own = tokenizer.settings
    named = [own, *(own[key] for key in NESTED if isinstance(own.get(key), Mapping))]
    tokens = {}
    for name, texts in usual.items():
        values = [token_text(settings.get(name)) for settings in named]
        there = (
            text
            for text in (*values, *texts)
            if text is not None and tokenizer.core.token_to_id(text) is not None
        )
        text = next(there, None)
        if text is None:
            raise InputError(
                f"the vocabulary has no {' or '.join(texts)}, which images need; use the tokenizer "
                "of a checkpoint with images"
            )
        tokens[name] = text
    return tokens


# === Image converters ===


class ImageTextConverter(ImageConverter):
    """The base of the image converters of Gemma 3 and Gemma 4.

    Attributes:
        do_pan_and_scan: adds crops to images, so that their number is unknown before they are read.
    """

    do_pan_and_scan: bool = False

    def pixels(self, image: np.ndarray) -> np.ndarray:
        """Returns the model's view of an image (H, W, 3), uint8 or float32 from 0 to 255.

        Returns:
            float32 (1 + crops, height, width, 3).
        """
        raise NotImplementedError

    @classmethod
    def of_hub(cls, converter: keras.layers.Layer) -> Self:
        """Returns the converter with the settings of one of keras-hub."""
        raise NotImplementedError

    @classmethod
    def read_files(cls, path: Path) -> dict[str, Any]:
        """Returns the preprocessor's arguments in a directory of transformers.

        Raises:
            InputError: for a setting that is not supported, or a damaged file.
        """
        raise NotImplementedError

    @classmethod
    def from_preset(cls, preset: str | Path, **settings: Any) -> Self:
        """Returns the image converter of a checkpoint.

        Args:
            preset: a directory written by `save_to_preset` of a model, a preprocessor or a
                converter, or one of transformers with preprocessor_config.json or
                processor_config.json.
            **settings: arguments to change.

        Raises:
            InputError: for a directory without these files, or a setting that is not supported.
        """
        path = presets.locate(preset)
        model, own = (
            read_json(path / name) if (path / name).is_file() else {}
            for name in (CONFIG, SETTINGS_FILE)
        )
        for saved in (model.get("preprocessor"), own.get("config")):
            if isinstance(saved, Mapping) and "image_converter" in saved:
                return cls(**{**saved["image_converter"], **settings})
        if (images := cls.read_files(path).get("image_converter")) is None:
            return super().from_preset(path, **settings)
        return cls(**{**images, **settings})


# === Preprocessors ===


class ImageTextLMPreprocessor(CausalLMPreprocessor):
    """Turns texts with images into token ids, pixels, labels and weights; keras-hub's arguments.

    The base of Gemma 3's and Gemma 4's. Ids and pixels are equal to those of transformers'
    processors.

    Args:
        tokenizer: a `kmodels.text.Tokenizer` with the tokens of images, its `to_dict`, or a path.
        image_converter: an image converter, its `to_dict`, one of keras-hub, or None for the
            family's with its defaults.
        sequence_length: tokens of a row, including those of images; may be set later.
        add_start_token: see `CausalLMPreprocessor`.
        add_end_token: see `CausalLMPreprocessor`.
        max_images_per_prompt: largest number of images of a record, not counting crops; chats may
            have any number.
        num_vision_tokens_per_image: tokens that an image or a crop fills.
        template: see `CausalLMPreprocessor`.
        loss_on: see `CausalLMPreprocessor`.
        **kwargs: arguments of `keras.layers.Layer`, such as `name`.

    Attributes:
        converter_class: the family's image converter.
        tokens: default texts of the tokens "boi_token", "image_token" and "eoi_token" of
            transformers' tokenizers.

    Call:
        x: input of `CausalLMPreprocessor`. A record, or columns of records, may have "images", one
            or a list for each, in any form that `open_picture` reads. The marker in the text is the
            position of an image; without text there is one marker for each image. In
            {"images", "text"} the text is a caption, which is learned after the images. In messages
            images are parts of a content, {"type": "image", "image": ...}, or listed in order in
            "images" next to "messages".
        y: None; labels are made from the texts.
        sample_weight: see `CausalLMPreprocessor`.
        sequence_length: replaces the attribute in this call.

        The result is that of `CausalLMPreprocessor` with the inputs of `pictures`. Labels of tokens
        that an image fills have weight 0.

    Raises:
        InputError: as `CausalLMPreprocessor`; for an image that cannot be read, if the numbers of
            markers and images differ, for a row that is too short for its images, or for crops
            inside tf.data.
    """

    converter_class: ClassVar[type[ImageTextConverter]]
    takes_images = True
    tokens: ClassVar[Mapping[str, Sequence[str]]] = {}

    def __init__(
        self,
        tokenizer: Tokenizer | Mapping[str, Any] | str | Path,
        image_converter: ImageTextConverter | Mapping[str, Any] | None = None,
        sequence_length: int = 1024,
        add_start_token: bool = True,
        add_end_token: bool = True,
        max_images_per_prompt: int = 2,
        num_vision_tokens_per_image: int = 256,
        template: str = AUTO,
        loss_on: str = "responses",
        **kwargs: Any,
    ):
        super().__init__(
            tokenizer,
            sequence_length=sequence_length,
            add_start_token=add_start_token,
            add_end_token=add_end_token,
            template=template,
            loss_on=loss_on,
            **kwargs,
        )
        check_whole("max_images_per_prompt", max_images_per_prompt)
        check_whole("num_vision_tokens_per_image", num_vision_tokens_per_image)
        self.image_converter = self._converter(image_converter)
        self.max_images_per_prompt = max_images_per_prompt
        self.num_vision_tokens_per_image = num_vision_tokens_per_image
        self.image_tokens = image_tokens(self.tokenizer, self.tokens)
        self.image_token_id = self.tokenizer.token_to_id(self.image_tokens["image_token"])

    @property
    def marker(self) -> str:
        """Text that marks the position of an image."""
        return self.image_tokens["boi_token"]

    def _converter(self, converter: object) -> Any:
        if converter is None:
            return self.converter_class()
        if isinstance(converter, Mapping):
            if "class_name" in converter:
                return keras.saving.deserialize_keras_object(dict(converter))
            return self.converter_class(**converter)
        if isinstance(converter, ImageTextConverter):
            return converter
        if isinstance(converter, keras.layers.Layer):
            return self.converter_class.of_hub(converter)
        raise InputError(
            f"image_converter is a {type(converter).__name__}; give a "
            f"{self.converter_class.__name__}"
        )

    def text_of_image(self, pixels: np.ndarray) -> str:
        """Returns the text of an image, given the result of the converter's `pixels`."""
        raise NotImplementedError

    def sequence(self, count: int) -> str:
        """Returns the text of one image or crop that fills `count` tokens."""
        soft = self.image_tokens["image_token"] * count
        return f"{self.image_tokens['boi_token']}{soft}{self.image_tokens['eoi_token']}"

    def __call__(self, x: Data, y: Data = None, sample_weight: Data = None, **kwargs: Any) -> Any:
        """Returns inputs of the model for raw data, see the class."""
        check_graph(x, self.image_converter.do_pan_and_scan)
        return super().__call__(x, y, sample_weight, **kwargs)

    def generate_preprocess(self, x: Data, sequence_length: int | None = None) -> dict[str, Any]:
        """Returns inputs for prompts with their images, see `CausalLMPreprocessor`.

        Args:
            x: prompts, or records as of the class.
            sequence_length: tokens of a row.

        Raises:
            InputError: as the class.
        """
        check_graph(x, self.image_converter.do_pan_and_scan)
        return super().generate_preprocess(x, sequence_length)

    def generate_postprocess(self, x: Mapping[str, Any]) -> Any:
        """Returns text of token ids without those of images, see `CausalLMPreprocessor`."""
        ids, mask = np.asarray(x["token_ids"]), np.asarray(x["padding_mask"]).astype(bool)
        return super().generate_postprocess(
            {"token_ids": ids, "padding_mask": mask & (ids != self.image_token_id)}
        )

    def pack(
        self, records: Data, sequence_length: int | None = None
    ) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
        """Returns rows of several examples each, see `CausalLMPreprocessor`.

        The images of a row are those of its examples, in order. All pixels are in memory at once,
        as float32.
        """
        length = sequence_length or self.sequence_length
        examples = self.encode(records, length)
        x, labels, weights = pack(examples, length, self.tokenizer.pad_token_id)
        rows = assign([len(example.ids) - 1 for example in examples], length)
        return self._completed(x, [[examples[i] for i in row] for row in rows]), labels, weights

    def chat_examples(
        self, chats: Sequence[Sequence[Mapping[str, Any]]], **options: Any
    ) -> list[Example]:
        """Returns token ids and images of chats that the model continues, not padded.

        Args:
            chats: see `chat_token_ids`; the parts of a content may be images.
            **options: arguments of `chat_token_ids`.
        """
        samples = [Sample(*parts_of(chat, [], self.marker)) for chat in chats]
        written = self._chats_written([one.record for one in samples], **options)
        return self._prompt_examples(
            written, [self._pixels(one, i) for i, one in enumerate(samples)]
        )

    def _records(self, x: Data) -> tuple[list[Any], bool]:
        records, is_batch = samples(x, self.reader, self.marker)
        for place, one in enumerate(records):
            if len(one.images) > self.max_images_per_prompt:
                raise InputError(
                    f"example {place} has {len(one.images)} images; max_images_per_prompt is "
                    f"{self.max_images_per_prompt}: set it higher, or give fewer images"
                )
        return records, is_batch

    def _pixels(self, sample: Sample, place: int) -> list[np.ndarray]:
        """Returns the converter's `pixels` of each image."""
        name = f"image {{}} of example {place}".format
        pictures = [open_picture(one, name(i)) for i, one in enumerate(sample.images)]
        return [self.image_converter.pixels(picture) for picture in pictures]

    def _expanded(self, written: Sequence[Any], pixels: Sequence[list[np.ndarray]]) -> list[Any]:
        soft = self.image_tokens["image_token"]
        return [
            expand(one, self.marker, soft, [self.text_of_image(x) for x in images], place)
            for place, (one, images) in enumerate(zip(written, pixels, strict=True))
        ]

    def _examples(self, records: list[Sample], length: int) -> list[Example]:
        pixels = [self._pixels(one, place) for place, one in enumerate(records)]
        written = [self._written(one.record) for one in records]
        examples = self._encoded(self._expanded(written, pixels), length)
        soft = self.image_token_id
        return [
            Example(
                one.ids,
                [learn and i != soft for i, learn in zip(one.ids, one.learn, strict=True)],
                _flat(pictures),
            )
            for one, pictures in zip(examples, pixels, strict=True)
        ]

    def _prompts(self, records: list[Sample]) -> list[Example]:
        pixels = [self._pixels(one, place) for place, one in enumerate(records)]
        written = [self._written(one.record, reply=False) for one in records]
        return self._prompt_examples(written, pixels)

    def _prompt_examples(
        self, written: Sequence[Any], pixels: Sequence[list[np.ndarray]]
    ) -> list[Example]:
        ids = self._prompt_ids(self._expanded(written, pixels))
        return [Example(row, [], _flat(images)) for row, images in zip(ids, pixels, strict=True)]

    def _completed(
        self, x: dict[str, np.ndarray], rows: Sequence[Sequence[Example]]
    ) -> dict[str, np.ndarray]:
        return x | self.pictures(x["token_ids"], rows)

    def pictures(
        self, token_ids: np.ndarray, rows: Sequence[Sequence[Example]]
    ) -> dict[str, np.ndarray]:
        """Returns the model's inputs for images of rows, and the mask of the tokens that they fill.

        Args:
            token_ids: (B, T) int.
            rows: examples of each row, in order.

        Raises:
            InputError: for a row that is too short for the tokens of its images.
        """
        raise NotImplementedError

    def _inputs_spec(self, x: Data, sequence_length: int | None) -> dict[str, Any]:
        texts, count = without_images(x)
        specs = super()._inputs_spec(texts, sequence_length)
        rows = specs["token_ids"].shape[:-1]
        size = None if count is None else count * self.num_vision_tokens_per_image
        indices = keras.KerasTensor((*rows, size), "int32")
        more = {"vision_indices": indices, "vision_mask": specs["token_ids"]}
        return {**specs, **self.pictures_spec((*rows, count)), **more}

    def pictures_spec(self, shape: Sequence[int | None]) -> dict[str, keras.KerasTensor]:
        """Returns shapes and dtypes of the inputs for images of shape (..., M)."""
        raise NotImplementedError

    def _settings(self) -> dict[str, Any]:
        return {
            **super()._settings(),
            "image_converter": self.image_converter.to_dict(),
            "max_images_per_prompt": self.max_images_per_prompt,
            "num_vision_tokens_per_image": self.num_vision_tokens_per_image,
        }

    @classmethod
    def from_preset(cls, preset: str | Path, **settings: Any) -> Self:
        """Returns the preprocessor of a directory, see `TextPreprocessor`.

        Args:
            preset: path of a directory. In one of transformers, preprocessor_config.json or
                processor_config.json has the settings of images.
            **settings: arguments to change.

        Raises:
            InputError: as `TextPreprocessor`, or for a setting of images that is not supported.
        """
        files = cls.converter_class.read_files(presets.locate(preset))
        return super().from_preset(preset, **{**files, **settings})


def _flat(pixels: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [picture for image in pixels for picture in image]
