"""JSON lines: what is taken, and that everything else is named by file, line and field."""

import bz2
import gzip
import json
import lzma

import pytest
from PIL import Image

from kmodels.text import read_pairs, read_records
from kmodels.text.demo import instructions, tasks, texts
from refusals import refused

RECORD = {"instruction": "a", "context": "c", "response": "b"}
GOOD = b'{"instruction": "a", "response": "b"}\n'


def messages(*turns):
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def talk(*turns, **more):
    return {"conversations": [{"from": who, "value": text} for who, text in turns], **more}


SYSTEM, USER = {"role": "system", "content": "c"}, {"role": "user", "content": "a"}
REPLY = {"role": "model", "content": "b"}


def write(path, data):
    path.write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())
    return path


@pytest.mark.parametrize(
    ("line", "record"),
    [
        (RECORD | {"category": 3}, RECORD),
        ({"instruction": "a", "input": "", "output": "b"}, RECORD | {"context": ""}),
        ({"prompts": "a", "responses": "b"}, {"prompts": "a", "responses": "b"}),
        ({"prompt": "a", "completion": "b"}, {"prompts": "a", "responses": "b"}),
        ({"text": "Grüße \U0001f600"}, {"text": "Grüße \U0001f600"}),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            {"messages": [{"role": "user", "content": "a"}, {"role": "model", "content": "b"}]},
        ),
        (talk(("human", "a"), ("gpt", "b")), {"messages": [USER, REPLY]}),
        (talk(("user", "a"), ("assistant", "b"), system="c"), {"messages": [SYSTEM, USER, REPLY]}),
        (talk(("system", "c"), ("human", "a"), ("gpt", "b")), {"messages": [SYSTEM, USER, REPLY]}),
        (
            {"conversations": [{"role": "user", "content": "a"}, {"role": "gpt", "content": "b"}]},
            {"messages": [USER, REPLY]},
        ),
        (
            talk(("human", "a"), ("gpt", "b"), tools='[{"name": "f"}]'),
            {"messages": [USER, REPLY], "tools": [{"name": "f"}]},
        ),
        ({"text": "a\u2028b\x85c"}, {"text": "a\u2028b\x85c"}),
        ({"instruction": "a", "context": "", "input": "c", "output": "b"}, RECORD),
        ({"prompt": [SYSTEM, USER], "completion": [REPLY]}, {"messages": [SYSTEM, USER, REPLY]}),
        (
            {"prompt": [USER, REPLY, USER], "completion": [REPLY], "tools": [{"name": "f"}]},
            {"messages": [USER, REPLY | {"weight": 0}, USER, REPLY], "tools": [{"name": "f"}]},
        ),
    ],
)
def test_each_form_of_a_record(tmp_path, line, record):
    path = tmp_path / "a.jsonl"
    assert read_records(write(path, line)).rows == [record]
    whole = json.dumps([line, line], indent=1, ensure_ascii=False)
    assert read_records(write(path, b"\xef\xbb\xbf \n" + whole.encode())).rows == [record] * 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"instruction": "a", }', "not JSON at column 22: "),
        (b'{"text": "a", "text": "b"}', "field 'text' is there twice; give each once"),
        (
            b'{"messages": [{"role": "user", "role": "tool", "content": "a"}]}',
            "field 'role' is there twice",
        ),
        (
            talk(("human", "a"), ("gpt", "b"), tools='[{"a": 1, "a": 2}]'),
            "field 'a' is there twice",
        ),
        (b"plain", "not JSON at column 1: "),
        (b'{"text": "\xff"}', "not UTF-8 at byte 11"),
        (b'{"text": "\\ud800"}', "field 'text' holds half of a surrogate pair"),
        (b'["a"]', "a list where an object belongs, with instruction and response"),
        (b"{}", "the fields of an empty object are not a record: give instruction and"),
        ({"question": "a"}, "the fields question are not a record"),
        ({"instruction": "a"}, "field 'response or output' is missing beside 'instruction'"),
        ({"response": "a"}, "field 'prompt' is missing beside 'response'"),
        ({"prompts": "a"}, "field 'responses' is missing beside 'prompts'"),
        ({"instruction": 3, "response": "b"}, "field 'instruction' is a int, not text"),
        ({"instruction": "a", "response": " \n"}, "field 'response' is empty"),
        ({"instruction": "a", "input": [], "output": "b"}, "field 'input' is a list"),
        ({"messages": []}, "field 'messages' is not a list of messages"),
        ({"messages": ["a"]}, r"field 'messages\[0\]' is not an object with role and content"),
        (messages(("bot", "a")), r"field 'messages\[0\].role' is 'bot'; known are"),
        (messages(("user", "")), r"field 'messages\[0\].content' is empty"),
        (messages(("user", "a"), ("user", "b")), "field 'messages' must go user, assist"),
        (messages(("user", "a"), ("system", "b")), "field 'messages' has a system message"),
        (RECORD | {"tools": [{"name": "f"}]}, "tools need messages; the record has texts"),
        (talk(), "field 'conversations' is not a list of objects"),
        ({"prompt": "a", "completion": [REPLY]}, "field 'prompt' is a str beside messages; give m"),
        ({"prompt": [REPLY], "completion": [USER]}, r"field 'prompt \+ completion' must go user"),
        ({"prompt": ["a"], "completion": [USER]}, r"field 'prompt \+ completion\[0\]' is not an o"),
        (talk(("judge", "a")), r"field 'conversations\[0\].from' is 'judge'; known are"),
        (talk(("human", "")), r"field 'conversations\[0\].value' is empty"),
        (talk(("gpt", "b"), ("human", "a")), "field 'messages' must go user, assistant"),
        (talk(("human", "a"), ("gpt", "b"), tools="[{"), "field 'tools' is not JSON"),
        (talk(("human", "<image> a"), images=["b", "c"]), "there are 2 images and 1 marks <image>"),
        (b'{"text": "' + b"x" * 10_000_000 + b'"}', "longer than 4194304 bytes"),
    ],
)
def test_a_bad_line_is_named_or_skipped_and_counted(tmp_path, line, message):
    bad = line if isinstance(line, bytes) else json.dumps(line).encode()
    path = write(tmp_path / "data.jsonl", GOOD + bad + b"\n\n" + GOOD)
    line = refused(f"data.jsonl line 2: {message}", read_records, path)
    records = read_records(path, skip_bad=True)
    assert (len(records), len(records.skipped)) == (2, 1)
    assert line in records.skipped[0]


