"""One process of a run that is saved, left, restored and exported.

KERAS_BACKEND=jax python tests/loop/distribution/run_in_parts.py FOLDER MESH WHAT...

WHAT is done in the order given; see the functions. The last line is what was found, as JSON.
"""

import json
import os
import shutil
import signal
import sys
import zlib
from pathlib import Path
from typing import Any

import keras
import numpy as np
import small_models

from kmodels.checkpoint import manager, state
from kmodels.core import processes
from kmodels.distribution import distribute
from kmodels.training import AdamW, load_orbax, save_orbax
from refusals import messages
from stopped_runs import Kill, Killed

BATCH, STEPS, EPOCHS, WHOLE = 8, 4, 2, "whole"
# Between two steps whose gradients are accumulated, within the second epoch.
EVERY, LEFT = 5, 6
rng = np.random.default_rng(0)
X = rng.normal(size=(BATCH * STEPS, 8, 8, 3)).astype("float32")
Y = rng.integers(0, 4, len(X))


def make(mesh, optimizer=AdamW, name="adamw") -> Any:
    """The model on a mesh, as a new process would make it."""
    plan = distribute(mesh)
    keras.utils.set_random_seed(3)
    model: Any = small_models.vit(8, 4, dropout_rate=0.1)
    model = model if plan is None else plan.prepare(model)
    settings = {"ema": 0.9, "accumulate": 2} if optimizer is AdamW else {}
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer(0.01, name=name, **settings), loss, weighted_metrics=["accuracy"])
    return plan, model


def fit(plan, model, folder, *callbacks, epochs=EPOCHS):
    history = model.fit(
        X, Y, batch_size=BATCH, epochs=epochs, validation_data=(X[:12], Y[:12]), verbose=0,
        callbacks=[*plan.callbacks(folder, every=EVERY, keep=9), *callbacks],
    )  # fmt: skip
    return history.history


def everything(model):
    held = state.parts(model, False)
    return {
        f"{part} {name}": variable
        for part in ("model", "optimizer")
        for name, variable in held[part].items()
    }


def values(model):
    return state.whole(everything(model))


def draw(model):
    """Gives a model and its optimizer random values, the same in each process."""
    for name, variable in everything(model).items():
        seed = zlib.crc32(name.encode())
        drawn = np.random.default_rng(seed).integers(0, 99, variable.shape)
        variable.assign(drawn.astype(keras.backend.standardize_dtype(variable.dtype)))


def keep(file, arrays: Any):
    np.savez(file, **arrays)


def differing(model, expected):
    """Names of what is not bit for bit what a trained model had."""
    found = values(model)
    wrong = found.keys() ^ expected.keys()
    for name in found.keys() & expected.keys():
        one, other = found[name], expected[name]
        if one.dtype.kind in "iu":  # Wider on some backends.
            one, other = one.astype("int64"), other.astype("int64")
        if one.dtype != other.dtype or one.tobytes() != other.tobytes():
            wrong.add(name)
    return sorted(wrong)


def newest(run) -> Any:
    return manager.newest(run)


def whole(folder, mesh, found):
    """A run that nothing happens to; what the model holds at its end is kept beside it."""
    plan, model = make(mesh)
    history = fit(plan, model, folder / f"{WHOLE} {mesh}")
    found[f"whole {mesh}"] = {"digest": state.weights_digest(model), "history": history}
    expected = values(model)
    if processes.is_rank_zero():
        keep(folder / f"{WHOLE} {mesh}.npz", expected)


def cut(folder, mesh, found):
    """The same, left within the second epoch, and continued by another model."""
    run = folder / f"cut {mesh}"
    plan, model = make(mesh)
    try:
        fit(plan, model, run, Kill(LEFT))
    except Killed:
        pass
    plan, model = make(mesh)
    history = fit(plan, model, run)
    found[f"cut {mesh}"] = {"digest": state.weights_digest(model), "history": history}


