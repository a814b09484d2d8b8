"""Looking inside: against transformers and its gradients, and against NumPy in float64."""

import keras
import numpy as np
import pytest

from arrays import read_npz, to_numpy
from kmodels import InputError
from kmodels.models import (
    CLIPBackbone,
    DINOV3Backbone,
    SigLIPBackbone,
    ViTBackbone,
    ViTImageClassifier,
    ViTImageClassifierPreprocessor,
    interpret,
)
from refusals import refused
from tolerances import tolerance

LIMIT = tolerance("attention")
CLASSES = {
    "vit": ViTImageClassifier,
    "dinov3": DINOV3Backbone,
    "clip": CLIPBackbone,
    "siglip": SigLIPBackbone,
}
PREFIX = {"vit": 1, "dinov3": 4, "clip": 1, "siglip": 0}
TINY = {"image_shape": (16, 24, 3), "patch_size": 8, "num_layers": 2, "num_heads": 2}
TINY |= {"hidden_dim": 16, "mlp_dim": 32}


class Case:
    """A model of transformers, read by kmodels, and what transformers computes with it."""

    def __init__(self, name, folder):
        self.name, self.prefix = name, PREFIX[name]
        more = {"preprocessor": None} if name == "vit" else {}
        self.model = CLASSES[name].from_preset(folder / name / "model", **more)
        self.expected = read_npz(folder / name / "expected.npz")
        self.images = self.expected["images"]

    @property
    def attentions(self):
        names = sorted(name for name in self.expected if name.startswith("attention_"))
        return [self.expected[name] for name in names]

    @property
    def target(self):
        if self.name == "dinov3":
            return lambda tokens: tokens[:, 0, 3]
        return self.expected["classes" if self.name == "vit" else "token_ids"]


@pytest.fixture(scope="module", params=CLASSES)
def case(request, references):
    return Case(request.param, references / "interpret")


def near(found, expected, limit=LIMIT):
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=limit, rtol=0)


def numpy_rollout(attentions, fuse, discard=0.0):
    """Abnar and Zuidema's section 3, image by image, from the last block down."""
    found = []
    for image in range(len(attentions[0])):
        result = np.eye(attentions[0].shape[-1])
        for weights in attentions[::-1]:
            fused = fuse(weights[image].astype("float64"), axis=0)
            order = np.sort(fused.ravel())
            if dropped := int(fused.size * discard):
                fused = np.where(fused > order[dropped - 1], fused, 0.0)
            mixed = fused + np.eye(len(fused))
            result = result @ (mixed / mixed.sum(axis=1)[:, None])
        found.append(result)
    return np.stack(found)


@pytest.mark.each_backend("nightly")
def test_attention_maps_and_rollout(case):
    maps = interpret.attention_maps(case.model, case.images)
    assert len(maps) == len(case.attentions)
    for found, expected in zip(maps, case.attentions, strict=True):
        near(found, expected)
    for name, discard in (("mean", 0.0), ("max", 0.5), ("min", 0.9)):
        wanted = numpy_rollout(case.attentions, getattr(np, name), discard)
        near(interpret.rollout(case.attentions, name, discard), wanted)
    whole = numpy_rollout(case.attentions, np.mean)
    rows = whole[:, 0, case.prefix :]
    if case.name == "siglip":
        rows = np.einsum("bs,bst->bt", case.expected["pooled"], whole)
    found = interpret.attention_rollout(case.model, case.images)
    near(found, rows.reshape(-1, 4, 4))
    of_patch = interpret.attention_rollout(case.model, case.images, query=(1, 2))
    near(of_patch, whole[:, case.prefix + 6, case.prefix :].reshape(-1, 4, 4))
    assert np.abs(found - of_patch).max() > 1e-2


@pytest.mark.each_backend("nightly")
def test_grad_cam(case):
    assert case.expected["cam"].max() > 1e-2
    near(interpret.grad_cam(case.model, case.images, case.target), case.expected["cam"])
    if case.name == "vit":
        found = interpret.grad_cam(case.model, case.images, case.target, "block_0")
        near(found, case.expected["cam_block_0"])
        last = interpret.grad_cam(case.model, case.images, case.target, 0)
        assert np.abs(last - found).max() > 1e-2


