"""The `kmodels` command."""

import json
import sys
from typing import Annotated

import typer

from kmodels.errors import InputError

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
            print(f"kmodels: {' '.join(message.split())}", file=sys.stderr)
        raise SystemExit(getattr(error, "exit_code", 2)) from None
    raise SystemExit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
