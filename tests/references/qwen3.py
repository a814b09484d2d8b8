"""Qwen 3 of transformers: hidden states, greedy continuations, and adapters of PEFT over it.

`tied`, `untied` and `bias` are as the cases of `references.gemma`. `tokenizer` is a directory with
a small tokenizer of Qwen's kind, `texts.json` with texts and their ids, and a chat as its template
writes it. `adapter` is written by PEFT over `untied`, `adapter.npz` holds the logits of both.
"""

import json
from pathlib import Path

import numpy as np
import torch

from references.gemma import one
from references.lora import with_random_lora
from torchvision_cpu import define_torchvision_operators

define_torchvision_operators()
import tokenizers  # noqa: E402
import transformers  # noqa: E402

SIZES = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
TEXTS = ["Hello, world! It's 2025.", "  two\n\nlines\t", "na\u00efve \U0001f600 \u65e5\u672c", ""]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Say hello."},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "And now?"},
]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content "
    "+ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tokenizer(folder: Path) -> None:
    plain = transformers.Qwen2Tokenizer(vocab={}, merges=[])
    core = plain.backend_tokenizer
    core.train_from_iterator(
        TEXTS * 3 + ["Hello world, hello lines of the tokenizer's world"] * 3,
        tokenizers.trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    theirs.chat_template = TEMPLATE
    theirs.save_pretrained(folder)
    held = json.loads(core.to_str())["model"]
    (folder / "vocab.json").write_text(json.dumps(held["vocab"]))
    merges = [m if isinstance(m, str) else " ".join(m) for m in held["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    said = {
        "texts": TEXTS,
        "ids": [theirs.encode(text, add_special_tokens=False) for text in TEXTS],
        "chat": CHAT,
        "written": theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True),
    }
    (folder / "texts.json").write_text(json.dumps(said))


def write_adapter(folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "untied" / "model")
    ids = torch.randint(3, 160, (2, 9), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        plain = model(ids).logits
        adapted = with_random_lora(model, ["q_proj", "v_proj", "down_proj"])
        logits = adapted(ids).logits
    adapted.save_pretrained(folder / "adapter")
    np.savez(folder / "adapter.npz", inputs=ids, plain=plain, logits=logits)


def write(folder: Path) -> None:
    transformers.logging.set_verbosity_error()
    for name in ("tied", "untied", "bias"):
        config = transformers.Qwen3Config(
            **SIZES, tie_word_embeddings=name == "tied", attention_bias=name == "bias"
        )
        one(folder / name, config, "1GB")
    write_tokenizer(folder / "tokenizer")
    write_adapter(folder)
