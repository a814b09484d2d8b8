"""Programs of people who generate with Gemma, score with it, or build on it."""

import keras
import numpy as np
import pytest

from kmodels.core.errors import InputError
from kmodels.models import GemmaBackbone, GemmaCausalLM


@pytest.mark.each_backend
def test_a_classifier_over_the_backbone_learns():
    keras.utils.set_random_seed(0)
    backbone = GemmaBackbone.from_preset("gemma_debug", num_layers=1)
    last = keras.layers.GlobalMaxPooling1D()(backbone.output)
    model = keras.Model(backbone.input, keras.layers.Dense(2, activation="softmax")(last))
    adam = keras.optimizers.Adam(3e-3)
    model.compile(adam, "sparse_categorical_crossentropy", metrics=["accuracy"])
    token_ids = np.random.default_rng(0).integers(3, 300, (64, 8))
    labels = np.arange(64) % 2
    token_ids[:, 4] = np.where(labels, 301, 302)
    inputs = {"token_ids": token_ids, "padding_mask": np.ones_like(token_ids)}
    model.fit(inputs, labels, epochs=6, batch_size=16, verbose=0)
    assert model.evaluate(inputs, labels, verbose=0)[1] > 0.9


def test_token_ids_are_all_it_needs():
    model = GemmaCausalLM(GemmaBackbone.from_preset("gemma2_debug"))
    token_ids = np.random.default_rng(0).integers(3, 300, (4, 10))
    logits = model.predict(token_ids, verbose=0)
    by_name = model.predict({"token_ids": token_ids}, verbose=0)
    assert logits.shape == (4, 10, 320)
    np.testing.assert_array_equal(logits, by_name)


def test_perplexity_by_evaluate_is_that_of_score():
    model = GemmaCausalLM(GemmaBackbone.from_preset("gemma_debug", num_layers=1))
    token_ids = np.random.default_rng(0).integers(3, 300, (4, 10))
    inputs, targets = token_ids[:, :-1], token_ids[:, 1:]
    model.compile()
    loss = model.evaluate(inputs, targets, verbose=0, return_dict=True)["loss"]
    scores = model.score(inputs, scoring_mode="loss", target_ids=targets)
    perplexity = np.exp(np.mean(keras.ops.convert_to_numpy(keras.ops.stop_gradient(scores))))
    assert np.exp(loss) == pytest.approx(perplexity, rel=1e-4)


def test_some_rows_weigh_more():
    model = GemmaCausalLM(GemmaBackbone.from_preset("gemma_debug", num_layers=1))
    token_ids = np.random.default_rng(0).integers(3, 300, (4, 6))
    x, y = {"token_ids": token_ids, "padding_mask": np.ones_like(token_ids)}, token_ids[:, ::-1]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    weights, found = np.array([[1.0], [2.0], [0.0], [5.0]]), []
    for each in (model, keras.Model(model.input, model.output)):
        each.compile("sgd", loss, weighted_metrics=["sparse_categorical_accuracy"])
        found.append(each.evaluate(x, y, sample_weight=weights, verbose=0))
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    message = r"sample_weight has the shape \(4,\) beside targets of \(4, 6\)"
    with pytest.raises(InputError, match=message):
        model.fit(x, y, sample_weight=weights[:, 0], verbose=0)


def test_batches_are_continued_one_after_another():
    model = GemmaCausalLM(GemmaBackbone.from_preset("gemma3_debug"))
    token_ids = np.random.default_rng(0).integers(3, 300, (4, 5))
    batches = ({"token_ids": token_ids[at : at + 2]} for at in (0, 2))
    found = model.generate(batches, max_new_tokens=3, stop_token_ids=None)
    whole = model.generate(token_ids, max_new_tokens=3, stop_token_ids=None)
    np.testing.assert_array_equal(found["token_ids"], whole["token_ids"])


@pytest.mark.needs("transformers")
def test_padded_rows_and_beam_search_are_those_of_transformers(tmp_path):
    import torch
    import transformers

    config = transformers.Gemma2Config(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=64,
        initializer_range=0.5,
        attn_implementation="eager",
    )
    peer = transformers.Gemma2ForCausalLM(config).eval()
    peer.save_pretrained(tmp_path)
    model = GemmaCausalLM.from_preset(tmp_path, preprocessor=None)
    token_ids = np.random.default_rng(0).integers(3, 96, (3, 9))
    mask = np.ones_like(token_ids)
    mask[0, :4] = mask[1, :1] = 0  # on the left
    with torch.no_grad():
        theirs = peer(torch.tensor(token_ids), attention_mask=torch.tensor(mask)).logits.numpy()
    ours = model.predict({"token_ids": token_ids, "padding_mask": mask}, verbose=0)
    np.testing.assert_allclose(ours[mask == 1], theirs[mask == 1], atol=1e-4)

    model.compile(sampler="beam")
    token_ids = np.random.default_rng(1).integers(3, 96, (2, 6))
    theirs = peer.generate(
        torch.tensor(token_ids),
        attention_mask=torch.ones(2, 6),
        max_new_tokens=8,
        num_beams=5,
        num_return_sequences=2,
        do_sample=False,
        eos_token_id=None,
    )
    ours = model.generate(token_ids, max_new_tokens=8, stop_token_ids=None, num_return_sequences=2)
    np.testing.assert_array_equal(ours["token_ids"], theirs.numpy())
