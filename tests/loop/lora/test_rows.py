"""Rows of the embedding table, all of it, or adapters of it and of an output layer."""

import copy
import json

import keras
import numpy as np
import pytest

from arrays import assert_equal, to_numpy
from kmodels import lora
from kmodels.core import keras_internals
from kmodels.layers.changes import adapters, rows
from kmodels.models import GemmaBackbone, GemmaCausalLM, ViTBackbone
from kmodels.weights import LazyArray, read_safetensors, write_safetensors
from refusals import refused
from tolerances import tolerance

SIZES = {"vocabulary_size": 50, "num_layers": 1, "num_query_heads": 2, "num_key_value_heads": 1}
SIZES |= {"hidden_dim": 16, "intermediate_dim": 32, "head_dim": 8, "final_logit_soft_cap": 3.0}
CHOSEN = [31, 4, 49]
IDS = np.random.default_rng(0).integers(1, 50, (4, 8)).astype("int32")
IDS[:, ::3] = [[4, 31, 4]]
X, Y = IDS[:, :-1], IDS[:, 1:]
TARGETS = ("query", "token_embedding", "reverse_embeddings")
OF_TABLES = [
    *("token_embedding/lora_a", "token_embedding/lora_b"),
    *("token_embedding/reverse_lora_a", "token_embedding/reverse_lora_b"),
]


def task(**settings):
    keras.utils.set_random_seed(1)
    return GemmaCausalLM(GemmaBackbone(**SIZES, **settings))


def untied(**settings):
    return task(tie_word_embeddings=False, **settings)


def with_rows(ids=CHOSEN, **settings):
    """A model whose rows and adapters are as after training."""
    model = task(**settings)
    model.backbone.enable_lora(2, trainable_token_indices=ids)
    return shaken(model)


def adapted(dtype=None, rank=2, **settings):
    """A model with adapters of both tables, as after training."""
    model = untied(dtype=dtype)
    model.enable_lora(rank, alpha=3.0, **{"targets": TARGETS, **settings})
    return shaken(model)


def shaken(model):
    rng = np.random.default_rng(5)
    for variable in model.trainable_weights:
        noise = rng.normal(size=variable.shape).astype("float32") * 0.3
        variable.assign(to_numpy(variable.value) + noise)
    return model


@pytest.fixture(scope="module")
def plain():
    return task()


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """What `with_rows` writes, which tests copy."""
    return with_rows().save_adapter(tmp_path_factory.mktemp("written") / "ours")


def logits(model, ids=IDS):
    return to_numpy(model({"token_ids": ids, "padding_mask": np.ones_like(ids)}))


def values(model):
    return {v.path: np.array(to_numpy(v.value)) for v in model.weights}


@pytest.mark.each_time("hidden states", on=("jax", "tensorflow"))
@pytest.mark.parametrize("metrics", [None, ["accuracy"]], ids=["hidden states", "logits"])
def test_rows_learn_what_the_same_rows_of_a_trained_table_learn(metrics):
    whole = task()
    start = logits(whole)
    whole.enable_lora(2, modules_to_save=["embed_tokens"])
    some = task()
    some.enable_lora(2, trainable_token_indices=CHOSEN)
    np.testing.assert_allclose(logits(some), start, rtol=0, atol=tolerance("logits_across"))
    before, losses = values(some), []
    for model in (whole, some):
        model.compile(keras.optimizers.SGD(0.5), metrics=metrics)
        assert model.head.chosen == (metrics is None)
        losses.append(model.fit(X, Y, batch_size=4, verbose=0).history["loss"])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)
    wanted, found = values(whole), values(some)
    learnt = found.pop("token_embedding/lora_rows")
    table = wanted.pop("token_embedding/lora_embeddings")
    for kept in (wanted, found):
        np.testing.assert_array_equal(
            kept.pop("token_embedding/embeddings"), before["token_embedding/embeddings"]
        )
    assert np.abs(learnt - before["token_embedding/lora_rows"]).max() > 1e-2
    assert_equal([learnt], [table[sorted(CHOSEN)]], tolerance("optimizer"))
    assert_equal(found, wanted, tolerance("optimizer"))
    # Rows of its own, and in nothing else.
    assert {v.path for v in some.trainable_weights} == {
        *(f"block_0/attention/{part}/lora_{x}" for part in ("query", "value") for x in "ab"),
        "token_embedding/lora_rows",
    }


