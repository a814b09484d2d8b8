"""history.csv is on the disk before the checkpoint that counts its rows."""

import os

from kmodels.runs.history import History
from refusals import refused


def rows(*steps):
    return [{"row": "step", "epoch": 1, "step": step, "loss": float(step)} for step in steps]


def test_sync_waits_for_the_disk(tmp_path, monkeypatch):
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(os.fstat(handle)), real(handle)))
    history = History(tmp_path / "history.csv")
    history.add(rows(1, 2))
    history.sync()
    file = os.stat(tmp_path / "history.csv")
    assert (synced[-1].st_ino, synced[-1].st_size) == (file.st_ino, file.st_size)
    History(tmp_path / "absent.csv", writes=False).sync()


def test_a_resume_counts_the_rows_that_are_missing(tmp_path):
    path = tmp_path / "history.csv"
    History(path).add(rows(1, 2, 3, 5))
    assert History(path, until=3).missing == 0
    History(path).add(rows(1, 2, 3, 5))
    assert History(path, until=6).missing == 2
    path.unlink()
    assert History(path, until=6).missing == 6


def test_a_pipe_is_replaced_and_never_waited_for(tmp_path):
    path = tmp_path / "history.csv"
    os.mkfifo(path)
    assert History(path, until=1).missing == 1 and path.is_file()


def test_a_file_that_cannot_be_written_is_one_line(tmp_path):
    history = History(tmp_path / "history.csv")
    history.path.unlink()
    history.path.mkdir()
    refused(f"cannot write {history.path}: Is a directory", history.add, rows(1))
