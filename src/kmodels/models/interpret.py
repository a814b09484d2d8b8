"""Visual explanations of a ViT: attention maps, rollout, Grad-CAM and patch similarity.

Each function takes a classifier, a backbone of any kind, or CLIP or SigLIP with both towers, and
images as the model's `predict` takes them. It returns NumPy arrays, maps at the grid of the
patches, which `overlay` draws over the images. The models are not changed: they run without
dropout and with all patches, and attention weights are computed for these functions only.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import keras
import numpy as np
from numpy.typing import ArrayLike

from kmodels import transforms
from kmodels.core import keras_internals
from kmodels.core.errors import InputError, check_choice, check_number
from kmodels.core.types import Data, Tensor, Tree
from kmodels.data.pipeline.arrays import to_numpy
from kmodels.models.blocks.encoder_block import NO_INFO, EncoderInfo
from kmodels.models.gemma_vision.gemma3_encoder import Gemma3VisionEncoder
from kmodels.models.two_towers.model import TwoTowersBackbone
from kmodels.models.two_towers.task import ImageTextSimilarity
from kmodels.models.vit.classifier import ViTImageClassifier
from kmodels.models.vit.fewer_tokens import PatchDropout
from kmodels.models.vit.layers import Pooling
from kmodels.models.vit.model import ViTBackbone
from kmodels.models.vit.segmentation.masks import resized

__all__ = [
    "attention_maps",
    "attention_rollout",
    "grad_cam",
    "overlay",
    "patch_similarity",
    "rollout",
]


@dataclass(frozen=True)
class View:
    """A model, and the ViT in it that reads the images.

    Args:
        model: as the user gave it.
        tower: its ViT.
        pooling: how tokens are pooled, as in `ViTImageClassifier`.
        pool: the layer with the attention of a "map" head, else None.
    """

    model: keras.Layer
    tower: ViTBackbone
    pooling: str
    pool: Pooling | None = None

    @property
    def prefix(self) -> int:
        """Tokens in front of the patches."""
        return self.tower.config.num_prefix_tokens

    def pixels(self, images: Data) -> Any:
        """Returns images (B, height, width, C) as the ViT takes them, by the model's preprocessor.

        Raises:
            InputError: for one image alone, or images of another size than the model's.
        """
        preprocessor = getattr(self.model, "preprocessor", None)
        preprocessor = getattr(preprocessor, "image_preprocessor", preprocessor)
        if preprocessor is not None:
            images = preprocessor(images)
        pixels: Any = np.asarray(images) if isinstance(images, list | tuple) else images
        wanted = self.tower.config.image_shape
        if tuple(pixels.shape[1:]) != wanted or not len(pixels):
            raise InputError(
                f"images have the shape {tuple(pixels.shape)}; give (batch, "
                f"{', '.join(map(str, wanted))}), or raw images to a model with a preprocessor"
            )
        (tensor,) = keras_internals.standardized(self.tower, self.given(pixels))
        return tensor

    def given(self, images: Tree) -> Tree:
        """Returns images in the structure that the ViT's graph has."""
        return {self.tower.input_name: images} if self.tower.named_inputs else images

    def steps(self) -> list[Any]:
        """Returns the layers of the ViT from images to tokens, outside of training."""
        return [step for step in self.tower.steps if not isinstance(step, Pooling | PatchDropout)]

    def walk(self, x: Tensor, steps: Sequence[keras.Layer], info: EncoderInfo = NO_INFO) -> Any:
        """Returns the output of these layers, one after the other, for images or tokens."""
        for step in steps:
            x = step(x, info=info) if step in self.tower.blocks else step(x)
        return x

    def maps(self, rows: np.ndarray) -> np.ndarray:
        """Returns values (B, P) of the patches as float32 maps (B, rows, columns)."""
        return rows.reshape(len(rows), *self.tower.config.grid).astype("float32")


