"""A plain training loop of TensorFlow: one tf.function, the fused update kernels."""

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import tensorflow as tf

from vit_peers.common import BETAS, WEIGHT_DECAY, Pace, Settings, batches


class Optimizer:
    def __init__(self, variables: Sequence[Any], settings: Settings):
        self.variables, self.rate = variables, settings.learning_rate
        self.adamw = settings.optimizer == "adamw"
        if self.adamw:
            slots = [[tf.Variable(tf.zeros_like(v)) for v in variables] for _ in range(2)]
            self.slots = list(zip(*slots, strict=True))
            self.powers = [tf.Variable(tf.constant(beta)) for beta in BETAS]

    def apply(self, gradients: Sequence[Any]) -> None:
        if not self.adamw:
            for variable, gradient in zip(self.variables, gradients, strict=True):
                tf.raw_ops.ResourceApplyGradientDescent(
                    var=variable.handle, alpha=self.rate, delta=gradient
                )
            return
        for variable, gradient, (m, v) in zip(self.variables, gradients, self.slots, strict=True):
            variable.assign_sub(self.rate * WEIGHT_DECAY * variable)
            tf.raw_ops.ResourceApplyAdam(
                var=variable.handle,
                m=m.handle,
                v=v.handle,
                beta1_power=self.powers[0],
                beta2_power=self.powers[1],
                lr=self.rate,
                beta1=BETAS[0],
                beta2=BETAS[1],
                epsilon=1e-8,
                grad=gradient,
            )
        for power, beta in zip(self.powers, BETAS, strict=True):
            power.assign(power * beta)


def train(
    forward: Callable[[Any], Any],
    variables: Sequence[Any],
    settings: Settings,
    pace: Pace,
    facts: dict[str, Any],
    *,
    xla: bool = False,
) -> None:
    """Trains `variables` by the loss of `forward`."""
    data = [(tf.constant(images), tf.constant(labels)) for images, labels in batches(settings)]
    optimizer = Optimizer(variables, settings)

    @tf.function(jit_compile=xla)
    def step(images: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = tf.cast(forward(images), "float32")
            loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
            )
        optimizer.apply(tape.gradient(loss, variables))
        return loss

    pace.ready(facts)
    for i in count():
        pace(step(*data[i % len(data)]))
