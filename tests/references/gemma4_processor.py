"""What transformers' processors of Gemma 4 make of texts with images of any shape.

`pictures` holds the images of the cases, `model` a directory with tokenizer, chat template and
processor as transformers writes it, `unified` the same of the model without an encoder, and
`expected.npz` for each case `<case>_ids` (B, T), `<case>_mask`, `<case>_images`, 1 where an image
stands, and for all its images `<case>_pixels` (M, P, C) and `<case>_places` (M, P, 2) of Pillow's
backend; `<case>_merged` and `<case>_merged_places` are those after transformers' own
`patches_merge`. `torchvision_*` is what the processor without an encoder gives, whose resizing
rounds otherwise.
"""

import io
import json
from pathlib import Path

import numpy as np
import tokenizers
import torch
from PIL import Image

from torchvision_cpu import define_torchvision_operators

define_torchvision_operators()
import transformers  # noqa: E402
from transformers.models.gemma4.feature_extraction_gemma4 import (  # noqa: E402
    Gemma4AudioFeatureExtractor,
)
from transformers.models.gemma4.image_processing_pil_gemma4 import (  # noqa: E402
    Gemma4ImageProcessorPil,
)
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor  # noqa: E402
from transformers.models.gemma4.video_processing_gemma4 import (  # noqa: E402
    Gemma4VideoProcessor,
)
from transformers.models.gemma4_unified.image_processing_gemma4_unified import (  # noqa: E402
    Gemma4UnifiedImageProcessor,
    patches_merge,
)

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
CHATS = [
    [
        {"role": "system", "content": [{"type": "text", "text": "be kind"}]},
        {
            "role": "user",
            "content": [
                {"type": "image", "image": "wide.jpg"},
                {"type": "text", "text": "what is it?"},
                {"type": "image", "image": "square.png"},
            ],
        },
        {"role": "assistant", "content": [{"type": "text", "text": "two things"}]},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "and this?"},
                {"type": "image", "image": "tall.png"},
            ],
        },
    ],
    [{"role": "user", "content": [{"type": "text", "text": "no image"}]}],
]
MARKS = {
    **{"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": SOFT},
    **{"boa_token": "<|audio>", "eoa_token": "<audio|>", "audio_token": "<|audio|>"},
}


def write_pictures(folder: Path) -> None:
    random = np.random.default_rng(7)
    for name, (height, width) in PICTURES.items():
        rows, columns = np.mgrid[0:height, 0:width]
        waves = np.stack([rows * 7 + columns, columns * 11 - rows, rows * columns], -1) % 256
        noise = random.integers(-40, 41, waves.shape)
        image = Image.fromarray(np.clip(waves + noise, 0, 255).astype("uint8"))
        if name.startswith("grey"):
            image = image.convert("L")
        buffer = io.BytesIO()
        image.save(buffer, "JPEG" if name.endswith("jpg") else "PNG")
        (folder / name).write_bytes(buffer.getvalue())


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    core = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>"))
    core.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    core.pre_tokenizer = tokenizers.pre_tokenizers.Split("\u2581", "merged_with_previous")
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>", "<|channel>", "<channel|>"]
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=420, special_tokens=[*special, *bytes_, *MARKS.values()], show_progress=False
    )
    texts = [text for found, _ in CASES.values() if found for text in found]
    core.train_from_iterator([*texts, "user model system thought be kind what is it two"], trainer)
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
        extra_special_tokens=MARKS,
    )


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
    found = {
        f"{name}_ids": out["input_ids"],
        f"{name}_mask": out["attention_mask"],
        f"{name}_images": out["mm_token_type_ids"],
    }
    if "pixel_values" in out:
        pixels = np.asarray(out["pixel_values"], "float32")
        places = np.asarray(out["image_position_ids"])
        found |= {f"{name}_pixels": pixels, f"{name}_places": places}
        both = merged(pixels, places)
        found |= {f"{name}_merged": both[0], f"{name}_merged_places": both[1]}
    return found


def write(folder: Path) -> None:
    transformers.logging.set_verbosity_error()
    pictures = folder / "pictures"
    for name in ("pictures", "model", "unified"):
        (folder / name).mkdir(exist_ok=True)
    write_pictures(pictures)
    made = tokenizer()
    found: dict = {}
    processor = Gemma4Processor(
        Gemma4AudioFeatureExtractor(),
        Gemma4ImageProcessorPil(**SIZES),
        made,
        Gemma4VideoProcessor(**SIZES),
        chat_template=TEMPLATE,
        image_seq_length=SIZES["max_soft_tokens"],
    )
    processor.save_pretrained(folder / "model")
    arguments = {"padding": True, "return_tensors": "np"}
    for case, (texts, names) in CASES.items():
        given = {"text": texts} if texts else {}
        if any(names):
            given["images"] = [[Image.open(pictures / n) for n in row] for row in names]
        found |= named(processor(**given, **arguments), case)
    chats = [
        [
            {
                **turn,
                "content": [
                    {**part, "image": Image.open(pictures / part["image"])}
                    if "image" in part
                    else part
                    for part in turn["content"]
                ],
            }
            for turn in chat
        ]
        for chat in CHATS
    ]
    out = processor.apply_chat_template(
        chats,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        processor_kwargs=arguments,
    )
    found |= named(out, "chat")
    unified = Gemma4UnifiedImageProcessor(**SIZES)
    for name in ("exact.png", "wide.jpg"):
        out = unified(Image.open(pictures / name), return_tensors="pt")
        key = name.partition(".")[0]
        found[f"torchvision_{key}"] = out["pixel_values"].numpy()
        found[f"torchvision_{key}_places"] = out["image_position_ids"].numpy()
    made.save_pretrained(folder / "unified")
    unified.save_pretrained(folder / "unified")
    (folder / "unified" / "chat_template.jinja").write_text(TEMPLATE)
    np.savez(folder / "expected.npz", **found)
    said = {"cases": CASES, "chats": CHATS, "sizes": SIZES}
    (folder / "texts.json").write_text(json.dumps(said))
