"""Writes tests/slow_tests.txt: what `make test` leaves to torch, and `make test-slow` runs.

python3 tests/slow_tests.py    after `make test` and `make test-slow`, whose logs it reads

Few tests take most of the time of JAX and TensorFlow, which compile what each of them builds. Those
run on torch each time, and on these two under `--slow` alone, except for the quickest of a file
that would have none. What only one backend can get wrong is not left out: numbers of other
packages, overrides, meshes and processes, runs that are killed, files for one backend, and what
backends leave for each other.
"""

import re
import sys

from environments import LOGS, ROOT

LIST = ROOT / "tests" / "slow_tests.txt"
# A test is slow if it takes this long, its fixtures apart, which are often a whole file's.
SECONDS = 2.0
BACKENDS = ("jax", "tensorflow")
ALWAYS = ("tests/overrides/", "tests/distribution/", "tests/faults/")
FILES = ("/test_references.py", "_jax.py", "_torch.py", "_tensorflow.py")
DURATION = re.compile(r"^([\d.]+)s (call|setup|teardown) +(\S.*)$", re.MULTILINE)


def read_list() -> dict[str, float]:
    """Seconds of the slow tests by their names, as pytest gives them."""
    lines = LIST.read_text().splitlines()
    pairs = [line.split(" ", 1) for line in lines if line and not line.startswith("#")]
    return {name: float(seconds) for seconds, name in pairs}


def may_wait(name: str) -> bool:
    """Whether a test may be left out on JAX and TensorFlow."""
    file = name.split("::")[0]
    if name.startswith(ALWAYS) or file.endswith(FILES):
        return False
    return "exchange" not in (ROOT / file).read_text()


def read_durations(log: str) -> list[tuple[float, str, str]]:
    """Seconds, phase and name of the tests that pytest's report of durations names."""
    return [(float(seconds), phase, name) for seconds, phase, name in DURATION.findall(log)]


def write_list(found: dict[str, float]) -> None:
    """Writes the list, sorted, below its first lines."""
    head = [line for line in LIST.read_text().splitlines() if line.startswith("#")]
    lines = [f"{seconds:.1f} {name}" for name, seconds in sorted(found.items())]
    LIST.write_text("\n".join([*head, *lines]) + "\n")


def main() -> int:
    """Write the list again, from what logs say."""
    found: dict[str, float] = {}
    for backend in BACKENDS:
        for log in (LOGS / f"test-{backend}.log", LOGS / f"test-{backend}-slow.log"):
            if not log.is_file():
                print(f"no {log.relative_to(ROOT)}: run make test and make test-slow")
                return 1
            for seconds, phase, name in read_durations(log.read_text(errors="replace")):
                if phase == "call" and seconds >= SECONDS and may_wait(name):
                    found[name] = max(seconds, found.get(name, 0.0))
    write_list(found)
    print(f"{len(found)} slow tests in {LIST.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
