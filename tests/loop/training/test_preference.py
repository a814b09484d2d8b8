"""Losses of preference tuning and of policy gradients equal TRL's, compiled and at their limits.

`tests/write_trl_losses.py` wrote the numbers of TRL's own trainers to `trl_losses.json`, once, on
the same log-probabilities; TRL need not be installed.
"""

import json
from pathlib import Path

import keras
import numpy as np
import pytest

from arrays import to_numpy
from gradients import value_and_gradients
from kmodels.training import GRPOLoss, KTOLoss, PreferenceLoss, group_advantages
from kmodels.training.preference import KINDS
from refusals import refused
from tolerances import tolerance

TRL = json.loads((Path(__file__).parent / "trl_losses.json").read_text())
ops = keras.ops


def arrays(values):
    return [np.array(value, "float32") for value in values]


def tensors(values):
    """Tensors, because torch.compile does not trace NumPy's arrays."""
    return [ops.convert_to_tensor(value) for value in arrays(values)]


def near(found, expected, allowed):
    """Asserts a difference of at most `allowed` times the larger of 1 and the number expected."""
    found, expected = np.asarray(found, "float64"), np.asarray(expected, "float64")
    assert found.shape == expected.shape
    assert (np.abs(found - expected) <= allowed * np.maximum(1.0, np.abs(expected))).all()


def named(settings):
    return ",".join(f"{name}={value}" for name, value in settings.items()) or "defaults"


def each_case(cases, name):
    """Parametrizes by all cases, and by the last one of each value of a setting also compiled.

    On torch compiling takes seconds, so that all but one of these wait for the night.
    """
    last = [*{case["settings"].get(name): case for case in cases}.values()]
    runs = [pytest.param(case, False, id=named(case["settings"])) for case in cases]
    for case in last:
        marks = () if case is last[-1] else pytest.mark.nightly("torch")
        label = f"{named(case['settings'])}, compiled"
        runs.append(pytest.param(case, True, id=label, marks=marks))
    return pytest.mark.parametrize(("case", "compiled"), runs)


# === Pairs ===

PAIRS = TRL["preference"]


def pairs_of(loss, scale=1.0):
    """The arguments of a loss that it needs: arrays by which it is differentiated, and others."""
    names = ["chosen", "rejected"]
    names += [f"reference_{name}" for name in names if loss.needs_reference]
    inputs = arrays(scale * np.array(PAIRS["inputs"][name]) for name in names)
    tokens = dict(zip(PAIRS["tokens"], tensors(PAIRS["tokens"].values()), strict=True))
    return inputs, tokens if loss.needs_tokens else {}


@each_case(PAIRS["cases"], "kind")
def test_losses_of_pairs_are_those_of_trl(case, compiled):
    loss = PreferenceLoss(**case["settings"])
    inputs, tokens = pairs_of(loss)

    def total(*inputs):
        result = loss(*inputs, **tokens)
        return ops.sum(result.loss), ops.stack(list(result))

    _, found, gradients = value_and_gradients(total, inputs, compiled)
    rows = to_numpy(found)
    near(rows[0], case["loss"], tolerance("trl_losses"))
    near(rows[1:].T, case["reward"], tolerance("trl_losses"))
    near(np.stack(gradients[:2], -1), case["gradient"], tolerance("trl_gradients"))


def test_each_kind_is_compared():
    assert {case["settings"]["kind"] for case in PAIRS["cases"]} == set(KINDS)
    used = {name for case in PAIRS["cases"] for name in case["settings"]}
    assert used >= {name for kind in KINDS.values() for name in kind.settings} - {"margin"}


