"""The mixture of experts of Gemma 4: against transformers, in training, with adapters, in files."""

import json

import keras
import numpy as np
import pytest

import kmodels
from arrays import read_npz, to_numpy
from decoder_case import DecoderCase
from kmodels.core import keras_internals
from kmodels.core.errors import InputError
from kmodels.layers import Experts, GroupedDense, Router, remat
from kmodels.memory.sizes import Setup
from kmodels.models import GemmaBackbone, GemmaCausalLM, GemmaConfig
from kmodels.models.gemma.presets import PRESETS
from kmodels.tools.plan import Plan
from kmodels.weights import read_safetensors
from tolerances import tolerance

IDS = np.random.default_rng(0).integers(3, 320, (2, 19)).astype("int32")
EXPERTS = ("experts/gate_up", "experts/down")
LIMIT = tolerance("logits")


def fresh(dtype=None, **settings):
    """The debug model, with norms and scales at which every part counts."""
    keras.utils.set_random_seed(3)
    backbone = GemmaBackbone(**{**PRESETS["gemma4_moe_debug"], **settings}, dtype=dtype)
    draw = np.random.default_rng(4)
    for weight in backbone.weights:
        if "norm" in weight.path or "scal" in weight.path:
            weight.assign(draw.normal(1.0, 0.4, weight.shape))
    return GemmaCausalLM(backbone)


def predicted(model, inputs):
    return model.predict(inputs, verbose=0)


@pytest.fixture(scope="module")
def whole(references):
    return DecoderCase(references / "gemma4" / "all_experts", GemmaCausalLM)


def test_hidden_states_layer_by_layer(whole):
    whole.check_hidden_states()


def test_bfloat16_is_as_close_to_float64_as_transformers(references, monkeypatch):
    """For one choice of experts, which near ties of rounded numbers decide in a whole model."""
    folder = references / "gemma4"
    held, model = read_npz(folder / "experts.npz"), folder / "experts" / "model"
    layer = GemmaCausalLM.from_preset(model, dtype="bfloat16").backbone.blocks[0].experts
    chosen = [keras.ops.convert_to_tensor(held[name]) for name in ("indices", "weights")]
    chosen[0] = keras.ops.cast(chosen[0], "int32")
    monkeypatch.setattr(Router, "call", lambda self, x: tuple(chosen))
    x = keras.ops.cast(held["x"][None], "bfloat16")
    ours = np.abs(to_numpy(keras.ops.cast(layer(x, x), "float32"))[0] - held["y64"]).mean()
    assert ours < 1.1 * np.abs(held["y16"] - held["y64"]).mean()


def test_greedy_tokens_with_cache(whole):
    whole.check_greedy_tokens()


def test_both_spellings_of_a_config(whole, tmp_path):
    text = json.loads((whole.path / "config.json").read_text())
    assert text["top_k_experts"] == 2 and text["moe_intermediate_size"] == 12
    heads = text.pop("per_layer_config")["0"]
    text["global_head_dim"] = heads["head_dim"]
    text["num_global_key_value_heads"] = heads["num_key_value_heads"]
    (tmp_path / "config.json").write_text(json.dumps(text))
    older = GemmaBackbone.from_preset(tmp_path, load_weights=False)
    assert older.config == whole.model.backbone.config


def reference(layer, x, source):
    """A layer of experts in float64, token by token."""
    held = {w.path.partition("/")[2]: to_numpy(w).astype("float64") for w in layer.weights}
    scaled = source / np.sqrt((source**2).mean(-1, keepdims=True) + layer.epsilon)
    logits = scaled * held["router/norm/scale"] @ held["router/projection/kernel"]
    logits = logits / np.sqrt(x.shape[-1])
    y = np.zeros(x.shape)
    for place in np.ndindex(x.shape[:-1]):
        share = np.exp(logits[place] - logits[place].max())
        share /= share.sum()
        chosen = np.argsort(-share)[: layer.num_experts_per_token]
        for expert in chosen:
            gate, up = np.split(x[place] @ held["gate_up/kernel"][expert], 2)
            gate = gate / (1 + np.exp(-gate))
            part = (gate * up) @ held["down/kernel"][expert]
            weight = share[expert] / share[chosen].sum() * held["router/expert_scale"][expert]
            y[place] += weight * part
    return y


