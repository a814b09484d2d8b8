"""A plan as tables."""

from rich.console import Console
from rich.table import Table

from kmodels.core.units import human
from kmodels.memory.sizes import ACTIVATIONS, FROZEN, GATHERED, PARTS, TRAINED
from kmodels.tools.plan.step import Plan
from kmodels.tools.plan.traffic import FORMULAS


def show(plan: Plan, console: Console, slots: int = 0) -> None:
    """Prints what a device holds and sends, and what lowers it."""
    estimate, many = plan.estimate, plan.mesh.size > 1
    title = f"kmodels plan: {plan.origin}" + (f" on {plan.mesh}, each device" if many else "")
    table = Table("part", "bytes", "", title=title, title_justify="left")
    table.columns[1].justify = "right"
    blocks = list(estimate.blocks.values())
    notes = {name: f"{plan.parameters(name):,} parameters" for name in (FROZEN, TRAINED)}
    if many:
        notes = {name: f"of {note}" for name, note in notes.items()}
    if blocks:
        notes[ACTIVATIONS] = f"up to {human(max(blocks))} in a block"
    for name in PARTS:
        if estimate.part(name) or name != GATHERED:
            table.add_row(name, human(estimate.part(name)), notes.get(name, ""))
    table.add_row("overhead", human(estimate.overhead), "allocator, scheduler and compiler")
    table.add_section()
    if plan.active_parameters < plan.parameters(FROZEN) + plan.parameters(TRAINED):
        table.add_row(
            "of a token", "", f"{plan.active_parameters:,} parameters, without idle experts"
        )
    table.add_row("peak of a step", human(plan.bytes), "activations and gradients take turns")
    if plan.available is not None:
        table.add_row("available", human(plan.available), "it fits" if plan.fits else "too little")
    if slots:
        table.add_row("cache of generate", human(plan.cache_bytes(slots)), f"{slots} tokens a row")
    console.print(table)
    if plan.exchanges:
        console.print(_sent(plan))
    if found := plan.savings():
        saved = Table("flag", "saves", title="what lowers the peak", title_justify="left")
        for saving in found:
            saved.add_row(saving.flag, human(saving.bytes))
        console.print(saved)


def _sent(plan: Plan) -> Table:
    table = Table(
        *("axis", "n", "collective", "of", "S", "sent"),
        title="what each device sends in a step",
        caption="\n".join(_sources(plan)),
        title_justify="left",
        caption_justify="left",
    )
    for number in (1, 4, 5):
        table.columns[number].justify = "right"
    for one in plan.exchanges:
        whole, sent = human(one.size), human(one.bytes)
        table.add_row(one.axis, str(one.devices), one.kind, one.what, whole, sent)
    return table


def _sources(plan: Plan) -> list[str]:
    """Returns the formulas of the collectives, and where it is said which arrays move."""
    kinds = {one.kind for one in plan.exchanges}
    found = [f"{kind} sends {formula}" for kind, formula in FORMULAS.items() if kind in kinds]
    sources = dict.fromkeys(one.source for one in plan.exchanges)
    return [f"{'; '.join(found)} on a ring of n devices", *(f"after {name}" for name in sources)]
