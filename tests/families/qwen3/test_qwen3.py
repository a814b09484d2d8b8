"""Qwen 3 against transformers: what `models/common` makes of a family that is not Gemma."""

import json
import shutil

import keras
import numpy as np
import pytest

from arrays import assert_same_tensors, read_npz, to_numpy
from decoder_case import DecoderCase
from kmodels.core.errors import InputError
from kmodels.models import Qwen3Backbone, Qwen3CausalLM, Qwen3Config
from kmodels.models.qwen3.presets import PRESETS
from kmodels.models.qwen3.weights import gguf as weights_gguf
from kmodels.weights import engine, read_safetensors
from tolerances import tolerance

CASES = ("tied", "untied", "bias")
SIZES = {
    "vocabulary_size": 24, "num_layers": 2, "num_query_heads": 4, "num_key_value_heads": 2,
    "head_dim": 6, "hidden_dim": 16, "intermediate_dim": 20,
}  # fmt: skip


@pytest.fixture(scope="module", params=CASES)
def case(request, references):
    return DecoderCase(references / "qwen3" / request.param, Qwen3CausalLM)


def test_hidden_states_and_logits(case):
    case.check_hidden_states()
    case.check_logits()


def test_the_output_layer_is_of_its_own_where_the_config_says_so(case):
    paths = [v.path for v in case.model.weights]
    untied = not case.model.backbone.config.tie_word_embeddings
    assert ("token_embedding/reverse_embeddings" in paths) == untied


def test_bfloat16_is_as_close_to_float64_as_transformers(case):
    case.check_bfloat16()


def test_greedy_tokens(case):
    prompts = [case.expected[f"prompt_{j}"] for j in range(3)]
    expected = [case.expected[f"greedy_{j}"] for j in range(3)]
    new = len(expected[0])
    ids = np.zeros((3, max(len(p) for p in prompts)), "int32")
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    mask = (np.arange(ids.shape[1]) < np.array([[len(p)] for p in prompts])).astype("int32")
    inputs = {"token_ids": ids, "padding_mask": mask}
    found = case.model.generate(inputs, stop_token_ids=None, max_new_tokens=new)["token_ids"]
    for row, prompt, tokens in zip(found, prompts, expected, strict=True):
        np.testing.assert_array_equal(row[len(prompt) : len(prompt) + new], tokens)


def test_export_is_what_was_read(case, tmp_path):
    case.model.export_to_transformers(tmp_path / "out")
    assert_same_tensors(tmp_path / "out", case.path)
    again = Qwen3CausalLM.from_preset(tmp_path / "out", load_weights=False)
    assert again.backbone.config == case.model.backbone.config
    case.model.backbone.export_to_transformers(tmp_path / "bare")
    bare = Qwen3Backbone.from_preset(tmp_path / "bare")
    for left, right in zip(case.model.backbone.weights, bare.weights, strict=True):
        assert left.path == right.path
        np.testing.assert_array_equal(to_numpy(left), to_numpy(right))


@pytest.mark.across("torch")
def test_transformers_loads_the_export(references, tmp_path):
    for name in CASES:
        DecoderCase(references / "qwen3" / name, Qwen3CausalLM).check_export(tmp_path / name)


def test_adapters_of_peft_both_ways(references, tmp_path):
    folder = references / "qwen3"
    expected = read_npz(folder / "adapter.npz")
    model = Qwen3CausalLM.from_preset(folder / "untied" / "model")
    ids = expected["inputs"].astype("int32")
    limit = tolerance("logits") * max(1, np.abs(expected["logits"]).max())
    np.testing.assert_allclose(to_numpy(model(ids)), expected["plain"], rtol=0, atol=limit)
    model.load_adapter(folder / "adapter")
    assert np.abs(expected["plain"] - expected["logits"]).max() > 100 * limit
    np.testing.assert_allclose(to_numpy(model(ids)), expected["logits"], rtol=0, atol=limit)
    model.save_adapter(tmp_path / "out")
    written, read = (
        read_safetensors(f / "adapter_model.safetensors")
        for f in (tmp_path / "out", folder / "adapter")
    )
    assert set(written) == set(read)
    for name, tensor in read.items():
        np.testing.assert_array_equal(written[name].read(), tensor.read())


