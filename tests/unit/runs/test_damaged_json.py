"""Damaged JSON files end in one line that names the file and the key, for each of their readers."""

import json
import math
import os

import numpy as np
import pytest
import run_folders

from kmodels.checkpoint import manager
from kmodels.checkpoint.state import STATE_SHAPE, CheckpointError, RunState
from kmodels.core.errors import InputError
from kmodels.core.files import MOST_BYTES
from kmodels.core.schema import NUMBER, Needed, check_shape, read_json
from kmodels.models import ViTImageClassifier
from kmodels.runs import report
from kmodels.runs.run_folder import EVALUATED, NOTED, PREDICTED, RESULT
from kmodels.weights import native
from refusals import refused

# What may stand in place of any value.
VALUES = (
    None,
    [None],
    "x",
    "",
    3,
    -1,
    2**70,
    1.5,
    math.nan,
    math.inf,
    True,
    [],
    [1],
    ["x"],
    {},
    {"x": 1},
    [[[]]],
)
SHAPE = {
    "a": int,
    "b": {"c": [str]},
    "d": {"*": NUMBER},
    "e": bool,
    "f": {},
    "g": [[int]],
    "h": Needed(range(3)),
    "i": ([str], {"b": str}),
    "j": [int] * 2,
}


def test_a_probe_without_a_name_is_one_line(tmp_path):
    result = {**run_folders.RESULT, "probe": {"ways": [{"val": 0.5, "test": 0.5}]}}
    folder = tmp_path / "run"
    run_folders.write(folder, result=result)
    refused("result.json: .*name", report.write, folder)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": "x"}, "file: a is 'x'; give a whole number"),
        ({"a": True}, "file: a is True; give a whole number"),
        ({"a": 1.0}, "file: a is 1.0; give a whole number"),
        ({"b": []}, r"file: b is \[\]; give an object"),
        ({"b": {"c": "x"}}, "file: b: c is 'x'; give a list"),
        ({"b": {"c": ["x", None]}}, r"file: b: c\[1\] is missing or null; give a text"),
        ({"b": {"c": ["x", 1]}}, r"file: b: c\[1\] is 1; give a text"),
        ({"d": {"x": math.nan}}, "file: d: x is nan; give a number$"),
        ({"e": 1}, "file: e is 1; give true or false"),
        ({"f": "x" * 99}, "file: f is 'xxx.*; give an object"),
        ({"g": [[1], ["x"]]}, r"file: g\[1\]\[0\] is 'x'"),
        ({"j": [1]}, r"file: j is \[1\]; give a list of 2$"),
        ({"j": [1, "x"]}, r"file: j\[1\] is 'x'; give a whole number"),
        ({"h": 3}, "file: h is 3; give a whole number from 0 to 2$"),
        ({"h": None}, "file: h is missing or null; give a whole number from 0 to 2$"),
        ({}, "file: h is missing or null"),
        ({"a": 2**70}, "file: a is 1180591620717411303424; give a whole number$"),
        ({"i": [None]}, r"file: i\[0\] is missing or null"),
        ({"i": [3]}, r"file: i\[0\] is 3; give a text$"),
        ({"i": "x"}, r"file: i is 'x'; give a list or an object$"),
        ({"i": {"b": 1}}, "file: i: b is 1; give a text$"),
    ],
)
def test_a_value_of_another_shape_is_named(value, message):
    given = value if "h" in value or not value else {**value, "h": 1}
    refused(message, check_shape, given, SHAPE, "file")


def test_what_is_absent_null_or_unknown_passes():
    for value in ({}, dict.fromkeys(SHAPE), {"b": {"c": None}, "other": object()}):
        check_shape({**value, "h": 1}, SHAPE, "file")


@pytest.mark.parametrize("content", ["", "[]", "3", "{", "\ud800", "[" * 10**5, '{"a": 1e}'])
def test_a_file_without_an_object_is_one_line(tmp_path, content):
    file = tmp_path / "file.json"
    file.write_text(content, errors="surrogatepass")
    refused("file.json", read_json, file)


@pytest.mark.parametrize(
    ("levels", "size", "message"),
    [
        (65, 0, "it is nested more than 64 levels deep"),
        (400, 0, "it is nested more than 64 levels deep"),
        (1, 2**40, "it has 1,099,511,627,776 bytes, at most 134,217,728 are read"),
    ],
)
def test_a_file_without_an_end_is_refused_before_it_is_read(tmp_path, levels, size, message):
    file = tmp_path / "config.json"
    # One branch of each level ends at once, and `text_config` has the shape of the whole.
    file.write_text('{"x": {}, "text_config": ' * (levels - 1) + "{}" + "}" * (levels - 1))
    os.truncate(file, max(size, file.stat().st_size))
    refused(f"config.json is not readable JSON: {message}", read_json, file)


