"""`kmodels chat`: replies through a pipe and on a terminal, history, commands, and wrong uses."""

import io
import json
import os
import subprocess
import sys

import keras
import numpy as np
import pytest
from rich.console import Console

from chat_cases import GEMMA2, GEMMA3
from kmodels.core.errors import InputError
from kmodels.generation import Sampler
from kmodels.models import GemmaCausalLM, GemmaCausalLMPreprocessor, ViTImageClassifier
from kmodels.text import demo
from kmodels.text.training import train_tokenizer
from kmodels.tools import cli
from kmodels.tools.chat import terminal
from kmodels.tools.chat.conversation import Conversation, choose_sampler, open_conversation

SHORT = ("--max-new-tokens", "6")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A model and its directory."""
    keras.utils.set_random_seed(0)
    tokenizer = train_tokenizer(demo.texts(), 500)
    tokenizer.chat_template = GEMMA3
    model = GemmaCausalLM.from_preset(
        "gemma3_debug",
        vocabulary_size=tokenizer.vocabulary_size(),
        preprocessor=GemmaCausalLMPreprocessor(tokenizer),
    )
    folder = tmp_path_factory.mktemp("chat") / "gemma"
    model.save_to_preset(folder)
    return model, folder


def run(*arguments):
    """Exit code of a command line."""
    with pytest.raises(SystemExit) as stop:
        cli.main(["chat", *map(str, arguments)])
    return stop.value.code


def replies(model, *questions, system=None, count=6):
    """What the model says to one question after another."""
    said = [] if system is None else [{"role": "system", "content": system}]
    found = []
    for question in questions:
        said.append({"role": "user", "content": question})
        found.append(model.chat(said, max_new_tokens=count))
        said.append({"role": "assistant", "content": found[-1]})
    return found


def test_each_line_of_a_pipe_is_a_question(tiny, monkeypatch, capsys):
    model, folder = tiny
    lines = "Hello\n\nAnd again\n/clear\nHello\n/exit\nnever\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert run(folder, *SHORT) == 0
    shown = capsys.readouterr()
    first, second = replies(model, "Hello", "And again")
    assert shown.out == f"{first}\n{second}\n{first}\n"
    assert f"reading weights from {folder}\n" in shown.err
    assert f"{model.count_params():,} parameters, read in " in shown.err
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    assert run(folder, *SHORT, "--system", "Be brief.") == 0
    assert capsys.readouterr().out.rstrip("\n") == replies(model, "Hello", system="Be brief.")[0]


def test_an_assistant_changes_no_reply(tiny, monkeypatch, capsys):
    model, folder = tiny
    wanted = replies(model, "Hello")[0]
    for flags in (
        ("--assistant", folder, "--num-assistant-tokens", "2"),
        ("--prompt-lookup-num-tokens", "2"),
    ):
        monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
        assert run(folder, *SHORT, *flags) == 0
        shown = capsys.readouterr()
        assert shown.out == f"{wanted}\n"
        assert shown.err.count(f"reading weights from {folder}\n") == 1 + ("--assistant" in flags)


@pytest.mark.once
def test_as_a_process_of_its_own(tiny):
    model, folder = tiny
    done = subprocess.run(
        [sys.executable, "-m", "kmodels", "chat", str(folder), *SHORT],
        input="Hello\n",
        capture_output=True,
        text=True,
        env=os.environ,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, replies(model, "Hello")[0] + "\n")


def on_terminal(conversation, monkeypatch, *typed):
    """What is shown to somebody who types these lines; exceptions are keys."""
    left = iter(typed)

    def read(prompt):
        assert prompt == terminal.PROMPT
        line = next(left, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    shown = io.StringIO()
    console = Console(file=shown, width=80, highlight=False)
    monkeypatch.setattr(terminal, "Console", lambda **_: console)
    assert terminal.run(conversation) == 0
    return shown.getvalue()


def test_on_a_terminal(tiny, monkeypatch):
    model, _ = tiny
    conversation = Conversation(model, max_new_tokens=6)
    shown = on_terminal(
        conversation, monkeypatch, "Hello", "", KeyboardInterrupt(), "/help", "/nope", "And again"
    )
    first, second = replies(model, "Hello", "And again")
    assert [m["content"] for m in conversation.messages] == ["Hello", first, "And again", second]
    for text in (first, second):
        assert "".join(c for c in text if c.isprintable() or c in "\n\t") in shown
    assert "Ctrl-D or /exit ends the chat" in shown
    assert "/clear  forgets what was said" in shown
    assert "/nope is not a command; /help lists them" in shown
    shown = on_terminal(conversation, monkeypatch, "/clear", "/exit", "never")
    assert conversation.messages == [] and "a new chat" in shown


def test_ctrl_c_stops_a_reply_and_keeps_the_chat(tiny, monkeypatch):
    model, _ = tiny
    conversation = Conversation(model, max_new_tokens=40)
    pieces = []

    def stop(piece):
        pieces.append(piece)
        if len(pieces) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        conversation.ask("Hello", stop)
    assert [m["content"] for m in conversation.messages] == ["Hello", "".join(pieces)]
    conversation.clear()
    # What was stopped leaves nothing behind.
    found = conversation.ask("Hello", pieces.append)
    assert found == replies(model, "Hello", count=40)[0]
    kept = list(conversation.messages)

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(model, "chat", interrupted)
    shown = on_terminal(conversation, monkeypatch, "And again")
    assert "(stopped)" in shown and conversation.messages == kept
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    assert terminal.run(conversation) == terminal.STOPPED


@pytest.mark.once
def test_a_reply_at_the_limit_and_one_that_the_template_refuses(tiny, monkeypatch):
    model, _ = tiny
    conversation = Conversation(model, max_new_tokens=3)
    monkeypatch.setattr(model, "chat", lambda *_, **__: "one two three four five")
    assert "3 tokens: --max-new-tokens" in on_terminal(conversation, monkeypatch, "Hello")

    def refuse(*_, **__):
        raise InputError("the chat template [refuses] this")

    monkeypatch.setattr(model, "chat", refuse)
    before = list(conversation.messages)
    shown = on_terminal(conversation, monkeypatch, "Hello")
    assert "the chat template [refuses] this" in shown and conversation.messages == before

    def write(*_, stream, **__):
        stream(0, "\x1b[2J[bold]\x07plain")
        return "plain"

    monkeypatch.setattr(model, "chat", write)
    assert "[2J[bold]plain\n" in on_terminal(conversation, monkeypatch, "Hello")


def test_an_adapter_and_a_sampler(tiny, tmp_path):
    model, folder = tiny
    tuned = GemmaCausalLM.from_preset(folder)
    tuned.enable_lora(rank=2)
    for variable in tuned.trainable_variables:
        variable.assign(np.full(variable.shape, 0.3, "float32"))
    tuned.save_adapter(tmp_path / "adapter")
    lines = []
    opened = open_conversation(
        str(folder), lines.append, adapter=str(tmp_path / "adapter"), max_new_tokens=6
    )
    assert lines[1] == f"reading the adapter {tmp_path / 'adapter'}"
    assert opened.ask("Hello", lambda _: None) == replies(tuned, "Hello")[0]
    assert replies(tuned, "Hello") != replies(model, "Hello")
    drawn = [
        open_conversation(
            str(folder), lines.append, max_new_tokens=12, sampling={"temperature": 5.0, "seed": 3}
        ).ask("Hello", lambda _: None)
        for _ in range(2)
    ]
    assert drawn[0] == drawn[1] != replies(model, "Hello", count=12)[0]


@pytest.mark.once
def test_how_tokens_are_drawn():
    asked = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert choose_sampler({}, {}) == Sampler(temperature=0.0)
    assert choose_sampler(asked, {}) == Sampler(0.6, top_k=20, top_p=0.95)
    assert choose_sampler(asked, {"temperature": 1.2, "seed": 1}) == Sampler(
        1.2, top_k=20, top_p=0.95, seed=1
    )
    assert choose_sampler({}, {"top_k": 5}) == Sampler(1.0, top_k=5)
    assert choose_sampler({}, {"top_k": 5, "temperature": 0.0}) == Sampler(0.0, top_k=5)


@pytest.mark.once
def test_a_note_of_the_checkpoint_is_a_line(tiny, monkeypatch):
    import warnings

    def from_preset(*_, **__):
        warnings.warn("the vision tower is left out\nsecond line", stacklevel=2)
        return tiny[0]

    monkeypatch.setattr(GemmaCausalLM, "from_preset", from_preset)
    lines = []
    open_conversation(str(tiny[1]), lines.append)
    assert "the vision tower is left out" in lines


@pytest.mark.once
def test_wrong_uses_give_a_line(tiny, tmp_path, capsys):
    model, folder = tiny
    ViTImageClassifier.from_preset("vit_debug", num_classes=2).save_to_preset(tmp_path / "vit")
    GemmaCausalLM(model.backbone).save_to_preset(tmp_path / "mute")
    bare = train_tokenizer(demo.texts(), 500).to_dict()
    bare["json"] = json.dumps(json.loads(bare["json"])).replace("_of_turn>", "_of_talk>")
    GemmaCausalLM(model.backbone, GemmaCausalLMPreprocessor(bare)).save_to_preset(tmp_path / "bare")
    strict = train_tokenizer(demo.texts(), 500)
    strict.chat_template = GEMMA2
    text = GemmaCausalLMPreprocessor(strict)
    GemmaCausalLM(model.backbone, text).save_to_preset(tmp_path / "strict")
    text = GemmaCausalLMPreprocessor(train_tokenizer(demo.texts(), 490))
    GemmaCausalLM(model.backbone, text).save_to_preset(tmp_path / "other")
    both = ["--assistant", folder, "--prompt-lookup-num-tokens", "3"]
    for arguments, words in (
        (["nowhere/model"], "there is no file or directory nowhere/model"),
        (["gemma3_1b"], "gemma3_1b is an architecture without weights; give a directory"),
        ([tmp_path / "vit"], "holds a ViTImageClassifier, which writes no text; give a Gemma"),
        ([tmp_path / "mute"], "mute holds no tokenizer"),
        ([tmp_path / "bare"], "messages need a chat template: the tokenizer has none"),
        ([tmp_path / "strict", "--system", "Be brief."], "no system turn here"),
        ([folder, "--max-new-tokens", "0"], "--max-new-tokens is 0; give at least 1"),
        ([folder, "--temperature", "-1"], "temperature is -1.0; give 0 (greedy) or more"),
        ([folder, "--top-p", "2"], "top_p is 2.0; give a share"),
        ([folder, "--adapter", "nowhere"], "nowhere"),
        ([folder, "--assistant", "nowhere/model"], "there is no file or directory nowhere/model"),
        ([folder, "--assistant", tmp_path / "other"], "a tokenizer with other tokens than"),
        ([folder, *both], "--assistant and --prompt-lookup-num-tokens: give one of them"),
        ([folder, "--num-assistant-tokens", "0"], "--num-assistant-tokens is 0; give at least 1"),
        ([folder, "--prompt-lookup-num-tokens", "0"], "--prompt-lookup-num-tokens is 0; give at"),
        ([folder, "--precision", "float7"], "float7"),
        ([folder, "--temprature", "1"], "unknown flag --temprature; did you mean --temperature?"),
    ):
        assert run(*arguments) == 2, arguments
        shown = capsys.readouterr()
        said = [line for line in shown.err.splitlines() if "reading" not in line]
        assert len(said) == 1 and words in said[0], shown.err
