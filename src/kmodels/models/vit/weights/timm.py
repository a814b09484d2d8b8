"""timm's `vit_*`, `deit*` and `naflexvit_*`: safetensors, with or without timm's config.json."""

import logging
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from kmodels.core.errors import InputError
from kmodels.core.schema import warn_of_unknown
from kmodels.models.blocks import encoder_rules
from kmodels.models.blocks.directories import IDLE_IN_CONFIGS
from kmodels.models.vit.config import CLIP, HALF, IMAGENET, Statistics, ViTConfig
from kmodels.models.vit.weights.huggingface_config import preprocessing
from kmodels.models.vit.weights.resizing import fitting
from kmodels.models.vit.weights.timm_names import LACKING, Architecture, architecture, form_of
from kmodels.weights import (
    LazyArray,
    Rule,
    SourceCheckpoint,
    constant,
    patch_kernel,
    read_safetensors,
    transpose,
)
from kmodels.weights.positions import Grid, table_grid

ACTIVATIONS: dict[str, bool | str] = {"gelu": False, "gelu_tanh": True, "quick_gelu": "sigmoid"}
# Fields that only the name or config.json decides, with the values assumed otherwise.
UNTOLD = {"layer_norm_epsilon": 1e-6, "approximate_gelu": False}
# Names of timm's models that are ViTs.
OF_TIMM = re.compile(r"(vit|deit|deit3|flexivit|eva_large|naflexvit)_")
log = logging.getLogger("kmodels")
# timm's default of the cropped share of an image.
CROP = 0.875
# timm's names, alone or with the tag behind a dot, for which it has one mean and deviation each.
# The other names, such as vit_base_patch16_224 without its tag, each stand for several trained
# models.
BY_NAME: dict[re.Pattern[str], Statistics] = {
    re.compile(r"deit3?_\w+?(_distilled)?_patch\d+_\d+(\..*)?"): IMAGENET,
    re.compile(r"vit_[a-z]+_patch14_(reg4_)?dinov2(\..*)?"): IMAGENET,
    re.compile(r"vit_\w+_patch\d+_dinov3(_qkvb)?\.lvd1689m"): IMAGENET,
    re.compile(r"vit_\w+_patch16_rope_(ape_)?224(\..*)?"): IMAGENET,
    re.compile(r"vit_(base|mediumd?)_patch16_rope_reg1_gap_256(\..*)?"): HALF,
    re.compile(r"vit_betwixt_patch16_rope_reg4_gap_256(\..*)?"): CLIP,
    re.compile(r"vit_pe_(core|lang|spatial)_\w+_patch\d+_\d+(\..*)?"): HALF,
    re.compile(r"vit_\w+_patch\d+_siglip(_gap)?_\d+(\..*)?"): HALF,
    re.compile(r"vit_\w+_patch\d+(_\d+)?\.augreg\w*"): HALF,
    re.compile(r"naflexvit_\w+_patch\d+_\w+(\..*)?"): HALF,
    re.compile(
        r"vit_(?!large_patch14_clip_)\w+_patch\d+(_plus)?_clip(_quickgelu)?_\d+(\..*)?"
    ): CLIP,
}
# Arguments, and the values that the model supports.
SUPPORTED: dict[str, tuple[object, ...]] = {
    "pool_include_prefix": (False, None),
    "scale_attn_norm": (False, None),
    "scale_mlp_norm": (False, None),
    "pos_embed": ("learn", None),
    "attn_layer": ("", None),
    "block_fn": ("", None),
    "mlp_layer": ("", None),
    "norm_layer": ("", None),
    "embed_layer": ("", None),
    "embed_norm_layer": ("", None),
}
# Every other argument in timm 1.0.31: those that are read, here or off the tensors, and those of
# training, of Python, and of a rotary embedding beside its type.
READ = {
    *("act_layer", "attn_pool_mlp_ratio", "attn_pool_num_heads", "attn_type", "class_token"),
    *("depth", "embed_dim", "fc_norm", "final_norm", "global_pool", "img_size", "in_chans"),
    *("init_values", "mlp_ratio", "no_embed_class", "num_classes", "num_heads", "num_reg_tokens"),
    *("patch_size", "pos_embed_grid_size", "pos_embed_interp_mode", "pre_norm", "proj_bias"),
    *("qk_norm", "qkv_bias", "qkv_fused", "ref_feat_shape", "reg_tokens", "swiglu_align_to"),
    *("swiglu_mlp", "use_abs_pos_emb", "use_fc_norm", "use_post_transformer_norm"),
    *("use_pre_transformer_norm", "rope_grid_indexing", "rope_grid_offset", "rope_rotate_half"),
    *("rope_jitter_coords", "rope_rescale_coords", "rope_shift_coords", "rope_temperature"),
    *("attn_drop_rate", "device", "drop_path_rate", "drop_rate", "dtype", "dynamic_img_pad"),
    *("dynamic_img_size", "enable_patch_interpolator", "fix_init", "head_init_scale"),
    *("patch_drop_rate", "pos_drop_rate", "proj_drop_rate", "rope_ref_feat_shape"),
    *("strict_img_size", "use_naflex", "weight_init"),
}
# Settings around the arguments: of the images, of labels, of transformers' wrapper, and notes.
NOTES = IDLE_IN_CONFIGS | {
    *("do_pooling", "initializer_range", "model_type"),
    *("architecture", "label_descriptions", "label_names", "labels", "model_args", "num_features"),
    *("pretrained_cfg", "classifier", "crop_mode", "crop_pct", "custom_load", "description"),
    *("file", "first_conv", "fixed_input_size", "hf_hub_filename", "hf_hub_id", "input_size"),
    *("interpolation", "label_offset", "license", "mean", "min_input_size", "notes"),
    *("origin_url", "paper_ids", "paper_name", "pool_size", "source", "state_dict", "std", "tag"),
    *("test_crop_pct", "test_input_size", "test_pool_size", "url"),
}
# As timm says it; DeiT's classifier with two heads calls itself "token".
POOLINGS = {"token": "token", "avg": "gap", "max": "max", "avgmax": "avgmax", "map": "map"}
NORMS = {
    "norm_pre": "pre_norm",
    "norm": "final_norm",
    "fc_norm": "pooled_norm",
    "blocks.{i}.norm1": "block_{i}/attention_norm",
    "blocks.{i}.norm2": "block_{i}/mlp_norm",
    "blocks.{i}.attn.q_norm": "block_{i}/attention/query_norm",
    "blocks.{i}.attn.k_norm": "block_{i}/attention/key_norm",
    "attn_pool.norm": "pooling/mlp_norm",
}
DENSE: dict[str, str | tuple[str, ...]] = {
    "blocks.{i}.attn.qkv": tuple(f"block_{{i}}/attention/{x}" for x in ("query", "key", "value")),
    "blocks.{i}.attn.proj": "block_{i}/attention/output",
    "blocks.{i}.mlp.fc2": "block_{i}/mlp/down",
    "attn_pool.q": "pooling/attention/query",
    "attn_pool.kv": ("pooling/attention/key", "pooling/attention/value"),
    "attn_pool.proj": "pooling/attention/output",
    "attn_pool.mlp.fc1": "pooling/mlp/up",
    "attn_pool.mlp.fc2": "pooling/mlp/down",
    "head": "logits",
    "head_dist": "distillation_logits",
}


