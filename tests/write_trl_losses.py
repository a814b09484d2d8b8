"""Writes the losses of TRL 1.16 and their gradients to tests/loop/training/trl_losses.json.

python tests/write_trl_losses.py

It needs the full environment and, next to it, TRL without its dependencies:

    pip install --no-deps --target FOLDER trl==1.16.0 accelerate datasets pandas pyarrow \\
        psutil dill multiprocess xxhash aiohttp aiosignal aiohappyeyeballs frozenlist multidict \\
        propcache yarl attrs python-dateutil six
    PYTHONPATH=FOLDER python tests/write_trl_losses.py

The numbers come from the trainers' own methods (`DPOTrainer._compute_loss` and so on), called on an
object that has nothing but their settings, with a model that returns given log-probabilities. These
are multiples of 1/64, so that float32 sums of them are exact.
"""

import inspect
import json
import tempfile
import textwrap
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from torchvision_cpu import define_torchvision_operators

define_torchvision_operators()

import trl  # noqa: E402
from peft import PeftModel  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from trl import DPOTrainer, GRPOTrainer, KTOTrainer  # noqa: E402
from trl.experimental.cpo import CPOTrainer  # noqa: E402
from trl.experimental.gkd import GKDTrainer  # noqa: E402
from trl.experimental.orpo import ORPOTrainer  # noqa: E402
from trl.trainer import grpo_trainer  # noqa: E402
from trl.trainer.utils import add_fused_lm_head  # noqa: E402

import trl_runs  # noqa: E402

OUT = Path(__file__).parent / "loop" / "training" / "trl_losses.json"
rng = np.random.default_rng(45)
# Settings of PreferenceLoss, and those of TRL's trainer that mean the same.
SMOOTH = {"label_smoothing": 0.1}
PREFERENCE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *(
        ({"kind": kind, "beta": beta}, {"loss_types": [kind], "beta": beta})
        for kind in ("sigmoid", "hinge", "ipo", "robust", "nca_pair", "bco_pair", "sppo_hard")
        for beta in (0.1, 0.5)
    ),
    *(
        ({"kind": kind, "beta": beta}, {"loss_types": [kind], "beta": beta})
        for kind in ("apo_zero", "apo_down", "discopop")
        for beta in (0.1, 0.5)
    ),
    ({"kind": "exo_pair"}, {"loss_types": ["exo_pair"], "label_smoothing": 1e-3}),
    ({"kind": "exo_pair", **SMOOTH}, {"loss_types": ["exo_pair"], **SMOOTH}),
    ({"kind": "robust", **SMOOTH}, {"loss_types": ["robust"], **SMOOTH}),
    ({"kind": "discopop", "discopop_tau": 0.5}, {"loss_types": ["discopop"], "discopop_tau": 0.5}),
    (
        {"kind": "sigmoid", "length_normalized": True, "beta": 2.0},
        {"loss_types": ["sigmoid_norm"], "beta": 2.0},
    ),
    (
        {"kind": "sigmoid", "sft_weight": 0.7},
        {"loss_types": ["sigmoid", "sft"], "loss_weights": [1.0, 0.7]},
    ),
    *(
        ({"kind": kind, "reference_free": True}, {"loss_types": [kind], "reference_free": True})
        for kind in ("sigmoid", "ipo", "apo_zero")
    ),
    *(
        (
            {"kind": kind, "f_divergence_type": name, **coefficient},
            {"loss_types": [kind], "f_divergence_type": name, **coefficient},
        )
        for kind, name, coefficient in (
            ("sigmoid", "forward_kl", {}),
            ("sigmoid", "js_divergence", {}),
            ("sigmoid", "alpha_divergence", {}),
            ("robust", "alpha_divergence", {"f_alpha_divergence_coef": 2.0}),
            ("hinge", "alpha_divergence", {"f_alpha_divergence_coef": 1.0}),
            ("ipo", "js_divergence", {}),
        )
    ),
    *(
        ({"sft_weight": 0.0, **settings}, {"trainer": "cpo", **other})
        for settings, other in (
            ({"kind": "cpo"}, {"loss_type": "sigmoid"}),
            ({"kind": "cpo", **SMOOTH}, {"loss_type": "sigmoid", **SMOOTH}),
            ({"kind": "simpo", "beta": 2.0}, {"loss_type": "simpo", "beta": 2.0}),
            (
                {"kind": "simpo", "margin": 1.2, **SMOOTH},
                {"loss_type": "simpo", "simpo_gamma": 1.2, **SMOOTH},
            ),
            (
                {"kind": "simpo", "alpha": 0.25, "beta": 2.0},
                {"loss_type": "simpo", "alpha": 0.25, "beta": 2.0},
            ),
            # cDPO is TRL's CPO with smoothing on log-ratios.
            ({"kind": "sigmoid", **SMOOTH}, {"loss_type": "sigmoid", "ratios": True, **SMOOTH}),
        )
    ),
    ({"kind": "orpo", "sft_weight": 0.0}, {"trainer": "orpo"}),
    ({"kind": "orpo", "beta": 0.5, "sft_weight": 0.0}, {"trainer": "orpo", "beta": 0.5}),
]
GRPO: list[dict[str, Any]] = [
    {"normalization": normalization, "importance_sampling_level": level, **more}
    for normalization in ("grpo", "bnpo", "dr_grpo", "dapo")
    for level in ("token", "sequence")
    for more in ({}, {"epsilon": 0.1, "epsilon_high": 0.28, "beta": 0.04}, {"delta": 1.3})
]
LONGEST = 9  # max_completion_length
ITEMS = 17  # tokens of an update per batch


