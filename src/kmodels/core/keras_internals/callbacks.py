"""The best value of a callback that monitors a metric."""

from collections.abc import Iterable

import keras


def preserve_monitor(callback: keras.callbacks.Callback, attributes: Iterable[str]) -> None:
    """Keeps what a callback that watches a number has found, when it first looks at that number.

    It settles then what "better" means, and starts its best again or turns the sign of its
    tolerance.
    """
    if (settle := getattr(callback, "_set_monitor_op", None)) is None:
        return

    def settle_and_keep() -> None:
        kept = {name: getattr(callback, name) for name in attributes}
        settle()
        vars(callback).update(kept)

    callback._set_monitor_op = settle_and_keep
