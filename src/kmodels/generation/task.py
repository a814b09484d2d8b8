"""`generate` and `chat`, for tasks whose backbone can be extended token by token."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Self

import keras
import numpy as np
from keras import ops

from kmodels.core.arguments import Checked
from kmodels.core.errors import InputError, check_whole
from kmodels.core.types import Data, Tensor
from kmodels.generation.cache import ring_shapes
from kmodels.generation.drafts import (
    ASSISTANT_TOKENS,
    DraftCounts,
    Drafter,
    continue_with_drafts,
    drafter_of,
)
from kmodels.generation.generate import (
    check_memory,
    check_prompts,
    continue_by_beams,
    continue_prompts,
)
from kmodels.generation.generation_config import stop_strings_of
from kmodels.generation.request import (
    GenerateRequest,
    batches,
    chat_prompts,
    ids_and_mask,
    images_of,
    is_data,
    is_empty,
    is_raw,
    joined,
    pad_rows,
    repeated,
    token_inputs,
)
from kmodels.generation.sampler import Sampler
from kmodels.generation.samplers import BeamSampler, ContrastiveSampler, get, serialize
from kmodels.generation.stop import Stop, Streamer, check_strings, ended
from kmodels.text.chat_template import Tool, is_chat
from kmodels.weights import gather

log = logging.getLogger("kmodels")
# As many as transformers' pipeline and its `transformers chat` add where nobody says.
NEW_TOKENS = 256


class Generates(Checked):
    """Adds `generate` and `chat`; `compile(sampler=...)` chooses how tokens are drawn."""

    backbone: Any
    preprocessor: Any

    def use_sampler(
        self, sampler: str | Mapping[str, Any] | Sampler, jit_compile: bool | str = "auto"
    ) -> None:
        """Draws tokens this way from now on.

        Args:
            sampler: "greedy", "random", "top_k", "top_p", "beam", "contrastive", or a
                `kmodels.generation.Sampler`, also as its config.
            jit_compile: whether torch compiles the token step; "auto" for on accelerators only. The
                other backends always compile it.

        Raises:
            InputError: for an unknown name.
        """
        self.generator = _Generator(get(sampler), jit_compile)

    @property
    def sampler(self) -> Sampler:
        """The sampler of `generate`; setting it calls `use_sampler`."""
        return self.generator.sampler

    @sampler.setter
    def sampler(self, sampler: str | Sampler) -> None:
        self.use_sampler(sampler)

    def get_config(self) -> dict[str, Any]:
        """Returns the task's own, and how tokens are drawn.

        The arguments of `compile` would be the place, but in a clone they go to a plain model.
        """
        return {**super().get_config(), "sampler": serialize(self.generator.sampler)}  # type: ignore[misc]

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> Self:
        """Returns the task of `get_config`."""
        config = dict(config)
        sampler = config.pop("sampler", None)
        task = super().from_config(config, custom_objects)  # type: ignore[misc]
        if sampler is not None:
            task.use_sampler(sampler)
        return task

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Calls `compile` with the result of `get_compile_config`; the sampler stays."""
        sampler = serialize(self.generator.sampler)
        super().compile_from_config({"sampler": sampler, **config})  # type: ignore[misc]

    def generate(
        self,
        inputs: Data,
        max_length: int | None = None,
        stop_token_ids: Collection[int] | str | None = "auto",
        strip_prompt: bool = False,
        stream: Callable[[int, Any], None] | None = None,
        max_new_tokens: int | None = None,
        num_return_sequences: int = 1,
        *,
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
    ) -> Any:
        """Continues prompts; names and results as in keras-hub.

        Prompts may have different lengths. Lengths are rounded up to a few sizes, so that one
        compiled step serves many prompts.

        Args:
            inputs: input of the preprocessor, such as a text or a list of texts; a chat, a list
                of messages with "role" and "content", or a list of chats, see `chat`; token ids
                (B, T), alone or in {"token_ids", "padding_mask"} with padding on either side; or a
                tf.data data set or another iterable of batches of one of them.
            max_length: length of prompt and continuation together; the preprocessor's
                `sequence_length`, or T, by default.
            stop_token_ids: end a row; "auto" asks the tokenizer, None continues to `max_length`.
            strip_prompt: gives the continuation only: of a chat the reply.
            stream: called as tokens come, with the row's number and its new piece of text (without
                a preprocessor: the token's id).
            max_new_tokens: largest number of new tokens of each continuation, in place of
                `max_length`.
            num_return_sequences: texts for each prompt, one behind the other.
            assistant: smaller model with the same vocabulary, which drafts tokens that this one
                checks in one pass; the tokens are those without it. `draft_counts` has the passes.
            num_assistant_tokens: number of tokens of each draft.
            prompt_lookup_num_tokens: number of tokens of drafts that are copied from an earlier
                occurrence of the last tokens, in place of an assistant.
            temperature: 0 for the most likely token, else the divisor of the logits. This and the
                five settings that follow hold for this call; None keeps the sampler's.
            top_k: keeps the k most likely tokens.
            top_p: keeps the fewest most likely tokens whose probabilities reach p.
            min_p: keeps tokens with at least p times the probability of the most likely one.
            repetition_penalty: divides positive, multiplies negative logits of tokens in the row.
            seed: random seed of the draws of this call.
            stop: string or strings that end a row; neither the text nor `stream` has any of it.
                Token ids keep the token that completes it. None for the `stop_strings` of
                generation_config.json, if `stop_token_ids` is "auto"; () for none.

        Returns:
            Texts, or for token ids {"token_ids", "padding_mask"} as NumPy arrays (B, max_length);
            the mask covers prompts and continuations, stop tokens included.

        Raises:
            InputError: for "auto" without a preprocessor, a prompt without tokens, a length below
                1, two lengths, more texts than beams, a chat that its template refuses or that
                leaves no room for a reply, a sampler without these settings, an assistant of
                another vocabulary or combined with beams or contrastive search, a KV cache that
                exceeds the free memory, or on torch a sharded model.
        """
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
            strip_prompt=strip_prompt,
            stream=stream,
            max_length=max_length,
            max_new_tokens=max_new_tokens,
            num_return_sequences=num_return_sequences,
            assistant=assistant,
            num_assistant_tokens=num_assistant_tokens,
            prompt_lookup_num_tokens=prompt_lookup_num_tokens,
        )
        gather.check_callable(self, "generate")
        if is_data(inputs):
            return joined([self._generate(x, request) for x in batches(inputs)])
        return self._generate(inputs, request)

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

        The template is the tokenizer's, or the family's chat format if it has none; the ids of the
        prompt are those of transformers' `apply_chat_template`. Tokens are drawn as
        `compile(sampler=...)` says.

        Args:
            messages: {"role", "content"} of each message, or a list of such lists. Roles and other
                fields depend on the template; a last message of the role "assistant" is continued.
            tools: functions that the model may call, for templates that know them: their JSON
                schemas, or Python functions with annotations and Google docstrings, which
                transformers reads.
            chat_template: another template in Jinja's language, or the name of one of several.
            max_new_tokens: largest number of new tokens of a reply.
            stop_token_ids: end a reply; "auto" for the tokenizer's and the end of a turn.
            stream: called as tokens come, with the chat's number and its new piece of text.
            num_return_sequences: replies to each chat, one behind the other.
            assistant: drafts tokens that this model checks; like all that follow as in `generate`.
            num_assistant_tokens: number of tokens of each draft.
            prompt_lookup_num_tokens: number of tokens of drafts that are copied from the text.
            temperature: 0 for the most likely token, else the divisor of the logits.
            top_k: keeps the k most likely tokens.
            top_p: keeps the fewest most likely tokens whose probabilities reach p.
            min_p: keeps tokens with at least p times the probability of the most likely one.
            repetition_penalty: divides positive, multiplies negative logits of tokens in the row.
            seed: random seed of the draws of this call.
            stop: string or strings that end a reply.
            **values: further variables of the template, such as enable_thinking or documents.

        Returns:
            The reply as text, without the prompt; a list of texts for several chats or replies. To
            go on, append {"role": "assistant", "content": reply} and the next message.

        Raises:
            InputError: if messages are not a chat, the tokenizer has no template, the template
                refuses the chat or lacks a variable, or `generate` refuses the assistant.
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
            assistant=assistant,
            num_assistant_tokens=num_assistant_tokens,
            prompt_lookup_num_tokens=prompt_lookup_num_tokens,
        )
        gather.check_callable(self, "chat")
        values |= {"tools": tools, "chat_template": chat_template}
        prompts = chat_prompts(self.preprocessor, messages, **values)
        return self._continue(prompts, request, chat=True)

    def _generate(self, inputs: Data, request: GenerateRequest) -> Any:
        """Continues one batch, see `generate`."""
        if is_raw(inputs):
            by_name = token_inputs(inputs, self.backbone.takes)
            return self._continue(by_name, request, raw=True)
        if self.preprocessor is None:
            raise InputError(
                'generate got no token ids and the model has no preprocessor; give {"token_ids", '
                '"padding_mask"} or attach one'
            )
        if is_empty(inputs):
            return []
        if (length := request.max_length) is not None:
            # Before texts are padded to this length, by ids and masks that take memory too.
            shapes = [*ring_shapes(self.backbone, 1, length), (8, length)]
            check_memory(shapes, self.backbone.compute_dtype, 1, length)
        chat = is_chat(inputs)
        if chat and request.max_new_tokens is not None:
            prompts = chat_prompts(self.preprocessor, inputs)
        else:
            preprocess, length = self.preprocessor.generate_preprocess, request.max_length
            prompts = preprocess(inputs, sequence_length=length)
            # A row without padding may have lost its end, and new tokens follow whole prompts.
            while request.max_new_tokens is not None:
                mask = ids_and_mask(prompts)[1]
                if not mask.all(-1).any():
                    break
                longer = preprocess(inputs, sequence_length=2 * mask.shape[-1])
                if ids_and_mask(longer)[1].sum() == mask.sum():
                    break
                prompts = longer
        return self._continue(prompts, request, chat=chat)

    def _continue(
        self,
        taken: Mapping[str, Any],
        request: GenerateRequest,
        raw: bool = False,
        chat: bool = False,
    ) -> Any:
        """Returns the result of `generate` for token ids and their mask."""
        ids, mask = ids_and_mask(taken)
        is_batch = ids.ndim > 1
        ids, mask = np.atleast_2d(ids), np.atleast_2d(mask)
        self.backbone.check_token_ids(ids[mask])
        length, count = request.max_length or ids.shape[1], request.num_return_sequences
        prompts = [row[there][:length].tolist() for row, there in zip(ids, mask, strict=True)]
        limits = [length] * len(prompts)
        if request.max_new_tokens is not None:
            limits = [len(prompt) + request.max_new_tokens for prompt in prompts]
            length = max(limits, default=length)
        stop = self._stop(request, chat)
        on_token = stream = request.stream
        if stream is not None and not raw:
            tokenizer = self.preprocessor.tokenizer
            on_token = Streamer(stream, len(prompts) * count, stop, tokenizer)
        more: dict[str, Any] = images_of(taken, is_batch)
        drafter = drafter_of(
            self, request.assistant, request.num_assistant_tokens, request.prompt_lookup_num_tokens
        )
        if drafter is not None:
            more["drafter"] = drafter
        if request.sampler is not self.generator.sampler:
            more["sampler"] = request.sampler
        function, rows = self.make_generate_function(), []
        if prompts:
            rows = function(prompts, limits, stop, on_token, count, **more)
        if isinstance(on_token, Streamer):
            on_token.finish()
        longest, context = max(map(len, rows), default=0), self.backbone.config.context_length
        if longest > context:
            log.warning(
                "a text has %s tokens, and the model was made for up to %s; answers become worse "
                "from there on, give shorter prompts or a smaller max_length",
                *(f"{longest:,}", f"{context:,}"),
            )
        starts = [len(prompt) for prompt in prompts for _ in range(count)]
        new = [row[start:] for row, start in zip(rows, starts, strict=True)]
        pad = 0 if raw else self.preprocessor.tokenizer.pad_token_id
        padded = pad_rows(new if request.strip_prompt else rows, length, pad)
        single = not is_batch and count == 1
        if single:
            padded = {name: value[0] for name, value in padded.items()}
        if raw:
            return padded
        texts = self.preprocessor.generate_postprocess(padded)
        if single:
            return stop.without(texts, new[0])
        return [stop.without(text, tokens) for text, tokens in zip(texts, new, strict=True)]

    @property
    def generate_function(self) -> Callable[..., Any] | None:
        """The function that `generate` calls, kept from its first call to the next `compile`."""
        return self.generator.function

    @property
    def draft_counts(self) -> DraftCounts | None:
        """Passes and drafts of the last call of `generate` or `chat` that had drafts, or None."""
        return self.generator.counts

    def make_generate_function(self) -> Callable[..., Any]:
        """Returns `generate_function`, made on the first call."""
        if self.generator.function is None:
            self.generator.function = self.generate_step
        return self.generator.function

    def generate_step(
        self,
        prompts: list[list[int]],
        limits: list[int],
        stop: Collection[int] = (),
        on_token: Callable[[int, int], None] | None = None,
        count: int = 1,
        drafter: Drafter | None = None,
        images: Mapping[str, np.ndarray] | None = None,
        sampler: Sampler | None = None,
    ) -> list[list[int]]:
        """Continues rows of token ids of any lengths.

        Args:
            prompts: token ids.
            limits: limits of each prompt and its continuation together.
            stop: ids that end a row, or a `Stop`.
            on_token: called with (row, token id) as tokens come.
            count: rows for each prompt, which the result has one behind the other.
            drafter: proposes tokens, or None.
            images: arrays of the images of each prompt, by the names of the model's inputs.
            sampler: chooses the tokens; that of `compile` by default.

        Raises:
            InputError: for arguments that the sampler does not support.
        """
        check_prompts(prompts)
        chooser: Sampler = sampler or self.generator.sampler
        own_cache = getattr(self.call_with_cache, "__func__", None) is not Generates.call_with_cache
        settings: dict[str, Any] = {
            "stop": stop,
            "jit_compile": self.generator.jit_compile,
            "loops": self.generator.loops,
        }
        whole = isinstance(chooser, BeamSampler | ContrastiveSampler)
        if whole and on_token is not None:
            raise InputError(f"stream is not supported with {type(chooser).__name__}; leave it out")
        if drafter is not None and (whole or own_cache):
            reason = type(chooser).__name__ if whole else "this model's own call_with_cache"
            raise InputError(
                f"{reason} does not support drafts; leave assistant and prompt_lookup_num_tokens "
                "out, or compile another sampler"
            )
        if own_cache and (on_token is not None or isinstance(chooser, BeamSampler)):
            raise InputError(
                "generate goes by this model's own call_with_cache, which supports neither streams "
                "nor beams; leave stream out, and use another sampler than 'beam'"
            )
        if isinstance(chooser, BeamSampler):
            if count > chooser.num_beams:
                raise InputError(
                    f"num_return_sequences is {count}; beam search with {chooser.num_beams} beams "
                    "gives no more than that"
                )
            return continue_by_beams(
                self.backbone,
                prompts,
                limits=limits,
                sampler=chooser,
                count=count,
                images=images,
                **settings,
            )
        prompts = [prompt for prompt in prompts for _ in range(count)]
        limits = [limit for limit in limits for _ in range(count)]
        if images is not None:
            settings["images"] = repeated(images, count)
        if own_cache or isinstance(chooser, ContrastiveSampler):
            if images is not None:
                raise InputError(
                    f"{type(chooser).__name__} reads no images here; compile another sampler"
                )
            return continue_by_protocol(self, prompts, limits, chooser, stop)
        if drafter is not None:
            settings |= {"limits": limits, "sampler": chooser, "on_token": on_token}
            rows, self.generator.counts = continue_with_drafts(
                self.backbone, prompts, drafter=drafter, **settings
            )
            return rows
        return continue_prompts(
            self.backbone,
            prompts,
            max_length=limits,
            sampler=chooser,
            on_token=on_token,
            **settings,
        )

    def call_with_cache(
        self, token_ids: Tensor, cache: Tensor, cache_update_index: Tensor | int
    ) -> tuple[Any, Any, Any]:
        """Returns logits and hidden states of new tokens, and the cache, as keras-hub does.

        `generate` uses another cache, which takes less memory, and compiles its steps. If a
        subclass or a model replaces this method, it calls that instead, not compiled.

        Args:
            token_ids: (B, T) int, the new tokens.
            cache: (B, caches, 2, S, K, H), of keys and values, zeros at first; a block uses the
                first of K and H.
            cache_update_index: place of the first new token.

        Returns:
            logits (B, T, V), hidden states (B, T, D), cache.
        """
        index = ops.cast(cache_update_index, "int32")
        token_ids = ops.convert_to_tensor(token_ids, dtype="int32")
        positions = index + ops.arange(token_ids.shape[1], dtype="int32")
        caches = [DenseCache(cache[:, number], index) for number in range(cache.shape[1])]
        numbers = self.backbone.cache_numbers
        hidden = self.backbone.extend(token_ids, positions, [caches[n] for n in numbers])
        cache = ops.stack([one.content for one in caches], axis=1)
        return self.backbone.token_embedding.logits(hidden), hidden, cache

    def _build_cache(self, token_ids: Tensor) -> tuple[Any, Any]:
        """Returns hidden states (B, T, D) of token ids (B, T), and the cache, as keras-hub does."""
        cache = empty_cache(self.backbone, *token_ids.shape)
        _, hidden, cache = self.call_with_cache(token_ids, cache, 0)
        return hidden, cache

    def _stop(self, request: GenerateRequest, chat: bool) -> Stop:
        ids, strings = request.stop_token_ids, request.stop
        auto = isinstance(ids, str) and ids == "auto"
        if strings is not None:
            strings = check_strings("stop", strings)
        elif auto:
            strings = stop_strings_of(getattr(self, "generation_config", {}))
        preprocessor = self.preprocessor
        tokenizer = getattr(preprocessor, "tokenizer", None)
        if isinstance(ids, str):
            if not auto or preprocessor is None:
                raise InputError(
                    f"stop_token_ids is {ids!r}; without a preprocessor give ids, or None for no "
                    "end"
                )
            if chat:
                ids = preprocessor.chat_stop_token_ids
            else:
                ids = preprocessor.tokenizer.stop_token_ids
        if strings and tokenizer is None:
            raise InputError(
                f"stop is {request.stop!r} and the model has no tokenizer; attach a preprocessor, "
                "or give stop_token_ids"
            )
        if ids is not None and not isinstance(ids, Collection):
            raise InputError(f"stop_token_ids is {ids!r}; give a list of ids, 'auto' or None")
        tokens = () if ids is None else tuple(ids)
        for token in tokens:
            check_whole("a token of stop_token_ids", token, 0)
        return Stop([int(token) for token in tokens], strings or (), tokenizer)


