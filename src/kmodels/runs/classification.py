"""Results of a classification run: metrics, images with predictions, confusions."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np

from kmodels.runs import console, plots, predictions
from kmodels.runs.results import result
from kmodels.runs.runner import Runner
from kmodels.training.evaluation import WholeBatches
from kmodels.training.step.step_loss import KEY

__all__ = ["evaluate", "facts", "report"]

_PICTURES = 32


def facts(source: str, data: Any) -> dict[str, Any]:
    """Returns what `kmodels.runs.recipe.introduce` says about images.

    Args:
        source: what was given as --data.
        data: a `kmodels.data.DataBundle`.
    """
    parts = {"train": data.train, "validation": data.validation, "test": data.test}
    counts = {name: 0 if part is None else len(part) for name, part in parts.items()}
    return {"source": source, "unit": "images", **counts, "classes": list(data.class_names)}


def report(
    folder: Any,
    model: keras.Model,
    data: Any,
    runner: Runner | None,
    validation: WholeBatches | None,
    test: WholeBatches | None,
    preprocessor: Callable[..., Any] | None = None,
) -> dict[str, Any]:
    """Evaluates, draws, and writes result.json and the model.

    Args:
        folder: a `kmodels.runs.recipe.Folder`.
        model: compiled, in its final state.
        data: a `kmodels.data.DataBundle`.
        runner: of the training; None where there was an evaluation alone.
        validation: batches of `data.validation`.
        test: batches of `data.test`.
        preprocessor: saved with the model, for images as they come.

    Returns:
        The content of result.json.
    """
    metrics = final_metrics(model, runner, validation, test)
    if test is not None or validation is not None:
        console.working("looking at single predictions")
        _look(folder, model, data, test, validation)
    content = result(
        model, recipe=folder.recipe, settings=folder.settings, metrics=metrics, runner=runner
    )
    if runner is None:
        folder.write_json("evaluation.json", content)
    else:
        console.working("saving the model")
        plots.curves(folder.path / "curves.png", runner.history.rows)
        model.preprocessor = preprocessor
        model.save_to_preset(folder.path / "model")
    if runner is not None or not (folder.path / "result.json").exists():
        folder.write_json("result.json", content)
    console.working(None)
    console.say_metrics(metrics)
    return content


def final_metrics(
    model: keras.Model,
    runner: Runner | None,
    validation: WholeBatches | None,
    test: WholeBatches | None,
) -> dict[str, float]:
    """Returns the metrics of a run's last epoch and of the test part.

    Args:
        model: compiled, in its final state.
        runner: of the training; None where there was none, and the validation part is evaluated.
        validation: batches of that part, or None.
        test: likewise.
    """
    metrics = dict(runner.metrics) if runner is not None else {}
    console.working("evaluating")
    if runner is None and validation is not None:
        metrics |= evaluate(model, validation, "val_")
    if test is not None:
        metrics |= evaluate(model, test, "test_")
    return metrics


def evaluate(model: keras.Model, batches: WholeBatches, prefix: str) -> dict[str, float]:
    """Returns loss and metrics of a part of the data.

    Args:
        model: compiled.
        batches: of that part.
        prefix: in front of the names, such as "test_".
    """
    logs = model.evaluate(batches, return_dict=True, verbose=0)
    return {prefix + name: float(value) for name, value in logs.items() if name != KEY}


def _look(
    folder: Any,
    model: keras.Model,
    data: Any,
    test: WholeBatches | None,
    validation: WholeBatches | None,
) -> None:
    """Writes predictions.json and draws predictions, of the test part or else of the validation."""
    batches = test or validation
    assert batches is not None
    path: Path = folder.path
    source = batches.loader.maker.source
    logits = model.predict(batches, verbose=0)[: batches.samples]
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    part = "validation" if test is None else "test"
    content = predictions.summary(part, source, shares, data.class_names)
    folder.write_json("predictions.json", content)
    plots.confusion(path / "confusion.png", source.labels, logits.argmax(-1), data.class_names)
    chosen = np.unique(np.linspace(0, len(source) - 1, min(_PICTURES, len(source))).astype(int))
    pictures, labels = source.batch(chosen)
    pictures = [np.clip(np.asarray(p, "float32") / 255, 0, 1) for p in pictures]
    plots.predictions(path / "predictions.png", pictures, labels, shares[chosen], data.class_names)
