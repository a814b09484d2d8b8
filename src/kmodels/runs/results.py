"""Results of a run: metrics, result.json, predictions.json, figures, and the trained model."""

import base64
import importlib.util
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from kmodels.checkpoint.state import versions, weights_digest
from kmodels.core import dispatch
from kmodels.core.errors import InputError
from kmodels.core.runtime import device_name, peak_memory_mb
from kmodels.data.images.boxes import in_pixels
from kmodels.data.images.sources import DataBundle, ImageSource
from kmodels.runs import console, plots
from kmodels.runs.runner import Runner
from kmodels.training.loop import WholeBatches
from kmodels.training.metrics import average_precision
from kmodels.training.step_loss import KEY

if TYPE_CHECKING:
    from kmodels.runs.run_folder import Folder

__all__ = [
    "evaluate",
    "final_metrics",
    "image_facts",
    "measure_boxes",
    "measure_masks",
    "report_boxes",
    "report_classes",
    "report_masks",
    "result",
    "save_model",
]

# Longer runs have their step losses in history.csv only.
MOST_STEP_LOSSES = 1000
# Images of predictions.png: of a classifier, and of a segmenter.
_IMAGES, _MASKS = 32, 8
# Images that are segmented, or whose objects are detected, at a time.
_MEASURED = 32
# predictions.json: images of a group, and the longer side of one in pixels.
MOST_IMAGES, MOST_SIDE = 12, 128


def result(
    folder: "Folder", model: keras.Model, metrics: dict[str, float], runner: Runner | None = None
) -> dict[str, Any]:
    """Returns the content of result.json.

    Args:
        folder: directory of the run; the setting `preset` is the name of the architecture.
        model: the model at the end of the run.
        metrics: values by Keras' log names.
        runner: the training; None if the run only evaluates.

    Returns:
        Plain values.
    """
    content = {
        "recipe": folder.recipe,
        "backend": keras.backend.backend(),
        "versions": versions(),
        "device": device_name(),
        "precision": getattr(model, "backbone", model).dtype_policy.name,
        "preset": folder.settings.preset,
        "parameters": _count(model.weights),
        "trainable_parameters": _count(model.trainable_weights),
        "steps": 0,
        "epochs": 0,
        "metrics": metrics,
        "samples_per_s": None,
        "step_ms_median": None,
        "compile_s": None,
        "peak_memory_mb": peak_memory_mb(),
        "wait_for_data_share": None,
        "overrides": dispatch.summary(),
        "weights_digest": weights_digest(model),
        "step_losses": [],
    }
    if runner is not None:
        losses = runner.history.step_losses
        content |= {
            "steps": runner.step,
            "epochs": runner.epochs,
            "skipped_steps": runner.skipped,
            "step_losses": losses if len(losses) <= MOST_STEP_LOSSES else [],
        }
    if runner is not None and runner.speed.windows:
        content |= {
            "samples_per_s": round(runner.speed.samples_per_s, 2),
            "step_ms_median": round(runner.speed.step_ms, 3),
            "compile_s": round(runner.speed.compile_s, 3),
            "wait_for_data_share": round(runner.feed.clock.share, 4),
        }
        if (tokens := runner.learnt_tokens_per_s) is not None:
            content["learnt_tokens_per_s"] = round(tokens, 1)
    return content


def _count(variables: Sequence[keras.Variable]) -> int:
    return sum(math.prod(variable.shape) for variable in variables)


def image_facts(source: str, data: DataBundle) -> dict[str, Any]:
    """Returns the facts about images for `kmodels.runs.recipe.introduce`.

    Args:
        source: value of --data.
        data: the images.
    """
    parts = {"train": data.train, "validation": data.validation, "test": data.test}
    counts = {name: 0 if part is None else len(part) for name, part in parts.items()}
    return {"source": source, "unit": "images", **counts, "classes": list(data.class_names)}


