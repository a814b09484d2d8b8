"""What torch processes train whose weights lie in parts, and what one alone does.

python tests/loop/distribution/parts_torch.py FOLDER MESH:CASE:CASE... runs cases, those of
`ddp_cases` too, in one of several processes; the last line is what was found, as JSON.
"""

import hashlib
import json
import sys
from collections import Counter
from pathlib import Path

import ddp_cases
import keras
import numpy as np
import torch
from ddp_cases import (
    accumulated_by_keras,
    accumulated_or_skipped,
    fitted,
    images,
    learnt_tokens,
    objectives,
    plain,
    refused,
    split,
    trained,
    vit,
)

from kmodels.checkpoint import state
from kmodels.core import keras_internals, processes
from kmodels.distribution import distribute
from kmodels.layers.remat import rematerialize
from kmodels.models import GemmaCausalLM
from kmodels.training import AdamW, Lamb, TrainStep
from kmodels.weights import gather
from refusals import messages

ROWS, LENGTH, PRESET = 32, 8, "gemma_debug"
LORA = ("query", "value")
folder = Path()
travelled: Counter[str] = Counter()


def digest(variables):
    """Over whole values: all processes gather them together."""
    found = hashlib.sha256()
    for variable in variables:
        found.update(np.ascontiguousarray(gather.values(variable)).tobytes())
    return found.hexdigest()


ddp_cases.digest = digest


def watch():
    """Counts what FSDP2 sends, by name and dtype."""
    for name in ("all_gather_single", "reduce_scatter_single"):
        call = getattr(torch.distributed, name)

        def counted(*args, name=name, call=call, **kwargs):
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
            travelled[f"{name} {tensors[0].dtype}"] += 1
            return call(*args, **kwargs)

        setattr(torch.distributed, name, counted)


class Steps(ddp_cases.Steps):
    """Also how many reductions of gradients each step has."""

    def __init__(self):
        super().__init__()
        self.reduced = []
        Steps.latest = self

    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch, logs)
        now = sum(n for name, n in travelled.items() if name.startswith("reduce"))
        self.reduced.append(now - sum(self.reduced))


ddp_cases.Steps = Steps


def texts():
    rng = np.random.default_rng(1)
    ids = rng.integers(1, 256, (ROWS, LENGTH + 1))
    lengths = rng.integers(3, LENGTH + 1, ROWS)
    weights = (np.arange(LENGTH) < lengths[:, None]).astype("float32")
    x = {"token_ids": ids[:, :-1], "padding_mask": np.ones((ROWS, LENGTH))}
    return x, ids[:, 1:], weights


def loaded(plan, preset, lora=(), remat="none", **settings):
    """A model of a directory, or a new one, and how many weights waited for their values."""
    keras.utils.set_random_seed(5)
    model = GemmaCausalLM.from_preset(preset, **settings)
    if lora:
        model.enable_lora(2, targets=lora)
    rematerialize(model, remat)
    waiting = sum(not keras_internals.has_value(variable) for variable in model.weights)
    return (model if plan is None else plan.prepare(model)), waiting


def gemma(plan, optimizer, *args, **settings):
    """A run, what lies where, what travelled, and what the model predicts."""
    travelled.clear()
    model, waiting = loaded(plan, *args, **settings)
    begun = digest(model.weights)
    frozen = digest(model.non_trainable_weights)
    model.compile(optimizer)
    x, y, weights = texts()
    found = fitted(model, (x, y, weights))
    scores = model.evaluate(x, y, sample_weight=weights, batch_size=8, verbose=0, return_dict=True)
    logits = model.predict(x, batch_size=8, verbose=0)
    return found | {
        "tokens": int(weights.sum()),
        "begun": begun,
        "frozen": frozen == digest(model.non_trainable_weights),
        "waiting": [waiting, len(model.weights)],
        "reduced": Steps.latest.reduced,
        "travelled": sorted(travelled),
        "scores": {name: float(value) for name, value in scores.items()},
        "logits": [float(np.mean(logits)), float(np.std(logits))],
        "weights": held(model.weights),
        "slots": held(model.optimizer.variables),
    }


def held(variables):
    """Bytes that this process holds, and those of whole values."""
    own = [variable.value for variable in variables]
    own = [value.to_local() if hasattr(value, "to_local") else value for value in own]
    whole = [v.value.element_size() * int(np.prod(v.shape)) for v in variables]
    return [sum(value.nbytes for value in own), sum(whole)]


def lora(plan):
    """A frozen base out of a file; the gradients of four steps travel once."""
    return gemma(plan, AdamW(1e-2, accumulate=4, clip_norm=0.5), folder, lora=LORA)


