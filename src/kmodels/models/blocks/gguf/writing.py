"""GGUF files of decoders are written: sizes, weights and vocabulary, as llama.cpp runs them."""

import importlib.util
import logging
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from numbers import Integral
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from kmodels import lora
from kmodels.core.errors import InputError
from kmodels.core.files import local_path
from kmodels.core.remote import write_file
from kmodels.models.blocks.config import DecoderConfig
from kmodels.models.blocks.gguf.quantizing import (
    MIXTURES,
    WEIGHTED,
    choose_types,
    quantize,
    that_divides,
)
from kmodels.models.blocks.gguf.reading import FEED_FORWARD, GROUPS, GGUFFormat
from kmodels.models.blocks.gguf.tensors import OUTPUT, PER_LAYER_TABLE, TABLE
from kmodels.models.blocks.huggingface import tokenizer_in
from kmodels.models.blocks.rope import Yarn
from kmodels.text.gguf import BYTES, describe
from kmodels.text.pieces import ENDS_OF_TURNS
from kmodels.text.settings import with_names
from kmodels.weights import LazyArray, export
from kmodels.weights.gguf import open_gguf, setting

if TYPE_CHECKING:
    import gguf


def differences(wanted: DecoderConfig, read: DecoderConfig) -> list[str]:
    """Returns "name=value" of the settings that differ and that results depend on, as wanted.

    One that differs in some blocks alone names the first of them. Both configs have as many layers.
    """
    texts = [f"{name}={value!r}" for name, value in _lost(_outside(wanted), _outside(read)).items()]
    by_name: dict[str, dict[int, Any]] = {}
    for i in range(wanted.num_layers):
        for name, value in _lost(_block(wanted, i), _block(read, i)).items():
            by_name.setdefault(name, {})[i] = value
    for name, lost in by_name.items():
        first, value = next(iter(lost.items()))
        everywhere = list(lost.values()) == [value] * wanted.num_layers
        texts.append(f"{name}={value!r}" if everywhere else f"{name} of layer {first}={value!r}")
    return texts


