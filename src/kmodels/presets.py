"""Models from names and files, and back: what `from_preset` and its siblings do."""

import difflib
import importlib
import inspect
import json
import logging
import warnings
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kmodels import lora
from kmodels.core import keras_internals
from kmodels.core.errors import InputError
from kmodels.core.files import atomic_directory, local_path
from kmodels.core.precision import check_policy
from kmodels.core.remote import local_copy, staged
from kmodels.distribution import processes
from kmodels.distribution.rank_zero import write_on_rank_zero
from kmodels.lora import changes
from kmodels.models import registry
from kmodels.models.registry import Family
from kmodels.weights import (
    Checkpoint,
    deferred,
    engine,
    native,
    read_safetensors,
    write_safetensors,
)
from kmodels.weights.readers import read_json

log = logging.getLogger("kmodels")

REMOTE = {
    "hf://": ("huggingface_hub", "snapshot_download", "huggingface-hub"),
    "kaggle://": ("kagglehub", "model_download", "kagglehub"),
}
TRANSFORMERS_FILES = (
    "config.json",
    "preprocessor_config.json",
    "model.safetensors",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)


def list_presets(family: str | None = None) -> list[str]:
    """The registered names, of one family or of all."""
    chosen = [registry.family(family)] if family else registry.families()
    return sorted(name for found in chosen for name in found.presets)


def family_of(preset: str | Path) -> Family:
    """The family of a registered name, or of what lies at a path.

    Raises:
        InputError: if it is no name, and there is nothing that a family reads.
    """
    name, problems = str(preset), []
    if not name.startswith(tuple(REMOTE)):
        preset = local_copy(preset)
    found = registry.families()
    if named := [family for family in found if name in family.presets]:
        return named[0]
    for family in found:
        try:
            _open(preset, family, {}, False)
        except InputError as error:
            problems.append(error)
        else:
            return family
    if Path(preset).exists():
        raise problems[0]
    raise _unknown(name, list_presets())


def class_of(preset: str | Path) -> type:
    """The class for what lies at a path: its family's task, or the backbone where it has no head.

    Raises:
        InputError: for a registered name, which has no weights, or if nothing that a family reads
            is there.
    """
    family = family_of(preset)
    if str(preset) in family.presets:
        raise InputError(f"{preset} is an architecture without weights; give a directory or a file")
    task = _open(preset, family, {}, False).task
    headed = "num_classes" not in family.parts or task.get("num_classes") is not None
    return family.tasks[0] if headed else family.backbone


