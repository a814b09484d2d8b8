"""Derivatives, mixed precision and tracing, as users of each framework write them."""

import keras
import numpy as np

import kmodels

BACKEND = keras.backend.backend()


def test_hessian_vector_product():
    """By forward over reverse mode, against the difference of two gradients."""
    model = kmodels.models.ViTImageClassifier.from_preset("vit_debug", num_layers=1, num_classes=3)
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


def test_gradients_of_each_example():
    """Their mean is the gradient of the batch."""
    backbone = kmodels.models.ViTBackbone.from_preset("vit_debug", num_layers=1)
    weights = [v.value for v in backbone.trainable_variables]
    states = [v.value for v in backbone.non_trainable_variables]
    images = np.random.default_rng(1).random((4, 16, 16, 3)).astype("float32")

    def loss(bias, batch):
        features, _ = backbone.stateless_call([*weights[:-1], bias], states, batch)
        return keras.ops.mean(keras.ops.square(features))

    bias = keras.ops.stop_gradient(weights[-1])
    gradient = kmodels.transforms.grad(loss)
    of_each = kmodels.transforms.vmap(gradient, in_axes=(None, 0))
    each = kmodels.transforms.jit(of_each)(bias, images[:, None])
    assert each.shape == (4, *bias.shape)
    whole = keras.ops.convert_to_numpy(
        keras.ops.stop_gradient(kmodels.transforms.jit(gradient)(bias, images))
    )
    each = keras.ops.convert_to_numpy(keras.ops.stop_gradient(each))
    np.testing.assert_allclose(each.mean(0), whole, atol=1e-5 * np.abs(whole).max())


if BACKEND == "torch":
    import torch

    def test_gradient_penalty():
        """A critic is trained until its gradients by its input have the length 1."""
        critic = kmodels.models.ViTImageClassifier.from_preset(
            "vit_debug", num_layers=1, num_classes=1
        )
        optimizer = torch.optim.Adam(critic.parameters(), lr=3e-3)
        images = torch.rand(4, 16, 16, 3, requires_grad=True)
        penalties = []
        for _ in range(25):
            scores = critic(images).sum()
            (slope,) = torch.autograd.grad(scores, images, create_graph=True)
            penalty = ((slope.flatten(1).norm(dim=1) - 1) ** 2).mean()
            optimizer.zero_grad()
            penalty.backward()
            optimizer.step()
            penalties.append(float(penalty.detach()))
        assert penalties[-1] < 0.1 * penalties[0]

    def test_autocast_training_loop():
        model = kmodels.models.ViTImageClassifier.from_preset(
            "vit_debug", num_layers=1, num_classes=2
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        labels = torch.arange(16) % 2
        images = torch.rand(16, 16, 16, 3) * 0.2 + labels.view(-1, 1, 1, 1) * 0.5
        for _ in range(25):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = torch.nn.functional.cross_entropy(model(images, training=True), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert (model(images).argmax(-1) == labels).all()

    def test_a_model_inside_an_nn_module():
        backbone = kmodels.models.ViTBackbone.from_preset("vit_debug", num_layers=1)

        class Classifier(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.backbone = backbone
                self.head = torch.nn.Linear(backbone.output_shape[-1], 2)

            def forward(self, images):
                return self.head(self.backbone(images).mean(1))

        model = Classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        labels = torch.arange(16) % 2
        images = torch.rand(16, 16, 16, 3) * 0.2 + labels.view(-1, 1, 1, 1) * 0.5
        for _ in range(30):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert (model(images).argmax(-1) == labels).all()

    def test_torch_export_of_a_vit(tmp_path):
        model = kmodels.models.ViTImageClassifier.from_preset(
            "vit_debug", num_layers=1, num_classes=3
        )
        images = torch.rand(2, 16, 16, 3)
        program = torch.export.export(model, (images,))
        torch.export.save(program, tmp_path / "vit.pt2")
        again = torch.export.load(tmp_path / "vit.pt2").module()
        torch.testing.assert_close(again(images), model(images))


if BACKEND == "jax":
    import jax

    def test_jax_grad_over_stateless_call():
        model = kmodels.models.ViTImageClassifier.from_preset(
            "vit_debug", num_layers=1, num_classes=2
        )
        labels = np.arange(16) % 2
        images = np.random.default_rng(0).random((16, 16, 16, 3)) * 0.2
        images = (images + labels[:, None, None, None] * 0.5).astype("float32")
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

    def test_jax_hessian_vector_product():
        """As JAX's documentation has it: a jvp of a gradient."""
        model = kmodels.models.ViTImageClassifier.from_preset(
            "vit_debug", num_layers=1, num_classes=2
        )
        images = np.random.default_rng(0).random((2, 16, 16, 3)).astype("float32")

        def loss(images):
            return (model(images) ** 2).sum()

        @jax.jit
        def product(vector):
            return jax.jvp(jax.grad(loss), (images,), (vector,))[1]

        vectors = np.random.default_rng(1).normal(size=(2, *images.shape)).astype("float32")
        products = [product(vector) for vector in vectors]
        # A Hessian is symmetric.
        first, second = (float((products[i] * vectors[1 - i]).sum()) for i in (0, 1))
        assert abs(first - second) < 1e-4 * max(abs(first), 1)

    def test_jax_export():
        model = kmodels.models.GemmaBackbone.from_preset("gemma_debug")
        inputs = {"token_ids": np.ones((2, 6), "int32"), "padding_mask": np.ones((2, 6), "int32")}
        exported = jax.export.export(jax.jit(lambda x: model(x)))(inputs)
        wanted = model.predict(inputs, verbose=0)
        np.testing.assert_allclose(exported.call(inputs), wanted, atol=1e-5)


if BACKEND == "tensorflow":
    import tensorflow as tf

    def test_a_gradient_tape_in_a_tf_function():
        model = kmodels.models.ViTImageClassifier.from_preset(
            "vit_debug", num_layers=1, num_classes=2
        )
        optimizer = keras.optimizers.Adam(3e-3)
        labels = tf.range(16) % 2
        images = tf.random.uniform((16, 16, 16, 3)) * 0.2
        images += tf.cast(labels, tf.float32)[:, None, None, None] * 0.5

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

    def test_gradient_penalty_by_two_tapes():
        """Against the difference of two gradients."""
        model = kmodels.models.ViTImageClassifier.from_preset(
            "vit_debug", num_layers=1, num_classes=1
        )
        images = tf.random.uniform((2, 16, 16, 3))

        def slope(images):
            with tf.GradientTape() as tape:
                tape.watch(images)
                scores = tf.reduce_sum(model(images))
            return tape.gradient(scores, images)

        with tf.GradientTape() as tape:
            tape.watch(images)
            penalty = tf.reduce_sum(slope(images) ** 2)
        found = tape.gradient(penalty, images)
        direction = tf.sign(found)
        up, down = slope(images + 1e-3 * direction), slope(images - 1e-3 * direction)
        expected = float(tf.reduce_sum(up**2 - down**2)) / 2e-3
        assert abs(float(tf.reduce_sum(found * direction)) - expected) < 0.01 * abs(expected)

    def test_saved_model(tmp_path):
        model = kmodels.models.ViTImageClassifier.from_preset(
            "vit_debug", num_layers=1, num_classes=3
        )
        model.export(tmp_path / "vit", verbose=False)
        images = np.random.default_rng(0).random((2, 16, 16, 3)).astype("float32")
        again = tf.saved_model.load(tmp_path / "vit")
        np.testing.assert_allclose(again.serve(images), model(images), atol=1e-5)
