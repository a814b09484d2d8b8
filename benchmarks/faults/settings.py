"""Wrong settings of the recipes, the command line and the public functions: one line each.

    python benchmarks/faults/settings.py [--quick] [--write]

Every line has to name the value and say what is allowed. Prints counts, for the backend of
KERAS_BACKEND, and whatever is told badly.
"""

import contextlib
import functools
import importlib.util
import io
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import tally

from kmodels import data, generation, lora, models, presets, text, training
from kmodels.callbacks import Checkpoint
from kmodels.core import runtime
from kmodels.core.dispatch import generic_only
from kmodels.core.errors import InputError
from kmodels.distribution import check_batch, distribute, parse_mesh
from kmodels.tools import cli

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
# A case has what is wrong, the value as the message has to name it, and a part of what is allowed.
VIT = (
    ("--epochs 0", "0", "at least 1"),
    ("--epochs two", "'two'", "int"),
    ("--lerning-rate 1", "--lerning-rate", "--learning-rate"),
    ("--precision float8", "'float8'", "mixed_bfloat16"),
    ("--schedule sine", "'sine'", "cosine"),
    ("--batch-size 0", "0", "at least 1"),
    ("--steps 0", "0", "at least 1"),
    ("--keep 0", "0", "at least 1"),
    ("--log-every 0", "0", "at least 1"),
    ("--workers -1", "-1", "at least 0"),
    ("--seed 4294967296", "4294967296", "from 0 to"),
    ("--memory-fraction 2", "2.0", "(0, 1]"),
    ("--matmul-precision exact", "'exact'", "highest"),
    ("--mesh rows=2", "'rows'", "data, fsdp, sequence and model"),
    ("--mesh data=0", "'0'", "from 1"),
    ("--mesh data=3", "data=3", "6 and 9"),
    ("--checkpoint-every 5m", "'5m'", "300s"),
    ("--learning-rate nan", "nan", "above 0"),
    ("--warmup 1", "1.0", "below 1"),
    ("--weight-decay -1", "-1.0", "0 or more"),
    ("--layer-decay 2", "2.0", "at most 1"),
    ("--clip-norm -1", "-1.0", "at least 0"),
    ("--accumulate 0", "0", "at least 1"),
    ("--ema 1", "1.0", "between 0 and 1"),
    ("--label-smoothing 1", "1.0", "below 1"),
    ("--dropout 1", "1.0", "[0, 1)"),
    ("--drop-path -0.5", "-0.5", "[0, 1)"),
    ("--head-dropout 1.5", "1.5", "[0, 1)"),
    ("--pad -1", "-1", "at least 0"),
    ("--crop 2", "2.0", "<= 1"),
    ("--rand-augment 9", "'9'", "2 numbers"),
    ("--rand-augment 2,99", "99", "<= 10"),
    ("--erasing 2", "2.0", "from 0 to 1"),
    ("--mixup -1", "-1.0", "at least 0"),
    ("--cutmix nan", "nan", "at least 0"),
    ("--non-finite ignore", "'ignore'", "skip"),
    ("--preset vit_tyni_patch16_224", "vit_tyni", "vit_tiny"),
    ("--weights no/such", "no/such", "no file or directory"),
    ("--data digit", "'digit'", "synthetic"),
    ("--data synthetic:0", "synthetic:0", "above 0"),
    ("--data npz:no.npz", "no.npz", "npz:FILE"),
    ("--image-size 9", "9", "nearest"),
    ("--image-size 0", "0", "at least 1"),
    ("--out /proc/nowhere", "/proc/nowhere", "another directory"),
)
GEMMA = (
    ("--rank 0", "0", "from 1"),
    ("--alpha 0", "0.0", "above 0"),
    ("--targets keys", "'keys'", "attention/query"),
    ("--lora-dropout 1", "1.0", "[0, 1)"),
    ("--quantize int2", "'int2'", "int4"),
    ("--remat all", "'all'", "attention"),
    ("--loss-on prompts", "'prompts'", "responses"),
    ("--template x", "'x'", "alpaca"),
    ("--sequence-length 1", "1", "from 2"),
    ("--held-out 1", "1.0", "below 1"),
    ("--samples -1", "-1", "at least 0"),
    ("--sample-tokens 0", "0", "at least 1"),
    ("--first-steps 0", "0", "at least 1"),
    ("--data no.jsonl", "no.jsonl", "No such file"),
    ("--learning-rate 0", "0.0", "above 0"),
)
COMMAND = (
    ("plna", "plna", "plan"),
    ("plan --preset gemma", "'gemma'", "gemma3_1b"),
    ("plan --preset gemma3_debug --batch-size 0", "0", "at least 1"),
    ("plan --preset gemma3_debug --batch-size two", "'two'", "integer"),
    ("plan --preset gemma3_debug --sequence-length 0", "0", "from 2"),
    ("plan --preset gemma3_debug --precision float9", "'float9'", "bfloat16"),
    ("plan --preset gemma3_debug --rank 0", "0", "from 1"),
    ("plan --preset gemma3_debug --targets x", "'x'", "attention/query"),
    ("plan --preset gemma3_debug --quantize int2", "'int2'", "int4"),
    ("plan --preset gemma3_debug --quantize int8 --full", "'int8'", "LoRA"),
    ("plan --preset gemma3_debug --remat some", "'some'", "block"),
    ("plan --preset gemma3_debug --optimizer adamax", "'adamax'", "adamw"),
    ("plan --preset gemma3_debug --accumulate 0", "0", "at least 1"),
    ("plan --preset gemma3_debug --generate -1", "-1", "at least 0"),
    ("plan --preset gemma3_debug --memory much", "'much'", "80GiB"),
    ("plan --preset gemma3_debug --image-size 8", "gemma3_debug", "leave image_size out"),
    ("plan --preset vit_debug --image-size 9", "9", "nearest"),
    ("plan --preset vit_debug --num-classes -1", "-1", "at least 0"),
)


