"""keras-hub: its directories, written and read by its own methods on the running backend."""

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from kmodels.tools.convert import serving

TASK, BACKBONE = "task.json", "config.json"
FILES = (
    *(TASK, BACKBONE, "metadata.json", "model.weights.h5", "task.weights.h5"),
    *("assets", "image_converter.json", "preprocessor.json", "tokenizer.json"),
)


def write(model: keras.Model, path: Path) -> None:
    """Writes the counterpart of a model.

    Raises:
        InputError: lists what keras-hub has no counterpart for, or says that it is not installed.
    """
    interop: Any = importlib.import_module("kmodels.interop.keras_hub")
    # `convert` has asked about parts that were left out.
    interop.to_hub(model, text_only=True).save_to_preset(str(path))


def run(path: Path, samples: Sequence[np.ndarray], model: keras.Model) -> list[np.ndarray]:
    """Returns what keras-hub's model of a directory gives."""
    package: Any = importlib.import_module("keras_hub")
    held, more = path / TASK, {"preprocessor": None}
    if not held.is_file():
        held, more = path / BACKBONE, {}
    name = json.loads(held.read_text(encoding="utf-8"))["class_name"]
    peer = getattr(package.models, name).from_preset(str(path), **more)
    found = []
    for sample in samples:
        inputs = keras.ops.convert_to_tensor(sample)
        given = peer.input if isinstance(peer.input, dict) else {}
        if "images" in given and "token_ids" not in given:  # its DINOv2
            outputs = peer({"images": inputs}, training=False)
        else:
            outputs = serving.outputs(peer, inputs)
        found.append(keras.ops.convert_to_numpy(outputs))
    return found
