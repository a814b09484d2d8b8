"""Models of keras-hub (formerly keras-nlp) to kmodels and back, bit for bit.

Weights go by a table for each pair, strict in both directions; afterwards both models are compared
weight by weight. Nothing here needs TensorFlow; keras-hub raises if it does.
"""

import functools
import inspect
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np

from kmodels import lora, presets, registry
from kmodels.core import keras_internals
from kmodels.core.errors import InputError, one_line
from kmodels.core.files import hdf5_arrays
from kmodels.core.remote import local_copy
from kmodels.core.schema import Needed, read_json
from kmodels.interop.packages import need
from kmodels.lora import LoraSettings
from kmodels.lora.modules import linear_layers
from kmodels.models.blocks.image_converter import HUB
from kmodels.models.blocks.keras_hub_mapping import KerasHubMapping
from kmodels.text import Tokenizer
from kmodels.weights import LazyArray, Rule, engine, gather
from kmodels.weights.rules import bind_sources, source_shape

log = logging.getLogger("kmodels")

__all__ = ["compare", "from_hub", "read_lora", "to_hub"]

LORA = ("/lora_kernel_a", "/lora_kernel_b")


def make(peer: KerasHubMapping, config: Any, hub: Any, policy: keras.DTypePolicy) -> keras.Model:
    """Returns a new backbone of keras-hub.

    The policy is an object: by the name "bfloat16", a vision encoder of keras-hub makes itself
    float32.
    """
    more = {}
    if peer.make_part is not None:
        name, arguments = peer.make_part(config)
        own = arguments.pop("dtype", None)
        part_policy = policy if own is None else keras.DTypePolicy(own)
        more[peer.part] = getattr(hub.models, name)(**arguments, dtype=part_policy)
    return getattr(hub.models, peer.backbone)(**peer.arguments(config), **more, dtype=policy)


def variables(peer: KerasHubMapping, model: keras.Model) -> dict[str, Any]:
    """Returns the weights of a backbone or task of keras-hub by the names in the table.

    Raises:
        InputError: for weights that are not plain numbers, or adapters beside them.
    """
    backbone = getattr(model, "backbone", model)
    parts = [part for name in peer.ignored if (part := getattr(backbone, name, None)) is not None]
    left = {id(variable) for part in parts for variable in part.weights}
    by_name: dict[str, Any] = {}
    for variable in model.weights:
        if id(variable) in left:
            continue
        name = variable.path.removeprefix(f"{model.name}/").removeprefix(f"{backbone.name}/")
        # Layers of some backbones bear the backbone's name in front of their own, if it has one.
        name = name.removeprefix(f"{backbone.name}_")
        for pattern, known in peer.renamed.items():
            name = re.sub(f"^{pattern}$", known, name)
        if name in by_name:
            raise InputError(f"two weights of {model.name} are called {name}; rename the layers")
        by_name[name] = variable
    if adapted := [name for name in by_name if name.endswith(LORA)]:
        raise InputError(
            f"{model.name} has LoRA adapters ({len(adapted)} weights, {adapted[0]} first): take "
            "them by save_lora_weights and read_lora, and give the model as it was without"
        )
    return {name: variable for name, variable in by_name.items() if name not in peer.copies}


def check_file(file: Path, model: keras.Model) -> None:
    """Raises `InputError` if Keras ignored weights of a file that it loaded."""
    stored: list[str] = []

    def note(name: str, entry: "h5py.Dataset") -> None:
        if isinstance(entry, h5py.Dataset):
            stored.append(name)

    with h5py.File(file) as opened:
        opened.visititems(note)
    known = keras_internals.saved_arrays(model)
    if surplus := _listed("", [name for name in stored if name not in known]):
        raise InputError(
            f"{file} holds weights that {type(model).__name__} does not have{surplus[0]}"
        )


def tensors(peer: KerasHubMapping, model: keras.Model) -> dict[str, LazyArray]:
    """Returns the weights as the tensors of a file."""
    return {
        name: LazyArray(
            tuple(variable.shape),
            np.dtype(keras.backend.standardize_dtype(variable.dtype)),
            functools.partial(gather.values, variable),
        )
        for name, variable in variables(peer, model).items()
    }


def fill(peer: KerasHubMapping, model: keras.Model, values: Mapping[str, LazyArray]) -> None:
    """Assigns values to a model of keras-hub, if all names and shapes fit.

    Raises:
        InputError: with the names and shapes that do not fit.
    """
    targets = variables(peer, model)
    engine.load(
        targets, values, [Rule(name, name) for name in values], origin="the converted model"
    )
    backbone = getattr(model, "backbone", model)
    for variable in backbone.weights:
        name = variable.path.removeprefix(f"{backbone.name}_")
        if (source := peer.copies.get(name)) is not None:
            gather.put(variable, values[source].read())


