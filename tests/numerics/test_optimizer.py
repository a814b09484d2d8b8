"""AdamW and SGD against their equations in float64, on the backend's own path."""

from contextlib import ExitStack
from functools import partial

import keras
import numpy as np
import pytest

from kmodels.checkpoint.state import slots
from kmodels.models import ViTImageClassifier
from kmodels.training import SGD, AdamW, Lamb, MomentumSGD, Muon, WarmupSchedule
from kmodels.training.optimizers import depth_multipliers
from refusals import refused
from tolerances import tolerance

PATHS = (
    "patch_embedding/kernel",
    "tokens/position_embedding",
    "block_0/attention_norm/scale",
    "block_0/mlp/up/kernel",
    "block_1/mlp/up/kernel",
    "block_1/mlp/up/bias",
    "logits/kernel",
)
SHAPES = ((3, 4), (1, 5, 4), (4,), (4, 6), (4, 6), (6,), (4, 2))
DECAYED = (True, False, False, True, True, False, True)


def make_variables(seed=0):
    rng = np.random.default_rng(seed)
    variables = []
    for path, shape in zip(PATHS, SHAPES, strict=True):
        *scopes, name = path.split("/")
        with ExitStack() as stack:
            for scope in scopes:
                stack.enter_context(keras.name_scope(scope))
            variables.append(keras.Variable(rng.normal(size=shape).astype("float32"), name=name))
    return variables


def gradients(steps, seed=1):
    rng = np.random.default_rng(seed)
    return [[rng.normal(size=shape).astype("float32") for shape in SHAPES] for _ in range(steps)]


def apply(optimizer, variables, grads):
    optimizer.apply([keras.ops.convert_to_tensor(g) for g in grads], variables)


def values(variables):
    return [np.asarray(keras.ops.convert_to_numpy(v.value), "float64") for v in variables]


def reference(
    start, updates, rate, decay, clip, multipliers, b1=0.9, b2=0.999, epsilon=1e-8, amsgrad=False
):
    """Loshchilov and Hutter 2019, algorithm 2; Keras adds epsilon to the uncorrected root."""
    weights = [w.copy() for w in start]
    first = [np.zeros_like(w) for w in start]
    second = [np.zeros_like(w) for w in start]
    highest = [np.zeros_like(w) for w in start]
    history = []
    for step, grads in enumerate(updates, 1):
        grads = [g.astype("float64") for g in grads]
        norm = np.sqrt(sum((g**2).sum() for g in grads))
        if clip and norm > clip:
            grads = [g * clip / norm for g in grads]
        for i, g in enumerate(grads):
            lr = rate(step - 1) * multipliers[i]
            first[i] = b1 * first[i] + (1 - b1) * g
            second[i] = b2 * second[i] + (1 - b2) * g**2
            if DECAYED[i]:
                weights[i] = weights[i] * (1 - lr * decay)
            alpha = lr * np.sqrt(1 - b2**step) / (1 - b1**step)
            highest[i] = np.maximum(highest[i], second[i])
            root = np.sqrt(highest[i] if amsgrad else second[i])
            weights[i] = weights[i] - alpha * first[i] / (root + epsilon)
        history.append([w.copy() for w in weights])
    return history


@pytest.mark.parametrize("settings", [{}, {"beta_2": 0.5}, {"beta_2": 0.5, "amsgrad": True}])
def test_narrow_weights_are_moved(settings):
    """0.999 is 1 in bfloat16, by which Keras' own step comes to nothing or to too much."""
    start = [0.5 * value for value in values(make_variables())]
    variables = [keras.Variable(w, dtype="bfloat16", name=f"w{i}") for i, w in enumerate(start)]
    optimizer = AdamW(0.05, weight_decay=0.0, **settings)
    # Smaller ones after larger ones, which amsgrad remembers.
    updates = [
        [grad * size for grad in grads]
        for grads, size in zip(gradients(3), (1.0, 0.5, 0.25), strict=True)
    ]
    for grads in updates:
        apply(optimizer, variables, grads)
    more = {"b2": settings.get("beta_2", 0.999), "amsgrad": "amsgrad" in settings}
    expected = reference(start, updates, lambda _: 0.05, 0.0, None, (1.0,) * 7, **more)[-1]
    moved = []
    for variable, old, new in zip(variables, start, expected, strict=True):
        found = keras.ops.convert_to_numpy(keras.ops.cast(variable, "float32"))
        assert keras.backend.standardize_dtype(variable.dtype) == "bfloat16"
        np.testing.assert_allclose(found, new, rtol=0, atol=tolerance("optimizer", "bfloat16"))
        moved.append(np.abs(found - old).max())
    assert min(moved) > 2 * tolerance("optimizer", "bfloat16")


