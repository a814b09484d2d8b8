"""The base of samplers, which choose the next token."""

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from typing import Any, Self

import keras
import numpy as np
from keras import ops

from kmodels.core import keras_internals
from kmodels.core.arguments import Checked
from kmodels.core.errors import InputError, check_names, check_number, check_whole
from kmodels.core.types import Tensor, Tree

# Far below any logit, yet finite: what is left out gets probability 0 without NaN.
OUT = -1e30
# Settings that leave tokens out of a draw, and the values at which they leave out none.
FILTERS = {"top_k": None, "top_p": 1.0, "min_p": 0.0}
# Factors of logits that float32 computes with; beyond them probabilities become NaN.
FACTORS: dict[str, Any] = {"least": 1e-20, "most": 1e20}


@keras.saving.register_keras_serializable(package="kmodels")
@dataclass(unsafe_hash=True)
class Sampler(Checked):
    """Greedy choice, or a draw from the filtered distribution.

    The steps are Transformers': repetition penalty, temperature, top-k, top-p, min-p. A draw uses
    one number in [0, 1) per row from NumPy's Philox generator, so equal logits give equal tokens on
    every backend. A class of your own may have `get_next_token(probabilities)` instead, (B, V) to
    (B,), as in keras-hub.

    Args:
        temperature: 0 for the most likely token (greedy), else the divisor of the logits.
        top_k: keeps the k most likely tokens.
        top_p: keeps the fewest most likely tokens whose probabilities reach p.
        min_p: keeps tokens with at least p times the probability of the most likely one; 0 for all.
        repetition_penalty: divides positive, multiplies negative logits of tokens that the row
            holds already.
        seed: seed of the draws, which continue from call to call and start over with a new sampler;
            by default they continue from `keras.utils.set_random_seed`, or from a random seed in
            each process if that was not called.

    Raises:
        InputError: for values out of range, or a greedy choice among tokens that a setting filters.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.temperature != 0:
            check_number("temperature", self.temperature, **FACTORS, more="0 (greedy), or ")
        if self.seed is not None:
            check_whole("seed", self.seed, 0)
        if self.top_k is not None:
            check_whole("top_k", self.top_k)
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise InputError(f"top_p is {self.top_p}; give a share in (0, 1], or None")
        if self.min_p is not None and not 0.0 <= self.min_p <= 1.0:
            raise InputError(f"min_p is {self.min_p}; give a share in [0, 1], or None")
        if self.repetition_penalty is not None:
            check_number("repetition_penalty", self.repetition_penalty, **FACTORS)
        filters = [name for name in FILTERS if getattr(self, name) not in (None, FILTERS[name])]
        if self.temperature == 0 and filters and self.adjustable:
            raise InputError(
                f"temperature is 0 (greedy), at which {' and '.join(filters)} would have no "
                "effect; give another temperature, or 0 alone"
            )
        self._calls = 0

    @property
    def greedy(self) -> bool:
        """True if nothing is drawn."""
        return self.temperature == 0

    @property
    def looks_back(self) -> bool:
        """True if the choice depends on the tokens that a row holds."""
        return self.repetition_penalty not in (None, 1.0)

    def stream(self) -> np.random.Generator:
        """Returns the numbers of one call of `generate`, other ones in each call."""
        seed, number = self.seed, 0
        if seed is not None:
            number, self._calls = self._calls, self._calls + 1
        elif not self.greedy:
            seed, number = (
                keras_internals.random_seed(),
                keras_internals.count_since_seed("generate"),
            )
        sequence = np.random.SeedSequence(seed, spawn_key=(number,))
        return np.random.Generator(np.random.Philox(sequence))

    def changed(self, **changes: Any) -> "Sampler":
        """Returns the sampler with other settings for one call of `generate`.

        Draws continue from this sampler unless a seed is given. A setting that chooses among tokens
        has a greedy sampler draw, and a temperature of 0 replaces all such settings.

        Args:
            **changes: arguments of `Sampler`; those that are None stay as they are.

        Raises:
            InputError: as `Sampler`, or for a sampler that has its own way to choose.
        """
        check_names("Sampler", changes, [field.name for field in fields(Sampler)])
        changes = {name: value for name, value in changes.items() if value is not None}
        if not changes:
            return self
        if not self.adjustable:
            raise InputError(
                f"{type(self).__name__} does not support {', '.join(changes)}; leave them out, or "
                "compile a kmodels.generation.Sampler"
            )
        settings = {field.name: getattr(self, field.name) for field in fields(Sampler)}
        if self.greedy:
            settings["temperature"] = 0.0 if changes.keys().isdisjoint(FILTERS) else 1.0
        if changes.get("temperature") == 0:
            settings |= dict.fromkeys(FILTERS)
        sampler = Sampler(**settings | changes)
        if "seed" not in changes and self.seed is not None:
            sampler._calls, self._calls = self._calls, self._calls + 1
        return sampler

    @property
    def adjustable(self) -> bool:
        """True if the class chooses tokens as `Sampler` does, by its arguments alone."""
        cls = type(self)
        own = cls.choose is not Sampler.choose or cls.__call__ is not Sampler.__call__
        return not own and not hasattr(self, "get_next_token")

    def divided(self, logits: Tensor) -> Any:
        """Returns the logits divided by the temperature, float32.

        Raises:
            InputError: for a temperature of 0.
        """
        if self.temperature == 0:
            raise InputError(
                f"temperature is 0, and {type(self).__name__} divides by it; give a positive "
                "number, or use the sampler 'greedy'"
            )
        return ops.cast(logits, "float32") / self.temperature

    def compute_probabilities(self, logits: Tensor) -> Any:
        """Returns the softmax of the logits divided by the temperature, float32."""
        return ops.softmax(self.divided(logits), axis=-1)

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
        """Fills rows of token ids with keras-hub's protocol, one token after the other.

        `generate` does the same in compiled steps; this is for a `next` of your own.

        Args:
            next: (prompt, cache, index) -> (logits (B, V), hidden states, cache).
            prompt: (B, T) int; tokens from `index` on are overwritten.
            cache: any object that `next` takes and returns.
            index: number of the first token to choose.
            mask: (B, T) bool, True for tokens that stay; none by default.
            stop_token_ids: the loop ends when each row has one of them.
            hidden_states: not used here.
            model: not used.

        Returns:
            (B, T) int.
        """
        rows, stream = SamplerRows(prompt, mask, stop_token_ids), self.stream()
        for at in range(int(index), rows.length):
            if rows.done():
                break
            logits, _, cache = next(rows.tensor(), cache, at)
            draws = ops.convert_to_tensor(stream.random(len(rows.ids), "float32"))
            history = ops.convert_to_tensor(rows.ids[:, : max(at, 1)])
            rows.write(at, self.choose(ops.cast(logits, "float32"), history, draws))
        return rows.tensor()

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the class, as far as they are attributes."""
        parameters = inspect.signature(type(self).__init__).parameters.values()
        names = [parameter.name for parameter in parameters if hasattr(self, parameter.name)]
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            names += [field.name for field in fields(Sampler)]
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Returns the sampler of `get_config`."""
        return cls(**config)

    def choose(self, logits: Tensor, history: Tensor | None, draws: Tensor) -> Any:
        """Returns the next token of each row.

        Args:
            logits: (B, V) float32.
            history: (B, S) int, the tokens each row holds, repeats allowed; None unless the
                sampler `looks_back`.
            draws: (B,) float32 in [0, 1).

        Returns:
            (B,) int32.
        """
        if (own := getattr(self, "get_next_token", None)) is not None:
            return ops.cast(own(self.compute_probabilities(logits)), "int32")
        if self.looks_back:
            logits = _penalise(logits, history, self.repetition_penalty)
        if self.greedy:
            return ops.cast(ops.argmax(logits, axis=-1), "int32")
        logits = logits / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            lowest = ops.top_k(logits, self.top_k, sorted=True)[0][:, -1:]
            logits = ops.where(logits < lowest, OUT, logits)
        if self.top_p is not None and self.top_p < 1.0:
            logits = ops.where(logits < _nucleus(logits, self.top_p), OUT, logits)
        if self.min_p:
            lowest = ops.max(logits, axis=-1, keepdims=True) + float(np.log(self.min_p))
            logits = ops.where(logits < lowest, OUT, logits)
        reached = ops.cumsum(ops.softmax(logits, axis=-1), axis=-1)
        # The share of all that was kept, so that rounding cannot push a draw beyond the last token.
        goal = ops.expand_dims(draws, -1) * reached[:, -1:]
        return ops.cast(ops.argmax(ops.cast(reached > goal, "int32"), axis=-1), "int32")


def _penalise(logits: Tensor, history: Any, penalty: float | None) -> Any:
    batch, length = ops.shape(history)
    seen = ops.take_along_axis(logits, history, axis=1)
    changed = ops.where(seen > 0, seen / penalty, seen * penalty)
    rows = ops.broadcast_to(ops.arange(batch, dtype="int32")[:, None], (batch, length))
    at = ops.stack([ops.reshape(rows, (-1,)), ops.reshape(ops.cast(history, "int32"), (-1,))], 1)
    return ops.scatter_update(logits, at, ops.reshape(changed, (-1,)))


def _nucleus(logits: Tensor, share: float) -> Any:
    """Returns the smallest logit that is kept, (B, 1)."""
    ordered = ops.flip(ops.sort(logits, axis=-1), axis=-1)
    before = ops.cumsum(ops.softmax(ordered, axis=-1), axis=-1) - ops.softmax(ordered, axis=-1)
    share = max(share, 1e-30)  # A smaller one is 0 in float32, which would keep no token.
    return ops.min(ops.where(before < share, ordered, -OUT), axis=-1, keepdims=True)


class SamplerRows:
    """Token ids (B, T) that a sampler fills on the host.

    Tokens where `mask` (B, T) is True stay; an id of `stop` ends a row.
    """

    def __init__(self, prompt: Tensor, mask: Tensor | None, stop: Collection[int] | None):
        self.ids = np.array(ops.convert_to_numpy(prompt)).astype("int32")
        self.fixed = np.zeros(self.ids.shape, "bool")
        if mask is not None:
            self.fixed = np.array(ops.convert_to_numpy(mask)).astype("bool")
        self.stop = None if stop is None else list(stop)
        self.length = self.ids.shape[1]

    def done(self) -> bool:
        """Returns True if each row has a new token that ends it."""
        if self.stop is None:
            return False
        return bool((np.isin(self.ids, self.stop) & ~self.fixed).any(1).all())

    def write(self, at: int, tokens: Tensor) -> None:
        """Writes (B,) tokens to a column, except in rows that the mask protects."""
        tokens = np.asarray(ops.convert_to_numpy(tokens))
        self.ids[:, at] = np.where(self.fixed[:, at], self.ids[:, at], tokens)

    def take(self, order: np.ndarray) -> None:
        """Replaces row i by row `order[i]`."""
        self.ids, self.fixed = self.ids[order], self.fixed[order]

    def tensor(self) -> Any:
        """Returns the ids, (B, T) int32."""
        return ops.convert_to_tensor(self.ids)
