"""EmbeddingGemma against sentence-transformers: hidden states, vectors, prompts, files."""

import json
import shutil
from types import SimpleNamespace

import keras
import numpy as np
import pytest

from arrays import assert_same_tensors, read_npz, to_numpy
from gradients import value_and_grad
from kmodels import InputError, ops
from kmodels.models import (
    Gemma3Backbone,
    GemmaBackbone,
    GemmaCausalLM,
    GemmaTextEmbedder,
    GemmaTextEmbedderPreprocessor,
)
from kmodels.models.gemma.family import transformers_form
from numpy_attention import attention_and_gradients
from tolerances import tolerance

CASES = ("gemma", "last", "first")


class Case:
    """A directory of sentence-transformers with what it computes, and the model read from it."""

    def __init__(self, folder):
        self.path = folder / "model"
        self.expected = read_npz(folder / "expected.npz")
        self.texts = json.loads((folder.parent / "texts.json").read_text())["texts"]
        self.model = GemmaTextEmbedder.from_preset(self.path)
        names = ("token_ids", "padding_mask")
        self.inputs = {name: self.expected[name].astype("int32") for name in names}


@pytest.fixture(scope="module", params=CASES)
def case(request, references):
    return Case(references / "embedding_gemma" / request.param)


@pytest.fixture(scope="module")
def gemma(references):
    return Case(references / "embedding_gemma" / "gemma")


def near(found, expected, what="hidden"):
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance(what))


# === Both sides ===


@pytest.mark.each_backend
def test_hidden_states_of_padded_texts(gemma):
    there = gemma.expected["padding_mask"].astype(bool)
    found = to_numpy(gemma.model.backbone(gemma.inputs))
    near(found[there], gemma.expected["hidden"][there])
    config = gemma.model.backbone.config
    # transformers halves the number in the file, and counts the token itself.
    assert config.sliding_window_size == 6
    assert [config.block(i).window for i in range(3)] == [4, None, 4]
    for other in (4, 8):
        wrong = GemmaBackbone.from_preset(gemma.path, sliding_window_size=other)
        apart = np.abs(to_numpy(wrong(gemma.inputs))[there] - gemma.expected["hidden"][there])
        assert apart.max() > 100 * tolerance("hidden")


def test_padding_on_either_side_is_as_if_it_were_not_there(gemma):
    ids, mask = gemma.inputs["token_ids"], gemma.inputs["padding_mask"]
    count = mask.sum(axis=1)
    found = to_numpy(gemma.model.backbone(gemma.inputs))
    rolled = {
        name: np.stack([np.roll(row, -n) for row, n in zip(x, count, strict=True)])
        for name, x in gemma.inputs.items()
    }
    behind = to_numpy(gemma.model.backbone(rolled))
    for i, n in enumerate(count):
        alone = to_numpy(gemma.model.backbone(ids[i : i + 1, :n]))[0]
        near(found[i, :n], alone)
        near(behind[i, ids.shape[1] - n :], alone)


def test_texts_in_one_row_see_their_own_segment(gemma):
    rows = [gemma.inputs["token_ids"][i, :n] for i, n in ((1, 12), (3, 7))]
    packed = {
        "token_ids": np.concatenate([*rows, [0, 0]])[None],
        "padding_mask": np.array([[1] * 19 + [0] * 2]),
        "positions": np.concatenate([np.arange(12), np.arange(7), [0, 0]])[None],
        # Padding has a number that a text has too.
        "segment_ids": np.array([[-1] * 12 + [5] * 7 + [5] * 2]),
    }
    found = to_numpy(gemma.model.backbone(packed))[0]
    for row, start in ((rows[0], 0), (rows[1], 12)):
        alone = to_numpy(gemma.model.backbone(row[None]))[0]
        near(found[start : start + len(row)], alone)


