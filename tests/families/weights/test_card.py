"""`save_to_preset(card=...)` writes a README.md that the Hub's own package reads and that runs."""

import re

import keras
import numpy as np
import pytest
from huggingface_hub import ModelCard

from kmodels.models import GemmaCausalLM, ViTBackbone, ViTImageClassifier
from refusals import refused

FACTS = {
    "license": "apache-2.0",
    "base_model": "hf://google/vit-base-patch16-224",
    "datasets": ["zalando-datasets/fashion_mnist"],
    "metrics": {"accuracy": 0.9125},
    "tags": "shoes",
    "description": "Tells shoes from shirts: it's a test.",
}


def example(folder) -> str:
    [code] = re.findall("```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    return code


@pytest.fixture(scope="module")
def classifier():
    return ViTImageClassifier.from_preset("vit_debug", num_classes=3)


@pytest.mark.each_backend
def test_the_hub_reads_the_card_and_its_example_runs(classifier, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    classifier.save_to_preset("my_vit", card=FACTS)
    card = ModelCard.load(tmp_path / "my_vit" / "README.md")
    data = card.data.to_dict()
    assert data["library_name"] == "kmodels" and data["pipeline_tag"] == "image-classification"
    assert data["license"] == "apache-2.0" and data["tags"] == ["keras", "vit", "shoes"]
    assert data["base_model"] == ["google/vit-base-patch16-224"]
    assert data["datasets"] == FACTS["datasets"] and data["metrics"] == ["accuracy"]
    [result] = card.data.eval_results
    assert (result.metric_type, result.metric_value) == ("accuracy", 0.9125)
    assert result.dataset_type == "zalando-datasets/fashion_mnist"
    assert "it's a test." in card.text and "| accuracy | 0.9125 |" in card.text
    names: dict = {}
    exec(example(tmp_path / "my_vit"), names)
    x = np.random.default_rng(0).random((1, 16, 16, 3), "float32")
    expected, found = (m.predict(x, verbose=0) for m in (classifier, names["model"]))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("kind", "preset", "pipeline"),
    [
        (ViTBackbone, "vit_debug", "image-feature-extraction"),
        (GemmaCausalLM, "gemma3_debug", "text-generation"),
    ],
)
def test_a_card_without_facts(kind, preset, pipeline, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    kind.from_preset(preset).save_to_preset("model", card=True)
    data = ModelCard.load(tmp_path / "model" / "README.md").data.to_dict()
    assert data["pipeline_tag"] == pipeline and not {"license", "datasets"} & data.keys()
    exec(example(tmp_path / "model"), {})


def test_a_card_may_be_edited_and_is_replaced_by_a_card_alone(classifier, tmp_path) -> None:
    folder = tmp_path / "model"
    classifier.save_to_preset(folder)
    assert not (folder / "README.md").exists()
    classifier.save_to_preset(folder, card=True)
    (folder / "README.md").write_text("Mine.")
    assert isinstance(ViTImageClassifier.from_preset(folder), keras.Model)
    refused("also holds README.md, which would be lost", classifier.save_to_preset, folder)
    classifier.save_to_preset(folder, card={})
    assert "Mine." not in (folder / "README.md").read_text()


def test_wrong_facts_are_one_line(classifier, tmp_path) -> None:
    for facts, message in (
        ({"licence": "mit"}, "the card takes no licence; did you mean license?"),
        ({"license": 1}, "license of the card is 1; give a text, a list of texts, or for metrics"),
        ({"datasets": [1]}, "datasets of the card is"),
        ({"metrics": {"accuracy": "high"}}, "metrics of the card is"),
    ):
        refused(message, classifier.save_to_preset, tmp_path / "model", card=facts)
    assert not (tmp_path / "model").exists()
