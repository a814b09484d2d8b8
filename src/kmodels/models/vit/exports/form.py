"""A model of transformers that a ViT can be written as."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kmodels.models.vit.config import ViTConfig
from kmodels.models.vit.exports.traits import Settings, lacking, unusual
from kmodels.weights import Rule


@dataclass(frozen=True)
class Form:
    """A model of transformers.

    Args:
        name: for messages.
        needs: what is unusual in the original ViT, and always there in this one.
        can: what may be there.
        heads: the pairs of pooling and head that it has.
        describe: (config, settings) to the fields of config.json that no other form has.
        table: (config, settings) to the rules.
        unbiased: parts that may have no bias; others get one of zeros.
        only: what else a config must be, where two models of transformers are alike.
        setting: a setting of the task that alone this one has; None for none.
    """

    name: str
    needs: frozenset[str]
    can: frozenset[str]
    heads: frozenset[tuple[str | None, str]]
    describe: Callable[[ViTConfig, Settings], dict[str, Any]]
    table: Callable[[ViTConfig, Settings], list[Rule]]
    unbiased: frozenset[str] = frozenset()
    only: Callable[[ViTConfig], bool] = lambda config: True
    setting: str | None = None

    def unsupported_out(self, config: ViTConfig, settings: Settings) -> list[str]:
        """Returns what a model has that this one cannot express."""
        return lacking(config, settings, self.needs | self.can, self.heads)

    def suits(self, config: ViTConfig, settings: Settings) -> bool:
        """Returns whether this is the model."""
        return (
            (self.setting is None or self.setting in settings)
            and self.only(config)
            and self.needs.issubset(unusual(config, settings))
            and not self.unsupported_out(config, settings)
        )
