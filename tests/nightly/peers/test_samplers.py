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
ONE_BY_ONE = {
    "greedy": GreedySampler,
    "random": RandomSampler,
    "top_k": TopKSampler,
    "top_p": TopPSampler,
}
ALL = {**ONE_BY_ONE, "beam": BeamSampler}


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


@pytest.mark.parametrize("name", ALL)
def test_stateless_call(name):
    """From the index on each token is what the model says; what stands before stays."""
    found = ALL[name]()(next=FIRST, prompt=_ids("z" * LENGTH), index=5)
    assert _text(found) == ["zzzzzaaaaaaa"]


def test_stateless_call_of_beams_with_one_row_of_logits():
    """keras-hub's test of beams answers with the logits of one row, which stand for each beam."""

    def following(prompt, cache, index):
        logits = keras.ops.one_hot(keras.ops.zeros(1, "int32"), LETTERS) * 1e9
        return logits, keras.ops.ones((prompt.shape[0], WIDTH)), cache

    found = BeamSampler(num_beams=5)(next=following, prompt=_ids("z" * LENGTH), index=5)
    assert _text(found) == ["zzzzzaaaaaaa"]


@pytest.mark.parametrize("name", ALL)
def test_stateful_call(name):
    """The cache goes from step to step."""
    found = ALL[name]()(next=_spells, prompt=_ids("z" * LENGTH), cache=_ids("sequentially"))
    assert _text(found) == ["sequentially"]


@pytest.mark.parametrize("name", ALL)
def test_early_stopping(name):
    """Behind a stop token nothing is written."""
    found = ALL[name]()(
        next=_spells,
        prompt=_ids("z" * LENGTH),
        cache=_ids("sequentially"),
        stop_token_ids=[ord("t") - 97],
    )
    assert _text(found) == ["sequentzzzzz"]


def test_multitoken_early_stopping():
    """The first of several stop tokens ends the text."""
    stop = [ord(letter) - 97 for letter in "tn"]
    found = GreedySampler()(
        next=_spells, prompt=_ids("z" * LENGTH), cache=_ids("sequentially"), stop_token_ids=stop
    )
    assert _text(found) == ["sequenzzzzzz"]


def test_is_greedy():
    """Greedy takes the most likely token at any temperature."""
    found = GreedySampler(temperature=1.0)(next=FALLING, prompt=_ids("z" * LENGTH))
    assert _text(found) == ["a" * LENGTH]


@pytest.mark.parametrize(
    "sampler", [RandomSampler(temperature=1e-5), TopPSampler(0.5, temperature=1e-9)]
)
def test_temperature(sampler):
    """Next to 0 a temperature leaves the most likely token only."""
    assert _text(sampler(next=FALLING, prompt=_ids("z" * LENGTH))) == ["a" * LENGTH]


def test_outputs_in_top_k():
    """Only the k most likely tokens are drawn."""
    found = TopKSampler(k=5)(next=FALLING, prompt=_ids("z" * LENGTH))
    assert set(_text(found)[0]) <= set("abcde")


def test_only_sample_from_top_k_tokens():
    """Top-p looks at the k most likely tokens only, where k is given."""
    found = TopPSampler(p=1, k=5)(next=FALLING, prompt=_ids("z" * LENGTH), index=5)
    assert set(_text(found)[0][5:]) <= set("abcde")


def test_outputs_in_top_p():
    """Tokens beyond the share p are never drawn."""
    likely = _says([1.0] * 3 + [0.0] * (LETTERS - 3))
    found = TopPSampler(p=2.0 / LETTERS)(next=likely, prompt=_ids("z" * LENGTH))
    assert set(_text(found)[0]) <= set("abc")


def test_return_all_beams():
    """All beams come with their log probabilities, the most likely first."""
    sampler = BeamSampler(num_beams=5, return_all_beams=True)
    texts, likely = sampler(next=_spells, prompt=_ids("z" * LENGTH), cache=_ids("sequentially"))
    assert tuple(texts.shape) == (1, 5, LENGTH) and tuple(likely.shape) == (1, 5)
    assert (np.diff(to_numpy(likely)) <= 0).all()
    assert _text(texts[:, 0]) == ["sequentially"]


def test_contrastive_stateless_call():
    """From the index on each token is what the model says."""
    sampler = ContrastiveSampler(k=5, alpha=0.2)
    found = sampler(next=FIRST, prompt=_ids("z" * LENGTH), index=5, hidden_states=HIDDEN)
    assert _text(found) == ["zzzzzaaaaaaa"]
    with pytest.raises(ValueError, match="give hidden_states"):
        sampler(next=FIRST, prompt=_ids("z" * LENGTH))


def test_contrastive_stateful_call():
    """The cache goes from step to step."""
    found = ContrastiveSampler(k=5, alpha=0.2)(
        next=_spells,
        prompt=_ids("s" * LENGTH),
        cache=_ids("sequentiallyy"),
        index=1,
        hidden_states=HIDDEN,
    )
    assert _text(found) == ["sequentially"]


def test_contrastive_early_stopping():
    """Behind a stop token nothing is written."""
    found = ContrastiveSampler(k=5, alpha=0.2)(
        next=_spells,
        prompt=_ids("s" * LENGTH),
        cache=_ids("sequentiallyy"),
        stop_token_ids=[ord("t") - 97],
        hidden_states=HIDDEN,
    )
    assert _text(found) == ["sequentsssss"]


def test_contrastive_outputs_in_top_k():
    """Only the k most likely tokens are chosen from."""
    found = ContrastiveSampler(k=5, alpha=0.2)(
        next=FALLING, prompt=_ids("z" * LENGTH), index=1, hidden_states=HIDDEN
    )
    assert set(_text(found)[0][1:]) <= set("abcde")


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
        arguments = {"prompt": _ids("z" * LENGTH), "index": 5, "hidden_states": HIDDEN}
        found[alpha] = _text(sampler(next=following, **arguments))[0]
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
