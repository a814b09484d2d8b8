"""kmodels.callbacks.Checkpoint in a plain Keras `fit`: stopped anywhere, the same bits come out."""

import functools
import json
import os
import signal
import subprocess
import sys

import keras
import numpy as np
import pytest

from arrays import assert_equal
from kmodels.callbacks import Checkpoint
from kmodels.checkpoint import manager, state
from kmodels.checkpoint.callback import SaveInterval
from kmodels.training import AdamW, load_keras_file, track_step_loss
from kmodels.weights import read_safetensors
from refusals import refused
from stopped_runs import BATCH, EPOCHS, JIT, ROWS, STEPS, Kill, Killed, X, Y, fit, make_model, run
from tolerances import tolerance

ALL = {"use_ema": True, "gradient_accumulation_steps": 2}
# The first steps are too large for float16 and left out; every third of the others doubles them.
HALF = {"policy": "mixed_float16", "scale": 2.0**18}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run with shuffle, dropout, accumulation and an average of the weights, not stopped."""
    model, history, _ = run(tmp_path_factory.mktemp("whole") / "a", optimizer=ALL, every=4)
    return state.weights_digest(model), history.history


def test_stopped_anywhere_it_ends_with_the_same_bits(whole, tmp_path):
    """Before the first checkpoint, and within an epoch; steps are made again."""
    model, history, _ = run(tmp_path, (3, 8), optimizer=ALL, every=4)
    assert (state.weights_digest(model), history.history) == whole
    assert len(history.history["loss"]) == EPOCHS


class Own(Checkpoint):
    """A subclass with a hook of its own."""

    def on_train_begin(self, logs=None):
        super().on_train_begin(logs)


def test_one_checkpoint_per_epoch_and_a_schedule_and_a_scaled_loss(tmp_path):
    def go(folder, stops):
        settings = {"optimizer": {"rate": "cosine", **HALF}, "kind": Own}
        model, history, _ = run(tmp_path / folder, stops, **settings)
        left_out = STEPS * EPOCHS - int(model.optimizer.iterations)
        assert 1 < left_out < 2 * STEPS
        scale = float(state.slots(model.optimizer)["dynamic_scale"].value)
        return state.weights_digest(model), history.history, left_out, scale

    assert go("a", ()) == go("b", (STEPS + 2,))
    kept = manager.list_checkpoints(tmp_path / "b")
    assert [path.name for path in kept] == ["step_00000018", "step_00000012"]
    described = json.loads((kept[0] / "state.json").read_text())
    assert described["order"] == {"seed": 7, "epoch": 3}
    assert described["schedule"]["class_name"] == "CosineDecay"


def test_other_callbacks_decide_as_if_nothing_had_happened(tmp_path):
    def others(folder):
        return lambda: [
            keras.callbacks.EarlyStopping(
                "val_loss", min_delta=10.0, patience=3, restore_best_weights=True
            ),
            keras.callbacks.ReduceLROnPlateau("val_loss", min_delta=10.0, patience=1),
            keras.callbacks.ModelCheckpoint(
                str(tmp_path / f"{folder}.weights.h5"), save_best_only=True, save_weights_only=True
            ),
        ]

    def go(folder, stops):
        settings = {"optimizer": {"rate": 0.3}, "epochs": 9, "best": "val_loss", "keep": 1}
        model, history, made = run(tmp_path / folder, stops, others(folder), **settings)
        return state.weights_digest(model), history.history, made

    first, second = go("a", ()), go("b", (3 * STEPS + 1,))
    for one, other in zip(first[2], second[2], strict=True):
        for name in ("best", "wait", "stopped_epoch", "best_epoch", "cooldown_counter"):
            assert getattr(one, name, None) == getattr(other, name, None), (one, name)
    assert first[2][0].stopped_epoch == 3
    assert first[:2] == second[:2]
    rates = first[1]["learning_rate"]
    assert rates[-1] < rates[0]
    # The newest and the best; and a run that was stopped early has nothing left to do.
    best = int(np.argmin(first[1]["val_loss"]))
    names = [path.name for path in manager.list_checkpoints(tmp_path / "b")]
    kept = sorted({best, len(rates) - 1}, reverse=True)
    assert names == [f"step_{STEPS * (epoch + 1):08d}" for epoch in kept]
    with pytest.warns(UserWarning, match="trains nothing.* a callback has ended it after 4 epochs"):
        again = go("b", ())
    assert again[1] == first[1]
    assert manager.list_checkpoints(tmp_path / "b")[0].name == names[0]


class Steps(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.epochs = self.steps = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epochs += 1

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1


def test_hooks_that_are_called_again_change_nothing(tmp_path):
    """Those of the begin of an epoch that was cut, on either side in the list."""

    def go(folder, stops):
        for stop in (*stops, None):
            model, counts = make_model(rate=0.3), [Steps(), Steps()]
            # They go by the rate before, so twice would be once too often.
            first, last = (
                keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9)
                for _ in range(2)
            )
            checkpoint = Checkpoint(tmp_path / folder, every=4)
            callbacks = [first, counts[0], checkpoint, counts[1], last]
            if stop is None:
                history = fit(model, callbacks).history
                return state.weights_digest(model), history, [(c.epochs, c.steps) for c in counts]
            with pytest.raises(Killed):
                fit(model, [*callbacks, Kill(stop)])
            checkpoint.wait()

    whole = go("a", ())
    # Within an epoch, and then within the one after.
    assert go("b", (STEPS, STEPS)) == whole
    assert whole[2] == [(EPOCHS, EPOCHS * STEPS)] * 2
    rates = 0.3 * 0.81 ** np.arange(1, EPOCHS + 1)
    np.testing.assert_allclose(whole[1]["learning_rate"], rates, rtol=1e-6)


class KillInTest(Kill):
    def on_train_batch_end(self, batch, logs=None):
        pass

    def on_test_batch_end(self, batch, logs=None):
        self.act()


def test_signals_save_and_end(whole, tmp_path, capsys):
    """In a step, within validation, and in an epoch's last batch, before its validation."""
    for kind, left, signum, code, step in (
        (Kill, 4, signal.SIGTERM, 143, 4),
        (KillInTest, None, signal.SIGINT, 130, STEPS),
        (Kill, STEPS, signal.SIGHUP, 129, 2 * STEPS),
    ):
        before = signal.getsignal(signum)
        kill = kind(left, functools.partial(os.kill, os.getpid(), signum))
        with pytest.raises(SystemExit) as ended:
            fit(make_model(**ALL), [kill, Checkpoint(tmp_path)])
        assert (ended.value.code, signal.getsignal(signum)) == (code, before)
        said = capsys.readouterr()
        assert f"stopped at step {step} by signal {signum:d}; run it again to go on" in said.err
        described = json.loads((tmp_path / f"step_{step:08d}" / "state.json").read_text())
        epoch, batch = divmod(step - 1, STEPS)
        assert (described["epoch"], described["batch"]) == (epoch, batch + 1)
    assert f"resumed from {tmp_path}/step_00000006 at step 6" in said.out
    model, history, _ = run(tmp_path, optimizer=ALL)
    assert (state.weights_digest(model), history.history) == whole