def _lost(wanted: dict[str, Any], read: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings that differ as float32, which files store."""
    same = {
        name: np.float32(value) == np.float32(read[name])
        if isinstance(value, float) and isinstance(read[name], float)
        else value == read[name]
        for name, value in wanted.items()
    }
    return {name: value for name, value in wanted.items() if not same[name]}


def _outside(config: DecoderConfig) -> dict[str, Any]:
    per_layer = any(config.block(i).per_layer_dim for i in range(config.num_layers))
    return {
        "vocabulary_size": config.vocabulary_size,
        "hidden_dim": config.hidden_dim,
        "scales_embeddings": config.scales_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "final_logit_soft_cap": config.logit_soft_cap,
        "per_layer_vocabulary": config.per_layer_vocabulary if per_layer else None,
    }


def _block(config: DecoderConfig, index: int) -> dict[str, Any]:
    """Returns the settings of a block, without those of training."""
    block = asdict(config.block(index))
    del block["dropout"]
    # As many channels may turn by two shares.
    block["turned_channels"] = int(block.pop("rope_turned") * block["head_dim"] // 2)
    return block


def add_vocabulary(
    writer: "gguf.GGUFWriter", model: keras.Model, kind: str, template: str | None
) -> None:
    """Adds tokens, the roles of some, and the chat template; or a note that there is no tokenizer.

    The kind is that of `kmodels.text.gguf.describe`.
    """
    tokenizer = tokenizer_in(model)
    if tokenizer is None:
        writer.add_tokenizer_model("none")
        return
    vocabulary = describe(tokenizer.core, model.backbone.config.vocabulary_size, kind)
    writer.add_tokenizer_model(vocabulary.model)
    if vocabulary.pre is not None:
        writer.add_tokenizer_pre(vocabulary.pre)
    if vocabulary.merges:
        writer.add_token_merges(vocabulary.merges)
    writer.add_token_list(vocabulary.texts)
    if vocabulary.scores:
        writer.add_token_scores(vocabulary.scores)
    writer.add_token_types(vocabulary.kinds)
    if vocabulary.space_prefix is not None:
        writer.add_add_space_prefix(vocabulary.space_prefix)
    start = tokenizer.start_token_id
    writer.add_eos_token_id(tokenizer.end_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_add_bos_token(start is not None)
    writer.add_add_eos_token(False)
    if start is None and kind == BYTES:
        # Where a file is silent, llama.cpp calls token 11 the start; published ones name this.
        start = tokenizer.pad_token_id
    if start is not None:
        writer.add_bos_token_id(start)
    if vocabulary.unknown is not None:
        writer.add_unk_token_id(vocabulary.unknown)
    templates = with_names({"chat_template": tokenizer.chat_template}, {})["chat_template"]
    for begin, end in ENDS_OF_TURNS.items():
        if (number := tokenizer.core.token_to_id(end)) is not None:
            writer.add_eot_token_id(number)
            if template is not None and not templates:
                templates = template.replace("<START>", begin).replace("<END>", end)
            break
    if templates:
        writer.add_chat_template(templates)


# The types in which kernels and tables are stored; norms are always F32. `MIXTURES` has those of
# fewer bits, which depend on the tensor.
KINDS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "q8_0": "Q8_0"}
FILES = {"F32": "ALL_F32", "BF16": "MOSTLY_BF16", "F16": "MOSTLY_F16", "Q8_0": "MOSTLY_Q8_0"}
# Parts of the model that another file holds.
BESIDE = ("vision_encoder/",)
Setting = str | bool | int | float | list[int] | list[bool]


def settings(
    config: DecoderConfig, head_dim: int, wavelength: float, scaling: float = 1.0
) -> dict[str, Setting]:
    """Returns the settings of every decoder, in the order of the file, without the architecture.

    Width of the heads, base of the rotary embedding and divisor of the positions are those of the
    global layers if kinds of layers differ.
    """
    blocks = [config.block(i) for i in range(config.num_layers)]
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": float(scaling)}
    return {
        "context_length": config.context_length,
        "embedding_length": config.hidden_dim,
        "block_count": config.num_layers,
        FEED_FORWARD: _one_or_all([block.mlp_dim for block in blocks]),
        "attention.head_count": config.num_query_heads,
        GROUPS: _one_or_all([block.num_key_value_heads for block in blocks]),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
        "attention.layer_norm_rms_epsilon": float(config.layer_norm_epsilon),
        "rope.freq_base": float(wavelength),
        "vocab_size": config.vocabulary_size,
        **(linear if scaling != 1.0 else {}),
    }


def yarn_settings(yarn: Yarn | None) -> dict[str, Setting]:
    """Returns the settings of YaRN, for `settings` to be updated with; none for None."""
    if yarn is None:
        return {}
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(yarn.factor),
        "rope.scaling.original_context_length": int(yarn.original_max_position_embeddings),
        "rope.scaling.yarn_beta_fast": float(yarn.beta_fast),
        "rope.scaling.yarn_beta_slow": float(yarn.beta_slow),
    }


def without_place_in_yarn(yarn: Mapping[str, Any] | None) -> dict[str, bool]:
    """Returns the arguments of `Yarn` that no file can hold, and whether they are given."""
    return {f"{name} of YaRN": name in (yarn or {}) for name in ("attention_factor", "truncate")}


def _one_or_all(values: list[int]) -> int | list[int]:
    """Returns a setting of all layers, as one number if they agree."""
    return values[0] if len(set(values)) == 1 else values


@dataclass(frozen=True)
class GGUFForm:
    """A model as its family says it in a file.

    Args:
        architecture: llama.cpp's name of the model.
        settings: settings by their names without that of the architecture, in order; the type of a
            value is that in the file.
        vocabulary: how the file holds the vocabulary: "llama", "gemma4" or "gpt2", as in
            `kmodels.text.gguf`.
        absent: settings that a file could not tell apart from others, True if they are in force.
        constants: tensors that the model has as settings.
        template: chat template for a tokenizer that has none and the markers of a chat, which
            stand in it as <START> and <END>; None leaves the choice to llama.cpp.
    """

    architecture: str
    settings: Mapping[str, Setting]
    vocabulary: str
    absent: Mapping[str, object] = field(default_factory=dict)
    constants: Mapping[str, np.ndarray] = field(default_factory=dict)
    template: str | None = None


@dataclass(frozen=True)
class GGUFExport:
    """The way of a family's causal models into GGUF files.

    Args:
        format: format that reads the file.
        form: a config to its form.
    """

    format: GGUFFormat
    form: Callable[[Any], GGUFForm]

    def write(
        self, model: keras.Model, path: str | Path, dtype: str, imatrix: str | Path | None = None
    ) -> Path:
        """Writes a causal model atomically, reads its settings again, and returns the path.

        The dtype is a key of `KINDS` or `MIXTURES`; `imatrix` is the path of llama.cpp's importance
        matrix of the model, for the latter.
        """
        check_file(path, dtype)
        check_imatrix(dtype, imatrix)
        config, form = self.form_of(model)
        check_package()
        if lora.describe(model):
            raise InputError("a GGUF file has no place for LoRA adapters; call merge_lora first")
        tensors = export(model, self.format.table(config), without=BESIDE)
        for name, values in form.constants.items():
            tensors[name] = LazyArray(values.shape, values.dtype, lambda values=values: values)

        def write(temporary: Path) -> None:
            _write(temporary, model, form, tensors, dtype, imatrix)
            # Reading has llama.cpp's defaults for settings that a file lacks.
            fields = self.format.open_checkpoint(temporary, {}, {}, weights=False).backbone
            if lost := differences(config, self.format.config_class(**fields)):
                raise InputError(
                    f"llama.cpp's {form.architecture} has no place for {', '.join(lost)}"
                )

        return write_file(path, write)

    def form_of(self, model: keras.Model) -> tuple[Any, GGUFForm]:
        """Returns the config of a model's decoder, and its form."""
        config = getattr(model.backbone.config, "decoder", model.backbone.config)
        form = self.form(config)
        if absent := [name for name, there in form.absent.items() if there]:
            raise InputError(
                f"a GGUF file of {self.format.name} has no place for {', '.join(absent)}; "
                "use export_to_transformers"
            )
        return config, form


def check_file(path: str | Path, dtype: str) -> None:
    """Raises `InputError` for a name or a dtype that no file has."""
    if Path(path).suffix != ".gguf":
        raise InputError(f"{path} must be a GGUF file; give a name that ends in .gguf")
    if dtype not in KINDS and dtype not in MIXTURES:
        known = ", ".join((*KINDS, *MIXTURES))
        raise InputError(f"dtype is {dtype!r}; GGUF files are written as {known}")


def check_imatrix(dtype: str, imatrix: str | Path | None) -> None:
    """Raises `InputError` for an importance matrix that the types of a file do not use."""
    if imatrix is not None and dtype not in MIXTURES:
        raise InputError(
            f"imatrix is {imatrix}, which {dtype} does not use; give one of {', '.join(MIXTURES)} "
            "as dtype, or leave imatrix out"
        )


def projector_dtype(dtype: str) -> str:
    """Returns the dtype of a vision encoder beside a text; mixtures are for decoders."""
    return dtype if dtype in KINDS else "float16"


def check_package() -> None:
    """Raises `InputError` without the gguf package."""
    if importlib.util.find_spec("gguf") is None:
        raise InputError("writing GGUF needs the gguf package: pip install 'kmodels[gguf]'")


def _write(
    path: Path,
    model: keras.Model,
    form: GGUFForm,
    tensors: Mapping[str, LazyArray],
    dtype: str,
    imatrix: str | Path | None,
) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, form.architecture)
    add_settings(writer, form.architecture, form.settings)
    add_vocabulary(writer, model, form.vocabulary, form.template)
    if dtype in KINDS:
        writer.add_file_type(gguf.LlamaFileType[FILES[KINDS[dtype]]])
        add_tensors(writer, tensors, KINDS[dtype])
        return
    file = MIXTURES[dtype]
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{file}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    types = choose_types(shapes, file, form.architecture, imatrix is not None)
    importance = {}
    if imatrix is not None:
        matrix = local_path(imatrix)
        importance = importance_of(matrix, shapes, types)
        writer.add_string("quantize.imatrix.file", matrix.name)
        writer.add_uint32("quantize.imatrix.entries_count", len(importance))
    write_tensors(writer, tensors, types, importance)


