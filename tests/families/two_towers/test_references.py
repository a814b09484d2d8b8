"""CLIP, SigLIP and SigLIP 2 beside transformers: what tests/family_table.py does not compare."""

import json

import numpy as np
import pytest

from arrays import read_npz, to_numpy
from family_table import row_of
from kmodels import presets
from kmodels.core.errors import InputError
from kmodels.models import (
    CLIPBackbone,
    CLIPTextModelWithProjection,
    ImageTextPreprocessor,
    ImageTextSimilarity,
    SigLIPBackbone,
    SigLIPTextEncoder,
    ViTBackbone,
    ViTImageClassifier,
)
from kmodels.models.two_towers.model import TwoTowersBackbone
from kmodels.weights import LazyArray, read_safetensors, write_safetensors
from refusals import refused
from tolerances import tolerance


@pytest.fixture(scope="module", params=("clip", "siglip", "siglip2"))
def row(request, references):
    return row_of(f"two_towers/{request.param}", references)


LIMIT = tolerance("logits")


def near(found, expected, limit=LIMIT):
    np.testing.assert_allclose(to_numpy(found), expected, rtol=0, atol=limit)


def test_features_and_the_loss_are_transformers(row):
    model = ImageTextSimilarity(row.model.backbone)
    images, ids = row.inputs.values()
    near(model.encode_image(images, batch_size=3), row.expected["image_embeds"])
    near(model.encode_text(ids, batch_size=3), row.expected["text_embeds"])
    near(model.similarity(images, ids), row.expected["logits_per_image"])
    model.compile()
    loss = model.evaluate({"images": images, "token_ids": ids[:4]}, np.zeros(4), verbose=0)
    near(loss, row.expected["loss"], tolerance("losses"))


def test_float64_is_transformers(row):
    inputs = {**row.many, "images": row.many["images"].astype("float64")}
    near(row.vectors(row.read(dtype="float64"), inputs), row.expected["many64"], 1e-6)


def test_both_towers_and_each_of_them_alone_read_the_same_directory(row):
    kind = CLIPBackbone if row.kind == "clip" else SigLIPBackbone
    assert type(row.model.backbone) is type(TwoTowersBackbone.from_preset(row.path)) is kind
    vision = ViTBackbone.from_preset(row.path)
    assert to_numpy(vision(row.inputs["images"])).shape == (4, 16 + (row.kind == "clip"), 24)
    classifier = ViTImageClassifier.from_preset(row.path, num_classes=3, preprocessor=None)
    assert classifier.pooling == ("token" if row.kind == "clip" else "map")
    if row.kind == "clip":
        text = CLIPTextModelWithProjection.from_preset(row.path)
    else:
        text = SigLIPTextEncoder.from_preset(row.path)
    x = to_numpy(text(row.inputs["token_ids"]))
    near(x / np.linalg.norm(x, axis=1, keepdims=True), row.expected["text_embeds"])
    assert presets.family_of(row.path).name == "vit"


def test_what_is_not_read_and_not_written(references, tmp_path):
    kinds = references / "vit_kinds"
    with pytest.raises(InputError, match="has no vectors of images that go with texts"):
        SigLIPBackbone.from_preset(kinds / "siglip_classes" / "model")
    source = references / "two_towers" / "clip" / "model"
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    alone = {x: y for x, y in read_safetensors(source).items() if not x.startswith("text")}
    x = np.ones(2, "float32")
    more = LazyArray(x.shape, x.dtype, lambda: x)
    write_safetensors(tmp_path / "model.safetensors", {**read_safetensors(source), "more": more})
    refused("1 tensors without a variable: more", CLIPBackbone.from_preset, tmp_path)
    write_safetensors(tmp_path / "model.safetensors", alone)
    refused("holds no text tower; read it as a ViTBackbone", CLIPBackbone.from_preset, tmp_path)
    refused("a SigLIP has no projections", SigLIPBackbone.from_preset, source)
    fields = CLIPBackbone.presets["clip_debug"]
    other = {**fields, "vision_encoder": {**fields["vision_encoder"], "pre_norm": False}}
    with pytest.raises(InputError, match="transformers' clip has no counterpart for the vision"):
        CLIPBackbone(**other).export_to_transformers(tmp_path / "out")


def test_pixels_and_ids_are_the_processors(row, tmp_path):
    prepared = read_npz(row.path.parent / "prepared.npz")
    texts = json.loads((row.path.parent / "texts.json").read_text())
    row.model.save_to_preset(tmp_path / "own")
    row.model.preprocessor.save_to_preset(tmp_path / "alone")
    read = map(ImageTextPreprocessor.from_preset, (row.path, tmp_path / "own", tmp_path / "alone"))
    for preprocessor in (row.model.preprocessor, *read):
        found, labels = preprocessor(
            {"images": prepared["pictures"], "captions": texts[: len(prepared["pictures"])]}
        )
        near(found["images"], prepared["pixels"], tolerance("pictures"))
        assert labels.shape == (3,) and ("padding_mask" in found) == (row.kind == "clip")
        ids = preprocessor(texts)["token_ids"]
        np.testing.assert_array_equal(ids, prepared["token_ids"])
