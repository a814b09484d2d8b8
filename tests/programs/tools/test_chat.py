"""`kmodels chat`: replies, history, commands, images, and wrong uses."""

import io
import json
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

import command_line
import saved_models
from chat_cases import GEMMA2, GEMMA3
from gemma3_processor_case import ProcessorCase
from kmodels.core.errors import InputError
from kmodels.generation import Sampler
from kmodels.generation.generation_config import sampler_of
from kmodels.models import GemmaCausalLM, GemmaCausalLMPreprocessor, ViTImageClassifier
from kmodels.text import demo
from kmodels.text.training import train_tokenizer
from kmodels.tools import chat
from kmodels.tools.chat import Conversation, open_conversation
from refusals import refused

SHORT = ("--max-new-tokens", "6")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat") / "gemma"
    return saved_models.language(folder, GEMMA3), folder


def run(*arguments):
    return command_line.run("chat", *arguments)


def replies(model, *questions, system=None, count=6):
    """What the model says to one question after another."""
    said = [] if system is None else [{"role": "system", "content": system}]
    found = []
    for question in questions:
        said.append({"role": "user", "content": question})
        found.append(model.chat(said, max_new_tokens=count))
        said.append({"role": "assistant", "content": found[-1]})
    return found


@pytest.mark.each_backend("nightly")
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


