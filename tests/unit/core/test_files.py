"""Writing that leaves the former file whole until the new one is."""

import contextlib
import errno
import os
import re
import shlex
from pathlib import Path

import pytest

from command_line import run
from kmodels.core.errors import InputError
from kmodels.core.files import atomic_directory, atomic_write, lock, remove_leftovers, unlock
from kmodels.runs.history import History
from kmodels.runs.run_folder import Folder
from refusals import refused


def test_a_file_is_replaced(tmp_path):
    path = tmp_path / "deep" / "result.json"
    atomic_write(path, lambda p: p.write_text("one"))
    atomic_write(path, lambda p: p.write_text("two"))
    assert path.read_text() == "two"
    assert [p.name for p in path.parent.iterdir()] == ["result.json"]


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_the_umask_decides_the_permissions(tmp_path, umask):
    former = os.umask(umask)
    try:
        file = atomic_write(tmp_path / "file", lambda p: p.write_text("x"))
        with atomic_directory(tmp_path / "folder") as new:
            (new / "a").write_text("x")
        lock(tmp_path / "folder")
        unlock(tmp_path / "folder")
    finally:
        os.umask(former)
    files = (file, *(tmp_path / "folder").iterdir())
    assert {path.stat().st_mode & 0o777 for path in files} == {0o666 & ~umask}
    assert (tmp_path / "folder").stat().st_mode & 0o777 == 0o777 & ~umask


WRITES = {
    ".lock of a directory": (".lock", lambda path: lock(path.parent)),
    ".lock of a run": (".lock", lambda path: Folder("vit", str(path.parent), None)),
    "history.csv": ("history.csv", lambda path: History(path).add([{"row": "step", "step": 1}])),
    "appended history.csv": ("history.csv", lambda path: append_to_link(path)),
    "config.json": ("config.json", lambda path: atomic_write(path, lambda p: p.write_text("new"))),
}


def append_to_link(path):
    history = History(path, writes=False)
    history._writes = True
    history.add([{"row": "step", "step": 1}])


@pytest.mark.parametrize(("name", "write"), WRITES.values(), ids=WRITES)
def test_no_write_follows_a_link(tmp_path, name, write):
    target = tmp_path / "precious"
    target.write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(target)
    with contextlib.suppress(OSError, InputError):
        write(tmp_path / "run" / name)
    unlock(tmp_path / "run")
    assert target.read_text() == "precious"


