"""Results of a classification run: metrics, images with predictions, confusions."""

import base64
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from kmodels.runs import console, plots
from kmodels.runs.results import result
from kmodels.runs.runner import Runner
from kmodels.training.evaluation import WholeBatches
from kmodels.training.step.step_loss import KEY

__all__ = ["evaluate", "facts", "report"]

_PICTURES = 32
# predictions.json: images of a group, and the longer side of one in pixels.
MOST_IMAGES, MOST_SIDE = 12, 128


def facts(source: str, data: Any) -> dict[str, Any]:
    """Returns the facts about images for `kmodels.runs.recipe.introduce`.

    Args:
        source: value of --data.
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
        runner: the training; None if the run only evaluates.
        validation: batches of `data.validation`.
        test: batches of `data.test`.
        preprocessor: preprocessor of raw images, saved with the model.

    Returns:
        The content of result.json.
    """
    metrics = final_metrics(model, runner, validation, test)
    if test is not None or validation is not None:
        console.working("looking at single predictions")
        _look(folder, model, data, test, validation)
    model.preprocessor = preprocessor
    return finish(folder, model, metrics, runner, "accuracy")


def finish(
    folder: Any, model: keras.Model, metrics: dict[str, float], runner: Runner | None, curve: str
) -> dict[str, Any]:
    """Writes result.json, the curves of the loss and the metric `curve`, and the trained model.

    A run that only evaluates writes evaluation.json, and result.json if there is none.
    """
    content = result(
        model, recipe=folder.recipe, settings=folder.settings, metrics=metrics, runner=runner
    )
    if runner is None:
        folder.write_json("evaluation.json", content)
    else:
        console.working("saving the model")
        plots.curves(folder.path / "curves.png", runner.history.rows, curve)
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
        runner: the training; None to evaluate the validation part instead.
        validation: batches of the validation part, or None.
        test: batches of the test part, or None.
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
        batches: batches of that part.
        prefix: prefix of the names, such as "test_".
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
    """Writes predictions.json and draws predictions of the test or else the validation part."""
    batches = test or validation
    assert batches is not None
    path: Path = folder.path
    source = batches.loader.maker.source
    logits = model.predict(batches, verbose=0)[: batches.samples]
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    part = "validation" if test is None else "test"
    content = summary(part, source, shares, data.class_names)
    folder.write_json("predictions.json", content)
    plots.confusion(path / "confusion.png", source.labels, logits.argmax(-1), data.class_names)
    chosen = np.unique(np.linspace(0, len(source) - 1, min(_PICTURES, len(source))).astype(int))
    pictures, labels = source.batch(chosen)
    pictures = [np.clip(np.asarray(p, "float32") / 255, 0, 1) for p in pictures]
    plots.predictions(path / "predictions.png", pictures, labels, shares[chosen], data.class_names)


def summary(part: str, source: Any, shares: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    """Returns the content of predictions.json: confusions, and images of mistakes.

    Args:
        part: part of the data, such as "test".
        source: a `kmodels.data` source of images.
        shares: (n, classes), predicted probabilities.
        names: names of the classes.

    Returns:
        Plain values: counts of (class, predicted class), and groups of images as data URLs.
    """
    labels, said = np.asarray(source.labels), shares.argmax(-1)
    confidence = shares.max(-1)
    wrong, right = np.flatnonzero(said != labels), np.flatnonzero(said == labels)
    wrong = wrong[np.argsort(-confidence[wrong], kind="stable")]
    right = right[np.argsort(confidence[right], kind="stable")]
    narrow = right[:MOST_IMAGES]
    if len(wrong) <= 2 * MOST_IMAGES:
        groups = [("all", wrong), ("narrow", narrow)]
    else:
        unsure = wrong[::-1][:MOST_IMAGES]
        groups = [("sure", wrong[:MOST_IMAGES]), ("unsure", unsure), ("narrow", narrow)]
    pairs, counts = np.unique(np.stack([labels, said], 1), axis=0, return_counts=True)
    return {
        "part": part,
        "samples": len(labels),
        "right": len(right),
        "classes": [str(name) for name in names],
        "confusions": np.concatenate([pairs, counts[:, None]], 1).tolist(),
        "groups": {
            kind: _images(source, chosen, shares, names) for kind, chosen in groups if len(chosen)
        },
    }


def _images(
    source: Any, chosen: np.ndarray, shares: np.ndarray, names: Sequence[str]
) -> list[dict[str, Any]]:
    images, labels = source.batch(chosen)
    found = []
    for image, label, row in zip(images, labels, shares[chosen], strict=True):
        second, first = np.argsort(row)[-2:] if len(row) > 1 else (0, 0)
        found.append(
            {
                **_image(np.asarray(image)),
                "label": str(names[label]),
                "said": str(names[first]),
                "second": str(names[second]),
                "confidence": round(float(row[first]), 4),
                "label_share": round(float(row[label]), 4),
            }
        )
    return found


def _image(pixels: np.ndarray) -> dict[str, Any]:
    from PIL import Image

    whole = np.clip(np.rint(pixels), 0, 255).astype("uint8")
    image = Image.fromarray(whole[..., 0] if whole.shape[-1] == 1 else whole[..., :3])
    image.thumbnail((MOST_SIDE, MOST_SIDE))
    # Photographs are smaller as JPEG, drawings and digits as PNG.
    kind = "JPEG" if image.mode == "RGB" and max(image.size) >= 64 else "PNG"
    held = io.BytesIO()
    image.save(held, kind, **({"quality": 85} if kind == "JPEG" else {}))
    data = base64.b64encode(held.getvalue()).decode()
    return {"image": f"data:image/{kind.lower()};base64,{data}", "side": max(image.size)}
