"""JSON lines and folders with images: what is read, where files are looked for, and errors."""

import json

import numpy as np
import pytest
from PIL import Image

from kmodels.core.errors import InputError
from kmodels.text import read_records

pytestmark = pytest.mark.once


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "inner").mkdir()
    for name in ("a.png", "b.jpg", "inner/c.png"):
        pixels = np.random.default_rng(1).integers(0, 256, (9, 8, 3)).astype("uint8")
        Image.fromarray(pixels).save(tmp_path / name)
    return tmp_path


def lines(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_paths_begin_at_the_file(folder, monkeypatch):
    turn = {"role": "assistant", "content": "x"}
    part = {"type": "image", "path": "inner/c.png"}
    bare = {"type": "image"}
    asked = {"role": "user", "content": [part, bare, {"type": "text", "text": "a.png"}]}
    inline = "data:image/png;base64,AAAA"
    file = lines(
        folder / "a.jsonl",
        {"prompts": "a", "responses": "b", "images": ["a.png", str(folder / "b.jpg")]},
        {"text": "t", "image": "inner/c.png"},
        {"instruction": "a", "response": "b", "images": {"path": "a.png"}},
        {"messages": [asked, turn], "images": ["b.jpg"]},
        {"prompt": "a", "completion": "b", "images": inline},
        {"text": "none", "images": [], "image": None},
    )
    monkeypatch.chdir(folder.parent)
    for path in (file, f"{folder.name}/a.jsonl"):
        rows = read_records(path).rows
        start = "" if path is file else folder.name
        a, b, c = (
            str(folder / n) if path is file else f"{start}/{n}"
            for n in ("a.png", "b.jpg", "inner/c.png")
        )
        assert rows[0] == {"prompts": "a", "responses": "b", "images": [a, str(folder / "b.jpg")]}
        assert rows[1] == {"text": "t", "image": c}
        assert rows[2]["images"] == {"path": a}
        assert rows[3]["images"] == [b]
        assert rows[3]["messages"][0]["content"] == [{**part, "path": c}, bare, asked["content"][2]]
        assert rows[4]["images"] == inline
        assert rows[5] == {"text": "none"}


def test_images_at_an_address():
    fsspec = pytest.importorskip("fsspec")
    system = fsspec.filesystem("memory")
    system.pipe("/pictures/a.jsonl", b'{"text": "t", "image": "a.png"}\n')
    found = read_records("memory://pictures/a.jsonl").rows
    assert found == [{"text": "t", "image": "memory://pictures/a.png"}]


@pytest.mark.parametrize("form", ["metadata.jsonl", "metadata.csv", "texts"])
def test_folders(folder, form):
    said = {"a.png": "an a", "b.jpg": 'a "b",\nor so', "inner/c.png": "Grüße"}
    if form == "texts":
        for name, text in said.items():
            (folder / name).with_suffix(".txt").write_text(text + "\n", encoding="utf-8")
    elif form == "metadata.jsonl":
        lines(folder / form, *({"file_name": n, "text": t, "more": 3} for n, t in said.items()))
    else:
        rows = [f'{name},"{text.replace(chr(34), chr(34) * 2)}",,' for name, text in said.items()]
        content = "\n".join(["file_name,text,empty,", *rows])
        (folder / form).write_text("\ufeff" + content, encoding="utf-8")
    found = read_records(folder).rows
    assert found == [
        {"text": text, "images": ([str(folder / name)])} for name, text in said.items()
    ]


def test_other_fields_of_metadata(folder):
    lines(
        folder / "metadata.jsonl",
        {"file_name": "a.png", "prompts": "p", "responses": "r"},
        {"file_names": ["a.png", "b.jpg"], "text": "two"},
    )
    found = read_records(folder).rows
    assert found[0] == {"prompts": "p", "responses": "r", "images": [str(folder / "a.png")]}
    assert found[1]["images"] == [str(folder / "a.png"), str(folder / "b.jpg")]


def test_what_is_refused(folder):
    file = folder / "x.jsonl"
    damaged = folder / "damaged.png"
    damaged.write_bytes((folder / "a.png").read_bytes()[:60])
    for record, message in (
        ({"text": "t", "image": "no.png"}, f"line 1: there is no image {folder / 'no.png'}"),
        ({"text": "t", "image": "https://a.b/c.png"}, "line 1: https://a.b/c.png is an address of"),
        ({"text": "t", "image": 3}, "line 1: an image is a int; give the path of a file"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "url": "http://a.b/c"}]}]},
            "address",
        ),
    ):
        with pytest.raises(InputError) as raised:
            read_records(lines(file, record))
        assert message in str(raised.value) and str(file) in str(raised.value)
        assert "\n" not in str(raised.value)
    good = {"text": "t", "image": "a.png"}
    bad = {"text": "t", "image": "damaged.png"}
    assert len(read_records(lines(file, bad, good))) == 2  # it raises where it is used
    found = read_records(lines(file, bad, good), skip_bad=True)
    assert len(found) == 1 and "damaged.png: truncated or damaged" in found.skipped[0]
    for content, message in (
        (b'{"text": "t"}\n', "metadata.jsonl line 1: field 'file_name' is missing"),
        (b"[1]\n", "metadata.jsonl line 1: a list where an object belongs, with 'file_name'"),
        (b'{"file_name": "a.png"}\n', "line 1: the fields images are not a record: give"),
    ):
        (folder / "metadata.jsonl").write_bytes(content)
        with pytest.raises(InputError) as raised:
            read_records(folder)
        assert message in str(raised.value)
    (folder / "metadata.jsonl").unlink()
    for content, message in (
        (b"file_name,text\nno.png,t\n", "metadata.csv line 2: there is no image"),
        (b"file_name,text\na.png,\xff\n", "metadata.csv is not UTF-8 at byte"),
        (
            b'file_name,text\na.png,"' + b"x" * 140_000 + b'"\n',
            "metadata.csv is not a table: field",
        ),
        (b"file_name,text\n", "holds no records; give one JSON object a line"),
    ):
        (folder / "metadata.csv").write_bytes(content)
        with pytest.raises(InputError) as raised:
            read_records(folder)
        assert message in str(raised.value)
    (folder / "metadata.csv").unlink()
    with pytest.raises(
        InputError, match=r"has no metadata.jsonl, no metadata.csv and no image with"
    ):
        read_records(folder)
    (folder / "a.txt").write_text("an a")
    with pytest.raises(InputError, match=r"b.jpg: there is no b.txt beside it"):
        read_records(folder)
    found = read_records(folder, skip_bad=True)
    assert len(found) == 1 and len(found.skipped) == 3
    (folder / "b.txt").write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"b.jpg: b.txt is not UTF-8 at byte 1"):
        read_records(folder)
