"""The settings of a dense Qwen 3 in a GGUF file."""

from kmodels.models.common.gguf.writing import (
    GGUFExport,
    GGUFForm,
    settings,
    without_place_in_yarn,
    yarn_settings,
)
from kmodels.models.qwen3.config import Qwen3Config
from kmodels.models.qwen3.weights import gguf as weights_gguf
from kmodels.text.gguf import BYTES

# As the published models say it (`max_position_embeddings`); the config of a model does not.
CONTEXT = 40_960


def form(config: Qwen3Config) -> GGUFForm:
    """Returns a Qwen 3 as its file says it."""
    absent = {
        **without_place_in_yarn(config.rope_yarn),
        "attention_bias": config.attention_bias,
        "sliding_window_size": config.sliding_window_size,
    }
    rope = (config.rope_max_wavelength, config.rope_scaling_factor)
    return GGUFForm(
        architecture=weights_gguf.ARCHITECTURE,
        settings={
            "context_length": CONTEXT,
            **settings(config, config.head_dim, *rope),
            **yarn_settings(config.yarn),
        },
        vocabulary=BYTES,
        absent=[name for name, there in absent.items() if there],
    )


EXPORT = GGUFExport(weights_gguf.FORMAT, form)
