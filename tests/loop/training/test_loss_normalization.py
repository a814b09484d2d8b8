"""The loss of an update is a mean over its learnt tokens, however it is cut into batches."""

import functools
import json

import keras
import numpy as np
import pytest

from kmodels.callbacks import Checkpoint
from kmodels.checkpoint.state import RunState
from kmodels.core.files import stamp
from kmodels.distribution import distribute
from kmodels.models import GemmaCausalLM
from kmodels.text import RecordLoader
from kmodels.training import SGD, AdamW
from pool import pool
from refusals import refused
from stopped_runs import Kill, Killed

# Learnt tokens of the four batches of an update.
LEARNT, ROWS, LENGTH = (3, 17, 61, 0), 4, 16
STEPS = len(LEARNT)
# So large that what a weight moves by is not lost in the rounding of the weight.
RATE = 100.0
JIT = keras.backend.backend() == "jax"
# Many programs of a step or two: on JAX what is slow is to run operations one by one, on TensorFlow
# to trace them.
QUICK = {"jit_compile": JIT, "run_eagerly": not JIT}
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy
# A metric without weights needs logits.
LOGITS = {"metrics": ["sparse_categorical_accuracy"]}


def rows(learnt=LEARNT):
    """Batches of token ids, labels and weights; the tokens that are learnt lie anywhere."""
    rng = np.random.default_rng(3)
    ids = rng.integers(1, 200, (len(learnt), ROWS, LENGTH + 1))
    weights = np.zeros((len(learnt), ROWS * LENGTH), "float32")
    for row, count in zip(weights, learnt, strict=True):
        row[rng.permutation(ROWS * LENGTH)[:count]] = 1.0
    return ids[..., :-1], ids[..., 1:], weights.reshape(len(learnt), ROWS, LENGTH)


def as_one(batches):
    return [np.reshape(part, (-1, LENGTH)) for part in batches]


def model_of(make_optimizer, plan=None, num_layers=1, **settings):
    keras.utils.set_random_seed(1)
    model = GemmaCausalLM.from_preset("gemma_debug", dropout=0.0, num_layers=num_layers)
    model = model if plan is None else plan.prepare(model)
    model.compile(make_optimizer(), jit_compile=JIT, **settings)
    return model


def values(model):
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in model.weights]


def fit(model, batches, batch_size, **arguments):
    x, y, weights = as_one(batches)
    arguments = {"sample_weight": weights, "batch_size": batch_size, "verbose": 0, **arguments}
    return model.fit(x, y, shuffle=False, **arguments).history


def updated(make_optimizer, batches, batch_size, plan=None, **settings):
    """Trains, and returns how far each weight went, and the logs."""
    model = model_of(make_optimizer, plan, **settings)
    begun = values(model)
    history = fit(model, batches, batch_size)
    return [now - before for now, before in zip(values(model), begun, strict=True)], history


@functools.cache
def updated_at_once(clip_norm=None):
    """Trains with all rows as one batch; see `updated`."""
    return updated(lambda: SGD(RATE, clip_norm=clip_norm), rows(), STEPS * ROWS)


def losses_of(model, batches):
    """The loss of each token, (rows, LENGTH), and its weight."""
    x, y, weights = as_one(batches)
    found = model.score(x, scoring_mode="loss", target_ids=y)
    return keras.ops.convert_to_numpy(found), weights


def assert_near(found, expected, tolerance=1e-6):
    most = max(np.abs(part).max() for part in expected)
    assert most > 0
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * most)


OPTIMIZERS = {
    "clipped": lambda: SGD(RATE, clip_norm=0.1, accumulate=STEPS),
    "free": lambda: SGD(RATE, accumulate=STEPS),
    "skipping": lambda: SGD(RATE, accumulate=STEPS, skip_non_finite=True, ema=0.9),
    "around": lambda: keras.optimizers.LossScaleOptimizer(SGD(RATE, accumulate=STEPS)),
}


