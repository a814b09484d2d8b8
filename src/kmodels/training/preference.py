"""Losses of preference tuning and of policy gradients, as functions of log-probabilities.

They are plain `keras.ops`, so they work in eager mode, in `jax.jit` and in `tf.function`. The
formulas are those of the papers; the numbers equal those of TRL 1.16, see
`tests/loop/training/test_preference.py`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from keras import ops

from kmodels.core.arguments import Checked
from kmodels.core.errors import (
    InputError,
    check_choice,
    check_number,
    check_whole,
    pluralize,
    same_shape,
)
from kmodels.core.types import Tensor

# exp(80) is about 5e34: finite in float32 and bfloat16, also times an advantage or beta.
_MAX_EXPONENT = 80.0
# The smallest distance of a mean log-probability from zero: float32's epsilon.
_EPSILON = 1.2e-7


class PreferenceResult(NamedTuple):
    """The result of `PreferenceLoss`.

    Attributes:
        loss: float32 (pairs,).
        chosen_reward: float32 (pairs,), beta times the log-ratio of the chosen answer, detached.
        rejected_reward: float32 (pairs,), of the rejected answer.
    """

    loss: Any
    chosen_reward: Any
    rejected_reward: Any


class KTOResult(NamedTuple):
    """The result of `KTOLoss`.

    Attributes:
        loss: float32 (rows,).
        reward: float32 (rows,), beta times the log-ratio, detached.
    """

    loss: Any
    reward: Any


# === Formulas: c and r are the scores of the chosen and the rejected answers ===


def _log_loss(loss: "PreferenceLoss", logits: Any) -> Any:
    """Returns -log sigmoid(logits), with label smoothing as in cDPO."""
    smoothing = loss.label_smoothing
    return -(1 - smoothing) * ops.log_sigmoid(logits) - smoothing * ops.log_sigmoid(-logits)


def _sigmoid(loss: "PreferenceLoss", c: Any, r: Any) -> Any:
    return _log_loss(loss, loss.beta * (c - r))


def _hinge(loss: "PreferenceLoss", c: Any, r: Any) -> Any:
    return ops.relu(1 - loss.beta * (c - r))


def _ipo(loss: "PreferenceLoss", c: Any, r: Any) -> Any:
    return ops.square(c - r - 1 / (2 * loss.beta))


def _robust(loss: "PreferenceLoss", c: Any, r: Any) -> Any:
    logits, flipped = loss.beta * (c - r), loss.label_smoothing
    unbiased = flipped * ops.log_sigmoid(-logits) - (1 - flipped) * ops.log_sigmoid(logits)
    return unbiased / (1 - 2 * flipped)


def _exo_pair(loss: "PreferenceLoss", c: Any, r: Any) -> Any:
    logits, smoothing = loss.beta * (c - r), loss.label_smoothing
    chosen = ops.log_sigmoid(logits) - math.log1p(-smoothing)
    rejected = ops.log_sigmoid(-logits) - math.log(smoothing)
    return ops.sigmoid(logits) * chosen + ops.sigmoid(-logits) * rejected


def _nca_pair(loss: "PreferenceLoss", c: Any, r: Any) -> Any:
    c, r = loss.beta * c, loss.beta * r
    return -ops.log_sigmoid(c) - 0.5 * ops.log_sigmoid(-c) - 0.5 * ops.log_sigmoid(-r)


def _bco_pair(loss: "PreferenceLoss", c: Any, r: Any) -> Any:
    return -ops.log_sigmoid(loss.beta * c) - ops.log_sigmoid(-loss.beta * r)


def _sppo_hard(loss: "PreferenceLoss", c: Any, r: Any) -> Any:
    return ops.square(c - 0.5 / loss.beta) + ops.square(r + 0.5 / loss.beta)


def _apo_zero(loss: "PreferenceLoss", c: Any, r: Any) -> Any:
    return ops.sigmoid(-loss.beta * c) + ops.sigmoid(loss.beta * r)


def _apo_down(loss: "PreferenceLoss", c: Any, r: Any) -> Any:
    return ops.sigmoid(loss.beta * c) + ops.sigmoid(loss.beta * (r - c))


def _discopop(loss: "PreferenceLoss", c: Any, r: Any) -> Any:
    logits = loss.beta * (c - r)
    scaled = logits / loss.discopop_tau
    # exp(-logits) * sigmoid(scaled), whose factors overflow and underflow.
    exponent = ops.minimum(ops.log_sigmoid(scaled) - logits, _MAX_EXPONENT)
    return ops.exp(exponent) - ops.sigmoid(-scaled) * ops.log_sigmoid(logits)


def _simpo(loss: "PreferenceLoss", c: Any, r: Any) -> Any:
    return _log_loss(loss, loss.beta * (c - r) - loss.margin)


def _orpo(loss: "PreferenceLoss", c: Any, r: Any) -> Any:
    return -loss.beta * ops.log_sigmoid(_log_odds(c) - _log_odds(r))


def _log_odds(log_prob: Any) -> Any:
    """Returns log(p / (1 - p)) of log p <= 0; finite at zero, with a finite gradient."""
    x = ops.minimum(log_prob, -_EPSILON)
    # Both branches are differentiated, so each gets only arguments at which it is exact.
    small, large = ops.minimum(x, -math.log(2)), ops.maximum(x, -math.log(2))
    log_rest = ops.where(x < -math.log(2), ops.log1p(-ops.exp(small)), ops.log(-ops.expm1(large)))
    return x - log_rest


@dataclass(frozen=True)
class Kind:
    """A row of `KINDS`.

    Attributes:
        formula: function of the loss and the scores of chosen and rejected answers, (pairs,).
        paper: its address.
        settings: settings that the kind uses, with their defaults.
        reference: True if a score is a log-ratio to a reference model.
        averaged: True if a score is divided by the number of tokens of the answer.
        sft_weight: default weight of the supervised part.
    """

    formula: Callable[["PreferenceLoss", Any, Any], Any]
    paper: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    reference: bool = True
    averaged: bool = False
    sft_weight: float = 0.0


# Settings of the kinds whose loss is a function of the difference of both scores.
_F: dict[str, Any] = {"f_divergence_type": "reverse_kl", "f_alpha_divergence_coef": 0.5}
_MARGIN: dict[str, Any] = {"length_normalized": False, **_F}

# sigmoid: -log s(b (c - r))                  hinge: max(0, 1 - b (c - r))
# ipo: (c - r - 1 / 2b)^2 per token           robust: ((1 - e) DPO(c, r) - e DPO(r, c)) / (1 - 2e)
# exo_pair: KL(s(b (c - r)) || 1 - e)         nca_pair: -log s(bc) - log s(-bc) / 2 - log s(-br) / 2
# bco_pair: -log s(bc) - log s(-br)           sppo_hard: (c - 1 / 2b)^2 + (r + 1 / 2b)^2
# apo_zero: s(-bc) + s(br)                    apo_down: s(bc) + s(b (r - c))
# discopop: DPO and exp(-b (c - r)), mixed by s(b (c - r) / tau)
# simpo: -log s(b (c - r) - margin) per token, no reference
# orpo: -b log s(log odds c - log odds r) per token, no reference, with the supervised part
# cpo: -log s(b (c - r)), no reference, with the supervised part
# c, r: scores of chosen and rejected; b: beta; e: label_smoothing; s: sigmoid.
KINDS: dict[str, Kind] = {
    "sigmoid": Kind(
        _sigmoid, "https://arxiv.org/abs/2305.18290", {"label_smoothing": 0.0, **_MARGIN}
    ),
    "hinge": Kind(_hinge, "https://arxiv.org/abs/2305.10425", _MARGIN),
    "ipo": Kind(_ipo, "https://arxiv.org/abs/2310.12036", _F, averaged=True),
    "robust": Kind(
        _robust, "https://arxiv.org/abs/2403.00409", {"label_smoothing": 0.0, **_MARGIN}
    ),
    "exo_pair": Kind(
        _exo_pair, "https://arxiv.org/abs/2402.00856", {"label_smoothing": 1e-3, **_MARGIN}
    ),
    "nca_pair": Kind(_nca_pair, "https://arxiv.org/abs/2402.05369"),
    "bco_pair": Kind(_bco_pair, "https://arxiv.org/abs/2404.04656"),
    "sppo_hard": Kind(_sppo_hard, "https://arxiv.org/abs/2405.00675"),
    "apo_zero": Kind(_apo_zero, "https://arxiv.org/abs/2408.06266"),
    "apo_down": Kind(_apo_down, "https://arxiv.org/abs/2408.06266"),
    "discopop": Kind(
        _discopop, "https://arxiv.org/abs/2406.08414", {"discopop_tau": 0.05, **_MARGIN}
    ),
    "simpo": Kind(
        _simpo,
        "https://arxiv.org/abs/2405.14734",
        {"label_smoothing": 0.0, "margin": 0.5, "alpha": 0.0},
        reference=False,
        averaged=True,
    ),
    "orpo": Kind(
        _orpo, "https://arxiv.org/abs/2403.07691", reference=False, averaged=True, sft_weight=1.0
    ),
    "cpo": Kind(
        _sigmoid,
        "https://arxiv.org/abs/2401.08417",
        {"label_smoothing": 0.0},
        reference=False,
        sft_weight=1.0,
    ),
}
_SORTS = "it sorts the batch, so a pair's loss depends on which pairs share its batch"
# Values with which a setting changes nothing, so that every kind accepts them.
_OFF = (None, 0, False, "reverse_kl")
# Names in TRL that are not kinds here.
_OTHERS = {
    "aot": _SORTS,
    "aot_unpaired": _SORTS,
    "aot_pair": _SORTS,
    "sft": "give any kind and sft_weight, or fine-tune on the chosen answers",
    "sigmoid_norm": "give 'sigmoid' and length_normalized=True",
    "alphapo": "give 'simpo' and alpha",
    "kto": "use KTOLoss, whose answers are not pairs",
    "apo_zero_unpaired": "use KTOLoss, whose answers are not pairs",
}

# f'(t) of a divergence's generator by log t, up to a constant that the difference cancels.
_DIVERGENCES: dict[str, Callable[["PreferenceLoss", Any], Any]] = {
    "reverse_kl": lambda loss, x: x,
    "forward_kl": lambda loss, x: 1 - ops.exp(ops.minimum(-x, _MAX_EXPONENT)),
    "js_divergence": lambda loss, x: math.log(2) + ops.log_sigmoid(x),
    "alpha_divergence": lambda loss, x: _power(x, loss.f_alpha_divergence_coef - 1),
}


def _power(log_x: Any, exponent: float) -> Any:
    """Returns (x^exponent - 1) / exponent, for exponent 0 its limit log x."""
    if abs(exponent) < 1e-6:
        return log_x
    return ops.expm1(ops.minimum(exponent * log_x, _MAX_EXPONENT)) / exponent


class PreferenceLoss(Checked):
    """Loss of preferred and rejected answers to the same prompt: DPO and its relatives.

    A score is the log-ratio of an answer, log p(answer) - log p_reference(answer); without a
    reference it is log p(answer). The table `KINDS` has formula, paper and settings of each kind.

    The supervised part is -sft_weight times the mean log-probability of the chosen answer's tokens,
    as in the papers of ORPO, CPO and RPO (arXiv:2404.19733). TRL's ORPO and CPO also train on the
    prompt in this part, and average over the tokens of a batch.

    Args:
        kind: "sigmoid" (DPO), "hinge" (SLiC), "ipo", "robust", "exo_pair", "nca_pair", "bco_pair",
            "sppo_hard", "apo_zero", "apo_down", "discopop", "simpo", "orpo" or "cpo".
        beta: strength of the penalty for leaving the reference; of ipo its tau, of orpo its lambda.
        reference_free: use log-probabilities in place of log-ratios; only for kinds that have a
            reference.
        sft_weight: weight of the supervised part; by default 1 for orpo and cpo, otherwise 0.
        label_smoothing: probability that a pair is labeled the wrong way around, below 0.5; by
            default 1e-3 for exo_pair, otherwise 0. It makes "sigmoid" cDPO.
        length_normalized: divide each score by the number of tokens of the answer.
        margin: simpo: target difference of the rewards, gamma in the paper and `simpo_gamma` in
            TRL; by default 0.5.
        alpha: simpo: shape of AlphaPO's reward (arXiv:2501.03884); 0, the default, is SimPO.
        discopop_tau: discopop: temperature of the mixture; by default 0.05.
        f_divergence_type: regularizer of f-DPO (arXiv:2309.16240): "reverse_kl" (default),
            "forward_kl", "js_divergence" or "alpha_divergence".
        f_alpha_divergence_coef: alpha of "alpha_divergence"; by default 0.5.

    Attributes:
        needs_reference: True if the call needs the reference's log-probabilities.
        needs_tokens: True if the call needs the numbers of tokens.

    Raises:
        InputError: for an unknown kind, a setting that the kind does not use, or a value out of
            range.
    """

    def __init__(
        self,
        kind: str = "sigmoid",
        beta: float = 0.1,
        *,
        reference_free: bool = False,
        sft_weight: float | None = None,
        label_smoothing: float | None = None,
        length_normalized: bool | None = None,
        margin: float | None = None,
        alpha: float | None = None,
        discopop_tau: float | None = None,
        f_divergence_type: str | None = None,
        f_alpha_divergence_coef: float | None = None,
    ):
        check_choice("kind", kind, KINDS, _OTHERS)
        spec = KINDS[kind]
        values = {
            "label_smoothing": label_smoothing,
            "length_normalized": length_normalized,
            "margin": margin,
            "alpha": alpha,
            "discopop_tau": discopop_tau,
            "f_divergence_type": f_divergence_type,
            "f_alpha_divergence_coef": f_alpha_divergence_coef,
        }
        for name, value in values.items():
            if value not in _OFF and name not in spec.settings:
                users = ", ".join(other for other, row in KINDS.items() if name in row.settings)
                raise InputError(
                    f"{name} is {value!r} and kind is {kind!r}, which does not use it; leave it "
                    f"out, or give one of the kinds {users}"
                )
            if value is None:
                values[name] = spec.settings.get(name)
        if reference_free and not spec.reference:
            raise InputError(
                f"reference_free is True and kind is {kind!r}, which has no reference; leave it out"
            )
        check_number("beta", beta, above=0)
        if sft_weight is not None:
            check_number("sft_weight", sft_weight, least=0)
        self.kind = kind
        self.beta = beta
        self.reference_free = reference_free
        self.sft_weight = spec.sft_weight if sft_weight is None else sft_weight
        self.label_smoothing = values["label_smoothing"] or 0.0
        self.length_normalized = bool(values["length_normalized"])
        self.margin = values["margin"] or 0.0
        self.alpha = values["alpha"] or 0.0
        self.discopop_tau = values["discopop_tau"]
        self.f_divergence_type = values["f_divergence_type"] or "reverse_kl"
        self.f_alpha_divergence_coef = values["f_alpha_divergence_coef"]
        check_number("label_smoothing", self.label_smoothing, least=0, below=0.5)
        if kind == "exo_pair":
            check_number("label_smoothing of exo_pair", self.label_smoothing, above=0)
        if self.discopop_tau is not None:
            check_number("discopop_tau", self.discopop_tau, above=0)
        for name in ("margin", "alpha", "f_alpha_divergence_coef"):
            check_number(name, values[name] or 0.0)
        check_choice("f_divergence_type", self.f_divergence_type, _DIVERGENCES)
        if f_alpha_divergence_coef is not None and self.f_divergence_type != "alpha_divergence":
            raise InputError(
                f"f_alpha_divergence_coef is {f_alpha_divergence_coef} and f_divergence_type is "
                f"{self.f_divergence_type!r}; give 'alpha_divergence', or leave it out"
            )
        self.needs_reference = spec.reference and not reference_free
        self.needs_tokens = spec.averaged or self.length_normalized or self.sft_weight > 0

    def __call__(
        self,
        chosen: Tensor,
        rejected: Tensor,
        reference_chosen: Tensor | None = None,
        reference_rejected: Tensor | None = None,
        *,
        chosen_tokens: Tensor | None = None,
        rejected_tokens: Tensor | None = None,
    ) -> PreferenceResult:
        """Returns losses and rewards of pairs.

        Args:
            chosen: (pairs,), sum of the log-probabilities of the chosen answer's tokens.
            rejected: (pairs,), of the rejected answer's.
            reference_chosen: (pairs,), of the chosen answer's under the reference model.
            reference_rejected: (pairs,), of the rejected answer's.
            chosen_tokens: (pairs,), number of tokens of the chosen answer; read only with
                `needs_tokens`, and 0 counts as 1.
            rejected_tokens: (pairs,), of the rejected answer.

        Returns:
            The loss of each pair and the rewards; see `PreferenceResult`. The rewards of simpo and
            orpo are per token, and simpo's are transformed by alpha.

        Raises:
            InputError: if an argument that the kind needs is missing, or a reference is given to a
                loss without one.
        """
        name = f"PreferenceLoss of kind {self.kind!r}"
        references = {
            "reference_chosen": reference_chosen,
            "reference_rejected": reference_rejected,
        }
        tokens = {"chosen_tokens": chosen_tokens, "rejected_tokens": rejected_tokens}
        _check_given(name, self.needs_reference, references)
        if self.needs_tokens:
            _check_given(name, True, tokens)
        _check_shapes(name, {"chosen": chosen, "rejected": rejected, **references, **tokens})
        spec = KINDS[self.kind]
        averaged = spec.averaged or self.length_normalized

        def scores(log_probs: Any, reference: Any, tokens: Any) -> tuple[Any, Any]:
            """Returns the score of the formula and the reward."""
            x = _float32(log_probs)
            if self.needs_reference:
                x = x - _float32(reference)
            if averaged and not spec.reference:
                x = x / _count(tokens)
            if self.alpha:
                x = _power(x, -self.alpha)
            reward = self.beta * ops.stop_gradient(x)
            x = _DIVERGENCES[self.f_divergence_type](self, x)
            return (x / _count(tokens) if averaged and spec.reference else x), reward

        c, chosen_reward = scores(chosen, reference_chosen, chosen_tokens)
        r, rejected_reward = scores(rejected, reference_rejected, rejected_tokens)
        loss = spec.formula(self, c, r)
        if self.sft_weight:
            loss = loss - self.sft_weight * _float32(chosen) / _count(chosen_tokens)
        return PreferenceResult(loss, chosen_reward, rejected_reward)


class KTOLoss:
    """Loss of single answers that are desirable or undesirable (arXiv:2402.01306, equation 7).

    kto: weight * sigmoid(-beta (x - kl)) for a desirable answer with log-ratio x, and
    weight * sigmoid(-beta (kl - x)) for an undesirable one. apo_zero_unpaired (arXiv:2408.06266) is
    the same without kl.

    Args:
        beta: strength of the penalty for leaving the reference.
        desirable_weight: weight of desirable answers.
        undesirable_weight: weight of undesirable answers. The paper suggests weights with which
            weight times number of answers is one to 4/3 times as large for desirable ones.
        kind: "kto" or "apo_zero_unpaired".

    Attributes:
        needs_kl: True if the call needs `kl`.

    Raises:
        InputError: for an unknown kind or a number out of range.
    """

    def __init__(
        self,
        beta: float = 0.1,
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
        *,
        kind: str = "kto",
    ):
        check_choice("kind", kind, ("kto", "apo_zero_unpaired"))
        check_number("beta", beta, above=0)
        check_number("desirable_weight", desirable_weight, least=0)
        check_number("undesirable_weight", undesirable_weight, least=0)
        self.kind = kind
        self.beta = beta
        self.desirable_weight = desirable_weight
        self.undesirable_weight = undesirable_weight
        self.needs_kl = kind == "kto"

    def __call__(
        self, log_probs: Tensor, reference: Tensor, desirable: Tensor, kl: Tensor | None = None
    ) -> KTOResult:
        """Returns losses and rewards of answers.

        Args:
            log_probs: (rows,), sum of the log-probabilities of the answer's tokens.
            reference: (rows,), the same under the reference model.
            desirable: bool (rows,).
            kl: log-ratios of answers to other prompts, (any number,) or their mean, a scalar; only
                for "kto". The mean of the batch estimates KL(model || reference). It is clamped at
                0 and has no gradient.

        Raises:
            InputError: if kl is missing, or given to a kind that does not use it.
        """
        name = f"KTOLoss of kind {self.kind!r}"
        _check_given(name, self.needs_kl, {"kl": kl})
        values = {"log_probs": log_probs, "reference": reference, "desirable": desirable}
        _check_shapes(name, values)
        ratio = _float32(log_probs) - _float32(reference)
        center: Any = 0.0
        if self.needs_kl:
            center = ops.maximum(ops.stop_gradient(ops.mean(_float32(kl))), 0.0)
        desirable = ops.cast(desirable, "bool")
        loss = ops.where(
            desirable,
            self.desirable_weight * ops.sigmoid(-self.beta * (ratio - center)),
            self.undesirable_weight * ops.sigmoid(self.beta * (ratio - center)),
        )
        return KTOResult(loss, self.beta * ops.stop_gradient(ratio))


# === Policy gradients ===

_NORMALIZATIONS = ("grpo", "bnpo", "dr_grpo", "dapo")
SCALES = ("group", "batch", "none")


class GRPOLoss:
    """Clipped policy-gradient loss of groups of sampled answers (GRPO, arXiv:2402.03300).

    Per token it is -min(w A, clip(w, 1 - epsilon, 1 + epsilon_high) A) + beta * KL, with the
    importance weight w = p / p_old, the advantage A, and KL = q - log q - 1 of q = p_reference / p
    (the estimator k3). Tokens are reduced by `normalization`:

    - "grpo": mean over the tokens of each row, then over rows.
    - "bnpo": mean over all tokens of the batch.
    - "dr_grpo": sum divided by rows times max_completion_length (arXiv:2503.20783).
    - "dapo": as bnpo, but over the tokens of all batches of an update (arXiv:2503.14476).

    Args:
        normalization: one of these four.
        epsilon: how far below 1 a weight counts.
        epsilon_high: how far above 1; by default epsilon. DAPO recommends 0.28.
        beta: weight of the KL divergence from the reference.
        delta: largest weight of a negative advantage (two-sided clipping, arXiv:2505.07291), above
            1 + epsilon_high; by default no limit.
        importance_sampling_level: "token", or "sequence" for one weight a row, exp of the mean
            log-ratio of its tokens (GSPO, arXiv:2507.18071).
        max_completion_length: dr_grpo: largest number of tokens that are sampled.

    Raises:
        InputError: for an unknown name, a number out of range, or a setting that is not used.
    """

    def __init__(
        self,
        normalization: str = "grpo",
        epsilon: float = 0.2,
        epsilon_high: float | None = None,
        beta: float = 0.0,
        *,
        delta: float | None = None,
        importance_sampling_level: str = "token",
        max_completion_length: int | None = None,
    ):
        check_choice("normalization", normalization, _NORMALIZATIONS)
        levels = ("token", "sequence")
        check_choice("importance_sampling_level", importance_sampling_level, levels)
        epsilon_high = epsilon if epsilon_high is None else epsilon_high
        check_number("epsilon", epsilon, least=0, below=1)
        check_number("epsilon_high", epsilon_high, least=0)
        check_number("beta", beta, least=0)
        if delta is not None:
            check_number("delta", delta, above=1 + epsilon_high)
        if normalization == "dr_grpo":
            check_whole("max_completion_length", max_completion_length)
        elif max_completion_length is not None:
            raise InputError(
                f"max_completion_length is {max_completion_length} and normalization is "
                f"{normalization!r}, which does not use it; leave it out, or give 'dr_grpo'"
            )
        self.normalization = normalization
        self.epsilon = epsilon
        self.epsilon_high = epsilon_high
        self.beta = beta
        self.delta = delta
        self.importance_sampling_level = importance_sampling_level
        self.max_completion_length = max_completion_length

    def __call__(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor | None,
        advantages: Tensor,
        mask: Tensor,
        reference: Tensor | None = None,
        *,
        tokens: Tensor | float | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Returns (loss, logs) of sampled answers.

        Args:
            log_probs: (rows, T), log-probabilities of the sampled tokens.
            old_log_probs: (rows, T), those of the model that sampled; None if it is the same.
            advantages: (rows,) or (rows, T).
            mask: (rows, T), 1 for the tokens of answers, 0 for prompts and padding.
            reference: (rows, T), log-probabilities under the reference model; only with beta > 0.
            tokens: dapo: number of tokens of the update, divided by its number of batches; by
                default those of the mask.

        Returns:
            A float32 scalar, and float32 scalars by name: "clipped_low" and "clipped_high", shares
            of tokens (or rows, with one weight a row) whose weight is clipped, and with beta > 0
            "kl", the mean over all tokens.

        Raises:
            InputError: if the reference is missing or not used, or tokens are not used.
        """
        _check_given(f"GRPOLoss with beta={self.beta}", self.beta > 0, {"reference": reference})
        if tokens is not None and self.normalization != "dapo":
            raise InputError(
                f"GRPOLoss got tokens and normalization is {self.normalization!r}, which does not "
                "use them; leave them out, or give 'dapo'"
            )
        log_probs, advantages = _float32(log_probs), _float32(advantages)
        if len(advantages.shape) == 1:
            advantages = ops.expand_dims(advantages, 1)
        values = {"log_probs": log_probs, "old_log_probs": old_log_probs, "mask": mask}
        _check_shapes("GRPOLoss", {**values, "reference": reference}, 2)
        # One advantage for each row, or for each token.
        by_token = advantages.shape[1:] != (1,)
        rows = {"log_probs": log_probs if by_token else log_probs[:, :1], "advantages": advantages}
        _check_shapes("GRPOLoss", rows, 2)
        there = ops.cast(mask, "bool")
        mask = ops.cast(there, "float32")
        old = ops.stop_gradient(log_probs) if old_log_probs is None else _float32(old_log_probs)
        lengths = ops.maximum(ops.sum(mask, axis=1), 1.0)
        ratios = ops.where(there, log_probs - old, 0.0)
        by_row = self.importance_sampling_level == "sequence"
        if by_row:
            ratios = ops.expand_dims(ops.sum(ratios, axis=1) / lengths, 1)
        weights = ops.exp(ops.minimum(ratios, _MAX_EXPONENT))
        clipped = ops.clip(weights, 1 - self.epsilon, 1 + self.epsilon_high)
        free = weights if self.delta is None else ops.minimum(weights, self.delta)
        losses = -ops.minimum(free * advantages, clipped * advantages)
        all_tokens = ops.maximum(ops.sum(mask), 1.0)
        logs = {}
        if self.beta > 0:
            to_reference = ops.where(there, _float32(reference) - log_probs, 0.0)
            kl = ops.expm1(ops.minimum(to_reference, _MAX_EXPONENT)) - to_reference
            losses = losses + self.beta * kl
            logs["kl"] = ops.stop_gradient(ops.sum(kl * mask) / all_tokens)
        low = ops.logical_and(weights < 1 - self.epsilon, advantages < 0)
        high = ops.logical_and(weights > 1 + self.epsilon_high, advantages > 0)
        for name, share in (("clipped_low", low), ("clipped_high", high)):
            share = ops.cast(share, "float32")
            # With one advantage a token, weights of rows are clipped token by token, too.
            logs[name] = (
                ops.mean(share)
                if by_row and share.shape[1] == 1
                else ops.sum(share * mask) / all_tokens
            )
        total = ops.sum(losses * mask, axis=1)
        if self.normalization == "grpo":
            return ops.mean(total / lengths), logs
        if self.normalization == "dr_grpo":
            return ops.mean(total) / self.max_completion_length, logs
        count = all_tokens if tokens is None else ops.maximum(_float32(tokens), 1.0)
        return ops.sum(total) / count, logs