def view_of(model: keras.Layer) -> View:
    """Returns the `View` of a model.

    Raises:
        InputError: for a model without a ViT.
    """
    if isinstance(model, ViTImageClassifier):
        pool = model.get_layer("pooling") if model.pooling == "map" else None
        return View(model, model.backbone, model.pooling, pool)
    tower: Any = getattr(model, "backbone", model)
    if isinstance(tower, TwoTowersBackbone):
        tower = tower.vision_encoder
    elif isinstance(tower, Gemma3VisionEncoder):
        tower = tower.tower
    if not isinstance(tower, ViTBackbone):
        raise InputError(
            f"{type(model).__name__} has no ViT to look inside; give a ViTImageClassifier, a "
            "ViTBackbone, or CLIP or SigLIP with both towers"
        )
    if isinstance(pool := tower.steps[-1], Pooling):
        return View(model, tower, "map", pool)
    return View(model, tower, "token" if tower.config.use_class_token else "gap")


def array(x: Tensor) -> np.ndarray:
    """Returns a tensor of floats as float64."""
    return np.asarray(to_numpy(keras.ops.cast(x, "float32")), "float64")


FUSIONS: dict[str, Callable[..., Any]] = {"mean": np.mean, "max": np.max, "min": np.min}


def attention_maps(model: keras.Layer, images: Data) -> list[np.ndarray]:
    """Returns the attention weights of each block.

    Args:
        model: a classifier, a backbone, or a model of two towers.
        images: as the model's `predict` takes them.

    Returns:
        One float32 array (B, N, T, T) for each block and each of its N heads: from the query
        (third axis) to the key. The T tokens are class token, distillation token, registers and
        patches, as far as the model has them.

    Raises:
        InputError: for a model without a ViT, or images that do not fit.
    """
    view = view_of(model)
    return _maps(view, view.pixels(images))


def _maps(view: View, pixels: Tensor) -> list[np.ndarray]:
    maps = view.tower.attention_maps(view.given(pixels))
    return [np.asarray(to_numpy(weights), "float32") for weights in maps]


def rollout(
    maps: Sequence[np.ndarray], head_fusion: str = "mean", discard_ratio: float = 0.0
) -> np.ndarray:
    """Returns how much of each token reaches each other token through the attention of all blocks.

    The heads of a block are fused, the identity is averaged in for the residual connection, rows
    are scaled to a sum of 1, and the matrices of all blocks are multiplied.

    Args:
        maps: one array (B, N, T, T) for each block, of `attention_maps`.
        head_fusion: "mean" of the heads, "max" or "min".
        discard_ratio: share of the fused weights of each block and image, the least ones, that
            count as 0.

    Returns:
        float32 (B, T, T), from the last block's token (second axis) to the first block's.

    Raises:
        InputError: for another fusion, or a share out of range.

    Source:
        Abnar and Zuidema 2020, arXiv:2005.00928, section 3; fusions and discarding are those of
        Gildenblat's vit-explain.
    """
    check_choice("head_fusion", head_fusion, FUSIONS)
    check_number("discard_ratio", discard_ratio, least=0, below=1)
    shapes = [np.shape(weights) for weights in maps]
    ends = [(len(x), *x[:1], *x[2:]) for x in shapes]
    if not shapes or ends != [(4, *shapes[0][:1], *shapes[0][-1:] * 2)] * len(ends):
        raise InputError(
            f"maps have the shapes {shapes}; give one array (B, N, T, T) for each block, as "
            "attention_maps returns them"
        )
    result = None
    for weights in maps:
        fused = FUSIONS[head_fusion](np.asarray(weights, "float64"), axis=1)
        flat = fused.reshape(len(fused), -1)
        if count := int(flat.shape[1] * discard_ratio):
            least = np.argpartition(flat, count - 1, axis=1)[:, :count]
            np.put_along_axis(flat, least, 0.0, axis=1)
        fused = 0.5 * flat.reshape(fused.shape) + 0.5 * np.eye(fused.shape[-1])
        fused /= fused.sum(-1, keepdims=True)
        result = fused if result is None else fused @ result
    return np.asarray(result, "float32")


