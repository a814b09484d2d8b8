"""`chat`, chats in `generate`, and training on chats, with the tokenizer's own template."""

import json
import re

import keras
import numpy as np
import pytest

from chat_cases import GEMMA2, GEMMA3, GEMMA_MARKED, MARKED, QWEN3, TOOL, said
from kmodels.models import (
    GemmaCausalLM,
    GemmaCausalLMPreprocessor,
    Qwen3CausalLM,
    Qwen3CausalLMPreprocessor,
)
from kmodels.text import Tokenizer, demo, read_records
from kmodels.text.training import train_tokenizer
from refusals import refused

CHAT = said(("user", "Say hello."))
LONGER = said(("user", "Say hello."), ("assistant", "Hello."), ("user", "And again."))
RECORD = {"messages": [*LONGER, {"role": "assistant", "content": "Hello again."}]}
MARKERS = ("<start_of_turn>", "<end_of_turn>")


def preprocessor_of(template, **settings):
    tokenizer = train_tokenizer(demo.texts(), 500)
    tokenizer.chat_template = template
    return GemmaCausalLMPreprocessor(tokenizer, **{"sequence_length": 64, **settings})


@pytest.fixture(scope="module")
def gemma():
    keras.utils.set_random_seed(0)
    return GemmaCausalLM.from_preset(
        "gemma3_debug", vocabulary_size=500, preprocessor=preprocessor_of(GEMMA2)
    )


@pytest.fixture(scope="module")
def qwen(references):
    keras.utils.set_random_seed(0)
    text = Qwen3CausalLMPreprocessor.from_preset(references / "qwen3" / "tokenizer")
    text.tokenizer.chat_template = QWEN3
    return Qwen3CausalLM.from_preset("qwen3_debug", preprocessor=text)


def continued(model, ids, count):
    """The text that greedy search puts behind token ids."""
    found = model.generate(np.array([ids]), max_new_tokens=count, stop_token_ids=None)
    return model.preprocessor.tokenizer.detokenize(found["token_ids"][0][len(ids) :])


def test_a_reply_is_what_follows_the_ids_of_the_template(gemma):
    tokenizer = gemma.preprocessor.tokenizer
    prompts = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True) for chat in (CHAT, LONGER)
    ]
    assert all(ids.count(tokenizer.start_token_id) == 1 for ids in prompts)
    wanted = [continued(gemma, ids, 6) for ids in prompts]
    pieces = ["", ""]

    def stream(row, piece):
        pieces[row] += piece

    settings = {"max_new_tokens": 6, "stop_token_ids": None}
    assert gemma.chat([CHAT, LONGER], stream=stream, **settings) == wanted == pieces
    pieces[:] = "", ""
    found = gemma.chat([CHAT, LONGER], stream=stream, assistant=gemma, **settings)
    assert found == wanted == pieces
    assert gemma.draft_counts.passes == 2  # the prompts, and six tokens at once
    # Texts too; half a character at the end comes last.
    pieces[:] = "", ""
    found = gemma.generate(["Say a word.", "Name"], stream=stream, strip_prompt=True, **settings)
    assert pieces == found
    assert gemma.chat(LONGER, prompt_lookup_num_tokens=2, **settings) == wanted[1]
    assert gemma.chat(CHAT, num_return_sequences=2, **settings) == [wanted[0]] * 2
    assert gemma.generate(CHAT, strip_prompt=True, **settings) == wanted[0]
    assert gemma.generate([CHAT], **settings) == [
        f"user\nSay hello.\nmodel\n{wanted[0]}"  # as with other prompts
    ]
    whole = gemma.generate(CHAT, max_length=len(prompts[0]) + 6, stop_token_ids=None)
    assert whole == f"user\nSay hello.\nmodel\n{wanted[0]}"
    rows = gemma.preprocessor.generate_preprocess([CHAT, LONGER])
    assert rows["padding_mask"].sum(axis=1).tolist() == [len(ids) for ids in prompts]
    # A reply that was begun goes on.
    begun = [*CHAT, {"role": "assistant", "content": "Hel"}]
    prompt = tokenizer.apply_chat_template(begun, continue_final_message=True)
    assert gemma.chat(begun, **settings) == continued(gemma, prompt, 6)


def test_options_reach_the_template(qwen):
    tokenizer = qwen.preprocessor.tokenizer
    options = {"tools": [TOOL], "enable_thinking": False}
    prompt = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, **options)
    written = tokenizer.decode(prompt)
    assert "weather" in written and written.endswith("</think>\n\n")
    found = qwen.chat(CHAT, max_new_tokens=4, stop_token_ids=None, **options)
    assert found == continued(qwen, prompt, 4)
    other = tokenizer.encode("Say hello.", add_special_tokens=False)
    found = qwen.chat(
        CHAT, chat_template="{{ messages[0].content }}", max_new_tokens=4, stop_token_ids=None
    )
    assert found == continued(qwen, other, 4)


