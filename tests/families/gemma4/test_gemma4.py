"""A Gemma 4 of texts, dense and with experts: its features, training, adapters and files."""

import json

import keras
import numpy as np
import pytest

import kmodels
from arrays import read_npz, to_numpy
from kmodels.core import keras_internals
from kmodels.layers import Experts, GroupedDense, Router
from kmodels.models import GemmaBackbone, GemmaCausalLM, GemmaConfig
from kmodels.models.blocks.decoder_block import PerLayerEmbedding
from kmodels.models.gemma.presets import PRESETS
from kmodels.tools.plan import Plan
from kmodels.tools.plan.estimate import Setup
from refusals import refused
from tolerances import tolerance

LOCAL, GLOBAL = "sliding_attention", "full_attention"
IDS = np.random.default_rng(0).integers(3, 320, (2, 19)).astype("int32")
INPUTS = {"token_ids": IDS, "padding_mask": np.ones_like(IDS)}
EXPERTS = ("experts/gate_up", "experts/down")
LIMIT = tolerance("logits")


def fresh(preset="gemma4_debug", dtype=None, **settings):
    """A debug model, with norms and scales at which every part counts."""
    keras.utils.set_random_seed(3)
    model = GemmaCausalLM(GemmaBackbone(**{**PRESETS[preset], **settings}, dtype=dtype))
    draw = np.random.default_rng(4)
    for weight in model.weights:
        if "norm" in weight.path or "scal" in weight.path:
            weight.assign(draw.normal(1.0, 0.4, weight.shape))
    return model


def predicted(model, inputs=INPUTS):
    return model.predict(inputs, verbose=0)


def losses(model):
    model.compile(keras.optimizers.SGD(0.1))
    given = IDS[:, :-1], IDS[:, 1:]
    return [float(model.train_on_batch(*given, return_dict=True)["loss"]) for _ in range(2)]


@pytest.fixture(scope="module")
def model():
    return fresh()


@pytest.fixture(scope="module")
def logits(model):
    return predicted(model)


def forget_value_norms(model):
    for block in model.backbone.blocks:
        block.attention.value_norm = None


def narrow_shared_mlps(model):
    down = model.backbone.blocks[-1].mlp.down.kernel
    half = to_numpy(down).copy()
    half[half.shape[0] // 2 :] = 0
    down.assign(half)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("plain", {"layer_types": [GLOBAL, LOCAL, GLOBAL, GLOBAL]}),
        ("plain", {"query_pre_attention_scalar": None}),
        ("plain", {"norm_offset": 1.0}),
        ("plain", {"sliding_window_size": 6}),
        ("plain", forget_value_norms),
        ("plain", ("layer_scalar", 1.0)),
        ("key_is_value", forget_value_norms),
        ("shared", {"layer_types": [LOCAL, GLOBAL, LOCAL, GLOBAL]}),
        ("double_wide", narrow_shared_mlps),
        ("per_layer", ("per_layer_embedding/table", 0.0)),
        ("per_layer", ("per_layer_embedding/model_projection", 0.0)),
        ("turned", {"global_rope_partial_rotary_factor": 1.0}),
        ("capped", {"final_logit_soft_cap": None}),
        ("experts", {"num_experts_per_token": 3}),
        ("experts", ("expert_scale", 1.0)),
        ("experts", ("experts_result_norm", 0.0)),
    ],
)
def test_every_feature_counts(references, name, change):
    """Without a feature the logits are not those of the reference, which would tell."""
    folder = references / "gemma4" / name
    settings = change if isinstance(change, dict) else {}
    model = GemmaCausalLM.from_preset(folder / "model", **settings)
    if callable(change):
        change(model)
    if isinstance(change, tuple):
        part, value = change
        weights = [weight for weight in model.weights if part in weight.path]
        assert weights
        for weight in weights:
            weight.assign(np.full(weight.shape, value))
    expected = read_npz(folder / "expected.npz")
    found = to_numpy(model(expected["token_ids"].astype("int32")))
    assert np.abs(found - expected["logits"]).max() > 100 * LIMIT