def attention_rollout(
    model: keras.Layer,
    images: Data,
    head_fusion: str = "mean",
    discard_ratio: float = 0.0,
    query: Sequence[int] | None = None,
) -> np.ndarray:
    """Returns the contribution of each patch to the pooled tokens, by attention rollout.

    Args:
        model: a classifier, a backbone, or a model of two towers.
        images: as the model's `predict` takes them.
        head_fusion: as in `rollout`.
        discard_ratio: as in `rollout`.
        query: (row, column) of a patch, to get the rollout from this patch. None for the pooled
            tokens: the class token, the mean of all patches, or the tokens weighted by the
            attention of a "map" head, averaged over its heads.

    Returns:
        float32 maps (B, rows, columns); the rest to a sum of 1 belongs to other tokens.

    Raises:
        InputError: see `rollout` and `attention_maps`; a query outside of the grid.

    Example:
        maps = attention_rollout(model, images, discard_ratio=0.9)
        Image.fromarray(overlay(images[0], maps[0]))
    """
    view = view_of(model)
    pixels = view.pixels(images)
    shares = rollout(_maps(view, pixels), head_fusion, discard_ratio).astype("float64")
    if query is not None:
        rows = shares[:, view.prefix + place_of(view, query)]
    elif (pool := view.pool) is not None:
        tokens = view.walk(pixels, view.steps(), view.tower.info(pixels))
        weights = array(pool.attention.probabilities(*pool.query_and_seen(tokens)))
        read = weights.mean(1)[:, 0]  # (B, S), of the last tokens
        rows = np.einsum("bs,bst->bt", read, shares[:, -read.shape[1] :])
    elif view.pooling in ("token", "token_gap", "distilled"):
        rows = shares[:, 0]
    else:
        rows = shares[:, view.prefix :].mean(1)
    return view.maps(rows[:, view.prefix :])


def place_of(view: View, query: Sequence[int]) -> int:
    """Returns the number of the patch at (row, column).

    Raises:
        InputError: for a place outside of the grid.
    """
    rows, columns = view.tower.config.grid
    place: Sequence[Any] = list(query) if isinstance(query, Iterable) else []
    whole = len(place) == 2 and all(isinstance(x, Integral) for x in place)
    if not whole or not (0 <= place[0] < rows and 0 <= place[1] < columns):
        raise InputError(
            f"query is {query}; give (row, column) of a patch, below ({rows}, {columns})"
        )
    return int(place[0]) * columns + int(place[1])


# What is asked for: nothing, a class or one for each image, texts or their ids, or a function.
Target = None | int | str | Sequence[Any] | np.ndarray | Callable[[Any], Any]


def grad_cam(
    model: keras.Layer, images: Data, target: Target = None, layer: int | str = -1
) -> np.ndarray:
    """Returns the evidence of each patch for a class or a text (Grad-CAM).

    The gradient of the score by the tokens of a layer, averaged over the patches, weighs the
    channels of those tokens; negative values become zero.

    Args:
        model: a classifier, or a model of two towers; with a function as target a backbone too.
        images: as the model's `predict` takes them.
        target: of a classifier a class, or one for each image; None for the class with the largest
            output. Of two towers a text, or one for each image, or token ids (1 or B, T). A
            function takes the output of the model, of a backbone its tokens (B, T, D) or pooled
            features, and returns one score for each image, (B,).
        layer: block in front of whose attention the tokens are looked at, after its norm; -1 is
            the last one, as Gildenblat's pytorch-grad-cam advises. Or the name of a step, as in
            `ViTBackbone.feature_model`, for tokens as it leaves them, such as "block_3".

    Returns:
        float32 maps (B, rows, columns), 0 or more.

    Raises:
        InputError: for a model without a score, a target or a layer that does not fit.

    Source:
        Selvaraju et al. 2017, arXiv:1610.02391, equations 1 and 2.
    """
    view = view_of(model)
    pixels = view.pixels(images)
    score = _score(view, target, len(pixels))
    info = view.tower.info(pixels)
    x, tokens, rest = _cut(view, pixels, info, layer)

    def total(tokens: Tensor) -> Any:
        return keras.ops.sum(keras.ops.cast(score(rest(x, tokens)), "float32"))

    slopes = array(transforms.grad(total)(tokens))[:, view.prefix :]
    weights = slopes.mean(1, keepdims=True)
    heat = (weights * array(tokens)[:, view.prefix :]).sum(-1)
    return view.maps(np.maximum(heat, 0.0))


