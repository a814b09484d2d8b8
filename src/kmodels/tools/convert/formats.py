"""The export formats: how each is written, and the runtime that reads it."""

import difflib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kmodels import registry
from kmodels.core.dispatch import backend
from kmodels.core.environment import BACKENDS
from kmodels.core.errors import InputError
from kmodels.generation.request import PIXELS
from kmodels.models.blocks.gguf.adapters import DTYPES as ADAPTER_DTYPES
from kmodels.models.blocks.gguf.quantizing import MIXTURES
from kmodels.presets.save import TRANSFORMERS_FILES
from kmodels.tools.convert.runtimes import HUB_FILES

FLOATS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Runtime:
    """The runtime that reads a format.

    Args:
        name: name in messages.
        packages: modules that it needs.
        install: names of the packages for pip.
        call: module of this package and its function (path, samples, model) -> outputs.
        rough: the runtime rounds inside its computation.
    """

    name: str
    packages: tuple[str, ...]
    install: str
    call: tuple[str, str]
    rough: bool = False

    def missing(self) -> list[str]:
        """Packages that are not installed."""
        return missing(self.packages)


@dataclass(frozen=True)
class ExportFormat:
    """A format of exported models.

    Args:
        name: value of `--to`.
        what: description in the table of docs/convert.md.
        runtime: runtime of the comparison.
        stand_in: runtime of the comparison if `runtime` is not installed.
        suffix: suffix of the file; "" for a directory.
        files: names in a directory; no others are replaced.
        method: method of a model that writes it; "" if there is none.
        writer: module of this package and its function (model, path), which writes weights without
            a method; a format with neither is a traced graph.
        backends: packages that tracing needs, by backend.
        dtypes: dtypes of the weights, the usual one first.
        rounds: `method` accepts a dtype other than the model's.
        limited: files are limited to 2 GiB.
        mapped: only for families with tables of keras-hub.
        adapters: holds the adapters of a model alone.
    """

    name: str
    what: str
    runtime: Runtime
    stand_in: Runtime | None = None
    suffix: str = ""
    files: tuple[str, ...] = ()
    method: str = ""
    writer: tuple[str, str] = ("", "")
    backends: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: dict.fromkeys(BACKENDS, ())
    )
    dtypes: tuple[str, ...] = ("float32",)
    rounds: bool = False
    limited: bool = False
    mapped: bool = False
    adapters: bool = False

    @property
    def traced(self) -> bool:
        """True if the format is a traced graph."""
        return not self.method and not self.writer[0]

    def reader(self) -> Runtime:
        """Returns the runtime, or its stand-in if only that is installed."""
        if self.stand_in and self.runtime.missing() and not self.stand_in.missing():
            return self.stand_in
        return self.runtime

    def families(self) -> list[str]:
        """Returns the families whose models can be written."""
        return [
            family.name
            for family in registry.families()
            if family.tasks  # a family without tasks is a part of others
            and (family.keras_hub or not self.mapped)
            and not (self.traced and takes_images(family.backbone))
            and not takes_pairs(family.backbone)
            and (not self.method or any(hasattr(task, self.method) for task in family.tasks))
        ]

    def check_backend(self) -> None:
        """Raises `InputError` if the running backend cannot write it or a package is missing."""
        if backend() not in self.backends:
            able = list(self.backends)
            raise InputError(
                f"{self.name} can be written from {' and '.join(able)}, not from {backend()}: "
                f"set KERAS_BACKEND={able[0]}"
            )
        if absent := missing(self.backends[backend()]):
            raise InputError(
                f"writing {self.name} from {backend()} needs {', '.join(absent)}: "
                "pip install 'kmodels[export]'"
                + ("" if "tensorflow" not in absent else " 'kmodels[tensorflow]'")
            )

    def choose_dtype(self, dtype: str | None) -> str:
        """Returns the dtype to write, by default the usual one."""
        if dtype is None:
            return self.dtypes[0]
        if dtype not in self.dtypes:
            raise InputError(
                f"dtype is {dtype!r}; {self.name} is written as {', '.join(self.dtypes)}"
            )
        return dtype


def takes_images(backbone: object) -> bool:
    """Returns True if a backbone, or its class, takes texts with images.

    Such a model has several inputs, and a graph has one.
    """
    return not set(PIXELS).isdisjoint(getattr(backbone, "takes", ()))


def takes_pairs(backbone: Any) -> bool:
    """Returns True if a backbone, or its class, has two towers.

    Such a model is written by its own `export_to_transformers`, without a comparison.
    """
    known = backbone.config_class.__dataclass_fields__
    return takes_images(backbone) and "vocabulary_size" not in known


def missing(packages: tuple[str, ...]) -> list[str]:
    """Returns the packages that are not installed."""
    return [name for name in packages if importlib.util.find_spec(name) is None]


