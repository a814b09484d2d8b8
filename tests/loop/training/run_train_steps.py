"""Two trainings with losses of their own, one source for three backends: losses by step.

KERAS_BACKEND=torch python tests/loop/training/run_train_steps.py FOLDER
"""

import json
import sys
from pathlib import Path

import keras
import numpy as np

from kmodels import lora
from kmodels.layers import initializers
from kmodels.models import GemmaCausalLM
from kmodels.training import AdamW, StepCallbacks, TrainStep, track_step_loss

STEPS, EPOCHS, BATCH, WIDTH = 4, 5, 8, 12
ops = keras.ops
rng = np.random.default_rng(0)
IMAGES = rng.normal(size=(STEPS * BATCH, 16, 16, 3)).astype("float32")
WORDS, OTHERS = rng.integers(1, 30, (2, len(IMAGES), 6))


def dense(units, path, **settings):
    draw = initializers.Keyed(initializers.variance_scaling(1.0, "fan_avg", "uniform"), path)
    return keras.layers.Dense(units, kernel_initializer=draw, **settings)


def gan():
    """Two objectives with batch norm; the noise is in the data."""
    inputs = keras.Input((4,))
    x = dense(WIDTH, "g/first", use_bias=False)(inputs)
    x = keras.layers.ReLU()(keras.layers.BatchNormalization(momentum=0.8)(x))
    generator = keras.Model(inputs, dense(6, "g/last")(x))
    inputs = keras.Input((6,))
    x = dense(WIDTH, "d/first", use_bias=False)(inputs)
    x = keras.layers.LeakyReLU()(keras.layers.BatchNormalization(momentum=0.8)(x))
    discriminator = keras.Model(inputs, dense(1, "d/last")(x))
    cross = keras.losses.BinaryCrossentropy(from_logits=True)

    def d_loss(models, batch, training):
        real, noise = batch
        fake = models["generator"](noise, training=training)
        on_real = models["discriminator"](real, training=training)
        on_fake = models["discriminator"](fake, training=training)
        return cross(ops.ones_like(on_real), on_real) + cross(ops.zeros_like(on_fake), on_fake)

    def g_loss(models, batch, training):
        fake = models["generator"](batch[1], training=training)
        logits = models["discriminator"](fake, training=training)
        return cross(ops.ones_like(logits), logits)

    models = {"generator": generator, "discriminator": discriminator}
    step = TrainStep(models, {"discriminator": d_loss, "generator": g_loss})
    adam = keras.optimizers.Adam
    step.compile({name: adam(2e-3, beta_1=0.5, epsilon=1e-5) for name in models})
    return step, (IMAGES[:, 0, :2].reshape(-1, 6) + 1.0, IMAGES[:, 1, :4, 0])


def preference():
    """DPO (Rafailov et al. 2023): Gemma with adapters, and itself without them as reference."""
    beta = 0.5

    def logs(model, tokens, training):
        inputs = {"token_ids": tokens, "padding_mask": ops.ones_like(tokens)}
        rows = ops.log_softmax(model(inputs, training=training)[:, :-1])
        return ops.sum(ops.take_along_axis(rows, tokens[:, 1:, None], axis=-1)[..., 0], axis=-1)

    def loss_fn(model, batch, training):
        won, lost = (logs(model, tokens, training) for tokens in batch)
        with lora.disabled(model):
            base_won, base_lost = (logs(model, tokens, False) for tokens in batch)
        margin = (won - base_won) - (lost - base_lost)
        share = ops.mean(ops.cast(margin > 0, "float32"))
        return -ops.mean(ops.log_sigmoid(beta * margin)), {"share": share}

    model = GemmaCausalLM.from_preset("gemma_debug", num_layers=1, preprocessor=None)
    model.enable_lora(rank=4)
    step = TrainStep(model, loss_fn)
    step.compile(AdamW(1e-2, weight_decay=0.0))
    return step, ((WORDS, OTHERS),)


class Losses(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.found = []

    def on_train_batch_end(self, batch, logs=None):
        self.found.append(float(ops.convert_to_numpy(logs["step_loss"])))


def train(make):
    keras.utils.set_random_seed(3)
    step, data = make()
    track_step_loss(step)
    losses = Losses()
    callbacks = StepCallbacks([losses], step, epochs=EPOCHS, steps=STEPS)
    settings = {"epochs": EPOCHS, "batch_size": BATCH, "shuffle": False, "verbose": 0}
    step.fit(*data, callbacks=callbacks, **settings)
    moving = {"steps": losses.found}
    weights = [v for layer in step._players.layers for v in layer.non_trainable_weights]
    moving["moving"] = [
        float(np.abs(ops.convert_to_numpy(v)).sum()) for v in weights if "moving" in v.name
    ]
    return moving


PROOFS = {f.__name__: f for f in (gan, preference)}


def main(folder):
    found = {name: train(make) for name, make in PROOFS.items()}
    (folder / "losses.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
