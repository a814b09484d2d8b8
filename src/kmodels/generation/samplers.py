"""The samplers by keras-hub's names, with its arguments and defaults."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import keras
import numpy as np
from keras import ops

from kmodels.core.errors import InputError, check_number, check_whole
from kmodels.core.types import Tensor, Tree
from kmodels.generation.sampler import Sampler, SamplerRows

register = keras.saving.register_keras_serializable(package="kmodels")


@register
class GreedySampler(Sampler):
    """The most likely token.

    Args:
        temperature: taken as keras-hub does; it changes nothing.
    """

    def __init__(self, temperature: float = 1.0):
        super().__init__(temperature=temperature)

    @property
    def greedy(self) -> bool:
        """True."""
        return True


@register
class RandomSampler(Sampler):
    """A draw from the whole distribution.

    Args:
        seed: as of `Sampler`.
        temperature: divisor of the logits.
    """

    def __init__(self, seed: int | None = None, temperature: float = 1.0):
        super().__init__(temperature=temperature, seed=seed)


@register
class TopKSampler(Sampler):
    """A draw from the k most likely tokens.

    Args:
        k: how many.
        seed: as of `Sampler`.
        temperature: divisor of the logits.
    """

    def __init__(self, k: int = 5, seed: int | None = None, temperature: float = 1.0):
        super().__init__(temperature=temperature, top_k=k, seed=seed)

    @property
    def k(self) -> int | None:
        """The number of tokens that are kept."""
        return self.top_k


@register
class TopPSampler(Sampler):
    """A draw from the fewest most likely tokens whose probabilities reach p.

    Args:
        p: the share.
        k: keeps the k most likely tokens first.
        seed: as of `Sampler`.
        temperature: divisor of the logits.
    """

    def __init__(
        self,
        p: float = 0.1,
        k: int | None = None,
        seed: int | None = None,
        temperature: float = 1.0,
    ):
        super().__init__(temperature=temperature, top_k=k, top_p=p, seed=seed)

    @property
    def p(self) -> float | None:
        """The share of the probability that is kept."""
        return self.top_p

    @property
    def k(self) -> int | None:
        """The number of tokens that are kept first."""
        return self.top_k


@register
class BeamSampler(Sampler):
    """Beam search: of all continuations of the kept texts the most likely ones are kept.

    Args:
        num_beams: texts that are kept of each prompt.
        return_all_beams: the protocol of keras-hub (`__call__`) then gives all of them,
            (B, num_beams, T), and their log probabilities.
        temperature: divisor of the logits.
        length_penalty: in `generate` the log probability of a text is divided by its number of new
            tokens to this power, as in transformers.
    """

    def __init__(
        self,
        num_beams: int = 5,
        return_all_beams: bool = False,
        temperature: float = 1.0,
        length_penalty: float = 1.0,
    ):
        check_whole("num_beams", num_beams)
        check_number("length_penalty", length_penalty, least=-20, most=20)
        super().__init__(temperature=temperature)
        self.num_beams = num_beams
        self.return_all_beams = return_all_beams
        self.length_penalty = length_penalty

    __eq__, __hash__ = object.__eq__, object.__hash__  # type: ignore[assignment]

    def choose(self, logits: Tensor, history: Tensor | None, draws: Tensor) -> Any:
        """Returns log probabilities of each row's best tokens, and the tokens: twice (B, 2 n)."""
        del history, draws
        likely = ops.log_softmax(self.divided(logits), axis=-1)
        return tuple(ops.top_k(likely, min(2 * self.num_beams, likely.shape[-1]), sorted=True))

    def __call__(
        self,
        next: Callable[..., Any],
        prompt: Tensor,
        cache: Tree = None,
        index: int = 0,
        mask: Tensor | None = None,
        stop_token_ids: Collection[int] | None = None,
        hidden_states: Tensor | None = None,
        model: keras.Model | None = None,
    ) -> Any:
        """Same as `Sampler.__call__`; the beams of a row are adjacent."""
        rows, beams = SamplerRows(prompt, mask, stop_token_ids), self.num_beams
        batch = len(rows.ids)
        rows.take(np.repeat(np.arange(batch), beams))
        cache = _repeated(cache, beams)
        total = np.full((batch, beams), -1e9)
        total[:, 0] = 0.0
        for at in range(int(index), rows.length):
            if rows.done():
                break
            logits, _, cache = next(rows.tensor(), cache, at)
            likely = ops.log(self.compute_probabilities(logits))
            likely = np.asarray(ops.convert_to_numpy(likely))
            # One row of logits stands for all, as in keras-hub.
            likely = np.broadcast_to(likely, (batch * beams, likely.shape[-1]))
            likely = likely.reshape(batch, beams, -1)
            # A token that stays is not a choice: each beam continues with it.
            stays = rows.fixed[:, at].reshape(batch, beams)[:, :1]
            scores = (total[:, :, None] + likely).reshape(batch, -1)
            best = np.argsort(-scores, axis=1, kind="stable")[:, :beams]
            total = np.where(stays, total, np.take_along_axis(scores, best, 1))
            source = np.where(stays, np.arange(beams), best // likely.shape[-1])
            order = (np.arange(batch)[:, None] * beams + source).reshape(-1)
            rows.take(order)
            cache = _taken(cache, order)
            rows.write(at, (best % likely.shape[-1]).reshape(-1))
        best = np.argsort(-total, axis=1, kind="stable")
        texts = np.take_along_axis(rows.ids.reshape(batch, beams, -1), best[:, :, None], 1)
        if self.return_all_beams:
            likely = np.take_along_axis(total, best, 1).astype("float32")
            return ops.convert_to_tensor(texts), ops.convert_to_tensor(likely)
        return ops.convert_to_tensor(texts[:, 0])


@register
class ContrastiveSampler(Sampler):
    """Contrastive search: of the k most likely tokens, the one least similar to the text so far.

    `generate` runs it with `call_with_cache`, step by step and not compiled.

    Args:
        k: tokens to choose from.
        alpha: weight of the similarity; the probability has weight 1 - alpha.
        temperature: divisor of the logits.

    Source:
        Su et al., arXiv:2202.06417.
    """

    def __init__(self, k: int = 5, alpha: float = 0.6, temperature: float = 1.0):
        check_number("alpha", alpha, least=0, most=1)
        super().__init__(temperature=temperature, top_k=k)
        self.alpha = alpha

    __eq__, __hash__ = object.__eq__, object.__hash__  # type: ignore[assignment]

    @property
    def greedy(self) -> bool:
        """True: nothing is drawn."""
        return True

    @property
    def k(self) -> int:
        """The number of tokens that are tried."""
        return self.top_k or 1

    def __call__(
        self,
        next: Callable[..., Any],
        prompt: Tensor,
        cache: Tree = None,
        index: int = 0,
        mask: Tensor | None = None,
        stop_token_ids: Collection[int] | None = None,
        hidden_states: Tensor | None = None,
        model: keras.Model | None = None,
    ) -> Any:
        """Same as `Sampler.__call__`, with contrastive search.

        `next` is called for the token at `index - 1` first; `hidden_states` (B, T, D) are those of
        the tokens before `index`.

        Raises:
            InputError: without hidden states.
        """
        if hidden_states is None:
            raise InputError("ContrastiveSampler compares hidden states; give hidden_states")
        seen = np.array(ops.convert_to_numpy(hidden_states)).astype("float32")
        rows, index = SamplerRows(prompt, mask, stop_token_ids), int(index)
        logits, _, cache = next(rows.tensor(), cache, index)
        batch, k = len(rows.ids), min(self.k, logits.shape[-1])
        for at in range(index, rows.length):
            if rows.done():
                break
            likely, tokens = ops.top_k(self.compute_probabilities(logits), k)
            likely = np.asarray(ops.convert_to_numpy(likely))
            tried = SamplerRows(rows.ids, rows.fixed, None)
            tried.take(np.repeat(np.arange(batch), k))
            tried.write(at, np.asarray(ops.convert_to_numpy(tokens)).reshape(-1))
            after, hidden, beams = next(tried.tensor(), _repeated(cache, k), at + 1)
            hidden = np.asarray(ops.convert_to_numpy(hidden)).astype("float32")
            likeness = _likeness(seen[:, :at], hidden.reshape(batch, k, -1))
            best = np.argmax((1 - self.alpha) * likely - self.alpha * likeness, axis=1)
            order = np.arange(batch) * k + best
            tried.take(order)
            rows.ids = tried.ids
            seen[:, at] = hidden[order]
            cache, logits = _taken(beams, order), _taken(after, order)
        return rows.tensor()


def _likeness(before: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Returns the largest cosine (B, K) of (B, K, D) with any of (B, T, D); -1 if T is 0."""
    lengths = np.linalg.norm(new, axis=-1)[:, :, None] * np.linalg.norm(before, axis=-1)[:, None]
    cosines = np.einsum("bkd,btd->bkt", new, before) / np.maximum(lengths, 1e-9)
    return cosines.max(-1, initial=-1.0)


def _repeated(tensors: Tree, times: int) -> Any:
    if tensors is None:
        return None
    return keras.tree.map_structure(lambda x: ops.repeat(x, times, axis=0), tensors)


def _taken(tensors: Tree, order: np.ndarray) -> Any:
    if tensors is None:
        return None
    rows = ops.convert_to_tensor(order.astype("int32"))
    return keras.tree.map_structure(lambda x: ops.take(x, rows, axis=0), tensors)


NAMED = {
    "greedy": GreedySampler,
    "random": RandomSampler,
    "top_k": TopKSampler,
    "top_p": TopPSampler,
    "beam": BeamSampler,
    "contrastive": ContrastiveSampler,
}


def serialize(sampler: Sampler) -> Any:
    """Returns the sampler as plain values."""
    return keras.saving.serialize_keras_object(sampler)


def deserialize(
    config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
) -> Sampler:
    """Returns the sampler of `serialize`, or of a name."""
    if isinstance(config, str):
        return get(config)
    return keras.saving.deserialize_keras_object(config, custom_objects=custom_objects)


def get(identifier: str | Mapping[str, Any] | Sampler) -> Sampler:
    """Returns the sampler of a name (keras-hub's defaults), of a serialized one, or itself.

    Raises:
        InputError: for anything else.
    """
    if isinstance(identifier, Sampler):
        return identifier
    sampler = deserialize(identifier) if isinstance(identifier, dict) else None
    if isinstance(sampler, Sampler):
        return sampler
    if not isinstance(identifier, str) or identifier not in NAMED:
        raise InputError(
            f"sampler is {identifier!r}; give one of {', '.join(NAMED)}, or a "
            "kmodels.generation.Sampler"
        )
    return NAMED[identifier]()
