"""GGUF files of decoders are read; quantized tensors become floats, or kernels as they are."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kmodels.core.errors import InputError
from kmodels.layers.quantized import Quantization
from kmodels.models.blocks.config import DecoderConfig
from kmodels.models.blocks.gguf.tensors import OUTPUT, ROPE_FACTORS, STILL, TABLE, unused
from kmodels.models.blocks.huggingface import warn_of_sampling
from kmodels.models.blocks.rope import Rope
from kmodels.weights import LazyArray, Rule, SourceCheckpoint
from kmodels.weights.gguf import Settings, open_gguf
from kmodels.weights.packed import PackedArray
from kmodels.weights.rules import bind_sources

if TYPE_CHECKING:
    import gguf

KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
# Settings of a block that some models have another of in each.
FEED_FORWARD, GROUPS = "feed_forward_length", "attention.head_count_kv"
EPSILON = "attention.layer_norm_rms_epsilon"

MODEL = "model"
SCALINGS = ("none", "linear", "yarn")
# Settings of YaRN, and those that are read at one value alone.
YARN = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
IDLE_IN_YARN = {
    **{"attn_factor": 1.0, "yarn_attn_factor": 1.0},
    **{"yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0},
}

# Notes of converters on a model and its origins, and settings that the gguf package reads itself.
NOTES = {
    f"general.{name}"
    for name in (
        *("alignment", "author", "basename", "dataset.count", "description", "doi", "file_type"),
        *("finetune", "languages", "license", "license.link", "license.name", "name"),
        *("organization", "parameter_count", "quantization_version", "quantized_by", "repo_url"),
        *("size_label", "source.doi", "source.huggingface.repository", "source.repo_url"),
        *("source.url", "source.uuid", "tags", "type", "url", "uuid", "version"),
        *("base_model.count", "sampling.mirostat_eta", "sampling.mirostat_tau"),
        *("sampling.penalty_last_n", "sampling.xtc_threshold"),
        *(
            f"{origin}.{{id}}.{name}"
            for origin in ("base_model", "dataset")
            for name in (
                *("name", "author", "version", "organization", "description", "url", "doi"),
                *("uuid", "repo_url"),
            )
        ),
    )
}
# Settings of sampling: in the file, and in a generation_config.json, whose defaults apply.
SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
# Settings of an architecture that change nothing if they are not read: lengths, and YaRN's without
# YaRN.
IDLE = {
    *("vocab_size", "rope.scaling.original_context_length"),
    *("rope.scaling.finetuned", *(f"rope.scaling.{name}" for name in (*YARN.values(),))),
    *(f"rope.scaling.{name}" for name in IDLE_IN_YARN if name.startswith("yarn_")),
}
# Settings that change nothing at some values alone: of an architecture, and of any.
IDLE_AT: dict[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "embedding_scale": (1.0,),
    "expert_count": (0,),
    "expert_feed_forward_length": (0,),
    "expert_shared_count": (0,),
    "expert_used_count": (0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (1.0,),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "residual_scale": (1.0,),
    "rope.scaling.alpha": (0.0,),
}
IDLE_ANYWHERE: dict[str, tuple[object, ...]] = {
    "general.sampling.mirostat": (0,),
    "general.sampling.penalty_repeat": (1.0,),
    "general.sampling.xtc_probability": (0.0,),
    "split.count": (0, 1),
    "split.no": (0,),
}
# Other owners of settings that llama.cpp reads; that of the vocabulary reads its own.
OWNERS = ("general.", "split.", "adapter.", "imatrix.", "diffusion.", "xielu.")


@dataclass(frozen=True)
class File:
    """A file that was opened.

    Args:
        path: path of the file.
        architecture: as it names itself.
        tensors: tensors of the gguf package, by name.
        value: reads a setting by its whole name, with a default.
    """

    path: Path
    architecture: str
    tensors: Mapping[str, Any]
    value: Settings

    def get(self, name: str, default: object = None) -> Any:
        """Returns a setting of the architecture."""
        return self.value(f"{self.architecture}.{name}", default)

    def need(self, *wanted: str) -> None:
        """Raises `InputError` for a file that lacks a setting of the architecture."""
        if missing := [name for name in wanted if self.get(name) is None]:
            names = ", ".join(f"{self.architecture}.{name}" for name in missing)
            raise InputError(f"{self.path} lacks {names}")

    def by_layer(self, name: str, layers: int, default: object = None) -> list[int]:
        """Returns a setting of each layer; a file may have one for all."""
        values = self.get(name, default)
        values = values if isinstance(values, list) else [values] * layers
        if len(values) != layers:
            raise InputError(
                f"{self.path} says {self.architecture}.{name} of {len(values)} layers and has "
                f"{layers}; copy it again"
            )
        return [int(value) for value in values]

    def fields(self, head_dim: int, varying: Collection[str] = ()) -> dict[str, Any]:
        """Returns the fields of every `DecoderConfig`; `head_dim` counts if the file has none.

        Settings in `varying` may be another in each layer, of which this returns the first.
        """
        get = self.get
        self.need("block_count", "embedding_length", FEED_FORWARD, "attention.head_count", EPSILON)
        heads, layers = int(get("attention.head_count")), int(get("block_count"))
        if not 0 <= layers <= len(self.tensors):
            raise InputError(
                f"{self.path} says {self.architecture}.block_count is {layers} and has "
                f"{len(self.tensors)} tensors; copy it again"
            )
        width = int(get("attention.key_length", head_dim))
        for name in ("attention.value_length", "rope.dimension_count"):
            if int(get(name, width)) != width:
                raise InputError(
                    f"{self.path} has {self.architecture}.{name}={get(name)}, and its heads are "
                    f"{width} wide; the model supports {width}"
                )
        widths, groups = self.by_layer(FEED_FORWARD, layers), self.by_layer(GROUPS, layers, heads)
        for name, values in ((FEED_FORWARD, widths), (GROUPS, groups)):
            if name not in varying and len(set(values)) > 1:
                raise InputError(
                    f"{self.path} has another {self.architecture}.{name} in some layers; the model "
                    "has one for all"
                )
        return {
            "vocabulary_size": int(self.tensors[TABLE].shape[1]),
            "num_layers": layers,
            "num_query_heads": heads,
            "num_key_value_heads": next(iter(groups), heads),
            "hidden_dim": int(get("embedding_length")),
            "intermediate_dim": next(iter(widths), 0),
            "head_dim": width,
            "layer_norm_epsilon": round(float(get(EPSILON)), 12),
            "tie_word_embeddings": OUTPUT not in self.tensors,
            "max_sequence_length": int(get("context_length", 0)) or None,
        }

    def rope(self) -> Rope:
        """Returns the rotary position embedding; a file without a kind means linear scaling."""
        base = float(self.get("rope.freq_base", 10_000.0))  # as in llama.cpp
        kind = self.get("rope.scaling.type", "linear")
        factor = float(self.get("rope.scaling.factor", self.get("rope.scale_linear", 0.0))) or 1.0
        if kind not in SCALINGS:
            raise InputError(
                f"{self.path} scales its rotary embedding by {kind!r}; the model supports "
                f"{', '.join(SCALINGS)}"
            )
        grown = self.get("rope.scaling.attn_factor", 1.0)
        if kind != "yarn" and grown != 1.0:
            raise InputError(f"{self.path}: rope.scaling.attn_factor is {grown}; only 1.0 is read")
        if kind != "yarn":
            return Rope(base, factor if kind == "linear" else 1.0, None)
        length = self.get("rope.scaling.original_context_length", self.get("context_length"))
        settings = {"factor": factor, "original_max_position_embeddings": length}
        for ours, theirs in YARN.items():
            if (value := self.get(f"rope.scaling.{theirs}")) is not None:
                settings[ours] = round(float(value), 6)
        for name, usual in IDLE_IN_YARN.items():
            if (value := self.get(f"rope.scaling.{name}", usual)) != usual:
                raise InputError(
                    f"{self.path}: rope.scaling.{name} is {value}; only {usual} is read"
                )
        return Rope(base, 1.0, settings)

    def sampling(self) -> dict[str, Any] | None:
        """Returns the sampling that the file proposes, as a generation_config.json says it."""
        names = {name: self.value(f"general.sampling.{name}") for name in SAMPLING}
        settings = {SAMPLING[name]: value for name, value in names.items() if value is not None}
        if not settings:
            return None
        settings = {name: round(value, 6) for name, value in settings.items()}
        return {"do_sample": settings.get("temperature") != 0.0, **settings}

    def warn_of_others(self, idle_at: Mapping[str, Collection[object]]) -> None:
        """Logs a warning with the settings that were not read, see `Settings.warn_of_others`."""
        own = {f"{self.architecture}.{name}" for name in IDLE}
        at = {f"{self.architecture}.{name}": x for name, x in (IDLE_AT | dict(idle_at)).items()}
        owners = (*OWNERS, f"{self.architecture}.")
        self.value.warn_of_others(owners, NOTES | own, {**IDLE_ANYWHERE, **at})

    def turned(self, head_dim: int) -> float:
        """Returns the share of the channels that turn, in heads of this width; a tensor has it."""
        tensor = self.tensors.get(ROPE_FACTORS)
        values = [] if tensor is None else [float(value) for value in tensor.data]
        turned = values.count(1.0)
        still = all(value >= 0.99 * STILL for value in values[turned:])
        if len(values) != head_dim // 2 or not still:
            raise InputError(
                f"{self.path} has no {ROPE_FACTORS} of {head_dim // 2} numbers that are 1 and then "
                f"{STILL:g}; convert it again with llama.cpp's converter"
            )
        share = 2 * turned / head_dim
        # Rounded down, a share can lose a pair when it is multiplied out again.
        return share if int(share * head_dim // 2) == turned else math.nextafter(share, 1.0)


@dataclass(frozen=True)
class GGUFFormat:
    """GGUF files of a family, as `Family.formats` wants them.

    Args:
        name: name of the model, in errors.
        architectures: as the family's files name themselves.
        config_class: config class of the family.
        fields: a file to the fields of the config.
        table: a config to the rules.
        unused: a config to the tensors that a file may hold and the model does not need.
        idle_at: settings of the architecture that change nothing at some values, besides `IDLE_AT`.
    """

    name: str
    architectures: Collection[str]
    config_class: Callable[..., DecoderConfig]
    fields: Callable[[File], dict[str, Any]]
    table: Callable[[Any], Sequence[Rule]]
    unused: Callable[[Any], Collection[str]] = unused
    idle_at: Mapping[str, Collection[object]] = field(default_factory=dict)

    def matches(self, path: Path, description: dict[str, Any]) -> bool:
        """Returns True for a GGUF file."""
        return path.suffix == ".gguf"

    def open_checkpoint(
        self, path: Path, description: dict[str, Any], overrides: dict[str, Any], weights: bool
    ) -> SourceCheckpoint:
        """Reads the settings and opens the tensors of a file."""
        file = open_file(path, self.architectures)
        try:
            backbone = self.fields(file)
        except (IndexError, TypeError, ValueError, OverflowError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"{path} has settings of the wrong kind: {error}; copy it again"
            ) from None
        config = self.config_class(**backbone)
        table, left = self.table(config), self.unused(config)
        # llama.cpp reads biases of queries, keys and values for several models, and none of the
        # output projection, which a model here may have beside the others.
        biases = sorted(name for name in file.tensors if name.endswith(".bias"))
        bound = bind_sources(table, biases)
        if unread := [name for name, rule in bound.items() if rule is None]:
            raise InputError(
                f"{path} has biases ({unread[0]}, ...), and a GGUF file of {self.name} has none; "
                "give the Hugging Face directory that it was converted from"
            )
        stored = [(name, t) for name, t in file.tensors.items() if weights and name not in left]
        sampling = file.sampling()
        if weights:
            file.warn_of_others(self.idle_at)
            warn_of_sampling(path, sampling)
        has_tokenizer = file.value("tokenizer.ggml.tokens") is not None
        return SourceCheckpoint(
            path=path,
            kind="GGUF",
            backbone=backbone,
            task={} if sampling is None else {"generation_config": sampling},
            preprocessor={"tokenizer": str(path)} if has_tokenizer else None,
            tensors={name: lazy(path, tensor) for name, tensor in stored},
            rules=table,
        )


def open_file(path: Path, architectures: Collection[str]) -> File:
    """Opens a file of one of some architectures."""
    reader = open_gguf(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    value = Settings(path, reader)
    if (count := value("split.count", 1)) > 1:
        raise InputError(
            f"{path} is one of the {count} files of a model; make one of them with llama.cpp's "
            "llama-gguf-split --merge"
        )
    if (kind := value("general.type", MODEL)) != MODEL:
        raise InputError(f"{path} holds {kind!r}, and the model reads {MODEL!r}; give its file")
    architecture = value("general.architecture")
    if architecture not in architectures or TABLE not in tensors:
        raise InputError(
            f"{path} holds {architecture!r}; the model reads {', '.join(architectures)}"
        )
    return File(path, architecture, tensors, value)


def lazy(path: Path, tensor: "gguf.ReaderTensor") -> LazyArray:
    """Returns a tensor of a file as floats."""
    if tensor.tensor_type.name not in KINDS:
        raise InputError(
            f"{path}: {tensor.name} is stored as {tensor.tensor_type.name}; choose a file with "
            f"{', '.join(KINDS)}"
        )
    shape = tuple(int(size) for size in reversed(tensor.shape))

    def read() -> np.ndarray:
        import gguf

        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        return np.asarray(values, "float32").reshape(shape)

    kind = tensor.tensor_type.name.lower()
    if kind not in UNPACKED or len(shape) != 2:
        return LazyArray(shape, np.dtype("float32"), read)

    def parts() -> dict[str, LazyArray]:
        return {
            name: LazyArray(size, np.dtype(kind_of_part), lambda name=name: unpacked()[name])
            for name, (size, kind_of_part) in Quantization(kind).shapes(*shape[::-1]).items()
        }

    def unpacked() -> dict[str, np.ndarray]:
        data = np.asarray(tensor.data).view("uint8").reshape(shape[0], -1)
        return dict(zip(Quantization(kind).shapes(*shape[::-1]), UNPACKED[kind](data), strict=True))

    return PackedArray(
        shape, np.dtype("float32"), read, quantization=kind, parts=parts, is_kept=False
    )


def _blocks(data: np.ndarray, *sizes: int) -> list[np.ndarray]:
    """Returns the parts of all blocks of rows (out, bytes), each (out, blocks, size)."""
    blocks = data.reshape(len(data), -1, sum(sizes))
    return np.split(blocks, np.cumsum(sizes)[:-1], axis=-1)


def _float16(part: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(part).view("<f2")[..., 0]


def _turned(values: np.ndarray) -> np.ndarray:
    """(out, ...) -> (rows, out)."""
    return np.ascontiguousarray(values.reshape(len(values), -1).T)


def _packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Packs codes (out, in) of few bits into bytes (rows, out), the first in the upper bits."""
    codes = codes.reshape(len(codes), -1, 8 // bits)
    shifts = np.arange(8 - bits, -1, -bits, dtype="uint8")
    return _turned(np.bitwise_or.reduce(codes << shifts, axis=-1))


def _q8_0(data: np.ndarray) -> Sequence[np.ndarray]:
    scale, numbers = _blocks(data, 2, 32)
    return _turned(numbers.view("int8")), _turned(_float16(scale))


def _q4_0(data: np.ndarray) -> Sequence[np.ndarray]:
    scale, both = _blocks(data, 2, 16)
    codes = np.concatenate([both & 15, both >> 4], axis=-1)
    return _packed(codes.reshape(len(data), -1), 4), _turned(_float16(scale))


def _q4_k(data: np.ndarray) -> Sequence[np.ndarray]:
    own_scale, own_least, six, both = _blocks(data, 2, 2, 12, 128)
    # Eight scales and eight minima of 6 bits: of the last four the upper two bits lie with the
    # first four.
    first, second, mixed = np.split(six, 3, axis=-1)
    scale = np.concatenate([first & 63, (mixed & 15) | (first >> 6 << 4)], axis=-1)
    least = np.concatenate([second & 63, (mixed >> 4) | (second >> 6 << 4)], axis=-1)
    both = both.reshape(*both.shape[:-1], 4, 1, 32)
    codes = np.concatenate([both & 15, both >> 4], axis=-2).reshape(len(data), -1)
    owns = (_turned(_float16(part)) for part in (own_scale, own_least))
    return _packed(codes, 4), _turned(scale), _turned(least), *owns


def _q6_k(data: np.ndarray) -> Sequence[np.ndarray]:
    low, high, scale, own = _blocks(data, 128, 64, 16, 2)
    low = low.reshape(*low.shape[:-1], 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=-2).reshape(len(data), -1)
    shifts = np.arange(0, 8, 2, dtype="uint8")[:, None]
    high = high.reshape(*high.shape[:-1], 2, 1, 32) >> shifts & 3
    high = high.reshape(len(data), -1)
    numbers = _packed(low, 4), _turned(scale.view("int8")), _packed(high, 2)
    return *numbers, _turned(_float16(own))


# The variables of `Quantization.shapes` from rows of bytes (out, bytes), by type.
UNPACKED: dict[str, Callable[[np.ndarray], Sequence[np.ndarray]]] = {
    **{"q8_0": _q8_0, "q4_0": _q4_0, "q4_k": _q4_k, "q6_k": _q6_k}
}
