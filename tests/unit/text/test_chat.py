"""Chat templates: ids, texts and masks of transformers' on dialogues of every kind."""

import re
import sys

import numpy as np
import pytest

from chat_cases import DIALOGUES, GEMMA2, GEMMA3, GEMMA_MARKED, MARKED, QWEN3, TOOL, said
from kmodels.core.errors import InputError
from kmodels.text import Tokenizer, demo
from kmodels.text.training import train_tokenizer
from refusals import refused

TEMPLATES = {
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "gemma marked": GEMMA_MARKED,
    "qwen3": QWEN3,
    "qwen marked": MARKED,
}
MESSAGES = said(("user", "Hi"), ("assistant", "Hello."), ("user", "And?"), ("assistant", "So."))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gemma")
    train_tokenizer(demo.texts(), 600).save(folder)
    return folder


@pytest.fixture(scope="module")
def folders(gemma, references):
    qwen = references / "qwen3" / "tokenizer"
    return {name: gemma if name.startswith("gemma") else qwen for name in TEMPLATES}


@pytest.fixture(params=TEMPLATES)
def pair(request, folders):
    """The tokenizers of a directory, ours and that of transformers, with one template."""
    from transformers import AutoTokenizer

    folder = folders[request.param]
    ours, theirs = Tokenizer.from_file(folder), AutoTokenizer.from_pretrained(folder)
    ours.chat_template = theirs.chat_template = TEMPLATES[request.param]
    return ours, theirs


def tried(call, error):
    try:
        return call()
    except error:
        return "refused"


@pytest.mark.needs("transformers")
def test_ids_are_those_of_transformers(pair):
    import jinja2

    ours, theirs = pair
    refusals = (jinja2.TemplateError, TypeError, ValueError)
    refused = 0
    for name, (dialogue, options) in DIALOGUES.items():
        for opened in (False, True):
            given = {**options, "add_generation_prompt": opened}
            wanted = tried(
                lambda d=dialogue, g=given: theirs.apply_chat_template(d, return_dict=False, **g),
                refusals,
            )
            found = tried(lambda d=dialogue, g=given: ours.apply_chat_template(d, **g), InputError)
            assert found == wanted, (name, opened)
            refused += found == "refused"
    assert len(DIALOGUES) >= 30 and refused < len(DIALOGUES)
    if "must" in ours.chat_template:
        assert refused >= 6


@pytest.mark.needs("transformers")
@pytest.mark.parametrize("pair", ["gemma2", "gemma3", "qwen3", "qwen marked"], indirect=True)
def test_a_last_message_goes_on_as_with_transformers(pair):
    ours, theirs = pair
    for text in ("Hello", " Hello ", "Hello\n"):
        dialogue = said(("user", "Hi"), ("assistant", text))
        wanted = theirs.apply_chat_template(dialogue, tokenize=False, continue_final_message=True)
        found = ours.apply_chat_template(dialogue, tokenize=False, continue_final_message=True)
        assert found == wanted


@pytest.mark.needs("transformers")
@pytest.mark.parametrize("pair", ["gemma marked", "qwen marked"], indirect=True)
def test_masks_of_marked_templates_are_those_of_transformers(pair):
    ours, theirs = pair
    marked = 0
    for name, (dialogue, options) in DIALOGUES.items():
        settings = {**options, "return_assistant_tokens_mask": True}
        try:
            found = ours.apply_chat_template(dialogue, **settings)
        except InputError:
            continue
        wanted = theirs.apply_chat_template(dialogue, **settings)
        assert found["input_ids"] == wanted["input_ids"]
        assert found["attention_mask"] == wanted["attention_mask"]
        mask, expected = found["assistant_masks"], wanted["assistant_masks"]
        if name == "emoji at the end" and "<start_of_turn>" in ours.chat_template:
            # transformers leaves out all but the first byte of a last character of several tokens.
            ends = ours.token_to_id("<end_of_turn>")
            assert np.subtract(mask, expected).sum() == 3
            assert mask[-5:-2] == [1] * 3 and found["input_ids"][-2] == ends
        elif any(m["role"] == "assistant" and not m.get("content") for m in dialogue):
            pass  # of an empty reply transformers may mark the token beside it
        else:
            assert mask == expected, name
        marked += sum(mask) > 0
    assert marked >= 12


def learnt(tokenizer, dialogue, **options):
    """The texts that the mask covers, one for each stretch."""
    found = tokenizer.apply_chat_template(dialogue, return_assistant_tokens_mask=True, **options)
    ids, mask = np.array(found["input_ids"]), np.array([0, *found["assistant_masks"], 0])
    begins, ends = np.flatnonzero(np.diff(mask) == 1), np.flatnonzero(np.diff(mask) == -1)
    return [tokenizer.decode(ids[begin:end]) for begin, end in zip(begins, ends, strict=True)]


