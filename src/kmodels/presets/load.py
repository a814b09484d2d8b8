"""Models and preprocessors from names and files, as `from_preset` makes them."""

import difflib
import inspect
import logging
import warnings
from collections.abc import Callable, Collection
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from kmodels import registry
from kmodels.core import keras_internals
from kmodels.core.errors import InputError, shown
from kmodels.core.runtime import check_policy
from kmodels.core.types import DTypeLike
from kmodels.layers import changes
from kmodels.presets.find import open_checkpoint, open_outline
from kmodels.registry import Family
from kmodels.weights import SourceCheckpoint, deferred, engine, packed

log = logging.getLogger("kmodels")


def load(
    cls: type,
    preset: str | Path,
    dtype: DTypeLike = None,
    load_weights: bool = True,
    quantized: bool | None = None,
    **overrides: Any,
) -> Any:
    """Builds the model of a name or a file; see `from_preset`.

    Args:
        cls: the class of the model, a backbone or a task.
        preset: a registered name, a directory, a file, or an explicit "hf://" or "kaggle://" name.
        dtype: policy of the model.
        load_weights: False for random initial weights; the variables are the same.
        quantized: whether kernels that are quantized in the file stay so; None for the usual.
        **overrides: fields of the config and arguments of the task to change.

    Raises:
        InputError: for an unknown name or setting, or a file that does not fit.
    """
    check_policy(dtype)
    owner = getattr(cls, "backbone_class", cls)
    family = registry.family(owner.family)
    fields, settings = _split(cls, owner, overrides)
    if load_weights:
        checkpoint = open_checkpoint(preset, family, fields, True)
    else:
        checkpoint = open_outline(preset, family, fields)
    checkpoint = packed.keep(checkpoint, quantized)
    if cls is not owner and "preprocessor" not in settings:
        checkpoint.verify_preprocessor(cls.preprocessor_class)
    config = owner.make_config(**{**checkpoint.backbone, **fields})
    takes = set(inspect.signature(cls.__init__).parameters)
    skip = _changed_parts(family, checkpoint, None if cls is owner else settings, takes)
    skip = [prefix for prefix in skip if prefix not in owner.own_parts]
    fills = load_weights and bool(checkpoint.tensors)
    # Variables that a file fills get no random values, which would cost time and a second copy of
    # the model.
    empty = fills or deferred.active()
    if empty and not fills and "quantization" in checkpoint.changes:
        raise InputError(
            f"{preset} is quantized, and random weights are drawn after the model is sharded; load "
            "its weights, or quantize later"
        )
    with keras_internals.without_values() if empty else nullcontext([]) as body:
        made = owner.class_of(config)
        backbone = made(**config.to_dict(), dtype=dtype, **(settings if cls is owner else {}))
        changes.restore(backbone, checkpoint.changes, keeps_values=not fills)
    backbone.left_out = checkpoint.left_out
    model = backbone
    if cls is not owner:
        # Without the arguments of other tasks of the family.
        task = {key: value for key, value in checkpoint.task.items() if key in takes}
        stated = {key: value for key, value in task.items() if value is not None}
        if settings.get("num_classes") not in (None, stated.get("num_classes")):
            stated.pop("class_names", None)
        headed = "num_classes" not in takes or "num_classes" in {**stated, **settings}
        if fills and not headed:
            raise InputError(f"{preset} has no head; give num_classes")
        defaults = family.defaults(config, {**stated, **settings})
        known = {*takes, *settings, "name"}
        settings = {key: value for key, value in defaults.items() if key in known}
        if "preprocessor" not in settings and checkpoint.preprocessor is not None:
            others = len(task) < len(checkpoint.task)
            arguments = _of_preprocessor(cls.preprocessor_class, checkpoint, family, config, others)
            try:
                settings["preprocessor"] = cls.preprocessor_class(**arguments)
            except InputError as error:
                if str(checkpoint.path) in str(error):
                    raise
                raise InputError(
                    f"{checkpoint.path}: its preprocessor: {error}; or give preprocessor=None"
                ) from error
        with keras_internals.without_values() if empty else nullcontext([]) as head:
            model = cls(backbone=backbone, **settings)
            starts_over = any(v.path.startswith(tuple(skip)) for v in model.weights)
            if not starts_over:  # a head with other weights does
                head_changes = checkpoint.changes.get("head", {})
                changes.restore(model, head_changes, without=backbone, keeps_values=not fills)
        body += head
    steps: list[Callable[[], Any]] = [lambda: keras_internals.draw_values(body)]
    if fills:
        tensors = checkpoint.fit(checkpoint.tensors, config)
        stored_config = owner.make_config(**checkpoint.backbone)
        rules, origin = family.fit_rules(checkpoint.rules, stored_config, config), checkpoint.path
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
    asked = {*owner.config_class.__dataclass_fields__, *(takes if cls is not owner else ())}
    assumed = {
        name: value
        for name, value in checkpoint.assumed.items()
        if name in asked and name not in overrides
    }
    if assumed:
        warnings.warn(
            f"{shown(preset)} does not say all of its architecture; assumed: "
            f"{', '.join(f'{name}={value!r}' for name, value in assumed.items())}; give them to "
            "from_preset if the model differs",
            stacklevel=4,
        )
    if fills and checkpoint.notice and checkpoint.notice_part in (None, *skip):
        warnings.warn(f"{shown(preset)}: {checkpoint.notice}", stacklevel=4)
    if fills and checkpoint.left_out and checkpoint.kind != "kmodels":
        more = checkpoint.whole and f", {checkpoint.whole} takes images too"
        warnings.warn(
            f"{shown(preset)}: {', '.join(checkpoint.left_out)} of the checkpoint are left out; "
            f"the model takes only {checkpoint.takes}{more}",
            stacklevel=4,
        )
    return model