def _cut(view: View, pixels: Tensor, info: EncoderInfo, layer: int | str) -> tuple[Any, Any, Any]:
    """Returns the input of a layer, the tokens to explain, and the function of both after it."""
    steps, blocks = view.steps(), view.tower.blocks
    if isinstance(layer, str):
        names = [step.name for step in steps if step.name in view.tower.stages][1:]
        if layer not in names:
            raise InputError(f"layer is {layer!r}; choose one of {', '.join(names)}, or a number")
        at = [step.name for step in steps].index(layer) + 1
        tokens = view.walk(pixels, steps[:at], info)
        return None, tokens, lambda _, tokens: view.walk(tokens, steps[at:], info)
    is_number = isinstance(layer, Integral) and not isinstance(layer, bool)
    if not is_number or not -len(blocks) <= layer < len(blocks):
        raise InputError(f"layer is {layer}; the model has the blocks 0 to {len(blocks) - 1}")
    block = blocks[layer]
    at = steps.index(block)
    x = view.walk(pixels, steps[:at], info)

    def rest(x: Tensor, tokens: Tensor) -> Any:
        return view.walk(block.after_norm(x, tokens, info), steps[at + 1 :], info)

    return x, block.attention_norm(x), rest


def _score(view: View, target: Target, batch: int) -> Callable[[Any], Any]:
    """Returns a function from the tokens after the last block to one score for each image."""
    model: Any = view.model
    backbone = getattr(model, "backbone", model)

    def head(tokens: Tensor) -> Any:
        if isinstance(model, ViTImageClassifier):
            return model.head(tokens)
        if view.pool is not None:
            return view.pool(tokens)
        return tokens[:, 0] if isinstance(backbone, TwoTowersBackbone) else tokens

    if callable(target):
        return lambda tokens: target(head(tokens))
    if isinstance(model, ViTImageClassifier) and model.num_classes:
        return lambda tokens: _of_class(head(tokens), target)
    if not isinstance(backbone, TwoTowersBackbone):
        raise InputError(
            f"{type(model).__name__} has no logits of classes; give a target that is a function "
            "from the output of the model to one score for each image"
        )
    texts = _texts(model, target, batch)

    def of_texts(tokens: Tensor) -> Any:
        x = head(tokens)
        if backbone.config.projects:
            x = backbone.get_layer("vision_projection")(x)
        logits, _ = backbone.get_layer("similarity")(x, texts)
        return logits[:, 0] if texts.shape[0] == 1 else keras.ops.diagonal(logits)

    return of_texts


def _of_class(outputs: Tensor, target: Target) -> Any:
    batch, classes = outputs.shape
    if target is None:
        numbers = keras.ops.argmax(outputs, axis=-1)
    else:
        asked = np.asarray(target)
        fits = asked.dtype.kind in "iu" and asked.shape in ((), (batch,))
        if not fits or asked.min(initial=0) < 0 or asked.max(initial=0) >= classes:
            raise InputError(
                f"target is {target!r}; give a class from 0 to {classes - 1}, or one for each of "
                f"the {batch} images"
            )
        numbers = keras.ops.convert_to_tensor(np.broadcast_to(asked, (batch,)).astype("int32"))
    return keras.ops.sum(outputs * keras.ops.one_hot(numbers, classes, dtype=outputs.dtype), -1)


def _texts(model: ImageTextSimilarity | TwoTowersBackbone, target: object, batch: int) -> Any:
    """Returns the vectors (1 or B, P) of the texts of a target."""
    if target is None:
        raise InputError("grad_cam of two towers needs a target: a text, or one for each image")
    texts = np.asarray(target)
    is_ids = texts.dtype.kind in "iu"
    if is_ids:
        texts = np.atleast_2d(texts)
    if isinstance(model, ImageTextSimilarity):
        strings = texts if is_ids else list(np.atleast_1d(texts))
        vectors = model.encode_text(strings, normalize=False)
    elif is_ids:
        vectors = model.get_text_embeddings(keras.ops.convert_to_tensor(texts))
    else:
        raise InputError(
            f"{type(model).__name__} has no tokenizer; give token ids (1 or B, T) as target, or an "
            "ImageTextSimilarity with a preprocessor"
        )
    if len(vectors) not in (1, batch):
        raise InputError(
            f"target holds {len(vectors)} texts for {batch} images; give one, or one for each image"
        )
    return keras.ops.convert_to_tensor(vectors)


