"""Every override of the running backend against its op's generic body: values and gradients."""

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import kmodels
import op_cases
from gradients import to_numpy, value_and_grad
from kmodels import dispatch, ops
from tolerances import tolerance

REPOSITORY = Path(__file__).parents[2]
OVERRIDES = REPOSITORY / "src" / "kmodels" / "overrides"
RNG = np.random.default_rng(1)
TURNS = np.array([[0, 1, 2, 3, 4], [7, 8, 0, 1, 900]])
ROTARY = {"positions": TURNS, "max_wavelength": 100.0, "scaling": 4.0}


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype("float32")


def cases() -> list[tuple[str, str, list[np.ndarray], dict[str, Any]]]:
    """(op, label, arrays to differentiate by, keyword arguments)."""
    found = [
        (
            "attention",
            case.name,
            op_cases.arrays(case),
            case.keywords | ({"mask": op_cases.mask(case)} if case.mask else {}),
        )
        for case in op_cases.ATTENTION
        if "soft_cap" not in case.keywords
    ]
    found += [
        ("layer_norm", "with bias", [normal(2, 5, 12) + 3, normal(12), normal(12)], {}),
        ("layer_norm", "no bias", [normal(3, 12), normal(12)], {"epsilon": 0.1}),
        ("rms_norm", "three axes", [normal(2, 5, 12) * 3, normal(12)], {"epsilon": 0.01}),
        ("gelu", "three axes", [normal(2, 5, 12) * 2], {}),
        ("gated_gelu", "three axes", [normal(2, 5, 12) * 2, normal(2, 5, 12)], {}),
        (
            "mlp",
            "three axes",
            [normal(2, 5, 6), normal(6, 8), normal(8), normal(8, 4) / 3, normal(4)],
            {},
        ),
        (
            "mlp",
            "large, tanh form",
            [
                normal(2, 64, 96),
                normal(96, 192) / 10,
                normal(192),
                normal(192, 96) / 14,
                normal(96),
            ],
            {"approximate": True},
        ),
        (
            "mlp",
            "quick GELU",
            [normal(2, 5, 6), normal(6, 8), normal(8), normal(8, 4) / 3, normal(4)],
            {"approximate": "sigmoid"},
        ),
        ("dense", "three axes", [normal(2, 5, 6), normal(6, 4), normal(4)], {}),
        ("dense", "one row", [normal(1, 1, 6), normal(6, 4), normal(4)], {}),
        ("dense", "large", [normal(2, 64, 96), normal(96, 192), normal(192)], {}),
        ("dense", "four axes, no bias", [normal(2, 3, 5, 6), normal(6, 4)], {}),
        ("rotary_embedding", "row of positions", [normal(2, 5, 3, 8)], {"positions": TURNS[0]}),
        ("rotary_embedding", "two rows", [normal(2, 5, 3, 8)], ROTARY),
        (
            "patch_embedding",
            "with bias",
            [normal(2, 8, 12, 3) * 0.3, normal(48, 6), normal(6)],
            {"patch_size": 4},
        ),
        (
            "patch_embedding",
            "no bias",
            [normal(1, 6, 4, 1), normal(4, 6)],
            {"patch_size": 2},
        ),
    ]
    return found


@pytest.fixture(autouse=True)
def on_every_processor(monkeypatch) -> None:
    """What is chosen by the maker of the processor is tested on all of them."""
    if keras.backend.backend() == "torch":
        from kmodels.overrides import dense_torch

        monkeypatch.setattr(dense_torch, "mkl_is_slow", lambda: True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "label", "arrays", "keywords"), cases(), ids=lambda x: x if isinstance(x, str) else ""
)
def test_parity(name, label, arrays, keywords, dtype) -> None:
    op = getattr(ops, name)
    if op.override is None:
        dispatch.reset_decisions()
        op(*(keras.ops.convert_to_tensor(x) for x in arrays), **keywords)
        assert kmodels.decisions()[name] == {"override": 0, "generic": 1}
        return
    tensors = [keras.ops.convert_to_tensor(x, dtype) for x in arrays]
    if reason := op.declines(*tensors, **keywords):
        dispatch.reset_decisions()
        op(*tensors, **keywords)
        assert kmodels.decisions()[name] == {"override": 0, "generic": 0, reason: 1}
        return
    value, gradients = value_and_grad(lambda *x: op.override(*x, **keywords), *arrays, dtype=dtype)
    expected, expected_gradients = value_and_grad(
        lambda *x: op.generic(*x, **keywords), *arrays, dtype=dtype
    )
    assert value.dtype == expected.dtype
    assert value.shape == expected.shape
    allowed = tolerance(name, dtype)
    expected = to_numpy(expected)
    scale = max(1.0, np.abs(expected).max())
    assert np.abs(to_numpy(value) - expected).max() <= allowed * scale
    for found, wanted in zip(gradients, expected_gradients, strict=True):
        assert np.isfinite(found).all()
        assert np.abs(wanted).max() > 0  # the input matters
        assert np.abs(found - wanted).max() <= allowed * max(1.0, np.abs(wanted).max())


def test_the_op_runs_its_override() -> None:
    """What parity compares is what a call of the op runs, where it does not decline."""
    dispatch.reset_decisions()
    ran = {}
    for name, _, arrays, keywords in cases():
        op = getattr(ops, name)
        for dtype in ("float32", "bfloat16"):
            tensors = [keras.ops.convert_to_tensor(x, dtype) for x in arrays]
            if op.override is not None and op.declines(*tensors, **keywords) is None:
                op(*tensors, **keywords)
                ran[name] = ran.get(name, 0) + 1
    assert set(ran) == {case[0] for case in cases() if getattr(ops, case[0]).override is not None}
    for name, count in ran.items():
        assert kmodels.decisions()[name]["override"] == count


def test_layer_norm_keeps_a_wider_scale() -> None:
    if ops.layer_norm.override is None:
        assert "no override" in ops.layer_norm.declines(keras.ops.ones((1, 2)), keras.ops.ones(2))
        return
    x, scale = keras.ops.cast(normal(4, 16), "bfloat16"), np.full(16, 1 + 2**-10, "float32")
    expected = ops.layer_norm.generic(x, scale)
    output = ops.layer_norm.override(x, scale)
    assert output.dtype == expected.dtype
    assert (to_numpy(output) == to_numpy(expected)).mean() > 0.95


def files() -> list[str]:
    return sorted(path.stem for path in OVERRIDES.glob("*_*.py") if path.stem != "__init__")


def test_each_override_file_holds_a_registered_override() -> None:
    backend = keras.backend.backend()
    mine = [stem for stem in files() if stem.endswith(f"_{backend}")]
    registered = [op.override.__name__ for op in dispatch.ops().values() if op.override is not None]
    assert sorted(registered) == mine
    # All files are one of the three backends'; nothing lies there unused.
    assert all(stem.rsplit("_", 1)[1] in ("jax", "torch", "tensorflow") for stem in files())


@pytest.mark.parametrize("stem", files())
def test_each_override_was_measured_to_pay(stem: str) -> None:
    backend = stem.rsplit("_", 1)[1]
    rows = [
        row
        for path in (REPOSITORY / "benchmarks" / "results").glob(f"ops_{backend}_*.json")
        for row in json.loads(path.read_text())["rows"]
        if row["override"] == stem and row["declines"] is None
    ]
    assert rows, f"no benchmark result for {stem}: run benchmarks/ops.py --write"
    assert min(min(row["time_ratio"], row.get("memory_ratio", 1.0)) for row in rows) < 1