def few_bits(plan):
    """Adapters on a base whose blocks are nf4 and int8."""
    return gemma(plan, AdamW(1e-2, clip_norm=0.5), folder.with_name("few_bits"), lora=LORA)


def untied(plan):
    """Adapters of the table and of the output layer, whose loss takes both apart."""
    targets = ("query", "token_embedding", "reverse_embeddings")
    return gemma(plan, AdamW(1e-2), PRESET, lora=targets, tie_word_embeddings=False)


def tied(plan):
    """All is trained, the table by the lookup and by the loss; every step reduces."""
    return gemma(plan, AdamW(1e-2, accumulate=2, ema=0.9), folder, remat="block")


def drawn(plan):
    """New weights, half as wide where they are computed with."""
    return gemma(plan, AdamW(1e-3), PRESET, dtype="mixed_bfloat16")


def settled(plan):
    """The state is read in the middle of an accumulation, as a checkpoint does."""
    model, _ = loaded(plan, folder, lora=LORA)
    model.compile(AdamW(1e-2, accumulate=4))
    x, y, _ = texts()
    found = []
    for steps in (3, 1):
        model.fit(x, y, batch_size=8, steps_per_epoch=steps, shuffle=False, verbose=0)
        slots = state.parts(model, True)["optimizer"]
        held = [gather.values(v) for k, v in slots.items() if "gradient_accumulator" in k]
        found.append(float(np.sqrt(sum(np.square(part).sum() for part in held))))
    moved = [v for v in model.trainable_weights if "lora_b" in v.path]
    found.append(float(sum(np.abs(gather.values(v)).sum() for v in moved)))
    return {"history": {"norms": found}, "steps": [], "digest": digest(model.weights)}


def refused_in_parts(plan):
    """The line that each mistake gives; all processes make it at once."""

    def new(**settings):
        return GemmaCausalLM.from_preset(PRESET, **settings)

    def fit(model, optimizer="adam", **settings):
        model.compile(optimizer, **settings)
        model.fit(*texts()[:2], batch_size=8, steps_per_epoch=1, verbose=0)

    def late():
        model = plan.prepare(new())
        model.enable_lora(2)
        fit(model)

    def thaw(model):
        model.backbone.blocks[0].attention_norm.scale.trainable = True

    def thawed():
        model = new()
        model.backbone.trainable = False
        model = plan.prepare(model)
        thaw(model)
        fit(model)

    def mixed():
        model = new(dtype="bfloat16")
        model.enable_lora(2)
        thaw(model)
        plan.prepare(model)

    def dora():
        model = new()
        model.enable_lora(2, dora=True)
        plan.prepare(model)

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.scale = self.add_weight(shape=(4,), name="scale")
            self.built = True

        def call(self, x):
            return x * self.scale

    prepared, ids = plan.prepare(new()), np.ones((2, 3), "int32")
    prompts = {"token_ids": ids, "padding_mask": ids}
    return messages(
        {
            "late": late,
            "thawed": thawed,
            "graph": lambda: fit(plan.prepare(new()), jit_compile=True),
            "slots": lambda: fit(plan.prepare(new()), keras.optimizers.Adafactor()),
            "matrices": lambda: fit(plan.prepare(new()), Lamb()),
            "float16": lambda: plan.prepare(vit(dtype="mixed_float16")),
            "fit": lambda: fit(new()),
            "saving": lambda: new().save_to_preset(folder / "waiting"),
            "own": lambda: plan.prepare(TrainStep(Own(), print)),
            "mixed": mixed,
            "dora": dora,
            "quantize": lambda: new().quantize("int8"),
            "generate": lambda: prepared.generate(prompts, max_length=5, stop_token_ids=None),
            "merge": prepared.merge_lora,
        }
    )


def momentum(plan):
    """Keras' own optimizer, on tensors in parts; a vector of eleven does not divide by two."""
    rule = keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.1)
    return trained(vit(num_classes=11), plan, rule, images(), 1)


CASES = {
    case.__name__: case
    for case in (
        plain, accumulated_by_keras, accumulated_or_skipped, objectives, momentum, lora, tied,
        few_bits, untied, drawn, settled, learnt_tokens,
    )
}  # fmt: skip

if __name__ == "__main__":
    folder, *runs = Path(sys.argv[1]), *sys.argv[2:]
    processes.join()
    watch()
    cases = ddp_cases.CASES | CASES
    cases |= {case.__name__: case for case in (split, refused, refused_in_parts)}
    result = {}
    for run in runs:
        mesh, _, names = run.partition(":")
        plan = distribute(mesh)
        result |= {f"{mesh}:{name}": cases[name](plan) for name in names.split(":")}
    print(json.dumps(result))
