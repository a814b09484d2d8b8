"""The vision encoder of Gemma 3 in files of transformers, keras-hub and llama.cpp."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import keras

from kmodels.core.errors import InputError
from kmodels.core.remote import write_file
from kmodels.models.blocks.encoder_rules import below
from kmodels.models.blocks.gguf.reading import IDLE_ANYWHERE, NOTES, OWNERS, lazy
from kmodels.models.blocks.gguf.tensors import plus_one
from kmodels.models.blocks.gguf.writing import (
    FILES,
    KINDS,
    add_settings,
    add_tensors,
    check_file,
    check_package,
)
from kmodels.models.blocks.keras_hub_mapping import dense, norm, numbered
from kmodels.models.gemma_vision.gemma3_encoder import Gemma3VisionEncoder
from kmodels.models.vit.config import ViTConfig
from kmodels.models.vit.weights import clip_siglip
from kmodels.models.vit.weights.augreg import patches
from kmodels.weights import LazyArray, Rule, engine, leading_axes
from kmodels.weights.gguf import Settings, open_gguf

# === Hugging Face: SigLIP's tower and a projector ===

# Names of the tower's settings: here, in config.json, and transformers' default.
CONFIG = {
    "image_size": ("image_size", 224),
    "patch_size": ("patch_size", 16),
    "num_heads": ("num_attention_heads", 12),
    "hidden_dim": ("hidden_size", 768),
    "num_layers": ("num_hidden_layers", 12),
    "intermediate_dim": ("intermediate_size", 3072),
    "layer_norm_epsilon": ("layer_norm_eps", 1e-6),
    "attention_dropout": ("attention_dropout", 0.0),
}
# Settings that all towers have; the head of a tower is ignored.
FIXED = {
    "model_type": "siglip_vision_model",
    "hidden_act": "gelu_pytorch_tanh",
    "num_channels": 3,
}


def settings(vision: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, bool]]:
    """Returns the encoder's arguments for a `vision_config`, and the settings that it lacks."""
    arguments = {ours: vision.get(name, usual) for ours, (name, usual) in CONFIG.items()}
    said = {name: vision.get(name, usual) for name, usual in FIXED.items()}
    return arguments, {
        f"{name}={x!r} of the vision tower": x != FIXED[name] for name, x in said.items()
    }


def form(encoder: Gemma3VisionEncoder) -> dict[str, Any]:
    """Returns the `vision_config` of an encoder."""
    sizes = {theirs: getattr(encoder, ours) for ours, (theirs, _) in CONFIG.items()}
    return {**sizes, **FIXED, "vision_use_head": False}


def rules(config: ViTConfig, tower: str, projector: str) -> list[Rule]:
    """Returns the table of an encoder, with the prefixes of its tower and of its projector."""
    return [
        Rule(f"{projector}mm_input_projection_weight", "input_projection/kernel"),
        Rule(f"{projector}mm_soft_emb_norm.weight", "soft_embedding_norm/scale"),
        *clip_siglip.rules(config, tower),
    ]


# === keras-hub (0.32) ===

# The blocks of its tower always have this epsilon, and no dropout. It is float32 even if its dtype
# is given as the name "bfloat16".
HUB_EPSILON = 1e-6
NAMES = (
    *("image_size", "patch_size", "num_heads", "hidden_dim", "num_layers", "intermediate_dim"),
    *("pool_size", "layer_norm_epsilon"),
)
POSITIONS = "tokens/position_embedding"
HUB_TOWER, HUB_OUTPUT = "image_encoder", "vision_output_encoder"
PARTS = {"query_proj": "query", "key_proj": "key", "value_proj": "value", "out_proj": "output"}


