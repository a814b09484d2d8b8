"""Runs all tests: one environment and one process per backend, then what needs several.

python3 tests/run.py                    what `make test` does: all but what --slow runs
python3 tests/run.py --backend torch    one backend
python3 tests/run.py --nightly          each backend with the nightly build of Keras
python3 tests/run.py --newest           each backend with the newest versions of everything
python3 tests/run.py --lowest           the core of the suite with the oldest versions allowed
python3 tests/run.py --slow             what that leaves out on JAX and TensorFlow
python3 tests/run.py --references       only write the references that the tests read
python3 tests/run.py --backend jax -- tests/ops -k attention    what follows goes to pytest

Environments, logs and the files that backends exchange are under .venv/. The last line is
`N passed, N failed, N skipped` over everything; the exit status is 0 only if nothing failed.
"""

import argparse
import hashlib
import os
import re
import shutil
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import slow_tests
from environments import (
    BACKENDS,
    FOLDER,
    LOGS,
    ROOT,
    VERSIONS,
    make_environment,
    python_of,
    run_logged,
    say,
)

# Two suites of backends share the core that begins first, while the references are still written.
LONGEST_FIRST = ("torch", "jax", "tensorflow")
# Across frameworks it is another; the first begins while the last of the suites is at work, and has
# most to do before it waits for that one.
LONGEST_ACROSS_FIRST = ("torch", "jax", "tensorflow")
REFERENCES = ROOT / "tests" / ".references"
EXCHANGE = FOLDER / "exchange"
WRITER = ROOT / "tests" / "write_references.py"
SUITE_LIMIT = 3600.0
# Two runs stand side by side on two cores: more threads would only get in each other's way.
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
}
NO_TESTS_COLLECTED = 5
SLOW = "--slow"
# What the oldest versions are tried with: packages as old warn of what has come since.
CORE = (
    *("-W", "ignore::DeprecationWarning", "tests/test_command.py", "tests/core", "tests/ops"),
    *("tests/overrides", "tests/layers", "tests/models", "tests/training"),
)
# The number of the slowest tests that are shown; logs name all that tests/slow_tests.py reads.
SLOWEST = 10


@dataclass
class Outcome:
    """The outcome of a run of pytest."""

    name: str
    counts: Counter = field(default_factory=Counter)
    skips: list[str] = field(default_factory=list)
    slowest: list[tuple[float, str]] = field(default_factory=list)
    left: int = 0
    seconds: float = 0.0

    @property
    def failed(self) -> int:
        """Failures, and errors while collecting or setting up."""
        return self.counts["failed"] + self.counts["error"]


def variables(environment: str, backend: str) -> dict[str, str]:
    """The variables that a run is given; tests/conftest.py says what they mean."""
    # Each process without bytecode compiles all that it imports again: 10 s of CPU time for torch.
    ours = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {
        **ours,
        **ONE_THREAD,
        "KERAS_BACKEND": backend,
        "KMODELS_ENVIRONMENT": environment.rpartition("-")[2],
        "KMODELS_REFERENCES": str(REFERENCES),
        "KMODELS_EXCHANGE": str(EXCHANGE),
        "PYTHONPATH": str(ROOT / "src"),
        "PYTHONUNBUFFERED": "1",
    }


def write_references() -> bool:
    """Write the references again if the writer or the pinned packages changed."""
    if not WRITER.is_file():
        say("references", "no tests/write_references.py, so none are written")
        return True
    sources = [WRITER, ROOT / "constraints.txt", *sorted((ROOT / "tests/references").glob("*.py"))]
    stamp_text = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    stamp = REFERENCES / ".stamp"
    if stamp.is_file() and stamp.read_text() == stamp_text:
        say("references", "up to date")
        return True
    if not make_environment("full"):
        return False
    shutil.rmtree(REFERENCES, ignore_errors=True)
    REFERENCES.mkdir(parents=True)
    log, begun = LOGS / "references.log", time.monotonic()
    command = [python_of("full"), WRITER]
    status = run_logged(
        "references", command, log, lambda _: "writing", 600, variables("full", "torch")
    )
    if status:
        say("references", f"failed with status {status}; {log}:")
        print(log.read_text(errors="replace")[-6000:], flush=True)
        return False
    stamp.write_text(stamp_text)
    say("references", f"written in {time.monotonic() - begun:.0f} s")
    return True


