"""A Gemma 3 of transformers with its vision tower, on texts with no, one and two images.

`model` is the directory as transformers writes it, in several files, and `expected.npz` holds for
each case of `CASES` its `<case>_ids` (1, T), `<case>_logits`, in float64 and bfloat16 too, and
`<case>_greedy`, the tokens behind it; `images` (3, height, width, 3), of which a case takes the
first, and their `features`. `adapter` is written by PEFT over both halves, with
`adapter.npz`: the logits of the case "two" with it. Windows are shorter than an image, so that each
rule of who sees whom changes the logits.
"""

from pathlib import Path

import numpy as np
import torch

from references.gemma import SIZES, randomise
from references.lora import with_random_lora
from torchvision_cpu import define_torchvision_operators

define_torchvision_operators()
import transformers  # noqa: E402

IMAGE = SIZES["vocab_size"]  # outside the table, as in the published models
TOKENS, NEW = 9, 24
# Places of the images in a text of so many tokens.
CASES = {"none": (19, ()), "one": (23, (1,)), "two": (37, (4, 20)), "last": (20, (11,))}
VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 20,
    "intermediate_size": 28,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 24,
    "patch_size": 4,
    "vision_use_head": False,
}


def config() -> transformers.Gemma3Config:
    text = {
        **SIZES,
        "num_hidden_layers": 3,
        "sliding_window": 5,
        "query_pre_attn_scalar": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }
    return transformers.Gemma3Config(
        text_config=text,
        vision_config=VISION,
        mm_tokens_per_image=TOKENS,
        image_token_index=IMAGE,
        boi_token_index=150,
        eoi_token_index=151,
        attn_implementation="eager",
    )


def given(ids: torch.Tensor, images: torch.Tensor) -> dict[str, torch.Tensor]:
    count = int((ids == IMAGE).sum()) // TOKENS
    found = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if count:
        found["pixel_values"] = images[:count].permute(0, 3, 1, 2)
        found["token_type_ids"] = (ids == IMAGE).long()
    return found


def write(folder: Path) -> None:
    transformers.logging.set_verbosity_error()
    model = transformers.Gemma3ForConditionalGeneration(config())
    randomise(model)
    with torch.no_grad():
        # So that what an image shows decides what follows it.
        model.model.multi_modal_projector.mm_input_projection_weight.mul_(4)
    model.save_pretrained(folder / "model", max_shard_size="40KB")
    generator = torch.Generator().manual_seed(5)
    images = torch.randn((3, 24, 24, 3), generator=generator)
    found = {"images": images}
    with torch.no_grad():
        pixels = images.permute(0, 3, 1, 2)
        found["features"] = model.model.get_image_features(pixels).pooler_output
        for case, (length, places) in CASES.items():
            ids = torch.randint(3, IMAGE, (1, length), generator=generator)
            for place in places:
                ids[0, place : place + TOKENS] = IMAGE
            inputs = given(ids, images)
            whole = model.generate(
                **inputs,
                max_new_tokens=NEW,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                return_dict_in_generate=True,
            ).sequences
            found |= {f"{case}_ids": ids, f"{case}_logits": model(**inputs).logits}
            found[f"{case}_greedy"] = whole[0, length:]
    write_adapter(folder, found)
    exact, half = (
        transformers.Gemma3ForConditionalGeneration.from_pretrained(
            folder / "model", dtype=dtype, attn_implementation="eager"
        )
        for dtype in (torch.float64, torch.bfloat16)
    )
    with torch.no_grad():
        for case in CASES:
            for name, other, dtype in (
                ("64", exact, torch.float64),
                ("16", half, torch.bfloat16),
            ):
                inputs = given(found[f"{case}_ids"], images.to(dtype))
                found[f"{case}_logits{name}"] = other(**inputs).logits.double()
    np.savez(folder / "expected.npz", **{name: x.numpy() for name, x in found.items()})


def write_adapter(folder: Path, found: dict[str, torch.Tensor]) -> None:
    model = transformers.Gemma3ForConditionalGeneration.from_pretrained(
        folder / "model", attn_implementation="eager"
    )
    adapted = with_random_lora(model, ["q_proj", "v_proj", "fc1"])
    adapted.save_pretrained(folder / "adapter")
    with torch.no_grad():
        logits = adapted(**given(found["two_ids"], found["images"])).logits
    np.savez(folder / "adapter.npz", logits=logits.numpy())
