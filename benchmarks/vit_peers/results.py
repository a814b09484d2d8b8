"""The table on the screen and the file of results."""

import importlib.metadata
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parents[1]
PACKAGES = {
    "torch": ("torch", "transformers", "timm"),
    "jax": ("jax", "jaxlib", "flax", "optax"),
    "tensorflow": ("tensorflow",),
}


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


def revision(folder: Path = HERE) -> str:
    """The commit of a checkout that was measured, with a + where files differ from it."""
    command = ["git", "describe", "--always", "--exclude=*", "--dirty=+"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "from the tree"


def write(path: Path, question: str, backend: str, rows: list[dict[str, Any]]) -> None:
    """Writes the results; rows of other cases that the file holds stay."""
    old = json.loads(path.read_text())["rows"] if path.is_file() else []
    cases = [entry["case"] for entry in rows]
    names = ("kmodels", "keras", "keras-hub", "numpy", *PACKAGES[backend])
    content = {
        "question": question,
        "backend": backend,
        "versions": {name: version(name) for name in names},
        "hardware": hardware(),
        "clock": "CPU time of the process; wall beside it",
        "threads": 1,
        "date": time.strftime("%Y-%m-%d"),
        "rows": [entry for entry in old if entry["case"] not in cases] + rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
