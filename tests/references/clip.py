"""CLIP's text tower of transformers, alone, projected and beside its image tower; a tokenizer.

Each case is a folder: `model` (a directory as transformers writes it) and `expected.npz` with
`token_ids` (B, T), `padding_mask`, `hidden` and `pooled` under that mask, `hidden_all` and
`pooled_all` without one, `block_<i>`, and `embeds` where there is a projection; `many64` and
`many16` of `many` in float64 and bfloat16, enough rows for a mean of what was rounded. Rows end
with the end token; the first continues behind it, with it again and with higher ids, and lacks a
token in the middle by its mask, so that a wrong rule and a mask that is passed over show. `both` is
a whole CLIP with `images` and its logits, `tokenizer` a directory with a small tokenizer, its ids
of texts and how it pads them, `adapter` written by PEFT over `projected`.
"""

import json
from pathlib import Path

import numpy as np
import torch

from references.gemma import recorded_blocks
from references.lora import with_random_lora
from references.vit import pictures, randomise
from torchvision_cpu import define_torchvision_operators

define_torchvision_operators()
import tokenizers  # noqa: E402
import transformers  # noqa: E402

END = 40
TEXT = {
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "max_position_embeddings": 12,
    "projection_dim": 10,
    "bos_token_id": 39,
    "eos_token_id": END,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 4,
}
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
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 39, (3, 11), generator=generator)
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
    model = getattr(transformers, name)(config)
    randomise(model, 3)
    model.save_pretrained(folder / "model")
    tower = getattr(model, "text_model", model)
    ids, mask = rows()
    with torch.no_grad():
        with recorded_blocks(tower.encoder.layers) as blocks:
            masked = tower(ids, attention_mask=mask)
        plain = tower(ids)
        found = {
            **blocks,
            **{"token_ids": ids, "padding_mask": mask},
            **{"hidden": masked.last_hidden_state, "pooled": masked.pooler_output},
            **{"hidden_all": plain.last_hidden_state, "pooled_all": plain.pooler_output},
        }
        if tower is not model:
            given = {"input_ids": ids, "attention_mask": mask}
            found["embeds"] = model(**given).text_embeds
            many = torch.randint(3, 50, (256, 12), generator=torch.Generator().manual_seed(6))
            many[:, -1] = END
            found["many"] = many
            found["many64"] = model.double()(many).text_embeds
            found["many16"] = model.bfloat16()(many).text_embeds.float()
    np.savez(folder / "expected.npz", **{name: x.numpy() for name, x in found.items()})


def both(folder: Path) -> None:
    config = transformers.CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=10)
    model = transformers.CLIPModel(config)
    randomise(model, 4)
    with torch.no_grad():
        model.logit_scale.fill_(2.0)
    model.save_pretrained(folder / "model")
    ids, mask = rows()
    images = pictures((16, 16))
    with torch.no_grad():
        out = model(input_ids=ids, attention_mask=mask, pixel_values=images)
    found = {"token_ids": ids, "padding_mask": mask, "images": images.permute(0, 2, 3, 1)}
    found |= {"logits_per_image": out.logits_per_image}
    np.savez(folder / "expected.npz", **{name: x.numpy() for name, x in found.items()})


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
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    lines = [" ".join(pair) for pair in merges]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(lines) + "\n")
    rows = theirs(TEXTS, padding="max_length", truncation=True)
    said = {
        "texts": TEXTS,
        "ids": [theirs.encode(text, add_special_tokens=False) for text in TEXTS],
        "encoded": [theirs.encode(text) for text in TEXTS],
        "decoded": [theirs.decode(theirs.encode(text), skip_special_tokens=True) for text in TEXTS],
        "token_ids": rows["input_ids"],
        "padding_mask": rows["attention_mask"],
    }
    (folder / "texts.json").write_text(json.dumps(said))


def write_adapter(folder: Path) -> None:
    model = transformers.CLIPTextModelWithProjection.from_pretrained(folder / "projected" / "model")
    ids, _ = rows()
    with torch.no_grad():
        plain = model(ids).text_embeds
        adapted = with_random_lora(model, ["q_proj", "out_proj", "fc1"])
        embeds = adapted(ids).text_embeds
    adapted.save_pretrained(folder / "adapter")
    np.savez(folder / "adapter.npz", token_ids=ids, plain=plain, embeds=embeds)


def write(folder: Path) -> None:
    transformers.logging.set_verbosity_error()
    for case, (name, changes) in CASES.items():
        one(folder / case, name, changes)
    both(folder / "both")
    write_tokenizer(folder / "tokenizer")
    write_adapter(folder)
