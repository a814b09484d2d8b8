"""CLIP's tokenizer and preprocessor against transformers."""

import json
import shutil

import keras
import numpy as np
import pytest

from kmodels.core.errors import InputError
from kmodels.models import (
    CLIPPreprocessor,
    CLIPTextEncoder,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
)
from kmodels.text import Cut
from refusals import refused

BEGIN, END = "<|startoftext|>", "<|endoftext|>"


@pytest.fixture(scope="module")
def folder(references):
    return references / "clip" / "tokenizer"


@pytest.fixture(scope="module")
def said(folder):
    return json.loads((folder / "texts.json").read_text())


@pytest.fixture
def old_folder(folder, tmp_path):
    """A directory as transformers 4 wrote it, without tokenizer.json."""
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        shutil.copy(folder / name, tmp_path / name)
    return tmp_path


def test_ids_are_those_of_transformers(folder, old_folder, said):
    vocabulary = json.loads((folder / "vocab.json").read_text())
    merges = (folder / "merges.txt").read_text().splitlines()[1:]
    for tokenizer in (
        CLIPTokenizer.from_preset(folder),
        CLIPTokenizer.from_preset(old_folder),
        CLIPTokenizer(folder / "vocab.json", folder / "merges.txt", pad_with_end_token=True),
        CLIPTokenizer(vocabulary, merges, pad_with_end_token=True),
    ):
        assert tokenizer.tokenize(said["texts"]) == said["ids"]
        assert [tokenizer.encode(text) for text in said["texts"]] == said["encoded"]
        tokens = (tokenizer.start_token, tokenizer.end_token, tokenizer.pad_token)
        assert tokens == (BEGIN, END, END)
        again = keras.saving.deserialize_keras_object(
            keras.saving.serialize_keras_object(tokenizer)
        )
        assert again.tokenize(said["texts"]) == said["ids"]
        assert again.pad_token_id == tokenizer.pad_token_id


def test_texts_come_back_as_transformers_gives_them(folder, said):
    tokenizer = CLIPTokenizer.from_preset(folder)
    assert tokenizer.detokenize(said["ids"]) == said["decoded"]
    assert tokenizer.detokenize(said["token_ids"]) == [
        tokenizer.detokenize(ids) for ids in said["token_ids"]
    ]
    assert tokenizer.detokenize(said["ids"][0]) == "a photo of a cat ."


def test_padding_is_that_of_the_files_or_of_keras_hub(folder, old_folder):
    vocabulary = json.loads((folder / "vocab.json").read_text())
    merges = (folder / "merges.txt").read_text().splitlines()[1:]
    assert CLIPTokenizer(vocabulary, merges).pad_token_id == 0
    assert CLIPTokenizer(vocabulary, merges, pad_with_end_token=True).pad_token == END
    settings = json.loads((old_folder / "tokenizer_config.json").read_text())
    (old_folder / "tokenizer_config.json").write_text(json.dumps({**settings, "pad_token": "!"}))
    assert CLIPTokenizer.from_preset(old_folder).pad_token_id == vocabulary["!"]
    (old_folder / "tokenizer_config.json").unlink()
    assert CLIPTokenizer.from_preset(old_folder).pad_token == END


def test_rows_are_those_of_transformers(folder, said):
    preprocessor = CLIPPreprocessor.from_preset(folder, sequence_length=12)
    for x in (said["texts"], np.array(said["texts"]), {"prompts": said["texts"]}):
        found = preprocessor(x)
        np.testing.assert_array_equal(found["token_ids"], said["token_ids"])
        np.testing.assert_array_equal(found["padding_mask"], said["padding_mask"])
    one = preprocessor(said["texts"][0])
    np.testing.assert_array_equal(one["token_ids"], said["token_ids"][0])
    x, y, weights = preprocessor(said["texts"], np.ones(6), np.zeros(6))
    assert (y == 1).all() and (weights == 0).all()
    np.testing.assert_array_equal(x["token_ids"], said["token_ids"])
    assert preprocessor(x) is x
    plain = CLIPPreprocessor(
        preprocessor.tokenizer, None, 12, add_start_token=False, add_end_token=False
    )
    ids = plain(said["texts"][0])["token_ids"]
    np.testing.assert_array_equal(ids[: len(said["ids"][0])], said["ids"][0][:12])
    again = CLIPPreprocessor.from_config(preprocessor.get_config())
    assert again.get_config() == preprocessor.get_config()
    assert CLIPPreprocessor(preprocessor.tokenizer).sequence_length == 77
    text = "a long text " * 9
    again([text, "a"])
    ids = preprocessor.tokenizer(text)
    assert again.cut == Cut(examples=1, prompt_tokens=len(ids) - 10)


