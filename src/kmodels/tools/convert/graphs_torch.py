"""PyTorch: graphs that it writes, and the packages on it as runtimes."""

import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import torch
from torch.export import Dim

from kmodels import registry
from kmodels.tools.convert.runtimes import listed
from kmodels.weights import read_safetensors

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
    """Writes by PyTorch's exporter; for axes of any length Keras would use the older one."""
    # Axes of length 1 would become constants.
    example = torch.ones([size or 2 for size in spec.shape], dtype=getattr(torch, spec.dtype))
    program = torch.onnx.export(
        model,
        (example,),
        dynamo=True,
        dynamic_shapes=[(_free(spec),)],
        input_names=[spec.name],
        verbose=False,
        custom_translation_table={torch.ops.aten.sort.stable: _sort},
    )
    assert program is not None  # what dynamo=True gives
    program.save(str(path))


def _sort(x: Any, stable: bool = True, dim: int = -1, descending: bool = False) -> Any:
    """Sorts by TopK, which leaves equal values in their order; the exporter has no stable sort."""
    ops: Any = importlib.import_module("onnxscript").opset18
    size = ops.Gather(ops.Shape(x), ops.Constant(value_ints=[dim]))
    return ops.TopK(x, size, axis=dim, largest=int(descending))


def openvino(model: "keras.Model", spec: "keras.InputSpec", path: Path) -> None:
    """Writes OpenVINO from a program, as it lacks ops of the graph that Keras traces."""
    ov: Any = importlib.import_module("openvino")
    program = path / "model.pt2"
    torch_export(model, spec, program)
    converted = ov.convert_model(torch.export.load(program))
    program.unlink()
    converted.inputs[0].get_tensor().set_names({spec.name})
    converted.reshape({spec.name: [-1 if size is None else size for size in spec.shape]})
    ov.save_model(converted, path / "model.xml", compress_to_fp16=False)


def _free(spec: "keras.InputSpec") -> dict[int, Any]:
    return {axis: Dim.DYNAMIC for axis, size in enumerate(spec.shape) if size is None}


Arrays = Sequence[np.ndarray]


def run_program(path: Path, samples: Arrays, model: keras.Model) -> list[np.ndarray]:
    """Runs a program of torch.export."""
    module = torch.export.load(path).module()
    with torch.no_grad():
        tensors = map(torch.from_numpy, samples)
        return [x.numpy() for tensor in tensors for x in listed(module(tensor))]


def run_transformers(path: Path, samples: Arrays, model: keras.Model) -> list[np.ndarray]:
    """Runs transformers on a directory in float32."""
    package: Any = importlib.import_module("transformers")
    described = json.loads((path / "config.json").read_text(encoding="utf-8"))
    cls = getattr(package, described["architectures"][0])
    peer = cls.from_pretrained(path, dtype=torch.float32).eval()
    if "quantization_config" in described:
        # bitsandbytes multiplies in bfloat16 on a CPU.
        peer = peer.dequantize().float()
    outputs = []
    with torch.no_grad():
        for sample in samples:
            if sample.ndim == 2:
                inputs = {"input_ids": torch.from_numpy(sample).long()}
            elif described["model_type"].startswith("siglip2"):
                inputs = _patches(sample, model)
            else:
                inputs = {"pixel_values": _channels_first(sample)}
            if (masking := getattr(model, "masking", None)) is not None:
                # transformers draws the patches that a MAE hides.
                places = keras.ops.convert_to_numpy(masking.order()).astype("float32")
                inputs["noise"] = torch.from_numpy(places).expand(len(sample), -1)
            output = peer(**inputs)
            if (path / "modules.json").is_file():
                outputs.append(_vectors(path, output.last_hidden_state).numpy())
            else:
                outputs.append(_chosen(output, peer, model).numpy())
    return outputs


def _vectors(path: Path, x: torch.Tensor) -> torch.Tensor:
    """Applies the modules of an embedder after its transformer to hidden states (B, T, D)."""
    for module in json.loads((path / "modules.json").read_text(encoding="utf-8"))[1:]:
        folder, kind = path / module["path"], module["type"].rpartition(".")[2]
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if kind == "Pooling":
            first = config["pooling_mode_cls_token"]
            x = x.mean(1) if config["pooling_mode_mean_tokens"] else x[:, 0 if first else -1]
        elif kind == "Dense":
            tensors = read_safetensors(folder)
            weights = {name: torch.from_numpy(t.read()).float() for name, t in tensors.items()}
            x = torch.nn.functional.linear(x, weights["linear.weight"], weights.get("linear.bias"))
            x = x.tanh() if config["activation_function"].endswith("Tanh") else x
        else:
            x = torch.nn.functional.normalize(x, dim=-1)
    return x


