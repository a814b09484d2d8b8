"""What the dimensions of a Qwen 3's variables are; `distribution.layout` makes places of it."""

from kmodels.models.common.sharding import DECODER

LAYOUT = DECODER
