"""CLIP, SigLIP and SigLIP 2 of transformers with both towers, and their processors.

Each of `clip`, `siglip` and `siglip2` is a folder: `model` (a directory as transformers writes it)
and `expected.npz` with `images` (4, height, width, 3), `token_ids` (5, T), the `image_embeds` and
`text_embeds` of length 1 and `logits_per_image` (4, 5) of them, and the `loss` of the first four
pairs; `many64` and `many16` are the vectors of `many_images` and `many_ids` in float64 and
bfloat16, `masked` the logits under `padding_mask`, which hides a token that the others show.
`adapter` is written by PEFT over both towers, with `adapter.npz`: the logits with it. The directory
holds what a processor writes too, with `prepared.npz`: its pixels of `pictures` and ids of the
texts in `texts.json`.
"""

from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers

from references.clip import END, TEXTS, write_tokenizer
from references.common import (
    pictures,
    randomise,
    save,
    save_json,
    text_sizes,
    token_ids,
    vision_sizes,
)
from references.lora import write_adapter
from references.vit_kinds import rows_of
from sentencepiece_files import CONTROL, NORMAL, UNKNOWN, sentencepiece_model

TEXT = text_sizes(pad_token_id=1)
VISION = vision_sizes(num_attention_heads=2, image_size=16)
NATIVE = vision_sizes(num_attention_heads=2, image_size=None, num_patches=16)
UNIGRAM = 1
TARGETS = ["q_proj", "v_proj", "fc1"]


def make(kind: str) -> torch.nn.Module:
    if kind == "clip":
        config = transformers.CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=10)
        model = transformers.CLIPModel(config)
    elif kind == "siglip":
        config = transformers.SiglipConfig(text_config=TEXT, vision_config=VISION)
        model = transformers.SiglipModel(config)
    else:
        config = transformers.Siglip2Config(text_config=TEXT, vision_config=NATIVE)
        model = transformers.Siglip2Model(config)
    randomise(model, 3)
    with torch.no_grad():
        model.logit_scale.fill_(2.0)
        if kind != "clip":
            model.logit_bias.fill_(-1.5)
    return model


def padded_ids() -> tuple[torch.Tensor, torch.Tensor]:
    ids = token_ids(3, 39, (5, 12))
    mask = torch.ones_like(ids)
    for row, place in enumerate((11, 7, 4, 9, 2)):
        ids[row, place] = END
        ids[row, place + 1 :] = 1
        mask[row, 1] = 0
    return ids, mask


def given(kind: str, ids: torch.Tensor, images: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "input_ids": ids,
        **(rows_of(images) if kind == "siglip2" else {"pixel_values": images}),
    }


def one(folder: Path, kind: str) -> None:
    model = make(kind)
    model.save_pretrained(folder / "model")
    ids, mask = padded_ids()
    images = pictures((16, 16), number=4)
    inputs = given(kind, ids, images)
    outputs = {"images": images, "token_ids": ids, "padding_mask": mask}
    output = "logits_per_image"
    _, logits = write_adapter(folder / "adapter", make(kind), TARGETS, inputs, output)
    save(folder / "adapter.npz", logits=logits)
    with torch.no_grad():
        outputs["masked"] = model(**inputs, attention_mask=mask).logits_per_image
        out = model(**inputs)
        for key in ("image_embeds", "text_embeds", "logits_per_image"):
            outputs[key] = out[key]
        outputs["loss"] = model(**given(kind, ids[:4], images), return_loss=True).loss
        many = pictures((16, 16), number=64)
        rows = token_ids(3, 39, (64, 12), 6)
        rows[:, -1] = END
        outputs |= {"many_images": many, "many_ids": rows}
        for bits, dtype in (("64", torch.float64), ("16", torch.bfloat16)):
            out = model.to(dtype)(**given(kind, rows, many.to(dtype)))
            outputs[f"many{bits}"] = torch.cat([out.image_embeds, out.text_embeds]).double()
    save(folder / "expected.npz", **outputs)


# === Processors ===


def unigram(file: Path) -> None:
    """A vocabulary of pieces with probabilities, as SigLIP's own."""
    words = ["a", "photo", "of", "cat", "two", "lines"]
    words = [*(f"\u2581{word}" for word in words), "es", "ing"]
    letters = [*"abcdefghijklmnopqrstuvwxyz0123456789", "\u2581"]
    pieces = [("<pad>", 0.0, CONTROL), ("</s>", 0.0, CONTROL), ("<unk>", 0.0, UNKNOWN)]
    pieces += [(x, -2.0 - 0.1 * i, NORMAL) for i, x in enumerate(words)]
    pieces += [(x, -6.0 - 0.1 * i, NORMAL) for i, x in enumerate(letters)]
    file.write_bytes(sentencepiece_model(pieces, UNIGRAM, prefix=True))


def gemma(folder: Path) -> None:
    """A vocabulary of merges, as Gemma's, that SigLIP 2 reads in small letters."""
    roles = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    letters = [*"abcdefghijklmnopqrstuvwxyz'.,!\u2581", *(f"<0x{i:02X}>" for i in range(256))]
    merges = [("c", "a"), ("ca", "t"), ("\u2581", "cat"), ("p", "h"), ("ph", "o")]
    vocabulary = {x: i for i, x in enumerate([*roles, *letters])}
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    theirs = transformers.Siglip2Tokenizer(
        vocab=vocabulary, merges=merges, padding_side="right", model_max_length=12
    )
    theirs.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", vocabulary["<eos>"])]
    )
    theirs.save_pretrained(folder)


def write_processor(folder: Path, kind: str) -> None:
    place = folder / "model"
    if kind == "clip":
        write_tokenizer(place)
        tokenizer = transformers.CLIPTokenizer.from_pretrained(place)
        size = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
        images = transformers.CLIPImageProcessorPil(**size)
    else:
        if kind == "siglip":
            unigram(place / "spiece.model")
            tokenizer = transformers.SiglipTokenizer(
                str(place / "spiece.model"), model_max_length=12
            )
            tokenizer.save_pretrained(place)
        else:
            gemma(place)
            tokenizer = transformers.Siglip2Tokenizer.from_pretrained(place)
        images = transformers.SiglipImageProcessorPil(size={"height": 16, "width": 16})
    images.save_pretrained(place)
    shown = np.random.default_rng(3).integers(0, 256, (3, 21, 37, 3), dtype="uint8")
    pixels = images(list(shown), return_tensors="np")["pixel_values"].transpose(0, 2, 3, 1)
    ids = tokenizer(TEXTS, padding="max_length", max_length=12, truncation=True)["input_ids"]
    save(folder / "prepared.npz", pictures=shown, pixels=pixels, token_ids=np.array(ids))
    save_json(folder / "texts.json", TEXTS)


def write(folder: Path) -> None:
    for kind in ("clip", "siglip", "siglip2"):
        one(folder / kind, kind)
        write_processor(folder / kind, kind)
