"""Derivatives, mixed precision and strategies, as users of each framework write them."""

import json

import keras
import numpy as np
import pytest

import kmodels
from python_process import run_python
from tolerances import tolerance

BACKEND = keras.backend.backend()
pytestmark = pytest.mark.each_backend


def classifier(num_classes):
    return kmodels.models.ViTImageClassifier.from_preset(
        "vit_debug", num_layers=1, num_classes=num_classes
    )


def halves():
    """Sixteen pictures, every second one brighter, and which they are."""
    labels = np.arange(16, dtype="int32") % 2
    images = np.random.default_rng(0).random((16, 16, 16, 3)) * 0.2
    return (images + labels[:, None, None, None] * 0.5).astype("float32"), labels


def test_hessian_vector_product():
    """By forward over reverse mode, against the difference of two gradients."""
    model = classifier(3)
    weights = [v.value for v in model.trainable_variables]
    states = [v.value for v in model.non_trainable_variables]
    images = np.random.default_rng(0).random((2, 16, 16, 3)).astype("float32")

    def loss(kernel):
        logits, _ = model.stateless_call([*weights[:-2], kernel, weights[-1]], states, images)
        return keras.ops.mean(keras.ops.logsumexp(logits, axis=-1))

    gradient = kmodels.transforms.jit(kmodels.transforms.grad(loss))
    kernel = keras.ops.stop_gradient(weights[-2])
    direction = keras.ops.ones_like(kernel) * keras.ops.sign(kernel)
    product = kmodels.transforms.jit(
        lambda *at: kmodels.transforms.jvp(kmodels.transforms.grad(loss), at[:1], at[1:])[1]
    )(kernel, direction)
    by_difference = (
        gradient(kernel + 0.01 * direction) - gradient(kernel - 0.01 * direction)
    ) / 0.02
    product, by_difference = (
        keras.ops.convert_to_numpy(keras.ops.stop_gradient(x)) for x in (product, by_difference)
    )
    np.testing.assert_allclose(product, by_difference, atol=1e-3 * np.abs(product).max())


if BACKEND == "torch":
    import torch

    class Classifier(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = kmodels.models.ViTBackbone.from_preset("vit_debug", num_layers=1)
            self.head = torch.nn.Linear(self.backbone.output_shape[-1], 2)

        def forward(self, images, training=False):
            return self.head(self.backbone(images, training=training).mean(1))

    @pytest.mark.parametrize("inside", [False, True], ids=["autocast", "inside an nn.Module"])
    def test_a_training_loop_of_torch(inside):
        model = Classifier() if inside else classifier(2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        images, labels = halves()
        images, labels = torch.from_numpy(images), torch.from_numpy(labels).long()
        for _ in range(25):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not inside):
                loss = torch.nn.functional.cross_entropy(model(images, training=True), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert (model(images).argmax(-1) == labels).all()


if BACKEND == "jax":
    import jax

    def test_jax_grad_over_stateless_call():
        model = classifier(2)
        images, labels = halves()
        states = [v.value for v in model.non_trainable_variables]

        @jax.jit
        def step(weights):
            def loss(weights):
                logits, _ = model.stateless_call(weights, states, images, training=True)
                return -jax.nn.log_softmax(logits)[np.arange(16), labels].mean()

            gradients = jax.grad(loss)(weights)
            return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)

        weights = [v.value for v in model.trainable_variables]
        for _ in range(60):
            weights = step(weights)
        logits, _ = jax.jit(model.stateless_call)(weights, states, images)
        assert (logits.argmax(-1) == labels).all()


if BACKEND == "tensorflow":
    import tensorflow as tf

    def test_a_gradient_tape_in_a_tf_function():
        model = classifier(2)
        optimizer = keras.optimizers.Adam(3e-3)
        images, labels = map(tf.constant, halves())

        @tf.function
        def step():
            with tf.GradientTape() as tape:
                logits = model(images, training=True)
                loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
                loss = tf.reduce_mean(loss)
            weights = model.trainable_variables
            optimizer.apply(tape.gradient(loss, [w.value for w in weights]), weights)

        for _ in range(25):
            step()
        found = tf.argmax(model(images), -1, output_type=tf.int32)
        assert bool(tf.reduce_all(found == labels))

    STRATEGIES = (
        tf.distribute.get_strategy,
        lambda: tf.distribute.OneDeviceStrategy("CPU:0"),
        lambda: tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]),
    )

    @pytest.mark.filterwarnings("ignore::UserWarning")  # of collectives between CPUs
    def test_fit_under_the_users_own_strategy() -> None:
        images = np.random.default_rng(0).normal(size=(32, 16, 16, 3)).astype("float32")
        labels = (images.mean(axis=(1, 2, 3)) > 0).astype("int32")
        losses = []
        for strategy in STRATEGIES:
            keras.utils.set_random_seed(0)
            with strategy().scope():
                model = classifier(2)
                model.compile(
                    optimizer=keras.optimizers.SGD(0.1),
                    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                )
            history = model.fit(images, labels, batch_size=8, epochs=2, shuffle=False, verbose=0)
            losses.append(history.history["loss"])
        for found in losses[1:]:
            np.testing.assert_allclose(found, losses[0], rtol=tolerance("losses_of_ranks"))


# Flax' modules can hold such variables; they have a metaclass.
NNX = """
import keras
import numpy as np
from kmodels import models

keras.utils.set_random_seed(0)
assert (type(keras.layers.Layer) is not type) == {nnx}
lm = models.Gemma3CausalLM.from_preset("gemma3_debug", num_layers=1, preprocessor=None)
lm.backbone.enable_lora(2)
ids = np.arange(20).reshape(2, 10)
print(lm.fit(ids[:, :-1], ids[:, 1:], epochs=2, verbose=0).history["loss"])
model = models.ViTImageClassifier.from_preset("vit_debug", num_layers=1, num_classes=2)
images = np.linspace(0, 1, 4 * 16 * 16 * 3, dtype="float32").reshape(4, 16, 16, 3)
print(model.fit(images, np.arange(4) % 2, verbose=0).history["loss"])
model.save("model.keras")
print(keras.saving.load_model("model.keras").predict(images, verbose=0).tolist())
"""


@pytest.mark.across("jax")
def test_variables_of_nnx(tmp_path):
    printed = []
    for nnx in (True, False):
        done = run_python(
            "-c", NNX.format(nnx=nnx), cwd=tmp_path, KERAS_NNX_ENABLED=str(nnx).lower()
        )
        assert not done.returncode, done.stderr[-3000:]
        printed.append([json.loads(line) for line in done.stdout.splitlines()])
    for ours, wanted in zip(*printed, strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=0, atol=tolerance("logits"))
