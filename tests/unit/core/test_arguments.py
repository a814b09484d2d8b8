"""Arguments of another kind than their annotation says are one line, in each public class."""

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import keras
import numpy as np
import pytest

import kmodels
from kmodels import callbacks, data, generation, layers, lora, models, text, training, transforms
from kmodels.core.arguments import Checked, check_arguments
from kmodels.lora import LoraSettings
from kmodels.models.blocks.config import FrozenConfig
from refusals import refused

CHECKED = (Checked, FrozenConfig, data.Augment, data.Resizing, LoraSettings)
NOTHING = object()


class Example:
    def __init__(
        self,
        count: int = 1,
        share: float = 0.5,
        flag: bool = False,
        name: str = "",
        kind: Literal["a", "b"] = "a",
        limit: float | None = None,
        size: tuple[int, int] | None = None,
        range: tuple[int, float] | tuple[int, float, float] | None = None,
        means: float | Sequence[float] = 0.0,
        fields: Mapping[str, Any] | None = None,
        other: Any = None,
        initializer: "str | keras.initializers.Initializer" = "",
    ):
        pass


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("count", True, "a whole number"),
        ("count", 1.0, "a whole number"),
        ("count", None, "a whole number"),
        ("share", "0.5", "a finite number"),
        ("share", float("nan"), "a finite number"),
        ("share", -float("inf"), "a finite number"),
        ("share", False, "a finite number"),
        ("flag", "no", "True or False"),
        ("flag", 2, "True or False"),
        ("flag", None, "True or False"),
        ("name", 3, "a text"),
        ("name", str, "a text"),
        ("kind", "c", "'a' or 'b'"),
        ("limit", "none", "a finite number or None"),
        ("size", 3, "2 whole numbers or None"),
        ("size", "12", "2 whole numbers or None"),
        ("size", (1, 2, 3), "2 whole numbers or None"),
        ("size", [1, "2"], "2 whole numbers or None"),
        ("size", np.ones((1, 2), int), "2 whole numbers or None"),
        ("size", np.array(3), "2 whole numbers or None"),
        ("size", {1: 2, 3: 4}, "2 whole numbers or None"),
        (
            "range",
            (2, 9, "0.5"),
            "(a whole number, a finite number) or "
            "(a whole number, a finite number, a finite number) or None",
        ),
        ("means", ("a", "b"), "a finite number or a sequence of finite numbers"),
        ("fields", [("a", 1)], "a dictionary or None"),
    ],
)
def test_a_value_of_another_kind_is_one_line(name, value, words):
    shown = "str" if value is str else repr(value)
    message = refused(f"^{name} is ", check_arguments, Example, (), {name: value})
    assert message == f"{name} is {shown}; give {words}"
    place = list(inspect.signature(Example).parameters).index(name)
    defaults = [p.default for p in inspect.signature(Example).parameters.values()]
    assert refused("is", check_arguments, Example, [*defaults[:place], value], {}) == message


def test_values_of_these_kinds_pass():
    numbers = {"count": np.int64(3), "share": 1, "flag": np.True_, "limit": np.float32(0.5)}
    check_arguments(Example, (), numbers)
    check_arguments(Example, (), {"share": keras.ops.ones(()), "count": np.array(3), "flag": 1})
    check_arguments(Example, (), {"size": np.array([1, 2]), "means": [1, 0.5], "fields": {}})
    check_arguments(Example, (), {"size": keras.ops.ones(2, "int32"), "means": {0.5, 1.0}})
    check_arguments(Example, (), {"range": (2, 9, 0.5)})
    check_arguments(
        Example,
        (),
        {"range": [2, 0.5], "kind": "b", "other": 1, "initializer": keras.initializers.Zeros},
    )
    check_arguments(Example, (), {"unknown": 1})  # the constructor says so


def public_classes():
    modules = (layers, models, generation, data, lora, callbacks, text, training)
    each = {getattr(module, name) for module in modules for name in module.__all__}
    checked = [x for x in each if inspect.isclass(x) and issubclass(x, CHECKED)]
    return sorted(checked, key=lambda x: x.__name__)


@pytest.mark.parametrize("kind", public_classes(), ids=lambda kind: kind.__name__)
def test_each_public_class_checks_its_arguments(kind):
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
    simple = [p.name for p in parameters if p.annotation in (bool, int, float, str)]
    needed = [p for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    others = {p.name: NOTHING if p.name in simple else {} for p in needed}
    for name in simple:
        refused(f"is {NOTHING!r}; give ", kind, **{**others, name: NOTHING})


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (training.AdamW, ("weight_decay", "ema", "skip_non_finite", "corrected_epsilon")),
        (training.SGD, ("momentum", "nesterov", "accumulate", "clip_norm", "decay_vectors")),
        (training.Lamb, ("weight_decay", "epsilon")),
        (training.Muon, ("beta_2", "layer_decay")),
        (partial(training.MeanIoU, 3), ("ignore_class",)),
        (training.PixelCrossentropy, ("ignore_class", "reduction")),
        (training.ContrastiveLoss, ("matryoshka_dims", "matryoshka_weights")),
        (training.PreferenceLoss, ("reference_free", "length_normalized")),
    ],
)
def test_optimizers_losses_and_metrics_check_theirs(make, names):
    for name in names:
        refused(f"{name} is {NOTHING!r}; give ", make, **{name: NOTHING})


FLAGS = (bool, bool | None)
FLAGS_AND_NUMBERS = (*FLAGS, int, float, int | None, float | None)


def arguments_of(function, kinds):
    """Returns the names of a function's arguments with these annotations."""
    parameters = inspect.signature(function).parameters
    if not parameters.keys().isdisjoint(("training", "caches")):
        return []  # it runs in each step
    named = [p for p in parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return [p.name for p in named if p.annotation in kinds]


def public_methods():
    classes = [x for x in public_classes() if getattr(x, "checks_methods", False)]
    names = {(x, name) for x in classes for name in dir(x) if not name.startswith(("_", "on_"))}
    methods = [method for x, name in names if inspect.isroutine(method := getattr(x, name, None))]
    named = {x.__qualname__: x for x in methods if x.__module__.startswith("kmodels")}
    return [
        method for _, method in sorted(named.items()) if arguments_of(method, FLAGS_AND_NUMBERS)
    ]


@pytest.mark.parametrize("method", public_methods(), ids=lambda method: method.__qualname__)
def test_methods_check_theirs(method):
    first = () if inspect.ismethod(method) else (None,)  # a class method, or one without an object
    for name in arguments_of(method, FLAGS_AND_NUMBERS):
        refused(f"^{name} is {NOTHING!r}; give ", method, *first, **{name: NOTHING})


def public_functions():
    modules = (kmodels, models, generation, data, text, training, transforms)
    each = {name: getattr(module, name) for module in modules for name in module.__all__}
    functions = [x for _, x in sorted(each.items()) if inspect.isfunction(x)]
    return [x for x in functions if arguments_of(x, FLAGS)]


@pytest.mark.parametrize("function", public_functions(), ids=lambda x: x.__name__)
def test_public_functions_check_their_flags(function):
    parameters = inspect.signature(function).parameters.values()
    simple = {int: 1, str: ""}
    others = {p.name: simple.get(p.annotation) for p in parameters if p.default is p.empty}
    for name in arguments_of(function, FLAGS):
        refused(f"^{name} is {NOTHING!r}; give ", function, **{**others, name: NOTHING})