def group_advantages(rewards: Tensor, scale: str = "group") -> Any:
    """Returns rewards minus the mean of their group, divided by a standard deviation.

    Args:
        rewards: (groups, n), those of n answers to each prompt. NaN stands for an answer without a
            reward: it is not part of the mean, and its advantage is 0.
        scale: standard deviation by which advantages are divided: of the "group", of the whole
            "batch", or "none" (Dr. GRPO). It is that of a sample (n - 1), plus 1e-4.

    Returns:
        float32 (groups, n).

    Raises:
        InputError: for another scale, or rewards that are not of two dimensions.
    """
    check_choice("scale", scale, SCALES)
    rewards = _float32(rewards)
    if len(rewards.shape) != 2:
        raise InputError(
            f"rewards have the shape {tuple(rewards.shape)}; give (groups, answers per prompt)"
        )
    there = ops.logical_not(ops.isnan(rewards))
    rewards, counts = ops.where(there, rewards, 0.0), ops.cast(there, "float32")

    def mean(x: Any, axis: int | None) -> Any:
        total = ops.sum(x * counts, axis=axis, keepdims=True)
        return total / ops.maximum(ops.sum(counts, axis=axis, keepdims=True), 1.0)

    advantages = (rewards - mean(rewards, 1)) * counts
    if scale == "none":
        return advantages
    axis = 1 if scale == "group" else None
    size = ops.sum(counts, axis=axis, keepdims=True)
    variance = mean(ops.square(rewards - mean(rewards, axis)), axis)
    deviation = ops.sqrt(variance * size / ops.maximum(size - 1.0, 1.0))
    return advantages / (deviation + 1e-4)


