"""The base of every layer: weights that are keyed by their path."""

import functools
import inspect
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, Self

import keras

from kmodels.core import keras_internals, traced
from kmodels.core.arguments import Checked
from kmodels.core.runtime import check_policy
from kmodels.core.types import InitializerLike, Tensor
from kmodels.layers import changes, initializers, remat
from kmodels.layers import copies as trained_copies
from kmodels.layers.copies import Copies
from kmodels.layers.direct_calls import calls, changed, declines, run
from kmodels.layers.placement import Granularity, add_weight, current_family

# (batch, ..., channels); Keras writes None for an unknown axis, never for the last one.
Shape = tuple[Any, ...]


def reshape(x: Tensor, shape: Sequence[int]) -> Any:
    """`keras.ops.reshape`, at once for tensors that can: Keras searches its arguments first."""
    own = getattr(x, "reshape", None)
    return keras.ops.reshape(x, shape) if own is None else own(shape)


def shape_of(x: Tensor) -> tuple[Any, ...]:
    """`keras.ops.shape` with a short path for known sizes: Keras inspects its arguments first."""
    static = tuple(x.shape)
    return keras.ops.shape(x) if None in static else static


def arguments(cls: type) -> list[str]:
    """Returns the arguments by which a layer of this class differs from `keras.layers.Layer`."""
    names: dict[str, None] = {}
    for base in cls.__mro__[: cls.__mro__.index(Layer)]:
        if "__init__" in vars(base):
            parameters = list(inspect.signature(base.__init__).parameters.values())[1:]
            names |= dict.fromkeys(p.name for p in parameters if p.kind is not p.VAR_KEYWORD)
    return list(names)


def plain(value: Any) -> Any:
    """Returns an argument of a layer as a JSON value for `get_config`."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if inspect.isfunction(value):
        return keras.activations.serialize(value)
    if isinstance(value, tuple):
        value = list(value)
    return keras.saving.serialize_keras_object(value)


class Layer(Checked, keras.layers.Layer):
    """A Keras layer whose first weights are the same on each backend.

    Each argument of a subclass is kept in an attribute of the same name, from which `get_config`
    is made.

    Args:
        **kwargs: of `keras.layers.Layer`.

    Attributes:
        takes_training: whether its `call` does.
        training_default: default of `training` in `call`.
        makes_masks: whether its outputs may have a Keras mask that its inputs have not.
        keeps_keywords: whether keyword arguments keep their dtype, where others are cast to the
            layer's, see `keep_keywords`.
        copies: the trained copies that replace some of its variables, or None.
        merged_copies: the copies that `merge_lora` wrote into the originals, or None.

    Raises:
        InputError: for an argument that is not what its annotation says, such as a text in place of
            a number; for a dtype that Keras does not know, or that the backend would round.
    """

    checks_methods = False
    takes_training = False
    training_default: Any = None
    makes_masks: Any = False
    keeps_keywords = False
    copies: Any = traced.Variant()
    merged_copies: Copies | None = None
    _copies: Copies | None = None
    _waiting: Mapping[str, Any] = {}  # changes that come when the layer is built

    def __init__(self, **kwargs: Any):
        check_policy(kwargs.get("dtype"))
        super().__init__(**kwargs)
        self.layout_family = current_family()

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        training = inspect.signature(cls.call).parameters.get("training")
        cls.takes_training = training is not None
        cls.training_default = None if training is None else training.default
        if "compute_mask" in vars(cls) and "makes_masks" not in vars(cls):
            cls.makes_masks = True

    def __call__(self, *args: object, **kwargs: Any) -> Any:
        """Keras' call, or `call` itself if Keras would add nothing: see `direct_calls`."""
        if calls.direct or calls.sealed:
            if not self.takes_training:
                kwargs.pop("training", None)
            elif calls.training is not None and kwargs.get("training") is None:
                kwargs["training"] = calls.training
            if calls.direct:  # torch.compile would look for a `call` of each layer's own
                return type(self).call(self, *args, **kwargs)
            if self.autocast:
                return self.call(*args, **kwargs)
            with keras_internals.no_autocast():
                return self.call(*args, **kwargs)
        if declines(self, args, kwargs) is None:
            return run(self, self.call, args, kwargs)
        if self.keeps_keywords:
            args = keras_internals.converted(self, args)
        return super().__call__(*args, **kwargs)

    def __setattr__(self, name: str, value: object) -> None:
        """Sets an attribute, on which it may depend whether Keras has to call a layer."""
        if vars(self).get(name, self) is not value:
            changed(name, value)
        keras_internals.forget_part(self, name)
        super().__setattr__(name, value)
        keras_internals.keep_part(self, name, value)

    def __delattr__(self, name: str) -> None:
        """Deletes an attribute, as Keras does."""
        changed(name, None)
        keras_internals.forget_part(self, name)
        super().__delattr__(name)

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
        later = changes.describe_layer(self) if self.built else self._waiting
        return {**own, **super().get_config(), **({"changes": later} if later else {})}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Makes the layer of `get_config`; adapters and quantized kernels follow in `build`."""
        config = dict(config)
        later = config.pop("changes", None)
        layer = super().from_config(config)
        if later:
            build = layer.build

            @functools.wraps(build)
            def build_changed(*args: object, **kwargs: object) -> None:
                build(*args, **kwargs)
                changes.restore_layer(layer, later)

            layer.build = build_changed
            object.__setattr__(layer, "_waiting", later)  # Keras would make its own dict of it
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
            initializer: a Keras initializer; see `initializers.keyed`.
            shard_granularity: how far it may be cut over devices, see `layers.placement`.
            **settings: others of Keras' `add_weight`; regularizer and constraint are by default
                the layer's own for that name, such as `kernel_regularizer`.
        """
        keyed = initializers.keyed(initializer, f"{self.path}/{name}")
        for kind in ("regularizer", "constraint"):
            settings.setdefault(kind, getattr(self, f"{name}_{kind}", None))
        return add_weight(
            self, shard_granularity, shape=tuple(shape), initializer=keyed, name=name, **settings
        )

    def save_own_variables(self, store: MutableMapping[str, Any]) -> None:
        """Writes the variables as Keras does, and copies of them by name."""
        if self.copies is None:
            super().save_own_variables(store)
            return
        for name, variable in trained_copies.plain(self).items():
            store[name] = variable
        trained_copies.save(self, store)

    def load_own_variables(self, store: MutableMapping[str, Any]) -> None:
        """Loads the variables of `save_own_variables`.

        A layer without copies takes those of the file into its own variables; copies start over if
        the file has none.
        """
        if self.copies is None and not trained_copies.names(self, store):
            super().load_own_variables(store)
            return
        for name, variable in trained_copies.plain(self).items():
            variable.assign(store[name])
        trained_copies.load(self, store)

    def add_seed(self, rate: float, seed: int | None = None) -> Any:
        """Returns a seed generator of the layer's own stream or `seed`; None if `rate` is 0."""
        if not rate:
            return None
        if seed is None:
            seed = int(initializers.next_generator(f"{self.path}/seed").integers(2**31))
        return keras.random.SeedGenerator(seed, name="seed")

    def keep_keywords(self) -> None:
        """Keeps the dtype of keyword arguments, which a cast to the compute dtype would round."""
        self.keeps_keywords = True
        keras_internals.keep_keywords(self)

    def rematerialized_call(self, fn: Callable[..., Any], *_: object, **__: object) -> Any:
        """Returns `fn` with gradient checkpointing; Keras calls this if the layer uses it."""
        return remat.wrap(self, fn)
