"""keras-hub's LoRA files give our model what they give keras-hub's, and leave in PEFT's format."""

from importlib import import_module

import numpy as np
import pytest

import hub_models
from kmodels import lora
from kmodels.core.errors import InputError
from kmodels.interop import keras_hub as interop
from kmodels.models import GemmaBackbone, ViTBackbone
from tolerances import tolerance

pytestmark = [pytest.mark.needs("keras_hub"), pytest.mark.across("torch")]
# What a backend computes; refusals and files are the same on each.
EVERYWHERE = pytest.mark.across("torch", "jax", "tensorflow")
RANKS = {"vit": 4, "dinov2": 4, "gemma": 8, "gemma3": 8, "gemma4": 8}


@pytest.fixture(scope="module")
def models():
    return import_module("keras_hub").models


def adapted(name, models, file):
    """A model without adapters, and the same with those in a file, both of keras-hub."""
    plain, other = (hub_models.make(name, models) for _ in range(2))
    backbone = getattr(other, "backbone", other)
    backbone.enable_lora(2)
    rng = np.random.default_rng(3)
    for variable in backbone.trainable_weights:
        if "lora_kernel" in variable.path:  # it leaves biases trainable, and out of the file
            variable.assign(rng.normal(size=tuple(variable.shape)) * 0.2)
    backbone.save_lora_weights(str(file))
    return plain, other


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=EVERYWHERE if name == "gemma" else ()) for name in RANKS]
)
def test_outputs_are_those_of_keras_hubs_adapters(name, models, tmp_path):
    plain, other = adapted(name, models, tmp_path / "made.lora.h5")
    ours = interop.from_hub(plain)
    x = hub_models.inputs(name)
    base, wanted = hub_models.output(ours, x), hub_models.output(other, x)
    interop.read_lora(ours, tmp_path / "made.lora.h5")
    found = hub_models.output(ours, x)
    assert np.abs(wanted - base).max() > 0.01
    assert np.abs(found - wanted).max() <= tolerance("logits")
    assert {settings["rank"] for settings in lora.describe(ours).values()} == {RANKS[name]}

    ours.save_adapter(tmp_path / "peft")
    again = interop.from_hub(plain)
    again.load_adapter(tmp_path / "peft")
    assert np.array_equal(hub_models.output(again, x), found)


def test_files_that_do_not_fit_change_nothing(models, tmp_path):
    file = tmp_path / "made.lora.h5"
    adapted("vit", models, file)
    sizes = {**hub_models.VIT, "layer_norm_epsilon": 1e-5, "use_mha_bias": False}
    wider = ViTBackbone(**{**sizes, "hidden_dim": 32})
    with pytest.raises(InputError, match=r"kernel has adapters of \(16, 2, 2\)"):
        interop.read_lora(wider, file)
    shorter = ViTBackbone(**{**sizes, "num_layers": 1})
    with pytest.raises(InputError, match=r"made for another model|has no linear layer of its own"):
        interop.read_lora(shorter, file)
    assert not lora.describe(wider) and not lora.describe(shorter)
    (tmp_path / "other.lora.h5").write_bytes(b"no such file")
    with pytest.raises(InputError, match=r"is not a .lora.h5 of keras-hub"):
        interop.read_lora(wider, tmp_path / "other.lora.h5")
    wider.enable_lora(2)
    with pytest.raises(InputError, match="has LoRA adapters already"):
        interop.read_lora(wider, file)


def test_ranks_that_a_layer_has_no_room_for(models, tmp_path):
    sizes = {**hub_models.GEMMA, "num_layers": 1, "intermediate_dim": 16}
    narrow = {**sizes, "num_key_value_heads": 1, "head_dim": 4}
    theirs = models.GemmaBackbone(**narrow)
    theirs.enable_lora(2)
    theirs.save_lora_weights(str(tmp_path / "made.lora.h5"))
    with pytest.raises(InputError, match=r"rank 8 here.*block_0/attention/value takes at most 4"):
        interop.read_lora(GemmaBackbone(**narrow), tmp_path / "made.lora.h5")
