"""recipes/distill.py, prefer.py and zero_shot.py as a user runs them."""

import json

import numpy as np
import pytest

from kmodels.models import GemmaCausalLMPreprocessor, ImageTextSimilarity, ViTImageClassifier
from kmodels.text import encode_pairs, read_pairs
from kmodels.text.training import train_tokenizer
from recipe_modules import check_killed_run, load, result, without_figures

# 48 images in batches of 8, 6 steps to an epoch.
DISTILL = (
    *("--preset", "vit_debug", "--teacher-preset", "vit_debug", "--layers", "1"),
    *("--data", "synthetic:48", "--batch-size", "8", "--teacher-epochs", "1", "--epochs", "2"),
)
DPO = (
    *("--batch-size", "2", "--sequence-length", "48", "--rank", "2", "--steps", "6"),
    *("--lora-dropout", "0.1", "--first-steps", "2", "--learning-rate", "1e-2"),
)


@pytest.mark.each_backend("nightly")
def test_a_student_learns_what_its_teacher_says(tmp_path, capsys):
    recipe, out = load("distill"), tmp_path / "a"
    assert recipe.main([*DISTILL, "--out", str(out)]) == 0
    found = result(out)
    assert found["steps"] == len(found["step_losses"])
    assert np.mean(found["step_losses"][-3:]) < np.mean(found["step_losses"][:3])
    assert {"loss", "accuracy", "val_loss", "val_accuracy", "test_accuracy"} <= set(
        found["metrics"]
    )
    teacher = ViTImageClassifier.from_preset(out / "teacher")
    student = ViTImageClassifier.from_preset(out / "model")
    assert teacher.backbone.config.num_layers == 2
    assert student.backbone.config.num_layers == 1
    assert found["parameters"] == student.count_params() < teacher.count_params()
    # Evaluated again from the checkpoint, which holds the step; the teacher is not trained again.
    assert "teacher: validation accuracy" in " ".join(capsys.readouterr().out.split())
    assert recipe.main([*DISTILL, "--out", str(out), "--evaluate"]) == 0
    again = result(out, "evaluation.json")["metrics"]
    for name in ("val_accuracy", "test_accuracy", "test_loss"):
        assert again[name] == pytest.approx(found["metrics"][name], abs=1e-6), name
    assert recipe.main([*DISTILL, "--share", "2", "--out", str(tmp_path / "b")]) == 2
    assert "--share is 2.0" in capsys.readouterr().err


@pytest.fixture
def pairs(tmp_path):
    path = tmp_path / "pairs.jsonl"
    words = ("red", "blue", "green", "white", "black", "brown", "pink", "grey")
    rows = [
        {"prompt": f"A colour like {a}? ", "chosen": f"{b} it is", "rejected": f"no, not {b}"}
        for a, b in zip(words, words[1:] + words[:1], strict=True)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def text():
    """Texts as token ids, for the loss on responses."""
    tokenizer = train_tokenizer(["one two three a b c d e"], 300)
    return GemmaCausalLMPreprocessor(tokenizer, 64, loss_on="responses")


@pytest.mark.each_backend("nightly")
def test_preferences_are_learnt_beside_a_frozen_base(tmp_path, pairs, capsys):
    recipe, out = load("prefer"), tmp_path / "a"
    assert recipe.main([*DPO, "--data", str(pairs), "--out", str(out)]) == 0
    found = result(out)
    # Adapters begin at zero: the model is its own reference.
    assert found["step_losses"][0] == pytest.approx(np.log(2), abs=1e-5)
    assert len(found["step_losses"]) == 6
    assert found["trainable_parameters"] < 0.2 * found["parameters"]
    assert {"val_loss", "val_accuracy", "val_margin"} <= set(found["metrics"])
    assert (out / "adapter/adapter_model.safetensors").is_file()
    assert (out / "model/config.json").is_file()
    assert len(found["preferences"]) == 1
    (shown,) = found["preferences"]
    assert [answer["label"] for answer in shown["answers"]] == ["chosen", "rejected"]
    assert any(answer["change"] for answer in shown["answers"])
    assert "Held-out preferences" in (out / "report.html").read_text()
    pairs.write_text('{"prompt": "a", "chosen": "b"}\n')
    capsys.readouterr()
    assert recipe.main([*DPO, "--data", str(pairs), "--out", str(tmp_path / "wrong")]) == 2
    assert "pairs.jsonl line 1: field 'rejected' is missing" in capsys.readouterr().err


@pytest.mark.each_time("--precompute-reference")
@pytest.mark.each_backend("nightly")
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("", marks=pytest.mark.nightly),
        "--method kto --accumulate 2",
        "--precompute-reference",
    ],
)
def test_a_killed_preference_run_continues_to_the_bit(tmp_path, pairs, flags):
    recipe, whole = load("prefer"), tmp_path / "whole"
    arguments = [*DPO, "--data", str(pairs), "--checkpoint-every", "2", *flags.split()]
    assert recipe.main([*arguments, "--out", str(whole)]) == 0
    check_killed_run(recipe, arguments, whole, tmp_path / "out", 3)


