"""Rows cut by their tokens over eight devices: the losses and gradients of one device."""

import re

import keras
import numpy as np
import pytest
import small_models

from kmodels import models
from kmodels.core.errors import InputError
from kmodels.distribution import distribute
from kmodels.training import AdamW
from tolerances import tolerance

if keras.backend.backend() != "jax":
    pytest.skip("needs JAX", allow_module_level=True)

import jax

BATCH, TOKENS, STEPS, WORDS = 2, 128, 4, 64
rng = np.random.default_rng(0)
IDS = rng.integers(3, WORDS, (STEPS * BATCH, TOKENS + 1)).astype("int32")
SEGMENTS = np.sort(rng.integers(0, 3, (STEPS * BATCH, TOKENS)), 1).astype("int32")
POSITIONS = np.arange(TOKENS) - np.stack([np.searchsorted(row, row) for row in SEGMENTS])
WEIGHTS = (rng.random(SEGMENTS.shape) < 0.8).astype("float32")
MASK = np.ones(SEGMENTS.shape, "int32")
PACKED = {"token_ids": IDS[:, :-1], "segment_ids": SEGMENTS, "positions": POSITIONS.astype("int32")}
MASK[:, :9] = 0  # in front, where the tokens of a row change their devices
PADDED = {"token_ids": IDS[:, :-1], "padding_mask": MASK}
SIZES = {"num_layers": 2, "num_query_heads": 4, "num_key_value_heads": 2}
SIZES |= {"head_dim": 8, "intermediate_dim": 48}
WINDOWS = {"sliding_window_size": 24, "use_sliding_window_attention": True}


def compiled(mesh, rank=None, **variants):
    plan = distribute(mesh)
    keras.utils.set_random_seed(3)
    model = small_models.gemma(vocabulary_size=WORDS, **{**SIZES, **variants})
    if rank is not None:
        model.enable_lora(rank)
    if plan is not None:
        model = plan.prepare(model)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    rate = 3e-3 if rank is None else 0.1  # adapters begin at zero
    model.compile(AdamW(rate, clip_norm=1.0), loss)
    return model


def train(mesh, inputs, **variants):
    """The loss of each step, and logits after the last one."""
    model, losses = compiled(mesh, **variants), []
    each = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda _, logs: losses.append(float(logs["loss"]))
    )
    settings = {"batch_size": BATCH, "shuffle": False, "verbose": 0, "callbacks": [each]}
    model.fit(inputs, IDS[:, 1:], sample_weight=WEIGHTS, **settings)
    first = {name: x[:BATCH] for name, x in inputs.items()}
    return np.array(losses), model.predict(first, batch_size=BATCH, verbose=0)


CASES = {
    # Dropout in attention draws otherwise where heads are cut, as they are on the last mesh.
    "packed, with windows and dropout": (
        PACKED,
        {"dropout": 0.1, **WINDOWS},
        ("fsdp=2,sequence=4",),
    ),
    "padded, with adapters": (
        PADDED,
        {"rank": 4, "num_layers": 1},
        ("sequence=8", "data=2,sequence=2,model=2"),
    ),
}


@pytest.mark.each_time("packed, with windows and dropout")
@pytest.mark.parametrize("case", CASES)
def test_losses_do_not_depend_on_the_mesh(case):
    inputs, variants, meshes = CASES[case]
    alone, logits = train(None, inputs, **variants)
    assert len(alone) == STEPS and alone[-1] < alone[0]
    seen = inputs.get("padding_mask", np.ones((BATCH, TOKENS)))[:BATCH] != 0
    for mesh in meshes:
        losses, found = train(mesh, inputs, **variants)
        atol = tolerance("losses_of_ranks")
        np.testing.assert_allclose(losses, alone, rtol=0, atol=atol, err_msg=mesh)
        np.testing.assert_allclose(found[seen], logits[seen], rtol=0, atol=tolerance("logits"))


def gradients(mesh):
    """Gradients of the first step, and the compiled program that computes them."""
    model = compiled(mesh, **WINDOWS)
    inputs = {name: x[:BATCH] for name, x in PACKED.items()}
    batch = inputs, IDS[:BATCH, 1:], WEIGHTS[:BATCH]
    distribution = keras.distribution.distribution()
    if distribution is not None:

        def place(x):
            return jax.device_put(x, distribution.get_data_layout(x.shape).backend_layout)

        batch = jax.tree.map(place, batch)
    frozen = [variable.value for variable in model.non_trainable_variables]

    def loss(weights, inputs, labels, counts):
        with model.head.inside_step():
            hidden, _ = model.stateless_call(weights, frozen, inputs, training=True)
            table = model.backbone.token_embedding
            pairs = zip(model.trainable_variables, weights, strict=True)
            with keras.StatelessScope(state_mapping=list(pairs)):
                return model.head.loss(hidden, table, labels, counts, keras.ops.sum(counts))

    weights = [variable.value for variable in model.trainable_variables]
    made = jax.jit(jax.grad(loss)).lower(weights, *batch).compile()
    return [*map(np.asarray, made(weights, *batch))], made.as_text() or ""


def test_gradients_are_those_of_one_device_and_tokens_stay_on_theirs():
    """No float array of a device has the tokens of another; keys and values are passed on."""
    alone, _ = gradients(None)
    assert len(alone) > 10
    cut, program = gradients("data=2,sequence=4")
    for wanted, got in zip(alone, cut, strict=True):
        assert np.abs(wanted).max() > 1e-6
        np.testing.assert_allclose(got, wanted, rtol=0, atol=tolerance("losses_of_ranks"))
    shapes = [shape.split(",") for shape in re.findall(r"f32\[([\d,]+)\]", program)]
    assert not [shape for shape in shapes if {str(TOKENS), str(BATCH * TOKENS)} & {*shape}]
    assert " collective-permute" in program
    assert not re.findall(r"= f32\S* all-(?:gather|to-all)\(", program)


def test_what_cannot_be_cut_is_said(caplog):
    plan = distribute("data=2,sequence=4")
    with pytest.raises(InputError, match=r"takes no token ids .* leave sequence out"):
        plan.prepare(models.ViTImageClassifier.from_preset("vit_debug", num_classes=3))
    model = compiled("data=2,sequence=4", num_layers=1)
    wanted = model.predict(IDS[:2, :9], batch_size=2, verbose=0)
    assert "mesh axis sequence=4 leaves rows of a batch whole: it does not divide 9" in caplog.text
    distribute(None)
    alone = compiled(None, num_layers=1).predict(IDS[:2, :9], batch_size=2, verbose=0)
    np.testing.assert_allclose(wanted, alone, rtol=0, atol=tolerance("logits"))