def _compare(
    peer: KerasHubMapping, model: keras.Model, theirs: keras.Model, rules: Sequence[Rule]
) -> None:
    """Raises `InputError` that names every weight that is not the same, bit for bit."""
    ours, written = engine.export(model, rules), tensors(peer, theirs)
    problems = [
        *_listed("not in kmodels", [name for name in written if name not in ours]),
        *_listed("not in keras-hub", [name for name in ours if name not in written]),
        *_listed(
            "different", [name for name in ours if name in written and _differ(ours, written, name)]
        ),
    ]
    if problems:
        raise InputError(f"the two models do not hold the same weights: {'; '.join(problems)}")


def _differ(ours: Mapping[str, LazyArray], theirs: Mapping[str, LazyArray], name: str) -> bool:
    left, right = ours[name], theirs[name]
    if (left.shape, left.dtype) != (right.shape, right.dtype):
        return True
    return left.read().tobytes() != right.read().tobytes()


def _listed(title: str, names: Sequence[str]) -> list[str]:
    more = f" and {len(names) - engine.SHOWN} more" if len(names) > engine.SHOWN else ""
    return [f"{title}: {', '.join(names[: engine.SHOWN])}{more}"] if names else []


TEXT = ("sequence_length", "add_start_token", "add_end_token")
IMAGES = ("max_images_per_prompt", "num_vision_tokens_per_image")


def to_ours(preprocessor: keras.Layer, config: Any, kind: type) -> Any:
    """Returns the preprocessor of kmodels that is equivalent to one of keras-hub.

    Raises:
        InputError: for settings without a counterpart.
    """
    if (tokenizer := getattr(preprocessor, "tokenizer", None)) is not None:
        origin = f"the {type(tokenizer).__name__} of keras-hub"
        mine = kind.tokenizer_class.from_sentencepiece(tokenizer.proto, origin)
        settings = {name: getattr(preprocessor, name) for name in TEXT}
        if getattr(kind, "takes_images", False):
            settings |= {name: getattr(preprocessor, name) for name in IMAGES}
            settings["image_converter"] = preprocessor.image_converter
        return kind(mine, **settings)
    converter = getattr(preprocessor, "image_converter", None)
    if converter is None:
        raise InputError(
            f"{type(preprocessor).__name__} has neither tokenizer nor image converter; give "
            "preprocessor=False"
        )
    *size, channels = config.image_shape
    return kind(size, (0.0,) * channels, (1.0,) * channels, image_converter=converter)