def test_data_may_be_deep_and_a_file_as_deep_as_allowed(tmp_path):
    file = tmp_path / "file.json"
    for levels, most in ((64, MOST_BYTES), (400, None)):
        file.write_text('{"x": ' * (levels - 1) + "{}" + "}" * (levels - 1))
        assert list(read_json(file, most=most)) == ["x"]


def test_a_setting_with_two_values_is_refused(tmp_path):
    file = tmp_path / "config.json"
    file.write_text('{"a": {"b": 1, "b": 1}}')
    assert read_json(file) == {"a": {"b": 1}}
    file.write_text('{"a": {"b": 1, "b": true}}')
    refused("config.json is not readable JSON: b is both 1 and True; keep one", read_json, file)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "file.json")
    refused(
        "file.json is not readable JSON: it is a device or a pipe",
        read_json,
        tmp_path / "file.json",
    )


def swapped(value, wanted):
    """Yields copies of a tree of JSON with each part in turn replaced by each of the values."""
    for new in wanted:
        yield new
    if isinstance(value, dict):
        for key, part in value.items():
            for new in swapped(part, wanted):
                yield {**value, key: new}
            yield {name: held for name, held in value.items() if name != key}
    elif isinstance(value, list) and value:
        for new in swapped(value[0], wanted):
            yield [new, *value[1:]]


def sample(trees, rng, count=150):
    trees = list(trees)
    return [trees[i] for i in sorted(rng.choice(len(trees), min(count, len(trees)), False))]


@pytest.fixture
def rng():
    return np.random.default_rng(0)


FILES = {"run.json": NOTED, "result.json": RESULT, "predictions.json": PREDICTED, "config.json": {}}
FILES["evaluations.json"] = EVALUATED


@pytest.mark.parametrize("name", FILES)
def test_a_report_of_a_damaged_run_is_written_or_refused(tmp_path, name, rng):
    folder = run_folders.images(tmp_path / "run")[0]
    file = folder / name
    if not file.is_file():
        pytest.skip(f"this run has no {name}")
    whole = json.loads(file.read_text())
    if name == "predictions.json":  # pictures make it slow, and are not read
        whole["groups"] = {key: rows[:1] for key, rows in whole["groups"].items()}
    refusals = 0
    nulls = swapped(whole, [None]) if name == "run.json" else ()
    for tree in (*sample(swapped(whole, VALUES), rng, 60), *nulls):
        file.write_text(json.dumps(tree))
        try:
            report.write(folder)
        except InputError as error:
            refusals += 1
            assert "\n" not in str(error) and str(folder) in str(error)
    assert refusals or name == "config.json"


def test_a_damaged_state_of_a_checkpoint_is_refused(tmp_path, rng):
    state = RunState(4, epoch=1, logs={"loss": 0.5}, log_names=("loss",), callbacks={"a": {"b": 1}})
    whole = {"format": manager.FORMAT, **state.to_json()}
    refusals = 0
    for tree in sample(swapped(whole, VALUES), rng):
        try:
            check_shape(tree, STATE_SHAPE, "state.json")
            if isinstance(tree, dict) and isinstance(tree.get("step"), int):
                RunState.from_json(tree)
        except InputError as error:
            refusals += 1
            assert str(error).startswith("state.json")
    assert refusals > 20
    folder = tmp_path / "step_00000001"
    folder.mkdir()
    for content in ("[]", "3", '{"logs": {"loss": 1' + "0" * 400 + "}}", "[" * 10**5):
        (folder / "state.json").write_text(content)
        assert manager.find_best([folder], "loss", "min") is None
        with pytest.raises(CheckpointError):
            manager.verify(folder)


def test_a_damaged_description_of_our_own_model_is_refused(tmp_path, rng):
    ViTImageClassifier.from_preset("vit_debug", num_classes=3).save_to_preset(tmp_path)
    file = tmp_path / native.CONFIG
    whole = json.loads(file.read_text())
    top = {key: whole[key] for key in ("kmodels", "backbone", "task", "preprocessor", "left_out")}
    refusals = 0
    for tree in sample(
        ({**whole, key: new} for key in top for new in VALUES if new != top[key]), rng, 80
    ):
        file.write_text(json.dumps(tree))
        native.write_manifest(tmp_path)
        try:
            ViTImageClassifier.from_preset(tmp_path, load_weights=False)
        except InputError as error:
            refusals += 1
            assert "\n" not in str(error)
    assert refusals > 40
