"""Models of Gemma 4 with images of any shape, on texts with no, one and two images.

`unified` is 12B without an encoder, `unified_causal` the same with images that see as texts do;
`tower` is 26B and 31B, `tower_small` E2B and E4B, with bounds, per-layer embeddings and sounds.
Each is a directory as transformers writes it, in several files, and its `expected.npz` holds
`pixel_values` and `pixel_position_ids` of three images of other shapes, padded, and their features
`features_<i>`; for each case of `CASES` its `<case>_ids` (1, T), `<case>_logits`, in float64 and
bfloat16 too, and `<case>_greedy`, the tokens behind it. `adapter` is written by PEFT over both
halves, with `adapter.npz`: the logits of the case "two" with it.

Masks are those of each model's own `create_masks_for_generate`, which is what a static cache has:
the plain `forward` of the model without an encoder follows an older rule (transformers issue
46711), in which windows hide nothing of an image and global layers look ahead. Windows are shorter
than an image, so that each rule of who sees whom changes the logits.
"""

from pathlib import Path

import numpy as np
import torch

from references.gemma import SIZES, randomise
from references.gemma4 import FEATURES, PLAIN, TURNED
from references.lora import with_random_lora
from torchvision_cpu import define_torchvision_operators

define_torchvision_operators()
import transformers  # noqa: E402

IMAGE, NEW, PATCHES = 155, 24, 14
PATCH, POOL = 2, 2
# (rows, columns) of the images: wide, tall, one piece alone.
SHAPES = ((2, 5), (6, 2), (1, 1))
# Length of a text, and the place of each image with its number.
CASES = {
    "none": (19, ()),
    "one": (23, ((1, 0),)),
    "two": (37, ((4, 0), (19, 1))),
    "last": (20, ((6, 1), (19, 2))),
}
TEXT = {
    **{name: value for name, value in PLAIN.items() if "per_layer_input" not in name},
    **FEATURES["heads"],
    "rope_parameters": TURNED,
    "final_logit_softcapping": 4.0,
    "attention_k_eq_v": True,
}
UNIFIED = {
    "patch_size": PATCH,
    "pooling_kernel_size": POOL,
    "mm_embed_dim": 20,
    "output_proj_dims": 20,
    "mm_posemb_size": 8,
}
TOWER = {
    "hidden_size": 20,
    "intermediate_size": 28,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": PATCH,
    "pooling_kernel_size": POOL,
    "position_embedding_size": 16,
}
AUDIO = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "output_proj_dims": 8,
    "subsampling_conv_channels": [4, 4],
}


def models() -> dict[str, transformers.PreTrainedModel]:
    ends = {"image_token_id": IMAGE, "boi_token_id": 150, "eoi_token_id": 151}
    ends |= {"video_token_id": 152, "audio_token_id": 153}
    made = {}
    for name, sees in (("unified", "vision"), ("unified_causal", None)):
        audio = {"audio_embed_dim": 8} if name == "unified" else None
        config = transformers.Gemma4UnifiedConfig(
            text_config={**TEXT, "use_bidirectional_attention": sees},
            vision_config=UNIFIED,
            audio_config=audio,
            **ends,
            attn_implementation="eager",
        )
        made[name] = transformers.Gemma4UnifiedForConditionalGeneration(config)
    per_layer = {**FEATURES["per_layer"], "vocab_size_per_layer_input": SIZES["vocab_size"]}
    for name, text, tower, audio in (
        ("tower", {"use_bidirectional_attention": "vision"}, {"standardize": True}, None),
        (
            "tower_small",
            {**per_layer, **FEATURES["shared"]},
            {"use_clipped_linears": True, "num_key_value_heads": 1},
            AUDIO,
        ),
    ):
        config = transformers.Gemma4Config(
            # `generate` leaves out a shortcut that fails on masks, see `references.gemma4`.
            text_config={**TEXT, "hidden_size_per_layer_input": 0, **text},
            vision_config={**TOWER, **tower},
            audio_config=audio,
            **ends,
            attn_implementation="eager",
        )
        made[name] = transformers.Gemma4ForConditionalGeneration(config)
    return made