def killed(folder, mesh, found):
    """Process 1 dies within the second epoch."""
    plan, model = make(mesh)
    act = Kill(LEFT, lambda: os.kill(os.getpid(), signal.SIGKILL))
    fit(plan, model, folder / "killed", *([act] if processes.index() == 1 else []))


def restored(folder, mesh, found):
    """The last checkpoint of the whole run, on its mesh and on others; `+` stands between them."""
    meshes = mesh.split("+")
    run = folder / f"{WHOLE} {meshes[0]}"
    path, described, _ = newest(run)
    with np.load(f"{run}.npz") as expected:
        for other in meshes:
            _, model = make(other)
            manager.restore(path, described, model)
            found[f"restored on {other}"] = differing(model, expected)


def refused(folder, mesh, found):
    """Checkpoints that do not fit, damage that one process sees, a directory that one does not."""
    run = folder / "refused"
    if processes.is_rank_zero():
        shutil.copytree(folder / f"{WHOLE} {mesh}", run)
    processes.all_gather_object("copied", None)

    def wrong(optimizer, name):
        plan, model = make(mesh, optimizer, name)
        fit(plan, model, run)

    found["refused"] = messages(
        {
            "class": lambda: wrong(keras.optimizers.Adam, "adamw"),
            "name": lambda: wrong(AdamW, "other"),
            "apart": lambda: fit(*make(mesh), folder / str(processes.index())),
        }
    )
    last = manager.list_checkpoints(run)[0]
    if processes.is_rank_zero():
        file = max(last.glob("model-00001*"))
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    processes.all_gather_object("damaged", None)
    path, _, reasons = newest(run)
    found["damaged"] = [last.name, path.name, reasons]


def stopped(folder, mesh, found):
    """A signal to process 1 alone stops all, saved after the same step."""
    plan, model = make(mesh)
    act = []
    if processes.index() == 1:
        act.append(Kill(2, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    try:
        fit(plan, model, folder / "stopped", *act)
    except SystemExit as error:
        found["stopped"] = error.code
    _, described, _ = newest(folder / "stopped")
    found["stopped at"] = described.step


def exported(folder, mesh, found):
    """An ordinary directory, written by one process."""
    plan, model = make(mesh)
    path, described, _ = newest(folder / f"{WHOLE} {mesh}")
    manager.restore(path, described, model)
    plan.export(model, folder / "exported")
    found["exported"] = state.weights_digest(model)
    # Where the disk is full for the one that writes, all hear of it.
    place = Path("/dev/full/export") if processes.is_rank_zero() else folder / "other"
    found["no export"] = messages(
        {
            "in parts": lambda: model.save_weights(folder / "weights.weights.h5"),
            "disk is full": lambda: plan.export(model, place),
        }
    )
    found["kernels in parts"] = sum(
        state.sharded(v) and v.path.endswith("kernel") for v in model.weights
    )


def orbaxed(folder, mesh, found):
    """Random values through Orbax's files, of which each process writes a share."""
    first, *others = mesh.split("+")
    _, model = make(first)
    draw(model)
    expected = values(model)
    save_orbax(model, folder / "orbax")
    for other in others:
        # Named otherwise, and without slots yet: where Keras' own loading leaves them at zero.
        _, model = make(other, name="other")
        load_orbax(model, folder / "orbax")
        found[f"restored on {other}"] = differing(model, expected)
    if processes.is_rank_zero():
        keep(folder / "orbax.npz", expected)


def dcp(folder, mesh, found):
    """What torch.distributed.checkpoint itself writes of the last checkpoint's model."""
    import torch.distributed.checkpoint as torch_checkpoint

    _, model = make(mesh)
    path, described, _ = newest(folder / f"{WHOLE} {mesh}")
    manager.restore(path, described, model)
    held = {name: v.value.detach() for name, v in state.parts(model, False)["model"].items()}
    writer = torch_checkpoint.HuggingFaceStorageWriter(folder / "dcp", save_distributed=True)
    torch_checkpoint.save(held, storage_writer=writer)


def main(folder, *acts):
    found = {}
    for act in acts:
        name, _, mesh = act.partition(":")
        globals()[name](Path(folder), mesh, found)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
