"""`kmodels eval`, as a user types it, and its figures beside definitions and timm's loop."""

import csv
import json

import keras
import numpy as np
import pytest
from PIL import Image

import command_line
import saved_models
from kmodels.data import made_objects, made_scenes
from kmodels.models import (
    GemmaCausalLM,
    ImageTextSimilarity,
    ViTBackbone,
    ViTImageClassifier,
    ViTImageClassifierPreprocessor,
    ViTImageSegmenter,
    ViTImageSegmenterPreprocessor,
    ViTObjectDetector,
    ViTObjectDetectorPreprocessor,
)
from kmodels.tools.evaluate import scores
from kmodels.tools.evaluate_text import TextTask
from kmodels.training import average_precision

NAMES = [f"kind{number}" for number in range(12)]


def write_images(folder, names, each=3, seed=0):
    rng = np.random.default_rng(seed)
    for name in names:
        (folder / name).mkdir(parents=True)
        for number in range(each):
            pixels = rng.integers(0, 256, (17 + number, 23, 3), "uint8")
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    keras.utils.set_random_seed(3)
    task = ViTImageClassifier.from_preset("vit_debug", num_classes=12, class_names=NAMES)
    task.preprocessor = ViTImageClassifierPreprocessor((16, 16))
    kernel = next(v for v in task.weights[::-1] if v.path.endswith("/kernel"))  # of the head
    kernel.assign(np.random.default_rng(1).normal(size=kernel.shape))
    task.save_to_preset(folder)
    return folder, task


def test_figures_equal_their_definitions(model, tmp_path, capsys):
    folder, task = model
    data = write_images(tmp_path / "data", NAMES[::2])
    (data / NAMES[0] / "notes.txt").write_text("x")
    assert command_line.run("eval", folder, data, "--json", "--batch-size", 5) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert "6 of 12 classes by the names of folders; other files are left out (1 .txt)" in (
        " ".join(printed.err.split())
    )
    files = [data / name / f"{i}.png" for name in NAMES[::2] for i in range(3)]
    labels = np.repeat(np.arange(0, 12, 2), 3)
    logits = np.asarray(task.predict(files, verbose=0), "float64")
    ranks = (logits > logits[np.arange(18), labels][:, None]).sum(1)
    assert found["images"] == 18
    assert found["top1"] == pytest.approx(100 * (ranks == 0).sum() / 18)
    assert found["top5"] == pytest.approx(100 * (ranks < 5).sum() / 18)
    assert found["top5"] > found["top1"]
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    gap = 0.0
    for low in np.arange(15) / 15:
        inside = (shares.max(1) > low) & (shares.max(1) <= low + 1 / 15)
        if inside.any():
            accuracy = (ranks[inside] == 0).mean()
            gap += inside.mean() * abs(accuracy - shares.max(1)[inside].mean())
    assert found["calibration_error"] == pytest.approx(gap, abs=1e-6)
    assert sum(count for *_, count in found["confusions"]) == 18
    assert [row[:2] for row in found["per_class"]] == [[x, 3] for x in range(0, 12, 2)]
    assert sum(row[2] for row in found["per_class"]) == (ranks == 0).sum()
    assert found["classes"] == NAMES

    # Order and batches change nothing.
    assert command_line.run("eval", folder, data, "--json", "--batch-size", 32) == 0
    assert json.loads(capsys.readouterr().out) == found


def test_folders_in_natural_order_are_the_classes(model, tmp_path, capsys):
    folder, _ = model
    data = write_images(tmp_path / "data", [f"n{number}" for number in range(12)], each=1)
    assert command_line.run("eval", folder, data, "--results", tmp_path / "out.csv") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "classes in the order of the folders: n0 is kind0, n11 is kind11" in printed
    task = ViTImageClassifier.from_preset("vit_debug", num_classes=12)
    task.preprocessor = model[1].preprocessor
    task.save_to_preset(tmp_path / "nameless")
    assert command_line.run("eval", tmp_path / "nameless", data) == 0
    assert "n0 is 0, n11 is 11" in " ".join(capsys.readouterr().out.split())
    (row,) = csv.DictReader((tmp_path / "out.csv").read_text().splitlines())
    assert list(row) == [
        *("model", "top1", "top1_err", "top5", "top5_err", "param_count", "img_size", "crop_pct"),
        "interpolation",
    ]
    assert float(row["top1"]) + float(row["top1_err"]) == pytest.approx(100)
    assert (row["img_size"], row["crop_pct"], row["interpolation"]) == ("16", "1.0", "bilinear")


