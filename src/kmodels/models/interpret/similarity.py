"""Which patches are alike, in one image or in two."""

from collections.abc import Sequence

import keras
import numpy as np

from kmodels.core.errors import InputError
from kmodels.core.types import Data
from kmodels.models.interpret.attention import place_of
from kmodels.models.interpret.view import View, array, view_of


def patch_similarity(
    model: keras.Layer,
    images: Data,
    query: Sequence[int],
    others: Data = None,
    layer: str | None = None,
) -> np.ndarray:
    """Returns how alike a patch is to all patches, by the cosine of their tokens.

    Args:
        model: a classifier, a backbone, or a model of two towers.
        images: as the model's `predict` takes them.
        query: (row, column) of the patch in each of `images`.
        others: images in which its like is looked for: as many, or one for all; None for the same
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
    found = _patches(view, images, layer)
    seen = found if others is None else _patches(view, others, layer)
    if len(seen) not in (1, len(found)):
        raise InputError(
            f"there are {len(found)} images and {len(seen)} others; give as many, or one"
        )
    return view.maps(np.clip((seen * found[:, place, None]).sum(-1), -1.0, 1.0))


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
