"""Programs of people who search by meaning, as they write them for sentence-transformers."""

import keras
import numpy as np
import pytest

from kmodels.models import GemmaTextEmbedder
from tolerances import tolerance

DOCUMENTS = [
    "Venus is often called Earth's twin.",
    "Mars, known for its reddish appearance, is often referred to as the Red Planet.",
    "Jupiter, the largest planet in our solar system, has a prominent red spot.",
]
QUESTIONS = ["Which planet is known as the Red Planet?", "What is the largest planet?"]
PAIRS = [
    {"anchor": f"what is {x}?", "positive": f"{x} is {y}.", "negative": f"{y} is nothing."}
    for x, y in [("a fox", "quick"), ("a dog", "lazy"), ("rain", "wet"), ("a cat", "brown")]
]


@pytest.fixture
def directory(references):
    return references / "embedding_gemma" / "gemma" / "model"


@pytest.fixture
def packages(directory):
    """Both packages' models of one directory."""
    from torchvision_cpu import define_torchvision_operators

    define_torchvision_operators()
    from sentence_transformers import SentenceTransformer

    ours = GemmaTextEmbedder.from_preset(directory)
    return ours, SentenceTransformer(str(directory), device="cpu")


@pytest.mark.needs("sentence_transformers")
@pytest.mark.across("torch")
def test_a_search_and_settings_of_encode(packages):
    ours, theirs = (
        np.asarray(
            model.similarity(model.encode_query(QUESTIONS), model.encode_document(DOCUMENTS))
        )
        for model in packages
    )
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance("logits_across"))
    np.testing.assert_array_equal(ours.argsort(axis=1), theirs.argsort(axis=1))
    for settings in (
        {"truncate_dim": 8, "normalize_embeddings": True},
        {"prompt_name": "query", "batch_size": 2},
        {"prompt": "Instruct: find this\nQuery: "},
        {"normalize_embeddings": False, "truncate_dim": 5},
    ):
        ours, theirs = (model.encode([*DOCUMENTS, *QUESTIONS], **settings) for model in packages)
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance("logits_across"))
    ours, theirs = (model.encode(QUESTIONS[0]) for model in packages)
    assert ours.shape == theirs.shape == (24,)


@pytest.mark.needs("sentence_transformers")
@pytest.mark.across("torch")
def test_a_tuned_model_goes_back(packages, tmp_path):
    from sentence_transformers import SentenceTransformer

    model = packages[0]
    model.compile(keras.optimizers.Adam(1e-3))
    before = model.encode_query(QUESTIONS)
    model.fit(PAIRS, batch_size=4, epochs=3, verbose=0)
    after = model.encode_query(QUESTIONS)
    assert np.abs(after - before).max() > 100 * tolerance("logits_across")
    out = model.export_to_transformers(tmp_path / "tuned")
    theirs = SentenceTransformer(str(out), device="cpu").encode_query(QUESTIONS)
    np.testing.assert_allclose(after, theirs, rtol=0, atol=tolerance("logits_across"))


def test_the_nearest_of_many(directory):
    """Neighbours by scikit-learn, over vectors in pieces, as they come from a file."""
    from sklearn.neighbors import NearestNeighbors

    model = GemmaTextEmbedder.from_preset(directory)
    texts = [pair[name] for pair in PAIRS for name in ("anchor", "positive")]
    vectors = np.concatenate([model.encode(texts[i : i + 3]) for i in range(0, len(texts), 3)])
    index = NearestNeighbors(n_neighbors=1, metric="cosine").fit(vectors)
    _, found = index.kneighbors(model.encode(np.array(texts, object)))
    np.testing.assert_array_equal(found[:, 0], np.arange(len(texts)))


@pytest.mark.each_backend
def test_vectors_inside_a_model_of_ones_own(directory):
    """A classifier over the vectors, trained by Keras, the embedder frozen."""
    embedder = GemmaTextEmbedder.from_preset(directory)
    embedder.trainable = False
    inputs = embedder.input
    y = keras.layers.Dense(2, name="classes")(embedder(inputs))
    model = keras.Model(inputs, y)
    model.compile(
        keras.optimizers.Adam(0.5), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    x = embedder.preprocessor([pair[n] for pair in PAIRS for n in ("anchor", "positive")])
    labels = np.arange(8) % 2
    before = embedder.get_weights()
    history = model.fit(x, labels, epochs=12, verbose=0).history["loss"]
    assert history[-1] < 0.5 * history[0]
    for old, new in zip(before, embedder.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
