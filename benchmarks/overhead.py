"""How much Python does a step cost, where its kernels cost nothing?

    KERAS_BACKEND=torch python benchmarks/overhead.py [--rounds 9] [--write]

Models of 12 blocks of width 16 at batch 1, in float32, on one thread: all that is left is what
Python and the framework's calls take, which is what a fast accelerator waits for. On torch, eager:
a ViT's forward pass and a step of `fit`, a Gemma's forward pass of 8 tokens and a generated token,
beside transformers (whose step is a plain loop with AdamW), keras-hub, the Keras tutorial's ViT
and, as kmodels_through_keras, kmodels with Keras' `__call__` around every layer. On JAX and
TensorFlow: a step of `fit` beside a bare loop around the same model and a compiled step, and with
`--depths 6,12,24` what the first step takes, which traces and compiles, by the number of blocks.

All systems run in one process, interleaved, after one round that counts for nothing. Times are
CPU time of the process, medians over the rounds. `first_s` is that first round, which traces and
compiles. Needs the environment with every peer.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import record

os.environ |= record.ONE_THREAD

import keras
import numpy as np
from vit_peers.common import Settings
from vit_peers.results import revision

from kmodels import training
from kmodels.layers.direct_calls import through_keras
from kmodels.models import GemmaBackbone, GemmaCausalLM, ViTBackbone, ViTImageClassifier

QUESTION = (__doc__ or "").splitlines()[0]
ROOT = Path(__file__).resolve().parents[1]
BACKEND = keras.backend.backend()
DEPTH, WIDTH, HEADS, MLP, CLASSES = 12, 16, 2, 32, 10
IMAGE, PATCH, WORDS, PROMPT, NEW = 16, 8, 256, 8, 16
CALLS, STEPS, RATE = 20, 20, 1e-3
# A run makes so many calls, steps or tokens, and returns nothing.
Run = Callable[[], None]

rng = np.random.default_rng(0)
IMAGES = rng.normal(size=(STEPS, IMAGE, IMAGE, 3)).astype("float32")
LABELS = rng.integers(0, CLASSES, STEPS)
TOKENS = rng.integers(3, WORDS, (1, PROMPT)).astype("int32")
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def vit(depth: int = DEPTH) -> Any:
    sizes = {"num_layers": depth, "num_heads": HEADS, "hidden_dim": WIDTH, "mlp_dim": MLP}
    shape = (IMAGE, IMAGE, 3)
    return ViTImageClassifier(ViTBackbone(image_shape=shape, patch_size=PATCH, **sizes), CLASSES)


def gemma() -> Any:
    sizes: dict[str, Any] = {"num_layers": DEPTH, "hidden_dim": WIDTH, "intermediate_dim": MLP}
    backbone = GemmaBackbone(
        vocabulary_size=WORDS, num_query_heads=HEADS, num_key_value_heads=1, head_dim=8, **sizes
    )
    return GemmaCausalLM(backbone)


def fitted(model: Any, optimizer: Any) -> Run:
    model.compile(optimizer, LOSS)
    return lambda: model.fit(IMAGES, LABELS, batch_size=1, shuffle=False, verbose=0)


def forward(model: Any, x: Any) -> Run:
    def run() -> None:
        for _ in range(CALLS):
            model(x, training=False)

    return run


def around(block: Callable[[], Any], run: Run) -> Run:
    def inside() -> None:
        with block():
            run()

    return inside


def generated(model: Any, **settings: Any) -> Run:
    model.compile(sampler="greedy", **settings)
    room = ((0, 0), (0, NEW))
    inputs = {"token_ids": np.pad(TOKENS, room), "padding_mask": np.pad(TOKENS > 0, room)}
    return lambda: model.generate(inputs, stop_token_ids=None)


def on_torch() -> dict[str, dict[str, Run]]:
    """Returns the systems of each question."""
    import keras_hub
    import torch
    from gemma_lora import import_transformers
    from vit_peers import keras_tutorial

    transformers = import_transformers()
    torch.set_num_threads(1)
    ours, language = vit(), gemma()
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS}
    sizes |= {"intermediate_size": MLP, "attn_implementation": "sdpa"}
    their = transformers.ViTForImageClassification(
        transformers.ViTConfig(image_size=IMAGE, patch_size=PATCH, num_labels=CLASSES, **sizes)
    )
    their_language = transformers.GemmaForCausalLM(
        transformers.GemmaConfig(
            vocab_size=WORDS, num_key_value_heads=1, head_dim=8, pad_token_id=0, **sizes
        )
    ).eval()
    hub = keras_hub.models.ViTImageClassifier(
        keras_hub.models.ViTBackbone(
            image_shape=(IMAGE, IMAGE, 3),
            patch_size=PATCH,
            num_layers=DEPTH,
            num_heads=HEADS,
            hidden_dim=WIDTH,
            mlp_dim=MLP,
        ),
        CLASSES,
        preprocessor=None,
    )
    hub_language = keras_hub.models.GemmaCausalLM(
        keras_hub.models.GemmaBackbone(
            vocabulary_size=WORDS,
            num_layers=DEPTH,
            num_query_heads=HEADS,
            num_key_value_heads=1,
            hidden_dim=WIDTH,
            intermediate_dim=MLP,
            head_dim=8,
        ),
        preprocessor=None,
    )
    tutorial = keras_tutorial.build(
        Settings(
            backend=BACKEND,
            width=WIDTH,
            heads=HEADS,
            mlp=MLP,
            depth=DEPTH,
            image=IMAGE,
            classes=CLASSES,
            batch=1,
            precision="float32",
            dropout=0.0,
            optimizer="adamw",
            weights="",
            patch=PATCH,
        )
    )
    images = torch.from_numpy(IMAGES[:1])
    channels_first = images.permute(0, 3, 1, 2).contiguous()
    tokens = torch.from_numpy(TOKENS)
    mask = torch.ones_like(tokens)
    long = tokens.long()

    def their_steps() -> None:
        their.train()
        for image, label in zip(IMAGES, LABELS, strict=True):
            x = torch.from_numpy(image).permute(2, 0, 1)[None]
            loss = their(x, labels=torch.tensor([label])).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    optimizer = torch.optim.AdamW(their.parameters(), RATE)

    def their_forward(model: Any, **inputs: Any) -> Run:
        def run() -> None:
            model.eval()
            for _ in range(CALLS):
                model(**inputs)

        return around(torch.no_grad, run)

    def their_tokens() -> None:
        their_language.generate(
            long, attention_mask=long > 0, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False
        )

    pairs = {"token_ids": tokens, "padding_mask": mask}
    trained = vit()
    return {
        "vit_forward": {
            "kmodels": around(torch.no_grad, forward(ours, images)),
            "kmodels_through_keras": around(
                through_keras, around(torch.no_grad, forward(ours, images))
            ),
            "transformers": their_forward(their, pixel_values=channels_first),
            "keras_hub": around(torch.no_grad, forward(hub, images)),
            "keras_tutorial": around(torch.no_grad, forward(tutorial, images)),
        },
        "vit_fit_step": {
            "kmodels": (ours_fit := fitted(trained, training.AdamW(RATE))),
            "kmodels_through_keras": around(through_keras, ours_fit),
            "transformers": their_steps,
            "keras_hub": fitted(hub, keras.optimizers.AdamW(RATE)),
            "keras_tutorial": fitted(tutorial, keras.optimizers.AdamW(RATE)),
        },
        "gemma_forward": {
            "kmodels": around(torch.no_grad, forward(language, pairs)),
            "kmodels_through_keras": around(
                through_keras, around(torch.no_grad, forward(language, pairs))
            ),
            "transformers": their_forward(
                their_language, input_ids=long, attention_mask=mask.long(), use_cache=False
            ),
            "keras_hub": around(torch.no_grad, forward(hub_language, pairs)),
        },
        "gemma_token": {
            "kmodels": generated(language),
            "transformers": their_tokens,
            "keras_hub": generated(hub_language),
        },
    }


def on_jax(depth: int = DEPTH) -> dict[str, dict[str, Run]]:
    """Returns `fit` and a bare loop."""
    import jax
    import optax

    model = vit(depth)
    update = optax.adamw(RATE)

    def loss_of(weights: Any, state: Any, images: Any, labels: Any) -> Any:
        logits, state = model.stateless_call(weights, state, images, training=True)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), state

    @jax.jit
    def step(weights: Any, state: Any, slots: Any, images: Any, labels: Any) -> Any:
        found = jax.value_and_grad(loss_of, has_aux=True)(weights, state, images, labels)
        (loss, state), gradients = found
        change, slots = update.update(gradients, slots, weights)
        return optax.apply_updates(weights, change), state, slots, loss

    # What `fit` makes of the model's own values is not what the loop holds.
    weights = jax.tree.map(lambda v: v.value.copy(), model.trainable_variables)
    held = [
        weights,
        jax.tree.map(lambda v: v.value.copy(), model.non_trainable_variables),
        update.init(weights),
    ]

    def bare() -> None:
        for row in range(STEPS):
            part = slice(row, row + 1)
            *held[:], loss = step(*held, IMAGES[part], LABELS[part])
        float(loss)

    fit = fitted(vit(depth), training.AdamW(RATE))
    return {"vit_fit_step": {"kmodels": fit, "bare_loop": bare}}


def on_tensorflow(depth: int = DEPTH) -> dict[str, dict[str, Run]]:
    """Returns `fit` and a bare loop."""
    import tensorflow as tf

    model, optimizer = vit(depth), keras.optimizers.AdamW(RATE)
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(images: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = LOSS(labels, model(images, training=True))
        values = [variable.value for variable in model.trainable_variables]
        optimizer.apply(tape.gradient(loss, values), model.trainable_variables)
        return loss

    def bare() -> None:
        for row in range(STEPS):
            part = slice(row, row + 1)
            loss = step(tf.constant(IMAGES[part]), tf.constant(LABELS[part]))
        float(loss)

    fit = fitted(vit(depth), training.AdamW(RATE))
    return {"vit_fit_step": {"kmodels": fit, "bare_loop": bare}}


SYSTEMS = {"torch": on_torch, "jax": on_jax, "tensorflow": on_tensorflow}
COUNTS = {"vit_forward": CALLS, "vit_fit_step": STEPS, "gemma_forward": CALLS, "gemma_token": NEW}


def measure(systems: dict[str, Run], count: int, rounds: int) -> dict[str, dict[str, float]]:
    """Returns milliseconds of each system, and kmodels' over its own."""
    times: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(rounds + 1):
        for name, run in systems.items():
            begun = time.process_time()
            run()
            times[name].append(time.process_time() - begun)
    middle = {
        name: 1e3 * statistics.median(all_[1:] or all_) / count for name, all_ in times.items()
    }
    return {
        name: {
            "ms": round(middle[name], 3),
            "kmodels_over_this": round(middle["kmodels"] / middle[name], 3),
            "first_s": round(times[name][0], 2),
        }
        for name in systems
    }


