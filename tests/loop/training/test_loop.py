"""The loop of kmodels beside Keras' own on a plain model, argument by argument."""

import warnings

import keras
import numpy as np
import pytest

import kmodels
from arrays import to_numpy
from kmodels import models
from pool import pool
from refusals import refused

RNG = np.random.default_rng(0)
X = RNG.normal(size=(22, 5)).astype("float32")
Y = RNG.integers(0, 3, 22)
WEIGHTS = RNG.uniform(0.2, 2.0, 22).astype("float32")
BATCH, STEPS = 4, 6


class Told(keras.callbacks.Callback):
    """Notes every hook with the names of its logs, and with their values at the end of an epoch."""

    def __init__(self, stop_at=None):
        super().__init__()
        self.hooks, self._stop_at = [], stop_at

    def _note(self, hook, number, logs):
        values = {name: float(value) for name, value in (logs or {}).items() if name != "outputs"}
        ends = hook.endswith("end") and "batch" not in hook
        self.hooks.append((hook, number, values if ends else sorted(logs or {})))
        if self._stop_at == (hook, number):
            self.model.stop_training = self.model.stop_evaluating = True
            self.model.stop_predicting = True


def _hook(name, numbered):
    def hook(self, *arguments, logs=None):
        number, logs = (*arguments, logs)[:2] if numbered else (None, (*arguments, logs)[0])
        self._note(name, number, logs)

    return hook


for _kind in ("train", "test", "predict"):
    for _end in ("begin", "end"):
        setattr(Told, f"on_{_kind}_{_end}", _hook(f"on_{_kind}_{_end}", False))
        setattr(Told, f"on_{_kind}_batch_{_end}", _hook(f"on_{_kind}_batch_{_end}", True))
for _end in ("begin", "end"):
    setattr(Told, f"on_epoch_{_end}", _hook(f"on_epoch_{_end}", True))


