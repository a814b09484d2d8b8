"""A pipeline counts the tokens that are learned, whatever its data is."""

import numpy as np
import pytest

from kmodels.data import as_dataset
from kmodels.data.pipeline.kinds import pipeline
from kmodels.text import RecordLoader, TextLoader

LABELS = np.ones((4, 6), "int32")
WEIGHTS = np.tril(np.ones((4, 6), "float32"))  # 1 + 2 + 3 + 4 tokens
ROWS = ({"token_ids": LABELS}, LABELS, WEIGHTS)


def preprocess(records):
    return {"token_ids": LABELS[records]}, LABELS[records], WEIGHTS[records].copy()


DATA = {
    "texts": lambda: TextLoader(ROWS, 2),
    "records": lambda: RecordLoader(range(4), preprocess, 2),
    "arrays": lambda: as_dataset(*ROWS, batch_size=2),
    "generator": lambda: as_dataset(
        tuple(part[i : i + 2] for part in (LABELS, LABELS, WEIGHTS)) for i in (0, 2)
    ),
}


@pytest.mark.parametrize("name", DATA)
def test_learned_tokens_of_a_row(name):
    feed = pipeline(DATA[name](), None)
    assert feed.learned_tokens_per_row is None
    assert len(list(feed.batches(placed=False))) == 2
    assert feed.learned_tokens_per_row == 10 / 4


@pytest.mark.parametrize("weights", [[], [np.ones(4, "float32")]])
def test_rows_without_tokens(weights):
    images = np.zeros((4, 8, 8, 3), "float32")
    feed = pipeline(as_dataset(images, np.arange(4), *weights, batch_size=2), None)
    assert len(list(feed.batches(placed=False))) == 2
    assert feed.learned_tokens_per_row is None
