"""Settings of a generation_config.json, as transformers' `generate` follows them."""

from collections.abc import Mapping
from typing import Any

from kmodels.core.errors import InputError
from kmodels.generation.sampler import Sampler
from kmodels.generation.stop import check_strings

# The values that transformers takes where such a file samples and is silent.
DEFAULTS = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}
# Settings that do nothing in transformers at these values.
IDLE: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "penalty_alpha": (0.0,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "bad_words_ids": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "sequence_bias": ([], {}),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "guidance_scale": (1.0,),
    "num_return_sequences": (1,),
    "diversity_penalty": (0.0,),
    "token_healing": (False,),
    "constraints": ([],),
    "force_words_ids": ([],),
    "dola_layers": (),
    "max_time": (),
    "top_h": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "watermarking_config": (),
}
HONOURED = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
LENGTHS = ("max_length", "max_new_tokens")
# Every other setting of transformers 5.23: ids and texts that end a text are read; the rest changes
# no token, since it is about speed, memory, results that are returned, beams, or notes.
_OTHERS = {
    *("stop_strings", "eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id"),
    *("early_stopping", "length_penalty", "renormalize_logits", "remove_invalid_values"),
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "low_memory"),
    *("return_legacy_cache", "compile_config", "disable_compile", "continuous_batching_config"),
    *("prefill_chunk_size", "return_dict_in_generate", "output_attentions", "output_scores"),
    *("output_hidden_states", "output_logits", "use_mtp", "is_assistant", "speculation_type"),
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit"),
    *("assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight"),
    *("_from_model_config", "transformers_version"),
}
KNOWN = {*IDLE, *HONOURED, *LENGTHS, *_OTHERS}


def sampler_of(settings: Mapping[str, Any]) -> Sampler:
    """Returns the sampler of transformers' `generate` for the settings of such a file.

    Raises:
        InputError: names the settings that a `Sampler` has no counterpart for.
    """
    strange = [
        f"{name}={settings[name]!r}"
        for name, idle in IDLE.items()
        if settings.get(name) is not None and settings[name] not in idle
    ]
    if strange:
        raise InputError(
            f"generation_config.json asks for {', '.join(strange)}, which no Sampler does; give "
            "compile another sampler"
        )
    penalty = settings.get("repetition_penalty")
    if not settings.get("do_sample") or settings.get("temperature") == 0:
        return Sampler(temperature=0.0, repetition_penalty=penalty)
    named = {name: settings[name] for name in HONOURED if settings.get(name) is not None}
    values = {**DEFAULTS, **named}
    return Sampler(
        temperature=values["temperature"],
        top_k=values["top_k"] or None,
        top_p=values["top_p"],
        min_p=values.get("min_p"),
        repetition_penalty=penalty,
    )


def stop_strings_of(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the `stop_strings` of a generation_config.json, which end every text."""
    strings = settings.get("stop_strings")
    return () if strings is None else check_strings("stop_strings", strings)


def not_applied(settings: Mapping[str, Any]) -> str:
    """Returns the settings that `generate` ignores until `compile` selects them, as text."""
    wanted = HONOURED if settings.get("do_sample") else ("repetition_penalty",)
    names = [*wanted, *(name for name in (*LENGTHS, *IDLE) if settings.get(name))]
    return ", ".join(
        f"{name}={settings[name]}"
        for name in names
        if settings.get(name) is not None and settings[name] not in IDLE.get(name, ())
    )
