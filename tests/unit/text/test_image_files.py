"""JSON lines and folders with images: what is read, where files are looked for, and errors."""

import json

import numpy as np
import pytest
from PIL import Image

from kmodels.text import read_records
from refusals import refused

LONG = b'file_name,text\na.png,"' + b"x" * 140_000 + b'"\n'


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
    for path, start in ((file, folder), (f"{folder.name}/a.jsonl", folder.name)):
        rows = read_records(path).rows
        a, b, c = (f"{start}/{name}" for name in ("a.png", "b.jpg", "inner/c.png"))
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
    assert found == [{"text": text, "images": [f"{folder}/{name}"]} for name, text in said.items()]


def test_hidden_files_are_left_out_and_links_followed(folder):
    for name in ("a", "b", "inner/c"):
        (folder / f"{name}.txt").write_text(name)
    (folder / "._a.png").write_bytes(b"none")
    (folder / ".ipynb_checkpoints").symlink_to(folder / "inner")
    (folder / "link").symlink_to(folder / "inner")
    (folder / "d.heix").write_bytes(b"none")
    with pytest.warns(UserWarning, match=r"1 files are left out, which .* \(1 \.heix\)"):
        rows = read_records(folder).rows
    assert [row["text"] for row in rows] == ["a", "b", "inner/c", "inner/c"]


def test_other_fields_of_metadata(folder):
    lines(
        folder / "metadata.jsonl",
        {"file_name": "a.png", "prompts": "p", "responses": "r"},
        {"file_names": ["a.png", "b.jpg"], "text": "two"},
    )
    with pytest.warns(
        UserWarning, match=r"1 image left out, which metadata.jsonl does not .*c.png"
    ):
        found = read_records(folder).rows
    assert found[0] == {"prompts": "p", "responses": "r", "images": [str(folder / "a.png")]}
    assert found[1]["images"] == [str(folder / "a.png"), str(folder / "b.jpg")]


def test_an_image_that_is_damaged(folder):
    (folder / "damaged.png").write_bytes((folder / "a.png").read_bytes()[:60])
    good, bad = ({"text": "t", "image": name} for name in ("a.png", "damaged.png"))
    file = lines(folder / "x.jsonl", bad, good)
    assert len(read_records(file)) == 2  # it raises where it is used
    found = read_records(file, skip_bad=True)
    assert len(found) == 1 and "damaged.png: truncated or damaged" in found.skipped[0]


BOTH = {"file_name": "a.png", "file_names": ["b.jpg"], "text": "t"}
TWICE = {"file_name": "a.png", "image": "b.jpg", "text": "t"}
IN_A_CHAT = {"role": "user", "content": [{"type": "image", "url": "http://a.b/c"}]}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", {"text": "t", "image": "no.png"}, "line 1: there is no image {folder}/no.png"),
        ("x.jsonl", {"text": "t", "image": "https://a.b/c"}, "line 1: https://a.b/c is an address"),
        ("x.jsonl", {"text": "t", "image": 3}, "line 1: an image is a int; give the path of a"),
        ("x.jsonl", {"messages": [IN_A_CHAT]}, "address"),
        ("metadata.jsonl", {"text": "t"}, "line 1: field 'file_name' is missing"),
        ("metadata.jsonl", [1], "record 1: a int where an object belongs, with 'file_name'"),
        ("metadata.jsonl", {"file_name": "a.png"}, "line 1: the fields images are not a record:"),
        ("metadata.csv", b"file_name,text\nno.png,t\n", "line 2: there is no image"),
        ("metadata.csv", b"file_name,text\na.png,\xff\n", "is not UTF-8 at byte"),
        (
            "metadata.csv",
            b"file_name,text\na.png,one, two\n",
            "line 2: there are more cells than c",
        ),
        ("metadata.csv", b"file_name,text,text\na.png,b,c\n", "csv has two columns 'text'; give"),
        (
            "metadata.jsonl",
            BOTH,
            "line 1: fields 'file_name' and 'file_names' name images; give one",
        ),
        (
            "metadata.jsonl",
            TWICE,
            "line 1: fields 'file_name' and 'image' name images; give one of",
        ),
        ("metadata.csv", LONG, "is not a table: field"),
        ("metadata.csv", b"file_name,text\n", "holds no records; give one JSON object a line"),
    ],
)
def test_what_is_refused(folder, name, content, message):
    text = content if isinstance(content, bytes) else json.dumps(content).encode() + b"\n"
    (folder / name).write_bytes(text)
    source = folder / name if name == "x.jsonl" else folder
    line = refused(message.format(folder=folder), read_records, source)
    assert name in line or "no records" in line


def test_a_folder_with_two_tables_is_refused(folder):
    for name in ("metadata.jsonl", "metadata.csv"):
        (folder / name).touch()
    refused("has metadata.jsonl and metadata.csv; leave one", read_records, folder)


def test_a_folder_without_texts_is_refused(folder):
    refused("has no metadata.jsonl, no metadata.csv and no image with", read_records, folder)
    (folder / "a.txt").write_text("an a")
    refused("b.jpg: there is no b.txt beside it", read_records, folder)
    (folder / "b.png").write_bytes((folder / "b.jpg").read_bytes())
    refused(r"has b\.jpg and b\.png, to which one mask or text", read_records, folder)
    (folder / "b.png").unlink()
    found = read_records(folder, skip_bad=True)
    assert len(found) == 1 and len(found.skipped) == 2
    (folder / "b.txt").write_bytes(b"\xff")
    refused("b.jpg: b.txt is not UTF-8 at byte 1", read_records, folder)
