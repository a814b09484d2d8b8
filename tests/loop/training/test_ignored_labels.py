"""Labels of -100 do not count; other labels that no class has are refused."""

import keras
import numpy as np
import pytest

import kmodels
from kmodels import models
from kmodels.training.metrics import SparseAccuracy
from pool import pool
from refusals import refused
from tolerances import tolerance

RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(4, 16, 16, 3)).astype("float32")
CLASSES = np.array([0, -100, 2, 1])
TOKENS = RNG.integers(1, 50, (4, 6)).astype("int32")
INPUTS = {"token_ids": TOKENS, "padding_mask": np.ones_like(TOKENS)}
NEXT = RNG.integers(0, 50, (4, 6))
NEXT[0, 2:] = NEXT[3] = -100
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
COMPILED = {
    "positions": lambda: {"loss_normalization": "positions"},
    "logits": lambda: {
        "loss": LOSS,
        "metrics": [keras.metrics.SparseCategoricalAccuracy("of_all")],
        "weighted_metrics": ["accuracy"],
    },
    "own loss": lambda: {"loss": LOSS, "weighted_metrics": [SparseAccuracy("accuracy")]},
}
BATCHES = {"language model": (INPUTS, NEXT), "classifier": (IMAGES, CLASSES)}
METHODS = ("fit", "test_on_batch")


def task(kind):
    """A small task with its default loss."""
    if kind == "language model":
        model = models.GemmaCausalLM.from_preset("gemma3_debug", num_layers=1)
    else:
        model = models.ViTImageClassifier.from_preset("vit_debug", num_classes=3, num_layers=1)
    model.compile()
    return model


def of_transformers(logits, labels, weights, by_weight):
    """torch's cross_entropy(ignore_index=-100), and the share of labels that are the best.

    `by_weight` divides by the weights of the labels, not by their number.
    """
    logits = np.asarray(keras.ops.convert_to_numpy(logits), "float64")
    rows = logits - logits.max(-1, keepdims=True)
    rows = rows - np.log(np.exp(rows).sum(-1, keepdims=True))
    there = labels != -100
    found = np.take_along_axis(rows, np.where(there, labels, 0)[..., None], -1)[..., 0]
    weights = np.ones(labels.shape) if weights is None else weights
    hits = (rows.argmax(-1) == labels) & there
    shares = (weights * there).sum()
    count = shares if by_weight else there.sum()
    return -(found * there * weights).sum() / count, (hits * weights).sum() / shares


# Each method has labels with weights and without, of each kind of model.
@pytest.mark.each_time(
    "language model-default-False-fit",
    "classifier-logits-False-fit",
    "language model-positions-True-test_on_batch",
    on=("jax", "tensorflow"),
)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("kind", "compiled", "fit_is_weighted"),
    [
        ("language model", "default", False),
        ("language model", "positions", True),
        ("language model", "logits", True),
        ("classifier", "default", True),
        ("classifier", "logits", False),
        ("classifier", "own loss", False),
    ],
)
def test_labels_of_minus_100_do_not_count(kind, compiled, method, fit_is_weighted):
    weighted = fit_is_weighted == (method == "fit")
    inputs, labels = BATCHES[kind]
    weights = RNG.uniform(0.5, 1.5, labels.shape).astype("float32") if weighted else None
    with pool(task, kind=kind) as model:
        if weighted and kind == "classifier" and compiled == "default":
            model.compile(weighted_metrics=[SparseAccuracy("accuracy")], metrics=None)
        elif compiled != "default":
            model.compile(**COMPILED[compiled]())
        by_weight = kind == "language model" and compiled != "positions"
        wanted, share = of_transformers(model(inputs), labels, weights, by_weight)
        options = {"sample_weight": weights}
        if method in ("fit", "evaluate"):
            options |= {"verbose": 0, "batch_size": 4}
        if method != "fit":
            options["return_dict"] = True
        found = getattr(model, method)(inputs, labels, **options)
        found = {n: v[0] for n, v in found.history.items()} if method == "fit" else found
    assert float(found["loss"]) == pytest.approx(wanted, abs=tolerance("losses"))
    accuracy = next(value for key, value in found.items() if "accuracy" in key)
    assert float(accuracy) == pytest.approx(share, abs=tolerance("losses"))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("kind", "label"),
    [("language model", 100_000), ("language model", -1), ("classifier", 3), ("classifier", -2)],
)
def test_a_label_that_no_class_has_is_refused(kind, label, method):
    inputs, labels = BATCHES[kind]
    wrong = labels.copy()
    wrong.flat[2] = label
    options = {"verbose": 0} if method in ("fit", "evaluate") else {}
    with pool(task, kind=kind) as model:
        for y in (wrong, keras.ops.convert_to_tensor(wrong)):
            refused(f"^a label is {label}; give 0 to", getattr(model, method), inputs, y, **options)
        if method != "fit":
            return
        batches = [(inputs, labels), (inputs, wrong)]
        refused(f"^a label is {label}; give 0 to", model.fit, batches, verbose=0)
        held_out = {"validation_data": (inputs, wrong), "verbose": 0}
        refused(f"^a label is {label}; give 0 to", model.fit, inputs, labels, **held_out)


def test_the_first_batch_compiles_a_task_and_is_checked():
    with pool("gemma3_debug", num_layers=1) as model:
        assert not model.compiled
        wrong = np.where(NEXT == -100, 320, NEXT)
        refused("^a label is 320; give 0 to 319", model.test_on_batch, INPUTS, wrong)


def test_an_adapter_learns_nothing_of_them():
    with pool(task, kind="language model") as model:
        model.enable_lora(2)
        model.compile()
        changed = NEXT.copy()
        losses = [model.evaluate(INPUTS, changed, verbose=0)[0]]
        changed[NEXT == -100] = 0
        weights = np.where(NEXT == -100, 0.0, NEXT.size / (NEXT != -100).sum())
        losses += [model.evaluate(INPUTS, changed, sample_weight=weights, verbose=0)[0]]
    assert losses[0] == pytest.approx(losses[1], abs=tolerance("losses"))


def test_the_loss_of_no_label_is_nothing():
    with pool(task, kind="language model") as model:
        found = model.evaluate(INPUTS, np.full_like(NEXT, -100), verbose=0)
        losses = model.score(TOKENS, scoring_mode="loss", target_ids=NEXT)
    assert found[0] == 0
    assert (keras.ops.convert_to_numpy(losses)[NEXT == -100] == 0).all()


@pytest.mark.parametrize("trainable", [False, True])
def test_the_op_counts_none_of_them(trainable):
    hidden, table = (RNG.normal(size=size).astype("float32") for size in ((5, 6), (7, 6)))
    labels, weights = np.array([3, -100, 6, -100, 2]), np.ones(5, "float32")

    def sums(labels, weights):
        call = kmodels.ops.linear_cross_entropy
        found = call(hidden, table, labels, weights, trainable_table=trainable)
        return [float(keras.ops.convert_to_numpy(x)) for x in found]

    counted = (labels != -100).astype("float32")
    assert sums(labels, weights) == sums(np.maximum(labels, 0), counted)
