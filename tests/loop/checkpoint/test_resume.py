"""A Checkpoint beside another one, and one that continues with another setting."""

import keras
import numpy as np
import pytest

from kmodels.callbacks import Checkpoint
from kmodels.checkpoint import manager, state
from kmodels.checkpoint.callback import SaveInterval
from refusals import refused
from stopped_runs import BATCH, EPOCHS, JIT, STEPS, Kill, Killed, X, Y, fit, make_model, run


def steps_in(folder):
    return [int(path.name[-8:]) for path in manager.list_checkpoints(folder)]


def together(folder, stops=(), turned=False):
    """A run with a Checkpoint every 4 steps and one after each epoch, killed at the stops."""
    policy = "mixed_bfloat16" if turned else "float32"
    for stop in (*stops, None):
        often, epochs = Checkpoint(folder / "often", every=4), Checkpoint(folder / "epochs")
        scheduler = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9)
        both = [epochs, scheduler, often] if turned else [often, scheduler, epochs]
        model = make_model(rate=0.3, policy=policy)
        if stop is None:
            history = fit(model, both).history
            return state.weights_digest(model), history
        with pytest.raises(Killed):
            fit(model, [*both, Kill(stop)])
        for callback in (often, epochs):
            callback.wait()
    raise AssertionError


@pytest.mark.each_time("True", on=("jax", "tensorflow"))
@pytest.mark.parametrize("turned", [False, True])
def test_of_two_checkpoints_the_first_resumes_the_run(tmp_path, capsys, turned):
    whole = together(tmp_path / "a", turned=turned)
    # Within the second epoch, where one directory has a newer state than the other.
    assert together(tmp_path / "b", (9,), turned) == whole
    said = capsys.readouterr().out
    first, step = ("epochs", 6) if turned else ("often", 8)
    assert f"resumed from {tmp_path}/b/{first}/step_0000000{step} at step {step}\n" in said
    assert ("the Checkpoint that stands first resumes the run; put this one" in said) == turned
    for folder in "ab":
        assert steps_in(tmp_path / folder / "often") == [18, 16]
        assert steps_in(tmp_path / folder / "epochs") == [18, 12]
    # Each of them alone holds the whole run.
    for name in ("often", "epochs"):
        model = make_model(rate=0.3)
        manager.restore_newest(tmp_path / "b" / name, model)
        assert state.weights_digest(model) == whole[0]


def test_two_checkpoints_that_cannot_be_together(tmp_path):
    message = f"two Checkpoints of one fit have the directory {tmp_path}/a; give each its own"
    same = [Checkpoint(tmp_path / "a"), Checkpoint(tmp_path / "b/../a")]
    refused(message, fit, make_model(), same)
    run(tmp_path / "a", epochs=1)
    message = f"{tmp_path}/a holds checkpoints of a run and {tmp_path}/b none, whose Checkpoint"
    refused(message, fit, make_model(), [Checkpoint(tmp_path / "b"), Checkpoint(tmp_path / "a")])


def test_a_fit_that_has_nothing_left_to_train_says_so(tmp_path):
    model, callback = make_model(), Checkpoint(tmp_path)
    fit(model, [callback])
    weights = state.weights_digest(model)
    message = f"trains nothing, since {tmp_path} holds a finished run: 3 of 3 epochs are done; give"
    with pytest.warns(UserWarning, match=message):
        fit(model, [callback])
    with pytest.warns(UserWarning, match="3 of 2 epochs are done; give more epochs to continue"):
        fit(model, [callback], epochs=2)
    assert state.weights_digest(model) == weights
    history = fit(model, [callback], epochs=EPOCHS + 1)
    assert len(history.history["loss"]) == EPOCHS + 1 and state.weights_digest(model) != weights