def load(
    cls: type, preset: str | Path, dtype: Any = None, load_weights: bool = True, **overrides: Any
) -> Any:
    """Makes the model that a name or a file describes; see `from_preset`.

    Args:
        cls: the class to make, a backbone or a task.
        preset: a registered name, a directory, a file, or an explicit "hf://" or "kaggle://" name.
        dtype: policy of the model.
        load_weights: False gives the architecture with new weights.
        **overrides: fields of the config and arguments of the task to change.

    Raises:
        InputError: for an unknown name or setting, or a file that does not fit.
    """
    check_policy(dtype)
    owner = getattr(cls, "backbone_class", cls)
    family = registry.family(owner.family)
    fields, settings = _split(cls, owner, overrides)
    checkpoint = _open(preset, family, fields, load_weights)
    if cls is not owner and "preprocessor" not in settings:
        checkpoint.verify_preprocessor()
    config = owner.make_config(**{**checkpoint.backbone, **fields})
    skip = _changed_parts(family, checkpoint, None if cls is owner else settings)
    skip = [prefix for prefix in skip if prefix not in owner.own_parts]
    fills = load_weights and bool(checkpoint.tensors)
    # What a file fills is not drawn first: that costs time, and a second copy of the model.
    empty = fills or deferred.active()
    with keras_internals.without_values() if empty else nullcontext([]) as body:
        backbone = owner(**config.to_dict(), dtype=dtype, **(settings if cls is owner else {}))
        changes.restore(backbone, checkpoint.changes)
    backbone.left_out = checkpoint.left_out
    model = backbone
    if cls is not owner:
        given = {key: value for key, value in checkpoint.task.items() if value is not None}
        headed = "num_classes" not in family.parts or "num_classes" in {**given, **settings}
        if fills and not headed:
            raise InputError(f"{preset} has no head; give num_classes")
        settings = family.defaults(config, {**given, **settings})
        if "preprocessor" not in settings and checkpoint.preprocessor is not None:
            arguments = family.fit_preprocessor(checkpoint.preprocessor, config)
            settings["preprocessor"] = cls.preprocessor_class(**arguments)
        with keras_internals.without_values() if empty else nullcontext([]) as head:
            model = cls(backbone=backbone, **settings)
            if not skip:  # a head with other weights begins anew
                changes.restore(model, checkpoint.changes.get("head", {}), without=backbone)
        body += head
    steps: list[Callable[[], Any]] = [lambda: keras_internals.draw_values(body)]
    if fills:
        tensors = checkpoint.fit(checkpoint.tensors, config)
        held = owner.make_config(**checkpoint.backbone)
        rules, origin = family.fit_rules(checkpoint.rules, held, config), checkpoint.path
        steps.insert(0, engine.bind(model, tensors, rules, skip=skip, origin=origin))
        if new := [path for path in engine.variables(model) if path.startswith(tuple(skip))]:
            log.info("%s: new weights for %s", origin, ", ".join(new))

    def fill() -> None:
        for step in steps:
            step()

    if deferred.active():
        deferred.leave(model, fill)
    else:
        fill()
    if empty and cls is not owner and settings.get("compile", True):
        model.compile_by_default()
    if checkpoint.left_out and checkpoint.kind != "kmodels":
        warnings.warn(
            f"{preset}: {', '.join(checkpoint.left_out)} of the checkpoint are left out; the model "
            "takes text alone",
            stacklevel=3,
        )
    return model


def check_parts(model: Any, partial: bool, kind: str) -> None:
    """Stops before a part of a checkpoint is written as if it were the whole.

    Args:
        model: a backbone or task.
        partial: the caller wants the part that is there.
        kind: what is to be written, for the message.

    Raises:
        InputError: where parts were left out when the model was read.
    """
    parts = getattr(model, "backbone", model).left_out
    if parts and not partial:
        raise InputError(
            f"the checkpoint's {', '.join(parts)} were left out when it was read, so {kind} of it "
            "would be a text model alone; give text_only=True if that is what you want"
        )


def named(cls: type) -> dict[str, dict[str, Any]]:
    """The registered names that a class can be made from, each with its fields.

    Args:
        cls: a backbone, a task or a preprocessor.
    """
    owner = getattr(cls, "backbone_class", cls)
    family = registry.family(owner.family)
    fits = getattr(owner, "fits_preset", family.backbone.fits_preset)
    return {name: dict(fields) for name, fields in family.presets.items() if fits(name, fields)}


def preprocessor_settings(cls: type, preset: str | Path) -> dict[str, Any]:
    """The arguments of the preprocessor that belongs to what a name or a file describes.

    Args:
        cls: a `Preprocessor`.
        preset: see `load`.

    Raises:
        InputError: as `load`.
    """
    family = registry.family(cls.family)
    checkpoint = _open(preset, family, {}, False)
    checkpoint.verify_preprocessor()
    config = family.backbone.make_config(**checkpoint.backbone)
    return family.fit_preprocessor(checkpoint.preprocessor or {}, config)


def _split(cls: type, owner: Any, overrides: dict[str, Any]) -> tuple[dict, dict]:
    """Overrides of the config, and arguments of the class itself."""
    fields = owner.config_class.__dataclass_fields__
    known = {"name"}
    if cls is not owner:
        known |= set(inspect.signature(cls.__init__).parameters) - {"self", "backbone", "kwargs"}
    for name in overrides:
        if name not in fields and name not in known:
            near = difflib.get_close_matches(name, [*fields, *known], 3) or [*known, *fields]
            raise InputError(
                f"{cls.__name__} has no setting {name!r}; did you mean {', '.join(near)}?"
            )
    return (
        {name: value for name, value in overrides.items() if name in fields},
        {name: value for name, value in overrides.items() if name not in fields},
    )


