"""kmodels' own directories: config.json, model.safetensors, and a manifest with their hashes.

Tensors have the names of variables, so a file does not depend on the backend that wrote it.
"""

import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import keras

from kmodels.core.errors import InputError
from kmodels.core.files import atomic_directory, stamp
from kmodels.core.schema import Shape, check_shape, read_json
from kmodels.weights.engine import export, paths_as_names, variables
from kmodels.weights.files import read_safetensors, write_safetensors
from kmodels.weights.rules import SourceCheckpoint, Tensors

NAME = "manifest.json"


def write_manifest(directory: Path) -> None:
    """Writes the hashes of all files in a directory."""
    files = sorted(file for file in directory.iterdir() if file.is_file() and file.name != NAME)
    entries = {file.name: stamp(file) for file in files}
    (directory / NAME).write_text(json.dumps({"files": entries}, indent=2) + "\n")


def verify_manifest(
    directory: Path,
    needed: Sequence[str] = (),
    only: Sequence[str] | None = None,
    leave_out: Sequence[str] = (),
) -> None:
    """Compares each file with its hash, `only` some of them, or all but those to leave out.

    Raises:
        InputError: with the name of every file that is missing or was changed.
    """
    if not (directory / NAME).is_file():
        raise InputError(f"{directory} lacks {NAME}, so its files cannot be verified; copy it too")
    entries = read_json(directory / NAME).get("files")
    if not isinstance(entries, dict) or not entries:
        raise InputError(f"{directory / NAME} lists no files; copy the directory again")
    problems = [f"{name} is not in {NAME}" for name in needed if name not in entries]
    for name, entry in entries.items():
        if name in leave_out or (only is not None and name not in only):
            continue
        file = directory / Path(name).name
        entry = entry if isinstance(entry, dict) else {}
        if not file.is_file():
            problems.append(f"{name} is missing")
        elif file.stat().st_size != entry.get("bytes"):
            problems.append(f"{name} has {file.stat().st_size} bytes, not {entry.get('bytes')}")
        elif stamp(file)["sha256"] != entry.get("sha256"):
            problems.append(f"the content of {name} was changed")
    if problems:
        raise InputError(
            f"{directory} is damaged: {'; '.join(problems)}; copy it again, "
            "or use an older checkpoint"
        )


FORMAT = 1
CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
# Keys of the description: changes of a model after it was built, and under "head" of its head.
CHANGES = ("quantization", "lora", "rows", "copies", "frozen", "head")
WriteBy = Callable[[Tensors, Callable[[Tensors], Path]], Path]


def refuse_to_replace(directory: Path, ours: Collection[str]) -> None:
    """Raises before a directory with files other than `ours` is replaced.

    Raises:
        InputError: with the names of files that would be lost.
    """
    if directory.exists() and not directory.is_dir():
        raise InputError(f"{directory} is a file; give a directory")
    entries = sorted(entry.name for entry in directory.iterdir()) if directory.is_dir() else []
    if others := [name for name in entries if name not in ours]:
        raise InputError(
            f"{directory} also holds {', '.join(others[:8])}, which would be lost; "
            "give a new or empty directory"
        )


def save(
    model: keras.Model,
    directory: Path,
    description: dict[str, Any],
    write_more: Callable[[Path], None] | None = None,
    write_by: WriteBy = lambda tensors, write: write(tensors),
    card: str | None = None,
) -> Path:
    """Writes a model's weights with a description; the directory appears whole or not at all.

    Args:
        model: a built Keras model.
        directory: directory to create or replace.
        description: content of config.json.
        write_more: writes the files of the tokenizer into the directory.
        write_by: calls the function that writes the tensors, in one of several processes.
        card: text of README.md, which the manifest leaves out, since people edit it.
    """
    mine = (CONFIG, WEIGHTS, NAME, *TOKENIZER, *(() if card is None else (CARD,)))

    def write(tensors: Tensors) -> Path:
        refuse_to_replace(directory, mine)
        with atomic_directory(directory) as folder:
            text = json.dumps(description, indent=2) + "\n"
            (folder / CONFIG).write_text(text, encoding="utf-8")
            write_safetensors(folder / WEIGHTS, tensors, {"format": "kmodels"})
            if write_more is not None:
                write_more(folder)
            write_manifest(folder)
            if card is not None:
                (folder / CARD).write_text(card, encoding="utf-8")
        return directory

    return write_by(export(model, paths_as_names(variables(model))), write)


SHAPE: Shape = {
    "kmodels": {"format": int, "version": str},
    "family": str,
    "class": str,
    "backbone": {},
    "task": {},
    "preprocessor": {"tokenizer": str},
    "left_out": [str],
}


def is_ours(path: Path, description: dict[str, Any]) -> bool:
    """Returns True if a directory has this format; `description` is its config.json."""
    return "kmodels" in description or (path / NAME).is_file()


def open_checkpoint(path: Path, description: dict[str, Any], weights: bool) -> SourceCheckpoint:
    """Opens a directory, after comparing its files with their hashes.

    Raises:
        InputError: for files that were changed or come from a later version.
    """
    verify_manifest(path, (CONFIG, WEIGHTS), leave_out=TOKENIZER)
    check_shape(description, SHAPE, path / CONFIG)
    for name in ("kmodels", "backbone"):
        if description.get(name) is None:
            raise InputError(f"{path / CONFIG} has no {name}; copy the directory again")
    if (number := description["kmodels"].get("format")) != FORMAT:
        raise InputError(
            f"{path} has format {number}; this version reads format {FORMAT}: install a newer one"
        )
    tensors = read_safetensors(path / WEIGHTS) if weights else {}
    return SourceCheckpoint(
        path=path,
        kind="kmodels",
        backbone=description["backbone"],
        task=description.get("task") or {},
        preprocessor=_preprocessor(path, description.get("preprocessor")),
        tensors=tensors,
        rules=paths_as_names(tensors),
        verify_preprocessor=lambda kind: verify_tokenizer(path, description.get("preprocessor")),
        changes={key: description[key] for key in CHANGES if weights and description.get(key)},
        left_out=description.get("left_out") or (),
        saved_as=description.get("class") or "",
    )


def _preprocessor(path: Path, settings: dict[str, Any] | None) -> dict[str, Any] | None:
    if settings and settings.get("tokenizer"):
        return {**settings, "tokenizer": str(path / settings["tokenizer"])}
    return settings


def verify_tokenizer(path: Path, settings: dict[str, Any] | None) -> None:
    """Compares the files of a tokenizer, if the preprocessor has one, with their hashes.

    Raises:
        InputError: for files that are missing or were changed.
    """
    if settings and settings.get("tokenizer"):
        verify_manifest(path, TOKENIZER, only=TOKENIZER)
