"""Adapters of the embedding table and of an output layer with a table of its own."""

import copy
import json

import keras
import numpy as np
import pytest

from arrays import assert_equal, to_numpy
from kmodels import lora
from kmodels.layers.changes import adapters
from kmodels.models import GemmaBackbone, GemmaCausalLM
from kmodels.weights import LazyArray, read_safetensors, write_safetensors
from refusals import refused
from tolerances import tolerance

SIZES = {"vocabulary_size": 50, "num_layers": 1, "num_query_heads": 2, "num_key_value_heads": 1}
SIZES |= {"hidden_dim": 16, "intermediate_dim": 32, "head_dim": 8, "final_logit_soft_cap": 3.0}
TARGETS = ("query", "token_embedding", "reverse_embeddings")
IDS = np.random.default_rng(0).integers(1, 50, (4, 8)).astype("int32")
IDS[:, ::3] = [[4, 31, 4]]
X, Y = IDS[:, :-1], IDS[:, 1:]
OF_TABLES = [
    *("token_embedding/lora_a", "token_embedding/lora_b"),
    *("token_embedding/reverse_lora_a", "token_embedding/reverse_lora_b"),
]


def task(**settings):
    keras.utils.set_random_seed(1)
    return GemmaCausalLM(GemmaBackbone(**SIZES, tie_word_embeddings=False, **settings))


def adapted(dtype=None, rank=2, **settings):
    """A model whose adapters are as after training."""
    model = task(dtype=dtype)
    model.enable_lora(rank, alpha=3.0, **{"targets": TARGETS, **settings})
    rng = np.random.default_rng(5)
    for variable in model.trainable_weights:
        noise = rng.normal(size=variable.shape).astype("float32") * 0.3
        variable.assign(to_numpy(variable.value) + noise)
    return model


def logits(model, ids=IDS):
    return to_numpy(model({"token_ids": ids, "padding_mask": np.ones_like(ids)}))


def values(model):
    return {v.path: np.array(to_numpy(v.value)) for v in model.weights}


@pytest.mark.each_time("True", on=("jax", "tensorflow"))
@pytest.mark.parametrize("dora", [False, True])
def test_the_loss_from_hidden_states_is_that_of_logits(dora):
    losses, trained, near = [], [], tolerance("optimizer")
    for metrics in (None, ["accuracy"]):
        model = task()
        start = logits(model)
        model.enable_lora(2, targets=TARGETS, dora=dora)
        np.testing.assert_allclose(logits(model), start, rtol=0, atol=1e-6)
        before = values(model)
        model.compile(keras.optimizers.SGD(0.5), metrics=metrics)
        assert model.head.chosen == (metrics is None)
        found = model.fit(X, Y, batch_size=4, epochs=3, shuffle=False, verbose=0)
        losses.append(found.history["loss"])
        losses.append([model.evaluate(X, Y, batch_size=4, verbose=0)[0]])
        after = values(model)
        names = {v.path for v in model.trainable_weights}
        assert names >= set(OF_TABLES)
        assert {name for name in after if np.any(after[name] != before[name])} == names
        trained.append({name: after[name] for name in names})
    assert losses[0][2] < losses[0][0]
    np.testing.assert_allclose(losses[0], losses[2], rtol=1e-5)
    np.testing.assert_allclose(losses[1], losses[3], rtol=1e-5)
    assert_equal(trained[0], trained[1], near)


def test_what_drops_out_is_in_front_of_the_output_layer_alone():
    model = adapted(dropout=0.5, targets=("token_embedding", "reverse_embeddings"))
    hidden = np.random.default_rng(0).normal(size=(2, 3, 16)).astype("float32")
    table = model.backbone.token_embedding
    fixed, dropped = (to_numpy(table(hidden, reverse=True, training=x)) for x in (False, True))
    assert np.abs(fixed - dropped).max() > 0.01
    rows = [to_numpy(table(IDS, training=x)) for x in (False, True)]
    np.testing.assert_array_equal(*rows)
    model.compile(keras.optimizers.SGD(0.0))
    losses = [model.fit(X, Y, verbose=0).history["loss"][0] for _ in range(2)]
    assert losses[0] != losses[1]
    assert model.evaluate(X, Y, verbose=0) == model.evaluate(X, Y, verbose=0)


@pytest.mark.each_time("True-bfloat16", "False-float32", on=("jax", "tensorflow"))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dora", [False, True])
def test_off_merged_and_back(dtype, dora):
    base, before = logits(task(dtype=dtype)), values(task(dtype=dtype))
    model = adapted(dtype, dora=dora)
    tuned = logits(model)
    assert np.abs(tuned - base).max() > 0.05
    predicted = model.predict(IDS, verbose=0)
    with lora.disabled(model):
        np.testing.assert_array_equal(logits(model), base)
        assert np.abs(model.predict(IDS, verbose=0) - predicted).max() > 0.05
    np.testing.assert_array_equal(logits(model), tuned)
    np.testing.assert_array_equal(model.predict(IDS, verbose=0), predicted)
    model.merge_lora()
    assert values(model).keys() == before.keys()
    near = tolerance("logits_across") if dtype == "float32" else 0.05
    np.testing.assert_allclose(logits(model), tuned, rtol=0, atol=near)
    model.unmerge_lora()
    np.testing.assert_array_equal(logits(model), tuned)
    after = values(model)
    assert_equal({path: after[path] for path in before}, before)