def on_terminal(talk, monkeypatch, *typed):
    """What is shown to somebody who types these lines; exceptions are keys."""
    left = iter(typed)

    def read(prompt):
        assert prompt == chat.PROMPT
        line = next(left, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    shown = io.StringIO()
    console = Console(file=shown, width=200, highlight=False)
    monkeypatch.setattr(chat, "Console", lambda **_: console)
    assert chat.run(talk) == 0
    return shown.getvalue()


def test_on_a_terminal(tiny, monkeypatch):
    model, _ = tiny
    talk = Conversation(model, max_new_tokens=6)
    shown = on_terminal(
        talk, monkeypatch, "Hello", "", KeyboardInterrupt(), "/help", "/nope", "And again"
    )
    first, second = replies(model, "Hello", "And again")
    assert [m["content"] for m in talk.messages] == ["Hello", first, "And again", second]
    for text in (first, second):
        assert "".join(c for c in text if c.isprintable() or c in "\n\t") in shown
    assert "Ctrl-D or /exit ends the chat" in shown
    assert "/clear  starts a new chat" in shown
    assert "/nope is not a command; /help lists them" in shown
    shown = on_terminal(talk, monkeypatch, "/clear", "/exit", "never")
    assert talk.messages == [] and "a new chat" in shown


def test_ctrl_c_stops_a_reply_and_keeps_the_chat(tiny, monkeypatch, capsys):
    model, folder = tiny
    talk = Conversation(model, max_new_tokens=40)
    pieces = []

    def stop(piece):
        pieces.append(piece)
        if len(pieces) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        talk.ask("Hello", stop)
    assert [m["content"] for m in talk.messages] == ["Hello", "".join(pieces)]
    talk.clear()
    # What was stopped leaves nothing behind.
    found = talk.ask("Hello", pieces.append)
    assert found == replies(model, "Hello", count=40)[0]
    kept = list(talk.messages)

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(model, "chat", interrupted)
    shown = on_terminal(talk, monkeypatch, "And again")
    assert "(stopped)" in shown and talk.messages == kept
    monkeypatch.setattr(type(model), "chat", interrupted)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    assert run(folder) == 130
    assert capsys.readouterr().err.endswith("\nkmodels: stopped\n")


def test_a_reply_at_the_limit_and_one_that_the_template_refuses(tiny, monkeypatch):
    model, _ = tiny
    talk = Conversation(model, max_new_tokens=3)
    monkeypatch.setattr(model, "chat", lambda *_, **__: "one two three four five")
    assert "3 tokens: --max-new-tokens" in on_terminal(talk, monkeypatch, "Hello")

    def refuse(*_, **__):
        raise InputError("the chat template [refuses] this")

    monkeypatch.setattr(model, "chat", refuse)
    before = list(talk.messages)
    shown = on_terminal(talk, monkeypatch, "Hello")
    assert "the chat template [refuses] this" in shown and talk.messages == before

    def write(*_, stream, **__):
        stream(0, "\x1b[2J[bold]\x07plain")
        return "plain"

    monkeypatch.setattr(model, "chat", write)
    assert "[2J[bold]plain\n" in on_terminal(talk, monkeypatch, "Hello")


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


def test_how_tokens_are_drawn():
    asked = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert sampler_of({}) == Sampler(temperature=0.0)
    assert sampler_of(asked) == Sampler(0.6, top_k=20, top_p=0.95)
    changed = sampler_of(asked).changed(temperature=1.2, seed=1)
    assert changed == Sampler(1.2, top_k=20, top_p=0.95, seed=1)
    assert sampler_of({}).changed(top_k=5) == Sampler(1.0, top_k=5)
    assert sampler_of(asked).changed(temperature=0.0) == Sampler(0.0)
    assert sampler_of({**asked, "temperature": 0.0}) == Sampler(0.0)
    for given in ({"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}):
        for draw in (Sampler, sampler_of({}).changed, sampler_of(asked).changed):
            refused(f"is 0 .greedy., at which {next(iter(given))}", draw, temperature=0.0, **given)
    assert Sampler(0.0, top_p=1.0, min_p=0.0).greedy


def test_a_note_of_the_checkpoint_is_a_line(tiny, monkeypatch):
    import warnings

    def from_preset(*_, **__):
        warnings.warn("the vision tower is left out\nsecond line", stacklevel=2)
        return tiny[0]

    monkeypatch.setattr(GemmaCausalLM, "from_preset", from_preset)
    lines = []
    open_conversation(str(tiny[1]), lines.append)
    assert "the vision tower is left out" in lines


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
        (
            ["absent", "--temperature", "0", "--top-p", "0.5"],
            "--top-p has no effect at temperature 0",
        ),
        ([folder, "--assistant", tmp_path / "other"], "has another vocabulary than"),
        (
            [folder, *both],
            "--assistant and --prompt-lookup-num-tokens exclude each other; give one of them",
        ),
        (
            [folder, "--assistant", folder, "--num-assistant-tokens", "0"],
            "--num-assistant-tokens is 0; give at least 1",
        ),
        ([folder, "--num-assistant-tokens", "5"], "has no effect without --assistant; leave it"),
        ([folder, "--prompt-lookup-num-tokens", "0"], "--prompt-lookup-num-tokens is 0; give at"),
        (
            [folder, "--top-p", "0.5", "--temperature", "0"],
            "--top-p has no effect at temperature 0",
        ),
    ):
        assert run(*arguments) == 2, arguments
        shown = capsys.readouterr()
        said = [line for line in shown.err.splitlines() if "read" not in line]
        assert len(said) == 1 and words in said[0], shown.err


# === Images ===


@pytest.fixture
def picture(tmp_path):
    file = tmp_path / "a.png"
    Image.fromarray(np.zeros((5, 6, 3), "uint8")).save(file)
    return str(file)


class TakesImages:
    """Stands for a preprocessor and a model with images; it keeps what it is asked."""

    takes_images = True
    tokenizer: Any

    def __init__(self):
        self.preprocessor = self
        self.asked = []

    def chat(self, messages, stream, **options):
        self.asked.append(messages)
        if isinstance(reply := self.reply, BaseException):
            raise reply
        stream(0, reply)
        return reply

    reply: Any = "so"


def asks(text, *images):
    parts = [{"type": "image", "path": image} for image in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def test_images_go_with_the_next_question(picture):
    model = TakesImages()
    said = Conversation(model, images=[picture])
    model.reply = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        said.ask("what?", print)
    assert said.messages == [] and said.images == [picture]  # nothing was said
    model.reply = "this"
    said.ask("what?", lambda piece: None)
    said.attach(picture)
    said.attach(picture)
    said.ask("and?", lambda piece: None)
    said.ask("no more", lambda piece: None)
    answer = {"role": "assistant", "content": "this"}
    first, second = asks("what?", picture), asks("and?", picture, picture)
    assert model.asked[1:] == [
        [first],
        [first, answer, second],
        [first, answer, second, answer, {"role": "user", "content": "no more"}],
    ]
    refused("/image names no file; give /image FILE", said.attach, "")
    refused(r"no\.png cannot be read: No such file", said.attach, "no.png")
    assert said.images == []


def test_commands_through_a_pipe_and_on_a_terminal(picture, monkeypatch, capsys):
    model = TakesImages()
    monkeypatch.setattr("sys.stdin", io.StringIO(f"/image {picture}\nwhat?\n"))
    assert chat.run(Conversation(model)) == 0
    assert model.asked == [[asks("what?", picture)]] and capsys.readouterr().out == "so\n"
    model = TakesImages()
    model.tokenizer = type("Words", (), {"tokenize": staticmethod(str.split)})
    lines = f"/image {picture}", "/image no.png", "/image", "/help", "what?"
    shown = on_terminal(Conversation(model), monkeypatch, *lines)
    assert model.asked == [[asks("what?", picture)]]
    for line in (
        f"{picture} goes with the next question",
        "no.png cannot be read",
        "/image names no file; give /image FILE",
        "/image  adds an image to the next question: /image FILE",
    ):
        assert line in shown


def test_models_of_text_alone(tiny, picture, capsys):
    model, folder = tiny
    assert run(folder, "--image", picture) == 2
    shown = capsys.readouterr().err
    assert "--image needs a model that takes images; GemmaCausalLM takes only text" in shown
    assert "reading weights" not in shown
    with pytest.raises(InputError, match="/image needs a model that takes images; GemmaCausalLM"):
        Conversation(model).attach(picture)


def test_wrong_images_are_found_before_the_weights(picture, references, tmp_path, monkeypatch):
    text = ProcessorCase(references).preprocessor()

    class Model:
        preprocessor_class = type("Reads", (), {"from_preset": staticmethod(lambda path: text)})

        @staticmethod
        def from_preset(path, **settings):
            raise AssertionError("weights are read")

    monkeypatch.setattr(chat.presets, "causal_lm_of", lambda path, whole: Model)
    path = references / "gemma3_vision" / "model"
    damaged = tmp_path / "damaged.png"
    damaged.write_bytes(b"no image")
    for images, message in (
        (["https://a.b/c.png"], "is an address of the web; download it first"),
        ([str(damaged)], "not an image that Pillow reads"),
    ):
        refused(message, open_conversation, path, print, images=images)
    with pytest.raises(AssertionError, match="weights are read"):
        open_conversation(path, print, images=[picture])
