"""The `kmodels` command."""

import functools
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from kmodels import __version__
from kmodels.core.environment import check_backend
from kmodels.core.errors import InputError, check_whole, shown
from kmodels.core.files import local_path
from kmodels.runs import console, recipe
from kmodels.runs.command_line import checked_output, invoke
from kmodels.tools import use

app = typer.Typer(
    name="kmodels",
    help="Keras 3 models at native speed on JAX, PyTorch and TensorFlow.",
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class BackendCommand(TyperCommand):
    """A command that needs a backend, which it looks for once its flags are read.

    So --help works without one, and a wrong flag is reported before a wrong backend.
    """

    def invoke(self, ctx: Any) -> Any:
        """Runs the command, or raises `InputError` where Keras cannot have the backend."""
        check_backend()
        return super().invoke(ctx)


command = functools.partial(app.command, cls=BackendCommand)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"kmodels {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _commands(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version)
    ] = False,
) -> None:
    """Keras 3 models at native speed on JAX, PyTorch and TensorFlow."""
    if context.invoked_subcommand is None:
        print(OVERVIEW, end="")


def _add_recipe(name: str, summary: str) -> None:
    """Adds a command that hands all its arguments, --help too, to a recipe."""
    passed = {"allow_extra_args": True, "ignore_unknown_options": True}

    @app.command(name, help=summary, context_settings=passed, add_help_option=False)
    def run(context: typer.Context) -> int:
        return recipe.run(name, context.args)  # which checks the backend after its flags


for _name, _summary in recipe.SUMMARIES.items():
    _add_recipe(_name, _summary)

command("chat")(use.chat)
command("predict")(use.predict)
command("generate")(use.generate)


