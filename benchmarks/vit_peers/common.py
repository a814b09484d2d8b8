"""The parts that all peers share: settings, weights, data, and the pace that the parent sets."""

import json
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

EPSILON, WEIGHT_DECAY, BETAS = 1e-6, 0.05, (0.9, 0.999)
BATCHES = 4  # different ones, in turn


@dataclass(frozen=True)
class Settings:
    """One training run; see `vit_train.py` for the values."""

    backend: str
    width: int
    heads: int
    mlp: int
    depth: int
    image: int
    classes: int
    batch: int
    precision: str
    dropout: float
    optimizer: str
    weights: str
    patch: int = 16

    @property
    def tokens(self) -> int:
        return (self.image // self.patch) ** 2 + 1

    @property
    def learning_rate(self) -> float:
        return 0.01 if self.optimizer == "sgd" else 1e-4

    @property
    def keras_policy(self) -> str:
        return "float32" if self.precision == "float32" else "mixed_bfloat16"


def shapes(settings: Settings) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every weight under the path that it has in kmodels."""
    width, mlp = settings.width, settings.mlp
    found: dict[str, tuple[int, ...]] = {}

    def dense(path: str, rows: int, columns: int) -> None:
        found[f"{path}/kernel"], found[f"{path}/bias"] = (rows, columns), (columns,)

    def norm(path: str) -> None:
        found[f"{path}/scale"] = found[f"{path}/bias"] = (width,)

    dense("patch_embedding", settings.patch**2 * 3, width)
    found["tokens/class_token"] = (1, 1, width)
    found["tokens/position_embedding"] = (1, settings.tokens, width)
    for i in range(settings.depth):
        norm(f"block_{i}/attention_norm")
        for part in ("query", "key", "value", "output"):
            dense(f"block_{i}/attention/{part}", width, width)
        norm(f"block_{i}/mlp_norm")
        dense(f"block_{i}/mlp/up", width, mlp)
        dense(f"block_{i}/mlp/down", mlp, width)
    norm("final_norm")
    dense("logits", width, settings.classes)
    return found


def write_weights(settings: Settings, path: Path) -> None:
    """Weights that leave activations of order one; no bias or scale is trivial."""
    rng = np.random.default_rng(0)
    arrays = {}
    for name, shape in shapes(settings).items():
        noise = rng.standard_normal(shape, "float32")
        if name.endswith("kernel"):
            arrays[name] = noise / shape[0] ** 0.5
        else:
            arrays[name] = float(name.endswith("scale")) + np.float32(0.1) * noise
    np.savez(path, **arrays)


def weights(settings: Settings) -> Any:
    """A mapping of path to array, read when asked for."""
    return np.load(settings.weights)


def batches(settings: Settings) -> list[tuple[np.ndarray, np.ndarray]]:
    """Images (B, height, width, 3) in float32 and labels (B,)."""
    rng = np.random.default_rng(1)
    shape = (settings.batch, settings.image, settings.image, 3)
    return [
        (
            rng.standard_normal(shape, "float32"),
            rng.integers(0, settings.classes, settings.batch).astype("int32"),
        )
        for _ in range(BATCHES)
    ]


def facts(settings: Settings, **measured: Any) -> dict[str, Any]:
    """Returns what has to be equal, or is worth noting, in a comparison.

    The keys of `measured` are parameters, variables and compute (dtypes), heads, and dropout: the
    rate by place, read off the model that trains.
    """
    return {
        "batch": settings.batch,
        "image": settings.image,
        "classes": settings.classes,
        "optimizer": settings.optimizer,
        "learning_rate": settings.learning_rate,
        "threads": len(os.sched_getaffinity(0)),
        **measured,
    }


def places(tokens: float, attention: float, output: float, hidden: float, mlp: float) -> dict:
    """The five places of dropout in a ViT."""
    return {
        "tokens": float(tokens),
        "attention_weights": float(attention),
        "attention_output": float(output),
        "mlp_hidden": float(hidden),
        "mlp_output": float(mlp),
    }


class Finished(BaseException):
    """The parent has asked for the last step; goes through whatever loop is running."""


class Pace:
    """Runs the training loop in shares of as many steps as the parent asks for.

    Args:
        ask: sends an answer to the parent and returns its next request.
    """

    def __init__(self, ask: Callable[[dict], dict]):
        self._ask = ask
        self._begun = _clocks()
        self._left = 0
        self._losses: list[float] = []

    def ready(self, facts: dict[str, Any]) -> None:
        """The model stands; the next thing that happens is a step."""
        self._wait({"facts": facts, **_since(self._begun)})

    def __call__(self, loss: Any) -> None:
        """Called after each step; reading the loss waits for its computation."""
        self._losses.append(float(loss))
        self._left -= 1
        if not self._left:
            self._wait({"losses": self._losses, **_since(self._begun)})

    def _wait(self, answer: dict) -> None:
        self._left = self._ask(answer)["steps"]
        self._losses = []
        if not self._left:
            raise Finished
        self._begun = _clocks()


def _clocks() -> tuple[float, float]:
    # Compilers run as children of their own.
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter(), time.process_time() + children.ru_utime + children.ru_stime


def _since(begun: tuple[float, float]) -> dict[str, float]:
    wall, cpu = _clocks()
    return {"wall_s": wall - begun[0], "cpu_s": cpu - begun[1]}


def peak_mb() -> float:
    """Most memory that this process ever held, in MiB."""
    text = Path("/proc/self/status").read_text()
    return round(int(text.split("VmHWM:")[1].split()[0]) / 1024, 1)


def answer_line(content: dict) -> bytes:
    """One message of the protocol."""
    return json.dumps(content).encode() + b"\n"
