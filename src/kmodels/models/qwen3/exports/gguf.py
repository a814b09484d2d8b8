"""The settings of a dense Qwen 3 in a GGUF file."""

from kmodels.models.common.gguf.writing import GGUFExport, GGUFForm, Setting, settings
from kmodels.models.qwen3.config import Qwen3Config
from kmodels.models.qwen3.weights import gguf as weights_gguf
from kmodels.text.gguf import BYTES

# As the published models say it (`max_position_embeddings`); the config of a model does not.
CONTEXT = 40_960


def form(config: Qwen3Config) -> GGUFForm:
    """Returns a Qwen 3 as its file says it."""
    yarn = config.rope_yarn or {}
    absent = {
        **{f"{name} of YaRN": name in yarn for name in ("attention_factor", "truncate")},
        "attention_bias": config.attention_bias,
        "sliding_window_size": config.sliding_window_size,
    }
    rope = (config.rope_max_wavelength, config.rope_scaling_factor)
    return GGUFForm(
        architecture=weights_gguf.ARCHITECTURE,
        settings={
            "context_length": CONTEXT,
            **settings(config, config.head_dim, *rope),
            **_yarn(config),
        },
        vocabulary=BYTES,
        absent=[name for name, there in absent.items() if there],
    )


def _yarn(config: Qwen3Config) -> dict[str, Setting]:
    if config.yarn is None:
        return {}
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(config.yarn.factor),
        "rope.scaling.original_context_length": int(config.yarn.original_max_position_embeddings),
        "rope.scaling.yarn_beta_fast": float(config.yarn.beta_fast),
        "rope.scaling.yarn_beta_slow": float(config.yarn.beta_slow),
    }


EXPORT = GGUFExport(weights_gguf.FORMAT, form)
