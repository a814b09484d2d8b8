"""`kmodels convert`: files for other packages and runtimes, each compared with the model."""

from kmodels.tools.convert.formats import FORMATS, ExportFormat, Runtime, table
from kmodels.tools.convert.run import Converted, Differs, convert

__all__ = ["FORMATS", "Converted", "Differs", "ExportFormat", "Runtime", "convert", "table"]