def test_blocks_that_share_have_no_keys_values_or_cache(model):
    backbone = model.backbone
    assert backbone.count_params() < 100_000 and backbone.config.generation == 4
    for index, block in enumerate(backbone.blocks):
        held = {weight.path.split("/")[2] for weight in block.attention.weights}
        own = {"key", "key_norm"} | ({"value"} if index == 0 else set())
        assert held == {"query", "output", "query_norm"} | (own if index < 2 else set())
    assert backbone.cache_shapes == [(2, 8), (1, 16)] and backbone.cache_windows == [8, None]
    assert backbone.cache_numbers == [0, 1, 0, 1]


def test_beams_are_those_of_the_whole_model(model):
    found = {}
    for sampler in ("beam", "greedy"):
        model.use_sampler(sampler)
        rows = model.generate(IDS[:, :11], max_length=24, stop_token_ids=None)
        found[sampler] = rows["token_ids"]

    def likely(ids):
        values = predicted(model, ids)[:, 10:-1].astype("float64")
        values -= np.log(np.exp(values).sum(-1, keepdims=True))
        return np.take_along_axis(values, ids[:, 11:, None], -1).sum((1, 2))

    assert (found["beam"] != found["greedy"]).any()
    assert (likely(found["beam"]) >= likely(found["greedy"]) - LIMIT).all()


def test_intermediates_and_what_is_put_between_blocks(model, logits):
    found = model.backbone.intermediates(IDS)
    assert list(found) == ["token_embedding", *(f"block_{i}" for i in range(4)), "final_norm"]
    seen = {}
    score = model.score(IDS, layer_intercept_fn=lambda x, i: seen.setdefault(i, x))
    np.testing.assert_allclose(to_numpy(score), logits, rtol=0, atol=LIMIT)
    for number, name in enumerate(found, -1):
        if number in seen:
            np.testing.assert_allclose(
                to_numpy(seen[number]), to_numpy(found[name]), rtol=0, atol=LIMIT
            )
    moved = model.score(IDS, layer_intercept_fn=lambda x, i: x * (2.0 if i == 0 else 1.0))
    assert np.abs(to_numpy(moved) - logits).max() > 100 * LIMIT


def test_training_by_the_generic_op_is_the_same():
    wanted = losses(fresh("gemma4_moe_debug"))
    with kmodels.generic_only("grouped_dense"):
        assert losses(fresh("gemma4_moe_debug")) == pytest.approx(wanted, abs=tolerance("losses"))


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16", "bfloat16"])
def test_experts_learn_in_each_dtype(dtype):
    model = fresh("gemma4_moe_debug", dtype)
    model.compile(keras.optimizers.SGD(0.3))
    ids = np.tile(IDS, (4, 1))
    found = model.fit(ids[:, :-1], ids[:, 1:], batch_size=4, epochs=3, verbose=0)
    history = found.history["loss"]
    assert np.isfinite(history).all() and history[-1] < history[0]


def test_a_quantized_base_trains_its_adapters():
    model = fresh()
    model.quantize("int8")
    kernels = [v.path for v in model.variables if v.path.endswith("kernel_int8")]
    assert len(kernels) == 4 * 7 - 5 + 4 * 2 + 1  # five keys and values are not there
    model.enable_lora(2)
    first, second = losses(model)
    assert second < first