@pytest.mark.each_backend("nightly")
def test_similar_patches(case):
    backbone = case.model
    if case.name != "dinov3":
        backbone = getattr(case.model, "backbone", None) or case.model.vision_encoder
    name = next(name for name in list(backbone.stages)[::-1] if name != "pooling")
    given = {backbone.input_name: case.images} if backbone.named_inputs else case.images
    tokens = backbone.feature_model(name).predict(given, verbose=0)
    tokens = tokens[:, case.prefix :].astype("float64")
    tokens /= np.linalg.norm(tokens, axis=-1, keepdims=True)
    near(
        interpret.patch_similarity(case.model, case.images, (1, 2)),
        np.einsum("bd,bpd->bp", tokens[:, 6], tokens).reshape(-1, 4, 4),
    )
    near(
        interpret.patch_similarity(case.model, case.images[:1], (1, 2), case.images[1:2]),
        np.einsum("bd,bpd->bp", tokens[:1, 6], tokens[1:2]).reshape(-1, 4, 4),
    )


@pytest.mark.parametrize(
    ("pooling", "fields"),
    [
        ("gap", {"use_class_token": False}),
        ("gap", {"num_register_tokens": 2, "rope_theta": 100.0, "use_position_embedding": False}),
        ("distilled", {"use_distillation_token": True}),
        ("map", {"pool_include_prefix": True}),
        ("token_gap", {"layer_scale": 0.1, "pre_norm": True, "final_norm": False}),
    ],
)
def test_each_kind_of_vit(pooling, fields):
    model = ViTImageClassifier(ViTBackbone(**TINY, **fields), 3, pooling=pooling)
    images = np.random.default_rng(0).normal(size=(2, 16, 24, 3)).astype("float32")
    prefix = model.backbone.config.num_prefix_tokens
    maps = interpret.attention_maps(model, images)
    assert [x.shape for x in maps] == [(2, 2, prefix + 6, prefix + 6)] * 2
    found = interpret.attention_rollout(model, images)
    assert found.shape == (2, 2, 3) and 0.3 < found.sum((1, 2)).min() <= found.sum() <= 2.0001
    whole = interpret.rollout(maps)
    if pooling == "gap":
        wanted = whole[:, prefix:, prefix:].mean(1).reshape(2, 2, 3)
    elif pooling == "map":
        read = model.get_layer("pooling")
        tokens = model.backbone(images)
        weights = read.attention.probabilities(*read.query_and_seen(tokens))
        weights = to_numpy(weights).mean(1)[:, 0]
        assert weights.shape == (2, prefix + 6)
        wanted = np.einsum("bs,bst->bt", weights, whole)[:, prefix:].reshape(2, 2, 3)
    else:
        wanted = whole[:, 0, prefix:].reshape(2, 2, 3)
    near(found, wanted)
    best = model.predict(images, verbose=0).argmax(-1)
    cam = interpret.grad_cam(model, images)
    np.testing.assert_array_equal(cam, interpret.grad_cam(model, images, best))
    moved = interpret.grad_cam(model, images, (int(best[0]) + 1) % 3, "tokens")
    assert cam.shape == moved.shape == (2, 2, 3) and not np.allclose(cam, moved)


def test_what_is_drawn():
    image = np.random.default_rng(0).integers(0, 256, (8, 12, 3), "uint8")
    values = np.zeros((2, 3))
    values[0, 2] = 5.0
    drawn = interpret.overlay(image, values)
    assert drawn.shape == image.shape and drawn.dtype == np.uint8
    np.testing.assert_array_equal(interpret.overlay(image, values, 0.0), image)
    alone = interpret.overlay(image, values, 1.0)
    assert alone[0, -1].tolist() == [252, 255, 164] and alone[-1, 0].tolist() == [0, 0, 4]
    # Between the centers of two patches of one row the map is their mean: half of the colors.
    line = interpret.overlay(np.zeros((1, 3)), [[0.0, 1.0]], 1.0)[0]
    middle = np.mean([[159, 42, 99], [212, 72, 66]], axis=0)
    np.testing.assert_allclose(line[1], middle, atol=1)
    grey = image.astype("float32").mean(-1)
    both = interpret.overlay(np.stack([grey, grey])[..., None], np.stack([values, values]))
    np.testing.assert_array_equal(both[0], interpret.overlay(grey * 3 - 7, values))
    constant = interpret.overlay(np.ones((4, 4)), np.ones((2, 2)))
    np.testing.assert_array_equal(constant[..., 0], 0)


