"""A Gemma 3 of transformers with its vision tower, on texts with no, one and two images.

`model` is the directory as transformers writes it, in several files, and `expected.npz` holds for
each case of `CASES` its `<case>_ids` (1, T), `<case>_logits`, in float64 and bfloat16 too, and
`<case>_greedy`, the tokens behind it; `images` (3, height, width, 3), of which a case takes the
first, and their `features`. `adapter` is written by PEFT over both halves, with
`adapter.npz`: the logits of the case "two" with it. Windows are shorter than an image, so that each
rule of who sees whom changes the logits.
"""

from pathlib import Path

import torch
import transformers

from references.common import save, vision_sizes
from references.gemma import LAYERS, SIZES, WINDOWS, greedy, randomise
from references.lora import write_adapter

IMAGE = SIZES["vocab_size"]  # outside the table, as in the published models
TOKENS, NEW = 9, 24
# Places of the images in a text of so many tokens.
CASES = {"none": (19, ()), "one": (23, (1,)), "two": (37, (4, 20)), "last": (20, (11,))}
TEXT = {**SIZES, **WINDOWS, **LAYERS}
VISION = {
    "model_type": "siglip_vision_model",
    "vision_use_head": False,
    **vision_sizes(hidden_size=20, intermediate_size=28, num_attention_heads=2, image_size=24),
}
EAGER = {"attn_implementation": "eager"}


def config() -> transformers.Gemma3Config:
    tokens = {"image_token_index": IMAGE, "boi_token_index": 150, "eoi_token_index": 151}
    return transformers.Gemma3Config(
        text_config=TEXT, vision_config=VISION, mm_tokens_per_image=TOKENS, **tokens, **EAGER
    )


def given(ids: torch.Tensor, images: torch.Tensor) -> dict[str, torch.Tensor]:
    count = int((ids == IMAGE).sum()) // TOKENS
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if count:
        inputs |= {"pixel_values": images[:count], "token_type_ids": (ids == IMAGE).long()}
    return inputs


def write(folder: Path) -> None:
    kind = transformers.Gemma3ForConditionalGeneration
    model = randomise(kind(config()))
    with torch.no_grad():
        # So that what an image shows decides what follows it.
        model.model.multi_modal_projector.mm_input_projection_weight.mul_(4)
    model.save_pretrained(folder / "model", max_shard_size="40KB")
    exact, half, base = (
        kind.from_pretrained(folder / "model", dtype=dtype, **EAGER)
        for dtype in (torch.float64, torch.bfloat16, torch.float32)
    )
    generator = torch.Generator().manual_seed(5)
    images = torch.randn((3, 24, 24, 3), generator=generator).permute(0, 3, 1, 2)
    outputs = {"images": images}
    with torch.no_grad():
        outputs["features"] = model.model.get_image_features(images).pooler_output
        for case, (length, places) in CASES.items():
            ids = torch.randint(3, IMAGE, (1, length), generator=generator)
            for place in places:
                ids[0, place : place + TOKENS] = IMAGE
            inputs = given(ids, images)
            outputs |= {f"{case}_ids": ids, f"{case}_logits": model(**inputs).logits}
            outputs[f"{case}_greedy"] = greedy(model, inputs, NEW)
            for bits, other in (("64", exact), ("16", half)):
                logits = other(**given(ids, images.to(other.dtype))).logits
                outputs[f"{case}_logits{bits}"] = logits.double()
    save(folder / "expected.npz", **outputs)
    inputs = given(outputs["two_ids"], images)
    targets = ["q_proj", "v_proj", "fc1"]
    _, logits = write_adapter(folder / "adapter", base, targets, inputs, "logits")
    save(folder / "adapter.npz", logits=logits)
