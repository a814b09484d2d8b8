"""Images and texts to what a causal model takes that sees images."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import keras
import numpy as np

from kmodels import presets
from kmodels.core.errors import InputError, check_whole
from kmodels.core.types import Data
from kmodels.data.images.any_picture import open_picture
from kmodels.data.packing import assign
from kmodels.models.common.image_text import transformers_files
from kmodels.models.common.image_text.batches import picture_arrays
from kmodels.models.common.image_text.pan_and_scan import PanAndScanConverter
from kmodels.models.common.image_text.patch_converter import PatchConverter
from kmodels.models.common.image_text.places import expand
from kmodels.models.common.image_text.records import Sample, parts_of, samples
from kmodels.models.common.image_text.symbolic import check_graph, without_images
from kmodels.models.common.preprocessor import CausalLMPreprocessor
from kmodels.text import Example, Tokenizer, pack
from kmodels.text.templates import AUTO

Converter = PanAndScanConverter | PatchConverter


class ImageTextLMPreprocessor(CausalLMPreprocessor):
    """Turns texts with images into token ids, pixels, labels and weights; keras-hub's arguments.

    The base of each family's own, which names its tokens and what is written around an image. Ids
    and pixels are those of transformers' processor.

    Args:
        tokenizer: see `CausalLMPreprocessor`.
        image_converter: a `PanAndScanConverter`, what its `to_dict` gives, keras-hub's, or None for
            the family's with its defaults.
        sequence_length: tokens of a row, those of images included; may be set later.
        add_start_token: see `CausalLMPreprocessor`.
        add_end_token: see `CausalLMPreprocessor`.
        max_images_per_prompt: largest number of images of a record, crops not counted; chats may
            hold any number.
        num_vision_tokens_per_image: tokens that an image or a crop fills.
        template: see `CausalLMPreprocessor`.
        loss_on: see `CausalLMPreprocessor`.
        **kwargs: of `keras.layers.Layer`, such as `name`.

    Attributes:
        converter_class: the family's image converter.
        files: reads its arguments in a directory of transformers.
        tokens: for each of the tokens "boi_token", "image_token" and "eoi_token" of transformers'
            tokenizers, its usual texts.

    Call:
        x: what `CausalLMPreprocessor` takes; a record, or columns of them, may hold "images", one
            or a list for each, in any form that `open_picture` reads. In the text
            <start_of_image> stands where an image belongs; without any text there is one for each.
            Where the text is a caption, {"images", "text"}, it is learnt behind them. In messages
            images are parts of a content, {"type": "image", "image": ...}, or in "images" beside
            the messages in their order.
        y: None; labels are made from the texts.
        sample_weight: see `CausalLMPreprocessor`.
        sequence_length: in place of the one set.

        It gives what `CausalLMPreprocessor` does, with "images" (B, M, height, width, 3) float32,
        "vision_indices" (B, M * num_vision_tokens_per_image) int32 and "vision_mask" (B,
        sequence_length) int32 in the dictionary, see `picture_arrays`. M is the largest number of
        images and crops of a row. Labels that an image fills weigh 0.

    Raises:
        InputError: as `CausalLMPreprocessor`; for an image that cannot be read, more or fewer
            places than images, a row that is too short for its images, or in tf.data crops.
    """

    converter_class: ClassVar[type[Converter]]
    takes_images = True
    files = staticmethod(transformers_files.read)
    tokens: ClassVar[Mapping[str, Sequence[str]]] = {}

    def __init__(
        self,
        tokenizer: Tokenizer | Mapping[str, Any] | str | Path,
        image_converter: Converter | Mapping[str, Any] | None = None,
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
        self.image_tokens = transformers_files.image_tokens(self.tokenizer, self.tokens)
        self.image_token_id = self.tokenizer.token_to_id(self.image_tokens["image_token"])

    @property
    def marker(self) -> str:
        """Text that stands where an image belongs."""
        return self.image_tokens["boi_token"]

    def _converter(self, given: object) -> Any:
        if given is None:
            return self.converter_class()  # type: ignore[call-arg]
        if isinstance(given, Mapping):
            if "class_name" in given:
                return keras.saving.deserialize_keras_object(dict(given))
            return self.converter_class(**given)
        if isinstance(given, keras.layers.Layer) and not isinstance(given, Converter):
            return self.converter_class.of_hub(given)
        if not isinstance(given, Converter):
            raise InputError(
                f"image_converter is a {type(given).__name__}; give a "
                f"{self.converter_class.__name__}"
            )
        return given

    def text_of_image(self, pixels: np.ndarray) -> str:
        """Returns what stands in a text for what the converter's `pixels` gave of an image."""
        raise NotImplementedError

    def sequence(self, count: int) -> str:
        """Returns the tokens of one image or crop, which fills so many."""
        soft = self.image_tokens["image_token"] * count
        return f"{self.image_tokens['boi_token']}{soft}{self.image_tokens['eoi_token']}"

    def __call__(self, x: Data, y: Data = None, sample_weight: Data = None, **kwargs: Any) -> Any:
        """Makes inputs of the model from raw data, see the class."""
        check_graph(x, self.image_converter.do_pan_and_scan)
        return super().__call__(x, y, sample_weight, **kwargs)

    def generate_preprocess(self, x: Data, sequence_length: int | None = None) -> dict[str, Any]:
        """Returns inputs for prompts, as `CausalLMPreprocessor` does, with those of their images.

        Args:
            x: see there; records as of the class.
            sequence_length: see there.

        Returns:
            What the class gives before labels, for each prompt.

        Raises:
            InputError: as the class, and as there.
        """
        check_graph(x, self.image_converter.do_pan_and_scan)
        return super().generate_preprocess(x, sequence_length)

    def generate_postprocess(self, x: Mapping[str, Any]) -> Any:
        """Returns text of token ids, see `CausalLMPreprocessor`; what images fill is left out."""
        ids, mask = np.asarray(x["token_ids"]), np.asarray(x["padding_mask"]).astype(bool)
        return super().generate_postprocess(
            {"token_ids": ids, "padding_mask": mask & (ids != self.image_token_id)}
        )

    def pack(
        self, records: Data, sequence_length: int | None = None
    ) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
        """Returns rows of several examples each, see `CausalLMPreprocessor`.

        The images of a row are those of its examples, one example after another. All pixels are
        held at once, as float32.
        """
        length = sequence_length or self.sequence_length
        examples = self.encode(records, length)
        x, labels, weights = pack(examples, length, self.tokenizer.pad_token_id)
        rows = assign([len(example.ids) - 1 for example in examples], length)
        return self._completed(x, [[examples[i] for i in row] for row in rows]), labels, weights

    def chat_examples(
        self, chats: Sequence[Sequence[Mapping[str, Any]]], **options: Any
    ) -> list[Example]:
        """Returns chats whose next message is the model's as token ids and images, not padded.

        Args:
            chats: see `chat_token_ids`; a content may have images among its parts.
            **options: of `chat_token_ids`.
        """
        found = [Sample(*parts_of(chat, [], self.marker)) for chat in chats]
        written = self._chats_written([one.record for one in found], **options)
        return self._prompt_examples(written, [self._pixels(one, i) for i, one in enumerate(found)])

    def _records(self, x: Data) -> tuple[list[Any], bool]:
        found, is_batch = samples(x, self.reader, self.marker)
        for place, one in enumerate(found):
            if len(one.images) > self.max_images_per_prompt:
                raise InputError(
                    f"example {place} has {len(one.images)} images; max_images_per_prompt is "
                    f"{self.max_images_per_prompt}: set it higher, or give fewer images"
                )
        return found, is_batch

    def _pixels(self, sample: Sample, place: int) -> list[np.ndarray]:
        """Returns what the model sees of each image, see the converter's `pixels`."""
        name = f"image {{}} of example {place}".format
        pictures = [open_picture(one, name(i)) for i, one in enumerate(sample.images)]
        return [self.image_converter.pixels(picture) for picture in pictures]

    def _expanded(self, written: Sequence[Any], pixels: Sequence[list[np.ndarray]]) -> list[Any]:
        soft = self.image_tokens["image_token"]
        return [
            expand(one, self.marker, soft, [self.text_of_image(x) for x in found], place)
            for place, (one, found) in enumerate(zip(written, pixels, strict=True))
        ]

    def _examples(self, records: list[Sample], length: int) -> list[Example]:
        pixels = [self._pixels(one, place) for place, one in enumerate(records)]
        written = [self._written(one.record) for one in records]
        found = self._encoded(self._expanded(written, pixels), length)
        soft = self.image_token_id
        return [
            Example(
                one.ids,
                [learn and i != soft for i, learn in zip(one.ids, one.learn, strict=True)],
                _flat(pictures),
            )
            for one, pictures in zip(found, pixels, strict=True)
        ]

    def _prompts(self, records: list[Sample]) -> list[Example]:
        pixels = [self._pixels(one, place) for place, one in enumerate(records)]
        written = [self._written(one.record, reply=False) for one in records]
        return self._prompt_examples(written, pixels)

    def _prompt_examples(
        self, written: Sequence[Any], pixels: Sequence[list[np.ndarray]]
    ) -> list[Example]:
        ids = self._prompt_ids(self._expanded(written, pixels))
        return [Example(row, [], _flat(found)) for row, found in zip(ids, pixels, strict=True)]

    def _completed(
        self, x: dict[str, np.ndarray], rows: Sequence[Sequence[Example]]
    ) -> dict[str, np.ndarray]:
        return x | self.pictures(x["token_ids"], rows)

    def pictures(
        self, token_ids: np.ndarray, rows: Sequence[Sequence[Example]]
    ) -> dict[str, np.ndarray]:
        """Returns the arrays of images of rows, and which of their tokens (B, T) these fill."""
        size, per_image = self.image_converter.size, self.num_vision_tokens_per_image
        return picture_arrays(token_ids, rows, self.image_token_id, per_image, size)

    def _inputs_spec(self, x: Data, sequence_length: int | None) -> dict[str, Any]:
        texts, count = without_images(x)
        found = super()._inputs_spec(texts, sequence_length)
        rows = found["token_ids"].shape[:-1]
        size = None if count is None else count * self.num_vision_tokens_per_image
        indices = keras.KerasTensor((*rows, size), "int32")
        more = {"vision_indices": indices, "vision_mask": found["token_ids"]}
        return {**found, **self.pictures_spec((*rows, count)), **more}

    def pictures_spec(self, shape: Sequence[int | None]) -> dict[str, keras.KerasTensor]:
        """Returns shapes and dtypes of the arrays of so many images (..., M)."""
        whole = (*shape, *self.image_converter.size, 3)
        return {"images": keras.KerasTensor(whole, "float32")}

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
            preset: see there, or a directory as transformers writes it, whose
                preprocessor_config.json or processor_config.json has the settings of images.
            **settings: arguments to change.

        Raises:
            InputError: as there, or for a setting of images that is not here.
        """
        return super().from_preset(preset, **{**cls._described(preset), **settings})

    @classmethod
    def _described(cls, preset: str | Path) -> dict[str, Any]:
        return cls.files(presets.locate(preset), cls.converter_class.__name__)


def _flat(pixels: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [picture for image in pixels for picture in image]
