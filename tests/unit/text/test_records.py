"""JSON lines: what is taken, and that everything else is named by file, line and field."""

import json

import pytest

from kmodels.core.errors import InputError
from kmodels.text import read_records
from kmodels.text.demo import instructions, tasks, texts

pytestmark = pytest.mark.once

GOOD = b'{"instruction": "a", "response": "b"}\n'


def write(path, data):
    path.write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())
    return path


@pytest.mark.parametrize(
    ("line", "record"),
    [
        (
            {"instruction": "a", "context": "c", "response": "b", "category": 3},
            {"instruction": "a", "context": "c", "response": "b"},
        ),
        (
            {"instruction": "a", "input": "", "output": "b"},
            {"instruction": "a", "context": "", "response": "b"},
        ),
        ({"prompts": "a", "responses": "b"}, {"prompts": "a", "responses": "b"}),
        ({"prompt": "a", "completion": "b"}, {"prompts": "a", "responses": "b"}),
        ({"text": "Grüße \U0001f600"}, {"text": "Grüße \U0001f600"}),
        (
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "b"},
                ]
            },
            {"messages": [{"role": "user", "content": "a"}, {"role": "model", "content": "b"}]},
        ),
    ],
)
def test_each_form_of_a_record(tmp_path, line, record):
    assert read_records(write(tmp_path / "a.jsonl", line)).rows == [record]


def messages(*turns):
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"instruction": "a", }', "line 2: not JSON at column 22: "),
        (b"plain", "line 2: not JSON at column 1: "),
        (b'{"text": "\xff"}', "line 2: not UTF-8 at byte 11"),
        (b'{"text": "\\ud800"}', "line 2: field 'text' holds half of a surrogate pair"),
        (b'["a"]', "line 2: a list where an object belongs, with instruction and response"),
        (b"{}", "line 2: the fields of an empty object are not a record: give instruction and"),
        ({"question": "a"}, "line 2: the fields question are not a record"),
        (
            {"instruction": "a"},
            "line 2: field 'response or output' is missing beside 'instruction'",
        ),
        ({"response": "a"}, "line 2: field 'prompt' is missing beside 'response'"),
        ({"prompts": "a"}, "line 2: field 'responses' is missing beside 'prompts'"),
        ({"instruction": 3, "response": "b"}, "line 2: field 'instruction' is a int, not text"),
        ({"instruction": "a", "response": " \n"}, "line 2: field 'response' is empty"),
        ({"instruction": "a", "input": [], "output": "b"}, "line 2: field 'input' is a list"),
        ({"messages": []}, "line 2: field 'messages' is not a list of messages"),
        (
            {"messages": ["a"]},
            r"line 2: field 'messages\[0\]' is not an object with role and content",
        ),
        (messages(("bot", "a")), r"line 2: field 'messages\[0\].role' is 'bot'; known are"),
        (messages(("user", "")), r"line 2: field 'messages\[0\].content' is empty"),
        (messages(("user", "a"), ("user", "b")), "line 2: field 'messages' must go user, assist"),
        (messages(("user", "a"), ("system", "b")), "line 2: field 'messages' has a system message"),
        (b'{"text": "' + b"x" * 10_000_000 + b'"}', "line 2: longer than 4194304 bytes"),
    ],
)
def test_a_bad_line_is_named_or_skipped_and_counted(tmp_path, line, message):
    bad = line if isinstance(line, bytes) else json.dumps(line).encode()
    path = write(tmp_path / "data.jsonl", GOOD + bad + b"\n\n" + GOOD)
    with pytest.raises(InputError, match=f"data.jsonl {message}") as raised:
        read_records(path)
    assert "\n" not in str(raised.value)
    records = read_records(path, skip_bad=True)
    assert (len(records), len(records.skipped)) == (2, 1)
    assert str(raised.value) in records.skipped[0]


@pytest.mark.parametrize("data", [b"", b"\n \n"])
def test_an_empty_file(tmp_path, data):
    with pytest.raises(InputError, match=r"a.jsonl holds no records; give one JSON object a line"):
        read_records(write(tmp_path / "a.jsonl", data))


def test_a_file_without_a_good_line(tmp_path):
    path = write(tmp_path / "a.jsonl", b"x\ny\n")
    with pytest.raises(InputError, match="holds no records; all 2 lines are bad"):
        read_records(path, skip_bad=True)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match=r"a.jsonl cannot be read: No such file"):
        read_records(tmp_path / "a.jsonl")


def test_line_ends_and_byte_order_mark(tmp_path):
    data = b"\xef\xbb\xbf" + GOOD.replace(b"\n", b"\r\n") + GOOD.strip()
    assert len(read_records(write(tmp_path / "a.jsonl", data))) == 2


def test_the_shipped_instructions():
    assert (len(instructions()), len(tasks()), len(texts())) == (1100, 175, 175)