@pytest.mark.each_time("True", on=("jax", "tensorflow"))
@pytest.mark.parametrize("dora", [False, True])
def test_the_loss_from_hidden_states_is_that_of_logits(dora):
    losses, trained, near = [], [], tolerance("optimizer")
    for metrics in (None, ["accuracy"]):
        model = untied()
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


@pytest.mark.each_time("rows-bfloat16", "dora-bfloat16", "lora-float32", on=("jax", "tensorflow"))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["rows", "lora", "dora"])
def test_off_merged_and_back(kind, dtype):
    model = (task if kind == "rows" else untied)(dtype=dtype)
    base, before = logits(model), values(model)
    if kind == "rows":
        model.enable_lora(2, trainable_token_indices={"embed_tokens": CHOSEN, "lm_head": CHOSEN})
        shaken(model)
    else:
        model = adapted(dtype, dora=kind == "dora")
    tuned = logits(model)
    assert np.abs(tuned - base)[..., CHOSEN].max() > 0.05
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


@pytest.mark.parametrize(
    "make", [pytest.param(with_rows, marks=pytest.mark.nightly("tensorflow")), adapted]
)
def test_generation_has_what_was_trained(make):
    model = make()
    merged = copy.deepcopy(model)
    merged.merge_lora()
    prompt, settings = {"token_ids": IDS[:, :3]}, {"max_new_tokens": 4, "stop_token_ids": None}
    found, wanted = (m.generate(prompt, **settings)["token_ids"] for m in (model, merged))
    np.testing.assert_array_equal(found, wanted)


def by_keras(model, folder, *_):
    model.save(folder / "model.keras")
    return keras.saving.load_model(folder / "model.keras")


def by_preset(model, folder, *_):
    model.save_to_preset(folder / "preset")
    return GemmaCausalLM.from_preset(folder / "preset")


def by_weights(model, folder, make=with_rows):
    model.save_weights(folder / "model.weights.h5")
    again = make()
    for variable in again.trainable_weights:
        variable.assign(keras.ops.ones(variable.shape))
    again.load_weights(folder / "model.weights.h5")
    return again


def by_lora_weights(model, folder, make=with_rows):
    model.save_lora_weights(folder / "x.lora.h5")
    again = untied() if make is adapted else task()
    again.load_lora_weights(folder / "x.lora.h5")
    return again


def by_adapter(model, folder, make=with_rows):
    model.save_adapter(folder / "adapter")
    # What gives way.
    again = adapted(rank=3, targets="all-linear") if make is adapted else with_rows([2, 3])
    again.load_adapter(folder / "adapter")
    return again


def by_copy(model, folder, *_):
    return copy.deepcopy(model)


@pytest.mark.each_time(
    *("with_rows-by_preset", "with_rows-by_keras", "adapted-by_weights", "adapted-by_adapter"),
    on=("jax", "tensorflow"),
)
@pytest.mark.parametrize(
    "way", [by_keras, by_preset, by_weights, by_lora_weights, by_adapter, by_copy]
)
@pytest.mark.parametrize("make", [with_rows, adapted])
def test_what_was_trained_travels(make, way, tmp_path):
    few_bits = [in_few_bits] * (make is with_rows and way in (by_keras, by_preset))
    for model in (each() for each in (make, *few_bits)):
        wanted = logits(model)
        again = way(model, tmp_path, make)
        np.testing.assert_allclose(logits(again), wanted, rtol=0, atol=tolerance("logits_across"))
        assert list(adapters(again)) == list(adapters(model))
        paths = [[v.path for v in m.trainable_weights] for m in (model, again)]
        assert paths[0] == paths[1]
        if make is with_rows:
            assert rows(again)["token_embedding"].ids == (4, 31, 49)
        (rows if make is with_rows else adapters)(again)["token_embedding"].start()
        assert np.abs(logits(again) - wanted).max() > 0.01, "numbers of its own"


