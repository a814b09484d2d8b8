"""What workers of Ray train, and processes without Ray for comparison.

python ray_cases.py plain FOLDER [NAME...]  one process, or those that a launcher joins: no Ray
python ray_cases.py ray FOLDER NAME...      a driver: the cases of these names, on one cluster
"""

import hashlib
import json
import os
import re
import resource
import signal
import sys
import time
from functools import partial
from pathlib import Path

BATCH, ROWS, EPOCHS, EVERY = 8, 32, 2, 3
# After this step a worker dies: within the second epoch, two steps after a checkpoint.
DEATH = 5
# Each death costs a start of all workers.
DYING = {"torch": ("vit", "gemma"), "jax": ("gemma",)}
# One process less for each start of all workers, and nobody is told.
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0"}


def variables_of_a_driver(folder):
    """What a driver in a folder is given: a home of its own there, and where modules lie."""
    tests = Path(__file__).parents[2]
    places = tests.parent / "src", tests, Path(__file__).parent
    return {
        **QUIET,
        "KERAS_BACKEND": "torch",
        "PYTHONPATH": os.pathsep.join(map(str, places)),
        "HOME": str(folder / "home"),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "XLA_FLAGS": re.sub(r"device_count=\d+", "device_count=1", os.environ["XLA_FLAGS"]),
    }


def vit():
    import numpy as np

    from kmodels.models import ViTBackbone, ViTImageClassifier

    rng = np.random.default_rng(0)
    backbone = ViTBackbone(
        image_shape=(16, 16, 3), patch_size=8, num_layers=1, num_heads=2, hidden_dim=32, mlp_dim=64
    )
    images = rng.normal(size=(ROWS, 16, 16, 3)).astype("float32")
    return ViTImageClassifier(backbone, 10), (images, rng.integers(0, 10, ROWS))


def gemma():
    import numpy as np

    from kmodels.models import GemmaBackbone, GemmaCausalLM

    rng = np.random.default_rng(1)
    backbone = GemmaBackbone(
        vocabulary_size=50, num_layers=1, num_query_heads=2, num_key_value_heads=1, hidden_dim=32,
        intermediate_dim=64, head_dim=16,
    )  # fmt: skip
    model = GemmaCausalLM(backbone)
    model.enable_lora(4)
    ids = rng.integers(1, 50, (ROWS, 9))
    return model, ({"token_ids": ids[:, :-1], "padding_mask": np.ones((ROWS, 8))}, ids[:, 1:])


def digest(variables):
    import keras
    import numpy as np

    found = hashlib.sha256()
    for variable in variables:
        found.update(np.ascontiguousarray(keras.ops.convert_to_numpy(variable.value)).tobytes())
    return found.hexdigest()