def _describe_suite(tail: str) -> str:
    done = re.findall(r"\[ *(\d+)%\]", tail)
    return f"{done[-1] if done else 0} % of the tests"


def read_counts(log: str, status: int) -> tuple[Counter, list[str]]:
    """Counts and skip reasons from pytest's closing lines; a run without them has failed."""
    counts: Counter = Counter()
    closing = re.findall(r"^=* ?(\d+ \w+.*|no tests ran.*) in [\d.]+s", log, re.MULTILINE)
    if closing:
        for number, word in re.findall(r"(\d+) ([a-z]+)", closing[-1]):
            counts[word.removesuffix("s")] += int(number)
    bad = counts["failed"] + counts["error"]
    if not bad and status not in (0, NO_TESTS_COLLECTED):
        counts["failed"] += 1
    return counts, re.findall(r"^(?:SKIPPED|XFAIL) .*", log, re.MULTILINE)


def run_suite(environment: str, backend: str, arguments: list[str]) -> Outcome:
    """Run pytest in an environment under a backend and print what failed."""
    across = environment == "full"
    name = f"full:{backend}" if across else environment
    name += "-slow" if SLOW in arguments else ""
    outcome, begun = Outcome(name), time.monotonic()
    log = LOGS / f"test-{name.replace(':', '-')}.log"
    command = [python_of(environment), "-m", "pytest", "-q", "--color=no", *arguments]
    command += ["--durations=0", f"--durations-min={slow_tests.SECONDS}"]
    if across:
        command.append("--across")
    say(name, "tests begin")
    status = run_logged(
        name, command, log, _describe_suite, SUITE_LIMIT, variables(environment, backend)
    )
    text = log.read_text(errors="replace")
    outcome.counts, outcome.skips = read_counts(text, status)
    durations = slow_tests.read_durations(text)
    outcome.slowest = [(seconds, test) for seconds, _, test in durations]
    outcome.left = int((re.findall(r"^(\d+) slow tests left", text, re.MULTILINE) or [0])[-1])
    outcome.seconds = time.monotonic() - begun
    running(environment).unlink(missing_ok=True)
    counted = ", ".join(f"{number} {word}" for word, number in sorted(outcome.counts.items()))
    say(name, f"{counted or 'no tests'} in {outcome.seconds:.0f} s")
    if outcome.failed:
        begins = re.search(r"^=+ (ERRORS|FAILURES) =+$", text, re.MULTILINE)
        body = text[begins.start() :] if begins else text[-8000:]
        print(f"---- {name}: {log}, exit status {status}\n{body}\n---- end of {name}", flush=True)
    return outcome


def running(name: str) -> Path:
    """A file that is there until a suite or the references are done: tests wait for it."""
    return EXCHANGE / f"{name}.running"


def failed_setup(name: str) -> Outcome:
    """An environment or the references could not be made: counts as one failure."""
    return Outcome(name, Counter(failed=1))


