"""EmbeddingGemma beside the table of families: encoding, settings, modules, and pairs to learn."""

import json
import shutil

import keras
import numpy as np
import pytest

from arrays import to_numpy
from family_table import row_of
from kmodels.models import (
    Gemma3Backbone,
    GemmaBackbone,
    GemmaCausalLM,
    GemmaTextEmbedder,
    GemmaTextEmbedderPreprocessor,
)
from kmodels.models.blocks.embedder import sentence_transformers
from kmodels.models.gemma.huggingface import rules
from kmodels.training import ContrastiveLoss
from kmodels.weights import engine, read_safetensors
from refusals import refused
from tolerances import tolerance


@pytest.fixture(scope="module", params=["gemma", "last", "first"])
def row(request, references):
    return row_of(f"embedding_gemma/{request.param}", references)


@pytest.fixture(scope="module")
def gemma(references):
    return row_of("embedding_gemma/gemma", references)


@pytest.fixture
def folder(gemma, tmp_path):
    """A copy of its directory."""
    return shutil.copytree(gemma.path, tmp_path / "model")


def change(file, **settings):
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))


def near(found, expected, what="hidden"):
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance(what))


def unit(vectors):
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_windows_reach_to_both_sides(gemma):
    config = gemma.model.backbone.config
    # transformers halves the number in the file, and counts the token itself.
    assert config.sliding_window_size == 6
    assert [config.block(i).window for i in range(3)] == [4, None, 4]
    there = gemma.inputs["padding_mask"] == 1
    for other in (4, 8):
        wrong = GemmaBackbone.from_preset(gemma.path, sliding_window_size=other)
        apart = np.abs(to_numpy(wrong(gemma.inputs))[there] - gemma.expected["hidden"][there])
        assert apart.max() > 100 * tolerance("hidden")
    # The published size.
    fields = GemmaBackbone.presets["embedding_gemma_300m"]
    own = {name: value for name, value in fields.items() if not name.startswith("task_")}
    config = GemmaBackbone.make_config(**own)
    assert [config.block(i).window for i in range(12)] == [*[257] * 5, None] * 2


# === Vectors ===


def test_unit_vectors_and_how_alike_they_are(row):
    model, plain, query = row.model, row.expected["plain"], row.expected["query"]
    found = model.encode(row.texts)
    near(found, unit(plain), "logits_across")
    assert found.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1.0, rtol=1e-6)
    near(model.encode(row.texts[1]), unit(plain)[1], "logits_across")
    assert model.similarity_fn_name == ("dot" if row.name.endswith("last") else "cosine")
    near(model.similarity(plain, query), row.expected["similarity"], "logits")
    assert model.similarity(plain[0], query[:2]).shape == (1, 2)


def test_each_similarity():
    a, b = np.random.default_rng(0).normal(size=(2, 3, 5)).astype("float32")
    for name, expected in {
        "cosine": lambda x, y: x @ y / np.linalg.norm(x) / np.linalg.norm(y),
        "dot": lambda x, y: x @ y,
        "euclidean": lambda x, y: -np.sqrt(((x - y) ** 2).sum()),
        "manhattan": lambda x, y: -np.abs(x - y).sum(),
    }.items():
        model = GemmaTextEmbedder.from_preset("embedding_gemma_debug", similarity_fn_name=name)
        assert model.count_params() < 100_000
        near(model.similarity(a, b), [[expected(x, y) for y in b] for x in a], "first_loss")


def test_shorter_vectors_and_prompts(gemma):
    model, texts = gemma.model, gemma.texts
    plain = gemma.expected["plain"][:, :8]
    near(model.encode(texts, truncate_dim=8), unit(plain), "logits_across")
    near(model.encode(texts, truncate_dim=8, normalize_embeddings=False), plain)
    prompts = {"query": "task: search result | query: ", "document": "title: none | text: "}
    assert model.prompts == prompts
    named = model.encode(texts[1], prompt_name="query")
    np.testing.assert_array_equal(named, model.encode(texts[1], prompt=prompts["query"]))
    np.testing.assert_array_equal(named, model.encode(prompts["query"] + texts[1]))
    other = gemma.read(truncate_dim=8, default_prompt_name="query")
    near(other.encode(texts, prompt=""), unit(plain), "logits_across")
    near(other.encode(texts[1], truncate_dim=24), named, "logits_across")
    # As in sentence-transformers, the default prompt is for `encode` alone.
    other = gemma.read(prompts={"other": "title: "}, default_prompt_name="other")
    bare, named = other.encode(texts[1], prompt=""), other.encode(texts[1])
    for encode in (other.encode_query, other.encode_document):
        np.testing.assert_array_equal(encode(texts[1]), bare)
        np.testing.assert_array_equal(encode(texts[1], prompt_name="other"), named)
    assert np.abs(named - bare).max() > 0.01