def _changed_parts(
    family: Family, checkpoint: Checkpoint, settings: dict[str, Any] | None
) -> Collection[str]:
    """Prefixes of the weights that a changed setting makes new; for a backbone (None) the head."""
    skip: set[str] = set()
    for name, prefixes in family.parts.items():
        here = checkpoint.task.get(name) or None
        if settings is None or (name in settings and (settings[name] or None) != here):
            skip.update(prefixes)
    return sorted(skip)


def _open(preset: str | Path, family: Family, given: dict[str, Any], weights: bool) -> Checkpoint:
    name = str(preset)
    if name in family.presets:
        found = family.presets[name]
        task = {key[5:]: value for key, value in found.items() if key.startswith("task_")}
        fields = {key: value for key, value in found.items() if not key.startswith("task_")}
        return Checkpoint(Path(name), "a name", fields, task, None, {}, ())
    path = locate(preset)
    if not path.exists():
        raise _unknown(name, sorted(family.presets))
    if path.name == "model.safetensors" and (path.parent / "config.json").is_file():
        path = path.parent
    description = {}
    if path.is_dir() and (path / "config.json").is_file():
        description = read_json(path / "config.json")
    if native.is_ours(path, description):
        return _open_own(path, description, family, weights)
    for form in family.formats:
        if form.matches(path, description):
            return form.open_checkpoint(path, description, given, weights)
    kind = description.get("model_type") or description.get("architecture")
    raise InputError(
        f"{path} is not a {family.name} model{f' but {kind}' if kind else ''}; give a directory "
        "with config.json and safetensors, a .safetensors file or an .npz file"
    )


def locate(preset: str | Path) -> Path:
    """Returns where a path lies, or where what is at an address was copied to.

    An explicit "hf://" or "kaggle://" name is downloaded by that package, and any other address,
    such as "gs://bucket/model", is read through fsspec.

    Args:
        preset: a path, a name or an address.

    Raises:
        InputError: where a package is missing, or nothing is at the address.
    """
    name = str(preset)
    for scheme in REMOTE:
        if name.startswith(scheme):
            preset = _download(scheme, name.removeprefix(scheme))
    return local_copy(preset)


def _open_own(path: Path, description: dict[str, Any], family: Family, weights: bool) -> Checkpoint:
    checkpoint = native.open_checkpoint(path, description, weights)
    if (held := description.get("family")) != family.name:
        raise InputError(f"{path} holds a model of the family {held!r}, not {family.name!r}")
    config = family.backbone.make_config(**checkpoint.backbone)
    return replace(checkpoint, fit=lambda tensors, wanted: family.fit(tensors, config, wanted))


def _unknown(name: str, known: list[str]) -> InputError:
    if "/" in name or "\\" in name or Path(name).suffix in (".safetensors", ".npz", ".gguf"):
        return InputError(f"there is no file or directory {name}")
    near = difflib.get_close_matches(name, known, 3, 0.5) or known
    return InputError(
        f"{name!r} is no preset and no directory; did you mean {', '.join(near[:8])}?"
    )


def _download(scheme: str, name: str) -> Path:
    module, function, package = REMOTE[scheme]
    try:
        found = importlib.import_module(module)
    except ImportError:
        raise InputError(
            f"{scheme}{name} needs the package {package}: pip install {package}"
        ) from None
    return Path(getattr(found, function)(name))


def _describe(model: Any) -> dict[str, Any]:
    from kmodels import __version__

    backbone = getattr(model, "backbone", model)
    preprocessor = getattr(model, "preprocessor", None)
    changed = changes.describe(backbone)
    if lora.is_merged(backbone):
        # What LoRA froze is a model of its own now, which others may train.
        changed.pop("frozen", None)
    return {
        "kmodels": {"version": __version__, "format": native.FORMAT},
        "family": backbone.family,
        "class": type(model).__name__,
        "backbone": backbone.config.to_dict(),
        "task": getattr(model, "settings", None),
        "preprocessor": _settings(preprocessor),
        **changed,
        "head": {} if model is backbone else changes.describe(model, without=backbone),
        "left_out": list(backbone.left_out),
    }


