"""Which patches speak for a class or a text: Grad-CAM over tokens."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from kmodels import transforms
from kmodels.core.errors import InputError
from kmodels.core.types import Data, Tensor
from kmodels.models.blocks.encoder_block import EncoderInfo
from kmodels.models.interpret.view import View, array, view_of
from kmodels.models.two_towers import ImageTextSimilarity, TwoTowersBackbone
from kmodels.models.vit import ViTImageClassifier

# What is asked for: nothing, a class or one for each image, texts or their ids, or a function.
Target = None | int | str | Sequence[Any] | np.ndarray | Callable[[Any], Any]


def grad_cam(
    model: keras.Layer, images: Data, target: Target = None, layer: int | str = -1
) -> np.ndarray:
    """Returns which patches speak for a class or a text.

    The gradient of the score by the tokens of a layer, averaged over the patches, weighs the
    channels of those tokens; what is below zero counts as zero.

    Args:
        model: a classifier, or a model of two towers; with a function as target a backbone too.
        images: as the model's `predict` takes them.
        target: of a classifier a class, or one for each image; None for the class with the largest
            output. Of two towers a text, or one for each image, or token ids (1 or B, T). A
            function takes what the model gives, of a backbone tokens (B, T, D) or what it pools,
            and returns one score for each image, (B,).
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
    found = (weights * array(tokens)[:, view.prefix :]).sum(-1)
    return view.maps(np.maximum(found, 0.0))


def _cut(view: View, pixels: Tensor, info: EncoderInfo, layer: int | str) -> tuple[Any, Any, Any]:
    """Returns what comes into a layer, the tokens to look at, and what continues from both."""
    steps, blocks = view.steps(), view.tower.blocks
    if isinstance(layer, str):
        names = [step.name for step in steps if step.name in view.tower.stages][1:]
        if layer not in names:
            raise InputError(f"layer is {layer!r}; choose one of {', '.join(names)}, or a number")
        at = [step.name for step in steps].index(layer) + 1
        tokens = view.walk(pixels, steps[:at], info)
        return None, tokens, lambda _, tokens: view.walk(tokens, steps[at:], info)
    if not -len(blocks) <= layer < len(blocks):
        raise InputError(f"layer is {layer}; the model has the blocks 0 to {len(blocks) - 1}")
    block = blocks[layer]
    at = steps.index(block)
    x = view.walk(pixels, steps[:at], info)

    def rest(x: Tensor, tokens: Tensor) -> Any:
        return view.walk(block.after_norm(x, tokens, info), steps[at + 1 :], info)

    return x, block.attention_norm(x), rest


def _score(view: View, target: Target, batch: int) -> Callable[[Any], Any]:
    """Returns what makes one number for each image of the tokens behind the last block."""
    model: Any = view.model
    backbone = getattr(model, "backbone", model)
    is_texts = isinstance(backbone, TwoTowersBackbone) and not callable(target)
    if is_texts:
        head = _of_texts(view, backbone, _texts(model, target, batch))
    elif isinstance(model, ViTImageClassifier):
        head = model.head
    else:
        head = _pooled(view)
    if callable(target):
        return lambda tokens: target(head(tokens))
    if not is_texts and not (isinstance(model, ViTImageClassifier) and model.num_classes):
        raise InputError(
            f"{type(model).__name__} gives no classes; give a target that is a function of what it "
            "gives, one score for each image"
        )
    return head if is_texts else lambda tokens: _of_class(head(tokens), target)


def _of_class(outputs: Tensor, target: Target) -> Any:
    batch, classes = outputs.shape
    if target is None:
        chosen = keras.ops.argmax(outputs, axis=-1)
    else:
        given = np.asarray(target)
        fits = given.dtype.kind in "iu" and given.shape in ((), (batch,))
        if not fits or given.min(initial=0) < 0 or given.max(initial=0) >= classes:
            raise InputError(
                f"target is {target!r}; give a class from 0 to {classes - 1}, or one for each of "
                f"the {batch} images"
            )
        chosen = keras.ops.convert_to_tensor(np.broadcast_to(given, (batch,)).astype("int32"))
    return keras.ops.sum(outputs * keras.ops.one_hot(chosen, classes, dtype=outputs.dtype), -1)


def _pooled(view: View) -> Callable[[Any], Any]:
    """Returns what makes of tokens what a tower of two gives for the score, or a backbone."""
    if view.pool is not None:
        return view.pool
    pools = isinstance(getattr(view.model, "backbone", view.model), TwoTowersBackbone)
    return (lambda tokens: tokens[:, 0]) if pools else lambda tokens: tokens


def _texts(model: ImageTextSimilarity | TwoTowersBackbone, target: object, batch: int) -> Any:
    """Returns the vectors (1 or B, P) of the texts of a target."""
    if target is None:
        raise InputError("grad_cam of two towers needs a target: a text, or one for each image")
    given = np.asarray(target)
    is_ids = given.dtype.kind in "iu"
    if is_ids:
        given = np.atleast_2d(given)
    if isinstance(model, ImageTextSimilarity):
        found = model.encode_text(given if is_ids else list(np.atleast_1d(given)), normalize=False)
    elif is_ids:
        found = model.get_text_embeddings(keras.ops.convert_to_tensor(given))
    else:
        raise InputError(
            f"{type(model).__name__} has no tokenizer; give token ids (1 or B, T) as target, or an "
            "ImageTextSimilarity with a preprocessor"
        )
    if len(found) not in (1, batch):
        raise InputError(
            f"target holds {len(found)} texts for {batch} images; give one, or one for each image"
        )
    return keras.ops.convert_to_tensor(found)


def _of_texts(view: View, backbone: TwoTowersBackbone, texts: Tensor) -> Callable[[Any], Any]:
    pooled = _pooled(view)

    def score(tokens: Tensor) -> Any:
        x = pooled(tokens)
        if backbone.config.projects:
            x = backbone.get_layer("vision_projection")(x)
        logits, _ = backbone.get_layer("similarity")(x, texts)
        return logits[:, 0] if texts.shape[0] == 1 else keras.ops.diagonal(logits)

    return score