def test_what_is_refused():
    model = ViTImageClassifier(ViTBackbone(**TINY), 3)
    images = np.zeros((2, 16, 24, 3), "float32")
    refused("Sequential has no ViT", interpret.attention_maps, keras.Sequential(), images)
    refused(r"images have the shape \(16, 24, 3\)", interpret.attention_maps, model, images[0])
    refused("head_fusion is 'sum'; choose one of mean, max", interpret.rollout, [], "sum")
    refused(r"discard_ratio is 1.0; give a number", interpret.rollout, [], "max", 1.0)
    for shapes in ((), ((2, 3, 3),), ((1, 2, 3, 4),), ((1, 2, 3, 3), (1, 2, 4, 4)), ((),)):
        maps = [np.ones(shape) for shape in shapes]
        refused("maps have the shapes .*; give one array", interpret.rollout, maps)
    refused(r"images have the shape \(0, 16, 24, 3\)", interpret.attention_maps, model, images[:0])
    for query in (3, ("a", 1), (0.5, 1.0)):
        refused("query is .*; give", interpret.patch_similarity, model, images, query)
    for layer in (None, 0.5, True):
        refused("layer is .*; the model has", interpret.grad_cam, model, images, layer=layer)
    for map in (np.full((2, 2), np.nan), np.ones((0, 2))):
        refused("the map has the shape .*; give finite", interpret.overlay, images[0], map)
    message = r"query is \(2, 0\); give \(row, column\) of a patch, below \(2, 3\)"
    refused(message, interpret.attention_rollout, model, images, query=(2, 0))
    refused(r"query is \(0,\)", interpret.patch_similarity, model, images, (0,))
    message = "layer is 'block_7'; choose one of patch_embedding, tokens, block_0"
    refused(message, interpret.patch_similarity, model, images, (0, 0), layer="block_7")
    with pytest.raises(InputError, match="there are 1 images and 2 others; give as many, or one"):
        interpret.patch_similarity(model, images[:1], (0, 0), images)
    for settings, message in (
        (
            {"layer": "pooling"},
            "layer is 'pooling'; choose one of tokens, block_0, block_1, final_norm, or a number",
        ),
        ({"layer": 2}, "layer is 2; the model has the blocks 0 to 1"),
        ({"target": 3}, "target is 3; give a class from 0 to 2, or one for each of the 2 images"),
    ):
        refused(message, interpret.grad_cam, model, images, **settings)
    message = "ViTBackbone has no logits of classes; give a target that is a function"
    refused(message, interpret.grad_cam, model.backbone, images, 1)
    refused(r"the image has the shape \(16, 24, 3\)", interpret.overlay, images[0], images)
    refused(r"alpha is 2; give a number", interpret.overlay, images, images[..., 0], 2)


def test_texts_that_do_not_fit(references):
    model = CLIPBackbone.from_preset(references / "interpret" / "clip" / "model")
    images, ids = np.zeros((2, 16, 16, 3), "float32"), np.full((3, 12), 40)
    for target, message in (
        (None, "grad_cam of two towers needs a target: a text"),
        ("a dog", "CLIPBackbone has no tokenizer; give token ids"),
        (ids, "target holds 3 texts for 2 images; give one, or one for each image"),
    ):
        refused(message, interpret.grad_cam, model, images, target)
    one = interpret.grad_cam(model, images + 1, ids[0])
    near(one, interpret.grad_cam(model, images + 1, ids[:2]))


def test_raw_images_go_through_the_preprocessor():
    preprocessor = ViTImageClassifierPreprocessor((16, 24))
    model = ViTImageClassifier(ViTBackbone(**TINY), 3, preprocessor=preprocessor)
    raw = np.random.default_rng(0).integers(0, 256, (2, 30, 40, 3), "uint8")
    bare = ViTImageClassifier(model.backbone, 3)
    bare.set_weights(model.get_weights())
    for look in (interpret.attention_rollout, interpret.grad_cam):
        np.testing.assert_array_equal(look(model, raw), look(bare, preprocessor(raw)))
    np.testing.assert_array_equal(
        interpret.patch_similarity(model, list(raw), (0, 1)),
        interpret.patch_similarity(bare.backbone, preprocessor(raw), (0, 1)),
    )