def test_both_tables_are_resized():
    model = fresh(vocab_size_per_layer_input=340)
    before = predicted(model)
    model.resize_token_embeddings(331)
    config = model.backbone.config
    assert (config.vocabulary_size, config.per_layer_vocabulary) == (331, 331)
    assert model.backbone.per_layer_embedding.table.embeddings.shape == (331, 32)
    np.testing.assert_allclose(predicted(model)[..., :320], before, rtol=0, atol=LIMIT)
    again = GemmaCausalLM.from_config(model.get_config())
    assert [w.shape for w in again.weights] == [w.shape for w in model.weights]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["global"] * 4}, "layer_types has 'global'; give 'sliding_attention'"),
        ({"layer_types": [LOCAL, GLOBAL]}, "layer_types names 2 layers of 4; give one for each"),
        ({"global_head_dim": 7}, "global_head_dim is 7; rotary"),
        ({"num_global_key_value_heads": 3}, "3 global key/value heads do not divide 4 query heads"),
        ({"num_kv_shared_layers": 3}, "no layer before them has full_attention to share"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers is 4, and no layer before them"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers is -1; give at least 0"),
        ({"vocab_size_per_layer_input": 0}, "vocab_size_per_layer_input is 0; give at least 320"),
        ({"vocab_size_per_layer_input": 319}, "layer_input is 319; give at least 320"),
        ({"global_rope_partial_rotary_factor": 1.5}, "is 1.5; give a share in"),
        ({"num_experts": None}, "num_experts is None; give"),
        ({"num_experts_per_token": 7}, "num_experts_per_token is 7, of 6 experts; give at most nu"),
        ({"num_experts_per_token": 0}, "num_experts_per_token is 0; give at least 1"),
        ({"expert_intermediate_dim": -4}, "expert_intermediate_dim is -4; give at least 1"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    preset = "gemma4_moe_debug" if "expert" in message else "gemma4_debug"
    refused(message, GemmaConfig, **{**PRESETS[preset], **change})


def test_formats_without_a_place_for_it_say_so(model, tmp_path):
    assert model.get_quantization_layer_structure("gptq") is None  # blocks take more than x
    for change, message in (
        ({"use_value_norm": False}, "has no counterpart for use_value_norm=False"),
        ({"layer_types": [GLOBAL, LOCAL] * 2}, "for a last layer with sliding_attention"),
        ({"norm_offset": 1.0}, "for global_head_dim, num_global_key_value_heads, attention_k"),
    ):
        other = GemmaBackbone(**{**PRESETS["gemma4_debug"], **change})
        refused(message, other.export_to_transformers, tmp_path / "out")


@pytest.mark.each_time("gemma4_e2b-4628569379", "gemma4_26b_a4b-25233141790")
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # As transformers counts them, its numbers of layers included, which are buffers there.
        ("gemma4_e2b", 4_628_569_344 + 35),
        ("gemma4_e4b", 7_463_013_376 + 42),
        ("gemma4_12b", 11_907_350_272 + 48),
        ("gemma4_31b", 30_697_345_280 + 60),
        ("gemma4_26b_a4b", 25_233_141_760 + 30),
    ],
)
def test_presets_have_the_number_of_parameters_of_transformers(name, parameters):
    with keras_internals.without_values():
        assert GemmaBackbone.from_preset(name).count_params() == parameters


def test_parameters_in_all_and_of_a_token():
    found = Plan("gemma4_26b_a4b", Setup(1, 64, "bfloat16", accelerator=True)).to_dict()
    assert found["parameters"] == 25_233_141_790
    idle = 30 * 120 * 3 * 2816 * 704
    assert found["active_parameters"] == 25_233_141_790 - idle == 3_823_928_350 - 1_397_760
    count = GemmaBackbone.from_preset("gemma4_moe_debug").count_params()
    assert Plan("gemma4_moe_debug", Setup(1, 16)).to_dict()["parameters"] == count < 100_000


# === Layers ===


def test_the_configs_of_the_layers():
    for layer in (
        Experts(6, 2, 8, "gelu", 1e-5, name="mine", dtype="mixed_bfloat16"),
        Router(6, 2, 1e-5, name="mine", trainable=False),
        GroupedDense(6, 8, "he_normal", name="mine"),
        GroupedDense(6, 8, name="mine"),
        PerLayerEmbedding(11, 3, 4, epsilon=1e-5, offset=1.0, name="mine"),
    ):
        config = json.loads(json.dumps(layer.get_config()))
        assert type(layer).from_config(config).get_config() == layer.get_config() == config
    x, ids = keras.Input((None, 16)), keras.Input((None,), dtype="int32")
    assert Experts(6, 2, 8)(x, x).shape == (None, None, 16)
    assert [part.shape for part in Router(6, 2)(x)] == [(None, None, 2)] * 2
    assert [part.shape for part in layer(ids, keras.Input((None, 8)))] == [(None, None, 4)] * 3
    refused("activation is 'relu'; choose gelu or silu", Experts, 6, 2, 8, "relu")


