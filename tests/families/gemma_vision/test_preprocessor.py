"""Records with images, packed rows, labels and weights, saving, and what is refused."""

import copy
import io
import json
import re
import shutil

import keras
import numpy as np
import pytest
from PIL import Image

from gemma3_processor_case import END, SOFT, START, ProcessorCase
from kmodels.data.pipeline.kinds import as_dataset
from kmodels.models import (
    Gemma3CausalLMPreprocessor,
    Gemma3ImageConverter,
    Gemma3ImageTextLMPreprocessor,
    GemmaTokenizer,
)
from kmodels.models.gemma_vision import preprocessor
from kmodels.text import Tokenizer
from refusals import refused
from torchvision_cpu import define_torchvision_operators

LENGTH = 48
SAID = [{"role": "user", "content": "what"}, {"role": "assistant", "content": "that"}]


@pytest.fixture(scope="module")
def case(references):
    return ProcessorCase(references)


@pytest.fixture(scope="module")
def text(case):
    return case.preprocessor(sequence_length=LENGTH)


@pytest.fixture(scope="module")
def records(case):
    """Records of each form, with two, one and no images."""
    wide, square, tall = map(case.picture, ("wide3.jpg", "square.png", "tall4.png"))
    return [
        {"prompts": f"a {START} or {START}", "responses": "both", "images": [wide, str(square)]},
        {"prompts": "no image", "responses": "none"},
        {"messages": SAID, "images": [tall.read_bytes()]},
        {"text": "a caption", "image": Image.open(io.BytesIO(square.read_bytes()))},
        {"instruction": f"what is {START}", "response": "it", "images": wide},
    ]


def ids_of(text, *parts):
    return [i for part in parts for i in text.tokenizer.tokenize(part)]


def image(text):
    soft = SOFT * text.num_vision_tokens_per_image
    return f"\n\n{START}{soft}{END}\n\n"


def test_inputs_labels_and_weights(text, records):
    x, labels, weights = text(records)
    shapes = {name: (value.shape, value.dtype.name) for name, value in x.items()}
    assert shapes == {
        "token_ids": ((5, LENGTH), "int32"),
        "padding_mask": ((5, LENGTH), "int32"),
        "images": ((5, 2, 20, 20, 3), "float32"),
        "vision_indices": ((5, 8), "int32"),
        "vision_mask": ((5, LENGTH), "int32"),
    }
    prompt = ids_of(text, f"a {image(text)} or {image(text)}")
    reply = [*ids_of(text, "both"), text.tokenizer.end_token_id]
    whole = [text.tokenizer.start_token_id, *prompt, *reply]
    assert x["token_ids"][0][: len(whole)].tolist() == whole
    assert labels[0][: len(whole) - 1].tolist() == whole[1:]
    assert weights[0].tolist() == [0] * len(prompt) + [1] * len(reply) + [0] * (
        LENGTH - len(prompt) - len(reply)
    )
    # In the order of the record, normalized, zeros behind.
    converter = text.image_converter
    for row, images in enumerate([[0, 3], [], [2], [3], [0]]):
        held = [records[0]["images"][0], None, records[2]["images"][0], records[3]["image"]]
        for place, number in enumerate(images):
            np.testing.assert_array_equal(x["images"][row, place], converter([held[number]])[0])
        assert not x["images"][row, len(images) :].any()
        assert x["vision_mask"][row].sum() == 4 * len(images)
        (places,) = np.nonzero(x["vision_mask"][row])
        assert x["vision_indices"][row].tolist() == [*places, *[0] * (8 - len(places))]
    # Messages without a place for their image have it before the first text.
    turn = ids_of(text, f"<start_of_turn>user\n{image(text)}what<end_of_turn>\n")
    assert x["token_ids"][2][1 : 1 + len(turn)].tolist() == turn
    # A caption is learnt behind its image.
    caption = ids_of(text, image(text))
    assert x["token_ids"][3][1 : 1 + len(caption)].tolist() == caption
    assert weights[3].sum() == len(ids_of(text, "a caption")) + 1


