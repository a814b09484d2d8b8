"""A decoder of keras-hub with its vision encoder beside ours: the pair of the text, and more."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kmodels.models.common.image_text.huggingface import below
from kmodels.models.common.keras_hub_mapping import EncoderMapping, KerasHubMapping, Settings

ENCODER = "vision_encoder"


def with_images(
    text: KerasHubMapping, ours: type, our_task: type, encoder: EncoderMapping
) -> KerasHubMapping:
    """Returns the pair of a decoder with its vision encoder.

    Args:
        text: pair of the decoder alone.
        ours: class of the backbone here, whose config has `encoder()` and `image_token_id`.
        our_task: class of the task here.
        encoder: pair of the encoder.
    """

    def fields(given: Settings) -> dict[str, Any]:
        held = given[ENCODER]["config"]
        found = encoder.fields(held)
        if (dtype := _policy(held)) != _policy(given):
            found["dtype"] = dtype
        return {**text.fields(given), ENCODER: found}

    def unsupported_in(given: Settings, task: Settings) -> list[str]:
        window = given["sliding_window_size"] if given["use_sliding_window_attention"] else None
        lacks = encoder.lacking(given[ENCODER]["config"], window)
        return [*text.unsupported_in(given, task), *lacks]

    def unsupported_out(config: Any, settings: Settings) -> list[str]:
        local = any(config.is_local(i) for i in range(config.num_layers))
        lacks = encoder.lacking(
            config.encoder().get_config(), config.sliding_window_size if local else None
        )
        return [*text.unsupported_out(config, settings), *lacks]

    return replace(
        text,
        ours=ours,
        our_task=our_task,
        fields=fields,
        unsupported_in=unsupported_in,
        unsupported_out=unsupported_out,
        arguments=lambda config: {
            **text.arguments(config),
            "image_size": config.image_shape[0],
        },
        table=lambda config: [
            *text.table(config),
            *below(ENCODER, encoder.table(config.encoder())),
        ],
        belongs=lambda config, settings: True,
        ignored=(),
        part=ENCODER,
        make_part=lambda config: _with_dtype(config, encoder.arguments(config.encoder())),
        from_tokenizer=_image_token,
    )


def _policy(given: Settings) -> str:
    """Returns the name of the policy in a config of keras-hub."""
    held = given["dtype"]
    return held["config"]["name"] if isinstance(held, Mapping) else str(held)


def _with_dtype(config: Any, made: tuple[str, dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Returns the same with the encoder's dtype, where it has one of its own."""
    name, arguments = made
    own = {"dtype": config.vision_encoder["dtype"]} if "dtype" in config.vision_encoder else {}
    return name, {**arguments, **own}


def _image_token(tokenizer: Any) -> dict[str, Any]:
    number = getattr(tokenizer, "image_placeholder_id", None)
    return {} if number is None else {"image_token_id": int(number)}
