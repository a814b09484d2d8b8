"""`generate`, for tasks whose backbone can be extended token by token."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, Self

import numpy as np

from kmodels.core.errors import InputError, check_whole
from kmodels.core.types import Data, Tensor
from kmodels.generation.assisted import DraftCounts, continue_with_drafts
from kmodels.generation.beams import continue_by_beams
from kmodels.generation.chat import Chats, chat_prompts, pad_rows
from kmodels.generation.drafters import ASSISTANT_TOKENS, Drafter, drafter_of
from kmodels.generation.generate import check_prompts, continue_prompts
from kmodels.generation.inputs import (
    as_numpy,
    batches,
    images_of,
    is_data,
    is_raw,
    joined,
    repeated,
)
from kmodels.generation.protocol import call_with_cache, continue_by_protocol, empty_cache
from kmodels.generation.sampler import Sampler
from kmodels.generation.samplers import BeamSampler, ContrastiveSampler, get, serialize
from kmodels.text.chat_template import is_chat
from kmodels.weights import gather


class Generates(Chats):
    """Adds `generate` and `chat`; `compile(sampler=...)` chooses how tokens are drawn."""

    backbone: Any
    preprocessor: Any

    def use_sampler(self, sampler: str | Sampler, jit_compile: bool | str = "auto") -> None:
        """Draws tokens this way from now on.

        Args:
            sampler: "greedy", "random", "top_k", "top_p", "beam", "contrastive", or a
                `kmodels.generation.Sampler`.
            jit_compile: whether torch compiles the token step; "auto" for on accelerators only. The
                other backends always compile it.

        Raises:
            InputError: for an unknown name.
        """
        self.generator = _Generator(get(sampler), jit_compile)

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
        """Calls `compile` with what `get_compile_config` gave; tokens are drawn as before."""
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
    ) -> Any:
        """Continues prompts; names and results as in keras-hub.

        Prompts may have different lengths. Lengths are rounded up to a few sizes, so that one
        compiled step serves many prompts.

        Args:
            inputs: what the preprocessor takes, such as a text or a list of texts; a chat, a list
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
            num_assistant_tokens: number of tokens of each of its drafts.
            prompt_lookup_num_tokens: number of tokens of drafts that repeat what stood behind the
                last tokens before, in place of an assistant.

        Returns:
            Texts, or for token ids {"token_ids", "padding_mask"} as NumPy arrays (B, max_length);
            the mask covers what was given and what came, stop tokens included.

        Raises:
            InputError: for "auto" without a preprocessor, a prompt without tokens, a length below
                1, two lengths, more texts than beams, a chat that its template refuses or that
                leaves no room for a reply, an assistant of another vocabulary or beside beams or
                contrastive search, or on torch a model whose weights lie in parts.
        """
        for name, number in (("max_length", max_length), ("max_new_tokens", max_new_tokens)):
            if number is not None:
                check_whole(name, number)
        if max_length is not None and max_new_tokens is not None:
            raise InputError("generate got max_length and max_new_tokens; give one of them")
        check_whole("num_return_sequences", num_return_sequences)
        gather.check_callable(self, "generate")
        drafts = {
            "assistant": assistant,
            "num_assistant_tokens": num_assistant_tokens,
            "prompt_lookup_num_tokens": prompt_lookup_num_tokens,
        }
        if is_data(inputs):
            options = stop_token_ids, strip_prompt, stream, max_new_tokens, num_return_sequences
            parts = [self.generate(x, max_length, *options, **drafts) for x in batches(inputs)]
            return joined(parts)
        raw = is_raw(inputs)
        if raw:
            taken = inputs if isinstance(inputs, Mapping) else {"token_ids": inputs}
        elif self.preprocessor is None:
            raise InputError(
                'generate got no token ids and the model has no preprocessor; give {"token_ids", '
                '"padding_mask"} or attach one'
            )
        elif is_chat(inputs):
            if isinstance(stop_token_ids, str) and stop_token_ids == "auto":
                stop_token_ids = self.preprocessor.chat_stop_token_ids
            if max_new_tokens is None:
                taken = self.preprocessor.generate_preprocess(inputs, sequence_length=max_length)
            else:
                taken = chat_prompts(self.preprocessor, inputs)
        else:
            taken = self.preprocessor.generate_preprocess(inputs, sequence_length=max_length)
        return self._continue(
            taken,
            max_length,
            stop_token_ids,
            strip_prompt,
            stream,
            max_new_tokens,
            num_return_sequences,
            drafter_of(self, **drafts),
            raw=raw,
        )

    def _continue(
        self,
        taken: Mapping[str, Any],
        max_length: int | None,
        stop_token_ids: Collection[int] | str | None,
        strip_prompt: bool,
        stream: Callable[[int, Any], None] | None,
        max_new_tokens: int | None,
        num_return_sequences: int,
        drafter: Drafter | None = None,
        raw: bool = False,
    ) -> Any:
        """Returns what `generate` does, for token ids and their mask; see there."""
        ids = as_numpy(taken["token_ids"])
        mask = taken.get("padding_mask")
        mask = np.ones(ids.shape, "bool") if mask is None else as_numpy(mask)
        is_batch = ids.ndim > 1
        ids, mask = np.atleast_2d(ids), np.atleast_2d(mask).astype(bool)
        length = max_length or ids.shape[1]
        prompts = [row[there][:length].tolist() for row, there in zip(ids, mask, strict=True)]
        limits = [length] * len(prompts)
        if max_new_tokens is not None:
            limits = [len(prompt) + max_new_tokens for prompt in prompts]
            length = max(limits, default=length)
        rows = self.make_generate_function()(
            prompts,
            limits,
            self._stop_tokens(stop_token_ids),
            self._streamer(stream, len(prompts) * num_return_sequences, raw),
            num_return_sequences,
            **({} if drafter is None else {"drafter": drafter}),
            **images_of(taken, is_batch),
        )
        if strip_prompt:
            starts = [len(prompt) for prompt in prompts for _ in range(num_return_sequences)]
            rows = [row[start:] for row, start in zip(rows, starts, strict=True)]
        found = pad_rows(rows, length, 0 if raw else self.preprocessor.tokenizer.pad_token_id)
        if not is_batch and num_return_sequences == 1:
            found = {name: value[0] for name, value in found.items()}
        return found if raw else self.preprocessor.generate_postprocess(found)

    @property
    def generate_function(self) -> Callable[..., Any] | None:
        """The function that `generate` calls, kept from its first call to the next `compile`."""
        return self.generator.function

    @property
    def draft_counts(self) -> DraftCounts | None:
        """Passes and drafts of the last call of `generate` or `chat` that had drafts, or None."""
        return self.generator.counts

    def make_generate_function(self) -> Callable[..., Any]:
        """Makes `generate_function` where there is none, and returns it."""
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
    ) -> list[list[int]]:
        """Continues rows of token ids of any lengths.

        Args:
            prompts: token ids.
            limits: limits of each prompt and its continuation together.
            stop: ids that end a row.
            on_token: called with (row, token id) as tokens come.
            count: rows for each prompt.
            drafter: proposes tokens, or None.
            images: arrays of the images of each prompt, by the names of the model's inputs.

        Returns:
            The prompts with their continuations.

        Raises:
            InputError: for what the sampler cannot do.
        """
        sampler = self.generator.sampler
        own_cache = getattr(self.call_with_cache, "__func__", None) is not Generates.call_with_cache
        settings: dict[str, Any] = {
            "stop": stop,
            "jit_compile": self.generator.jit_compile,
            "loops": self.generator.loops,
        }
        whole = isinstance(sampler, BeamSampler | ContrastiveSampler)
        if whole and on_token is not None:
            raise InputError(f"{type(sampler).__name__} has no token before it has all; no stream")
        if drafter is not None and (whole or own_cache):
            reason = type(sampler).__name__ if whole else "this model's own call_with_cache"
            raise InputError(
                f"{reason} does not support drafts; leave assistant and prompt_lookup_num_tokens "
                "out, or compile another sampler"
            )
        if own_cache and (on_token is not None or isinstance(sampler, BeamSampler)):
            raise InputError(
                "generate goes by this model's own call_with_cache, which supports neither streams "
                "nor beams; leave stream out, and use another sampler than 'beam'"
            )
        if isinstance(sampler, BeamSampler):
            if count > sampler.num_beams:
                raise InputError(
                    f"num_return_sequences is {count}; beam search with {sampler.num_beams} beams "
                    "gives no more than that"
                )
            check_prompts(prompts)
            return continue_by_beams(
                self.backbone,
                prompts,
                limits=limits,
                sampler=sampler,
                count=count,
                images=images,
                **settings,
            )
        prompts = [prompt for prompt in prompts for _ in range(count)]
        limits = [limit for limit in limits for _ in range(count)]
        if images is not None:
            settings["images"] = repeated(images, count)
        if own_cache or isinstance(sampler, ContrastiveSampler):
            if images is not None:
                raise InputError(
                    f"{type(sampler).__name__} reads no images here; compile another sampler"
                )
            check_prompts(prompts)
            return continue_by_protocol(self, prompts, limits, sampler, stop)
        if drafter is not None:
            settings |= {"limits": limits, "sampler": sampler, "on_token": on_token}
            rows, self.generator.counts = continue_with_drafts(
                self.backbone, prompts, drafter=drafter, **settings
            )
            return rows
        return continue_prompts(
            self.backbone,
            prompts,
            max_length=limits,
            sampler=sampler,
            on_token=on_token,
            **settings,
        )

    def call_with_cache(
        self, token_ids: Tensor, cache: Tensor, cache_update_index: Tensor | int
    ) -> tuple[Any, Any, Any]:
        """Returns logits and hidden states of new tokens, and the cache, as keras-hub does.

        `generate` has a cache of its own, which takes less memory, and compiles its steps. If a
        subclass or a model replaces this method, it calls that instead, not compiled.

        Args:
            token_ids: (B, T) int, the new tokens.
            cache: (B, caches, 2, S, K, H), of keys and values, zeros at first.
            cache_update_index: place of the first new token.

        Returns:
            logits (B, T, V), hidden states (B, T, D), cache.
        """
        return call_with_cache(self.backbone, token_ids, cache, cache_update_index)

    def _build_cache(self, token_ids: Tensor) -> tuple[Any, Any]:
        """Returns hidden states (B, T, D) of token ids (B, T), and the cache, as keras-hub does."""
        cache = empty_cache(self.backbone, *token_ids.shape)
        _, hidden, cache = self.call_with_cache(token_ids, cache, 0)
        return hidden, cache

    def _stop_tokens(self, given: Collection[int] | str | None) -> frozenset[int]:
        if given is None:
            return frozenset()
        if not isinstance(given, str):
            return frozenset(int(token) for token in given)
        if given != "auto" or self.preprocessor is None:
            raise InputError(
                f"stop_token_ids is {given!r}; without a preprocessor give ids, or None for no end"
            )
        return frozenset(self.preprocessor.tokenizer.stop_token_ids)

    def _streamer(
        self, stream: Callable[[int, Any], None] | None, rows: int, raw: bool
    ) -> Callable[[int, int], None] | None:
        if stream is None or raw:
            return stream
        tokens: list[list[int]] = [[] for _ in range(rows)]
        shown = [""] * rows

        def on_token(row: int, token: int) -> None:
            tokens[row].append(token)
            text = self.preprocessor.tokenizer.detokenize(tokens[row])
            # A character may take several tokens; show it when it is whole.
            if not text.endswith("\ufffd") and text != shown[row]:
                stream(row, text[len(shown[row]) :])
                shown[row] = text

        return on_token


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
