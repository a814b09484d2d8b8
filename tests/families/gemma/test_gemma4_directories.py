"""Directories of Gemma 4 that are not whole, and those of the model without towers."""

import json
import shutil

import numpy as np
import pytest

from arrays import to_numpy
from kmodels.core.errors import InputError
from kmodels.models import GemmaBackbone, GemmaCausalLM
from kmodels.models.gemma.weights import huggingface
from kmodels.weights import engine, read_safetensors

pytestmark = pytest.mark.once
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(references, tmp_path):
    """A directory in several files, to be damaged."""
    shutil.copytree(references / "gemma4" / "all" / "model", tmp_path / "model")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    return tmp_path / "model"


def test_a_file_that_is_missing_or_cut_is_named(folder):
    first = sorted(folder.glob("*.safetensors"))[0]
    whole = first.read_bytes()
    first.write_bytes(whole[:-100])
    with pytest.raises(InputError, match=f"{first.name} is not a whole safetensors file"):
        GemmaCausalLM.from_preset(folder)
    first.unlink()
    with pytest.raises(InputError, match=first.name):
        GemmaCausalLM.from_preset(folder)


@pytest.mark.parametrize(
    "name",
    [
        "embed_tokens_per_layer.weight",
        "layers.2.per_layer_projection.weight",
        "layers.0.layer_scalar",
        "layers.1.self_attn.k_norm.weight",
    ],
)
def test_a_tensor_that_is_missing_is_named_and_the_model_stays(folder, name):
    model = GemmaCausalLM.from_preset(folder)
    before = [to_numpy(weight).copy() for weight in model.weights]
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"][f"model.{name}"]
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(InputError, match="variables without a tensor"):
        GemmaCausalLM.from_preset(folder)
    rules = huggingface.rules(model.backbone.config)
    tensors = {key: x for key, x in read_safetensors(folder).items() if key != f"model.{name}"}
    with pytest.raises(InputError, match="variables without a tensor") as raised:
        engine.load(model, tensors, rules)
    assert "\n" not in str(raised.value)
    for weight, held in zip(model.weights, before, strict=True):
        np.testing.assert_array_equal(to_numpy(weight), held)


@pytest.mark.parametrize("kind", ["gemma4_unified", "gemma4_unified_text"])
def test_the_config_of_12b_is_read_by_both_names(tmp_path, kind):
    sizes = {
        "hidden_size": 3840,
        "intermediate_size": 15_360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "global_head_dim": 512,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "final_logit_softcapping": 30.0,
    }
    text = sizes if kind.endswith("text") else {"text_config": sizes}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **text}))
    source = huggingface.FORMAT.open_checkpoint(
        tmp_path, {"model_type": kind, **text}, {}, weights=False
    )
    found = GemmaBackbone.make_config(**source.backbone)
    wanted = GemmaBackbone.make_config(**GemmaBackbone.presets["gemma4_12b"])
    assert [found.block(i) for i in range(48)] == [wanted.block(i) for i in range(48)]
    assert found.vocabulary_size == wanted.vocabulary_size
    assert found.final_logit_soft_cap == wanted.final_logit_soft_cap