@pytest.mark.parametrize("layer_decay", [None, 0.5])
def test_steps_are_those_of_the_equations(layer_decay):
    variables = make_variables()
    multipliers = (1.0,) * 7
    if layer_decay:
        # Two blocks: embeddings are three depths below the head.
        multipliers = (0.125, 0.125, 0.25, 0.25, 0.5, 0.5, 1.0)
        assert depth_multipliers(PATHS, layer_decay) == multipliers
        # The final norm goes with the last block; without a head both learn at the full rate.
        paths = (*PATHS[:-1], "final_norm/scale", "logits/kernel")
        assert depth_multipliers(paths, layer_decay) == (*multipliers[:-1], 0.5, 1.0)
        assert depth_multipliers(paths[-3:-1], layer_decay) == (1.0, 1.0)
        assert depth_multipliers(PATHS[-1:], layer_decay) == (1.0,)
    schedule = WarmupSchedule(0.1, 10, 2, "linear")
    optimizer = AdamW(schedule, weight_decay=0.3, clip_norm=1.5, layer_decay=layer_decay)
    start, grads = values(variables), gradients(4)
    for step in grads:
        apply(optimizer, variables, step)
    rate = lambda step: 0.1 * (step + 1) / 2 if step < 2 else 0.1 * (1 - (step - 2) / 8)  # noqa: E731
    expected = reference(start, grads, rate, 0.3, 1.5, multipliers)[-1]
    for path, got, wanted in zip(PATHS, values(variables), expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-6, err_msg=path)


@pytest.mark.parametrize("scale", [1.0, 1e-7])
def test_many_steps_are_those_of_keras(scale):
    """Where gradients are small, epsilon counts; one of them lies across in memory."""
    rng = np.random.default_rng(2)
    start = rng.normal(size=(6, 4))
    ours, theirs = (keras.Variable(start, dtype="float32", name="kernel") for _ in range(2))
    optimizer = AdamW(0.01, weight_decay=0.1)
    other = keras.optimizers.AdamW(0.01, weight_decay=0.1, epsilon=1e-8)
    for _ in range(60):
        gradient = keras.ops.convert_to_tensor(scale * rng.normal(size=(4, 6)), "float32")
        optimizer.apply([keras.ops.transpose(gradient)], [ours])
        other.apply([keras.ops.transpose(gradient)], [theirs])
    got, wanted = values([ours, theirs])
    np.testing.assert_allclose(got, wanted, rtol=0, atol=tolerance("optimizer"))
    assert np.abs(got - start).max() > 0.1


MOMENTA = [(0.0, False), (0.9, False), (0.9, True)]


def descent(start, updates, momentum, nesterov, decay=0.0, rate=0.1):
    """Sutskever et al. 2013 as Keras writes it; also the velocities at the end."""
    weights = [w.copy() for w in start]
    velocities = [np.zeros_like(w) for w in start]
    for grads in updates:
        for i, g in enumerate(grads):
            if DECAYED[i]:
                weights[i] = weights[i] * (1 - rate * decay)
            velocities[i] = momentum * velocities[i] - rate * g.astype("float64")
            ahead = momentum * velocities[i] - rate * g
            weights[i] = weights[i] + (ahead if nesterov else velocities[i])
    return weights, velocities


