"""Decoders of Llama's kind, and their files: blocks are equal, with SiLU and one rotary embedding.

A family gives a config and a `PlainFiles`, which has the names and settings that only its files
have.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import keras
import numpy as np

from kmodels.core.errors import InputError
from kmodels.models.blocks import huggingface
from kmodels.models.blocks.config import BlockConfig, DecoderConfig
from kmodels.models.blocks.gguf import reading, tensors
from kmodels.models.blocks.gguf.writing import (
    GGUFExport,
    GGUFForm,
    settings,
    without_place_in_yarn,
    yarn_settings,
)
from kmodels.models.blocks.rope import Llama3Scaling, Rope, Yarn
from kmodels.text.gguf import BYTES
from kmodels.weights import Rule


class PlainConfig(DecoderConfig):
    """Sizes of a decoder of equal blocks; the base of each family's dataclass.

    Attributes:
        attention_bias: biases in all four projections of the attention.
    """

    attention_bias: bool

    @property
    def rope(self) -> Rope:
        """The rotary position embedding."""
        raise NotImplementedError

    @staticmethod
    def rope_fields(rope: Rope) -> dict[str, Any]:
        """Returns the fields of the config for a rotary position embedding."""
        raise NotImplementedError

    def block(self, index: int) -> BlockConfig:
        """Returns the settings of a block; all blocks are the same."""
        rope = self.rope
        return BlockConfig(
            num_query_heads=self.num_query_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            mlp_dim=self.mlp_dim,
            epsilon=self.layer_norm_epsilon,
            query_scale=self.head_dim**-0.5 * rope.query_scale,
            rope_wavelength=rope.base,
            rope_scaling=rope.divisors(self.head_dim),
            use_bias=self.attention_bias,
            use_output_bias=self.attention_bias,
            dropout=self.dropout,
        )


@dataclass(frozen=True)
class PlainFiles:
    """Hugging Face directories and GGUF files of a family, read and written.

    Args:
        name: name of the model, in errors.
        config_class: config class of the family.
        names: `model_type`, and transformers' classes with the output layer and without it.
        defaults: settings that transformers' configs omit if they equal these.
        form: (config, settings of its rotary embedding in config.json) to these and the others
            that not every decoder has.
        architecture: llama.cpp's name of the model.
        fields: (path, settings of a config.json) to further fields of the config; raises
            `InputError` for settings that are not supported.
        refused: settings of a config.json that must be off.
        ropes: kinds of rotary position embeddings that the config has.
        usual_head_dim: width of the heads if a GGUF file has none; None to divide the width of the
            hidden states by the number of heads.
        adjacent: True if GGUF files have the pairs of channels of queries and keys side by side.
        without_place: fields of the config that GGUF files have no place for.
        idle_at: as in `GGUFFormat`.
    """

    name: str
    config_class: type[PlainConfig]
    names: tuple[str, str, str]
    defaults: Mapping[str, Any]
    form: Callable[[Any, dict[str, Any]], dict[str, Any]]
    architecture: str
    fields: Callable[[Path, dict[str, Any]], dict[str, Any]] = lambda path, text: {}
    refused: Sequence[str] = ()
    ropes: Sequence[str] = ("default", "linear", "yarn")
    usual_head_dim: int | None = None
    adjacent: bool = False
    without_place: Sequence[str] = ()
    idle_at: Mapping[str, Sequence[object]] = field(default_factory=dict)

    # === Hugging Face ===

    def hugging_face(
        self, form: type[huggingface.HuggingFaceFormat] = huggingface.HuggingFaceFormat
    ) -> huggingface.HuggingFaceFormat:
        """Returns the format of the directories, of this class."""
        return form(self.names[:1], self.config_class, self._fields, self.rules)

    def rules(self, config: PlainConfig, prefix: str = "model.") -> list[Rule]:
        """Returns the rules of a directory; `prefix` is empty without the output layer."""
        head_norms = huggingface.HEAD_NORMS if config.block(0).use_query_key_norm else {}
        return huggingface.rules(config, huggingface.NORMS | head_norms, prefix)

    def _fields(self, path: Path, description: dict[str, Any]) -> dict[str, Any]:
        text = {**self.defaults, **description}
        heads, activation = text["num_attention_heads"], text["hidden_act"]
        text["head_dim"] = text.get("head_dim") or text["hidden_size"] // heads
        text["num_key_value_heads"] = text.get("num_key_value_heads") or heads
        problems = {f"an activation {activation!r}": activation != "silu"}
        huggingface.refuse(path, problems | {name: text.get(name) for name in self.refused})
        # As in transformers, the older name takes precedence.
        scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
        base, length = text.get("rope_theta"), text["max_position_embeddings"]
        rope = huggingface.rope(path, scaling, base, 10_000.0, length, self.ropes)
        return {
            **huggingface.fields(text),
            **self.config_class.rope_fields(rope),
            "tie_word_embeddings": bool(text["tie_word_embeddings"]),
            "attention_bias": bool(text.get("attention_bias")),
            **self.fields(path, text),
        }

    def transformers_form(self, model: keras.Model) -> huggingface.TransformersForm:
        """Returns (config.json, {}, rules, {}): there is no image processor and no zero tensor."""
        config = getattr(model, "backbone", model).config
        form = {"hidden_act": "silu", **self.form(config, huggingface.rope_form(*config.rope))}
        return huggingface.transformers_form(model, self.names, form, self.rules)

    # === GGUF ===

    @property
    def gguf(self) -> reading.GGUFFormat:
        """The format of the GGUF files."""
        return reading.GGUFFormat(
            name=self.name,
            architectures=(self.architecture,),
            config_class=self.config_class,
            fields=self._gguf_fields,
            table=self.gguf_rules,
            unused=lambda _: [tensors.ROPE_FACTORS] if "llama3" in self.ropes else [],
            idle_at=self.idle_at,
        )

    @property
    def gguf_export(self) -> GGUFExport:
        """The way of causal models into GGUF files."""
        return GGUFExport(self.gguf, self.gguf_form)

    def gguf_rules(self, config: PlainConfig) -> list[Rule]:
        """Returns the rules of the GGUF file of a config."""
        head_norms = tensors.HEAD_NORMS if config.block(0).use_query_key_norm else {}
        table = tensors.rules(config, tensors.NORMS | head_norms)
        heads = {"attn_q": config.num_query_heads, "attn_k": config.num_key_value_heads}
        changes = {
            f"{tensors.BLOCK}.{name}.weight": tensors.adjacent(number)
            for name, number in heads.items()
            if self.adjacent
        }
        return [replace(rule, transform=changes.get(rule.source, rule.transform)) for rule in table]

    def _gguf_fields(self, file: reading.File) -> dict[str, Any]:
        heads = max(int(file.get("attention.head_count", 1)), 1)
        width = self.usual_head_dim or int(file.get("embedding_length", 0)) // heads
        rope = file.rope()
        if rope.yarn is not None and "yarn" not in self.ropes:
            raise InputError(f"{file.path} scales its rotary embedding by YaRN; the model does not")
        fields = file.fields(width)
        tensor = file.tensors.get(tensors.ROPE_FACTORS)
        if tensor is not None and "llama3" in self.ropes:
            divisors = np.array(tensor.data, "float64")
            length = file.get("rope.scaling.original_context_length")
            rope = rope._replace(llama3=Llama3Scaling.of_divisors(divisors, rope.base, length))
            if rope.llama3 is None or len(divisors) != fields["head_dim"] // 2:
                raise InputError(
                    f"{file.path} has a {tensors.ROPE_FACTORS} that no low_freq_factor and "
                    f"high_freq_factor of {self.name} give; give the Hugging Face directory that "
                    "it was converted from"
                )
        return fields | self.config_class.rope_fields(rope)

    def gguf_form(self, config: PlainConfig) -> GGUFForm:
        """Returns the settings of the GGUF file of a config, and those that it cannot hold."""
        rope, constants = config.rope, {}
        absent: dict[str, object] = {**without_place_in_yarn(rope.yarn)}
        for name in ("attention_bias", *self.without_place):
            absent[name] = getattr(config, name)
        keys = settings(config, config.head_dim, rope.base, rope.scaling)
        keys |= yarn_settings(None if rope.yarn is None else Yarn.of(rope.yarn))
        if (scaling := rope.llama3) is not None:
            # A file has the divisors of the positions instead of the settings that give them.
            length = scaling.original_max_position_embeddings
            divisors = np.array(rope.divisors(config.head_dim), "float32")
            keys["rope.scaling.original_context_length"] = length
            constants[tensors.ROPE_FACTORS] = divisors
            lost = scaling != Llama3Scaling.of_divisors(divisors, rope.base, length)
            absent |= {"this rope_low_freq_factor": lost, "this rope_high_freq_factor": lost}
        return GGUFForm(
            architecture=self.architecture,
            settings=keys,
            vocabulary=BYTES,
            absent=absent,
            constants=constants,
        )
