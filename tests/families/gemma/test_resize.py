"""Embedding tables with more or fewer rows, and everything that follows them."""

import copy

import keras
import numpy as np
import pytest

from kmodels import InputError
from kmodels.models import GemmaBackbone, GemmaCausalLM, GemmaCausalLMPreprocessor
from kmodels.text import demo
from kmodels.text.training import train_tokenizer
from tolerances import tolerance

OLD, NEW = 320, 331
IDS = np.random.default_rng(0).integers(3, OLD, (4, 9)).astype("int32")


def numpy(x):
    return np.asarray(keras.ops.convert_to_numpy(keras.ops.stop_gradient(x)), "float32")


def task(**settings):
    return GemmaCausalLM.from_preset("gemma2_debug", preprocessor=None, **settings)


def table(model):
    return numpy(model.backbone.token_embedding.embeddings)


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16", "bfloat16"])
def test_new_rows_are_the_mean_of_the_old_ones_and_the_rest_stays(dtype):
    model = task(dtype=dtype)
    before, logits = table(model), model.predict(IDS, verbose=0)
    assert model.resize_token_embeddings(NEW) is model.backbone.token_embedding
    after, found = table(model), model.predict(IDS, verbose=0)
    np.testing.assert_array_equal(after[:OLD], before)
    mean = before.astype("float64").mean(0)
    np.testing.assert_allclose(after[OLD:], np.tile(mean, (11, 1)), rtol=2**-8, atol=1e-7)
    assert found.shape == (4, 9, NEW) and model.output_shape == (None, None, NEW)
    near = tolerance("dense", dtype.removeprefix("mixed_"))
    np.testing.assert_allclose(found[..., :OLD], logits, rtol=0, atol=near)
    assert model.backbone.config.vocabulary_size == model.backbone.blocks[0].config.vocabulary_size
    assert str(model.backbone.token_embedding.embeddings.dtype) == model.variables[0].dtype


def test_fewer_rows_are_the_first_ones():
    model = task()
    before = table(model)
    model.resize_token_embeddings(300)
    np.testing.assert_array_equal(table(model), before[:300])
    model.resize_token_embeddings(301, pad_to_multiple_of=16)
    assert model.backbone.config.vocabulary_size == len(table(model)) == 304


def test_compiled_functions_the_optimizer_and_generation_follow():
    model, fresh = task(), task(vocabulary_size=NEW)
    x, y = IDS[:, :-1], IDS[:, 1:]
    for one in (model, fresh):
        one.compile(keras.optimizers.SGD(0.1))
    # Everything is compiled for the old table.
    model.fit(x, y, verbose=0)
    model.evaluate(x, y, verbose=0)
    model.generate({"token_ids": IDS[:, :3]}, max_new_tokens=2, stop_token_ids=None)
    # As PyTorch's loops see it.
    parameters = getattr(model, "parameters", list)
    count = len(list(parameters()))
    model.resize_token_embeddings(NEW)
    assert len(list(parameters())) == count
    fresh.set_weights(model.get_weights())
    x, y = np.where(x % 5, x, NEW - 1), np.where(y % 5, y, NEW - 1)
    prompt = {"token_ids": x[:, :3]}
    for name in ("evaluate", "fit", "evaluate"):
        if name == "fit":
            with pytest.warns(UserWarning, match="start over"):
                model.fit(x, y, verbose=0)
            fresh.fit(x, y, verbose=0)
        else:
            found, wanted = (m.evaluate(x, y, verbose=0) for m in (model, fresh))
            np.testing.assert_allclose(found, wanted, rtol=1e-5)
    found, wanted = (
        m.generate(prompt, max_new_tokens=4, stop_token_ids=None)["token_ids"]
        for m in (model, fresh)
    )
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_allclose(table(model), table(fresh), rtol=0, atol=1e-6)
    assert np.ptp(table(model)[OLD:], axis=0).max() > 0, "the new rows are trained"


def test_files_and_copies_have_the_new_table(tmp_path):
    model = task()
    model.backbone.enable_lora(2)
    model.resize_token_embeddings(NEW)
    assert not model.backbone.token_embedding.embeddings.trainable
    ids = np.where(IDS % 5, IDS, NEW - 1)
    wanted = model.predict(ids, verbose=0)
    model.save(tmp_path / "task.keras")
    model.save_to_preset(tmp_path / "preset")
    read = keras.saving.load_model(tmp_path / "task.keras")
    for other in (read, GemmaCausalLM.from_preset(tmp_path / "preset"), copy.deepcopy(model)):
        found = other.predict(ids, verbose=0)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance("logits"))
    assert len(read.trainable_variables) == len(model.trainable_variables)


def test_a_larger_tokenizer_fits_afterwards():
    tokenizer = train_tokenizer(demo.texts(), 400)
    preprocessor = GemmaCausalLMPreprocessor(tokenizer, sequence_length=12)
    backbone = GemmaBackbone.from_preset("gemma_debug")
    with pytest.raises(InputError, match="or the backbone as many rows by resize_token_embeddings"):
        GemmaCausalLM(backbone, preprocessor)
    backbone.resize_token_embeddings(tokenizer.vocabulary_size())
    model = GemmaCausalLM(backbone, preprocessor)
    model.fit(["the cat", "a dog"], verbose=0)
    with pytest.raises(InputError, match="tokens and the embedding table 320 rows"):
        model.resize_token_embeddings(OLD)
    assert len(table(model)) == tokenizer.vocabulary_size()


@pytest.mark.parametrize("given", [(0,), (3.5,), (330, 0)])
def test_sizes_that_are_none_are_refused(given):
    backbone = GemmaBackbone.from_preset("gemma_debug")
    with pytest.raises(InputError, match=r"new_num_tokens|pad_to_multiple_of"):
        backbone.resize_token_embeddings(*given)
    assert backbone.config.vocabulary_size == OLD


@pytest.mark.needs("transformers")
def test_transformers_reads_it_and_gives_the_same_mean(tmp_path):
    import torch
    import transformers

    model = task()
    load = transformers.AutoModelForCausalLM.from_pretrained
    theirs = load(model.export_to_transformers(tmp_path / "before"))
    torch.manual_seed(0)
    theirs.resize_token_embeddings(4000)
    model.resize_token_embeddings(4000)
    # Theirs are drawn around the mean, so that theirs on average are ours.
    drawn = theirs.get_input_embeddings().weight[OLD:].detach().numpy()
    np.testing.assert_allclose(drawn.mean(0), table(model)[-1], rtol=0, atol=1e-3)
    again = load(model.export_to_transformers(tmp_path / "after"))
    assert again.config.vocab_size == 4000
    ids = np.where(IDS % 5, IDS, 3999)
    with torch.no_grad():
        found = again(torch.from_numpy(ids).long()).logits.numpy()
    wanted = model.predict(ids, verbose=0)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance("logits"))
