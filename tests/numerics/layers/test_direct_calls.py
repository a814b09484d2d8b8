"""Calls without Keras of layers and models: bit-equal, and only where Keras would add nothing."""

import keras
import numpy as np
import pytest

from kmodels import generic_only, layers, models
from kmodels.core import dispatch, keras_internals
from kmodels.layers import remat
from kmodels.layers.direct_calls import declines, through_keras

if keras.backend.backend() != "torch":
    pytest.skip("only torch has Python around layers in its steps", allow_module_level=True)

import torch

rng = np.random.default_rng(0)
IMAGES = rng.normal(size=(2, 32, 32, 3)).astype("float32")
TOKENS = rng.integers(3, 60, (2, 9)).astype("int32")
DROPOUT = {"dropout_rate": 0.3, "attention_dropout": 0.3, "drop_path_rate": 0.3}


def vit(dtype="float32", **settings):
    keras.utils.set_random_seed(1)
    sizes = {"num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32, "patch_size": 8}
    return models.ViTBackbone(image_shape=(32, 32, 3), dtype=dtype, **sizes, **settings)


def gemma(dtype="float32", preset="gemma3_debug"):
    keras.utils.set_random_seed(1)
    return models.GemmaBackbone.from_preset(preset, dtype=dtype, vocabulary_size=64)


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


def step(model, x, training=True):
    """The output and the gradients of a step, after one that moves the random streams on."""
    for _ in range(2):
        model.zero_grad()
        y = model(x, training=training)
        (y.float() * torch.linspace(-1, 1, y.numel()).reshape(y.shape)).sum().backward()
    found = [y, *(v.value.grad for v in model.trainable_variables)]
    return [x.detach().float().numpy() for x in found if x is not None]


@pytest.mark.each_time(
    "gemma2-True-bfloat16",
    "gemma4-False-float32",
    "gemma4-True-mixed_bfloat16",
    "gemma-True-mixed_bfloat16",
    "qwen3-False-bfloat16",
    "vit-True-mixed_bfloat16",
    "vit-False-float32",
    "clip-True-bfloat16",
    "gemma2-False-mixed_bfloat16",
    "qwen3-True-float32",
    "clip-False-mixed_bfloat16",
)
@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16", "bfloat16"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("family", ["vit", "gemma", "gemma2", "gemma4", "qwen3", "clip"])
def test_a_step_is_equal_to_the_bit(family, training, dtype, keras_calls):
    def make():
        keras.utils.set_random_seed(1)
        if family == "vit":
            return vit(dtype, **DROPOUT, layer_scale=0.1, qk_norm=True)
        if family == "qwen3":
            return models.Qwen3Backbone.from_preset("qwen3_debug", dtype=dtype, vocabulary_size=64)
        if family == "clip":
            return models.CLIPTextEncoder.from_preset("clip_text_debug", dtype=dtype)
        return gemma(dtype, "gemma3_debug" if family == "gemma" else f"{family}_debug")

    x = IMAGES if family == "vit" else TOKENS
    model = make()
    keras_calls.clear()
    direct = step(model, x, training)
    few = len(keras_calls)
    model = make()
    keras_calls.clear()
    with through_keras():
        whole = step(model, x, training)
    assert few < len(keras_calls) / 3
    assert len(direct) == len(whole) > 5
    for ours, theirs in zip(direct, whole, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def why(layer, *args, inside=True, **kwargs):
    """Why Keras has to call a layer, asked where another layer is being called."""
    found = []

    class Around(keras.layers.Layer):
        def call(self, x):
            found.append(declines(layer, args, kwargs))
            return x

    if not inside:
        return declines(layer, args, kwargs)
    Around(dtype="float32")(torch.zeros(1, 4))
    return found[0]


def dense(**settings):
    layer = layers.Dense(4, **settings)
    layer.build((None, 4))
    return layer


X = torch.ones(1, 4)


def masked():
    x = torch.ones(1, 4)
    x._keras_mask = torch.ones(1, dtype=torch.bool)
    return x


@pytest.mark.parametrize(
    ("reason", "ask"),
    [
        (None, lambda: why(dense(), X)),
        (None, lambda: why(dense(), X, training=True)),
        ("no layer of Keras is calling it", lambda: why(dense(), X, inside=False)),
        ("Keras builds it", lambda: why(layers.Dense(4), X)),
        ("it has an activity regularizer", lambda: why(dense(activity_regularizer="l2"), X)),
        (None, lambda: why(dense(autocast=False), X.bfloat16())),
        ("Keras casts its variables", lambda: why(dense(dtype="mixed_bfloat16"), X.bfloat16())),
        ("Keras casts its arguments", lambda: why(dense(dtype="bfloat16"), X)),
        ("Keras casts its arguments", lambda: why(dense(), X.bfloat16())),
        ("Keras casts its arguments", lambda: why(dense(), X, other=X.double())),
        ("Keras converts its arguments", lambda: why(dense(), X.numpy())),
        ("Keras converts its arguments", lambda: why(dense(), X, True)),
        ("Keras converts its arguments", lambda: why(dense(), X, masks=[X])),
        ("Keras converts its arguments", lambda: why(dense(), keras.KerasTensor((1, 4)))),
        ("Keras infers shapes", lambda: why(dense(), X.to("meta"))),
        ("Keras hands on a mask", lambda: why(dense(), masked())),
        ("Keras hands on a mask", lambda: why(dense(), X, mask=X > 0)),
    ],
)
def test_what_needs_keras_is_told(reason, ask):
    found = ask()
    assert found is None if reason is None else reason in (found or "")


def test_hooks_of_a_part_are_called():
    model, seen = vit(), []
    part = model.blocks[1].mlp
    handle = part.register_forward_hook(lambda layer, args, y: seen.append(layer.name) or y * 2)
    hooked = model(IMAGES)
    assert seen == ["mlp"]
    handle.remove()
    assert why(part, X) != "it has hooks"
    plain = model(IMAGES)
    assert not torch.equal(hooked, plain) and seen == ["mlp"]


def test_hooks_of_all_modules_are_called():
    model, seen = vit(), []
    hook = lambda layer, args, y: seen.append(layer.name)  # noqa: E731
    handle = torch.nn.modules.module.register_module_forward_hook(hook)
    model(IMAGES)
    handle.remove()
    assert {"attention", "query", "mlp", "final_norm"} <= set(seen)


def test_a_part_that_is_replaced_is_called_by_keras():
    model = vit()

    class Doubled(keras.layers.Layer):
        told = None

        def call(self, x, training=None):
            type(self).told = training
            return x * 2

    before = model(IMAGES, training=True)
    with keras_internals.changing(model.blocks[0]):
        model.blocks[0].mlp = Doubled(name="mlp")
    assert not torch.equal(before, model(IMAGES, training=True))
    assert Doubled.told is True
    model(IMAGES)
    assert not Doubled.told


def test_parts_are_kept_at_hand_until_they_are_replaced_or_deleted():
    part, other = layers.Dense(3), layers.Dense(3)
    layer = layers.Layer()
    layer.part = part
    assert vars(layer)["part"] is part and list(layer.children()) == [part]
    layer.part = other
    assert layer.part is other and list(layer.children()) == [other]
    layer.part = None
    assert layer.part is None and "part" not in vars(layer)
    layer.part = part
    del layer.part
    assert not hasattr(layer, "part")


def test_a_call_that_is_replaced_is_called():
    model = vit()
    before = model(IMAGES)
    norm = model.blocks[0].mlp_norm
    norm.call = lambda x: x * 0
    changed = model(IMAGES)
    assert not torch.equal(changed, before)
    with through_keras():
        assert torch.equal(model(IMAGES), changed)


def test_a_subclass_with_a_call_of_its_own_is_served():
    class Own(layers.Dense):
        calls = 0

        def __call__(self, *args, **kwargs):
            type(self).calls += 1
            return super().__call__(*args, **kwargs)

    model = vit()
    own = Own(16, name="output")
    own.build((None, 16))
    with keras_internals.changing(model.blocks[0].attention):
        model.blocks[0].attention.output_dense = own
    model(IMAGES)
    assert Own.calls == 1


def test_activity_regularizers_of_parts_count():
    model = vit()
    model.blocks[0].attention.query_dense.activity_regularizer = keras.regularizers.L2(0.1)
    model(IMAGES)
    assert len(model.losses) == 1 and float(model.losses[0].detach()) > 0


def test_masks_go_on_through_a_keras_model():
    inputs = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(64, 16, mask_zero=True)(inputs)
    block = layers.Attention(2, name="attention")
    model = keras.Model(inputs, block(x))
    short = np.array([[5, 6, 7, 0, 0]], "int32")
    with through_keras():
        wanted = model(short)
    np.testing.assert_array_equal(model(short).detach(), wanted.detach())
    other = np.array([[5, 6, 7, 8, 9]], "int32")
    assert not torch.allclose(model(other)[:, :3], wanted[:, :3])


@pytest.mark.parametrize("change", ["lora", "quantize", "block", "attention"])
def test_adapters_quantized_kernels_and_rematerialized_parts(change):
    def make():
        model = vit(**DROPOUT)
        if change == "lora":
            model.enable_lora(2, dropout=0.3)
            for variable in model.trainable_variables:
                if "lora_b" in variable.path:
                    variable.assign(keras.ops.ones(variable.shape))
        elif change == "quantize":
            model.quantize("int8")
            model.enable_lora(2)
        else:
            remat.rematerialize(model, change)
        return step(model, IMAGES)

    direct = make()
    with through_keras():
        whole = make()
    for ours, theirs in zip(direct, whole, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_layers_called_alone_go_through_keras(keras_calls):
    layer = dense()
    layer(np.ones((1, 4)))
    assert keras_calls == [layer.name]


def test_the_environment_turns_it_off(monkeypatch):
    from kmodels.layers import direct_calls

    monkeypatch.setattr(direct_calls, "_off", True)
    assert why(dense(), X) == "turned off by KMODELS_DIRECT_CALLS=0"


# === Whole models ===

PIXELS, IDS = torch.from_numpy(IMAGES), torch.from_numpy(TOKENS)
MASK = torch.tensor([[1] * 9, [0] * 3 + [1] * 6])
PAIRS = {"token_ids": IDS, "padding_mask": MASK}


def classifier(dtype="float32"):
    return models.ViTImageClassifier(vit(dtype), 5)


def lm(dtype="float32"):
    return models.GemmaCausalLM(gemma(dtype))


def both(model, *args, **kwargs):
    """The output of a call, and that of the same call through Keras."""
    with torch.no_grad():
        direct = model(*args, **kwargs)
        with through_keras():
            return direct, model(*args, **kwargs)


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16", "bfloat16"])
@pytest.mark.parametrize("training", [True, False, None])
@pytest.mark.parametrize(
    ("make", "inputs"), [(classifier, PIXELS), (lm, PAIRS), (lm, {"token_ids": IDS})]
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
        (classifier, IMAGES),
        (classifier, PIXELS.double()),
        (classifier, (PIXELS * 10).int()),
        (lm, IDS),
        (lm, IDS[..., None]),
        (lm, {**PAIRS, "token_ids": TOKENS}),
        (lm, {**PAIRS, "positions": torch.arange(9)}),
        (lm, {**PAIRS, "padding_mask": MASK.bool()}),
    ],
)
def test_inputs_of_other_kinds(make, inputs):
    direct, whole = both(make("mixed_bfloat16"), inputs)
    assert torch.equal(direct, whole)


@pytest.mark.parametrize("inputs", [PIXELS[0], PIXELS[:, :16], {"images": PIXELS}])
def test_inputs_that_do_not_fit_end_as_in_keras(inputs):
    model = classifier()
    with through_keras(), pytest.raises(Exception) as wanted:
        model(inputs)
    with pytest.raises(type(wanted.value)) as found:
        model(inputs)
    assert str(found.value) == str(wanted.value)


def test_hooks_and_compiled_parts_are_called():
    model, seen = classifier(), []
    before = model(PIXELS)
    for module in (model, model.backbone, model.backbone.blocks[1].attention.query_dense):
        handle = module.register_forward_hook(lambda layer, args, y: seen.append(layer.name))
        model(PIXELS)
        assert seen.pop() == module.name
        handle.remove()
    assert torch.equal(model(PIXELS), before) and not seen

    def compiler(graph, examples):
        seen.append(len(examples))
        return graph.forward

    model.backbone.blocks[0].mlp.compile(backend=compiler)
    with torch.no_grad():
        torch.testing.assert_close(model(PIXELS), before)
    assert len(seen) == 1


def test_losses_of_the_last_call_go():
    model = classifier()
    dense = model.backbone.blocks[0].attention.query_dense
    dense.activity_regularizer = keras.regularizers.L2(0.1)
    for _ in range(2):
        model(PIXELS)
        assert len(model.losses) == 1
    dense.activity_regularizer = None
    model(PIXELS)
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
        model(PIXELS)
        assert len(model.losses) == 1


def test_inside_a_model_of_the_users():
    backbone = vit(dropout_rate=0.5)
    inputs = keras.Input((32, 32, 3))
    model = keras.Model(inputs, keras.layers.Dense(3)(backbone(inputs)[:, 0]))
    keras.utils.set_random_seed(2)
    direct = [model(PIXELS, training=t) for t in (True, False, None)]
    again = vit(dropout_rate=0.5)
    other = keras.models.clone_model(model, call_function=lambda layer, *a, **k: layer(*a, **k))
    other.set_weights(model.get_weights())
    assert not torch.equal(direct[0], direct[1]) and torch.equal(direct[1], direct[2])
    with through_keras():
        assert torch.equal(other(PIXELS, training=False), direct[1])
    assert again.built


def test_a_change_between_calls_is_seen():
    model = classifier()
    before = model(PIXELS)
    model.backbone.call = lambda x, **_: torch.zeros(2, 17, 16)
    assert not torch.equal(model(PIXELS), before)
    del model.backbone.call
    assert torch.equal(model(PIXELS), before)
    dispatch.reset_decisions()
    with generic_only("attention"):
        model(PIXELS)
    assert dispatch.decisions()["attention"]["override"] == 0
    assert dispatch.decisions()["dense"]["override"] > 0
    model.enable_lora(2)
    for variable in model.trainable_variables:
        if "lora_b" in variable.path:
            variable.assign(keras.ops.ones(variable.shape))
    direct, whole = both(model, PIXELS)
    assert torch.equal(direct, whole) and not torch.equal(direct, before)