@functools.cache
def vit() -> Any:
    """A small classifier."""
    return models.ViTImageClassifier.from_preset("vit_debug", num_classes=2)


@functools.cache
def gemma() -> models.GemmaCausalLM:
    """A small language model."""
    return models.GemmaCausalLM.from_preset("gemma3_debug")


def gemma_of(**fields: Any) -> models.GemmaBackbone:
    """Another one."""
    return models.GemmaBackbone.from_preset("gemma3_debug", **fields)


def rows(count: int = 4) -> data.ArraySource:
    """Black pictures."""
    return data.ArraySource(np.zeros((count, 8, 8, 1), "uint8"), np.zeros(count, "int32"))


def prompt(**settings: Any) -> Any:
    """A call of generate."""
    ids = np.ones((1, 4), "int32")
    return gemma().generate({"token_ids": ids, "padding_mask": ids}, **settings)


# Types that a checker need not hold against the wrong arguments below.
ViT: Any = models.ViTBackbone
Save: Any = Checkpoint
AdamW: Any = training.AdamW
set_matmul_precision: Any = runtime.set_matmul_precision
Pictures, Texts = models.ViTImageClassifierPreprocessor, models.GemmaCausalLMPreprocessor
FUNCTIONS: dict[str, tuple[Callable[[], object], str, str]] = {
    "config of no layers": (lambda: ViT(num_layers=0), "0", "at least 1"),
    "config of text": (lambda: ViT(num_layers="12"), "'12'", "whole number"),
    "config of a fraction": (lambda: gemma_of(hidden_dim=2.5), "2.5", "whole number"),
    "config of heads": (lambda: ViT(hidden_dim=30, num_heads=4), "4 heads", "3, 5"),
    "config of groups": (lambda: gemma_of(num_key_value_heads=3), "3", "divisor"),
    "config of a rate": (lambda: ViT(dropout_rate=1.0), "1.0", "[0, 1)"),
    "config of a cap": (lambda: gemma_of(final_logit_soft_cap=-1.0), "-1.0", "positive"),
    "config of a picture": (lambda: ViT(image_shape=(9, 9)), "(9, 9)", "channels"),
    "an unknown field": (lambda: ViT.make_config(depth=2), "depth", "num_layers"),
    "an unknown setting": (
        lambda: ViT.from_preset("vit_debug", num_layer=2), "'num_layer'", "num_layers"
    ),
    "an unknown preset": (lambda: ViT.from_preset("vit_debugg"), "'vit_debugg'", "vit_debug"),
    "an unknown file": (lambda: ViT.from_preset("x/y.npz"), "x/y.npz", "no file"),
    "an unknown family": (lambda: presets.list_presets("bert"), "'bert'", "gemma"),
    "an unknown dtype": (lambda: ViT.from_preset("vit_debug", dtype="f9"), "'f9'", "float32"),
    "no classes": (lambda: models.ViTImageClassifier(vit().backbone, -1), "-1", "at least 0"),
    "pooling": (
        lambda: models.ViTImageClassifier(vit().backbone, 2, pooling="mean"), "'mean'", "gap"
    ),
    "rank": (lambda: vit().enable_lora(2.5), "2.5", "from 1"),
    "targets": (lambda: vit().enable_lora(2, targets="quary"), "'quary'", "attention/query"),
    "a pattern": (lambda: vit().enable_lora(2, targets="("), "'('", "not a pattern"),
    "no adapters": (lambda: vit().save_adapter("x"), "no LoRA adapters", "enable_lora"),
    "an adapter": (lambda: vit().load_adapter("no/such"), "no/such", "save_adapter"),
    "alpha": (lambda: lora.LoraSettings(2, alpha=float("inf")), "inf", "above 0"),
    "quantization": (lambda: vit().quantize("float8"), "'float8'", "int8"),
    "kept checkpoints": (lambda: Save("x", keep=0), "0", "at least 1"),
    "kept as text": (lambda: Save("x", keep="two"), "'two'", "at least 1"),
    "mode": (lambda: Save("x", mode="most"), "'most'", "min, max"),
    "distance": (lambda: Save("x", every="5m"), "'5m'", "300s"),
    "distance below": (lambda: Save("x", every=-5), "-5", "500"),
    "learning rate": (lambda: training.WarmupSchedule(-1.0, 10), "-1.0", "above 0"),
    "rate of AdamW": (lambda: AdamW(-1.0), "-1.0", "above 0"),
    "schedule": (lambda: training.WarmupSchedule(1.0, 9, 0, "sine"), "'sine'", "cosine"),
    "average": (lambda: AdamW(ema=2.0), "2.0", "between 0 and 1"),
    "accumulation": (lambda: AdamW(accumulate=1.5), "1.5", "at least 1"),
    "sampler": (lambda: gemma().compile(sampler="best"), "'best'", "greedy"),
    "temperature": (lambda: generation.Sampler(float("nan")), "nan", "0 (greedy) or more"),
    "top_p": (lambda: generation.Sampler(top_p=0.0), "0.0", "(0, 1]"),
    "length": (lambda: prompt(max_length=-1, stop_token_ids=None), "-1", "at least 1"),
    "stop tokens": (lambda: prompt(stop_token_ids="end"), "'end'", "None"),
    "a prompt of text": (lambda: gemma().generate("a"), "no preprocessor", "token_ids"),
    "mesh": (lambda: distribute("rows=2"), "'rows'", "data, fsdp, sequence and model"),
    "mesh of none": (lambda: parse_mesh("data=-2"), "'-2'", "from 1"),
    "batch on a mesh": (lambda: check_batch("data=4", 10), "10", "8 and 12"),
    "matmul precision": (lambda: set_matmul_precision("x"), "'x'", "highest"),
    "memory": (lambda: runtime.memory_fraction(0.0), "0.0", "(0, 1]"),
    "an op": (lambda: generic_only("atention").__enter__(), "atention", "attention"),
    "size of pictures": (lambda: Pictures((0, 8)), "(0, 8)", "at least 1"),
    "mean": (lambda: Pictures((8, 8), mean=(0.5,)), "1", "std"),
    "deviation": (lambda: Pictures((8, 8), std=(0.5, 0.0, 0.5)), "0.0", "above 0"),
    "interpolation": (lambda: Pictures(interpolation="best"), "'best'", "bicubic"),
    "a picture's channels": (lambda: Pictures()(np.zeros((4, 4, 1))), "(4, 4, 1)", "3)"),
    "a tokenizer": (lambda: Texts("no/such"), "no/such", "no such file"),
    "no pictures": (lambda: data.ImageLoader(rows(0), 2), "empty", "at least one"),
    "batches of pictures": (lambda: data.ImageLoader(rows(), 0), "0", "at least 1"),
    "workers": (lambda: data.ImageLoader(rows(), 2, workers=-1), "-1", "at least 0"),
    "an epoch's place": (
        lambda: data.ImageLoader(rows(), 2).set_epoch(0, skip=9), "9", "0 to 1"
    ),
    "batches of texts": (
        lambda: text.TextLoader(({}, np.ones((2, 3)), np.ones((2, 3))), 0), "0", "at least 1"
    ),
    "share": (lambda: data.open_dataset("digits", validation_split=0.9), "0.9", "below 0.5"),
    "data": (lambda: data.open_dataset("mnist"), "'mnist'", "digits"),
    "records": (lambda: text.read_records("no.jsonl"), "no.jsonl", "No such file"),
    "augmentation": (lambda: data.Augment(mixup=0.2), "one-hot", "num_classes"),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A wrong setting.

    Args:
        name: for people.
        run: (folder) -> exit code and what was written to stderr.
        value: has to be in the message.
        allowed: has to be in it too.
    """

    name: str
    run: Callable[[Path], tuple[int, str]]
    value: str
    allowed: str


@functools.cache
def recipe(name: str) -> ModuleType:
    """A recipe as a module."""
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", RECIPES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# Seconds; what is told later is listed.
SLOW = 3.0
SMALL = {
    "vit": "--preset vit_debug --data synthetic:64 --batch-size 8",
    "gemma_lora": "--samples 0",
}


def _run_recipe(name: str, given: str, folder: Path) -> tuple[int, str]:
    out = "" if "--out" in given else f" --out {folder / 'run'}"
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        code = recipe(name).main(shlex.split(f"{SMALL[name]} {given}{out}"))
    return code, errors.getvalue()


def _run_command(given: str, folder: Path) -> tuple[int, str]:
    errors, code = io.StringIO(), 0
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        try:
            cli.main(shlex.split(given))
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
    return code, errors.getvalue()


def _call(function: Callable[[], object], folder: Path) -> tuple[int, str]:
    try:
        function()
    except InputError as error:
        return 2, f"{error}\n"
    return 0, ""


def cases() -> list[Case]:
    """Returns all cases."""
    found = []
    for name, table in (("vit", VIT), ("gemma_lora", GEMMA)):
        for given, *expected in table:
            run = functools.partial(_run_recipe, name, given)
            found.append(Case(f"{name}.py {given}", run, *expected))
    for given, *expected in COMMAND:
        run = functools.partial(_run_command, given)
        found.append(Case(f"kmodels {given}", run, *expected))
    for name, (function, *expected) in FUNCTIONS.items():
        found.append(Case(name, functools.partial(_call, function), *expected))
    return found


def problem(case: Case, folder: Path) -> str | None:
    """Returns what is wrong with how a case is told, or None."""
    try:
        code, said = case.run(folder)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    if code != 2 or said.count("\n") != 1:
        return f"code {code}, {said.count(chr(10))} lines: {said[-300:]}"
    lacks = [part for part in (case.value, case.allowed) if part not in said]
    return f"lacks {lacks}: {said}" if lacks else None


def tell(chosen: list[Case]) -> dict[str, Any]:
    """Counts, and the problems by case."""
    problems: dict[str, str] = {}
    slow: dict[str, float] = {}
    slowest = 0.0
    former = Path.cwd()
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        try:
            for case in chosen:
                start = time.perf_counter()
                if (found := problem(case, Path(name))) is not None:
                    problems[case.name] = found
                seconds = round(time.perf_counter() - start, 2)
                slowest = max(slowest, seconds)
                if seconds > SLOW:
                    slow[case.name] = seconds
        finally:
            os.chdir(former)
    counts = {"settings": len(chosen), "told in a line": len(chosen) - len(problems)}
    counts |= {"told badly": len(problems), "slowest s": slowest}
    return counts | {"slow": slow, "problems": problems}


def main() -> None:
    """Runs all and prints the counts."""
    options = tally.arguments(__doc__).parse_args()
    chosen = cases()
    tally.report("settings", {"wrong": tell(chosen[::4] if options.quick else chosen)}, options)


if __name__ == "__main__":
    main()
