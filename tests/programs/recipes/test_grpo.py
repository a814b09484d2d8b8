"""recipes/grpo.py as a user runs it, and `training.Rollouts`."""

import json

import keras
import numpy as np
import pytest
from launch import Process, jax_ranks, launch, torch_ranks
from safetensors.numpy import load_file

from kmodels.training import Rollouts, group_advantages
from recipe_modules import load, result, run_killed, without_figures
from refusals import refused

SMALL = (
    *("--batch-size", "8", "--group-size", "4", "--steps", "6", "--first-steps", "2"),
    *("--prompt-length", "16", "--max-new-tokens", "4", "--rank", "2", "--learning-rate", "1e-2"),
)


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    words = ("red", "blue", "green", "white", "black", "brown", "pink", "grey")
    rows = [{"prompt": f"A colour like {word}? ", "answer": word} for word in words]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(
        "from __future__ import annotations\n"
        "import dataclasses, sys, time\n"
        "@dataclasses.dataclass\n"
        "class Weights:\n"
        "    word: float = 1.0\n"
        "def leaves(prompts, completions, **fields):\n"
        "    sys.exit(3)\n"
        "def letters(prompts, completions, answer, **fields):\n"
        "    words = zip(completions, answer, strict=True)\n"
        "    return [len(set(text)) / 8 + len(set(text) & set(word)) for text, word in words]\n"
        "def unsure(prompts, completions, **fields):\n"
        "    return [None] + [len(text) / 8 for text in completions[1:]]\n"
        "def few(prompts, completions, **fields):\n"
        "    return [1.0]\n"
        "def broken(prompts, completions, **fields):\n"
        "    raise KeyError('no such word')\n"
        "def slow(prompts, completions, **fields):\n"
        "    time.sleep(60)\n"
    )
    return ["--data", str(path), "--reward", f"{tmp_path / 'rewards.py'}:letters"]


@pytest.mark.each_backend("nightly")
@pytest.mark.parametrize(
    "flags", [pytest.param("", marks=pytest.mark.nightly), "--rollout-batches 2 --beta 0.1"]
)
def test_a_killed_run_on_rewards_continues_to_the_bit(tmp_path, prompts, flags):
    recipe, whole = load("grpo"), tmp_path / "whole"
    arguments = [*SMALL, *prompts, "--checkpoint-every", "1", *flags.split()]
    assert recipe.main([*arguments, "--out", str(whole)]) == 0
    found = result(whole)
    assert len(found["step_losses"]) == 6 and set(found["samples"][0]) == {
        *("prompt", "before", "after")
    }
    out = tmp_path / "out"
    run_killed(recipe, [*arguments, "--out", str(out)], 3)
    keras.utils.set_random_seed(5)
    with without_figures():
        assert recipe.main(["--resume", "--out", str(out)]) == 0
    for key in ("step_losses", "weights_digest", "metrics", "samples"):
        assert result(out)[key] == found[key], key
    # The weights moved, and with them the answers.
    files = sorted((whole / "rollouts").iterdir())
    assert len(files) == (3 if flags else 6)
    first, last = load_file(files[0]), load_file(files[-1])
    assert (first["token_ids"] != last["token_ids"]).any()
    assert first["advantages"].any()


def test_rewards_that_fail_are_a_line(tmp_path, prompts, capsys):
    recipe, base = load("grpo"), tmp_path / "first"
    arguments = [*SMALL, *prompts, "--steps", "1"]
    assert recipe.main([*arguments, "--out", str(base)]) == 0
    file = prompts[-1].rpartition(":")[0]
    place = arguments.index("--first-steps")  # The weights are there.
    arguments[place : place + 2] = ["--weights", str(base / "base")]
    found = tmp_path / "unsure"
    with without_figures():
        assert recipe.main([*arguments, "--reward", f"{file}:unsure", "--out", str(found)]) == 0
    arrays = load_file(found / "rollouts" / "000000.safetensors")
    assert arrays["scored"].tolist() == [0.0] + [1.0] * 7 and arrays["advantages"][0] == 0.0
    for flags, message in (
        (["--reward", f"{file}:few"], "returned 1 values for"),
        (["--reward", f"{file}:broken"], "the reward function raised KeyError: 'no such word'"),
        (["--reward", f"{file}:slow", "--reward-timeout", "1"], "took longer than 1 s"),
        (["--reward", f"{file}:leaves"], "the reward function raised SystemExit: 3"),
        (["--reward", f"{file}:none"], "has no function none"),
        (["--reward-timeout", "-1"], "--reward-timeout is -1.0; give at least 0"),
        (["--checkpoint-every", "5m"], "the distance of checkpoints is '5m'; give steps"),
        (["--reward", "nothing"], "give FILE.py:function"),
        (["--group-size", "3"], "batch_size is 8 and group_size 3"),
        (["--temperature", "0"], "temperature is 0.0; give a number above 0"),
        (["--epsilon", "2"], "epsilon is 2.0"),
    ):
        capsys.readouterr()
        assert recipe.main([*arguments, *flags, "--out", str(tmp_path / "no")]) == 2, flags
        assert message in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.each_backend("nightly")