def first_steps(depths: list[int]) -> dict[str, dict[str, Any]]:
    """Returns seconds of the first steps of models of so many blocks, each model a new one."""
    rows = {}
    for depth in depths:
        systems = SYSTEMS[BACKEND](depth)["vit_fit_step"]
        row = measure(systems, STEPS, 0)
        rows[str(depth)] = {name: values["first_s"] for name, values in row.items()}
        print(f"first step, {depth} blocks: {rows[str(depth)]}", flush=True)
    return rows


def main() -> None:
    parser = record.flags(QUESTION)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="*", default=list(COUNTS), choices=list(COUNTS))
    parser.add_argument("--depths", help="numbers of blocks, for first steps; not on torch")
    options = parser.parse_args()
    if options.depths and BACKEND == "torch":
        parser.error("--depths is about tracing; torch runs its first step as all others")
    keras.utils.set_random_seed(0)
    rows = {}
    for question, systems in SYSTEMS[BACKEND]().items():
        if question in options.only:
            rows[question] = measure(systems, COUNTS[question], options.rounds)
            for name, row in rows[question].items():
                print(f"{question:<14} {name:<22} {row}", flush=True)
    depths = [int(depth) for depth in (options.depths or "").split(",") if depth]
    by_depth = {"first_step_s": first_steps(depths)} if depths else {}
    if options.write:
        packages = ["keras", "numpy", BACKEND]
        packages += ["transformers", "keras-hub"] if BACKEND == "torch" else []
        record.write(
            f"overhead_{BACKEND}_cpu",
            QUESTION,
            packages,
            backend=BACKEND,
            clock="process CPU, milliseconds a call, step or token",
            threads=1,
            sizes={"blocks": DEPTH, "width": WIDTH, "heads": HEADS, "mlp": MLP, "batch": 1},
            rounds=options.rounds,
            revision=revision(ROOT / "src"),
            rows=rows,
            **by_depth,
        )


if __name__ == "__main__":
    sys.exit(main())
