"""CLIP, SigLIP and SigLIP 2 with both towers, beside transformers."""

import json

import numpy as np
import pytest

from arrays import assert_same_tensors, read_npz, to_numpy
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
from kmodels.models.two_towers import TwoTowersBackbone
from kmodels.weights import read_safetensors, write_safetensors
from tolerances import tolerance

KINDS = ("clip", "siglip", "siglip2")
LIMIT = tolerance("logits")


class Case:
    """A reference with the model that was read from it."""

    def __init__(self, folder):
        self.kind, self.folder, self.path = folder.name, folder, folder / "model"
        self.expected = read_npz(folder / "expected.npz")
        self.model = ImageTextSimilarity.from_preset(self.path)
        ids = self.expected["token_ids"].astype("int32")
        self.inputs = {"images": self.expected["images"], "token_ids": ids}

    @property
    def many(self):
        ids = self.expected["many_ids"].astype("int32")
        return {"images": self.expected["many_images"], "token_ids": ids}

    @property
    def pairs(self):
        return {name: x[:4] for name, x in self.inputs.items()}


@pytest.fixture(scope="module", params=KINDS)
def case(request, references):
    return Case(references / "two_towers" / request.param)


def near(found, expected, limit=LIMIT):
    np.testing.assert_allclose(to_numpy(found), expected, rtol=0, atol=limit)


def vectors(model, inputs):
    """The vectors of images and texts, one behind the other, of length 1."""
    named = model.backbone.intermediates(inputs)
    x = np.concatenate([to_numpy(named[name]) for name in ("image_embeds", "text_embeds")])
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def test_the_class_is_that_of_the_directory(case):
    kind = CLIPBackbone if case.kind == "clip" else SigLIPBackbone
    assert type(case.model.backbone) is kind
    assert type(TwoTowersBackbone.from_preset(case.path)) is kind
    assert type(kind.from_preset(case.path)) is kind


@pytest.mark.each_backend
def test_logits_are_transformers(case):
    expected = case.expected["logits_per_image"]
    found = case.model.backbone(case.inputs)
    assert to_numpy(found["vision_logits"]).dtype == np.float32
    near(found["vision_logits"], expected)
    near(found["text_logits"], expected.T)
    near(case.model(case.inputs), expected)
    near(case.model.similarity(case.inputs["images"] * 0, case.inputs["token_ids"]).shape, (4, 5))


@pytest.mark.each_backend
def test_a_mask_hides_tokens(case):
    mask = case.expected["padding_mask"].astype("int32")
    masked = {**case.inputs, "padding_mask": mask}
    near(case.model(masked), case.expected["masked"])
    apart = np.abs(case.expected["masked"] - case.expected["logits_per_image"]).max()
    assert apart > 1000 * LIMIT


def test_features_are_transformers(case):
    plain = ImageTextSimilarity(case.model.backbone)
    near(plain.encode_image(case.inputs["images"], batch_size=3), case.expected["image_embeds"])
    near(plain.encode_text(case.inputs["token_ids"], batch_size=3), case.expected["text_embeds"])
    found = plain.similarity(case.inputs["images"], case.inputs["token_ids"])
    near(found, case.expected["logits_per_image"])
    both = [case.expected[name] for name in ("image_embeds", "text_embeds")]
    near(vectors(plain, case.inputs), np.concatenate(both))


def test_the_loss_is_transformers(case):
    plain = ImageTextSimilarity(case.model.backbone)
    plain.compile()
    found = plain.evaluate(case.pairs, np.zeros(4), verbose=0)
    near(found, case.expected["loss"], tolerance("losses"))


def test_bfloat16_is_as_close_to_float64_as_transformers(case):
    model = ImageTextSimilarity.from_preset(case.path, dtype="bfloat16")
    exact = case.expected["many64"]
    found = vectors(model, case.many)
    assert to_numpy(model(case.many)).dtype == np.float32
    theirs = np.abs(case.expected["many16"] - exact).mean()
    assert np.abs(found - exact).mean() < 1.1 * theirs


def test_float64_is_transformers(case, backend):
    if backend == "jax":
        with pytest.raises(InputError, match="JAX has float32 alone"):
            ImageTextSimilarity.from_preset(case.path, dtype="float64")
        return
    model = ImageTextSimilarity.from_preset(case.path, dtype="float64")
    found = vectors(model, {**case.many, "images": case.many["images"].astype("float64")})
    near(found, case.expected["many64"], 1e-6)


# === Hugging Face, both ways ===


def test_export_is_what_was_read(case, tmp_path):
    case.model.export_to_transformers(tmp_path / "out")
    assert_same_tensors(tmp_path / "out", case.path)
    shapes = [
        {name: x.shape for name, x in read_safetensors(place).items()}
        for place in (case.path, tmp_path / "out")
    ]
    assert shapes[0] == shapes[1]
    again = ImageTextSimilarity.from_preset(tmp_path / "out", load_weights=False)
    assert again.backbone.config == case.model.backbone.config
    old, new = (
        json.loads((place / "config.json").read_text()) for place in (case.path, tmp_path / "out")
    )
    assert (new["model_type"], new["architectures"]) == (old["model_type"], old["architectures"])


