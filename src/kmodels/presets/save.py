"""Writes directories of models, in kmodels' format and in that of transformers."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import yaml

from kmodels import registry
from kmodels.core import processes
from kmodels.core.errors import InputError, check_names
from kmodels.core.few_bits import DYNAMIC, NESTED_BLOCK, TABLES
from kmodels.core.files import atomic_directory
from kmodels.core.remote import staged
from kmodels.distribution.rank_zero import write_on_rank_zero
from kmodels.generation.request import PIXELS
from kmodels.layers import changes
from kmodels.weights import LazyArray, Rule, engine, gather, native, transpose, write_safetensors
from kmodels.weights.files import stored_tensors
from kmodels.weights.packed import STATE
from kmodels.weights.rules import bind_targets

TRANSFORMERS_FILES = (
    "config.json",
    "preprocessor_config.json",
    "model.safetensors",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)


def takes_images(backbone: object) -> bool:
    """Returns True if a backbone, or its class, takes texts with images."""
    return not set(PIXELS).isdisjoint(getattr(backbone, "takes", ()))


def check_parts(model: keras.Model, partial: bool, kind: str, splits: bool = False) -> None:
    """Raises before a part of a checkpoint is written as if it were the whole, and the reverse.

    `partial` is True to write the part with the text, `kind` the output's, and `splits` True if the
    output of a model with images may hold its text alone.
    """
    backbone = getattr(model, "backbone", model)
    parts, fields = backbone.left_out, backbone.config_class.__dataclass_fields__
    has_images = "vocabulary_size" not in fields or takes_images(backbone)
    if partial and has_images and not parts and not splits:
        raise InputError(
            f"a {type(model).__name__} is written whole, so text_only has no effect; leave it out"
        )
    if parts and not partial:
        raise InputError(
            f"the checkpoint's {', '.join(parts)} were left out when it was read, so {kind} of it "
            "would be only a text model; give text_only=True if that is what you want"
        )


def _describe(model: keras.Model) -> dict[str, Any]:
    from kmodels import __version__

    backbone = getattr(model, "backbone", model)
    preprocessor = getattr(model, "preprocessor", None)
    settings = None if preprocessor is None else preprocessor.to_dict()
    if settings is not None and "tokenizer" in settings:  # a file of its own
        settings["tokenizer"] = native.TOKENIZER[0]
    changed = changes.describe(backbone)
    if changes.adapters(backbone, merged=True):
        # The merged weights are a new model, which may be trained.
        changed.pop("frozen", None)
    return {
        "kmodels": {"version": __version__, "format": native.FORMAT},
        "family": backbone.family,
        "class": type(model).__name__,
        "backbone": backbone.config.to_dict(),
        "task": getattr(model, "settings", None),
        "preprocessor": settings,
        **changed,
        "head": {} if model is backbone else changes.describe(model, without=backbone),
        "left_out": list(backbone.left_out),
    }


def save(model: keras.Model, directory: str | Path, card: bool | Mapping[str, Any] = False) -> Path:
    """Writes config, weights and tokenizer to a directory for `load`; see `save_to_preset`."""
    name = str(directory).rstrip("/").rpartition("/")[2]
    facts = card if isinstance(card, Mapping) else {}
    readme = card_text(model, name, facts) if card or isinstance(card, Mapping) else None
    tokenizer = getattr(getattr(model, "preprocessor", None), "tokenizer", None)
    more = None if tokenizer is None else tokenizer.save
    with staged(directory) as (folder, finish):

        def write_by(tensors: Mapping[str, LazyArray], write: Callable[[Any], Path]) -> Path:
            return write_on_rank_zero(tensors, lambda held: finish(write(held)))

        return native.save(model, folder, _describe(model), more, write_by, readme)


def export_to_transformers(
    model: keras.Model, directory: str | Path, text_only: bool = False
) -> Path:
    """Writes a directory that transformers loads with equal logits.

    With `text_only` it is the text part of a checkpoint whose other parts were left out.

    Raises:
        InputError: with settings that transformers does not support, or files that would be lost.
        RuntimeError: if the files that were written differ from the model.
    """
    if changes.adapters(model):
        raise InputError(
            "transformers has no place for LoRA adapters; call merge_lora first, or save_adapter"
        )
    if processes.count() > 1:
        raise InputError(
            "export_to_transformers compares what it wrote, in one process; call save_to_preset "
            "here, and export from that directory in a process of its own"
        )
    check_parts(model, text_only, "a directory of transformers")
    family = registry.family(getattr(model, "backbone", model).family)
    form, pictures, table, zeros = family.transformers_form(model)
    files, more = model.beside_transformer() if hasattr(model, "beside_transformer") else ({}, [])
    rules = [*table, *more]
    packed, paths, quantization = _four_bits(
        model, rules, getattr(model, "backbone", model).variable_dtype
    )
    tensors = engine.export(model, rules, without=paths)
    zeros = {name: zero for name, zero in zeros.items() if name not in tensors}
    dtypes = {str(tensor.dtype) for tensor in tensors.values()}
    form = {**form, "dtype": dtypes.pop() if len(dtypes) == 1 else "float32"}
    if packed:
        # transformers packs every linear layer that is not listed, and computes with the others in
        # their dtype; an output layer that is tied to the embedding table has no tensor.
        floats = [name for name, tensor in tensors.items() if len(tensor.shape) > 1]
        skipped = {name.removesuffix(".weight") for name in floats if name.endswith(".weight")}
        form["quantization_config"] = {
            **quantization,
            "bnb_4bit_compute_dtype": form["dtype"],
            "llm_int8_skip_modules": sorted({*skipped, "lm_head"}),
        }
        tensors |= packed
    with staged(directory) as (target, finish):
        folders = {name.partition("/")[0] for name in files}
        native.refuse_to_replace(target, {*TRANSFORMERS_FILES, *folders})
        with atomic_directory(target) as folder:
            tokenizer = getattr(getattr(model, "preprocessor", None), "tokenizer", None)
            if tokenizer is not None:
                tokenizer.save(folder)
            contents = {"config.json": form}
            if pictures:
                contents["preprocessor_config.json"] = pictures
            if generation := getattr(model, "generation_config", None):
                contents["generation_config.json"] = generation
            for name, content in (contents | files).items():
                (folder / name).parent.mkdir(exist_ok=True)
                text = json.dumps(content, indent=2) + "\n"
                (folder / name).write_text(text, encoding="utf-8")
            written = _write(folder, {**tensors, **zeros})
            _compare(model, tensors, zeros, written)
        return finish(target)


def _write(folder: Path, tensors: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
    """Writes tensors to one file per folder in their names, and opens them again."""
    parts: dict[str, dict[str, LazyArray]] = {}
    for name, tensor in tensors.items():
        where, _, own = name.rpartition("/")
        parts.setdefault(where, {})[own] = tensor
    written: dict[str, LazyArray] = {}
    for where, tensors_of_file in parts.items():
        file = folder / where / "model.safetensors"
        write_safetensors(file, tensors_of_file, {"format": "pt"})
        start = f"{where}/" if where else ""
        written |= {start + name: tensor for name, tensor in stored_tensors(file).items()}
    return written


def _compare(
    model: keras.Model,
    tensors: Mapping[str, LazyArray],
    zeros: Mapping[str, LazyArray],
    written: Mapping[str, LazyArray],
) -> None:
    parameters = sum(int(np.prod(x.shape)) for x in engine.variables(model).values())
    padding = sum(tensor.read().size for tensor in zeros.values())
    # A format may need rows of zeros within a tensor, so there may be more, never fewer.
    count = sum(int(np.prod(tensor.shape)) for tensor in written.values()) - padding
    wrong = [
        name
        for name, tensor in tensors.items()
        if (other := written.get(name)) is None
        or (tensor.shape, tensor.dtype) != (other.shape, other.dtype)
        or tensor.read().tobytes() != other.read().tobytes()
    ]
    if wrong or count < parameters:
        raise RuntimeError(
            f"the export holds {count} of {parameters} parameters, and {wrong[:8]} differ"
        )


# The Hub's name of the task, by the end of the name of a class.
PIPELINES = {
    "ImageClassifier": "image-classification",
    "ImageSegmenter": "image-segmentation",
    "ObjectDetector": "object-detection",
    "CausalLM": "text-generation",
    "ImageTextLM": "image-text-to-text",
    "TextEmbedder": "sentence-similarity",
    "ImageTextSimilarity": "zero-shot-image-classification",
    "ViTBackbone": "image-feature-extraction",
}
FIELDS = ("license", "base_model", "datasets", "metrics", "language", "tags", "description")


def card_text(model: keras.Model, name: str, facts: Mapping[str, Any]) -> str:
    """Returns a README.md of facts in `FIELDS`: YAML between dashes, and an example that runs.

    Raises:
        InputError: for unknown facts, or a fact of another type.
    """
    check_names("the card", facts, FIELDS)
    measured = facts.get("metrics")
    for key, value in facts.items():
        if key == "metrics" and isinstance(value, Mapping):
            fits = all(isinstance(number, int | float) for number in value.values())
        else:
            parts = value if isinstance(value, list | tuple) else [value]
            fits = all(isinstance(part, str) for part in parts)
        if not fits:
            raise InputError(
                f"{key} of the card is {value!r}; give a text, a list of texts, or for metrics "
                "numbers by name"
            )
    kind = type(model).__name__
    backbone = getattr(model, "backbone", model)
    pipeline = next((tag for end, tag in PIPELINES.items() if kind.endswith(end)), None)
    values = dict(measured) if isinstance(measured, Mapping) else {}
    datasets = _listed(facts.get("datasets"))
    head = {
        "library_name": "kmodels",
        "pipeline_tag": pipeline,
        "tags": ["keras", backbone.family, *_listed(facts.get("tags"))],
        "license": facts.get("license"),
        "language": facts.get("language"),
        "base_model": [one.removeprefix("hf://") for one in _listed(facts.get("base_model"))],
        "datasets": datasets,
        "metrics": [*values] or _listed(measured),
    }
    if values and datasets and pipeline:
        head["model-index"] = [
            {
                "name": name,
                "results": [
                    {
                        "task": {"type": pipeline},
                        "dataset": {"name": datasets[0], "type": datasets[0]},
                        "metrics": [{"type": k, "value": float(v)} for k, v in values.items()],
                    }
                ],
            }
        ]
    head = {key: value for key, value in head.items() if value}
    lines = ["---", yaml.safe_dump(head, sort_keys=False, allow_unicode=True).strip(), "---", ""]
    lines += [f"# {name}", ""]
    lines += [facts["description"], ""] if facts.get("description") else []
    lines += [f"A `{kind}` of kmodels with {model.count_params():,} parameters.", ""]
    if values:
        lines += ["| metric | |", "| --- | --- |"]
        lines += [f"| {key} | {value:.4g} |" for key, value in values.items()] + [""]
    return "\n".join([*lines, "```python", *_example(model, kind, name), "```", ""])


def _example(model: keras.Model, kind: str, name: str) -> list[str]:
    shape = getattr(getattr(model, "backbone", model).config, "image_shape", None)
    imports, uses = ["import kmodels"], ["model.summary()"]
    if kind.endswith("CausalLM") and getattr(model, "preprocessor", None) is not None:
        uses = ['print(model.generate("Hello", max_length=16))']
    elif shape is not None and kind.endswith(("ImageClassifier", "ViTBackbone")):
        imports.append("import numpy as np")
        uses = [
            f'images = np.zeros((1, {", ".join(map(str, shape))}), "float32")',
            "print(model.predict(images, verbose=0))",
        ]
    load = f'model = kmodels.models.{kind}.from_preset("{name}")  # or "hf://OWNER/{name}"'
    return [*imports, "", load, *uses]


def _listed(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())


# === Quantized kernels, as bitsandbytes saves them ===

# Block sizes of bitsandbytes.
BLOCKS = tuple(2**i for i in range(5, 13))


def _four_bits(
    model: keras.Model, rules: Sequence[Rule], dtype: str
) -> tuple[dict[str, LazyArray], tuple[str, ...], dict[str, Any]]:
    """Returns the quantized kernels of a model as tensors of bitsandbytes.

    With them the paths of their variables, and what transformers' `BitsAndBytesConfig` writes to
    config.json. The rules would load the directory, whose other weights have this dtype.
    """
    layers = list(changes.quantized_layers(model).values())
    if not layers:
        return {}, (), {}
    tensors: dict[str, LazyArray] = {}
    for layer in layers:
        (rule,) = bind_targets(rules, [f"{layer.path}/kernel"]) or [None]
        # A tensor that holds several kernels is a bare parameter in transformers.
        if rule is None or rule.transform is not transpose or "/" in rule.source:
            raise InputError(
                f"{layer.path} is quantized, and its weight in a directory of transformers is not "
                "that of a linear layer; call dequantize first"
            )
        tensors |= _tensors_of(layer, rule.source, dtype)
    first = layers[0].quantized.settings
    config = {
        "quant_method": "bitsandbytes",
        **{"load_in_4bit": True, "load_in_8bit": False},
        **{"_load_in_4bit": True, "_load_in_8bit": False},
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": first.mode,
        "bnb_4bit_use_double_quant": first.is_double,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_threshold": 6.0,
    }
    return tensors, tuple(v.path for x in layers for v in x.quantized.variables), config


def _tensors_of(layer: Any, name: str, dtype: str) -> dict[str, LazyArray]:
    kernel = layer.quantized
    mode, rows, units = kernel.mode, kernel.rows, layer.units
    if mode not in TABLES:
        raise InputError(
            f"{layer.path} is quantized to {mode}; a directory of transformers holds "
            f"{' and '.join(TABLES)}: call dequantize first, or quantize to one of these"
        )
    block = rows // kernel.settings.groups(rows)
    if block not in BLOCKS:
        raise InputError(
            f"{layer.path} has a scale for each {block} of its {rows} inputs; bitsandbytes has "
            f"blocks of {', '.join(map(str, BLOCKS))}: call dequantize first"
        )
    codes, scale, *more = kernel.variables
    groups = rows // block

    def flat(variable: Any, shape: tuple[int, ...], kind: str) -> LazyArray:
        """The numbers by output, and then by input."""
        return LazyArray(
            shape, np.dtype(kind), lambda: gather.values(variable).T.reshape(shape).astype(kind)
        )

    tensors = {
        "": flat(codes, (rows // 2 * units, 1), "uint8"),
        ".absmax": flat(scale, (groups * units,), "uint8" if more else "float32"),
        ".quant_map": _array(np.array(TABLES[mode], "float32")),
    }
    state = {"quant_type": mode, "blocksize": block, "dtype": dtype, "shape": [units, rows]}
    if more:
        nested, offset = more
        tensors[".nested_absmax"] = flat(nested, (nested.shape[0],), "float32")
        tensors[".nested_quant_map"] = _array(DYNAMIC)
        state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32"}
        state["nested_offset"] = float(gather.values(offset)[0, 0])
    tensors[f"{STATE}{mode}"] = _array(np.frombuffer(json.dumps(state).encode(), "uint8"))
    return {f"{name}{end}": tensor for end, tensor in tensors.items()}


def _array(values: np.ndarray) -> LazyArray:
    return LazyArray(values.shape, values.dtype, lambda: values)
