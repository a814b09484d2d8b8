"""Settings of `kmodels gemma` that follow from the data, the model and the device."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from kmodels import presets
from kmodels.core import runtime
from kmodels.core.errors import InputError, human
from kmodels.lora import LoraSettings
from kmodels.text import read_records
from kmodels.tools.plan import Plan, Setup

if TYPE_CHECKING:
    from kmodels.models.blocks.preprocessor import CausalLMPreprocessor

__all__ = ["Choice", "chosen", "learning_rate", "recommendations", "setup_of", "show"]

# The lengths of so many records stand for those of all.
SAMPLE = 2000
# Rows are a multiple of LENGTHS_OF long and not longer than LONGEST, unless a flag says so.
LENGTHS_OF, LONGEST, UNCUT = 16, 2048, 2**20
# Examples are packed if that saves at least this share of the rows.
SAVED = 0.1
# Reasons of defaults that do not depend on the data.
REASONS = {
    "targets": "adapters of the MLPs learn most (LoRA without regret, Thinking Machines, 2025)",
    "rank": "enough for some ten thousand examples; more cost memory, fewer learn less",
    "alpha": "the learning rate is for this scale, alpha / rank",
    "schedule": "falls to zero at the last step",
    "warmup": "Adam's first steps are uncertain",
    "loss_normalization": "as transformers, TRL and torchtune do",
}


class Choice(NamedTuple):
    """A setting with its reason."""

    name: str
    value: Any
    reason: str


def learning_rate(backbone: Any) -> Choice:
    """Returns the highest learning rate of LoRA with Adam, by the width of the model.

    The rule of tinker-cookbook's `hyperparam_utils.get_lr` (Thinking Machines, 2025) for Llama,
    fitted to widths from 2048: ten times the rate for all weights, independent of the rank.

    Args:
        backbone: of a language model, with or without values.
    """
    width = backbone.token_embedding.output_dim
    rate = float(f"{5e-5 * 10 * (2000 / width) ** 0.781:.2g}")
    return Choice("learning_rate", rate, f"by the width {width}, tinker-cookbook's rule for Llama")


def chosen(settings: Any, rows: Sequence[Any], text: "CausalLMPreprocessor") -> list[Choice]:
    """Returns a choice for each setting that depends on the data or the device and is open.

    Args:
        settings: of recipes/gemma_lora.py; `precision` and `loss_on` are open if "auto",
            `sequence_length` and `pack` if None.
        rows: records, as `kmodels.text.read_records` gives them.
        text: preprocessor of the model; its `loss_on` is changed.

    Raises:
        InputError: for records that the template of `text` does not support.
    """
    choices = []
    if settings.precision == "auto":
        there = not runtime.native.is_cpu()
        value = "bfloat16" if there else "float32"
        reason = "half the memory; adapters stay float32" if there else "CPUs compute it exactly"
        choices.append(Choice("precision", value, reason))
    if settings.loss_on == "auto":
        choices.append(_loss_on(rows, text))
    rows = rows[:: max(len(rows) // SAMPLE, 1)]
    length = settings.sequence_length
    if length is None:
        sizes = np.array([len(example.ids) - 1 for example in text.encode(rows, UNCUT)])
        wanted = -(-int(np.percentile(sizes, 99)) // LENGTHS_OF) * LENGTHS_OF
        length = min(max(wanted, LENGTHS_OF), LONGEST)
        reason = f"{np.mean(sizes <= length):.0%} of the examples fit in a row"
        choices.append(Choice("sequence_length", length, reason))
    if settings.pack is None:
        packed = len(text.pack(rows, length)[1])
        reason = f"{len(rows)} examples would fill {packed} rows"
        choices.append(Choice("pack", packed <= (1 - SAVED) * len(rows), reason))
    return choices


def _loss_on(rows: Sequence[Any], text: "CausalLMPreprocessor") -> Choice:
    if any("text" in row for row in rows):
        return Choice("loss_on", "all", "some records are texts without a response")
    text.loss_on = "responses"
    try:
        text.encode(rows[:1])
    except InputError as error:
        text.loss_on = "all"
        return Choice("loss_on", "all", str(error))
    return Choice("loss_on", "responses", "the prompts are given, not learnt")


def setup_of(settings: Any, lora: LoraSettings) -> Setup:
    """Returns the step of a run.

    Args:
        settings: of recipes/gemma_lora.py, none of them open.
        lora: its adapters.
    """
    return Setup(
        settings.batch_size,
        settings.sequence_length,
        precision=settings.precision,
        lora=lora,
        quantize=settings.quantize,
        remat=settings.remat,
        accumulate=settings.accumulate,
        packed=settings.pack,
    )


def recommendations(settings: Any) -> dict[str, Any]:
    """Returns the settings that matter, with reasons and costs, as plain values for JSON.

    Args:
        settings: of recipes/gemma_lora.py, with `weights` and `data`.

    Returns:
        {"settings": [{"name", "value", "reason", "bytes", "over"}], "batch_size", "peak_bytes",
        "available_bytes", "command"}; `bytes` is the memory of a step that the value costs more
        than another, named by `over`.

    Raises:
        InputError: for files that are not a language model's, or not records.
    """
    weights, data = settings.weights, settings.data
    kind = presets.causal_lm_of(weights)
    text = kind.preprocessor_class.from_preset(weights, template=settings.template)
    choices = chosen(settings, read_records(data).rows, text)
    settings = replace(settings, **{name: value for name, value, _ in choices})
    targets = tuple(settings.targets.split(","))
    lora = LoraSettings(settings.rank, settings.alpha, targets=targets, dora=settings.dora)
    setup = setup_of(settings, lora)
    plan = Plan(weights, setup)
    others = {
        "precision": ("bfloat16", replace(setup, precision="bfloat16")),
        "sequence_length": ("half", replace(setup, sequence_length=setup.sequence_length // 2)),
        "pack": ("rows of one example", replace(setup, packed=False)),
        "targets": ("query,value", replace(setup, lora=replace(lora, targets=("query", "value")))),
        "rank": ("half", replace(setup, lora=replace(lora, rank=max(lora.rank // 2, 1)))),
    }
    if settings.learning_rate is None:
        choices.append(learning_rate(plan.backbone))
    choices += [Choice(name, getattr(settings, name), why) for name, why in REASONS.items()]
    rows = []
    for choice in choices:
        over, other = others.get(choice.name, ("", setup))
        rows.append({**choice._asdict(), "bytes": plan.saved_by(other), "over": over})
    return {
        "settings": rows,
        "batch_size": settings.batch_size,
        "peak_bytes": plan.bytes,
        "available_bytes": plan.available,
        "command": f"kmodels gemma --weights {weights} --data {data}",
    }


def show(recommended: dict[str, Any], console: Console) -> None:
    """Prints what `recommendations` returned."""
    table = Table("flag", "value", "why", "memory of a step")
    for row in recommended["settings"]:
        saved = row["bytes"]
        cost = f"{human(saved)} more than {row['over']}" if saved > 0 else ""
        table.add_row(f"--{row['name'].replace('_', '-')}", str(row["value"]), row["reason"], cost)
    table.add_section()
    free = recommended["available_bytes"]
    note = f"{recommended['batch_size']} rows" + (f"; {human(free)} are free" if free else "")
    table.add_row("peak of a step", human(recommended["peak_bytes"]), note, "")
    console.print(table)
    console.print(f"{recommended['command']} trains with these settings.")
