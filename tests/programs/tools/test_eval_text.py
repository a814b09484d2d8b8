"""`kmodels eval` of language models, and the model of lm-evaluation-harness, beside their peers."""

import csv
import json
import shutil

import keras
import numpy as np
import pytest

import command_line
from kmodels.core.errors import InputError
from kmodels.models import GemmaCausalLM, GemmaCausalLMPreprocessor, Qwen3CausalLM
from kmodels.text import demo
from kmodels.text.training import train_tokenizer
from kmodels.tools.evaluate_text import read_tasks
from kmodels.tools.likelihood import LanguageScorer
from refusals import refused
from tolerances import tolerance

BACKEND = keras.backend.backend()
CHOICES = [
    {"prompt": "The river holds", "choices": ["stones", "a small boat"], "answer": "a small boat"},
    {"question": "Birds call ", "choices": ["from trees", "x", "a café"], "answer": 0},
    {"prompt": "Grass", "choices": ["grows on the bank of a river", "sings"], "answer": 1},
]
TEXTS = ["A small boat drifts past stones.\nBirds  call.", "naïve café 日本"]
LONG = "the boat drifts past stones and grass while birds call from old trees " * 3


def lines(path, records):
    path.write_text("\n".join(json.dumps(record) for record in records))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Gemma 3 with a tokenizer and, in `adapter`, an adapter that changes it."""
    folder = tmp_path_factory.mktemp("model")
    keras.utils.set_random_seed(5)
    tokenizer = train_tokenizer(demo.texts(), 600)
    text = GemmaCausalLMPreprocessor(tokenizer, 64)
    size = tokenizer.vocabulary_size()
    model = GemmaCausalLM.from_preset("gemma3_debug", vocabulary_size=size, preprocessor=text)
    model.save_to_preset(folder / "base")
    model.enable_lora(2)
    rng = np.random.default_rng(1)
    for variable in model.trainable_variables:
        variable.assign(rng.normal(size=variable.shape, scale=0.3))
    model.save_adapter(folder / "adapter")
    return folder


def evaluate(capsys, *words):
    assert command_line.run("eval", *words, "--json") == 0
    return json.loads(capsys.readouterr().out)


def log_likelihood(model, context, continuation):
    """Log-likelihood of tokens behind others, from all logits of one row."""
    ids = np.array([[*context, *continuation]])
    logits = np.asarray(keras.ops.convert_to_numpy(model(ids)), "float64")[0, len(context) - 1 : -1]
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return log_probs[np.arange(len(continuation)), continuation].sum()


@pytest.mark.nightly("jax", "tensorflow")
@pytest.mark.each_backend
def test_a_model_before_and_after_lora(folder, tmp_path, capsys, exchange):
    choices = lines(tmp_path / "c.jsonl", CHOICES)
    words = (folder / "base", choices, "--adapter", folder / "adapter", "--before")
    found = evaluate(capsys, *words, "--results", tmp_path / "out.csv", "--batch-size", 2)
    model = GemmaCausalLM.from_preset(folder / "base")
    encode = model.preprocessor.tokenizer.encode
    texts = lines(tmp_path / "t.jsonl", [{"text": text} for text in TEXTS])
    perplexity = evaluate(capsys, folder / "base", texts)
    # The token in front is not predicted, the one that the tokenizer adds is.
    total = sum(log_likelihood(model, [2], encode(text)) for text in TEXTS)
    size = sum(len(text.encode()) for text in TEXTS)
    assert perplexity["bits_per_byte"] == pytest.approx(-total / size / np.log(2), rel=1e-5)
    assert perplexity["byte_perplexity"] == pytest.approx(np.exp(-total / size), rel=1e-5)
    assert perplexity["word_perplexity"] == pytest.approx(np.exp(-total / 11), rel=1e-5)
    for stage, metrics in (("before", found["before"]), ("after", found)):
        if stage == "after":
            model.load_adapter(folder / "adapter")
        hits = {"acc": [], "acc_norm": [], "acc_bytes": []}
        for number, record in enumerate(CHOICES):
            prompt, options = record.get("prompt") or record["question"], record["choices"]
            start = encode(prompt.rstrip())
            wholes = [encode(f"{prompt} {option}") for option in options]
            scores = np.array([log_likelihood(model, start, x[len(start) :]) for x in wholes])
            if stage == "after":
                row = found["rows"][number]["log_likelihoods"]
                np.testing.assert_allclose(row, scores, rtol=0, atol=tolerance("logits"))
            answer = record["answer"]
            answer = options.index(answer) if isinstance(answer, str) else answer
            sizes = ([1] * len(options), map(len, options), [len(x.encode()) for x in options])
            for name, each in zip(hits, sizes, strict=True):
                hits[name].append(np.argmax(scores / np.array([*each])) == answer)
        for name, values in hits.items():
            assert metrics[name] == pytest.approx(np.mean(values))
            assert metrics[f"{name}_stderr"] == pytest.approx(np.std(values, ddof=1) / 3**0.5)
    rows = list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()))
    assert [row["stage"] for row in rows] == ["before", "after"]
    assert float(rows[1]["acc"]) == found["acc"]

    # Order and batches change nothing, nor does the backend.
    again = evaluate(capsys, *words[:1], lines(choices, CHOICES[::-1]), *words[2:])
    for one, other in zip(found["rows"], again["rows"][::-1], strict=True):
        np.testing.assert_allclose(one["log_likelihoods"], other["log_likelihoods"], rtol=1e-5)
    numbers = [x for row in (*found["rows"],) for x in row["log_likelihoods"]]
    numbers += [found["before"]["acc_norm"], found["acc_norm"], perplexity["bits_per_byte"]]
    own = exchange / BACKEND / "eval_text.json"
    own.parent.mkdir(exist_ok=True)
    own.write_text(json.dumps(numbers))
    for file in exchange.glob("*/eval_text.json"):
        others = json.loads(file.read_text())
        np.testing.assert_allclose(others, numbers, rtol=0, atol=tolerance("logits"))


def test_replies_that_are_the_answer_and_end(folder, tmp_path, capsys):
    model = GemmaCausalLM.from_preset(folder / "base")
    prompts = ["The river", "Birds", "One boat"]
    replies = model.generate(prompts, strip_prompt=True, max_new_tokens=6, temperature=0)
    answers = [replies[0], "wrong", replies[2]]
    file = lines(
        tmp_path / "e.jsonl",
        [{"prompt": p, "answer": f" {a} "} for p, a in zip(prompts, answers, strict=True)],
    )
    found = evaluate(capsys, folder / "base", file, "--max-new-tokens", 6)
    assert [row["reply"] for row in found["rows"]] == replies
    assert (found["exact_match"], found["ended"]) == (pytest.approx(2 / 3), 0)
    stop = replies[1][2:4]
    found = evaluate(capsys, folder / "base", file, "--max-new-tokens", 6, "--stop", stop)
    assert found["rows"][1]["reply"] == replies[1].partition(stop)[0]
    assert found["rows"][1]["ended"]
    # The prompt of a template.
    found = evaluate(capsys, folder / "base", file, "--max-new-tokens", 6, "--as", "instruction")
    records = [{"instruction": prompt, "context": ""} for prompt in prompts]
    expected = model.generate(records, strip_prompt=True, max_new_tokens=6, temperature=0)
    assert [row["reply"] for row in found["rows"]] == expected != replies


def test_chats_are_written_by_their_template(folder, tmp_path, capsys):
    model = GemmaCausalLM.from_preset(folder / "base")
    model.load_adapter(folder / "adapter")
    words = (folder / "base", "--adapter", folder / "adapter")
    chat = [
        *({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}),
        {"role": "user", "content": "Which birds?"},
    ]
    file = lines(tmp_path / "e.jsonl", [{"prompt": chat, "answer": "none"}])
    found = evaluate(capsys, *words, file, "--max-new-tokens", 6)
    reply = model.chat(chat, max_new_tokens=6)
    assert found["rows"][0]["reply"] == reply
    text = model.preprocessor
    records = [
        {"prompt": prompt, "choices": ["old trees", "x"], "answer": 0} for prompt in (chat, "Birds")
    ]
    file = lines(tmp_path / "c.jsonl", records)
    found = evaluate(capsys, *words, file, "--as", "chat")
    for row, prompt in zip(
        found["rows"], (chat, [{"role": "user", "content": "Birds"}]), strict=True
    ):
        ids = text.chat_token_ids([prompt])[0]
        choices = [text.tokenizer.encode(x, False) for x in ("old trees", "x")]
        expected = [log_likelihood(model, ids, choice) for choice in choices]
        others = [log_likelihood(model, ids[-5:], choice) for choice in choices]
        assert np.abs(np.subtract(expected, others)).min() > 100 * tolerance("logits")
        np.testing.assert_allclose(
            row["log_likelihoods"], expected, rtol=0, atol=tolerance("logits")
        )


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([{"text": "a"}, {"prompt": "a", "answer": "b"}], r"line 2: a record of exact_match in a"),
        ([{"prompt": "a"}], "line 1: the fields are prompt; give prompt, choices and answer"),
        ([{"text": "a", "prompt": "b"}], "line 1: the fields are text, prompt"),
        (["a"], "line 1: a str where an object belongs"),
        ([{"text": " "}], "line 1: field 'text' is empty"),
        ([{"prompt": "a", "answer": 3}], "field 'answer' is a int, not text"),
        ([{"prompt": "a", "choices": ["b"], "answer": 0}], "'choices' is not a list of at least"),
        ([{"prompt": "a", "choices": ["b", 2], "answer": 0}], r"field 'choices\[1\]' is a int"),
        ([{"prompt": "a", "choices": ["b", "c"], "answer": 2}], "'answer' is 2; give one of the"),
        ([{"prompt": "a", "choices": ["b", "c"], "answer": True}], "'answer' is True"),
        ([{"prompt": "a", "choices": ["b", "c"], "answer": "B"}], "'answer' is 'B'"),
        ([{"prompt": [{"role": "assistant", "content": "x"}], "answer": "b"}], "must go user"),
        ([], "holds no records; give one JSON object a line with prompt"),
    ],
)
def test_a_wrong_record_is_one_line(records, message, tmp_path):
    refused(message, read_tasks, lines(tmp_path / "x.jsonl", records))


def test_wrong_uses_give_a_line(folder, tmp_path, capsys):
    file = lines(tmp_path / "x.jsonl", [{"text": "a"}, {"prompt": "b"}])
    text = lines(tmp_path / "t.jsonl", [{"text": "a"}])
    choices = lines(tmp_path / "c.jsonl", CHOICES)
    replies = lines(tmp_path / "e.jsonl", [{"prompt": "a", "answer": "b"}])
    asked = [{"role": "user", "content": "a"}]
    chats = lines(tmp_path / "m.jsonl", [{"prompt": asked, "answer": "b"}])
    base = folder / "base"
    for words, message in (
        ((base, chats, "--as", "text"), "--as has no effect on the messages of"),
        ((base, tmp_path / "no.jsonl"), "no.jsonl cannot be read"),
        ((base, file), "line 2: the fields are prompt"),
        ((base, file, "--skip-bad", "--before"), "has no adapter; leave --before out"),
        ((base, choices, "--as", "poem"), "--as is 'poem'; choose one of chat"),
        ((base, file, "--skip-bad", "--max-length", 1), "max_length is 1; give at least 2"),
        ((base, file, "--real-labels", file), "--real-labels has no effect on the texts"),
        ((base, text, "--as", "chat", "--stop", "x"), "--as, --stop has no effect on perplexity"),
        ((base, choices, "--max-new-tokens", 9), "--max-new-tokens has no effect on multiple_"),
        ((base, replies, "--max-new-tokens", 0), "max_new_tokens is 0; give at least 1"),
        ((base, tmp_path, "--as", "chat", "--before"), "--as, --before has no effect on the im"),
        ((tmp_path / "nothing", file, "--skip-bad"), "nothing"),
    ):
        assert command_line.run("eval", *words) == 2
        assert message in capsys.readouterr().err.strip().splitlines()[-1]
    assert command_line.run("eval", base, file, "--skip-bad") == 0
    assert "1 bad line left out, the first: " in capsys.readouterr().out
    scorer = LanguageScorer(GemmaCausalLM.from_preset(base), max_length=8)
    for call, message in (
        (lambda: scorer.log_likelihoods([([2], [])]), "request 0 has 1 tokens of context and 0"),
        (lambda: scorer.log_likelihoods([([2], [3] * 9)]), "max_length is 8"),
        (lambda: scorer.replies([[2]], 8), "max_new_tokens is 8 and max_length 8; give fewer"),
        (lambda: scorer.replies([[2]], 0), "max_new_tokens is 0; give at least 1"),
    ):
        refused(message, call)


def test_a_run_keeps_its_evaluations(folder, tmp_path, capsys):
    from kmodels.runs.compare import Comparison
    from kmodels.runs.report import write

    runs = []
    for name in ("one", "two"):
        run = tmp_path / name
        shutil.copytree(folder / "base", run / "base")
        shutil.copytree(folder / "adapter", run / "adapter")
        (run / "config.json").write_text('{"recipe": "gemma_lora", "template": "instruction"}')
        (run / "history.csv").write_text("row,epoch,step,loss\n")
        runs.append(run)
    write(runs[0])
    file = lines(tmp_path / "t.jsonl", [{"text": text} for text in TEXTS])
    found = evaluate(capsys, runs[0], file, "--before")
    other = evaluate(capsys, folder / "base", file, "--adapter", folder / "adapter", "--before")
    names = ("word_perplexity", "byte_perplexity", "bits_per_byte")
    assert [found[name] for name in names] == [other[name] for name in names]
    assert found["before"] == other["before"] != {name: found[name] for name in names}
    kept = json.loads((runs[0] / "evaluations.json").read_text())[str(file)]
    assert kept["before"] == found["before"]
    page = (runs[0] / "report.html").read_text()
    assert f"{found['bits_per_byte']:,.4f}" in page
    assert f"{found['before']['bits_per_byte']:,.4f}" in page
    write_worse = {str(file): {**kept, "after": {**kept["after"], "bits_per_byte": 99.0}}}
    (runs[1] / "evaluations.json").write_text(json.dumps(write_worse))
    row = dict(Comparison(runs).results)[f"{file} bits_per_byte"]
    assert [cell["best"] for cell in row] == [True, False]
    words = ("eval", runs[0], file, "--adapter", folder / "adapter")
    assert command_line.run(*words) == 2
    assert "is a run with its own adapter" in capsys.readouterr().err


# === Beside transformers and lm-evaluation-harness ===

SIZES = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 64},
    "num_hidden_layers": 3,
}


def make_peer(kind, folder, references):
    """A tiny model of transformers with its tokenizer; `folder` is what kmodels reads."""
    import transformers

    from references.gemma import randomise

    if kind == "gemma3":
        tokenizer = train_tokenizer(demo.texts(), 600)
        tokenizer.save(folder)
        roles = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
        size = {"vocab_size": tokenizer.vocabulary_size(), "sliding_window": 7}
        config = transformers.Gemma3TextConfig(**SIZES, **roles, **size, query_pre_attn_scalar=7)
    else:
        shutil.copytree(references / "qwen3" / "tokenizer", folder)
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        roles = {"pad_token_id": theirs.pad_token_id, "eos_token_id": theirs.eos_token_id}
        config = transformers.Qwen3Config(**SIZES, **roles, vocab_size=300)
    peer = randomise(transformers.AutoModelForCausalLM.from_config(config))
    if kind == "gemma3":
        peer.generation_config.eos_token_id = [1, 5]
    peer.save_pretrained(folder)
    return peer, transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.needs("transformers")
@pytest.mark.across("torch")
@pytest.mark.parametrize("kind", ["gemma3", "qwen3"])
def test_results_equal_those_of_transformers(kind, tmp_path, references):
    import torch

    folder = tmp_path / "model"
    peer, theirs = make_peer(kind, folder, references)
    prefix = theirs.bos_token_id if theirs.bos_token_id is not None else theirs.eos_token_id

    def log_probs(ids):
        with torch.no_grad():
            return torch.log_softmax(peer(torch.tensor([ids])).logits[0].double(), -1)

    def expected(context, continuation):
        """One request alone, as the documentation of lm-evaluation-harness says."""
        start = theirs.encode(context.rstrip()) if context else [prefix]
        plain = theirs.encode(context + continuation, add_special_tokens=bool(context))
        tokens = plain[len(start) :] if context else plain
        ids = [*start, *tokens][-65:]
        scores = log_probs(ids[:-1])[-len(tokens) :]
        total = sum(row[token].item() for row, token in zip(scores, tokens, strict=True))
        return total, scores.argmax(-1).tolist() == tokens

    def generated(prompt, number):
        ids = torch.tensor([theirs.encode(prompt)[-64 + number :]])
        return peer.generate(ids, max_new_tokens=number, do_sample=False)[0, ids.shape[1] :]

    model = (GemmaCausalLM if kind == "gemma3" else Qwen3CausalLM).from_preset(folder)
    scorer = LanguageScorer(model, batch_size=3)
    prompts = ["The river holds", "Birds call from old", LONG, "naïve 😀 日本", "a  b"]
    tokens = [generated(prompt, 9).tolist() for prompt in prompts]
    replies = [theirs.decode(row, skip_special_tokens=True) for row in tokens]
    ids = [scorer.encode(prompt) for prompt in prompts]
    assert [reply for reply, _ in scorer.replies(ids, 9)] == replies
    cut = [reply.partition(replies[0][2:4])[0] for reply in replies]
    assert [reply for reply, _ in scorer.replies(ids, 9, [replies[0][2:4]])] == cut

    requests = [(prompt, f" {x}") for prompt in prompts for x in ("a boat", "stones", "café")]
    requests += [("", "hello"), ("ends with blanks  ", "word"), ("q", "\nA")]
    right = [expected(*request) for request in requests]
    scores = scorer.log_likelihoods([scorer.pair(*request) for request in requests])
    atol = tolerance("logits")
    np.testing.assert_allclose([x for x, _ in scores], [x for x, _ in right], rtol=0, atol=atol)
    assert [greedy for _, greedy in scores] == [greedy for _, greedy in right]
    # What greedy decoding gives, and the same with another last token.
    pairs = [(i[-55:], row) for i, row in zip(ids, tokens, strict=True)]
    pairs += [(i, [*row[:-1], (row[-1] + 1) % 300]) for i, row in pairs]
    flags = [greedy for _, greedy in scorer.log_likelihoods(pairs)]
    assert flags == [True] * len(ids) + [False] * len(ids)

    # Each token once, behind as many others as fit: 64 with the token in front.
    for text, score in zip(TEXTS, scorer.rolling_log_likelihoods(TEXTS), strict=True):
        tokens = [prefix, *theirs.encode(text)]
        rows = log_probs(tokens[:-1])
        total = sum(row[token].item() for row, token in zip(rows, tokens[1:], strict=True))
        assert score == pytest.approx(total, rel=1e-6)
    tokens = [prefix, *theirs.encode(LONG * 2)]
    count, total = len(tokens) - 1, 0.0
    assert count > 130
    for first in range(0, count, 64):
        last = min(first + 64, count)
        begin = max(0, last - 64)
        rows = log_probs(tokens[begin:last])[first - last :]
        total += sum(
            row[token].item() for row, token in zip(rows, tokens[first + 1 : last + 1], strict=True)
        )
    assert scorer.rolling_log_likelihoods([LONG * 2])[0] == pytest.approx(total, rel=1e-6)


@pytest.mark.across("torch")
@pytest.mark.filterwarnings("default")  # of lm-evaluation-harness and what it imports
@pytest.mark.parametrize("kind", ["gemma3", "qwen3"])
def test_results_equal_those_of_lm_eval(kind, tmp_path, references, monkeypatch):
    pytest.importorskip("lm_eval", reason="needs lm_eval")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import get_model
    from lm_eval.models.huggingface import HFLM

    import kmodels.interop.lm_eval  # registers the model  # noqa: F401

    folder = tmp_path / "model"
    make_peer(kind, folder, references)
    ours = get_model("kmodels").create_from_arg_string(f"pretrained={folder}", {"batch_size": "4"})
    theirs = HFLM(str(folder), device="cpu", dtype="float32", batch_size=3)

    def both(kind, arguments):
        requests = [Instance(kind, {}, one, i) for i, one in enumerate(arguments)]
        return getattr(ours, kind)(requests), getattr(theirs, kind)(requests)

    until = {"until": ["e", "\n"], "max_gen_toks": 9}
    settings = (until, {"until": "s", "do_sample": False, "max_new_tokens": 4}, {"max_tokens": 12})
    replies, expected = both("generate_until", [(x, s) for s in settings for x in (*TEXTS, LONG)])
    assert replies == expected
    pairs = [(x, f" {y}") for x in (*TEXTS, LONG, "") for y in ("a boat", "stones", "x")]
    pairs += [(x, reply) for x, reply in zip((*TEXTS, LONG), replies[6:], strict=True) if reply]
    scores, expected = both("loglikelihood", pairs)
    np.testing.assert_allclose(
        *([x for x, _ in each] for each in (scores, expected)), rtol=0, atol=tolerance("logits")
    )
    assert [x for _, x in scores] == [x for _, x in expected]
    np.testing.assert_allclose(
        *both("loglikelihood_rolling", [(x,) for x in (*TEXTS, LONG * 2, "")]), rtol=1e-6
    )
    if kind == "qwen3":
        chat = [{"role": "user", "content": "Say hello."}]
        assert ours.apply_chat_template(chat) == theirs.apply_chat_template(chat)
        assert ours.chat_template(True) == theirs.chat_template(True)
    for values, message in (
        ({"batch_size": "auto"}, "batch_size is auto; give a number"),
        ({"pretrained": "nowhere"}, "nowhere"),
    ):
        with pytest.raises(InputError, match=message):
            get_model("kmodels")(**{"pretrained": str(folder), **values})
    refused("generate_until takes no num_beams", both, "generate_until", [("a", {"num_beams": 2})])
