"""Runtimes of no framework: each gives what a file computes of the samples."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import keras

Arrays = Sequence[np.ndarray]


def onnx(path: Path, samples: Arrays, model: "keras.Model") -> list[np.ndarray]:
    """Runs ONNX Runtime on the CPU."""
    runtime: Any = importlib.import_module("onnxruntime")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return [session.run(None, {name: sample})[0] for sample in samples]


def litert(path: Path, samples: Arrays, model: "keras.Model") -> list[np.ndarray]:
    """Runs LiteRT's interpreter."""
    runtime: Any = importlib.import_module("ai_edge_litert.interpreter")
    interpreter = runtime.Interpreter(model_path=str(path))
    given, found = interpreter.get_input_details()[0], interpreter.get_output_details()[0]
    outputs = []
    for sample in samples:
        interpreter.resize_tensor_input(given["index"], sample.shape)
        interpreter.allocate_tensors()
        interpreter.set_tensor(given["index"], sample)
        interpreter.invoke()
        outputs.append(interpreter.get_tensor(found["index"]))
    return outputs


def openvino(path: Path, samples: Arrays, model: "keras.Model") -> list[np.ndarray]:
    """Runs OpenVINO on the CPU, in float32 as the file is."""
    ov: Any = importlib.import_module("openvino")
    settings = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = ov.Core().compile_model(str(path / "model.xml"), "CPU", settings)
    return [np.array(compiled(sample)[0]) for sample in samples]


def gguf(path: Path, samples: Arrays, model: "keras.Model") -> list[np.ndarray]:
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