def add_tensors(
    writer: "gguf.GGUFWriter",
    tensors: Mapping[str, LazyArray],
    kind: str,
    types: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Adds tensors of one type, a value of `KINDS`, writes the file and closes it.

    `types` maps parts of names to the type of such tensors, if they are no vectors.
    """
    kinds = {}
    for name, tensor in tensors.items():
        own = next((own for part, own in types.items() if part in name), kind)
        kinds[name] = that_divides(own, tensor.shape[-1]) if len(tensor.shape) > 1 else "F32"
    write_tensors(writer, tensors, kinds)


def write_tensors(
    writer: "gguf.GGUFWriter",
    tensors: Mapping[str, LazyArray],
    types: Mapping[str, str],
    importance: Mapping[str, np.ndarray] = MappingProxyType({}),
) -> None:
    """Adds tensors, writes the file and closes it; for the importance see `importance_of`."""
    import gguf

    for name, tensor in tensors.items():
        kind = gguf.GGMLQuantizationType[types[name]]
        # The writer wants the size in bytes before it gets the values.
        block, size = gguf.GGML_QUANT_SIZES[kind]
        count = int(np.prod(tensor.shape)) // block * size
        writer.add_tensor_info(name, tensor.shape, np.dtype("float32"), count, raw_dtype=kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, tensor in tensors.items():
            values = np.ascontiguousarray(tensor.read(), dtype="float32")
            writer.write_tensor_data(quantize(values, types[name], name, importance.get(name)))
    finally:
        writer.close()


def add_settings(
    writer: "gguf.GGUFWriter", architecture: str, settings: Mapping[str, Setting]
) -> None:
    """Adds settings, each as the type of its value; `architecture` stands in front of each name."""
    for name, value in settings.items():
        name = f"{architecture}.{name}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, Integral):
            writer.add_uint32(name, int(value))
        else:
            writer.add_float32(name, float(value))


# === Importance matrices of llama.cpp: how much an error in each column of a tensor counts ===

# An importance matrix is a GGUF file, or before 2025 a .dat file; it has the sums of squares of the
# inputs of each tensor.
log = logging.getLogger("kmodels")
SUMS, COUNTS = ".in_sum2", ".counts"
# Most names in a warning.
SHOWN = 8


def _read_imatrix(path: Path) -> dict[str, np.ndarray]:
    """Returns the importance of the columns of each tensor, (n,) float32 for all its experts."""
    try:
        with path.open("rb") as file:
            is_gguf = file.read(4) == b"GGUF"
        matrix = _from_gguf(path) if is_gguf else _from_dat(path.read_bytes())
    except InputError:
        raise
    except (OSError, ValueError, struct.error) as error:
        raise InputError(
            f"{path} is not an importance matrix ({error}); give a file that llama-imatrix wrote"
        ) from None
    for name, values in matrix.items():
        if not (np.isfinite(values).all() and (values >= 0).all()):
            raise InputError(
                f"{path} holds NaN, infinite or negative values of {name}; compute it again"
            )
    return matrix


def _from_gguf(path: Path) -> dict[str, np.ndarray]:
    reader = open_gguf(path)
    if (kind := setting(reader, "general.type")) != "imatrix":
        raise ValueError(f"its general.type is {kind!r}")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    names = [name.removesuffix(SUMS) for name in tensors if name.endswith(SUMS)]
    others = [name for name in tensors if not name.endswith((SUMS, COUNTS))]
    if others:
        log.warning("%s: %s are not used", path, _listed(others))
    matrix = {}
    for name in names:
        parts = [tensors.get(f"{name}{end}") for end in (SUMS, COUNTS)]
        if any(part is None or part.tensor_type.name != "F32" for part in parts):
            raise ValueError(f"{name} has no float32 {SUMS} and {COUNTS}")
        sums, counts = [np.array(part.data, "float32") for part in parts]  # type: ignore[union-attr]
        if counts.size == 0 or sums.size % counts.size:
            raise ValueError(f"{name} has {sums.size} sums and {counts.size} counts")
        counts = np.rint(counts.reshape(-1, 1))
        with np.errstate(all="ignore"):
            means = sums.reshape(len(counts), -1) / counts
        # An expert without a token says nothing about its columns.
        matrix[name] = np.where(counts > 0, means, np.float32(1)).reshape(-1)
    if not matrix:
        raise ValueError(f"it holds no tensor that ends in {SUMS}")
    return matrix


def _from_dat(data: bytes) -> dict[str, np.ndarray]:
    (count,) = struct.unpack_from("<i", data)
    at, matrix = 4, {}
    if count < 1:
        raise ValueError(f"it announces {count} tensors")
    for _ in range(count):
        (size,) = struct.unpack_from("<i", data, at)
        if not 0 < size < 2**12 or at + size > len(data):
            raise ValueError(f"it has a name of {size} bytes")
        name = data[at + 4 : at + 4 + size].decode()
        at += 4 + size
        calls, number = struct.unpack_from("<ii", data, at)
        at += 8
        if number < 1 or at + 4 * number > len(data):
            raise ValueError(f"it ends inside {name}")
        values = np.frombuffer(data, "<f4", number, at).astype("float32")
        matrix[name] = values / np.float32(calls) if calls > 0 else values
        at += 4 * number
    return matrix


def importance_of(
    path: Path, shapes: Mapping[str, tuple[int, ...]], types: Mapping[str, str]
) -> dict[str, np.ndarray]:
    """Returns the importance (n,) of the columns of the tensors whose types use it, by name.

    It is float32, (E, n) for a tensor of experts.
    """
    matrix = _read_imatrix(path)
    used = {}
    for name in [name for name, kind in types.items() if kind in WEIGHTED and name in matrix]:
        shape = (*shapes[name][:-2], shapes[name][-1])
        if matrix[name].size != math.prod(shape):
            raise InputError(
                f"{path} holds {matrix[name].size} values of {name}, which has {math.prod(shape)}; "
                "give the importance matrix of this model"
            )
        used[name] = matrix[name].reshape(shape)
    if not used:
        raise InputError(
            f"{path} holds none of the quantized tensors, but {_listed(list(matrix))}; give the "
            "importance matrix of this model"
        )
    # llama-imatrix leaves out the output layer.
    own = {name for name, kind in types.items() if kind in WEIGHTED}
    if lost := sorted(own - {*used, TABLE, OUTPUT, PER_LAYER_TABLE}):
        log.warning("%s holds no importance of %s; they are quantized without", path, _listed(lost))
    if others := sorted(matrix.keys() - shapes.keys()):
        log.warning("%s: %s are no tensors of the model and are not used", path, _listed(others))
    return used


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
