"""EmbeddingGemma learns from pairs: losses and gradients of sentence-transformers, and `fit`."""

import json

import keras
import numpy as np
import pytest

from arrays import read_npz, to_numpy
from kmodels import InputError
from kmodels.models import GemmaTextEmbedder
from kmodels.training import ContrastiveLoss
from kmodels.weights import engine, read_safetensors
from tolerances import tolerance

MATRYOSHKA = {"matryoshka_dims": [24, 8, 5], "matryoshka_weights": [1.0, 0.5, 2.0]}
LOSSES = {
    "pairs": (("anchor", "positive"), {}),
    "negatives": (("anchor", "positive", "negative"), {}),
    "matryoshka": (("anchor", "positive", "negative"), MATRYOSHKA),
}


@pytest.fixture(scope="module")
def folder(references):
    return references / "embedding_gemma"


@pytest.fixture(scope="module")
def pairs(folder):
    return json.loads((folder / "texts.json").read_text())["pairs"]


def made(folder, **settings):
    model = GemmaTextEmbedder.from_preset(folder / "gemma" / "model", **settings)
    model.compile()
    return model


@pytest.mark.each_backend
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradients_are_those_of_sentence_transformers(folder, pairs, name):
    expected = read_npz(folder / "gemma" / "expected.npz")
    columns, settings = LOSSES[name]
    model = made(folder)
    before = model.get_weights()
    model.compile(keras.optimizers.SGD(1.0), ContrastiveLoss(**settings))
    loss = model.train_on_batch({column: pairs[column] for column in columns})
    np.testing.assert_allclose(loss, expected[f"loss_{name}"], rtol=tolerance("losses"))
    # A step at a rate of 1 is the gradient; so each tensor of the files has the place of its own.
    model.set_weights([a - to_numpy(b) for a, b in zip(before, model.weights, strict=True)])
    form = model.beside_transformer()[1]
    from kmodels.models.gemma.weights.huggingface import rules

    tensors = engine.export(model, [*rules(model.backbone.config, "0.model."), *form])
    names = {f"2_Dense/linear.{x}": f"2.linear.{x}" for x in ("weight", "bias")}
    names |= {f"3_Dense/linear.{x}": f"3.linear.{x}" for x in ("weight", "bias")}
    start = f"gradient_{name}_"
    found = {start + names.get(key, key): tensor.read() for key, tensor in tensors.items()}
    assert set(found) == {key for key in expected if key.startswith(start)}
    for key, gradient in found.items():
        scale = np.abs(expected[key]).max()
        np.testing.assert_allclose(
            gradient, expected[key], rtol=0, atol=tolerance("hidden") * max(scale, 1), err_msg=key
        )


def records(count=12):
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"]
    return [
        {
            "query": f"{words[i % 9]} {i}",
            "document": f"{words[i % 9]} {words[i * 4 % 9]}",
            "negative_1": words[(i + 3) % 9],
            "negative_2": words[(i + 5) % 9],
        }
        for i in range(count)
    ]


@pytest.mark.parametrize(
    ("lora", "dtype"),
    [
        (False, "float32"),
        (True, "mixed_bfloat16"),
        (False, "mixed_bfloat16"),
        (True, "float32"),
    ],
)
def test_fit_learns(folder, lora, dtype):
    keras.utils.set_random_seed(0)
    model = made(folder, dtype=dtype)
    if lora:
        model.backbone.enable_lora(rank=4)
        for layer in model.dense_layers:
            layer.trainable = False
    loss = ContrastiveLoss(scale=10, matryoshka_dims=(24, 8))
    model.compile(keras.optimizers.Adam(3e-3), loss=loss)
    before = {v.path: to_numpy(v) for v in model.weights}
    history = model.fit(records(), batch_size=4, epochs=8, verbose=0).history["loss"]
    assert history[-1] < 0.8 * history[0]
    moved = {v.path for v in model.weights if (to_numpy(v) != before[v.path]).any()}
    assert moved and (not lora or all("/lora_" in path for path in moved))
    assert np.isfinite(model.encode("fox")).all()


