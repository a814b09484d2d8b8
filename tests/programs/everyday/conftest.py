"""Fixtures of the everyday programs."""

import pytest


@pytest.fixture
def only_addresses(tmp_path, monkeypatch):
    """Empties the storage that stands for a bucket; nothing may be written beside it."""
    from remote_storage import empty_storage  # which needs fsspec

    empty_storage()
    monkeypatch.chdir(tmp_path)
    yield
    assert not list(tmp_path.iterdir()), "a folder is called as an address"
