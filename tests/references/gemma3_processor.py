"""A processor of Gemma 3 of transformers, with a small tokenizer, its ids and its pixels.

`model` is a directory as transformers writes it and `old` the same in the spelling of older
versions, `pictures` the files. `expected.npz` has for each case of `CASES` `<case>_ids` (B, T),
`<case>_mask`, `<case>_images` (B, T), 1 where an image fills a token, and `<case>_pixels` (N, H, W,
3), with pan-and-scan off, and with `crops_` in front with it on; `torchvision_pixels` are those of
the other backend. Chats are written by the template: `chat_ids` and so on. texts.json has the texts
of the cases, and the files of each text.
"""

import io
import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from chat_cases import GEMMA3
from torchvision_cpu import define_torchvision_operators

define_torchvision_operators()
import tokenizers  # noqa: E402
import transformers  # noqa: E402
from transformers.models.gemma3.image_processing_gemma3 import Gemma3ImageProcessor  # noqa: E402
from transformers.models.gemma3.image_processing_pil_gemma3 import (  # noqa: E402
    Gemma3ImageProcessorPil,
)

SIZE, TOKENS = 20, 4
CROPS = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 12,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
# Names with (height, width): square, below the ratio, long and tall with 2, 3 and 4 crops, sizes
# that no number of crops divides, crops that would be too small, and half a crop to be rounded up.
PICTURES = {
    "square.png": (20, 20),
    "nearly.png": (33, 39),
    "wide2.png": (31, 47),
    "wide3.jpg": (37, 103),
    "tall4.png": (171, 41),
    "tiny.png": (9, 40),
    "half.png": (30, 75),
    "grey.png": (45, 24),
    "palette.png": (26, 29),
}
BOI = "<start_of_image>"
CASES = {
    "none": (["no image at all", "and none here"], [[], []]),
    "one": ([f"What is {BOI}?", f"{BOI}"], [["square.png"], ["wide2.png"]]),
    "several": (
        [f"a {BOI} and {BOI} here", f"\n{BOI} \n", f"{BOI}{BOI}the end"],
        [["wide3.jpg", "tall4.png"], ["nearly.png"], ["tiny.png", "half.png"]],
    ),
    "modes": ([f"{BOI} or {BOI}"], [["grey.png", "palette.png"]]),
    "without_text": (None, [["square.png", "nearly.png"], ["half.png", "tall4.png"]]),
}
CHATS = [
    [
        {"role": "system", "content": [{"type": "text", "text": "be kind"}]},
        {
            "role": "user",
            "content": [
                {"type": "image", "image": "wide2.png"},
                {"type": "text", "text": " what is it? "},
                {"type": "image", "image": "square.png"},
            ],
        },
        {"role": "assistant", "content": [{"type": "text", "text": "two things"}]},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "and this?"},
                {"type": "image", "image": "tall4.png"},
            ],
        },
    ],
    [{"role": "user", "content": [{"type": "text", "text": "no image"}]}],
]


def write_pictures(folder: Path) -> None:
    random = np.random.default_rng(7)
    for name, (height, width) in PICTURES.items():
        rows, columns = np.mgrid[0:height, 0:width]
        waves = np.stack([rows * 7 + columns, columns * 11 - rows, rows * columns], -1) % 256
        noise = random.integers(-40, 41, waves.shape)
        image = Image.fromarray(np.clip(waves + noise, 0, 255).astype("uint8"))
        if name.startswith("grey"):
            image = image.convert("L")
        if name.startswith("palette"):
            image = image.convert("P", palette=Image.Palette.ADAPTIVE, colors=50)
        buffer = io.BytesIO()
        image.save(buffer, "JPEG" if name.endswith("jpg") else "PNG")
        (folder / name).write_bytes(buffer.getvalue())


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    core = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>"))
    core.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    core.pre_tokenizer = tokenizers.pre_tokenizers.Split("\u2581", "merged_with_previous")
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    images = [BOI, "<end_of_image>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=420, special_tokens=[*special, *bytes_, *images], show_progress=False
    )
    texts = [text for found, _ in CASES.values() if found for text in found]
    lines = [
        "\n\n \n\n",
        "Here is the original image and here are some crops to help you see better",
    ]
    core.train_from_iterator([*texts, *lines, "user model be kind what is it two things"], trainer)
    core.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("\u2581", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
        ]
    )
    core.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 2)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        padding_side="right",
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        extra_special_tokens={
            "boi_token": BOI,
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
    )