@pytest.mark.parametrize(("momentum", "nesterov"), MOMENTA)
def test_sgd_is_that_of_the_equations_and_of_keras(momentum, nesterov):
    ours, theirs, start = make_variables(), make_variables(), values(make_variables())
    grads = gradients(5)
    optimizer = SGD(0.1, momentum, nesterov, weight_decay=0.3)
    other = keras.optimizers.SGD(0.1, momentum, nesterov, weight_decay=0.3)
    kept = [v for v, decayed in zip(theirs, DECAYED, strict=True) if not decayed]
    other.exclude_from_weight_decay(kept)
    for step in grads:
        apply(optimizer, ours, step)
        apply(other, theirs, step)
    weights, velocities = descent(start, grads, momentum, nesterov, 0.3)
    allowed = tolerance("optimizer")
    for got, wanted, keras_own in zip(values(ours), weights, values(theirs), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=allowed)
        np.testing.assert_allclose(got, keras_own, rtol=0, atol=allowed)
    held = slots(optimizer)
    if not momentum:
        assert set(held) == {"iteration", "learning_rate"}
        return
    for path, wanted in zip(PATHS, velocities, strict=True):
        np.testing.assert_allclose(values([held[f"{path}:momentum"]])[0], wanted, atol=allowed)


def test_sgd_goes_on_from_saved_state():
    grads = gradients(4)
    whole, parts = make_variables(), make_variables()
    optimizer = SGD(0.1, 0.9, True)
    for step in grads:
        apply(optimizer, whole, step)
    first = SGD(0.1, 0.9, True)
    for step in grads[:2]:
        apply(first, parts, step)
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(first))
    again.build(parts)
    store = {}
    first.save_own_variables(store)
    again.load_own_variables(store)
    for step in grads[2:]:
        apply(again, parts, step)
    for got, wanted in zip(values(parts), values(whole), strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("make", [AdamW, SGD, Lamb, MomentumSGD, Muon])
def test_what_keras_excludes_is_not_decayed(make):
    variables = make_variables(), make_variables()
    optimizers = [make(0.1, weight_decay=0.5), make(0.1, weight_decay=0.0)]
    optimizers[0].exclude_from_weight_decay(variables[0][3:4], ["patch|kernel"])
    grads = gradients(1)[0]
    for optimizer, parts in zip(optimizers, variables, strict=True):
        apply(optimizer, parts, grads)
    for got, wanted in zip(*map(values, variables), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=tolerance("optimizer"))


def test_sgd_has_what_adamw_has():
    variables, start = make_variables(), values(make_variables())
    settings = {"layer_decay": 0.5, "clip_norm": 1.5, "accumulate": 2}
    optimizer = SGD(0.1, **settings)
    multipliers = (0.125, 0.125, 0.25, 0.25, 0.5, 0.5, 1.0)
    grads = gradients(2)
    for step in grads:
        apply(optimizer, variables, step)
    means = [(a + b) / 2 for a, b in zip(*grads, strict=True)]
    norm = np.sqrt(sum((g.astype("float64") ** 2).sum() for g in means))
    for i, got in enumerate(values(variables)):
        wanted = start[i] - 0.1 * multipliers[i] * means[i] * min(1, 1.5 / norm)
        np.testing.assert_allclose(got, wanted, rtol=0, atol=tolerance("optimizer"))
    assert {key: optimizer.get_config()[key] for key in settings} == settings


def test_accumulation_is_one_update_with_the_mean():
    variables, start = make_variables(), values(make_variables())
    optimizer = AdamW(0.05, weight_decay=0.1, accumulate=2)
    grads = gradients(4)
    for step in grads:
        apply(optimizer, variables, step)
    means = [
        [(a + b) / 2 for a, b in zip(first, second, strict=True)]
        for first, second in (grads[:2], grads[2:])
    ]
    expected = reference(start, means, lambda _: 0.05, 0.1, None, (1.0,) * 7)[-1]
    for got, wanted in zip(values(variables), expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-6)


def test_moving_average_is_kept_beside_the_weights():
    variables, start = make_variables(), values(make_variables())
    optimizer = AdamW(0.05, weight_decay=0.0, ema=0.75)
    grads = gradients(3)
    for step in grads:
        apply(optimizer, variables, step)
    history = reference(start, grads, lambda _: 0.05, 0.0, None, (1.0,) * 7)
    average = history[0]
    for after in history[1:]:
        average = [0.75 * a + 0.25 * w for a, w in zip(average, after, strict=True)]
    trained = values(variables)
    optimizer.finalize_variable_values(variables)
    np.testing.assert_array_equal(values(variables)[0], trained[0])
    optimizer.swap_average()
    for got, wanted in zip(values(variables), average, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-6)
    optimizer.swap_average()
    for got, wanted in zip(values(variables), trained, strict=True):
        np.testing.assert_array_equal(got, wanted)
    optimizer.finalize_average()
    np.testing.assert_allclose(values(variables)[0], average[0], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    "make", [partial(AdamW, ema=0.5), partial(keras.optimizers.Adam, use_ema=True)]
)
def test_a_file_without_the_moving_average_warns(tmp_path, make):
    model = ViTImageClassifier.from_preset("vit_debug", num_layers=1, num_classes=2)
    model.compile(make(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x = np.zeros((4, *model.backbone.config.image_shape), "float32")
    for _ in range(2):  # In `fit` Keras' optimizer would write the average.
        model.train_on_batch(x, np.zeros(4, "int32"))
    for write in (model.save_to_preset, model.export_to_transformers, model.export_to_timm):
        with pytest.warns(UserWarning, match="gets the weights, not the moving average"):
            write(tmp_path / write.__name__)
    if isinstance(model.optimizer, AdamW):
        model.optimizer.finalize_average()
    else:
        model.optimizer.finalize_variable_values(model.trainable_weights)
    model.save_to_preset(tmp_path / "again")


def test_config_makes_the_same_optimizer_under_one_name_on_every_backend():
    optimizer = AdamW(WarmupSchedule(0.1, 10, 2), layer_decay=0.7, accumulate=3, ema=0.9)
    saved = keras.saving.serialize_keras_object(optimizer)
    assert saved["registered_name"] == "kmodels>AdamW"
    again = keras.saving.deserialize_keras_object(saved)
    assert again.get_config() == optimizer.get_config()
    assert (again.layer_decay, again.accumulate, again.ema) == (0.7, 3, 0.9)


def test_slots_are_named_after_the_variables():
    optimizer = AdamW(0.1)
    optimizer.build(make_variables()[:1])
    names = [variable.name for variable in optimizer.variables]
    slots = ["patch_embedding_kernel_momentum", "patch_embedding_kernel_velocity"]
    assert names == ["iteration", "learning_rate", *slots]


@pytest.mark.once
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weight_decay": -1.0}, "weight decay is -1.0; give a number at least 0"),
        ({"layer_decay": 1.5}, "layer decay is 1.5; give a factor above 0"),
        ({"clip_norm": 0.0}, "clip norm is 0.0; give a number above 0"),
        ({"accumulate": 0}, "accumulate is 0; give at least 1"),
        ({"ema": 1.0}, "ema is 1.0; give a momentum between 0 and 1"),
        ({"no_decay": "norm"}, "no_decay is 'norm'; give a sequence of texts"),
        ({"no_decay": ["("]}, r"no_decay has '\(', which is not a regular expression: missing"),
        ({"beta_1": 1.0}, "beta_1 is 1.0; give a number at least 0 and below 1"),
        ({"epsilon": -1.0}, "epsilon is -1.0; give a number at least 0"),
        ({"global_clipnorm": 1.0}, "AdamW takes no global_clipnorm; give clip_norm"),
        ({"gradient_accumulation_steps": 2}, "AdamW takes no gradient_acc.*; give accumulate"),
        ({"use_ema": True}, "AdamW takes no use_ema; give ema"),
        ({"ema_momentum": 0.9}, "AdamW takes no ema_momentum; give ema"),
    ],
)
def test_wrong_settings(settings, message):
    refused(message, AdamW, 0.1, **settings)


@pytest.mark.once
@pytest.mark.parametrize("make", [Lamb, Muon])
def test_optimizers_of_matrices_have_no_amsgrad(make):
    refused(f"{make.__name__} has no amsgrad; leave it out", make, 0.1, amsgrad=True)


@pytest.mark.parametrize(
    ("kind", "last"), [("cosine", 0.1 + 0.9 * 0.5), ("linear", 0.1 + 0.9 * 0.5), ("constant", 1.0)]
)
def test_schedule(kind, last):
    schedule = WarmupSchedule(1.0, 12, 4, kind, final=0.0 if kind == "constant" else 0.1)
    rates = keras.ops.convert_to_numpy(schedule(np.arange(13)))
    np.testing.assert_allclose(rates[:5], [0.25, 0.5, 0.75, 1.0, 1.0], rtol=1e-6)
    np.testing.assert_allclose(rates[8], last, rtol=1e-6)
    np.testing.assert_allclose(rates[12], 1.0 if kind == "constant" else 0.1, rtol=1e-6)
    if kind == "cosine":
        share = 0.5 * (1 + np.cos(np.pi * 2 / 8))
        np.testing.assert_allclose(rates[6], 0.1 + 0.9 * share, rtol=1e-6)
    assert WarmupSchedule(**schedule.get_config()).get_config() == schedule.get_config()


@pytest.mark.once
def test_a_warm_up_that_does_not_end_is_named(caplog):
    WarmupSchedule(1.0, 10, 10)
    assert not caplog.messages
    WarmupSchedule(1.0, 10, 20)
    assert "of 20 steps is longer than the schedule of 10, so the learning" in caplog.messages[0]


@pytest.mark.once
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1.0, 10, 0, "step"), "schedule is 'step'; choose one of cosine, linear, constant"),
        ((0.0, 10), "learning rate is 0.0; give a number above 0"),
        ((1.0, 0), "a schedule of 0 steps"),
        ((1.0, "10"), "total_steps is '10'; give a whole number"),
        ((1.0, 10, 0.1), "warmup_steps is 0.1; give a whole number"),
        ((1.0, 10, 0, "constant", 0.1), "a constant schedule has no final rate"),
    ],
)
def test_wrong_schedules(arguments, message):
    refused(message, WarmupSchedule, *arguments)


