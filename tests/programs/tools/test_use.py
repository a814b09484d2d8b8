"""`kmodels predict` and `kmodels generate`, as a user types them."""

import io
import json

import numpy as np
import pytest
from PIL import Image

import command_line
import saved_models
from chat_cases import GEMMA3
from kmodels.models import (
    EoMTImageSegmenter,
    ViTBackbone,
    ViTImageClassifier,
    ViTImageClassifierPreprocessor,
)

NAMES = ["cat", "dog", "ox"]


def classifier(folder, **settings):
    model = ViTImageClassifier.from_preset("vit_debug", **{"num_classes": 3, **settings})
    model.preprocessor = ViTImageClassifierPreprocessor((16, 16))
    model.save_to_preset(folder)
    return model


@pytest.fixture
def images(tmp_path):
    folder = tmp_path / "images"
    (folder / "below").mkdir(parents=True)
    rng = np.random.default_rng(0)
    files = [folder / "a.png", folder / "b.png", folder / "below" / "a.png"]
    for i, file in enumerate(files):
        Image.fromarray(rng.integers(0, 255, (20 + i, 30, 3), "uint8")).save(file)
    return files


def run(*arguments):
    return command_line.run(*arguments)


def test_predict_shows_names_for_files_and_folders(tmp_path, images, capsys):
    model = classifier(tmp_path / "run" / "model", class_names=NAMES)
    shares = model.decode_predictions(model.predict(images, verbose=0), top=2)
    assert run("predict", tmp_path / "run", images[0].parent, "--top", 2, "--batch-size", 2) == 0
    lines = capsys.readouterr().out.splitlines()
    for line, file, pairs in zip(lines, images, shares, strict=True):
        shown = ", ".join(f"{name} {share:.1%}" for name, share in pairs)
        assert line.split() == [str(file), *shown.split()]
    assert run("predict", tmp_path / "run/model", images[1], "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["file"] == str(images[1])
    assert [one["label"] for one in row["predictions"][:2]] == [name for name, _ in shares[1]]
    assert sum(one["score"] for one in row["predictions"]) == pytest.approx(1)


def test_json_has_null_for_numbers_that_are_not_finite(tmp_path, images, capsys, monkeypatch):
    classifier(tmp_path / "model", num_classes=1, problem_type="regression")
    outputs = np.array([[np.nan, np.inf]])
    monkeypatch.setattr(ViTImageClassifier, "predict", lambda *_, **settings: outputs)
    assert run("predict", tmp_path / "model", images[0], "--json") == 0
    assert (
        json.loads(capsys.readouterr().out, parse_constant=pytest.fail)[0]["outputs"] == [None] * 2
    )


def test_names_do_not_control_the_terminal(tmp_path, images, capsys):
    model = ViTImageClassifier.from_preset("vit_debug", num_classes=1, class_names=["\x1b[2J"])
    model.preprocessor = ViTImageClassifierPreprocessor((16, 16))
    model.save_to_preset(tmp_path / "model")
    image = images[0].rename(images[0].with_name("a\nb.png"))
    assert run("predict", tmp_path / "model", image) == 0
    printed = capsys.readouterr().out
    assert "a\\nb.png  \\x1b[2J " in printed and printed.count("\n") == 1


def test_predict_goes_on_after_a_file_that_is_no_image(tmp_path, images, capsys):
    classifier(tmp_path / "model", num_classes=1, problem_type="regression")
    images[0].write_text("no image")
    assert run("predict", tmp_path / "model", *images, tmp_path / "absent.png", "--json") == 2
    shown = capsys.readouterr()
    rows = json.loads(shown.out)
    assert [sorted(row) for row in rows] == [
        ["error", "file"], ["file", "outputs"], ["file", "outputs"], ["error", "file"]
    ]  # fmt: skip
    assert len(rows[1]["outputs"]) == 1
    assert "a.png: not an image" in shown.err and "absent.png cannot be read" in shown.err


def test_predict_writes_the_masks_of_a_segmenter(tmp_path, images, capsys):
    model = EoMTImageSegmenter.from_preset(
        "vit_debug", num_classes=3, num_blocks=1, class_names=NAMES
    )
    model.preprocessor = EoMTImageSegmenter.preprocessor_class((16, 16))
    model.save_to_preset(tmp_path / "model")
    expected = model.segment(images)
    masks = tmp_path / "masks"
    assert run("predict", tmp_path / "model", *images, "--masks", masks, "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["mask"] for row in rows] == [
        str(masks / name) for name in ("a.png", "b.png", "a_2.png")
    ]
    before = images[0].read_bytes()
    assert run("predict", tmp_path / "model", images[0], "--masks", images[0].parent) == 2
    assert "a.png is an input, which would be lost" in capsys.readouterr().err
    assert images[0].read_bytes() == before
    for row, mask in zip(rows, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(Image.open(row["mask"])), mask)
        share = {one["label"]: one["score"] for one in row["predictions"]}
        assert share == {n: (mask == i).mean() for i, n in enumerate(NAMES) if (mask == i).any()}


@pytest.fixture
def towers(tmp_path):
    return saved_models.towers(tmp_path / "towers")


def test_predict_asks_two_towers_for_given_names(tmp_path, images, towers, capsys):
    logits = towers.classify([np.asarray(Image.open(images[0]))], ["cat", "dog"])
    best = ["cat", "dog"][logits.argmax()]
    names = ("--names", "cat, dog", "--json")
    assert run("predict", tmp_path / "towers", images[0], *names) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["predictions"][0]["label"] == best
    assert run("predict", tmp_path / "towers", images[0]) == 2
    assert "give the classes by --names cat,dog" in capsys.readouterr().err


def test_wrong_uses_of_predict_are_one_line(tmp_path, images, language, capsys):
    classifier(tmp_path / "model")
    classifier(tmp_path / "numbers", problem_type="regression")
    ViTBackbone.from_preset("vit_debug").save_to_preset(tmp_path / "backbone")
    headless = ViTImageClassifier.from_preset("vit_debug", num_classes=3)
    headless.save_to_preset(tmp_path / "raw")
    (tmp_path / "unfinished/checkpoints").mkdir(parents=True)
    (tmp_path / "adapted/adapter").mkdir(parents=True)
    (tmp_path / "adapted/history.csv").touch()
    (tmp_path / "empty").mkdir()
    wrong = {
        "its own classes; leave --names out": ("model", images[0], "--names", "a"),
        "predicts no masks": ("model", images[0], "--masks", tmp_path / "masks"),
        "holds a ViTBackbone; give a classifier": ("backbone", images[0]),
        "use kmodels generate or kmodels chat": (language[1], images[0]),
        "has no preprocessor": ("raw", images[0]),
        "is an unfinished run": ("unfinished", images[0]),
        "give the base model with --adapter": ("adapted", images[0]),
        "has no images": ("model", tmp_path / "empty"),
        "--top": ("model", images[0], "--top", "0"),
        "--top has no effect on a model without classes": ("numbers", images[0], "--top", "3"),
        "/dev/zero is a device; give a file": ("model", "/dev/zero"),
    }
    for message, (model, *arguments) in wrong.items():
        assert run("predict", tmp_path / model, *arguments) == 2, message
        shown = capsys.readouterr().err
        assert message in shown and shown.count("\n") == 1, shown


# === Texts ===


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    folder = tmp_path_factory.mktemp("language") / "model"
    return saved_models.language(folder), folder


SHORT = ("--max-new-tokens", "6", "--json")
# Writes its tools and a value of its own.
TOLD = "{{ messages[0].content }}{% if tools %}{{ tools | tojson }}{{ mood }}{% endif %}"


def answers(capsys):
    rows = [json.loads(line) for line in capsys.readouterr().out.split("\n") if line]
    return [row["prompt"] for row in rows], [row["reply"] for row in rows]


@pytest.mark.each_backend("nightly")
def test_generate_answers_the_prompts_of_a_file(tmp_path, language, capsys, monkeypatch):
    model, folder = language
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Hello\n\nThe sun is\u2028warm\n")
    given = ["Hello", "The sun is\u2028warm"]
    assert run("generate", folder, "--prompts", prompts, *SHORT) == 0
    expected = model.generate(given, strip_prompt=True, max_new_tokens=6)
    assert answers(capsys) == (given, expected)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    assert run("generate", folder, "--prompts", "-", "--as", "instruction", *SHORT) == 0
    record = {"instruction": "Hello", "context": ""}
    assert answers(capsys)[1] == model.generate([record], strip_prompt=True, max_new_tokens=6)


def test_generate_reads_records_and_chats(tmp_path, language, capsys):
    model, _ = language
    model.preprocessor.tokenizer.chat_template = GEMMA3
    try:
        model.save_to_preset(tmp_path / "run/model")
        chat = [{"role": "user", "content": "Hello"}]
        record = {"instruction": "Say", "context": "it"}
        file = tmp_path / "prompts.jsonl"
        rows = [{"messages": chat}, {"prompt": "Hello"}, {"instruction": "Say", "input": "it"}]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert run("generate", tmp_path / "run", "--prompts", file, "--batch-size", 2, *SHORT) == 0
        asked, replies = answers(capsys)
        reply = model.chat(chat, max_new_tokens=6)
        written = model.generate([record], strip_prompt=True, max_new_tokens=6)
        assert asked == [chat, "Hello", record] and replies == [reply, reply, *written]
        tools = [{"type": "function", "function": {"name": "f"}}]
        model.preprocessor.tokenizer.chat_template = TOLD
        model.save_to_preset(tmp_path / "told")
        rows = [{"messages": chat, "tools": tools, "chat_template_kwargs": {"mood": "x"}}, rows[0]]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert run("generate", tmp_path / "told", "--prompts", file, *SHORT) == 0
        _, replies = answers(capsys)
        wanted = [model.chat(chat, tools, mood="x", max_new_tokens=6)]
        assert replies == [*wanted, model.chat(chat, max_new_tokens=6)] and len(set(replies)) == 2
    finally:
        model.preprocessor.tokenizer.chat_template = None


def test_fields_of_other_packages_are_named(tmp_path, language, capsys):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a", "system": "be good", "history": [], "id": 3}')
    assert run("generate", language[1], "--prompts", file, *SHORT) == 0
    assert (
        "prompts.jsonl has system, which kmodels does not read; give messages"
        in capsys.readouterr().err
    )


def test_wrong_prompts_are_one_line(tmp_path, language, capsys):
    for content, message in {
        '{"question": "a"}': "line 1: a record has no prompt",
        '{"prompt": ""}': "line 1: a record has no prompt",
        "[1]": "record 1: a record has no prompt",
        "": "holds no prompts",
        "{": "line 1: not JSON",
        '{"messages": [{"role": "user", "content": "a"}], "images": ["a.png"]}': "images are read",
        '{"messages": [{"role": "user", "content": "a"}], "tools": 3}': "'tools' is not a list of",
        '{"prompt": "a", "tools": [{}]}': "line 1: tools need messages; the record has texts",
    }.items():
        file = tmp_path / "prompts.json"
        file.write_text(content)
        assert run("generate", language[1], "--prompts", file) == 2
        assert message in capsys.readouterr().err
    absent = ("--prompts", tmp_path / "absent.txt")
    assert run("generate", language[1], *absent) == 2
    assert "absent.txt cannot be read" in capsys.readouterr().err
    assert run("generate", language[1], *absent, "--as", "poem") == 2
    assert "--as is 'poem'; choose one of chat, instruction, text" in capsys.readouterr().err
    greedy = ("--temperature", "0", "--top-k", "3")
    assert run("generate", tmp_path / "absent", *absent, *greedy) == 2
    assert "--top-k has no effect at temperature 0" in capsys.readouterr().err
    language[0].export_to_transformers(damaged := tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes(b"")  # which would be read next
    (damaged / "generation_config.json").write_text('{"do_sample": true, "top_p": 2.0}')
    (tmp_path / "prompts.txt").write_text("a")
    for command in (("generate", "--prompts", tmp_path / "prompts.txt"), ("chat",)):
        assert run(command[0], *command[1:], damaged) == 2
        assert "top_p is 2.0" in capsys.readouterr().err
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"messages": [{"role": "user", "content": "a"}]}')
    for flags, message in (
        (("--as", "text"), "--as has no effect on the records of"),
        (("--seed", 3, "--stop", "x"), "--seed has no effect at temperature 0, where nothing is"),
        (("--temperature", 0, "--top-k", 3, "--min-p", 0.1), "--top-k, --min-p has no effect at"),
    ):
        assert run("generate", language[1], "--prompts", chats, *flags) == 2
        assert message in capsys.readouterr().err
