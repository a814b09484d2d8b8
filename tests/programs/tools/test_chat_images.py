"""`kmodels chat --image`: what a model is asked, and models that take only text."""

import io

import keras
import numpy as np
import pytest
from PIL import Image

from kmodels.core.errors import InputError
from kmodels.models import GemmaCausalLM, GemmaCausalLMPreprocessor
from kmodels.text import demo
from kmodels.text.training import train_tokenizer
from kmodels.tools import cli
from kmodels.tools.chat import conversation, terminal
from kmodels.tools.chat.conversation import Conversation, open_conversation

pytestmark = pytest.mark.once


@pytest.fixture
def picture(tmp_path):
    file = tmp_path / "a.png"
    Image.fromarray(np.zeros((5, 6, 3), "uint8")).save(file)
    return str(file)


class TakesImages:
    """Stands for a preprocessor and a model with images; it keeps what it is asked."""

    takes_images = True

    def __init__(self):
        self.preprocessor = self
        self.asked = []

    def chat(self, messages, stream, **options):
        self.asked.append(messages)
        if isinstance(reply := self.reply, BaseException):
            raise reply
        stream(0, reply)
        return reply

    reply = "so"


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
    with pytest.raises(InputError, match="/image names no file; give /image FILE"):
        said.attach("")
    with pytest.raises(InputError, match=r"no\.png cannot be read: No such file"):
        said.attach("no.png")
    assert said.images == []


def test_commands_through_a_pipe_and_on_a_terminal(picture, monkeypatch, capsys):
    model = TakesImages()
    monkeypatch.setattr("sys.stdin", io.StringIO(f"/image {picture}\nwhat?\n"))
    assert terminal.run(Conversation(model)) == 0
    assert model.asked == [[asks("what?", picture)]] and capsys.readouterr().out == "so\n"
    model, shown = TakesImages(), io.StringIO()
    model.tokenizer = type("Words", (), {"tokenize": staticmethod(str.split)})
    lines = iter([f"/image {picture}", "/image no.png", "/image", "/help", "what?"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines, "/exit"))
    console = terminal.Console(file=shown, width=200, highlight=False)
    assert terminal._on_terminal(Conversation(model), console) == 0
    assert model.asked == [[asks("what?", picture)]]
    for line in (
        f"{picture} goes with the next question",
        "no.png cannot be read",
        "/image names no file; give /image FILE",
        "/image  adds an image to the next question: /image FILE",
    ):
        assert line in shown.getvalue()


def test_models_of_text_alone(picture, tmp_path, monkeypatch, capsys):
    keras.utils.set_random_seed(0)
    tokenizer = train_tokenizer(demo.texts(), 500)
    model = GemmaCausalLM.from_preset(
        "gemma3_debug",
        vocabulary_size=tokenizer.vocabulary_size(),
        preprocessor=GemmaCausalLMPreprocessor(tokenizer),
    )
    model.save_to_preset(tmp_path / "model")
    with pytest.raises(SystemExit) as stop:
        cli.main(["chat", str(tmp_path / "model"), "--image", picture])
    assert stop.value.code == 2
    shown = capsys.readouterr().err
    assert "--image needs a model that takes images; GemmaCausalLM takes only text" in shown
    assert "reading weights" not in shown
    with pytest.raises(InputError, match="/image needs a model that takes images; GemmaCausalLM"):
        Conversation(model).attach(picture)


def test_wrong_images_are_found_before_the_weights(picture, references, tmp_path, monkeypatch):
    from gemma3_processor_case import ProcessorCase

    text = ProcessorCase(references).preprocessor()

    class Model:
        preprocessor_class = type("Reads", (), {"from_preset": staticmethod(lambda path: text)})

        @staticmethod
        def from_preset(path, **settings):
            raise AssertionError("weights are read")

    monkeypatch.setattr(conversation.presets, "causal_lm_of", lambda path, whole: Model)
    damaged = tmp_path / "damaged.png"
    damaged.write_bytes(b"no image")
    for images, message in (
        (["https://a.b/c.png"], "is an address of the web; download it first"),
        ([str(damaged)], "not a JPEG, PNG or WebP image"),
    ):
        with pytest.raises(InputError, match=message):
            open_conversation("model", print, images=images)
    with pytest.raises(AssertionError, match="weights are read"):
        open_conversation("model", print, images=[picture])
