"""A LoRA run of recipes/gemma_lora.py, killed every 50 steps and started again until it is done.

    python benchmarks/faults/lora.py [--quick] [--write]

Prints, for the backend of KERAS_BACKEND, whether the base stayed as it was, and what the adapter's
file holds.
"""

import hashlib
import json
import signal
import tempfile
from pathlib import Path
from typing import Any

import tally
from processes import Run

from kmodels.weights import read_safetensors

FLAGS = (
    *("--sequence-length", "32", "--batch-size", "4", "--samples", "0", "--first-steps", "2"),
    *("--lora-dropout", "0.1", "--checkpoint-every", "20", "--log-every", "10"),
)


def file_hash(path: Path) -> str:
    """sha256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def killed_every(distance: int, steps: int) -> dict[str, Any]:
    """The run, killed at each multiple of the distance, and one that is left alone."""
    flags = (*FLAGS, "--steps", str(steps))
    with tempfile.TemporaryDirectory() as name:
        whole, out = Path(name) / "whole", Path(name) / "killed"
        kills, hashes, files = 0, set(), set()
        killed = [(out, at) for at in range(distance, steps, distance)]
        for folder, at in [(whole, 0), *killed, (out, 0)]:
            run = Run("gemma_lora", folder, *flags)
            if at:
                run.to_step(at)
                run.interrupt(signal.SIGKILL)
            else:
                run.to_end()
            if run.code not in (0, -signal.SIGKILL):
                raise SystemExit(f"the run failed:\n{run.said}")
            kills += run.code == -signal.SIGKILL
            # The outputs before and after training, as the process has them.
            hashes |= {line for line in run.said.splitlines() if line.startswith("base ")}
            files.add(file_hash(folder / "base" / "model.safetensors"))
        one, other = (json.loads((p / "result.json").read_text()) for p in (whole, out))
        base = read_safetensors(out / "base" / "model.safetensors")
        adapter = read_safetensors(out / "adapter" / "adapter_model.safetensors")
        values = [tensor.read() for tensor in adapter.values()]
        return {
            "steps": len(other["step_losses"]),
            "kills": kills,
            "base bit-equal in memory and on the disk": len(hashes) == len(files) == 1,
            "weights and losses bit-equal to a run left alone": all(
                one[key] == other[key] for key in ("weights_digest", "step_losses", "metrics")
            ),
            "tensors of the adapter": len(adapter),
            "of them not lora_A or lora_B": sum(
                not n.endswith((".lora_A.weight", ".lora_B.weight")) for n in adapter
            ),
            "numbers of the adapter": sum(v.size for v in values),
            "trained parameters": other["trainable_parameters"],
            "numbers of the base": sum(t.read().size for t in base.values()),
        }


def main() -> None:
    """Runs it and prints the counts."""
    options = tally.arguments(__doc__).parse_args()
    distance, steps = (10, 15) if options.quick else (50, 500)
    found = killed_every(distance, steps)
    tally.report("lora", {"LoRA run": found}, options)


if __name__ == "__main__":
    main()
