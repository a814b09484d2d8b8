"""Harms a checkpoint while it is written, and while it lies on the disk.

    python benchmarks/faults/writing.py [--quick] [--write]

Prints counts. Any backend will do, as none of its operations is run.
"""

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import tally

from kmodels.checkpoint import manager
from kmodels.checkpoint.state import RunState
from kmodels.core.errors import InputError
from kmodels.core.files import remove_leftovers
from kmodels.weights import read_safetensors

SIZE = 200_000


def snapshot(step: int, size: int = SIZE) -> tuple[RunState, dict[str, dict[str, Any]]]:
    """A state whose values all say which step it is of."""
    arrays = {"a/kernel": np.full(size, step, "float32"), "a/bias": np.full(7, step, "float32")}
    parts = {"model": arrays, "optimizer": {f"{k}:momentum": v for k, v in arrays.items()}}
    return RunState(step, logs={"loss": float(step)}), parts


def is_whole(folder: Path) -> int:
    """The step of the newest checkpoint, after comparing every value with it; -1 where torn."""
    found = manager.newest(folder)
    assert found is not None
    path, described, _ = found
    step = described.step
    for part in ("model", "optimizer"):
        for tensor in read_safetensors(path / f"{part}.safetensors").values():
            if not (tensor.read() == step).all():
                return -1
    return step


def kill_while_writing(trials: int) -> dict[str, int]:
    """SIGKILL at a random moment of a process that does nothing but write checkpoints."""
    counts = {"trials": trials, "whole": 0, "torn": 0, "none": 0, "damaged": 0, "left over": 0}
    draw = random.Random(0)
    for _ in range(trials):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            manager.save(folder, *snapshot(1))
            child = os.fork()
            if not child:
                for step in range(2, 10_000):
                    manager.save(folder, *snapshot(step), keep=1)
                os._exit(0)
            time.sleep(draw.uniform(0.0, 0.06))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            try:
                step = is_whole(folder)
                counts["whole" if step > 0 else "torn"] += 1
                counts["damaged"] += bool(manager.newest(folder)[2])  # type: ignore[index]
            except InputError:
                counts["none"] += 1
            remove_leftovers(folder)
            counts["left over"] += bool(list(folder.glob(".*")))
    return counts


def _limited(folder: Path, size: int) -> tuple[bool, bool]:
    """Returns whether a save under a limit of the file size failed, and said why in one line."""
    child = os.fork()
    if child:
        return {0: (False, True), 1: (True, True)}.get(
            os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), (True, False)
        )
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    try:
        manager.save(folder, *snapshot(2), keep=1)
    except InputError as error:
        os._exit(1 if "make room" in str(error) and "\n" not in str(error) else 2)
    except BaseException:
        os._exit(3)
    os._exit(0)


def full_disk(sizes: int) -> dict[str, int]:
    """A disk that is full at so many sizes: by a limit of the file size, and on a small tmpfs."""
    counts = {"trials": 0, "clear errors": 0, "former intact": 0, "left over": 0, "on tmpfs": 0}
    whole = sum(values.nbytes for values in snapshot(1)[1]["model"].values())
    for number in range(sizes):
        size = 1 + whole * number // sizes
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            manager.save(folder, *snapshot(1))
            failed, clear = _limited(folder, size)
            _count(counts, folder, failed and clear)
    for number in range(sizes):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            room = whole * 2 + 100_000 + whole * 2 * number // sizes
            options = ["-t", "tmpfs", "-o", f"size={room}", "tmpfs", name]
            if subprocess.run(["mount", *options], capture_output=True).returncode:
                break
            try:
                manager.save(folder, *snapshot(1))
                try:
                    manager.save(folder, *snapshot(2))
                    clear = False
                except InputError as error:
                    clear = "make room" in str(error)
                _count(counts, folder, clear)
                counts["on tmpfs"] += 1
            finally:
                subprocess.run(["umount", name], check=True)
    return counts


def _count(counts: dict[str, int], folder: Path, clear: bool) -> None:
    counts["trials"] += 1
    counts["clear errors"] += clear
    counts["former intact"] += is_whole(folder) == 1
    counts["left over"] += [path.name for path in folder.iterdir()] != ["step_00000001"]