def report_classes(
    folder: "Folder",
    model: keras.Model,
    data: DataBundle,
    runner: Runner | None,
    validation: WholeBatches | None,
    test: WholeBatches | None,
    preprocessor: Callable[..., Any] | None = None,
) -> dict[str, Any]:
    """Evaluates a classifier, draws predictions, and writes result.json and the model.

    Args:
        folder: directory of the run.
        model: compiled, in its final state.
        data: the images.
        runner: the training; None if the run only evaluates.
        validation: batches of `data.validation`.
        test: batches of `data.test`.
        preprocessor: preprocessor of raw images, saved with the model.

    Returns:
        The content of result.json.
    """
    metrics = final_metrics(model, runner, validation, test)
    if test is not None or validation is not None:
        console.working("collecting example predictions")
        _write_predictions(folder, model, data, test, validation)
    model.preprocessor = preprocessor
    return _finish(folder, model, metrics, runner, "accuracy")


def _finish(
    folder: "Folder",
    model: keras.Model,
    metrics: dict[str, float],
    runner: Runner | None,
    curve: str,
) -> dict[str, Any]:
    """Writes result.json, curves of the loss and of the metric `curve`, and the trained model.

    A run that only evaluates writes evaluation.json, and result.json if there is none.
    """
    content = result(folder, model, metrics, runner)
    if runner is None:
        folder.write_json("evaluation.json", content)
    else:
        console.working("saving the model")
        plots.curves(folder.path / "curves.png", runner.history.rows, curve)
        save_model(folder, model, metrics)
    if runner is not None or not (folder.path / "result.json").exists():
        folder.write_json("result.json", content)
    console.working(None)
    console.say_metrics(metrics)
    return content


def save_model(folder: "Folder", model: keras.Model, metrics: Mapping[str, float]) -> None:
    """Saves a trained model with a model card, as the directory "model" of the run.

    Args:
        folder: directory of the run; its settings name the data, the base model and the license.
        model: in its final state.
        metrics: the numbers of result.json.
    """
    settings = folder.settings
    base = getattr(settings, "weights", None) or ""
    facts = {
        "license": settings.license,
        # A path on this machine means nothing to other users.
        "base_model": base if base.startswith("hf://") else None,
        "datasets": str(getattr(settings, "data", None) or "").rstrip("/").rpartition("/")[2],
        "metrics": {k: float(v) for k, v in metrics.items() if v is not None and math.isfinite(v)},
        "description": f"Trained with the recipe `{folder.recipe}` of kmodels.",
    }
    model.save_to_preset(folder.path / "model", card={k: v for k, v in facts.items() if v})


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


def _write_predictions(
    folder: "Folder",
    model: keras.Model,
    data: DataBundle,
    test: WholeBatches | None,
    validation: WholeBatches | None,
) -> None:
    """Writes predictions.json and draws predictions of the test or else the validation part."""
    batches = test or validation
    assert batches is not None
    path = folder.path
    source = batches.loader.maker.source
    logits = model.predict(batches, verbose=0)[: batches.samples]
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    part = "validation" if test is None else "test"
    content = predictions(part, source, shares, data.class_names)
    folder.write_json("predictions.json", content)
    plots.confusion(path / "confusion.png", source.labels, logits.argmax(-1), data.class_names)
    indices = plots.spread(len(source), _IMAGES)
    images, labels = source.batch(indices)
    plots.predictions(
        path / "predictions.png", _shown(images), labels, shares[indices], data.class_names
    )