def test_methods_and_their_flags(tmp_path, pairs, capsys):
    recipe = load("prefer")
    arguments = [*DPO, "--data", str(pairs), "--steps", "2", "--lora-dropout", "0"]

    def losses(name, *flags):
        out = tmp_path / name
        with without_figures():
            assert recipe.main([*arguments, *flags, "--out", str(out)]) == 0
        return result(out)["step_losses"]

    plain = losses("plain")
    place = arguments.index("--first-steps")  # The weights are there.
    arguments[place : place + 2] = ["--weights", str(tmp_path / "plain" / "base")]
    # Pairs without an answer are left out, also where the report shows some.
    empty = tmp_path / "empty.jsonl"
    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    rows += [{**row, "prompt": row["prompt"] + "!", "rejected": ""} for row in rows]
    empty.write_text("".join(json.dumps(row) + "\n" for row in rows))
    capsys.readouterr()
    losses("empty", "--data", str(empty), "--held-out", "0.5", "--samples", "8")
    assert "left out 8 records without a token of an answer" in capsys.readouterr().out
    assert 0 < len(result(tmp_path / "empty")["preferences"]) < 8
    np.testing.assert_allclose(losses("once", "--precompute-reference"), plain, atol=1e-6)
    assert losses("ipo", "--method", "ipo")[0] == pytest.approx(25.0, abs=1e-3)
    assert losses("hinge", "--method", "hinge")[0] == pytest.approx(1.0, abs=1e-5)
    assert losses("orpo", "--method", "orpo")[0] > 1.0  # of the answers themselves
    assert losses("apo", "--method", "apo_zero_unpaired")[0] == pytest.approx(0.5, abs=1e-5)
    for flags, message in (
        (["--method", "kto", "--margin", "1"], "--margin has no effect with --method kto"),
        (["--method", "ipo", "--margin", "1"], "margin is 1.0 and kind is 'ipo'"),
        (["--method", "simpo", "--precompute-reference"], "compares without a reference"),
        (["--desirable-weight", "2"], "--desirable-weight has no effect with --method dpo"),
        (["--beta", "0"], "beta is 0.0"),
    ):
        capsys.readouterr()
        assert recipe.main([*arguments, *flags, "--out", str(tmp_path / "no")]) == 2
        assert message in capsys.readouterr().err


def test_pairs_are_whole_lines_with_one_prompt_for_both_answers(tmp_path, text):
    path = tmp_path / "pairs.json"
    prompt = "one\u2028two\x85three " * 30
    rows = [
        {"prompt": prompt, "chosen": "a" * 70, "rejected": "b" * 5},
        {"prompt": "c ", "chosen": "d", "rejected": "e" * 200},
    ]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    pairs = read_pairs(path)
    assert pairs == rows
    path.write_text(json.dumps(rows))
    assert read_pairs(path) == rows
    x, labels, weights = encode_pairs(text, pairs)
    assert x["token_ids"].shape == labels.shape == weights.shape == (2, 2, 64)
    for ids, learnt in zip(x["token_ids"], weights, strict=True):
        first, second = learnt.argmax(axis=-1)
        assert first == second, "the prompts are of one length"
        np.testing.assert_array_equal(ids[0, : first + 1], ids[1, : first + 1])
    # The prompt gives way to the longer answer, and the shorter one is whole.
    answers = [text.tokenizer.detokenize(labels[0, i][weights[0, i] > 0]) for i in range(2)]
    assert answers[1] == "b" * 5 and set(answers[0]) == {"a"}


