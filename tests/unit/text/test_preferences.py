"""Preference data: each form of a record, token ids of both answers, answers to other prompts."""

import json

import numpy as np
import pytest
from PIL import Image

from chat_cases import GEMMA3, GEMMA_MARKED, MARKED, QWEN3, TOOL, said
from gemma3_processor_case import SOFT, ProcessorCase
from kmodels.models import GemmaCausalLMPreprocessor, GemmaTokenizer
from kmodels.models.qwen3 import Qwen3CausalLMPreprocessor, Qwen3Tokenizer
from kmodels.text import (
    TextLoader,
    encode_labelled,
    encode_pairs,
    read_labelled,
    read_pairs,
    read_records,
)
from kmodels.text.preferences import check_pair
from kmodels.text.training import train_tokenizer
from refusals import refused

TEXTS = {"prompt": "one two", "chosen": " three", "rejected": " a b"}
ASKED = said(("user", "one"))
GOOD, BAD = said(("assistant", "two")), said(("assistant", "a b"))
MESSAGES = {"prompt": ASKED, "chosen": GOOD, "rejected": BAD}
LONGER = said(("system", "c"), ("user", "one"), ("assistant", "two"), ("user", "three"))


def own(messages):
    """Messages with the role that `read_records` gives the model."""
    return [{**m, "role": m["role"].replace("assistant", "model")} for m in messages]


USUAL = {name: own(part) for name, part in MESSAGES.items()}


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# === Files ===


