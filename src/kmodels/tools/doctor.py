"""The report of `kmodels doctor`: backend, versions, devices, precision, paths of ops."""

import importlib.metadata
import json
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import keras
from packaging.version import Version
from rich.console import Console
from rich.table import Table

from kmodels import __version__, ops
from kmodels.core import runtime
from kmodels.core.dispatch import Op, backend, backend_module, load_environment, switched_off
from kmodels.layers import block_compile as compiling

PACKAGES = (
    "jax", "jaxlib", "torch", "tensorflow", "numpy", "safetensors", "tokenizers",
    "scikit-learn", "pillow", "transformers", "timm", "peft", "keras-hub",
)  # fmt: skip
# Results of `benchmarks/ops.py` in a checkout; an installed package has none.
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
# Rows of runs of the tests: `kind`, `backend`, counts, and the version of each package.
VERSIONS = Path(__file__).parent / "versions.json"


class DoctorBackend(Protocol):
    """The part of one backend in the report, and in `kmodels parity --op`."""

    def devices(self) -> list[str]:
        """Returns the devices in words."""
        ...

    def way(self, op: Op[Any, Any], *arguments: Any, **keywords: Any) -> str | None:
        """Returns the body that an override uses for these arguments; None if it has only one."""
        ...

    def platforms(
        self, op: Op[Any, Any], *arguments: object, **keywords: object
    ) -> dict[str, tuple[str, str | None]]:
        """Returns by platform the chosen body and the reason against a faster one, or None.

        No device is needed; an op with the same choice everywhere has no platforms.
        """
        ...

    def gradients(
        self, function: Callable[..., tuple[Any, Any]], tensors: Sequence[Any]
    ) -> tuple[Any, Sequence[Any]]:
        """Returns (rest, gradients) of a function that returns (scalar, rest), as in a step.

        The gradient by a tensor that plays no part is None, or zeros.
        """
        ...