def test_a_causal_model_is_as_before():
    """Same numbers, and nothing in its graph that would look at both sides."""
    keras.utils.set_random_seed(1)
    model = GemmaBackbone.from_preset("gemma3_debug")
    ids = np.arange(12)[None] % 7
    first = to_numpy(model(ids))
    changed = np.concatenate([ids[:, :9], ids[:, 9:] + 1], axis=1)
    np.testing.assert_array_equal(to_numpy(model(changed))[:, :9], first[:, :9])
    both = GemmaBackbone.from_preset("gemma3_debug", use_bidirectional_attention=True)
    both.set_weights(model.get_weights())
    assert np.abs(to_numpy(both(changed))[:, :9] - to_numpy(both(ids))[:, :9]).max() > 1e-3


def test_no_text_is_generated(gemma):
    model = GemmaCausalLM(gemma.model.backbone)
    with pytest.raises(InputError, match="use_bidirectional_attention is True, so tokens see"):
        model.generate(np.array([[2, 5, 6]]), max_length=5, stop_token_ids=None)


@pytest.mark.parametrize("length", [9, 300, 800])
def test_the_window_to_both_sides(length):
    """Grouped heads and segments, values and gradients against float64, also block by block."""
    rng = np.random.default_rng(0)
    shapes = ((2, length, 4, 6), (2, length, 2, 6), (2, length, 2, 6))
    arrays = [rng.normal(size=shape).astype("float32") for shape in shapes]
    segments = np.ones((2, length), "int32")
    segments[0, -3:] = 0
    given = {"window": 1 + length // 3, "segment_ids": segments, "scale": 0.3}
    weight = np.random.default_rng(7).normal(size=shapes[0]).astype("float32")
    output, gradients = attention_and_gradients(*arrays, weight, causal=False, **given)
    found, ours = value_and_grad(
        lambda q, k, v: ops.attention(q, k, v, causal=False, **given), *arrays
    )
    np.testing.assert_allclose(to_numpy(found), output, rtol=0, atol=tolerance("attention"))
    for one, other in zip(ours, gradients, strict=True):
        scale = np.abs(other).max()
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance("attention") * scale)


# === Vectors ===


@pytest.mark.each_backend
def test_vectors_are_those_of_sentence_transformers(case):
    near(case.model.encode(case.texts, normalize_embeddings=False), case.expected["plain"])
    found = case.model.encode_query(case.texts, batch_size=2, normalize_embeddings=False)
    near(found, case.expected["query"])
    found = case.model.encode_document(case.texts, batch_size=3, normalize_embeddings=False)
    near(found, case.expected["document"])
    near(to_numpy(case.model(case.inputs)), case.expected["plain"])
    near(case.model.predict(case.inputs, verbose=0), case.expected["plain"])


def test_unit_vectors(case):
    plain = case.expected["plain"]
    unit = plain / np.linalg.norm(plain, axis=1, keepdims=True)
    found = case.model.encode(case.texts)
    near(found, unit, "logits_across")
    assert found.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1.0, rtol=1e-6)
    near(case.model.encode(case.texts[1]), unit[1], "logits_across")


def test_similarities(case):
    a, b = case.expected["plain"], case.expected["query"]
    assert case.model.similarity_fn_name == ("cosine" if case.path.parent.name != "last" else "dot")
    near(case.model.similarity(a, b), case.expected["similarity"], "logits")
    assert case.model.similarity(a[0], b[:2]).shape == (1, 2)


@pytest.mark.parametrize("name", ["cosine", "dot", "euclidean", "manhattan"])
def test_each_similarity(name):
    model = GemmaTextEmbedder.from_preset("embedding_gemma_debug", similarity_fn_name=name)
    a, b = np.random.default_rng(0).normal(size=(2, 3, 5)).astype("float32")
    expected = {
        "cosine": lambda x, y: x @ y / np.linalg.norm(x) / np.linalg.norm(y),
        "dot": lambda x, y: x @ y,
        "euclidean": lambda x, y: -np.sqrt(((x - y) ** 2).sum()),
        "manhattan": lambda x, y: -np.abs(x - y).sum(),
    }[name]
    near(model.similarity(a, b), [[expected(x, y) for y in b] for x in a], "first_loss")