@pytest.mark.parametrize(
    ("line", "record"),
    [
        (TEXTS, TEXTS),
        (TEXTS | {"id": 3, "source": "x", "images": [], "tools": None}, TEXTS),
        (MESSAGES, USUAL),
        # Implicit prompts: up to the first word or message that differs.
        ({"chosen": "Q: x A: yes it", "rejected": "Q: x A: yesterday"},
         {"prompt": "Q: x A:", "chosen": " yes it", "rejected": " yesterday"}),
        ({"chosen": "Q?\n\nab", "rejected": "Q?\n\nac"},
         {"prompt": "Q?\n\n", "chosen": "ab", "rejected": "ac"}),
        ({"chosen": "Q a", "rejected": "Q a b"},
         {"prompt": "Q", "chosen": " a", "rejected": " a b"}),
        ({"chosen": "問答甲", "rejected": "問答乙"},
         {"prompt": "問答", "chosen": "甲", "rejected": "乙"}),
        ({"chosen": ASKED + GOOD, "rejected": ASKED + BAD}, USUAL),
        # UltraFeedback's: a prompt as text beside whole chats.
        ({"prompt": "one", "chosen": ASKED + GOOD, "rejected": ASKED + BAD}, USUAL),
        ({"prompt": "one", "chosen": GOOD, "rejected": BAD}, USUAL),
        ({"prompt": ASKED, "chosen": "two", "rejected": "a b"}, USUAL),
        ({"prompt": LONGER, "chosen": GOOD, "rejected": BAD}, USUAL | {"prompt": own(LONGER)}),
        (
            MESSAGES | {"tools": json.dumps([TOOL]), "chat_template_kwargs": {"x": 1}},
            USUAL | {"tools": [TOOL], "chat_template_kwargs": {"x": 1}},
        ),
        # What encoding drops.
        (TEXTS | {"rejected": " \n"}, TEXTS | {"rejected": ""}),
        (MESSAGES | {"chosen": said(("assistant", ""))}, USUAL | {"chosen": []}),
        ({"chosen": "a b", "rejected": "a b"}, {"prompt": "a b", "chosen": "", "rejected": ""}),
    ],
)  # fmt: skip
def test_each_form_of_a_pair(tmp_path, line, record):
    path = write(tmp_path / "pairs.jsonl", line)
    assert read_pairs(path) == [record]
    assert check_pair(record) == record
    path.write_text(json.dumps([line]))
    assert read_pairs(path) == [record]
    rows = [
        {**record, "completion": record[name], "label": name == "chosen"}
        for name in ("chosen", "rejected")
    ]
    rows = [{k: x for k, x in row.items() if k not in ("chosen", "rejected")} for row in rows]
    assert read_labelled(path) == rows
    alone = [{**row, "label": int(row["label"])} for row in rows]
    assert read_labelled(write(tmp_path / "rows.jsonl", *alone)) == rows


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["a"], "a list where an object belongs, with prompt, chosen and rejected, or chosen"),
        ({"prompt": "a", "chosen": "b"}, "field 'rejected' is missing; give prompt, chosen and"),
        ({"prompt": "a"}, "field 'chosen' is missing"),
        (TEXTS | {"prompt": " "}, "field 'prompt' is empty"),
        (TEXTS | {"chosen": 3}, "field 'chosen' is a int, not text"),
        (TEXTS | {"chosen": ["a"]}, "field 'chosen' is a list of something else than messages"),
        (MESSAGES | {"prompt": []}, "field 'prompt' is an empty list"),
        ({"chosen": "a b", "rejected": "c d"}, "do not begin with the same words; give the prompt"),
        ({"chosen": ASKED + GOOD, "rejected": LONGER}, "do not begin with the same message"),
        (
            {"chosen": ASKED + GOOD + ASKED + GOOD, "rejected": ASKED + GOOD + LONGER[3:] + BAD},
            "differ in message 2, which is not the assistant's",
        ),
        (
            {"prompt": "x", "chosen": ASKED + GOOD, "rejected": ASKED + BAD},
            "field 'prompt' is not in the messages with which",
        ),
        (MESSAGES | {"chosen": ASKED}, r"field 'chosen\[0\].role' is 'user'; an answer begins"),
        (MESSAGES | {"prompt": ASKED + GOOD}, r"field 'prompt \+ chosen' must go user, assistant"),
        (
            MESSAGES | {"rejected": said(("assistant", 3))},
            r"field 'prompt \+ rejected\[1\].content' is a int",
        ),
        (
            {"question": "a", "chosen": "So b", "rejected": "So c"},
            "'prompt' is missing beside 'ques",
        ),
        (TEXTS | {"tools": [TOOL]}, "tools need messages; the record has texts"),
        (MESSAGES | {"tools": 3}, "field 'tools' is not a list of JSON schemas"),
        (MESSAGES | {"chat_template_kwargs": 3}, "field 'chat_template_kwargs' is not an object"),
        (TEXTS | {"images": "no.png"}, "there is no image .*no.png"),
    ],
)
def test_a_bad_pair_is_named(tmp_path, line, message):
    path = write(tmp_path / "pairs.jsonl", TEXTS, line)
    refused(f"pairs.jsonl line 2: .*{message}", read_pairs, path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (3, "a int where an object belongs, with prompt, completion and label"),
        ({"prompt": "a", "label": True}, "field 'completion' is missing; give prompt, completion"),
        ({"completion": "a", "label": True}, "field 'prompt' is missing; give prompt, completion"),
        ({"prompt": "a", "completion": "b"}, "field 'label' is None; give true for a desirable"),
        ({"prompt": "a", "completion": "b", "label": "good"}, "field 'label' is 'good'; give true"),
        ({"prompt": "a", "completion": "b", "label": 2}, "field 'label' is 2; give true"),
        (
            {"prompt": "a", "completion": ASKED + GOOD, "label": 0},
            r"field 'completion\[0\].role' is 'user'; an answer begins",
        ),
    ],
)
def test_a_bad_labelled_row_is_named(tmp_path, line, message):
    path = write(tmp_path / "rows.jsonl", line)
    refused(f"rows.jsonl line 1: {message}", read_labelled, path)


def test_fields_with_a_meaning_elsewhere_are_named_once(tmp_path):
    more = {
        "margin": 2.0,
        "score_chosen": 9,
        "system": "be brief",
        "history": None,
        "functions": [],
    }
    path = write(tmp_path / "pairs.jsonl", *[TEXTS | more] * 2)
    message = "has margin and score_chosen and system, which kmodels does not read"
    with pytest.warns(UserWarning, match=message) as caught:
        assert read_pairs(path) == [TEXTS] * 2
    assert len(caught) == 1 and caught[0].filename == __file__
    refused("pairs.jsonl holds no records; give one JSON object", read_pairs, write(path))
    refused("cannot be read: No such file", read_pairs, tmp_path / "nothing.jsonl")