def report() -> dict[str, Any]:
    """Collects the facts for `kmodels doctor`.

    Returns:
        `backend`, `python`, `platform`, `versions` (package -> version, installed ones only),
        `untested` (a line for each package older or newer than those that the tests ran with),
        `devices` (names), `dtype_policy`, `matmul_precision`, `jit_compile` (the effect of "auto"
        on the blocks, with the reason), and `ops`: for each op `override` (name of its function or
        `None`), `user` (name of the function that `kmodels.override` registered, or `None`), `path`
        (`"override"` or `"generic"`), `reason` (why the override is not used, or `None`) in its
        plainest case, and `cases`, a list of: `case` and `dtype` of tensors on the default device,
        `path` (`"generic"`, the body of the override, or the user's function), `reason`,
        `platforms` (by platform, the path and the reason against a faster one), and `measured`: by
        result file, `time` and `memory` of the override over those of the generic body.

    Raises:
        InputError: if `KMODELS_GENERIC_OPS` names an unknown op.
    """
    load_environment(strict=True)
    engine, versions = backend_module("kmodels.tools.doctor", DoctorBackend), _versions()
    return {
        "backend": backend(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions,
        "untested": _untested(versions),
        "devices": engine.devices(),
        "dtype_policy": keras.config.dtype_policy().name,
        "matmul_precision": runtime.matmul_precision(),
        "jit_compile": compiling.declines() or "auto compiles each block",
        "ops": _ops(engine),
    }


def _versions() -> dict[str, str]:
    # A nightly build of Keras is another package.
    versions = {"kmodels": __version__, "keras": keras.__version__}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _untested(versions: dict[str, str]) -> list[str]:
    """Returns a line for each package with a version that the tests did not pass with."""
    rows = [
        row
        for row in json.loads(VERSIONS.read_text())
        if row["backend"] == backend() and not row["failed"]
    ]
    lines = []
    for package, installed in versions.items():
        run = sorted({Version(row[package]) for row in rows if package in row})
        if run and not run[0] <= Version(Version(installed).public) <= run[-1]:
            age = "older" if Version(installed) < run[0] else "newer"
            lines.append(
                f"{package} {installed} is {age} than the tests passed with: {run[0]} to {run[-1]}"
            )
    return lines


def _cases(dtype: str) -> list[tuple[Any, str, tuple, dict[str, Any]]]:
    """Returns (op, case, arguments, keywords); cases of `benchmarks/ops.py` have its names."""

    def zeros(*shape: int, kind: str = dtype) -> Any:
        return keras.ops.zeros(shape, kind)

    seed = keras.random.SeedGenerator(0)
    heads, long = (zeros(8, 197, 6, 64),) * 3, (zeros(1, 1024, 6, 64),) * 3
    shared = (zeros(2, 256, 4, 256), *[zeros(2, 256, 1, 256)] * 2)
    tokens, wide, width = zeros(8, 197, 384), zeros(8, 197, 1536), zeros(384)
    gate, text = zeros(2, 256, 2048), zeros(2, 256, 640)
    hidden, table, labels = zeros(8, 64), zeros(512, 64), zeros(8, kind="int32")
    weights, positions = zeros(8, kind="float32"), zeros(256, kind="int32")
    linear = (tokens, zeros(384, 1536), zeros(1536), zeros(1536, 384), width)
    bits, scales = zeros(384, 384, kind="int8"), zeros(1, 384, kind="float32")
    routed = (zeros(1024, 256), zeros(8, 256, 512), zeros(8, kind="int32"))
    many = (zeros(2048, 256), zeros(128, 256, 128), zeros(128, kind="int32"))
    turned = {"positions": positions, "max_wavelength": 10_000.0}
    return [
        (ops.attention, "8x197x6x64 dropout 0.0", heads, {}),
        (ops.attention, "8x197x6x64 dropout 0.1", heads, {"dropout": 0.1, "seed": seed}),
        (ops.attention, "1x1024x6x64", long, {}),
        (ops.attention, "1x1024x6x64 causal", long, {"causal": True}),
        (ops.attention, "2x256x4x256, one key head, causal", shared, {"causal": True}),
        (ops.attention, "8x197x6x64 soft cap", heads, {"soft_cap": 50.0}),
        (ops.dense, "8x197x384 to 1536", (tokens, zeros(384, 1536)), {}),
        (ops.dense, "8x17x64 to 64", (zeros(8, 17, 64), zeros(64, 64)), {}),
        (ops.dropout, "8x197x1536 rate 0.1", (wide, 0.1, seed), {}),
        (ops.gated_gelu, "2x256x2048", (gate, gate), {}),
        (ops.gated_silu, "2x256x2048", (gate, gate), {}),
        (ops.gelu, "8x197x1536", (wide,), {}),
        (ops.grouped_dense, "512 tokens to 2 of 8, 256 to 512", routed, {}),
        (ops.grouped_dense, "256 tokens to 8 of 128, 256 to 128", many, {}),
        (ops.layer_norm, "8x197x384", (tokens, width), {}),
        (ops.linear_cross_entropy, "8x64 on 512", (hidden, table, labels, weights), {}),
        (ops.linear_divergence, "8x64 on 512", (hidden, table, hidden, table), {}),
        (ops.linear_log_probs, "8x64 on 512", (hidden, table, labels), {}),
        (ops.mlp, "8x197x384 by 1536", linear, {}),
        (ops.mlp, "8x197x384 by 1536, dropout 0.1", linear, {"dropout": 0.1, "seed": seed}),
        (
            ops.patch_embedding,
            "8x224x224x3 patch 16",
            (zeros(8, 224, 224, 3), zeros(768, 384)),
            {"patch_size": 16},
        ),
        (ops.quantized_dense, "8x197x384, 8 bits", (tokens, (bits, scales)), {}),
        (ops.rms_norm, "2x256x640", (text, zeros(640)), {"epsilon": 1e-6}),
        (ops.rotary_embedding, "2x256x4x256", (shared[0],), turned),
        (
            ops.rotary_embedding_2d,
            "8x201x6x64",
            (zeros(8, 201, 6, 64), zeros(201, 2, kind="float32")),
            {},
        ),
    ]


def _ops(engine: DoctorBackend) -> dict[str, dict[str, Any]]:
    """Returns the choice of each op and its override for the tensors of `_cases`."""
    own = keras.config.dtype_policy().compute_dtype
    measured = _measured()
    entries: dict[str, dict[str, Any]] = {}
    for dtype in dict.fromkeys((own, "float32", "bfloat16")):
        for op, case, arguments, keywords in _cases(dtype):
            reason = op.declines(*arguments, **keywords)
            name = None if op.override is None else op.override.__name__
            entry = entries.setdefault(
                op.name,
                {
                    "override": name,
                    "user": op.user and op.user.name,
                    "path": "generic" if reason else "override",
                    "reason": reason,
                    "cases": [],
                },
            )
            path = "generic" if reason else engine.way(op, *arguments, **keywords) or "override"
            ratios = {} if reason else measured.get((name, case, dtype), {})
            if op.user is not None and switched_off(op.name) is None:
                declined = op.user.declines(op.bind(*arguments, **keywords))
                if declined is None:
                    path, reason, ratios = op.user.name, None, {}
                else:
                    reason = f"{declined}; {reason}" if reason else declined
            row = {"case": case, "dtype": dtype, "path": path, "reason": reason}
            elsewhere = engine.platforms(op, *arguments, **keywords)
            entry["cases"].append({**row, "platforms": elsewhere, "measured": ratios})
    return entries


def _measured() -> dict[Any, dict[str, dict[str, float]]]:
    """Returns, by override, case and dtype, the ratios of each file of results."""
    by_case: dict[Any, dict[str, dict[str, float]]] = {}
    for path in sorted(RESULTS.glob(f"ops_{backend()}_*.json")):
        for row in json.loads(path.read_text())["rows"]:
            if row["declines"] is None:
                ratios = {"time": row["time_ratio"], "memory": row.get("memory_ratio")}
                key = (row["override"], row["case"], row["dtype"])
                known = {name: ratio for name, ratio in ratios.items() if ratio is not None}
                by_case.setdefault(key, {})[path.name] = known
    return by_case


def show(content: dict[str, Any], console: Console, ops: bool = False) -> None:
    """Prints a report: facts and the number of ops that run an override.

    With `ops` also each op in typical cases, and the choices on other platforms.
    """
    facts = Table(show_header=False, title="kmodels doctor", title_justify="left")
    facts.add_column(no_wrap=True)
    facts.add_column()
    plain = ("backend", "python", "platform", "dtype_policy", "matmul_precision", "jit_compile")
    for name in plain:
        facts.add_row(name.replace("_", " "), content[name])
    facts.add_row("devices", "\n".join(content["devices"]))
    facts.add_row("versions", ", ".join(f"{k} {v}" for k, v in content["versions"].items()))
    if content["untested"]:
        facts.add_row("untested", "\n".join(content["untested"]))
    fast = [
        name
        for name, entry in content["ops"].items()
        if any(case["path"] == "override" for case in entry["cases"])
    ]
    counts = f"{len(fast)} of {len(content['ops'])} run an override"
    facts.add_row("ops", counts + (f": {', '.join(fast)}" if fast else ""))
    mine = [f"{entry['user']} ({name})" for name, entry in content["ops"].items() if entry["user"]]
    if mine:
        facts.add_row("your overrides", ", ".join(mine))
    console.print(facts)
    if not ops:
        console.print("kmodels doctor --ops shows each op and the reason if it runs no override")
        return
    paths = Table("op", "case", "dtype", "path", "reason, or ratio to the generic body")
    files: dict[str, int] = {}
    for name, entry in content["ops"].items():
        rows: dict[tuple[str, str, str], list[str]] = {}
        for case in entry["cases"]:
            why = case["reason"] or _ratios(case["measured"], files)
            rows.setdefault((case["case"], case["path"], why), []).append(case["dtype"])
        for (label, path, why), dtypes in sorted(rows.items(), key=lambda row: row[0][0]):
            paths.add_row(name, label, ", ".join(dtypes), path, why)
    console.print(paths)
    _show_platforms(content, console)
    for file, number in files.items():
        console.print(f"({number}) benchmarks/results/{file}", highlight=False)


def _show_platforms(content: dict[str, Any], console: Console) -> None:
    """Prints the choices on other platforms, if the backend has some."""
    rows: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    for name, entry in content["ops"].items():
        for case in entry["cases"]:
            for place, (path, why) in case["platforms"].items():
                row = rows.setdefault((f"{name} on {place}", path, why or ""), {})
                row.setdefault(case["case"], []).append(case["dtype"])
    table = Table("other platform", "path", "cases", "reason against a faster path")
    for (place, path, why), cases in sorted(rows.items()):
        words = "\n".join(f"{label}: {', '.join(dtypes)}" for label, dtypes in cases.items())
        table.add_row(place, path, words, why)
    if rows:
        console.print(table)


def _ratios(measured: dict[str, dict[str, float]], files: dict[str, int]) -> str:
    """Returns the ratios in words, and the numbers of their files, which it assigns."""
    if not measured:
        return ""
    words = []
    for name in ("time", "memory"):
        ratios = [f"{ratio[name]:.2f}" for ratio in measured.values() if name in ratio]
        if ratios:
            low, high = min(ratios), max(ratios)
            words.append(f"{name} {low}" if low == high else f"{name} {low} to {high}")
    numbers = (str(files.setdefault(file, len(files) + 1)) for file in measured)
    return f"{', '.join(words)} ({', '.join(numbers)})"