def test_labels_of_real(model, tmp_path, capsys):
    folder, task = model
    data = tmp_path / "data" / NAMES[4]
    write_images(tmp_path / "data", [NAMES[4]], each=3)
    files = [data / f"ILSVRC2012_val_{number:08d}.png" for number in (2, 3, 5)]
    for number, file in enumerate(files):
        (data / f"{number}.png").rename(file)
    order = np.argsort(-np.asarray(task.predict(files, verbose=0)), 1)
    # The first is right, the second among the first five, and the third has no class.
    real = [[0], [7, int(order[0, 0])], [int(order[1, 3])], [], []]
    (tmp_path / "real.json").write_text(json.dumps(real))
    words = ("eval", folder, tmp_path / "data", "--json", "--real-labels", tmp_path / "real.json")
    assert command_line.run(*words) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["images"], found["top1"], found["top5"]) == (2, 50.0, 100.0)
    for content, message in (
        ([[0]], "is not one of the 1 images of"),
        ([[]] * 5, "has no class for any of these images"),
        ({"a": 1}, "real.json"),
    ):
        (tmp_path / "real.json").write_text(json.dumps(content))
        assert command_line.run(*words) == 2
        assert message in capsys.readouterr().err


def test_wrong_uses_give_a_line(model, tmp_path, capsys):
    folder, _ = model
    data = write_images(tmp_path / "data", ["a", "b"], each=1)
    write_images(tmp_path / "whole" / "train", NAMES, each=1)
    (tmp_path / "whole" / "val").mkdir()
    (tmp_path / "empty" / NAMES[0]).mkdir(parents=True)
    bad = write_images(tmp_path / "bad", NAMES[:2], each=2)
    (bad / NAMES[0] / "0.png").write_bytes(b"no image")
    GemmaCausalLM.from_preset("gemma3_debug", preprocessor=None).save_to_preset(tmp_path / "lm")
    for words, message in (
        ((folder, tmp_path / "none"), "is not a folder"),
        ((folder, tmp_path / "lm"), "lm has no folders; give one with a folder of images for each"),
        ((folder, data), "has 2 folders, such as a, and the model 12 classes, such as kind0"),
        ((folder, tmp_path / "whole"), "give one of its parts"),
        ((folder, tmp_path / "empty"), "holds no images that Pillow reads"),
        ((folder, bad), "or give --skip-bad"),
        ((folder, data, "--batch-size", 0), "--batch-size is 0"),
        ((tmp_path / "lm", data), "holds a GemmaCausalLM; give a model of images"),
    ):
        assert command_line.run("eval", *words) == 2
        error = capsys.readouterr().err.strip().splitlines()
        assert message in " ".join(error[-1:]), error
    assert command_line.run("eval", folder, bad, "--skip-bad", "--json") == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["images"] == 3
    assert "1 unreadable image left out" in printed.err


def test_scores_of_few_classes_and_equal_logits():
    found = scores(np.zeros((4, 3)), np.array([0, 1, 2, 0]))
    assert (found["top1"], found["top5"]) == (50.0, 100.0)
    assert found["calibration_error"] == pytest.approx(0.5 - 1 / 3)


