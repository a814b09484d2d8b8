"""Models, data, texts and exports at addresses: a storage in memory stands for a bucket."""

import io
import json

import numpy as np
import pytest

pytest.importorskip("fsspec")
import fsspec
import keras

from arrays import to_numpy
from kmodels import data, models, presets, text, training
from kmodels.core.errors import InputError
from kmodels.tools.convert import convert
from record_files import encoded, write_shard
from refusals import refused
from remote_storage import FailingFileSystem, empty_storage, files

pytestmark = pytest.mark.needs("fsspec")
VIT = {
    "image_shape": (8, 8, 3), "patch_size": 4, "num_layers": 1, "num_heads": 1, "hidden_dim": 4,
    "mlp_dim": 8,
}  # fmt: skip
GEMMA = {
    "vocabulary_size": 16, "num_layers": 1, "num_query_heads": 1, "num_key_value_heads": 1,
    "hidden_dim": 8, "intermediate_dim": 8, "head_dim": 8,
}  # fmt: skip
PICTURES = np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype("float32")
IDS = np.arange(12).reshape(2, 6)


@pytest.fixture(autouse=True)
def only_addresses(tmp_path, monkeypatch):
    """Empties the storage that stands for a bucket; nothing may be written beside it."""
    empty_storage()
    monkeypatch.chdir(tmp_path)
    yield
    assert not list(tmp_path.iterdir()), "a folder is called as an address"


def vit():
    return models.ViTImageClassifier(models.ViTBackbone(**VIT), num_classes=2)


def read(address, **settings):
    return models.ViTImageClassifier.from_preset(address, **settings)


def same(left, right):
    left, right = ([to_numpy(variable) for variable in model.weights] for model in (left, right))
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


def test_a_model_goes_to_a_bucket_and_back():
    model, other = vit(), vit()
    assert not same(model, other)
    written = model.save_to_preset("memory://bucket/vit")
    assert same(read("memory://bucket/vit"), model)
    assert same(read(written), model)  # what is returned is an address too
    assert presets.class_of("memory://bucket/vit") is models.ViTImageClassifier
    other.save_to_preset("memory://bucket/vit")
    assert same(read("memory://bucket/vit"), other)
    assert len([path for path in files("memory://bucket") if path.endswith("config.json")]) == 1
    with pytest.raises(InputError, match="no file or directory memory://bucket/no"):
        models.ViTBackbone.from_preset("memory://bucket/no")


def test_a_file_address_is_a_local_path_and_plain_files_are_read(tmp_path):
    model = vit()
    folder = model.save_to_preset(f"file://{tmp_path}/vit")
    assert folder == tmp_path / "vit" and (folder / "config.json").is_file()
    assert same(read(f"file://{tmp_path}/vit"), model)
    # As `gsutil cp` leaves a directory: files, and nothing that names them.
    for path in folder.iterdir():
        fsspec.filesystem("memory").pipe_file(f"/plain/vit/{path.name}", path.read_bytes())
        path.unlink()
    folder.rmdir()
    assert same(read("memory://plain/vit"), model)


def test_a_model_that_cannot_be_written_leaves_the_former():
    model, other = vit(), vit()
    model.save_to_preset("failing://bucket/vit")
    assert FailingFileSystem.writes == 4  # config, weights, manifest, and what names them
    FailingFileSystem.reset(fail_at=3)
    refused(
        "cannot write failing://bucket/vit: Connection",
        other.save_to_preset,
        "failing://bucket/vit",
    )
    assert same(read("failing://bucket/vit"), model)


def test_pictures_and_texts(tmp_path):
    system = fsspec.filesystem("memory")
    for label in ("cat", "dog"):
        for number in range(8):
            picture = np.full((8, 8, 3), number * 16 + (label == "dog"), "uint8")
            system.pipe_file(f"/data/{label}/{number}.png", encoded(picture, "png"))
    bundle = data.open_dataset("folder:memory://data", validation_split=0.0)
    x, y = data.ImageLoader(bundle.train, 16, image_size=(8, 8))[0]
    assert x.shape == (16, 8, 8, 3) and sorted(y) == [0] * 8 + [1] * 8

    arrays = io.BytesIO()
    np.savez(arrays, x=np.zeros((20, 8, 8), "uint8"), y=np.arange(20) % 2)
    system.pipe_file("/arrays/a.npz", arrays.getvalue())
    assert data.open_dataset("npz:memory://arrays/a.npz").num_classes == 2

    for number in range(2):
        samples = {
            f"{number}{n}": {"png": np.full((8, 8, 3), n, "uint8"), "cls": n} for n in range(4)
        }
        shard = write_shard(tmp_path / "a.tar", samples)
        system.pipe_file(f"/shards/{number}.tar", shard.read_bytes())
        shard.unlink()
    assert len(data.TarShards("memory://shards/{0,1}.tar")) == 8
    assert len(data.TarShards("memory://shards/*.tar")) == 8
    assert data.open_dataset("memory://shards/*.tar", validation_split=0.0).num_classes == 4
    with pytest.raises(InputError, match=r"no file or directory memory://shards/2\.tar"):
        data.TarShards("memory://shards/{0..2}.tar")
    refused("no file fits memory://shards/x", data.TarShards, "memory://shards/x*.tar")

    lines = b"".join(json.dumps({"text": word}).encode() + b"\n" for word in ("a", "b"))
    system.pipe_file("/texts/t.jsonl", lines + b"{}\n")
    records = text.read_records("memory://texts/t.jsonl", skip_bad=True)
    assert [row["text"] for row in records.rows] == ["a", "b"]
    refused(r"^memory://texts/t\.jsonl line 3: ", text.read_records, "memory://texts/t.jsonl")


