"""The pieces of a run: what each one measures, and how long it may take."""

import os
from dataclasses import dataclass, field
from typing import Any

SMALL = os.environ.get("KMODELS_SMALL") == "1"
BACKENDS = ("torch", "jax")
VITS = {"b16": "vit_base_patch16_224", "l16": "vit_large_patch16_224"}
GEMMAS = {"gemma_2b": "gemma_2b_en", "gemma3_1b": "gemma3_1b", "gemma3_4b": "gemma3_4b_text"}
KINDS = ("causal", "window", "segments", "soft cap", "full")
HEADS = ((16, 16, 64), (8, 4, 256))
# Kinds and lengths of attention alone.
CALLS = (
    *(("causal", 2048), ("window", 2048), ("segments", 2048)),
    *((kind, 8192) for kind in KINDS),
    *(("window", 32768), ("segments", 32768)),
)
# One class of each family: on JAX each is compiled in two dtypes.
FAMILIES = (
    *("ViTImageClassifier", "DINOV2Backbone", "DINOV3Backbone", "NaFlexViTImageClassifier"),
    *("EoMTImageSegmenter", "ViTMAEForPreTraining", "CLIPBackbone", "SigLIPBackbone"),
    *("GemmaTextEmbedder", "Gemma3Backbone", "Gemma4Backbone", "Gemma3ImageTextBackbone"),
    *("Gemma4ImageTextBackbone", "Llama3Backbone", "Qwen3Backbone"),
)

# The quarter of an hour: two commands of 8.5 minutes, in the order of what they prove. A piece is
# killed when the seconds of its command's pieces up to it are over, and keeps the rows it has. The
# correctness of the two backends, which measures no time, runs side by side. Each command has 480
# seconds in all, so that 30 are left for its start.
QUARTER = (
    # command, table, backend, seconds
    (1, "correctness", "torch", 235),
    (1, "correctness", "jax", 235),
    (1, "vit", "torch", 150),
    (1, "vit", "jax", 95),
    (2, "gemma", "torch", 110),
    (2, "gemma", "jax", 75),
    (2, "attention", "torch", 75),
    (2, "attention", "jax", 35),
    (2, "cross_entropy", "torch", 45),
    (2, "cross_entropy", "jax", 20),
    (2, "generate", "torch", 40),
    (2, "generate", "jax", 30),
    (2, "switches", "torch", 50),
)
OF_VIT = {"preset": VITS["b16"], "batch": 128, "steps": 8, "rounds": 3}
QUARTER_SETTINGS: dict[str, dict[str, Any]] = {
    "correctness": {"few": True, "families": FAMILIES},
    "vit": {**OF_VIT, "peers": ("timm",)},
    "gemma": {
        **{"preset": "gemma3_1b", "rank": 16, "targets": "all-linear", "liger": False},
        **{"batches": (("full", 2, 2048), ("packed", 1, 8192)), "rounds": 3},
    },
    "attention": {
        **{"heads": HEADS[1:], "window": 1024, "rounds": 5},
        "calls": tuple((kind, length) for length in (8192, 2048) for kind in KINDS),
        "flex": ("window", "segments", "soft cap"),  # those that no kernel of SDPA computes
    },
    "cross_entropy": {"sizes": (8192, 1152, 262144), "tiles": (), "rounds": 5},
    "generate": {
        **{"preset": "gemma3_1b", "batches": (1, 32), "prompt": 64, "new": 64},
        **{"compiled": False, "rounds": 2},
    },
    "switches": OF_VIT,
}
# What replaces the settings of a table under KMODELS_SMALL=1.
SMALL_VIT = {"preset": "vit_debug", "batch": 2, "rounds": 1}
SMALL_SETTINGS: dict[str, dict[str, Any]] = {
    "matmul": {"size": 64, "rounds": 1},
    "vit": {**SMALL_VIT, "steps": 2},
    "pipeline": {**SMALL_VIT, "images": 8},
    "attention": {
        **{"heads": ((2, 1, 16),), "window": 16, "rounds": 1},
        "calls": tuple((kind, 64) for kind in KINDS),
    },
    "cross_entropy": {"sizes": (64, 16, 128), "tiles": (32,), "rounds": 1},
    "gemma": {
        **{"preset": "gemma3_debug", "rounds": 1},
        "batches": (("full", 2, 64), ("padded", 1, 64), ("packed", 1, 64)),
    },
    "generate": {"preset": "gemma3_debug", "batches": (1, 2), "prompt": 4, "new": 4, "rounds": 1},
    "switches": {**SMALL_VIT, "steps": 2},
    "python": {"rounds": 1},
}