@pytest.mark.parametrize("bias", [{}, {"attention_bias": True}])
@pytest.mark.parametrize("tied", [True, False])
def test_a_fit_trains_what_is_there(tied, bias):
    keras.utils.set_random_seed(0)
    ids = np.random.default_rng(0).integers(0, 24, (4, 7))
    model = Qwen3CausalLM(Qwen3Backbone(**SIZES, tie_word_embeddings=tied, **bias))
    before = {v.path: to_numpy(v).copy() for v in model.trainable_variables}
    model.compile(optimizer=keras.optimizers.Adam(1e-2))
    losses = model.fit(ids[:, :-1], ids[:, 1:], epochs=8, verbose=0).history["loss"]
    assert losses[-1] < 0.8 * losses[0]
    still = [v.path for v in model.trainable_variables if np.all(before[v.path] == to_numpy(v))]
    assert not still
    # The loss without logits is that of the logits.
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    logits = model(ids[:, :-1])
    model.compile()
    found = model.evaluate(ids[:, :-1], ids[:, 1:], verbose=0, return_dict=True)["loss"]
    assert found == pytest.approx(float(to_numpy(loss(ids[:, 1:], logits))), rel=1e-5)


def test_mixed_bfloat16_and_lora_train():
    ids = np.random.default_rng(0).integers(0, 24, (4, 7))
    model = Qwen3CausalLM(Qwen3Backbone(**SIZES, tie_word_embeddings=False, dtype="mixed_bfloat16"))
    model.backbone.enable_lora(rank=2)
    names = {v.path.rsplit("/", 1)[-1] for v in model.trainable_variables}
    assert names == {"lora_a", "lora_b"}
    model.compile(optimizer=keras.optimizers.Adam(1e-2))
    losses = model.fit(ids[:, :-1], ids[:, 1:], epochs=6, verbose=0).history["loss"]
    assert losses[-1] < losses[0]


@pytest.mark.once
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("qwen3_0.6b", 596_049_920),
        ("qwen3_1.7b", 1_720_574_976),
        ("qwen3_4b", 4_022_468_096),
        ("qwen3_8b", 8_190_735_360),
        ("qwen3_14b", 14_768_307_200),
        ("qwen3_32b", 32_762_123_264),
    ],
)
def test_presets_have_the_published_number_of_parameters(name, parameters):
    assert _parameters(Qwen3Config(**PRESETS[name])) == parameters
    debug = Qwen3Backbone.from_preset("qwen3_debug")
    assert debug.count_params() == _parameters(debug.config) < 100_000


def _parameters(c):
    attention = 2 * c.hidden_dim * c.head_dim * (c.num_query_heads + c.num_key_value_heads)
    block = attention + 3 * c.hidden_dim * c.intermediate_dim + 2 * c.hidden_dim + 2 * c.head_dim
    tables = 1 if c.tie_word_embeddings else 2
    return tables * c.vocabulary_size * c.hidden_dim + c.num_layers * block + c.hidden_dim


@pytest.mark.parametrize(
    ("name", "said", "message"),
    [
        (
            "bias",
            False,
            r"12 tensors without a variable: \S*self_attn\.\w_proj\.bias",
        ),
        ("tied", True, r"12 variables without a tensor: block_0/attention/query/bias"),
    ],
)
def test_biases_are_in_the_config_and_in_the_file_or_in_neither(
    references, tmp_path, name, said, message
):
    source = references / "qwen3" / name / "model"
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    text = json.loads((source / "config.json").read_text())
    assert text["attention_bias"] is not said
    (tmp_path / "config.json").write_text(json.dumps({**text, "attention_bias": said}))
    with pytest.raises(InputError, match=message) as raised:
        Qwen3Backbone.from_preset(tmp_path)
    assert "\n" not in str(raised.value)