def hub_rules(config: ViTConfig) -> list[Rule]:
    """Returns the table of an encoder, whose attention has no axis of heads."""
    front, block = f"{HUB_TOWER}/encoder_embeddings", f"{HUB_TOWER}/encoder_block_{{i}}"
    table = [
        *patches(config, f"{front}/embedding_conv"),
        Rule(
            f"{front}/position_embedding/embeddings", "tokens/position_embedding", leading_axes(1)
        ),
        *norm(f"{block}/layer_norm_1", "block_{i}/attention_norm"),
        *norm(f"{block}/layer_norm_2", "block_{i}/mlp_norm"),
        *dense(f"{block}/mlp_dense_1", "block_{i}/mlp/up"),
        *dense(f"{block}/mlp_dense_2", "block_{i}/mlp/down"),
        *norm(f"{HUB_TOWER}/encoder_layer_norm", "final_norm"),
        Rule(f"{HUB_OUTPUT}/vision_soft_embedding_norm/scale", "soft_embedding_norm/scale"),
        Rule(f"{HUB_OUTPUT}/vision_input_projection/kernel", "input_projection/kernel"),
    ]
    for theirs, ours in PARTS.items():
        source = f"{block}/multi_head_attention/{theirs}"
        table += dense(source, f"block_{{i}}/attention/{ours}")
    return table


def lacking_in_hub(settings: Mapping[str, Any], window: int | None) -> list[str]:
    """Returns the settings of an encoder that keras-hub does not support or applies differently.

    The window is that of the local layers of the text, or None.
    """
    side = settings["image_size"] // settings["patch_size"] // settings["pool_size"]
    epsilon = settings["layer_norm_epsilon"]
    dropout = settings.get("attention_dropout", 0.0)
    problems = {
        f"layer_norm_epsilon={epsilon} of the vision encoder": epsilon != HUB_EPSILON,
        f"attention_dropout={dropout} of the vision encoder": bool(dropout),
        # Its windows cut an image too, whose tokens all see one another here.
        f"images of {side * side} tokens beside sliding_window_size={window}": (
            window is not None and side * side > window
        ),
    }
    return [name for name, there in problems.items() if there]


# === GGUF: llama.cpp's projector "gemma3", as its converter writes it ===

# Names of tensors are those of the gguf package's table for a file of Hugging Face; which of them
# stay in another type than the rest is as in llama.cpp's `convert_hf_to_gguf.py`.
ARCHITECTURE, KIND, ENCODER = "clip", "gemma3", "vision_encoder"
HALF = (0.5, 0.5, 0.5)
IDLE_AT: dict[str, tuple[object, ...]] = {
    **IDLE_ANYWHERE,
    "clip.has_vision_encoder": (True,),
    "clip.has_audio_encoder": (False,),
    "clip.has_llava_projector": (False,),
    "clip.use_silu": (False,),
    "clip.vision.projector_type": (KIND,),
}
# Names of the settings: here, and in the file.
MMPROJ = {
    "image_size": "vision.image_size",
    "patch_size": "vision.patch_size",
    "hidden_dim": "vision.embedding_length",
    "intermediate_dim": "vision.feed_forward_length",
    "num_layers": "vision.block_count",
    "num_heads": "vision.attention.head_count",
}
EPSILON, POOL = "vision.attention.layer_norm_epsilon", "vision.projector.scale_factor"
# llama.cpp's default of the pooling.
USUAL_POOL = 4
# It transposes the matrix of the projector as it runs, and adds positions to patches, in these.
TYPES = {"mm.input_projection": "F16", "v.patch_embd": "F32", "v.position_embd": "F32"}
SECOND = "v.blk.0.ffn_down.weight"


def mmproj_rules(encoder: Gemma3VisionEncoder) -> list[Rule]:
    """Returns the table of a file, for the model that the encoder is in."""
    import gguf

    prefixes = ("vision_tower.vision_model.", "multi_modal_projector.")
    layers = encoder.num_layers
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, layers)
    table = []
    for rule in numbered(below(ENCODER, rules(encoder.vit_config, *prefixes)), layers, 0):
        # The matrix of the projector has no dot there.
        known = rule.source.replace("_weight", ".weight")
        if (name := names.get_name(known, (".weight", ".bias"))) is not None:
            # The projector's norm has its 1 in the file.
            transform = plus_one if "soft_emb_norm" in rule.source else rule.transform
            table.append(replace(rule, source=name, transform=transform))
    return table


def check_mmproj(encoder: Gemma3VisionEncoder, path: str | Path, dtype: str) -> None:
    """Raises `InputError` if `write_mmproj` would fail, or llama.cpp misread the file.

    It takes an MLP whose second matrix reads as many numbers as the tower is wide for one of the
    older files, which call the two matrices by each other's names.
    """
    check_file(path, dtype)
    check_package()
    if (width := encoder.hidden_dim) == encoder.intermediate_dim:
        raise InputError(
            f"llama.cpp's projector {KIND} has no place for intermediate_dim={width}, which is "
            "hidden_dim too; use export_to_transformers"
        )


