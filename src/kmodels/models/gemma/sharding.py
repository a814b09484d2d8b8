"""What the dimensions of a Gemma's variables are; `distribution.layout` makes places of it."""

from kmodels.models.common.sharding import DECODER

LAYOUT = DECODER
