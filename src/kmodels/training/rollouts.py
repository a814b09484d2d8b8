"""Data that the trained model samples itself, for policy gradients."""

import copy
import hashlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import keras
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from kmodels.core import processes
from kmodels.core.errors import InputError, check_choice, check_number, check_whole
from kmodels.core.files import atomic_write, local_path
from kmodels.data.pipeline.indexed import ResumableBatches
from kmodels.data.rng import order
from kmodels.distribution import current
from kmodels.generation.request import chat_prompts
from kmodels.training.preference import SCALES, group_advantages

# Of each answer in a file of a rollout, and of the batches.
ARRAYS = {
    "token_ids": "int32",
    "learnt": "float32",
    "rewards": "float32",
    "scored": "float32",
    "advantages": "float32",
}


class Rollouts(ResumableBatches):
    """Batches of sampled answers with the advantages of their rewards; each epoch is a rollout.

    Give `callback()` to the same `fit`: at the beginning of an epoch it samples `group_size`
    answers to each prompt of the epoch, and calls the reward function. A run that is resumed
    within an epoch reads the answers of that epoch from `folder`. Processes of torch that train
    together each sample, and judge, the answers to a part of the prompts; on JAX all of them do
    so together.

    A batch is ({"token_ids", "padding_mask", "rewards", "scored", "advantages"}, labels, learnt):
    ids, labels and learnt (rows, T), the others (rows,), where a row is an answer with its prompt.
    With several batches per rollout there are "old_log_probs" (rows, T) too.

    Args:
        model: a language model that generates, with a preprocessor.
        records: dictionaries with "prompt", a text or a list of messages; the reward function gets
            their other fields.
        reward: reward(prompts=[...], completions=[...], **fields) returns a number for each
            completion, or None for one that it cannot judge. Fields are lists by name.
        batch_size: answers per step, a multiple of `group_size`.
        group_size: answers to each prompt.
        batches: steps on each rollout.
        prompt_length: tokens of a prompt; of a longer one the end stays.
        max_new_tokens: tokens of an answer.
        temperature: of the sampling.
        scale: see `group_advantages`.
        seed: of the order of the prompts and of the sampling.
        folder: for the files of the rollouts; None for no files.
        timeout: seconds after which the reward function has failed; None for no limit.
        log_probs: returns the log-probabilities (rows, T) of inputs with "labels" and "learnt";
            needed for several batches per rollout.

    Raises:
        InputError: for sizes that do not fit, records without a prompt, or a model that has no
            preprocessor.
    """

    def __init__(
        self,
        model: Any,
        records: Iterable[Mapping[str, Any]],
        reward: Callable[..., Sequence[float | None]],
        batch_size: int,
        *,
        group_size: int = 8,
        batches: int = 1,
        prompt_length: int = 128,
        max_new_tokens: int = 64,
        temperature: float = 1.0,
        scale: str = "group",
        seed: int = 0,
        folder: str | Path | None = None,
        timeout: float | None = None,
        log_probs: Callable[[dict[str, Any]], Any] | None = None,
    ):
        super().__init__()
        for name, value in (
            *(("batch_size", batch_size), ("group_size", group_size), ("batches", batches)),
            *(("prompt_length", prompt_length), ("max_new_tokens", max_new_tokens)),
        ):
            check_whole(name, value)
        if batch_size % group_size or group_size < 2:
            raise InputError(
                f"batch_size is {batch_size} and group_size {group_size}; give groups of at least "
                "2, and a batch of whole groups"
            )
        check_number("temperature", temperature, above=0)
        check_choice("scale", scale, SCALES)
        if timeout is not None:
            check_number("timeout", timeout, above=0)
        for name, function in (("reward", reward), ("log_probs", log_probs)):
            if not callable(function) and (name == "reward" or function is not None):
                raise InputError(f"{name} is {function!r}; give a function")
        if batches > 1 and log_probs is None:
            raise InputError(f"batches is {batches}; give log_probs, or 1 batch per rollout")
        if model.preprocessor is None:
            raise InputError("the model has no preprocessor; attach one to generate texts")
        self.model, self.records, self.reward = model, list(records), reward
        self.batch_size, self.group_size, self._batches = batch_size, group_size, batches
        self.max_new_tokens, self.temperature, self.scale = max_new_tokens, temperature, scale
        self.seed, self.timeout, self.log_probs = seed, timeout, log_probs
        self.folder = None if folder is None else local_path(folder)
        if not self.records:
            raise InputError("there are no records; give at least one with a prompt")
        self._prompts = [_ids(model, record, prompt_length) for record in self.records]
        prompts = hashlib.sha256(repr(self._prompts).encode()).hexdigest()
        # In the file of a rollout, since another run may have left it.
        self._settings = {"prompts": prompts, "scale": scale, "seed": str(seed)}
        self._settings["temperature"] = str(float(temperature))
        self._tokens = prompt_length + max_new_tokens
        chats = any(isinstance(record["prompt"], list) for record in self.records)
        text = model.preprocessor
        self._stop = text.chat_stop_token_ids if chats else text.tokenizer.stop_token_ids
        self._rows = slice(0, batch_size)
        # Shared by the parts of the processes.
        self._arrays: dict[str, np.ndarray] = {}

    @property
    def batches(self) -> int:
        """Number of batches in an epoch."""
        return self._batches

    @property
    def samples(self) -> int:
        """Number of answers in an epoch."""
        return self._batches * self.batch_size

    def part(self, start: int, stop: int) -> Self:
        """Returns a loader of the same batches, each cut to the rows from start to stop."""
        part = copy.copy(self)
        part._rows = slice(start, stop)
        return part

    def __getitem__(self, index: int) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
        start = self.number_of(index) * self.batch_size
        self.handed_out = max(self.handed_out, index + 1)
        if not self._arrays:  # read to build the model, before the first rollout
            self._arrays.update(self._empty())
        rows = {
            name: x[start : start + self.batch_size][self._rows] for name, x in self._arrays.items()
        }
        return self._batch(rows)

    def callback(self) -> keras.callbacks.Callback:
        """Returns the callback that samples at the beginning of each epoch."""
        return _Sampling(self)

    def sample(self, epoch: int) -> None:
        """Makes the answers of an epoch, or reads them from their file.

        Raises:
            InputError: if the reward function fails, or the file is not one of this run.
        """
        path = None if self.folder is None else self.folder / f"{epoch:06d}.safetensors"
        if path is not None and path.is_file():
            arrays = self._read(path)
        else:
            arrays = self._sampled(epoch)
            if path is not None and processes.is_rank_zero():
                path.parent.mkdir(parents=True, exist_ok=True)
                atomic_write(path, lambda file: save_file(arrays, file, self._settings))
        self._arrays.clear()
        self._arrays.update(arrays)

    def rewards_of(
        self, records: Sequence[Mapping[str, Any]], completions: Sequence[str]
    ) -> np.ndarray:
        """Returns float32 rewards of completions, NaN for those without one.

        Raises:
            InputError: if the reward function raises, takes too long, or returns something else
                than a number or None for each.
        """
        names = dict.fromkeys(name for record in records for name in record if name != "prompt")
        fields = {name: [record.get(name) for record in records] for name in names}
        prompts = [record["prompt"] for record in records]
        values = _within(
            self.timeout, lambda: self.reward(prompts=prompts, completions=completions, **fields)
        )
        try:
            rewards = np.array([np.nan if x is None else float(x) for x in values], "float32")
        except (TypeError, ValueError) as error:
            raise InputError(
                f"the reward function returned {type(values).__name__}; return a number or None "
                f"for each completion ({error})"
            ) from None
        if len(rewards) != len(completions) or np.isinf(rewards).any():
            raise InputError(
                f"the reward function returned {len(rewards)} values for {len(completions)} "
                "completions, or infinite ones; return a finite number or None for each"
            )
        return rewards

    def _sampled(self, epoch: int) -> dict[str, np.ndarray]:
        count, groups = len(self.records), self.samples // self.group_size
        places = range(epoch * groups, (epoch + 1) * groups)
        orders = {
            number: order(count, self.seed, number) for number in {i // count for i in places}
        }
        chosen = [int(orders[i // count][i % count]) for i in places]
        shards, shard = _shards()
        parts = np.array_split(np.arange(groups), shards)
        answers, rewards = self._answers([chosen[i] for i in parts[shard]], epoch, shard)
        everywhere = processes.all_gather_object("rollout", [shard, answers, rewards])
        by_shard = {number: part for number, *part in everywhere}
        answers = [answer for number in range(shards) for answer in by_shard[number][0]]
        rewards = [reward for number in range(shards) for reward in by_shard[number][1]]
        rewards = np.array([np.nan if x is None else x for x in rewards], "float32")
        arrays = self._empty()
        for i, answer in enumerate(answers):
            prompt = self._prompts[chosen[i // self.group_size]]
            size = len(prompt) + len(answer)
            arrays["token_ids"][i, :size] = [*prompt, *answer]
            arrays["learnt"][i, len(prompt) - 1 : size - 1] = 1
        advantages = group_advantages(rewards.reshape(groups, self.group_size), self.scale)
        arrays["rewards"], arrays["scored"] = np.nan_to_num(rewards), 1.0 - np.isnan(rewards)
        arrays["scored"] = arrays["scored"].astype("float32")
        arrays["advantages"] = keras.ops.convert_to_numpy(advantages).reshape(-1)
        if self._batches > 1 and self.log_probs is not None:
            inputs, labels, learnt = self._batch(arrays)
            old = self.log_probs({**inputs, "labels": labels, "learnt": learnt})
            if np.shape(old) != labels.shape:
                raise InputError(
                    f"log_probs returned shape {np.shape(old)}; return {labels.shape}, a number "
                    "for each label"
                )
            arrays["old_log_probs"] = np.asarray(old, "float32")
        return arrays

    def _answers(
        self, chosen: list[int], epoch: int, shard: int
    ) -> tuple[list[list[int]], list[float | None]]:
        """Returns the token ids of the answers to some records, and their rewards."""
        prompts = [self._prompts[i] for i in chosen]
        longest = max(map(len, prompts), default=0)
        ids = np.zeros((len(prompts), longest), "int32")
        mask = np.arange(longest) < np.array([len(prompt) for prompt in prompts]).reshape(-1, 1)
        for row, prompt in zip(ids, prompts, strict=True):
            row[: len(prompt)] = prompt
        answers: list[list[int]] = []
        if prompts:
            sampled = self.model.generate(
                {"token_ids": ids, "padding_mask": mask},
                strip_prompt=True,
                max_new_tokens=self.max_new_tokens,
                num_return_sequences=self.group_size,
                temperature=self.temperature,
                stop_token_ids=self._stop,
                seed=(self.seed * 1_000_003 + epoch + shard * 7_919_317) % 2**31,
            )
            for row, there in zip(sampled["token_ids"], sampled["padding_mask"], strict=True):
                answers.append(row[there][: self.max_new_tokens].tolist())
        tokenizer = self.model.preprocessor.tokenizer
        completions = [tokenizer.detokenize(answer) for answer in answers]
        records = [self.records[i] for i in chosen for _ in range(self.group_size)]

        def judge() -> np.ndarray:
            return self.rewards_of(records, completions) if records else np.zeros(0)

        rewards = processes.all_or_raise("rewards", judge)
        return answers, [None if np.isnan(one) else float(one) for one in rewards]

    def _empty(self) -> dict[str, np.ndarray]:
        rows, width = self.samples, {"token_ids": self._tokens, "learnt": self._tokens - 1}
        arrays = {
            name: np.zeros((rows, width[name]) if name in width else rows, dtype)
            for name, dtype in ARRAYS.items()
        }
        if self._batches > 1:
            arrays["old_log_probs"] = np.zeros((rows, self._tokens - 1), "float32")
        return arrays

    def _batch(
        self, rows: dict[str, np.ndarray]
    ) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
        ids, learnt = rows["token_ids"], rows["learnt"]
        # Tokens go up to the last one that is learnt.
        last = (learnt * np.arange(1, learnt.shape[1] + 1)).max(axis=1, keepdims=True)
        inputs = {name: x for name, x in rows.items() if name not in ("token_ids", "learnt")}
        inputs["token_ids"] = ids[:, :-1]
        inputs["padding_mask"] = np.arange(ids.shape[1] - 1) < last
        return inputs, ids[:, 1:], learnt

    def _read(self, path: Path) -> dict[str, np.ndarray]:
        expected = self._empty()
        try:
            with safe_open(path, "numpy") as file:
                settings, names = file.metadata() or {}, file.keys()
                arrays = {name: file.get_tensor(name) for name in expected if name in names}
        except (OSError, SafetensorError) as error:
            raise InputError(f"{path} cannot be read: {error}; remove it to sample again") from None
        if wrong := [name for name, own in self._settings.items() if settings.get(name) != own]:
            raise InputError(
                f"{path} is of a run with another {' and '.join(wrong)}; remove it to sample again"
            )
        for name, array in expected.items():
            stored = arrays.get(name)
            if stored is None or stored.shape != array.shape or stored.dtype != array.dtype:
                raise InputError(
                    f"{path} holds no {name} {array.shape} of this run; remove it to sample again"
                )
        self.model.backbone.check_token_ids(arrays["token_ids"])
        return arrays


def _shards() -> tuple[int, int]:
    """Returns in how many parts processes sample, and the number of this one's."""
    plan = current()
    # Under `keras.distribution` all processes run one program, and call a model alike.
    if plan is None or keras.distribution.distribution() is not None:
        return 1, 0
    return plan.engine.shards, plan.engine.shard


class _Sampling(keras.callbacks.Callback):
    def __init__(self, rollouts: Rollouts):
        super().__init__()
        self.rollouts = rollouts

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.rollouts.sample(epoch)


def _ids(model: Any, record: Mapping[str, Any], length: int) -> list[int]:
    """Returns the token ids of a prompt, without its beginning if it is too long."""
    if not isinstance(record, Mapping):
        raise InputError(f"a record is {type(record).__name__}; give a dictionary with a prompt")
    if clash := record.keys() & {"prompts", "completions"}:
        raise InputError(f"a record has {clash.pop()!r}, an argument of the reward function")
    prompt = record.get("prompt")
    if isinstance(prompt, str) and prompt:
        taken = model.preprocessor.generate_preprocess([prompt], sequence_length=2**20)
    elif isinstance(prompt, list) and prompt:
        taken = chat_prompts(model.preprocessor, [prompt])
    else:
        raise InputError(
            f"a record has {type(prompt).__name__} as 'prompt'; give a text or a list of messages"
        )
    ids = np.asarray(taken["token_ids"])[0][np.asarray(taken["padding_mask"])[0].astype(bool)]
    return [int(one) for one in ids[-length:]]


def _within(timeout: float | None, call: Callable[[], Any]) -> Any:
    """Returns the result of a user's function, called in a thread that may be left behind."""
    result: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            result.append(call())
        except (Exception, SystemExit) as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout)
    if thread.is_alive():
        raise InputError(f"the reward function took longer than {timeout:g} s; raise the limit")
    if errors:
        kind = type(errors[0]).__name__
        raise InputError(f"the reward function raised {kind}: {errors[0]}") from errors[0]
    return result[0]
