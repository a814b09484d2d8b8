"""`kmodels parity --op`: compares a body of an op with the op's generic one, case by case."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from kmodels.core import runtime
from kmodels.core.dispatch import backend, backend_module, generic_only, ops
from kmodels.core.errors import InputError, one_line
from kmodels.core.types import Tensor
from kmodels.overrides import user
from kmodels.tools.compare_backends.parity import difference
from kmodels.tools.doctor import DoctorBackend
from kmodels.tools.op_cases import TOLERANCES, OpCase, cases, large_cases

DTYPES = ("float32", "bfloat16")


def run(names: Sequence[str] = (), file: Path | None = None) -> dict[str, Any]:
    """Compares values and gradients with those of the generic body in float32.

    Args:
        names: ops; by default those that the file registers.
        file: a Python file that registers bodies with `kmodels.override`; without it the overrides
            of kmodels are compared.

    Returns:
        `backend`; `rows`, each with `op`, `case`, `dtype`, `body` (name of the function),
        `declined` (the reason, or None), `value` and `gradients` (largest difference over the
        tolerance) and `error`; and `equal`: True if a case ran and none differs by more than the
        tolerance.

    Raises:
        InputError: for an unknown op, one without cases, or one without a body to compare.
    """
    if file is not None:
        user.load(file)
    every = [*cases(), *large_cases()]
    known = {case[0] for case in every}
    names = names or [name for name in sorted(known) if ops()[name].user is not None]
    if not names:
        raise InputError(f"{file} registers no override for {backend()}; see kmodels.override")
    for name in names:
        op = ops().get(name)
        if op is None or name not in known:
            reason = "is no op" if op is None else "has no cases, since its results are random"
            raise InputError(f"--op {name} {reason}; give one of {', '.join(sorted(known))}")
        if (op.override if file is None else op.user) is None:
            where = "kmodels has" if file is None else f"{file} registers"
            raise InputError(f"{where} no override of {name} for {backend()}; see kmodels.override")
    runtime.set_matmul_precision("highest")
    rows = [_row(case, dtype) for case in every if case[0] in names for dtype in DTYPES]
    ran = [row for row in rows if row["declined"] is None]
    return {
        "kind": "kmodels op parity",
        "backend": backend(),
        "rows": rows,
        "equal": bool(ran) and all(row["error"] is None for row in ran),
    }


def _row(case: OpCase, dtype: str) -> dict[str, Any]:
    name, label, arrays, keywords = case
    op = ops()[name]
    keywords = {
        key: keras.ops.convert_to_tensor(x) if isinstance(x, np.ndarray) else x
        for key, x in keywords.items()
    }
    tensors = [keras.ops.convert_to_tensor(x, dtype) for x in arrays]
    call = op.bind(*tensors, **keywords)
    body: Any = op.user or op.override
    row: dict[str, Any] = {"op": name, "case": label, "dtype": dtype, "body": body.__name__}
    row |= dict.fromkeys(("declined", "value", "gradients", "error"))
    row["declined"] = op.user.declines(call) if op.user else op.declines(*tensors, **keywords)
    if row["declined"] is not None:
        return row

    def own(*tensors: Tensor) -> Any:
        if op.user is not None:
            return op.user.run(op.bind(*tensors, **keywords))
        return body(*tensors, **keywords)

    wide = [keras.ops.cast(x, "float32") for x in tensors]
    with generic_only():
        expected, slopes = _value_and_gradients(lambda *x: op.generic(*x, **keywords), wide)
    limit, gradients = TOLERANCES[name][dtype], None
    try:
        value, gradients = _value_and_gradients(own, tensors)
    except Exception as error:
        row["error"] = one_line(error)
        try:
            value = _numbers(_first(own(*tensors)))
        except Exception:
            return row
        row["error"] = f"not differentiable: {row['error']}"
    row["value"] = _share(expected, value, limit)
    if gradients is not None:
        if any(gradient is None for gradient in gradients):
            row["error"] = "not differentiable: an argument gets no gradient"
        row["gradients"] = max(
            _share(right, 0 * right if ours is None else ours, limit)
            for right, ours in zip(slopes, gradients, strict=True)
        )
    worst = max(row["value"], row["gradients"] or 0.0)
    if row["error"] is None and not worst <= 1:
        row["error"] = f"differs by {worst:.3g} times the tolerance of {limit:g}"
    return row


def _value_and_gradients(
    function: Callable[..., Any], tensors: list[Any]
) -> tuple[np.ndarray, list[Any]]:
    """Returns the result and its gradients, each weighted by the same random numbers."""

    def total(*values: Tensor) -> tuple[Any, Any]:
        output = _first(function(*values))
        weight = np.random.default_rng(7).normal(size=tuple(output.shape)).astype("float32")
        weight = keras.ops.convert_to_tensor(weight)
        return keras.ops.sum(keras.ops.cast(output, "float32") * weight), output

    engine = backend_module("kmodels.tools.doctor", DoctorBackend)
    value, gradients = engine.gradients(total, tensors)
    return _numbers(value), [None if x is None else _numbers(x) for x in gradients]


def _first(result: Any) -> Any:
    """Returns the first result, which has gradients; linear_cross_entropy has another without."""
    return result[0] if isinstance(result, tuple) else result


def _numbers(x: Tensor) -> np.ndarray:
    return keras.ops.convert_to_numpy(keras.ops.cast(x, "float32"))


def _share(expected: np.ndarray, values: np.ndarray, tolerance: float) -> float:
    one = difference("", expected, values, tolerance, 1.0)
    return float(f"{one.largest / one.allowed:.3g}")