# === Checks ===


def _float32(x: Any) -> Any:
    return ops.cast(ops.convert_to_tensor(x), "float32")


def _count(tokens: Any) -> Any:
    return ops.maximum(_float32(tokens), 1.0)


def _check_shapes(name: str, values: Mapping[str, Any], axes: int = 1) -> None:
    """Raises InputError for a value of another shape than the first, which would be broadcast."""
    shapes = {
        key: tuple(ops.convert_to_tensor(value).shape)
        for key, value in values.items()
        if value is not None
    }
    first, wanted = next(iter(shapes.items()))
    for key, shape in shapes.items():
        if len(shape) != axes or not same_shape(shape, wanted):
            raise InputError(
                f"{name} got {key} of shape {shape} with {first} of shape {wanted}; give equal "
                f"shapes of {pluralize(axes, 'dimension')}"
            )


def _check_given(name: str, needed: bool, values: Mapping[str, Any]) -> None:
    """Raises InputError unless all of the values are given if needed, and none if not."""
    wrong = [key for key, value in values.items() if (value is None) == needed]
    if not wrong:
        return
    if needed:
        raise InputError(f"{name} got no {' and no '.join(wrong)}; give {' and '.join(values)}")
    raise InputError(
        f"{name} got {' and '.join(wrong)}, not used by it; leave out what is not used"
    )