def test_two_processes_sample_together(tmp_path, prompts):
    """On torch each samples and judges its half of a rollout; on JAX both sample all of it."""
    backend, file = keras.backend.backend(), tmp_path / "rewards.py"
    if backend == "tensorflow":
        pytest.skip("TensorFlow trains in one process")
    calls = tmp_path / "calls"
    file.write_text(
        "import os\n"
        "def letters(prompts, completions, **fields):\n"
        f"    with open({str(calls)!r}, 'a') as file:\n"
        "        file.write(f'{len(completions)}\\n')\n"
        "    return [len(set(text)) / 8 for text in completions]\n"
    )
    flags = [*SMALL, *prompts, "--steps", "2", "--held-out", "0.25", "--mesh", "data=2"]
    out = tmp_path / "out"
    ranks = torch_ranks(2) if backend == "torch" else jax_ranks(2, devices=1)
    launch([Process("kmodels", ["grpo", *flags, "--out", str(out)], ranks=ranks)], 300)
    sizes = sorted(map(int, calls.read_text().split()))
    held_out = [2] * 4  # before and after, in both processes
    assert sizes == held_out + [4 if backend == "torch" else 8] * 4
    arrays = load_file(out / "rollouts" / "000001.safetensors")
    assert (arrays["learnt"].sum(axis=1) >= 1).all()
    # Halves have seeds of their own.
    assert len(np.unique(arrays["token_ids"], axis=0)) > 4
    groups = arrays["rewards"].reshape(2, 4)
    np.testing.assert_allclose(
        arrays["advantages"].reshape(2, 4), np.array(group_advantages(groups)), atol=1e-6
    )
    assert np.isfinite(result(out)["step_losses"]).all()


def test_a_file_of_another_run_is_refused(tmp_path):
    recipe = load("grpo")
    settings = recipe.Settings(first_steps=2)
    model = recipe.first_training(settings)
    records = [{"prompt": "one"}, {"prompt": "two"}]
    given = {"group_size": 2, "prompt_length": 8, "max_new_tokens": 3, "folder": tmp_path}
    loader = Rollouts(model, records, recipe.digits, 4, **given)
    loader.sample(0)
    inputs, labels, learnt = loader[0]
    assert labels.shape == learnt.shape == inputs["token_ids"].shape == (4, 10)
    assert (learnt.sum(axis=1) >= 1).all() and (learnt.sum(axis=1) <= 3).all()
    np.testing.assert_array_equal(inputs["padding_mask"].sum(axis=1), [_end(x) for x in learnt])
    before = labels.copy()
    loader.sample(0)  # from its file
    np.testing.assert_array_equal(loader[0][1], before)
    other = Rollouts(model, records, recipe.digits, 4, **{**given, "max_new_tokens": 5})
    refused(r"holds no token_ids \(4, 13\) of this run", other.sample, 0)
    for more in ({"seed": 1}, {"temperature": 0.5}, {"scale": "batch"}, {"records": records[:1]}):
        other = Rollouts(model, more.pop("records", records), recipe.digits, 4, **given, **more)
        refused(f"is of a run with another {next(iter(more), 'prompts')}; remove", other.sample, 0)
    (tmp_path / "000000.safetensors").write_bytes(b"damaged")
    refused("cannot be read", loader.sample, 0)
    for wrong, message in (
        ({"records": [{}]}, "NoneType as 'prompt'"),
        ({"records": []}, "there are no records; give at least one"),
        ({"records": ["one"]}, "a record is str; give a dictionary with a prompt"),
        ({"records": [{"prompt": "one", "prompts": 1}]}, "a record has 'prompts', an argument of"),
        ({"reward": None}, "reward is None; give a function"),
        ({"log_probs": "x"}, "log_probs is 'x'; give a function"),
        ({"scale": "std"}, "scale is 'std'; choose one of group, batch, none"),
        ({"timeout": 0}, "timeout is 0; give a number above 0"),
        ({"seed": 0.5}, "seed is 0.5; give a whole number"),
    ):
        settings = {"records": records, "reward": recipe.digits, "batch_size": 4, **given, **wrong}
        refused(message, Rollouts, model, **settings)
    several = {**given, "folder": str(tmp_path / "more"), "batches": 2}
    several["log_probs"] = lambda inputs: np.zeros(8)
    loader = Rollouts(model, records, recipe.digits, 4, **several)
    refused(r"log_probs returned shape \(8,\); return \(8, 10\)", loader.sample, 0)


def _end(learnt):
    return int(np.flatnonzero(learnt)[-1]) + 1