def projections(seed=0):
    """Queries, keys and values of an attention, a bias, a table and a head, under timm's names."""
    rng, result = np.random.default_rng(seed), {}
    for path, shape in {
        "block_0/attention/query/kernel": (6, 6), "block_0/attention/query/bias": (6,),
        "block_0/attention/key/kernel": (6, 6), "block_0/attention/value/kernel": (6, 6),
        "tokens/position_embedding": (1, 5, 6), "logits/kernel": (6, 3),
    }.items():  # fmt: skip
        *scopes, name = path.split("/")
        with ExitStack() as stack:
            for scope in scopes:
                stack.enter_context(keras.name_scope(scope))
            result[path] = keras.Variable(rng.normal(size=shape).astype("float32"), name=name)
    return result


def equations(kind, weights, updates, rate, decay):
    """LAMB (You et al. 2020, algorithm 2) and Muon (Jordan et al. 2024), AdamW else; float64."""
    one = "block_0/attention"
    slots = {name: [0.0, 0.0] for name in weights}
    for count, grads in enumerate(updates, 1):
        for name, w in weights.items():
            whole = name in (one, "logits/kernel") and not (kind == "muon" and w.shape[1] < 4)
            g, slot = grads[name], slots[name]
            b1, b2 = (0.9, 0.999) if kind == "lamb" else (0.95 if whole else 0.9, 0.95)
            slot[0] = b1 * slot[0] + (1 - b1) * g
            slot[1] = b2 * slot[1] + (1 - b2) * g**2
            root = np.sqrt(slot[1] / (1 - b2**count))
            step = slot[0] / (1 - b1**count) / (root + (1e-8 if kind == "lamb" else 1e-7))
            decays = decay * (name in (one, "logits/kernel"))
            if kind == "muon":
                w = w * (1 - rate * decays)
                if whole:
                    left, sizes, right = np.linalg.svd(slot[0], full_matrices=False)
                    sizes = sizes / np.sqrt((sizes**2).sum())
                    for a, b, c in (
                        (4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377),
                        (3.7418, -5.5913, 2.3037), (2.8769, -3.1427, 1.2046),
                        (2.8366, -3.0525, 1.2012),
                    ):  # fmt: skip
                        sizes = a * sizes + b * sizes**3 + c * sizes**5
                    step = 0.2 * np.sqrt(max(w.shape)) * (left * sizes) @ right
            elif whole:
                step = step + decays * w
                step = step * np.linalg.norm(w) / np.linalg.norm(step)
            weights[name] = w - rate * step
    return weights