def test_the_order_and_the_size_of_batches_change_nothing(gemma, capsys):
    texts = [f"{text} {i}" for i in range(3) for text in gemma.texts]
    once = gemma.model.encode(texts, batch_size=len(texts), show_progress_bar=True)
    assert "18/18" in capsys.readouterr().out
    near(gemma.model.encode(texts, batch_size=4), once, "logits_across")
    near(gemma.model.encode(texts[::-1], batch_size=5)[::-1], once, "logits_across")
    assert gemma.model.encode([]).shape == (0, 24)


def test_half_precision(gemma):
    model = gemma.read(dtype="mixed_bfloat16")
    found = model.encode(gemma.texts, normalize_embeddings=False)
    np.testing.assert_allclose(found, gemma.expected["plain"], rtol=0, atol=0.1)
    assert to_numpy(model(gemma.inputs)).dtype == found.dtype == np.float32


# === Settings and files ===


def test_what_is_refused(gemma, tmp_path):
    model, make = gemma.model, GemmaTextEmbedder.from_preset
    causal, small = GemmaCausalLM(model.backbone), gemma.read()
    small.backbone.resize_token_embeddings(8)
    gelu = {"units": 4, "activation": "gelu"}
    for message, call, given, settings in (
        (
            "truncate_dim is 25; the vectors have 24 numbers",
            model.encode,
            ["a"],
            {"truncate_dim": 25},
        ),
        ("no prompt 'ask'; the model's are", model.encode, ["a"], {"prompt_name": "ask"}),
        ("no prompt 'ask'", gemma.read, [], {"default_prompt_name": "ask"}),
        ("token_ids has .*; the embedding table has rows 0 to 7: use", small.encode, ["a"], {}),
        ("encode got a int among the texts", model.encode, [["a", 3]], {}),
        ("encode needs a preprocessor", GemmaTextEmbedder(model.backbone).encode, ["a"], {}),
        (
            "pooling is 'max'; the model supports mean, cls",
            make,
            ["gemma3_debug"],
            {"pooling": "max"},
        ),
        ("units of dense layer 0", make, ["gemma3_debug"], {"dense": [{"units": 0}]}),
        ("activation of dense layer 0 is 'gelu'", make, ["gemma3_debug"], {"dense": [gelu]}),
        ("layer 0 has bias; give", make, ["gemma3_debug"], {"dense": [{"units": 4, "bias": 1}]}),
        ("similarity_fn_name is 'x'", make, ["gemma3_debug"], {"similarity_fn_name": "x"}),
        ("Gemma3Backbone ends at the hid", Gemma3Backbone, [], {"is_embedding_model": True}),
        (
            "use_bidirectional_attention is True, so",
            *(causal.generate, [np.array([[2, 5]]), 5], {"stop_token_ids": None}),
        ),
        (
            "GGUF .* no place for use_bidirectional_attention",
            *(causal.export_to_gguf, [tmp_path / "model.gguf"], {}),
        ),
    ):
        refused(message, call, *given, **settings)
    for preset in ("gemma_debug", "gemma2_debug", "gemma4_debug"):
        other = GemmaBackbone.from_preset(preset, use_bidirectional_attention=True)
        message = "no counterpart for .*use_bidirectional_attention"
        refused(message, other.export_to_transformers, tmp_path / preset)


def test_files_keep_what_stands_around_the_transformer(row, tmp_path):
    expected = row.model.encode_query(row.texts)
    out = row.model.export_to_transformers(tmp_path / "out")
    row.model.save_to_preset(tmp_path / "own")
    row.model.save(tmp_path / "model.keras")
    held = keras.models.load_model(tmp_path / "model.keras")
    for again in (held, *map(GemmaTextEmbedder.from_preset, (out, tmp_path / "own"))):
        assert again.settings == row.model.settings
        assert again.preprocessor.sequence_length == 20
        np.testing.assert_array_equal(again.encode_query(row.texts), expected)
    row.model.export_to_transformers(out)  # in place of itself
    (out / "notes.txt").write_text("mine")
    refused(r"also holds notes\.txt", row.model.export_to_transformers, out)


