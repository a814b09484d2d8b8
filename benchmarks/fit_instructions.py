"""How many instructions does a step of `fit` take, beside a bare loop of the framework?

    KERAS_BACKEND=jax python benchmarks/fit_instructions.py [--sources src OTHER/src] [--write]

Needs valgrind. Seconds of equal processes differ by a tenth where a step takes a few milliseconds;
callgrind counts the same program to within a percent, whatever else the machine is doing. Counted
are 40 steps of a tiny ViT (two blocks of width 32, two pictures of 32 by 32, SGD), after 9 others.
The bare loop calls the same model in a compiled step of JAX or TensorFlow, or eagerly on torch.
It reads each loss, as a callback in "fit" does; "quiet" has no callback that asks for batches.
"lora" counts `fit` of Gemma 3's debug preset with adapters (four rows of 64 tokens), "positions"
the same with its loss divided by positions instead of learnt tokens. Each source, a folder that
holds the package, is counted in turn; the first is the one compared to.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import record
from vit_peers.results import revision

QUESTION = (__doc__ or "").splitlines()[0]
ROOT = Path(__file__).resolve().parents[1]
BACKEND = os.environ.get("KERAS_BACKEND", "torch")
WARM, COUNTED, ROWS = 9, 40, 2
RATE = 0.01
USUAL = ("fit", "bare")


def count(on: bool) -> None:
    """Has callgrind count this process from now on, or no more."""
    switch = ["callgrind_control", "-i", "on" if on else "off", str(os.getpid())]
    subprocess.run(switch, check=True, stdout=subprocess.DEVNULL)


def turns() -> Iterator[int]:
    """The steps of a loop; those after the first are counted."""
    for step in range(WARM + COUNTED):
        if step == WARM:
            count(True)
        yield step
    count(False)


def counted_fit(model: Any, x: Any, y: Any, rows: int, quiet: bool = False) -> None:
    import keras

    from kmodels.data.pipeline.request import FitCallback

    class Switch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch in (WARM - 1, WARM + COUNTED - 1):
                count(batch == WARM - 1)

    class Quiet(FitCallback):
        steps = 0

        def after_step(self) -> None:
            self.steps += 1
            if self.steps in (WARM, WARM + COUNTED):
                count(self.steps == WARM)

    switch = Quiet() if quiet else Switch()
    model.fit(x, y, batch_size=rows, shuffle=False, verbose=0, callbacks=[switch])


def fit(model: Any, x: Any, y: Any, quiet: bool = False) -> None:
    import keras

    from kmodels import training

    model.compile(training.SGD(RATE), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    counted_fit(model, x, y, ROWS, quiet)


def quiet(model: Any, x: Any, y: Any) -> None:
    fit(model, x, y, quiet=True)


def lora(**normalization: Any) -> None:
    """The child of "lora" and "positions"."""
    import keras
    import numpy as np

    from kmodels import training
    from kmodels.models import Gemma3CausalLM

    keras.utils.set_random_seed(0)
    model = Gemma3CausalLM.from_preset("gemma3_debug")
    model.backbone.enable_lora(4)
    model.compile(training.AdamW(1e-3), **normalization)
    ids = (np.arange(4 * (WARM + COUNTED) * 65).reshape(-1, 65) * 7) % 200
    counted_fit(model, ids[:, :-1], ids[:, 1:], 4)
    os._exit(0)


def bare_torch(model: Any, x: Any, y: Any) -> None:
    import torch

    weights = [variable.value for variable in model.trainable_variables]
    for step in turns():
        rows = slice(ROWS * step, ROWS * (step + 1))
        logits = model(torch.from_numpy(x[rows]), training=True)
        loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(y[rows]))
        gradients = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            torch._foreach_add_(weights, list(gradients), alpha=-RATE)
        loss.item()


def bare_jax(model: Any, x: Any, y: Any) -> None:
    import jax
    import jax.numpy as jnp

    def loss_of(weights: Any, state: Any, images: Any, labels: Any) -> Any:
        logits, state = model.stateless_call(weights, state, images, training=True)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1)
        return -picked.mean(), state

    @jax.jit
    def run(weights: Any, state: Any, images: Any, labels: Any) -> Any:
        found = jax.value_and_grad(loss_of, has_aux=True)(weights, state, images, labels)
        (loss, state), gradients = found
        return jax.tree.map(lambda w, g: w - RATE * g, weights, gradients), state, loss

    weights = [variable.value for variable in model.trainable_variables]
    state = [variable.value for variable in model.non_trainable_variables]
    for step in turns():
        rows = slice(ROWS * step, ROWS * (step + 1))
        weights, state, loss = run(weights, state, x[rows], y[rows])
        float(loss)


def bare_tensorflow(model: Any, x: Any, y: Any) -> None:
    import tensorflow as tf

    weights = [variable.value for variable in model.trainable_variables]

    @tf.function
    def run(images: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_mean(each)
        gradients: Any = tape.gradient(loss, weights)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.assign_sub(RATE * gradient)
        return loss

    for step in turns():
        rows = slice(ROWS * step, ROWS * (step + 1))
        float(run(tf.constant(x[rows]), tf.constant(y[rows])))


BARE = {"torch": bare_torch, "jax": bare_jax, "tensorflow": bare_tensorflow}


def train(loop: Callable[[Any, Any, Any], None]) -> None:
    """The child: builds the model and runs a loop."""
    import keras
    import numpy as np

    from kmodels.models import ViTBackbone, ViTImageClassifier

    keras.utils.set_random_seed(0)
    sizes = {"num_layers": 2, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 64}
    backbone = ViTBackbone(
        image_shape=(32, 32, 3), patch_size=8, dropout_rate=0.0, attention_dropout=0.0, **sizes
    )
    model = ViTImageClassifier(backbone, 10)
    rng, total = np.random.default_rng(0), ROWS * (WARM + COUNTED)
    loop(model, rng.normal(size=(total, 32, 32, 3)).astype("float32"), rng.integers(0, 10, total))
    os._exit(0)  # Threads that end under valgrind take minutes.


def instructions(source: Path, loop: str) -> float:
    """Millions of instructions of a step, of the process and all its threads."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "count"
        tool = ["valgrind", "--tool=callgrind", "--instr-atstart=no"]
        environment = {**os.environ, **record.ONE_THREAD, "PYTHONHASHSEED": "0"}
        subprocess.run(
            [*tool, f"--callgrind-out-file={out}", sys.executable, __file__, "--child", loop],
            env={**environment, "PYTHONPATH": str(source)},
            check=True,
            capture_output=True,
        )
        lines = out.read_text().splitlines()
        total = next(line for line in reversed(lines) if line.startswith("totals:"))
        return int(total.split()[1]) / COUNTED / 1e6


