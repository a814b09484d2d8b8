"""EoMT in transformers: what its queries say, its loss at given points, and its segments."""

from pathlib import Path
from unittest import mock

import numpy as np
import torch
import transformers
from transformers.models.eomt.image_processing_eomt import (
    EomtImageProcessor,
    get_size_with_aspect_ratio,
)

from points_drawn import points
from references.common import randomise, save, save_json, save_model

CLASSES, IGNORED = 5, 255
TINY = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "patch_size": 4,
    "num_blocks": 2,
    "num_queries": 7,
    "num_register_tokens": 2,
    "layerscale_value": 0.7,
    "train_num_points": 40,
    "num_labels": CLASSES,
    "no_object_weight": 0.3,
}
THRESHOLDS = {"threshold": 0.22}
OVERLAP = {"mask_threshold": 0.45, "overlap_mask_area_threshold": 0.4, "stuff_classes": [0, 2]}
SIZES = [(22, 16), (11, 30)]


def drawn(*shape, device=None):
    """Stands for `torch.rand`."""
    return torch.from_numpy(points(shape[-2])).expand(shape).clone()


def case(folder: Path, name: str, kind: str, seed: int, probs: tuple, **changes) -> None:
    config = getattr(transformers, f"{kind}Config")(**{**TINY, **changes})
    model = getattr(transformers, f"{kind}ForUniversalSegmentation")(config).eval()
    randomise(model, seed)
    with torch.no_grad():
        model.criterion.empty_weight.fill_(1.0)
        model.criterion.empty_weight[-1] = config.no_object_weight
        model.attn_mask_probs.copy_(torch.tensor(probs))
    save_model(model, folder / name / "model")
    rng, side = np.random.default_rng(seed), config.image_size
    images = torch.from_numpy(rng.normal(size=(2, 3, side, side)).astype("float32"))
    labels = np.kron(rng.integers(0, CLASSES, (2, 2, 2)), np.ones((side // 2, side // 2), int))
    labels[:, :3, 2:7] = IGNORED
    with torch.no_grad():
        found = model(images)
    held = {"images": images, "masks": found.masks_queries_logits}
    held |= {"classes": found.class_queries_logits, "labels": torch.from_numpy(labels)}
    if all(p == 1 for p in probs):
        own = [[c for c in range(CLASSES) if (one == c).any()] for one in labels]
        masks = [
            torch.from_numpy(np.stack([one == c for c in kept]).astype("float32"))
            for one, kept in zip(labels, own, strict=True)
        ]
        with mock.patch("torch.rand", drawn), torch.no_grad():
            held["loss"] = model(images, masks, [torch.tensor(kept) for kept in own]).loss
    save(folder / name / "expected.npz", **held)
    segments(folder / name, found, side)


def segments(folder: Path, found, side: int) -> None:
    """What the image processor makes of outputs, for images of other sizes."""
    size = {"shortest_edge": side, "longest_edge": side}
    processor = EomtImageProcessor(size=size)
    semantic = processor.post_process_semantic_segmentation(found, SIZES)
    instances = processor.post_process_instance_segmentation(found, SIZES, **THRESHOLDS)
    panoptic = processor.post_process_panoptic_segmentation(found, SIZES, **THRESHOLDS, **OVERLAP)
    held = {f"semantic_{i}": x for i, x in enumerate(semantic)}
    info = {"content": [get_size_with_aspect_ratio(x, side, side) for x in SIZES]}
    for kind, rows in (("instances", instances), ("panoptic", panoptic)):
        held |= {f"{kind}_{i}": row["segmentation"] for i, row in enumerate(rows)}
        info[kind] = [row["segments_info"] for row in rows]
    save(folder / "segments.npz", **held)
    save_json(folder / "segments.json", info)


def write(folder: Path) -> None:
    ones = (1.0, 1.0)
    case(folder, "dinov2", "Eomt", 1, ones, image_size=16, mlp_ratio=2, layer_norm_eps=1e-3)
    case(folder, "gated", "Eomt", 2, (0.0, 1.0), image_size=24, use_swiglu_ffn=True)
    turning = {"intermediate_size": 40, "pos_embed_rescale": None, "proj_bias": False}
    turning["rope_parameters"] = {"rope_theta": 50.0, "rope_type": "default"}
    case(folder, "dinov3", "EomtDinov3", 3, ones, image_size=24, **turning)
    gated = {"use_gated_mlp": True, "hidden_act": "silu", "mlp_bias": False}
    case(folder, "dinov3_gated", "EomtDinov3", 5, (0.0, 1.0), image_size=16, **turning, **gated)
    # As at the end of a training; and a tower without registers.
    plain = {"num_upscale_blocks": 1, "num_register_tokens": 0}
    case(folder, "dinov3_plain", "EomtDinov3", 4, (0.0, 0.0), image_size=16, **turning, **plain)