@pytest.mark.parametrize("path", ["override", "generic"])
def test_the_layer_is_its_definition(path):
    """Another activation, a row of padding that all goes one way, and experts without a token."""
    draw = np.random.default_rng(1)
    x, source = draw.normal(size=(2, 2, 7, 16))
    source[1] = source[1, :1]
    layer = Experts(32, 3, 8, "silu", name="mine")
    layer.build((None, None, 16))
    for weight in layer.weights:
        weight.assign(draw.normal(1.0, 0.5, weight.shape) / (4 if "kernel" in weight.path else 1))
    expected = reference(layer, x, source)
    given = x.astype("float32"), source.astype("float32")
    if path == "generic":
        with kmodels.generic_only("grouped_dense"):
            found = layer(*given)
    else:
        found = layer(*given)
    error = np.abs(to_numpy(found) - expected).max() / np.abs(expected).max()
    assert error <= 10 * tolerance("grouped_dense")


def test_the_op_runs_its_override_and_both_agree():
    model = fresh()
    kmodels.reset_decisions()
    found = predicted(model, IDS)
    op = kmodels.ops.grouped_dense
    assert kmodels.decisions()["grouped_dense"]["override" if op.override else "generic"] >= 4
    with kmodels.generic_only("grouped_dense"):
        kmodels.reset_decisions()
        generic = predicted(model, IDS)
        assert kmodels.decisions()["grouped_dense"]["override"] == 0
    np.testing.assert_allclose(found, generic, rtol=0, atol=LIMIT * max(1, np.abs(found).max()))


def losses(model, steps=2, **compiled):
    model.compile(keras.optimizers.SGD(0.1), **compiled)
    history = [model.train_on_batch(IDS[:, :-1], IDS[:, 1:]) for _ in range(steps)]
    return [float(np.ravel(loss)[0]) for loss in history]


def test_training_moves_every_expert_with_a_token_and_remat_changes_nothing():
    model = fresh()
    before = {v.path: to_numpy(v).copy() for v in model.variables}
    wanted = losses(model)
    assert wanted[1] < wanted[0]
    still = {v.path for v in model.variables if np.array_equal(before[v.path], to_numpy(v))}
    assert still == {f"block_{i}/layer_scalar" for i in range(2)}
    for mode in ("block", "mlp"):
        model = fresh()
        remat.rematerialize(model, mode)
        assert losses(model) == pytest.approx(wanted, abs=tolerance("losses"))
    with kmodels.generic_only("grouped_dense"):
        assert losses(fresh()) == pytest.approx(wanted, abs=tolerance("losses"))


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16", "bfloat16"])
def test_fit(dtype):
    model = fresh(dtype)
    model.compile(keras.optimizers.SGD(0.3))
    ids = np.tile(IDS, (4, 1))
    found = model.fit(ids[:, :-1], ids[:, 1:], batch_size=4, epochs=3, verbose=0)
    history = found.history["loss"]
    assert np.isfinite(history).all() and history[-1] < history[0]


def test_files_and_clones_give_the_same_bits(tmp_path):
    model = fresh()
    logits = predicted(model, {"token_ids": IDS, "padding_mask": np.ones_like(IDS)})
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.backbone.config == model.backbone.config
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    model.save_to_preset(tmp_path / "own")
    own = GemmaCausalLM.from_preset(tmp_path / "own")
    for again in (loaded, clone, own):
        given = {"token_ids": IDS, "padding_mask": np.ones_like(IDS)}
        np.testing.assert_array_equal(predicted(again, given), logits)


def test_the_configs_of_the_layers():
    for layer in (
        Experts(6, 2, 8, "gelu", 1e-5, name="mine", dtype="mixed_bfloat16"),
        Router(6, 2, 1e-5, name="mine", trainable=False),
        GroupedDense(6, 8, "he_normal", name="mine"),
        GroupedDense(6, 8, name="mine"),
    ):
        config = json.loads(json.dumps(layer.get_config()))
        assert type(layer).from_config(config).get_config() == layer.get_config() == config
    x = keras.Input((None, 16))
    assert Experts(6, 2, 8)(x, x).shape == (None, None, 16)
    assert [part.shape for part in Router(6, 2)(x)] == [(None, None, 2)] * 2