def test_a_backbone_and_our_own_directory(case, tmp_path):
    case.model.backbone.export_to_transformers(tmp_path / "out")
    assert_same_tensors(tmp_path / "out", case.path)
    case.model.save_to_preset(tmp_path / "own")
    again = ImageTextSimilarity.from_preset(tmp_path / "own")
    assert type(again.backbone) is type(case.model.backbone)
    np.testing.assert_array_equal(to_numpy(again(case.inputs)), to_numpy(case.model(case.inputs)))
    prepared = read_npz(case.folder / "prepared.npz")["pictures"]
    pairs = {"images": prepared, "text": ["A photo", "of two, cats!", ""]}
    for name, x in case.model.preprocessor(pairs)[0].items():
        np.testing.assert_array_equal(again.preprocessor(pairs)[0][name], x)


def test_every_tensor_is_used(case, tmp_path):
    """Each tensor of the file fills a variable, or an error names the one that is left."""
    held = dict(read_safetensors(case.path))
    count = sum(int(np.prod(x.shape)) for x in held.values())
    assert count == case.model.backbone.count_params()
    config = (case.path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    name = next(name for name in held if "fc1.weight" in name)
    write_safetensors(tmp_path / "model.safetensors", {**held, f"more.{name}": held[name]})
    with pytest.raises(InputError, match="more"):
        CLIPBackbone.from_preset(tmp_path) if case.kind == "clip" else SigLIPBackbone.from_preset(
            tmp_path
        )


def test_each_tower_reads_the_same_directory_alone(case):
    vision = ViTBackbone.from_preset(case.path)
    assert to_numpy(vision(case.inputs["images"])).shape == (4, 16 + (case.kind == "clip"), 24)
    classifier = ViTImageClassifier.from_preset(case.path, num_classes=3, preprocessor=None)
    assert classifier.pooling == ("token" if case.kind == "clip" else "map")
    if case.kind == "clip":
        text = CLIPTextModelWithProjection.from_preset(case.path)
    else:
        text = SigLIPTextEncoder.from_preset(case.path)
    x = to_numpy(text(case.inputs["token_ids"]))
    near(x / np.linalg.norm(x, axis=1, keepdims=True), case.expected["text_embeds"])
    assert presets.family_of(case.path).name == "vit"


def test_what_is_not_read_and_not_written(references, tmp_path):
    kinds = references / "vit_kinds"
    with pytest.raises(InputError, match="has no vectors of images that go with texts"):
        SigLIPBackbone.from_preset(kinds / "siglip_classes" / "model")
    source = references / "two_towers" / "clip" / "model"
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    alone = {x: y for x, y in read_safetensors(source).items() if not x.startswith("text")}
    write_safetensors(tmp_path / "model.safetensors", alone)
    with pytest.raises(InputError, match="holds no text tower; read it as a ViTBackbone"):
        CLIPBackbone.from_preset(tmp_path)
    with pytest.raises(InputError, match="a SigLIP has no projections"):
        SigLIPBackbone.from_preset(source)
    fields = CLIPBackbone.presets["clip_debug"]
    other = {**fields, "vision_encoder": {**fields["vision_encoder"], "pre_norm": False}}
    with pytest.raises(InputError, match="transformers' clip has no counterpart for the vision"):
        CLIPBackbone(**other).export_to_transformers(tmp_path / "out")


def test_adapters_of_peft_both_ways(case, tmp_path):
    expected = read_npz(case.folder / "adapter.npz")["logits"]
    model = ImageTextSimilarity.from_preset(case.path)
    model.load_adapter(case.folder / "adapter")
    limit = LIMIT * max(1, np.abs(expected).max())
    assert np.abs(expected - case.expected["logits_per_image"]).max() > 100 * limit
    near(model(case.inputs), expected, limit)
    model.save_adapter(tmp_path)
    written, read = (
        read_safetensors(place / "adapter_model.safetensors")
        for place in (tmp_path, case.folder / "adapter")
    )
    assert set(written) == set(read)
    assert any("vision_model" in name for name in read) and any("text_model" in x for x in read)
    for name, tensor in read.items():
        np.testing.assert_array_equal(written[name].read(), tensor.read())


# === Processors ===


def test_pixels_and_ids_are_the_processors(case):
    prepared = read_npz(case.folder / "prepared.npz")
    texts = json.loads((case.folder / "texts.json").read_text())
    for preprocessor in (case.model.preprocessor, ImageTextPreprocessor.from_preset(case.path)):
        found, labels = preprocessor(
            {"images": prepared["pictures"], "captions": texts[: len(prepared["pictures"])]}
        )
        near(found["images"], prepared["pixels"], tolerance("pictures"))
        assert labels.shape == (3,) and ("padding_mask" in found) == (case.kind == "clip")
        ids = preprocessor(texts)["token_ids"]
        np.testing.assert_array_equal(ids, prepared["token_ids"])
