"""`kmodels doctor` and the command line around it."""

import json

import keras
import pytest

import kmodels
from kmodels import cli, dispatch, doctor

BACKEND = keras.backend.backend()


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        cli.main(list(arguments))
    return stopped.value.code


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


def test_doctor_covers_every_op_and_counts_nothing() -> None:
    dispatch.reset_decisions()
    assert set(doctor.report()["ops"]) == set(dispatch.ops())
    assert all(not sum(counts.values()) for counts in kmodels.decisions().values())


def test_switched_off_ops_say_so() -> None:
    with kmodels.generic_only():
        found = doctor.report()["ops"]
    for entry in found.values():
        if entry["override"] is not None:
            assert entry["reason"] == "turned off by generic_only()"


def test_table_shows_reasons(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")  # so that no reason is broken over lines
    assert run("doctor") == 0
    printed = capsys.readouterr().out
    assert BACKEND in printed
    assert "gelu" in printed
    assert f"no override for {BACKEND}" in " ".join(printed.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("doctor", "--jsn"), "--jsn"), (("nope",), "nope"), ((), "Missing command")],
)
def test_wrong_usage_is_one_line_and_exit_code_2(arguments, message, capsys) -> None:
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert len(captured.err.strip().splitlines()) == 1
    assert captured.err.startswith("kmodels: ")
    assert message in captured.err