class SlowerEachEpoch(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.model.optimizer.learning_rate = 0.1 / (epoch + 1)


class WeightsSeen(keras.callbacks.Callback):
    """Reads and writes weights between two steps."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        kernel = self.model.layers[0].kernel
        self.seen.append(keras.ops.convert_to_numpy(kernel).sum())
        kernel.assign(kernel * 0.99)


class OwnStep(keras.Sequential):
    """Logs names of its own from a `compute_metrics` of its own."""

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return {
            **super().compute_metrics(x, y, y_pred, sample_weight),
            "rows": keras.ops.sum(y_pred[:, 0] * 0 + 1),
        }


class Numbered(keras.utils.PyDataset):
    """Batches by their number; it counts the hooks that Keras calls."""

    def __init__(self):
        super().__init__()
        self.hooks = []

    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return X[rows], Y[rows]

    def on_epoch_begin(self):
        self.hooks.append("begin")

    def on_epoch_end(self):
        self.hooks.append("end")


def generator():
    while True:
        for number in range(STEPS):
            rows = slice(number * BATCH, (number + 1) * BATCH)
            yield X[rows], Y[rows]


def made(cls=keras.Sequential, optimizer=None, dropout=0.3, **settings):
    """A compiled model with dropout and batch norm, equal each time, and not built yet."""
    keras.utils.set_random_seed(3)
    model = cls(
        [
            keras.layers.Dense(8, activation="relu", kernel_regularizer="l2"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(dropout),
            keras.layers.Dense(3),
        ]
    )
    settings = {"metrics": ["accuracy"], **settings}
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer() if optimizer else "adam", loss, **settings)
    return model


def built(loop, **settings):
    """A model for the pool, of which each loop has one, with a step that it compiled itself."""
    model = made(**settings)
    model.build((None, 5))
    return model


def averaged():
    return keras.optimizers.AdamW(
        0.01, gradient_accumulation_steps=2, use_ema=True, ema_momentum=0.9, global_clipnorm=1.0
    )


class Case:
    """One way to call `fit`: its arguments, and those of `made`.

    All but `anew` share a model for each loop, whose step is compiled once.
    """

    def __init__(self, _made=None, anew=False, **fit):
        self.made, self.anew, self.fit = _made or {}, anew, fit


# Without an order of its own: kmodels draws the same on every backend, Keras another on each.
ARRAYS = {"x": X, "y": Y, "batch_size": BATCH, "epochs": 2, "shuffle": False}
# A smaller last batch is another program: cases with a step of their own do without.
WHOLE = {**ARRAYS, "x": X[:20], "y": Y[:20]}
FITS = {
    "a new model": Case(anew=True, **WHOLE),
    "arrays": Case(**ARRAYS),
    "whole batches": Case(**WHOLE),
    "sample_weight": Case({"weighted_metrics": ["accuracy"]}, **ARRAYS, sample_weight=WEIGHTS),
    "class_weight": Case(**ARRAYS, class_weight={0: 0.5, 2: 3.0}),
    "validation_data": Case(**ARRAYS, validation_data=(X[:9], Y[:9])),
    "validation with weights": Case(**ARRAYS, validation_data=(X[:9], Y[:9], WEIGHTS[:9])),
    "validation_split": Case(**ARRAYS, validation_split=0.3),
    "validation_steps": Case(
        **ARRAYS, validation_data=(X, Y), validation_steps=2, validation_batch_size=3
    ),
    "validation_freq": Case(**{**ARRAYS, "epochs": 3}, validation_data=(X, Y), validation_freq=2),
    "validation_freq as a list": Case(
        **{**ARRAYS, "epochs": 3}, validation_data=(X, Y), validation_freq=[1, 3]
    ),
    "initial_epoch": Case(**{**ARRAYS, "epochs": 4}, initial_epoch=2),
    "steps_per_epoch": Case(**{**ARRAYS, "epochs": 3}, steps_per_epoch=2),
    "no epoch": Case(**{**ARRAYS, "epochs": 0}),
    "a generator": Case(x=generator, epochs=2, steps_per_epoch=STEPS),
    "batches by number": Case(x=Numbered, epochs=2, shuffle=False),
    "accumulation, clipping and an average": Case({"optimizer": averaged}, **WHOLE),
    "a callback that stops within an epoch": Case(
        **ARRAYS, callbacks=lambda: [Told(("on_train_batch_end", 2))]
    ),
    "a callback that stops an epoch": Case(**ARRAYS, callbacks=lambda: [Told(("on_epoch_end", 0))]),
    "a callback that sets the rate": Case(**ARRAYS, callbacks=lambda: [SlowerEachEpoch()]),
    "a callback that reads and writes weights": Case(**ARRAYS, callbacks=lambda: [WeightsSeen()]),
    "early stopping": Case(
        **{**ARRAYS, "epochs": 4},
        validation_data=(X[:9], Y[:9]),
        callbacks=lambda: [
            keras.callbacks.EarlyStopping("accuracy", mode="min", restore_best_weights=True)
        ],
    ),
    "run_eagerly": Case({"run_eagerly": True}, **WHOLE),
    "without XLA": Case({"jit_compile": False}, **WHOLE),
    "logs of its own": Case({"cls": OwnStep}, **WHOLE, validation_data=(X[:8], Y[:8])),
    "no metrics": Case({"metrics": None}, **WHOLE),
    "several steps at once": Case({"steps_per_execution": 4}, **ARRAYS, validation_data=(X, Y)),
}


def run(function, case):
    """What one call of a `fit` leaves: weights, slots, history, hooks, and what callbacks saw."""
    if case.anew:
        return run_on(made(**case.made), function, case)
    with pool(built, loop=function.__module__, **case.made) as model:
        return run_on(model, function, case)


def run_on(model, function, case):
    told = Told()
    settings = dict(case.fit)
    callbacks = [*settings.pop("callbacks", list)(), told]
    if callable(data := settings["x"]):
        settings["x"] = data()
    keras.utils.set_random_seed(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras' of data that ends
        history = function(model, **settings, callbacks=callbacks, verbose=0)
    assert history is model.history
    seen = [part for c in callbacks for part in (getattr(c, "seen", ()), getattr(c, "hooks", ()))]
    arrays = [keras.ops.convert_to_numpy(v) for v in (*model.variables, *model.optimizer.variables)]
    return {
        "history": history.history,
        "epochs": history.epoch,
        "hooks": seen,
        "data": getattr(settings["x"], "hooks", None),
        "arrays": [array.tolist() for array in arrays],
    }


@pytest.mark.each_time(
    "several steps at once",
    "logs of its own",
    "sample_weight",
    "accumulation, clipping and an average",
    "arrays",
    "run_eagerly",
    "class_weight",
    "validation_data",
    "early stopping",
    "a callback that reads and writes weights",
    "initial_epoch",
    "a callback that stops an epoch",
    "whole batches",
    "a generator",
    "steps_per_epoch",
    "no epoch",
    on=("tensorflow",),
)
@pytest.mark.parametrize("name", FITS)
def test_fit_is_what_keras_own_is(name, backend):
    case = FITS[name]
    if case.made.get("steps_per_execution") and backend == "torch":
        pytest.skip("torch runs one step a call")
    if backend == "torch":
        # Keras begins passes that nothing comes of, and each draws from the generator of dropout.
        case = Case({**case.made, "dropout": 0.0}, case.anew, **case.fit)
    found, wanted = run(kmodels.fit, case), run(keras.Model.fit, case)
    for part in wanted:
        assert found[part] == wanted[part], part
    assert wanted["hooks"][-1] or case.fit["epochs"] == 0


class Ends(keras.callbacks.Callback):
    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def on_batch_end(self, batch, logs=None):
        self.seen.append(batch)


class Listening(keras.callbacks.CallbackList):
    def on_train_batch_end(self, batch, logs=None):
        ENDS.append(batch)


ENDS = []
# What hears the end of a batch, and what does not.
HEARING = {
    "no callback": lambda: None,
    "a callback of epochs": lambda: [keras.callbacks.EarlyStopping("loss")],
    "by the name of all batches": lambda: [Ends(ENDS)],
    "of an instance": lambda: [
        keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: ENDS.append(batch))
    ],
    "a list of its own": lambda: Listening(add_history=True),
}


@pytest.mark.parametrize("name", HEARING)
def test_the_end_of_a_batch_is_called_if_a_callback_hears_it(name, monkeypatch):
    calls, kerass = [], keras.callbacks.CallbackList.on_train_batch_end
    monkeypatch.setattr(
        keras.callbacks.CallbackList,
        "on_train_batch_end",
        lambda self, *args: calls.append(args) or kerass(self, *args),
    )
    ENDS.clear()
    callbacks = HEARING[name]()
    with pool(built, loop="hearing") as model:
        if isinstance(callbacks, keras.callbacks.CallbackList):
            callbacks.set_model(model)
        kmodels.fit(model, X, Y, batch_size=BATCH, verbose=0, callbacks=callbacks)
    heard = name not in ("no callback", "a callback of epochs")
    assert bool(ENDS) == heard and bool(calls) == (heard and name != "a list of its own")


EVALUATIONS = {
    "a list": {},
    "a dictionary": {"return_dict": True},
    "weights": {"sample_weight": WEIGHTS},
    "steps": {"steps": 3},
    "a callback that stops": {"callbacks": lambda: [Told(("on_test_batch_end", 1))]},
}


@pytest.mark.parametrize("name", EVALUATIONS)
def test_evaluate_is_what_keras_own_is(name):
    found = []
    for function in (kmodels.evaluate, keras.Model.evaluate):
        told = Told()
        settings = {"x": X, "y": Y, "batch_size": BATCH, "verbose": 0, **EVALUATIONS[name]}
        settings["callbacks"] = [*settings.pop("callbacks", list)(), told]
        with pool(built, loop=function.__module__) as model:
            found.append((function(model, **settings), told.hooks))
    assert found[0] == found[1]
    assert found[0][1]


@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize("at_once", [1, 4])
def test_predict_is_what_keras_own_is(steps, at_once, backend):
    if at_once > 1 and backend == "torch":
        pytest.skip("torch runs one step a call")
    found = []
    for function in (kmodels.predict, keras.Model.predict):
        told = Told()
        settings = {} if at_once == 1 else {"steps_per_execution": at_once}
        with pool(built, loop=function.__module__, **settings) as model:
            outputs = function(model, X, batch_size=BATCH, steps=steps, verbose=0, callbacks=[told])
        found.append((outputs.tolist(), told.hooks))
    assert found[0] == found[1]


def test_several_outputs_are_logged_in_order():
    found = []
    for fit, evaluate in ((kmodels.fit, kmodels.evaluate), (keras.Model.fit, keras.Model.evaluate)):
        keras.utils.set_random_seed(1)
        inputs = keras.Input((5,))
        outputs = {"a": keras.layers.Dense(1)(inputs), "b": keras.layers.Dense(2)(inputs)}
        model = keras.Model(inputs, outputs)
        model.compile(
            "sgd",
            {"a": "mse", "b": "mae"},
            loss_weights={"a": 2.0, "b": 1.0},
            metrics={"a": ["mae"]},
        )
        labels = {"a": X[:, :1], "b": X[:, :2]}
        history = fit(model, X, labels, epochs=2, verbose=0, shuffle=False)
        found.append((history.history, evaluate(model, X, labels, verbose=0)))
    assert found[0] == found[1]


def test_a_shorter_batch_counts_by_its_rows_for_each_output():
    inputs = keras.Input((5,))
    outputs = {"a": keras.layers.Dense(1)(inputs), "b": keras.layers.Dense(2)(inputs)}
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.0), "mse")
    labels = {"a": X[:, :1], "b": X[:, :2]}
    said = model(X)
    wanted = {f"{n}_loss": np.mean((to_numpy(said[n]) - labels[n]) ** 2) for n in labels}
    size = next(size for size in range(3, len(X)) if len(X) % size == 1)
    for _ in range(2):  # The second call has the graph of any number of rows.
        logs = kmodels.evaluate(model, X, labels, batch_size=size, verbose=0, return_dict=True)
        history = kmodels.fit(model, X, labels, batch_size=size, verbose=0).history
        for name, loss in wanted.items():
            assert logs[name] == pytest.approx(loss, rel=1e-5)
            assert history[name] == [pytest.approx(loss, rel=1e-5)]


def test_a_model_that_is_not_compiled_is_named():
    model = keras.Sequential([keras.layers.Dense(1)])
    for function, method in ((kmodels.fit, "fit"), (kmodels.evaluate, "evaluate")):
        message = rf"You must call `compile\(\)` before `{method}"
        with pytest.raises(kmodels.InputError, match=message):
            function(model, X, Y)


DATA = [(X[:BATCH], Y[:BATCH])]
REFUSED = {
    "no samples": ({"batch_size": 0}, "batch_size is 0; give at least 1"),
    "half a batch": ({"batch_size": 2.5}, "batch_size is 2.5; give a whole number"),
    "epochs in text": ({"epochs": "2"}, "epochs is '2'; give a whole number"),
    "epochs that are fewer than none": ({"epochs": -1}, "epochs is -1; give at least 0"),
    "an epoch before the first": ({"initial_epoch": -1}, "initial_epoch is -1; give at least 0"),
    "no steps": ({"steps_per_epoch": 0}, "steps_per_epoch is 0; give at least 1"),
    "no held-out steps": ({"validation_steps": 0}, "validation_steps is 0; give at least 1"),
    "another progress": ({"verbose": "x"}, "verbose is 'x'; give 'auto', 0, 1 or 2"),
    "another order": ({"shuffle": "yes"}, "shuffle is 'yes'; give True, False or 'batch'"),
    "no validation": ({"validation_freq": 0}, "validation_freq is 0; give at least 1"),
    "an empty list": ({"validation_freq": []}, r"validation_freq is \[\]; give a number of epochs"),
    "another list": ({"validation_freq": ["a"]}, "validation_freq is 'a'; give a whole number"),
    "a text of a share": ({"validation_split": "0.2"}, "validation_split is '0.2'; give a number"),
    "no share": ({"validation_split": float("nan")}, "validation_split is nan; give a number"),
    "a class of callbacks": ({"callbacks": [keras.callbacks.History]}, "callbacks has <class"),
    "four parts": ({"validation_data": (X, Y, Y, Y)}, "validation_data has 4 parts; give"),
    "labels beside batches": ({"validation_data": (DATA, Y)}, "so y cannot be given; put it in"),
}
WARNED = {
    "nothing held out": ({"validation_freq": 2}, "validation_freq without validation_data"),
    "batches of their own": ({"x": DATA, "y": None, "batch_size": 2}, "the batch size 2 has no ef"),
    "held-out batches of their own": (
        {"validation_data": DATA, "validation_batch_size": 2},
        "the batch size 2 has no effect",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_no_call_can_have_are_refused(name):
    given, message = REFUSED[name]
    with pool(built, loop="arguments") as model:
        refused(message, kmodels.fit, model, **{"x": X, "y": Y, "verbose": 0, **given})


@pytest.mark.parametrize("name", WARNED)
def test_arguments_without_effect_are_named(name):
    given, message = WARNED[name]
    with pool(built, loop="arguments") as model, pytest.warns(UserWarning, match=message):
        kmodels.fit(model, **{"x": X, "y": Y, "verbose": 0, **given})


def test_steps_in_one_call_are_a_number():
    with pool(built, loop="arguments") as model:
        model.steps_per_execution = 0
        refused("steps_per_execution is 0; give at least 1", kmodels.fit, model, X, Y)


def test_data_that_ends_early_is_said(recwarn):
    model = made()
    kmodels.fit(model, lambda: iter([(X, Y)]), epochs=1, steps_per_epoch=3, verbose=0)
    assert "the data ended after 1 of 3 batches" in str(recwarn.pop(UserWarning).message)


def test_an_error_leaves_the_weights_of_the_last_step():
    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:
                raise RuntimeError("no more")

    model = made()
    model.build((None, 5))
    first = model.get_weights()
    with pytest.raises(RuntimeError, match="no more"):
        kmodels.fit(model, X, Y, batch_size=BATCH, verbose=0, callbacks=[Fails()])
    now = model.get_weights()
    assert all(np.isfinite(array).all() for array in now)
    assert not np.array_equal(first[0], now[0])
    kmodels.fit(model, X, Y, batch_size=BATCH, verbose=0)


def test_a_step_follows_another_compile():
    model = made(optimizer=lambda: keras.optimizers.SGD(0.0))
    kmodels.fit(model, X, Y, verbose=0)
    before = model.get_weights()[0]
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    kmodels.fit(model, X, X[:, :3], verbose=0)
    assert not np.array_equal(before, model.get_weights()[0])


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_a_misspelt_argument_is_named(method):
    with pytest.raises((TypeError, kmodels.InputError), match="epoch_s"):
        getattr(kmodels, method)(made(), X, epoch_s=2)


def test_labels_may_have_another_rank_in_the_next_call():
    x, y = np.ones((8, 3), "float32"), np.arange(8, dtype="float32")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, "relu")])
    model.compile("sgd", "mse")
    for labels in (y[:, None], y, y[:, None]):
        wanted = float(np.mean((to_numpy(model(x))[:, 0] - y) ** 2))
        assert kmodels.evaluate(model, x, labels, verbose=0) == pytest.approx(wanted, rel=1e-6)
        assert np.isfinite(kmodels.fit(model, x, labels, verbose=0).history["loss"]).all()


def test_a_wrong_frequency_costs_no_epoch():
    told = Told()
    settings = {"validation_data": (X, Y), "validation_freq": "often", "callbacks": [told]}
    with pytest.raises(kmodels.InputError, match="validation_freq is 'often'; give a number"):
        kmodels.fit(made(), X, Y, verbose=0, **settings)
    assert not told.hooks


def test_a_callback_may_freeze_a_part_of_a_task():
    class Freezes(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.backbone.trainable = epoch < 1

    backbones, heads = [], []

    class Seen(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            backbones.append(self.model.backbone.get_weights()[0])
            heads.append(self.model.get_weights()[-1])

    images = RNG.normal(size=(8, 16, 16, 3)).astype("float32")
    with pool("vit_debug", num_classes=3, num_layers=1) as model:
        model.fit(images, Y[:8], epochs=3, verbose=0, callbacks=[Freezes(), Seen()])
        model.backbone.trainable = True
    first, *rest = backbones
    assert all(np.array_equal(first, other) for other in rest)
    assert not np.array_equal(heads[0], heads[1])


def test_keras_own_fit_validates_a_task(backend):
    images = RNG.normal(size=(8, 16, 16, 3)).astype("float32")
    settings = {"epochs": 2, "shuffle": False, "verbose": 0, "batch_size": 4}
    found = []
    for fit in (keras.Model.fit, kmodels.fit):
        keras.utils.set_random_seed(1)
        with pool("vit_debug", num_classes=3, num_layers=1) as model:
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile("sgd", loss, metrics=["accuracy"])
            held_out = images[:6], Y[:6]
            history = fit(model, images, Y[:8], validation_data=held_out, **settings).history
            found.append(history)
    assert found[0] == found[1] and set(found[0]) >= {"val_loss", "val_accuracy"}


class OwnLoss(models.ViTImageClassifier):
    """Has a loss without `training` and a log of its own, as models of Keras 3.2 do."""

    def compute_loss(self, x, y, y_pred, sample_weight=None):
        return 2.0 * super().compute_loss(x, y, y_pred, sample_weight)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        return {**logs, "rows": keras.ops.sum(y_pred[:, 0] * 0 + 1)}


@pytest.mark.each_time("OwnLoss-mixed_float16", on=("tensorflow",))
@pytest.mark.parametrize(
    ("kind", "dtype"), [(models.ViTImageClassifier, "float32"), (OwnLoss, "mixed_float16")]
)
def test_the_step_of_a_task_is_what_keras_own_is(kind, dtype):
    class KerasStep(kind):
        train_step = keras.Model.train_step

    images = RNG.normal(size=(8, 16, 16, 3)).astype("float32")
    found = []
    for cls in (kind, KerasStep):
        keras.utils.set_random_seed(2)
        model = cls.from_preset("vit_debug", num_classes=3, num_layers=1, dtype=dtype)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(
            keras.optimizers.AdamW(0.01), loss, metrics=["accuracy"],
            weighted_metrics=["accuracy"],
        )  # fmt: skip
        history = model.fit(
            images, Y[:8], sample_weight=WEIGHTS[:8], batch_size=4, epochs=2, shuffle=False,
            verbose=0,
        )  # fmt: skip
        variables = (*model.variables, *model.optimizer.variables)
        arrays = [keras.ops.convert_to_numpy(variable).tolist() for variable in variables]
        found.append((history.history, arrays))
    assert found[0] == found[1]
    assert found[0][0]["loss"][0] > found[0][0]["loss"][1]
