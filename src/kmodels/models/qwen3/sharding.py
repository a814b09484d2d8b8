"""The layout table of Qwen 3: what each dimension of its variables is."""

from kmodels.models.common.sharding import DECODER

LAYOUT = DECODER