def _settings(preprocessor: Any) -> dict[str, Any] | None:
    """What config.json says of a preprocessor; a tokenizer is a file of its own."""
    if preprocessor is None:
        return None
    settings = preprocessor.to_dict()
    return settings | ({"tokenizer": native.TOKENIZER[0]} if "tokenizer" in settings else {})


def save(model: Any, directory: str | Path) -> Path:
    """Writes config, weights and tokenizer to a directory for `load`; see `save_to_preset`."""
    tokenizer = getattr(getattr(model, "preprocessor", None), "tokenizer", None)
    more = None if tokenizer is None else tokenizer.save
    with staged(directory) as (folder, finish):

        def write_by(tensors: Any, write: Callable[[Any], Path]) -> Path:
            return write_on_rank_zero(tensors, lambda held: finish(write(held)))

        return native.save(model, folder, _describe(model), more, write_by)


def export_to_transformers(model: Any, directory: str | Path, text_only: bool = False) -> Path:
    """Writes a directory that transformers loads with equal logits.

    Args:
        model: a backbone or task.
        directory: to make or replace.
        text_only: writes the text part of a checkpoint whose other parts were left out.

    Raises:
        InputError: lists what transformers cannot express, or files that would be lost.
        RuntimeError: if what was written is not bit for bit what the model holds.
    """
    if lora.describe(model):
        raise InputError(
            "transformers has no place for LoRA adapters; call merge_lora first, or save_adapter"
        )
    if processes.count() > 1:
        raise InputError(
            "export_to_transformers compares what it wrote, in one process; call save_to_preset "
            "here, and export from that directory in a process of its own"
        )
    check_parts(model, text_only, "a directory of transformers")
    directory = local_path(directory)
    family = registry.family(getattr(model, "backbone", model).family)
    form, pictures, table, zeros = family.transformers_form(model)
    native.refuse_to_replace(directory, TRANSFORMERS_FILES)
    tensors = engine.export(model, table)
    zeros = {name: zero for name, zero in zeros.items() if name not in tensors}
    dtypes = {str(tensor.dtype) for tensor in tensors.values()}
    form = {**form, "dtype": dtypes.pop() if len(dtypes) == 1 else "float32"}
    with atomic_directory(directory) as folder:
        (folder / "config.json").write_text(json.dumps(form, indent=2) + "\n", encoding="utf-8")
        if pictures:
            text = json.dumps(pictures, indent=2) + "\n"
            (folder / "preprocessor_config.json").write_text(text, encoding="utf-8")
        if generation := getattr(model, "generation_config", None):
            text = json.dumps(generation, indent=2) + "\n"
            (folder / "generation_config.json").write_text(text, encoding="utf-8")
        if (
            tokenizer := getattr(getattr(model, "preprocessor", None), "tokenizer", None)
        ) is not None:
            tokenizer.save(folder)
        file = folder / "model.safetensors"
        write_safetensors(file, {**tensors, **zeros}, {"format": "pt"})
        _compare(model, tensors, zeros, read_safetensors(file))
    return directory


def _compare(model: Any, tensors: Any, zeros: Any, written: Any) -> None:
    parameters = sum(int(np.prod(x.shape)) for x in engine.variables(model).values())
    padding = sum(tensor.read().size for tensor in zeros.values())
    # A format may ask for rows of zeros within a tensor, so there may be more, never fewer.
    count = sum(int(np.prod(tensor.shape)) for tensor in written.values()) - padding
    wrong = [name for name, tensor in tensors.items() if not _equal(tensor, written.get(name))]
    if wrong or count < parameters:
        raise RuntimeError(
            f"the export holds {count} of {parameters} parameters, and {wrong[:8]} differ"
        )


def _equal(left: Any, right: Any) -> bool:
    if right is None or left.shape != right.shape or left.dtype != right.dtype:
        return False
    return left.read().tobytes() == right.read().tobytes()
