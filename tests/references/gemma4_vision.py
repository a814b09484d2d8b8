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

import torch
import transformers

from references.common import save
from references.gemma import SIZES, greedy, randomise
from references.gemma4 import AUDIO, FEATURES, TURNED, UNIFIED
from references.lora import write_adapter

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
    **UNIFIED,
    **FEATURES["heads"],
    "rope_parameters": TURNED,
    "final_logit_softcapping": 4.0,
    "attention_k_eq_v": True,
}
ENCODERLESS = {
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
EAGER = {"attn_implementation": "eager"}


def models() -> dict[str, transformers.PreTrainedModel]:
    ends = {"image_token_id": IMAGE, "boi_token_id": 150, "eoi_token_id": 151}
    ends |= {"video_token_id": 152, "audio_token_id": 153}
    # `generate` leaves out a shortcut that fails on masks, see `references.gemma4`.
    text = {**TEXT, "hidden_size_per_layer_input": 0}
    small = {**text, **FEATURES["per_layer"], **FEATURES["shared"]}
    small["vocab_size_per_layer_input"] = SIZES["vocab_size"]
    bounds = {"use_clipped_linears": True, "num_key_value_heads": 1}
    sees, sounds = {"use_bidirectional_attention": "vision"}, {"audio_embed_dim": 8}
    causal = {**TEXT, "use_bidirectional_attention": None}
    rows = {
        "unified": ("Gemma4Unified", {**TEXT, **sees}, ENCODERLESS, sounds),
        "unified_causal": ("Gemma4Unified", causal, ENCODERLESS, None),
        "tower": ("Gemma4", {**text, **sees}, {**TOWER, "standardize": True}, None),
        "tower_small": ("Gemma4", small, {**TOWER, **bounds}, AUDIO),
    }
    made = {}
    for name, (kind, text, vision, audio) in rows.items():
        towers = {"text_config": text, "vision_config": vision, "audio_config": audio}
        config = getattr(transformers, f"{kind}Config")(**towers, **ends, **EAGER)
        made[name] = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
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
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if numbers:
        inputs |= {name: x[numbers] for name, x in seen.items()}
        inputs["mm_token_type_ids"] = (ids == IMAGE).long()
    return inputs


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
    outputs = {"pixel_values": seen["pixel_values"], "places": seen["image_position_ids"]}
    generator = torch.Generator().manual_seed(5)
    exact, half, base = (
        type(model).from_pretrained(place / "model", dtype=dtype, **EAGER)
        for dtype in (torch.float64, torch.bfloat16, torch.float32)
    )
    static = {"cache_implementation": "static", "disable_compile": True}
    inputs = {}
    with torch.no_grad():
        features = model.model.get_image_features(**seen).pooler_output
        outputs |= {f"features_{number}": x for number, x in enumerate(features)}
        for case, (length, pictures) in CASES.items():
            ids = torch.randint(3, 150, (1, length), generator=generator)
            for start, number in pictures:
                rows, columns = SHAPES[number]
                ids[0, start : start + rows * columns] = IMAGE
            numbers = [number for _, number in pictures]
            inputs[case] = given(model, ids, numbers, seen)
            outputs |= {f"{case}_ids": ids, f"{case}_numbers": torch.tensor(numbers)}
            outputs[f"{case}_logits"] = model(**masked(model, inputs[case])).logits
            outputs[f"{case}_plain"] = model(**inputs[case]).logits
            outputs[f"{case}_greedy"] = greedy(model, inputs[case], NEW, **static)
            for bits, other in (("64", exact), ("16", half)):
                rounded = {**seen, "pixel_values": seen["pixel_values"].to(other.dtype)}
                logits = other(**masked(other, given(other, ids, numbers, rounded))).logits
                outputs[f"{case}_logits{bits}"] = logits.double()
    save(place / "expected.npz", **outputs)
    # PEFT supports the linear layers inside those with bounds, and not the bounded ones.
    ends = ("q_proj", "v_proj", "linear", "patch_dense", "input_proj", "embedding_projection")
    targets = [
        path
        for path, part in base.named_modules()
        if path.endswith(ends) and isinstance(part, torch.nn.Linear) and "audio" not in path
    ]
    two = masked(base, inputs["two"])
    _, logits = write_adapter(place / "adapter", base, targets, two, "logits")
    save(place / "adapter.npz", logits=logits)


def write(folder: Path) -> None:
    assert SIZES["vocab_size"] > IMAGE
    for name, model in models().items():
        write_one(folder, name, model)
