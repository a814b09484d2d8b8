"""Files that data names: paths and the data's own scheme, and no other file system."""

import json

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("fsspec")
import fsspec

from kmodels.core.files import named_file
from kmodels.core.remote import list_matching, list_published, publish
from kmodels.data.images.any_picture import open_picture
from kmodels.data.records import expand
from kmodels.text import read_records
from refusals import refused
from remote_storage import empty_storage

pytestmark = pytest.mark.needs("fsspec")
HOST = "127.0.0.1:1"
# Spellings of addresses that no data may name, wherever it lies.
REFUSED = (
    f"reference://a.png::http://{HOST}/e.json",
    f"reference:/a.png::http:/{HOST}/e.json",
    f"REFERENCE://a.png::HTTP://{HOST}/e.json",
    f"  reference://a.png::http://{HOST}/e.json",
    f"./reference://a.png::http://{HOST}/e.json",
    f"zip://a.png::http://{HOST}/a.zip",
    f"dir:///::http://{HOST}/",
    f"simplecache::http://{HOST}/a.png",
    f"http://{HOST}/a.png",
    f"http:/{HOST}/a.png",
    f"HTTP:/{HOST}/a.png",
    f" http:/{HOST}/a.png",
    f"\thttp:/{HOST}/a.png",
    f"./http:/{HOST}/a.png",
    f".//./http:/{HOST}/a.png",
    "sftp://host/a.png",
    "data:/a.png::http://host",
    "github://owner:name@main/a.png",
    "local:///etc/hostname",
    "a.png\0",
    "a\nb.png",
    "a.png\x7f",
)


@pytest.fixture(autouse=True)
def empty(monkeypatch):
    def opened(address, **options):
        assert address.startswith("memory://") and "::" not in address, address
        return url_to_fs(address, **options)

    url_to_fs = fsspec.core.url_to_fs
    empty_storage()
    monkeypatch.setattr(fsspec.core, "url_to_fs", opened)


@pytest.fixture
def folder(tmp_path):
    pixels = np.random.default_rng(1).integers(0, 256, (9, 8, 3)).astype("uint8")
    Image.fromarray(pixels).save(tmp_path / "a.png")
    return tmp_path


def held_by(form, name):
    """A record's fields that name an image."""
    if form == "messages":
        part = {"type": "image", "path": name}
        reply = {"role": "model", "content": "x"}
        return {"messages": [{"role": "user", "content": [part]}, reply]}
    more = {
        "image": {"image": name},
        "images": {"images": ["a.png", name]},
        "path": {"images": [{"path": name}]},
        "bytes": {"image": {"bytes": name}},
    }
    return {"text": "t", **more[form]}


@pytest.mark.parametrize("name", REFUSED)
def test_what_data_may_not_name(folder, name, monkeypatch):
    monkeypatch.chdir(folder)
    for form in ("image", "images", "path", "bytes", "messages"):
        line = json.dumps(held_by(form, name)) + "\n"
        (folder / "a.jsonl").write_text(line)
        for source in (folder / "a.jsonl", "a.jsonl", "./a.jsonl"):
            refused("line 1: ", read_records, source)
            refused("no records; all 1 lines are bad|all 1", read_records, source, skip_bad=True)
        fsspec.filesystem("memory").pipe("/p/a.jsonl", line.encode())
        refused("line 1: ", read_records, "memory://p/a.jsonl")
    (folder / "metadata.jsonl").write_text(json.dumps({"file_name": name, "text": "t"}) + "\n")
    refused("line 1: ", read_records, folder)
    if name.isprintable():
        (folder / "metadata.jsonl").unlink()
        (folder / "metadata.csv").write_text(f'file_name,text\n"{name}",t\n')
        refused("line 2: ", read_records, folder)


@pytest.mark.parametrize("name", [name for name in REFUSED if "::" in name or "http" in name])
def test_an_image_is_not_opened_through_another_file_system(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for image in (name, {"path": name}, {"bytes": name}, np.array(name)):
        refused("chains file|of the web|cannot be read|a text as 'bytes'", open_picture, image)


@pytest.mark.parametrize(
    ("name", "folder", "expected"),
    [
        ("a.png", "/d", "/d/a.png"),
        ("./b/a.png", "/d", "/d/b/a.png"),
        ("12:30/a.png", "/d", "/d/12:30/a.png"),
        ("a b: c.png", "/d", "/d/a b: c.png"),
        ("/e/a.png", "/d", "/e/a.png"),
        ("file:///e/a.png", "/d", "/e/a.png"),
        ("file:///e/a.png", "file:///d", "/e/a.png"),
        ("a.png", "file:///d", "/d/a.png"),
        ("a.png", "gs://b/d", "gs://b/d/a.png"),
        ("gs://c/a.png", "gs://b/d", "gs://c/a.png"),
        ("GS://c/a.png", "gs://b/d", "GS://c/a.png"),
        ("file:///e/a.png", "gs://b/d", None),
        ("gs://c/a.png", "/d", None),
        ("s3://c/a.png", "gs://b/d", None),
        ("a.png", "zip://d::gs://b/d.zip", None),
    ],
)
def test_what_data_may_name(name, folder, expected):
    if expected is None:
        refused("the data names the file|chains file systems", named_file, name, folder)
    else:
        assert named_file(name, folder) == expected


def test_names_in_a_folder_are_not_addresses(tmp_path, monkeypatch):
    (tmp_path / "http:").mkdir()
    (tmp_path / "http:" / "a.tar").write_bytes(b"x")
    monkeypatch.chdir(tmp_path)
    (found,) = expand("*/a.tar")
    assert found.read_bytes() == b"x"
    system = fsspec.filesystem("memory")
    system.pipe("/shards/a::http:/b.tar", b"x")
    refused('has "::" in its name; rename', list_matching, "memory://shards/*/*.tar")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "a").write_text("1")
    publish(tmp_path / "run", "memory://steps/one")
    for path in system.find("/steps/one"):
        system.pipe(path.replace("/one", "/two::memory:"), system.cat_file(path))
    assert list_published("memory://steps") == ["one"]
