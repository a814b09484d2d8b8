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
import os
import tempfile
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from vit_peers import REFERENCE, SYSTEMS, systems
from vit_peers.common import Settings, write_weights
from vit_peers.compare import refuse_unequal
from vit_peers.measure import check_losses, measure
from vit_peers.results import revision, show, write

QUESTION = (__doc__ or "").splitlines()[0]
RESULTS = Path(__file__).resolve().parent / "results"
DATE = time.strftime("%Y-%m-%d")
# width, heads, MLP, depth, image, classes, batch
PRESETS = {
    "small": (384, 6, 1536, 12, 224, 1000, 8),
    "base": (768, 12, 3072, 12, 224, 1000, 4),
    "debug": (32, 2, 64, 1, 32, 10, 2),
}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=QUESTION)

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
                write(target, QUESTION, backend, [entry])


if __name__ == "__main__":
    main()
