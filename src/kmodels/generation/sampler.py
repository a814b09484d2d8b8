"""How the next token is chosen."""

from dataclasses import asdict, dataclass
from typing import Any, Self

import keras
import numpy as np
from keras import ops

from kmodels import compat
from kmodels.errors import InputError

# Far below any logit, yet finite: what is left out gets probability 0 without NaN.
OUT = -1e30


@keras.saving.register_keras_serializable(package="kmodels")
@dataclass(frozen=True)
class Sampler:
    """Greedy choice, or a draw from the filtered distribution.

    The steps are Transformers': repetition penalty, temperature, top-k, top-p, min-p. A draw uses
    one number in [0, 1) per row from NumPy's Philox generator, so equal logits give equal tokens on
    every backend.

    Args:
        temperature: 0 for the most likely token (greedy), else what logits are divided by.
        top_k: keeps the k most likely tokens.
        top_p: keeps the fewest most likely tokens whose probabilities reach p.
        min_p: keeps tokens with at least p times the probability of the most likely one.
        repetition_penalty: divides positive, multiplies negative logits of tokens that the row
            holds already.
        seed: of the draws; `keras.utils.set_random_seed`'s by default, or a new one.

    Raises:
        InputError: for values out of range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise InputError(f"temperature is {self.temperature}; give 0 (greedy) or more")
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"top_k is {self.top_k}; give at least 1, or None")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value <= 1.0:
                raise InputError(f"{name} is {value}; give a share in (0, 1], or None")
        if self.repetition_penalty is not None and not self.repetition_penalty > 0:
            raise InputError(
                f"repetition_penalty is {self.repetition_penalty}; give a positive number, or None"
            )

    def get_config(self) -> dict[str, Any]:
        """The arguments, which a `.keras` file keeps."""
        return asdict(self)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """The sampler of `get_config`."""
        return cls(**config)

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0

    @property
    def looks_back(self) -> bool:
        """Whether the choice depends on the tokens that a row holds."""
        return self.repetition_penalty not in (None, 1.0)

    def stream(self) -> np.random.Generator:
        """The numbers of one call of `generate`."""
        seed = compat.random_seed() if self.seed is None else self.seed
        return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed)))

    def choose(self, logits: Any, history: Any, draws: Any) -> Any:
        """The next token of each row.

        Args:
            logits: (B, V) float32.
            history: (B, S) int, the tokens each row holds, repeats allowed; None unless the
                sampler `looks_back`.
            draws: (B,) float32 in [0, 1).

        Returns:
            (B,) int32.
        """
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
        if self.min_p is not None:
            lowest = ops.max(logits, axis=-1, keepdims=True) + float(np.log(self.min_p))
            logits = ops.where(logits < lowest, OUT, logits)
        reached = ops.cumsum(ops.softmax(logits, axis=-1), axis=-1)
        # The share of all that was kept, so that rounding cannot push a draw beyond the last token.
        goal = ops.expand_dims(draws, -1) * reached[:, -1:]
        return ops.cast(ops.argmax(ops.cast(reached > goal, "int32"), axis=-1), "int32")


def _penalise(logits: Any, history: Any, penalty: float | None) -> Any:
    batch, length = ops.shape(history)
    found = ops.take_along_axis(logits, history, axis=1)
    changed = ops.where(found > 0, found / penalty, found * penalty)
    rows = ops.broadcast_to(ops.arange(batch, dtype="int32")[:, None], (batch, length))
    at = ops.stack([ops.reshape(rows, (-1,)), ops.reshape(ops.cast(history, "int32"), (-1,))], 1)
    return ops.scatter_update(logits, at, ops.reshape(changed, (-1,)))


def _nucleus(logits: Any, share: float) -> Any:
    """The smallest logit that is kept, (B, 1)."""
    ordered = ops.flip(ops.sort(logits, axis=-1), axis=-1)
    before = ops.cumsum(ops.softmax(ordered, axis=-1), axis=-1) - ops.softmax(ordered, axis=-1)
    return ops.min(ops.where(before < share, ordered, -OUT), axis=-1, keepdims=True)


NAMED = {
    "greedy": Sampler(temperature=0.0),
    "random": Sampler(),
    "top_k": Sampler(top_k=5),
    "top_p": Sampler(top_p=0.1),
}


def get(sampler: "str | Sampler") -> Sampler:
    """The sampler of a name, with keras-hub's defaults, or itself.

    Raises:
        InputError: for an unknown name.
    """
    if isinstance(sampler, Sampler):
        return sampler
    if sampler not in NAMED:
        raise InputError(
            f"sampler is {sampler!r}; give one of {', '.join(NAMED)}, or a "
            "kmodels.generation.Sampler"
        )
    return NAMED[sampler]
