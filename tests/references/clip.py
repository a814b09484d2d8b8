"""CLIP's text tower of transformers, alone, projected and beside its image tower; a tokenizer.

Each case is a folder: `model` (a directory as transformers writes it) and `expected.npz` with
`token_ids` (B, T), `padding_mask`, `hidden` and `pooled` under that mask, `hidden_all` and
`pooled_all` without one, `block_<i>`, and `embeds` if there is a projection; `many64` and `many16`
of `many` in float64 and bfloat16, enough rows for a mean of the rounding errors. Rows end with the
end token; the first has more tokens behind it, the end token again and higher ids among them, and
its mask hides a token in the middle, so that a wrong rule and an ignored mask show. `both` is a
whole CLIP with `images` and its logits, `tokenizer` a directory with a small tokenizer, its ids of
texts and how it pads them, `adapter` written by PEFT over `projected`.
"""

from pathlib import Path

import tokenizers
import torch
import transformers

from references.common import (
    pictures,
    randomise,
    recorded_blocks,
    save,
    save_json,
    text_sizes,
    token_ids,
    vision_sizes,
)
from references.lora import write_adapter

END = 40
TEXT = text_sizes(projection_dim=10)
CASES = {
    # The end token is found by its id, and the highest id of a row is another.
    "projected": ("CLIPTextModelWithProjection", {}),
    # Configs from before transformers 4.31 name 2, which means the highest id.
    "legacy": ("CLIPTextModelWithProjection", {"eos_token_id": 2, "hidden_act": "gelu"}),
    "bare": ("CLIPTextModel", {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-3}),
}
TEXTS = [
    "A photo of a cat.",
    "  two\n\nlines,\tIt's 2025!",
    "na\u00efve \U0001f600 \u65e5\u672c \u0130",
    "",
    "a" + " dog and a cat" * 12,
    "an <|endoftext|> inside</w>",
]


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    ids = token_ids(3, 39, (3, 11))
    mask = torch.ones_like(ids)
    ids[:, 0] = 39
    ids[0, 6:] = torch.tensor([END, 4, END, 47, 5])
    mask[0, 3] = 0
    ids[1, 7:], mask[1, 8:] = END, 0
    ids[2, 10] = END
    return ids, mask


def one(folder: Path, name: str, changes: dict) -> None:
    config = transformers.CLIPTextConfig(**{**TEXT, **changes})
    config._attn_implementation = "eager"
    model = randomise(getattr(transformers, name)(config), 3)
    model.save_pretrained(folder / "model")
    tower = getattr(model, "text_model", model)
    ids, mask = rows()
    with torch.no_grad():
        with recorded_blocks(tower.encoder.layers) as outputs:
            masked = tower(ids, attention_mask=mask)
        plain = tower(ids)
        outputs |= {"token_ids": ids, "padding_mask": mask}
        outputs |= {"hidden": masked.last_hidden_state, "pooled": masked.pooler_output}
        outputs |= {"hidden_all": plain.last_hidden_state, "pooled_all": plain.pooler_output}
        if tower is not model:
            outputs["embeds"] = model(input_ids=ids, attention_mask=mask).text_embeds
            outputs["many"] = many = token_ids(3, 50, (256, 12), 6)
            many[:, -1] = END
            outputs["many64"] = model.double()(many).text_embeds
            outputs["many16"] = model.bfloat16()(many).text_embeds.float()
    save(folder / "expected.npz", **outputs)


def both(folder: Path) -> None:
    vision = vision_sizes(image_size=16)
    config = transformers.CLIPConfig(text_config=TEXT, vision_config=vision, projection_dim=10)
    model = randomise(transformers.CLIPModel(config), 4)
    ids, mask = rows()
    images = pictures((16, 16))
    with torch.no_grad():
        model.logit_scale.fill_(2.0)
        out = model(input_ids=ids, attention_mask=mask, pixel_values=images)
    model.save_pretrained(folder / "model")
    inputs = {"token_ids": ids, "padding_mask": mask, "images": images}
    save(folder / "expected.npz", **inputs, logits_per_image=out.logits_per_image)


def write_tokenizer(folder: Path) -> None:
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {x: i for i, x in enumerate([*letters, *(f"{x}</w>" for x in letters)])}
    merges = [("c", "a"), ("ca", "t</w>"), ("d", "o"), ("do", "g</w>"), ("p", "h"), ("o", "t")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    for special in ("<|startoftext|>", "<|endoftext|>"):
        vocabulary[special] = len(vocabulary)
    theirs = transformers.CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=12)
    theirs.save_pretrained(folder)
    save_json(folder / "vocab.json", vocabulary)
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n")
    rows = theirs(TEXTS, padding="max_length", truncation=True)
    expected = {
        "texts": TEXTS,
        "ids": [theirs.encode(text, add_special_tokens=False) for text in TEXTS],
        "encoded": [theirs.encode(text) for text in TEXTS],
        "decoded": [theirs.decode(theirs.encode(text), skip_special_tokens=True) for text in TEXTS],
        "token_ids": rows["input_ids"],
        "padding_mask": rows["attention_mask"],
    }
    save_json(folder / "texts.json", expected)


def write(folder: Path) -> None:
    for case, (name, changes) in CASES.items():
        one(folder / case, name, changes)
    both(folder / "both")
    write_tokenizer(folder / "tokenizer")
    model = transformers.CLIPTextModelWithProjection.from_pretrained(folder / "projected" / "model")
    ids, _ = rows()
    targets, inputs = ["q_proj", "out_proj", "fc1"], {"input_ids": ids}
    plain, embeds = write_adapter(folder / "adapter", model, targets, inputs, "text_embeds")
    save(folder / "adapter.npz", token_ids=ids, plain=plain, embeds=embeds)
