"""First weights: the same numbers on every backend, whatever the order of building."""

import keras
import numpy as np
import pytest

from arrays import to_numpy
from kmodels.core import keras_internals
from kmodels.layers import Dense, initializers
from kmodels.models import ViTBackbone, ViTImageClassifier
from python_process import run_python


@pytest.mark.once
def test_numbers_depend_on_seed_and_path_alone():
    draws = [initializers.generator(path, seed).random(3) for seed in (1, 2) for path in "ab"]
    assert len({tuple(draw) for draw in draws}) == 4
    np.testing.assert_array_equal(draws[0], initializers.generator("a", 1).random(3))


def test_golden_numbers_are_the_same_on_each_backend():
    layer = Dense(2, name="golden")
    keras.utils.set_random_seed(7)
    layer.build((None, 3))
    kernel = to_numpy(layer.kernel)
    # One uint32 of the stream each, by hand: limit * (2u - 1) with u = (word >> 8) / 2**24.
    words = initializers.generator("golden/kernel", 7).random((3, 2), "float32").astype("float64")
    limit = np.sqrt(6 / 5)
    np.testing.assert_allclose(kernel, limit * (2 * words - 1), atol=1e-6)
    np.testing.assert_allclose(kernel.ravel()[:2], [-0.08642268, -0.9271798], atol=1e-6)


@pytest.mark.once
def test_an_unseeded_process_keeps_one_stream():
    a, b = (initializers.generator("x", None).random() for _ in range(2))
    assert a == b


@pytest.mark.once
@pytest.mark.parametrize(
    ("draw", "deviation"),
    [
        (initializers.normal(0.5), 0.5),
        (initializers.truncated_normal(0.5), 0.5 * 0.8796),
        (initializers.variance_scaling(1.0, "fan_in", "untruncated_normal"), 1 / np.sqrt(200)),
        (initializers.variance_scaling(1.0, "fan_in", "truncated_normal"), 1 / np.sqrt(200)),
        (initializers.variance_scaling(1.0, "fan_avg", "uniform"), np.sqrt(2 / 400)),
        (initializers.uniform(-1.0, 1.0), 1 / np.sqrt(3)),
    ],
)
def test_deviation(draw, deviation):
    values = draw(np.random.default_rng(0), (200, 200))
    assert values.dtype == np.float32
    assert abs(values.std() / deviation - 1) < 0.02


@pytest.mark.once
def test_truncated_normal_has_no_tails():
    values = initializers.truncated_normal(1.0)(np.random.default_rng(0), (10_000,))
    assert 1.9 < np.abs(values).max() <= 2.0


def test_variables_made_without_values_get_them_later():
    with keras_internals.without_values() as made:
        late = Dense(2, name="d")
        late.build((None, 3))
    keras.utils.set_random_seed(1234)
    drawn = Dense(2, name="d")
    drawn.build((None, 3))
    assert made == [late.kernel, late.bias]
    assert not any(keras_internals.has_value(variable) for variable in made)
    keras_internals.give_value(late.bias, keras.ops.ones(2))
    keras_internals.draw_values(made)
    np.testing.assert_array_equal(to_numpy(late.kernel), to_numpy(drawn.kernel))
    np.testing.assert_array_equal(to_numpy(late.bias), 1.0)


VIT = {"image_shape": (8, 8, 3), "patch_size": 4, "num_layers": 2, "num_heads": 2}
VIT |= {"hidden_dim": 8, "mlp_dim": 12, "dropout_rate": 0.1}


def first_weights(model):
    """Every variable that was drawn, and the state of every random stream."""
    return {v.path: to_numpy(v) for v in model.variables if to_numpy(v).std() > 0}


@pytest.mark.once
def test_models_of_one_process_are_no_copies_of_each_other():
    """Also under one name, as clones, and made again after `clear_session`."""
    made = [ViTBackbone(**VIT), ViTBackbone(**VIT), ViTBackbone(**VIT, name="other")]
    made.append(keras.models.clone_model(made[0]))
    made.append(ViTBackbone.from_config(made[0].get_config()))
    keras.utils.clear_session()
    drawn = [first_weights(model) for model in [*made, ViTBackbone(**VIT), ViTBackbone(**VIT)]]
    for path in drawn[0]:
        assert len({found[path].tobytes() for found in drawn}) == len(drawn), path


@pytest.mark.parametrize("seed", [0, 1])
def test_a_program_gives_the_same_models_again(seed):
    def program():
        keras.utils.set_random_seed(seed)
        models = [ViTBackbone(**VIT, dtype=dtype) for dtype in (None, "mixed_bfloat16")]
        return [first_weights(model) for model in models]

    for one, other in zip(program(), program(), strict=True):
        assert set(one) == set(other)
        for path, values in one.items():
            np.testing.assert_array_equal(values, other[path])


def test_the_second_model_is_golden_on_each_backend():
    keras.utils.set_random_seed(7)
    kernels = []
    for _ in range(2):
        layer = Dense(2, name="golden")
        layer.build((None, 3))
        kernels.append(to_numpy(layer.kernel).ravel()[:2])
    np.testing.assert_allclose(kernels[0], [-0.08642268, -0.9271798], atol=1e-6)
    words = initializers.generator("golden/kernel", 7, 1).random((3, 2), "float32").ravel()[:2]
    np.testing.assert_allclose(kernels[1], np.sqrt(6 / 5) * (2 * words - 1), atol=1e-6)


@pytest.mark.once
def test_new_heads_and_adapters_differ_from_model_to_model(tmp_path):
    backbone = ViTBackbone(**VIT)
    ViTImageClassifier(backbone, num_classes=2).save_to_preset(tmp_path / "task")
    heads, adapters = [], []
    for _ in range(2):
        task = ViTImageClassifier.from_preset(tmp_path / "task", num_classes=3)
        heads.append(to_numpy(task.get_layer("logits").kernel))
        task.enable_lora(2)
        adapters.append(to_numpy(task.backbone.blocks[0].attention.query_dense.adapter.a))
    assert (heads[0] != heads[1]).all()
    assert (adapters[0] != adapters[1]).all()


@pytest.mark.once
def test_the_count_is_no_part_of_the_seed():
    keras.utils.set_random_seed(5)
    assert [keras_internals.count_since_seed("x") for _ in range(3)] == [0, 1, 2]
    assert type(keras_internals.random_seed()) is int and keras_internals.random_seed() == 5
    keras.utils.set_random_seed(5)
    assert keras_internals.count_since_seed("x") == 0


@pytest.mark.nightly
@pytest.mark.once
def test_unseeded_processes_differ():
    program = (
        "import keras, kmodels; d = kmodels.layers.Dense(1, name='d'); d.build((None, 1)); "
        "print(float(d.get_weights()[0][0, 0]))"
    )
    one = run_python("-c", program).stdout
    keras.utils.clear_session()  # as in a process without a seed
    layer = Dense(1, name="d")
    layer.build((None, 1))
    assert float(one) != float(layer.get_weights()[0][0, 0])
