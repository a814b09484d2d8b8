"""Checkpoints by registered name, directory, file or address, and their families."""

import difflib
import importlib
import inspect
import logging
import os
import re
import warnings
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kmodels import registry
from kmodels.core.errors import InputError, shown
from kmodels.core.remote import in_one_line, local_copy
from kmodels.core.schema import read_json, warn_of_unknown
from kmodels.registry import Family, class_named
from kmodels.weights import native
from kmodels.weights.files import holds_tensors
from kmodels.weights.rules import PROBLEM_TYPES, SourceCheckpoint

log = logging.getLogger("kmodels")

REMOTE = {
    "hf": ("huggingface_hub", "snapshot_download", "huggingface-hub"),
    "kaggle": ("kagglehub", "model_download", "kagglehub"),
}
# "hf://owner/name", and "hf:/owner/name" as pathlib makes of it.
_ON_A_HUB = re.compile(f"({'|'.join(REMOTE)}):/+(.*)", re.IGNORECASE)


def list_presets(family: str | None = None) -> list[str]:
    """Returns the registered names, of one family or of all."""
    chosen = [registry.family(family)] if family else registry.families()
    # A model with two towers has the name of its vision tower in keras-hub.
    return sorted({name for one in chosen for name in one.presets})


class OtherFamily(InputError):
    """A checkpoint is of another family."""


def family_of(preset: str | Path) -> Family:
    """Returns the family of a registered name or of a checkpoint at a path."""
    name, problems = str(preset), []
    preset = locate(preset)
    families = registry.families()
    if named := [family for family in families if name in family.presets]:
        return named[0]
    for family in families:
        try:
            open_checkpoint(preset, family, {}, False)
        except InputError as error:
            problems.append(error)
        else:
            return family
    if Path(preset).exists():
        raise next((x for x in problems if not isinstance(x, OtherFamily)), problems[0])
    raise _unknown(name, list_presets())


def class_of(preset: str | Path, whole: bool = False) -> type:
    """Returns the class for a path: its family's task, or the backbone without a head.

    `whole` prefers a class with all parts of the checkpoint to one of its text part.
    """
    family = family_of(preset)
    if str(preset) in family.presets:
        raise InputError(f"{preset} is an architecture without weights; give a directory or a file")
    checkpoint = open_checkpoint(preset, family, {}, False)
    saved = class_named((checkpoint.whole if whole else "") or checkpoint.saved_as)
    if hasattr(saved, "backbone_class"):
        return saved
    task = checkpoint.task
    headed = "num_classes" not in family.parts or task.get("num_classes") is not None
    if headed and family.tasks:
        return _readers(family, checkpoint)[0]
    return saved or family.backbone


def class_below(base: type, preset: str | Path) -> Any:
    """Returns a base's class for a preset: `GemmaCausalLM` for `CausalLM` and a Gemma.

    A class of a family is returned as it is.
    """
    if getattr(getattr(base, "backbone_class", base), "family", ""):
        return base
    own = family_of(preset)
    if str(preset) in own.presets:
        every = [cls for cls in own.classes() if str(preset) in cls.presets]
    else:
        best = class_of(preset, whole=True)
        own = registry.family(getattr(best, "backbone_class", best).family)
        checkpoint = open_checkpoint(preset, own, {}, False)
        every = [class_named(checkpoint.saved_as) or best, best]
        every += [getattr(best, f"{part}_class", best) for part in ("preprocessor", "backbone")]
        every += [*_readers(own, checkpoint), *own.classes()]
    found = next((cls for cls in every if issubclass(cls, base)), None)
    if found is None:
        names = ", ".join([*dict.fromkeys(cls.__name__ for cls in every)][:4])
        raise InputError(f"{shown(preset)} is for no {base.__name__}; use {names}")
    return found


def _readers(family: Family, checkpoint: SourceCheckpoint) -> list[Any]:
    """Returns the tasks of a family, those first that take the most arguments in a file.

    Those of the model count before those of its preprocessor.
    """
    task, settings = set(checkpoint.task), set(checkpoint.preprocessor or ())

    def lacks(cls: type) -> tuple[bool, bool]:
        return not task <= _arguments(cls), not settings <= _settings_of(cls)

    return sorted(family.tasks, key=lacks)


