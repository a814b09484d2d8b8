"""Directories at addresses: whole or as they were, whatever happens to the connection."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("fsspec")
import fsspec

from kmodels.core import remote
from kmodels.core.files import is_remote, local_path
from kmodels.core.remote import open_address
from refusals import refused
from remote_storage import FailingFileSystem, empty_storage, files

pytestmark = pytest.mark.needs("fsspec")


@pytest.fixture(autouse=True)
def empty():
    empty_storage()


def directory(path, **contents):
    for name, text in contents.items():
        file = path / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return path


def read(path):
    return {f.relative_to(path).as_posix(): f.read_text() for f in path.rglob("*") if f.is_file()}


def test_which_are_addresses():
    for address in ("gs://b/x", "s3://b", "memory://x", Path("gs://b")):
        assert is_remote(address)
        if str(address).startswith("gs"):
            refused("is an address", local_path, address)
    for path in ("x", "/x/y", "C:/x", "a:b", "run: 3/x", "file:///x", Path("file:///x")):
        assert not is_remote(path)
    for name in ("file:///x/y", Path("file:///x/y"), "file://localhost/x/y", "FILE:/x/y"):
        assert local_path(name) == Path("/x/y")
    assert open_address(Path("memory://a/b")).path == open_address("memory://a/b/").path == "/a/b"


def test_a_directory_goes_there_and_back(tmp_path):
    remote.publish(directory(tmp_path / "a", one="1", sub__two="2"), "memory://run/a")
    assert read(remote.fetch("memory://run/a")) == {"one": "1", "sub/two": "2"}
    assert remote.fetch("memory://run/a").name == "a"
    assert remote.fetch_published("memory://run/a", tmp_path / "b")
    assert read(tmp_path / "b") == {"one": "1", "sub/two": "2"}
    # What was replaced is gone, and what is read is new.
    first = remote.fetch("memory://run/a")
    assert remote.fetch("memory://run/a") == first
    remote.publish(directory(tmp_path / "c", one="3"), "memory://run/a")
    assert read(remote.fetch("memory://run/a")) == {"one": "3"}
    assert len(files("memory://run/a")) == 2
    assert remote.list_published("memory://run") == ["a"]
    remote.remove("memory://run/a")
    assert files("memory://run") == remote.list_published("memory://run") == []
    assert not remote.fetch_published("memory://run/a", tmp_path / "d")


def test_what_others_put_there_is_read_as_it_is():
    system = fsspec.filesystem("memory")
    system.pipe({"/plain/x/a.txt": b"a", "/plain/x/y/b.txt": b"b", "/plain/xx": b"c"})
    assert read(remote.local_copy("memory://plain/x")) == {"a.txt": "a", "y/b.txt": "b"}
    copy = remote.local_copy("memory://plain/x/y/b.txt")
    assert (copy.name, copy.read_text()) == ("b.txt", "b")
    assert remote.local_copy("memory://plain/x/y/b.txt") == copy
    system.pipe({"/plain/x/y/b.txt": b"new"})
    assert remote.local_copy("memory://plain/x/y/b.txt").read_text() == "new"
    assert remote.list_matching("memory://plain/x*") == ["memory:///plain/xx"]
    missing = "memory://plain/z"
    refused(f"there is no file or directory {missing}", remote.local_copy, missing)


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("fail_at", [1, 2, 3])
def test_a_write_that_fails_leaves_the_former_whole(tmp_path, fail_at, cut):
    FailingFileSystem.reset()
    remote.publish(directory(tmp_path / "a", one="1", two="2"), "failing://run/a")
    held = files("failing://run")
    new = directory(tmp_path / "b", one="3" * 99, two="4" * 99)
    FailingFileSystem.reset(fail_at, cut and fail_at < 3)  # the last one is a single request
    line = refused(
        "^cannot write failing://run/a: ConnectionResetError: ",
        *(remote.publish, new, "failing://run/a"),
    )
    assert "Connection reset by peer; check the address, the permission and the connection" in line
    assert FailingFileSystem.writes == fail_at
    assert read(remote.fetch("failing://run/a")) == {"one": "1", "two": "2"}
    assert files("failing://run") == held
    FailingFileSystem.reset()
    remote.publish(new, "failing://run/a")
    assert read(remote.fetch("failing://run/a")) == {"one": "3" * 99, "two": "4" * 99}


def test_a_first_write_that_fails_or_is_cut_leaves_nothing(tmp_path, monkeypatch):
    FailingFileSystem.reset(fail_at=2)
    written = directory(tmp_path / "a", one="11", two="22")
    refused("cannot write", remote.publish, written, "failing://run/a")
    assert remote.list_published("failing://run") == files("failing://run") == []

    def put_file(self, lpath, rpath, **kwargs):
        self.pipe_file(rpath, Path(lpath).read_bytes()[:-1])

    monkeypatch.setattr(FailingFileSystem, "put_file", put_file)
    refused("has 1 bytes after 2 were written", remote.publish, written, "failing://run/a")
    assert files("failing://run") == []


def test_damage_is_found(tmp_path):
    remote.publish(directory(tmp_path / "a", one="1"), "memory://run/a")
    system = fsspec.filesystem("memory")
    (one,) = [path for path in files("memory://run/a") if path.endswith("one")]
    system.pipe_file(one, b"2")
    refused("one is not what was published", remote.fetch, "memory://run/a")
    assert not remote.fetch_published("memory://run/a", tmp_path / "b")
    system.rm_file(one)
    refused("cannot read memory://run/a: FileNotFoundError", remote.fetch, "memory://run/a")
    assert not remote.fetch_published("memory://run/a", tmp_path / "b")


@pytest.mark.parametrize("name", ["../out", "/out", "a/../../out", ""])
def test_no_file_is_written_outside(tmp_path, name):
    remote.publish(directory(tmp_path / "a", one="1"), "memory://run/a")
    system = fsspec.filesystem("memory")
    held = json.loads(system.cat_file("/run/a/published.json"))
    held["files"] = {name: held["files"]["one"]}
    system.pipe_file("/run/a/published.json", json.dumps(held).encode())
    assert not remote.fetch_published("memory://run/a", tmp_path / "b")
    assert not list(tmp_path.rglob("out"))


def test_what_is_not_published_is_absent(tmp_path):
    for content in (b"", b"{", b"[]", b'{"format": 2}', b"\xff", b"null"):
        fsspec.filesystem("memory").pipe_file("/run/a/published.json", content)
        assert remote.list_published("memory://run") == []
        assert not remote.fetch_published("memory://run/a", tmp_path / "b")


def test_errors_are_one_line(tmp_path, monkeypatch):
    remote.publish(directory(tmp_path / "a", one="1"), "failing://run/a")
    FailingFileSystem.reset(denied=True)
    denied = "cannot read failing://run/a: PermissionError: 403"
    refused(denied, remote.fetch, "failing://run/a")
    refused("xyzzy://b/x cannot be opened: .*xyzzy", remote.fetch, "xyzzy://b/x")
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    missing = "gs://b/x needs the package fsspec: pip install 'kmod"
    refused(missing, remote.fetch, "gs://b/x")


def test_a_file_goes_there_whole_or_not_at_all(tmp_path):
    def make(text):
        return remote.write_file("failing://run/sub/x.txt", lambda file: file.write_text(text))

    assert make("first") == Path("failing://run/sub/x.txt")
    assert files("failing://run") == ["/run/sub/x.txt"]
    for cut in (False, True):
        FailingFileSystem.reset(fail_at=1, cut=cut)
        refused(r"cannot write failing://run/sub/x\.txt: Connection", make, "second")
        assert files("failing://run") == ["/run/sub/x.txt"]
        assert remote.fetch("failing://run/sub/x.txt").read_text() == "first"
    FailingFileSystem.reset()
    make("third")
    assert remote.fetch("failing://run/sub/x.txt").read_text() == "third"
    local = tmp_path / "a" / "x.txt"
    assert remote.write_file(f"file://{local}", lambda file: file.write_text("1")) == local
    assert local.read_text() == "1"


def test_a_file_that_arrives_short_is_not_taken(monkeypatch):
    system = fsspec.filesystem("memory")
    system.pipe_file("/run/x.txt", b"former")
    monkeypatch.setattr(
        type(system), "put_file", lambda self, local, path, **_: self.pipe_file(path, b"new")
    )
    refused(
        "has 3 bytes after 6 were written; write it again",
        *(remote.write_file, "memory://run/x.txt", lambda file: file.write_text("newest")),
    )
    assert files("memory://run") == ["/run/x.txt"]
    assert system.cat_file("/run/x.txt") == b"former"