class _Generator:
    """Keeps sampler and compiled steps out of Keras' tracking of attributes.

    A model may assist itself, so its steps as an assistant are kept apart.
    """

    def __init__(self, sampler: Sampler, jit_compile: bool | str):
        self.sampler = sampler
        self.jit_compile = jit_compile
        self.loops: dict[Any, Any] = {}
        self.draft_loops: dict[Any, Any] = {}
        self.counts: DraftCounts | None = None
        self.function: Callable[..., Any] | None = None


# === The protocol of keras-hub: one step per call, one array as the cache ===


class DenseCache:
    """The cache of one block: its part of an array, and the place of the new tokens.

    Args:
        content: (B, 2, S, K, H), keys and values; K and H are at least the block's own.
        index: number of the first new token.

    Attributes:
        extended: the last result of `extend`, for the blocks that share it.
    """

    extended: tuple[Any, Any, dict]

    def __init__(self, content: Tensor, index: Tensor | int):
        self.content = content
        self.index = index

    def extend(self, key: Tensor, value: Tensor, window: int | None) -> tuple[Any, Any, dict]:
        """Writes the new keys and values; returns all of them, and the mask of the queries."""
        start, slots = [0, self.index, 0, 0], self.content.shape[2]
        _, new, heads, width = key.shape
        key = ops.slice_update(self.content[:, 0], start, ops.cast(key, self.content.dtype))
        value = ops.slice_update(self.content[:, 1], start, ops.cast(value, self.content.dtype))
        self.content = ops.stack([key, value], axis=1)
        query = ops.expand_dims(self.index + ops.arange(new, dtype="int32"), 1)
        behind = query - ops.expand_dims(ops.arange(slots, dtype="int32"), 0)
        seen = behind >= 0
        if window is not None:
            seen = ops.logical_and(seen, behind < window)
        key, value = key[:, :, :heads, :width], value[:, :, :heads, :width]
        self.extended = key, value, {"mask": ops.expand_dims(ops.expand_dims(seen, 0), 0)}
        return self.extended


