"""The layout table of CLIP's text tower: what each dimension of its variables is."""

from kmodels.models.common.sharding import TEXT_ENCODER

LAYOUT = TEXT_ENCODER
