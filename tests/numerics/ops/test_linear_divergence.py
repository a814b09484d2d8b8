"""Results and gradients of `linear_divergence` against NumPy in float64, and TRL's losses."""

import importlib
import json
from pathlib import Path

import keras
import numpy as np
import pytest

from gradients import value_and_gradients
from kmodels import ops
from op_cases import DEFINITIONS
from refusals import refused
from tolerances import tolerance

module = importlib.import_module("kmodels.ops.linear_divergence")
# Parts of 16 positions, the last one not full.
ROWS, WIDTH, WIDER, VOCABULARY = 50, 6, 9, 300
TRL = json.loads((Path(__file__).parents[2] / "loop" / "training" / "trl_losses.json").read_text())


@pytest.fixture(autouse=True)
def parts(monkeypatch):
    monkeypatch.setattr(module, "BUDGET", 16 * 4 * VOCABULARY)


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    shapes = (ROWS, WIDTH), (VOCABULARY, WIDTH), (ROWS, WIDER), (VOCABULARY, WIDER)
    weights = rng.random(ROWS).astype("float32")
    weights[rng.permutation(ROWS)[:12]] = 0.0
    return *(rng.standard_normal(shape).astype("float32") for shape in shapes), weights


def slopes(function, x, step=1e-6):
    """Central differences of a function of an array in float64, along some entries of it."""
    found = {}
    for place in np.random.default_rng(1).integers(0, x.size, 12):
        moved = []
        for sign in (1, -1):
            other = x.astype("float64")
            other.flat[place] += sign * step
            moved.append(function(other))
        found[place] = (moved[0] - moved[1]) / (2 * step)
    return found


@pytest.mark.each_time(
    "rows-settings7-True",
    "frozen-settings0-True",
    "frozen-settings4-True",
    "trained-settings1-False",
    "frozen-settings2-False",
    "rows-settings6-False",
    on=("torch",),
)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    ("table_is", "settings", "compiled"),
    [
        ("frozen", {"kind": "forward_kl"}, True),
        ("trained", {"kind": "forward_kl", "soft_cap": 3.0, "temperature": 0.7}, False),
        ("frozen", {"kind": "reverse_kl", "teacher_soft_cap": 2.0}, False),
        ("trained", {"kind": "reverse_kl", "temperature": 1.4}, True),
        ("frozen", {"kind": "jsd"}, True),
        ("trained", {"kind": "jsd", "beta": 0.1, "soft_cap": 3.0}, True),
        ("rows", {"kind": "jsd", "beta": 0.9, "temperature": 2.0}, False),
        ("rows", {"kind": "forward_kl", "soft_cap": 3.0}, True),
    ],
)
def test_divergence_and_gradients(data, table_is, settings, compiled):
    hidden, table, taught, theirs, weights = (x.copy() for x in data)
    upstream = np.random.default_rng(3).normal(size=ROWS).astype("float32")
    chosen = np.array([5, 0, VOCABULARY - 1], "int32")
    rows = table[chosen]

    def exact(hidden=data[0], table=data[1]):
        arrays = (x.astype("float64") for x in (hidden, table, *data[2:]))
        return DEFINITIONS["linear_divergence"](*arrays, **settings)

    if table_is == "rows":
        table[chosen] = 9.0
    hidden[weights == 0], taught[weights == 0] = np.nan, np.nan
    others = [keras.ops.convert_to_tensor(x) for x in (taught, theirs, weights, chosen, upstream)]
    taught, theirs, weights, ids, factors = others

    def run(hidden, table, rows):
        given = {"rows": rows, "row_ids": ids} if table_is == "rows" else {}
        trained = table_is == "trained"
        found = ops.linear_divergence(
            *(hidden, table, taught, theirs, weights), trainable_table=trained, **settings, **given
        )
        return keras.ops.sum(found * factors), found

    _, found, gradients = value_and_gradients(run, (hidden, table, rows), compiled)
    found = keras.ops.convert_to_numpy(found)
    assert found.dtype == "float32" and (found[data[4] == 0] == 0).all()
    bound = tolerance("linear_divergence")
    expected = exact()
    assert np.abs(found - expected).max() <= bound * np.abs(expected).max()
    wanted = [slopes(lambda x: (exact(hidden=x) * upstream).sum(), data[0]), {}, {}]
    of_table = slopes(lambda x: (exact(table=x) * upstream).sum(), data[1])
    if table_is == "trained":
        wanted[1] = of_table
    if table_is == "rows":

        def of_rows(x):
            changed = data[1].astype("float64")
            changed[chosen] = x
            return (exact(table=changed) * upstream).sum()

        wanted[2] = slopes(of_rows, data[1][chosen])
    for gradient, right in zip(gradients, wanted, strict=True):
        assert right or not gradient.any()
        for place, slope in right.items():
            assert abs(gradient.flat[place] - slope) <= 10 * bound * np.abs(gradient).max()


@pytest.mark.parametrize("case", TRL["divergence"], ids=lambda case: str(case["settings"]))
def test_divergences_are_those_of_trl(case):
    """With the identity for a table, logits are the hidden states."""
    settings = dict(case["settings"])
    beta = settings.pop("beta")
    settings["kind"] = {0: "forward_kl", 1: "reverse_kl"}.get(beta, "jsd")
    if settings["kind"] == "jsd":
        settings["beta"] = beta
    student, teacher = (np.array(case[name], "float32") for name in ("student", "teacher"))
    table = np.eye(student.shape[1], dtype="float32")
    table, teacher = (keras.ops.convert_to_tensor(x) for x in (table, teacher))

    def run(student):
        found = ops.linear_divergence(student, table, teacher, table, **settings)
        return keras.ops.sum(found), found

    loss, _, (gradient,) = value_and_gradients(run, (student,))
    assert abs(float(loss) - case["loss"]) <= tolerance("trl_losses") * max(1, case["loss"])
    assert np.abs(gradient - np.array(case["gradient"])).max() <= tolerance("trl_gradients")


@pytest.mark.once
def test_what_does_not_fit_is_refused(data):
    tensors = [keras.ops.convert_to_tensor(x) for x in data]
    hidden, table, taught, theirs, _ = tensors
    for message, given, settings in (
        (r"takes hidden \(M, D\).*got \(50, 9\), \(300, 6\)", (taught, *tensors[1:]), {}),
        ("of 300 classes and a teacher of 200", (hidden, table, taught, theirs[:200]), {}),
        ("kind is 'kl'; choose one of forward_kl, reverse_kl, jsd", tensors, {"kind": "kl"}),
        ("beta 0.5 with kind 'forward_kl'; only jsd has one", tensors, {"beta": 0.5}),
        ("beta 1; it must be between 0 and 1", tensors, {"kind": "jsd", "beta": 1}),
        ("temperature 0; it must be positive", tensors, {"temperature": 0}),
        ("teacher_soft_cap -1; it must be positive", tensors, {"teacher_soft_cap": -1}),
    ):
        refused(message, ops.linear_divergence, *given, **settings)
