"""report.html: one page that shows a run, from the files in its folder alone."""

from kmodels.report.page import NAME, write

__all__ = ["NAME", "write"]
