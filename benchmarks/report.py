"""Draws the tables and the picture of README.md from the newest result files.

    python benchmarks/report.py

Nothing in them is written by hand: the tables stand between markers and are replaced.
"""

import json
import re
from pathlib import Path
from typing import Any

from faults import table as faults

HERE = Path(__file__).resolve().parent
RESULTS, README, PICTURE = HERE / "results", HERE / "README.md", HERE / "vit_train.png"
BACKENDS = ("torch", "jax", "tensorflow")
# Systems that are not somebody else's code, or compute in other dtypes.
OURS = "kmodels"
RATIOS = ("time", "peak")
HEADINGS = (
    "backend", "case", "kmodels ms", "best native peer", "keras-hub", "tutorial",
    "generic ops", "fit / bare loop", "peak / native", "peak / keras-hub", "peak / tutorial",
)  # fmt: skip
COLOURS = {"torch": "tab:orange", "jax": "tab:blue", "tensorflow": "tab:green"}


def newest(pattern: str) -> dict[str, Any] | None:
    """The content of the file whose name, and so whose date, is last."""
    files = sorted(RESULTS.glob(pattern))
    return json.loads(files[-1].read_text()) if files else None


def name_of(case: dict[str, Any]) -> str:
    size = {"small": "S/16", "base": "B/16"}.get(case["preset"], case["preset"])
    precision = {"bfloat16": "bf16", "float32": "fp32"}[case["precision"]]
    return (
        f"{size} x{case['batch']} {precision}, dropout {case['dropout']:g}, "
        f"{case['optimizer'].replace('adamw', 'AdamW').replace('sgd', 'SGD')}"
    )


def best(systems: dict[str, Any]) -> str | None:
    """The fastest system that is written for one framework, in the same dtypes."""
    native = {
        name: values["cpu_ratio"]
        for name, values in systems.items()
        if not name.startswith((OURS, "keras"))
        and not values["tolerated"]
        and "cpu_ratio" in values
    }
    return min(native, key=lambda name: native[name]) if native else None


def figure(systems: dict[str, Any], name: str | None, key: str = "cpu_ratio") -> str:
    values = systems.get(name or "", {})
    return f"{values[key]:.2f}" if key in values else "–"


def vit_rows(backend: str, content: dict[str, Any]) -> list[list[str]]:
    rows = []
    for row in content["rows"]:
        systems, peer = row["systems"], best(row["systems"])
        bare = systems.get("kmodels_bare", {}).get("cpu_ratio")
        native = figure(systems, peer)
        rows.append(
            [
                backend,
                name_of(row["case"]),
                f"{1000 * systems[OURS]['cpu_s']:.0f}",
                f"{native} ({peer})" if peer else native,
                figure(systems, "keras_hub"),
                figure(systems, "keras_tutorial"),
                figure(systems, "kmodels_generic"),
                f"{1 / bare:.2f}" if bare else "–",
                figure(systems, peer, "peak_ratio"),
                figure(systems, "keras_hub", "peak_ratio"),
                figure(systems, "keras_tutorial", "peak_ratio"),
            ]
        )
    return rows


def table(headings: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def gemma_table() -> str:
    rows = {}  # a file of one backend stands for its rows in a file of all
    for file in sorted(RESULTS.glob("gemma_lora_*.json")):
        content = json.loads(file.read_text())
        part = ", responses only" if content["loss_on"] == "responses" else ""
        for row in content["rows"]:
            case = f"{content['shapes']}, {row['dtype']}, 2 x {row['length']}{part}"
            for name, ratio in row.items():
                if name.startswith("over_"):
                    ratios = [f"{ratio[key]:.2f}" if key in ratio else "–" for key in RATIOS]
                    key = (case, row["backend"], name.removeprefix("over_"))
                    rows[key] = [*key, *ratios]
    return table(("case", "backend", "peer", "time / peer", "peak / peer"), sorted(rows.values()))


def replace(text: str, name: str, content: str) -> str:
    """Puts content between `<!-- name -->` and `<!-- end of name -->`."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
    changed, count = pattern.subn(lambda found: f"{found[1]}\n{content}\n\n{found[2]}", text)
    if count != 1:
        raise SystemExit(f"{README} has {count} places for {name}; it needs one")
    return changed


def draw(found: dict[str, dict[str, Any]]) -> None:
    """Bars of each peer's time over kmodels', a panel per backend and case under SGD."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    panels = [
        (backend, row)
        for backend, content in found.items()
        for row in content["rows"]
        if row["case"]["optimizer"] == "sgd"
    ]
    columns = min(4, len(panels))
    lines = -(-len(panels) // columns)
    picture, axes = pyplot.subplots(
        lines, columns, figsize=(4.6 * columns, 3.4 * lines), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for axis, (backend, row) in zip(axes.flat, panels, strict=False):
        bars = {k: v["cpu_ratio"] for k, v in row["systems"].items() if "cpu_ratio" in v}
        names = sorted(bars, key=lambda name: bars[name])
        axis.barh(names, [bars[name] for name in names], color=COLOURS[backend])
        axis.axvline(1.0, color="black", linewidth=1)
        axis.set_title(f"{backend}: {name_of(row['case'])}", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.set_xlabel("step time over kmodels' (right of 1: slower)", fontsize=7)
    # The name is without the date, which would make each picture a new file.
    picture.savefig(PICTURE, dpi=110, metadata={"Software": None})


def main() -> None:
    found = {}
    for backend in BACKENDS:
        content = newest(f"vit_train_{backend}_cpu_*.json")
        if content is not None:
            found[backend] = content
    text = README.read_text()
    if found:
        rows = [row for backend, content in found.items() for row in vit_rows(backend, content)]
        text = replace(text, "vit_train", table(HEADINGS, rows) + f"\n\n![ratios]({PICTURE.name})")
        draw(found)
    text = replace(text, "gemma_lora", gemma_table())
    text = replace(text, "faults", faults.text())
    README.write_text(text)


if __name__ == "__main__":
    main()
