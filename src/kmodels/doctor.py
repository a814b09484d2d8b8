"""What this installation runs on: backend, versions, devices, precision, and each op's path."""

import importlib.metadata
import platform
from typing import Any

import keras
from rich.console import Console
from rich.table import Table

from kmodels import __version__, ops, precision
from kmodels.dispatch import backend, backend_module, load_environment

PACKAGES = (
    "keras", "jax", "jaxlib", "torch", "tensorflow", "numpy", "safetensors",
    "tokenizers", "scikit-learn", "pillow", "transformers", "timm", "peft", "keras-hub",
)  # fmt: skip


def report() -> dict[str, Any]:
    """Collects everything `kmodels doctor` shows.

    Returns:
        `backend`, `python`, `platform`, `versions` (package -> version, installed ones only),
        `devices` (names), `dtype_policy`, `matmul_precision`, and `ops`: for each op `override`
        (its file's name or `None`), `path` (`"override"` or `"generic"`), `reason` (why the
        override is not in force, or `None`) in its plainest case, and `cases`: reasons by case.

    Raises:
        InputError: if `KMODELS_GENERIC_OPS` names an unknown op.
    """
    load_environment(strict=True)
    module = backend_module("kmodels.doctor")
    return {
        "backend": backend(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": _versions(),
        "devices": module.devices() if module is not None else [],
        "dtype_policy": keras.config.dtype_policy().name,
        "matmul_precision": precision.matmul_precision(),
        "ops": _ops(),
    }


def _versions() -> dict[str, str]:
    found = {"kmodels": __version__}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _cases() -> list[tuple[Any, str, tuple, dict[str, Any]]]:
    """(op, case, arguments, keywords) with the tensors of a ViT and a Gemma block."""
    dtype = keras.config.dtype_policy().compute_dtype

    def zeros(*shape: int, kind: str = dtype) -> Any:
        return keras.ops.zeros(shape, kind)

    seed = keras.random.SeedGenerator(0)
    heads, tokens, width = zeros(1, 197, 3, 64), zeros(1, 197, 192), zeros(192)
    images, patches = zeros(1, 32, 32, 3), zeros(768, 192)
    hidden, table = zeros(8, 64), zeros(512, 64)
    labels, weights = zeros(8, kind="int32"), zeros(8, kind="float32")
    positions, bits = zeros(1, 197, kind="int32"), zeros(192, 192, kind="int8")
    return [
        (ops.attention, "inference", (heads, heads, heads), {}),
        (ops.attention, "dropout", (heads, heads, heads), {"dropout": 0.1, "seed": seed}),
        (ops.attention, "soft cap", (heads, heads, heads), {"soft_cap": 50.0}),
        (ops.dense, "tokens", (tokens, zeros(192, 192)), {}),
        (ops.dropout, "training", (tokens, 0.1, seed), {}),
        (ops.gated_gelu, "tokens", (tokens, tokens), {}),
        (ops.gelu, "tokens", (tokens,), {}),
        (ops.layer_norm, "tokens", (tokens, width), {}),
        (ops.linear_cross_entropy, "frozen table", (hidden, table, labels, weights), {}),
        (ops.patch_embedding, "images", (images, patches), {"patch_size": 16}),
        (ops.quantized_dense, "8 bits", (tokens, bits, zeros(1, 192, kind="float32")), {}),
        (ops.rms_norm, "tokens", (tokens, width), {"epsilon": 1e-6}),
        (ops.rotary_embedding, "heads", (heads, positions), {"max_wavelength": 10_000.0}),
    ]


def _ops() -> dict[str, dict[str, Any]]:
    """Asks each op what it would do with those tensors in the policy's compute dtype."""
    asked = [(op, case, op.declines(*given, **more)) for op, case, given, more in _cases()]
    found: dict[str, dict[str, Any]] = {}
    for op, case, reason in asked:
        if op.name not in found:
            found[op.name] = {
                "override": None if op.override is None else op.override.__name__,
                "path": "override" if reason is None else "generic",
                "reason": reason,
                "cases": {},
            }
        found[op.name]["cases"][case] = reason
    return found


def show(found: dict[str, Any], console: Console) -> None:
    """Prints a report as tables."""
    facts = Table(show_header=False, title="kmodels doctor", title_justify="left")
    facts.add_column(no_wrap=True)
    facts.add_column()
    for name in ("backend", "python", "platform", "dtype_policy", "matmul_precision"):
        facts.add_row(name.replace("_", " "), found[name])
    facts.add_row("devices", "\n".join(found["devices"]))
    facts.add_row("versions", "\n".join(f"{k} {v}" for k, v in found["versions"].items()))
    console.print(facts)
    paths = Table("op", "case", "path", "why not the override")
    for name, entry in found["ops"].items():
        for case, reason in entry["cases"].items():
            paths.add_row(name, case, "generic" if reason else "override", reason or "")
    console.print(paths)
