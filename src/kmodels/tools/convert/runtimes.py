"""The model as exporters trace it, and runtimes that need no framework."""

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from kmodels.core.types import Tree

if TYPE_CHECKING:
    import keras


Arrays = Sequence[np.ndarray]
# The files of a directory of keras-hub.
TASK, BACKBONE = "task.json", "config.json"
HUB_FILES = (
    *(TASK, BACKBONE, "metadata.json", "model.weights.h5", "task.weights.h5"),
    *("assets", "image_converter.json", "preprocessor.json", "tokenizer.json"),
)


class Served(keras.Model):
    """A model in inference without its optional inputs.

    Args:
        model: a backbone or task.

    Call:
        preprocessed images (B, height, width, C) float32, or token ids (B, T) int32 -> outputs of
        the model, in the order of their names if there are several.
    """

    def __init__(self, model: keras.Model):
        super().__init__(name="served")
        self.served = model

    def call(self, inputs: Tree) -> Any:
        """Returns the outputs of the model."""
        arrays = listed(outputs(self.served, inputs))
        return arrays[0] if len(arrays) == 1 else arrays


def serve(model: keras.Model) -> tuple[Served, keras.InputSpec]:
    """Returns the built `Served` model and its input, with None for axes of any length."""
    served = Served(model)
    served(samples(model, 2)[1])
    if takes_text(model):
        return served, keras.InputSpec(shape=(None, None), dtype="int32", name="token_ids")
    shape = (None, *_image_shape(model))
    return served, keras.InputSpec(shape=shape, dtype="float32", name="images")


def outputs(model: keras.Model, inputs: Tree) -> Any:
    """Returns the outputs of a model for images, or for token ids without padding."""
    if takes_text(model):
        whole = {"token_ids": inputs, "padding_mask": keras.ops.ones_like(inputs)}
        if "position_ids" in model.input:  # keras-hub's Gemma 4
            whole["position_ids"] = keras.ops.cumsum(whole["padding_mask"], axis=1) - 1
        if "vision_indices" in model.input:  # keras-hub's Gemma 3
            whole |= _unseen(model, keras.ops.shape(inputs))
        return model(whole, training=False)
    if isinstance(model.input, dict):  # CLIP's and SigLIP's vision encoders
        inputs = {"images": inputs}
    return model(inputs, training=False)


def listed(outputs: Any) -> list[Any]:
    """Returns all outputs of a model, those of a dictionary in the order of their names."""
    if isinstance(outputs, dict):
        return [outputs[name] for name in sorted(outputs)]
    return list(outputs) if isinstance(outputs, list | tuple) else [outputs]


def _unseen(model: keras.Model, shape: Sequence[int]) -> dict[str, Any]:
    """Returns an unused image for each row; without images the convolution may fail."""
    count = getattr(model, "backbone", model).num_vision_tokens_per_image
    return {
        "images": keras.ops.zeros((shape[0], 1, *model.input["images"].shape[2:])),
        "vision_indices": keras.ops.zeros((shape[0], count), "int32"),
        "vision_mask": keras.ops.zeros(tuple(shape), "int32"),
    }


