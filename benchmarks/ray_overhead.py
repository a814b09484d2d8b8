"""How much longer do steps of `fit` take under Ray than under torchrun, with the same processes?

    KERAS_BACKEND=torch python benchmarks/ray_overhead.py [--rounds 20] [--write]

Two workers of Ray and two of torchrun train the same ViT at the same time, but in turn: each side
makes an epoch of steps, with a checkpoint in its midst, while the other one waits for a file. So
noise hits both alike. The ratios are medians over the pairs of epochs: of wall time, and of the CPU
time of both processes. On a machine that does other work too, only the second one says something:
Linux shares its cores out by session, and a side with more sessions gets more. What Ray's other
processes take of a core is told as well, since they run beside both.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import record

QUESTION = "How much longer do steps of fit take under Ray than under torchrun?"
STEPS, BATCH, SIZE = 8, 32, 32
LIMIT = 600.0


def train(folder: str, side: str, rounds: int) -> None:
    """One process of a side: an epoch of steps whenever its turn comes."""
    import keras
    import numpy as np

    import kmodels
    from kmodels.core import keras_internals, processes
    from kmodels.distribution import distribute, ray
    from kmodels.models import ViTBackbone, ViTImageClassifier
    from kmodels.training import AdamW

    place = Path(folder)
    directory = ray.directory() if side == "ray" else f"{folder}/torchrun"

    class Turns(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            wait_for(place / f"{side}-{epoch}")
            self.begun = time.perf_counter(), time.process_time()

        def on_train_batch_end(self, batch, logs=None):
            if batch == STEPS // 2:
                checkpoint.save()

        def on_epoch_end(self, epoch, logs=None):
            taken = time.perf_counter() - self.begun[0], time.process_time() - self.begun[1]
            walls, cpus = zip(*processes.all_gather_object("turn", taken), strict=True)
            if processes.is_rank_zero():
                write(place / f"{side}-{epoch}-done", json.dumps([max(walls), sum(cpus)]))

    plan = distribute("data=-1", batch_size=BATCH)
    keras_internals.set_random_seed(0)
    backbone = ViTBackbone(
        image_shape=(SIZE, SIZE, 3), patch_size=4, num_layers=6, num_heads=3, hidden_dim=192,
        mlp_dim=768,
    )  # fmt: skip
    model = plan.prepare(ViTImageClassifier(backbone, 10))
    model.compile(AdamW(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(STEPS * BATCH, SIZE, SIZE, 3)).astype("float32")
    y = rng.integers(0, 10, STEPS * BATCH)
    checkpoint = kmodels.callbacks.Checkpoint(directory, every=10**9)
    model.fit(
        x, y, batch_size=BATCH, epochs=rounds, shuffle=False, verbose=0,
        callbacks=[checkpoint, Turns()],
    )  # fmt: skip


def wait_for(file: Path) -> None:
    end = time.monotonic() + LIMIT
    while not file.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"{file.name} did not come")
        time.sleep(0.02)


def write(file: Path, text: str) -> None:
    beside = file.with_name(f".{file.name}")
    beside.write_text(text)
    beside.rename(file)


def helpers_seconds() -> float:
    """CPU seconds that Ray's processes have taken, those of its workers apart."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            command = (stat.parent / "cmdline").read_text().replace("\0", " ")
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        names = ("ray::", "/raylet/raylet", "gcs_server", "ray/_private")
        if any(name in command for name in names) and "RayTrainWorker" not in command:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def take_turns(place: Path, rounds: int) -> dict[str, list[list[float]]]:
    """Wall and CPU seconds of the sides, which train in turn, the first one now this, now that."""
    seconds: dict[str, list[list[float]]] = {"ray": [], "torchrun": []}
    for number in range(rounds):
        order = ["ray", "torchrun"] if number % 2 else ["torchrun", "ray"]
        for side in order:
            write(place / f"{side}-{number}", "")
            wait_for(place / f"{side}-{number}-done")
            seconds[side].append(json.loads((place / f"{side}-{number}-done").read_text()))
        print(number, {side: found[-1] for side, found in seconds.items()}, flush=True)
    return seconds


def main() -> None:
    parser = record.flags(QUESTION)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        train(options.rank, "torchrun", options.rounds)
        return
    import threading

    from kmodels.distribution import ray

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
            __file__, "--rank", folder, "--rounds", str(options.rounds),
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        other = subprocess.Popen(command, env=environment)
        results: dict[str, list[list[float]]] = {}
        beside: list[float] = []

        def conduct() -> None:
            # The first pair compiles nothing on torch, but warms up; it is left out.
            wait_for(place / "ready")
            begun, before = time.monotonic(), helpers_seconds()
            results.update(take_turns(place, options.rounds))
            beside.append((helpers_seconds() - before) / (time.monotonic() - begun))

        thread = threading.Thread(target=conduct)
        thread.start()
        try:
            write(place / "ready", "")
            work = functools.partial(train, folder, "ray", options.rounds)
            ray.run(work, workers=2, storage=place / "run", max_failures=0)
            thread.join()
        finally:
            other.wait(60) if results else other.kill()
    found: dict[str, object] = {}
    for at, kind in enumerate(("wall", "cpu")):
        sides = {side: [pair[at] for pair in pairs[1:]] for side, pairs in results.items()}
        ratios = [a / b for a, b in zip(sides["ray"], sides["torchrun"], strict=True)]
        found[f"{kind}_ratio_median"] = round(statistics.median(ratios), 4)
        quartiles = statistics.quantiles(ratios, n=4)
        found[f"{kind}_ratio_quartiles"] = [round(value, 4) for value in quartiles]
        found[f"{kind}_ratios"] = [round(ratio, 4) for ratio in ratios]
        found[f"{kind}_seconds_per_epoch"] = {
            side: round(statistics.median(values), 4) for side, values in sides.items()
        }
    found |= {
        "steps_per_epoch": STEPS,
        "pairs": options.rounds - 1,
        "share_of_a_core_of_rays_other_processes": round(beside[0], 4),
        "load_average": os.getloadavg()[0],
        "cpus": os.cpu_count(),
    }
    print(json.dumps(found, indent=1))
    if options.write:
        packages = ("ray", "torch", "keras", "numpy")
        record.write("ray_overhead_torch_cpu", QUESTION, packages, **found)


if __name__ == "__main__":
    main()
