"""Every op's generic body against its definition, and every override against that body."""

import functools
import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import kmodels
from gradients import assert_near, first, to_numpy, value_and_grad
from kmodels import ops
from kmodels.core import dispatch
from numpy_attention import attention
from op_cases import DEFINITIONS, cases, few_cases, without_rows
from source_tree import decorated
from tolerances import tolerance

REPOSITORY = Path(__file__).parents[3]
FOLDER = REPOSITORY / "src" / "kmodels" / "overrides"
BACKEND = keras.backend.backend()
DTYPES = ["float32", "bfloat16", "float16", "float64"]
if BACKEND == "jax":
    DTYPES.remove("float64")  # of which JAX makes float32, unless it is told not to


# JAX compiles in any case, a program for each operation that runs by itself.
COMPILED = BACKEND == "jax"
HALF = ("bfloat16", "float16")
MULTIPLY = {"attention", "dense", "grouped_dense", "linear_cross_entropy", "mlp", "patch_embedding"}


@pytest.fixture(autouse=True)
def processor(request, monkeypatch) -> None:
    """Has this stand for a processor without products of half precision, or for one with them.

    What is chosen by the maker of the processor is tested on all of them.
    """
    chosen = (
        request.node.callspec.params.get("lacks") if hasattr(request.node, "callspec") else None
    )
    if BACKEND == "torch":
        import torch

        from kmodels.overrides import _tensors_torch, dense_torch

        monkeypatch.setattr(dense_torch, "mkl_is_slow", lambda: True)
        if chosen is not None:
            lacking = {torch.bfloat16, torch.float16} if chosen else set()
            monkeypatch.setattr(_tensors_torch, "LACKING", lacking)
    if BACKEND == "tensorflow":
        from kmodels.overrides import _tensors_tensorflow, attention_tensorflow, dense_tensorflow

        cuts = lambda dtype: chosen is not False and dtype.size == 2  # noqa: E731
        monkeypatch.setattr(dense_tensorflow, "truncates", cuts)
        if chosen is not None:
            for module in (_tensors_tensorflow, attention_tensorflow):
                monkeypatch.setattr(module, "truncates", cuts)


def shaped(body, *tensors):
    """What a body gives, or on JAX, which would compile each operation, its shape and dtype."""
    if BACKEND != "jax":
        return body(*tensors)
    import jax

    return jax.eval_shape(body, *tensors)


CASES = cases()
FEW = {case[:2] for case in few_cases()}


def parity():
    """Calls by their numbers, in each dtype, on processors of both kinds that multiply."""
    for number, (name, label, *_) in enumerate(CASES):
        # Products without an override are the backend's own in each dtype.
        plain = name in MULTIPLY and not getattr(ops, name).override
        for dtype in DTYPES[:1] if plain else DTYPES:
            both = dtype in HALF and name in MULTIPLY and (name, label) in FEW and BACKEND != "jax"
            for lacks in (True, False) if both else [None]:
                kind = "" if lacks is None else "-lacks" if lacks else "-has"
                yield pytest.param(number, dtype, lacks, id=f"{name}-{label}-{dtype}{kind}")


@functools.cache
def by_the_generic_body(number: int, dtype: str):
    """Value and gradients, unrounded, of what tensors of a dtype hold.

    In bfloat16 XLA 0.12 adds some products of the generic body up in bfloat16, and is itself 3 %
    off (docs/measured/precision.md).
    """
    name, _, arrays, keywords = CASES[number]
    op = getattr(ops, name)
    held = [to_numpy(keras.ops.convert_to_tensor(x, dtype)) for x in arrays]
    wide = "float64" if dtype == "float64" else "float32"
    generic = lambda *x: first(op.generic(*x, **keywords))  # noqa: E731
    found = value_and_grad(generic, *held, dtype=wide, compiled=COMPILED)
    right = DEFINITIONS[name](*(x.astype("float64") for x in held), **keywords)
    assert_near([found[0]], [right], tolerance(name, wide))
    if name == "attention" and keywords:  # without what it is given the result would be another one
        assert np.abs(right - attention(*held)).max() > 100 * tolerance(name)
    return found


