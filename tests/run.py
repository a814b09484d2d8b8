"""Runs the tests: all backends side by side, each in its environment, then what needs several.

python3 tests/run.py                    what `make test` does: all folders but tests/nightly
python3 tests/run.py --quick            unit, numerics and families on torch, before each commit
python3 tests/run.py --all              with tests/nightly, which takes hours
python3 tests/run.py --backend torch    one backend
python3 tests/run.py --versions newest  each backend with other versions: nightly, newest, lowest
python3 tests/run.py --record           also writes the versions and counts for `kmodels doctor`
python3 tests/run.py --references       only write the references that the tests read
python3 tests/run.py --backend jax -- tests/numerics/ops -k attention    the rest goes to pytest

Environments, logs and the files that backends exchange are under .venv/. The last line is
`N passed, N failed, N skipped` over everything; the exit status is 0 only if nothing failed.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

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
    side_by_side,
)

# Files of few long tests first, so that no process is left with one of them at the end.
FOLDERS = ("programs", "loop", "families", "numerics", "unit")
QUICK = FOLDERS[2:]
NIGHTLY = "nightly"
REFERENCES = ROOT / "tests" / ".references"
EXCHANGE = FOLDER / "exchange"
WRITER = ROOT / "tests" / "write_references.py"
# What the suite ran with: `kmodels doctor` and docs/versions.md read it.
RECORD = ROOT / "src" / "kmodels" / "tools" / "versions.json"
RECORDED = ("keras", "jax", "torch", "tensorflow", "numpy", "tokenizers", "safetensors")
SUITE_LIMIT = 5400.0
# Each process has one core: more threads would only get in each other's way.
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
}
# What the oldest versions are tried with: packages as old warn of what has come since.
CORE = (
    *("-W", "ignore::DeprecationWarning", "tests/unit/house/test_command.py", "tests/numerics"),
    *("tests/families", "tests/loop/training"),
)
SLOWEST = 10


@dataclass
class Outcome:
    """The outcome of a run of pytest: counts, seconds by folder and by test, and reasons."""

    name: str
    counts: Counter = field(default_factory=Counter)
    skips: Counter = field(default_factory=Counter)
    tests: list[tuple[float, str]] = field(default_factory=list)
    folders: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    seconds: float = 0.0


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


def read_results(outcome: Outcome, results: Path) -> None:
    """Reads pytest's JUnit file into an outcome; a run that left none has failed."""
    if not results.is_file():
        outcome.counts["failed"] += 1
        return
    for case in ElementTree.parse(results).iter("testcase"):
        where, name = case.get("classname", ""), case.get("name", "")
        seconds = float(case.get("time", 0))
        outcome.tests.append((seconds, f"{where.removeprefix('tests.').replace('.', '/')}::{name}"))
        if "." in where:  # a file that is skipped as a whole has none
            outcome.folders[where.split(".")[1]] += seconds
        problems = {child.tag: child for child in case}
        if "failure" in problems or "error" in problems:
            outcome.counts["failed"] += 1
        elif (skip := problems.get("skipped")) is not None:
            outcome.counts["skipped"] += 1
            outcome.skips[f"{where}: {skip.get('message', '')}"] += 1
        else:
            outcome.counts["passed"] += 1


def run_suite(
    suite: tuple[str, str], arguments: list[str], processes: dict[tuple[str, str], int]
) -> Outcome:
    environment, backend = suite
    across = environment == "full"
    outcome, begun = Outcome(f"full:{backend}" if across else environment), time.monotonic()
    stem = f"test-{outcome.name.replace(':', '-')}"
    log, results = LOGS / f"{stem}.log", LOGS / f"{stem}.xml"
    results.unlink(missing_ok=True)
    command = [python_of(environment), "-m", "pytest", "-q", "--color=no", *arguments]
    command.append(f"--junitxml={results}")
    if (count := processes[suite]) > 1:
        command += [f"--numprocesses={count}", "--dist=loadfile", "--no-loadscope-reorder"]
    if across:
        command.append("--across")
    say(outcome.name, "tests begin")
    status = run_logged(
        outcome.name, command, log, _describe_suite, SUITE_LIMIT, variables(environment, backend)
    )
    text = log.read_text(errors="replace")
    read_results(outcome, results)
    no_tests_collected = 5
    if status not in (0, no_tests_collected) and not outcome.counts["failed"]:
        outcome.counts["failed"] += 1
    outcome.seconds = time.monotonic() - begun
    counted = ", ".join(f"{number} {word}" for word, number in sorted(outcome.counts.items()))
    say(outcome.name, f"{counted or 'no tests'} in {outcome.seconds:.0f} s")
    if outcome.counts["failed"]:
        begins = re.search(r"^=+ (ERRORS|FAILURES) =+$", text, re.MULTILINE)
        body = text[begins.start() :] if begins else text[-8000:]
        print(f"---- {log}, exit status {status}\n{body}\n---- end of {outcome.name}", flush=True)
    return outcome


