"""Programs of Keras users, with kmodels' layers and models in the place of Keras' own."""

import keras
import numpy as np

import kmodels

rng = np.random.default_rng(0)
VIT = {
    "image_shape": (8, 8, 3), "patch_size": 4, "num_layers": 2, "num_heads": 2, "hidden_dim": 8,
    "mlp_dim": 16,
}  # fmt: skip


def test_dense_in_a_sequential_model_is_keras_dense():
    x = rng.normal(size=(32, 6)).astype("float32")
    y = x[:, :1] - x[:, 1:2]

    def model(layers):
        return keras.Sequential(
            [
                keras.Input((6,)),
                layers.Dense(8, "relu", kernel_regularizer="l2", bias_initializer="ones"),
                layers.Dense(1, use_bias=False, kernel_constraint="max_norm"),
            ]
        )

    ours, theirs = model(kmodels.layers), model(keras.layers)
    ours.set_weights(theirs.get_weights())
    losses = []
    for each in (ours, theirs):
        each.compile(keras.optimizers.SGD(0.02), "mse")
        losses.append(each.fit(x, y, epochs=3, shuffle=False, verbose=0).history["loss"])
    np.testing.assert_allclose(*losses, rtol=1e-4)
    assert losses[0][-1] < losses[0][0]


def test_a_global_policy_reaches_every_layer():
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        backbone = kmodels.models.ViTBackbone(**VIT)
        dense = kmodels.layers.Dense(2)
    finally:
        keras.config.set_dtype_policy("float32")
    x = rng.normal(size=(2, 8, 8, 3)).astype("float32")
    y = dense(backbone(x))
    assert keras.backend.standardize_dtype(y.dtype) == "bfloat16"
    assert {w.dtype for w in backbone.weights + dense.weights} == {"float32"}


def test_layers_by_name_carry_weights_and_are_frozen_and_summed_up():
    old, new = kmodels.models.ViTBackbone(**VIT), kmodels.models.ViTBackbone(**VIT)
    for name in ("patch_embedding", "tokens", "block_0", "block_1", "final_norm"):
        new.get_layer(name).set_weights(old.get_layer(name).get_weights())
    x = rng.normal(size=(2, 8, 8, 3)).astype("float32")
    np.testing.assert_array_equal(old.predict(x, verbose=0), new.predict(x, verbose=0))
    new.get_layer("block_0").trainable = False
    lines = []
    new.summary(print_fn=lines.append)
    text = "\n".join(lines)
    trained = sum(int(np.prod(w.shape)) for w in new.trainable_weights)
    assert f"Trainable params: {trained:,}" in text
    assert "block_1" in text