def test_adapters_beside_biases_keep_what_they_learned(case, tmp_path):
    ids = case.expected["token_ids"].astype("int32")
    model = Qwen3CausalLM.from_preset(case.path)
    model.backbone.enable_lora(rank=2, targets=["query", "output"])
    model.compile(optimizer=keras.optimizers.Adam(1e-2))
    model.fit(ids[:, :-1], ids[:, 1:], epochs=2, verbose=0)
    learned = to_numpy(model(ids))
    assert np.abs(learned - to_numpy(case.model(ids))).max() > 1e-2
    model.save_adapter(tmp_path / "adapter")
    again = Qwen3CausalLM.from_preset(case.path)
    again.load_adapter(tmp_path / "adapter")
    limit = tolerance("logits")
    np.testing.assert_allclose(to_numpy(again(ids)), learned, rtol=0, atol=limit)
    model.merge_lora()
    np.testing.assert_allclose(to_numpy(model(ids)), learned, rtol=0, atol=limit)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "relu"}, "no counterpart for an activation 'relu'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
        ({"use_sliding_window": True, "sliding_window": 4}, "windows in some layers alone"),
    ],
)
def test_settings_without_counterpart_are_named(references, tmp_path, change, message):
    source = references / "qwen3" / "tied" / "model"
    text = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**text, **change}))
    with pytest.raises(InputError, match=message):
        Qwen3Backbone.from_preset(tmp_path, load_weights=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_max_wavelength": 0}, "rope_max_wavelength is 0; give a positive number"),
        ({"sliding_window_size": 0}, "sliding_window_size is 0; give at least 1"),
        ({"num_key_value_heads": 3}, "3 key/value heads do not divide 4 query heads"),
        ({"rope_theta": 1e6}, "takes no rope_theta"),
    ],
)
def test_a_config_is_checked(change, message):
    with pytest.raises(InputError, match=message):
        Qwen3Backbone(**{**SIZES, **change})


def test_positional_arguments_are_in_keras_hubs_order():
    backbone = Qwen3Backbone(*SIZES.values())
    assert {name: getattr(backbone.config, name) for name in SIZES} == SIZES


@pytest.mark.needs("gguf")
@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_file_is_read(tied, tmp_path):
    backbone = Qwen3Backbone(**SIZES, tie_word_embeddings=tied, rope_max_wavelength=1e6)
    _write_gguf(tmp_path / "model.gguf", backbone)
    again = Qwen3Backbone.from_preset(tmp_path / "model.gguf")
    assert again.config == backbone.config
    for left, right in zip(backbone.weights, again.weights, strict=True):
        np.testing.assert_array_equal(to_numpy(left), to_numpy(right))


@pytest.mark.needs("gguf")
def test_a_gguf_file_with_biases_is_refused(tmp_path):
    biases = {"blk.0.attn_q.bias": np.zeros(24, "float32")}
    _write_gguf(tmp_path / "model.gguf", Qwen3Backbone(**SIZES), biases)
    message = r"has biases \(blk.0.attn_q.bias, ...\), and a GGUF file of Qwen 3 has none; give"
    with pytest.raises(InputError, match=message):
        Qwen3Backbone.from_preset(tmp_path / "model.gguf")
    with pytest.raises(InputError, match="no place for 8 variables: block_0/attention/query/bias"):
        _write_gguf(tmp_path / "other.gguf", Qwen3Backbone(**SIZES, attention_bias=True))


def _write_gguf(path, backbone, more=None):
    import gguf

    config = backbone.config
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(config.num_layers)
    writer.add_embedding_length(config.hidden_dim)
    writer.add_feed_forward_length(config.intermediate_dim)
    writer.add_head_count(config.num_query_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_rope_freq_base(config.rope_max_wavelength)
    for name, tensor in engine.export(backbone, weights_gguf.rules(config)).items():
        writer.add_tensor(name, np.ascontiguousarray(tensor.read()))
    for name, array in (more or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
