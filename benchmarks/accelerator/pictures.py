"""A picture for each piece that has times: bars by case and system."""

from pathlib import Path
from typing import Any

COLORS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#8c8c8c")


def draw(found: dict[str, dict[str, Any]], out: Path) -> list[Path]:
    """Draws NAME.png for each result with times, where matplotlib is installed."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("agg")
    from matplotlib import pyplot

    drawn = []
    for name, content in found.items():
        rows = [row for row in content["rows"] if "median_ms" in row]
        if not rows:
            continue
        systems = list(dict.fromkeys(row["system"] for row in rows))
        figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.28 * len(rows)), layout="constrained")
        for place, row in enumerate(rows):
            color = COLORS[systems.index(row["system"]) % len(COLORS)]
            axes.barh(place, row["median_ms"], color=color)
        axes.set_yticks(range(len(rows)), [f"{row['case']}  {row['system']}" for row in rows])
        axes.tick_params(axis="y", labelsize=7)
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.set_xlabel("milliseconds, median")
        device = content.get("hardware", {}).get("device", "")
        axes.set_title(f"{name} on {device}, {content.get('date', '')}", fontsize=9)
        path = out / f"{name}.png"
        figure.savefig(path, dpi=100)
        pyplot.close(figure)
        drawn.append(path)
    return drawn
