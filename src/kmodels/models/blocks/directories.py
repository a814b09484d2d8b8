"""Directories of Hugging Face: whose they are, and settings that change nothing here."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kmodels.core.schema import CONFIG, warn_of_unknown
from kmodels.weights import LazyArray, read_safetensors

# Settings of transformers' config.json that no model computes with: of Python, of training, of
# labels, of the outputs.
IDLE_IN_CONFIGS = {
    *("_attn_implementation", "_name_or_path", "architectures", "attn_implementation", "auto_map"),
    *("chunk_size_feed_forward", "dtype", "id2label", "is_encoder_decoder", "label2id"),
    *("output_attentions", "output_hidden_states", "problem_type", "return_dict"),
    *("tokenizer_class", "torch_dtype", "transformers_version"),
}
# The same of encoders of images and texts: about how they are trained, and which of their features
# a backbone of transformers returns.
_IDLE_IN_ENCODERS = {
    *("encoder_stride", "initializer_factor", "initializer_range", "pooler_output_size"),
    *("apply_layernorm", "out_features", "out_indices", "reshape_hidden_states", "stage_names"),
    *("pos_embed_jitter", "pos_embed_rescale", "pos_embed_shift", "class_weight", "dice_weight"),
    *("mask_weight", "importance_sample_ratio", "oversample_ratio", "train_num_points"),
    *("no_object_weight", "projection_size", "text_config", "vision_config"),
}
# Further settings of vision encoders beside a decoder, which are read.
_BESIDE_DECODERS = {
    *("mm_embed_dim", "mm_posemb_size", "output_proj_dims", "standardize", "use_clipped_linears"),
}


@dataclass(frozen=True)
class HuggingFaceDirectory:
    """Directories whose config.json has a `model_type` of `kinds`, for `Family.formats`."""

    kinds: Collection[str]

    def matches(self, path: Path, description: dict[str, Any]) -> bool:
        """Returns True for a directory with a config.json of these kinds."""
        return path.is_dir() and description.get("model_type") in self.kinds


class EncoderDirectory(HuggingFaceDirectory):
    """`HuggingFaceDirectory` of encoders of images, texts or both."""

    @staticmethod
    def tensors(path: Path, description: Mapping[str, Any], weights: bool) -> dict[str, LazyArray]:
        """Opens the tensors, and logs a warning with the settings that are not known.

        Without `weights` there is nothing to open, and no warning.
        """
        if not weights:
            return {}
        warn_of_encoder(path, description)
        return dict(read_safetensors(path))


def warn_of_encoder(path: Path, description: Mapping[str, Any]) -> None:
    """Logs a warning with the unknown settings of an encoder's config.json, or of two in one."""
    inner = (description.get(name) or {} for name in ("text_config", "vision_config"))
    settings = {name: value for part in (*inner, description) for name, value in part.items()}
    warn_of_unknown(
        path / "config.json",
        settings,
        CONFIG.keys() | IDLE_IN_CONFIGS | _IDLE_IN_ENCODERS | _BESIDE_DECODERS,
    )