@pytest.mark.needs("timm")
@pytest.mark.across("torch")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files of timm
def test_timm_has_the_same_accuracy(tmp_path, capsys):
    import timm
    import torch
    from timm.data import create_dataset, create_loader, resolve_model_data_config
    from timm.utils import accuracy

    torch.manual_seed(0)
    settings = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
    peer = timm.create_model("vit_tiny_patch16_224", num_classes=10, **settings).eval()
    peer.head.weight.data.normal_()
    peer.pretrained_cfg.update(input_size=(3, 32, 32), crop_pct=0.9)
    timm.models.save_for_hf(peer, tmp_path / "model", model_args=settings)
    data = write_images(tmp_path / "data", [f"c{number}" for number in range(10)], each=50)

    config = resolve_model_data_config(peer)
    loader = create_loader(
        create_dataset("", str(data)), batch_size=64, use_prefetcher=False, num_workers=0,
        **{name: config[name] for name in ("input_size", "interpolation", "mean", "std")},
        **{name: config[name] for name in ("crop_pct", "crop_mode")},
    )  # fmt: skip
    outputs, targets = [], []
    with torch.inference_mode():
        for x, y in loader:
            outputs.append(peer(x))
            targets.append(y)
    expected = accuracy(torch.cat(outputs), torch.cat(targets), topk=(1, 5))

    assert command_line.run("eval", tmp_path / "model", data, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["images"] == 500
    assert [found["top1"], found["top5"]] == pytest.approx([x.item() for x in expected], abs=1e-4)
    assert 2 < found["top1"] < 40 < found["top5"]
    assert (found["crop_pct"], found["interpolation"]) == (0.9143, "bicubic")  # 32 of 35


def test_a_segmenter_is_measured_on_masks(tmp_path, capsys):
    keras.utils.set_random_seed(0)
    task = ViTImageSegmenter.from_preset("vit_debug", num_classes=5, image_shape=(16, 16, 3))
    task.preprocessor = ViTImageSegmenterPreprocessor((16, 16))
    task.save_to_preset(tmp_path / "model")
    images, masks = made_scenes(5, (20, 24), seed=3)
    masks[0, :4] = 255
    for kind, arrays in (("images", images), ("masks", masks)):
        (tmp_path / "data" / kind).mkdir(parents=True)
        for number, pixels in enumerate(arrays):
            Image.fromarray(pixels).save(tmp_path / "data" / kind / f"{number}.png")
    words = ("eval", tmp_path / "model", tmp_path / "data", "--json")
    assert command_line.run(*words, "--batch-size", 2) == 0
    found = json.loads(capsys.readouterr().out)
    predicted, known = task.segment(images), masks != 255
    shares = []
    for number in range(5):
        own, said = (masks == number) & known, (predicted == number) & known
        if (own | said).any():
            shares.append((own & said).sum() / (own | said).sum())
    assert found["mean_iou"] == pytest.approx(np.mean(shares)) and found["records"] == 5
    assert found["pixel_accuracy"] == pytest.approx((predicted == masks)[known].mean())
    for wrong in (
        ("--real-labels", tmp_path / "real.json"),
        ("--templates", "{}"),
        ("--skip-bad",),
    ):
        assert command_line.run(*words, *wrong) == 2
        assert f"{wrong[0]} has no effect on a ViTImageSegmenter" in capsys.readouterr().err
    # Class k of the model is k + 1 in the files, and 0 is none.
    assert command_line.run(*words, "--reduce-labels") == 0
    reduced = json.loads(capsys.readouterr().out)
    labels = np.where(masks == 255, 255, np.where(masks == 0, 255, masks.astype(int) - 1))
    known = labels != 255
    assert reduced["pixel_accuracy"] == pytest.approx((predicted == labels)[known].mean())
    assert reduced["pixel_accuracy"] != found["pixel_accuracy"]


def test_two_towers_classify_by_the_names_of_folders(tmp_path, capsys, monkeypatch):
    towers = saved_models.towers(tmp_path / "model")
    data = write_images(tmp_path / "data", ["a_cat", "b_dog", "c"], each=2)
    assert command_line.run("eval", tmp_path / "model", data, "--json", "--batch-size", 4) == 0
    found = json.loads(capsys.readouterr().out)
    files = [data / name / f"{i}.png" for name in ("a_cat", "b_dog", "c") for i in range(2)]
    logits = towers.classify(files, ["a cat", "b dog", "c"])
    right = np.asarray(logits).argmax(1) == np.repeat(np.arange(3), 2)
    assert found["top1"] == pytest.approx(100 * right.mean()) and found["classes"][0] == "a_cat"
    assert found["img_size"] == 28
    (tmp_path / "names.txt").write_text("gray wolf\nowl\n\nred fox\n")
    (tmp_path / "templates.txt").write_text("a {} on snow\none {}\n")
    words = ("eval", tmp_path / "model", data, "--json", "--class-names", tmp_path / "names.txt")
    seen, classify = [], ImageTextSimilarity.classify

    def noted(self, images, names, templates=("a photo of a {}.",), batch_size=32):
        seen.append((names, list(templates)))
        return classify(self, images, names, templates, batch_size)

    monkeypatch.setattr(ImageTextSimilarity, "classify", noted)
    for templates in ("a {} on snow|one {}", str(tmp_path / "templates.txt")):
        assert command_line.run(*words, "--templates", templates) == 0
        assert seen[-1] == (["gray wolf", "owl", "red fox"], ["a {} on snow", "one {}"])
    (tmp_path / "names.txt").write_text("one\ntwo\n")
    capsys.readouterr()
    assert command_line.run(*words) == 2
    assert "--class-names has 2 names for 3 folders" in capsys.readouterr().err
    assert command_line.run(*words[:-1], tmp_path / "none.txt") == 2
    assert "none.txt is not readable" in capsys.readouterr().err
    assert command_line.run(*words[:4], "--reduce-labels") == 2
    assert "--reduce-labels has no effect on a ImageTextS" in capsys.readouterr().err


@pytest.mark.across("torch")
def test_a_detector_is_measured_on_cocos_files(tmp_path, capsys):
    keras.utils.set_random_seed(0)
    backbone = ViTBackbone.from_preset("vit_debug", image_shape=(16, 16, 3))
    task = ViTObjectDetector(
        *(backbone, 4, ViTObjectDetectorPreprocessor((16, 16))),
        num_queries=4,
        num_decoder_layers=1,
        decoder_dim=16,
        num_decoder_heads=2,
    )
    task.save_to_preset(tmp_path / "model")
    images, objects = made_objects(3, (20, 24), seed=3)
    data = tmp_path / "data"
    saved_models.write_coco(data, images, objects)
    assert command_line.run("eval", tmp_path / "model", data, "--json", "--batch-size", 2) == 0
    found = json.loads(capsys.readouterr().out)
    sizes = np.array([24, 20, 24, 20])
    wanted = [
        {
            "boxes": np.concatenate([x[:, :2] - x[:, 2:] / 2, x[:, :2] + x[:, 2:] / 2], 1) * sizes,
            "labels": one["class_labels"],
        }
        for one in objects
        for x in [one["boxes"]]
    ]
    averages = average_precision(task.detect(images, threshold=0.0), wanted)
    assert {name: found[name] for name in averages} == pytest.approx(averages, abs=1e-6)


QUERIES = [
    {"query": f"q{i}", "positive": [f"d{i}", f"e{i}"] if i % 2 else f"d{i}"} for i in range(12)
]


class Vectors:
    """An embedder that knows the vector of each text."""

    def __init__(self, texts):
        vectors = np.random.default_rng(0).normal(size=(len(texts), 4))
        self.vectors = dict(zip(texts, vectors, strict=True))

    def encode_query(self, texts, batch_size):
        return np.array([self.vectors[text] for text in texts])

    encode_document = encode_query

    def similarity(self, first, second):
        return np.atleast_2d(first) @ second.T


def retrieved(tmp_path):
    """The records, their documents, vectors, and what `kmodels eval` makes of them."""
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, QUERIES)))
    task = TextTask(file)
    texts = list(dict.fromkeys(text for row in task.rows for text in row["positive"]))
    embedder = Vectors([*texts, *(row["query"] for row in task.rows)])
    return task.rows, texts, embedder.vectors, task.retrieve(embedder, 8)


