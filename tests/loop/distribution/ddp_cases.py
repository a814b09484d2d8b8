"""What several torch processes train together, each a copy of the model, and one alone."""

import functools
import hashlib
import warnings

import keras
import numpy as np
import small_models
import torch

import kmodels
from kmodels.core import processes
from kmodels.distribution import distribute
from kmodels.training import AdamW, TrainStep
from kmodels.training.step_loss import track_step_loss
from kmodels.weights import gather
from refusals import messages

BATCH, ROWS = 8, 32


def images(weighted=False):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 16, 16, 3)).astype("float32")
    y = rng.integers(0, 10, ROWS)
    weights = rng.integers(0, 3, ROWS).astype("float32")
    return (x, y, weights) if weighted else (x, y)


def vit(dropout=0.0, num_classes=10, **kwargs):
    keras.utils.set_random_seed(3)
    return small_models.vit(16, num_classes, dropout_rate=dropout, **kwargs)


def digest(variables):
    found = hashlib.sha256()
    for variable in variables:
        found.update(np.ascontiguousarray(keras.ops.convert_to_numpy(variable.value)).tobytes())
    return found.hexdigest()


class Steps(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.logs = []
        self.accumulated = []

    def on_train_batch_end(self, batch, logs=None):
        self.logs.append({name: float(value) for name, value in (logs or {}).items()})
        held = getattr(self.model.optimizer, "_accumulated_gradients", [])
        self.accumulated.append(digest(held))


def trained(model, plan, optimizer, data, epochs=2, held_out=None, **compiled):
    model = model if plan is None else plan.prepare(model)
    compiled = {
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "metrics": ["accuracy"],
        "weighted_metrics": [keras.metrics.SparseCategoricalAccuracy(name="weighted")],
        **compiled,
    }
    model.compile(optimizer, **compiled)
    track_step_loss(model)
    return fitted(model, data, epochs, validation_data=held_out)


def fitted(model, data, epochs=2, **arguments):
    steps = Steps()
    history = model.fit(
        *data[:2],
        sample_weight=data[2] if len(data) > 2 else None,
        batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, callbacks=[steps], **arguments,
    ).history  # fmt: skip
    return {
        "history": {name: [float(v) for v in values] for name, values in history.items()},
        "steps": steps.logs,
        "accumulated": steps.accumulated,
        "digest": digest([*model.variables, *model.optimizer.variables]),
    }


def plain(plan):
    """Rows of different weight, held-out rows, clipping, decay by weight."""
    data = images(weighted=True)
    return trained(vit(), plan, AdamW(1e-2, clip_norm=0.5), data, held_out=data)


def accumulated_by_keras(plan):
    rule = keras.optimizers.AdamW(1e-2, gradient_accumulation_steps=2, global_clipnorm=0.5)
    return trained(vit(), plan, rule, images())


def accumulated_by_kmodels(plan):
    return trained(vit(), plan, AdamW(1e-2, accumulate=4, clip_norm=0.5, ema=0.9), images())


def accumulated_or_skipped(plan):
    """Here every step reduces, since one that is left out counts for all."""
    return trained(vit(), plan, AdamW(1e-2, accumulate=2, skip_non_finite=True), images())


def half(plan):
    return trained(vit(dtype="mixed_bfloat16"), plan, AdamW(1e-3), images())


def dropped(plan):
    """Twice the same run, and what a seed gives."""
    first, second = (trained(vit(0.3), plan, AdamW(1e-2), images(), 1) for _ in range(2))
    seed = keras.random.SeedGenerator(7)
    drawn = [keras.random.uniform((2,), seed=seed), kmodels.ops.dropout(torch.ones(64), 0.5, seed)]
    return {
        "first": first,
        "second": second,
        "drawn": [keras.ops.convert_to_numpy(part).tolist() for part in drawn],
        "state": keras.ops.convert_to_numpy(seed.state.value).tolist(),
    }


def gemma_lora(plan):
    keras.utils.set_random_seed(5)
    model = small_models.gemma()
    model.enable_lora(4, trainable_token_indices=[5, 40])
    frozen = digest(model.non_trainable_variables)
    rng = np.random.default_rng(1)
    ids = rng.integers(1, 50, (ROWS, 9))
    lengths = rng.integers(3, 9, ROWS)
    weights = (np.arange(8) < lengths[:, None]).astype("float32")
    x = {"token_ids": ids[:, :-1], "padding_mask": np.ones((ROWS, 8))}
    data = (x, ids[:, 1:], weights)
    model = model if plan is None else plan.prepare(model)
    model.compile(AdamW(1e-2))
    found = fitted(model, data)
    reduced = getattr(model.parallel, "_reducers", {})
    return found | {
        "frozen": frozen == digest(model.non_trainable_variables),
        "reduced": [len(key) for key in reduced],
        "trained": len(model.trainable_variables),
    }


def learnt_tokens(plan):
    """Batches of one update with 3, 17, 61 and 0 learnt tokens, most of them on the first rank."""
    keras.utils.set_random_seed(5)
    model = small_models.gemma()
    rng = np.random.default_rng(1)
    ids = rng.integers(1, 50, (ROWS, 9))
    weights = np.arange(BATCH * 8) < np.array([3, 17, 61, 0])[:, None]
    weights = weights.reshape(ROWS, 8).astype("float32")
    x = {"token_ids": ids[:, :-1], "padding_mask": np.ones((ROWS, 8))}
    data = (x, ids[:, 1:], weights)
    model = model if plan is None else plan.prepare(model)
    # Keras would divide by the weights of each process.
    by_weights = {"from_logits": True, "reduction": "mean_with_sample_weight"}
    loss = keras.losses.SparseCategoricalCrossentropy(**by_weights)
    model.compile(AdamW(1e-2, accumulate=4, clip_norm=0.5), loss)
    track_step_loss(model)
    found = fitted(model, data, validation_data=data)
    norms = [float(np.linalg.norm(gather.values(v))) for v in model.trainable_variables]
    return found | {"scores": {"norms": norms}}


def split(plan):
    """Layers over `model`, on Keras 3.16."""
    return trained(vit(), plan, AdamW(1e-2, clip_norm=0.5), images(weighted=True))


def objectives(plan):
    """A game of two; one of them holds a layer that nothing uses."""
    keras.utils.set_random_seed(9)
    makes = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(8, "gelu"), keras.layers.Dense(6)]
    )
    judges = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8, "gelu"), keras.layers.Dense(1)]
    )
    idle = keras.layers.Dense(3)
    idle.build((None, 6))
    ops = keras.ops

    def judge(models, batch, training):
        noise, real = batch
        fake = models["judges"](models["makes"](noise, training=False), training=training)
        real = models["judges"](real, training=training)
        loss = ops.mean(ops.softplus(fake)) + ops.mean(ops.softplus(-real))
        return loss, {"real": ops.mean(real)}

    def make(models, batch, training):
        fake = models["judges"](models["makes"](batch[0], training=training), training=False)
        return ops.mean(ops.softplus(-fake))

    step = TrainStep(
        {"makes": makes, "judges": judges, "idle": idle},
        {"judge": judge, "make": make},
        train={"judge": ["judges", "idle"], "make": ["makes"]},
    )
    step = step if plan is None else plan.prepare(step)
    adam = functools.partial(keras.optimizers.Adam, 1e-2)
    step.compile({"judge": adam(name="first", gradient_accumulation_steps=2), "make": adam()})
    rng = np.random.default_rng(2)
    data = [rng.normal(size=(ROWS, n)).astype("float32") for n in (4, 6)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Gradients do not exist")
        return fitted(step, data)


def refused(plan):
    """The line that each mistake gives; all processes make it at once."""
    x = np.zeros((8, 4), "float32")
    bare = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    normed = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(name="norm")])

    def loss(model, batch, training):
        return keras.ops.mean(model(batch, training=training))

    def other():
        model = plan.prepare(vit())
        if not processes.is_rank_zero():
            model.trainable_variables[0].assign_add(
                keras.ops.ones_like(model.trainable_variables[0])
            )
        trained(model, plan, "adam", images())

    wrapped = keras.layers.TorchModuleWrapper(torch.nn.BatchNorm1d(4), name="wrapped")
    total = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    attempts = {
        "bare": lambda: plan.prepare(bare),
        "norm": lambda: plan.prepare(TrainStep(normed, loss)),
        "wrapped": lambda: plan.prepare(TrainStep(wrapped, loss)),
        "sum": lambda: trained(vit(), plan, "adam", images(), loss=total),
        "other": other,
        "idle": lambda: distribute("data=1"),
    }
    if keras.__version__ < "3.16":
        attempts["model"] = lambda: distribute(f"model={plan.mesh.size}")
    found = messages(attempts)
    normed.layers[0].trainable = False
    step = plan.prepare(TrainStep(keras.Sequential([normed, bare]), loss))
    step.compile("sgd")
    step.fit(x, verbose=0)
    return found


CASES = {
    case.__name__: case
    for case in (
        plain, accumulated_by_keras, accumulated_by_kmodels, accumulated_or_skipped, half, dropped,
        gemma_lora, learnt_tokens, objectives,
    )
}  # fmt: skip
