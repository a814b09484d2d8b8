"""Rotary position embeddings of decoders; YaRN and Llama 3's scaling stretch slow channels."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Self

import numpy as np

from kmodels.core.errors import InputError


def check_alone(config: Any, scaling: str, *factors: str) -> None:
    """Raises `InputError` for factors other than 1 while the field `scaling` is in use."""
    for name in factors:
        if (factor := getattr(config, name)) != 1.0:
            raise InputError(f"{scaling} and {name}={factor} exclude each other; leave one out")


@dataclass(frozen=True)
class Yarn:
    """YaRN's settings, with transformers' names.

    Args:
        factor: how many times longer the context becomes.
        original_max_position_embeddings: length of the context before, in tokens.
        beta_fast: channels that turn more often than this within the original context stay.
        beta_slow: channels that turn less often than this are stretched by `factor`.
        attention_factor: multiplies rotated queries and keys; None for 0.1 ln(factor) + 1.
        truncate: round the range of channels in between to whole numbers.

    Raises:
        InputError: for an unknown name or a number out of range.

    Source: https://arxiv.org/abs/2309.00071
    """

    factor: float
    original_max_position_embeddings: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        positive = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
        for name in (*positive, "attention_factor"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and 0 < value < math.inf
            if not is_number and not (value is None and name == "attention_factor"):
                raise InputError(f"YaRN's {name} is {value!r}; give a positive number")

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        """Makes one of a dictionary."""
        names = [field.name for field in fields(cls)]
        unknown = sorted(set(settings) - set(names))
        missing = [name for name in names[:2] if name not in settings]
        if unknown or missing:
            raise InputError(
                f"YaRN got {', '.join(settings) or 'nothing'}; give {' and '.join(names[:2])}, "
                f"and if needed {', '.join(names[2:])}"
            )
        return cls(**settings)

    @property
    def query_scale(self) -> float:
        """Factor of the attention scores, since queries and keys are both multiplied."""
        factor = self.attention_factor
        if factor is None:
            factor = 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0
        return factor**2

    def divisors(self, head_dim: int, wavelength: float) -> tuple[float, ...]:
        """Returns a divisor of the positions for each of the H / 2 pairs of channels."""
        pairs = head_dim // 2
        low, high = (
            self._channel(head_dim, wavelength, b) for b in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        width = high - low or 0.001
        stretched = [min(max((i - low) / width, 0.0), 1.0) for i in range(pairs)]
        return tuple(1.0 / (share / self.factor + 1.0 - share) for share in stretched)

    def _channel(self, head_dim: int, wavelength: float, turns: float) -> float:
        """Returns the channel that makes so many turns within the original context."""
        length = self.original_max_position_embeddings
        return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(wavelength))


@dataclass(frozen=True)
class Llama3Scaling:
    """Rotary scaling of Llama 3.1, with transformers' names.

    The defaults are those of llama.cpp's converter, and of the published models.

    Args:
        factor: divides the positions of slow channels.
        low_freq_factor: channels that turn less often than this within the original context are
            slow.
        high_freq_factor: channels that turn more often than this keep their positions. In between
            1 / divisor grows linearly with the number of turns.
        original_max_position_embeddings: length of the original context, in tokens.

    Source: Transformers' `modeling_rope_utils`.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def divisors(self, head_dim: int, wavelength: float) -> tuple[float, ...]:
        """Returns a divisor of the positions for each of the H / 2 pairs of channels."""
        turns = self._turns(head_dim, wavelength, self.original_max_position_embeddings)
        width = self.high_freq_factor - self.low_freq_factor
        fast = np.clip((turns - self.low_freq_factor) / width, 0.0, 1.0)
        return tuple((1.0 / ((1.0 - fast) / self.factor + fast)).tolist())

    @classmethod
    def of_divisors(
        cls, divisors: np.ndarray, wavelength: float, length: int | None
    ) -> Self | None:
        """Returns the scaling with these divisors (H / 2,), or None if there is none.

        If the default factors fit, they take precedence.
        """
        head_dim, factor = 2 * len(divisors), round(float(divisors.max()), 6)
        length = cls.original_max_position_embeddings if length is None else int(length)
        turns = cls._turns(head_dim, wavelength, length)
        ends = [(cls.low_freq_factor, cls.high_freq_factor)]
        fast = (1 / divisors - 1 / factor) / max(1 - 1 / factor, 1e-6)
        between = (fast > 1e-5) & (fast < 1 - 1e-5)
        if between.sum() > 1:
            slope, offset = np.polyfit(turns[between], fast[between], 1)
            ends.append((round(-offset / slope, 4), round((1 - offset) / slope, 4)))
        for low, high in ends:
            scaling = cls(factor, low, high, length)
            if 0 < low < high and np.allclose(
                scaling.divisors(head_dim, wavelength), divisors, rtol=1e-4
            ):
                return scaling
        return None

    @staticmethod
    def _turns(head_dim: int, wavelength: float, length: int) -> np.ndarray:
        pairs = np.arange(head_dim // 2) * 2 / head_dim
        return length / (2 * math.pi * wavelength**pairs)


class Rope(NamedTuple):
    """A rotary position embedding.

    Attributes:
        base: base of the geometric series of wavelengths.
        scaling: divides the positions.
        yarn: arguments of `Yarn`, or None.
        llama3: the scaling of Llama 3.1, or None.
    """

    base: float
    scaling: float
    yarn: Mapping[str, Any] | None
    llama3: Llama3Scaling | None = None

    def divisors(self, head_dim: int) -> float | tuple[float, ...]:
        """Returns the divisor of the positions, or one for each of the H / 2 pairs of channels."""
        stretched = self.llama3 if self.yarn is None else Yarn.of(self.yarn)
        return self.scaling if stretched is None else stretched.divisors(head_dim, self.base)

    @property
    def query_scale(self) -> float:
        """Factor of the attention scores."""
        return 1.0 if self.yarn is None else Yarn.of(self.yarn).query_scale