def empty_cache(backbone: keras.Model, batch: int, slots: int) -> Any:
    """Returns a cache for `batch` rows of up to `slots` tokens, in the compute dtype.

    It has the heads and the width of the block with the most, and one entry per block that
    computes keys and values.
    """
    return ops.zeros(cache_shape(backbone, batch, slots), dtype=backbone.compute_dtype)


def cache_shape(backbone: keras.Model, batch: int, slots: int) -> tuple[int, ...]:
    """Returns the shape of `empty_cache`."""
    heads, width = (max(sizes) for sizes in zip(*backbone.cache_shapes, strict=True))
    return batch, len(backbone.cache_shapes), 2, slots, heads, width


def continue_by_protocol(
    model: keras.Model,
    prompts: list[list[int]],
    limits: list[int],
    sampler: Sampler,
    stop: Collection[int],
) -> list[list[int]]:
    """Continues prompts by calling the sampler itself, not compiled."""
    length = max([*limits, *(len(prompt) for prompt in prompts)])
    shapes = [cache_shape(model.backbone, len(prompts), length)]
    check_memory(shapes, model.backbone.compute_dtype, len(prompts), length)
    ids, mask = np.zeros((len(prompts), length), "int32"), np.zeros((len(prompts), length), bool)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)], mask[row, : len(prompt)] = prompt, True
    hidden, cache = model._build_cache(ops.convert_to_tensor(ids))

    def following(rows: Tensor, cache: Tensor, index: Tensor | int) -> tuple[Any, Any, Any]:
        new = rows[:, index - 1 : index]
        logits, hidden, cache = model.call_with_cache(new, cache, index - 1)
        return logits[:, 0], hidden[:, 0], cache

    continued = sampler(
        next=following,
        prompt=ids,
        cache=cache,
        index=int(mask.sum(1).min()),
        mask=mask,
        stop_token_ids=list(stop) or None,
        hidden_states=ops.cast(hidden, "float32"),
        model=model,
    )
    return [
        _until(row.tolist(), len(prompt), limit, stop)
        for row, prompt, limit in zip(
            np.asarray(ops.convert_to_numpy(continued)), prompts, limits, strict=True
        )
    ]


def _until(row: list[int], start: int, limit: int, stop: Collection[int]) -> list[int]:
    """Returns the row up to its limit, or to the first token behind the prompt that ends it."""
    limit = max(start, limit)
    for place in range(start, limit):
        if ended(stop, row[start : place + 1]):
            return row[: place + 1]
    return row[:limit]