def test_backbones_and_causal_models_read_the_directory_and_the_other_way(gemma, tmp_path):
    hidden = to_numpy(gemma.model.backbone(gemma.inputs))
    for model in (
        GemmaBackbone.from_preset(gemma.path),
        GemmaCausalLM.from_preset(gemma.path).backbone,
    ):
        np.testing.assert_array_equal(to_numpy(model(gemma.inputs)), hidden)
    lm = GemmaCausalLM.from_preset("gemma3_debug", preprocessor=None)
    lm.save_to_preset(tmp_path / "causal")
    embedder = GemmaTextEmbedder.from_preset(tmp_path / "causal")
    assert embedder.settings["dense"] == [] and embedder.backbone.config == lm.backbone.config
    # Other dense layers start anew.
    assert gemma.read(dense=[{"units": 7}]).encode("a").shape == (7,)


RELU = "torch.nn.modules.activation.ReLU"
POOLING, DENSE = "1_Pooling/config.json", "2_Dense/config.json"
READING, PROMPTS = "sentence_bert_config.json", "config_sentence_transformers.json"
AS_TEXT = {"method": "forward", "method_output_name": "last_hidden_state"}


@pytest.mark.parametrize(
    ("file", "settings", "message"),
    [
        (POOLING, {"pooling_mode": "max"}, "the pooling is max"),
        (POOLING, {"pooling_mode": ["cls", "mean"]}, "the pooling is cls, mean"),
        (POOLING, {"include_prompt": False}, "include_prompt is False"),
        (DENSE, {"activation_function": RELU}, f"activation_function is {RELU}"),
        (DENSE, {"use_residual": True}, "use_residual is True"),
        ("4_Normalize/config.json", {"module_input_name": "token_embeddings"}, "input_name is 'to"),
        (READING, {"do_lower_case": True}, "do_lower_case is True"),
        (READING, {"modality_config": {"text": AS_TEXT, "message": AS_TEXT}}, "the chat template"),
        (READING, {"modality_config": {"image": AS_TEXT}}, "modality_config has text=None"),
        (
            READING,
            {"modality_config": {"text": {**AS_TEXT, "method": "x"}}},
            "text=.*'method': 'x'",
        ),
        (READING, {"processing_kwargs": {"text": {"padding": "max_length"}}}, "has processing_kwa"),
        (READING, {"model_args": {"is_causal": True}}, "has model_args={'is_causal': True}"),
        (READING, {"tokenizer_args": {"padding_side": "left"}}, "tokenizer_args is {'padding_side"),
        (READING, {"config_kwargs": {"sliding_window": 2}}, "config_kwargs is {'sliding_window"),
        (READING, {"query_length": 5}, "query_length is 5; the model supports None"),
        (READING, {"query_expansion": {"strategy": "min", "length": 9}}, "query_expansion is {'st"),
        (PROMPTS, {"model_type": "SparseEncoder"}, "model_type is 'SparseEncoder'"),
        (PROMPTS, {"similarity_fn_name": "maxsim"}, "similarity_fn_name is 'maxsim'; choose"),
    ],
)
def test_settings_of_modules_without_a_counterpart(folder, file, settings, message):
    change(folder / file, **settings)
    refused(message, GemmaTextEmbedder.from_preset, folder)


@pytest.mark.needs("sentence_transformers")
def test_each_setting_of_sentence_transformers_is_known():
    from inspect import signature

    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import (
        Dense,
        Normalize,
        Pooling,
        Transformer,
    )

    for module in (Transformer, Pooling, Dense, Normalize):
        known = sentence_transformers.KNOWN[module.__name__]
        arguments = list(signature(module.__init__).parameters)[2:] if module is Transformer else []
        assert not {*module.config_keys, *arguments} - known.keys() - {"backend"}, module
    held = SentenceTransformer._get_model_config(SentenceTransformer(modules=[Normalize()]))
    assert not {*held, "truncate_dim"} - sentence_transformers.KNOWN["SentenceTransformer"].keys()


def test_settings_that_change_no_vector(folder, gemma, caplog):
    change(
        folder / READING,
        unpad_inputs=False,
        model_kwargs={"attn_implementation": "sdpa"},
        modality_config={"text": AS_TEXT, "image+text": {}},
        processing_kwargs={"chat_template": {"add_generation_prompt": True}},
    )
    found = GemmaTextEmbedder.from_preset(folder)
    np.testing.assert_array_equal(found.encode("a fox"), gemma.model.encode("a fox"))
    assert "does not know" not in caplog.text
    for file in (POOLING, DENSE, READING, PROMPTS):
        change(folder / file, later=1)
        GemmaTextEmbedder.from_preset(folder)
        assert f"{file} sets later, which kmodels does not know" in caplog.text


