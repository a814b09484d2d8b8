"""Programs of people who segment images."""

import keras
import numpy as np
import pytest

from kmodels.data import made_scenes
from kmodels.models import (
    EoMTImageSegmenter,
    ViTBackbone,
    ViTImageSegmenter,
    ViTImageSegmenterPreprocessor,
)

CLASSES = 5
IMAGES, MASKS = made_scenes(16, (16, 16), seed=1)


@pytest.fixture(scope="module")
def segmenter():
    keras.utils.set_random_seed(0)
    return ViTImageSegmenter.from_preset(
        "vit_debug",
        num_layers=1,
        patch_size=4,
        num_classes=CLASSES,
        preprocessor=ViTImageSegmenterPreprocessor((16, 16)),
    )


@pytest.mark.each_backend
def test_linear_evaluation_of_a_frozen_backbone(segmenter):
    """As keras-hub's segmenters are used: compile, fit, evaluate, predict."""
    before = segmenter.backbone.get_weights()
    segmenter.backbone.trainable = False
    segmenter.compile(optimizer=keras.optimizers.Adam(3e-2))
    data = {"validation_data": (IMAGES[:4], MASKS[:4]), "batch_size": 8}
    history = segmenter.fit(IMAGES, MASKS[..., None], epochs=8, verbose=0, **data).history
    assert history["loss"][-1] < 0.8 * history["loss"][0]
    assert history["val_mean_iou"][-1] > 0.1
    assert all(map(np.array_equal, segmenter.backbone.get_weights(), before))
    logits = segmenter.predict(IMAGES[:3], verbose=0)
    assert logits.shape == (3, 16, 16, CLASSES)
    accuracy = (segmenter.segment(IMAGES) == MASKS).mean()
    assert accuracy >= (MASKS == 0).mean() - 0.05


def test_a_loader_of_images_and_masks_of_any_size(segmenter):
    def batches():
        for i in range(4):
            size = (12 + 4 * i, 30 - 3 * i)
            images, masks = made_scenes(4, size, seed=i)
            # A border that nobody has labeled.
            masks[:, :2] = 255
            yield images, masks

    segmenter.compile(optimizer=keras.optimizers.Adam(1e-3))
    logs = segmenter.fit(batches, epochs=1, verbose=0).history
    assert np.isfinite(logs["loss"]).all() and 0 <= logs["mean_iou"][0] <= 1


if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    @pytest.mark.each_backend
    def test_masks_inside_tf_data(segmenter):
        rows = tf.data.Dataset.from_tensor_slices((IMAGES, MASKS)).map(segmenter.preprocessor)
        images, masks = next(iter(rows.batch(4)))
        assert tuple(images.shape) == (4, 16, 16, 3) and masks.dtype == "int32"
        np.testing.assert_array_equal(masks.numpy(), MASKS[:4])


def test_a_segmenter_of_a_dinov2_like_backbone_under_half_precision():
    backbone = ViTBackbone(
        (16, 16, 3), patch_size=4, num_layers=1, num_heads=2, hidden_dim=16, mlp_dim=24,
        num_register_tokens=2, layer_scale=0.1, dtype="mixed_bfloat16",
    )  # fmt: skip
    model = ViTImageSegmenter(backbone, CLASSES, use_batch_norm=False)
    assert model.output.dtype == "float32" and model.output_dense.compute_dtype == "float32"
    logits = model.predict(np.zeros((1, 16, 16, 3), "float32"), verbose=0)
    assert logits.dtype == "float32"


def test_queries_as_a_user_of_transformers_has_them():
    """Masks with classes, as its image processor makes them of a map of instances."""
    keras.utils.set_random_seed(0)
    backbone = ViTBackbone(
        (16, 16, 3), patch_size=4, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=24,
        num_register_tokens=1, layer_scale=1.0, position_over_prefix=False,
    )  # fmt: skip
    model = EoMTImageSegmenter(
        backbone, CLASSES, ViTImageSegmenterPreprocessor((16, 16)), num_queries=6, num_blocks=1,
        num_upscale_blocks=1, train_num_points=32,
    )  # fmt: skip

    def batches():
        for i in range(2):
            images, masks = IMAGES[8 * i : 8 * i + 8], MASKS[8 * i : 8 * i + 8]
            classes = [np.unique(mask) for mask in masks]
            labels = [
                np.stack([mask == c for c in own]).astype("float32")
                for mask, own in zip(masks, classes, strict=True)
            ]
            yield images, {"mask_labels": labels, "class_labels": classes}

    model.compile(optimizer=keras.optimizers.AdamW(3e-3))
    history = model.fit(batches, epochs=6, verbose=0).history
    assert history["loss"][-1] < history["loss"][0]
    outputs = model.predict_queries(IMAGES[:2])
    assert outputs["masks_queries_logits"].shape == (2, 6, 8, 8)
    assert outputs["class_queries_logits"].shape == (2, 6, CLASSES + 1)
    (segments,) = model.segment_panoptic([IMAGES[0]], threshold=0.1)
    assert segments["segmentation"].shape == (16, 16)
    assert {"id", "label_id", "score"} == set(segments["segments_info"][0])
