"""Models that are built and compiled once in a process, and put back after each use.

    with pool("vit_debug", num_classes=3) as model:
        model.fit(images, labels)

    with pool(make_regression, units=8) as model: ...

A preset's model has the default compile settings of its task; a function's has what the function
gives it. Inside the block the model may be trained, compiled again, frozen, given adapters or
quantized: afterwards its values, trainability, optimizer, metrics, seeds, layers, compile settings
and preprocessor are what they were, and this is checked. A model that cannot be put back is dropped
and counted in `dropped`. A test whose subject is a model that nobody has touched makes its own.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from kmodels import models
from kmodels.checkpoint import state
from kmodels.core import keras_internals, traced

TASKS = {
    "clip_text": models.CLIPTextModelWithProjection,
    "clip": models.ImageTextSimilarity,
    "embedding_gemma": models.GemmaTextEmbedder,
    "gemma3_vision": models.Gemma3ImageTextLM,
    "gemma4_unified": models.Gemma4ImageTextLM,
    "gemma": models.GemmaCausalLM,
    "llama3": models.Llama3CausalLM,
    "qwen3": models.Qwen3CausalLM,
    "vit": models.ViTImageClassifier,
}
# How many models could not be put back, by their keys.
dropped: Counter = Counter()
_idle: dict[str, list["_Pooled"]] = {}
# What Keras compiles, and the loops of `generate`: they stay for the next test.
_COMPILED = ("train_function", "test_function", "predict_function")
_LOOPS = ("loops", "draft_loops")


@contextmanager
def pool(source: str | Callable[..., Any], **settings: Any) -> Iterator[Any]:
    """Lends a model.

    Args:
        source: name of a preset, or a function that makes a built model.
        settings: arguments of `from_preset` or of the function.
    """
    name = source if isinstance(source, str) else f"{source.__module__}.{source.__qualname__}"
    key = f"{name} {sorted(settings.items())}"
    idle = _idle.setdefault(key, [])
    # A model is the same, and so is what comes after, whether it is made now or lent again.
    keras.utils.set_random_seed(1234)
    pooled = idle.pop() if idle else _Pooled(_make(source, settings))
    keras.utils.set_random_seed(1234)
    try:
        yield pooled.model
    finally:
        if pooled.put_back():
            idle.append(pooled)
        else:
            dropped[key] += 1


def _make(source: str | Callable[..., Any], settings: dict[str, Any]) -> Any:
    if not isinstance(source, str):
        return source(**settings)
    stem = source.removesuffix("_debug")
    task = TASKS[stem] if stem in TASKS else TASKS[stem.rstrip("0123456789")]
    return task.from_preset(source, **settings)


class _Pooled:
    """A model with everything that a test may change of it."""

    def __init__(self, model: Any):
        self.model = model
        self.optimizer = getattr(model, "optimizer", None)
        if self.optimizer is not None and not self.optimizer.built:
            self.optimizer.build(model.trainable_variables)
        self.functions: dict[str, Any] = dict.fromkeys(_COMPILED)
        self.parts = _parts(model)
        self.attributes = [_attributes(part) for part in self.parts]
        self.variables = _variables(model)
        self.trainable = [variable.trainable for variable in self.variables]
        self.values = [np.array(state.host_values(variable)) for variable in self.variables]
        self.traced = traced.TracedState(model)

    def put_back(self) -> bool:
        """Makes the model what it was; returns whether it is."""
        self._keep_functions()
        try:
            for part, attributes in zip(self.parts, self.attributes, strict=True):
                _put_attributes(part, attributes)
            for variable, trainable in zip(self.variables, self.trainable, strict=True):
                if variable.trainable != trainable:
                    variable.trainable = trainable
            for variable, values in zip(self.variables, self.values, strict=True):
                state.put(variable, values.copy())  # JAX may keep the memory that it is given
        except (AttributeError, RuntimeError, TypeError, ValueError):
            return False
        return self._is_what_it_was()

    def _keep_functions(self) -> None:
        """Keeps what was compiled of the model as it was, and leaves what was not."""
        held, made = vars(self.model), traced._made.setdefault(self.model, {})
        now = traced.TracedState(self.model)
        for name in _COMPILED:
            state_then = made.get(name, now)
            if held.get("optimizer") is self.optimizer and state_then == self.traced:
                self.functions[name] = held.get(name)
            held[name], made[name] = self.functions[name], self.traced

    def _is_what_it_was(self) -> bool:
        found = _variables(self.model)
        # Metrics of `compile` are made by the first batch.
        here = {id(variable) for variable in found}
        return (
            all(id(variable) in here for variable in self.variables)
            and traced.TracedState(self.model) == self.traced
            and all(
                np.array_equal(state.host_values(variable), values, equal_nan=True)
                for variable, values in zip(self.variables, self.values, strict=True)
            )
        )


def _variables(model: Any) -> list[Any]:
    optimizer = getattr(model, "optimizer", None)
    return [*model.variables, *([] if optimizer is None else optimizer.variables)]


def _parts(model: Any) -> list[Any]:
    """The model, its layers, and what beside them has settings of its own."""
    layers = list(keras_internals.sublayers(model))
    found = [model, *(layer for layer in layers if layer is not model)]
    found += [getattr(model, name, None) for name in ("preprocessor", "optimizer", "generator")]
    found = [part for part in found if part is not None]
    # By the ids in its sets a tracker tells what it has seen; ids are given away again.
    trackers = [part._tracker for part in found if hasattr(part, "_tracker")]
    return [*found, *trackers, *(_Ids(tracker.stored_ids) for tracker in trackers)]


class _Ids:
    """Sets by their names, as attributes."""

    def __init__(self, sets: dict[str, set[int]]):
        vars(self).update(sets)


def _attributes(part: Any) -> dict[str, Any]:
    return {name: (value, _content(value)) for name, value in vars(part).items()}


def _content(value: Any) -> Any:
    """What a container holds, one level deep, and None for anything else."""
    value = _unwrapped(value)
    if isinstance(value, list | set):
        return list(value)
    if isinstance(value, dict):
        return dict(value)
    return None


def _unwrapped(value: Any) -> Any:
    """The container behind the one by which TensorFlow follows what is added."""
    wrapped = getattr(value, "__wrapped__", None)
    return getattr(value, "_storage", value) if wrapped is None else wrapped


def _put_attributes(part: Any, attributes: dict[str, Any]) -> None:
    held = vars(part)
    for name in [name for name in held if name not in attributes]:
        if name not in _COMPILED:
            del held[name]
    for name, (value, content) in attributes.items():
        if name in _COMPILED or name in _LOOPS:
            continue
        if held.get(name) is not value:
            held[name] = value
        value = _unwrapped(value)
        # The methods of the built-in classes, past those by which Keras follows what is added.
        if isinstance(content, list) and isinstance(value, list) and value != content:
            list.__setitem__(value, slice(None), content)
        elif isinstance(value, set) and value != set(content):
            set.clear(value)
            set.update(value, content)
        elif isinstance(value, dict) and not _same(value, content):
            dict.clear(value)
            dict.update(value, content)


def _same(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    return list(one) == list(other) and all(one[name] is other[name] for name in one)