def test_leftovers_of_a_killed_process_are_removed(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    folder = tmp_path / "run"
    tag = "0123456789abcdef"
    for name in (f".model.tmp.{tag}", f".adapter.old.{tag}", ".step_1.removed", "adapter"):
        (folder / name / "deep").mkdir(parents=True)
    (folder / f".lost.old.{tag}").mkdir()
    (folder / f".run.json.tmp.{tag}.json").touch()
    (folder / f".link.tmp.{tag}").symlink_to(elsewhere)
    for name in (".lock", ".mine", ".run.json.tmp", "model.tmp.txt", f".x.tmp.{tag[:8]}"):
        (folder / name).touch()
    remove_leftovers(folder)
    left = {".lock", ".mine", ".run.json.tmp", "model.tmp.txt", f".x.tmp.{tag[:8]}"}
    # "lost" was moved away and its successor never came.
    assert {path.name for path in folder.iterdir()} == left | {"adapter", "lost"}
    assert (elsewhere / "kept").exists()


def test_a_failed_write_leaves_the_file_and_no_litter(tmp_path):
    path = tmp_path / "result.json"
    path.write_text("whole")

    def fails(p):
        p.write_text("ha")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        atomic_write(path, fails)
    assert path.read_text() == "whole"
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_a_disk_that_cannot_be_written_is_one_line(number, tmp_path):
    def fails(*_):
        raise OSError(number, os.strerror(number))

    def fills():
        with atomic_directory(tmp_path / "a"):
            fails()

    message = f"cannot write {tmp_path / 'a'}: {os.strerror(number)}; make room or give another"
    refused(message, atomic_write, tmp_path / "a", fails)
    refused(message, fills)
    assert not list(tmp_path.iterdir())
    with atomic_directory(tmp_path / "b") as new:
        own = (tmp_path / "b", new / "c", tmp_path)
    for named in (*own, tmp_path / "bc", tmp_path / "other", tmp_path.parent / "b"):

        def fails_at(path=named):
            with atomic_directory(tmp_path / "b"):
                raise OSError(number, os.strerror(number), str(path))

        message = f"write {tmp_path / 'b'}" if named in own else f"open {named}"
        refused(f"^cannot {message}: {os.strerror(number)}", fails_at)
    (tmp_path / "a").write_text("")
    refused(f"cannot write {tmp_path}/a/b: ", atomic_write, tmp_path / "a" / "b", Path.touch)
    with pytest.raises(FileNotFoundError):  # of what is read meanwhile
        atomic_write(tmp_path / "c", lambda _: (tmp_path / "none").read_text())


@pytest.fixture
def checkpoint(tmp_path):
    """A directory with two files, one of them in a folder."""
    path = tmp_path / "checkpoint"
    with atomic_directory(path) as new:
        (new / "a").write_text("1")
        (new / "sub").mkdir()
        (new / "sub" / "b").write_text("1")
    return path


def test_a_directory_is_replaced_as_a_whole(checkpoint):
    with atomic_directory(checkpoint) as new:
        (new / "a").write_text("2")
        assert (checkpoint / "a").read_text() == "1"
    assert [p.name for p in checkpoint.iterdir()] == ["a"]
    assert (checkpoint / "a").read_text() == "2"
    assert [p.name for p in checkpoint.parent.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("error", [ValueError, OSError], ids=["while written", "while exchanged"])
def test_a_failed_directory_leaves_the_former_one(checkpoint, monkeypatch, error):
    replace = os.replace

    def flaky(source, target):
        if str(target) == str(checkpoint) and ".old." not in str(source):
            raise OSError("broken")
        replace(source, target)

    monkeypatch.setattr(os, "replace", flaky)
    with pytest.raises(error, match="broken"), atomic_directory(checkpoint) as new:
        (new / "a").write_text("2")
        if error is ValueError:
            raise ValueError("broken")
    assert (checkpoint / "a").read_text() == "1"
    assert error is OSError or [p.name for p in checkpoint.parent.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("eval NOTHING x.jsonl --results FOLDER", "--results .* is a directory; give a file"),
        ("predict NOTHING a.png --masks FILE", "--masks .* is a file; give a directory"),
        ("predict NOTHING a.png --masks FILE/x", "--masks .* cannot be written in .*file; give"),
        ("compare a b --out FOLDER", "--out .* is a directory; give a file"),
        ("parity vit_debug --out FILE", "--out .* is a file; give a directory"),
        ("bench vit_debug --out FOLDER/x.json/y.json", "--out .* cannot be written in .*x.json; "),
        ("convert NOTHING FILE/x --to hf", "destination .* cannot be written in .*file; give"),
        ("eval NOTHING FILE --results FILE", "--results .*file is an input, which would be lost"),
        ("eval NOTHING x --class-names FILE --results FOLDER/../file", "is an input, which would"),
        ("convert x FOLDER/m.gguf --to gguf --imatrix FOLDER/m.gguf", "destination .* is an input"),
        ("convert FILE FOLDER/m.gguf --to gguf --mmproj FILE", "mmproj .* is an input"),
        ("predict NOTHING ''", "a path is empty; give a file or a directory"),
        ("plan --preset ''", "a path is empty"),
    ],
)
def test_outputs_are_checked_before_the_work(command, message, tmp_path, capsys):
    (tmp_path / "folder").mkdir()
    for name in ("file", "folder/x.json"):
        (tmp_path / name).write_text("mine")
    words = command.replace("FILE", f"{tmp_path}/file").replace("FOLDER", f"{tmp_path}/folder")
    assert run(*shlex.split(words)) == 2
    assert re.search(message, capsys.readouterr().err)
