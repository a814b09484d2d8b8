"""The plan in force, which whatever feeds, saves or places something asks for."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kmodels.distribution.plan import ParallelPlan

_current: "ParallelPlan | None" = None


def current() -> "ParallelPlan | None":
    """Returns the plan in force, or None on one device."""
    return _current


def set_current(plan: "ParallelPlan | None") -> None:
    """Puts a plan in force, or takes it back; `distribute` calls it."""
    global _current
    _current = plan
