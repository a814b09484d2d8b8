"""SigLIP 2 of transformers on images of several aspect ratios, with its processor.

`model` is a directory as transformers writes it, with processor and tokenizer. `pictures.npz` has
images by number; `expected.npz` what the processor (`values`, `mask`, `shapes`) and the model
(`tokens`, `embeds`, `logits`) make of them at two sizes, under names that begin with the number of
patches, for `token_ids`. `grids.npz` has the size of images and the grid that the processor's
search finds. `classes` is a classifier, with its logits at the first size.
"""

from pathlib import Path

import numpy as np
import torch
import transformers
from transformers.models.siglip2 import image_processing_pil_siglip2 as processing

from references.common import PATCH, randomise, save, token_ids, vision_sizes
from references.two_towers import TEXT, gemma

SIZES = (24, 60)
VISION = vision_sizes(num_attention_heads=2, image_size=None, num_patches=25)
PICTURES = ((21, 37), (50, 9), (16, 16), (7, 90))
NAMES = {"pixel_values": "values", "pixel_attention_mask": "mask", "spatial_shapes": "shapes"}


def write(folder: Path) -> None:
    place = folder / "model"
    text = {**TEXT, "vocab_size": 300}
    config = transformers.Siglip2Config(text_config=text, vision_config=VISION)
    model = randomise(transformers.Siglip2Model(config), 3)
    with torch.no_grad():
        model.logit_scale.fill_(2.0)
        model.logit_bias.fill_(-1.5)
    model.save_pretrained(place)
    gemma(place)
    processor = transformers.Siglip2ImageProcessorPil(patch_size=PATCH, max_num_patches=SIZES[0])
    processor.save_pretrained(place)
    config = transformers.Siglip2Config(text_config=text, vision_config=VISION, num_labels=3)
    classes = randomise(transformers.Siglip2ForImageClassification(config), 4)
    classes.save_pretrained(folder / "classes")
    processor.save_pretrained(folder / "classes")

    draw = np.random.default_rng(3)
    pictures = [draw.integers(0, 256, (*size, 3), dtype="uint8") for size in PICTURES]
    save(folder / "pictures.npz", **{str(i): x for i, x in enumerate(pictures)})
    ids = token_ids(3, 290, (5, 12))
    outputs = {"token_ids": ids}
    for size in SIZES:
        given = processor(pictures, max_num_patches=size, return_tensors="pt")
        with torch.no_grad():
            out = model(input_ids=ids, **given)
        named = {NAMES[name]: x for name, x in given.items()}
        named["tokens"] = out.vision_model_output.last_hidden_state
        named["embeds"] = out.vision_model_output.pooler_output
        named["logits"] = out.logits_per_image
        if size == SIZES[0]:
            with torch.no_grad():
                named["classes"] = classes(**given).logits
        outputs |= {f"{size}_{name}": x for name, x in named.items()}
    save(folder / "expected.npz", **outputs)
    sides = draw.integers(1, 3000, (200, 2))
    budgets = draw.choice([1, 9, 64, 256, 1024], 200)
    grids = [
        processing.get_image_size_for_max_num_patches(int(h), int(w), 16, int(n))
        for (h, w), n in zip(sides, budgets, strict=True)
    ]
    save(folder / "grids.npz", sides=sides, budgets=budgets, grids=np.array(grids) // 16)
