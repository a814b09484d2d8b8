"""What transformers' processors of Gemma 4 make of texts with images of any shape.

`pictures` holds the images of the cases, `model` a directory with tokenizer, chat template and
processor as transformers writes it, `unified` the same of the model without an encoder, and
`expected.npz` for each case `<case>_ids` (B, T), `<case>_mask`, `<case>_images`, 1 where an image
stands, and for all its images `<case>_pixels` (M, P, C) and `<case>_places` (M, P, 2) of Pillow's
backend; `<case>_merged` and `<case>_merged_places` are those after transformers' own
`patches_merge`. `torchvision_*` is what the processor without an encoder gives, whose resizing
rounds otherwise.
"""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.gemma4.video_processing_gemma4 import Gemma4VideoProcessor
from transformers.models.gemma4_unified.image_processing_gemma4_unified import (
    Gemma4UnifiedImageProcessor,
    patches_merge,
)

from references.common import save, save_json
from references.gemma3_processor import chats_of, results, texts_of, tokenizer, write_pictures

SIZES = {"patch_size": 2, "max_soft_tokens": 70, "pooling_kernel_size": 2}
# Names with (height, width): smaller and larger than the patches allow, as large as they allow,
# long, tall, and so long that one side would have no piece.
PICTURES = {
    "square.png": (20, 20),
    "exact.png": (28, 40),
    "wide.jpg": (37, 103),
    "tall.png": (171, 41),
    "thread.png": (2, 190),
    "pole.png": (300, 3),
    "grey.png": (45, 24),
}
SOFT = "<|image|>"
CASES = {
    "none": (["no image at all", "and none here"], [[], []]),
    "one": ([f"What is {SOFT}?", f"{SOFT}"], [["square.png"], ["exact.png"]]),
    "several": (
        [f"a {SOFT} and {SOFT} here", f"\n{SOFT} \n", f"{SOFT}{SOFT}the end"],
        [["wide.jpg", "tall.png"], ["exact.png"], ["thread.png", "pole.png"]],
    ),
    "modes": ([f"{SOFT} or"], [["grey.png"]]),
    "without_text": (None, [["square.png", "thread.png"], ["tall.png", "exact.png"]]),
}
TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' -}}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{- '<|image|>' -}}
{%- else -%}{{- part.text | trim -}}{%- endif -%}
{%- endfor -%}
{{- '<turn|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|turn>model\\n<|channel>thought\\n<channel|>' -}}{%- endif -%}
"""
CHATS = chats_of("wide.jpg", "square.png", "tall.png", "what is it?")
MARKS = {
    **{"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": SOFT},
    **{"boa_token": "<|audio>", "eoa_token": "<audio|>", "audio_token": "<|audio|>"},
}


def merged(pixels: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What transformers' own function makes of the patches of each image, padded again."""
    factor, most = SIZES["pooling_kernel_size"] ** 2, SIZES["max_soft_tokens"]
    all_pixels = np.zeros((len(pixels), most, pixels.shape[-1] * factor), "float32")
    all_places = np.full((len(pixels), most, 2), -1)
    for number, (one, where) in enumerate(zip(pixels, places, strict=True)):
        there = (where >= 0).all(-1)
        count = int(there.sum()) // factor
        found = patches_merge(
            torch.as_tensor(one[there])[None], torch.as_tensor(where[there])[None], count
        )
        all_pixels[number, :count], all_places[number, :count] = (x[0].numpy() for x in found)
    return all_pixels, all_places


def named(out: dict, name: str) -> dict:
    arrays = {
        f"{name}_ids": out["input_ids"],
        f"{name}_mask": out["attention_mask"],
        f"{name}_images": out["mm_token_type_ids"],
    }
    if "pixel_values" in out:
        pixels = np.asarray(out["pixel_values"], "float32")
        places = np.asarray(out["image_position_ids"])
        arrays |= {f"{name}_pixels": pixels, f"{name}_places": places}
        both = merged(pixels, places)
        arrays |= {f"{name}_merged": both[0], f"{name}_merged_places": both[1]}
    return arrays


def write(folder: Path) -> None:
    pictures = folder / "pictures"
    write_pictures(pictures, PICTURES)
    texts = [*texts_of(CASES), "user model system thought be kind what is it two"]
    turns = ["<|turn>", "<turn|>", "<|channel>", "<channel|>"]
    words = tokenizer(texts, turns, list(MARKS.values()), extra_special_tokens=MARKS)
    processor = Gemma4Processor(
        Gemma4AudioFeatureExtractor(),
        Gemma4ImageProcessorPil(**SIZES),
        words,
        Gemma4VideoProcessor(**SIZES),
        chat_template=TEMPLATE,
        image_seq_length=SIZES["max_soft_tokens"],
    )
    processor.save_pretrained(folder / "model")
    arrays = results(processor, pictures, CASES, CHATS, named)
    unified = Gemma4UnifiedImageProcessor(**SIZES)
    for name in ("exact.png", "wide.jpg"):
        out = unified(Image.open(pictures / name), return_tensors="pt")
        key = name.partition(".")[0]
        arrays[f"torchvision_{key}"] = out["pixel_values"]
        arrays[f"torchvision_{key}_places"] = out["image_position_ids"]
    save(folder / "expected.npz", **arrays)
    words.save_pretrained(folder / "unified")
    unified.save_pretrained(folder / "unified")
    (folder / "unified" / "chat_template.jinja").write_text(TEMPLATE)
    save_json(folder / "texts.json", {"cases": CASES, "chats": CHATS, "sizes": SIZES})
