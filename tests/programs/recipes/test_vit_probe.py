"""recipes/vit_probe.py as a user runs it, and the probes against what they are defined as."""

import json

import numpy as np
import pytest

from kmodels.core.errors import InputError
from kmodels.runs import probe
from recipe_modules import load

SMALL = ("--preset", "vit_debug", "--data", "synthetic:64", "--batch-size", "8")


@pytest.fixture(scope="module")
def recipe():
    return load("vit_probe")


@pytest.mark.parametrize("tune", ["none", "lora"])
def test_a_run_ends_with_its_table_and_picture(recipe, tmp_path, capsys, tune):
    out = tmp_path / "run"
    arguments = [*SMALL, "--neighbours", "3", "--tune", tune, "--rank", "2", "--epochs", "1"]
    assert recipe.main([*arguments, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    rows = ["3 neighbours  ", "linear, C=", *{"lora": ["LoRA of rank 2"]}.get(tune, [])]
    assert all(f"\n  {row}" in printed for row in rows)
    assert (out / "probe.png").stat().st_size > 5000
    page = (out / "report.html").read_text()
    assert "3 neighbours" in page and page.count("<circle") > 5
    found = json.loads((out / "result.json").read_text())
    names = {f"{way}_{part}_accuracy" for way in ("knn", "linear") for part in ("val", "test")}
    assert set(found["metrics"]) >= names
    assert all(0 <= found["metrics"][name] <= 1 for name in names)
    if tune == "none":
        assert found["steps"] == 0 and not (out / "checkpoints").exists()
    else:
        assert found["steps"] > 0 and "test_accuracy" in found["metrics"]
        assert found["trainable_parameters"] < found["parameters"] / 2
        assert (out / "curves.png").exists()


def test_what_a_probe_cannot_do_is_said_in_one_line(recipe, tmp_path, capsys):
    def error(*arguments):
        assert recipe.main([*SMALL, *arguments, "--out", str(tmp_path / "out")]) == 2
        return capsys.readouterr().err

    assert "--evaluate has no meaning here" in error("--evaluate")
    assert "neighbours is 65; there are 64 images" in error("--neighbours", "65")


def test_neighbours_vote_as_they_are_near():
    rng = np.random.default_rng(0)
    known, asked = rng.normal(size=(30, 5)), rng.normal(size=(7, 5))
    labels = rng.integers(4, size=30)
    found = probe.neighbours(known, labels, asked, 4, number=6, temperature=0.5)
    for query, shares in zip(asked, found, strict=True):
        cosines = [float(x @ query / np.linalg.norm(x) / np.linalg.norm(query)) for x in known]
        expected = np.zeros(4)
        for i in sorted(range(30), key=lambda i: -cosines[i])[:6]:
            expected[labels[i]] += np.exp(cosines[i] / 0.5)
        np.testing.assert_allclose(shares, expected / expected.sum(), atol=1e-12)
    with pytest.raises(InputError, match="neighbours is 31; there are 30 images"):
        probe.neighbours(known, labels, asked, 4, number=31)


def test_the_linear_probe_is_as_strong_as_suits_the_held_out_pictures():
    rng = np.random.default_rng(1)
    labels, held_labels = rng.integers(3, size=60), rng.integers(3, size=40)
    known, held = (np.eye(3)[x] * 2 + rng.normal(size=(len(x), 3)) for x in (labels, held_labels))
    model, strength = probe.linear(known, labels, held, held_labels)
    assert strength in probe.STRENGTHS
    score = (model.predict(held) == held_labels).mean()
    assert score > 0.7
    for other in probe.STRENGTHS:
        worse = model.set_params(logisticregression__C=other).fit(known, labels)
        assert (worse.predict(held) == held_labels).mean() <= score
