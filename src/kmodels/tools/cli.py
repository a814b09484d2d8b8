"""The `kmodels` command."""

import dataclasses
import functools
import json
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeAlias

import typer

from kmodels import __version__
from kmodels.core.environment import check_backend
from kmodels.core.errors import InputError, check_whole, is_out_of_memory, one_line, shown
from kmodels.core.files import check_output, local_path
from kmodels.runs import console, recipe, settings
from kmodels.runs.terminal import (
    GroupedCommand,
    checked_output,
    invoke,
    option,
    refuse_idle,
    typed,
)
from kmodels.tools import evaluate, use

app = typer.Typer(
    name="kmodels",
    help="Keras 3 models at native speed on JAX, PyTorch and TensorFlow.",
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class BackendCommand(GroupedCommand):
    """A command that needs a backend, which it checks after its flags are parsed.

    So --help works without one, and a wrong flag is reported before a wrong backend.
    """

    def invoke(self, ctx: Any) -> Any:
        """Runs the command, or raises `InputError` if Keras cannot use the backend."""
        check_backend()
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print("kmodels: stopped", file=sys.stderr)
            raise typer.Exit(130) from None


command = functools.partial(app.command, cls=BackendCommand)

# Parameters that several commands share.
Preset: TypeAlias = Annotated[str, typer.Argument(help="A registered name or a directory.")]
BatchSize: TypeAlias = Annotated[int, option("Data", "Rows per step.")]
SequenceLength: TypeAlias = Annotated[int, option("Data", "Tokens per row of text.")]
ImageSize: TypeAlias = Annotated[int | None, option("Data", "Height and width in pixels.")]
NumClasses: TypeAlias = Annotated[int | None, option("Data", "Number of classes of a classifier.")]
Seed: TypeAlias = Annotated[int, option("Data", "Random seed of initial weights and data.")]
Lora: TypeAlias = Annotated[
    bool | None,
    option("LoRA", "Adapters or all weights; default: adapters for texts.", "--lora/--full"),
]
Rank: TypeAlias = Annotated[int, option("LoRA", "LoRA rank.")]
Limit: TypeAlias = Annotated[
    float, option("Measurement", "Longest time for an answer of a process, in seconds.")
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


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


def _options(context: typer.Context, kind: type[Any], **changes: object) -> Any:
    """Returns a dataclass with the values of the flags of the same names, and changes of them."""
    names = [field.name for field in dataclasses.fields(kind) if field.name in context.params]
    return kind(**{name: context.params[name] for name in names} | changes)


def _adapts(context: typer.Context, preset: str, lora: bool | None = False) -> bool:
    """Returns True if adapters are trained.

    Raises:
        InputError: for a given flag that has no effect on the preset, or without adapters.
    """
    from kmodels.presets import family_of

    text = "vocabulary_size" in family_of(preset).backbone.config_class.__dataclass_fields__
    adapts = text if lora is None else lora
    if not adapts:
        reason = "with --full" if lora is False else "without --lora"
        refuse_idle(context, ("rank", "targets", "dora"), reason)
    if not text:
        refuse_idle(context, ("sequence_length",), f"on images, which {preset} takes")
    return adapts


def _add_recipe(name: str, summary: str) -> None:
    """Adds a command that passes all its arguments, including --help, to a recipe."""
    passed = {"allow_extra_args": True, "ignore_unknown_options": True}

    @app.command(name, help=summary, context_settings=passed, add_help_option=False)
    def run(context: typer.Context) -> int:
        return recipe.run(name, context.args)  # which checks the backend after its flags


for _name, _summary in recipe.SUMMARIES.items():
    _add_recipe(_name, _summary)


@command("recipe")
def show_recipe(
    name: Annotated[str | None, typer.Argument(help="A name that the list shows.")] = None,
) -> None:
    """List the settings that come with kmodels for --config, or print a file of them."""
    if name is not None:
        print(settings.settings_file(name).read_text(encoding="utf-8"), end="")
        return
    files = settings.shipped()
    for key, file in files.items():
        first = file.read_text(encoding="utf-8").splitlines()[0]
        print(f"{key:<{max(map(len, files))}} {first.lstrip('# ')}")


command("chat")(use.chat)
command("predict")(use.predict)
command("generate")(use.generate)
command("eval")(evaluate.run)


@command()
def doctor(
    context: typer.Context,
    ops: Annotated[
        bool,
        typer.Option(
            "--ops", help="Also show each op with its override, or the reason for having none."
        ),
    ] = False,
    override: Annotated[
        Path | None, typer.Option(help="Python file with a kmodels.override, loaded first.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show backend, versions, devices, precision, and how many ops run an override."""
    from kmodels.tools import doctor as checks

    if as_json:
        refuse_idle(context, ("ops",), "with --json, which lists all ops")
    if override is not None:
        from kmodels.overrides import user

        user.load(override)
    facts = checks.report()
    if as_json:
        print(json.dumps(facts, indent=1))
        return

    checks.show(facts, console.plain(), ops)


@command()
def plan(
    context: typer.Context,
    preset: Annotated[
        str, option("Model", "A registered name or a directory.", "--preset", "--weights")
    ],
    precision: Annotated[str, option("Model", "float32, bfloat16 or mixed_*.")] = "float32",
    recommend: Annotated[
        bool,
        option(
            "Data",
            "Show the settings of kmodels gemma for --weights and --data, with reasons and costs.",
            "--recommend",
        ),
    ] = False,
    data: Annotated[
        str | None, option("Data", "With --recommend: a .jsonl file of instructions or chats.")
    ] = None,
    batch_size: BatchSize = 8,
    sequence_length: SequenceLength = 512,
    image_size: ImageSize = None,
    num_classes: NumClasses = None,
    lora: Lora = None,
    rank: Rank = 16,
    targets: Annotated[str, option("LoRA", "Layers that get adapters.")] = "all-linear",
    dora: Annotated[
        bool, option("LoRA", "DoRA: train magnitude and direction separately.", "--dora")
    ] = False,
    quantize: Annotated[
        str | None, option("LoRA", "int8, int4, nf4 or fp4 for the frozen base weights (QLoRA).")
    ] = None,
    optimizer: Annotated[str, option("Optimizer", "adamw, adam, lion, momentum or sgd.")] = "adamw",
    accumulate: Annotated[int, option("Optimizer", "Batches per update.")] = 1,
    remat: Annotated[
        str, option("Memory", "Gradient checkpointing: none, block, attention or mlp.")
    ] = "none",
    generate: Annotated[
        int, option("Memory", "Also show a KV cache for this number of tokens per row.")
    ] = 0,
    memory: Annotated[str | None, option("Memory", "Memory of the device, such as 80GiB.")] = None,
    mesh: Annotated[str | None, option("Devices", "Mesh, such as data=2,fsdp=8.")] = None,
    accelerator: Annotated[
        bool | None,
        option(
            "Devices",
            "Estimate for GPUs and TPUs; the default with a mesh.",
            "--accelerator/--here",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the memory of a training step on each device, and which settings lower it."""
    from kmodels.core.errors import parse_bytes
    from kmodels.lora import LoraSettings
    from kmodels.presets import family_of
    from kmodels.tools import plan as plans

    if recommend or data is not None:
        _recommend(context, recommend, preset, data, as_json)
        return
    check_whole("generate", generate, 0)
    adapts = _adapts(context, preset, lora)
    if not hasattr(family_of(preset).tasks[0], "generate"):
        refuse_idle(context, ("generate",), f"on {preset}, which writes no text")
    adapters = LoraSettings(rank, targets=targets.split(","), dora=dora)
    estimate = plans.Plan(
        preset,
        _options(
            context,
            plans.Setup,
            lora=adapters if adapts else None,
            accelerator=mesh is not None if accelerator is None else accelerator,
        ),
        image_size=image_size,
        overrides={} if num_classes is None else {"num_classes": num_classes},
        available=None if memory is None else parse_bytes(memory),
        mesh=mesh,
    )
    if as_json:
        print(json.dumps(shown(estimate.to_dict(generate)), indent=1))
        return

    plans.show(estimate, console.plain(), generate)


def _recommend(
    context: typer.Context, recommend: bool, weights: str, data: str | None, as_json: bool
) -> None:
    """Runs `kmodels plan --recommend` with the flags that are settings of the recipe."""
    if not recommend or data is None:
        raise InputError("--recommend and --data FILE belong together; give both or neither")
    from kmodels.tools.plan import recommend as recommending

    known = recipe.load(recipe.RECIPES["gemma"]).Settings
    own = ("preset", "recommend", "data", "as_json")
    stated = {name: context.params[name] for name in typed(context) if name not in own}
    supported = ("precision", "batch_size", "sequence_length", "rank", "targets", "dora")
    idle = stated.keys() - {*supported, "quantize", "accumulate", "remat"}
    refuse_idle(context, idle, "with --recommend")
    recommended = recommending.recommendations(known(weights=weights, data=data, **stated))
    if as_json:
        print(json.dumps(shown(recommended), indent=1))
    else:
        recommending.show(recommended, console.plain())


@command()
def bench(
    context: typer.Context,
    preset: Preset,
    backends: Annotated[
        str, option("Compared settings", "jax,torch,tensorflow, or all installed.")
    ] = "all",
    precision: Annotated[
        str, option("Compared settings", "One or more of float32,tf32,mixed_bfloat16,bfloat16.")
    ] = "float32",
    attention: Annotated[
        str, option("Compared settings", "generic, fused (overrides) or both.")
    ] = "",
    ops: Annotated[
        str, option("Compared settings", "generic, override or both, for all ops.")
    ] = "",
    compile: Annotated[
        str, option("Compared settings", "One or more of auto,none,inductor,openxla,xla.")
    ] = "auto",
    workers: Annotated[
        str, option("Compared settings", "Workers of an image loader, such as 0,2.")
    ] = "",
    batch_size: BatchSize = 8,
    sequence_length: SequenceLength = 512,
    image_size: ImageSize = None,
    num_classes: NumClasses = None,
    seed: Seed = 0,
    lora: Lora = None,
    rank: Rank = 4,
    optimizer: Annotated[str, option("Optimizer", "adamw or sgd.")] = "adamw",
    rounds: Annotated[int, option("Measurement", "Rounds of measurement.")] = 10,
    steps: Annotated[int, option("Measurement", "Steps of each setting per round.")] = 1,
    check_steps: Annotated[
        int, option("Measurement", "Number of first steps whose losses must agree.")
    ] = 3,
    threads: Annotated[int | None, option("Measurement", "Threads of each process.")] = None,
    together: Annotated[int, option("Measurement", "Largest number of processes at a time.")] = 16,
    limit: Limit = 900.0,
    python: Annotated[
        list[str] | None, option("Measurement", "NAME=PATH: Python of a backend or of openxla.")
    ] = None,
    largest_batch: Annotated[
        bool, option("Memory", "Also search for the largest batch.", "--largest-batch")
    ] = False,
    memory: Annotated[
        str | None, option("Memory", "Memory that a step may use, such as 8GiB.")
    ] = None,
    out: Annotated[
        Path | None, option("Output", "Directory or JSON file; default: runs/bench-<time>.")
    ] = None,
) -> None:
    """Train a model on each backend in turn; compare speed, memory and compile time."""
    import time

    from kmodels.core.errors import parse_bytes
    from kmodels.tools.compare_backends import bench as benches
    from kmodels.tools.compare_backends import report as reports

    if out is not None:
        check_output("--out", out, folder=out.suffix != ".json")
    if not {"rank", "sequence_length"}.isdisjoint(typed(context)):
        _adapts(context, preset, lora)
    if not largest_batch:
        refuse_idle(context, ("memory",), "without --largest-batch")
    options = _options(
        context,
        benches.BenchOptions,
        precisions=benches.listed(precision),
        compile=benches.listed(compile),
        attention=benches.listed(attention),
        ops=benches.listed(ops),
        workers=benches.numbers("workers", workers),
        memory=None if memory is None else parse_bytes(memory),
        python=tuple(python or ()),
    )
    try:
        result = shown(benches.run(options, console.plain(stderr=True)))
    except benches.Refused as error:
        for line in error.lines:
            print(f"kmodels: refused: {line}", file=sys.stderr)
        raise typer.Exit(2) from None
    reports.show(result, console.plain())
    for path in reports.write(result, out or Path(f"runs/bench-{time.strftime('%Y%m%d-%H%M%S')}")):
        print(path)
    if any(row["failed"] is not None for row in result["rows"]):
        raise typer.Exit(2)


@command()
def parity(
    context: typer.Context,
    preset: Annotated[
        str | None, typer.Argument(help="A registered name or a directory; none with --op.")
    ] = None,
    backends: Annotated[str, option("Sides", "Two of jax, torch, tensorflow.")] = "jax,torch",
    preset_b: Annotated[str | None, option("Sides", "Preset of the second side.")] = None,
    precision: Annotated[str, option("Sides", "One precision for both sides, or A,B.")] = "float32",
    ops: Annotated[str, option("Sides", "override or generic, or both as A,B.")] = "override",
    op: Annotated[
        str | None, option("Ops", "Compare an op's override with its generic body, by cases.")
    ] = None,
    override: Annotated[
        Path | None, option("Ops", "Python file with a kmodels.override, compared instead.")
    ] = None,
    batch_size: BatchSize = 2,
    sequence_length: SequenceLength = 16,
    image_size: ImageSize = None,
    num_classes: NumClasses = None,
    seed: Seed = 0,
    steps: Annotated[int, option("Measurement", "Training steps.")] = 3,
    tolerance: Annotated[
        float | None,
        option("Measurement", "Allowed difference, as a share of a tensor's largest value."),
    ] = None,
    limit: Limit = 900.0,
    out: Annotated[Path | None, option("Output", "Directory for parity.json.")] = None,
) -> None:
    """Train on two backends and name the first layer that differs (exit code 1), or check an op."""
    from kmodels.tools.compare_backends import parity as parities

    if out is not None:
        check_output("--out", out, folder=True)
    if op is not None or override is not None:
        if preset is not None:
            raise InputError("--op and --override compare ops without a model; leave PRESET out")
        refuse_idle(context, {*context.params} - {"op", "override", "out"}, "on ops")
        from kmodels.tools import op_parity

        _end_parity(shown(op_parity.run(op.split(",") if op else (), override)), out)
    if preset is None:
        raise InputError("parity needs a preset, or --op NAME")
    if "sequence_length" in typed(context):
        _adapts(context, preset)
    names, precisions, paths = (
        _pair(what, text)
        for what, text in (("backends", backends), ("precision", precision), ("ops", ops))
    )
    presets = (preset, preset_b or preset)
    left, right = map(parities.Side, names, presets, precisions, paths)
    options = _options(context, parities.ParityOptions, left=left, right=right)
    result = shown(parities.run(options))
    _end_parity(result, out)


def _end_parity(result: dict[str, Any], out: Path | None) -> NoReturn:
    """Prints and saves the result of a comparison, and ends with its exit code."""
    from kmodels.core.files import atomic_write
    from kmodels.runs.run_folder import json_text
    from kmodels.tools.compare_backends import report as reports

    reports.show(result, console.plain())
    if out is not None:
        text = json_text(result) + "\n"
        print(atomic_write(local_path(out) / "parity.json", lambda path: path.write_text(text)))
    raise typer.Exit(0 if result["equal"] else 1)


@command()
def report(
    folder: Annotated[Path, typer.Argument(help="Directory of a run, finished or not.")],
) -> None:
    """Write report.html, a page about a run; recipes write it when they end."""
    from kmodels.runs import report as reports

    print(reports.write(folder))


@command()
def compare(
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="RUN...", help="Directories of runs.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("compare.html"),
) -> None:
    """Compare runs on one page: results, different settings, curves, answers."""
    from kmodels.runs.compare import Comparison

    check_output("--out", out)
    comparison = Comparison(folders or [])
    comparison.show(console.plain(width=console.width(), highlight=False))
    print(comparison.write(out))


@command()
def convert(
    context: typer.Context,
    source: Annotated[str, typer.Argument(help="A directory or file with a model, or an adapter.")],
    destination: Annotated[Path, typer.Argument(help="File or directory to create or replace.")],
    to: Annotated[str, typer.Option(help="hf, timm, npz, gguf, onnx, ...: see docs/convert.md.")],
    dtype: Annotated[
        str | None,
        typer.Option(help="Dtype of the weights: float32, ...; for gguf q8_0, q6_k, q4_k_m, ..."),
    ] = None,
    adapter: Annotated[str | None, typer.Option(help="LoRA adapters to merge.")] = None,
    sequence_length: Annotated[
        int | None, typer.Option(help="Tokens per compared row of text; default: 32.")
    ] = None,
    text_only: Annotated[
        bool, typer.Option("--text-only", help="Leave out a checkpoint's vision tower.")
    ] = False,
    mmproj: Annotated[Path | None, typer.Option(help="GGUF file for the vision tower.")] = None,
    base: Annotated[
        str | None, typer.Option(help="With --to gguf-lora: the adapter's base.")
    ] = None,
    imatrix: Annotated[
        Path | None, typer.Option(help="With --to gguf: llama.cpp's importance matrix.")
    ] = None,
) -> None:
    """Export a model, run it in its own runtime, and exit with 1 if outputs differ."""
    from kmodels.tools import convert as converting

    try:
        converted = converting.convert(**context.params)
    except converting.Differs as error:
        print(f"kmodels: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    console.plain(soft_wrap=True).print(converted.line(), highlight=True)


def _pair(what: str, text: str) -> tuple[str, str]:
    """Returns one value for both sides, or one for each."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > 2 or (what == "backends" and len(parts) != 2):
        raise InputError(f"{what} is {text!r}; give two, separated by a comma")
    return parts[0], parts[-1]


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line; wrong settings and unknown flags give one line and exit code 2.

    The exit code is 141 if standard output was closed, and 74 if it cannot be written.
    """
    try:
        with checked_output():
            code = invoke(app, arguments, "kmodels")
    except InputError as error:
        print(f"kmodels: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = one_line(error)[:200].rstrip(".")
        print(f"kmodels: out of memory: {reason}; give smaller sizes", file=sys.stderr)
        raise SystemExit(2) from None
    raise SystemExit(code if isinstance(code, int) else 0)


OVERVIEW = f"""kmodels {__version__}: Keras 3 models at native speed on JAX, PyTorch and TensorFlow.

Train, resume or evaluate:
  kmodels vit --data folder:IMAGES        image classifier on a folder of images
  kmodels gemma --data LINES.jsonl        Gemma or Qwen 3 with LoRA
  kmodels probe --data folder:IMAGES      linear probe of a frozen backbone
  kmodels distill --data folder:IMAGES    knowledge distillation
  kmodels caption --data FOLDER           Gemma 3 on images with texts
  kmodels segment --data folder:DIR       semantic segmentation from masks
  kmodels detect --data coco:DIR          object detection from boxes
  kmodels zero-shot --data folder:IMAGES  CLIP or SigLIP on class names
  kmodels mae --data folder:IMAGES        masked autoencoder, without labels
  kmodels dino --data folder:IMAGES       self-distillation, without labels
  kmodels dpo --data PAIRS.jsonl          direct preference optimization
  kmodels prefer --method kto --data F    SimPO, ORPO, KTO and other losses
  kmodels grpo --reward FILE.py:function  policy gradients of your own rewards

Settings for --config:
  kmodels recipe vit_fine_tune        print a settings file, or list them
  kmodels vit --recipe list           published settings and their results

Use a model or the model of a run:
  kmodels predict RUN FILES           classes, masks or boxes of images
  kmodels generate RUN --prompts FILE             answer the prompts of a file
  kmodels chat MODEL                  chat in the terminal or through a pipe

Inspect models and machines:
  kmodels doctor                      backend, versions, devices, fast ops
  kmodels plan --preset vit_base_patch16_224      memory of a training step
  kmodels bench vit_small_patch16_224             speed of each backend
  kmodels parity vit_debug            first layer where two backends differ
  kmodels eval RUN DATA               images in folders, or prompts in .jsonl
  kmodels report RUN                  write the page of a run, report.html
  kmodels compare RUN1 RUN2           compare runs on one page, compare.html

Export models:
  kmodels convert RUN/model FILE.gguf --to gguf   for other packages

KERAS_BACKEND chooses the backend. Flags of a command: kmodels COMMAND --help
"""

if __name__ == "__main__":
    main()