def test_each_kernel_begins_as_if_alone():
    layer = GroupedDense(50, 30)
    layer.build((None, 20))
    spread = to_numpy(layer.kernel)
    assert np.abs(spread).max() <= np.sqrt(6 / 50) and spread.std() > 0.98 * np.sqrt(2 / 50)


@pytest.mark.parametrize("name", ["adapter_experts", "adapter_some"])
def test_adapters_of_peft_both_ways(references, tmp_path, name):
    folder = references / "gemma4"
    expected = read_npz(folder / f"{name}.npz")
    model = GemmaCausalLM.from_preset(folder / "all_experts" / "model")
    ids = expected["inputs"].astype("int32")
    limit = LIMIT * max(1, np.abs(expected["logits"]).max())
    model.load_adapter(folder / name)
    assert np.abs(expected["plain"] - expected["logits"]).max() > 100 * limit
    np.testing.assert_allclose(to_numpy(model(ids)), expected["logits"], rtol=0, atol=limit)
    model.save_adapter(tmp_path / "out")
    written, read = (
        read_safetensors(f / "adapter_model.safetensors") for f in (tmp_path / "out", folder / name)
    )
    assert set(written) == set(read)
    for key, tensor in read.items():
        np.testing.assert_array_equal(written[key].read(), tensor.read())
    ours, theirs = (
        json.loads((f / "adapter_config.json").read_text())
        for f in (tmp_path / "out", folder / name)
    )
    assert sorted(ours["target_parameters"]) == sorted(theirs["target_parameters"])
    again = GemmaCausalLM.from_preset(folder / "all_experts" / "model")
    again.load_adapter(tmp_path / "out")
    np.testing.assert_array_equal(to_numpy(again(ids)), to_numpy(model(ids)))


@pytest.mark.needs("peft")
@pytest.mark.across("torch")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_peft_loads_what_was_trained_here(references, tmp_path):
    import peft
    import torch

    from torchvision_cpu import define_torchvision_operators

    define_torchvision_operators()
    import transformers

    path = references / "gemma4" / "all_experts" / "model"
    ids = read_npz(references / "gemma4" / "adapter_experts.npz")["inputs"].astype("int32")
    for targets, parameters in (("query", EXPERTS), ((), (r"block_[13]/experts/down",))):
        model = GemmaCausalLM.from_preset(path)
        model.enable_lora(3, alpha=5, targets=targets, target_parameters=parameters)
        draw = np.random.default_rng(2)
        for variable in model.trainable_variables:
            variable.assign(0.2 * draw.normal(size=variable.shape))
        out = tmp_path / str(len(parameters))
        model.save_adapter(out)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(path)
        theirs = peft.PeftModel.from_pretrained(theirs, out)
        with torch.no_grad():
            logits = theirs(torch.as_tensor(ids)).logits.numpy()
        limit = LIMIT * max(1, np.abs(logits).max())
        np.testing.assert_allclose(to_numpy(model(ids)), logits, rtol=0, atol=limit)


def test_adapters_train_merge_and_come_back(tmp_path):
    model = fresh()
    logits = predicted(model, IDS)
    model.enable_lora(2, alpha=6, target_parameters=EXPERTS)
    np.testing.assert_array_equal(predicted(model, IDS), logits)
    trained = {v.path for v in model.trainable_variables}
    assert {f"block_1/{e}/lora_{m}" for e in EXPERTS for m in "ab"} < trained
    assert tuple(model.backbone.blocks[0].experts.down.adapter.a.shape) == (6, 24, 2)
    losses(model, steps=3)
    learned = predicted(model, IDS)
    limit = LIMIT * max(1, np.abs(logits).max())
    assert np.abs(learned - logits).max() > 100 * limit
    given = {"token_ids": IDS, "padding_mask": np.ones_like(IDS)}
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(predicted(loaded, given), predicted(model, given))
    model.save_lora_weights(tmp_path / "all.lora.h5")
    model.save_adapter(tmp_path / "adapter")
    kernel = to_numpy(model.backbone.blocks[0].experts.down.kernel).copy()
    model.merge_lora()
    np.testing.assert_allclose(predicted(model, IDS), learned, rtol=0, atol=limit)
    for load in ("load_adapter", "load_lora_weights"):
        again = fresh()
        getattr(again, load)(tmp_path / ("adapter" if load == "load_adapter" else "all.lora.h5"))
        again.merge_lora()
        for left, right in zip(model.weights, again.weights, strict=True):
            np.testing.assert_array_equal(to_numpy(left), to_numpy(right), err_msg=left.path)
    model.unmerge_lora()
    np.testing.assert_array_equal(to_numpy(model.backbone.blocks[0].experts.down.kernel), kernel)
    np.testing.assert_array_equal(predicted(model, IDS), learned)


