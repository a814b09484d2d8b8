"""What keras-hub's gemma_lora_test and gemma3_lora_test assert of adapters."""

import warnings

import keras
import numpy as np
import pytest

from arrays import to_numpy
from kmodels.models import Gemma3Backbone, GemmaBackbone
from refusals import refused
from tolerances import tolerance

pytestmark = pytest.mark.across

GEMMA = {
    "vocabulary_size": 50,
    "num_layers": 2,
    "num_query_heads": 2,
    "num_key_value_heads": 2,
    "hidden_dim": 32,
    "intermediate_dim": 16,
    "head_dim": 16,
    "layer_norm_epsilon": 1e-6,
}
GEMMA3 = {
    "vocabulary_size": 256,
    "image_size": 16,
    "num_layers": 6,
    "num_query_heads": 2,
    "num_key_value_heads": 1,
    "hidden_dim": 8,
    "intermediate_dim": 16,
    "head_dim": 4,
    "query_head_dim_normalize": True,
    "use_query_key_norm": True,
    "use_post_ffw_norm": True,
    "use_post_attention_norm": True,
    "final_logit_soft_cap": None,
    "attention_logit_soft_cap": None,
    "use_sliding_window_attention": True,
    "sliding_window_size": 1024,
    "vision_encoder": None,
}
INPUTS = {"token_ids": np.ones((2, 5), "int32"), "padding_mask": np.ones((2, 5), "int32")}


def trained(backbone):
    targets = np.random.default_rng(0).normal(size=(2, 5, backbone.config.hidden_dim))
    backbone.compile(optimizer="sgd", loss="mse")
    backbone.fit(INPUTS, targets, epochs=1, verbose=0)
    return backbone


def check_equal(left, right):
    close = {"rtol": 0, "atol": tolerance("logits_across")}
    np.testing.assert_allclose(to_numpy(left(INPUTS)), to_numpy(right(INPUTS)), **close)


# Class, arguments, adapted layers, and how many weights train and how many do not.
FINE_TUNED = {
    "default": (GemmaBackbone, GEMMA, None, 4 * 2, 20),
    "target_names": (GemmaBackbone, GEMMA, ["query"], 2 * 2, 20),
    "gemma3": (Gemma3Backbone, GEMMA3, None, 24, 80),
}


@pytest.mark.parametrize("name", FINE_TUNED)
def test_lora_fine_tuning(name, tmp_path):
    """Query and value of each block are adapted by default; a file fills a new model.

    Gemma 3's values are 4 wide and take a rank of 5 all the same.
    """
    cls, sizes, names, adapted, frozen = FINE_TUNED[name]
    backbone, new, other = (cls(**sizes) for _ in range(3))
    backbone.enable_lora(4, target_layer_names=names)
    assert len(backbone.trainable_weights) == adapted
    assert len(backbone.non_trainable_weights) == frozen
    backbone.save_weights(tmp_path / "base.weights.h5")
    trained(backbone).save_lora_weights(tmp_path / "lora_model.lora.h5")
    new.load_weights(tmp_path / "base.weights.h5")
    new.enable_lora(4, target_layer_names=names)
    new.load_lora_weights(tmp_path / "lora_model.lora.h5")
    check_equal(new, backbone)
    refused("no lora-enabled layers", other.save_lora_weights, tmp_path / "a.lora.h5")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a rank above the width
        other.enable_lora(5, target_layer_names=names)
    refused("ranks must match", other.load_lora_weights, tmp_path / "lora_model.lora.h5")
    refused("filename must end in", other.save_lora_weights, "bad_filepath")


def test_names_of_keras_hub_and_a_new_model(tmp_path):
    """keras-hub's names mean our layers, and a file enables what it has adapters for."""
    backbone = GemmaBackbone(**GEMMA)
    backbone.enable_lora(2, target_layer_names=["query_dense", "ffw_gating_2", "attention_output"])
    assert len(backbone.trainable_weights) == 2 * 3 * 2
    trained(backbone).save_lora_weights(tmp_path / "a.lora.h5")
    new = GemmaBackbone(**GEMMA)
    backbone.save_weights(tmp_path / "w.weights.h5")
    new.enable_lora(2, targets=("query", "mlp/up", "output"))
    new.load_weights(tmp_path / "w.weights.h5")
    check_equal(new, backbone)
    fresh = GemmaBackbone(**GEMMA)
    fresh.load_lora_weights(tmp_path / "a.lora.h5")
    assert len(fresh.trainable_weights) == 2 * 3 * 2
    with pytest.raises(ValueError, match="is not a file of save_lora_weights"):
        fresh.load_lora_weights(tmp_path / "w.weights.h5")
    with pytest.raises(ValueError, match="target_layer_names is 'query'; give a list"):
        GemmaBackbone(**GEMMA).enable_lora(2, target_layer_names="query")
    assert fresh.default_lora_layer_names() == ["query", "value"]


def test_a_dense_layer_is_adapted_as_keras_own(tmp_path):
    """One layer in a model of the user's: what trains, the first output, and its file."""
    from kmodels.layers import Dense

    inputs = keras.Input((4,))
    layer, plain = Dense(3, name="first"), keras.layers.Dense(3)
    model = keras.Model(inputs, layer(inputs))
    plain.build((None, 4))
    plain.set_weights(layer.get_weights())
    x = np.random.default_rng(0).normal(size=(2, 4)).astype("float32")
    for each in (layer, plain):
        each.enable_lora(2, lora_alpha=3.0, b_initializer="ones")
    for ours, theirs in zip(
        layer.adapter.variables, (plain.lora_kernel_a, plain.lora_kernel_b), strict=True
    ):
        theirs.assign(to_numpy(ours.value))
    atol = tolerance("dense")
    np.testing.assert_allclose(to_numpy(model(x)), to_numpy(plain(x)), rtol=0, atol=atol)
    assert len(layer.trainable_weights) == len(plain.trainable_weights) == 3
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(to_numpy(again(x)), to_numpy(plain(x)), rtol=0, atol=atol)
    assert len(again.trainable_weights) == 3
    refused("once per layer", layer.enable_lora, 2)
    refused("is not built; call it", Dense(3).enable_lora, 2)
    held = Dense(3, kernel_constraint="non_neg")
    held.build((None, 4))
    refused("has a kernel_constraint", held.enable_lora, 2)
