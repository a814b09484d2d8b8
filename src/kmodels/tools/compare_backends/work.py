"""The work of a child process: builds the model of one row or side, and trains on request."""

import os
import time
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import keras
import numpy as np

from kmodels import __version__, presets, training
from kmodels.checkpoint.state import host_values, named
from kmodels.core import dispatch, keras_internals, runtime
from kmodels.core.dispatch import backend, backend_module
from kmodels.core.environment import cores
from kmodels.core.errors import InputError, is_out_of_memory, one_line
from kmodels.core.runtime import RuntimeBackend, device_name, host_bytes, peak_memory_mb
from kmodels.core.types import Logs, Tensor, Tree
from kmodels.data import ImageLoader, open_dataset
from kmodels.layers import block_compile as compiling
from kmodels.tools.compare_backends.children import LeftOut, Link, OutOfMemory
from kmodels.tools.compare_backends.options import OPENXLA, PRECISIONS
from kmodels.training import StepCallbacks, track_step_loss

# Batches of an epoch and epochs of a run that the parent ends.
_ENDLESS = 1_000_000
# Batches of an epoch of the image loader.
_LOADED = 1_000
JIT = {"auto": "auto", "none": False, "inductor": True, "xla": True, OPENXLA: False}


class OpenXLABackend(Protocol):
    """Training as one OpenXLA program, on a backend that has another compiler."""

    def train(self, model: keras.Model, data: Iterable[Any], count: Callable[[Any], None]) -> None:
        """Trains a compiled model on batches of arrays; `count` gets the loss of each step."""
        ...


def make_model(
    preset: str,
    policy: str,
    *,
    image_size: int | None = None,
    num_classes: int | None = None,
    lora: bool | None = None,
    rank: int = 4,
) -> Any:
    """Returns the task of a preset; a language model gets adapters unless `lora` is False.

    Raises:
        InputError: for an unknown preset, settings that it does not have, or a model without a
            default loss.
    """
    task = presets.family_of(preset).tasks[0]
    changes: dict[str, Any] = {} if num_classes is None else {"num_classes": num_classes}
    if image_size is not None:
        with keras_internals.without_values():
            outline = task.from_preset(preset, load_weights=False, preprocessor=None, **changes)
        if is_text(outline):
            raise InputError(f"{preset} has no image input; leave --image-size out")
        channels = outline.backbone.config.image_shape[-1]
        changes["image_shape"] = (image_size, image_size, channels)
    model = task.from_preset(preset, dtype=policy, preprocessor=None, **changes)
    if is_text(model) and not model.gives_logits:
        raise InputError(
            f"{preset} is a {task.__name__}, which has no default loss; give a classifier or a "
            "causal model"
        )
    if lora or (lora is None and is_text(model)):
        model.enable_lora(rank)
    return model


def is_text(model: keras.Model) -> bool:
    """Returns True if a model takes token ids."""
    return not hasattr(model.backbone.config, "image_shape")


def batch(model: keras.Model, rows: int, length: int, seed: int) -> tuple[Any, Any, Any]:
    """Returns one batch, from NumPy's generator.

    Returns:
        Images (B, height, width, C), classes (B,) and None; or token ids and mask (B, T), next
        tokens (B, T) and weights (B, T) of ones.
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
    """An endless dataset."""

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

    Without workers, `ready` batches are made in advance and repeated.

    Raises:
        InputError: for workers with a language model.
    """
    if workers is None:
        ready_batches = [batch(model, rows, length, seed + number) for number in range(ready)]
        repeated = [
            (x, y) if weights is None else (x, y, weights) for x, y, weights in ready_batches
        ]
        return Batches(lambda index: repeated[index % ready])
    if is_text(model):
        raise InputError("--workers needs a model with image inputs; leave it out")
    height, width, channels = model.backbone.config.image_shape
    # The labels of these images are 0 to 9.
    if model.num_classes < 10:
        raise InputError(f"--workers needs at least 10 classes; this model has {model.num_classes}")
    data = open_dataset(f"synthetic:{_LOADED * rows}", image_size=(height, width), seed=seed)
    return ImageLoader(data.train, rows, workers=workers, channels=channels, mean=0.5, std=0.5)


def facts(model: keras.Model, device: RuntimeBackend) -> dict[str, Any]:
    """Returns the facts about a model and its process that a comparison checks or reports."""
    block = model.backbone.blocks[0]
    optimizer = model.optimizer
    return {
        "parameters": model.count_params(),
        "trainable_parameters": sum(int(np.prod(v.shape)) for v in model.trainable_variables),
        "dropout": dropouts(model),
        "image_shape": list(getattr(model.backbone.config, "image_shape", ())),
        "optimizer": f"{type(optimizer).__name__} at {float(optimizer.learning_rate):g}",
        "kmodels": __version__,
        "keras": keras.__version__,
        "threads": device.threads() or cores(),
        "variables": " ".join(sorted({str(v.dtype) for v in model.trainable_variables})),
        "compute": block.compute_dtype,
        "products": runtime.matmul_precision().split()[0],
        "framework": f"{backend()} {_version(backend())}",
    }