@pytest.mark.each_time("siglip_micro_patch7_28-30")
@pytest.mark.parametrize(
    ("preset", "steps"),
    [
        pytest.param("clip_micro_patch7_28", 100, marks=pytest.mark.each_backend("nightly")),
        ("siglip_micro_patch7_28", 30),
    ],
)
def test_two_towers_learn_digits_by_their_names(tmp_path, preset, steps):
    recipe, out = load("zero_shot"), tmp_path / "run"
    small = f"--data digits --batch-size 16 --epochs 2 --steps {steps}"
    arguments = [*small.split(), "--preset", preset]
    assert recipe.main([*arguments, "--out", str(out)]) == 0
    found = result(out)
    losses = found["step_losses"]
    assert np.mean(losses[-5:]) < np.mean(losses[:5])
    metrics = found["metrics"]
    # The sigmoid loss begins far from where it tells classes apart, and these are few steps.
    least = 0.5 if preset.startswith("clip") else 0.0
    assert metrics["test_accuracy"] > least <= metrics["test_accuracy_of_one_template"]
    model = ImageTextSimilarity.from_preset(out / "model")
    logits = model.classify(np.zeros((2, 8, 8, 1), "uint8"), ["1", "2"], recipe.TEMPLATES)
    assert logits.shape == (2, 2) and found["parameters"] == model.count_params()
    assert recipe.main([*arguments, "--out", str(out), "--evaluate"]) == 0
    again = result(out, "evaluation.json")["metrics"]
    assert again["test_accuracy"] == pytest.approx(metrics["test_accuracy"], abs=1e-6)
    # From its weights: classifying alone gives the same, and training goes on.
    common = ["--weights", str(out / "model"), "--data", "digits", "--out", str(tmp_path / "more")]
    templates = ["--templates", "|".join(recipe.TEMPLATES), "--epochs", "0"]
    assert recipe.main([*common[:-1], str(tmp_path / "none"), *templates]) == 0
    alone = result(tmp_path / "none")["metrics"]
    assert alone["test_accuracy"] == pytest.approx(metrics["test_accuracy"], abs=1e-6)
    assert not (tmp_path / "none" / "model").exists()
    assert recipe.main([*common, "--steps", "2", "--batch-size", "16"]) == 0
    further = result(tmp_path / "more")
    assert further["steps"] == 2 and further["parameters"] == found["parameters"]
    if preset.startswith("clip"):  # whose loss begins where the former run ended
        assert further["step_losses"][0] < losses[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--epochs", "0"], "--epochs is 0; give at least 1"),
        (["--epochs", "0", "--weights", "x", "--steps", "3"], "--steps has no effect with --epo"),
        (
            ["--epochs", "0", "--weights", "x", "--learning-rate", "1", "--mesh", "data=2"],
            "--learning-rate, --mesh has no effect with --epochs 0",
        ),
        (["--templates", "a photo|{}"], "the template 'a photo' needs one {}, for the class name"),
        (["--class-names", "nowhere.txt"], "--class-names nowhere.txt is not readable"),
    ],
)
def test_zero_shot_flags_that_do_not_fit(tmp_path, capsys, words, message):
    assert load("zero_shot").main([*words, "--out", str(tmp_path / "run")]) == 2
    assert message in capsys.readouterr().err


def test_another_preset_than_of_two_towers_is_refused(tmp_path, capsys):
    arguments = ["--preset", "vit_debug", "--out", str(tmp_path / "run")]
    assert load("zero_shot").main(arguments) == 2
    assert "--preset is 'vit_debug'; give a preset with two towers" in capsys.readouterr().err