@pytest.mark.parametrize("extra", ["LayerNorm", "Transformer"])
def test_modules_without_a_counterpart(folder, extra):
    modules = json.loads((folder / "modules.json").read_text())
    more = {"idx": 5, "name": "5", "path": "5", "type": f"sentence_transformers.models.{extra}"}
    (folder / "modules.json").write_text(json.dumps([*modules, more]))
    message = f"lists Transformer, .*, Normalize, {extra}; the model"
    refused(message, GemmaTextEmbedder.from_preset, folder)
    modules[0]["path"] = "0_Transformer"
    (folder / "modules.json").write_text(json.dumps(modules))
    refused("has the Transformer in 0_Transformer", GemmaTextEmbedder.from_preset, folder)
    for change, message in (
        ({"type": "own.Transformer"}, "a module of type own.Transformer, whose code"),
        ({"kwargs": ["task"]}, r"kwargs is \['task'\]; the model"),
    ):
        (folder / "modules.json").write_text(json.dumps([modules[0] | change, *modules[1:]]))
        refused(message, GemmaTextEmbedder.from_preset, folder)
    modules[0]["path"] = ""
    for place in ("../x", "/x", "x" * 256, "y/" * 600):
        changed = [modules[0], modules[1] | {"path": place}, *modules[2:]]
        (folder / "modules.json").write_text(json.dumps(changed))
        refused("which is not a folder of the directory", GemmaTextEmbedder.from_preset, folder)


def test_files_of_older_versions_and_the_length_of_a_text(gemma, folder):
    # The tokenizer's, and at most what the transformer was made for, as in the original.
    for positions, length in ((12, 12), (64, 20)):
        change(folder / "config.json", max_position_embeddings=positions)
        found = GemmaTextEmbedder.from_preset(folder).preprocessor
        assert found.sequence_length == length
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True})
    )
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 9}))
    (folder / "4_Normalize" / "config.json").unlink()
    model = GemmaTextEmbedder.from_preset(folder)
    assert model.settings == gemma.model.settings and model.preprocessor.sequence_length == 9


def test_the_tokenizer_says_what_stands_around_a_text(gemma):
    preprocessor = GemmaTextEmbedderPreprocessor.from_preset(gemma.path)
    assert preprocessor.add_start_token and preprocessor.add_end_token
    for name, array in gemma.model.preprocessor(gemma.texts).items():
        np.testing.assert_array_equal(array, gemma.inputs[name])


# === Pairs to learn ===

TRIPLETS = ("anchor", "positive", "negative")
MATRYOSHKA = {"matryoshka_dims": [24, 8, 5], "matryoshka_weights": [1.0, 0.5, 2.0]}
LOSSES = {
    "pairs": (TRIPLETS[:2], {}),
    "negatives": (TRIPLETS, {}),
    "matryoshka": (TRIPLETS, MATRYOSHKA),
}


# The last one has negatives too.
@pytest.mark.parametrize(
    "name", ["pairs", "negatives", pytest.param("matryoshka", marks=pytest.mark.each_backend)]
)
def test_loss_and_gradients_are_those_of_sentence_transformers(gemma, name):
    columns, settings = LOSSES[name]
    model = gemma.read()
    before = model.get_weights()
    model.compile(keras.optimizers.SGD(1.0), ContrastiveLoss(**settings))
    pairs = json.loads((gemma.path.parents[1] / "texts.json").read_text())["pairs"]
    loss = model.train_on_batch({column: pairs[column] for column in columns})
    np.testing.assert_allclose(loss, gemma.expected[f"loss_{name}"], rtol=tolerance("losses"))
    # A step at a rate of 1 is the gradient; so each tensor of the files has the place of its own.
    model.set_weights([a - to_numpy(b) for a, b in zip(before, model.weights, strict=True)])
    form = model.beside_transformer()[1]
    tensors = engine.export(model, [*rules(model.backbone.config, "0.model."), *form])
    names = {f"{i}_Dense/linear.{x}": f"{i}.linear.{x}" for i in (2, 3) for x in ("weight", "bias")}
    start = f"gradient_{name}_"
    found = {start + names.get(key, key): tensor.read() for key, tensor in tensors.items()}
    assert set(found) == {key for key in gemma.expected if key.startswith(start)}
    for key, gradient in found.items():
        expected = gemma.expected[key]
        limit = tolerance("hidden") * max(np.abs(expected).max(), 1)
        np.testing.assert_allclose(gradient, expected, rtol=0, atol=limit, err_msg=key)


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