@pytest.mark.parametrize(("kind", "make"), [("lamb", Lamb), ("muon", Muon)])
def test_steps_of_matrices_are_those_of_the_equations(kind, make):
    variables = projections()
    paths, one = list(variables), "block_0/attention"
    parts = [path for path in paths if path.startswith(one) and path.endswith("kernel")]

    def joined(arrays):
        rest = {name: array for name, array in arrays.items() if name not in parts}
        return {one: np.concatenate([arrays[name] for name in parts], 1), **rest}

    rng = np.random.default_rng(1)
    updates = [{path: rng.normal(size=variables[path].shape) for path in paths} for _ in range(4)]
    start = dict(zip(paths, values(variables.values()), strict=True))
    optimizer = make(0.05, weight_decay=0.1)
    again = type(optimizer).from_config(optimizer.get_config())
    assert again.get_config() == optimizer.get_config()
    for grads in updates:
        apply(again, list(variables.values()), [grads[path].astype("float32") for path in paths])
    wanted = equations(kind, joined(start), list(map(joined, updates)), 0.05, 0.1)
    found = joined(dict(zip(paths, values(variables.values()), strict=True)))
    for name, value in wanted.items():
        # Newton-Schulz multiplies errors of float32 by about 30.
        np.testing.assert_allclose(found[name], value, rtol=2e-5, atol=2e-6, err_msg=name)