@pytest.mark.parametrize(
    "kind", [k for k, row in KINDS.items() if "length_normalized" in row.settings]
)
def test_length_normalized_losses_are_those_of_mean_scores(kind):
    loss = PreferenceLoss(kind, 2.0, length_normalized=True)
    (c, r, c0, r0), tokens = pairs_of(loss)
    found = loss(c, r, c0, r0, **tokens).loss
    n, m = map(to_numpy, tokens.values())
    expected = PreferenceLoss(kind, 2.0)((c - c0) / n, (r - r0) / m, 0 * c, 0 * r).loss
    near(to_numpy(found), to_numpy(expected), tolerance("trl_losses"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_supervised_part_is_the_mean_log_probability_of_the_chosen_answer(kind):
    with_part = PreferenceLoss(kind, sft_weight=0.3)
    inputs, tokens = pairs_of(with_part)
    found = with_part(*inputs, **tokens).loss
    alone = PreferenceLoss(kind, sft_weight=0)(*inputs, **tokens).loss
    expected = to_numpy(alone) - 0.3 * inputs[0] / to_numpy(tokens["chosen_tokens"])
    near(to_numpy(found), expected, tolerance("trl_losses"))
    assert PreferenceLoss(kind).sft_weight == (kind in ("orpo", "cpo"))


LIMITS = [
    *({"kind": kind} for kind in KINDS),
    *({"kind": "sigmoid", "f_divergence_type": name} for name in ("forward_kl", "js_divergence")),
    {"kind": "hinge", "f_divergence_type": "alpha_divergence"},
    {"kind": "simpo", "alpha": 0.25},
    {"kind": "discopop", "discopop_tau": 1.5},
]


@pytest.mark.parametrize("settings", LIMITS, ids=named)
def test_losses_and_gradients_stay_finite(settings):
    loss = PreferenceLoss(**settings)
    extremes = np.array([0.0, -1e-9, -1e-7, -1e-3, -700.0, -5e3], "float32")
    c, r = (x.ravel() for x in np.meshgrid(extremes, extremes))
    inputs = [c, r, *([0 * c - 20, 0 * r - 20] if loss.needs_reference else [])]
    tokens = {name: np.ones_like(c) for name in PAIRS["tokens"]} if loss.needs_tokens else {}

    def total(*inputs):
        result = loss(*inputs, **tokens)
        return ops.sum(result.loss), result.loss

    _, found, gradients = value_and_gradients(total, inputs)
    assert np.isfinite(to_numpy(found)).all()
    assert all(np.isfinite(gradient).all() for gradient in gradients)


# === Single answers ===

ROWS = TRL["kto"]


@each_case(ROWS["cases"], "kind")
def test_losses_of_single_answers_are_those_of_trl(case, compiled):
    loss = KTOLoss(**case["settings"])
    kl = None if case["kl"] is None else ops.convert_to_tensor(case["kl"])
    desirable = ops.convert_to_tensor(ROWS["desirable"])

    def total(log_probs, reference):
        result = loss(log_probs, reference, desirable, kl)
        return ops.mean(result.loss), result.reward

    inputs = arrays(ROWS["inputs"].values())
    value, reward, gradients = value_and_gradients(total, inputs, compiled)
    near(value, case["loss"], tolerance("trl_losses"))
    near(gradients[0], case["gradient"], tolerance("trl_gradients"))
    near(to_numpy(reward), loss.beta * (inputs[0] - inputs[1]), tolerance("trl_losses"))


def test_the_kl_divergence_has_no_gradient():
    def total(kl):
        rows = np.array([-1.0, 1.0], "float32")
        return ops.sum(KTOLoss()(rows, rows, [True, False], kl).loss) + ops.sum(kl), kl

    assert (value_and_gradients(total, arrays([[1.0, 2.0]]))[2][0] == 1).all()


# === Policy gradients ===

SAMPLED = TRL["grpo"]


@each_case(SAMPLED["cases"], "normalization")
def test_policy_losses_are_those_of_trl(case, compiled):
    loss = GRPOLoss(**case["settings"])
    advantages, mask, reference = arrays(SAMPLED[x] for x in ("advantages", "mask", "reference"))
    # What is not of an answer has no say.
    log_probs, old = arrays(SAMPLED["inputs"].values())
    log_probs, old, reference = (
        np.where(mask > 0, x, wrong)
        for x, wrong in ((log_probs, 0.0), (old, -500.0), (reference, 300.0))
    )
    advantages, mask, old, reference = tensors((advantages, mask, old, reference))

    def total(log_probs):
        value, logs = loss(
            log_probs,
            old,
            advantages,
            mask,
            reference if loss.beta else None,
            tokens=SAMPLED["tokens"] if loss.normalization == "dapo" else None,
        )
        return value, ops.stack([logs[name] for name in case["logs"]])

    value, logs, gradients = value_and_gradients(total, [log_probs], compiled)
    near(value, case["loss"], tolerance("trl_losses"))
    near(gradients[0], case["gradient"], tolerance("trl_gradients"))
    near(to_numpy(logs), list(case["logs"].values()), tolerance("trl_losses"))


def test_policy_losses_at_their_limits():
    mask, advantages = np.ones((2, 3), "float32"), np.array([1.0, -1.0], "float32")
    far = np.array([[0.0, -900.0, -1e-3]] * 2, "float32")

    def total(log_probs):
        loss, logs = GRPOLoss(beta=0.1)(log_probs, far[:, ::-1], advantages, mask, far)
        return loss, logs["kl"]

    value, kl, gradients = value_and_gradients(total, [far])
    assert np.isfinite([value, to_numpy(kl)]).all() and np.isfinite(gradients).all()
    # Without a model that sampled, it is the model itself; advantages may be those of tokens.
    one = GRPOLoss()(far, None, advantages, mask)[0]
    by_token = GRPOLoss()(far, far, advantages[:, None] * mask, mask)[0]
    assert to_numpy(one) == to_numpy(by_token) == 0
    # The tokens of DAPO's update are by default those of the batch.
    dapo, bnpo = (GRPOLoss(n)(far, None, advantages + 1, mask)[0] for n in ("dapo", "bnpo"))
    assert to_numpy(dapo) == to_numpy(bnpo) == -1


@pytest.mark.parametrize(
    "case", TRL["advantages"], ids=lambda case: f"{case['name']}, {case['scale']}"
)
def test_advantages_are_those_of_trl(case):
    rewards = np.array(case["rewards"], "float32")  # None becomes NaN
    found = group_advantages(rewards, case["scale"])
    near(to_numpy(found), case["advantages"], tolerance("trl_gradients"))


# === Errors ===

ONE, TWO = np.zeros(2, "float32"), np.zeros((2, 2), "float32")
REFUSED = [
    (lambda: PreferenceLoss("dpo"), "kind is 'dpo'; choose one of sigmoid, hinge"),
    (lambda: PreferenceLoss("aot"), "kind is 'aot': it sorts the batch"),
    (lambda: PreferenceLoss("aot_unpaired"), "a pair's loss depends on which pairs share its"),
    (lambda: PreferenceLoss("sigmoid_norm"), "give 'sigmoid' and length_normalized=True"),
    (lambda: PreferenceLoss("kto"), "use KTOLoss"),
    (lambda: PreferenceLoss(beta=0), "beta is 0; give a number above 0"),
    (lambda: PreferenceLoss(beta="high"), "beta is 'high'; give a finite number"),
    (
        lambda: PreferenceLoss("hinge", label_smoothing=0.1),
        "label_smoothing is 0.1 and kind is 'hinge', which does not use it; leave it out, or give "
        "one of the kinds sigmoid, robust, exo_pair, simpo, cpo",
    ),
    (lambda: PreferenceLoss(margin=1.0), "margin is 1.0 and kind is 'sigmoid'.*simpo"),
    (lambda: PreferenceLoss("ipo", length_normalized=True), "length_normalized is True and kind"),
    (lambda: PreferenceLoss("robust", label_smoothing=0.5), "at least 0 and below 0.5"),
    (lambda: PreferenceLoss("exo_pair", label_smoothing=0.0), "of exo_pair is 0.0.*above 0"),
    (lambda: PreferenceLoss("orpo", reference_free=True), "'orpo', which has no reference"),
    (lambda: PreferenceLoss("discopop", discopop_tau=-1), "discopop_tau is -1; give"),
    (lambda: PreferenceLoss(f_divergence_type="kl"), "f_divergence_type is 'kl'; choose one of"),
    (lambda: PreferenceLoss(f_alpha_divergence_coef=0.3), "give 'alpha_divergence', or leave it"),
    (
        lambda: PreferenceLoss("simpo", margin=float("nan")),
        "margin is nan; give a finite number or None",
    ),
    (lambda: PreferenceLoss(sft_weight=-1), "sft_weight is -1; give a number at least 0"),
    (
        lambda: PreferenceLoss()(ONE, ONE),
        "PreferenceLoss of kind 'sigmoid' got no reference_chosen and no reference_rejected; give",
    ),
    (lambda: PreferenceLoss("cpo")(ONE, ONE, ONE, ONE), "got reference_chosen and reference_rej"),
    (lambda: PreferenceLoss("simpo")(ONE, ONE), "got no chosen_tokens and no rejected_tokens"),
    (lambda: PreferenceLoss("ipo")(ONE, ONE, ONE, ONE, chosen_tokens=ONE), "no rejected_tokens"),
    (lambda: KTOLoss(kind="bco"), "kind is 'bco'; choose one of kto, apo_zero_unpaired"),
    (lambda: KTOLoss(desirable_weight=-1), "desirable_weight is -1; give a number at least 0"),
    (lambda: KTOLoss()(ONE, ONE, ONE), "KTOLoss of kind 'kto' got no kl; give kl"),
    (lambda: KTOLoss(kind="apo_zero_unpaired")(ONE, ONE, ONE, ONE), "got kl, not used by it"),
    (lambda: GRPOLoss("ppo"), "normalization is 'ppo'; choose one of grpo, bnpo, dr_grpo, dapo"),
    (lambda: GRPOLoss(epsilon=1.5), "epsilon is 1.5; give a number at least 0 and below 1"),
    (lambda: GRPOLoss(delta=1.1), "delta is 1.1; give a number above 1.2"),
    (lambda: GRPOLoss("dr_grpo"), "max_completion_length is None; give a whole number"),
    (lambda: GRPOLoss(max_completion_length=9), "normalization is 'grpo', which does not use it"),
    (lambda: GRPOLoss(importance_sampling_level="row"), "choose one of token, sequence"),
    (lambda: GRPOLoss(beta=0.1)(ONE, ONE, ONE, ONE), "with beta=0.1 got no reference; give"),
    (lambda: GRPOLoss()(ONE, ONE, ONE, ONE, ONE), "with beta=0.0 got reference, not used by it"),
    (lambda: GRPOLoss()(ONE, ONE, ONE, ONE, tokens=3), "got tokens and normalization is 'grpo'"),
    (
        lambda: PreferenceLoss()(ONE, ONE[:, None], ONE, ONE),
        r"got rejected of shape \(2, 1\) with chosen of shape \(2,\); give equal shapes of 1 dim",
    ),
    (lambda: PreferenceLoss()(ONE, ONE, ONE[:1], ONE), r"got reference_chosen of shape \(1,\)"),
    (lambda: PreferenceLoss("cpo")(ONE, ONE, chosen_tokens=1, rejected_tokens=ONE), "chosen_tok"),
    (lambda: KTOLoss()(ONE, ONE[:, None], ONE, ONE), r"got reference of shape \(2, 1\)"),
    (lambda: KTOLoss()(ONE, ONE, ONE[:, None], ONE), r"got desirable of shape \(2, 1\)"),
    (lambda: GRPOLoss()(TWO, ONE, ONE, TWO), r"got old_log_probs of shape \(2,\) with log_pro"),
    (lambda: GRPOLoss()(TWO, None, ONE, ONE), r"got mask of shape \(2,\).*equal shapes of 2 dim"),
    (lambda: GRPOLoss()(TWO, None, TWO[:1], TWO), r"got advantages of shape \(1, 2\)"),
    (lambda: GRPOLoss(beta=1.0)(TWO, None, ONE, TWO, TWO[:1]), r"got reference of shape \(1, 2\)"),
    (lambda: group_advantages(ONE), r"the shape \(2,\); give \(groups, answers per prompt\)"),
    (
        lambda: group_advantages(ONE[None], "std"),
        "scale is 'std'; choose one of group, batch, none",
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=range(len(REFUSED)))
def test_wrong_settings_are_refused_in_one_line(call, message):
    refused(message, call)