def test_nohup_is_honored(tmp_path, monkeypatch):
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        kill = Kill(2, functools.partial(os.kill, os.getpid(), signal.SIGHUP))
        history = fit(make_model(**ALL), [kill, Checkpoint(tmp_path)], epochs=1)
    finally:
        signal.signal(signal.SIGHUP, former)
    assert len(history.epoch) == 1


def test_a_loss_that_is_not_finite_is_told_and_never_saved(tmp_path):
    bad = X.copy()
    bad[9] = np.nan
    told = r"the loss is nan at step 3 \(learning rate 0.05\); the last finite one was \d.*"
    for looks, message in (
        (True, told + "; checkpoint step_00000002 is good; check"),
        # Where nobody looks at the loss, the state itself is looked at.
        (False, "is not finite, so this state is not saved"),
    ):
        folder = tmp_path / str(looks)
        settings = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
        settings["callbacks"] = [Checkpoint(folder, every=1, stop_on_non_finite=looks)]
        refused(message, make_model().fit, bad, Y, **settings)
        assert manager.newest(folder)[1].step == 2


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    run(tmp_path, epochs=1, settings={"data": "a"})
    other = {"epochs": 2, "settings": {"data": "b"}}
    refused("is of another run: data was 'a'; give the same", run, tmp_path, **other)
    refused("data was 'a', and is missing; give the same", run, tmp_path, epochs=2)
    message = "holds checkpoints of a run; continue it with resume=True"
    refused(message, run, tmp_path, resume=False)
    model, callbacks = make_model(), [Checkpoint(tmp_path)]
    smaller = {"batch_size": 2, "epochs": 2, "callbacks": callbacks, "verbose": 0}
    refused("an epoch had 6 batches, not 11", model.fit, X, Y, **smaller)
    keras.utils.set_random_seed(8)
    refused("the random seed was 7", fit, model, callbacks, epochs=2)


