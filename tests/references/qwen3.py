"""Qwen 3 of transformers: hidden states, greedy continuations, and adapters of PEFT over it.

`tied`, `untied` and `bias` are as the cases of `references.gemma`. `tokenizer` is a directory with
a small tokenizer of Qwen's kind, `texts.json` with texts and their ids, and a chat as its template
writes it. `adapter` is written by PEFT over `untied`, `adapter.npz` holds the logits of both.
"""

import json
from pathlib import Path

import tokenizers
import transformers

from references.common import save_json
from references.gemma import DECODER, one, write_text_adapter

ROPE = {"rope_type": "default", "rope_theta": 1e6}
SIZES = {**DECODER, "num_hidden_layers": 3, "rope_parameters": ROPE}
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
    trained = json.loads(core.to_str())["model"]
    save_json(folder / "vocab.json", trained["vocab"])
    merges = [m if isinstance(m, str) else " ".join(m) for m in trained["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    expected = {
        "texts": TEXTS,
        "ids": [theirs.encode(text, add_special_tokens=False) for text in TEXTS],
        "chat": CHAT,
        "written": theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True),
    }
    save_json(folder / "texts.json", expected)


def write(folder: Path) -> None:
    for name in ("tied", "untied", "bias"):
        config = transformers.Qwen3Config(
            **SIZES, tie_word_embeddings=name == "tied", attention_bias=name == "bias"
        )
        one(folder / name, config)
    write_tokenizer(folder / "tokenizer")
    write_text_adapter(folder, "untied", "adapter", ["q_proj", "v_proj", "down_proj"])