def log_probs(*shape: int, low: int = -128) -> np.ndarray:
    return rng.integers(low, 0, shape) / 64


class Accelerator:
    device = torch.device("cpu")
    num_processes = 1

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x

    gather_for_metrics = gather

    def reduce(self, x: torch.Tensor, reduction: str) -> torch.Tensor:
        return x


def trainer(**settings: Any) -> Any:
    return SimpleNamespace(
        accelerator=Accelerator(),
        _metrics=defaultdict(lambda: defaultdict(list)),
        model=SimpleNamespace(training=False),
        aux_loss_enabled=False,
        _total_train_tokens=0,
        **settings,
    )


def rows(pairs: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens of several rows, padded at the end, and their mask."""
    longest = max(map(len, pairs))
    padded = np.stack([np.pad(x, (0, longest - len(x))) for x in pairs])
    return padded, np.stack([np.arange(longest) < len(x) for x in pairs])


def dpo(pair: dict[str, Any], settings: dict[str, Any]) -> tuple[float, list[float], list[float]]:
    # TRL's clamp of the alpha divergence has no limit for float64.
    single = settings.get("f_divergence_type") == "alpha_divergence"
    dtype = torch.float32 if single else torch.float64
    padded, there = rows([pair["chosen"], pair["rejected"]])
    tokens = torch.tensor(padded, dtype=dtype, requires_grad=True)
    mask = torch.tensor(np.pad(there, ((0, 0), (1, 0))).astype("int64"))  # a prompt of one token
    zero = torch.zeros_like(tokens)

    def model(**_: Any) -> Any:
        return SimpleNamespace(
            log_probs=tokens, entropy=zero, mean_logits=zero, is_top1=zero.bool()
        )

    model.training = False
    settings = dict(settings)
    factor = 0 if settings.pop("reference_free", False) else 1
    defaults: dict[str, Any] = {
        "beta": 0.1,
        "loss_weights": [1.0],
        "label_smoothing": 0.0,
        "f_divergence_type": "reverse_kl",
        "f_alpha_divergence_coef": 0.5,
    }
    this = trainer(
        args=SimpleNamespace(discopop_tau=settings.pop("discopop_tau", 0.05)),
        ld_alpha=None,
        precompute_ref_logps=True,
        use_weighting=False,
        **(defaults | settings),
    )
    inputs = {
        "input_ids": mask,
        "attention_mask": mask,
        "completion_mask": mask,
        **{
            f"ref_{name}_logps": factor * torch.tensor([pair[f"reference_{name}"]], dtype=dtype)
            for name in ("chosen", "rejected")
        },
    }
    loss = DPOTrainer._compute_loss(this, model, inputs, False)
    loss.backward()
    gradient = [float(row[0]) for row in tokens.grad]
    logs = this._metrics["eval"]
    return loss.item(), gradient, [logs[f"rewards/{name}"][0] for name in ("chosen", "rejected")]


def without_reference(
    pair: dict[str, Any], settings: dict[str, Any]
) -> tuple[float, list[float], list[float]]:
    settings = dict(settings)
    method = {"cpo": CPOTrainer.cpo_loss, "orpo": ORPOTrainer.odds_ratio_loss}
    called = method[name := settings.pop("trainer")]
    sums = [torch.tensor(x.sum(), dtype=torch.float64) for x in (pair["chosen"], pair["rejected"])]
    sums = [x.requires_grad_() for x in sums]
    scores = sums
    if settings.pop("ratios", False):
        scores = [
            x - pair[f"reference_{name}"]
            for x, name in zip(sums, ("chosen", "rejected"), strict=True)
        ]
    elif name == "orpo" or settings["loss_type"] == "simpo":
        lengths = [len(pair["chosen"]), len(pair["rejected"])]
        scores = [x / n for x, n in zip(sums, lengths, strict=True)]
    defaults = {"beta": 0.1, "alpha": 0.0, "simpo_gamma": 0.5, "label_smoothing": 0.0}
    loss, *rewards = called(trainer(**(defaults | settings)), *scores)[:3]
    if name == "orpo":  # the trainer subtracts it
        loss = -loss
    loss.backward()
    return loss.item(), [x.grad.item() for x in sums], [x.item() for x in rewards]


def preference() -> dict[str, Any]:
    lengths = [(5, 7), (8, 3), (4, 4), (1, 6), (9, 8)]
    tokens = {"chosen_tokens": [n for n, _ in lengths], "rejected_tokens": [n for _, n in lengths]}
    pairs = []
    for chosen, rejected in lengths:
        pair = {"chosen": log_probs(chosen), "rejected": log_probs(rejected)}
        for name in ("chosen", "rejected"):
            pair[f"reference_{name}"] = pair[name].sum() + rng.integers(-320, 320) / 64
        pairs.append(pair)
    cases = []
    for settings, other in PREFERENCE:
        run = without_reference if "trainer" in other else dpo
        losses, gradients, rewards = zip(*(run(pair, other) for pair in pairs), strict=True)
        cases.append(
            {"settings": settings, "loss": losses, "gradient": gradients, "reward": rewards}
        )
    return {
        "inputs": {
            "chosen": [pair["chosen"].sum() for pair in pairs],
            "rejected": [pair["rejected"].sum() for pair in pairs],
            "reference_chosen": [pair["reference_chosen"] for pair in pairs],
            "reference_rejected": [pair["reference_rejected"] for pair in pairs],
        },
        "tokens": tokens,
        "cases": cases,
    }


def kto() -> dict[str, Any]:
    desirable = np.array([1, 0, 0, 1, 1, 0], bool)
    sums = 8 * log_probs(6)
    reference = sums + rng.integers(-320, 320, 6) / 64
    mismatched = 8 * log_probs(6)
    cases = []
    for shift in (1.5, -1.5):  # KL is above 0, or clamped
        for settings in (
            {},
            {"beta": 0.5, "desirable_weight": 1.5, "undesirable_weight": 0.5},
            {"kind": "apo_zero_unpaired"},
        ):
            options = {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0, **settings}
            kind = options.pop("kind", "kto")
            tokens = torch.tensor(sums[:, None], dtype=torch.float64, requires_grad=True)

            def model(tokens: torch.Tensor = tokens, **_: Any) -> Any:
                zero = torch.zeros_like(tokens)
                return SimpleNamespace(log_probs=tokens, entropy=zero, mean_logits=zero)

            mask = torch.tensor([[0, 1]] * 6)
            wrong = torch.tensor(mismatched)
            this = trainer(
                loss_type=kind,
                calculate_KL=kind == "kto",
                precompute_ref_logps=True,
                _compute_kl_logps=lambda model, batch, wrong=wrong: wrong,
                **options,
            )
            inputs = {
                "input_ids": mask,
                "attention_mask": mask,
                "completion_mask": mask,
                "label": torch.tensor(desirable),
                "ref_logps": torch.tensor(reference),
                "ref_KL_logps": wrong - shift,
            }
            loss = KTOTrainer._compute_loss(this, model, inputs, False)
            loss.backward()
            cases.append(
                {
                    "settings": settings,
                    "kl": [shift] * 6 if kind == "kto" else None,
                    "loss": loss.item(),
                    "gradient": tokens.grad[:, 0].tolist(),
                }
            )
    return {
        "inputs": {"log_probs": sums.tolist(), "reference": reference.tolist()},
        "desirable": desirable.tolist(),
        "cases": cases,
    }


def grpo() -> dict[str, Any]:
    count, length = 4, 5
    now = log_probs(count, length)
    old = now + rng.integers(-32, 32, (count, length)) / 64
    reference = now + rng.integers(-32, 32, (count, length)) / 64
    mask = np.arange(length) < np.array([[5], [3], [1], [4]])
    advantages = np.array([1.25, -0.75, 0.5, -1.0])
    cases = []
    for settings in GRPO:
        options = {"epsilon": 0.2, "beta": 0.0, "delta": None, **settings}
        tokens = torch.tensor(now, requires_grad=True)
        zero = torch.zeros_like(tokens)
        this = trainer(
            args=SimpleNamespace(delta=options["delta"], use_bias_correction_kl=False),
            loss_type=options["normalization"],
            importance_sampling_level=options["importance_sampling_level"],
            beta=options["beta"],
            epsilon_low=options["epsilon"],
            epsilon_high=options.get("epsilon_high", options["epsilon"]),
            max_completion_length=LONGEST,
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            use_vllm=False,
            _entropy_bonus_enabled=False,
            _get_per_token_logps_and_entropies=lambda *a, found=(tokens, zero, None), **k: found,
        )
        inputs = {
            "prompt_ids": torch.ones(count, 1, dtype=torch.int64),
            "prompt_mask": torch.ones(count, 1, dtype=torch.int64),
            "completion_ids": torch.ones(count, length, dtype=torch.int64),
            "completion_mask": torch.tensor(mask).long(),
            "advantages": torch.tensor(advantages),
            "old_per_token_logps": torch.tensor(old),
            "ref_per_token_logps": torch.tensor(reference),
            "num_items_in_batch": torch.tensor(float(ITEMS)),
        }
        loss = GRPOTrainer._compute_loss(this, this, inputs)
        loss.backward()
        logs = this._metrics["eval"]
        cases.append(
            {
                "settings": settings
                | (
                    {"max_completion_length": LONGEST} if "dr_" in settings["normalization"] else {}
                ),
                "loss": loss.item(),
                "gradient": tokens.grad.tolist(),
                "logs": {
                    "clipped_low": logs["clip_ratio/low_mean"][0],
                    "clipped_high": logs["clip_ratio/high_mean"][0],
                    **({"kl": logs["kl"][0]} if "kl" in logs else {}),
                },
            }
        )
    return {
        "inputs": {"log_probs": now.tolist(), "old_log_probs": old.tolist()},
        "advantages": advantages.tolist(),
        "mask": mask.astype(int).tolist(),
        "reference": reference.tolist(),
        "tokens": ITEMS,
        "cases": cases,
    }


def advantages() -> list[dict[str, Any]]:
    """Runs the part of TRL's method that turns rewards into advantages."""
    lines = inspect.getsource(GRPOTrainer._generate_and_score_completions).splitlines()
    begin = next(i for i, line in enumerate(lines) if "unscorable_mask = " in line)
    end = next(i for i, line in enumerate(lines) if "advantages = torch.nan_to_num" in line)
    code = textwrap.dedent("\n".join(lines[begin : end + 1]))
    cases = []
    for name, rewards in (
        ("all scored", [[0.5, 1.0, -2.0], [1.0, 1.0, 1.0], [3.0, 0.0, 0.25]]),
        ("not all scored", [[0.5, None, -2.0], [None, None, None], [None, 0.0, None]]),
        ("single answers", [[0.5], [1.0]]),
    ):
        values = torch.tensor([[np.nan if x is None else x for x in row] for row in rewards])
        for scale in ("group", "batch", "none"):
            this = SimpleNamespace(
                multi_objective_aggregation="sum_then_normalize",
                scale_rewards=scale,
                reward_weights=torch.ones(1),
            )
            scope = {
                **vars(grpo_trainer),
                "self": this,
                "device": torch.device("cpu"),
                "num_generations": values.shape[1],
                "rewards_per_func": values.reshape(-1, 1),
            }
            exec(code, scope)
            cases.append(
                {
                    "name": name,
                    "rewards": rewards,
                    "scale": scale,
                    "advantages": scope["advantages"].reshape(values.shape).tolist(),
                }
            )
    return cases


def divergence() -> list[dict[str, Any]]:
    random = np.random.default_rng(46)
    student, teacher = (random.integers(-128, 128, (4, 9)) / 32 for _ in range(2))
    cases = []
    for beta in (0, 0.1, 0.5, 1):
        for temperature in (1.0, 2.0):
            settings = {"beta": beta, "temperature": temperature}
            tokens = torch.tensor(student, requires_grad=True)
            loss = GKDTrainer.generalized_jsd_loss(
                tokens, torch.tensor(teacher), **settings, reduction="sum"
            )
            loss.backward()
            cases.append(
                {
                    "settings": settings,
                    "student": student.tolist(),
                    "teacher": teacher.tolist(),
                    "loss": loss.item(),
                    "gradient": tokens.grad.tolist(),
                }
            )
    return cases


def runs() -> dict[str, list[float]]:
    """Returns the losses of 20 steps by family and method, with AdamW and clipped gradients."""
    losses = {}
    for family in trl_runs.CONFIGS:
        for method in ("dpo", "kto"):
            with tempfile.TemporaryDirectory() as folder:
                base = trl_runs.write_model(family, Path(folder) / "base")
                adapter = trl_runs.write_adapter(Path(folder) / "adapter")
                model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
                add_fused_lm_head(model, outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
                model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
                losses[f"{family} {method}"] = steps(model, method)
    return losses


def steps(model: Any, method: str) -> list[float]:
    this = trainer(
        ref_model=None,
        precompute_ref_logps=False,
        beta=trl_runs.BETA,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None, discopop_tau=0.05),
        ld_alpha=None,
        use_weighting=False,
        loss_types=["sigmoid"],
        loss_weights=[1.0],
        label_smoothing=0.0,
        f_divergence_type="reverse_kl",
        loss_type="kto",
        calculate_KL=True,
        desirable_weight=1.0,
        undesirable_weight=1.0,
        _tp_size=1,
    )
    this.accelerator.unwrap_model = lambda model: model
    this.model = model
    this._compute_kl_logps = lambda model, batch: KTOTrainer._compute_kl_logps(this, model, batch)
    weights = [x for x in model.parameters() if x.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=trl_runs.RATE, weight_decay=0.0)
    losses = []
    for batch in trl_runs.records():
        prompts = [row["prompt"] for row in batch]
        answers = [[row[name] for row in batch] for name in ("chosen", "rejected")]
        if method == "dpo":
            inputs = named(prompts * 2, answers[0] + answers[1])
            loss = DPOTrainer._compute_loss(this, model, inputs, False)
        else:
            inputs = named(prompts, answers[0])
            others = named(prompts, [answers[0][-1], *answers[0][:-1]])
            inputs |= {f"KL_{name}": x for name, x in others.items()}
            inputs["label"] = torch.tensor([row["label"] for row in batch])
            loss = KTOTrainer._compute_loss(this, model, inputs, False)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, trl_runs.CLIP)
        optimizer.step()
        losses.append(loss.item())
    return losses


def named(prompts: list[list[int]], answers: list[list[int]]) -> dict[str, torch.Tensor]:
    names = ("input_ids", "attention_mask", "completion_mask")
    parts = trl_runs.rows_of(prompts, answers)
    return {name: torch.tensor(x).long() for name, x in zip(names, parts, strict=True)}


def rounded(value: Any) -> Any:
    """Returns nine digits of each number, which is more than float32 has."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    return [rounded(part) for part in value] if isinstance(value, list | tuple) else value


def main() -> None:
    content = {
        "version": trl.__version__,
        "preference": preference(),
        "kto": kto(),
        "grpo": grpo(),
        "advantages": advantages(),
        "divergence": divergence(),
        "runs": runs(),
    }
    OUT.write_text(json.dumps(rounded(content)) + "\n")
    print(OUT, OUT.stat().st_size)


if __name__ == "__main__":
    main()