OTHER = """
import sys, time
from pathlib import Path
from kmodels.core.files import lock
lock(Path(sys.argv[1]))
(Path(sys.argv[1]) / ".step_00000009.tmp.0123456789abcdef").mkdir()
print("held", flush=True)
time.sleep(60)
"""


@pytest.mark.once
def test_another_process_is_kept_out_until_it_dies(tmp_path):
    other = subprocess.Popen([sys.executable, "-c", OTHER, tmp_path], stdout=subprocess.PIPE)
    try:
        assert other.stdout.readline() == b"held\n"
        message = f"another run is using {tmp_path}; wait for its end"
        refused(message, fit, make_model(), [Checkpoint(tmp_path)])
    finally:
        other.kill()
        other.communicate()
    run(tmp_path, epochs=1)
    # What the killed process was writing is gone.
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "step_00000006"]


@pytest.mark.once
def test_settings():
    assert [SaveInterval(steps).steps for steps in ("500", 500)] == [500, 500]
    assert SaveInterval("300s").seconds == 300.0
    assert all(SaveInterval(given).once_an_epoch for given in (0, "0", None))
    for wrong in ("s", "5m", "-1", "0s"):
        refused(f"the distance of checkpoints is '{wrong}'; give", Checkpoint, "x", every=wrong)
    refused("keep is 0; give at least 1", Checkpoint, "x", keep=0)
    refused("a path is None; give a text or a pathlib.Path", Checkpoint, None)
    for value in (object(), float("nan")):
        refused("settings cannot be written as JSON: ", Checkpoint, "x", settings={"a": value})
    refused("saves inside fit only", Checkpoint("x").save)
    uncompiled = keras.Sequential([keras.layers.Dense(1)])
    for act in (
        Checkpoint("x").prepare,
        functools.partial(load_keras_file, __file__),
        track_step_loss,
    ):
        refused("Sequential.*(has no optimizer; give|is not compiled; call)", act, uncompiled)
    refused("mode is 'best'; choose one of auto, min, max", Checkpoint, "x", mode="best")
    refused("best is 3; give a text or None", Checkpoint, "x", best=3)
    refused("resume is 'False'; give True or False", Checkpoint, "x", resume="False")
    refused("'val_size', which does not say whether more", Checkpoint, "x", best="val_size")
    modes = {name: Checkpoint("x", best=name).mode for name in ("val_accuracy", "val_mean_iou")}
    assert {*modes.values()} == {"max"} and Checkpoint("x").mode == "min"
    assert Checkpoint("x", best="val_size", mode="max").mode == "max"


def test_a_best_that_nobody_logs(tmp_path):
    message = "best is 'val_los', which no epoch logs; choose one of"
    refused(message, run, tmp_path, epochs=1, best="val_los", mode="min")
    # The epoch is not lost.
    assert len(manager.list_checkpoints(tmp_path)) == 1


def test_a_best_of_a_run_without_validation(tmp_path):
    callback = Checkpoint(tmp_path, best="val_loss")
    with pytest.warns(UserWarning, match="no epoch logged val_loss, so no checkpoint is kept as"):
        make_model().fit(X, Y, batch_size=BATCH, callbacks=[callback], verbose=0)


