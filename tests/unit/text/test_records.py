"""JSON lines: what is taken, and that everything else is named by file, line and field."""

import json

import pytest

from kmodels.text import read_records
from kmodels.text.demo import instructions, tasks, texts
from refusals import refused

RECORD = {"instruction": "a", "context": "c", "response": "b"}
GOOD = b'{"instruction": "a", "response": "b"}\n'


def messages(*turns):
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


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
    ],
)
def test_each_form_of_a_record(tmp_path, line, record):
    assert read_records(write(tmp_path / "a.jsonl", line)).rows == [record]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"instruction": "a", }', "not JSON at column 22: "),
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
