"""`kmodels convert`: files for other packages and runtimes, each compared with the model."""

import difflib
import importlib
import importlib.metadata
import importlib.util
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import keras
import numpy as np

from kmodels import lora, presets, registry
from kmodels.core import dispatch
from kmodels.core.dispatch import backend, backend_module
from kmodels.core.environment import BACKENDS
from kmodels.core.errors import InputError, check_whole, human, one_line, shown
from kmodels.core.files import atomic_directory, check_output, is_remote, local_path
from kmodels.core.remote import open_address, staged, write_file
from kmodels.core.schema import read_json
from kmodels.layers.changes import quantized_layers
from kmodels.models.blocks.gguf import adapters
from kmodels.models.blocks.gguf.adapters import DTYPES as ADAPTER_DTYPES
from kmodels.models.blocks.gguf.quantizing import MIXTURES
from kmodels.models.blocks.gguf.writing import check_imatrix
from kmodels.presets.save import TRANSFORMERS_FILES, takes_images
from kmodels.tools.convert import runtimes
from kmodels.tools.convert.runtimes import HUB_FILES
from kmodels.weights import native
from kmodels.weights.engine import warn_of_average
from kmodels.weights.native import refuse_to_replace

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
        others = [self.stand_in] if self.stand_in else []
        return next((x for x in (self.runtime, *others) if not missing(x.packages)), self.runtime)

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


__all__ = ["FORMATS", "Converted", "Differs", "ExportFormat", "Runtime", "convert", "table"]

# Shares of the largest output. A wrong file differs far more, float32 rounding far less. llama.cpp
# uses a table of GELU in half precision and rounds inputs of matrix products to as few bits as the
# weights have, which changes outputs about as much as rounding the weights.
LIMIT, LIMIT_ROUGH, ROUNDINGS = 1e-3, 5e-2, 4.0
MOST_BYTES = 2**31


class GraphsBackend(Protocol):
    """Graphs that one backend writes."""

    @property
    def WRITERS(self) -> Mapping[str, Callable[[Any, Any, Path], None]]:
        """Functions by format that write a model with this `keras.InputSpec` to a path."""
        ...

    @property
    def KEEPS(self) -> Mapping[str, Sequence[str]]:
        """Ops by format that keep their override; all others use the generic body."""
        ...


class Differs(RuntimeError):
    """Raised if a written file has other outputs than the model; the file was not kept."""


@dataclass(frozen=True)
class Converted:
    """The result of a conversion.

    Attributes:
        path: path of the file or directory.
        format: name of the format.
        dtype: dtype of the written weights.
        bytes: bytes of all files.
        runtime: runtime of the comparison, with its version; "" without one.
        difference: largest difference between outputs of the runtime and of kmodels with the
            written weights; None without a comparison. Of adapters alone, between the changes of
            weights that the file and the model hold.
        rounding: largest difference between outputs of kmodels with the written weights and with
            the model's own; None if the weights are the same.
        largest: largest absolute value of the model's outputs, or of these changes.
        advice: reason for a missing comparison, and the packages to install; "" if there was one.
        part: names the written class and the class of the whole source if they differ, else "".
    """

    path: Path
    format: str
    dtype: str
    bytes: int
    runtime: str
    difference: float | None
    rounding: float | None
    largest: float
    advice: str
    part: str = ""

    def line(self) -> str:
        """Returns the line that the command prints."""
        start = f"{shown(self.path)} ({self.format}, {self.dtype}, {human(self.bytes)})"
        what = "changes of weights" if FORMATS[self.format].adapters else "outputs"
        scale = f"{what} up to {self.largest:.2g}"
        rounded = ""
        if self.rounding is not None:
            rounded = f"; rounding to {self.dtype} changed them by {self.rounding:.1e} at most"
        part = self.part and f"; {self.part}"
        if self.difference is None:
            return f"{start}: written, not compared: {self.advice}{rounded}, {scale}{part}"
        differs = f"{self.runtime} differs by {self.difference:.1e} at most"
        return f"{start}: {differs}, {scale}{rounded}{part}"