def test_what_is_no_text_is_refused(folder):
    preprocessor = CLIPPreprocessor.from_preset(folder)
    for x, message in (
        (
            {"images": np.zeros(2), "prompts": ["a", "b"]},
            "got images and has no image_converter; give one",
        ),
        ({"prompts": "a", "responses": "b"}, "CLIP's text tower got prompts, responses; give"),
    ):
        refused(message, preprocessor, x)
    with pytest.raises(InputError, match="sequence_length is 1; give a whole number from 2 on"):
        preprocessor("a", sequence_length=1)
    refused(r"the vocabulary lacks <\|startoftext\|>", CLIPTokenizer, {"a": 0, END: 1}, [])


def test_a_model_takes_texts(folder, said, tmp_path):
    tokenizer = CLIPTokenizer.from_preset(folder)
    backbone = CLIPTextEncoder.from_preset(
        "clip_text_debug", vocabulary_size=tokenizer.vocabulary_size()
    )
    preprocessor = CLIPPreprocessor(tokenizer, sequence_length=12)
    model = CLIPTextModelWithProjection(backbone, projection_dim=4, preprocessor=preprocessor)
    embeds = model.predict(said["texts"], verbose=0)
    assert embeds.shape == (6, 4)
    given = {name: np.array(said[name]) for name in ("token_ids", "padding_mask")}
    np.testing.assert_allclose(model.predict(given, verbose=0), embeds, atol=1e-6)
    model.compile("sgd", "mse")
    model.fit(said["texts"], np.ones((6, 4)), verbose=0)
    embeds = model.predict(said["texts"], verbose=0)
    model.save(tmp_path / "model.keras")
    model.save_to_preset(tmp_path / "preset")
    model.export_to_transformers(tmp_path / "hf")
    for again in (
        keras.saving.load_model(tmp_path / "model.keras"),
        CLIPTextModelWithProjection.from_preset(tmp_path / "preset"),
        CLIPTextModelWithProjection.from_preset(tmp_path / "hf", preprocessor=preprocessor),
    ):
        assert isinstance(again.preprocessor.tokenizer, CLIPTokenizer)
        np.testing.assert_allclose(again.predict(said["texts"], verbose=0), embeds, atol=1e-6)
    read = CLIPTextModelWithProjection.from_preset(tmp_path / "hf")
    assert read.preprocessor.sequence_length == 77
    assert CLIPPreprocessor.from_preset(tmp_path / "preset").sequence_length == 12


@pytest.mark.across("torch")
def test_transformers_reads_the_tokenizer(folder, said, tmp_path):
    from torchvision_cpu import define_torchvision_operators

    define_torchvision_operators()
    import transformers

    CLIPTokenizer.from_preset(folder).save_to_preset(tmp_path / "end")
    CLIPTokenizer(folder / "vocab.json", folder / "merges.txt").save_to_preset(tmp_path / "first")
    for name in ("end", "first"):
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / name)
        ours = CLIPTokenizer.from_preset(tmp_path / name)
        assert theirs.pad_token_id == ours.pad_token_id
        for text, ids, decoded in zip(said["texts"], said["encoded"], said["decoded"], strict=True):
            # Where "!" fills rows, transformers takes it for that in a text too.
            if name == "end" or "!" not in text:
                assert theirs.encode(text) == ids == ours.encode(text)
                assert theirs.decode(ids, skip_special_tokens=True) == decoded
    names = ("vocab.json", "merges.txt")
    for name in names:
        shutil.copy(folder / name, tmp_path / name)
    theirs = transformers.CLIPTokenizer.from_pretrained(tmp_path, pad_token="!")
    theirs.save_pretrained(tmp_path / "both")
    config = (tmp_path / "both" / "tokenizer_config.json").read_text()
    (tmp_path / "tokenizer_config.json").write_text(config)
    for path in (tmp_path, tmp_path / "both"):
        ours = CLIPTokenizer.from_preset(path)
        assert [ours.encode(text) for text in said["texts"]] == [
            theirs.encode(text) for text in said["texts"]
        ]
        assert ours.pad_token_id == theirs.pad_token_id == 0


@pytest.mark.needs("tensorflow")
def test_in_tf_data(folder, said):
    import tensorflow as tf

    preprocessor = CLIPPreprocessor.from_preset(folder, sequence_length=12)
    dataset = tf.data.Dataset.from_tensor_slices((said["texts"], np.arange(6)))
    for data in (dataset.map(preprocessor).batch(6), dataset.batch(6).map(preprocessor)):
        x, y = next(iter(data))
        np.testing.assert_array_equal(x["token_ids"], said["token_ids"])
        np.testing.assert_array_equal(x["padding_mask"], said["padding_mask"])
        np.testing.assert_array_equal(y, np.arange(6))