def test_a_tokenizer():
    from sentencepiece_files import words_model

    system = fsspec.filesystem("memory")
    system.pipe_file("/words/tokenizer.model", words_model(["the", "fox"]))
    for address in ("memory://words", "memory://words/tokenizer.model"):
        assert text.Tokenizer.from_file(address)("the fox") == [4, 5]
    assert models.GemmaTokenizer("memory://words/tokenizer.model")("the fox") is not None


def test_adapters():
    model = vit()
    model.enable_lora(2)
    draw = np.random.default_rng(0)
    for variable in model.trainable_variables:  # so that they count
        if "lora_" in variable.path:
            variable.assign(draw.normal(size=variable.shape))
    base = {v.path: to_numpy(v) for v in model.weights if "lora_" not in v.path}
    expected = to_numpy(model(PICTURES))
    written = model.save_adapter("memory://bucket/adapter")
    model.save_lora_weights("memory://bucket/a.lora.h5")
    names = sorted(path.rpartition("/")[2] for path in files("memory://bucket/adapter"))
    assert names == ["adapter_config.json", "adapter_model.safetensors", "published.json"]
    for load in (
        lambda again: again.load_adapter("memory://bucket/adapter"),
        lambda again: again.load_adapter(written),  # what is returned is an address too
        lambda again: again.load_lora_weights("memory://bucket/a.lora.h5"),
    ):
        again = vit()
        for variable in again.weights:
            variable.assign(base[variable.path])
        load(again)
        np.testing.assert_array_equal(to_numpy(again(PICTURES)), expected)


@pytest.mark.nightly
def test_exports_and_a_conversion_from_an_address_to_another():
    model = vit()
    expected = to_numpy(model(PICTURES))
    model.export_to_transformers("memory://bucket/hf")
    model.export_to_timm("memory://bucket/timm")
    model.export_to_npz("memory://bucket/vit.npz")
    assert files("memory://bucket").count("/bucket/vit.npz") == 1
    model.save_to_preset("memory://bucket/vit")
    for name, to in (("converted.npz", "npz"), ("converted", "hf")):
        done = convert("memory://bucket/vit", f"memory://bucket/{name}", to=to)
        assert "bucket" in str(done.path)
    for name in ("hf", "timm", "vit.npz", "converted", "converted.npz"):
        heads = {"num_heads": 1} if "." in name else {}  # which an .npz does not say
        again = read(f"memory://bucket/{name}", preprocessor=None, **heads)
        np.testing.assert_allclose(to_numpy(again(PICTURES)), expected, rtol=0, atol=1e-6)
    with pytest.raises(InputError, match=r"must be an \.npz file; give a name that ends in \.npz"):
        model.export_to_npz("memory://bucket/vit")


@pytest.mark.parametrize("form", ["hf", pytest.param("gguf", marks=pytest.mark.needs("gguf"))])
def test_exports_of_a_decoder(form):
    model = models.GemmaCausalLM(models.GemmaBackbone(**GEMMA))
    if form == "hf":
        model.export_to_transformers("memory://bucket/gemma.hf")
    else:
        model.export_to_gguf("memory://bucket/gemma.gguf", dtype="float32")
    again = models.GemmaCausalLM.from_preset(f"memory://bucket/gemma.{form}")
    np.testing.assert_array_equal(to_numpy(again(IDS)), to_numpy(model(IDS)))


@pytest.mark.each_backend("nightly")
def test_files_of_keras():
    model, again, third = vit(), vit(), vit()
    model.save_weights("memory://bucket/vit.weights.h5")
    again.load_weights("memory://bucket/vit.weights.h5")
    np.testing.assert_array_equal(to_numpy(again(PICTURES)), to_numpy(model(PICTURES)))
    for each in (model, third):
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        each.compile(optimizer="adam", loss=loss)
    model.fit(PICTURES, np.array([0, 1]), verbose=0)
    model.save("memory://bucket/vit.keras")
    assert files("memory://bucket") == ["/bucket/vit.keras", "/bucket/vit.weights.h5"]
    training.load_keras_file("memory://bucket/vit.keras", third)
    np.testing.assert_array_equal(to_numpy(third(PICTURES)), to_numpy(model(PICTURES)))
    assert int(keras.ops.convert_to_numpy(third.optimizer.iterations)) == 1
    for given in (
        lambda: model.save("memory://bucket/vit.keras", overwrite=False),
        lambda: model.save_weights("memory://bucket/x.weights.json", max_shard_size=1),
        lambda: model.save_weights("memory://bucket/x.weights.json"),
    ):
        refused("is an address, where one file is made or replaced;", given)