def test_each_kernel_begins_as_if_alone():
    layer = GroupedDense(50, 30)
    layer.build((None, 20))
    spread = to_numpy(layer.kernel)
    assert np.abs(spread).max() <= np.sqrt(6 / 50) and spread.std() > 0.98 * np.sqrt(2 / 50)


def reference(layer, x, source):
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


def test_experts_are_their_definition():
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
    found = [layer(*given)]
    with kmodels.generic_only("grouped_dense"):
        found.append(layer(*given))
    for y in found:
        error = np.abs(to_numpy(y) - expected).max() / np.abs(expected).max()
        assert error <= 10 * tolerance("grouped_dense")


@pytest.mark.each_backend  # which function of a backend is chosen
def test_the_op_runs_its_override_and_both_agree():
    model = fresh("gemma4_moe_debug")
    kmodels.reset_decisions()
    found = predicted(model)
    op = kmodels.ops.grouped_dense
    assert kmodels.decisions()["grouped_dense"]["override" if op.override else "generic"] >= 4
    with kmodels.generic_only("grouped_dense"):
        kmodels.reset_decisions()
        generic = predicted(model)
        assert kmodels.decisions()["grouped_dense"]["override"] == 0
    np.testing.assert_allclose(found, generic, rtol=0, atol=LIMIT * max(1, np.abs(found).max()))


@pytest.mark.each_backend  # the table compares no whole model, whose choice near ties decide
def test_experts_in_bfloat16_are_as_close_to_float64_as_transformers(references, monkeypatch):
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


# === Adapters ===


def test_experts_have_adapters_by_choice_alone():
    model = fresh("gemma4_moe_debug")
    model.enable_lora(2, targets="all-linear")
    adapted = {v.path.rpartition("/")[0] for v in model.trainable_variables}
    assert "block_0/experts/router/projection" in adapted
    assert not any(path.endswith(EXPERTS) for path in adapted)
    by_name = fresh("gemma4_moe_debug")
    by_name.enable_lora(2, targets=(), target_parameters="experts.down_proj")
    assert {v.path.rpartition("/")[0] for v in by_name.trainable_variables} == {
        f"block_{i}/experts/down" for i in range(2)
    }
    assert tuple(by_name.backbone.blocks[0].experts.down.adapter.a.shape) == (6, 24, 2)
    both = fresh("gemma4_moe_debug")
    both.enable_lora(2, target_parameters=EXPERTS)
    trained = {v.path for v in both.trainable_variables}
    assert {f"block_1/{e}/lora_{m}" for e in EXPERTS for m in "ab"} < trained


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dropout": 0.1}, "LoRA has dropout 0.1, which adapters of experts lack; leave it out"),
        ({"dora": True}, "LoRA has dora, which adapters of experts lack"),
        ({"target_parameters": "mlp/down"}, "'mlp/down' is no kernel of experts of this model; th"),
        ({"target_parameters": "all-linear"}, "there are experts/down, experts/gate_up"),
        ({"targets": (), "target_parameters": ()}, "LoRA got no targets"),
        ({}, "kernel of experts of this model; it has none; leave it"),
    ],
)
def test_adapters_that_cannot_be(settings, message):
    model = fresh("gemma4_moe_debug" if settings else "gemma4_debug")
    refused(message, model.enable_lora, 2, **{"target_parameters": EXPERTS, **settings})
    assert not any("lora" in v.path for v in model.variables)


@pytest.mark.needs("peft")
@pytest.mark.across("torch")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_peft_loads_adapters_of_experts_that_were_trained_here(references, tmp_path):
    import peft
    import torch
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
