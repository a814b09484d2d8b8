"""The base of the preprocessors of Gemma 3 and Gemma 4 with images: records, converters, files."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, cast

import keras
import numpy as np

from kmodels import presets
from kmodels.core.errors import InputError, check_whole
from kmodels.core.schema import read_optional, warn_of_unknown
from kmodels.core.types import Data
from kmodels.data.images.any_picture import check_local, open_picture
from kmodels.data.rows import assign
from kmodels.models.blocks.image_converter import ImageConverter
from kmodels.models.blocks.preprocessing import SETTINGS_FILE
from kmodels.models.blocks.preprocessor import CausalLMPreprocessor, text_of
from kmodels.models.blocks.text_preprocessor import one_by_one, rows_of
from kmodels.text import Example, Tokenizer, pack
from kmodels.text.chat_template import Rendered
from kmodels.text.records import PICTURES, has_picture
from kmodels.text.settings import token_text
from kmodels.text.templates import AUTO, Part, Written
from kmodels.text.texts import as_text

# === Files of transformers' processors ===

CONFIG, PROCESSOR, IMAGES = "config.json", "processor_config.json", "preprocessor_config.json"
# Keys of a tokenizer_config.json that may hold the tokens of images, besides the top level.
NESTED = ("extra_special_tokens", "model_specific_special_tokens")
RESAMPLE = {"nearest": 0, "lanczos3": 1, "bilinear": 2, "bicubic": 3}
CHANNELS = 3
STATISTICS = {"image_mean", "image_std"}
# Settings of an image processor that a converter reads, and those that transformers' processors of
# Gemma 3 and 4 do not follow, or that are arguments of single calls.
KNOWN = STATISTICS | {
    *("do_normalize", "do_pan_and_scan", "do_rescale", "do_resize", "image_processor_type"),
    *("image_seq_length", "max_soft_tokens", "pan_and_scan_max_num_crops", "patch_size"),
    *("pan_and_scan_min_crop_size", "pan_and_scan_min_ratio_to_activate", "pooling_kernel_size"),
    *("resample", "rescale_factor", "size"),
    *("_processor_class", "auto_map", "crop_size", "data_format", "default_to_square", "device"),
    *("disable_grouping", "do_center_crop", "do_convert_rgb", "do_pad", "input_data_format"),
    *("pad_size", "processor_class", "return_tensors"),
}


def processor_files(path: Path) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Returns the settings of transformers' processor and of its image processor.

    Both are empty for a directory without the files, or one of kmodels.
    """
    config = read_optional(path / CONFIG)
    if "preprocessor" in config or (path / SETTINGS_FILE).is_file():
        return {}, {}
    whole, images = read_optional(path / PROCESSOR), read_optional(path / IMAGES)
    # Since version 5 one file holds both, and takes precedence over older files.
    nested = whole.get("image_processor")
    if isinstance(nested, Mapping):
        return whole, _stated(path / PROCESSOR, nested)
    return whole, _stated(path / IMAGES, images)


