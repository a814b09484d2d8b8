"""The pieces of a run: what each one measures, and how many minutes it may take."""

import os
from dataclasses import dataclass, field
from typing import Any

SMALL = os.environ.get("KMODELS_SMALL") == "1"
BACKENDS = ("torch", "jax")
LARGE_GEMMAS = ("gemma_2b_en", "gemma3_1b", "gemma3_4b_text")
HEADS = ((16, 16, 64), (8, 4, 256))


@dataclass(frozen=True)
class Piece:
    """One process, one file of results.

    Args:
        table: the module in this folder that has `run`.
        backend: backend of Keras.
        minutes: an estimate; no piece was timed on a device yet.
        label: tells pieces of one table apart.
        settings: what `run` is given.
    """

    table: str
    backend: str
    minutes: float
    label: str = ""
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return "-".join(filter(None, (self.table, self.label, self.backend)))


def pieces() -> list[Piece]:
    """Returns the pieces of a whole run, in the order in which they run."""
    return [piece for backend in BACKENDS for piece in _of(backend)]


def _of(backend: str) -> list[Piece]:
    rounds = 1 if SMALL else 9
    common = {"rounds": rounds}
    found = [
        Piece("correctness", backend, 1.5),
        Piece("matmul", backend, 0.3, settings=common | {"size": 64 if SMALL else 8192}),
        Piece("suite", backend, 2.0),
    ]
    vits = {"debug": "vit_debug"} if SMALL else {}
    vits = vits or {"b16": "vit_base_patch16_224", "l16": "vit_large_patch16_224"}
    batch = 2 if SMALL else 128
    for label, preset in vits.items():
        of_vit = common | {"preset": preset, "batch": batch, "steps": 2 if SMALL else 8}
        found.append(Piece("vit", backend, 2.0, label, of_vit))
    first = next(iter(vits.values()))
    of_data = {"preset": first, "batch": batch, "images": 8 if SMALL else 2048}
    found.append(Piece("pipeline", backend, 1.0, "", of_data))
    shapes = ((2, 1, 16),) if SMALL else HEADS
    lengths = (64,) if SMALL else (2048, 8192, 32768)
    of_attention = common | {"heads": shapes, "lengths": lengths, "window": 16 if SMALL else 1024}
    found.append(Piece("attention", backend, 3.0, "", of_attention))
    loss = (64, 16, 128) if SMALL else (8192, 2048, 262144)
    tiles = (32,) if SMALL else (2048, 4096, 16384, 65536)
    of_loss = common | {"sizes": loss, "tiles": tiles}
    found.append(Piece("cross_entropy", backend, 1.5, "", of_loss))
    gemmas = ("gemma3_debug",) if SMALL else LARGE_GEMMAS
    for preset in gemmas:
        for length in (64,) if SMALL else (2048, 8192):
            of_gemma = {"preset": preset, "length": length, "tokens": 64 if SMALL else 8192}
            of_gemma |= {"rank": 4, "rounds": 1 if SMALL else 5}
            minutes = 1.0 if backend == "torch" else 0.7
            label = f"{preset.removesuffix('_en').removesuffix('_text')}-{length}"
            found.append(Piece("gemma", backend, minutes, label, of_gemma))
    of_tokens = {"rounds": 1 if SMALL else 3, "preset": gemmas[min(1, len(gemmas) - 1)]}
    of_tokens |= {"batches": (1, 2) if SMALL else (1, 32)}
    of_tokens |= {"prompt": 4 if SMALL else 64, "new": 4 if SMALL else 128}
    found.append(Piece("generate", backend, 1.5, "", of_tokens))
    return [*found, Piece("python", backend, 0.5, "", common)]
