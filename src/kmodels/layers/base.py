"""The base of every layer: weights that are keyed by their path."""

import functools
import importlib
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import keras

from kmodels.core.precision import check_policy
from kmodels.core.types import InitializerLike, Tensor
from kmodels.layers import initializers, layout_family, remat
from kmodels.layers.shard_granularity import Granularity, add_weight

# (batch, ..., channels); Keras writes None for an unknown axis, never for the last one.
Shape = tuple[Any, ...]


class _Calls(threading.local):
    """A thread's flag for direct calls of layers; torch.compile cannot read a ContextVar."""

    direct = False
    training = False


_calls = _Calls()


@contextmanager
def direct_calls(training: bool = False) -> Iterator[None]:
    """Layers inside the block run their `call` at once, without what Keras does around it.

    That costs more than the arithmetic when one token at a time goes through a model, and ties
    what torch.compile traces to the names of the layers. It serves built layers of one policy; the
    caller says what variables are cast to.

    Args:
        training: for layers that are not told by the layer that calls them.
    """
    before = _calls.direct, _calls.training
    _calls.direct, _calls.training = True, training
    try:
        yield
    finally:
        _calls.direct, _calls.training = before


def reshape(x: Tensor, shape: Sequence[int]) -> Any:
    """`keras.ops.reshape`, at once for tensors that can: Keras searches its arguments first."""
    own = getattr(x, "reshape", None)
    return keras.ops.reshape(x, shape) if own is None else own(shape)


def arguments(cls: type) -> list[str]:
    """Returns the arguments by which a layer of this class differs from `keras.layers.Layer`."""
    found: dict[str, None] = {}
    for base in cls.__mro__[: cls.__mro__.index(Layer)]:
        if "__init__" in vars(base):
            parameters = list(inspect.signature(base.__init__).parameters.values())[1:]
            found |= dict.fromkeys(p.name for p in parameters if p.kind is not p.VAR_KEYWORD)
    return list(found)


def plain(value: Any) -> Any:
    """Returns an argument of a layer as `get_config` gives it: what JSON can hold."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if inspect.isfunction(value):
        return keras.activations.serialize(value)
    if isinstance(value, tuple):
        value = list(value)
    return keras.saving.serialize_keras_object(value)


def _changes() -> Any:
    # Adapters are made above the layers; this is a look-up by name.
    return importlib.import_module("kmodels.lora.changes")


class Layer(keras.layers.Layer):
    """A Keras layer whose first weights are the same on each backend.

    Each argument of a subclass is kept in an attribute of the same name, from which `get_config`
    is made.

    Args:
        **kwargs: of `keras.layers.Layer`.

    Raises:
        InputError: for a dtype that Keras does not know, or that the backend would round.
    """

    _takes_training = False
    _waiting: Mapping[str, Any] = {}  # changes that come when the layer is built

    def __init__(self, **kwargs: Any):
        check_policy(kwargs.get("dtype"))
        super().__init__(**kwargs)
        self.layout_family = layout_family.current()

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        cls._takes_training = "training" in inspect.signature(cls.call).parameters

    def __call__(self, *args: object, **kwargs: Any) -> Any:
        """Keras' call, or inside `direct_calls` the layer's own."""
        if not _calls.direct:
            return super().__call__(*args, **kwargs)
        if _calls.training and self._takes_training:
            kwargs.setdefault("training", True)
        return type(self).call(self, *args, **kwargs)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make this layer again, with later changes, as plain values.

        Raises:
            NotImplementedError: for a subclass that keeps an argument elsewhere and has no
                `get_config` of its own.
        """
        names = arguments(type(self))
        lacking = [name for name in names if not hasattr(self, name)]
        if lacking and type(self).get_config is Layer.get_config:
            raise NotImplementedError(
                f"{type(self).__name__} keeps no attribute {', '.join(lacking)}; keep each "
                "argument in an attribute of its name, or write get_config"
            )
        own = {name: plain(getattr(self, name)) for name in names if name not in lacking}
        changed = _changes().describe_layer(self) if self.built else self._waiting
        return {**own, **super().get_config(), **({"changes": changed} if changed else {})}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Makes the layer of `get_config`; adapters and quantized kernels follow in `build`."""
        config = dict(config)
        changed = config.pop("changes", None)
        layer = super().from_config(config)
        if changed:
            build = layer.build

            @functools.wraps(build)
            def build_changed(*args: object, **kwargs: object) -> None:
                build(*args, **kwargs)
                _changes().restore_layer(layer, changed)

            layer.build = build_changed
            object.__setattr__(layer, "_waiting", changed)  # Keras would make its own dict of it
        return layer

    def add_parameter(
        self,
        name: str,
        shape: Sequence[int],
        initializer: InitializerLike,
        shard_granularity: Granularity | None = None,
        **settings: Any,
    ) -> Any:
        """Adds the variable `<layer path>/<name>`, drawn from its own stream.

        Args:
            name: the last part of its path.
            shape: shape of the variable.
            initializer: what Keras takes as such; see `initializers.keyed`.
            shard_granularity: how far it may be cut over devices, see `layers.shard_granularity`.
            **settings: `trainable`, `regularizer` and `constraint` as in Keras' `add_weight`.
        """
        keyed = initializers.keyed(initializer, f"{self.path}/{name}")
        return add_weight(
            self, shard_granularity, shape=tuple(shape), initializer=keyed, name=name, **settings
        )

    def add_seed(self, rate: float, seed: int | None = None) -> Any:
        """Returns a seed generator of the layer's own stream or `seed`; None if `rate` is 0."""
        if not rate:
            return None
        if seed is None:
            seed = int(initializers.next_generator(f"{self.path}/seed").integers(2**31))
        return keras.random.SeedGenerator(seed, name="seed")

    def rematerialized_call(self, fn: Callable[..., Any], *_: object, **__: object) -> Any:
        """`fn` as it is called where `layers.remat` is on for this layer; Keras asks for it."""
        return remat.wrap(self, fn)
