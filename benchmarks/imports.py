"""What does it cost to import kmodels and Keras, and what is it made of?

    python benchmarks/imports.py [--rounds 7] [--write]

In an environment with one backend, which is taken from KERAS_BACKEND. CPU seconds of a process that
imports, less those of an empty one, the median of the rounds, all ways in turn. `without ...` hides
packages that Keras imports where it finds them; `no bytecode` has each module compiled anew, as
where PYTHONDONTWRITEBYTECODE was set before the first import.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

QUESTION = "What does it cost to import kmodels and Keras, and what is it made of?"
RESULTS = Path(__file__).parent / "results"
BACKEND = os.environ.get("KERAS_BACKEND", "torch")
HIDE = "import sys; sys.modules.update(dict.fromkeys({names}, None)); "
KMODELS = "import keras, kmodels.data, kmodels.models, kmodels.training"
# name -> (program, whether bytecode may be read)
WAYS = {
    "empty": ("pass", True),
    "framework": (f"import {BACKEND}", True),
    "keras": ("import keras", True),
    "keras without scikit-learn": (HIDE.format(names=["sklearn"]) + "import keras", True),
    "keras without Matplotlib": (HIDE.format(names=["matplotlib"]) + "import keras", True),
    "kmodels": (KMODELS, True),
    "kmodels, no bytecode": (KMODELS, False),
}


def seconds(program: str, bytecode: bool) -> float:
    """CPU time of a process."""
    environment = {**os.environ, "KERAS_BACKEND": BACKEND, "TF_CPP_MIN_LOG_LEVEL": "2"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryDirectory() as empty:
        if not bytecode:
            environment["PYTHONPYCACHEPREFIX"] = empty
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", program], env=environment, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=QUESTION)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(options.rounds):
        for name, way in WAYS.items():
            found[name].append(seconds(*way))
    empty = statistics.median(found.pop("empty"))
    rows = {name: round(statistics.median(times) - empty, 3) for name, times in found.items()}
    for name, value in rows.items():
        print(f"{value:7.2f} s  {name}")
    if options.write:
        versions = ("keras", BACKEND, "numpy", "scikit-learn", "matplotlib")
        content = {
            "question": QUESTION,
            "backend": BACKEND,
            "cpu_s": rows,
            "rounds": options.rounds,
            "hardware": {"machine": platform.machine(), "cores": os.cpu_count()},
            "versions": {
                "python": platform.python_version(),
                **{name: importlib.metadata.version(name) for name in versions},
            },
        }
        file = RESULTS / f"imports_{BACKEND}_cpu_{time.strftime('%Y-%m-%d')}.json"
        file.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
