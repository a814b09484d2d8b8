"""`kmodels parity --op` proves a body of an op, or names the cases in which it is wrong."""

import json

import keras
import pytest

from command_line import run
from kmodels import ops
from kmodels.tools import op_parity

BACKEND = keras.backend.backend()
BODIES = f"""
import keras
import kmodels

@kmodels.override("rms_norm", backend="{BACKEND}")
def own_norm(x, scale, epsilon, offset):
    wide = keras.ops.cast(x, "float32")
    y = wide * keras.ops.rsqrt(keras.ops.mean(wide * wide, -1, keepdims=True) + epsilon)
    if scale is not None:
        y = y * (offset + keras.ops.cast(scale, "float32"))
    return keras.ops.cast(y, x.dtype)

@kmodels.override("gelu", backend="{BACKEND}")
def tanh_gelu(x, approximate):
    return keras.ops.gelu(x, approximate=True)

@kmodels.override("gated_silu", backend="{BACKEND}")
def half_detached(gate, up):
    return keras.ops.silu(gate) * keras.ops.stop_gradient(up)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(BODIES)
    yield path
    for op in (ops.rms_norm, ops.gelu, ops.gated_silu):
        op.set_user(None)


def test_a_body_that_is_right_passes(file, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run("parity", "--op", "rms_norm", "--override", file, "--out", tmp_path) == 0
    assert "6 of 6 calls ran on" in (printed := capsys.readouterr().out)
    assert "values and gradients within the tolerance" in printed and "own_norm" in printed
    result = json.loads((tmp_path / "parity.json").read_text())
    assert result["equal"] and result["backend"] == BACKEND
    for row in result["rows"]:
        assert 0 <= row["value"] <= 1 and 0 <= row["gradients"] <= 1


def test_a_wrong_value_and_a_missing_gradient_are_named(file, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run("parity", "--override", file) == 1
    result = op_parity.run(["gelu", "gated_silu"], file)
    rows = {(row["case"], row["dtype"]): row for row in result["rows"] if row["op"] == "gelu"}
    assert rows["tanh form", "float32"]["error"] is None
    wrong = rows["three axes", "float32"]
    assert wrong["value"] > 1 and "times the tolerance of 1e-06" in wrong["error"]
    cut = [row for row in result["rows"] if row["op"] == "gated_silu"]
    # JAX has zeros for a gradient that was stopped.
    reason = "not differentiable" if BACKEND != "jax" else "times the tolerance"
    assert cut and all(reason in row["error"] and row["value"] <= 1 for row in cut)
    assert "of them failed" in capsys.readouterr().out


def test_overrides_of_kmodels_and_calls_that_they_decline() -> None:
    name = next(name for name in ("layer_norm", "gelu") if getattr(ops, name).override is not None)
    result = op_parity.run([name])
    ran = [row for row in result["rows"] if row["declined"] is None]
    assert ran and result["equal"]
    assert {row["body"] for row in ran} == {f"{name}_{BACKEND}"}


@pytest.mark.each_backend
def test_what_cannot_be_compared_is_one_line(tmp_path, capsys) -> None:
    empty = tmp_path / "empty.py"
    empty.write_text("")
    for words, message in (
        (("--op", "dropout"), "--op dropout has no cases, since its results are random"),
        (("--op", "atention"), "--op atention is no op; give one of attention"),
        (("--override", empty), f"empty.py registers no override for {BACKEND}"),
        (("--op", "gelu", "--override", empty), "registers no override of gelu for"),
        (("--op", "patch_embedding"), f"kmodels has no override of patch_embedding for {BACKEND}"),
        (("vit_debug", "--op", "gelu"), "compare ops without a model; leave PRESET out"),
        ((), "parity needs a preset, or --op NAME"),
    ):
        assert run("parity", *words) == 2
        assert message in capsys.readouterr().err


def test_doctor_shows_it(file, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert run("doctor", "--ops", "--override", file) == 0
    printed = capsys.readouterr().out
    assert "your overrides" in printed and "own_norm (rms_norm)" in printed
    assert run("doctor", "--json") == 0
    entry = json.loads(capsys.readouterr().out)["ops"]["rms_norm"]
    assert entry["user"] == "own_norm"
    assert {case["path"] for case in entry["cases"]} == {"own_norm"}
