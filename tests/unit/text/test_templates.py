"""Records as text: what is read, what is learnt, where a reply begins."""

import numpy as np
import pytest

from chat_cases import said
from kmodels.models.gemma.text import CHATS
from kmodels.text import Template
from kmodels.text.training import train_tokenizer
from refusals import refused

RECORD = {"instruction": "Say {response}.", "context": "", "response": "Hi {context}."}
WITH_CONTEXT = RECORD | {"context": "Now."}
SAID = "Instruction:\nSay {response}.\n\n"
TURNS = [("system", "Be short."), ("user", " a "), ("assistant", "b"), ("user", "c")]
CHAT = {"messages": said(*TURNS, ("assistant", "d"))}


@pytest.mark.parametrize(
    ("spec", "record", "prompt"),
    [
        ("instruction", RECORD, f"{SAID}Response:\n"),
        ("instruction", WITH_CONTEXT, f"{SAID}Context:\nNow.\n\nResponse:\n"),
        ("Q: {instruction} A: {response}", WITH_CONTEXT, "Q: Say {response}.\n\nNow. A: "),
        ("{context}|{instruction}|{response}", RECORD, "|Say {response}.|"),
    ],
)
def test_instructions(spec, record, prompt):
    written = Template(spec)(record)
    assert written == ([(prompt, False), ("Hi {context}.", True)], True)
    assert Template(spec)(record, reply=False).parts == [(prompt, False)]
    asked = {name: text for name, text in record.items() if name != "response"}
    assert Template(spec)(asked, reply=False).parts == [(prompt, False)]


@pytest.mark.parametrize("name", ["input", "output", "prompt", "completion", "system"])
def test_fields_of_a_record_are_no_fields_of_a_template(name):
    spec = f"{{instruction}} {{{name}}} {{response}}"
    refused(
        rf"template has {{{name}}}; its fields are {{instruction}}, {{context}} and", Template, spec
    )


def test_replies_of_weight_0_need_a_loss_on_responses():
    chat = {"messages": [*said(("user", "a")), said(("assistant", "b"))[0] | {"weight": 0}]}
    chat["messages"] += said(("user", "c"), ("assistant", "d"))
    template = Template("gemma", CHATS)
    assert [part.text for part in template(chat).parts if part.learn] == ["d<end_of_turn>"]
    message = "a reply has weight 0, so loss_on has to be 'responses'"
    refused(message, template, chat, find_replies=False)
    assert template(chat, reply=False, find_replies=False)
    chat["messages"][1] |= {"weight": 1, "function_call": {"name": "f"}}
    refused("tools need the tokenizer's own chat template", template, chat)


def test_fields_that_no_form_reads_are_named():
    template, asked = Template("gemma", CHATS), said(("user", "a"), ("assistant", "b"))
    with pytest.warns(UserWarning, match="a record has history and system, which kmodels does not"):
        template({"messages": asked, "system": "s", "history": ["h"]})
    with pytest.warns(UserWarning, match="a record has context, which kmodels does not read"):
        template({"prompts": "a", "responses": "b", "context": "c"})
    template({"prompts": "a", "context": "", "number": 3, "responses": "b"})
    template({"prompts": "a"}, reply=False)
    with pytest.warns(UserWarning, match="a record has audio, which"):
        template({"prompts": "a", "responses": "b", "audio": np.zeros(3)})


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize("own", [False, True])
def test_reasoning_that_is_not_learnt_is_named(name, own):
    reply = {"role": "assistant", "content": "b", name: "c"}
    record = {"messages": [{"role": "user", "content": "a"}, reply]}
    tokenizer = train_tokenizer(["a b c"], 300) if own else None
    template = Template("chat_template" if own else "gemma", CHATS)
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    if tokenizer is not None:
        tokenizer.chat_template = plain
    with pytest.warns(UserWarning, match=f"a reply has {name}, which the chat template does not"):
        template(record, tokenizer=tokenizer)
    template(record, reply=False, tokenizer=tokenizer)
    if tokenizer is not None:
        tokenizer.chat_template = plain.replace("m.content", "m.reasoning_content ~ m.content")
        assert template(record, tokenizer=tokenizer).text.endswith("cb")


def test_alpaca_tells_of_an_input_only_where_there_is_one():
    parts = [Template("alpaca")(record).parts[0].text for record in (RECORD, WITH_CONTEXT)]
    assert "### Input" not in parts[0]
    assert "### Input:\nNow.\n\n### Response:\n" in parts[1]


def test_text_and_ready_prompts_go_through_as_they_are():
    template = Template("instruction")
    assert template("a") == ([("a", True)], True)
    assert template({"text": "a"}) == ([("a", True)], True)
    assert template({"prompts": "a", "responses": "b"}) == ([("a", False), ("b", True)], True)


def test_chat_is_that_of_the_instruction_tuned_models():
    # The text that transformers' apply_chat_template gives for Gemma 3, except for <bos>.
    expected = (
        "<start_of_turn>user\nBe short.\n\na<end_of_turn>\n<start_of_turn>model\nb<end_of_turn>\n"
        "<start_of_turn>user\nc<end_of_turn>\n<start_of_turn>model\nd<end_of_turn>\n"
    )
    template = Template("gemma", CHATS)
    parts, ends = template(CHAT)
    assert "".join(part.text for part in parts) == expected
    assert [part.text for part in parts if part.learn] == ["b<end_of_turn>", "d<end_of_turn>"]
    assert not ends
    asked = "".join(part.text for part in template(CHAT, reply=False).parts)
    assert asked == expected.removesuffix("d<end_of_turn>\n")
    question = {"messages": CHAT["messages"][:4]}
    assert template(question, reply=False) == template(CHAT, reply=False)
    without = template({"messages": CHAT["messages"][:3]})
    assert template(question) == without  # the open question teaches nothing
    single = template({"instruction": "a", "context": "x", "response": "b"}).parts[0].text
    assert single == "<start_of_turn>user\na\n\nx<end_of_turn>\n<start_of_turn>model\n"


@pytest.mark.parametrize("reply", [True, False])
@pytest.mark.parametrize(
    ("field", "value"),
    [("tools", [{"name": "add"}]), ("chat_template_kwargs", {"enable_thinking": False})],
)
def test_a_format_without_tools_says_so_for_prompts_too(reply, field, value):
    messages = CHAT["messages"] if reply else CHAT["messages"][:4]
    record = {"messages": messages, field: value}
    refused(f"{field} need the tokenizer's own chat", Template("gemma", CHATS), record, reply=reply)


@pytest.mark.parametrize("spec", ["nothing", "{response} {instruction}", "{response}"])
def test_an_unknown_template(spec):
    message = "choose auto, chat_template, instruction, alpaca, gemma, gemma4, or"
    refused(message, Template, spec, CHATS)


def test_records_that_a_template_cannot_write():
    message = "messages need a chat template; template is 'alpaca'"
    refused(message, Template("alpaca"), CHAT)
    question = {"messages": [{"role": "user", "content": "a"}]}
    refused("field 'messages' has no reply to learn from", Template("gemma", CHATS), question)