def test_shorter_vectors(gemma):
    plain = gemma.expected["plain"][:, :8]
    unit = plain / np.linalg.norm(plain, axis=1, keepdims=True)
    near(gemma.model.encode(gemma.texts, truncate_dim=8), unit, "logits_across")
    found = gemma.model.encode(gemma.texts, truncate_dim=8, normalize_embeddings=False)
    near(found, plain)
    model = GemmaTextEmbedder.from_preset(gemma.path, truncate_dim=8)
    near(model.encode(gemma.texts), unit, "logits_across")
    with pytest.raises(InputError, match="truncate_dim is 25; the vectors have 24 numbers"):
        gemma.model.encode(gemma.texts, truncate_dim=25)


def test_prompts(gemma):
    model, text = gemma.model, gemma.texts[1]
    assert model.prompts == {
        "query": "task: search result | query: ",
        "document": "title: none | text: ",
    }
    named = model.encode(text, prompt_name="query")
    np.testing.assert_array_equal(named, model.encode(text, prompt=model.prompts["query"]))
    np.testing.assert_array_equal(named, model.encode(model.prompts["query"] + text))
    with pytest.raises(InputError, match="no prompt 'question'; the model's are"):
        model.encode(text, prompt_name="question")
    default = GemmaTextEmbedder.from_preset(gemma.path, default_prompt_name="query")
    near(default.encode(text), named, "logits_across")
    near(default.encode(text, prompt=""), model.encode(text), "logits_across")
    with pytest.raises(InputError, match="no prompt 'answer'"):
        GemmaTextEmbedder.from_preset(gemma.path, default_prompt_name="answer")


def test_the_order_and_the_size_of_batches_change_nothing(gemma):
    texts = [f"{text} {i}" for i in range(3) for text in gemma.texts]
    once = gemma.model.encode(texts, batch_size=len(texts))
    near(gemma.model.encode(texts, batch_size=4), once, "logits_across")
    near(gemma.model.encode(texts[::-1], batch_size=5)[::-1], once, "logits_across")
    assert gemma.model.encode([]).shape == (0, 24)


def test_a_bar_is_printed(gemma, capsys):
    gemma.model.encode(gemma.texts, show_progress_bar=True)
    assert "6/6" in capsys.readouterr().out


def test_what_encode_does_not_take(gemma):
    with pytest.raises(InputError, match="encode got a int among the texts"):
        gemma.model.encode(["a", 3])
    with pytest.raises(InputError, match="encode needs a preprocessor"):
        GemmaTextEmbedder(gemma.model.backbone).encode("a")


def test_bfloat16_is_as_close_to_float64_as_transformers(gemma):
    there = gemma.expected["padding_mask"].astype(bool)
    backbone = GemmaBackbone.from_preset(gemma.path, dtype="bfloat16")
    exact = gemma.expected["hidden64"][there]
    ours = np.abs(to_numpy(backbone(gemma.inputs))[there] - exact).mean()
    assert ours < 1.1 * np.abs(gemma.expected["hidden16"][there] - exact).mean()


def test_half_precision(gemma):
    model = GemmaTextEmbedder.from_preset(gemma.path, dtype="mixed_bfloat16")
    found = model.encode(gemma.texts, normalize_embeddings=False)
    np.testing.assert_allclose(found, gemma.expected["plain"], rtol=0, atol=0.1)
    assert to_numpy(model(gemma.inputs)).dtype == found.dtype == np.float32


# === Settings ===


def test_settings_that_are_none():
    for settings, message in (
        ({"pooling": "max"}, "pooling is 'max'; the model supports mean, cls, lasttoken"),
        ({"dense": [{"units": 0}]}, "units of dense layer 0"),
        (
            {"dense": [{"units": 4, "activation": "gelu"}]},
            "dense layer 0 has the activation 'gelu'",
        ),
        ({"dense": [{"units": 4, "bias": 1}]}, "dense layer 0 has bias; give units"),
        ({"similarity_fn_name": "angle"}, "similarity_fn_name is 'angle'"),
    ):
        with pytest.raises(InputError, match=message):
            GemmaTextEmbedder.from_preset("gemma3_debug", **settings)
    with pytest.raises(InputError, match="Gemma3Backbone ends at the hidden states; give it to"):
        Gemma3Backbone(is_embedding_model=True)