@pytest.mark.parametrize("template", [GEMMA2, GEMMA3])
def test_replies_are_found_by_prefixes(gemma, template):
    tokenizer = Tokenizer.from_file(gemma)
    tokenizer.chat_template = template
    assert learnt(tokenizer, MESSAGES) == ["Hello.<end_of_turn>", "So.<end_of_turn>"]
    # The template trims, and what it writes counts.
    assert learnt(tokenizer, said(("user", "a"), ("assistant", " b\n"))) == ["b<end_of_turn>"]
    assert learnt(tokenizer, MESSAGES[:3]) == ["Hello.<end_of_turn>"]
    assert learnt(tokenizer, MESSAGES[:1]) == []


def test_replies_of_thinking_models(folders):
    tokenizer = Tokenizer.from_file(folders["qwen3"])
    tokenizer.chat_template = QWEN3
    last = "<think>\n\n</think>\n\nHello.<|im_end|>"
    assert learnt(tokenizer, MESSAGES[:2]) == [last]
    # An earlier reply stands there without thoughts, unlike when it was the last.
    refused(r"does not begin the chat as it writes messages\[:2\]", learnt, tokenizer, MESSAGES)
    called = DIALOGUES["a call and its result"][0]
    tokenizer.chat_template = MARKED
    assert learnt(tokenizer, called, tools=[TOOL]) == [
        '<tool_call>\n{"name": "weather", "arguments": {"place": "Z\u00fcrich"}}\n</tool_call>'
        "<|im_end|>",
        "It is sunny.<|im_end|>",
    ]


def test_replies_without_a_token_that_ends_them(gemma):
    tokenizer = Tokenizer.from_file(gemma)
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    # The token of the first word holds the blank before it.
    assert learnt(tokenizer, MESSAGES[:2]) == [" Hello.\n"]


def weather(place: str, days: int = 1) -> str:
    """
    Tells the weather.

    Args:
        place: Name of a town.
        days: How many days ahead.
    """
    return place * days


@pytest.mark.needs("transformers")
def test_functions_as_tools_are_read_as_by_transformers(pair):
    ours, theirs = pair
    options = {"tools": [weather], "tokenize": False}
    text = ours.apply_chat_template(MESSAGES[:1], **options)
    assert text == theirs.apply_chat_template(MESSAGES[:1], **options)
    with pytest.raises(InputError, match=r"no JSON schema: .*has no docstring"):
        ours.apply_chat_template(MESSAGES[:1], tools=[lambda: 1])


def test_what_a_template_cannot_do_is_one_line(gemma, monkeypatch):
    for module in ("transformers", "transformers.utils"):
        monkeypatch.setitem(sys.modules, module, None)
    tokenizer = Tokenizer.from_file(gemma)
    tokenizer.chat_template = GEMMA2
    chat, mask = MESSAGES[:1], {"return_assistant_tokens_mask": True}
    upper = "{% filter upper %}{% generation %}a{% endgeneration %}{% endfilter %}"
    ends, continues = {"add_generation_prompt": True}, {"continue_final_message": True}
    as_text, no_chat = {"tokenize": False}, {"chat_template": "a"}
    bare = {"chat_template": "{{ bos_token }}"}
    for messages, options, message in (
        ([], {}, 'a chat is a list of {"role"'),
        ("Hello", {}, 'a chat is a list of {"role"'),
        ([chat, []], {}, "the chat is empty; give at least one message"),
        ([*chat, "b"], {}, "a chat holds something else than messages; give"),
        ([chat, chat[0]], {}, "a chat holds something else than messages; give"),
        (chat, {"tools": [weather]}, "tools holds the function weather; give its JSON"),
        (said(("user", np.ones(3))), {}, "content holds a ndarray; a chat"),
        (chat, {"max_length": 3}, "takes no max_length: a chat is never cut"),
        (chat, ends | continues, "give one of them"),
        (chat, {"continue_final_message": "thinking"}, "is 'thinking'; give True or False"),
        (chat, {"tokenize": "no"}, "tokenize is 'no'; give True or False"),
        (chat, {"chat_template": 3}, "chat_template is 3; give a text or None"),
        (chat, mask | as_text, "return_assistant_tokens_mask marks tokens of whole chats"),
        ([{"role": "user"}], continues, "the last message has no text to continue"),
        (chat, continues | bare, "leaves the last message out; it cannot be continued"),
        (chat, {"chat_template": upper, **mask}, "changes what it marks with {% generation %}"),
        (MESSAGES[1:2], mask | no_chat, "does not begin the chat as it writes messages[:1]"),
        (chat, {"chat_template": "{{ 1 / 0 }}"}, "cannot write this chat: division by"),
        (chat, {"chat_template": "{{ messages + 1 }}"}, "cannot write this chat: can"),
        (chat, {"chat_template": "{{ ''.__class__.__mro__ }}"}, "cannot write this chat"),
    ):
        refused(re.escape(message), tokenizer.apply_chat_template, messages, **options)
