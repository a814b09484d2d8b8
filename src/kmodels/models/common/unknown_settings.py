"""Settings in the JSON files of other programs that kmodels does not know are warned of by name."""

import logging
from collections.abc import Collection, Mapping
from pathlib import Path

log = logging.getLogger("kmodels")

# What each config.json of transformers may hold and no model computes with: of Python, of training,
# of labels, of what is returned.
IDLE_IN_CONFIGS = {
    *("_attn_implementation", "_name_or_path", "architectures", "attn_implementation", "auto_map"),
    *("chunk_size_feed_forward", "dtype", "id2label", "is_encoder_decoder", "label2id"),
    *("output_attentions", "output_hidden_states", "problem_type", "return_dict"),
    *("tokenizer_class", "torch_dtype", "transformers_version"),
}


def warn_of_unknown(file: Path, settings: Mapping[str, object], known: Collection[str]) -> None:
    """Logs a warning with the names of settings that are not known; nothing is logged for null.

    Args:
        file: path of the file, for the message.
        settings: settings of the file.
        known: names of those that are read, and of those that change nothing.
    """
    unknown = [name for name in settings if name not in known and settings[name] is not None]
    if unknown:
        log.warning(
            "%s sets %s, which kmodels does not know and does not follow",
            file,
            ", ".join(sorted(unknown)),
        )