def test_the_sizes_of_the_preset():
    """307,581,696 parameters, as keras-hub lists its embedding_gemma3_300m."""
    config, dense = published()
    width, head = config.hidden_dim, config.head_dim
    attention = 2 * width * head * (config.num_query_heads + config.num_key_value_heads)
    block = attention + 3 * width * config.mlp_dim + 4 * width + 2 * head
    count = config.vocabulary_size * width + config.num_layers * block + width
    assert count + 768 * dense[0] + dense[0] * dense[1] == 307_581_696
    assert [config.block(i).window for i in range(24)] == [
        None if i % 6 == 5 else 257 for i in range(24)
    ]
    model = GemmaTextEmbedder.from_preset("embedding_gemma_debug")
    assert model.count_params() < 100_000 and model.settings["dense"][0]["units"] == 48


@pytest.mark.across("torch")
def test_the_preset_has_as_many_parameters_as_the_original():
    import torch

    from torchvision_cpu import define_torchvision_operators

    define_torchvision_operators()
    import transformers

    config, dense = published()
    form = transformers_form(SimpleNamespace(config=config))[0]
    names = set(form) - {"architectures", "model_type"}
    theirs = transformers.Gemma3TextConfig(**{name: form[name] for name in names})
    assert theirs.sliding_window == config.block(0).window == 257
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(theirs)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count + 768 * dense[0] + dense[0] * dense[1] == 307_581_696


def published():
    """The config of the published size, and the widths of its dense layers."""
    fields = GemmaBackbone.presets["embedding_gemma_300m"]
    own = {name: value for name, value in fields.items() if not name.startswith("task_")}
    dense = [layer["units"] for layer in fields["task_dense"]]
    return GemmaBackbone.make_config(**own), dense


# === Files ===


def test_export_is_what_was_read(case, tmp_path):
    out = case.model.export_to_transformers(tmp_path / "out")
    assert_same_tensors(out, case.path)
    folders = sorted(path.parent.name for path in case.path.glob("*/model.safetensors"))
    assert folders == sorted(path.parent.name for path in out.glob("*/model.safetensors"))
    for folder in folders:
        assert_same_tensors(out / folder, case.path / folder)
    again = GemmaTextEmbedder.from_preset(out)
    assert again.backbone.config == case.model.backbone.config
    assert again.settings == case.model.settings
    assert again.preprocessor.sequence_length == case.model.preprocessor.sequence_length == 20
    np.testing.assert_array_equal(again.encode(case.texts), case.model.encode(case.texts))
    again.export_to_transformers(out)  # in place of itself
    (out / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"also holds notes\.txt"):
        again.export_to_transformers(out)


@pytest.mark.needs("sentence_transformers")
@pytest.mark.across("torch")
def test_sentence_transformers_loads_the_export(case, tmp_path):
    from torchvision_cpu import define_torchvision_operators

    define_torchvision_operators()
    import sentence_transformers

    out = case.model.export_to_transformers(tmp_path / "out")
    theirs = sentence_transformers.SentenceTransformer(str(out), device="cpu")
    near(theirs.encode(case.texts), case.expected["plain"])
    near(theirs.encode_query(case.texts), case.expected["query"])
    assert theirs.similarity_fn_name == case.model.similarity_fn_name
    assert theirs.max_seq_length == 20


def test_our_own_files(case, tmp_path):
    expected = case.model.encode_query(case.texts)
    case.model.save_to_preset(tmp_path / "own")
    again = GemmaTextEmbedder.from_preset(tmp_path / "own")
    np.testing.assert_array_equal(again.encode_query(case.texts), expected)
    case.model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(again.encode_query(case.texts), expected)
    assert again.settings == case.model.settings


def test_backbone_and_causal_model_read_the_directory(gemma, tmp_path):
    gemma.model.save_to_preset(tmp_path / "own")
    for path in (gemma.path, tmp_path / "own"):
        for model in (GemmaBackbone.from_preset(path), GemmaCausalLM.from_preset(path).backbone):
            np.testing.assert_array_equal(
                to_numpy(model(gemma.inputs)), to_numpy(gemma.model.backbone(gemma.inputs))
            )
    lm = GemmaCausalLM.from_preset("gemma3_debug", preprocessor=None)
    lm.save_to_preset(tmp_path / "causal")
    embedder = GemmaTextEmbedder.from_preset(tmp_path / "causal")
    assert embedder.settings["dense"] == [] and embedder.backbone.config == lm.backbone.config


