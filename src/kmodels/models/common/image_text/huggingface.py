"""Hugging Face directories of a decoder with a vision tower and a projector."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from kmodels.models.common import huggingface as decoder
from kmodels.models.common.config import DecoderConfig
from kmodels.models.common.image_text import transformers_files
from kmodels.weights import LazyArray, Rule, SourceCheckpoint, read_safetensors

# What may stand before the names of the three parts: in the published files, as transformers 5
# writes them, and as its modules are called.
TEXTS = ("language_model.model.", "model.language_model.")
TOWER, PROJECTOR = "vision_tower.", "multi_modal_projector."
TOWERS = (f"{TOWER}vision_model.", f"model.{TOWER}vision_model.", TOWER, f"model.{TOWER}")
PROJECTORS = (PROJECTOR, f"model.{PROJECTOR}")
# Positions that older files keep beside the embedding of positions, and a head that is not used.
UNUSED = ("embeddings.position_ids", "head.")


def below(name: str, rules: Iterable[Rule]) -> list[Rule]:
    """Returns the rules with a layer's name in front of their variables."""
    found = []
    for rule in rules:
        targets = [f"{name}/{target}" for target in rule.targets]
        target = targets[0] if isinstance(rule.target, str) else targets
        found.append(Rule(rule.source, target, rule.transform, rule.axis))
    return found


@dataclass(frozen=True)
class ImageTextFormat:
    """Directories of such a family, as `Family.formats` wants them.

    Args:
        kind: `model_type` in config.json.
        config_class: config class of the family.
        fields: (path, description) to the fields of the config.
        table: (config, prefixes of text, tower and projector) to the rules.
        converter: name of the family's image converter, for errors.

    Attributes:
        takes: what the model reads, for the warning of parts that are left out.
    """

    kind: str
    config_class: Callable[..., Any]
    fields: Callable[[Path, dict[str, Any]], dict[str, Any]]
    table: Callable[[Any, str, str, str], Sequence[Rule]]
    converter: str
    takes: ClassVar[str] = "text and images"

    def matches(self, path: Path, description: dict[str, Any]) -> bool:
        """Returns whether a directory with this config.json is of this format."""
        there = description.get("vision_config") is not None
        return path.is_dir() and description.get("model_type") == self.kind and there

    def open_checkpoint(
        self, path: Path, description: dict[str, Any], given: dict[str, Any], weights: bool
    ) -> SourceCheckpoint:
        """Understands a directory, with its tokenizer and how it asks to generate.

        Args:
            path: path of the directory.
            description: the object in its config.json.
            given: unused; the file says it all.
            weights: False where only the architecture is wanted and no tensors need be there.

        Raises:
            InputError: for settings that the model has no counterpart for.
        """
        backbone, tensors = decoder.with_output_layer(
            self.fields(path, description), read_safetensors(path) if weights else {}
        )
        kept, rules, left_out = self.parts(tensors, self.config_class(**backbone))
        return SourceCheckpoint(
            path=path,
            kind="Hugging Face",
            backbone=backbone,
            task={"generation_config": decoder.generation_config(path, warns=bool(tensors))},
            preprocessor=self._preprocessor(path),
            tensors=kept,
            rules=rules,
            left_out=left_out,
            takes=self.takes,
        )

    def parts(
        self, tensors: Mapping[str, LazyArray], config: DecoderConfig
    ) -> tuple[dict[str, LazyArray], Sequence[Rule], list[str]]:
        """Returns the tensors that count, their table, and the names of parts left out."""
        language = prefix(tensors, TEXTS, "embed_tokens.")
        tower = prefix(tensors, TOWERS, "embeddings.")
        projector = prefix(tensors, PROJECTORS, "")
        unused = tuple(tower + name for name in UNUSED)
        kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(unused)}
        return kept, self.table(config, language, tower, projector), []

    def settings(self, path: Path) -> dict[str, Any]:
        """Returns the arguments of the preprocessor that the files of a directory say."""
        return transformers_files.read(path, self.converter)

    def _preprocessor(self, path: Path) -> dict[str, Any] | None:
        """Returns the arguments of the preprocessor that lies in a directory, or None."""
        held = decoder.tokenizer_of(path)
        return None if held is None else held | self.settings(path)


def prefix(tensors: Iterable[str], prefixes: Sequence[str], start: str) -> str:
    """Returns the prefix with which a name of the file starts, or the first."""
    found = (x for x in prefixes if any(name.startswith(x + start) for name in tensors))
    return next(found, prefixes[0])