def test_a_reply_ends_with_the_turn(gemma, qwen, monkeypatch):
    for model, end in ((gemma, "<end_of_turn>"), (qwen, "<|im_end|>")):
        tokenizer = model.preprocessor.tokenizer
        assert tokenizer.token_to_id(end) in model.preprocessor.chat_stop_token_ids
        seen = {}

        def record(prompts, limits, stop, *rest, seen=seen):
            seen["stop"] = set(stop)
            return prompts

        monkeypatch.setattr(model.generator, "function", record)
        model.chat(CHAT)
        assert seen["stop"] == set(model.preprocessor.chat_stop_token_ids)
        model.generate(CHAT, max_new_tokens=3)
        assert seen["stop"] == set(model.preprocessor.chat_stop_token_ids)
    # The tokenizer of a base model ends texts in another way.
    tokenizer = Tokenizer(qwen.preprocessor.tokenizer.core, end="<|endoftext|>")
    assert tokenizer.stop_token_ids == [tokenizer.token_to_id("<|endoftext|>")]
    plain = Qwen3CausalLMPreprocessor(tokenizer)
    assert tokenizer.token_to_id("<|im_end|>") in plain.chat_stop_token_ids


def test_without_a_template_of_its_own_the_family_has_one():
    text = preprocessor_of(None)
    ids = text.chat_token_ids([LONGER])[0]
    written = "".join(
        f"<start_of_turn>{role}\n{m['content']}<end_of_turn>\n"
        for role, m in zip(("user", "model", "user"), LONGER, strict=True)
    )
    assert text.tokenizer.decode(ids) == f"<bos>{written}<start_of_turn>model\n"
    text.tokenizer.chat_template = "{{ messages[0].content }}"
    assert text.tokenizer.decode(text.chat_token_ids([LONGER])[0]) == "Say hello."
    text.template = "gemma"  # whoever trained with it asks with it
    assert text.chat_token_ids([LONGER])[0] == ids


def test_what_cannot_be_answered_is_one_line(gemma):
    bare = preprocessor_of(None)
    fields = bare.tokenizer.to_dict()
    for marker in MARKERS:
        fields["json"] = json.dumps(json.loads(fields["json"])).replace(marker, marker[:-1] + "x>")
    lacking = GemmaCausalLMPreprocessor(fields)
    long = said(("user", "word " * 80))
    for message, call, *given in (
        ("chat takes a list of messages", gemma.chat, "Hello"),
        ("chat takes a list of messages", gemma.chat, []),
        ("turns must alternate", gemma.chat, said(("user", "a"), ("user", "b"))),
        ("leaves no room in 64 for a reply; give max_new_tokens", gemma.generate, long),
        (
            "a chat needs a preprocessor, whose tokenizer writes it",
            GemmaCausalLM(gemma.backbone).chat,
            CHAT,
        ),
        (
            "messages need a chat template: the tokenizer has none, and its vocabulary lacks "
            "<start_of_turn>, <end_of_turn>, <|turn>, <turn|>, <|channel>, <channel|>; set tok",
            lacking.chat_token_ids,
            [CHAT],
        ),
        (
            "the last message is the model's own, which the chat format 'gemma'",
            bare.chat_token_ids,
            [said(("user", "a"), ("assistant", "b"))],
        ),
        (
            "tools need the tokenizer's own chat template",
            bare.chat_token_ids,
            [said(("user", "a"), ("tool", "b"))],
        ),
        (
            "a message's content is in parts; give one text",
            bare.chat_token_ids,
            [said(("user", [{"type": "text", "text": "a"}]))],
        ),
    ):
        refused(re.escape(message), call, *given)
    refused("max_new_tokens is 0; give at least 1", gemma.chat, CHAT, max_new_tokens=0)
    message = "the chat format 'gemma' does not support tools, enable_thinking; give the template"
    refused(message, bare.chat_token_ids, [CHAT], tools=[TOOL], enable_thinking=False)
    bare.template = "chat_template"
    message = "the tokenizer has no chat template of its own; use template='gemma'"
    refused(message, bare, [RECORD])
    # As many new tokens as wanted, however long the chat is.
    assert gemma.chat(long, max_new_tokens=2, stop_token_ids=None)


PARTS = [{"type": "text", "text": x} for x in ("a", "b")]
IMAGE = {"type": "image_url", "image_url": {"url": "http://x/a.png"}}
CALLS = [{"type": "function", "function": {"name": "f", "arguments": {}}}]


@pytest.mark.parametrize(
    ("template", "messages", "error"),
    [
        # Written as Python writes a list, as nothing, and without its second part.
        (GEMMA2, said(("user", PARTS)), r"does not write all parts of messages\[0\]; give its"),
        (QWEN3, said(("user", PARTS)), r"does not write all parts of messages\[0\]"),
        (GEMMA3, said(("system", PARTS), ("user", "c")), r"does not write all parts of messages"),
        (GEMMA3, said(("user", [{"text": "a"}])), r"does not write all parts of messages\[0\]"),
        (GEMMA3, said(("user", [*PARTS, IMAGE])), "'image_url', which the chat template does not"),
        (GEMMA3, said(("user", [{"type": "text"}])), "a part of type 'text', which has no text"),
        (
            GEMMA3,
            said(("user", ["a"])),
            "a part of a message is a str; give an|is a list, not text",
        ),
        (
            GEMMA2,
            [*CHAT, {"role": "assistant", "content": "", "tool_calls": CALLS}, *CHAT],
            r"the chat template does not write the tool_calls of messages\[1\]",
        ),
    ],
)
def test_what_a_template_leaves_out_is_one_line(template, messages, error):
    text = preprocessor_of(template)
    refused(error, text.chat_token_ids, [messages])
    refused(error, text, [{"messages": [*messages, {"role": "assistant", "content": "x"}]}])


