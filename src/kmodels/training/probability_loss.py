"""A warning for losses of probabilities in front of a model that gives logits."""

import warnings
from typing import Any

import keras

_OF_PROBABILITIES = (
    keras.losses.BinaryCrossentropy,
    keras.losses.BinaryFocalCrossentropy,
    keras.losses.CategoricalCrossentropy,
    keras.losses.CategoricalFocalCrossentropy,
    keras.losses.SparseCategoricalCrossentropy,
)
# The functions of the same losses, which a name such as "binary_crossentropy" stands for.
_BY_FUNCTION = {
    getattr(keras.losses, function): of.__name__
    for function, of in zip(
        (
            "binary_crossentropy",
            "binary_focal_crossentropy",
            "categorical_crossentropy",
            "categorical_focal_crossentropy",
            "sparse_categorical_crossentropy",
        ),
        _OF_PROBABILITIES,
        strict=True,
    )
}


def warn_of_logits(model: keras.Model, loss: object) -> None:
    """Warns where a loss would take logits for probabilities: it falls, and little is learnt.

    Args:
        model: a task that gives logits.
        loss: as `compile` takes it.
    """
    for part in keras.tree.flatten(loss):
        if (name := _of_probabilities(part)) is not None:
            given = repr(part) if isinstance(part, str) else name
            warnings.warn(
                f"{type(model).__name__} gives logits, and the loss {given} takes probabilities; "
                f"give keras.losses.{name}(from_logits=True), or make the model with an activation",
                stacklevel=4,
            )


def _of_probabilities(loss: Any) -> str | None:
    """Returns the class of a loss, if it takes probabilities for granted."""
    if isinstance(loss, str):
        try:
            loss = keras.losses.get(loss)
        except ValueError:  # Keras says so, too
            return None
    if isinstance(loss, _OF_PROBABILITIES):
        return None if loss.get_config().get("from_logits") else type(loss).__name__
    return _BY_FUNCTION.get(loss) if callable(loss) else None