def once(folder, name):
    """True at the first call of this name, in whichever process."""
    try:
        os.close(os.open(Path(folder) / name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def train(folder, names=("vit", "gemma"), directory=None, act=None):
    """Fits models one after another, and writes what came of each to folder/<name>.json.

    Args:
        folder: for the results, and marks of what was done once.
        names: of the models.
        directory: of checkpoints; none are made without it.
        act: called after each step with the folder, the name, the step and the process.
    """
    import keras

    import kmodels
    from kmodels.core import keras_internals, processes
    from kmodels.distribution import distribute
    from kmodels.training import AdamW

    plan = distribute("data=-1", batch_size=BATCH)
    for name in names:
        keras_internals.set_random_seed(3)
        model, (x, y) = {"vit": vit, "gemma": gemma}[name]()
        model = plan.prepare(model)
        model.compile(AdamW(1e-2), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        callbacks = []
        if directory is not None:
            checkpoint = kmodels.callbacks.Checkpoint(f"{directory}/{name}", every=EVERY)

            def after(batch, logs, name=name, own=checkpoint):
                act(folder, name, own.step, processes.index())

            callbacks = [checkpoint, keras.callbacks.LambdaCallback(on_train_batch_end=after)]
        history = model.fit(
            x, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=callbacks
        ).history
        state = digest([*model.variables, *model.optimizer.variables])
        if processes.is_rank_zero():
            result = {"losses": history["loss"], "digest": state, "processes": processes.count()}
            (Path(folder) / f"{name}.json").write_text(json.dumps(result))
    return processes.index()


def in_workers(folder, names, act):
    """`train` with checkpoints where Ray keeps them."""
    from kmodels.distribution.ray import directory

    return train(folder, names, directory(), act)


def await_checkpoint(folder, name, step):
    """Waits until the checkpoint that was due before is whole, in a directory or a bucket."""
    place = f"**/checkpoints/{name}/step_{step // EVERY * EVERY:08d}"
    files = [f"{place}/{file}.json" for file in ("manifest", "published")]
    while not any(found for file in files for found in Path(folder).glob(file)):
        time.sleep(0.05)


def die(folder, name, step, rank, at=DEATH, ranks=(0, 1), names=("vit", "gemma")):
    """Kills one of the workers of these ranks at a step, once in each of the models."""
    chosen = name in names and step == at and rank in ranks
    if chosen and once(folder, f"died-{name}-{at}"):
        await_checkpoint(folder, name, step)
        os.kill(os.getpid(), signal.SIGKILL)


def fill_the_disk(folder, name, step, rank):
    if step == EVERY + 1:
        await_checkpoint(folder, name, step)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


def lose_the_storage(folder, name, step, rank):
    from kmodels.distribution.ray import directory

    if step == EVERY + 1 and rank == 0 and once(folder, "lost"):
        await_checkpoint(folder, name, step)
        place = Path(directory())
        place.rename(place.with_name("elsewhere"))
        place.write_text("no directory")


def raising(folder):
    with (Path(folder) / "attempts").open("a") as file:
        file.write("one\n")
    from kmodels.core import processes

    processes.join()
    if processes.index() == 1:
        raise ValueError("the rows\nare bad")
    processes.all_gather_object("what never comes", None)


def in_a_bucket(folder, death):
    import ray_bucket  # noqa: F401, which registers it in this process

    return in_workers(folder, ("vit",), partial(die, at=death))


def error_of(function, *arguments, **options):
    """The line with which a run ends."""
    from kmodels.core.errors import InputError
    from kmodels.distribution import ray

    try:
        ray.run(function, arguments, **options)
    except InputError as error:
        return str(error)
    return None


def drive(folder, names):
    """Runs the cases on one cluster, and prints what they found."""
    from kmodels.distribution import ray
    from kmodels.distribution.ray.cluster import connected

    found = {}
    with connected({"CPU": 2}):
        for name in names:
            place = Path(folder) / name
            place.mkdir(parents=True)
            begun = time.monotonic()
            found[name] = CASES[name.partition("-")[0]](ray, place, name.partition("-")[2] or None)
            found[name]["seconds"] = round(time.monotonic() - begun, 1)
            print(name, found[name], file=sys.stderr, flush=True)
    print(json.dumps(found))


def killed(ray, place, backend):
    act = partial(die, ranks=(1,), names=DYING[backend])
    arguments = (place, ("vit", "gemma"), act)
    result = ray.run(in_workers, arguments, storage=place / "run", backend=backend, keep=None)
    return {
        "returned": result.return_value,
        "metrics": result.metrics,
        "checkpoints": [found.path for found, _ in result.best_checkpoints],
    }


def elastic(ray, place, backend):
    """Two workers, one and two, in a bucket; a worker of the first and the second dies."""
    os.environ["KMODELS_TEST_BUCKET"] = str(place / "bucket")
    (place / "bucket").mkdir()
    import ray_bucket  # noqa: F401

    names = ("KMODELS_TEST_BUCKET", "XDG_CACHE_HOME")
    options = {
        "storage": "bucket://runs/first",
        "backend": backend,
        "max_failures": 0,
        "environment": {name: os.environ[name] for name in names},
    }
    errors = [
        error_of(in_a_bucket, place, death, workers=workers, **options)
        for death, workers in ((4, 2), (7, 1))
    ]
    result = ray.run(in_a_bucket, (place, 99), **options)
    return {"errors": errors, "checkpoints": [found.path for found, _ in result.best_checkpoints]}


def faults(ray, place, backend):
    errors = {}
    for name, act in (("full", fill_the_disk), ("lost", lose_the_storage), ("raised", None)):
        (place / name).mkdir()
        options = {"storage": place / name / "run", "backend": backend}
        if act is None:
            errors[name] = error_of(raising, place / name, **options)
        else:
            errors[name] = error_of(in_workers, place / name, ("vit",), act, workers=1, **options)
    return errors


FLAGS = ["--data", "synthetic:64", "--preset", "vit_debug", "--epochs", "1", "--batch-size", "16"]


def recipe(ray, place, backend):
    """A recipe, as the command line has it, and one that it refuses."""
    from kmodels.runs import recipe

    on = [*FLAGS, "--on", "ray", "--workers", "2", "--out", str(place / "run")]
    return {"code": recipe.run("vit", on), "again": recipe.run("vit", on)}


CASES = {"recipe": recipe, "killed": killed, "elastic": elastic, "faults": faults}


if __name__ == "__main__":
    how, folder, *rest = sys.argv[1:]
    if how == "plain":
        train(folder, rest or ("vit", "gemma"))
    else:
        drive(folder, rest)