def run_all(backends: list[str], arguments: list[str], versions: str = "") -> list[Outcome]:
    """Environments and references, then each backend's suite and what needs several; two at a time.

    A suite begins when its environment is there. Its tests that read references wait for them, and
    those that need several frameworks wait for the files that the backends leave for them; what
    each waits for was begun before it. Several frameworks are tried with the versions of
    constraints.txt alone: packages beside Keras want its release.

    Args:
        backends: to test.
        arguments: for pytest.
        versions: one of VERSIONS; by default those of constraints.txt.
    """
    whole = len(backends) == len(BACKENDS) and not versions
    environments = {f"{versions}-{name}" if versions else name: name for name in backends}
    shutil.rmtree(EXCHANGE, ignore_errors=True)
    EXCHANGE.mkdir(parents=True)
    for name in ("references", *environments):
        running(name).touch()

    def prepare_references() -> bool:
        try:
            return (not whole or make_environment("full")) and write_references()
        finally:
            running("references").unlink(missing_ok=True)

    def run_when_ready(environment: str, backend: str) -> Outcome | None:
        needed = "references" if environment == "full" else environment
        if jobs[needed].result():
            return run_suite(environment, backend, arguments)
        running(environment).unlink(missing_ok=True)
        return None

    # The full environment takes longest and the references hang on it, so it comes first.
    preparing = {"references": prepare_references}
    preparing |= {name: partial(make_environment, name) for name in reversed(environments)}
    runs = sorted(environments.items(), key=lambda run: LONGEST_FIRST.index(run[1]))
    if whole:
        runs += [("full", name) for name in LONGEST_ACROSS_FIRST]
    with ThreadPoolExecutor(2) as pool:
        jobs = {name: pool.submit(job) for name, job in preparing.items()}
        outcomes = [
            outcome for outcome in pool.map(lambda run: run_when_ready(*run), runs) if outcome
        ]
    return [failed_setup(name) for name, job in jobs.items() if not job.result()] + outcomes


def report(outcomes: list[Outcome]) -> int:
    """Print skips, the slowest tests, a line per run and the sum; 0 if tests ran and all passed."""
    total: Counter = Counter()
    for outcome in outcomes:
        total.update(outcome.counts)
        for skip in outcome.skips:
            print(f"{outcome.name}: {skip}")
    slowest = [(*test, outcome.name) for outcome in outcomes for test in outcome.slowest]
    for seconds, test, name in sorted(slowest, reverse=True)[:SLOWEST]:
        print(f"{seconds:6.1f} s  {name:<16} {test}")
    for outcome in outcomes:
        counts = outcome.counts
        print(
            f"{outcome.name:<16} {counts['passed']:5d} passed {outcome.failed:4d} failed "
            f"{counts['skipped'] + counts['xfailed']:4d} skipped {outcome.seconds:6.0f} s"
        )
    if left := [f"{o.left} on {o.name}" for o in outcomes if o.left]:
        print(f"slow tests left to make test-slow: {', '.join(left)}")
    failed = total["failed"] + total["error"]
    skipped = total["skipped"] + total["xfailed"]
    print(f"{total['passed']} passed, {failed} failed, {skipped} skipped", flush=True)
    return 0 if total["passed"] and not failed else 1


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=BACKENDS, action="append", help="default: all")
    others = parser.add_mutually_exclusive_group()
    for versions, text in zip(
        VERSIONS,
        ("the nightly build of Keras", "the newest versions", "the oldest versions allowed"),
        strict=True,
    ):
        others.add_argument(
            f"--{versions}",
            action="store_const",
            dest="versions",
            const=versions,
            default="",
            help=f"with {text}",
        )
    parser.add_argument("--references", action="store_true", help="only write the references")
    parser.add_argument(SLOW, action="store_true", help="only what tests/slow_tests.txt names")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    options = parser.parse_args()
    if options.references:
        return 0 if write_references() else 1
    arguments = options.pytest or (list(CORE) if options.versions == "lowest" else [])
    backends = options.backend or list(BACKENDS)
    if options.slow:
        if not (backends := [name for name in backends if name in slow_tests.BACKENDS]):
            parser.error("--slow is for jax and tensorflow: torch runs its slow tests each time")
        arguments = [SLOW, *arguments]
    return report(run_all(backends, arguments, options.versions))


if __name__ == "__main__":
    sys.exit(main())