def test_image_tokens_are_not_learnt(case, records):
    text = case.preprocessor(sequence_length=LENGTH, loss_on="all")
    x, labels, weights = text(records)
    soft = labels == text.image_token_id
    assert soft.sum() == 4 * 5 and not weights[soft].any()
    assert weights[x["padding_mask"].astype(bool) & ~soft].sum() > 60
    assert weights[0][0] == 1  # the start of the image's text is
    packed = text.pack(records)
    assert not packed[2][packed[1] == text.image_token_id].any()
    assert packed[2].sum() == weights.sum()


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("crops", [True, False])
def test_replies_between_images(case, own, crops):
    text = case.preprocessor("old", crops, sequence_length=400)
    if not own:
        text.tokenizer.chat_template = None
    wide, square = case.picture("wide2.png"), case.picture("square.png")
    image = [{"type": "image", "image": wide}]
    said = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": [*image, {"type": "text", "text": " what is it? "}]},
        {"role": "assistant", "content": "two things"},
        {"role": "user", "content": [{"type": "text", "text": "and"}, *image, *image]},
        {"role": "assistant", "content": [{"type": "text", "text": "so"}]},
        {"role": "user", "content": f"{START} last?"},
        {"role": "assistant", "content": "kind"},
    ]
    text.max_images_per_prompt = 4
    x, labels, weights = text({"messages": said, "images": square})
    assert x["images"].shape[0] == (3 * 3 + 1 if crops else 4)
    np.testing.assert_array_equal(x["images"][-1], text.image_converter(square))
    learnt = text.tokenizer.decode(labels[weights == 1])
    assert learnt == "two things<end_of_turn>so<end_of_turn>kind<end_of_turn>"
    found = text.tokenizer.decode(x["token_ids"][x["padding_mask"] == 1])
    assert found.count(SOFT) == 4 * len(x["images"])
    assert found.startswith("<bos><start_of_turn>user\nbe kind\n\n")


def test_one_record(text, records):
    x, labels, weights = text(records)
    for row in (0, 1):
        alone, label, weight = text(records[row])
        assert alone["images"].shape == (2 - 2 * row, 20, 20, 3)
        assert alone["vision_indices"].shape == (8 - 8 * row,)
        for name in ("token_ids", "padding_mask", "vision_mask"):
            np.testing.assert_array_equal(alone[name], x[name][row])
        np.testing.assert_array_equal(alone["images"], x["images"][row, : 2 - 2 * row])
        np.testing.assert_array_equal(label, labels[row])
        np.testing.assert_array_equal(weight, weights[row])
    # What the model takes goes through.
    assert text(x) is x


def test_texts_alone(text, case):
    plain = Gemma3CausalLMPreprocessor(text.tokenizer, sequence_length=LENGTH)
    for given in (
        ["a text", "two"],
        "a text",
        {"prompts": ["a", "b"], "responses": ["c", "d"]},
        [{"messages": SAID}, "a text"],
    ):
        (ours, *rest), (theirs, *others) = text(given), plain(given)
        for name, value in theirs.items():
            np.testing.assert_array_equal(ours.pop(name), value)
        assert not ours.pop("vision_mask").any()
        assert ours.pop("images").shape[-4:] == (0, 20, 20, 3)
        assert ours.pop("vision_indices").shape[-1] == 0 and not ours
        for one, other in zip(rest, others, strict=True):
            np.testing.assert_array_equal(one, other)
        assert text.generate_preprocess(given)["images"].shape[-4] == 0


