"""Log-likelihoods and replies of a language model, as lm-evaluation-harness defines them."""

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import keras
import numpy as np

from kmodels.core.errors import InputError, check_whole, pluralize
from kmodels.generation.generate import bucket
from kmodels.generation.request import pad_rows
from kmodels.training import TrainStep

log = logging.getLogger("kmodels")
# Token ids of a context and of its continuation.
Pair = tuple[Sequence[int], Sequence[int]]


class LanguageScorer:
    """Scores and continues texts with a language model.

    Neither the batch size nor the order of the requests changes a result. Logits of the whole
    vocabulary are never stored, see `CausalLM.log_probs`.

    Args:
        max_length: largest number of tokens of a row, of which a longer one keeps the end; by
            default the context length of the model.
        add_start_token: False for texts without the start token, if the tokenizer adds one.
        progress: wraps a list of batches to show how many are done, such as `tqdm.tqdm`.

    Raises:
        InputError: for wrong numbers, or a model without a tokenizer.
    """

    def __init__(
        self,
        model: Any,
        batch_size: int = 8,
        max_length: int | None = None,
        add_start_token: bool = True,
        progress: Callable[[list[Any]], Iterable[Any]] = iter,
    ):
        check_whole("batch_size", batch_size)
        if max_length is not None:
            check_whole("max_length", max_length, 2)
        if model.preprocessor is None:
            raise InputError("the model has no tokenizer; put tokenizer.json next to the weights")
        self.model, self.tokenizer = model, model.preprocessor.tokenizer
        self.batch_size, self.progress = batch_size, progress
        self.max_length = max_length or model.backbone.config.context_length
        self.add_start_token = add_start_token
        start = self.tokenizer.start_token_id
        # The token in front of a text without context.
        self.prefix = self.tokenizer.end_token_id if start is None else start
        self._step = TrainStep(model, _no_loss, output=_row_scores)

    def encode(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """Returns token ids; by default with the start token, unless the text begins with it."""
        if add_special_tokens is None:
            begins = text.startswith(self.tokenizer.decode([self.prefix]))
            add_special_tokens = self.add_start_token and not begins
        return self.tokenizer.encode(text, add_special_tokens)

    def pair(self, context: str, continuation: str) -> Pair:
        """Returns the token ids of a context and its continuation, which are encoded together.

        Blanks at the end of the context count as a part of the continuation.
        """
        start = context.rstrip()
        rest = context[len(start) :] + continuation
        if start:
            tokens = self.encode(start)
            return tokens, self.encode(start + rest)[len(tokens) :]
        tokens = self.encode(rest, False)
        return (tokens[:1], tokens[1:]) if tokens[:1] == [self.prefix] else ([self.prefix], tokens)

    def log_likelihoods(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """Returns (log-likelihood in nats, True if greedy decoding gives it) of continuations.

        Args:
            pairs: token ids of contexts, at least one each, and of their continuations.

        Raises:
            InputError: for an empty context, or a continuation that is empty or longer than
                `max_length`.
        """
        groups: dict[int, list[int]] = {}
        for number, (context, continuation) in enumerate(pairs):
            if not context or not 0 < len(continuation) <= self.max_length:
                raise InputError(
                    f"request {number} has {len(context)} tokens of context and "
                    f"{len(continuation)} of continuation; give both, and max_length is "
                    f"{self.max_length}"
                )
            size = min(len(context) + len(continuation) - 1, self.max_length)
            groups.setdefault(bucket(size), []).append(number)
        cut = sum(len(a) + len(b) > self.max_length + 1 for a, b in pairs)
        if cut:
            rows = pluralize(cut, "context")
            log.warning("%s lost their beginning: max_length is %d", rows, self.max_length)
        batches = [
            (length, numbers[start : start + self.batch_size])
            for length, numbers in sorted(groups.items(), reverse=True)
            for start in range(0, len(numbers), self.batch_size)
        ]
        results: dict[int, tuple[float, bool]] = {}
        for length, numbers in self.progress(batches):
            # A shorter batch would be compiled again.
            rows = [pairs[i] for i in np.resize(numbers, self.batch_size)]
            texts = [
                [*context, *continuation][-self.max_length - 1 :] for context, continuation in rows
            ]
            inputs = pad_rows([text[:-1] for text in texts], length, self.tokenizer.pad_token_id)
            labels = np.full((self.batch_size, length), -100, "int32")
            for row, text, (_, continuation) in zip(labels, texts, rows, strict=True):
                row[len(text) - 1 - len(continuation) : len(text) - 1] = continuation
            scores = np.asarray(self._step.predict_on_batch({**inputs, "labels": labels}))
            for i, (total, hits) in zip(numbers, scores.tolist(), strict=False):
                results[i] = (total, hits == len(pairs[i][1]))
        return [results[i] for i in range(len(pairs))]

    def rolling_log_likelihoods(self, texts: Sequence[str]) -> list[float]:
        """Returns the log-likelihood of each text, in nats, its first token included.

        A text beyond `max_length` is scored in windows: each token once, and those of the last
        window with as many tokens before them as fit. As in lm-evaluation-harness, a start token
        that the tokenizer adds is scored too.
        """
        pairs, owners = list[Pair](), list[int]()
        for number, text in enumerate(texts):
            tokens = self.encode(text)
            inputs = [self.prefix, *tokens]
            for start in range(0, len(tokens), self.max_length):
                end = min(start + self.max_length, len(tokens))
                pairs.append((inputs[max(end - self.max_length, 0) : start + 1], tokens[start:end]))
                owners.append(number)
        totals = [0.0] * len(texts)
        for number, (score, _) in zip(owners, self.log_likelihoods(pairs), strict=True):
            totals[number] += score
        return totals

    def replies(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        stop: Sequence[str] = (),
        stop_token_ids: Collection[int] | None = None,
        **sampling: Any,
    ) -> list[tuple[str, bool]]:
        """Returns (reply, True if it ended before the limit) of each prompt, greedy by default.

        Of prompts that are too long the end is kept. Texts of `stop` are not part of a reply.

        Raises:
            InputError: for an empty prompt, or a limit that leaves no room for one.
        """
        check_whole("max_new_tokens", max_new_tokens)
        if max_new_tokens >= self.max_length:
            raise InputError(
                f"max_new_tokens is {max_new_tokens} and max_length {self.max_length}; give fewer "
                "new tokens"
            )
        ends = self.tokenizer.stop_token_ids if stop_token_ids is None else stop_token_ids
        room = self.max_length - max_new_tokens
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        parts = range(0, len(order), self.batch_size)
        results: dict[int, tuple[str, bool]] = {}
        for numbers in self.progress([order[i : i + self.batch_size] for i in parts]):
            rows = [list(prompts[i][-room:]) for i in numbers]
            generated = self.model.generate(
                pad_rows(rows, max(map(len, rows)), self.tokenizer.pad_token_id),
                strip_prompt=True,
                max_new_tokens=max_new_tokens,
                stop_token_ids=ends,
                stop=tuple(stop),
                **{"temperature": 0.0, **sampling},
            )
            masks = generated["padding_mask"].astype(bool)
            for i, ids, mask in zip(numbers, generated["token_ids"], masks, strict=True):
                tokens = ids[mask].tolist()
                whole = reply = self.tokenizer.decode(tokens, skip_special_tokens=True)
                for text in stop:
                    reply = reply.partition(text)[0]
                by_token = len(tokens) < max_new_tokens or tokens[-1] in ends
                results[i] = (reply, by_token or reply != whole)
        return [results[i] for i in range(len(prompts))]


def _row_scores(model: Any, inputs: Any, training: bool) -> Any:
    """Returns the sum of the log-probabilities and the number of hits of each row, (B, 2)."""
    names = ("token_ids", "padding_mask")
    scores = model.log_probs({x: inputs[x] for x in names}, inputs["labels"], with_hits=True)
    return keras.ops.stack([keras.ops.sum(score, axis=1) for score in scores], axis=1)


def _no_loss(*_: Any) -> Any:
    raise NotImplementedError