@pytest.mark.each_time("mixed_bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_fit_learns_and_what_was_learnt_is_kept(gemma, tmp_path, dtype):
    model = gemma.read(dtype=dtype)
    loss = ContrastiveLoss(scale=10, matryoshka_dims=(24, 8))
    model.compile(keras.optimizers.Adam(3e-3), loss=loss)
    history = model.fit(records(), batch_size=4, epochs=8, verbose=0).history["loss"]
    assert history[-1] < 0.8 * history[0]
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(again.loss, ContrastiveLoss)
    np.testing.assert_array_equal(again.encode("fox"), model.encode("fox"))
    losses = [m.fit(records(), batch_size=4, verbose=0).history["loss"] for m in (model, again)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=tolerance("losses"))


@pytest.mark.each_time("mixed_bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_adapters_learn_alone_and_are_merged_into_the_export(gemma, tmp_path, dtype):
    model = gemma.read(dtype=dtype)
    model.backbone.enable_lora(rank=4)
    for layer in model.dense_layers:
        layer.trainable = False
    model.compile(keras.optimizers.Adam(3e-3), ContrastiveLoss(scale=10, matryoshka_dims=(24, 8)))
    before = {v.path: to_numpy(v) for v in model.weights}
    history = model.fit(records(), batch_size=4, epochs=8, verbose=0).history["loss"]
    assert history[-1] < 0.8 * history[0]
    moved = {v.path for v in model.weights if (to_numpy(v) != before[v.path]).any()}
    assert moved and all("/lora_" in path for path in moved)
    expected = model.encode("fox")
    assert np.isfinite(expected).all()
    refused("no place for LoRA adapters", model.export_to_transformers, tmp_path / "out")
    model.backbone.merge_lora()
    out = model.export_to_transformers(tmp_path / "out")
    assert set(read_safetensors(out)) == set(read_safetensors(gemma.path))
    if dtype == "float32":
        near(GemmaTextEmbedder.from_preset(out).encode("fox"), expected, "logits_across")


def evaluated(model, data, **settings):
    return model.evaluate(data, batch_size=12, verbose=0, **settings)


def test_forms_weights_and_prompts_of_pairs(gemma):
    rows, model = records(), gemma.read()
    model.compile()
    # Records, columns, arrays, batches, and token ids give the same loss.
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    arrays = {name: np.array(column, object) for name, column in columns.items()}
    named = {"anchor": columns["query"], "positive": columns["document"]}
    named |= {name: columns[name] for name in ("negative_1", "negative_2")}
    ids, labels = model.preprocessor(rows)
    assert ids["token_ids"].shape == ids["padding_mask"].shape == (12, 4, 20)
    assert labels.shape == (12,) and not labels.any()
    found = [evaluated(model, x) for x in (rows, columns, arrays, named)]
    found += [evaluated(model, ids, y=labels)]
    found += [model.evaluate(iter([(ids, labels)]), verbose=0)]
    np.testing.assert_allclose(found, found[0], rtol=1e-6)
    # Prompts stand in front of texts.
    written = [
        {name: ("q: " if name == "query" else "d: ") + text for name, text in row.items()}
        for row in rows
    ]
    wanted = evaluated(model, written)
    model.preprocessor.query_prompt, model.preprocessor.document_prompt = "q: ", "d: "
    assert evaluated(model, rows) == wanted != found[0]
    # Pairs of no weight are not there.
    weights = np.array([1, 2, 1, 1, 0, 0], "float32")
    weighted = evaluated(model, rows[:6], sample_weight=weights)
    model.compile(loss=ContrastiveLoss(reduction="sum"))
    few = evaluated(model, rows[:4], sample_weight=weights[:4])
    np.testing.assert_allclose(weighted, few / 6, rtol=1e-5)
    for given, message in (
        (({"anchor": ["a"], "label": ["b"]},), "got the columns anchor, label; give texts, or"),
        (({"anchor": ["a"]},), "got the columns anchor"),
        (([{"anchor": "a", "positive": "b"}, {"anchor": "a"}],), "one pair has anchor"),
        (([{"anchor": "a", "positive": None}],), "expected text, got NoneType"),
        (({"anchor": ["a"], "positive": ["b"]}, [1]), "pairs have no labels"),
    ):
        refused(message, model.preprocessor, *given)