@pytest.mark.parametrize(("number", "dtype", "lacks"), list(parity()))
def test_parity(number, dtype, lacks) -> None:
    """The op's generic body against its definition, and the override against that body."""
    name, _, arrays, keywords = CASES[number]
    op = getattr(ops, name)
    expected, expected_gradients = by_the_generic_body(number, dtype)
    tensors = [keras.ops.convert_to_tensor(x, dtype) for x in arrays]
    reason = op.override and op.declines(*tensors, **keywords)
    served = op.override is not None and not reason
    if lacks and BACKEND == "tensorflow":
        assert served or name not in ("attention", "dense")
    body: Any = op.override if served else op
    dispatch.reset_decisions()
    value, gradients = value_and_grad(
        lambda *x: first(body(*x, **keywords)), *arrays, dtype=dtype, compiled=COMPILED
    )
    if not served:
        counts = {"override": 0, "generic": 0, reason: 1} if reason else {"generic": 1}
        assert kmodels.decisions()[name] == {"override": 0, **counts}
        if dtype in HALF and lacks is None and name in MULTIPLY:
            return  # the generic body rounds between its products
    generic = first(shaped(lambda *x: op.generic(*x, **keywords), *tensors))
    assert value.dtype == generic.dtype
    assert value.shape == generic.shape
    assert_near([value, *gradients], [expected, *expected_gradients], tolerance(name, dtype))


@pytest.mark.parametrize(
    ("name", "label", "arrays", "keywords"),
    [without_rows(case) for case in few_cases()],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_batch_of_0(name, label, arrays, keywords) -> None:
    """As a filter may leave one: a result of the right shape, and gradients of zeros."""
    op = getattr(ops, name)
    value, gradients = value_and_grad(
        lambda *x: first(op(*x, **keywords)), *arrays, compiled=COMPILED
    )
    tensors = map(keras.ops.convert_to_tensor, arrays)
    expected = first(shaped(lambda *x: op.generic(*x, **keywords), *tensors))
    assert value.dtype == expected.dtype
    assert tuple(value.shape) == tuple(expected.shape)
    assert np.isfinite(to_numpy(value)).all()
    for found, given in zip(gradients, arrays, strict=True):
        assert found.shape == given.shape
        assert not found.any()


def test_the_op_runs_its_override(monkeypatch) -> None:
    """What parity compares is what a call of the op runs, where it does not decline."""
    if BACKEND == "tensorflow":
        from kmodels.overrides import attention_tensorflow

        # The override is for CPUs that truncate half precision.
        monkeypatch.setattr(attention_tensorflow, "truncates", lambda dtype: dtype.size == 2)
    ran = set()
    for name, _, arrays, keywords in cases():
        op = getattr(ops, name)
        for dtype in ("float32", "bfloat16"):
            tensors = [keras.ops.convert_to_tensor(x, dtype) for x in arrays]
            if op.override is not None and op.declines(*tensors, **keywords) is None:
                dispatch.reset_decisions()
                shaped(lambda *x, op=op, keywords=keywords: op(*x, **keywords), *tensors)
                assert kmodels.decisions()[name]["override"] == 1
                ran.add(name)
    assert ran == {case[0] for case in cases() if getattr(ops, case[0]).override is not None}


OVERRIDES = decorated("overrides", "override")


def test_each_override_file_holds_a_registered_override() -> None:
    mine = [name for name in OVERRIDES if name.endswith(f"_{BACKEND}")]
    registered = [op.override.__name__ for op in dispatch.ops().values() if op.override is not None]
    assert sorted(registered) == sorted(mine)
    # All files are one of the three backends'; nothing lies there unused.
    files = {path.stem for path in FOLDER.glob("[!_]*_*.py")}
    assert files == {Path(file).stem for file in OVERRIDES.values()}
    assert all(stem.rsplit("_", 1)[1] in ("jax", "torch", "tensorflow") for stem in files)
    for name, file in OVERRIDES.items():
        assert name.rpartition("_")[2] == Path(file).stem.rpartition("_")[2]


@pytest.mark.once
@pytest.mark.parametrize("name", sorted(OVERRIDES))
def test_each_override_was_measured_to_pay(name: str) -> None:
    backend = name.rsplit("_", 1)[1]
    rows = [
        row
        for path in (REPOSITORY / "benchmarks" / "results").glob(f"ops_{backend}_*.json")
        for row in json.loads(path.read_text())["rows"]
        if row["override"] == name and row["declines"] is None
    ]
    assert rows, f"no benchmark result for {name}: run benchmarks/ops.py --write"
    assert min(min(row["time_ratio"], row.get("memory_ratio", 1.0)) for row in rows) < 1