def convert(
    source: str | Path | keras.Model,
    destination: str | Path,
    to: str,
    *,
    dtype: str | None = None,
    adapter: str | Path | None = None,
    sequence_length: int | None = None,
    text_only: bool = False,
    mmproj: str | Path | None = None,
    base: str | Path | None = None,
    imatrix: str | Path | None = None,
) -> Converted:
    """Writes a model in a format, reads it in the runtime of that format, and compares outputs.

    The destination is replaced only after the comparison. LoRA adapters of the source are merged,
    except in "gguf-lora", which holds nothing else.

    Args:
        source: a path that `from_preset` reads, or a model without adapters, which is not changed;
            for "gguf-lora" the directory of an adapter, or a model with adapters.
        destination: file or directory to create or replace, local or remote.
        to: a key of `FORMATS`.
        dtype: dtype of the written weights; by default the usual one of the format.
        adapter: directory of an adapter to load and merge, if the source is a path.
        sequence_length: tokens of the compared rows of a language model; 32 by default.
        text_only: writes the text part of a checkpoint whose other parts are left out.
        mmproj: file for the vision encoder of a model whose text is written to a GGUF file.
        base: the model of an adapter's directory, a path that `from_preset` reads.
        imatrix: importance matrix of llama.cpp for the mixtures of a GGUF file.

    Raises:
        InputError: if the format, the backend or the runtime does not support it; nothing is
            replaced.
        Differs: if the outputs are not those of the model; nothing is replaced.
    """
    form = find(to)
    kind = form.choose_dtype(dtype)
    length = 32 if sequence_length is None else sequence_length
    check_whole("sequence_length", length, 2)
    if is_remote(destination):
        open_address(destination)
        destination = Path(destination)
    else:
        destination = local_path(destination)
    is_path = isinstance(source, str | Path)
    inputs = (source if is_path else None, adapter, base, imatrix)
    _check_destination(form, destination, inputs)
    if form.name == "gguf" and mmproj is not None and not is_remote(mmproj):
        check_output("mmproj", mmproj, inputs=inputs)
    form.check_backend()
    _check_base(form, is_path, adapter, base)
    if form.name == "gguf":
        check_imatrix(kind, imatrix)
    elif imatrix is not None:
        raise InputError(f"imatrix is {imatrix}; only gguf uses it: leave imatrix out")
    if not is_path and adapter is not None:
        raise InputError(
            "adapter needs a source that is a path; load the adapter and call merge_lora"
        )
    # The host has more memory, no TF32, and writes files that run anywhere.
    with keras.device("cpu") if is_path else nullcontext():
        whole = not text_only and not form.traced
        read = "float32" if form.rounds else kind
        if not is_path:
            model = source
        elif base is not None:
            # An adapter does not depend on the weights of its base.
            model = presets.class_of(base, whole).from_preset(base, load_weights=False)
            model.load_adapter(source)
        else:
            model = _open(source, read, adapter, whole)
        _check_model(form, model, kind)
        presets.check_parts(model, text_only, form.what, splits=form.name == "gguf")
        if sequence_length is not None and (form.adapters or not runtimes.takes_text(model)):
            what = form.what if form.adapters else f"a {type(model).__name__}"
            raise InputError(f"sequence_length has no effect on {what}; leave it out")
        _check_mmproj(form, model, destination, kind, text_only, mmproj)
        results: list[Converted] = []

        def write(path: Path) -> None:
            _write(form, model, path, kind, imatrix)
            if form.adapters:
                results.append(_compare_adapters(form, model, path, kind, destination))
                return
            results.append(_compare(form, model, path, kind, length, destination))
            if mmproj is not None:
                model.write_mmproj(mmproj, kind)

        if form.suffix:
            write_file(destination, write)
        else:
            with staged(destination) as (target, finish):
                with atomic_directory(target) as folder:
                    write(folder)
                finish(target)
    # With text_only the caller knows that the other parts are missing.
    if not is_path or text_only or form.adapters:
        return results[0]
    if not (whole := whole_of(source, type(model))):
        return results[0]
    part = f"it has only the {type(model).__name__} of a {whole}"
    return replace(results[0], part=part)


def _check_destination(form: ExportFormat, destination: Path, inputs: Sequence[Any]) -> None:
    if not form.suffix:
        refuse_to_replace(destination, form.files)
    elif destination.suffix != form.suffix:
        raise InputError(
            f"{destination} does not end in {form.suffix}; give the name of such a file"
        )
    elif destination.is_dir():
        raise InputError(f"{destination} is a directory; {form.name} is a file, give its name")
    if not is_remote(destination):
        check_output("destination", destination, folder=not form.suffix, inputs=inputs)


def _check_base(
    form: ExportFormat, is_path: bool, adapter: str | Path | None, base: str | Path | None
) -> None:
    """Raises `InputError` for a base that is missing, or given where none belongs."""
    if base is not None and not (form.adapters and is_path):
        raise InputError(
            f"base is {base}; only gguf-lora of an adapter's directory needs it; leave base out"
        )
    if form.adapters and is_path and base is None:
        raise InputError("gguf-lora needs base: the model that the adapter was trained on")
    if form.adapters and adapter is not None:
        raise InputError("the source of gguf-lora is the adapter; leave adapter out")


