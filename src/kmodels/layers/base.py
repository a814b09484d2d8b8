"""The base of every layer: weights that are keyed by their path."""

import inspect
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras

from kmodels import compat, initializers
from kmodels.layers import remat
from kmodels.layers.parts import Parts, add_weight

# (batch, ..., channels); Keras writes None for an unknown axis, never for the last one.
Shape = tuple[Any, ...]


class _Calls(threading.local):
    """Whether layers of this thread are called directly; torch.compile cannot read a ContextVar."""

    direct = False
    training = False


_calls = _Calls()


@contextmanager
def direct_calls(training: bool = False) -> Iterator[None]:
    """Layers inside the block run their `call` at once, without what Keras does around it.

    That costs more than the arithmetic when one token at a time goes through a model, and ties
    what torch.compile traces to the names of the layers. For built layers of one policy; what
    variables are cast to is the caller's to say.

    Args:
        training: for layers that are not told by the layer that calls them.
    """
    before = _calls.direct, _calls.training
    _calls.direct, _calls.training = True, training
    try:
        yield
    finally:
        _calls.direct, _calls.training = before


def reshape(x: Any, shape: Sequence[int]) -> Any:
    """`keras.ops.reshape`, at once for tensors that can: Keras searches its arguments first."""
    own = getattr(x, "reshape", None)
    return keras.ops.reshape(x, shape) if own is None else own(shape)


class Layer(keras.layers.Layer):
    """A Keras layer whose first weights are the same on each backend."""

    _takes_training = False

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        cls._takes_training = "training" in inspect.signature(cls.call).parameters

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Keras' call, or inside `direct_calls` the layer's own."""
        if not _calls.direct:
            return super().__call__(*args, **kwargs)
        if _calls.training and self._takes_training:
            kwargs.setdefault("training", True)
        return type(self).call(self, *args, **kwargs)

    def add_parameter(
        self,
        name: str,
        shape: Sequence[int],
        draw: initializers.Draw,
        trainable: bool = True,
        parts: Parts | None = None,
    ) -> Any:
        """Adds the variable `<layer path>/<name>`, drawn by `draw` from its own stream.

        `parts` says how far it may be cut over devices, see `layers.parts`.
        """
        keyed = initializers.Keyed(draw, f"{self.path}/{name}")
        return add_weight(
            self, parts, shape=tuple(shape), initializer=keyed, name=name, trainable=trainable
        )

    def add_seed(self, rate: float) -> Any:
        """A seed generator of this layer's own stream, or None where `rate` is 0."""
        if not rate:
            return None
        seed = initializers.generator(f"{self.path}/seed", compat.random_seed())
        return keras.random.SeedGenerator(int(seed.integers(2**31)), name="seed")

    def rematerialized_call(self, fn: Any, *_: Any, **__: Any) -> Any:
        """`fn` as it is called where `layers.remat` is on for this layer; Keras asks for it."""
        return remat.wrap(self, fn)