# === Token ids ===


@pytest.fixture(scope="module")
def tokenizers_(references, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gemma")
    train_tokenizer(["one two three a b c d e"], 300).save(folder)
    qwen = references / "qwen3" / "tokenizer"
    return {
        "gemma": (GemmaCausalLMPreprocessor, GemmaTokenizer.from_file(folder), None),
        "gemma3": (GemmaCausalLMPreprocessor, GemmaTokenizer.from_file(folder), GEMMA3),
        "gemma marked": (GemmaCausalLMPreprocessor, GemmaTokenizer.from_file(folder), GEMMA_MARKED),
        "qwen3": (Qwen3CausalLMPreprocessor, Qwen3Tokenizer.from_file(qwen), QWEN3),
        "qwen marked": (Qwen3CausalLMPreprocessor, Qwen3Tokenizer.from_file(qwen), MARKED),
    }


@pytest.fixture
def make(tokenizers_):
    def made(name, length=96):
        kind, tokenizer, template = tokenizers_[name]
        tokenizer.chat_template = template
        return kind(tokenizer, length, loss_on="responses")

    return made


def answers(text, batch):
    """(prompt ids, answer ids, learnt ids) of each row, from the arrays."""
    x, labels, weights = batch
    found = []
    for ids, mask, following, learnt in zip(
        *(a.reshape(-1, a.shape[-1]) for a in (x["token_ids"], x["padding_mask"], labels, weights)),
        strict=True,
    ):
        whole = [*ids[mask > 0], following[int(mask.sum()) - 1]]
        begin = int(learnt.argmax()) + 1
        found.append((whole[:begin], whole[begin:], following[learnt > 0].tolist()))
    return found


@pytest.mark.parametrize("name", ["gemma", "gemma3", "qwen3"])
def test_texts_are_prompt_answer_and_end(make, name):
    text = make(name)
    batch = encode_pairs(text, [TEXTS])
    tokens = text.tokenizer
    start = [] if tokens.start_token_id is None else [tokens.start_token_id]
    for row, key in zip(answers(text, batch), ("chosen", "rejected"), strict=True):
        answer = [*tokens.tokenize(TEXTS[key]), tokens.end_token_id]
        assert row == ([*start, *tokens.tokenize("one two")], answer, answer)
    assert batch[0]["token_ids"].shape == batch[1].shape == batch[2].shape == (1, 2, 96)


REASONED = said(("user", "one"), ("assistant", "<think>\na\n</think>\n\ntwo"), ("user", "three"))
PROMPTS = {"one question": ASKED, "several": LONGER, "a system": LONGER[:2]}


@pytest.mark.parametrize("name", ["gemma", "gemma3", "qwen3", "qwen marked"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_messages_are_the_template_s_and_the_answer_alone_is_learnt(make, name, prompt):
    text, asked = make(name), PROMPTS[prompt]
    batch = encode_pairs(text, [{"prompt": asked, "chosen": GOOD, "rejected": BAD}])
    if name == "gemma":
        text.tokenizer.chat_template = GEMMA3  # which writes what the family's format does
    for row, answer in zip(answers(text, batch), (GOOD, BAD), strict=True):
        # The same steps as TRL's: the answer is what follows the prompt with its turn opened.
        whole = text.tokenizer.apply_chat_template(asked + answer)
        before = text.tokenizer.apply_chat_template(asked, add_generation_prompt=True)
        size = next(i for i, (x, y) in enumerate(zip(before + [-1], whole)) if x != y)  # noqa: B905, RUF005
        if name == "qwen marked":  # which has thoughts in front of the marks
            size = len(whole) - len(row[2]) - 1
        assert row[0] == whole[:size] and row[1] == whole[size:]
        # Through the token that ends the turn; TRL learns the line's end behind it, too.
        end = text.tokenizer.tokenize("\n")
        assert [*row[2], *end] == whole[size:]
    assert not text.cut.examples


def test_a_prompt_with_thoughts_that_the_template_drops(make):
    text = make("qwen3")
    pair = {"prompt": REASONED, "chosen": GOOD, "rejected": BAD}
    first, second = answers(text, encode_pairs(text, [pair]))
    assert first[0] == second[0] == text.tokenizer.apply_chat_template(REASONED, True, True)
    # Where all replies are learnt, they have to be told apart.
    chat = {"messages": [*REASONED, *GOOD]}
    refused("the replies cannot be told apart", text.encode, [chat])
    text.loss_on = "all"
    weightless = {"messages": own([{**m, "weight": 0} for m in REASONED[:2]])}
    refused("has no reply to learn from", text.encode, [weightless])
    weightless["messages"] += own([*REASONED[2:], *GOOD])
    refused("has weight 0, so loss_on has to be 'responses'", text.encode, [weightless])


def test_weights_of_replies_in_records(make, tmp_path):
    chat = own(LONGER + GOOD)
    weighted = [{**m, "weight": 0} if i == 2 else m for i, m in enumerate(chat)]
    for name in ("gemma", "gemma3", "qwen marked"):
        text = make(name)
        full, some = (text.encode([{"messages": m}])[0] for m in (chat, weighted))
        assert full.ids == some.ids and sum(full.learn) > sum(some.learn) > 0
        assert some.learn.index(True) > full.learn.index(True)
    records = read_records(write(tmp_path / "a.jsonl", {"messages": weighted}))
    assert records.rows == [{"messages": weighted}]
    wrong = write(tmp_path / "a.jsonl", {"messages": [{**chat[1], "weight": 2}]})
    refused(r"field 'messages\[0\].weight' is 2; give 0 or 1", read_records, wrong)
    text.tokenizer.chat_template = MARKED.replace("elif message.role == 'assistant'", "elif 0")
    refused("marks 0 of 2 replies with {% generation %}", text.encode, [{"messages": weighted}])


def test_fields_of_templates(make, tmp_path):
    text = make("qwen3", 400)
    fields = {"tools": [TOOL], "chat_template_kwargs": {"enable_thinking": False}}
    (row,) = read_pairs(write(tmp_path / "pairs.jsonl", MESSAGES | fields))
    first, _ = answers(text, encode_pairs(text, [row]))
    whole = text.tokenizer.apply_chat_template(ASKED + GOOD, tools=[TOOL], enable_thinking=False)
    assert first[0] + first[1] == whole
    wrong = row | {"chat_template_kwargs": {"enable_thoughts": False}}
    refused("the chat template takes no enable_thoughts; did you mean", encode_pairs, text, [wrong])
    gemma = make("gemma")
    del row["tools"]
    refused("chat_template_kwargs need the tokenizer's own chat", encode_pairs, gemma, [row])


def test_pairs_without_an_answer_are_dropped_and_counted(make):
    text = make("gemma")
    empty = [TEXTS | {"chosen": ""}, MESSAGES | {"rejected": []}, {"chosen": "a", "rejected": "a"}]
    _, labels, weights = encode_pairs(text, [empty[0], TEXTS, *empty[1:]])
    assert labels.shape == (1, 2, 96) and weights.any(-1).all()
    assert text.cut.dropped == 3 and str(text.cut).endswith("; 3 dropped, whose answer is empty")
    refused("none of 3 pairs has two answers; give at least one", encode_pairs, text, empty)
    _, labels, _ = encode_labelled(text, [*empty[:2], MESSAGES], mismatched=False)
    assert labels.shape == (4, 1, 96) and text.cut.dropped == 3 + 3 + 2
    refused("none of 2 rows has an answer", encode_labelled, text, empty[2:])


@pytest.mark.parametrize(("length", "examples"), [(2, 6), (3, 6), (5, 5), (12, 4), (99, 0)])
def test_prompts_are_cut_the_same(make, length, examples):
    text = make("gemma", length)
    rows = [
        {"prompt": "one two three a b c d e " * 3, "chosen": "a" * 9, "rejected": "b"},
        {"prompt": "c", "chosen": "d", "rejected": "e" * 20},
        {"prompt": LONGER, "chosen": said(("assistant", "a b c d e " * 4)), "rejected": BAD},
    ]
    for row in rows:
        found = answers(text, encode_pairs(text, [row]))
        assert found[0][0] == found[1][0] and all(learnt for _, _, learnt in found)
    assert text.cut.examples == examples


def test_answers_to_other_prompts(make):
    text = make("gemma")
    rows = [
        {"prompt": "one", "completion": "a", "label": True},
        {"prompt": "one", "completion": "b", "label": False},
        {"prompt": ASKED, "completion": GOOD, "label": True},
        {"prompt": "two", "completion": "c", "label": True},
        {"prompt": LONGER, "completion": BAD, "label": False},
    ]
    x, labels, weights = encode_labelled(text, rows)
    assert x["token_ids"].shape == labels.shape == weights.shape == (5, 2, 96)
    assert x["desirable"].tolist() == [1, 0, 1, 1, 0] and x["desirable"].dtype == "int32"
    found = answers(text, (x, labels, weights))
    batch, _, filled = TextLoader((x, labels, weights), 3)[1]
    assert batch["desirable"].tolist() == [1, 0, 1] and filled.any((1, 2)).tolist() == [1, 1, 0]
    own_, other = found[::2], found[1::2]
    assert [prompt for prompt, _, _ in own_] == [prompt for prompt, _, _ in other]
    # The row before, if it has another prompt of the same form.
    for row, before in enumerate((3, 3, 4, 1, 2)):
        assert other[row][2] == own_[before][2]
    # Of rows with different prompts these are TRL's, over the whole of the data.
    simple = [{"prompt": p, "completion": c, "label": 1} for p, c in ("ab", "cd", "eb")]
    learnt = answers(text, encode_labelled(text, simple))
    assert [row[2] for row in learnt[1::2]] == [learnt[i][2] for i in (4, 0, 2)]
    message = "row 0 finds no row with another prompt, which KTO's divergence needs"
    refused(message, encode_labelled, text, rows[:2])
    alone, *_ = encode_labelled(text, rows[:2], mismatched=False)
    assert alone["token_ids"].shape == (2, 1, 96)
    text.loss_on = "all"
    for call in (encode_labelled, encode_pairs):
        refused("has loss_on='all'; set loss_on='responses'", call, text, rows)


def test_images_of_a_prompt(references, make, tmp_path):
    Image.new("RGB", (20, 20), "red").save(tmp_path / "a.png")
    case = ProcessorCase(references)
    text = case.preprocessor(sequence_length=64)
    lines = [
        {"prompt": ASKED, "chosen": GOOD, "rejected": BAD, "images": ["a.png"]},
        {"prompt": [{"role": "user", "content": [{"type": "image", "path": "a.png"}]}],
         "chosen": GOOD, "rejected": BAD},
        MESSAGES,
    ]  # fmt: skip
    pairs = read_pairs(write(tmp_path / "pairs.jsonl", *lines))
    x, labels, weights = encode_pairs(text, pairs)
    assert labels.shape == (3, 2, 64) and weights.any(-1).all()
    shown = x["images"].reshape(3, 2, -1, 20, 20, 3)
    np.testing.assert_array_equal(shown[:, 0], shown[:, 1])
    soft = text.image_token_id
    assert ((x["token_ids"] == soft).sum(-1) == [[4, 4], [4, 4], [0, 0]]).all(), SOFT
    assert not weights[labels == soft].any()
    labelled, *_ = encode_labelled(text, pairs)
    assert labelled["images"].shape[:2] == (6, 2)
    # A prompt about another image is another prompt.
    red, blue = (np.full((20, 20, 3), value, "uint8") for value in (0, 255))
    rows = [{"prompt": ASKED, "completion": GOOD, "label": 1, "images": [x]} for x in (red, blue)]
    x, *_ = encode_labelled(text, rows)
    assert np.ptp(x["images"], axis=0).any() and not np.ptp(x["images"], axis=1).any()
    refused("takes only text here; leave 'images' out", encode_pairs, make("gemma"), pairs)