def preprocessor_settings(cls: type, preset: str | Path) -> dict[str, Any]:
    """Returns the arguments of the preprocessor `cls` of a name or a file."""
    family = registry.family(cls.family)
    checkpoint = open_checkpoint(preset, family, {}, False)
    checkpoint.verify_preprocessor(cls)
    config = family.backbone.make_config(**checkpoint.backbone)
    tasks = [task for task in family.tasks if getattr(task, "preprocessor_class", None) is cls]
    takes = [set(inspect.signature(task.__init__).parameters) for task in tasks]
    others = bool(takes) and not any(set(checkpoint.task) <= names for names in takes)
    return _of_preprocessor(cls, checkpoint, family, config, others)


def _of_preprocessor(
    cls: Any, checkpoint: SourceCheckpoint, family: Family, config: Any, others: bool
) -> dict[str, Any]:
    """Returns a checkpoint's arguments for a class; `others` if they are those of another task."""
    arguments = family.fit_preprocessor(checkpoint.preprocessor or {}, config)
    if others:
        known = inspect.signature(cls.__init__).parameters
        arguments = {k: v for k, v in arguments.items() if k in known and v is not None}
    return cls.fitted(arguments, config)


def _split(cls: type, owner: type, overrides: dict[str, Any]) -> tuple[dict, dict]:
    """Returns overrides of the config, and arguments of the class."""
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
    family: Family,
    checkpoint: SourceCheckpoint,
    settings: dict[str, Any] | None,
    takes: Collection[str],
) -> Collection[str]:
    """Returns prefixes of weights that are not loaded, since a setting changed.

    For a backbone (settings None), or for the head of another task, this is the head.
    """
    skip: set[str] = set()
    headed = "num_classes" in takes and checkpoint.task.get("num_classes")
    if headed and any(name in family.parts and name not in takes for name in checkpoint.task):
        settings = None  # the head is that of another task
    for name, prefixes in family.parts.items():
        here = checkpoint.task.get(name) or None
        if (
            settings is None
            or name not in takes
            or (name not in checkpoint.task and name in family.new_where_absent)
            or (name in settings and (settings[name] or None) != here)
        ):
            skip.update(prefixes)
    return sorted(skip)