def named(out: dict, name: str) -> dict:
    found = {
        f"{name}_ids": out["input_ids"],
        f"{name}_mask": out["attention_mask"],
        f"{name}_images": out["token_type_ids"],
    }
    if "pixel_values" in out:
        found[f"{name}_pixels"] = np.moveaxis(np.asarray(out["pixel_values"]), 1, -1)
    return found


def chats(pictures: Path) -> list:
    def part(one: dict) -> dict:
        if "image" not in one:
            return one
        return {**one, "image": Image.open(pictures / one["image"])}

    return [
        [{**turn, "content": [part(one) for one in turn["content"]]} for turn in chat]
        for chat in CHATS
    ]


def older(folder: Path, newer: Path) -> None:
    """Writes the files as versions before 5 do: settings apart, numbers that are not set null."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((newer / name).read_bytes())
    images = {
        "do_convert_rgb": None,
        "do_normalize": True,
        "do_pan_and_scan": None,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_processor_type": "Gemma3ImageProcessor",
        "image_seq_length": TOKENS,
        "image_std": [0.5, 0.5, 0.5],
        "pan_and_scan_max_num_crops": None,
        "pan_and_scan_min_crop_size": None,
        "pan_and_scan_min_ratio_to_activate": None,
        "processor_class": "Gemma3Processor",
        "resample": 2,
        "rescale_factor": 0.00392156862745098,
        "size": {"height": SIZE, "width": SIZE},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    whole = {"image_seq_length": TOKENS, "processor_class": "Gemma3Processor"}
    (folder / "processor_config.json").write_text(json.dumps(whole))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": GEMMA3}))


def write(folder: Path) -> None:
    transformers.logging.set_verbosity_error()
    pictures = folder / "pictures"
    for name in ("pictures", "model", "old"):
        (folder / name).mkdir(exist_ok=True)
    write_pictures(pictures)
    size = {"height": SIZE, "width": SIZE}
    made = tokenizer()
    found: dict = {}
    processor = transformers.Gemma3Processor(
        Gemma3ImageProcessorPil(size=size),
        made,
        chat_template=GEMMA3,
        image_seq_length=TOKENS,
    )
    processor.save_pretrained(folder / "model")
    # Its defaults count before those of the image processor, so they are given with each call.
    for prefix, more in (("", {}), ("crops_", CROPS)):
        arguments = {"padding": True, "return_tensors": "np", **more}
        for case, (texts, names) in CASES.items():
            given = {"text": texts} if texts else {}
            if any(names):
                given["images"] = [[Image.open(pictures / n) for n in row] for row in names]
            found |= named(processor(**given, **arguments), prefix + case)
        out = processor.apply_chat_template(
            chats(pictures),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            processor_kwargs=arguments,
        )
        found |= named(out, f"{prefix}chat")
    both = Gemma3ImageProcessor(size=size)
    image = Image.open(pictures / "wide3.jpg")
    pixels = both(image, return_tensors="pt")["pixel_values"]
    assert isinstance(pixels, torch.Tensor)
    found["torchvision_pixels"] = np.moveaxis(pixels.numpy(), 1, -1)
    older(folder / "old", folder / "model")
    np.savez(folder / "expected.npz", **found)
    said = {"cases": CASES, "chats": CHATS, "size": SIZE, "tokens": TOKENS, "crops": CROPS}
    (folder / "texts.json").write_text(json.dumps(said))
