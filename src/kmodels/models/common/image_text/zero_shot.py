"""Vectors of images and texts, how alike they are, and the classes and images they find."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from kmodels.core.errors import InputError, check_whole
from kmodels.core.traced import TracedState
from kmodels.core.types import Data
from kmodels.data.pipeline.batch import to_numpy
from kmodels.weights import gather

TEMPLATES = ("a photo of a {}.",)
PLACE = "{}"
Texts = str | Sequence[str] | np.ndarray


class Retrieved(NamedTuple):
    """The candidates that go best with each query, best first.

    Attributes:
        indices: (Q, k) int, places of the candidates.
        scores: (Q, k) float32, their logits.
    """

    indices: np.ndarray
    scores: np.ndarray


class ZeroShot(keras.Model):
    """Gives a model of two towers `classify`, `retrieve` and what they are made of."""

    preprocessor: Any
    backbone: Any

    def encode_image(
        self, images: Data, batch_size: int = 32, normalize: bool = True
    ) -> np.ndarray:
        """Returns one vector for each image.

        Args:
            images: uint8 images (B, H, W, C), or a list of images of any size; without a
                preprocessor, floats as the backbone takes them. Of a backbone with `naflex`, also
                the dictionary that it takes.
            batch_size: largest number of images computed at a time.
            normalize: divides the vectors by their length.

        Returns:
            float32 (B, P).
        """
        raw = not isinstance(images, dict)
        prepared: Any = images
        if raw:
            prepared = getattr(self.preprocessor, "image_preprocessor", np.asarray)(images)
        if isinstance(prepared, dict):
            return self._encoded("image", prepared, batch_size, normalize)
        if prepared.ndim != 4:
            raise InputError(
                f"encode_image got shape {prepared.shape}; give (batch, height, width, channels), "
                "or a list of images"
            )
        return self._encoded("image", prepared, batch_size, normalize)

    def encode_text(self, texts: Texts, batch_size: int = 32, normalize: bool = True) -> np.ndarray:
        """Returns one vector for each text.

        Args:
            texts: texts, or token ids (N, T); a text alone gives one row.
            batch_size: largest number of texts computed at a time.
            normalize: divides the vectors by their length.

        Returns:
            float32 (N, P).

        Raises:
            InputError: for texts where the model has no preprocessor.
        """
        array = np.asarray([texts] if isinstance(texts, str | bytes) else texts)
        if array.dtype.kind not in "iu":
            if self.preprocessor is None:
                raise InputError(
                    "encode_text needs a preprocessor, and the model has none; attach one, or give "
                    "token ids"
                )
            array = self.preprocessor(list(array))["token_ids"]
        self.check_token_ids(array)
        return self._encoded("text", array, batch_size, normalize)

    def similarity(self, images: Data, texts: Texts, batch_size: int = 32) -> np.ndarray:
        """Returns the logits of each image with each text.

        Args:
            images: as of `encode_image`.
            texts: as of `encode_text`.
            batch_size: largest number of either computed at a time.

        Returns:
            float32 (B, N). Softmax over the texts makes probabilities of a CLIP's, sigmoid of a
            SigLIP's.
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
        """Returns the logits of each image with each class, whose names alone are given.

        The vectors of a class's texts are averaged, as in CLIP's paper (section 3.1.4): each is
        divided by its length before, and the mean after.

        Args:
            images: as of `encode_image`.
            class_names: names of the classes.
            templates: texts about a class, in which "{}" stands for its name.
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
            class_names: see there.
            templates: see there.
            batch_size: see there.

        Raises:
            InputError: as of `classify`.
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
        texts = [x.replace(PLACE, str(name)) for name in class_names for x in templates]
        vectors = self.encode_text(texts, batch_size)
        means = vectors.reshape(len(class_names), len(templates), -1).mean(axis=1)
        return _unit(means)

    def retrieve(
        self, queries: Data | Texts, candidates: Data | Texts, k: int = 10, batch_size: int = 32
    ) -> Retrieved:
        """Finds the images that go best with texts, or the texts that go best with images.

        Args:
            queries: texts, as of `encode_text`, or images, as of `encode_image`.
            candidates: the other of both; or vectors (N, P) that one of them gave before.
            k: candidates for each query, at most as many as there are.
            batch_size: largest number of images or texts computed at a time.

        Returns:
            `indices` and `scores`, each (queries, k), best first.

        Raises:
            InputError: for a `k` below 1, or two of a kind.
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
        found = np.zeros((0, self.backbone.config.width), "float32")
        rows: Any = next(iter(x.values())) if isinstance(x, dict) else x
        if len(rows):
            found = self._encoder(what).predict(x, batch_size=batch_size, verbose=0)
        found = np.asarray(found, "float32")
        return _unit(found) if normalize else found

    def _encoder(self, what: str) -> keras.Model:
        """Returns a model of one tower alone, made again where the backbone has changed."""
        backbone = self.backbone
        state = TracedState(backbone)
        held = vars(self).get("_encoders", (None, {}))
        if held[0] != state:
            held = (state, {})
            # Around Keras' __setattr__, which would take the models for parts of this one.
            object.__setattr__(self, "_encoders", held)
        if what not in held[1]:
            names = backbone.image_inputs if what == "image" else ("token_ids",)
            given = {name: backbone.input[name] for name in names}
            inputs: Any = {
                name: keras.Input(x.shape[1:], name=name, dtype=x.dtype)
                for name, x in given.items()
            }
            inputs = inputs if len(names) > 1 else inputs[names[0]]
            made = (
                backbone.get_vision_embeddings if what == "image" else backbone.get_text_embeddings
            )
            held[1][what] = keras.Model(inputs, made(inputs))
        return held[1][what]


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


def _are_texts(x: Data) -> bool:
    """Returns whether these are texts or token ids, and not images or vectors."""
    if isinstance(x, str | bytes):
        return True
    if isinstance(x, np.ndarray):
        return x.dtype.kind in "OUS" or (x.ndim == 2 and x.dtype.kind in "iu")
    return isinstance(x, Sequence) and len(x) > 0 and isinstance(x[0], str | bytes)
