"""Direct calls of layers inside layers, without `keras.layers.Layer.__call__`.

Keras' call binds arguments, walks trees, opens scopes and looks for masks. That takes more than a
tenth of a millisecond of Python for each part of a block, more than the kernels of a small batch,
and has no effect if a part gets plain tensors in the dtype of its policy. Then it is skipped.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import keras

from kmodels.core import keras_internals
from kmodels.core.dispatch import backend_module, settle, unsettle
from kmodels.core.environment import is_on

ENVIRONMENT = "KMODELS_DIRECT_CALLS"


class _Calls(threading.local):
    """A thread's flags; torch.compile cannot read a ContextVar.

    Attributes:
        direct: inside `direct_calls`.
        sealed: inside the call of a layer whose parts need nothing of Keras.
        training: for layers called without `training`; None for their default.
        through_keras: inside `through_keras`.
    """

    def __init__(self):
        # Not on the class: see `kmodels.core.dispatch._Settled`.
        self.direct = self.sealed = self.through_keras = False
        self.training: bool | None = False


calls = _Calls()


class DirectCalls(Protocol):
    """Decides on one backend when Keras' part of a layer's call can be left out."""

    def declines(
        self, layer: keras.layers.Layer, args: tuple, kwargs: dict[str, Any]
    ) -> str | None:
        """Returns why Keras has to call this layer (a clause), or None.

        If it returns None, `kwargs` has the `training` that Keras would pass.
        """
        ...

    def is_sealed(self, layer: keras.layers.Layer) -> bool:
        """Returns True if no layer below this one needs Keras when it is called."""
        ...

    def declines_model(self, model: keras.Model, args: tuple, kwargs: dict[str, Any]) -> str | None:
        """Returns why Keras has to call this functional model (a clause), or None."""
        ...

    def run_model(self, model: keras.Model, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Runs the call of a model for which `declines_model` returned None."""
        ...

    def depends_on(self, name: str) -> bool:
        """Returns True if the decision for a layer depends on its attribute of this name."""
        ...

    def is_eager(self) -> bool:
        """Returns True if the framework is neither compiling nor recording the call."""
        ...

    def changed(self) -> None:
        """Discards cached decisions after a change of an attribute."""
        ...


_backend = backend_module("kmodels.layers.direct_calls", DirectCalls, optional=True)
_models: Any = _backend  # for methods that need a backend
_off = not is_on(ENVIRONMENT, "1")


def declines(layer: keras.layers.Layer, args: tuple, kwargs: dict[str, Any]) -> str | None:
    """Returns why Keras has to call this layer (a clause), or None; see `DirectCalls`."""
    if _backend is None:
        return "traced steps have no Python around their layers"
    if _off or calls.through_keras:
        return f"turned off by {ENVIRONMENT}=0" if _off else "turned off by through_keras()"
    return _backend.declines(layer, args, kwargs)


class CalledDirectly(keras.Model if TYPE_CHECKING else object):
    """First base of a functional model: Keras calls it only if that has an effect.

    Attributes:
        takes_training: as in `kmodels.layers.base.Layer`.
        training_default: as in `kmodels.layers.base.Layer`.
        makes_masks: as in `kmodels.layers.base.Layer`.
        optional_inputs: whether inputs may be None, or have names that the graph lacks.
    """

    optional_inputs = False
    takes_training = True
    training_default: Any = None
    makes_masks = False

    if _backend is not None:

        def __setattr__(self, name: str, value: object) -> None:
            """Sets an attribute, and discards decisions that depend on it."""
            if vars(self).get(name, self) is not value:
                changed(name, value)
            super().__setattr__(name, value)

        def __call__(self, *args: object, **kwargs: Any) -> Any:
            """Keras' call, or `call` itself if Keras would add nothing."""
            if calls.sealed:
                if calls.training is not None:
                    kwargs.setdefault("training", calls.training)
                return self.call(*args, **kwargs)
            if (
                _off
                or calls.through_keras
                or _models.declines_model(self, args, kwargs) is not None
            ):
                return super().__call__(*args, **kwargs)
            return _models.run_model(self, args, kwargs)


def run(layer: keras.layers.Layer, call: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Runs the call of a layer for which `declines` returned None.

    If no layer below it needs Keras, those do not decide again.
    """
    if not layer.autocast:
        with keras_internals.no_autocast():
            return call(*args, **kwargs)
    if _backend is None or not _backend.is_sealed(layer):
        return call(*args, **kwargs)
    before = calls.training
    calls.sealed, calls.training = True, kwargs.get("training")
    settle(_backend.is_eager())
    keras_internals.read_stored()
    try:
        return call(*args, **kwargs)
    finally:
        calls.sealed, calls.training = False, before
        unsettle()
        keras_internals.read_through_scopes()


def changed(name: str, value: object) -> None:
    """Discards decisions that depend on an attribute of a layer, after it changed."""
    if _backend is not None and (
        _backend.depends_on(name) or isinstance(value, keras.layers.Layer)
    ):
        _backend.changed()


@contextmanager
def through_keras() -> Iterator[None]:
    """Lets Keras call every layer inside the block; KMODELS_DIRECT_CALLS=0 does so in a process."""
    before = calls.through_keras
    calls.through_keras = True
    try:
        yield
    finally:
        calls.through_keras = before


@contextmanager
def direct_calls(training: bool = False, compiled: bool = False) -> Iterator[None]:
    """Layers inside the block run their `call` directly, without Keras.

    With Keras, a graph of torch.compile would depend on the names of the layers. It is for built
    layers of one policy; the caller sets the dtype that variables are cast to.

    Args:
        training: for layers called without `training`.
        compiled: whether the framework compiles the block; each op then decides in each call.
    """
    before = calls.direct, calls.training
    calls.direct, calls.training = True, training
    if not compiled:
        settle(_backend is not None and _backend.is_eager())
    try:
        yield
    finally:
        calls.direct, calls.training = before
        unsettle()
