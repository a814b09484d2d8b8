"""Templates and numbers of pages; a page needs no other file and no network to be looked at."""

import math
from datetime import datetime
from pathlib import Path
from typing import Any

from kmodels.core.files import atomic_write
from kmodels.runs import console


def write(template: str, path: Path, content: dict[str, Any]) -> Path:
    """Fills a template and writes the page, replaced as a whole.

    Args:
        template: a file of this folder.
        path: of the page.
        content: what the template shows.
    """
    # Takes 50 ms, and only runs that end need it.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    page = Environment(
        loader=PackageLoader("kmodels.runs.page", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    names = {"time": console.seconds}
    filters = (number, metric, share, date, breakable)
    page.filters |= names | {written.__name__: written for written in filters}
    text = page.get_template(template).render(content)
    return atomic_write(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def number(value: object) -> str:
    """Returns a value as people read it: thousands apart, four digits of a fraction."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, float) or not math.isfinite(value):
        return str(value)
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"


def metric(value: object) -> str:
    """Returns a loss or a metric as the terminal shows it, with four digits."""
    if value is None:
        return "–"
    return f"{value:,.4f}" if isinstance(value, int | float) else str(value)


def breakable(name: str) -> Any:
    """Returns a name that may be broken after its underscores, for narrow columns."""
    from markupsafe import Markup, escape

    return Markup("_<wbr>").join(escape(part) for part in name.split("_"))


def date(value: datetime) -> str:
    """Returns a moment as people read it: "23 November 2026, 14:46"."""
    return f"{value.day} {value:%B %Y, %H:%M}"


def share(value: float) -> str:
    """Returns a share in per cent, with as many digits as tell something."""
    return f"{100 * value:.0f}%" if 0.01 <= value <= 0.99 or value in (0, 1) else f"{value:.1%}"