def damage(flips: int, cuts: int) -> dict[str, int]:
    """Single bits turned and files cut, over every file of a checkpoint."""
    counts = {"bit flips": flips, "cuts": cuts, "wrong loads": 0, "passed over": 0, "harmless": 0}
    draw = random.Random(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for step in (1, 2):
            manager.save(folder, *snapshot(step, 400))
        files = sorted((folder / "step_00000002").iterdir())
        for _ in tally.damaged(files, flips, cuts, draw):
            step = is_whole(folder)
            passed_over = manager.newest(folder)[2]  # type: ignore[index]
            if step == 1 and len(passed_over) == 1 and "step_00000002" in passed_over[0]:
                counts["passed over"] += 1
            elif step == 2 and not passed_over:
                counts["harmless"] += 1  # such as a blank of the manifest
            else:
                counts["wrong loads"] += 1
    return counts


def read_while_writing(times: int) -> dict[str, int]:
    """A reader that always finds a whole state while another process saves and removes."""
    counts = {"reads": 0, "whole": 0, "torn": 0, "errors": 0, "states seen": 0}
    seen: set[int] = set()
    draw = random.Random(7)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        manager.save(folder, *snapshot(1))
        child = os.fork()
        if not child:
            for step in range(2, 1_000_000):
                manager.save(folder, *snapshot(step, 20_000), keep=1)
            os._exit(0)
        try:
            while counts["reads"] < times or len(seen) < 2:
                counts[_read(folder, seen)] += 1
                counts["reads"] += 1
                time.sleep(draw.uniform(0.0, 0.01))
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return counts | {"states seen": len(seen)}


def _read(folder: Path, seen: set[int]) -> str:
    while True:
        found = manager.newest(folder)
        if found is None:
            return "errors"
        try:
            step = is_whole_at(found[0], found[1].step)
        except InputError:
            if found[0].is_dir():
                return "errors"
            continue  # removed since, as `restore_newest` meets it
        seen.add(step)
        return "whole" if step > 0 else "torn"


def is_whole_at(path: Path, step: int) -> int:
    """The step, or -1 where the files hold anything else."""
    held = read_safetensors(path / "model.safetensors")
    return step if all((tensor.read() == step).all() for tensor in held.values()) else -1


def trace(folder: Path) -> dict[str, bool]:
    """The order of fsync and rename of one save, as strace sees it."""
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); import writing; from pathlib import Path;"
        "print('begin', flush=True);"
        "writing.manager.save(Path(sys.argv[2]), *writing.snapshot(1, 10))"
    )
    log = folder / "strace"
    calls = "openat,close,fsync,rename,renameat,renameat2"
    command = [
        "strace",
        "--seccomp-bpf",
        "-f",
        "-y",
        "-e",
        f"trace={calls}",
        "-o",
        log,
        sys.executable,
        "-c",
    ]
    target = folder / "saved"
    subprocess.run([*command, script, Path(__file__).parent, target], check=True, timeout=280)
    lines = [line for line in log.read_text().splitlines() if str(target) in line]
    renamed = next(n for n, line in enumerate(lines) if "rename" in line)
    before = [line for line in lines[:renamed] if "fsync(" in line]
    after = [line for line in lines[renamed:] if "fsync(" in line]
    names = sorted(path.name for path in (target / "step_00000001").iterdir())
    return {
        "every file before the rename": all(any(f"/{n}>" in x for x in before) for n in names),
        "its directory before the rename": any(
            ".step_00000001" in line and not any(name in line for name in names) for line in before
        ),
        "the parent after it": any(f"{target}>" in line for line in after),
    }


def main() -> None:
    """Runs all and prints the counts."""
    options = tally.arguments(__doc__).parse_args()
    quick = options.quick
    found = {
        "kill -9 while writing": kill_while_writing(10 if quick else 200),
        "full disk": full_disk(3 if quick else 10),
        "damage": damage(*((60, 12) if quick else (1000, 200))),
        "a reader beside a writer": read_while_writing(20 if quick else 200),
    }
    if shutil.which("strace"):
        with tempfile.TemporaryDirectory() as name:
            found["one save under strace"] = trace(Path(name))
    tally.report("writing", found, options)


if __name__ == "__main__":
    main()