def in_few_bits():
    model = task()
    model.backbone.quantize("int8")
    model.backbone.enable_lora(2, trainable_token_indices=CHOSEN)
    return shaken(model)


@pytest.mark.each_time("by_keras", on=("jax", "tensorflow"))
@pytest.mark.parametrize("way", [by_keras, by_preset, by_adapter])
def test_a_table_that_is_trained_as_a_whole_travels(way, tmp_path):
    model = task()
    model.enable_lora(2, modules_to_save=["token_embedding"])
    again = way(shaken(model), tmp_path)
    np.testing.assert_array_equal(logits(again), logits(model))
    assert again.backbone.token_embedding.embeddings.trainable and not rows(again)
    with lora.disabled(again):
        np.testing.assert_allclose(logits(again), logits(task()), rtol=0, atol=1e-6)
    np.testing.assert_array_equal(logits(again), logits(model))
    again.backbone.resize_token_embeddings(52)
    np.testing.assert_allclose(logits(again)[..., :50], logits(model), rtol=0, atol=1e-6)
    message = "no place for token_embedding, which is trained as a"
    refused(message, again.save_lora_weights, tmp_path / "x.lora.h5")


def test_weights_of_rows_go_into_a_table_and_others_are_refused(tmp_path):
    model, plain, others = with_rows(), task(), with_rows([4, 30, 49])
    model.save_weights(tmp_path / "rows.weights.h5")
    plain.save_weights(tmp_path / "plain.weights.h5")
    wanted = copy.deepcopy(model)
    wanted.merge_lora()
    plain.load_weights(tmp_path / "rows.weights.h5")
    np.testing.assert_allclose(logits(plain), logits(wanted), rtol=0, atol=1e-6)
    before = logits(others)
    message = "its trained rows are 4, 30, 49, the file's 4, 31, 49"
    refused(message, others.load_weights, tmp_path / "rows.weights.h5")
    model.save_lora_weights(tmp_path / "rows.lora.h5")
    message = "rows 4, 30, 49 are trained here and 4, 31, 49 there"
    refused(message, others.load_lora_weights, tmp_path / "rows.lora.h5")
    np.testing.assert_array_equal(logits(others), before)
    others.load_weights(tmp_path / "plain.weights.h5")
    np.testing.assert_allclose(logits(others), logits(task()), rtol=0, atol=1e-6)


def test_new_tokens_are_trained_beside_the_adapters(tmp_path):
    model = task()
    model.resize_token_embeddings(53)
    model.enable_lora(2, trainable_token_indices=range(50, 53))
    shaken(model)
    message = r"row 52 .* and 51 rows leave it out; give at least 53"
    refused(message, model.resize_token_embeddings, 51)
    model.resize_token_embeddings(54)
    ids = np.where(IDS % 5, IDS, 52)
    wanted = logits(model, ids)
    assert wanted.shape[-1] == 54
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    np.testing.assert_allclose(logits(clone, ids), wanted, rtol=0, atol=1e-6)
    model.save_adapter(tmp_path / "adapter")
    again = task()
    message = r"\(54, 16\), the model's \(50, 16\): call resize_token_"
    refused(message, again.load_adapter, tmp_path / "adapter")
    assert not adapters(again)
    again.resize_token_embeddings(54)
    again.load_adapter(tmp_path / "adapter")
    np.testing.assert_array_equal(logits(again, ids), wanted)
    # The base has these rows already, for whoever says so.
    model.save_adapter(tmp_path / "small", save_embedding_layers=False)
    names = read_safetensors(tmp_path / "small" / "adapter_model.safetensors")
    assert not any("base_layer" in name for name in names)