@dataclass(frozen=True)
class Piece:
    """One process, one file of results.

    Args:
        table: the module in this folder that has `run`.
        backend: backend of Keras.
        minutes: an estimate; no piece was timed on a device yet.
        label: tells pieces of one table apart.
        settings: what `run` is given.
        limit: seconds after which it is killed.
    """

    table: str
    backend: str
    minutes: float
    label: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    limit: float = 540.0

    def __post_init__(self) -> None:
        if SMALL:
            self.settings.update(SMALL_SETTINGS.get(self.table, {}))

    @property
    def name(self) -> str:
        return "-".join(filter(None, (self.table, self.label, self.backend)))


def pieces() -> list[Piece]:
    """Returns the pieces of a whole run, in the order in which they run."""
    return [piece for backend in BACKENDS for piece in _of(backend)]


def quarter(command: int) -> list[Piece]:
    """Returns the pieces of one of the two commands of a quarter of an hour."""
    return [
        Piece(table, backend, limit / 60, "quarter", {**QUARTER_SETTINGS[table]}, limit)
        for number, table, backend, limit in QUARTER
        if number == command
    ]


def _of(backend: str) -> list[Piece]:
    common = {"rounds": 9}
    found = [
        Piece("correctness", backend, 1.5, settings={"few": False, "families": None}),
        Piece("matmul", backend, 0.3, settings=common | {"size": 8192}),
        Piece("suite", backend, 2.0),
    ]
    for label, preset in list(VITS.items())[: 1 if SMALL else None]:
        of_vit = common | {"preset": preset, "batch": 128, "steps": 8}
        of_vit |= {"peers": ("timm", "transformers")}
        found.append(Piece("vit", backend, 2.0, label, of_vit))
    of_data = {"preset": VITS["b16"], "batch": 128, "images": 2048}
    found.append(Piece("pipeline", backend, 1.0, "", of_data))
    of_attention = common | {"heads": HEADS, "calls": CALLS, "window": 1024, "flex": KINDS}
    found.append(Piece("attention", backend, 3.0, "", of_attention))
    of_loss = common | {"sizes": (8192, 2048, 262144), "tiles": (2048, 4096, 16384, 65536)}
    found.append(Piece("cross_entropy", backend, 1.5, "", of_loss))
    lengths = (2048,) if SMALL else (2048, 8192)
    for label, preset in list(GEMMAS.items())[: 1 if SMALL else None]:
        for length in lengths:
            rows = 8192 // length
            of_gemma = {"preset": preset, "rank": 4, "targets": ("query", "value"), "rounds": 5}
            of_gemma |= {"batches": (("padded", rows, length), ("packed", rows, length))}
            of_gemma |= {"liger": True}
            minutes = 1.0 if backend == "torch" else 0.7
            found.append(Piece("gemma", backend, minutes, f"{label}-{length}", of_gemma))
    of_tokens = {"preset": GEMMAS["gemma3_1b"], "batches": (1, 32), "prompt": 64, "new": 128}
    of_tokens |= {"rounds": 3, "compiled": True}
    found.append(Piece("generate", backend, 1.5, "", of_tokens))
    return [*found, Piece("python", backend, 0.5, "", {**common})]
