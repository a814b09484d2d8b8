"""Images of any aspect ratio as rows of patches, beside transformers' SigLIP 2."""

import keras
import numpy as np
import pytest

from arrays import assert_same_tensors, read_npz, to_numpy
from kmodels.core.errors import InputError
from kmodels.data.images.naflex.patches import grid_of, patches_of
from kmodels.models import (
    ImageTextPreprocessor,
    ImageTextSimilarity,
    NaFlexViTBackbone,
    NaFlexViTImageClassifier,
    NaFlexViTImageClassifierPreprocessor,
    SigLIPBackbone,
    SigLIPVisionEncoder,
    ViTBackbone,
)
from kmodels.models.vit.naflex.positions import resize_weights
from kmodels.weights import read_safetensors
from kmodels.weights.positions import METHODS, resize_matrix
from tolerances import tolerance

LIMIT = tolerance("logits")
SIZES = ("24", "60")
SMALL = {"patch_size": 4, "num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 24}
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
GRIDS = [(2, 7), (5, 3), (1, 2), (4, 4)]


class Case:
    def __init__(self, folder):
        self.folder, self.path = folder, folder / "model"
        self.expected = read_npz(folder / "expected.npz")
        held = read_npz(folder / "pictures.npz")
        self.pictures = [held[str(i)] for i in range(len(held))]
        self.model = ImageTextSimilarity.from_preset(self.path)

    def patches(self, size):
        names = {"pixel_values": "values", "pixel_attention_mask": "mask"}
        names["spatial_shapes"] = "shapes"
        return {name: self.expected[f"{size}_{x}"] for name, x in names.items()}

    @property
    def ids(self):
        return self.expected["token_ids"].astype("int32")


@pytest.fixture(scope="module")
def case(references):
    return Case(references / "naflex")


def near(found, expected, limit=LIMIT):
    np.testing.assert_allclose(to_numpy(found), expected, rtol=0, atol=limit)


# === Beside transformers ===


@pytest.mark.parametrize("size", SIZES)
def test_logits_and_features_are_transformers(case, size):
    given = case.patches(size)
    found = case.model.predict({**given, "token_ids": np.resize(case.ids, (4, 12))}, verbose=0)
    near(found, case.expected[f"{size}_logits"][:, :4])
    embeds = case.expected[f"{size}_embeds"]
    near(case.model.encode_image(given, batch_size=3, normalize=False), embeds)
    tower = case.model.backbone.vision_encoder
    tokens = tower.intermediates(given)["final_norm"]
    mask = given["pixel_attention_mask"].astype(bool)
    near(to_numpy(tokens)[mask], case.expected[f"{size}_tokens"][mask])
    # The mask follows from the grids, and grids of the same number of patches differ.
    without = {name: x for name, x in given.items() if name != "pixel_attention_mask"}
    near(tower.predict(without, verbose=0), embeds)
    turned = {**given, "spatial_shapes": given["spatial_shapes"][:, ::-1]}
    assert np.abs(tower.predict(turned, verbose=0) - embeds).max() > 100 * LIMIT


def test_a_mask_hides_patches(case):
    given = case.patches("24")
    mask = given["pixel_attention_mask"].copy()
    mask[:, 3] = 0
    tower = case.model.backbone.vision_encoder
    found = tower.predict({**given, "pixel_attention_mask": mask}, verbose=0)
    changed = {**given, "pixel_values": given["pixel_values"].copy()}
    changed["pixel_values"][:, 3] = 9.0
    near(tower.predict({**changed, "pixel_attention_mask": mask}, verbose=0), found, 1e-6)
    assert np.abs(found - case.expected["24_embeds"]).max() > 100 * LIMIT


def test_raw_images_and_classes(case):
    model = case.model
    found = model.similarity(case.pictures, case.ids)
    near(found, case.expected["24_logits"])
    assert model.classify(case.pictures, ["cat", "dog"]).shape == (4, 2)
    vectors = model.encode_image(case.pictures)
    assert model.retrieve(case.ids, vectors, k=2).indices.shape == (5, 2)
    pairs = {"images": case.pictures, "captions": ["a cat", "a dog", "a", "b"]}
    model = ImageTextSimilarity.from_preset(case.path)
    losses = model.fit(pairs, batch_size=4, epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0]


def test_the_classifier_is_transformers(case):
    model = NaFlexViTImageClassifier.from_preset(case.folder / "classes")
    assert (model.pooling, model.num_classes) == ("gap", 3)
    near(model.predict(case.pictures, verbose=0), case.expected["24_classes"])


def test_directories_both_ways(case, tmp_path):
    case.model.export_to_transformers(tmp_path / "out")
    assert_same_tensors(tmp_path / "out", case.path)
    count = sum(int(np.prod(x.shape)) for x in read_safetensors(case.path).values())
    assert count == case.model.backbone.count_params()
    again = ImageTextSimilarity.from_preset(tmp_path / "out")
    assert again.backbone.config == case.model.backbone.config and again.backbone.naflex
    prepared = {"images": case.pictures, "text": ["a", "b", "c", "d"]}
    case.model.save_to_preset(tmp_path / "own")
    own = ImageTextSimilarity.from_preset(tmp_path / "own")
    for other in (again, own, None):
        made = ImageTextPreprocessor.from_preset(case.path) if other is None else other.preprocessor
        for name, x in case.model.preprocessor(prepared)[0].items():
            np.testing.assert_array_equal(made(prepared)[0][name], x)
    given = {**case.patches("24"), "token_ids": case.ids}
    np.testing.assert_array_equal(to_numpy(own(given)), to_numpy(case.model(given)))
    classes = NaFlexViTImageClassifier.from_preset(case.folder / "classes", pooling="gap")
    classes.export_to_transformers(tmp_path / "classes")
    written = read_safetensors(tmp_path / "classes")
    for name, x in read_safetensors(case.folder / "classes").items():
        # transformers keeps an attention pooling that its classifier does not call.
        if not name.startswith("vision_model.head."):
            np.testing.assert_array_equal(written[name].read(), x.read())


def test_square_images_of_one_size_from_the_same_directory(case):
    fixed = SigLIPBackbone.from_preset(case.path, naflex=False)
    assert type(fixed.vision_encoder) is SigLIPVisionEncoder
    images = np.random.default_rng(1).normal(size=(2, 20, 20, 3)).astype("float32")
    patches = np.stack([patches_of(x, 4) for x in images])
    given = {"pixel_values": patches, "spatial_shapes": np.array([[5, 5]] * 2)}
    expected = to_numpy(fixed.get_vision_embeddings(images))
    near(case.model.backbone.vision_encoder(given), expected, 1e-6)
    assert isinstance(ViTBackbone.from_preset(case.path), ViTBackbone)


# === The processor ===


def test_patches_are_the_processors(case):
    made = NaFlexViTImageClassifierPreprocessor.from_preset(case.path)
    assert made.max_num_patches == 24 and made.patch_size == 4
    for size in SIZES:
        made = NaFlexViTImageClassifierPreprocessor(4, int(size))
        for name, x in case.patches(size).items():
            np.testing.assert_array_equal(made(case.pictures)[name], x)
    alone, labels = made(case.pictures[0], np.array(3))
    assert alone["pixel_values"].shape == (60, 48) and labels == 3
    again = NaFlexViTImageClassifierPreprocessor.from_config(made.get_config())
    np.testing.assert_array_equal(
        again(case.pictures[:1])["pixel_values"][0], alone["pixel_values"]
    )


def test_grids_are_transformers(references):
    held = read_npz(references / "naflex" / "grids.npz")
    for (height, width), budget, grid in zip(
        held["sides"], held["budgets"], held["grids"], strict=True
    ):
        found = grid_of(int(height), int(width), 16, int(budget))
        # transformers gives more patches than it was asked for where one side is too long for it.
        assert found == tuple(grid) or np.prod(grid) > budget
        assert np.prod(found) <= budget
    assert grid_of(30, 50, 16, 256, enlarge=False) == (2, 4)
    assert grid_of(300, 500, 16, 256, enlarge=False) == grid_of(300, 500, 16, 256)
    with pytest.raises(InputError, match="max_num_patches is 0"):
        grid_of(3, 3, 16, 0)


@pytest.mark.parametrize("method", METHODS)
def test_positions_are_resized_as_with_numpy(method):
    for old, new in ((5, 9), (5, 2), (5, 5), (16, 3), (4, 1)):
        place = np.arange(new, dtype="float32")
        found = resize_weights(
            keras.ops.convert_to_tensor(place),
            keras.ops.convert_to_tensor(np.full(new, new, "float32")),
            old,
            method,
        )
        near(found, resize_matrix(old, new, method), 2e-6)


# === Rows with several images ===


@pytest.fixture(scope="module")
def packed():
    """A row of four images, and padding behind them."""
    values = np.random.default_rng(2).normal(size=(1, 50, 48)).astype("float32")
    return {"pixel_values": values, "spatial_shapes": np.array([[*GRIDS, (0, 0)]])}


def alone_of(packed):
    """The same images, each in a row of its own of 20 patches."""
    values, at = np.zeros((4, 20, 48), "float32"), 0
    for i, (rows, columns) in enumerate(GRIDS):
        count = rows * columns
        values[i, :count] = packed["pixel_values"][0, at : at + count]
        at += count
    return {"pixel_values": values, "spatial_shapes": np.array(GRIDS)}


@pytest.mark.parametrize("pooling", ["gap", "map"])
def test_an_image_in_a_row_gives_what_it_gives_alone(packed, pooling, backend):
    keras.utils.set_random_seed(1)
    backbone = NaFlexViTBackbone((20, 20, 3), **SMALL, position_interpolation="bicubic_antialias")
    model = NaFlexViTImageClassifier(backbone, 3, pooling=pooling)
    rng = np.random.default_rng(3)
    model.set_weights([rng.normal(0.1, 0.3, x.shape) for x in model.weights])
    one = alone_of(packed)
    rows = {**one, "spatial_shapes": one["spatial_shapes"][:, None]}
    found, alone = (model.predict(x, verbose=0) for x in (packed, rows))
    assert found.shape == (1, 5, 3) and alone.shape == (4, 1, 3)
    near(found[0, :4], alone[:, 0])
    if backend == "tensorflow":
        with pytest.raises(InputError, match="with and without an axis for the images of a row"):
            model.predict(one, verbose=0)
    else:
        near(model.predict(one, verbose=0), alone[:, 0], 1e-6)
    # Another image, and what stands in the padding, change nothing of the first.
    other = {**packed, "pixel_values": packed["pixel_values"].copy()}
    other["pixel_values"][0, 14:] = 5.0
    changed = model.predict(other, verbose=0)
    near(changed[0, 0], found[0, 0], 1e-6)
    assert np.abs(changed[0, 1:4] - found[0, 1:4]).max() > 100 * LIMIT


def test_one_step_on_a_row_is_one_step_on_its_images(packed):
    """Losses and gradients agree: places without an image count nothing."""
    backbone = NaFlexViTBackbone((20, 20, 3), **SMALL)
    model = NaFlexViTImageClassifier(backbone, 3)
    weights = model.get_weights()
    kept = []
    for given, labels, weight in (
        (packed, np.array([[0, 1, 2, 1, 0]]), np.array([[1.25, 1.25, 1.25, 1.25, 0.0]])),
        (alone_of(packed), np.array([0, 1, 2, 1]), None),
    ):
        model.set_weights(weights)
        model.compile(keras.optimizers.SGD(0.1), weighted_metrics=["accuracy"], loss=LOSS)
        loss = model.train_on_batch(given, labels, sample_weight=weight)
        kept.append((loss, model.get_weights()))
    np.testing.assert_allclose(kept[0][0][0], kept[1][0][0], rtol=0, atol=tolerance("losses"))
    for one, other in zip(kept[0][1], kept[1][1], strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance("losses"))


def test_weights_are_those_of_the_model_of_one_size(tmp_path):
    """A checkpoint of a fixed size is read without a change, and written as one."""
    fixed = ViTBackbone((12, 20, 3), **SMALL, use_class_token=False)
    fixed.save_to_preset(tmp_path / "fixed")
    free = NaFlexViTBackbone.from_preset(tmp_path / "fixed")
    assert [w.path for w in free.weights] == [w.path for w in fixed.weights]
    images = np.random.default_rng(1).normal(size=(2, 12, 20, 3)).astype("float32")
    given = {"pixel_values": np.stack([patches_of(x, 4) for x in images])}
    given["spatial_shapes"] = np.array([[3, 5]] * 2)
    near(free(given), to_numpy(fixed(images)), 1e-6)


# === What is refused ===


def test_messages(tmp_path):
    with pytest.raises(InputError, match="tokens in front of the patches, which images of several"):
        NaFlexViTBackbone(**SMALL, use_class_token=True)
    with pytest.raises(InputError, match="a rotary embedding, no table of positions"):
        NaFlexViTBackbone(**SMALL, rope_theta=100.0, use_position_embedding=False)
    backbone = NaFlexViTBackbone((8, 8, 3), **SMALL)
    with pytest.raises(InputError, match="pooling is 'token'; rows of patches are pooled by gap"):
        NaFlexViTImageClassifier(backbone, 3, pooling="token")
    with pytest.raises(InputError, match="ViTBackbone is given; give a NaFlexViTBackbone"):
        NaFlexViTImageClassifier(ViTBackbone((8, 8, 3), **SMALL, use_class_token=False), 3)
    values, grids = np.zeros((1, 4, 48), "float32"), np.array([[2, 2]])
    with pytest.raises(InputError, match="got ndarray; give a dictionary with pixel_values"):
        backbone(values)
    with pytest.raises(InputError, match="got images; it takes pixel_values, spatial_shapes"):
        backbone({"pixel_values": values, "spatial_shapes": grids, "images": values})
    with pytest.raises(InputError, match=r"spatial_shapes has shape \(1, 3\); give \(B, 2\)"):
        backbone({"pixel_values": values, "spatial_shapes": np.ones((1, 3), int)})
    with pytest.raises(InputError, match="an image has shape"):
        NaFlexViTImageClassifierPreprocessor()([np.zeros((4, 4))])
    with pytest.raises(InputError, match="there are no images"):
        NaFlexViTImageClassifierPreprocessor()([])
    with pytest.raises(InputError, match="give one number per channel"):
        NaFlexViTImageClassifierPreprocessor(std=(0.5, 0.5, 0.0))
    keeps = NaFlexViTImageClassifierPreprocessor(4, 16, enlarge=False)
    fields = {**SMALL, "position_interpolation": "bilinear_antialias", "approximate_gelu": True}
    small = NaFlexViTImageClassifier(NaFlexViTBackbone((8, 8, 3), **fields), 3, keeps)
    with pytest.raises(InputError, match="the preprocessor has enlarge=False"):
        small.export_to_transformers(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(InputError, match="the model got no images; give pixel_values and spatial"):
        fields = SigLIPBackbone.presets["siglip_debug"]
        SigLIPBackbone(**fields, naflex=True)({"token_ids": np.ones((2, 4), "int32")})