def run_gguf(path: Path, samples: Arrays, model: keras.Model) -> list[np.ndarray]:
    """Runs transformers on the tensors of a GGUF file in float32.

    The gguf package reads the tensors and maps their names to those of Hugging Face, so that this
    works for each family; transformers itself cannot read the GGUF of the first Gemma. The config
    is the model's.
    """
    package: Any = importlib.import_module("transformers")
    reading: Any = importlib.import_module("gguf")
    form = registry.family(model.backbone.family).transformers_form(model)[0]
    form = form.get("text_config", form)  # of a model with images the file holds the text
    peer = package.AutoModelForCausalLM.from_config(package.AutoConfig.for_model(**form))
    file = reading.GGUFReader(path)
    tensors = {x.name: reading.dequantize(x.data, x.tensor_type) for x in file.tensors}
    kind = file.get_field("general.architecture").contents()
    kinds = {name: number for number, name in reading.MODEL_ARCH_NAMES.items()}
    names = reading.get_tensor_name_map(kinds[kind], form["num_hidden_layers"])
    heads = {"attn_q": form["num_attention_heads"], "attn_k": form["num_key_value_heads"]}
    # Norms multiply by the weight in llama.cpp, and in transformers by as much more as here.
    less = model.backbone.config.norm_offset
    scalars = [buffer for buffer in peer.named_buffers() if buffer[0].endswith("layer_scalar")]
    with torch.no_grad():
        for name, weight in (*peer.named_parameters(), *scalars):
            known = names.get_name(name, (".weight",))
            source = known if known in tensors else f"{known}.weight"
            values = torch.from_numpy(tensors[source])
            part = source.split(".")[-2]
            if kind == "llama" and part in heads:  # pairs of channels are side by side there
                pairs = values.reshape(heads[part], -1, 2, *values.shape[1:])
                values = pairs.swapaxes(1, 2).reshape(values.shape)
            weight.copy_(values - less if name.endswith("norm.weight") else values)
        rows = ({"input_ids": torch.from_numpy(sample).long()} for sample in samples)
        return [peer.eval()(**inputs).logits.numpy() for inputs in rows]


def _chosen(output: Any, peer: Any, model: keras.Model) -> torch.Tensor:
    """Returns the output of a model of transformers that corresponds to ours."""
    for name in ("logits", "image_embeds", "text_embeds"):
        if output.get(name) is not None:
            return output[name]
    clip = peer.config.model_type == "clip_vision_model"
    settings = getattr(model, "settings", None)
    if settings is None and len(model.output.shape) == 2:
        return output.pooler_output
    if settings is None:
        # It returns tokens before the final norm, kmodels after it.
        tokens = output.last_hidden_state
        return peer.post_layernorm(tokens) if clip else tokens
    if settings.get("pooling") == "token" and not settings.get("intermediate_dim") and not clip:
        return output.last_hidden_state[:, 0]  # its pooler has weights that kmodels does not have
    return output.pooler_output


def run_timm(path: Path, samples: Arrays, model: keras.Model) -> list[np.ndarray]:
    """Runs timm on a directory."""
    package: Any = importlib.import_module("timm")
    peer = package.create_model(f"local-dir:{path}", pretrained=True)
    return _run_timm(peer, samples, model)


def run_timm_npz(path: Path, samples: Arrays, model: keras.Model) -> list[np.ndarray]:
    """Runs timm on an .npz file, in a model of the same sizes."""
    package: Any = importlib.import_module("timm")
    with TemporaryDirectory() as folder:
        model.export_to_timm(folder)  # for its description
        peer = package.create_model(f"local-dir:{folder}", pretrained=False)
    peer.load_pretrained(str(path))
    return _run_timm(peer, samples, model)


def _run_timm(peer: Callable[..., Any], samples: Arrays, model: keras.Model) -> list[np.ndarray]:
    call = peer.eval() if hasattr(model, "backbone") else peer.eval().forward_features
    with torch.no_grad():
        return [call(_channels_first(sample)).numpy() for sample in samples]


def _channels_first(images: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))


def _patches(images: np.ndarray, model: keras.Model) -> dict[str, torch.Tensor]:
    """Returns SigLIP 2's inputs: patches as rows, a mask of ones, and their grid."""
    patch = getattr(model, "backbone", model).config.patch_size
    number, height, width, channels = images.shape
    grid = (height // patch, width // patch)
    rows = images.reshape(number, grid[0], patch, grid[1], patch, channels)
    rows = rows.transpose(0, 1, 3, 2, 4, 5).reshape(number, grid[0] * grid[1], -1)
    return {
        "pixel_values": torch.from_numpy(np.ascontiguousarray(rows)),
        "pixel_attention_mask": torch.ones(rows.shape[:2], dtype=torch.int64),
        "spatial_shapes": torch.tensor([grid] * number),
    }


WRITERS = {"torch-export": torch_export, "onnx": onnx, "openvino": openvino}
