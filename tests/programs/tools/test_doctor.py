"""`kmodels doctor` and the command line around it."""

import json

import keras
import pytest

import kmodels
from command_line import run
from kmodels.core import dispatch
from kmodels.tools import doctor

BACKEND = keras.backend.backend()


@pytest.mark.each_backend
def test_json_holds_what_the_process_runs_on(capsys) -> None:
    assert run("doctor", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["backend"] == BACKEND
    assert found["versions"]["kmodels"] == kmodels.__version__
    assert found["versions"]["keras"] == keras.__version__
    assert found["devices"]
    assert found["dtype_policy"] == "float32"
    assert set(found["ops"]) >= {"attention", "dense", "dropout", "gelu", "layer_norm"}
    for name, entry in found["ops"].items():
        override = dispatch.ops()[name].override
        assert entry["override"] == (None if override is None else override.__name__)
        assert (entry["path"] == "override") == (entry["reason"] is None)
        if override is None:
            assert entry["reason"] == f"no override for {BACKEND}"
        assert {case["dtype"] for case in entry["cases"]} == {"float32", "bfloat16"}
        for case in entry["cases"]:
            assert (case["path"] == "generic") == (case["reason"] is not None)
            assert not (case["reason"] and case["measured"])


@pytest.mark.parametrize(
    ("installed", "line"),
    [
        ("2.8.1", "keras 2.8.1 is older than the tests passed with: 2.9.0 to 2.13.0"),
        ("2.9.0", None),
        ("2.13.0+cpu", None),
        ("2.13.1", "keras 2.13.1 is newer than the tests passed with: 2.9.0 to 2.13.0"),
    ],
)
def test_a_version_outside_of_what_passed_is_named(installed, line, tmp_path, monkeypatch) -> None:
    file = tmp_path / "versions.json"
    runs = (
        (BACKEND, "2.13.0", 0),
        (BACKEND, "2.9.0", 0),
        (BACKEND, "2.14.0", 1),
        ("other", "1.0", 0),
    )
    rows = [dict(zip(("backend", "keras", "failed"), run, strict=True)) for run in runs]
    file.write_text(json.dumps(rows))
    monkeypatch.setattr(doctor, "VERSIONS", file)
    monkeypatch.setattr(keras, "__version__", installed)
    assert doctor.report()["untested"] == ([line] if line else [])


def cases(name: str) -> dict:
    return {(case["case"], case["dtype"]): case for case in doctor.report()["ops"][name]["cases"]}


@pytest.mark.each_backend
def test_the_path_of_attention_is_told_by_dtype_dropout_and_length(monkeypatch) -> None:
    if BACKEND == "torch":
        import torch

        from kmodels.overrides import _tensors_torch

        monkeypatch.setattr(_tensors_torch, "LACKING", {torch.bfloat16})
        path = cases("attention")["8x197x6x64 dropout 0.0", "bfloat16"]["path"]
        if keras.ops.zeros(1).device.type == "cpu":
            assert path == "products in float32, since this CPU has none of half precision"
        monkeypatch.setattr(_tensors_torch, "LACKING", frozenset())
    if BACKEND == "tensorflow":
        from kmodels.overrides import attention_tensorflow

        monkeypatch.setattr(attention_tensorflow, "truncates", lambda dtype: dtype.size == 2)
        path = cases("attention")["8x197x6x64 soft cap", "bfloat16"]["path"]
        assert path == (
            "the op's own body in float32, since this CPU rounds no products of bfloat16"
        )
        monkeypatch.setattr(attention_tensorflow, "truncates", lambda dtype: False)
    paths = {key: case["path"] for key, case in cases("attention").items()}
    images, dropped = "8x197x6x64 dropout 0.0", "8x197x6x64 dropout 0.1"
    if BACKEND == "torch":
        assert paths["1x1024x6x64", "float32"] == "SDPA"
        if keras.ops.zeros(1).device.type == "cpu":
            assert paths[images, "float32"] == "SDPA"
            assert paths[dropped, "float32"] == paths[images, "bfloat16"] == "generic"
    elif BACKEND == "jax":
        assert paths[images, "float32"] == "generic"
        assert paths[dropped, "float32"] == paths[images, "bfloat16"] == "loops over 2 blocks"
        assert paths["1x1024x6x64 causal", "float32"] == "loops over 8 blocks"
    else:
        assert set(paths.values()) == {"generic"}
    capped = {paths["8x197x6x64 soft cap", dtype] for dtype in ("float32", "bfloat16")}
    if BACKEND != "torch" or keras.ops.zeros(1).device.type == "cpu":
        assert capped == {"generic", *["loops over 2 blocks"] * (BACKEND == "jax")}


def test_what_was_measured_stands_with_its_file(capsys, monkeypatch, tmp_path) -> None:
    case, dtype = "1x1024x6x64 causal", "float32"
    row = {"override": f"attention_{BACKEND}", "case": case, "dtype": dtype, "time_ratio": 0.5}
    file = tmp_path / f"ops_{BACKEND}_cpu_2026-01-01.json"
    rows = [{**row, "memory_ratio": 0.25, "declines": None}]
    rows.append({**rows[0], "dtype": "bfloat16", "declines": "was slower"})
    file.write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(doctor, "RESULTS", tmp_path)
    found = cases("attention")
    assert found[case, dtype]["measured"] == {file.name: {"time": 0.5, "memory": 0.25}}
    # What was measured while it declined decided against it.
    assert not found[case, "bfloat16"]["measured"]
    monkeypatch.setenv("COLUMNS", "300")
    assert run("doctor", "--ops") == 0
    printed = capsys.readouterr().out
    assert "time 0.50, memory 0.25 (1)" in printed
    assert f"(1) benchmarks/results/{file.name}" in printed


def test_doctor_covers_every_op_and_counts_nothing() -> None:
    dispatch.reset_decisions()
    assert set(doctor.report()["ops"]) == set(dispatch.ops())
    assert all(not sum(counts.values()) for counts in kmodels.decisions().values())


@pytest.mark.each_backend
def test_switched_off_ops_say_so() -> None:
    with kmodels.generic_only():
        found = doctor.report()["ops"]
    for entry in found.values():
        if entry["override"] is not None:
            assert entry["reason"] == "turned off by generic_only()"
            assert {case["path"] for case in entry["cases"]} == {"generic"}


@pytest.mark.each_backend
def test_table_shows_reasons_and_why_blocks_are_compiled_or_not(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")  # so that no reason is broken over lines
    assert run("doctor") == 0
    printed = capsys.readouterr().out
    assert BACKEND in printed and "run an override" in printed and "--ops" in printed
    assert f"no override for {BACKEND}" not in printed
    assert run("doctor", "--ops") == 0
    printed = capsys.readouterr().out
    assert "gelu" in printed
    assert f"no override for {BACKEND}" in " ".join(printed.split())
    assert run("doctor", "--json") == 0
    told = json.loads(capsys.readouterr().out)["jit_compile"]
    assert ("measured" if BACKEND == "torch" else "Keras compiles the whole step") in told
    assert told.split()[0] in printed.split("jit compile")[1]