def images(name: str) -> dict[str, torch.Tensor]:
    """Patches and places of all images, zeros and -1 behind those of each."""
    unified = name.startswith("unified")
    factor = 1 if unified else POOL
    side = PATCH * POOL if unified else PATCH
    count = PATCHES * factor**2
    generator = torch.Generator().manual_seed(5)
    pixels = torch.zeros((len(SHAPES), count, side**2 * 3))
    places = torch.full((len(SHAPES), count, 2), -1)
    for number, (rows, columns) in enumerate(SHAPES):
        rows, columns = rows * factor, columns * factor
        whole = rows * columns
        pixels[number, :whole] = torch.rand((whole, side**2 * 3), generator=generator)
        numbers = torch.arange(whole)
        places[number, :whole] = torch.stack([numbers % columns, numbers // columns], -1)
    return {"pixel_values": pixels, "image_position_ids": places}


def given(
    model: transformers.PreTrainedModel, ids: torch.Tensor, numbers: list[int], seen: dict
) -> dict[str, torch.Tensor]:
    found = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if numbers:
        found |= {name: x[numbers] for name, x in seen.items()}
        found["mm_token_type_ids"] = (ids == IMAGE).long()
    return found


def masked(model: transformers.PreTrainedModel, inputs: dict) -> dict:
    """The same with the masks that generation has."""
    ids = inputs["input_ids"]
    masks = model.create_masks_for_generate(
        config=model.config,
        inputs_embeds=torch.empty((*ids.shape, 0), dtype=model.dtype),
        attention_mask=inputs["attention_mask"],
        past_key_values=None,
        position_ids=torch.arange(ids.shape[1])[None],
        mm_token_type_ids=inputs.get("mm_token_type_ids"),
    )
    return {**inputs, "attention_mask": masks}


def write_one(folder: Path, name: str, model: transformers.PreTrainedModel) -> None:
    randomise(model)
    with torch.no_grad():
        # So that what an image shows decides what follows it.
        for path, weight in model.named_parameters():
            if "embed_vision" in path and "embedding_projection" in path:
                weight.mul_(4)
        for path, number in model.named_buffers():
            if "vision_tower" in path and path.endswith(("_min", "_max")):
                number.fill_(0.6 if path.endswith("max") else -0.7)
            if path.endswith(("std_bias", "std_scale")):
                number.copy_(torch.linspace(0.5, 1.5, len(number)))
    place = folder / name
    model.save_pretrained(place / "model", max_shard_size="40KB")
    seen = images(name)
    found = {"pixel_values": seen["pixel_values"], "places": seen["image_position_ids"]}
    generator = torch.Generator().manual_seed(5)
    numbers: dict[str, list[int]] = {}
    exact, half = (
        type(model).from_pretrained(place / "model", dtype=dtype, attn_implementation="eager")
        for dtype in (torch.float64, torch.bfloat16)
    )
    with torch.no_grad():
        features = model.model.get_image_features(**seen).pooler_output
        found |= {f"features_{number}": x for number, x in enumerate(features)}
        for case, (length, pictures) in CASES.items():
            ids = torch.randint(3, 150, (1, length), generator=generator)
            for start, number in pictures:
                rows, columns = SHAPES[number]
                ids[0, start : start + rows * columns] = IMAGE
            numbers[case] = [number for _, number in pictures]
            inputs = given(model, ids, numbers[case], seen)
            found |= {f"{case}_ids": ids, f"{case}_numbers": torch.tensor(numbers[case])}
            found[f"{case}_logits"] = model(**masked(model, inputs)).logits
            found[f"{case}_plain"] = model(**inputs).logits
            whole = model.generate(
                **inputs,
                max_new_tokens=NEW,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                cache_implementation="static",
                disable_compile=True,
                return_dict_in_generate=True,
            ).sequences
            found[f"{case}_greedy"] = whole[0, length:]
            for end, other in (("64", exact), ("16", half)):
                more = (
                    {**inputs, "pixel_values": inputs["pixel_values"].to(other.dtype)}
                    if ("pixel_values" in inputs)
                    else inputs
                )
                found[f"{case}_logits{end}"] = other(**masked(other, more)).logits.double()
    write_adapter(folder, name, given(model, found["two_ids"], numbers["two"], seen))
    np.savez(place / "expected.npz", **{key: x.numpy() for key, x in found.items()})


def write_adapter(folder: Path, name: str, inputs: dict) -> None:
    place = folder / name
    kind = transformers.AutoModelForImageTextToText
    model = kind.from_pretrained(place / "model", attn_implementation="eager")
    inputs = masked(model, inputs)
    # PEFT knows the linear layers inside those with bounds, and not these.
    ends = ("q_proj", "v_proj", "linear", "patch_dense", "input_proj", "embedding_projection")
    targets = [
        path
        for path, part in model.named_modules()
        if path.endswith(ends) and isinstance(part, torch.nn.Linear) and "audio" not in path
    ]
    adapted = with_random_lora(model, targets)
    adapted.save_pretrained(place / "adapter")
    with torch.no_grad():
        logits = adapted(**inputs).logits
    np.savez(place / "adapter.npz", logits=logits.numpy())


def write(folder: Path) -> None:
    transformers.logging.set_verbosity_error()
    assert SIZES["vocab_size"] > IMAGE
    for name, model in models().items():
        write_one(folder, name, model)
