"""The process of one side: it trains and records all values of each step."""

from pathlib import Path
from typing import Any

import keras
import numpy as np

from kmodels.checkpoint.state import host_values, named
from kmodels.core import dispatch, keras_internals
from kmodels.core.dispatch import backend_module
from kmodels.core.hardware import device_name
from kmodels.core.types import Tensor, Tree
from kmodels.tools.bench import setting
from kmodels.tools.bench.device import DeviceBackend
from kmodels.tools.children import LeftOut, Link

_RATE = 1e-2


class KeepGradients(keras.optimizers.Optimizer):
    """Gradient descent that leaves each variable's last gradient in a slot.

    The gradients are therefore those of the step that `fit` compiles, on each backend alike.
    """

    def __init__(self, learning_rate: float = _RATE, name: str = "keep_gradients"):
        super().__init__(learning_rate=learning_rate, name=name)
        self.gradients: list[Any] = []

    def build(self, variables: list[Any]) -> None:
        """Makes the slots."""
        if self.built:
            return
        super().build(variables)
        self.gradients = [
            self.add_variable_from_reference(variable, "gradient") for variable in variables
        ]

    def update_step(
        self, gradient: Tensor, variable: keras.Variable, learning_rate: Tensor
    ) -> None:
        """Keeps the gradient, and moves the variable against it."""
        gradient = keras.ops.cast(gradient, variable.dtype)
        rate = keras.ops.cast(learning_rate, variable.dtype)
        self.assign(self.gradients[keras_internals.variable_index(self, variable)], gradient)
        self.assign_sub(variable, keras.ops.multiply(rate, gradient))


def work(job: dict[str, Any], link: Link) -> None:
    """Trains, and answers each request for a step with the file of its values.

    Raises:
        LeftOut: for TF32 where there is none.
        InputError: for settings that the preset does not have.
    """
    device = backend_module("kmodels.tools.bench.device", DeviceBackend)
    if job["precision"] == "tf32" and not device.has_tf32():
        raise LeftOut(f"{device_name()} has no TF32")
    dispatch.load_environment(strict=True)
    policy = setting.prepare(job["precision"], job["seed"])
    model = setting.make_model(
        job["preset"],
        policy,
        image_size=job["image_size"],
        num_classes=job["num_classes"],
        lora=False,
    )
    optimizer = KeepGradients()
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        **({"weighted_metrics": None} if setting.is_text(model) else {}),
    )
    optimizer.build(model.trainable_variables)
    link.send(facts=setting.facts(model, device) | {"device": device_name()})
    while (request := link.receive()) is not None:
        number = request["step"]
        shape = (job["batch_size"], job["sequence_length"], job["seed"] + number)
        arrays = step(model, optimizer, *setting.batch(model, *shape))
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
    """Returns one step and what was computed in it.

    Args:
        model: compiled with `optimizer`.
        optimizer: whose slots hold the gradients.
        x: a batch.
        y: its labels.
        weights: weights of the labels, or None.

    Returns:
        float32 arrays by "stage:name" in the order of computation; gradients come in the order of
        the backward pass, and "before" holds the weights that the step starts from.
    """
    found = {f"before:{path}": _array(v) for path, v in named(model.trainable_variables).items()}
    inputs = keras.tree.map_structure(keras.ops.convert_to_tensor, x)
    for name, value in model.backbone.intermediates(inputs).items():
        found[f"forward:{name}"] = _numbers(value)
    found["forward:logits"] = _numbers(model(inputs, training=False))
    model.reset_metrics()
    logs = model.train_on_batch(x, y, sample_weight=weights, return_dict=True)
    found["loss:loss"] = np.asarray(logs["loss"], "float32")
    paths = list(named(model.trainable_variables))
    for path, slot in reversed(list(zip(paths, optimizer.gradients, strict=True))):
        found[f"gradients:{path}"] = _array(slot)
    return found | {
        f"weights:{path}": _array(v) for path, v in named(model.trainable_variables).items()
    }


def _array(variable: keras.Variable) -> np.ndarray:
    # A copy: on a CPU the values may lie where the next step writes.
    return np.array(host_values(variable), "float32")


def _numbers(value: Tensor) -> np.ndarray:
    return np.array(keras.ops.convert_to_numpy(keras.ops.cast(value, "float32")))
