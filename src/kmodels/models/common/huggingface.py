"""Hugging Face directories of decoders: the names of tensors and settings that families share."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras

from kmodels.core.errors import InputError
from kmodels.generation.settings import not_applied
from kmodels.models.common.config import DecoderConfig
from kmodels.models.common.peft import LAYERS
from kmodels.models.common.tokenizer import VOCABULARY
from kmodels.weights import LazyArray, Rule, SourceCheckpoint, read_safetensors, transpose
from kmodels.weights.readers import read_json

log = logging.getLogger("kmodels")

BLOCK = "layers.{i}"
HEAD = "lm_head.weight"
GENERATION = "generation_config.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model")
# Names of the usual norms; a family with more, or with other names, gives its own.
NORMS = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
HEAD_NORMS = {
    "self_attn.q_norm": "attention/query_norm",
    "self_attn.k_norm": "attention/key_norm",
}


def rules(config: DecoderConfig, norms: Mapping[str, str], prefix: str = "model.") -> list[Rule]:
    """Returns the table of a decoder.

    Args:
        config: of the backbone.
        norms: names of a block's norms in transformers to their paths in a block here.
        prefix: of all but the output layer; empty for a bare model, which has none.
    """
    table = [Rule("embed_tokens.weight", "token_embedding/embeddings")]
    for source, target in norms.items():
        table.append(Rule(f"{BLOCK}.{source}.weight", f"block_{{i}}/{target}/scale"))
    block = config.block(0)
    for target, source in LAYERS.items():
        table.append(Rule(f"{BLOCK}.{source}.weight", f"block_{{i}}/{target}/kernel", transpose))
        if block.has_bias(target):
            table.append(Rule(f"{BLOCK}.{source}.bias", f"block_{{i}}/{target}/bias"))
    table.append(Rule("norm.weight", "final_norm/scale"))
    table = [Rule(prefix + rule.source, rule.target, rule.transform) for rule in table]
    if not config.ties_embeddings:
        table.append(Rule(HEAD, "token_embedding/reverse_embeddings"))
    return table


def fields(text: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that every `DecoderConfig` has, of what a config.json says."""
    return {
        "vocabulary_size": text["vocab_size"],
        "num_layers": text["num_hidden_layers"],
        "num_query_heads": text["num_attention_heads"],
        "num_key_value_heads": text["num_key_value_heads"],
        "hidden_dim": text["hidden_size"],
        "intermediate_dim": text["intermediate_size"],
        "head_dim": text["head_dim"],
        "layer_norm_epsilon": text.get("rms_norm_eps", 1e-6),
        "dropout": text.get("attention_dropout") or 0.0,
    }


def rope(
    path: Path, scaling: Mapping[str, Any], given: float | None, default: float
) -> tuple[float, float]:
    """Returns the base of a rotary embedding and what divides the positions.

    Args:
        path: of the directory, for errors.
        scaling: what describes the kind.
        given: the base that stands beside it, or None.
        default: the base where nothing says it.

    Raises:
        InputError: for another kind than "default" and "linear".
    """
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "linear"):
        raise InputError(f"{path}: rope_type is {kind!r}; the model knows default and linear")
    base = float(scaling.get("rope_theta", default if given is None else given))
    return base, float(scaling.get("factor", 1.0)) if kind == "linear" else 1.0


def tokenizer_of(path: Path) -> dict[str, str] | None:
    """Returns the argument of a preprocessor whose tokenizer lies in a directory, or None."""
    whole = any((path / name).is_file() for name in TOKENIZERS)
    parts = all((path / name).is_file() for name in VOCABULARY)
    return {"tokenizer": str(path)} if whole or parts else None


def checkpoint(
    path: Path,
    backbone: dict[str, Any],
    table: Sequence[Rule],
    tensors: Mapping[str, LazyArray],
    left_out: Sequence[str] = (),
) -> SourceCheckpoint:
    """Returns a directory that was understood, with its tokenizer and how it asks to generate.

    Args:
        path: of the directory.
        backbone: fields of the config.
        table: the rules.
        tensors: by name; none where only the architecture is wanted.
        left_out: parts of the directory that the model does not have.
    """
    generation = read_json(path / GENERATION) if (path / GENERATION).is_file() else None
    if tensors and generation and (asked := not_applied(generation)):
        log.warning(
            "%s asks for %s, which generate does not do by itself; "
            'compile(sampler="generation_config") draws so, and lengths go to generate',
            path / GENERATION,
            asked,
        )
    return SourceCheckpoint(
        path=path,
        kind="Hugging Face",
        backbone=backbone,
        task={"generation_config": generation},
        preprocessor=tokenizer_of(path),
        tensors=tensors,
        rules=table,
        left_out=list(left_out),
    )


@dataclass(frozen=True)
class HuggingFaceFormat:
    """Directories of a family, as `Family.formats` wants them.

    Args:
        kinds: `model_type` in the config.json of the family.
        config_class: of the family.
        fields: (path, description) to the fields of the config.
        table: (config, prefix) to the rules.
    """

    kinds: Collection[str]
    config_class: Callable[..., DecoderConfig]
    fields: Callable[[Path, dict[str, Any]], dict[str, Any]]
    table: Callable[[Any, str], Sequence[Rule]]

    def matches(self, path: Path, description: dict[str, Any]) -> bool:
        """Returns whether a directory with this config.json is of this format."""
        return path.is_dir() and description.get("model_type") in self.kinds

    def open_checkpoint(
        self, path: Path, description: dict[str, Any], given: dict[str, Any], weights: bool
    ) -> SourceCheckpoint:
        """Understands a directory.

        Args:
            path: of the directory.
            description: the object in its config.json.
            given: unused; the file says it all.
            weights: False where only the architecture is wanted and no tensors need be there.

        Raises:
            InputError: for settings that the model has no counterpart for.
        """
        found = self.fields(path, description)
        config = self.config_class(**found)
        # Some files hold the embedding table twice if it is the output layer too.
        dropped = (HEAD,) if config.ties_embeddings else ()
        tensors = tensors_of(path, dropped) if weights else {}
        prefix = "" if "embed_tokens.weight" in tensors else "model."
        return checkpoint(path, found, self.table(config, prefix), tensors)


def tensors_of(path: Path, dropped: Sequence[str] = ()) -> dict[str, LazyArray]:
    """Returns the tensors of a directory but `dropped` and the tables of rotary embeddings."""
    return {
        name: tensor
        for name, tensor in read_safetensors(path).items()
        if name not in dropped and not name.endswith("rotary_emb.inv_freq")
    }


def form(model: keras.Model) -> dict[str, Any]:
    """Returns what config.json says of every decoder.

    Args:
        model: a backbone or causal model.
    """
    config = getattr(model, "backbone", model).config
    return {
        "vocab_size": config.vocabulary_size,
        "hidden_size": config.hidden_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_query_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.layer_norm_epsilon,
        "attention_dropout": config.dropout,
        "attention_bias": config.block(0).use_bias,
        "tie_word_embeddings": config.ties_embeddings,
        **_tokens(model),
    }


def _tokens(model: keras.Model) -> dict[str, Any]:
    tokenizer = getattr(getattr(model, "preprocessor", None), "tokenizer", None)
    if tokenizer is None:
        return {}
    return {
        "bos_token_id": tokenizer.start_token_id,
        "eos_token_id": list(tokenizer.stop_token_ids),
        "pad_token_id": tokenizer.pad_token_id,
    }
