"""`chat`, for tasks whose preprocessor writes chats."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kmodels.core.errors import InputError, check_whole
from kmodels.generation.drafts import ASSISTANT_TOKENS
from kmodels.generation.request import GenerateRequest
from kmodels.text.chat_template import Tool, as_chats, is_chat
from kmodels.weights import gather

# As many as transformers' pipeline and its `transformers chat` add where nobody says.
NEW_TOKENS = 256


class Chats:
    """Adds `chat` to a task that generates."""

    backbone: Any
    preprocessor: Any
    generator: Any
    _continue: Callable[..., Any]
    _stop_strings: Callable[..., Any]

    def chat(
        self,
        messages: Sequence[Any],
        tools: Sequence[Tool] | None = None,
        *,
        chat_template: str | None = None,
        max_new_tokens: int = NEW_TOKENS,
        stop_token_ids: Collection[int] | str | None = "auto",
        stream: Callable[[int, str], None] | None = None,
        num_return_sequences: int = 1,
        assistant: object = None,
        num_assistant_tokens: int = ASSISTANT_TOKENS,
        prompt_lookup_num_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        seed: int | None = None,
        stop: str | Collection[str] | None = None,
        **values: Any,
    ) -> Any:
        """Answers a chat, as the checkpoint's own template has it written.

        The template is the tokenizer's, or the family's chat format where it has none; the ids of
        the prompt are those of transformers' `apply_chat_template`. Tokens are drawn as
        `compile(sampler=...)` says.

        Args:
            messages: {"role", "content"} of each message, or a list of such lists. Roles and what
                else a message may hold are the template's matter; a last message of the role
                "assistant" is continued.
            tools: functions that the model may call, for templates that know them: their JSON
                schemas, or Python functions with annotations and Google docstrings, which
                transformers reads.
            chat_template: another template in Jinja's language, or the name of one of several.
            max_new_tokens: of a reply.
            stop_token_ids: end a reply; "auto" for the tokenizer's and the end of a turn.
            stream: called as tokens come, with the chat's number and its new piece of text.
            num_return_sequences: replies to each chat, one behind the other.
            assistant: drafts tokens that this model checks, see `generate`.
            num_assistant_tokens: number of tokens of each of its drafts.
            prompt_lookup_num_tokens: as of `generate`.
            temperature: 0 for the most likely token, else what logits are divided by. This and the
                five settings that follow hold for this call; None keeps the sampler's.
            top_k: keeps the k most likely tokens.
            top_p: keeps the fewest most likely tokens whose probabilities reach p.
            min_p: keeps tokens with at least p times the probability of the most likely one.
            repetition_penalty: divides positive, multiplies negative logits of tokens in the row.
            seed: random seed of the draws of this call.
            stop: string or strings that end a reply; neither the text nor `stream` has any of it.
                Token ids keep the token that completes it. None for the `stop_strings` of
                generation_config.json, where `stop_token_ids` is "auto"; () for none.
            **values: further variables of the template, such as enable_thinking or documents.

        Returns:
            The reply as text, without the prompt; a list of texts for several chats or replies. To
            go on, append {"role": "assistant", "content": reply} and the next message.

        Raises:
            InputError: for what is no chat, a tokenizer without a template, a chat that its
                template refuses, a variable that the template does not have, or an assistant that
                `generate` refuses.
        """
        if not is_chat(messages):
            raise InputError(
                'chat takes a list of messages, each {"role": ..., "content": ...}, or a list of '
                "such lists; generate takes texts"
            )
        check_whole("max_new_tokens", max_new_tokens)
        request = GenerateRequest(
            sampler=self.generator.sampler.changed(
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                repetition_penalty=repetition_penalty,
                seed=seed,
            ),
            stop_token_ids=stop_token_ids,
            stop=stop,
            strip_prompt=True,
            stream=stream,
            max_new_tokens=max_new_tokens,
            num_return_sequences=num_return_sequences,
            drafts={
                "assistant": assistant,
                "num_assistant_tokens": num_assistant_tokens,
                "prompt_lookup_num_tokens": prompt_lookup_num_tokens,
            },
        )
        gather.check_callable(self, "chat")
        values |= {"tools": tools, "chat_template": chat_template}
        prompts = chat_prompts(self.preprocessor, messages, **values)
        if isinstance(stop_token_ids, str) and stop_token_ids == "auto":
            ends = self.preprocessor.chat_stop_token_ids
            request = replace(request, stop_token_ids=ends, stop=self._stop_strings(request))
        return self._continue(prompts, request)


def chat_prompts(preprocessor: Any, messages: Sequence[Any], **options: Any) -> dict[str, Any]:
    """Returns the inputs of a model for chats, as `generate_preprocess` does, but never cut.

    Args:
        preprocessor: with `chat_examples`.
        messages: of one chat, or of several.
        **options: of its `chat_token_ids`.

    Raises:
        InputError: where the preprocessor is none that writes chats, or a chat is refused.
    """
    if not hasattr(preprocessor, "chat_examples"):
        raise InputError(
            "a chat needs a preprocessor, whose tokenizer writes it; attach one, or give generate "
            "token ids"
        )
    chats, is_batch = as_chats(messages)
    found = preprocessor.prompt_inputs(preprocessor.chat_examples(chats, **options))
    return found if is_batch else {name: value[0] for name, value in found.items()}


def pad_rows(rows: list[list[int]], length: int, pad: int) -> dict[str, np.ndarray]:
    """Returns rows of token ids padded behind to one length, and their mask, (B, length) int32."""
    ids = np.full((len(rows), length), pad, "int32")
    mask = np.zeros((len(rows), length), "int32")
    for i, row in enumerate(rows):
        ids[i, : len(row)], mask[i, : len(row)] = row, 1
    return {"token_ids": ids, "padding_mask": mask}
