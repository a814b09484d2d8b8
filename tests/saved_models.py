"""Small models with tokenizers, saved as a user has them, and a folder of images in COCO's form."""

import json
from pathlib import Path

import keras
import numpy as np
from PIL import Image

from kmodels.models import (
    GemmaCausalLM,
    GemmaCausalLMPreprocessor,
    ImageTextPreprocessor,
    ImageTextSimilarity,
)
from kmodels.text import demo
from kmodels.text.training import train_tokenizer


def language(folder: Path, chat_template: str | None = None) -> GemmaCausalLM:
    """Saves a Gemma with a tokenizer of the demonstration's texts."""
    keras.utils.set_random_seed(0)
    tokenizer = train_tokenizer(demo.texts(), 500)
    if chat_template:
        tokenizer.chat_template = chat_template
    text, size = GemmaCausalLMPreprocessor(tokenizer), tokenizer.vocabulary_size()
    model = GemmaCausalLM.from_preset("gemma3_debug", vocabulary_size=size, preprocessor=text)
    model.save_to_preset(folder)
    return model


def towers(folder: Path) -> ImageTextSimilarity:
    """Saves two towers that compare images with texts about cats and dogs."""
    keras.utils.set_random_seed(0)
    tokenizer = train_tokenizer(["a photo of a cat", "a photo of a dog"], 300)
    fields = ImageTextSimilarity.presets["clip_micro_patch7_28"]
    size = fields["text_encoder"]["max_sequence_length"]
    ids = {"vocabulary_size": tokenizer.vocabulary_size(), "end_token_id": tokenizer.end_token_id}
    model = ImageTextSimilarity.from_preset(
        "clip_micro_patch7_28",
        vision_encoder={**fields["vision_encoder"], "image_shape": (28, 28, 3)},
        text_encoder={**fields["text_encoder"], **ids},
        preprocessor=ImageTextPreprocessor(
            tokenizer, "clip", image_size=(28, 28), sequence_length=size
        ),
    )
    model.save_to_preset(folder)
    return model


def write_coco(root: Path, images: np.ndarray, objects: list[dict]) -> None:
    """Writes images (N, H, W, 3) of classes a to d, and labels.json with their boxes."""
    root.mkdir()
    described, boxes = [], []
    height, width = images.shape[1:3]
    for i, (pixels, one) in enumerate(zip(images, objects, strict=True)):
        Image.fromarray(pixels).save(root / f"{i}.png")
        described.append({"id": i, "file_name": f"{i}.png"})
        for (x, y, w, h), kind in zip(one["boxes"], one["class_labels"], strict=True):
            box = [(x - w / 2) * width, (y - h / 2) * height, w * width, h * height]
            boxes.append({"image_id": i, "category_id": int(kind), "bbox": [*map(float, box)]})
    names = [{"id": i, "name": name} for i, name in enumerate("abcd")]
    content = {"images": described, "annotations": boxes, "categories": names}
    (root / "labels.json").write_text(json.dumps(content))