def to_theirs(preprocessor: keras.Layer, kind: type) -> Any:
    """Returns the preprocessor of keras-hub that is equivalent to one of kmodels.

    Raises:
        InputError: for a tokenizer without a counterpart, or if keras-hub needs TensorFlow.
    """
    try:
        if (tokenizer := getattr(preprocessor, "tokenizer", None)) is not None:
            settings = {name: getattr(preprocessor, name) for name in TEXT}
            images = getattr(preprocessor, "image_tokens", None)
            if images:
                settings |= {name: getattr(preprocessor, name) for name in IMAGES}
                settings["image_converter"] = _converter(preprocessor, kind.image_converter_cls)
            return kind(_tokenizer(tokenizer, kind.tokenizer_cls, images), **settings)
        return kind(kind.image_converter_cls(**preprocessor.image_converter.to_dict()))
    except (ImportError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        reason = " ".join(str(error).split())
        raise InputError(
            f"keras-hub cannot make its {kind.__name__}: {reason} Or give preprocessor=False"
        ) from None


def _converter(preprocessor: Any, kind: type) -> Any:
    """Returns the image converter of a preprocessor of texts with images."""
    converter = preprocessor.image_converter
    if converter.do_pan_and_scan:
        raise InputError(
            f"keras-hub's {kind.__name__} has no counterpart for do_pan_and_scan; set it to False, "
            "or give preprocessor=False"
        )
    return kind(**{name: x for name, x in converter.to_dict().items() if name in HUB})


def _tokenizer(tokenizer: Tokenizer, kind: type, images: Mapping[str, str] | None) -> Any:
    if images:
        return kind(tokenizer.to_sentencepiece(tuple(images.values())))
    # Tokens of images, sounds and videos, which its Gemma 3 and 4 ask the vocabulary for.
    names = inspect.signature(kind.__init__).parameters
    more = {name: False for name in names if name.startswith("has_") and name.endswith("_tokens")}
    return kind(tokenizer.to_sentencepiece(), **more)


Factors = tuple[np.ndarray, np.ndarray]
PARTS = ("lora_kernel_a", "lora_kernel_b")


def read_lora(model: keras.Model, file: str | Path) -> None:
    """Puts the adapters that keras-hub's `save_lora_weights` wrote into a model of kmodels.

    The model gives what keras-hub's gives; `save_adapter` then writes them in PEFT's format. Ranks
    grow if keras-hub shares a matrix among heads: see docs/interop.md.

    Args:
        model: a backbone or task that equals the base of the adapters.
        file: a .lora.h5.

    Raises:
        InputError: for a file that does not fit the model; the model is unchanged then.
    """
    backbone = getattr(model, "backbone", model)
    peer = _mapping_of(backbone, getattr(model, "settings", {}))
    file, hub = local_copy(file), _hub()
    if lora.describe(model):
        raise InputError("the model has LoRA adapters already; read_lora needs one without")
    rank, stored = _stored(file)
    config = backbone.config
    # A layer that computes from its weights while it is built needs their values.
    with nullcontext() if peer.copies else keras_internals.without_values():
        theirs = make(peer, config, hub, keras.config.dtype_policy())
    names = {id(v): name for name, v in variables(peer, theirs).items()}
    numbered = [
        layer
        for layer in keras_internals.sublayers(theirs)
        if layer is not theirs and layer.weights
    ]
    rules = bind_sources(peer.table(config), names.values())
    layers = linear_layers(backbone)
    factors: dict[str, Factors] = {}
    for number, matrices in stored.items():
        if number >= len(numbered):
            raise InputError(
                f"{file} has an adapter for layer {number}, the model has {len(numbered)}; it was "
                "made for another model"
            )
        name = names.get(id(getattr(numbered[number], "kernel", None)))
        rule = rules.get(name) if name else None
        path = rule.targets[0].removesuffix("/kernel") if rule else ""
        if rule is None or len(rule.targets) > 1 or path not in layers:
            raise InputError(
                f"{file} has an adapter for layer {number}, {numbered[number].path}, which has no "
                "linear layer of its own here"
            )
        factors[path] = _plain(f"{file}: {name}", matrices, rank, rule, layers[path])
    _put(file, backbone, layers, factors)


def _stored(file: Path) -> tuple[int, dict[int, Factors]]:
    try:
        with h5py.File(file) as opened:
            arrays = {name: np.asarray(array) for name, array in hdf5_arrays(opened, file)}
        rank = int(arrays["lora/vars/rank"])
        numbers = {name.split("/")[1] for name in arrays if name.startswith("lora/")}
        pairs = {
            int(n): tuple(arrays[f"lora/{n}/vars/{part}"].astype("float32") for part in PARTS)
            for n in numbers
            if n.isdigit()
        }
    except (OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{file} is not a .lora.h5 of keras-hub: {one_line(error)}") from None
    if not pairs:
        raise InputError(f"{file} holds no adapters")
    return rank, {number: (a, b) for number, (a, b) in sorted(pairs.items())}


def _plain(origin: str, matrices: Factors, rank: int, rule: Rule, layer: keras.Layer) -> Factors:
    """Returns two matrices (in, R) and (R, out) with the same product."""
    a, b = matrices
    ours = (layer.input_dim, layer.units)
    shape = source_shape([ours], rule.transform, rule.axis)
    if a.shape != (*shape[:-1], rank) or b.shape != (rank, shape[-1]):
        raise InputError(
            f"{origin} has adapters of {a.shape} and {b.shape}, the model needs "
            f"{(*shape[:-1], rank)} and {(rank, shape[-1])}"
        )
    product = np.ascontiguousarray(rule.transform.forward(a @ b))
    if len(shape) == 2 or shape[0] * shape[1] == layer.input_dim:
        return a.reshape(-1, rank), b
    heads = layer.units // shape[-1]
    if heads * rank > min(ours):  # more columns than any product of this shape needs
        one = np.eye(min(ours), dtype="float32")
        return (one, product) if ours[0] <= ours[1] else (product, one)
    wide = np.kron(np.eye(heads, dtype="float32"), b)
    for axis in (0, 1):
        if shape[axis] == heads:
            columns = np.moveaxis(a, axis, 1).reshape(layer.input_dim, heads * rank)
            if np.allclose(columns @ wide, product, rtol=1e-4, atol=1e-6):
                break
    return columns, wide


def _put(
    file: Path, backbone: keras.Model, layers: dict[str, Any], factors: dict[str, Factors]
) -> None:
    """Gives the layers their adapters, all of one rank, as PEFT's files want it."""
    rank = max(a.shape[1] for a, _ in factors.values())
    for path in factors:
        if rank > (limit := min(layers[path].input_dim, layers[path].units)):
            raise InputError(
                f"{file} needs adapters of rank {rank} here, since keras-hub shares a matrix among "
                f"heads, and {path} takes at most {limit}"
            )
    ends = tuple(sorted({path.rpartition("/")[2] for path in factors}))
    settings = asdict(LoraSettings(rank=rank, targets=ends))
    lora.restore(backbone, dict.fromkeys(factors, settings))
    for path, (a, b) in factors.items():
        more = rank - a.shape[1]
        adapter = layers[path].adapter
        adapter.a.assign(np.pad(a, ((0, 0), (0, more))))
        adapter.b.assign(np.pad(b, ((0, more), (0, 0))))


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
    described = backbone.get_config()
    task = model.get_config() if backbone is not model else {}
    problems = peer.unsupported_in(described, task)
    order = getattr(backbone, "data_format", keras.config.image_data_format())
    if "image_shape" in described and order == "channels_first":
        problems.append("channels in front of rows and columns")
    if problems:
        raise InputError(
            f"kmodels has no counterpart for {peer.backbone} with {', '.join(problems)}"
        )
    fields = peer.fields(described)
    if tokenizer := getattr(getattr(model, "preprocessor", None), "tokenizer", None):
        fields |= peer.from_tokenizer(tokenizer)
    mine = peer.ours(**fields, dtype=backbone.dtype_policy)
    settings = dict(peer.pooled or {}) if backbone is model else peer.settings(task)
    if backbone is not model and preprocessor and model.preprocessor is not None:
        settings["preprocessor"] = to_ours(
            model.preprocessor, mine.config, peer.our_task.preprocessor_class
        )
    if backbone is not model or peer.pooled:
        mine = peer.our_task(backbone=mine, **settings)
    rules = peer.table(getattr(mine, "backbone", mine).config)
    engine.load(mine, tensors(peer, model), rules, origin=f"{type(model).__name__}")
    _compare(peer, mine, model, rules)
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
        InputError: with the settings that have no counterpart, for a model with parts left out, or
            if keras-hub is not installed.
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
    rates = {name: getattr(config, name, 0) for name in ("drop_path_rate", "patch_drop_rate")}
    known = peer.arguments(config)
    if lost := [f"{name}={rate}" for name, rate in rates.items() if rate and name not in known]:
        log.warning("keras-hub's %s has no %s, and trains without", peer.backbone, ", ".join(lost))
    rules = peer.table(config)
    values = engine.export(model, rules)
    theirs = make(peer, config, hub, backbone.dtype_policy)
    if backbone is not model and peer.task is not None:
        task = getattr(hub.models, peer.task)
        arguments: dict[str, Any] = {"preprocessor": None, **peer.head(settings)}
        if preprocessor and model.preprocessor is not None:
            arguments["preprocessor"] = to_theirs(model.preprocessor, task.preprocessor_cls)
        if "num_classes" in arguments:
            arguments["head_dtype"] = model.head_dtype
        theirs = task(backbone=theirs, **arguments)
    fill(peer, theirs, values)
    _compare(peer, model, theirs, rules)
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
    _compare(peer, model, theirs, peer.table(backbone.config))


def _mapping_of(backbone: keras.Model, settings: Mapping[str, Any]) -> KerasHubMapping:
    """Returns the mapping to keras-hub of a backbone of kmodels."""
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
    except Exception as error:  # a damaged preset raises nearly anything
        raise InputError(f"keras-hub cannot load {path}: {one_line(error)}") from error
    if task.is_file() and not (path / "task.weights.h5").is_file():
        alone = {id(variable) for variable in getattr(model, "backbone", model).weights}
        if any(id(variable) not in alone for variable in model.weights):
            log.warning("%s lacks task.weights.h5, so its head has new weights", path)
    if (file := path / "model.weights.h5").is_file():
        check_file(file, getattr(model, "backbone", model))
    return model


def _peer_of(model: keras.Model, text_only: bool) -> tuple[KerasHubMapping, Any]:
    """Returns the mapping of a model of keras-hub, and the part of the model that it maps."""
    backbone = getattr(model, "backbone", model)
    name = type(backbone).__name__
    peers = [peer for family in registry.families() for peer in family.keras_hub]
    # The mapping of a whole model takes precedence over that of its text part.
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
