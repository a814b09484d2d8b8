"""A tokenizer as Gemma 4 has it, and a chat template with its markers, both made here."""

import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from kmodels.text.pieces import SPACE

CONTROL = (
    *("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|tool>", "<tool|>", "<|tool_call>"),
    *("<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>', "<|think|>", "<|channel>"),
    *("<channel|>", "<|turn>", "<turn|>"),
)
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
TEXTS = (
    "the cat sat on the mat and the dog sat on the log\n\nuser\nmodel\nthought\nsystem\n",
    "What is 2 + 2? It is 4. You are kind. Paris is the capital of France: {city:weather}\n\n\n",
)
MARKED = (
    "the cat sat on the mat\n\n\nuser\n  thing  ",
    "<|turn>user\nWhat is 2 + 2?<turn|>\n<|turn>model\n<|channel>thought\n<channel|>It is 4.",
    "hät 貓\n\n\n\n\n\nmodel Paris\n",
)
# Turns, a system role, reasoning that is asked for and left out of earlier replies, and functions
# that are called; less than a checkpoint's own, written for the tests.
TEMPLATE = """\
{%- macro words(text) -%}
{%- for part in text.split('<channel|>') -%}{{- part.split('<|channel>')[0] -}}{%- endfor -%}
{%- endmacro -%}
{{- bos_token -}}
{%- set first = messages[0].content | trim if messages[0].role == 'system' else '' -%}
{%- if first or tools or enable_thinking -%}
{{- '<|turn>system\\n' + ('<|think|>\\n' if enable_thinking else '') + first -}}
{%- for tool in tools or [] -%}
{{- '<|tool>declaration:' + tool.function.name + '{description:<|"|>' -}}
{{- tool.function.description + '<|"|>}<tool|>' -}}
{%- endfor -%}
{{- '<turn|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if not (loop.first and message.role == 'system') -%}
{{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' -}}
{%- for call in message.tool_calls or [] -%}
{{- '<|tool_call>call:' + call.function.name + '{' -}}
{%- for key, value in call.function.arguments | dictsort -%}
{{- (',' if not loop.first else '') + key + ':<|"|>' + value + '<|"|>' -}}
{%- endfor -%}
{{- '}<tool_call|>' -}}
{%- endfor -%}
{%- if message.content -%}
{{- (words(message.content) if message.role == 'assistant' else message.content) | trim -}}
{%- endif -%}
{{- '<turn|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|turn>model\\n' + ('' if enable_thinking else '<|channel>thought\\n<channel|>') -}}
{%- endif -%}
"""


def core(rows: int = 420) -> tokenizers.Tokenizer:
    """Returns merges over whole lines of text, with bytes for what is unknown."""
    learner = tokenizers.Tokenizer(BPE())
    learner.normalizer = normalizers.Replace(" ", SPACE)
    learner.pre_tokenizer = pre_tokenizers.Split(Regex("\n+"), "isolated")
    size = rows - len(CONTROL) - len(BYTES)
    trainer = BpeTrainer(vocab_size=size, show_progress=False)
    learner.train_from_iterator(TEXTS, trainer)
    learnt = json.loads(learner.to_str())["model"]
    pieces = sorted(learnt["vocab"], key=learnt["vocab"].get)
    made = tokenizers.Tokenizer(
        BPE(
            vocab={text: i for i, text in enumerate((*CONTROL, *BYTES, *pieces))},
            merges=[tuple(pair) for pair in learnt["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    made.normalizer = normalizers.Replace(" ", SPACE)
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence(steps)
    made.add_special_tokens([AddedToken(text, special=True) for text in CONTROL])
    return made


def write(folder: Path, template: str | None = TEMPLATE, rows: int = 420) -> None:
    core(rows).save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