def test_one_callback_for_two_fits_after_an_error(whole, tmp_path):
    callback, model = Checkpoint(tmp_path, every=4), make_model(**ALL)
    with pytest.raises(Killed):
        fit(model, [callback, Kill(9)])
    history = fit(model, [callback])
    assert (state.weights_digest(model), history.history) == whole
    assert callback.step == 18
    fit(model, [callback], epochs=EPOCHS + 1)
    assert callback.step == 24


def test_of_a_frozen_base_only_a_hash_is_kept(tmp_path):
    def make():
        keras.utils.set_random_seed(7)
        inputs = keras.Input((5,))
        first = keras.layers.Dense(8, name="first")
        model = keras.Model(inputs, keras.layers.Dense(3, name="second")(first(inputs)))
        first.enable_lora(2)
        model.get_layer("second").trainable = False
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss, jit_compile=JIT)
        return model

    def go(model, epochs):
        callbacks = [Checkpoint(tmp_path, origin="DIR/base")]
        model.fit(X, Y, batch_size=BATCH, epochs=epochs, callbacks=callbacks, verbose=0)

    model = make()
    base = state.digest(state.frozen(model))
    go(model, 1)
    described = json.loads((tmp_path / "step_00000006" / "state.json").read_text())
    assert described["base"] == {"sha256": base, "origin": "DIR/base"}
    assert state.digest(state.frozen(model)) == base
    saved = read_safetensors(tmp_path / "step_00000006" / "model.safetensors")
    assert set(saved) == {"first/lora_kernel_a", "first/lora_kernel_b", "first/bias"}
    trained = model.get_weights()
    model = make()
    manager.restore_newest(tmp_path, model)
    assert_equal(model.get_weights(), trained)
    kernel = model.get_layer("second").kernel
    kernel.assign(kernel + 1.0)
    refused(r"trained beside other frozen weights \(DIR/base\); give", go, model, 2)


def test_a_step_that_is_not_finite_can_be_skipped():
    keras.utils.set_random_seed(7)
    inputs = keras.Input((5,))
    model = keras.Model(inputs, keras.layers.Dense(3)(inputs))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = AdamW(0.1, skip_non_finite=True, ema=0.9, accumulate=2)
    model.compile(optimizer, loss, jit_compile=JIT)
    track_step_loss(model)
    bad = X.copy()
    bad[BATCH + 1] = np.nan
    seen = []

    class Seen(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append((logs["step_loss"], logs["loss"]))

    model.fit(bad, Y, batch_size=BATCH, shuffle=False, callbacks=[Seen()], verbose=0)
    losses = [step for step, _ in seen]
    assert np.isnan(losses[1]) and np.isfinite([losses[0], *losses[2:]]).all()
    mean = np.average([losses[0], *losses[2:]], weights=[4, 4, 4, 4, 2])
    assert seen[-1][1] == pytest.approx(mean, rel=1e-5)
    held = {v.name: keras.ops.convert_to_numpy(v.value) for v in model.optimizer.variables}
    assert (held["skipped"], held["iteration"]) == (1, STEPS - 1)
    # As if the batch had not been there.
    weights = model.get_weights()
    keras.utils.set_random_seed(7)
    other = keras.Model(inputs, keras.layers.Dense(3)(inputs))
    other.compile(AdamW(0.1, ema=0.9, accumulate=2), loss, jit_compile=JIT)
    rows = np.r_[0:BATCH, 2 * BATCH : ROWS]
    other.fit(X[rows], Y[rows], batch_size=BATCH, shuffle=False, verbose=0)
    assert_equal(weights, other.get_weights(), tolerance("dense"))


def test_by_the_clock(tmp_path, monkeypatch):
    from kmodels.checkpoint import callback

    now = [0.0]

    def perf_counter():
        now[0] += 1.0
        return now[0]

    monkeypatch.setattr(callback, "perf_counter", perf_counter)
    run(tmp_path, epochs=1, every="3s", keep=9)
    names = [path.name for path in manager.list_checkpoints(tmp_path)]
    assert names == ["step_00000006", "step_00000003"]
