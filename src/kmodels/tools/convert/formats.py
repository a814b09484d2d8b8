"""The formats that a model can leave in: who writes them, and who reads them again."""

import difflib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kmodels.core.backend_choice import BACKENDS
from kmodels.core.dispatch import backend
from kmodels.core.errors import InputError
from kmodels.generation.request import PIXELS
from kmodels.models import registry
from kmodels.presets.save import TRANSFORMERS_FILES
from kmodels.tools.convert import hub

FLOATS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Runtime:
    """The runtime that reads a format where it is used.

    Args:
        name: for people.
        packages: modules that have to be there.
        install: what pip is asked for.
        call: module of this package and its function of (path, samples, model) to outputs.
        rough: it rounds within its own computation.
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
    """A way out.

    Args:
        name: as `--to` takes it.
        what: it is, for people.
        runtime: what it is compared in.
        stand_in: what it is compared in where the runtime is not installed.
        suffix: suffix of the file; "" for a directory.
        files: names in a directory, which alone are replaced.
        method: method of the models that can be written; "" where any model can.
        writer: module of this package and its function of (model, path), for weights without a
            method; else the graph is traced.
        backends: backend to the packages that tracing needs there.
        dtypes: dtypes of the weights, the usual one first.
        rounds: `method` takes the dtype, whatever the model's own.
        limited: a file ends at 2 GiB.
        mapped: only of families that have tables of keras-hub.
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

    @property
    def traced(self) -> bool:
        """True if it holds a graph."""
        return not self.method and not self.writer[0]

    def reader(self) -> Runtime:
        """Returns the runtime to compare in, or its stand-in where only that is installed."""
        if self.stand_in and self.runtime.missing() and not self.stand_in.missing():
            return self.stand_in
        return self.runtime

    def families(self) -> list[str]:
        """Returns the families whose models can be written."""
        return [
            family.name
            for family in registry.families()
            if family.tasks  # a family without any is a part of others
            and (family.keras_hub or not self.mapped)
            and not (self.traced and takes_images(family.backbone))
            and not takes_pairs(family.backbone)
            and (not self.method or any(hasattr(task, self.method) for task in family.tasks))
        ]

    def check_backend(self) -> None:
        """Raises `InputError` where the running backend, or a package, cannot write it."""
        if backend() not in self.backends:
            able = list(self.backends)
            raise InputError(
                f"{self.name} cannot be written from {backend()} but from {' and '.join(able)}: "
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
    """Returns whether a backbone, or its class, takes texts with images.

    A graph has one input, and such a model several.
    """
    return not set(PIXELS).isdisjoint(getattr(backbone, "takes", ()))


def takes_pairs(backbone: Any) -> bool:
    """Returns whether a backbone, or its class, has two towers, which no peer is asked about.

    Such a model is written by its own `export_to_transformers`.
    """
    known = backbone.config_class.__dataclass_fields__
    return takes_images(backbone) and "vocabulary_size" not in known


def missing(packages: tuple[str, ...]) -> list[str]:
    """Returns those that are not installed."""
    return [name for name in packages if importlib.util.find_spec(name) is None]


def find(name: str) -> ExportFormat:
    """Returns the format of a name.

    Raises:
        InputError: for an unknown one.
    """
    if name not in FORMATS:
        near = difflib.get_close_matches(name, FORMATS, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InputError(f"there is no format {name!r}; choose one of {', '.join(FORMATS)}{hint}")
    return FORMATS[name]


def table() -> str:
    """Returns what works from which backend, in Markdown; the tests prove each cell."""
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
                ("runtimes_torch", "transformers"),
            ),
            files=TRANSFORMERS_FILES,
            method="export_to_transformers",
            dtypes=FLOATS,
        ),
        ExportFormat(
            "timm",
            "directory of timm",
            Runtime(*_TIMM, ("runtimes_torch", "timm")),
            files=("config.json", "model.safetensors"),
            method="export_to_timm",
            dtypes=FLOATS,
        ),
        ExportFormat(
            "npz",
            "file of vision_transformer and big_vision",
            Runtime(*_TIMM, ("runtimes_torch", "timm_npz")),
            suffix=".npz",
            method="export_to_npz",
        ),
        ExportFormat(
            "keras-hub",
            "directory of keras-hub",
            Runtime("keras-hub", ("keras_hub",), "keras-hub", ("hub", "run")),
            files=hub.FILES,
            writer=("hub", "write"),
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
                ("runtimes_torch", "gguf"),
            ),
            suffix=".gguf",
            method="export_to_gguf",
            dtypes=("float16", "q8_0", "bfloat16", "float32"),
            rounds=True,
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
                ("runtimes_tensorflow", "savedmodel"),
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
            Runtime("PyTorch", ("torch",), "torch", ("runtimes_torch", "program")),
            suffix=".pt2",
            backends={"torch": ()},
        ),
        ExportFormat(
            "stablehlo",
            "StableHLO as jax.export keeps it",
            Runtime("JAX", ("jax",), "jax", ("runtimes_jax", "stablehlo")),
            suffix=".stablehlo",
            backends={"jax": ()},
            limited=True,
        ),
    )
}
