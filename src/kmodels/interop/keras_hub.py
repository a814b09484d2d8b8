"""Models of keras-hub (formerly keras-nlp) to kmodels and back, bit for bit.

Weights go by a table for each pair, strict in both directions; afterwards both models are compared
weight by weight. Nothing here needs TensorFlow; keras-hub says itself where it does.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras

from kmodels import lora, presets
from kmodels.core.errors import InputError
from kmodels.core.file_shapes import Needed
from kmodels.core.remote import local_copy
from kmodels.core.schema import read_json
from kmodels.interop import hub_lora, hub_preprocessing, hub_weights
from kmodels.interop.packages import need
from kmodels.models import registry
from kmodels.models.common.keras_hub_mapping import KerasHubMapping
from kmodels.weights import engine

log = logging.getLogger("kmodels")

__all__ = ["compare", "from_hub", "read_lora", "to_hub"]


def _hub() -> Any:
    return need("keras_hub", "keras-hub", "hub")


def from_hub(
    source: keras.Model | str, *, preprocessor: bool = True, text_only: bool = False
) -> Any:
    """Returns the model of keras-hub as one of kmodels, in the same dtype.

    Args:
        source: a backbone or task of keras-hub (or keras-nlp): ViT, DeiT, DINOv2, SigLIP's vision
            tower, Gemma 1 to 4, Gemma 3 with its vision encoder; or a directory that its
            `save_to_preset` wrote.
        preprocessor: takes over tokenizer or image converter too; False leaves them.
        text_only: leaves the vision encoder of a Gemma 3 out.

    Returns:
        A backbone or task of kmodels with equal weights. A model with more parts, such as Gemma 4
        with its encoders or SigLIP with both towers, gives the part that kmodels has.

    Raises:
        InputError: for a model without a counterpart, listing what differs, or without keras-hub.
    """
    model = _load(source) if isinstance(source, str | Path) else source
    peer, model = _peer_of(model, text_only)
    backbone = getattr(model, "backbone", model)
    given = backbone.get_config()
    task = model.get_config() if backbone is not model else {}
    problems = peer.unsupported_in(given, task)
    order = getattr(backbone, "data_format", keras.config.image_data_format())
    if "image_shape" in given and order == "channels_first":
        problems.append("channels in front of rows and columns")
    if problems:
        raise InputError(
            f"kmodels has no counterpart for {peer.backbone} with {', '.join(problems)}"
        )
    fields = peer.fields(given)
    if tokenizer := getattr(getattr(model, "preprocessor", None), "tokenizer", None):
        fields |= peer.from_tokenizer(tokenizer)
    mine = peer.ours(**fields, dtype=backbone.dtype_policy)
    settings = dict(peer.pooled or {}) if backbone is model else peer.settings(task)
    if backbone is not model and preprocessor and model.preprocessor is not None:
        settings["preprocessor"] = hub_preprocessing.to_ours(
            model.preprocessor, mine.config, peer.our_task.preprocessor_class
        )
    if backbone is not model or peer.pooled:
        mine = peer.our_task(backbone=mine, **settings)
    rules = peer.table(getattr(mine, "backbone", mine).config)
    engine.load(mine, hub_weights.tensors(peer, model), rules, origin=f"{type(model).__name__}")
    hub_weights.compare(peer, mine, model, rules)
    return mine


def to_hub(model: keras.Model, *, preprocessor: bool = True, text_only: bool = False) -> Any:
    """Returns a model of kmodels as keras-hub's, in the same dtype, to be saved by that.

    Args:
        model: a backbone or task of kmodels.
        preprocessor: gives it tokenizer or image converter too; False leaves them.
        text_only: gives the text part of a checkpoint whose other parts were left out when it was
            read.

    Returns:
        A backbone or task of keras-hub with equal weights.

    Raises:
        InputError: lists what keras-hub has no counterpart for or what was left out, or says that
            keras-hub is not installed.
    """
    presets.check_parts(model, text_only, "a model of keras-hub")
    hub = _hub()
    if lora.describe(model):
        raise InputError(
            "keras-hub has no place for these LoRA adapters; call merge_lora first, or save_adapter"
        )
    backbone = getattr(model, "backbone", model)
    config, settings = backbone.config, getattr(model, "settings", {})
    peer = _mapping_of(backbone, settings)
    if problems := peer.unsupported_out(config, settings):
        raise InputError(
            f"keras-hub's {peer.backbone} has no counterpart for {', '.join(problems)}"
        )
    rules = peer.table(config)
    values = engine.export(model, rules)
    theirs = hub_weights.make(peer, config, hub, backbone.dtype_policy)
    if backbone is not model and peer.task is not None:
        task = getattr(hub.models, peer.task)
        arguments: dict[str, Any] = {"preprocessor": None, **peer.head(settings)}
        if preprocessor and model.preprocessor is not None:
            arguments["preprocessor"] = hub_preprocessing.to_theirs(
                model.preprocessor, task.preprocessor_cls
            )
        if "num_classes" in arguments:
            arguments["head_dtype"] = model.head_dtype
        theirs = task(backbone=theirs, **arguments)
    hub_weights.fill(peer, theirs, values)
    hub_weights.compare(peer, model, theirs, rules)
    return theirs


def compare(model: keras.Model, theirs: keras.Model) -> None:
    """Compares a model of kmodels with one of keras-hub, weight by weight and bit for bit.

    Args:
        model: a model of kmodels.
        theirs: a model of keras-hub.

    Raises:
        InputError: names every weight that one of them lacks, or that is not the same.
    """
    backbone = getattr(model, "backbone", model)
    parts = [peer.part for peer in registry.family(backbone.family).keras_hub]
    peer, theirs = _peer_of(theirs, not any(parts))
    hub_weights.compare(peer, model, theirs, peer.table(backbone.config))


def read_lora(model: keras.Model, file: str | Path) -> None:
    """Puts the adapters that keras-hub's `save_lora_weights` wrote into a model of kmodels.

    The model gives what keras-hub's gives; `save_adapter` then writes them in PEFT's format. Ranks
    grow where keras-hub shares a matrix among heads: see docs/interop.md.

    Args:
        model: a backbone or task that equals the base of the adapters.
        file: a .lora.h5.

    Raises:
        InputError: for a file that does not fit the model; the model is unchanged then.
    """
    backbone = getattr(model, "backbone", model)
    peer = _mapping_of(backbone, getattr(model, "settings", {}))
    hub_lora.read(model, local_copy(file), peer, _hub())


def _mapping_of(backbone: keras.Model, settings: Mapping[str, Any]) -> KerasHubMapping:
    """Returns the pair with keras-hub that a backbone of ours belongs to."""
    for peer in registry.family(backbone.family).keras_hub:
        if peer.belongs(backbone.config, settings):
            return peer
    raise InputError(
        f"{type(backbone).__name__} has no counterpart in kmodels' tables of keras-hub; write "
        "export_to_transformers, whose directories keras-hub reads"
    )


def _load(source: str | Path) -> Any:
    hub, path = _hub(), local_copy(source)
    if not path.is_dir():
        raise InputError(
            f"{path} is not a directory; give one that keras-hub's save_to_preset wrote"
        )
    described = path / "config.json"
    config = read_json(described) if described.is_file() else {}
    if "class_name" not in config:
        raise InputError(
            f"{path} is not a preset of keras-hub: its config.json has no class_name; from_preset "
            "reads directories of Hugging Face"
        )
    kind = hub.models.Backbone
    task = path / "task.json"
    if task.is_file():
        name = read_json(task, {"class_name": Needed(str)})["class_name"]
        kind = getattr(hub.models, name, None)
        if kind is None:
            raise InputError(f"{path} holds a {name}, which this keras-hub does not have")
    try:
        model = kind.from_preset(str(path))
    except (ImportError, OSError, TypeError, ValueError, KeyError) as error:
        raise InputError(f"keras-hub cannot load {path}: {' '.join(str(error).split())}") from error
    if (file := path / "model.weights.h5").is_file():
        hub_weights.check_file(file, getattr(model, "backbone", model))
    return model


def _peer_of(model: keras.Model, text_only: bool) -> tuple[KerasHubMapping, Any]:
    """Returns the pair of a model of keras-hub, and the model or the part of it that is meant."""
    backbone = getattr(model, "backbone", model)
    name = type(backbone).__name__
    peers = [peer for family in registry.families() for peer in family.keras_hub]
    # A pair of a whole model counts before that of its text alone.
    for peer in sorted(peers, key=lambda peer: peer.part is None):
        if peer.part and (text_only or getattr(backbone, peer.part, None) is None):
            continue
        if name == peer.backbone:
            if model is not backbone and type(model).__name__ != peer.task:
                break
            return peer, model
        if name in peer.inside and model is backbone:
            log.info("of %s: %s alone", name, peer.inside[name])
            return peer, getattr(backbone, peer.inside[name])
    known = [found for peer in peers for found in (peer.backbone, peer.task) if found]
    raise InputError(
        f"{type(model).__name__} of {name} has no counterpart; {', '.join(known)} have"
    )