def test_a_bad_record_of_an_array_is_named_or_skipped(tmp_path):
    path = write(tmp_path / "data.json", [RECORD, {"instruction": 3, "response": "b"}, "a"])
    refused("data.json record 2: field 'instruction' is a int", read_records, path)
    records = read_records(path, skip_bad=True)
    assert len(records) == 1 and "record 3: a str where an object" in records.skipped[1]
    write(path, b'[\n{"text": "a"},\n]')
    refused("data.json: not JSON at line 3, column 1", read_records, path)


def test_marks_of_images_in_a_conversation_are_their_places(tmp_path):
    Image.new("RGB", (2, 2)).save(tmp_path / "a.png")
    turns = ("human", "look:\n<image>\n<image> which?"), ("gpt", "b")
    line = talk(*turns, images=["a.png", "a.png"])
    (row,) = read_records(write(tmp_path / "data.json", [line])).rows
    image = {"type": "image", "path": str(tmp_path / "a.png")}
    assert row["messages"][0]["content"] == [
        {"type": "text", "text": "look:"}, image, image, {"type": "text", "text": " which?"}
    ]  # fmt: skip
    assert "images" not in row
    plain = talk(("human", "what <image>?"), ("gpt", "b"))
    (row,) = read_records(write(tmp_path / "data.json", [plain])).rows
    assert row["messages"][0]["content"] == "what <image>?"