def test_momentum_of_gradients_with_a_rate_that_rises():
    variables, start, grads = make_variables(), values(make_variables()), gradients(4)
    optimizer = MomentumSGD(WarmupSchedule(0.1, 10, 2, start=0.0), weight_decay=0.3)
    totals = [0.0] * len(start)
    for step, update in enumerate(grads):
        apply(optimizer, variables, update)
        rate = (0.0, 0.05, 0.1, 0.05 * (1 + np.cos(np.pi / 8)))[step]
        for i, g in enumerate(update):
            totals[i] = 0.9 * totals[i] + g
            start[i] = start[i] * (1 - rate * 0.3 * DECAYED[i]) - rate * totals[i]
    for got, wanted in zip(values(variables), start, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=tolerance("optimizer"))


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_epsilon_of_the_corrected_root(kind):
    """As torch adds it, which shows for gradients near epsilon."""
    start, size = [0.5 * value for value in values(make_variables())], 1e-7
    variables = [keras.Variable(w, dtype=kind, name=f"w{i}") for i, w in enumerate(start)]
    optimizer = AdamW(0.05, weight_decay=0.0, epsilon=size, corrected_epsilon=True)
    assert AdamW.from_config(optimizer.get_config()).get_config() == optimizer.get_config()
    first, second = [0.0] * len(start), [0.0] * len(start)
    for count, update in enumerate(gradients(3), 1):
        apply(optimizer, variables, [size * g for g in update])
        for i, g in enumerate(update):
            first[i] = 0.9 * first[i] + 0.1 * size * g
            second[i] = 0.999 * second[i] + 0.001 * (size * g) ** 2
            root = np.sqrt(second[i] / (1 - 0.999**count))
            start[i] = start[i] - 0.05 * first[i] / (1 - 0.9**count) / (root + size)
    for variable, wanted in zip(variables, start, strict=True):
        found = keras.ops.convert_to_numpy(keras.ops.cast(variable, "float32"))
        np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance("optimizer", kind))


def test_rates_by_epoch_are_deits():
    schedule = WarmupSchedule(1.0, 40, 8, final=0.1, start=0.2, steps_per_epoch=4)
    # Epochs of 4 steps, warm-up of 2: each has the rate of the start of the epoch before.
    falls = [0.1 + 0.45 * (1 + np.cos(np.pi * epoch / 10)) for epoch in range(10)]
    wanted = [0.2, 0.2, 0.6, *falls[2:9]]
    found = [float(schedule(step)) for step in range(40)]
    np.testing.assert_allclose(found, np.repeat(wanted, 4), rtol=0, atol=tolerance("optimizer"))
    assert WarmupSchedule.from_config(schedule.get_config()).get_config() == schedule.get_config()
    for settings, message in (
        ({"start": -1.0}, "the start learning rate is -1.0; give a number at least 0"),
        ({"final": -1.0}, "the final learning rate is -1.0"),
        ({"steps_per_epoch": 0}, "steps_per_epoch is 0"),
    ):
        refused(message, WarmupSchedule, 1.0, 10, **settings)
    refused("momentum is 0; give a share above 0", MomentumSGD, momentum=0)
    refused(r"momentum is 1\.5; give a number at least 0 and below 1", Muon, momentum=1.5)
