"""MAE's pretraining in transformers: what it says of hidden patches, and its loss."""

from pathlib import Path

import numpy as np
import torch
import transformers
from transformers.models.vit_mae.modeling_vit_mae import build_2d_sinusoidal_position_embedding

from references.common import pictures, randomise, save, save_model, vision_sizes

TINY = vision_sizes(
    intermediate_size=40,
    image_size=16,
    decoder_hidden_size=16,
    decoder_num_hidden_layers=2,
    decoder_num_attention_heads=2,
    decoder_intermediate_size=28,
)


def case(folder: Path, name: str, seed: int, **changes) -> None:
    model = transformers.ViTMAEForPreTraining(transformers.ViTMAEConfig(**TINY, **changes))
    save_model(randomise(model, seed), folder / name / "model")
    images = pictures((16, 16), model.config.num_channels, 3)
    noise = torch.rand((3, 16), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        found = model(images, noise=noise)
    held = {"images": images, "noise": noise, "mask": found.mask, "loss": found.loss}
    save(folder / name / "expected.npz", **held, logits=found.logits)


def write(folder: Path) -> None:
    # With random weights the encoder's table is no longer that of sines.
    case(folder, "pixels", 1, mask_ratio=0.6, layer_norm_eps=1e-3)
    case(folder, "normalised", 2, norm_pix_loss=True, qkv_bias=False, num_channels=1)
    # A model that transformers 5.23 makes anew has zeros there; this is what it means to put.
    table = build_2d_sinusoidal_position_embedding(3, 5, 24, cls_token=True)
    save(folder / "positions.npz", table=np.roll(table.numpy(), 12, axis=1))
