"""Addresses such as "gs://bucket" are read or refused in a line, and leave no folder "gs:"."""

from pathlib import Path

import pytest

import kmodels
from kmodels import data, text, training
from kmodels.core.errors import InputError
from kmodels.core.files import local_path
from kmodels.runs import recipe, report
from kmodels.tools import bench
from kmodels.tools.convert import convert


@pytest.fixture(scope="module")
def vit():
    backbone = kmodels.models.ViTBackbone(
        image_shape=(8, 8, 3), patch_size=4, num_layers=1, num_heads=1, hidden_dim=4, mlp_dim=8
    )
    return kmodels.models.ViTImageClassifier(backbone, num_classes=2)


@pytest.fixture(scope="module")
def gemma():
    return kmodels.models.GemmaCausalLM(
        kmodels.models.GemmaBackbone(
            vocabulary_size=16, num_layers=1, num_query_heads=1, num_key_value_heads=1,
            hidden_dim=8, intermediate_dim=8, head_dim=8,
        )
    )  # fmt: skip


def refused(act, *arguments):
    with pytest.raises(InputError, match=r"is an address, and kmodels reads and writes only local"):
        act(*arguments)


def opened(act, *arguments, **settings):
    """It goes to the package of that storage, which no environment of the tests has."""
    with pytest.raises(InputError, match=r"needs (one more|the) package") as caught:
        act(*arguments, **settings)
    assert "\n" not in str(caught.value)


@pytest.fixture(autouse=True)
def empty(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    assert not list(tmp_path.iterdir())


def test_which_are_addresses():
    for address in ("gs://b/x", "s3://b", "memory://x", "file://x", Path("gs://b")):
        refused(local_path, address)
    for path in ("x", "/x/y", "C:/x", "a:b", "run: 3/x"):
        assert local_path(path) == Path(path)
    assert local_path("~/x") == Path.home() / "x"


def test_models(vit, gemma):
    for model, name in ((vit, "ViTImageClassifier"), (gemma, "GemmaCausalLM")):
        opened(getattr(kmodels.models, name).from_preset, "gs://b/x")
        opened(model.save_to_preset, "s3://b/x")
        opened(model.save_to_preset, Path("s3://b/x"))
        opened(model.save, "gs://b/x.keras")
        opened(model.save_weights, "gs://b/x.weights.h5")
        opened(model.load_weights, "gs://b/x.weights.h5")
        opened(model.export_to_transformers, "gs://b/x")
        opened(model.load_adapter, "gs://b/x")
        opened(model.load_lora_weights, "gs://b/x.lora.h5")
        opened(training.load_keras_file, "gs://b/x.keras", model)
    opened(vit.export_to_timm, "gs://b/x")
    opened(vit.export_to_npz, "gs://b/x.npz")
    opened(convert, vit, "gs://b/x.npz", to="npz")
    refused(kmodels.models.GemmaTokenizer.save, None, "gs://b/x")
    adapted = type(vit).from_config(vit.get_config())
    adapted.enable_lora(2)
    opened(adapted.save_adapter, "gs://b/x")
    opened(adapted.save_lora_weights, "gs://b/x.lora.h5")


@pytest.mark.needs("gguf")
def test_gguf(gemma):
    opened(gemma.export_to_gguf, "gs://b/x.gguf")


def test_runs():
    opened(training.Checkpoint, "gs://b/x")
    refused(recipe.Folder, "vit", "gs://b/x", None)
    refused(report.write, "gs://b/x")
    refused(bench.write, {}, "gs://b/x")


def test_data():
    for spec in ("npz:gs://b/x", "folder:s3://b/x", "idx:gs://b", "gs://b/0.tar"):
        opened(data.open_dataset, spec)
    with pytest.raises(InputError, match=r"data 'gs://b/x\.npz' is unknown; give one of digits"):
        data.open_dataset("gs://b/x.npz")
    opened(data.TarShards, "gs://b/{0..3}.tar")
    opened(text.read_records, "gs://b/x.jsonl")
    opened(text.Tokenizer.from_file, "gs://b/x")
