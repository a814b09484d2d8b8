"""What does a training step take of each device, and what do devices send, on 8, 64 and 512?

    KERAS_BACKEND=jax python benchmarks/scaling.py --write
    python benchmarks/scaling.py --page

Nothing is trained: every figure is `kmodels plan`'s, from shapes alone, as on an accelerator. With
--write rows go to benchmarks/results; --page puts the tables of all results into docs/scaling.md.
"""

import json
import re
import time
from pathlib import Path

QUESTION = (__doc__ or "").split("\n")[0]
ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "scaling.md"
# One row of text for each device, or so many pictures.
TEXT = {"sequence_length": 4096, "remat": "block"}
ROWS, PICTURES = 1, 64
MESHES = {
    8: ("data=8", "fsdp=8", "fsdp=2,model=4"),
    64: ("fsdp=64", "data=8,fsdp=8", "fsdp=8,model=8"),
    512: ("data=64,fsdp=8", "data=8,fsdp=64", "data=8,fsdp=8,model=8"),
}
FULL, LORA = "all weights, mixed_bfloat16", "LoRA of rank 16, bfloat16"
CASES = (
    ("gemma_2b_en", FULL),
    ("gemma_7b_en", FULL),
    ("gemma2_27b_en", FULL),
    ("gemma2_27b_en", LORA),
    ("vit_huge_patch14_224", FULL),
)
# Keras on torch has the axis from 3.16 on.
WITHOUT_MODEL = ("torch",)
PARTS = {
    "weights": ("frozen weights", "trained weights"),
    "slots": ("optimizer",),
    "gradients": ("gradients",),
    "activations": ("activations", "scratch"),
    "head": ("head",),
    "gathered": ("gathered",),
    "overhead": ("overhead",),
}


def row(preset: str, mode: str, mesh: str) -> dict:
    """One plan."""
    from kmodels.distribution import parse_mesh
    from kmodels.lora import LoraSettings
    from kmodels.tools.plan import Plan, Setup

    devices, text = parse_mesh(mesh).size, preset.startswith("gemma")
    lora = LoraSettings(16) if mode == LORA else None
    setup = Setup(
        batch_size=devices * (ROWS if text else PICTURES),
        precision="bfloat16" if lora else "mixed_bfloat16",
        lora=lora,
        accelerator=True,
        **(TEXT if text else {}),
    )
    found = Plan(preset, setup, mesh=mesh)
    bytes_of = {**found.estimate.parts, "overhead": found.estimate.overhead}
    sent: dict[str, int] = {}
    for one in found.exchanges:
        sent[one.axis] = sent.get(one.axis, 0) + one.bytes
    return {
        "preset": preset,
        "mode": mode,
        "devices": devices,
        "mesh": mesh,
        "batch_size": setup.batch_size,
        "bytes": {name: sum(bytes_of[part] for part in parts) for name, parts in PARTS.items()},
        "peak_bytes": found.bytes,
        "sent_bytes": sent,
    }


def meshes(backend: str) -> list[str]:
    """Those that the backend has."""
    every = [mesh for some in MESHES.values() for mesh in some]
    return [mesh for mesh in every if backend not in WITHOUT_MODEL or "model" not in mesh]


def table(rows: list[dict]) -> str:
    """Markdown; GiB with one decimal."""

    def gib(size: int) -> str:
        return f"{size / 2**30:.1f}" if size >= 2**30 / 20 else "0" if size == 0 else "<0.1"

    names = list(PARTS)[:-1]
    lines = [
        f"| devices | mesh | {' | '.join(names)} | peak | sent over data | fsdp | model |",
        f"| --: | --- |{' --: |' * (len(names) + 4)}",
    ]
    for one in rows:
        sent = one["sent_bytes"]
        # Norms and biases, which go over both axes at once, are next to nothing.
        axes = [gib(sent.get(axis, 0)) for axis in ("data", "fsdp", "model")]
        cells = [*(gib(one["bytes"][name]) for name in names), f"**{gib(one['peak_bytes'])}**"]
        lines.append(f"| {one['devices']} | `{one['mesh']}` | {' | '.join([*cells, *axes])} |")
    return "\n".join(lines)


def page(text: str) -> str:
    """The page with the tables of the newest results in their places."""
    for path in sorted(RESULTS.glob("scaling_*.json")):
        found = json.loads(path.read_text())
        tables = []
        for preset, mode in CASES:
            rows = [r for r in found["rows"] if (r["preset"], r["mode"]) == (preset, mode)]
            tables.append(f"**{preset}**, {mode}:\n\n{table(rows)}")
        marks = [f"<!-- {found['backend']}: {word} -->" for word in ("tables", "end")]
        block = re.compile(re.escape(marks[0]) + ".*?" + re.escape(marks[1]), re.DOTALL)
        inside = "\n\n".join(tables)
        text = block.sub(lambda _: f"{marks[0]}\n\n{inside}\n\n{marks[1]}", text)  # noqa: B023
    return text


def main() -> None:
    import record

    parser = record.flags(QUESTION)
    parser.add_argument("--page", action="store_true", help="write the tables to docs/scaling.md")
    options = parser.parse_args()
    if options.page:
        PAGE.write_text(page(PAGE.read_text()))
        return
    import keras

    backend, begun = keras.backend.backend(), time.monotonic()
    rows = []
    for preset, mode in CASES:
        for mesh in meshes(backend):
            rows.append(row(preset, mode, mesh))
            print(json.dumps(rows[-1]), flush=True)
    if options.write:
        content = {"backend": backend, "seconds": round(time.monotonic() - begun, 1), "rows": rows}
        record.write(f"scaling_{backend}", QUESTION, ("keras", backend), **content)


if __name__ == "__main__":
    main()
