"""What `load_lora_weights` says of a file that does not fit; nothing is filled then."""

import h5py
import pytest

from kmodels import InputError
from kmodels.models import ViTBackbone

SIZES = {"image_shape": (8, 8, 1), "patch_size": 4, "num_heads": 2, "hidden_dim": 16}


def backbone(layers=1, mlp_dim=24, **settings):
    model = ViTBackbone(**SIZES, num_layers=layers, mlp_dim=mlp_dim)
    if settings:
        model.enable_lora(**{"rank": 2, **settings})
    return model


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("lora") / "two_layers.lora.h5"
    backbone(2, targets=("query", "up")).save_lora_weights(path)
    return path


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"layers": 1}, "block_1/attention/query is not a linear layer here"),
        ({"layers": 2, "mlp_dim": 8}, "block_0/mlp/up has other sizes there"),
        ({"layers": 2, "targets": "all-linear"}, "attention/key has an adapter only here"),
        ({"layers": 2, "targets": ("query",)}, "block_0/mlp/up has an adapter only there"),
        (
            {"layers": 2, "targets": ("query", "up"), "rank": 3},
            "rank 3 here and 2 there, and the r",
        ),
        (
            {"layers": 2, "targets": ("query", "up"), "rslora": True},
            "block_0/attention/query was enabled there with {'rank': 2, ",
        ),
    ],
)
def test_a_file_of_another_model_is_refused(file, model, message):
    model = backbone(**model)
    trained = len(model.trainable_weights)
    with pytest.raises(InputError, match=message) as caught:
        model.load_lora_weights(file)
    assert "\n" not in str(caught.value) and len(model.trainable_weights) == trained


def test_a_file_of_keras_hub_is_told_where_it_is_read(tmp_path):
    with h5py.File(tmp_path / "hub.lora.h5", "w") as written:
        written.create_group("lora/0")
    with pytest.raises(InputError, match=r"numbers layers; read it with kmodels\.interop"):
        backbone().load_lora_weights(tmp_path / "hub.lora.h5")
