"""The page of a quarter of an hour, docs/gpu.md, from the JSON files of its pieces alone."""

import json
from pathlib import Path
from typing import Any

from accelerator.child import ROOT
from accelerator.pieces import QUARTER

PAGE, RESULTS = ROOT / "docs" / "gpu.md", ROOT / "benchmarks" / "results"
HEAD = """# On a GPU

`make accelerator QUARTER=1` and `QUARTER=2` measure what follows in two commands of 8.5 minutes
([pieces and limits](../benchmarks/README.md#a-quarter-of-an-hour)), and
`python benchmarks/accelerator --page` writes this page from their files.
The peak is the memory that the allocator adds during a step; Gemma's weights are added to it.
"""
NOT_RUN = "\nIt has not been run yet: no GPU was at hand.\n"
TITLES = {
    "correctness": "Values, gradients and waits",
    "vit": "A training step of ViT-B/16",
    "gemma": "A LoRA step of Gemma 3 1B",
    "attention": "Attention alone",
    "cross_entropy": "Linear cross-entropy",
    "generate": "Generation",
    "switches": "SDPA and TF32",
}
# Fields of a row and their units.
RATES = {
    "images_per_s": "images/s",
    "useful_tokens_per_s": "tokens/s",
    "tokens_per_s": "tokens/s",
}


def quarters(results: Path) -> dict[Path, list[dict[str, Any]]]:
    """The results of each device's folder, in the order of `QUARTER`; small ones do not count."""
    found: dict[Path, list[dict[str, Any]]] = {}
    for folder in sorted(results.glob("accelerator-*")):
        files = [folder / f"{table}-quarter-{backend}.json" for _, table, backend, _ in QUARTER]
        contents = [json.loads(file.read_text()) for file in files if file.is_file()]
        contents = [content for content in contents if not content["key"]["small"]]
        if contents:
            found[folder] = contents
    return found


def text(results: Path) -> str:
    """Returns the page."""
    parts = [HEAD]
    for folder, contents in quarters(results).items():
        hardware = next((x["hardware"] for x in contents if "hardware" in x), {})
        versions = hardware.get("versions", {}).items()
        installed = ", ".join(f"{name} {number}" for name, number in versions if number != "absent")
        parts.append(f"\n## {hardware.get('device', folder.name)}\n\n")
        parts.append(f"The run of {contents[0]['date']} had commit {contents[0]['revision']}, ")
        parts.append(f"Python {hardware.get('python', 'unknown')}, {installed}.\n")
        for table, title in TITLES.items():
            of_table = [x for x in contents if x["key"]["table"] == table]
            if of_table:
                parts.append(f"\n### {title}\n")
                parts += [section(content, folder) for content in of_table]
    return "".join(parts) + (NOT_RUN if len(parts) == 1 else "")


def section(content: dict[str, Any], folder: Path) -> str:
    """A piece: its state, its table or counts, what lies outside, and its picture."""
    rows, name = content["rows"], content["key"]["backend"]
    lines = [f"\n`{name}`: {content['state']}, {len(rows)} rows in {content.get('seconds', 0)} s."]
    if "error" in content:
        lines.append(f"The piece ended early: {content['error']}.")
    if content.get("absent"):
        lines.append(f"These peers were not installed: {', '.join(content['absent'])}.")
    compared = [row for row in rows if "difference" in row]
    if compared:
        good = sum(row["difference"] <= row["allowed"] for row in compared)
        lines.append(f"{good} of {len(compared)} results agree with the CPU.")
        asked = [row for row in rows if "finding" in row]
        free = sum(row["finding"] == "no synchronisation" for row in asked)
        lines += [f"{free} of {len(asked)} calls wait for nothing."] * bool(asked)
    if content.get("outside"):
        lines += ["", *(f"- `{line}`" for line in content["outside"])]
    timed = [row for row in rows if "median_ms" in row or "failed" in row]
    if timed:
        lines += ["", *table(timed, content)]
    picture = folder / f"{content['piece']}.png"
    if picture.is_file():
        lines.append(f"\n![{content['piece']}](../{picture.relative_to(ROOT).as_posix()})")
    return "\n".join(lines) + "\n"


def table(rows: list[dict[str, Any]], content: dict[str, Any]) -> list[str]:
    """Lines of a table; "/ ours" is a time over that of the fastest row of ours in its case."""
    ours: dict[str, float] = {}
    for row in rows:
        if row["system"].startswith("kmodels") and "median_ms" in row:
            ours[row["case"]] = min(row["median_ms"], ours.get(row["case"], row["median_ms"]))
    lines = ["| case | system | ms | / ours | rate | peak MiB | notes |", "| --- " * 7 + "|"]
    for row in rows:
        cells = [row["case"], f"`{row['system']}`"]
        if "median_ms" in row:
            best = ours.get(row["case"])
            ratio = f"{row['median_ms'] / best:.2f}" if best else ""
            rates = [f"{row[field]:,} {unit}" for field, unit in RATES.items() if field in row]
            if "mfu" in row:
                rates.append(f"{row['mfu']:.0%} of the bfloat16 rate")
            peak = row.get("peak_above_held_mib")
            # All weights of a model are held between steps.
            peak = "" if peak is None else f"{peak + content.get('weights_mib', 0):,}"
            cells += [f"{row['median_ms']:,}", ratio, ", ".join(rates), peak, notes(row)]
        else:
            cells += ["", "", "", "", row["failed"].replace("|", "/")]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def notes(row: dict[str, Any]) -> str:
    """The kernel that took longest, the planned memory, and the first call."""
    found = [f"`{kernel}`" for kernel in row.get("kernels", ())[:1]]
    if "planned_mib" in row:
        found.append(f"planned {row['planned_mib']:,} MiB")
    if row.get("first_s", 0) >= 1:
        found.append(f"first call {row['first_s']:.0f} s")
    if row.get("calls") == 1:
        found.append("one call")
    return ", ".join(found)