def test_texts_of_other_packages_are_named_once(tmp_path):
    rows = [RECORD | {"system": "s", "history": [["a", "b"]]}, talk(("human", "a"), system="c")]
    path = write(tmp_path / "a.json", [*rows, *rows])
    with pytest.warns(UserWarning, match="has history and system, which kmodels does n") as caught:
        assert len(read_records(path)) == 4
    assert len(caught) == 1 and caught[0].filename == __file__
    read_records(write(path, [rows[1], RECORD | {"history": None}]))


CHAT = {"messages": [USER, REPLY]}
PAIR = {"prompt": "a", "response": "b"}


@pytest.mark.parametrize(
    ("line", "names"),
    [
        (RECORD | {"input": "d"}, "input"),
        (RECORD | {"output": "d"}, "output"),
        (RECORD | {"context": "", "input": [], "system": "", "history": []} | PAIR, "instruction"),
        (PAIR | {"context": "c"}, "context"),
        (PAIR | {"instruction": "c"}, "instruction"),
        ({"text": "a", "prompt": "b"}, "prompt"),
        ({"text": "a", "videos": ["a.mp4"]}, "videos"),
        (PAIR | {"system_prompt": "c"}, "system_prompt"),
        (CHAT | {"system": "c", "audio": "a.wav"}, "audio and system"),
        ({"messages": [USER, REPLY | {"train": False}]}, "messages.train"),
        (talk(("human", "a"), ("gpt", "b"), system="c", functions="d"), "functions"),
        ({"conversations": [{"from": "human", "value": "a", "loss": False}]}, "messages.loss"),
    ],
)
def test_texts_that_a_form_does_not_read_are_named(tmp_path, line, names):
    with pytest.warns(UserWarning, match=f"a.jsonl has {names}, which kmodels does not read"):
        read_records(write(tmp_path / "a.jsonl", line))


@pytest.mark.parametrize(
    "line",
    [
        RECORD | {"text": "a c b", "system": "", "history": [], "images": []},
        CHAT | {"prompt": "a", "system": None},
        {"messages": [USER | {"train": True}, REPLY | {"loss": True}]},
        talk(("human", "a"), ("gpt", "b"), system="c"),
    ],
)
def test_fields_that_change_nothing_are_not_named(tmp_path, line):
    assert len(read_records(write(tmp_path / "a.jsonl", line))) == 1


@pytest.mark.parametrize(
    ("start", "kind"),
    [
        (gzip.compress(GOOD, mtime=0), "gzip"),
        (bz2.compress(GOOD), "bzip2"),
        (lzma.compress(GOOD), "xz"),
        (b"\x28\xb5\x2f\xfd", "zstd"),
        (b"PK\x03\x04", "zip"),
        (b"PAR1\x15\x04", "Parquet"),
        (b"ARROW1\0\0", "Arrow"),
    ],
)
def test_files_of_other_forms_are_named(tmp_path, start, kind):
    path = write(tmp_path / "a.jsonl", start)
    message = f"a.jsonl is a {kind} file; unpack it, or write it as JSON lines"
    refused(message, read_records, path, skip_bad=True)
    refused(message, read_pairs, path)


def test_the_longest_line_is_a_number(tmp_path):
    path = write(tmp_path / "a.jsonl", GOOD)
    refused("max_line_bytes is '5'; give a whole number", read_records, path, max_line_bytes="5")


def test_files_without_a_record(tmp_path):
    path = tmp_path / "a.jsonl"
    refused("a.jsonl cannot be read: No such file", read_records, path)
    for data in (b"", b"\n \n"):
        message = "a.jsonl holds no records; give one JSON object a line"
        refused(message, read_records, write(path, data))
    write(path, b"x\ny\n")
    refused("holds no records; all 2 lines are bad", read_records, path, skip_bad=True)


def test_line_ends_and_byte_order_mark(tmp_path):
    data = b"\xef\xbb\xbf" + GOOD.replace(b"\n", b"\r\n") + GOOD.strip()
    assert len(read_records(write(tmp_path / "a.jsonl", data))) == 2


def test_the_shipped_instructions():
    assert (len(instructions()), len(tasks()), len(texts())) == (1100, 175, 175)