def rules(config: ViTConfig) -> list[Rule]:
    """Returns the table."""
    table = [
        Rule("cls_token", "tokens/class_token"),
        Rule("dist_token", "tokens/distillation_token"),
        Rule("reg_token", "tokens/register_tokens"),
        Rule("pos_embed", "tokens/position_embedding"),
        Rule(
            "patch_embed.proj.weight",
            "patch_embedding/kernel",
            patch_kernel(config.patch_size, config.image_shape[2]),
        ),
        Rule("patch_embed.proj.bias", "patch_embedding/bias"),
        Rule("blocks.{i}.ls1.gamma", "block_{i}/attention_scale/scale"),
        Rule("blocks.{i}.ls2.gamma", "block_{i}/mlp_scale/scale"),
        Rule("attn_pool.latent", "pooling/probe"),
    ]
    up = ("block_{i}/mlp/gate", "block_{i}/mlp/up") if config.use_swiglu_ffn else "block_{i}/mlp/up"
    for source, target in (DENSE | {"blocks.{i}.mlp.fc1": up}).items():
        targets = (target,) if isinstance(target, str) else target
        kernels = [f"{path}/kernel" for path in targets]
        table.append(Rule(f"{source}.weight", kernels, transpose))
        table.append(Rule(f"{source}.bias", [f"{path}/bias" for path in targets]))
    return [*table, *encoder_rules.norms(NORMS)]


