"""Model cards: README.md of a saved model, with the facts that the Hugging Face Hub reads."""

from collections.abc import Mapping
from typing import Any

import keras
import yaml

from kmodels.core.errors import InputError, check_names

# The Hub's name of the task, by the end of the name of a class.
PIPELINES = {
    "ImageClassifier": "image-classification",
    "ImageSegmenter": "image-segmentation",
    "CausalLM": "text-generation",
    "ImageTextLM": "image-text-to-text",
    "TextEmbedder": "sentence-similarity",
    "ImageTextSimilarity": "zero-shot-image-classification",
    "ViTBackbone": "image-feature-extraction",
}
FIELDS = ("license", "base_model", "datasets", "metrics", "language", "tags", "description")


def text(model: keras.Model, name: str, facts: Mapping[str, Any]) -> str:
    """Returns the text of a card: YAML between two lines of dashes, and an example that runs.

    Args:
        model: a backbone or task.
        name: name of the directory.
        facts: some of `FIELDS`, see `save_to_preset`.

    Raises:
        InputError: for unknown facts, or a fact of another type.
    """
    check_names("the card", facts, FIELDS)
    measured = facts.get("metrics")
    for key, value in facts.items():
        if key == "metrics" and isinstance(value, Mapping):
            fits = all(isinstance(number, int | float) for number in value.values())
        else:
            parts = value if isinstance(value, list | tuple) else [value]
            fits = all(isinstance(part, str) for part in parts)
        if not fits:
            raise InputError(
                f"{key} of the card is {value!r}; give a text, a list of texts, or for metrics "
                "numbers by name"
            )
    kind = type(model).__name__
    backbone = getattr(model, "backbone", model)
    pipeline = next((tag for end, tag in PIPELINES.items() if kind.endswith(end)), None)
    values = dict(measured) if isinstance(measured, Mapping) else {}
    datasets = _listed(facts.get("datasets"))
    head = {
        "library_name": "kmodels",
        "pipeline_tag": pipeline,
        "tags": ["keras", backbone.family, *_listed(facts.get("tags"))],
        "license": facts.get("license"),
        "language": facts.get("language"),
        "base_model": [one.removeprefix("hf://") for one in _listed(facts.get("base_model"))],
        "datasets": datasets,
        "metrics": [*values] or _listed(measured),
    }
    if values and datasets and pipeline:
        head["model-index"] = [
            {
                "name": name,
                "results": [
                    {
                        "task": {"type": pipeline},
                        "dataset": {"name": datasets[0], "type": datasets[0]},
                        "metrics": [{"type": k, "value": float(v)} for k, v in values.items()],
                    }
                ],
            }
        ]
    head = {key: value for key, value in head.items() if value}
    lines = ["---", yaml.safe_dump(head, sort_keys=False, allow_unicode=True).strip(), "---", ""]
    lines += [f"# {name}", ""]
    lines += [facts["description"], ""] if facts.get("description") else []
    lines += [f"A `{kind}` of kmodels with {model.count_params():,} parameters.", ""]
    if values:
        lines += ["| metric | |", "| --- | --- |"]
        lines += [f"| {key} | {value:.4g} |" for key, value in values.items()] + [""]
    return "\n".join([*lines, "```python", *_example(model, kind, name), "```", ""])


def _example(model: keras.Model, kind: str, name: str) -> list[str]:
    shape = getattr(getattr(model, "backbone", model).config, "image_shape", None)
    imports, uses = ["import kmodels"], ["model.summary()"]
    if kind.endswith("CausalLM") and getattr(model, "preprocessor", None) is not None:
        uses = ['print(model.generate("Hello", max_length=16))']
    elif shape is not None and kind.endswith(("ImageClassifier", "ViTBackbone")):
        imports.append("import numpy as np")
        uses = [
            f'images = np.zeros((1, {", ".join(map(str, shape))}), "float32")',
            "print(model.predict(images, verbose=0))",
        ]
    load = f'model = kmodels.models.{kind}.from_preset("{name}")  # or "hf://OWNER/{name}"'
    return [*imports, "", load, *uses]


def _listed(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())
