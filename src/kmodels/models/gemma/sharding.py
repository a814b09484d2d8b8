"""The layout table of Gemma: what each dimension of its variables is."""

from kmodels.models.common.sharding import DECODER

LAYOUT = DECODER
