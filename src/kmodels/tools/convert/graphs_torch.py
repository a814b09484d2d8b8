"""Graphs that PyTorch writes, all of them from torch.export."""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.export import Dim

if TYPE_CHECKING:
    import keras

KEEPS: dict[str, tuple[str, ...]] = {}


def torch_export(model: "keras.Model", spec: "keras.InputSpec", path: Path) -> None:
    """Writes a program for torch.export.load."""
    model.export(
        str(path),
        format="torch",
        input_signature=[spec],
        verbose=False,
        dynamic_shapes=_free(spec),
    )


def onnx(model: "keras.Model", spec: "keras.InputSpec", path: Path) -> None:
    """Writes by PyTorch's own exporter; Keras would trace by the older one where axes are free."""
    # Axes of length 1 would be taken for constants.
    example = torch.ones([size or 2 for size in spec.shape], dtype=getattr(torch, spec.dtype))
    program = torch.onnx.export(
        model,
        (example,),
        dynamo=True,
        dynamic_shapes=[(_free(spec),)],
        input_names=[spec.name],
        verbose=False,
    )
    assert program is not None  # what dynamo=True gives
    program.save(str(path))


def openvino(model: "keras.Model", spec: "keras.InputSpec", path: Path) -> None:
    """Writes OpenVINO from a program: of what Keras traces for it, it lacks ops."""
    ov: Any = importlib.import_module("openvino")
    held = path / "model.pt2"
    torch_export(model, spec, held)
    found = ov.convert_model(torch.export.load(held))
    held.unlink()
    found.inputs[0].get_tensor().set_names({spec.name})
    found.reshape({spec.name: [-1 if size is None else size for size in spec.shape]})
    ov.save_model(found, path / "model.xml", compress_to_fp16=False)


def _free(spec: "keras.InputSpec") -> dict[int, Any]:
    return {axis: Dim.DYNAMIC for axis, size in enumerate(spec.shape) if size is None}


WRITERS = {"torch-export": torch_export, "onnx": onnx, "openvino": openvino}