# Hidden states and tokens: the tests below.
@pytest.mark.each_time("hidden")
@pytest.mark.parametrize(
    ("logits", "normalization"), [(False, "examples"), (True, "tokens")], ids=["hidden", "logits"]
)
def test_four_batches_are_one(logits, normalization):
    settings = {**(LOGITS if logits else {}), "loss_normalization": normalization, "num_layers": 2}
    whole, one = updated(lambda: SGD(RATE, clip_norm=0.1), rows(), STEPS * ROWS, **settings)
    parts, four = updated(OPTIMIZERS["clipped"], rows(), ROWS, **settings)
    assert_near(parts, whole)
    for name in one:
        np.testing.assert_allclose(four[name], one[name], rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("name", ["skipping", "around"])
def test_optimizers_that_look_at_each_batch(name):
    whole, _ = updated_at_once()
    parts, _ = updated(OPTIMIZERS[name], rows(), ROWS)
    assert_near(parts, whole)


# On torch a device is a process, see `learnt_tokens` of tests/loop/distribution/ddp_cases.py.
MESHES = {"jax": "data=4", "tensorflow": "data=2"}
if mesh := MESHES.get(keras.backend.backend()):

    def test_devices_with_different_numbers_of_tokens():
        def at_once():
            return SGD(RATE, clip_norm=0.1)

        alone, logs = updated_at_once(0.1)
        # A device has whole batches of the update, or a part of each.
        for make, batch_size in ((at_once, STEPS * ROWS), (OPTIMIZERS["clipped"], ROWS)):
            try:
                found, over = updated(make, rows(), batch_size, distribute(mesh))
            finally:
                distribute(None)
            assert_near(found, alone)
            np.testing.assert_allclose(over["loss"], logs["loss"], rtol=1e-6)


def test_what_each_normalization_divides_by():
    model = model_of(lambda: SGD(0.1))
    losses, weights = losses_of(model, rows())
    total, learnt = (losses * weights).sum(), weights.sum(axis=1)
    by_row = (losses * weights).sum(axis=1)[learnt > 0] / learnt[learnt > 0]
    wanted = {
        "tokens": total / weights.sum(),
        "examples": by_row.mean(),
        "positions": total / weights.size,
    }
    for name, settings in (
        ("tokens", {}),
        ("examples", LOGITS),
        ("positions", {}),
        ("positions", LOGITS),
    ):
        model.compile("sgd", **QUICK, loss_normalization=name, **settings)
        logs = evaluated(model, rows(), 3)
        assert logs["loss"] == pytest.approx(wanted[name], rel=1e-5), name
        assert ("perplexity" in logs) == (name == "tokens")
        if name == "tokens":
            assert logs["perplexity"] == pytest.approx(np.exp(wanted[name]), rel=1e-4)
    # The list is that of Keras, without the perplexity.
    model.compile("sgd", **QUICK)
    x, y, weights = as_one(rows())
    loss, _ = model.evaluate(x, y, sample_weight=weights, verbose=0)
    assert loss == pytest.approx(wanted["tokens"], rel=1e-5)


def evaluated(model, batches, batch_size):
    x, y, weights = as_one(batches)
    return model.evaluate(
        x, y, sample_weight=weights, batch_size=batch_size, verbose=0, return_dict=True
    )


FIRST_HALF = np.repeat([1.0, 0.0], LENGTH // 2).astype("float32")


def half(weights):
    return weights * keras.ops.convert_to_tensor(FIRST_HALF)


def half_in_place(weights):
    weights[:, LENGTH // 2 :] = 0.0
    return weights


# How a subclass changes the weights; only tensors of torch can be written to.
CHANGES = {"another tensor": half}
if keras.backend.backend() == "torch":
    CHANGES["the same tensor"] = half_in_place


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("given", [True, False], ids=["weights", "no weights"])
@pytest.mark.parametrize("normalization", ["tokens", "examples"])
def test_a_subclass_may_change_the_weights_in_its_loss(change, given, normalization):
    """The loss is that of the changed weights over the weight of the batch, as it was given."""

    class Changing(GemmaCausalLM):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            if sample_weight is None:
                sample_weight = keras.ops.ones_like(y, dtype="float32")
            return super().compute_loss(x, y, y_pred, change(sample_weight), training)

    keras.utils.set_random_seed(1)
    model = Changing.from_preset("gemma_debug", dropout=0.0, num_layers=1)
    x, y, weights = as_one(rows((40,)))
    weights = weights if given else np.ones_like(weights)
    losses, _ = losses_of(model, rows((40,)))
    changed = weights * FIRST_HALF
    if normalization == "examples":
        changed = changed / np.maximum(changed.sum(axis=1, keepdims=True), 1.0)
    total = {"tokens": weights.sum(), "examples": (weights.sum(axis=1) > 0).sum()}[normalization]
    model.compile("sgd", **QUICK, loss_normalization=normalization)
    data = {"sample_weight": weights} if given else {}
    logs = model.evaluate(x, y, **data, batch_size=ROWS, verbose=0, return_dict=True)
    assert logs["loss"] == pytest.approx((losses * changed).sum() / total, rel=1e-5)


def test_the_reduction_by_weights_is_that_by_tokens():
    loss = CROSS_ENTROPY(from_logits=True, reduction="mean_with_sample_weight")
    whole, _ = updated_at_once()
    parts, _ = updated(OPTIMIZERS["free"], rows(), ROWS, loss=loss)
    assert_near(parts, whole)


def test_labels_of_minus_100_are_not_learnt():
    x, y, weights = rows()
    whole, _ = updated_at_once()
    masked = np.where(weights > 0, y, -100)
    parts, _ = updated(OPTIMIZERS["free"], (x, masked, np.ones_like(weights)), ROWS)
    assert_near(parts, whole)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_update_without_a_token_is_one_with_a_gradient_of_zero(accumulate):
    def optimizer():
        return AdamW(0.1, clip_norm=1.0, accumulate=accumulate)

    model = model_of(optimizer)
    begun = values(model)
    history = fit(model, rows((0,) * accumulate), ROWS)
    assert history["loss"] == [0.0] and history["perplexity"] == [1.0]
    slots = [keras.ops.convert_to_numpy(v) for v in model.optimizer._momentums]
    assert not any(slot.any() for slot in slots)
    # The weights decay, and nothing else.
    for before, now in zip(begun, values(model), strict=True):
        factor = 1 - 0.1 * 0.05 if before.ndim > 1 and (now != before).any() else 1.0
        np.testing.assert_allclose(now, before * np.float32(factor), rtol=1e-6)
    fit(model, rows((5,) * accumulate), ROWS)
    assert all(np.isfinite(value).all() for value in values(model))


def test_what_is_refused():
    model = model_of(lambda: SGD(0.1))
    refused(
        "loss_normalization is 'rows'; choose one of tokens, positions, examples",
        model.compile,
        loss_normalization="rows",
    )
    accumulates = {"optimizer": keras.optimizers.Adam(gradient_accumulation_steps=2)}
    refused(
        r"Adam with gradient_accumulation_steps=2 averages.* or SGD with accumulate=2, or compile",
        model.compile,
        **accumulates,
    )
    model.compile(**accumulates, loss_normalization="positions")
    assert model.loss_normalization == "positions"


# === Files ===


def clipped_adam(**settings):
    return model_of(lambda: AdamW(0.01, accumulate=STEPS, clip_norm=1.0), **settings)


@pytest.mark.each_time("tokens")
@pytest.mark.parametrize("normalization", ["tokens", "positions"])
def test_a_checkpoint_goes_on_within_an_update_with_its_own_normalization(tmp_path, normalization):
    twice = [np.concatenate([part, part]) for part in rows()]
    with pool(clipped_adam, loss_normalization=normalization) as whole:
        keras.utils.set_random_seed(1)  # a checkpoint has the seed of its run
        fit(whole, twice, ROWS)
        wanted = values(whole)
    with pool(clipped_adam, loss_normalization=normalization) as stopped:
        keras.utils.set_random_seed(1)
        with pytest.raises(Killed):
            fit(stopped, twice, ROWS, callbacks=[Checkpoint(tmp_path, every=1), Kill(3)])
    again = clipped_adam()
    if normalization == "positions":
        for path in tmp_path.glob("step_*"):
            without_normalization(path)
        with pytest.warns(UserWarning, match="loss_normalization='positions'; it continues"):
            fit(again, twice, ROWS, callbacks=[Checkpoint(tmp_path)])
    else:
        fit(again, twice, ROWS, callbacks=[Checkpoint(tmp_path)])
    assert again.loss_normalization == normalization
    for one, other in zip(values(again), wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def without_normalization(path):
    """A checkpoint as it was before there was a choice."""
    state = json.loads((path / "state.json").read_text())
    assert state.pop("loss_normalization") == "positions"
    (path / "state.json").write_text(json.dumps(state))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["state.json"] = stamp(path / "state.json")
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert RunState.from_json(state).loss_normalization == "positions"


def test_a_keras_file_has_the_normalization(tmp_path):
    model = model_of(lambda: AdamW(0.1, accumulate=2), loss_normalization="examples")
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert again.divisor == again.loss_normalization == "examples"
    # As of a file from before there was a choice.
    config = model.get_compile_config()
    del config["loss"]["normalization"]
    again.compile_from_config(config)
    assert again.loss_normalization == "positions" and again.divisor is None
    plain = keras.models.clone_model(model)
    assert plain.loss.reduction == "sum_over_batch_size"


# === Loaders ===


def test_a_loader_of_records_leaves_the_weights_to_the_model():
    x, y, weights = as_one(rows())

    def preprocessor(numbers):
        return (
            {"token_ids": x[numbers], "padding_mask": x[numbers] > 0},
            y[numbers],
            weights[numbers],
        )

    loader = RecordLoader(range(len(x)), preprocessor, ROWS)
    whole, logs = updated_at_once()
    model = model_of(OPTIMIZERS["free"])
    begun = values(model)
    history = model.fit(loader, verbose=0, shuffle=False).history
    assert_near([now - b for now, b in zip(values(model), begun, strict=True)], whole)
    np.testing.assert_allclose(history["loss"], logs["loss"], rtol=1e-6)
    # By position the mean of a batch is the mean over its tokens.
    model.compile("sgd", **QUICK, loss_normalization="positions")
    losses, _ = losses_of(model, rows())
    found = model.evaluate(loader, verbose=0, return_dict=True)["loss"]
    parts = zip(np.split(losses, STEPS), np.split(weights, STEPS), strict=True)
    means = [(loss * w).sum() / max(w.sum(), 1.0) for loss, w in parts]
    assert found == pytest.approx(np.mean(means), rel=1e-5)
