"""The model, the data and the facts of one row, the same on each backend."""

import os
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import keras
import numpy as np

from kmodels import __version__, presets, training
from kmodels.core import keras_internals, precision
from kmodels.core.dispatch import backend
from kmodels.core.errors import InputError
from kmodels.data import ImageLoader, open_dataset
from kmodels.tools.bench.device import DeviceBackend
from kmodels.tools.bench.options import PRECISIONS

_ENDLESS = 1_000_000
# The batches of a loader before its images come again in another order.
_LOADED = 1_000
# Small enough that a few steps do not part what rounding parted, large enough that they matter.
_RATES = {"adamw": 1e-4, "sgd": 1e-2}


def prepare(name: str, seed: int) -> str:
    """Sets the precision of products and the seed.

    Args:
        name: a key of `PRECISIONS`.
        seed: seed of first weights.

    Returns:
        The dtype policy.
    """
    policy, products = PRECISIONS[name]
    precision.set_matmul_precision(products)  # type: ignore[arg-type]
    keras_internals.set_random_seed(seed)
    return policy


def make_model(
    preset: str,
    policy: str,
    *,
    image_size: int | None = None,
    num_classes: int | None = None,
    lora: bool | None = None,
    rank: int = 4,
) -> Any:
    """Returns the task of a preset.

    Args:
        preset: a registered name or a directory.
        policy: policy of its dtypes.
        image_size: height and width in pixels; the preset's by default.
        num_classes: number of classes of a classifier; the preset's by default.
        lora: adapters or all weights; None for adapters where the model is of text.
        rank: rank of the adapters.

    Raises:
        InputError: for an unknown preset, settings that it does not have, or a model that has no
            loss of its own.
    """
    task = presets.family_of(preset).tasks[0]
    changes: dict[str, Any] = {} if num_classes is None else {"num_classes": num_classes}
    if image_size is not None:
        with keras_internals.without_values():
            outline = task.from_preset(preset, load_weights=False, preprocessor=None, **changes)
        if is_text(outline):
            raise InputError(f"{preset} takes no images; leave --image-size out")
        channels = outline.backbone.config.image_shape[-1]
        changes["image_shape"] = (image_size, image_size, channels)
    model = task.from_preset(preset, dtype=policy, preprocessor=None, **changes)
    if is_text(model) and not model.gives_logits:
        raise InputError(
            f"{preset} is a {task.__name__}, which has no loss of its own to train with; give a "
            "classifier or a causal model"
        )
    if lora or (lora is None and is_text(model)):
        model.enable_lora(rank)
    return model


def is_text(model: keras.Model) -> bool:
    """Returns whether a model takes token ids."""
    return not hasattr(model.backbone.config, "image_shape")


def make_optimizer(name: str) -> Any:
    """Returns an optimizer at the rate of the comparison, without decay."""
    kinds = {"adamw": training.AdamW, "sgd": training.SGD}
    return kinds[name](_RATES[name], weight_decay=None if name == "sgd" else 0.0)


def batch(model: keras.Model, rows: int, length: int, seed: int) -> tuple[Any, Any, Any]:
    """Returns one batch, from NumPy's generator.

    Args:
        model: a task.
        rows: B.
        length: T, tokens of a row of text.
        seed: seed of the numbers.

    Returns:
        Images (B, height, width, C), classes (B,) and None; or token ids and mask (B, T), next
        tokens (B, T) and weights (B, T), of which all count.
    """
    rng, config = np.random.default_rng(seed), model.backbone.config
    if is_text(model):
        tokens = rng.integers(3, config.vocabulary_size, (rows, length + 1)).astype("int32")
        ones = np.ones((rows, length), "int32")
        x = {"token_ids": tokens[:, :-1], "padding_mask": ones}
        return x, tokens[:, 1:], ones.astype("float32")
    images = rng.standard_normal((rows, *config.image_shape), "float32")
    return images, rng.integers(0, model.num_classes, rows).astype("int32"), None


class Batches(keras.utils.PyDataset):
    """Gives as many batches as anyone asks for.

    Args:
        make: the batch of a number, (x, y) or (x, y, weights).
    """

    def __init__(self, make: Callable[[int], tuple]):
        super().__init__()
        self._make = make

    def __len__(self) -> int:
        return _ENDLESS

    def __getitem__(self, index: int) -> tuple:
        return self._make(index)


def batches(
    model: keras.Model,
    rows: int,
    length: int,
    seed: int,
    workers: int | None = None,
    ready: int = 4,
) -> Any:
    """Returns the data of a row, equal on each backend and with any number of workers.

    Args:
        model: a task.
        rows: rows of a batch.
        length: tokens of a row of text.
        seed: seed of the numbers.
        workers: that make images while steps run; None for batches that lie ready.
        ready: how many of these there are, in turn.

    Raises:
        InputError: for workers and a model of text.
    """
    if workers is None:
        made = [batch(model, rows, length, seed + number) for number in range(ready)]
        kept = [(x, y) if weights is None else (x, y, weights) for x, y, weights in made]
        return Batches(lambda index: kept[index % ready])
    if is_text(model):
        raise InputError("--workers is about images; a model of text has its batches ready")
    height, width, channels = model.backbone.config.image_shape
    # The labels of these images are 0 to 9.
    if model.num_classes < 10:
        raise InputError(f"--workers needs 10 classes or more; this model has {model.num_classes}")
    data = open_dataset(f"synthetic:{_LOADED * rows}", image_size=(height, width), seed=seed)
    return ImageLoader(data.train, rows, workers=workers, channels=channels, mean=0.5, std=0.5)


def facts(model: keras.Model, device: DeviceBackend) -> dict[str, Any]:
    """Returns what has to be equal in a comparison, or is worth noting.

    Args:
        model: compiled.
        device: the backend's module `bench.device`.
    """
    block = model.backbone.blocks[0]
    optimizer = model.optimizer
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "parameters": model.count_params(),
        "trainable_parameters": sum(int(np.prod(v.shape)) for v in model.trainable_variables),
        "dropout": dropouts(model),
        "image_shape": list(getattr(model.backbone.config, "image_shape", ())),
        "optimizer": f"{type(optimizer).__name__} at {float(optimizer.learning_rate):g}",
        "kmodels": __version__,
        "keras": keras.__version__,
        "threads": device.threads() or cpus,
        "variables": " ".join(sorted({str(v.dtype) for v in model.trainable_variables})),
        "compute": block.compute_dtype,
        "products": precision.matmul_precision().split()[0],
        "framework": f"{backend()} {_version(backend())}",
    }


def dropouts(model: keras.Model) -> dict[str, float]:
    """Returns the rates above 0, by the path of their layer."""
    found = {}
    for layer in keras_internals.sublayers(model):
        for name in ("rate", "dropout"):
            rate = getattr(layer, name, None)
            if isinstance(rate, float) and rate:
                found[layer.path] = rate
    return dict(sorted(found.items()))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "of unknown version"
