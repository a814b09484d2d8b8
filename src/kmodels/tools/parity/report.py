"""The report of a comparison, as a table and a sentence."""

from typing import Any

from rich.console import Console
from rich.table import Table


def show(result: dict[str, Any], console: Console) -> None:
    """Prints a comparison.

    Args:
        result: result of `run`.
        console: to print to.
    """
    left, right = result["sides"]
    table = Table(title=f"kmodels parity: {left} and {right}", title_justify="left")
    for heading in ("step", "stage", "tensors", "most apart"):
        table.add_column(heading, justify="right" if heading in ("step", "tensors") else "left")
    table.add_column("of what is allowed", justify="right")
    former = 1
    for stage in result["stages"]:
        if stage["step"] != former:
            table.add_section()
            former = stage["step"]
        cells = [str(stage["step"]), stage["stage"], str(stage["count"]), stage["worst"]]
        table.add_row(*cells, f"{stage['apart']:.3g}")
    console.print(table)
    plain: dict[str, Any] = {"highlight": False, "soft_wrap": True, "markup": False}
    if result["dropout"]:
        console.print("with dropout the forward pass without it is all that is compared", **plain)
    if (first := result["first"]) is None:
        console.print(f"equal in {result['steps']} steps, to {result['tolerance']:g}", **plain)
        return
    console.print(
        f"they part in step {first['step']}, {first['stage']}, at {first['text']}", **plain
    )
    for line in first["weights"]:
        console.print(f"before that step already: {line}", **plain)
