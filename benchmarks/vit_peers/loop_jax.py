"""A plain training loop of JAX: one jitted step with donated buffers, optax."""

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import jax
import optax

from vit_peers.common import BETAS, WEIGHT_DECAY, Pace, Settings, batches


def make_optimizer(settings: Settings) -> optax.GradientTransformation:
    if settings.optimizer == "sgd":
        return optax.sgd(settings.learning_rate)
    return optax.adamw(settings.learning_rate, *BETAS, eps=1e-8, weight_decay=WEIGHT_DECAY)


def train(
    forward: Callable[[Any, Any, Any], tuple[Any, Any]],
    parameters: Any,
    state: Any,
    settings: Settings,
    pace: Pace,
    facts: dict[str, Any],
) -> None:
    """Trains by `forward(parameters, state, images) -> (logits, state)`."""
    data = batches(settings)
    optimizer = make_optimizer(settings)
    slots = optimizer.init(parameters)

    @partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(parameters: Any, slots: Any, state: Any, images: Any, labels: Any) -> Any:
        def loss_of(parameters: Any) -> tuple[Any, Any]:
            logits, after = forward(parameters, state, images)
            each = optax.softmax_cross_entropy_with_integer_labels(logits.astype("float32"), labels)
            return each.mean(), after

        (loss, after), gradients = jax.value_and_grad(loss_of, has_aux=True)(parameters)
        updates, slots = optimizer.update(gradients, slots, parameters)
        return loss, optax.apply_updates(parameters, updates), slots, after

    pace.ready(facts)
    for i in count():
        loss, parameters, slots, state = step(parameters, slots, state, *data[i % len(data)])
        pace(loss)
