"""Does a model in four bits answer as its float twin, before and after it is tuned?

    KERAS_BACKEND=torch python benchmarks/quantized_answers.py TASK [--first-steps 200] [--write]

A Gemma 3 with widths of 256 and 512, so that no matrix falls back from Q4_K, is trained in float32
and written three times: as a directory of floats, as one in nf4, and as a GGUF file in Q4_K_M.
`kmodels gemma` tunes each on the same records with the same seed, the two small ones packed, and
answers 20 held-out prompts greedily before and after.

TASK is "instructions", the demonstration of `kmodels gemma`, which so small a model cannot answer,
so that most of its tokens are close calls; or "digits": the base learns to sort five digits
upwards, and is tuned to sort them downwards.

`equal_answers` is the share of the 20 answers that equal the float twin's, `equal_tokens` the share
of its tokens that are equal up to the first other one, `right_answers` that of the answers that are
sorted. `accuracy` and `loss` are those of the next token of all held-out responses.
"""

import json
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import record

RECIPE = Path(__file__).parents[1] / "recipes" / "gemma_lora.py"
BACKEND = keras.backend.backend()
PROMPTS = 20
WIDTHS: dict[str, Any] = {
    **{"num_layers": 4, "num_query_heads": 4, "num_key_value_heads": 2, "head_dim": 128},
    **{"hidden_dim": 256, "intermediate_dim": 512, "sliding_window_size": 64},
}


def sorted_digits(count: int, order: str, seed: int) -> list[dict[str, str]]:
    """Records that ask for five digits in an order, "up" or "down"."""
    rows = np.random.default_rng(seed).integers(0, 10, (count, 5))
    step = 1 if order == "up" else -1
    texts = [(" ".join(map(str, row)), " ".join(map(str, sorted(row)[::step]))) for row in rows]
    return [
        {"instruction": f"Sort {order} {ask}.", "context": "", "response": say}
        for ask, say in texts
    ]


def data_of(task: str, folder: Path) -> tuple[list[Any], list[str], list[str]]:
    """Returns what the base learns, the texts of its tokenizer, and the recipe's flags."""
    from kmodels.text import demo

    if task == "instructions":
        # The tuning trains on the other half of the instructions.
        texts = demo.texts() + [demo.plain(row) for row in demo.instructions().rows[:550]]
        return texts, texts, []
    rows = sorted_digits(2000, "up", 0)
    file = folder / "digits.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in tuned_on()))
    flags = ["--data", str(file), "--epochs", "1"]
    return rows, demo.texts() + [demo.plain(row) for row in rows], flags


def tuned_on() -> list[dict[str, str]]:
    """The records of "digits" that the recipe tunes on and holds out."""
    return sorted_digits(1000, "down", 1)


def write_bases(task: str, folder: Path, steps: int) -> dict[str, list[str]]:
    """Trains the base model; returns the flags of the recipe for each of its three forms."""
    from kmodels.models import GemmaCausalLM
    from kmodels.text.training import train_tokenizer

    recipe = runpy.run_path(str(RECIPE))
    records, texts, flags = data_of(task, folder)
    text = GemmaCausalLM.preprocessor_class(
        train_tokenizer(texts, recipe["VOCABULARY"]), recipe["BASE_LENGTH"], template="instruction"
    )
    keras.utils.set_random_seed(0)
    model = GemmaCausalLM.from_preset(
        *("gemma3_debug", "float32"),
        vocabulary_size=text.tokenizer.vocabulary_size(),
        preprocessor=text,
        **WIDTHS,
    )
    model = recipe["recipe"].train_base(model, records, steps, 0)
    model.save_to_preset(folder / "float32")
    model.export_to_gguf(folder / "q4_k_m.gguf", "q4_k_m")
    model.quantize("nf4")
    model.save_to_preset(folder / "nf4")
    return {
        "float32": [str(folder / "float32"), *flags],
        "q4_k_m": [str(folder / "q4_k_m.gguf"), "--quantized", *flags],
        "nf4": [str(folder / "nf4"), *flags],
    }


def modes_of(flags: list[str]) -> dict[str, int]:
    """Returns how many kernels a base has in each mode."""
    from kmodels.layers.changes import quantized_layers
    from kmodels.models import GemmaCausalLM

    model = GemmaCausalLM.from_preset(flags[0], quantized="--quantized" in flags or None)
    modes = [str(layer.quantized.mode) for layer in quantized_layers(model).values()]
    return {mode: modes.count(mode) for mode in sorted(set(modes))}


def tuned(out: Path, flags: list[str]) -> dict[str, Any]:
    """Returns the result.json of the recipe on a base."""
    command = [sys.executable, RECIPE, "--out", out, "--samples", PROMPTS, "--weights", *flags]
    quiet = {"check": True, "stdout": subprocess.DEVNULL}
    subprocess.run([*map(str, command)], **quiet, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return json.loads((out / "result.json").read_text())


def shares(tokenizer: Any, answers: list[str], twins: list[str]) -> dict[str, float]:
    """Returns which part of the answers and of their tokens equals those of the twin."""
    equal = total = 0
    for answer, twin in zip(answers, twins, strict=True):
        ours, theirs = tokenizer.encode(answer), tokenizer.encode(twin)
        same = [a == b for a, b in zip(ours, theirs, strict=False)]
        equal += [*same, False].index(False)
        total += len(theirs)
    alike = sum(a == b for a, b in zip(answers, twins, strict=True))
    return {
        "equal_answers": round(alike / len(twins), 3),
        "equal_tokens": round(equal / total, 3),
    }


def main() -> None:
    parser = record.flags(__doc__)
    parser.add_argument("task", choices=("instructions", "digits"))
    parser.add_argument("--first-steps", type=int, default=200, help="steps of the base model")
    options = parser.parse_args()
    if BACKEND == "torch":
        import torch

        torch.set_num_threads(1)
    from kmodels.text import Tokenizer

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        bases = write_bases(options.task, folder, options.first_steps)
        modes = {name: modes_of(flags) for name, flags in bases.items()}
        tokenizer = Tokenizer.from_file(folder / "float32")
        runs = {name: tuned(folder / f"{name} run", flags) for name, flags in bases.items()}
    expected = {row["instruction"]: row["response"] for row in tuned_on()}
    rows = []
    for when in ("before", "after"):
        twins = runs["float32"][when]["answers"]
        for name, run in runs.items():
            row = {"base": name, "tuned": when == "after", "kernels": modes[name]}
            row |= shares(tokenizer, run[when]["answers"], twins)
            if options.task == "digits":
                right = sum(expected[x["prompt"]] == x[when].strip() for x in run["samples"])
                row["right_answers"] = round(right / PROMPTS, 3)
            row |= {key: round(run[when][key], 4) for key in ("loss", "accuracy")}
            rows.append(row)
            print(json.dumps(row), flush=True)
    samples = {name: run["samples"] for name, run in runs.items()}
    if options.write:
        record.write(
            f"quantized_answers_{options.task}_{BACKEND}_cpu",
            __doc__,
            ("keras", BACKEND),
            task=options.task,
            backend=BACKEND,
            threads=1,
            prompts=PROMPTS,
            first_steps=options.first_steps,
            parameters=runs["float32"].get("parameters"),
            rows=rows,
            samples=samples,
        )
    else:
        print(json.dumps(samples, indent=1))


if __name__ == "__main__":
    main()