def test_ranks_are_those_of_the_vectors(tmp_path):
    records, texts, vectors, (metrics, rows) = retrieved(tmp_path)
    for record, row in zip(records, rows, strict=True):
        ranked = sorted(texts, key=lambda text: -vectors[record["query"]] @ vectors[text])
        assert [ranked[rank - 1] in record["positive"] for rank in row["ranks"]] == (
            [True] * len(record["positive"])
        )
    assert 0 < metrics["recall@1"] < metrics["recall@10"] < 1


@pytest.mark.across("torch")
def test_retrieval_is_that_of_sentence_transformers(tmp_path):
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

    records, texts, vectors, (metrics, _) = retrieved(tmp_path)
    peer = InformationRetrievalEvaluator(
        {str(i): record["query"] for i, record in enumerate(records)},
        {text: text for text in texts},
        {str(i): set(record["positive"]) for i, record in enumerate(records)},
        accuracy_at_k=[1, 5, 10],
        precision_recall_at_k=[1, 5, 10],
    )
    hits = [
        [
            {"corpus_id": text, "score": float(vectors[record["query"]] @ vectors[text])}
            for text in texts
        ]
        for record in records
    ]
    theirs = peer.compute_metrics(hits)
    wanted = {
        **{f"accuracy@{k}": value for k, value in theirs["accuracy@k"].items()},
        **{f"recall@{k}": value for k, value in theirs["recall@k"].items()},
        "mrr@10": theirs["mrr@k"][10],
        "ndcg@10": theirs["ndcg@k"][10],
    }
    assert metrics == pytest.approx(wanted)
