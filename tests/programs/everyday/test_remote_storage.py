"""Models, data and texts at addresses: a storage in memory stands for a bucket."""

import io
import json

import numpy as np
import pytest

pytest.importorskip("fsspec")
import fsspec
import keras

from kmodels import data, models, presets, text
from kmodels.core.errors import InputError
from record_files import encoded, write_shard
from remote_storage import FailingFileSystem, files

pytestmark = [pytest.mark.needs("fsspec"), pytest.mark.usefixtures("only_addresses")]
CONFIG = {
    "image_shape": (8, 8, 3), "patch_size": 4, "num_layers": 1, "num_heads": 1, "hidden_dim": 4,
    "mlp_dim": 8,
}  # fmt: skip


def make():
    return models.ViTImageClassifier(models.ViTBackbone(**CONFIG), num_classes=2)


def weights(model):
    return [keras.ops.convert_to_numpy(variable) for variable in model.weights]


def same(left, right):
    return all(np.array_equal(a, b) for a, b in zip(weights(left), weights(right), strict=True))


def test_a_model_goes_to_a_bucket_and_back(backend):
    model, other = make(), make()
    assert not same(model, other)
    written = model.save_to_preset("memory://bucket/vit")
    again = models.ViTImageClassifier.from_preset("memory://bucket/vit")
    assert same(again, model) and same(
        models.ViTImageClassifier.from_preset(written), model
    )  # what is returned is an address too
    assert presets.class_of("memory://bucket/vit") is models.ViTImageClassifier
    other.save_to_preset("memory://bucket/vit")
    assert same(models.ViTImageClassifier.from_preset("memory://bucket/vit"), other)
    assert len([path for path in files("memory://bucket") if path.endswith("config.json")]) == 1
    with pytest.raises(InputError, match="no file or directory memory://bucket/no"):
        models.ViTBackbone.from_preset("memory://bucket/no")


def test_a_file_address_is_a_local_path(tmp_path):
    model = make()
    folder = model.save_to_preset(f"file://{tmp_path}/vit")
    assert folder == tmp_path / "vit" and (folder / "config.json").is_file()
    assert same(models.ViTImageClassifier.from_preset(f"file://{tmp_path}/vit"), model)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


@pytest.mark.parametrize("fail_at", [1, 2, 3, 4])
def test_a_model_that_cannot_be_written_leaves_the_former(fail_at):
    model, other = make(), make()
    model.save_to_preset("failing://bucket/vit")
    assert FailingFileSystem.writes == 4  # config, weights, manifest, and what names them
    FailingFileSystem.reset(fail_at)
    with pytest.raises(InputError, match="cannot write failing://bucket/vit: Connection") as caught:
        other.save_to_preset("failing://bucket/vit")
    assert "\n" not in str(caught.value)
    assert same(models.ViTImageClassifier.from_preset("failing://bucket/vit"), model)


def test_a_directory_of_others_is_read(tmp_path):
    """As `gsutil cp` leaves it: files, and nothing that names them."""
    model, folder = make(), tmp_path / "vit"
    model.save_to_preset(folder)
    system = fsspec.filesystem("memory")
    for path in folder.iterdir():
        system.pipe_file(f"/plain/vit/{path.name}", path.read_bytes())
        path.unlink()
    folder.rmdir()
    assert same(models.ViTImageClassifier.from_preset("memory://plain/vit"), model)


def put_pictures(system):
    for label in ("cat", "dog"):
        for number in range(8):
            picture = np.full((8, 8, 3), number * 16 + (label == "dog"), "uint8")
            system.pipe_file(f"/data/{label}/{number}.png", encoded(picture, "png"))


def test_pictures_and_texts(tmp_path):
    system = fsspec.filesystem("memory")
    put_pictures(system)
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
    with pytest.raises(InputError, match="no file fits memory://shards/x"):
        data.TarShards("memory://shards/x*.tar")

    lines = b"".join(json.dumps({"text": word}).encode() + b"\n" for word in ("a", "b"))
    system.pipe_file("/texts/t.jsonl", lines + b"{}\n")
    records = text.read_records("memory://texts/t.jsonl", skip_bad=True)
    assert [row["text"] for row in records.rows] == ["a", "b"]
    with pytest.raises(InputError, match=r"^memory://texts/t\.jsonl line 3: "):
        text.read_records("memory://texts/t.jsonl")


def test_a_tokenizer():
    from sentencepiece_files import words_model

    system = fsspec.filesystem("memory")
    system.pipe_file("/words/tokenizer.model", words_model(["the", "fox"]))
    for address in ("memory://words", "memory://words/tokenizer.model"):
        assert text.Tokenizer.from_file(address)("the fox") == [4, 5]
    assert models.GemmaTokenizer("memory://words/tokenizer.model")("the fox") is not None


def test_a_storage_that_refuses_is_one_line():
    make().save_to_preset("failing://bucket/vit")
    FailingFileSystem.reset(denied=True)
    with pytest.raises(InputError, match="cannot read failing://bucket/vit: PermissionError") as e:
        models.ViTBackbone.from_preset("failing://bucket/vit")
    assert "\n" not in str(e.value)
