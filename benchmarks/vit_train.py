"""How long does a training step of a ViT take beside the best code written for its backend?

    python benchmarks/vit_train.py [--backends torch] [--systems kmodels,flax] [--presets small]
        [--precisions float32] [--dropouts 0,0.1] [--optimizers sgd] [--rounds 20] [--depth 2]

Needs an environment with all peers (`make full-environment`). Each system is a process of its own
on one core, kept alive; the parent asks them in turn for one step per round, so that one computes
at a time and noise hits all alike. All start from the same weights and see the same batches. First,
in float32 without dropout under SGD, the losses of all systems are compared; a system whose losses
or facts (dtypes, dropout, parameters, ...) differ is refused and listed. Ratios of time are the
peer's over kmodels': above 1 kmodels wins. Ratios of peak memory are kmodels' over the peer's:
below 1 kmodels wins. Time is the CPU time of the process, the median over the rounds, in seconds.
"""

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from vit_peers import REFERENCE, SYSTEMS, systems
from vit_peers.common import Settings, write_weights

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
DATE = time.strftime("%Y-%m-%d")
# width, heads, MLP, depth, image, classes, batch
PRESETS = {
    "small": (384, 6, 1536, 12, 224, 1000, 8),
    "base": (768, 12, 3072, 12, 224, 1000, 4),
    "debug": (32, 2, 64, 1, 32, 10, 2),
}
PACKAGES = {
    "torch": ("torch", "transformers", "timm"),
    "jax": ("jax", "jaxlib", "flax", "optax"),
    "tensorflow": ("tensorflow",),
}
# Relative; the rounding of 20 float32 steps through 12 blocks.
LOSS_TOLERANCE = 1e-4
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "JAX_PLATFORMS": "cpu",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent / "src")]),
}
console = Console(stderr=True)