@pytest.mark.once
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trainable_token_indices": [3, 50, -1]}, "names 50, -1; give ids from 0 to 49, each"),
        ({"trainable_token_indices": [3, 3]}, "names a token twice"),
        ({"trainable_token_indices": []}, "is empty; give ids"),
        ({"trainable_token_indices": "abc"}, "is 'abc'; give a list of ids"),
        ({"trainable_token_indices": {"embed_tokens": 3}}, "give a list of ids"),
        ({"trainable_token_indices": {"embed_tokens": [1], "lm_head": [2]}}, "layer in one, so"),
        ({"trainable_token_indices": {"lm_head": [1]}}, "layer in one, so give a list of ids"),
        ({"trainable_token_indices": {"query": [1]}}, "layer in one, so give a list of ids"),
        ({"modules_to_save": ["quern"]}, "names 'quern', no module of the model"),
        ({"modules_to_save": ["query", "value"]}, "names all targets; leave some of them to the"),
        ({"modules_to_save": "embed_tokens"}, "is 'embed_tokens'; give a list of names"),
        (
            {"modules_to_save": ["embed_tokens"], "trainable_token_indices": [1]},
            "all rows of token_embedding already",
        ),
    ],
)
def test_wrong_tokens_change_nothing(plain, settings, message):
    before = [(v.path, v.trainable) for v in plain.weights]
    refused(message, plain.enable_lora, 2, **settings)
    assert [(v.path, v.trainable) for v in plain.weights] == before


@pytest.mark.once
def test_a_model_without_a_table_or_its_values_is_told():
    sizes = {"num_layers": 1, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 24}
    model = ViTBackbone(image_shape=(8, 8, 1), patch_size=4, **sizes)
    rows_of_it = {"rank": 2, "trainable_token_indices": [1]}
    message = "no embedding table, which trainable_token_indices is"
    refused(message, model.enable_lora, **rows_of_it)
    with keras_internals.without_values():  # as where each process waits for its part
        model = GemmaBackbone(**SIZES)
    message = "which plan.prepare loads only later; load a model that"
    refused(message, model.enable_lora, **rows_of_it)
    assert not adapters(model)


@pytest.mark.once
def test_a_table_that_transformers_has_no_name_for_is_refused(tmp_path, monkeypatch):
    model = with_rows()
    names = [{k: v for k, v in t.items() if "block" in k} for t in model.backbone.peft_names(model)]
    monkeypatch.setattr(GemmaBackbone, "peft_names", staticmethod(lambda _: names))
    message = "transformers has no name for token_embedding, so that"
    refused(message, model.save_adapter, tmp_path / "adapter")
    message = "save_embedding_layers is 'no'; give True, False or"
    refused(message, model.save_adapter, tmp_path / "adapter", save_embedding_layers="no")


STEM = "base_model.model.model.embed_tokens."
DELTA = f"{STEM}token_adapter.trainable_tokens_delta"


HEAD = "base_model.model.lm_head."
ROWS, TABLE = np.ones((3, 16), "float32"), np.ones((50, 16), "float32")
NO_ROWS = {"trainable_token_indices": None}