@command()
def doctor(
    ops: Annotated[
        bool, typer.Option("--ops", help="Also show each op: its override, or why it has none.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show backend, versions, devices, precision, and how many ops run an override."""
    from kmodels.tools import doctor as checks

    found = checks.report()
    if as_json:
        print(json.dumps(found, indent=1))
        return
    from rich.console import Console

    checks.show(found, Console(markup=False, emoji=False), ops)


@command()
def plan(
    preset: Annotated[str, typer.Option(help="A registered name or a directory.")],
    batch_size: Annotated[int, typer.Option(help="Rows per step.")] = 8,
    sequence_length: Annotated[int, typer.Option(help="Tokens per row of text.")] = 512,
    image_size: Annotated[int | None, typer.Option(help="Height and width in pixels.")] = None,
    num_classes: Annotated[
        int | None, typer.Option(help="Number of classes of a classifier.")
    ] = None,
    precision: Annotated[str, typer.Option(help="float32, bfloat16 or mixed_*.")] = "float32",
    lora: Annotated[
        bool | None, typer.Option("--lora/--full", help="Adapters or all weights.")
    ] = None,
    rank: Annotated[int, typer.Option(help="LoRA rank.")] = 4,
    targets: Annotated[str, typer.Option(help="Layers that get adapters.")] = "query,value",
    dora: Annotated[
        bool, typer.Option("--dora", help="DoRA: train magnitude and direction separately.")
    ] = False,
    quantize: Annotated[str | None, typer.Option(help="int8 or int4 for frozen kernels.")] = None,
    remat: Annotated[str, typer.Option(help="none, block, attention or mlp.")] = "none",
    optimizer: Annotated[str, typer.Option(help="adamw, adam, lion, momentum or sgd.")] = "adamw",
    accumulate: Annotated[int, typer.Option(help="Batches per update.")] = 1,
    generate: Annotated[int, typer.Option(help="Tokens that generate keeps per row.")] = 0,
    memory: Annotated[str | None, typer.Option(help="Memory of the device, such as 80GiB.")] = None,
    mesh: Annotated[str | None, typer.Option(help="Devices, such as data=2,fsdp=8.")] = None,
    accelerator: Annotated[
        bool | None,
        typer.Option(
            "--accelerator/--here", help="Count as on GPUs and TPUs; the default with a mesh."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show the memory of a training step on each device, and which settings lower it."""
    from kmodels.core.errors import parse_bytes
    from kmodels.lora import LoraSettings
    from kmodels.presets import family_of
    from kmodels.tools import plan as plans

    check_whole("generate", generate, 0)
    text = "vocabulary_size" in family_of(preset).backbone.config_class.__dataclass_fields__
    adapters = LoraSettings(rank, targets=targets.split(","), dora=dora)
    found = plans.Plan(
        preset,
        plans.Setup(
            batch_size=batch_size,
            sequence_length=sequence_length,
            precision=precision,
            lora=adapters if lora or (lora is None and text) else None,
            quantize=quantize,
            remat=remat,
            optimizer=optimizer,
            accumulate=accumulate,
            accelerator=mesh is not None if accelerator is None else accelerator,
        ),
        image_size=image_size,
        overrides={} if num_classes is None else {"num_classes": num_classes},
        available=None if memory is None else parse_bytes(memory),
        mesh=mesh,
    )
    if as_json:
        print(json.dumps(shown(found.to_dict(generate)), indent=1))
        return
    from rich.console import Console

    plans.show(found, Console(markup=False, emoji=False), generate)


@command()
def bench(
    preset: Annotated[str, typer.Argument(help="A registered name or a directory.")],
    batch_size: Annotated[int, typer.Option(help="Rows per step.")] = 8,
    backends: Annotated[str, typer.Option(help="jax,torch,tensorflow, or all installed.")] = "all",
    precision: Annotated[
        str, typer.Option(help="One or more of float32,tf32,mixed_bfloat16,bfloat16.")
    ] = "float32",
    attention: Annotated[str, typer.Option(help="generic, fused (overrides) or both.")] = "",
    ops: Annotated[str, typer.Option(help="generic, override or both, for all ops.")] = "",
    compile: Annotated[
        str, typer.Option(help="One or more of auto,none,inductor,openxla,xla.")
    ] = "auto",
    workers: Annotated[str, typer.Option(help="Workers of an image loader, such as 0,2.")] = "",
    image_size: Annotated[int | None, typer.Option(help="Height and width in pixels.")] = None,
    num_classes: Annotated[
        int | None, typer.Option(help="Number of classes of a classifier.")
    ] = None,
    sequence_length: Annotated[int, typer.Option(help="Tokens per row of text.")] = 512,
    lora: Annotated[
        bool | None, typer.Option("--lora/--full", help="Adapters or all weights.")
    ] = None,
    rank: Annotated[int, typer.Option(help="LoRA rank.")] = 4,
    optimizer: Annotated[str, typer.Option(help="adamw or sgd.")] = "adamw",
    rounds: Annotated[int, typer.Option(help="Rounds per row.")] = 10,
    steps: Annotated[int, typer.Option(help="Steps per round.")] = 1,
    check_steps: Annotated[
        int, typer.Option(help="Number of first steps whose losses must agree.")
    ] = 3,
    seed: Annotated[int, typer.Option(help="Random seed of initial weights and data.")] = 0,
    threads: Annotated[int | None, typer.Option(help="Threads of each process.")] = None,
    largest_batch: Annotated[
        bool, typer.Option("--largest-batch", help="Also look for the largest batch.")
    ] = False,
    memory: Annotated[
        str | None, typer.Option(help="Memory that a step may use, such as 8GiB.")
    ] = None,
    together: Annotated[int, typer.Option(help="Largest number of processes at a time.")] = 16,
    limit: Annotated[float, typer.Option(help="Seconds to wait for an answer.")] = 900.0,
    python: Annotated[
        list[str] | None, typer.Option(help="NAME=PATH: Python of a backend or of openxla.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory, or JSON file; runs/bench-<time> by default.")
    ] = None,
) -> None:
    """Train a model on each backend in turn; show speed, memory and compile time side by side."""
    import time

    from rich.console import Console

    from kmodels.core.errors import parse_bytes
    from kmodels.tools.compare_backends import bench as benches
    from kmodels.tools.compare_backends import report as reports

    options = benches.BenchOptions(
        preset=preset,
        backends=backends,
        precisions=benches.listed(precision),
        compile=benches.listed(compile),
        attention=benches.listed(attention),
        ops=benches.listed(ops),
        workers=benches.numbers("workers", workers),
        batch_size=batch_size,
        image_size=image_size,
        num_classes=num_classes,
        sequence_length=sequence_length,
        lora=lora,
        rank=rank,
        optimizer=optimizer,
        seed=seed,
        rounds=rounds,
        steps=steps,
        check_steps=check_steps,
        threads=threads,
        limit=limit,
        together=together,
        largest_batch=largest_batch,
        memory=None if memory is None else parse_bytes(memory),
        python=tuple(python or ()),
    )
    try:
        found = shown(benches.run(options, Console(stderr=True, markup=False, emoji=False)))
    except benches.Refused as error:
        for line in error.lines:
            print(f"kmodels: refused: {line}", file=sys.stderr)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        print("kmodels: stopped", file=sys.stderr)
        raise typer.Exit(130) from None
    reports.show(found, Console(markup=False, emoji=False))
    for path in reports.write(found, out or Path(f"runs/bench-{time.strftime('%Y%m%d-%H%M%S')}")):
        print(path)
    if any(row["failed"] is not None for row in found["rows"]):
        raise typer.Exit(2)


@command()
def parity(
    preset: Annotated[str, typer.Argument(help="A registered name or a directory.")],
    backends: Annotated[str, typer.Option(help="Two of jax, torch, tensorflow.")] = "jax,torch",
    preset_b: Annotated[str | None, typer.Option(help="Preset of the second side.")] = None,
    precision: Annotated[
        str, typer.Option(help="One precision for both sides, or A,B.")
    ] = "float32",
    ops: Annotated[str, typer.Option(help="override or generic, or both as A,B.")] = "override",
    steps: Annotated[int, typer.Option(help="Training steps.")] = 3,
    batch_size: Annotated[int, typer.Option(help="Rows per step.")] = 2,
    sequence_length: Annotated[int, typer.Option(help="Tokens per row of text.")] = 16,
    image_size: Annotated[int | None, typer.Option(help="Height and width in pixels.")] = None,
    num_classes: Annotated[
        int | None, typer.Option(help="Number of classes of a classifier.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed of initial weights and data.")] = 0,
    tolerance: Annotated[
        float | None, typer.Option(help="Allowed share of a tensor's largest value.")
    ] = None,
    limit: Annotated[float, typer.Option(help="Seconds to wait for an answer.")] = 900.0,
    out: Annotated[Path | None, typer.Option(help="Directory for parity.json.")] = None,
) -> None:
    """Train on two backends from one seed; name the first layer that differs (exit code 1)."""
    from rich.console import Console

    from kmodels.core.files import atomic_write
    from kmodels.tools.compare_backends import parity as parities
    from kmodels.tools.compare_backends import report as reports

    names, precisions, paths = (
        _pair(what, text)
        for what, text in (("backends", backends), ("precision", precision), ("ops", ops))
    )
    presets = (preset, preset_b or preset)
    left, right = map(parities.Side, names, presets, precisions, paths)
    options = parities.ParityOptions(
        left,
        right,
        steps=steps,
        batch_size=batch_size,
        sequence_length=sequence_length,
        image_size=image_size,
        num_classes=num_classes,
        seed=seed,
        tolerance=tolerance,
        limit=limit,
    )
    try:
        found = shown(parities.run(options))
    except KeyboardInterrupt:
        print("kmodels: stopped", file=sys.stderr)
        raise typer.Exit(130) from None
    reports.show(found, Console(markup=False, emoji=False))
    if out is not None:
        text = json.dumps(found, indent=1) + "\n"
        print(atomic_write(local_path(out) / "parity.json", lambda path: path.write_text(text)))
    raise typer.Exit(0 if found["equal"] else 1)


@command()
def report(
    folder: Annotated[Path, typer.Argument(help="Directory of a run, finished or not.")],
) -> None:
    """Write report.html, one page that shows a run; recipes do so when they end."""
    from kmodels.runs import report as reports

    print(reports.write(folder))


@command()
def compare(
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="RUN...", help="Directories of runs.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("compare.html"),
) -> None:
    """Lay runs beside each other: results, settings that differ, curves, answers; on one page."""
    from rich.console import Console

    from kmodels.runs.compare import Comparison

    found = Comparison(folders or [])
    found.show(Console(width=console.width(), highlight=False, markup=False, emoji=False))
    print(found.write(out))


@command()
def convert(
    source: Annotated[str, typer.Argument(help="A directory or file with a model.")],
    destination: Annotated[Path, typer.Argument(help="File or directory to create or replace.")],
    to: Annotated[str, typer.Option(help="hf, timm, npz, gguf, onnx, ...: see docs/convert.md.")],
    dtype: Annotated[
        str | None, typer.Option(help="Dtype of the weights: float32, bfloat16, float16 or q8_0.")
    ] = None,
    adapter: Annotated[str | None, typer.Option(help="LoRA adapters to merge.")] = None,
    sequence_length: Annotated[int, typer.Option(help="Tokens per compared row.")] = 32,
    text_only: Annotated[
        bool, typer.Option("--text-only", help="Leave out a checkpoint's vision tower.")
    ] = False,
    mmproj: Annotated[Path | None, typer.Option(help="GGUF file for the vision tower.")] = None,
) -> None:
    """Write a model for another package, run it there, and exit with 1 if its outputs differ."""
    from rich.console import Console

    from kmodels.tools import convert as converting

    try:
        found = converting.convert(
            source,
            destination,
            to,
            dtype=dtype,
            adapter=adapter,
            sequence_length=sequence_length,
            text_only=text_only,
            mmproj=mmproj,
        )
    except converting.Differs as error:
        print(f"kmodels: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    Console(soft_wrap=True, markup=False, emoji=False).print(found.line(), highlight=True)


def _pair(what: str, text: str) -> tuple[str, str]:
    """Returns one value for both sides, or one for each."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > 2 or (what == "backends" and len(parts) != 2):
        raise InputError(f"{what} is {text!r}; give two, a comma between them")
    return parts[0], parts[-1]


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line; wrong settings and unknown flags give one line and exit code 2.

    Closed standard output gives 141, one that cannot be written 74.
    """
    try:
        with checked_output():
            code = invoke(app, arguments, "kmodels")
    except InputError as error:
        print(f"kmodels: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    raise SystemExit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()


OVERVIEW = f"""kmodels {__version__}: Keras 3 models at native speed on JAX, PyTorch and TensorFlow.

Train, resume or evaluate:
  kmodels vit --data folder:IMAGES        a classifier, on a folder of images
  kmodels gemma --data LINES.jsonl        Gemma or Qwen 3 with LoRA, on texts
  kmodels probe --data folder:IMAGES      a linear probe of a frozen backbone
  kmodels distill --data folder:IMAGES    a small model taught by a large one
  kmodels caption --data FOLDER           Gemma 3 on images with texts
  kmodels segment --data folder:DIR       the class of each pixel, by masks
  kmodels zero-shot --data folder:IMAGES  two towers, to classify by names
  kmodels mae --data folder:IMAGES        an encoder, from images without labels
  kmodels dino --data folder:IMAGES       the same, by a teacher that follows it
  kmodels dpo --data PAIRS.jsonl          a language model, on preferred answers

Use a model or the model of a run:
  kmodels predict RUN FILES           classes of images, or of their pixels
  kmodels generate RUN --prompts FILE             replies to its prompts
  kmodels chat MODEL                  a chat in the terminal, or through a pipe

Inspect models and machines:
  kmodels doctor                      backend, versions, devices, fast ops
  kmodels plan --preset vit_base_patch16_224      the memory that training needs
  kmodels bench vit_small_patch16_224             the speed of each backend
  kmodels parity vit_debug            the first layer where two backends differ
  kmodels report RUN                  the page of a run, report.html
  kmodels compare RUN1 RUN2           runs beside each other, compare.html

Export models:
  kmodels convert RUN/model FILE.gguf --to gguf   to another package or runtime

KERAS_BACKEND chooses the backend. Flags of a command: kmodels COMMAND --help
"""
