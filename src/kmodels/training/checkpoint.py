"""Checkpoints that are whole or absent, verified before use, and the same on every backend.

A checkpoint is a directory:

    model.safetensors      every variable of the model by path, seed generators included
    optimizer.safetensors  every variable of the optimizer by name
    metrics.safetensors    running averages of an epoch that is not over
    state.json             epoch, step, settings
    manifest.json          size and sha256 of each of the others
"""

import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from kmodels.errors import InputError
from kmodels.files import atomic_directory

_NAME = re.compile(r"step_(\d+)$")
FORMAT = 1


class CheckpointError(InputError):
    """A checkpoint is damaged, or belongs to another model."""


def named(variables: Iterable[Any], attribute: str = "path") -> dict[str, Any]:
    """Variables by path (or name); a second of the same gets `#1`, in the order of creation."""
    found: dict[str, Any] = {}
    for variable in variables:
        name = base = getattr(variable, attribute)
        copies = 0
        while name in found:
            copies += 1
            name = f"{base}#{copies}"
        found[name] = variable
    return found


def weights_digest(model: keras.Model) -> str:
    """sha256 over path, dtype, shape and bytes of all weights, in the order of the paths."""
    digest = hashlib.sha256()
    for path, variable in sorted(named(model.weights).items()):
        values = _numpy(variable)
        digest.update(f"{path} {values.dtype} {values.shape}\n".encode())
        digest.update(values.tobytes())
    return digest.hexdigest()


def save(folder: Path, model: keras.Model, state: dict[str, Any], keep: int = 2) -> Path:
    """Writes `folder/step_<state["step"]>`, then deletes older ones, so that `keep` stay.

    Args:
        folder: where the checkpoints of one run are.
        model: compiled, its optimizer built.
        state: plain values; "step" names the directory. "batch" above 0 marks an unfinished epoch,
            whose running averages are saved too.
        keep: how many stay; at least 1.

    Raises:
        InputError: where a weight is not finite, the disk is full or the folder cannot be written;
            what was there stays.
    """
    target = folder / f"step_{state['step']:08d}"
    try:
        with atomic_directory(target) as new:
            _write(new / "model.safetensors", named(model.variables), check=True)
            _write(new / "optimizer.safetensors", named(model.optimizer.variables, "name"))
            if state.get("batch"):
                metrics = named(model.metrics_variables, "name")
                _write(new / "metrics.safetensors", metrics)
            text = json.dumps({"format": FORMAT, **state}, indent=1)
            (new / "state.json").write_text(text + "\n")
            manifest = {file.name: _stamp(file) for file in sorted(new.iterdir())}
            (new / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    except OSError as error:
        raise InputError(
            f"cannot write checkpoint {target}: {error.strerror or error}; make room or give "
            "another --out"
        ) from error
    # Newer ones did not verify when this run was resumed, and do not count.
    older = [path for path in list_checkpoints(folder) if path.name < target.name]
    for old in older[max(keep, 1) - 1 :]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, newest first, verified or not."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if path.is_dir() and _NAME.match(path.name)]
    return sorted(found, key=lambda path: int(_NAME.match(path.name)[1]), reverse=True)  # type: ignore[index]


def verify(path: Path) -> dict[str, Any]:
    """Checks every byte of a checkpoint and returns its state.

    Raises:
        CheckpointError: naming the file that is missing, cut short or changed.
    """
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        for name, expected in manifest.items():
            if _stamp(path / name) != expected:
                raise CheckpointError(f"{path / name} is not what was written (size or sha256)")
        state = json.loads((path / "state.json").read_text())
    except FileNotFoundError as error:
        raise CheckpointError(f"{error.filename} is missing") from error
    except (OSError, ValueError, AttributeError, TypeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    missing = {"model.safetensors", "optimizer.safetensors", "state.json"} - set(manifest)
    if missing:
        raise CheckpointError(
            f"{path / 'manifest.json'} does not list {', '.join(sorted(missing))}"
        )
    if state.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {state.get('format')}; this version reads format {FORMAT}"
        )
    return state


def newest(folder: Path) -> tuple[Path, dict[str, Any], list[str]] | None:
    """The newest checkpoint that verifies.

    Returns:
        Its path, its state and why newer ones were passed over; None where there is none at all.

    Raises:
        CheckpointError: where there are some and none verifies.
    """
    reasons: list[str] = []
    for path in list_checkpoints(folder):
        try:
            return path, verify(path), reasons
        except CheckpointError as error:
            reasons.append(str(error))
    if reasons:
        raise CheckpointError(f"no checkpoint in {folder} verifies: {'; '.join(reasons)}")
    return None


def restore_newest(folder: Path, model: keras.Model) -> Path:
    """Fills the model for evaluation, with the moving average of the weights where there is one.

    Raises:
        CheckpointError: where there is no checkpoint that verifies, or it is of another model.
    """
    found = newest(folder)
    if found is None:
        raise CheckpointError(f"there is no checkpoint in {folder}; train first or give --weights")
    path = found[0]
    restore_model(path, model)
    slots = load_file(path / "optimizer.safetensors")
    for variable in model.trainable_variables:
        average = slots.get(f"{variable.path.replace('/', '_')}_average")
        if average is not None:
            variable.assign(average)
    return path


def restore_model(path: Path, model: keras.Model) -> None:
    """Fills the model's variables, all or none."""
    _fill(path / "model.safetensors", named(model.variables))


def restore_optimizer(path: Path, model: keras.Model) -> None:
    """Fills the optimizer's variables, all or none; builds it first where needed."""
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    _fill(path / "optimizer.safetensors", named(model.optimizer.variables, "name"))


def restore_metrics(path: Path, model: keras.Model) -> None:
    """Fills the running averages of an unfinished epoch, where the checkpoint has them."""
    if (path / "metrics.safetensors").exists():
        _fill(path / "metrics.safetensors", named(model.metrics_variables, "name"))


def _write(file: Path, variables: dict[str, Any], check: bool = False) -> None:
    values = {name: np.asarray(_numpy(v), order="C") for name, v in variables.items()}
    for name, value in values.items() if check else ():
        if not np.isfinite(value).all():
            raise InputError(
                f"{name} is not finite, so this state is not saved; lower the learning rate, or go "
                "on from the checkpoint before"
            )
    save_file(values, file, metadata={"format": "kmodels"})


def _fill(file: Path, variables: dict[str, Any]) -> None:
    try:
        values = load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    wrong = list(_misfits(values, variables))
    if wrong:
        shown = "; ".join(wrong[:8]) + (f"; {len(wrong) - 8} more" if len(wrong) > 8 else "")
        raise CheckpointError(f"{file} belongs to another model or optimizer: {shown}")
    for name, variable in variables.items():
        variable.assign(values[name])


def _misfits(values: dict[str, np.ndarray], variables: dict[str, Any]) -> Iterator[str]:
    for name in sorted(set(variables) - set(values)):
        yield f"{name} is missing"
    for name in sorted(set(values) - set(variables)):
        yield f"{name} is not in the model"
    for name in sorted(set(values) & set(variables)):
        if tuple(values[name].shape) != tuple(variables[name].shape):
            yield f"{name} is {values[name].shape}, wanted {tuple(variables[name].shape)}"


def _numpy(variable: Any) -> np.ndarray:
    return np.asarray(keras.ops.convert_to_numpy(variable.value))


def _stamp(file: Path) -> dict[str, Any]:
    with file.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    return {"bytes": file.stat().st_size, "sha256": digest}