def _check_mmproj(
    form: ExportFormat,
    model: keras.Model,
    destination: Path,
    dtype: str,
    text_only: bool,
    mmproj: str | Path | None,
) -> None:
    if hasattr(model, "check_mmproj") and form.name == "gguf":
        model.check_mmproj(destination, dtype, text_only, mmproj)
    elif mmproj is not None:
        raise InputError(
            f"mmproj is {mmproj}; only gguf has a separate file for the vision encoder; leave "
            "mmproj out"
        )


def _open(source: str | Path, dtype: str, adapter: str | Path | None, whole: bool) -> Any:
    model = presets.class_of(source, whole).from_preset(source, dtype=dtype)
    if adapter is not None:
        model.load_adapter(adapter)
    if lora.describe(model):
        model.merge_lora()
    return model


def _check_model(form: ExportFormat, model: keras.Model, dtype: str) -> None:
    if lora.describe(model) and not form.adapters:
        raise InputError("the model has LoRA adapters; call merge_lora first")
    backbone = getattr(model, "backbone", model)
    if takes_pairs(backbone):
        raise InputError(
            f"{form.name} holds one tower, and {type(model).__name__} has two; use its "
            "export_to_transformers"
        )
    if form.method and not hasattr(model, form.method):
        raise InputError(
            f"{form.name} holds models of {', '.join(form.families())}; this is a "
            f"{type(model).__name__} of {backbone.family}"
        )
    if form.traced and takes_images(backbone):
        raise InputError(
            f"{form.name} holds a graph with one input, and {type(model).__name__} takes texts and "
            "images; write hf, keras-hub or gguf"
        )
    if not form.rounds and (own := backbone.variable_dtype) != dtype:
        able = f"give dtype={own!r}, or " if own in form.dtypes else ""
        raise InputError(f"the model is {own}; {able}load it with dtype={dtype!r}")
    if not form.rounds and (policy := backbone.dtype_policy).compute_dtype != dtype:
        raise InputError(
            f"the model computes in {policy.compute_dtype} ({policy.name}), so outputs cannot be "
            f"compared; load it with dtype={dtype!r}"
        )
    size = sum(int(np.prod(weight.shape)) for weight in model.weights) * 4
    if form.limited and size >= MOST_BYTES:
        raise InputError(
            f"{form.name} is limited to {human(MOST_BYTES)}, and the model has {human(size)}; "
            "write hf, gguf, savedmodel or torch-export"
        )


def _write(
    form: ExportFormat, model: keras.Model, path: Path, dtype: str, imatrix: str | Path | None
) -> None:
    if form.method:
        # `check_parts` and `_check_mmproj` have checked the parts that are left out.
        beside = form.name == "gguf" and takes_images(model.backbone)
        left = beside or getattr(model, "backbone", model).left_out
        more: dict[str, Any] = {"text_only": True} if left and not form.adapters else {}
        if imatrix is not None:
            more["imatrix"] = imatrix
        getattr(model, form.method)(path, *([dtype] if form.rounds else []), **more)
        return
    if not form.traced:
        name, function = form.writer
        getattr(importlib.import_module(f"kmodels.tools.convert.{name}"), function)(model, path)
        return
    graphs = backend_module("kmodels.tools.convert.graphs", GraphsBackend)
    overridden = graphs.KEEPS.get(form.name, ())
    warn_of_average(model)
    served, spec = runtimes.serve(model)
    generic = [op for op in dispatch.ops() if op not in overridden]
    # Exporters warn about their internals, and support the ops of the generic bodies best.
    try:
        with warnings.catch_warnings(), dispatch.generic_only(*generic):
            warnings.simplefilter("ignore")
            graphs.WRITERS[form.name](served, spec, path)
    except Exception as error:  # each exporter has its own
        others = [name for name in form.backends if name != dispatch.backend()]
        advice = "call dequantize first" if quantized_layers(model) else ""
        advice = advice or f"try {' or '.join(others) if others else 'another format'}"
        reason = f"could not be written from {dispatch.backend()} ({_reason(error)})"
        raise InputError(f"{form.name} {reason}; {advice}") from error