def test_other_dense_layers_start_anew(gemma):
    model = GemmaTextEmbedder.from_preset(gemma.path, dense=[{"units": 7}])
    assert model.encode("a").shape == (7,)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("1_Pooling/config.json", {"pooling_mode": "max"}, "the pooling is max"),
        ("1_Pooling/config.json", {"pooling_mode": ["cls", "mean"]}, "the pooling is cls, mean"),
        ("1_Pooling/config.json", {"include_prompt": False}, "include_prompt is False"),
        (
            "2_Dense/config.json",
            {"activation_function": "torch.nn.modules.activation.ReLU"},
            "activation_function is torch.nn.modules.activation.ReLU",
        ),
        ("2_Dense/config.json", {"use_residual": True}, "use_residual is True"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case is True"),
    ],
)
def test_settings_of_modules_without_a_counterpart(gemma, tmp_path, file, change, message):
    folder = shutil.copytree(gemma.path, tmp_path / "model")
    held = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**held, **change}))
    with pytest.raises(InputError, match=message):
        GemmaTextEmbedder.from_preset(folder)


@pytest.mark.parametrize("extra", ["LayerNorm", "Transformer"])
def test_modules_without_a_counterpart(gemma, tmp_path, extra):
    folder = shutil.copytree(gemma.path, tmp_path / "model")
    modules = json.loads((folder / "modules.json").read_text())
    more = {"idx": 5, "name": "5", "path": "5", "type": f"sentence_transformers.models.{extra}"}
    (folder / "modules.json").write_text(json.dumps([*modules, more]))
    with pytest.raises(InputError, match=rf"lists Transformer, .*, Normalize, {extra}; the model"):
        GemmaTextEmbedder.from_preset(folder)
    modules[0]["path"] = "0_Transformer"
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(InputError, match="has the Transformer in 0_Transformer"):
        GemmaTextEmbedder.from_preset(folder)


def test_files_of_older_versions(gemma, tmp_path):
    folder = shutil.copytree(gemma.path, tmp_path / "model")
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True})
    )
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 9}))
    (folder / "4_Normalize" / "config.json").unlink()
    model = GemmaTextEmbedder.from_preset(folder)
    assert model.settings == gemma.model.settings and model.preprocessor.sequence_length == 9


@pytest.mark.parametrize(("positions", "length"), [(12, 12), (64, 20)])
def test_the_length_of_a_text(gemma, tmp_path, positions, length):
    """The tokenizer's, and at most what the transformer was made for, as in the original."""
    folder = shutil.copytree(gemma.path, tmp_path / "model")
    held = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**held, "max_position_embeddings": positions}))
    assert GemmaTextEmbedder.from_preset(folder).preprocessor.sequence_length == length


def test_the_tokenizer_says_what_stands_around_a_text(gemma):
    preprocessor = GemmaTextEmbedderPreprocessor.from_preset(gemma.path)
    assert preprocessor.add_start_token and preprocessor.add_end_token
    found = gemma.model.preprocessor(gemma.texts)
    np.testing.assert_array_equal(found["token_ids"], gemma.inputs["token_ids"])
    np.testing.assert_array_equal(found["padding_mask"], gemma.inputs["padding_mask"])


def test_files_without_a_place_for_both_sides(gemma, tmp_path):
    backbone = gemma.model.backbone
    with pytest.raises(InputError, match=r"GGUF .* no place for use_bidirectional_attention"):
        GemmaCausalLM(backbone).export_to_gguf(tmp_path / "model.gguf")
    for preset in ("gemma_debug", "gemma2_debug", "gemma4_debug"):
        other = GemmaBackbone.from_preset(preset, use_bidirectional_attention=True)
        with pytest.raises(InputError, match=r"no counterpart for .*use_bidirectional_attention"):
            other.export_to_transformers(tmp_path / preset)