@pytest.mark.parametrize(
    "columns",
    [
        lambda a, b: [[a, b], [a]],
        lambda a, b: np.array([[a, b], [a]], dtype=object),
        lambda a, b: [[Image.open(a).convert("RGB"), b.read_bytes()], str(a)],
    ],
)
def test_columns(text, case, columns):
    a, b = case.picture("square.png"), case.picture("nearly.png")
    rows = [
        {"prompts": f"{START} and {START}", "responses": "x", "images": [a, b]},
        {"prompts": START, "responses": "y", "images": a},
    ]
    given = {name: [row[name] for row in rows] for name in ("prompts", "responses")}
    found = text({**given, "images": columns(a, b)})
    for one, other in zip(keras.tree.flatten(found), keras.tree.flatten(text(rows)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_arrays_as_keras_hub_takes_them(text):
    pixels = np.random.default_rng(0).integers(0, 256, (2, 2, 9, 7, 3)).astype("uint8")
    each = {"prompts": [f"{START} a", f"b {START}"], "responses": ["x", "y"]}
    one = text({**each, "images": pixels[:, 0]})[0]["images"]
    assert one.shape == (2, 1, 20, 20, 3)
    np.testing.assert_array_equal(one[:, 0], text.image_converter(pixels[:, 0]))
    both = {"prompts": [f"{START} {START}"] * 2, "responses": ["x", "y"], "images": pixels}
    two = text(both)[0]["images"]
    np.testing.assert_array_equal(
        two.reshape(4, 20, 20, 3), text.image_converter([*pixels[0], *pixels[1]])
    )
    alone = {"prompts": f"{START} {START}", "responses": "x", "images": pixels[0]}
    np.testing.assert_array_equal(text(alone)[0]["images"], two[0])


@pytest.mark.parametrize("crops", [False, True])
def test_packed_rows(case, records, crops):
    text = case.preprocessor(crops=crops, sequence_length=400 if crops else 70)
    x, labels, weights = text.pack(records)
    alone, alone_labels, alone_weights = text(records)
    assert len(labels) < len(records)
    assert x["images"].shape[1] > alone["images"].shape[1]
    found = []
    for row in range(len(labels)):
        at = 0
        for segment in range(1, x["segment_ids"][row].max() + 1):
            there = x["segment_ids"][row] == segment
            size = there.sum()
            ids = x["token_ids"][row][there]
            same = (alone["token_ids"][:, :size] == ids).all(1) & (
                alone["padding_mask"].sum(1) >= size
            )
            number = int(np.flatnonzero(same)[0])
            found.append(number)
            np.testing.assert_array_equal(labels[row][there], alone_labels[number][:size])
            np.testing.assert_array_equal(weights[row][there], alone_weights[number][:size])
            assert x["positions"][row][there].tolist() == list(range(size))
            places = x["vision_mask"][row] * there
            count = places.sum() // 4
            # The images of an example follow those of the examples before it.
            theirs = alone["images"][number, :count]
            np.testing.assert_array_equal(x["images"][row, at : at + count], theirs)
            indices = x["vision_indices"][row, 4 * at : 4 * (at + count)]
            np.testing.assert_array_equal(indices, np.flatnonzero(places))
            at += count
        assert not x["images"][row, at:].any() and not x["vision_indices"][row, 4 * at :].any()
    assert sorted(found) == list(range(len(records)))


def test_data_of_fit(text, case, records):
    expected = text(records[:4])
    batches = {
        "records": as_dataset(records[:4], batch_size=4, preprocess=text)[0],
        "lists of records": next(iter(as_dataset(iter([records[:2]]), preprocess=text).raw())),
        "a longer list": next(iter(as_dataset(iter([records[:4]]), preprocess=text).raw())),
    }
    for name, found in batches.items():
        for part, whole in zip(found, expected, strict=True):
            pairs = part.items() if isinstance(part, dict) else [(None, part)]
            for key, value in pairs:
                held = whole if key is None else whole[key]
                np.testing.assert_array_equal(value, held[: len(value)], err_msg=name)
    a = case.picture("square.png")
    columns = {"prompts": [f"a {START}", "b"], "responses": ["x", "y"], "images": [[a], []]}
    x, _, weights = as_dataset(columns, batch_size=2, preprocess=text)[0]
    assert x["images"].shape == (2, 1, 20, 20, 3) and weights.sum() == 4
    # Bytes that end in zeros stay what they are.
    padded = {**records[1], "prompts": START, "images": a.read_bytes() + bytes(9)}
    assert as_dataset([padded], preprocess=text)[0][0]["images"].any()


@pytest.mark.needs("datasets")
def test_hugging_face_data(text, case):
    import datasets

    rows = [
        {
            "messages": [{**turn, "content": turn["content"]} for turn in SAID],
            "images": ["square.png"],
        },
        {"messages": SAID, "images": ["nearly.png", "wide2.png"]},
    ]
    read = [{**row, "images": [str(case.picture(one)) for one in row["images"]]} for row in rows]
    features = datasets.Features(
        {
            "messages": [{"role": datasets.Value("string"), "content": datasets.Value("string")}],
            "images": [datasets.Image()],
        }
    )
    data = datasets.Dataset.from_list(read, features=features)
    found = as_dataset(data, batch_size=2, preprocess=text)[0]
    for one, other in zip(keras.tree.flatten(found), keras.tree.flatten(text(read)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_saving(case, tmp_path, records):
    text = case.preprocessor(
        crops=True, sequence_length=300, max_images_per_prompt=3, template="gemma", loss_on="all"
    )
    expected = keras.tree.flatten(text(records))
    text.save_to_preset(tmp_path)
    held = json.loads((tmp_path / "preprocessor.json").read_text())
    assert held["class_name"] == "Gemma3ImageTextLMPreprocessor"
    for again in (
        Gemma3ImageTextLMPreprocessor.from_preset(tmp_path),
        Gemma3ImageTextLMPreprocessor(**text.to_dict()),
        keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(text)),
        copy.deepcopy(text),
    ):
        assert again.max_images_per_prompt == 3
        for one, other in zip(keras.tree.flatten(again(records)), expected, strict=True):
            np.testing.assert_array_equal(one, other)
    converter = Gemma3ImageConverter.from_preset(tmp_path, image_size=(10, 10))
    assert converter.do_pan_and_scan and converter.size == (10, 10)
    alone = tmp_path / "converter"
    converter.save_to_preset(alone)
    assert Gemma3ImageConverter.from_preset(alone).to_dict() == converter.to_dict()


def test_answers_lose_what_images_fill(text, case):
    given = {"prompts": f"a {START} b", "images": case.picture("square.png")}
    found = text.generate_preprocess(given)
    assert text.generate_postprocess(found) == "a \n\n\n\n b"
    batch = text.generate_preprocess([given, "c"])
    assert text.generate_postprocess(batch) == ["a \n\n\n\n b", "c"]


def _read(case, folder, changes):
    shutil.copytree(case.folder / "model", folder, dirs_exist_ok=True)
    file = folder / "processor_config.json"
    described = json.loads(file.read_text())
    described["image_processor"] |= changes
    file.write_text(json.dumps(described))
    return Gemma3ImageTextLMPreprocessor.from_preset(folder).image_converter


@pytest.mark.needs("transformers")
def test_settings_of_a_processor_that_are_written_in_other_ways(case, tmp_path, caplog):
    define_torchvision_operators()
    from transformers import Gemma3ImageProcessor, Gemma4ImageProcessor

    side = {"height": 20, "width": 20}
    each = {"image_mean": [0.3] * 3, "image_std": [0.4] * 3, "size": side}
    expected = _read(case, tmp_path, each).to_dict()
    for changes in ({"image_mean": 0.3}, {"image_std": 0.4}, {"size": 20}, {"size": [20, 20]}):
        assert _read(case, tmp_path, {**each, **changes}).to_dict() == expected
    assert _read(case, tmp_path, {**each, "rescale_factor": None}).to_dict() == expected
    for theirs in (Gemma3ImageProcessor, Gemma4ImageProcessor):
        assert not set(theirs.valid_kwargs.__annotations__) - preprocessor.KNOWN
    assert not caplog.text
    _read(case, tmp_path, {"do_flip": True})
    assert "processor_config.json sets do_flip, which kmodels does not know" in caplog.text


@pytest.mark.parametrize(
    "changes", [{"image_mean": [0.5]}, {"image_std": [0.5] * 4}, {"image_std": [0.5, 0, 0.5]}]
)
def test_means_that_do_not_fit_the_channels(case, tmp_path, changes):
    ((name, value),) = changes.items()
    line = f"{name} is .{value[0]}.*; give 3 numbers, and deviations above 0"
    refused(line, _read, case, tmp_path, changes)


def test_what_is_refused(text, case, records, tmp_path):
    square = case.picture("square.png")
    damaged = tmp_path / "damaged.png"
    damaged.write_bytes(square.read_bytes()[:100])
    one = {"prompts": START, "responses": "x"}
    user = {"role": "user"}
    crops = case.preprocessor(crops=True, sequence_length=300)
    bare = Tokenizer.from_file(case.folder / "old" / "tokenizer.json")
    plain = Gemma3CausalLMPreprocessor(text.tokenizer)

    def asked(*parts):
        return lambda: text.generate_preprocess([{**user, "content": list(parts)}])

    for call, message in (
        (
            lambda: text({**one, "images": [square, square]}),
            f"example 0 has 1 {START} in its text and 2 images; write {START} once for each",
        ),
        (lambda: text([records[0], one]), f"example 1 has 1 {START} in its text and 0 images"),
        (
            lambda: text({**one, "prompts": "none", "images": square}),
            f"example 0 has 0 {START} in its text and 1 images",
        ),
        (lambda: text(f"a {SOFT}"), f"example 0 holds {SOFT} itself, which an image fills"),
        (
            lambda: text({**one, "prompts": START * 3, "images": [square] * 3}),
            "example 0 has 3 images; max_images_per_prompt is 2: set it higher",
        ),
        (
            lambda: text(
                [records[1], {**one, "prompts": START * 2, "images": [square] * 2}],
                sequence_length=12,
            ),
            "row 1 has 2 images or crops of 4 tokens each, which do not fit in 12 tokens;",
        ),
        (
            lambda: text.generate_preprocess({"images": [square, square]}, sequence_length=9),
            "row 0 has 2 images or crops of 4 tokens each, which do not fit in 9 tokens",
        ),
        (
            lambda: text({**one, "images": "https://example.com/a.png"}),
            "https://example.com/a.png is an address of the web; download it first and give",
        ),
        (
            asked({"type": "image", "url": "http://example.com/a.png"}),
            "http://example.com/a.png is an address of the web",
        ),
        (lambda: text({**one, "images": damaged}), f"{damaged}: truncated or damaged ("),
        (lambda: text({**one, "images": tmp_path / "no.png"}), "no.png cannot be read: No such"),
        (
            lambda: text({**one, "images": damaged.read_bytes()}),
            "image 0 of example 0: truncated or damaged",
        ),
        (lambda: text({**one, "images": 3}), "image 0 of example 0 is a int; give the path of a"),
        (
            lambda: text({**one, "images": np.zeros((3, 8, 9))}),
            "image 0 of example 0 has shape (3, 8, 9); give (height, width, 3)",
        ),
        (
            lambda: text({**one, "images": np.full((8, 9, 3), -1.0)}),
            "image 0 of example 0 has values from -1.0 to -1.0; give an image before it is normal",
        ),
        (
            lambda: text({"prompts": ["a", "b"], "responses": ["c", "d"], "images": [square]}),
            "the columns differ in length: prompts 2, responses 2, images 1",
        ),
        (
            asked({"type": "video", "path": "a.mp4"}),
            'messages[0] has a part of type \'video\'; a part is {"type": "text"',
        ),
        (asked("a"), "messages[0] has 'a'; a part is"),
        (asked({"type": "image"}), "messages[0] has an image without its file; give it as"),
        (lambda: text({"messages": "a", "images": square}), "field 'messages' is not a list"),
        (
            lambda: Gemma3ImageTextLMPreprocessor(text.tokenizer, 3),
            "image_converter is a int; give a Gemma3ImageConverter",
        ),
        (
            lambda: Gemma3ImageTextLMPreprocessor(text.tokenizer, max_images_per_prompt=0),
            "max_images_per_prompt is 0; give at least 1",
        ),
        (
            lambda: Gemma3ImageTextLMPreprocessor(text.tokenizer, num_vision_tokens_per_image=0),
            "num_vision_tokens_per_image is 0; give at least 1",
        ),
        (
            lambda: Gemma3ImageTextLMPreprocessor(without(bare, SOFT)),
            f"the vocabulary has no {SOFT} or <img>, which images need; use the tokenizer of",
        ),
        (lambda: Gemma3ImageConverter((0, 9)), "image_size is (0, 9); give (height, width), each"),
        (
            lambda: Gemma3ImageConverter(pan_and_scan_max_num_crops=0),
            "pan_and_scan_max_num_crops is 0; give at least 1",
        ),
        # Models of text alone.
        (lambda: plain(records), "Gemma 3 takes only text here; leave 'images' out"),
        (lambda: plain(records[2]), "Gemma 3 takes only text here; leave 'images' out"),
        (
            lambda: plain.chat_token_ids([[{**user, "content": [{"type": "image"}]}]]),
            "Gemma 3 takes only text here; leave images out of messages",
        ),
    ):
        refused(re.escape(message), call)
    assert crops(records)[0]["images"].shape[1] > 2  # crops do not count


def without(tokenizer, token):
    import tokenizers

    core = tokenizers.Tokenizer.from_str(tokenizer.core.to_str().replace(token, "<other>"))
    return GemmaTokenizer(core)