def _arguments(cls: type) -> set[str]:
    return set(inspect.signature(cls.__init__).parameters)


def _settings_of(task: type) -> set[str]:
    """Returns the arguments of a task's preprocessor, those of its bases included."""
    preprocessor = getattr(task, "preprocessor_class", object)
    return set().union(*map(_arguments, preprocessor.__mro__))


def causal_lm_of(preset: str | Path, whole: bool = False) -> type:
    """Returns the class of the language model at a path, such as `GemmaCausalLM`.

    Args:
        preset: a path.
        whole: see `class_of`.

    Raises:
        InputError: see `class_of`; also for a model that does not generate text.
    """
    cls = class_of(preset, whole)
    if not hasattr(cls, "generate"):
        raise InputError(
            f"{preset} holds a {cls.__name__}, which writes no text; give a Gemma, "
            "a Llama 3 or a Qwen 3"
        )
    return cls


def generation_config_of(preset: str | Path) -> dict[str, Any]:
    """Returns the generation_config.json of the language model at a path; {} without one.

    Raises:
        InputError: if no family can read the path.
    """
    checkpoint = open_checkpoint(preset, family_of(preset), {}, False)
    return checkpoint.task.get("generation_config") or {}


def locate(preset: str | Path) -> Path:
    """Returns the local path of a checkpoint, after downloading it from an address.

    An explicit "hf://" or "kaggle://" name is downloaded by that package, and any other address,
    such as "gs://bucket/model", is read through fsspec.

    Args:
        preset: a path, a name or an address.

    Raises:
        InputError: if a package is not installed, or the address does not exist.
    """
    if not isinstance(preset, str | os.PathLike):
        raise InputError(f"a preset is a name, a path or an address, not a {type(preset).__name__}")
    hub = _ON_A_HUB.fullmatch(os.fspath(preset))
    return local_copy(_download(hub[1].lower(), hub[2]) if hub else preset)


def open_checkpoint(
    preset: str | Path, family: Family, overrides: dict[str, Any], weights: bool
) -> SourceCheckpoint:
    """Opens a checkpoint in any format of a family."""
    name = str(preset)
    if name in family.presets:
        checkpoint = family.presets[name]
        task = {key[5:]: value for key, value in checkpoint.items() if key.startswith("task_")}
        fields = {key: value for key, value in checkpoint.items() if not key.startswith("task_")}
        return SourceCheckpoint(Path(name), "a name", fields, task, None, {}, ())
    path = locate(preset)
    if not path.exists():
        raise _unknown(name, sorted(family.presets))
    if path.name == "model.safetensors" and (path.parent / "config.json").is_file():
        path = path.parent
    description = {}
    if path.is_dir() and (path / "config.json").is_file():
        description = read_json(path / "config.json")
    if native.is_ours(path, description):
        checkpoint = native.open_checkpoint(path, description, weights)
        if (own := description.get("family")) != family.name:
            raise InputError(f"{path} holds a model of the family {own!r}, not {family.name!r}")
        config = family.backbone.make_config(**checkpoint.backbone)
        return replace(checkpoint, fit=lambda tensors, wanted: family.fit(tensors, config, wanted))
    _check_quantization(path, description)
    for form in family.formats:
        if form.matches(path, description):
            checkpoint = form.open_checkpoint(path, description, overrides, weights)
            if checkpoint.task.get("num_classes"):
                checkpoint.task.update(_labels(path, description, checkpoint.task))
            return checkpoint
    if "registered_name" in description:
        raise InputError(
            f"{path} is a preset of keras-hub ({description['registered_name']}); read it with "
            "kmodels.interop.keras_hub.from_hub"
        )
    kind = description.get("model_type") or description.get("architecture")
    raise OtherFamily(
        f"{path} is not a {family.name} model{f' but {kind}' if kind else ''}; give a directory "
        "with config.json and safetensors, a .safetensors file or an .npz file"
    )


