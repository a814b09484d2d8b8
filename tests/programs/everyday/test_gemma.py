"""Programs of people who generate with Gemma, score and train it, or build on it."""

import keras
import numpy as np
import pytest

import gemma3_processor_case
import gemma4_vision_case
from kmodels import models
from kmodels.models import (
    Gemma3CausalLM,
    Gemma3CausalLMPreprocessor,
    GemmaBackbone,
    GemmaCausalLM,
    GemmaCausalLMPreprocessor,
)
from kmodels.models.gemma_vision.gemma3 import PRESETS as PRESETS3
from kmodels.models.gemma_vision.gemma4 import PRESETS as PRESETS4
from kmodels.text import demo
from kmodels.text.training import train_tokenizer
from refusals import refused


@pytest.mark.nightly("tensorflow")
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


def test_some_rows_weigh_more():
    model = GemmaCausalLM(GemmaBackbone.from_preset("gemma_debug", num_layers=1))
    token_ids = np.random.default_rng(0).integers(3, 300, (4, 6))
    x, y = {"token_ids": token_ids, "padding_mask": np.ones_like(token_ids)}, token_ids[:, ::-1]
    weights, plain = np.array([[1.0], [2.0], [0.0], [5.0]]), keras.Model(model.input, model.output)
    # What Keras' reductions divide by: the weights, or the positions.
    reductions = {"tokens": "mean_with_sample_weight", "positions": "sum_over_batch_size"}
    for normalization, reduction in reductions.items():
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
        plain.compile("sgd", loss, weighted_metrics=["sparse_categorical_accuracy"])
        wanted = plain.evaluate(x, y, sample_weight=np.repeat(weights, 6, 1), verbose=0)
        model.compile("sgd", loss_normalization=normalization)
        found = model.evaluate(x, y, sample_weight=weights, verbose=0)
        assert found == pytest.approx(wanted, rel=1e-5)
    message = r"sample_weight has the shape \(4,\) beside targets of \(4, 6\)"
    refused(message, model.fit, x, y, sample_weight=weights[:, 0], verbose=0)


def test_batches_are_continued_one_after_another():
    model = GemmaCausalLM(GemmaBackbone.from_preset("gemma3_debug"))
    token_ids = np.random.default_rng(0).integers(3, 300, (4, 5))
    batches = ({"token_ids": token_ids[at : at + 2]} for at in (0, 2))
    found = model.generate(batches, max_new_tokens=3, stop_token_ids=None)
    whole = model.generate(token_ids, max_new_tokens=3, stop_token_ids=None)
    np.testing.assert_array_equal(found["token_ids"], whole["token_ids"])


@pytest.mark.nightly
@pytest.mark.needs("transformers")
def test_padded_rows_and_beam_search_are_those_of_transformers(tmp_path):
    import torch
    import transformers

    sizes = {
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 64,
        "query_pre_attn_scalar": 8, "initializer_range": 0.5, "attn_implementation": "eager",
    }  # fmt: skip
    peer = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes)).eval()
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
    beams = {"num_beams": 5, "num_return_sequences": 2, "do_sample": False, "eos_token_id": None}
    given = {"attention_mask": torch.ones(2, 6), "max_new_tokens": 8}
    theirs = peer.generate(torch.tensor(token_ids), **given, **beams)
    ours = model.generate(token_ids, max_new_tokens=8, stop_token_ids=None, num_return_sequences=2)
    np.testing.assert_array_equal(ours["token_ids"], theirs.numpy())


# === Texts ===

TEXTS = ["the cat sat", "a dog ran", "one and two", "no more rain"]


@pytest.fixture
def tokenizer():
    return train_tokenizer(demo.texts(), 500)


def gemma(preprocessor=None, task=GemmaCausalLM):
    return task.from_preset("gemma3_debug", vocabulary_size=500, preprocessor=preprocessor)