def run_all(
    backends: list[str],
    arguments: list[str],
    jobs: int,
    versions: str,
    across: bool,
    together: bool,
) -> list[Outcome]:
    """Environments and references, then all backends, then the tests across frameworks on each.

    Several frameworks are tried with the versions of constraints.txt alone: packages beside Keras
    want its release.

    Args:
        backends: to test.
        arguments: for pytest.
        jobs: processes of all suites that run at once; suites side by side have one more.
        versions: one of VERSIONS, or "" for those of constraints.txt.
        across: whether the tests that need several frameworks run too.
        together: whether the backends run side by side and share the processes. A process imports,
            traces, compiles and makes pooled models for its own tests alone, so two processes of
            one backend need more CPU time than one of each of two backends. The suite on torch is
            the longest, so it gets one process more than its share to end with the others.
    """
    environments = {f"{versions}-{name}" if versions else name: name for name in backends}
    shutil.rmtree(EXCHANGE, ignore_errors=True)
    EXCHANGE.mkdir(parents=True)
    # The full environment takes longest, so it comes first.
    names = [*(["full"] if across else []), *environments]
    made = dict(zip(names, side_by_side(make_environment, names, 2), strict=True))
    made["references"] = write_references()
    if not made["references"]:
        made["full"] = False
    outcomes = [Outcome(name, Counter(failed=1)) for name, is_there in made.items() if not is_there]
    # Backends leave files for the tests across frameworks.
    for suites in ([*environments.items()], [("full", name) for name in BACKENDS] * across):
        there = [suite for suite in suites if made[suite[0]]]
        at_once = max(1, len(there)) if together else 1
        share = -(-jobs // at_once)
        processes = {
            suite: share + 1 if at_once > 1 and suite[1] == "torch" else share for suite in there
        }
        run = partial(run_suite, arguments=arguments, processes=processes)
        outcomes += side_by_side(run, there, at_once)
    return outcomes


def report(outcomes: list[Outcome]) -> int:
    """Print skips, the slowest tests, times and the sum; 0 if tests ran and all passed."""
    total: Counter = Counter()
    for outcome in outcomes:
        total.update(outcome.counts)
        for skip, number in sorted(outcome.skips.items()):
            print(f"{outcome.name}: {number} skipped, {skip}")
    slowest = [(*test, outcome.name) for outcome in outcomes for test in outcome.tests]
    for seconds, test, name in sorted(slowest, reverse=True)[:SLOWEST]:
        print(f"{seconds:6.1f} s  {name:<16} {test}")
    folders = [
        name for name in (*FOLDERS, NIGHTLY) if any(name in outcome.folders for outcome in outcomes)
    ]
    columns = "".join(f"{name:>10}" for name in folders)
    print(f"{'':<16}{'passed':>8}{'failed':>8}{'skipped':>8}{'s':>8}  s of tests:{columns}")
    for outcome in outcomes:
        counts = "".join(f"{outcome.counts[word]:8d}" for word in ("passed", "failed", "skipped"))
        seconds = "".join(f"{outcome.folders[name]:10.0f}" for name in folders)
        print(f"{outcome.name:<16}{counts}{outcome.seconds:8.0f}{'':13}{seconds}")
    failed = total["failed"]
    print(f"{total['passed']} passed, {failed} failed, {total['skipped']} skipped", flush=True)
    return 0 if total["passed"] and not failed else 1


def record(outcomes: list[Outcome], kind: str, tests: str) -> None:
    """Write the versions and counts of each backend's run, in the place of its last one."""
    code = (
        "import json, platform, sys; from importlib.metadata import distributions\n"
        "have = {d.name.lower(): d.version for d in distributions()}\n"
        "have['keras'] = have.get('keras') or have['keras-nightly']\n"
        "print(json.dumps([platform.python_version(),"
        " {name: have[name] for name in sys.argv[1:] if name in have}]))"
    )
    rows = {(row["kind"], row["backend"]): row for row in json.loads(RECORD.read_text())}
    for outcome in outcomes:
        backend = outcome.name.rpartition("-")[2]
        if outcome.name not in (backend, f"{kind}-{backend}") or not outcome.tests:
            continue  # tests across frameworks, or an environment that could not be made
        command = [python_of(outcome.name), "-c", code, *RECORDED]
        python, versions = json.loads(subprocess.check_output(command))
        counts = {word: outcome.counts[word] for word in ("passed", "failed", "skipped")}
        about = {"kind": kind, "backend": backend, "date": time.strftime("%Y-%m-%d")}
        rows[kind, backend] = about | {"python": python, "tests": tests} | counts | versions
    text = ",\n".join(json.dumps(row) for _, row in sorted(rows.items()))
    RECORD.write_text(f"[\n{text}\n]\n")


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=BACKENDS, action="append", help="default: all")
    parser.add_argument(
        "--jobs",
        type=int,
        default=0,
        help="processes in all, at least one a backend, and one more for torch beside others; "
        "default: one per core",
    )
    parser.add_argument("--versions", choices=VERSIONS, default="", help="other versions")
    extents = parser.add_mutually_exclusive_group()
    extents.add_argument("--quick", action="store_true", help=f"{', '.join(QUICK)} on torch")
    extents.add_argument("--all", action="store_true", help="with tests/nightly")
    parser.add_argument("--record", action="store_true", help=f"write counts into {RECORD.name}")
    parser.add_argument("--references", action="store_true", help="only write the references")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    options = parser.parse_args()
    if options.references:
        return 0 if write_references() else 1
    folders = QUICK if options.quick else (NIGHTLY, *FOLDERS) if options.all else FOLDERS
    arguments = options.pytest or [f"tests/{name}" for name in folders]
    if options.versions == "lowest" and not options.pytest:
        arguments = list(CORE)
    if options.all:
        arguments = [*arguments, "--nightly"]
    backends = options.backend or (["torch"] if options.quick else list(BACKENDS))
    jobs = options.jobs or len(os.sched_getaffinity(0))
    across = len(backends) == len(BACKENDS) and not options.versions
    # Tests at night start clusters, which need the machine for themselves.
    together = jobs > 1 and not options.all
    outcomes = run_all(backends, arguments, jobs, options.versions, across, together)
    if options.record:
        tests = "core" if arguments == list(CORE) else "all" if not options.pytest else "some"
        record(outcomes, options.versions or "pinned", tests)
    return report(outcomes)


if __name__ == "__main__":
    sys.exit(main())
