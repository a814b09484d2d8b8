"""recipes/segment.py as a user runs it: made scenes, a folder of masks, a run that is killed."""

import numpy as np
import pytest
from PIL import Image

from kmodels.models import EoMTImageSegmenter, ViTImageSegmenter
from recipe_modules import check_killed_run, load, result

SMALL = (
    *("--data", "scenes:40", "--image-size", "16", "--batch-size", "8", "--epochs", "2"),
    *("--crop", "0.5", "--head-dropout", "0.1"),
)


@pytest.fixture(scope="module")
def recipe():
    return load("segment")


@pytest.mark.each_backend("nightly")
def test_scenes_are_learned_and_a_killed_run_goes_on(recipe, tmp_path):
    """The rest of a run gives the same bits: order, cuts, mirroring, dropout, batch norm."""
    whole = tmp_path / "whole"
    assert recipe.main([*SMALL, "--out", str(whole)]) == 0
    found = result(whole)
    losses = found["step_losses"]
    assert len(losses) == 8 and np.mean(losses[-3:]) < np.mean(losses[:3])
    assert {"loss", "mean_iou", "val_mean_iou", "test_mean_iou"} <= set(found["metrics"])
    for name in ("predictions.png", "curves.png"):
        assert (whole / name).stat().st_size > 5000
    model = ViTImageSegmenter.from_preset(whole / "model")
    assert model.count_params() == found["parameters"] and model.preprocessor is not None
    masks = model.segment([np.zeros((9, 21, 3), "uint8")])
    assert masks[0].shape == (9, 21)
    arguments = [*SMALL, "--checkpoint-every", "3"]
    check_killed_run(recipe, arguments, whole, tmp_path / "cut", 5, checkpoint_is_written=False)
    assert recipe.main([*SMALL, "--out", str(whole), "--evaluate"]) == 0
    again = result(whole, "evaluation.json")["metrics"]
    assert again["test_mean_iou"] == pytest.approx(found["metrics"]["test_mean_iou"], abs=1e-6)


@pytest.mark.nightly
def test_a_killed_run_of_queries_goes_on(recipe, tmp_path):
    """To the same bits: points that the loss draws, and the share of queries that are masked."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    queries = ("--head", "eomt", "--queries", "6", "--query-blocks", "2", "--points", "16")
    arguments = [*SMALL[:-2], *queries]
    assert recipe.main([*arguments, "--out", str(whole)]) == 0
    found = result(whole)
    assert len(found["step_losses"]) == 8 and 0 <= found["metrics"]["test_mean_iou"] <= 1
    arguments += ["--checkpoint-every", "3"]
    check_killed_run(recipe, arguments, whole, cut, 5, checkpoint_is_written=False)
    shares = [EoMTImageSegmenter.from_preset(x / "model").attn_mask_probs for x in (whole, cut)]
    np.testing.assert_array_equal(*shares)


def test_a_folder_of_images_and_masks(recipe, tmp_path, capsys):
    from kmodels.data import made_scenes, open_masks
    from kmodels.runs.results import measure_masks

    images, masks = made_scenes(12, (20, 24), seed=3)
    root = tmp_path / "data"
    for kind, arrays in (("images", images), ("masks", masks)):
        (root / kind).mkdir(parents=True)
        for i, pixels in enumerate(arrays):
            Image.fromarray(pixels).save(root / kind / f"{i}.png")
    out = tmp_path / "run"
    arguments = ["--data", f"folder:{root}", "--image-size", "16", "--batch-size", "4"]
    head = [*arguments, "--epochs", "1", "--tune", "head", "--out", str(out)]
    assert recipe.main(head) == 0
    found = result(out)
    assert found["trainable_parameters"] == 64 * 5 + 5 + 2 * 64
    # Windows of whole images: the result is what `segment` of the saved model gives.
    slide = [*head[:-1], str(tmp_path / "slide"), "--slide", "--scale", "0.5,2", "--distort"]
    assert recipe.main(slide) == 0
    model = ViTImageSegmenter.from_preset(tmp_path / "slide" / "model")
    assert model.preprocessor.aspect_ratio == "slide"
    data = open_masks(f"folder:{root}", image_size=(16, 16))
    measured = measure_masks(model, data.test)
    metrics = result(tmp_path / "slide")["metrics"]
    assert metrics["test_mean_iou"] == pytest.approx(measured["mean_iou"])
    for wrong, message in (
        (("--scale", "2"), "--scale is 2; give two numbers such as 0.5,2"),
        (("--scale", "1,2", "--ignore", "0"), "--scale pads with 255, and --ignore is 0"),
        (("--head", "eomt", "--count-ignored"), "--count-ignored has no effect with --head eomt"),
        (("--scale", "1,2", "--crop", "0.5"), "crop and scale are both set"),
    ):
        assert recipe.main([*arguments, *wrong, "--out", str(tmp_path / "wrong")]) == 2
        assert message in capsys.readouterr().err
    lora = [*arguments, "--epochs", "1", "--tune", "lora", "--rank", "2"]
    assert recipe.main([*lora, "--no-batch-norm", "--out", str(tmp_path / "lora")]) == 0
    assert result(tmp_path / "lora")["trainable_parameters"] < 0.1 * found["parameters"]
    (root / "masks" / "3.png").unlink()
    capsys.readouterr()
    assert recipe.main([*head[:-1], str(tmp_path / "wrong")]) == 2
    assert "has no PNG for 3.png; add them" in capsys.readouterr().err
