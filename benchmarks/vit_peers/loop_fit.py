"""Keras' `fit`, one step after another at the parent's pace."""

from typing import Any

import keras

from vit_peers.common import BETAS, WEIGHT_DECAY, Pace, Settings, batches

ENDLESS = 1_000_000


class Batches(keras.utils.PyDataset):
    def __init__(self, settings: Settings):
        super().__init__()
        self.batches = batches(settings)

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> tuple:
        return self.batches[index % len(self.batches)]


class Steps(keras.callbacks.Callback):
    """Hands each step's loss on; Keras logs the mean since the start of the epoch."""

    def __init__(self, pace: Pace):
        super().__init__()
        self.pace = pace
        self.total = 0.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        before, self.total = self.total, float(logs["loss"]) * (batch + 1)
        self.pace(self.total - before)


def keras_optimizer(settings: Settings) -> keras.optimizers.Optimizer:
    if settings.optimizer == "sgd":
        return keras.optimizers.SGD(settings.learning_rate)
    return keras.optimizers.AdamW(
        settings.learning_rate, WEIGHT_DECAY, beta_1=BETAS[0], beta_2=BETAS[1], epsilon=1e-8
    )


def one_thread() -> None:
    if keras.backend.backend() == "torch":
        import torch

        torch.set_num_threads(1)


def train(
    model: Any,
    optimizer: Any,
    settings: Settings,
    pace: Pace,
    facts: dict,
    jit_compile: bool | str = "auto",
) -> None:
    one_thread()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=jit_compile)
    pace.ready(facts)
    model.fit(Batches(settings), verbose=0, shuffle=False, callbacks=[Steps(pace)])


def counted(model: Any) -> dict[str, Any]:
    """The facts that any Keras model tells in the same way."""
    return {
        "parameters": model.count_params(),
        "variables": " ".join(sorted({v.dtype for v in model.trainable_variables})),
    }
