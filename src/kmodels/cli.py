"""The `kmodels` command."""

import itertools
import json
import sys
from typing import Annotated

import typer

from kmodels.errors import InputError, check_whole

app = typer.Typer(
    name="kmodels",
    help="Keras 3 models at native speed on JAX, PyTorch and TensorFlow.",
    add_completion=False,
    rich_markup_mode=None,
)


@app.callback()
def _commands() -> None:
    """Keras 3 models at native speed on JAX, PyTorch and TensorFlow."""


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show backend, versions, devices, precision, and which ops run an override, or why not."""
    from kmodels import doctor as checks

    found = checks.report()
    if as_json:
        print(json.dumps(found, indent=1))
        return
    from rich.console import Console

    checks.show(found, Console())


@app.command()
def plan(
    preset: Annotated[str, typer.Option(help="A registered name or a directory.")],
    batch_size: Annotated[int, typer.Option(help="Rows of a step.")] = 8,
    sequence_length: Annotated[int, typer.Option(help="Tokens of a row of text.")] = 512,
    image_size: Annotated[int | None, typer.Option(help="Height and width in pixels.")] = None,
    num_classes: Annotated[int | None, typer.Option(help="Of a classifier.")] = None,
    precision: Annotated[str, typer.Option(help="float32, bfloat16 or mixed_*.")] = "float32",
    lora: Annotated[
        bool | None, typer.Option("--lora/--full", help="Adapters or all weights.")
    ] = None,
    rank: Annotated[int, typer.Option(help="Of the adapters.")] = 4,
    targets: Annotated[str, typer.Option(help="Layers that get adapters.")] = "query,value",
    dora: Annotated[bool, typer.Option(help="Weight-decomposed adapters.")] = False,
    quantize: Annotated[str | None, typer.Option(help="int8 or int4 for frozen kernels.")] = None,
    remat: Annotated[str, typer.Option(help="none, block, attention or mlp.")] = "none",
    optimizer: Annotated[str, typer.Option(help="adamw, adam, lion, momentum or sgd.")] = "adamw",
    accumulate: Annotated[int, typer.Option(help="Batches of an update.")] = 1,
    generate: Annotated[int, typer.Option(help="Tokens that generate keeps per row.")] = 0,
    memory: Annotated[str | None, typer.Option(help="What there is, such as 80GiB.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show what memory a training step needs, whether it fits, and what lowers it."""
    from kmodels import plan as plans
    from kmodels.lora import LoraSettings
    from kmodels.presets import family_of

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
        ),
        image_size=image_size,
        overrides={} if num_classes is None else {"num_classes": num_classes},
        available=None if memory is None else plans.parse_bytes(memory),
    )
    if as_json:
        print(json.dumps(found.to_dict(generate), indent=1))
        return
    from rich.console import Console

    plans.show(found, Console(), generate)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line; wrong settings and unknown flags give one line and exit code 2."""
    command = typer.main.get_command(app)
    try:
        code = command.main(args=arguments, prog_name="kmodels", standalone_mode=False)
    except InputError as error:
        print(f"kmodels: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except Exception as error:
        # Click's usage errors carry their message and code; anything else is a bug and stays one.
        if not hasattr(error, "format_message"):
            raise
        message = getattr(error, "format_message")()  # noqa: B009
        if message:
            message += _given(error, sys.argv[1:] if arguments is None else arguments)
            print(f"kmodels: {' '.join(message.split())}", file=sys.stderr)
        raise SystemExit(getattr(error, "exit_code", 2)) from None
    raise SystemExit(code if isinstance(code, int) else 0)


def _given(error: Exception, arguments: list[str]) -> str:
    """The value that an error is about, which Click's message may leave out."""
    names = getattr(getattr(error, "param", None), "opts", ())
    for argument, following in itertools.pairwise([*arguments, ""]):
        name, equals, value = argument.partition("=")
        if name in names:
            return f"; given was {(value if equals else following)!r}"
    return ""


if __name__ == "__main__":
    main()