def _stated(file: Path, images: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that are not null, with a number for each channel and side.

    Settings that are not known are logged as a warning.
    """
    warn_of_unknown(file, images, KNOWN)
    settings = {name: value for name, value in images.items() if value is not None}
    if isinstance(size := settings.get("size"), int | list):
        height, width = size if isinstance(size, list) else (size, size)
        settings["size"] = {"height": height, "width": width}
    for name in STATISTICS & settings.keys():
        values = settings[name]
        settings[name] = values = values if isinstance(values, list) else [values] * CHANNELS
        if len(values) != CHANNELS or (name == "image_std" and min(values) <= 0):
            raise InputError(
                f"{file}: {name} is {values}; give {CHANNELS} numbers, and deviations above 0"
            )
    return settings


def kernel_of(images: Mapping[str, Any], usual: str) -> tuple[str | None, list[str]]:
    """Returns the kernel of resizing, by default `usual`, and settings no converter supports."""
    absent = [key for key in ("do_resize", "do_rescale") if images.get(key) is False]
    number = images.get("resample", RESAMPLE[usual])
    kernel = next((key for key, value in RESAMPLE.items() if value == number), None)
    if kernel is None:
        absent.append(f"resample {number}")
    if abs(images.get("rescale_factor", 1 / 255) * 255 - 1) > 1e-6:
        absent.append(f"rescale_factor {images['rescale_factor']}")
    return kernel, absent


def image_tokens(tokenizer: Tokenizer, usual: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Returns the tokens for images by transformers' names; a tokenizer may name others."""
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
        """Returns the image converter of a checkpoint, with `settings` as changed arguments.

        The directory is one written by `save_to_preset` of a model, a preprocessor or a converter,
        or one of transformers with preprocessor_config.json or processor_config.json.

        Raises:
            InputError: for a directory without these files, or a setting that is not supported.
        """
        path = presets.locate(preset)
        model, own = read_optional(path / CONFIG), read_optional(path / SETTINGS_FILE)
        for saved in (model.get("preprocessor"), own.get("config")):
            if isinstance(saved, Mapping) and "image_converter" in saved:
                return cls(**{**saved["image_converter"], **settings})
        if (images := cls.read_files(path).get("image_converter")) is None:
            return super().from_preset(path, **settings)
        return cls(**{**images, **settings})


# === Records ===

# What a part of a message may name its image by.
SOURCES = ("image", "path", "url", "base64")


class Sample(NamedTuple):
    """A record without its images, and these.

    Attributes:
        record: a text, or fields of texts, or messages with {"type": "image"} for each image in
            their content.
        images: images in the order of their places, in any form that `open_picture` reads.
    """

    record: Any
    images: list[Any]


def samples(x: Data, reader: str, marker: str) -> tuple[list[Sample], bool]:
    """Returns records one by one, and whether there was more than one to begin with.

    `reader` is the name of the model, for errors, and `marker` the placeholder of an image in
    texts.
    """
    if isinstance(x, Mapping):
        x, is_batch = rows_of(x)
    elif isinstance(x, list | tuple) and any(isinstance(one, Mapping) for one in x):
        x, is_batch = list(x), True
    else:
        texts, is_batch = one_by_one(x, reader)
        return [Sample(text, []) for text in texts], is_batch
    return [_sample(one, reader, marker) for one in x], is_batch


def _sample(one: object, reader: str, marker: str) -> Sample:
    if not isinstance(one, Mapping):
        return Sample(one_by_one(one, reader)[0][0], [])
    pictures = [picture for name in PICTURES for picture in _several(one.get(name))]
    rest = {
        # tf.data gives a text as an array without axes.
        name: as_text(x)
        if isinstance(x, bytes) or (isinstance(x, np.ndarray) and x.ndim == 0)
        else x
        for name, x in one.items()
        if name not in PICTURES and x is not None
    }
    if "messages" in rest:
        messages, images = parts_of(rest["messages"], pictures, marker)
        return Sample({**rest, "messages": messages}, images)
    if pictures and not rest.keys() & {"prompts", "prompt", "instruction", "text"}:
        # transformers' processor fills in the same if there is no text.
        rest = {"prompts": " ".join([marker] * len(pictures)), **rest}
    record = one_by_one([rest], reader)[0][0]
    if pictures and isinstance(record.get("text"), str) and marker not in record["text"]:
        # A caption, which is learnt behind its images.
        prompt = " ".join([marker] * len(pictures))
        record = {"prompts": prompt, "responses": record["text"]}
    return Sample(record, pictures)


def _several(value: object) -> list[Any]:
    """Returns images that may be none, one, or several."""
    if value is None:
        return []
    if isinstance(value, np.ndarray) and value.dtype.kind == "O":
        value = value.tolist()
    if isinstance(value, list | tuple):
        return list(value)
    shape = getattr(value, "shape", ())
    return list(cast("Any", value)) if len(shape) == 4 else [value]


def parts_of(
    messages: object, images: Sequence[Any], marker: str
) -> tuple[list[dict[str, Any]], list[Any]]:
    """Returns messages without their images, and the images in the order of their places.

    A content is a text with a `marker` for each image, or a list of {"type": "text", "text"} and
    {"type": "image"}, the latter with its image as "image", "path", "url" or "base64", or without.
    The `images` are those of the places that name none, in order. Where no message has a place,
    they stand before the first text of the user, as in TRL.
    """
    if isinstance(messages, np.ndarray):
        messages = messages.tolist()
    if not isinstance(messages, list | tuple):
        raise InputError("field 'messages' is not a list of messages")
    messages = [dict(one) if isinstance(one, Mapping) else one for one in messages]
    contents = [one.get("content") for one in messages if isinstance(one, dict)]
    marked = any(isinstance(content, str) and marker in content for content in contents)
    users = [one for one in messages if isinstance(one, dict) and one.get("role") == "user"]
    if images and users and not marked and not any(map(has_picture, messages)):
        content = users[0].get("content")
        texts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
        users[0]["content"] = [*({"type": "image"} for _ in images), *texts]
    left = list(images)
    all_images: list[Any] = []
    for place, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, str):
            count = min(content.count(marker), len(left))
            all_images += left[:count]
            del left[:count]
        elif isinstance(content, list | tuple):
            message["content"] = [_part(part, place, left, all_images) for part in content]
    # What is left has no place, and is counted beside the markers of the text.
    return messages, all_images + left