def test_a_template_without_tools_is_not_trained_on_records_with_tools():
    error = "the chat template does not write tools; give another, or no tools"
    refused(error, preprocessor_of(GEMMA2), [{**RECORD, "tools": [TOOL]}])


@pytest.mark.parametrize("template", [GEMMA2, GEMMA_MARKED])
def test_what_is_learnt_of_messages(template):
    text = preprocessor_of(template, loss_on="responses")
    mask = text.tokenizer.apply_chat_template(RECORD["messages"], return_assistant_tokens_mask=True)
    x, labels, weights = text([RECORD])
    ids, learn = mask["input_ids"], mask["assistant_masks"]
    assert x["token_ids"][0][: len(ids)].tolist() == ids
    assert labels[0][: len(ids) - 1].tolist() == ids[1:]
    assert weights[0].tolist() == [*learn[1:], *[0] * (65 - len(ids))]
    text.loss_on = "all"
    assert text([RECORD])[2][0].sum() == len(ids) - 1
    assert np.array_equal(text([RECORD])[0]["token_ids"], x["token_ids"])
    packed = text.pack([RECORD, RECORD], 128)[0]
    assert packed["token_ids"][0][: len(ids) - 1].tolist() == ids[:-1]
    # To be answered, the last reply is left out and the turn opened.
    asked = text.generate_preprocess(RECORD)
    wanted = text.tokenizer.apply_chat_template(LONGER, add_generation_prompt=True)
    assert asked["token_ids"][: asked["padding_mask"].sum()].tolist() == wanted


def test_which_records_the_own_template_writes():
    pair, words = {"prompts": "a", "responses": "b"}, {"instruction": "a", "response": "b"}
    text, plain = preprocessor_of(GEMMA2), preprocessor_of(None)
    for record in (pair, words, "running text", {"text": "running text"}):
        assert text.encode([record]) == plain.encode([record])
    text.template = "chat_template"
    written = "<bos><start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\nb<end_of_turn>\n"
    for record in (pair, words):
        assert text.tokenizer.decode(text.encode([record])[0].ids) == written
    message = "a chat template writes messages; field 'text' holds"
    refused(message, text.encode, [{"text": "running text"}])
    refused("field 'messages' has no reply to learn from", text.encode, [{"messages": CHAT}])
    # Nothing is cut out of the middle of a chat of which every token counts.
    text.sequence_length = 12
    ids = text.tokenizer.apply_chat_template(RECORD["messages"])
    assert text.encode([RECORD])[0].ids == ids[:13] and text.cut.examples == 1


def test_calls_of_tools_are_learnt(qwen, tmp_path):
    text = qwen.preprocessor
    text.tokenizer.chat_template = MARKED
    call = {"function": {"name": "weather", "arguments": {"place": "here"}}}
    messages = [
        *said(("system", "Be kind."), ("user", "Weather?")),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        *said(("tool", "sun"), ("assistant", "It is sunny.")),
    ]
    line = {"messages": messages, "tools": [TOOL]}
    (tmp_path / "data.jsonl").write_text(json.dumps(line) + "\n")
    records = read_records(tmp_path / "data.jsonl").rows
    text.loss_on = "responses"
    example = text.encode(records)[0]
    wanted = text.tokenizer.apply_chat_template(
        messages, tools=[TOOL], return_assistant_tokens_mask=True
    )
    assert example.ids == wanted["input_ids"]
    assert example.learn == [bool(learn) for learn in wanted["assistant_masks"]]
    assert 0 < sum(example.learn) < len(example.learn)
    (tmp_path / "bad.jsonl").write_text(json.dumps({**line, "tools": {"a": 1}}) + "\n")
    message = "field 'tools' is not a list of JSON schemas"
    refused(message, read_records, tmp_path / "bad.jsonl")
    text.tokenizer.chat_template = QWEN3
    text.loss_on = "all"


def test_training_on_messages_learns_the_replies():
    text = preprocessor_of(GEMMA2, loss_on="responses", sequence_length=64)
    model = GemmaCausalLM.from_preset("gemma3_debug", vocabulary_size=500, preprocessor=text)
    model.compile()
    model.optimizer.learning_rate = 1e-2
    first = model.evaluate([RECORD], verbose=0, return_dict=True)["loss"]
    model.fit([RECORD] * 4, batch_size=4, epochs=30, verbose=0)
    assert model.evaluate([RECORD], verbose=0, return_dict=True)["loss"] < first / 4
    assert model.chat(LONGER, max_new_tokens=12) == "Hello again."
