"""The loss of a language model's head, forward and backward by the hidden states.

`kmodels_tile_N` has tiles of N words in place of the number that `tile_of` chooses, and
`kmodels_compiled` is under `torch.compile`: one run says which should be the default.
"""

import importlib
from typing import Any

import numpy as np

from accelerator import clock


def run(settings: dict[str, Any]) -> clock.Parts:
    """Yields a row per system; `loss` shows that all compute the same."""
    import keras

    from kmodels import ops

    positions, width, words = settings["sizes"]
    rng = np.random.default_rng(0)
    hidden = keras.random.normal((positions, width), dtype="bfloat16", seed=1)
    table = keras.random.normal((words, width), 0.0, width**-0.5, "bfloat16", seed=2)
    labels = keras.ops.convert_to_tensor(rng.integers(0, words, positions).astype("int32"))
    weights = keras.ops.ones(positions, "float32")
    op = ops.linear_cross_entropy

    def ours(x: Any) -> Any:
        return op(x, table, labels, weights)[0] / positions

    losses = {"kmodels": ours}
    for words_of_tile in settings["tiles"]:
        losses[f"kmodels_tile_{words_of_tile}"] = with_tile(ours, words_of_tile, positions)
    if clock.backend() == "torch":
        losses["kmodels_compiled"] = clock.compiled(ours)
        losses |= clock.optional("torch_peers", lambda: torch_peers(table, labels))
        systems = {name: torch_step(loss, hidden) for name, loss in losses.items()}
    else:
        losses["jax_plain"] = jax_plain(table, labels)
        systems = {name: jax_step(loss, hidden) for name, loss in losses.items()}
    rows = yield from clock.measure(f"{positions}x{width} on {words}", systems, settings["rounds"])
    for row in rows:
        if "median_ms" in row:
            row["loss"] = round(float(systems[row["system"]]()[0]), 4)
    tile = importlib.import_module("kmodels.ops.linear_cross_entropy").tile_of
    rows[0]["tile"] = tile(words, positions, clock.on_gpu())
    rows[0]["declines"] = op.declines(hidden, table, labels, weights)
    peers = {"liger": "liger_kernel", "cut_cross_entropy": "cut_cross_entropy"}
    yield {"rows": rows, "absent": clock.absent(**peers) if clock.backend() == "torch" else []}


def with_tile(loss: Any, tile: int, positions: int) -> Any:
    """Returns the loss in tiles of so many words, on an accelerator."""
    module = importlib.import_module("kmodels.ops.linear_cross_entropy")

    def run(x: Any) -> Any:
        chosen = module.BUDGET
        module.BUDGET = 4 * positions * tile  # type: ignore[attr-defined]
        try:
            return loss(x)
        finally:
            module.BUDGET = chosen  # type: ignore[attr-defined]

    return run


def torch_step(loss: Any, hidden: Any) -> clock.Run:
    import torch

    x = hidden.detach().clone().requires_grad_(True)

    def step() -> Any:
        value = loss(x)
        return value.detach(), torch.autograd.grad(value, x)

    return step


def torch_peers(table: Any, labels: Any) -> dict[str, Any]:
    from torch.nn.functional import cross_entropy

    right = labels.long()

    def plain(x: Any) -> Any:
        return cross_entropy((x @ table.T).float(), right)

    found = {"torch_eager": plain, "torch_compiled": clock.compiled(plain)}
    if clock.on_gpu() and not clock.absent(x="liger_kernel"):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        liger = LigerFusedLinearCrossEntropyLoss()
        found["liger"] = lambda x: liger(table, x, right)
    if clock.on_gpu() and not clock.absent(x="cut_cross_entropy"):
        from cut_cross_entropy import linear_cross_entropy

        found["cut_cross_entropy"] = lambda x: linear_cross_entropy(x, table, right)
    return found


def jax_plain(table: Any, labels: Any) -> Any:
    import jax
    import optax

    def plain(x: Any) -> Any:
        logits = jax.numpy.matmul(x, table.T).astype("float32")
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return plain


def jax_step(loss: Any, hidden: Any) -> clock.Run:
    import jax

    compiled = jax.jit(jax.value_and_grad(loss))
    return lambda: compiled(hidden)
