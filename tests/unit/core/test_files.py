"""Writing that leaves the former file whole until the new one is."""

import os

import pytest

from kmodels.core.files import atomic_directory, atomic_write


def test_a_file_is_replaced(tmp_path):
    path = tmp_path / "deep" / "result.json"
    atomic_write(path, lambda p: p.write_text("one"))
    atomic_write(path, lambda p: p.write_text("two"))
    assert path.read_text() == "two"
    assert [p.name for p in path.parent.iterdir()] == ["result.json"]
    assert path.stat().st_mode & 0o777 == 0o644


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
