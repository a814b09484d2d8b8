"""Twenty updates equal those of transformers' Trainer: losses, and norms of gradients."""

import keras
import numpy as np
import pytest

from kmodels.models import GemmaCausalLM
from kmodels.training import SGD, track_step_loss

UPDATES, ACCUMULATE, ROWS, LENGTH, CLIP = 20, 3, 4, 12, 0.5
# Adam moves weights with a gradient near zero by the sign of its rounding.
RATE, MOMENTUM = 0.05, 0.9


def batches():
    """Rows of token ids, and which tokens are learnt: from one to all of a row."""
    rng = np.random.default_rng(0)
    ids = rng.integers(1, 200, (UPDATES * ACCUMULATE * ROWS, LENGTH + 1))
    lengths = rng.integers(1, LENGTH + 1, len(ids))
    return ids, np.arange(LENGTH) < lengths[:, None]


class Norms(SGD):
    """Keeps the norm of the gradients of each update, as Trainer logs it: before it is clipped."""

    def before_clipping(self, grads):
        grads = super().before_clipping(grads)
        self.norms.append(float(sum(keras.ops.sum(keras.ops.square(g)) for g in grads)) ** 0.5)
        return grads


def ours(model):
    ids, learnt = batches()
    optimizer = Norms(RATE, MOMENTUM, clip_norm=CLIP, accumulate=ACCUMULATE)
    vars(optimizer)["norms"] = []
    model.compile(optimizer, jit_compile=False)
    track_step_loss(model)
    losses = []
    keep = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: losses.append(float(logs["step_loss"]))
    )
    x, y = ids[:, :-1], ids[:, 1:]
    weights = learnt.astype("float32")
    model.fit(
        x, y, sample_weight=weights, batch_size=ROWS, shuffle=False, verbose=0, callbacks=[keep]
    )
    # The loss of an update is that of its tokens.
    tokens = weights.reshape(UPDATES, ACCUMULATE, -1).sum(-1)
    losses = np.reshape(losses, (UPDATES, ACCUMULATE))
    return (losses * tokens).sum(1) / tokens.sum(1), optimizer.norms


def theirs(folder, out):
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    ids, learnt = batches()
    # Its model shifts the labels.
    labels = np.concatenate([np.full((len(ids), 1), -100), np.where(learnt, ids[:, 1:], -100)], 1)
    rows = [
        {
            "input_ids": torch.tensor(i),
            "labels": torch.tensor(j),
            "attention_mask": torch.ones(len(i)),
        }
        for i, j in zip(ids, labels, strict=True)
    ]
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(
            output_dir=str(out),
            per_device_train_batch_size=ROWS,
            gradient_accumulation_steps=ACCUMULATE,
            max_steps=UPDATES,
            lr_scheduler_type="constant",
            max_grad_norm=CLIP,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=rows,
        optimizers=(torch.optim.SGD(model.parameters(), RATE, MOMENTUM), None),
    )
    trainer._get_train_sampler = lambda *args: torch.utils.data.SequentialSampler(rows)
    trainer.train()
    logs = [row for row in trainer.state.log_history if "grad_norm" in row]
    return [float(row["loss"]) for row in logs], [float(row["grad_norm"]) for row in logs]


@pytest.mark.across("torch")
@pytest.mark.filterwarnings("ignore")
def test_losses_and_norms_are_those_of_transformers_trainer(tmp_path):
    keras.utils.set_random_seed(1)
    model = GemmaCausalLM.from_preset("gemma_debug", dropout=0.0)
    folder = model.export_to_transformers(tmp_path / "gemma")
    wanted_losses, wanted_norms = theirs(folder, tmp_path / "out")
    losses, norms = ours(model)
    assert len(wanted_losses) == len(losses) == UPDATES
    np.testing.assert_allclose(losses, wanted_losses, rtol=0, atol=1e-5)
    np.testing.assert_allclose(norms, wanted_norms, rtol=0, atol=1e-5)
