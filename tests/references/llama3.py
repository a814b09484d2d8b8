"""Llama 3 of transformers: hidden states, greedy continuations, and adapters of PEFT over it.

`tied`, `untied` and `bias` are as the cases of `references.gemma`, the first two with the rotary
embedding of Llama 3.1: of the five pairs of channels one keeps its positions, one is in between and
three are stretched. `tokenizer` is a directory with a small tokenizer of Llama's kind, `texts.json`
with texts and their ids. `adapter` is written by PEFT over `untied`, `adapter.npz` holds the logits
of both.
"""

from pathlib import Path

import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers, processors

from references.common import save_json
from references.gemma import DECODER, one, write_text_adapter
from references.qwen3 import CHAT, TEXTS

ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}
SPECIAL = [
    *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eom_id|>", "<|eot_id|>"),
]
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message.role "
    "+ '<|end_header_id|>\n\n' + message.content + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% endif %}"
)


def write_tokenizer(folder: Path) -> None:
    core = tokenizers.Tokenizer(models.BPE(ignore_merges=True))
    split = pre_tokenizers.Split(tokenizers.Regex(PATTERN), behavior="isolated")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_of])
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(
        TEXTS * 3 + ["Hello world, hello lines of the tokenizer's world"] * 3,
        tokenizers.trainers.BpeTrainer(
            vocab_size=300,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    core.add_special_tokens(SPECIAL)
    start = SPECIAL[0]
    core.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{start} $A",
                pair=f"{start} $A {start} $B:1",
                special_tokens=[(start, core.token_to_id(start))],
            ),
        ]
    )
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=start, eos_token="<|eot_id|>"
    )
    theirs.chat_template = TEMPLATE
    theirs.save_pretrained(folder)
    stops = [core.token_to_id(text) for text in ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")]
    save_json(folder / "generation_config.json", {"eos_token_id": stops})
    expected = {
        "texts": TEXTS,
        "ids": [theirs.encode(text) for text in TEXTS],
        "stops": stops,
        "chat": CHAT,
        "written": theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True),
    }
    save_json(folder / "texts.json", expected)


def write(folder: Path) -> None:
    for name in ("tied", "untied", "bias"):
        config = transformers.LlamaConfig(
            **{**DECODER, "hidden_size": 40, "num_hidden_layers": 3},
            rope_parameters=LINEAR if name == "bias" else ROPE,
            tie_word_embeddings=name == "tied",
            attention_bias=name == "bias",
        )
        one(folder / name, config)
    write_tokenizer(folder / "tokenizer")
    write_text_adapter(folder, "untied", "adapter", ["q_proj", "v_proj", "down_proj"])