def main() -> None:
    parser = record.flags(QUESTION)
    parser.add_argument("--sources", type=Path, nargs="+", default=[ROOT / "src"])
    loops = (*USUAL, "quiet", "lora", "positions")
    parser.add_argument("--loops", nargs="+", choices=loops, default=list(USUAL))
    parser.add_argument("--child", choices=loops, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child in ("lora", "positions"):
        lora(**({"loss_normalization": "positions"} if options.child == "positions" else {}))
    if options.child:
        train({"fit": fit, "quiet": quiet, "bare": BARE[BACKEND]}[options.child])
        return
    rows: list[dict[str, Any]] = []
    for source in options.sources:
        source = source.resolve()
        row: dict[str, Any] = {"revision": revision(source)}
        row |= {loop: round(instructions(source, loop), 3) for loop in options.loops}
        for over, under in (("fit", "bare"), ("quiet", "bare"), ("lora", "positions")):
            if over in row and under in row:
                row[f"{over} / {under}"] = round(row[over] / row[under], 4)
        rows.append(row)
        print(BACKEND, row, flush=True)
    if options.write:
        # Results of other loops than usual have these in the name of the file.
        name = "-".join([BACKEND, *(loop for loop in options.loops if loop not in USUAL)])
        unit = "millions of instructions a step"
        packages = ("keras", "numpy", BACKEND)
        record.write(f"fit_instructions_{name}_cpu", QUESTION, packages, unit=unit, rows=rows)


if __name__ == "__main__":
    main()