@pytest.mark.once
@pytest.mark.parametrize(
    ("config", "arrays", "message"),
    [
        (
            *({}, {f"{HEAD}token_adapter.trainable_tokens_delta": ROWS}),
            "lm_head and model.embed_tokens have rows each, and here they are one",
        ),
        (
            {"trainable_token_indices": {"embed_tokens": [4, 31, 49], "lm_head": [4, 31, 48]}},
            *({}, "so give a list of ids, or the same ids by 'embed_tokens' and 'lm_head'"),
        ),
        (NO_ROWS, {}, "it has rows of tokens and no trainable_token_indices"),
        ({}, {DELTA: None}, "it has trainable_token_indices and no rows"),
        ({}, {DELTA: ROWS[:2]}, r"the trained rows are \(2, 16\), the model needs \(3, 16\)"),
        (
            *(NO_ROWS | {"modules_to_save": ["embed_tokens"]}, {DELTA: None}),
            "modules_to_save names embed_tokens, which it does not hold",
        ),
        (
            NO_ROWS | {"modules_to_save": ["embed_tokens"]},
            {DELTA: None, f"{STEM}weight": TABLE * 0},
            "without ensure_weight_tying left the other of table and lm_head as it was",
        ),
        (
            NO_ROWS | {"modules_to_save": ["embed_tokens", "lm_head"]},
            {DELTA: None, f"{STEM}weight": TABLE * 0, f"{HEAD}weight": TABLE},
            "lm_head and model.embed_tokens have a table each, and here they are one",
        ),
    ],
)
def test_files_that_say_something_else_of_the_table_are_refused(
    adapter, plain, config, arrays, message, tmp_path
):
    """Settings and tensors of a written file that are changed, or left out where they are None."""
    there = json.loads((adapter / "adapter_config.json").read_text()) | config
    there = {name: value for name, value in there.items() if (name, value) not in NO_ROWS.items()}
    (tmp_path / "adapter_config.json").write_text(json.dumps(there))
    read = read_safetensors(adapter / "adapter_model.safetensors")
    tensors = {name: tensor.read() for name, tensor in read.items()} | arrays
    tensors = {name: x for name, x in tensors.items() if x is not None}
    held = {name: LazyArray(x.shape, x.dtype, lambda x=x: x) for name, x in tensors.items()}
    write_safetensors(tmp_path / "adapter_model.safetensors", held, {"format": "pt"})
    refused(message, plain.load_adapter, tmp_path)
    assert not adapters(plain) and not rows(plain)


# === Adapters of tables ===


def test_weights_go_into_tables_without_and_others_are_refused(tmp_path):
    model, plain, other = adapted(), untied(), adapted(rank=3)
    model.save_weights(tmp_path / "adapted.weights.h5")
    plain.save_weights(tmp_path / "plain.weights.h5")
    plain.load_weights(tmp_path / "adapted.weights.h5")
    np.testing.assert_allclose(logits(plain), logits(model), rtol=0, atol=1e-5)
    before = logits(other)
    message = "token_embedding: its adapter has rank 3, the file's 2"
    refused(message, other.load_weights, tmp_path / "adapted.weights.h5")
    np.testing.assert_array_equal(logits(other), before)
    other.load_weights(tmp_path / "plain.weights.h5")
    np.testing.assert_allclose(logits(other), logits(untied()), rtol=0, atol=1e-6)


@pytest.mark.once
def test_a_file_with_matrices_and_rows_of_a_table_is_refused(tmp_path):
    adapted().save_adapter(tmp_path)
    file, config = tmp_path / "adapter_model.safetensors", tmp_path / "adapter_config.json"
    described = json.loads(config.read_text())
    config.write_text(json.dumps({**described, "trainable_token_indices": [3]}))
    delta = LazyArray((1, 16), np.dtype("float32"), lambda: np.zeros((1, 16), "float32"))
    held = {key: tensor.read() for key, tensor in read_safetensors(tmp_path).items()}
    held = {key: LazyArray(x.shape, x.dtype, lambda x=x: x) for key, x in held.items()}
    write_safetensors(file, {**held, DELTA: delta})
    model = untied()
    message = "both LoRA matrices and trained rows of token_embedding; write one"
    refused(message, model.load_adapter, tmp_path)
    assert not adapters(model)


def test_a_table_has_an_adapter_or_rows_and_keeps_its_size():
    model = untied()
    both = {"targets": ["token_embedding"], "trainable_token_indices": [3]}
    refused("token_embedding is a target, so", lambda: model.enable_lora(2, **both))
    assert not adapters(model)
    model.enable_lora(2, targets=["reverse_embeddings"], trainable_token_indices=[3])
    refused("call resize_token_embeddings before", model.resize_token_embeddings, 70)
