"""Results of a segmentation run: metrics, and images with their masks and predictions."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from kmodels.data.images.sources import DataBundle, ImageSource
from kmodels.runs import console, plots
from kmodels.runs.classification import facts, final_metrics, finish
from kmodels.runs.runner import Runner
from kmodels.training.evaluation import WholeBatches

if TYPE_CHECKING:
    from kmodels.runs.run_folder import Folder

__all__ = ["facts", "report"]

_PICTURES = 8


def report(
    folder: "Folder",
    model: keras.Model,
    data: DataBundle,
    runner: Runner | None,
    validation: WholeBatches | None,
    test: WholeBatches | None,
    preprocessor: Callable[..., Any] | None = None,
) -> dict[str, Any]:
    """Evaluates, draws, and writes result.json and the model.

    Args:
        folder: a `kmodels.runs.recipe.Folder`.
        model: compiled, in its final state.
        data: a `kmodels.data.DataBundle` of `open_masks`.
        runner: the training; None if the run only evaluates.
        validation: batches of `data.validation`.
        test: batches of `data.test`.
        preprocessor: preprocessor of raw images, saved with the model.

    Returns:
        The content of result.json.
    """
    metrics = final_metrics(model, runner, validation, test)
    model.preprocessor = preprocessor
    part = data.validation if data.test is None else data.test
    if part is not None:
        console.working("drawing single predictions")
        _draw(folder, model, part, data.class_names)
    return finish(folder, model, metrics, runner, "mean_iou")


def _draw(folder: "Folder", model: Any, source: ImageSource, names: list[str]) -> None:
    chosen = np.unique(np.linspace(0, len(source) - 1, min(_PICTURES, len(source))).astype(int))
    images, truth = source.batch(chosen)
    said = model.segment(list(images))
    images = [np.clip(np.asarray(x, "float32") / 255, 0, 1) for x in images]
    path = folder.path / "predictions.png"
    plots.masks(path, images, list(truth), said, names)
