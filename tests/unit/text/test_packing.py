"""Packed rows hold every example once, whole, and apart from its neighbours."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kmodels.data.rows import assign
from kmodels.text import Example, pack, pad

LENGTH = 16


@given(st.lists(st.integers(1, LENGTH), max_size=40))
@settings(max_examples=50, deadline=None)
def test_rows_hold_each_example_once_and_no_two_rows_would_fit_in_one(sizes):
    rows = assign(sizes, LENGTH)
    assert sorted(i for row in rows for i in row) == list(range(len(sizes)))
    filled = sorted(sum(sizes[i] for i in row) for row in rows)
    assert not filled or filled[-1] <= LENGTH
    assert len(filled) < 2 or filled[0] + filled[1] > LENGTH


def test_packed_and_padded_rows_hold_the_same_targets():
    rng = np.random.default_rng(0)
    examples = []
    for size in rng.integers(2, LENGTH + 2, 12):
        ids = rng.integers(3, 90, size).tolist()
        examples.append(Example(ids, [False] + [bool(i % 3) for i in ids[1:]]))
    x, labels, weights = pack(examples, LENGTH, 0)
    padded_x, padded_labels, padded_weights = pad(examples, LENGTH, 0)
    assert len(labels) < len(padded_labels)
    found = {}
    for row, segments in enumerate(x["segment_ids"]):
        for segment in range(1, segments.max() + 1):
            here = np.flatnonzero(segments == segment)
            assert np.array_equal(here, np.arange(here[0], here[-1] + 1))
            assert x["positions"][row, here].tolist() == list(range(len(here)))
            key = (*x["token_ids"][row, here].tolist(), int(labels[row, here[-1]]))
            found[key] = labels[row, here].tolist(), weights[row, here].tolist()
    assert len(found) == len(examples)
    for row, example in enumerate(examples):
        size = len(example.ids) - 1
        expected = padded_labels[row, :size].tolist(), padded_weights[row, :size].tolist()
        assert found[tuple(example.ids)] == expected
        assert padded_x["token_ids"][row, :size].tolist() == example.ids[:-1]
        assert not padded_weights[row, size:].any()
    empty = x["padding_mask"] == 0
    assert not weights[empty].any() and not x["segment_ids"][empty].any()
    assert weights.sum() == padded_weights.sum()