def test_generation_has_the_adapters():
    model = adapted()
    merged = copy.deepcopy(model)
    merged.merge_lora()
    prompt, settings = {"token_ids": IDS[:, :3]}, {"max_new_tokens": 4, "stop_token_ids": None}
    found, wanted = (m.generate(prompt, **settings)["token_ids"] for m in (model, merged))
    np.testing.assert_array_equal(found, wanted)


def by_keras(model, folder):
    model.save(folder / "model.keras")
    return keras.saving.load_model(folder / "model.keras")


def by_preset(model, folder):
    model.save_to_preset(folder / "preset")
    return GemmaCausalLM.from_preset(folder / "preset")


def by_weights(model, folder):
    model.save_weights(folder / "model.weights.h5")
    again = adapted()
    for variable in again.trainable_weights:
        variable.assign(keras.ops.ones(variable.shape))
    again.load_weights(folder / "model.weights.h5")
    return again


def by_lora_weights(model, folder):
    model.save_lora_weights(folder / "x.lora.h5")
    again = task()
    again.load_lora_weights(folder / "x.lora.h5")
    return again


def by_adapter(model, folder):
    model.save_adapter(folder / "adapter")
    again = adapted(rank=3, targets="all-linear")  # which give way
    again.load_adapter(folder / "adapter")
    return again


def by_copy(model, folder):
    return copy.deepcopy(model)


@pytest.mark.each_time("by_weights", "by_adapter", on=("jax", "tensorflow"))
@pytest.mark.parametrize(
    "way", [by_keras, by_preset, by_weights, by_lora_weights, by_adapter, by_copy]
)
def test_adapters_of_tables_travel(way, tmp_path):
    model = adapted()
    wanted = logits(model)
    again = way(model, tmp_path)
    np.testing.assert_allclose(logits(again), wanted, rtol=0, atol=tolerance("logits_across"))
    assert list(adapters(again)) == list(adapters(model))
    paths = [[v.path for v in m.trainable_weights] for m in (model, again)]
    assert paths[0] == paths[1]
    adapters(again)["token_embedding"].start()
    assert np.abs(logits(again) - wanted).max() > 0.01, "an adapter of its own"


def test_weights_go_into_tables_without_and_others_are_refused(tmp_path):
    model, plain, other = adapted(), task(), adapted(rank=3)
    model.save_weights(tmp_path / "adapted.weights.h5")
    plain.save_weights(tmp_path / "plain.weights.h5")
    plain.load_weights(tmp_path / "adapted.weights.h5")
    np.testing.assert_allclose(logits(plain), logits(model), rtol=0, atol=1e-5)
    before = logits(other)
    message = "token_embedding: its adapter has rank 3, the file's 2"
    refused(message, other.load_weights, tmp_path / "adapted.weights.h5")
    np.testing.assert_array_equal(logits(other), before)
    other.load_weights(tmp_path / "plain.weights.h5")
    np.testing.assert_allclose(logits(other), logits(task()), rtol=0, atol=1e-6)


@pytest.mark.once
def test_a_file_with_matrices_and_rows_of_a_table_is_refused(tmp_path):
    adapted().save_adapter(tmp_path)
    file, config = tmp_path / "adapter_model.safetensors", tmp_path / "adapter_config.json"
    described = json.loads(config.read_text())
    config.write_text(json.dumps({**described, "trainable_token_indices": [3]}))
    rows = LazyArray((1, 16), np.dtype("float32"), lambda: np.zeros((1, 16), "float32"))
    name = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    held = {key: tensor.read() for key, tensor in read_safetensors(tmp_path).items()}
    held = {key: LazyArray(x.shape, x.dtype, lambda x=x: x) for key, x in held.items()}
    write_safetensors(file, {**held, name: rows})
    model = task()
    message = "both LoRA matrices and trained rows of token_embedding; write one"
    refused(message, model.load_adapter, tmp_path)
    assert not adapters(model)


def test_a_table_has_an_adapter_or_rows_and_keeps_its_size():
    model = task()
    both = {"targets": ["token_embedding"], "trainable_token_indices": [3]}
    refused("token_embedding is a target, so", lambda: model.enable_lora(2, **both))
    assert not adapters(model)
    model.enable_lora(2, targets=["reverse_embeddings"], trainable_token_indices=[3])
    refused("call resize_token_embeddings before", model.resize_token_embeddings, 70)