def patch_similarity(
    model: keras.Layer,
    images: Data,
    query: Sequence[int],
    others: Data = None,
    layer: str | None = None,
) -> np.ndarray:
    """Returns the cosine similarity of a patch to all patches, by their tokens.

    Args:
        model: a classifier, a backbone, or a model of two towers.
        images: as the model's `predict` takes them.
        query: (row, column) of the patch in each of `images`.
        others: images whose patches are compared: as many, or one for all; None for the same
            images.
        layer: name of the step whose tokens are compared, as in `ViTBackbone.feature_model`; None
            for the last tokens, after the final norm.

    Returns:
        float32 maps (B, rows, columns) from -1 to 1.

    Raises:
        InputError: for a model without a ViT, or arguments that do not fit.

    Example:
        maps = patch_similarity(backbone, images[:1], (4, 7), others=images[1:2])
    """
    view = view_of(model)
    place = place_of(view, query)
    patches = _patches(view, images, layer)
    seen = patches if others is None else _patches(view, others, layer)
    if len(seen) not in (1, len(patches)):
        raise InputError(
            f"there are {len(patches)} images and {len(seen)} others; give as many, or one"
        )
    return view.maps(np.clip((seen * patches[:, place, None]).sum(-1), -1.0, 1.0))


def _patches(view: View, images: Data, layer: str | None) -> np.ndarray:
    """Returns the tokens of the patches (B, P, D), each of length 1."""
    steps = view.steps()
    if layer is not None:
        names = [step.name for step in steps]
        if layer not in view.tower.stages or layer not in names:
            known = [name for name in names if name in view.tower.stages]
            raise InputError(f"layer is {layer!r}; choose one of {', '.join(known)}")
        steps = steps[: names.index(layer) + 1]
    pixels = view.pixels(images)
    tokens = array(view.walk(pixels, steps, view.tower.info(pixels)))
    # The first step gives patches alone.
    patches = tokens if len(steps) == 1 else tokens[:, view.prefix :]
    return patches / np.maximum(np.linalg.norm(patches, axis=-1, keepdims=True), 1e-12)


# From little to much, black over violet and orange to yellow: Matplotlib's "inferno", eight steps.
COLORS = (
    *((0, 0, 4), (40, 11, 84), (101, 21, 110), (159, 42, 99)),
    *((212, 72, 66), (245, 125, 21), (250, 193, 39), (252, 255, 164)),
)


def overlay(image: ArrayLike, map: ArrayLike, alpha: float = 0.6) -> np.ndarray:
    """Returns an image with a map over it.

    Args:
        image: uint8 or floats (height, width, C) or (height, width), or a batch of them
            (B, height, width, C); C is 1 or 3. Floats are stretched from their least to their
            largest value, so that normalised images do too.
        map: (rows, columns), or (B, rows, columns); stretched in the same way, and resized to the
            image by bilinear interpolation.
        alpha: share of the map in the mixture; 1 shows the map alone.

    Returns:
        uint8 (height, width, 3), or (B, height, width, 3): `PIL.Image.fromarray` takes it.

    Raises:
        InputError: for shapes that do not fit, or a share out of range.
    """
    picture, values = np.asarray(image), np.asarray(map, "float64")
    check_number("alpha", alpha, least=0, most=1)
    if picture.ndim == 4 and values.ndim == 3 and len(picture) == len(values):
        return np.stack([overlay(x, y, alpha) for x, y in zip(picture, values, strict=True)])
    if picture.ndim == 2:
        picture = picture[..., None]
    if values.size == 0 or not np.isfinite(values).all():
        raise InputError(f"the map has the shape {values.shape}; give finite numbers, at least one")
    if picture.ndim != 3 or picture.shape[-1] not in (1, 3) or values.ndim != 2:
        raise InputError(
            f"the image has the shape {np.shape(image)} and the map {values.shape}; give "
            "(height, width, 1 or 3) and (rows, columns), or batches of both"
        )
    height, width = picture.shape[:2]
    if picture.dtype != np.uint8:
        picture = _stretched(picture.astype("float64")) * 255
    large = resized(_stretched(values)[..., None], (height, width))[..., 0]
    places = np.linspace(0, 1, len(COLORS))
    colors = np.stack([np.interp(large, places, channel) for channel in np.transpose(COLORS)], -1)
    return np.round((1 - alpha) * picture + alpha * colors).astype("uint8")


def _stretched(x: np.ndarray) -> np.ndarray:
    reach = x.max() - x.min()
    return (x - x.min()) / reach if reach else np.zeros_like(x)