def dropouts(model: keras.Model) -> dict[str, float]:
    """Returns the dropout rates above 0 by the path of their layer."""
    rates = {}
    for layer in keras_internals.sublayers(model):
        for name in ("rate", "dropout"):
            rate = getattr(layer, name, None)
            if isinstance(rate, float) and rate:
                rates[layer.path] = rate
    return dict(sorted(rates.items()))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "of unknown version"


class Turns(keras.callbacks.Callback):
    """Runs as many steps as the parent requests, then waits for the next request.

    Args:
        begun: start of building the model, as `time.perf_counter` counts.
    """

    def __init__(self, link: Link, begun: float):
        super().__init__()
        self._link, self._begun = link, begun
        self._left = 0
        self._losses: list[float] = []
        self._seconds: list[float] = []

    def ready(self, facts: dict[str, Any]) -> None:
        """Sends the facts of the built model and waits for the first request."""
        self._wait({"facts": facts, "build_s": time.perf_counter() - self._begun})

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Counts a step of `fit`."""
        self.step(logs["step_loss"])  # type: ignore[index]

    def step(self, loss: Tensor) -> None:
        """Counts a step; reading its loss waits until it is computed."""
        self._losses.append(float(keras.ops.convert_to_numpy(loss)))
        now = time.perf_counter()
        self._seconds.append(now - self._begun)
        self._begun = now
        self._left -= 1
        if not self._left:
            answer = {"losses": self._losses, "seconds": self._seconds}
            peak = {"peak_memory_mb": peak_memory_mb(), "host_bytes": host_bytes()}
            self._wait({**answer, **peak, "ops": dispatch.summary()})

    def _wait(self, answer: dict[str, Any]) -> None:
        self._link.send(**answer)
        request = self._link.receive()
        if request is None:
            os._exit(0)
        self._left = request["steps"]
        self._losses, self._seconds = [], []
        self._begun = time.perf_counter()


def work(job: dict[str, Any], link: Link) -> None:
    """Builds and compiles the model of a job, sends its facts, and trains on request.

    The job has "command" ("bench" or "parity") and the options that the parent sends for it.

    Raises:
        LeftOut: for TF32 if the device has none.
        OutOfMemory: if the device has too little memory.
        InputError: for settings that the preset does not have.
    """
    begun = time.perf_counter()
    device = runtime.native
    if job["precision"] == "tf32" and not device.has_tf32():
        raise LeftOut(f"{device_name()} has no TF32")
    try:
        dispatch.load_environment(strict=True)
        policy, products = PRECISIONS[job["precision"]]
        runtime.set_matmul_precision(products)  # type: ignore[arg-type]
        keras_internals.set_random_seed(job["seed"])
        names = ("image_size", "num_classes", "lora", "rank")
        model = make_model(job["preset"], policy, **{name: job[name] for name in names})
        model.compile(
            optimizer=_optimizer(job["optimizer"]),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            **({"weighted_metrics": None} if is_text(model) else {}),
            jit_compile=JIT[job["compile"]],
        )
        if job["command"] == "bench":
            _bench(model, job, Turns(link, begun), device)
        else:
            _parity(model, job, link, device)
    except Exception as error:
        if is_out_of_memory(error):
            raise OutOfMemory(one_line(error)[:200]) from None
        raise


def _optimizer(name: str) -> keras.optimizers.Optimizer:
    """Returns an optimizer without decay.

    The rates are small enough not to amplify rounding in a few steps, and large enough to matter.
    """
    if name == "adamw":
        return training.AdamW(1e-4, weight_decay=0.0)
    return training.SGD(1e-2) if name == "sgd" else KeepGradients(1e-2)


def _bench(model: Any, job: dict[str, Any], turns: Turns, device: RuntimeBackend) -> None:
    shape = (job["batch_size"], job["sequence_length"], job["seed"])
    data = batches(model, *shape, job["workers"], job["ready"])
    track_step_loss(model)
    answer = facts(model, device)
    answer |= {"compile": _mode(model, job["compile"]), "device": device_name()}
    answer |= {"cpu": device.is_cpu(), "text": is_text(model)}
    answer |= {"host_bytes": host_bytes()}
    if answer["dropout"] and job["compile"] == OPENXLA:
        raise LeftOut(
            "torchax does not support torch's random generator; use a model without dropout"
        )
    if answer["dropout"]:
        # Each backend drops other values, so only the loss without dropout can be compared.
        x, y, weights = batch(model, *shape)
        options: dict[str, Any] = {"batch_size": len(y), "verbose": 0, "return_dict": True}
        logs = model.evaluate(x, y, sample_weight=weights, **options)
        answer["evaluated"] = float(logs["loss"])
    turns.ready(answer)
    if job["compile"] == OPENXLA:
        engine = backend_module(
            "kmodels.tools.compare_backends.openxla", OpenXLABackend, optional=True
        )
        assert engine is not None  # an option of torch alone
        engine.train(model, data, turns.step)
        return
    callbacks = StepCallbacks([turns], model, epochs=_ENDLESS, steps=len(data))
    model.fit(data, epochs=_ENDLESS, verbose=0, shuffle=False, callbacks=callbacks)


def _mode(model: keras.Model, asked: str) -> str:
    """Returns the mode of `MODES` that compiles the step."""
    if asked == OPENXLA:
        return asked
    if compiling.compiled(model):
        return "inductor"
    return "xla" if model.jit_compile else "none"


class KeepGradients(keras.optimizers.Optimizer):
    """Gradient descent that keeps each variable's last gradient in a slot.

    So the gradients are those of the step that `fit` compiles, on every backend.
    """

    def __init__(self, learning_rate: float, name: str = "keep_gradients"):
        super().__init__(learning_rate=learning_rate, name=name)
        self.gradients: list[Any] = []

    def build(self, variables: list[Any]) -> None:
        """Creates the slots."""
        if self.built:
            return
        super().build(variables)
        self.gradients = [
            self.add_variable_from_reference(variable, "gradient") for variable in variables
        ]

    def update_step(
        self, gradient: Tensor, variable: keras.Variable, learning_rate: Tensor
    ) -> None:
        """Stores the gradient and updates the variable."""
        gradient = keras.ops.cast(gradient, variable.dtype)
        rate = keras.ops.cast(learning_rate, variable.dtype)
        self.assign(self.gradients[keras_internals.variable_index(self, variable)], gradient)
        self.assign_sub(variable, keras.ops.multiply(rate, gradient))


def _parity(model: Any, job: dict[str, Any], link: Link, device: RuntimeBackend) -> None:
    """Answers each request for a step with the file of its values."""
    optimizer = model.optimizer
    optimizer.build(model.trainable_variables)
    link.send(facts=facts(model, device) | {"device": device_name()})
    while (request := link.receive()) is not None:
        number = request["step"]
        shape = (job["batch_size"], job["sequence_length"], job["seed"] + number)
        arrays = step(model, optimizer, *batch(model, *shape))
        order: dict[str, list[str]] = {}
        for key in arrays:
            stage, _, name = key.partition(":")
            order.setdefault(stage, []).append(name)
        path = Path(job["folder"]) / f"step_{number}.npz"
        # The keys are numbers: a key becomes the name of a file in the archive.
        numbered = {str(i): array for i, array in enumerate(arrays.values())}
        np.savez(path, **numbered)  # type: ignore[arg-type]
        link.send(file=str(path), keys=list(arrays), order=order)


def step(
    model: keras.Model, optimizer: KeepGradients, x: Tree, y: Tree, weights: Tree
) -> dict[str, Any]:
    """Runs one step and returns its values; the optimizer's slots hold the gradients.

    Returns:
        float32 arrays by "stage:name" in the order of computation; gradients come in the order of
        the backward pass, and "before" holds the weights that the step starts from.
    """
    arrays = {f"before:{path}": _array(v) for path, v in named(model.trainable_variables).items()}
    inputs = keras.tree.map_structure(keras.ops.convert_to_tensor, x)
    for name, value in model.backbone.intermediates(inputs).items():
        arrays[f"forward:{name}"] = _numbers(value)
    arrays["forward:logits"] = _numbers(model(inputs, training=False))
    model.reset_metrics()
    logs = model.train_on_batch(x, y, sample_weight=weights, return_dict=True)
    arrays["loss:loss"] = np.asarray(logs["loss"], "float32")
    paths = list(named(model.trainable_variables))
    for path, slot in reversed(list(zip(paths, optimizer.gradients, strict=True))):
        arrays[f"gradients:{path}"] = _array(slot)
    return arrays | {
        f"weights:{path}": _array(v) for path, v in named(model.trainable_variables).items()
    }


def _array(variable: keras.Variable) -> np.ndarray:
    # A copy: on a CPU the next step may overwrite the values.
    return np.array(host_values(variable), "float32")


def _numbers(value: Tensor) -> np.ndarray:
    return np.array(keras.ops.convert_to_numpy(keras.ops.cast(value, "float32")))
