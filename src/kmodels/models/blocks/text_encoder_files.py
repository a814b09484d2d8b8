"""Hugging Face directories of text towers: alone, projected, or with a vision tower.

The names are those that CLIP and SigLIP share; a family adds the others in its table.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import keras

from kmodels.models.blocks import encoder_rules, huggingface
from kmodels.models.blocks.directories import EncoderDirectory
from kmodels.models.blocks.encoder_config import GELUS, TextEncoderConfig
from kmodels.models.blocks.huggingface import TransformersForm
from kmodels.weights import Rule, SourceCheckpoint

PREFIX, PROJECTION = "text_model.", "text_projection"
# The numbers of the positions, a constant in older files.
OLD = "embeddings.position_ids"
EMBEDDINGS = {
    "token_embedding": "embeddings.token_embedding",
    "position_embedding": "embeddings.position_embedding",
}
FINAL_NORM = {"final_layer_norm": "final_norm"}
# Fields of every `TextEncoderConfig`, and their names in config.json.
FIELDS = {
    "vocabulary_size": "vocab_size",
    "embedding_dim": "hidden_size",
    "hidden_dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_dim": "intermediate_size",
    "max_sequence_length": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "attention_dropout": "attention_dropout",
}


class Setting(NamedTuple):
    """A setting whose value a config.json writes in another way than a config here."""

    name: str
    read: Callable[[Path, Any], Any]
    write: Callable[[Any], Any]


def _read_activation(path: Path, activation: str) -> str:
    form = encoder_rules.approximate_gelu(path, activation)
    return next(name for name, x in GELUS.items() if x == form)


ACTIVATION = Setting(
    "hidden_act", _read_activation, lambda name: encoder_rules.HIDDEN_ACTS[GELUS[name]]
)


@dataclass(frozen=True)
class TextTowerFormat(EncoderDirectory):
    """Directories of a family of text towers, as `Family.formats` wants them.

    Args:
        kinds: `model_type` of the tower alone, as it is written, and of models with both towers.
        architectures: architectures of the bare tower, and of the tower with a projection if there
            is one.
        defaults: settings that transformers' configs omit if they equal these.
        others: how tensors begin that are not the tower's in a model with both.
        settings: fields of the family's config that other text encoders lack.
        layers: linear layers of the tower after its blocks, theirs to ours.
    """

    kinds: Sequence[str]
    architectures: Sequence[str]
    defaults: Mapping[str, Any]
    others: tuple[str, ...]
    settings: Mapping[str, Setting] = field(default_factory=dict)
    layers: Mapping[str, str] = field(default_factory=dict)

    def tower_rules(self, prefix: str) -> list[Rule]:
        """Returns the table of the tower alone."""
        table = [
            *(Rule(f"{x}.weight", f"{ours}/embeddings") for ours, x in EMBEDDINGS.items()),
            *encoder_rules.blocks(),
            *encoder_rules.norms(FINAL_NORM),
            *encoder_rules.dense(self.layers),
        ]
        return encoder_rules.prefixed(prefix, table)

    def rules(self, prefix: str = "") -> list[Rule]:
        """Returns the table; `prefix` is empty in a bare model."""
        return [*self.tower_rules(prefix), *encoder_rules.dense({PROJECTION: PROJECTION})[:1]]

    @property
    def projects(self) -> bool:
        """Whether there are towers with a projection, which a task of the family has."""
        return len(self.architectures) > 1

    def fields(self, path: Path, description: dict[str, Any]) -> dict[str, Any]:
        """Returns the config of a config.json, of the tower alone or of both."""
        text, _ = self._text(description)
        fields = {ours: text[theirs] for ours, theirs in FIELDS.items()}
        return fields | {ours: x.read(path, text[x.name]) for ours, x in self._settings.items()}

    def open_checkpoint(
        self, path: Path, description: dict[str, Any], overrides: dict[str, Any], weights: bool
    ) -> SourceCheckpoint:
        """Reads config and tokenizer of a directory, and opens its tensors."""
        _, projection = self._text(description)
        tensors = self.tensors(path, description, weights)
        prefix = encoder_rules.prefix_of(tensors, PREFIX)
        if weights:
            matrix = tensors.get(f"{PROJECTION}.weight")
            projection = None if matrix is None else matrix.shape[0]
        scale = description.get("logit_scale_init_value")
        if self.projects and "logit_scale" in tensors:
            scale = float(tensors["logit_scale"].read())
        left = (*self.others, prefix + OLD)
        return SourceCheckpoint(
            path=path,
            kind="Hugging Face",
            backbone=self.fields(path, description),
            task={"projection_dim": projection, "logit_scale": scale} if self.projects else {},
            preprocessor=huggingface.tokenizer_of(path),
            tensors={name: x for name, x in tensors.items() if not name.startswith(left)},
            rules=self.rules(prefix),
        )

    @property
    def _settings(self) -> dict[str, Setting]:
        return {"intermediate_activation": ACTIVATION, **self.settings}

    def _text(self, description: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
        """Returns the settings of the tower in a config.json, and the width of its projection."""
        defaults = dict(self.defaults)
        if description["model_type"].endswith("_text_model"):
            text = defaults | _given(description)
            projects = set(self.architectures[1:]) & set(description.get("architectures") or ())
            return text, text["projection_dim"] if projects else None
        settings = description.get("text_config_dict") or description.get("text_config") or {}
        width = description.get("projection_dim", defaults.get("projection_dim"))
        return defaults | _given(settings), width

    def transformers_form(self, model: keras.Model) -> TransformersForm:
        """Returns config.json, nothing for images, the table, and no tensors of zeros."""
        config = getattr(model, "backbone", model).config
        projection = getattr(model, "settings", {}).get("projection_dim")
        form: dict[str, Any] = {
            "architectures": [self.architectures[1 if projection else 0]],
            "model_type": self.kinds[0],
            **self.form(config),
            **huggingface.token_ids(model),
            **({"projection_dim": projection} if projection else {}),
        }
        return form, {}, self.rules(PREFIX if projection else ""), {}

    def form(self, config: TextEncoderConfig) -> dict[str, Any]:
        """Returns the settings of config.json for the sizes of a tower."""
        return {
            **{theirs: getattr(config, ours) for ours, theirs in FIELDS.items()},
            **{x.name: x.write(getattr(config, ours)) for ours, x in self._settings.items()},
        }


def peft_names(model: keras.Model) -> Sequence[Mapping[str, str]]:
    """See `Backbone.peft_names`."""
    names = encoder_rules.names() | {"token_embedding": EMBEDDINGS["token_embedding"]}
    projects = getattr(model, "settings", {}).get("projection_dim")
    head = {PROJECTION: PROJECTION} if projects else {}
    prefixes = (PREFIX, "") if projects else ("", PREFIX)
    return [{ours: start + x for ours, x in names.items()} | head for start in prefixes]


def _given(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}