def test_experts_have_adapters_by_choice_alone():
    model = fresh()
    model.enable_lora(2, targets="all-linear")
    adapted = {v.path.rpartition("/")[0] for v in model.trainable_variables}
    assert "block_0/experts/router/projection" in adapted
    assert not any(path.endswith(EXPERTS) for path in adapted)
    by_name = fresh()
    by_name.enable_lora(2, targets=(), target_parameters="experts.down_proj")
    assert {v.path.rpartition("/")[0] for v in by_name.trainable_variables} == {
        f"block_{i}/experts/down" for i in range(2)
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dropout": 0.1}, "LoRA has dropout 0.1, which adapters of experts lack; leave it out"),
        ({"dora": True}, "LoRA has dora, which adapters of experts lack"),
        ({"target_parameters": "mlp/down"}, "'mlp/down' is no kernel of experts of this model; th"),
        ({"target_parameters": "all-linear"}, "there are experts/down, experts/gate_up"),
        ({"targets": (), "target_parameters": ()}, "LoRA got no targets"),
    ],
)
def test_adapters_that_cannot_be(settings, message):
    model = fresh()
    with pytest.raises(InputError, match=message) as raised:
        model.enable_lora(2, **{"target_parameters": EXPERTS, **settings})
    assert "\n" not in str(raised.value) and not any("lora" in v.path for v in model.variables)


def test_models_without_experts_say_so():
    model = GemmaCausalLM.from_preset("gemma4_debug")
    with pytest.raises(InputError, match="kernel of experts of this model; it has none; leave it"):
        model.enable_lora(2, target_parameters=EXPERTS)


def test_quantized_experts_are_refused_before_anything_changes():
    model = fresh()
    message = "has a kernel for each expert, which there is in no 4 or 8 bits; leave the model in"
    with pytest.raises(InputError, match=message):
        model.quantize("int8")
    assert not any("kernel_int8" in v.path for v in model.variables)
    with pytest.raises(InputError, match=message):
        Plan("gemma4_moe_debug", Setup(1, 16, lora=kmodels.lora.LoraSettings(2), quantize="int4"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": None}, "num_experts is None; give"),
        ({"num_experts_per_token": 7}, "num_experts_per_token is 7, of 6 experts; give at most nu"),
        ({"num_experts_per_token": 0}, "num_experts_per_token is 0; give at least 1"),
        ({"expert_intermediate_dim": -4}, "expert_intermediate_dim is -4; give at least 1"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    with pytest.raises(InputError, match=message):
        GemmaConfig(**{**PRESETS["gemma4_moe_debug"], **change})


def test_an_unknown_activation_is_named():
    with pytest.raises(InputError, match="activation is 'relu'; choose gelu or silu"):
        Experts(6, 2, 8, "relu")


def test_parameters_in_all_and_of_a_token(tmp_path):
    # As transformers counts them, and its numbers of layers, which are buffers there.
    with keras_internals.without_values():
        assert GemmaBackbone.from_preset("gemma4_26b_a4b").count_params() == 25_233_141_760 + 30
    setup = Setup(1, 64, "bfloat16", accelerator=True)
    found = Plan("gemma4_26b_a4b", setup).to_dict()
    assert found["parameters"] == 25_233_141_790
    idle = 30 * 120 * 3 * 2816 * 704
    assert found["active_parameters"] == 25_233_141_790 - idle == 3_823_928_350 - 1_397_760
    model = fresh()
    assert model.backbone.count_params() < 100_000
    plan = Plan("gemma4_moe_debug", Setup(1, 16))
    assert plan.to_dict()["parameters"] == model.count_params()
    with pytest.raises(InputError, match=r"GGUF file of Gemma has no place for .*enable_moe_block"):
        model.export_to_gguf(tmp_path / "model.gguf")