def _part(part: object, place: int, left: list[Any], images: list[Any]) -> dict[str, Any]:
    """Returns a part of a message without its image, which moves to `images`."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(part, Mapping) and kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if not isinstance(part, Mapping) or kind != "image":
        said = f"a part of type {kind!r}" if isinstance(part, Mapping) else repr(part)[:40]
        raise InputError(
            f'messages[{place}] has {said}; a part is {{"type": "text", "text": ...}} or '
            '{"type": "image", "image": ...}'
        )
    source = next((name for name in SOURCES if part.get(name) is not None), None)
    if source is None:
        if not left:
            raise InputError(
                f'messages[{place}] has an image without its file; give it as "image" in the '
                'part, or in the list "images" beside the messages'
            )
        images.append(left.pop(0))
        return {"type": "image"}
    picture = part[source]
    if source == "url" and isinstance(picture, str):
        check_local(picture)
    if source == "base64" and isinstance(picture, str) and not picture.startswith("data:"):
        picture = f"data:image/any;base64,{picture}"
    images.append(picture)
    return {"type": "image"}


# === Positions of images in a text ===


def expand(
    written: Written | Rendered, marker: str, soft: str, images: Sequence[str], place: int
) -> Written | Rendered:
    """Returns the text of a template, with the text of an image for each marker.

    `soft` is the text of the token that an image fills, which the record must not contain, and
    `place` the number of the record, for errors.
    """
    text = text_of(written)
    if soft in text and soft != marker:
        raise InputError(
            f"example {place} holds {soft} itself, which an image fills; write {marker} where an "
            "image belongs"
        )
    if (count := text.count(marker)) != len(images):
        raise InputError(
            f"example {place} has {count} {marker} in its text and {len(images)} images; write "
            f"{marker} once for each image"
        )
    if not images:
        return written
    if isinstance(written, Written):
        left = iter(images)
        parts = [Part(_filled(part.text, marker, left), part.learn) for part in written.parts]
        return Written(parts, written.ends)
    pieces = text.split(marker)
    shifts, at, moved = [], 0, 0
    for piece, image in zip(pieces, images, strict=False):
        at += len(piece)
        moved += len(image) - len(marker)
        shifts.append((at, moved))
        at += len(marker)

    def shifted(character: int) -> int:
        return character + max((by for start, by in shifts if start < character), default=0)

    spans = [(shifted(start), shifted(end)) for start, end in written.replies]
    return Rendered(_filled(text, marker, iter(images)), spans)


def _filled(text: str, marker: str, left: Iterator[str]) -> str:
    first, *rest = text.split(marker)
    return first + "".join(next(left) + piece for piece in rest)


# === Symbolic records, inside tf.data ===


def without_images(x: Data) -> tuple[Any, int | None]:
    """Returns symbolic texts without their images, and how many images each of them has.

    The number is None for ragged images, which are as many as the row with the most of them has.
    """
    images = _images(x)
    if not isinstance(x, Mapping) or not images:
        return x, 0
    texts = {name: value for name, value in x.items() if name not in images}
    if not texts:
        raise InputError("a preprocessor in tf.data got images without texts; give prompts too")
    axes = len(keras.tree.flatten(texts)[0].shape)
    count: int | None = 0
    for name, spec in images.items():
        shape = (1, *spec.shape[axes:])[-4:]
        if len(shape) != 4 or len(spec.shape) > axes + 4:
            raise InputError(
                f"{name!r} has shape {tuple(spec.shape)} in tf.data; give (height, width, 3) or "
                "(images, height, width, 3) for each text"
            )
        count = None if count is None or shape[0] is None else count + shape[0]
    return texts, count


def _images(x: Data) -> dict[str, Any]:
    columns = x if isinstance(x, Mapping) else {}
    return {name: columns[name] for name in PICTURES if columns.get(name) is not None}


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
        max_images_per_prompt: largest number of images of a record, not counting crops; chats may
            have any number.
        num_vision_tokens_per_image: tokens that an image or a crop fills.
        **kwargs: see `CausalLMPreprocessor`, as for what is not listed.

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
        length = self._row_length(sequence_length)
        examples = self.encode(records, length)
        x, labels, weights = pack(examples, length, self.tokenizer.pad_token_id)
        rows = assign([len(example.ids) - 1 for example in examples], length)
        return self._completed(x, [[examples[i] for i in row] for row in rows]), labels, weights

    def chat_examples(
        self, chats: Sequence[Sequence[Mapping[str, Any]]], **options: Any
    ) -> list[Example]:
        """Returns token ids and images of chats that the model continues, not padded.

        Chats and options are those of `chat_token_ids`; the parts of a content may be images.
        """
        samples = [Sample(*parts_of(chat, [], self.marker)) for chat in chats]
        written = self._chats_written([one.record for one in samples], **options)
        return self._prompt_examples(samples, written)

    def _records(self, x: Data) -> tuple[list[Any], bool]:
        records, is_batch = samples(x, self.reader, self.marker)
        for place, one in enumerate(records):
            if len(one.images) > self.max_images_per_prompt:
                raise InputError(
                    f"example {place} has {len(one.images)} images; max_images_per_prompt is "
                    f"{self.max_images_per_prompt}: set it higher, or give fewer images"
                )
        return records, is_batch

    def _filled(
        self, samples: Sequence[Sample], written: Sequence[Any]
    ) -> tuple[list[Any], list[list[np.ndarray]]]:
        """Returns texts with the tokens of their images, and the images and crops of each."""
        soft = self.image_tokens["image_token"]
        texts, pictures = [], []
        for place, (one, text) in enumerate(zip(samples, written, strict=True)):
            opened = [
                open_picture(image, f"image {i} of example {place}")
                for i, image in enumerate(one.images)
            ]
            pixels = [self.image_converter.pixels(image) for image in opened]
            images = [self.text_of_image(x) for x in pixels]
            texts.append(expand(text, self.marker, soft, images, place))
            pictures.append([picture for image in pixels for picture in image])
        return texts, pictures

    def _examples(self, records: list[Sample], length: int) -> list[Example]:
        results: list[Example] = []
        written, pictures = self._filled(records, [self._written(one.record) for one in records])
        soft, examples = self.image_token_id, self._encoded(written, length)
        for one, images in zip(examples, pictures, strict=True):
            learn = [x and i != soft for i, x in zip(one.ids, one.learn, strict=True)]
            results.append(Example(one.ids, learn, images))
        return results

    def _prompts(self, records: list[Sample]) -> list[Example]:
        written = [self._written(one.record, reply=False) for one in records]
        return self._prompt_examples(records, written)

    def _prompt_examples(self, samples: list[Sample], written: list[Any]) -> list[Example]:
        texts, pictures = self._filled(samples, written)
        ids = self._prompt_ids(texts)
        return [Example(row, [], images) for row, images in zip(ids, pictures, strict=True)]

    def _completed(
        self, x: dict[str, np.ndarray], rows: Sequence[Sequence[Example]]
    ) -> dict[str, np.ndarray]:
        return x | self.pictures(x["token_ids"], rows)

    def pictures(
        self, token_ids: np.ndarray, rows: Sequence[Sequence[Example]]
    ) -> dict[str, np.ndarray]:
        """Returns the model's inputs for images of rows, and the mask of the tokens that they fill.

        The ids are (B, T) int; the examples of each row are in order. A row that is too short for
        the tokens of its images is refused.
        """
        raise NotImplementedError

    def _inputs_spec(self, x: Data, sequence_length: int | None) -> dict[str, Any]:
        if _images(x) and self.image_converter.do_pan_and_scan:
            # The number of crops depends on the shapes of images.
            raise InputError(
                "images with do_pan_and_scan cannot be preprocessed inside tf.data's map; give fit "
                "the records, or an iterable of batches"
            )
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

        In a directory of transformers, preprocessor_config.json or processor_config.json has the
        settings of images; `settings` are arguments to change.

        Raises:
            InputError: as `TextPreprocessor`, or for a setting of images that is not supported.
        """
        files = cls.converter_class.read_files(presets.locate(preset))
        return super().from_preset(preset, **{**files, **settings})