@pytest.mark.nightly("tensorflow")
def test_a_changed_number_is_used_and_said(tmp_path, capsys):
    """Within an epoch and between two; the next resume finds nothing changed any more.

    The numbers are those of the optimizer that the scaling of the loss is around.
    """

    def part(stop, epochs=EPOCHS, callbacks=(), **optimizer):
        model = make_model(policy="mixed_float16", scale=2.0**10, **optimizer)
        checkpoints = [Checkpoint(tmp_path, every=4), *callbacks]
        if stop is None:
            fit(model, checkpoints, epochs)
        else:
            with pytest.raises(Killed):
                fit(model, [*checkpoints, Kill(stop)], epochs)
            checkpoints[0].wait()
        return float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))

    changed = "settings were changed since the checkpoint, and the new values are used: "
    part(5)
    assert part(8, rate=0.01, beta_1=0.8, weight_decay=0.1) == pytest.approx(0.01)
    said = capsys.readouterr().out
    numbers = [part.split(" was ") for part in said.split(changed)[1].strip().split("; ")]
    assert {name: [float(v) for v in values.split(", is ")] for name, values in numbers} == {
        "beta_1": [0.9, 0.8],
        "learning_rate": [pytest.approx(0.05), pytest.approx(0.01)],
        "weight_decay": [0.004, 0.1],
    }
    # What a callback has changed is the run's own, and stays where the given rate is as it was.
    halved = [keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)]
    same = {"rate": 0.01, "beta_1": 0.8, "weight_decay": 0.1}
    assert part(None, 3, halved, **same) == pytest.approx(0.005)
    assert part(None, 4, **same) == pytest.approx(0.005)
    assert changed not in capsys.readouterr().out
    assert part(None, 5, **{**same, "rate": 0.02}) == pytest.approx(0.02)
    assert "learning_rate was 0.00" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"rate": 0.5}, "Dropout.rate was 0.25, is 0.5"),
        ({"activation": "gelu"}, "Dense.activation was linear, tanh, is gelu, linear"),
        ({"dtype": "mixed_bfloat16"}, "dtype was float32, is float32, mixed_bfloat16"),
        ({"loss": "hinge"}, "loss was mse, is hinge"),
        (
            {"loss": keras.losses.MeanSquaredError("mean_with_sample_weight")},
            "MeanSquaredError.reduction was None, is mean_with_sample_weight; "
            "loss was mse, is mean_squared_error",
        ),
        ({}, ""),
    ],
)
def test_changed_settings_of_a_model_are_said(tmp_path, capsys, changed, said):
    def train(epochs, rate=0.25, activation="tanh", loss="mse", dtype=None):
        dense = keras.layers.Dense(4, activation=activation, dtype=dtype)
        model = keras.Sequential([dense, keras.layers.Dropout(rate), keras.layers.Dense(1)])
        model.compile("sgd", loss, jit_compile=JIT)
        fit(model, [Checkpoint(tmp_path)], epochs)
        return capsys.readouterr().out

    train(1)
    line = "settings were changed since the checkpoint, and the new values are used: "
    out = train(2, **changed)
    assert out.partition(line)[2].strip() == said and bool(said) == (line in out)
    assert line not in train(3, **changed)


@pytest.mark.nightly("tensorflow")
def test_a_changed_schedule_is_used_and_said(tmp_path, capsys):
    rates = []
    for steps in (20, 40):
        model = make_model()
        decay = keras.optimizers.schedules.CosineDecay(0.05, steps)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model = keras.models.clone_model(model)
        model.compile(keras.optimizers.AdamW(decay), loss, jit_compile=JIT)
        fit(model, [Checkpoint(tmp_path)], epochs=len(rates) + 1)
        rates.append(float(keras.ops.convert_to_numpy(model.optimizer.learning_rate)))
    assert "learning_rate.decay_steps was 20, is 40" in capsys.readouterr().out
    assert rates[1] == pytest.approx(0.025 * (1 + np.cos(np.pi * 12 / 40)), rel=1e-5)


def test_a_rate_set_by_hand_after_a_finished_fit(tmp_path, capsys):
    model, callback = make_model(), Checkpoint(tmp_path)
    fit(model, [callback], epochs=1)
    model.optimizer.learning_rate = 0.002
    fit(model, [callback], epochs=2)
    rate = float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))
    assert rate == pytest.approx(0.002)
    assert "learning_rate was 0.05" in capsys.readouterr().out


def test_steps_that_keras_executes_together_are_saved_at_the_first_end(tmp_path):
    due = SaveInterval(4)
    assert [step for step in range(3, 25, 3) if due.now(step)] == [6, 9, 12, 18, 21, 24]
    due.begin(6)
    assert [step for step in range(7, 13) if due.now(step)] == [8, 12]

    if keras.backend.backend() == "torch":
        return  # Keras executes one step at a time there.
    model = keras.models.clone_model(make_model())
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, steps_per_execution=3)
    model.fit(X, Y, batch_size=BATCH, epochs=2, verbose=0, shuffle=False,
              callbacks=[Checkpoint(tmp_path, every=4, keep=9)])  # fmt: skip
    assert steps_in(tmp_path) == [2 * STEPS, 9, STEPS]