def open_outline(preset: str | Path, family: Family, overrides: dict[str, Any]) -> SourceCheckpoint:
    """Opens a checkpoint for its architecture, which is that of its tensors if they are there.

    Their names and shapes take precedence over config.json, which may omit or contradict a part,
    such as an output layer that is not the embedding table. A directory without tensors is as its
    config.json says; if its tensors cannot be opened, a warning says why.
    """
    try:
        return open_checkpoint(preset, family, overrides, True)
    except InputError as error:
        checkpoint = open_checkpoint(preset, family, overrides, False)
        if holds_tensors(checkpoint.path):
            warnings.warn(f"the architecture follows config.json alone: {error}", stacklevel=5)
        return checkpoint


# Settings of a quantization_config that say how the tensors were made, or how another program
# multiplies them, by the program.
QUANTIZATIONS = {
    "bitsandbytes": {
        *("load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit"),
        *("bnb_4bit_compute_dtype", "bnb_4bit_quant_storage", "bnb_4bit_quant_type"),
        *("bnb_4bit_use_double_quant", "llm_int8_enable_fp32_cpu_offload", "llm_int8_threshold"),
        *("llm_int8_has_fp16_weight", "llm_int8_skip_modules"),
    },
    "gptq": {
        *("bits", "tokenizer", "dataset", "group_size", "damp_percent", "desc_act", "sym"),
        *("act_group_aware", "true_sequential", "format", "checkpoint_format", "meta", "backend"),
        *("model_seqlen", "block_name_to_quantize", "module_name_preceding_first_block"),
        *("batch_size", "pad_token_id", "max_input_length", "cache_block_outputs"),
        *("modules_in_block_to_quantize", "static_groups", "lm_head", "pack_dtype", "method"),
        *("use_cuda_fp16", "use_exllama", "exllama_config", "disable_exllama", "pack_impl"),
        *("damp_auto_increment", "quantizer", "offload_to_disk", "hyb_act"),
    },
    "awq": {
        *("bits", "w_bit", "group_size", "q_group_size", "zero_point", "version", "backend"),
        *("format", "sym", "desc_act", "do_fuse", "fuse_max_seq_len", "modules_to_fuse"),
        *("modules_to_not_convert", "exllama_config"),
    },
    "fp8": {
        *("weight_block_size", "dequantize", "modules_to_convert", "modules_to_not_convert"),
        "ignored_layers",
    },
    "compressed-tensors": {
        *("config_groups", "ignore", "quantization_status", "global_compression_ratio", "version"),
        *("sparsity_config", "dequantize", "run_compressed", "use_optimized_inference"),
    },
}
# Of these, settings that are read at some values alone.
READ_AT: dict[str, dict[str, tuple[object, ...]]] = {
    "gptq": {
        **{"bits": (4,), "checkpoint_format": ("gptq", "gptq_v2"), "pack_dtype": ("int32",)},
        "dynamic": ({},),
    },
    "awq": {"bits": (4,), "w_bit": (4,), "version": ("gemm", "GEMM")},
    "fp8": {
        **{"fmt": ("e4m3",), "scale_fmt": ("float", "ue8m0"), "expert_dtype": ("fp8",)},
        "activation_scheme": ("dynamic", "static"),
    },
    "compressed-tensors": {
        "format": ("float-quantized",),
        **dict.fromkeys(("kv_cache_scheme", "transform_config", "moe_sparsity_config"), ({},)),
    },
}
# Settings of compressed-tensors: of a group of layers, of their weights, those of the latter that
# are read at some values alone, and of weights that are not sparse.
GROUP = {"targets", "weights", "input_activations", "output_activations"}
WEIGHTS = {
    *("strategy", "group_size", "block_structure", "observer", "observer_kwargs", "scale_dtype"),
    *("zp_dtype", "actorder"),
}
WEIGHTS_AT: dict[str, tuple[object, ...]] = {
    **{"num_bits": (8,), "type": ("float",), "symmetric": (True,), "dynamic": (False,)}
}
SPARSITY = {
    *("targets", "ignore", "global_sparsity", "sparsity_structure", "registry_requires_subclass")
}


