"""What does it cost to import kmodels and Keras, and what is it made of?

    python benchmarks/imports.py [--rounds 7] [--write]

In an environment with one backend, which is taken from KERAS_BACKEND. CPU seconds of a process that
imports, less those of an empty one, the median of the rounds, all ways in turn. `without ...` hides
packages that Keras imports where it finds them; `no bytecode` has each module compiled anew, as
where PYTHONDONTWRITEBYTECODE was set before the first import.
"""

import os
import resource
import statistics
import subprocess
import sys
import tempfile

import record

QUESTION = "What does it cost to import kmodels and Keras, and what is it made of?"
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
    parser = record.flags(QUESTION)
    parser.add_argument("--rounds", type=int, default=7)
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
        packages = ("keras", BACKEND, "numpy", "scikit-learn", "matplotlib")
        content = {"backend": BACKEND, "cpu_s": rows, "rounds": options.rounds}
        name = f"imports_{BACKEND}_cpu"
        record.write(name, QUESTION, packages, cores=os.cpu_count(), **content)


if __name__ == "__main__":
    main()
