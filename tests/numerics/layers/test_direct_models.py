"""Calls of whole models without Keras: equal to the bit, and only where Keras would add nothing."""

import keras
import numpy as np
import pytest

from kmodels import generic_only, layers, models
from kmodels.core import dispatch, keras_internals
from kmodels.layers.direct_calls import through_keras

if keras.backend.backend() != "torch":
    pytest.skip("only torch has Python around layers in its steps", allow_module_level=True)

import torch

rng = np.random.default_rng(0)
IMAGES = torch.from_numpy(rng.normal(size=(2, 32, 32, 3)).astype("float32"))
TOKENS = torch.from_numpy(rng.integers(3, 60, (2, 9)).astype("int32"))
MASK = torch.tensor([[1] * 9, [0] * 3 + [1] * 6])
PAIRS = {"token_ids": TOKENS, "padding_mask": MASK}
SIZES = {"num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32, "patch_size": 8}


def vit(dtype="float32", **settings):
    keras.utils.set_random_seed(1)
    backbone = models.ViTBackbone(image_shape=(32, 32, 3), dtype=dtype, **SIZES, **settings)
    return models.ViTImageClassifier(backbone, 5)


def gemma(dtype="float32"):
    keras.utils.set_random_seed(1)
    settings = {"dtype": dtype, "vocabulary_size": 64}
    return models.GemmaCausalLM(models.GemmaBackbone.from_preset("gemma3_debug", **settings))


@pytest.fixture
def keras_calls(monkeypatch):
    """The names of the layers that Keras calls."""
    called = []
    call = keras.layers.Layer.__call__

    def counted(layer, *args, **kwargs):
        called.append(layer.name)
        return call(layer, *args, **kwargs)

    monkeypatch.setattr(keras.layers.Layer, "__call__", counted)
    return called


def both(model, *args, **kwargs):
    """The output of a call, and that of the same call through Keras."""
    with torch.no_grad():
        direct = model(*args, **kwargs)
        with through_keras():
            return direct, model(*args, **kwargs)


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16", "bfloat16"])
@pytest.mark.parametrize("training", [True, False, None])
@pytest.mark.parametrize(
    ("make", "inputs"), [(vit, IMAGES), (gemma, PAIRS), (gemma, {"token_ids": TOKENS})]
)
def test_a_model_gives_the_same_bits(make, inputs, training, dtype, keras_calls):
    model = make(dtype)
    keras_calls.clear()
    with torch.no_grad():
        direct = model(inputs, training=training)
    assert len(keras_calls) <= 3  # the head has a policy of its own in mixed precision
    with through_keras(), torch.no_grad():
        assert torch.equal(direct, model(inputs, training=training))
    assert model.name in keras_calls


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (vit, IMAGES.numpy()),
        (vit, IMAGES.double()),
        (vit, (IMAGES * 10).int()),
        (gemma, TOKENS),
        (gemma, TOKENS[..., None]),
        (gemma, {**PAIRS, "token_ids": TOKENS.numpy()}),
        (gemma, {**PAIRS, "positions": torch.arange(9)}),
        (gemma, {**PAIRS, "padding_mask": MASK.bool()}),
    ],
)
def test_inputs_of_other_kinds(make, inputs):
    direct, whole = both(make("mixed_bfloat16"), inputs)
    assert torch.equal(direct, whole)


@pytest.mark.parametrize("inputs", [IMAGES[0], IMAGES[:, :16], {"images": IMAGES}])
def test_inputs_that_do_not_fit_end_as_in_keras(inputs):
    model = vit()
    with through_keras(), pytest.raises(Exception) as wanted:
        model(inputs)
    with pytest.raises(type(wanted.value)) as found:
        model(inputs)
    assert str(found.value) == str(wanted.value)


def test_hooks_and_compiled_parts_are_called():
    model, seen = vit(), []
    before = model(IMAGES)
    for module in (model, model.backbone, model.backbone.blocks[1].attention.query_dense):
        handle = module.register_forward_hook(lambda layer, args, y: seen.append(layer.name))
        model(IMAGES)
        assert seen.pop() == module.name
        handle.remove()
    assert torch.equal(model(IMAGES), before) and not seen

    def compiler(graph, examples):
        seen.append(len(examples))
        return graph.forward

    model.backbone.blocks[0].mlp.compile(backend=compiler)
    with torch.no_grad():
        torch.testing.assert_close(model(IMAGES), before)
    assert len(seen) == 1


def test_losses_of_the_last_call_go():
    model = vit()
    dense = model.backbone.blocks[0].attention.query_dense
    dense.activity_regularizer = keras.regularizers.L2(0.1)
    for _ in range(2):
        model(IMAGES)
        assert len(model.losses) == 1
    dense.activity_regularizer = None
    model(IMAGES)
    assert not model.losses

    class Added(layers.Dense):
        def call(self, x, training=False):
            self.add_loss(keras.ops.sum(x))
            return super().call(x)

    own = Added(16, name="output")
    own.build((None, 16))
    with keras_internals.changing(model.backbone.blocks[0].attention):
        model.backbone.blocks[0].attention.output_dense = own
    for _ in range(2):
        model(IMAGES)
        assert len(model.losses) == 1


def test_inside_a_model_of_the_users():
    backbone = vit(dropout_rate=0.5).backbone
    inputs = keras.Input((32, 32, 3))
    model = keras.Model(inputs, keras.layers.Dense(3)(backbone(inputs)[:, 0]))
    keras.utils.set_random_seed(2)
    direct = [model(IMAGES, training=t) for t in (True, False, None)]
    again = vit(dropout_rate=0.5).backbone
    other = keras.models.clone_model(model, call_function=lambda layer, *a, **k: layer(*a, **k))
    other.set_weights(model.get_weights())
    assert not torch.equal(direct[0], direct[1]) and torch.equal(direct[1], direct[2])
    with through_keras():
        assert torch.equal(other(IMAGES, training=False), direct[1])
    assert again.built


def test_a_change_between_calls_is_seen():
    model = vit()
    before = model(IMAGES)
    model.backbone.call = lambda x, **_: torch.zeros(2, 17, 16)
    assert not torch.equal(model(IMAGES), before)
    del model.backbone.call
    assert torch.equal(model(IMAGES), before)
    dispatch.reset_decisions()
    with generic_only("attention"):
        model(IMAGES)
    assert dispatch.decisions()["attention"]["override"] == 0
    assert dispatch.decisions()["dense"]["override"] > 0
    model.enable_lora(2)
    for variable in model.trainable_variables:
        if "lora_b" in variable.path:
            variable.assign(keras.ops.ones(variable.shape))
    direct, whole = both(model, IMAGES)
    assert torch.equal(direct, whole) and not torch.equal(direct, before)