def _compare(
    form: ExportFormat, model: keras.Model, path: Path, dtype: str, length: int, destination: Path
) -> Converted:
    samples = runtimes.samples(model, length)
    expected = _outputs(model, samples)
    largest = max(float(np.abs(x).max()) for x in expected)
    rounding = None
    if dtype != "float32":
        # A model with the written weights that computes in float32. A GGUF file of a model with
        # images holds its text model.
        cls = presets.class_of(path) if form.name == "gguf" else type(model)
        more = {"preprocessor": None} if hasattr(model, "preprocessor") else {}
        again = cls.from_preset(path, dtype="float32", **more)
        exact, expected = expected, _outputs(again, samples)
        rounding = _distance(exact, expected) if form.rounds else None
    reader = form.reader()
    outputs, advice = _ask(reader, path, samples, model)
    difference, runtime = None, ""
    if outputs is not None:
        difference = _distance(outputs, expected)
        runtime = f"{reader.name} {_version(reader.packages[0])}"
        rough = max(LIMIT_ROUGH * largest, ROUNDINGS * (rounding or 0.0))
        # bitsandbytes rounds kernels to the dtype of the other weights.
        is_rough = reader.rough or (dtype != "float32" and bool(quantized_layers(model)))
        if not difference <= (rough if is_rough else LIMIT * largest):
            raise Differs(
                f"{runtime} differs by {difference:.1e} on outputs up to {largest:.2g}; "
                f"{destination} was not written"
            )
    return Converted(
        destination,
        form.name,
        dtype,
        sum(file.stat().st_size for file in (path, *path.rglob("*")) if file.is_file()),
        runtime,
        difference,
        rounding,
        largest,
        advice,
    )


def _compare_adapters(
    form: ExportFormat, model: Any, path: Path, dtype: str, destination: Path
) -> Converted:
    """Compares the changes of the base's weights, in the layout of its GGUF file."""
    difference, largest = adapters.compare(model.gguf_export, model, path)
    runtime = f"{form.runtime.name} {_version(form.runtime.packages[0])}"
    limit = (LIMIT if dtype == "float32" else LIMIT_ROUGH) * largest
    if not difference <= limit:
        raise Differs(
            f"{runtime} differs by {difference:.1e} on changes up to {largest:.2g}; {destination} "
            "was not written"
        )
    size = path.stat().st_size
    return Converted(
        destination, form.name, dtype, size, runtime, difference, None, largest, advice=""
    )


def _ask(
    reader: Runtime, path: Path, samples: Sequence[np.ndarray], model: keras.Model
) -> tuple[list[np.ndarray] | None, str]:
    """Returns the outputs of the runtime, or None and the reason for which it cannot run."""
    if absent := missing(reader.packages):
        return None, f"{', '.join(absent)} is not installed, pip install {reader.install}"
    name, function = reader.call
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for package in reader.packages:
                importlib.import_module(package)
        except Exception as error:  # A broken installation raises any.
            return None, f"{reader.name} cannot be imported ({one_line(error)})"
        try:
            module = importlib.import_module(f"kmodels.tools.convert.{name}")
            return getattr(module, function)(path, samples, model), ""
        except ImportError as error:
            return None, f"{reader.name} cannot be imported ({one_line(error)})"
        except Exception as error:  # each runtime has its own
            hint = "; call dequantize first" if quantized_layers(model) else "; try another format"
            raise InputError(
                f"{reader.name} cannot run the written file, which was not kept "
                f"({_reason(error)}){hint}"
            ) from error


def _reason(error: BaseException) -> str:
    """Returns the first line of the cause of an error, without codes for the terminal."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()
    return text.partition("\n")[0] or type(error).__name__


def _outputs(model: keras.Model, samples: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the outputs in float32, since NumPy cannot compare bfloat16."""
    tensors = map(keras.ops.convert_to_tensor, samples)
    arrays = [x for tensor in tensors for x in runtimes.listed(runtimes.outputs(model, tensor))]
    return [keras.ops.convert_to_numpy(keras.ops.cast(x, "float32")) for x in arrays]


def _distance(left: Sequence[np.ndarray], right: Sequence[np.ndarray]) -> float:
    """Returns the largest difference; infinite between different shapes."""
    if [x.shape for x in left] != [x.shape for x in right]:
        return float("inf")
    return max(float(np.abs(a - b).max()) for a, b in zip(left, right, strict=True))


def _version(module: str) -> str:
    names = importlib.metadata.packages_distributions().get(module, [module])
    return importlib.metadata.version(names[0])


def whole_of(source: str | Path, cls: type) -> str:
    """Returns the name of the class of a whole source if `cls` reads only a part of it, else ""."""
    path = presets.locate(source)
    if not (path / "config.json").is_file():
        return ""
    description = read_json(path / "config.json")
    if native.is_ours(path, description):
        name, task = description.get("class", ""), description.get("task") or {}
        # A classifier without classes is only its backbone.
        return name if name != cls.__name__ and task and "num_classes" not in task else ""
    name = next(iter(description.get("architectures") or ()), "")
    known = {task.__name__ for family in registry.families() for task in family.tasks}
    towers = {"text_config", "vision_config"} <= set(description)
    part = towers and not takes_images(getattr(cls, "backbone_class", cls))
    return name if part or (name in known and name != cls.__name__) else ""
