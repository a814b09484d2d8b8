"""Adapters, exports and Keras' own files at addresses: what is written there is read again."""

import keras
import numpy as np
import pytest

pytest.importorskip("fsspec")
import fsspec

from arrays import to_numpy
from kmodels import models, training
from kmodels.core.errors import InputError
from kmodels.tools.convert import convert
from remote_storage import FailingFileSystem, files

pytestmark = [pytest.mark.needs("fsspec"), pytest.mark.usefixtures("only_addresses")]
VIT = {
    "image_shape": (8, 8, 3), "patch_size": 4, "num_layers": 1, "num_heads": 1, "hidden_dim": 4,
    "mlp_dim": 8,
}  # fmt: skip
GEMMA = {
    "vocabulary_size": 16, "num_layers": 1, "num_query_heads": 1, "num_key_value_heads": 1,
    "hidden_dim": 8, "intermediate_dim": 8, "head_dim": 8,
}  # fmt: skip
HEADS = {"num_heads": 1}  # which an .npz does not say
PICTURES = np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype("float32")
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
IDS = np.arange(12).reshape(2, 6)


def vit():
    return models.ViTImageClassifier(models.ViTBackbone(**VIT), num_classes=2)


def gemma():
    return models.GemmaCausalLM(models.GemmaBackbone(**GEMMA))


def adapted(model, seed=0):
    """Gives the adapters of a model values that count."""
    model.enable_lora(2)
    draw = np.random.default_rng(seed)
    for variable in model.trainable_variables:
        if "lora_" in variable.path:
            variable.assign(draw.normal(size=variable.shape))
    return model


def test_adapters():
    model = adapted(vit())
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


def test_an_adapter_that_cannot_be_written_leaves_the_former():
    model, other = adapted(vit()), adapted(vit(), seed=1)
    model.save_adapter("failing://bucket/adapter")
    whole = {
        path: fsspec.filesystem("failing").cat_file(path) for path in files("failing://bucket")
    }
    FailingFileSystem.reset(fail_at=2)
    with pytest.raises(InputError, match="cannot write failing://bucket/adapter: Connection"):
        other.save_adapter("failing://bucket/adapter")
    assert files("failing://bucket") == list(whole)
    vit().load_adapter("failing://bucket/adapter")


def test_exports_of_a_vit():
    model = vit()
    expected = to_numpy(model(PICTURES))
    model.export_to_transformers("memory://bucket/hf")
    model.export_to_timm("memory://bucket/timm")
    model.export_to_npz("memory://bucket/vit.npz")
    assert files("memory://bucket").count("/bucket/vit.npz") == 1
    for name in ("hf", "timm", "vit.npz"):
        again = models.ViTImageClassifier.from_preset(
            f"memory://bucket/{name}", preprocessor=None, **({} if "." not in name else HEADS)
        )
        np.testing.assert_allclose(to_numpy(again(PICTURES)), expected, rtol=0, atol=1e-6)
    with pytest.raises(InputError, match=r"must be an \.npz file; give a name that ends in \.npz"):
        model.export_to_npz("memory://bucket/vit")


def test_a_directory_of_transformers_of_a_decoder():
    model = gemma()
    model.export_to_transformers("memory://bucket/hf")
    again = models.GemmaCausalLM.from_preset("memory://bucket/hf")
    np.testing.assert_array_equal(to_numpy(again(IDS)), to_numpy(model(IDS)))


@pytest.mark.needs("gguf")
def test_a_gguf_file():
    model = gemma()
    model.export_to_gguf("memory://bucket/gemma.gguf", dtype="float32")
    again = models.GemmaCausalLM.from_preset("memory://bucket/gemma.gguf")
    np.testing.assert_array_equal(to_numpy(again(IDS)), to_numpy(model(IDS)))


def test_a_conversion_from_an_address_to_another():
    model = vit()
    model.save_to_preset("memory://bucket/vit")
    for name, to in (("vit.npz", "npz"), ("hf", "hf")):
        done = convert("memory://bucket/vit", f"memory://bucket/{name}", to=to)
        assert "bucket" in str(done.path)
        again = models.ViTImageClassifier.from_preset(
            f"memory://bucket/{name}", preprocessor=None, **({} if "." not in name else HEADS)
        )
        expected = to_numpy(model(PICTURES))
        np.testing.assert_allclose(to_numpy(again(PICTURES)), expected, rtol=0, atol=1e-6)


def test_files_of_keras():
    model = vit()
    model.save_weights("memory://bucket/vit.weights.h5")
    again = vit()
    again.load_weights("memory://bucket/vit.weights.h5")
    np.testing.assert_array_equal(to_numpy(again(PICTURES)), to_numpy(model(PICTURES)))
    model.compile(optimizer="adam", loss=LOSS)
    model.fit(PICTURES, np.array([0, 1]), verbose=0)
    model.save("memory://bucket/vit.keras")
    assert files("memory://bucket") == ["/bucket/vit.keras", "/bucket/vit.weights.h5"]
    third = vit()
    third.compile(optimizer="adam", loss=LOSS)
    training.load_keras_file("memory://bucket/vit.keras", third)
    np.testing.assert_array_equal(to_numpy(third(PICTURES)), to_numpy(model(PICTURES)))
    assert int(keras.ops.convert_to_numpy(third.optimizer.iterations)) == 1
    for given in (
        lambda: model.save("memory://bucket/vit.keras", overwrite=False),
        lambda: model.save_weights("memory://bucket/x.weights.json", max_shard_size=1),
        lambda: model.save_weights("memory://bucket/x.weights.json"),
    ):
        with pytest.raises(InputError, match="is an address, where one file is made or replaced;"):
            given()