def write_mmproj(model: keras.Model, path: str | Path, dtype: str) -> Path:
    """Writes the file of a model's vision encoder, atomically; `dtype` is a key of `KINDS`."""
    encoder = model.backbone.vision_encoder
    check_mmproj(encoder, path, dtype)
    tensors = engine.export(encoder, mmproj_rules(encoder))
    converter = getattr(model.preprocessor, "image_converter", None)
    mean, std = (HALF, HALF) if converter is None else (converter.mean, converter.std)
    settings = {ours: getattr(encoder, name) for name, ours in MMPROJ.items()}
    settings |= {EPSILON: float(encoder.layer_norm_epsilon), "use_gelu": True}
    if encoder.pool_size != USUAL_POOL:
        settings[POOL] = encoder.pool_size

    def write(temporary: Path) -> None:
        import gguf

        writer = gguf.GGUFWriter(temporary, ARCHITECTURE)
        writer.add_type(gguf.GGUFType.MMPROJ)
        writer.add_file_type(gguf.LlamaFileType[FILES[KINDS[dtype]]])
        writer.add_clip_has_vision_encoder(True)
        writer.add_clip_projector_type(KIND)
        writer.add_vision_image_mean([float(x) for x in mean])
        writer.add_vision_image_std([float(x) for x in std])
        writer.add_vision_projection_dim(encoder.output_dim)
        add_settings(writer, ARCHITECTURE, settings)
        add_tensors(writer, tensors, KINDS[dtype], TYPES)

    return write_file(path, write)


class Mmproj(NamedTuple):
    """The arguments of the encoder in a file, statistics of images by channel, and tensors."""

    fields: dict[str, Any]
    mean: Sequence[float]
    std: Sequence[float]
    tensors: dict[str, LazyArray]


def open_mmproj(path: Path, width: int, weights: bool) -> Mmproj:
    """Reads the settings of a file beside a text of this width, and opens its tensors."""
    reader = open_gguf(path)
    settings = Settings(path, reader)

    def value(name: str, default: object = None) -> Any:
        return settings(f"{ARCHITECTURE}.{name}", default)

    kinds = settings("general.architecture"), value("projector_type")
    if kinds != (ARCHITECTURE, KIND):
        raise InputError(
            f"{path} holds {kinds[0]!r} with the projector {kinds[1]!r}; the model reads "
            f"{ARCHITECTURE!r} with {KIND!r}"
        )
    if (projection_dim := value("vision.projection_dim")) != width:
        raise InputError(
            f"{path} is of a text {projection_dim} wide, and the model beside it is {width} "
            "wide; give both files of one checkpoint"
        )
    sizes = {ours: value(theirs) for ours, theirs in MMPROJ.items()}
    if missing := [MMPROJ[name] for name, x in sizes.items() if x is None]:
        raise InputError(f"the projector lacks clip.{', clip.'.join(missing)}; convert it again")
    if not value("use_gelu", False):
        raise InputError("the projector has clip.use_gelu=False; the model's activation is GELU")
    fields = {
        **{name: int(x) for name, x in sizes.items()},
        "pool_size": int(value(POOL, USUAL_POOL)),
        "layer_norm_epsilon": round(float(value(EPSILON, 1e-6)), 12),
    }
    mean, std = value("vision.image_mean", HALF), value("vision.image_std", HALF)
    tensors: dict[str, LazyArray] = {}
    if weights:
        settings.warn_of_others((*OWNERS, f"{ARCHITECTURE}."), NOTES, IDLE_AT)
        tensors = {x.name: lazy(path, x) for x in reader.tensors}
    if SECOND in tensors and tensors[SECOND].shape[-1] == fields["hidden_dim"]:
        # Older files swap the names of the MLP's two matrices.
        swaps = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
        tensors = {
            ".".join(swaps.get(part, part) for part in name.split(".")): tensor
            for name, tensor in tensors.items()
        }
    return Mmproj(fields, mean, std, tensors)