def samples(model: keras.Model, length: int) -> list[np.ndarray]:
    """Returns fixed inputs of two shapes, which test that axes of any length are exported as such.

    Args:
        model: a backbone or task.
        length: length of the longer rows of text.
    """
    rng = np.random.default_rng(0)
    if takes_text(model):
        size = getattr(model, "backbone", model).config.vocabulary_size
        shapes = ((3, length), (1, length // 2 + 1))
        return [rng.integers(0, size, shape).astype("int32") for shape in shapes]
    shape = _image_shape(model)
    return [rng.normal(size=(rows, *shape)).astype("float32") for rows in (3, 1)]


def takes_text(model: keras.Model) -> bool:
    """Returns True if a model has an input of token ids."""
    return isinstance(model.input, dict) and "token_ids" in model.input


def _image_shape(model: keras.Model) -> tuple[int, ...]:
    images = model.input["images"] if isinstance(model.input, dict) else model.input
    return tuple(images.shape[1:])


def onnx(path: Path, samples: Arrays, model: keras.Model) -> list[np.ndarray]:
    """Runs ONNX Runtime on the CPU."""
    runtime: Any = importlib.import_module("onnxruntime")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return [x for sample in samples for x in session.run(None, {name: sample})]


def litert(path: Path, samples: Arrays, model: keras.Model) -> list[np.ndarray]:
    """Runs LiteRT's interpreter."""
    runtime: Any = importlib.import_module("ai_edge_litert.interpreter")
    interpreter = runtime.Interpreter(model_path=str(path))
    source = interpreter.get_input_details()[0]
    details = sorted(interpreter.get_output_details(), key=lambda one: one["name"])
    outputs = []
    for sample in samples:
        interpreter.resize_tensor_input(source["index"], sample.shape)
        interpreter.allocate_tensors()
        interpreter.set_tensor(source["index"], sample)
        interpreter.invoke()
        outputs += [interpreter.get_tensor(one["index"]) for one in details]
    return outputs


def openvino(path: Path, samples: Arrays, model: keras.Model) -> list[np.ndarray]:
    """Runs OpenVINO on the CPU in float32, the dtype of the file."""
    ov: Any = importlib.import_module("openvino")
    settings = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = ov.Core().compile_model(str(path / "model.xml"), "CPU", settings)
    # Behind the outputs of the model OpenVINO may have values of the graph.
    count = len(listed(model.output))
    return [np.array(x) for sample in samples for x in [*compiled(sample).values()][:count]]


def gguf(path: Path, samples: Arrays, model: keras.Model) -> list[np.ndarray]:
    """Runs llama.cpp on the CPU, row by row, with keys and values in float32."""
    runtime: Any = importlib.import_module("llama_cpp")
    llama = runtime.Llama(
        model_path=str(path),
        n_ctx=max(sample.shape[1] for sample in samples),
        n_gpu_layers=0,
        logits_all=True,
        type_k=runtime.GGML_TYPE_F32,
        type_v=runtime.GGML_TYPE_F32,
        verbose=False,
    )
    outputs = []
    for sample in samples:
        rows = []
        for row in sample:
            llama.reset()
            llama.eval(row.tolist())
            rows.append(np.array(llama.scores[: len(row)]))
        outputs.append(np.stack(rows))
    llama.close()
    return outputs


def write_keras_hub(model: keras.Model, path: Path) -> None:
    """Writes a directory of keras-hub by its own method.

    Raises:
        InputError: if keras-hub is not installed, or lacks a counterpart for a part of the model.
    """
    interop: Any = importlib.import_module("kmodels.interop.keras_hub")
    # `convert` has checked the parts that are left out.
    left = bool(getattr(model, "backbone", model).left_out)
    interop.to_hub(model, text_only=left).save_to_preset(str(path))


def keras_hub(path: Path, samples: Arrays, model: keras.Model) -> list[np.ndarray]:
    """Runs keras-hub on a directory, on the running backend."""
    package: Any = importlib.import_module("keras_hub")
    file, more = path / TASK, {"preprocessor": None}
    if not file.is_file():
        file, more = path / BACKBONE, {}
    name = json.loads(file.read_text(encoding="utf-8"))["class_name"]
    peer = getattr(package.models, name).from_preset(str(path), **more)
    arrays = []
    for sample in samples:
        inputs = keras.ops.convert_to_tensor(sample)
        names = peer.input if isinstance(peer.input, dict) else {}
        if "images" in names and "token_ids" not in names:  # its DINOv2
            output = peer({"images": inputs}, training=False)
        else:
            output = outputs(peer, inputs)
        arrays.append(keras.ops.convert_to_numpy(output))
    return arrays
