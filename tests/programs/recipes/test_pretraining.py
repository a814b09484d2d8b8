"""recipes/mae.py, dino.py and vit_probe.py as a user runs them: no labels, and probes after it."""

from types import SimpleNamespace

import numpy as np
import pytest

from kmodels.core.errors import InputError
from kmodels.models import ViTImageClassifier, ViTMAEForPreTraining
from kmodels.runs import probe
from recipe_modules import check_killed_run, load, result

# Epochs of 6 steps, so that the masks and views of resumed steps count.
SMALL = {
    "mae": [
        *("--preset", "vit_debug", "--patch-size", "4", "--data", "synthetic:96"),
        *("--batch-size", "16", "--steps", "9", "--epochs", "2", "--checkpoint-every", "2"),
        *("--decoder-dim", "8", "--decoder-layers", "1", "--decoder-heads", "2"),
        *("--neighbours", "3", "--probe-images", "40", "--crop", "0.5", "--flip"),
    ],
    "dino": [
        *("--preset", "vit_debug", "--data", "synthetic:48", "--batch-size", "8", "--steps", "8"),
        *("--epochs", "2", "--checkpoint-every", "2", "--local-views", "1", "--units", "16"),
        *("--hidden-dim", "8", "--neighbours", "3", "--probe-images", "20", "--flip"),
    ],
    "vit_probe": ["--preset", "vit_debug", "--data", "synthetic:64", "--batch-size", "8"],
}
WAYS = {f"{way}_{part}_accuracy" for way in ("knn", "linear") for part in ("val", "test")}
METRICS = {
    "mae": {"loss", "val_loss", *WAYS, *(f"new_{name}" for name in WAYS)},
    "dino": {"loss", "entropy", "marginal_entropy", "divergence", *WAYS},
}


@pytest.fixture(scope="module", params=METRICS)
def whole(request, tmp_path_factory):
    """A run that nothing interrupts."""
    name, out = request.param, tmp_path_factory.mktemp(request.param) / "whole"
    recipe = load(name)
    assert recipe.main([*SMALL[name], "--out", str(out)]) == 0
    return SimpleNamespace(name=name, recipe=recipe, out=out)


def test_a_run_leaves_an_encoder_and_its_probes(whole, capsys):
    found = result(whole.out)
    steps = int(SMALL[whole.name][SMALL[whole.name].index("--steps") + 1])
    assert found["steps"] == len(found["step_losses"]) == steps
    assert METRICS[whole.name] <= set(found["metrics"])
    model = ViTImageClassifier.from_preset(whole.out / "model", num_classes=3)
    assert model.preprocessor.image_size == (16, 16)
    assert whole.recipe.main(["--evaluate", "--out", str(whole.out)]) == 0
    again = result(whole.out, "evaluation.json")["metrics"]
    assert {name: again[name] for name in WAYS} == {name: found["metrics"][name] for name in WAYS}
    assert "pretrained weights" in capsys.readouterr().out
    if whole.name == "dino":
        assert 0 < found["metrics"]["entropy"] < 1
        return
    assert METRICS["mae"] == set(found["metrics"])
    for name in ("reconstruction.png", "curves.png", "report.html"):
        assert (whole.out / name).stat().st_size > 1000, name
    model = ViTMAEForPreTraining.from_preset(whole.out / "model")
    assert found["parameters"] == model.count_params() > found["trainable_parameters"]
    assert model.norm_pix_loss and model.decoder.config.hidden_dim == 8
    # The encoder continues as a classifier in the recipe for that, too.
    fine = whole.out.parent / "fine"
    arguments = ["--weights", str(whole.out / "model"), "--data", "synthetic:48"]
    arguments += ["--batch-size", "8", "--epochs", "1", "--out", str(fine)]
    assert load("vit").main(arguments) == 0
    assert result(fine)["parameters"] < found["parameters"]


@pytest.mark.each_backend("nightly")
def test_a_killed_run_ends_with_the_same_bits(whole, tmp_path):
    """Losses see masks, views, student, teacher and center; DINO's digest is the teacher's."""
    check_killed_run(whole.recipe, SMALL[whole.name], whole.out, tmp_path / "cut", 5)


@pytest.mark.each_backend("nightly")
@pytest.mark.parametrize("tune", ["none", "lora"])
def test_a_probe_ends_with_its_table_and_picture(tmp_path, capsys, tune):
    arguments = ["--neighbours", "3", "--tune", tune]
    arguments += ["--rank", "2", "--epochs", "1"] if tune == "lora" else []
    assert load("vit_probe").main([*SMALL["vit_probe"], *arguments, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    rows = ["3 neighbours  ", "linear, C=", *(["LoRA of rank 2"] if tune == "lora" else [])]
    assert all(f"\n  {row}" in printed for row in rows)
    assert (tmp_path / "probe.png").stat().st_size > 5000
    page = (tmp_path / "report.html").read_text()
    assert "3 neighbours" in page and page.count("<circle") > 5
    found = result(tmp_path)
    assert set(found["metrics"]) >= WAYS
    assert all(0 <= found["metrics"][name] <= 1 for name in WAYS)
    if tune == "none":
        assert found["steps"] == 0 and not (tmp_path / "checkpoints").exists()
    else:
        assert found["steps"] > 0 and "test_accuracy" in found["metrics"]
        assert found["trainable_parameters"] < found["parameters"] / 2
        assert (tmp_path / "curves.png").exists()


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("dino", ["--momentum", "1"], "--momentum is 1.0; give at least 0, below 1"),
        ("dino", ["--global-crop", "0.5"], "--global-crop is '0.5'; give 2 numbers"),
        ("mae", ["--mask-ratio", "1"], "--mask-ratio is 1.0; give at least 0, below 1"),
        ("mae", ["--neighbours", "41"], "neighbours is 41; give at most 40"),
        ("vit_probe", ["--evaluate"], "--evaluate does not apply"),
        (
            "vit_probe",
            ["--tune", "grid", "--rates", "1e-3,x"],
            "--rates is '1e-3,x'; give numbers above 0",
        ),
        ("vit_probe", ["--tune", "grid", "--rates", "0"], "--rates is '0'; give numbers above 0"),
        ("vit_probe", ["--neighbours", "65"], "neighbours is 65; give at most 64"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(name, arguments, message, tmp_path, capsys):
    assert load(name).main([*SMALL[name], *arguments, "--out", str(tmp_path / "wrong")]) == 2
    assert message in capsys.readouterr().err


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
    with pytest.raises(InputError, match="neighbours is 31; give at most 30"):
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