class Child:
    """A system in its process; computes only while it is asked for steps."""

    def __init__(self, name: str, settings: Settings, cpu: int):
        self.name = name
        self.log = tempfile.TemporaryFile()  # noqa: SIM115, lives as long as the process
        self.process = subprocess.Popen(
            [sys.executable, "-m", "vit_peers.child", name, json.dumps(asdict(settings))],
            env={
                **os.environ,
                **ONE_THREAD,
                "KERAS_BACKEND": settings.backend,
                **SYSTEMS[name].environment,
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            preexec_fn=lambda: os.sched_setaffinity(0, {cpu}),
        )
        try:
            self.built = self._read()
        except BaseException:
            self.process.kill()
            raise

    def steps(self, number: int) -> dict[str, Any]:
        """Runs so many steps: their losses, and `cpu_s` and `wall_s` of all together."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"steps": number}).encode() + b"\n")
        self.process.stdin.flush()
        return self._read()

    def stop(self) -> dict[str, Any]:
        """Ends the process: its peak memory, and which overrides its ops took."""
        last = self.steps(0)
        self.process.wait()
        return last

    def peak_mb(self) -> float:
        """Most memory that the process has held so far, in MiB."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(text.split("VmHWM:")[1].split()[0]) / 1024

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if line:
            return json.loads(line)
        self.log.seek(0)
        text = self.log.read().decode(errors="replace")
        raise RuntimeError(f"{self.name} ended:\n{text[-2000:]}")


def differences(reference: dict, facts: dict, tolerated: Iterable[str] = ()) -> list[str]:
    """What differs between two systems' facts, a sentence each."""
    return [
        f"{name} is {facts.get(name)!r}, {REFERENCE} has {value!r}"
        for name, value in reference.items()
        if facts.get(name) != value and name not in tolerated
    ]


def loss_difference(reference: list[float], losses: list[float]) -> float:
    """Largest relative difference between the losses of the same steps."""
    return max(abs(a - b) / abs(a) for a, b in zip(reference, losses, strict=True))


def check_losses(names: list[str], settings: Settings, steps: int, cpu: int) -> dict[str, Any]:
    """Losses of each system, one after another, in float32 without dropout under SGD."""
    settings = replace(settings, precision="float32", dropout=0.0, optimizer="sgd")
    found: dict[str, Any] = {}
    for name in names:
        if "float32" not in SYSTEMS[name].precisions:
            continue  # the same code as a system that runs in float32
        try:
            child = Child(name, settings, cpu)
            losses = child.steps(steps)["losses"]
            child.stop()
        except RuntimeError as error:
            if name == REFERENCE:
                raise
            console.print(f"[red]{error}")
            found[name] = {"failed": str(error).splitlines()[-1]}
            continue
        found[name] = {"losses": [round(loss, 6) for loss in losses]}
        if name != REFERENCE:
            difference = loss_difference(found[REFERENCE]["losses"], losses)
            found[name]["largest_difference"] = float(f"{difference:.1e}")
            found[name]["equal"] = difference <= LOSS_TOLERANCE
        console.print(f"losses of {name}: {losses[0]:.5f} ... {losses[-1]:.5f}")
    return found


def measure(names: list[str], settings: Settings, options: argparse.Namespace) -> dict[str, Any]:
    """Times of all systems, in groups that fit into the memory; kmodels is in each group."""
    reference = start(REFERENCE, settings, options)
    if reference is None:
        raise SystemExit(f"{REFERENCE} failed, so there is nothing to compare with")
    found: dict[str, Any] = {}
    waiting = [name for name in names if name != REFERENCE]
    while waiting:
        group, largest = [reference], reference[0].peak_mb()
        while waiting:
            child = start(waiting.pop(0), settings, options)
            if child is None:
                continue
            group.append(child)
            peaks = [member.peak_mb() for member, _ in group]
            largest = max(largest, *peaks)
            if sum(peaks) + largest > options.memory_mb:
                break
        found |= measure_group(group, options)
    child, first = reference
    found.setdefault(REFERENCE, row(child, first, [child.steps(1) for _ in range(options.rounds)]))
    found[REFERENCE] |= child.stop()
    for name, values in found.items():
        finish(name, values, found[REFERENCE])
    return found


def start(name: str, settings: Settings, options: argparse.Namespace) -> Any:
    """A child that has made its first steps, and what the first one took; None if it failed."""
    try:
        child = Child(name, settings, options.cpu)
        first = child.steps(1)
        child.steps(options.warm)
    except RuntimeError as error:
        console.print(f"[red]{error}")
        return None
    console.print(f"{name}: first step {first['wall_s']:.1f} s")
    return child, first


def measure_group(group: list[Any], options: argparse.Namespace) -> dict[str, Any]:
    """One step of each child per round; ends all but the reference."""
    taken: dict[str, list[dict]] = {child.name: [] for child, _ in group}
    for turn in range(options.rounds):
        for i in range(len(group)):
            child, _ = group[(i + turn) % len(group)]
            taken[child.name].append(child.steps(1))
    found = {child.name: row(child, first, taken[child.name]) for child, first in group}
    for child, _ in group[1:]:
        found[child.name] |= child.stop() | {"beside": found[REFERENCE]["times"]}
    return found


def row(child: Child, first: dict, steps: list[dict]) -> dict[str, Any]:
    """What is known of one system."""
    times = {clock: [round(step[clock], 5) for step in steps] for clock in ("cpu_s", "wall_s")}
    return {
        "about": SYSTEMS[child.name].about,
        "cpu_s": round(statistics.median(times["cpu_s"]), 4),
        "wall_s": round(statistics.median(times["wall_s"]), 4),
        "build_cpu_s": round(child.built["cpu_s"], 2),
        "first_step_cpu_s": round(first["cpu_s"], 2),
        "first_step_wall_s": round(first["wall_s"], 2),
        "facts": child.built["facts"],
        "times": times,
    }


def finish(name: str, values: dict[str, Any], reference: dict[str, Any]) -> None:
    """Adds the ratios to a row, from rounds in which both took part, or why there are none."""
    beside, times = values.pop("beside", None), values["times"]
    every = differences(reference["facts"], values["facts"])
    refused = differences(reference["facts"], values["facts"], SYSTEMS[name].tolerated)
    values["differs"] = refused
    values["tolerated"] = [text for text in every if text not in refused]
    if beside is None or values["differs"]:
        return
    for clock in ("cpu_s", "wall_s"):
        ratio = statistics.median(times[clock]) / statistics.median(beside[clock])
        values[f"{clock[:-2]}_ratio"] = round(ratio, 3)
    if len(times["cpu_s"]) > 1:
        pairs = [a / b for a, b in zip(times["cpu_s"], beside["cpu_s"], strict=True)]
        low, _, high = statistics.quantiles(pairs, n=4)
        values["cpu_ratio_quartiles"] = [round(low, 3), round(high, 3)]
    values["peak_ratio"] = round(reference["peak_mb"] / values["peak_mb"], 3)


def refuse_unequal(found: dict[str, Any], losses: dict[str, Any]) -> None:
    """Takes the ratios from systems whose losses differ."""
    for name, values in found.items():
        checked = losses.get(name, {})
        if not checked.get("equal", True):
            difference = checked["largest_difference"]
            values["differs"].append(f"losses differ by {difference}, allowed {LOSS_TOLERANCE}")
        if values["differs"]:
            for key in ("cpu_ratio", "wall_ratio", "cpu_ratio_quartiles", "peak_ratio"):
                values.pop(key, None)


def show(case: dict[str, Any], found: dict[str, Any]) -> None:
    """Prints one table."""
    title = "  ".join(str(value) for value in case.values())
    table = Table("system", "CPU s", "wall s", "peak MiB", "first step s", title=title)
    for heading in ("time / kmodels", "quartiles", "kmodels / peak"):
        table.add_column(heading, justify="right")
    for name, values in found.items():
        low_high = values.get("cpu_ratio_quartiles")
        table.add_row(
            name,
            f"{values['cpu_s']:.3f}",
            f"{values['wall_s']:.3f}",
            f"{values['peak_mb']:.0f}",
            f"{values['first_step_cpu_s']:.1f}",
            f"{values['cpu_ratio']:.3f}" if "cpu_ratio" in values else "",
            "–".join(f"{x:.2f}" for x in low_high) if low_high else "",
            f"{values['peak_ratio']:.3f}" if "peak_ratio" in values else "",
        )
    Console().print(table)
    for name, values in found.items():
        for text in values["differs"]:
            print(f"refused {name}: {text}")


def hardware() -> dict[str, Any]:
    """The processor, and the instructions that decide how fast bfloat16 is."""
    text = Path("/proc/cpuinfo").read_text()
    fields = dict(line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in fields.items()}
    wanted = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
    return {
        "processor": " ".join(
            fields.get(key, "?") for key in ("model name", "cpu family", "model")
        ),
        "instructions": [name for name in wanted if name in fields.get("flags", "").split()],
        "cores": os.cpu_count(),
    }


def revision() -> str:
    """The commit that was measured, with a + where files differ from it."""
    command = ["git", "describe", "--always", "--exclude=*", "--dirty=+"]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "from the tree"


def write(path: Path, backend: str, rows: list[dict[str, Any]]) -> None:
    """Writes the results; rows of other cases that the file holds stay."""
    old = json.loads(path.read_text())["rows"] if path.is_file() else []
    cases = [entry["case"] for entry in rows]
    names = ("kmodels", "keras", "keras-hub", "numpy", *PACKAGES[backend])
    content = {
        "question": (__doc__ or "").splitlines()[0],
        "backend": backend,
        "versions": {name: version(name) for name in names},
        "hardware": hardware(),
        "clock": "CPU time of the process; wall beside it",
        "threads": 1,
        "date": DATE,
        "rows": [entry for entry in old if entry["case"] not in cases] + rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])

    def listed(text: str) -> list[str]:
        return text.split(",")

    parser.add_argument("--backends", type=listed, default=["torch", "jax", "tensorflow"])
    parser.add_argument("--systems", type=listed, help="names; all of the backend by default")
    parser.add_argument("--presets", type=listed, default=["small", "base"])
    parser.add_argument("--precisions", type=listed, default=["float32", "bfloat16"])
    parser.add_argument("--dropouts", type=listed, default=["0.1", "0"])
    parser.add_argument("--optimizers", type=listed, default=["sgd", "adamw"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warm", type=int, default=2, help="steps after the first, not counted")
    parser.add_argument("--loss-steps", type=int, default=20, help="0 to compare no losses")
    parser.add_argument("--depth", type=int, help="blocks; the preset's by default")
    parser.add_argument("--memory-mb", type=int, default=12_000, help="for all processes together")
    cores = sorted(os.sched_getaffinity(0))
    parser.add_argument("--cpu", type=int, default=cores[-1], help="the core that computes")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the result files")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.systems or ()) - set(SYSTEMS)):
        parser.error(f"no system is called {', '.join(unknown)}; there are {', '.join(SYSTEMS)}")
    if unknown := sorted(set(options.presets) - set(PRESETS)):
        parser.error(f"no preset is called {', '.join(unknown)}; there are {', '.join(PRESETS)}")
    return options


def chosen(backend: str, precision: str, options: argparse.Namespace) -> list[str]:
    """The systems of a run, the reference first and always."""
    return [
        name
        for name in systems(backend, precision)
        if name == REFERENCE or options.systems is None or name in options.systems
    ]


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    for backend, preset in product(options.backends, options.presets):
        width, heads, mlp, depth, image, classes, batch = PRESETS[preset]
        depth = options.depth or depth
        with tempfile.TemporaryDirectory() as folder:
            weights = Path(folder) / "weights.npz"
            settings = Settings(
                backend, width, heads, mlp, depth, image, classes, batch,
                "float32", 0.0, "sgd", str(weights),
            )  # fmt: skip
            write_weights(settings, weights)
            losses: dict[str, Any] = {}
            if options.loss_steps:
                names = chosen(backend, "float32", options)
                losses = check_losses(names, settings, options.loss_steps, options.cpu)
            cases = product(options.precisions, options.dropouts, options.optimizers)
            for precision, dropout, optimizer in cases:
                case = {
                    "preset": preset,
                    "depth": depth,
                    "batch": batch,
                    "precision": precision,
                    "dropout": float(dropout),
                    "optimizer": optimizer,
                }
                now = replace(
                    settings, precision=precision, dropout=float(dropout), optimizer=optimizer
                )
                found = measure(chosen(backend, precision, options), now, options)
                refuse_unequal(found, losses)
                show(case, found)
                entry = {
                    "case": case,
                    "revision": revision(),
                    "rounds": options.rounds,
                    "losses": losses,
                    "systems": found,
                }
                target = options.output / f"vit_train_{backend}_cpu_{DATE}.json"
                write(target, backend, [entry])


if __name__ == "__main__":
    main()