@dataclass(frozen=True)
class TimmFile:
    """A file or directory of timm's, and the settings that it gives.

    Args:
        path: path of the file or directory.
        description: the object in its config.json; empty for a bare file.
        given: fields of the config that the caller gives.
        name: timm's name of the model, with or without the tag of its weights.
        known: the architecture of that name, or None if timm does not have it.
        tensors: those of the file, by the names of timm's `VisionTransformer`.
    """

    path: Path
    description: Mapping[str, Any]
    given: Mapping[str, Any]
    name: str
    known: Architecture | None
    tensors: Mapping[str, LazyArray]

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """The model's arguments: those in config.json, else those of the architecture.

        Raises:
            InputError: if the number of heads is unknown.
        """
        described, usual = self.description.get("global_pool"), {}
        if (known := self.known) is not None:
            usual = {
                "num_heads": known.num_heads,
                "global_pool": described or known.pooling,
                "act_layer": known.activation,
                "no_embed_class": known.no_embed_class,
            }
        named = self.description.get("model_args") or {}
        arguments = usual | {key: value for key, value in named.items() if value is not None}
        heads = self.given.get("num_heads") or arguments.get("num_heads")
        if heads is None:
            raise InputError(
                f"{self.path}: {self.name!r} is no architecture of timm's, so nothing says how "
                "many heads it has; give num_heads, or name the file after its architecture, such "
                "as vit_base_patch16_224.safetensors"
            )
        if "position_over_prefix" in self.given:
            arguments["no_embed_class"] = not self.given["position_over_prefix"]
        return {"global_pool": described, **arguments, "num_heads": heads}

    def check(self, kind: str, names: Sequence[str], supported: Mapping[str, Any]) -> None:
        """Raises `InputError` for an argument without a supported value, and for missing tensors.

        Settings that are not known are logged as a warning.
        """
        arguments = self.description.get("model_args") or {}
        for key, values in supported.items():
            if arguments.get(key, values[0]) not in values:
                raise InputError(
                    f"{self.path}: {key}={arguments[key]!r} has no counterpart in the model"
                )
        if absent := [name for name in names if name not in self.tensors]:
            raise InputError(f"{self.path} is not {kind}: it lacks {', '.join(absent)}")
        described = {**self.description, **(self.description.get("pretrained_cfg") or {})}
        known = {*supported, *READ, *NOTES}
        warn_of_unknown(self.path / "config.json", {**described, **arguments}, known)

    def fields(self) -> dict[str, Any]:
        """Returns the fields of the config that all kinds read off the tensors alike."""
        tensors = self.tensors

        def has(*names: str) -> bool:
            return any(f"blocks.0.{name}" in tensors for name in names)

        layers = {int(m[1]) for key in tensors if (m := re.match(r"blocks\.(\d+)\.", key))}
        return {
            "num_layers": len(layers),
            "num_heads": self.arguments["num_heads"],
            "hidden_dim": tensors["patch_embed.proj.weight"].shape[0],
            "use_patch_bias": "patch_embed.proj.bias" in tensors,
            "use_class_token": "cls_token" in tensors,
            "num_register_tokens": self.num_registers,
            "qk_norm": "blocks.0.attn.q_norm.weight" in tensors,
            "pre_norm": "norm_pre.weight" in tensors,
            "final_norm": "norm.weight" in tensors,
            "layer_scale": 1.0 if has("ls1.gamma", "gamma_1") else None,
            "use_mha_bias": has("attn.qkv.bias", "attn.proj.bias"),
        }

    @property
    def num_registers(self) -> int:
        """The number of register tokens."""
        registers = self.tensors.get("reg_token")
        return 0 if registers is None else registers.shape[1]

    @property
    def patches(self) -> tuple[int, int]:
        """The number of channels, and the side of a patch in pixels.

        Raises:
            InputError: for patches that are not square.
        """
        shape = self.tensors["patch_embed.proj.weight"].shape
        if len(shape) != 4 or shape[2] != shape[3]:
            raise InputError(
                f"{self.path}: patches of {shape[2:]} pixels; only square ones are supported"
            )
        return shape[1], shape[2]

    @property
    def sizes(self) -> list[Sequence[int]]:
        """The sizes in pixels, (height, width), that the positions may belong to."""
        size = self.arguments.get("img_size")
        size = size or (self.description.get("pretrained_cfg") or {}).get("input_size")
        sizes: list[Any] = [size[-2:] if isinstance(size, list | tuple) else (size, size)]
        shape = self.given.get("image_shape")
        return [*(sizes if size else ()), *(() if shape is None else (shape[:2],))]

    def grid(self, patch: int, sizes: Sequence[Sequence[int]]) -> Grid:
        """Returns the grid of the positions: of one of the image sizes that fits them, or a square.

        Raises:
            InputError: for a table that covers the registers, or one of no known shape.
        """
        rows = self.tensors["pos_embed"].shape[1]
        special = sum(name in self.tensors for name in ("cls_token", "dist_token"))
        grids = [(height // patch, width // patch) for height, width in sizes]
        alone = self.arguments.get("no_embed_class")
        fronts = (special, 0) if alone is None else (0,) if alone else (special,)
        try:
            return table_grid(f"{self.path}: pos_embed", rows, fronts, grids)
        except InputError:
            patches = max(rows - special - self.num_registers, 0)
            areas = {grid[0] * grid[1] for grid in grids} | {math.isqrt(patches) ** 2}
            if not self.num_registers or patches not in areas:
                raise
        raise InputError(
            f"{self.path}: the positions cover the registers; only no_embed_class=True is supported"
        )

    def gelu(self, usual: str = "gelu") -> bool | str:
        """Returns the form of GELU that timm's `act_layer` means; `usual` stands for an absent one.

        Raises:
            InputError: for another activation.
        """
        activation = self.arguments.get("act_layer") or usual
        if activation not in ACTIVATIONS:
            raise InputError(
                f"{self.path}: act_layer is {activation!r}; known: {', '.join(ACTIVATIONS)}"
            )
        return ACTIVATIONS[activation]

    def preprocessor(self, config: ViTConfig) -> dict[str, Any] | None:
        """Returns the arguments of a preprocessor; None if mean and deviation are unknown."""
        statistics = statistics_of(self.name, self.description, config.image_shape[2])
        if statistics is None:
            return None
        described = self.description.get("pretrained_cfg") or {}
        height, width = self.given.get("image_shape", config.image_shape)[:2]
        arguments: dict[str, Any] = {
            "image_size": (height, width),
            "mean": statistics[0],
            "std": statistics[1],
            "interpolation": described.get("interpolation") or "bicubic",
        }
        if not self.description:
            log.warning(
                "%s: a file alone does not say timm's crop_pct, so images are stretched; read it "
                "with its config.json, or give a preprocessor with resize_size",
                self.path,
            )
            return arguments
        share, mode = described.get("crop_pct") or CROP, described.get("crop_mode") or "center"
        whole = (math.floor(height / share), math.floor(width / share))
        if mode == "border":
            arguments |= {"resize_size": whole, "rounds_center": True, "resize_mode": "fit"}
        elif mode != "squash" and whole[0] == whole[1]:
            arguments |= {"resize_size": whole[0], "rounds_center": True}
        elif mode != "squash":
            arguments |= {"resize_size": whole, "rounds_center": True, "resize_mode": "cover"}
        elif whole != (height, width):
            arguments |= {"resize_size": whole, "rounds_center": True}
        return arguments

    def task(self) -> dict[str, Any]:
        """Returns the settings of the task, by the arguments or the tensors.

        Raises:
            InputError: for a pooling that is not supported.
        """
        pooling = self.arguments.get("global_pool")
        if pooling is None or "head.weight" not in self.tensors:
            pooling = pooling or self._pooling()
        distilled = pooling == "token" and "dist_token" in self.tensors
        if pooling not in POOLINGS:
            raise InputError(
                f"{self.path}: global_pool is {pooling!r}; known: {', '.join(POOLINGS)}"
            )
        head = self.tensors.get("head.weight")
        return {
            "num_classes": None if head is None else head.shape[0],
            "pooling": "distilled" if distilled else POOLINGS[pooling],
            "pooled_norm": "fc_norm.weight" in self.tensors,
        }

    def _pooling(self) -> str:
        if "attn_pool.latent" in self.tensors:
            return "map"
        tokens = "cls_token" in self.tensors and "fc_norm.weight" not in self.tensors
        return "token" if tokens else "avg"

    def assumed(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Returns which of these settings neither name, nor config.json, nor tensors decide."""
        if self.known is not None:
            return {}
        fields = dict(settings)
        if self.arguments.get("act_layer"):
            fields.pop("approximate_gelu", None)
        if self.arguments.get("global_pool") or "attn_pool.latent" in self.tensors:
            return fields
        return {**fields, "pooling": POOLINGS[self._pooling()]}


@dataclass(frozen=True)
class TimmFormat:
    """Files of timm's whose architecture has one of some forms, as in `Family.formats`.

    Args:
        forms: the forms, as in `Architecture`.
        fields: reads the fields of the config, most of them off the shapes; raises `InputError`
            for variants that the model has no counterpart for.
        rules: config to the table.
        assumed: names of fields in `UNTOLD` that these files do not decide if their name is
            unknown.
        names: names of tensors in the file to those of timm's `VisionTransformer`.
    """

    forms: Collection[str]
    fields: Callable[[TimmFile], dict[str, Any]]
    rules: Callable[[ViTConfig], list[Rule]]
    assumed: Sequence[str] = tuple(UNTOLD)
    names: Mapping[str, str] = field(default_factory=dict)

    def matches(self, path: Path, description: dict[str, Any]) -> bool:
        """Returns True for a safetensors file, or a directory whose config.json names timm's ViT.

        Either must have one of the forms.
        """
        if path.is_dir():
            name = str(description.get("architecture", ""))
            known = name in LACKING or bool(OF_TIMM.match(name))
        else:
            name, known = path.stem, path.suffix == ".safetensors"
        return known and form_of(name) in self.forms

    def open_checkpoint(
        self, path: Path, description: dict[str, Any], overrides: dict[str, Any], weights: bool
    ) -> SourceCheckpoint:
        """Reads a file or directory, see `kmodels.registry.Format`.

        The shapes of its tensors are needed for the architecture, so `weights` changes nothing.
        """
        name = str(description.get("architecture", path.stem))
        # Files of timm before 0.9 have all settings in one object.
        description = {"pretrained_cfg": description, **description} if description else {}
        known = architecture(path, name)  # refuses models that are not supported, before reading
        stored = read_safetensors(path)
        tensors = {self.names.get(name, name): tensor for name, tensor in stored.items()}
        file = TimmFile(path, description, overrides, name, known, tensors)
        fields = self.fields(file)
        config = ViTConfig(**fields)
        return SourceCheckpoint(
            path=path,
            kind="timm",
            backbone=fields,
            task=file.task(),
            **preprocessing(path, file.preprocessor(config)),
            tensors=_completed(tensors, config),
            rules=self.rules(config),
            fit=fitting(config, "pos_embed"),
            assumed=file.assumed({name: fields[name] for name in self.assumed}),
        )


def _fields(file: TimmFile) -> dict[str, Any]:
    file.check("a timm ViT", ("patch_embed.proj.weight", "pos_embed"), SUPPORTED)
    tensors, shared = file.tensors, file.fields()
    width = shared["hidden_dim"]
    channels, patch = file.patches
    up, down = (tensors.get(f"blocks.0.mlp.fc{x}.weight") for x in (1, 2))
    # A gated MLP has twice the inputs of its last layer.
    gated = up is not None and down is not None and up.shape[0] == 2 * down.shape[1]
    if gated and file.arguments.get("act_layer") != "silu":
        raise InputError(
            f"{file.path} has a gated MLP, which is supported only for vit_giant_patch14_dinov2 "
            "and others of that shape; name the file after its architecture"
        )
    mlp_dim = 4 * width if up is None else up.shape[0]
    grid = file.grid(patch, file.sizes)
    return shared | {
        "image_shape": (grid[0] * patch, grid[1] * patch, channels),
        "patch_size": patch,
        "mlp_dim": mlp_dim // (2 if gated else 1),
        # The CLIP and BEiT-3 ancestors of some checkpoints normed with PyTorch's own 1e-5.
        "layer_norm_epsilon": file.known.epsilon if file.known else UNTOLD["layer_norm_epsilon"],
        "use_mlp_bias": "blocks.0.mlp.fc1.bias" in tensors,
        "use_distillation_token": "dist_token" in tensors,
        "position_over_prefix": (
            tensors["pos_embed"].shape[1] > grid[0] * grid[1] or not shared["use_class_token"]
        ),
        "position_interpolation": "bicubic_antialias",
        "approximate_gelu": False if gated else file.gelu(),
        "use_swiglu_ffn": gated,
    }


FORMAT = TimmFormat({"vit"}, _fields, rules)


def statistics_of(name: str, description: Mapping[str, Any], channels: int) -> Statistics | None:
    """Returns mean and deviation of the file, or of timm's models of that name."""
    described = description.get("pretrained_cfg", {})
    mean, std = described.get("mean"), described.get("std")
    if mean and std:
        return (tuple(mean), tuple(std)) if len(mean) == len(std) == channels else None
    if tag := described.get("tag"):
        name = f"{name}.{tag}"
    known = (value for names, value in BY_NAME.items() if names.fullmatch(name))
    return next(known, None) if channels == 3 else None


def _completed(tensors: Mapping[str, LazyArray], config: ViTConfig) -> dict[str, LazyArray]:
    """Returns the tensors with rows of positions, and with zeros for biases that are left out.

    NaFlex has a grid of positions. `qkv_bias=False` leaves the biases out of query, key and value
    alone, which the model has or lacks together with that of the output.
    """
    completed = dict(tensors)
    if (table := tensors.get("pos_embed")) is not None and len(table.shape) == 4:
        _, *grid, width = table.shape
        completed["pos_embed"] = table.map(
            (1, math.prod(grid), width), lambda x: x.reshape(1, -1, width)
        )
    if not config.use_mha_bias or config.unbiased:
        return completed
    for i in range(config.num_layers):
        for part, size in (("qkv", 3), ("proj", 1)):
            name = f"blocks.{i}.attn.{part}"
            if f"{name}.weight" in tensors and f"{name}.bias" not in tensors:
                completed[f"{name}.bias"] = constant(0.0, (size * config.hidden_dim,))
    return completed


# Names inside the embedding of a `naflexvit_*`, which takes images as rows of patches, and those
# of the other ViTs.
NAFLEX_NAMES = {
    "embeds.proj.weight": "patch_embed.proj.weight",
    "embeds.proj.bias": "patch_embed.proj.bias",
    "embeds.pos_embed": "pos_embed",
    "embeds.cls_token": "cls_token",
    "embeds.reg_token": "reg_token",
}
NAFLEX_SUPPORTED: dict[str, tuple[object, ...]] = {
    **SUPPORTED,
    "pos_embed": ("learned", None),
    "pos_embed_ar_preserving": (False, None),
    "pos_embed_antialias": (True, None),
    "pos_embed_align_corners": (False, None),
    "pos_embed_use_grid_sample": (False, None),
    "rope_type": ("", "none", None),
    "embed_proj_type": ("linear", None),
    "embed_norm_layer": (None,),
    "input_norm_layer": (None,),
    "rope_mrope_section": (None,),
    "use_key_only_attn_mask": (True, None),
    "norm_layer": (None,),
    "patchify_channels_last": (True, None),
    "num_kv_heads": (None,),
    "attn_type": ("standard", None),
    "attn_gated": (False, None),
    "swiglu_mlp": (False, None),
    "scale_attn_inner_norm": (False, None),
    "attn_only_layer_scale": (False, None),
    "attn_pool_num_heads": (None,),
}


def naflex_rules(config: ViTConfig) -> list[Rule]:
    """Returns the table of a `naflexvit_*`: the kernel of the patches is that of a dense layer."""
    kernel = "patch_embed.proj.weight"
    table = rules(config)
    return [replace(rule, transform=transpose) if rule.source == kernel else rule for rule in table]


def _naflex_fields(file: TimmFile) -> dict[str, Any]:
    names = ("patch_embed.proj.weight", "pos_embed", "blocks.0.attn.qkv.weight")
    file.check("a naflexvit with learned positions", names, NAFLEX_SUPPORTED)
    tensors, shared = file.tensors, file.fields()
    _, *grid, _ = tensors["pos_embed"].shape
    patch = file.arguments.get("patch_size")
    if not patch:
        named = re.search(r"_patch(\d+)_", file.name)
        patch = int(named[1]) if named else 16
    siglip = "_siglip" in file.name
    mode = file.arguments.get("pos_embed_interp_mode") or ("bilinear" if siglip else "bicubic")
    numbers = tensors["patch_embed.proj.weight"].shape[1]
    return shared | {
        "image_shape": (grid[0] * patch, grid[1] * patch, numbers // patch**2),
        "patch_size": patch,
        "mlp_dim": tensors["blocks.0.mlp.fc1.weight"].shape[0],
        "layer_norm_epsilon": 1e-6,
        "position_over_prefix": not shared["use_class_token"],
        "position_interpolation": f"{mode}_antialias",
        "approximate_gelu": file.gelu("gelu_tanh" if siglip else "gelu"),
    }


NAFLEX = TimmFormat({"naflex"}, _naflex_fields, naflex_rules, names=NAFLEX_NAMES)
