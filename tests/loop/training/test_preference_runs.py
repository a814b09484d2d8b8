"""Twenty steps of DPO and KTO have TRL's losses, see `trl_runs`."""

import json
from pathlib import Path

import keras
import numpy as np
import pytest

import trl_runs
from kmodels import training
from kmodels.models import GemmaCausalLM, Qwen3CausalLM
from recipe_modules import load
from tolerances import tolerance

LOSSES = json.loads(Path(__file__).with_name("trl_losses.json").read_text())["runs"]
KINDS = {"gemma3": GemmaCausalLM, "qwen3": Qwen3CausalLM}


def batch(records, method):
    """What the recipe's loader yields: each answer with the other one, or with another record's."""
    prompts = [row["prompt"] for row in records]
    chosen, rejected = ([row[name] for row in records] for name in ("chosen", "rejected"))
    others = rejected if method == "dpo" else [chosen[-1], *chosen[:-1]]
    both = [trl_runs.rows_of(prompts, answers) for answers in (chosen, others)]
    ids, there, learnt = (np.stack(parts, axis=1) for parts in zip(*both, strict=True))
    inputs = {"token_ids": ids[..., :-1], "padding_mask": there[..., :-1].astype(bool)}
    if method == "kto":
        inputs["desirable"] = np.array([row["label"] for row in records], "int32")
    return inputs, ids[..., 1:], learnt[..., 1:].astype("float32")


@pytest.mark.each_time("gemma3 kto", "qwen3 dpo")
@pytest.mark.parametrize("name", sorted(LOSSES))
def test_twenty_steps_have_the_losses_of_trl(name, tmp_path):
    family, method = name.split()
    recipe = load("prefer")
    base = trl_runs.write_model(family, tmp_path / "base")
    model = KINDS[family].from_preset(base, dtype="float32")
    model.load_adapter(trl_runs.write_adapter(tmp_path / "adapter"))
    loss, names = recipe.pair_loss(training.PreferenceLoss(beta=trl_runs.BETA)), recipe.OF_PAIRS
    if method == "kto":
        loss, names = recipe.label_loss(training.KTOLoss(trl_runs.BETA)), recipe.OF_LABELS
    step = training.TrainStep(model, loss)
    step.compile(
        training.AdamW(trl_runs.RATE, epsilon=1e-8, weight_decay=0.0, clip_norm=trl_runs.CLIP),
        metrics=[keras.metrics.Mean(name=name) for name in names],
    )
    losses = []
    for records in trl_runs.records():
        step.reset_metrics()
        logs = step.train_on_batch(*batch(records, method), return_dict=True)
        losses.append(float(logs["loss"]))
    np.testing.assert_allclose(losses, LOSSES[name], rtol=0, atol=tolerance("trl_runs"))
    assert np.ptp(LOSSES[name]) > 0.01
