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


def _ops() -> dict[str, dict[str, Any]]:
    """Asks each op what it would do with a ViT's tensors in the policy's compute dtype."""
    dtype = keras.config.dtype_policy().compute_dtype
    seed = keras.random.SeedGenerator(0)
    heads = keras.ops.zeros((1, 197, 3, 64), dtype)
    tokens = keras.ops.zeros((1, 197, 192), dtype)
    kernel = keras.ops.zeros((192, 192), dtype)
    images = keras.ops.zeros((1, 32, 32, 3), dtype)
    width = keras.ops.zeros((192,), dtype)
    patches = keras.ops.zeros((768, 192), dtype)
    asked: list[tuple[Any, str, str | None]] = [
        (ops.attention, "inference", ops.attention.declines(heads, heads, heads)),
        (
            ops.attention,
            "training with dropout",
            ops.attention.declines(heads, heads, heads, dropout=0.1, seed=seed),
        ),
        (ops.attention, "soft cap", ops.attention.declines(heads, heads, heads, soft_cap=50.0)),
        (ops.dense, "tokens", ops.dense.declines(tokens, kernel)),
        (ops.dropout, "training", ops.dropout.declines(tokens, 0.1, seed)),
        (ops.gelu, "tokens", ops.gelu.declines(tokens)),
        (ops.layer_norm, "tokens", ops.layer_norm.declines(tokens, width)),
        (
            ops.patch_embedding,
            "images",
            ops.patch_embedding.declines(images, patches, patch_size=16),
        ),
    ]
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