def find(name: str) -> ExportFormat:
    """Returns the format of a name.

    Raises:
        InputError: for an unknown name.
    """
    if name not in FORMATS:
        near = difflib.get_close_matches(name, FORMATS, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InputError(f"{name!r} is not a format; choose one of {', '.join(FORMATS)}{hint}")
    return FORMATS[name]


def table() -> str:
    """Returns a Markdown table of formats and backends; the tests prove each cell."""
    lines = [
        f"| `--to` | what | families | {' | '.join(BACKENDS)} | compared in |",
        f"| --- | --- | --- | {' | '.join('---' for _ in BACKENDS)} | --- |",
    ]
    for form in FORMATS.values():
        cells = ["yes" if name in form.backends else "no" for name in BACKENDS]
        families = ", ".join(form.families())
        readers = " or ".join(x.name for x in (form.runtime, form.stand_in) if x)
        lines.append(
            f"| `{form.name}` | {form.what} | {families} | {' | '.join(cells)} | {readers} |"
        )
    return "\n".join(lines)


_TIMM = ("timm", ("timm", "torch"), "timm")
FORMATS = {
    form.name: form
    for form in (
        ExportFormat(
            "hf",
            "directory of Hugging Face",
            Runtime(
                "transformers",
                ("transformers", "torch"),
                "transformers torch",
                ("graphs_torch", "run_transformers"),
            ),
            files=TRANSFORMERS_FILES,
            method="export_to_transformers",
            dtypes=FLOATS,
        ),
        ExportFormat(
            "timm",
            "directory of timm",
            Runtime(*_TIMM, ("graphs_torch", "run_timm")),
            files=("config.json", "model.safetensors"),
            method="export_to_timm",
            dtypes=FLOATS,
        ),
        ExportFormat(
            "npz",
            "file of vision_transformer and big_vision",
            Runtime(*_TIMM, ("graphs_torch", "run_timm_npz")),
            suffix=".npz",
            method="export_to_npz",
        ),
        ExportFormat(
            "keras-hub",
            "directory of keras-hub",
            Runtime("keras-hub", ("keras_hub",), "keras-hub", ("runtimes", "keras_hub")),
            files=HUB_FILES,
            writer=("runtimes", "write_keras_hub"),
            mapped=True,
        ),
        ExportFormat(
            "gguf",
            "file of llama.cpp",
            Runtime(
                "llama.cpp", ("llama_cpp",), "llama-cpp-python", ("runtimes", "gguf"), rough=True
            ),
            Runtime(
                "transformers",
                ("transformers", "torch", "gguf"),
                "transformers torch gguf",
                ("graphs_torch", "run_gguf"),
            ),
            suffix=".gguf",
            method="export_to_gguf",
            dtypes=("float16", "q8_0", "bfloat16", "float32", *MIXTURES),
            rounds=True,
        ),
        ExportFormat(
            "gguf-lora",
            "LoRA adapter of llama.cpp",
            Runtime("gguf", ("gguf",), "gguf", ("", "")),
            suffix=".gguf",
            method="export_adapter_to_gguf",
            dtypes=ADAPTER_DTYPES,
            rounds=True,
            adapters=True,
        ),
        ExportFormat(
            "onnx",
            "ONNX graph",
            Runtime("ONNX Runtime", ("onnxruntime",), "onnxruntime", ("runtimes", "onnx")),
            suffix=".onnx",
            backends={"torch": ("onnx", "onnxscript"), "tensorflow": ("onnx", "tf2onnx")},
            limited=True,
        ),
        ExportFormat(
            "savedmodel",
            "TensorFlow SavedModel",
            Runtime(
                "TensorFlow",
                ("tensorflow",),
                "tensorflow",
                ("graphs_tensorflow", "run_savedmodel"),
            ),
            files=("assets", "fingerprint.pb", "saved_model.pb", "variables"),
            backends={"jax": ("tensorflow",), "tensorflow": ()},
        ),
        ExportFormat(
            "litert",
            "LiteRT (TensorFlow Lite) flatbuffer",
            Runtime("LiteRT", ("ai_edge_litert",), "ai-edge-litert", ("runtimes", "litert")),
            suffix=".tflite",
            backends={"tensorflow": ()},
            limited=True,
        ),
        ExportFormat(
            "openvino",
            "directory with OpenVINO's model.xml and model.bin",
            Runtime("OpenVINO", ("openvino",), "openvino", ("runtimes", "openvino")),
            files=("model.bin", "model.xml"),
            backends={"torch": ("openvino",), "tensorflow": ("openvino",)},
        ),
        ExportFormat(
            "torch-export",
            "torch.export program",
            Runtime("PyTorch", ("torch",), "torch", ("graphs_torch", "run_program")),
            suffix=".pt2",
            backends={"torch": ()},
        ),
        ExportFormat(
            "stablehlo",
            "StableHLO as jax.export keeps it",
            Runtime("JAX", ("jax",), "jax", ("graphs_jax", "run_stablehlo")),
            suffix=".stablehlo",
            backends={"jax": ()},
            limited=True,
        ),
    )
}