def test_forms_of_the_data(folder):
    """Records, columns, arrays, batches, and token ids give the same loss."""
    rows, model = records(), made(folder)
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    arrays = {name: np.array(column, object) for name, column in columns.items()}
    named = {"anchor": columns["query"], "positive": columns["document"]}
    named |= {name: columns[name] for name in ("negative_1", "negative_2")}
    ids, labels = model.preprocessor(rows)
    assert ids["token_ids"].shape == ids["padding_mask"].shape == (12, 4, 20)
    assert labels.shape == (12,) and not labels.any()
    found = [model.evaluate(x, batch_size=12, verbose=0) for x in (rows, columns, arrays, named)]
    found += [model.evaluate(ids, labels, batch_size=12, verbose=0)]
    found += [model.evaluate(iter([(ids, labels)]), verbose=0)]
    np.testing.assert_allclose(found, found[0], rtol=1e-6)


def test_weights_of_pairs(folder):
    rows, model = records(6), made(folder)
    weights = np.array([1, 2, 1, 1, 0, 0], "float32")
    found = model.evaluate(rows, sample_weight=weights, batch_size=6, verbose=0)
    model.compile(loss=ContrastiveLoss(reduction="sum"))
    few = model.evaluate(rows[:4], sample_weight=weights[:4], batch_size=4, verbose=0)
    np.testing.assert_allclose(found, few / 6, rtol=1e-5)


def test_prompts_of_pairs(folder):
    rows, model = records(), made(folder)
    model.preprocessor.query_prompt = "q: "
    model.preprocessor.document_prompt = "d: "
    prompted = model.evaluate(rows, batch_size=12, verbose=0)
    model.preprocessor.query_prompt = model.preprocessor.document_prompt = ""
    written = [
        {name: ("q: " if name == "query" else "d: ") + text for name, text in row.items()}
        for row in rows
    ]
    assert prompted == model.evaluate(written, batch_size=12, verbose=0)
    assert prompted != model.evaluate(rows, batch_size=12, verbose=0)


def test_what_pairs_do_not_take(folder):
    preprocessor = made(folder).preprocessor
    for x, y, message in (
        ({"anchor": ["a"], "label": ["b"]}, None, "got the columns anchor, label; give texts, or"),
        ({"anchor": ["a"]}, None, "got the columns anchor"),
        (
            [{"anchor": "a", "positive": "b"}, {"anchor": "a"}],
            None,
            "one pair has anchor",
        ),
        ({"anchor": ["a"], "positive": ["b"]}, [1], "pairs have no labels"),
    ):
        with pytest.raises(InputError, match=message):
            preprocessor(x, y)


def test_what_was_learnt_is_kept(folder, tmp_path):
    keras.utils.set_random_seed(0)
    model = made(folder)
    model.compile(keras.optimizers.Adam(1e-3))
    model.fit(records(), batch_size=4, verbose=0)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(again.loss, ContrastiveLoss)
    np.testing.assert_array_equal(again.encode("fox"), model.encode("fox"))
    losses = [m.fit(records(), batch_size=4, verbose=0).history["loss"] for m in (model, again)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=tolerance("losses"))


def test_an_adapter_is_merged_into_the_export(folder, tmp_path):
    keras.utils.set_random_seed(0)
    model = made(folder)
    model.backbone.enable_lora(rank=2)
    model.compile(keras.optimizers.Adam(1e-2))
    model.fit(records(), batch_size=4, verbose=0)
    expected = model.encode("fox")
    with pytest.raises(InputError, match="no place for LoRA adapters"):
        model.export_to_transformers(tmp_path / "out")
    model.backbone.merge_lora()
    out = model.export_to_transformers(tmp_path / "out")
    found = GemmaTextEmbedder.from_preset(out).encode("fox")
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance("logits_across"))
    assert set(read_safetensors(out)) == set(read_safetensors(folder / "gemma" / "model"))
