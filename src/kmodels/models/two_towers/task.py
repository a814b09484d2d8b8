"""Zero-shot classification, retrieval and training with an image tower and a text tower."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import keras
import numpy as np

from kmodels import presets
from kmodels.core.errors import InputError, check_choice, check_whole, one_line
from kmodels.core.schema import read_json
from kmodels.core.traced import TracedState
from kmodels.core.types import Data, DTypeLike
from kmodels.data.pipeline.arrays import to_numpy
from kmodels.layers.placement import of_family
from kmodels.models.blocks.inputs import OptionalInputs
from kmodels.models.blocks.preprocessing import SETTINGS_FILE
from kmodels.models.blocks.text_preprocessor import TextPreprocessor, check_same_fields
from kmodels.models.clip import CLIPTokenizer
from kmodels.models.siglip import SigLIPTokenizer
from kmodels.models.two_towers.model import TwoTowersBackbone
from kmodels.models.vit.config import CLIP, HALF
from kmodels.models.vit.naflex.preprocessor import NaFlexViTImageClassifierPreprocessor
from kmodels.models.vit.preprocessor import ViTImageClassifierPreprocessor
from kmodels.task import Compiled, Task
from kmodels.text import Tokenizer
from kmodels.training.losses import CLIPLoss, SigLIPLoss
from kmodels.weights import gather

# === Preprocessor ===

TOKENIZERS: dict[str, Any] = {"clip": CLIPTokenizer, "siglip": SigLIPTokenizer}
LENGTHS = {"clip": 77, "siglip": 64}
STATISTICS = {"clip": CLIP, "siglip": HALF}
IMAGES = ("images", "image")
TEXTS = ("captions", "caption", "prompts", "texts", "text")


@keras.saving.register_keras_serializable(package="kmodels")
class ImageTextPreprocessor(TextPreprocessor):
    """Turns pairs of an image and a text into pixels and token ids.

    Args:
        tokenizer: a `CLIPTokenizer` or `SigLIPTokenizer`, another `kmodels.text.Tokenizer`, its
            `to_dict`, or a path.
        kind: "clip" or "siglip". A SigLIP attends to the whole row, so it gets no mask, and texts
            have no start token.
        image_size: (height, width) in pixels.
        mean: per channel, of pixels in [0, 1]; the default depends on `kind`.
        std: standard deviation per channel; the default depends on `kind`.
        interpolation: kernel of resizing, see `ViTImageClassifierPreprocessor` for this and the
            next five.
        antialias: widens the kernel when images shrink.
        crop_to_aspect_ratio: crops images to the aspect ratio of `image_size`.
        resize_size: size before the crop.
        rounds_center: how the center of the crop is rounded.
        resize_mode: how the aspect ratio is handled.
        sequence_length: tokens of a row; 77 for a CLIP and 64 for a SigLIP by default.
        add_start_token: adds the start token; by default True for a CLIP.
        add_end_token: adds the end token, also to a truncated text.
        patch_size: side of a patch in pixels, for a model with `naflex`.
        max_num_patches: patches of a row. Images then keep their aspect ratio, as in
            `NaFlexViTImageClassifierPreprocessor`, and `image_size` is not used.
        enlarge: enlarges images to fill `max_num_patches`.
        **kwargs: arguments of `keras.layers.Layer`, such as `name`.

    Attributes:
        image_preprocessor: preprocessor of the images.

    Call:
        x: {"images": images, "captions": texts}, also called "image", "caption", "prompts", "text"
            or "texts"; a list of such records; texts alone. Dictionaries with "token_ids" are
            returned unchanged.
        y: None for pairs.
        sample_weight: one number for each pair.

        For pairs the result is ({"images", "token_ids", "padding_mask"}, labels), with zero labels
        (B,), which losses of pairs ignore; with `max_num_patches` "pixel_values",
        "pixel_attention_mask" and "spatial_shapes" replace "images". For texts the result has
        "token_ids" and "padding_mask". A SigLIP gets no mask.

    Raises:
        InputError: for another kind, other columns, or labels of pairs.
    """

    family = "two_towers"
    reader = "the model"

    def __init__(
        self,
        tokenizer: Tokenizer | Mapping[str, Any] | str | Path,
        kind: str = "clip",
        image_size: Sequence[int] = (224, 224),
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        interpolation: str = "bicubic",
        antialias: bool = True,
        crop_to_aspect_ratio: bool = False,
        resize_size: int | Sequence[int] | None = None,
        rounds_center: bool = False,
        resize_mode: str = "stretch",
        sequence_length: int | None = None,
        add_start_token: bool | None = None,
        add_end_token: bool = True,
        patch_size: int | None = None,
        max_num_patches: int | None = None,
        enlarge: bool = True,
        **kwargs: Any,
    ):
        check_choice("kind", kind, TOKENIZERS)
        # `Layer.__init__` has not run yet, and `super().__init__` reads the class.
        object.__setattr__(self, "tokenizer_class", TOKENIZERS[kind])
        starts = kind == "clip" if add_start_token is None else add_start_token
        length = LENGTHS[kind] if sequence_length is None else sequence_length
        super().__init__(tokenizer, length, starts, add_end_token, **kwargs)
        self.kind = kind
        mean = STATISTICS[kind][0] if mean is None else mean
        std = STATISTICS[kind][1] if std is None else std
        images: Any
        if max_num_patches is not None:
            side = 16 if patch_size is None else patch_size
            images = NaFlexViTImageClassifierPreprocessor(
                side, max_num_patches, mean, std, interpolation, enlarge
            )
        else:
            images = ViTImageClassifierPreprocessor(
                *(image_size, mean, std, interpolation, antialias, crop_to_aspect_ratio),
                *(resize_size, rounds_center, resize_mode),
            )
        # Bypasses Keras' __setattr__, which would track it as a sublayer.
        object.__setattr__(self, "image_preprocessor", images)

    def call(
        self,
        x: Data,
        y: Data = None,
        sample_weight: Data = None,
        sequence_length: int | None = None,
    ) -> Any:
        """Returns pixels and token ids, see the class."""
        if isinstance(x, list | tuple) and len(x) and isinstance(x[0], Mapping):
            check_same_fields(x)
            x = {name: [record[name] for record in x] for name in x[0]}
        if not isinstance(x, Mapping) or "token_ids" in x or not set(x) & set(IMAGES):
            return super().call(x, y, sample_weight, sequence_length)
        images, texts = _columns(x)
        if y is not None:
            raise InputError(
                "pairs of image and text have no labels: each text belongs to the image beside it; "
                "leave y out"
            )
        pixels = self._named(self.image_preprocessor(images))
        inputs = {**pixels, **super().call(texts, sequence_length=sequence_length)}
        name, (first, axes) = next(iter(pixels)), self._first(pixels)
        if len(inputs["token_ids"]) != len(inputs[name]) and inputs["token_ids"].ndim == 2:
            raise InputError(
                f"there are {len(inputs[name])} images and {len(inputs['token_ids'])} texts; give "
                "one text for each image"
            )
        labels = np.zeros(first[: len(first) - axes], "int32")
        return keras.utils.pack_x_y_sample_weight(inputs, labels, sample_weight)

    @staticmethod
    def _named(pixels: Any) -> dict[str, Any]:
        return pixels if isinstance(pixels, dict) else {"images": pixels}

    @staticmethod
    def _first(pixels: dict[str, Any]) -> tuple[tuple[Any, ...], int]:
        """Returns the shape of images or patches, and the number of axes after the batch."""
        name = next(iter(pixels))
        return tuple(pixels[name].shape), 3 if name == "images" else 2

    def _padded(self, rows: Sequence[Sequence[int | None]], length: int) -> dict[str, np.ndarray]:
        inputs = super()._padded(rows, length)
        if self.kind == "siglip":
            inputs.pop("padding_mask")
        return inputs

    def compute_output_spec(
        self,
        x: Data,
        y: Data = None,
        sample_weight: Data = None,
        sequence_length: int | None = None,
    ) -> Any:
        """Returns shapes and dtypes of the outputs of `call` for symbolic images and texts."""
        if not isinstance(x, Mapping) or "token_ids" in x or not set(x) & set(IMAGES):
            return super().compute_output_spec(x, y, sample_weight, sequence_length)
        images, texts = _columns(x)
        pixels = self._named(self.image_preprocessor.compute_output_spec(images))
        specs = {**pixels, **self._inputs_spec(texts, sequence_length)}
        first, axes = self._first(pixels)
        labels = keras.KerasTensor(first[: len(first) - axes], "int32")
        return keras.utils.pack_x_y_sample_weight(specs, labels, sample_weight)

    def _inputs_spec(self, x: Data, sequence_length: int | None) -> dict[str, Any]:
        specs = super()._inputs_spec(x, sequence_length)
        if self.kind == "siglip":
            specs.pop("padding_mask")
        return specs

    def _settings(self) -> dict[str, Any]:
        return {"kind": self.kind, **self.image_preprocessor.to_dict(), **super()._settings()}

    @classmethod
    def from_preset(cls, preset: str | Path, **settings: Any) -> Self:
        """Returns the preprocessor of a model's directory, or of one that `save_to_preset` wrote.

        Args:
            preset: path of the directory.
            **settings: arguments to change.

        Raises:
            InputError: for files of another preprocessor, or a model without one.
        """
        path = presets.locate(preset)
        if (file := path / SETTINGS_FILE).is_file():
            saved = read_json(file)
            if saved.get("class_name") != cls.__name__:
                raise InputError(f"{file} holds a {saved.get('class_name')}, not a {cls.__name__}")
            return cls(**{"tokenizer": path, **saved["config"], **settings})
        arguments = presets.preprocessor_settings(cls, preset)
        if "tokenizer" not in {**arguments, **settings}:
            raise InputError(f"{preset} has no tokenizer; give one as tokenizer=")
        return cls(**{**arguments, **settings})


def _columns(x: Mapping[str, Any]) -> tuple[Any, Any]:
    """Returns images and texts.

    Raises:
        InputError: unless there is one column of each and no other.
    """
    images, texts = ([name for name in x if name in names] for names in (IMAGES, TEXTS))
    if len(images) != 1 or len(texts) != 1 or len(x) != 2:
        raise InputError(
            f"the model got the columns {', '.join(x)}; give images and captions, and no others"
        )
    return x[images[0]], x[texts[0]]


# === Task ===

TEMPLATES = ("a photo of a {}.",)
PLACE = "{}"
Texts = str | Sequence[str] | np.ndarray


def _stacked(images: Data) -> np.ndarray:
    try:
        return np.asarray(images, "float32")
    except (TypeError, ValueError) as error:
        raise InputError(
            f"encode_image cannot make an array of the images ({one_line(error)}); attach a "
            "preprocessor, or give floats of one size"
        ) from None


class Retrieved(NamedTuple):
    """The best candidates for each query, best first.

    Attributes:
        indices: (Q, k) int, positions of the candidates.
        scores: (Q, k) float32, their logits.
    """

    indices: np.ndarray
    scores: np.ndarray


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


def _are_texts(x: Data) -> bool:
    """Returns True for texts or token ids, False for images or vectors."""
    if isinstance(x, str | bytes):
        return True
    if isinstance(x, np.ndarray):
        return x.dtype.kind in "OUS" or (x.ndim == 2 and x.dtype.kind in "iu")
    return isinstance(x, Sequence) and len(x) > 0 and isinstance(x[0], str | bytes)


@keras.saving.register_keras_serializable(package="kmodels")
class ImageTextSimilarity(OptionalInputs, Task):
    """Similarity of images and texts by two towers.

    Args:
        backbone: a `CLIPBackbone` or a `SigLIPBackbone`.
        preprocessor: an `ImageTextPreprocessor` for raw images and texts, or None.
        head_dtype: not used; logits are float32 for any dtype of the towers.
        name: name of the model.
        compile: compiles the model with the defaults of `compile` if training starts before that
            call; False lets Keras raise its error instead.
        **kwargs: arguments of `keras.Model`.

    Call:
        inputs of the backbone -> logits (B, N), float32, of each image with each text.

    Example:
        model = kmodels.models.ImageTextSimilarity.from_preset("path/to/hf_directory")
        model.classify(images, ["cat", "dog"], templates=["a photo of a {}."])
        model.fit({"images": images, "captions": captions}, batch_size=64)
    """

    backbone_class = TwoTowersBackbone
    preprocessor_class = ImageTextPreprocessor
    takes = TwoTowersBackbone.takes

    @of_family
    def __init__(
        self,
        backbone: TwoTowersBackbone,
        preprocessor: ImageTextPreprocessor | None = None,
        head_dtype: DTypeLike = None,
        name: str | None = None,
        compile: bool = True,
        **kwargs: Any,
    ):
        # === Graph ===
        inputs = backbone.input
        super().__init__(
            backbone=backbone,
            preprocessor=preprocessor,
            inputs=inputs,
            outputs=backbone(inputs)["vision_logits"],
            name=name,
            **kwargs,
        )

        # === Config ===
        self.head_dtype = keras.dtype_policies.get(head_dtype or backbone.variable_dtype)
        self.compiles_itself = compile
        self.absent = backbone.absent
        self.settings: dict[str, Any] = {}

    def with_defaults(self, arguments: Compiled) -> Compiled:
        """Returns the arguments of `compile`, by default with the loss of the towers' pretraining.

        That is `kmodels.training.CLIPLoss()` of a CLIP and `kmodels.training.SigLIPLoss()` of a
        SigLIP; the optimizer is Adam with a learning rate of 1e-5.
        """
        loss = CLIPLoss if self.backbone.config.projects else SigLIPLoss
        return super().with_defaults(
            arguments.filled(optimizer=lambda: keras.optimizers.Adam(1e-5), loss=loss)
        )

    def encode_image(
        self, images: Data, batch_size: int = 32, normalize: bool = True
    ) -> np.ndarray:
        """Returns one vector for each image.

        Args:
            images: uint8 images (B, H, W, C), or a list of images of any size; without a
                preprocessor, preprocessed floats. For a backbone with `naflex` also the dictionary
                of its inputs.
            batch_size: largest number of images computed at a time.
            normalize: divides the vectors by their length.

        Returns:
            float32 (B, P).
        """
        prepared: Any = images
        if not isinstance(images, dict):
            prepared = getattr(self.preprocessor, "image_preprocessor", _stacked)(images)
        if not isinstance(prepared, dict) and prepared.ndim != 4:
            raise InputError(
                f"encode_image got shape {prepared.shape}; give (batch, height, width, channels), "
                "or a list of images"
            )
        return self._encoded("image", prepared, batch_size, normalize)

    def encode_text(self, texts: Texts, batch_size: int = 32, normalize: bool = True) -> np.ndarray:
        """Returns one vector for each text.

        Args:
            texts: texts, or token ids (N, T); a single text gives one row.
            batch_size: largest number of texts computed at a time.
            normalize: divides the vectors by their length.

        Returns:
            float32 (N, P).

        Raises:
            InputError: for texts if the model has no preprocessor.
        """
        array = np.asarray([texts] if isinstance(texts, str | bytes) else texts)
        if array.dtype.kind not in "iu":
            if self.preprocessor is None:
                raise InputError(
                    "encode_text needs a preprocessor, and the model has none; attach one, or give "
                    "token ids"
                )
            array = self.preprocessor(list(array))["token_ids"]
        array = np.atleast_2d(array)
        self.backbone.check_token_ids(array)
        return self._encoded("text", array, batch_size, normalize)

    def similarity(self, images: Data, texts: Texts, batch_size: int = 32) -> np.ndarray:
        """Returns the logits of each image with each text.

        Args:
            images: images, see `encode_image`.
            texts: texts, see `encode_text`.
            batch_size: largest number of images or texts computed at a time.

        Returns:
            float32 (B, N). Softmax over the texts turns logits of a CLIP into probabilities,
            sigmoid those of a SigLIP.
        """
        vectors = self.encode_image(images, batch_size), self.encode_text(texts, batch_size)
        return self._logits(*vectors)

    def classify(
        self,
        images: Data,
        class_names: Sequence[str],
        templates: str | Sequence[str] = TEMPLATES,
        batch_size: int = 32,
    ) -> np.ndarray:
        """Returns the logits of each image with each class (zero-shot classification).

        The vectors of a class's texts are averaged as in CLIP's paper (section 3.1.4): each is
        normalized to length 1 before, and their mean after.

        Args:
            images: images, see `encode_image`.
            class_names: names of the classes.
            templates: texts about a class, with "{}" for its name.
            batch_size: largest number of images or texts computed at a time.

        Returns:
            float32 (B, classes); their `argmax` is the class.

        Raises:
            InputError: without classes or templates, or for a template without "{}".
        """
        weights = self.class_embeddings(class_names, templates, batch_size)
        return self._logits(self.encode_image(images, batch_size), weights)

    def class_embeddings(
        self,
        class_names: Sequence[str],
        templates: str | Sequence[str] = TEMPLATES,
        batch_size: int = 32,
    ) -> np.ndarray:
        """Returns the vector of each class, of length 1; see `classify`.

        Args:
            class_names: names of the classes.
            templates: texts about a class, with "{}" for its name.
            batch_size: largest number of texts computed at a time.

        Raises:
            InputError: without classes or templates, for a name that is no text, or for a template
                without "{}".
        """
        templates = [templates] if isinstance(templates, str) else list(templates)
        if isinstance(class_names, str) or not len(class_names) or not templates:
            raise InputError(
                f"classify got the classes {class_names!r} and the templates {templates!r}; give a "
                "list of names and at least one template"
            )
        if wrong := [template for template in templates if PLACE not in template]:
            raise InputError(
                f'the template {wrong[0]!r} has no "{PLACE}"; put it where the name goes'
            )
        if wrong := [x for x in class_names if not isinstance(x, str) or not x.strip()]:
            raise InputError(f"a class name is {wrong[0]!r}; give texts that are not empty")
        texts = [x.replace(PLACE, name) for name in class_names for x in templates]
        vectors = self.encode_text(texts, batch_size)
        means = vectors.reshape(len(class_names), len(templates), -1).mean(axis=1)
        return _unit(means)

    def retrieve(
        self, queries: Data | Texts, candidates: Data | Texts, k: int = 10, batch_size: int = 32
    ) -> Retrieved:
        """Returns the best images for texts, or the best texts for images.

        Args:
            queries: texts, see `encode_text`, or images, see `encode_image`.
            candidates: images for texts or texts for images; or their vectors (N, P).
            k: candidates for each query; more than there are gives all of them.
            batch_size: largest number of images or texts computed at a time.

        Returns:
            `indices` and `scores`, each (queries, k), best first.

        Raises:
            InputError: for a `k` below 1, if both are texts or both images, or for vectors of
                another width.
        """
        check_whole("k", k)
        from_texts = _are_texts(queries)
        if from_texts == _are_texts(candidates):
            kind = "texts" if from_texts else "images"
            raise InputError(
                f"retrieve got {kind} for {kind}; give texts for images, or the reverse"
            )
        encode: Any = (self.encode_image, self.encode_text)
        first = encode[from_texts](queries, batch_size)
        if isinstance(candidates, np.ndarray) and candidates.ndim == 2:
            if candidates.shape[1] != first.shape[1]:
                raise InputError(
                    f"candidates have shape {candidates.shape}; give vectors (N, {first.shape[1]})"
                )
            second = _unit(candidates)
        else:
            second = encode[not from_texts](candidates, batch_size)
        scores = self._logits(first, second)
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        return Retrieved(order, np.take_along_axis(scores, order, axis=1))

    def _logits(self, images: np.ndarray, texts: np.ndarray) -> np.ndarray:
        head = self.backbone.get_layer("similarity")
        scale = np.exp(float(to_numpy(keras.ops.convert_to_tensor(head.logit_scale))))
        bias = 0.0
        if head.logit_bias is not None:
            bias = float(to_numpy(keras.ops.convert_to_tensor(head.logit_bias)))
        return np.asarray(images @ texts.T * scale + bias, "float32")

    def _encoded(self, what: str, x: Data, batch_size: int, normalize: bool) -> np.ndarray:
        check_whole("batch_size", batch_size)
        gather.check_callable(self, f"encode_{what}")
        vectors = np.zeros((0, self.backbone.config.width), "float32")
        rows: Any = next(iter(x.values())) if isinstance(x, dict) else x
        if len(rows):
            vectors = self._encoder(what).predict(x, batch_size=batch_size, verbose=0)
        vectors = np.asarray(vectors, "float32")
        return _unit(vectors) if normalize else vectors

    def _encoder(self, what: str) -> keras.Model:
        backbone = self.backbone
        state = TracedState(backbone)
        cached = vars(self).get("_encoders", (None, {}))
        if cached[0] != state:
            cached = (state, {})
            # Bypasses Keras' __setattr__, which would track the models as parts of this one.
            object.__setattr__(self, "_encoders", cached)
        if what not in cached[1]:
            names = backbone.image_inputs if what == "image" else ("token_ids",)
            symbols = {name: backbone.input[name] for name in names}
            inputs: Any = {
                name: keras.Input(x.shape[1:], name=name, dtype=x.dtype)
                for name, x in symbols.items()
            }
            inputs = inputs if len(names) > 1 else inputs[names[0]]
            encoder = (
                backbone.get_vision_embeddings if what == "image" else backbone.get_text_embeddings
            )
            cached[1][what] = keras.Model(inputs, encoder(inputs))
        return cached[1][what]

    @property
    def gives_logits(self) -> bool:
        """False: the logits are of pairs, not of classes."""
        return False
