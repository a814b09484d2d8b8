"""A processor of Gemma 3 of transformers, with a small tokenizer, its ids and its pixels.

`model` is a directory as transformers writes it and `old` the same in the spelling of older
versions, `pictures` the files. `expected.npz` has for each case of `CASES` `<case>_ids` (B, T),
`<case>_mask`, `<case>_images` (B, T), 1 where an image fills a token, and `<case>_pixels` (N, H, W,
3), with pan-and-scan off, and with `crops_` in front with it on; `torchvision_pixels` are those of
the other backend. Chats are written by the template: `chat_ids` and so on. texts.json has the texts
of the cases, and the files of each text.
"""

from pathlib import Path

import numpy as np
import tokenizers
import transformers
from PIL import Image
from transformers.models.gemma3.image_processing_gemma3 import Gemma3ImageProcessor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from chat_cases import GEMMA3
from references.common import save, save_json

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
MARKS = {"boi_token": BOI, "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
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


def chats_of(wide: str, square: str, tall: str, question: str) -> list[list[dict]]:
    """A chat with three images and one with none."""

    def turn(role: str, *parts: str) -> dict:
        content = [
            {"type": "image", "image": part}
            if part in (wide, square, tall)
            else {"type": "text", "text": part}
            for part in parts
        ]
        return {"role": role, "content": content}

    return [
        [
            turn("system", "be kind"),
            turn("user", wide, question, square),
            turn("assistant", "two things"),
            turn("user", "and this?", tall),
        ],
        [turn("user", "no image")],
    ]


CHATS = chats_of("wide2.png", "square.png", "tall4.png", " what is it? ")


def write_pictures(folder: Path, sizes: dict[str, tuple[int, int]]) -> None:
    folder.mkdir(exist_ok=True)
    random = np.random.default_rng(7)
    for name, (height, width) in sizes.items():
        rows, columns = np.mgrid[0:height, 0:width]
        waves = np.stack([rows * 7 + columns, columns * 11 - rows, rows * columns], -1) % 256
        noise = random.integers(-40, 41, waves.shape)
        image = Image.fromarray(np.clip(waves + noise, 0, 255).astype("uint8"))
        if name.startswith("grey"):
            image = image.convert("L")
        if name.startswith("palette"):
            image = image.convert("P", palette=Image.Palette.ADAPTIVE, colors=50)
        image.save(folder / name)


def tokenizer(
    texts: list[str],
    special: list[str],
    last: list[str] = (),
    size: int = 420,
    template: str = "<bos> $A",
    by_word: bool = True,
    **settings: object,
) -> transformers.PreTrainedTokenizerFast:
    """Gemma's kind, trained on the texts, with special tokens in front of and behind the bytes."""
    core = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>"))
    core.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    if by_word:
        core.pre_tokenizer = tokenizers.pre_tokenizers.Split("\u2581", "merged_with_previous")
    special = ["<pad>", "<eos>", "<bos>", "<unk>", *special]
    tokens = [*special, *(f"<0x{i:02X}>" for i in range(256)), *last]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, special_tokens=tokens, show_progress=False
    )
    core.train_from_iterator(texts, trainer)
    decoders = tokenizers.decoders
    core.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    ends = [(token, i) for token, i in (("<bos>", 2), ("<eos>", 1)) if token in template]
    core.post_processor = tokenizers.processors.TemplateProcessing(
        single=template, special_tokens=ends
    )
    names = zip(("pad_token", "eos_token", "bos_token", "unk_token"), special, strict=False)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, padding_side="right", **dict(names), **settings
    )


def texts_of(cases: dict[str, tuple]) -> list[str]:
    return [text for texts, _ in cases.values() for text in texts or ()]


def named(out: dict, name: str) -> dict:
    arrays = {
        f"{name}_ids": out["input_ids"],
        f"{name}_mask": out["attention_mask"],
        f"{name}_images": out["token_type_ids"],
    }
    if "pixel_values" in out:
        arrays[f"{name}_pixels"] = np.moveaxis(np.asarray(out["pixel_values"]), 1, -1)
    return arrays


def results(processor, pictures: Path, cases: dict, chats: list, naming, **settings) -> dict:
    """Outputs of the processor for each case and, named "chat", for the chats, by `naming`."""

    def part(one: dict) -> dict:
        return {**one, "image": Image.open(pictures / one["image"])} if "image" in one else one

    arguments = {"padding": True, "return_tensors": "np", **settings}
    arrays = {}
    for case, (texts, names) in cases.items():
        inputs = {"text": texts} if texts else {}
        if any(names):
            inputs["images"] = [[Image.open(pictures / n) for n in row] for row in names]
        arrays |= naming(processor(**inputs, **arguments), case)
    opened = [
        [{**turn, "content": [part(one) for one in turn["content"]]} for turn in chat]
        for chat in chats
    ]
    settings = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
    out = processor.apply_chat_template(opened, **settings, processor_kwargs=arguments)
    return {**arrays, **naming(out, "chat")}


def older(folder: Path, newer: Path) -> None:
    """Writes the files as versions before 5 do: settings apart, numbers that are not set null."""
    folder.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((newer / name).read_bytes())
    crops = ("max_num_crops", "min_crop_size", "min_ratio_to_activate")
    images = {
        **{"do_normalize": True, "do_rescale": True, "do_resize": True},
        **{"do_convert_rgb": None, "do_pan_and_scan": None},
        **{f"pan_and_scan_{name}": None for name in crops},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "image_processor_type": "Gemma3ImageProcessor",
        "image_seq_length": TOKENS,
        "processor_class": "Gemma3Processor",
        "resample": 2,
        "rescale_factor": 0.00392156862745098,
        "size": {"height": SIZE, "width": SIZE},
    }
    save_json(folder / "preprocessor_config.json", images)
    whole = {"image_seq_length": TOKENS, "processor_class": "Gemma3Processor"}
    save_json(folder / "processor_config.json", whole)
    save_json(folder / "chat_template.json", {"chat_template": GEMMA3})


def write(folder: Path) -> None:
    pictures = folder / "pictures"
    write_pictures(pictures, PICTURES)
    lines = [
        "\n\n \n\n",
        "Here is the original image and here are some crops to help you see better",
        "user model be kind what is it two things",
    ]
    turns = ["<start_of_turn>", "<end_of_turn>"]
    images = [BOI, "<end_of_image>"]
    texts = [*texts_of(CASES), *lines]
    size = {"height": SIZE, "width": SIZE}
    processor = transformers.Gemma3Processor(
        Gemma3ImageProcessorPil(size=size),
        tokenizer(texts, turns, images, extra_special_tokens=MARKS),
        chat_template=GEMMA3,
        image_seq_length=TOKENS,
    )
    processor.save_pretrained(folder / "model")
    arrays: dict = {}
    # Its defaults count before those of the image processor, so they are given with each call.
    for prefix, crops in (("", {}), ("crops_", CROPS)):
        named_here = results(processor, pictures, CASES, CHATS, named, **crops)
        arrays |= {f"{prefix}{name}": x for name, x in named_here.items()}
    with Image.open(pictures / "wide3.jpg") as image:
        pixels = Gemma3ImageProcessor(size=size)(image, return_tensors="pt")["pixel_values"]
    arrays["torchvision_pixels"] = np.moveaxis(pixels.numpy(), 1, -1)
    older(folder / "old", folder / "model")
    save(folder / "expected.npz", **arrays)
    inputs = {"cases": CASES, "chats": CHATS, "size": SIZE, "tokens": TOKENS, "crops": CROPS}
    save_json(folder / "texts.json", inputs)
