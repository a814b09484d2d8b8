"""Strict loading both ways, everything listed, nothing half-loaded; and export as the inverse."""

import keras
import numpy as np
import pytest

from arrays import to_numpy
from kmodels.core.errors import InputError
from kmodels.weights import LazyArray, Rule, export, load, transpose
from kmodels.weights.engine import variables
from kmodels.weights.gather import values
from kmodels.weights.rules import bind_sources
from refusals import refused

RULES = [
    Rule("h.{i}.qkv.weight", [f"block_{{i}}_{part}/kernel" for part in "qkv"], transpose),
    Rule("h.{i}.qkv.bias", [f"block_{{i}}_{part}/bias" for part in "qkv"]),
    Rule("head.weight", "head/kernel", transpose),
    Rule("head.bias", "head/bias"),
]


def _model():
    inputs = keras.Input((4,))
    x = inputs
    for i in (0, 10):
        parts = [keras.layers.Dense(4, name=f"block_{i}_{part}")(x) for part in "qkv"]
        x = keras.layers.Add(name=f"add_{i}")(parts)
    return keras.Model(inputs, keras.layers.Dense(3, name="head")(x))


def _file(seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"head.weight": (3, 4), "head.bias": (3,)}
    for i in (0, 10):
        shapes |= {f"h.{i}.qkv.weight": (12, 4), f"h.{i}.qkv.bias": (12,)}
    return {name: _lazy(rng.normal(size=shape).astype("float32")) for name, shape in shapes.items()}


def _lazy(x):
    return LazyArray(x.shape, x.dtype, lambda: x)


@pytest.fixture(scope="module")
def model():
    return _model()


@pytest.mark.each_backend
def test_fused_and_transposed_tensors_arrive_and_come_back(model):
    source = _file()
    assert load(model, source, RULES) == sum(x.read().size for x in source.values())
    fused = source["h.10.qkv.weight"].read()
    np.testing.assert_array_equal(to_numpy(model.get_layer("block_10_k").kernel), fused[4:8].T)
    back = export(model, RULES)
    assert sorted(back) == sorted(source)
    for name, tensor in source.items():
        assert (back[name].shape, back[name].dtype) == (tensor.shape, tensor.dtype)
        assert back[name].read().tobytes() == tensor.read().tobytes()


def test_everything_wrong_is_listed_and_nothing_is_assigned(model):
    load(model, _file(), RULES)
    before = {path: values(x) for path, x in variables(model).items()}
    source = _file(1)
    source["head.weight"] = _lazy(np.zeros((4, 3), "float32"))
    source["head.bias"] = _lazy(np.zeros(3, "uint8"))
    source["stray"] = source.pop("h.0.qkv.bias")
    source["h.7.qkv.bias"] = source["h.10.qkv.bias"]
    with pytest.raises(InputError) as raised:
        load(model, source, RULES, origin="x.safetensors")
    text = str(raised.value)
    assert text.startswith("x.safetensors does not fit the model: ")
    assert "2 tensors without a variable: stray, h.7.qkv.bias" in text
    assert "3 variables without a tensor: block_0_q/bias, block_0_k/bias, block_0_v/bias" in text
    assert "1 wrong shapes: head.weight is (4, 3), the model needs (3, 4)" in text
    assert "1 tensors of whole numbers, which may be packed weights: head.bias is uint8" in text
    assert "\n" not in text
    after = {path: values(x) for path, x in variables(model).items()}
    assert all(after[path].tobytes() == x.tobytes() for path, x in before.items())


def test_long_lists_are_cut(model):
    source = _file() | {f"stray.{i}": _lazy(np.zeros(1)) for i in range(20)}
    refused(r"20 tensors without a variable: .* and 12 more", load, model, source, RULES)


def test_skipped_parts_keep_their_values(model):
    load(model, _file(), RULES)
    head = to_numpy(model.get_layer("head").kernel)
    source = _file(1) | {"head.weight": _lazy(np.zeros((9, 4), "float32"))}
    load(model, source, RULES, skip=("head/",))
    np.testing.assert_array_equal(to_numpy(model.get_layer("head").kernel), head)
    kernel = to_numpy(model.get_layer("block_0_q").kernel)
    np.testing.assert_array_equal(kernel, source["h.0.qkv.weight"].read()[:4].T)


def test_a_variable_is_filled_once(model):
    source = _file() | {"head.again": _lazy(np.zeros(3, "float32"))}
    with pytest.raises(InputError, match=r"1 tensors without a variable: head\.again"):
        load(model, source, [*RULES, Rule("head.again", "head/bias")])


@pytest.mark.each_backend
def test_values_are_cast_to_the_variables_dtype():
    inputs = keras.Input((2,))
    half = keras.Model(inputs, keras.layers.Dense(2, name="d", dtype="bfloat16")(inputs))
    source = {"d/kernel": _lazy(np.full((2, 2), 1.001)), "d/bias": _lazy(np.zeros(2, "float16"))}
    load(half, source, [Rule(name, name) for name in source])
    back = export(half, [Rule(name, name) for name in source])
    assert back["d/kernel"].dtype.name == "bfloat16"
    assert back["d/kernel"].read().astype("float32").tolist() == [[1, 1], [1, 1]]


def test_a_format_without_a_place_for_a_variable_is_refused(model):
    refused("no place for 2 variables: head/kernel, head/bias", export, model, RULES[:2])
    partial = [*RULES[:3], Rule("head.bias", ["head/bias", "head/more"])]
    refused("also needs 1 variables: head/more, which are not there", export, model, partial)


def test_two_variables_of_one_path_are_refused():
    twice = _model()
    for variable in twice.weights[:2]:
        variable._path = "same"
    refused("two variables are called same; give the layers different", variables, twice)


def test_names_match_as_a_whole():
    bound = bind_sources(
        RULES, ["h.12.qkv.bias", "xh.1.qkv.bias", "h.1.qkv.bias.x", "h.a.qkv.bias"]
    )
    rule = bound["h.12.qkv.bias"]
    assert rule is not None and rule.targets[0] == "block_12_q/bias"
    assert [name for name, rule in bound.items() if rule is None] == list(bound)[1:]
