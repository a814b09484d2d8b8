"""Writing that leaves the former file whole until the new one is."""

import pytest

from kmodels.core.files import atomic_directory, atomic_write

pytestmark = pytest.mark.once


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


def test_a_directory_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "checkpoint"
    with atomic_directory(path) as new:
        (new / "a").write_text("1")
        (new / "sub").mkdir()
        (new / "sub" / "b").write_text("1")
    with atomic_directory(path) as new:
        (new / "a").write_text("2")
        assert (path / "a").read_text() == "1"
    assert [p.name for p in path.iterdir()] == ["a"]
    assert (path / "a").read_text() == "2"
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]


def test_a_failed_directory_leaves_the_former_one(tmp_path):
    path = tmp_path / "checkpoint"
    with atomic_directory(path) as new:
        (new / "a").write_text("1")
    with pytest.raises(ValueError, match="broken"), atomic_directory(path) as new:
        (new / "a").write_text("2")
        raise ValueError("broken")
    assert (path / "a").read_text() == "1"
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]


def test_an_exchange_that_fails_half_way_brings_the_former_one_back(tmp_path, monkeypatch):
    import os

    path = tmp_path / "checkpoint"
    with atomic_directory(path) as new:
        (new / "a").write_text("1")
    replace = os.replace

    def flaky(source, target):
        if str(target) == str(path) and ".old." not in str(source):
            raise OSError("no")
        replace(source, target)

    monkeypatch.setattr(os, "replace", flaky)
    with pytest.raises(OSError, match="no"), atomic_directory(path) as new:
        (new / "a").write_text("2")
    assert (path / "a").read_text() == "1"