@pytest.mark.each_backend
def test_a_preprocessor_in_a_pipeline_of_each_framework(tokenizer):
    preprocessor = GemmaCausalLMPreprocessor(tokenizer, sequence_length=8)
    x, y, weights = preprocessor(TEXTS)
    if keras.config.backend() == "tensorflow":
        import tensorflow as tf

        batch = next(iter(tf.data.Dataset.from_tensor_slices(TEXTS).map(preprocessor).batch(4)))
    elif keras.config.backend() == "torch":
        import torch

        loader = torch.utils.data.DataLoader(TEXTS, batch_size=4, collate_fn=preprocessor)
        batch = next(iter(loader))
    else:
        batch = preprocessor(np.array(TEXTS))
    np.testing.assert_array_equal(batch[0]["token_ids"], x["token_ids"])
    np.testing.assert_array_equal(batch[1], y)
    np.testing.assert_array_equal(batch[2], weights)


def test_only_responses_count_and_some_count_more(tokenizer):
    preprocessor = Gemma3CausalLMPreprocessor(tokenizer, sequence_length=12)
    model = gemma(preprocessor, Gemma3CausalLM)
    model.compile(optimizer=keras.optimizers.SGD(0.1))
    data = {"prompts": ["the cat", "a dog"], "responses": [" sat", " ran"]}
    importance = np.array([1.0, 3.0])
    loss = model.evaluate(data, sample_weight=importance, verbose=0)[0]

    x, y, weights = preprocessor(data)
    logits = np.asarray(model.predict(x, verbose=0), "float64")
    chosen = np.take_along_axis(logits, y[..., None], -1)[..., 0]
    each = np.log(np.exp(logits).sum(-1)) - chosen
    weights = weights * importance[:, None]
    wanted = (each * weights).sum() / weights.sum()
    assert loss == pytest.approx(wanted, rel=1e-5)


# === Texts with images ===

DEBUG = PRESETS3["gemma3_vision_debug"]
OWN_LAYERS = {"num_layers": 2, "num_kv_shared_layers": 0, "use_double_wide_mlp": False}
# Gemma 3, and Gemma 4 in the form of 12B and in that of E2B: the prefix of its classes, the folder
# of its processor, its sizes, the mark of an image, tokens in a row, two pictures.
KINDS = {
    "gemma3": (
        *("Gemma3", "model"),
        {**DEBUG, "vision_encoder": {**DEBUG["vision_encoder"], "image_size": 20, "patch_size": 5}},
        *("<start_of_image>", 48, ("square.png", "wide2.png")),
    ),
    "gemma4_unified": (
        *("Gemma4", "unified", {**PRESETS4["gemma4_unified_debug"], "num_layers": 2}),
        *("<|image|>", 160, ("wide.jpg", "tall.png")),
    ),
    "gemma4": (
        *("Gemma4", "model", {**PRESETS4["gemma4_vision_debug"], **OWN_LAYERS}),
        *("<|image|>", 160, ("square.png", "thread.png")),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_describe_pictures_and_chat_about_them(kind, references, tmp_path):
    """From a directory of Hugging Face with weights, tokenizer and processor."""
    name, form, sizes, mark, length, pictures = KINDS[kind]
    cases = gemma3_processor_case if name == "Gemma3" else gemma4_vision_case
    case = cases.ProcessorCase(references)
    task = getattr(models, f"{name}ImageTextLM")
    processor = getattr(models, f"{name}ImageTextLMPreprocessor")
    text = processor.from_preset(case.folder / form, sequence_length=length)
    keras.utils.set_random_seed(0)
    vocabulary = text.tokenizer.vocabulary_size()
    given = {**sizes, "vocabulary_size": vocabulary, "image_token_id": text.image_token_id}
    backbone = getattr(models, f"{name}ImageTextBackbone")(**given)
    task(backbone, text).export_to_transformers(tmp_path / "made")
    model = task.from_preset(tmp_path / "made")
    model.preprocessor.sequence_length = length
    first, second = (str(case.picture(picture)) for picture in pictures)
    prompt = {"prompts": f"What is {mark}?", "images": first}
    assert isinstance(model.generate(prompt, max_length=100), str)
    several = {"prompts": [f"a {mark}", "no picture"], "images": [[second], []]}
    assert len(model.generate(several, max_length=100)) == 2

    content = [{"type": "image", "path": picture} for picture in (first, second)]
    content += [{"type": "text", "text": "What differs?"}]
    chat = [{"role": "user", "content": content}]
    reply = model.chat(chat, max_new_tokens=4)
    assert isinstance(reply, str)
    assert model.chat([chat, chat], max_new_tokens=4) == [reply, reply]