def _check_quantization(path: Path, description: dict[str, Any]) -> None:
    """Raises `InputError` for a directory whose tensors are packed in a way that is not read."""
    for part in (description, description.get("text_config")):
        quantization = part.get("quantization_config") if isinstance(part, dict) else None
        if not quantization:
            continue
        described = quantization if isinstance(quantization, dict) else {}
        if (method := described.get("quant_method")) not in QUANTIZATIONS:
            raise InputError(
                f"{path} is quantized by {method or 'another program'}, which is not read yet; "
                "open the directory it was made of, a GGUF file, or one of "
                f"{', '.join(QUANTIZATIONS)}"
            )
        in_four = described.get("load_in_4bit") or described.get("_load_in_4bit")
        if method == "bitsandbytes" and not in_four:
            raise InputError(
                f"{path} is quantized by bitsandbytes in 8 bits, of which 4 are read; open the "
                'directory it was made of and call quantize("int8")'
            )
        known = QUANTIZATIONS[method] | {"quant_method"}
        _check_settings(path, method, described, known, READ_AT.get(method, {}))
        rounds = method == "fp8"
        for group in (described.get("config_groups") or {}).values():
            _check_settings(path, method, group, GROUP, {"format": ("float-quantized",)})
            weights = {"type": "int"} | (group.get("weights") or {})
            _check_settings(path, method, weights, WEIGHTS, WEIGHTS_AT)
            rounds |= bool(group.get("input_activations") or group.get("output_activations"))
        sparsity = described.get("sparsity_config") or {}
        _check_settings(path, method, sparsity, SPARSITY, {"format": ("dense",)})
        if rounds:
            log.warning(
                "%s: its format rounds activations to FP8 too; kmodels keeps them in the compute "
                "dtype",
                path,
            )


def _check_settings(
    path: Path,
    method: str,
    described: Mapping[str, Any],
    known: Collection[str],
    read_at: Mapping[str, tuple[object, ...]],
) -> None:
    """Raises `InputError` for a setting at another value, and warns of those that are not known."""
    for name, values in read_at.items():
        if (value := described.get(name)) is not None and value not in values:
            raise InputError(
                f"{path}: {name} of its quantization_config is {value!r}; {method} is read "
                f"with {' or '.join(map(repr, values))}"
            )
    warn_of_unknown(path / "config.json", described, {*known, *read_at})


def _labels(path: Path, description: dict[str, Any], task: dict[str, Any]) -> dict[str, Any]:
    """Returns class names and problem type of a head from a config.json of transformers or timm."""
    number, labels = task["num_classes"], {}
    of_timm = description.get("pretrained_cfg") or {}
    names = description.get("label_names") or of_timm.get("label_names")
    by_id = names if isinstance(names, dict) else description.get("id2label")
    if isinstance(by_id, dict):
        names = [by_id.get(str(i)) for i in range(number)] if len(by_id) == number else by_id
    if names and names != [f"LABEL_{i}" for i in range(number)]:
        listed = isinstance(names, list) and all(isinstance(name, str) for name in names)
        if listed and len(names) == number:
            labels["class_names"] = names
        else:
            log.warning(
                "%s: the names of the classes in config.json do not fit the %d outputs of the head "
                "and are left out",
                path,
                number,
            )
    if "pooling" not in task:
        return labels
    problem = description.get("problem_type")
    if problem is not None and problem not in PROBLEM_TYPES:
        raise InputError(
            f"{path}: problem_type is {problem!r}; transformers has {', '.join(PROBLEM_TYPES)}"
        )
    if number == 1 and "model_type" in description:
        problem = problem or PROBLEM_TYPES[0]  # as transformers trains a head of one output
    return labels if problem is None else {**labels, "problem_type": problem}


def _unknown(name: str, known: list[str]) -> InputError:
    if "/" in name or "\\" in name or Path(name).suffix in (".safetensors", ".npz", ".gguf"):
        of_hub = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name)
        advice = f"; for a model of the Hugging Face hub, give hf://{name}" if of_hub else ""
        return InputError(f"there is no file or directory {name}{advice}")
    near = difflib.get_close_matches(name, known, 3, 0.5)
    instead = f"did you mean {', '.join(near)}?" if near else f"presets are {', '.join(known[:8])}"
    return InputError(f"{name!r} is neither a preset nor a directory; {instead}")


def _download(scheme: str, name: str) -> Path:
    module, function, package = REMOTE[scheme]
    try:
        hub = importlib.import_module(module)
    except ImportError:
        raise InputError(
            f"{scheme}://{name} needs the package {package}: pip install {package}"
        ) from None
    with in_one_line("read", f"{scheme}://{name}"):
        return Path(getattr(hub, function)(name))
