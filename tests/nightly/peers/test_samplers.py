"""What keras-hub's tests of its samplers assert, of the classes here.

Letters stand for tokens. A test model knows a word, `cache`, and says its next letter.
"""

import keras
import numpy as np
import pytest

from arrays import to_numpy
from kmodels.generation import (
    BeamSampler,
    ContrastiveSampler,
    GreedySampler,
    RandomSampler,
    TopKSampler,
    TopPSampler,
    deserialize,
    get,
    serialize,
)

pytestmark = pytest.mark.across

LENGTH, LETTERS, WIDTH = 12, 26, 3
ALL = {
    "greedy": GreedySampler(),
    "random": RandomSampler(),
    "top_k": TopKSampler(),
    "top_p": TopPSampler(),
    "beam": BeamSampler(),
    "contrastive": ContrastiveSampler(k=5, alpha=0.2),
}
T = ord("t") - 97


def _ids(text):
    return keras.ops.convert_to_tensor([[ord(letter) - 97 for letter in text]])


def _text(ids):
    return ["".join(chr(97 + token) for token in row) for row in to_numpy(ids).tolist()]


def _says(logits):
    def following(prompt, cache, index):
        rows = prompt.shape[0]
        found = np.repeat(np.asarray(logits, "float32")[None], rows, 0)
        return keras.ops.convert_to_tensor(found), keras.ops.ones((rows, WIDTH)), cache

    return following


def _spells(prompt, cache, index):
    logits = keras.ops.one_hot(cache[:, index], LETTERS) * 1e9
    return logits, keras.ops.ones((prompt.shape[0], WIDTH)), cache


FIRST = _says([1e9] + [0.0] * (LETTERS - 1))
FALLING = _says(np.arange(LETTERS, 0, -1))
HIDDEN = np.ones((1, LENGTH, WIDTH), "float32")


def _run(sampler, model, prompt="z" * LENGTH, word=None, **settings):
    """The letters that the sampler makes of a prompt; the word is the model's cache."""
    if isinstance(sampler, ContrastiveSampler):
        settings["hidden_states"] = HIDDEN
    if word is not None:
        settings["cache"] = _ids(word)
    return _text(sampler(next=model, prompt=_ids(prompt), **settings))[0]


@pytest.mark.parametrize("name", ALL)
def test_stateless_call(name):
    """From the index on each token is what the model says; what stands before stays."""
    assert _run(ALL[name], FIRST, index=5) == "zzzzzaaaaaaa"


def test_stateless_call_of_beams_with_one_row_of_logits():
    """keras-hub's test of beams answers with the logits of one row, which stand for each beam."""

    def following(prompt, cache, index):
        logits = keras.ops.one_hot(keras.ops.zeros(1, "int32"), LETTERS) * 1e9
        return logits, keras.ops.ones((prompt.shape[0], WIDTH)), cache

    assert _run(BeamSampler(num_beams=5), following, index=5) == "zzzzzaaaaaaa"


def test_hidden_states_are_asked_for():
    with pytest.raises(ValueError, match="give hidden_states"):
        ALL["contrastive"](next=FIRST, prompt=_ids("z" * LENGTH))


@pytest.mark.parametrize("name", ALL)
def test_stateful_call(name):
    """The cache goes from step to step."""
    settings = {"word": "sequentially"}
    if name == "contrastive":
        settings = {"word": "sequentiallyy", "prompt": "s" * LENGTH, "index": 1}
    assert _run(ALL[name], _spells, **settings) == "sequentially"


@pytest.mark.parametrize("name", ALL)
def test_early_stopping(name):
    """Behind a stop token nothing is written."""
    word, filler = "sequentially", "z"
    if name == "contrastive":
        word, filler = "sequentiallyy", "s"
    found = _run(ALL[name], _spells, filler * LENGTH, word, stop_token_ids=[T])
    assert found == "sequent" + filler * 5


def test_multitoken_early_stopping():
    """The first of several stop tokens ends the text."""
    stop = [T, ord("n") - 97]
    found = _run(GreedySampler(), _spells, word="sequentially", stop_token_ids=stop)
    assert found == "sequenzzzzzz"


@pytest.mark.parametrize(
    "sampler",
    [
        GreedySampler(temperature=1.0),
        RandomSampler(temperature=1e-5),
        TopPSampler(0.5, temperature=1e-9),
    ],
    ids=["greedy", "random", "top_p"],
)
def test_temperature(sampler):
    """Next to 0 a temperature leaves the most likely token only; greedy takes it at any."""
    assert _run(sampler, FALLING) == "a" * LENGTH


THREE_LIKELY = _says([1.0] * 3 + [0.0] * (LETTERS - 3))


@pytest.mark.parametrize(
    ("sampler", "model", "index", "letters"),
    [
        (TopKSampler(k=5), FALLING, 0, "abcde"),
        (TopPSampler(p=1, k=5), FALLING, 5, "abcde"),
        (TopPSampler(p=2.0 / LETTERS), THREE_LIKELY, 0, "abc"),
        (ContrastiveSampler(k=5, alpha=0.2), FALLING, 1, "abcde"),
    ],
    ids=["top_k", "top_p of the k most likely", "top_p", "contrastive"],
)
def test_only_likely_tokens_are_drawn(sampler, model, index, letters):
    """The k most likely tokens, those of the share p, or both."""
    assert set(_run(sampler, model, index=index)[index:]) <= set(letters)


def test_return_all_beams():
    """All beams come with their log probabilities, the most likely first."""
    sampler = BeamSampler(num_beams=5, return_all_beams=True)
    texts, likely = sampler(next=_spells, prompt=_ids("z" * LENGTH), cache=_ids("sequentially"))
    assert tuple(texts.shape) == (1, 5, LENGTH) and tuple(likely.shape) == (1, 5)
    assert (np.diff(to_numpy(likely)) <= 0).all()
    assert _text(texts[:, 0]) == ["sequentially"]


def test_alpha_penalty():
    """A likely token that is like what came before wins by a small alpha and loses by a large."""
    best = ord("h") - 97

    def following(prompt, cache, index):
        rows = prompt.shape[0]
        is_best = to_numpy(prompt)[:, index - 1] == best
        random = np.random.default_rng(index).random((rows, WIDTH))
        hidden = np.where(is_best[:, None], 1.0, random).astype("float32")
        logits = np.ones((rows, LETTERS), "float32") + 1e9 * (np.arange(LETTERS) == best)
        return keras.ops.convert_to_tensor(logits), keras.ops.convert_to_tensor(hidden), cache

    found = {}
    for alpha in (0.2, 1.0):
        sampler = ContrastiveSampler(k=5, alpha=alpha)
        found[alpha] = _run(sampler, following, index=5)
    assert found[0.2] == "zzzzzhhhhhhh" and "h" not in found[1.0]


def test_serialization():
    """A sampler is read again from what was written of it."""
    for sampler in (TopKSampler(k=7, seed=3), TopPSampler(0.4), BeamSampler(3), GreedySampler()):
        again = deserialize(serialize(sampler))
        assert type(again) is type(sampler) and again.get_config() == sampler.get_config()


def test_get():
    """A sampler is found by name and by its config, and is itself."""
    assert isinstance(get("top_k"), TopKSampler) and get("top_k").k == 5
    sampler = TopKSampler(k=7)
    assert serialize(get(serialize(sampler))) == serialize(sampler)
    assert get(sampler) is sampler
