"""A small run of each optimizer, saved in its middle: what one backend leaves for the others.

That of "tuned" trains an adapter on a kernel in four bits.

KERAS_BACKEND=torch python tests/loop/checkpoint/run_on_backend.py FOLDER
"""

import json
import shutil
import sys
from pathlib import Path

import keras
import numpy as np

import kmodels
from kmodels.callbacks import Checkpoint
from kmodels.checkpoint import state
from kmodels.layers import Dense
from kmodels.layers.quantized import Quantization
from kmodels.training import SGD, AdamW, StepCallbacks, WarmupSchedule, track_step_loss

SAVED, LAST, STEPS, EPOCHS = 12, 32, 8, 4
rng = np.random.default_rng(0)
X = rng.normal(size=(STEPS * 8, 6)).astype("float32")
Y = (X[:, :3] * X[:, 3:]).sum(-1, keepdims=True)
OPTIMIZERS = {
    "ours": lambda: AdamW(WarmupSchedule(0.02, LAST, 4), ema=0.9, accumulate=2, clip_norm=1.0),
    "our_sgd": lambda: SGD(0.02, 0.9, nesterov=True, weight_decay=0.1),
    "adamw": lambda: keras.optimizers.AdamW(keras.optimizers.schedules.CosineDecay(0.02, LAST)),
    "sgd": lambda: keras.optimizers.SGD(0.02, momentum=0.9, nesterov=True),
    "adafactor": lambda: keras.optimizers.Adafactor(0.02),
    "lion": lambda: keras.optimizers.Lion(0.002),
    "muon": lambda: keras.optimizers.Muon(0.01),
    "tuned": lambda: AdamW(0.02, accumulate=2, clip_norm=1.0),
}
# Those that the others read from .keras files; `more` compiles a step of Keras for each.
IN_KERAS_FILES = ("adamw", "sgd")


class Losses(keras.callbacks.Callback):
    saves_itself = True

    def __init__(self):
        super().__init__()
        self.found = []

    def on_train_batch_end(self, batch, logs=None):
        self.found.append(float(keras.ops.convert_to_numpy(logs["step_loss"])))


def make_model(optimizer):
    keras.utils.set_random_seed(3)
    inputs = keras.Input((6,))
    first = (Dense if optimizer == "tuned" else keras.layers.Dense)(16, "gelu", name="first")
    x = keras.layers.LayerNormalization(name="norm")(first(inputs))
    model = keras.Model(inputs, keras.layers.Dense(1, name="second")(x))
    if optimizer == "tuned":
        first.quantize_kernel(Quantization("nf4"))
        first.enable_lora(4)
    # XLA takes TensorFlow seconds for each optimizer.
    jit_compile = False if keras.backend.backend() == "tensorflow" else "auto"
    model.compile(OPTIMIZERS[optimizer](), "mse", metrics=["mae"], jit_compile=jit_compile)
    track_step_loss(model)
    return model


def fit(model, folder):
    """The losses of the steps that were made; all four epochs are gone through."""
    losses = Losses()
    made = [losses, Checkpoint(folder, every=SAVED, keep=9)]
    callbacks = StepCallbacks(made, model, epochs=EPOCHS, steps=STEPS)
    kmodels.fit(model, X, Y, batch_size=8, epochs=EPOCHS, verbose=0, callbacks=callbacks)
    return losses.found


def values(model):
    held = {f"weight {k}": v for k, v in state.named(model.weights).items()}
    held |= {f"slot {k}": v for k, v in state.slots(model.optimizer).items()}
    outputs = keras.ops.convert_to_numpy(model(keras.ops.convert_to_tensor(X)))
    return {**{k: np.array(state.host_values(v)) for k, v in held.items()}, "outputs": outputs}


def main(folder):
    for name in OPTIMIZERS:
        model = make_model(name)
        losses = fit(model, folder / name)
        for path in (folder / name).glob("step_*"):
            if path.name != f"step_{SAVED:08d}":
                shutil.rmtree(path)
        (folder / f"{name}.json").write_text(json.dumps(losses))
        saved = make_model(name)
        Checkpoint(folder / name).prepare(saved)
        np.savez(folder / f"{name}_saved.npz", **values(saved))
        if name in IN_KERAS_FILES:
            model.save(folder / f"{name}.keras")
            logits = keras.ops.convert_to_numpy(model(keras.ops.convert_to_tensor(X)))
            np.savez(folder / f"{name}.npz", outputs=logits, losses=more(model))


def more(model):
    """Losses of a few steps more, in the order of the rows; another batch size would compile."""
    found = []
    for start in range(0, len(X) // 2, 8):
        logs = model.train_on_batch(X[start : start + 8], Y[start : start + 8], return_dict=True)
        found.append(float(keras.ops.convert_to_numpy(logs["step_loss"])))
        model.reset_metrics()
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