def predictions(part: str, source: Any, shares: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    """Returns the content of predictions.json: confusions, and images of mistakes.

    Args:
        part: part of the data, such as "test".
        source: a `kmodels.data` source of images.
        shares: (n, classes), predicted probabilities.
        names: names of the classes.

    Returns:
        Plain values: counts of (class, predicted class), and groups of images as data URLs.
    """
    labels, predicted = np.asarray(source.labels), shares.argmax(-1)
    confidence = shares.max(-1)
    wrong, right = np.flatnonzero(predicted != labels), np.flatnonzero(predicted == labels)
    wrong = wrong[np.argsort(-confidence[wrong], kind="stable")]
    right = right[np.argsort(confidence[right], kind="stable")]
    narrow = right[:MOST_IMAGES]
    if len(wrong) <= 2 * MOST_IMAGES:
        groups = [("all", wrong), ("narrow", narrow)]
    else:
        unsure = wrong[::-1][:MOST_IMAGES]
        groups = [("sure", wrong[:MOST_IMAGES]), ("unsure", unsure), ("narrow", narrow)]
    pairs, counts = np.unique(np.stack([labels, predicted], 1), axis=0, return_counts=True)
    return {
        "part": part,
        "samples": len(labels),
        "right": len(right),
        "classes": [str(name) for name in names],
        "confusions": np.concatenate([pairs, counts[:, None]], 1).tolist(),
        "groups": {
            kind: _images(source, indices, shares, names)
            for kind, indices in groups
            if len(indices)
        },
    }


def _images(
    source: Any, indices: np.ndarray, shares: np.ndarray, names: Sequence[str]
) -> list[dict[str, Any]]:
    images, labels = source.batch(indices)
    entries = []
    for image, label, row in zip(images, labels, shares[indices], strict=True):
        second, first = np.argsort(row)[-2:] if len(row) > 1 else (0, 0)
        entries.append(
            {
                **_image(np.asarray(image)),
                "label": str(names[label]),
                "said": str(names[first]),
                "second": str(names[second]),
                "confidence": round(float(row[first]), 4),
                "label_share": round(float(row[label]), 4),
            }
        )
    return entries


def _image(pixels: np.ndarray) -> dict[str, Any]:
    from PIL import Image

    whole = np.clip(np.rint(pixels), 0, 255).astype("uint8")
    image = Image.fromarray(whole[..., 0] if whole.shape[-1] == 1 else whole[..., :3])
    image.thumbnail((MOST_SIDE, MOST_SIDE))
    # Photographs are smaller as JPEG, drawings and digits as PNG.
    kind = "JPEG" if image.mode == "RGB" and max(image.size) >= 64 else "PNG"
    encoded = io.BytesIO()
    image.save(encoded, kind, **({"quality": 85} if kind == "JPEG" else {}))
    data = base64.b64encode(encoded.getvalue()).decode()
    return {"image": f"data:image/{kind.lower()};base64,{data}", "side": max(image.size)}


def report_masks(
    folder: "Folder",
    model: keras.Model,
    data: DataBundle,
    runner: Runner | None,
    validation: WholeBatches | None,
    test: WholeBatches | None,
    preprocessor: Any = None,
) -> dict[str, Any]:
    """Reports on a segmenter, with the data of `open_masks`, as `report_classes` does."""
    metrics = final_metrics(model, runner, validation, test)
    model.preprocessor = preprocessor
    if preprocessor is not None and preprocessor.aspect_ratio != "stretch":
        # What the loaders stretched is measured as `segment` gives it, in the size of the images.
        for name, part in (("val", data.validation), ("test", data.test)):
            if part is not None:
                console.working("measuring the mean IoU of whole images")
                metrics[f"{name}_mean_iou"] = measure_masks(model, part)["mean_iou"]
    if (examples := _examples(data)) is not None:
        images, truth = examples
        path, predicted = folder.path / "predictions.png", model.segment(images)
        plots.masks(path, _shown(images), truth, predicted, data.class_names)
    return _finish(folder, model, metrics, runner, "mean_iou")


def report_boxes(
    folder: "Folder",
    model: keras.Model,
    data: DataBundle,
    runner: Runner | None,
    validation: WholeBatches | None,
    test: WholeBatches | None,
    preprocessor: Callable[..., Any] | None = None,
) -> dict[str, Any]:
    """Reports on a detector, with the data of `open_boxes`, as `report_classes` does.

    The average precision is measured if pycocotools is installed.
    """
    metrics = final_metrics(model, runner, validation, test)
    model.preprocessor = preprocessor
    parts = {"val": data.validation, "test": data.test}
    for name, part in parts.items():
        if part is None or importlib.util.find_spec("pycocotools") is None:
            continue
        console.working("measuring the average precision")
        averages = measure_boxes(model, part)
        metrics |= {f"{name}_{key}": averages[key] for key in ("map", "map_50", "map_75")}
    if (examples := _examples(data)) is not None:
        images, objects = examples
        path, truth = folder.path / "predictions.png", list(map(in_pixels, images, objects))
        plots.boxes(path, _shown(images), truth, model.detect(images), data.class_names)
    return _finish(folder, model, metrics, runner, "map")


def _examples(data: DataBundle) -> tuple[list[Any], list[Any]] | None:
    """Returns images of the test or else the validation part, and their labels."""
    if (part := data.validation if data.test is None else data.test) is None:
        return None
    console.working("drawing example predictions")
    images, labels = part.batch(plots.spread(len(part), _MASKS))
    return list(images), list(labels)


def _shown(images: Sequence[Any]) -> list[np.ndarray]:
    return [np.clip(np.asarray(image, "float32") / 255, 0, 1) for image in images]


def measure_masks(
    model: Any,
    source: ImageSource,
    batch_size: int = _MEASURED,
    progress: Callable[[Any], Any] = iter,
) -> dict[str, Any]:
    """Returns how well a segmenter finds the classes of pixels, in the sizes that images have.

    Args:
        model: a segmenter.
        source: images with masks.
        batch_size: images at a time.
        progress: iterates over the starts of batches, showing progress.

    Returns:
        "mean_iou" of the classes that occur in masks or predictions, "pixel_accuracy", and "iou",
        that of each by its name.

    Raises:
        InputError: for a class that the model does not have.
    """
    classes = model.num_classes
    confusion = np.zeros((classes, classes), "int64")
    for images, labels, filled in _batches(source, batch_size, progress):
        masks = model.segment(filled, batch_size)[: len(images)]
        for mask, label in zip(masks, labels, strict=True):
            known = (label != model.ignore_class) & (label >= 0)
            if (label[known] >= classes).any():
                raise InputError(f"a mask has class {label[known].max()}, the model {classes}")
            pairs = label[known].astype("int64") * classes + mask[known]
            confusion += np.bincount(pairs, minlength=classes**2).reshape(classes, classes)
    right, union = confusion.diagonal(), confusion.sum(0) + confusion.sum(1)
    occurs = union > 0
    shares = right[occurs] / (union - right)[occurs]
    names = [model.class_name(number) for number in np.flatnonzero(occurs).tolist()]
    return {
        "mean_iou": float(shares.mean()),
        "pixel_accuracy": float(right.sum() / confusion.sum()),
        "iou": dict(zip(names, shares.tolist(), strict=True)),
    }


def measure_boxes(
    model: Any,
    source: ImageSource,
    batch_size: int = _MEASURED,
    progress: Callable[[Any], Any] = iter,
) -> dict[str, float]:
    """Returns the average precision of a detector, see `kmodels.training.average_precision`.

    Args:
        model: a detector.
        source: images with boxes.
        batch_size: images at a time.
        progress: iterates over the starts of batches, showing progress.
    """
    detected, wanted = [], []
    for images, objects, filled in _batches(source, batch_size, progress):
        detected += model.detect(filled, threshold=0.0, batch_size=batch_size)[: len(images)]
        wanted += map(in_pixels, images, objects)
    return average_precision(detected, wanted)


def _batches(
    source: ImageSource, batch_size: int, progress: Callable[[Any], Any]
) -> Iterator[tuple[Any, Any, list[Any]]]:
    """Yields images, labels, and the images filled up: a shorter batch would be compiled again."""
    for start in progress(range(0, len(source), batch_size)):
        images, labels = source.batch(np.arange(start, min(start + batch_size, len(source))))
        yield images, labels, [*images, *[images[-1]] * (batch_size - len(images))]
