"""The mesh: its text, its errors, and equal losses on one and eight devices."""

import keras
import numpy as np
import pytest

from kmodels.distribution import check_batch, parse_mesh, use_mesh
from kmodels.errors import InputError
from kmodels.models import ViTBackbone, ViTImageClassifier
from kmodels.models.vit.sharding import LAYOUT
from tolerances import tolerance


@pytest.fixture(autouse=True)
def _no_mesh_left():
    yield
    if keras.backend.backend() == "jax":
        keras.distribution.set_distribution(None)


def test_parse():
    assert parse_mesh("data=4,model=2") == {"data": 4, "model": 2}
    assert parse_mesh(" model = 2 ") == {"model": 2}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("rows=2", "axis 'rows' is unknown; write data and model"),
        ("data=2,data=2", "named twice"),
        ("data=zero", "length 'zero'; give a whole number"),
        ("data=0", "length '0'"),
        ("data", "length ''"),
        ("", "the mesh is empty"),
    ],
)
def test_wrong_spec(spec, message):
    with pytest.raises(InputError, match=message):
        parse_mesh(spec)


def test_the_batch_must_divide():
    check_batch("data=4,model=2", 8)
    with pytest.raises(InputError, match="batch of 10; the nearest batches that work are 8 and 12"):
        check_batch("data=4", 10)


def test_too_few_devices_or_no_engine(backend):
    message = "needs 64 devices and there are 8" if backend == "jax" else "needs the jax backend"
    with pytest.raises(InputError, match=message):
        use_mesh("data=64", LAYOUT)


def _train(spec):
    """Losses of 20 steps, the model, and where its first MLP kernel and its slots lie."""
    if spec:
        use_mesh(spec, LAYOUT)
    keras.utils.set_random_seed(3)
    backbone = ViTBackbone(
        image_shape=(16, 16, 3),
        patch_size=8,
        num_layers=2,
        num_heads=2,
        hidden_dim=16,
        mlp_dim=32,
        dropout_rate=0.0,
    )
    model = ViTImageClassifier(backbone, 10)
    model.compile(
        keras.optimizers.AdamW(1e-2, name="adamw"),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    rng = np.random.default_rng(0)
    x = rng.normal(size=(16, 16, 16, 3)).astype("float32")
    y = rng.integers(0, 10, 16)
    history = model.fit(x, y, batch_size=16, epochs=20, shuffle=False, verbose=0)
    return history.history["loss"], model


def test_losses_do_not_depend_on_the_mesh(backend):
    if backend != "jax":
        with pytest.raises(InputError, match="needs the jax backend"):
            _train("data=8")
        return
    alone, _ = _train(None)
    assert alone[-1] < alone[0] - 0.1
    for spec in ("data=8", "data=4,model=2"):
        losses, model = _train(spec)
        np.testing.assert_allclose(losses, alone, atol=tolerance("losses"))
        _assert_spread(model, spec)


def _assert_spread(model, spec):
    """Every variable is on all eight devices, and the MLP and its slots are cut by "model"."""
    for variable in (*model.variables, *model.optimizer.variables):
        assert len(variable.value.sharding.device_set) == 8, variable.path
    cut = 2 if "model" in spec else 1
    kernels = [v for v in model.trainable_variables if v.path.endswith("mlp/up/kernel")]
    slots = [v for v in model.optimizer.variables if "mlp_up_kernel" in v.path]
    assert len(kernels) == 2 and len(slots) == 4
    for variable in (*kernels, *slots):
        rows, columns = variable.shape
        shard = variable.value.addressable_shards[0].data.shape
        assert shard == (rows, columns // cut), variable.path


def test_an_axis_that_does_not_divide_leaves_the_dimension_whole(backend):
    if backend != "jax":
        return
    use_mesh("data=2,model=4", {r".*kernel": (None, "model")})
    dense = keras.layers.Dense(6)
    dense.build((None, 8))
    assert dense.kernel.value.addressable_shards[0].data.shape == (8, 6)
